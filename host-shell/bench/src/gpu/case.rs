//! Cases of the suite: the threads that submit, the number of queues and of threads.

use crate::null::Model;
use nvme_cuda::{Grid, Kernel, Mode};

/// One thing to measure.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Threads that submit to a queue.
    pub mode: Mode,
    /// Queue pairs.
    pub queues: u32,
    /// Active threads in [`Mode::Shared`], threads of each block in [`Mode::Block`].
    pub threads: u32,
    /// Active lanes of each warp, in [`Mode::Shared`].
    pub lanes: u32,
    /// Commands in flight on each queue, in the other modes.
    pub depth: u32,
    /// Few registers, in [`Mode::Shared`]: see [`Kernel::SharedNarrow`].
    pub narrow: bool,
    /// CAP.DSTRD.
    pub dstrd: u8,
    /// The drive behind each queue pair, or none.
    pub model: Option<Model>,
}

impl Case {
    /// Returns its launch.
    pub fn grid(&self) -> Grid {
        let grid = self.mode.grid(self.queues, self.threads, self.lanes);
        match grid.kernel {
            Kernel::Shared if self.narrow => Grid {
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
            let case = Case {
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
        assert_eq!(kernel(Mode::Shared, true), Kernel::SharedNarrow);
        assert_eq!(kernel(Mode::Shared, false), Kernel::Shared);
        assert_eq!(kernel(Mode::Warp, true), Kernel::Warp);
    }
}
