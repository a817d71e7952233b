//! Kernels that compute with what their warps read, and those of lookup tables: the lanes of a launch run the kernels' own
//! source in the host thread of the stream.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::compute::Run;
use crate::rows::{LaunchShape, run};
use nvme_compute_kernel::{entries, kernel};
use std::ffi::{CStr, c_void};
use std::sync::Arc;

/// Defines a function that returns a launch of the kernel with this name, if it is one of those listed.
macro_rules! launches {
    ($($name:ident $entry:ident;)+) => {
        /// Returns a launch of the kernel `name`.
        ///
        /// # Safety
        /// `parameters` holds the address of the kernel's argument.
        pub unsafe fn launch(
            name: &CStr,
            parameters: *mut *mut c_void,
            shape: LaunchShape,
        ) -> Option<Run> {
            $(
                if name.to_bytes() == kernel::$name.as_bytes() {
                    // SAFETY: this function's caller vouches for the argument.
                    let argument = unsafe { argument_of(entries::$entry, parameters) };
                    return Some(Arc::new(move || {
                        // SAFETY: the host vouches for the addresses in the argument.
                        run(shape, move || unsafe { entries::$entry(argument) });
                    }));
                }
            )+
            None
        }
    };
}

launches! {
    GEMV_STREAMED nvme_gemv_streamed;
    GEMV_GATHERED nvme_gemv_gathered;
    GEMM nvme_gemm;
    GEMM_CLEAR nvme_gemm_clear;
    GEMM_STREAMED nvme_gemm_streamed;
    ATTENTION_PAGED nvme_attention_paged;
    ATTENTION_JOIN nvme_attention_join;
    SEARCH nvme_search;
    NGRAM_ROWS nvme_ngram_rows;
    NGRAM_COMMIT nvme_ngram_commit;
}

/// Returns the argument of a launch of `entry`.
///
/// # Safety
/// `parameters` holds its address.
unsafe fn argument_of<T: Copy>(_entry: unsafe fn(T), parameters: *mut *mut c_void) -> T {
    // SAFETY: this function's caller vouches for the argument.
    unsafe { **parameters.cast::<*const T>() }
}
