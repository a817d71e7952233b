//! Scatters of few rows, bound by the latency of the bus: a block owns a queue together with its station
//! (docs/adr/0028).
//!
//! All threads copy all rows of the block into its slots; each thread then writes one row. Rows are never merged into
//! one command, so that each has its own end.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::{add_written, later};
use crate::arch;
use crate::groups::{GpuThread, WholeBlock};
use crate::launch::{self, WarpFailures};
use crate::rows::{BatchedScatter, GatherLaunch, STATION_BYTES, code};
use crate::station::{self, NO_STATION, ended};
use crate::units::UnitSteps;
use nvme_core::group::{ExecContext, ThreadGroup};
use nvme_core::spec::{Lba, Nsid, nvm};
use nvme_core::{BatchEnds, BatchQueue, MemberCommand};

entry! {
    /// Writes rows: at most as many blocks as there are queues, enough for all rows. A block has a multiple of 32 threads,
    /// at least `rows_of_block` and at most [`BLOCK_THREADS`](crate::rows::BLOCK_THREADS).
    ///
    /// # Safety
    /// Every address in `scatter` is what [`BatchedScatter`] says; the queues exist on the controller, and only blocks at
    /// their stations use them.
    pub unsafe fn nvme_scatter_batched(scatter: BatchedScatter) {
        let batched = &scatter.batched;
        let rows = &batched.gather;
        // SAFETY: the host vouches for the words of the gate.
        let Some(gate) = (unsafe { station::gate(rows) }) else {
            return;
        };
        let block = WholeBlock::here();
        let first = u64::from(arch::block()) * u64::from(batched.rows_of_block);
        let (index, is_live) = launch::row_of_thread(batched, first);
        let id = launch::id_of_thread(batched, first);
        let (mut station, mut is_troubled) = (NO_STATION, false);
        if block.leads() {
            station = station::claim_of(rows, batched.owned.queue_count, &gate);
            // As in `nvme_scatter`: a write that has not ended may still happen until the recovery.
            is_troubled = station != NO_STATION && gate.has_trouble();
        }
        let of_warp = first + u64::from(arch::thread() & !31);
        let is_last = later::is_last(rows, (of_warp, id));
        let station = block.broadcast(station);
        let is_troubled = block.broadcast(u32::from(is_troubled)) != 0;
        let block_of = rows.place(id).map(|place| place.block);
        // All threads of the block take the same branch, since the last one has barriers.
        let (mut became, has_lost) = if station == NO_STATION {
            (station::why_none(&gate), false)
        } else if is_troubled {
            (code::GONE, false)
        } else {
            // SAFETY: the caller's; the station is this block's.
            let Some(queue) = (unsafe { batched.owned.batches(station, block) }) else {
                // The host writes no words of impossible sizes.
                arch::trap()
            };
            let left = rows.count.saturating_sub(first);
            let count = if left < u64::from(batched.rows_of_block) {
                left as u32
            } else {
                batched.rows_of_block
            };
            stage(rows, station, (first, count));
            let wanted = block_of.filter(|_| is_last);
            write(rows, (queue, block, station), wanted)
        };
        if block_of.is_none() {
            became = code::OUT_OF_RANGE;
        }
        let mut failed = WarpFailures::default();
        failed.note(rows, index, is_live, (None, became));
        launch::leave(rows, (&gate, station), &block, (&failed, has_lost), || {
            add_written(scatter.written);
        });
    }
}

/// Copies the `count` rows from row `first` on into the slots of `station`, with the block's other threads. The barrier
/// and the fence before the doorbell make them visible to the controller.
#[inline(always)]
fn stage(rows: &GatherLaunch, station: u32, (first, count): (u64, u32)) {
    let units = UnitSteps::new(rows.row_bytes >> rows.unit_shift);
    let from = rows.out + first * rows.out_stride;
    let to = rows.slots + u64::from(station) * STATION_BYTES;
    let place = |row: u32, byte: u64| {
        (
            row < count,
            to + u64::from(row) * u64::from(rows.slot_bytes) + byte,
            from + u64::from(row) * rows.out_stride + byte,
        )
    };
    // SAFETY: the host vouches for `count` rows of the launch, and a slot for each row of a block.
    unsafe { units.copy(rows.unit_shift, count, place) };
}

/// Writes the thread's slot to the drive from block `block_of` on, if there is one. Returns the code of the row, and true
/// if a command of the block has not ended.
#[inline(always)]
fn write(
    rows: &GatherLaunch,
    (mut queue, block, station): (BatchQueue<'_, WholeBlock>, WholeBlock, u32),
    block_of: Option<u64>,
) -> (i32, bool) {
    let (thread, ends) = (arch::thread(), BatchEnds(block.batch_words()));
    let blocks = rows.row_bytes >> rows.block_shift;
    let slot = u64::from(station) * STATION_BYTES + u64::from(thread) * u64::from(rows.slot_bytes);
    let command = || {
        let sqe = nvm::write(Nsid(rows.nsid), Lba(block_of.unwrap_or(0)), blocks);
        MemberCommand::new(sqe, station::blocks_at(rows, slot, blocks), 0)
    };
    let submitted = queue.submit(ends, block_of.is_some(), command);
    let deadline_ns = GpuThread.now_ns().saturating_add(rows.timeout_ns);
    let left = queue.finish(ends, &GpuThread, deadline_ns);
    let became = match block_of {
        Some(_) => ended((submitted, left), ends.status(thread)),
        // A later row of the launch is written in its place.
        None => code::OK,
    };
    (became, left != Ok(0))
}
