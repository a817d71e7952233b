//! Warps that read a range of bytes by themselves, in pieces, while they use those that have come.
//!
//! The slots of a warp are a [`Ring`]; each stage of it is the business of one lane, which submits the stage's read and
//! waits for it. The bytes are used where they have landed, in memory of the host: they cross the GPU's link once.
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::reads::Reads;
use crate::ring::{Pieces, Ring};
use crate::rows::{Gather, code};

/// A warp of a block of [`BLOCK_THREADS`](crate::rows::BLOCK_THREADS) threads that reads a range in pieces.
///
/// All threads of the block [enter](Self::enter) and [leave](Self::leave). Between the two a warp asks for the
/// [pieces](Self::piece) of one range, by all of its lanes together.
pub struct Stream<'r> {
    reads: Reads<'r>,
    /// Pieces below this one were submitted, or never will be.
    fetched: u64,
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
        }
    }

    /// The pieces that are asked for from now on are others, numbered anew. All of those before were asked for.
    #[inline(always)]
    pub fn begin(&mut self) {
        self.fetched = 0;
    }

    /// Reads on, and waits for piece `number`: the warp asks for all of `pieces` one by one, and has used those
    /// before. How the read of the piece ended: its bytes lie at their [addresses](Self::address) after 0, until the next
    /// call. After less than 0 there are no more pieces. Every lane of the warp calls it.
    #[inline(always)]
    pub fn piece(&mut self, pieces: &impl Pieces, number: u64) -> i32 {
        self.reads.look();
        let (lane, stages) = (arch::lane(), pieces.stages());
        let next = pieces.next_at(lane, number);
        let is_new = lane < stages && next >= self.fetched && next <= pieces.last();
        if is_new && self.reads.ends == code::OK {
            self.submit(pieces, next);
        }
        self.fetched = number + u64::from(stages);
        arch::sync_warp(arch::FULL);
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

    /// The read of piece `number` into the stage of this lane, whose bytes the warp has used.
    #[inline(always)]
    fn submit(&mut self, pieces: &impl Pieces, number: u64) {
        let rows = self.reads.rows;
        let (begin, end) = pieces.piece(number);
        let place = rows.blocks_of(begin, (end - begin) as u32);
        let slot = self.reads.slots + pieces.slot(number, place.block << rows.block_shift);
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
