//! Doorbell memory: the words from offset 1000h of BAR0 on, in memory that a driver can map.
//!
//! The controller polls it, so a driver (or a GPU) rings by storing a word and calls nothing.

use alloc::boxed::Box;
use core::sync::atomic::{AtomicU32, Ordering};
use nvme_core::spec::register::doorbell_bytes;
use zerocopy::FromZeros;

/// Bytes of one page of doorbells.
const PAGE: usize = 4096;

/// One page of doorbell words.
#[derive(FromZeros)]
#[repr(C, align(4096))]
struct Page([AtomicU32; PAGE / 4]);

/// The doorbells of every queue: page-aligned words, 4 << DSTRD bytes apart.
pub struct Doorbells {
    pages: Box<[Page]>,
    queues: u16,
    dstrd: u8,
}

impl Doorbells {
    /// Doorbells of queues 0 to `highest_qid`.
    pub(crate) fn new(highest_qid: u16, dstrd: u8) -> Self {
        let bytes = doorbell_bytes(highest_qid, dstrd) as usize;
        let pages = <[Page]>::new_box_zeroed_with_elems(bytes.div_ceil(PAGE));
        Self {
            pages: pages.expect("out of memory"),
            queues: highest_qid.saturating_add(1),
            dstrd,
        }
    }

    /// Start of the page-aligned block: BAR0 offset 1000h.
    pub fn as_ptr(&self) -> *const AtomicU32 {
        self.pages.as_ptr().cast()
    }

    /// Length of the block in bytes, a multiple of 4096.
    pub fn bytes(&self) -> usize {
        self.pages.len() * PAGE
    }

    /// CAP.DSTRD.
    pub fn dstrd(&self) -> u8 {
        self.dstrd
    }

    /// The word at byte `offset` from the start of the block, or `None` outside it or between words.
    pub fn word(&self, offset: usize) -> Option<&AtomicU32> {
        if !offset.is_multiple_of(4) {
            return None;
        }
        self.pages.get(offset / PAGE)?.0.get(offset % PAGE / 4)
    }

    /// The queue and whether it is the completion queue head, for an offset from the start of the block.
    pub(crate) fn decode(&self, offset: usize) -> Option<(u16, bool)> {
        let stride = 4usize << self.dstrd;
        let index = offset / stride;
        let known = offset.is_multiple_of(stride) && index / 2 < usize::from(self.queues);
        known.then_some(((index / 2) as u16, index % 2 == 1))
    }

    #[inline]
    fn at(&self, index: usize) -> &AtomicU32 {
        let offset = index * (4usize << self.dstrd);
        &self.pages[offset / PAGE].0[offset % PAGE / 4]
    }

    /// The submission queue tail doorbell of `qid`.
    #[inline]
    pub fn sq_tail(&self, qid: u16) -> &AtomicU32 {
        self.at(2 * usize::from(qid))
    }

    /// The completion queue head doorbell of `qid`.
    #[inline]
    pub fn cq_head(&self, qid: u16) -> &AtomicU32 {
        self.at(2 * usize::from(qid) + 1)
    }

    /// Sets every doorbell to 0, as a controller reset does.
    pub(crate) fn clear(&self) {
        for qid in 0..self.queues {
            self.sq_tail(qid).store(0, Ordering::Relaxed);
            self.cq_head(qid).store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_lie_at_the_stride_and_nowhere_else() {
        for dstrd in [0, 1, 4, 10] {
            let doorbells = Doorbells::new(3, dstrd);
            assert!(doorbells.as_ptr().addr().is_multiple_of(4096));
            doorbells.cq_head(3).store(77, Ordering::Relaxed);
            let offset = 7usize * (4 << dstrd);
            let word = doorbells.word(offset).unwrap();
            assert_eq!(word.load(Ordering::Relaxed), 77);
            assert_eq!(doorbells.decode(offset), Some((3, true)));
            assert_eq!(doorbells.decode(offset + (4 << dstrd)), None);
            assert!(doorbells.word(doorbells.bytes()).is_none());
            assert!(doorbells.word(2).is_none());
            doorbells.clear();
            assert_eq!(word.load(Ordering::Relaxed), 0);
        }
    }
}
