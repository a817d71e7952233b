//! Operations of a token of a transformer, by threads of the host and by kernels.
// UNSAFETY: numbers lie in memory of views; launches use addresses of a GPU.
#![allow(unsafe_code)]

use super::host::{HostCall, launch};
use crate::error::ExceptionParts;
use crate::operation::PyOperation;
use crate::process::OfProcess;
use crate::view::PyView;
use crate::wait;
use nvme_compute::steps::by_cpu::{self, AttentionRule, TokenHeads};
use nvme_compute::steps::{
    ArgmaxParameters, AttentionParameters, GemvParameters, RmsNorm, RopeParameters, SiluMul,
    UnpackParameters,
};
use nvme_formats::StoredFormat;
use nvme_host::cuda::Gpu;
use pyo3::prelude::*;

/// Position, tokens, heads of queries, heads of keys and values, elements of a head.
type Given = (u32, u32, u32, u32, u32);

fn heads((position, tokens, heads, kv_heads, head_elements): Given) -> TokenHeads {
    TokenHeads {
        position,
        tokens,
        heads,
        kv_heads,
        head_elements,
    }
}

/// Returns the format with the number `number` of GGUF.
///
/// # Errors
/// For another number.
pub fn stored(number: u32) -> Result<StoredFormat, ExceptionParts> {
    StoredFormat::of_number(number).ok_or_else(|| {
        ExceptionParts::usage(
            format!("{number} is no format of weights"),
            "use one of f32, f16, bf16, q4_0, q4_1, q8_0, q4_k, q6_k and mxfp4",
        )
    })
}

/// Computes the cosine and sine of each pair of each of `positions` positions.
#[pyfunction]
pub fn angles(
    positions: u32,
    head_elements: u32,
    base: f64,
    out: Py<PyView>,
) -> PyResult<PyOperation> {
    let mut call = HostCall::default();
    let out = call.output::<f32>(out, "out")?;
    call.start(move || {
        // SAFETY: inside of the call, once.
        let out = unsafe { out.get() };
        let found = by_cpu::angles(positions, head_elements, base);
        out.iter_mut().zip(found).for_each(|(to, one)| *to = one);
        Ok(())
    })
}

/// Products of `weights` and vectors of `columns` elements; added to `out` with `adds`.
#[pyfunction]
pub fn gemv_on_cpu(
    format: u32,
    weights: Py<PyView>,
    x: Py<PyView>,
    columns: u32,
    out: Py<PyView>,
    adds: bool,
) -> PyResult<PyOperation> {
    let format = stored(format)?;
    let mut call = HostCall::default();
    let (weights, x) = (
        call.input::<u8>(weights, "weights")?,
        call.input::<f32>(x, "x")?,
    );
    let out = call.output::<f32>(out, "out")?;
    call.start(move || {
        // SAFETY: inside of the call, once.
        let (weights, x, out) = unsafe { (weights.get(), x.get(), out.get()) };
        by_cpu::gemv(format, weights, x, columns, out, adds)
    })
}

/// Computes the numbers of `rows` of `columns` elements each.
#[pyfunction]
pub fn unpack_on_cpu(
    format: u32,
    rows: Py<PyView>,
    columns: u32,
    out: Py<PyView>,
) -> PyResult<PyOperation> {
    let format = stored(format)?;
    let mut call = HostCall::default();
    let rows = call.input::<u8>(rows, "rows")?;
    let out = call.output::<f32>(out, "out")?;
    call.start(move || {
        // SAFETY: inside of the call, once.
        let (rows, out) = unsafe { (rows.get(), out.get()) };
        by_cpu::unpack(format, rows, columns, out)
    })
}

/// Norms of the vectors in `x`; `out` may be `x`.
#[pyfunction]
pub fn rms_norm_on_cpu(
    x: Py<PyView>,
    weight: Py<PyView>,
    epsilon: f32,
    out: Py<PyView>,
) -> PyResult<PyOperation> {
    let mut call = HostCall::default();
    let out = call.output::<f32>(out, "out")?;
    let x = call.input_or_same::<f32>(x, "x", &out)?;
    let weight = call.input::<f32>(weight, "weight")?;
    call.start(move || {
        // SAFETY: inside of the call, once.
        let (weight, out) = unsafe { (weight.get(), out.get()) };
        match x {
            // SAFETY: as above.
            Some(x) => by_cpu::rms_norm(unsafe { x.get() }, weight, epsilon, out),
            None => {
                let x = out.to_vec();
                by_cpu::rms_norm(&x, weight, epsilon, out)
            }
        }
    })
}

/// Turns `queries` in place, and puts keys and values into caches.
#[pyfunction]
pub fn rope_on_cpu(
    shape: Given,
    angles: Py<PyView>,
    queries: Py<PyView>,
    given: (Py<PyView>, Py<PyView>),
    caches: (Py<PyView>, Py<PyView>),
) -> PyResult<PyOperation> {
    let mut call = HostCall::default();
    let angles = call.input::<f32>(angles, "angles")?;
    let queries = call.output::<f32>(queries, "queries")?;
    let keys = call.input::<f32>(given.0, "keys")?;
    let values = call.input::<f32>(given.1, "values")?;
    let key_cache = call.output::<f32>(caches.0, "key_cache")?;
    let value_cache = call.output::<f32>(caches.1, "value_cache")?;
    call.start(move || {
        // SAFETY: inside of the call, once each.
        unsafe {
            by_cpu::rope(
                heads(shape),
                (angles.get(), false),
                queries.get(),
                (keys.get(), values.get()),
                (key_cache.get(), value_cache.get()),
            )
        }
    })
}

/// Computes attention over the caches.
#[pyfunction]
pub fn attention_on_cpu(
    shape: Given,
    queries: Py<PyView>,
    caches: (Py<PyView>, Py<PyView>),
    scale: f32,
    out: Py<PyView>,
) -> PyResult<PyOperation> {
    let mut call = HostCall::default();
    let queries = call.input::<f32>(queries, "queries")?;
    let keys = call.input::<f32>(caches.0, "key_cache")?;
    let values = call.input::<f32>(caches.1, "value_cache")?;
    let out = call.output::<f32>(out, "out")?;
    call.start(move || {
        // SAFETY: inside of the call, once each.
        unsafe {
            let caches = (keys.get(), values.get());
            let rule = AttentionRule {
                scale,
                ..AttentionRule::default()
            };
            by_cpu::attention(heads(shape), queries.get(), caches, rule, out.get())
        }
    })
}

/// Computes the activation of `x` times `factor`; `out` may be `x`.
#[pyfunction]
pub fn silu_mul_on_cpu(
    x: Py<PyView>,
    factor: Py<PyView>,
    out: Py<PyView>,
) -> PyResult<PyOperation> {
    let mut call = HostCall::default();
    let out = call.output::<f32>(out, "out")?;
    let x = call.input_or_same::<f32>(x, "x", &out)?;
    let factor = call.input::<f32>(factor, "factor")?;
    call.start(move || {
        // SAFETY: inside of the call, once.
        let (factor, out) = unsafe { (factor.get(), out.get()) };
        if let Some(x) = x {
            // SAFETY: as above.
            let x = unsafe { x.get() };
            if x.len() != out.len() {
                let cause = format!("x has {} elements, out {}", x.len(), out.len());
                return Err(nvme_host::Error::usage(cause, "use as many"));
            }
            out.copy_from_slice(x);
        }
        by_cpu::silu_mul(out, factor)
    })
}

/// Finds the index of the largest number of each of the vectors of `elements` numbers in `x`.
#[pyfunction]
pub fn argmax_on_cpu(x: Py<PyView>, elements: usize, out: Py<PyView>) -> PyResult<PyOperation> {
    let mut call = HostCall::default();
    let x = call.input::<f32>(x, "x")?;
    let out = call.output::<i64>(out, "out")?;
    call.start(move || {
        // SAFETY: inside of the call, once.
        let (x, out) = unsafe { (x.get(), out.get()) };
        for (x, out) in x.chunks(elements.max(1)).zip(out) {
            *out = by_cpu::argmax(x)?.into();
        }
        Ok(())
    })
}

/// The kernels of one GPU. Launches are put into a stream of it, return before they run, and may be captured.
#[pyclass(frozen, module = "nvme_gpu._native", name = "Steps")]
pub struct PySteps {
    steps: OfProcess<nvme_compute::steps::StepKernels>,
}

#[pymethods]
impl PySteps {
    /// Loads them.
    #[new]
    fn new(py: Python<'_>, gpu: u32) -> PyResult<Self> {
        let load = move || nvme_compute::steps::StepKernels::load(&Gpu::open(gpu)?);
        let steps = OfProcess::new("set of kernels", wait::of(py, move || Ok(load()?))?);
        Ok(Self { steps })
    }

    /// Launches a product with rows, columns and vectors, and the addresses of its weights, vectors
    /// and results.
    fn gemv(
        &self,
        py: Python<'_>,
        format: u32,
        shape: (u32, u32, u32),
        addresses: (u64, u64, u64),
        adds: bool,
        stream: u64,
    ) -> PyResult<()> {
        let (rows, columns, tokens) = shape;
        let (weights, x, y) = addresses;
        let gemv = GemvParameters {
            weights,
            x,
            y,
            row_bytes: stored(format)?.row_bytes(columns).unwrap_or(0),
            rows,
            columns,
            stride: rows,
            tokens,
            stored: format,
            adds: adds.into(),
        };
        let steps = self.steps.get()?;
        // SAFETY: Python keeps the tensors in the order of the stream.
        launch(py, || unsafe { steps.gemv(&gemv, stream) })
    }

    /// Launches the conversion of rows of `stride` bytes each.
    fn unpack(
        &self,
        py: Python<'_>,
        format: u32,
        shape: (u32, u32, u64),
        addresses: (u64, u64),
        stream: u64,
    ) -> PyResult<()> {
        let (tokens, columns, row_stride) = shape;
        let (rows, y) = addresses;
        let unpack = UnpackParameters {
            rows,
            y,
            row_stride,
            columns,
            tokens,
            stored: format,
            reserved: 0,
        };
        let steps = self.steps.get()?;
        // SAFETY: as for `gemv`.
        launch(py, || unsafe { steps.unpack(&unpack, stream) })
    }

    fn rms_norm(
        &self,
        py: Python<'_>,
        shape: (u32, u32),
        epsilon: f32,
        addresses: (u64, u64, u64),
        stream: u64,
    ) -> PyResult<()> {
        let (x, weight, y) = addresses;
        let norm = RmsNorm {
            x,
            weight,
            y,
            tokens: shape.0,
            elements: shape.1,
            epsilon,
            reserved: 0,
        };
        let steps = self.steps.get()?;
        // SAFETY: as for `gemv`.
        launch(py, || unsafe { steps.rms_norm(&norm, stream) })
    }

    /// Launches RoPE with the addresses of angles, queries, keys, values, and of the caches of
    /// both.
    fn rope(
        &self,
        py: Python<'_>,
        shape: Given,
        addresses: (u64, u64, u64, u64, u64, u64),
        stream: u64,
    ) -> PyResult<()> {
        let (angles, queries, keys, values, key_cache, value_cache) = addresses;
        let (position, tokens, heads, kv_heads, head_elements) = shape;
        let rope = RopeParameters {
            queries,
            keys,
            values,
            angles,
            key_cache,
            value_cache,
            position,
            tokens,
            heads,
            kv_heads,
            head_elements,
            halves: 0,
        };
        let steps = self.steps.get()?;
        // SAFETY: as for `gemv`.
        launch(py, || unsafe { steps.rope(&rope, stream) })
    }

    /// Launches attention with the addresses of queries, of the caches of keys and values, and of
    /// results.
    fn attention(
        &self,
        py: Python<'_>,
        shape: Given,
        scale: f32,
        addresses: (u64, u64, u64, u64),
        stream: u64,
    ) -> PyResult<()> {
        let (queries, key_cache, value_cache, y) = addresses;
        let (position, tokens, heads, kv_heads, head_elements) = shape;
        let attention = AttentionParameters {
            queries,
            key_cache,
            value_cache,
            y,
            position,
            tokens,
            heads,
            kv_heads,
            head_elements,
            scale,
            ..AttentionParameters::default()
        };
        let steps = self.steps.get()?;
        // SAFETY: as for `gemv`.
        launch(py, || unsafe { steps.attention(&attention, stream) })
    }

    fn silu_mul(
        &self,
        py: Python<'_>,
        elements: u64,
        addresses: (u64, u64, u64),
        stream: u64,
    ) -> PyResult<()> {
        let (x, factor, y) = addresses;
        let silu = SiluMul {
            x,
            factor,
            y,
            elements,
        };
        let steps = self.steps.get()?;
        // SAFETY: as for `gemv`.
        launch(py, || unsafe { steps.silu_mul(&silu, stream) })
    }

    /// Launches argmax with the addresses of the first vector, of 8 zero bytes, and of the first
    /// index.
    fn argmax(
        &self,
        py: Python<'_>,
        shape: (u32, u64),
        addresses: (u64, u64, u64),
        stream: u64,
    ) -> PyResult<()> {
        let (vectors, elements) = shape;
        let (x, best, index) = addresses;
        let steps = self.steps.get()?;
        launch(py, || {
            for at in 0..u64::from(vectors) {
                let argmax = ArgmaxParameters {
                    x: x + at * elements * 4,
                    best,
                    index: index + at * 8,
                    elements,
                };
                // SAFETY: as for `gemv`; `best` is zero again after each.
                unsafe { steps.argmax(&argmax, stream)? };
            }
            Ok(())
        })
    }
}
