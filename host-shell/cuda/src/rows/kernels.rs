//! The kernels that gather and scatter rows, loaded for one GPU.
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::super::driver::Gpu;
use super::super::module::{KernelFunction, LaunchSize, Module};
use super::counts::LastLaunch;
use nvme_driver::error::Result;
use nvme_gpu_kernel::rows::BLOCK_THREADS;
use nvme_gpu_kernel::{ROWS, SCATTER};
use std::sync::Arc;

/// Blocks of `nvme_widen_rows` that a multiprocessor runs at a time.
const WIDEN_BLOCKS: u32 = 8;

/// The kernels of both images.
pub(super) struct RowKernels {
    gathers: Module,
    _scatters: Module,
    pub gather: KernelFunction,
    /// Kernel of gathers by queues that blocks own.
    pub gather_batched: KernelFunction,
    /// Kernels of the same gather in two launches.
    pub begin_batched: KernelFunction,
    pub finish_batched: KernelFunction,
    /// The same kernels for rows that are converted on the way.
    pub gather_batched_wide: KernelFunction,
    pub finish_batched_wide: KernelFunction,
    pub gather_cached: KernelFunction,
    /// Kernel of gathers of few rows through a cache.
    pub gather_batched_cached: KernelFunction,
    pub gather_striped: KernelFunction,
    /// Kernel of gathers of few rows of stripes by queues that blocks own.
    pub gather_batched_striped: KernelFunction,
    pub read_ranges: KernelFunction,
    pub read_listed: KernelFunction,
    /// Kernels of gathers that read each distinct row once, in their order.
    pub claim_rows: KernelFunction,
    pub list_rows: KernelFunction,
    pub gather_listed: KernelFunction,
    pub gather_listed_striped: KernelFunction,
    pub repeat_rows: KernelFunction,
    pub widen_rows: KernelFunction,
    /// Blocks of `widen_rows`, and of the kernels that only move rows on the GPU, that are of use.
    pub widen_blocks: u32,
    /// Kernel that ends a launch number, behind kernels that report nothing to the host.
    pub end_launch: KernelFunction,
    pub scatter: KernelFunction,
    /// Kernel of scatters by queues that blocks own.
    pub scatter_batched: KernelFunction,
    /// Size of the last launch of any of them.
    last: Arc<LastLaunch>,
}

impl RowKernels {
    /// # Errors
    /// As [`Module::of_image`].
    pub fn load(gpu: &Arc<Gpu>, last: &Arc<LastLaunch>) -> Result<Self> {
        let gathers = Module::of_image(gpu, &ROWS)?;
        let scatters = Module::of_image(gpu, &SCATTER)?;
        Ok(Self {
            gather: gathers.function("nvme_gather")?,
            gather_batched: gathers.function("nvme_gather_batched")?,
            begin_batched: gathers.function("nvme_begin_batched")?,
            finish_batched: gathers.function("nvme_finish_batched")?,
            gather_batched_wide: gathers.function("nvme_gather_batched_wide")?,
            finish_batched_wide: gathers.function("nvme_finish_batched_wide")?,
            gather_cached: gathers.function("nvme_gather_cached")?,
            gather_batched_cached: gathers.function("nvme_gather_batched_cached")?,
            gather_striped: gathers.function("nvme_gather_striped")?,
            gather_batched_striped: gathers.function("nvme_gather_batched_striped")?,
            read_ranges: gathers.function("nvme_read_ranges")?,
            read_listed: gathers.function("nvme_read_listed")?,
            claim_rows: gathers.function("nvme_claim_rows")?,
            list_rows: gathers.function("nvme_list_rows")?,
            gather_listed: gathers.function("nvme_gather_listed")?,
            gather_listed_striped: gathers.function("nvme_gather_listed_striped")?,
            repeat_rows: gathers.function("nvme_repeat_rows")?,
            widen_rows: gathers.function("nvme_widen_rows")?,
            end_launch: gathers.function("nvme_end_launch")?,
            widen_blocks: gpu.multiprocessors()? * WIDEN_BLOCKS,
            scatter: scatters.function("nvme_scatter")?,
            scatter_batched: scatters.function("nvme_scatter_batched")?,
            last: Arc::clone(last),
            gathers,
            _scatters: scatters,
        })
    }

    /// Registers and bytes of local memory of a thread of `nvme_gather`, as compiled for this GPU.
    ///
    /// # Errors
    /// As [`Module::cost`].
    pub fn cost(&self) -> Result<(u32, u32)> {
        self.gathers.cost(self.gather)
    }

    /// Enqueues `blocks` blocks of `kernel`, one of these, in `stream`, a `CUstream` of the calling thread's context. A
    /// block has [`BLOCK_THREADS`] threads.
    ///
    /// # Safety
    /// As [`Module::launch_on`].
    ///
    /// # Errors
    /// As [`Module::launch_on`].
    pub unsafe fn launch<T: Copy>(
        &self,
        stream: u64,
        kernel: KernelFunction,
        blocks: u32,
        argument: &T,
    ) -> Result<()> {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.launch_of(stream, kernel, (blocks, BLOCK_THREADS), argument) }
    }

    /// Enqueues `blocks` blocks of `threads` threads of `kernel` in `stream`, as [`launch`](Self::launch) does.
    ///
    /// # Safety
    /// As [`Module::launch_on`].
    ///
    /// # Errors
    /// As [`Module::launch_on`].
    pub unsafe fn launch_of<T: Copy>(
        &self,
        stream: u64,
        kernel: KernelFunction,
        (blocks, threads): (u32, u32),
        argument: &T,
    ) -> Result<()> {
        // SAFETY: the caller keeps the conditions. A function handle identifies its module, so it need not be one of
        // `gathers`.
        unsafe {
            let size = LaunchSize::plain(blocks, threads);
            self.gathers.launch_on(stream, kernel, size, argument)?;
        }
        self.last.record(blocks, threads, kernel.registers());
        Ok(())
    }
}
