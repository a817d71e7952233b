//! Files read from an image equal the files that mke2fs put in, and the files that the crate ext4-view reads.

use crate::image::{Folder, Image, open, read, walk};
use nvme_ext4::{FileKind, flags};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

/// Layouts that ext4-view does not read.
const ALONE: [&str; 8] = [
    "small inodes",
    "no file types",
    "inline",
    "meta_bg",
    "meta_bg, no 64bit",
    "sparse_super2",
    "casefold",
    "verity, large_dir",
];

/// Files of all shapes.
fn fill(folder: &Folder) {
    folder.write("empty", b"");
    folder.write("small", b"a few bytes");
    folder.write("sixty", &[0x5A; 60]);
    folder.write("more", &(0..150u8).collect::<Vec<_>>());
    let long: Vec<u8> = (0..700_001u32)
        .map(|at| (at.wrapping_mul(2_654_435_761) >> 20) as u8)
        .collect();
    folder.write("long", &long);
    folder.sparse(
        "holes",
        5_000_000,
        [(0, 1, 10), (1_000_000, 2, 70_000), (4_999_999, 3, 1)].into_iter(),
    );
    folder.sparse("hole", 100_000, std::iter::empty());
    // Too many extents for one level.
    folder.sparse(
        "fragments",
        419 * 16_384 + 100,
        (0..420).map(|at| (at * 16_384, at as u8 | 1, 100)),
    );
    folder.write("a/b/c/d/deep", b"deep");
    folder.write("a/naïve name with spaces", b"x");
    for number in 0..300 {
        folder.write(
            &format!("many/file with a long name and the number {number}"),
            &[number as u8],
        );
    }
    folder.link("short", "small");
    folder.link("to-directory", "a/b/");
    folder.link("a/b/up", "../../small");
    folder.link("absolute", "/a/b/c/d/deep");
    folder.link("far", &format!("{}small", "a/../".repeat(30)));
    folder.link("nowhere", "not/there");
    folder.link("loop", "loop");
    let mode = fs::Permissions::from_mode(0o640);
    fs::set_permissions(folder.files().join("small"), mode).unwrap();
}

/// Checks that the source files, this crate's files and ext4-view's files are the same.
fn compare(folder: &Folder, image: &Image, what: &str) {
    let volume = image.open();
    let bytes = image.bytes();
    let other = match ALONE.contains(&what) {
        true => None,
        false => Some(ext4_view::Ext4::load(Box::new(bytes.clone())).unwrap()),
    };
    let block = u64::from(volume.info().block_bytes);
    let mut found = BTreeMap::new();
    for (path, inode) in walk(&volume, usize::MAX).unwrap() {
        assert!(found.insert(path, inode).is_none());
    }
    let lost = found.remove(Path::new("/lost+found")).unwrap();
    assert_eq!(lost.kind, FileKind::Directory);
    let mut left = vec![folder.files()];
    let mut count = 0;
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let from = entry.unwrap().path();
            if what == "inline" && from.ends_with("hole") {
                // mke2fs 1.47 makes the file empty in this layout.
                count += 1;
                continue;
            }
            let path = Path::new("/").join(from.strip_prefix(folder.files()).unwrap());
            let about = fs::symlink_metadata(&from).unwrap();
            let inode = &found[&path];
            let text = path.to_str().unwrap();
            count += 1;
            assert_eq!(*inode, volume.lookup_link(text).unwrap(), "{what}: {text}");
            assert_eq!(
                u32::from(inode.permissions),
                about.mode() & 0o7777,
                "{what}: {text}"
            );
            assert_eq!((inode.uid, inode.gid), (about.uid(), about.gid()));
            assert_eq!(inode.modified.0, about.mtime(), "{what}: {text}");
            if let Some(other) = &other {
                let theirs = other.symlink_metadata(text).unwrap();
                assert_eq!(
                    (theirs.len(), theirs.uid()),
                    (inode.size, inode.uid),
                    "{what}: {text}"
                );
                assert_eq!(theirs.mode() & 0o7777, inode.permissions);
            }
            if about.is_dir() {
                assert_eq!(inode.kind, FileKind::Directory);
                left.push(from);
            } else if about.is_symlink() {
                let target = fs::read_link(&from).unwrap();
                let ours = volume.read_link(inode).unwrap();
                assert_eq!(
                    ours,
                    target.as_os_str().as_encoded_bytes(),
                    "{what}: {text}"
                );
            } else {
                let expected = fs::read(&from).unwrap();
                assert!(read(&volume, inode).unwrap() == expected, "{what}: {text}");
                if let Some(other) = &other {
                    assert!(other.read(text).unwrap() == expected, "{what}: {text}");
                }
                extents(&volume.file(inode).unwrap(), &bytes, &expected, block, text);
                volume
                    .check_unchanged(&volume.file(inode).unwrap())
                    .unwrap();
            }
        }
    }
    assert_eq!(count, found.len(), "{what}");
}

/// Checks that the bytes of the image in the extents are the file's; elsewhere the file has zeros.
fn extents(file: &nvme_ext4::FileData, image: &[u8], expected: &[u8], block: u64, text: &str) {
    if file.inode().has(flags::INLINE_DATA) {
        assert!(matches!(
            file.extents(),
            Err(nvme_ext4::Ext4Error::Refused { .. })
        ));
        assert_eq!(file.place(), None);
        return;
    }
    let mut built = vec![0; expected.len().next_multiple_of(block as usize)];
    let extents = file.extents().unwrap();
    for one in &extents {
        assert!(one.place.is_multiple_of(block) && one.bytes.is_multiple_of(block));
        let to = one.logical as usize..(one.logical + one.bytes) as usize;
        if one.is_written {
            built[to].copy_from_slice(&image[one.place as usize..(one.place + one.bytes) as usize]);
        }
    }
    assert!(built[..expected.len()] == *expected, "{text}");
    let is_whole = extents.len() == 1 && extents[0].logical == 0 && extents[0].is_written;
    let is_whole = is_whole && extents[0].bytes as usize >= expected.len();
    assert_eq!(file.place(), is_whole.then(|| extents[0].place), "{text}");
}

/// Options for 96 groups with 8 inodes each, so that the files lie in groups of several meta groups.
fn layout_of_groups(features: &str) -> [&str; 10] {
    let groups = ["-t", "ext4", "-b", "1024", "-g", "256", "-N", "768"];
    let mut words = [""; 10];
    words[..8].copy_from_slice(&groups);
    words[8..].copy_from_slice(&["-O", features]);
    words
}

#[test]
fn every_layout_has_the_files_that_went_in() {
    let folder = Folder::new("agrees");
    fill(&folder);
    for (name, words) in [
        ("ext4", &["-t", "ext4", "-b", "4096"][..]),
        ("1 KiB", &["-t", "ext4", "-b", "1024"]),
        ("small inodes", &["-t", "ext4", "-b", "2048", "-I", "128"]),
        ("64 KiB", &["-t", "ext4", "-b", "65536"]),
        (
            "no 64bit",
            &["-t", "ext4", "-O", "^64bit,^metadata_csum,uninit_bg"],
        ),
        ("no checksums", &["-t", "ext4", "-O", "^metadata_csum"]),
        ("no file types", &["-t", "ext4", "-O", "^filetype"]),
        ("seed", &["-t", "ext4", "-O", "metadata_csum_seed"]),
        ("inline", &["-t", "ext4", "-I", "512", "-O", "inline_data"]),
        ("meta_bg", &layout_of_groups("meta_bg,^resize_inode")),
        (
            "meta_bg, no 64bit",
            &layout_of_groups("meta_bg,^resize_inode,^64bit,^sparse_super"),
        ),
        (
            "sparse_super2",
            &layout_of_groups("meta_bg,^resize_inode,sparse_super2"),
        ),
        ("bigalloc", &["-t", "ext4", "-O", "bigalloc", "-C", "65536"]),
        (
            "casefold",
            &["-t", "ext4", "-O", "casefold", "-E", "encoding=utf8"],
        ),
        (
            "verity, large_dir",
            &["-t", "ext4", "-O", "verity,large_dir,ea_inode,quota"],
        ),
    ] {
        let size = match name {
            "64 KiB" | "bigalloc" => "96M",
            _ => "24M",
        };
        let image = folder.image(words, size);
        compare(&folder, &image, name);
        if matches!(name, "ext4" | "1 KiB" | "no checksums") {
            image.index();
            let many = image.open().lookup("/many").unwrap();
            assert!(many.has(flags::INDEX), "{name}");
            compare(&folder, &image, &format!("{name}, indexed"));
        }
    }
}

#[test]
fn paths_and_links_lead_where_they_say() {
    let folder = Folder::new("paths");
    fill(&folder);
    let image = folder.image(&["-t", "ext4"], "24M");
    let volume = image.open();
    let small = volume.lookup("/small").unwrap();
    for path in [
        "small",
        "//small",
        "/./a/../small",
        "short",
        "a/b/up",
        "to-directory/up",
        "far",
        "../../small",
        "a/b/c/../../../short",
    ] {
        assert_eq!(volume.lookup(path).unwrap(), small, "{path}");
    }
    assert_eq!(
        read(&volume, &volume.lookup("absolute").unwrap()).unwrap(),
        b"deep"
    );
    assert_eq!(volume.lookup("/").unwrap().number, 2);
    assert_eq!(
        volume.lookup("to-directory").unwrap().kind,
        FileKind::Directory
    );
    assert_eq!(
        volume.lookup_link("to-directory").unwrap().kind,
        FileKind::Symlink
    );
    use nvme_ext4::Ext4Error;
    for (path, is_right) in [
        (
            "/none",
            (|error| matches!(error, Ext4Error::NotFound { .. })) as fn(&Ext4Error) -> bool,
        ),
        ("/nowhere", |error| {
            matches!(error, Ext4Error::NotFound { .. })
        }),
        ("/loop", |error| {
            matches!(error, Ext4Error::TooManyLinks { .. })
        }),
        ("/small/x", |error| {
            matches!(
                error,
                Ext4Error::WrongKind {
                    wanted: "directory",
                    ..
                }
            )
        }),
        ("/small/..", |error| {
            matches!(error, Ext4Error::WrongKind { .. })
        }),
    ] {
        let error = volume.lookup(path).unwrap_err();
        assert!(is_right(&error), "{path}: {error}");
        assert!(!error.remedy().is_empty() && !error.to_string().is_empty());
    }
    let root = volume.lookup("/").unwrap();
    assert!(matches!(
        volume.file(&root),
        Err(Ext4Error::WrongKind { .. })
    ));
    assert!(matches!(
        volume.read_link(&root),
        Err(Ext4Error::WrongKind { .. })
    ));
    assert!(matches!(
        volume.list(&small),
        Err(Ext4Error::WrongKind { .. })
    ));
    for number in [0, volume.info().inodes + 1, u32::MAX] {
        assert!(
            matches!(volume.inode(number), Err(Ext4Error::Corrupt { .. })),
            "{number}"
        );
    }
}

#[test]
fn any_part_of_a_file_can_be_read() {
    let folder = Folder::new("parts");
    fill(&folder);
    for words in [
        &["-t", "ext4", "-b", "1024"][..],
        &["-t", "ext4", "-O", "inline_data", "-I", "1024"],
    ] {
        let volume = open(&folder.image(words, "24M").bytes()).unwrap();
        for name in ["fragments", "holes", "long", "more", "sixty", "empty"] {
            let expected = fs::read(folder.files().join(name)).unwrap();
            let file = volume.file(&volume.lookup(name).unwrap()).unwrap();
            assert_eq!(
                (file.len(), file.is_empty()),
                (expected.len() as u64, name == "empty")
            );
            let mut at = 0;
            for step in 1u64.. {
                let mut data = vec![0xAA; (step * 977 % 40_000) as usize];
                let bytes = volume.read_at(&file, at, &mut data).unwrap();
                let left = &expected[(at as usize).min(expected.len())..];
                assert_eq!(bytes, left.len().min(data.len()));
                assert!(data[..bytes] == left[..bytes], "{name} at {at}");
                if at > expected.len() as u64 {
                    break;
                }
                at += step * step * 31;
            }
            assert_eq!(volume.read_at(&file, u64::MAX, &mut [0; 9]).unwrap(), 0);
        }
    }
}
