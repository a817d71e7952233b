//! Launches of the workload kernels over queue pairs, and the memory that such a launch needs besides the queues. The
//! memory of a launch that timed out is kept until its commands have ended, since the controller may still write to
//! it.
// UNSAFETY: launches hold addresses of data memory, and a report is made of its words.
#![allow(unsafe_code)]

use super::driver::Gpu;
use super::kernels::{Kernel, QueueKernels};
use super::memory::DeviceMemory;
use super::queue_set::QueueSet;
use super::stream::{Stream, StreamEvent};
use nvme_core::ControllerIdentity;
use nvme_core::handoff::QueueWords;
use nvme_driver::error::Result;
use nvme_gpu_kernel::work::{LaunchArguments, LaunchReport};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// Kernel and number of threads of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchGrid {
    /// The entry point.
    pub kernel: Kernel,
    /// Blocks.
    pub blocks: u32,
    /// Threads of each block.
    pub threads: u32,
}

/// Result of a launch.
#[derive(Clone, Debug)]
pub struct LaunchResult {
    /// Counts of the kernel.
    pub report: LaunchReport,
    /// Seconds from the kernel's start to its end, on the GPU's clock.
    pub seconds: f64,
    /// Outcome of each command, if the launch recorded them.
    pub accounts: Vec<u32>,
}

/// Queue pairs that a GPU drives, and launches over them.
pub struct GpuQueues {
    set: QueueSet,
    launches: LaunchMemory,
}

impl GpuQueues {
    /// Lends queues, given by host addresses without state, to the GPU. `translate` returns the GPU's address for each
    /// address in them; `identity` is the identity of the controller behind them, and the first position is `start`
    /// (see [`QueueState::init`](nvme_core::queue_state::QueueState::init)).
    ///
    /// # Errors
    /// [`Error::Usage`](nvme_driver::Error::Usage) for rings that a kernel cannot drive,
    /// [`Error::Environment`](nvme_driver::Error::Environment) without GPU memory.
    pub fn new(
        kernels: &Arc<QueueKernels>,
        identity: &ControllerIdentity,
        host: &[QueueWords],
        start: u32,
        translate: impl Fn(u64) -> Result<u64>,
    ) -> Result<Self> {
        Ok(Self {
            set: QueueSet::new(kernels.gpu(), identity, host, start, None, translate)?,
            launches: LaunchMemory::new(kernels)?,
        })
    }

    /// Initialises all queues again, for rings that were zeroed. Commands in flight are forgotten.
    pub fn restart(&mut self, identity: &ControllerIdentity, start: u32) -> Result<()> {
        self.set.restart(identity, start)?;
        self.launches.clear_cells()
    }

    /// Returns the number of bytes of GPU memory that the state of one queue takes.
    pub fn state_bytes(&self) -> usize {
        self.set.state_bytes()
    }

    /// Runs a kernel over the queues and waits for it. The queues, cells, tokens, accounts and report of `launch` are
    /// filled in here; `accounts` says whether each command's end is kept. `watch` is called repeatedly meanwhile.
    ///
    /// # Safety
    /// `launch` names data memory that stays valid for the controller and the GPU until every command
    /// has ended, and nothing else uses the queues.
    ///
    /// # Errors
    /// [`Error::Gone`](nvme_driver::Error::Gone) when the kernel has not ended within `limit`,
    /// [`Error::Environment`](nvme_driver::Error::Environment) when it died.
    pub unsafe fn run(
        &mut self,
        grid: LaunchGrid,
        launch: LaunchArguments,
        accounts: bool,
        limit: Duration,
        watch: impl FnMut() -> Result<()>,
    ) -> Result<LaunchResult> {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe {
            let wait = |stream: &Stream, limit| stream.wait(limit, watch);
            self.launches
                .run(&self.set, grid, launch, accounts, limit, wait)
        }
    }
}

/// Stream and memory of launches, besides the queues.
pub(super) struct LaunchMemory {
    kernels: Arc<QueueKernels>,
    stream: Stream,
    report: DeviceMemory,
    cells: Option<DeviceMemory>,
    tokens: Option<DeviceMemory>,
    accounts: Option<DeviceMemory>,
    /// Number of cells that the last launch used.
    cell_count: u32,
}

impl LaunchMemory {
    pub fn new(kernels: &Arc<QueueKernels>) -> Result<Self> {
        let gpu = kernels.gpu();
        Ok(Self {
            kernels: Arc::clone(kernels),
            stream: Stream::new(gpu)?,
            report: DeviceMemory::new(gpu, size_of::<LaunchReport>())?,
            cells: None,
            tokens: None,
            accounts: None,
            cell_count: 0,
        })
    }

    /// Makes all result cells free.
    pub fn clear_cells(&self) -> Result<()> {
        match &self.cells {
            Some(cells) => cells.zero(),
            None => Ok(()),
        }
    }

    /// Does the same as [`GpuQueues::run`], over the queues of `set`.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn run(
        &mut self,
        set: &QueueSet,
        grid: LaunchGrid,
        launch: LaunchArguments,
        accounts: bool,
        limit: Duration,
        wait: impl FnOnce(&Stream, Duration) -> Result<()>,
    ) -> Result<LaunchResult> {
        let threads = u64::from(grid.blocks) * u64::from(grid.threads);
        let held = match grid.kernel {
            Kernel::Tokens => threads * u64::from(launch.depth),
            _ => threads,
        };
        let launch = self.prepare(set, grid, launch, held, accounts)?;
        let begin = StreamEvent::record(&self.stream)?;
        // SAFETY: the caller vouches for the data; everything else is ours and outlives the
        // kernel.
        unsafe {
            self.kernels.launch(
                &self.stream,
                grid.kernel,
                grid.blocks,
                grid.threads,
                &launch,
            )?;
        }
        let end = StreamEvent::record(&self.stream)?;
        // If the wait fails, no memory of the GPU is freed any more: see `Gpu::lose`.
        wait(&self.stream, limit)?;
        let seconds = end.seconds_since(&begin)?;
        let mut words = [0u64; size_of::<LaunchReport>() / 8];
        self.report.download(0, words.as_mut_bytes())?;
        let mut ends = Vec::new();
        if let Some(memory) = self.accounts.as_ref().filter(|_| accounts) {
            ends = vec![0u32; launch.commands as usize];
            memory.download(0, ends.as_mut_bytes())?;
        }
        Ok(LaunchResult {
            report: report_of(words),
            seconds,
            accounts: ends,
        })
    }

    /// Fills in the addresses of this struct's memory, and enlarges the memory if the launch needs more.
    fn prepare(
        &mut self,
        set: &QueueSet,
        grid: LaunchGrid,
        launch: LaunchArguments,
        held: u64,
        accounts: bool,
    ) -> Result<LaunchArguments> {
        let gpu = Arc::clone(self.kernels.gpu());
        let shared = grid.kernel.shares();
        if shared {
            let bytes = held as usize * 8;
            grow(&gpu, &mut self.cells, bytes)?;
            self.cell_count = held as u32;
        }
        if grid.kernel == Kernel::Tokens {
            grow(&gpu, &mut self.tokens, held as usize * 12)?;
        }
        if accounts {
            grow(&gpu, &mut self.accounts, launch.commands as usize * 4)?;
            self.accounts
                .as_ref()
                .map_or(Ok(()), |memory| memory.zero())?;
        }
        self.report.zero()?;
        let address = |memory: &Option<DeviceMemory>| memory.as_ref().map_or(0, |m| m.address());
        Ok(LaunchArguments {
            queues: set.address(),
            queue_count: set.len() as u32,
            cells: if shared { address(&self.cells) } else { 0 },
            cell_count: if shared { self.cell_count } else { 0 },
            tokens: address(&self.tokens),
            accounts: if accounts { address(&self.accounts) } else { 0 },
            report: self.report.address(),
            ..launch
        })
    }
}

/// Enlarges `memory` to at least `bytes` bytes; a larger one has none of the old content.
fn grow(gpu: &Arc<Gpu>, memory: &mut Option<DeviceMemory>, bytes: usize) -> Result<()> {
    if memory.as_ref().is_none_or(|memory| memory.len() < bytes) {
        *memory = Some(DeviceMemory::new(gpu, bytes)?);
    }
    Ok(())
}

/// Returns the report's words, in the order of its fields.
fn report_of(words: [u64; size_of::<LaunchReport>() / 8]) -> LaunchReport {
    // SAFETY: `LaunchReport` is `repr(C)` and nothing but `u64` fields, so any words are one.
    unsafe { std::mem::transmute(words) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read_back_field_by_field() {
        let mut words = [0; size_of::<LaunchReport>() / 8];
        for (index, word) in words.iter_mut().enumerate() {
            *word = index as u64 + 1;
        }
        let report = report_of(words);
        assert_eq!(report.completed, 1);
        assert_eq!(report.failed, 2);
        assert_eq!(report.wrong_at + 1, words.len() as u64);
        assert_eq!(report.late, words.len() as u64);
    }
}
