//! Tests of scatter: repeated ids, additions, threads, against rows written one at a time.

use super::*;
use crate::testing::{SHORT, every_kind, of_sim, options, pattern};
use crate::{Store, StoreOptions};
use proptest::prelude::*;

fn content(store: &Store) -> Vec<u8> {
    let mut all = vec![0; store.len() as usize];
    store.read_at(0, &mut all).unwrap();
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn scatters_agree_with_a_vector(
        offset in 0u64..9000,
        row_bytes in 1u64..6000,
        ids in prop_oneof![
            3 => prop::collection::vec(0i64..80, 0..150),
            1 => prop::collection::vec(-3i64..120, 0..150),
        ],
        seed in 0u64..1000
    ) {
        for (name, store, _file) in every_kind() {
            let mut model = vec![0; store.len() as usize];
            pattern(0, 5, &mut model);
            store.write_at(0, &model).unwrap();
            let rows = 110.min((store.len() - offset) / row_bytes);
            let table = store.table(offset, rows, row_bytes).unwrap();
            let row = row_bytes as usize;
            let mut src = vec![0; ids.len() * row];
            pattern(7, seed, &mut src);
            let mut status = vec![9; ids.len()];
            let report = table.scatter(ids[..].into(), &src, DuplicateIds::Last, Some(&mut status)).unwrap();
            // If one id is out of range, nothing is written.
            let is_valid = |id: &i64| (0..rows as i64).contains(id);
            let all_valid = ids.iter().all(is_valid);
            let failed = if all_valid { 0 } else { ids.len() };
            for (index, id) in ids.iter().enumerate() {
                let code = match (all_valid, is_valid(id)) {
                    (true, _) => status::OK,
                    (false, true) => RowStatus::NotRun.code(),
                    (false, false) => RowStatus::OutOfRange.code(),
                };
                prop_assert_eq!(status[index], code);
                if all_valid {
                    let at = (offset + *id as u64 * row_bytes) as usize;
                    model[at..at + row].copy_from_slice(&src[index * row..][..row]);
                }
            }
            prop_assert_eq!(report.failed, failed);
            prop_assert!(content(&store) == model, "{}", name);
        }
    }
}

#[test]
fn a_repeated_id_is_refused_where_it_shall_be() {
    let store = of_sim("size=1MiB");
    let table = store.table(0, 100, 10).unwrap();
    let before = store.stats();
    let ids = [3i64, 4, 3];
    let error = table.scatter((&ids).into(), &[1; 30], DuplicateIds::Error, None);
    let error = error.unwrap_err();
    assert!(matches!(error, Error::Usage { .. }));
    assert!(
        error
            .to_string()
            .contains("rows 0 and 2 have the same id 3")
    );
    assert_eq!(store.stats(), before);
    let ids = [3i64, 4, -3, -3];
    let report = table.scatter((&ids).into(), &[1; 40], DuplicateIds::Error, None);
    assert_eq!(report.unwrap().failed, 4);
}

#[test]
fn additions_sum_what_is_there_and_every_duplicate() {
    for (name, store, _file) in every_kind() {
        // Elements lie across the ends of blocks.
        let table = store.table(511, 300, 12).unwrap();
        let start = [1i32, 2, 3].map(i32::to_le_bytes).concat();
        let ids: Vec<i64> = (0..300).collect();
        let all: Vec<u8> = start.repeat(300);
        let done = table.scatter(ids[..].into(), &all, DuplicateIds::Error, None);
        done.unwrap().check().unwrap();
        let terms: Vec<u8> = (0..15i32).flat_map(i32::to_le_bytes).collect();
        let mut status = [9; 5];
        let ids = [7i32, 299, 7, 7, 300];
        let report = table.scatter_add((&ids).into(), &terms, RowElement::I32, Some(&mut status));
        assert_eq!(report.unwrap().failed, 5);
        let not_run = RowStatus::NotRun.code();
        assert_eq!(status, [not_run, not_run, not_run, not_run, -1]);
        let (ids, terms) = (&ids[..4], &terms[..48]);
        let report = table.scatter_add(ids.into(), terms, RowElement::I32, Some(&mut status[..4]));
        report.unwrap().check().unwrap();
        let mut out = vec![0; 36];
        let done = table.gather((&[7i64, 299, 8]).into(), &mut out, None);
        done.unwrap().check().unwrap();
        let numbers = out.chunks_exact(4);
        let numbers = numbers.map(|four| i32::from_le_bytes([four[0], four[1], four[2], four[3]]));
        let expected = [16, 20, 24, 4, 6, 8, 1, 2, 3];
        assert_eq!(numbers.collect::<Vec<_>>(), expected, "{name}");
    }
}

#[test]
fn additions_of_several_threads_are_all_counted() {
    for (name, store, _file) in every_kind() {
        let table = store.table(510, 50, 8).unwrap();
        let ids: Vec<i64> = (0..50).collect();
        let ones = 1f32.to_le_bytes().repeat(100);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10 {
                        let done = table.scatter_add(ids[..].into(), &ones, RowElement::F32, None);
                        done.unwrap().check().unwrap();
                    }
                });
            }
        });
        let mut out = vec![0; 400];
        let done = table.gather(ids[..].into(), &mut out, None);
        done.unwrap().check().unwrap();
        assert_eq!(out, 40f32.to_le_bytes().repeat(100), "{name}");
    }
}

#[test]
fn scatters_that_cannot_be_are_refused() {
    let store = of_sim("size=1MiB");
    let table = store.table(0, 100, 10).unwrap();
    let error = table.scatter((&[1i64]).into(), &[1; 11], DuplicateIds::Last, None);
    assert!(matches!(error.unwrap_err(), Error::Usage { .. }));
    let error = table.scatter_add((&[1i64]).into(), &[1; 10], RowElement::F32, None);
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("whole number of elements")
    );
    let done = table.scatter_add((&[1i64]).into(), &[0; 10], RowElement::F16, None);
    done.unwrap().check().unwrap();
    let read_only = StoreOptions {
        read_only: true,
        ..options()
    };
    let store = Store::open("sim:mem?size=1MiB", &read_only).unwrap();
    let table = store.table(0, 100, 10).unwrap();
    let error = table.scatter((&[1i64]).into(), &[1; 10], DuplicateIds::Last, None);
    assert!(error.unwrap_err().to_string().contains("reading only"));
}

/// Long scatters are executed in several parts, which share blocks.
#[test]
fn a_long_scatter_is_right_across_its_parts() {
    let store = of_sim("size=16MiB&block=4096");
    let table = store.table(100, 9_000, 1500).unwrap();
    let ids: Vec<i64> = (0..9_000).rev().collect();
    let mut src = vec![0; 9_000 * 1500];
    pattern(0, 8, &mut src);
    let done = table.scatter(ids[..].into(), &src, DuplicateIds::Error, None);
    done.unwrap().check().unwrap();
    let all = content(&store);
    assert!(all[..100].iter().all(|byte| *byte == 0));
    for (index, id) in ids.iter().enumerate() {
        let at = 100 + *id as usize * 1500;
        assert!(all[at..at + 1500] == src[index * 1500..][..1500], "{id}");
    }
    assert!(all[100 + 9_000 * 1500..].iter().all(|byte| *byte == 0));
}

/// If reads or writes of shared blocks fail, the rows report it, and the bytes beside them are unchanged.
#[test]
fn a_failed_command_fails_its_rows_and_harms_no_others() {
    for (fault, code) in [
        ("status:0x281@op=read,nth=2", 0x281),
        ("status:0x280@op=write,nth=3", 0x280),
        ("status:0x281@op=read,every=1", 0x281),
        ("drop@op=read,nth=2", -2),
        ("drop@op=write,nth=3", -2),
        ("allones@op=write,nth=3", -3),
    ] {
        let options = StoreOptions {
            timeout: SHORT,
            ..options()
        };
        let device = format!("sim:mem?size=1MiB&block=4096&fault={fault}");
        let store = Store::open(&device, &options).unwrap();
        store.write_at(0, &[5; 200 * 1024]).unwrap();
        let table = store.table(10, 200, 1000).unwrap();
        let ids: Vec<i64> = (0..20).map(|at| at * 10).collect();
        let mut status = [9; 20];
        let src = vec![6; 20_000];
        let report = table.scatter(ids[..].into(), &src, DuplicateIds::Last, Some(&mut status));
        let failed = report.unwrap().failed;
        assert!(
            status.iter().all(|one| *one == 0 || *one == code),
            "{fault}: {status:?}"
        );
        assert_eq!(failed, status.iter().filter(|one| **one != 0).count());
        if code == -3 || fault.contains("every") {
            assert!(failed > 0, "{fault}");
            continue;
        }
        let mut back = vec![0; 200_010];
        store.read_at(0, &mut back).unwrap();
        for (row, id) in ids.iter().enumerate() {
            let at = 10 + *id as usize * 1000;
            let new = back[at..at + 1000].iter().all(|byte| *byte == 6);
            assert!(new || status[row] != 0, "{fault}: row {row}");
            back[at..at + 1000].fill(5);
        }
        assert!(
            back.iter().all(|byte| *byte == 5),
            "{fault}: a neighbour changed"
        );
        let done = table.scatter(ids[..].into(), &src, DuplicateIds::Last, None);
        done.unwrap().check().unwrap();
    }
}

/// A row of eight commands: the blocks of one that fails are sent again one by one, and one of those fails, too.
#[test]
fn a_row_of_several_commands_fails_with_any_of_them() {
    for (command, block) in [(1, 9), (4, 9), (8, 9), (8, 24)] {
        let fault = |nth| format!("&fault=status:0x280@op=write,nth={nth}");
        let faults = fault(command) + &fault(block);
        let store = of_sim(&format!("size=1MiB&block=512&mdts=1&queues=1{faults}"));
        let table = store.table(0, 4, 64 << 10).unwrap();
        let (src, mut status) = (vec![5; 64 << 10], [9]);
        let report = table.scatter(
            (&[1i64]).into(),
            &src,
            DuplicateIds::Last,
            Some(&mut status),
        );
        let failed = report.unwrap().failed;
        assert_eq!((status, failed), ([0x280], 1), "{command} {block}");
    }
}

/// A run that ends before all of its blocks were written or failed.
#[test]
fn rows_of_a_run_that_stopped_early_are_not_run() {
    let store = of_sim("size=1MiB&block=512");
    let table = store.table(0, 100, 512).unwrap();
    let mut outcome = RowOutcome::new(2);
    let order = table.order((&[4i64, 5]).into(), &mut outcome);
    let request = ScatterRequest {
        table: &table,
        order: &order,
        src: &[1; 1024],
        change: RowChange::Write,
    };
    let blocks = 4 * 512..6 * 512;
    let bad = |bad: Vec<(Range<u64>, i32)>, left| {
        let run = BlockRun {
            blocks: blocks.clone(),
            rows: 0..2,
            bytes: vec![1; 1024],
            bad,
            left,
        };
        let mut outcome = RowOutcome::new(2);
        request.conclude(&run, &mut outcome);
        outcome.status
    };
    let not_run = RowStatus::NotRun.code();
    assert_eq!(bad(Vec::new(), 1024), [not_run, not_run]);
    assert_eq!(bad(Vec::new(), 512), [not_run, not_run]);
    assert_eq!(bad(vec![(5 * 512..6 * 512, 0x280)], 512), [not_run, 0x280]);
    assert_eq!(bad(vec![(5 * 512..6 * 512, 0x280)], 0), [0, 0x280]);
    assert_eq!(bad(Vec::new(), 0), [0, 0]);
}

/// A row of half a block reads the block before it writes: both commands succeed with a hint, and the bytes arrive.
#[test]
fn rows_of_writes_that_succeed_with_hints_are_scattered() {
    let hints = "fault=status:0x2000@op=read&fault=status:0x2000@op=write";
    let store = of_sim(&format!("size=1MiB&block=512&{hints}"));
    let table = store.table(0, 100, 256).unwrap();
    let mut status = [9; 2];
    let report = table
        .scatter(
            (&[3i64, 8]).into(),
            &[7; 512],
            DuplicateIds::Last,
            Some(&mut status),
        )
        .unwrap();
    assert_eq!((report.failed, status), (0, [status::OK; 2]));
    let all = content(&store);
    let written = [768..1024, 2048..2304];
    for (at, byte) in all.iter().enumerate() {
        let is_written = written.iter().any(|range| range.contains(&at));
        assert_eq!(*byte == 7, is_written, "byte {at}");
    }
}
