//! Reads of a device, checked against the lengths of the device and of the file system.

use crate::error::{Ext4Error, Result};
use crate::source::VolumeSource;
use crate::superblock::VolumeSuperblock;

/// A device and the known facts about its file system.
pub struct CheckedDisk<'a> {
    pub source: &'a dyn VolumeSource,
    pub superblock: &'a VolumeSuperblock,
}

impl CheckedDisk<'_> {
    /// Reads `data.len()` bytes from byte `offset` of the device on.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        let (bytes, len) = (data.len() as u64, self.source.len());
        if offset.checked_add(bytes).is_none_or(|end| end > len) {
            let what = format!("{bytes} bytes on a device of {len} bytes");
            return Err(Ext4Error::corrupt(offset, what));
        }
        let read = self.source.read_at(offset, data);
        read.map_err(|source| Ext4Error::Read {
            offset,
            bytes,
            source,
        })
    }

    /// Reads block `block`, to which byte `from` of the device refers; also returns its first byte
    /// on the device.
    pub fn block(&self, block: u64, from: u64) -> Result<(Vec<u8>, u64)> {
        let info = &self.superblock.info;
        if block == 0 || block >= info.blocks {
            let what = format!("block {block} of {}", info.blocks);
            return Err(Ext4Error::corrupt(from, what));
        }
        let mut data = vec![0; info.block_bytes as usize];
        let offset = block * u64::from(info.block_bytes);
        self.read(offset, &mut data)?;
        Ok((data, offset))
    }
}
