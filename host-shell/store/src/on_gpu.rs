//! Gathers and scatters of rows between a store and GPU memory, on the caller's stream. The GPU submits the commands
//! itself if its kernels reach the queues; otherwise a host thread moves the rows when the stream reaches the
//! operation.
// UNSAFETY: requests hold addresses of GPU memory, for which the caller vouches.
#![allow(unsafe_code)]

use super::element::RowElement;
use super::member::StoreMember;
use super::options::DataPath;
use super::row_ids::RowIds;
use super::space::StoreSpace;
use super::status;
use super::table::{LaterTable, Table};
use nvme_cuda::{
    GatherOptions, GpuRows, HostRows, KernelFunction, LaunchSize, Module, MoveRows, PendingRows,
    RowDirection, RowRequest, RowTable, StripedRows, TableMap,
};
use nvme_driver::error::{Error, Result};
use nvme_driver::widen::RowConversion;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Mover of the rows of an operation in a stream.
enum RowMover<'t> {
    /// The GPU.
    Gpu(&'t GpuRows),
    /// The GPU, over several drives.
    Striped(&'t StripedRows),
    /// A host thread, in the order of the stream.
    Host,
}

impl StoreSpace {
    /// Describes in `shown` the data path between the members of a stripe and a GPU.
    pub(super) fn path_of_stripes(&self, shown: &mut DataPath) {
        let has_gpu = self.members.iter().any(|member| member.gpu.is_some());
        // A drive whose queues the GPU cannot access has the reason in its path.
        let by_host = |member: &&StoreMember| {
            member.gpu.is_some() && member.rows.is_none() && member.controller.is_some()
        };
        let refused = self.members.iter().find(by_host);
        let why = match &self.striped {
            Some(_) => {
                shown.data = "gpu";
                shown.tier = self.members.first().and_then(|member| member.path.tier);
                "the GPU submits the reads of rows that are no longer than a stripe; a host thread moves the others \
                 and writes"
            }
            None if refused.is_some() => refused.map_or("", |member| member.path.why.as_str()),
            None if has_gpu => {
                "a host thread moves rows for the GPU, which submits to up to 32 drives in stripes of a power of two"
            }
            None => return,
        };
        shown.why = format!("{}; {why}", shown.why);
    }

    /// # Errors
    /// [`Error::Usage`] for a store without a GPU.
    pub(super) fn gpu(&self) -> Result<&HostRows> {
        let gpu = self.members.first().and_then(|member| member.gpu.as_ref());
        gpu.ok_or_else(|| {
            Error::usage(
                "the store was opened without a GPU",
                "set `gpu` in the options of the store",
            )
        })
    }
}

impl Table {
    /// Gathers rows on a GPU: enqueues the gather in `stream`, a `CUstream` of the store's GPU (0 is the
    /// default one), and returns before it runs. Ids, output and row status lie in GPU memory, or in host
    /// memory that the GPU can access.
    ///
    /// The GPU itself submits the reads of a drive, or of striped drives. Rows of a file, rows that no slot can
    /// hold, and rows longer than a stripe are read by a host thread when the stream reaches them. A member of
    /// a stripe that is gone fails the rows that need it; [`RowFailures::member`](nvme_cuda::RowFailures::member)
    /// names it.
    ///
    /// The gather sees every write of the store that had returned before it begins on the GPU. The caller's
    /// context and capture mode are preserved; the stream may be captured.
    ///
    /// # Safety
    /// The addresses in `request` are valid on the GPU for the sizes that `request` states until the gather has
    /// ended, and for as long as a graph that captured it may be launched. The store itself keeps its own
    /// objects alive that such a graph needs.
    ///
    /// # Errors
    /// [`Error::Usage`] for a store without a GPU; [`Error::Environment`] with the driver's answer, and with too many
    /// operations in progress or captured. No work is in progress then: work that was launched before the error has
    /// been waited for, a minute at most. [`Error::Unfinished`] alone means that it has not ended, and that the memory
    /// must stay valid.
    pub unsafe fn gather_on_gpu(&self, request: &RowRequest, stream: u64) -> Result<PendingRows> {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.gather_by(request, None, stream) }
    }

    /// Gathers as [`gather_on_gpu`](Self::gather_on_gpu) does, with converted elements: rows of
    /// [`RowConversion::row_bytes`] bytes are stored at `out` of the request. `widen` is a
    /// [`RowWidening`](super::RowWidening), or one with scales. A cache keeps the rows as they are stored.
    ///
    /// # Safety
    /// As [`gather_on_gpu`](Self::gather_on_gpu), with the wide rows; scales stay as long as ids.
    ///
    /// # Errors
    /// As [`gather_on_gpu`](Self::gather_on_gpu) and [`RowConversion::row_bytes`]; [`Error::Usage`] for an output that is
    /// not aligned to its elements, or too narrow, and for scales in memory of the host where the GPU reads the rows, or in
    /// memory of the GPU where a host thread does.
    pub unsafe fn gather_as_on_gpu(
        &self,
        request: &RowRequest,
        widen: impl Into<RowConversion>,
        stream: u64,
    ) -> Result<PendingRows> {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.gather_by(request, Some(widen.into()), stream) }
    }

    /// # Safety
    /// As [`gather_as_on_gpu`](Self::gather_as_on_gpu).
    pub(super) unsafe fn gather_by(
        &self,
        request: &RowRequest,
        widen: Option<RowConversion>,
        stream: u64,
    ) -> Result<PendingRows> {
        let ways = GatherOptions {
            cache: self.cache.as_deref(),
            widen: widen.as_ref(),
            map: self.map().map(Arc::as_ref),
            failed: self.failed,
        };
        match self.by()? {
            RowMover::Gpu(rows) => {
                // SAFETY: the caller keeps the conditions under `# Safety`.
                unsafe { rows.gather(&self.of_namespace(), request, ways, stream) }
            }
            RowMover::Striped(rows) => {
                // SAFETY: the caller keeps the conditions under `# Safety`.
                unsafe { rows.gather(&self.of_namespace(), request, ways, stream) }
            }
            RowMover::Host => {
                let host = self.space.gpu()?;
                let row_bytes = match &widen {
                    Some(widen) => widen.row_bytes(self.rows(), self.row_bytes())?,
                    None => self.row_bytes(),
                };
                if let Some(scales) = widen.as_ref().and_then(|widen| widen.scales.as_ref()) {
                    scales.of_row(0, 1)?;
                }
                let gather = self.by_host(move |table, ids, data, status| {
                    let report = match &widen {
                        Some(widen) => table.gather_as(ids, widen.clone(), data, Some(status)),
                        None => table.gather(ids, data, Some(status)),
                    };
                    report.map(drop)
                });
                let read = RowDirection::Read;
                // SAFETY: the caller keeps the conditions under `# Safety`.
                unsafe { host.start(row_bytes, request, read, gather, stream) }
            }
        }
    }

    /// Returns this table with a cache of `bytes` bytes of GPU memory:
    /// [`gather_on_gpu`](Self::gather_on_gpu) copies recently gathered rows from there. Clones of
    /// it share the cache.
    ///
    /// A write through the store makes all of the cache stale, so that no gather returns an old row. The cache is of
    /// use if rows are read many times between two writes. A row that lies in two ranges of its table is not kept.
    ///
    /// # Errors
    /// [`Error::Usage`] where the GPU does not submit the reads itself, and for too few bytes; [`Error::Environment`] without
    /// memory.
    pub fn cached(mut self, bytes: u64) -> Result<Self> {
        let RowMover::Gpu(rows) = self.by()? else {
            return Err(self.not_by_gpu("a cache of rows"));
        };
        self.cache = Some(Arc::new(rows.cache(
            &self.of_namespace(),
            self.map().map(Arc::as_ref),
            bytes,
        )?));
        Ok(self)
    }

    /// Returns the access to rows of this table for a kernel of the caller, to be passed by value:
    /// `nvme_gpu_kernel::TableRows` in Rust, `nvme_gpu_rows_enter` in CUDA C++ (docs/guide/kernels.md).
    ///
    /// # Errors
    /// [`Error::Usage`] where the GPU does not submit the reads itself.
    pub fn device_rows(&self) -> Result<nvme_gpu_kernel::rows::GatherLaunch> {
        self.check_one_range()?;
        match self.by()? {
            RowMover::Gpu(rows) => rows.device_rows(&self.of_namespace()),
            RowMover::Striped(_) | RowMover::Host => Err(self.not_by_gpu("reads by a kernel")),
        }
    }

    /// Enqueues a kernel of your own in `stream`, a `CUstream` of the store's GPU, whose warps use the rows of this
    /// table while they read them, by `nvme_gpu_kernel::RangeStream`. `argument` makes the kernel's argument from the
    /// launch of its rows; its blocks have 256 threads. There is a warp for each of `parts` parts of the work, as far
    /// as they fit. Rows may have any length. The rows that the kernel counts as failed are the failed rows of the
    /// [`PendingRows`].
    ///
    /// # Safety
    /// `function` belongs to `module` and takes one `T`; the conditions of [`gather_on_gpu`](Self::gather_on_gpu) hold
    /// for the addresses in it. The module stays loaded for as long as they stay valid.
    ///
    /// # Errors
    /// [`Error::Usage`] if the GPU does not submit the reads itself, for 2^32 rows and more, and for rows of 4 GiB and
    /// more; [`Error::Environment`] with the driver's answer; the errors of `argument`.
    pub unsafe fn stream_on_gpu<T: Copy>(
        &self,
        kernel: (&Module, KernelFunction),
        parts: u64,
        argument: impl FnOnce(nvme_gpu_kernel::rows::GatherLaunch) -> Result<T>,
        stream: u64,
    ) -> Result<PendingRows> {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.stream_by(kernel, (parts, None), argument, stream) }
    }

    /// Launches as [`stream_on_gpu`](Self::stream_on_gpu) does, with a grid of `blocks`. Only some of them read; the
    /// others end by `nvme_gpu_kernel::leave_block`. The kernel counts failures among `parts` parts.
    ///
    /// # Safety
    /// As [`stream_on_gpu`](Self::stream_on_gpu).
    ///
    /// # Errors
    /// As [`stream_on_gpu`](Self::stream_on_gpu).
    pub unsafe fn stream_in_blocks<T: Copy>(
        &self,
        kernel: (&Module, KernelFunction),
        (parts, blocks): (u64, LaunchSize),
        argument: impl FnOnce(nvme_gpu_kernel::rows::GatherLaunch) -> Result<T>,
        stream: u64,
    ) -> Result<PendingRows> {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.stream_by(kernel, (parts, Some(blocks)), argument, stream) }
    }

    /// # Safety
    /// As [`stream_on_gpu`](Self::stream_on_gpu).
    unsafe fn stream_by<T: Copy>(
        &self,
        kernel: (&Module, KernelFunction),
        parts: (u64, Option<LaunchSize>),
        argument: impl FnOnce(nvme_gpu_kernel::rows::GatherLaunch) -> Result<T>,
        stream: u64,
    ) -> Result<PendingRows> {
        self.space.gpu()?;
        self.check_one_range()?;
        let is_short = |number: u64| u32::try_from(number).is_ok();
        if !is_short(self.rows()) || !is_short(self.row_bytes()) {
            return Err(Error::usage(
                format!(
                    "{} rows of {} bytes exceed the 32 bits of a row's number or length",
                    self.rows(),
                    self.row_bytes()
                ),
                "use fewer than 2^32 rows of less than 4 GiB",
            ));
        }
        if let [member] = &self.space.members[..]
            && let Some(rows) = member.rows.as_ref().filter(|rows| rows.streams())
        {
            let table = self.of_namespace();
            // SAFETY: the caller keeps the conditions under `# Safety`.
            return unsafe { rows.stream(&table, kernel, parts, argument, stream) };
        }
        Err(Error::usage(
            "the GPU reads rows that a kernel uses meanwhile from one drive alone",
            "use one drive (sim:, vfio:, vfio-user:) with blocks of 32 KiB at most",
        ))
    }

    /// Enqueues a kernel of your own in `stream`, a `CUstream` of the store's GPU, whose warps choose rows of this
    /// table and read them, by `nvme_gpu_kernel::WarpReads`. `argument` makes the kernel's argument from the launch of
    /// its rows; its blocks have 256 threads. There are `count` work items, one warp's each; an item that the kernel
    /// counts as failed is a failed row of the [`PendingRows`]. The first `lanes` lanes of a warp read at a time: 32 if
    /// rows touch 4 KiB of blocks at most, fewer if they are larger.
    ///
    /// # Safety
    /// As [`stream_on_gpu`](Self::stream_on_gpu); no other lanes than the first `lanes` ask for rows.
    ///
    /// # Errors
    /// [`Error::Usage`] if the GPU does not submit the reads itself, for rows that 128 KiB do not hold for these
    /// lanes, and for 2^32 rows or work items and more; [`Error::Environment`] with the driver's answer.
    pub unsafe fn read_by_warps<T: Copy>(
        &self,
        (count, lanes): (u64, u32),
        kernel: (&Module, KernelFunction),
        argument: impl FnOnce(nvme_gpu_kernel::rows::GatherLaunch) -> T,
        stream: u64,
    ) -> Result<PendingRows> {
        self.space.gpu()?;
        self.check_one_range()?;
        if u32::try_from(self.rows().max(count)).is_err() {
            return Err(Error::usage(
                format!(
                    "{count} work items over {} rows exceed 32 bits",
                    self.rows()
                ),
                "use fewer than 2^32 of each",
            ));
        }
        let table = self.of_namespace();
        if let [member] = &self.space.members[..]
            && let Some(rows) = &member.rows
        {
            // SAFETY: the caller keeps the conditions under `# Safety`.
            return unsafe { rows.read_by_warps(&table, (count, lanes), kernel, argument, stream) };
        }
        Err(Error::usage(
            "the GPU reads rows that the warps of a kernel choose from one drive alone",
            "use one drive (sim:, vfio:, vfio-user:)",
        ))
    }

    /// Checks that the table lies in one range, as kernels of the caller's need it.
    fn check_one_range(&self) -> Result<()> {
        match &self.ranges {
            None => Ok(()),
            Some(_) => Err(Error::usage(
                "kernels of the caller's are for tables in one range, and this one lies in several",
                "gather the rows, or use a table in one range",
            )),
        }
    }

    fn not_by_gpu(&self, what: &str) -> Error {
        Error::usage(
            format!("{what}: it is for rows that the GPU reads from one drive"),
            "use one drive (sim:, vfio:, vfio-user:) and rows of 124 KiB at most",
        )
    }

    /// Writes rows that lie in GPU memory, at `out` of the request: enqueues the scatter in `stream` as
    /// [`gather_on_gpu`](Self::gather_on_gpu) does. If several rows have one id, the last one is written.
    ///
    /// The GPU submits the writes itself if offset and length of the rows are multiples of a block of one drive, and
    /// rows fit into slots (docs/adr/0014); a host thread sends all others. Operations that come after it in the stream
    /// see the rows that it wrote.
    ///
    /// The GPU takes no lock: the program has to order two writers of one row, by a stream or by waiting. If a call of
    /// the host writes, or adds to, a part of such a row at the same time, it may restore the old bytes of the other
    /// parts of the row. A row whose write timed out may still be written until the controller was recovered, which
    /// begins at once: scatters on the GPU fail until then.
    ///
    /// # Safety
    /// As [`gather_on_gpu`](Self::gather_on_gpu).
    ///
    /// # Errors
    /// As [`gather_on_gpu`](Self::gather_on_gpu); [`Error::Usage`] for a store that is for reading only.
    pub unsafe fn scatter_on_gpu(&self, request: &RowRequest, stream: u64) -> Result<PendingRows> {
        self.check_changeable()?;
        let table = self.of_namespace();
        if let RowMover::Gpu(rows) = self.by()?
            && rows.writes(&table, request)
        {
            // SAFETY: the caller keeps the conditions under `# Safety`.
            return unsafe { rows.scatter(&table, request, stream) };
        }
        let scatter = self.by_host(|table, ids, data, status| {
            table.scatter_others(ids, data, Some(status)).map(drop)
        });
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.write_on_gpu(request, scatter, stream) }
    }

    /// Adds rows that lie in GPU memory to rows of the table, as [`scatter_on_gpu`](Self::scatter_on_gpu) writes
    /// them. Rows with the same id are summed.
    ///
    /// # Safety
    /// As [`gather_on_gpu`](Self::gather_on_gpu).
    ///
    /// # Errors
    /// As [`scatter_on_gpu`](Self::scatter_on_gpu) and [`scatter_add`](Self::scatter_add).
    pub unsafe fn scatter_add_on_gpu(
        &self,
        request: &RowRequest,
        element: RowElement,
        stream: u64,
    ) -> Result<PendingRows> {
        self.check_elements(element)?;
        let add = self.by_host(move |table, ids, data, status| {
            table.add_others(ids, data, element, Some(status)).map(drop)
        });
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.write_on_gpu(request, add, stream) }
    }

    /// # Safety
    /// As [`gather_on_gpu`](Self::gather_on_gpu).
    unsafe fn write_on_gpu(
        &self,
        request: &RowRequest,
        rows: MoveRows,
        stream: u64,
    ) -> Result<PendingRows> {
        self.check_changeable()?;
        let host = self.space.gpu()?;
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { host.start(self.row_bytes(), request, RowDirection::Write, rows, stream) }
    }

    /// Returns the mover that gathers this table's rows.
    fn by(&self) -> Result<RowMover<'_>> {
        self.space.gpu()?;
        if let [member] = &self.space.members[..]
            && let Some(rows) = &member.rows
            && rows.fits(&self.of_namespace())
        {
            return Ok(RowMover::Gpu(rows));
        }
        if let Some(rows) = &self.space.striped
            && rows.fits(&self.of_namespace())
        {
            return Ok(RowMover::Striped(rows));
        }
        Ok(RowMover::Host)
    }

    /// Returns the queues that blocks own, if the GPU reads this table's rows of one drive without a cache.
    pub(super) fn owned_rows(&self) -> Result<Option<&GpuRows>> {
        Ok(match self.by()? {
            RowMover::Gpu(rows) if self.cache.is_none() => Some(rows),
            _ => None,
        })
    }

    pub(super) fn of_namespace(&self) -> RowTable {
        RowTable {
            first_byte: self.map().map_or_else(|| self.offset(), |map| map.bits()),
            rows: self.rows(),
            row_bytes: u32::try_from(self.row_bytes()).unwrap_or(u32::MAX),
        }
    }

    /// Returns the ranges for kernels, of a table in several.
    pub(super) fn map(&self) -> Option<&Arc<TableMap>> {
        self.ranges.as_ref()?.map.as_ref()
    }

    /// Wraps `run` into the callback of a host thread that moves rows of this table. The callback holds the
    /// store weakly: once the store is gone, it fails the rows with [`RowStatus::Gone`](status::RowStatus::Gone).
    fn by_host(
        &self,
        run: impl Fn(&Self, RowIds<'_>, &mut [u8], &mut [i32]) -> Result<()> + Send + Sync + 'static,
    ) -> MoveRows {
        let (later, failed) = (LaterTable::of_host(self), self.failed.byte());
        let run = move |ids: &[i64], data: &mut [u8], status: &mut [i32]| {
            later.table().and_then(|table| {
                let ran = run(&table, RowIds::I64(ids), data, status);
                // The last owner of a store closes it with calls into the driver, which this thread may not make.
                if let Some(space) = Arc::into_inner(table.space) {
                    // Without a thread it is leaked.
                    let space = ManuallyDrop::new(space);
                    let close = move || drop(ManuallyDrop::into_inner(space));
                    let _ = std::thread::Builder::new().spawn(close);
                }
                ran
            })
        };
        Box::new(move |ids, data, status| {
            // After a panic the rows have the content that the table asks for, too.
            let ran = catch_unwind(AssertUnwindSafe(|| run(ids, data, status)));
            let code = match ran {
                Ok(Ok(())) => return,
                Ok(Err(error)) => status::of_error(&error),
                Err(_) => status::RowStatus::NotRun.code(),
            };
            data.fill(failed);
            status.fill(code);
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::status::RowStatus;
    use nvme_gpu_kernel::rows::code;

    /// The kernel's numbers are in a crate that a build without CUDA lacks.
    #[test]
    fn rows_end_with_the_same_numbers_on_a_gpu_and_on_the_cpu() {
        for (status, code) in [
            (RowStatus::OutOfRange, code::OUT_OF_RANGE),
            (RowStatus::TimedOut, code::TIMED_OUT),
            (RowStatus::Gone, code::GONE),
            (RowStatus::NotRun, code::NOT_RUN),
        ] {
            assert_eq!(status.code(), code);
        }
        assert_eq!(crate::status::OK, code::OK);
    }
}
