//! Gathers of few rows, bound by the latency of the bus: a block owns a queue together with its station.
//!
//! Each thread reads one row. Its entry, its wait and its copies depend on those of no other thread, so that loads of
//! host memory are in flight side by side (docs/adr/0028).
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::failed::clear;
use super::map::{OneRange, RowMap};
use super::members;
use crate::arch;
use crate::extents::RowSpan;
use crate::gate::AdmissionGate;
use crate::groups::{GpuThread, WholeBlock};
use crate::launch::{self, WarpFailures};
use crate::launch_end;
use crate::rows::{Batched, GatherLaunch, RowBlocks, STATION_BYTES, code};
use crate::station::{self, NO_STATION, ended};
use crate::units::UnitSteps;
use nvme_core::group::{ExecContext, ThreadGroup};
use nvme_core::spec::{Lba, Nsid, nvm};
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_core::{BatchEnds, BatchQueue, MemberCommand};

/// log2 of the least unit: lengths of rows, and their addresses in the slots and in the output, are multiples of it.
pub(super) const LEAST_SHIFT: u32 = 2;
/// Word of a row that is not copied, in place of its first byte in its slot.
pub(super) const NOWHERE: u32 = u32::MAX;

entry! {
    #[cfg(feature = "rows")]
    /// Gathers rows: at most as many blocks as there are queues, enough for all rows. A block has a multiple of 32 threads,
    /// at least `rows_of_block` and at most [`BLOCK_THREADS`](crate::rows::BLOCK_THREADS).
    ///
    /// # Safety
    /// Every address in `batched` is what [`Batched`] says; the queues exist on the controller, and only blocks at their
    /// stations use them.
    pub unsafe fn nvme_gather_batched(batched: Batched) {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { gather(&batched, OneRange) }
    }
}

/// # Safety
/// As [`nvme_gather_batched`]; the ranges of the table are valid as [`ExtentMap`](crate::extents::ExtentMap) documents.
#[inline(always)]
pub(super) unsafe fn gather<M: RowMap>(batched: &Batched, map: M) {
    // SAFETY: the caller keeps the conditions under `# Safety`.
    if let Some((work, rows, id)) = unsafe { enter(batched, map) } {
        work.gather(rows, id);
    }
}

/// Returns the work of the block at a station, its first row and the most of its rows, and the id of the thread's row.
///
/// # Safety
/// As [`gather`].
#[inline(always)]
pub(super) unsafe fn enter<M: RowMap>(batched: &Batched, map: M) -> Option<EnteredBlock<'_, M>> {
    let claim = |gate: &AdmissionGate<'_>| {
        station::claim_of(&batched.gather, batched.owned.queue_count, gate)
    };
    // SAFETY: the caller keeps the conditions under `# Safety`.
    unsafe { enter_by(batched, (map, arch::block()), claim) }
}

/// Does the same as [`enter`] for the `number`th `rows_of_block` rows of the launch, at a station that `claim` takes.
///
/// # Safety
/// As [`gather`].
#[inline(always)]
pub(super) unsafe fn enter_by<M: RowMap>(
    batched: &Batched,
    (map, number): (M, u32),
    claim: impl Fn(&AdmissionGate<'_>) -> u32,
) -> Option<EnteredBlock<'_, M>> {
    let rows = &batched.gather;
    // SAFETY: the caller keeps the conditions under `# Safety`.
    let gate = (unsafe { station::gate(rows) })?;
    let block = WholeBlock::here();
    let first = u64::from(number) * u64::from(batched.rows_of_block);
    // In flight together with the words of the gate.
    let id = launch::id_of_thread(batched, first);
    let mut station = NO_STATION;
    if block.leads() {
        station = claim(&gate);
    }
    let station = block.broadcast(station);
    let queue = match station {
        NO_STATION => None,
        // SAFETY: the caller's; the station is this block's.
        _ => unsafe { batched.owned.batches(station, block) },
    };
    let place = (rows, map);
    let work = BatchWork::new((place, block, gate), (station, queue), BatchOrigin::Own);
    Some((work, (first, batched.rows_of_block), id))
}

/// The work of a block, its first row and the most of its rows, and the id of the thread's row.
pub(super) type EnteredBlock<'r, M> = (BatchWork<'r, 'r, M>, (u64, u32), i64);

/// Commands of the queue when its block begins to read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum BatchOrigin {
    /// The queue has no commands in flight: the block submits its own.
    Own,
    /// An earlier launch has submitted the commands of the block's rows. They end by this time of the GPU's clock.
    Begun(u64),
    /// An earlier launch has submitted commands of other rows: the block waits for their end, then submits its own.
    Outdated(u64),
    /// Commands were in flight when the controller was reset; the block has no station.
    Gone,
}

/// Returns the read of the blocks at `place` into the slot of `thread`, behind the `before` bytes there. If this is the
/// first part of a row, its tag is the offset in the slot at which the row begins.
#[inline(always)]
pub(super) fn command<'d>(
    rows: &GatherLaunch,
    (station, thread, before): (u32, u32, u64),
    place: RowBlocks,
) -> MemberCommand<'d> {
    let slot = u64::from(station) * STATION_BYTES + u64::from(thread) * u64::from(rows.slot_bytes);
    let slot = slot + before;
    let sqe = nvm::read(Nsid(rows.nsid), Lba(place.block), place.blocks);
    let data = station::blocks_at(rows, slot, place.blocks);
    MemberCommand::new(sqe, data, in_slot(rows, place) >> LEAST_SHIFT)
}

/// Returns the first byte of the row at `place` in its slot, a multiple of 4.
#[inline(always)]
pub(super) fn in_slot(rows: &GatherLaunch, place: RowBlocks) -> u32 {
    (place.byte - (place.block << rows.block_shift)) as u32
}

/// The work of a block. Fields are the same for all threads, except for `failed`, which is a warp's.
pub(super) struct BatchWork<'r, 'q, M: RowMap> {
    pub rows: &'r GatherLaunch,
    /// The place of the table.
    pub map: M,
    pub block: WholeBlock,
    pub gate: AdmissionGate<'r>,
    pub station: u32,
    pub queue: Option<BatchQueue<'q, WholeBlock>>,
    pub origin: BatchOrigin,
    /// A read has not ended: the controller may still write to its slot.
    pub has_lost: bool,
    pub failed: WarpFailures,
}

impl<'r, 'q, M: RowMap> BatchWork<'r, 'q, M> {
    /// Makes the work of a block at its station, with its queue unless there is none.
    #[inline(always)]
    pub fn new(
        ((rows, map), block, gate): ((&'r GatherLaunch, M), WholeBlock, AdmissionGate<'r>),
        (station, queue): (u32, Option<BatchQueue<'q, WholeBlock>>),
        origin: BatchOrigin,
    ) -> Self {
        Self {
            rows,
            map,
            block,
            gate,
            station,
            queue,
            origin,
            has_lost: false,
            failed: WarpFailures::default(),
        }
    }

    /// Gathers the rows of the block, at most `most` from row `first` on, and leaves the station; `id` is that of the
    /// thread's row.
    #[inline(always)]
    pub fn gather(mut self, (first, most): (u64, u32), id: i64) {
        let rows = self.rows;
        let index = first + u64::from(arch::thread());
        let is_live = arch::thread() < most && index < rows.count;
        // SAFETY: the host vouches for the extents.
        let (is_of_block, part) = unsafe { self.map.row_of_block(rows, id) };
        let is_live = is_live && is_of_block;
        let part = part.filter(|_| is_live);
        let left = rows.count.saturating_sub(first);
        let count = if left < u64::from(most) {
            left as u32
        } else {
            most
        };
        // All threads of the block take the same branch, since the first branch has barriers.
        let became = match (self.queue.is_some(), self.station, part) {
            (true, ..) => self.read_and_copy((id, part), (first, count)),
            (_, _, None) => code::OUT_OF_RANGE,
            _ if self.origin == BatchOrigin::Gone => code::GONE,
            (_, NO_STATION, _) => station::why_none(&self.gate),
            _ => code::NOT_RUN,
        };
        clear(rows, index, is_live && became != code::OK);
        let member = part.and(self.map.member()).map(|(number, _)| number);
        self.failed.note(rows, index, is_live, (member, became));
        self.leave();
    }

    /// Reads the thread's row, and copies all `count` rows of the block from row `first` on, with its other threads.
    /// Returns the row's code.
    #[inline(always)]
    fn read_and_copy(
        &mut self,
        (id, part): (i64, Option<RowSpan>),
        (first, count): (u64, u32),
    ) -> i32 {
        let units = UnitSteps::new(self.rows.row_bytes >> self.rows.unit_shift);
        let (became, in_slot) = self.read_parts((id, part));
        let words = self.publish(in_slot);
        self.copy(words, (first, count), units);
        became
    }

    /// Reads the thread's row, if it has one. Returns its code, and its first byte in the slot.
    #[inline(always)]
    fn read_parts(&mut self, (id, part): (i64, Option<RowSpan>)) -> (i32, u32) {
        let (mut became, mut in_slot) = self.read(part.map(|part| part.place));
        if M::IS_MAP {
            became = self.read_rest((id, part), became);
            if became != code::OK {
                in_slot = NOWHERE;
            }
        }
        (became, in_slot)
    }

    /// Reads the thread's row if the block has a queue; otherwise returns the code of its row, and no place.
    #[inline(always)]
    pub fn read_whole(&mut self, (id, part): (i64, Option<RowSpan>)) -> (i32, u32) {
        // All threads of the block take the same branch, since the first branch has barriers.
        match (self.queue.is_some(), self.station, part) {
            (true, ..) => self.read_parts((id, part)),
            (_, _, None) => (code::OUT_OF_RANGE, NOWHERE),
            _ if self.origin == BatchOrigin::Gone => (code::GONE, NOWHERE),
            (_, NO_STATION, _) => (station::why_none(&self.gate), NOWHERE),
            _ => (code::NOT_RUN, NOWHERE),
        }
    }

    /// Publishes the place of the thread's row in its slot, and returns those of all rows of the block.
    #[inline(always)]
    pub fn publish(&self, in_slot: u32) -> &'static [AtomicU32] {
        let words = self.block.batch_words();
        if let Some(word) = words.get(arch::thread() as usize) {
            word.store(in_slot, Order::Relaxed, Scope::Cta);
        }
        self.block.sync();
        words
    }

    /// Reads the blocks of the thread's row, if it has one, into its slot. Returns the row's code, and its first byte in
    /// the slot.
    #[inline(always)]
    fn read(&mut self, place: Option<RowBlocks>) -> (i32, u32) {
        let (rows, thread, station) = (self.rows, arch::thread(), self.station);
        let Some(queue) = &mut self.queue else {
            return (code::NOT_RUN, NOWHERE);
        };
        let ends = BatchEnds(self.block.batch_words());
        let at = place.unwrap_or(RowBlocks {
            byte: 0,
            block: 0,
            blocks: 1,
        });
        let (mut wants, mut byte) = (place.is_some(), in_slot(rows, at));
        // All threads of the block have the same origin, since each branch has barriers.
        if let BatchOrigin::Begun(_) = self.origin {
            // The submitted command decides, not the id: the memory of the ids is the caller's and may have changed
            // since.
            let tag = queue.resume(ends);
            (wants, byte) = (tag.is_some(), tag.unwrap_or(0) << LEAST_SHIFT);
        }
        if let BatchOrigin::Outdated(deadline_ns) = self.origin {
            queue.resume(ends);
            // If a command does not end, the queue refuses the commands that follow.
            let _ = queue.finish(ends, &GpuThread, deadline_ns);
        }
        let (submitted, deadline_ns) = match self.origin {
            BatchOrigin::Begun(deadline_ns) => (Ok(()), deadline_ns),
            _ => {
                let read = || command(rows, (station, thread, 0), at);
                let submitted = queue.submit(ends, wants, read);
                (
                    submitted,
                    GpuThread.now_ns().saturating_add(rows.timeout_ns),
                )
            }
        };
        let left = queue.finish(ends, &GpuThread, deadline_ns);
        self.has_lost = left != Ok(0);
        let became = match wants {
            false => code::OUT_OF_RANGE,
            true => ended((submitted, left), ends.status(thread)),
        };
        match became {
            code::OK => (became, byte),
            _ => (became, NOWHERE),
        }
    }

    /// Reads the parts of the thread's row that lie in other ranges of the table than the first part, `part`, into the
    /// slot behind it. `became` is the code of the first part; returns the code of the row.
    ///
    /// Few blocks have such a row; other blocks pay only one vote for the call.
    #[inline(always)]
    fn read_rest(&mut self, (id, part): (i64, Option<RowSpan>), became: i32) -> i32 {
        let (rows, thread, station) = (self.rows, arch::thread(), self.station);
        let (mut became, mut part) = (became, part);
        let (mut done, mut before) = (0, 0);
        loop {
            let of_part = part.map_or((rows.row_bytes, 0), |part| (part.bytes, part.place.blocks));
            done += of_part.0;
            before += u64::from(of_part.1) << rows.block_shift;
            let wants = became == code::OK && part.is_some() && done < rows.row_bytes;
            if self.block.vote(wants).total == 0 {
                return became;
            }
            let Some(queue) = &mut self.queue else {
                return code::NOT_RUN;
            };
            part = match wants {
                // SAFETY: the host vouches for the extents.
                true => unsafe { self.map.span(rows, (id, done)) },
                false => None,
            };
            let ends = BatchEnds(self.block.batch_words());
            let at = part.map_or(rows.blocks_of(0, 1), |part| part.place);
            let read = || command(rows, (station, thread, before), at);
            let submitted = queue.submit(ends, wants, read);
            let deadline_ns = GpuThread.now_ns().saturating_add(rows.timeout_ns);
            let left = queue.finish(ends, &GpuThread, deadline_ns);
            self.has_lost |= left != Ok(0);
            if wants {
                became = ended((submitted, left), ends.status(thread));
            }
        }
    }

    /// Copies rows to the output: of the `count` rows from row `first` on, each whose word in `words` has an offset.
    #[inline(always)]
    fn copy(&self, words: &[AtomicU32], (first, count): (u64, u32), units: UnitSteps) {
        let rows = self.rows;
        let from = u64::from(self.station) * STATION_BYTES + rows.slots;
        let to = rows.out + first * rows.out_stride;
        let place = |row: u32, byte: u64| {
            let word = words.get(row as usize).filter(|_| row < count);
            let in_slot = word.map_or(NOWHERE, |word| word.load(Order::Relaxed, Scope::Cta));
            let slot = u64::from(row) * u64::from(rows.slot_bytes) + u64::from(in_slot);
            (
                in_slot != NOWHERE,
                to + u64::from(row) * rows.out_stride + byte,
                from + slot + byte,
            )
        };
        // SAFETY: a unit of a row with an offset lies inside the row, both in its slot and in the output.
        unsafe { units.copy(rows.unit_shift, count, place) };
    }

    /// Ends the block: counts its failures, and frees the station unless it has a lost command. Every thread calls it.
    ///
    /// Two threads do the two: each waits for the bus, and neither needs what the other does. After a lost command one
    /// thread does both, so that the host finds the report of trouble when it learns of the end.
    #[inline(always)]
    pub fn leave(self) {
        let (rows, block) = (self.rows, self.block);
        let reports = launch::report(rows, &block, (self.failed.rows, self.failed.worst));
        // All threads have left the slots and counted their failures.
        block.sync();
        let is_alone = self.has_lost || block.size() <= 32;
        if block.leads() {
            if self.has_lost {
                self.gate.report_trouble();
            }
            match self.map.member() {
                None => station::leave(rows, &self.gate, self.station, self.has_lost),
                Some((_, of)) => {
                    members::leave((rows, of), self.gate, self.station, self.has_lost);
                }
            }
        }
        if arch::thread() == if is_alone { 0 } else { 32 } {
            launch_end::end_block(rows, reports);
        }
    }
}
