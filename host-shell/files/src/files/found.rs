//! Recognises the content of a device or partition that has no ext4, by its signatures.

use super::part::{StoreRange, list, partitions_of};
use nvme_ext4::VolumeSource;

/// Known signatures: offset in the partition, bytes, and the format that they indicate.
const SIGNATURES: [(u64, &[u8], &str); 22] = [
    (0, b"XFSB", "an XFS"),
    (65_600, b"_BHRfS_M", "a btrfs"),
    (3, b"NTFS    ", "an NTFS"),
    (3, b"EXFAT   ", "an exFAT"),
    (82, b"FAT32   ", "a FAT"),
    (54, b"FAT16   ", "a FAT"),
    (54, b"FAT12   ", "a FAT"),
    (1024, &[0x10, 0x20, 0xF5, 0xF2], "an F2FS"),
    (1024, &[0xE2, 0xE1, 0xF5, 0xE0], "an EROFS"),
    (
        4120,
        &[0xC6, 0x85, 0x73, 0xF6, 0x4E, 0x1A, 0x45, 0xCA],
        "a bcachefs",
    ),
    (0, b"hsqs", "a squashfs"),
    (32_769, b"CD001", "an ISO 9660"),
    (0, b"LUKS\xBA\xBE", "a volume that LUKS encrypts"),
    (512, b"LABELONE", "a physical volume of LVM"),
    (
        0,
        &[0xFC, 0x4E, 0x2B, 0xA9],
        "a member of a RAID of Linux (md)",
    ),
    (
        4096,
        &[0xFC, 0x4E, 0x2B, 0xA9],
        "a member of a RAID of Linux (md)",
    ),
    (4086, b"SWAPSPACE2", "a swap space"),
    (65_526, b"SWAPSPACE2", "a swap space"),
    (0, b"QFI\xFB", "an image of the format qcow2"),
    (0, b"GGUF", "a GGUF file"),
    (0, b"\x93NUMPY", "an array of numpy"),
    // Each uberblock of a ZFS begins with these bytes; the first valid one may be any of them.
    (131_072, &[0x0C, 0xB1, 0xBA, 0x00], "a ZFS"),
];

/// Returns the content that is recognised on `part`, and the remedy. `None` if no signature matches.
pub fn on(part: &StoreRange) -> Option<(String, String)> {
    let name = "name the device or partition that holds the ext4".to_owned();
    if part.offset() == 0
        && let Some((block, found)) = partitions_of(part)
    {
        let what = format!(
            "a partition table of blocks of {block} bytes: {}",
            list(&found)
        );
        return Some((
            what,
            "name a partition with part=N among the device's options".to_owned(),
        ));
    }
    let is_there = |(at, signature, _): &&(u64, &[u8], &str)| {
        let mut bytes = vec![0; signature.len()];
        let end = at + signature.len() as u64;
        end <= part.len() && part.read_at(*at, &mut bytes).is_ok() && bytes == **signature
    };
    if let Some((_, _, what)) = SIGNATURES.iter().find(is_there) {
        let remedy = "copy its files to an ext4, or name the device or partition that holds one";
        return Some(((*what).to_owned(), remedy.to_owned()));
    }
    let mut first = vec![0; 4096.min(part.len() as usize)];
    part.read_at(0, &mut first).ok()?;
    if first.get(510..512) == Some(&[0x55, 0xAA]) {
        let what = "a boot record or partition table of the kind MBR, which is not read";
        return Some((what.to_owned(), name));
    }
    let is_empty = first.iter().all(|byte| *byte == 0);
    is_empty.then(|| ("nothing but zeros at its begin".to_owned(), name))
}
