//! Round trips and rates beside tier 1, in turns in one process: one JSON object.

use super::cells::{IMAGE, LAUNCHES};
use super::controller::{Image, Model};
use super::rig::PeerRig;
use super::{Arrangement, Stage};
use crate::bench::{Bench, Mode, Tier};
use crate::limits::limit;
use crate::report::Report;
use crate::rig::{Rig, Rigged, Shape};
use crate::sim;
use gpu_peer::Plan;
use nvme_gpu_kernel::work::pattern;
use nvme_host::cuda::RingShape;
use std::fmt::Write;

/// Runs of each measurement; the median counts.
const RUNS: usize = 5;
const ENTRIES: u32 = 256;
/// Threads of the simulator.
const THREADS: usize = 12;

/// Measured cases: number of queues, commands in flight on each, blocks of each command.
const CASES: [(u32, u32, u32); 7] = [
    (1, 1, 1),
    (1, 255, 1),
    (1, 255, 8),
    (16, 255, 1),
    (16, 255, 8),
    (128, 255, 1),
    (128, 255, 8),
];

pub fn all(report: &mut Report, stage: &Stage<'_>) {
    let two = stage.arrangement == Arrangement::Two;
    stage.test(report, "speed", |bench, image| speed(bench, image, two));
}

/// Commands of each run of a case.
fn commands(bench: &Bench, (queues, depth, _): (u32, u32, u32)) -> u64 {
    let most = match (queues, depth) {
        (_, 1) => 20_000,
        (1, _) => 200_000,
        _ => 1_000_000,
    };
    bench.commands.min(most)
}

/// Measures the nanoseconds of one run of reads at random offsets.
fn measure(
    bench: &Bench,
    rig: &mut impl Rigged,
    case: (u32, u32, u32),
    seed: u64,
) -> Result<f64, String> {
    let (queues, depth, blocks) = case;
    let mut launch = rig.launch()?;
    let (grid, block) = Mode::Warp.shape(queues, &mut launch);
    launch.depth = depth;
    launch.blocks = blocks;
    launch.units = IMAGE / 512 / u64::from(blocks);
    launch.pattern = pattern::RANDOM;
    launch.seed = seed;
    launch.commands = commands(bench, case);
    launch.timeout_ns = 3_000_000_000 * bench.patience;
    let report = rig.run(Mode::Warp.kernel(), grid, block, launch)?.report;
    match (report.completed == launch.commands, report.elapsed_ns()) {
        (false, _) => Err(format!("not every read succeeded: {report:?}")),
        // The stand-in of CUDA has no clock, so that it has no rates.
        (true, 0) => Ok(f64::NAN),
        (true, elapsed_ns) => Ok(elapsed_ns as f64),
    }
}

/// Measures the cases of `queues` queues, once each; returns nanoseconds.
fn tier1(bench: &Bench, queues: u32, seed: u64) -> Result<Vec<f64>, String> {
    let shape = Shape {
        tier: Tier::Pinned,
        queues,
        entries: ENTRIES,
        slots: ENTRIES - 1,
        start: 0,
        data: data_bytes(queues),
    };
    let model = sim::Model {
        image: IMAGE,
        dstrd: 0,
        faults: &[],
        threads: THREADS.min(queues as usize),
    };
    let mut rig = Rig::new(bench, shape, &model)?;
    let cases = CASES.into_iter().filter(|case| case.0 == queues);
    cases
        .map(|case| measure(bench, &mut rig, case, seed))
        .collect()
}

fn tier3(bench: &Bench, image: &Image, queues: u32, seed: u64) -> Result<Vec<f64>, String> {
    let shape = RingShape {
        queues,
        entries: ENTRIES,
        slots: ENTRIES - 1,
        list_words: 512,
        start: 0,
    };
    let model = Model {
        queues,
        dstrd: 0,
        image: IMAGE,
        plan: Plan::default(),
        warps: queues,
        timeout: limit() * LAUNCHES,
    };
    let bytes = data_bytes(queues);
    let mut rig = PeerRig::new(bench, image, shape, model, bytes, 1_000_000)?;
    let cases = CASES.into_iter().filter(|case| case.0 == queues);
    let ran: Result<Vec<f64>, String> = cases
        .map(|case| measure(bench, &mut rig, case, seed))
        .collect();
    rig.stop()?;
    ran
}

/// Returns a buffer of eight blocks for each slot of each queue, and the image at least.
fn data_bytes(queues: u32) -> usize {
    (queues as usize * (ENTRIES as usize - 1) * 4096).max(IMAGE as usize)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Formats a number for JSON, which has no infinity.
fn number(value: f64) -> String {
    match value.is_finite() {
        true => format!("{value:.4}"),
        false => "null".to_owned(),
    }
}

fn speed(bench: &Bench, image: &Image, two: bool) -> Result<String, String> {
    let mut all: Vec<[Vec<f64>; 2]> = vec![Default::default(); CASES.len()];
    for run in 0..RUNS as u64 {
        for queues in [1, 16, 128] {
            let sides = [
                tier1(bench, queues, run)?,
                tier3(bench, image, queues, run)?,
            ];
            let places = CASES
                .iter()
                .enumerate()
                .filter(|(_, case)| case.0 == queues);
            for (nth, (place, _)) in places.enumerate() {
                for side in 0..2 {
                    all[place][side].push(sides[side][nth]);
                }
            }
        }
    }
    let mut text = format!(
        "{{\"bench\":\"tier3\",\"driver\":\"{}\",\"controller\":\"{}\",\"gpus\":{},\"runs\":{RUNS},\"cases\":[",
        bench.gpu.name(),
        image.gpu.name(),
        1 + u32::from(two)
    );
    for (place, case) in CASES.into_iter().enumerate() {
        let (queues, depth, blocks) = case;
        let [one, three] = &mut all[place];
        let each = commands(bench, case) as f64;
        let ns = [median(one), median(three)];
        let rate = ns.map(|ns| each / ns * 1e3);
        let bytes = blocks * sim::BLOCK;
        let gb_s = rate.map(|rate| rate * f64::from(bytes) / 1e3);
        let pair = |name: &str, [one, three]: [f64; 2]| {
            format!(
                "\"tier1_{name}\":{},\"tier3_{name}\":{}",
                number(one),
                number(three)
            )
        };
        let comma = if place == 0 { "" } else { "," };
        // Writing to a string does not fail.
        let _ = write!(
            text,
            "{comma}{{\"queues\":{queues},\"depth\":{depth},\"bytes\":{bytes},{},{},{}}}",
            pair("us", ns.map(|ns| ns / each / 1e3)),
            pair("m_per_s", rate),
            pair("gb_s", gb_s),
        );
    }
    Ok(text + "]}")
}
