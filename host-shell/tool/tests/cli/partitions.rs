//! File systems in a partition of a drive whose first partition table is damaged.

use super::generate::model;
use crate::common::{Folder, Place};

/// The simulator's default block size.
const BLOCK: usize = 4096;
/// First block of the partition.
const BEGIN: usize = 40;

/// Returns the CRC of the UEFI specification, bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32| crc >> 1 ^ (0xEDB8_8320 * (crc & 1));
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc))
    })
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// Returns a drive with `content` in its one partition, and a GPT at its end alone.
fn parted(content: &[u8]) -> Vec<u8> {
    let blocks = BEGIN + content.len().div_ceil(BLOCK) + 8;
    let mut disk = vec![0; blocks * BLOCK];
    put(&mut disk, BEGIN * BLOCK, content);
    let (header, table, end) = (blocks - 1, blocks - 2, blocks - 3);
    let mut entries = [0; 4 * 128];
    entries[..32].fill(7);
    put(&mut entries, 32, &(BEGIN as u64).to_le_bytes());
    put(&mut entries, 40, &(end as u64).to_le_bytes());
    put(&mut disk, table * BLOCK, &entries);
    let head = &mut disk[header * BLOCK..];
    put(head, 0, b"EFI PART\0\0\x01\0\x5C\0\0\0");
    for (at, lba) in [(24, header), (32, 1), (40, BEGIN), (48, end), (72, table)] {
        put(head, at, &(lba as u64).to_le_bytes());
    }
    for (at, value) in [(80, 4), (84, 128), (88, crc32(&entries))] {
        put(head, at, &value.to_le_bytes());
    }
    let crc = crc32(&head[..92]);
    put(head, 16, &crc.to_le_bytes());
    disk
}

#[test]
fn the_table_at_the_end_of_the_drive_is_used_with_a_warning() {
    assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
    let folder = Folder::new(Place::Embedded);
    std::fs::create_dir(folder.path("models")).unwrap();
    std::fs::write(folder.path("models/model.gguf"), model()).unwrap();
    folder.ok(&["pack", "models", "ext4.img"]);
    let packed = std::fs::read(folder.path("ext4.img")).unwrap();
    std::fs::write(folder.path("drive.img"), parted(&packed)).unwrap();
    let said = |words: &[&str]| {
        let output = folder.command().args(words).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{words:?}: {stderr}");
        let warning = "the partition table at the end of the drive is used";
        assert_eq!(stderr.matches(warning).count(), 1, "{words:?}: {stderr}");
        String::from_utf8(output.stdout).unwrap()
    };
    let file = "sim:drive.img?part=1:/model.gguf";
    assert!(said(&["ls", "sim:drive.img?part=1:/"]).contains("model.gguf"));
    assert!(said(&["catalog", file]).contains("token_embd.weight"));
    let words = ["-p", "Hello", "--tokens", "3"];
    let plain = folder.ok(&[&["generate", "models/model.gguf"][..], &words].concat());
    assert_eq!(said(&[&["generate", file][..], &words].concat()), plain);
}
