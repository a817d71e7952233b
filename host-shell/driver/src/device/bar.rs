//! The doorbells of a controller, mapped into this process: finds a queue's doorbells by CAP.DSTRD, and checks that the
//! mapping contains them. A write to a doorbell is the only access of the I/O path to the device.
// UNSAFETY: doorbells are raw pointers into memory of the device, or into a file that is mapped here.
#![allow(unsafe_code)]

#[cfg(feature = "vfio-user")]
use crate::dma::pages::map_shared;
use crate::error::{Error, Result};
use nvme_core::mem::DoorbellRegister;
use nvme_core::spec::Qid;
use nvme_core::spec::register::{cq_head_doorbell, offset, sq_tail_doorbell};
#[cfg(feature = "vfio-user")]
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU32;

/// A mapped stretch of doorbells: BAR0 from 1000h on, or the memory that a simulator polls.
#[derive(Clone, Copy, Debug)]
pub struct DoorbellMap {
    start: *mut u32,
    bytes: usize,
}

impl DoorbellMap {
    /// Describes `bytes` bytes of doorbells from `start` on.
    ///
    /// # Safety
    /// `start` is 4-byte aligned and stays valid for volatile 32-bit accesses to `bytes` bytes for as
    /// long as the [`Device`](crate::device::Device) that hands out this map.
    pub unsafe fn new(start: *mut u32, bytes: usize) -> Self {
        Self { start, bytes }
    }

    /// Returns the memory that an embedded simulator polls.
    #[cfg(feature = "sim")]
    pub(crate) fn of_simulator(doorbells: &nvme_sim::Doorbells) -> Self {
        let start = doorbells.as_ptr().cast_mut().cast::<u32>();
        // SAFETY: the words are page-aligned atomics of that many bytes, which the device keeps as long as it lives.
        unsafe { Self::new(start, doorbells.bytes()) }
    }

    /// Returns the first `words` words that a [`DoorbellRelay`](crate::device::relay::DoorbellRelay) passes on; it
    /// keeps them as long as it lives.
    pub(crate) fn of_words(pages: &[DoorbellPage], words: usize) -> Self {
        let start = pages.as_ptr().cast_mut().cast::<u32>();
        // SAFETY: the words are page-aligned atomics of that many bytes, which the device keeps as long as it lives.
        unsafe { Self::new(start, size_of_val(pages).min(words * 4)) }
    }

    /// Address of the first doorbell.
    #[cfg(feature = "cuda")]
    pub fn start(self) -> *mut u32 {
        self.start
    }

    /// Returns the length in bytes.
    #[cfg(feature = "cuda")]
    pub fn bytes(self) -> usize {
        self.bytes
    }

    /// Address of the doorbell at `register` of BAR0.
    #[cfg(feature = "cuda")]
    pub(crate) fn address(self, register: u32) -> u64 {
        self.start.addr() as u64 + u64::from(register - offset::DOORBELLS)
    }

    /// Returns the tail and head doorbell of queue `qid`, valid while the device is: see
    /// [`OwnedPair`](crate::dma::OwnedPair).
    pub(crate) fn pair(
        self,
        qid: Qid,
        dstrd: u8,
    ) -> Result<(DoorbellRegister<'static>, DoorbellRegister<'static>)> {
        Ok((
            self.one(sq_tail_doorbell(qid.0, dstrd))?,
            self.one(cq_head_doorbell(qid.0, dstrd))?,
        ))
    }

    fn one(self, register: u32) -> Result<DoorbellRegister<'static>> {
        let at = (register - offset::DOORBELLS) as usize;
        if at + 4 > self.bytes {
            return Err(Error::device(
                format!(
                    "doorbell at {register:#x} lies past the {} mapped bytes",
                    self.bytes
                ),
                "use fewer queues",
            ));
        }
        // SAFETY: the doorbell lies inside the mapped doorbells, as checked above. The queue pair that rings it
        // keeps the device alive, and with it the mapping, so the pointer never outlives the memory.
        Ok(unsafe { DoorbellRegister::from_raw(self.start.wrapping_byte_add(at)) })
    }
}

/// A doorbell word that holds nothing to pass on. No queue has that many entries.
pub const NONE: u32 = u32::MAX;

/// Words in a page.
pub(super) const PAGE_WORDS: usize = 16 << 10;
/// One page of doorbell words, of 64 KiB: the largest page of a machine. A GPU's driver registers whole pages, and each
/// once, so that two relays share none.
#[repr(C, align(65536))]
pub struct DoorbellPage(pub(super) [AtomicU32; PAGE_WORDS]);

impl DoorbellPage {
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU32::new(NONE)))
    }
}

/// A part of a file that another process reads, mapped until it is dropped.
#[cfg(feature = "vfio-user")]
pub(crate) struct MappedFile {
    start: std::ptr::NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread.
#[cfg(feature = "vfio-user")]
unsafe impl Send for MappedFile {}
// SAFETY: shared references give doorbells only, which are atomics.
#[cfg(feature = "vfio-user")]
unsafe impl Sync for MappedFile {}

#[cfg(feature = "vfio-user")]
impl MappedFile {
    /// Maps `bytes` bytes of `file` from `offset` on, a multiple of the page size, for reads and writes.
    pub(crate) fn new(file: BorrowedFd<'_>, offset: u64, bytes: usize) -> std::io::Result<Self> {
        let start = map_shared(file, offset, bytes)?;
        Ok(Self { start, bytes })
    }

    /// Returns the bytes from `at` to the end, as doorbells.
    pub(crate) fn doorbells(&self, at: usize) -> DoorbellMap {
        let at = at.min(self.bytes) / 4 * 4;
        let start = self.start.as_ptr().wrapping_add(at).cast();
        // SAFETY: the range is aligned to 4 bytes and inside the mapping. The mapping lives as long as the device
        // that owns this, and every holder of a doorbell keeps that device alive.
        unsafe { DoorbellMap::new(start, self.bytes - at) }
    }
}

#[cfg(feature = "vfio-user")]
impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: this is our own mapping. It is dropped with the device, and queue pairs keep the device alive, so no
        // doorbell of it can be rung any more; a stale one would write to unrelated memory.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
