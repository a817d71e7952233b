//! The submission queue entry, common to admin and I/O commands.
//!
//! NVMe Base 2.0c, 3.3.3.1 (Submission Queue Entry).

use super::addr::{Cid, Nsid};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a submission queue entry (CC.IOSQES = 6).
pub const SQE_BYTES: usize = 64;

/// A submission queue entry: 64 bytes, aligned so that it is stored as whole words.
///
/// The controller fetches entries after the doorbell was written and may do so at any later time, so an entry
/// is never changed once it was published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(64))]
pub struct Sqe {
    /// Opcode 7:0, fused operation 9:8, PSDT 15:14, command identifier 31:16.
    pub cdw0: u32,
    /// Namespace identifier.
    pub nsid: u32,
    /// Command dword 2.
    pub cdw2: u32,
    /// Command dword 3.
    pub cdw3: u32,
    /// Metadata pointer.
    pub mptr: u64,
    /// Data pointer: PRP1 and PRP2, or one SGL descriptor.
    pub dptr: [u64; 2],
    /// Command dword 10.
    pub cdw10: u32,
    /// Command dword 11.
    pub cdw11: u32,
    /// Command dword 12.
    pub cdw12: u32,
    /// Command dword 13.
    pub cdw13: u32,
    /// Command dword 14.
    pub cdw14: u32,
    /// Command dword 15.
    pub cdw15: u32,
}
const _: () = assert!(size_of::<Sqe>() == SQE_BYTES);

/// PRP or SGL for Data Transfer (CDW0.PSDT).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Psdt {
    /// The data pointer holds PRP1 and PRP2.
    Prp,
    /// The data pointer is an SGL descriptor; MPTR is a contiguous buffer.
    SglMptrBuffer,
    /// The data pointer is an SGL descriptor; MPTR points at one too.
    SglMptrSgl,
    /// 11b, which no revision defines.
    Reserved,
}

impl Sqe {
    /// All zero: a flush of no namespace.
    pub const ZERO: Self = Self::from_words([0; 8]);

    /// Makes a command with this opcode and namespace; every other field is zero.
    #[inline]
    pub const fn new(opcode: u8, nsid: Nsid) -> Self {
        Self {
            cdw0: opcode as u32,
            nsid: nsid.0,
            cdw2: 0,
            cdw3: 0,
            mptr: 0,
            dptr: [0; 2],
            cdw10: 0,
            cdw11: 0,
            cdw12: 0,
            cdw13: 0,
            cdw14: 0,
            cdw15: 0,
        }
    }

    /// Returns the opcode.
    #[inline]
    pub const fn opcode(&self) -> u8 {
        self.cdw0 as u8
    }

    /// Returns the fused operation: 0 for a normal command.
    #[inline]
    pub const fn fuse(&self) -> u8 {
        (self.cdw0 >> 8) as u8 & 3
    }

    /// Returns the meaning of the data pointer.
    #[inline]
    pub const fn psdt(&self) -> Psdt {
        match (self.cdw0 >> 14) & 3 {
            0 => Psdt::Prp,
            1 => Psdt::SglMptrBuffer,
            2 => Psdt::SglMptrSgl,
            _ => Psdt::Reserved,
        }
    }

    /// Returns the command identifier.
    #[inline]
    pub const fn cid(&self) -> Cid {
        Cid((self.cdw0 >> 16) as u16)
    }

    /// Returns this entry with its command identifier set.
    #[inline]
    pub const fn with_cid(mut self, cid: Cid) -> Self {
        self.cdw0 = self.cdw0 & 0xFFFF | (cid.0 as u32) << 16;
        self
    }

    /// Returns this entry with PRP1 and PRP2 as its data pointer.
    #[inline]
    pub const fn with_prps(mut self, prp1: u64, prp2: u64) -> Self {
        self.cdw0 &= !(3 << 14);
        self.dptr = [prp1, prp2];
        self
    }

    /// Returns this entry with one SGL descriptor as its data pointer (PSDT 01b).
    ///
    /// The metadata pointer then names a contiguous buffer; a command without metadata leaves it zero.
    #[inline]
    pub const fn with_sgl(mut self, descriptor: [u64; 2]) -> Self {
        self.cdw0 = self.cdw0 & !(3 << 14) | 1 << 14;
        self.dptr = descriptor;
        self
    }

    /// Returns command dwords 10 and 11 as one number (the starting LBA of NVM commands).
    #[inline]
    pub const fn cdw10_11(&self) -> u64 {
        self.cdw10 as u64 | (self.cdw11 as u64) << 32
    }

    /// Returns the entry as the eight words in which it is stored.
    #[inline]
    pub const fn to_words(self) -> [u64; 8] {
        zerocopy::transmute!(self)
    }

    /// Makes an entry of eight words.
    #[inline]
    pub const fn from_words(words: [u64; 8]) -> Self {
        zerocopy::transmute!(words)
    }
}
