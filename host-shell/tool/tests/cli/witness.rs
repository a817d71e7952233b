//! `witness`: the content of its file, content that must not be in it, and the findings of its
//! check.

use crate::common::{Folder, Place, Ran, bytes};
use crate::json::check_value;
use serde_json::Value;
use std::path::Path;
use std::process::Stdio;

in_each_place!(
    every_rung_runs_and_the_file_is_believed,
    a_rung_that_fails_is_recorded_and_the_rest_goes_on,
);

fn read(path: &Path) -> Value {
    let value: Value = serde_json::from_slice(&bytes(path)).unwrap();
    check_value("witness", &value);
    value
}

fn step<'v>(value: &'v Value, name: &str, by: &str) -> &'v Value {
    let steps = value["steps"].as_array().unwrap();
    let mut found = steps
        .iter()
        .filter(|one| one["name"] == name && one["by"] == by);
    let step = found
        .next()
        .unwrap_or_else(|| panic!("{name} by {by}: {value:#}"));
    assert!(found.next().is_none());
    step
}

const RUNGS: [&str; 6] = [
    "one-block",
    "prp-lists",
    "sequential-669mb",
    "sequential-8600mb",
    "layer-loader",
    "gather",
];

fn every_rung_runs_and_the_file_is_believed(place: Place) {
    let folder = Folder::new(place);
    let image = folder.file("disk.img", 3 << 20 | 8192, 1);
    let before = bytes(&image);
    let device = "sim:disk.img?mdts=6";
    let out = ["witness", "-d", device, "--cpu", "--quick", "-o", "w.json"];
    let text = folder.ok(&out);
    assert!(
        text.contains("written: w.json") && text.contains("verified"),
        "{text}"
    );
    let value = read(&folder.path("w.json"));
    assert_eq!(
        (&value["ended"], &value["simulator"]),
        (&"complete".into(), &true.into())
    );
    assert_eq!(value["controller"]["mdts_bytes"], 256 << 10);
    for rung in RUNGS {
        let step = step(&value, rung, "cpu");
        assert_eq!(step["outcome"], "ok", "{step:#}");
        assert!(
            step["verified"]["zero_share"].as_f64().unwrap() < 0.01,
            "{step:#}"
        );
        assert!(step["measured"]["gb_per_s"].as_f64().unwrap() > 0.0);
        assert_eq!(self::step(&value, rung, "gpu")["why"], "--cpu");
    }
    let long = &step(&value, "sequential-8600mb", "cpu")["measured"];
    assert_eq!(
        long["bytes"],
        3 << 20 | 8192,
        "as far as the namespace goes"
    );
    assert_eq!(
        (&long["depth"], &long["command_bytes"]),
        (&32.into(), &(256 << 10).into())
    );
    assert_eq!(
        step(&value, "write-read-compare", "cpu")["why"],
        "no --write-range"
    );
    assert!(bytes(&image) == before, "nothing was written");
    // The check accepts the file, and marks it as a simulator's.
    let row = folder.ok(&["witness", "--check", "w.json"]);
    assert!(
        row.starts_with("- witness: 7 rungs") && row.contains("SIMULATOR"),
        "{row}"
    );
    let checked = folder.json(&["witness", "--check", "w.json"]);
    check_value("witness-check", &checked);
    assert_eq!(
        (&checked["valid"], &checked["simulator"]),
        (&true.into(), &true.into())
    );
}

fn a_rung_that_fails_is_recorded_and_the_rest_goes_on(place: Place) {
    let folder = Folder::new(place);
    folder.file("disk.img", 1 << 20, 1);
    // The first read of the second rung.
    let device = "sim:disk.img?fault=status:0x281@op=read,nth=4";
    let ran = folder.run(&["witness", "-d", device, "--cpu", "--quick", "-o", "w.json"]);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stdout.contains("written: w.json"), "{}", ran.stdout);
    let value = read(&folder.path("w.json"));
    let failed = step(&value, "prp-lists", "cpu");
    assert_eq!(
        (&failed["outcome"], &failed["error"]["code"]),
        (&"failed".into(), &"command".into())
    );
    for rung in ["one-block", "sequential-669mb", "layer-loader", "gather"] {
        assert_eq!(step(&value, rung, "cpu")["outcome"], "ok", "{rung}");
    }
    let row = folder.ok(&["witness", "--check", "w.json"]);
    assert!(row.contains("failed: prp-lists"), "{row}");
}

#[test]
fn who_and_where_is_not_in_the_file() {
    let folder = Folder::new(Place::Embedded);
    std::fs::create_dir(folder.path("molly")).unwrap();
    let image = folder.path("molly/wintermute.img");
    std::fs::write(&image, crate::common::data(1 << 20, 1)).unwrap();
    let device = format!(
        "sim:{}?serial=S4EWNX0R123456Z&fault=status:0x281@op=read,nth=4",
        image.display()
    );
    let mut command = folder.command();
    command.args([
        "witness",
        "--cpu",
        "--quick",
        "-o",
        "molly/w.json",
        "-d",
        &device,
    ]);
    for (name, value) in [
        ("USER", "molly"),
        ("SUDO_USER", "armitage"),
        ("HOME", "/home/molly"),
        ("HOSTNAME", "straylight.example.org"),
    ] {
        command.env(name, value);
    }
    assert_eq!(command.output().unwrap().status.code(), Some(1));
    let text = String::from_utf8(bytes(&folder.path("molly/w.json"))).unwrap();
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let folder_name = folder.path("molly").display().to_string();
    for secret in [
        "S4EWNX0R123456Z",
        "molly",
        "wintermute",
        "armitage",
        "straylight",
        host.trim(),
        &folder_name,
    ] {
        let (text, secret) = (text.to_lowercase(), secret.to_lowercase());
        assert!(
            secret.len() < 3 || !text.contains(&secret),
            "{secret}: {text}"
        );
    }
    read(&folder.path("molly/w.json"));
}

#[test]
fn a_range_that_is_written_has_its_bytes_again() {
    let folder = Folder::new(Place::Embedded);
    let image = folder.file("disk.img", 2 << 20, 1);
    let before = bytes(&image);
    let run = "witness -d sim:disk.img --cpu --quick -o w.json --write-range";
    let with = |range| run.split(' ').chain([range]).collect::<Vec<_>>();
    let value = folder.json(&with("100:300"));
    let step = step(&value, "write-read-compare", "cpu");
    assert_eq!(step["outcome"], "ok", "{step:#}");
    assert_eq!(step["measured"]["bytes"], 300 * 4096);
    assert!(bytes(&image) == before);
    folder.fails(&with("100:3000"), 2, "past namespace");
    folder.fails(&with("100"), 2, "LBA:BLOCKS");
    assert!(bytes(&image) == before);
}

#[test]
fn a_run_that_is_interrupted_leaves_a_file_that_says_so() {
    let folder = Folder::new(Place::Embedded);
    let out = [
        "witness",
        "-d",
        "sim:null?size=1TiB",
        "--cpu",
        "-o",
        "w.json",
    ];
    let mut child = folder
        .command()
        .args(out)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The file is there after the first rung.
    let began = std::time::Instant::now();
    while !folder.path("w.json").exists() && began.elapsed().as_secs() < 60 {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(read(&folder.path("w.json"))["ended"], "unfinished");
    crate::common::interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let value = read(&folder.path("w.json"));
    assert_eq!(value["ended"], "interrupted");
    let row = folder.ok(&["witness", "--check", "w.json"]);
    assert!(row.contains("not complete"), "{row}");
}

#[test]
fn what_cannot_be_run_or_believed_is_refused() {
    let folder = Folder::new(Place::Embedded);
    folder.fails(
        &["witness", "-d", "sim:nowhere.img", "-o", "w.json"],
        4,
        "nowhere.img",
    );
    // What did not begin is a file, too.
    assert_eq!(
        step(&read(&folder.path("w.json")), "identify", "cpu")["outcome"],
        "failed"
    );
    folder.fails(
        &["witness", "-d", "sim:mem", "-o", "no/folder/w.json"],
        4,
        "no/folder",
    );
    folder.fails(&["witness", "--check", "nothing.json"], 4, "nothing.json");
    std::fs::write(folder.path("other.json"), "{\"a\": 1}").unwrap();
    folder.fails(&["witness", "--check", "other.json"], 2, "no witness file");
    std::fs::write(folder.path("long.json"), vec![b' '; 2 << 20]).unwrap();
    folder.fails(&["witness", "--check", "long.json"], 2, "no witness file");
    folder.fails(
        &["witness", "--check", "other.json", "--quick"],
        2,
        "--quick",
    );
}

/// Every committed file is accepted, and simulators are marked by their names.
#[test]
fn the_committed_files_are_believed() {
    let folder = Folder::new(Place::Embedded);
    let place = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results/witness");
    let mut files = 0;
    for entry in std::fs::read_dir(place).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|end| end != "json") {
            continue;
        }
        files += 1;
        let value = read(&path);
        let name = path.file_name().unwrap().to_str().unwrap();
        assert_eq!(
            value["simulator"] == true,
            name.starts_with("simulator-"),
            "{name}"
        );
        let ran: Ran = folder.run(&["witness", "--check", path.to_str().unwrap()]);
        assert_eq!(ran.code, 0, "{name}: {}", ran.stderr);
    }
    assert!(files > 0, "a file of a simulator at least");
}
