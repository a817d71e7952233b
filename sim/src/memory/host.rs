//! Memory of this process at addresses of the user's choice.

use super::dma::{DmaGuard, DmaMemory, Region};
#[cfg(target_os = "linux")]
use super::guest::GuestMemory;
use super::lock::relax;
use super::span::{Peer, Span};
use super::staged::{Remote, Staging};
use std::any::Any;
use std::boxed::Box;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
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

/// What a mapping's bytes belong to.
type Owner = Arc<dyn Any + Send + Sync>;

#[derive(Clone)]
struct Mapping {
    start: u64,
    /// First address after the mapping.
    end: u64,
    ptr: *mut u8,
    /// Who copies, when loads and stores do not reach the bytes.
    peer: Option<Arc<dyn Peer>>,
    /// Keeps the bytes mapped.
    _owner: Option<Owner>,
    /// Reached without a mapping.
    remote: Option<Arc<dyn Remote>>,
}

impl Mapping {
    /// Plain memory at `ptr`, or the reason why it cannot be mapped at `iova`.
    fn new(iova: u64, ptr: *mut u8, len: u64) -> Result<Self, MapError> {
        let end = iova
            .checked_add(len)
            .filter(|_| len != 0)
            .ok_or(MapError::BadRange)?;
        if (ptr as u64 ^ iova) & 7 != 0 {
            return Err(MapError::Misaligned);
        }
        Ok(Self {
            start: iova,
            end,
            ptr,
            peer: None,
            _owner: None,
            remote: None,
        })
    }
}

struct Inner {
    /// Sorted by address, without overlaps. Always from Box::into_raw.
    table: AtomicPtr<Vec<Mapping>>,
    readers: [Reader; READERS],
    writer: Mutex<()>,
    /// A mapping is remote.
    remote: AtomicBool,
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
            remote: AtomicBool::new(false),
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: the pointer is from Box::into_raw and nothing else holds it.
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
    /// last clone is dropped; all other uses of them meanwhile are through atomics, raw
    /// pointers, or while no command is in flight for them.
    pub unsafe fn map(&self, iova: u64, ptr: *mut u8, len: u64) -> Result<(), MapError> {
        self.insert(iova, ptr, len, None, None)
    }

    /// Lets the controller reach `words` through the addresses from `iova` on, and keeps them
    /// alive while it can.
    pub fn share(&self, iova: u64, words: Arc<[AtomicU64]>) -> Result<(), MapError> {
        let ptr = words.as_ptr().cast_mut().cast();
        let len = size_of_val(&*words) as u64;
        self.insert(iova, ptr, len, Some(Arc::new(words)), None)
    }

    /// Lets the controller reach `len` bytes of another process's memory.
    #[cfg(target_os = "linux")]
    pub(crate) fn map_guest(
        &self,
        iova: u64,
        len: u64,
        guest: Arc<GuestMemory>,
    ) -> Result<(), MapError> {
        self.insert(iova, guest.ptr(), len, Some(guest), None)
    }

    /// Lets the controller reach `len` bytes by asking `remote`, with the addresses of the controller.
    pub(crate) fn map_remote(
        &self,
        iova: u64,
        len: u64,
        remote: Arc<dyn Remote>,
    ) -> Result<(), MapError> {
        self.insert(iova, std::ptr::null_mut(), len, None, Some(remote))
    }

    /// Lets the controller reach `len` bytes of `peer` at its address `address`, through the addresses
    /// from `iova` on: for data only, rings and lists cannot lie there.
    pub fn map_peer(
        &self,
        iova: u64,
        address: u64,
        len: u64,
        peer: Arc<dyn Peer>,
    ) -> Result<(), MapError> {
        let ptr = std::ptr::without_provenance_mut(address as usize);
        let peer = Some(peer);
        let mapping = Mapping {
            peer,
            ..Mapping::new(iova, ptr, len)?
        };
        self.insert_mapping(mapping)
    }

    fn insert(
        &self,
        iova: u64,
        ptr: *mut u8,
        len: u64,
        _owner: Option<Owner>,
        remote: Option<Arc<dyn Remote>>,
    ) -> Result<(), MapError> {
        let mapping = Mapping {
            _owner,
            remote,
            ..Mapping::new(iova, ptr, len)?
        };
        self.insert_mapping(mapping)
    }

    fn insert_mapping(&self, mapping: Mapping) -> Result<(), MapError> {
        let (start, end) = (mapping.start, mapping.end);
        self.replace(|table| {
            let at = table.partition_point(|mapping| mapping.start < start);
            let before = at.checked_sub(1).map(|i| table[i].end);
            if before.is_some_and(|before| before > start)
                || table.get(at).is_some_and(|mapping| mapping.start < end)
            {
                return Err(MapError::Overlap);
            }
            table.insert(at, mapping);
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
        let remote = table.iter().any(|mapping| mapping.remote.is_some());
        inner.remote.store(remote, Ordering::Relaxed);
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
    /// Present while a mapping is remote.
    staging: Option<Staging>,
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
            if seen.is_multiple_of(2)
                && reader
                    .0
                    .compare_exchange(seen, seen + 1, Ordering::SeqCst, Ordering::Relaxed)
                    .is_ok()
            {
                let table = self.0.table.load(Ordering::SeqCst);
                // SAFETY: the table is not freed while our reader count is odd.
                let table = unsafe { &*table };
                let remote = self.0.remote.load(Ordering::Relaxed);
                return HostGuard {
                    table,
                    reader,
                    staging: remote.then(Staging::default),
                };
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
        if let Some(remote) = &mapping.remote {
            let range = (mapping.start, mapping.end);
            return self.staging.as_ref()?.page(iova, range, remote);
        }
        let len = usize::try_from(mapping.end - mapping.start).ok()?;
        let span = match &mapping.peer {
            // SAFETY: `map` was promised these bytes, and the guard keeps them mapped.
            None => unsafe { Span::from_raw(mapping.ptr, len) },
            Some(peer) if peer.is_lost() => return None,
            Some(peer) => Span::of_peer(&**peer, mapping.ptr.addr() as u64, len),
        };
        Some(Region {
            start: mapping.start,
            span,
        })
    }

    fn staged_bytes(&self) -> Option<usize> {
        self.staging.as_ref().map(Staging::bytes)
    }

    fn settle_last(&self, iova: u64, len: u64) {
        if let Some(staging) = &self.staging {
            staging.settle_last(iova, len);
        }
    }
}

impl Drop for HostGuard<'_> {
    fn drop(&mut self) {
        if let Some(staging) = &mut self.staging {
            staging.settle();
        }
        // Release: pairs with the Acquire in `replace`: our accesses are over before the memory
        // may be freed.
        let seen = self.reader.0.load(Ordering::Relaxed);
        self.reader.0.store(seen.wrapping_add(1), Ordering::Release);
    }
}

#[cfg(test)]
mod held;
#[cfg(test)]
mod tests;
