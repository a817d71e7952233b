//! Partition tables are not trusted: a table is read or refused, and its partitions lie on the drive and do not
//! overlap.

use super::Input;
use nvme_ext4::{SourceError, VolumeSource};
use nvme_files::files::PartitionTable;

/// Blocks of the drive.
const BLOCKS: usize = 64;

struct Drive(Vec<u8>);

impl VolumeSource for Drive {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<(), SourceError> {
        let from = self.0.get(offset as usize..).unwrap_or(&[]);
        assert!(from.len() >= data.len(), "a read past the end");
        data.copy_from_slice(&from[..data.len()]);
        Ok(())
    }
}

/// Returns CRC-32, computed bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| match crc & 1 {
            1 => crc >> 1 ^ 0xEDB8_8320,
            _ => crc >> 1,
        })
    })
}

/// Corrects the checksums of the table in block `place`, if the table's values allow it.
fn sign(drive: &mut [u8], block: usize, place: usize) {
    let at = place * block;
    let word = |drive: &[u8], offset: usize| {
        let bytes = drive[at + offset..at + offset + 4]
            .try_into()
            .unwrap_or([0; 4]);
        u32::from_le_bytes(bytes) as usize
    };
    let begin = word(drive, 72).saturating_mul(block);
    let bytes = word(drive, 80).saturating_mul(word(drive, 84));
    if let Some(entries) = drive.get(begin..begin.saturating_add(bytes)) {
        let crc = crc32(entries);
        drive[at + 88..at + 92].copy_from_slice(&crc.to_le_bytes());
    }
    let length = word(drive, 12).min(block);
    drive[at + 16..at + 20].fill(0);
    let crc = crc32(&drive[at..at + length]);
    drive[at + 16..at + 20].copy_from_slice(&crc.to_le_bytes());
}

/// The input says which checksums to correct and the size of a block; the drive from its second block on follows, and
/// finally the header in its last block.
pub fn gpt(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let choice = input.byte();
    let block = if choice & 4 == 0 { 512 } else { 4096 };
    let mut drive = vec![0; BLOCKS * block];
    let last = input.take(92);
    drive[(BLOCKS - 1) * block..][..last.len()].copy_from_slice(last);
    let rest = input.take((BLOCKS - 2) * block);
    drive[block..block + rest.len()].copy_from_slice(rest);
    for (bit, place) in [(1, 1), (2, BLOCKS - 1)] {
        if choice & bit != 0 {
            sign(&mut drive, block, place);
        }
    }
    let drive = Drive(drive);
    match PartitionTable::read(&drive, block as u32) {
        Err(fault) => assert!(fault.contains("block")),
        Ok(found) => {
            let mut places: Vec<(u64, u64)> = found
                .entries
                .iter()
                .map(|one| (one.offset, one.bytes))
                .collect();
            places.sort_unstable();
            assert!(places.is_sorted_by(|a, b| a.0 + a.1 <= b.0), "overlap");
            for one in &found.entries {
                assert!(one.bytes > 0 && one.offset + one.bytes <= drive.len());
                assert_eq!(found.get(one.number), Some(one));
            }
        }
    }
}
