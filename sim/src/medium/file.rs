//! An image in a file: sparse, of fixed size, read and written at positions. The file is locked
//! while it is open, since two controllers on one image would corrupt it.

use crate::medium::store::{BlockStore, StoreError, check};
use std::fs::{File as OsFile, OpenOptions};
use std::io::{Error, ErrorKind, Result as IoResult};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};

/// A store in a file of fixed size. Dropping or closing it closes the file, which holds everything
/// that was written.
///
/// The file has an OFD lock while it is open, which ends with the process in any case: exclusive if
/// it may be written, otherwise shared with other readers. So two servers, or a server and a tool
/// that writes, never have the same image open. The lock is advisory: programs that take no lock
/// are not kept out.
#[derive(Debug)]
pub struct FileStore {
    /// `None` after [`close`](BlockStore::close).
    file: RwLock<Option<OsFile>>,
    bytes: u64,
}

/// An image that [`FileStore::create`] made, to be removed if what it was made for fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreatedImage {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl CreatedImage {
    /// Returns the path at which the image was created.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the image. A file that another process has put at its path since then stays.
    pub fn remove(&self) {
        let is_same =
            |about: std::fs::Metadata| (about.dev(), about.ino()) == (self.device, self.inode);
        if std::fs::symlink_metadata(&self.path).is_ok_and(is_same) {
            // One that cannot be removed now stays empty; the error to report is the earlier one.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl FileStore {
    /// Opens an existing image with its size. `read_only` opens it for reading alone; writes then
    /// fail with [`StoreError::Io`].
    pub fn open(path: &Path, read_only: bool) -> IoResult<Self> {
        // O_NONBLOCK: opening a pipe would otherwise block until it has a writer.
        let file = OpenOptions::new()
            .read(true)
            .write(!read_only)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)?;
        let kind = file.metadata()?.file_type();
        let what = match () {
            _ if kind.is_block_device() => {
                "it is a block device, and an image is a regular file: copy the device to one"
            }
            _ if !kind.is_file() => "it is not a regular file",
            _ => "",
        };
        if !what.is_empty() {
            return Err(Error::new(ErrorKind::InvalidInput, what));
        }
        lock(&file, !read_only)?;
        let bytes = file.metadata()?.len();
        Ok(Self::of(file, bytes))
    }

    /// Creates a sparse image of `bytes` bytes. An existing file is an error.
    pub fn create(path: &Path, bytes: u64) -> IoResult<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)?;
        let ready = lock(&file, true).and_then(|()| file.set_len(bytes));
        if let Err(error) = ready {
            // A file that cannot have this size must not stay behind.
            let _ = std::fs::remove_file(path);
            return Err(error);
        }
        Ok(Self::of(file, bytes))
    }

    /// Describes the file of this store as an image that was created at `path`.
    pub(crate) fn created_at(&self, path: &Path) -> Result<CreatedImage, StoreError> {
        let about = self.with(OsFile::metadata)?;
        Ok(CreatedImage {
            path: path.to_owned(),
            device: about.dev(),
            inode: about.ino(),
        })
    }

    fn of(file: OsFile, bytes: u64) -> Self {
        let file = RwLock::new(Some(file));
        Self { file, bytes }
    }

    fn with<T>(&self, act: impl FnOnce(&OsFile) -> IoResult<T>) -> Result<T, StoreError> {
        let file = self.file.read().unwrap_or_else(PoisonError::into_inner);
        let closed = || Error::from_raw_os_error(libc::EBADF);
        file.as_ref()
            .ok_or_else(closed)
            .and_then(act)
            .map_err(failed)
    }

    fn punch(&self, offset: u64, len: u64) -> bool {
        self.with(|file| Ok(punch_hole(file, offset, len)))
            .unwrap_or(false)
    }
}

#[cfg(target_os = "linux")]
fn punch_hole(file: &OsFile, offset: u64, len: u64) -> bool {
    crate::memory::punch_hole(file, offset, len)
}

/// Locks the file against other processes, or returns the reason for the failure.
#[cfg(target_os = "linux")]
fn lock(file: &OsFile, exclusive: bool) -> IoResult<()> {
    let Err(error) = crate::memory::lock_file(file, exclusive) else {
        return Ok(());
    };
    if error.kind() == ErrorKind::WouldBlock {
        let what = match exclusive {
            true => "the image is open already, in this process or another one",
            false => "this process or another one may write the image",
        };
        let why = std::format!("{what}; close it there, or reach the image through its server");
        return Err(Error::new(ErrorKind::ResourceBusy, why));
    }
    // Some network file systems have no locks. An image there is still usable, at the user's risk.
    match error.raw_os_error() {
        Some(libc::ENOLCK | libc::EOPNOTSUPP | libc::EINVAL) => Ok(()),
        _ => Err(error),
    }
}

#[cfg(not(target_os = "linux"))]
fn lock(_file: &OsFile, _exclusive: bool) -> IoResult<()> {
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn punch_hole(_file: &OsFile, _offset: u64, _len: u64) -> bool {
    false
}

fn failed(error: Error) -> StoreError {
    StoreError::Io(error.raw_os_error().unwrap_or(0))
}

impl BlockStore for FileStore {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        check(self.bytes, offset, into.len() as u64)?;
        // A file that another process has truncated ends here, as an error instead of stale bytes.
        self.with(|file| file.read_exact_at(into, offset))
    }

    fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), StoreError> {
        check(self.bytes, offset, from.len() as u64)?;
        self.with(|file| file.write_all_at(from, offset))
    }

    fn zero(&self, offset: u64, len: u64, deallocate: bool) -> Result<(), StoreError> {
        check(self.bytes, offset, len)?;
        if deallocate && self.punch(offset, len) {
            return Ok(());
        }
        static ZEROES: [u8; 64 << 10] = [0; 64 << 10];
        let mut done = 0;
        while done < len {
            let take = (len - done).min(ZEROES.len() as u64);
            self.with(|file| file.write_all_at(&ZEROES[..take as usize], offset + done))?;
            done += take;
        }
        Ok(())
    }

    fn flush(&self) -> Result<(), StoreError> {
        self.with(OsFile::sync_data)
    }

    fn close(&self) {
        let file = self.file.write();
        *file.unwrap_or_else(PoisonError::into_inner) = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> std::path::PathBuf {
        let path = std::env::temp_dir().join(format!("nvme-sim-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        path
    }

    #[test]
    fn keeps_what_was_written_and_refuses_the_end() {
        let path = path("keeps");
        let store = FileStore::create(&path, 8192).unwrap();
        store.write_at(8190, &[1, 2]).unwrap();
        assert_eq!(store.write_at(8191, &[1, 2]), Err(StoreError::OutOfBounds));
        assert!(
            FileStore::create(&path, 1).is_err(),
            "an existing image must not be truncated"
        );
        drop(store);
        let store = FileStore::open(&path, false).unwrap();
        let mut bytes = [0; 2];
        store.read_at(8190, &mut bytes).unwrap();
        assert_eq!((bytes, store.bytes()), ([1, 2], 8192));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn an_image_is_removed_only_while_its_path_names_it() {
        let path = path("removed");
        let store = FileStore::create(&path, 8192).unwrap();
        let created = store.created_at(&path).unwrap();
        let aside = path.with_extension("aside");
        std::fs::rename(&path, &aside).unwrap();
        created.remove();
        std::fs::write(&path, "another's").unwrap();
        created.remove();
        assert_eq!(std::fs::read(&path).unwrap(), b"another's");
        std::fs::rename(&aside, &path).unwrap();
        created.remove();
        assert!(!path.exists());
    }

    #[test]
    fn a_truncated_image_is_an_error() {
        let path = path("truncated");
        let store = FileStore::create(&path, 8192).unwrap();
        OsFile::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(4096)
            .unwrap();
        assert!(matches!(
            store.read_at(4096, &mut [0; 16]),
            Err(StoreError::Io(_))
        ));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn deallocation_reads_zero_and_gives_space_back() {
        let path = path("punch");
        let store = FileStore::create(&path, 1 << 20).unwrap();
        store.write_at(0, &vec![7; 1 << 20]).unwrap();
        store.flush().unwrap();
        let before = std::fs::metadata(&path).unwrap().blocks();
        store.zero(4096, (1 << 20) - 8192, true).unwrap();
        store.flush().unwrap();
        let mut bytes = [1; 4096];
        store.read_at(4096, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 4096]);
        store.read_at(0, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 4096]);
        // Not every file system can punch holes; if this one can, the space is freed.
        if store.punch(4096, 4096) {
            assert!(std::fs::metadata(&path).unwrap().blocks() < before);
        }
        std::fs::remove_file(&path).unwrap();
    }

    /// A writer excludes everyone else; readers exclude writers. A lock ends with its store.
    #[test]
    fn an_image_has_one_writer_or_many_readers() {
        let path = path("locked");
        let busy = |read_only| {
            let error = FileStore::open(&path, read_only).expect_err("it is in use");
            assert_eq!(error.kind(), ErrorKind::ResourceBusy);
            let why = std::format!("{error}");
            assert!(
                why.contains("this process or another one") && why.contains("close it there"),
                "{why}"
            );
        };
        let writer = FileStore::create(&path, 8192).unwrap();
        busy(false);
        busy(true);
        drop(writer);
        let writer = FileStore::open(&path, false).unwrap();
        busy(false);
        busy(true);
        drop(writer);
        let readers = [
            FileStore::open(&path, true).unwrap(),
            FileStore::open(&path, true).unwrap(),
        ];
        busy(false);
        drop(readers);
        drop(FileStore::open(&path, false).unwrap());
        std::fs::remove_file(&path).unwrap();
    }

    /// A closed store can be kept: another one opens the image, and the old one changes nothing in it.
    #[test]
    fn a_closed_store_lets_go_of_its_image() {
        let path = path("closed");
        let old = FileStore::create(&path, 8192).unwrap();
        old.write_at(0, &[1]).unwrap();
        old.close();
        let new = FileStore::open(&path, false).expect("the lock is released");
        let closed = Err(StoreError::Io(libc::EBADF));
        assert_eq!(old.write_at(0, &[2]), closed);
        assert_eq!(old.zero(0, 8192, true), closed);
        assert_eq!(old.flush(), closed);
        assert_eq!(old.read_at(0, &mut [0]), closed);
        let mut byte = [0];
        new.read_at(0, &mut byte).unwrap();
        assert_eq!(byte, [1]);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn an_image_that_cannot_be_so_long_is_not_left_behind() {
        let path = path("long");
        assert!(FileStore::create(&path, u64::MAX >> 1).is_err() || path.exists());
        let _ = std::fs::remove_file(&path);
        assert!(FileStore::create(&path, u64::MAX).is_err());
        assert!(!path.exists());
    }
}
