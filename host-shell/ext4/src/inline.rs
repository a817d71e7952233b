//! Data that lie in the inode: the first 60 bytes in the space of the extent tree, the other bytes in an attribute.
//!
//! Linux, Documentation/filesystems/ext4, "Inline Data" and "Extended Attributes".

use crate::bytes::{u16_at, u32_at};
use crate::error::{Ext4Error, Result};
use crate::inode::FileInode;

const MAGIC: u32 = 0xEA02_0000;
const ENTRY: usize = 16;
/// Number of the name prefix `system.`.
const SYSTEM: u8 = 7;
const NAME: &[u8] = b"data";

/// Returns the data of `inode` in two parts: the bytes in its block array, and the bytes in the attribute
/// `system.data`.
pub fn parts(inode: &FileInode) -> Result<(&[u8], &[u8])> {
    let size = usize::try_from(inode.size).unwrap_or(usize::MAX);
    let first = &inode.root[..inode.root.len().min(size)];
    let rest = size - first.len();
    if rest == 0 {
        return Ok((first, &[]));
    }
    let value = attribute(&inode.attributes).filter(|value| value.len() >= rest);
    match value {
        Some(value) => Ok((first, &value[..rest])),
        None => {
            let what = format!("inode {} lacks {rest} bytes of its data", inode.number);
            Err(Ext4Error::corrupt(inode.offset, what))
        }
    }
}

/// Returns the value of `system.data`.
fn attribute(attributes: &[u8]) -> Option<&[u8]> {
    if u32_at(attributes, 0) != MAGIC {
        return None;
    }
    let entries = attributes.get(4..)?;
    let mut at = 0;
    loop {
        let entry = entries.get(at..)?;
        let head = entry.get(..ENTRY)?;
        if u32_at(head, 0) == 0 {
            return None;
        }
        let name = entry.get(ENTRY..)?.get(..usize::from(head[0]))?;
        if head[1] == SYSTEM && name == NAME {
            // The value lies in a separate inode (e_value_inum), which ext4 does not use for inline data.
            if u32_at(head, 4) != 0 {
                return None;
            }
            let begin = usize::from(u16_at(head, 2));
            return entries.get(begin..)?.get(..u32_at(head, 8) as usize);
        }
        at += ENTRY + name.len().next_multiple_of(4);
    }
}
