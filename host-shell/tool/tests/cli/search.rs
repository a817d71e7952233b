//! `search`: an index on devices and files, and queries that are judged.

use super::common::{Folder, Place};

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
            // The file holds the index at 8192: it is found 8192 bytes further on.
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
    // From a file to a device of memory, for a person, without a judge.
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
    folder.ok(&[&BUILD[..], &["--out", "./large.idx"]].concat());
    let load = ["sim:mem?size=1MiB", "--load", "./large.idx"];
    let said = folder.run(&[&query[..], &load].concat());
    assert!(said.stderr.contains("does not fit"), "{}", said.stderr);
    // More results than candidates.
    let few = ["./large.idx", "--list", "9"];
    let said = folder.run(&[&query[..], &few].concat());
    assert_eq!(said.code, 2, "{}", said.stderr);
}
