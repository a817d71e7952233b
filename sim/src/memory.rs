//! Memory that the driver shares with the controller, and the lock around controller state.
//!
//! A [`Span`] is touched by single-copy-atomic words or by one opaque copy, never through a
//! reference to plain data: the driver may write it at any moment, and all that it can achieve is
//! torn bytes in its own command. Nothing is reached that the map does not hold.
// UNSAFETY: the driver's memory is raw addresses; Span keeps every access inside one of them. Lock
// needs UnsafeCell, because the crate is no_std and has no other lock.
#![allow(unsafe_code)]

use core::cell::{Cell, UnsafeCell};
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

/// The controller tried to reach memory that is not mapped. The address is the first one missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaFault(pub u64);

/// A stretch of shared bytes.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    ptr: *mut u8,
    len: usize,
    life: PhantomData<&'a [AtomicU8]>,
}

impl<'a> Span<'a> {
    /// The bytes of `words`.
    pub fn of_words(words: &'a [AtomicU64]) -> Self {
        Self {
            ptr: words.as_ptr().cast_mut().cast(),
            len: size_of_val(words),
            life: PhantomData,
        }
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// `len` bytes from `offset` on, or `None` past the end.
    #[inline]
    pub fn slice(self, offset: usize, len: usize) -> Option<Self> {
        if offset > self.len || len > self.len - offset {
            return None;
        }
        // SAFETY: offset <= self.len, so the result stays inside the allocation.
        let ptr = unsafe { self.ptr.add(offset) };
        Some(Self {
            ptr,
            len,
            life: PhantomData,
        })
    }

    /// The aligned word at `offset`, or `None` when it is not wholly inside or not aligned.
    #[inline]
    pub fn word(&self, offset: usize) -> Option<&'a AtomicU64> {
        if self.len < 8 || offset > self.len - 8 {
            return None;
        }
        // SAFETY: offset + 8 <= self.len, checked above.
        let ptr = unsafe { self.ptr.add(offset) }.cast::<AtomicU64>();
        if !ptr.is_aligned() {
            return None;
        }
        // SAFETY: inside the span for 'a, aligned, and an atomic may be written by others.
        Some(unsafe { &*ptr })
    }

    /// `N` words from `offset` on as relaxed loads, under the same conditions as [`word`](Self::word).
    #[inline]
    pub fn words<const N: usize>(&self, offset: usize) -> Option<[u64; N]> {
        let part = self.slice(offset, N * 8)?;
        let first = part.ptr.cast::<AtomicU64>();
        if !first.is_aligned() {
            return None;
        }
        let mut out = [0; N];
        for (i, word) in out.iter_mut().enumerate() {
            // SAFETY: i < N and the part holds N aligned words; they are only used as atomics.
            *word = unsafe { &*first.add(i) }.load(Ordering::Relaxed);
        }
        Some(out)
    }

    /// The span as words, or `None` when it is not aligned. A rest below one word is left out.
    #[inline]
    pub fn as_words(&self) -> Option<&'a [AtomicU64]> {
        let first = self.ptr.cast::<AtomicU64>();
        if !first.is_aligned() {
            return None;
        }
        // SAFETY: that many aligned words lie in the span for 'a; atomics may be written by others.
        Some(unsafe { core::slice::from_raw_parts(first, self.len / 8) })
    }

    /// Copies to `to`, as many bytes as both hold. The two may be the same memory but not overlap
    /// in part; then, as on a real bus, the bytes are unspecified.
    #[inline]
    pub fn copy_to(self, to: Span<'_>) {
        // SAFETY: both spans hold that many bytes.
        unsafe { copy(self.ptr, to.ptr, self.len.min(to.len)) }
    }

    /// Copies into private memory, as many bytes as both hold.
    #[inline]
    pub fn read(self, into: &mut [u8]) {
        // SAFETY: both hold that many bytes; `into` is exclusive.
        unsafe { copy(self.ptr, into.as_mut_ptr(), self.len.min(into.len())) }
    }

    /// Copies out of private memory, as many bytes as both hold.
    #[inline]
    pub fn write(self, from: &[u8]) {
        // SAFETY: both hold that many bytes; the copy does not write to `from`.
        unsafe { copy(from.as_ptr().cast_mut(), self.ptr, self.len.min(from.len())) }
    }

    /// Sets every byte to zero.
    pub fn zero(self) {
        static ZEROES: [u8; 4096] = [0; 4096];
        let mut done = 0;
        while let Some(rest) = self
            .slice(done, self.len - done)
            .filter(|rest| !rest.is_empty())
        {
            rest.write(&ZEROES);
            done += rest.len.min(ZEROES.len());
        }
    }
}

// SAFETY: a span is an address range whose every access is atomic or an opaque copy.
unsafe impl Send for Span<'_> {}
// SAFETY: as above.
unsafe impl Sync for Span<'_> {}

/// # Safety
/// `from` is readable and `to` is writable for `len` bytes.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn copy(from: *mut u8, to: *mut u8, len: usize) {
    // One string move: as fast as memcpy for blocks, and opaque to the compiler, so that a driver
    // that writes the same bytes meanwhile causes torn data and nothing worse.
    // SAFETY: the caller's ranges; the direction flag is clear by the ABI.
    unsafe {
        core::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
}

/// # Safety
/// `from` is readable and `to` is writable for `len` bytes.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy(from: *mut u8, to: *mut u8, len: usize) {
    let mut done = 0;
    if (from as usize | to as usize).is_multiple_of(8) {
        while len - done >= 8 {
            // SAFETY: done + 8 <= len and both pointers are aligned; words are used as atomics.
            let (word, out) = unsafe {
                (
                    &*from.add(done).cast::<AtomicU64>(),
                    &*to.add(done).cast::<AtomicU64>(),
                )
            };
            out.store(word.load(Ordering::Relaxed), Ordering::Relaxed);
            done += 8;
        }
    }
    while done < len {
        // SAFETY: done < len; bytes are used as atomics.
        let (byte, out) = unsafe {
            (
                &*from.add(done).cast::<AtomicU8>(),
                &*to.add(done).cast::<AtomicU8>(),
            )
        };
        out.store(byte.load(Ordering::Relaxed), Ordering::Relaxed);
        done += 1;
    }
}

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
        }
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

/// A spin lock: held for one batch of commands or one register access.
#[derive(Debug, Default)]
pub(crate) struct Lock<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by one guard at a time.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub const fn new(value: T) -> Self {
        Self {
            held: AtomicBool::new(false),
            value: UnsafeCell::new(value),
        }
    }

    /// Waits for the lock.
    #[inline]
    pub fn lock(&self) -> Held<'_, T> {
        let mut tries = 0u32;
        loop {
            if let Some(held) = self.try_lock() {
                return held;
            }
            tries += 1;
            relax(tries);
        }
    }

    /// The lock, unless someone holds it.
    #[inline]
    pub fn try_lock(&self) -> Option<Held<'_, T>> {
        // Acquire: pairs with the Release in Held::drop.
        let free = !self.held.load(Ordering::Relaxed) && !self.held.swap(true, Ordering::Acquire);
        free.then_some(Held { lock: self })
    }
}

/// Lets others run: a pause at first, later the scheduler where there is one.
pub(crate) fn relax(tries: u32) {
    #[cfg(feature = "std")]
    if tries > 64 {
        std::thread::yield_now();
        return;
    }
    let _ = tries;
    core::hint::spin_loop();
}

/// The lock is held while this lives.
pub(crate) struct Held<'a, T> {
    lock: &'a Lock<T>,
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard is the only one.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Held<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // Release: pairs with the Acquire in try_lock.
        self.lock.held.store(false, Ordering::Release);
    }
}

/// Gives the space of a range of `file` back; `false` when the file system cannot.
#[cfg(all(feature = "std", target_os = "linux"))]
pub(crate) fn punch_hole(file: &std::fs::File, offset: u64, len: u64) -> bool {
    use std::os::fd::AsRawFd;
    let (Ok(offset), Ok(len)) = (libc::off_t::try_from(offset), libc::off_t::try_from(len)) else {
        return false;
    };
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: no pointers are passed, and the descriptor is open.
    unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, len) == 0 }
}

#[cfg(feature = "std")]
pub use host::{HostMemory, MapError};

#[cfg(feature = "std")]
mod host {
    use super::{DmaGuard, DmaMemory, PhantomData, Region, Span, relax};
    use std::boxed::Box;
    use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};
    use std::vec::Vec;

    /// Readers that can be in a batch at the same time; more wait.
    const READERS: usize = 64;

    /// Memory of this process as DMA memory: a table of address ranges.
    ///
    /// Clones share the table. Lookups take no lock; `map` and `unmap` replace the table and wait
    /// until no batch uses the old one, so that unmapped memory may be freed at once.
    #[derive(Clone, Default)]
    pub struct HostMemory(Arc<Inner>);

    #[derive(Clone)]
    struct Mapping {
        start: u64,
        /// First address after the mapping.
        end: u64,
        ptr: *mut u8,
        /// Keeps shared words alive.
        _owner: Option<Arc<[AtomicU64]>>,
    }

    struct Inner {
        /// Sorted by address, without overlaps. Always from Box::into_raw.
        table: AtomicPtr<Vec<Mapping>>,
        readers: [Reader; READERS],
        writer: Mutex<()>,
    }

    /// Odd while a batch is in progress. Padded against false sharing.
    #[derive(Default)]
    #[repr(align(128))]
    struct Reader(AtomicU64);

    // SAFETY: the pointers in the table are promised by `map` to be usable from any thread.
    unsafe impl Send for Inner {}
    // SAFETY: as above.
    unsafe impl Sync for Inner {}

    impl Default for Inner {
        fn default() -> Self {
            Self {
                table: AtomicPtr::new(Box::into_raw(Box::default())),
                readers: std::array::from_fn(|_| Reader::default()),
                writer: Mutex::new(()),
            }
        }
    }

    impl Drop for Inner {
        fn drop(&mut self) {
            // SAFETY: the pointer is from Box::into_raw and nobody else holds it.
            drop(unsafe { Box::from_raw(*self.table.get_mut()) });
        }
    }

    /// Why a range was not mapped.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum MapError {
        /// Length 0, or the range leaves the address space.
        BadRange,
        /// The address and the pointer differ modulo 8: words would not be aligned.
        Misaligned,
        /// Part of the range is mapped already: unmap it first.
        Overlap,
    }

    impl core::fmt::Display for MapError {
        fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
            f.write_str(match self {
                Self::BadRange => "the range is empty or leaves the address space",
                Self::Misaligned => "address and pointer differ modulo 8",
                Self::Overlap => "part of the range is already mapped",
            })
        }
    }

    impl core::error::Error for MapError {}

    impl HostMemory {
        /// An empty table.
        pub fn new() -> Self {
            Self::default()
        }

        /// Lets the controller reach `len` bytes at `ptr` through the addresses from `iova` on.
        ///
        /// # Safety
        /// The bytes stay readable and writable, from any thread, until they are unmapped or the
        /// last clone is dropped; whoever else uses them meanwhile does so through atomics, raw
        /// pointers, or while no command is in flight for them.
        pub unsafe fn map(&self, iova: u64, ptr: *mut u8, len: u64) -> Result<(), MapError> {
            self.insert(iova, ptr, len, None)
        }

        /// Lets the controller reach `words` through the addresses from `iova` on, and keeps them
        /// alive while it can.
        pub fn share(&self, iova: u64, words: Arc<[AtomicU64]>) -> Result<(), MapError> {
            let ptr = words.as_ptr().cast_mut().cast();
            self.insert(iova, ptr, size_of_val(&*words) as u64, Some(words))
        }

        fn insert(
            &self,
            iova: u64,
            ptr: *mut u8,
            len: u64,
            _owner: Option<Arc<[AtomicU64]>>,
        ) -> Result<(), MapError> {
            let end = iova
                .checked_add(len)
                .filter(|_| len != 0)
                .ok_or(MapError::BadRange)?;
            if (ptr as u64 ^ iova) & 7 != 0 {
                return Err(MapError::Misaligned);
            }
            self.replace(|table| {
                let at = table.partition_point(|mapping| mapping.start < iova);
                let before = at.checked_sub(1).map(|i| table[i].end);
                if before.is_some_and(|before| before > iova)
                    || table.get(at).is_some_and(|mapping| mapping.start < end)
                {
                    return Err(MapError::Overlap);
                }
                table.insert(
                    at,
                    Mapping {
                        start: iova,
                        end,
                        ptr,
                        _owner,
                    },
                );
                Ok(())
            })
        }

        /// Takes back everything that was mapped inside the `len` bytes from `iova` on, waits for
        /// accesses in progress, and says how many ranges went. A range that is only partly inside
        /// stays.
        pub fn unmap(&self, iova: u64, len: u64) -> usize {
            let end = iova.saturating_add(len);
            self.replace(|table| {
                let before = table.len();
                table.retain(|mapping| mapping.start < iova || mapping.end > end);
                before - table.len()
            })
        }

        fn replace<R>(&self, change: impl FnOnce(&mut Vec<Mapping>) -> R) -> R {
            let inner = &*self.0;
            let _writer = inner
                .writer
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner());
            let old = inner.table.load(Ordering::Relaxed);
            // SAFETY: only a writer frees tables, and we are the writer.
            let mut table = unsafe { &*old }.clone();
            let result = change(&mut table);
            // SeqCst: in one order with the readers' entry, so that a reader is either seen below
            // or sees the new table.
            inner
                .table
                .store(Box::into_raw(Box::new(table)), Ordering::SeqCst);
            for reader in &inner.readers {
                let seen = reader.0.load(Ordering::SeqCst);
                let mut tries = 0;
                // Acquire: pairs with the Release that ends a batch.
                while seen % 2 == 1 && reader.0.load(Ordering::Acquire) == seen {
                    tries += 1;
                    relax(tries);
                }
            }
            // SAFETY: from Box::into_raw, unpublished, and every reader that saw it has left.
            drop(unsafe { Box::from_raw(old) });
            result
        }
    }

    /// A batch in progress on [`HostMemory`].
    pub struct HostGuard<'a> {
        table: &'a [Mapping],
        reader: &'a Reader,
    }

    impl DmaMemory for HostMemory {
        type Guard<'a> = HostGuard<'a>;

        fn guard(&self) -> HostGuard<'_> {
            static NEXT: AtomicUsize = AtomicUsize::new(0);
            std::thread_local! {
                static HOME: usize = NEXT.fetch_add(1, Ordering::Relaxed);
            }
            let home = HOME.with(|home| *home);
            let mut tries = 0;
            loop {
                let reader = &self.0.readers[(home + tries) % READERS];
                let seen = reader.0.load(Ordering::Relaxed);
                // SeqCst: pairs with the writer, see `replace`.
                if seen % 2 == 0
                    && reader
                        .0
                        .compare_exchange(seen, seen + 1, Ordering::SeqCst, Ordering::Relaxed)
                        .is_ok()
                {
                    let table = self.0.table.load(Ordering::SeqCst);
                    // SAFETY: the table is not freed while our reader count is odd.
                    let table = unsafe { &*table };
                    return HostGuard { table, reader };
                }
                tries += 1;
                if tries.is_multiple_of(READERS) {
                    relax(tries as u32);
                }
            }
        }
    }

    impl DmaGuard for HostGuard<'_> {
        fn lookup(&self, iova: u64) -> Option<Region<'_>> {
            let at = self.table.partition_point(|mapping| mapping.start <= iova);
            let mapping = self.table.get(at.checked_sub(1)?)?;
            if iova >= mapping.end {
                return None;
            }
            let len = usize::try_from(mapping.end - mapping.start).ok()?;
            let span = Span {
                ptr: mapping.ptr,
                len,
                life: PhantomData,
            };
            Some(Region {
                start: mapping.start,
                span,
            })
        }
    }

    impl Drop for HostGuard<'_> {
        fn drop(&mut self) {
            // Release: pairs with the Acquire in `replace`: our accesses are over before the memory
            // may be freed.
            let seen = self.reader.0.load(Ordering::Relaxed);
            self.reader.0.store(seen.wrapping_add(1), Ordering::Release);
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use crate::memory::Dma;

        #[test]
        fn unmapped_addresses_fault_and_overlaps_are_refused() {
            let mut page = vec![0u64; 512];
            let memory = HostMemory::new();
            let ptr = page.as_mut_ptr().cast::<u8>();
            // SAFETY: `page` outlives `memory`.
            let map = |iova, len| unsafe { memory.map(iova, ptr, len) };
            assert_eq!(map(0x1000, 4096), Ok(()));
            assert_eq!(map(0x1FF8, 16), Err(MapError::Overlap));
            assert_eq!(map(0x0FF8, 16), Err(MapError::Overlap));
            assert_eq!(map(u64::MAX - 7, 16), Err(MapError::BadRange));
            assert_eq!(map(0x3001, 16), Err(MapError::Misaligned));
            {
                let guard = memory.guard();
                let dma = Dma::new(&guard);
                assert!(dma.write(0x1FFC, &[1, 2, 3, 4]).is_ok());
                assert_eq!(dma.write(0x1FFC, &[0; 8]).map_err(|e| e.0), Err(0x2000));
                assert_eq!(dma.check(0xFFF, 1).map_err(|e| e.0), Err(0xFFF));
            }
            assert_eq!(memory.unmap(0x1000, 4095), 0);
            assert_eq!(memory.unmap(0x1000, 4096), 1);
            assert!(Dma::new(&memory.guard()).check(0x1000, 1).is_err());
        }

        #[test]
        fn unmap_waits_for_the_batch_in_progress() {
            let mut page = vec![7u64; 512];
            let memory = HostMemory::new();
            // SAFETY: `page` outlives `memory`.
            unsafe { memory.map(0, page.as_mut_ptr().cast(), 4096) }.unwrap();
            let gone = std::sync::atomic::AtomicBool::new(false);
            std::thread::scope(|scope| {
                let guard = memory.guard();
                scope.spawn(|| {
                    assert_eq!(memory.unmap(0, 4096), 1);
                    gone.store(true, Ordering::Release);
                });
                std::thread::sleep(std::time::Duration::from_millis(20));
                assert!(!gone.load(Ordering::Acquire));
                assert_eq!(Dma::new(&guard).words::<1>(8), Ok([7]));
                drop(guard);
            });
            assert!(gone.load(Ordering::Acquire));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_never_reaches_past_its_end() {
        let words: [AtomicU64; 4] = core::array::from_fn(|i| AtomicU64::new(i as u64));
        let span = Span::of_words(&words);
        assert_eq!(span.words::<4>(0), Some([0, 1, 2, 3]));
        assert_eq!(span.words::<4>(8), None);
        assert_eq!(span.words::<1>(4), None);
        assert!(span.word(24).is_some() && span.word(25).is_none() && span.word(32).is_none());
        assert!(span.slice(33, 0).is_none() && span.slice(8, usize::MAX).is_none());
    }

    #[test]
    fn copies_of_any_alignment_move_exactly_their_bytes() {
        let words: [AtomicU64; 8] = core::array::from_fn(|_| AtomicU64::new(u64::MAX));
        let span = Span::of_words(&words);
        for (offset, len) in [(0, 64), (3, 5), (1, 0), (9, 17), (63, 1)] {
            span.write(&[0xFF; 64]);
            span.slice(offset, len).unwrap().zero();
            let mut bytes = [0; 64];
            span.read(&mut bytes);
            for (i, byte) in bytes.iter().enumerate() {
                assert_eq!(
                    *byte == 0,
                    (offset..offset + len).contains(&i),
                    "{offset} {len} {i}"
                );
            }
        }
    }
}
