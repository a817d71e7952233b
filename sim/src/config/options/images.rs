//! Image files: their names, and how they are opened or created. Either all images of a device are
//! opened or none is left behind that was created for it.

use super::draft::{AnyStore, ConfigDraft, ImageAccess, bad};
use crate::config::settings::ConfigError;
use crate::medium::file::{CreatedImage, FileStore};
use crate::medium::store::BlockStore;
use std::boxed::Box;
use std::format;
use std::io::{Error as IoError, ErrorKind};
use std::path::{Path, PathBuf};
use std::string::{String, ToString};
use std::vec::Vec;

/// Location of a device's blocks.
pub(super) enum StoreLocation {
    Null,
    Memory,
    /// Bytes that follow from their address.
    Generated,
    /// Image files; this is the first one's path.
    Images(String),
}

impl StoreLocation {
    /// Reads the part of the text before the question mark.
    pub fn of(text: &str) -> Result<Self, ConfigError> {
        match text {
            "" => Err(bad(
                "device",
                "give a path, mem, null or generated before the question mark",
            )),
            "null" => Ok(Self::Null),
            "mem" => Ok(Self::Memory),
            "generated" => Ok(Self::Generated),
            path => {
                let path = path.replace("%3F", "?").replace("%3f", "?");
                Ok(Self::Images(path.replace("%25", "%")))
            }
        }
    }
}

/// Returns the images of `count` namespaces: PATH, PATH.2, ...
pub(super) fn paths(first: &str, count: u32) -> Vec<PathBuf> {
    let name = |index: u32| match index {
        1 => first.to_string(),
        index => format!("{first}.{index}"),
    };
    (1..=count).map(|index| name(index).into()).collect()
}

/// Stores of the images that were opened.
pub(super) struct OpenedImages {
    pub stores: Vec<AnyStore>,
    /// Images that did not exist before.
    pub created: Vec<CreatedImage>,
}

fn failed(path: &Path, error: &IoError) -> ConfigError {
    let in_use = (error.kind() == ErrorKind::ResourceBusy).then_some(libc::EBUSY);
    ConfigError {
        option: path.display().to_string(),
        why: error.to_string(),
        errno: error.raw_os_error().or(in_use),
    }
}

/// Opens the images that exist and creates the others. If one of them fails, those that were
/// created are removed again.
pub(super) fn open(
    paths: &[PathBuf],
    draft: &ConfigDraft,
    access: ImageAccess,
) -> Result<OpenedImages, ConfigError> {
    let missing: Vec<&PathBuf> = paths.iter().filter(|path| !path.exists()).collect();
    if let Some(first) = missing.first() {
        check_creation(first, missing.len() as u64, draft, access)?;
    }
    let mut opened = OpenedImages {
        stores: Vec::new(),
        created: Vec::new(),
    };
    for path in paths {
        match one(path, draft) {
            Ok((store, created)) => {
                opened.stores.push(Box::new(store));
                opened.created.extend(created);
            }
            Err(error) => {
                opened.created.iter().for_each(CreatedImage::remove);
                return Err(error);
            }
        }
    }
    Ok(opened)
}

/// Checks that `count` images like the one at `path` may be created and have room.
fn check_creation(
    path: &Path,
    count: u64,
    draft: &ConfigDraft,
    access: ImageAccess,
) -> Result<(), ConfigError> {
    let not_found = |why: &str| ConfigError {
        option: path.display().to_string(),
        why: why.into(),
        errno: Some(libc::ENOENT),
    };
    let Some(size) = draft.size else {
        return Err(not_found("no such file; add size= to create it"));
    };
    draft.check_size(size)?;
    if access == ImageAccess::Read || draft.ro {
        return Err(not_found("no such file, and nothing to read in a new one"));
    }
    check_space(path, size.saturating_mul(count))
}

/// Checks that the file system of `path` has `bytes` bytes free for a new image.
///
/// # Errors
/// The free space, if it is too small, or an error of the folder.
pub fn check_space(path: &Path, bytes: u64) -> Result<(), ConfigError> {
    let parent = path.parent().filter(|parent| *parent != Path::new(""));
    let folder = parent.unwrap_or(Path::new("."));
    let space = rustix::fs::statvfs(folder).map_err(|errno| failed(folder, &errno.into()))?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    if bytes > free {
        let (needed, free) = (nvme_units::bytes(bytes), nvme_units::bytes(free));
        let why = format!(
            "{needed} are more than the {free} that are free in {}; choose a smaller size or another folder",
            folder.display()
        );
        return Err(bad("size", why));
    }
    Ok(())
}

/// Opens or creates one image, and describes one that was created.
fn one(path: &Path, draft: &ConfigDraft) -> Result<(FileStore, Option<CreatedImage>), ConfigError> {
    // A folder can be opened for reading and has a length, so the errors below would not find it.
    if path.is_dir() {
        return Err(failed(
            path,
            &std::io::Error::from_raw_os_error(libc::EISDIR),
        ));
    }
    let creates = draft.size.filter(|_| !path.exists());
    let store = match creates {
        Some(size) => FileStore::create(path, size),
        None => FileStore::open(path, draft.ro),
    };
    let store = store.map_err(|error| failed(path, &error))?;
    let bytes = store.bytes();
    if draft.size.is_some_and(|size| size != bytes) {
        let why = format!("{} exists and has {bytes} bytes", path.display());
        return Err(bad("size", why));
    }
    if bytes == 0 || !bytes.is_multiple_of(u64::from(draft.block)) {
        let (name, block) = (path.display(), draft.block);
        let why = match bytes {
            0 => format!("the image has 0 bytes; `truncate -s 1GiB {name}` makes it larger"),
            _ => format!(
                "{bytes} bytes are not a multiple of block={block}; `truncate -s %{block} {name}` makes them one"
            ),
        };
        return Err(bad(&path.display().to_string(), why));
    }
    let created = creates.and_then(|_| store.created_at(path).ok());
    Ok((store, created))
}
