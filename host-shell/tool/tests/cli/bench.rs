//! `demo` and `bench`: figures that add up, plots, faults and Ctrl-C.

use crate::common::{Folder, Place, Ran, bytes};
use serde_json::Value;
use std::time::Duration;

in_each_place!(
    relayed_doorbells_carry_a_verified_workload,
    bench_by_bytes_moves_exactly_those,
    bench_by_time_takes_that_long,
    bench_keeps_the_mix,
    bench_keeps_to_its_rate,
    verify_reads_back_what_was_written,
    bench_refuses_what_cannot_be,
    bench_over_a_lost_command_times_out,
    ctrl_c_ends_with_130_and_removes_the_image,
    ctrl_c_leaves_the_figures_of_what_ran,
    ctrl_c_does_not_wait_for_a_lost_command,
    intervals_add_up_to_the_report,
);

/// Returns the arguments of a command line without quotes.
fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

fn number(value: &Value) -> f64 {
    value
        .as_f64()
        .unwrap_or_else(|| panic!("{value} is not a number"))
}

#[test]
fn demo_verifies_every_byte_and_cleans_up() {
    let folder = Folder::new(Place::Embedded);
    for block in ["512", "4096"] {
        let report = folder.json(&[
            "demo", "--audit", "--size", "5MiB", "--block", block, "--bs", "60KiB", "--queues", "3",
        ]);
        assert_eq!(report["verified"], true);
        assert_eq!(report["bytes"], 5 << 20);
        assert_eq!(report["gpu"], false);
        let commands: u64 = report["queues"]
            .as_array()
            .unwrap()
            .iter()
            .map(|queue| queue["completed"].as_u64().unwrap())
            .sum();
        assert_eq!(commands, report["commands"].as_u64().unwrap());
        assert_eq!(commands, (5u64 << 20).div_ceil(60 << 10));
        let latency = &report["latency_ns"];
        assert!(
            number(&latency["p50"]) <= number(&latency["p99"]),
            "{latency}"
        );
        assert!(
            number(&latency["p99"]) <= number(&latency["max"]),
            "{latency}"
        );
    }
    assert!(
        folder
            .ok(&["demo", "--audit", "--size", "1MiB"])
            .contains("embedded simulator")
    );
    assert_eq!(folder.names(), [""; 0]);
    folder.ok(&[
        "demo", "--audit", "--size", "1MiB", "--image", "kept.img", "--keep",
    ]);
    assert_eq!(bytes(&folder.path("kept.img")).len(), 1 << 20);
    folder.fails(&["demo", "--image", "kept.img"], 4, "exists");
    assert_eq!(bytes(&folder.path("kept.img")).len(), 1 << 20);
    folder.fails(&["demo", "--size", "1000"], 2, "whole number");
    folder.fails(&["demo", "--size", "lots"], 2, "not a size");
}

#[test]
fn demo_on_a_device_uses_its_first_blocks_alone() {
    let folder = Folder::new(Place::Embedded);
    let before = bytes(&folder.file("disk.img", 4 << 20, 3));
    for (device, doorbells) in [
        ("sim:disk.img?block=512&mdts=1", "direct"),
        ("sim:disk.img", "relay"),
    ] {
        let size = ["--size", "2MiB", "--doorbells", doorbells];
        let report = folder.json(&[&["demo", "--device", device], &size[..]].concat());
        assert_eq!(report["verified"], true);
        assert_eq!(report["bytes"], 2 << 20);
        assert_eq!(report["image"], Value::Null);
        let after = bytes(&folder.path("disk.img"));
        assert!(after[..2 << 20] != before[..2 << 20], "{device}");
        assert!(after[2 << 20..] == before[2 << 20..], "{device}");
    }
    let demo = |more: &[&'static str]| [&["demo", "-d", "sim:disk.img"], more].concat();
    folder.fails(&demo(&["--size", "8MiB"]), 2, "end past namespace");
    folder.fails(&demo(&["--size", "1000"]), 2, "whole number");
    folder.fails(&demo(&["--keep"]), 2, "--keep");
    folder.fails(&demo(&["--irq", "--size", "1MiB"]), 2, "no interrupts");
    folder.fails(
        &demo(&["--rings", "cmb", "--size", "1MiB"]),
        2,
        "controller memory",
    );
    assert_eq!(folder.names(), ["disk.img"]);
}

fn relayed_doorbells_carry_a_verified_workload(place: Place) {
    let folder = Folder::new(place);
    let report = folder.ok(&words(
        "bench -d sim:mem?size=8MiB --rw randrw --io-size 4MiB --queues 2 \
         --depth 8 --verify --doorbells relay",
    ));
    assert!(report.contains("relayed doorbells"), "{report}");
    assert!(report.contains("every byte as written"), "{report}");
}

fn bench_by_bytes_moves_exactly_those(place: Place) {
    let folder = Folder::new(place);
    let report = folder.json(&words(
        "bench -d sim:mem?size=8MiB --rw read --bs 16KiB --queues 2 \
         --depth 4 --io-size 12MiB",
    ));
    let read = &report["jobs"][0]["read"];
    assert_eq!(read["io_bytes"], 12 << 20);
    assert_eq!(read["total_ios"], 768);
    assert_eq!(report["jobs"][0]["write"]["total_ios"], 0);
    assert!(number(&read["iops"]) > 0.0);
    let latency = &read["clat_ns"];
    let percentile = |name: &str| number(&latency["percentile"][name]);
    assert!(number(&latency["min"]) <= percentile("50.000000"));
    assert!(percentile("50.000000") <= percentile("99.000000"));
    assert!(percentile("99.000000") <= percentile("99.990000"));
    // The histogram keeps three digits.
    assert!(percentile("99.990000") <= number(&latency["max"]) * 1.001);
    // Little's law: the average number of commands in flight is at most the allowed depth.
    let in_flight = number(&read["iops"]) * number(&latency["mean"]) / 1e9;
    assert!(in_flight <= 8.0 * 1.05, "{in_flight}");
    let queues = report["queues"].as_array().unwrap();
    assert_eq!(queues.len(), 2);
    assert!(
        queues
            .iter()
            .all(|queue| queue["peak"].as_u64().unwrap() <= 4)
    );
}

/// An option of another measurement would be ignored, and the figures would not be those that were asked for.
#[test]
fn an_option_of_another_measurement_is_refused() {
    let folder = Folder::new(Place::Embedded);
    let mut lines = Vec::new();
    // Options of a workload conflict with the measurements that the others belong to.
    let workloads = [
        "--runtime 1s",
        "--rw randread",
        "--bs 4KiB",
        "--size 1MiB",
        "--io-size 1MiB",
    ];
    for workload in workloads {
        for option in [
            "--zipf",
            "--row 4096",
            "--rows 8",
            "--table 1MiB",
            "--runs 2",
        ] {
            lines.push(format!("bench -d sim:mem {workload} {option}"));
        }
        for option in ["--sizes 4KiB", "--batch 4", "--cpu-threads 2"] {
            lines.push(format!("bench -d sim:mem {workload} {option}"));
            lines.push(format!("bench -d sim:mem --gather {option}"));
        }
    }
    lines.push("bench --paths in --zipf".to_owned());
    lines.push("search build --out ./new.idx --count 50 --dim 8 --element u8".to_owned());
    lines.push("search build --out ./new.idx --seed 3 --dim 8 --element u8".to_owned());
    for option in [
        "--runtime 3s",
        "--recover 3s",
        "--interval 100ms",
        "--file new",
    ] {
        for name in [
            "direct-nvme-to-matmul",
            "streamed-batch-processing",
            "iterative-computation",
        ] {
            lines.push(format!("pipeline {name} {option}"));
        }
    }
    lines.push("pipeline continuous-processing --file new".to_owned());
    lines.push("pipeline data-source-comparison --recover 3s".to_owned());
    if cfg!(feature = "cuda") {
        lines.extend(options_of_a_gpu());
    }
    for line in lines {
        let ran = folder.run(&words(&line));
        assert_eq!(ran.code, 2, "{line}: {}", ran.stderr);
        let option = line.split(' ').rfind(|word| word.starts_with("--"));
        assert!(
            ran.stderr.contains("missing: ") || ran.stderr.contains(option.unwrap()),
            "{line}: {}",
            ran.stderr
        );
    }
    assert_eq!(folder.names(), [""; 0]);
}

fn options_of_a_gpu() -> Vec<String> {
    let mut lines = Vec::new();
    let of_measurements = [
        "--members 2",
        "--cache 1MiB",
        "--graph-rows 8",
        "--halves",
        "--beside-gemm",
        "--stations 2",
        "--latencies 0ns",
        "--row-sizes 4KiB",
        "--batches 32",
        "--most-bytes 1MiB",
        "--hits 50",
        "--walks 2",
        "--hops 2",
        "--ids 3",
        "--read-blocks 2",
        "--stored bf16",
        "--readers 2",
        "--only x",
        "--controller-threads 2",
        "--quick",
    ];
    for option in of_measurements {
        for workload in ["--runtime 1s", "--rw randread", "--io-size 1MiB"] {
            lines.push(format!("bench -d sim:mem --gpu {workload} {option}"));
        }
    }
    for option in ["--latencies 0ns", "--ids 3", "--read-blocks 2", "--quick"] {
        lines.push(format!("bench -d sim:mem --gpu --gather {option}"));
    }
    for option in [
        "--gather",
        "--crossover",
        "--gemv 8x32",
        "--gemm 8x8x32",
        "--matmul 32",
        "--paths in",
        "--plot x.svg",
        "--verify",
        "--rw write",
        "--runtime 1s",
        "--seed 3",
        "--runs 2",
        "--size 1MiB",
        "--queues 2",
        "-d sim:mem",
        "--zipf",
    ] {
        lines.push(format!("bench --gpu --suite queue {option}"));
    }
    for option in ["-d sim:mem", "--queues 2", "--size 1MiB"] {
        lines.push(format!("bench --gpu --matmul 32 {option}"));
    }
    lines
}

fn bench_by_time_takes_that_long(place: Place) {
    let folder = Folder::new(place);
    let report = folder.json(&words("bench -d sim:mem --runtime 500ms --depth 8"));
    let read = &report["jobs"][0]["read"];
    let runtime = number(&read["runtime"]);
    // An upper bound would depend on the other load of the machine.
    assert!(runtime >= 500.0, "{runtime} ms");
    assert!(number(&read["total_ios"]) > 0.0);
}

fn bench_keeps_the_mix(place: Place) {
    let folder = Folder::new(place);
    let arguments = words("bench -d sim:mem --rw randrw --rwmixread 75 --io-size 16MiB");
    let report = folder.json(&arguments);
    let job = &report["jobs"][0];
    let reads = number(&job["read"]["total_ios"]);
    let writes = number(&job["write"]["total_ios"]);
    assert_eq!(reads + writes, 4096.0);
    assert!((0.70..0.80).contains(&(reads / 4096.0)), "{reads} reads");
}

fn bench_keeps_to_its_rate(place: Place) {
    let folder = Folder::new(place);
    let report = folder.json(&words(
        "bench -d sim:null --ramp 1000:3000:3 --runtime 1500ms --plot ramp.svg",
    ));
    let steps = report["jobs"][0]["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 3);
    for (step, rate) in steps.iter().zip([1000.0, 2000.0, 3000.0]) {
        assert_eq!(number(&step["rate_iops"]), rate);
        // The rate is at most the requested one; a busy machine may be slower.
        let iops = number(&step["iops"]);
        assert!(iops > 0.0 && iops <= rate * 1.05, "{iops} of {rate}");
    }
    let svg = String::from_utf8(bytes(&folder.path("ramp.svg"))).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    assert!(svg.contains("p99") && svg.contains("commands/s"));
}

fn verify_reads_back_what_was_written(place: Place) {
    let folder = Folder::new(place);
    folder.file("disk.img", 4 << 20, 1);
    let report = folder.json(&words(
        "bench -d sim:disk.img --rw randrw --bs 8KiB --queues 2 \
         --io-size 8MiB --verify --plot a.png",
    ));
    let written = number(&report["jobs"][0]["write"]["io_bytes"]);
    let verified = number(&report["verified_bytes"]);
    assert!(
        verified > 0.0 && verified <= written,
        "{verified} of {written}"
    );
    let png = bytes(&folder.path("a.png"));
    let decoder = png::Decoder::new(std::io::Cursor::new(&png));
    let mut reader = decoder.read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    reader.next_frame(&mut pixels).unwrap();
    assert!(
        pixels.chunks(3).any(|pixel| pixel == [0, 0, 255]),
        "the line of the reads"
    );
    assert!(pixels.chunks(3).any(|pixel| pixel == [0, 0, 0]), "text");
}

/// Late data is a lost write: the drive reports success, and keeps the old content.
#[test]
fn verify_finds_lost_writes_over_data_of_an_earlier_run_or_pass() {
    let folder = Folder::new(Place::Embedded);
    folder.file("disk.img", 256 << 10, 1);
    let run = |fault: &str, more: &str| {
        let line = format!(
            "bench -d sim:disk.img?block=4096{fault} --rw write --bs 4KiB --depth 4 --verify --seed 5 {more}"
        );
        folder.run(&words(&line))
    };
    let whole = "--io-size 256KiB";
    assert_eq!(run("", whole).code, 0);
    // With the same seed the same units are written, but with other data.
    let lost = run("&fault=latedata:60m@op=write,nth=7", whole);
    assert_eq!(lost.code, 3, "{}", lost.stderr);
    assert!(lost.stderr.contains("LBA "), "{}", lost.stderr);
    // The second pass over 16 blocks.
    let twice = "--size 64KiB --io-size 128KiB";
    assert_eq!(run("", twice).code, 0);
    let lost = run("&fault=latedata:60m@op=write,nth=20", twice);
    assert_eq!(lost.code, 3, "{}", lost.stderr);
}

/// Two queues write the same few blocks: only one write of a block is in flight at a time, so that all data are
/// compared.
#[test]
fn verify_knows_what_blocks_hold_that_are_written_often() {
    let folder = Folder::new(Place::Embedded);
    for rw in ["randwrite", "write", "randrw"] {
        let report = folder.json(&words(&format!(
            "bench -d sim:mem?size=1MiB&block=4096 --rw {rw} --bs 4KiB --size 16KiB --queues 2 --depth 16 \
             --io-size 2MiB --verify"
        )));
        assert_eq!(number(&report["verified_bytes"]), f64::from(16 << 10));
    }
}

fn bench_refuses_what_cannot_be(place: Place) {
    let folder = Folder::new(place);
    let bench = |more: &[&str], text| {
        folder.fails(
            &[&["bench", "-d", "sim:mem?size=1MiB&queues=2"], more].concat(),
            2,
            text,
        )
    };
    bench(&["--bs", "1000"], "multiple");
    bench(&["--bs", "0"], "multiple");
    bench(
        &["--bs", "64MiB"],
        "131072, the controller's largest transfer (MDTS)",
    );
    let on =
        |device: &str, bs: &str, text| folder.fails(&["bench", "-d", device, "--bs", bs], 2, text);
    let no_limit = "sim:mem?size=16MiB&mdts=0";
    on(
        no_limit,
        "0x400000",
        "--bs 4194304 is above 1048576, this driver's largest transfer",
    );
    on(no_limit, "0x12Q", "0x12Q");
    bench(&["--queues", "3"], "grants 2");
    bench(&["--queues", "0"], "--queues");
    bench(&["--depth", "0"], "depth");
    bench(&["--depth", "100000"], "depth");
    bench(&["--size", "1KiB"], "less than one command");
    bench(&["--verify"], "nothing to verify");
    bench(&["--runtime", "0"], "zero");
    bench(&["--ramp", "1:2"], "FROM:TO:STEPS");
    bench(&["--plot", "a.pdf"], ".svg");
    folder.fails(
        &["bench", "-d", "sim:mem", "--plot", "no/a.svg"],
        4,
        "no/a.svg",
    );
    assert_eq!(folder.names(), [""; 0]);
}

fn bench_over_a_lost_command_times_out(place: Place) {
    let folder = Folder::new(place);
    let arguments = words(
        "bench -d sim:mem?fault=drop@op=read,nth=100 --timeout-ms 1000 \
         --io-size 4MiB",
    );
    folder.fails(&arguments, 5, "no answer within 1000 ms");
}

fn ctrl_c_ends_with_130_and_removes_the_image(place: Place) {
    let folder = Folder::new(place);
    for line in ["bench -d sim:mem --runtime 60s", "demo --audit --size 4GiB"] {
        let ran = interrupted(&folder, &words(line), Duration::from_millis(500));
        assert!(
            ran.stderr.starts_with("error: interrupted: "),
            "{}",
            ran.stderr
        );
        assert_eq!(folder.names(), [""; 0]);
    }
}

#[test]
fn verify_reads_back_at_the_depth_of_the_run() {
    let folder = Folder::new(Place::Embedded);
    // Each read takes 200 ms: one after the other the 256 would take 51 s, however fast the machine is.
    let begin = std::time::Instant::now();
    let report = folder.json(&words(
        "bench -d sim:mem?size=1MiB&fault=delay:200ms@op=read --rw write \
         --bs 4KiB --depth 64 --io-size 1MiB --verify",
    ));
    assert_eq!(report["verified_bytes"], 1 << 20);
    assert!(begin.elapsed() < Duration::from_secs(40), "depth 1");
}

/// Runs, presses Ctrl-C after `after`, and expects exit code 130.
fn interrupted(folder: &Folder, arguments: &[&str], after: Duration) -> Ran {
    let started = folder.start(arguments).unwrap();
    std::thread::sleep(after);
    crate::common::interrupt(&started.child);
    let ran = Ran::new(arguments, started.output());
    assert_eq!(ran.code, 130, "{arguments:?}: {}", ran.stderr);
    ran
}

fn ctrl_c_leaves_the_figures_of_what_ran(place: Place) {
    let folder = Folder::new(place);
    let bench = words("bench -d sim:mem?size=8MiB --rw randrw --verify --runtime 60s --queues 2");
    let json = interrupted(
        &folder,
        &[&bench[..], &["--json"]].concat(),
        Duration::from_millis(1500),
    );
    // One object on standard output.
    let report: Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(report["interrupted"], true);
    assert_eq!(report["verified_bytes"], 0);
    let read = &report["jobs"][0]["read"];
    assert!(number(&read["total_ios"]) > 0.0, "{report}");
    assert!(number(&read["runtime"]) < 30_000.0, "{report}");
    let completed = |queue: &Value| queue["completed"].as_u64().unwrap();
    let all: u64 = report["queues"]
        .as_array()
        .unwrap()
        .iter()
        .map(completed)
        .sum();
    let total = number(&read["total_ios"]) + number(&report["jobs"][0]["write"]["total_ios"]);
    assert_eq!(
        all as f64, total,
        "what the queues completed is in the report"
    );
    let text = interrupted(&folder, &bench, Duration::from_millis(1500));
    assert!(
        text.stdout.contains("interrupted after "),
        "{}",
        text.stdout
    );
    assert!(
        !text.stdout.contains("every byte as written"),
        "{}",
        text.stdout
    );
    let whole = folder.json(&["bench", "-d", "sim:mem", "--io-size", "1MiB"]);
    assert_eq!(whole["interrupted"], false);
}

fn ctrl_c_does_not_wait_for_a_lost_command(place: Place) {
    let folder = Folder::new(place);
    let bench = words(
        "bench -d sim:mem?size=8MiB&fault=drop@op=read,nth=100 \
         --timeout-ms 600000 --io-size 64MiB --json",
    );
    let start = std::time::Instant::now();
    let ran = interrupted(&folder, &bench, Duration::from_millis(1500));
    assert!(
        start.elapsed() < Duration::from_secs(60),
        "{:?}",
        start.elapsed()
    );
    let report: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(report["interrupted"], true);
    assert!(number(&report["jobs"][0]["read"]["total_ios"]) >= 99.0);
}

fn intervals_add_up_to_the_report(place: Place) {
    let folder = Folder::new(place);
    let bench = words("bench -d sim:mem?size=8MiB --rw randrw --runtime 1500ms --interval 300ms");
    let lines = folder.ok(&[&bench[..], &["--json"]].concat());
    let lines: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let (report, intervals) = lines.split_last().unwrap();
    assert!((2..=5).contains(&intervals.len()), "{}", intervals.len());
    let mut end = 0.0;
    let (mut reads, mut writes) = (0.0, 0.0);
    for line in intervals {
        let one = &line["interval"];
        let (seconds, at) = (number(&one["seconds"]), number(&one["end_s"]));
        assert!(
            seconds >= 0.3 && (at - end - seconds).abs() < 1e-6,
            "{one} after {end}"
        );
        let commands = number(&one["reads"]) + number(&one["writes"]);
        assert!((number(&one["iops"]) * seconds - commands).abs() <= commands * 0.01);
        (end, reads, writes) = (
            at,
            reads + number(&one["reads"]),
            writes + number(&one["writes"]),
        );
    }
    let job = &report["jobs"][0];
    for (direction, sum) in [("read", reads), ("write", writes)] {
        let total = number(&job[direction]["total_ios"]);
        assert!(sum > 0.0 && sum <= total, "{direction}: {sum} of {total}");
    }
    let text = folder.run(&bench);
    assert_eq!(text.code, 0, "{}", text.stderr);
    let said: Vec<&str> = text.stderr.lines().collect();
    assert!((2..=5).contains(&said.len()), "{}", text.stderr);
    assert!(
        said.iter()
            .all(|line| line.contains(" s: IOPS=") && line.contains("lat mean="))
    );
    assert!(text.stdout.contains("percentiles"), "{}", text.stdout);
}
