//! Files that are believed, and each reason not to.

use super::super::record::*;
use super::*;

fn step(name: &str, by: SubmittingProcessor, bytes: u64) -> WitnessStep {
    let seconds = bytes as f64 / 3.35e9;
    let mut measured = TimedPass::new(bytes, 1 << 20, (1, 32), seconds);
    measured.of_link = Some(measured.gb_per_s / 3.938);
    WitnessStep {
        name: name.to_owned(),
        by,
        outcome: StepEnd::Ok,
        measured: Some(measured),
        verified: Some(VerifiedBytes {
            how: "one; another".to_owned(),
            bytes,
            zero_share: 0.1,
            sums: Some(["00112233445566aa".to_owned(), "00112233445566aa".to_owned()]),
        }),
        tier: (by == SubmittingProcessor::Gpu).then(|| RecordTier {
            tier: 1,
            why: "the GPU stores to the BAR itself".to_owned(),
        }),
        why: None,
        error: None,
    }
}

fn skipped(name: &str, by: SubmittingProcessor) -> WitnessStep {
    WitnessStep {
        outcome: StepEnd::Skipped,
        measured: None,
        verified: None,
        tier: None,
        why: Some("no --write-range".to_owned()),
        ..step(name, by, 1)
    }
}

fn good() -> WitnessRecord {
    let rate = RecordRate {
        generation: 3,
        lanes: 4,
        gb_per_s: Some(3.938),
    };
    let mut steps = vec![WitnessStep {
        measured: None,
        verified: None,
        ..step(IDENTIFY, SubmittingProcessor::Cpu, 1)
    }];
    for rung in StepWorkload::ALL {
        for by in [SubmittingProcessor::Cpu, SubmittingProcessor::Gpu] {
            steps.push(match rung {
                StepWorkload::WriteReadCompare => skipped(rung.name(), by),
                _ => step(rung.name(), by, 669_000_000),
            });
        }
    }
    WitnessRecord {
        schema_version: 1,
        witness_version: VERSION,
        ended: RunEnd::Complete,
        date: "2026-11-25T02:30:00Z".to_owned(),
        tool: "nvme-gpu 0.1.0 (commit abcdef123456)".to_owned(),
        command: "nvme-gpu witness -d vfio:0000:01:00.0".to_owned(),
        simulator: false,
        machine: RecordMachine {
            kernel: "6.17.0".to_owned(),
            processor: "AMD Ryzen 7 5800X".to_owned(),
            cores: 16,
            numa_nodes: 1,
        },
        controller: Some(RecordController {
            way: "vfio".to_owned(),
            model: "WD PC SN740".to_owned(),
            firmware: "73110012".to_owned(),
            nvme: "1.4.0".to_owned(),
            pci_id: Some("15b7:5015".to_owned()),
            mdts_bytes: Some(1 << 20),
            block_bytes: 512,
            blocks: 1_000_215_216,
            queue_pairs: 16,
            iommu_group_type: Some("DMA".to_owned()),
            link: Some(RecordLink {
                trained: Some(rate),
                possible: Some(rate),
            }),
        }),
        gpu: None,
        path: None,
        steps,
    }
}

/// Returns the problems of a record that `change` has changed.
fn after(change: impl FnOnce(&mut WitnessRecord)) -> String {
    let mut record = good();
    change(&mut record);
    problems(&record).join("; ")
}

fn of(record: &mut WitnessRecord) -> &mut TimedPass {
    record.steps[5].measured.as_mut().unwrap()
}

#[test]
fn a_good_file_has_no_problems_and_a_row() {
    assert_eq!(after(|_| ()), "");
    let text = serde_json::to_string(&good()).unwrap();
    // Numbers come back to within the last digit.
    let back = read(text.as_bytes()).unwrap();
    assert_eq!(
        (back.machine.clone(), back.steps.len()),
        (good().machine, good().steps.len())
    );
    assert_eq!(problems(&back), Vec::<String>::new());
    let row = row(&good());
    assert!(row.starts_with("- witness: 13 rungs, "), "{row}");
    assert!(
        row.contains("gpu tier 1 3.35 GB/s (85 % of the link)"),
        "{row}"
    );
    assert!(
        row.ends_with("; WD PC SN740 73110012 by vfio, Linux 6.17.0, abcdef1, 2026-11-25"),
        "{row}"
    );
}

#[test]
fn figures_that_cannot_be_are_found() {
    let faster = |record: &mut WitnessRecord| {
        let one = of(record);
        one.seconds /= 2.0;
        one.gb_per_s *= 2.0;
        one.of_link = one.of_link.map(|share| share * 2.0);
    };
    assert!(after(faster).contains("faster than the link"));
    // The link of an emulated controller limits nothing, so no share of it is printed.
    let emulated = |record: &mut WitnessRecord| {
        faster(record);
        record.simulator = true;
        for step in &mut record.steps {
            if let Some(one) = &mut step.measured {
                one.of_link = None;
            }
        }
    };
    assert_eq!(after(emulated), "");
    for (change, what) in [
        (
            (|record| of(record).gb_per_s *= 1.1) as fn(&mut WitnessRecord),
            "not bytes by seconds",
        ),
        (|record| of(record).of_link = Some(0.2), "share of the link"),
        (
            |record| of(record).command_bytes = 2 << 20,
            "longer than MDTS",
        ),
        (
            |record| of(record).commands = 3,
            "more bytes than its commands",
        ),
        (|record| of(record).seconds = 0.0, "no measure"),
        (|record| of(record).seconds = f64::NAN, "no measure"),
        (
            |record| record.steps[3].verified.as_mut().unwrap().zero_share = 1.5,
            "share of zeroes",
        ),
        (
            |record| {
                record.steps[3]
                    .verified
                    .as_mut()
                    .unwrap()
                    .sums
                    .as_mut()
                    .unwrap()[0] = "0".repeat(16)
            },
            "sums that differ",
        ),
        (
            |record| record.steps[2].tier.as_mut().unwrap().tier = 9,
            "above 3",
        ),
        (
            |record| record.controller.as_mut().unwrap().mdts_bytes = Some(5000),
            "MDTS of",
        ),
        (
            |record| record.controller.as_mut().unwrap().block_bytes = 500,
            "blocks of 500",
        ),
    ] {
        let found = after(change);
        assert!(found.contains(what), "{what}: {found}");
    }
}

#[test]
fn members_that_say_otherwise_are_found() {
    for (change, what) in [
        (
            (|record| record.date = "yesterday".to_owned()) as fn(&mut WitnessRecord),
            "date 'yesterday'",
        ),
        (|record| record.witness_version = 9, "version 9"),
        (|record| record.tool = "other".to_owned(), "tool 'other'"),
        (|record| drop(record.steps.pop()), "rungs are missing"),
        (|record| record.controller = None, "without a controller"),
        (
            |record| record.steps[4].name = "warp-drive".to_owned(),
            "no rung",
        ),
        (|record| record.steps[4] = record.steps[2].clone(), "twice"),
        (|record| record.steps[4].verified = None, "say otherwise"),
        (
            |record| record.steps[4].outcome = StepEnd::Failed,
            "say otherwise",
        ),
        (
            |record| record.controller.as_mut().unwrap().model = "QEMU NVMe Ctrl".to_owned(),
            "is a simulator",
        ),
    ] {
        let found = after(change);
        assert!(found.contains(what), "{what}: {found}");
    }
}

#[test]
fn what_must_not_be_in_a_file_is_found() {
    for text in [
        "/home/case",
        "see '/dev/nvme0'",
        "nqn.2014-08.org.x",
        "eui.0025385b",
    ] {
        let found = after(|record| record.command.push_str(&format!(" {text}")));
        assert!(
            found.contains("path or a qualified name"),
            "{text}: {found}"
        );
    }
    let mut value = serde_json::to_value(good()).unwrap();
    value["controller"]["serial"] = "S1".into();
    let error = read(value.to_string().as_bytes()).unwrap_err();
    assert!(error.contains("unknown field `serial`"), "{error}");
    assert!(read(b"{").unwrap_err().starts_with("it is not JSON"));
}
