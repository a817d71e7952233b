//! DMA memory as slices of atomics, and doorbells.
//!
//! The controller may change this memory at any time; atomics permit that and plain references do not.
//! Invariant: the driver never reads back what it wrote, and decides on a completion by its upper word alone
//! (one single-copy-atomic load).
//!
//! Raw pointers enter the core here, in [`handoff`](crate::handoff) and in
//! [`RegisterBlock`](crate::RegisterBlock), and nowhere else.
// UNSAFETY: DMA memory and BARs arrive as raw pointers; the constructors here turn them into atomics.
#![allow(unsafe_code)]

use crate::spec::completion::phase_of;
use crate::spec::{Cqe, Iova, Sqe};
use crate::sync::{AtomicU32, AtomicU64, Order, Scope, fence};

/// One submission queue entry in DMA memory.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct SqCell([AtomicU64; 8]);

/// One completion queue entry in DMA memory.
#[derive(Debug, Default)]
#[repr(C, align(16))]
pub struct CqCell([AtomicU64; 2]);

#[cfg(not(loom))]
const _: () = assert!(size_of::<SqCell>() == 64 && size_of::<CqCell>() == 16);

impl SqCell {
    /// Loads the entry as a controller would fetch it; for controllers that are simulated in tests.
    pub fn load(&self) -> Sqe {
        Sqe::from_words(core::array::from_fn(|word| {
            self.0[word].load_settled(Scope::Sys)
        }))
    }
}

impl CqCell {
    /// Posts an entry as a controller does: dwords 0-1 first, the phase tag last.
    pub fn post(&self, cqe: Cqe) {
        let [lower, upper] = cqe.to_words();
        self.0[0].store(lower, Order::Relaxed, Scope::Sys);
        // Release: pairs with the acquire fence in `CqRing::read`. A driver that sees the phase tag also sees
        // the lower half of the entry and the data that the command moved.
        self.0[1].store(upper, Order::Release, Scope::Sys);
    }
}

/// A submission ring: memory that the driver writes and the controller fetches.
#[derive(Clone, Copy, Debug)]
pub struct SqRing<'a> {
    cells: &'a [SqCell],
    iova: Iova,
}

impl<'a> SqRing<'a> {
    /// Makes a ring over `cells` that the controller reaches at `iova`. 2 to 65,536 entries.
    pub fn new(cells: &'a [SqCell], iova: Iova) -> Self {
        assert!(
            (2..=65_536).contains(&cells.len()),
            "a ring has 2 to 65,536 entries"
        );
        Self { cells, iova }
    }

    /// Makes a ring over raw DMA memory.
    ///
    /// # Safety
    /// `start` is 64-byte aligned and valid for reads and writes of `entries` * 64 bytes for all of
    /// `'a`; nothing on this side accesses that memory other than through atomics.
    pub unsafe fn from_raw(start: *mut u8, entries: u32, iova: Iova) -> Self {
        // SAFETY: the caller vouches for the range and for access through atomics alone; the cells
        // are atomics, so a device may change them. A plain reference would be undefined behaviour
        // at the first such change.
        let cells =
            unsafe { core::slice::from_raw_parts(start.cast::<SqCell>(), entries as usize) };
        Self::new(cells, iova)
    }

    /// Returns the number of entries in the ring.
    #[inline]
    pub fn entries(&self) -> u32 {
        self.cells.len() as u32
    }

    /// Returns the I/O address of the ring.
    pub fn iova(&self) -> Iova {
        self.iova
    }

    /// Stores an entry as eight words. The controller does not look at it before the doorbell rings.
    #[inline]
    pub fn write(&self, index: u32, sqe: Sqe) {
        let Some(cell) = self.cells.get(index as usize) else {
            return;
        };
        let words = sqe.to_words();
        // Indexed rather than zipped: the GPU's compiler unrolls this form and keeps the words in
        // registers instead of on a stack. A stack would cost every thread of a kernel local
        // memory.
        for (index, to) in cell.0.iter().enumerate() {
            to.store(words[index], Order::Relaxed, Scope::Sys);
        }
    }

    /// Stores one of the eight words of an entry, so that eight lanes can write it together. For rings whose
    /// number of entries is a power of two: `index` is taken modulo that number.
    #[inline(always)]
    pub fn write_word(&self, index: u32, word: u32, value: u64) {
        let last = (self.cells.len() - 1) as u32;
        // SAFETY: the mask is the length minus one, so the masked index is below the length; every
        // constructor refuses an empty ring. A checked index would keep a panic path in every
        // kernel.
        let cell = unsafe { self.cells.get_unchecked((index & last) as usize) };
        if let Some(to) = cell.0.get(word as usize) {
            to.store(value, Order::Relaxed, Scope::Sys);
        }
    }
}

/// A completion ring: memory that the controller writes.
#[derive(Clone, Copy, Debug)]
pub struct CqRing<'a> {
    cells: &'a [CqCell],
    iova: Iova,
}

impl<'a> CqRing<'a> {
    /// Makes a ring over `cells` that the controller reaches at `iova`. 2 to 65,536 entries.
    pub fn new(cells: &'a [CqCell], iova: Iova) -> Self {
        assert!(
            (2..=65_536).contains(&cells.len()),
            "a ring has 2 to 65,536 entries"
        );
        Self { cells, iova }
    }

    /// Makes a ring over raw DMA memory.
    ///
    /// # Safety
    /// `start` is 16-byte aligned and valid for reads and writes of `entries` * 16 bytes for all of
    /// `'a`; nothing on this side accesses that memory other than through atomics.
    pub unsafe fn from_raw(start: *mut u8, entries: u32, iova: Iova) -> Self {
        // SAFETY: the caller vouches for the range and for access through atomics alone; the cells
        // are atomics, so a device may change them. A plain reference would be undefined behaviour
        // at the first such change.
        let cells =
            unsafe { core::slice::from_raw_parts(start.cast::<CqCell>(), entries as usize) };
        Self::new(cells, iova)
    }

    /// Returns the number of entries in the ring.
    #[inline]
    pub fn entries(&self) -> u32 {
        self.cells.len() as u32
    }

    /// Returns the I/O address of the ring.
    pub fn iova(&self) -> Iova {
        self.iova
    }

    /// Sets every entry to zero, so that no phase tag matches on the first pass.
    ///
    /// Only while the controller does not use the ring: before it is enabled or the queue created.
    pub fn zero(&self) {
        for cell in self.cells {
            cell.0[0].store(0, Order::Relaxed, Scope::Sys);
            cell.0[1].store(0, Order::Relaxed, Scope::Sys);
        }
    }

    /// Reads the entry at `index`; `None` unless its phase tag is `phase`.
    #[inline]
    pub fn read(&self, index: u32, phase: bool) -> Option<Cqe> {
        let cell = self.cells.get(index as usize)?;
        let upper = cell.0[1].load(Order::Relaxed, Scope::Sys);
        if phase_of(upper) != phase {
            return None;
        }
        // Acquire: pairs with the controller's write of the phase tag, which is the last word that it writes.
        // Dwords 0-1, and the data that the command moved, are visible after the fence; without it the
        // processor could have loaded them before the tag.
        fence(Order::Acquire, Scope::Sys);
        let lower = cell.0[0].load_settled(Scope::Sys);
        Some(Cqe::from_words(lower, upper))
    }

    /// Returns the entry at `index` modulo the number of entries, a power of two. The masked index needs no
    /// branch, so a GPU keeps several reads in flight at once.
    #[inline(always)]
    fn cell(&self, index: u32) -> &'a CqCell {
        let last = (self.cells.len() - 1) as u32;
        // SAFETY: the mask is the length minus one, so the masked index is below the length; every
        // constructor refuses an empty ring. A checked index would keep a panic path in every
        // kernel.
        unsafe { self.cells.get_unchecked((index & last) as usize) }
    }

    /// Loads the upper word, phase tag included, of the entry at `index` modulo the number of entries, a
    /// power of two.
    ///
    /// Unless `order` is `Acquire`, the caller fences before it reads anything that the entry announces.
    #[inline(always)]
    pub fn upper(&self, index: u32, order: Order) -> u64 {
        self.cell(index).0[1].load(order, Scope::Sys)
    }

    /// Loads the lower word, dwords 0-1, of an entry whose upper word was loaded and fenced.
    #[inline(always)]
    pub fn lower(&self, index: u32) -> u64 {
        self.cell(index).0[0].load_settled(Scope::Sys)
    }
}

/// One doorbell register.
#[derive(Clone, Copy, Debug)]
pub struct DoorbellRegister<'a>(&'a AtomicU32);

impl<'a> DoorbellRegister<'a> {
    /// Makes a doorbell over a word of memory (a simulated controller, or a doorbell that the host relays).
    pub fn new(word: &'a AtomicU32) -> Self {
        Self(word)
    }

    /// Makes a doorbell over a register of a mapped BAR.
    ///
    /// # Safety
    /// `register` is 4-byte aligned and stays mapped, writable and a doorbell of this queue for `'a`.
    pub unsafe fn from_raw(register: *mut u32) -> Self {
        // SAFETY: the caller vouches for the pointer for `'a`; AtomicU32 has the layout of u32, and
        // only `store_mmio` touches it. No plain reference to the register exists, which the
        // compiler could read ahead of time.
        Self(unsafe { &*register.cast::<AtomicU32>() })
    }

    /// Publishes everything stored before to the controller and writes `value`.
    #[inline]
    pub fn ring(&self, value: u32) {
        // Release: pairs with the controller's fetch. Entries, lists and buffers written before the doorbell
        // must be in memory when the controller sees it; otherwise it could fetch an old entry.
        fence(Order::Release, Scope::Sys);
        self.ring_fenced(value);
    }

    /// Writes `value` after a system-scope release fence that this thread has already done.
    #[inline]
    pub fn ring_fenced(&self, value: u32) {
        self.0.store_mmio(value);
    }
}

/// DMA memory as 64-bit words: PRP lists, SGL segments, Identify pages.
#[derive(Clone, Copy, Debug)]
pub struct DmaWords<'a> {
    words: &'a [AtomicU64],
    iova: Iova,
}

impl<'a> DmaWords<'a> {
    /// Makes a view over `words` that the controller reaches at `iova`.
    pub fn new(words: &'a [AtomicU64], iova: Iova) -> Self {
        Self { words, iova }
    }

    /// Makes a view over raw DMA memory.
    ///
    /// # Safety
    /// `start` is 8-byte aligned and valid for reads and writes of `words` * 8 bytes for all of `'a`;
    /// nothing on this side accesses that memory other than through atomics.
    pub unsafe fn from_raw(start: *mut u8, words: usize, iova: Iova) -> Self {
        // SAFETY: the caller vouches for the range and for access through atomics alone; AtomicU64
        // has the layout of u64. The controller may change the words at any time, which atomics
        // allow.
        Self::new(
            unsafe { core::slice::from_raw_parts(start.cast::<AtomicU64>(), words) },
            iova,
        )
    }

    /// Returns the I/O address of the first word.
    #[inline]
    pub fn iova(&self) -> Iova {
        self.iova
    }

    /// Returns the number of words in the view.
    #[inline]
    pub fn len(&self) -> usize {
        self.words.len()
    }

    /// True if the view has no words.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Stores a word; an index past the end stores nothing.
    #[inline]
    pub fn set(&self, index: usize, value: u64) {
        if let Some(word) = self.words.get(index) {
            word.store(value, Order::Relaxed, Scope::Sys);
        }
    }

    /// Loads a word; 0 past the end.
    #[inline]
    pub fn get(&self, index: usize) -> u64 {
        self.words
            .get(index)
            .map_or(0, |word| word.load(Order::Relaxed, Scope::Sys))
    }

    /// Returns words `start..start + len`, or `None` when they reach past the end.
    #[inline]
    pub fn slice(&self, start: usize, len: usize) -> Option<DmaWords<'a>> {
        let words = self.words.get(start..start.checked_add(len)?)?;
        Some(Self {
            words,
            iova: self.iova.offset(start as u64 * 8),
        })
    }

    /// Returns the words of [`slice`](Self::slice), or none of them where that returns `None`. Every field is
    /// defined on every path, which saves registers in a kernel's loop.
    #[inline(always)]
    pub(crate) fn share(&self, start: usize, len: usize) -> DmaWords<'a> {
        let inside = start <= self.words.len() && len <= self.words.len() - start;
        let (start, len) = if inside { (start, len) } else { (0, 0) };
        Self {
            // SAFETY: `start + len` was checked against the length without overflow; otherwise both are 0.
            words: unsafe { self.words.get_unchecked(start..start + len) },
            iova: self.iova.offset(start as u64 * 8),
        }
    }

    /// Copies words into `bytes` until either ends.
    pub fn copy_to(&self, bytes: &mut [u8]) {
        for (chunk, word) in bytes.chunks_mut(8).zip(self.words) {
            let word = word.load(Order::Relaxed, Scope::Sys).to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

/// A power-of-two number of words, indexed modulo that number, so that no index needs a check,
/// which a kernel would pay for. The mask takes the place of the check: every masked index is
/// inside.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CyclicWords<'a> {
    words: &'a [AtomicU32],
    mask: u32,
}

impl<'a> CyclicWords<'a> {
    /// Number of words that a constant may index without a check: every view has at least this number.
    pub const NAMED: u32 = if cfg!(loom) { 32 } else { 128 };

    /// Makes a view of the first `count` words; `None` when there are fewer, or `count` is not a power of two
    /// of at least [`NAMED`](Self::NAMED).
    pub fn new(words: &'a [AtomicU32], count: u32) -> Option<Self> {
        let possible = count.is_power_of_two() && count >= Self::NAMED;
        Some(Self {
            words: words.get(..count as usize).filter(|_| possible)?,
            mask: count - 1,
        })
    }

    /// Returns word `index` modulo the count.
    #[inline(always)]
    pub fn at(&self, index: u32) -> &'a AtomicU32 {
        // SAFETY: `new` took `mask + 1` words, and the masked index is at most `mask`.
        unsafe { self.words.get_unchecked((index & self.mask) as usize) }
    }

    /// Returns word `INDEX`, below [`NAMED`](Self::NAMED).
    #[inline(always)]
    pub fn named<const INDEX: u32>(&self) -> &'a AtomicU32 {
        const { assert!(INDEX < Self::NAMED) };
        // SAFETY: `new` took at least `NAMED` words, and the constant assertion bounds `INDEX`.
        unsafe { self.words.get_unchecked(INDEX as usize) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_stored_as_its_own_bytes() {
        let cells: [SqCell; 2] = Default::default();
        let ring = SqRing::new(&cells, Iova(0x1000));
        let mut sqe = Sqe::new(0xAB, crate::spec::Nsid(7));
        sqe.cdw15 = 0xDEAD_BEEF;
        ring.write(1, sqe);
        assert_eq!(cells[1].load(), sqe);
        assert_eq!(cells[0].load(), Sqe::new(0, crate::spec::Nsid(0)));
        ring.write(2, sqe); // past the end: ignored
    }

    #[test]
    fn a_stale_phase_is_not_an_entry() {
        let cells: [CqCell; 2] = Default::default();
        let ring = CqRing::new(&cells, Iova(0));
        assert_eq!(ring.read(0, true), None);
        let cqe = Cqe {
            dw0: 1,
            dw1: 2,
            sqhd: 3,
            sqid: 4,
            cid: 5,
            phase_status: 1,
        };
        cells[0].post(cqe);
        assert_eq!(ring.read(0, true), Some(cqe));
        assert_eq!(ring.read(0, false), None);
        assert_eq!(ring.read(2, false), None);
        ring.zero();
        assert_eq!(ring.read(0, true), None);
    }

    #[test]
    fn a_ring_of_fewer_or_more_entries_than_a_queue_may_have_is_refused() {
        use std::{iter::repeat_with, panic::catch_unwind};
        let sq: Vec<_> = repeat_with(SqCell::default).take(65_537).collect();
        let cq: Vec<_> = repeat_with(CqCell::default).take(65_537).collect();
        for (entries, fits) in [
            (0, false),
            (1, false),
            (2, true),
            (65_536, true),
            (65_537, false),
        ] {
            let (sq, cq) = (&sq[..entries], &cq[..entries]);
            let sq = catch_unwind(|| SqRing::new(sq, Iova(0)).entries());
            let cq = catch_unwind(|| CqRing::new(cq, Iova(0)).entries());
            let expected = fits.then_some(entries as u32);
            assert_eq!((sq.ok(), cq.ok()), (expected, expected));
        }
    }

    #[test]
    fn a_zeroed_entry_has_no_old_bits() {
        let cells: [CqCell; 2] = Default::default();
        cells[1].post(Cqe::from_words(u64::MAX, u64::MAX));
        let ring = CqRing::new(&cells, Iova(0));
        ring.zero();
        assert_eq!(ring.read(1, false), Some(Cqe::from_words(0, 0)));
    }

    #[test]
    fn words_by_index_are_those_of_the_entry_modulo_the_ring() {
        let (sq, cq): ([SqCell; 4], [CqCell; 4]) = Default::default();
        let ring = SqRing::new(&sq, Iova(0));
        let words = [0, 1, 2, 3, 4, 5, 6, 7].map(|word| 0x0101 << word);
        for (word, value) in words.into_iter().enumerate() {
            ring.write_word(6, word as u32, value);
        }
        ring.write_word(6, 8, 1); // no such word: ignored
        assert_eq!(sq[2].load(), Sqe::from_words(words));
        assert_eq!(sq[3].load(), Sqe::ZERO);

        cq[2].post(Cqe::from_words(0x55, 0xAA));
        let ring = CqRing::new(&cq, Iova(0));
        assert_eq!((ring.lower(6), ring.upper(6, Order::Acquire)), (0x55, 0xAA));
        assert_eq!((ring.lower(5), ring.upper(7, Order::Acquire)), (0, 0));
    }

    #[test]
    fn a_share_past_the_end_is_empty() {
        let words: [AtomicU64; 4] = Default::default();
        let view = DmaWords::new(&words, Iova(0x100));
        let inside = view.share(2, 2);
        assert_eq!((inside.len(), inside.iova()), (2, Iova(0x110)));
        for (start, len) in [
            (2, 3),
            (4, 1),
            (5, 0),
            (0, 5),
            (usize::MAX, 2),
            (2, usize::MAX),
        ] {
            assert!(view.share(start, len).is_empty(), "{start}, {len}");
        }
    }

    #[test]
    fn cyclic_words_are_a_power_of_two_that_constants_fit_into() {
        const NAMED: u32 = CyclicWords::NAMED;
        let words: [AtomicU32; NAMED as usize * 2] = core::array::from_fn(|_| AtomicU32::new(0));
        let whole = [NAMED / 2, NAMED, NAMED * 3 / 2, NAMED * 2, NAMED * 4]
            .map(|count| CyclicWords::new(&words, count).is_some());
        assert_eq!(whole, [false, true, false, true, false]);
    }

    #[test]
    fn words_are_bounds_checked() {
        let words: [AtomicU64; 4] = Default::default();
        let view = DmaWords::new(&words, Iova(0x100));
        view.set(3, 0x0807_0605_0403_0201);
        view.set(4, 1);
        assert_eq!(view.get(4), 0);
        let tail = view.slice(3, 1).unwrap();
        assert_eq!(tail.iova(), Iova(0x118));
        let mut bytes = [0; 5];
        tail.copy_to(&mut bytes);
        assert_eq!(bytes, [1, 2, 3, 4, 5]);
        assert!(view.slice(3, 2).is_none());
        assert!(view.slice(usize::MAX, 2).is_none());
    }
}
