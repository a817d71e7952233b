//! Rules that every sequence obeys, even if the committed sequence breaks one.

use std::vec::Vec;

/// A fence for the controller.
const SYS_FENCES: [&str; 2] = ["fence release sys", "fence acqrel sys"];

/// Fails unless each doorbell, mark, cell and slot of `steps` comes after the fence that it needs.
pub(super) fn check(who: &str, steps: &[&str]) {
    let steps: Vec<&str> = steps.iter().map(|step| plain(step)).collect();
    for (at, step) in steps.iter().enumerate() {
        let before = &steps[..at];
        let fence = |wanted: &[&str]| last(before, |step| wanted.contains(&step));
        let after_all = |fence: Option<usize>, of: &[&str]| {
            let last = last(before, |step| of.contains(&step));
            last.is_none_or(|last| fence.is_some_and(|fence| fence > last))
        };
        let sys = fence(&SYS_FENCES);
        let written = [
            "store relaxed sys: entry",
            "store relaxed sys: list",
            "load relaxed gpu: mark",
        ];
        let read = [
            "load relaxed sys: completion, dwords 0-1",
            "load acquire sys: completion, dwords 2-3",
            "load relaxed sys: completion, dwords 2-3",
        ];
        let device = [SYS_FENCES[0], SYS_FENCES[1], "fence release gpu"];
        match *step {
            "store mmio relaxed sys: tail doorbell" => {
                assert!(
                    after_all(sys, &written),
                    "{who}: a tail doorbell without a system fence after the entries"
                );
                let rung = last(before, |step| step == "store relaxed gpu: rung");
                let locked = last(before, |step| step.ends_with("ring lock"));
                assert!(
                    locked.is_none() || rung > locked,
                    "{who}: a tail doorbell before `rung` says so"
                );
            }
            "store mmio relaxed sys: head doorbell" => {
                // A group orders the reads that it made by acquire: each member by its own load,
                // the others by the barrier. Only the remaining reads need the fence.
                let acquired = read[1];
                let read: Vec<&str> = read.into_iter().filter(|one| *one != acquired).collect();
                assert!(
                    after_all(sys, &read),
                    "{who}: a head doorbell without a system fence after the reads"
                );
            }
            "store relaxed gpu: mark" => {
                let owned = [
                    "store relaxed sys: entry",
                    "store relaxed gpu: cell",
                    "store relaxed gpu: slot",
                ];
                assert!(
                    after_all(fence(&device), &owned),
                    "{who}: a mark without a fence after entry, cell and slot"
                );
            }
            "store relaxed gpu: rung" => {
                let doorbell = last(before, |step| step.ends_with("tail doorbell"));
                let locked = last(before, |step| step == "add acquire gpu: ring lock");
                assert!(
                    locked.is_none() || doorbell < locked,
                    "{who}: `rung` after its doorbell"
                );
            }
            "or relaxed gpu: free bits" => {
                let used = ["and relaxed gpu: slot"];
                assert!(
                    after_all(fence(&device), &used),
                    "{who}: a slot is free without a fence after its use"
                );
            }
            _ => {}
        }
    }
}

/// Removes the repetition count from a step.
fn plain(step: &str) -> &str {
    match step.split_once(" x ") {
        Some((count, rest)) if count.bytes().all(|byte| byte.is_ascii_digit()) => rest,
        _ => step,
    }
}

fn last(steps: &[&str], is: impl Fn(&str) -> bool) -> Option<usize> {
    steps.iter().rposition(|step| is(step))
}
