//! A gather in halves: other launches act between its two launches, and the controller may be reset
//! there.

use super::launch::Work;
use super::{World, address};
use crate::account::Failure;
use nvme_core::sync::{AtomicU32, AtomicU64};
use nvme_gpu_kernel::lanes::LaunchTurn;
use nvme_gpu_kernel::rows::{Batched, HalvedGather, RECORD_BYTES, code};

/// Rows of a launch at most.
const MOST_ROWS: usize = 70;
/// Number of stations that a gather may hold from one launch to the other: the station that owns a
/// queue.
const HELD: u32 = 1;

/// Memory of a gather in halves, and the gather between its launches.
pub(super) struct BegunGathers {
    /// The record of the one block, and ids after it.
    records: Vec<AtomicU64>,
    late_rows: Vec<AtomicU32>,
    begun: Option<Begun>,
}

/// Number of the first launch. Its ids are those of the second one.
#[derive(Clone, Copy)]
struct Begun(usize);

impl BegunGathers {
    pub fn new() -> Self {
        let words = RECORD_BYTES as usize / 8 + MOST_ROWS;
        Self {
            records: (0..words).map(|_| AtomicU64::new(0)).collect(),
            late_rows: super::atomics(super::STATIONS as usize),
            begun: None,
        }
    }

    /// Returns the parameters of either launch.
    pub fn launch(&self, batched: Batched) -> HalvedGather {
        HalvedGather {
            batched,
            records: address(&self.records),
            kept_ids: address(&self.records) + RECORD_BYTES,
            late_rows: address(&self.late_rows),
            held_stations: HELD,
            is_dropped: 0,
        }
    }
}

impl World<'_> {
    /// Launches a gather of `ids` by the owned queue, in one piece or one of its halves.
    pub(super) fn draw_owned(&mut self, mut ids: Vec<i64>) {
        let Some(Begun(first)) = self.halves.begun else {
            match self.rng.below(3) {
                0 => self.launch(Work::Batched, ids, 1),
                _ => self.begin(ids),
            }
            return;
        };
        if self.launches[first].is_under_way() {
            self.launch(Work::Gather, ids, 1);
        } else if self.rng.below(4) == 0 {
            // A graph of first halves that is launched again has as many rows, with other ids.
            let count = self.launches[first].ids.len();
            ids = ids.into_iter().cycle().take(count).collect();
            self.begin(ids);
        } else {
            self.finish_begun();
        }
    }

    fn begin(&mut self, ids: Vec<i64>) {
        self.halves.begun = Some(Begun(self.launches.len()));
        self.launch(Work::Begin, ids, 1);
    }

    /// Launches the second half of a gather whose first half has ended.
    pub(super) fn finish_begun(&mut self) {
        let ended = self.halves.begun;
        let Some(Begun(first)) = ended.filter(|begun| !self.launches[begun.0].is_under_way())
        else {
            return;
        };
        self.halves.begun = None;
        let ids = self.launches[first].ids.clone();
        self.launch(Work::Finish, ids, 1);
        // The second half may give rows with the content that the first half read.
        let floor = self.launches[first].floor.clone();
        if let Some(last) = self.launches.last_mut() {
            last.floor = floor;
        }
    }

    /// Closes the gate for good after a first half: the rows of the second one are lost.
    pub(super) fn close_between_halves(&mut self) -> Result<(), Failure> {
        if self.owned.queue_count == 0 {
            return Ok(());
        }
        self.begin(vec![0, 1, 2]);
        let first = self.launches.len() - 1;
        while self.launches[first].is_under_way() {
            if self.step(first)? == LaunchTurn::Asleep {
                self.drive.sleep(1000);
            }
        }
        self.gate.close_for_good();
        self.rest()?;
        self.check_last(code::GONE, "gate")
    }
}
