//! No command overwrites its own input, by whatever name; and none waits for ever for a pipe.

use crate::common::{Folder, Place};
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::fs::symlink;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

fn safetensors(bytes: usize) -> Vec<u8> {
    let header =
        format!(r#"{{"a":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + bytes, 7);
    file
}

/// Each command that has an output and an input, with `IN` and `OUT` for their names.
const COMMANDS: [&[&str]; 16] = [
    &["manifest", "IN", "-o", "OUT"],
    &["manifest", "file:IN", "--offset", "0", "-o", "OUT"],
    &["generate", "IN", "-p", "x", "--logits", "OUT"],
    &[
        "generate", "file:IN", "--offset", "0", "-p", "x", "--logits", "OUT",
    ],
    &[
        "generate",
        "other",
        "--manifest",
        "IN",
        "-p",
        "x",
        "--logits",
        "OUT",
    ],
    &["import", "IN", "-d", "file:OUT"],
    &["import", "IN", "-d", "sim:OUT", "--allow-write"],
    &["read", "-d", "sim:IN", "--blocks", "1", "-o", "OUT"],
    &["cp", "file:IN:/a", "OUT"],
    &["cp", "sim:IN:/a", "OUT"],
    &["bench", "-d", "sim:IN", "--plot", "OUT"],
    &["witness", "-d", "sim:IN", "-o", "OUT"],
    &[
        "pipeline",
        "iterative-computation",
        "-d",
        "sim:IN",
        "--trace",
        "OUT",
    ],
    &[
        "search",
        "query",
        "-d",
        "file:OUT",
        "--load",
        "IN",
        "--allow-write",
    ],
    &["search", "build", "--input", "IN", "--out", "file:OUT"],
    &["search", "query", "-d", "file:IN", "--out-ids", "OUT"],
];

#[test]
fn an_output_that_is_the_input_is_refused_before_anything_is_written() {
    let folder = Folder::new(Place::Embedded);
    let content = safetensors(1 << 20);
    let file = folder.path("input.svg");
    std::fs::write(&file, &content).unwrap();
    std::fs::write(folder.path("other"), safetensors(100)).unwrap();
    std::fs::hard_link(&file, folder.path("hard.svg")).unwrap();
    symlink(&file, folder.path("soft.svg")).unwrap();
    for command in COMMANDS {
        for output in ["input.svg", "./input.svg", "hard.svg", "soft.svg"] {
            let words: Vec<String> = command
                .iter()
                .map(|word| word.replace("IN", "input.svg").replace("OUT", output))
                .collect();
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            folder.fails(&words, 2, "which would be written over");
            assert!(std::fs::read(&file).unwrap() == content, "{words:?}");
        }
    }
    let all = ["hard.svg", "input.svg", "other", "soft.svg"];
    assert_eq!(folder.names(), all);
}

#[test]
fn a_model_is_not_written_over_by_its_parts_or_two_outputs_by_each_other() {
    let folder = Folder::new(Place::Embedded);
    let index = r#"{"weight_map":{"a":"m.safetensors"}}"#;
    std::fs::write(folder.path("index.json"), index).unwrap();
    std::fs::write(folder.path("m.safetensors"), safetensors(5000)).unwrap();
    let part = ["import", "index.json", "-d", "file:m.safetensors"];
    folder.fails(&part, 2, "which would be written over");
    let twice = [
        "pipeline",
        "iterative-computation",
        "--trace",
        "a.svg",
        "--plot",
        "a.svg",
    ];
    folder.fails(&twice, 2, "which would be written over");
    let fine = folder.json(&["manifest", "m.safetensors", "-o", "out"]);
    assert_eq!(fine["bytes"], safetensors(5000).len());
}

/// Outputs were written over the data of the drive whose node they named. A command may also write its output at its end,
/// so that the device is refused before anything is done.
#[test]
fn a_block_device_is_no_output() {
    let folder = Folder::new(Place::Embedded);
    // No device has this number: without the refusal, opening it fails in another way.
    let made = Command::new("mknod")
        .arg(folder.path("node.svg"))
        .args(["b", "4095", "1"])
        .status();
    if !made.is_ok_and(|made| made.success()) {
        eprintln!("skipped: only root makes nodes of devices");
        return;
    }
    symlink("node.svg", folder.path("link.svg")).unwrap();
    let image = "sim:mem?size=64KiB";
    for output in ["node.svg", "link.svg"] {
        for command in [
            &["read", "-d", image, "--blocks", "1", "-o", output][..],
            &["bench", "-d", image, "--plot", output],
            &["pipeline", "iterative-computation", "--trace", output],
        ] {
            folder.fails(command, 2, "is a block device");
        }
    }
    folder.ok(&["read", "-d", image, "--blocks", "1", "-o", "/dev/null"]);
}

/// Returns whether a process has a handler for SIGTERM (15).
fn handles_sigterm(child: &Child) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id()));
    let status = status.unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    caught.is_some_and(|mask| mask & 1 << 14 != 0)
}

/// Waits until a process has ended, or `is_there`.
fn until(child: &mut Child, is_there: impl Fn(&Child) -> bool) {
    for _ in 0..6000 {
        if child.try_wait().unwrap().is_some() || is_there(child) {
            return;
        }
        sleep(Duration::from_millis(50));
    }
    child.kill().unwrap();
    panic!("it waits for ever");
}

#[test]
fn a_wait_for_the_writer_of_a_pipe_ends_with_a_signal() {
    let folder = Folder::new(Place::Embedded);
    let made = Command::new("mkfifo").arg(folder.path("pipe")).status();
    assert!(made.unwrap().success());
    let image = "sim:mem?size=16MiB";
    let vendor = [
        "--opcode",
        "0xc1",
        "--data-len",
        "4096",
        "-i",
        "pipe",
        "--allow-write",
    ];
    for words in [
        [&["admin-passthru", "-d", image][..], &vendor].concat(),
        vec!["witness", "--check", "pipe"],
        vec!["write", "-d", image, "-i", "pipe", "--allow-write"],
    ] {
        let mut command = folder.command();
        let child = command
            .args(&words)
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = child.spawn().unwrap();
        // Until its handler is installed, a signal ends it, whatever it waits for.
        until(&mut child, handles_sigterm);
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        until(&mut child, |_| false);
        assert_eq!(child.wait().unwrap().code(), Some(130), "{words:?}");
    }
    // As an image or a model a pipe is none at all.
    for words in [
        &["read", "-d", "sim:pipe?ro=on", "--blocks", "1"][..],
        &["read", "-d", "sim:pipe", "--blocks", "1"],
    ] {
        folder.fails(words, 2, "not a regular file");
    }
}
