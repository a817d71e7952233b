//! Matrices on a store, and products with them. On a GPU the kernel reads the matrix by itself, and an error
//! waits for the matrix's `check`; on the host it is raised at once.
// UNSAFETY: numbers lie in memory of views; launches use addresses of a GPU.
#![allow(unsafe_code)]

use super::host::HostCall;
use super::steps::stored;
use crate::error::ExceptionParts;
use crate::flight::{FailureReport, GpuOperation, LaunchedTransfers};
use crate::on_store::OnStore;
use crate::operation::PyOperation;
use crate::store::{Open, PyStore};
use crate::view::PyView;
use crate::wait;
use nvme_compute::gemm::{GemmOperands, StreamedGemm};
use nvme_compute::{GpuIds, HalfFormat, StreamedProducts};
use nvme_host::Error;
use nvme_host::lock::lock;
use pyo3::prelude::*;
use std::sync::{Arc, Mutex};

struct OpenMatrix {
    store: Open,
    matrix: nvme_compute::StoredMatrix,
    /// With a GPU.
    by_gpu: Option<StreamedProducts>,
    /// Those of many vectors, loaded by the first.
    gemm: Mutex<Option<Arc<StreamedGemm>>>,
}

impl OpenMatrix {
    /// # Errors
    /// Without a GPU, and those of loading the kernels.
    fn gemm(&self) -> nvme_host::Result<Arc<StreamedGemm>> {
        let mut loaded = lock(&self.gemm);
        if let Some(gemm) = &*loaded {
            return Ok(Arc::clone(gemm));
        }
        let gpu = self.store.gpu().ok_or_else(without_gpu)?;
        let gemm = Arc::new(StreamedGemm::load(gpu)?);
        *loaded = Some(Arc::clone(&gemm));
        Ok(gemm)
    }
}

/// Returns the halves that are called `dtype`.
///
/// # Errors
/// For another name.
fn half(dtype: &str) -> Result<HalfFormat, ExceptionParts> {
    match dtype {
        "bfloat16" => Ok(HalfFormat::Bf16),
        "float16" => Ok(HalfFormat::F16),
        other => {
            let cause = format!("{other} is no element type of vectors");
            Err(ExceptionParts::usage(cause, "use bfloat16 or float16"))
        }
    }
}

/// A matrix on a store, as it is stored.
#[pyclass(frozen, module = "nvme_gpu._native", name = "Matrix")]
pub struct PyMatrix {
    opened: OnStore<Arc<OpenMatrix>>,
    flights: Arc<LaunchedTransfers>,
}

#[pymethods]
impl PyMatrix {
    #[new]
    fn new(
        py: Python<'_>,
        store: &PyStore,
        offset: u64,
        format: u32,
        shape: (u32, u32),
    ) -> PyResult<Self> {
        let open = store.get()?;
        let format = stored(format)?;
        let opened = wait::of(py, move || {
            let (rows, columns) = shape;
            let matrix = nvme_compute::StoredMatrix::new(&open, offset, format, rows, columns)?;
            let by_gpu = open.gpu().map(StreamedProducts::load).transpose()?;
            Ok(Arc::new(OpenMatrix {
                store: open,
                matrix,
                by_gpu,
                gemm: Mutex::default(),
            }))
        })?;
        let flights = Arc::default();
        store.add_table(&flights);
        Ok(Self {
            opened: OnStore::new(store, "matrix", opened),
            flights,
        })
    }

    /// Returns the number of bytes of its rows.
    #[getter]
    fn nbytes(&self) -> PyResult<u64> {
        Ok(self.opened.get()?.matrix.bytes())
    }

    /// Computes the product with `x`, by threads of the host.
    fn gemv(&self, x: Py<PyView>, out: Py<PyView>) -> PyResult<PyOperation> {
        let opened = self.opened.get()?;
        let mut call = HostCall::default();
        let x = call.input::<f32>(x, "x")?;
        let out = call.output::<f32>(out, "out")?;
        call.start(move || {
            // SAFETY: inside of the call, once.
            let (x, out) = unsafe { (x.get(), out.get()) };
            fill(out, || opened.matrix.product(x))
        })
    }

    /// Enqueues the product of the vector at `x` in `stream` of the store's GPU; the result goes to `y`.
    #[pyo3(signature = (x, y, stream, buffers=None))]
    fn gemv_on_gpu(
        &self,
        py: Python<'_>,
        x: u64,
        y: u64,
        stream: u64,
        buffers: Option<Py<PyAny>>,
    ) -> PyResult<GpuOperation> {
        self.flights.reap();
        self.flights.check()?;
        let opened = self.opened.get()?;
        let what = ("product", opened.matrix.rows().into(), opened.store.len());
        let store = Arc::clone(&opened.store);
        self.flights
            .launch(py, store, what, buffers, FailureReport::Table, || {
                let products = opened.by_gpu.as_ref().ok_or_else(without_gpu)?;
                // SAFETY: Python keeps the tensors in the order of the stream, or until the product has ended.
                unsafe { products.gemv(&opened.matrix, x, y, stream) }
            })
    }

    /// Computes the products of `x` and the rows that `ids` name, by threads of the host.
    fn gathered(&self, ids: Py<PyView>, x: Py<PyView>, out: Py<PyView>) -> PyResult<PyOperation> {
        let opened = self.opened.get()?;
        let mut call = HostCall::default();
        let ids = call.input::<i64>(ids, "ids")?;
        let x = call.input::<f32>(x, "x")?;
        let out = call.output::<f32>(out, "out")?;
        call.start(move || {
            // SAFETY: inside of the call, once.
            let (ids, x, out) = unsafe { (ids.get(), x.get(), out.get()) };
            fill(out, || opened.matrix.gathered(ids, x))
        })
    }

    /// Puts the products of the vector at `x` and the rows that `count` ids name into `stream`.
    #[pyo3(signature = (ids, wide, count, x, y, stream, buffers=None))]
    #[expect(clippy::too_many_arguments, reason = "one call for speed")]
    fn gathered_on_gpu(
        &self,
        py: Python<'_>,
        ids: u64,
        wide: bool,
        count: u64,
        x: u64,
        y: u64,
        stream: u64,
        buffers: Option<Py<PyAny>>,
    ) -> PyResult<GpuOperation> {
        self.flights.reap();
        self.flights.check()?;
        let opened = self.opened.get()?;
        let ids = GpuIds {
            address: ids,
            count,
            wide,
        };
        let store = Arc::clone(&opened.store);
        let what = ("product", count, opened.store.len());
        self.flights
            .launch(py, store, what, buffers, FailureReport::Table, || {
                let products = opened.by_gpu.as_ref().ok_or_else(without_gpu)?;
                // SAFETY: as for `gemv_on_gpu`.
                unsafe { products.gathered(&opened.matrix, ids, (x, y), stream) }
            })
    }

    /// Computes `x W^T` for rows of halves in `x`, by threads of the host.
    fn gemm(&self, x: Py<PyView>, dtype: &str, out: Py<PyView>) -> PyResult<PyOperation> {
        let opened = self.opened.get()?;
        let half = half(dtype)?;
        let mut call = HostCall::default();
        let x = call.input::<u16>(x, "x")?;
        let out = call.output::<f32>(out, "out")?;
        call.start(move || {
            // SAFETY: inside of the call, once.
            let (x, out) = unsafe { (x.get(), out.get()) };
            fill(out, || opened.matrix.products(x, half))
        })
    }

    /// Returns the number of bytes of memory of the GPU that a product of many vectors needs meanwhile.
    fn workspace_bytes(&self) -> PyResult<u64> {
        Ok(StreamedGemm::workspace_bytes(&self.opened.get()?.matrix))
    }

    /// Puts `x W^T` into `stream`: the addresses of rows of halves, of results, and of a workspace.
    #[pyo3(signature = (addresses, tokens, dtype, stream, buffers=None))]
    fn gemm_on_gpu(
        &self,
        py: Python<'_>,
        addresses: (u64, u64, u64),
        tokens: u32,
        dtype: &str,
        stream: u64,
        buffers: Option<Py<PyAny>>,
    ) -> PyResult<GpuOperation> {
        self.flights.reap();
        self.flights.check()?;
        let opened = self.opened.get()?;
        let (x, y, workspace) = addresses;
        let product = GemmOperands {
            x,
            y,
            workspace,
            tokens,
            half: half(dtype)?,
            readers: 0,
        };
        let store = Arc::clone(&opened.store);
        let what = ("product", opened.matrix.rows().into(), opened.store.len());
        self.flights
            .launch(py, store, what, buffers, FailureReport::Table, || {
                // SAFETY: as for `gemv_on_gpu`.
                unsafe { opened.gemm()?.gemm(&opened.matrix, &product, stream) }
            })
    }

    /// Waits for products on the GPU that were launched before, and raises the first failure that was not raised yet.
    #[pyo3(signature = (timeout=None))]
    fn check(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        self.opened.get()?;
        self.flights.wait(py, timeout)
    }

    fn close(&self) {
        self.opened.close();
    }
}

/// Writes the result of `product` into `out`; NaN where it fails.
///
/// # Errors
/// Those of `product`; for another length.
fn fill(
    out: &mut [f32],
    product: impl FnOnce() -> nvme_host::Result<Vec<f32>>,
) -> nvme_host::Result<()> {
    out.fill(f32::NAN);
    let found = product()?;
    if found.len() != out.len() {
        let cause = format!("out has {} elements", out.len());
        return Err(Error::usage(cause, format!("use {}", found.len())));
    }
    out.copy_from_slice(&found);
    Ok(())
}

/// Returns the error of a store without a GPU, which cannot launch kernels.
pub fn without_gpu() -> Error {
    Error::usage("the store was opened without a GPU", "open it with gpu=0")
}
