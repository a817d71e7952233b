//! Tables: rows by ids.
// UNSAFETY: functions of the C interface, over memory that C vouches for.
#![allow(unsafe_code)]

use crate::border::{Answer, call, give, put, text, value};
use crate::memory::{Lent, Where, place};
use crate::opened::{OpenTable, Opened, StoreHandle, TABLES, TableHandle, opened};
use crate::pending::{self, Outcome, PendingHandle, Report};
use crate::status::{Failure, nvme_gpu_status};
use crate::transfer::nvme_gpu_stream;
use nvme_host::Table;
use nvme_host::store::{Duplicates, Element, Ids, RowReport, Widen};
use std::ffi::{c_char, c_void};
use std::sync::Arc;

/// Type of ids: int32_t.
pub const NVME_GPU_I32: u32 = 4;
/// Type of ids: int64_t.
pub const NVME_GPU_I64: u32 = 8;

/// Elements of nvme_gpu_scatter_add(): IEEE 754 binary32.
pub const NVME_GPU_ADD_F32: u32 = 1;
/// Elements of nvme_gpu_scatter_add(): IEEE 754 binary16, summed as binary32.
pub const NVME_GPU_ADD_F16: u32 = 2;
/// Elements of nvme_gpu_scatter_add(): bfloat16, summed as binary32.
pub const NVME_GPU_ADD_BF16: u32 = 3;
/// Elements of nvme_gpu_scatter_add(): int32_t; sums wrap.
pub const NVME_GPU_ADD_I32: u32 = 4;

/// nvme_gpu_scatter(): the last of several rows with the same id is written.
pub const NVME_GPU_DUPLICATES_LAST: u32 = 0;
/// nvme_gpu_scatter(): an id that comes twice is NVME_GPU_ERROR_USAGE, and nothing is written.
pub const NVME_GPU_DUPLICATES_ERROR: u32 = 1;

/// Opens a table: `rows` rows of `row_bytes` bytes (1 and more), from byte `offset` of the store on. On success
/// `*table` is a handle for nvme_gpu_table_close(), else NULL. Errors: NVME_GPU_ERROR_USAGE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_table_open(
    store: *mut StoreHandle,
    offset: u64,
    rows: u64,
    row_bytes: u64,
    table: *mut *mut TableHandle,
) -> nvme_gpu_status {
    call(|| {
        // SAFETY: as the header says.
        unsafe { put(table, std::ptr::null_mut(), "table") }?;
        let opened = self::opened(store)?;
        let of_store = opened.store.table(offset, rows, row_bytes)?;
        let open = OpenTable {
            store: store.addr(),
            opened,
            table: of_store,
        };
        let handle: *mut TableHandle = TABLES.open(Arc::new(open));
        // A store that was closed meanwhile has taken its tables with it, but for this one.
        if let Err(failure) = self::opened(store) {
            drop(TABLES.close(handle));
            return Err(failure);
        }
        // SAFETY: written once already.
        unsafe { put(table, handle, "table") }
    })
}

/// Closes a table; operations of it go on. NULL and a closed handle are ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_table_close(table: *mut TableHandle) {
    value((), || {
        drop(TABLES.close(table));
        Ok(())
    });
}

/// Number of rows; 0 for a closed handle, with nvme_gpu_last_error().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_table_rows(table: *const TableHandle) -> u64 {
    value(0, || Ok(TABLES.get(table, "table")?.table.rows()))
}

/// Bytes of a row; 0 for a closed handle, with nvme_gpu_last_error().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_table_row_bytes(table: *const TableHandle) -> u64 {
    value(0, || Ok(TABLES.get(table, "table")?.table.row_bytes()))
}

/// Ids, rows and row status of a call, in memory of the caller.
#[derive(Clone, Copy)]
struct Rows {
    ids: Lent,
    is_wide: bool,
    count: u64,
    rows: Lent,
    row_bytes: u64,
    stride: u64,
    status: Option<Lent>,
    /// What gathers make of the elements; `row_bytes` are those of a row then.
    widen: Option<Widen>,
}

impl Rows {
    /// # Safety
    /// As the header says of the pointers.
    unsafe fn new<T>(
        row_bytes: u64,
        ids: *const c_void,
        id_type: u32,
        count: u64,
        rows: *const T,
        stride: u64,
        row_status: *mut i32,
    ) -> Answer<Self> {
        let is_wide = match id_type {
            NVME_GPU_I32 => false,
            NVME_GPU_I64 => true,
            other => {
                return Err(Failure::usage(
                    format!("ids of type {other}"),
                    "use NVME_GPU_I32 or NVME_GPU_I64",
                ));
            }
        };
        let stride = match stride {
            0 => row_bytes,
            stride if stride < row_bytes => {
                return Err(Failure::usage(
                    format!("rows of {row_bytes} bytes every {stride} bytes"),
                    "use a stride of 0 (rows without gaps), or one that a row fits into",
                ));
            }
            stride => stride,
        };
        let before_last = count.saturating_sub(1).checked_mul(stride);
        let bytes = before_last
            .and_then(|bytes| bytes.checked_add(row_bytes.min(count.saturating_mul(row_bytes))));
        let bytes = bytes.unwrap_or(u64::MAX);
        // SAFETY: the caller's.
        unsafe {
            Ok(Self {
                ids: Lent::elements(ids, count, id_type as usize, "ids")?,
                is_wide,
                count,
                rows: Lent::elements(rows, bytes, 1, "rows")?,
                row_bytes,
                stride,
                status: match row_status.is_null() {
                    true => None,
                    false => Some(Lent::elements(row_status, count, 4, "row_status")?),
                },
                widen: None,
            })
        }
    }

    /// # Safety
    /// The ids are there, in host memory.
    unsafe fn ids(&self) -> Vec<i64> {
        // SAFETY: the caller's.
        let bytes = unsafe { self.ids.bytes() };
        match self.is_wide {
            true => bytes
                .as_chunks()
                .0
                .iter()
                .map(|one| i64::from_ne_bytes(*one))
                .collect(),
            false => bytes
                .as_chunks()
                .0
                .iter()
                .map(|one| i32::from_ne_bytes(*one).into())
                .collect(),
        }
    }

    fn is_dense(&self) -> bool {
        self.stride == self.row_bytes
    }

    /// Runs `gather` over ids, places (one after the other) and status, and puts the rows where they belong.
    ///
    /// # Safety
    /// All memory is there, in host memory, and used by nothing else.
    unsafe fn gather(&self, table: &Table) -> Outcome {
        // SAFETY: the caller's.
        let (ids, out) = unsafe { (self.ids(), self.rows.bytes_mut()) };
        let mut status = vec![0; ids.len()];
        let mut gather = |out: &mut [u8]| match self.widen {
            Some(widen) => table.gather_as((&ids[..]).into(), widen, out, Some(&mut status)),
            None => table.gather((&ids[..]).into(), out, Some(&mut status)),
        };
        let result = match self.is_dense() {
            true => gather(out),
            false => {
                let row = self.row_bytes as usize;
                let mut dense = vec![0; row * ids.len()];
                let result = gather(&mut dense);
                if result.is_ok() {
                    let places = out.chunks_mut(self.stride as usize);
                    for (from, to) in dense.chunks_exact(row).zip(places) {
                        to[..row].copy_from_slice(from);
                    }
                }
                result
            }
        };
        // SAFETY: the caller's.
        unsafe { self.report(result, &status) }
    }

    /// Runs `change` over ids, rows (one after the other) and status.
    ///
    /// # Safety
    /// All memory is there, in host memory, and changed by nothing else.
    unsafe fn change(
        &self,
        change: impl FnOnce(Ids<'_>, &[u8], &mut [i32]) -> nvme_host::Result<RowReport>,
    ) -> Outcome {
        // SAFETY: the caller's.
        let (ids, rows) = unsafe { (self.ids(), self.rows.bytes()) };
        let mut status = vec![0; ids.len()];
        let result = match self.is_dense() {
            true => change((&ids[..]).into(), rows, &mut status),
            false => {
                let row = self.row_bytes as usize;
                let places = rows.chunks(self.stride as usize);
                let dense: Vec<u8> = places.flat_map(|place| &place[..row]).copied().collect();
                change((&ids[..]).into(), &dense, &mut status)
            }
        };
        // SAFETY: the caller's.
        unsafe { self.report(result, &status) }
    }

    /// Copies the status of each row out, unless the call was refused.
    ///
    /// # Safety
    /// The memory for it is there, and used by nothing else.
    unsafe fn report(&self, result: nvme_host::Result<RowReport>, status: &[i32]) -> Outcome {
        let report = match result {
            Ok(report) => report,
            Err(error) => return Failure::from(error).into(),
        };
        if let Some(out) = self.status {
            // SAFETY: the caller's.
            let (places, _) = unsafe { out.bytes_mut() }.as_chunks_mut();
            for (to, from) in places.iter_mut().zip(status) {
                *to = from.to_ne_bytes();
            }
        }
        Outcome::of_rows(report)
    }

    /// Where the rows lie; ids and status have to be where the same hand reaches them.
    fn place(&self, opened: &Opened) -> Answer<Where> {
        if self.count == 0 {
            return Ok(Where::Host);
        }
        let rows = place(opened, &self.rows, "rows")?;
        if rows == Where::Host && place(opened, &self.ids, "ids")? == Where::Gpu {
            return Err(Failure::usage(
                "the ids lie in GPU memory and the rows do not",
                "have both in GPU memory, or both in host memory",
            ));
        }
        Ok(rows)
    }
}

/// What a gather, a scatter or a scatter-add does on the CPU.
#[derive(Clone, Copy)]
enum Verb {
    Gather,
    Scatter(Duplicates),
    ScatterAdd(Element),
}

impl Verb {
    /// # Safety
    /// The memory of `rows` is there, in host memory, and used by nothing else.
    unsafe fn run(self, table: &Table, rows: &Rows) -> Outcome {
        // SAFETY: the caller's.
        unsafe {
            match self {
                Self::Gather => rows.gather(table),
                Self::Scatter(duplicates) => rows.change(|ids, bytes, status| {
                    table.scatter(ids, bytes, duplicates, Some(status))
                }),
                Self::ScatterAdd(element) => rows.change(|ids, bytes, status| {
                    table.scatter_add(ids, bytes, element, Some(status))
                }),
            }
        }
    }
}

/// Puts `verb` into a stream of the GPU.
///
/// # Safety
/// As the header says of the pointers.
#[cfg(feature = "cuda")]
unsafe fn launch(
    open: &OpenTable,
    verb: Verb,
    rows: &Rows,
    stream: nvme_gpu_stream,
) -> Answer<nvme_host::cuda::Pending> {
    if matches!(verb, Verb::Scatter(Duplicates::Error)) {
        return Err(Failure::usage(
            "the ids lie in GPU memory: whether one comes twice is not known before the stream runs",
            "use NVME_GPU_DUPLICATES_LAST",
        ));
    }
    let request = nvme_host::cuda::Request {
        ids: rows.ids.address(),
        wide_ids: rows.is_wide,
        count: rows.count,
        out: rows.rows.address(),
        out_stride: rows.stride,
        status: rows.status.map_or(0, |status| status.address()),
    };
    let (table, stream) = (&open.table, stream.addr() as u64);
    // SAFETY: the caller's.
    let pending = unsafe {
        match verb {
            Verb::Gather => match rows.widen {
                Some(widen) => table.gather_as_on_gpu(&request, widen, stream),
                None => table.gather_on_gpu(&request, stream),
            },
            Verb::Scatter(_) => table.scatter_on_gpu(&request, stream),
            Verb::ScatterAdd(element) => table.scatter_add_on_gpu(&request, element, stream),
        }
    };
    Ok(pending?)
}

/// Waits for `verb`.
///
/// # Safety
/// As the header says of the pointers.
unsafe fn now(
    open: &OpenTable,
    verb: Verb,
    rows: &Rows,
    stream: nvme_gpu_stream,
    report: *mut Report,
) -> Answer<()> {
    let outcome = match rows.place(&open.opened)? {
        // SAFETY: the caller's.
        Where::Host => unsafe { verb.run(&open.table, rows) },
        #[cfg(feature = "cuda")]
        // SAFETY: the caller's.
        Where::Gpu => pending::wait_for_stream(unsafe { launch(open, verb, rows, stream) }?)?,
        #[cfg(not(feature = "cuda"))]
        Where::Gpu => return Err(Failure::usage("built without CUDA", "use host memory")),
    };
    let _ = stream;
    if !report.is_null() {
        // SAFETY: the caller's.
        unsafe { give(report, &outcome.report) }?;
    }
    outcome.result()
}

/// Starts `verb`.
///
/// # Safety
/// As the header says of the pointers.
unsafe fn later(
    open: &OpenTable,
    verb: Verb,
    rows: Rows,
    stream: nvme_gpu_stream,
    to: *mut *mut PendingHandle,
) -> Answer<()> {
    if rows.count == 0 {
        // SAFETY: the caller's.
        return unsafe { pending::nothing(to) };
    }
    let _ = stream;
    match rows.place(&open.opened)? {
        // SAFETY: the caller's.
        Where::Host => unsafe {
            pending::start_rows(&open.opened, &open.table, to, move |table| {
                verb.run(table, &rows)
            })
        },
        #[cfg(feature = "cuda")]
        // SAFETY: the caller's.
        Where::Gpu => unsafe { pending::on_stream(to, launch(open, verb, &rows, stream)?) },
        #[cfg(not(feature = "cuda"))]
        Where::Gpu => Err(Failure::usage("built without CUDA", "use host memory")),
    }
}

/// Copies row `ids[i]` of the table to place `i` of `out`, for every `i`, and waits.
///
/// `ids` are `count` int32_t (NVME_GPU_I32) or int64_t (NVME_GPU_I64); they may repeat. `out_stride` is the distance
/// of two rows in `out` in bytes; 0 stands for rows without gaps. `row_status` is NULL or has `count` places: 0, what
/// the controller answered, or NVME_GPU_ROW_... `report` is NULL or written.
///
/// All lie in host memory, or all in memory of the store's GPU: then it comes after what `stream` did before, and the
/// GPU reads rows of a drive by itself, a host thread those of a file or a stripe. Ids and row status may also be in
/// registered host memory.
///
/// A row that was not read is zero in `out`, and has its status; the others are right. Returns the status of the first
/// row that failed. Errors: NVME_GPU_ERROR_USAGE before anything is read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_gather(
    table: *mut TableHandle,
    ids: *const c_void,
    id_type: u32,
    count: u64,
    out: *mut c_void,
    out_stride: u64,
    row_status: *mut i32,
    stream: nvme_gpu_stream,
    report: *mut Report,
) -> nvme_gpu_status {
    call(|| {
        let open = TABLES.get(table, "table")?;
        // SAFETY: as the header says.
        unsafe {
            let rows = Rows::new(
                open.table.row_bytes(),
                ids,
                id_type,
                count,
                out,
                out_stride,
                row_status,
            )?;
            now(&open, Verb::Gather, &rows, stream, report)
        }
    })
}

/// As nvme_gpu_gather(), and returns at once. With GPU memory it is a part of `stream`, which may be captured: a graph
/// gathers by the ids that are there when it is launched. No call is made that waits for the GPU. With host memory
/// threads of the library gather. All memory must stay until the end; `pending` is as in nvme_gpu_pread_async().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_gather_async(
    table: *mut TableHandle,
    ids: *const c_void,
    id_type: u32,
    count: u64,
    out: *mut c_void,
    out_stride: u64,
    row_status: *mut i32,
    stream: nvme_gpu_stream,
    pending: *mut *mut PendingHandle,
) -> nvme_gpu_status {
    call(|| {
        let open = TABLES.get(table, "table")?;
        // SAFETY: as the header says.
        unsafe {
            let rows = Rows::new(
                open.table.row_bytes(),
                ids,
                id_type,
                count,
                out,
                out_stride,
                row_status,
            )?;
            later(&open, Verb::Gather, rows, stream, pending)
        }
    })
}

/// # Safety
/// The names are NULL or end with a 0.
unsafe fn widening(stored: *const c_char, dtype: *const c_char) -> Answer<Widen> {
    // SAFETY: the caller's.
    let (stored, dtype) = unsafe { (text(stored, "stored")?, text(dtype, "dtype")?) };
    Ok(Widen::of_names(stored, dtype)?)
}

/// Bytes of a row of the table that nvme_gpu_gather_as() makes: the row has elements of `stored`, which come out as
/// `dtype`. 0 after an error, with nvme_gpu_last_error().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_table_row_bytes_as(
    table: *const TableHandle,
    stored: *const c_char,
    dtype: *const c_char,
) -> u64 {
    value(0, || {
        let open = TABLES.get(table, "table")?;
        // SAFETY: as the header says.
        let widen = unsafe { widening(stored, dtype) }?;
        Ok(widen.row_bytes(open.table.row_bytes())?)
    })
}

/// As nvme_gpu_gather(), and makes the elements wider on the way: they are stored as `stored` and come out as `dtype`,
/// in places of nvme_gpu_table_row_bytes_as() bytes. Only stored bytes are read.
///
/// `stored` is "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", or "q8_0", "q4_0", "q4_1" for GGUF's blocks of 32
/// elements; `dtype` is "float16" or "float32". The row has to be whole blocks. In memory of a GPU `out` and
/// `out_stride` are multiples of an element's bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_gather_as(
    table: *mut TableHandle,
    stored: *const c_char,
    dtype: *const c_char,
    ids: *const c_void,
    id_type: u32,
    count: u64,
    out: *mut c_void,
    out_stride: u64,
    row_status: *mut i32,
    stream: nvme_gpu_stream,
    report: *mut Report,
) -> nvme_gpu_status {
    call(|| {
        let open = TABLES.get(table, "table")?;
        // SAFETY: as the header says.
        unsafe {
            let widen = widening(stored, dtype)?;
            let row_bytes = widen.row_bytes(open.table.row_bytes())?;
            let rows = Rows::new(row_bytes, ids, id_type, count, out, out_stride, row_status)?;
            let rows = Rows {
                widen: Some(widen),
                ..rows
            };
            now(&open, Verb::Gather, &rows, stream, report)
        }
    })
}

/// As nvme_gpu_gather_as(), and returns at once: see nvme_gpu_gather_async(). The names are copied.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_gather_as_async(
    table: *mut TableHandle,
    stored: *const c_char,
    dtype: *const c_char,
    ids: *const c_void,
    id_type: u32,
    count: u64,
    out: *mut c_void,
    out_stride: u64,
    row_status: *mut i32,
    stream: nvme_gpu_stream,
    pending: *mut *mut PendingHandle,
) -> nvme_gpu_status {
    call(|| {
        let open = TABLES.get(table, "table")?;
        // SAFETY: as the header says.
        unsafe {
            let widen = widening(stored, dtype)?;
            let row_bytes = widen.row_bytes(open.table.row_bytes())?;
            let rows = Rows::new(row_bytes, ids, id_type, count, out, out_stride, row_status)?;
            let rows = Rows {
                widen: Some(widen),
                ..rows
            };
            later(&open, Verb::Gather, rows, stream, pending)
        }
    })
}

fn duplicates(number: u32) -> Answer<Duplicates> {
    match number {
        NVME_GPU_DUPLICATES_LAST => Ok(Duplicates::Last),
        NVME_GPU_DUPLICATES_ERROR => Ok(Duplicates::Error),
        other => Err(Failure::usage(
            format!("duplicates {other}"),
            "use NVME_GPU_DUPLICATES_LAST or NVME_GPU_DUPLICATES_ERROR",
        )),
    }
}

/// Writes place `i` of `rows` to row `ids[i]` of the table, for every `i`, and waits. Bytes beside the rows do not
/// change. `duplicates` is NVME_GPU_DUPLICATES_LAST or NVME_GPU_DUPLICATES_ERROR (host memory); the rest is as in
/// nvme_gpu_gather(). Rows in GPU memory are written by a host thread, in the order of the stream.
///
/// A row that failed may have been written in part. Durable after nvme_gpu_flush(). Errors: NVME_GPU_ERROR_USAGE, also
/// for a store that is for reading only, before anything is written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_scatter(
    table: *mut TableHandle,
    ids: *const c_void,
    id_type: u32,
    count: u64,
    rows: *const c_void,
    stride: u64,
    duplicates: u32,
    row_status: *mut i32,
    stream: nvme_gpu_stream,
    report: *mut Report,
) -> nvme_gpu_status {
    call(|| {
        let open = TABLES.get(table, "table")?;
        let verb = Verb::Scatter(self::duplicates(duplicates)?);
        // SAFETY: as the header says.
        unsafe {
            let rows = Rows::new(
                open.table.row_bytes(),
                ids,
                id_type,
                count,
                rows,
                stride,
                row_status,
            )?;
            now(&open, verb, &rows, stream, report)
        }
    })
}

/// As nvme_gpu_scatter(), and returns at once: see nvme_gpu_gather_async().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_scatter_async(
    table: *mut TableHandle,
    ids: *const c_void,
    id_type: u32,
    count: u64,
    rows: *const c_void,
    stride: u64,
    duplicates: u32,
    row_status: *mut i32,
    stream: nvme_gpu_stream,
    pending: *mut *mut PendingHandle,
) -> nvme_gpu_status {
    call(|| {
        let open = TABLES.get(table, "table")?;
        let verb = Verb::Scatter(self::duplicates(duplicates)?);
        // SAFETY: as the header says.
        unsafe {
            let rows = Rows::new(
                open.table.row_bytes(),
                ids,
                id_type,
                count,
                rows,
                stride,
                row_status,
            )?;
            later(&open, verb, rows, stream, pending)
        }
    })
}

fn element(number: u32) -> Answer<Element> {
    match number {
        NVME_GPU_ADD_F32 => Ok(Element::F32),
        NVME_GPU_ADD_F16 => Ok(Element::F16),
        NVME_GPU_ADD_BF16 => Ok(Element::Bf16),
        NVME_GPU_ADD_I32 => Ok(Element::I32),
        other => Err(Failure::usage(
            format!("elements of type {other}"),
            "use NVME_GPU_ADD_F32, _F16, _BF16 or _I32",
        )),
    }
}

/// Adds place `i` of `rows` to row `ids[i]` of the table, for every `i`, and waits. `element` is NVME_GPU_ADD_F32,
/// _F16, _BF16 or _I32, little-endian. Rows with the same id are summed in the order of `ids`; additions of several
/// threads through one store are all counted. The rest is as in nvme_gpu_scatter().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_scatter_add(
    table: *mut TableHandle,
    ids: *const c_void,
    id_type: u32,
    count: u64,
    rows: *const c_void,
    stride: u64,
    element: u32,
    row_status: *mut i32,
    stream: nvme_gpu_stream,
    report: *mut Report,
) -> nvme_gpu_status {
    call(|| {
        let open = TABLES.get(table, "table")?;
        let verb = Verb::ScatterAdd(self::element(element)?);
        // SAFETY: as the header says.
        unsafe {
            let rows = Rows::new(
                open.table.row_bytes(),
                ids,
                id_type,
                count,
                rows,
                stride,
                row_status,
            )?;
            now(&open, verb, &rows, stream, report)
        }
    })
}

/// As nvme_gpu_scatter_add(), and returns at once: see nvme_gpu_gather_async().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_scatter_add_async(
    table: *mut TableHandle,
    ids: *const c_void,
    id_type: u32,
    count: u64,
    rows: *const c_void,
    stride: u64,
    element: u32,
    row_status: *mut i32,
    stream: nvme_gpu_stream,
    pending: *mut *mut PendingHandle,
) -> nvme_gpu_status {
    call(|| {
        let open = TABLES.get(table, "table")?;
        let verb = Verb::ScatterAdd(self::element(element)?);
        // SAFETY: as the header says.
        unsafe {
            let rows = Rows::new(
                open.table.row_bytes(),
                ids,
                id_type,
                count,
                rows,
                stride,
                row_status,
            )?;
            later(&open, verb, rows, stream, pending)
        }
    })
}
