//! Identifiers and addresses as distinct types, so that they cannot be mixed up.

use core::fmt;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty), $format:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, $format, self.0)
            }
        }
    };
}

number!(
    /// An address as the controller sees it, for PRPs, SGLs and queue base registers.
    Iova(u64), "{:#x}"
);
number!(
    /// Logical block address: counts blocks of the namespace's format, from 0.
    Lba(u64), "{}"
);
number!(
    /// Namespace identifier. 0 is none, FFFFFFFFh is every namespace.
    ///
    /// NVMe Base 2.0c, 3.2.1.2 (Valid and Invalid NSIDs).
    Nsid(u32), "{}"
);
number!(
    /// Queue identifier. 0 is the admin queue.
    Qid(u16), "{}"
);
number!(
    /// Command identifier: unique among the commands in flight on one submission queue.
    Cid(u16), "{:#06x}"
);

impl Nsid {
    /// No namespace.
    pub const NONE: Self = Self(0);
    /// The broadcast value: every namespace the controller has attached.
    pub const ALL: Self = Self(0xFFFF_FFFF);
}

impl Qid {
    /// The admin queue pair.
    pub const ADMIN: Self = Self(0);
}

impl Iova {
    /// Returns this address plus `bytes`, wrapping at the end of the address space.
    #[inline]
    pub const fn offset(self, bytes: u64) -> Self {
        Self(self.0.wrapping_add(bytes))
    }
}

/// The controller's memory page size (CC.MPS): a power of two from 4 KiB to 128 MiB.
///
/// NVMe Base 2.0c, 3.1.3.5 (Controller Configuration).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PageSize(u8);

impl PageSize {
    /// 4 KiB, which every driver of this project uses if CAP.MPSMIN allows it.
    pub const KIB4: Self = Self(12);

    /// Returns the page size of 2^(12 + `mps`) bytes, or `None` above the field's range (0 to 15).
    pub const fn from_mps(mps: u8) -> Option<Self> {
        if mps < 16 { Some(Self(12 + mps)) } else { None }
    }

    /// Returns the value for CC.MPS.
    pub const fn mps(self) -> u8 {
        self.0 - 12
    }

    /// Passes the size through `barrier`, an optimisation barrier that returns its argument.
    #[inline(always)]
    pub fn through(self, barrier: impl FnOnce(u32) -> u32) -> Self {
        Self(barrier(u32::from(self.0)) as u8)
    }

    /// Returns log2 of the size in bytes.
    #[inline]
    pub const fn shift(self) -> u32 {
        self.0 as u32
    }

    /// Returns the bytes of a page.
    #[inline]
    pub const fn bytes(self) -> u64 {
        1 << self.0
    }

    /// Returns the bytes from the start of its page to `iova`.
    #[inline]
    pub const fn offset_of(self, iova: Iova) -> u64 {
        iova.0 & (self.bytes() - 1)
    }

    /// Returns the number of pages that `bytes` bytes from the start of a page take.
    #[inline]
    pub const fn count(self, bytes: u64) -> u64 {
        // Shifts instead of a division, since the compiler does not know that the divisor is a power of two.
        (bytes >> self.0) + (bytes & (self.bytes() - 1) != 0) as u64
    }

    /// Returns the number of PRP entries in a page of this size.
    #[inline]
    pub const fn prp_entries(self) -> u64 {
        self.bytes() / 8
    }
}
