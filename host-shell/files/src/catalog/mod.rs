//! The content of a file of tensors: names, types, shapes and offsets, from its header alone; and the import of the
//! file into a store.
//!
//! ```
//! use nvme_files::Catalog;
//! use nvme_store::{Store, StoreOptions};
//! use std::ops::ControlFlow;
//!
//! # fn main() -> nvme_driver::Result<()> {
//! # #[cfg(feature = "sim")] {
//! # let path = std::env::temp_dir().join(format!("nvme-gpu-doc-{}.npy", std::process::id()));
//! # let head = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }\n";
//! # let mut file = b"\x93NUMPY\x01\x00".to_vec();
//! # file.extend((head.len() as u16).to_le_bytes());
//! # file.extend(head.as_bytes());
//! # file.extend([1.0f32, 2.0, 3.0, 4.0].map(f32::to_le_bytes).as_flattened());
//! # std::fs::write(&path, file).unwrap();
//! let store = Store::open("sim:mem?size=16MiB", &StoreOptions::default())?;
//! let catalog = Catalog::import(&store, &path, 4096, true, &mut |_, _| ControlFlow::Continue(()))?;
//! let entry = &catalog.entries()[0];
//! assert_eq!((entry.dtype.name(), &entry.shape[..]), ("float32", &[2, 2][..]));
//! let mut row = [0; 8];
//! entry.table(&store)?.gather((&[1i64]).into(), &mut row, None)?.check()?;
//! assert_eq!(row[..4], 3.0f32.to_le_bytes());
//! # std::fs::remove_file(&path).unwrap();
//! # }
//! # Ok(())
//! # }
//! ```

mod dtype;
mod entry;
mod gguf;
mod import;
mod npy;
mod pairs;
mod safetensors;
mod shards;
mod source;
mod split;
mod tensors;
#[cfg(test)]
mod tests;
mod together;
mod value;

pub use dtype::Dtype;
pub use entry::{CatalogFile, TensorEntry};
pub use import::OnProgress;
pub use shards::set_of;
pub use source::HeaderSource;
pub(crate) use source::{FileSource, StoreSource};
pub use value::MetadataValue;

use nvme_driver::error::Result;
use serde::Serialize;
use source::{HeaderFault, read_head};
use tensors::TensorList;

/// Formats that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CatalogFormat {
    /// `.safetensors`.
    Safetensors,
    /// `.npy`: one array under the name of the file.
    Npy,
    /// `.gguf`, versions 2 and 3.
    Gguf,
}

/// The tensors of a file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Catalog {
    format: CatalogFormat,
    bytes: u64,
    metadata: Vec<(String, MetadataValue)>,
    files: Vec<CatalogFile>,
    entries: TensorList,
    begin: u64,
}

impl Catalog {
    /// Does the same as [`of`](Self::of), also of a part of a split GGUF.
    fn alone(source: &dyn HeaderSource) -> Result<Self> {
        Self::parse(source).map_err(|fault| fault.of(source))
    }

    fn parse(source: &dyn HeaderSource) -> std::result::Result<Self, HeaderFault> {
        let head = read_head(source, 0, source.len().min(16))?;
        let (format, parsed) = if gguf::is_likely(&head) {
            (CatalogFormat::Gguf, gguf::parse(source)?)
        } else if npy::is_likely(&head) {
            (CatalogFormat::Npy, npy::parse(source, &source.name())?)
        } else if is_json(&head) {
            return Err(HeaderFault::unknown(
                "it is a text of JSON, not a file of tensors".to_owned(),
                "name one of the files of the index; `import` and `catalog` take the index of a model, too",
            ));
        } else if safetensors::is_likely(&head) {
            (CatalogFormat::Safetensors, safetensors::parse(source)?)
        } else {
            return Err("it is of no known format".into());
        };
        let (needed, have) = (parsed.bytes, source.len());
        if needed > have {
            return Err(format!("its header describes {needed} bytes, and it has {have}").into());
        }
        if source.is_exact() && have > parsed.padded {
            return Err(HeaderFault::Longer {
                described: needed,
                bytes: have,
            });
        }
        Ok(Self {
            format,
            bytes: parsed.padded.min(have),
            files: Vec::new(),
            metadata: parsed.metadata,
            entries: parsed.entries.into(),
            begin: 0,
        })
    }

    /// Returns the format of the file.
    pub fn format(&self) -> CatalogFormat {
        self.format
    }

    /// Returns the number of bytes of the file including its header; for several files, including the gaps
    /// between them.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the header's metadata: texts for safetensors, typed values for GGUF.
    pub fn metadata(&self) -> &[(String, MetadataValue)] {
        &self.metadata
    }

    /// Returns the files of an index, in the order of their places; none for a single file.
    pub fn files(&self) -> &[CatalogFile] {
        &self.files
    }

    /// Returns the position of the file's byte 0, in the same count as the positions of the tensors.
    pub fn begin(&self) -> u64 {
        self.begin
    }

    /// Returns the tensors in the order of their data.
    pub fn entries(&self) -> &[TensorEntry] {
        self.entries.all()
    }

    /// Returns the tensor with this name.
    pub fn get(&self, name: &str) -> Option<&TensorEntry> {
        self.entries.get(name)
    }

    /// Returns the tensors whose names begin with `prefix`, in the order of their names.
    pub fn with_prefix(&self, prefix: &str) -> impl Iterator<Item = &TensorEntry> {
        self.entries.with_prefix(prefix)
    }

    /// Returns the same catalog with positions that are `offset` bytes larger.
    fn at(mut self, offset: u64) -> Self {
        self.entries.shift(offset);
        for file in &mut self.files {
            file.offset += offset;
        }
        self.begin += offset;
        self
    }
}

/// True if a file begins like a JSON object where a safetensors file has the length of its header.
fn is_json(head: &[u8]) -> bool {
    let is_text = |byte: &u8| byte.is_ascii_graphic() || byte.is_ascii_whitespace();
    head.starts_with(b"{") && head.len() > 8 && head.iter().take(8).all(is_text)
}

impl AsRef<[TensorEntry]> for Catalog {
    fn as_ref(&self) -> &[TensorEntry] {
        self.entries.all()
    }
}
