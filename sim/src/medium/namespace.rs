//! A namespace: its store, its current format, its write cache, and the blocks that are unreadable.
//! Ranges are in bytes; the translation from blocks is in `command::nvm`.

use crate::medium::cache::WriteCache;
use crate::medium::store::{BlockStore, MemoryStore, StoreError};
use crate::memory::SpinLock;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Block sizes of Format NVM, by LBA format index.
pub(crate) const FORMATS: [u32; 2] = [512, 4096];
/// Bytes of a cache line: the largest block size.
const LINE_BYTES: usize = 4096;

/// A namespace of the controller.
pub(crate) struct NamespaceImage {
    pub store: Box<dyn BlockStore + Send + Sync>,
    /// Metadata of every block, for a separate buffer; kept in memory.
    pub metadata: Option<MemoryStore>,
    pub metadata_bytes: u16,
    pub cache: Option<WriteCache>,
    pub null: bool,
    read_only: AtomicBool,
    /// Optimal I/O boundary in blocks of the current format; 0 for none.
    pub noiob: u16,
    bytes: AtomicU64,
    shift: AtomicU32,
    formatting: AtomicBool,
    /// Ranges, in bytes, that Write Uncorrectable has made unreadable.
    bad: SpinLock<Vec<(u64, u64)>>,
    any_bad: AtomicBool,
}

impl NamespaceImage {
    /// Makes a namespace; `None` if there is not enough memory for its metadata.
    pub fn new(
        store: Box<dyn BlockStore + Send + Sync>,
        block_bytes: u32,
        metadata_bytes: u16,
        cache_bytes: Option<usize>,
    ) -> Option<Self> {
        let blocks = store.bytes() / u64::from(block_bytes);
        let metadata = match metadata_bytes {
            0 => None,
            bytes => Some(MemoryStore::new(blocks.checked_mul(u64::from(bytes))?)?),
        };
        let null = store.is_null();
        let cache = cache_bytes
            .filter(|_| !null)
            .map(|bytes| WriteCache::new(bytes, LINE_BYTES));
        Some(Self {
            bytes: AtomicU64::new(store.bytes()),
            store,
            metadata_bytes,
            metadata,
            cache,
            null,
            read_only: AtomicBool::new(false),
            noiob: 0,
            shift: AtomicU32::new(block_bytes.trailing_zeros()),
            formatting: AtomicBool::new(false),
            bad: SpinLock::new(Vec::new()),
            any_bad: AtomicBool::new(false),
        })
    }

    /// Returns log2 of the block size.
    #[inline]
    pub fn shift(&self) -> u32 {
        self.shift.load(Ordering::Relaxed)
    }

    /// Returns the size in bytes.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Sets the size in bytes; 0 deletes the namespace. No command may be executing.
    pub fn set_bytes(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
    }

    /// Rejects writes from now on.
    pub fn protect(&self) {
        self.read_only.store(true, Ordering::Relaxed);
    }

    /// True if writes are rejected.
    #[inline]
    pub fn is_read_only(&self) -> bool {
        self.read_only.load(Ordering::Relaxed)
    }

    pub fn block_bytes(&self) -> u32 {
        1 << self.shift()
    }

    /// Returns the size in blocks.
    #[inline]
    pub fn blocks(&self) -> u64 {
        self.bytes() >> self.shift()
    }

    /// Returns the index of the current format in [`FORMATS`].
    pub fn format(&self) -> usize {
        FORMATS
            .iter()
            .position(|bytes| *bytes == self.block_bytes())
            .unwrap_or(0)
    }

    #[inline]
    pub fn is_formatting(&self) -> bool {
        self.formatting.load(Ordering::Acquire) // Acquire: pairs with set_formatting.
    }

    pub fn set_formatting(&self, formatting: bool) {
        // Release: pairs with is_formatting. A thread that sees the end of a format also sees the
        // new block size; with the old one it would compute wrong offsets.
        self.formatting.store(formatting, Ordering::Release);
    }

    /// Erases every block and sets block size `FORMATS[format]`. No command may be executing.
    pub fn reformat(&self, format: usize) -> Result<(), StoreError> {
        self.store.zero(0, self.store.bytes(), true)?;
        if let Some(metadata) = &self.metadata {
            metadata.zero(0, metadata.bytes(), true)?;
        }
        self.store.flush()?;
        if let Some(cache) = &self.cache {
            cache.flush();
        }
        self.repair(0, u64::MAX);
        if let Some(bytes) = FORMATS.get(format) {
            self.shift.store(bytes.trailing_zeros(), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Makes everything written so far durable.
    pub fn flush(&self) -> Result<(), StoreError> {
        self.store.flush()?;
        if let Some(cache) = &self.cache {
            cache.flush();
        }
        Ok(())
    }

    /// Makes `len` bytes from `offset` on unreadable until they are written. False if there are too
    /// many such ranges already.
    pub fn damage(&self, offset: u64, len: u64) -> bool {
        let mut bad = self.bad.lock();
        if bad.len() >= 1024 {
            return false;
        }
        bad.push((offset, offset.saturating_add(len)));
        self.any_bad.store(true, Ordering::Release); // Release: pairs with the load in is_damaged.
        true
    }

    /// Makes `len` bytes from `offset` on readable again.
    #[inline]
    pub fn repair(&self, offset: u64, len: u64) {
        if !self.any_bad.load(Ordering::Relaxed) {
            return;
        }
        let end = offset.saturating_add(len);
        let mut bad = self.bad.lock();
        let mut kept = Vec::with_capacity(bad.len());
        for (from, to) in bad.drain(..) {
            if from < offset.min(to) {
                kept.push((from, offset.min(to)));
            }
            if end.max(from) < to {
                kept.push((end.max(from), to));
            }
        }
        self.any_bad.store(!kept.is_empty(), Ordering::Relaxed);
        *bad = kept;
    }

    /// True if part of `len` bytes from `offset` on is unreadable.
    #[inline]
    pub fn is_damaged(&self, offset: u64, len: u64) -> bool {
        // Acquire: pairs with the store in `damage`, which comes after the range was added to the list. The
        // flag spares reads the lock as long as no range is damaged, which is nearly always.
        self.any_bad.load(Ordering::Acquire)
            && self
                .bad
                .lock()
                .iter()
                .any(|(from, to)| *from < offset + len && offset < *to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repair_cuts_exactly_what_was_written() {
        let store = Box::new(MemoryStore::new(1 << 20).unwrap());
        let namespace = NamespaceImage::new(store, 512, 0, None).expect("no metadata");
        assert!(namespace.damage(1024, 4096));
        namespace.repair(2048, 512);
        let bad = |offset| namespace.is_damaged(offset, 512);
        let map: Vec<_> = (1..11).map(|block| bad(block * 512)).collect();
        let expected = [
            false, true, true, false, true, true, true, true, true, false,
        ];
        assert_eq!(map, expected);
        namespace.repair(0, u64::MAX);
        assert!(!namespace.is_damaged(0, 1 << 20));
    }

    #[test]
    fn a_new_format_erases_and_changes_the_count() {
        let store = Box::new(MemoryStore::new(1 << 20).unwrap());
        let namespace = NamespaceImage::new(store, 512, 0, Some(4096)).expect("no metadata");
        namespace.store.write_at(0, &[1; 512]).unwrap();
        assert_eq!((namespace.blocks(), namespace.format()), (2048, 0));
        namespace.reformat(1).unwrap();
        assert_eq!((namespace.blocks(), namespace.format()), (256, 1));
        let mut byte = [1];
        namespace.store.read_at(0, &mut byte).unwrap();
        assert_eq!(byte, [0]);
    }
}
