//! A gather in halves: one launch submits and leaves the GPU, a later one waits, copies and frees (docs/adr/0029).
//!
//! Between the two no block of either is on the GPU and none is inside the gate, so that a recovery waits for neither.
//! What the second launch needs is in a [`BatchRecord`] for each block, and in the queue's own state. A block without a
//! record of its station reads its rows itself.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::batched::{BatchOrigin, BatchWork, EnteredBlock, command};
use super::map::{OneRange, RowMap};
use crate::arch;
use crate::gate::{AdmissionGate, GateEpoch};
use crate::groups::{GpuThread, WholeBlock};
use crate::launch;
use crate::rows::{HalvedGather, RECORD_BYTES};
use crate::station::{self, NO_STATION};
use crate::{BatchRecord, BegunBatch};
use nvme_core::group::{ExecContext, ThreadGroup};
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_core::{BatchEnds, SubmitError};

/// Origin of a block's commands, as its leader broadcasts it to the other threads.
const OWN: u32 = 0;
const BEGUN: u32 = 1;
const OUTDATED: u32 = 2;
const GONE: u32 = 3;

entry! {
    #[cfg(feature = "rows")]
    /// Submits the reads of rows and leaves. Blocks and threads as of `nvme_gather_batched`; reports no end.
    ///
    /// # Safety
    /// Every address in `halved` is what [`HalvedGather`] says; queues and stations are used as `nvme_gather_batched`
    /// asks.
    pub unsafe fn nvme_begin_batched(halved: HalvedGather) {
        // SAFETY: the host vouches for the addresses, as under `# Safety`.
        unsafe { begin(&halved, OneRange) }
    }
}

entry! {
    #[cfg(feature = "rows")]
    /// Waits for the reads of `nvme_begin_batched`, copies the rows and frees the stations. Reads rows that the
    /// first launch found no station for.
    ///
    /// # Safety
    /// As [`nvme_begin_batched`]; that launch comes before it in the order of streams.
    pub unsafe fn nvme_finish_batched(halved: HalvedGather) {
        // SAFETY: the host vouches for the addresses, as under `# Safety`.
        unsafe { finish(&halved, OneRange) }
    }
}

/// Returns the record of this block.
///
/// # Safety
/// The records are valid as [`HalvedGather`] documents.
#[inline(always)]
unsafe fn record(halved: &HalvedGather) -> BatchRecord<'_> {
    let at = halved.records + u64::from(arch::block()) * RECORD_BYTES;
    // SAFETY: the caller vouches for a record for each block, used through atomics alone.
    BatchRecord::new(unsafe { &*(at as usize as *const _) })
}

/// # Safety
/// As [`nvme_begin_batched`].
#[inline(always)]
pub(super) unsafe fn begin<M: RowMap>(halved: &HalvedGather, map: M) {
    let (batched, rows) = (&halved.batched, &halved.batched.gather);
    // SAFETY: the caller's, for the gate and the records.
    let (Some(gate), record) = (unsafe { (station::gate(rows), record(halved)) }) else {
        return;
    };
    let block = WholeBlock::here();
    let first = u64::from(arch::block()) * u64::from(batched.rows_of_block);
    let (index, is_live) = launch::row_of_thread(batched, first);
    let id = launch::id_of_thread(batched, first);
    let mut claimed = None;
    if block.leads() && record.open() {
        claimed = station::claim_now(rows, halved.held_stations, &gate);
        if claimed.is_none() {
            record.close();
        }
    }
    // Once `open` has returned, a batch that was not taken is marked as out of date, so that its ids may be replaced.
    // The barrier in `broadcast` makes every thread wait for that before it stores the id of a row.
    let station = block.broadcast(claimed.map_or(NO_STATION, |(station, _)| station));
    if is_live {
        // SAFETY: the host vouches for a word for each row.
        unsafe { arch::store_u64(halved.kept_ids + index * 8, id as u64) };
    }
    if station == NO_STATION {
        return;
    }
    // SAFETY: the caller's; the station is this block's.
    let Some(mut queue) = (unsafe { batched.owned.batches(station, block) }) else {
        // The host writes no words of impossible sizes.
        arch::trap()
    };
    // SAFETY: the host vouches for the extents.
    let span = unsafe { map.span(rows, (id, 0)) };
    let place = span.map(|span| span.place).filter(|_| is_live);
    let wants = place.is_some();
    let read = || {
        command(
            rows,
            (station, arch::thread(), 0),
            place.unwrap_or(rows.blocks_of(0, 1)),
        )
    };
    let submitted = queue.submit(BatchEnds(block.batch_words()), wants, read);
    let deadline_ns = GpuThread.now_ns().saturating_add(rows.timeout_ns);
    let refused = block.vote(wants && submitted.is_err()).total;
    if block.leads()
        && let Some((station, epoch)) = claimed
    {
        if submitted == Err(SubmitError::Refused) {
            // A queue that refuses commands is handled like one with a lost command: it is of no use until the
            // controller was recovered.
            gate.report_trouble();
            station::leave(rows, &gate, station, true);
            record.close();
            return;
        }
        // The lane that takes the batch passes the gate at the same station.
        gate.leave(station);
        let batch = BegunBatch {
            station,
            epoch,
            is_outdated: refused != 0,
        };
        record.publish(batch, deadline_ns);
    }
}

/// # Safety
/// As [`nvme_finish_batched`].
#[inline(always)]
pub(super) unsafe fn finish<M: RowMap>(halved: &HalvedGather, map: M) {
    // SAFETY: the caller keeps the conditions under `# Safety`.
    if let Some((work, rows, id)) = unsafe { resume(halved, map) } {
        work.gather(rows, id);
    }
}

/// Returns the work of the block at its station; `None` if its rows were dropped.
///
/// # Safety
/// As [`finish`].
#[inline(always)]
pub(super) unsafe fn resume<M: RowMap>(
    halved: &HalvedGather,
    map: M,
) -> Option<EnteredBlock<'_, M>> {
    let (batched, rows) = (&halved.batched, &halved.batched.gather);
    // SAFETY: the caller's, for the gate and the records.
    let (Some(gate), record) = (unsafe { (station::gate(rows), record(halved)) }) else {
        return None;
    };
    let block = WholeBlock::here();
    let first = u64::from(arch::block()) * u64::from(batched.rows_of_block);
    let (index, is_live) = launch::row_of_thread(batched, first);
    let mut id = -1;
    if is_live {
        // SAFETY: the host vouches for a word for each row.
        id = unsafe { arch::load_u64(halved.kept_ids + index * 8) } as i64;
    }
    // No wait is longer than one of this launch's own commands, whatever is in the record.
    let most_ns = GpuThread.now_ns().saturating_add(rows.timeout_ns);
    let deadline_ns = record.deadline_ns().min(most_ns);
    let (mut station, mut origin) = (NO_STATION, OWN);
    if block.leads() {
        (station, origin) = enter(halved, &record, &gate);
    }
    let station = block.broadcast(station);
    let origin = match block.broadcast(origin) {
        OWN => BatchOrigin::Own,
        BEGUN => BatchOrigin::Begun(deadline_ns),
        OUTDATED => BatchOrigin::Outdated(deadline_ns),
        _ => BatchOrigin::Gone,
    };
    let queue = match station {
        NO_STATION => None,
        // SAFETY: the caller's; the station is this block's.
        _ => unsafe { batched.owned.batches(station, block) },
    };
    let work = BatchWork::new(((rows, map), block, gate), (station, queue), origin);
    if halved.is_dropped != 0 {
        work.drop_batch(deadline_ns);
        return None;
    }
    if origin == BatchOrigin::Own && block.leads() && station != NO_STATION {
        let left = rows.count.saturating_sub(first);
        count_late(
            halved,
            station,
            left.min(batched.rows_of_block.into()) as u32,
        );
    }
    Some((work, (first, batched.rows_of_block), id))
}

/// Takes the block's batch and passes the gate with its station, or with another one if there is none. Returns the
/// station and the origin of the commands at its queue.
#[inline(always)]
fn enter(halved: &HalvedGather, record: &BatchRecord<'_>, gate: &AdmissionGate<'_>) -> (u32, u32) {
    let rows = &halved.batched.gather;
    let Some(batch) = record.take() else {
        return match halved.is_dropped {
            0 => {
                let queues = halved.batched.owned.queue_count;
                (station::claim_of(rows, queues, gate), OWN)
            }
            _ => (NO_STATION, GONE),
        };
    };
    let passed = gate.pass(batch.station);
    match passed {
        Ok(GateEpoch(epoch)) if epoch == batch.epoch.0 => match batch.is_outdated {
            true => (batch.station, OUTDATED),
            false => (batch.station, BEGUN),
        },
        // A recovery has ended the commands, or ends them before anyone passes the gate at this station again.
        _ => {
            if passed.is_ok() {
                gate.leave(batch.station);
            }
            station::give_back(rows, batch.station);
            (NO_STATION, GONE)
        }
    }
}

/// Counts rows that are read by this launch alone. Only the block at `station` writes to the count.
#[inline(always)]
fn count_late(halved: &HalvedGather, station: u32, rows: u32) {
    let counts = halved.late_rows as usize as *const AtomicU32;
    // SAFETY: the host vouches for a word for each station, used through atomics alone.
    let count = unsafe { &*counts.add(station as usize) };
    let was = count.load(Order::Relaxed, Scope::Sys);
    count.store(was.wrapping_add(rows), Order::Relaxed, Scope::Sys);
}

impl<M: RowMap> BatchWork<'_, '_, M> {
    /// Waits for the commands of an earlier launch, whose data nobody wants, and frees the station.
    #[inline(always)]
    fn drop_batch(mut self, deadline_ns: u64) {
        if let Some(queue) = &mut self.queue {
            let ends = BatchEnds(self.block.batch_words());
            queue.resume(ends);
            self.has_lost = queue.finish(ends, &GpuThread, deadline_ns) != Ok(0);
        }
        self.leave();
    }
}
