//! Memory of a caller that is registered with a GPU for as long as the registration lives.
// UNSAFETY: registers memory that the caller vouches for.
#![allow(unsafe_code)]

use super::driver::Gpu;
use super::registered::RegisteredMemory;
use nvme_driver::error::{Error, Result};
use std::sync::Arc;

/// Memory of a caller that a GPU reaches, until this is dropped.
pub struct CallerMemory {
    gpu: Arc<Gpu>,
    registered: Option<RegisteredMemory>,
}

impl CallerMemory {
    /// Registers `bytes` bytes at `start`.
    ///
    /// # Safety
    /// The words stay mapped until this is dropped, and no launch uses them afterwards.
    ///
    /// # Errors
    /// [`Error::Usage`] for no bytes; otherwise with the driver's answer, for memory that is registered already
    /// among others.
    pub unsafe fn register(gpu: &Arc<Gpu>, start: *mut u8, bytes: usize) -> Result<Self> {
        if bytes == 0 || start.is_null() {
            return Err(Error::usage("there are no bytes", "register 1 or more"));
        }
        let _guest = gpu.enter()?;
        // SAFETY: the caller keeps the conditions under `# Safety`.
        let registered = unsafe { RegisteredMemory::of_caller(gpu, start, bytes) }?;
        Ok(Self {
            gpu: Arc::clone(gpu),
            registered: Some(registered),
        })
    }
}

impl Drop for CallerMemory {
    fn drop(&mut self) {
        // If the GPU is lost, the registration is leaked, since the driver must not be called any more.
        let guest = self.gpu.enter();
        match guest {
            Ok(_guest) => drop(self.registered.take()),
            Err(_) => std::mem::forget(self.registered.take()),
        }
    }
}
