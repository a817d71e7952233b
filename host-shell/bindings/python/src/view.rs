//! Memory of the caller, from a buffer, a DLPack capsule or a pair of address and owner, and kept alive. The owner
//! stays referenced until the transfer has ended, because the GPU or a thread writes without the interpreter's lock.
// UNSAFETY: the buffer protocol and DLPack are C interfaces; addresses are those that their owners gave.
#![allow(unsafe_code)]

use crate::dlpack::{self, CapsuleTensor};
use crate::error::ExceptionParts;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::ffi::{CStr, c_char, c_int, c_void};

/// `Py_buffer`: the same from Python 3.3 on, and part of the stable ABI from 3.11 on.
#[repr(C)]
struct RawBuffer {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut RawBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut RawBuffer);
}

const WRITABLE: c_int = 1;
const FORMAT: c_int = 4;
/// With shape and strides, which are those of C.
const C_CONTIGUOUS: c_int = 0x0020 | 0x0010 | 0x0008;

/// A buffer that an object exports; it is not resized or freed before this is dropped.
struct ExportedBuffer(Box<RawBuffer>);

impl Drop for ExportedBuffer {
    fn drop(&mut self) {
        // SAFETY: filled by PyObject_GetBuffer, released once; a view is dropped with the GIL held.
        unsafe { PyBuffer_Release(&mut *self.0) }
    }
}

/// Keep-alive of the memory.
enum MemoryOwner {
    Buffer(#[expect(dead_code, reason = "dropped")] ExportedBuffer),
    Tensor(#[expect(dead_code, reason = "dropped")] CapsuleTensor),
    Object(#[expect(dead_code, reason = "dropped")] Py<PyAny>),
}

/// Memory without gaps, of the host or of a GPU.
#[pyclass(frozen, module = "nvme_gpu._native", name = "View")]
pub struct PyView {
    #[expect(dead_code, reason = "dropped")]
    owner: MemoryOwner,
    address: u64,
    bytes: usize,
    shape: Vec<u64>,
    dtype: String,
    device: (i32, i32),
    readonly: bool,
}

// SAFETY: the memory is reached by address alone, and its owner is dropped by a thread that holds the GIL, as each
// object of Python is.
unsafe impl Send for PyView {}
// SAFETY: as above; nothing changes in a view.
unsafe impl Sync for PyView {}

/// A piece of memory without its owner, for threads of the pool.
#[derive(Clone, Copy)]
pub struct MemoryPiece {
    pub address: u64,
    pub bytes: usize,
}

impl MemoryPiece {
    /// True if both share a byte.
    pub fn overlaps(self, other: Self) -> bool {
        let end = |one: Self| one.address.saturating_add(one.bytes as u64);
        self.bytes > 0 && other.bytes > 0 && self.address < end(other) && other.address < end(self)
    }

    /// Returns the bytes.
    ///
    /// # Safety
    /// They are memory of the host that stays valid for `'a`. Python code that writes them meanwhile gets, or
    /// leaves, any bytes, as with `os.preadv`.
    pub unsafe fn slice<'a>(self) -> &'a [u8] {
        match self.bytes {
            0 => &[],
            // SAFETY: the caller's.
            _ => unsafe {
                std::slice::from_raw_parts(self.address as usize as *const u8, self.bytes)
            },
        }
    }

    /// Returns the bytes, to change.
    ///
    /// # Safety
    /// As [`slice`](Self::slice); nothing else of this library has the same bytes.
    pub unsafe fn slice_mut<'a>(self) -> &'a mut [u8] {
        match self.bytes {
            0 => &mut [],
            // SAFETY: the caller's.
            _ => unsafe {
                std::slice::from_raw_parts_mut(self.address as usize as *mut u8, self.bytes)
            },
        }
    }
}

/// Checks that no two pieces share a byte.
pub fn check_apart(pieces: &[MemoryPiece]) -> Result<(), ExceptionParts> {
    // A piece without bytes between two others would hide that those overlap.
    let mut sorted: Vec<_> = pieces.iter().filter(|piece| piece.bytes > 0).collect();
    sorted.sort_by_key(|piece| piece.address);
    match sorted.windows(2).any(|two| two[0].overlaps(*two[1])) {
        true => Err(ExceptionParts::usage(
            "two buffers of one load share memory",
            "pass a buffer of its own for each page",
        )),
        false => Ok(()),
    }
}

impl PyView {
    pub fn memory(&self) -> MemoryPiece {
        MemoryPiece {
            address: self.address,
            bytes: self.bytes,
        }
    }

    /// Returns the memory, if a thread of the host may touch it.
    ///
    /// # Errors
    /// Of a GPU; or read-only where it would be written.
    pub fn of_host(&self, what: &str, is_written: bool) -> Result<MemoryPiece, ExceptionParts> {
        if !matches!(self.device.0, dlpack::CPU | dlpack::CUDA_HOST) {
            return Err(ExceptionParts::usage(
                format!("{what} lies in memory of a GPU"),
                "use memory of the host here",
            ));
        }
        if is_written && self.readonly {
            return Err(ExceptionParts::usage(
                format!("{what} is read-only"),
                "use memory that may be written: bytearray, or an array that is not frozen",
            ));
        }
        Ok(self.memory())
    }
}

#[pymethods]
impl PyView {
    /// Wraps an object with the buffer protocol. Raises BufferError for gaps or, with `writable`,
    /// for read-only memory.
    #[staticmethod]
    fn from_buffer(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        let py = object.py();
        let mut raw = Box::new(RawBuffer {
            buf: std::ptr::null_mut(),
            obj: std::ptr::null_mut(),
            len: 0,
            itemsize: 0,
            readonly: 0,
            ndim: 0,
            format: std::ptr::null_mut(),
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            suboffsets: std::ptr::null_mut(),
            internal: std::ptr::null_mut(),
        });
        let writable = if writable { WRITABLE } else { 0 };
        // SAFETY: a live object and a place for one view, which does not move: it may point into itself.
        let answer = unsafe {
            PyObject_GetBuffer(object.as_ptr(), &mut *raw, C_CONTIGUOUS | FORMAT | writable)
        };
        if answer != 0 {
            return Err(PyErr::fetch(py));
        }
        let has_place = raw.len <= 0 || !raw.buf.is_null();
        let dimensions = raw.ndim.max(0) as usize;
        let shape = match dimensions == 0 || raw.shape.is_null() {
            true => Vec::new(),
            // SAFETY: the exporter gives `ndim` lengths.
            false => unsafe { std::slice::from_raw_parts(raw.shape, dimensions) }
                .iter()
                .map(|length| (*length).max(0) as u64)
                .collect(),
        };
        let dtype = match raw.format.is_null() {
            true => "B".to_owned(),
            // SAFETY: the exporter gives a terminated text.
            false => unsafe { CStr::from_ptr(raw.format) }
                .to_string_lossy()
                .into_owned(),
        };
        let owner = ExportedBuffer(raw);
        if !has_place {
            return Err(PyBufferError::new_err("the buffer's address is NULL"));
        }
        let raw = &owner.0;
        Ok(Self {
            address: raw.buf.addr() as u64,
            bytes: raw.len.max(0) as usize,
            shape,
            dtype: format!("<{dtype}"),
            device: (dlpack::CPU, 0),
            readonly: raw.readonly != 0,
            owner: MemoryOwner::Buffer(owner),
        })
    }

    /// Imports a DLPack capsule, which is consumed. Raises BufferError for gaps and for elements of
    /// no whole bytes.
    #[staticmethod]
    fn from_dlpack(capsule: &Bound<'_, PyAny>) -> PyResult<Self> {
        let tensor = CapsuleTensor::take(capsule)?;
        let described = tensor.describe()?;
        Ok(Self {
            address: described.address,
            bytes: described.bytes,
            shape: described.shape,
            dtype: described.dtype,
            device: described.device,
            readonly: described.readonly,
            owner: MemoryOwner::Tensor(tensor),
        })
    }

    /// Returns a new object `bytes` with any content, and a view of its memory, to be filled before another
    /// piece of code sees the object.
    #[staticmethod]
    fn of_new_bytes(py: Python<'_>, nbytes: usize) -> PyResult<(Self, Py<PyAny>)> {
        let size = isize::try_from(nbytes).unwrap_or(isize::MAX);
        // SAFETY: NULL stands for memory that is filled later.
        let raw = unsafe { ffi::PyBytes_FromStringAndSize(std::ptr::null(), size) };
        // SAFETY: a new reference, or null with an exception set.
        let object = unsafe { Bound::from_owned_ptr_or_err(py, raw) }?;
        // SAFETY: an object of type bytes.
        let address = unsafe { ffi::PyBytes_AsString(raw) }.expose_provenance() as u64;
        let object = object.unbind();
        let view = Self {
            owner: MemoryOwner::Object(object.clone_ref(py)),
            address,
            bytes: nbytes,
            shape: vec![nbytes as u64],
            dtype: "uint8".to_owned(),
            device: (dlpack::CPU, 0),
            readonly: false,
        };
        Ok((view, object))
    }

    /// Wraps `nbytes` bytes at `address` that `owner` keeps alive: device type 1 is the host, 2 a
    /// GPU of CUDA.
    #[staticmethod]
    #[pyo3(signature = (owner, address, nbytes, shape, dtype, device, readonly))]
    fn raw(
        owner: Py<PyAny>,
        address: u64,
        nbytes: usize,
        shape: Vec<u64>,
        dtype: String,
        device: (i32, i32),
        readonly: bool,
    ) -> PyResult<Self> {
        if address == 0 && nbytes != 0 || address.checked_add(nbytes as u64).is_none() {
            return Err(ExceptionParts::usage(
                format!("no memory of {nbytes} bytes lies at address {address:#x}"),
                "pass an array whose memory was not given back",
            )
            .into());
        }
        Ok(Self {
            owner: MemoryOwner::Object(owner),
            address,
            bytes: nbytes,
            shape,
            dtype,
            device,
            readonly,
        })
    }

    #[getter]
    fn address(&self) -> u64 {
        self.address
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.bytes
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// Returns one of our type names, or `<` and a format of the buffer protocol.
    #[getter]
    fn dtype(&self) -> &str {
        &self.dtype
    }

    #[getter]
    fn device(&self) -> (i32, i32) {
        self.device
    }

    #[getter]
    fn readonly(&self) -> bool {
        self.readonly
    }
}
