//! Memory of the caller, by address: where it lies, and its way into jobs.
// UNSAFETY: makes slices of memory that C vouches for.
#![allow(unsafe_code)]

use crate::border::{Answer, null};
use crate::opened::OpenedStore;
use crate::status::CallFailure;

/// Memory that C lends to a call until the call, or its operation, has ended.
#[derive(Clone, Copy)]
pub struct CallMemory {
    start: usize,
    bytes: usize,
}

impl CallMemory {
    /// Takes `bytes` bytes at `start`.
    ///
    /// # Safety
    /// They are there, for reads and if need be for writes, until the last use of this.
    ///
    /// # Errors
    /// Usage: NULL, or more bytes than memory can have.
    pub unsafe fn new<T>(start: *const T, bytes: usize, what: &str) -> Answer<Self> {
        if start.is_null() && bytes > 0 {
            return Err(null(what));
        }
        let end = start.addr().checked_add(bytes);
        if isize::try_from(bytes).is_err() || end.is_none() {
            return Err(CallFailure::usage(
                format!("{bytes} bytes at {what} are more than memory has"),
                "check the length",
            ));
        }
        Ok(Self {
            start: start.expose_provenance(),
            bytes,
        })
    }

    /// Takes `count` elements of `size` bytes at `start`.
    ///
    /// # Safety
    /// As [`new`](Self::new).
    pub unsafe fn elements<T>(
        start: *const T,
        count: u64,
        size: usize,
        what: &str,
    ) -> Answer<Self> {
        let count = usize::try_from(count).ok();
        let bytes = count.and_then(|count| count.checked_mul(size));
        // SAFETY: the caller's; as many bytes as an `isize` cannot count are refused.
        unsafe { Self::new(start, bytes.unwrap_or(usize::MAX), what) }
    }

    pub fn address(&self) -> u64 {
        self.start as u64
    }

    /// Returns the length in bytes.
    pub fn length(&self) -> usize {
        self.bytes
    }

    /// Returns the bytes, to be read.
    ///
    /// # Safety
    /// As [`new`](Self::new) says, and nothing writes them meanwhile.
    pub unsafe fn bytes<'a>(&self) -> &'a [u8] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: the caller's.
        unsafe {
            std::slice::from_raw_parts(std::ptr::with_exposed_provenance(self.start), self.bytes)
        }
    }

    /// Returns the bytes, to be written.
    ///
    /// # Safety
    /// As [`new`](Self::new) says, and nothing else uses them meanwhile.
    pub unsafe fn bytes_mut<'a>(&self) -> &'a mut [u8] {
        if self.bytes == 0 {
            return &mut [];
        }
        // SAFETY: the caller's.
        unsafe {
            std::slice::from_raw_parts_mut(
                std::ptr::with_exposed_provenance_mut(self.start),
                self.bytes,
            )
        }
    }
}

/// Location of memory of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallLocation {
    Host,
    /// GPU memory of the store's GPU.
    Gpu,
}

/// Returns the location of `memory`, for a store.
pub fn place(opened: &OpenedStore, memory: &CallMemory, what: &str) -> Answer<CallLocation> {
    #[cfg(feature = "cuda")]
    if let Some(gpu) = &opened.gpu {
        use nvme_host::cuda::MemoryLocation;
        return match gpu.place_of(memory.address())? {
            // The memory of a graph is known to nobody while it is captured: the launch judges it.
            MemoryLocation::Host if !nvme_host::cuda::is_host_memory(memory.address()) => {
                Ok(CallLocation::Gpu)
            }
            MemoryLocation::Host | MemoryLocation::Pinned => Ok(CallLocation::Host),
            MemoryLocation::Gpu => Ok(CallLocation::Gpu),
            MemoryLocation::OtherGpu => Err(CallFailure::usage(
                format!("{what} lies in memory of another GPU"),
                "use memory of the GPU that the store was opened with",
            )),
        };
    }
    let _ = (opened, memory, what);
    Ok(CallLocation::Host)
}
