//! Arrays of our own, for results of gathers when no array library provides the memory.

use crate::dlpack::{self, TensorDescription};
use crate::error::{ExceptionParts, OrRaise};
use crate::flight::{GpuOperation, LaunchedTransfer};
use crate::operation::PyOperation;
use crate::process::OfProcess;
use crate::store::PyStore;
use crate::wait;
use nvme_host::cuda::{DeviceMemory, Gpu};
use nvme_host::lock::lock;
use pyo3::exceptions::{PyAttributeError, PyBufferError, PyMemoryError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use std::sync::{Arc, Mutex};

/// As much of the host's memory as a line of its cache.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct AlignedLine([u8; 64]);

enum ArrayMemory {
    Host(Vec<AlignedLine>),
    Gpu(DeviceMemory, Arc<Gpu>),
}

/// A C-contiguous array of ours in host or GPU memory.
///
/// It exports its memory by `__dlpack__`, and by `__cuda_array_interface__` or `__array_interface__`.
#[pyclass(frozen, module = "nvme_gpu._native", name = "Array")]
pub struct PyArray {
    memory: OfProcess<Arc<ArrayMemory>>,
    shape: Vec<u64>,
    dtype: String,
    bytes: usize,
    address: u64,
    /// As DLPack names it.
    device: (i32, i32),
    filled: Mutex<ArrayFilling>,
}

/// The transfer that fills an array.
#[derive(Default)]
struct ArrayFilling {
    /// Its stream.
    stream: u64,
    /// The transfer on a GPU.
    flight: Option<Arc<LaunchedTransfer>>,
    /// True if another call tells which of its rows failed.
    is_judged: bool,
    /// The failure of a transfer by the CPU.
    failure: Option<ExceptionParts>,
}

impl PyArray {
    /// Returns the dictionary that both array interfaces share.
    fn interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (kind, bits) = dlpack::kind(&self.dtype).ok_or_else(|| {
            let what = format!("{} has no code in array interfaces: use DLPack", self.dtype);
            PyAttributeError::new_err(what)
        })?;
        let order = if bits == 8 { '|' } else { '<' };
        let dict = PyDict::new(py);
        dict.set_item("version", 3)?;
        dict.set_item("shape", self.shape(py)?)?;
        dict.set_item("typestr", format!("{order}{kind}{}", bits / 8))?;
        dict.set_item("data", (self.address, false))?;
        dict.set_item("strides", py.None())?;
        Ok(dict)
    }

    /// Returns the first failure of the transfer that filled it. Waits for nothing: a transfer on a GPU may fail
    /// later.
    fn known_failure(&self) -> Option<ExceptionParts> {
        let filled = lock(&self.filled);
        match (&filled.failure, &filled.flight) {
            (Some(fault), _) => Some(fault.clone()),
            (None, Some(flight)) if !filled.is_judged => flight.failure(),
            _ => None,
        }
    }
}

#[pymethods]
impl PyArray {
    /// Allocates zeroed memory; on the GPU of `store` when one is given.
    #[new]
    #[pyo3(signature = (shape, dtype, itemsize, store=None))]
    fn new(
        py: Python<'_>,
        shape: Vec<u64>,
        dtype: String,
        itemsize: u64,
        store: Option<&PyStore>,
    ) -> PyResult<Self> {
        let bytes = shape
            .iter()
            .try_fold(itemsize, |all, one| all.checked_mul(*one));
        let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
        let bytes = bytes.filter(|bytes| *bytes <= isize::MAX as usize / 2);
        let Some(bytes) = bytes else {
            return Err(PyMemoryError::new_err("an array of more bytes than can be"));
        };
        let (memory, address) = match store {
            Some(store) => {
                let gpu = store.gpu()?;
                let memory = py.detach(|| DeviceMemory::new(&gpu, bytes)).or_raise()?;
                let address = memory.address();
                (ArrayMemory::Gpu(memory, gpu), address)
            }
            None => {
                let mut lines = Vec::new();
                let count = bytes.div_ceil(64);
                let refused = |_| PyMemoryError::new_err(format!("{bytes} bytes"));
                lines.try_reserve_exact(count).map_err(refused)?;
                // Writes each byte, which takes a second for some gigabytes.
                py.detach(|| lines.resize(count, AlignedLine([0; 64])));
                let address = lines.as_ptr().expose_provenance() as u64;
                (ArrayMemory::Host(lines), address)
            }
        };
        let device = match &memory {
            ArrayMemory::Host(_) => (dlpack::CPU, 0),
            ArrayMemory::Gpu(_, gpu) => (dlpack::CUDA, gpu.index() as i32),
        };
        Ok(Self {
            memory: OfProcess::new("array", Arc::new(memory)),
            device,
            shape,
            dtype,
            bytes,
            address,
            filled: Mutex::default(),
        })
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    #[getter]
    fn dtype(&self) -> &str {
        &self.dtype
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.bytes
    }

    /// Address of the first byte.
    #[getter]
    fn address(&self) -> u64 {
        self.address
    }

    /// Returns "cpu" or "cuda:0".
    #[getter(device)]
    fn device_name(&self) -> String {
        match self.device {
            (dlpack::CPU, _) => "cpu".to_owned(),
            (_, index) => format!("cuda:{index}"),
        }
    }

    /// Returns the stream that fills it, as CUDA counts it; 0 in memory of the host.
    #[getter]
    fn stream(&self) -> u64 {
        lock(&self.filled).stream
    }

    /// Records that `operation` fills it: on a GPU in `stream`, or on the CPU, where it has ended. With `judged`
    /// another call tells which of its rows failed, and the others may be read.
    #[pyo3(signature = (operation, stream, judged))]
    fn is_filled_by(
        &self,
        operation: Option<&Bound<'_, PyAny>>,
        stream: u64,
        judged: bool,
    ) -> PyResult<()> {
        let mut filling = ArrayFilling {
            stream,
            is_judged: judged,
            ..ArrayFilling::default()
        };
        match operation {
            None => {}
            Some(operation) => match operation.cast::<GpuOperation>() {
                Ok(of_gpu) => filling.flight = Some(Arc::clone(of_gpu.get().flight())),
                Err(_) if judged => {}
                Err(_) => filling.failure = operation.cast::<PyOperation>()?.get().failed_row()?,
            },
        }
        *lock(&self.filled) = filling;
        Ok(())
    }

    /// Raises the first failure of the transfer that filled it, where that is known. Waits for nothing.
    fn check_filled(&self) -> PyResult<()> {
        match self.known_failure() {
            Some(fault) => Err(fault.into()),
            None => Ok(()),
        }
    }

    /// Returns a copy of its bytes; of memory of a GPU once it is filled. Raises the first failure of the transfer
    /// that filled it.
    fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let memory = Arc::clone(self.memory.get()?);
        let flight = lock(&self.filled).flight.clone();
        if let Some(flight) = flight
            && !flight.wait_in(py, None)?
        {
            return Err(flight.late().into());
        }
        self.check_filled()?;
        let mut bytes = vec![0; self.bytes];
        let bytes = match &*memory {
            ArrayMemory::Host(lines) => py.detach(|| {
                for (to, from) in bytes.chunks_mut(64).zip(lines) {
                    to.copy_from_slice(&from.0[..to.len()]);
                }
                bytes
            }),
            ArrayMemory::Gpu(..) => wait::of(py, move || {
                if let ArrayMemory::Gpu(memory, _) = &*memory {
                    memory.download(0, &mut bytes)?;
                }
                Ok(bytes)
            })?,
        };
        Ok(PyBytes::new(py, &bytes))
    }

    /// Returns its numbers as lists of lists, as `tobytes` its bytes.
    fn tolist<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let module = slf.py().import("nvme_gpu._dtypes")?;
        module.getattr("numbers")?.call1((slf,))
    }

    fn __repr__(&self) -> String {
        let device = self.device_name();
        format!(
            "<nvme_gpu.Array {:?} {} on {device}>",
            self.shape, self.dtype
        )
    }

    /// Returns the CUDA array interface, version 3, for GPU memory: consumers wait for `stream`.
    #[getter(__cuda_array_interface__)]
    fn cuda_array_interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.device.0 == dlpack::CPU {
            return Err(PyAttributeError::new_err(
                "the array lies in memory of the host",
            ));
        }
        self.check_filled()?;
        let dict = self.interface(py)?;
        // The default stream has the number 1 here.
        dict.set_item("stream", lock(&self.filled).stream.max(1))?;
        Ok(dict)
    }

    /// Returns the array interface of numpy, for host memory.
    #[getter(__array_interface__)]
    fn array_interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.device.0 == dlpack::CUDA {
            return Err(PyAttributeError::new_err(
                "the array lies in memory of a GPU",
            ));
        }
        self.check_filled()?;
        self.interface(py)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        self.device
    }

    /// Exports the array as a DLPack capsule. On a GPU `stream` waits for what fills the array: None and 1 are
    /// the default stream, 2 is that of the thread, -1 asks for no order. Raises the first failure of what filled
    /// it, where that has ended.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if dl_device.is_some_and(|device| device != self.device) {
            return Err(PyBufferError::new_err("the array lies on another device"));
        }
        let memory = self.memory.get()?;
        self.check_filled()?;
        let is_copy = copy == Some(true);
        if is_copy && matches!(&**memory, ArrayMemory::Gpu(..)) {
            return Err(PyBufferError::new_err("copy=True is not offered on a GPU"));
        }
        if let ArrayMemory::Gpu(_, gpu) = &**memory {
            let first = lock(&self.filled).stream;
            let then = match stream {
                None | Some(1) => Some(0),
                Some(-1) => None,
                Some(other) => Some(u64::try_from(other).map_err(|_| {
                    PyErr::from(ExceptionParts::usage(
                        format!("{other} is no stream of DLPack"),
                        "give 1, 2, -1 or the address of a stream",
                    ))
                })?),
            };
            if let Some(then) = then.filter(|then| *then != first) {
                py.detach(|| gpu.order(first, then)).or_raise()?;
            }
        }
        let mut described = TensorDescription {
            address: self.address,
            bytes: self.bytes,
            shape: self.shape.clone(),
            dtype: self.dtype.clone(),
            device: self.device,
            readonly: false,
        };
        let owner: Box<dyn Send + Sync> = match &**memory {
            ArrayMemory::Host(lines) if is_copy => {
                let copied = py.detach(|| lines.clone());
                described.address = copied.as_ptr().expose_provenance() as u64;
                Box::new(ArrayMemory::Host(copied))
            }
            _ => Box::new(Arc::clone(memory)),
        };
        let is_versioned = max_version.is_some_and(|version| version.0 >= 1);
        dlpack::hand_out(py, &described, owner, is_versioned, is_copy)
    }
}
