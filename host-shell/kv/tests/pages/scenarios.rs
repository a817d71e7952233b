//! Corruption that users of other stores reported, step by step, and its right result here. The numbers are those of
//! the projects' issues.

use crate::disk::{MemoryDisk, WriteFault};
use crate::{PAGE, bytes_for, fingerprint, key, load, payload, request};
use nvme_kv::{
    AreaRequest, BlockMedium, KvError, ModelFingerprint, PageFault, PageStore, StoreOutcome,
};
use std::sync::atomic::{AtomicU64, Ordering};

fn disk(slots: u64) -> (MemoryDisk, AreaRequest) {
    let bytes = bytes_for(slots);
    (MemoryDisk::new(bytes as usize, 1), request(bytes))
}

fn store(slots: u64) -> (MemoryDisk, PageStore<MemoryDisk>) {
    let (disk, request) = disk(slots);
    let store = PageStore::format(disk.clone(), &request).unwrap();
    (disk, store)
}

fn put<M: BlockMedium>(store: &PageStore<M>, number: u64) -> nvme_kv::Result<StoreOutcome> {
    store.store(key(store, number), &payload(number, 0))
}

/// Bytes of the slot of `slot`.
fn slot(store: &PageStore<MemoryDisk>, slot: u32) -> std::ops::Range<u64> {
    store.layout().slot_at(slot)..store.layout().slot_at(slot + 1)
}

/// LMCache 4385: memory overflows to disk while others use it; an old session comes back.
#[test]
fn sessions_that_overflow_get_their_own_content_or_a_miss() {
    let (_, store) = store(24);
    let (found, missed) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (store, found, missed) = (&store, &found, &missed);
            scope.spawn(move || {
                let mut random = thread;
                for _ in 0..150 {
                    random = random
                        .wrapping_mul(0x5851_F42D_4C95_7F2D)
                        .wrapping_add(thread + 1);
                    let number = (random >> 33) % 40;
                    match load(store, number) {
                        Ok(bytes) => {
                            assert_eq!(bytes, payload(number, 0));
                            found.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(KvError::Missing { .. }) => {
                            missed.fetch_add(1, Ordering::Relaxed);
                            put(store, number).unwrap();
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
    let stats = store.stats();
    assert_eq!(stats.lost, 0);
    assert!(stats.evicted > 0 && stats.pages <= 24);
    assert_eq!(stats.loaded, found.into_inner());
    assert_eq!(stats.missed, missed.into_inner());
    assert!((0..40).all(
        |number| load(&store, number).is_ok_and(|bytes| bytes == payload(number, 0))
            || matches!(load(&store, number), Err(KvError::Missing { .. }))
    ));
}

/// LMCache 4991: a store fails, and its key stays visible.
#[test]
fn a_page_whose_write_failed_is_a_miss() {
    for fault in [WriteFault::Failed, WriteFault::Torn, WriteFault::Late] {
        let (disk, store) = store(4);
        disk.fault(slot(&store, 0), 1, fault.clone());
        let error = put(&store, 7).unwrap_err();
        assert!(matches!(error, KvError::Drive { .. }), "{error}");
        assert!(matches!(load(&store, 7), Err(KvError::Missing { .. })));
        disk.arrive();
        assert!(matches!(load(&store, 7), Err(KvError::Missing { .. })));
        // Also after a restart, and the slot is not lost.
        let again = PageStore::open(disk, &request(bytes_for(4))).unwrap();
        assert!(matches!(load(&again, 7), Err(KvError::Missing { .. })));
        for number in 0..4 {
            assert_eq!(put(&again, number).unwrap(), StoreOutcome::Stored);
            assert_eq!(load(&again, number).unwrap(), payload(number, 0));
        }
    }
}

/// The second cause of it: two store one key, and the one that failed leaves a shorter file.
#[test]
fn one_of_two_stores_of_a_key_fails_and_the_other_is_whole() {
    let (disk, store) = store(4);
    disk.fault(slot(&store, 0), 1, WriteFault::Torn);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| while put(&store, 7).is_err() {});
        }
    });
    assert_eq!(put(&store, 7).unwrap(), StoreOutcome::Present);
    assert_eq!(load(&store, 7).unwrap(), payload(7, 0));
    let short = &payload(7, 0)[..32];
    let twice = [
        (key(&store, 8), short),
        (key(&store, 8), &payload(8, 0)[..]),
    ];
    let results = store.store_all(&twice).into_iter();
    let results: Vec<_> = results.map(Result::unwrap).collect();
    assert_eq!(results, [StoreOutcome::Stored, StoreOutcome::InProgress]);
    assert_eq!(load(&store, 8).unwrap(), short);
}

/// LMCache 4492: 38 of 38 prompts wrong after a restart. Pages of state match exactly or not at all.
#[test]
fn after_a_restart_all_prompts_are_right() {
    let (disk, store) = store(80);
    for number in 0..38u64 {
        for part in 0..2 {
            let key = store.key(&number.to_le_bytes(), part);
            let stored = store.store(key, &payload(number, part.into()));
            assert_eq!(stored.unwrap(), StoreOutcome::Stored);
        }
    }
    drop(store);
    let store = PageStore::open(disk, &request(bytes_for(80))).unwrap();
    assert_eq!(store.recovery().pages, 76);
    let mut page = vec![0; PAGE];
    for number in 0..38u64 {
        for part in 0..3 {
            let loaded = store.load(store.key(&number.to_le_bytes(), part), &mut page);
            match part {
                2 => assert!(matches!(loaded, Err(KvError::Missing { .. }))),
                _ => assert_eq!(page[..loaded.unwrap()], payload(number, part.into())),
            }
        }
    }
}

/// dynamo 14416: stored under one layout, opened under another; vLLM 55191: another size of tensor parallelism.
#[test]
fn another_fingerprint_is_refused_by_its_field_and_finds_nothing() {
    let (disk, store) = store(4);
    put(&store, 1).unwrap();
    let here = key(&store, 1);
    drop(store);
    let other = |change: fn(&mut ModelFingerprint)| {
        let mut request = request(bytes_for(4));
        change(&mut request.fingerprint);
        request
    };
    let layout = other(|one| one.layout = "blocks,heads,tokens,2*dim".into());
    let rank = other(|one| one.parallel_rank = "tp 0 of 2".into());
    let error = PageStore::open(disk.clone(), &layout).err().unwrap();
    assert_eq!(
        error.to_string(),
        "the pages are of layout 'blocks,2,tokens,heads,dim', and 'blocks,heads,tokens,2*dim' was asked for"
    );
    let error = PageStore::open(disk.clone(), &rank).err().unwrap();
    assert!(matches!(
        error,
        KvError::OtherModel {
            field: "parallel_rank",
            ..
        }
    ));
    // Nothing was changed by that.
    let store = PageStore::open(disk.clone(), &request(bytes_for(4))).unwrap();
    assert_eq!(load(&store, 1).unwrap(), payload(1, 0));
    drop(store);
    let (store, why) = PageStore::open_or_format(disk, &rank).unwrap();
    assert!(matches!(why, Some(KvError::OtherModel { .. })));
    assert_eq!(store.stats().pages, 0);
    let mut page = vec![0; PAGE];
    assert!(store.load(here, &mut page).unwrap_err().is_miss());
    assert!(load(&store, 1).unwrap_err().is_miss());
}

#[test]
fn another_geometry_is_refused_by_its_sizes() {
    let (disk, store) = store(6);
    put(&store, 1).unwrap();
    drop(store);
    let same = request(bytes_for(6));
    let page = AreaRequest {
        page_bytes: 4096,
        ..same.clone()
    };
    let error = PageStore::open(disk.clone(), &page)
        .err()
        .unwrap()
        .to_string();
    assert_eq!(
        error,
        "the page store has page_bytes 5000, and 4096 was asked for"
    );
    let area = AreaRequest {
        bytes: same.bytes - 4096,
        ..same.clone()
    };
    let error = PageStore::open(disk.clone(), &area).err().unwrap();
    assert!(matches!(
        error,
        KvError::OtherSize {
            field: "area_bytes",
            ..
        }
    ));
    let longer = AreaRequest {
        bytes: same.bytes + 4096,
        ..same.clone()
    };
    let error = PageStore::open(disk.clone(), &longer).err().unwrap();
    assert!(matches!(error, KvError::Usage { .. }), "{error}");
    let odd = AreaRequest {
        offset: 512,
        bytes: 1 << 16,
        ..same
    };
    let error = PageStore::open(disk, &odd).err().unwrap();
    assert!(matches!(error, KvError::Usage { .. }), "{error}");
}

/// dynamo 15079: a transfer fails and is marked complete; LMCache 3388: a retrieval that failed is reported finished.
#[test]
fn a_load_that_failed_is_an_error_and_its_buffer_is_zero() {
    let (disk, store) = store(4);
    (0..3).for_each(|number| _ = put(&store, number).unwrap());
    let worn = slot(&store, 1);
    disk.wear(worn.start..worn.start + 1);
    let mut buffers = vec![vec![0xEE; PAGE]; 4];
    let keys: Vec<_> = (0..4).map(|number| key(&store, number)).collect();
    let pages = keys.into_iter().zip(&mut buffers);
    let mut pages: Vec<_> = pages.map(|(key, page)| (key, &mut page[..])).collect();
    let results = store.load_all(&mut pages);
    let lengths: Vec<_> = results
        .iter()
        .map(|one| one.as_ref().ok().copied())
        .collect();
    let length = |number| Some(payload(number, 0).len());
    assert_eq!(lengths, [length(0), None, length(2), None]);
    assert!(matches!(
        &results[1],
        Err(KvError::Lost {
            fault: PageFault::Unreadable,
            slot: 1,
            ..
        })
    ));
    assert!(matches!(&results[3], Err(KvError::Missing { .. })));
    assert!(buffers[1].iter().chain(&buffers[3]).all(|byte| *byte == 0));
    assert_eq!(buffers[2][..payload(2, 0).len()], payload(2, 0));
    // It is stored again, in another slot.
    assert_eq!(put(&store, 1).unwrap(), StoreOutcome::Stored);
    assert_eq!(load(&store, 1).unwrap(), payload(1, 0));
    assert_eq!(store.stats().lost, 1);
}

/// A drive that answers nothing has lost no page.
#[test]
fn pages_stay_when_the_whole_drive_fails() {
    let (disk, store) = store(4);
    put(&store, 1).unwrap();
    disk.fail_reads(true);
    assert!(matches!(load(&store, 1), Err(KvError::Drive { .. })));
    disk.fail_reads(false);
    assert_eq!(load(&store, 1).unwrap(), payload(1, 0));
    assert_eq!(store.stats().lost, 0);
}

/// LMCache 207, vLLM 51667: a page is read while its key is stored, or its place is reused.
#[test]
fn a_page_that_is_read_keeps_its_slot() {
    let (_, store) = store(3);
    (0..3).for_each(|number| _ = put(&store, number).unwrap());
    let keys: Vec<_> = (0..4).map(|number| key(&store, number)).collect();
    let pinned = store.pin_prefix(&keys);
    assert_eq!(pinned.len(), 3);
    assert_eq!(put(&store, 3).unwrap(), StoreOutcome::NoRoom);
    // Removed while pinned: not found, and the slot stays as it is.
    assert_eq!(store.remove(&keys[..1]).unwrap(), 1);
    assert_eq!(put(&store, 3).unwrap(), StoreOutcome::NoRoom);
    // A second pin of the same page counts separately.
    let again = store.pin_prefix(&keys[1..2]);
    drop(pinned);
    assert_eq!(put(&store, 3).unwrap(), StoreOutcome::Stored);
    assert_eq!(put(&store, 4).unwrap(), StoreOutcome::Stored);
    assert_eq!(put(&store, 5).unwrap(), StoreOutcome::Stored);
    assert_eq!(load(&store, 1).unwrap(), payload(1, 0));
    drop(again);
}

/// LMCache 1243, 562, 1175: the index is lost at a restart.
#[test]
fn a_process_that_was_killed_loses_no_page() {
    let (disk, store) = store(40);
    (0..40).for_each(|number| _ = put(&store, number).unwrap());
    std::mem::forget(store);
    let store = PageStore::open(disk, &request(bytes_for(40))).unwrap();
    assert!((0..40).all(|number| load(&store, number).unwrap() == payload(number, 0)));
}

/// LMCache 5151: more than 114 chunks in a request.
#[test]
fn one_call_stores_and_loads_more_pages_than_a_log_holds() {
    let (disk, store) = store(2100);
    let payloads: Vec<_> = (0..2000).map(|number| payload(number, 0)).collect();
    let keys: Vec<_> = (0..2000).map(|number| key(&store, number)).collect();
    let pages = keys
        .iter()
        .copied()
        .zip(payloads.iter().map(|one| &one[..]));
    let results = store.store_all(&pages.collect::<Vec<_>>());
    assert!(
        results
            .iter()
            .all(|one| matches!(one, Ok(StoreOutcome::Stored)))
    );
    let store = PageStore::open(disk, &request(bytes_for(2100))).unwrap();
    assert_eq!(store.pin_prefix(&keys).len(), 2000);
    let mut buffers = vec![vec![0; PAGE]; 2000];
    let buffers = buffers.iter_mut().map(|page| &mut page[..]);
    let mut pages: Vec<_> = keys.iter().copied().zip(buffers).collect();
    for ((result, (_, page)), payload) in store
        .load_all(&mut pages)
        .into_iter()
        .zip(&pages)
        .zip(&payloads)
    {
        assert_eq!(page[..result.unwrap()], payload[..]);
    }
}

/// A command whose time ran out writes when its slot holds another page.
#[test]
fn a_late_write_is_seen_by_its_generation() {
    let (disk, store) = store(1);
    let place = slot(&store, 0);
    disk.fault(place.start..place.start + 1, 1, WriteFault::Late);
    put(&store, 1).unwrap_err();
    assert_eq!(put(&store, 1).unwrap(), StoreOutcome::Stored);
    disk.arrive();
    let error = load(&store, 1).unwrap_err();
    assert!(
        matches!(
            error,
            KvError::Lost {
                fault: PageFault::Generation,
                ..
            }
        ),
        "{error}"
    );
    assert!(matches!(load(&store, 1), Err(KvError::Missing { .. })));
    assert_eq!(put(&store, 1).unwrap(), StoreOutcome::Stored);
    assert_eq!(load(&store, 1).unwrap(), payload(1, 0));
}

/// The same, of a part of the payload.
#[test]
fn a_late_part_of_a_payload_is_seen_by_the_checksum() {
    let (disk, store) = store(1);
    let place = slot(&store, 0);
    disk.fault(place.start + 4096..place.start + 4097, 1, WriteFault::Late);
    put(&store, 1).unwrap_err();
    assert_eq!(put(&store, 2).unwrap(), StoreOutcome::Stored);
    disk.arrive();
    let error = load(&store, 2).unwrap_err();
    let text = error.to_string();
    assert!(
        matches!(
            error,
            KvError::Lost {
                fault: PageFault::Payload,
                ..
            }
        ),
        "{error}"
    );
    let offset = place.start;
    let key = key(&store, 2);
    assert_eq!(
        text,
        format!(
            "page 0 of key {key} at byte {offset} is lost: its payload has another checksum than was committed"
        )
    );
}

#[test]
fn dropped_and_misdirected_writes_are_seen() {
    let (disk, store) = store(3);
    let (first, second) = (slot(&store, 0), slot(&store, 1));
    disk.fault(first.clone(), 9, WriteFault::Dropped);
    assert_eq!(put(&store, 0).unwrap(), StoreOutcome::Stored);
    let error = load(&store, 0).unwrap_err();
    assert!(
        matches!(
            error,
            KvError::Lost {
                fault: PageFault::Header,
                ..
            }
        ),
        "{error}"
    );
    // Its parts lie where the next page is: both are seen, each by what it finds.
    assert_eq!(put(&store, 1).unwrap(), StoreOutcome::Stored);
    let bytes = first.end - first.start;
    disk.fault(
        slot(&store, 2),
        3,
        WriteFault::Misdirected(0u64.wrapping_sub(bytes)),
    );
    assert_eq!(put(&store, 2).unwrap(), StoreOutcome::Stored);
    let error = load(&store, 2).unwrap_err();
    assert!(
        matches!(
            error,
            KvError::Lost {
                fault: PageFault::Header,
                ..
            }
        ),
        "{error}"
    );
    let error = load(&store, 1).unwrap_err();
    assert!(
        matches!(
            error,
            KvError::Lost {
                fault: PageFault::OtherPage,
                slot: 1,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(second.start, first.end);
}

/// Every bit of a page counts.
#[test]
fn a_page_with_a_bit_that_flipped_is_named_dropped_and_counted() {
    let (disk, store) = store(30);
    for (number, at) in (0..30u64).zip(
        [0, 8, 24, 40, 48, 56, 60, 63, 64, 4000, 4088, 4096, 8191]
            .iter()
            .cycle(),
    ) {
        let bit = number % 8;
        put(&store, number).unwrap();
        let place = slot(&store, number as u32).start;
        let at = *at.min(&(4096 + payload(number, 0).len() as u64 - 1));
        disk.corrupt(place + at, |bytes| bytes[0] ^= 1 << bit);
        let error = load(&store, number).unwrap_err();
        assert!(
            matches!(error, KvError::Lost { slot, .. } if u64::from(slot) == number),
            "{error}"
        );
        assert!(matches!(load(&store, number), Err(KvError::Missing { .. })));
        assert_eq!(store.stats().lost, number + 1);
    }
}

#[test]
fn a_flush_that_fails_commits_nothing() {
    let (disk, store) = store(4);
    disk.fail_flushes(true);
    assert!(matches!(put(&store, 1), Err(KvError::Drive { .. })));
    assert!(matches!(load(&store, 1), Err(KvError::Missing { .. })));
    assert_eq!(store.stats().failed, 1);
    disk.fail_flushes(false);
    assert_eq!(put(&store, 1).unwrap(), StoreOutcome::Stored);
    assert_eq!(load(&store, 1).unwrap(), payload(1, 0));
}

/// Two transient errors retired a slot for ever in another store.
#[test]
fn slots_of_failed_writes_are_used_again() {
    let (disk, store) = store(2);
    for _ in 0..20 {
        disk.fault(
            slot(&store, 0).start..slot(&store, 1).end,
            3,
            WriteFault::Failed,
        );
        let pages = [(key(&store, 1), &b"a"[..]), (key(&store, 2), b"b")];
        assert!(store.store_all(&pages).iter().all(Result::is_err));
        assert_eq!(store.remove(&[key(&store, 1), key(&store, 2)]).unwrap(), 0);
    }
    (0..2).for_each(|number| assert_eq!(put(&store, number).unwrap(), StoreOutcome::Stored));
    assert_eq!(store.stats().pages, 2);
}

#[test]
fn pages_and_buffers_of_wrong_lengths_are_refused() {
    let (_, store) = store(2);
    for length in [0, PAGE + 1] {
        let error = store.store(key(&store, 1), &vec![1; length]).unwrap_err();
        let text = format!("a page of {length} bytes is not between 1 and {PAGE} bytes long");
        assert_eq!(error.to_string(), text);
    }
    put(&store, 1).unwrap();
    let error = store.load(key(&store, 1), &mut [0; 10]).unwrap_err();
    assert!(matches!(error, KvError::Usage { .. }), "{error}");
    assert_eq!(load(&store, 1).unwrap(), payload(1, 0));
}

/// Ranks that share a drive have an area each.
#[test]
fn two_areas_of_one_disk_are_apart() {
    let bytes = bytes_for(4);
    let disk = MemoryDisk::new(2 * bytes as usize, 1);
    let rank = |number: u64| AreaRequest {
        offset: number * bytes,
        fingerprint: ModelFingerprint {
            parallel_rank: format!("tp {number} of 2"),
            ..fingerprint()
        },
        ..request(bytes)
    };
    let stores = [0, 1].map(|number| PageStore::format(disk.clone(), &rank(number)).unwrap());
    for (store, version) in stores.iter().zip(0..) {
        for number in 0..6 {
            let stored = store.store(key(store, number), &payload(number, version));
            assert_eq!(stored.unwrap(), StoreOutcome::Stored);
        }
    }
    for number in [0, 1] {
        let store = PageStore::open(disk.clone(), &rank(number)).unwrap();
        assert_eq!(load(&store, 5).unwrap(), payload(5, number));
        assert_ne!(key(&store, 5), key(&stores[1 - number as usize], 5));
    }
}
