//! Trees of extents, which map a file's blocks to blocks of the device.
//!
//! Linux, Documentation/filesystems/ext4, "Extent Tree".

use crate::bytes::{u16_at, u32_at};
use crate::crc::crc32c;
use crate::disk::CheckedDisk;
use crate::error::{Ext4Error, Result};
use crate::inode::FileInode;

const MAGIC: u16 = 0xF30A;
const HEADER: usize = 12;
const ENTRY: usize = 12;
/// Levels below the root: enough for 2^32 blocks.
const MOST_DEPTH: u16 = 5;
/// The most blocks of an extent that is written; more mean one that is not.
const WRITTEN: u16 = 1 << 15;
/// Largest number of blocks of a file.
const MOST_BLOCKS: u64 = 1 << 32;

/// Bytes of a file that lie together on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileExtent {
    /// The first byte in the file.
    pub logical: u64,
    /// The first byte on the device.
    pub place: u64,
    /// Length in bytes: whole blocks of the file system, so that the last extent may extend past the end of the
    /// file.
    pub bytes: u64,
    /// True if the blocks have been written. Otherwise the file has zeros there, whatever the device holds.
    pub is_written: bool,
}

/// Blocks of a file that are contiguous on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentRun {
    pub logical: u64,
    pub place: u64,
    pub blocks: u64,
    pub is_written: bool,
}

/// Reads the runs of `inode`, in the order of the file.
pub fn of(disk: &CheckedDisk<'_>, inode: &FileInode) -> Result<Vec<ExtentRun>> {
    let mut walk = ExtentWalk {
        disk,
        inode,
        runs: Vec::new(),
    };
    walk.node(&inode.root, inode.offset + 0x28, None, 0, MOST_BLOCKS)?;
    let runs = walk.runs;
    let mut places: Vec<(u64, u64)> = runs.iter().map(|run| (run.place, run.blocks)).collect();
    places.sort_unstable();
    for pair in places.windows(2) {
        // Runs must not share blocks: otherwise a file could claim more data than the device has.
        if pair[0].0 + pair[0].1 > pair[1].0 {
            let what = format!("inode {} has block {} twice", inode.number, pair[1].0);
            return Err(Ext4Error::corrupt(inode.offset, what));
        }
    }
    Ok(runs)
}

struct ExtentWalk<'a> {
    disk: &'a CheckedDisk<'a>,
    inode: &'a FileInode,
    runs: Vec<ExtentRun>,
}

impl ExtentWalk<'_> {
    /// Reads a node that covers the file's blocks from `from` up to `to`. Children cover disjoint
    /// parts of these, so that no node with entries can be met twice.
    fn node(
        &mut self,
        bytes: &[u8],
        offset: u64,
        depth: Option<u16>,
        from: u64,
        to: u64,
    ) -> Result<()> {
        let number = self.inode.number;
        let fault = |what: String| {
            Ext4Error::corrupt(offset, format!("in the extents of inode {number}, {what}"))
        };
        let magic = u16_at(bytes, 0);
        if magic != MAGIC {
            return Err(fault(format!(
                "the magic number is {magic:#06x}, not {MAGIC:#06x}"
            )));
        }
        let (entries, most) = (usize::from(u16_at(bytes, 2)), usize::from(u16_at(bytes, 4)));
        let found = u16_at(bytes, 6);
        if entries > most || HEADER + most * ENTRY > bytes.len() {
            return Err(fault(format!(
                "a node has {entries} entries in the room of {most}"
            )));
        }
        if found > MOST_DEPTH || depth.is_some_and(|depth| depth != found) {
            return Err(fault(format!("there is a node of the level {found}")));
        }
        let tail = HEADER + most * ENTRY;
        if depth.is_some()
            && let Some(seed) = self.inode.seed
        {
            let is_room = tail + 4 <= bytes.len();
            if !is_room || crc32c(seed, &bytes[..tail]) != u32_at(bytes, tail) {
                let what = format!("a node of the extents of inode {number}");
                return Err(Ext4Error::checksum(offset, what));
            }
        }
        if entries == 0 && found > 0 {
            return Err(fault("a node is an index without entries".to_owned()));
        }
        let entry = |index: usize| &bytes[HEADER + index * ENTRY..][..ENTRY];
        let mut at = from;
        for index in 0..entries {
            let entry_bytes = entry(index);
            let logical = u64::from(u32_at(entry_bytes, 0));
            if logical < at || logical >= to {
                return Err(fault(format!(
                    "block {logical} of the file, where {at} to {to} are left"
                )));
            }
            if found == 0 {
                at = self.extent(entry_bytes, logical, to, offset)?;
                continue;
            }
            let end = match index + 1 < entries {
                true => u64::from(u32_at(entry(index + 1), 0)),
                false => to,
            };
            if end <= logical || end > to {
                return Err(fault(format!("block {end} of the file after {logical}")));
            }
            let child = u64::from(u16_at(entry_bytes, 8)) << 32 | u64::from(u32_at(entry_bytes, 4));
            let (node, place) = self.disk.block(child, offset)?;
            self.node(&node, place, Some(found - 1), logical, end)?;
            at = end;
        }
        Ok(())
    }

    /// Adds an extent, and returns its end in the file.
    fn extent(&mut self, bytes: &[u8], logical: u64, to: u64, offset: u64) -> Result<u64> {
        let length = u16_at(bytes, 4);
        let is_written = length <= WRITTEN;
        let blocks = u64::from(match is_written {
            true => length,
            false => length - WRITTEN,
        });
        let place = u64::from(u16_at(bytes, 6)) << 32 | u64::from(u32_at(bytes, 8));
        let end = logical + blocks;
        if blocks == 0
            || end > to
            || place == 0
            || place + blocks > self.disk.superblock.info.blocks
        {
            let what = format!(
                "inode {} has {blocks} blocks from {logical} on in block {place} of the device",
                self.inode.number
            );
            return Err(Ext4Error::corrupt(offset, what));
        }
        if let Some(last) = self.runs.last_mut()
            && last.logical + last.blocks == logical
            && last.place + last.blocks == place
            && last.is_written == is_written
        {
            last.blocks += blocks;
        } else {
            self.runs.push(ExtentRun {
                logical,
                place,
                blocks,
                is_written,
            });
        }
        Ok(end)
    }
}
