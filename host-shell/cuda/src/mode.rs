//! Threads that submit to the queues of a launch, and the grid of that launch.

use crate::kernels::Kernel;
use crate::queues::LaunchGrid;

/// Threads of a block that owns a queue, by default.
const BLOCK_THREADS: u32 = 128;

/// Threads that submit to a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubmitMode {
    /// One thread owns a queue.
    Owner,
    /// One warp owns a queue.
    Warp,
    /// One block owns a queue.
    Block,
    /// Any thread uses any queue.
    Shared,
}

impl SubmitMode {
    /// Returns the name that the command line uses.
    pub fn name(self) -> &'static str {
        match self {
            Self::Owner => "owner",
            Self::Warp => "warp",
            Self::Block => "block",
            Self::Shared => "shared",
        }
    }

    /// Returns the launch for `queues` queues. `threads` is the number in each block for [`Block`](Self::Block), where
    /// 0 means 128, and the number of all active threads for [`Shared`](Self::Shared), where `lanes` of each warp are
    /// active.
    pub fn grid(self, queues: u32, threads: u32, lanes: u32) -> LaunchGrid {
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
        LaunchGrid {
            kernel,
            blocks,
            threads,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_has_the_threads_that_were_asked_for() {
        let grid = |mode: SubmitMode, queues, threads, lanes| {
            let grid = mode.grid(queues, threads, lanes);
            (grid.blocks, grid.threads)
        };
        assert_eq!(grid(SubmitMode::Owner, 16, 0, 32), (16, 1));
        assert_eq!(grid(SubmitMode::Warp, 128, 0, 32), (128, 32));
        assert_eq!(grid(SubmitMode::Block, 1, 0, 32), (1, 128));
        assert_eq!(grid(SubmitMode::Block, 2, 250, 32), (2, 256));
        assert_eq!(grid(SubmitMode::Shared, 1, 32, 32), (1, 32));
        assert_eq!(grid(SubmitMode::Shared, 1, 65_536, 32), (512, 128));
        // With one active lane in each warp, the launch has 32 times as many threads.
        assert_eq!(grid(SubmitMode::Shared, 1, 256, 1), (64, 128));
    }
}
