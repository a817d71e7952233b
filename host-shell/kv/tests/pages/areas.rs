//! Areas that share bytes of a device.

use crate::{bytes_for, key, load, payload, request};
use nvme_kv::{AreaRequest, KvError, PageStore};
use nvme_store::{Store, StoreOptions};
use std::sync::Arc;

fn at(offset: u64, bytes: u64) -> AreaRequest {
    AreaRequest {
        offset,
        ..request(bytes)
    }
}

fn refused<M>(opened: nvme_kv::Result<M>) -> String {
    let error = opened.err().expect("the areas overlap");
    assert!(matches!(error, KvError::Usage { .. }), "{error}");
    error.to_string()
}

/// Checks areas that overlap one of `bytes` bytes from byte `bytes` on, by stores that `open` opens.
fn check_overlaps(open: impl Fn() -> Arc<Store>, bytes: u64) {
    let first = PageStore::format(open(), &at(bytes, bytes)).unwrap();
    assert!(first.store(key(&first, 1), &payload(1, 1)).is_ok());
    for offset in [4096, bytes - 4096, bytes + 4096, 2 * bytes - 4096] {
        let said = refused(PageStore::format(open(), &at(offset, bytes)));
        let named = format!("from byte {offset} on overlap {bytes} bytes from byte {bytes} on");
        assert!(said.contains(&named), "{said}");
        refused(PageStore::open_or_format(open(), &at(offset, bytes)));
    }
    // One that another size was asked for at the same place is not made anew while it is open.
    refused(PageStore::open_or_format(open(), &at(bytes, bytes + 4096)));
    assert_eq!(load(&first, 1).unwrap(), payload(1, 1));
    // Neighbours are no overlap, and the same area goes to its next owner.
    drop(PageStore::format(open(), &at(0, bytes)).unwrap());
    drop(PageStore::format(open(), &at(2 * bytes, bytes)).unwrap());
    let next = PageStore::open(open(), &at(bytes, bytes)).unwrap();
    assert_eq!(load(&next, 1).unwrap(), payload(1, 1));
    let lost = first.store(key(&first, 2), &payload(2, 1)).unwrap_err();
    assert!(matches!(lost, KvError::Superseded { .. }), "{lost}");
    drop(first);
    refused(PageStore::format(open(), &at(bytes + 4096, bytes)));
    drop(next);
    PageStore::format(open(), &at(bytes + 4096, bytes)).unwrap();
}

#[test]
fn areas_of_a_drive_that_overlap_in_part_are_refused() {
    let drive = Store::open("sim:mem?size=16MiB", &StoreOptions::default()).unwrap();
    let drive = Arc::new(drive);
    check_overlaps(|| Arc::clone(&drive), bytes_for(30));
}

/// Each opening has the file once more, as processes that do not share the area.
#[test]
fn areas_of_a_file_that_overlap_in_part_are_refused() {
    let path = std::env::temp_dir().join(format!("nvme-kv-areas-{}", std::process::id()));
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(4 * bytes_for(30)).unwrap();
    let device = format!("file:{}", path.display());
    let open = || Arc::new(Store::open(&device, &StoreOptions::default()).unwrap());
    check_overlaps(open, bytes_for(30));
    std::fs::remove_file(path).unwrap();
}
