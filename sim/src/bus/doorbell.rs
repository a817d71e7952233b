//! Doorbell memory: the words from offset 1000h of BAR0 on, in memory that a driver can map.
//!
//! The controller polls these words, so a driver (or a GPU) rings by a store alone and calls no
//! function. An offset can therefore be written without the controller noticing it at that moment.

use crate::memory::AlignedWords;
use core::sync::atomic::{AtomicU32, Ordering};
use nvme_spec::register::doorbell_bytes;

/// The doorbells of every queue: page-aligned words, 4 << DSTRD bytes apart.
pub struct Doorbells {
    words: AlignedWords,
    queues: u16,
    dstrd: u8,
}

impl Doorbells {
    /// Makes the doorbells of queues 0 to `highest_qid`.
    pub(crate) fn new(highest_qid: u16, dstrd: u8) -> Self {
        let words = AlignedWords::on_heap(doorbell_bytes(highest_qid, dstrd) as usize);
        Self::of(words, highest_qid, dstrd)
    }

    /// Makes doorbells in a memfd, which other processes can map.
    #[cfg(all(feature = "std", target_os = "linux"))]
    pub(crate) fn shared(highest_qid: u16, dstrd: u8) -> std::io::Result<Self> {
        let bytes = doorbell_bytes(highest_qid, dstrd) as usize;
        let lead = nvme_spec::register::offset::DOORBELLS as usize;
        let words = AlignedWords::shared("nvme-doorbells", lead, bytes)?;
        Ok(Self::of(words, highest_qid, dstrd))
    }

    fn of(words: AlignedWords, highest_qid: u16, dstrd: u8) -> Self {
        Self {
            words,
            queues: highest_qid.saturating_add(1),
            dstrd,
        }
    }

    /// Returns the memfd of shared doorbells; its offsets are those of BAR0.
    #[cfg(all(feature = "std", target_os = "linux"))]
    pub(crate) fn fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.words.fd()
    }

    /// Returns the start of the page-aligned block: BAR0 offset 1000h.
    pub fn as_ptr(&self) -> *const AtomicU32 {
        self.words.as_ptr()
    }

    /// Returns the length of the block in bytes, a multiple of 4096.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.words)
    }

    /// Returns CAP.DSTRD.
    pub fn dstrd(&self) -> u8 {
        self.dstrd
    }

    /// Returns the word at byte `offset` from the start of the block, or `None` outside the block
    /// and between words.
    pub fn word(&self, offset: usize) -> Option<&AtomicU32> {
        if !offset.is_multiple_of(4) {
            return None;
        }
        self.words.get(offset / 4)
    }

    /// Returns the queue of an offset from the start of the block, and true for its completion
    /// queue head.
    pub(crate) fn decode(&self, offset: usize) -> Option<(u16, bool)> {
        let stride = 4usize << self.dstrd;
        let index = offset / stride;
        let known = offset.is_multiple_of(stride) && index / 2 < usize::from(self.queues);
        known.then_some(((index / 2) as u16, index % 2 == 1))
    }

    #[inline]
    fn at(&self, index: usize) -> &AtomicU32 {
        &self.words[index << self.dstrd]
    }

    /// Returns the submission queue tail doorbell of `qid`.
    #[inline]
    pub fn sq_tail(&self, qid: u16) -> &AtomicU32 {
        self.at(2 * usize::from(qid))
    }

    /// Returns the completion queue head doorbell of `qid`.
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
    use alloc::vec::Vec;

    #[test]
    fn words_lie_at_the_stride_and_nowhere_else() {
        for dstrd in [0, 1, 4, 10] {
            let doorbells = Doorbells::new(3, dstrd);
            assert!(doorbells.as_ptr().addr().is_multiple_of(64 << 10));
            assert!(core::ptr::eq(doorbells.as_ptr(), doorbells.sq_tail(0)));
            let bytes = (8usize * (4 << dstrd)).next_multiple_of(4096);
            assert_eq!((doorbells.dstrd(), doorbells.bytes()), (dstrd, bytes));
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

    /// A GPU's driver registers whole pages of the machine, and each once.
    #[test]
    fn no_two_blocks_share_a_page_of_64_kib() {
        let all: Vec<_> = (0..8).map(|_| Doorbells::new(3, 0)).collect();
        let mut pages: Vec<_> = all.iter().map(|one| one.as_ptr().addr() >> 16).collect();
        pages.sort_unstable();
        pages.dedup();
        assert_eq!(pages.len(), all.len());
    }

    /// A process that maps the memfd finds each doorbell at its offset in BAR0.
    #[cfg(all(feature = "std", target_os = "linux"))]
    #[test]
    fn shared_doorbells_lie_in_a_file_as_in_the_bar() {
        use nvme_spec::register::{cq_head_doorbell, sq_tail_doorbell};
        use std::os::unix::fs::FileExt;
        assert!(Doorbells::new(3, 1).fd().is_none());
        let doorbells = Doorbells::shared(3, 1).unwrap();
        let file = std::fs::File::from(doorbells.fd().unwrap().try_clone_to_owned().unwrap());
        doorbells.sq_tail(2).store(0x1234_5678, Ordering::Relaxed);
        doorbells.cq_head(3).store(0x9ABC_DEF0, Ordering::Relaxed);
        let word = |at: u32| {
            let mut bytes = [0; 4];
            file.read_exact_at(&mut bytes, u64::from(at)).unwrap();
            u32::from_le_bytes(bytes)
        };
        assert_eq!(word(sq_tail_doorbell(2, 1)), 0x1234_5678);
        assert_eq!(word(cq_head_doorbell(3, 1)), 0x9ABC_DEF0);
    }
}
