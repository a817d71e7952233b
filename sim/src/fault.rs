//! Faults on purpose: a plan of what goes wrong, and when.
//!
//! A plan with a seed is deterministic: the n-th matching command decides, not the clock. A test that
//! chooses the moment arms single faults instead ([`Controller::arm`](crate::Controller::arm)).

use crate::memory::Lock;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use nvme_auditor::Rule;
use nvme_core::spec::Status;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The command is fetched and never completes; an Abort does not find it.
    Drop,
    /// The command executes and completes this many nanoseconds later; an Abort finds it until then.
    Delay(u64),
    /// As `Delay`, but an Abort that finds the command says "aborted" and changes nothing.
    Stubborn(u64),
    /// The command completes after those that are fetched in the same batch.
    Reorder,
    /// The completion is posted twice.
    Duplicate,
    /// The completion carries this command identifier.
    WrongCid(u16),
    /// The completion carries the command's identifier with these bits flipped.
    FlippedCid(u16),
    /// The completion is posted again this many nanoseconds (at least 1) later.
    Echo(u64),
    /// The completion is posted at once, as a success, and the data move this many nanoseconds (at
    /// least 1) later. Only I/O commands whose data pointer needs no list.
    LateData(u64),
    /// The completion carries the phase tag of the previous pass.
    WrongPhase,
    /// The completion carries this submission queue head.
    BadSqhd(u16),
    /// The command is not executed and completes with this status.
    Status(Status),
    /// The controller stops with CSTS.CFS set.
    Cfs,
    /// The controller leaves the bus: registers read as all ones, and nothing happens any more.
    AllOnes,
    /// CSTS.RDY does not follow the next change of CC.EN. Matches such changes, not commands.
    StuckReady,
    /// The phase tag is visible before dwords 0 and 1 are.
    TornCqe,
    /// The next sanitize operation fails half way. Matches operations, not commands.
    SanitizeFails,
}

/// What a fault can befall.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Occasion {
    Command,
    Ready,
    Sanitize,
}

/// Which commands a rule means. With no condition: all of the I/O queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct When {
    /// The submission queue; `None` is every I/O queue, 0 the admin queue.
    pub qid: Option<u16>,
    /// The opcode.
    pub opcode: Option<u8>,
    /// Only the n-th match, from 1.
    pub nth: Option<u64>,
    /// Every n-th match.
    pub every: Option<u64>,
    /// Matches per million, drawn from the plan's seed.
    pub per_million: Option<u32>,
}

/// One rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultRule {
    /// Which commands.
    pub when: When,
    /// What happens to them.
    pub what: Fault,
}

/// Rules, the first that fires wins, and the seed for those with a probability.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// The rules.
    pub rules: Vec<FaultRule>,
    /// Seed of the probabilities.
    pub seed: u64,
}

impl Fault {
    /// The rule that it breaks, where a wire can show that: silence, time, order and status are a
    /// controller's own affair.
    pub fn breaks(self) -> Option<Rule> {
        match self {
            Self::Duplicate | Self::Echo(_) | Self::WrongCid(_) | Self::FlippedCid(_) => {
                Some(Rule::UnknownCommand)
            }
            Self::LateData(_) => Some(Rule::DataLate),
            Self::WrongPhase => Some(Rule::PhaseTag),
            Self::BadSqhd(_) => Some(Rule::SqHead),
            Self::TornCqe => Some(Rule::TornEntry),
            Self::Drop
            | Self::Delay(_)
            | Self::Stubborn(_)
            | Self::Reorder
            | Self::Status(_)
            | Self::Cfs
            | Self::AllOnes
            | Self::StuckReady
            | Self::SanitizeFails => None,
        }
    }

    fn occasion(self) -> Occasion {
        match self {
            Self::StuckReady => Occasion::Ready,
            Self::SanitizeFails => Occasion::Sanitize,
            _ => Occasion::Command,
        }
    }

    /// Whether the command has completed, and this is what comes after.
    pub(crate) fn is_afterwards(self) -> bool {
        matches!(self, Self::Echo(0) | Self::LateData(0))
    }
}

impl FaultPlan {
    /// The rules that a controller with this plan breaks, as far as a wire can show them.
    pub fn breaks(&self) -> Vec<Rule> {
        let rules = self.rules.iter();
        rules.filter_map(|rule| rule.what.breaks()).collect()
    }

    /// No rule that ever fires, and room for faults that are armed one by one.
    pub fn on_demand() -> Self {
        let when = When {
            nth: Some(0),
            ..When::default()
        };
        let what = Fault::Drop;
        Self {
            rules: [FaultRule { when, what }].into(),
            seed: 0,
        }
    }
}

/// A fault that was armed and has met its command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fired {
    /// The submission queue; 0 for a change of CC.EN.
    pub qid: u16,
    /// The command's identifier; 0 for a change of CC.EN.
    pub cid: u16,
    /// What it met. The second part of an echo or of late data is named with 0 nanoseconds.
    pub what: Fault,
}

#[derive(Default)]
struct OneShots {
    armed: Vec<(u16, Fault)>,
    fired: Vec<Fired>,
}

/// A plan at work: rules with their counts of matches.
pub(crate) struct Faults {
    rules: Box<[(FaultRule, AtomicU64)]>,
    seed: u64,
    /// Somebody arms faults, and takes what was fired.
    watched: AtomicBool,
    one_shots: Lock<OneShots>,
}

impl Faults {
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
            one_shots: Lock::default(),
        }
    }

    /// The next command of `qid` meets `what`; for `StuckReady`, the next change of CC.EN; for
    /// `SanitizeFails`, the next sanitize operation.
    pub fn arm(&self, qid: u16, what: Fault) {
        self.watched.store(true, Ordering::Relaxed);
        self.one_shots.lock().armed.push((qid, what));
    }

    /// Forgets what was armed and has not fired.
    pub fn disarm(&self) {
        self.one_shots.lock().armed.clear();
    }

    /// What has fired since the last call.
    pub fn take_fired(&self) -> Vec<Fired> {
        if !self.watched.load(Ordering::Relaxed) {
            return Vec::new();
        }
        core::mem::take(&mut self.one_shots.lock().fired)
    }

    /// The second part of a fault.
    pub fn note(&self, qid: u16, cid: u16, what: Fault) {
        if self.watched.load(Ordering::Relaxed) {
            self.one_shots.lock().fired.push(Fired { qid, cid, what });
        }
    }

    fn one_shot(&self, qid: u16, cid: u16, occasion: Occasion, whole: bool) -> Option<Fault> {
        if !self.watched.load(Ordering::Relaxed) {
            return None;
        }
        let mut one_shots = self.one_shots.lock();
        let meets = |(on, what): &(u16, Fault)| {
            let fits = whole || !matches!(what, Fault::LateData(_));
            let meets = occasion != Occasion::Command || *on == qid && fits;
            what.occasion() == occasion && meets
        };
        let at = one_shots.armed.iter().position(meets)?;
        let (_, what) = one_shots.armed.remove(at);
        one_shots.fired.push(Fired { qid, cid, what });
        Some(what)
    }

    /// Whether no command can be hit.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// The fault of the command `cid` with `opcode` on `qid`, if any; `whole` when its data can be late.
    pub fn of_command(&self, qid: u16, opcode: u8, cid: u16, whole: bool) -> Option<Fault> {
        if let Some(what) = self.one_shot(qid, cid, Occasion::Command, whole) {
            return Some(what);
        }
        self.first(|rule| {
            rule.what.occasion() == Occasion::Command
                && rule.when.qid.map_or(qid != 0, |wanted| wanted == qid)
                && rule.when.opcode.is_none_or(|wanted| wanted == opcode)
        })
    }

    /// Whether this change of CC.EN finds CSTS.RDY stuck.
    pub fn ready_is_stuck(&self) -> bool {
        self.meets(Occasion::Ready)
    }

    /// Whether the sanitize operation that starts now fails.
    pub fn sanitize_fails(&self) -> bool {
        self.meets(Occasion::Sanitize)
    }

    fn meets(&self, occasion: Occasion) -> bool {
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
            let When {
                nth,
                every,
                per_million,
                ..
            } = rule.when;
            let fires = nth.is_none_or(|nth| n == nth)
                && every.is_none_or(|every| every != 0 && n.is_multiple_of(every))
                && per_million.is_none_or(|p| {
                    mix(self.seed ^ (i as u64) << 48 ^ n) % 1_000_000 < u64::from(p)
                });
            if fires && fired.is_none() {
                fired = Some(rule.what);
            }
        }
        fired
    }
}

/// splitmix64: one well-mixed word out of another.
pub(crate) fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(when: When) -> Faults {
        Faults::new(&FaultPlan {
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
        let faults = plan(When {
            opcode: Some(2),
            nth: Some(2),
            ..When::default()
        });
        let hits: Vec<_> = [2, 1, 2, 2]
            .map(|op| faults.of_command(1, op, 0, true).is_some())
            .into();
        assert_eq!(hits, [false, false, true, false]);
    }

    #[test]
    fn the_admin_queue_is_hit_only_when_named() {
        assert_eq!(plan(When::default()).of_command(0, 6, 0, true), None);
        let faults = plan(When {
            qid: Some(0),
            ..When::default()
        });
        assert_eq!(faults.of_command(0, 6, 0, true), Some(Fault::Drop));
        assert_eq!(faults.of_command(1, 6, 0, true), None);
    }

    #[test]
    fn a_probability_is_met_and_repeats_with_the_seed() {
        let when = When {
            per_million: Some(250_000),
            ..When::default()
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
        let faults = Faults::new(&FaultPlan::on_demand());
        assert!(!faults.is_empty() && faults.of_command(1, 2, 7, true).is_none());
        faults.arm(2, Fault::Reorder);
        faults.arm(1, Fault::StuckReady);
        assert_eq!(faults.of_command(1, 2, 7, true), None);
        assert_eq!(faults.of_command(2, 2, 8, true), Some(Fault::Reorder));
        assert_eq!(faults.of_command(2, 2, 9, true), None);
        assert!(faults.ready_is_stuck() && !faults.ready_is_stuck());
        let fired = |qid, cid, what| Fired { qid, cid, what };
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
