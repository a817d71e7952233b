//! Tables in several ranges, against the bytes of the store.
#![allow(
    clippy::single_range_in_vec_init,
    reason = "tables of one range are meant"
)]

use crate::testing::{TestFile, every_kind, of_file, of_sim, options, pattern};
use crate::{DuplicateIds, FileIo, RowElement, RowIds, Store, TableRanges};
use nvme_driver::error::Error;
use std::ops::Range;

fn filled(store: &Store) -> Vec<u8> {
    let mut all = vec![0; store.len() as usize];
    pattern(0, 5, &mut all);
    store.write_at(0, &all).unwrap();
    all
}

/// Gathers `ids` and compares every row with the bytes of `ranges` in `all`.
fn check(store: &Store, all: &[u8], ranges: &[Range<u64>], row_bytes: u64, ids: &[i64]) {
    let found = store.ranges(ranges, row_bytes).unwrap();
    let table = store.table_of(&found).unwrap();
    let bytes: Vec<u8> = ranges
        .iter()
        .flat_map(|range| &all[range.start as usize..range.end as usize])
        .copied()
        .collect();
    let row = row_bytes as usize;
    assert_eq!(table.rows(), (bytes.len() / row) as u64);
    let (mut out, mut status) = (vec![0xEE; ids.len() * row], vec![77; ids.len()]);
    let report = table
        .gather(ids.into(), &mut out, Some(&mut status))
        .unwrap();
    let mut failed = 0;
    for (index, id) in ids.iter().enumerate() {
        let have = &out[index * row..][..row];
        match u64::try_from(*id).ok().filter(|id| *id < table.rows()) {
            Some(id) => {
                assert_eq!(status[index], 0, "id {id}");
                assert!(have == &bytes[id as usize * row..][..row], "id {id}");
            }
            None => {
                failed += 1;
                assert_eq!(status[index], -1, "id {id}");
                assert!(have.iter().all(|byte| *byte == 0), "id {id}");
            }
        }
    }
    assert_eq!((report.rows, report.failed), (ids.len(), failed));
}

/// Ranges of one of several lengths at odd places, not in their order in the store, together whole rows.
fn shards(row_bytes: u64, count: u64) -> Vec<Range<u64>> {
    let lengths = [3 * row_bytes, 5 * row_bytes / 2, row_bytes / 2 + row_bytes];
    (0..count * 3)
        .map(|shard| {
            let begin = 8 + (count * 3 - 1 - shard) * 20_011;
            begin..begin + lengths[shard as usize % 3]
        })
        .collect()
}

#[test]
fn rows_come_from_their_ranges_and_some_from_several() {
    for (name, store, _file) in every_kind() {
        let all = filled(&store);
        for row_bytes in [2u64, 160, 256, 1000, 4096, 6666] {
            let ranges = shards(row_bytes, 4);
            let last = store.ranges(&ranges, row_bytes).unwrap().rows() as i64;
            let mut ids: Vec<i64> = (0..last).rev().collect();
            ids.extend([3, 3, -1, last, i64::MAX, i64::MIN, 0]);
            assert!(!name.is_empty());
            check(&store, &all, &ranges, row_bytes, &ids);
        }
        // This row lies in four ranges, one of which has one byte.
        let ranges = [900..1000, 5000..5001, 1..3, 512..769, 40_000..40_360];
        check(&store, &all, &ranges, 360, &[0, 1, 1, 0]);
    }
}

#[test]
fn neighbours_count_as_one_range_and_empty_ones_as_none() {
    let store = of_sim("size=1MiB");
    let ranges = store
        .ranges(&[0..100, 7..7, 100..300, 1000..1100], 100)
        .unwrap();
    assert_eq!(
        (ranges.count(), ranges.rows(), ranges.row_bytes()),
        (2, 4, 100)
    );
    let none = store.ranges(&[], 8).unwrap();
    let table = store.table_of(&none).unwrap();
    let mut status = [9];
    let ids = [0i64];
    let report = table
        .gather((&ids).into(), &mut [1; 8], Some(&mut status))
        .unwrap();
    assert_eq!((table.rows(), report.failed, status), (0, 1, [-1]));
}

#[test]
fn ranges_that_cannot_be_are_refused_before_anything_is_read() {
    let store = of_sim("size=1MiB");
    let end = store.len();
    let before = store.stats().commands;
    let refused = |ranges: &[Range<u64>], row_bytes, wanted: &str| {
        let error = store.ranges(ranges, row_bytes).unwrap_err();
        assert!(matches!(error, Error::Usage { .. }), "{error}");
        assert!(error.to_string().contains(wanted), "{error}");
    };
    refused(&[0..100, 200..250], 100, "whole rows of 100");
    refused(&[0..100], 0, "no bytes");
    refused(&[0..100, 99..199], 100, "overlap");
    refused(&[0..100, 400..500, 0..100], 100, "overlap");
    refused(&[0..100, end - 50..end + 50], 100, "past the store");
    refused(&[u64::MAX - 50..u64::MAX], 50, "past the store");
    #[expect(clippy::reversed_empty_ranges, reason = "refused")]
    refused(&[100..50], 50, "begins at byte 100");
    assert_eq!(store.stats().commands, before);
    let larger = of_sim("size=2MiB");
    let of_larger = larger.ranges(&[end..end + 100], 100).unwrap();
    assert!(store.table_of(&of_larger).is_err());
}

#[test]
fn rows_in_several_ranges_are_not_written() {
    let store = of_sim("size=1MiB");
    let all = filled(&store);
    let ranges = store.ranges(&[0..4, 100..104], 4).unwrap();
    let table = store.table_of(&ranges).unwrap();
    let ids = [0i64];
    let ids = RowIds::from(&ids);
    let written = table.scatter(ids, &[1; 4], DuplicateIds::Last, None);
    let added = table.scatter_add(ids, &[1; 4], RowElement::I32, None);
    for error in [written.unwrap_err(), added.unwrap_err()] {
        assert!(error.to_string().contains("several ranges"), "{error}");
    }
    let mut after = vec![0; all.len()];
    store.read_at(0, &mut after).unwrap();
    assert_eq!(after, all);
}

/// A row in two ranges is right only if both of its reads are.
#[test]
fn a_row_fails_with_the_read_of_one_of_its_parts() {
    for nth in [1, 2] {
        let store = of_sim(&format!("size=1MiB&fault=status:0x281@op=read,nth={nth}"));
        let all = filled(&store);
        let ranges = [0..4096 + 100, 8192..8192 + 156, 512 * 100..512 * 100 + 4096];
        let found = store.ranges(&ranges, 256).unwrap();
        let table = store.table_of(&found).unwrap();
        let (mut out, mut status) = ([1; 256], [0]);
        // Its first 100 bytes end the first range.
        let ids = [16i64];
        let report = table
            .gather((&ids).into(), &mut out, Some(&mut status))
            .unwrap();
        assert_eq!((report.failed, status, out), (1, [0x281], [0; 256]));
        check(&store, &all, &ranges, 256, &[16, 0, 17]);
    }
}

/// The members begin at multiples of one size. No byte between them is one of the store's.
#[test]
fn tables_lie_in_several_files() {
    let files: Vec<TestFile> = [5000, 70_000, 12_345]
        .into_iter()
        .map(TestFile::new)
        .collect();
    let open = || {
        let members = files
            .iter()
            .map(|file| Store::open(&format!("file:{}", file.text()), &options()));
        Store::join(members.collect::<Result<Vec<_>, _>>().unwrap()).unwrap()
    };
    let store = open();
    let places = store.member_offsets();
    assert_eq!(places, [(0, 5000), (1 << 17, 70_000), (2 << 17, 12_345)]);
    let mut all = vec![0; store.len() as usize];
    for (first, bytes) in &places {
        let part = &mut all[*first as usize..][..*bytes as usize];
        pattern(*first, 5, part);
        store.write_at(*first, part).unwrap();
    }
    let ranges = [
        8..8 + 4800,
        (1 << 17) + 3..(1 << 17) + 3 + 64_000,
        (2 << 17) + 25..(2 << 17) + 12_345,
    ];
    let ids: Vec<i64> = (0..506).rev().chain([-1, 506]).collect();
    check(&store, &all, &ranges[..], 160, &ids);
    for range in [
        4990..5010,
        5000..5001,
        100_000..100_001,
        (2 << 17) + 12_345..(2 << 17) + 12_346,
    ] {
        let read = store.read_at(
            range.start,
            &mut vec![0; (range.end - range.start) as usize],
        );
        assert!(matches!(read, Err(Error::Usage { .. })), "{range:?}");
        assert!(store.ranges(&[range], 1).is_err());
    }
    drop(store);
    let names: Vec<String> = files.iter().map(TestFile::text).collect();
    let by_name = Store::open(&format!("joined:{}", names.join("|")), &options()).unwrap();
    assert_eq!(by_name.member_offsets(), places);
    assert!(Store::join(Vec::new()).is_err());
}

/// The file is sparse.
#[test]
fn places_past_32_bits_are_those_of_their_rows() {
    let file = TestFile::new(13 << 30);
    let store = of_file(&file, FileIo::Pread);
    // 2^32 + 2 rows before the last range, rows of 2 bytes.
    let far = (1u64 << 33) + 4;
    let ranges = [8..8 + far, (3 << 32) + 8..(3 << 32) + 16];
    let found: TableRanges = store.ranges(&ranges, 2).unwrap();
    let table = store.table_of(&found).unwrap();
    let limit = 1i64 << 32;
    let ids = [
        (1i64 << 31) - 1,
        1 << 31,
        limit - 1,
        limit,
        limit + 1,
        limit + 2,
        limit + 5,
    ];
    let place = |id: i64| match id as u64 * 2 {
        byte if byte < far => 8 + byte,
        byte => (3 << 32) + 8 + byte - far,
    };
    for (number, id) in (1u8..).zip(ids) {
        store.write_at(place(id), &[number, 0x55]).unwrap();
    }
    let mut out = [0; 14];
    let report = table.gather((&ids).into(), &mut out, None).unwrap();
    report.check().unwrap();
    for (number, have) in (1u8..).zip(out.chunks_exact(2)) {
        assert_eq!(have, [number, 0x55], "row {number}");
    }
    let mut status = [0; 2];
    let past = [limit + 6, limit + 7];
    let report = table.gather((&past).into(), &mut [0; 4], Some(&mut status));
    assert_eq!((report.unwrap().failed, status), (2, [-1, -1]));
}
