//! Measurements that compare paths to a GPU: a file by our driver and by cuFile, rows by ids.

use crate::common::stand_in::{built, command, fails, ok, run};
use crate::common::{Folder, Place};

/// Runs `bench --paths` with the stand-ins; `fault` selects how cuFile answers.
fn by_all_paths(folder: &Folder, fault: &str) -> serde_json::Value {
    let library = folder.path("libcufile.so.0");
    if !library.exists() {
        std::os::unix::fs::symlink(built("libnvme_fake_cufile.so"), &library).unwrap();
    }
    let run = "bench --paths file --gpu --sizes 4KiB,64KiB,512KiB --runs 1 --cpu-threads 2 --json --plot ways.svg";
    let run: Vec<&str> = run.split_whitespace().collect();
    let mut command = command(folder, "", &run);
    let output = command.env("FAKE_CUFILE", fault).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{fault}: {error}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 1);
    serde_json::from_str(&text).unwrap()
}

#[test]
fn the_doctor_says_what_cufile_answers() {
    let folder = Folder::new(Place::Embedded);
    let found = |fault: &str| {
        let mut command = command(&folder, "", &["doctor", "--json"]);
        let output = command.env("FAKE_CUFILE", fault).output().unwrap();
        assert!(output.status.success());
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let mut all = report["findings"].as_array().unwrap().iter();
        let one = all.find(|one| one["check"] == "cuFile").unwrap();
        ["status", "text", "remedy"].map(|name| one[name].as_str().unwrap().to_owned())
    };
    let [status, text, remedy] = found("");
    assert!(
        status == "note" && text.contains("cannot be loaded"),
        "{text}"
    );
    assert!(remedy.contains("gds=off"), "{remedy}");
    let library = folder.path("libcufile.so.0");
    std::os::unix::fs::symlink(built("libnvme_fake_cufile.so"), &library).unwrap();
    let [status, text, remedy] = found("");
    assert!(
        status == "ok" && text.contains("libcufile.so.0: cuFileDriverOpen answered 0"),
        "{text}"
    );
    assert!(remedy.contains("5027"), "{remedy}");
    let [status, text, remedy] = found("unopened:5001");
    assert!(status == "warning" && text.contains("5001"), "{text}");
    assert!(remedy.contains("modprobe nvidia-fs"), "{remedy}");
    let text = run(&folder, "", &["doctor"]).stdout;
    assert!(String::from_utf8(text).unwrap().contains("cuFile: "));
}

#[test]
fn a_file_goes_to_the_gpu_by_every_way() {
    let folder = Folder::new(Place::Embedded);
    folder.file("file", 1 << 20 | 512, 5);
    let report = by_all_paths(&folder, "");
    assert_eq!(
        (&report["to"], &report["bytes"]),
        (&"GPU memory".into(), &(1 << 20).into())
    );
    assert!(report["link_gb_per_s"].as_f64().unwrap() > 0.0);
    let names = ["gpu-direct", "cufile", "cpu-memcpy", "cpu-pinned"];
    let cases = report["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 4 * 5);
    for (index, case) in cases.iter().enumerate() {
        assert_eq!(case["way"], names[index % 4], "{case}");
        assert!(case["of_link"].as_f64().unwrap() > 0.0 && case["checked"] == true);
        let has_steps = index % 4 >= 2;
        assert_eq!(case["overlap"].is_number(), has_steps, "{case}");
    }
    let svg = std::fs::read_to_string(folder.path("ways.svg")).unwrap();
    assert!(svg.contains("cufile") && svg.contains("gpu-direct"));
    for (fault, left, why) in [
        ("unregistered:5027", 15, "5027"),
        ("failing:5030", 15, "5030"),
        ("nobatch", 19, "5035"),
    ] {
        let report = by_all_paths(&folder, fault);
        assert_eq!(report["cases"].as_array().unwrap().len(), left, "{fault}");
        let cufile = &report["ways"][1];
        assert!(
            cufile["why_not"].as_str().unwrap().contains(why),
            "{cufile}"
        );
        assert!(!cufile["remedy"].as_str().unwrap().is_empty());
    }
    let without = run(
        &folder,
        "nogpu",
        &["bench", "--paths", "file", "--gpu", "--runs", "1"],
    );
    assert_eq!(without.status.code(), Some(6));
}

#[test]
fn rows_are_gathered_by_ids_and_checked() {
    let folder = Folder::new(Place::Embedded);
    let device = "sim:mem?size=8MiB&block=4096&queues=32&threads=2";
    let gather = [
        "bench",
        "-d",
        device,
        "--gpu",
        "--gather",
        "--table",
        "4MiB",
        "--row",
        "4096,512,24",
        "--rows",
        "300",
        "--runs",
        "1",
        "--stations",
        "2",
        "--queues",
        "3",
        "--graph-rows",
        "24,100,1000",
        "--halves",
        "--beside-gemm",
        "200,100,64",
    ];
    let text = ok(&folder, &gather);
    let lines: Vec<serde_json::Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let schema = include_str!("../../../../docs/json-schema.json");
    let schema: serde_json::Value = serde_json::from_str(schema).unwrap();
    let members = |value: &serde_json::Value| -> std::collections::BTreeSet<String> {
        value.as_object().unwrap().keys().cloned().collect()
    };
    for (line, name) in lines
        .iter()
        .zip(["gather-rig", "gather-case", "gather-case"])
    {
        let said = &schema["$defs"][name]["properties"];
        assert_eq!(members(line), members(said), "{name}");
    }
    assert_eq!(lines[0]["table_bytes"], 4 << 20);
    assert_eq!(lines[0]["members"], 1);
    // Over two drives, and what they do not have.
    let small = "sim:mem?size=4MiB&queues=8";
    let on = |more: &[&'static str]| {
        let begin = ["bench", "-d", small, "--gpu", "--gather", "--table", "4MiB"];
        let rest = [
            "--rows",
            "20",
            "--runs",
            "1",
            "--queues",
            "2",
            "--members",
            "2",
        ];
        [&begin[..], &rest, more].concat()
    };
    let striped = ok(&folder, &on(&[]));
    assert!(striped.contains(r#""members":2"#), "{striped}");
    let why = fails(&folder, "", 2, &on(&["--cache", "1MiB"]));
    assert!(
        why.contains("a cache of rows belongs to one drive"),
        "{why}"
    );
    for (line, row) in lines[1..].iter().zip([4096, 512, 24]) {
        assert_eq!(
            (&line["row_bytes"], &line["rows"]),
            (&row.into(), &300.into())
        );
        assert_eq!(line["checked"], true);
        let positive = |value: &serde_json::Value| assert!(value.as_f64().unwrap() > 0.0, "{line}");
        positive(&line["rows_per_s"]);
        let graphs = line["graphs"].as_array().unwrap();
        let rows: Vec<&serde_json::Value> = graphs.iter().map(|graph| &graph["rows"]).collect();
        assert_eq!(rows, [24, 100, 300]);
        for graph in graphs {
            positive(&graph["bare_us_p50"]);
            assert!(graph["us_p50"].as_f64() <= graph["us_p99"].as_f64());
        }
        // Gathers in halves may hold one of two stations, which has no room for 300 rows of 4 KiB.
        positive(&graphs[0]["halves"]["copy_us_p50"]);
        assert!(row < 4096 || graphs[2]["halves"].is_null(), "{line}");
        for name in [
            "ms",
            "of_it_beside_gathers",
            "of_it_beside_lookups",
            "lookups",
        ] {
            positive(&line["product"][name]);
        }
    }
    assert_eq!(lines.len(), 4);
    for (sizes, why) in [
        ("8", "--beside-gemm has 1 sizes"),
        ("1048576,1048576,64", "is not multiplied here"),
    ] {
        let more = ["--rows", "20", "--runs", "1", "--beside-gemm", sizes];
        let begin = [
            "bench", "-d", device, "--gpu", "--gather", "--table", "4MiB",
        ];
        let said = fails(&folder, "", 2, &[&begin[..], &more].concat());
        assert!(said.contains(why), "{said}");
    }
}

#[test]
fn products_are_measured_in_several_ways_and_compared() {
    let folder = Folder::new(Place::Embedded);
    let gemv = |more: &[&'static str]| {
        let device = "sim:mem?size=8MiB&block=4096&queues=16&threads=2";
        let begin = ["bench", "-d", device, "--gpu", "--runs", "1"];
        [&begin[..], more].concat()
    };
    let measured = gemv(&[
        "--gemv",
        "300x1024",
        "--stored",
        "q4_k,f32",
        "--stations",
        "2",
        "--readers",
        "2",
    ]);
    let text = ok(&folder, &measured);
    let schema = include_str!("../../../../docs/json-schema.json");
    let schema: serde_json::Value = serde_json::from_str(schema).unwrap();
    let said = &schema["$defs"]["gemv-case"]["required"];
    for (line, case) in text.lines().zip(["gemv_q4k", "gemv_f32"]) {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let names: Vec<&String> = line.as_object().unwrap().keys().collect();
        let said: Vec<&str> = said
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|name| name.as_str())
            .collect();
        assert_eq!(names, said);
        assert_eq!(
            (&line["case"], &line["checked"]),
            (&case.into(), &true.into())
        );
        assert!(line["streamed"]["gb_per_s"].as_f64().unwrap() > 0.0);
    }
    assert_eq!(text.lines().count(), 2);
    let by_ids = [
        "--gemv",
        "300x1024",
        "--ids",
        "77",
        "--stored",
        "q8_0",
        "--readers",
        "1",
    ];
    let line: serde_json::Value = serde_json::from_str(&ok(&folder, &gemv(&by_ids))).unwrap();
    assert_eq!(
        (&line["case"], &line["ids"], &line["checked"]),
        (&"gemv_ids_q8_0".into(), &77.into(), &true.into())
    );
    assert_eq!(line["bytes"], 77 * 1024 / 32 * 34);
    let by_blocks = [
        "--gemm",
        "70x600x96",
        "--stored",
        "bf16,q4_0",
        "--read-blocks",
        "2",
    ];
    let text = ok(&folder, &gemv(&by_blocks));
    let said = schema["$defs"]["gemm-case"]["required"].as_array().unwrap();
    for (line, case) in text.lines().zip(["gemm_bf16", "gemm_q4_0"]) {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let mut names: Vec<&str> = line
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        let mut said: Vec<&str> = said.iter().filter_map(|name| name.as_str()).collect();
        names.sort_unstable();
        said.sort_unstable();
        assert_eq!(names, said);
        assert_eq!(
            (&line["case"], &line["checked"]),
            (&case.into(), &true.into())
        );
        assert!(line["of_resident"].as_f64().unwrap() > 0.0);
        assert_eq!(line["of_by_cpu"].is_null(), case == "gemm_q4_0");
    }
    assert_eq!(text.lines().count(), 2);
    for (more, why) in [
        (&["--gemv", "300"][..], "ROWSxCOLUMNS"),
        (&["--gemm", "3x32"], "TOKENSxROWSxCOLUMNS"),
        (
            &["--gemm", "3x32x32", "--stored", "f32"],
            "use halves of one kind",
        ),
        (&["--gemm", "3x32x32", "--ids", "3"], "does not go with"),
        (
            &["--gemv", "3x32", "--stored", "q5_k"],
            "no format is called 'q5_k'",
        ),
        (
            &["--gemv", "3x32", "--stored", "q6_k"],
            "a multiple of 256 columns",
        ),
        (
            &["--gemv", "3000x4096", "--stored", "f32"],
            "the matrix needs 49152000 bytes",
        ),
    ] {
        let said = fails(&folder, "", 2, &gemv(more));
        assert!(said.contains(why), "{said}");
    }
}

#[test]
fn the_ladder_is_measured_and_compared() {
    let folder = Folder::new(Place::Embedded);
    let ladder = |more: &[&'static str]| {
        let begin = ["bench", "--gpu", "--runs", "1", "--matmul"];
        [&begin[..], more].concat()
    };
    let text = ok(
        &folder,
        &ladder(&["33,48", "--json", "--plot", "ladder.svg"]),
    );
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    let cases = report["cases"].as_array().unwrap();
    let ways = |side: u64| -> Vec<&str> {
        let of_side = cases.iter().filter(|case| case["side"] == side);
        of_side.map(|case| case["way"].as_str().unwrap()).collect()
    };
    let all = [
        "cpu",
        "cpu_blocked",
        "naive",
        "tiled",
        "vectorized",
        "coarsened",
        "mma",
        "wgmma",
    ];
    // cuBLAS does not belong to the stand-in for the driver, and may be installed on this machine.
    for side in [33, 48] {
        let ways: Vec<&str> = ways(side)
            .into_iter()
            .filter(|way| *way != "cublas")
            .collect();
        assert_eq!(ways, all);
    }
    assert_ne!(report["cublas"].is_null(), report["why_not"].is_null());
    for case in cases {
        assert_eq!(case["checked"], true, "{case}");
        assert!(case["gflops"].as_f64().unwrap() > 0.0, "{case}");
        assert!(
            case["error"].as_f64() <= case["allowed_error"].as_f64(),
            "{case}"
        );
    }
    let plot = std::fs::read_to_string(folder.path("ladder.svg")).unwrap();
    assert!(plot.contains("wgmma bf16") && plot.contains("naive"));
    let text = ok(&folder, &ladder(&["20"]));
    assert!(
        text.contains("GFLOP/s") && text.contains("coarsened"),
        "{text}"
    );
    for (more, why) in [(&["0"][..], "0"), (&["8", "--gather"], "--gather")] {
        let said = fails(&folder, "", 2, &ladder(more));
        assert!(said.contains(why), "{said}");
    }
    // Kernels that do nothing leave the poison.
    let said = fails(&folder, "idle", 7, &ladder(&["20"]));
    assert!(said.contains("is no number"), "{said}");
}

#[test]
fn searches_by_the_gpu_find_what_the_cpu_finds() {
    let folder = Folder::new(Place::Embedded);
    let index = [
        "search", "build", "--count", "900", "--dim", "12", "--out", "./v.idx",
    ];
    ok(&folder, &index);
    let query = [
        "search",
        "query",
        "-d",
        "sim:mem?size=16MiB&block=4096&queues=24&threads=2",
        "--load",
        "./v.idx",
        "--gpu",
        "--queries",
        "30",
        "--runs",
        "1",
        "--threads",
        "2",
        "--stations",
        "2",
        "--json",
    ];
    let found: serde_json::Value = serde_json::from_str(&ok(&folder, &query)).unwrap();
    assert_eq!(found["same_answers"], true);
    let (by_gpu, by_cpu) = (&found["by_gpu"], &found["by_cpu"]);
    assert_eq!(by_gpu["recall"], by_cpu["recall"]);
    assert_eq!(
        (&by_gpu["failed"], &by_gpu["stations"]),
        (&0.into(), &2.into())
    );
    let schema = include_str!("../../../../docs/json-schema.json");
    let schema: serde_json::Value = serde_json::from_str(schema).unwrap();
    let said = &schema["$defs"]["search-query"];
    for (object, said) in [
        (&found, said),
        (by_gpu, &said["properties"]["by_gpu"]),
        (by_cpu, &said["properties"]["by_cpu"]),
    ] {
        let mut names: Vec<&str> = object
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        let said = said["required"].as_array().unwrap().iter();
        let mut said: Vec<&str> = said.filter_map(|name| name.as_str()).collect();
        names.sort_unstable();
        said.sort_unstable();
        assert_eq!(names, said);
    }
}
