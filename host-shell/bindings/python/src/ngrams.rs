//! Row ids of lookup tables, of tokens in GPU memory.
// UNSAFETY: launches over addresses of tensors.
#![allow(unsafe_code)]

use crate::error::{ExceptionParts, OrRaise};
use crate::lookup::PyNgramTables;
use crate::process::OfProcess;
use crate::wait;
use nvme_host::cuda::Gpu;
use nvme_lookup::{GpuNgramHash, StepTokens};
use pyo3::prelude::*;

/// The hashes of one table on one GPU. Launches are put into a stream of it, return before they run, and may be captured.
#[pyclass(frozen, module = "nvme_gpu._native", name = "GpuNgrams")]
pub struct PyGpuNgrams(OfProcess<GpuNgramHash>);

/// Address and number of the tokens, whether they are `int64`, and the number of sequences; addresses of their starts, of
/// the histories and of their numbers; the number of histories.
type TokenStep = ((u64, u64, bool, u32), (u64, u64, u64), u64);

fn step(
    ((tokens, count, is_wide, sequences), (starts, histories, slots), history_count): TokenStep,
) -> StepTokens {
    StepTokens {
        tokens,
        count,
        is_wide,
        sequences,
        starts,
        histories,
        history_count,
        slots,
    }
}

#[pymethods]
impl PyGpuNgrams {
    /// Loads the hashes of table `at`.
    #[new]
    fn new(py: Python<'_>, tables: &PyNgramTables, at: usize, gpu: u32) -> PyResult<Self> {
        let hash = tables.hash(at).clone();
        let load = move || -> Result<_, ExceptionParts> {
            Ok(GpuNgramHash::new(&Gpu::open(gpu)?, &hash)?)
        };
        Ok(Self(OfProcess::new("set of hashes", wait::of(py, load)?)))
    }

    /// Launches the hashing of tokens into ids at `out`.
    fn row_ids(&self, py: Python<'_>, tokens: TokenStep, out: u64, stream: u64) -> PyResult<()> {
        let hash = self.0.get()?;
        // SAFETY: Python keeps the tensors in the order of the stream.
        py.detach(|| unsafe { hash.row_ids(&step(tokens), out, stream) })
            .or_raise()
    }

    /// Launches the end of a step, whose first `accepted` tokens stay.
    fn commit(
        &self,
        py: Python<'_>,
        tokens: TokenStep,
        accepted: u64,
        stream: u64,
    ) -> PyResult<()> {
        let hash = self.0.get()?;
        // SAFETY: as for `row_ids`.
        py.detach(|| unsafe { hash.commit(&step(tokens), accepted, stream) })
            .or_raise()
    }
}
