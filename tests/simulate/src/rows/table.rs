//! The contents that each block of the drive may have, and the rows that lie on the blocks.

use crate::setup::{BLOCK_BYTES, BLOCKS};
use nvme_gpu_kernel::rows::RowBlocks;
use nvme_gpu_kernel::work::data_word;

/// The versions of each block. Each write of a block makes the next one; version 0 is zeros.
pub(super) struct Table {
    /// Number of the block's last write that has succeeded.
    committed: Vec<u32>,
    /// Number of the block's last write that was sent.
    issued: Vec<u32>,
    /// Number of the block's latest version that a gather has seen.
    seen: Vec<u32>,
}

impl Default for Table {
    fn default() -> Self {
        let none = || vec![0; BLOCKS as usize];
        Self {
            committed: none(),
            issued: none(),
            seen: none(),
        }
    }
}

impl Table {
    /// Returns, for each block, the oldest version that a gather may see if it begins now.
    pub fn floor(&self) -> Vec<u32> {
        self.committed.clone()
    }

    /// Returns the next version of block `lba`, and its words.
    pub fn issue(&mut self, lba: u32) -> (u32, Vec<u64>) {
        let issued = &mut self.issued[lba as usize];
        *issued += 1;
        (*issued, words(lba, *issued).collect())
    }

    /// Notes that the write of `version` has succeeded.
    pub fn commit(&mut self, lba: u32, version: u32) {
        self.committed[lba as usize] = version;
    }

    /// Notes that writes without an end have taken place or never will: versions that were seen stay.
    pub fn settle(&mut self) {
        for (committed, seen) in self.committed.iter_mut().zip(&self.seen) {
            *committed = (*committed).max(*seen);
        }
    }

    /// Returns whether `bytes` are the row at `place`, of versions that a gather may see that had to see `floor`.
    pub fn check(&mut self, place: RowBlocks, bytes: &[u8], floor: &[u32]) -> Result<(), String> {
        let mut done = 0;
        while done < bytes.len() {
            let at = place.byte + done as u64;
            let (lba, skip) = ((at / BLOCK_BYTES) as usize, (at % BLOCK_BYTES) as usize);
            let part = (bytes.len() - done).min(BLOCK_BYTES as usize - skip);
            let have = &bytes[done..done + part];
            let of = |version: u32| {
                let whole: Vec<u8> = words(lba as u32, version)
                    .flat_map(u64::to_le_bytes)
                    .collect();
                whole[skip..skip + part] == *have
            };
            // The oldest matching version counts: a part of a few bytes may match several versions.
            let mut may = floor[lba]..=self.issued[lba];
            let Some(version) = may.find(|version| of(*version)) else {
                let older = (0..floor[lba]).rev().find(|version| of(*version));
                return Err(match older {
                    Some(_) => format!("block {lba} is older than what had been written"),
                    None => format!("block {lba} is no version of it"),
                });
            };
            self.seen[lba] = self.seen[lba].max(version);
            done += part;
        }
        Ok(())
    }
}

fn words(lba: u32, version: u32) -> impl Iterator<Item = u64> {
    let seed = u64::from(lba) << 32 | u64::from(version);
    (0..BLOCK_BYTES / 8).map(move |index| match version {
        0 => 0,
        _ => data_word(seed, index),
    })
}
