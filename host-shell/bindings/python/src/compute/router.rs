//! The choice of experts, and how evenly they are used.
// UNSAFETY: numbers lie in memory of views; launches use addresses of a GPU.
#![allow(unsafe_code)]

use super::host::{HostCall, launch};
use crate::operation::PyOperation;
use crate::process::OfProcess;
use crate::view::PyView;
use crate::wait;
use nvme_host::cuda::Gpu;
use nvme_models::experts::{self, RouteParameters};
use pyo3::prelude::*;

/// Selects the experts of each token, with their weights and, with `probabilities`, the softmax over all.
#[pyfunction]
#[pyo3(signature = (logits, shape, over_all, experts, weights, probabilities=None))]
pub fn route_on_cpu(
    logits: Py<PyView>,
    shape: (u32, u32),
    over_all: bool,
    experts: Py<PyView>,
    weights: Py<PyView>,
    probabilities: Option<Py<PyView>>,
) -> PyResult<PyOperation> {
    let mut call = HostCall::default();
    let logits = call.input::<f32>(logits, "logits")?;
    let experts = call.output::<i32>(experts, "experts")?;
    let weights = call.output::<f32>(weights, "weights")?;
    let probabilities = probabilities.map(|view| call.output::<f32>(view, "probabilities"));
    let probabilities = probabilities.transpose()?;
    call.start(move || {
        // SAFETY: inside of the call, once.
        let (logits, numbers, weights) = unsafe { (logits.get(), experts.get(), weights.get()) };
        let chosen = experts::route(logits, shape.0, shape.1, over_all)?;
        let places = numbers.iter_mut().zip(weights);
        for (chosen, (expert, weight)) in chosen.into_iter().zip(places) {
            (*expert, *weight) = (chosen.expert as i32, chosen.weight);
        }
        if let Some(all) = probabilities {
            // SAFETY: as above.
            let places = unsafe { all.get() }.chunks_mut(shape.0 as usize);
            for (place, logits) in places.zip(logits.chunks(shape.0 as usize)) {
                let found = experts::probabilities(logits);
                place.iter_mut().zip(found).for_each(|(to, one)| *to = one);
            }
        }
        Ok(())
    })
}

/// Returns the largest number of choices and their standard deviation, in parts of the mean; their entropy, in
/// parts of the largest there can be; experts that were not chosen; the loss of the Switch Transformer, with
/// probabilities.
#[pyfunction]
pub fn balance(
    py: Python<'_>,
    counts: Vec<u64>,
    probabilities: Py<PyView>,
) -> PyResult<(f64, f64, f64, u32, Option<f64>)> {
    let mut call = HostCall::default();
    let probabilities = call.input::<f32>(probabilities, "probabilities")?;
    // SAFETY: the call lives until this returns.
    let found = py.detach(|| experts::balance(&counts, unsafe { probabilities.get() }));
    Ok((
        found.most_to_mean,
        found.variation,
        found.entropy,
        found.unused,
        found.loss,
    ))
}

/// The kernel that chooses experts, of one GPU.
#[pyclass(frozen, module = "nvme_gpu._native", name = "Router")]
pub struct PyRouter {
    router: OfProcess<experts::Router>,
}

#[pymethods]
impl PyRouter {
    /// Loads them.
    #[new]
    fn new(py: Python<'_>, gpu: u32) -> PyResult<Self> {
        let load = move || experts::Router::load(&Gpu::open(gpu)?);
        let router = OfProcess::new("set of kernels", wait::of(py, move || Ok(load()?))?);
        Ok(Self { router })
    }

    /// Launches the router for tokens, experts and choices, with the addresses of logits, of 16
    /// bytes for each choice, and of probabilities, or 0.
    fn route(
        &self,
        py: Python<'_>,
        shape: (u32, u32, u32),
        over_all: bool,
        addresses: (u64, u64, u64),
        stream: u64,
    ) -> PyResult<()> {
        let (tokens, experts, choices) = shape;
        let (logits, chosen, probabilities) = addresses;
        let route = RouteParameters {
            logits,
            chosen,
            probabilities,
            tokens,
            experts,
            choices,
            over_all: over_all.into(),
        };
        let router = self.router.get()?;
        // SAFETY: Python keeps the tensors in the order of the stream.
        launch(py, || unsafe { router.route(&route, stream) })
    }
}
