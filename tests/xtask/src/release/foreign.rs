//! Unit tests for aarch64 under qemu-user, with pages of 4 KiB and of 64 KiB.

use super::programs::{LIBRARIES, built};
use super::{ARCHITECTURES, Release};
use chores::process::{Failure, cargo, cargo_test, check, output, target_dir};
use chores::report::Counts;
use std::process::Command;

/// Packages whose unit tests need no device, GPU or other program.
const PACKAGES: [&str; 9] = [
    "nvme-spec",
    "nvme-core",
    "nvme-formats",
    "nvme-gpu-kernel",
    "nvme-sim",
    "nvme-auditor",
    "nvme-driver",
    "nvme-store",
    "nvme-kv",
];
/// Tests of answers of the kernel that qemu-user gives otherwise: to calls of iommufd, to a mapping of huge pages that
/// are not there, to a write to the program that runs.
const SKIPPED: [&str; 4] = [
    "what_is_no_iommufd_refuses_every_call",
    "iommufd::tests::each_part_that_is_missing",
    "huge_pages_are_mapped_whole_where_there_are_any",
    "files_that_may_not_be_written_are_opened_for_reading",
];
/// Pages of the machine that qemu-user plays, in bytes.
const PAGES: [&str; 2] = ["4096", "65536"];

/// Runs the unit tests of [`PACKAGES`], and the queues as threads of the stress program.
pub fn test(_: &Release) -> Result<Counts, Failure> {
    let mut counts = Counts::default();
    for page in PAGES {
        let mut tests = command("test", page);
        // With a page size that is not the machine's, qemu-user crashes when a panic reads the program to print a backtrace.
        tests.env("RUST_BACKTRACE", "0");
        tests.args(["--quiet", "--lib"]);
        for package in PACKAGES {
            tests.args(["--package", package]);
        }
        tests.arg("--");
        for test in SKIPPED {
            tests.args(["--skip", test]);
        }
        counts.add(cargo_test(&mut tests)?);
    }
    let mut stress = command("run", PAGES[0]);
    stress.args(["--quiet", "--release", "--package", "nvme-stress"]);
    stress.args(["--", "--commands", "20000"]);
    check(&mut stress)?;
    counts.add(Counts::PASSED);
    counts.add(device_fences()?);
    Ok(counts)
}

/// Checks that doorbells of the library for aarch64 follow fences that a device outside the processors' domain obeys:
/// an emulator runs a program without them as well.
fn device_fences() -> Result<Counts, Failure> {
    let [_, arm] = ARCHITECTURES;
    let library = built(arm, "gnu").join(LIBRARIES[0]);
    let search = format!(
        "{}-objdump --disassemble '{}' | grep --count --extended-regexp 'dmb\\s+osh$'",
        arm.triplet(),
        library.display()
    );
    let found = output(Command::new("sh").args(["-c", &search]))?;
    println!("dmb osh: {}", found.trim());
    Ok(Counts::PASSED)
}

fn command(action: &str, page: &str) -> Command {
    let [_, arm] = ARCHITECTURES;
    let mut command = cargo();
    command.args([action, "--target", &arm.target("gnu")]);
    command.env("CARGO_TARGET_DIR", target_dir().join("release-aarch64"));
    command.env(
        "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER",
        format!("{}-gcc", arm.triplet()),
    );
    let runner = format!("qemu-aarch64-static -p {page} -L /usr/{}", arm.triplet());
    command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", runner);
    command
}
