//! What the controller reaches by DMA: a map of ranges, and accesses through it.

use super::span::Span;
use alloc::vec::Vec;
use core::cell::{Cell, RefCell};
use core::sync::atomic::AtomicU64;

/// The controller tried to reach memory that is not mapped. The address is the first one missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaFault(pub u64);

/// One mapped range: the addresses from `start` on are the bytes of `span`.
#[derive(Clone, Copy, Debug)]
pub struct Region<'a> {
    /// First address.
    pub start: u64,
    /// The bytes.
    pub span: Span<'a>,
}

/// A look at the map during which nothing of it goes away.
pub trait DmaGuard {
    /// The range that holds `iova`.
    fn lookup(&self, iova: u64) -> Option<Region<'_>>;

    /// Bytes that were copied because they cannot be mapped; `None` when there is no such memory. What
    /// the controller writes to the copies arrives when the guard goes.
    fn staged_bytes(&self) -> Option<usize> {
        None
    }

    /// What is written to `len` bytes from `iova` on arrives after everything else.
    fn settle_last(&self, iova: u64, len: u64) {
        let _ = (iova, len);
    }
}

/// The memory that the controller may reach by DMA.
pub trait DmaMemory {
    /// While it lives, no range is unmapped. Taken once per batch of commands.
    type Guard<'a>: DmaGuard
    where
        Self: 'a;

    /// Starts a batch of accesses.
    fn guard(&self) -> Self::Guard<'_>;
}

/// DMA during one batch: a guard and the range that was found last.
pub struct Dma<'g> {
    guard: &'g dyn DmaGuard,
    last: Cell<Region<'g>>,
    holds: Cell<bool>,
    held: RefCell<Vec<(Span<'g>, Span<'g>)>>,
}

impl<'g> Dma<'g> {
    /// Accesses under `guard`.
    pub fn new(guard: &'g dyn DmaGuard) -> Self {
        let none = Region {
            start: 0,
            span: Span::of_words(&[]),
        };
        Self {
            guard,
            last: Cell::new(none),
            holds: Cell::new(false),
            held: RefCell::default(),
        }
    }

    /// From now on copies into a peer's memory wait for [`settle`](Self::settle).
    pub(crate) fn hold(&self) {
        self.holds.set(true);
    }

    /// Copies from a store, at once unless they are held.
    #[inline]
    pub(crate) fn copy(&self, from: Span<'g>, to: Span<'g>) {
        if to.is_peer() && self.holds.get() {
            self.held.borrow_mut().push((from, to));
        } else {
            from.copy_to(to);
        }
    }

    /// Copies that are held.
    #[inline]
    pub(crate) fn held(&self) -> usize {
        self.held.borrow().len()
    }

    /// Carries out what is held; whether nothing was lost.
    #[cold]
    pub(crate) fn settle(&self) -> bool {
        let held = self.held.take();
        Span::copy_all(&held)
    }

    /// Copies of memory that cannot be mapped, see [`DmaGuard`].
    pub fn staged_bytes(&self) -> Option<usize> {
        self.guard.staged_bytes()
    }

    /// See [`DmaGuard`].
    pub fn settle_last(&self, iova: u64, len: u64) {
        self.guard.settle_last(iova, len);
    }

    /// The bytes mapped from `iova` on, up to the end of their range; at least one.
    #[inline]
    fn rest(&self, iova: u64) -> Result<Span<'g>, DmaFault> {
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

    /// `len` bytes from `iova` on, when one range holds them all.
    #[inline]
    pub fn span(&self, iova: u64, len: usize) -> Option<Span<'g>> {
        self.rest(iova).ok()?.slice(0, len)
    }

    /// Calls `each` with the pieces of `len` bytes from `iova` on, in order.
    #[inline]
    pub fn pieces(
        &self,
        iova: u64,
        len: usize,
        mut each: impl FnMut(Span<'g>),
    ) -> Result<(), DmaFault> {
        let mut done = 0;
        while done < len {
            let at = iova.checked_add(done as u64).ok_or(DmaFault(iova))?;
            let rest = self.rest(at)?;
            let take = rest.len().min(len - done);
            if let Some(piece) = rest.slice(0, take) {
                each(piece);
            }
            done += take;
        }
        Ok(())
    }

    /// Checks that `len` bytes from `iova` on are mapped.
    pub fn check(&self, iova: u64, len: usize) -> Result<(), DmaFault> {
        self.pieces(iova, len, |_| {})
    }

    /// Reads into `into`.
    pub fn read(&self, iova: u64, into: &mut [u8]) -> Result<(), DmaFault> {
        let mut done = 0;
        self.pieces(iova, into.len(), |piece| {
            piece.read(&mut into[done..]);
            done += piece.len();
        })
    }

    /// Writes `from`.
    pub fn write(&self, iova: u64, from: &[u8]) -> Result<(), DmaFault> {
        let mut done = 0;
        self.pieces(iova, from.len(), |piece| {
            piece.write(&from[done..]);
            done += piece.len();
        })
    }

    /// `N` aligned words.
    #[inline]
    pub fn words<const N: usize>(&self, iova: u64) -> Result<[u64; N], DmaFault> {
        self.rest(iova)?.words(0).ok_or(DmaFault(iova))
    }

    /// The word at `iova`, to be stored to.
    #[inline]
    pub fn word(&self, iova: u64) -> Result<&'g AtomicU64, DmaFault> {
        self.rest(iova)?.word(0).ok_or(DmaFault(iova))
    }
}
