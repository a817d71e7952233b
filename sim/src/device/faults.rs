//! The execution of a fault plan: it counts matches of the rules, chooses the fault of each
//! command, and holds the faults that a test arms one by one.

use crate::config::fault::{Fault, FaultCondition, FaultOccasion, FaultPlan, FaultRule};
use crate::memory::SpinLock;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use nvme_units::SplitMix;

/// An armed fault that has been applied to a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FiredFault {
    /// The submission queue; 0 for a change of CC.EN.
    pub qid: u16,
    /// The command's identifier; 0 for a change of CC.EN.
    pub cid: u16,
    /// The fault. The later part of an echo or of late data is reported with 0 nanoseconds.
    pub what: Fault,
}

#[derive(Default)]
struct ArmedFaults {
    armed: Vec<(u16, Fault)>,
    fired: Vec<FiredFault>,
}

/// A plan in execution: its rules, each with its count of matches.
pub(crate) struct FaultInjector {
    rules: Box<[(FaultRule, AtomicU64)]>,
    seed: u64,
    /// True once faults were armed; those that fire are then recorded.
    watched: AtomicBool,
    one_shots: SpinLock<ArmedFaults>,
}

impl FaultInjector {
    pub fn new(plan: &FaultPlan) -> Self {
        let rules = plan
            .rules
            .iter()
            .map(|rule| (*rule, AtomicU64::new(0)))
            .collect();
        Self {
            rules,
            seed: plan.seed,
            watched: AtomicBool::new(false),
            one_shots: SpinLock::default(),
        }
    }

    /// Injects `what` into the next command of `qid`; `StuckReady` applies to the next change of
    /// CC.EN, `SanitizeFails` to the next sanitize operation.
    pub fn arm(&self, qid: u16, what: Fault) {
        self.watched.store(true, Ordering::Relaxed);
        self.one_shots.lock().armed.push((qid, what));
    }

    /// Removes the armed faults that have not fired.
    pub fn disarm(&self) {
        self.one_shots.lock().armed.clear();
    }

    /// Returns the faults that have fired since the last call.
    pub fn take_fired(&self) -> Vec<FiredFault> {
        if !self.watched.load(Ordering::Relaxed) {
            return Vec::new();
        }
        core::mem::take(&mut self.one_shots.lock().fired)
    }

    /// Records the later part of a fault.
    pub fn note(&self, qid: u16, cid: u16, what: Fault) {
        if self.watched.load(Ordering::Relaxed) {
            self.one_shots
                .lock()
                .fired
                .push(FiredFault { qid, cid, what });
        }
    }

    fn one_shot(&self, qid: u16, cid: u16, occasion: FaultOccasion, whole: bool) -> Option<Fault> {
        if !self.watched.load(Ordering::Relaxed) {
            return None;
        }
        let mut one_shots = self.one_shots.lock();
        let meets = |(on, what): &(u16, Fault)| {
            let fits = whole || !matches!(what, Fault::LateData(_));
            let meets = occasion != FaultOccasion::Command || *on == qid && fits;
            what.occasion() == occasion && meets
        };
        let at = one_shots.armed.iter().position(meets)?;
        let (_, what) = one_shots.armed.remove(at);
        one_shots.fired.push(FiredFault { qid, cid, what });
        Some(what)
    }

    /// True if the plan has no rule, so that no command can be affected.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Returns the fault for command `cid` with `opcode` on `qid`, if any; `whole` is true if its
    /// data can move late.
    pub fn of_command(&self, qid: u16, opcode: u8, cid: u16, whole: bool) -> Option<Fault> {
        if let Some(what) = self.one_shot(qid, cid, FaultOccasion::Command, whole) {
            return Some(what);
        }
        self.first(|rule| {
            rule.what.occasion() == FaultOccasion::Command
                && rule.when.qid.map_or(qid != 0, |wanted| wanted == qid)
                && rule.when.opcode.is_none_or(|wanted| wanted == opcode)
        })
    }

    /// True if CSTS.RDY does not follow this change of CC.EN.
    pub fn ready_is_stuck(&self) -> bool {
        self.meets(FaultOccasion::Ready)
    }

    /// True if the sanitize operation that starts now is to fail.
    pub fn sanitize_fails(&self) -> bool {
        self.meets(FaultOccasion::Sanitize)
    }

    fn meets(&self, occasion: FaultOccasion) -> bool {
        let one_shot = self.one_shot(0, 0, occasion, false);
        let rule = |rule: &FaultRule| rule.what.occasion() == occasion;
        one_shot.is_some() || self.first(rule).is_some()
    }

    fn first(&self, matches: impl Fn(&FaultRule) -> bool) -> Option<Fault> {
        let mut fired = None;
        for (i, (rule, count)) in self.rules.iter().enumerate() {
            if !matches(rule) {
                continue;
            }
            let n = count.fetch_add(1, Ordering::Relaxed) + 1;
            let FaultCondition {
                nth,
                until,
                every,
                per_million,
                ..
            } = rule.when;
            let fires = nth.is_none_or(|nth| (nth..=until.unwrap_or(nth)).contains(&n))
                && every.is_none_or(|every| every != 0 && n.is_multiple_of(every))
                && per_million.is_none_or(|p| {
                    SplitMix::new(self.seed ^ (i as u64) << 48 ^ n).next_word() % 1_000_000
                        < u64::from(p)
                });
            if fires && fired.is_none() {
                fired = Some(rule.what);
            }
        }
        fired
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(when: FaultCondition) -> FaultInjector {
        FaultInjector::new(&FaultPlan {
            rules: [FaultRule {
                when,
                what: Fault::Drop,
            }]
            .into(),
            seed: 7,
        })
    }

    #[test]
    fn a_rule_counts_only_its_own_matches() {
        let faults = plan(FaultCondition {
            opcode: Some(2),
            nth: Some(2),
            ..FaultCondition::default()
        });
        let hits: Vec<_> = [2, 1, 2, 2]
            .map(|op| faults.of_command(1, op, 0, true).is_some())
            .into();
        assert_eq!(hits, [false, false, true, false]);
    }

    #[test]
    fn a_rule_with_a_last_match_hits_all_up_to_it() {
        let faults = plan(FaultCondition {
            nth: Some(2),
            until: Some(4),
            ..FaultCondition::default()
        });
        let hits = [(); 6].map(|()| faults.of_command(1, 2, 0, true).is_some());
        assert_eq!(hits, [false, true, true, true, false, false]);
    }

    #[test]
    fn the_admin_queue_is_hit_only_when_named() {
        assert_eq!(
            plan(FaultCondition::default()).of_command(0, 6, 0, true),
            None
        );
        let faults = plan(FaultCondition {
            qid: Some(0),
            ..FaultCondition::default()
        });
        assert_eq!(faults.of_command(0, 6, 0, true), Some(Fault::Drop));
        assert_eq!(faults.of_command(1, 6, 0, true), None);
    }

    #[test]
    fn a_probability_is_met_and_repeats_with_the_seed() {
        let when = FaultCondition {
            per_million: Some(250_000),
            ..FaultCondition::default()
        };
        let draw = || {
            let faults = plan(when);
            (0..4000)
                .map(|_| faults.of_command(1, 2, 0, true).is_some())
                .collect::<Vec<_>>()
        };
        let hits = draw();
        assert_eq!(hits, draw());
        let count = hits.iter().filter(|hit| **hit).count();
        assert!((800..1200).contains(&count), "{count}");
    }

    #[test]
    fn an_armed_fault_meets_one_command_of_its_queue_and_is_told() {
        let faults = FaultInjector::new(&FaultPlan::on_demand());
        assert!(!faults.is_empty() && faults.of_command(1, 2, 7, true).is_none());
        faults.arm(2, Fault::Reorder);
        faults.arm(1, Fault::StuckReady);
        assert_eq!(faults.of_command(1, 2, 7, true), None);
        assert_eq!(faults.of_command(2, 2, 8, true), Some(Fault::Reorder));
        assert_eq!(faults.of_command(2, 2, 9, true), None);
        assert!(faults.ready_is_stuck() && !faults.ready_is_stuck());
        let fired = |qid, cid, what| FiredFault { qid, cid, what };
        let told = [fired(2, 8, Fault::Reorder), fired(0, 0, Fault::StuckReady)];
        assert_eq!(faults.take_fired(), told);
        assert_eq!(faults.take_fired(), []);
        faults.arm(1, Fault::LateData(5));
        assert_eq!(
            faults.of_command(1, 2, 1, false),
            None,
            "it waits for another"
        );
        assert!(faults.of_command(1, 2, 2, true).is_some());
        faults.arm(1, Fault::Drop);
        faults.disarm();
        assert_eq!(faults.of_command(1, 2, 1, true), None);
    }
}
