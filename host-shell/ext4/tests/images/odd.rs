//! Unusual but valid file systems, and features that a reader has to refuse.

use crate::image::{Failing, Folder, open, read};
use nvme_ext4::{DataRefusal, Ext4, Ext4Error, FileKind, flags};

fn simple(name: &str) -> Folder {
    let folder = Folder::new(name);
    folder.write("file", &[7; 20_000]);
    folder.write("directory/inside", b"x");
    folder.link("link", "file");
    folder
}

/// Sets flags of a file in addition to those that it has.
fn set_flags(image: &crate::image::Image, path: &str, more: u32) {
    let flags = image.open().lookup_link(path).unwrap().flags | more;
    image.debugfs(&format!("set_inode_field {path} flags {flags:#x}"));
    assert!(image.open().lookup_link(path).unwrap().has(more));
}

#[test]
fn generation_flags_and_times_are_those_of_the_inode() {
    let folder = simple("stat");
    let image = folder.image(&["-t", "ext4"], "8M");
    image.debugfs("set_inode_field file generation 3405691582");
    image.debugfs("set_inode_field file mtime_extra 0x00000005");
    image.debugfs("set_inode_field file mtime 0x80000000");
    image.debugfs("set_inode_field file uid 70000");
    set_flags(&image, "file", flags::IMMUTABLE);
    let volume = image.open();
    let file = volume.lookup("file").unwrap();
    assert_eq!(
        (file.generation, file.uid, file.links),
        (0xCAFE_BABE, 70_000, 1)
    );
    // The lower two bits are the upper ones of the seconds, the others are nanoseconds.
    assert_eq!(file.modified, ((1 << 32) - (1 << 31), 1));
    assert!(file.has(flags::IMMUTABLE) && file.has(flags::EXTENTS));
    let info = volume.info();
    assert_eq!(info.uuid[..4], [0x01, 0x23, 0x45, 0x67]);
    assert_eq!(info.block_bytes as u64 * info.blocks, 8 << 20);
    assert!(info.has_checksums && !info.has_errors);
}

#[test]
fn unwritten_extents_are_zeros_and_shown() {
    let folder = simple("unwritten");
    let image = folder.image(&["-t", "ext4", "-b", "1024", "-L", "models"], "8M");
    image.debugfs("fallocate file 10 60");
    image.debugfs("set_inode_field file size 50000");
    let volume = image.open();
    assert_eq!(volume.info().label, "models");
    let file = volume.file(&volume.lookup("file").unwrap()).unwrap();
    let extents = file.extents().unwrap();
    let unwritten: u64 = extents
        .iter()
        .filter(|one| !one.is_written)
        .map(|one| one.bytes)
        .sum();
    let written: u64 = extents
        .iter()
        .filter(|one| one.is_written)
        .map(|one| one.bytes)
        .sum();
    // 20 blocks of data; the file ends inside of block 48.
    assert_eq!((written, unwritten), (20 << 10, 29 << 10), "{extents:?}");
    assert_eq!(file.place(), None);
    // The bytes of the device in unwritten extents are not the file's.
    let mut bytes = image.bytes();
    for one in extents.iter().filter(|one| !one.is_written) {
        bytes[one.place as usize..(one.place + one.bytes) as usize].fill(0xEE);
    }
    let volume = open(&bytes).unwrap();
    let data = read(&volume, file.inode()).unwrap();
    assert!(data[..20_000].iter().all(|byte| *byte == 7));
    assert!(data[20_000..].iter().all(|byte| *byte == 0) && data.len() == 50_000);
}

#[test]
fn files_that_cannot_be_read_are_refused_one_by_one() {
    let folder = simple("refused");
    let image = folder.image(&["-t", "ext4", "-O", "encrypt"], "8M");
    set_flags(&image, "file", flags::ENCRYPTED);
    set_flags(&image, "directory", flags::ENCRYPTED);
    set_flags(&image, "link", flags::ENCRYPTED);
    let volume = image.open();
    let is = |error: Ext4Error, expected: DataRefusal| match error {
        Ext4Error::Refused { why, .. } => assert_eq!(why, expected),
        other => panic!("{other}"),
    };
    let [file, directory, link] =
        ["file", "directory", "link"].map(|path| volume.lookup_link(path).unwrap());
    is(volume.file(&file).unwrap_err(), DataRefusal::Encrypted);
    is(volume.list(&directory).unwrap_err(), DataRefusal::Encrypted);
    is(
        volume.lookup("directory/inside").unwrap_err(),
        DataRefusal::Encrypted,
    );
    is(volume.read_link(&link).unwrap_err(), DataRefusal::Encrypted);

    let image = folder.image(&["-t", "ext4"], "8M");
    set_flags(&image, "file", flags::COMPRESSED_BLOCKS);
    let volume = image.open();
    is(
        volume.file(&volume.lookup("file").unwrap()).unwrap_err(),
        DataRefusal::Compressed,
    );

    // Directories have block maps there, too, so that the first path is refused.
    let image = folder.image(&["-t", "ext4", "-O", "^extents,^64bit"], "8M");
    let volume = image.open();
    let error = volume.lookup("file").unwrap_err();
    assert!(!error.remedy().is_empty());
    is(error, DataRefusal::BlockMap);

    let folder = Folder::new("inline");
    folder.write("file", b"short");
    let image = folder.image(&["-t", "ext4", "-O", "inline_data"], "8M");
    let volume = image.open();
    let file = volume.file(&volume.lookup("file").unwrap()).unwrap();
    is(file.extents().unwrap_err(), DataRefusal::Inline);
    assert_eq!(read(&volume, file.inode()).unwrap(), b"short");
}

#[test]
fn files_under_verity_are_read_without_what_follows_their_end() {
    let folder = simple("verity");
    let image = folder.image(&["-t", "ext4", "-O", "verity"], "8M");
    set_flags(&image, "file", flags::VERITY);
    image.debugfs("fallocate file 16 20");
    let volume = image.open();
    let file = volume.file(&volume.lookup("file").unwrap()).unwrap();
    let bytes: u64 = file.extents().unwrap().iter().map(|one| one.bytes).sum();
    assert_eq!(bytes, 20_480, "the tree is not the file's");
    assert_eq!(read(&volume, file.inode()).unwrap(), [7; 20_000]);
}

#[test]
fn features_that_are_not_read_end_the_opening() {
    let folder = simple("features");
    let image = folder.image(&["-t", "ext4"], "8M");
    assert!(image.open().lookup("file").is_ok());
    image.debugfs("feature needs_recovery");
    let unsupported = |bytes: &[u8], what: &str| match open(bytes) {
        Err(error @ Ext4Error::Unsupported { .. }) => {
            assert!(error.to_string().contains(what), "{error}, not {what}");
            assert!(!error.remedy().is_empty());
        }
        other => panic!("{what}: {:?}", other.map(|volume| volume.info().clone())),
    };
    unsupported(&image.bytes(), "journal");
    let plain = folder
        .image(&["-t", "ext4", "-O", "^metadata_csum"], "8M")
        .bytes();
    for (bit, what) in [
        (0x1u32, "compressed"),
        (0x4, "journal"),
        (0x8, "journal of another"),
        (0x1000, "0x1000"),
        (0x8000_0000, "0x80000000"),
    ] {
        let mut bytes = plain.clone();
        let features = u32::from_le_bytes(bytes[1024 + 0x60..][..4].try_into().unwrap()) | bit;
        bytes[1024 + 0x60..][..4].copy_from_slice(&features.to_le_bytes());
        unsupported(&bytes, what);
    }
    let mut bytes = plain.clone();
    bytes[1024 + 0x4C] = 0;
    unsupported(&bytes, "revision 0");
    // Linux clears this bit while a file system without a journal is mounted for writing.
    let words = ["-t", "ext4", "-O", "^metadata_csum,^has_journal"];
    let mut bytes = folder.image(&words, "8M").bytes();
    assert_eq!(bytes[1024 + 0x3A] & 1, 1);
    assert!(open(&bytes).unwrap().lookup("file").is_ok());
    bytes[1024 + 0x3A] &= !1;
    unsupported(&bytes, "mounted for writing elsewhere");
    // Unknown features that only writers have to understand are no reason to refuse.
    let mut bytes = plain.clone();
    bytes[1024 + 0x67] |= 0x80;
    assert!(open(&bytes).unwrap().lookup("file").is_ok());
    // An error that the kernel noted is shown.
    bytes[1024 + 0x3A] |= 2;
    assert!(open(&bytes).unwrap().info().has_errors);
    for bytes in [&plain[..0], &plain[..2047], &vec![0; 1 << 20]] {
        assert!(matches!(open(bytes), Err(Ext4Error::NotExt4 { .. })));
    }
    assert!(matches!(
        open(&plain[..plain.len() - 1]),
        Err(Ext4Error::Corrupt { .. })
    ));
}

#[test]
fn a_file_that_was_replaced_is_noticed() {
    let folder = simple("changed");
    let image = folder.image(&["-t", "ext4"], "8M");
    let before = image.open();
    let file = before.file(&before.lookup("file").unwrap()).unwrap();
    before.check_unchanged(&file).unwrap();
    for command in [
        "set_inode_field file generation 5",
        "set_inode_field file mtime 7",
        "rm file",
    ] {
        image.debugfs(command);
        let error = image.open().check_unchanged(&file).unwrap_err();
        assert!(
            matches!(error, Ext4Error::Changed { .. }),
            "{command}: {error}"
        );
    }
}

#[test]
fn what_the_device_says_is_handed_on() {
    let folder = simple("gone");
    let bytes = folder.image(&["-t", "ext4", "-b", "1024"], "8M").bytes();
    let volume = Ext4::open(bytes.clone()).unwrap();
    let file = volume.file(&volume.lookup("file").unwrap()).unwrap();
    let place = file.place().unwrap();
    let is_read = |error: Ext4Error| {
        assert!(matches!(error, Ext4Error::Read { .. }), "{error}");
        assert!(error.to_string().contains("the device is gone"));
        assert!(std::error::Error::source(&error).is_some());
    };
    is_read(Ext4::open(Failing(bytes.clone(), 0)).unwrap_err());
    is_read(
        Ext4::open(Failing(bytes.clone(), 2048))
            .unwrap()
            .lookup("/")
            .unwrap_err(),
    );
    let volume = Ext4::open(Failing(bytes, place)).unwrap();
    is_read(volume.read_at(&file, 0, &mut [0; 100]).unwrap_err());
    assert_eq!(volume.source().1, place);
}

#[test]
fn other_kinds_of_files_are_known_by_their_kind() {
    let folder = simple("kinds");
    let image = folder.image(&["-t", "ext4"], "8M");
    image.debugfs("mknod pipe p");
    image.debugfs("mknod characters c 1 3");
    image.debugfs("mknod blocks b 8 0");
    let volume = image.open();
    let root = volume.lookup("/").unwrap();
    for (name, kind) in [
        ("pipe", FileKind::Fifo),
        ("characters", FileKind::CharDevice),
        ("blocks", FileKind::BlockDevice),
        ("link", FileKind::Symlink),
        ("file", FileKind::File),
        ("directory", FileKind::Directory),
    ] {
        let inode = volume.lookup_link(name).unwrap();
        assert_eq!(inode.kind, kind, "{name}");
        let entries = volume.list(&root).unwrap();
        let entry = entries
            .iter()
            .find(|one| one.name == name.as_bytes())
            .unwrap();
        assert_eq!((entry.kind, entry.inode), (Some(kind), inode.number));
        assert!(!kind.name().is_empty());
        let is_file = volume.file(&inode).is_ok();
        assert_eq!(is_file, kind == FileKind::File);
    }
}

/// With descriptors as large as a block each group is a meta group of its own, so that its descriptor lies behind a copy
/// of the superblock in the groups 1 and powers of 3, 5 and 7, and at the start of other groups.
#[test]
fn descriptors_of_meta_groups_lie_behind_copies_of_the_superblock() {
    let folder = Folder::new("powers");
    for number in 0..420 {
        folder.write(&format!("f{number:03}"), number.to_string().as_bytes());
    }
    let features = "meta_bg,64bit,sparse_super,^resize_inode,^flex_bg,^has_journal,^metadata_csum";
    let words = [
        "-t", "ext4", "-b", "1024", "-g", "256", "-N", "512", "-O", features,
    ];
    let image = folder.image(&[&words[..], &["-E", "desc_size=1024"]].concat(), "16M");
    let volume = image.open();
    let entries = volume.list(&volume.lookup("/").unwrap()).unwrap();
    let mut groups = std::collections::BTreeSet::new();
    for entry in entries.iter().filter(|one| one.name.starts_with(b"f")) {
        let inode = volume.inode(entry.inode).unwrap();
        let number: u32 = String::from_utf8_lossy(&entry.name[1..]).parse().unwrap();
        assert_eq!(
            read(&volume, &inode).unwrap(),
            number.to_string().as_bytes()
        );
        groups.insert((entry.inode - 1) / 8);
    }
    for group in [1, 3, 5, 7, 9, 25, 27, 49, 50] {
        assert!(groups.contains(&group), "{group} has no file: {groups:?}");
    }
}
