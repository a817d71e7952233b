//! Memory of this process as DMA memory, at addresses that the user chooses. It also covers memory of other processes
//! and of peers, once that is mapped or has an interface.

use super::dma::{DmaGuard, DmaMemory, DmaRegion};
#[cfg(target_os = "linux")]
use super::guest::GuestMemory;
use super::lock::relax;
use super::span::{MemorySpan, PeerAccess};
use super::staging::{RemoteMemory, StagedPages};
use std::any::Any;
use std::boxed::Box;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::vec::Vec;

/// Number of batches that can run at the same time; further ones wait.
const READERS: usize = 64;

/// Memory of this process as DMA memory: a table of address ranges.
///
/// Clones share the table. Look-ups take no lock. `map` and `unmap` replace the table and wait
/// until no batch uses the old one, so unmapped memory may be freed as soon as `unmap` returns.
#[derive(Clone, Default)]
pub struct HostMemory(Arc<MappingTable>);

/// Owner of a mapping's bytes, kept alive with the mapping.
type Owner = Arc<dyn Any + Send + Sync>;

#[derive(Clone)]
struct HostMapping {
    start: u64,
    /// First address after the mapping.
    end: u64,
    ptr: *mut u8,
    /// The peer that copies, if loads and stores do not reach the bytes.
    peer: Option<Arc<dyn PeerAccess>>,
    /// Keeps the bytes mapped.
    _owner: Option<Owner>,
    /// Interface to memory that cannot be mapped here.
    remote: Option<Arc<dyn RemoteMemory>>,
}

impl HostMapping {
    /// Describes plain memory at `ptr`, or returns the reason that it cannot be mapped at `iova`.
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

struct MappingTable {
    /// Sorted by address, without overlaps. Always a pointer from Box::into_raw, so a writer can
    /// free it.
    table: AtomicPtr<Vec<HostMapping>>,
    readers: [ReaderSlot; READERS],
    writer: Mutex<()>,
    /// True if some mapping is remote, so that guards prepare for staging.
    remote: AtomicBool,
}

/// Odd while a batch is in progress. Padded to 128 bytes, since readers on different
/// threads would otherwise slow each other down by sharing a cache line.
#[derive(Default)]
#[repr(align(128))]
struct ReaderSlot(AtomicU64);

// SAFETY: the callers of `map` promise that the pointers in the table may be used from any thread.
unsafe impl Send for MappingTable {}
// SAFETY: as above.
unsafe impl Sync for MappingTable {}

impl Default for MappingTable {
    fn default() -> Self {
        Self {
            table: AtomicPtr::new(Box::into_raw(Box::default())),
            readers: std::array::from_fn(|_| ReaderSlot::default()),
            writer: Mutex::new(()),
            remote: AtomicBool::new(false),
        }
    }
}

impl Drop for MappingTable {
    fn drop(&mut self) {
        // SAFETY: the pointer is from Box::into_raw, and this is the last clone: no guard borrows
        // it.
        drop(unsafe { Box::from_raw(*self.table.get_mut()) });
    }
}

/// Reason that a range was not mapped.
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
    /// Makes an empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Maps `len` bytes at `ptr` for the controller, at the addresses from `iova` on.
    ///
    /// # Safety
    /// The bytes stay readable and writable, from any thread, until they are unmapped or the last
    /// clone is dropped. All other uses of them meanwhile are through atomics, through raw
    /// pointers, or while no command that accesses them is in flight.
    pub unsafe fn map(&self, iova: u64, ptr: *mut u8, len: u64) -> Result<(), MapError> {
        self.insert(iova, ptr, len, None, None)
    }

    /// Maps `words` for the controller, at the addresses from `iova` on, and keeps them alive while
    /// they are mapped.
    pub fn share(&self, iova: u64, words: Arc<[AtomicU64]>) -> Result<(), MapError> {
        let ptr = words.as_ptr().cast_mut().cast();
        let len = size_of_val(&*words) as u64;
        self.insert(iova, ptr, len, Some(Arc::new(words)), None)
    }

    /// Maps `len` bytes of another process's memory for the controller.
    #[cfg(target_os = "linux")]
    pub(crate) fn map_guest(
        &self,
        iova: u64,
        len: u64,
        guest: Arc<GuestMemory>,
    ) -> Result<(), MapError> {
        self.insert(iova, guest.ptr(), len, Some(guest), None)
    }

    /// Maps `len` bytes that the controller reaches by asking `remote`, which gets the controller's
    /// addresses.
    pub(crate) fn map_remote(
        &self,
        iova: u64,
        len: u64,
        remote: Arc<dyn RemoteMemory>,
    ) -> Result<(), MapError> {
        self.insert(iova, std::ptr::null_mut(), len, None, Some(remote))
    }

    /// Maps `len` bytes of `peer`, from its address `address` on, at the addresses from `iova` on.
    /// They can hold data only: rings and lists cannot lie in a peer's memory.
    pub fn map_peer(
        &self,
        iova: u64,
        address: u64,
        len: u64,
        peer: Arc<dyn PeerAccess>,
    ) -> Result<(), MapError> {
        let ptr = std::ptr::without_provenance_mut(address as usize);
        let peer = Some(peer);
        let mapping = HostMapping {
            peer,
            ..HostMapping::new(iova, ptr, len)?
        };
        self.insert_mapping(mapping)
    }

    fn insert(
        &self,
        iova: u64,
        ptr: *mut u8,
        len: u64,
        _owner: Option<Owner>,
        remote: Option<Arc<dyn RemoteMemory>>,
    ) -> Result<(), MapError> {
        let mapping = HostMapping {
            _owner,
            remote,
            ..HostMapping::new(iova, ptr, len)?
        };
        self.insert_mapping(mapping)
    }

    fn insert_mapping(&self, mapping: HostMapping) -> Result<(), MapError> {
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

    /// Unmaps every range inside the `len` bytes from `iova` on, waits for accesses in progress,
    /// and returns the number of these ranges. A range that is only partly inside stays mapped.
    pub fn unmap(&self, iova: u64, len: u64) -> usize {
        let end = iova.saturating_add(len);
        self.replace(|table| {
            let before = table.len();
            table.retain(|mapping| mapping.start < iova || mapping.end > end);
            before - table.len()
        })
    }

    fn replace<R>(&self, change: impl FnOnce(&mut Vec<HostMapping>) -> R) -> R {
        let inner = &*self.0;
        let _writer = inner
            .writer
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let old = inner.table.load(Ordering::Relaxed);
        // SAFETY: only a writer frees tables, and this thread holds the writers' lock until it has
        // replaced the table, so the old one stays valid while it is cloned.
        let mut table = unsafe { &*old }.clone();
        let result = change(&mut table);
        let remote = table.iter().any(|mapping| mapping.remote.is_some());
        inner.remote.store(remote, Ordering::Relaxed);
        // SeqCst, as the reader's entry in `guard`: the two sides each write one word and then read
        // the other's. In one total order either this writer sees the reader's odd count below, or
        // the reader sees the new table. With release and acquire alone both could miss each other,
        // and the old table would be freed under the reader.
        inner
            .table
            .store(Box::into_raw(Box::new(table)), Ordering::SeqCst);
        for reader in &inner.readers {
            let seen = reader.0.load(Ordering::SeqCst);
            let mut tries = 0;
            // Acquire: pairs with the release that ends a batch, so that the batch's accesses are over. Only
            // then may the caller unmap the range: an access after that would hit memory that is gone.
            while seen % 2 == 1 && reader.0.load(Ordering::Acquire) == seen {
                tries += 1;
                relax(tries);
            }
        }
        // SAFETY: from Box::into_raw, unpublished, and every reader that saw it has ended its
        // batch.
        drop(unsafe { Box::from_raw(old) });
        result
    }
}

/// A batch in progress on [`HostMemory`].
pub struct HostGuard<'a> {
    table: &'a [HostMapping],
    reader: &'a ReaderSlot,
    /// Present while some mapping is remote.
    staging: Option<StagedPages>,
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
            // SeqCst: in one total order with the store of the table, see `replace`.
            if seen.is_multiple_of(2)
                && reader
                    .0
                    .compare_exchange(seen, seen + 1, Ordering::SeqCst, Ordering::Relaxed)
                    .is_ok()
            {
                let table = self.0.table.load(Ordering::SeqCst);
                // SAFETY: the count of our reader is odd, and `replace` frees a table only after
                // every reader that was odd at the exchange has become even, which ours does when
                // the guard is dropped.
                let table = unsafe { &*table };
                let remote = self.0.remote.load(Ordering::Relaxed);
                return HostGuard {
                    table,
                    reader,
                    staging: remote.then(StagedPages::default),
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
    fn lookup(&self, iova: u64) -> Option<DmaRegion<'_>> {
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
            // SAFETY: the callers of `map` promised that these bytes stay valid until they are
            // unmapped, and `unmap` waits for this guard, whose lifetime the span has.
            None => unsafe { MemorySpan::from_raw(mapping.ptr, len) },
            Some(peer) if peer.is_lost() => return None,
            Some(peer) => MemorySpan::of_peer(&**peer, mapping.ptr.addr() as u64, len),
        };
        Some(DmaRegion {
            start: mapping.start,
            span,
        })
    }

    fn staged_bytes(&self) -> Option<usize> {
        self.staging.as_ref().map(StagedPages::bytes)
    }

    fn write_back_last(&self, iova: u64, len: u64) {
        if let Some(staging) = &self.staging {
            staging.write_back_last(iova, len);
        }
    }
}

impl Drop for HostGuard<'_> {
    fn drop(&mut self) {
        if let Some(staging) = &mut self.staging {
            staging.write_back_all();
        }
        // Release: pairs with the Acquire in `replace`. The batch's accesses must be over before
        // the writer sees the even count, because it then lets the user free the memory.
        let seen = self.reader.0.load(Ordering::Relaxed);
        self.reader.0.store(seen.wrapping_add(1), Ordering::Release);
    }
}

#[cfg(test)]
mod peer_reads;
#[cfg(test)]
mod tests;
