//! Counts of a store's launches. Rows are counted by the ends of launches, which kernels report in memory of the host,
//! so that each run of a captured graph counts and no kernel does more for it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of the launches of one drive's rows since the store was opened; those over stripes are the first drive's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowCounts {
    /// Gathers that were launched or captured, whose blocks own their queues.
    pub owned: u64,
    /// Gathers that were launched or captured, whose blocks share their queues.
    pub shared: u64,
    /// Launches of scatters, captured ones too, whose blocks own their queues.
    pub owned_scatters: u64,
    /// Launches of scatters, captured ones too, whose blocks share their queues.
    pub shared_scatters: u64,
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
    /// Rows of gathers through a cache of rows that have ended, each run of a graph included.
    pub cache_asked: u64,
    /// Number of these rows that were in the cache.
    pub cache_hits: u64,
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
    /// The rows go through a cache.
    pub is_cached: bool,
    pub is_captured: bool,
}

/// The loads of launches by their number. A number has the ends of all launches that ever had it.
#[derive(Default)]
pub(super) struct LaunchLoads {
    /// Loads, each with the number of ends before it.
    by_number: HashMap<u32, (LaunchLoad, u32)>,
    /// Sum of the launches whose numbers have others now.
    ended: EndedLoads,
}

/// Loads that launches have moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct EndedLoads {
    pub read: MovedRows,
    pub written: MovedRows,
    /// Rows of gathers through a cache.
    pub cached: u64,
    /// Launches that have not ended, without those of graphs.
    pub under_way: u64,
}

impl EndedLoads {
    fn add(&mut self, load: &LaunchLoad, runs: u32) {
        match load.is_scatter {
            true => self.written.add(load.moved, runs),
            false => self.read.add(load.moved, runs),
        }
        if load.is_cached {
            let rows = load.moved.rows.wrapping_mul(runs.into());
            self.cached = self.cached.wrapping_add(rows);
        }
    }
}

impl LaunchLoads {
    /// Gives launch `number`, whose count of ends is `before`, its load. The launch that had the number before has ended.
    pub fn begin(&mut self, number: u32, load: LaunchLoad, before: u32) {
        if let Some((earlier, begun)) = self.by_number.insert(number, (load, before)) {
            self.ended.add(&earlier, before.wrapping_sub(begun));
        }
    }

    /// Returns what has been moved; `ended` has the number of ends of each launch.
    pub fn sum(&self, ended: impl Fn(u32) -> u32) -> EndedLoads {
        let mut sum = self.ended;
        for (number, (load, before)) in &self.by_number {
            let runs = ended(*number).wrapping_sub(*before);
            sum.add(load, runs);
            sum.under_way += u64::from(runs == 0 && !load.is_captured);
        }
        sum
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
            is_cached: is_captured,
            is_captured,
        };
        let mut loads = LaunchLoads::default();
        let mut ends = [u32::MAX, 5];
        loads.begin(0, load(3, false, true), ends[0]);
        loads.begin(1, load(7, true, false), ends[1]);
        let look = |loads: &LaunchLoads, ends: [u32; 2]| {
            let sum = loads.sum(|number| ends[number as usize]);
            let (read, written) = (sum.read, sum.written);
            assert_eq!(
                (read.bytes, written.bytes),
                (read.rows * 100, written.rows * 100)
            );
            // That of the graph alone.
            assert_eq!(sum.cached, read.rows.min(6));
            (read.rows, written.rows, sum.under_way)
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
