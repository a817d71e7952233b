//! Mode x tier x fault: many commands, each of them accounted for, and the queues in use again after the host has reset
//! the controller.

use crate::bench::{Bench, Mode, Tier};
use crate::report::{Options, Report};
use crate::rig::{Outcome, Rig, Rigged, Shape};
use crate::sim::{BLOCK, IMAGE_SEED, Model};
use nvme_gpu_kernel::work::{account, data_word, pattern};

const QUEUES: u32 = 8;
/// Bytes of the image, and of the data memory.
const IMAGE: u64 = 8 << 20;
/// Longest wait for a command of which some get no answer in time, before the factor for slow tools.
const TIMEOUT_NS: u64 = 150_000_000;
/// Deadline of tests in which every command is answered: longer, because a controller's thread that does not run for a
/// moment is no fault of the queue.
const PATIENT_NS: u64 = 3_000_000_000;
/// Delay of a late completion in milliseconds, before the factor for slow tools.
const LATE_MS: u64 = 400;
/// Counters have 32 bits, of which CIDs and doorbells use the lower 16: what they pass in a run.
const WRAPS: [Option<u32>; 3] = [None, Some(1 << 16), Some(0)];
/// Launches of one cell; each fault costs one.
const ROUNDS: u32 = 40;

/// Effect of a fault on the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The driver notices nothing.
    None,
    /// Commands complete with this status.
    Status(u64),
    /// Deadlines pass; a controller reset helps.
    Late,
    /// The queue is refused; a controller reset helps.
    Refused,
    /// Deadlines pass, and the controller never comes back.
    Gone,
}

/// A fault, the commands that it strikes, and its effect. A rule without `every` strikes three times, or once if the
/// controller dies of it.
struct Fault {
    name: &'static str,
    rule: &'static str,
    every: Option<u32>,
    effect: Effect,
}

const fn fault(name: &'static str, rule: &'static str, effect: Effect) -> Fault {
    Fault {
        name,
        rule,
        every: None,
        effect,
    }
}

const fn often(name: &'static str, rule: &'static str, every: u32) -> Fault {
    Fault {
        name,
        rule,
        every: Some(every),
        effect: Effect::None,
    }
}

const FAULTS: [Fault; 12] = [
    Fault {
        name: "no-fault",
        rule: "",
        every: None,
        effect: Effect::None,
    },
    often("reordered", "reorder", 3),
    often("torn-cqe", "torncqe", 7),
    fault("error-status", "status:0x281", Effect::Status(0x281)),
    fault("dropped", "drop", Effect::Late),
    fault("late", "delay", Effect::Late),
    fault("wrong-phase", "wrongphase", Effect::Late),
    fault("wrong-cid", "wrongcid:0xfff0", Effect::Refused),
    fault("duplicate", "duplicate", Effect::Refused),
    fault("wrong-sqhd", "badsqhd:0x7777", Effect::Refused),
    fault("dead-cfs", "cfs", Effect::Late),
    fault("dead-gone", "allones", Effect::Gone),
];

impl Fault {
    fn rules(&self, commands: u64, patience: u64) -> Vec<String> {
        let at = |rule: &str, nth: u64| format!("{rule}@nth={}", nth.max(1));
        match (self.rule, self.every) {
            ("", _) => Vec::new(),
            (rule, Some(every)) => vec![format!("{rule}@every={every}")],
            // The controller dies of the first strike, so that further ones would strike at an unknown time.
            (rule @ ("cfs" | "allones"), None) => vec![at(rule, commands / 2)],
            ("delay", None) => {
                let rule = format!("delay:{}ms", LATE_MS * patience);
                [1, 2, 3].map(|k| at(&rule, commands * k / 4)).to_vec()
            }
            (rule, None) => [1, 2, 3].map(|k| at(rule, commands * k / 4)).to_vec(),
        }
    }
}

/// Runs every cell of the matrix.
pub fn all(report: &mut Report, bench: &Bench) {
    for mode in Mode::ALL {
        for dstrd in [0, 4] {
            let name = format!("stride/{}/dstrd{dstrd}", mode.name());
            let cell = Cell {
                mode,
                tier: Tier::Pinned,
                dstrd,
                entries: 64,
                wrap: None,
            };
            report.test(&name, |options| cell.run(bench, options, &FAULTS[0]));
        }
        // Small rings are tested too, which wrap often.
        for (name, wrap) in [("2^16", WRAPS[1]), ("2^32", WRAPS[2])] {
            let cell = Cell {
                mode,
                tier: Tier::Pinned,
                dstrd: 0,
                entries: 32,
                wrap,
            };
            let name = format!("wrap/{}/{name}", mode.name());
            report.test(&name, |options| cell.run(bench, options, &FAULTS[0]));
        }
    }
    for (turn, tier) in Tier::ALL.into_iter().enumerate() {
        for (other, mode) in Mode::ALL.into_iter().enumerate() {
            for (third, fault) in FAULTS.iter().enumerate() {
                let name = format!("matrix/{}/{}/{}", mode.name(), tier.name(), fault.name);
                let dstrd = if tier == Tier::Relayed { 4 } else { 0 };
                let cell = Cell {
                    mode,
                    tier,
                    dstrd,
                    entries: 256,
                    // Every fault meets every start, in each mode.
                    wrap: WRAPS[(turn + other + third) % WRAPS.len()],
                };
                report.test(&name, |options| cell.run(bench, options, fault));
            }
        }
    }
}

/// One cell of the matrix.
struct Cell {
    mode: Mode,
    tier: Tier,
    dstrd: u8,
    entries: u32,
    /// Value that the counters pass after about a quarter of the run, when the first faults strike; without one, they
    /// start at 0.
    wrap: Option<u32>,
}

/// Sums over the launches of a cell.
#[derive(Default)]
struct Sum {
    completed: u64,
    failed: u64,
    timed_out: u64,
    /// Completed after they had timed out, in the same launch.
    late: u64,
    refusals: u64,
    recovered: u64,
    rounds: u32,
}

impl Cell {
    /// Returns the start of the counters: a multiple of two passes.
    fn start(&self, commands: u64) -> u32 {
        let passes = 2 * self.entries;
        let quarter = (commands / 4 / u64::from(QUEUES)).min(1 << 15) as u32;
        let before = (quarter / passes * passes).max(passes);
        self.wrap.map_or(0, |wrap| wrap.wrapping_sub(before))
    }

    fn run(&self, bench: &Bench, options: &Options, fault: &Fault) -> Result<String, String> {
        let shape = Shape {
            tier: self.tier,
            queues: QUEUES,
            entries: self.entries,
            slots: self.entries - 1,
            start: self.start(options.commands),
            data: IMAGE as usize,
        };
        let model = Model {
            image: IMAGE,
            dstrd: self.dstrd,
            faults: &fault.rules(options.commands, bench.patience),
            threads: 6,
        };
        let mut rig = Rig::new(bench, shape, &model)?;
        let course = Course {
            mode: self.mode,
            queues: QUEUES,
            commands: options.commands,
            effect: fault.effect,
        };
        let seen = course.run(bench, &mut rig)?;
        Ok(format!("{seen}, from {:#x}", shape.start))
    }
}

/// Launches until every command is accounted for, with a recovery after each that did not go well.
pub struct Course {
    pub mode: Mode,
    pub queues: u32,
    pub commands: u64,
    pub effect: Effect,
}

impl Course {
    /// # Errors
    /// An error if the commands did not end as [`Effect`] says, or if the data is wrong afterwards.
    pub fn run(&self, bench: &Bench, rig: &mut impl Rigged) -> Result<String, String> {
        let mut sum = Sum::default();
        let mut gone = false;
        while sum.completed + sum.failed + sum.timed_out < self.commands && !gone {
            sum.rounds += 1;
            if sum.rounds > ROUNDS {
                return Err(format!("not done after {ROUNDS} launches: {}", sum.text()));
            }
            let ended = sum.completed + sum.failed + sum.timed_out;
            let left = self.commands - ended;
            let clean = self.round(bench, rig, left, &mut sum)?;
            if clean {
                continue;
            }
            match rig.recover() {
                Ok(count) => sum.recovered += u64::from(count),
                Err(_) if self.effect == Effect::Gone => gone = true,
                Err(error) => return Err(format!("recovery: {error}; {}", sum.text())),
            }
        }
        sum.check(self.effect, gone, self.commands)?;
        if !gone {
            self.read_all(bench, rig)?;
        }
        if !rig.guards_hold() {
            return Err("bytes around the data were overwritten".to_owned());
        }
        Ok(sum.text())
    }

    /// Runs one launch of up to `commands` reads; returns whether the queues are as good as new.
    fn round(
        &self,
        bench: &Bench,
        rig: &mut impl Rigged,
        commands: u64,
        sum: &mut Sum,
    ) -> Result<bool, String> {
        let mut launch = rig.launch()?;
        let (grid, block) = self.mode.shape(self.queues, &mut launch);
        launch.commands = commands;
        launch.pattern = pattern::RANDOM;
        launch.seed = u64::from(sum.rounds);
        let timeout_ns = match self.effect {
            Effect::None | Effect::Status(_) => PATIENT_NS,
            Effect::Late | Effect::Refused | Effect::Gone => TIMEOUT_NS,
        };
        launch.timeout_ns = timeout_ns * bench.patience;
        let outcome = rig.run(self.mode.kernel(), grid, block, launch)?;
        let in_flight = rig.in_flight()?;
        let report = outcome.report;
        accounts_agree(&outcome, in_flight)?;
        sum.completed += report.completed;
        sum.failed += report.failed;
        sum.timed_out += report.timed_out;
        sum.late += report.late;
        sum.refusals += u64::from(report.fault != 0);
        if report.failed > 0 && report.status != 0x281 {
            return Err(format!("status {:#x} out of nothing", report.status));
        }
        Ok(report.timed_out == 0 && report.refused == 0 && report.fault == 0)
    }

    /// Reads the whole image through the queues and compares every word.
    fn read_all(&self, bench: &Bench, rig: &mut impl Rigged) -> Result<(), String> {
        rig.fill();
        let mut launch = rig.launch()?;
        let (grid, block) = self.mode.shape(self.queues, &mut launch);
        launch.blocks = 8;
        launch.commands = launch.data_bytes / u64::from(8 * BLOCK);
        launch.units = launch.commands;
        launch.linear = 1;
        launch.timeout_ns = TIMEOUT_NS * 10 * bench.patience;
        let commands = launch.commands;
        let report = rig.run(self.mode.kernel(), grid, block, launch)?.report;
        if report.completed != commands {
            return Err(format!("the last read did not succeed: {report:?}"));
        }
        match wrong_words(rig.data()) {
            0 => Ok(()),
            wrong => Err(format!(
                "{wrong} of {} words are wrong",
                rig.data().len() / 8
            )),
        }
    }
}

/// Words of `data`, the whole image, that are not the image's.
pub fn wrong_words(data: &[u8]) -> usize {
    let words = data.chunks_exact(8).enumerate();
    words
        .filter(|(index, bytes)| data_word(IMAGE_SEED, *index as u64).to_le_bytes() != **bytes)
        .count()
}

/// Checks that the account of each command, the counts and the state of the queues agree.
pub fn accounts_agree(outcome: &Outcome, in_flight: u32) -> Result<(), String> {
    let report = &outcome.report;
    let [mut good, mut bad, mut late, mut refused] = [0u64; 4];
    for &word in &outcome.accounts {
        match word {
            account::NONE => {}
            account::DONE => good += 1,
            word if word & account::DONE != 0 || word == account::ABORTED => bad += 1,
            account::TIMED_OUT => late += 1,
            account::FAULTED | account::FULL | account::REFUSED => refused += 1,
            word => return Err(format!("an account of {word:#x}")),
        }
    }
    let counted = [
        report.completed,
        report.failed,
        report.timed_out,
        report.refused,
    ];
    if [good, bad, late, refused] != counted {
        return Err(format!(
            "accounts say {good} good, {bad} bad, {late} late, {refused} refused; the report says {counted:?}"
        ));
    }
    // What was submitted has ended or is in flight; a late completion may have been taken for a command
    // that was not waited for any more.
    let ended = report.completed + report.failed + u64::from(in_flight);
    let given_up = report.timed_out + report.refused;
    if report.sqes < ended || report.sqes > ended + given_up {
        return Err(format!(
            "{} entries were written, but {ended} ended or are in flight and {given_up} were given up",
            report.sqes
        ));
    }
    Ok(())
}

impl Sum {
    fn text(&self) -> String {
        let Self {
            completed,
            failed,
            timed_out,
            late,
            refusals,
            recovered,
            rounds,
        } = self;
        format!(
            "{completed} completed, {failed} failed, {timed_out} timed out, {late} late, {refusals} refusals, {recovered} recovered, {rounds} launches"
        )
    }

    /// Checks that the fault had its required effect.
    fn check(&self, effect: Effect, gone: bool, commands: u64) -> Result<(), String> {
        let clean = self.timed_out + self.late == 0 && self.refusals == 0 && self.rounds == 1;
        let good = match effect {
            Effect::None => clean && self.completed == commands,
            Effect::Status(_) => clean && self.failed == 3 && self.completed + 3 == commands,
            Effect::Late => self.timed_out + self.late > 0 && self.failed == 0,
            Effect::Refused => self.refusals > 0 && self.failed == 0,
            Effect::Gone => gone && self.timed_out > 0,
        };
        match good {
            true => Ok(()),
            false => Err(format!("not what {effect:?} should do: {}", self.text())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_gpu_kernel::work::LaunchReport as Counts;

    #[test]
    fn accounts_that_do_not_add_up_are_found() {
        let report = Counts {
            completed: 2,
            failed: 1,
            timed_out: 1,
            sqes: 4,
            ..Counts::default()
        };
        let done = account::DONE;
        let outcome = |accounts: &[u32]| Outcome {
            report,
            accounts: accounts.to_vec(),
        };
        let good = outcome(&[done, done | 0x281, done, account::TIMED_OUT, account::NONE]);
        assert!(accounts_agree(&good, 1).is_ok());
        assert!(accounts_agree(&good, 2).is_err());
        assert!(accounts_agree(&outcome(&[done, done, done, account::TIMED_OUT]), 1).is_err());
        assert!(accounts_agree(&outcome(&[5]), 1).is_err());
    }

    #[test]
    fn counters_pass_their_wrap_within_the_run() {
        for (entries, commands) in [(32, 900), (256, 100_000), (256, 1_000_000)] {
            for wrap in [1u32 << 16, 0] {
                let cell = Cell {
                    mode: Mode::Warp,
                    tier: Tier::Pinned,
                    dstrd: 0,
                    entries,
                    wrap: Some(wrap),
                };
                let start = cell.start(commands);
                let each = (commands / u64::from(QUEUES)) as u32;
                assert!(start.is_multiple_of(2 * entries));
                assert!((1..each).contains(&wrap.wrapping_sub(start)), "{commands}");
            }
        }
    }

    #[test]
    fn faults_strike_within_the_run() {
        let dropped = FAULTS.iter().find(|fault| fault.name == "dropped").unwrap();
        assert_eq!(
            dropped.rules(100, 1),
            ["drop@nth=25", "drop@nth=50", "drop@nth=75"]
        );
        for fault in &FAULTS {
            let rules = fault.rules(1000, 2);
            let options: String = rules.iter().map(|rule| format!("&fault={rule}")).collect();
            assert!(nvme_sim::config::parse(&format!("null?{options}")).is_ok());
        }
    }

    #[test]
    fn a_fault_that_did_not_show_fails_the_cell() {
        let sum = Sum {
            completed: 10,
            rounds: 1,
            ..Sum::default()
        };
        assert!(sum.check(Effect::None, false, 10).is_ok());
        assert!(sum.check(Effect::None, false, 11).is_err());
        for effect in [
            Effect::Status(1),
            Effect::Late,
            Effect::Refused,
            Effect::Gone,
        ] {
            assert!(sum.check(effect, false, 10).is_err(), "{effect:?}");
        }
    }
}
