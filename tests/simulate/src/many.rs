//! Many seeds on every core.

use crate::account::Failure;
use crate::fault::Coverage;
use crate::plan::Plan;
use crate::rows;
use crate::run::{Arena, run};
use crate::sabotage::Sabotage;
use rustix::time::{ClockId, clock_gettime};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Number of seeds that a thread takes at a time.
const SHARE: u64 = 32;
/// Number of failing seeds after which no more seeds are tried.
const ENOUGH: usize = 3;

/// The results of many seeds.
#[derive(Clone, Debug, Default)]
pub struct Total {
    /// Seeds that were run.
    pub seeds: u64,
    /// Commands placed.
    pub commands: u64,
    /// Recoveries completed.
    pub recoveries: u64,
    /// Virtual time that passed.
    pub virtual_ns: u128,
    /// Processor time of all threads together.
    pub busy: Duration,
    /// Faults that were seen, by the state in which they struck.
    pub coverage: Coverage,
    /// Seeds that failed, the lowest first.
    pub failures: Vec<(u64, Failure)>,
    /// Counts of events in gathers.
    pub rows: rows::Counts,
    /// Seeds whose gathers failed, the lowest first.
    pub failures_of_rows: Vec<(u64, Failure)>,
}

/// Runs `seeds` seeds, commands and gathers, from `base` on in `threads` threads; `progress` hears of each share.
pub fn many(
    base: u64,
    seeds: u64,
    threads: usize,
    sabotage: Sabotage,
    progress: impl Fn(u64) + Sync,
) -> Total {
    let next = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let total = Mutex::new(Total::default());
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                let mut arena = Arena::default();
                while !stop.load(Ordering::Relaxed) {
                    let first = next.fetch_add(SHARE, Ordering::Relaxed);
                    if first >= seeds {
                        break;
                    }
                    let share = first..seeds.min(first + SHARE);
                    let count = share.end - share.start;
                    let some = run_share(
                        &mut arena,
                        share.map(|seed| base.wrapping_add(seed)),
                        sabotage,
                    );
                    let mut total = total.lock().expect("no panic under this lock");
                    total.add(some);
                    if total.failures.len() + total.failures_of_rows.len() >= ENOUGH {
                        stop.store(true, Ordering::Relaxed);
                    }
                    drop(total);
                    progress(count);
                }
            });
        }
    });
    let mut total = total.into_inner().expect("no panic under this lock");
    for failures in [&mut total.failures, &mut total.failures_of_rows] {
        failures.sort_by_key(|(seed, _)| seed.wrapping_sub(base));
    }
    total
}

/// Returns the processor time of this thread: other work on the machine does not count.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn run_share(arena: &mut Arena, seeds: impl Iterator<Item = u64>, sabotage: Sabotage) -> Total {
    let mut total = Total::default();
    let began = processor_time();
    for seed in seeds {
        let one = run(arena, &Plan::draw(seed), sabotage, false);
        total.seeds += 1;
        total.commands += u64::from(one.commands);
        total.recoveries += u64::from(one.recoveries);
        total.virtual_ns += u128::from(one.virtual_ns);
        total.coverage.add(&one.coverage);
        total
            .failures
            .extend(one.failure.map(|failure| (seed, failure)));
        // A bug that is planted for commands is not looked for in gathers.
        if sabotage == Sabotage::None
            && let Some(gathers) = rows::run_of(arena, seed, false)
        {
            total.rows.add(&gathers.counts);
            total
                .failures_of_rows
                .extend(gathers.failure.map(|failure| (seed, failure)));
        }
    }
    total.busy = processor_time().saturating_sub(began);
    total
}

impl Total {
    fn add(&mut self, other: Self) {
        self.seeds += other.seeds;
        self.commands += other.commands;
        self.recoveries += other.recoveries;
        self.virtual_ns += other.virtual_ns;
        self.busy += other.busy;
        self.coverage.add(&other.coverage);
        self.failures.extend(other.failures);
        self.rows.add(&other.rows);
        self.failures_of_rows.extend(other.failures_of_rows);
    }

    /// Returns the events that no gather has met.
    pub fn missing_of_rows(&self) -> Vec<&'static str> {
        let named = self.rows.named().into_iter();
        let missing = named.filter(|(_, count)| *count == 0);
        missing.map(|(name, _)| name).collect()
    }

    /// Seeds that one thread runs in a second of processor time.
    pub fn per_second(&self) -> f64 {
        self.seeds as f64 / self.busy.as_secs_f64().max(1e-9)
    }
}
