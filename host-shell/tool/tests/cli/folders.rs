//! `cp -r`: folders of a drive, also of one that means harm. The images are seeds of the reader's fuzz target.

use super::files::unpack;
use crate::common::{Folder, Place};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

/// Runs the tool; returns exit code, standard output and standard error.
fn run(folder: &Folder, words: &[&str]) -> (Option<i32>, String, String) {
    let output = folder.command().args(words).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    (output.status.code(), out, err)
}

/// Returns everything below a folder, by path: its kind, and its bytes or target.
fn below(folder: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut left = vec![folder.to_owned()];
    while let Some(path) = left.pop() {
        for entry in fs::read_dir(&path).unwrap() {
            let path = entry.unwrap().path();
            let kind = fs::symlink_metadata(&path).unwrap().file_type();
            let what = if kind.is_dir() {
                left.push(path.clone());
                "folder".to_owned()
            } else if kind.is_symlink() {
                format!("-> {}", fs::read_link(&path).unwrap().display())
            } else {
                format!("{} bytes", fs::metadata(&path).unwrap().len())
            };
            let name = path.strip_prefix(folder).unwrap();
            found.push((name.display().to_string(), what));
        }
    }
    found.sort();
    found
}

#[test]
fn a_folder_is_copied_with_all_that_is_in_it() {
    let folder = Folder::new(Place::Embedded);
    let image = unpack(&folder, "pieces", "drive.img");
    let from = "sim:drive.img:/models";
    let (code, out, said) = run(&folder, &["cp", "-r", from, "copy", "--json"]);
    assert_eq!(code, Some(0), "{said}");
    for left_out in [
        "/models/null is left out: it is a char-device",
        "/models/pipe",
    ] {
        assert!(said.contains(left_out), "{said}");
    }
    let value = serde_json::from_str(&out).unwrap();
    super::json::check_value("cp-folder", &value);
    let counts = ["files", "directories", "links", "bytes"].map(|name| value[name].clone());
    assert_eq!(
        counts,
        [3, 3, 2, 928 + 13_360 + 2500].map(serde_json::Value::from)
    );
    let expected = [
        ("deep", "folder"),
        ("deep/empty", "folder"),
        ("deep/odd", "2500 bytes"),
        ("link", "-> deep/odd"),
        ("model.safetensors", "13360 bytes"),
        ("outside", "-> /etc/passwd"),
        ("rows.npy", "928 bytes"),
    ];
    let expected = expected.map(|(path, what)| (path.to_owned(), what.to_owned()));
    assert_eq!(below(&folder.path("copy")), expected);
    for name in ["deep/odd", "model.safetensors", "rows.npy"] {
        let path = format!("sim:drive.img:/models/{name}");
        let single = folder.path("single");
        assert_eq!(run(&folder, &["cp", &path, "single"]).0, Some(0));
        let copied = fs::read(folder.path("copy").join(name)).unwrap();
        assert!(copied == fs::read(&single).unwrap(), "{name}");
        fs::remove_file(single).unwrap();
    }
    // A copy into an existing folder keeps its own name; a file with -r is copied as a file.
    fs::create_dir(folder.path("into")).unwrap();
    assert_eq!(run(&folder, &["cp", "-r", from, "into"]).0, Some(0));
    assert_eq!(below(&folder.path("into/models")), expected);
    let odd = "sim:drive.img:/models/link";
    assert_eq!(run(&folder, &["cp", "-r", odd, "into"]).0, Some(0));
    assert!(folder.path("into/link").is_file());
    // The root of a file system has no name of its own.
    assert_eq!(
        run(&folder, &["cp", "-r", "sim:drive.img:/", "all"]).0,
        Some(0)
    );
    assert_eq!(below(&folder.path("all/models")), expected);
    assert!(fs::read(folder.path("drive.img")).unwrap() == image);
    assert_eq!(folder.names(), ["all", "copy", "drive.img", "into"]);
}

#[test]
fn permissions_are_those_of_the_drive_without_what_makes_programs_others() {
    let folder = Folder::new(Place::Embedded);
    let mut image = unpack(&folder, "plain", "drive.img");
    // The modes of the directory d and of its file g are found by their old values.
    let mut patched = 0;
    for (mode, to) in [(0o040_755u16, 0o047_000u16), (0o100_644, 0o106_755)] {
        for at in (1024..image.len()).step_by(128) {
            if image[at..at + 2] == mode.to_le_bytes() {
                image[at..at + 2].copy_from_slice(&to.to_le_bytes());
                patched += 1;
            }
        }
    }
    assert!(patched >= 4, "{patched}");
    fs::write(folder.path("drive.img"), image).unwrap();
    let (code, _, said) = run(&folder, &["cp", "-r", "sim:drive.img:/", "copy"]);
    assert_eq!(code, Some(0), "{said}");
    let mode = |name: &str| {
        let about = fs::metadata(folder.path(name)).unwrap();
        about.permissions().mode() & 0o7777
    };
    assert_eq!((mode("copy"), mode("copy/d")), (0o700, 0o700));
    assert_eq!(mode("copy/f") | 0o022, 0o777);
}

#[test]
fn holes_stay_holes() {
    use std::os::unix::fs::MetadataExt;
    let folder = Folder::new(Place::Embedded);
    for (seed, len) in [("fragments", 40_960), ("inline", 100)] {
        let image = format!("{seed}.img");
        unpack(&folder, seed, &image);
        let (from, file) = (format!("sim:{image}:/"), format!("sim:{image}:/f"));
        assert_eq!(run(&folder, &["cp", "-r", &from, seed]).0, Some(0));
        assert_eq!(run(&folder, &["cp", &file, "single"]).0, Some(0));
        let copied = folder.path(seed).join("f");
        assert_eq!(fs::metadata(&copied).unwrap().len(), len);
        assert!(fs::read(&copied).unwrap() == fs::read(folder.path("single")).unwrap());
        let blocks = fs::metadata(&copied).unwrap().blocks() * 512;
        let single = fs::metadata(folder.path("single")).unwrap().blocks() * 512;
        assert!(blocks == single && (blocks < len || len == 100));
    }
}

/// Names and links that a malicious drive could use to have files written elsewhere, or without an end.
#[test]
fn a_drive_that_means_harm_writes_nothing_outside() {
    let folder = Folder::new(Place::Embedded);
    let image = unpack(&folder, "pieces", "drive.img");
    // Returns the first byte of an entry: its inode, its length, the length of its name, its kind, its name.
    let entry = |name: &str| {
        let places = 8..image.len() - name.len();
        let mut places = places.filter(|at| {
            let header = &image[at - 8..*at];
            usize::from(header[6]) == name.len()
                && header[1..4] == [0; 3]
                && image[*at..].starts_with(name.as_bytes())
        });
        places.next().unwrap() - 8
    };
    let patch = |name: &str, at: usize, bytes: &[u8]| {
        let mut image = image.clone();
        let place = entry(name) + at;
        image[place..place + bytes.len()].copy_from_slice(bytes);
        fs::write(folder.path("drive.img"), image).unwrap();
    };
    let from = "sim:drive.img:/models";
    for (name, at, bytes, what) in [
        // A link and a directory have one name: the directory's content would be written to the link's target.
        ("deep", 8, &b"link"[..], "/models has the name 'link' twice"),
        ("odd", 8, b"o/d", "the name 'o/d'"),
        ("odd", 8, b"/tm", "the name '/tm'"),
        ("odd", 8, b"o\0d", "the name"),
        // A directory that is in itself, and one that is there twice.
        (
            "empty",
            0,
            &[12],
            "/models/deep/empty is a directory that is elsewhere, too",
        ),
        ("empty", 0, &[13], "elsewhere"),
        ("odd", 0, &[200], "inode 200 of"),
    ] {
        patch(name, at, bytes);
        let (code, _, said) = run(&folder, &["cp", "-r", from, "copy"]);
        assert_eq!(code, Some(1), "{name} {bytes:?}: {said}");
        assert!(said.contains(what), "{name} {bytes:?}: {said}");
        assert_eq!(folder.names(), ["drive.img"], "{name} {bytes:?}");
    }
    // Such a name is passed over by the reader.
    patch("odd", 6, &[2, 1, b'.', b'.']);
    assert_eq!(run(&folder, &["cp", "-r", from, "copy"]).0, Some(0));
    assert!(!folder.path("copy/deep/odd").exists() && folder.path("copy/link").is_symlink());
    assert_eq!(folder.names(), ["copy", "drive.img"]);
}

#[test]
fn folders_too_deep_are_refused() {
    let folder = Folder::new(Place::Embedded);
    let mut path = folder.path("models");
    for _ in 0..300 {
        path.push("d");
    }
    fs::create_dir_all(&path).unwrap();
    assert_eq!(run(&folder, &["pack", "models", "drive.img"]).0, Some(0));
    let (code, _, said) = run(&folder, &["cp", "-r", "sim:drive.img:/", "copy"]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("inside of 256 folders"), "{said}");
    let further = format!("sim:drive.img:{}", "/d".repeat(200));
    assert_eq!(run(&folder, &["cp", "-r", &further, "copy"]).0, Some(0));
    assert!(folder.path("copy").join("d/".repeat(99)).is_dir());
}

#[test]
fn what_is_not_copied_leaves_nothing() {
    let folder = Folder::new(Place::Embedded);
    unpack(&folder, "pieces", "drive.img");
    fs::create_dir(folder.path("there")).unwrap();
    folder.file("there/models", 10, 1);
    let before = folder.names();
    let faulty = |nth: u32| format!("sim:drive.img?fault=status:0x281@op=read,nth={nth}:/models");
    for (from, to, code, what) in [
        ("sim:drive.img:/models", "copy", 2, "--recursive"),
        (
            "sim:drive.img:/models",
            "there",
            2,
            "there/models is there already",
        ),
        (
            "sim:drive.img:/models",
            "drive.img",
            2,
            "which would be written over",
        ),
        ("sim:drive.img:/models", "no/copy", 4, "no/copy"),
        ("sim:drive.img:/", "there", 2, "no name"),
        ("sim:drive.img:/models/..", "there", 2, "no name"),
        ("sim:drive.img:/none", "copy", 4, "/none"),
        (&faulty(3), "copy", 1, "Unrecovered Read Error"),
        (&faulty(30), "copy", 1, "Unrecovered Read Error"),
        (&faulty(45), "copy", 1, "Unrecovered Read Error"),
    ] {
        let words: &[&str] = match what {
            "--recursive" => &["cp", from, to],
            _ => &["cp", "-r", from, to],
        };
        let (came, out, said) = run(&folder, words);
        assert_eq!(came, Some(code), "{words:?}: {said}");
        assert!(said.contains(what) && out.is_empty(), "{words:?}: {said}");
        assert_eq!(folder.names(), before, "{words:?}");
    }
    let slow = "sim:drive.img?fault=delay:300ms@op=read,every=2:/models";
    let mut command = folder.command();
    let mut child = command.args(["cp", "-r", slow, "copy"]).spawn().unwrap();
    let is_under_way = || folder.names().iter().any(|name| name.ends_with(".part"));
    while !is_under_way() {
        assert!(child.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(5));
    }
    crate::common::interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(folder.names(), before);
}

/// An output has no name until it is complete, if the file system supports such files.
#[test]
fn a_command_that_is_killed_leaves_no_part_of_its_output() {
    use std::os::unix::fs::OpenOptionsExt;
    let folder = Folder::new(Place::Embedded);
    folder.file("disk.img", 1 << 20, 1);
    let mut options = std::fs::File::options();
    options.write(true).custom_flags(libc::O_TMPFILE);
    if options.open(folder.path("")).is_err() {
        return;
    }
    let before = folder.names();
    let device = "sim:disk.img?block=4096&fault=drop@op=read,nth=2";
    let mut command = folder.command();
    command.args([
        "read", "-d", device, "--lba", "0", "--blocks", "256", "-o", "out",
    ]);
    let mut child = command.args(["-t", "60000"]).spawn().unwrap();
    // The command is killed at any point of its progress.
    std::thread::sleep(Duration::from_millis(500));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(folder.names(), before);
}
