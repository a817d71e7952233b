//! Stores of blocks: the trait, a store in memory, one that keeps nothing, and one whose bytes follow from their address.
//! Files are in `file`.
//! A store knows only bytes; blocks, formats and the write cache are above it.

use crate::memory::{MemorySpan, PAGE};
use alloc::boxed::Box;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;
use zerocopy::FromZeros;

/// Error of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreError {
    /// The range ends behind the store. Nothing was read or written.
    OutOfBounds,
    /// The operating system reported this error number (0 if unknown), for instance because the
    /// disk is full.
    Io(i32),
}

impl core::fmt::Display for StoreError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::OutOfBounds => f.write_str("past the end of the store"),
            Self::Io(errno) => write!(f, "input/output error {errno}"),
        }
    }
}

impl core::error::Error for StoreError {}

/// An image of `bytes()` bytes. Ranges are checked, and any thread may call at any time.
pub trait BlockStore {
    /// Returns the size in bytes, which does not change.
    fn bytes(&self) -> u64;
    /// Reads `into.len()` bytes from `offset` on.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError>;
    /// Writes `from` at `offset`.
    fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), StoreError>;
    /// Makes `len` bytes from `offset` on read as zeroes. With `deallocate` their space is
    /// released.
    fn zero(&self, offset: u64, len: u64, deallocate: bool) -> Result<(), StoreError>;
    /// Makes everything written so far durable.
    fn flush(&self) -> Result<(), StoreError>;
    /// Releases the resources of the operating system. Later accesses fail. The default has nothing
    /// to release.
    fn close(&self) {}
    /// Returns the image itself if it is in memory: data is then copied directly, without staging.
    fn span(&self) -> Option<MemorySpan<'_>> {
        None
    }
    /// True if contents do not matter: data is then not moved at all.
    fn is_null(&self) -> bool {
        false
    }
}

/// Checks that `len` bytes from `offset` on lie in a store of `bytes` bytes.
pub(crate) fn check(bytes: u64, offset: u64, len: u64) -> Result<(), StoreError> {
    let end = offset.checked_add(len).ok_or(StoreError::OutOfBounds)?;
    if end <= bytes {
        Ok(())
    } else {
        Err(StoreError::OutOfBounds)
    }
}

/// 64-bit words of a page.
const PAGE_WORDS: usize = PAGE / size_of::<AtomicU64>();

/// An image in memory, zeroed. The operating system allocates its pages when they are first
/// written.
///
/// The image starts at a page boundary and shares no page with another allocation. If it shared
/// one, registering it with a GPU would register part of that allocation too, and the GPU's driver
/// would then refuse copies to or from it.
#[derive(Debug)]
pub struct MemoryStore {
    // Longer than the image by a page. An aligned allocation would be zeroed by hand, which touches
    // all its pages; this one is zeroed by the system, and the image is aligned inside it.
    pages: Box<[AtomicU64]>,
    /// Index of the image's first word, and its number of words.
    first: usize,
    words: usize,
    bytes: u64,
}

impl MemoryStore {
    /// Makes an image of `bytes` bytes, or returns `None` if there is not enough memory.
    pub fn new(bytes: u64) -> Option<Self> {
        let words = usize::try_from(bytes.div_ceil(8)).ok()?;
        let whole = words.checked_next_multiple_of(PAGE_WORDS)?;
        let longer = whole.checked_add(PAGE_WORDS - 1)?;
        let pages = <[AtomicU64]>::new_box_zeroed_with_elems(longer).ok()?;
        let start = pages.as_ptr().addr();
        let first = (start.next_multiple_of(PAGE) - start) / size_of::<AtomicU64>();
        Some(Self {
            pages,
            first,
            words,
            bytes,
        })
    }

    fn words(&self) -> &[AtomicU64] {
        &self.pages[self.first..self.first + self.words]
    }

    fn part(&self, offset: u64, len: u64) -> Result<MemorySpan<'_>, StoreError> {
        check(self.bytes, offset, len)?;
        let (Ok(offset), Ok(len)) = (usize::try_from(offset), usize::try_from(len)) else {
            return Err(StoreError::OutOfBounds);
        };
        MemorySpan::of_words(self.words())
            .slice(offset, len)
            .ok_or(StoreError::OutOfBounds)
    }
}

impl BlockStore for MemoryStore {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.part(offset, into.len() as u64)?.read(into);
        Ok(())
    }

    fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), StoreError> {
        self.part(offset, from.len() as u64)?.write(from);
        Ok(())
    }

    fn zero(&self, offset: u64, len: u64, _deallocate: bool) -> Result<(), StoreError> {
        let part = self.part(offset, len)?;
        let mut done = 0;
        while let Some(rest) = part
            .slice(done, part.len() - done)
            .filter(|rest| !rest.is_empty())
        {
            let chunk = rest
                .slice(0, rest.len().min(4096))
                .ok_or(StoreError::OutOfBounds)?;
            // Pages that read as zeroes are not written: they may still be without physical memory.
            let words = chunk.as_words().filter(|_| chunk.len().is_multiple_of(8));
            if !words.is_some_and(|words| words.iter().all(|word| word.load(Relaxed) == 0)) {
                chunk.zero();
            }
            done += chunk.len();
        }
        Ok(())
    }

    fn flush(&self) -> Result<(), StoreError> {
        Ok(())
    }

    fn span(&self) -> Option<MemorySpan<'_>> {
        Some(MemorySpan::of_words(self.words()))
    }
}

/// A store of any size that keeps nothing. Reads leave the driver's buffers unchanged.
#[derive(Clone, Copy, Debug)]
pub struct NullStore {
    bytes: u64,
}

impl NullStore {
    /// Makes a store of `bytes` bytes.
    pub const fn new(bytes: u64) -> Self {
        Self { bytes }
    }
}

impl BlockStore for NullStore {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        check(self.bytes, offset, into.len() as u64)
    }

    fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), StoreError> {
        check(self.bytes, offset, from.len() as u64)
    }

    fn zero(&self, offset: u64, len: u64, _deallocate: bool) -> Result<(), StoreError> {
        check(self.bytes, offset, len)
    }

    fn flush(&self) -> Result<(), StoreError> {
        Ok(())
    }

    fn is_null(&self) -> bool {
        true
    }
}

/// A read-only store of any size, without memory: its bytes follow from their address. So a drive of hundreds of
/// gigabytes can be read, and the data can be checked.
#[derive(Clone, Copy, Debug)]
pub struct GeneratedStore {
    bytes: u64,
}

/// Error number for writes: the file system is for reading only (EROFS).
const READ_ONLY: i32 = 30;

impl GeneratedStore {
    /// Makes a store of `bytes` bytes.
    pub const fn new(bytes: u64) -> Self {
        Self { bytes }
    }

    /// Returns the eight bytes from byte 8 * `index` on, as a little-endian number: number `index`, from 0 on, of the
    /// generator SplitMix64 that begins with 0 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
    /// 2014).
    pub const fn word(index: u64) -> u64 {
        let word = index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let word = (word ^ word >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let word = (word ^ word >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ word >> 31
    }
}

impl BlockStore for GeneratedStore {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        check(self.bytes, offset, into.len() as u64)?;
        // The first word may begin before the range.
        let skipped = (offset % 8) as usize;
        let (head, rest) = into.split_at_mut(into.len().min((8 - skipped) % 8));
        head.copy_from_slice(&Self::word(offset / 8).to_le_bytes()[skipped..][..head.len()]);
        let first = offset.div_ceil(8);
        for (index, part) in (first..).zip(rest.chunks_mut(8)) {
            part.copy_from_slice(&Self::word(index).to_le_bytes()[..part.len()]);
        }
        Ok(())
    }

    fn write_at(&self, _offset: u64, _from: &[u8]) -> Result<(), StoreError> {
        Err(StoreError::Io(READ_ONLY))
    }

    fn zero(&self, _offset: u64, _len: u64, _deallocate: bool) -> Result<(), StoreError> {
        Err(StoreError::Io(READ_ONLY))
    }

    fn flush(&self) -> Result<(), StoreError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounds_checked_and_zeroes_exactly_the_range() {
        let store = MemoryStore::new(4096).unwrap();
        store.write_at(0, &[5; 4096]).unwrap();
        store.zero(100, 50, true).unwrap();
        let mut bytes = [1; 52];
        store.read_at(99, &mut bytes).unwrap();
        assert_eq!((bytes[0], bytes[1], bytes[50], bytes[51]), (5, 0, 0, 5));
        assert_eq!(store.write_at(4095, &[0; 2]), Err(StoreError::OutOfBounds));
        assert_eq!(
            store.read_at(u64::MAX, &mut bytes),
            Err(StoreError::OutOfBounds)
        );
        assert_eq!(store.zero(1, u64::MAX, false), Err(StoreError::OutOfBounds));
    }

    /// Many sizes are allocated at once, so that the result does not depend on the allocator's state.
    #[test]
    fn memory_has_its_pages_to_itself() {
        let sizes = [8, 512, 4096, 5000, 1 << 17, (1 << 17) + 8, 1 << 20];
        for store in sizes.map(|bytes| MemoryStore::new(bytes).unwrap()) {
            let span = store.span().unwrap();
            let start = span.address().addr();
            assert_eq!(start % PAGE, 0);
            assert_eq!(span.len() as u64, store.bytes());
            let owned = store.pages.as_ptr_range();
            let end = (start + span.len()).next_multiple_of(PAGE);
            assert!(owned.start.addr() <= start && end <= owned.end.addr());
        }
    }

    #[test]
    fn generated_bytes_follow_from_their_address() {
        // The first numbers of SplitMix64 from 0 on, as its authors' C program prints them.
        let first = [0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4];
        assert_eq!([0, 1].map(GeneratedStore::word), first);
        let store = GeneratedStore::new(1 << 40);
        let mut whole = [0; 64];
        store.read_at((1 << 40) - 64, &mut whole).unwrap();
        for (index, word) in whole.chunks(8).enumerate() {
            let expected = GeneratedStore::word((1 << 37) - 8 + index as u64);
            assert_eq!(word, expected.to_le_bytes());
        }
        for begin in 0..40 {
            for len in 0..24 {
                let mut part = vec![0xA5; len];
                store
                    .read_at((1 << 40) - 64 + begin as u64, &mut part)
                    .unwrap();
                assert_eq!(part, whole[begin..begin + len]);
            }
        }
        assert_eq!(
            store.read_at((1 << 40) - 7, &mut [0; 8]),
            Err(StoreError::OutOfBounds)
        );
        assert_eq!(store.write_at(0, &[0]), Err(StoreError::Io(READ_ONLY)));
        assert_eq!(store.zero(0, 1, true), Err(StoreError::Io(READ_ONLY)));
    }

    #[test]
    fn null_checks_ranges_and_keeps_nothing() {
        let store = NullStore::new(1 << 40);
        let mut bytes = [3; 4];
        assert_eq!(store.write_at((1 << 40) - 4, &[9; 4]), Ok(()));
        assert_eq!(store.read_at((1 << 40) - 4, &mut bytes), Ok(()));
        assert_eq!(bytes, [3; 4]);
        assert_eq!(
            store.read_at((1 << 40) - 3, &mut bytes),
            Err(StoreError::OutOfBounds)
        );
    }
}
