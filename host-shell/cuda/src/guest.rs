//! Saves and restores the thread's CUDA context and capture mode around our calls into the driver. We are a guest
//! in processes that use CUDA themselves, such as PyTorch: a call of ours that left another context current would
//! make their next call fail or use the wrong GPU.
// UNSAFETY: calls into the CUDA driver library.
#![allow(unsafe_code)]

use super::driver::{Gpu, check};
use cudarc::driver::sys::{self, CUstreamCaptureMode};
use nvme_driver::error::Result;
use std::marker::PhantomData;
use std::ptr::null_mut;

/// The calling thread with our context, and without a share in captures of other threads: until this is dropped.
pub struct ContextGuard {
    pops: bool,
    mode: CUstreamCaptureMode,
    /// Context and mode are the thread's.
    _thread: PhantomData<*const ()>,
}

impl Gpu {
    /// Makes its context the calling thread's for a while. Calls that a capture in global mode forbids do not
    /// end a capture of the caller's meanwhile.
    ///
    /// # Errors
    /// [`Error::Gone`](nvme_driver::Error::Gone) after a kernel that did not end.
    pub fn enter(&self) -> Result<ContextGuard> {
        self.check_not_lost()?;
        let mut current = null_mut();
        // SAFETY: the call writes one handle.
        check("cuCtxGetCurrent", unsafe {
            sys::cuCtxGetCurrent(&mut current)
        })?;
        let pops = current != self.context();
        if pops {
            // SAFETY: the context is retained as long as this GPU is open.
            check("cuCtxPushCurrent", unsafe {
                sys::cuCtxPushCurrent_v2(self.context())
            })?;
        }
        let mut guest = ContextGuard {
            pops,
            mode: CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
            _thread: PhantomData,
        };
        // SAFETY: the call exchanges one value; `guest` puts the old one back.
        check("cuThreadExchangeStreamCaptureMode", unsafe {
            sys::cuThreadExchangeStreamCaptureMode(&mut guest.mode)
        })?;
        Ok(guest)
    }
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        // SAFETY: the call restores the previous mode; nothing can be done about a refusal.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.mode) };
        if self.pops {
            let mut ours = null_mut();
            // SAFETY: it was pushed in `enter`, by this thread.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut ours) };
        }
    }
}
