//! Pages that the caller reads and writes itself: what it says of them is compared, and nothing is found before the plan
//! is finished.

use crate::disk::MemoryDisk;
use crate::{bytes_for, key, load, payload, request};
use nvme_driver::error::Error;
use nvme_kv::format::payload_checksum;
use nvme_kv::{
    ArrivedPage, BlockMedium, KvError, LoadPlan, MOST_TOGETHER, PageFault, PageStore, PayloadFacts,
    StoreOutcome,
};

fn facts<M: BlockMedium>(store: &PageStore<M>, number: u64) -> PayloadFacts {
    let payload = payload(number, 0);
    PayloadFacts {
        key: key(store, number),
        length: payload.len(),
        checksum: payload_checksum(&payload),
    }
}

/// Writes the pages of a plan's places as a caller does: header, then payload in whole blocks.
fn write<M: BlockMedium>(store: &PageStore<M>, places: &[nvme_kv::PagePlace]) {
    for place in places {
        let mut bytes = place.header.to_block().to_vec();
        bytes.extend(payload(place.number as u64, 0));
        bytes.resize(bytes.len().next_multiple_of(4096), 0);
        store.medium().write_durable(place.offset, &bytes).unwrap();
    }
}

#[test]
fn a_planned_page_is_found_once_the_plan_is_finished() {
    let request = request(bytes_for(8));
    let store = PageStore::format(MemoryDisk::new(request.bytes as usize, 0), &request).unwrap();
    let wanted: Vec<_> = (0..3).map(|number| facts(&store, number)).collect();
    let plan = store.plan_store(&wanted);
    write(&store, &plan.places());
    assert!(matches!(load(&store, 0), Err(KvError::Missing { .. })));
    let other = store.plan_store(&wanted[..1]).finish([]);
    assert!(matches!(other[0], Ok(StoreOutcome::InProgress)));
    let failed = || Err(Error::device("the write of the test failed", "none"));
    let outcomes = plan.finish([Ok(()), failed()]);
    assert!(matches!(outcomes[0], Ok(StoreOutcome::Stored)));
    // One whose write failed, and one without an end.
    assert!(outcomes[1..].iter().all(Result::is_err));
    assert_eq!(load(&store, 0).unwrap(), payload(0, 0));
    assert!((1..3).all(|number| load(&store, number).is_err()));
    // A plan that is dropped gives its slots back.
    for _ in 0..20 {
        let plan = store.plan_store(&wanted[1..]);
        assert_eq!(plan.places().len(), 2);
    }
    assert_eq!((store.stats().stored, store.stats().failed), (1, 2));
    let many = vec![wanted[0]; MOST_TOGETHER + 1];
    let outcomes = store.plan_store(&many).finish([]);
    assert!(matches!(
        outcomes[MOST_TOGETHER],
        Err(KvError::Usage { .. })
    ));
}

#[test]
fn what_a_reader_says_of_a_page_is_compared_with_what_was_committed() {
    let request = request(bytes_for(8));
    let store = PageStore::format(MemoryDisk::new(request.bytes as usize, 0), &request).unwrap();
    for number in 0..6 {
        let stored = store.store(key(&store, number), &payload(number, 0));
        assert_eq!(stored.unwrap(), StoreOutcome::Stored);
    }
    let keys = (0..7).map(|number| (key(&store, number), 5000));
    let plan = LoadPlan::new(&store, keys);
    let places = plan.places();
    assert_eq!(places.len(), 6);
    let read = |place: usize, header: usize| ArrivedPage::Read {
        header: Box::new(places[header].header.to_block()),
        checksum: places[place].checksum,
    };
    let arrived = [
        ArrivedPage::Compared {
            checksum: places[0].checksum,
        },
        ArrivedPage::Compared {
            checksum: places[0].checksum,
        },
        read(2, 2),
        read(3, 2),
        ArrivedPage::Failed(Error::device("the drive is silent", "none")),
    ];
    let results = plan.finish(arrived);
    let fault = |number: usize| match &results[number] {
        Err(KvError::Lost { fault, .. }) => Some(*fault),
        _ => None,
    };
    assert!(results[0].is_ok() && results[2].is_ok());
    assert_eq!(fault(1), Some(PageFault::Payload));
    assert_eq!(fault(3), Some(PageFault::OtherPage));
    // The drive as a whole failed, or the reader said nothing: the pages may be right.
    assert!((4..6).all(|page| matches!(results[page], Err(KvError::Drive { .. }))));
    assert!(matches!(results[6], Err(KvError::Missing { .. })));
    let stats = store.stats();
    assert_eq!(
        (stats.loaded, stats.lost, stats.missed, stats.pages),
        (2, 2, 1, 4)
    );
    assert_eq!(load(&store, 4).unwrap(), payload(4, 0));
}
