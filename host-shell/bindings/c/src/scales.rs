//! Tables whose elements are multiplied by scales that lie apart from the rows.
// UNSAFETY: functions of the C interface, over memory that C vouches for.
#![allow(unsafe_code)]

use crate::border::{Answer, Sized0, call, put, take, text};
use crate::memory::{CallLocation, CallMemory, place};
use crate::opened::{OpenTable, OpenedStore, TABLES, TableHandle, open_in};
use crate::status::{CallFailure, nvme_gpu_status};
use nvme_host::store::{RowScales, ScaleFactor, ScaleFormat, ScaleMemory};
use std::ffi::{c_char, c_void};
use std::sync::Arc;

/// Scales of a table's elements, for nvme_gpu_table_scaled(). Set `size`, the fields that are needed, and all others to 0.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct TableScales {
    /// sizeof(nvme_gpu_row_scales).
    pub size: usize,
    /// "float32", "bfloat16", "float8_e8m0fnu" or "float8_e4m3fn"; NULL if no scales are stored.
    pub format: *const c_char,
    /// The stored scales of row 0, then those of row 1, and so on: in memory of the host for rows that the CPU gathers, in
    /// memory of the store's GPU for rows that the GPU gathers.
    pub data: *const c_void,
    /// Bytes of all stored scales.
    pub bytes: u64,
    /// Number of elements of a row that share a scale: a power of two up to 65,536. 0 without stored scales.
    pub columns: u32,
    /// By which all scales are multiplied; without stored scales, the scale of all elements. 0 selects 1.
    pub factor: f32,
    /// 1 if the scales are divided by `factor`, as by `weight_global_scale` of compressed-tensors; else 0.
    pub divides: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: integers, a number and pointers, the size first.
unsafe impl Sized0 for TableScales {
    const NAME: &'static str = "nvme_gpu_row_scales";
}

/// Opens the rows of `table` once more, with `scales`: gathers with nvme_gpu_row_request.stored and .dtype multiply each
/// element by its scale. Scales in memory of the host are copied; those in memory of a GPU stay there, unchanged, until
/// the last gather has ended. On success `*scaled` is a handle for nvme_gpu_table_close(), else NULL. Errors:
/// NVME_GPU_ERROR_USAGE; a gather whose rows have another number of scales is one, too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_table_scaled(
    table: *mut TableHandle,
    scales: *const TableScales,
    scaled: *mut *mut TableHandle,
) -> nvme_gpu_status {
    call(|| {
        // SAFETY: as the header says.
        unsafe { put(scaled, std::ptr::null_mut(), "scaled") }?;
        let open = TABLES.get(table, "table")?;
        // SAFETY: as the header says.
        let scales = unsafe { take(scales).and_then(|of| row_scales(&of, &open.opened)) }?;
        let made = OpenTable {
            store: open.store,
            opened: Arc::clone(&open.opened),
            table: open.table.clone(),
            scales: Some(Arc::new(scales)),
        };
        let store = std::ptr::without_provenance(open.store);
        let handle = open_in(&TABLES, store, Arc::new(made))?;
        // SAFETY: written once already.
        unsafe { put(scaled, handle, "scaled") }
    })
}

/// # Safety
/// The caller fulfils the contract in the header for the pointers.
unsafe fn row_scales(of: &TableScales, opened: &OpenedStore) -> Answer<RowScales> {
    let refuse = |cause: String, hint| Err(CallFailure::usage(cause, hint));
    if of.divides > 1 || of.reserved != 0 {
        return refuse(
            format!("divides is {} and reserved is {}", of.divides, of.reserved),
            "set divides to 0 or 1, and reserved to 0",
        );
    }
    let factor = if of.factor == 0.0 { 1.0 } else { of.factor };
    let factor = match of.divides {
        0 => ScaleFactor::Times(factor),
        _ => ScaleFactor::Over(factor),
    };
    if of.format.is_null() {
        if !of.data.is_null() || of.bytes != 0 || of.columns != 0 {
            return refuse(
                format!("{} bytes of scales have no format", of.bytes),
                "name the format, or set data, bytes and columns to 0",
            );
        }
        return Ok(RowScales::new(
            ScaleFormat::F32,
            1,
            factor,
            ScaleMemory::Nowhere,
        )?);
    }
    // SAFETY: the caller's.
    let name = unsafe { text(of.format, "format") }?;
    let Some(format) = RowScales::format_of_name(name) else {
        return refuse(
            format!("scales are {name}"),
            "use float32, bfloat16, float8_e8m0fnu or float8_e4m3fn",
        );
    };
    // SAFETY: the caller's.
    let memory = unsafe { CallMemory::elements(of.data, of.bytes, 1, "data") }?;
    let memory = match place(opened, &memory, "data")? {
        // SAFETY: the caller's.
        CallLocation::Host => ScaleMemory::Host(unsafe { memory.bytes() }.into()),
        CallLocation::Gpu => ScaleMemory::Gpu {
            address: memory.address(),
            bytes: of.bytes,
        },
    };
    Ok(RowScales::new(format, of.columns, factor, memory)?)
}
