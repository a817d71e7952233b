//! A gather from files by several threads, each with a share of the request: the thread that reads a
//! file spends its time in system calls and in copies out of the page cache, so threads help.
//!
//! Commands of a drive are submitted and polled by one thread, which waits most of its time anyway.

use super::space::StoreSpace;
use nvme_driver::lock::lock;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, available_parallelism, scope};

/// Rows for which one more thread pays.
const ROWS_OF_THREAD: usize = 512;
/// Bytes of rows for which one more thread pays, however few rows they are.
const BYTES_OF_THREAD: u64 = 2 << 20;
/// Number of shares for each thread: a thread that finds its rows in memory takes more shares than one that waits for
/// the medium.
const SHARES_OF_THREAD: usize = 4;

/// Rows that one thread gathers with one call.
struct ThreadRows<'a> {
    rows: Range<usize>,
    out: &'a mut [u8],
    status: Option<&'a mut [i32]>,
}

/// Returns the number of threads for `rows` rows of `row_bytes` bytes: at most the number of lanes that one
/// call may use.
pub(super) fn threads(space: &StoreSpace, rows: usize, row_bytes: u64) -> usize {
    let by_files = space.members.iter().all(|one| one.controller.is_none());
    let lanes = space.members.iter().map(|one| one.pool.per_call()).min();
    let processors = available_parallelism().map_or(1, usize::from);
    match lanes {
        Some(lanes) if by_files => {
            let by_bytes = (rows as u64).saturating_mul(row_bytes) / BYTES_OF_THREAD;
            let by_bytes = usize::try_from(by_bytes).unwrap_or(usize::MAX);
            let most = lanes.min(processors);
            by_bytes.max(rows / ROWS_OF_THREAD).clamp(1, most)
        }
        _ => 1,
    }
}

/// Calls `gather` from `threads` threads, each time with a share of the `count` rows and the
/// corresponding parts of `out` and `status`, which have room for all rows. Returns its results
/// with the first row of each, in order.
pub(super) fn gather<R: Send>(
    count: usize,
    out: &mut [u8],
    status: Option<&mut [i32]>,
    threads: usize,
    gather: impl Fn(Range<usize>, &mut [u8], Option<&mut [i32]>) -> R + Sync,
) -> Vec<(usize, R)> {
    let todo = Mutex::new(shares(count, out, status, threads * SHARES_OF_THREAD));
    let done = Mutex::new(Vec::new());
    let work = || {
        loop {
            let share = lock(&todo).pop();
            let Some(share) = share else { return };
            let first = share.rows.start;
            let result = gather(share.rows, share.out, share.status);
            lock(&done).push((first, result));
        }
    };
    scope(|scope| {
        for _ in 1..threads {
            // If a thread cannot be started, the others take its shares.
            let thread = Builder::new().name("gather".to_owned());
            if thread.spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    let done = done.into_inner();
    let mut done = done.unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(first, _)| *first);
    done
}

/// Divides the request into `parts` shares; the last one may be smaller.
fn shares<'a>(
    count: usize,
    out: &'a mut [u8],
    status: Option<&'a mut [i32]>,
    parts: usize,
) -> Vec<ThreadRows<'a>> {
    let rows = count.div_ceil(parts).max(1);
    let row_bytes = out.len() / count.max(1);
    let mut status = status.map(|status| status.chunks_mut(rows));
    let share = |(index, out): (usize, &'a mut [u8])| {
        let first = index * rows;
        ThreadRows {
            rows: first..(first + rows).min(count),
            out,
            status: status.as_mut().and_then(Iterator::next),
        }
    };
    let out = out.chunks_mut((rows * row_bytes).max(1));
    out.enumerate().map(share).collect()
}

#[cfg(test)]
mod tests {
    use super::threads;
    use crate::testing::{TestFile, options};
    use crate::{Store, Table, status};
    use nvme_driver::error::Error;
    use std::thread::available_parallelism;

    const ROW: usize = 100;

    /// Returns a table over a file whose row `id` begins with `id`.
    fn table(file: &TestFile, rows: usize) -> Table {
        let mut data = vec![0; rows * ROW];
        for (id, row) in data.chunks_mut(ROW).enumerate() {
            row[..8].copy_from_slice(&(id as u64).to_le_bytes());
        }
        std::fs::write(file.path(), &data).unwrap();
        let store = Store::open(&format!("file:{}", file.text()), &options()).unwrap();
        store.table(0, rows as u64, ROW as u64).unwrap()
    }

    #[test]
    fn shares_come_to_what_one_call_gives() {
        let file = TestFile::new(1 << 20);
        let table = table(&file, 5000);
        let ids: Vec<i64> = (0..4001).map(|at| (at * 7919) % 5003 - 1).collect();
        let run = |threads| {
            let (mut out, mut status) = (vec![0xFF; ids.len() * ROW], vec![7; ids.len()]);
            let ids = ids.as_slice().into();
            let report = table.gather_by_threads(ids, &mut out, Some(&mut status), threads);
            let first = report.first.as_ref().map(|first| (first.row, first.id));
            (out, status, report.rows, report.failed, first)
        };
        let alone = run(1);
        let wrong = |id: &i64| *id < 0 || *id >= 5000;
        assert_eq!(alone.3, ids.iter().filter(|id| wrong(id)).count());
        assert_eq!(alone.4.unwrap().0, ids.iter().position(wrong).unwrap());
        for (row, id) in ids.iter().enumerate().filter(|(_, id)| !wrong(id)) {
            assert_eq!(alone.0[row * ROW..][..8], id.to_le_bytes());
        }
        assert!([2, 3, 16].into_iter().all(|threads| run(threads) == alone));
    }

    #[test]
    fn errors_of_a_share_are_errors_of_the_call() {
        let file = TestFile::new(1 << 20);
        let table = table(&file, 5000);
        let shorter = std::fs::OpenOptions::new().write(true).open(file.path());
        shorter.unwrap().set_len(2500 * ROW as u64).unwrap();
        let ids: Vec<i32> = (0..5000).collect();
        let mut out = vec![0xFF; ids.len() * ROW];
        let report = table.gather_by_threads(ids.as_slice().into(), &mut out, None, 3);
        // The row that the file ends in shares its page with others.
        assert!((2460..=2540).contains(&report.failed), "{}", report.failed);
        let first = report.first.as_ref().unwrap();
        assert_eq!(first.row as i64, first.id);
        assert_ne!(first.status, status::OK);
        assert!(out[first.row * ROW..].iter().all(|byte| *byte == 0));
        assert!(matches!(report.check(), Err(Error::File { .. })));
    }

    #[test]
    fn small_requests_and_drives_have_one_thread() {
        let file = TestFile::new(1 << 20);
        let table = table(&file, 100);
        assert_eq!(threads(&table.space, 1000, 100), 1);
        assert_eq!(threads(&table.space, 31, 64 << 10), 1);
        let processors = available_parallelism().unwrap().get();
        assert_eq!(threads(&table.space, 1 << 20, 100), processors.min(4));
        assert_eq!(threads(&table.space, 256, 64 << 10), processors.min(4));
        #[cfg(feature = "sim")]
        {
            let drive = Store::open("sim:mem?size=1MiB", &options()).unwrap();
            let table = drive.table(0, 10, 10).unwrap();
            assert_eq!(threads(&table.space, 1 << 20, 10), 1);
        }
    }
}
