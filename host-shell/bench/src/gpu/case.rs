//! Cases of the suite: the threads that submit, the number of queues and of threads.

use crate::null::DriveModel;
use nvme_cuda::{Kernel, LaunchGrid, SubmitMode};

/// One thing to measure.
#[derive(Clone, Copy, Debug)]
pub struct SuiteCase {
    /// Threads that submit to a queue.
    pub mode: SubmitMode,
    /// Queue pairs.
    pub queues: u32,
    /// Active threads in [`SubmitMode::Shared`], threads of each block in [`SubmitMode::Block`].
    pub threads: u32,
    /// Active lanes of each warp, in [`SubmitMode::Shared`].
    pub lanes: u32,
    /// Commands in flight on each queue, in the other modes.
    pub depth: u32,
    /// True for the kernel with few registers, in [`SubmitMode::Shared`]: see
    /// [`Kernel::SharedNarrow`].
    pub narrow: bool,
    /// CAP.DSTRD.
    pub dstrd: u8,
    /// The drive behind each queue pair, or none.
    pub model: Option<DriveModel>,
}

impl SuiteCase {
    /// Returns its launch.
    pub fn grid(&self) -> LaunchGrid {
        let grid = self.mode.grid(self.queues, self.threads, self.lanes);
        match grid.kernel {
            Kernel::Shared if self.narrow => LaunchGrid {
                kernel: Kernel::SharedNarrow,
                ..grid
            },
            _ => grid,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_registers_are_for_the_shared_kernel_alone() {
        let kernel = |mode, narrow| {
            let case = SuiteCase {
                mode,
                queues: 1,
                threads: 32,
                lanes: 1,
                depth: 1,
                narrow,
                dstrd: 0,
                model: None,
            };
            case.grid().kernel
        };
        assert_eq!(kernel(SubmitMode::Shared, true), Kernel::SharedNarrow);
        assert_eq!(kernel(SubmitMode::Shared, false), Kernel::Shared);
        assert_eq!(kernel(SubmitMode::Warp, true), Kernel::Warp);
    }
}
