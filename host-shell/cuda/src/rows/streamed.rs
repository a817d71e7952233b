//! Rows that a kernel of the caller uses in the buffers of their reads: each byte once, in the order of the drive, or
//! rows that it selects.
// UNSAFETY: launches a kernel over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::super::module::{KernelFunction, LaunchSize, Module};
use super::{GpuRows, PendingRows, RowRequest, RowTable, closed};
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::ring::{LEAST_SHIFT, MOST_SHIFT};
use nvme_gpu_kernel::rows::{BLOCK_THREADS, GatherLaunch, WARP_BYTES};

impl GpuRows {
    /// True if a stage of a ring holds a block.
    pub fn streams(&self) -> bool {
        self.info.block_bytes <= 1 << self.piece_shift()
    }

    /// Returns log2 of the bytes of a piece.
    fn piece_shift(&self) -> u32 {
        self.max_transfer.ilog2().clamp(LEAST_SHIFT, MOST_SHIFT)
    }

    /// Launches in `stream` a kernel of `module` whose warps read the rows of `table` by
    /// `nvme_gpu_kernel::RangeStream`, and count the parts that they could not use. `argument` makes the kernel's
    /// argument from the launch of its rows, whose `count` is `parts`. The grid is `blocks`, or as many blocks as have
    /// a warp for each part and a station.
    ///
    /// # Safety
    /// `function` takes one `T`; the conditions of [`gather`](Self::gather) hold for the addresses in it.
    ///
    /// # Errors
    /// As [`gather`](Self::gather); [`Error::Usage`] for a kernel of another GPU.
    pub unsafe fn stream<T: Copy>(
        &self,
        table: &RowTable,
        kernel: (&Module, KernelFunction),
        (parts, blocks): (u64, Option<LaunchSize>),
        argument: impl FnOnce(GatherLaunch) -> Result<T>,
        stream: u64,
    ) -> Result<PendingRows> {
        self.check_inside(table)?;
        let launch = (parts, 1 << self.piece_shift(), blocks);
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.put(table, launch, kernel, argument, stream) }
    }

    /// Returns the number of rows of `table` that a warp's slots hold, 32 at most: as many lanes read at a time.
    pub fn reading_lanes(&self, table: &RowTable) -> u32 {
        match self.fits(table) {
            true => (WARP_BYTES / self.slot_bytes(table).max(1)).min(32) as u32,
            false => 0,
        }
    }

    /// Enqueues a kernel of `module` in `stream` whose warps read rows of `table` by `nvme_gpu_kernel::WarpReads` for
    /// `count` work items, `lanes` at a time, and count the items that failed: `argument` makes the kernel's argument
    /// from the launch of its rows.
    ///
    /// # Safety
    /// As [`stream`](Self::stream).
    ///
    /// # Errors
    /// The errors of [`stream`](Self::stream); [`Error::Usage`] if the slots cannot hold rows of this length for this
    /// number of lanes.
    pub unsafe fn read_by_warps<T: Copy>(
        &self,
        table: &RowTable,
        (count, lanes): (u64, u32),
        kernel: (&Module, KernelFunction),
        argument: impl FnOnce(GatherLaunch) -> T,
        stream: u64,
    ) -> Result<PendingRows> {
        self.check_inside(table)?;
        let most = self.reading_lanes(table);
        if lanes > most {
            return Err(Error::usage(
                format!(
                    "a warp of the GPU has room for {most} rows of {} bytes at a time, and {lanes} are asked for",
                    table.row_bytes
                ),
                "read fewer rows at a time, or smaller ones",
            ));
        }
        let launch = (count, self.slot_bytes(table) as u32, None);
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.put(table, launch, kernel, |rows| Ok(argument(rows)), stream) }
    }

    /// # Safety
    /// As [`stream`](Self::stream).
    unsafe fn put<T: Copy>(
        &self,
        table: &RowTable,
        (count, slot_bytes, of_caller): (u64, u32, Option<LaunchSize>),
        (module, function): (&Module, KernelFunction),
        argument: impl FnOnce(GatherLaunch) -> Result<T>,
        stream: u64,
    ) -> Result<PendingRows> {
        if module.gpu().index() != self.gpu().index() {
            return Err(Error::usage(
                format!(
                    "the kernel was loaded for GPU {}, and the store has GPU {}",
                    module.gpu().index(),
                    self.gpu().index()
                ),
                "load it for the store's GPU",
            ));
        }
        let request = RowRequest {
            ids: 0,
            wide_ids: true,
            count,
            out: 0,
            out_stride: 0,
            status: 0,
        };
        let launch = GatherLaunch {
            slot_bytes,
            // Each is the business of one warp.
            lanes: 1,
            ..self.launch(table, &request).ok_or_else(closed)?
        };
        self.start(launch, (self.slot()?, None), stream, |_, rows, blocks| {
            let argument = argument(rows)?;
            let blocks = of_caller.unwrap_or(LaunchSize::plain(blocks, BLOCK_THREADS));
            // SAFETY: the caller vouches for the argument; the other addresses are ours until the gate is closed for
            // good and no group is inside. A launch that comes later finds it closed and touches none of them.
            unsafe { module.launch_on(stream, function, blocks, &argument) }
        })
    }
}
