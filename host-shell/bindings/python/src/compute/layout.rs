//! The experts of published files: where they lie, and their bytes.

use super::host::converted;
use crate::error::{ExceptionParts, OrRaise};
use crate::on_store::OnStore;
use crate::operation::PyOperation;
use crate::store::{Open, PyStore, fill};
use crate::view::PyView;
use crate::volume::{AnyFile, PyDriveFile};
use crate::wait;
use nvme_host::catalog::{HeaderSource, set_of};
use nvme_models::layout::{self, ExpertMatrix, ExpertRead, PlacedTensors, StoreRegion};
use pyo3::prelude::*;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// Matrix, role, tensor, dtype, shape, bytes, first byte in memory, and True for a single number.
type Part = (
    &'static str,
    &'static str,
    String,
    &'static str,
    Vec<u64>,
    u64,
    u64,
    bool,
);

/// First byte in the store, bytes, first byte in memory.
type Read = (u64, u64, u64);

/// Matrix, format, rows and columns, True if it is transposed, and if its rows are interleaved.
type Matrix = (&'static str, String, (u64, u64), bool, bool);

impl PlacedTensors for AnyFile {
    fn source(&self) -> &dyn HeaderSource {
        Self::source(self)
    }

    fn pieces(&self, offset: u64, bytes: u64) -> nvme_host::Result<Vec<Range<u64>>> {
        Self::pieces(self, offset, bytes)
    }
}

/// Returns the files of the index, or of the split GGUF, that `path` names; None for another file.
#[pyfunction]
pub fn files_of_set(py: Python<'_>, path: PathBuf) -> PyResult<Option<Vec<PathBuf>>> {
    let found = py.detach(|| set_of(&path)).or_raise()?;
    Ok(found.map(|files| files.into_iter().map(|(path, _)| path).collect()))
}

/// The experts in files of a store.
#[pyclass(frozen, module = "nvme_gpu._native", name = "ExpertFiles")]
pub struct PyExpertFiles(OnStore<Arc<layout::ExpertFiles>>);

#[pymethods]
impl PyExpertFiles {
    /// Of files that lie one after another in the store.
    #[staticmethod]
    fn in_store(
        py: Python<'_>,
        store: &PyStore,
        offset: u64,
        nbytes: Option<u64>,
    ) -> PyResult<Self> {
        let open = store.get()?;
        let found = wait::of(py, move || {
            Ok(Arc::new(layout::ExpertFiles::in_store(
                &open, offset, nbytes,
            )?))
        })?;
        Ok(Self(OnStore::new(store, "expert files", found)))
    }

    /// Of files with these names, first bytes, and bytes if they are known.
    #[staticmethod]
    fn of_regions(
        py: Python<'_>,
        store: &PyStore,
        regions: Vec<(String, u64, Option<u64>)>,
    ) -> PyResult<Self> {
        let open = store.get()?;
        let found = wait::of(py, move || {
            let files = regions.iter().map(|(name, offset, bytes)| {
                let region = StoreRegion::new(&open, name, *offset, *bytes)?;
                Ok(Arc::new(region) as Arc<dyn PlacedTensors>)
            });
            let files = files.collect::<nvme_host::Result<_>>()?;
            Ok(Arc::new(layout::ExpertFiles::of(&open, files)?))
        })?;
        Ok(Self(OnStore::new(store, "expert files", found)))
    }

    /// Of files of an ext4 on the store.
    #[staticmethod]
    fn of_drive(py: Python<'_>, store: &PyStore, files: Vec<Py<PyDriveFile>>) -> PyResult<Self> {
        let open = store.get()?;
        let files = files.iter().map(|file| file.get().get());
        let files = files.collect::<Result<Vec<_>, _>>()?;
        let found = wait::of(py, move || {
            let placed = files
                .iter()
                .map(|file| Arc::clone(file) as Arc<dyn PlacedTensors>);
            let found = layout::ExpertFiles::of(&open, placed.collect())?;
            for file in files {
                file.check_unchanged()?;
            }
            Ok(Arc::new(found))
        })?;
        Ok(Self(OnStore::new(store, "expert files", found)))
    }

    fn layers(&self) -> PyResult<Vec<u32>> {
        Ok(self.0.get()?.layers())
    }

    fn names(&self) -> PyResult<Vec<String>> {
        Ok(self.0.get()?.names().map(str::to_owned).collect())
    }

    /// Returns the experts of a layer.
    fn layer(&self, py: Python<'_>, store: &PyStore, layer: u32) -> PyResult<PyExpertLayout> {
        let files = self.0.get()?;
        PyExpertLayout::of(py, store, move || files.layer(layer))
    }

    /// Returns the experts under a name.
    fn named(&self, py: Python<'_>, store: &PyStore, name: String) -> PyResult<PyExpertLayout> {
        let files = self.0.get()?;
        PyExpertLayout::of(py, store, move || files.named(&name))
    }

    fn close(&self) {
        self.0.close();
    }
}

struct OpenLayout {
    store: Open,
    layout: layout::ExpertLayout,
}

/// The experts of a layer.
#[pyclass(frozen, module = "nvme_gpu._native", name = "ExpertLayout")]
pub struct PyExpertLayout(OnStore<Arc<OpenLayout>>);

impl PyExpertLayout {
    /// Returns the experts, for a cache of them.
    pub fn layout(&self) -> Result<layout::ExpertLayout, ExceptionParts> {
        Ok(self.0.get()?.layout.clone())
    }

    fn of(
        py: Python<'_>,
        store: &PyStore,
        find: impl FnOnce() -> nvme_host::Result<layout::ExpertLayout> + Send + 'static,
    ) -> PyResult<Self> {
        let open = store.get()?;
        let found = wait::of(py, move || {
            let layout = find()?;
            Ok(Arc::new(OpenLayout {
                store: open,
                layout,
            }))
        })?;
        Ok(Self(OnStore::new(store, "expert layout", found)))
    }
}

#[pymethods]
impl PyExpertLayout {
    /// Returns the name, the layer, the number of experts, width, hidden size, and the bytes of memory of the largest.
    fn about(&self) -> PyResult<(String, Option<u32>, usize, u64, u64, u64)> {
        let opened = self.0.get()?;
        let found = &opened.layout;
        Ok((
            found.name().to_owned(),
            found.layer(),
            found.experts().len(),
            found.width(),
            found.hidden(),
            found.memory_bytes(),
        ))
    }

    fn parts(&self, expert: u32) -> PyResult<Vec<Part>> {
        let opened = self.0.get()?;
        let parts = opened.layout.expert(expert).or_raise()?.parts().iter();
        let parts = parts.map(|part| {
            (
                part.matrix.name(),
                part.role.name(),
                part.tensor.clone(),
                part.dtype.name(),
                part.shape.clone(),
                part.bytes,
                part.at,
                part.is_scalar,
            )
        });
        Ok(parts.collect())
    }

    /// Returns the reads of an expert, those of scalars apart, and the bytes of memory that they fill.
    fn reads(&self, expert: u32) -> PyResult<(Vec<Read>, Vec<Read>, u64)> {
        let opened = self.0.get()?;
        let found = opened.layout.expert(expert).or_raise()?;
        let of = |reads: &[ExpertRead]| {
            let reads = reads.iter().map(|one| (one.offset, one.bytes, one.at));
            reads.collect()
        };
        Ok((
            of(found.reads()),
            of(found.scalar_reads()),
            found.memory_bytes(),
        ))
    }

    fn matrices(&self, expert: u32) -> PyResult<Vec<Matrix>> {
        let opened = self.0.get()?;
        let found = opened.layout.matrices(expert).or_raise()?.iter();
        let found = found.map(|one| {
            (
                one.matrix.name(),
                one.format.to_string(),
                (one.rows, one.columns),
                one.is_transposed,
                one.is_interleaved,
            )
        });
        Ok(found.collect())
    }

    /// Fills `view` with the bytes of an expert.
    fn read(&self, view: Py<PyView>, expert: u32) -> PyResult<PyOperation> {
        let opened = self.0.get()?;
        fill(view, move |data| {
            let found = opened.layout.expert(expert)?;
            found.read(&opened.store, data)
        })
    }

    /// Returns the rows and columns that `unpack` writes.
    fn unpacked_shape(&self, expert: u32, matrix: &str) -> PyResult<(u64, u64)> {
        let opened = self.0.get()?;
        let matrix = matrix_of(matrix)?;
        opened.layout.unpacked_shape(expert, matrix).or_raise()
    }

    /// Writes a matrix of an expert, whose bytes are `memory`, to `out` as float32.
    fn unpack(
        &self,
        memory: Py<PyView>,
        out: Py<PyView>,
        expert: u32,
        matrix: &str,
    ) -> PyResult<PyOperation> {
        let opened = self.0.get()?;
        let matrix = matrix_of(matrix)?;
        converted(memory, out, move |memory, out| {
            opened.layout.unpack(expert, matrix, memory, out)
        })
    }

    fn close(&self) {
        self.0.close();
    }
}

fn matrix_of(name: &str) -> Result<ExpertMatrix, ExceptionParts> {
    let all = [
        ExpertMatrix::Gate,
        ExpertMatrix::Up,
        ExpertMatrix::GateUp,
        ExpertMatrix::Down,
    ];
    all.into_iter()
        .find(|one| one.name() == name)
        .ok_or_else(|| {
            let cause = format!("the matrix is '{name}'");
            ExceptionParts::usage(cause, "use 'gate', 'up', 'gate_up' or 'down'")
        })
}
