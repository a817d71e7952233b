//! `cargo xtask simulate`: many seeds, or one of them with its trace.

mod report;

use clap::Parser;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use nvme_simulate::many::many;
use nvme_simulate::plan::Plan;
use nvme_simulate::rows;
use nvme_simulate::run::{Arena, run};
use nvme_simulate::sabotage::Sabotage;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

/// Seeds from which on every fault must have met every state that it can meet.
const ENOUGH_FOR_COVERAGE: u64 = 20_000;

/// Runs the drivers, and gathers of rows by a GPU, against a controller in virtual time, with faults drawn from seeds.
///
/// Exit codes: 0 all is well; 1 a seed failed (it is printed, cut down, with its trace); 2 wrong
/// arguments; 3 no seed failed, but a run of 20,000 seeds or more did not meet every fault in every
/// state, or met one that is said to be impossible.
#[derive(Parser)]
#[command(name = "simulate")]
struct Args {
    /// Seeds to run
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// The first seed; drawn from the clock, and printed, when it is not given
    #[arg(long, value_name = "B")]
    base: Option<u64>,
    /// Run this seed alone and print its trace
    #[arg(long, value_name = "S", conflicts_with_all = ["seeds", "base"])]
    seed: Option<u64>,
    /// Threads; all cores when it is not given
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    // A panic is an oracle here: it is reported as the failure of its seed.
    std::panic::set_hook(Box::new(|_| ()));
    match args.seed {
        Some(seed) => replay(seed, args.json),
        None => sweep(&args),
    }
}

fn replay(seed: u64, json: bool) -> ExitCode {
    let plan = Plan::draw(seed);
    let mut arena = Arena::default();
    let told = run(&mut arena, &plan, Sabotage::None, true);
    let again = run(&mut arena, &plan, Sabotage::None, false);
    let repeats = told.hash == again.hash && told.failure == again.failure;
    let gathers = rows::run_of(&mut arena, seed, true).unwrap_or_default();
    report::replayed(seed, &plan, (&told, &gathers), repeats, json);
    if told.failure.is_none() && gathers.failure.is_none() && repeats {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(1)
    }
}

fn sweep(args: &Args) -> ExitCode {
    let base = args.base.unwrap_or_else(fresh_base);
    let threads = args.threads.map_or_else(cores, usize::from);
    if !args.json {
        println!("base {base}, {} seeds, {threads} threads", args.seeds);
    }
    let bar = progress_bar(args.seeds);
    let total = many(base, args.seeds, threads, Sabotage::None, |seeds| {
        bar.inc(seeds)
    });
    bar.finish_and_clear();
    let whole = args.seeds >= ENOUGH_FOR_COVERAGE;
    let is_met = total.coverage.missing().is_empty() && total.missing_of_rows().is_empty();
    report::swept(base, threads, &total, whole, args.json);
    let is_well = total.failures.is_empty() && total.failures_of_rows.is_empty();
    match (is_well, !whole || is_met) {
        (false, _) => ExitCode::from(1),
        (true, false) => ExitCode::from(3),
        (true, true) => ExitCode::SUCCESS,
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Returns a new base; it is printed, so that the run can be repeated.
fn fresh_base() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(1, |since| since.as_millis() as u64)
}

fn progress_bar(seeds: u64) -> ProgressBar {
    let target = if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let bar = ProgressBar::with_draw_target(Some(seeds), target);
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} seeds, {per_sec}, {eta} left");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
