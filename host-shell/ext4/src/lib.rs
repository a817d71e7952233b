//! Reads ext4 on a device that no kernel mounts: directories, files, links, and the extents of a file's data.
//!
//! Here belongs the reading of ext4 structures. Partitions, stores and the tensors of files are in
//! `nvme-files`; the crate knows of a device only that bytes can be read.
//!
//! Nothing is written, and everything that is read from the device is checked: a damaged file system, or a malicious
//! one, ends in an [`Ext4Error`] with the byte of the device. Checksums of metadata are verified if the file system has
//! them.
//!
//! The caller makes sure that nothing changes the file system meanwhile. [`Ext4::check_unchanged`] tells whether the
//! inode of a file is still the one that was read.
//!
//! ```
//! # fn image() -> Option<Vec<u8>> { None }
//! # fn main() -> Result<(), nvme_ext4::Ext4Error> {
//! # let Some(image) = image() else { return Ok(()) };
//! use nvme_ext4::Ext4;
//!
//! let volume = Ext4::open(image)?;
//! for entry in volume.list(&volume.lookup("/")?)? {
//!     println!("{}", entry.name.escape_ascii());
//! }
//! let file = volume.file(&volume.lookup("/model.gguf")?)?;
//! for extent in file.extents()? {
//!     println!("{} bytes from byte {} of the device on", extent.bytes, extent.place);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! | what | how it is met |
//! | --- | --- |
//! | 64bit, flex_bg, meta_bg, bigalloc, sparse_super2, large_dir, inline_data, orphan_file, quota | read |
//! | metadata_csum, metadata_csum_seed, uninit_bg | verified |
//! | sparse files, unwritten extents | zeros; [`FileData::extents`] shows both |
//! | verity | read; not verified against its tree |
//! | casefold | names as they are written |
//! | a journal that has to be replayed | [`Ext4Error::Unsupported`] |
//! | compression, an external journal's device, unknown incompatible features | [`Ext4Error::Unsupported`] |
//! | encrypted or compressed files, files with block maps in place of extents | [`Ext4Error::Refused`] |
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod bytes;
mod crc;
mod directory;
mod disk;
mod error;
mod extents;
mod group;
mod inline;
mod inode;
mod source;
mod superblock;
mod volume;

pub use directory::DirEntry;
pub use error::{DataRefusal, Ext4Error, Result};
pub use extents::FileExtent;
pub use inode::{FileInode, FileKind, flags};
pub use source::{SourceError, VolumeSource};
pub use superblock::{VolumeInfo, uuid_text};
pub use volume::{Ext4, FileData};
