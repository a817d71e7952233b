//! Files of an ext4 that Linux has mounted, and where their data lie on its device.
//!
//! Only immutable files (`chattr +i`) are opened: the kernel neither writes them nor moves their blocks.

mod answer;
mod ioctl;

use super::regular::open_regular;
use answer::FileExtents;
use nvme_driver::error::{Error, Result};
use nvme_ext4::FileExtent;
use rustix::fs::{IFlags, fstatfs, ioctl_getflags, major, minor};
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// `f_type` that `statfs` returns for ext2, ext3 and ext4.
const EXT4: u64 = 0xEF53;

/// An immutable file of a mounted ext4.
///
/// The file stays open until this is dropped. A caller that reads its blocks from the device calls
/// [`check_unchanged`](Self::check_unchanged) before it uses the data, since root can remove the flag.
#[derive(Debug)]
pub struct MountedFile {
    file: File,
    path: PathBuf,
    identity: FileFingerprint,
    extents: Vec<FileExtent>,
}

/// Identity and state of a file. Two fingerprints are equal only if they describe the same file, unchanged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileFingerprint {
    /// The UUID of the file system.
    pub uuid: [u8; 16],
    /// Major and minor number of its block device.
    pub device: (u32, u32),
    /// The inode.
    pub inode: u64,
    /// Generation number of the inode: it differs between files that used the same inode.
    pub generation: u32,
    /// Bytes of data.
    pub bytes: u64,
    /// Seconds since 1970 and nanoseconds of the last change of the data.
    pub modified: (i64, i64),
    /// The same of the last change of the inode, its flags among it.
    pub changed: (i64, i64),
}

impl MountedFile {
    /// Opens the file at `path`, writes back its dirty pages, and queries the location of its data.
    ///
    /// # Errors
    /// [`Error::File`]; [`Error::Usage`] for something other than a regular file, for a file that is not on ext4 or not
    /// immutable, and for one whose bytes are not stored unchanged on the device; [`Error::Mismatch`] for one that
    /// changes meanwhile; [`Error::Environment`] for a kernel before Linux 6.0; [`Error::Device`] for an impossible
    /// answer.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (file, _) = open_regular(path)?;
        let identity = identity(&file, path)?;
        let mut extents = FileExtents::default();
        while let Some(start) = extents.start() {
            let answer = ioctl::fiemap(&file, start).map_err(unanswered("FS_IOC_FIEMAP"))?;
            let added = extents.add(&answer);
            added.map_err(|error| error.with_context(&path.display().to_string()))?;
        }
        let found = Self {
            file,
            path: path.to_owned(),
            identity,
            extents: extents.into_inner(),
        };
        found.check_unchanged()?;
        Ok(found)
    }

    /// Returns its path when it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the identity of the file.
    pub fn identity(&self) -> &FileFingerprint {
        &self.identity
    }

    /// Returns the extents of its data, in the order of the file: `place` counts from the start of the block
    /// device that is mounted, which may be a partition. The last extent may extend past the end of the file.
    /// Bytes that no extent covers are zeros.
    pub fn extents(&self) -> &[FileExtent] {
        &self.extents
    }

    /// Returns the file's inode as the kernel describes it now.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn metadata(&self) -> Result<Metadata> {
        let about = self.file.metadata();
        about.map_err(Error::file("look at", &self.path))
    }

    /// Checks that the file is still immutable, and the same as when it was opened.
    ///
    /// # Errors
    /// [`Error::Usage`] and [`Error::Mismatch`] if not.
    pub fn check_unchanged(&self) -> Result<()> {
        match identity(&self.file, &self.path)? == self.identity {
            true => Ok(()),
            false => Err(Error::Mismatch {
                what: format!("{} has changed since it was opened", self.path.display()),
            }),
        }
    }
}

/// # Errors
/// [`Error::Usage`] for a file that lies on no ext4, or is not immutable.
fn identity(file: &File, path: &Path) -> Result<FileFingerprint> {
    let shown = path.display();
    let system = fstatfs(file).map_err(io::Error::from);
    let system = system.map_err(Error::file("look at", path))?;
    if system.f_type as u64 != EXT4 {
        return Err(Error::usage(
            format!("{shown} lies on a file system that is no ext4"),
            "copy it onto an ext4",
        ));
    }
    let flags = ioctl_getflags(file).map_err(io::Error::from);
    if !flags
        .map_err(unanswered("FS_IOC_GETFLAGS"))?
        .contains(IFlags::IMMUTABLE)
    {
        return Err(Error::usage(
            format!("{shown} is not immutable: its blocks may change at any time"),
            format!("run `chattr +i {shown}` as root once nothing writes to it"),
        ));
    }
    let about = file.metadata().map_err(Error::file("look at", path))?;
    Ok(FileFingerprint {
        uuid: ioctl::uuid(file).map_err(unanswered("EXT4_IOC_GETFSUUID"))?,
        device: (major(about.dev()), minor(about.dev())),
        inode: about.ino(),
        generation: ioctl::generation(file).map_err(unanswered("FS_IOC_GETVERSION"))?,
        bytes: about.len(),
        modified: (about.mtime(), about.mtime_nsec()),
        changed: (about.ctime(), about.ctime_nsec()),
    })
}

/// Returns a closure for `map_err` that names the call that the kernel refused.
fn unanswered(call: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| match source.raw_os_error() {
        Some(libc::ENOTTY | libc::EOPNOTSUPP) => Error::environment(
            format!("the kernel does not answer {call}"),
            "use an ext4 and Linux 6.0 or later",
        ),
        _ => Error::System { call, source },
    }
}

#[cfg(test)]
mod tests;
