//! Stores alone: their ends, their refusals, and the error messages.
#![cfg(feature = "std")]

use nvme_sim::{BlockStore, FileStore, MapError, MemoryStore, NullStore, StoreError};
use std::path::PathBuf;

/// An image that is not there yet, and is gone when the test is over.
struct Image(PathBuf);

impl Image {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("nvme-sim-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        Self(path)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Length of each store: not a multiple of the bytes that it moves at once.
const BYTES: u64 = 200_000;

/// Calls `work` with a store of each kind; the second argument is whether the store keeps written
/// data.
fn each(name: &str, work: impl Fn(&dyn BlockStore, bool)) {
    let image = Image::new(name);
    work(&MemoryStore::new(BYTES).unwrap(), true);
    work(&FileStore::create(&image.0, BYTES).unwrap(), true);
    work(&NullStore::new(BYTES), false);
}

#[test]
fn every_operation_ends_where_the_store_does() {
    each("ends", |store, _| {
        assert_eq!(store.bytes(), BYTES);
        let mut bytes = [0; 16];
        let past = Err(StoreError::OutOfBounds);
        for offset in [BYTES - 15, BYTES, u64::MAX - 7] {
            assert_eq!(store.read_at(offset, &mut bytes), past);
            assert_eq!(store.write_at(offset, &bytes), past);
            for deallocate in [false, true] {
                assert_eq!(store.zero(offset, 16, deallocate), past);
            }
        }
        let last = BYTES - 16;
        assert_eq!(store.write_at(last, &bytes), Ok(()));
        assert_eq!(store.zero(last, 16, false), Ok(()));
        assert_eq!(store.zero(BYTES, 0, true), Ok(()), "nothing is nowhere");
        assert_eq!(store.flush(), Ok(()));
    });
}

/// Zeroing is exact with and without deallocation, also over more than a store zeroes in one call.
#[test]
fn zeroed_ranges_read_as_zero_and_their_neighbours_do_not() {
    each("zero", |store, keeps| {
        for deallocate in [false, true] {
            let written = vec![7; BYTES as usize];
            store.write_at(0, &written).unwrap();
            store.zero(3, BYTES - 5, deallocate).unwrap();
            let mut read = vec![7; BYTES as usize];
            store.read_at(0, &mut read).unwrap();
            let expected = match keeps {
                true => [vec![7; 3], vec![0; BYTES as usize - 5], vec![7; 2]].concat(),
                false => written,
            };
            assert!(read == expected, "deallocate: {deallocate}");
        }
    });
}

#[test]
fn contents_matter_but_to_the_null_store() {
    each("null", |store, keeps| assert_eq!(store.is_null(), !keeps));
    let image = Image::new("span");
    assert!(MemoryStore::new(BYTES).unwrap().span().is_some());
    let file = FileStore::create(&image.0, BYTES).unwrap();
    assert!(file.span().is_none() && NullStore::new(1).span().is_none());
}

#[test]
fn a_read_only_image_refuses_writes_with_the_systems_reason() {
    let image = Image::new("read-only");
    FileStore::create(&image.0, BYTES).unwrap();
    let store = FileStore::open(&image.0, true).unwrap();
    let mut bytes = [1; 8];
    assert_eq!(store.read_at(0, &mut bytes), Ok(()));
    assert_eq!(bytes, [0; 8]);
    let refused = store.write_at(0, &bytes).unwrap_err();
    assert!(matches!(refused, StoreError::Io(errno) if errno > 0));
    for deallocate in [false, true] {
        assert_eq!(store.zero(0, 4096, deallocate), Err(refused));
    }
}

#[test]
fn more_memory_than_there_is_makes_no_store() {
    assert!(MemoryStore::new(u64::MAX).is_none());
    assert!(MemoryStore::new(1 << 62).is_none());
}

#[test]
fn refusals_say_what_is_wrong() {
    let texts = [
        (
            StoreError::OutOfBounds.to_string(),
            "past the end of the store",
        ),
        (StoreError::Io(28).to_string(), "input/output error 28"),
        (
            MapError::BadRange.to_string(),
            "the range is empty or leaves the address space",
        ),
        (
            MapError::Misaligned.to_string(),
            "address and pointer differ modulo 8",
        ),
        (
            MapError::Overlap.to_string(),
            "part of the range is already mapped",
        ),
    ];
    for (text, expected) in texts {
        assert_eq!(text, expected);
    }
}
