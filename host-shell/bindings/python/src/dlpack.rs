//! DLPack: imports tensors of other libraries, and exports ours. The structures are those of DLPack 1.0.
//! Imported tensors are not trusted: shapes, strides and devices are checked before any address is computed
//! from them.
// UNSAFETY: capsules hold pointers to structures with a function that frees them.
#![allow(unsafe_code)]

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::{CStr, c_void};

pub const CPU: i32 = 1;
pub const CUDA: i32 = 2;
pub const CUDA_HOST: i32 = 3;

const OLD: &CStr = c"dltensor";
const OLD_USED: &CStr = c"used_dltensor";
const NEW: &CStr = c"dltensor_versioned";
const NEW_USED: &CStr = c"used_dltensor_versioned";
const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;

/// (code, bits, name) of the element types that have a name.
const TYPES: [(u8, u8, &str); 16] = [
    (0, 8, "int8"),
    (0, 16, "int16"),
    (0, 32, "int32"),
    (0, 64, "int64"),
    (1, 8, "uint8"),
    (1, 16, "uint16"),
    (1, 32, "uint32"),
    (1, 64, "uint64"),
    (2, 16, "float16"),
    (2, 32, "float32"),
    (2, 64, "float64"),
    (4, 16, "bfloat16"),
    (5, 64, "complex64"),
    (5, 128, "complex128"),
    (6, 8, "bool"),
    // Name of a type whose meaning is unknown.
    (3, 8, "opaque"),
];

/// Returns the letter and bits of a type in array interfaces.
pub fn kind(name: &str) -> Option<(char, u8)> {
    let known = TYPES.iter().find(|one| one.2 == name)?;
    let letter = match known.0 {
        0 => 'i',
        1 => 'u',
        2 => 'f',
        5 => 'c',
        6 => 'b',
        _ => return None,
    };
    Some((letter, known.1))
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct ManagedTensor {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedTensor)>,
}

#[repr(C)]
struct VersionedTensor {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut VersionedTensor)>,
    flags: u64,
    tensor: DlTensor,
}

/// A tensor taken out of a capsule; dropping it calls the deleter that its owner gave.
pub enum CapsuleTensor {
    #[expect(private_interfaces, reason = "looked at here alone")]
    Old(*mut ManagedTensor),
    #[expect(private_interfaces, reason = "looked at here alone")]
    New(*mut VersionedTensor),
}

/// Address, shape, type and device of a tensor.
pub struct TensorDescription {
    pub address: u64,
    pub bytes: usize,
    pub shape: Vec<u64>,
    pub dtype: String,
    pub device: (i32, i32),
    pub readonly: bool,
}

impl CapsuleTensor {
    /// Takes the tensor out of a capsule that was not used.
    pub fn take(capsule: &Bound<'_, PyAny>) -> PyResult<Self> {
        let raw = capsule.as_ptr();
        let take = |name: &CStr, used: &'static CStr| {
            // SAFETY: a live object; both calls only look at it.
            if unsafe { ffi::PyCapsule_IsValid(raw, name.as_ptr()) } == 0 {
                return None;
            }
            // SAFETY: a valid capsule with this name.
            let pointer = unsafe { ffi::PyCapsule_GetPointer(raw, name.as_ptr()) };
            // SAFETY: as above; the name is static.
            unsafe { ffi::PyCapsule_SetName(raw, used.as_ptr()) };
            Some(pointer)
        };
        if let Some(pointer) = take(NEW, NEW_USED) {
            return Ok(Self::New(pointer.cast()));
        }
        if let Some(pointer) = take(OLD, OLD_USED) {
            return Ok(Self::Old(pointer.cast()));
        }
        Err(PyTypeError::new_err(
            "not a DLPack capsule, or one that was used",
        ))
    }

    /// # Errors
    /// BufferError for what no table can hold.
    pub fn describe(&self) -> PyResult<TensorDescription> {
        let (tensor, readonly) = match *self {
            // SAFETY: taken from a capsule and not deleted before drop.
            Self::Old(managed) => (unsafe { &(*managed).tensor }, false),
            Self::New(versioned) => {
                // SAFETY: as above; the version stands first in each version.
                if unsafe { (*versioned).major } != 1 {
                    return Err(PyBufferError::new_err("a version of DLPack other than 1"));
                }
                // SAFETY: as above.
                let one = unsafe { &*versioned };
                (&one.tensor, one.flags & READ_ONLY != 0)
            }
        };
        let known = TYPES
            .iter()
            .find(|one| (one.0, one.1) == (tensor.code, tensor.bits));
        let Some(&(_, bits, name)) = known.filter(|_| tensor.lanes == 1) else {
            return Err(PyBufferError::new_err(format!(
                "DLPack elements of code {}, {} bits, {} lanes",
                tensor.code, tensor.bits, tensor.lanes
            )));
        };
        // SAFETY: taken from a capsule and not deleted before drop.
        let shape = unsafe { lengths(tensor) }?;
        let bytes = shape
            .iter()
            .try_fold(u64::from(bits) / 8, |all, one| all.checked_mul(*one));
        let bytes = bytes.and_then(|bytes| isize::try_from(bytes).ok());
        let Some(bytes) = bytes else {
            return Err(PyBufferError::new_err(
                "the tensor has more bytes than memory can have",
            ));
        };
        // SAFETY: as above.
        unsafe { check_strides(tensor, &shape) }?;
        let address = (tensor.data.addr() as u64).checked_add(tensor.byte_offset);
        let is_inside = |address: &u64| {
            i64::try_from(*address).is_ok_and(|at| at.checked_add(bytes as i64).is_some())
        };
        let address = address.filter(is_inside).ok_or_else(|| {
            PyBufferError::new_err(format!(
                "the tensor's data address {:#x} and byte offset {} are outside of memory",
                tensor.data.addr(),
                tensor.byte_offset
            ))
        })?;
        if bytes > 0 && tensor.data.is_null() {
            return Err(PyBufferError::new_err("the tensor's data address is NULL"));
        }
        if matches!(tensor.device_type, CPU | CUDA_HOST) {
            check_readable(address, bytes as usize)?;
        }
        Ok(TensorDescription {
            address,
            bytes: bytes as usize,
            shape,
            dtype: name.to_owned(),
            device: (tensor.device_type, tensor.device_id),
            readonly,
        })
    }
}

/// Dimensions of a tensor at most: numpy has as many.
const MOST_DIMENSIONS: i32 = 64;

/// Returns the lengths of a tensor.
///
/// # Safety
/// `tensor` is of a producer that gives as many lengths as it says.
///
/// # Errors
/// BufferError for dimensions that cannot be.
unsafe fn lengths(tensor: &DlTensor) -> PyResult<Vec<u64>> {
    if !(0..=MOST_DIMENSIONS).contains(&tensor.ndim) {
        return Err(PyBufferError::new_err(format!(
            "the tensor has {} dimensions: 0 to {MOST_DIMENSIONS} can be",
            tensor.ndim
        )));
    }
    if tensor.ndim > 0 && tensor.shape.is_null() {
        return Err(PyBufferError::new_err("the tensor's shape is NULL"));
    }
    let length = |index: usize| {
        // SAFETY: below `ndim`; a producer may have the list at any address.
        let length = unsafe { tensor.shape.add(index).read_unaligned() };
        u64::try_from(length).map_err(|_| {
            PyBufferError::new_err(format!(
                "the tensor's length {length} of dimension {index} is negative"
            ))
        })
    };
    (0..tensor.ndim as usize).map(length).collect()
}

/// # Safety
/// As [`lengths`], which returned `shape`; its product with the bytes of an element was counted.
///
/// # Errors
/// BufferError for elements that are not contiguous.
unsafe fn check_strides(tensor: &DlTensor, shape: &[u64]) -> PyResult<()> {
    if tensor.strides.is_null() || shape.contains(&0) {
        return Ok(());
    }
    let mut expected = 1i64;
    for (index, length) in shape.iter().enumerate().rev() {
        // SAFETY: the producer gives one for each dimension.
        let stride = unsafe { tensor.strides.add(index).read_unaligned() };
        if *length > 1 && stride != expected {
            return Err(PyBufferError::new_err("the tensor is not C-contiguous"));
        }
        expected = expected.saturating_mul(*length as i64);
    }
    Ok(())
}

/// Checks that the first and the last of `bytes` bytes at `address` are memory of this process, so that a
/// producer's mistake becomes an error instead of an access to unmapped memory.
///
/// # Errors
/// BufferError where they are not.
fn check_readable(address: u64, bytes: usize) -> PyResult<()> {
    if bytes == 0 {
        return Ok(());
    }
    let ends = [address, address + bytes as u64 - 1];
    match ends.into_iter().all(nvme_host::cuda::is_host_memory) {
        true => Ok(()),
        false => Err(PyBufferError::new_err(format!(
            "the tensor's {bytes} bytes at address {address:#x} are not all memory of this process"
        ))),
    }
}

impl Drop for CapsuleTensor {
    fn drop(&mut self) {
        match *self {
            Self::Old(managed) => {
                // SAFETY: taken from a capsule, deleted once.
                if let Some(delete) = unsafe { (*managed).deleter } {
                    // SAFETY: as above.
                    unsafe { delete(managed) }
                }
            }
            Self::New(versioned) => {
                // SAFETY: as above.
                if let Some(delete) = unsafe { (*versioned).deleter } {
                    // SAFETY: as above.
                    unsafe { delete(versioned) }
                }
            }
        }
    }
}

/// Exported tensor: one allocation that owns its lists and the owner of the memory.
struct ExportedTensor {
    shape: Vec<i64>,
    strides: Vec<i64>,
    #[expect(dead_code, reason = "dropped when the consumer is done")]
    owner: Box<dyn Send + Sync>,
}

/// Returns a new capsule over memory that `owner` keeps; versioned or as before DLPack 1.0.
pub fn hand_out<'py>(
    py: Python<'py>,
    described: &TensorDescription,
    owner: Box<dyn Send + Sync>,
    is_versioned: bool,
    is_copied: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let known = TYPES.iter().find(|one| one.2 == described.dtype);
    let Some(&(code, bits, _)) = known else {
        return Err(PyBufferError::new_err(format!(
            "DLPack has no {}",
            described.dtype
        )));
    };
    let shape: Vec<i64> = described
        .shape
        .iter()
        .map(|length| *length as i64)
        .collect();
    let mut strides = vec![1i64; shape.len()];
    for index in (1..shape.len()).rev() {
        strides[index - 1] = strides[index].wrapping_mul(shape[index]);
    }
    let mut handed = Box::new(ExportedTensor {
        shape,
        strides,
        owner,
    });
    let tensor = DlTensor {
        data: std::ptr::with_exposed_provenance_mut(described.address as usize),
        device_type: described.device.0,
        device_id: described.device.1,
        ndim: handed.shape.len() as i32,
        code,
        bits,
        lanes: 1,
        shape: handed.shape.as_mut_ptr(),
        strides: handed.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let context = Box::into_raw(handed).cast();
    let capsule = match is_versioned {
        true => {
            let flags = if is_copied { IS_COPIED } else { 0 };
            let managed = Box::into_raw(Box::new(VersionedTensor {
                major: 1,
                minor: 0,
                context,
                deleter: Some(delete_versioned),
                flags,
                tensor,
            }));
            // SAFETY: a new structure; the name is static.
            unsafe { ffi::PyCapsule_New(managed.cast(), NEW.as_ptr(), Some(forget_versioned)) }
        }
        false => {
            let managed = Box::into_raw(Box::new(ManagedTensor {
                tensor,
                context,
                deleter: Some(delete_old),
            }));
            // SAFETY: as above.
            unsafe { ffi::PyCapsule_New(managed.cast(), OLD.as_ptr(), Some(forget_old)) }
        }
    };
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

unsafe extern "C" fn delete_old(managed: *mut ManagedTensor) {
    // SAFETY: made by `hand_out`; the consumer deletes it once.
    let managed = unsafe { Box::from_raw(managed) };
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(managed.context.cast::<ExportedTensor>()) });
}

unsafe extern "C" fn delete_versioned(managed: *mut VersionedTensor) {
    // SAFETY: made by `hand_out`; the consumer deletes it once.
    let managed = unsafe { Box::from_raw(managed) };
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(managed.context.cast::<ExportedTensor>()) });
}

/// Destructor of a capsule: frees the tensor, unless a consumer has taken it.
unsafe extern "C" fn forget_old(capsule: *mut ffi::PyObject) {
    // SAFETY: called by Python with the capsule.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, OLD.as_ptr()) != 0 {
            delete_old(ffi::PyCapsule_GetPointer(capsule, OLD.as_ptr()).cast());
        }
    }
}

unsafe extern "C" fn forget_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: called by Python with the capsule.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NEW.as_ptr()) != 0 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, NEW.as_ptr()).cast());
        }
    }
}
