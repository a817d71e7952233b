//! The program over a stand-in for the CUDA driver, whose kernels are threads of the CPU: each test passes without
//! faults, and fails with one.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Builds the stand-in in a separate folder, under the name that the loader looks for.
fn stand_in(test: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let folder = tests.parent().unwrap();
    let names = ["libnvme_fake_cuda.so", "../libnvme_fake_cuda.so"];
    let mut built = names.iter().map(|name| folder.join(name));
    let built = built.find(|path| path.exists());
    let built = built.expect("cargo builds the stand-in as a dependency of this test");
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    std::fs::create_dir_all(&place).unwrap();
    for name in ["libcuda.so.1", "libcuda.so"] {
        let link = place.join(name);
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(&built, link).unwrap();
    }
    place
}

/// Runs `gpu-test`; `fault` is how the stand-in misbehaves.
fn run(test: &str, fault: &str, arguments: &[&str]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_gpu-test"));
    program.env("LD_LIBRARY_PATH", stand_in(test));
    program.env("FAKE_CUDA", fault).args(arguments);
    program.output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Options for a busy machine: lost commands are waited for three times as long, no launch ends by the clock, and there
/// is no time after which tests are skipped.
const BUSY: [&str; 6] = ["--patience", "3", "--limit", "900", "--seconds", "36000"];

/// Runs the tests `chosen`; all of them pass, and there are `count` of them.
fn all_pass(test: &str, count: u32, chosen: &[&str]) {
    all_pass_with(test, "", count, chosen);
}

/// Runs the tests in the same way with the fault `fault` of the stand-in.
fn all_pass_with(test: &str, fault: &str, count: u32, chosen: &[&str]) {
    let output = run(
        test,
        fault,
        &[&["--commands", "900"][..], &BUSY, chosen].concat(),
    );
    let text = text(&output);
    let others: Vec<_> = text
        .lines()
        .filter(|line| !line.starts_with("ok "))
        .collect();
    let last = others.last().copied();
    assert_eq!(
        last,
        Some(&*format!("{count} passed, 0 failed, 0 skipped")),
        "{}",
        others.join("\n")
    );
    assert!(output.status.success());
}

/// Each kind of test takes a second or two: threads, warps and blocks that own queues, and lanes that share them.
#[test]
fn commands_are_well() {
    let chosen = [
        "owner/tier1/dropped",
        "owner/tier1/wrong-phase",
        "owner/tier1/wrong-cid",
        "owner/tier1/dead-cfs",
        "warp/tier0/no-fault",
        "warp/tier1/dropped",
        "block/tier0/wrong-cid",
        "tokens/",
        "block/tier2/no-fault",
        "shared/tier0/late",
        "divergent/tier1/error-status",
        "wrap/shared",
        "late/owner",
        "late/divergent",
        "ops/owner/tier1/compare/dropped",
        "ops/owner/tier0/deallocate",
        "ops/warp/tier2/write-zeroes",
        "layers/",
        "model/errors",
        "model/mixture",
        "model/q6k",
    ];
    all_pass("commands", 42, &chosen);
}

#[test]
fn rows_are_well() {
    let chosen = [
        "gather/shapes",
        "gather/ids",
        "gather/after-writes",
        "gather/streams",
        "gather/cache",
        "gather/fault",
        "gather/wide",
        "gather/scaled",
        "gather/distinct/",
        "gather/beside/",
        "gather/graph/",
        "gather/context",
        "scatter/",
        "stripes/shapes",
        "stripes/fault",
        "stripes/left",
        "stripes/graph/outlives",
        "stripes/owned",
        "stripes/distinct",
        "stripes/wide",
        "stripes/scaled",
        "by-host/",
        "ranges/",
        "graphs/",
    ];
    all_pass("rows", 128, &chosen);
}

#[test]
fn rows_by_owned_queues_are_well() {
    all_pass("owned", 36, &["gather/owned/", "gather/halves/"]);
}

#[test]
fn kernels_that_read_and_compute_are_well() {
    let chosen = [
        "product/",
        "gemv/",
        "gemm/shapes/q4_0",
        "gemm/resident",
        "gemm/usage",
        "gemm/graph",
        "gemm/fault/status",
        "gemm/fault/dropped/q8_0",
        "experts/",
        "paged/",
        "search/",
    ];
    all_pass("compute", 150, &chosen);
}

/// Each kernel begins 50 ms after the one before it has ended: an operation of several kernels has ended only when the
/// last one has.
#[test]
fn operations_end_with_their_last_kernel() {
    let chosen = [
        "paged/missing-pages",
        "paged/graph",
        "paged/fault/status",
        "experts/shapes/block-4096",
        "experts/graph",
        "gather/wide/drive",
    ];
    all_pass_with("slow", "slow", 6, &chosen);
}

#[test]
fn rungs_are_well() {
    let chosen = [
        "attention/naive/graph",
        "attention/tiled/graph",
        "attention/flash2/shapes/bf16",
        "attention/multiquery/graph",
        "attention/multiquery/streams",
        "attention/usage",
        "linear/",
    ];
    all_pass("rungs", 19, &chosen);
}

#[test]
fn products_of_the_course_are_well() {
    let chosen = [
        "matmul/naive/packed",
        "matmul/tiled/graph",
        "matmul/vectorized/packed",
        "matmul/coarsened/unaligned-result",
        "matmul/mma/unaligned-result",
        "matmul/wgmma/aligned-rows",
        "matmul/wgmma/graph",
        "matmul/usage",
    ];
    all_pass("products", 8, &chosen);
}

/// Stores of two GPUs at once leave the caller's context unchanged; with one GPU the test is skipped with a message.
#[test]
fn two_gpus_in_one_process() {
    for (fault, counts) in [
        ("two-gpus", "1 passed, 0 failed, 0 skipped"),
        ("", "0 passed, 0 failed, 1 skipped"),
    ] {
        let output = run("two", fault, &[&BUSY[..], &["two-gpus"]].concat());
        let text = text(&output);
        assert_eq!(text.lines().last(), Some(counts), "{text}");
    }
}

/// The controller is a kernel: its threads belong to the stand-in, beside those of the driver's kernels.
#[test]
fn a_controller_of_a_gpu_is_well() {
    let chosen = [
        "tier3/one/errors",
        "tier3/one/ops",
        "tier3/one/lists/warp",
        "tier3/one/matrix/owner/wrong-cid",
        "tier3/one/matrix/owner/reordered",
        "tier3/one/matrix/shared/late",
        "tier3/one/matrix/warp/duplicate",
        "tier3/one/matrix/block/dead-cfs",
        "tier3/one/matrix/divergent/dead-gone",
        "tier3/one/wraps/shared/2^16",
        "tier3/one/size/warp/3x64",
        "tier3/one/size/shared/1x2",
    ];
    all_pass("peer", 14, &chosen);
}

/// The same with another GPU for the controller, and the shapes of memory accesses between the two.
#[test]
fn a_controller_on_another_gpu_is_well() {
    let chosen = [
        "tier3/two/ops/warp",
        "tier3/two/matrix/shared/wrong-sqhd",
        "tier3/two/litmus/doorbell/fence",
        "tier3/two/litmus/relay/order",
    ];
    let small = ["--commands", "900", "--litmus", "500"];
    let small = [&BUSY[..], &small, &["--patience", "9"]].concat();
    let output = run("peers", "two-gpus", &[&small[..], &chosen].concat());
    let text = text(&output);
    let counts = text.lines().last();
    assert_eq!(counts, Some("4 passed, 0 failed, 0 skipped"), "{text}");
    let output = run("no-peer", "", &[&small[..], &chosen[..1]].concat());
    let text = self::text(&output);
    let counts = text.lines().last();
    assert_eq!(counts, Some("0 passed, 0 failed, 1 skipped"), "{text}");
}

/// Every shape runs once in its ordered form, and the doorbell that many warps ring.
#[test]
fn litmus_tests_see_messages_and_nothing_forbidden() {
    let chosen = [
        "message/fence/sys/pinned",
        "buffering/fence/sys/pinned",
        "completion/batch/sys/pinned",
        "ring/fence/sys/pinned",
        "doorbell/fence/sys/pinned",
        "lanes/block/sys/pinned/gpu-cpu",
        "relay/order/sys/pinned/cpu",
        "barrier/block",
        "turns/fence",
        "doorbell-lock/128-warps/32-lanes/127",
    ];
    let output = run(
        "litmus",
        "",
        &[&BUSY[..], &["--litmus", "500", "--patience", "9"], &chosen].concat(),
    );
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    let counts = text.lines().last().unwrap();
    assert_eq!(counts, "16 passed, 0 failed, 0 skipped", "{text}");
}

#[test]
fn a_message_that_overtakes_its_data_is_found() {
    let case = "litmus/message/order/sys/device/gpu-gpu";
    let output = run("torn", "torn", &["--litmus", "64", case]);
    assert_eq!(output.status.code(), Some(1));
    let text = text(&output);
    assert!(text.contains("64 reads, 64 fresh, 64 forbidden"), "{text}");
}

#[test]
fn kernels_that_do_nothing_fail() {
    let output = run("idle", "idle", &["--commands", "10", "stride/owner/dstrd0"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("FAILED  stride/owner/dstrd0"));
    assert!(text(&output).ends_with("0 passed, 1 failed, 0 skipped\n"));
}

/// No count shows that commands share a buffer; the protocol auditor sees it.
#[test]
fn commands_that_share_a_buffer_fail() {
    let cell = ["--commands", "900", "stride/owner/dstrd0"];
    let output = run("onebuffer", "onebuffer", &cell);
    assert_eq!(output.status.code(), Some(1));
    let text = text(&output);
    // The auditor may report any of the queues whose commands share the buffer first.
    assert!(text.contains("driver: queue "), "{text}");
    assert!(text.contains(": BufferShared, "), "{text}");
}

#[test]
fn no_gpu_is_told_from_a_failure() {
    let output = run("none", "nogpu", &["stride"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&output.stderr).starts_with("error: "));
}

#[test]
fn usage_is_checked_before_the_gpu_is_looked_for() {
    let output = run("usage", "", &["--commands", "none"]);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("--commands none: not a number"), "{error}");
}
