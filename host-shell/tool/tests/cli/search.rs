//! `search`: indexes on devices and files, and queries with their recall.

use super::common::{Folder, Place, bytes, data};

const BUILD: [&str; 8] = [
    "search", "build", "--count", "700", "--dim", "10", "--degree", "16",
];

#[test]
fn an_index_is_built_and_searched_wherever_it_lies() {
    let folder = Folder::new(Place::Embedded);
    let file = folder.path("vectors.idx");
    let file = file.to_str().unwrap();
    let built = folder.json(&[&BUILD[..], &["--out", file, "--offset", "8KiB"]].concat());
    let bytes = built["bytes"].as_u64().unwrap();
    assert_eq!(std::fs::metadata(file).unwrap().len(), bytes + 8192);
    let on_drive = ["--out", "sim:drive.img?size=8MiB", "--vectors", "uniform"];
    folder.ok(&[&BUILD[..], &on_drive].concat());
    let query = [
        "search",
        "query",
        "--queries",
        "40",
        "--runs",
        "1",
        "--threads",
        "2",
    ];
    let device = format!("file:{file}");
    for (place, kind) in [
        (&["-d", &device, "--offset", "8192"][..], "clustered"),
        (&["-d", "sim:drive.img"], "uniform"),
        (
            &[
                "-d",
                "sim:mem?size=8MiB",
                "--load",
                file,
                "--offset",
                "8192",
            ],
            "offset",
        ),
    ] {
        let words = [&query[..], place].concat();
        if kind == "offset" {
            // The index begins at byte 8192 of the file, so that it is found at that offset only.
            let said = folder.run(&words);
            assert!(
                said.stderr.contains("no index begins here"),
                "{}",
                said.stderr
            );
            continue;
        }
        let found = folder.json(&words);
        assert_eq!(
            (&found["count"], &found["vectors"]),
            (&700.into(), &kind.into())
        );
        let by_cpu = &found["by_cpu"];
        assert!(by_cpu["recall"].as_f64().unwrap() > 0.8, "{found}");
        assert!(by_cpu["reads_per_query"].as_f64().unwrap() > 10.0);
        assert_eq!(by_cpu["failed"], 0);
        assert!(found["by_gpu"].is_null());
    }
    // From a file to a device in memory, with text output, without a comparison.
    let again = folder.path("again.idx");
    let again = again.to_str().unwrap();
    folder.ok(&[&BUILD[..], &["--out", again]].concat());
    let load = ["-d", "sim:mem?size=8MiB", "--load", again, "--checked", "0"];
    let shown = folder.run(&[&query[..], &load].concat());
    assert!(
        shown.stdout.contains("recall not looked at"),
        "{}",
        shown.stdout
    );
    let none = ["search", "query", "--queries", "0", "--threads", "2"];
    let none = folder.json(&[&none[..], &load].concat());
    assert_eq!(none["by_cpu"]["reads_per_query"], 0.0);
}

#[test]
fn what_cannot_be_is_refused_and_leaves_no_file() {
    let folder = Folder::new(Place::Embedded);
    for (words, code, why) in [
        (
            &["--out", "sim:small.img?size=64KiB"][..],
            2,
            "use fewer vectors",
        ),
        (
            &["--out", "./new.idx", "--sub-dim", "11"],
            2,
            "elements of a subspace",
        ),
        (
            &["--out", "./new.idx", "--offset", "512"],
            2,
            "a multiple of 4096",
        ),
        (
            &["--out", "./new.idx", "--vectors", "round"],
            2,
            "clustered, uniform",
        ),
        (&["--out", "nowhere"], 2, "nowhere"),
    ] {
        let words = [&BUILD[..], words].concat();
        let said = folder.run(&words);
        assert_eq!(said.code, code, "{}", said.stderr);
        assert!(said.stderr.contains(why), "{}", said.stderr);
    }
    assert!(!folder.path("new.idx").exists());
    assert!(!folder.path("small.img").exists());
    let query = ["search", "query", "-d"];
    for (words, code, why) in [
        (&["sim:mem?size=1MiB"][..], 1, "no index begins here"),
        (&["sim:missing.img"], 4, "missing.img"),
        (
            &["sim:mem?size=1MiB", "--load", "./missing.idx"],
            4,
            "missing.idx",
        ),
        (&["sim:mem", "--k", "33"], 2, "33"),
    ] {
        let said = folder.run(&[&query[..], words].concat());
        assert_eq!(said.code, code, "{}", said.stderr);
        assert!(said.stderr.contains(why), "{}", said.stderr);
    }
    // What lies on the device stays, unless the file is an index.
    let before = folder.file("disk.img", 1 << 20, 1);
    folder.file("other", 8192, 2);
    let load = ["sim:disk.img", "--load", "./other"];
    let said = folder.run(&[&query[..], &load].concat());
    assert_eq!(said.code, 1, "{}", said.stderr);
    assert!(said.stderr.contains("./other: "), "{}", said.stderr);
    assert!(bytes(&before) == data(1 << 20, 1));
    folder.ok(&[&BUILD[..], &["--out", "./large.idx"]].concat());
    let load = ["sim:mem?size=1MiB", "--load", "./large.idx"];
    let said = folder.run(&[&query[..], &load].concat());
    assert!(said.stderr.contains("does not fit"), "{}", said.stderr);
    // More results than candidates.
    let few = ["./large.idx", "--list", "9"];
    let said = folder.run(&[&query[..], &few].concat());
    assert_eq!(said.code, 2, "{}", said.stderr);
}

/// Returns a `.fbin` of vectors whose elements are whole numbers.
fn fbin(count: u32, elements: u32, value: impl Fn(u32, u32) -> f32) -> Vec<u8> {
    let mut bytes = [count.to_le_bytes(), elements.to_le_bytes()].concat();
    for vector in 0..count {
        let each = (0..elements).map(|element| value(vector, element));
        bytes.extend(each.flat_map(f32::to_le_bytes));
    }
    bytes
}

/// Vectors of a file are searched for by queries of another file, and the result is a numpy array. Each metric has
/// another answer, which follows from how the vectors were made: each is a multiple of one of 40 axes.
#[test]
fn vectors_of_a_file_are_found_by_queries_of_a_file() {
    let folder = Folder::new(Place::Embedded);
    let length = |vector: u32| (1 + vector / 40) as f32;
    let axes = |vector: u32, element: u32| match vector % 40 == element {
        true => length(vector),
        false => 0.0,
    };
    std::fs::write(folder.path("v.fbin"), fbin(200, 1000, axes)).unwrap();
    let query = |query: u32, element: u32| f32::from(u8::from(query + 7 == element)) * 2.1;
    std::fs::write(folder.path("q.fbin"), fbin(3, 1000, query)).unwrap();
    for (metric, block) in [("euclidean", 1), ("cosine", 0), ("inner_product", 4)] {
        let out = format!("./{metric}.idx");
        let words = [
            "search", "build", "--input", "v.fbin", "--metric", metric, "--out", &out,
        ];
        let built = folder.json(&words);
        assert_eq!(
            (&built["count"], &built["vectors"]),
            (&200.into(), &"given".into())
        );
        let device = format!("file:{out}");
        let words = [
            "search",
            "query",
            "-d",
            &device,
            "--input",
            "q.fbin",
            "--runs",
            "1",
            "-k",
            "1",
            "--list",
            "256",
            "--out-ids",
            "ids.npy",
            "--out-distances",
            "far.npy",
        ];
        let found = folder.json(&words);
        assert_eq!(
            (&found["queries"], &found["checked"]),
            (&3.into(), &3.into())
        );
        assert_eq!(found["by_cpu"]["recall"], 1.0, "{metric}");
        let ids = std::fs::read(folder.path("ids.npy")).unwrap();
        let ids: Vec<i64> = ids[ids.len() - 24..]
            .as_chunks()
            .0
            .iter()
            .map(|id| i64::from_le_bytes(*id))
            .collect();
        let axes: Vec<i64> = ids.iter().map(|id| id % 40).collect();
        assert_eq!(axes, [7, 8, 9], "{metric}");
        // By the angle all of an axis are equal.
        if metric != "cosine" {
            assert!(ids.iter().all(|id| id / 40 == block), "{metric}: {ids:?}");
        }
        assert_eq!(
            folder.json(&["catalog", "far.npy"])["tensors"][0]["dtype"],
            "float32"
        );
    }
}

#[test]
fn files_that_do_not_hold_what_they_say_are_refused_and_leave_no_index() {
    let folder = Folder::new(Place::Embedded);
    let ones = fbin(9, 10, |_, _| 1.0);
    std::fs::write(folder.path("whole.fbin"), &ones).unwrap();
    std::fs::write(folder.path("cut.fbin"), &ones[..ones.len() - 1]).unwrap();
    std::fs::write(folder.path("nan.fbin"), fbin(9, 10, |_, _| f32::NAN)).unwrap();
    std::fs::write(folder.path("raw"), &ones[8..]).unwrap();
    let build = ["search", "build", "--out", "./new.idx", "--input"];
    for (words, why) in [
        (
            &["cut.fbin"][..],
            "it says 9 vectors of 10 elements of f32, and has 367 bytes",
        ),
        (
            &["nan.fbin"],
            "nan.fbin: element 0 of its vector 0 is not finite",
        ),
        (&["raw"], "its name does not say what it holds"),
        (
            &["raw", "--element", "f32"],
            "does not say how many elements a vector has",
        ),
        (
            &["raw", "--element", "f32", "--dim", "7"],
            "no whole vectors of 7",
        ),
        (
            &["raw", "--element", "f64", "--dim", "5"],
            "no type is called 'f64'",
        ),
        (&["whole.fbin", "--dim", "9"], "have 10 elements, not 9"),
        (
            &["whole.fbin", "--element", "f32", "--dim", "10"],
            "it says itself what it holds",
        ),
        (&["whole.fbin", "--count", "5"], "does not go with"),
    ] {
        folder.fails(&[&build[..], words].concat(), 2, why);
        assert!(!folder.path("new.idx").exists(), "{words:?}");
    }
    folder.ok(&[&build[..], &["raw", "--element", "f32", "--dim", "10"]].concat());
    let query = ["search", "query", "-d", "file:./new.idx"];
    folder.fails(&query, 2, "take queries of a file");
    let words = [&query[..], &["--input", "raw", "--element", "u8"]].concat();
    let found = folder.json(&words);
    assert_eq!(found["queries"], 36);
}
