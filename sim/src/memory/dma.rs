//! The memory that the controller reaches by DMA: the traits of a map of address ranges, and the
//! accesses through a map during one batch of commands.

use super::span::MemorySpan;
use alloc::vec::Vec;
use core::cell::{Cell, RefCell};
use core::sync::atomic::AtomicU64;

/// An access of the controller to memory that is not mapped, with the first missing address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaFault(pub u64);

/// A mapped range: the addresses from `start` on are the bytes of `span`.
#[derive(Clone, Copy, Debug)]
pub struct DmaRegion<'a> {
    /// First address.
    pub start: u64,
    /// Bytes of the range.
    pub span: MemorySpan<'a>,
}

/// A view of the map. While it lives, no range of the map is unmapped.
pub trait DmaGuard {
    /// Returns the range that contains `iova`.
    fn lookup(&self, iova: u64) -> Option<DmaRegion<'_>>;

    /// Returns the bytes that were copied because their memory cannot be mapped; `None` without
    /// such memory. Writes of the controller to the copies reach the memory when the guard is
    /// dropped.
    fn staged_bytes(&self) -> Option<usize> {
        None
    }

    /// Makes the writes to `len` bytes from `iova` on reach the memory after all others.
    fn write_back_last(&self, iova: u64, len: u64) {
        let _ = (iova, len);
    }
}

/// A map of the memory that the controller may reach by DMA.
pub trait DmaMemory {
    /// View of the map. The controller takes one for each batch of commands.
    type Guard<'a>: DmaGuard
    where
        Self: 'a;

    /// Starts a batch of accesses.
    fn guard(&self) -> Self::Guard<'_>;
}

/// The accesses of one batch: a guard, the range that was found last, and the copies that wait.
pub struct Dma<'g> {
    guard: &'g dyn DmaGuard,
    last: Cell<DmaRegion<'g>>,
    defers: Cell<bool>,
    deferred: RefCell<Vec<(MemorySpan<'g>, MemorySpan<'g>)>>,
}

impl<'g> Dma<'g> {
    /// Makes the accesses under `guard`.
    pub fn new(guard: &'g dyn DmaGuard) -> Self {
        let none = DmaRegion {
            start: 0,
            span: MemorySpan::of_words(&[]),
        };
        Self {
            guard,
            last: Cell::new(none),
            defers: Cell::new(false),
            deferred: RefCell::default(),
        }
    }

    /// Delays copies into a peer's memory from now on, until [`copy_deferred`](Self::copy_deferred).
    pub(crate) fn defer_copies(&self) {
        self.defers.set(true);
    }

    /// Copies from a store: at once, or in [`copy_deferred`](Self::copy_deferred) after
    /// [`defer_copies`](Self::defer_copies).
    #[inline]
    pub(crate) fn copy(&self, from: MemorySpan<'g>, to: MemorySpan<'g>) {
        if to.is_peer() && self.defers.get() {
            self.deferred.borrow_mut().push((from, to));
        } else {
            from.copy_to(to);
        }
    }

    /// Returns the number of delayed copies.
    #[inline]
    pub(crate) fn deferred(&self) -> usize {
        self.deferred.borrow().len()
    }

    /// Carries out the delayed copies. True if no peer's memory was lost.
    #[cold]
    pub(crate) fn copy_deferred(&self) -> bool {
        let deferred = self.deferred.take();
        MemorySpan::copy_all(&deferred)
    }

    /// Returns the bytes of staged copies, see [`DmaGuard`].
    pub fn staged_bytes(&self) -> Option<usize> {
        self.guard.staged_bytes()
    }

    /// Orders write-backs, see [`DmaGuard`].
    pub fn write_back_last(&self, iova: u64, len: u64) {
        self.guard.write_back_last(iova, len);
    }

    /// Returns the bytes mapped from `iova` on, up to the end of their range; at least one.
    #[inline]
    fn mapped_from(&self, iova: u64) -> Result<MemorySpan<'g>, DmaFault> {
        let mut region = self.last.get();
        if iova.wrapping_sub(region.start) >= region.span.len() as u64 {
            region = self.guard.lookup(iova).ok_or(DmaFault(iova))?;
            self.last.set(region);
        }
        let offset = iova.wrapping_sub(region.start) as usize;
        region
            .span
            .slice(offset, region.span.len().wrapping_sub(offset))
            .filter(|span| !span.is_empty())
            .ok_or(DmaFault(iova))
    }

    /// Returns `len` bytes from `iova` on, if one range holds them all.
    #[inline]
    pub fn span(&self, iova: u64, len: usize) -> Option<MemorySpan<'g>> {
        self.mapped_from(iova).ok()?.slice(0, len)
    }

    /// Calls `each` with the mapped extents of `len` bytes from `iova` on, in order.
    #[inline]
    pub fn extents(
        &self,
        iova: u64,
        len: usize,
        mut each: impl FnMut(MemorySpan<'g>),
    ) -> Result<(), DmaFault> {
        let mut done = 0;
        while done < len {
            let at = iova.checked_add(done as u64).ok_or(DmaFault(iova))?;
            let rest = self.mapped_from(at)?;
            let take = rest.len().min(len - done);
            if let Some(extent) = rest.slice(0, take) {
                each(extent);
            }
            done += take;
        }
        Ok(())
    }

    /// Checks that `len` bytes from `iova` on are mapped.
    pub fn check(&self, iova: u64, len: usize) -> Result<(), DmaFault> {
        self.extents(iova, len, |_| {})
    }

    /// Reads memory from `iova` on into `into`.
    pub fn read(&self, iova: u64, into: &mut [u8]) -> Result<(), DmaFault> {
        let mut done = 0;
        self.extents(iova, into.len(), |extent| {
            extent.read(&mut into[done..]);
            done += extent.len();
        })
    }

    /// Writes `from` to memory from `iova` on.
    pub fn write(&self, iova: u64, from: &[u8]) -> Result<(), DmaFault> {
        let mut done = 0;
        self.extents(iova, from.len(), |extent| {
            extent.write(&from[done..]);
            done += extent.len();
        })
    }

    /// Reads `N` aligned words.
    #[inline]
    pub fn words<const N: usize>(&self, iova: u64) -> Result<[u64; N], DmaFault> {
        self.mapped_from(iova)?.words(0).ok_or(DmaFault(iova))
    }

    /// Returns the aligned word at `iova`, for a store to it.
    #[inline]
    pub fn word(&self, iova: u64) -> Result<&'g AtomicU64, DmaFault> {
        self.mapped_from(iova)?.word(0).ok_or(DmaFault(iova))
    }
}
