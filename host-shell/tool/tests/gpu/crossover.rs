//! `bench --crossover` against the stand-in for the driver library.

use crate::common::stand_in::{fails, ok};
use crate::common::{Folder, Place};
use serde_json::Value;

const DEVICE: &str = "sim:mem?size=4MiB&queues=8&threads=2";

fn crossover<'a>(device: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let begin = "bench --gpu --crossover --table 2MiB --runs 1 --queues 2 --stations 2 --json -d";
    let begin: Vec<&str> = begin.split(' ').collect();
    [&begin[..], &[device], more].concat()
}

#[test]
fn both_sides_bring_the_same_rows_with_as_many_hits_as_asked_for() {
    let folder = Folder::new(Place::Embedded);
    let more = "--latencies 0ns,30us --row-sizes 512,8KiB --batches 4,60 --hits 0,50 --walks 1,5 --hops 3 --most-bytes 32KiB --plot ratio.svg";
    let more: Vec<&str> = more.split(' ').collect();
    let text = ok(&folder, &crossover(DEVICE, &more));
    let report: Value = serde_json::from_str(&text).unwrap();
    let schema = include_str!("../../../../docs/json-schema.json");
    let schema: Value = serde_json::from_str(schema).unwrap();
    let said = &schema["$defs"]["bench-crossover"];
    let keys = |value: &Value| -> Vec<String> {
        let mut keys: Vec<String> = value.as_object().unwrap().keys().cloned().collect();
        keys.sort();
        keys
    };
    let required = |of: &Value| {
        let all = of["required"].as_array().unwrap().iter();
        let mut names: Vec<String> = all.map(|name| name.as_str().unwrap().to_owned()).collect();
        names.sort();
        names
    };
    assert_eq!(keys(&report), required(said));
    for list in ["machines", "cases", "crossovers", "chains"] {
        let of = &said["properties"][list]["items"];
        for one in report[list].as_array().unwrap() {
            assert_eq!(keys(one), required(of), "{list}");
        }
    }
    // Two latencies, rows on blocks of their own size, without a cache and with two shares of hits.
    let cases = report["cases"].as_array().unwrap();
    assert_eq!(
        (cases.len(), report["machines"].as_array().unwrap().len()),
        (18, 4)
    );
    for case in cases {
        let number = |key: &str| case[key].as_u64().unwrap();
        let hits = number("batch") * number("hit_percent") / 100;
        assert_eq!(number("misses"), number("batch") - hits, "{case}");
        assert_eq!(case["checked"], true);
        for side in ["gpu", "cpu", "cpu_with_ids"] {
            assert!(case[side]["us"].as_f64().unwrap() > 0.0, "{case}");
        }
        // A read takes the drive's latency, from the GPU and from the CPU.
        if number("latency_ns") > 0 && number("misses") > 0 {
            assert!(case["cpu"]["us_least"].as_f64().unwrap() >= 30.0, "{case}");
            assert!(case["gpu"]["us_least"].as_f64().unwrap() >= 30.0, "{case}");
        }
    }
    // 60 rows of 8 KiB are cut to the bytes that a batch may have: 4.
    let batches: Vec<u64> = cases
        .iter()
        .map(|case| case["batch"].as_u64().unwrap())
        .collect();
    let of = |count: u64| batches.iter().filter(|batch| **batch == count).count();
    assert_eq!((of(60), of(4)), (6, 12));
    assert_eq!(report["crossovers"].as_array().unwrap().len(), 6);
    // Rows of 8 KiB are not for walks.
    let chains = report["chains"].as_array().unwrap();
    let walks: Vec<_> = chains
        .iter()
        .map(|chain| (chain["walks"].as_u64(), chain["hops"].as_u64()))
        .collect();
    assert_eq!(
        walks,
        [
            (Some(1), Some(3)),
            (Some(5), Some(3)),
            (Some(1), Some(3)),
            (Some(5), Some(3))
        ]
    );
    for chain in chains {
        assert!(
            chain["checked"] == true && chain["row_bytes"] == 512,
            "{chain}"
        );
        if chain["latency_ns"].as_u64().unwrap() > 0 {
            assert!(
                chain["cpu"]["us_per_hop"].as_f64().unwrap() >= 30.0,
                "{chain}"
            );
            assert!(
                chain["gpu"]["us_per_hop"].as_f64().unwrap() >= 30.0,
                "{chain}"
            );
        }
    }
    let svg = std::fs::read_to_string(folder.path("ratio.svg")).unwrap();
    assert!(
        svg.contains("latency 30 us") && svg.contains("60 rows of 512 B"),
        "{svg}"
    );
}

#[test]
fn a_drive_that_fails_ends_a_comparison_with_the_cause() {
    let folder = Folder::new(Place::Embedded);
    let more = "--latencies 0ns --row-sizes 4KiB --batches 40 --hits 0";
    let more: Vec<&str> = more.split(' ').collect();
    for (fault, code, part) in [
        ("status:0x281@op=read,nth=30", 1, "Unrecovered Read Error"),
        ("drop@op=read,nth=30", 5, "got no answer within 300 ms"),
    ] {
        let device = format!("{DEVICE}&fault={fault}");
        let more = [&more[..], &["--timeout-ms", "300"]].concat();
        let line = fails(&folder, "", code, &crossover(&device, &more));
        assert!(line.contains(part), "{fault}: {line}");
    }
    // The first reads are the CPU's, which looks for its best division; the faults hit the GPU's reads.
    let device = format!("{DEVICE}&fault=status:0x281@op=read,nth=1-100000,qid=1");
    let line = fails(&folder, "", 1, &crossover(&device, &more));
    assert!(line.contains("rows were not read"), "{line}");
}

#[test]
fn what_no_batch_can_have_is_refused() {
    let folder = Folder::new(Place::Embedded);
    for (more, part) in [
        ("--row-sizes 1000", "rows of 1000 bytes"),
        ("--row-sizes 4MiB", "does not lie in a table"),
        (
            "--row-sizes 256KiB --batches 2",
            "a read moves 131072 at most",
        ),
        ("--hits 101", "--hits"),
        ("--latencies 5", "--latencies"),
    ] {
        let more: Vec<&str> = more.split(' ').collect();
        let line = fails(&folder, "", 2, &crossover(DEVICE, &more));
        assert!(line.contains(part), "{more:?}: {line}");
    }
    let other = "sim:mem?size=4MiB&queues=8&block=4096";
    let line = fails(&folder, "", 2, &crossover(other, &["--row-sizes", "512"]));
    assert!(line.contains("not whole blocks of 4096"), "{line}");
}

#[test]
fn what_is_refused_has_overwritten_nothing() {
    let folder = Folder::new(Place::Embedded);
    folder.file("drive.img", 4 << 20, 7);
    let before = std::fs::read(folder.path("drive.img")).unwrap();
    let device = "sim:drive.img?queues=8&threads=2";
    let gather = "bench --gpu --gather --table 2MiB --runs 1 --queues 2 --stations 2 -d";
    let gather: Vec<&str> = gather.split(' ').collect();
    let gather = [&gather[..], &[device]].concat();
    for (begin, more, part) in [
        (
            crossover(device, &[]),
            "--row-sizes 4KiB,256KiB --batches 2",
            "a read moves 131072 at most",
        ),
        (
            gather.clone(),
            "--row 24,4KiB --cache 1KiB",
            "a cache of 1024 bytes is smaller than one set",
        ),
        // The second size alone does not fit.
        (
            gather,
            "--row 24,4KiB --cache 32KiB",
            "a cache of 32768 bytes is smaller than one set",
        ),
    ] {
        let more: Vec<&str> = more.split(' ').collect();
        let line = fails(&folder, "", 2, &[&begin[..], &more].concat());
        assert!(line.contains(part), "{more:?}: {line}");
        let after = std::fs::read(folder.path("drive.img")).unwrap();
        assert!(before == after, "{more:?}: the drive was written");
    }
}
