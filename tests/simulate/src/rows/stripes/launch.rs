//! Launches of `nvme_gather_striped`: their lanes run a few collectives at a turn, and other actors act between any two
//! turns.
// UNSAFETY: kernels take addresses of what their launch and the world keep.
#![allow(unsafe_code)]

use super::StripeWorld;
use super::member::content;
use crate::account::Failure;
use crate::memory::{Area, PAGE};
use crate::rows::address;
use crate::rows::launch::Ends;
use crate::run::of_panic;
use crate::setup::BLOCK_BYTES;
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use nvme_gpu_kernel::entries::{nvme_gather_batched_striped, nvme_gather_striped};
use nvme_gpu_kernel::lanes::{HostGrid, LaunchTurn, RunningLaunch};
use nvme_gpu_kernel::rows::{
    BLOCK_THREADS, BatchedStripes, GatherLaunch, StripedGather, code, of_worst,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Content of a status word before a launch.
const NO_CODE: u32 = 0x7777_7777;
/// Content of the output before a launch.
const CANARY: u64 = 0xA5A5_A5A5_A5A5_A5A5;

/// A launch under way, or one that has ended.
pub(super) struct StripeGather {
    ids: Vec<i64>,
    out: Area,
    out_stride: u64,
    lanes: Option<RunningLaunch>,
    // The kernel has addresses of these.
    id_words: Vec<AtomicU64>,
    codes: Vec<AtomicU32>,
    ends: Ends,
}

impl StripeGather {
    pub fn is_under_way(&self) -> bool {
        self.lanes.is_some()
    }

    fn code(&self, row: usize) -> i32 {
        self.codes[row].load(Order::Relaxed, Scope::Gpu) as i32
    }
}

impl StripeWorld<'_> {
    /// Launches `blocks` blocks that gather the rows of `ids`.
    pub(super) fn launch(&mut self, ids: Vec<i64>, blocks: u32) {
        let (launch, striped) = self.prepared(ids);
        // SAFETY: the addresses lead to memory of the world and of the launch, and the lanes end before either.
        let kernel = move || unsafe { nvme_gather_striped(striped) };
        self.begin(launch, (blocks, BLOCK_THREADS), kernel);
    }

    /// Does the same by the queues that blocks own, with `most` rows at most for the blocks of each drive.
    pub(super) fn launch_batched(&mut self, ids: Vec<i64>, most: u32) {
        let count = ids.len() as u32;
        let rows_of_block = count.min(most);
        let (launch, striped) = self.prepared(ids);
        let batched = BatchedStripes {
            striped,
            rows_of_block,
            owned: self.owned,
        };
        let blocks = count.div_ceil(rows_of_block) * striped.member_count;
        let threads = rows_of_block.next_multiple_of(32).max(64);
        // SAFETY: the addresses lead to memory of the world and of the launch, and the lanes end before either.
        let kernel = move || unsafe { nvme_gather_batched_striped(batched) };
        self.counts.owned_stripes += u64::from(count);
        self.begin(launch, (blocks, threads), kernel);
    }

    /// Returns a launch that gathers the rows of `ids`, and its parameters.
    fn prepared(&mut self, ids: Vec<i64>) -> (StripeGather, StripedGather) {
        let out_stride = u64::from(self.rows.row_bytes).next_multiple_of(16);
        let out = self.memory.take(ids.len() as u64 * out_stride, PAGE);
        let to = self.memory.words(out);
        (0..to.len()).for_each(|at| to.set(at, CANARY));
        let launch = StripeGather {
            id_words: ids.iter().map(|id| AtomicU64::new(*id as u64)).collect(),
            codes: ids.iter().map(|_| AtomicU32::new(NO_CODE)).collect(),
            ends: Ends::new(),
            lanes: None,
            out,
            out_stride,
            ids,
        };
        let unit = (self.rows.first_byte | u64::from(self.rows.row_bytes)).trailing_zeros();
        let gather = GatherLaunch {
            stations: address(self.free),
            ids: address(&launch.id_words),
            wide_ids: 1,
            out: self.memory.address(out),
            out_stride,
            status: address(&launch.codes),
            progress: address(&launch.ends.words),
            summary: address(&launch.ends.words[launch.ends.summary..]),
            count: launch.ids.len() as u64,
            unit_shift: unit.min(4),
            ..self.rows
        };
        let striped = StripedGather {
            gather,
            members: address(&self.words),
            stripe_shift: self.stripe_shift,
            member_count: self.words.len() as u32,
        };
        (launch, striped)
    }

    fn begin(
        &mut self,
        mut launch: StripeGather,
        (blocks, threads): (u32, u32),
        kernel: impl Fn() + 'static,
    ) {
        let grid = HostGrid {
            blocks,
            threads,
            at_once: 2,
            clock: self.clock.clone(),
        };
        launch.lanes = Some(RunningLaunch::new(grid, kernel));
        self.tell("launch", launch.ids.len() as u32, blocks as i32);
        self.launches.push(launch);
    }

    /// Runs a few collectives of one warp of launch `index`.
    pub(super) fn step(&mut self, index: usize) -> Result<LaunchTurn, Failure> {
        let Some(mut lanes) = self.launches[index].lanes.take() else {
            return Ok(LaunchTurn::Ended);
        };
        self.join_clocks();
        lanes.wake();
        let calls = 1 + self.rng.below(24) as u32;
        let rng = &mut self.rng;
        let mut pick = |most: u32| rng.below(u64::from(most)) as u32;
        let ran = catch_unwind(AssertUnwindSafe(|| {
            let turn = lanes.turn(calls, &mut pick);
            (lanes, turn)
        }));
        let (lanes, turn) = ran.map_err(|panic| of_panic(&*panic))?;
        match turn {
            LaunchTurn::Ended => {
                drop(lanes);
                let judged = self.judge(index);
                judged.map_err(|text| Failure::new("rows", format!("striped: {text}")))?;
            }
            _ => self.launches[index].lanes = Some(lanes),
        }
        Ok(turn)
    }

    /// Checks the rows of a launch that has ended.
    fn judge(&mut self, index: usize) -> Result<(), String> {
        let mut failed = Vec::new();
        for row in 0..self.launches[index].ids.len() {
            let code = self.judge_row(index, row)?;
            if code != code::OK {
                failed.push((row as u64, code));
            }
        }
        let (ended, count, worst) = self.launches[index].ends.counts();
        let (row, member, code) = of_worst(worst);
        let is_first = match failed.first() {
            None => worst == 0,
            Some(first) => worst != 0 && *first == (row, code),
        };
        if (ended, count) != (1, failed.len() as u64) || !is_first {
            return Err(format!(
                "{ended} launches have ended by the summary, with {count} failures, the first row {row} with {code}"
            ));
        }
        let id = self.launches[index].ids.get(row as usize).copied();
        let touched = id.map_or(Vec::new(), |id| self.touched(id));
        if let (Some(member), true) = (member, worst != 0)
            && !touched.contains(&(member as usize))
        {
            return Err(format!(
                "row {row} failed on member {member}, where none of it lies"
            ));
        }
        self.tell("end", index as u32, count as i32);
        Ok(())
    }

    /// Returns the members on which a row lies, one or two.
    fn touched(&self, id: i64) -> Vec<usize> {
        let Some(place) = self.rows.place(id) else {
            return Vec::new();
        };
        let last = place.byte + u64::from(self.rows.row_bytes) - 1;
        let ends = [place.byte, last].map(|byte| self.stripes.spot(byte).member as usize);
        match ends {
            [first, last] if first == last => vec![first],
            ends => ends.to_vec(),
        }
    }

    /// Checks one row: its content with code 0, or zeros with a code that a fault of its drives explains.
    fn judge_row(&mut self, index: usize, row: usize) -> Result<i32, String> {
        let launch = &self.launches[index];
        let (id, code) = (launch.ids[row], launch.code(row));
        let bytes = self.rows.row_bytes as usize;
        let mut have = vec![0; bytes];
        let from = launch.out.iova.offset(row as u64 * launch.out_stride);
        self.memory.read(from, &mut have);
        let place = self.rows.place(id);
        let due: Vec<u8> = match (place, code) {
            (Some(place), code::OK) => {
                let each = place.byte..place.byte + bytes as u64;
                each.map(|byte| self.byte(byte)).collect()
            }
            _ => vec![0; bytes],
        };
        if have != due {
            return Err(format!("row {row}, id {id}, code {code}, has other bytes"));
        }
        let named = |text: String| format!("row {row}, id {id}: {text}");
        match place {
            None if code == code::OUT_OF_RANGE => self.counts.rows += 1,
            None => return Err(named(format!("code {code}, and the table has no such row"))),
            Some(_) => {
                let touched = self.touched(id);
                self.judge_code(code, &touched).map_err(named)?;
            }
        }
        Ok(code)
    }

    /// Returns a byte of the table's drives.
    fn byte(&self, at: u64) -> u8 {
        let spot = self.stripes.spot(at);
        let (lba, within) = (spot.offset / BLOCK_BYTES, spot.offset % BLOCK_BYTES);
        let mut block = content(spot.member, lba as u32);
        block.nth(within as usize).unwrap_or(0)
    }
}
