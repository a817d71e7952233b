//! Host memory that the GPU can access: registered pages, doorbells and other I/O memory.
//!
//! Invariant: memory stays mapped in this process until its registration has ended; each registration keeps the
//! owner of its memory alive.
// UNSAFETY: registrations and copies take raw addresses.
#![allow(unsafe_code)]

use super::driver::{Gpu, check};
use cudarc::driver::sys::{self, CUresult};
use nvme_driver::device::Device;
use nvme_driver::device::relay::DoorbellRelay;
use nvme_driver::device::ring_memory::RingMemory;
use nvme_driver::dma::pages::{DmaPages, host_page};
use nvme_driver::error::{Error, Result};
use std::any::Any;
use std::sync::Arc;

/// Piece sizes in bytes that are tried in turn, if the driver does not register a range as a whole.
const PIECES: [usize; 6] = [64 << 30, 8 << 30, 1 << 30, 64 << 20, 4 << 20, 256 << 10];

/// Memory of the host's side that the GPU reaches; no longer after drop.
pub struct RegisteredMemory {
    gpu: Arc<Gpu>,
    host: *mut u8,
    bytes: usize,
    address: u64,
    io: bool,
    /// Adjacent registrations; none for memory that the driver allocated.
    pieces: Vec<(*mut u8, usize)>,
    owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: a registration belongs to the process, not to a thread.
unsafe impl Send for RegisteredMemory {}
// SAFETY: shared references give addresses only; the memory behind them is accessed by volatile
// operations, atomics or the GPU, never through this type. A plain reference would promise that
// nothing else writes there.
unsafe impl Sync for RegisteredMemory {}

/// Keeps a device, which is no `Any`.
struct KeptDevice<T: ?Sized>(#[allow(dead_code, reason = "held for its drop")] Arc<T>);

impl RegisteredMemory {
    /// Registers `pages`: of this process, or of a file that another process maps too.
    ///
    /// # Errors
    /// [`Error::Device`] with the driver's answer.
    pub fn pages(gpu: &Arc<Gpu>, pages: &Arc<DmaPages>) -> Result<Self> {
        let owner = Arc::clone(pages);
        // SAFETY: the pages are mapped as long as `owner` lives.
        unsafe { Self::new(gpu, pages.start(), pages.len(), false, owner) }
    }

    /// True if copies between its memory and the GPU's may span any part: they may not cross registrations.
    pub(super) fn is_one_piece(&self) -> bool {
        self.pieces.len() <= 1
    }

    /// Registers the mapped doorbells of `device`: as memory if they are memory (simulator, vfio-user), else as I/O
    /// memory (a BAR).
    ///
    /// # Errors
    /// [`Error::Device`] when the driver can do neither.
    pub fn doorbells(gpu: &Arc<Gpu>, device: &Arc<dyn Device>) -> Result<Self> {
        let map = device.doorbells();
        let start = map.start().cast::<u8>();
        let before = start.addr() % host_page();
        let start = start.wrapping_sub(before);
        let bytes = (map.bytes() + before).next_multiple_of(host_page());
        let owner = Arc::new(KeptDevice(Arc::clone(device)));
        // SAFETY: mappings are whole pages, and this one lives as long as the device, which the registration
        // holds. Registering unmapped pages would let the GPU write to memory that something else maps later.
        let registered = unsafe { Self::of_device(gpu, (start, bytes), owner, DOORBELLS) };
        Ok(registered?.skip(before))
    }

    /// Registers memory of the controller or of a peer in which rings lie.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver can map the memory neither as host memory nor as a BAR.
    pub fn ring_memory(gpu: &Arc<Gpu>, memory: &Arc<RingMemory>) -> Result<Self> {
        // SAFETY: the mapping is whole pages, which stay mapped as long as `memory` lives.
        unsafe { Self::of_device(gpu, memory.mapping(), Arc::clone(memory) as _, RINGS) }
    }

    /// Registers memory of a device that may be host memory or a BAR. `what` has the name and the alternative,
    /// for the error.
    ///
    /// # Safety
    /// As of [`new`](Self::new).
    unsafe fn of_device(
        gpu: &Arc<Gpu>,
        (start, bytes): (*mut u8, usize),
        owner: Arc<dyn Any + Send + Sync>,
        what: (&str, &str),
    ) -> Result<Self> {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        let as_memory = unsafe { Self::new(gpu, start, bytes, false, Arc::clone(&owner)) };
        as_memory.or_else(|first| {
            // SAFETY: the caller keeps the conditions under `# Safety`.
            let as_io = unsafe { Self::new(gpu, start, bytes, true, owner) };
            as_io.map_err(|second| refused_bar(what, &first, &second))
        })
    }

    /// Registers the doorbell words of `relay`.
    ///
    /// # Errors
    /// [`Error::Device`] with the driver's answer.
    pub fn relay(gpu: &Arc<Gpu>, relay: &Arc<DoorbellRelay>) -> Result<Self> {
        let words = relay.words();
        let start = words.as_ptr().cast_mut().cast();
        // SAFETY: the words are page-aligned, live as long as the relay, and are reached through atomics.
        unsafe {
            Self::new(
                gpu,
                start,
                size_of_val(words),
                false,
                Arc::clone(relay) as _,
            )
        }
    }

    /// Registers the pages that hold `bytes` bytes at `address`.
    ///
    /// # Safety
    /// The pages stay mapped for as long as `owner` lives.
    #[cfg(feature = "sim")]
    pub(super) unsafe fn image(
        gpu: &Arc<Gpu>,
        address: usize,
        bytes: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        let before = address % host_page();
        let start = std::ptr::with_exposed_provenance_mut(address - before);
        let bytes = (bytes + before).next_multiple_of(host_page());
        // SAFETY: mappings are whole pages; the caller vouches for these.
        unsafe { Self::new(gpu, start, bytes, false, owner) }
    }

    /// Registers memory of a caller.
    ///
    /// # Safety
    /// The bytes stay mapped until this is dropped.
    pub(super) unsafe fn of_caller(gpu: &Arc<Gpu>, start: *mut u8, bytes: usize) -> Result<Self> {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { Self::new(gpu, start, bytes, false, Arc::new(())) }
    }

    /// Returns the GPU's view of `pages`, which the driver allocated.
    ///
    /// # Errors
    /// [`Error::Environment`] with the driver's answer.
    pub(super) fn of_driver(gpu: &Arc<Gpu>, pages: &Arc<DmaPages>) -> Result<Self> {
        let _guest = gpu.enter()?;
        Ok(Self {
            gpu: Arc::clone(gpu),
            host: pages.start(),
            bytes: pages.len(),
            address: mapped(pages.start())?,
            io: false,
            pieces: Vec::new(),
            owner: Arc::clone(pages) as _,
        })
    }

    /// # Safety
    /// `bytes` bytes at `host` stay mapped for as long as `owner` lives.
    unsafe fn new(
        gpu: &Arc<Gpu>,
        host: *mut u8,
        bytes: usize,
        io: bool,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        let _guest = gpu.enter()?;
        let flags = sys::CU_MEMHOSTREGISTER_DEVICEMAP
            | sys::CU_MEMHOSTREGISTER_PORTABLE
            | if io {
                sys::CU_MEMHOSTREGISTER_IOMEMORY
            } else {
                0
            };
        let mut registered = Self {
            gpu: Arc::clone(gpu),
            host,
            bytes,
            address: 0,
            io,
            pieces: Vec::new(),
            owner,
        };
        // SAFETY: the caller vouches for the range.
        let mut answer = unsafe { registered.register(bytes, flags) };
        let is_limit = |answer| {
            use CUresult as R;
            matches!(
                answer,
                R::CUDA_ERROR_INVALID_VALUE | R::CUDA_ERROR_OUT_OF_MEMORY
            )
        };
        for piece in PIECES.into_iter().filter(|piece| *piece < bytes) {
            if !io && is_limit(answer) {
                // SAFETY: as above.
                answer = unsafe { registered.register(piece, flags) };
            }
        }
        check("cuMemHostRegister", answer)?;
        registered.address = mapped(host)?;
        for (start, _) in &registered.pieces {
            let offset = start.addr() - host.addr();
            if mapped(*start)? != registered.address + offset as u64 {
                return Err(Error::environment(
                    "the GPU has parts of memory that was registered in parts at addresses apart",
                    "use less memory at a time",
                ));
            }
        }
        Ok(registered)
    }

    /// Registers the whole range, `piece` bytes at a time, or nothing; returns the driver's answer.
    ///
    /// # Safety
    /// As [`new`](Self::new).
    unsafe fn register(&mut self, piece: usize, flags: u32) -> CUresult {
        for first in (0..self.bytes).step_by(piece.max(1)) {
            let (start, bytes) = (self.host.wrapping_add(first), piece.min(self.bytes - first));
            // SAFETY: the caller vouches for the range.
            let answer = unsafe { sys::cuMemHostRegister_v2(start.cast(), bytes, flags) };
            if answer != CUresult::CUDA_SUCCESS {
                self.unregister();
                return answer;
            }
            self.pieces.push((start, bytes));
        }
        CUresult::CUDA_SUCCESS
    }

    /// Takes every registration back, in this GPU's context.
    fn unregister(&mut self) {
        for (start, _) in self.pieces.drain(..) {
            // SAFETY: it was registered in `register`, and unregistered once. A refusal means that the context is gone,
            // and with it the registration, so the pages can be unmapped in either case.
            let _ = unsafe { sys::cuMemHostUnregister(start.cast()) };
        }
    }

    /// Returns the GPU's address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// True if the memory is I/O memory: a BAR.
    pub fn is_io(&self) -> bool {
        self.io
    }

    /// Returns the GPU's address of the byte that the host has at `host`.
    ///
    /// # Errors
    /// [`Error::Device`] when it is not inside.
    pub fn translate(&self, host: u64) -> Result<u64> {
        let offset = host.wrapping_sub(self.host.addr() as u64);
        if offset < self.bytes as u64 {
            Ok(self.address + offset)
        } else {
            Err(Error::internal(format!(
                "address {host:#x} is not registered with the GPU"
            )))
        }
    }

    /// Returns the same registration without its first `bytes` bytes.
    fn skip(mut self, bytes: usize) -> Self {
        self.address += bytes as u64;
        self
    }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        let gpu = Arc::clone(&self.gpu);
        let Ok(_guest) = gpu.enter() else {
            // A kernel that did not end may still use the memory, so that it is leaked.
            std::mem::forget(Arc::clone(&self.owner));
            return;
        };
        self.unregister();
    }
}

/// Returns the address by which the GPU of the current context reaches memory that is registered or the
/// driver's.
fn mapped(host: *mut u8) -> Result<u64> {
    let mut address = 0;
    // SAFETY: the call writes one address.
    check("cuMemHostGetDevicePointer", unsafe {
        sys::cuMemHostGetDevicePointer_v2(&mut address, host.cast(), 0)
    })?;
    Ok(address)
}

/// Memory that the driver may refuse to register, and the option that avoids it.
const DOORBELLS: (&str, &str) = ("the doorbells", "use --tier 0, which needs no such mapping");
const RINGS: (&str, &str) = ("the controller's memory", "use --rings host");

fn refused_bar((what, remedy): (&str, &str), as_memory: &Error, as_io: &Error) -> Error {
    Error::environment(
        format!(
            "the driver maps {what} neither as memory ({as_memory}) nor as I/O memory ({as_io}); \
             drivers from 550.54 on cannot register a PCI BAR since the kernel dropped follow_pfn"
        ),
        remedy,
    )
}
