//! Warps that read a range of bytes by themselves, in pieces, while they use those that have come.
//!
//! The slots of a warp are a [`Ring`]; each stage of it is the business of one lane, which submits the stage's read and
//! waits for it. The bytes are used where they have landed, in memory of the host: they cross the GPU's link once.
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::groups::Block;
use crate::launch_end;
use crate::reads::Reads;
use crate::ring::{Pieces, Ring};
use crate::rows::Gather;
use nvme_core::group::Group;

/// A warp of a block of [`BLOCK_THREADS`](crate::rows::BLOCK_THREADS) threads that reads a range in pieces.
///
/// All threads of the block [enter](Self::enter) and [leave](Self::leave). Between the two a warp asks for the
/// [pieces](Self::piece) of one range, by all of its lanes together.
pub struct Stream<'r> {
    reads: Reads<'r>,
    /// Pieces below this one were submitted, or never will be.
    fetched: u64,
    /// The first piece that is not used before stages are read into again.
    due: u64,
}

impl<'r> Stream<'r> {
    /// Every thread of the block calls it. Waits while as many blocks as there are stations are inside.
    ///
    /// # Safety
    /// `rows` is what `nvme_host`'s `Table::stream_on_gpu` gave for this launch.
    #[inline(always)]
    pub unsafe fn enter(rows: &'r Gather) -> Self {
        Self {
            // SAFETY: the caller's.
            reads: unsafe { Reads::enter(rows) },
            fetched: 0,
            due: 0,
        }
    }

    /// The pieces that are asked for from now on are others, numbered anew. All of those before were asked for.
    #[inline(always)]
    pub fn begin(&mut self) {
        self.fetched = 0;
        self.due = 0;
    }

    /// Reads on, and waits for piece `number`: the warp asks for all of `pieces` that are read one by one, and has used
    /// those before. How the read of the piece ended: its bytes lie at their [addresses](Self::address) after 0, until the next
    /// call. After less than 0 there are no more pieces. Every lane of the warp calls it.
    #[inline(always)]
    pub fn piece(&mut self, pieces: &impl Pieces, number: u64) -> i32 {
        self.reads.look();
        // Where each piece is a batch, this costs nothing.
        if pieces.batch() == 1 || number >= self.due {
            let (lane, stages) = (arch::lane(), pieces.stages());
            let next = pieces.next_at(lane, number);
            let is_new = lane < stages && next >= self.fetched && next <= pieces.last();
            self.submit(pieces, next, is_new && pieces.is_read(next));
            self.fetched = number + u64::from(stages);
            self.due = number + pieces.batch();
        }
        // A warp that the host wants to leave waits for all that is under way.
        self.reads.see(pieces.stage(number))
    }

    /// What the rest of the range gets after a piece that ended below 0.
    #[inline(always)]
    pub fn rest(&self) -> i32 {
        self.reads.rest()
    }

    /// Where a byte of a [`Ring`] lies that has landed.
    #[inline(always)]
    pub fn address(&self, byte: u64) -> u64 {
        self.reads.rows.slots + self.reads.slots + Ring::place(byte)
    }

    /// Where piece `number` lies, which has landed and begins with a block.
    #[inline(always)]
    pub fn address_of(&self, pieces: &impl Pieces, number: u64) -> u64 {
        let slot = pieces.slot(number, pieces.piece(number).0);
        self.reads.rows.slots + self.reads.slots + slot
    }

    /// Where byte `byte` of piece `number` lies, which has landed; or one before it, as far as it is of a block of the
    /// piece.
    #[inline(always)]
    pub fn address_in(&self, pieces: &impl Pieces, number: u64, byte: u64) -> u64 {
        let shift = self.reads.rows.block_shift;
        let block = pieces.piece(number).0 >> shift << shift;
        let slot = self.reads.slots + pieces.slot(number, block);
        (self.reads.rows.slots + slot).wrapping_add(byte.wrapping_sub(block))
    }

    /// The read of piece `number` into the stage of this lane, whose bytes the warp has used, for the lanes that want it.
    #[inline(always)]
    fn submit(&mut self, pieces: &impl Pieces, number: u64, wants: bool) {
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

    /// The warp's share of the launch is done: `failed` rows were not computed, `worst` is the
    /// [word](crate::rows::worst) of the first of them, or 0. The last block tells the host. Every thread of the block
    /// calls it.
    #[inline(always)]
    pub fn leave(self, failed: u64, worst: u64) {
        self.reads.leave(failed, worst);
    }
}

/// The end of a block that did not enter. `failed` and `worst` are as in [`Stream::leave`], of each thread. Every thread of
/// the block calls it.
///
/// # Safety
/// As [`Stream::enter`].
#[inline(always)]
pub unsafe fn leave_block(rows: &Gather, failed: u64, worst: u64) {
    let block = Block::here();
    let reports = launch_end::report(rows, failed, worst);
    // What all threads have written is ordered before what the leader does.
    let reports = block.vote(reports).total;
    if block.leads() {
        launch_end::end_block(rows, reports);
    }
}
