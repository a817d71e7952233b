//! Which rows make a batch.

use crate::error::OrRaise;
use nvme_host::loader::{self, ShuffleOrder};
use pyo3::exceptions::PyMemoryError;
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

    /// Returns the row numbers of a batch, as contiguous 64-bit integers. Raises MemoryError for more than memory holds.
    fn batch<'py>(&self, py: Python<'py>, epoch: u64, batch: u64) -> PyResult<Bound<'py, PyBytes>> {
        let count = self.0.batch_len(batch);
        let bytes = usize::try_from(count)
            .ok()
            .and_then(|count| count.checked_mul(size_of::<u64>()));
        let bytes = bytes.filter(|bytes| *bytes <= isize::MAX as usize);
        let too_many = || PyMemoryError::new_err(format!("a batch of {count} rows"));
        PyBytes::new_with(py, bytes.ok_or_else(too_many)?, |bytes| {
            py.detach(|| {
                let rows = self.0.batch_rows(epoch, batch);
                for (to, row) in bytes.as_chunks_mut().0.iter_mut().zip(rows) {
                    *to = row.to_le_bytes();
                }
            });
            Ok(())
        })
    }
}
