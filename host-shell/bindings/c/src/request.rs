//! Rows by ids as C asks for them: one structure for gathers, scatters and additions.
// UNSAFETY: reads a structure and texts that C passes by pointer.
#![allow(unsafe_code)]

use crate::border::{Answer, Sized0, take, text};
use crate::opened::OpenTable;
use crate::rows::{CallRows, RowVerb};
use crate::status::CallFailure;
use crate::transfer::nvme_gpu_stream;
use nvme_host::store::{DuplicateIds, RowConversion, RowElement, RowWidening};
use std::ffi::{c_char, c_void};

/// nvme_gpu_row_request.id_type: int32_t.
pub const NVME_GPU_I32: u32 = 4;
/// nvme_gpu_row_request.id_type: int64_t.
pub const NVME_GPU_I64: u32 = 8;

/// nvme_gpu_row_request.element: IEEE 754 binary32.
pub const NVME_GPU_ADD_F32: u32 = 1;
/// nvme_gpu_row_request.element: IEEE 754 binary16, summed as binary32.
pub const NVME_GPU_ADD_F16: u32 = 2;
/// nvme_gpu_row_request.element: bfloat16, summed as binary32.
pub const NVME_GPU_ADD_BF16: u32 = 3;
/// nvme_gpu_row_request.element: int32_t; sums wrap.
pub const NVME_GPU_ADD_I32: u32 = 4;

/// nvme_gpu_row_request.duplicates: the last of several rows with the same id is written.
pub const NVME_GPU_DUPLICATES_LAST: u32 = 0;
/// nvme_gpu_row_request.duplicates: an id that comes twice is NVME_GPU_ERROR_USAGE, and nothing is written.
pub const NVME_GPU_DUPLICATES_ERROR: u32 = 1;

/// Rows by ids for nvme_gpu_gather(), nvme_gpu_scatter(), nvme_gpu_scatter_add(), their forms with _async, and for
/// nvme_gpu_gather_begin() and nvme_gpu_gather_finish(). Set `size`, the fields that the function uses, and all others to
/// 0: `nvme_gpu_row_request request = { .size = sizeof request, .ids = ... }`. A field that the function does not use is
/// NVME_GPU_ERROR_USAGE.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct TableRequest {
    /// sizeof(nvme_gpu_row_request).
    pub size: usize,
    /// `count` ids, counted from 0; they may repeat.
    pub ids: *const c_void,
    /// Number of ids.
    pub count: u64,
    /// NVME_GPU_I32 or NVME_GPU_I64.
    pub id_type: u32,
    /// Scatters of host memory: NVME_GPU_DUPLICATES_LAST or NVME_GPU_DUPLICATES_ERROR.
    pub duplicates: u32,
    /// Gathers: the places of the rows.
    pub out: *mut c_void,
    /// Scatters and additions: the rows.
    pub rows: *const c_void,
    /// Distance of two rows in `out` or `rows` in bytes; 0 selects rows without gaps.
    pub stride: u64,
    /// NULL, or `count` elements that become 0, the controller's status, or NVME_GPU_ROW_...
    pub row_status: *mut i32,
    /// The stream, with memory of a GPU.
    pub stream: nvme_gpu_stream,
    /// Gathers: NULL, or the stored elements, which become those of `dtype`: "float16", "bfloat16", "float8_e4m3fn",
    /// "float8_e5m2", "float4_e2m1fn_x2" (two in a byte), "float8_scaled" (256 E4M3 and their 8 E8M0 scales), or GGUF's
    /// blocks: "q8_0", "q4_0", "q4_1", "q2_k" to "q6_k", "iq4_nl", "iq4_xs", "mxfp4". The row has to be whole blocks.
    pub stored: *const c_char,
    /// Gathers: NULL, or "float16", "bfloat16" or "float32". In memory of a GPU `out` and `stride` are multiples of its bytes.
    pub dtype: *const c_char,
    /// Additions: NVME_GPU_ADD_F32, _F16, _BF16 or _I32.
    pub element: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: integers and pointers, the size first.
unsafe impl Sized0 for TableRequest {
    const NAME: &'static str = "nvme_gpu_row_request";
}

/// The functions of one kind, which use the same fields.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum RowUse {
    Gather,
    Scatter,
    Add,
    /// The first half of a gather.
    Begin,
    /// The second half.
    Finish,
}

impl RowUse {
    fn name(self) -> &'static str {
        match self {
            Self::Gather => "a gather",
            Self::Scatter => "a scatter",
            Self::Add => "an addition",
            Self::Begin => "the first half of a gather",
            Self::Finish => "the second half of a gather",
        }
    }
}

impl TableRequest {
    /// Reads the request of a function of kind `of`, and refuses fields that it does not use.
    ///
    /// # Safety
    /// `from` is NULL or points to as many bytes as its first field says.
    pub unsafe fn of(from: *const Self, of: RowUse) -> Answer<Self> {
        // SAFETY: the caller's.
        let request = unsafe { take(from) }?;
        let (gathers, begins, finishes) = (
            of == RowUse::Gather,
            of == RowUse::Begin,
            of == RowUse::Finish,
        );
        let writes = matches!(of, RowUse::Scatter | RowUse::Add);
        let unused = [
            ("ids", finishes && !request.ids.is_null()),
            ("count", finishes && request.count != 0),
            ("id_type", finishes && request.id_type != 0),
            ("out", !gathers && !finishes && !request.out.is_null()),
            ("stride", begins && request.stride != 0),
            ("row_status", begins && !request.row_status.is_null()),
            ("stored", !gathers && !request.stored.is_null()),
            ("dtype", !gathers && !request.dtype.is_null()),
            ("rows", !writes && !request.rows.is_null()),
            (
                "duplicates",
                of != RowUse::Scatter && request.duplicates != 0,
            ),
            ("element", of != RowUse::Add && request.element != 0),
            ("reserved", request.reserved != 0),
        ];
        match unused.iter().find(|(_, is_set)| *is_set) {
            None => Ok(request),
            Some((field, _)) => Err(CallFailure::usage(
                format!(
                    "{}.{field} is set, and {} does not use it",
                    Self::NAME,
                    of.name()
                ),
                "set it to 0",
            )),
        }
    }

    /// Returns the ids: their address, whether they have 64 bits, and their number.
    ///
    /// # Errors
    /// [`CallFailure`] for an unknown type of ids.
    pub fn ids(&self) -> Answer<(*const c_void, bool, u64)> {
        Ok((self.ids, is_wide(self.id_type)?, self.count))
    }

    /// Judges the request for rows of a table.
    ///
    /// # Safety
    /// The caller fulfils the contract in the header for the pointers.
    pub unsafe fn rows(&self, open: &OpenTable, of: RowUse) -> Answer<(RowVerb, CallRows)> {
        let verb = match of {
            RowUse::Gather | RowUse::Begin | RowUse::Finish => RowVerb::Gather,
            RowUse::Scatter => RowVerb::Scatter(duplicates(self.duplicates)?),
            RowUse::Add => RowVerb::ScatterAdd(element(self.element)?),
        };
        let widens = !self.stored.is_null() || !self.dtype.is_null();
        let widen = match widens {
            true => Some(RowConversion {
                // SAFETY: the caller's.
                widen: unsafe { widening(self.stored, self.dtype) }?,
                scales: open.scales.clone(),
            }),
            false => None,
        };
        let row_bytes = open.table.row_bytes();
        let row_bytes = match &widen {
            Some(widen) => widen.row_bytes(open.table.rows(), row_bytes)?,
            None => row_bytes,
        };
        let places = match of {
            RowUse::Scatter | RowUse::Add => self.rows,
            _ => self.out.cast_const(),
        };
        // SAFETY: the caller's.
        let mut rows = unsafe {
            CallRows::new(
                row_bytes,
                self.ids()?,
                (places, self.stride),
                self.row_status,
            )
        }?;
        rows.widen = widen;
        Ok((verb, rows))
    }
}

/// Returns the conversion of elements by its names.
///
/// # Safety
/// The names are NULL or end with a 0.
pub unsafe fn widening(stored: *const c_char, dtype: *const c_char) -> Answer<RowWidening> {
    // SAFETY: the caller's.
    let (stored, dtype) = unsafe { (text(stored, "stored")?, text(dtype, "dtype")?) };
    Ok(RowWidening::of_names(stored, dtype)?)
}

fn is_wide(id_type: u32) -> Answer<bool> {
    match id_type {
        NVME_GPU_I32 => Ok(false),
        NVME_GPU_I64 => Ok(true),
        other => Err(CallFailure::usage(
            format!("the id type {other} is unknown"),
            "use NVME_GPU_I32 or NVME_GPU_I64",
        )),
    }
}

fn duplicates(number: u32) -> Answer<DuplicateIds> {
    match number {
        NVME_GPU_DUPLICATES_LAST => Ok(DuplicateIds::Last),
        NVME_GPU_DUPLICATES_ERROR => Ok(DuplicateIds::Error),
        other => Err(CallFailure::usage(
            format!("the rule {other} for duplicate ids is unknown"),
            "use NVME_GPU_DUPLICATES_LAST or NVME_GPU_DUPLICATES_ERROR",
        )),
    }
}

fn element(number: u32) -> Answer<RowElement> {
    match number {
        NVME_GPU_ADD_F32 => Ok(RowElement::F32),
        NVME_GPU_ADD_F16 => Ok(RowElement::F16),
        NVME_GPU_ADD_BF16 => Ok(RowElement::Bf16),
        NVME_GPU_ADD_I32 => Ok(RowElement::I32),
        other => Err(CallFailure::usage(
            format!("the element type {other} is unknown"),
            "use NVME_GPU_ADD_F32, _F16, _BF16 or _I32",
        )),
    }
}
