use super::*;

fn record(key: u8, slot: u32, generation: u64) -> PageRecord {
    PageRecord {
        key: PageKey([key; PageKey::BYTES]),
        generation,
        checksum: 0,
        slot,
        length: 1,
    }
}

/// An index whose `pages` slots hold pages of the keys 0, 1, ..., and `free` free ones.
fn filled(pages: u8, free: u32) -> PageIndex {
    let mut index = PageIndex::new(u32::from(pages) + free, 0);
    for key in 0..pages {
        index.restore(&record(key, key.into(), 1), 1).unwrap();
    }
    index.restored();
    index
}

fn keys(index: &PageIndex) -> Vec<u8> {
    index.snapshot().iter().map(|one| one.key.0[0]).collect()
}

#[test]
fn the_page_that_was_not_used_for_longest_makes_room() {
    let mut index = filled(4, 0);
    index.touch(&record(0, 0, 0).key);
    index.touch(&record(2, 0, 0).key);
    assert_eq!(keys(&index), [1, 3, 0, 2]);
    assert!(index.evict() && index.evict());
    assert_eq!(keys(&index), [0, 2]);
}

#[test]
fn pinned_pages_stay_and_each_pin_counts() {
    let mut index = filled(2, 0);
    let key = record(0, 0, 0).key;
    index.pin(&key).unwrap();
    index.pin(&key).unwrap();
    assert!(index.evict());
    assert!(!index.evict());
    index.unpin(0);
    assert!(!index.evict());
    assert!(index.contains(&key));
    index.unpin(0);
    assert!(index.evict());
}

#[test]
fn a_slot_is_free_when_that_is_logged_and_no_one_reads_it() {
    let mut index = filled(1, 0);
    let key = record(0, 0, 0).key;
    index.pin(&key).unwrap();
    assert!(index.remove(&key));
    assert!(!index.contains(&key));
    assert_eq!((index.free(), index.dead()), (0, 0));
    assert_eq!(index.begin_logging().len(), 1);
    index.end_logging();
    assert_eq!(index.free(), 0);
    index.unpin(0);
    assert_eq!(index.free(), 1);
}

#[test]
fn what_dies_during_a_write_of_the_journal_is_logged_by_the_next() {
    let mut index = filled(2, 0);
    assert!(index.remove(&record(0, 0, 0).key));
    assert_eq!(index.begin_logging(), [record(0, 0, 1)]);
    assert!(index.remove(&record(1, 0, 0).key));
    index.end_logging();
    assert_eq!((index.free(), index.dead()), (1, 1));
    // A write that failed: its records are in the next one too.
    assert_eq!(index.begin_logging(), [record(1, 1, 1)]);
    assert_eq!(index.begin_logging(), [record(1, 1, 1)]);
    index.end_logging();
    assert_eq!((index.free(), index.dead()), (2, 0));
    index.end_logging();
    assert_eq!(index.free(), 2);
}

#[test]
fn a_slot_whose_page_was_not_committed_is_used_last() {
    let mut index = filled(0, 3);
    let key = record(9, 0, 0).key;
    assert_eq!(index.reserve(key), Some(0));
    assert!(index.is_saving(&key));
    index.release(0);
    assert!(!index.is_saving(&key));
    let order = [index.reserve(key), index.reserve(key), index.reserve(key)];
    assert_eq!(order, [Some(1), Some(2), Some(0)]);
}

#[test]
fn a_page_is_forgotten_only_if_it_is_still_the_one_that_was_read() {
    let mut index = filled(1, 0);
    let key = record(0, 0, 0).key;
    assert!(!index.forget(&key, 2));
    assert!(index.forget(&key, 1));
    assert!(!index.forget(&key, 1));
}

#[test]
fn records_that_contradict_each_other_are_refused() {
    let mut index = filled(2, 1);
    let long = PageRecord {
        length: 2,
        ..record(7, 2, 1)
    };
    let empty = PageRecord { length: 0, ..long };
    for wrong in [
        record(7, 3, 1),
        record(7, 0, 1),
        record(0, 2, 1),
        long,
        empty,
    ] {
        index.restore(&wrong, 1).unwrap_err();
    }
    for wrong in [
        record(0, 0, 2),
        record(0, 1, 1),
        record(7, 2, 1),
        record(7, 9, 1),
    ] {
        index.restore_free(&wrong).unwrap_err();
    }
    index.restore_free(&record(0, 0, 1)).unwrap();
    assert_eq!(keys(&index), [1]);
}
