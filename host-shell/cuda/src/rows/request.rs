//! Parameters of a gather or scatter: the table, the ids, the addresses on the GPU; and their checks before a
//! launch, since a kernel that reads a wrong address ends the context of the whole process.

use crate::driver::Gpu;
use crate::pointer::{KernelArgument, MemoryUse};
use nvme_driver::error::{Error, Result};
use nvme_driver::widen::RowConversion;
use nvme_gpu_kernel::rows::{ListHead, RangeTarget};

/// Direction of an operation on rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowDirection {
    /// Rows are copied from the drive to the addresses of the request.
    Read,
    /// Rows are copied from the addresses of the request to the drive.
    Write,
}

/// Contiguous rows of one size, from any byte of a namespace on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowTable {
    /// Offset of row 0 in bytes.
    pub first_byte: u64,
    /// Number of rows.
    pub rows: u64,
    /// Bytes of each.
    pub row_bytes: u32,
}

/// The rows of a request, and the memory that they are copied to; in a scatter, the memory that they are copied from.
/// Addresses are the GPU's.
#[derive(Clone, Copy, Debug)]
pub struct RowRequest {
    /// Address of `count` ids, `i64` when `wide_ids`, else `i32`. 0 means rows 0, 1, 2 and so on.
    pub ids: u64,
    /// True if ids are `i64`.
    pub wide_ids: bool,
    /// Number of ids.
    pub count: u64,
    /// Address of the first row of the request.
    pub out: u64,
    /// Bytes from one row of `out` to the next.
    pub out_stride: u64,
    /// Address of an `i32` for each row, which receives its status; 0 if none is wanted.
    pub status: u64,
}

impl RowRequest {
    /// Checks the request as [`judged`](Self::judged) does, for rows of `table` whose elements `widen` converts.
    ///
    /// # Errors
    /// As [`judged`](Self::judged) and [`RowConversion::row_bytes`].
    pub(super) fn judged_for_gather(
        &self,
        gpu: &Gpu,
        table: &RowTable,
        widen: Option<&RowConversion>,
        stream: u64,
    ) -> Result<Self> {
        let stored = u64::from(table.row_bytes);
        let row_bytes = widen.map_or(Ok(stored), |widen| widen.row_bytes(table.rows, stored))?;
        self.judged(gpu, row_bytes, RowDirection::Read, stream)
    }

    /// Checks ids, rows of `row_bytes` bytes and row status; returns the request with the addresses by which
    /// `gpu` accesses them.
    ///
    /// # Errors
    /// As [`Gpu::judge`], and [`Error::Usage`] for more rows than memory has.
    pub(super) fn judged(
        &self,
        gpu: &Gpu,
        row_bytes: u64,
        direction: RowDirection,
        stream: u64,
    ) -> Result<Self> {
        if self.count == 0 {
            return Ok(*self);
        }
        let before = (self.count - 1).checked_mul(self.out_stride);
        let Some(bytes) = before.and_then(|before| before.checked_add(row_bytes)) else {
            return Err(Error::usage(
                format!(
                    "{} rows, {} bytes apart, are more than memory has",
                    self.count, self.out_stride
                ),
                "check the number of ids and the stride",
            ));
        };
        let (name, usage) = match direction {
            RowDirection::Read => ("out", MemoryUse::Writes),
            RowDirection::Write => ("rows", MemoryUse::Reads),
        };
        let (ids, status) = match (self.ids, self.status) {
            (0, 0) => (0, 0),
            (0, _) => (0, self.count),
            (_, 0) => (self.count, 0),
            _ => (self.count, self.count),
        };
        let id_bytes = if self.wide_ids { 8 } else { 4 };
        let rows = KernelArgument {
            name,
            address: self.out,
            bytes,
            unit: 1,
            usage,
        };
        let ids = KernelArgument::read("ids", self.ids, ids, id_bytes);
        let status = KernelArgument::written("row_status", self.status, status, 4);
        let judged = gpu.judge_all(stream, [ids, rows, status])?;
        let is_dense = self.count == 1 || self.out_stride <= row_bytes;
        KernelArgument::check_apart(&[ids, rows.if_dense(is_dense), status])?;
        let [ids, out, status] = judged;
        Ok(Self {
            ids,
            out,
            status,
            ..*self
        })
    }
}

impl ReadRange {
    /// Checks the memory of all `ranges` before anything is launched.
    ///
    /// # Errors
    /// As [`Gpu::judge`].
    pub fn judge_all(ranges: &[Self], gpu: &Gpu, stream: u64) -> Result<()> {
        let place = |range: &Self| KernelArgument::written("data", range.to, range.bytes, 1);
        gpu.judge_list(stream, ranges.iter().map(place))
    }
}

impl ReadList {
    /// Judges the list and the row status. The places in the list are known to the kernel alone.
    ///
    /// # Errors
    /// As [`Gpu::judge`].
    pub(super) fn judge(&self, gpu: &Gpu, stream: u64) -> Result<()> {
        let bytes =
            size_of::<ListHead>() as u64 + u64::from(self.ranges) * size_of::<RangeTarget>() as u64;
        let list = KernelArgument {
            name: "list",
            address: self.list,
            bytes,
            unit: 8,
            usage: MemoryUse::Reads,
        };
        let status = match self.status {
            0 => 0,
            _ => self.pieces,
        };
        let status = KernelArgument::written("status", self.status, status, 4);
        gpu.judge_list(stream, [list, status])
    }
}

/// Range of bytes to read, and its destination on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRange {
    /// The first byte.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Destination: an address of the GPU.
    pub to: u64,
}

/// Ranges that a kernel lists in GPU memory, to be read by a launch after it. Addresses are the GPU's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadList {
    /// Address of a [`ListHead`](nvme_gpu_kernel::rows::ListHead) with its
    /// [`RangeTarget`](nvme_gpu_kernel::rows::RangeTarget)s behind it; a multiple of 8. First byte and target address
    /// of each range are equal modulo 16, and its pieces have a store's `listed_piece_bytes`.
    pub list: u64,
    /// Ranges at most.
    pub ranges: u32,
    /// Largest number of pieces of all ranges.
    pub pieces: u64,
    /// Address of an `i32` for each listed piece, which receives its status.
    pub status: u64,
}
