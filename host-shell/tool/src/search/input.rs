//! Vectors and queries of a file.

use clap::Args;
use nvme_host::{Error, Result};
use nvme_search::{ElementType, RawVectors, VectorFile};
use std::path::PathBuf;

/// A file of vectors, and the type of its elements where it does not say it.
#[derive(Args)]
pub struct InputArgs {
    /// Vectors: .npy or .safetensors with one array (vectors, elements); .fbin, .f16bin, .bf16bin, .i8bin or .u8bin of
    /// DiskANN; with --element, elements alone
    #[arg(long, value_name = "FILE", group = "by_input")]
    input: Option<PathBuf>,
    /// Type of a file of elements alone: f32, f16, bf16, i8, u8
    #[arg(long, value_name = "TYPE", requires = "by_input", value_parser = element)]
    element: Option<ElementType>,
}

impl InputArgs {
    /// Opens the file, if one is named. `elements` are those of a vector, where they are known.
    ///
    /// # Errors
    /// [`Error::Usage`] for a file of bare elements without the length of a vector, and for vectors of another length;
    /// the errors of [`VectorFile::open`].
    pub fn open(&self, elements: Option<u32>) -> Result<Option<VectorFile>> {
        let Some(path) = &self.input else {
            return Ok(None);
        };
        let raw = match (self.element, elements) {
            (None, _) => None,
            (Some(element), Some(elements)) => Some(RawVectors { element, elements }),
            (Some(_), None) => {
                return Err(Error::usage(
                    format!(
                        "{} does not say how many elements a vector has",
                        path.display()
                    ),
                    "name it: --dim N",
                ));
            }
        };
        let file = VectorFile::open(path, raw)?;
        match elements {
            Some(elements) if elements != file.elements() => Err(Error::usage(
                format!(
                    "the vectors in {} have {} elements, not {elements}",
                    path.display(),
                    file.elements()
                ),
                "use a file of vectors of the same number of elements",
            )),
            _ => Ok(Some(file)),
        }
    }
}

fn element(text: &str) -> std::result::Result<ElementType, String> {
    let mut all = ElementType::ALL.into_iter();
    let found = all.find(|one| one.name() == text);
    found.ok_or_else(|| format!("no type is called '{text}'; there are f32, f16, bf16, i8, u8"))
}
