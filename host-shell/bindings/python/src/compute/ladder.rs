//! Products of two matrices: the rungs of the ladder on a GPU, and by threads of the host.
// UNSAFETY: numbers lie in memory of views; launches use addresses of a GPU.
#![allow(unsafe_code)]

use super::host::{HostCall, launch};
use crate::error::ExceptionParts;
use crate::operation::PyOperation;
use crate::process::OfProcess;
use crate::view::PyView;
use crate::wait;
use nvme_course::ladder::cpu::{MatmulShape, matmul_cpu, matmul_cpu_blocked};
use nvme_course::ladder::{self, MatmulOperands, MatmulStep, MatrixElement, MatrixOperand};
use nvme_host::Error;
use nvme_host::cuda::Gpu;
use pyo3::prelude::*;

/// The address of a matrix, and the elements from one row to the next.
type Place = (u64, u64);

fn element(dtype: &str) -> Result<MatrixElement, ExceptionParts> {
    match dtype {
        "float32" => Ok(MatrixElement::F32),
        "float16" => Ok(MatrixElement::F16),
        "bfloat16" => Ok(MatrixElement::Bf16),
        other => {
            let cause = format!("{other} is no element type of a product");
            Err(ExceptionParts::usage(
                cause,
                "use float32, float16 or bfloat16",
            ))
        }
    }
}

fn rung(name: &str) -> Result<MatmulStep, ExceptionParts> {
    MatmulStep::of_name(name).ok_or_else(|| {
        let names = MatmulStep::ALL.map(MatmulStep::name).join(", ");
        ExceptionParts::usage(
            format!("no rung is called '{name}'"),
            format!("use one of {names}"),
        )
    })
}

/// Computes `out = a b` of float32 by threads of the host; `shape` is rows and columns of the
/// result, and terms.
#[pyfunction]
pub fn matmul_on_cpu(
    a: Py<PyView>,
    b: Py<PyView>,
    out: Py<PyView>,
    shape: (usize, usize, usize),
    is_blocked: bool,
) -> PyResult<PyOperation> {
    let mut call = HostCall::default();
    let a = call.input::<f32>(a, "a")?;
    let b = call.input::<f32>(b, "b")?;
    let out = call.output::<f32>(out, "out")?;
    call.start(move || {
        // SAFETY: inside of the call, once.
        let (a, b, out) = unsafe { (a.get(), b.get(), out.get()) };
        let (m, n, k) = shape;
        let lengths = (m.checked_mul(k), k.checked_mul(n), m.checked_mul(n));
        if lengths != (Some(a.len()), Some(b.len()), Some(out.len())) {
            let cause = format!(
                "a has {} elements, b {} and out {}, which is not a product of {m} x {k} and {k} x {n}",
                a.len(),
                b.len(),
                out.len()
            );
            return Err(Error::usage(
                cause,
                format!("use {m} x {k}, {k} x {n} and {m} x {n}"),
            ));
        }
        let shape = MatmulShape { m, n, k };
        match is_blocked {
            true => matmul_cpu_blocked(a, b, out, shape),
            false => matmul_cpu(a, b, out, shape),
        }
        Ok(())
    })
}

/// The kernels of the ladder, of one GPU.
#[pyclass(frozen, module = "nvme_gpu._native", name = "Ladder")]
pub struct PyLadder {
    ladder: OfProcess<ladder::MatmulLadder>,
}

#[pymethods]
impl PyLadder {
    /// Loads them.
    #[new]
    fn new(py: Python<'_>, gpu: u32) -> PyResult<Self> {
        let load = move || ladder::MatmulLadder::load(&Gpu::open(gpu)?);
        let ladder = OfProcess::new("set of kernels", wait::of(py, move || Ok(load()?))?);
        Ok(Self { ladder })
    }

    /// True if this GPU supports a rung.
    fn has(&self, name: &str) -> PyResult<bool> {
        Ok(self.ladder.get()?.has(rung(name)?))
    }

    /// Launches `c = a b`: rows and columns of the result, and terms; the dtypes of the factors and
    /// of the result.
    fn matmul(
        &self,
        py: Python<'_>,
        name: &str,
        shape: (u32, u32, u32),
        dtypes: (String, String),
        places: (Place, Place, Place),
        stream: u64,
    ) -> PyResult<()> {
        let (m, n, k) = shape;
        let operand = |(address, stride): Place| MatrixOperand { address, stride };
        let product = MatmulOperands {
            a: operand(places.0),
            b: operand(places.1),
            c: operand(places.2),
            m,
            n,
            k,
            factors: element(&dtypes.0)?,
            result: element(&dtypes.1)?,
        };
        let rung = rung(name)?;
        let ladder = self.ladder.get()?;
        // SAFETY: Python keeps the tensors in the order of the stream.
        launch(py, || unsafe { ladder.matmul(rung, &product, stream) })
    }
}
