//! Rounds of a second or so, each with queues of another shape, until enough commands have ended.

use crate::options::Options;
use crate::{plain, sim};
use nvme_tests::Rng;
use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Time of a round.
const ROUND: Duration = Duration::from_millis(if cfg!(tsan) { 400 } else { 1000 });
/// Time limit of a command, for a machine that runs other programs, too.
pub const PATIENCE_NS: u64 = 60_000_000_000;

/// The threads that use a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// This many separate threads share the queue.
    Shared,
    /// Two teams of this number of members share the queue.
    Teams,
    /// One team of this number of members owns the queue.
    Collective,
}

/// The shape of a round.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    pub mode: Mode,
    /// Threads or members for each queue.
    pub threads: usize,
    pub queues: usize,
    /// Threads of the controller.
    pub controllers: usize,
    pub entries: u32,
    pub slots: u32,
    /// Start value of the counters.
    pub start: u32,
    /// True if a member reads several completions at once.
    pub wide: bool,
    pub seed: u64,
}

impl Round {
    /// Draws a round for `cores` threads.
    fn draw(rng: &mut Rng, cores: usize) -> Self {
        let mode = [Mode::Shared, Mode::Collective, Mode::Shared, Mode::Teams];
        let mode = mode[rng.below(4) as usize];
        let controllers = (cores / 3).max(1);
        let workers = cores - controllers;
        let threads = match mode {
            // Teams with more members than processors mostly wait, so they are rare.
            Mode::Collective | Mode::Teams if rng.below(8) == 0 => 8,
            Mode::Collective => (1 << rng.below(4)).min(workers.next_power_of_two()),
            Mode::Teams => (2 << rng.below(2)).min(workers.next_power_of_two().max(2)),
            Mode::Shared => 1 + rng.below(2 * workers.min(8) as u64) as usize,
        };
        let used = if mode == Mode::Teams {
            2 * threads
        } else {
            threads
        };
        let entries = 2 << rng.below(4);
        let slots = match rng.below(3) {
            0 => 1 + rng.below(u64::from(entries) - 1) as u32,
            _ => entries - 1,
        };
        let before = rng.below(64) as u32 * 2 * entries;
        let wrap = [0u64, 1 << 16, 1 << 31, 1 << 32][rng.below(4) as usize];
        Self {
            mode,
            threads,
            queues: (workers / used).max(1),
            controllers,
            entries,
            slots,
            start: if wrap == 0 {
                0
            } else {
                (wrap as u32).wrapping_sub(before)
            },
            wide: rng.below(2) == 0,
            seed: rng.word(),
        }
    }
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?}, {} x {} threads, {} entries, {} slots, from {:#x}{}",
            self.mode,
            self.queues,
            self.threads,
            self.entries,
            self.slots,
            self.start,
            if self.wide { ", wide" } else { "" }
        )
    }
}

/// Totals of all rounds.
#[derive(Debug, Default)]
pub struct Summary {
    commands: u64,
    rounds: u64,
    /// Commands by mode.
    by_mode: [u64; 3],
    seconds: f64,
    seed: u64,
    cores: usize,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [shared, teams, collective] = self.by_mode;
        write!(
            f,
            "{} commands in {} rounds ({shared} shared, {teams} by teams, {collective} collective), \
             {:.0} s, {:.2} M/s on {} cores, seed {}: every command ended once, with its own result",
            self.commands,
            self.rounds,
            self.seconds,
            self.commands as f64 / self.seconds / 1e6,
            self.cores,
            self.seed
        )
    }
}

/// The round that runs, for messages.
static CURRENT: Mutex<String> = Mutex::new(String::new());

/// Returns the arguments that repeat the running round.
pub fn current() -> String {
    CURRENT
        .lock()
        .map_or_else(|_| String::new(), |text| text.clone())
}

/// Runs rounds until enough commands have ended or the time is over.
pub fn run(options: &Options) -> Result<Summary, String> {
    let began = Instant::now();
    let mut rng = Rng::new(options.seed);
    let ground = (!options.plain).then(sim::Ground::new);
    let mut sum = Summary {
        seed: options.seed,
        cores: options.cores,
        ..Summary::default()
    };
    let mut said = Instant::now();
    while sum.commands < options.commands && began.elapsed().as_secs() < options.seconds {
        let round = Round::draw(&mut rng, options.cores);
        let (number, seed) = (sum.rounds, options.seed);
        if let Ok(mut text) = CURRENT.lock() {
            *text = format!("round {number} of seed {seed} ({round})");
        }
        let ran = match &ground {
            Some(ground) => sim::run(ground, &round, ROUND),
            None => plain::run(&round, ROUND),
        };
        let commands = ran.map_err(|why| format!("{}: {why}", current()))?;
        sum.commands += commands;
        sum.by_mode[round.mode as usize] += commands;
        sum.rounds += 1;
        sum.seconds = began.elapsed().as_secs_f64();
        if said.elapsed().as_secs() >= 30 {
            said = Instant::now();
            println!("{sum}");
        }
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_core::queue_state::QueueState;

    #[test]
    fn every_round_that_is_drawn_is_possible() {
        let mut rng = Rng::new(3);
        let mut starts = [false; 4];
        for index in 0..4000 {
            let round = Round::draw(&mut rng, 2 + index % 15);
            assert!(
                QueueState::possible(round.entries, round.slots) && round.entries <= 16,
                "{round}"
            );
            assert!(round.threads >= 1 && round.queues >= 1 && round.controllers >= 1);
            assert_eq!(round.start % (2 * round.entries), 0, "{round}");
            let near = |wrap: u64| (wrap as u32).wrapping_sub(round.start) <= 64 * 32;
            for (index, wrap) in [0, 1 << 16, 1 << 31, 1 << 32].into_iter().enumerate() {
                starts[index] |= near(wrap);
            }
        }
        assert_eq!(starts, [true; 4]);
    }

    /// Runs a few rounds of both kinds, and checks that they pass and count.
    #[test]
    fn a_few_rounds_of_each_kind_pass() {
        for plain in [true, false] {
            let options = Options {
                plain,
                commands: 200,
                seconds: 3600,
                seed: 5,
                cores: 2,
            };
            let sum = run(&options).unwrap();
            assert!(sum.commands >= 200, "{sum}");
        }
    }
}
