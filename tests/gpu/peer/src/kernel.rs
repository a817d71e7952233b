//! The entry point.
// UNSAFETY: the kernel's argument holds addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::{Args, run};
use nvme_gpu_kernel::arch;

/// Runs one launch: `args.warps` blocks of one warp.
///
/// # Safety
/// Every address in `args` is what [`Args`] says.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_peer(args: Args) {
    // SAFETY: the host vouches for the addresses.
    unsafe { run(&args, arch::block()) };
}
