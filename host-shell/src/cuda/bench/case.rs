//! Cases of the suite: the threads that submit, the number of queues and of threads.

use super::super::kernels::Kernel;
use super::super::null::Model;
use super::super::queues::Grid;

/// Threads of a block that owns a queue, by default.
const BLOCK_THREADS: u32 = 128;

/// Threads that submit to a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// One thread owns a queue.
    Owner,
    /// One warp owns a queue.
    Warp,
    /// One block owns a queue.
    Block,
    /// Any thread uses any queue.
    Shared,
}

impl Mode {
    /// As the command line calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Owner => "owner",
            Self::Warp => "warp",
            Self::Block => "block",
            Self::Shared => "shared",
        }
    }

    /// Returns the launch for `queues` queues. `threads` are those of each block in [`Block`](Self::Block),
    /// where 0 is 128, and all active ones in [`Shared`](Self::Shared), where `lanes` of each warp are active.
    pub fn grid(self, queues: u32, threads: u32, lanes: u32) -> Grid {
        let (kernel, blocks, threads) = match self {
            Self::Owner => (Kernel::Owner, queues, 1),
            Self::Warp => (Kernel::Warp, queues, 32),
            Self::Block if threads == 0 => (Kernel::Block, queues, BLOCK_THREADS),
            Self::Block => (Kernel::Block, queues, threads.next_multiple_of(32)),
            Self::Shared => {
                let warps = threads.div_ceil(lanes.clamp(1, 32)).max(1);
                let per_block = warps.min(4);
                (Kernel::Shared, warps.div_ceil(per_block), per_block * 32)
            }
        };
        Grid {
            kernel,
            blocks,
            threads,
        }
    }
}

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
    fn a_launch_has_the_threads_that_were_asked_for() {
        let grid = |mode: Mode, queues, threads, lanes| {
            let grid = mode.grid(queues, threads, lanes);
            (grid.blocks, grid.threads)
        };
        assert_eq!(grid(Mode::Owner, 16, 0, 32), (16, 1));
        assert_eq!(grid(Mode::Warp, 128, 0, 32), (128, 32));
        assert_eq!(grid(Mode::Block, 1, 0, 32), (1, 128));
        assert_eq!(grid(Mode::Block, 2, 250, 32), (2, 256));
        assert_eq!(grid(Mode::Shared, 1, 32, 32), (1, 32));
        assert_eq!(grid(Mode::Shared, 1, 65_536, 32), (512, 128));
        // One active lane of each warp: 32 times as many threads.
        assert_eq!(grid(Mode::Shared, 1, 256, 1), (64, 128));
    }

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
