//! `pipeline` without a GPU: reports, traces, pictures, failures.

use crate::common::{Folder, Place};
use serde_json::Value;
use std::collections::BTreeMap;

const SIZES: &str =
    "--columns 128 --rows 32 --parts 4 --vectors 2 --buffers 2 --batches 6 --runs 1 --stored f16";

fn words<'a>(name: &'a str, more: &'a str) -> Vec<&'a str> {
    let sizes = SIZES.split(' ');
    ["pipeline", name]
        .into_iter()
        .chain(sizes)
        .chain(more.split_whitespace())
        .collect()
}

fn report(folder: &Folder, name: &str, more: &str) -> Value {
    let output = folder.output(&words(name, more));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns the spans of a trace by row: begin and end in microseconds, and names.
fn rows(trace: &Value) -> BTreeMap<u64, Vec<(f64, f64, String)>> {
    let mut rows: BTreeMap<u64, Vec<(f64, f64, String)>> = BTreeMap::new();
    for event in trace["traceEvents"].as_array().unwrap() {
        match event["ph"].as_str().unwrap() {
            "M" => assert!(event["args"]["name"].is_string(), "{event}"),
            "X" => {
                let (begin, took) = (
                    event["ts"].as_f64().unwrap(),
                    event["dur"].as_f64().unwrap(),
                );
                assert!(begin >= 0.0 && took >= 0.0, "{event}");
                let name = event["name"].as_str().unwrap().to_owned();
                let row = rows.entry(event["tid"].as_u64().unwrap()).or_default();
                row.push((begin, begin + took, name));
            }
            other => panic!("{other}"),
        }
    }
    rows
}

/// Microseconds that both of two lists of spans cover, each of which has no two at a time.
fn both(a: &[(f64, f64, String)], b: &[(f64, f64, String)]) -> f64 {
    let of =
        |a: &(f64, f64, String), b: &(f64, f64, String)| (a.1.min(b.1) - a.0.max(b.0)).max(0.0);
    a.iter()
        .map(|a| b.iter().map(|b| of(a, b)).sum::<f64>())
        .sum()
}

#[test]
fn a_trace_has_spans_that_nest_and_the_overlap_that_is_reported() {
    let folder = Folder::new(Place::Embedded);
    let more = "--json --trace ./trace.json --plot ./line.svg -d sim:mem?size=1MiB&latency=300us";
    let report = report(&folder, "streamed-batch-processing", more);
    let text = std::fs::read_to_string(folder.path("trace.json")).unwrap();
    let trace: Value = serde_json::from_str(&text).unwrap();
    let rows = rows(&trace);
    // Reads, products, and two buffers.
    assert_eq!(rows.keys().copied().collect::<Vec<_>>(), [1, 2, 10, 11]);
    // Numbers of the trace have three digits after the point.
    const CLOSE: f64 = 0.002;
    for (row, spans) in &rows {
        for (at, one) in spans.iter().enumerate() {
            for other in &spans[at + 1..] {
                let apart = one.1 <= other.0 + CLOSE || other.1 <= one.0 + CLOSE;
                let inside = one.0 <= other.0 + CLOSE && other.1 <= one.1 + CLOSE
                    || other.0 <= one.0 + CLOSE && one.1 <= other.1 + CLOSE;
                assert!(apart || inside, "row {row}: {one:?} {other:?}");
            }
        }
    }
    let named = |row: u64, name: &str| {
        rows[&row]
            .iter()
            .filter(|span| span.2.starts_with(name))
            .count()
    };
    assert_eq!((rows[&1].len(), rows[&2].len()), (6, 6));
    assert_eq!(
        (named(10, "batch"), named(10, "read"), named(10, "product")),
        (3, 3, 3)
    );
    let way = &report["ways"][0];
    let measured = both(&rows[&1], &rows[&2]);
    assert!(
        (way["both_us"].as_f64().unwrap() - measured).abs() < 0.1,
        "{way} {measured}"
    );
    let length = |row: u64| rows[&row].iter().map(|span| span.1 - span.0).sum::<f64>();
    let share = measured / length(1).min(length(2)).max(1e-9);
    assert!(
        (way["overlap"].as_f64().unwrap() - share).abs() < 0.01,
        "{way} {share}"
    );
    // A read waits for the drive.
    assert!(rows[&1].iter().all(|span| span.1 - span.0 >= 300.0));
    let svg = std::fs::read_to_string(folder.path("line.svg")).unwrap();
    assert!(svg.contains("StreamedBatchProcessing") && svg.contains("buffer 1"));
}

#[test]
fn data_stays_on_a_device_and_is_read_again() {
    let folder = Folder::new(Place::Embedded);
    let device = "-d sim:disk.img?size=1MiB --json";
    report(&folder, "direct-nvme-to-matmul", device);
    let kept = format!("{device} --keep-data");
    let again = report(&folder, "DirectNVMeToMatMul", &kept);
    assert_eq!(again["name"], "DirectNVMeToMatMul");
    let other = format!("{kept} --seed 2");
    let output = folder.output(&words("direct-nvme-to-matmul", &other));
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let missing = words(
        "direct-nvme-to-matmul",
        "--keep-data -d sim:none.img?size=1MiB",
    );
    assert_eq!(folder.output(&missing).status.code(), Some(4));
    assert!(!folder.path("none.img").exists());
}

#[test]
fn a_continuous_pipeline_reports_intervals_latencies_and_outages() {
    let folder = Folder::new(Place::Embedded);
    let more = "--runtime 700ms --interval 200ms --json --timeout-ms 200 -d sim:mem?size=1MiB&fault=drop@op=read,nth=30";
    let output = folder.output(&words("continuous-processing", more));
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let (last, intervals) = lines.split_last().unwrap();
    assert!(!intervals.is_empty());
    let in_intervals: u64 = intervals
        .iter()
        .map(|line| line["interval"]["batches"].as_u64().unwrap())
        .sum();
    assert!(in_intervals <= last["ways"][0]["batches"].as_u64().unwrap());
    let met = &last["continuous"];
    assert!(met["failed"].as_u64().unwrap() >= 1, "{met}");
    assert!(met["longest_outage_s"].as_f64().unwrap() < 10.0);
    let us = |name: &str| met["latency_us"][name].as_f64().unwrap();
    assert!(
        us("p50") > 1.0 && us("p50") <= us("p99") && us("p99") <= us("most"),
        "{met}"
    );
    let text = folder.output(&words("continuous-processing", "--runtime 100ms"));
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(
        text.contains("latency of a batch: p50") && text.contains("failed: 0 batches"),
        "{text}"
    );
}

#[test]
fn ctrl_c_ends_a_continuous_pipeline_with_its_report() {
    let folder = Folder::new(Place::Embedded);
    let mut command = folder.command();
    command.args(words(
        "continuous-processing",
        "--runtime 60s --interval 50ms --json",
    ));
    command
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null());
    let mut child = command.spawn().unwrap();
    // The first line shows that it runs.
    let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut out, &mut line).unwrap();
    assert!(line.contains("interval"), "{line}");
    crate::common::interrupt(&child);
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut out, &mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let last: Value = serde_json::from_str(rest.lines().last().unwrap()).unwrap();
    assert_eq!(last["continuous"]["interrupted"], true);
}

#[test]
fn what_no_pipeline_can_do_is_refused() {
    let folder = Folder::new(Place::Embedded);
    for (name, more, part) in [
        ("matmul", "", "direct-nvme-to-matmul"),
        ("direct-nvme-to-matmul", "--columns 100", "a multiple of"),
        (
            "iterative-computation",
            "--rows 33",
            "use as many rows in all matrices as columns",
        ),
        (
            "direct-nvme-to-matmul",
            "-d sim:mem?size=8KiB",
            "on a drive of 8192 bytes",
        ),
        ("direct-nvme-to-matmul", "--plot ./x.gif", ".svg"),
        (
            "direct-nvme-to-matmul",
            "--columns 16777216 --rows 16777216 --parts 65536",
            "longer than 4 GiB",
        ),
        (
            "direct-nvme-to-matmul",
            "--size 18446744073709551615",
            "--size 18446744073709551615 is above 2^64",
        ),
        (
            "direct-nvme-to-matmul",
            "--stored q5_k",
            "no format is called 'q5_k'",
        ),
    ] {
        let sizes = if more.contains("columns") || more.contains("stored") {
            ""
        } else {
            SIZES
        };
        let sizes = match more == "--rows 33" {
            true => "--columns 128 --parts 4",
            false => sizes,
        };
        let all: Vec<&str> = ["pipeline", name]
            .into_iter()
            .chain(sizes.split_whitespace())
            .chain(more.split_whitespace())
            .collect();
        let output = folder.output(&all);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{name} {more}: {error}");
        assert!(error.contains(part), "{name} {more}: {error}");
    }
}
