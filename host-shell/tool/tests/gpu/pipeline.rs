//! `pipeline` with a GPU, against the stand-in for the driver library.

use crate::common::stand_in::{fails, ok};
use crate::common::{Folder, Place};
use serde_json::Value;

/// Returns a small pipeline by the stand-in.
fn pipeline<'a>(name: &'a str, device: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let sizes = "--gpu --json --columns 256 --rows 64 --parts 4 --vectors 2 --buffers 2 --batches 5 --runs 1 --stored q8_0 -d";
    let sizes: Vec<&str> = sizes.split(' ').collect();
    [&["pipeline", name][..], &sizes, &[device], more].concat()
}

const DEVICE: &str = "sim:mem?size=4MiB&queues=40&threads=2";

#[test]
fn every_pipeline_multiplies_on_the_gpu() {
    let folder = Folder::new(Place::Embedded);
    for (name, sources) in [
        ("direct-nvme-to-matmul", &["gpu-reads"][..]),
        ("StreamedBatchProcessing", &["gpu-reads"]),
        ("iterative-computation", &["gpu-reads"]),
        (
            "DataSourceComparison",
            &["gpu-reads", "cpu-threads", "pinned", "file", "resident"],
        ),
        ("continuous-processing", &["gpu-reads"]),
    ] {
        // Each option where it is used: elsewhere it is refused.
        let mut more = vec!["--trace", "./trace.json"];
        match name {
            "DataSourceComparison" => more.extend(["--file", "./source"]),
            "continuous-processing" => more.extend(["--runtime", "300ms"]),
            _ => {}
        }
        let report: Value =
            serde_json::from_str(&ok(&folder, &pipeline(name, DEVICE, &more))).unwrap();
        assert!(
            report["gpu"].as_str().unwrap().contains("Stand-in"),
            "{report}"
        );
        assert_eq!(report["verified"], true);
        let ways = report["ways"].as_array().unwrap();
        let names: Vec<_> = ways
            .iter()
            .map(|way| way["source"].as_str().unwrap())
            .collect();
        assert_eq!(names, sources, "{name}");
        for way in ways {
            assert!(way["compute_us"].as_f64().unwrap() > 0.0, "{way}");
            let is_read = way["source"] != "resident";
            assert_eq!(way["read_us"].as_f64().unwrap() > 0.0, is_read, "{way}");
            assert_eq!(way["gb_per_s"].is_number(), is_read, "{way}");
        }
        assert!(!folder.path("source").exists());
        let trace = std::fs::read_to_string(folder.path("trace.json")).unwrap();
        let trace: Value = serde_json::from_str(&trace).unwrap();
        assert!(trace["traceEvents"].as_array().unwrap().len() > 5);
    }
}

#[test]
fn a_continuous_pipeline_outlives_what_a_drive_does_to_it() {
    let folder = Folder::new(Place::Embedded);
    for (fault, failed) in [
        // The faults come early, because a busy machine reads few batches in the time, and hit several commands,
        // because a kernel repeats a joined command that failed row by row.
        ("status:0x281@op=read,nth=4-9", 1),
        // The watch thread resets the controller, and later reads succeed.
        ("drop@op=read,nth=6", 1),
    ] {
        let device = format!("{DEVICE}&fault={fault}");
        let more = ["--runtime", "4s", "--timeout-ms", "300"];
        let text = ok(&folder, &pipeline("continuous-processing", &device, &more));
        let report: Value = serde_json::from_str(&text).unwrap();
        let met = &report["continuous"];
        assert!(met["failed"].as_u64().unwrap() >= failed, "{fault}: {met}");
        assert!(
            met["last_failure"].is_string() && met["interrupted"] == false,
            "{met}"
        );
        let last = report["ways"][0]["batches"].as_u64().unwrap();
        assert!(last > met["failed"].as_u64().unwrap(), "{report}");
    }
    let device = format!("{DEVICE}&fault=status:0x281@op=read,nth=6-1000000");
    let more = ["--runtime", "60s", "--recover", "300ms"];
    let line = fails(
        &folder,
        "",
        1,
        &pipeline("continuous-processing", &device, &more),
    );
    assert!(line.contains("Unrecovered Read Error"), "{line}");
    let line = fails(
        &folder,
        "",
        1,
        &pipeline("streamed-batch-processing", &device, &[]),
    );
    assert!(line.contains("Unrecovered Read Error"), "{line}");
    let none = pipeline("direct-nvme-to-matmul", DEVICE, &[]);
    assert!(fails(&folder, "nogpu", 6, &none).contains("finds no GPU"));
}
