//! `nvme_scatter`: writes rows from GPU memory to whole blocks of a drive, by ids.
//!
//! A block of threads holds a [station](crate::station) while it runs; each of its warps writes 32 rows in
//! one chunk. A row whose id appears again later in the launch is skipped: the last one wins (docs/adr/0014).
//! Neighbouring rows are copied into neighbouring slots and become one command. A failed command of several
//! rows is sent again row by row, so that a row fails only for its own blocks.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

mod batched;
mod later;

#[cfg(not(target_arch = "nvptx64"))]
pub use batched::nvme_scatter_batched;

use crate::arch;
use crate::copy;
use crate::exchange::{OfLanes64, exchanged64, of_lane64, shuffle64};
use crate::gate::AdmissionGate;
use crate::groups::{GpuThread, WholeBlock};
use crate::launch::{self, WarpContext, WarpFailures};
use crate::rows::{BLOCK_WARPS, GatherLaunch, ScatterLaunch, code};
use crate::station::{self, NO_STATION};
use nvme_core::SharedQueue;
use nvme_core::group::{ExecContext, ThreadGroup};
use nvme_core::sync::{Order, Scope, fence};

entry! {
    /// Writes rows. Blocks of [`BLOCK_THREADS`](crate::rows::BLOCK_THREADS) threads; any number of blocks.
    ///
    /// # Safety
    /// Every address in `scatter` is valid as [`ScatterLaunch`] documents; the queues exist on the controller and
    /// are shared.
    pub unsafe fn nvme_scatter(scatter: ScatterLaunch) {
        let rows = &scatter.gather;
        let block = WholeBlock::here();
        // SAFETY: the host vouches for every address in the launch, as under `# Safety`.
        let Some(inside) = (unsafe { WarpContext::enter(rows, &block) }) else {
            return;
        };
        let gate = inside.gate;
        // A write that has not ended may still happen until the recovery. So no write that the stream orders
        // after it may be sent before then: it could be overwritten by the older one.
        let mut is_troubled = false;
        if block.leads() && inside.station != NO_STATION {
            is_troubled = gate.has_trouble();
        }
        let is_troubled = block.broadcast(u32::from(is_troubled)) != 0;
        let mut work = ScatterWarp {
            rows,
            gate,
            queue: inside.queue,
            cell: inside.cell,
            slots: inside.slots,
            ends: match is_troubled {
                true => code::GONE,
                false => inside.ends,
            },
            has_lost: false,
            failed: WarpFailures::default(),
        };
        work.scatter_all(
            arch::block() * BLOCK_WARPS + arch::thread() / 32,
            arch::blocks() * BLOCK_WARPS,
        );
        let left = (&work.failed, work.has_lost);
        launch::leave(rows, (&gate, inside.station), &block, left, || {
            add_written(scatter.written);
        });
    }
}

/// Counts a block whose writes have ended, at `written` in GPU memory.
#[inline(always)]
fn add_written(written: u64) {
    // Release: pairs with the load of a gather, which then reads the written data and not a cached row.
    fence(Order::Release, Scope::Gpu);
    // SAFETY: the host vouches for the count.
    unsafe { arch::add(written as usize as *mut u64, 1) };
}

struct ScatterWarp<'r> {
    rows: &'r GatherLaunch,
    gate: AdmissionGate<'r>,
    queue: Option<SharedQueue<'r>>,
    /// First result cell of the warp.
    cell: u32,
    /// Offset of the warp's slots in the slot memory.
    slots: u64,
    /// Code of the remaining rows, once the warp cannot continue.
    ends: i32,
    /// True if a write has not ended: the controller may still read its slots.
    has_lost: bool,
    failed: WarpFailures,
}

impl ScatterWarp<'_> {
    /// Writes all chunks of the warp, each as many rows as the warp has slots. The chunks are interleaved
    /// between warps.
    #[inline(always)]
    fn scatter_all(&mut self, first: u32, step: u32) {
        let lanes = u64::from(self.rows.lanes.clamp(1, 32));
        let chunks = self.rows.count.div_ceil(lanes);
        let mut chunk = u64::from(first);
        // The block has passed the gate just now, which counts as a look.
        let mut looked_ns = GpuThread.now_ns();
        while chunk < chunks {
            self.ends = launch::look(Some(self.gate), &mut looked_ns, self.ends);
            self.ends = arch::shuffle(arch::FULL, self.ends as u32, 0) as i32;
            self.scatter_chunk(chunk * lanes);
            chunk += u64::from(step);
        }
    }

    /// Writes the rows from `first` on. Every lane takes part, including lanes without a row.
    #[inline(always)]
    fn scatter_chunk(&mut self, first: u64) {
        let (rows, lane) = (self.rows, arch::lane());
        let index = first + u64::from(lane);
        let is_live = index < rows.count && lane < rows.lanes;
        let mut id = -1;
        if is_live {
            // SAFETY: the host vouches for `count` ids.
            id = unsafe { launch::id(rows, index) };
        }
        let place = rows.place(id);
        let mut became = match place {
            Some(_) => code::OK,
            None => code::OUT_OF_RANGE,
        };
        if self.ends == code::OK {
            let wants = later::is_last(rows, (first, id)) && place.is_some();
            let block = place.map_or(0, |place| place.block);
            let written = self.write(index, block, wants);
            if wants {
                became = written;
            }
        } else if place.is_some() {
            became = self.ends;
        }
        self.failed.note(rows, index, is_live, (None, became));
    }

    /// Writes the rows of the lanes with `wants`; returns the code of the lane's row. Every lane calls it.
    #[inline(always)]
    fn write(&mut self, index: u64, block: u64, wants: bool) -> i32 {
        let (rows, lane) = (self.rows, arch::lane());
        let blocks = rows.row_bytes >> rows.block_shift;
        let (mut head, last) = launch::run_of(rows.run_rows, (block, blocks), None, wants, true);
        // Rows of a command are adjacent, from the slot of its first lane on.
        let before = block.wrapping_sub(shuffle64(block, head));
        let slot = self.slot(head).wrapping_add(before << rows.block_shift);
        self.stage(index, exchanged64(slot), wants);
        let end = shuffle64(block, last) + u64::from(blocks);
        let is_alone = arch::shuffle(arch::FULL, u32::from(last == lane), head) == 1;
        let mut length = end.wrapping_sub(block) as u32;
        let mut sends = wants && head == lane;
        let mut left = wants;
        let mut is_shared = !is_alone;
        let mut became = code::OK;
        loop {
            let mut ended = code::OK;
            if sends {
                ended = self.write_blocks((block, length), slot);
            }
            arch::sync_warp(arch::FULL);
            let result = arch::shuffle(arch::FULL, ended as u32, head) as i32;
            if left {
                became = result;
            }
            self.note_lost(left && (result == code::TIMED_OUT || result == code::GONE));
            // A write that failed for several rows is repeated for each of them.
            left &= is_shared && became > 0;
            if self.ends != code::OK || arch::ballot(arch::FULL, left) == 0 {
                return became;
            }
            (head, length, is_shared, sends) = (lane, blocks, false, left);
        }
    }

    /// Copies the rows of the lanes with `wants` to `slot` of the slot memory, and makes them visible to the
    /// controller. Every lane calls it.
    #[inline(always)]
    fn stage(&self, index: u64, slot: OfLanes64, wants: bool) {
        let rows = self.rows;
        let wanted = arch::ballot(arch::FULL, wants);
        let from = rows.out.wrapping_add(index.wrapping_mul(rows.out_stride));
        let to = |lane| rows.slots + of_lane64(&slot, lane);
        copy::rows(copy::CopyShape::of(rows), from, to, wanted);
        // Release: each lane's stores reach memory before any lane sends a command for them; the barrier
        // below joins the lanes. Without it the controller could read an old slot.
        fence(Order::Release, Scope::Sys);
        arch::sync_warp(arch::FULL);
    }

    /// Returns the offset of the slot of `lane` in the slot memory.
    #[inline(always)]
    fn slot(&self, lane: u32) -> u64 {
        self.slots + u64::from(lane) * u64::from(self.rows.slot_bytes)
    }

    /// Writes `blocks` blocks from `block` on out of `slot`, and waits for the write's end.
    #[inline(always)]
    fn write_blocks(&self, (block, blocks): (u64, u32), slot: u64) -> i32 {
        let Some(queue) = &self.queue else {
            return code::GONE;
        };
        let cell = self.cell + arch::lane();
        station::write_blocks(self.rows, queue, (block, blocks), slot, cell)
    }

    /// Records a command that has not ended, which keeps its slots: the warp uses none of its slots from now
    /// on. Every lane calls it.
    #[inline(always)]
    fn note_lost(&mut self, is_lost: bool) {
        if arch::ballot(arch::FULL, is_lost) != 0 {
            self.has_lost = true;
            self.ends = code::NOT_RUN;
        }
    }
}
