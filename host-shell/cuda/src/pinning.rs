//! Pinned host memory for a GPU: it is registered with the driver, or allocated by the driver if that registers none,
//! as under confidential computing.
// UNSAFETY: allocates and frees memory of the driver.
#![allow(unsafe_code)]

use super::driver::{Gpu, check};
use super::registered::RegisteredMemory;
use cudarc::driver::sys;
use nvme_driver::dma::pages::DmaPages;
use nvme_driver::error::{Error, Result};
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// Ability of a driver to make host memory accessible to the GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostPinning {
    /// The driver registers host memory.
    Registers,
    /// The driver registers no memory, for this reason, and allocates memory that the GPU can access.
    Allocates(String),
    /// The driver does neither, for these reasons.
    Refuses(String),
}

impl Gpu {
    /// Determines by a small allocation how the driver pins memory.
    ///
    /// # Errors
    /// Without memory of the host.
    pub fn pinning(self: &Arc<Self>) -> Result<HostPinning> {
        let pages = Arc::new(DmaPages::new(1)?);
        let Err(refusal) = RegisteredMemory::pages(self, &pages) else {
            return Ok(HostPinning::Registers);
        };
        Ok(match allocate(self, 1) {
            Ok(_) => HostPinning::Allocates(refusal.to_string()),
            Err(second) => HostPinning::Refuses(format!("{refusal}; {second}")),
        })
    }

    /// Checks that the GPU can access some memory of the host.
    ///
    /// # Errors
    /// [`Error::Environment`] with the driver's answers, if it cannot.
    pub fn check_pins(self: &Arc<Self>) -> Result<HostPinning> {
        match self.pinning()? {
            HostPinning::Refuses(reason) => Err(Error::environment(
                format!(
                    "GPU {} can be given no memory of the host: {reason}",
                    self.index()
                ),
                "open it without a GPU, or see `dmesg` for messages of the NVIDIA driver",
            )),
            pinning => Ok(pinning),
        }
    }
}

impl RegisteredMemory {
    /// Allocates at least `bytes` zeroed bytes of this process that `gpu` can access: registered in
    /// one piece, or allocated by the driver if it registers no memory or not as much.
    ///
    /// # Errors
    /// [`Error::Environment`] with both answers of the driver.
    pub fn pinned(gpu: &Arc<Gpu>, bytes: usize) -> Result<(Arc<DmaPages>, Self)> {
        pinned(gpu, bytes)
    }
}

/// Does the same as [`RegisteredMemory::pinned`].
///
/// # Errors
/// [`Error::Environment`] with both answers.
fn pinned(gpu: &Arc<Gpu>, bytes: usize) -> Result<(Arc<DmaPages>, RegisteredMemory)> {
    let pages = Arc::new(DmaPages::new(bytes)?);
    let refusal = match RegisteredMemory::pages(gpu, &pages) {
        Ok(registered) if registered.is_one_piece() => return Ok((pages, registered)),
        Ok(_) => Error::environment(
            format!("the driver registers no {bytes} bytes at once"),
            "use less memory at a time",
        ),
        Err(error) => error,
    };
    allocate(gpu, bytes).map_err(|second| {
        let remedy = second.remedy().to_owned();
        Error::environment(format!("{refusal}; {second}"), remedy)
    })
}

/// Allocates at least `bytes` zeroed bytes of driver memory.
fn allocate(gpu: &Arc<Gpu>, bytes: usize) -> Result<(Arc<DmaPages>, RegisteredMemory)> {
    let _guest = gpu.enter()?;
    let bytes = bytes.max(1);
    let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
    let mut raw: *mut c_void = null_mut();
    // SAFETY: the call writes one address.
    check("cuMemHostAlloc", unsafe {
        sys::cuMemHostAlloc(&mut raw, bytes, flags)
    })?;
    let start = NonNull::new(raw.cast::<u8>()).ok_or_else(|| Error::internal("no memory"))?;
    let memory = DriverMemory {
        gpu: Arc::clone(gpu),
        start,
    };
    // SAFETY: the same number of bytes, which nothing else has.
    unsafe { start.as_ptr().write_bytes(0, bytes) };
    let pages = Arc::new(DmaPages::foreign(start, bytes, memory));
    let registered = RegisteredMemory::of_driver(gpu, &pages)?;
    Ok((pages, registered))
}

/// Memory that the driver allocated. Freed on drop.
struct DriverMemory {
    gpu: Arc<Gpu>,
    start: NonNull<u8>,
}

impl std::fmt::Debug for DriverMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("DriverMemory").field(&self.start).finish()
    }
}

// SAFETY: the memory belongs to the process, not to a thread; this only frees it.
unsafe impl Send for DriverMemory {}
// SAFETY: as above.
unsafe impl Sync for DriverMemory {}

impl Drop for DriverMemory {
    fn drop(&mut self) {
        // A kernel that did not end may still use the memory: it is leaked then.
        if let Ok(_guest) = self.gpu.enter() {
            // SAFETY: it was allocated in `allocate`, and freed once, after the last owner of the pages is gone:
            // neither a registration nor a device mapping of them exists any more.
            let _ = unsafe { sys::cuMemFreeHost(self.start.as_ptr().cast()) };
        }
    }
}
