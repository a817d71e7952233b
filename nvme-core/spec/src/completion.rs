//! The completion queue entry.
//!
//! NVMe Base 2.0c, 3.3.3.2 (Common Completion Queue Entry).

use super::addr::{Cid, Qid};
use super::status::Status;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a completion queue entry (CC.IOCQES = 4).
pub const CQE_BYTES: usize = 16;

/// A completion queue entry: 16 bytes.
///
/// The phase tag is in the last dword, and the controller writes it last or with the rest: a driver that
/// finds a new phase tag in one load of dwords 2 and 3 may read the other dwords after an acquire fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(16))]
pub struct Cqe {
    /// Command specific.
    pub dw0: u32,
    /// Command specific.
    pub dw1: u32,
    /// Submission queue head: the controller has fetched every entry before it.
    pub sqhd: u16,
    /// The submission queue of the command.
    pub sqid: u16,
    /// The command's identifier.
    pub cid: u16,
    /// Phase tag in bit 0, status field in bits 15:1.
    pub phase_status: u16,
}
const _: () = assert!(size_of::<Cqe>() == CQE_BYTES);

impl Cqe {
    /// Returns the phase tag.
    #[inline]
    pub const fn phase(&self) -> bool {
        self.phase_status & 1 != 0
    }

    /// Returns the status field.
    #[inline]
    pub const fn status(&self) -> Status {
        Status(self.phase_status >> 1)
    }

    /// Returns the command's identifier.
    #[inline]
    pub const fn cid(&self) -> Cid {
        Cid(self.cid)
    }

    /// Returns the submission queue of the command.
    #[inline]
    pub const fn sqid(&self) -> Qid {
        Qid(self.sqid)
    }

    /// Makes an entry of its two words: `lower` is dwords 0-1, `upper` dwords 2-3.
    #[inline]
    pub const fn from_words(lower: u64, upper: u64) -> Self {
        Self {
            dw0: lower as u32,
            dw1: (lower >> 32) as u32,
            sqhd: upper as u16,
            sqid: (upper >> 16) as u16,
            cid: (upper >> 32) as u16,
            phase_status: (upper >> 48) as u16,
        }
    }

    /// Returns the entry as two words, dwords 0-1 first.
    #[inline]
    pub const fn to_words(self) -> [u64; 2] {
        [
            self.dw0 as u64 | (self.dw1 as u64) << 32,
            self.sqhd as u64
                | (self.sqid as u64) << 16
                | (self.cid as u64) << 32
                | (self.phase_status as u64) << 48,
        ]
    }
}

/// Returns the phase tag in the upper word of a completion queue entry.
#[inline]
pub const fn phase_of(upper: u64) -> bool {
    upper >> 48 & 1 != 0
}
