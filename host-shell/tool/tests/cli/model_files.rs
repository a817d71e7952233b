//! Files of tensors that are several, longer than their header says, or no files at all.

use super::files::unpack;
use crate::common::{Folder, Place};
use std::os::unix::fs::MetadataExt;
use std::process::Command;

/// Runs the tool; returns exit code, standard output and standard error.
fn run(folder: &Folder, words: &[&str]) -> (Option<i32>, String, String) {
    let output = folder.command().args(words).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    (output.status.code(), out, err)
}

fn refused(folder: &Folder, words: &[&str], code: i32, what: &str) {
    let (found, _, said) = run(folder, words);
    assert_eq!(found, Some(code), "{words:?}: {said}");
    assert!(said.contains(what), "{words:?}: {said}, not {what}");
}

fn json(folder: &Folder, words: &[&str]) -> serde_json::Value {
    let words = [words, &["--json"]].concat();
    let (code, out, said) = run(folder, &words);
    assert_eq!(code, Some(0), "{words:?}: {said}");
    serde_json::from_str(&out).unwrap()
}

fn safetensors(name: &str, bytes: usize) -> Vec<u8> {
    let header =
        format!(r#"{{"{name}":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(name.bytes().cycle().take(bytes));
    file
}

/// Writes two files and their index; returns the bytes of both.
fn model(folder: &Folder) -> [Vec<u8>; 2] {
    let index = r#"{"metadata":{},"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors"}}"#;
    std::fs::write(folder.path("model.safetensors.index.json"), index).unwrap();
    let files = [safetensors("a", 5000), safetensors("b", 70)];
    for (number, file) in files.iter().enumerate() {
        let name = format!("m-{}.safetensors", number + 1);
        std::fs::write(folder.path(&name), file).unwrap();
    }
    files
}

#[test]
fn the_files_of_an_index_are_imported_and_verified() {
    let folder = Folder::new(Place::Embedded);
    let files = model(&folder);
    let index = "model.safetensors.index.json";
    let place = ["-d", "file:drive", "--offset", "512"];
    let words = |verb| [&[verb, index], &place[..]].concat();
    std::fs::write(folder.path("drive"), vec![0; 1 << 20]).unwrap();
    let said = json(&folder, &words("import"));
    super::json::check_value("import", &said);
    let bytes = (files[0].len() + files[1].len()) as u64;
    assert_eq!(
        (&said["bytes"], &said["written"]),
        (&bytes.into(), &bytes.into())
    );
    let of = said["files"].as_array().unwrap();
    assert_eq!(of.len(), 2);
    assert_eq!(of[1]["offset"], 512 + 8192);
    let drive = std::fs::read(folder.path("drive")).unwrap();
    for (file, begin) in files.iter().zip([512, 512 + 8192]) {
        assert_eq!(&drive[begin..begin + file.len()], &file[..]);
    }
    let said = json(&folder, &words("verify"));
    super::json::check_value("verify", &said);
    let again = [&words("import")[..], &["--resume"]].concat();
    assert_eq!(json(&folder, &again)["written"], 0);
    let mut drive = drive;
    drive[512 + 8192 + 100] ^= 1;
    std::fs::write(folder.path("drive"), drive).unwrap();
    refused(&folder, &words("verify"), 3, "m-2.safetensors has the XXH3");
    // A device on which the last file does not fit.
    std::fs::write(folder.path("small"), vec![0; 8192 + 100]).unwrap();
    refused(
        &folder,
        &["import", index, "-d", "file:small"],
        2,
        "use a larger device",
    );
    assert_eq!(
        std::fs::read(folder.path("small")).unwrap(),
        vec![0; 8192 + 100]
    );
    // Commands for one file refuse an index.
    for words in [
        &["generate", index, "-p", "x"][..],
        &["manifest", index, "-o", "out"],
        &["catalog", index],
    ] {
        let (code, _, said) = run(&folder, words);
        match words[0] {
            "catalog" => assert_eq!(code, Some(0), "{said}"),
            "generate" => assert!(code == Some(2) && said.contains("several files"), "{said}"),
            _ => assert!(code == Some(2) && said.contains("a text of JSON"), "{said}"),
        }
    }
    std::fs::remove_file(folder.path("m-2.safetensors")).unwrap();
    refused(
        &folder,
        &words("import"),
        2,
        "1 of 2 files are missing: m-2.safetensors",
    );
    std::fs::write(folder.path("other.json"), "{}").unwrap();
    refused(
        &folder,
        &["import", "other.json", "-d", "file:drive"],
        2,
        "weight_map",
    );
    refused(
        &folder,
        &["catalog", "."],
        2,
        "a directory, not a regular file",
    );
}

/// Returns a part of a split GGUF without tensors.
fn part(number: u16, count: u16) -> Vec<u8> {
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend([0u64, 3].map(u64::to_le_bytes).as_flattened());
    let mut key = |name: &str, kind: u32, value: &[u8]| {
        file.extend((name.len() as u64).to_le_bytes());
        file.extend(name.as_bytes());
        file.extend(kind.to_le_bytes());
        file.extend(value);
    };
    key("split.no", 2, &number.to_le_bytes());
    key("split.count", 2, &count.to_le_bytes());
    key("split.tensors.count", 5, &[0; 4]);
    file.resize(file.len().next_multiple_of(32), 0);
    file
}

#[test]
fn a_split_gguf_is_one_model_or_none() {
    let folder = Folder::new(Place::Embedded);
    let names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];
    for (number, name) in names.iter().enumerate() {
        std::fs::write(folder.path(name), part(number as u16, 2)).unwrap();
    }
    std::fs::write(folder.path("drive"), vec![0; 1 << 20]).unwrap();
    assert_eq!(
        json(&folder, &["catalog", names[0]])["files"][1]["offset"],
        4096
    );
    refused(
        &folder,
        &["catalog", names[1]],
        2,
        "it is part 2 of 2 of a split GGUF",
    );
    refused(
        &folder,
        &["generate", names[0], "-p", "x"],
        2,
        "several files",
    );
    refused(
        &folder,
        &["manifest", names[0], "-o", "out"],
        2,
        "it is part 1 of 2",
    );
    let said = json(&folder, &["import", names[0], "-d", "file:drive"]);
    assert_eq!(said["files"].as_array().unwrap().len(), 2);
    // A first part that is not complete represents the others all the same.
    let first = std::fs::read(folder.path(names[0])).unwrap();
    std::fs::write(folder.path(names[0]), &first[..first.len() - 40]).unwrap();
    for verb in ["import", "verify"] {
        refused(&folder, &[verb, names[0], "-d", "file:drive"], 2, names[0]);
    }
    std::fs::write(folder.path(names[0]), first).unwrap();
    std::fs::remove_file(folder.path(names[1])).unwrap();
    let missing = "1 of 2 parts are missing: m-00002-of-00002.gguf";
    refused(&folder, &["catalog", names[0]], 2, missing);
    refused(
        &folder,
        &["import", names[0], "-d", "file:drive"],
        2,
        missing,
    );
}

#[test]
fn bytes_after_a_file_are_refused_by_each_command() {
    let folder = Folder::new(Place::Embedded);
    let whole = safetensors("a", 64);
    let longer = [&whole[..], b"more"].concat();
    std::fs::write(folder.path("longer"), &longer).unwrap();
    let what = "its header describes";
    for words in [
        &["catalog", "longer"][..],
        &["manifest", "longer", "-o", "out"],
        &["manifest", "file:longer", "--offset", "0", "-o", "out"],
        &["generate", "longer", "-p", "x"],
        &["generate", "file:longer", "--offset", "0", "-p", "x"],
    ] {
        refused(&folder, words, 2, what);
    }
    let size = whole.len().to_string();
    let words = [
        "manifest",
        "file:longer",
        "--offset",
        "0",
        "--bytes",
        &size,
        "-o",
        "out",
    ];
    let (code, _, said) = run(&folder, &words);
    assert_eq!(code, Some(0), "{said}");
    refused(
        &folder,
        &["manifest", "longer", "--bytes", "9", "-o", "out"],
        2,
        "--offset",
    );
}

#[test]
fn a_pipe_is_no_file_and_nothing_waits_for_its_writer() {
    let folder = Folder::new(Place::Embedded);
    let made = Command::new("mkfifo")
        .arg(folder.path("pipe.gguf"))
        .status();
    assert!(made.unwrap().success());
    std::fs::write(folder.path("plain"), safetensors("a", 64)).unwrap();
    std::fs::write(folder.path("drive"), vec![0; 1 << 20]).unwrap();
    for words in [
        &["catalog", "pipe.gguf"][..],
        &["manifest", "pipe.gguf", "-o", "out"],
        &["import", "pipe.gguf", "-d", "file:drive"],
        &["verify", "pipe.gguf", "-d", "file:drive"],
        &["generate", "plain", "--manifest", "pipe.gguf", "-p", "x"],
        &["stat", "./pipe.gguf"],
    ] {
        refused(&folder, words, 2, "a pipe, not a regular file");
    }
    refused(
        &folder,
        &["generate", "pipe.gguf", "-p", "x"],
        2,
        "is not a regular file",
    );
    refused(
        &folder,
        &["ls", "file:pipe.gguf:/"],
        2,
        "neither a file nor",
    );
}

#[test]
fn a_copy_has_the_holes_of_its_file() {
    let folder = Folder::new(Place::Embedded);
    std::fs::create_dir(folder.path("files")).unwrap();
    let long = std::fs::File::create(folder.path("files/long")).unwrap();
    let part = |at| std::os::unix::fs::FileExt::write_all_at(&long, &[7; 4096], at).unwrap();
    part(4096);
    part(40 << 20);
    long.set_len(64 << 20).unwrap();
    let mut mke2fs = Command::new("mke2fs");
    let path = std::env::var("PATH").unwrap_or_default();
    mke2fs.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    mke2fs.args(["-q", "-t", "ext4", "-b", "4096", "-O", "^has_journal", "-d"]);
    mke2fs
        .arg(folder.path("files"))
        .arg(folder.path("image"))
        .arg("8M");
    assert!(mke2fs.status().expect("install e2fsprogs").success());
    let (code, _, said) = run(&folder, &["cp", "file:image:/long", "copy"]);
    assert_eq!(code, Some(0), "{said}");
    let expected = std::fs::read(folder.path("files/long")).unwrap();
    assert!(
        std::fs::read(folder.path("copy")).unwrap() == expected,
        "other bytes"
    );
    let taken = std::fs::metadata(folder.path("copy")).unwrap().blocks() * 512;
    assert!(taken < 1 << 20, "{taken} bytes of {}", expected.len());
    let out = folder
        .command()
        .args(["cat", "file:image:/long"])
        .output()
        .unwrap();
    assert!(out.stdout == expected, "other bytes");
    // A file of nothing but a hole, and one without bytes, which this image has.
    unpack(&folder, "plain", "ext4.img");
    let (code, _, said) = run(&folder, &["cp", "file:ext4.img:/f", "small"]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(std::fs::metadata(folder.path("small")).unwrap().len(), 40);
}

#[test]
fn a_file_system_that_is_in_use_is_refused_and_one_with_errors_is_said() {
    let folder = Folder::new(Place::Embedded);
    let mut image = unpack(&folder, "plain", "ext4.img");
    let state = 1024 + 0x3A;
    image[state] |= 2;
    std::fs::write(folder.path("ext4.img"), &image).unwrap();
    let (code, out, said) = run(&folder, &["ls", "file:ext4.img:/"]);
    assert!(code == Some(0) && out.contains(" f"), "{out}{said}");
    assert!(
        said.contains("Linux has noted errors in the file system"),
        "{said}"
    );
    image[state] = 0;
    std::fs::write(folder.path("ext4.img"), &image).unwrap();
    refused(
        &folder,
        &["cat", "file:ext4.img:/f"],
        1,
        "mounted for writing elsewhere",
    );
    std::fs::write(folder.path("ext4.img"), vec![0; 1 << 20]).unwrap();
    refused(
        &folder,
        &["ls", "file:ext4.img:/"],
        1,
        "nothing but zeros at its begin",
    );
}
