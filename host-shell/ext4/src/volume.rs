//! An open file system: paths, directories, links and files. Nothing is ever written. Unknown features are refused by
//! name, since a guess would return wrong bytes as right ones.

use crate::directory::{DirEntry, EntryRules, OnEntry};
use crate::disk::CheckedDisk;
use crate::error::{DataRefusal, Ext4Error, Result};
use crate::extents::{self, ExtentRun, FileExtent};
use crate::group;
use crate::inline;
use crate::inode::{FileInode, FileKind, ROOT, flags};
use crate::source::VolumeSource;
use crate::superblock::{self, VolumeInfo, VolumeSuperblock};
use std::ops::ControlFlow;

/// Limit of the links that are followed in one path, as in Linux: links that refer to each other would
/// otherwise be followed forever.
const MOST_LINKS: u32 = 40;
/// The longest target of a link.
const MOST_TARGET: u64 = 4096;
/// Bytes of an inode that can hold a link's target.
const SHORT_TARGET: u64 = 60;

/// An ext4 on a device.
#[derive(Debug)]
pub struct Ext4<S> {
    source: S,
    superblock: VolumeSuperblock,
}

/// A file's data.
#[derive(Clone, Debug)]
pub struct FileData {
    inode: FileInode,
    block_bytes: u64,
    data: DataExtents,
}

#[derive(Clone, Debug)]
enum DataExtents {
    Inline(Vec<u8>),
    Runs(Vec<ExtentRun>),
}

impl<S: VolumeSource> Ext4<S> {
    /// Reads the superblock.
    ///
    /// # Errors
    /// [`Ext4Error::NotExt4`], [`Ext4Error::Unsupported`] for features that are not read, [`Ext4Error::Corrupt`],
    /// [`Ext4Error::Checksum`] and [`Ext4Error::Read`].
    pub fn open(source: S) -> Result<Self> {
        let len = source.len();
        if len < superblock::OFFSET + superblock::BYTES as u64 {
            return Err(Ext4Error::NotExt4 {
                what: format!("{len} bytes are too few"),
            });
        }
        let mut bytes = [0; superblock::BYTES];
        let read = source.read_at(superblock::OFFSET, &mut bytes);
        read.map_err(|source| Ext4Error::Read {
            offset: superblock::OFFSET,
            bytes: superblock::BYTES as u64,
            source,
        })?;
        let superblock = VolumeSuperblock::parse(&bytes, len)?;
        Ok(Self { source, superblock })
    }

    /// Returns the superblock facts of the file system.
    pub fn info(&self) -> &VolumeInfo {
        &self.superblock.info
    }

    /// Returns the device.
    pub fn source(&self) -> &S {
        &self.source
    }

    fn disk(&self) -> CheckedDisk<'_> {
        CheckedDisk {
            source: &self.source,
            superblock: &self.superblock,
        }
    }

    /// Returns the inode with this number.
    ///
    /// # Errors
    /// [`Ext4Error::Corrupt`] for one that is not in use, [`Ext4Error::Checksum`] and [`Ext4Error::Read`].
    pub fn inode(&self, number: u32) -> Result<FileInode> {
        let superblock = &self.superblock;
        let index = number.checked_sub(1);
        let Some(index) = index.filter(|_| number <= superblock.info.inodes) else {
            let what = format!("inode {number} of {}", superblock.info.inodes);
            return Err(Ext4Error::corrupt(superblock::OFFSET, what));
        };
        let (group, within) = (
            u64::from(index / superblock.inodes_per_group),
            u64::from(index % superblock.inodes_per_group),
        );
        let place = group::place(superblock, group)?;
        let mut descriptor = vec![0; usize::from(superblock.descriptor_bytes)];
        self.disk().read(place, &mut descriptor)?;
        let table = group::inode_table(superblock, group, &descriptor, place)?;
        let mut bytes = vec![0; usize::from(superblock.inode_bytes)];
        let offset = table * u64::from(superblock.info.block_bytes) + within * bytes.len() as u64;
        self.disk().read(offset, &mut bytes)?;
        FileInode::parse(number, &bytes, offset, superblock.seed)
    }

    /// Returns the inode that `path` names; links are followed.
    ///
    /// # Errors
    /// [`Ext4Error::NotFound`], [`Ext4Error::WrongKind`] where a directory is needed, [`Ext4Error::TooManyLinks`], and
    /// the errors of [`inode`](Self::inode) and [`list`](Self::list).
    pub fn lookup(&self, path: impl AsRef<[u8]>) -> Result<FileInode> {
        self.resolve(path.as_ref(), true)
    }

    /// Finds a file as [`lookup`](Self::lookup) does; if the last part of the path is a link, finds the link itself.
    ///
    /// # Errors
    /// As [`lookup`](Self::lookup).
    pub fn lookup_link(&self, path: impl AsRef<[u8]>) -> Result<FileInode> {
        self.resolve(path.as_ref(), false)
    }

    fn resolve(&self, path: &[u8], is_last_followed: bool) -> Result<FileInode> {
        let shown = || String::from_utf8_lossy(path).into_owned();
        let mut above = Vec::new();
        let mut here = self.inode(ROOT)?;
        let mut left = Vec::new();
        push(&mut left, path);
        let mut links = 0;
        while let Some(name) = left.pop() {
            if here.kind != FileKind::Directory {
                return Err(Ext4Error::WrongKind {
                    inode: here.number,
                    wanted: "directory",
                });
            }
            match name.as_slice() {
                b"." => continue,
                b".." => {
                    here = above.pop().unwrap_or(here);
                    continue;
                }
                _ => {}
            }
            let Some(number) = self.find(&here, &name)? else {
                return Err(Ext4Error::NotFound { path: shown() });
            };
            let next = self.inode(number)?;
            let is_followed = is_last_followed || !left.is_empty();
            if next.kind != FileKind::Symlink || !is_followed {
                above.push(std::mem::replace(&mut here, next));
                continue;
            }
            links += 1;
            if links > MOST_LINKS {
                return Err(Ext4Error::TooManyLinks { path: shown() });
            }
            let target = self.read_link(&next)?;
            if target.starts_with(b"/") {
                above.clear();
                here = self.inode(ROOT)?;
            }
            push(&mut left, &target);
        }
        Ok(here)
    }

    fn find(&self, directory: &FileInode, name: &[u8]) -> Result<Option<u32>> {
        let mut found = None;
        self.each(directory, &mut |entry, number, _| {
            if entry != name {
                return ControlFlow::Continue(());
            }
            found = Some(number);
            ControlFlow::Break(())
        })?;
        Ok(found)
    }

    /// Returns the names in a directory, in its order, without `.` and `..`.
    ///
    /// # Errors
    /// [`Ext4Error::WrongKind`]; [`Ext4Error::Refused`] for an encrypted directory; [`Ext4Error::Corrupt`],
    /// [`Ext4Error::Checksum`] and [`Ext4Error::Read`].
    pub fn list(&self, directory: &FileInode) -> Result<Vec<DirEntry>> {
        let mut entries = Vec::new();
        self.each(directory, &mut |name, inode, kind| {
            entries.push(DirEntry {
                name: name.to_vec(),
                inode,
                kind,
            });
            ControlFlow::Continue(())
        })?;
        Ok(entries)
    }

    fn each(&self, directory: &FileInode, on_entry: OnEntry<'_>) -> Result<()> {
        if directory.kind != FileKind::Directory {
            return Err(Ext4Error::WrongKind {
                inode: directory.number,
                wanted: "directory",
            });
        }
        let rules = EntryRules {
            inode: directory,
            has_file_types: self.superblock.has_file_types,
            inodes: self.superblock.info.inodes,
        };
        check_readable(directory)?;
        if directory.has(flags::INLINE_DATA) {
            let (first, rest) = inline::parts(directory)?;
            // The inode number of the parent directory comes first.
            let first = first.get(4..).unwrap_or(&[]);
            if rules
                .entries(first, directory.offset, on_entry)?
                .is_continue()
            {
                let _ = rules.entries(rest, directory.offset, on_entry)?;
            }
            return Ok(());
        }
        let runs = self.runs(directory)?;
        let block_bytes = u64::from(self.superblock.info.block_bytes);
        let blocks = directory.size / block_bytes;
        let mut at = 0;
        for run in &runs {
            if run.logical != at || !run.is_written || !directory.size.is_multiple_of(block_bytes) {
                break;
            }
            for place in run.place..run.place + run.blocks.min(blocks - at) {
                let (block, offset) = self.disk().block(place, directory.offset)?;
                rules.check(&block, offset)?;
                if rules.entries(&block, offset, on_entry)?.is_break() {
                    return Ok(());
                }
            }
            at += run.blocks.min(blocks - at);
        }
        if at < blocks || !directory.size.is_multiple_of(block_bytes) {
            let what = format!(
                "the directory of inode {} has {} bytes, and blocks for {}",
                directory.number,
                directory.size,
                at * block_bytes
            );
            return Err(Ext4Error::corrupt(directory.offset, what));
        }
        Ok(())
    }

    /// Returns the target of a symbolic link.
    ///
    /// # Errors
    /// [`Ext4Error::WrongKind`], [`Ext4Error::Refused`] for an encrypted one, and as [`read_at`](Self::read_at).
    pub fn read_link(&self, link: &FileInode) -> Result<Vec<u8>> {
        if link.kind != FileKind::Symlink {
            return Err(Ext4Error::WrongKind {
                inode: link.number,
                wanted: "symbolic link",
            });
        }
        check_readable(link)?;
        if link.size > MOST_TARGET {
            let what = format!("link {} with a target of {} bytes", link.number, link.size);
            return Err(Ext4Error::corrupt(link.offset, what));
        }
        let is_short = !link.has(flags::EXTENTS) && !link.has(flags::INLINE_DATA);
        if is_short && link.size < SHORT_TARGET {
            return Ok(link.root[..link.size as usize].to_vec());
        }
        let file = self.data_of(link)?;
        let mut target = vec![0; link.size as usize];
        self.read_at(&file, 0, &mut target)?;
        Ok(target)
    }

    /// Opens the data of a file by its inode.
    ///
    /// # Errors
    /// [`Ext4Error::WrongKind`] for something other than a regular file; [`Ext4Error::Refused`];
    /// [`Ext4Error::Corrupt`], [`Ext4Error::Checksum`] and [`Ext4Error::Read`].
    pub fn file(&self, inode: &FileInode) -> Result<FileData> {
        if inode.kind != FileKind::File {
            return Err(Ext4Error::WrongKind {
                inode: inode.number,
                wanted: "regular file",
            });
        }
        self.data_of(inode)
    }

    fn data_of(&self, inode: &FileInode) -> Result<FileData> {
        check_readable(inode)?;
        let data = match inode.has(flags::INLINE_DATA) {
            true => {
                let (first, rest) = inline::parts(inode)?;
                DataExtents::Inline([first, rest].concat())
            }
            false => DataExtents::Runs(self.runs(inode)?),
        };
        Ok(FileData {
            inode: inode.clone(),
            block_bytes: u64::from(self.superblock.info.block_bytes),
            data,
        })
    }

    fn runs(&self, inode: &FileInode) -> Result<Vec<ExtentRun>> {
        if !inode.has(flags::EXTENTS) {
            return Err(refused(inode, DataRefusal::BlockMap));
        }
        extents::of(&self.disk(), inode)
    }

    /// Reads bytes of `file` from byte `offset` on, and returns their number, which is less than `data.len()`
    /// at the end of the file. Holes and unwritten extents are zeros.
    ///
    /// # Errors
    /// [`Ext4Error::Read`]; [`Ext4Error::Corrupt`] for blocks that the device does not have.
    pub fn read_at(&self, file: &FileData, offset: u64, data: &mut [u8]) -> Result<usize> {
        let left = file.inode.size.saturating_sub(offset);
        let bytes = left.min(data.len() as u64) as usize;
        let data = &mut data[..bytes];
        let runs = match &file.data {
            DataExtents::Inline(all) => {
                // The inode's size and its data have the same length.
                let from = all.get(offset as usize..).unwrap_or(&[]);
                data.copy_from_slice(&from[..bytes]);
                return Ok(bytes);
            }
            DataExtents::Runs(runs) => runs,
        };
        data.fill(0);
        let (begin, end) = (offset, offset + bytes as u64);
        let block = file.block_bytes;
        let first = runs.partition_point(|run| (run.logical + run.blocks) * block <= begin);
        for run in &runs[first..] {
            let (from, to) = (
                (run.logical * block).max(begin),
                ((run.logical + run.blocks) * block).min(end),
            );
            if from >= to {
                break;
            }
            if run.is_written {
                let place = run.place * block + (from - run.logical * block);
                let part = (from - begin) as usize..(to - begin) as usize;
                self.disk().read(place, &mut data[part])?;
            }
        }
        Ok(bytes)
    }

    /// Checks that the inode of `file` on the device is unchanged.
    ///
    /// # Errors
    /// [`Ext4Error::Changed`] if not; as [`inode`](Self::inode).
    pub fn check_unchanged(&self, file: &FileData) -> Result<()> {
        let now = self.inode(file.inode.number);
        match now {
            Ok(now) if now == file.inode => Ok(()),
            Ok(_) | Err(Ext4Error::Corrupt { .. }) => Err(Ext4Error::Changed {
                inode: file.inode.number,
            }),
            Err(error) => Err(error),
        }
    }
}

impl FileData {
    /// Returns its inode.
    pub fn inode(&self) -> &FileInode {
        &self.inode
    }

    /// Returns the number of bytes of data.
    pub fn len(&self) -> u64 {
        self.inode.size
    }

    /// True if the file has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the extents of its data on the device, in the order of the file, up to its end. Bytes that no
    /// extent covers are a hole: zeros.
    ///
    /// # Errors
    /// [`Ext4Error::Refused`] for a file whose data lie in its inode.
    pub fn extents(&self) -> Result<Vec<FileExtent>> {
        let DataExtents::Runs(runs) = &self.data else {
            return Err(refused(&self.inode, DataRefusal::Inline));
        };
        let block = self.block_bytes;
        let end = self.inode.size.div_ceil(block);
        let inside = runs.iter().take_while(|run| run.logical < end);
        let extents = inside.map(|run| FileExtent {
            logical: run.logical * block,
            place: run.place * block,
            bytes: run.blocks.min(end - run.logical) * block,
            is_written: run.is_written,
        });
        Ok(extents.collect())
    }

    /// Returns the byte of the device at which the file's data begin, if they are contiguous and all of them are
    /// written.
    pub fn place(&self) -> Option<u64> {
        match &*self.extents().ok()? {
            [one] if one.logical == 0 && one.is_written && one.bytes >= self.len() => {
                Some(one.place)
            }
            _ => None,
        }
    }
}

/// Pushes the parts of a path, the first one last, onto the parts that are still to be looked up.
fn push(left: &mut Vec<Vec<u8>>, path: &[u8]) {
    let parts = path.split(|byte| *byte == b'/');
    let parts = parts.filter(|part| !part.is_empty());
    left.extend(parts.rev().map(<[u8]>::to_vec));
}

fn check_readable(inode: &FileInode) -> Result<()> {
    if inode.has(flags::ENCRYPTED) {
        return Err(refused(inode, DataRefusal::Encrypted));
    }
    match inode.has(flags::COMPRESSED_BLOCKS) {
        true => Err(refused(inode, DataRefusal::Compressed)),
        false => Ok(()),
    }
}

fn refused(inode: &FileInode, why: DataRefusal) -> Ext4Error {
    Ext4Error::Refused {
        inode: inode.number,
        why,
    }
}
