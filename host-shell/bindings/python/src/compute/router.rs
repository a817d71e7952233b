//! The choice of experts, and how evenly they are used.
// UNSAFETY: numbers lie in memory of views; launches use addresses of a GPU.
#![allow(unsafe_code)]

use super::host::{HostCall, launch};
use crate::error::ExceptionParts;
use crate::operation::PyOperation;
use crate::process::OfProcess;
use crate::view::PyView;
use crate::wait;
use nvme_host::cuda::Gpu;
use nvme_models::experts::{self, ExpertActivation, RouteParameters, RouterRule, RouterScore};
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

/// Experts, experts of a token, the score's name, groups, kept groups and scores of a group, True if weights are divided by
/// their sum, what is added to it, and the factor.
type Rule = (u32, u32, String, (u32, u32, u32), bool, f32, f32);

fn rule_of(rule: Rule) -> Result<RouterRule, ExceptionParts> {
    let (
        experts,
        choices,
        score,
        (groups, kept_groups, best_of_group),
        normalises,
        epsilon,
        factor,
    ) = rule;
    let score = match &*score {
        "softmax" => RouterScore::Softmax,
        "softmax_of_chosen" => RouterScore::SoftmaxOfChosen,
        "sigmoid" => RouterScore::Sigmoid,
        "sqrt_softplus" => RouterScore::SqrtSoftplus,
        other => {
            return Err(ExceptionParts::usage(
                format!("score is '{other}'"),
                "use 'softmax', 'softmax_of_chosen', 'sigmoid' or 'sqrt_softplus'",
            ));
        }
    };
    Ok(RouterRule {
        experts,
        choices,
        score,
        groups,
        kept_groups,
        best_of_group,
        normalises,
        epsilon,
        factor,
    })
}

/// Selects the experts of each token by a rule, or weighs those of `chosen`.
#[pyfunction]
#[pyo3(signature = (logits, rule, bias, chosen, experts, weights))]
pub fn route_by_rule_on_cpu(
    logits: Py<PyView>,
    rule: Rule,
    bias: Option<Py<PyView>>,
    chosen: Option<Py<PyView>>,
    experts: Py<PyView>,
    weights: Py<PyView>,
) -> PyResult<PyOperation> {
    let rule = rule_of(rule)?;
    let mut call = HostCall::default();
    let logits = call.input::<f32>(logits, "logits")?;
    let bias = bias
        .map(|view| call.input::<f32>(view, "bias"))
        .transpose()?;
    let chosen = chosen
        .map(|view| call.input::<u32>(view, "chosen"))
        .transpose()?;
    let experts = call.output::<u32>(experts, "experts")?;
    let weights = call.output::<f32>(weights, "weights")?;
    call.start(move || {
        // SAFETY: inside of the call, once.
        let (logits, numbers, weights) = unsafe { (logits.get(), experts.get(), weights.get()) };
        // SAFETY: as above.
        let (bias, chosen) = unsafe { (bias.map(|one| one.get()), chosen.map(|one| one.get())) };
        let found = match chosen {
            Some(chosen) => rule.weigh(logits, chosen)?,
            None => rule.route(logits, bias)?,
        };
        for (one, (expert, weight)) in found.into_iter().zip(numbers.iter_mut().zip(weights)) {
            (*expert, *weight) = (one.expert, one.weight);
        }
        Ok(())
    })
}

/// Limit and factor of a clamped activation, beta and second beta of SiTU.
pub type ActivationNumbers = (Option<f32>, Option<f32>, Option<f32>, Option<f32>);

/// Returns the activation that is clamped to a limit, and with a factor, too, that of gpt-oss; with a beta SiTU.
pub fn activation(numbers: ActivationNumbers) -> Result<ExpertActivation, ExceptionParts> {
    match numbers {
        (None, None, None, None) => Ok(ExpertActivation::SwiGlu),
        (Some(limit), None, None, None) => Ok(ExpertActivation::ClampedSwiGlu { limit }),
        (Some(limit), Some(alpha), None, None) => Ok(ExpertActivation::GptOss { limit, alpha }),
        (None, None, Some(beta), linear_beta) => Ok(ExpertActivation::Situ {
            beta,
            linear_beta: linear_beta.unwrap_or(0.0),
        }),
        (None, Some(_), _, _) => {
            let cause = "alpha is given without a limit";
            Err(ExceptionParts::usage(
                cause,
                "give both, as gpt-oss has them",
            ))
        }
        (_, _, None, Some(_)) => {
            let cause = "linear_beta is given without beta";
            Err(ExceptionParts::usage(
                cause,
                "give both, as Kimi-K3 has them",
            ))
        }
        (Some(_), _, Some(_), _) => {
            let cause = "a limit and beta are given, of two activations";
            Err(ExceptionParts::usage(cause, "give those of one"))
        }
    }
}

/// Computes the activation of each element; with a limit clamped, with alpha that of gpt-oss, with beta SiTU.
#[pyfunction]
#[pyo3(signature = (gate, up, numbers, out))]
pub fn activate_on_cpu(
    gate: Py<PyView>,
    up: Py<PyView>,
    numbers: ActivationNumbers,
    out: Py<PyView>,
) -> PyResult<PyOperation> {
    let activation = activation(numbers)?;
    let mut call = HostCall::default();
    let gate = call.input::<f32>(gate, "gate")?;
    let up = call.input::<f32>(up, "up")?;
    let out = call.output::<f32>(out, "out")?;
    call.start(move || {
        // SAFETY: inside of the call, once.
        let (gate, up, out) = unsafe { (gate.get(), up.get(), out.get()) };
        let pairs = gate.iter().zip(up);
        for ((gate, up), out) in pairs.zip(out) {
            *out = activation.value(*gate, *up);
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
