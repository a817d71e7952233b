//! The Python extension module `nvme_gpu._native`. Users call the package `nvme_gpu` in `python/`; this module
//! has the parts that need addresses, threads and the library.
//!
//! Here belongs what Python alone needs: memory of its objects, threads that wait without the interpreter,
//! exceptions. What reads a drive is in the library.
//!
//! - `view`: memory of the caller, kept alive; `array`: memory of ours.
//! - `store`, `table`: bytes and rows; `operation`, `flight`: transfers by threads and by a GPU; `left`: those whose
//!   buffers are kept because their owner went away before they ended.
//! - `on_store`: objects that keep a store open; `search`: indexes of vectors; `lookup` and `ngrams`: row ids by
//!   hashes of tokens.
//! - `pages`: pages of keys and values by key.
//! - `volume`: files of an ext4 on a store; `catalog`: files of tensors; `loader`: their layers, read ahead; `sampler`:
//!   rows of batches.
//! - `compute`: kernels over GPU or host memory, and over data on a store.
//! - `process`: calls that a child of `fork` refuses; `pool`: threads that wait in place of the caller; `wait`:
//!   waits that Ctrl-C ends.
//! - `log`: events of the library for `logging`.
//! - `dlpack`, `error`: tensors and exceptions.

mod array;
mod begun;
mod catalog;
mod compute;
mod dlpack;
mod dtypes;
mod error;
mod flight;
mod fork;
mod left;
mod loader;
mod log;
mod lookup;
mod ngrams;
mod on_store;
mod operation;
mod pages;
mod pool;
mod process;
mod sampler;
mod search;
mod store;
mod table;
mod view;
mod volume;
mod wait;

use error::ExceptionParts;
use pyo3::prelude::*;

/// Returns the findings of `nvme-gpu doctor` on this machine, as JSON.
#[pyfunction]
fn doctor(py: Python<'_>) -> PyResult<String> {
    let report = wait::of(py, || Ok(nvme_host::doctor::examine_here()))?;
    let text = serde_json::to_string(&report);
    text.map_err(|error| ExceptionParts::usage(error.to_string(), "report it").into())
}

/// Returns the name of GPU `index`, or why there is none.
#[pyfunction]
fn gpu(py: Python<'_>, index: u32) -> PyResult<String> {
    let gpu = wait::of(py, move || Ok(nvme_host::cuda::Gpu::open(index)?))?;
    Ok(gpu.describe())
}

/// Returns the number of calls of this process that have not ended.
#[pyfunction]
fn calls_under_way() -> usize {
    pool::under_way()
}

/// Defines the extension module.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<view::PyView>()?;
    module.add_class::<array::PyArray>()?;
    module.add_class::<catalog::PyImport>()?;
    module.add_class::<store::PyStore>()?;
    module.add_class::<table::PyTable>()?;
    module.add_class::<volume::PyVolume>()?;
    module.add_class::<volume::PyDriveFile>()?;
    module.add_class::<loader::PyLayerLoader>()?;
    module.add_class::<loader::PyLayer>()?;
    module.add_class::<sampler::PySampler>()?;
    module.add_class::<search::SearchIndex>()?;
    module.add_class::<lookup::PyNgramTables>()?;
    module.add_class::<ngrams::PyGpuNgrams>()?;
    compute::add(module)?;
    module.add_class::<operation::PyOperation>()?;
    module.add_class::<flight::GpuOperation>()?;
    module.add_class::<begun::BegunRead>()?;
    module.add_class::<pages::PyPageStore>()?;
    module.add_class::<pages::PyPageOutcomes>()?;
    module.add_class::<pages::PyPagePins>()?;
    module.add_function(wrap_pyfunction!(doctor, module)?)?;
    module.add_function(wrap_pyfunction!(gpu, module)?)?;
    module.add_function(wrap_pyfunction!(calls_under_way, module)?)?;
    module.add_function(wrap_pyfunction!(log::queue_events, module)?)?;
    module.add_function(wrap_pyfunction!(log::next_event, module)?)?;
    module.add_function(wrap_pyfunction!(left::kept_buffers, module)?)?;
    module.add_function(wrap_pyfunction!(search::build_index, module)?)?;
    module.add_function(wrap_pyfunction!(volume::location, module)?)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}
