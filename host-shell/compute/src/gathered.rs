//! Products of a vector and rows that ids in memory of a GPU name, which it reads from a drive while it multiplies.
// UNSAFETY: launches a kernel over addresses that the caller vouches for.
#![allow(unsafe_code)]

use crate::{StoredMatrix, StreamedProducts};
use nvme_compute_kernel::GemvGathered;
use nvme_gpu_kernel::ring::RowSplit;
use nvme_gpu_kernel::rows::GatherLaunch;
use nvme_host::cuda::PendingRows;
use nvme_host::{Error, Result};

/// Ids of rows in memory of a GPU.
#[derive(Clone, Copy, Debug)]
pub struct GpuIds {
    /// Address of `count` ids, a multiple of their size.
    pub address: u64,
    /// Number of ids.
    pub count: u64,
    /// True if ids are `i64`, else `i32`.
    pub wide: bool,
}

impl StreamedProducts {
    /// Enqueues `y[i] = W[ids[i]] . x` in `stream`, a `CUstream` of the store's GPU, and returns before it runs. `x` is
    /// the address of as many `f32` as the matrix has columns, `y` that of as many as there are ids. The stream may be
    /// captured: the ids are read when it runs.
    ///
    /// Rows of the [`PendingRows`] are elements of `y`. An element whose row was not read completely, or whose id the
    /// matrix does not have, is NaN: [`check`](crate::streamed::check) makes an error of it.
    ///
    /// # Safety
    /// Ids, `x` and `y` are valid on the GPU until the product has ended, and for as long as a graph that captured it may
    /// be launched; nothing else writes them meanwhile.
    ///
    /// # Errors
    /// [`Error::Usage`] for a store whose reads the GPU does not submit itself, for addresses that are not aligned, for
    /// 2^32 ids and more, and for rows between the blocks of a drive whose commands read one block;
    /// [`Error::Environment`] with the driver's answer.
    pub unsafe fn gathered(
        &self,
        matrix: &StoredMatrix,
        ids: GpuIds,
        (x, y): (u64, u64),
        stream: u64,
    ) -> Result<PendingRows> {
        if u32::try_from(ids.count).is_err() {
            return Err(Error::usage(
                format!("{} ids are more than one launch takes", ids.count),
                "use fewer than 2^32",
            ));
        }
        self.judge(
            Some(ids),
            (x, matrix.columns.into()),
            (y, ids.count),
            stream,
        )?;
        let table = matrix
            .store
            .table(matrix.offset, matrix.rows.into(), matrix.row_bytes)?;
        let argument = |rows: GatherLaunch| {
            let split = split(&rows)?;
            Ok(GemvGathered {
                rows: GatherLaunch {
                    ids: ids.address,
                    wide_ids: u32::from(ids.wide),
                    ..rows
                },
                x,
                y,
                columns: matrix.columns,
                stored: matrix.stored as u32,
                piece_bytes: split.piece_bytes,
                of_row: split.of_row.get(),
                stage_shift: split.stage_shift,
                reserved: 0,
            })
        };
        // SAFETY: the kernel takes one `GemvGathered` and stays loaded; the caller vouches for ids and vectors.
        unsafe { table.stream_on_gpu(self.gathered_kernel(), ids.count, argument, stream) }
    }
}

/// Returns the division of a launch's rows among warps.
pub(crate) fn split(rows: &GatherLaunch) -> Result<RowSplit> {
    let in_block = (1 << rows.block_shift) - 1;
    let is_aligned = (rows.first_byte | u64::from(rows.row_bytes)) & in_block == 0;
    let most_shift = rows.slot_bytes.trailing_zeros();
    RowSplit::new(rows.row_bytes, rows.block_shift, is_aligned, most_shift).ok_or_else(|| {
        Error::usage(
            format!(
                "rows of {} bytes from byte {} begin inside a block, and commands of this drive read one block",
                rows.row_bytes, rows.first_byte
            ),
            "lay the matrix out so that rows begin and end with blocks",
        )
    })
}
