//! Which rows make a batch.

use crate::error::OrRaise;
use nvme_host::loader::{self, ShuffleOrder};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// The rows of each batch of each epoch.
#[pyclass(frozen, module = "nvme_gpu._native", name = "Sampler")]
pub struct PySampler(loader::BatchSampler);

#[pymethods]
impl PySampler {
    /// Creates a sampler; without `seed` rows keep their order.
    #[new]
    #[pyo3(signature = (rows, batch, seed, rank, world, drops_uneven, drops_last))]
    fn new(
        rows: u64,
        batch: u64,
        seed: Option<u64>,
        rank: u64,
        world: u64,
        drops_uneven: bool,
        drops_last: bool,
    ) -> PyResult<Self> {
        let shuffle = seed.map_or(ShuffleOrder::Off, ShuffleOrder::Seed);
        let sampler = loader::BatchSampler::new(rows, batch, shuffle).or_raise()?;
        let sampler = sampler.shard(rank, world, drops_uneven).or_raise()?;
        Ok(Self(match drops_last {
            true => sampler.without_short_batch(),
            false => sampler,
        }))
    }

    #[getter]
    fn batches(&self) -> u64 {
        self.0.batches()
    }

    /// Returns the row numbers of a batch, as contiguous 64-bit integers.
    fn batch<'py>(&self, py: Python<'py>, epoch: u64, batch: u64) -> Bound<'py, PyBytes> {
        let rows = self.0.batch(epoch, batch);
        let bytes: Vec<u8> = rows.into_iter().flat_map(u64::to_le_bytes).collect();
        PyBytes::new(py, &bytes)
    }
}
