//! Matrices on a store, and products with them.
// UNSAFETY: numbers lie in memory of views; launches use addresses of a GPU.
#![allow(unsafe_code)]

use super::host::Call;
use super::steps::stored;
use crate::flight::{Flights, GpuOperation};
use crate::on_store::OnStore;
use crate::operation::Operation;
use crate::store::{Open, Store};
use crate::view::View;
use crate::wait;
use nvme_compute::StreamedProducts;
use nvme_host::Error;
use pyo3::prelude::*;
use std::sync::Arc;

struct Opened {
    store: Open,
    matrix: nvme_compute::Matrix,
    /// With a GPU.
    by_gpu: Option<StreamedProducts>,
}

/// A matrix on a store, as it is stored.
#[pyclass(frozen, module = "nvme_gpu._native")]
pub struct Matrix {
    opened: OnStore<Arc<Opened>>,
    flights: Arc<Flights>,
}

#[pymethods]
impl Matrix {
    #[new]
    fn new(
        py: Python<'_>,
        store: &Store,
        offset: u64,
        format: u32,
        shape: (u32, u32),
    ) -> PyResult<Self> {
        let open = store.get()?;
        let format = stored(format)?;
        let opened = wait::of(py, move || {
            let (rows, columns) = shape;
            let matrix = nvme_compute::Matrix::new(&open, offset, format, rows, columns)?;
            let by_gpu = open.gpu().map(StreamedProducts::load).transpose()?;
            Ok(Arc::new(Opened {
                store: open,
                matrix,
                by_gpu,
            }))
        })?;
        let flights = Arc::default();
        store.add_table(&flights);
        Ok(Self {
            opened: OnStore::new(store, "matrix", opened),
            flights,
        })
    }

    /// Bytes of its rows.
    #[getter]
    fn nbytes(&self) -> PyResult<u64> {
        Ok(self.opened.get()?.matrix.bytes())
    }

    /// The product with `x`, by threads of the host.
    fn gemv(&self, x: Py<View>, out: Py<View>) -> PyResult<Operation> {
        let opened = self.opened.get()?;
        let mut call = Call::default();
        let x = call.input::<f32>(x, "x")?;
        let out = call.output::<f32>(out, "out")?;
        call.start(move || {
            // SAFETY: inside of the call, once.
            let (x, out) = unsafe { (x.get(), out.get()) };
            if out.len() != opened.matrix.rows() as usize {
                let cause = format!("out has {} elements", out.len());
                let remedy = format!("the matrix has {} rows", opened.matrix.rows());
                return Err(Error::usage(cause, remedy));
            }
            // What is not computed is no number.
            out.fill(f32::NAN);
            out.copy_from_slice(&opened.matrix.product(x)?);
            Ok(())
        })
    }

    /// Puts the product of the vector at `x` into `stream` of the store's GPU; the result goes to `y`.
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
        let what = ("product", opened.matrix.rows().into());
        let store = Arc::clone(&opened.store);
        self.flights.launch(py, store, what, buffers, false, || {
            let products = opened.by_gpu.as_ref().ok_or_else(without_gpu)?;
            // SAFETY: Python keeps the tensors in the order of the stream, or until the product has ended.
            unsafe { products.gemv(&opened.matrix, x, y, stream) }
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

/// Why a store without a GPU launches nothing.
pub fn without_gpu() -> Error {
    Error::usage("the store was opened without a GPU", "open it with gpu=0")
}
