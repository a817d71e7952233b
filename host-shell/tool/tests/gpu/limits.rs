//! Requests that a driver refuses, and kernels that do not end.

use crate::common::stand_in::{command, fails, run};
use crate::common::{Folder, Place};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// The stand-in registers no memory of the host, as under confidential computing.
const NO_REGISTRATION: &str = "noregister";

/// Returns the standard output of a successful run with the stand-in; `fault` selects its
/// misbehaviour.
fn ok_with(folder: &Folder, fault: &str, words: &[&str]) -> String {
    let output = run(folder, fault, words);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_demo_runs_by_the_cpu_where_no_memory_is_registered() {
    let folder = Folder::new(Place::Embedded);
    let demo = ["demo", "--size", "1MiB", "--json"];
    let report = ok_with(&folder, NO_REGISTRATION, &demo);
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["gpu"], false, "{report}");
    let why = report["why"].as_str().unwrap();
    assert!(why.contains("registers no memory"), "{why}");
    assert!(why.contains("NOT_SUPPORTED"), "{why}");
    // If a GPU is requested, it is used, or the error has the reason.
    let asked = [&demo[..3], &["--gpu", "0"]].concat();
    let error = fails(&folder, NO_REGISTRATION, 6, &asked);
    assert!(error.contains("cuMemHostRegister"), "{error}");
}

#[test]
fn the_doctor_says_that_no_memory_is_registered() {
    let folder = Folder::new(Place::Embedded);
    for (fault, what) in [
        ("", "memory of the host: the driver registers it"),
        ("integrated", "an integrated GPU): tier 1 is the way"),
        ("hosttables", "tier 1 is the way"),
        (NO_REGISTRATION, "and allocates some"),
        (
            "noregister,nohostalloc",
            "registers none and allocates none",
        ),
    ] {
        let text = String::from_utf8(run(&folder, fault, &["doctor"]).stdout).unwrap();
        assert!(text.contains(what), "{fault}: {text}");
    }
}

#[test]
fn memory_is_registered_in_parts_where_the_driver_takes_no_more() {
    let folder = Folder::new(Place::Embedded);
    std::fs::write(folder.path("in"), vec![7; 1 << 20]).unwrap();
    let limit = "register-limit=1048576";
    let device = "sim:large.img?size=64MiB&queues=4&block=512";
    for tier in ["1", "2"] {
        let words = ["write", "-d", device, "--gpu", "--tier", tier, "-i", "in"];
        ok_with(&folder, limit, &words);
        let words = ["read", "-d", device, "--gpu", "--tier", tier, "-b", "2048"];
        ok_with(&folder, limit, &[&words[..], &["-o", "out"]].concat());
        assert!(std::fs::read(folder.path("out")).unwrap() == vec![7; 1 << 20]);
        std::fs::remove_file(folder.path("out")).unwrap();
    }
}

#[test]
fn a_kernel_without_an_end_ends_by_the_time_out() {
    let folder = Folder::new(Place::Embedded);
    let read = ["read", "-d", "sim:mem?size=1MiB&queues=4", "--gpu"];
    let words = [&read[..], &["--timeout-ms", "2000", "-o", "out"]].concat();
    let output = run(&folder, "hang", &words);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("a kernel did not end within 30"), "{said}");
    assert!(!output.status.success());
}

#[test]
fn a_signal_ends_the_wait_for_a_kernel_without_an_end() {
    let folder = Folder::new(Place::Embedded);
    let read = ["read", "-d", "sim:mem?size=1MiB&queues=4", "--gpu"];
    let words = [&read[..], &["--timeout-ms", "2000000", "-o", "out"]].concat();
    let mut child = command(&folder, "hang", &words)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The loop waits until the kernel was launched: its thread then sleeps for good.
    let begin = Instant::now();
    let has_launched = || {
        let threads = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
        threads.count() > 2
    };
    while !has_launched() {
        assert!(begin.elapsed() < Duration::from_secs(120), "no launch");
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_millis(500));
    crate::common::interrupt(&child);
    while child.try_wait().unwrap().is_none() {
        assert!(begin.elapsed() < Duration::from_secs(240), "it goes on");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(child.wait().unwrap().code(), Some(130));
}
