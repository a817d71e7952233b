//! What has to hold of every member of a stripe, whichever it is.

use super::super::testing::{TestFile, of_file, options};
use super::super::{Duplicates, FileIo, Store, StoreOptions};
use super::usage;

const STRIPE: u64 = 8 << 10;

#[test]
fn a_stripe_is_written_only_where_every_member_is() {
    let files = [0, 1, 2].map(|_| TestFile::new(1 << 20));
    for protected in 0..files.len() {
        let member = |(index, file): (usize, &TestFile)| {
            let options = StoreOptions {
                read_only: index == protected,
                ..options()
            };
            Store::open(&file.text(), &options).unwrap()
        };
        let members = files.iter().enumerate().map(member).collect();
        let store = Store::stripe(members, STRIPE).unwrap();
        // Also where no byte of it lies on the member.
        for offset in [0, STRIPE, 2 * STRIPE] {
            let text = usage(store.write_at(offset, &[1]));
            assert!(text.contains("reading only"), "{protected}: {text}");
            usage(store.write_at_fua(offset, &[1]));
        }
        let table = store.table(0, 100, 100).unwrap();
        usage(table.scatter((&[3i64]).into(), &[2; 100], Duplicates::Last, None));
        let mut back = vec![0xEE; 3 * STRIPE as usize];
        store.read_at(0, &mut back).unwrap();
        assert!(back.iter().all(|byte| *byte == 0), "{protected}");
    }
}

#[test]
fn a_write_to_any_member_by_another_store_makes_another_mark() {
    let files = [0, 1, 2].map(|_| TestFile::new(1 << 20));
    let members = files.iter().map(|file| of_file(file, FileIo::Pread));
    let store = Store::stripe(members.collect(), STRIPE).unwrap();
    for (index, file) in files.iter().enumerate() {
        let before = store.write_mark();
        let other = of_file(file, FileIo::Pread);
        other.write_at(5, &[1]).unwrap();
        assert_ne!(store.write_mark(), before, "{index}");
    }
}
