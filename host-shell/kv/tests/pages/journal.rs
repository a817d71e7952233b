//! The journal on the drive: owners, damage, and what opening makes of it.

use crate::disk::{MemoryDisk, WriteFault};
use crate::{bytes_for, key, load, payload, request};
use nvme_kv::format::{
    CheckpointHeader, LogBlock, LogRecord, PageRecord, RecordKind, StructureBlock, SuperBlock,
    UNIT, VERSION, seal,
};
use nvme_kv::{AreaRequest, BlockMedium, KvError, ModelFingerprint, PageStore, StoreOutcome};

const SLOTS: u64 = 8;

fn disk() -> (MemoryDisk, AreaRequest) {
    let bytes = bytes_for(SLOTS);
    (MemoryDisk::new(bytes as usize, 1), request(bytes))
}

fn put(store: &PageStore<MemoryDisk>, number: u64) -> nvme_kv::Result<StoreOutcome> {
    store.store(key(store, number), &payload(number, 0))
}

/// A disk whose store holds the pages 0 to `pages`, each with a block of the log.
fn filled(pages: u64) -> (MemoryDisk, AreaRequest, PageStore<MemoryDisk>) {
    let (disk, request) = disk();
    let store = PageStore::format(disk.clone(), &request).unwrap();
    (0..pages).for_each(|number| assert_eq!(put(&store, number).unwrap(), StoreOutcome::Stored));
    (disk, request, store)
}

fn block(disk: &MemoryDisk, at: u64) -> StructureBlock {
    let mut block = [0; UNIT as usize];
    disk.read_at(at, &mut block).unwrap();
    block
}

fn change(disk: &MemoryDisk, at: u64, change: impl FnOnce(&mut StructureBlock)) {
    let mut block = block(disk, at);
    change(&mut block);
    disk.corrupt(at, |bytes| bytes[..UNIT as usize].copy_from_slice(&block));
}

fn open(disk: &MemoryDisk, request: &AreaRequest) -> nvme_kv::Result<PageStore<MemoryDisk>> {
    PageStore::open(disk.clone(), request)
}

fn error(disk: &MemoryDisk, request: &AreaRequest) -> KvError {
    open(disk, request).err().expect("it does not open")
}

#[test]
fn an_owner_is_superseded_by_the_next_one() {
    let (disk, request, first) = filled(2);
    let second = open(&disk, &request).unwrap();
    let error = put(&first, 5).unwrap_err();
    assert!(
        matches!(
            error,
            KvError::Superseded {
                own: 1,
                by: Some(2)
            }
        ),
        "{error}"
    );
    assert!(matches!(
        first.checkpoint(),
        Err(KvError::Superseded { .. })
    ));
    assert!(matches!(
        first.remove(&[key(&first, 0)]),
        Err(KvError::Superseded { .. })
    ));
    // Also once the second one has gone on to the other half, and back.
    for _ in 0..3 {
        second.checkpoint().unwrap();
        assert!(matches!(put(&first, 5), Err(KvError::Superseded { .. })));
    }
    assert_eq!(put(&second, 5).unwrap(), StoreOutcome::Stored);
    let third = open(&disk, &request).unwrap();
    assert_eq!(third.recovery().pages, 3);
}

/// Two servers of two models with one area: the first one says that nothing is stored, and spoils nothing.
#[test]
fn an_owner_is_superseded_by_one_that_formats() {
    let (disk, request, first) = filled(2);
    let other = AreaRequest {
        fingerprint: ModelFingerprint {
            model: "another".into(),
            ..request.fingerprint.clone()
        },
        ..request
    };
    let (second, formatted) = PageStore::open_or_format(disk.clone(), &other).unwrap();
    assert!(matches!(formatted, Some(KvError::OtherModel { .. })));
    let check = |result: nvme_kv::Result<()>| {
        let error = result.unwrap_err();
        let is_formatted = matches!(error, KvError::Superseded { own: 1, by: None });
        assert!(is_formatted, "{error}");
        assert_eq!(error.code(), "changed");
        assert!(
            error
                .to_string()
                .starts_with("the area of the page store was formatted"),
            "{error}"
        );
    };
    for round in 0..3 {
        check(first.remove(&[key(&first, round)]).map(drop));
        check(first.checkpoint());
        check(put(&first, 5 + round).map(drop));
        assert_eq!(put(&second, round).unwrap(), StoreOutcome::Stored);
        second.checkpoint().unwrap();
    }
    let second = open(&disk, &other).unwrap();
    assert!(!second.recovery().fell_back);
    assert_eq!(second.recovery().pages, 3);
}

/// A formatting that was interrupted before its journal was made has taken the area, too.
#[test]
fn an_owner_is_superseded_by_a_formatting_that_does_not_end() {
    let (disk, request, first) = filled(2);
    // Both superblocks are written, and then the power is cut.
    disk.cut_after(2);
    assert!(PageStore::format(disk.clone(), &request).is_err());
    disk.restart();
    assert!(matches!(
        put(&first, 5),
        Err(KvError::Superseded { own: 1, by: None })
    ));
    assert!(matches!(error(&disk, &request), KvError::Blank { .. }));
}

/// Superblocks of md, bcache, btrfs and ZFS have zeros before them.
#[test]
fn data_of_others_behind_zeros_are_left_alone() {
    let (_, request) = disk();
    for at in [512, UNIT, UNIT + 512, 2 * UNIT, 64 << 10, request.bytes - 8] {
        let (disk, request) = self::disk();
        disk.corrupt(at, |bytes| bytes[..8].copy_from_slice(b"a volume"));
        let opened = PageStore::open_or_format(disk.clone(), &request);
        // The second block alone may be what is left of the first write of a superblock.
        if at == UNIT + 512 {
            assert!(matches!(opened.unwrap().1, Some(KvError::Blank { .. })));
            continue;
        }
        let refused = opened.err().unwrap();
        assert!(
            matches!(refused, KvError::Foreign { offset: 0 }),
            "{at}: {refused}"
        );
        disk.corrupt(at, |bytes| assert_eq!(&bytes[..8], b"a volume"));
        drop(PageStore::format(disk, &request).unwrap());
    }
}

/// A drive or file system that fails for a moment loses no store.
#[test]
fn what_cannot_be_read_is_not_formatted() {
    let (disk, request, store) = filled(3);
    store.checkpoint().unwrap();
    let layout = store.layout();
    drop(store);
    let entries = |half| layout.checkpoint_at(half) + UNIT..layout.checkpoint_at(half) + UNIT + 1;
    let headers = |half| layout.checkpoint_at(half)..layout.checkpoint_at(half) + 1;
    for unreadable in [
        [0..UNIT, UNIT..2 * UNIT],
        [headers(0), headers(1)],
        [headers(0), entries(1)],
    ] {
        disk.repair();
        unreadable.iter().for_each(|range| disk.wear(range.clone()));
        for opened in [
            open(&disk, &request).map(drop),
            PageStore::open_or_format(disk.clone(), &request).map(drop),
        ] {
            let error = opened.unwrap_err();
            assert!(
                matches!(error, KvError::Drive { .. }),
                "{unreadable:?}: {error}"
            );
        }
        disk.repair();
        let (store, formatted) = PageStore::open_or_format(disk.clone(), &request).unwrap();
        assert!(formatted.is_none(), "{unreadable:?}");
        (0..3).for_each(|number| assert_eq!(load(&store, number).unwrap(), payload(number, 0)));
    }
    // Nor are data of others whose beginning cannot be read, by a second block that seems damaged.
    let (disk, request, _) = filled(1);
    change(&disk, UNIT, |block| block[100] ^= 1);
    disk.wear(0..1);
    let refused = PageStore::open_or_format(disk, &request).err().unwrap();
    assert!(matches!(refused, KvError::Drive { .. }), "{refused}");
}

#[test]
fn a_blank_area_and_data_of_others_are_told_apart() {
    let (disk, request) = disk();
    assert!(matches!(
        error(&disk, &request),
        KvError::Blank { offset: 0 }
    ));
    disk.corrupt(0, |bytes| bytes[..8].copy_from_slice(b"EFI PART"));
    assert!(matches!(
        error(&disk, &request),
        KvError::Foreign { offset: 0 }
    ));
    let refused = PageStore::open_or_format(disk.clone(), &request)
        .err()
        .unwrap();
    assert!(matches!(refused, KvError::Foreign { .. }));
    assert_eq!(&block(&disk, 0)[..8], b"EFI PART");
}

#[test]
fn a_later_version_is_refused_and_left_alone() {
    let (disk, request, _) = filled(1);
    for copy in [0, UNIT] {
        change(&disk, copy, |block| {
            block[8] = 2;
            seal(block);
        });
    }
    let refused = PageStore::open_or_format(disk.clone(), &request)
        .err()
        .unwrap();
    let text =
        format!("the page store at byte 0 has format 2, and this program reads format {VERSION}");
    assert_eq!(refused.to_string(), text);
}

#[test]
fn either_superblock_is_enough_and_the_other_is_mended() {
    for copy in [0, UNIT] {
        let (disk, request, _) = filled(2);
        change(&disk, copy, |block| block[100] ^= 1);
        assert!(SuperBlock::parse(&block(&disk, copy)).is_none());
        let store = open(&disk, &request).unwrap();
        assert_eq!(load(&store, 1).unwrap(), payload(1, 0));
        assert!(SuperBlock::parse(&block(&disk, copy)).is_some());
    }
    let (disk, request, _) = filled(2);
    for copy in [0, UNIT] {
        change(&disk, copy, |block| block[100] ^= 1);
    }
    let refused = error(&disk, &request).to_string();
    assert_eq!(
        refused,
        "the superblock at byte 0 is damaged: its checksum is not that of its content"
    );
    let (store, why) = PageStore::open_or_format(disk, &request).unwrap();
    assert!(matches!(why, Some(KvError::Damaged { .. })));
    assert_eq!(store.stats().pages, 0);
}

/// What a superblock says is refused by the rule that it breaks, although its checksum is right.
#[test]
fn superblocks_that_no_program_writes_are_refused() {
    for (at, value, rule) in [
        (12, 7, "its state is neither ready nor formatting"),
        (39, 1, "its parts do not fit into its area"),
        (43, 0xFF, "its parts do not fit into its area"),
        (47, 0xFF, "its parts do not fit into its area"),
        (51, 0xFF, "its parts do not fit into its area"),
        (54, 0xFF, "its fingerprint is not that of its digest"),
        (57, 0xFF, "its fingerprint is not that of its digest"),
        (4080, 1, "reserved bytes of it are not zero"),
    ] {
        let (disk, request, _) = filled(1);
        for copy in [0, UNIT] {
            change(&disk, copy, |block| {
                block[at] = match at {
                    39 => 0,
                    _ => value,
                };
                // The area is made smaller than its parts.
                if at == 39 {
                    block[32..40].fill(0);
                }
                seal(block);
            });
        }
        let refused = error(&disk, &request).to_string();
        assert!(refused.ends_with(rule), "{at}: {refused}");
    }
}

#[test]
fn a_damaged_checkpoint_loses_nothing() {
    for place in [0, UNIT] {
        let (disk, request, store) = filled(3);
        // The newest checkpoint is in half 1, with changes in its log.
        store.checkpoint().unwrap();
        put(&store, 3).unwrap();
        store.remove(&[key(&store, 0)]).unwrap();
        let layout = store.layout();
        drop(store);
        // Opening writes both checkpoints again: the newest is in half 0 then, and is damaged next.
        for half in [1, 0] {
            change(&disk, layout.checkpoint_at(half) + place, |block| {
                block[20] ^= 4
            });
            let store = open(&disk, &request).unwrap();
            assert!(store.recovery().fell_back, "{place} {half}");
            assert!(load(&store, 0).unwrap_err().is_miss());
            for number in 1..4 {
                assert_eq!(load(&store, number).unwrap(), payload(number, 0));
            }
            drop(store);
            let store = open(&disk, &request).unwrap();
            assert!(!store.recovery().fell_back);
            assert_eq!(store.recovery().pages, 3);
        }
    }
}

#[test]
fn without_a_whole_checkpoint_the_journal_is_damaged() {
    let (disk, request, store) = filled(3);
    store.checkpoint().unwrap();
    let layout = store.layout();
    drop(store);
    for half in 0..2 {
        change(&disk, layout.checkpoint_at(half), |block| block[20] ^= 4);
    }
    let refused = error(&disk, &request);
    assert!(
        matches!(
            refused,
            KvError::Damaged {
                structure: "the journal",
                ..
            }
        ),
        "{refused}"
    );
}

/// The log ends at the first block that is not whole; those behind it are counted, and their pages missing.
#[test]
fn a_log_is_read_up_to_its_first_damaged_block() {
    let (disk, request, store) = filled(6);
    let layout = store.layout();
    drop(store);
    change(&disk, layout.log_at(0, 2), |block| block[3000] ^= 1);
    let store = open(&disk, &request).unwrap();
    let report = store.recovery();
    assert_eq!(
        (report.pages, report.log_blocks, report.lost_blocks),
        (2, 2, 3)
    );
    for number in 0..6 {
        match load(&store, number) {
            Ok(bytes) => assert!(number < 2 && bytes == payload(number, 0)),
            Err(error) => assert!(number >= 2 && matches!(error, KvError::Missing { .. })),
        }
    }
    // What is written there now is not followed by the old blocks.
    drop(store);
    let store = open(&disk, &request).unwrap();
    assert_eq!(
        (store.recovery().pages, store.recovery().log_blocks),
        (2, 3)
    );
}

#[test]
fn a_block_of_the_log_that_cannot_be_read_ends_it() {
    let (disk, request, store) = filled(4);
    let at = store.layout().log_at(0, 3);
    drop(store);
    disk.wear(at..at + 1);
    let store = open(&disk, &request).unwrap();
    assert_eq!(store.recovery().pages, 3);
    assert_eq!(put(&store, 7).unwrap(), StoreOutcome::Stored);
}

/// The journal continues in the other half when an append fails, whether or not it arrives later.
#[test]
fn an_append_that_failed_counts_neither_now_nor_later() {
    for fault in [WriteFault::Failed, WriteFault::Late, WriteFault::Torn] {
        let (disk, request, store) = filled(2);
        let log = store.layout().log_at(0, 2);
        disk.fault(log..log + UNIT, 1, fault);
        assert!(matches!(put(&store, 2), Err(KvError::Drive { .. })));
        assert!(matches!(load(&store, 2), Err(KvError::Missing { .. })));
        assert_eq!(put(&store, 3).unwrap(), StoreOutcome::Stored);
        disk.arrive();
        let store = open(&disk, &request).unwrap();
        assert!(matches!(load(&store, 2), Err(KvError::Missing { .. })));
        for number in [0, 1, 3] {
            assert_eq!(load(&store, number).unwrap(), payload(number, 0));
        }
    }
}

#[test]
fn a_checkpoint_that_failed_spoils_nothing() {
    let (disk, request, store) = filled(2);
    let at = store.layout().checkpoint_at(1);
    disk.fault(at..at + 2 * UNIT, 3, WriteFault::Torn);
    for _ in 0..3 {
        assert!(matches!(store.checkpoint(), Err(KvError::Drive { .. })));
    }
    assert_eq!(put(&store, 2).unwrap(), StoreOutcome::Stored);
    let store = open(&disk, &request).unwrap();
    (0..3).for_each(|number| assert_eq!(load(&store, number).unwrap(), payload(number, 0)));
}

/// Writes a block of the log behind those of the journal, with right checksums and these records.
fn forge(disk: &MemoryDisk, store: PageStore<MemoryDisk>, records: Vec<LogRecord>) {
    let layout = store.layout();
    let last = LogBlock::parse(&block(disk, layout.log_at(0, 0))).unwrap();
    let (first, sum) = last;
    let forged = LogBlock {
        sequence: first.sequence + 1,
        previous: sum,
        records,
        ..first
    };
    disk.corrupt(layout.log_at(0, 1), |bytes| {
        bytes[..UNIT as usize].copy_from_slice(&forged.to_block());
    });
}

#[test]
fn records_that_contradict_the_index_are_damage() {
    let (disk, _, store) = filled(1);
    let there = LogBlock::parse(&block(&disk, store.layout().log_at(0, 0)))
        .unwrap()
        .0
        .records[0]
        .page;
    let other = key(&store, 9);
    let commit = |page| LogRecord {
        kind: RecordKind::Commit,
        page,
    };
    let free = |page| LogRecord {
        kind: RecordKind::Free,
        page,
    };
    let moved = |slot| PageRecord {
        slot,
        key: other,
        ..there
    };
    for (record, rule) in [
        (
            commit(there),
            "a record commits a page to a slot that holds one",
        ),
        (
            commit(PageRecord { slot: 3, ..there }),
            "a record commits a page whose key is there",
        ),
        (
            commit(moved(u32::MAX)),
            "a record names a slot that does not exist",
        ),
        (
            commit(PageRecord {
                length: u32::MAX,
                ..moved(3)
            }),
            "a record names a page of a length that does not fit into a slot",
        ),
        (free(moved(3)), "a record frees a page that is not there"),
        (
            free(PageRecord {
                generation: 0,
                ..there
            }),
            "a record frees a page that is not there",
        ),
    ] {
        let (disk, request, store) = filled(1);
        // Keys of one fingerprint are the same in every store.
        forge(&disk, store, vec![record]);
        let refused = error(&disk, &request).to_string();
        assert!(
            refused.starts_with("the log at byte") && refused.ends_with(rule),
            "{refused}"
        );
    }
}

#[test]
fn checkpoints_of_impossible_sizes_are_not_used() {
    for (at, value) in [(56usize, 0u8), (59, 0xFF), (63, 0xFF)] {
        let (disk, request, store) = filled(1);
        let place = store.layout().checkpoint_at(0);
        drop(store);
        change(&disk, place, |block| {
            block[at] = value;
            seal(block);
        });
        let header = CheckpointHeader::parse(&block(&disk, place)).unwrap();
        assert!(header.epoch != 1 || header.count != 0);
        assert!(
            matches!(error(&disk, &request), KvError::Damaged { .. }),
            "{at}"
        );
    }
}

/// The order of use outlives a restart.
#[test]
fn the_oldest_page_makes_room_also_after_a_restart() {
    let (disk, request, store) = filled(SLOTS);
    for number in [0, 1] {
        load(&store, number).unwrap();
    }
    store.checkpoint().unwrap();
    let store = open(&disk, &request).unwrap();
    put(&store, 100).unwrap();
    assert!(load(&store, 2).unwrap_err().is_miss());
    (0..2).for_each(|number| assert_eq!(load(&store, number).unwrap(), payload(number, 0)));
    assert_eq!(store.stats().evicted, 1);
}

#[test]
fn a_store_that_was_cleared_is_empty_and_usable() {
    let (disk, request, store) = filled(SLOTS);
    store.clear().unwrap();
    assert!((0..SLOTS).all(|number| !store.contains(&key(&store, number))));
    let store = open(&disk, &request).unwrap();
    assert_eq!(store.stats().pages, 0);
    (0..SLOTS).for_each(|number| assert_eq!(put(&store, number).unwrap(), StoreOutcome::Stored));
}
