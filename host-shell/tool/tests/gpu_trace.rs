//! Traces of kernels: `--trace` over a stand-in for the driver library, checked by the protocol auditor, and with a
//! damaged ring of events.
#![cfg(all(feature = "cuda", feature = "sim"))]

mod common;

use common::stand_in::{ok, run};
use common::{Folder, Place, bytes};
use nvme_auditor::{Rule, journal::DriverJournal};

#[test]
fn a_trace_has_an_event_for_each_end_of_each_command() {
    let folder = Folder::new(Place::Embedded);
    let device = "sim:mem?size=1MiB&queues=4";
    let read = [
        "read", "-d", device, "--gpu", "--bytes", "64KiB", "-o", "out", "--trace",
    ];
    ok(&folder, &[&read[..], &["t.txt"]].concat());
    let text = String::from_utf8(bytes(&folder.path("t.txt"))).unwrap();
    let count = |word| text.lines().filter(|line| line.contains(word)).count();
    assert_eq!(
        (count(" submitted: "), count(" completed: ")),
        (16, 16),
        "{text}"
    );
    ok(&folder, &[&read[..], &["t.json"]].concat());
    let trace: serde_json::Value = serde_json::from_slice(&bytes(&folder.path("t.json"))).unwrap();
    let slices = trace["traceEvents"].as_array().unwrap();
    assert_eq!(slices.len(), 16);
    assert!(slices.iter().all(|slice| slice["ph"] == "X"), "{trace}");
}

/// Returns the auditor's findings in a trace: the broken rules, and the number of submitted commands.
fn journal(lines: impl Iterator<Item = String>) -> (Vec<Rule>, u64) {
    let mut journal = DriverJournal::default();
    lines.for_each(|line| journal.line(&line));
    let rules = journal.findings().iter().map(|one| one.rule).collect();
    (rules, journal.commands())
}

#[test]
fn the_auditor_reads_traces_and_misses_what_is_missing() {
    let folder = Folder::new(Place::Embedded);
    let device = "sim:mem?size=1MiB&queues=4";
    let read = "read --gpu --bytes 4KiB --queues 2 --depth 8 -o out --trace t.txt --mode";
    let read: Vec<&str> = read.split(' ').collect();
    for mode in ["owner", "warp", "block", "shared"] {
        ok(&folder, &[&read[..], &[mode, "-d", device]].concat());
        let text = String::from_utf8(bytes(&folder.path("t.txt"))).unwrap();
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        assert_eq!(journal(lines.iter().cloned()), (vec![], 256), "{mode}");
        let position = |word| lines.iter().position(|line| line.contains(word)).unwrap();
        let without = |at: usize| {
            let rest = lines.iter().enumerate().filter(move |(i, _)| *i != at);
            journal(rest.map(|(_, line)| line.clone()))
        };
        let (rules, commands) = without(position(" submitted: "));
        assert_eq!((rules, commands), (vec![Rule::UnknownCommand], 255));
        let twice = lines.iter().take(1).chain(&lines).cloned();
        assert_eq!(journal(twice).0, [Rule::CidReused]);
        // A missing end of a command is found when its identifier is reused, after 16 uses of its slot.
        let (rules, _) = without(position(" completed: "));
        assert!(rules.is_empty() || rules == [Rule::CidReused], "{rules:?}");
    }
}

/// Commands that the host ends after an outage have their ends in the trace, too: later launches use their identifiers
/// again.
#[test]
fn a_trace_goes_on_through_outages() {
    let folder = Folder::new(Place::Embedded);
    let image = folder.file("in", 2 << 20, 6);
    let go_on = "--gpu --bytes 4KiB --queues 2 --timeout-ms 200 --recover --json --trace t.txt";
    let go_on: Vec<&str> = go_on.split(' ').collect();
    let mut has_missed = false;
    for (fault, mode) in [
        ("drop@nth=100", "warp"),
        ("drop@nth=100", "shared"),
        ("wrongcid:777@nth=100", "owner"),
        ("wrongcid:777@nth=100", "shared"),
        ("cfs@nth=100", "block"),
        ("cfs@nth=100", "shared"),
        ("allones@nth=100", "warp"),
    ] {
        let device = format!("sim:disk.img?size=4MiB&queues=4&fault={fault}");
        for (what, more) in [
            ("write", &["-i", "in"][..]),
            ("read", &["-b", "512", "-o", "out"]),
        ] {
            let run = [&[what, "-d", &device, "--mode", mode], more, &go_on].concat();
            let told: serde_json::Value = serde_json::from_str(&ok(&folder, &run)).unwrap();
            assert!(told["recovery"]["recoveries"].as_u64() > Some(0), "{told}");
            let text = String::from_utf8(bytes(&folder.path("t.txt"))).unwrap();
            let (rules, commands) = journal(text.lines().map(str::to_owned));
            assert_eq!(rules, [], "{what}, {fault}, {mode}");
            let ended = |word| text.lines().filter(|line| line.contains(word)).count() as u64;
            assert!(ended(" completed: ") >= 512, "{what}, {fault}, {mode}");
            let reclaimed = ended(" reclaimed");
            assert!(reclaimed > 0, "{what}, {fault}, {mode}");
            assert_eq!(ended(" completed: ") + reclaimed, commands);
            let kept = |line: &&str| !line.contains(" reclaimed") && !line.contains(" expired");
            let without = text.lines().filter(kept);
            let (rules, _) = journal(without.map(str::to_owned));
            let reused = rules.iter().all(|rule| *rule == Rule::CidReused);
            assert!(reused, "{rules:?}");
            // Whether an identifier is reused after an outage depends on the time of the outage.
            has_missed |= !rules.is_empty();
        }
        assert!(bytes(&folder.path("out")) == bytes(&image), "{fault}");
        std::fs::remove_file(folder.path("disk.img")).unwrap();
    }
    assert!(
        has_missed,
        "no run without its ends has an identifier twice"
    );
}

/// The ring of events is memory that a GPU wrote: nonsense in it becomes text like any other event.
#[test]
fn a_damaged_ring_of_events_is_told_and_does_no_harm() {
    let folder = Folder::new(Place::Embedded);
    let image = folder.file("in", 1 << 20, 4);
    let device = "sim:disk.img?size=1MiB&queues=4";
    ok(&folder, &["write", "-d", device, "-i", "in"]);
    let read = |file| {
        let read = [
            "read", "-d", device, "--gpu", "--bytes", "64KiB", "-o", "out", "--trace", file,
        ];
        run(&folder, "badtrace", &read)
    };
    let output = read("t.txt");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    assert!(bytes(&folder.path("out")) == bytes(&image));
    let text = String::from_utf8(bytes(&folder.path("t.txt"))).unwrap();
    let (first, rest) = text.split_once('\n').unwrap();
    let lost = u64::MAX - (1 << 17);
    assert_eq!(first, format!("{lost} older events were replaced"));
    assert_eq!(rest.lines().count(), 1 << 17);
    assert!(rest.lines().all(|line| line.contains(" queue ")));
    // The journal must not fail, but its findings are not checked.
    journal(text.lines().map(str::to_owned));
    assert!(read("t.json").status.success());
    let trace: serde_json::Value = serde_json::from_slice(&bytes(&folder.path("t.json"))).unwrap();
    assert!(trace["traceEvents"].as_array().unwrap().len() > 1 << 16);
}
