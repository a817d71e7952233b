//! Standard streams and pipes: closed, full, without another end, too long.

use super::rows::{PATIENCE, check_shell, fault, folder, text_of, words};
use crate::common::WITH_SIGNALS;
use std::os::unix::fs::FileTypeExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn standard_streams_that_are_closed_or_full() {
    check_shell(&[
        ("$B list-ns -d sim:mem >&-", 4, "leave it open"),
        ("$B read -d sim:disk.img >&-", 4, "leave it open"),
        ("$B list-ns -d sim:mem >/dev/full", 4, "free space"),
        ("$B read -d sim:disk.img >/dev/full", 4, "free space"),
        ("$B --help >/dev/full", 4, "free space"),
        ("$B --help >&-", 4, "leave it open"),
        ("$B write -d sim:disk.img -i - <&-", 4, "leave it open"),
        ("$B list-ns -d sim:mem 2>&- >/dev/null", 0, ""),
        ("$B", 2, "no command was given"),
        ("$B --", 2, "no command was given"),
        ("$B fly 2>&-", 2, ""),
        ("$B fly 2>/dev/full", 2, ""),
        // The end of every filter whose reader has gone.
        (
            "{ $B read -d sim:mem; echo $? >code; } | head -c 9 >/dev/null; c=$(cat code); rm code; exit $c",
            141,
            "",
        ),
        (
            "{ $B identify ctrl -d sim:mem; echo $? >code; } | true; c=$(cat code); rm code; [ $c = 141 ] || [ $c = 0 ]",
            0,
            "",
        ),
    ]);
}

#[test]
fn input_from_pipes_is_checked_before_the_first_block_where_it_can_be() {
    check_shell(&[
        (
            "printf x | $B write -d sim:disk.img -i -",
            2,
            "whole number",
        ),
        (": | $B write -d sim:disk.img -i -", 2, "0 bytes"),
        (
            "head -c 69632 /dev/zero | $B write -d sim:disk.img -i -",
            2,
            "more than the 16 blocks",
        ),
        (
            "cat /dev/zero | $B write -d sim:disk.img -i -",
            2,
            "more than the 16 blocks",
        ),
        (
            "cat /dev/zero | $B write -d sim:disk.img -i - --lba 15",
            2,
            "more than the 1 blocks",
        ),
        (
            "cat /dev/zero | $B write -d sim:disk.img -i - --lba 16",
            2,
            "the last LBA is 15",
        ),
        (
            "cat /dev/zero | $B write -d sim:disk.img -i - --blocks 17",
            2,
            "the last LBA is 15",
        ),
        (
            "cat in | $B write -d sim:disk.img -i - --blocks 3",
            2,
            "ended after 8192 bytes, before 3 blocks",
        ),
        (
            "$B write -d sim:disk.img -i disk.img <disk.img",
            2,
            "the image of the device itself",
        ),
        (
            "$B write -d sim:disk.img -i - <disk.img",
            2,
            "the image of the device itself",
        ),
        (
            "$B write -d sim:disk.img -i - <long",
            2,
            "the last LBA is 15",
        ),
        (
            "$B compare -d sim:disk.img -i - <disk.img",
            2,
            "the image of the device itself",
        ),
        ("cat disk.img | $B compare -d sim:disk.img -i -", 0, ""),
        (
            "cat disk.img /dev/zero | $B compare -d sim:disk.img -i - --blocks 16",
            0,
            "",
        ),
        ("cat disk.img | $B write -d sim:disk.img -i -", 0, ""),
        (
            "(tail -c 4096 disk.img; cat /dev/zero) | $B write -d sim:disk.img -i - -s 15 -b 1",
            0,
            "",
        ),
    ]);
}

#[test]
fn limits_of_the_process_are_named() {
    check_shell(&[
        (
            "ulimit -n 4; $B write -d sim:disk.img -i in",
            6,
            "ulimit -n",
        ),
        (
            "ulimit -n 4; exec $B serve -d sim:disk.img -s cntrl",
            6,
            "ulimit -n",
        ),
        (
            "ulimit -f 8; $B read -d sim:disk.img -o out",
            4,
            "ulimit -f",
        ),
    ]);
}

/// Waits until the process has a handler for `signal`, and sends it.
fn send(child: &std::process::Child, signal: i32) {
    let begin = Instant::now();
    let catches = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let mask = status
            .lines()
            .find_map(|line| line.strip_prefix("SigCgt:"))
            .unwrap();
        u64::from_str_radix(mask.trim(), 16).unwrap() & 1 << (signal - 1) != 0
    };
    while !catches() {
        assert!(begin.elapsed() < PATIENCE, "signal {signal} is not caught");
        std::thread::sleep(Duration::from_millis(5));
    }
    // Long enough to reach the pipe; one that comes earlier has the same end.
    std::thread::sleep(Duration::from_millis(200));
    let arguments = [format!("-{signal}"), child.id().to_string()];
    assert!(
        Command::new("kill")
            .args(arguments)
            .status()
            .unwrap()
            .success()
    );
}

#[test]
fn a_pipe_without_its_other_end_ends_at_once_with_a_signal() {
    const HUP: i32 = 1;
    const INT: i32 = 2;
    const TERM: i32 = 15;
    let folder = folder();
    assert!(
        Command::new("mkfifo")
            .arg(folder.path("pipe"))
            .status()
            .unwrap()
            .success()
    );
    assert!(
        std::fs::metadata(folder.path("pipe"))
            .unwrap()
            .file_type()
            .is_fifo()
    );
    let names = folder.names();
    for (line, signal) in [
        ("write -d sim:disk.img -i pipe", INT),
        ("compare -d sim:disk.img -i pipe", TERM),
        ("read -d sim:disk.img -o pipe", HUP),
        // A writer that does not write, and a reader that does not read.
        ("write -d sim:disk.img -i -", INT),
        ("read -d sim:mem", INT),
    ] {
        let mut child = Command::new(WITH_SIGNALS[0])
            .args([WITH_SIGNALS[1], env!("CARGO_BIN_EXE_nvme-gpu")])
            .current_dir(folder.path(""))
            .args(words(line))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Kept, so that the pipes stay open.
        let ends = (child.stdin.take(), child.stdout.take());
        send(&child, signal);
        let begin = Instant::now();
        while child.try_wait().unwrap().is_none() {
            assert!(begin.elapsed() < PATIENCE, "{line} does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(ends);
        let output = child.wait_with_output().unwrap();
        let said = text_of(&output.stderr);
        let fault = fault(output.status.code(), 130, "", &said, "interrupted", false);
        assert_eq!(fault, None, "{line}: {said}");
        assert_eq!(folder.names(), names, "{line}");
    }
}
