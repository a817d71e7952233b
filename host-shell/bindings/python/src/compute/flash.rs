//! Attention of many queries over keys and values in memory: the rungs of the ladder on a GPU, and by threads of the host.
// UNSAFETY: numbers lie in memory of views; launches use addresses of a GPU.
#![allow(unsafe_code)]

use super::host::{HostCall, launch, whole};
use crate::error::ExceptionParts;
use crate::operation::PyOperation;
use crate::process::OfProcess;
use crate::view::PyView;
use crate::wait;
use nvme_course::flash::{self, AttentionShape, AttentionStep, FlashParameters, VectorLayout};
use nvme_host::Error;
use nvme_host::cuda::Gpu;
use pyo3::prelude::*;

/// Sequences, heads of queries, heads of keys, queries of a head, keys of a head, elements of a head.
type Shape = (u32, u32, u32, u32, u32, u32);

/// An address, and the elements from one sequence to the next, from one head, and from one token.
type Place = (u64, u64, u64, u64);

fn heads(shape: Shape, causal: bool, scale: f32) -> AttentionShape {
    let (sequences, heads, kv_heads, query_tokens, key_tokens, head_elements) = shape;
    AttentionShape {
        sequences,
        heads,
        kv_heads,
        query_tokens,
        key_tokens,
        head_elements,
        causal,
        scale,
    }
}

/// Computes attention over float32 without gaps; `counts` says how many keys of each sequence count.
#[pyfunction]
#[pyo3(signature = (shape, causal, scale, given, out, counts=None))]
pub fn flash_on_cpu(
    shape: Shape,
    causal: bool,
    scale: f32,
    given: (Py<PyView>, Py<PyView>, Py<PyView>),
    out: Py<PyView>,
    counts: Option<Py<PyView>>,
) -> PyResult<PyOperation> {
    let mut call = HostCall::default();
    let queries = call.input::<f32>(given.0, "queries")?;
    let keys = call.input::<f32>(given.1, "keys")?;
    let values = call.input::<f32>(given.2, "values")?;
    let out = call.output::<f32>(out, "out")?;
    let counts = counts
        .map(|view| call.input::<i32>(view, "counts"))
        .transpose()?;
    call.start(move || {
        // SAFETY: inside of the call, once each.
        let (queries, keys, values) = unsafe { (queries.get(), keys.get(), values.get()) };
        // SAFETY: as above.
        let (out, counts) = unsafe { (out.get(), counts.as_ref().map(|counts| counts.get())) };
        let counts = counts.map(|counts| whole("counts", counts, shape.4));
        let counts = counts.transpose()?;
        let found = heads(shape, causal, scale).attend(queries, keys, values, counts.as_deref())?;
        if found.len() != out.len() {
            let cause = format!("out has {} elements", out.len());
            return Err(Error::usage(cause, format!("use {}", found.len())));
        }
        out.copy_from_slice(&found);
        Ok(())
    })
}

fn rung(name: &str, job: &FlashParameters) -> Result<AttentionStep, ExceptionParts> {
    match name {
        "auto" => Ok(AttentionStep::fastest(job)),
        "naive" => Ok(AttentionStep::Naive),
        "tiled" => Ok(AttentionStep::Tiled),
        "flash" => Ok(AttentionStep::Flash),
        "flash2" => Ok(AttentionStep::Flash2),
        "multi_query" => Ok(AttentionStep::MultiQuery),
        other => Err(ExceptionParts::usage(
            format!("no rung is called '{other}'"),
            "use one of auto, naive, tiled, flash, flash2, multi_query",
        )),
    }
}

/// The kernels of attention, of one GPU.
#[pyclass(frozen, module = "nvme_gpu._native", name = "Attention")]
pub struct PyAttention {
    attention: OfProcess<flash::FlashAttention>,
}

fn job(shape: Shape, is_bf16: bool, causal: bool, scale: f32) -> FlashParameters {
    heads(shape, causal, scale).job(is_bf16, [0; 4])
}

#[pymethods]
impl PyAttention {
    /// Loads them.
    #[new]
    fn new(py: Python<'_>, gpu: u32) -> PyResult<Self> {
        let load = move || flash::FlashAttention::load(&Gpu::open(gpu)?);
        let attention = OfProcess::new("set of kernels", wait::of(py, move || Ok(load()?))?);
        Ok(Self { attention })
    }

    /// Returns the number of bytes of memory of the GPU that a rung needs meanwhile.
    fn workspace_bytes(&self, name: &str, shape: Shape) -> PyResult<u64> {
        let job = job(shape, true, false, 1.0);
        Ok(self
            .attention
            .get()?
            .workspace_bytes(rung(name, &job)?, &job))
    }

    /// Places of queries, keys, values and results; the addresses of counts, or 0, and of a workspace, or 0.
    #[expect(clippy::too_many_arguments, reason = "one call for speed")]
    fn attend(
        &self,
        py: Python<'_>,
        name: &str,
        shape: Shape,
        is_bf16: bool,
        causal: bool,
        scale: f32,
        places: (Place, Place, Place, Place),
        room: (u64, u64),
        stream: u64,
    ) -> PyResult<()> {
        let vectors = |(address, sequence, head, token): Place| VectorLayout {
            address,
            sequence,
            head,
            token,
        };
        let job = FlashParameters {
            queries: vectors(places.0),
            keys: vectors(places.1),
            values: vectors(places.2),
            y: vectors(places.3),
            counts: room.0,
            workspace: room.1,
            ..job(shape, is_bf16, causal, scale)
        };
        let rung = rung(name, &job)?;
        let attention = self.attention.get()?;
        // SAFETY: Python keeps the tensors in the order of the stream.
        launch(py, || unsafe { attention.attend(rung, &job, stream) })
    }
}
