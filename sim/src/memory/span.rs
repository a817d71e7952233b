//! A stretch of memory that someone else may be writing.

use alloc::vec::Vec;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Memory that loads and stores do not reach, such as a GPU's: its owner copies, and nothing else can
/// be done with it. Rings and lists cannot lie there.
///
/// A copy that fails is remembered: see [`is_lost`](Self::is_lost).
pub trait Peer: Send + Sync + core::fmt::Debug {
    /// Copies `len` bytes from `from` to `address`; returns when they are there.
    ///
    /// # Safety
    /// `from` is readable for `len` bytes; `address` and the bytes from there on were mapped.
    unsafe fn write(&self, address: u64, from: *const u8, len: usize);

    /// Carries out `copies`, in any order; returns when all of them are there.
    ///
    /// # Safety
    /// As for [`write`](Self::write), for each of them.
    unsafe fn write_all(&self, copies: &[PeerCopy]) {
        for copy in copies {
            // SAFETY: the caller's ranges.
            unsafe { self.write(copy.address, copy.from, copy.len) };
        }
    }

    /// Copies `len` bytes from `address` to `into`; returns when they are there.
    ///
    /// # Safety
    /// `into` is writable for `len` bytes; `address` and the bytes from there on were mapped.
    unsafe fn read(&self, address: u64, into: *mut u8, len: usize);

    /// Whether a copy has failed: then none is to be trusted any more.
    fn is_lost(&self) -> bool;
}

/// A copy into the memory of a [`Peer`].
#[derive(Clone, Copy, Debug)]
pub struct PeerCopy {
    /// Where to.
    pub address: u64,
    /// Where from.
    pub from: *const u8,
    /// Bytes.
    pub len: usize,
}

/// A stretch of shared bytes.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    /// An address of `peer`, where there is one.
    ptr: *mut u8,
    len: usize,
    peer: Option<&'a dyn Peer>,
    life: PhantomData<&'a [AtomicU8]>,
}

impl<'a> Span<'a> {
    /// The bytes of `words`.
    pub fn of_words(words: &'a [AtomicU64]) -> Self {
        Self {
            ptr: words.as_ptr().cast_mut().cast(),
            len: size_of_val(words),
            peer: None,
            life: PhantomData,
        }
    }

    /// `len` bytes of `peer` from its address `address` on.
    #[cfg(feature = "std")]
    pub(super) fn of_peer(peer: &'a dyn Peer, address: u64, len: usize) -> Self {
        Self {
            ptr: core::ptr::without_provenance_mut(address as usize),
            len,
            peer: Some(peer),
            life: PhantomData,
        }
    }

    /// `len` bytes at `ptr`.
    ///
    /// # Safety
    /// They are readable and writable for 'a; all other uses of them meanwhile are through
    /// atomics or raw pointers, or does not mind torn bytes.
    pub unsafe fn from_raw(ptr: *mut u8, len: usize) -> Self {
        Self {
            ptr,
            len,
            peer: None,
            life: PhantomData,
        }
    }

    /// Address of the first byte.
    pub fn address(&self) -> *mut u8 {
        self.ptr
    }

    /// Whether a copy to or from its memory has failed.
    #[inline]
    pub fn is_lost(&self) -> bool {
        self.peer.is_some_and(Peer::is_lost)
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
        Some(Self {
            ptr: self.ptr.wrapping_add(offset),
            len,
            ..self
        })
    }

    /// The aligned word at `offset`, or `None` when it is not wholly inside or not aligned.
    #[inline]
    pub fn word(&self, offset: usize) -> Option<&'a AtomicU64> {
        if self.len < 8 || offset > self.len - 8 || self.peer.is_some() {
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
        if !first.is_aligned() || part.peer.is_some() {
            return None;
        }
        let mut out = [0; N];
        for (i, word) in out.iter_mut().enumerate() {
            // SAFETY: i < N and the part holds N aligned words; they are only used as atomics.
            *word = unsafe { &*first.add(i) }.load(Ordering::Relaxed);
        }
        Some(out)
    }

    /// Asks the processor for the first bytes, as many as hide the wait for the rest, which it then
    /// fetches by itself. Nothing happens where that is not known how.
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

    /// The span as words, or `None` when it is not aligned. A rest below one word is left out.
    #[inline]
    pub fn as_words(&self) -> Option<&'a [AtomicU64]> {
        let first = self.ptr.cast::<AtomicU64>();
        if !first.is_aligned() || self.peer.is_some() {
            return None;
        }
        // SAFETY: that many aligned words lie in the span for 'a; atomics may be written by others.
        Some(unsafe { core::slice::from_raw_parts(first, self.len / 8) })
    }

    /// Copies to `to`, as many bytes as both hold. The two may be the same memory but not overlap
    /// in part; then, as on a real bus, the bytes are unspecified.
    #[inline]
    pub fn copy_to(self, to: Span<'_>) {
        let len = self.len.min(to.len);
        match (self.peer, to.peer) {
            // SAFETY: both spans hold that many bytes.
            (None, None) => unsafe { copy(self.ptr, to.ptr, len) },
            // SAFETY: as above; `to` is an address of its owner.
            (None, Some(peer)) => unsafe { peer.write(to.ptr.addr() as u64, self.ptr, len) },
            // SAFETY: as above, the other way.
            (Some(peer), None) => unsafe { peer.read(self.ptr.addr() as u64, to.ptr, len) },
            (Some(_), Some(_)) => self.staged_copy(to, len),
        }
    }

    /// Whether only its owner copies.
    #[inline]
    pub(super) fn is_peer(&self) -> bool {
        self.peer.is_some()
    }

    /// Copies each pair, of which the second is a peer's; those of one peer that follow each other go to
    /// it together, and what lies side by side as one. Whether none was lost.
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
                // SAFETY: each pair of spans holds that many bytes; the second are the peer's.
                unsafe { peer.write_all(&copies) };
                good &= !peer.is_lost();
                copies.clear();
            }
        }
        good
    }

    /// Copies between two peers, a page at a time.
    fn staged_copy(self, to: Span<'_>, len: usize) {
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
