//! Many copies in one call: cuMemcpyBatchAsync, which drivers for CUDA 12.8 and later have.
//!
//! The function is looked up by name, because the bindings are those of the oldest driver that is supported.
// UNSAFETY: a function of the driver library by its address.
#![allow(unsafe_code)]

use cudarc::driver::sys::{self, CUresult, CUstream};
use std::ptr::null_mut;

/// CUDA version of this interface; the function is looked up under its name and this number.
const VERSION: i32 = 12_080;
/// CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: a source is read when the stream reaches the copy.
const IN_STREAM_ORDER: i32 = 1;

/// CUmemcpyAttributes. The locations stay unset, so that the driver finds out where source and target lie.
#[repr(C)]
struct CopyAttributes {
    order: i32,
    from: [i32; 2],
    to: [i32; 2],
    flags: u32,
}

type Call = unsafe extern "C" fn(
    to: *mut u64,
    from: *mut u64,
    bytes: *mut usize,
    count: usize,
    attributes: *mut CopyAttributes,
    first_with: *mut usize,
    attributes_count: usize,
    failed: *mut usize,
    stream: CUstream,
) -> CUresult;

/// The driver's function.
#[derive(Clone, Copy, Debug)]
pub(super) struct BatchCopy(Call);

impl BatchCopy {
    /// Looks the function up in the driver library, which is loaded.
    pub fn find() -> Option<Self> {
        let mut found = null_mut();
        let mut why = sys::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS;
        // SAFETY: a terminated name; the call writes one address and one code.
        let answer = unsafe {
            sys::cuGetProcAddress_v2(
                c"cuMemcpyBatchAsync".as_ptr(),
                &mut found,
                VERSION,
                0,
                &mut why,
            )
        };
        if answer != CUresult::CUDA_SUCCESS || found.is_null() {
            return None;
        }
        // SAFETY: the driver returned this address for the name and version, so it has the signature of CUDA
        // 12.8. A wrong signature would corrupt the stack, which is why both are requested together.
        Some(Self(unsafe {
            std::mem::transmute::<*mut std::ffi::c_void, Call>(found)
        }))
    }

    /// Puts one copy for each entry of the lists into `stream`: GPU address, host address, bytes.
    ///
    /// # Safety
    /// The lists have the same number of entries; both ranges of each entry stay valid until the stream has passed the
    /// copy; a context is current and `stream` belongs to it.
    pub unsafe fn copy(
        &self,
        to: &mut [u64],
        from: &mut [u64],
        bytes: &mut [usize],
        stream: CUstream,
    ) -> CUresult {
        let mut attributes = CopyAttributes {
            order: IN_STREAM_ORDER,
            from: [0; 2],
            to: [0; 2],
            flags: 0,
        };
        let (mut first, mut failed) = (0, 0);
        // SAFETY: the lists hold `count` entries each and the attributes apply from the first one on; the caller
        // vouches for the ranges.
        unsafe {
            (self.0)(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                bytes.as_mut_ptr(),
                bytes.len(),
                &mut attributes,
                &mut first,
                1,
                &mut failed,
                stream,
            )
        }
    }
}
