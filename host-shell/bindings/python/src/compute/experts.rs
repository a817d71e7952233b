//! Layers of experts on a store.
// UNSAFETY: numbers lie in memory of views; launches use addresses of a GPU.
#![allow(unsafe_code)]

use super::host::HostCall;
use super::layout::PyExpertLayout;
use super::router::{ActivationNumbers, activation};
use super::steps::stored;
use crate::error::ExceptionParts;
use crate::flight::{FailureReport, GpuOperation, LaunchedTransfers};
use crate::on_store::OnStore;
use crate::operation::PyOperation;
use crate::store::{Open, PyStore};
use crate::view::PyView;
use crate::wait;
use nvme_host::Error;
use nvme_models::experts::{
    self, CacheOptions, ChosenExpert, ExpertBiases, ExpertLayers, ExpertMatrices, ExpertShape,
    ExpertStep, ExpertUse, GivenChoices, GpuExperts, ReplacementPolicy,
};
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::Duration;

/// Deadline of reading the pinned experts, which may be most of a model.
const LIMIT: Duration = Duration::from_secs(600);

/// The first byte of a matrix of all experts of a layer, and its format.
type Place = (u64, u32);

/// Bytes, policy, pinned experts and tokens of a step.
type Cache = (u64, String, Vec<(u32, u32)>, u32);

/// Hits, misses, evictions, and how often each expert of each layer was chosen.
type Counted = (u64, u64, u64, Vec<Vec<u64>>);

struct OpenExperts {
    store: Open,
    experts: experts::ExpertLayers,
    by_gpu: Option<GpuExperts>,
}

/// Layers of experts.
#[pyclass(frozen, module = "nvme_gpu._native", name = "Experts")]
pub struct PyExperts {
    opened: OnStore<Arc<OpenExperts>>,
    flights: Arc<LaunchedTransfers>,
}

fn policy(name: &str) -> Result<ReplacementPolicy, ExceptionParts> {
    match name {
        "lru" => Ok(ReplacementPolicy::Lru),
        "lfu" => Ok(ReplacementPolicy::Lfu),
        "clock" => Ok(ReplacementPolicy::Clock),
        other => {
            let cause = format!("policy is '{other}'");
            Err(ExceptionParts::usage(cause, "use 'lru', 'lfu' or 'clock'"))
        }
    }
}

#[pymethods]
impl PyExperts {
    /// Creates the experts. `layers` has gate, up and down of each layer; `shape` is width, hidden, experts,
    /// choices.
    #[new]
    #[pyo3(signature = (store, layers, shape, over_all, limits, cache=None))]
    fn new(
        py: Python<'_>,
        store: &PyStore,
        layers: Vec<(Place, Place, Place)>,
        shape: (u32, u32, u32, u32),
        over_all: bool,
        limits: ActivationNumbers,
        cache: Option<Cache>,
    ) -> PyResult<Self> {
        let (width, hidden, count, choices) = shape;
        let shape = ExpertShape {
            width,
            hidden,
            experts: count,
            choices,
            over_all,
            activation: activation(limits)?,
        };
        let place = |(offset, format): Place| -> Result<ExpertMatrices, ExceptionParts> {
            Ok(ExpertMatrices {
                offset,
                stored: stored(format)?,
            })
        };
        let layer = |(gate, up, down)| Ok([place(gate)?, place(up)?, place(down)?]);
        let layers = layers.into_iter().map(layer);
        let layers = layers.collect::<Result<Vec<_>, ExceptionParts>>()?;
        let make = move |open: &Open| experts::ExpertLayers::new(open, shape, layers);
        Self::open(py, store, cache, make)
    }

    /// Creates the experts of published files: one layout for each layer, experts of a token, weights over all, and the
    /// numbers of the activation.
    #[staticmethod]
    #[pyo3(signature = (store, layouts, choices, over_all, limits, cache=None))]
    fn of_layouts(
        py: Python<'_>,
        store: &PyStore,
        layouts: Vec<Py<PyExpertLayout>>,
        choices: u32,
        over_all: bool,
        limits: ActivationNumbers,
        cache: Option<Cache>,
    ) -> PyResult<Self> {
        let of = ExpertUse {
            choices,
            over_all,
            activation: activation(limits)?,
        };
        let layouts = layouts.iter().map(|one| one.get().layout());
        let layouts = layouts.collect::<Result<Vec<_>, ExceptionParts>>()?;
        let make = move |_: &Open| experts::ExpertLayers::of_layouts(layouts, of);
        Self::open(py, store, cache, make)
    }

    /// Returns width, hidden, experts, choices, and the number of layers.
    fn shape(&self) -> PyResult<(u32, u32, u32, u32, u32)> {
        let opened = self.opened.get()?;
        let shape = opened.experts.shape();
        let layers = opened.experts.layers();
        Ok((
            shape.width,
            shape.hidden,
            shape.experts,
            shape.choices,
            layers,
        ))
    }

    /// Returns the bytes of a slot of the cache, slots, and bytes of memory of the GPU.
    fn sizes(&self) -> PyResult<(u64, u32, u64)> {
        let opened = self.opened.get()?;
        let cache = opened.by_gpu.as_ref();
        Ok((
            opened.experts.slot_bytes(),
            cache.map_or(0, GpuExperts::slots),
            cache.map_or(0, GpuExperts::memory_bytes),
        ))
    }

    /// Computes a layer's results, by threads of the host; added to `out` with `adds`.
    #[pyo3(signature = (layer, logits, x, out, adds, biases=None))]
    fn compute(
        &self,
        layer: u32,
        logits: Py<PyView>,
        x: Py<PyView>,
        out: Py<PyView>,
        adds: bool,
        biases: Option<(Py<PyView>, Py<PyView>, Py<PyView>)>,
    ) -> PyResult<PyOperation> {
        let opened = self.opened.get()?;
        let mut call = HostCall::default();
        let logits = call.input::<f32>(logits, "logits")?;
        let x = call.input::<f32>(x, "x")?;
        let out = call.output::<f32>(out, "out")?;
        let mut bias = |view| call.input::<f32>(view, "a bias");
        let biases = match biases {
            None => None,
            Some((gate, up, down)) => Some([bias(gate)?, bias(up)?, bias(down)?]),
        };
        call.start(move || {
            // SAFETY: inside of the call, once.
            let (logits, x, out) = unsafe { (logits.get(), x.get(), out.get()) };
            if out.len() != x.len() {
                let cause = format!("out has {} elements, x {}", out.len(), x.len());
                return Err(Error::usage(cause, "use as many"));
            }
            let biases = biases.map(|biases| {
                // SAFETY: as above.
                let [gate, up, down] = biases.map(|bias| unsafe { bias.get() });
                ExpertBiases { gate, up, down }
            });
            put(opened.experts.compute(layer, logits, x, biases), out, adds)
        })
    }

    /// Computes a layer's results for the experts of each token and their weights, as [`compute`](Self::compute) does.
    #[pyo3(signature = (layer, chosen, x, out, adds))]
    fn compute_chosen(
        &self,
        layer: u32,
        chosen: (Py<PyView>, Py<PyView>),
        x: Py<PyView>,
        out: Py<PyView>,
        adds: bool,
    ) -> PyResult<PyOperation> {
        let opened = self.opened.get()?;
        let mut call = HostCall::default();
        let numbers = call.input::<u32>(chosen.0, "experts")?;
        let weights = call.input::<f32>(chosen.1, "weights")?;
        let x = call.input::<f32>(x, "x")?;
        let out = call.output::<f32>(out, "out")?;
        call.start(move || {
            // SAFETY: inside of the call, once.
            let (numbers, weights) = unsafe { (numbers.get(), weights.get()) };
            // SAFETY: as above.
            let (x, out) = unsafe { (x.get(), out.get()) };
            let chosen = numbers.iter().zip(weights);
            let chosen = chosen.map(|(expert, weight)| ChosenExpert {
                expert: *expert,
                weight: *weight,
                ..ChosenExpert::default()
            });
            let chosen: Vec<ChosenExpert> = chosen.collect();
            let found = opened.experts.compute_chosen(layer, &chosen, x, None);
            put(found, out, adds)
        })
    }

    /// Puts a layer's step into `stream` of the store's GPU. The addresses of logits, vectors, results and probabilities,
    /// the last one 0 for none; of numbers and weights of chosen experts, in place of the logits, or zeros; and of the
    /// biases of gate, up and down.
    #[pyo3(signature = (shape, addresses, given, biases, adds, stream, buffers=None))]
    #[expect(clippy::too_many_arguments, reason = "Python calls it by position")]
    fn step_on_gpu(
        &self,
        py: Python<'_>,
        shape: (u32, u32),
        addresses: (u64, u64, u64, u64),
        given: Option<(u64, u64)>,
        biases: [u64; 3],
        adds: bool,
        stream: u64,
        buffers: Option<Py<PyAny>>,
    ) -> PyResult<GpuOperation> {
        self.flights.reap();
        self.flights.check()?;
        let opened = self.opened.get()?;
        let (logits, x, y, probabilities) = addresses;
        let step = ExpertStep {
            layer: shape.0,
            tokens: shape.1,
            logits,
            given: given.map(|(experts, weights)| GivenChoices { experts, weights }),
            x,
            y,
            adds,
            biases,
            probabilities,
        };
        let store = Arc::clone(&opened.store);
        let what = ("experts", step.tokens.into(), store.len());
        self.flights
            .launch(py, store, what, buffers, FailureReport::Table, || {
                let cache = opened.by_gpu.as_ref().ok_or_else(without_cache)?;
                // SAFETY: Python keeps the tensors in the order of the stream, or until the reads have ended.
                unsafe { cache.step(&step, stream) }
            })
    }

    /// Returns the counters of the cache.
    fn counts(&self, py: Python<'_>) -> PyResult<Counted> {
        let opened = self.opened.get()?;
        let counts = wait::of(py, move || {
            let cache = opened.by_gpu.as_ref().ok_or_else(without_cache)?;
            Ok(cache.counts()?)
        })?;
        Ok((counts.hits, counts.misses, counts.evictions, counts.chosen))
    }

    /// Waits for steps on the GPU that were launched before, and raises the first failure that was not raised yet.
    #[pyo3(signature = (timeout=None))]
    fn check(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        self.opened.get()?;
        self.flights.wait(py, timeout)
    }

    fn close(&self) {
        self.opened.close();
    }
}

impl PyExperts {
    /// Makes the experts on a thread that is not attached to Python, with their cache.
    fn open(
        py: Python<'_>,
        store: &PyStore,
        cache: Option<Cache>,
        make: impl FnOnce(&Open) -> nvme_host::Result<ExpertLayers> + Send + 'static,
    ) -> PyResult<Self> {
        let open = store.get()?;
        let options =
            |(bytes, name, pinned, tokens): Cache| -> Result<CacheOptions, ExceptionParts> {
                Ok(CacheOptions {
                    bytes,
                    policy: policy(&name)?,
                    pinned,
                    tokens,
                    limit: LIMIT,
                })
            };
        let options = cache.map(options).transpose()?;
        let opened = wait::of(py, move || {
            let experts = make(&open)?;
            let by_gpu = options.map(|options| GpuExperts::new(&experts, &options));
            Ok(Arc::new(OpenExperts {
                store: open,
                experts,
                by_gpu: by_gpu.transpose()?,
            }))
        })?;
        let flights = Arc::default();
        store.add_table(&flights);
        Ok(Self {
            opened: OnStore::new(store, "layers of experts", opened),
            flights,
        })
    }
}

/// Stores results, added to `out` with `adds`; NaN for those that were not computed. A refused call and one that would
/// have added leave `out` as it is, so that the call can be repeated.
fn put(found: nvme_host::Result<Vec<f32>>, out: &mut [f32], adds: bool) -> nvme_host::Result<()> {
    match &found {
        Ok(_) | Err(nvme_host::Error::Usage { .. }) => {}
        Err(_) if adds => {}
        Err(_) => out.fill(f32::NAN),
    }
    for (out, found) in out.iter_mut().zip(found?) {
        *out = if adds { *out } else { 0.0 } + found;
    }
    Ok(())
}

fn without_cache() -> Error {
    Error::usage(
        "the experts have no cache on a GPU",
        "open the store with gpu=0, and give cache_bytes",
    )
}
