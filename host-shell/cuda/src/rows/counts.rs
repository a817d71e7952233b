//! Counts of a store's launches. Rows are counted by the ends of launches, which kernels report in memory of the host,
//! so that each run of a captured graph counts and no kernel does more for it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of the launches of one drive's rows since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowCounts {
    /// Gathers that were launched or captured, whose blocks own their queues.
    pub owned: u64,
    /// Gathers that were launched or captured, whose blocks share their queues.
    pub shared: u64,
    /// Gathers in halves that were launched or captured.
    pub begun: u64,
    /// Rows of those that second launches had to read.
    pub late_rows: u64,
    /// Rows that failed in launches that have ended.
    pub failed_rows: u64,
    /// Rows and bytes of gathers that have ended, each run of a graph included. Ranges count in the pieces that the GPU
    /// reads; those that a kernel lists, and rows that kernels of a caller consume, are not counted.
    pub read: MovedRows,
    /// Rows and bytes of scatters that have ended, each run of a graph included.
    pub written: MovedRows,
    /// Rows of gathers that read each distinct row once.
    pub unique_asked: u64,
    /// Number of these rows that were read.
    pub unique_read: u64,
    /// Time that threads waited for launches, in nanoseconds.
    pub waited_ns: u64,
    /// Launches that have not ended, without those of graphs.
    pub under_way: u64,
    /// Blocks of the last launch.
    pub last_blocks: u64,
    /// Registers that these blocks hold together.
    pub last_registers: u64,
}

/// Rows, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MovedRows {
    /// Number of rows.
    pub rows: u64,
    /// Number of their bytes.
    pub bytes: u64,
}

impl MovedRows {
    fn add(&mut self, other: Self, times: u32) {
        let times = u64::from(times);
        self.rows = self.rows.wrapping_add(other.rows.wrapping_mul(times));
        self.bytes = self.bytes.wrapping_add(other.bytes.wrapping_mul(times));
    }
}

/// Size of the last launch of a store's kernels.
#[derive(Default)]
pub(super) struct LastLaunch {
    blocks: AtomicU64,
    registers: AtomicU64,
}

impl LastLaunch {
    /// Records a launch of `blocks` blocks of `threads` threads with `registers` registers each.
    pub fn record(&self, blocks: u32, threads: u32, registers: u32) {
        let held = u64::from(blocks) * u64::from(threads) * u64::from(registers);
        self.blocks.store(blocks.into(), Ordering::Relaxed);
        self.registers.store(held, Ordering::Relaxed);
    }

    pub fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    pub fn registers(&self) -> u64 {
        self.registers.load(Ordering::Relaxed)
    }
}

/// Rows that each run of a launch moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LaunchLoad {
    pub moved: MovedRows,
    pub is_scatter: bool,
    pub is_captured: bool,
}

/// The loads of launches by their number. A number has the ends of all launches that ever had it.
#[derive(Default)]
pub(super) struct LaunchLoads {
    /// Loads, each with the number of ends before it.
    by_number: HashMap<u32, (LaunchLoad, u32)>,
    read: MovedRows,
    written: MovedRows,
}

impl LaunchLoads {
    /// Gives launch `number`, whose count of ends is `before`, its load. The launch that had the number before has ended.
    pub fn begin(&mut self, number: u32, load: LaunchLoad, before: u32) {
        if let Some((earlier, begun)) = self.by_number.insert(number, (load, before)) {
            let runs = before.wrapping_sub(begun);
            self.moved(earlier.is_scatter).add(earlier.moved, runs);
        }
    }

    fn moved(&mut self, is_scatter: bool) -> &mut MovedRows {
        match is_scatter {
            true => &mut self.written,
            false => &mut self.read,
        }
    }

    /// Returns what has been read and written, and the number of launches that have not ended, without those of graphs.
    pub fn sum(&self, ended: impl Fn(u32) -> u32) -> (MovedRows, MovedRows, u64) {
        let (mut read, mut written, mut under_way) = (self.read, self.written, 0);
        for (number, (load, before)) in &self.by_number {
            let runs = ended(*number).wrapping_sub(*before);
            match load.is_scatter {
                true => written.add(load.moved, runs),
                false => read.add(load.moved, runs),
            }
            under_way += u64::from(runs == 0 && !load.is_captured);
        }
        (read, written, under_way)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_run_of_a_launch_counts_and_a_number_is_used_again() {
        let load = |rows, is_scatter, is_captured| LaunchLoad {
            moved: MovedRows {
                rows,
                bytes: rows * 100,
            },
            is_scatter,
            is_captured,
        };
        let mut loads = LaunchLoads::default();
        let mut ends = [u32::MAX, 5];
        loads.begin(0, load(3, false, true), ends[0]);
        loads.begin(1, load(7, true, false), ends[1]);
        let look = |loads: &LaunchLoads, ends: [u32; 2]| {
            let (read, written, under_way) = loads.sum(|number| ends[number as usize]);
            assert_eq!(
                (read.bytes, written.bytes),
                (read.rows * 100, written.rows * 100)
            );
            (read.rows, written.rows, under_way)
        };
        assert_eq!(look(&loads, ends), (0, 0, 1));
        // Two runs of a graph, over the end of the count.
        ends = [1, 6];
        assert_eq!(look(&loads, ends), (6, 7, 0));
        loads.begin(1, load(10, false, false), 6);
        assert_eq!(look(&loads, ends), (6, 7, 1));
        ends[1] = 7;
        assert_eq!(look(&loads, ends), (16, 7, 0));
    }
}
