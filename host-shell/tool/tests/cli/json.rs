//! The output with --json, compared with docs/json-schema.json: each result and each kind of error.

use crate::common::{Folder, Place};
use serde_json::Value;
use std::io::Write;
use std::process::Stdio;

const BLOCK: usize = 4096;

fn schema() -> Value {
    let text = include_str!("../../../../docs/json-schema.json");
    serde_json::from_str(text).unwrap()
}

/// The keywords that the schema uses: a keyword that is not checked here would be a promise that no test keeps.
const KEYWORDS: [&str; 12] = [
    "type",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "enum",
    "const",
    "anyOf",
    "$ref",
    "minimum",
    "description",
    "title",
];

fn is(value: &Value, kind: &str) -> bool {
    match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => panic!("no type is called {kind}"),
    }
}

/// Returns the parts of `value`, which is at `place`, that break `rule`.
fn broken(root: &Value, rule: &Value, value: &Value, place: &str) -> Result<(), String> {
    let wrong = |what: String| Err(format!("{place}: {what}: {value}"));
    for (keyword, wanted) in rule.as_object().expect("a rule is an object") {
        assert!(
            KEYWORDS.contains(&keyword.as_str()),
            "unchecked keyword {keyword}"
        );
        match keyword.as_str() {
            "$ref" => {
                let name = wanted
                    .as_str()
                    .and_then(|path| path.strip_prefix("#/$defs/"));
                broken(root, &root["$defs"][name.unwrap()], value, place)?;
            }
            "type" => {
                let kinds: Vec<&str> = match wanted {
                    Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
                    kind => kind.as_str().into_iter().collect(),
                };
                if !kinds.iter().any(|kind| is(value, kind)) {
                    return wrong(format!("is no {kinds:?}"));
                }
            }
            "const" if value != wanted => return wrong(format!("is not {wanted}")),
            "enum" if !wanted.as_array().unwrap().contains(value) => {
                return wrong(format!("is none of {wanted}"));
            }
            "minimum" if value.as_f64() < wanted.as_f64() => {
                return wrong(format!("is below {wanted}"));
            }
            "anyOf" => {
                let any = wanted.as_array().unwrap().iter();
                let tried: Vec<_> = any.map(|rule| broken(root, rule, value, place)).collect();
                if tried.iter().all(Result::is_err) {
                    return wrong(format!("fits none: {tried:?}"));
                }
            }
            // The schema does not describe values that are no objects.
            "required" if value.is_object() => {
                for name in wanted.as_array().unwrap().iter().filter_map(Value::as_str) {
                    if value.get(name).is_none() {
                        return wrong(format!("has no {name}"));
                    }
                }
            }
            "items" => {
                for (index, item) in value.as_array().into_iter().flatten().enumerate() {
                    broken(root, wanted, item, &format!("{place}[{index}]"))?;
                }
            }
            "properties" | "additionalProperties" => {}
            _ => {}
        }
    }
    for (name, member) in value.as_object().into_iter().flatten() {
        let place = format!("{place}.{name}");
        match (&rule["properties"][name], &rule["additionalProperties"]) {
            (Value::Null, Value::Bool(false)) => return Err(format!("{place}: not in the schema")),
            (Value::Null, Value::Object(_)) => {
                broken(root, &rule["additionalProperties"], member, &place)?;
            }
            (Value::Null, _) => {}
            (rule, _) => broken(root, rule, member, &place)?,
        }
    }
    Ok(())
}

/// Checks that `value` follows the definition `name`.
pub fn check_value(name: &str, value: &Value) {
    check(&schema(), name, value);
}

fn check(root: &Value, name: &str, value: &Value) {
    let rule = &root["$defs"][name];
    assert!(rule.is_object(), "docs/json-schema.json has no {name}");
    assert_eq!(broken(root, rule, value, name), Ok(()));
    let among = root["anyOf"].as_array().unwrap().iter();
    let path = format!("#/$defs/{name}");
    assert!(
        among.clone().any(|rule| rule["$ref"] == path.as_str()),
        "{name} is not among all"
    );
}

#[test]
fn a_value_that_breaks_the_schema_is_found() {
    let root = schema();
    let good = serde_json::json!({ "schema_version": 1, "lba": 0, "blocks": 1 });
    let rule = &root["$defs"]["write-zeroes"];
    assert_eq!(broken(&root, rule, &good, ""), Ok(()));
    for (name, value) in [
        ("lba", serde_json::json!("0")),
        ("lba", serde_json::json!(-1)),
        ("schema_version", serde_json::json!(2)),
        ("colour", serde_json::json!("red")),
    ] {
        let mut bad = good.clone();
        bad[name] = value;
        assert!(broken(&root, rule, &bad, "").is_err(), "{bad}");
    }
    assert!(broken(&root, rule, &serde_json::json!({ "schema_version": 1 }), "").is_err());
    assert!(broken(&root, rule, &serde_json::json!([]), "").is_err());
}

#[test]
fn every_result_follows_the_schema() {
    let (folder, root) = (Folder::new(Place::Embedded), schema());
    folder.file("disk.img", 64 * BLOCK, 1);
    folder.file("in", 2 * BLOCK, 2);
    super::files::write_image(&folder);
    let d = "sim:disk.img";
    let rows: &[(&str, &[&str])] = &[
        ("write", &["write", "-d", d, "-i", "in"]),
        ("compare", &["compare", "-d", d, "-i", "in"]),
        ("read", &["read", "-d", d, "-o", "out"]),
        (
            "write-zeroes",
            &["write-zeroes", "-d", d, "-s", "4", "-b", "1"],
        ),
        ("dsm", &["dsm", "-d", d, "--ad", "-s", "5", "-b", "1"]),
        ("flush", &["flush", "-d", d]),
        ("list-ns", &["list-ns", "-d", d]),
        ("identify-controller", &["identify", "ctrl", "-d", d]),
        ("identify-controller", &["id-ctrl", "-d", d]),
        ("identify-namespace", &["identify", "ns", "-d", d]),
        ("identify-namespace", &["id-ns", "-d", d]),
        ("smart-log", &["smart-log", "-d", d]),
        ("error-log", &["error-log", "-d", d]),
        ("get-feature", &["get-feature", "-d", d, "-f", "7"]),
        ("get-feature", &["get-feature", "-d", d, "-f", "0x0e"]),
        (
            "get-feature",
            &["get-feature", "-d", d, "-f", "4", "-s", "capabilities"],
        ),
        (
            "set-feature",
            &["set-feature", "-d", d, "-f", "6", "--value", "0"],
        ),
        ("regs", &["regs", "-d", d]),
        ("get-log", &["get-log", "-d", d, "-i", "2", "-l", "512"]),
        ("passthru", &["io-passthru", "-d", d, "-O", "0", "-n", "1"]),
        ("reset", &["reset", "-d", d]),
        ("sanitize-log", &["sanitize-log", "-d", d]),
        ("format", &["format", "-d", "sim:mem", "-n", "1"]),
        (
            "sanitize-log",
            &["sanitize", "-d", "sim:mem", "-a", "start-block-erase"],
        ),
        ("bench", &["bench", "-d", d, "--io-size", "64KiB"]),
        (
            "bench",
            &["bench", "-d", d, "--io-size", "64KiB", "--recover", "1s"],
        ),
        (
            "bench",
            &[
                "bench",
                "-d",
                d,
                "--rw",
                "randrw",
                "--io-size",
                "64KiB",
                "--verify",
            ],
        ),
        (
            "bench",
            &[
                "bench",
                "-d",
                d,
                "--ramp",
                "1000:2000:2",
                "--runtime",
                "200ms",
            ],
        ),
        ("stream", &["stream", "-d", d]),
        ("ls", &["ls", "./ext4.img:/"]),
        ("cp", &["cp", "./ext4.img:/f", "copied"]),
        ("stat", &["stat", "./ext4.img:/f"]),
        ("stat", &["stat", "./ext4.img:/l"]),
        ("catalog", &["catalog", "two.safetensors"]),
        ("catalog", &["catalog", "--metadata", "two.safetensors"]),
        ("import", &["import", "in", "-d", d, "--offset", "512"]),
        ("verify", &["verify", "in", "-d", d, "--offset", "512"]),
        ("manifest", &["manifest", "model.gguf", "-o", "hashes"]),
        (
            "generate",
            &["generate", "model.gguf", "-p", "Hi", "--tokens", "2"],
        ),
        (
            "pipeline",
            &[
                "pipeline",
                "data-source-comparison",
                "--columns",
                "64",
                "--rows",
                "8",
                "--runs",
                "1",
            ],
        ),
        (
            "pipeline",
            &[
                "pipeline",
                "continuous-processing",
                "--columns",
                "64",
                "--rows",
                "8",
                "--runtime",
                "50ms",
            ],
        ),
        ("doctor", &["doctor"]),
        ("topology", &["topology"]),
        ("top", &["top", "--interval", "10ms"]),
        ("why", &["why", "sim:mem"]),
        ("list", &["list"]),
    ];
    std::fs::write(folder.path("model.gguf"), super::generate::model()).unwrap();
    for (name, arguments) in rows {
        let value = folder.json(arguments);
        check(&root, name, &value);
        let first = value.as_object().unwrap().keys().next();
        assert_eq!(
            first.map(String::as_str),
            Some("schema_version"),
            "{arguments:?}"
        );
    }
    let demo = folder.json(&["demo", "--size", "1MiB"]);
    let name = if demo["gpu"] == false {
        "demo"
    } else {
        "demo-gpu"
    };
    check(&root, name, &demo);
    if !cfg!(feature = "cuda") || demo["gpu"] == false {
        return;
    }
    check(&root, "stream", &folder.json(&["stream", "-d", d, "--gpu"]));
    check(
        &root,
        "bench-gpu",
        &folder.json(&["bench", "-d", d, "--gpu", "--io-size", "1MiB"]),
    );
    check(
        &root,
        "write",
        &folder.json(&["write", "-d", d, "-i", "in", "--gpu"]),
    );
    check(
        &root,
        "read",
        &folder.json(&["read", "-d", d, "-o", "out", "--gpu"]),
    );
}

#[test]
fn the_lines_of_an_interval_follow_the_schema() {
    let (folder, root) = (Folder::new(Place::Embedded), schema());
    let run = "bench -d sim:mem --runtime 400ms --interval 100ms --json";
    let text = folder.ok(&run.split(' ').collect::<Vec<_>>());
    let mut lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    check(&root, "bench", &lines.pop().unwrap());
    assert!(!lines.is_empty());
    for line in lines {
        check(&root, "bench-interval", &line);
    }
    let run = "pipeline continuous-processing --columns 64 --rows 8 --runtime 400ms --interval 100ms --json";
    let text = folder.ok(&run.split(' ').collect::<Vec<_>>());
    let (intervals, report) = text.trim_end().rsplit_once('\n').unwrap();
    check(&root, "pipeline", &serde_json::from_str(report).unwrap());
    for line in intervals.lines() {
        check(
            &root,
            "pipeline-interval",
            &serde_json::from_str(line).unwrap(),
        );
    }
}

#[test]
fn the_lines_of_a_gather_without_a_gpu_follow_the_schema() {
    let (folder, root) = (Folder::new(Place::Embedded), schema());
    let run = "bench -d sim:mem?size=8MiB --gather --table 2MiB --row 512,4096 --rows 100 --runs 2 --queues 2 \
               --zipf --plot rows.svg";
    let text = folder.ok(&run.split_whitespace().collect::<Vec<_>>());
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    check(&root, "gather-cpu-rig", &lines[0]);
    assert_eq!((&lines[0]["threads"], lines.len()), (&2.into(), 3));
    for (line, row_bytes) in lines[1..].iter().zip([512, 4096]) {
        check(&root, "gather-cpu-case", line);
        let case = (&line["row_bytes"], &line["rows"], &line["ids"]);
        assert_eq!(case, (&row_bytes.into(), &100.into(), &"zipf_0.99".into()));
    }
    let svg = std::fs::read_to_string(folder.path("rows.svg")).unwrap();
    assert!(svg.contains("M rows/s") && svg.contains("the rows out of memory"));
    assert!(!svg.contains("and one copy"), "nothing of a GPU");
}

#[test]
fn the_ways_of_a_file_to_memory_follow_the_schema() {
    let (folder, root) = (Folder::new(Place::Embedded), schema());
    let run = "bench --paths made --size 1MiB --sizes 4KiB,256KiB --runs 1 --cpu-threads 2 --batch 8 --plot ways.svg";
    let report = folder.json(&run.split_whitespace().collect::<Vec<_>>());
    check(&root, "bench-paths", &report);
    assert_eq!(
        (&report["to"], &report["bytes"]),
        (&"host memory".into(), &(1 << 20).into())
    );
    let cases = report["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 8, "two sizes, random and batch by two ways");
    assert!(cases.iter().all(|case| case["checked"] == true));
    let svg = std::fs::read_to_string(folder.path("ways.svg")).unwrap();
    assert!(svg.contains("GB/s") && svg.contains("cpu-memcpy") && !svg.contains("cufile"));
    assert_eq!(
        folder.names(),
        ["ways.svg"],
        "the file that was made is removed"
    );
    // An existing file is not changed; a device that the user names gets its bytes.
    let before = std::fs::read(folder.file("kept", 64 << 10, 3)).unwrap();
    let run = "bench --paths kept -d sim:disk.img?size=1MiB --sizes 4KiB --runs 1";
    let text = folder.ok(&run.split_whitespace().collect::<Vec<_>>());
    assert!(
        text.contains("cpu-pinned: not measured: there is no GPU"),
        "{text}"
    );
    assert!(text.contains("every byte compared"), "{text}");
    assert!(std::fs::read(folder.path("kept")).unwrap() == before);
    assert!(std::fs::read(folder.path("disk.img")).unwrap()[..64 << 10] == before);
    folder.fails(
        &["bench", "--paths", "kept", "--sizes", "1000"],
        2,
        "multiples of 4096",
    );
    folder.fails(&["bench", "--sizes", "4096", "-d", "sim:mem"], 2, "--paths");
    folder.fails(&["bench"], 2, "--device");
}

#[test]
fn the_lines_of_a_server_follow_the_schema() {
    let (folder, root) = (Folder::new(Place::Embedded), schema());
    let mut child = folder
        .command()
        .args(["serve", "-d", "sim:null", "-s", "cntrl", "--once", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    let mut next = || -> Value {
        let line = lines.next().unwrap().unwrap();
        serde_json::from_str(&line).unwrap()
    };
    check(&root, "serve-ready", &next());
    let mut client = std::os::unix::net::UnixStream::connect(folder.path("cntrl")).unwrap();
    client.write_all(&[0xFF; 64]).unwrap();
    check(&root, "serve-end", &next());
    assert!(child.wait().unwrap().success());
}

#[test]
fn an_event_on_standard_error_follows_the_schema() {
    let (folder, root) = (Folder::new(Place::Embedded), schema());
    let action = ["sanitize", "-d", "sim:mem", "-a", "start-block-erase"];
    // The event may be posted after the command's end, which drops it.
    let seen = (0..20).any(|_| {
        let mut command = folder.command();
        let ran = command.args(action).arg("--json").output().unwrap();
        assert!(ran.status.success());
        let text = String::from_utf8(ran.stderr).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
        let lines: Vec<Value> = lines.collect();
        lines.iter().for_each(|line| check(&root, "warning", line));
        lines.iter().any(|line| line["event"]["event_type"] == 6)
    });
    assert!(seen, "no event in 20 runs");
}

#[test]
fn every_kind_of_error_follows_the_schema() {
    let (folder, root) = (Folder::new(Place::Embedded), schema());
    folder.file("disk.img", 64 * BLOCK, 1);
    folder.file("in", 2 * BLOCK, 2);
    let gone = "vfio-user:nowhere";
    let rows: &[(&[&str], &str, i64)] = &[
        (&["fly"], "usage", 2),
        (&["read", "-d", "sim:disk.img", "-b", "0"], "usage", 2),
        (&["read", "-d", "sim:missing"], "file", 4),
        (&["read", "-d", gone], "file", 4),
        (
            &["compare", "-d", "sim:disk.img", "-i", "in"],
            "mismatch",
            3,
        ),
        (
            &[
                "read",
                "-d",
                "sim:disk.img?fault=status:0x281@op=read",
                "-o",
                "out",
            ],
            "command",
            1,
        ),
        (
            &[
                "read",
                "-d",
                "sim:disk.img?fault=cfs@op=identify",
                "-o",
                "out",
            ],
            "device",
            1,
        ),
        (
            &[
                "read",
                "-d",
                "sim:disk.img?fault=drop@op=read",
                "-o",
                "out",
                "--timeout-ms",
                "200",
            ],
            "timeout",
            5,
        ),
        (
            &["read", "-d", "sim:disk.img?fault=allones", "-o", "out"],
            "gone",
            5,
        ),
        (&["bind", "ffff:ff:1f.7"], "environment", 6),
    ];
    for (arguments, code, exit_code) in rows {
        let output = folder
            .command()
            .args(*arguments)
            .arg("--json")
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        let value: Value =
            serde_json::from_str(&said).unwrap_or_else(|_| panic!("{arguments:?}: {said}"));
        check(&root, "error", &value);
        let error = &value["error"];
        assert_eq!(
            (&error["code"], &error["exit_code"]),
            (&(*code).into(), &(*exit_code).into()),
            "{said}"
        );
        assert_eq!(
            output.status.code().map(i64::from),
            Some(*exit_code),
            "{said}"
        );
        assert!(output.stdout.is_empty());
        assert_eq!(error["status"].is_object(), *code == "command", "{said}");
    }
    let output = folder
        .command()
        .args([
            "read",
            "-d",
            "sim:disk.img?fault=status:0x281@op=read",
            "-o",
            "out",
            "--json",
        ])
        .output()
        .unwrap();
    let value: Value = serde_json::from_slice(&output.stderr).unwrap();
    let status = &value["error"]["status"];
    assert_eq!((&status["sct"], &status["sc"]), (&2.into(), &0x81.into()));
}
