//! The command line with `--gpu`, with a stand-in for the driver library: kernels are host threads, GPU memory is host
//! memory, everything else is the same code as with a GPU.
#![cfg(all(feature = "cuda", feature = "sim"))]

mod common;
#[path = "gpu/crossover.rs"]
mod crossover;
#[path = "gpu/limits.rs"]
mod limits;
#[path = "gpu/pipeline.rs"]
mod pipeline;
#[path = "gpu/ways.rs"]
mod ways;

use common::stand_in::{command, fails, ok, run};
use common::{Folder, Place, bytes};
use std::process::Output;

#[test]
fn what_is_wrong_with_the_driver_is_one_line_each() {
    let folder = Folder::new(Place::Embedded);
    let read = ["read", "-d", "sim:mem?size=1MiB", "--gpu", "-o", "out"];
    for (fault, code, part) in [
        (
            "old",
            6,
            "driver is one for CUDA 11.4, the kernels need CUDA 12.2",
        ),
        ("nogpu", 6, "finds no GPU"),
        ("small", 6, "compute capability 7.5"),
        ("badptx", 6, "line 7; error : Unknown instruction"),
        ("oom", 6, "out of memory"),
        ("idle", 6, "the kernel did 0 of"),
    ] {
        let line = fails(&folder, fault, code, &read);
        let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(line.contains(part), "{fault}: {line}");
        assert!(!folder.path("out").exists());
    }
    let other = ["read", "-d", "sim:mem?size=1MiB", "--gpu", "3", "-o", "out"];
    let line = fails(&folder, "", 2, &other);
    assert!(line.contains("there is no GPU 3"), "{line}");
}

/// Another host formats the namespace while kernels write to it: no launch follows the one that meets the change.
#[test]
fn a_namespace_that_changes_ends_the_command() {
    let folder = Folder::new(Place::Embedded);
    folder.file("in", 1 << 20, 7);
    let device = "sim:mem?size=8MiB&block=4096&queues=8&fault=format:512@op=write,nth=3";
    let write = [
        "write", "-d", device, "-i", "in", "--gpu", "--bytes", "64KiB",
    ];
    // Commands that were in flight at the change may break the auditor's rules; only the drive decides about them.
    let output = command(&folder, "", &write).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    let says = "error: namespace 1 was formatted (4096 -> 512 bytes a block)";
    assert!(error.lines().any(|line| line.starts_with(says)), "{error}");
}

#[test]
fn data_goes_round_through_every_mode_and_tier() {
    let folder = Folder::new(Place::Embedded);
    let image = folder.file("in", 3 << 20 | 4096, 7);
    let device = "sim:disk.img?size=8MiB&block=4096&queues=8&threads=2";
    for (tier, mode, size) in [
        ("0", "warp", "64KiB"),
        ("1", "owner", "128KiB"),
        ("1", "shared", "4KiB"),
        ("2", "block", "128KiB"),
        ("auto", "warp", "100KiB"),
        ("1", "warp", "4KiB --pattern random"),
    ] {
        let (size, more) = size.split_once(' ').unwrap_or((size, ""));
        let more: Vec<&str> = more.split_whitespace().collect();
        let how = [
            "--gpu", "--tier", tier, "--mode", mode, "--bytes", size, "--json",
        ];
        let how = [&how[..], &more].concat();
        let write = ["write", "-d", device, "-s", "5", "-i", "in"];
        let text = ok(&folder, &[&write[..], &how[..]].concat());
        let number = if tier == "auto" { "1" } else { tier };
        assert!(text.contains(&format!("tier {number}: ")), "{text}");
        let read = ["read", "-d", device, "-s", "5", "-b", "769", "-o", "out"];
        ok(&folder, &[&read[..], &how[..]].concat());
        assert!(
            bytes(&folder.path("out")) == bytes(&image),
            "tier {tier}, {mode}"
        );
        // The CPU finds the same.
        ok(&folder, &["compare", "-d", device, "-s", "5", "-i", "in"]);
    }
}

#[test]
fn a_stream_is_verified_and_the_demo_runs_on_the_gpu() {
    let folder = Folder::new(Place::Embedded);
    folder.file("disk.img", 5 << 20, 3);
    let device = "sim:disk.img?block=512&queues=8&threads=2";
    for tier in ["0", "1", "2", "auto"] {
        let text = ok(
            &folder,
            &[
                "stream", "-d", device, "--gpu", "--tier", tier, "--verify", "--size", "9MiB",
                "--json",
            ],
        );
        assert!(text.contains("\"verified\":true"), "{text}");
    }
    // A driver that has no call for many copies makes one for each.
    let stream = ["stream", "-d", device, "--gpu", "--tier", "2", "--verify"];
    assert!(run(&folder, "nobatch", &stream).status.success());
    let text = ok(&folder, &["demo", "--audit", "--size", "3MiB", "--json"]);
    assert!(text.contains("\"gpu\":\"Stand-in\""), "{text}");
    assert!(text.contains("\"verified_by\":[\"gpu\",\"cpu\"]"), "{text}");
    let text = ok(
        &folder,
        &["demo", "--audit", "--size", "1MiB", "--cpu", "--json"],
    );
    assert!(text.contains("\"gpu\":false"), "{text}");
}

#[test]
fn bench_runs_in_every_mode() {
    let folder = Folder::new(Place::Embedded);
    let bench =
        "bench -d sim:null?queues=4&block=512 --gpu --queues 2 --depth 7 --bytes 512 --json";
    let bench: Vec<&str> = bench.split(' ').collect();
    for mode in ["owner", "warp", "block", "block --threads 256", "shared"] {
        let mode: Vec<&str> = mode.split(' ').collect();
        let text = ok(
            &folder,
            &[&bench[..], &["--io-size", "256KiB", "--mode"], &mode[..]].concat(),
        );
        assert!(text.contains("\"commands\":512,"), "{text}");
        assert!(text.contains("\"sqe_writes\":1.0"), "{text}");
    }
    let many = [&bench[..], &["--mode", "block", "--threads", "1025"]].concat();
    assert!(fails(&folder, "", 2, &many).contains("a block of 1025 threads"));
    let long = [
        "read",
        "-d",
        "sim:mem?size=1MiB",
        "--gpu",
        "-t",
        "2100001",
        "-o",
        "out",
    ];
    assert!(fails(&folder, "", 2, &long).contains("use 2100 s (--timeout-ms 2100000) or less"));
}

#[test]
fn lost_commands_are_recovered_and_told() {
    let folder = Folder::new(Place::Embedded);
    let device = "sim:mem?size=8MiB&queues=4&fault=drop@nth=40";
    for mode in ["warp", "shared"] {
        let line = fails(
            &folder,
            "",
            5,
            &[
                "read",
                "-d",
                device,
                "--gpu",
                "--mode",
                mode,
                "--queues",
                "1",
                "--bytes",
                "4KiB",
                "--timeout-ms",
                "200",
                "-o",
                "out",
            ],
        );
        assert!(line.contains("got no answer within 200 ms"), "{line}");
        assert!(
            line.contains("aborted") || line.contains("controller reset"),
            "{line}"
        );
    }
    let wrong = "sim:mem?size=8MiB&queues=4&fault=wrongcid:777@nth=40";
    let line = fails(
        &folder,
        "",
        5,
        &[
            "read", "-d", wrong, "--gpu", "--bytes", "4KiB", "--queues", "1", "-o", "out",
        ],
    );
    assert!(line.contains("ended with a controller reset"), "{line}");
    assert!(!line.contains(" 0 ended"), "{line}");
    let failing = "sim:mem?size=8MiB&queues=4&fault=status:0x281@nth=40";
    let line = fails(
        &folder,
        "",
        1,
        &[
            "read", "-d", failing, "--gpu", "--bytes", "4KiB", "-o", "out",
        ],
    );
    assert!(line.contains("1 of "), "{line}");
}

#[test]
fn a_bar_that_cannot_be_registered_is_relayed() {
    let folder = Folder::new(Place::Embedded);
    let device = "sim:mem?size=1MiB&queues=4";
    let read = [
        "read", "-d", device, "--gpu", "--json", "-o", "out", "--tier",
    ];
    let line = fails(&folder, "bar", 6, &[&read[..], &["1"]].concat());
    assert!(
        line.contains("follow_pfn") && line.contains("--tier 0"),
        "{line}"
    );
    let output = run(&folder, "bar", &[&read[..], &["auto"]].concat());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success() && text.contains("tier 0: "),
        "{text}"
    );
}

#[test]
fn the_suite_prints_a_line_for_each_case() {
    let folder = Folder::new(Place::Embedded);
    let suite = ["bench", "--gpu", "--suite", "queue", "--quick", "--only"];
    let text = ok(&folder, &[&suite[..], &["owner_q1_depth1"]].concat());
    let lines: Vec<serde_json::Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    for limit in [
        "null_controller",
        "null_controller_with_drivers",
        "pcie_sqe_writes",
        "pcie_sqe_writes_128_rings",
        "ping_pong",
        "copy_engine_host_to_gpu",
    ] {
        let mut of_it = lines.iter().filter(|line| line["limit"] == limit);
        assert!(
            of_it.any(|line| line["value"].as_f64().unwrap() > 0.0),
            "{limit}: {text}"
        );
    }
    let cases: Vec<_> = lines
        .iter()
        .filter(|line| line["case"].is_string())
        .collect();
    assert!(!cases.is_empty());
    for case in cases {
        assert!(case["error"].is_null(), "{case}");
        assert!(
            case["value"].as_f64().is_some_and(|value| value > 0.0),
            "{case}"
        );
        assert!(case["per_command"]["sq_doorbells"].is_number(), "{case}");
    }
    let text = ok(&folder, &[&suite[..], &["block_q1"]].concat());
    let block: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    let tried: Vec<_> = block["tried"].as_array().unwrap().iter().collect();
    assert_eq!(tried.len(), 3, "{block}");
    assert!(
        tried.iter().any(|one| one["threads"] == block["threads"]),
        "{block}"
    );
    let text = ok(&folder, &[&suite[..], &["stream"]].concat());
    assert!(
        text.contains("\"case\":\"stream_1mib_tier2\"") && !text.contains("error"),
        "{text}"
    );
}

/// Returns the object that a command prints.
fn json(output: Output) -> serde_json::Value {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn kernels_go_on_after_outages_when_they_may() {
    let folder = Folder::new(Place::Embedded);
    let image = folder.file("in", 2 << 20, 9);
    let go_on = "--gpu --bytes 4KiB --queues 2 --timeout-ms 200 --recover --json";
    let go_on: Vec<&str> = go_on.split(' ').collect();
    for (fault, mode) in [
        ("drop@nth=300", "warp"),
        ("drop@nth=300", "shared"),
        ("wrongcid:777@nth=300", "owner"),
        ("cfs@nth=300", "block"),
        ("allones@nth=400", "warp"),
    ] {
        let device = format!("sim:disk.img?size=4MiB&queues=4&fault={fault}");
        let write = ["write", "-d", &device, "-i", "in", "--mode", mode];
        let written = json(run(&folder, "", &[&write[..], &go_on].concat()));
        let recovery = &written["recovery"];
        assert!(
            recovery["recoveries"].as_u64().unwrap() > 0,
            "{fault}: {written}"
        );
        assert_eq!(recovery["lost"], recovery["retried"], "{written}");
        assert!(recovery["lost"].as_u64().unwrap() > 0, "{written}");
        let read = [
            "read", "-d", &device, "-b", "512", "-o", "out", "--mode", mode,
        ];
        let read = json(run(&folder, "", &[&read[..], &go_on].concat()));
        assert!(
            read["recovery"]["recoveries"].as_u64().unwrap() > 0,
            "{read}"
        );
        assert!(bytes(&folder.path("out")) == bytes(&image), "{fault}");
        ok(&folder, &["compare", "-d", "sim:disk.img", "-i", "in"]);
        std::fs::remove_file(folder.path("disk.img")).unwrap();
    }
    let device = "sim:mem?size=4MiB&queues=4&fault=drop@every=700";
    let bench = ["bench", "-d", device, "--io-size", "8MiB", "--depth", "8"];
    let ran = json(run(&folder, "", &[&bench[..], &go_on].concat()));
    assert_eq!(ran["commands"], 2048, "{ran}");
    assert!(ran["recovery"]["recoveries"].as_u64().unwrap() > 0, "{ran}");
}

#[cfg(feature = "vfio-user")]
#[test]
fn kernels_go_on_with_a_server_that_is_started_again() {
    use common::{Scratch, Server, binary};
    use std::process::Stdio;
    use std::time::{Duration, Instant};
    let (folder, other) = (Folder::new(Place::Embedded), Scratch::new());
    let input = folder.file("in", 24 << 20, 5);
    let (image, socket) = (other.0.join("disk.img"), other.0.join("cntrl"));
    let device = format!("sim:{}?size=24MiB&queues=4", image.display());
    let serve = || {
        let _ = std::fs::remove_file(&socket);
        Server::start(binary(), &device, &socket).unwrap()
    };
    let mut server = serve();
    let name = server.device();
    let write = "write --gpu --bytes 4KiB --queues 1 --depth 1 --timeout-ms 1000 --json -i in";
    let mut arguments: Vec<&str> = write.split(' ').collect();
    arguments.extend(["--recover", "60s", "-d", &name]);
    let mut command = command(&folder, "", &arguments);
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let begin = Instant::now();
    while bytes(&image)[..64].iter().all(|byte| *byte == 0) {
        assert!(begin.elapsed() < Duration::from_secs(60), "no write came");
        std::thread::sleep(Duration::from_millis(1));
    }
    server.kill();
    let server = serve();
    let written = json(child.wait_with_output().unwrap());
    assert_eq!(written["recovery"]["reopened"], 1, "{written}");
    server.stop();
    assert!(bytes(&image) == bytes(&input));
}

#[test]
fn reports_of_kernels_are_text_without_json() {
    let folder = Folder::new(Place::Embedded);
    let device = "sim:null?queues=4&block=512";
    let bench = [
        "bench", "-d", device, "--gpu", "--queues", "2", "--depth", "7",
    ];
    let bench = [&bench[..], &["--bs", "512"]].concat();
    for (rw, what) in [("read", "Read"), ("randwrite", "Write")] {
        let text = ok(
            &folder,
            &[&bench[..], &["--rw", rw, "--io-size", "64KiB"]].concat(),
        );
        assert!(text.starts_with(&format!("{what}: ")), "{text}");
        assert!(
            text.contains("128 commands in ") && text.contains("per command: "),
            "{text}"
        );
    }
    let text = ok(
        &folder,
        &[&bench[..], &["--runtime", "100ms", "--recover"]].concat(),
    );
    assert!(text.contains("driven by GPU 0 (Stand-in)"), "{text}");
    let demo = [
        "demo", "--audit", "--size", "1MiB", "--image", "kept.img", "--keep",
    ];
    let text = ok(&folder, &demo);
    assert!(text.contains("on the GPU and again on the CPU"), "{text}");
    assert!(text.contains("image kept: "), "{text}");
    assert_eq!(bytes(&folder.path("kept.img")).len(), 1 << 20);
}

#[test]
fn what_kernels_cannot_do_is_refused_before_they_run() {
    let folder = Folder::new(Place::Embedded);
    folder.file("in", 4096, 1);
    let device = "sim:mem?size=1MiB&queues=4";
    let refused = |command: &str, part: &str| {
        let words: Vec<&str> = command.split(' ').collect();
        let words = [&words[..], &["-d", device, "--gpu"]].concat();
        let line = fails(&folder, "", 2, &words);
        assert!(line.contains(part), "{command}: {line}");
    };
    refused("bench --rw rw", "do not mix reads and writes");
    refused("bench --rw randrw", "do not mix reads and writes");
    refused("bench --verify --rw write", "leave them out");
    refused("bench --interval 1s", "leave them out");
    refused("bench --bs 64MiB", "is not what a command can move");
    refused("bench --size 2MiB", "use at most 1048576");
    refused("bench --bs 8KiB --size 4KiB", "longer than --size");
    refused("write -i in --fua", "without force unit access");
    refused("write -i in -s 256", "the last LBA is 255");
    refused("stream --lba 256", "less than one command");
    refused(
        "read -b 1 --queues 1 --depth 60000 -o out",
        "use a --depth below",
    );
}

/// Every launch loses a command, so that the limit of recoveries ends the run.
#[test]
fn outages_without_an_end_are_told() {
    let folder = Folder::new(Place::Embedded);
    let device = "sim:mem?size=1MiB&queues=4&fault=drop@every=1";
    let go_on = "--gpu --bytes 4KiB --queues 1 --depth 4 --timeout-ms 300 --recover";
    let go_on: Vec<&str> = go_on.split(' ').collect();
    for command in [
        &["bench", "--io-size", "64KiB"][..],
        &["read", "-b", "64", "-o", "out"],
    ] {
        let words = [command, &["-d", device], &go_on[..]].concat();
        let line = fails(&folder, "", 5, &words);
        assert!(line.contains("outages one after the other"), "{line}");
    }
}

#[test]
fn the_suite_compares_numbers_of_threads() {
    let folder = Folder::new(Place::Embedded);
    let suite = ["bench", "--gpu", "--suite", "queue", "--quick", "--only"];
    let text = ok(&folder, &[&suite[..], &["shared_divergent_q16"]].concat());
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let cases: Vec<serde_json::Value> = lines
        .filter(|line: &serde_json::Value| line["case"].is_string())
        .collect();
    let names: Vec<_> = cases
        .iter()
        .filter_map(|case| case["case"].as_str())
        .collect();
    let expected = [
        "shared_divergent_q16_t32",
        "shared_divergent_q16_t256",
        "shared_divergent_q16",
    ];
    assert_eq!(names, expected, "{text}");
    for case in &cases[..2] {
        assert!(case["error"].is_null(), "{case}");
        assert!(case["registers"].is_number(), "{case}");
    }
    assert!(
        [32, 256]
            .map(Some)
            .contains(&cases[2]["best_threads"].as_u64())
    );
}

#[test]
fn a_witness_climbs_every_rung_by_the_gpu() {
    let folder = Folder::new(Place::Embedded);
    let image = folder.file("disk.img", 2 << 20, 5);
    let before = bytes(&image);
    let run_it = [
        "witness",
        "-d",
        "sim:disk.img?queues=32&threads=2&mdts=6",
        "--quick",
        "-o",
        "w.json",
        "--write-range",
        "64:130",
        "--json",
    ];
    let value: serde_json::Value = serde_json::from_str(&ok(&folder, &run_it)).unwrap();
    assert_eq!(value["gpu"]["model"], "Stand-in");
    let steps = value["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 15);
    for step in steps {
        assert_eq!(step["outcome"], "ok", "{step:#}");
        let by_gpu = step["by"] == "gpu";
        assert_eq!(step["tier"].is_object(), by_gpu, "{step:#}");
    }
    assert!(bytes(&image) == before, "what was there is there again");
    ok(&folder, &["witness", "--check", "w.json"]);
    // Without a usable GPU its steps are skipped with that reason, and those of the CPU run.
    let run_it = [&run_it[..6], &["--json"]].concat();
    let output = run(&folder, "nogpu", &run_it);
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let why = value["steps"][2]["why"].as_str().unwrap();
    assert!(
        output.status.success() && why.contains("finds no GPU"),
        "{why}"
    );
}
