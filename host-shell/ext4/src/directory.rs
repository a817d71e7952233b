//! Directories: names and inodes. An index of hashes looks like empty entries, and is skipped.
//!
//! Linux, Documentation/filesystems/ext4, "Directory Entries".

use crate::bytes::{u16_at, u32_at};
use crate::crc::crc32c;
use crate::error::{Ext4Error, Result};
use crate::inode::{FileInode, FileKind, flags};
use std::ops::ControlFlow;

const HEADER: usize = 8;
/// Bytes of the checksum at the end of a block, which has the shape of an entry.
const TAIL: usize = 12;
const TAIL_KIND: u8 = 0xDE;

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// Bytes of the name.
    pub name: Vec<u8>,
    /// The number of its inode.
    pub inode: u32,
    /// Kind of the file, if the directory has it.
    pub kind: Option<FileKind>,
}

/// Facts that entries are checked against.
pub struct EntryRules<'a> {
    pub inode: &'a FileInode,
    pub has_file_types: bool,
    pub inodes: u32,
}

/// Callback that receives one name at a time.
pub type OnEntry<'a> = &'a mut dyn FnMut(&[u8], u32, Option<FileKind>) -> ControlFlow<()>;

impl EntryRules<'_> {
    /// Returns the entries of `bytes`, a block or a part of an inode, at byte `offset` of the device. `.` and
    /// `..` are left out.
    pub fn entries(
        &self,
        bytes: &[u8],
        offset: u64,
        on_entry: OnEntry<'_>,
    ) -> Result<ControlFlow<()>> {
        let mut at = 0;
        while at < bytes.len() {
            let entry = &bytes[at..];
            let place = offset + at as u64;
            let fault = |what: String| {
                let what = format!("in the directory of inode {}, {what}", self.inode.number);
                Ext4Error::corrupt(place, what)
            };
            let (number, length) = (u32_at(entry, 0), record(entry, bytes.len()));
            let name_bytes = usize::from(entry.get(6).copied().unwrap_or(0));
            let kind = entry.get(7).filter(|_| self.has_file_types);
            if length < HEADER || length > entry.len() || !length.is_multiple_of(4) {
                return Err(fault(format!("there is an entry of {length} bytes")));
            }
            if HEADER + name_bytes > length {
                let what = format!("there is a name of {name_bytes} bytes in an entry of {length}");
                return Err(fault(what));
            }
            at += length;
            if number == 0 {
                continue;
            }
            let name = &entry[HEADER..HEADER + name_bytes];
            if name.is_empty() || name.iter().any(|byte| matches!(byte, 0 | b'/')) {
                return Err(fault(format!(
                    "there is the name '{}'",
                    name.escape_ascii()
                )));
            }
            if number > self.inodes {
                return Err(fault(format!(
                    "an entry names inode {number} of {}",
                    self.inodes
                )));
            }
            if matches!(name, b"." | b"..") {
                continue;
            }
            let kind = kind.and_then(|kind| FileKind::of_entry(*kind));
            if on_entry(name, number, kind).is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Verifies the checksum of a block, if it has one.
    pub fn check(&self, block: &[u8], offset: u64) -> Result<()> {
        let Some(seed) = self.inode.seed else {
            return Ok(());
        };
        let is_index = self.inode.has(flags::INDEX);
        let is_sound = match index_place(block).filter(|_| is_index) {
            Some(place) => is_index_sound(block, place, seed),
            None => is_leaf_sound(block, seed),
        };
        match is_sound {
            true => Ok(()),
            false => {
                let what = format!("a block of the directory of inode {}", self.inode.number);
                Err(Ext4Error::checksum(offset, what))
            }
        }
    }
}

/// Returns the length of an entry in a block of `block_bytes`: in long lengths, the two lowest bits are the highest
/// ones.
fn record(entry: &[u8], block_bytes: usize) -> usize {
    let length = u16_at(entry, 4);
    match usize::from(length) {
        0 | 0xFFFF if block_bytes >= 1 << 16 => block_bytes,
        length if block_bytes >= 1 << 16 => (length & 0xFFFC) | (length & 3) << 16,
        length => length,
    }
}

fn is_leaf_sound(block: &[u8], seed: u32) -> bool {
    let Some(body) = block.len().checked_sub(TAIL) else {
        return false;
    };
    let tail = &block[body..];
    let is_tail = u32_at(tail, 0) == 0
        && usize::from(u16_at(tail, 4)) == TAIL
        && (tail[6], tail[7]) == (0, TAIL_KIND);
    is_tail && crc32c(seed, &block[..body]) == u32_at(tail, 8)
}

/// Returns the offset of the limit and count of an index in `block`, if the block is an index.
fn index_place(block: &[u8]) -> Option<usize> {
    let first = record(block, block.len());
    if u32_at(block, 0) == 0 && first == block.len() {
        return Some(8);
    }
    // `.` takes 12 bytes and `..` all others of the block; its name is followed by the index.
    let is_root = first == 12
        && record(block.get(12..)?, block.len()) == block.len() - 12
        && u32_at(block, 24) == 0
        && block.get(29) == Some(&8);
    is_root.then_some(32)
}

fn is_index_sound(block: &[u8], place: usize, seed: u32) -> bool {
    let limit = usize::from(u16_at(block, place));
    let count = usize::from(u16_at(block, place + 2));
    let tail = place + limit * 8;
    if count > limit || tail + 8 > block.len() {
        return false;
    }
    let parts = [&block[..place + count * 8], &block[tail..tail + 4], &[0; 4]];
    parts.into_iter().fold(seed, crc32c) == u32_at(block, tail + 4)
}
