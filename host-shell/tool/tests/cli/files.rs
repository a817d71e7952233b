//! Files of an ext4 on a drive, and files of tensors. The images are seeds of the reader's fuzz target.

use super::rows::check_shell;
use crate::common::{Folder, Place};
use std::path::Path;

/// Writes the image of a seed of the fuzzer: the seed has the image's size, then numbers of blocks with their content.
pub fn unpack(folder: &Folder, seed: &str, name: &str) -> Vec<u8> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/ext4");
    let seed = std::fs::read(corpus.join(seed)).unwrap();
    let number = |at: usize| usize::from(u16::from_le_bytes([seed[at], seed[at + 1]]));
    let mut image = vec![0; (number(0) + 4) * 1024];
    for at in (2..seed.len()).step_by(1026) {
        image[number(at) * 1024..][..1024].copy_from_slice(&seed[at + 2..at + 1026]);
    }
    std::fs::write(folder.path(name), &image).unwrap();
    image
}

/// Writes `ext4.img` and `two.safetensors` for commands that read.
pub fn write_image(folder: &Folder) {
    unpack(folder, "plain", "ext4.img");
    let header =
        r#"{"__metadata__":{"by":"us"},"a":{"dtype":"U8","shape":[2,3],"data_offsets":[0,6]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend([1; 6]);
    std::fs::write(folder.path("two.safetensors"), file).unwrap();
}

/// Runs the tool without a served device: the device is not the value of an option.
fn ok(folder: &Folder, words: &[&str]) -> String {
    let output = folder.command().args(words).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

fn json(folder: &Folder, words: &[&str]) -> serde_json::Value {
    let text = ok(folder, &[words, &["--json"]].concat());
    serde_json::from_str(&text).unwrap()
}

#[test]
fn directories_and_files_of_a_drive_are_shown_and_copied() {
    let folder = Folder::new(Place::Embedded);
    write_image(&folder);
    for device in ["sim:ext4.img", "file:ext4.img", "./ext4.img"] {
        let of = |path: &str| format!("{device}:{path}");
        let listed = ok(&folder, &["ls", &of("/")]);
        let lines: Vec<&str> = listed.lines().collect();
        assert_eq!(lines.len(), 4, "{listed}");
        assert!(
            lines[0].starts_with("drwx") && lines[0].ends_with(" d"),
            "{listed}"
        );
        assert!(
            lines[1].contains(" 40 f") && lines[3].ends_with("l -> f"),
            "{listed}"
        );
        assert!(ok(&folder, &["ls", &of("/d/")]).contains(" 0 g"));
        assert_eq!(ok(&folder, &["ls", &of("/f")]).lines().count(), 1);
        assert_eq!(ok(&folder, &["cat", &of("/far")]), "data".repeat(10));
        ok(&folder, &["cp", &of("/l"), "copy"]);
        assert_eq!(
            std::fs::read(folder.path("copy")).unwrap(),
            "data".repeat(10).as_bytes()
        );
        std::fs::create_dir_all(folder.path("into")).unwrap();
        ok(&folder, &["cp", &of("/f"), "into"]);
        assert!(folder.path("into/f").is_file());
        let about = json(&folder, &["stat", &of("/f")]);
        let extent = &about["extents"][0];
        assert_eq!(
            (&about["bytes"], &about["kind"]),
            (&40.into(), &"file".into())
        );
        let place = extent["place"].as_u64().unwrap() as usize;
        let image = std::fs::read(folder.path("ext4.img")).unwrap();
        assert_eq!(image[place..place + 40], *"data".repeat(10).as_bytes());
        let text = ok(&folder, &["stat", &of("/l")]);
        assert!(
            text.contains("symlink") && text.contains("target"),
            "{text}"
        );
        assert!(!text.contains("null"), "{text}");
    }
    // A file that cannot be read can be described.
    unpack(&folder, "inline", "inline.img");
    let about = json(&folder, &["stat", "sim:inline.img:/f"]);
    assert!(
        about["no_extents"]
            .as_str()
            .unwrap()
            .contains("in the inode")
    );
    assert_eq!(ok(&folder, &["cat", "sim:inline.img:/f"]), "i".repeat(100));
}

#[test]
fn tensors_are_listed_from_files_and_drives() {
    let folder = Folder::new(Place::Embedded);
    write_image(&folder);
    let text = ok(&folder, &["catalog", "two.safetensors", "--metadata"]);
    assert!(
        text.contains("by = \"us\"") && text.contains("uint8") && text.contains("(2, 3)"),
        "{text}"
    );
    assert!(text.ends_with("1 tensors, 6 B of data\n"), "{text}");
    // The header of a GGUF file that a fuzz target begins with, and its keys.
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/gguf");
    for (seed, tensors) in [("values", 0), ("types", 8)] {
        let seed = std::fs::read(corpus.join(seed)).unwrap();
        let bytes = [b"GGUF\x03\0\0\0", &seed[..seed.len() - 2]].concat();
        std::fs::write(folder.path("model.gguf"), bytes).unwrap();
        let found = json(&folder, &["catalog", "model.gguf", "-m"]);
        assert_eq!(found["format"], "gguf");
        assert_eq!(found["tensors"].as_array().unwrap().len(), tensors);
        assert!(!found["metadata"].as_array().unwrap().is_empty());
        ok(&folder, &["catalog", "model.gguf", "-m"]);
    }
}

/// Needs e2fsprogs, which the stage of the tests installs.
#[test]
fn a_folder_becomes_an_image_whose_files_lie_in_one_piece() {
    let folder = Folder::new(Place::Embedded);
    write_image(&folder);
    std::fs::create_dir_all(folder.path("models/deep/empty")).unwrap();
    folder.file("models/long", 9 << 20, 1);
    folder.file("models/deep/odd", 5000, 2);
    std::fs::write(folder.path("models/none"), b"").unwrap();
    std::fs::copy(
        folder.path("two.safetensors"),
        folder.path("models/two.safetensors"),
    )
    .unwrap();
    std::os::unix::fs::symlink("deep/odd", folder.path("models/link")).unwrap();
    let made = json(
        &folder,
        &["pack", "models", "packed.img", "--label", "mine"],
    );
    assert_eq!(
        (&made["files"], &made["in_pieces"]),
        (&4.into(), &serde_json::json!([]))
    );
    let image = std::fs::metadata(folder.path("packed.img")).unwrap().len();
    assert_eq!(made["image_bytes"], image);
    super::json::check_value("pack", &made);
    ok(&folder, &["cp", "sim:packed.img:/long", "copy"]);
    let both = ["copy", "models/long"].map(|name| std::fs::read(folder.path(name)).unwrap());
    assert!(both[0] == both[1]);
    let about = json(&folder, &["stat", "sim:packed.img:/long"]);
    assert_eq!(about["extents"].as_array().unwrap().len(), 1);
    assert_eq!(about["extents"][0]["place"].as_u64().unwrap() % 4096, 0);
    let tensors = ok(&folder, &["catalog", "sim:packed.img:/two.safetensors"]);
    assert!(tensors.contains("1 tensors"), "{tensors}");
    assert!(ok(&folder, &["ls", "sim:packed.img:/"]).contains("link -> deep/odd"));
    std::fs::remove_file(folder.path("packed.img")).unwrap();
    let text = ok(&folder, &["pack", "models/deep", "packed.img"]);
    assert!(
        text.contains("1 files, 4.9 KiB of data, compared"),
        "{text}"
    );
}

/// Links and folders take inodes and blocks like files; names are bytes.
#[test]
fn a_folder_of_links_and_folders_becomes_an_image() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;
    let folder = Folder::new(Place::Embedded);
    for at in 0..1500 {
        let long = "x".repeat(if at < 100 { 200 } else { 20 });
        std::fs::create_dir_all(folder.path(&format!("models/folder{at}"))).unwrap();
        symlink(&long, folder.path(&format!("models/link{at}"))).unwrap();
    }
    let models = folder.path("models");
    let named = |name: &[u8]| models.join(OsStr::from_bytes(name));
    std::fs::write(named(b"file\xff"), b"content").unwrap();
    symlink("file", named(b"link\xff")).unwrap();
    std::fs::write(models.join("words"), "some words").unwrap();
    let made = json(&folder, &["pack", "models", "packed.img"]);
    assert_eq!(made["files"], 2);
    let shown = json(&folder, &["ls", "sim:packed.img:/"]);
    let entries = shown["entries"].as_array().unwrap();
    let links = entries.iter().filter(|entry| entry["kind"] == "symlink");
    assert_eq!(links.clone().count(), 1501);
    assert!(links.clone().all(|link| link["target"].is_string()));
    assert_eq!(entries.len(), 1500 + 1501 + 2 + 1, "with lost+found");
    // The bytes alone are on standard output.
    let copied = ok(&folder, &["cp", "sim:packed.img:/words", "-", "--json"]);
    assert_eq!(copied, "some words");
}

#[test]
fn a_program_that_says_much_is_waited_for() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new(Place::Embedded);
    std::fs::create_dir(folder.path("models")).unwrap();
    let path = folder.path("talks");
    let text =
        "#!/bin/sh\nhead -c 200000 /dev/zero | tr '\\0' '\\n' >&2\necho the reason >&2\nexit 3\n";
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
    let mut command = folder.command();
    command
        .args(["pack", "models", "packed.img"])
        .env("MKE2FS", "./talks");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(6), "{said}");
    assert!(said.contains("mke2fs failed: the reason"), "{said}");
}

#[test]
fn an_image_that_cannot_be_made_is_not_there() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new(Place::Embedded);
    std::fs::create_dir(folder.path("models")).unwrap();
    folder.file("models/a", 100, 1);
    folder.file("there", 100, 1);
    for (name, text) in [
        (
            "fails",
            "echo first >&2; echo no room >&2; : > packed.img; exit 3",
        ),
        ("lies", ": > packed.img"),
        ("replaces", "cp there new; mv new packed.img; exit 3"),
        ("waits", ": > packed.img; exec sleep 30"),
    ] {
        let path = folder.path(name);
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
    }
    let before = folder.names();
    for (program, words, code, what) in [
        ("./none", &["models", "packed.img"][..], 6, "e2fsprogs"),
        (
            "./fails",
            &["models", "packed.img"],
            6,
            "mke2fs failed: no room",
        ),
        ("./lies", &["models", "packed.img"], 1, "no ext4"),
        ("mke2fs", &["models", "there"], 2, "is there already"),
        ("mke2fs", &["none", "packed.img"], 4, "none"),
        ("mke2fs", &["there", "packed.img"], 4, "there"),
        (
            "mke2fs",
            &["models", "packed.img", "--label", "more than 16 bytes"],
            2,
            "above 16",
        ),
    ] {
        let mut command = folder.command();
        let output = command
            .arg("pack")
            .args(words)
            .env("MKE2FS", program)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(
            output.status.code(),
            Some(code),
            "{program} {words:?}: {said}"
        );
        assert!(said.contains(what), "{program} {words:?}: {said}");
        assert_eq!(folder.names(), before, "{program} {words:?}");
    }
    // A file that has taken the image's place is another's.
    let mut command = folder.command();
    command.args(["pack", "models", "packed.img"]);
    let status = command.env("MKE2FS", "./replaces").status().unwrap();
    assert_eq!(status.code(), Some(6));
    let [left, there] = ["packed.img", "there"].map(|name| std::fs::read(folder.path(name)));
    assert_eq!(left.unwrap(), there.unwrap());
    std::fs::remove_file(folder.path("packed.img")).unwrap();
    let mut command = folder.command();
    let mut child = command
        .args(["pack", "models", "packed.img"])
        .env("MKE2FS", "./waits")
        .spawn()
        .unwrap();
    while !folder.path("packed.img").exists() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    crate::common::interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(folder.names(), before);
}

#[test]
fn a_file_is_written_found_again_and_resumed() {
    let folder = Folder::new(Place::Embedded);
    let long = folder.file("long", 20 << 20, 1);
    folder.file("other", 5000, 2);
    let at = ["long", "-d", "sim:disk.img?size=32MiB", "--offset", "4097"];
    let with = |verb: &'static str, more: &[&'static str]| -> Vec<&'static str> {
        [&[verb], &at[..], more].concat()
    };
    let first = json(&folder, &with("import", &[]));
    assert_eq!(first["written"], 20 << 20);
    let verified = json(&folder, &with("verify", &[]));
    assert_eq!(
        (&verified["xxh3"], &verified["written"]),
        (&first["xxh3"], &serde_json::Value::Null)
    );
    // One piece of three was not written yet.
    use std::os::unix::fs::FileExt;
    let image = std::fs::File::options()
        .write(true)
        .open(folder.path("disk.img"))
        .unwrap();
    image.write_all_at(b"changed", 9 << 20).unwrap();
    let output = folder.command().args(with("verify", &[])).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&output.stderr).contains("XXH3"));
    let resumed = json(&folder, &with("import", &["--resume"]));
    assert_eq!(
        (&resumed["written"], &resumed["xxh3"]),
        (&(8 << 20).into(), &first["xxh3"])
    );
    let stored = std::fs::read(folder.path("disk.img")).unwrap();
    assert!(stored[4097..][..20 << 20] == std::fs::read(&long).unwrap());
    // A packed image is a device, too.
    std::fs::write(folder.path("plain"), vec![0; 1 << 20]).unwrap();
    let text = ok(
        &folder,
        &["import", "other", "-d", "file:plain", "--offset", "1KiB"],
    );
    assert!(text.contains("5000 of them written"), "{text}");
    ok(
        &folder,
        &["verify", "other", "-d", "./plain", "--offset", "1024"],
    );
    let refused = |words: &[&str], code: i32, what: &str| {
        let output = folder.command().args(words).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{words:?}: {said}");
        assert!(said.contains(what), "{words:?}: {said}");
    };
    for (verb, own) in [
        ("import", "which would be written over"),
        ("verify", "is the image of the device itself"),
    ] {
        refused(
            &[verb, "long", "-d", "file:plain"],
            2,
            "use a larger device",
        );
        refused(&[verb, "none", "-d", "file:plain"], 4, "none");
        refused(&[verb, ".", "-d", "file:plain"], 2, "not a regular file");
        refused(&[verb, "disk.img", "-d", "sim:disk.img"], 2, own);
    }
    refused(
        &["verify", "other", "-d", "sim:new.img?size=1MiB"],
        4,
        "new.img",
    );
    // An image that was made for an import that failed is removed.
    refused(
        &["import", "long", "-d", "sim:new.img?size=1MiB"],
        2,
        "use a larger device",
    );
    assert!(!folder.path("new.img").exists());
    refused(
        &[
            "import",
            "other",
            "-d",
            "sim:mem?fault=status:0x281@op=read,nth=2",
        ],
        1,
        "Unrecovered Read Error",
    );
}

/// The test needs a folder on an ext4 and the right to set the flag; else only the refusals are tested.
#[test]
fn an_immutable_file_of_a_mounted_ext4_is_described() {
    let folder = Folder::new(Place::Embedded);
    folder.file("model", 100_000, 1);
    let flag = |sign: &str| {
        let mut chattr = std::process::Command::new("chattr");
        let set = chattr.arg(format!("{sign}i")).arg(folder.path("model"));
        set.stderr(std::process::Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    };
    let output = folder.command().args(["stat", "model"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains("is not immutable") || said.contains("is no ext4"),
        "{said}"
    );
    if said.contains("is no ext4") || !flag("+") {
        eprintln!("skipped: no file of this folder can be made immutable");
        return;
    }
    let mut outputs = [&["stat", "model", "--json"][..], &["stat", "model"]]
        .map(|words| folder.command().args(words).output().unwrap());
    assert!(flag("-"));
    let said = outputs.each_ref().map(|one| one.status.success());
    assert_eq!(said, [true; 2], "{outputs:?}");
    let text = String::from_utf8(std::mem::take(&mut outputs[1].stdout)).unwrap();
    assert!(text.contains("uuid") && text.contains("place:"), "{text}");
    let value: serde_json::Value = serde_json::from_slice(&outputs[0].stdout).unwrap();
    super::json::check_value("stat-mounted", &value);
    let extents = value["extents"].as_array().unwrap();
    let bytes = extents.iter().map(|one| one["bytes"].as_u64().unwrap());
    assert!(bytes.sum::<u64>() >= 100_000, "{value}");
    let refused = folder.command().args(["stat", "none"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(4));
}

#[test]
fn what_is_no_file_on_a_drive_is_refused() {
    let folder = Folder::new(Place::Embedded);
    write_image(&folder);
    let refused = |words: &[&str], code: i32, what: &str| {
        let mut command = folder.command();
        let output = command.args(words).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{words:?}: {said}");
        assert!(said.contains(what), "{words:?}: {said}");
        assert!(output.stdout.is_empty(), "{words:?}");
    };
    refused(&["ls", "ext4.img"], 2, "names no file on a drive");
    refused(&["ls", "sim:ext4.img?part=0:/"], 2, "is no partition");
    refused(&["ls", "sim:ext4.img?part=1:/"], 1, "no partition table");
    refused(&["ls", "sim:none.img:/"], 4, "none.img");
    refused(&["cat", "sim:ext4.img:/none"], 4, "/none");
    refused(&["cat", "sim:ext4.img:/d"], 2, "regular file");
    refused(&["cat", "sim:mem:/x"], 1, "no ext4");
    refused(
        &["cp", "sim:ext4.img:/f", "sim:ext4.img:/g"],
        2,
        "is on a drive",
    );
    refused(&["cp", "sim:ext4.img:/f", "no/folder"], 4, "no/folder");
    refused(&["cp", "sim:ext4.img:/f", "ext4.img"], 2, "ext4.img");
    refused(&["stat", "sim:ext4.img:/f/x"], 2, "directory");
    refused(&["catalog", "sim:ext4.img:/f"], 2, "no known format");
    refused(&["catalog", "none.gguf"], 4, "none.gguf");
    let faulty = "sim:ext4.img?fault=status:0x281@op=read,nth=2:/f";
    refused(&["cat", faulty], 1, "Unrecovered Read Error");
    assert_eq!(folder.names(), ["ext4.img", "two.safetensors"]);
    check_shell(&[("$B cat sim:nothing.img:/f >&-", 4, "leave it open")]);
}
