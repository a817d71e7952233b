//! Files on a drive that no kernel mounts: partitions, ext4, and the ranges of the store in which a file's data lie.
//!
//! - [`FileLocation`]: `DEVICE:/path`, with `part=N` in the device.
//! - [`PartitionTable`]: the GPT of a drive.
//! - [`Ext4Volume`]: the ext4 of a store or partition; [`DriveFile`]: a file in it.
//! - [`MountedFile`]: an immutable file of an ext4 that Linux has mounted, and the extents of its data on the device;
//!   [`PlacedFile`]: the same with a store that reads them.

mod apart;
mod found;
mod gpt;
mod location;
mod mounted;
mod part;
mod pieces;
mod placed;
mod regular;
mod replaced;
#[cfg(all(test, feature = "sim"))]
mod tests;
mod volume;

pub use apart::{check_apart, is_of_device, named_by};
pub use gpt::{GptPartition, PartitionTable};
pub use location::FileLocation;
pub use mounted::{FileFingerprint, MountedFile};
pub use nvme_ext4::{DirEntry, FileExtent, FileInode, FileKind, VolumeInfo, flags, uuid_text};
pub use part::StoreRange;
pub use placed::PlacedFile;
pub use regular::open_regular;
pub use replaced::replace;
pub use volume::{DriveFile, Ext4Volume};
