//! The index of a page store under loom: lookups and loads beside stores that evict, log and use slots again.

use crate::index::PageIndex;
use crate::key::PageKey;
use crate::record::PageRecord;
use crate::shared_index::SharedIndex;
use loom::cell::UnsafeCell;
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;
use nvme_tests::model::{Bound, check};
use std::sync::Arc;

/// A slot, which holds the generation that was written last.
struct Slot {
    generation: AtomicU64,
    /// Read beside each load of the generation, written beside each store: the model fails when the two race.
    bytes: UnsafeCell<()>,
}

/// A store without a drive.
struct Pages {
    index: SharedIndex<()>,
    /// The journal's lock, and slots whose freeing it says.
    journal: Mutex<Vec<u32>>,
    slots: Vec<Slot>,
}

fn key(number: u8) -> PageKey {
    PageKey([number; PageKey::BYTES])
}

fn record(number: u8, slot: u32, generation: u64) -> PageRecord {
    PageRecord {
        key: key(number),
        generation,
        checksum: 0,
        slot,
        length: 1,
    }
}

impl Pages {
    /// Makes a store whose slot N holds the page N of generation 1, for each N below `pages`.
    fn new(pages: u8) -> Arc<Self> {
        let mut index = PageIndex::new(pages.into(), 0);
        for number in 0..pages {
            index.restore(&record(number, number.into(), 1), 1).unwrap();
        }
        index.restored();
        let slot = |_| Slot {
            generation: AtomicU64::new(1),
            bytes: UnsafeCell::new(()),
        };
        Arc::new(Self {
            index: SharedIndex::new(index),
            journal: Mutex::new(Vec::new()),
            slots: (0..pages).map(slot).collect(),
        })
    }

    /// Stores a page, in place of the one that was not used for longest; returns false without a slot for it.
    fn store(&self, number: u8, generation: u64) -> bool {
        let mut journal = self.journal.lock().unwrap();
        self.index.lock().index.evict();
        let freed = self.index.lock().index.begin_logging();
        journal.extend(freed.iter().map(|record| record.slot));
        let reserved = {
            let mut index = self.index.lock();
            index.index.end_logging();
            index.index.reserve(key(number))
        };
        let Some(slot) = reserved else {
            return false;
        };
        let logged = journal.iter().position(|freed| *freed == slot);
        journal.swap_remove(logged.expect("the freeing of a slot in use is logged"));
        drop(journal);
        let written = &self.slots[slot as usize];
        written.bytes.with_mut(|_| ());
        written.generation.store(generation, Ordering::Relaxed);
        let _journal = self.journal.lock().unwrap();
        let record = record(number, slot, generation);
        self.index.lock().index.commit(&record);
        true
    }

    /// Reads the slot of a pinned page.
    fn read(&self, record: &PageRecord) -> u64 {
        let slot = &self.slots[record.slot as usize];
        slot.bytes.with(|_| ());
        slot.generation.load(Ordering::Relaxed)
    }

    /// Loads a page; returns its generation.
    fn load(&self, number: u8) -> Option<u64> {
        let record = self.index.lock().index.pin(&key(number))?;
        let found = self.read(&record);
        assert_eq!(found, record.generation, "the page of another record");
        self.index.lock().index.unpin(record.slot);
        Some(found)
    }

    fn remove(&self, number: u8) -> bool {
        self.index.lock().index.remove(&key(number))
    }
}

#[test]
fn a_pinned_page_stays() {
    check(
        "a slot is not written while a load reads it, and a load gets the page of its record",
        Bound::Exhaustive,
        || {
            let pages = Pages::new(1);
            let other = pages.clone();
            let storer = thread::spawn(move || other.store(1, 2));
            let loaded = (pages.load(0), pages.load(1));
            let stored = storer.join().unwrap();
            assert!(matches!(loaded, (None | Some(1), None | Some(2))));
            // Not evicted only while it was pinned.
            assert!(stored || loaded.0.is_some());
            assert_eq!(pages.load(1), stored.then_some(2));
        },
    );
}

#[test]
fn a_page_that_is_removed_while_it_is_pinned_keeps_its_slot() {
    check(
        "the slot of a removed page is used again only after its last load",
        Bound::Exhaustive,
        || {
            let pages = Pages::new(2);
            let other = pages.clone();
            let storer = thread::spawn(move || {
                assert!(other.remove(0));
                other.store(2, 2)
            });
            let loaded = (pages.load(0), pages.load(2));
            assert!(matches!(loaded, (None | Some(1), None | Some(2))));
            // The other page makes room for it in any case.
            assert!(storer.join().unwrap());
            assert_eq!((pages.load(0), pages.load(2)), (None, Some(2)));
        },
    );
}

#[test]
fn a_load_that_fails_late_drops_only_its_own_page() {
    check(
        "a late failure of a page does not drop the next page of its key",
        Bound::Exhaustive,
        || {
            let pages = Pages::new(1);
            let other = pages.clone();
            let storer = thread::spawn(move || other.remove(0) && other.store(0, 2));
            let record = pages.index.lock().index.pin(&key(0));
            let dropped = record.and_then(|record| {
                pages.read(&record);
                pages.index.lock().index.unpin(record.slot);
                let mut index = pages.index.lock();
                let is_dropped = index.index.forget(&record.key, record.generation);
                is_dropped.then_some(record.generation)
            });
            let stored = storer.join().unwrap();
            if stored {
                assert_eq!(pages.load(0), (dropped != Some(2)).then_some(2));
            }
            // Whatever was first, the slot is not lost.
            assert!(stored || pages.store(0, 3));
        },
    );
}

#[test]
fn a_page_that_dies_while_the_journal_is_written_is_logged_next() {
    check(
        "a slot is used again only after its freeing was logged",
        Bound::Exhaustive,
        || {
            let pages = Pages::new(3);
            let other = pages.clone();
            let remover = thread::spawn(move || other.remove(2));
            assert!(pages.store(3, 2));
            assert!(remover.join().unwrap());
            // `store` looks for each slot in the journal.
            assert!(pages.store(4, 3) && pages.store(5, 4));
            assert!(
                [3, 4, 5]
                    .iter()
                    .filter(|one| pages.load(**one).is_some())
                    .count()
                    >= 2
            );
        },
    );
}
