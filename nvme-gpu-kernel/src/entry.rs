//! The entry points of the kernels that drive queues: workloads of the demo, the benchmark and the tests.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::groups::{WholeBlock, WholeWarp};
use crate::owned::drive;
use crate::shared::sharing;
use crate::work::LaunchArguments;
use nvme_core::group::LoneThread;

entry! {
    /// Drives queues by one thread each: grid = queues, blocks of one thread.
    ///
    /// # Safety
    /// Every address in `launch` is valid as [`LaunchArguments`] documents; the queues exist on the controller and
    /// nothing else uses them.
    pub unsafe fn nvme_owner(launch: LaunchArguments) {
        drive::<LoneThread, 1, 1, false>(&launch, LoneThread, arch::block());
    }
}

entry! {
    /// Drives queues by one warp each: grid = queues, blocks of 32 threads.
    ///
    /// # Safety
    /// As [`nvme_owner`].
    pub unsafe fn nvme_warp(launch: LaunchArguments) {
        drive::<WholeWarp, 4, 8, false>(&launch, WholeWarp, arch::block());
    }
}

entry! {
    /// Does the same as [`nvme_owner`], and records events at `launch.trace`.
    ///
    /// # Safety
    /// As [`nvme_owner`].
    pub unsafe fn nvme_owner_traced(launch: LaunchArguments) {
        drive::<LoneThread, 1, 1, true>(&launch, LoneThread, arch::block());
    }
}

entry! {
    /// Does the same as [`nvme_warp`], and records events at `launch.trace`.
    ///
    /// # Safety
    /// As [`nvme_owner`].
    pub unsafe fn nvme_warp_traced(launch: LaunchArguments) {
        drive::<WholeWarp, 1, 1, true>(&launch, WholeWarp, arch::block());
    }
}

entry! {
    /// Drives queues by one block each: grid = queues, blocks of a multiple of 32 threads.
    ///
    /// # Safety
    /// As [`nvme_owner`].
    pub unsafe fn nvme_block(launch: LaunchArguments) {
        drive::<WholeBlock, 2, 2, false>(&launch, WholeBlock::here(), arch::block());
    }
}

entry! {
    /// Does the same as [`nvme_block`], and records events at `launch.trace`.
    ///
    /// # Safety
    /// As [`nvme_owner`].
    pub unsafe fn nvme_block_traced(launch: LaunchArguments) {
        drive::<WholeBlock, 1, 1, true>(&launch, WholeBlock::here(), arch::block());
    }
}

entry! {
    /// Drives queues that all threads share: thread t uses queue (t / 32) mod `queue_count`, and command i
    /// belongs to thread i mod (active threads). `launch.lanes` lanes of each warp are active; each waits for
    /// every command.
    ///
    /// # Safety
    /// As [`nvme_owner`]; the queues are used by threads of this launch alone.
    pub unsafe fn nvme_shared(launch: LaunchArguments) {
        // SAFETY: the host vouches for every address in the launch, as under `# Safety`.
        unsafe { sharing::<false, false, false>(&launch) };
    }
}

entry! {
    /// Does the same as [`nvme_shared`], for more warps than fit with all the registers that it uses: lanes
    /// that act alone keep fewer reads in flight.
    ///
    /// # Safety
    /// As [`nvme_shared`].
    pub unsafe fn nvme_shared_narrow(launch: LaunchArguments) {
        // SAFETY: the host vouches for every address in the launch, as under `# Safety`.
        unsafe { sharing::<false, false, true>(&launch) };
    }
}

entry! {
    /// Does the same as [`nvme_shared`], and records events at `launch.trace`.
    ///
    /// # Safety
    /// As [`nvme_shared`].
    pub unsafe fn nvme_shared_traced(launch: LaunchArguments) {
        // SAFETY: the host vouches for every address in the launch, as under `# Safety`.
        unsafe { sharing::<false, true, false>(&launch) };
    }
}

entry! {
    /// Does the same as [`nvme_shared`], but each thread submits up to `launch.depth` commands before it
    /// waits for them, in the reverse order. The tokens are kept in `launch.tokens`.
    ///
    /// # Safety
    /// As [`nvme_owner`]; the queues are used by threads of this launch alone.
    pub unsafe fn nvme_tokens(launch: LaunchArguments) {
        // SAFETY: the host vouches for every address in the launch, as under `# Safety`.
        unsafe { sharing::<true, false, false>(&launch) };
    }
}
