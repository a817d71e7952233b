//! An ext4 on a store, and its files. A file may lie in many extents; a tensor that lies in one can be a table
//! without a copy.

use super::found;
use super::part::StoreRange;
use super::pieces;
use crate::catalog::{Catalog, HeaderSource, TensorEntry};
use crate::loader::ModelLayers;
use nvme_driver::error::{Error, Result};
use nvme_ext4::{DirEntry, Ext4, FileData, FileExtent, FileInode, VolumeInfo};
use nvme_store::{Store, Table};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// The ext4 of a store or of one of its partitions. It is only read; nothing else may change it meanwhile.
///
/// Copies are handles of the same one. Paths begin at the root of the file system and are bytes, as its names are.
#[derive(Clone, Debug)]
pub struct Ext4Volume {
    inner: Arc<VolumeInner>,
}

#[derive(Debug)]
struct VolumeInner {
    ext4: Ext4<StoreRange>,
    damage: Option<String>,
}

/// A file on a [`Ext4Volume`].
#[derive(Debug)]
pub struct DriveFile {
    volume: Ext4Volume,
    file: FileData,
    /// `None` for a small file whose data lie in its inode.
    extents: Option<Vec<FileExtent>>,
    path: String,
}

impl Ext4Volume {
    /// Opens the ext4 on all of `store`, or on its partition `part`.
    ///
    /// # Errors
    /// [`Error::Device`] for something other than an ext4, for one with unsupported features, and for a damaged one;
    /// the errors of [`StoreRange::partition`] and of the store.
    pub fn open(store: &Arc<Store>, part: Option<u32>) -> Result<Self> {
        let (part, damage) = match part {
            None => (StoreRange::whole(store), None),
            Some(number) => StoreRange::partition(store, number)?,
        };
        let ext4 = Ext4::open(part.clone()).map_err(|error| match error {
            nvme_ext4::Ext4Error::NotExt4 { .. } => not_ext4(error, &part),
            error => of_ext4(error, "/"),
        })?;
        Ok(Self {
            inner: Arc::new(VolumeInner { ext4, damage }),
        })
    }

    /// Returns the file system's superblock facts.
    pub fn info(&self) -> &VolumeInfo {
        self.inner.ext4.info()
    }

    /// Returns the store.
    pub fn store(&self) -> &Arc<Store> {
        self.inner.ext4.source().store()
    }

    /// Returns the fault of the partition table at the start of the drive, if the backup at its end was used.
    pub fn damage(&self) -> Option<&str> {
        self.inner.damage.as_deref()
    }

    /// Returns the inode that `path` names. Links are followed.
    ///
    /// # Errors
    /// [`Error::File`] if there is no such file; [`Error::Usage`] for a path through something other than a directory,
    /// for endless links and for encrypted directories; [`Error::Device`] for a damaged file system.
    pub fn stat(&self, path: impl AsRef<[u8]>) -> Result<FileInode> {
        let path = path.as_ref();
        let found = self.inner.ext4.lookup(path);
        found.map_err(|error| of_ext4(error, &text(path)))
    }

    /// Does the same as [`stat`](Self::stat), of a link itself.
    ///
    /// # Errors
    /// As [`stat`](Self::stat).
    pub fn stat_link(&self, path: impl AsRef<[u8]>) -> Result<FileInode> {
        let path = path.as_ref();
        let found = self.inner.ext4.lookup_link(path);
        found.map_err(|error| of_ext4(error, &text(path)))
    }

    /// Returns the target of the link at `path`.
    ///
    /// # Errors
    /// As [`stat`](Self::stat); [`Error::Usage`] for what is no link.
    pub fn read_link(&self, path: impl AsRef<[u8]>) -> Result<Vec<u8>> {
        let link = self.stat_link(&path)?;
        self.read_link_of(&link, &text(path.as_ref()))
    }

    /// Does the same as [`read_link`](Self::read_link), of an inode of this volume, which errors call `path`.
    ///
    /// # Errors
    /// As [`read_link`](Self::read_link).
    pub fn read_link_of(&self, link: &FileInode, path: &str) -> Result<Vec<u8>> {
        let target = self.inner.ext4.read_link(link);
        target.map_err(|error| of_ext4(error, path))
    }

    /// Returns the names in the directory at `path` with their inodes, by name.
    ///
    /// # Errors
    /// As [`stat`](Self::stat); [`Error::Usage`] for what is no directory.
    pub fn list(&self, path: impl AsRef<[u8]>) -> Result<Vec<(DirEntry, FileInode)>> {
        let directory = self.stat(&path)?;
        self.list_of(&directory, &text(path.as_ref()))
    }

    /// Does the same as [`list`](Self::list), of an inode of this volume, which errors call `path`.
    ///
    /// # Errors
    /// As [`list`](Self::list).
    pub fn list_of(&self, directory: &FileInode, path: &str) -> Result<Vec<(DirEntry, FileInode)>> {
        let error = |error| of_ext4(error, path);
        let ext4 = &self.inner.ext4;
        let mut entries = ext4.list(directory).map_err(error)?;
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        let entries = entries.into_iter().map(|entry| {
            let inode = ext4.inode(entry.inode).map_err(error)?;
            Ok((entry, inode))
        });
        entries.collect()
    }

    /// Returns the file at `path`.
    ///
    /// # Errors
    /// The errors of [`stat`](Self::stat); [`Error::Usage`] for something other than a regular file, and for one that
    /// is encrypted, compressed, or has a block map of ext2 instead of extents.
    pub fn file(&self, path: impl AsRef<[u8]>) -> Result<DriveFile> {
        let inode = self.stat(&path)?;
        self.file_of(&inode, &text(path.as_ref()))
    }

    /// Does the same as [`file`](Self::file), of an inode of this volume, which errors call `path`.
    ///
    /// # Errors
    /// As [`file`](Self::file).
    pub fn file_of(&self, inode: &FileInode, path: &str) -> Result<DriveFile> {
        let file = self.inner.ext4.file(inode);
        let file = file.map_err(|error| of_ext4(error, path))?;
        let offset = self.inner.ext4.source().offset();
        let placed = |extent: FileExtent| FileExtent {
            place: extent.place + offset,
            ..extent
        };
        let extents = file.extents().ok();
        Ok(DriveFile {
            volume: self.clone(),
            extents: extents.map(|found| found.into_iter().map(placed).collect()),
            file,
            path: path.to_owned(),
        })
    }
}

impl DriveFile {
    /// Returns its inode.
    pub fn inode(&self) -> &FileInode {
        self.file.inode()
    }

    /// Returns the volume that it lies on.
    pub fn volume(&self) -> &Ext4Volume {
        &self.volume
    }

    fn ext4(&self) -> &Ext4<StoreRange> {
        &self.volume.inner.ext4
    }

    /// Returns the extents of its data in the store: written extents with `place` as a byte of the store, in
    /// the order of the file. Bytes that no extent covers are zeros.
    ///
    /// # Errors
    /// [`Error::Usage`] for a small file whose data lie in its inode.
    pub fn extents(&self) -> Result<&[FileExtent]> {
        match &self.extents {
            Some(extents) => Ok(extents),
            // The reader's error for a file without extents names the reason.
            None => match self.file.extents() {
                Ok(_) => Err(Error::internal("extents that came later")),
                Err(error) => Err(of_ext4(error, &self.path)),
            },
        }
    }

    /// Returns the location in the store of the `bytes` bytes from byte `offset` of the file on: as few ranges
    /// as possible, in the order of the file.
    ///
    /// # Errors
    /// [`Error::Usage`] for bytes in a hole or past the end.
    pub fn pieces(&self, offset: u64, bytes: u64) -> Result<Vec<Range<u64>>> {
        pieces::of(self.extents()?, self.file.len(), offset, bytes, &self.path)
    }

    /// Returns the location in the store of the `bytes` bytes from byte `offset` of the file on, if they are
    /// contiguous there.
    ///
    /// # Errors
    /// [`Error::Usage`] for bytes in several pieces, in a hole or past the end.
    pub fn place(&self, offset: u64, bytes: u64) -> Result<u64> {
        pieces::one(&self.pieces(offset, bytes)?, offset, bytes, &self.path)
    }

    /// Returns the tensors of the file, at their places in the file.
    ///
    /// # Errors
    /// As [`Catalog::of`].
    pub fn catalog(&self) -> Result<Catalog> {
        Catalog::of(self)
    }

    /// Returns the rows of a tensor of [`catalog`](Self::catalog), read from where they lie.
    ///
    /// # Errors
    /// As [`place`](Self::place) and [`TensorEntry::table`].
    pub fn table(&self, entry: &TensorEntry) -> Result<Table> {
        let mut placed = entry.clone();
        placed.offset = self.place(entry.offset, entry.bytes)?;
        placed.table(self.volume.store())
    }

    /// Translates `layers` of [`catalog`](Self::catalog) to their locations in the store: each extent becomes a
    /// separate read.
    ///
    /// # Errors
    /// As [`pieces`](Self::pieces), with the name of the layer.
    pub fn layers(&self, layers: ModelLayers) -> Result<ModelLayers> {
        layers.placed(|offset, bytes| self.pieces(offset, bytes))
    }

    /// Checks that the file is still the one that was opened, unchanged.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if not; the errors of the store.
    pub fn check_unchanged(&self) -> Result<()> {
        let checked = self.ext4().check_unchanged(&self.file);
        checked.map_err(|error| of_ext4(error, &self.path))
    }
}

impl HeaderSource for DriveFile {
    fn len(&self) -> u64 {
        self.file.len()
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        let read = self.ext4().read_at(&self.file, offset, data);
        match read.map_err(|error| of_ext4(error, &self.path))? {
            bytes if bytes == data.len() => Ok(()),
            bytes => {
                let (wanted, path) = (data.len(), &self.path);
                let cause = format!(
                    "{wanted} bytes from byte {offset} of {path} on end past the file, which has {bytes} of them"
                );
                Err(Error::usage(cause, "read up to the end of the file"))
            }
        }
    }

    fn name(&self) -> String {
        pieces::stem(&self.path).to_owned()
    }

    fn label(&self) -> String {
        self.path.clone()
    }
}

/// Returns the error for a partition without ext4, which names the content that was recognised.
fn not_ext4(error: nvme_ext4::Ext4Error, part: &StoreRange) -> Error {
    match found::on(part) {
        Some((what, remedy)) => Error::device(format!("no ext4: it holds {what}"), remedy),
        None => of_ext4(error, "/"),
    }
}

/// Formats a path for messages.
fn text(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}

/// Returns an error of the file system, met at `path`.
fn of_ext4(error: nvme_ext4::Ext4Error, path: &str) -> Error {
    use nvme_ext4::Ext4Error as Own;
    let remedy = error.remedy();
    let cause = match &error {
        Own::NotExt4 { .. } | Own::Unsupported { .. } | Own::NotFound { .. } => error.to_string(),
        _ => format!("{path}: {error}"),
    };
    match error {
        Own::Read { source, .. } => match source.downcast::<Error>() {
            Ok(own) => own.with_context(path),
            Err(other) => Error::device(format!("{path}: {other}"), remedy),
        },
        Own::NotFound { .. } => Error::File {
            action: "find",
            path: path.into(),
            source: io::Error::from_raw_os_error(libc::ENOENT),
        },
        Own::WrongKind { .. } | Own::TooManyLinks { .. } | Own::Refused { .. } => {
            Error::usage(cause, remedy)
        }
        Own::Changed { .. } => Error::Mismatch { what: cause },
        Own::NotExt4 { .. }
        | Own::Unsupported { .. }
        | Own::Corrupt { .. }
        | Own::Checksum { .. } => Error::device(cause, remedy),
    }
}
