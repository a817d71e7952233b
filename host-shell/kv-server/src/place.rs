//! Names of an area among the processes of a machine: its lock and its socket, in a directory of the user.
//!
//! The lock is one of `fcntl`, which ends with its process. A child of a fork would keep one of `flock`.

use nvme_driver::lock::lock;
use nvme_kv::KvError;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::{DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Locks and their processes: a child of a fork has the entries of its parent, and not the locks. A second opening of a
/// locked file would end the lock when it is closed.
static HELD: Mutex<BTreeMap<PathBuf, u32>> = Mutex::new(BTreeMap::new());

/// The place at which the processes that share an area meet.
#[derive(Clone, Debug)]
pub(crate) struct AreaPlace {
    lock: PathBuf,
    pub socket: PathBuf,
}

impl AreaPlace {
    /// Returns the place for the area from byte `offset` of `device` on, in `directory`, or in one of the user.
    ///
    /// # Errors
    /// [`KvError::Usage`] for a directory that others may use, or that cannot be made.
    pub fn of(directory: Option<&Path>, device: &str, offset: u64) -> nvme_kv::Result<Self> {
        let directory = directory.map_or_else(default_directory, Path::to_owned);
        make_private(&directory)?;
        // By one name in all of this process: a lock ends when its file is closed under another one.
        let directory = directory.canonicalize().map_err(|error| KvError::Usage {
            cause: format!("{} cannot be named: {error}", directory.display()),
            remedy: "name another directory for the sockets".to_owned(),
        })?;
        let name = format!("{}\0{offset}", identity(device));
        let digest = Sha256::digest(name.as_bytes());
        let name: String = digest[..16]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        Ok(Self {
            lock: directory.join(format!("{name}.lock")),
            socket: directory.join(format!("{name}.sock")),
        })
    }

    /// Takes the lock, if no process has it.
    ///
    /// # Errors
    /// [`KvError::Drive`] if the lock's file cannot be opened.
    pub fn try_lock(&self) -> nvme_kv::Result<Option<AreaLock>> {
        let process = std::process::id();
        if lock(&HELD).insert(self.lock.clone(), process) == Some(process) {
            return Ok(None);
        }
        let mut held = AreaLock {
            path: self.lock.clone(),
            process,
            file: None,
        };
        let action = || format!("locking {}", self.lock.display());
        let failed = |source: std::io::Error| KvError::Drive {
            action: action(),
            source: nvme_driver::Error::file("open", &self.lock)(source),
        };
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(&self.lock, flags, Mode::RUSR | Mode::WUSR);
        let file = File::from(file.map_err(|errno| failed(errno.into()))?);
        match rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::AGAIN | Errno::ACCESS) => return Ok(None),
            Err(errno) => return Err(failed(errno.into())),
        }
        let here = file.metadata().map_err(failed)?;
        held.file = Some(file);
        // A cleaner of old files may have removed it, and another process made it again.
        let named = std::fs::metadata(&self.lock).ok();
        let is_same =
            named.is_some_and(|named| (named.dev(), named.ino()) == (here.dev(), here.ino()));
        Ok(is_same.then_some(held))
    }
}

/// The lock of an area, until it is dropped or its process ends.
#[derive(Debug)]
pub(crate) struct AreaLock {
    path: PathBuf,
    process: u32,
    file: Option<File>,
}

impl Drop for AreaLock {
    fn drop(&mut self) {
        let mut held = lock(&HELD);
        self.file = None;
        if held.get(&self.path) == Some(&self.process) {
            held.remove(&self.path);
        }
    }
}

fn default_directory() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(directory) if Path::new(&directory).is_absolute() => {
            Path::new(&directory).join("nvme-gpu")
        }
        _ => {
            let user = rustix::process::geteuid().as_raw();
            std::env::temp_dir().join(format!("nvme-gpu-{user}"))
        }
    }
}

/// Makes a directory that only this user may use, or checks that it is one.
fn make_private(directory: &Path) -> nvme_kv::Result<()> {
    let made = DirBuilder::new().mode(0o700).create(directory);
    let usage = |cause: String| KvError::Usage {
        cause,
        remedy: "name a directory of this user alone, with the mode 0700".to_owned(),
    };
    if let Err(error) = made
        && error.kind() != std::io::ErrorKind::AlreadyExists
    {
        let name = directory.display();
        return Err(usage(format!(
            "the directory {name} cannot be made: {error}"
        )));
    }
    // Not that of a link: a user that can change the link could change it again.
    let found = std::fs::symlink_metadata(directory)
        .map_err(|error| usage(format!("{} is not there: {error}", directory.display())))?;
    let is_mine = found.uid() == rustix::process::geteuid().as_raw();
    if !found.is_dir() || !is_mine || found.mode() & 0o077 != 0 {
        let name = directory.display();
        return Err(usage(format!(
            "{name} is no directory that only this user may use"
        )));
    }
    Ok(())
}

/// Returns a name of a device that does not depend on the path by which it is named.
fn identity(device: &str) -> String {
    let path = device.strip_prefix("file:").unwrap_or(device);
    match std::fs::metadata(path) {
        Ok(found) if found.file_type().is_block_device() => format!("block {}", found.rdev()),
        Ok(found) => format!("file {} {}", found.dev(), found.ino()),
        Err(_) => device.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn scratch(name: &str) -> PathBuf {
        let directory =
            std::env::temp_dir().join(format!("nvme-kv-place-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir(&directory).unwrap();
        directory
    }

    #[test]
    fn a_device_has_one_place_by_all_its_names_and_each_offset_its_own() {
        let directory = scratch("names");
        let file = directory.join("pages");
        std::fs::write(&file, b"").unwrap();
        symlink(&file, directory.join("link")).unwrap();
        let private = directory.join("sockets");
        let socket = |device: &str, offset| {
            let place = AreaPlace::of(Some(&private), device, offset);
            place.unwrap().socket
        };
        let path = file.to_str().unwrap();
        let by_path = socket(path, 0);
        assert_eq!(by_path, socket(&format!("file:{path}"), 0));
        assert_eq!(by_path, socket(directory.join("link").to_str().unwrap(), 0));
        assert_ne!(by_path, socket(path, 4096));
        assert_ne!(by_path, socket("0000:01:00.0", 0));
        let again = directory.join("sockets/../sockets");
        assert_eq!(
            by_path,
            AreaPlace::of(Some(&again), path, 0).unwrap().socket
        );
        assert_eq!(private.metadata().unwrap().mode() & 0o777, 0o700);
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_directory_of_others_is_refused() {
        let directory = scratch("others");
        let open = directory.join("open");
        std::fs::create_dir(&open).unwrap();
        std::fs::set_permissions(&open, PermissionsExt::from_mode(0o750)).unwrap();
        symlink(&directory, directory.join("link")).unwrap();
        std::fs::set_permissions(&directory, PermissionsExt::from_mode(0o700)).unwrap();
        std::fs::write(directory.join("file"), b"").unwrap();
        for wrong in ["open", "link", "file", "missing/below"] {
            let error = AreaPlace::of(Some(&directory.join(wrong)), "x", 0).unwrap_err();
            assert_eq!(error.code(), "usage", "{wrong}: {error}");
        }
        AreaPlace::of(Some(&directory), "x", 0).unwrap();
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_lock_is_taken_once_and_again_after_it_was_given_back() {
        let directory = scratch("locks");
        let place = AreaPlace::of(Some(&directory.join("sockets")), "x", 0).unwrap();
        let held = place.try_lock().unwrap().unwrap();
        assert!(place.try_lock().unwrap().is_none());
        drop(held);
        assert!(place.try_lock().unwrap().is_some());
        std::fs::remove_dir_all(directory).unwrap();
    }
}
