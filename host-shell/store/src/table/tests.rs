//! Tests of tables: rows of any size and offset, against the bytes of the store.

use super::*;
use crate::testing::{SHORT, TestFile, every_kind, of_file, of_sim, options, pattern};
use crate::{FileIo, Store, StoreOptions};
use proptest::prelude::*;

/// Returns a store with a pattern, and the pattern.
fn filled(store: &Store) -> Vec<u8> {
    let mut all = vec![0; store.len() as usize];
    pattern(0, 5, &mut all);
    store.write_at(0, &all).unwrap();
    all
}

/// Gathers `ids` and compares every row and every status with `all`.
fn check(table: &Table, all: &[u8], ids: &[i64]) -> RowReport {
    let row = table.row_bytes() as usize;
    let mut out = vec![0xEE; ids.len() * row];
    let mut status = vec![77; ids.len()];
    let report = table
        .gather(ids.into(), &mut out, Some(&mut status))
        .unwrap();
    for (index, id) in ids.iter().enumerate() {
        let bytes = &out[index * row..][..row];
        match u64::try_from(*id).ok().filter(|id| *id < table.rows()) {
            Some(id) => {
                let at = (table.offset() + id * table.row_bytes()) as usize;
                assert_eq!(status[index], 0, "row {index}, id {id}");
                assert!(bytes == &all[at..at + row], "row {index}, id {id}");
            }
            None => {
                assert_eq!(status[index], -1, "row {index}, id {id}");
                assert!(bytes.iter().all(|byte| *byte == 0));
            }
        }
    }
    assert_eq!(report.rows, ids.len());
    report
}

#[test]
fn rows_of_any_size_at_any_offset_are_gathered() {
    for (name, store, _file) in every_kind() {
        let all = filled(&store);
        for row_bytes in [1u64, 16, 100, 512, 1536, 4096, 4099, 65_536, 300_007] {
            for offset in [0u64, 96, 511, 4096] {
                let rows = (store.len() - offset) / row_bytes;
                let table = store.table(offset, rows, row_bytes).unwrap();
                let last = rows as i64 - 1;
                let middle = last / 2;
                let ids = [
                    last,
                    0,
                    middle,
                    middle,
                    0,
                    -1,
                    rows as i64,
                    i64::MIN,
                    i64::MAX,
                    last.min(1),
                ];
                let report = check(&table, &all, &ids);
                assert_eq!(report.failed, 4, "{name}: {row_bytes} {offset}");
                let first = report.first.as_ref().unwrap();
                assert_eq!((first.row, first.id, first.status), (5, -1, -1));
                let error = report.check().unwrap_err();
                assert!(matches!(error, Error::Usage { .. }), "{error}");
            }
        }
    }
}

#[test]
fn ids_of_32_bits_are_those_of_64() {
    let store = of_sim("size=1MiB");
    let all = filled(&store);
    let table = store.table(96, 1000, 512).unwrap();
    let mut out = vec![0; 3 * 512];
    let ids = RowIds::from(&[3i32, -1, 999]);
    assert!(!ids.is_empty());
    let report = table.gather(ids, &mut out, None).unwrap();
    assert_eq!(report.failed, 1);
    assert!(out[..512] == all[96 + 3 * 512..][..512]);
    assert!(out[1024..] == all[96 + 999 * 512..][..512]);
    let none: [i32; 0] = [];
    let report = table.gather(none[..].into(), &mut [], None).unwrap();
    assert_eq!((report.rows, report.failed), (0, 0));
    report.check().unwrap();
    assert!(format!("{table:?}").contains("row_bytes: 512"));
}

#[test]
fn tables_that_cannot_be_are_refused() {
    let store = of_sim("size=1MiB");
    for (offset, rows, row_bytes) in [
        (0, 1, 0),
        (0, u64::MAX, 2),
        (0, u64::MAX, u64::MAX),
        (u64::MAX, 1, 1),
        (1, 1 << 20, 1),
        (0, (1 << 20) + 1, 1),
        ((1 << 20) + 1, 0, 1),
    ] {
        let error = store.table(offset, rows, row_bytes).unwrap_err();
        assert!(matches!(error, Error::Usage { .. }), "{error}");
    }
    let table = store.table(1 << 20, 0, u64::MAX).unwrap();
    let report = table.gather((&[] as &[i64]).into(), &mut [], None).unwrap();
    assert_eq!(report.rows, 0);
    // The size of the rows in memory is checked, too.
    let error = table
        .gather((&[0i64, 1]).into(), &mut [], None)
        .unwrap_err();
    assert!(matches!(error, Error::Usage { .. }));
    let table = store.table(0, 10, 100).unwrap();
    for bytes in [0, 199, 201] {
        let error = table.gather((&[0i64, 1]).into(), &mut vec![0; bytes], None);
        assert!(matches!(error.unwrap_err(), Error::Usage { .. }));
    }
    let error = table.gather((&[0i64, 1]).into(), &mut [0; 200], Some(&mut [0; 3]));
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("does not fit 2 rows")
    );
}

#[test]
fn rows_of_one_block_share_a_read_and_neighbours_are_joined() {
    let store = of_sim("size=1MiB&block=4096");
    let all = filled(&store);
    let table = store.table(0, 2048, 512).unwrap();
    let commands = |ids: &[i64]| {
        let before = store.stats().commands;
        let _ = check(&table, &all, ids);
        store.stats().commands - before
    };
    assert_eq!(commands(&[0, 3, 7, 3, 0]), 1, "one block");
    assert_eq!(commands(&[0, 8, 16, 25]), 1, "neighbours");
    assert_eq!(commands(&[0, 80, 160]), 3, "apart");
    let every: Vec<i64> = (0..2048).rev().collect();
    assert!(commands(&every) <= 8, "1 MiB in long reads");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn gathers_agree_with_a_vector(
        offset in 0u64..9000,
        row_bytes in 1u64..9000,
        ids in prop::collection::vec(-3i64..120, 0..200)
    ) {
        for (_, store, _file) in every_kind() {
            let all = filled(&store);
            let rows = 110.min((store.len() - offset) / row_bytes);
            let table = store.table(offset, rows, row_bytes).unwrap();
            let _ = check(&table, &all, &ids);
        }
    }
}

#[test]
fn many_threads_gather_from_one_table() {
    for (_, store, _file) in every_kind() {
        let all = filled(&store);
        let table = store.table(33, 1000, 1000).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..5i64 {
                let (table, all) = (table.clone(), &all);
                scope.spawn(move || {
                    for round in 0..10 {
                        let ids: Vec<i64> = (0..60)
                            .map(|at| (at * 37 + thread * 101 + round) % 1000)
                            .collect();
                        check(&table, all, &ids).check().unwrap();
                    }
                });
            }
        });
    }
}

/// If a block of the medium fails, exactly the rows that lie in it report that, whichever commands were joined.
#[test]
fn exactly_the_rows_of_a_bad_block_fail() {
    let file = TestFile::new(1 << 20);
    // The drive's LBA 9 of 4096 bytes is bad as often as it is read alone or with others.
    let device = format!("sim:{}?block=4096", file.text());
    let store = Store::open(&device, &options()).unwrap();
    let all = filled(&store);
    drop(store);
    // If each read fails, so do all rows.
    let every = format!("{device}&fault=status:0x281@op=read,every=1");
    let store = Store::open(&every, &options()).unwrap();
    let table = store.table(0, 256, 4096).unwrap();
    let mut out = vec![1; 64 * 4096];
    let mut status = [0; 64];
    let ids: Vec<i64> = (0..64).collect();
    let report = table
        .gather(ids[..].into(), &mut out, Some(&mut status))
        .unwrap();
    assert_eq!(status, [0x281; 64]);
    assert!(out.iter().all(|byte| *byte == 0));
    assert_eq!(report.failed, 64);
    let error = report.check().unwrap_err();
    assert!(
        error.to_string().contains("Unrecovered Read Error"),
        "{error}"
    );
    drop((store, table));
    // A joined read fails, then one read of a block: one row.
    let twice =
        format!("{device}&fault=status:0x281@op=read,nth=1&fault=status:0x281@op=read,nth=10");
    let store = Store::open(&twice, &options()).unwrap();
    let table = store.table(0, 256, 4096).unwrap();
    let ids: Vec<i64> = (0..32).collect();
    let (mut out, mut status) = (vec![1; 32 * 4096], [9; 32]);
    let report = table
        .gather(ids[..].into(), &mut out, Some(&mut status))
        .unwrap();
    assert_eq!(report.failed, 1);
    for (index, code) in status.iter().enumerate() {
        let bytes = &out[index * 4096..][..4096];
        match *code {
            0 => assert!(bytes == &all[index * 4096..][..4096]),
            code => assert!(code == 0x281 && bytes.iter().all(|byte| *byte == 0)),
        }
    }
    let _ = check(&table, &all, &ids);
}

/// A controller's faults end rows with a status, or not at all; they make none wrong. A controller whose data arrive
/// after its completion (`latedata`) cannot be detected, and is not tested here.
#[test]
fn no_planned_fault_makes_a_row_wrong() {
    let names = FAULTS.map(|fault| fault.split(':').next().unwrap());
    for row in nvme_sim::config::FAULTS {
        let other_host = CHANGES
            .iter()
            .any(|(change, _)| change.starts_with(row.name));
        let apart = ["latedata", "sanitizefail", "stuckready"].contains(&row.name) || other_host;
        assert!(
            apart || names.contains(&row.name),
            "{} is missing",
            row.name
        );
    }
    for fault in FAULTS {
        for nth in [1, 11] {
            gather_with(&format!("{fault}@op=read,nth={nth}"));
        }
    }
    gather_with("cfs@op=read,nth=2&fault=stuckready@nth=2");
}

/// Changes that another host makes while rows are read, and the report's text; empty if rows are unchanged.
const CHANGES: [(&str, &str); 8] = [
    (
        "format:4096",
        "namespace 1 was formatted (512 -> 4096 bytes a block)",
    ),
    (
        "shrink:512KiB",
        "namespace 1 has become smaller (2048 -> 1024 blocks)",
    ),
    ("detach", "namespace 1 was deleted or detached"),
    ("protect", ""),
    ("erase", ""),
    (
        "firmware:1",
        "the controller's largest transfer (MDTS) fell",
    ),
    ("grant:1", ""),
    ("replace", ""),
];

/// Rows that were read while the namespace changed are never taken for good, and the next gather sends nothing.
#[test]
fn no_change_by_another_host_makes_a_row_wrong() {
    for (change, says) in CHANGES {
        for nth in [1, 11] {
            let device = format!("sim:mem?size=1MiB&block=512&fault={change}@op=read,nth={nth}");
            let store = Store::open(&device, &options()).unwrap();
            let all = filled(&store);
            let table = store.table(13, 900, 1000).unwrap();
            let ids: Vec<i64> = (0..40).map(|at| at * 21 % 900).collect();
            let gather = || {
                let (mut out, mut status) = (vec![0xEE; 40_000], [7; 40]);
                let report = table.gather(ids[..].into(), &mut out, Some(&mut status));
                for (index, code) in status.iter().enumerate() {
                    let at = 13 + ids[index] as usize * 1000;
                    let is_right = out[index * 1000..][..1000] == all[at..at + 1000];
                    assert!(*code != 0 || is_right, "{change}: row {index} is wrong");
                }
                report.unwrap().check()
            };
            let first = gather();
            let second = gather();
            if says.is_empty() {
                assert_eq!(second.is_err(), change == "erase", "{change}");
                continue;
            }
            for said in [first, second] {
                let Err(Error::Changed { cause }) = said else {
                    panic!("{change}: {said:?}");
                };
                assert!(cause.contains(says), "{cause}");
            }
        }
    }
}

const FAULTS: [&str; 17] = [
    "drop",
    "delay:5ms",
    "delay:10s",
    "stubborn:10s",
    "reorder",
    "duplicate",
    "echo:1ms",
    "wrongcid:4095",
    "flippedcid:1",
    "flippedcid:0x1000",
    "wrongphase",
    "badsqhd:500",
    "torncqe",
    "status:0x6",
    "status:0x281",
    "cfs",
    "allones",
];

fn gather_with(fault: &str) {
    let options = StoreOptions {
        timeout: SHORT,
        ..options()
    };
    let device = format!("sim:mem?size=1MiB&block=512&fault={fault}");
    let store = Store::open(&device, &options).unwrap();
    let all = filled(&store);
    let table = store.table(13, 900, 1000).unwrap();
    let ids: Vec<i64> = (0..40).map(|at| at * 21 % 900).collect();
    for round in 0..3 {
        let (mut out, mut status) = (vec![0xEE; 40_000], [7; 40]);
        let report = table.gather(ids[..].into(), &mut out, Some(&mut status));
        let report = report.unwrap();
        let mut failed = 0;
        for (index, code) in status.iter().enumerate() {
            let bytes = &out[index * 1000..][..1000];
            let at = 13 + ids[index] as usize * 1000;
            match *code {
                0 => assert!(
                    bytes == &all[at..at + 1000],
                    "{fault}: row {index} is wrong"
                ),
                code => {
                    failed += 1;
                    assert!(bytes.iter().all(|byte| *byte == 0), "{fault}");
                    assert!(code >= -5, "{fault}: {code}");
                }
            }
        }
        assert_eq!(report.failed, failed, "{fault}");
        let is_gone = status.contains(&RowStatus::Gone.code());
        if is_gone {
            assert!(
                fault.contains("allones") || fault.contains("stuckready"),
                "{fault}"
            );
            assert!(matches!(report.check().unwrap_err(), Error::Gone { .. }));
            return;
        }
        // The last is after the fault.
        assert!(round < 2 || failed == 0, "{fault}: {status:?}");
        assert_eq!(report.check().is_err(), failed > 0);
    }
}

#[test]
fn an_error_of_a_file_keeps_its_errno_and_spares_other_rows() {
    let file = TestFile::new(1 << 20);
    let store = of_file(&file, FileIo::Auto);
    let all = filled(&store);
    let table = store.table(0, 256, 4096).unwrap();
    let shorter = std::fs::OpenOptions::new().write(true).open(file.path());
    shorter.unwrap().set_len(40 * 4096).unwrap();
    let ids: Vec<i64> = (36..44).collect();
    let (mut out, mut status) = (vec![1; 8 * 4096], [9; 8]);
    let report = table
        .gather(ids[..].into(), &mut out, Some(&mut status))
        .unwrap();
    assert_eq!(status, [0, 0, 0, 0, -4, -4, -4, -4]);
    assert!(out[..4 * 4096] == all[36 * 4096..40 * 4096]);
    assert_eq!(report.errno, None, "the end of a file has none");
    assert!(report.check().unwrap_err().to_string().contains("shorter"));
}

#[test]
fn a_dead_member_fails_the_rows_that_lie_on_it() {
    let text = "stripe:sim:mem?size=1MiB|sim:mem?size=1MiB&fault=allones@op=read,nth=1?stripe=4KiB";
    let store = Store::open(text, &options()).unwrap();
    let all = filled(&store);
    let table = store.table(0, 512, 4096).unwrap();
    let ids = [0i64, 1, 2, 3, 4, 100];
    for _ in 0..2 {
        let (mut out, mut status) = (vec![1; 6 * 4096], [9; 6]);
        let report = table
            .gather((&ids).into(), &mut out, Some(&mut status))
            .unwrap();
        assert_eq!(status, [0, -3, 0, -3, 0, 0]);
        assert!(out[5 * 4096..] == all[100 * 4096..][..4096]);
        let first = report.first.unwrap();
        assert!(first.error.unwrap().to_string().contains("member 1"));
    }
}

#[test]
fn rows_without_an_error_of_their_own_are_reported_by_status() {
    let report = RowOutcome::new(2).report((&[5i64, 6]).into(), None);
    assert_eq!(
        (report.failed, report.first.as_ref().unwrap().status),
        (2, -5)
    );
    let error = report.check().unwrap_err();
    assert!(
        error.to_string().contains("row 0 (id 5): Not Run"),
        "{error}"
    );
}

/// The report has the error of its first row, also if a command for another row failed before for another reason.
#[test]
fn the_error_of_a_report_is_that_of_its_first_row() {
    let mut outcome = RowOutcome::new(2);
    for (row, code) in [(1, 0x281), (0, 0x280)] {
        outcome.status[row] = outcome.note(Error::Command {
            what: "a read".to_owned(),
            status: nvme_core::spec::Status(code),
        });
    }
    let error = outcome.report((&[5i64, 6]).into(), None).check();
    let is_first =
        |error: &Error| matches!(error, Error::Command { status, .. } if status.0 == 0x280);
    assert!(error.as_ref().is_err_and(is_first), "{error:?}");
}

/// A row of several commands, which end in any order.
#[test]
fn a_row_is_right_when_all_of_its_bytes_have_come_and_no_command_failed() {
    let store = of_sim("size=1MiB&block=512");
    let table = store.table(0, 2, 4096).unwrap();
    let ids = [1i64];
    // Commands of the row in the order in which they end, and whether each fails.
    let ways: [(&[(usize, bool)], i32); 5] = [
        (&[(0, false)], RowStatus::NotRun.code()),
        (&[(1, false)], RowStatus::NotRun.code()),
        (&[(0, false), (1, false)], status::OK),
        (&[(0, true), (1, false)], 0x281),
        (&[(1, false), (0, true)], 0x281),
    ];
    for (ends, wanted) in ways {
        let mut outcome = RowOutcome::new(1);
        let order = table.order((&ids).into(), &mut outcome);
        let (reads, pieces) = table.plan(&order);
        let half = |number: u32| MemberPiece {
            at: pieces[0].at + u64::from(number) * 2048,
            offset: pieces[0].offset + u64::from(number) * 2048,
            bytes: 2048,
            ..pieces[0]
        };
        let pieces = [half(0), half(1)];
        let mut out = vec![0; table.row_bytes as usize];
        let mut work = TableGather {
            table: &table,
            order: &order,
            reads: &reads,
            left: vec![table.row_bytes],
            out: &mut out,
            outcome,
        };
        for (half, fails) in ends {
            let piece = &pieces[*half];
            match fails {
                false => work.done(piece, &vec![7; piece.bytes as usize]),
                true => {
                    let what = "a read".to_owned();
                    let status = nvme_core::spec::Status(0x281);
                    work.failed(piece, Error::Command { what, status });
                }
            }
        }
        assert_eq!(work.outcome.status, [wanted], "{ends:?}");
    }
}

/// A table of more rows than ids of 32 bits have numbers: one below zero is none of the rows past 2^31.
#[test]
fn ids_of_32_bits_have_a_sign() {
    const ROWS: u64 = 3 << 30;
    let file = TestFile::new(ROWS);
    let store = of_file(&file, FileIo::Auto);
    let table = store.table(0, ROWS, 1).unwrap();
    for at in [1u64 << 31, (1 << 31) - 1, ROWS - 1] {
        store.write_at(at, &[9]).unwrap();
    }
    let (mut out, mut status) = ([5; 4], [7; 4]);
    let narrow = [-1i32, i32::MIN, i32::MAX, 0];
    let report = table.gather((&narrow).into(), &mut out, Some(&mut status));
    assert_eq!(report.unwrap().failed, 2);
    assert_eq!((status, out), ([-1, -1, 0, 0], [0, 0, 9, 0]));
    let wide = [1i64 << 31, ROWS as i64 - 1, ROWS as i64, 0];
    let report = table.gather((&wide).into(), &mut out, Some(&mut status));
    assert_eq!(report.unwrap().failed, 1);
    assert_eq!((status, out), ([0, 0, -1, 0], [9, 9, 0, 0]));
}

/// Hints beside a status of success are no failure: the rows that came are the drive's, and none is stale.
#[test]
fn rows_of_reads_that_succeed_with_hints_are_gathered() {
    for hints in ["0x2000", "0x4000", "0x0800"] {
        let store = of_sim(&format!("size=1MiB&block=512&fault=status:{hints}@op=read"));
        let all = filled(&store);
        let table = store.table(96, 100, 700).unwrap();
        assert_eq!(check(&table, &all, &[5, 99, 0]).failed, 0, "{hints}");
    }
}
