//! A file of a mounted ext4, read through a store.

use super::mounted::MountedFile;
use super::part::StoreRange;
use super::pieces;
use crate::catalog::{Catalog, HeaderSource};
use crate::loader::ModelLayers;
use nvme_driver::error::{Error, Result};
use nvme_ext4::{FileExtent, VolumeSource as _, uuid_text};
use nvme_store::Store;
use std::ops::Range;
use std::sync::Arc;

/// The magic number.
const EXT4: u16 = 0xEF53;
/// Offsets of the magic number and the UUID from the start of the file system; the superblock begins at byte
/// 1024.
const MAGIC: u64 = 1024 + 0x38;
const UUID: u64 = 1024 + 0x68;

/// A [`MountedFile`], and a store that has the bytes of the block device on which its file system lies.
#[derive(Debug)]
pub struct PlacedFile {
    file: MountedFile,
    store: Arc<Store>,
    extents: Vec<FileExtent>,
    path: String,
}

impl PlacedFile {
    /// Combines `file` with `store`, which holds its file system as a whole or on its partition
    /// `part`.
    ///
    /// The store must read the bytes that the device has. A `file:` store reads through the kernel's page cache of its
    /// file.
    ///
    /// # Errors
    /// [`Error::Usage`] for a store with another file system, or one that is too short; the errors of
    /// [`StoreRange::partition`] and of the store.
    pub fn new(file: MountedFile, store: &Arc<Store>, part: Option<u32>) -> Result<Self> {
        let part = match part {
            None => StoreRange::whole(store),
            Some(number) => StoreRange::partition(store, number)?.0,
        };
        let path = file.path().display().to_string();
        let (mut magic, mut uuid) = ([0; 2], [0; 16]);
        let is_there = part.len() >= UUID + uuid.len() as u64;
        if is_there {
            store.read_at(part.offset() + MAGIC, &mut magic)?;
            store.read_at(part.offset() + UUID, &mut uuid)?;
        }
        if u16::from_le_bytes(magic) != EXT4 || uuid != file.identity().uuid {
            let wanted = uuid_text(&file.identity().uuid);
            return Err(Error::usage(
                format!("the store does not hold the file system {wanted}, on which {path} lies"),
                "open the block device that is mounted, or the drive with part=",
            ));
        }
        let mut extents = file.extents().to_vec();
        for extent in &mut extents {
            let end = extent.place.checked_add(extent.bytes);
            if end.is_none_or(|end| end > part.len()) {
                return Err(Error::usage(
                    format!("{path} has data past the {} bytes of the store", part.len()),
                    "open the whole block device",
                ));
            }
            extent.place += part.offset();
        }
        Ok(Self {
            file,
            store: Arc::clone(store),
            extents,
            path,
        })
    }

    /// Returns the file.
    pub fn file(&self) -> &MountedFile {
        &self.file
    }

    /// Returns the extents of its data in the store, in the order of the file. Bytes that no extent covers are
    /// zeros.
    pub fn extents(&self) -> &[FileExtent] {
        &self.extents
    }

    /// Does the same as [`DriveFile::pieces`](crate::files::DriveFile::pieces).
    ///
    /// # Errors
    /// [`Error::Usage`] for bytes in a hole or past the end.
    pub fn pieces(&self, offset: u64, bytes: u64) -> Result<Vec<Range<u64>>> {
        pieces::of(&self.extents, self.len(), offset, bytes, &self.path)
    }

    /// Returns the place of bytes, as [`DriveFile::place`](crate::files::DriveFile::place) does.
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
        let found = Catalog::of(self)?;
        self.file.check_unchanged()?;
        Ok(found)
    }

    /// Returns `layers` of [`catalog`](Self::catalog), read from where they lie.
    ///
    /// # Errors
    /// As [`pieces`](Self::pieces), with the name of the layer.
    pub fn layers(&self, layers: ModelLayers) -> Result<ModelLayers> {
        layers.placed(|offset, bytes| self.pieces(offset, bytes))
    }
}

impl HeaderSource for PlacedFile {
    fn len(&self) -> u64 {
        self.file.identity().bytes
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        let end = offset.checked_add(data.len() as u64);
        let Some(end) = end.filter(|end| *end <= self.len()) else {
            let cause = format!(
                "{} bytes from byte {offset} of {} on end past the file",
                data.len(),
                self.path
            );
            return Err(Error::usage(cause, "read up to the end of the file"));
        };
        data.fill(0);
        let from = pieces::first_past(&self.extents, offset);
        let within = self.extents[from..]
            .iter()
            .take_while(|one| one.logical < end);
        for extent in within {
            let first = extent.logical.max(offset);
            let last = (extent.logical + extent.bytes).min(end);
            if first < last {
                let part = &mut data[(first - offset) as usize..(last - offset) as usize];
                let place = extent.place + (first - extent.logical);
                self.store.read_at(place, part)?;
            }
        }
        Ok(())
    }

    fn name(&self) -> String {
        pieces::stem(&self.path).to_owned()
    }

    fn label(&self) -> String {
        self.path.clone()
    }
}
