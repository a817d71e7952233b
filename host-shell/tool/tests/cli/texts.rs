//! Reports of the controller as text, and state that a controller keeps between commands.

use crate::common::{Folder, Place, bytes};

const MEMORY: &str = "sim:mem?size=1MiB";

#[test]
fn every_feature_is_decoded() {
    let folder = Folder::new(Place::Embedded);
    for (fid, names) in [
        ("1", &["ab", "lpw", "mpw", "hpw"][..]),
        ("2", &["ps", "wh"]),
        ("4", &["tmpth", "celsius"]),
        ("5", &["tler", "dulbe"]),
        ("6", &["wce"]),
        ("7", &["submission_queues", "completion_queues"]),
        ("8", &["thr", "time"]),
        ("0x0a", &["dn"]),
        ("0x0c", &["apste"]),
    ] {
        let get = ["get-feature", "-d", MEMORY, "-f", fid];
        let object = folder.json(&get);
        let text = folder.ok(&get);
        let value = object["current_value"].as_str().unwrap();
        assert!(text.contains(&format!("value:{value}")), "{text}");
        for name in names {
            assert!(!object["fields"][name].is_null(), "{name}: {object}");
            assert!(text.contains(name), "{text}");
        }
    }
    for select in ["default", "saved"] {
        let text = folder.ok(&["get-feature", "-d", MEMORY, "-f", "4", "-s", select]);
        assert!(text.contains("Temperature Threshold"), "{text}");
    }
    let text = folder.ok(&["get-feature", "-d", MEMORY, "-f", "5", "-s", "capabilities"]);
    assert!(text.contains("namespace_specific"), "{text}");
    let object = folder.json(&["get-feature", "-d", MEMORY, "-f", "0x0c"]);
    assert_eq!(object["data"].as_str().map(str::len), Some(2 * 256));
    let text = folder.ok(&["get-feature", "-d", MEMORY, "-f", "0x0e"]);
    assert!(
        text.lines().any(|line| line.starts_with("0000: ")),
        "the data: {text}"
    );
}

#[test]
fn a_feature_is_set_in_text_and_its_own_ones_are_refused() {
    let folder = Folder::new(Place::Embedded);
    let set = ["set-feature", "-d", MEMORY, "-f"];
    let text = folder.ok(&[&set[..], &["5", "-n", "1", "--value", "0x10"]].concat());
    assert_eq!(
        text.trim(),
        "set-feature:0x05 (Error Recovery), value:0x00000010"
    );
    for (own, says) in [
        ("7", "is set by the driver itself"),
        ("0x0d", "is set by the driver itself"),
        ("0x0e", "is set by 8 bytes of data, not by a value"),
        ("0x13", "is set by 512 bytes of data, not by a value"),
        ("0x7e", "is set by 4096 bytes of data, not by a value"),
    ] {
        let words = [&set[..], &[own, "--value", "0"]].concat();
        folder.fails(&words, 2, says);
    }
    // One namespace is given for a feature that belongs to one; for all namespaces the controller decides.
    let get = ["get-feature", "-d", MEMORY, "-f"];
    for (feature, nsid) in [("6", "0"), ("5", "1"), ("6", "0xffffffff")] {
        folder.ok(&[&get[..], &[feature, "-n", nsid]].concat());
    }
    let says = "is one of the controller, not of namespace 1";
    folder.fails(&[&get[..], &["6", "-n", "1"]].concat(), 2, says);
    let words = [&set[..], &["6", "-n", "1", "--value", "0"]].concat();
    folder.fails(&words, 2, says);
    folder.ok(&["flush", "-d", MEMORY, "-n", "0xffffffff"]);
    let common = ["identify", "ns", "-d", MEMORY, "-n", "0xffffffff"];
    folder.fails(&common, 1, "Invalid Namespace");
    folder.fails(&["flush", "-d", MEMORY, "-n", "0"], 2, "no namespace 0");
}

#[test]
fn namespaces_are_described_with_their_metadata() {
    let folder = Folder::new(Place::Embedded);
    let d = "sim:mem?size=1MiB&meta=8";
    let text = folder.ok(&["identify", "ns", "-d", d, "-n", "1"]);
    assert!(text.contains("8 bytes of metadata"), "{text}");
    assert!(text.contains("no protection"), "{text}");
    folder.fails(&["read", "-d", d, "-b", "1", "-o", "out"], 1, "metadata");
}

#[test]
fn registers_are_shown_before_and_after_a_bring_up() {
    let folder = Folder::new(Place::Embedded);
    let raw = folder.ok(&["regs", "-d", MEMORY, "--raw"]);
    let up = folder.ok(&["regs", "-d", MEMORY]);
    assert!(raw.contains("cap") && raw.lines().count() == up.lines().count());
    assert!(raw != up, "CSTS.RDY differs");
    assert!(up.contains("normal operation"), "{up}");
}

#[test]
fn a_peer_is_reported_in_words() {
    let folder = Folder::new(Place::Embedded);
    folder.file("disk.img", 1 << 20, 1);
    folder.file("peer", 1 << 20, 2);
    let p2p = ["p2p", "-d", "sim:disk.img", "--peer", "peer", "--size"];
    let text = folder.ok(&[&p2p[..], &["64KiB"]].concat());
    assert!(text.contains("disk to peer: every byte right, "), "{text}");
    assert!(text.contains("peer to disk: every byte right, "), "{text}");
    let large = ["p2p", "-d", "sim:null?size=4GiB", "--peer", "peer"];
    let large = [&large[..], &["--size", "2GiB"]].concat();
    folder.fails(&large, 2, "more than is held in memory");
    // The bytes read back differ from those written: the check reports it, and restores the peer's bytes.
    let peer = bytes(&folder.path("peer"));
    let null = ["p2p", "-d", "sim:null", "--peer", "peer", "--size", "64KiB"];
    folder.fails(&null, 3, "what arrived in the peer's memory");
    assert!(bytes(&folder.path("peer")) == peer);
}

#[test]
fn the_log_of_a_sanitize_says_how_it_ended() {
    let folder = Folder::new(Place::Embedded);
    let sanitize = |device: &str, more: &[&str]| {
        let words = [&["sanitize", "-d", device, "-a"], more].concat();
        folder.run(&words)
    };
    let failing = sanitize(
        "sim:mem?size=1MiB&fault=sanitizefail",
        &["start-block-erase"],
    );
    assert_ne!(failing.code, 0);
    assert!(
        failing.stderr.contains("the most recent sanitize failed"),
        "{}",
        failing.stderr
    );
    let all = sanitize(
        MEMORY,
        &["start-overwrite", "-n", "0", "-p", "0", "--oipbp"],
    );
    assert!(all.stdout.contains("16 passes complete"), "{}", all.stdout);
    assert!(all.stdout.contains("nothing written since"));
    let exit = sanitize(MEMORY, &["exit-failure"]);
    assert_eq!(exit.code, 0, "{}", exit.stderr);
    let slow = "sim:mem?size=1MiB&sanitize=2s";
    let text = sanitize(slow, &["start-crypto-erase", "--no-wait"]).stdout;
    assert!(
        text.contains("in progress") && text.contains(" %)"),
        "{text}"
    );
}

#[test]
fn steps_of_a_ramp_are_rows_and_each_workload_has_its_name() {
    let folder = Folder::new(Place::Embedded);
    let ramp = [
        "bench",
        "-d",
        "sim:null",
        "--ramp",
        "1000:2000:2",
        "--runtime",
        "200ms",
    ];
    let text = folder.ok(&ramp);
    let head = text
        .lines()
        .position(|line| line.trim_start().starts_with("rate"));
    let rows: Vec<&str> = text.lines().skip(head.unwrap() + 1).take(2).collect();
    assert!(
        rows.iter().all(|row| row.split_whitespace().count() >= 5),
        "{text}"
    );
    for name in ["read", "write", "rw", "randread", "randwrite", "randrw"] {
        let bench = [
            "bench",
            "-d",
            "sim:null",
            "--io-size",
            "64KiB",
            "--rw",
            name,
        ];
        let text = folder.ok(&bench);
        assert!(text.contains(&format!("rw={name},")), "{text}");
    }
}

#[cfg(feature = "vfio-user")]
mod kept {
    use super::*;
    use crate::common::{Scratch, Server, binary};

    /// Runs `test` with a folder and the name of a served device.
    fn served(device: &str, test: impl Fn(&Folder, &str)) {
        let (folder, other) = (Folder::new(Place::Embedded), Scratch::new());
        let server = Server::start(binary(), device, &other.0.join("cntrl")).unwrap();
        test(&folder, &server.device());
        server.stop();
    }

    #[test]
    fn errors_are_in_the_log_of_the_next_command() {
        served("sim:mem?size=1MiB", |folder, d| {
            let object = folder.json(&["error-log", "-d", d]);
            assert_eq!(object["errors"].as_array().map(Vec::len), Some(0));
            for _ in 0..2 {
                let log = ["get-log", "-d", d, "-i", "0xc0", "-l", "64"];
                folder.fails(&log, 1, "Invalid Log Page");
            }
            let object = folder.json(&["error-log", "-d", d]);
            let errors = object["errors"].as_array().unwrap();
            assert_eq!(errors.len(), 2, "{object}");
            // The newest first.
            assert_eq!(
                (&errors[0]["error_count"], &errors[0]["sqid"]),
                (&2.into(), &0.into())
            );
            let status = errors[0]["status_text"].as_str().unwrap();
            assert!(status.contains("Invalid Log Page"), "{status}");
            let text = folder.ok(&["error-log", "-d", d, "-e", "1"]);
            let lines: Vec<&str> = text.lines().collect();
            assert_eq!(lines[0], "Error Log Entries for device entries:1");
            assert!(
                lines[1].starts_with("error_count:2 sqid:0 cmdid:"),
                "{text}"
            );
            folder.fails(&["error-log", "-d", d, "-e", "0"], 2, "--log-entries");
        });
    }

    #[test]
    fn events_are_printed_as_they_come() {
        served("sim:mem?size=1MiB&sanitize=700ms", |folder, d| {
            for as_json in [false, true] {
                let start = ["sanitize", "-d", d, "-a", "start-block-erase", "--no-wait"];
                folder.ok(&start);
                let mut events = vec!["events", "-d", d, "--for", "1500ms"];
                if as_json {
                    events.push("--json");
                }
                let text = folder.ok(&events);
                assert_eq!(text.lines().count(), 1, "{text}");
                let shown = match as_json {
                    true => serde_json::from_str(&text).unwrap(),
                    false => serde_json::Value::Null,
                };
                assert_eq!(shown.is_object(), as_json, "{text}");
                assert!(text.to_lowercase().contains("sanitize"), "{text}");
            }
        });
    }
}
