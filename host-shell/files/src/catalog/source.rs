//! Sources of the bytes of a file of tensors: a file or a store.

use crate::files::open_regular;
use nvme_driver::error::{Error, Result};
use nvme_store::Store;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Reason why the header of a file cannot be used.
#[derive(Debug)]
pub(super) enum HeaderFault {
    /// Fault of the file, as the end of a sentence that begins with its name.
    Format(String),
    /// The file is intact but cannot be read: the reason, as the end of a sentence with the file's name, and the
    /// remedy.
    Refused(String, String),
    /// The file has more bytes than the header describes.
    Longer {
        /// Bytes that the header describes.
        described: u64,
        /// Bytes of the file.
        bytes: u64,
    },
    /// The file or device was not read.
    Read(Error),
}

impl HeaderFault {
    /// Creates the fault of an intact file that uses a feature unknown here.
    pub fn unknown(what: String, remedy: &str) -> Self {
        Self::Refused(what, remedy.to_owned())
    }

    /// Changes the text of the fault by `with`; errors of reads are unchanged.
    pub fn map(self, with: impl FnOnce(String) -> String) -> Self {
        match self {
            Self::Format(text) => Self::Format(with(text)),
            Self::Refused(text, remedy) => Self::Refused(with(text), remedy),
            other => other,
        }
    }

    /// Returns the error about `source`.
    pub fn of(self, source: &dyn HeaderSource) -> Error {
        let label = source.label();
        match self {
            Self::Format(what) => Error::usage(
                format!("{label}: {what}"),
                "check that the file is complete and of the format safetensors, GGUF or .npy",
            ),
            Self::Refused(what, remedy) => Error::usage(format!("{label}: {what}"), remedy),
            Self::Longer { described, bytes } => Error::usage(
                format!("{label}: its header describes {described} bytes, and it has {bytes}"),
                source.remedy_of_longer(),
            ),
            Self::Read(error) => error,
        }
    }
}

impl From<&str> for HeaderFault {
    fn from(text: &str) -> Self {
        Self::Format(text.to_owned())
    }
}

impl From<String> for HeaderFault {
    fn from(text: String) -> Self {
        Self::Format(text)
    }
}

/// Remedy for a file with more bytes than its header describes.
const APPENDED: &str =
    "get the file again: its header is another file's, or something was appended";

/// Bytes that may hold a file.
pub trait HeaderSource {
    /// Returns the length of the source in bytes.
    fn len(&self) -> u64;

    /// True if the source has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads `data.len()` bytes from byte `offset` on.
    ///
    /// # Errors
    /// The errors of the file or device, which name it.
    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<()>;

    /// True if the file ends where the source does: bytes after those that its header describes are an error then.
    fn is_exact(&self) -> bool {
        true
    }

    /// Returns the remedy for a file with more bytes than its header describes.
    fn remedy_of_longer(&self) -> &'static str {
        APPENDED
    }

    /// Returns the name of an array in a format that stores none.
    fn name(&self) -> String;

    /// Returns the name of the source for messages.
    fn label(&self) -> String {
        self.name()
    }
}

/// A file that is open.
pub(crate) struct FileSource {
    file: File,
    path: PathBuf,
    bytes: u64,
}

impl FileSource {
    pub fn open(path: &Path) -> Result<Self> {
        let (file, about) = open_regular(path)?;
        Ok(Self {
            file,
            path: path.to_owned(),
            bytes: about.len(),
        })
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl HeaderSource for FileSource {
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

/// A range of a store.
pub(crate) struct StoreSource<'a> {
    store: &'a Store,
    offset: u64,
    bytes: u64,
    /// True if the file is known to end with the range.
    is_exact: bool,
}

impl<'a> StoreSource<'a> {
    /// Returns the source of all bytes from byte `offset` on. A regular file has no bytes but those of the file of
    /// tensors; on a drive only the header tells the file's length.
    ///
    /// # Errors
    /// [`Error::Usage`] for a byte past the store.
    pub fn from(store: &'a Store, offset: u64) -> Result<Self> {
        let bytes = store.len().checked_sub(offset).ok_or_else(|| {
            let cause = format!(
                "byte {offset} lies past the store, which has {} bytes",
                store.len()
            );
            Error::usage(cause, "use a byte of the store")
        })?;
        Ok(Self {
            store,
            offset,
            bytes,
            is_exact: store.is_regular_file(),
        })
    }

    /// Returns the `bytes` bytes from byte `offset` on, which are a file.
    ///
    /// # Errors
    /// [`Error::Usage`] for a range past the store.
    pub fn whole(store: &'a Store, offset: u64, bytes: u64) -> Result<Self> {
        let all = Self::from(store, offset)?;
        if bytes > all.bytes {
            let cause = format!(
                "{bytes} bytes from byte {offset} on end past the store, which has {} bytes",
                store.len()
            );
            return Err(Error::usage(cause, "give the size of the file"));
        }
        Ok(Self {
            bytes,
            is_exact: true,
            ..all
        })
    }

    /// Returns the same source, whose file may end before the range does.
    pub fn at_most(&self) -> Self {
        Self {
            is_exact: false,
            ..*self
        }
    }

    /// Returns the range without its first `offset` bytes.
    pub fn after(&self, offset: u64) -> Option<Self> {
        Some(Self {
            offset: self.offset.checked_add(offset)?,
            bytes: self.bytes.checked_sub(offset)?,
            ..*self
        })
    }
}

impl HeaderSource for StoreSource<'_> {
    fn len(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        let read = self.store.read_at(self.offset + offset, data);
        read.map_err(|error| error.with_context(&self.label()))
    }

    fn is_exact(&self) -> bool {
        self.is_exact
    }

    fn remedy_of_longer(&self) -> &'static str {
        match self.store.is_regular_file() && self.offset == 0 {
            true => APPENDED,
            false => {
                "give the size of the file if others follow it in the store; else get the file again"
            }
        }
    }

    fn name(&self) -> String {
        "array".to_owned()
    }

    fn label(&self) -> String {
        let path = self.store.path();
        match (path.device.strip_prefix("file:"), self.offset) {
            (Some(file), 0) => file.to_owned(),
            (Some(file), offset) => format!("what lies at byte {offset} of {file}"),
            (None, offset) => format!("what lies at byte {offset} of the store"),
        }
    }
}

impl HeaderSource for &[u8] {
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

/// Returns `bytes` bytes of a header.
pub(super) fn read_head(
    source: &dyn HeaderSource,
    offset: u64,
    bytes: u64,
) -> std::result::Result<Vec<u8>, HeaderFault> {
    let have = source.len();
    if offset.checked_add(bytes).is_none_or(|end| end > have) {
        return Err(format!(
            "it ends at byte {have}, inside of its header: {bytes} bytes from {offset} on"
        )
        .into());
    }
    let mut data = vec![0; bytes as usize];
    source
        .read_at(offset, &mut data)
        .map_err(HeaderFault::Read)?;
    Ok(data)
}
