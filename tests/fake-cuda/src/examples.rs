//! The kernels of `nvme-gpu-kernel/examples`, whose source the lanes of a launch run, and one that does nothing.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::rows::run;
use gpu_histogram::{Args, Walk, kernel, walk as walks};

/// The symbols.
pub const NAMES: [&std::ffi::CStr; 3] = [c"histogram", c"walk", c"nothing"];

/// Counts the bytes of units.
pub fn histogram(args: Args, blocks: u32, threads: u32) {
    // SAFETY: the host vouches for the addresses in the parameter.
    run((blocks, threads, 0), move || unsafe { kernel::run(&args) });
}

/// Walks from row to row.
pub fn walk(walk: Walk, blocks: u32, threads: u32) {
    // SAFETY: the host vouches for the addresses in the parameter.
    run((blocks, threads, 0), move || unsafe { walks::run(&walk) });
}
