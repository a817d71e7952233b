//! GUID partition tables. Both copies of the table have checksums; a damaged first copy is replaced by the one at the
//! end of the drive, with a warning.
//!
//! UEFI 2.10, "GPT Disk Layout".

use nvme_ext4::VolumeSource;
use serde::Serialize;

const SIGNATURE: &[u8] = b"EFI PART";
/// Bytes of a header that are defined.
const HEADER: usize = 92;
/// Bytes of an entry that are defined.
const ENTRY: u64 = 128;
/// Limit of the bytes of partition entries that are read; their number is the table's own claim.
const MOST_BYTES: u64 = 4 << 20;

/// A partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GptPartition {
    /// Number of the partition, from 1 on.
    pub number: u32,
    /// Name of the partition.
    pub name: String,
    /// The GUID of its type.
    pub kind: String,
    /// GUID of the partition.
    pub guid: String,
    /// First byte of the partition on the device.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// The partitions of a drive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PartitionTable {
    /// The GUID of the drive.
    pub guid: String,
    /// Partitions in use, by their numbers.
    pub entries: Vec<GptPartition>,
    /// Fault of the primary table at the start of the drive, if the backup at its end was used.
    pub damage: Option<String>,
}

/// Description of a fault, as the end of a sentence.
type Fault = String;

impl PartitionTable {
    /// Reads the table of a drive with blocks of `block_bytes` bytes. When the one at its begin is damaged, that at its
    /// end is used; checksums of both header and entries are verified.
    ///
    /// # Errors
    /// A sentence about both, when neither can be used.
    pub fn read(source: &dyn VolumeSource, block_bytes: u32) -> Result<Self, String> {
        let block = u64::from(block_bytes);
        let blocks = source.len() / block.max(1);
        if block < 512 || blocks < 4 {
            return Err(format!(
                "{blocks} blocks of {block_bytes} bytes are too few"
            ));
        }
        let table = GptReader {
            source,
            block,
            blocks,
        };
        let first = match table.at(1) {
            Ok(found) => return Ok(found),
            Err(fault) => fault,
        };
        match table.at(blocks - 1) {
            Ok(found) => Ok(Self {
                damage: Some(first),
                ..found
            }),
            Err(last) => Err(format!("in block 1, {first}; in the last block, {last}")),
        }
    }

    /// Returns the partition with this number.
    pub fn get(&self, number: u32) -> Option<&GptPartition> {
        self.entries.iter().find(|one| one.number == number)
    }
}

struct GptReader<'a> {
    source: &'a dyn VolumeSource,
    block: u64,
    blocks: u64,
}

impl GptReader<'_> {
    fn read(&self, offset: u64, bytes: u64) -> Result<Vec<u8>, Fault> {
        let end = offset.checked_add(bytes);
        if end.is_none_or(|end| end > self.source.len()) {
            return Err(format!(
                "{bytes} bytes from byte {offset} on are past the end"
            ));
        }
        let mut data = vec![0; bytes as usize];
        let read = self.source.read_at(offset, &mut data);
        read.map_err(|error| error.to_string())?;
        Ok(data)
    }

    /// Returns the table whose header is in block `place`.
    fn at(&self, place: u64) -> Result<PartitionTable, Fault> {
        let mut header = self.read(place * self.block, self.block)?;
        if !header.starts_with(SIGNATURE) {
            return Err("there is no header of a GPT".to_owned());
        }
        let length = u32_at(&header, 12) as usize;
        if length < HEADER || length > header.len() {
            return Err(format!("the header has {length} bytes"));
        }
        let stored = u32_at(&header, 16);
        header[16..20].fill(0);
        if crc32(&header[..length]) != stored {
            return Err("the checksum of the header is wrong".to_owned());
        }
        if u64_at(&header, 24) != place {
            return Err(format!("the header is for block {}", u64_at(&header, 24)));
        }
        let (first, last) = (u64_at(&header, 40), u64_at(&header, 48));
        if first > last || last >= self.blocks {
            return Err(format!(
                "blocks {first} to {last} of {} are for partitions",
                self.blocks
            ));
        }
        let (count, size) = (
            u64::from(u32_at(&header, 80)),
            u64::from(u32_at(&header, 84)),
        );
        let bytes = count * size;
        if size < ENTRY || !size.is_multiple_of(8) || bytes > MOST_BYTES {
            return Err(format!("{count} entries of {size} bytes"));
        }
        let offset = u64_at(&header, 72).checked_mul(self.block);
        let offset = offset.ok_or("the entries are past the end")?;
        let entries = self.read(offset, bytes)?;
        if crc32(&entries) != u32_at(&header, 88) {
            return Err("the checksum of the entries is wrong".to_owned());
        }
        let mut found = Vec::new();
        for (index, entry) in entries.chunks_exact(size as usize).enumerate() {
            if entry[..16] != [0; 16] {
                found.push(self.entry(index as u32 + 1, entry, first, last)?);
            }
        }
        check_apart(&found)?;
        Ok(PartitionTable {
            guid: guid(&header[56..72]),
            entries: found,
            damage: None,
        })
    }

    fn entry(
        &self,
        number: u32,
        entry: &[u8],
        first: u64,
        last: u64,
    ) -> Result<GptPartition, Fault> {
        let (begin, end) = (u64_at(entry, 32), u64_at(entry, 40));
        if begin > end || begin < first || end > last {
            return Err(format!(
                "partition {number} has the blocks {begin} to {end}, where {first} to {last} are for partitions"
            ));
        }
        let name = entry[56..128].as_chunks::<2>().0.iter();
        let name: Vec<u16> = name.map(|unit| u16::from_le_bytes(*unit)).collect();
        let name = name.split(|unit| *unit == 0).next().unwrap_or(&[]);
        Ok(GptPartition {
            number,
            name: String::from_utf16_lossy(name),
            kind: guid(&entry[..16]),
            guid: guid(&entry[16..32]),
            offset: begin * self.block,
            bytes: (end - begin + 1) * self.block,
        })
    }
}

fn check_apart(found: &[GptPartition]) -> Result<(), Fault> {
    let mut sorted: Vec<&GptPartition> = found.iter().collect();
    sorted.sort_by_key(|one| one.offset);
    let overlap = sorted
        .windows(2)
        .find(|pair| pair[0].offset + pair[0].bytes > pair[1].offset);
    match overlap {
        Some(pair) => Err(format!(
            "the partitions {} and {} overlap",
            pair[0].number, pair[1].number
        )),
        None => Ok(()),
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]))
}

/// Formats a GUID, whose first three groups are little-endian.
fn guid(bytes: &[u8]) -> String {
    let order = [3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15];
    let mut text = String::new();
    for (place, from) in order.into_iter().enumerate() {
        if matches!(place, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{:02x}", bytes[from]));
    }
    text
}

/// Computes the CRC-32 of IEEE 802.3.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| match crc & 1 {
            1 => crc >> 1 ^ 0xEDB8_8320,
            _ => crc >> 1,
        })
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::{PartitionTable, crc32};

    fn put(disk: &mut [u8], at: usize, bytes: &[u8]) {
        disk[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Returns a disk of 100 blocks with partitions of these blocks, and both tables.
    pub fn disk(block: usize, partitions: &[(u64, u64)]) -> Vec<u8> {
        let mut disk = vec![0; 100 * block];
        let mut entries = vec![0; 8 * 128];
        for (index, (begin, end)) in partitions.iter().enumerate() {
            let at = index * 128;
            put(&mut entries, at, &[0xA0 + index as u8; 16]);
            put(&mut entries, at + 16, &[0x10 + index as u8; 16]);
            put(&mut entries, at + 32, &begin.to_le_bytes());
            put(&mut entries, at + 40, &end.to_le_bytes());
            for (unit, letter) in "näme".encode_utf16().enumerate() {
                put(&mut entries, at + 56 + unit * 2, &letter.to_le_bytes());
            }
        }
        for (place, other, table) in [(1u64, 99u64, 2u64), (99, 1, 96)] {
            put(&mut disk, table as usize * block, &entries);
            let at = place as usize * block;
            put(&mut disk, at, b"EFI PART\0\0\x01\0\x5C\0\0\0");
            for (offset, value) in [(24, place), (32, other), (40, 6), (48, 95), (72, table)] {
                put(&mut disk, at + offset, &value.to_le_bytes());
            }
            put(&mut disk, at + 56, &(0..16).collect::<Vec<u8>>());
            for (offset, value) in [(80, 8u32), (84, 128), (88, crc32(&entries))] {
                put(&mut disk, at + offset, &value.to_le_bytes());
            }
        }
        sign(&mut disk, block);
        disk
    }

    /// Makes the checksums of both headers right.
    fn sign(disk: &mut [u8], block: usize) {
        for place in [block, 99 * block] {
            disk[place + 16..place + 20].fill(0);
            let crc = crc32(&disk[place..place + 92]);
            put(disk, place + 16, &crc.to_le_bytes());
        }
    }

    #[test]
    fn partitions_are_found_with_names_and_places() {
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
        for block in [512, 4096] {
            let found =
                PartitionTable::read(&disk(block, &[(6, 9), (20, 95)]), block as u32).unwrap();
            assert_eq!(found.guid, "03020100-0504-0706-0809-0a0b0c0d0e0f");
            assert_eq!((found.entries.len(), &found.damage), (2, &None));
            let second = found.get(2).unwrap();
            let block = block as u64;
            assert_eq!((second.offset, second.bytes), (20 * block, 76 * block));
            assert_eq!((&*second.name, &second.kind[..4]), ("näme", "a1a1"));
            assert!(found.get(3).is_none() && found.get(0).is_none());
        }
    }

    #[test]
    fn the_table_at_the_end_is_used_when_the_first_is_damaged() {
        let good = disk(512, &[(6, 9)]);
        let expected = PartitionTable::read(&good, 512).unwrap();
        for (at, what) in [
            (512, "no header"),
            (512 + 13, "the header has"),
            (512 + 16, "the checksum of the header"),
            (512 + 60, "the checksum of the header"),
            (1024 + 3, "the checksum of the entries"),
        ] {
            let mut disk = good.clone();
            disk[at] ^= 0x80;
            let found = PartitionTable::read(&disk, 512).unwrap();
            assert!(found.damage.as_ref().unwrap().contains(what), "{found:?}");
            assert_eq!(found.entries, expected.entries);
            // Both damaged.
            disk[99 * 512] ^= 1;
            let fault = PartitionTable::read(&disk, 512).unwrap_err();
            assert!(
                fault.contains(what) && fault.contains("in the last block"),
                "{fault}"
            );
        }
    }

    #[test]
    fn tables_that_cannot_be_are_refused() {
        for (offset, value, what) in [
            (12, 91u64, "the header has 91 bytes"),
            (12, 513, "the header has 513 bytes"),
            (24, 5, "the header is for block 5"),
            (40, 96, "blocks 96 to 95"),
            (48, 100, "blocks 6 to 100"),
            (72, u64::MAX, "past the end"),
            (72, 99, "past the end"),
            (80, 128 << 32 | 0xFFFF_FFFF, "4294967295 entries"),
            (80, 64 << 32 | 8, "8 entries of 64 bytes"),
            (80, 132 << 32 | 8, "8 entries of 132 bytes"),
            (80, 128 << 32 | 7, "the checksum of the entries"),
        ] {
            let mut disk = disk(512, &[(6, 9)]);
            let bytes = match offset {
                12 => 4,
                _ => 8,
            };
            put(&mut disk, 512 + offset, &value.to_le_bytes()[..bytes]);
            disk[99 * 512] = 0;
            let crc = match (offset, value) {
                (12, 91 | 513) => 0,
                _ => {
                    disk[512 + 16..512 + 20].fill(0);
                    crc32(&disk[512..512 + 92])
                }
            };
            put(&mut disk, 512 + 16, &crc.to_le_bytes());
            let fault = PartitionTable::read(&disk, 512).unwrap_err();
            assert!(fault.contains(what), "{fault}, not {what}");
        }
        for (partitions, what) in [
            (&[(5, 9)][..], "partition 1 has the blocks 5 to 9"),
            (&[(6, 96)], "partition 1 has the blocks 6 to 96"),
            (&[(9, 8)], "partition 1 has the blocks 9 to 8"),
            (&[(20, 30), (6, 20)], "the partitions 2 and 1 overlap"),
        ] {
            let fault = PartitionTable::read(&disk(512, partitions), 512).unwrap_err();
            assert!(fault.contains(what), "{fault}, not {what}");
        }
        for (bytes, block) in [(0, 512), (1024, 512), (1 << 20, 0), (1 << 20, 1)] {
            let fault = PartitionTable::read(&vec![0; bytes], block).unwrap_err();
            assert!(fault.contains("too few"), "{fault}");
        }
    }
}
