//! A mapped BAR that may be taken away at any moment: by a reset, an unplugged device, a driver that
//! wants it back.
//!
//! An access to a mapping that was taken away raises SIGBUS. The handler here maps a page of ones at that address,
//! since an absent PCI device reads as ones, marks the mapping as lost and lets the access happen again. Faults
//! elsewhere are passed to the handler of SIGBUS that was installed before.
// UNSAFETY: mmap, and a signal handler that replaces pages of our own mappings.
#![allow(unsafe_code)]

use crate::dma::pages::{host_page, map_shared};
use crate::error::{Error, Result};
use rustix::fs::MemfdFlags;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, IntoRawFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

/// Size of a page of this machine, for the handler. The file of ones has one at least.
static PAGE_BYTES: AtomicUsize = AtomicUsize::new(4096);
/// Bytes of the file of ones.
const ONES: usize = 64 << 10;
/// Mappings that can exist at once in this process.
const SLOTS: usize = 256;

/// Mapping as the signal handler sees it; `start` is 0 when the slot is free.
struct MappingSlot {
    start: AtomicUsize,
    end: AtomicUsize,
    lost: AtomicBool,
}

static TABLE: [MappingSlot; SLOTS] = [const {
    MappingSlot {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        lost: AtomicBool::new(false),
    }
}; SLOTS];
/// Serialises taking and freeing slots.
static CHANGES: Mutex<()> = Mutex::new(());
/// The file of ones, for the handler.
static ONES_FILE: AtomicI32 = AtomicI32::new(-1);
/// Previous handler of SIGBUS, for signals that are not about a mapping of ours.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// A stretch of a device's memory, mapped uncached. Unmapped on drop.
#[derive(Debug)]
pub struct UncachedMapping {
    start: NonNull<u8>,
    len: usize,
    slot: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for UncachedMapping {}
// SAFETY: shared references give the address and length only; the handler's table is atomics.
unsafe impl Sync for UncachedMapping {}

impl UncachedMapping {
    /// Maps `len` bytes (whole pages) of `file` from `offset` on, to read and write.
    ///
    /// # Errors
    /// [`Error::System`] when the kernel refuses, [`Error::Device`] when 256 mappings exist.
    pub fn new(file: &File, offset: u64, len: usize) -> Result<Self> {
        install()?;
        let start =
            map_shared(file.as_fd(), offset, len).map_err(Error::system("mapping a BAR"))?;
        let slot = take_slot(start.as_ptr().addr(), len);
        let mapping = Self {
            start,
            len,
            slot: slot.unwrap_or(SLOTS),
        };
        // Without a slot the mapping is dropped, which unmaps it.
        match slot {
            Some(_) => Ok(mapping),
            None => Err(Error::environment(
                format!("this process has {SLOTS} BARs mapped"),
                "close some devices",
            )),
        }
    }

    /// Address of the first byte.
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.len
    }

    /// True once an access found the device's memory taken away.
    pub fn is_lost(&self) -> bool {
        TABLE[self.slot].lost.load(Ordering::Relaxed)
    }

    /// Unmaps the device's memory: reads give ones from now on, writes are lost. The address
    /// stays valid.
    pub fn detach(&self) -> Result<()> {
        TABLE[self.slot].lost.store(true, Ordering::Relaxed);
        let start = self.start.as_ptr().addr();
        for at in (start..start + self.len).step_by(ONES) {
            let len = ONES.min(start + self.len - at);
            if !cover(at, len) {
                return Err(Error::System {
                    call: "unmapping a BAR",
                    source: io::Error::last_os_error(),
                });
            }
        }
        Ok(())
    }
}

impl Drop for UncachedMapping {
    fn drop(&mut self) {
        let _changes = crate::lock::lock(&CHANGES);
        if let Some(slot) = TABLE.get(self.slot) {
            // Release, as in `take_slot`: a handler that loads 0 skips the slot. Cleared before munmap below,
            // so that the handler never puts pages over an address range that another mapping may already have
            // reused.
            slot.start.store(0, Ordering::Release);
        }
        // SAFETY: the mapping is our own, or the pages that the signal handler put in its place. The owner is going
        // away, so no register or doorbell of it is accessed any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

fn take_slot(start: usize, len: usize) -> Option<usize> {
    let _changes = crate::lock::lock(&CHANGES);
    let slot = TABLE
        .iter()
        .position(|slot| slot.start.load(Ordering::Relaxed) == 0)?;
    TABLE[slot].end.store(start + len, Ordering::Relaxed);
    TABLE[slot].lost.store(false, Ordering::Relaxed);
    // Release: pairs with the acquire load of `start` in the signal handler. The handler then also sees the
    // `end` that was stored before, and does not cover pages past this mapping by the end of an earlier one.
    TABLE[slot].start.store(start, Ordering::Release);
    Some(slot)
}

/// Maps ones over `len` bytes (at most [`ONES`]) at `at`. Only for addresses inside our own mappings.
fn cover(at: usize, len: usize) -> bool {
    // SAFETY: replaces pages of a mapping of ours, which the callers checked; nothing but volatile and
    // atomic accesses are made to it, and those may see any value. mmap is a plain system call, so
    // this is fit for a signal handler.
    let raw = unsafe {
        libc::mmap(
            std::ptr::without_provenance_mut(at),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_FIXED,
            // Acquire: pairs with the store in `install`, so that the descriptor refers to the finished file of
            // ones. A signal handler may run at any instruction, also on another thread than the one that
            // installed it.
            ONES_FILE.load(Ordering::Acquire),
            0,
        )
    };
    raw != libc::MAP_FAILED
}

/// Makes the file of ones and takes SIGBUS, once.
fn install() -> Result<()> {
    let _changes = crate::lock::lock(&CHANGES);
    if BEFORE.get().is_some() {
        return Ok(());
    }
    let system = |call| move |source: io::Error| Error::System { call, source };
    let ones = rustix::fs::memfd_create("ones", MemfdFlags::CLOEXEC)
        .map_err(|errno| system("memfd_create")(errno.into()))?;
    let ones = File::from(ones);
    ones.write_all_at(&[0xFF; ONES], 0)
        .map_err(system("writing a memfd"))?;
    // The handler needs the file for as long as the process lives, so its descriptor is leaked. The store
    // comes before the handler is installed, which therefore never sees the value without a file.
    ONES_FILE.store(ones.into_raw_fd(), Ordering::Release);
    PAGE_BYTES.store(host_page(), Ordering::Relaxed);
    // SAFETY: the structure has only integers and pointers, for which zero is a valid value.
    let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: reads the action in force into `before`.
    unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut before) };
    let _ = BEFORE.set(before);
    // SAFETY: as above.
    let mut ours: libc::sigaction = unsafe { std::mem::zeroed() };
    ours.sa_sigaction = on_bus_error as *const () as usize;
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: the handler has the signature that SA_SIGINFO requires. It only loads atomics and calls mmap and
    // sigaction, which may be called in a signal handler; it takes no lock and allocates nothing.
    if unsafe { libc::sigaction(libc::SIGBUS, &ours, std::ptr::null_mut()) } < 0 {
        return Err(system("sigaction")(io::Error::last_os_error()));
    }
    Ok(())
}

extern "C" fn on_bus_error(
    _signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: the kernel hands in the information of this signal.
    let address = unsafe { (*info).si_addr() }.addr();
    for slot in &TABLE {
        // Acquire: pairs with the release store in `take_slot`. The `end` that is loaded below belongs to this
        // `start`; without the pairing the handler could test the address against the end of a mapping that had
        // the slot before.
        let start = slot.start.load(Ordering::Acquire);
        if start == 0 || address < start || address >= slot.end.load(Ordering::Relaxed) {
            continue;
        }
        slot.lost.store(true, Ordering::Relaxed);
        let page = PAGE_BYTES.load(Ordering::Relaxed);
        if cover(address / page * page, page) {
            return;
        }
    }
    // Not ours: the access happens again and meets the handler that was there before.
    if let Some(before) = BEFORE.get() {
        // SAFETY: the call restores the action that was in force before ours. The faulting access is repeated when this
        // returns, and then meets that handler, so faults that are not about our mappings keep their old behaviour.
        unsafe { libc::sigaction(libc::SIGBUS, before, std::ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_core::{RegisterAccess, RegisterBlock};
    use std::os::fd::OwnedFd;

    const PAGE: usize = 4096;

    fn file(pages: usize) -> File {
        let fd: OwnedFd = rustix::fs::memfd_create("bar", MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(fd);
        file.set_len((pages * PAGE) as u64).unwrap();
        file
    }

    fn registers(mapping: &UncachedMapping) -> RegisterBlock<'_> {
        // SAFETY: the mapping is page aligned and lives as long as the borrow.
        unsafe { RegisterBlock::from_raw(mapping.start(), mapping.len()) }
    }

    #[test]
    fn a_mapping_that_is_taken_away_reads_as_ones() {
        let file = file(4);
        let mapping = UncachedMapping::new(&file, 0, 4 * PAGE).unwrap();
        let other = UncachedMapping::new(&file, 0, PAGE).unwrap();
        let bar = registers(&mapping);
        bar.write32(0x1008, 7);
        assert_eq!(bar.read32(0x1008), 7);
        assert!(!mapping.is_lost());
        file.set_len(PAGE as u64).unwrap();
        assert_eq!(bar.read32(0), 0, "the first page is still there");
        assert!(!mapping.is_lost());
        assert_eq!(bar.read32(0x1008), u32::MAX);
        assert_eq!(bar.read64(0x3FF8), u64::MAX);
        assert!(mapping.is_lost() && !other.is_lost());
        bar.write32(0x2000, 5); // lost, and no signal
        assert_eq!(registers(&other).read32(0), 0);
    }

    #[test]
    fn a_detached_mapping_reads_as_ones_and_changes_nothing() {
        let file = file(40);
        let mapping = UncachedMapping::new(&file, PAGE as u64, 39 * PAGE).unwrap();
        let bar = registers(&mapping);
        bar.write32(4, 1);
        mapping.detach().unwrap();
        assert!(mapping.is_lost());
        for at in (0..39 * PAGE as u32).step_by(PAGE) {
            assert_eq!(bar.read32(at), u32::MAX);
        }
        bar.write32(4, 9);
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, PAGE as u64 + 4).unwrap();
        assert_eq!(bytes, [1, 0, 0, 0]);
    }

    #[test]
    fn slots_are_used_again() {
        let file = file(1);
        for _ in 0..2 * SLOTS {
            let mapping = UncachedMapping::new(&file, 0, PAGE).unwrap();
            assert!(!mapping.is_lost());
        }
    }
}
