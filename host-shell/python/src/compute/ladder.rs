//! Products of two matrices: the rungs of the ladder on a GPU, and by threads of the host.
// UNSAFETY: numbers lie in memory of views; launches use addresses of a GPU.
#![allow(unsafe_code)]

use super::host::{Call, launch};
use crate::error::Fault;
use crate::operation::Operation;
use crate::process::OfProcess;
use crate::view::View;
use crate::wait;
use nvme_course::ladder::cpu::{Shape, matmul_cpu, matmul_cpu_blocked};
use nvme_course::ladder::{self, Element, Matmul, Operand, Rung};
use nvme_host::Error;
use nvme_host::cuda::Gpu;
use pyo3::prelude::*;

/// The address of a matrix, and the elements from one row to the next.
type Place = (u64, u64);

fn element(dtype: &str) -> Result<Element, Fault> {
    match dtype {
        "float32" => Ok(Element::F32),
        "float16" => Ok(Element::F16),
        "bfloat16" => Ok(Element::Bf16),
        other => {
            let cause = format!("a product of {other}");
            Err(Fault::usage(cause, "use float32, float16 or bfloat16"))
        }
    }
}

fn rung(name: &str) -> Result<Rung, Fault> {
    Rung::of_name(name).ok_or_else(|| {
        let names = Rung::ALL.map(Rung::name).join(", ");
        Fault::usage(
            format!("no rung is called '{name}'"),
            format!("use one of {names}"),
        )
    })
}

/// Computes `out = a b` of float32 by threads of the host; `shape` is rows and columns of the
/// result, and terms.
#[pyfunction]
pub fn matmul_on_cpu(
    a: Py<View>,
    b: Py<View>,
    out: Py<View>,
    shape: (usize, usize, usize),
    is_blocked: bool,
) -> PyResult<Operation> {
    let mut call = Call::default();
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
                "{} and {} elements for {} of the result",
                a.len(),
                b.len(),
                out.len()
            );
            return Err(Error::usage(
                cause,
                format!("use {m} x {k}, {k} x {n} and {m} x {n}"),
            ));
        }
        let shape = Shape { m, n, k };
        match is_blocked {
            true => matmul_cpu_blocked(a, b, out, shape),
            false => matmul_cpu(a, b, out, shape),
        }
        Ok(())
    })
}

/// The kernels of the ladder, of one GPU.
#[pyclass(frozen, module = "nvme_gpu._native")]
pub struct Ladder {
    ladder: OfProcess<ladder::Ladder>,
}

#[pymethods]
impl Ladder {
    /// Loads them.
    #[new]
    fn new(py: Python<'_>, gpu: u32) -> PyResult<Self> {
        let load = move || ladder::Ladder::load(&Gpu::open(gpu)?);
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
        let operand = |(address, stride): Place| Operand { address, stride };
        let product = Matmul {
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
