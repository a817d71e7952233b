//! The litmus kernel as host threads, one for each of its threads with a role.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::fault;
use crate::threads::join_all;
use gpu_litmus::{Args, Shape, Thread, run as part};

/// Runs a launch of `grid` blocks of `threads` threads. Blocks that would only make traffic do not run;
/// of blocks that act together one thread does everybody's part.
pub fn run(args: &Args, grid: u32, threads: u32) {
    let torn = fault("torn");
    if torn {
        for instance in 0..args.instances {
            let y = args.y + u64::from(instance) * u64::from(args.stride);
            // SAFETY: location y of an instance, which is not used yet.
            unsafe { (y as usize as *mut u32).write(args.iterations) };
        }
    }
    let together = |shape| args.shape == shape as u32;
    let first = args.roles & 1 != 0;
    std::thread::scope(|scope| {
        let mut running = Vec::new();
        for block in 0..grid.min(args.blocks * args.roles.count_ones()) {
            if torn && block < args.blocks {
                continue;
            }
            let alone =
                together(Shape::Barrier) || together(Shape::Lanes) && first && block < args.blocks;
            for index in 0..if alone { 1 } else { threads } {
                let thread = Thread {
                    block,
                    index,
                    threads,
                };
                // SAFETY: the host vouches for the addresses.
                running.push(scope.spawn(move || unsafe { part(args, thread) }));
            }
        }
        join_all(running);
    });
}
