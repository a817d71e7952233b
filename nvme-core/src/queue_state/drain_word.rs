//! The drain word of a shared queue: the position in its completion ring, and the lock of the group that
//! reads there.
//!
//! ```text
//!  31                                     4  3        1   0
//! +----------------------------------------+-----------+------+
//! |   head: completions read, modulo 2^28  |   owed    | lock |
//! +----------------------------------------+-----------+------+
//! ```
//!
//! The holder of the lock reads completions from the head on. `owed` counts the quarters of the ring that
//! were read and not yet released to the controller by the head doorbell: at most 4. All three share one word
//! so that one atomic both takes the lock and returns a head that no other group can move.

const LOCKED: u32 = 1;
const OWED_SHIFT: u32 = 1;
const OWED: u32 = 7;
const HEAD_SHIFT: u32 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DrainWord(u32);

impl DrainWord {
    /// Locked, at no particular head.
    pub const LOCKED: Self = Self(LOCKED);
    /// Number of bits of a counter that the head does not keep.
    pub const DROPPED_BITS: u32 = HEAD_SHIFT;

    /// Makes an unlocked word with this head and no quarter owed.
    pub fn at(head: u32) -> Self {
        Self(head << HEAD_SHIFT)
    }

    #[inline(always)]
    pub fn of_bits(bits: u32) -> Self {
        Self(bits)
    }

    #[inline(always)]
    pub fn bits(self) -> u32 {
        self.0
    }

    #[inline(always)]
    pub fn is_locked(self) -> bool {
        self.0 & LOCKED != 0
    }

    #[inline(always)]
    pub fn head(self) -> u32 {
        self.0 >> HEAD_SHIFT
    }

    /// Returns the quarters of the ring that were read and not released to the controller.
    #[inline(always)]
    pub fn owed(self) -> u32 {
        self.0 >> OWED_SHIFT & OWED
    }

    /// Returns the value that the holder adds to unlock, after it read `found` completions, which
    /// complete `quarters` quarters, and released one quarter or none. One addition does all of it,
    /// so that no other holder sees the lock free and the counts old.
    #[inline(always)]
    pub fn unlocking(found: u32, quarters: u32, released: bool) -> u32 {
        (found << HEAD_SHIFT)
            .wrapping_add(quarters.wrapping_sub(u32::from(released)) << OWED_SHIFT)
            .wrapping_sub(LOCKED)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_pass_moves_the_head_and_what_is_owed() {
        let before =
            DrainWord::of_bits(DrainWord::at(0x0FFF_FFFE).bits() | DrainWord::LOCKED.bits());
        assert!(before.is_locked());
        let after = DrainWord::of_bits(
            before
                .bits()
                .wrapping_add(DrainWord::unlocking(5, 2, false)),
        );
        assert_eq!(
            (after.is_locked(), after.head(), after.owed()),
            (false, 3, 2)
        );
        let locked = after.bits() | DrainWord::LOCKED.bits();
        let end = DrainWord::of_bits(locked.wrapping_add(DrainWord::unlocking(0, 0, true)));
        assert_eq!((end.is_locked(), end.head(), end.owed()), (false, 3, 1));
    }
}
