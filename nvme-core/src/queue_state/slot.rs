//! A command slot's word, its entry in the free ring, and the CID made of both.

use crate::spec::Cid;

const TAG: u32 = (1 << 25) - 1;
const EXPIRED: u32 = 1 << 25;
const WANTS_DW0: u32 = 1 << 26;
pub(crate) const PENDING: u32 = 1 << 27;
const GENERATION_SHIFT: u32 = 28;

/// Limit of the result cells or tags that slots can name.
pub const MAX_TAGS: u32 = TAG + 1;

/// A command slot's word: generation, the pending bit, and the tag of the result's destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotWord(pub u32);

impl SlotWord {
    /// The word of no command.
    pub const NONE: Self = Self(0);

    pub fn pending(self) -> bool {
        self.0 & PENDING != 0
    }

    pub fn tag(self) -> u32 {
        self.0 & TAG
    }

    /// True if the command's deadline has passed and was reported.
    pub fn expired(self) -> bool {
        self.0 & EXPIRED != 0
    }

    /// Returns the word once the deadline was reported.
    pub fn expire(self) -> Self {
        Self(self.0 | EXPIRED)
    }

    pub fn wants_dw0(self) -> bool {
        self.0 & WANTS_DW0 != 0
    }

    #[inline(always)]
    pub fn generation(self) -> u32 {
        self.0 >> GENERATION_SHIFT
    }

    /// Returns the part that outlives the queue: the generation alone.
    pub fn unused(self) -> Self {
        Self(self.0 & !(PENDING | WANTS_DW0 | EXPIRED | TAG))
    }

    /// Returns generation and pending bit alone, of a command in flight.
    #[inline(always)]
    pub fn in_flight(self) -> u32 {
        self.unused().0 | PENDING
    }

    /// Returns the word of the slot's next command.
    pub fn next(self, tag: u32, wants_dw0: bool) -> Self {
        let generation = (self.generation() + 1) << GENERATION_SHIFT;
        let dw0 = if wants_dw0 { WANTS_DW0 } else { 0 };
        Self(generation | PENDING | dw0 | tag & TAG)
    }

    /// Returns the entry of the free ring for this slot: its number with its generation, so that taking the
    /// slot needs no load of its word.
    pub fn free(self, slot: u32) -> u32 {
        slot | self.generation() << 12
    }

    /// Returns the word of a slot in the free ring, as far as [`next`](Self::next) reads it.
    pub fn freed(free: u32) -> Self {
        Self(free >> 12 << GENERATION_SHIFT)
    }

    pub fn cid(self, slot: u32) -> Cid {
        Cid((slot | self.generation() << 12) as u16)
    }
}

/// Returns the slot in an entry of the free ring.
#[inline(always)]
pub(crate) fn slot_in(free: u32) -> u32 {
    free & 0xFFF
}
