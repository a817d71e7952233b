//! The matrices and vectors of a job, on a drive or in a file, and the expected results of their products.

use super::{PAGE, PipelineJob, PipelineShape};
use nvme_compute::random_weights;
use nvme_compute_kernel::reference;
use nvme_host::{Error, Result, Store};
use nvme_units::SplitMix;
use rayon::prelude::*;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Generator of the contents of batches.
pub(super) struct MatrixData {
    pub store: Arc<Store>,
    pub shape: PipelineShape,
    seed: u64,
    /// The vectors with the values that the drive holds.
    pub x: Vec<f32>,
}

impl MatrixData {
    /// Writes matrices and vectors to the beginning of the store, unless it holds them.
    ///
    /// # Errors
    /// [`Error::Usage`] for a store that is too short; the errors of writes.
    pub fn new(store: &Arc<Store>, job: &PipelineJob) -> Result<Self> {
        let shape = job.shape;
        if shape.bytes() > store.len() {
            return Err(Error::usage(
                format!(
                    "{} matrices of {} bytes, and vectors, do not fit on a drive of {} bytes",
                    shape.parts,
                    shape.part_bytes(),
                    store.len()
                ),
                "use fewer or smaller ones",
            ));
        }
        let mut random = SplitMix::new(job.seed ^ 0x7665_6374);
        let count = u64::from(shape.vectors) * u64::from(shape.columns);
        let number = |_| random.below(1 << 24) as f32 / (1 << 23) as f32 - 1.0;
        let data = Self {
            store: Arc::clone(store),
            shape,
            seed: job.seed,
            x: (0..count).map(number).collect(),
        };
        if !job.keep {
            data.write(&mut |at, bytes| store.write_at(at, bytes))?;
            store.flush()?;
        }
        Ok(data)
    }

    /// Passes all bytes to `put`, with their offsets, in whole pages.
    fn write(&self, put: &mut dyn FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        let mut put_pages = |at: u64, mut bytes: Vec<u8>| {
            bytes.resize(bytes.len().next_multiple_of(PAGE as usize), 0);
            put(at, &bytes)
        };
        for part in 0..self.shape.parts {
            put_pages(self.at(part), self.part(part))?;
        }
        let vectors = self.x.iter().flat_map(|x| x.to_le_bytes()).collect();
        put_pages(self.shape.vectors_at(), vectors)
    }

    /// Returns the offset of a matrix on the drive.
    pub fn at(&self, part: u32) -> u64 {
        u64::from(part) * self.shape.part_stride()
    }

    /// Returns the bytes of a matrix, from its seed.
    pub fn part(&self, part: u32) -> Vec<u8> {
        let mut bytes = vec![0; self.shape.part_bytes() as usize];
        let seed = self.seed ^ u64::from(part + 1) << 32;
        random_weights::fill(self.shape.stored, seed, &mut bytes);
        bytes
    }

    /// Computes the products of a matrix with `x`, in `f64`: all rows for the first vector, then for the next.
    pub fn products(&self, part: u32, x: &[f64]) -> Vec<f64> {
        let (columns, bytes) = (self.shape.columns as usize, self.part(part));
        let rows: Vec<Vec<f64>> = bytes
            .par_chunks(self.shape.row_bytes() as usize)
            .map(|row| {
                let mut elements = vec![0.0; columns];
                reference::unpack(self.shape.stored, row, &mut elements);
                let dot = |x: &[f64]| elements.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
                x.chunks_exact(columns).map(dot).collect()
            })
            .collect();
        let vectors = x.len() / columns;
        let of = |vector: usize| rows.iter().map(move |row| row[vector]);
        (0..vectors).flat_map(of).collect()
    }

    /// Returns the vectors in `f64`.
    pub fn vectors(&self) -> Vec<f64> {
        self.x.iter().map(|x| f64::from(*x)).collect()
    }

    /// Computes the vectors after `times` products with all matrices, with the steps of
    /// [`feed_back`](super::engine::PipelineEngine::feed_back).
    pub fn iterated(&self, times: u64) -> Vec<f64> {
        let columns = self.shape.columns as usize;
        let mut x = self.vectors();
        for _ in 0..times {
            let parts: Vec<Vec<f64>> = (0..self.shape.parts)
                .map(|part| self.products(part, &x))
                .collect();
            let rows = self.shape.rows as usize;
            x = (0..x.len() / columns)
                .flat_map(|vector| {
                    let rows = parts
                        .iter()
                        .flat_map(|part| part[vector * rows..][..rows].iter().copied());
                    let y: Vec<f64> = rows.collect();
                    let mean = y.iter().map(|y| y * y).sum::<f64>() / y.len() as f64;
                    y.into_iter().map(move |y| y / mean.sqrt())
                })
                .collect();
        }
        x
    }

    /// Checks a product, or vectors, against `expected`; `what` is its name.
    ///
    /// # Errors
    /// [`Error::Mismatch`] with the first element that is off by more than `tolerance`.
    pub fn check(&self, what: &str, y: &[f32], expected: &[f64], tolerance: f64) -> Result<()> {
        let is_wrong = |y: f32, wanted: f64| {
            // NaN is wrong, too.
            let off = (f64::from(y) - wanted).abs();
            off.is_nan() || off > tolerance
        };
        let wrong = y
            .iter()
            .zip(expected)
            .position(|(y, wanted)| is_wrong(*y, *wanted));
        match wrong {
            None if y.len() == expected.len() => Ok(()),
            None => Err(Error::internal(format!("{what} has {} elements", y.len()))),
            Some(at) => Err(Error::Mismatch {
                what: format!("element {at} of {what} is {}, not {}", y[at], expected[at]),
            }),
        }
    }

    /// Returns the tolerance of an element: an `f32` sum in another order differs in rounding.
    pub fn tolerance(&self) -> f64 {
        1e-6 * f64::from(self.shape.columns)
    }

    /// Creates a file with the same bytes at `path`, which must not exist; it is removed on drop.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn file(&self, path: &Path) -> Result<Arc<TemporaryFile>> {
        let failed = |what: &'static str| Error::file(what, path);
        let mut options = File::options();
        let file = options.read(true).write(true).create_new(true).open(path);
        let made = TemporaryFile {
            file: file.map_err(failed("create"))?,
            path: path.to_owned(),
        };
        self.write(&mut |at, bytes| {
            let written = made.file.write_all_at(bytes, at);
            written.map_err(failed("write"))
        })?;
        Ok(Arc::new(made))
    }
}

/// A file that is removed at the end.
pub(super) struct TemporaryFile {
    pub file: File,
    path: PathBuf,
}

impl TemporaryFile {
    /// Reads `bytes` from `at` on.
    pub fn read(&self, at: u64, bytes: &mut [u8]) -> Result<()> {
        let read = self.file.read_exact_at(bytes, at);
        read.map_err(Error::file("read", &self.path))
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        // The file is of no use to anything else; if it cannot be removed, the user can see it.
        let _ = std::fs::remove_file(&self.path);
    }
}
