//! Rows that a kernel of others uses while it reads them: each byte once, in the order of the drive.
// UNSAFETY: launches a kernel over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::super::module::{Function, Module};
use super::{GpuRows, Pending, Request, RowTable, closed};
use crate::error::{Error, Result};
use nvme_gpu_kernel::ring::{LEAST_SHIFT, MOST_SHIFT};
use nvme_gpu_kernel::rows::{BLOCK_THREADS, Gather};

impl GpuRows {
    /// Whether a stage of a ring holds a block.
    pub fn streams(&self) -> bool {
        self.info.block_bytes <= 1 << self.piece_shift()
    }

    /// log2 of the bytes of a piece.
    fn piece_shift(&self) -> u32 {
        self.max_transfer.ilog2().clamp(LEAST_SHIFT, MOST_SHIFT)
    }

    /// Puts a kernel of `module` into `stream` whose warps read the rows of `table` by `nvme_gpu_kernel::Stream`, and
    /// count the rows that they could not use: `argument` makes what it takes of the words of its rows, `count` of which
    /// is `parts`.
    ///
    /// # Safety
    /// `function` takes one `T`; as [`gather`](Self::gather) for the addresses in it.
    ///
    /// # Errors
    /// As [`gather`](Self::gather); [`Error::Usage`] for a kernel of another GPU.
    pub unsafe fn stream<T: Copy>(
        &self,
        table: &RowTable,
        (module, function): (&Module, Function),
        parts: u64,
        argument: impl FnOnce(Gather) -> Result<T>,
        stream: u64,
    ) -> Result<Pending> {
        self.check_inside(table)?;
        if module.gpu().index() != self.gpu().index() {
            return Err(Error::usage(
                "a kernel of another GPU than the store's",
                "load it for the store's GPU",
            ));
        }
        let request = Request {
            ids: 0,
            wide_ids: true,
            count: parts,
            out: 0,
            out_stride: 0,
            status: 0,
        };
        let launch = Gather {
            slot_bytes: 1 << self.piece_shift(),
            // A part is the business of one warp.
            lanes: 1,
            ..self.launch(table, &request).ok_or_else(closed)?
        };
        self.start(launch, stream, |_, rows, blocks| {
            let argument = argument(rows)?;
            // SAFETY: the caller's; the other addresses are ours until the gate is shut for good and nothing is inside.
            unsafe { module.launch_on(stream, function, blocks, BLOCK_THREADS, &argument) }
        })
    }
}
