//! Products whose matrix a GPU reads from a drive while it multiplies.
// UNSAFETY: launches a kernel over addresses that the caller vouches for.
#![allow(unsafe_code)]

use crate::{GpuIds, StoredMatrix};
use nvme_compute_kernel::{GemvStreamed, STREAMED_PTX, kernel};
use nvme_host::cuda::{
    GatherOutcome, Gpu, KernelArgument as Memory, KernelFunction, Module, PendingRows,
};
use nvme_host::store::status;
use nvme_host::{Error, Result};
use std::sync::Arc;

/// The kernels of such products, for one GPU: of all rows, and of rows that ids name.
///
/// The kernels stay loaded when this is dropped: a launch in progress, or a graph, may still run them.
pub struct StreamedProducts {
    module: Module,
    gemv: KernelFunction,
    gathered: KernelFunction,
}

impl StreamedProducts {
    /// Loads the kernels.
    ///
    /// # Errors
    /// The errors of [`Module::embedded`].
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let module = Module::embedded(gpu, STREAMED_PTX.as_bytes())?;
        let gemv = module.function(kernel::GEMV_STREAMED)?;
        let gathered = module.function(kernel::GEMV_GATHERED)?;
        Ok(Self {
            module,
            gemv,
            gathered,
        })
    }

    /// Registers and bytes of local memory of a thread, as compiled for this GPU.
    ///
    /// # Errors
    /// The errors of [`Module::cost`].
    pub fn cost(&self) -> Result<(u32, u32)> {
        self.module.cost(self.gemv)
    }

    /// Returns the same for [`gathered`](Self::gathered).
    ///
    /// # Errors
    /// The errors of [`Module::cost`].
    pub fn cost_of_gathered(&self) -> Result<(u32, u32)> {
        self.module.cost(self.gathered)
    }

    pub(crate) fn gathered_kernel(&self) -> (&Module, KernelFunction) {
        (&self.module, self.gathered)
    }

    /// Judges ids, `x` and `y`, each an address and how many elements lie there.
    ///
    /// # Errors
    /// [`Error::Usage`] for memory that the GPU cannot access as the kernel does.
    pub(crate) fn judge(
        &self,
        ids: Option<GpuIds>,
        (x, columns): (u64, u64),
        (y, results): (u64, u64),
        stream: u64,
    ) -> Result<()> {
        if results == 0 {
            return Ok(());
        }
        let ids = ids.map_or(Memory::read("ids", 0, 0, 1), |ids| {
            let unit = if ids.wide { 8 } else { 4 };
            Memory::read("ids", ids.address, ids.count, unit)
        });
        self.module.gpu().judge_apart(
            stream,
            &[
                ids,
                Memory::read("x", x, columns, 4),
                Memory::written("y", y, results, 4),
            ],
        )
    }

    /// Enqueues `y = W x` in `stream`, a `CUstream` of the store's GPU, and returns before it runs. `x` is the address
    /// of an `f32` for each column of the matrix, `y` that of an `f32` for each row. The stream may be captured.
    ///
    /// Rows of the [`PendingRows`] are elements of `y`. An element whose row was not read completely is NaN: [`check`]
    /// makes an error of it. Each weight crosses the link of the GPU once and is stored nowhere in its memory
    /// (docs/compute.md).
    ///
    /// # Safety
    /// `x` and `y` are valid on the GPU until the product has ended, and for as long as a graph that captured it may be
    /// launched; nothing else writes them meanwhile.
    ///
    /// # Errors
    /// [`Error::Usage`] for a store whose reads the GPU does not submit itself, and for addresses that are no multiple of
    /// 4; [`Error::Environment`] with the driver's answer.
    pub unsafe fn gemv(
        &self,
        matrix: &StoredMatrix,
        x: u64,
        y: u64,
        stream: u64,
    ) -> Result<PendingRows> {
        self.judge(
            None,
            (x, matrix.columns.into()),
            (y, matrix.rows.into()),
            stream,
        )?;
        let table = matrix
            .store
            .table(matrix.offset, matrix.rows.into(), matrix.row_bytes)?;
        let argument = |rows| {
            Ok(GemvStreamed {
                rows,
                x,
                y,
                columns: matrix.columns,
                stored: matrix.stored as u32,
            })
        };
        let kernel = (&self.module, self.gemv);
        // SAFETY: the kernel takes one `GemvStreamed` and stays loaded; the caller vouches for the vectors.
        unsafe { table.stream_on_gpu(kernel, matrix.rows.into(), argument, stream) }
    }
}

/// Checks that every element of a product was computed.
///
/// # Errors
/// [`Error::Device`] with the first row that was not read, and why.
pub fn check(ended: GatherOutcome) -> Result<()> {
    let Some((row, code)) = ended.failures.first else {
        return Ok(());
    };
    let (what, remedy) = status::describe(code);
    let rows = ended.failures.rows;
    Err(Error::device(
        format!("row {row} of a matrix: {what}; {rows} elements of the product are NaN"),
        remedy,
    ))
}
