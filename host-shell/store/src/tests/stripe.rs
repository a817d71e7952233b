//! Rules that hold for every member of a stripe.

use super::super::testing::{TestFile, of_file, of_sim, options};
use super::super::{DuplicateIds, FileIo, Store, StoreOptions};
use super::usage;
use std::sync::Arc;

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
        // The write is refused also if none of its bytes lies on the protected member.
        for offset in [0, STRIPE, 2 * STRIPE] {
            let text = usage(store.write_at(offset, &[1]));
            assert!(text.contains("reading only"), "{protected}: {text}");
            usage(store.write_at_fua(offset, &[1]));
        }
        let table = store.table(0, 100, 100).unwrap();
        usage(table.scatter((&[3i64]).into(), &[2; 100], DuplicateIds::Last, None));
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

#[test]
fn a_stripe_ends_with_its_shortest_member() {
    for shortest in 0..3 {
        let size = |index| if index == shortest { 64 << 10 } else { 1 << 20 };
        let files = [0, 1, 2].map(|index| TestFile::new(size(index)));
        let members = files.iter().map(|file| of_file(file, FileIo::Pread));
        let store = Store::stripe(members.collect(), STRIPE).unwrap();
        assert_eq!(store.len(), 3 * (64 << 10), "{shortest}");
        store.write_at(store.len() - 1, &[9]).unwrap();
        let mut last = [0; 2];
        store.read_at(store.len() - 2, &mut last).unwrap();
        assert_eq!(last, [0, 9]);
        let text = usage(store.read_at(store.len() - 1, &mut last));
        assert!(text.contains("past the store"), "{text}");
    }
}

/// A boundary of a drive counts in its own blocks, not in the stripe's bytes.
#[test]
fn commands_do_not_cross_boundaries_of_their_member() {
    let boundary = 24 * 512;
    let files = [0, 1, 2].map(|_| TestFile::new(1 << 20));
    let members = files.iter().map(|file| of_file(file, FileIo::Pread));
    let mut store = Store::stripe(members.collect(), STRIPE).unwrap();
    for member in &mut Arc::get_mut(&mut store.space).unwrap().members {
        member.boundary_bytes = boundary;
    }
    let mut pieces = Vec::new();
    store.space.split(0..store.len(), 0, &mut pieces);
    let mut at = 0;
    for piece in &pieces {
        assert_eq!(piece.at, at);
        at += u64::from(piece.bytes);
        let last = piece.offset + u64::from(piece.bytes) - 1;
        assert_eq!(piece.offset / boundary, last / boundary, "{piece:?}");
    }
    assert_eq!(at, store.len());
    // Of each member 128 stripes, and 43 of its 85 boundaries lie inside of one.
    assert_eq!(pieces.len(), 3 * (128 + 43));
}

/// Two names of one file, a symbolic and a hard link included, would be two places with the same bytes.
#[test]
fn one_file_is_not_two_members() {
    let file = TestFile::new(1 << 20);
    let path = file.text();
    let links = ["symbolic", "hard"].map(|kind| format!("{path}-{kind}"));
    let bare = |text: &str| text.trim_start_matches("file:").to_owned();
    std::os::unix::fs::symlink(bare(&path), bare(&links[0])).unwrap();
    std::fs::hard_link(bare(&path), bare(&links[1])).unwrap();
    let read_only = StoreOptions {
        read_only: true,
        ..options()
    };
    for other in [&path, &links[0], &links[1]] {
        for name in [
            format!("stripe:{path}|{other}?stripe=4096"),
            format!("joined:{path}|{other}"),
        ] {
            let text = usage(Store::open(&name, &options()));
            assert!(
                text.contains("members 0 and 1 are one file"),
                "{name}: {text}"
            );
            let is_stripe = name.starts_with("stripe:");
            assert_eq!(Store::open(&name, &read_only).is_err(), is_stripe, "{name}");
        }
    }
    for link in &links {
        std::fs::remove_file(bare(link)).unwrap();
    }
}

/// A file of any length beside a drive, whose blocks are larger: the file's last bytes are no whole block.
#[test]
fn a_member_that_ends_inside_a_block_is_written_up_to_its_end() {
    for len in [1000, 4096 + 1000] {
        let file = TestFile::new(len);
        let members = vec![
            of_file(&file, FileIo::Pread),
            of_sim("size=1MiB&block=4096"),
        ];
        let store = Store::join(members).unwrap();
        let mut model = vec![0; len as usize];
        let last = len - 10;
        for (index, at) in [10, 500, last, 0, last - 500].into_iter().enumerate() {
            let data = [index as u8 + 1; 10];
            store.write_at(at, &data).unwrap();
            model[at as usize..][..10].copy_from_slice(&data);
        }
        let table = store.table(0, len / 100, 100).unwrap();
        let written = table.scatter((&[7i64]).into(), &[9; 100], DuplicateIds::Last, None);
        written.unwrap().check().unwrap();
        model[700..800].fill(9);
        let mut back = vec![0; len as usize];
        store.read_at(0, &mut back).unwrap();
        assert!(back == model, "{len}");
        usage(store.write_at(len - 5, &[1; 10]));
        let (second, _) = store.member_offsets()[1];
        store.write_at(second + 10, &[4; 10]).unwrap();
    }
}
