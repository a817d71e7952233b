//! The folder of the pages that one user's processes publish, and the names of the files in it.
//!
//! A file is named after the process that it belongs to: its PID namespace, its number and the time of its start. So a
//! file whose process is gone is known by its name, and nothing in it has to be believed.

use super::layout::{PAGE_BYTES, WORDS};
use nvme_driver::error::{Error, Result};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Ending of the files' names.
const ENDING: &str = ".counters";

/// The process that published a page, and the number of its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PageOwner {
    /// Number of the PID namespace.
    pub namespace: u64,
    pub pid: u32,
    /// Start of the process in clock ticks since the system's.
    pub start: u64,
    pub store: u64,
}

impl PageOwner {
    /// Returns the owner of the page of store `store` of this process.
    pub fn here(store: u64) -> io::Result<Self> {
        let pid = std::process::id();
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        Ok(Self {
            namespace: namespace_here()?,
            pid,
            start: start_of(pid).ok_or_else(gone)?,
            store,
        })
    }

    fn file_name(&self) -> String {
        let Self {
            namespace,
            pid,
            start,
            store,
        } = self;
        format!("{namespace}-{pid}-{start}-{store}{ENDING}")
    }

    fn of_file_name(name: &str) -> Option<Self> {
        let mut parts = name.strip_suffix(ENDING)?.split('-');
        let mut number = || parts.next()?.parse::<u64>().ok();
        let owner = Self {
            namespace: number()?,
            pid: u32::try_from(number()?).ok()?,
            start: number()?,
            store: number()?,
        };
        // A name in another form is not ours.
        (owner.file_name() == name).then_some(owner)
    }

    /// True if its process has ended. One of another PID namespace cannot be judged from here, and is left alone.
    fn is_stale(&self, namespace: u64) -> bool {
        self.namespace == namespace && start_of(self.pid) != Some(self.start)
    }
}

fn namespace_here() -> io::Result<u64> {
    fs::metadata("/proc/self/ns/pid").map(|meta| meta.ino())
}

/// Returns the start of a process in clock ticks; `None` if there is no such process.
fn start_of(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program, in brackets, may hold brackets and spaces itself. Field 3 follows the last bracket.
    let rest = &stat[stat.rfind(')')? + 1..];
    let mut fields = rest.split_ascii_whitespace();
    match fields.next()? {
        // A zombie has closed everything.
        "Z" | "X" => None,
        _ => fields.nth(18)?.parse().ok(),
    }
}

/// Returns the folder for pages of this user's processes.
pub(super) fn own_folder() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from) {
        Some(folder) if folder.is_absolute() && folder.is_dir() => folder.join("nvme-gpu"),
        _ => shared_folder(),
    }
}

fn shared_folder() -> PathBuf {
    let user = rustix::process::geteuid().as_raw();
    PathBuf::from(format!("/dev/shm/nvme-gpu-{user}"))
}

/// Returns every folder in which this user may read pages: its own, and for root those of all users.
pub fn readable_folders() -> Vec<PathBuf> {
    let mut folders = vec![own_folder(), shared_folder()];
    if rustix::process::geteuid().is_root() {
        let in_folder = |folder: &str| {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            entries.map(|entry| entry.path()).collect::<Vec<PathBuf>>()
        };
        let of_users = in_folder("/run/user").into_iter();
        folders.extend(of_users.map(|folder| folder.join("nvme-gpu")));
        folders.extend(in_folder("/dev/shm").into_iter().filter(|folder| {
            let name = folder.file_name().unwrap_or_default();
            name.to_string_lossy().starts_with("nvme-gpu-")
        }));
    }
    folders.sort();
    folders.dedup();
    folders
}

/// Makes the folder if it is not there, with access for its user alone.
///
/// # Errors
/// For a folder that another user owns or can write: anyone may make names in `/dev/shm`.
pub(super) fn prepare(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let meta = fs::symlink_metadata(folder)?;
    let is_own = meta.uid() == rustix::process::geteuid().as_raw();
    match meta.is_dir() && is_own && meta.mode() & 0o077 == 0 {
        true => Ok(()),
        false => Err(io::ErrorKind::PermissionDenied.into()),
    }
}

/// Creates the file of a page with its blocks, for reading and writing by its user alone.
pub(super) fn create(folder: &Path, owner: &PageOwner) -> io::Result<(File, PathBuf)> {
    let path = folder.join(owner.file_name());
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(&path)?;
    match file.write_all(&[0; PAGE_BYTES]) {
        Ok(()) => Ok((file, path)),
        Err(error) => {
            let _ = fs::remove_file(&path);
            Err(error)
        }
    }
}

/// Removes the pages in `folder` whose processes have ended; returns the others.
pub(super) fn pages(folder: &Path) -> Vec<(PageOwner, PathBuf)> {
    let Ok(namespace) = namespace_here() else {
        return Vec::new();
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut pages: Vec<(PageOwner, PathBuf)> = entries
        .filter_map(|entry| {
            let owner = PageOwner::of_file_name(entry.file_name().to_str()?)?;
            Some((owner, entry.path()))
        })
        .collect();
    pages.retain(|(owner, path)| {
        let is_stale = owner.is_stale(namespace);
        if is_stale {
            let _ = fs::remove_file(path);
        }
        !is_stale
    });
    pages.sort();
    pages
}

/// Reads the words of a page once.
///
/// # Errors
/// [`Error::File`]; [`Error::Device`] for a file that is no page by its kind or length.
pub(super) fn read(path: &Path) -> Result<[u64; WORDS]> {
    let file = OpenOptions::new()
        .read(true)
        // A pipe of this name would otherwise keep the reader waiting.
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
        .map_err(Error::file("open", path))?;
    let meta = file.metadata().map_err(Error::file("measure", path))?;
    if !meta.is_file() || meta.len() != PAGE_BYTES as u64 {
        return Err(Error::device(
            format!("{} is no page of counters", path.display()),
            "remove it",
        ));
    }
    let mut bytes = [0; PAGE_BYTES];
    (&file)
        .read_exact(&mut bytes)
        .map_err(Error::file("read", path))?;
    let (all, _) = bytes.as_chunks::<8>();
    let mut words = [0; WORDS];
    for (word, bytes) in words.iter_mut().zip(all) {
        *word = u64::from_ne_bytes(*bytes);
    }
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn folder(name: &str) -> PathBuf {
        let name = format!("nvme-gpu-counters-{}-{name}", std::process::id());
        std::env::temp_dir().join(name)
    }

    #[test]
    fn the_name_of_a_page_tells_whose_it_is() {
        let owner = PageOwner::here(3).unwrap();
        assert_eq!(PageOwner::of_file_name(&owner.file_name()), Some(owner));
        for name in [
            "1-2-3-4",
            "1-2-3.counters",
            "01-2-3-4.counters",
            "1-2-3-4-5.counters",
            "1-4294967296-3-4.counters",
            "1-x-3-4.counters",
        ] {
            assert_eq!(PageOwner::of_file_name(name), None, "{name}");
        }
    }

    #[test]
    fn pages_of_ended_processes_are_removed_and_no_others() {
        let folder = folder("stale");
        prepare(&folder).unwrap();
        let here = PageOwner::here(0).unwrap();
        let reused = PageOwner {
            start: here.start + 1,
            ..here
        };
        let elsewhere = PageOwner {
            namespace: here.namespace + 1,
            ..reused
        };
        for owner in [here, reused, elsewhere] {
            create(&folder, &owner).unwrap();
        }
        fs::write(folder.join("notes.txt"), "of the user").unwrap();
        let owners: Vec<PageOwner> = pages(&folder).iter().map(|one| one.0).collect();
        assert_eq!(owners, [here, elsewhere]);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 3);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_folder_that_others_may_use_is_refused() {
        let folder = folder("open");
        prepare(&folder).unwrap();
        assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o770)).unwrap();
        let refused = prepare(&folder).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        fs::remove_dir(&folder).unwrap();
        std::os::unix::fs::symlink(std::env::temp_dir(), &folder).unwrap();
        assert!(prepare(&folder).is_err());
        fs::remove_file(&folder).unwrap();
    }

    #[test]
    fn what_is_no_page_is_not_read() {
        let folder = folder("other");
        prepare(&folder).unwrap();
        let path = folder.join("a");
        fs::write(&path, [0; PAGE_BYTES - 1]).unwrap();
        assert!(read(&path).is_err());
        let linked = folder.join("b");
        fs::write(&path, [0; PAGE_BYTES]).unwrap();
        std::os::unix::fs::symlink(&path, &linked).unwrap();
        assert!(read(&linked).is_err() && read(&path).is_ok());
        assert!(read(&folder).is_err());
        fs::remove_dir_all(&folder).unwrap();
    }
}
