//! What a file of tensors holds: names, types, shapes and places, from its header alone; and its way onto a store.
//!
//! ```
//! use nvme_host::{Catalog, Store, StoreOptions};
//! use std::ops::ControlFlow;
//!
//! # fn main() -> nvme_host::Result<()> {
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
mod import;
mod npy;
mod safetensors;
#[cfg(test)]
mod tests;

pub use dtype::Dtype;
pub use import::OnProgress;

use crate::error::{Error, Result};
use crate::store::{Store, Table};
use serde::Serialize;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// What is wrong with a file, as the end of a sentence that begins with its name.
type Fault = String;

/// Formats that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// `.safetensors`.
    Safetensors,
    /// `.npy`: one array under the name of the file.
    Npy,
}

/// A tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Entry {
    /// Its name in the file.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Lengths, the slowest first; none for a single number.
    pub shape: Vec<u64>,
    /// First byte in the file, or in the store.
    pub offset: u64,
    /// Its bytes, in the order of C.
    pub bytes: u64,
}

impl Entry {
    fn new(
        name: String,
        dtype: Dtype,
        shape: Vec<u64>,
        offset: u64,
        bytes: u64,
    ) -> std::result::Result<Self, Fault> {
        let elements = shape
            .iter()
            .try_fold(1u64, |all, one| all.checked_mul(*one));
        let needed = elements.and_then(|elements| dtype.bytes(elements));
        if needed != Some(bytes) || offset.checked_add(bytes).is_none() {
            return Err(format!(
                "{name:?} of {} and the shape {shape:?} has {bytes} bytes at byte {offset}",
                dtype.name()
            ));
        }
        Ok(Self {
            name,
            dtype,
            shape,
            offset,
            bytes,
        })
    }

    /// Its rows in `store`, each all lengths but the first.
    ///
    /// # Errors
    /// [`Error::Usage`] for a single number, for rows that are empty or end inside a byte, and for what does not lie
    /// in the store.
    pub fn table(&self, store: &Store) -> Result<Table> {
        let rows = self.shape.first().copied().unwrap_or(0);
        let row_bytes = match rows {
            0 => None,
            rows => self.bytes.is_multiple_of(rows).then(|| self.bytes / rows),
        };
        let Some(row_bytes) = row_bytes else {
            let cause = format!("'{}' of the shape {:?} has no rows", self.name, self.shape);
            return Err(Error::usage(cause, "read its bytes"));
        };
        store.table(self.offset, rows, row_bytes)
    }
}

/// The tensors of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Catalog {
    format: Format,
    bytes: u64,
    metadata: Vec<(String, String)>,
    entries: Vec<Entry>,
}

/// What a format's reader finds.
struct Parsed {
    entries: Vec<Entry>,
    metadata: Vec<(String, String)>,
    /// Header and data.
    bytes: u64,
}

/// Bytes that may hold a file.
pub trait Source {
    /// How many there are.
    fn len(&self) -> u64;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads `data.len()` bytes from byte `offset` on.
    ///
    /// # Errors
    /// Those of the file or device.
    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<()>;

    /// Whether the file ends where the source does.
    fn is_exact(&self) -> bool {
        true
    }

    /// What an array without a name of its own is called.
    fn name(&self) -> String;

    /// What messages call it.
    fn label(&self) -> String {
        self.name()
    }
}

/// A file that is open.
struct FileSource {
    file: File,
    path: PathBuf,
    bytes: u64,
}

impl FileSource {
    fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::file("open", path))?;
        let about = file.metadata().map_err(Error::file("look at", path))?;
        if !about.is_file() {
            let cause = format!("{} is no file", path.display());
            return Err(Error::usage(cause, "name a file of tensors"));
        }
        Ok(Self {
            file,
            path: path.to_owned(),
            bytes: about.len(),
        })
    }
}

impl Source for FileSource {
    fn len(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        let read = self.file.read_exact_at(data, offset);
        read.map_err(Error::file("read", &self.path))
    }

    fn name(&self) -> String {
        let stem = self.path.file_stem().unwrap_or_default();
        stem.to_string_lossy().into_owned()
    }

    fn label(&self) -> String {
        self.path.display().to_string()
    }
}

/// A store from a byte on.
struct StoreSource<'a> {
    store: &'a Store,
    offset: u64,
}

impl Source for StoreSource<'_> {
    fn len(&self) -> u64 {
        self.store.len() - self.offset
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        self.store.read_at(self.offset + offset, data)
    }

    fn is_exact(&self) -> bool {
        false
    }

    fn name(&self) -> String {
        "array".to_owned()
    }

    fn label(&self) -> String {
        format!("what lies at byte {} of the store", self.offset)
    }
}

impl Source for &[u8] {
    fn len(&self) -> u64 {
        <[u8]>::len(self) as u64
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        let begin = usize::try_from(offset).ok();
        let from = begin.and_then(|begin| self.get(begin..begin.checked_add(data.len())?));
        let from = from.ok_or_else(|| Error::internal("a read past the end"))?;
        data.copy_from_slice(from);
        Ok(())
    }

    fn name(&self) -> String {
        "array".to_owned()
    }
}

/// `bytes` bytes of a header.
fn read_head(source: &dyn Source, offset: u64, bytes: u64) -> std::result::Result<Vec<u8>, Fault> {
    let have = source.len();
    if offset.checked_add(bytes).is_none_or(|end| end > have) {
        return Err(format!(
            "it ends at byte {have}, inside of its header: {bytes} bytes from {offset} on"
        ));
    }
    let mut data = vec![0; bytes as usize];
    let read = source.read_at(offset, &mut data);
    read.map_err(|error| error.to_string())?;
    Ok(data)
}

impl Catalog {
    /// The tensors of the file at `path`, at their places in the file.
    ///
    /// # Errors
    /// [`Error::File`], and [`Error::Usage`] for what is no file of a known format or is not complete.
    pub fn of_file(path: &Path) -> Result<Self> {
        Self::of(&FileSource::open(path)?)
    }

    /// The tensors of a file that lies in `store` from byte `offset` on, at their places in the store.
    ///
    /// # Errors
    /// As [`of_file`](Self::of_file).
    pub fn of_store(store: &Store, offset: u64) -> Result<Self> {
        if offset > store.len() {
            let cause = format!("byte {offset} of a store of {} bytes", store.len());
            return Err(Error::usage(cause, "use a byte of the store"));
        }
        Ok(Self::of(&StoreSource { store, offset })?.at(offset))
    }

    /// The tensors of a file whose bytes are `source`.
    ///
    /// # Errors
    /// As [`of_file`](Self::of_file).
    pub fn of(source: &dyn Source) -> Result<Self> {
        Self::parse(source).map_err(|fault| {
            let cause = format!("{}: {fault}", source.label());
            let remedy = "check that the file is complete and of the format safetensors or .npy";
            Error::usage(cause, remedy)
        })
    }

    fn parse(source: &dyn Source) -> std::result::Result<Self, Fault> {
        let head = read_head(source, 0, source.len().min(16))?;
        let (format, parsed) = if npy::is_likely(&head) {
            (Format::Npy, npy::parse(source, &source.name())?)
        } else if safetensors::is_likely(&head) {
            (Format::Safetensors, safetensors::parse(source)?)
        } else {
            return Err("it is of no known format".to_owned());
        };
        let (needed, have) = (parsed.bytes, source.len());
        if needed > have || source.is_exact() && needed != have {
            return Err(format!("its header describes {needed} bytes of {have}"));
        }
        Ok(Self {
            format,
            bytes: needed,
            metadata: parsed.metadata,
            entries: parsed.entries,
        })
    }

    /// Of which format the file is.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Bytes of the file, its header with it.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Pairs of texts that the header has beside the tensors.
    pub fn metadata(&self) -> &[(String, String)] {
        &self.metadata
    }

    /// The tensors in the order of their data.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The tensor with this name.
    pub fn get(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name == name)
    }

    /// The same file, `offset` bytes further on.
    fn at(mut self, offset: u64) -> Self {
        for entry in &mut self.entries {
            entry.offset += offset;
        }
        self
    }
}
