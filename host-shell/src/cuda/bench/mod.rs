//! What GPU-driven queues reach, against their limits: the suite of `nvme-gpu bench --gpu --suite`.
//!
//! The controller is the null controller of CPU threads, so what is measured is the driver, the bus
//! and the controller's own speed; each line names which of them was the limit.
// UNSAFETY: launches are told of the null controller's memory by address.
#![allow(unsafe_code)]

mod limits;
mod stream;
mod suite;

pub use limits::Limits;
pub use suite::{Options, run};

use super::kernels::{Kernel, Kernels};
use super::null::{Account, Model, Null, Shape};
use super::queues::{GpuQueues, Grid, Ran};
use super::registered::Registered;
use crate::error::{Error, Result};
use nvme_core::Identity;
use nvme_core::handoff::QueueWords;
use nvme_core::spec::nvm::opcode;
use nvme_gpu_kernel::work::Launch;
use std::sync::Arc;
use std::time::Duration;

/// Entries of each ring of the null controller.
const ENTRIES: u32 = 1024;
/// Bytes of a command: one block.
const BLOCK_SHIFT: u32 = 9;
/// Threads of a block that owns a queue, when nobody says how many.
const BLOCK_THREADS: u32 = 128;
/// Longest wait for a command.
const TIMEOUT_NS: u64 = 10_000_000_000;
/// The host's patience with a launch.
const LIMIT: Duration = Duration::from_secs(60);

/// Who submits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// One thread owns a queue.
    Owner,
    /// One warp owns a queue.
    Warp,
    /// One block owns a queue.
    Block,
    /// Any thread uses a queue, which belongs to nobody.
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

    /// The launch for `queues` queues. `threads` are those of each block in [`Block`](Self::Block), where 0
    /// is 128, and all active ones in [`Shared`](Self::Shared), where `lanes` of each warp are active.
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
    /// Who submits.
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
    /// Its launch.
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

/// One run of a case.
#[derive(Clone, Debug)]
pub struct Run {
    /// What the kernel counted.
    pub ran: Ran,
    /// What the controller counted.
    pub account: Account,
    /// Commands of the run.
    pub commands: u64,
}

impl Run {
    /// Commands per second.
    pub fn rate(&self) -> f64 {
        self.commands as f64 / self.ran.seconds.max(1e-9)
    }
}

/// A null controller registered with a GPU, and its queues in the GPU's hands.
pub struct Bench {
    set: GpuQueues,
    registered: Registered,
    null: Null,
}

impl Bench {
    /// A controller of `queues` queue pairs with doorbells `4 << dstrd` bytes apart.
    ///
    /// # Errors
    /// [`Error::System`] and [`Error::Device`] without memory.
    pub fn new(kernels: &Arc<Kernels>, queues: u32, dstrd: u8) -> Result<Self> {
        // A buffer for each slot of each queue, and for each of 64 Ki threads.
        let buffers = (queues as usize * ENTRIES as usize).max(1 << 16);
        Self::shaped(
            kernels,
            Shape {
                queues,
                entries: ENTRIES,
                dstrd,
                data_bytes: buffers << BLOCK_SHIFT,
            },
        )
    }

    /// Rings alone, for the bare kernels.
    fn of_rings(kernels: &Arc<Kernels>, queues: u32, entries: u32) -> Result<Self> {
        Self::shaped(
            kernels,
            Shape {
                queues,
                entries,
                dstrd: 4,
                data_bytes: 0,
            },
        )
    }

    fn shaped(kernels: &Arc<Kernels>, shape: Shape) -> Result<Self> {
        let (null, queues) = (Null::new(shape)?, shape.queues);
        let registered = Registered::pages(kernels.gpu(), null.pages())?;
        let host: Vec<QueueWords> = (0..queues)
            .map(|index| {
                let words = null.words(index);
                // No lists: a command has one page of data at most.
                QueueWords {
                    lists: words.sq,
                    lists_iova: words.sq,
                    ..words
                }
            })
            .collect();
        // No controller is behind these queues.
        let identity = Identity::new();
        let set = GpuQueues::new(kernels, &identity, &host, 0, |at| registered.translate(at))?;
        Ok(Self {
            set,
            registered,
            null,
        })
    }

    /// The controller.
    pub fn null(&self) -> &Null {
        &self.null
    }

    /// Bytes of GPU memory that the state of one queue takes.
    pub fn state_bytes(&self) -> usize {
        self.set.state_bytes()
    }

    /// Runs `commands` commands as `case` says, against `threads` controller threads.
    ///
    /// # Errors
    /// [`Error::Device`] when a command did not succeed, or the controller saw nonsense.
    pub fn run(&mut self, case: &Case, commands: u64, threads: usize) -> Result<Run> {
        self.set.restart(&Identity::new(), 0)?;
        let running = self.null.start(threads, case.model)?;
        let launch = Launch {
            data: self.registered.translate(self.null.data())?,
            data_iova: self.null.data(),
            data_bytes: self.null.shape().data_bytes as u64,
            commands,
            units: 1 << 30,
            seed: 1,
            timeout_ns: TIMEOUT_NS,
            nsid: 1,
            opcode: u32::from(opcode::READ),
            blocks: 1,
            block_shift: BLOCK_SHIFT,
            depth: case.depth,
            lanes: case.lanes,
            ..Launch::default()
        };
        let grid = case.grid();
        // SAFETY: the data memory is the null controller's, which is stopped before this returns;
        // nobody else uses its queues.
        let ran = unsafe { self.set.run(grid, launch, false, LIMIT, || Ok(())) };
        let account = running.stop();
        if let Some(fault) = &account.fault {
            return Err(Error::internal(format!(
                "the null controller stopped: queue {}: {}",
                fault.qid, fault.what
            )));
        }
        let ran = ran?;
        if ran.report.completed != commands {
            return Err(Error::internal(format!(
                "{} of {commands} commands succeeded: {:?}",
                ran.report.completed, ran.report
            )));
        }
        Ok(Run {
            ran,
            account,
            commands,
        })
    }

    /// Runs a bare limit's kernel over the rings, which no controller serves.
    fn bare(&mut self, grid: Grid, commands: u64) -> Result<Ran> {
        self.set.restart(&Identity::new(), 0)?;
        self.run_bare(grid, commands, 0)
    }

    /// Runs a bare limit's kernel; `depth` other than 0 tells it of a controller.
    fn run_bare(&mut self, grid: Grid, commands: u64, depth: u32) -> Result<Ran> {
        let launch = Launch {
            commands,
            timeout_ns: TIMEOUT_NS,
            opcode: u32::from(opcode::READ),
            depth,
            ..Launch::default()
        };
        // SAFETY: the bare kernels use the rings and doorbells alone, which are ours.
        unsafe { self.set.run(grid, launch, false, LIMIT, || Ok(())) }
    }

    /// Has one warp on each queue write `entries` entries, read completions and ring, all without heed, while
    /// the controller serves them.
    fn served(&mut self, entries: u64, threads: usize) -> Result<Ran> {
        self.set.restart(&Identity::new(), 0)?;
        let running = self.null.start_heedless(threads)?;
        let grid = Grid {
            kernel: Kernel::SqeWrites,
            blocks: self.null.shape().queues,
            threads: 32,
        };
        let ran = self.run_bare(grid, entries, 1);
        let account = running.stop();
        match account.fault {
            Some(fault) => Err(Error::internal(fault.what)),
            // A lap that the controller missed would make this cheaper than the real thing.
            None if account.commands * 20 < entries * 19 => Err(Error::device(
                format!("{} of {entries} entries were served", account.commands),
                "give the controller more threads",
            )),
            None => ran,
        }
    }
}

/// The middle one of an odd number of values.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
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

    #[test]
    fn the_median_is_not_moved_by_an_outlier() {
        assert_eq!(median(&[5.0, 1.0, 4.0, 100.0, 3.0]), 4.0);
        assert_eq!(median(&[]), 0.0);
    }
}
