//! Where the bytes of a file of tensors come from.

use crate::error::{Error, Result};
use crate::store::Store;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Why the header of a file cannot be used.
#[derive(Debug)]
pub(super) enum Fault {
    /// What is wrong with the file, as the end of a sentence that begins with its name.
    Format(String),
    /// The file or device was not read.
    Read(Error),
}

impl Fault {
    /// What is wrong with the file, put into other words by `with`; reads that failed stay as they are.
    pub fn map(self, with: impl FnOnce(String) -> String) -> Self {
        match self {
            Self::Format(text) => Self::Format(with(text)),
            Self::Read(error) => Self::Read(error),
        }
    }
}

impl From<&str> for Fault {
    fn from(text: &str) -> Self {
        Self::Format(text.to_owned())
    }
}

impl From<String> for Fault {
    fn from(text: String) -> Self {
        Self::Format(text)
    }
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
    /// Those of the file or device, which name it.
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
pub(super) struct FileSource {
    file: File,
    path: PathBuf,
    bytes: u64,
}

impl FileSource {
    pub fn open(path: &Path) -> Result<Self> {
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
pub(super) struct StoreSource<'a> {
    pub store: &'a Store,
    pub offset: u64,
}

impl Source for StoreSource<'_> {
    fn len(&self) -> u64 {
        self.store.len() - self.offset
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        let read = self.store.read_at(self.offset + offset, data);
        read.map_err(|error| error.with_context(&self.label()))
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
pub(super) fn read_head(
    source: &dyn Source,
    offset: u64,
    bytes: u64,
) -> std::result::Result<Vec<u8>, Fault> {
    let have = source.len();
    if offset.checked_add(bytes).is_none_or(|end| end > have) {
        return Err(format!(
            "it ends at byte {have}, inside of its header: {bytes} bytes from {offset} on"
        )
        .into());
    }
    let mut data = vec![0; bytes as usize];
    source.read_at(offset, &mut data).map_err(Fault::Read)?;
    Ok(data)
}
