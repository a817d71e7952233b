//! The end of kernels that tell the host nothing: a launch behind them in the stream that tells it for them.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::groups::Block;
use crate::launch_end;
use crate::rows::Gather;
use nvme_core::group::Group;

entry! {
    /// Ends a launch that moves no rows: one block, behind kernels in the stream whose end the host has to know.
    ///
    /// # Safety
    /// `progress` and `summary` of `rows` are what [`Gather`] says; nothing else of it is used.
    pub unsafe fn nvme_end_launch(rows: Gather) {
        if Block::here().leads() {
            launch_end::end_block(&rows, 0);
        }
    }
}
