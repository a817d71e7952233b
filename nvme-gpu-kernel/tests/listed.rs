//! Lists that cannot be: `nvme_read_listed` fails their pieces, and touches nothing but their codes.
// UNSAFETY: the kernel takes addresses of memory that each test keeps.
#![allow(unsafe_code)]
#![cfg(feature = "lanes")]

use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use nvme_gpu_kernel::entries::nvme_read_listed;
use nvme_gpu_kernel::gate::words;
use nvme_gpu_kernel::lanes::{HostGrid, RunningLaunch};
use nvme_gpu_kernel::rows::{
    BLOCK_THREADS, GatherLaunch, LaunchProgress, LaunchSummary, ListedLaunch, RangeTarget, code,
    of_worst,
};
use std::cell::Cell;
use std::rc::Rc;

const PIECE_SHIFT: u32 = 12;
const CANARY: u64 = 0xA5A5_A5A5_A5A5_A5A5;
const NO_CODE: u32 = 77;

/// Result of a launch: codes of its pieces, launches that ended, pieces that failed, the first of them and its code.
#[derive(Debug, PartialEq, Eq)]
struct Ended {
    codes: Vec<i32>,
    launches: u64,
    failed: u64,
    first: (u64, i32),
}

fn wide(values: impl IntoIterator<Item = u64>) -> Vec<AtomicU64> {
    values.into_iter().map(AtomicU64::new).collect()
}

fn address<T>(of: &[T]) -> u64 {
    of.as_ptr().expose_provenance() as u64
}

fn value(word: &AtomicU64) -> u64 {
    word.load(Order::Relaxed, Scope::Gpu)
}

/// Launches a read of the list, for one range and eight pieces at most, and checks that the memory of the range was not
/// written.
fn read(head: [u64; 2], ranges: &[RangeTarget]) -> Ended {
    let place = wide([CANARY; 2048]);
    let of = |range: &RangeTarget| [range.byte, range.bytes, address(&place), range.first];
    let list = wide(head.into_iter().chain(ranges.iter().flat_map(of)));
    let progress = wide([0; size_of::<LaunchProgress>() / 8]);
    let summary = wide([0; size_of::<LaunchSummary>() / 8]);
    let codes: Vec<_> = (0..8).map(|_| AtomicU32::new(NO_CODE)).collect();
    let gate: Vec<_> = (0..words(2)).map(|_| AtomicU32::new(0)).collect();
    let stations = [AtomicU32::new(0), AtomicU32::new(0)];
    let listed = ListedLaunch {
        gather: GatherLaunch {
            gate: address(&gate),
            stations: address(&stations),
            status: address(&codes),
            progress: address(&progress),
            summary: address(&summary),
            count: codes.len() as u64,
            timeout_ns: 1000,
            row_bytes: 1 << PIECE_SHIFT,
            slot_bytes: 1 << PIECE_SHIFT,
            run_rows: 1,
            block_shift: PIECE_SHIFT,
            station_count: 2,
            lanes: 32,
            ..GatherLaunch::default()
        },
        list: address(&list),
        most_ranges: 1,
        piece_shift: PIECE_SHIFT,
    };
    let now_ns = Cell::new(0);
    let grid = HostGrid {
        blocks: 2,
        threads: BLOCK_THREADS,
        at_once: 2,
        clock: Rc::new(move || {
            now_ns.set(now_ns.get() + 1);
            now_ns.get()
        }),
    };
    // SAFETY: what the addresses name lives until the end of this function, and the launch ends before.
    let kernel = move || unsafe { nvme_read_listed(listed) };
    RunningLaunch::new(grid, kernel).run(|| {});
    assert!(place.iter().all(|word| value(word) == CANARY));
    let (row, _, code) = of_worst(value(&summary[1]));
    Ended {
        codes: codes
            .iter()
            .map(|code| code.load(Order::Relaxed, Scope::Gpu) as i32)
            .collect(),
        launches: value(&summary[2]),
        failed: value(&summary[0]),
        first: (row, code),
    }
}

fn ended(refused: usize, failed: u64) -> Ended {
    let code_of = |index| match index < refused {
        true => code::OUT_OF_RANGE,
        false => NO_CODE as i32,
    };
    Ended {
        codes: (0..8).map(code_of).collect(),
        launches: 1,
        failed,
        first: (0, code::OUT_OF_RANGE),
    }
}

#[test]
fn a_list_of_more_ranges_or_pieces_than_the_launch_takes_is_refused_as_a_whole() {
    let range = |first| RangeTarget {
        byte: first << PIECE_SHIFT,
        bytes: 4 << PIECE_SHIFT,
        to: 0,
        first,
    };
    let ranges = [range(0), range(4)];
    assert_eq!(read([2, 8], &ranges), ended(8, 8));
    assert_eq!(read([2, 3], &ranges), ended(3, 3));
    assert_eq!(read([1 << 32, 0], &ranges), ended(0, 1));
    assert_eq!(read([1, 9], &ranges), ended(8, 9));
    assert_eq!(read([1, u64::MAX], &ranges), ended(8, u64::MAX));
}

#[test]
fn pieces_that_the_ranges_do_not_have_fail() {
    for bytes in [0, u64::MAX] {
        // No piece has a byte: the range is empty, or begins after all pieces.
        let (byte, first) = match bytes {
            0 => (1 << PIECE_SHIFT, 0),
            _ => (u64::MAX, 0),
        };
        let range = RangeTarget {
            byte,
            bytes,
            to: 0,
            first,
        };
        assert_eq!(read([1, 5], &[range]), ended(5, 5), "{bytes} bytes");
    }
}
