//! The controller kernel as host threads, one for each of its warps.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::threads::join_all;
use gpu_peer::{Args, run as part};

/// Runs a launch of `warps` warps.
pub fn run(args: &Args, warps: u32) {
    std::thread::scope(|scope| {
        // SAFETY: the host vouches for the addresses.
        let start = |warp| scope.spawn(move || unsafe { part(args, warp) });
        join_all((0..warps).map(start).collect());
    });
}
