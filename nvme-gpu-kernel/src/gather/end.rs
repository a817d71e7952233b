//! A kernel that reports the end of kernels which report nothing themselves: it is launched after them in the
//! stream.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::groups::WholeBlock;
use crate::launch_end;
use crate::rows::GatherLaunch;
use nvme_core::group::ThreadGroup;

entry! {
    /// Ends a launch that moves no rows: one block, launched after the kernels whose end the host has to
    /// know.
    ///
    /// # Safety
    /// `progress` and `summary` of `rows` are valid as [`GatherLaunch`] documents; nothing else of it is used.
    pub unsafe fn nvme_end_launch(rows: GatherLaunch) {
        if WholeBlock::here().leads() {
            launch_end::end_block(&rows, 0);
        }
    }
}
