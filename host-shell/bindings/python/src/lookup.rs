//! Row ids of lookup tables, by hashes of tokens.
// UNSAFETY: tokens and row ids are memory of views.
#![allow(unsafe_code)]

use crate::error::ExceptionParts;
use crate::view::{MemoryPiece, PyView};
use crate::wait;
use nvme_lookup::{LookupError, NgramHash, NgramTables, engram, ple};
use pyo3::prelude::*;

/// The hashes of a model's tables.
#[pyclass(frozen, module = "nvme_gpu._native", name = "NgramTables")]
pub struct PyNgramTables(NgramTables);

fn refused(error: &LookupError) -> ExceptionParts {
    ExceptionParts::usage(
        error.to_string(),
        "use the files of one model, as it was published",
    )
}

impl PyNgramTables {
    /// Returns the hashes of table `at`.
    pub fn hash(&self, at: usize) -> &NgramHash {
        &self.0.hashes()[at]
    }
}

#[pymethods]
impl PyNgramTables {
    /// Of the texts of a config.json and a tokenizer.json.
    #[staticmethod]
    fn engram(py: Python<'_>, config: String, tokenizer: Vec<u8>) -> PyResult<Self> {
        let made = wait::of(py, move || {
            engram::classes_of(&tokenizer)
                .and_then(|classes| engram::tables(&config, classes))
                .map_err(|error| refused(&error))
        })?;
        Ok(Self(made))
    }

    /// Of the text of a config.json.
    #[staticmethod]
    fn qwen_ple(config: &str) -> PyResult<Self> {
        Ok(Self(ple::tables(config).map_err(|error| refused(&error))?))
    }

    #[getter]
    fn layers(&self) -> Vec<u64> {
        self.0.layers().to_vec()
    }

    #[getter]
    fn columns(&self) -> u64 {
        self.0.columns()
    }

    /// Rows, hashes of a token, tokens of the longest n-gram before its last one, and the padding token of table `at`.
    fn about(&self, at: usize) -> (u64, usize, usize, i64) {
        let hash = &self.0.hashes()[at];
        let before = hash.multipliers().len() - 1;
        (hash.rows(), hash.heads().len(), before, hash.padding())
    }

    /// Writes the row ids of `tokens` behind the tokens `before` to `out`, int64 all, by table `at`.
    fn row_ids(
        &self,
        py: Python<'_>,
        at: usize,
        before: &PyView,
        tokens: &PyView,
        out: &PyView,
    ) -> PyResult<()> {
        let before = before.of_host("before", false)?;
        let tokens = tokens.of_host("tokens", false)?;
        let out = out.of_host("out", true)?;
        let hash = &self.0.hashes()[at];
        py.detach(|| {
            // SAFETY: the views are kept until this returns.
            let (before, tokens) = unsafe { (numbers(before), numbers(tokens)) };
            let mut rows = vec![0; tokens.len().saturating_mul(hash.heads().len())];
            let mut history = hash.begin();
            hash.check(&before)
                .and_then(|()| {
                    history.commit(&before);
                    hash.row_ids(&history, &tokens, &mut rows)
                })
                .map_err(|error| {
                    ExceptionParts::usage(error.to_string(), "use tokens of the model")
                })?;
            // SAFETY: as above.
            let places = unsafe { out.slice_mut() }.as_chunks_mut().0;
            if places.len() != rows.len() {
                let cause = format!("out has {} places for {} row ids", places.len(), rows.len());
                return Err(ExceptionParts::usage(cause, "use a place for each"));
            }
            for (place, row) in places.iter_mut().zip(rows) {
                *place = row.to_ne_bytes();
            }
            Ok(())
        })?;
        Ok(())
    }
}

/// # Safety
/// As [`MemoryPiece::slice`].
unsafe fn numbers(memory: MemoryPiece) -> Vec<i64> {
    // SAFETY: the caller's.
    let (words, _) = unsafe { memory.slice() }.as_chunks();
    words.iter().map(|word| i64::from_ne_bytes(*word)).collect()
}
