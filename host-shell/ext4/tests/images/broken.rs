//! Damaged images, and malicious ones.

use crate::image::{Folder, Image, open, read, walk};
use nvme_ext4::{Ext4, Ext4Error};

fn filled(name: &str) -> Folder {
    let folder = Folder::new(name);
    folder.sparse(
        "fragments",
        419 * 4096 + 9,
        (0..420).map(|at| (at * 4096, at as u8 | 1, 9)),
    );
    folder.write("a/b/file", &[1; 3000]);
    for number in 0..200 {
        folder.write(&format!("many/a name that fills blocks {number}"), b"");
    }
    folder.link("link", &"x/".repeat(40));
    folder
}

const PLAIN: [&str; 6] = [
    "-t",
    "ext4",
    "-b",
    "1024",
    "-O",
    "^metadata_csum,^resize_inode",
];
const SUMS: [&str; 6] = [
    "-t",
    "ext4",
    "-b",
    "1024",
    "-O",
    "metadata_csum,^resize_inode",
];

/// Returns the offset of the inode of `path`.
fn inode_place(image: &Image, path: &str) -> usize {
    let said = image.debugfs(&format!("imap {path}"));
    let (_, rest) = said.split_once("located at block ").unwrap();
    let (block, offset) = rest.trim().split_once(", offset 0x").unwrap();
    block.parse::<usize>().unwrap() * 1024 + usize::from_str_radix(offset, 16).unwrap()
}

fn half(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// Returns the offsets of nodes of extent trees at `depth` that fill a block of 1,024 bytes. They have room for 84
/// entries; the root in an inode has room for 4.
fn nodes(bytes: &[u8], depth: u16) -> Vec<usize> {
    let places = (0..bytes.len()).step_by(1024);
    places
        .filter(|at| half(bytes, *at) == 0xF30A && half(bytes, at + 6) == depth)
        .filter(|at| half(bytes, at + 4) == 84)
        .collect()
}

fn of_all(volume: &Ext4<Vec<u8>>) -> nvme_ext4::Result<u64> {
    let mut bytes = 0;
    for (_, inode) in walk(volume, 5_000)? {
        match inode.kind {
            nvme_ext4::FileKind::File => {
                let file = volume.file(&inode)?;
                if let Ok(extents) = file.extents() {
                    assert!(extents.len() < 100_000);
                }
                let mut data = vec![0; 8192];
                for at in [0, file.len() / 2, file.len().saturating_sub(5000)] {
                    bytes += volume.read_at(&file, at, &mut data)? as u64;
                }
            }
            nvme_ext4::FileKind::Symlink => bytes += volume.read_link(&inode)?.len() as u64,
            _ => {}
        }
    }
    Ok(bytes)
}

#[test]
fn each_checksum_is_verified() {
    let folder = filled("checksums");
    let image = folder.image(&SUMS, "8M");
    image.index();
    let bytes = image.bytes();
    let blocks = image.debugfs("blocks /many");
    let blocks: Vec<usize> = blocks
        .split_whitespace()
        .map(|one| one.parse().unwrap())
        .collect();
    assert!(blocks.len() > 5);
    let (leaf, index) = (nodes(&bytes, 0)[0], nodes(&bytes, 1)[0]);
    for (what, place) in [
        ("the superblock", 1024 + 0x78),
        ("the superblock", 1024 + 0x3FC),
        ("the descriptor of group 0", 2048 + 0x10),
        ("the descriptor of group 0", 2048 + 0x1E),
        ("inode", inode_place(&image, "/fragments") + 0x8),
        ("inode", inode_place(&image, "/fragments") + 0x82),
        ("inode", inode_place(&image, "/fragments") + 0xF0),
        ("a node of the extents", leaf + 500),
        ("a node of the extents", index + 16),
        ("a block of the directory", blocks[0] * 1024 + 0x28),
        ("a block of the directory", blocks[1] * 1024 + 9),
        ("a block of the directory", blocks[1] * 1024 + 1023),
        ("a block of the directory", blocks[1] * 1024 + 1019),
    ] {
        let mut broken = bytes.clone();
        broken[place] ^= 0x10;
        let error = open(&broken)
            .and_then(|volume| of_all(&volume))
            .unwrap_err();
        assert!(
            matches!(error, Ext4Error::Checksum { .. }),
            "{what}: {error}"
        );
        assert!(error.to_string().contains(what), "{error}, not {what}");
        assert!(!error.remedy().is_empty());
    }
    let mut broken = bytes.clone();
    broken[1024 + 0x175] = 9;
    assert!(matches!(open(&broken), Err(Ext4Error::Corrupt { .. })));
    // CRC-16 of group descriptors.
    let words = ["-t", "ext4", "-b", "1024", "-O", "^metadata_csum,uninit_bg"];
    let mut bytes = folder.image(&words, "8M").bytes();
    assert!(of_all(&open(&bytes).unwrap()).is_ok());
    bytes[2048 + 0x10] ^= 1;
    let error = of_all(&open(&bytes).unwrap()).unwrap_err();
    assert!(matches!(error, Ext4Error::Checksum { .. }), "{error}");
}

/// Returns a superblock with `bytes` at `at`.
fn patched(image: &[u8], at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut image = image.to_vec();
    image[at..at + bytes.len()].copy_from_slice(bytes);
    image
}

#[test]
fn sizes_that_cannot_be_are_named_with_their_place() {
    let folder = filled("sizes");
    let bytes = folder.image(&PLAIN, "8M").bytes();
    for (at, value, what) in [
        (0x18, &[7, 0, 0, 0][..], "blocks of 2^7 KiB"),
        (0x04, &[0xFF; 4], "4294967295 blocks"),
        (0x150, &[0xFF; 4], "blocks of 1024 bytes on a device"),
        (0x14, &[2], "the first data block 2"),
        (0x04, &[1, 0, 0, 0], "the first data block 1"),
        (0x20, &[0; 4], "no blocks in a group"),
        (0x58, &[64, 0], "inodes of 64 bytes"),
        (0x58, &[0, 8], "inodes of 2048 bytes"),
        (0x58, &[200, 0], "inodes of 200 bytes"),
        (0x28, &[0; 4], "groups of 0"),
        (0x00, &[5, 0, 0, 0], "5 inodes"),
        (0x00, &[0xFF; 4], "4294967295 inodes"),
        (0xFE, &[32, 0], "descriptors of 32 bytes"),
        (0xFE, &[0, 16], "descriptors of 4096 bytes"),
        (0xFE, &[65, 0], "descriptors of 65 bytes"),
    ] {
        match open(&patched(&bytes, 1024 + at, value)) {
            Err(error @ Ext4Error::Corrupt { .. }) => {
                assert!(error.to_string().contains(what), "{error}, not {what}");
            }
            other => panic!("{what}: {:?}", other.map(|volume| volume.info().clone())),
        }
    }
    for table in [[0; 4], [1, 0, 0, 0], [0xFF; 4]] {
        let volume = open(&patched(&bytes, 2048 + 8, &table)).unwrap();
        let error = volume.lookup("/").unwrap_err();
        assert!(
            error.to_string().contains("the inodes of group 0"),
            "{error}"
        );
    }
}

#[test]
fn trees_that_lead_back_into_themselves_end() {
    let folder = filled("trees");
    let image = folder.image(&PLAIN, "8M");
    let bytes = image.bytes();
    assert!(of_all(&open(&bytes).unwrap()).unwrap() > 0);
    let (leaf, index) = (nodes(&bytes, 0)[0], nodes(&bytes, 1)[0]);
    let root = inode_place(&image, "/fragments") + 0x28;
    let itself = ((index / 1024) as u32).to_le_bytes();
    let entry = |node: usize, index: usize| node + 12 + index * 12;
    let copy = |from: usize, length: usize| bytes[from..from + length].to_vec();
    let far = [0xFF; 4];
    for (at, value, what) in [
        (
            entry(index, 0) + 4,
            itself.to_vec(),
            "a node of the level 1",
        ),
        (
            entry(root, 0) + 4,
            ((leaf / 1024) as u32).to_le_bytes().to_vec(),
            "a node of the level 0",
        ),
        (
            entry(index, 1) + 4,
            copy(entry(index, 0) + 4, 4),
            "block 0 of the file, where",
        ),
        (
            entry(index, 1),
            copy(entry(index, 0), 12),
            "of the file after",
        ),
        (entry(index, 1), far.to_vec(), "of the file after"),
        (
            entry(leaf, 1),
            copy(entry(leaf, 0), 4),
            "block 0 of the file, where",
        ),
        (entry(leaf, 1) + 8, copy(entry(leaf, 0) + 8, 4), "twice"),
        (
            entry(leaf, 0) + 8,
            far.to_vec(),
            "in block 4294967295 of the device",
        ),
        (entry(leaf, 0) + 8, vec![0; 4], "in block 0 of the device"),
        (entry(leaf, 0) + 4, vec![0; 2], "0 blocks from 0 on"),
        (
            entry(leaf, 0) + 4,
            vec![0xFF; 2],
            "inode 12 has 32767 blocks",
        ),
        (entry(index, 0) + 4, far.to_vec(), "block 4294967295 of"),
        (entry(index, 0) + 4, vec![0; 4], "block 0 of"),
        (index, vec![0; 2], "the magic number"),
        (index + 2, vec![0; 2], "an index without entries"),
        (index + 2, vec![85, 0], "85 entries in the room of 84"),
        (index + 4, vec![85, 0], "entries in the room of 85"),
        (root + 4, vec![5, 0], "entries in the room of 5"),
        (root + 6, vec![6, 0], "a node of the level 6"),
    ] {
        let error = open(&patched(&bytes, at, &value))
            .and_then(|volume| of_all(&volume))
            .unwrap_err();
        assert!(
            matches!(error, Ext4Error::Corrupt { .. }),
            "{what}: {error}"
        );
        let said = error.to_string().replace("inode 13", "inode 12");
        let said = said
            .replace("inode 14", "inode 12")
            .replace("inode 15", "inode 12");
        assert!(said.contains(what), "{error}, not {what}");
    }
    // An empty leaf is valid.
    let empty = patched(&bytes, leaf + 2, &[0; 2]);
    assert!(of_all(&open(&empty).unwrap()).is_ok());
}

#[test]
fn entries_of_directories_are_checked() {
    let folder = filled("entries");
    let image = folder.image(&PLAIN, "8M");
    let bytes = image.bytes();
    let block: usize = image.debugfs("blocks /a").trim().parse().unwrap();
    // `.`, `..`, then `b`.
    let b = block * 1024 + 24;
    assert_eq!((bytes[b + 6], bytes[b + 8]), (1, b'b'));
    for (at, value, what) in [
        (b + 4, &[0, 0][..], "an entry of 0 bytes"),
        (b + 4, &[6, 0], "an entry of 6 bytes"),
        (b + 4, &[13, 0], "an entry of 13 bytes"),
        (b + 4, &[0xFC, 0xFF], "an entry of 65532 bytes"),
        (b + 4, &[8, 0], "a name of 1 bytes in an entry of 8"),
        (b + 6, &[0], "the name ''"),
        (b + 8, b"/", "the name '/'"),
        (b + 8, b"\0", "the name '\\x00'"),
        (b, &[0xFF; 4], "inode 4294967295 of"),
        (
            inode_place(&image, "/a") + 4,
            &[1],
            "1025 bytes, and blocks for",
        ),
        (
            inode_place(&image, "/a") + 4,
            &[0, 8],
            "2048 bytes, and blocks for 1024",
        ),
        (
            inode_place(&image, "/a") + 0x6C,
            &[1],
            "bytes, and blocks for 1024",
        ),
        (inode_place(&image, "/a/b"), &[0, 0], "has the mode 0o0"),
        (
            inode_place(&image, "/a/b") + 0x80,
            &[0xFF, 0],
            "255 extra bytes",
        ),
        (inode_place(&image, "/link") + 5, &[0xFF], "a target of"),
    ] {
        let error = open(&patched(&bytes, at, value))
            .and_then(|volume| of_all(&volume))
            .unwrap_err();
        assert!(
            matches!(error, Ext4Error::Corrupt { .. }),
            "{what}: {error}"
        );
        assert!(error.to_string().contains(what), "{error}, not {what}");
    }
    // A directory that contains itself is walked once, but a path may pass through it any number of times.
    image.debugfs("ln /a /a/b/above");
    let volume = image.open();
    assert!(of_all(&volume).is_ok());
    let deep = format!("/a{}/b/file", "/b/above".repeat(200));
    assert_eq!(
        read(&volume, &volume.lookup(&deep).unwrap()).unwrap(),
        [1; 3000]
    );
}

#[test]
fn data_in_inodes_that_are_not_there_are_missed() {
    let folder = Folder::new("missed");
    folder.write("file", &[9; 120]);
    folder.write("directory/a", b"");
    folder.write("directory/b with a long name to need the attribute", b"");
    let image = folder.image(
        &[
            "-t",
            "ext4",
            "-b",
            "1024",
            "-I",
            "256",
            "-O",
            "inline_data,^metadata_csum",
        ],
        "8M",
    );
    let bytes = image.bytes();
    let file = inode_place(&image, "/file");
    assert_eq!(
        read(&image.open(), &image.open().lookup("file").unwrap()).unwrap(),
        [9; 120]
    );
    let entry = file + 128 + usize::from(half(&bytes, file + 0x80)) + 4;
    assert_eq!(word(&bytes, entry - 4), 0xEA02_0000);
    for (at, value) in [
        (entry - 2, &[0][..]),
        (entry, &[5]),
        (entry, &[0xFF]),
        (entry, &[0; 4]),
        (entry + 1, &[1]),
        (entry + 2, &[0xFF, 0xFF]),
        (entry + 4, &[1]),
        (entry + 8, &[1, 0, 0, 0]),
        (entry + 8, &[0xFF; 4]),
        (file + 4, &[0xFF]),
        (file + 0x6C, &[0xFF; 4]),
    ] {
        let ended = open(&patched(&bytes, at, value)).and_then(|volume| of_all(&volume));
        let is_missed = |error: &Ext4Error| error.to_string().contains("bytes of its data");
        assert!(
            ended.as_ref().is_err_and(is_missed),
            "{at} {value:?} {ended:?}"
        );
    }
}

#[test]
fn nothing_that_an_image_says_does_harm() {
    let folder = filled("random");
    for (words, seeds) in [
        (&PLAIN[..], 150),
        (&SUMS[..], 40),
        (
            &[
                "-t",
                "ext4",
                "-b",
                "1024",
                "-O",
                "inline_data,^metadata_csum",
            ][..],
            60,
        ),
    ] {
        let image = folder.image(words, "8M");
        image.index();
        let bytes = image.bytes();
        // Blocks with metadata: all blocks that are not uniform and are no data of `fragments`.
        let blocks: Vec<usize> = (0..bytes.len() / 1024)
            .filter(|block| {
                let block = &bytes[block * 1024..][..1024];
                block[9..].iter().any(|byte| *byte != block[9])
            })
            .collect();
        let mut ends = [0; 2];
        for seed in 0..seeds {
            let mut state = 0x9E37_79B9_7F4A_7C15u64.wrapping_mul(seed + 1);
            let mut next = |below: usize| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state % below as u64) as usize
            };
            let mut broken = bytes.clone();
            for _ in 0..1 + next(30) {
                let at = blocks[next(blocks.len())] * 1024 + next(1024);
                match next(4) {
                    0 => broken[at] ^= 1 << next(8),
                    1 => broken[at] = 0,
                    2 => broken[at] = 0xFF,
                    _ => broken[at] = broken[blocks[next(blocks.len())] * 1024 + next(1024)],
                }
            }
            let ended = open(&broken).and_then(|volume| of_all(&volume));
            ends[usize::from(ended.is_err())] += 1;
        }
        assert!(ends[1] > 0, "{words:?}: {ends:?}");
    }
}
