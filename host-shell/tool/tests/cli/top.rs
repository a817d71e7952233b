//! `top` and `why`: what programs that run do, seen from outside. This process is the program.

use crate::common::{Folder, Place};
use nvme_host::store::StoreStats;
use nvme_host::{Store, StoreOptions};
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::Value;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Opens a store whose device has a length of its own, by which the tests find it.
fn open(kib: u32) -> (Store, String) {
    let device = format!("sim:mem?size={kib}KiB&block=512");
    let store = Store::open(&device, &StoreOptions::default()).unwrap();
    (store, device)
}

fn stores(folder: &Folder) -> Vec<Value> {
    let value = folder.json(&["top", "--interval", "50ms"]);
    value["stores"].as_array().unwrap().clone()
}

#[test]
fn a_program_that_runs_is_seen_with_its_counts_and_not_after_its_store_was_closed() {
    let folder = Folder::new(Place::Embedded);
    let (store, device) = open(2052);
    store.write_at(0, &[1; 8192]).unwrap();
    store.read_at(0, &mut [0; 4096]).unwrap();
    let all = stores(&folder);
    let mine = all.iter().find(|one| one["device"] == *device).unwrap();
    crate::json::check_value(
        "top",
        &serde_json::json!({
            "schema_version": 1, "stores": [mine], "unreadable": [],
        }),
    );
    assert_eq!(mine["pid"], std::process::id());
    assert_eq!(
        (&mine["bytes_written"], &mine["bytes_read"]),
        (&8192.into(), &4096.into())
    );
    assert_eq!(mine["why"], store.path().why);
    assert_eq!(mine["read_bytes_per_s"], 0.0);
    for (name, _, _) in StoreStats::COUNTERS {
        assert!(mine[name].is_u64(), "{name}");
    }
    let text = folder.ok(&["top", "--once", "--interval", "50ms"]);
    assert!(text.lines().next().unwrap().contains("ROWS/S"), "{text}");
    assert!(text.contains(&device), "{text}");
    drop(store);
    assert!(stores(&folder).iter().all(|one| one["device"] != *device));
}

#[test]
fn rates_are_those_of_the_interval() {
    let folder = Folder::new(Place::Embedded);
    let (store, device) = open(2056);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let begin = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let table = store.table(0, 100, 64).unwrap();
            // Limited, because a failed assertion leaves it running.
            while !is_over.load(std::sync::atomic::Ordering::Relaxed)
                && begin.elapsed() < Duration::from_secs(60)
            {
                let report = table.gather((&[1i64, 2, 2]).into(), &mut [0; 192], None);
                report.unwrap().check().unwrap();
            }
        });
        let all = stores(&folder);
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        let mine = all.iter().find(|one| one["device"] == *device).unwrap();
        assert!(mine["rows_per_s"].as_f64().unwrap() > 0.0, "{mine}");
        assert!(mine["read_bytes_per_s"].as_f64().unwrap() > 0.0, "{mine}");
        assert!(mine["p99_us"].as_u64().unwrap() >= mine["p50_us"].as_u64().unwrap());
        assert!(mine["duplicates_saved"].as_u64().unwrap() > 0);
    });
}

/// Reads a sample of the exposition format: name, labels, value. The grammar is that of Prometheus, version 0.0.4.
fn sample(line: &str) -> (String, Vec<(String, String)>, f64) {
    let (name, rest) = line.split_at(line.find(['{', ' ']).unwrap());
    let is_name = |text: &str| {
        text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
            && !text.starts_with(|c: char| c.is_ascii_digit())
    };
    assert!(is_name(name), "{line}");
    let (mut labels, mut rest) = (Vec::new(), rest);
    if let Some(mut inner) = rest.strip_prefix('{') {
        while !inner.starts_with('}') {
            let (label, value) = inner.split_once("=\"").unwrap();
            assert!(is_name(label), "{line}");
            let (mut text, mut chars) = (String::new(), value.char_indices());
            let end = loop {
                match chars.next().unwrap() {
                    (at, '"') => break at,
                    (_, '\\') => match chars.next().unwrap().1 {
                        'n' => text.push('\n'),
                        c @ ('\\' | '"') => text.push(c),
                        c => panic!("\\{c} in {line}"),
                    },
                    (_, c) => text.push(c),
                }
            };
            labels.push((label.to_owned(), text));
            inner = value[end + 1..].trim_start_matches(',');
        }
        rest = &inner[1..];
    }
    (name.to_owned(), labels, rest.trim().parse().unwrap())
}

#[test]
fn metrics_follow_the_grammar_of_prometheus() {
    let folder = Folder::new(Place::Embedded);
    let (store, device) = open(2060);
    store.write_at(0, &[1; 1024]).unwrap();
    let text = folder.ok(&["top", "--metrics"]);
    let mut kinds = std::collections::HashMap::new();
    let mut found = Vec::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(kinds.insert(name, kind).is_none(), "{name} twice");
        } else if !line.starts_with("# HELP ") {
            found.push(sample(line));
        }
    }
    let mine = |name: &str| -> Vec<_> {
        let of_device = ("device".to_owned(), device.clone());
        let all = found.iter();
        all.filter(|one| one.0 == name && one.1.contains(&of_device))
            .collect()
    };
    assert_eq!(kinds["nvme_gpu_bytes_written_total"], "counter");
    assert_eq!(mine("nvme_gpu_bytes_written_total")[0].2, 1024.0);
    assert_eq!(kinds["nvme_gpu_commands_under_way"], "gauge");
    assert_eq!(kinds["nvme_gpu_latency_us"], "histogram");
    let buckets: Vec<f64> = mine("nvme_gpu_latency_us_bucket")
        .iter()
        .map(|one| one.2)
        .collect();
    assert!(buckets.is_sorted() && buckets.len() == 32, "{buckets:?}");
    let commands = mine("nvme_gpu_commands_total")[0].2;
    assert_eq!(
        (buckets[31], mine("nvme_gpu_latency_us_count")[0].2),
        (commands, commands)
    );
    let info = ("why".to_owned(), store.path().why);
    assert!(mine("nvme_gpu_path_info")[0].1.contains(&info));
    prometheus_client(&text);
}

/// Has the parser of Prometheus' own client for Python read the text, where it is installed.
fn prometheus_client(text: &str) {
    let program = "import sys\ntry:\n    from prometheus_client.parser import text_string_to_metric_families as parse\n\
                   except ImportError:\n    sys.exit(77)\n\
                   found = {family.name: family.type for family in parse(sys.stdin.read())}\n\
                   assert found['nvme_gpu_commands'] == 'counter', found\n\
                   assert found['nvme_gpu_latency_us'] == 'histogram', found\n";
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let child = Command::new(python)
        .args(["-c", program])
        .stdin(Stdio::piped())
        .spawn();
    let Ok(mut child) = child else {
        println!("SKIPPED: python3 is missing");
        return;
    };
    child
        .stdin
        .take()
        .unwrap()
        .write_all(text.as_bytes())
        .unwrap();
    match child.wait().unwrap().code() {
        Some(77) => println!("SKIPPED: install prometheus_client to check the metrics by it"),
        code => assert_eq!(code, Some(0)),
    }
}

#[test]
fn counters_can_be_kept_from_others() {
    let folder = Folder::new(Place::Embedded);
    let image = folder.file("image", 1 << 20, 1);
    let runtime = folder.path("run");
    std::fs::create_dir(&runtime).unwrap();
    let why = |switch: Option<&str>| {
        let mut command = folder.command();
        command.env("XDG_RUNTIME_DIR", &runtime);
        if let Some(switch) = switch {
            command.env("NVME_GPU_COUNTERS", switch);
        }
        let ran = command.arg("why").arg(&image).output().unwrap();
        assert!(ran.status.success());
        runtime.join("nvme-gpu").exists()
    };
    assert!(!why(Some("off")));
    assert!(why(None));
    assert_eq!(
        std::fs::read_dir(runtime.join("nvme-gpu")).unwrap().count(),
        0
    );
}

#[test]
fn advice_names_the_way_and_what_stands_between() {
    let folder = Folder::new(Place::Embedded);
    let image = folder.file("image", 1 << 20, 1);
    let text = folder.ok(&["why", image.to_str().unwrap()]);
    let store = Store::open(image.to_str().unwrap(), &StoreOptions::default()).unwrap();
    assert_eq!(text.trim_end(), store.explain()[0].to_string());
    assert!(text.contains("now: ") && text.contains("better: commands of this process"));
}

#[test]
fn a_live_table_needs_a_terminal() {
    let folder = Folder::new(Place::Embedded);
    let ran = folder.run(&["top"]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("use --once, --json or --metrics"),
        "{}",
        ran.stderr
    );
}

#[test]
fn the_live_table_is_drawn_at_a_terminal_and_keys_work() {
    let folder = Folder::new(Place::Embedded);
    let (_store, device) = open(2064);
    let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&controller).unwrap();
    unlockpt(&controller).unwrap();
    let name = ptsname(&controller, Vec::new()).unwrap();
    let open_terminal = || {
        File::from(rustix::fs::open(&*name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap())
    };
    let size = rustix::termios::Winsize {
        ws_row: 50,
        ws_col: 200,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    rustix::termios::tcsetwinsize(&controller, size).unwrap();
    let mut child = folder
        .command()
        .args(["top", "--interval", "100ms"])
        .env("TERM", "xterm")
        .stdin(open_terminal())
        .stdout(open_terminal())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut terminal = File::from(controller);
    rustix::io::ioctl_fionbio(&terminal, true).unwrap();
    let (mut seen, begin) = (String::new(), Instant::now());
    let mut wait_for = |terminal: &mut File, text: &str| {
        while !seen.contains(text) {
            assert!(
                begin.elapsed() < Duration::from_secs(120),
                "no {text} in {seen}"
            );
            let mut bytes = [0; 4096];
            match terminal.read(&mut bytes) {
                Ok(read) => seen.push_str(&String::from_utf8_lossy(&bytes[..read])),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(error) => panic!("{error}: {seen}"),
            }
        }
    };
    wait_for(&mut terminal, "ROWS/S");
    wait_for(&mut terminal, &device);
    terminal.write_all(b"s").unwrap();
    // Only cells that change are drawn: the last letter of both words is the same.
    wait_for(&mut terminal, "rows/");
    terminal.write_all(b"\x1b[Bq").unwrap();
    // The screen of before comes back.
    wait_for(&mut terminal, "\x1b[?1049l");
    assert!(child.wait().unwrap().success());
}
