//! Warps that read a range of bytes in pieces, while they use the pieces that have arrived.
//!
//! The slots of a warp are a [`RangeRing`]; one lane is responsible for each stage: it submits the stage's read
//! and waits for it. The bytes are used in place, in host memory, so they cross the GPU's link once.
//!
//! The order of calls: [`RangeStream::enter`]; [`RangeStream::piece`] for each piece in order, then its addresses;
//! [`RangeStream::begin`] before another range; [`RangeStream::leave`].
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::groups::WholeBlock;
use crate::launch_end;
use crate::reads::WarpReads;
use crate::ring::{RangePieces, RangeRing};
use crate::rows::GatherLaunch;
use nvme_core::group::ThreadGroup;

/// A warp of a block of [`BLOCK_THREADS`](crate::rows::BLOCK_THREADS) threads that reads a range in pieces.
///
/// All threads of the block [enter](Self::enter) and [leave](Self::leave). In between a warp waits for the
/// [pieces](Self::piece) of one range, with all of its lanes together.
pub struct RangeStream<'r> {
    reads: WarpReads<'r>,
    /// Number below which all pieces were submitted, or never will be.
    fetched: u64,
    /// Number of the first piece that is not used before stages are refilled.
    due: u64,
}

impl<'r> RangeStream<'r> {
    /// Enters. Every thread of the block calls it. Waits while every station is taken.
    ///
    /// # Safety
    /// `rows` is the value that `nvme_host`'s `Table::stream_on_gpu` returned for this launch.
    #[inline(always)]
    pub unsafe fn enter(rows: &'r GatherLaunch) -> Self {
        Self {
            // SAFETY: this function's caller vouches for `rows`.
            reads: unsafe { WarpReads::enter(rows) },
            fetched: 0,
            due: 0,
        }
    }

    /// Starts another range, whose pieces are numbered from 0 again. The warp has waited for all earlier
    /// pieces.
    #[inline(always)]
    pub fn begin(&mut self) {
        self.fetched = 0;
        self.due = 0;
    }

    /// Waits for piece `number` and submits the next reads; returns the code of the piece.
    ///
    /// The warp waits for every piece of `pieces` that is read, in order, and has used the earlier ones.
    /// After 0 the bytes are at their [addresses](Self::address) until the next call; a
    /// negative code ends the stream. Every lane of the warp calls it.
    #[inline(always)]
    pub fn piece(&mut self, pieces: &impl RangePieces, number: u64) -> i32 {
        self.reads.look();
        // If each piece is a batch, the compiler removes this condition.
        if pieces.batch() == 1 || number >= self.due {
            let (lane, stages) = (arch::lane(), pieces.stages());
            let next = pieces.next_at(lane, number);
            let is_new = lane < stages && next >= self.fetched && next <= pieces.last();
            self.submit(pieces, next, is_new && pieces.is_read(next));
            self.fetched = number + u64::from(stages);
            self.due = number + pieces.batch();
        }
        // A warp that the host asks to leave waits for all reads in flight.
        self.reads.see(pieces.stage(number))
    }

    /// Returns the code of the remaining range after a piece with a negative code.
    #[inline(always)]
    pub fn rest(&self) -> i32 {
        self.reads.rest()
    }

    /// Returns the address of a byte of a [`RangeRing`] that has arrived.
    ///
    /// The address is in host memory. The bytes may be loaded until the warp asks for the piece that refills
    /// the stage.
    #[inline(always)]
    pub fn address(&self, byte: u64) -> u64 {
        self.reads.rows.slots + self.reads.slots + RangeRing::place(byte)
    }

    /// Returns the address of piece `number`, which has arrived and begins at a block.
    #[inline(always)]
    pub fn address_of(&self, pieces: &impl RangePieces, number: u64) -> u64 {
        let slot = pieces.slot(number, pieces.piece(number).0);
        self.reads.rows.slots + self.reads.slots + slot
    }

    /// Returns the address of byte `byte` of piece `number`, which has arrived; `byte` may be before the
    /// piece, inside its first block.
    #[inline(always)]
    pub fn address_in(&self, pieces: &impl RangePieces, number: u64, byte: u64) -> u64 {
        let shift = self.reads.rows.block_shift;
        let block = pieces.piece(number).0 >> shift << shift;
        let slot = self.reads.slots + pieces.slot(number, block);
        (self.reads.rows.slots + slot).wrapping_add(byte.wrapping_sub(block))
    }

    /// Submits the read of piece `number` into the stage of this lane, whose bytes the warp has used, for
    /// lanes with `wants`.
    #[inline(always)]
    fn submit(&mut self, pieces: &impl RangePieces, number: u64, wants: bool) {
        let (mut place, mut slot) = (None, 0);
        if wants {
            let rows = self.reads.rows;
            let (begin, end) = pieces.piece(number);
            let of_piece = rows.blocks_of(begin, (end - begin) as u32);
            let block = of_piece.block << rows.block_shift;
            (place, slot) = (
                Some(of_piece),
                self.reads.slots + pieces.slot(number, block),
            );
        }
        self.reads.submit(place, slot);
    }

    /// Leaves, when the warp's share of the launch is done: `failed` rows were not computed, `worst` is the
    /// [word](crate::rows::worst) of the first of them, or 0. The last block reports to the host. Every
    /// thread of the block calls it.
    #[inline(always)]
    pub fn leave(self, failed: u64, worst: u64) {
        self.reads.leave(failed, worst);
    }
}

/// Ends a block that did not enter. `failed` and `worst` are those of each thread, as in [`RangeStream::leave`].
/// Every thread of the block calls it.
///
/// # Safety
/// As [`RangeStream::enter`].
#[inline(always)]
pub unsafe fn leave_block(rows: &GatherLaunch, failed: u64, worst: u64) {
    let block = WholeBlock::here();
    let reports = launch_end::report(rows, failed, worst);
    // The barrier orders all threads' writes before the leader's report.
    let reports = block.vote(reports).total;
    if block.leads() {
        launch_end::end_block(rows, reports);
    }
}
