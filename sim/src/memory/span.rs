//! A range of memory that others may write at the same time, and the only code that accesses it: as
//! atomic words, by an opaque copy, or by the owner's copy engine.

use alloc::vec::Vec;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Memory that loads and stores do not reach, such as a GPU's. Its owner copies, and there is no
/// other access, so rings and lists cannot lie in it.
///
/// A copy that fails is remembered: see [`is_lost`](Self::is_lost).
pub trait PeerAccess: Send + Sync + core::fmt::Debug {
    /// Copies `len` bytes from `from` to `address`. Returns when the bytes have arrived.
    ///
    /// # Safety
    /// `from` is readable for `len` bytes; `address` and the bytes from there on were mapped.
    unsafe fn write(&self, address: u64, from: *const u8, len: usize);

    /// Carries out `copies`, in any order. Returns when all bytes have arrived.
    ///
    /// # Safety
    /// The conditions of [`write`](Self::write), for each copy.
    unsafe fn write_all(&self, copies: &[PeerCopy]) {
        for copy in copies {
            // SAFETY: the caller's ranges.
            unsafe { self.write(copy.address, copy.from, copy.len) };
        }
    }

    /// Copies `len` bytes from `address` to `into`. Returns when the bytes have arrived.
    ///
    /// # Safety
    /// `into` is writable for `len` bytes; `address` and the bytes from there on were mapped.
    unsafe fn read(&self, address: u64, into: *mut u8, len: usize);

    /// True if a copy has failed. Then the contents of the whole memory are unknown.
    fn is_lost(&self) -> bool;
}

/// A copy into the memory of a [`PeerAccess`].
#[derive(Clone, Copy, Debug)]
pub struct PeerCopy {
    /// Destination.
    pub address: u64,
    /// Source.
    pub from: *const u8,
    /// Length in bytes.
    pub len: usize,
}

/// A range of bytes that others may read and write.
#[derive(Clone, Copy, Debug)]
pub struct MemorySpan<'a> {
    /// Address in this process, or an address of `peer`.
    ptr: *mut u8,
    len: usize,
    peer: Option<&'a dyn PeerAccess>,
    life: PhantomData<&'a [AtomicU8]>,
}

impl<'a> MemorySpan<'a> {
    /// Returns the bytes of `words`.
    pub fn of_words(words: &'a [AtomicU64]) -> Self {
        Self {
            ptr: words.as_ptr().cast_mut().cast(),
            len: size_of_val(words),
            peer: None,
            life: PhantomData,
        }
    }

    /// Returns `len` bytes of `peer` from its address `address` on.
    #[cfg(feature = "std")]
    pub(super) fn of_peer(peer: &'a dyn PeerAccess, address: u64, len: usize) -> Self {
        Self {
            ptr: core::ptr::without_provenance_mut(address as usize),
            len,
            peer: Some(peer),
            life: PhantomData,
        }
    }

    /// Returns `len` bytes at `ptr`.
    ///
    /// # Safety
    /// They are readable and writable for 'a. All other uses of them meanwhile are through atomics
    /// or raw pointers, or tolerate torn bytes.
    pub unsafe fn from_raw(ptr: *mut u8, len: usize) -> Self {
        Self {
            ptr,
            len,
            peer: None,
            life: PhantomData,
        }
    }

    /// Returns the address of the first byte.
    pub fn address(&self) -> *mut u8 {
        self.ptr
    }

    /// True if a copy to or from its memory has failed.
    #[inline]
    pub fn is_lost(&self) -> bool {
        self.peer.is_some_and(PeerAccess::is_lost)
    }

    /// Returns the length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns `len` bytes from `offset` on, or `None` past the end.
    #[inline]
    pub fn slice(self, offset: usize, len: usize) -> Option<Self> {
        if offset > self.len || len > self.len - offset {
            return None;
        }
        Some(Self {
            ptr: self.ptr.wrapping_add(offset),
            len,
            ..self
        })
    }

    /// Returns the aligned word at `offset`, or `None` if it is not wholly inside or not aligned.
    #[inline]
    pub fn word(&self, offset: usize) -> Option<&'a AtomicU64> {
        if self.len < 8 || offset > self.len - 8 || self.peer.is_some() {
            return None;
        }
        // SAFETY: offset + 8 <= self.len was checked above, and the constructors promise that `len`
        // bytes at `ptr` are one allocation for 'a, so the sum stays inside that allocation.
        let ptr = unsafe { self.ptr.add(offset) }.cast::<AtomicU64>();
        if !ptr.is_aligned() {
            return None;
        }
        // SAFETY: the word is inside the span for 'a and aligned, as checked above. Others may
        // write it at the same time, which is no data race because it is only used as an atomic.
        Some(unsafe { &*ptr })
    }

    /// Reads `N` words from `offset` on with relaxed loads, under the conditions of
    /// [`word`](Self::word).
    #[inline]
    pub fn words<const N: usize>(&self, offset: usize) -> Option<[u64; N]> {
        let part = self.slice(offset, N * 8)?;
        let first = part.ptr.cast::<AtomicU64>();
        if !first.is_aligned() || part.peer.is_some() {
            return None;
        }
        let mut out = [0; N];
        for (i, word) in out.iter_mut().enumerate() {
            // SAFETY: i < N, and the part holds N aligned words, as checked above. They are only
            // used as atomics, so that a driver that writes them meanwhile causes no data race.
            *word = unsafe { &*first.add(i) }.load(Ordering::Relaxed);
        }
        Some(out)
    }

    /// Prefetches the first bytes. Their cache lines are enough for the processor's own prefetcher
    /// to fetch the rest while they are copied. Does nothing on other architectures than x86-64.
    #[inline]
    pub fn prefetch(&self) {
        #[cfg(target_arch = "x86_64")]
        for line in (0..self.len.min(512)).step_by(64) {
            use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: SSE is part of x86-64; a prefetch reads nothing that the program sees and cannot
            // fault, so that not even the address of a peer does harm.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.ptr.wrapping_add(line).cast()) };
        }
    }

    /// Returns the span as words, or `None` if it is not aligned. Bytes behind the last whole word
    /// are left out.
    #[inline]
    pub fn as_words(&self) -> Option<&'a [AtomicU64]> {
        let first = self.ptr.cast::<AtomicU64>();
        if !first.is_aligned() || self.peer.is_some() {
            return None;
        }
        // SAFETY: the span holds len / 8 whole words, the first is aligned, and both hold for 'a.
        // Others may write them at the same time, which atomics allow.
        Some(unsafe { core::slice::from_raw_parts(first, self.len / 8) })
    }

    /// Copies to `to`, as many bytes as both hold. The two may be the same memory. If they overlap
    /// in part, the bytes are unspecified, as on a real bus.
    #[inline]
    pub fn copy_to(self, to: MemorySpan<'_>) {
        let len = self.len.min(to.len);
        match (self.peer, to.peer) {
            // SAFETY: both spans hold `len` bytes, the smaller of the two lengths. `copy` tolerates
            // concurrent writes, and spans that are the same memory. A driver may change them while
            // a command moves its data.
            (None, None) => unsafe { copy(self.ptr, to.ptr, len) },
            // SAFETY: as above; `to` is an address of its owner.
            (None, Some(peer)) => unsafe { peer.write(to.ptr.addr() as u64, self.ptr, len) },
            // SAFETY: as above, the other way.
            (Some(peer), None) => unsafe { peer.read(self.ptr.addr() as u64, to.ptr, len) },
            (Some(_), Some(_)) => self.staged_copy(to, len),
        }
    }

    /// True if only the memory's owner can copy.
    #[inline]
    pub(super) fn is_peer(&self) -> bool {
        self.peer.is_some()
    }

    /// Copies each pair, whose second span is a peer's. Consecutive copies to one peer are passed
    /// to it together, and adjacent ones are joined. True if no peer's memory was lost.
    pub(super) fn copy_all(pairs: &[(Self, Self)]) -> bool {
        let mut copies: Vec<PeerCopy> = Vec::with_capacity(pairs.len());
        let mut good = true;
        let mut pairs = pairs.iter().peekable();
        while let Some((from, to)) = pairs.next() {
            let copy = PeerCopy {
                address: to.ptr.addr() as u64,
                from: from.ptr,
                len: from.len.min(to.len),
            };
            match copies.last_mut() {
                Some(last)
                    if last.address + last.len as u64 == copy.address
                        && last.from.wrapping_add(last.len) == copy.from =>
                {
                    last.len += copy.len;
                }
                _ => copies.push(copy),
            }
            let Some(peer) = to.peer else { continue };
            let same = |(_, next): &&(Self, Self)| {
                next.peer.is_some_and(|next| core::ptr::addr_eq(next, peer))
            };
            if pairs.peek().is_none_or(|next| !same(next)) {
                // SAFETY: each copy is of the smaller of its two lengths, or a join of adjacent
                // ones, so both spans hold its bytes. The addresses are the peer's, since the
                // second span of each pair is.
                unsafe { peer.write_all(&copies) };
                good &= !peer.is_lost();
                copies.clear();
            }
        }
        good
    }

    /// Copies between two peers through a buffer, 4 KiB at a time.
    fn staged_copy(self, to: MemorySpan<'_>, len: usize) {
        let mut page = [0; 4096];
        let mut done = 0;
        while done < len {
            let take = page.len().min(len - done);
            let parts = self.slice(done, take).zip(to.slice(done, take));
            if let Some((from, to)) = parts {
                from.read(&mut page[..take]);
                to.write(&page[..take]);
            }
            done += take;
        }
    }

    /// Copies into private memory, as many bytes as both hold.
    #[inline]
    pub fn read(self, into: &mut [u8]) {
        let len = self.len.min(into.len());
        match self.peer {
            // SAFETY: both hold that many bytes; `into` is exclusive.
            None => unsafe { copy(self.ptr, into.as_mut_ptr(), len) },
            // SAFETY: as above.
            Some(peer) => unsafe { peer.read(self.ptr.addr() as u64, into.as_mut_ptr(), len) },
        }
    }

    /// Copies out of private memory, as many bytes as both hold.
    #[inline]
    pub fn write(self, from: &[u8]) {
        let len = self.len.min(from.len());
        match self.peer {
            // SAFETY: both hold that many bytes; the copy does not write to `from`.
            None => unsafe { copy(from.as_ptr().cast_mut(), self.ptr, len) },
            // SAFETY: as above.
            Some(peer) => unsafe { peer.write(self.ptr.addr() as u64, from.as_ptr(), len) },
        }
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

// SAFETY: a span is an address range whose every access is atomic or an opaque copy. Whichever
// thread makes the access, the memory is valid for 'a, and concurrent writes only tear bytes.
unsafe impl Send for MemorySpan<'_> {}
// SAFETY: as above.
unsafe impl Sync for MemorySpan<'_> {}

/// # Safety
/// `from` is readable and `to` is writable for `len` bytes.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn copy(from: *mut u8, to: *mut u8, len: usize) {
    // One string move is as fast as memcpy for blocks, and opaque to the compiler. A driver that
    // writes the same bytes meanwhile therefore causes torn data and not undefined behaviour.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_never_reaches_past_its_end() {
        let words: [AtomicU64; 4] = core::array::from_fn(|i| AtomicU64::new(i as u64));
        let span = MemorySpan::of_words(&words);
        assert_eq!(span.words::<4>(0), Some([0, 1, 2, 3]));
        assert_eq!(span.words::<4>(8), None);
        assert_eq!(span.words::<1>(4), None);
        assert!(span.word(24).is_some() && span.word(25).is_none() && span.word(32).is_none());
        assert!(span.slice(33, 0).is_none() && span.slice(8, usize::MAX).is_none());
    }

    #[test]
    fn copies_of_any_alignment_move_exactly_their_bytes() {
        let words: [AtomicU64; 8] = core::array::from_fn(|_| AtomicU64::new(u64::MAX));
        let span = MemorySpan::of_words(&words);
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
