//! Linear layers and their gradients, on a GPU and by threads of the host. Gradients of `atomic_free` and
//! `warp_reduce` have the same bits each time; `naive` adds by atomic operations, in any order.
// UNSAFETY: numbers lie in memory of views; launches use addresses of a GPU.
#![allow(unsafe_code)]

use super::host::{HostCall, launch};
use crate::error::ExceptionParts;
use crate::operation::PyOperation;
use crate::process::OfProcess;
use crate::view::PyView;
use crate::wait;
use nvme_course::linear::{
    self, ActivationKind, BackwardParameters, BackwardRung, ForwardParameters, ForwardRung,
    HostLayer,
};
use nvme_host::Error;
use nvme_host::cuda::Gpu;
use pyo3::prelude::*;

/// Memory for gradients of inputs, weights and biases.
type Wanted = (Option<Py<PyView>>, Option<Py<PyView>>, Option<Py<PyView>>);

/// Rows, inputs and outputs.
type Shape = (u32, u32, u32);

fn activation(name: &str) -> Result<ActivationKind, ExceptionParts> {
    match name {
        "none" => Ok(ActivationKind::None),
        "relu" => Ok(ActivationKind::Relu),
        "silu" => Ok(ActivationKind::Silu),
        "gelu" => Ok(ActivationKind::Gelu),
        other => Err(ExceptionParts::usage(
            format!("activation is '{other}'"),
            "use 'relu', 'silu', 'gelu' or None",
        )),
    }
}

fn layer((_, inputs, outputs): Shape, name: &str) -> Result<HostLayer, ExceptionParts> {
    Ok(HostLayer {
        inputs: inputs as usize,
        outputs: outputs as usize,
        activation: activation(name)?,
    })
}

/// # Errors
/// For another length than that of `to`.
fn put(to: &mut [f32], from: &[f32], what: &str) -> nvme_host::Result<()> {
    if to.len() != from.len() {
        let cause = format!("{what} has {} elements", to.len());
        return Err(Error::usage(cause, format!("use {}", from.len())));
    }
    to.copy_from_slice(from);
    Ok(())
}

/// Computes the results into `out`, and the sums before the activation into `sums`.
#[pyfunction]
#[pyo3(signature = (shape, activation, x, weights, bias, out, sums=None))]
pub fn linear_forward_on_cpu(
    shape: Shape,
    activation: &str,
    x: Py<PyView>,
    weights: Py<PyView>,
    bias: Option<Py<PyView>>,
    out: Py<PyView>,
    sums: Option<Py<PyView>>,
) -> PyResult<PyOperation> {
    let layer = layer(shape, activation)?;
    let mut call = HostCall::default();
    let x = call.input::<f32>(x, "x")?;
    let weights = call.input::<f32>(weights, "weights")?;
    let bias = bias
        .map(|view| call.input::<f32>(view, "bias"))
        .transpose()?;
    let out = call.output::<f32>(out, "out")?;
    let sums = sums
        .map(|view| call.output::<f32>(view, "sums"))
        .transpose()?;
    call.start(move || {
        // SAFETY: inside of the call, once each.
        let (x, weights, out) = unsafe { (x.get(), weights.get(), out.get()) };
        // SAFETY: as above.
        let bias = bias.as_ref().map(|bias| unsafe { bias.get() });
        let (y, before) = layer.forward(x, weights, bias)?;
        put(out, &y, "out")?;
        match sums {
            // SAFETY: as above.
            Some(sums) => put(unsafe { sums.get() }, &before, "sums"),
            None => Ok(()),
        }
    })
}

/// Gradients of inputs, weights and biases, those that are wanted.
#[pyfunction]
#[pyo3(signature = (shape, activation, given, wanted))]
pub fn linear_backward_on_cpu(
    shape: Shape,
    activation: &str,
    given: (Py<PyView>, Py<PyView>, Py<PyView>, Py<PyView>),
    wanted: Wanted,
) -> PyResult<PyOperation> {
    let layer = layer(shape, activation)?;
    let mut call = HostCall::default();
    let (x, weights, sums, dy) = given;
    let x = call.input::<f32>(x, "x")?;
    let weights = call.input::<f32>(weights, "weights")?;
    let sums = call.input::<f32>(sums, "sums")?;
    let dy = call.input::<f32>(dy, "dy")?;
    let mut place = |view: Option<Py<PyView>>, what| {
        let place = view.map(|view| call.output::<f32>(view, what));
        place.transpose()
    };
    let places = [
        (place(wanted.0, "dx")?, "dx"),
        (place(wanted.1, "dweights")?, "dweights"),
        (place(wanted.2, "dbias")?, "dbias"),
    ];
    call.start(move || {
        // SAFETY: inside of the call, once each.
        let found = unsafe { layer.backward(x.get(), weights.get(), sums.get(), dy.get())? };
        for ((place, what), found) in places.iter().zip([found.inputs, found.weights, found.bias]) {
            if let Some(place) = place {
                // SAFETY: as above.
                put(unsafe { place.get() }, &found, what)?;
            }
        }
        Ok(())
    })
}

/// The kernels of linear layers, of one GPU.
#[pyclass(frozen, module = "nvme_gpu._native", name = "Linear")]
pub struct PyLinear {
    linear: OfProcess<linear::LinearKernels>,
}

#[pymethods]
impl PyLinear {
    /// Loads them.
    #[new]
    fn new(py: Python<'_>, gpu: u32) -> PyResult<Self> {
        let load = move || linear::LinearKernels::load(&Gpu::open(gpu)?);
        let linear = OfProcess::new("set of kernels", wait::of(py, move || Ok(load()?))?);
        Ok(Self { linear })
    }

    /// Launches the forward pass with the addresses of inputs, weights, biases or 0, results, and
    /// sums or 0.
    fn forward(
        &self,
        py: Python<'_>,
        name: &str,
        shape: Shape,
        activation: &str,
        addresses: (u64, u64, u64, u64, u64),
        stream: u64,
    ) -> PyResult<()> {
        let rung = match name {
            "naive" => ForwardRung::Naive,
            "fused" => ForwardRung::Fused,
            "persistent" => ForwardRung::Persistent,
            "bfloat16" => ForwardRung::MixedBf16,
            "float16" => ForwardRung::MixedF16,
            other => {
                return Err(no_rung(
                    other,
                    "naive, fused, persistent, bfloat16, float16",
                ));
            }
        };
        let (x, weights, bias, y, sums) = addresses;
        let (tokens, inputs, outputs) = shape;
        let job = ForwardParameters {
            x,
            weights,
            bias,
            y,
            sums,
            tokens,
            inputs,
            outputs,
            activation: self::activation(activation)? as u32,
        };
        let linear = self.linear.get()?;
        // SAFETY: Python keeps the tensors in the order of the stream.
        launch(py, || unsafe { linear.forward(rung, &job, stream) })
    }

    /// Launches the backward pass with the addresses of inputs, weights, sums or 0, gradients of
    /// results, workspace for those of sums, and of the gradients of inputs, weights and biases,
    /// each 0 where it is not requested.
    #[expect(clippy::too_many_arguments, reason = "one call for speed")]
    fn backward(
        &self,
        py: Python<'_>,
        name: &str,
        shape: Shape,
        activation: &str,
        given: (u64, u64, u64, u64, u64),
        wanted: (u64, u64, u64),
        stream: u64,
    ) -> PyResult<()> {
        let rung = match name {
            "naive" => BackwardRung::Naive,
            "atomic_free" => BackwardRung::AtomicFree,
            "warp_reduce" => BackwardRung::WarpReduce,
            other => return Err(no_rung(other, "naive, atomic_free, warp_reduce")),
        };
        let (x, weights, sums, dy, dsums) = given;
        let (dx, dweights, dbias) = wanted;
        let (tokens, inputs, outputs) = shape;
        let job = BackwardParameters {
            x,
            weights,
            sums,
            dy,
            dsums,
            dx,
            dweights,
            dbias,
            tokens,
            inputs,
            outputs,
            activation: self::activation(activation)? as u32,
        };
        let linear = self.linear.get()?;
        // SAFETY: as for `forward`.
        launch(py, || unsafe { linear.backward(rung, &job, stream) })
    }
}

fn no_rung(name: &str, known: &str) -> PyErr {
    ExceptionParts::usage(
        format!("no rung is called '{name}'"),
        format!("use one of {known}"),
    )
    .into()
}
