//! Transfers of bytes between a store and GPU memory, on the caller's stream: as rows of a table, or as ranges that
//! the GPU itself splits into commands. Ranges that are no whole blocks are completed by the host.
// UNSAFETY: requests hold addresses of GPU memory, for which the caller vouches.
#![allow(unsafe_code)]

use super::Store;
use super::table::Table;
use nvme_cuda::{
    Gpu, GpuRows, HostRows, KernelArgument, LaunchSequence, PageMover, PageRead, PageWrite,
    PendingPages, PendingRows, PendingWrites, ReadList, ReadRange, RowRequest, StagingBatch,
    StoreLaunches,
};
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::rows::LIST_RANGES;
use std::sync::Arc;

/// Bytes of the rows as which a host thread moves ranges.
const ROW_BYTES: u64 = 64 << 10;
/// Bytes of a block of a page store, and of its headers.
const PAGE_BLOCK: u64 = 4 << 10;
/// Length of the pieces in which the GPU reads ranges of stripes: short, so that many warps take part in a short range.
const PIECE_BYTES: u64 = 4 << 10;

impl Store {
    /// Returns the GPU that it was opened with.
    pub fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.space.gpu().ok().map(HostRows::gpu)
    }

    /// Reads `bytes` bytes from byte `offset` on to address `to` of the store's GPU: enqueues the read in `stream`, a
    /// `CUstream`, and returns before it runs. Any offset, length and address.
    ///
    /// A row of the [`PendingRows`] is a part as which it was read: 4 KiB or a block of one drive, 64 KiB of a file.
    ///
    /// # Safety
    /// As [`Table::gather_on_gpu`], for `bytes` bytes at `to`.
    ///
    /// # Errors
    /// As [`Table::gather_on_gpu`]; [`Error::Usage`] for a range past the end.
    pub unsafe fn read_on_gpu(
        &self,
        offset: u64,
        bytes: u64,
        to: u64,
        stream: u64,
    ) -> Result<PendingRows> {
        let range = ReadRange { offset, bytes, to };
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.read_ranges_on_gpu(&[range], stream) }
    }

    /// Reads many ranges as [`read_on_gpu`](Self::read_on_gpu) reads one: ranges of one drive share a launch, 96 of
    /// them at most, and are read side by side. Operations in a stream follow one another, so that many reads by many
    /// calls are slower.
    ///
    /// The pieces of all ranges are numbered through as rows of the [`PendingRows`]. If the target memory of ranges
    /// overlaps, it holds the bytes of any of them afterwards.
    ///
    /// # Safety
    /// As [`read_on_gpu`](Self::read_on_gpu), for each.
    ///
    /// # Errors
    /// The errors of [`read_on_gpu`](Self::read_on_gpu): nothing is in progress then, and some ranges may have been
    /// read.
    pub unsafe fn read_ranges_on_gpu(
        &self,
        ranges: &[ReadRange],
        stream: u64,
    ) -> Result<PendingRows> {
        for range in ranges {
            self.space.check(range.offset, range.bytes)?;
        }
        let gpu = self.space.gpu()?.gpu();
        if let [member] = &self.space.members[..]
            && let Some(rows) = member.rows.as_ref().filter(|rows| rows.reads_ranges())
        {
            // SAFETY: the caller's; the ranges lie inside the store.
            return unsafe { rows.read_ranges(ranges, stream) };
        }
        ReadRange::judge_all(ranges, gpu, stream)?;
        let read = |table: &Table, request: &RowRequest| {
            // SAFETY: the caller keeps the conditions under `# Safety`.
            unsafe { table.gather_on_gpu(request, stream) }
        };
        let row_bytes = match &self.space.striped {
            Some(_) => PIECE_BYTES,
            None => ROW_BYTES,
        };
        LaunchSequence::run(gpu, stream, |sequence| {
            let mut before = 0;
            for range in ranges {
                let bytes = (range.offset, range.bytes);
                let part = self.in_rows(bytes, row_bytes, range.to, stream, read)?;
                sequence.add(part, before);
                before += range.bytes.div_ceil(row_bytes);
            }
            Ok(())
        })
    }

    /// Returns the number of bytes of the pieces of ranges that a kernel lists for
    /// [`read_listed_on_gpu`](Self::read_listed_on_gpu): a piece ends where the drive's bytes are a multiple of
    /// them.
    ///
    /// # Errors
    /// [`Error::Usage`] where the GPU does not submit the reads itself.
    pub fn listed_piece_bytes(&self) -> Result<u32> {
        Ok(self.lists()?.listed_piece_bytes())
    }

    /// Reads ranges of bytes that an earlier kernel in `stream`, a `CUstream`, lists in memory of the store's GPU: the
    /// host does not know them. Returns before it runs; it can be captured.
    ///
    /// A row of the [`PendingRows`] is a piece of [`listed_piece_bytes`](Self::listed_piece_bytes); those of all ranges
    /// are counted through. A range past the end of the drive fails with the drive's status.
    ///
    /// # Safety
    /// As [`Table::gather_on_gpu`], for the addresses of `list` and of the ranges that the kernel lists.
    ///
    /// # Errors
    /// As [`Table::gather_on_gpu`]; [`Error::Usage`] where the GPU does not submit the reads itself, and for addresses
    /// that are not aligned.
    pub unsafe fn read_listed_on_gpu(&self, list: &ReadList, stream: u64) -> Result<PendingRows> {
        let rows = self.lists()?;
        if !list.list.is_multiple_of(8) || !list.status.is_multiple_of(4) {
            return Err(Error::usage(
                format!(
                    "the list of ranges at {:#x} or the status at {:#x} is not aligned",
                    list.list, list.status
                ),
                "use multiples of 8, and of 4 for the status",
            ));
        }
        if list.ranges > LIST_RANGES {
            return Err(Error::usage(
                format!(
                    "the list has {} ranges, more than one launch takes",
                    list.ranges
                ),
                format!("use {LIST_RANGES} ranges at most"),
            ));
        }
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { rows.read_listed(list, stream) }
    }

    fn lists(&self) -> Result<&GpuRows> {
        self.space.gpu()?;
        if let [member] = &self.space.members[..]
            && let Some(rows) = member.rows.as_ref().filter(|rows| rows.reads_ranges())
        {
            return Ok(rows);
        }
        Err(Error::usage(
            "the GPU reads ranges that a kernel lists from one drive alone",
            "use one drive (sim:, vfio:, vfio-user:) with blocks of 32 KiB at most",
        ))
    }

    /// Returns the launches by which a GPU reads and writes the members, which can be asked for once the store is closed.
    pub fn launches_on_gpu(&self) -> Vec<StoreLaunches> {
        let members = self.space.members.iter();
        let rows = members.filter_map(|member| member.rows.as_ref());
        rows.map(|rows| rows.launches()).collect()
    }

    /// Checks that the GPU itself reads and writes pages of a page store here.
    ///
    /// # Errors
    /// [`Error::Usage`] where it does not: without a GPU, in files and in stripes.
    pub fn check_pages_on_gpu(&self) -> Result<()> {
        self.lists().map(drop)
    }

    /// Loads pages of a page store by the GPU, as [`PageMover::load`].
    ///
    /// # Safety
    /// As [`PageMover::load`], for the pieces.
    ///
    /// # Errors
    /// As [`PageMover::load`]; [`Error::Usage`] as [`check_pages_on_gpu`](Self::check_pages_on_gpu), and for pages past
    /// the end.
    pub unsafe fn load_pages_on_gpu(
        &self,
        mover: &PageMover,
        pages: &[PageRead<'_>],
        header_of: impl FnMut(usize) -> u64,
        stream: u64,
    ) -> Result<PendingPages> {
        for page in pages {
            self.check_page(page.offset, u64::from(page.bytes))?;
        }
        let rows = self.lists()?;
        // SAFETY: the caller keeps the conditions under `# Safety`; the pages lie inside the store, which is one drive.
        unsafe { mover.load(rows, pages, header_of, stream) }
    }

    /// Writes staged pages to the drive by the GPU, in streams of the mover, as [`StagingBatch::scatter`]. They are
    /// durable after [`flush`](Self::flush).
    ///
    /// # Errors
    /// As [`Table::scatter_on_gpu`]; [`Error::Usage`] as [`check_pages_on_gpu`](Self::check_pages_on_gpu), and for pages
    /// past the end.
    pub fn write_pages_on_gpu(
        &self,
        mover: &PageMover,
        staged: &StagingBatch,
        pages: &[PageWrite],
        header_of: impl FnMut(usize) -> [u8; PAGE_BLOCK as usize],
    ) -> Result<PendingWrites> {
        self.check_pages_on_gpu()?;
        for page in pages {
            self.check_page(page.offset, staged.bytes(page.page) as u64)?;
        }
        let table = self.table(0, self.len() / PAGE_BLOCK, PAGE_BLOCK)?;
        staged.scatter(mover, pages, header_of, |request, stream| {
            // SAFETY: the request names memory of the staged pages, which they keep until the writes have ended.
            unsafe { table.scatter_on_gpu(request, stream) }
        })
    }

    fn check_page(&self, offset: u64, bytes: u64) -> Result<()> {
        if !offset.is_multiple_of(PAGE_BLOCK) {
            return Err(Error::usage(
                format!("a page begins at byte {offset}, which is no multiple of {PAGE_BLOCK}"),
                "pass places of a page store",
            ));
        }
        let bytes = bytes.next_multiple_of(PAGE_BLOCK);
        self.space.check(offset, PAGE_BLOCK + bytes).map(drop)
    }

    /// Writes `bytes` bytes at address `from` of the store's GPU to byte `offset` of the store: enqueues the
    /// write in `stream`, a `CUstream`, and returns before it runs. Blocks that are written in part keep their
    /// other bytes. The GPU submits the writes of whole blocks of a drive as [`Table::scatter_on_gpu`] does, 64
    /// KiB each and a shorter one at the end.
    ///
    /// # Safety
    /// As [`Table::scatter_on_gpu`], for `bytes` bytes at `from`.
    ///
    /// # Errors
    /// As [`Table::scatter_on_gpu`]; [`Error::Usage`] for a range past the end.
    pub unsafe fn write_from_gpu(
        &self,
        offset: u64,
        bytes: u64,
        from: u64,
        stream: u64,
    ) -> Result<PendingRows> {
        self.space.check(offset, bytes)?;
        let gpu = self.space.gpu()?.gpu();
        gpu.judge_list(stream, [KernelArgument::read("data", from, bytes, 1)])?;
        let write = |table: &Table, request: &RowRequest| {
            // SAFETY: the caller keeps the conditions under `# Safety`.
            unsafe { table.scatter_on_gpu(request, stream) }
        };
        self.in_rows((offset, bytes), ROW_BYTES, from, stream, write)
    }

    /// Divides a range into rows of `row_bytes` and one shorter row at the end, and calls `start` for both.
    fn in_rows(
        &self,
        (offset, bytes): (u64, u64),
        row_bytes: u64,
        address: u64,
        stream: u64,
        mut start: impl FnMut(&Table, &RowRequest) -> Result<PendingRows>,
    ) -> Result<PendingRows> {
        self.space.check(offset, bytes)?;
        let gpu = self.space.gpu()?.gpu();
        let whole = bytes / row_bytes;
        LaunchSequence::run(gpu, stream, |sequence| {
            for (rows, bytes, at) in [
                (whole, row_bytes, 0),
                (1, bytes % row_bytes, whole * row_bytes),
            ] {
                if rows == 0 || bytes == 0 {
                    continue;
                }
                let table = self.table(offset + at, rows, bytes)?;
                let request = RowRequest {
                    ids: 0,
                    wide_ids: true,
                    count: rows,
                    out: address + at,
                    out_stride: bytes,
                    status: 0,
                };
                sequence.add(start(&table, &request)?, at / row_bytes);
            }
            Ok(())
        })
    }
}
