//! Lookups and loads while another call waits for the drive.

use crate::disk::MemoryDisk;
use crate::{PAGE, bytes_for, key, load, payload, request};
use nvme_driver::error::Result;
use nvme_kv::{BlockMedium, PageStore, StoreOutcome};
use nvme_store::StoreTransfer;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

#[derive(Default)]
struct GateState {
    is_closed: bool,
    waiting: u32,
    gave_up: bool,
}

/// Holds writes of the journal while it is closed.
#[derive(Default)]
struct JournalGate {
    state: Mutex<GateState>,
    changed: Condvar,
}

impl JournalGate {
    fn change(&self, change: impl FnOnce(&mut GateState)) {
        change(&mut self.state.lock().unwrap());
        self.changed.notify_all();
    }

    fn pass(&self) {
        self.change(|state| state.waiting += 1);
        let limit = Duration::from_secs(20);
        let waited = self
            .changed
            .wait_timeout_while(self.state.lock().unwrap(), limit, |state| state.is_closed);
        let (mut state, waited) = waited.unwrap();
        state.waiting -= 1;
        state.gave_up |= waited.timed_out();
    }

    fn wait_for_a_writer(&self) {
        let limit = Duration::from_secs(20);
        let waited = self
            .changed
            .wait_timeout_while(self.state.lock().unwrap(), limit, |state| {
                state.waiting == 0
            });
        assert!(!waited.unwrap().1.timed_out(), "the journal is not written");
    }
}

/// A disk whose journal is slow.
struct SlowJournal(MemoryDisk, Arc<JournalGate>);

impl BlockMedium for SlowJournal {
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn block_bytes(&self) -> u32 {
        self.0.block_bytes()
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        self.0.read_at(offset, data)
    }

    fn transfer_all(&self, transfers: &mut [StoreTransfer<'_>]) -> Vec<Result<()>> {
        self.0.transfer_all(transfers)
    }

    fn write_durable(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.1.pass();
        self.0.write_durable(offset, data)
    }

    fn flush(&self) -> Result<()> {
        self.0.flush()
    }
}

/// Runs `looked_up` while `writing` waits for the journal.
fn during(
    writing: impl FnOnce(&PageStore<SlowJournal>) + Send,
    looked_up: impl FnOnce(&PageStore<SlowJournal>),
) -> PageStore<SlowJournal> {
    let gate = Arc::new(JournalGate::default());
    let disk = MemoryDisk::new(bytes_for(8) as usize, 1);
    let medium = SlowJournal(disk, Arc::clone(&gate));
    let store = PageStore::format(medium, &request(bytes_for(8))).unwrap();
    for number in 0..4 {
        let stored = store.store(key(&store, number), &payload(number, 0));
        assert_eq!(stored.unwrap(), StoreOutcome::Stored);
    }
    gate.change(|state| state.is_closed = true);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| writing(&store));
        gate.wait_for_a_writer();
        looked_up(&store);
        gate.change(|state| state.is_closed = false);
        writer.join().unwrap();
    });
    assert!(
        !gate.state.lock().unwrap().gave_up,
        "a lookup waited for the journal"
    );
    store
}

fn look_up(store: &PageStore<SlowJournal>) {
    let keys: Vec<_> = (0..6).map(|number| key(store, number)).collect();
    assert!(store.contains(&keys[1]) && !store.contains(&keys[5]));
    assert_eq!(store.lengths(&keys)[1], Some(payload(1, 0).len() as u32));
    store.touch(&keys[..2]);
    let pins = store.pin_prefix(&keys[1..]);
    assert_eq!(pins.len(), 3);
    assert_eq!(load(store, 2).unwrap(), payload(2, 0));
    let present = store.store(keys[3], &payload(3, 0));
    assert_eq!(present.unwrap(), StoreOutcome::Present);
    drop(pins);
    assert!(store.stats().loaded > 0);
}

#[test]
fn lookups_and_loads_do_not_wait_for_a_commit() {
    let commit = |store: &PageStore<SlowJournal>| {
        let stored = store.store(key(store, 5), &payload(5, 0));
        assert_eq!(stored.unwrap(), StoreOutcome::Stored);
    };
    let store = during(commit, look_up);
    assert_eq!(load(&store, 5).unwrap(), payload(5, 0));
}

#[test]
fn lookups_and_loads_do_not_wait_for_a_checkpoint_or_a_removal() {
    during(|store| store.checkpoint().unwrap(), look_up);
    let store = during(
        |store| assert_eq!(store.remove(&[key(store, 0)]).unwrap(), 1),
        look_up,
    );
    assert!(!store.contains(&key(&store, 0)));
}

/// A page that dies while the journal is written is not in that write: its slot stays until the next one.
#[test]
fn a_page_that_is_removed_during_a_commit_is_removed_after_a_restart() {
    let gate = Arc::new(JournalGate::default());
    let disk = MemoryDisk::new(bytes_for(8) as usize, 1);
    let medium = SlowJournal(disk.clone(), Arc::clone(&gate));
    let store = PageStore::format(medium, &request(bytes_for(8))).unwrap();
    for number in 0..8 {
        store
            .store(key(&store, number), &payload(number, 0))
            .unwrap();
    }
    gate.change(|state| state.is_closed = true);
    std::thread::scope(|scope| {
        let remove = |number| {
            scope.spawn({
                let store = &store;
                move || assert_eq!(store.remove(&[key(store, number)]).unwrap(), 1)
            })
        };
        let first = remove(0);
        gate.wait_for_a_writer();
        let second = remove(1);
        while store.contains(&key(&store, 1)) {
            std::thread::yield_now();
        }
        gate.change(|state| state.is_closed = false);
        first.join().unwrap();
        second.join().unwrap();
    });
    drop(store);
    let store = PageStore::open(disk, &request(bytes_for(8))).unwrap();
    let found: Vec<_> = (0..8)
        .filter(|number| store.contains(&key(&store, *number)))
        .collect();
    assert_eq!(found, [2, 3, 4, 5, 6, 7]);
    let mut page = vec![0; PAGE];
    assert!(store.load(key(&store, 2), &mut page).is_ok());
}
