//! Memory of a caller: where it lies, and its registration.
// UNSAFETY: asks the driver about addresses, and registers memory that the caller vouches for.
#![allow(unsafe_code)]

use super::driver::{Gpu, check};
use super::registered::Registered;
use crate::error::{Error, Result};
use cudarc::driver::sys::{self, CUmemorytype, CUpointer_attribute as Attribute, CUresult};
use std::sync::Arc;

/// Where memory lies, as the driver knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In host memory that GPUs do not reach.
    Host,
    /// In host memory that was allocated by the driver, or registered with it.
    Pinned,
    /// In memory of this GPU, or managed memory.
    Gpu,
    /// In memory of another GPU.
    OtherGpu,
}

impl Gpu {
    /// Where the byte at `address` lies. Any address may be asked about; nothing is read there.
    ///
    /// # Errors
    /// [`Error::Environment`] with the driver's answer.
    pub fn place_of(&self, address: u64) -> Result<Place> {
        let _guest = self.enter()?;
        let ask = |what: Attribute| -> Result<Option<u32>> {
            let mut value = 0u64;
            // SAFETY: writes one integer of 32 bits, for which there is room.
            let answer =
                unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), what, address) };
            if answer == CUresult::CUDA_ERROR_INVALID_VALUE {
                return Ok(None);
            }
            check("cuPointerGetAttribute", answer)?;
            Ok(Some(value as u32))
        };
        let Some(kind) = ask(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE)? else {
            return Ok(Place::Host);
        };
        if ask(Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED)?.is_some_and(|value| value as u8 != 0) {
            return Ok(Place::Gpu);
        }
        if kind != CUmemorytype::CU_MEMORYTYPE_DEVICE as u32 {
            return Ok(Place::Pinned);
        }
        let ordinal = ask(Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)?;
        Ok(match ordinal == Some(self.index()) {
            true => Place::Gpu,
            false => Place::OtherGpu,
        })
    }
}

/// Memory of a caller that a GPU reaches, until this is dropped.
pub struct CallerMemory {
    gpu: Arc<Gpu>,
    registered: Option<Registered>,
}

impl CallerMemory {
    /// Registers `bytes` bytes at `start`.
    ///
    /// # Safety
    /// They stay mapped until this is dropped, and no launch uses them afterwards.
    ///
    /// # Errors
    /// [`Error::Usage`] for no bytes; otherwise with the driver's answer, for memory that is registered already
    /// among others.
    pub unsafe fn register(gpu: &Arc<Gpu>, start: *mut u8, bytes: usize) -> Result<Self> {
        if bytes == 0 || start.is_null() {
            return Err(Error::usage("there are no bytes", "register 1 or more"));
        }
        let _guest = gpu.enter()?;
        // SAFETY: the caller's.
        let registered = unsafe { Registered::of_caller(gpu, start, bytes) }?;
        Ok(Self {
            gpu: Arc::clone(gpu),
            registered: Some(registered),
        })
    }
}

impl Drop for CallerMemory {
    fn drop(&mut self) {
        // A GPU that is lost keeps the registration: nothing is called then.
        let guest = self.gpu.enter();
        match guest {
            Ok(_guest) => drop(self.registered.take()),
            Err(_) => std::mem::forget(self.registered.take()),
        }
    }
}
