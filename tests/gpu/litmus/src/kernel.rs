//! The entry point of the litmus kernel: one launch runs one shape.
// UNSAFETY: the kernel's argument holds addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::{Args, Thread, run};
use nvme_gpu_kernel::arch;

/// Runs one launch. Any grid of blocks of 1 thread, or of a multiple of 32.
///
/// # Safety
/// Every address in `args` is what [`Args`] says.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_litmus(args: Args) {
    let thread = Thread {
        block: arch::block(),
        index: arch::thread(),
        threads: arch::block_threads(),
    };
    // SAFETY: the host vouches for the addresses.
    unsafe { run(&args, thread) };
}
