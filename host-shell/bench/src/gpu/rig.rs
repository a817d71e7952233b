//! The null controller registered with a GPU, and runs of the kernels against it.
// UNSAFETY: launches get the null controller's memory by address.
#![allow(unsafe_code)]

use super::case::SuiteCase;
use crate::null::{NullController, NullCounts, NullShape};
use nvme_core::ControllerIdentity;
use nvme_core::handoff::QueueWords;
use nvme_core::spec::nvm::opcode;
use nvme_cuda::RegisteredMemory;
use nvme_cuda::{GpuQueues, LaunchGrid, LaunchResult};
use nvme_cuda::{Kernel, QueueKernels};
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::work::LaunchArguments;
use std::sync::Arc;
use std::time::Duration;

/// Entries of each ring of the null controller.
pub(super) const ENTRIES: u32 = 1024;
/// Bytes of a command: one block.
const BLOCK_SHIFT: u32 = 9;
/// Longest wait for a command.
const TIMEOUT_NS: u64 = 10_000_000_000;
/// The host's patience with a launch.
const LIMIT: Duration = Duration::from_secs(60);

/// One run of a case.
#[derive(Clone, Debug)]
pub struct CaseRun {
    /// Counts of the kernel.
    pub ran: LaunchResult,
    /// Counts of the controller.
    pub account: NullCounts,
    /// Commands of the run.
    pub commands: u64,
}

impl CaseRun {
    /// Returns the number of commands per second.
    pub fn rate(&self) -> f64 {
        self.commands as f64 / self.ran.seconds.max(1e-9)
    }
}

/// A null controller registered with a GPU, and queues that the GPU drives.
pub struct NullBench {
    set: GpuQueues,
    registered: RegisteredMemory,
    null: NullController,
}

impl NullBench {
    /// Creates a controller of `queues` queue pairs with doorbells `4 << dstrd` bytes apart.
    ///
    /// # Errors
    /// [`Error::System`] and [`Error::Device`] without memory.
    pub fn new(kernels: &Arc<QueueKernels>, queues: u32, dstrd: u8) -> Result<Self> {
        // A buffer for each slot of each queue, and for each of 64 Ki threads.
        let buffers = (queues as usize * ENTRIES as usize).max(1 << 16);
        Self::shaped(
            kernels,
            NullShape {
                queues,
                entries: ENTRIES,
                dstrd,
                data_bytes: buffers << BLOCK_SHIFT,
            },
        )
    }

    /// Rings alone, for the bare kernels.
    pub(super) fn of_rings(kernels: &Arc<QueueKernels>, queues: u32, entries: u32) -> Result<Self> {
        Self::shaped(
            kernels,
            NullShape {
                queues,
                entries,
                dstrd: 4,
                data_bytes: 0,
            },
        )
    }

    fn shaped(kernels: &Arc<QueueKernels>, shape: NullShape) -> Result<Self> {
        let (null, queues) = (NullController::new(shape)?, shape.queues);
        let registered = RegisteredMemory::pages(kernels.gpu(), null.pages())?;
        let host: Vec<QueueWords> = (0..queues)
            .map(|index| {
                let words = null.words(index);
                // The queues have no lists: a command has at most one page of data.
                QueueWords {
                    lists: words.sq,
                    lists_iova: words.sq,
                    ..words
                }
            })
            .collect();
        // No controller is behind these queues.
        let identity = ControllerIdentity::new();
        let set = GpuQueues::new(kernels, &identity, &host, 0, |at| registered.translate(at))?;
        Ok(Self {
            set,
            registered,
            null,
        })
    }

    /// Returns the controller.
    pub fn null(&self) -> &NullController {
        &self.null
    }

    /// Returns the number of bytes of GPU memory that the state of one queue takes.
    pub fn state_bytes(&self) -> usize {
        self.set.state_bytes()
    }

    /// Runs `commands` commands as `case` says, against `threads` controller threads.
    ///
    /// # Errors
    /// [`Error::Device`] when a command did not succeed, or the controller saw an invalid entry or doorbell.
    pub fn run(&mut self, case: &SuiteCase, commands: u64, threads: usize) -> Result<CaseRun> {
        self.set.restart(&ControllerIdentity::new(), 0)?;
        let running = self.null.start(threads, case.model)?;
        let launch = LaunchArguments {
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
            ..LaunchArguments::default()
        };
        let grid = case.grid();
        // SAFETY: the data memory is the null controller's, which is stopped before this returns;
        // nothing else uses its queues.
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
        Ok(CaseRun {
            ran,
            account,
            commands,
        })
    }

    /// Runs a bare limit's kernel over the rings, which no controller serves.
    pub(super) fn bare(&mut self, grid: LaunchGrid, commands: u64) -> Result<LaunchResult> {
        self.set.restart(&ControllerIdentity::new(), 0)?;
        self.run_bare(grid, commands, 0)
    }

    /// Runs a bare limit's kernel; a `depth` other than 0 means that a controller serves it.
    pub(super) fn run_bare(
        &mut self,
        grid: LaunchGrid,
        commands: u64,
        depth: u32,
    ) -> Result<LaunchResult> {
        let launch = LaunchArguments {
            commands,
            timeout_ns: TIMEOUT_NS,
            opcode: u32::from(opcode::READ),
            depth,
            ..LaunchArguments::default()
        };
        // SAFETY: the bare kernels use only the rings and doorbells, which are our own.
        unsafe { self.set.run(grid, launch, false, LIMIT, || Ok(())) }
    }

    /// Runs one warp on each queue that writes `entries` entries, reads completions and rings
    /// without checking anything, while the controller serves them.
    pub(super) fn served(&mut self, entries: u64, threads: usize) -> Result<LaunchResult> {
        self.set.restart(&ControllerIdentity::new(), 0)?;
        let running = self.null.start_heedless(threads)?;
        let grid = LaunchGrid {
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
