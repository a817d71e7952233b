//! Layers of a model that are read ahead. Names, dtypes and arrays are Python's; here are places and reads.

use crate::error::{ExceptionParts, OrRaise};
use crate::process::OfProcess;
use crate::store::{AtClose, PyStore};
use crate::volume::{AnyFile, PyDriveFile};
use crate::wait;
use nvme_host::Manifest;
use nvme_host::catalog::{Dtype, TensorEntry};
use nvme_host::loader::{self, LayerOrder, LoaderOptions, ModelLayers, ResidentLayers};
use pyo3::prelude::*;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub type Open = Arc<loader::LayerLoader>;

/// Longer than any wait.
const FOR_EVER: Duration = Duration::from_secs(1 << 31);

/// A tensor: its name, where it begins, and its bytes.
type Place = (String, u64, u64);

/// Tensors of a layer: all with its number, those with its prefix, or a list.
#[derive(FromPyObject)]
enum LayerTensors {
    Prefixes(Vec<String>),
    Names(Vec<(String, Vec<String>)>),
}

/// Layers that stay resident: as many as fit into a number of bytes, or a list.
#[derive(FromPyObject)]
enum PinnedLayers {
    Bytes(u64),
    Layers(Vec<usize>),
}

/// Slots of memory, and reads ahead into them.
#[pyclass(frozen, module = "nvme_gpu._native", name = "LayerLoader")]
pub struct PyLayerLoader(OfProcess<Open>);

impl PyLayerLoader {
    /// # Errors
    /// In a process that did not make it.
    fn get(&self) -> Result<&Open, ExceptionParts> {
        self.0.get()
    }
}

/// Returns `layers` with the manifest at `path`. Their bytes are those of `file`, or of the store from byte
/// `begin` on.
fn verified(
    layers: ModelLayers,
    path: &Path,
    begin: u64,
    store: &nvme_host::Store,
    file: Option<&AnyFile>,
) -> nvme_host::Result<ModelLayers> {
    let manifest = Manifest::open(path)?;
    match file {
        Some(file) => manifest.check_begin(file.source())?,
        None => manifest.check_begin_in(store, begin)?,
    }
    layers.verified_by(&manifest, begin)
}

impl AtClose for loader::LayerLoader {
    fn close(&self, limit: Duration) {
        // Past the limit the loader keeps the store.
        let _ = self.close(limit);
    }
}

#[pymethods]
impl PyLayerLoader {
    /// Places of tensors are those in `file`, or without one in the store. A manifest is a path, and where its file
    /// begins among those places. `order` is None for one layer after the other;
    /// an empty one is learned.
    #[new]
    #[pyo3(signature = (store, tensors, file, which, slots, ahead, resident, order, on_gpu, manifest))]
    #[expect(clippy::too_many_arguments, reason = "options of Python")]
    fn new(
        py: Python<'_>,
        store: &PyStore,
        tensors: Vec<Place>,
        file: Option<&PyDriveFile>,
        which: Option<LayerTensors>,
        slots: usize,
        ahead: Option<usize>,
        resident: PinnedLayers,
        order: Option<Vec<usize>>,
        on_gpu: Option<bool>,
        manifest: Option<(PathBuf, u64)>,
    ) -> PyResult<Self> {
        let entries: Vec<TensorEntry> = tensors
            .into_iter()
            .map(|(name, offset, bytes)| TensorEntry {
                name,
                dtype: Dtype::U8,
                shape: vec![bytes],
                offset,
                bytes,
            })
            .collect();
        // A file may have many tensors: other threads of Python run meanwhile.
        let mut layers = wait::of(py, move || {
            Ok(match which {
                None => ModelLayers::numbered(&entries),
                Some(LayerTensors::Prefixes(prefixes)) => {
                    ModelLayers::by_prefix(&entries, &prefixes)
                }
                Some(LayerTensors::Names(names)) => ModelLayers::of_names(&entries, names),
            }?)
        })?;
        let opened = store.get()?;
        let file = file.map(PyDriveFile::get).transpose()?;
        if let Some((path, begin)) = manifest {
            let (store, file) = (Arc::clone(&opened), file.clone());
            layers = wait::of(py, move || {
                Ok(verified(layers, &path, begin, &store, file.as_deref())?)
            })?;
        }
        if let Some(file) = file {
            layers = wait::of(py, move || Ok(file.layers(layers)?))?;
        }
        let options = LoaderOptions {
            slots,
            ahead,
            resident: match resident {
                PinnedLayers::Bytes(bytes) => ResidentLayers::Bytes(bytes),
                PinnedLayers::Layers(layers) => ResidentLayers::Layers(layers),
            },
            order: match order {
                None => LayerOrder::Sequential,
                Some(pass) if pass.is_empty() => LayerOrder::Learned,
                Some(pass) => LayerOrder::Given(pass),
            },
            memory: match on_gpu {
                None => loader::LayerMemory::Auto,
                Some(true) => loader::LayerMemory::Gpu,
                Some(false) => loader::LayerMemory::Host,
            },
        };
        let made = wait::of(py, move || {
            let made = loader::LayerLoader::new(&opened, layers, &options)?;
            Ok(Arc::new(made))
        })?;
        let at_close: Arc<dyn AtClose> = made.clone();
        store.at_close(&at_close);
        Ok(Self(OfProcess::new("loader", made)))
    }

    /// Returns for each layer its name, its bytes in memory, and its tensors with their positions
    /// there.
    fn layers(&self) -> PyResult<Vec<(String, u64, Vec<Place>)>> {
        let loader = self.get()?;
        // Objects of Python, which are made under its lock: once for a loader, in time that grows with their number.
        let layers = loader.layers().iter().map(|layer| {
            let tensors = layer.tensors().iter();
            let tensors = tensors.map(|one| (one.name.clone(), one.at, one.bytes));
            (layer.name().to_owned(), layer.bytes(), tensors.collect())
        });
        Ok(layers.collect())
    }

    /// Returns the memory of the layers and the path of their data, as JSON.
    fn path(&self) -> PyResult<String> {
        Ok(serde_json::to_string(self.get()?.path()).unwrap_or_default())
    }

    /// Returns the counters, as JSON.
    fn stats(&self, py: Python<'_>) -> PyResult<String> {
        let loader = self.get()?;
        // Calls for layers hold the loader's lock.
        let stats = py.detach(|| loader.stats());
        Ok(serde_json::to_string(&stats).unwrap_or_default())
    }

    /// Returns layer `index` for use in `stream`. In host memory it waits for the layer, and Ctrl-C
    /// ends the wait.
    fn layer(&self, py: Python<'_>, index: usize, stream: u64) -> PyResult<PyLayer> {
        let loader = Arc::clone(self.get()?);
        let given = if loader.path().memory == "gpu" {
            let waiting = Arc::clone(&loader);
            wait::of(py, move || Ok(waiting.wait_for_room()?))?;
            // Streams of threads are those of the calling one.
            py.detach(|| loader.layer_for(index, stream)).or_raise()?
        } else {
            // A layer that comes after Ctrl-C goes back at once.
            wait::of(py, move || Ok(loader.layer(index)?))?
        };
        Ok(PyLayer {
            address: given.address(),
            bytes: given.plan().bytes(),
            is_on_gpu: given.is_on_gpu(),
            given: OfProcess::new("layer", Arc::new(given)),
        })
    }

    /// Waits for all layers that were given out, and raises the first error of them.
    #[pyo3(signature = (timeout=None))]
    fn check(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let limit = wait::seconds(timeout)?.unwrap_or(FOR_EVER);
        let loader = Arc::clone(self.get()?);
        wait::of(py, move || Ok(loader.check(limit)?))
    }

    /// Waits for reads under way, and drops the store.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Ok(loader) = self.get().map(Arc::clone) else {
            return Ok(());
        };
        wait::of(py, move || Ok(loader.close(FOR_EVER)?))
    }
}

/// A layer that was given out; its slot holds it until this goes.
#[pyclass(frozen, module = "nvme_gpu._native", name = "Layer")]
pub struct PyLayer {
    address: u64,
    bytes: u64,
    is_on_gpu: bool,
    given: OfProcess<Arc<loader::LoadedLayer>>,
}

#[pymethods]
impl PyLayer {
    #[getter]
    fn address(&self) -> u64 {
        self.address
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    #[getter]
    fn is_on_gpu(&self) -> bool {
        self.is_on_gpu
    }

    /// Waits until it is loaded, and raises the error if it is not.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let limit = wait::seconds(timeout)?.unwrap_or(FOR_EVER);
        let given = Arc::clone(self.given.get()?);
        wait::of(py, move || Ok(given.wait(limit)?))
    }
}
