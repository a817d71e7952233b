//! `cp -r`: copies a folder of a drive to a folder of this machine.
//!
//! Names and links are the drive's, which is not trusted. Every name is one component. It is created in a folder that
//! this process made and holds open, and only if nothing of that name exists there; no link is followed.

use super::{PIECE, text, written};
use crate::common::{check_stop, progress, say, visible};
use indicatif::ProgressBar;
use nvme_host::catalog::HeaderSource;
use nvme_host::files::{Ext4Volume, FileInode, FileKind};
use nvme_host::{Error, Result};
use rustix::fs::{Mode, OFlags, mkdirat, openat, symlinkat, syncfs};
use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};

/// Limit of the depth of folders: a folder is open while the folders below it are copied, and the open files of a
/// process are limited.
const MOST_DEPTH: usize = 256;
const DAMAGED: &str = "unmount the file system if it is mounted, and run e2fsck on it";

/// Counts of the copied files.
#[derive(Default)]
pub struct CopiedCounts {
    pub files: u64,
    pub directories: u64,
    pub links: u64,
    pub bytes: u64,
    /// Pipes, sockets and device nodes that were skipped: their paths, and their kinds.
    pub left_out: Vec<(String, &'static str)>,
}

/// Something below the folder.
struct TreeItem {
    /// Number of folders that contain it; the first one is the copied folder.
    depth: usize,
    /// Below the folder that is copied.
    path: PathBuf,
    inode: FileInode,
}

/// Files to copy, a folder before its contents.
struct CopyPlan {
    items: Vec<TreeItem>,
    copied: CopiedCounts,
}

/// Copies the directory `inode` at `from` of `volume` to `to`, which exists only once all of it has been copied.
///
/// # Errors
/// [`Error::Usage`] for a file that is not read, and when `to` is there; [`Error::Device`] for a damaged file system;
/// those of the drive and of the files.
pub fn copy(volume: &Ext4Volume, inode: &FileInode, from: &str, to: &Path) -> Result<CopiedCounts> {
    if fs::symlink_metadata(to).is_ok() {
        let cause = format!("{} is there already", to.display());
        return Err(Error::usage(cause, "remove it, or name another folder"));
    }
    let plan = CopyPlan::of(volume, inode, from)?;
    for (path, kind) in &plan.copied.left_out {
        say::warn(|| visible::line(&format!("warning: {path} is left out: it is a {kind}")));
    }
    let made = TemporaryFolder::new(inode, to)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let root = rustix::fs::open(&made.0, flags, Mode::empty()).map_err(std::io::Error::from);
    let root = root.map_err(Error::file("open", to))?;
    let writer = TreeWriter {
        volume,
        from,
        to,
        bar: progress::bytes(plan.copied.bytes, "copying"),
    };
    writer.all(&plan.items, root)?;
    writer.bar.finish_and_clear();
    fs::rename(&made.0, to).map_err(Error::file("rename to", to))?;
    Ok(plan.copied)
}

impl CopyPlan {
    fn of(volume: &Ext4Volume, inode: &FileInode, from: &str) -> Result<Self> {
        let mut plan = Self {
            items: Vec::new(),
            copied: CopiedCounts::default(),
        };
        let mut seen = HashSet::new();
        let mut left = vec![TreeItem {
            depth: 0,
            path: PathBuf::new(),
            inode: inode.clone(),
        }];
        while let Some(item) = left.pop() {
            check_stop()?;
            let shown = shown(from, &item.path);
            match item.inode.kind {
                FileKind::Directory => {
                    if !seen.insert(item.inode.number) {
                        let cause = format!("{shown} is a directory that is elsewhere, too");
                        return Err(Error::device(cause, DAMAGED));
                    }
                    plan.copied.directories += 1;
                    below(volume, &item, &shown, &mut left)?;
                }
                FileKind::File => {
                    // Files that cannot be read are reported before anything is copied.
                    let file = volume.file_of(&item.inode, &shown)?;
                    plan.copied.files += 1;
                    plan.copied.bytes = plan.copied.bytes.saturating_add(file.len());
                }
                FileKind::Symlink => plan.copied.links += 1,
                FileKind::Fifo
                | FileKind::CharDevice
                | FileKind::BlockDevice
                | FileKind::Socket => {
                    plan.copied.left_out.push((shown, item.inode.kind.name()));
                    continue;
                }
            }
            if item.depth > 0 {
                plan.items.push(item);
            }
        }
        Ok(plan)
    }
}

/// Pushes the entries of a directory, so that the first name is visited next.
fn below(
    volume: &Ext4Volume,
    item: &TreeItem,
    shown: &str,
    left: &mut Vec<TreeItem>,
) -> Result<()> {
    let entries = volume.list_of(&item.inode, shown)?;
    if let Some(pair) = entries
        .windows(2)
        .find(|pair| pair[0].0.name == pair[1].0.name)
    {
        let cause = format!("{shown} has the name '{}' twice", text(&pair[0].0.name));
        return Err(Error::device(cause, DAMAGED));
    }
    if item.depth == MOST_DEPTH && !entries.is_empty() {
        let cause = format!("{shown} is inside of {MOST_DEPTH} folders");
        return Err(Error::usage(
            cause,
            "copy the folders further down one by one",
        ));
    }
    left.extend(entries.into_iter().rev().map(|(entry, inode)| TreeItem {
        depth: item.depth + 1,
        path: item.path.join(OsStr::from_bytes(&entry.name)),
        inode,
    }));
    Ok(())
}

/// Returns the path on the drive.
fn shown(from: &str, below: &Path) -> String {
    match below.as_os_str().is_empty() {
        true => from.to_owned(),
        false => format!("{}/{}", from.trim_end_matches('/'), below.display()),
    }
}

/// A temporary folder beside the target, which it is renamed to. If that does not happen, it is removed with
/// its content.
struct TemporaryFolder(PathBuf);

impl TemporaryFolder {
    fn new(inode: &FileInode, to: &Path) -> Result<Self> {
        let name = to.file_name().unwrap_or_default().to_string_lossy();
        let path = to.with_file_name(format!(".{name}.{}.part", std::process::id()));
        let mode = folder_mode(inode);
        let made = DirBuilder::new().mode(mode.as_raw_mode()).create(&path);
        made.map_err(Error::file("create", to))?;
        Ok(Self(path))
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        // After the rename this folder does not exist any more.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns the permissions of a folder, in which its owner can write; the process's umask takes some away.
fn folder_mode(inode: &FileInode) -> Mode {
    file_mode(inode) | Mode::RWXU
}

fn file_mode(inode: &FileInode) -> Mode {
    Mode::from_raw_mode((u32::from(inode.permissions) & 0o777) as _)
}

struct TreeWriter<'a> {
    volume: &'a Ext4Volume,
    from: &'a str,
    to: &'a Path,
    bar: ProgressBar,
}

impl TreeWriter<'_> {
    fn all(&self, items: &[TreeItem], root: OwnedFd) -> Result<()> {
        let mut folders = vec![root];
        let mut piece = vec![0; PIECE as usize];
        for item in items {
            check_stop()?;
            folders.truncate(item.depth);
            let (Some(folder), Some(name)) = (folders.last(), item.path.file_name()) else {
                return Err(Error::internal("a name outside of all folders"));
            };
            let to = self.to.join(&item.path);
            let failed = |error: rustix::io::Errno| Error::file("create", &to)(error.into());
            match item.inode.kind {
                FileKind::Directory => {
                    mkdirat(folder, name, folder_mode(&item.inode)).map_err(failed)?;
                    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW;
                    let flags = flags | OFlags::CLOEXEC;
                    let made = openat(folder, name, flags, Mode::empty());
                    folders.push(made.map_err(failed)?);
                }
                FileKind::Symlink => {
                    let shown = shown(self.from, &item.path);
                    let target = self.volume.read_link_of(&item.inode, &shown)?;
                    symlinkat(OsStr::from_bytes(&target), folder, name).map_err(failed)?;
                }
                _ => {
                    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
                    let flags = flags | OFlags::CLOEXEC;
                    let made = openat(folder, name, flags, file_mode(&item.inode));
                    self.file(item, File::from(made.map_err(failed)?), &mut piece)?;
                }
            }
        }
        match folders.first() {
            Some(root) => {
                let synced = syncfs(root).map_err(std::io::Error::from);
                synced.map_err(Error::file("write", self.to))
            }
            None => Ok(()),
        }
    }

    /// Holes stay holes.
    fn file(&self, item: &TreeItem, out: File, piece: &mut [u8]) -> Result<()> {
        let file = self
            .volume
            .file_of(&item.inode, &shown(self.from, &item.path))?;
        let to = self.to.join(&item.path);
        let mut begin = 0;
        for range in written(&file)? {
            self.bar.inc(range.start - begin);
            begin = range.end;
            let mut at = range.start;
            while at < range.end {
                check_stop()?;
                let part = &mut piece[..(range.end - at).min(PIECE) as usize];
                file.read_at(at, part)?;
                out.write_all_at(part, at)
                    .map_err(Error::file("write", &to))?;
                at += part.len() as u64;
                self.bar.inc(part.len() as u64);
            }
        }
        self.bar.inc(file.len() - begin);
        out.set_len(file.len()).map_err(Error::file("write", &to))?;
        // A file that changed meanwhile has no consistent copy.
        file.check_unchanged()
    }
}
