//! Layers of experts that the GPU chooses, reads and computes, compared with the CPU, and the results of tokens whose
//! experts' reads fail.
// UNSAFETY: steps take addresses of vectors.
#![allow(unsafe_code)]

use crate::bench::Bench;
use crate::gather::{dice, few_stations, simulated, text};
use crate::limits::{give_up, limit};
use crate::reading::planned;
use crate::report::{Outcome, Report};
use nvme_compute::random_weights::{self, StoredFormat};
use nvme_host::Store;
use nvme_host::cuda::{CudaGraph, DeviceMemory, PendingRows, RowFailures, Stream};
use nvme_models::experts::{
    CacheOptions, ExpertActivation, ExpertLayers, ExpertMatrices, ExpertShape, ExpertStep,
    GpuExperts, ReplacementPolicy, balance, check,
};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Content of `y` before a step that writes it, and the value to which an adding step adds.
const BEFORE: f32 = -77.25;
/// Largest difference of an element from the CPU's, relative to the largest one.
const TOLERANCE: f32 = 1e-4;
/// Tokens of a step at most.
const TOKENS: u32 = 5;
const LAYERS: u32 = 3;

const SMALL: ExpertShape = ExpertShape {
    width: 96,
    hidden: 160,
    experts: 9,
    choices: 3,
    over_all: false,
    activation: ExpertActivation::SwiGlu,
};

pub fn all(report: &mut Report, bench: &Bench) {
    for block in [512, 4096] {
        report.test(&format!("experts/shapes/block-{block}"), |_| {
            shapes(bench, block)
        });
    }
    for policy in ReplacementPolicy::ALL {
        let name = format!("experts/policy/{policy:?}").to_lowercase();
        report.test(&name, |_| policies(bench, policy));
    }
    report.test("experts/whole-layers", |_| whole_layers(bench));
    for stored in [
        StoredFormat::Q8_0,
        StoredFormat::Q4_0,
        StoredFormat::Q4_1,
        StoredFormat::Mxfp4,
    ] {
        let name = format!("experts/batches/{stored:?}").to_lowercase();
        report.test(&name, |_| batches(bench, stored));
    }
    report.test("experts/balance", |_| balances(bench));
    report.test("experts/usage", |_| usage(bench));
    report.test("experts/graph", |_| graph(bench));
    // The host reads less than 60 times, to fill the drive.
    for (name, fault) in [
        // The faults hit several commands, because the parts of a command that failed are read again one by one.
        ("status", "status:0x281@op=read,nth=60-120"),
        ("dropped", "drop@op=read,nth=60"),
        ("late", "delay:LATE@op=read,nth=60"),
        ("reordered", "reorder@op=read,every=5"),
        ("torn-cqe", "torncqe@op=read,nth=60"),
        ("wrong-cid", "wrongcid:0xfff@op=read,nth=60"),
        ("dead-cfs", "cfs@op=read,nth=60"),
        ("all-ones", "allones@op=read,nth=60"),
    ] {
        report.test(&format!("experts/fault/{name}"), |_| {
            faults(bench, name, fault)
        });
    }
}

/// Experts on a drive, the same on one without faults, and a cache.
struct Drive {
    experts: ExpertLayers,
    /// The experts on the drive without faults, for the CPU.
    sound: ExpertLayers,
    cache: GpuExperts,
    stream: Stream,
    logits: DeviceMemory,
    x: DeviceMemory,
    y: DeviceMemory,
    probabilities: DeviceMemory,
}

/// The inputs of a step.
struct Job {
    layer: u32,
    tokens: u32,
    logits: Vec<f32>,
    x: Vec<f32>,
    adds: bool,
}

/// Formats of the matrices of each layer.
type LayerFormats = [[StoredFormat; 3]; LAYERS as usize];

const MIXED: LayerFormats = [
    [StoredFormat::Bf16, StoredFormat::Q8_0, StoredFormat::F32],
    [StoredFormat::Q4_0, StoredFormat::F16, StoredFormat::Q4_1],
    [StoredFormat::F32, StoredFormat::F32, StoredFormat::Bf16],
];

/// Returns layers, each at an odd offset.
fn layers(formats: &LayerFormats) -> Vec<[ExpertMatrices; 3]> {
    let layer = |layer: u32| {
        [0, 1, 2].map(|matrix| ExpertMatrices {
            offset: u64::from(layer * 3 + matrix) * (1 << 20) + u64::from(2 * layer + matrix * 34),
            stored: formats[layer as usize][matrix as usize],
        })
    };
    (0..LAYERS).map(layer).collect()
}

impl Drive {
    /// `slots` beside the pinned ones.
    fn new(
        bench: &Bench,
        (block, fault, timeout): (u32, &str, Duration),
        shape: ExpertShape,
        cache: (u32, ReplacementPolicy, &[(u32, u32)]),
    ) -> Outcome<Self> {
        Self::of_formats(
            bench,
            (block, fault, timeout),
            shape,
            cache,
            (&MIXED, TOKENS),
        )
    }

    /// `tokens` of a step at most.
    fn of_formats(
        bench: &Bench,
        (block, fault, timeout): (u32, &str, Duration),
        shape: ExpertShape,
        (slots, policy, pinned): (u32, ReplacementPolicy, &[(u32, u32)]),
        (formats, tokens): (&LayerFormats, u32),
    ) -> Outcome<Self> {
        let options = few_stations(bench, timeout);
        let open = |fault| -> nvme_host::Result<ExpertLayers> {
            let store = Arc::new(Store::open(&simulated(16, block, fault), &options)?);
            let experts = ExpertLayers::new(&store, shape, layers(formats))?;
            fill(&store, shape, formats)?;
            Ok(experts)
        };
        let (experts, sound) = (open(fault).map_err(text)?, open("").map_err(text)?);
        let largest = (0..LAYERS).map(|layer| experts.bytes(layer)).max();
        // Room around each matrix, rounded up.
        let slot = largest.unwrap_or(0) + 3 * 32;
        let options = CacheOptions {
            bytes: slot * u64::from(slots + pinned.len() as u32),
            policy,
            pinned: pinned.to_vec(),
            tokens,
            limit: limit(),
        };
        let floats = |count: u32| DeviceMemory::new(&bench.gpu, count as usize * 4).map_err(text);
        Ok(Self {
            cache: GpuExperts::new(&experts, &options).map_err(text)?,
            experts,
            sound,
            stream: Stream::new(&bench.gpu).map_err(text)?,
            logits: floats(tokens * shape.experts)?,
            x: floats(tokens * shape.width)?,
            y: floats((tokens + 1) * shape.width)?,
            probabilities: floats(tokens * shape.experts)?,
        })
    }

    fn job(&self, throw: &mut impl FnMut(u64) -> u64, tokens: u32) -> Job {
        let shape = self.experts.shape();
        let mut numbers = |count: u32, span: u64| -> Vec<f32> {
            let number = |_| throw(span) as f32 / 100.0 - span as f32 / 200.0;
            (0..tokens * count).map(number).collect()
        };
        Job {
            // Few different values: many are equal.
            logits: numbers(shape.experts, 300),
            x: numbers(shape.width, 200),
            layer: throw(3) as u32,
            tokens,
            adds: throw(2) == 1,
        }
    }

    fn upload(&self, job: &Job) -> Outcome<()> {
        let all = vec![BEFORE; self.y.len() / 4];
        self.logits
            .upload(0, &bytes_of(&job.logits))
            .map_err(text)?;
        self.x.upload(0, &bytes_of(&job.x)).map_err(text)?;
        self.y.upload(0, &bytes_of(&all)).map_err(text)
    }

    fn start_on(&self, job: &Job, stream: u64) -> nvme_host::Result<PendingRows> {
        let step = self.step_of(job);
        // SAFETY: the memory belongs to the drive, which waits for each step.
        unsafe { self.cache.step(&step, stream) }
    }

    fn step_of(&self, job: &Job) -> ExpertStep {
        ExpertStep {
            layer: job.layer,
            tokens: job.tokens,
            logits: self.logits.address(),
            given: None,
            x: self.x.address(),
            y: self.y.address(),
            adds: job.adds,
            biases: [0; 3],
            probabilities: self.probabilities.address(),
        }
    }

    /// Runs a step and checks its results; returns the failures of its reads.
    fn run(&self, job: &Job) -> Outcome<RowFailures> {
        self.upload(job)?;
        let pending = self.start_on(job, self.stream.handle()).map_err(text)?;
        // Nothing else is waited for: the results are complete now.
        let failures = pending.wait(limit()).map_err(text)?.failures;
        let lost = self.check(job)?;
        match (failures.rows, lost) {
            (0, 0) => Ok(failures),
            (rows, lost) if rows > 0 && lost > 0 => Ok(failures),
            (_, lost) => Err(format!("{lost} tokens are NaN: {failures:?}")),
        }
    }

    /// Checks each element: right, or its whole token is NaN. How many are.
    fn check(&self, job: &Job) -> Outcome<usize> {
        let (shape, found) = (self.experts.shape(), numbers_of(&self.y)?);
        let computed = self.sound.compute(job.layer, &job.logits, &job.x, None);
        let computed = computed.map_err(text)?;
        let width = shape.width as usize;
        let mut lost = 0;
        for (token, (found, computed)) in
            found.chunks(width).zip(computed.chunks(width)).enumerate()
        {
            let nan = found.iter().filter(|y| y.is_nan()).count();
            if nan == width {
                lost += 1;
                continue;
            }
            let size = computed.iter().fold(1e-3f32, |size, y| size.max(y.abs()));
            let before = if job.adds { BEFORE } else { 0.0 };
            let wrong = found.iter().zip(computed).position(|(found, y)| {
                let tolerance = TOLERANCE * size + 1e-4 * before.abs();
                (found - (before + y)).abs() > tolerance || found.is_nan()
            });
            if let Some(at) = wrong {
                return Err(format!(
                    "layer {}, token {token}: element {at} is {}, not {}",
                    job.layer,
                    found[at],
                    before + computed[at]
                ));
            }
        }
        match found[job.tokens as usize * width..]
            .iter()
            .all(|y| *y == BEFORE)
        {
            true => Ok(lost),
            false => Err("vectors behind the last token were written".to_owned()),
        }
    }
}

fn fill(store: &Store, shape: ExpertShape, formats: &LayerFormats) -> nvme_host::Result<()> {
    for (layer, placed) in layers(formats).into_iter().enumerate() {
        for (matrix, ExpertMatrices { offset, stored }) in placed.into_iter().enumerate() {
            let (rows, columns) = match matrix {
                2 => (shape.width, shape.hidden),
                _ => (shape.hidden, shape.width),
            };
            let row_bytes = stored.row_bytes(columns).unwrap_or(0);
            let mut bytes = vec![0; (row_bytes * u64::from(rows * shape.experts)) as usize];
            random_weights::fill(stored, (layer * 3 + matrix) as u64, &mut bytes);
            store.write_at(offset, &bytes)?;
        }
    }
    Ok(())
}

fn bytes_of(numbers: &[f32]) -> Vec<u8> {
    numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect()
}

fn numbers_of(memory: &DeviceMemory) -> Outcome<Vec<f32>> {
    let mut bytes = vec![0; memory.len()];
    memory.download(0, &mut bytes).map_err(text)?;
    let words = bytes.as_chunks::<4>().0.iter();
    Ok(words.map(|word| f32::from_le_bytes(*word)).collect())
}

/// Cases: widths, numbers of experts and of choices, tokens from none on, one expert alone, all of them.
fn shapes(bench: &Bench, block: u32) -> Outcome<String> {
    let mut steps = 0;
    for shape in [
        SMALL,
        ExpertShape {
            experts: 1,
            choices: 1,
            ..SMALL
        },
        ExpertShape {
            experts: 33,
            choices: 33,
            width: 32,
            hidden: 32,
            over_all: true,
            activation: ExpertActivation::ClampedSwiGlu { limit: 0.2 },
        },
        ExpertShape {
            activation: ExpertActivation::Situ {
                beta: 0.5,
                linear_beta: 2.0,
            },
            ..SMALL
        },
        ExpertShape {
            width: 256,
            hidden: 96,
            experts: 6,
            choices: 2,
            over_all: true,
            activation: ExpertActivation::GptOss {
                limit: 7.0,
                alpha: 1.702,
            },
        },
    ] {
        let drive = Drive::new(
            bench,
            (block, "", limit()),
            shape,
            (shape.experts, ReplacementPolicy::Lru, &[]),
        )?;
        let mut throw = dice(u64::from(shape.experts));
        for tokens in [0, 1, 2, TOKENS, 1] {
            let job = drive.job(&mut throw, tokens);
            let failures = drive.run(&job).map_err(|why| format!("{shape:?}: {why}"))?;
            if failures.rows != 0 {
                return Err(format!("{shape:?}: {failures:?}"));
            }
            steps += 1;
        }
    }
    Ok(format!("{steps} steps"))
}

/// Many tokens, whose experts' weights are loaded once for several of them: numbers of tokens and rows that fill no batch
/// and no block, chunks and pairs of units that are not whole, experts that no token or every token chooses.
fn batches(bench: &Bench, stored: StoredFormat) -> Outcome<String> {
    const MOST: u32 = 29;
    let mut steps = 0;
    // MXFP4 takes pairs of units alone.
    let odd = match stored {
        StoredFormat::Mxfp4 => 0,
        _ => 32,
    };
    for (width, hidden, experts, choices) in [
        (1088, 192, 3, 2),
        (64, 576, 5, 1),
        (64, 64, 2, 2),
        (512, 384, 4, 3),
    ] {
        let shape = ExpertShape {
            width: width + odd,
            hidden: hidden + odd,
            experts,
            choices,
            ..SMALL
        };
        let drive = Drive::of_formats(
            bench,
            (4096, "", limit()),
            shape,
            (experts, ReplacementPolicy::Lru, &[]),
            (&[[stored; 3]; LAYERS as usize], MOST),
        )?;
        let mut throw = dice(u64::from(width));
        let least = (4 * experts).div_ceil(choices);
        for (tokens, favoured) in [(least, 0), (MOST, 0), (MOST - 2, 1)] {
            let mut job = drive.job(&mut throw, tokens);
            for logits in job.logits.chunks_mut(experts as usize) {
                logits[experts as usize - 1] += favoured as f32 * 100.0;
            }
            let failures = drive.run(&job).map_err(|why| format!("{shape:?}: {why}"))?;
            if failures.rows != 0 {
                return Err(format!("{shape:?}: {failures:?}"));
            }
            steps += 1;
        }
    }
    Ok(format!("{steps} steps"))
}

/// A layer that was loaded as a whole is read no more by its steps.
fn whole_layers(bench: &Bench) -> Outcome<String> {
    let policy = (SMALL.experts, ReplacementPolicy::Lru, &[][..]);
    let drive = Drive::new(bench, (4096, "", limit()), SMALL, policy)?;
    let mut throw = dice(7);
    for layer in [0, 2, 1, 2] {
        // SAFETY: nothing else uses the cache.
        let pending = unsafe { drive.cache.load_layer(layer, drive.stream.handle()) };
        check(pending.map_err(text)?.wait(limit()).map_err(text)?).map_err(text)?;
        let before = drive.cache.counts().map_err(text)?;
        let job = Job {
            layer,
            ..drive.job(&mut throw, TOKENS)
        };
        drive.run(&job)?;
        let after = drive.cache.counts().map_err(text)?;
        let hits = after.hits - before.hits;
        if after.misses != before.misses || hits != u64::from(TOKENS * SMALL.choices) {
            return Err(format!("layer {layer}: {hits} hits, {after:?}"));
        }
    }
    // SAFETY: as above.
    match unsafe { drive.cache.load_layer(3, drive.stream.handle()) } {
        Err(error) if error.exit_code() == 2 => Ok("4 layers".to_owned()),
        _ => Err("a layer that does not exist was loaded".to_owned()),
    }
}

/// Few slots and many steps: experts in the cache are used, and never ones that were replaced.
fn policies(bench: &Bench, policy: ReplacementPolicy) -> Outcome<String> {
    let pinned = [(0, 4), (2, 0)];
    let drive = Drive::new(
        bench,
        (4096, "", limit()),
        SMALL,
        (SMALL.experts, policy, &pinned),
    )?;
    let (mut throw, mut choices) = (dice(policy as u64), 0);
    let mut of_layer = [[0u64; SMALL.experts as usize]; 3];
    for _ in 0..60 {
        let tokens = 1 + throw(u64::from(TOKENS)) as u32;
        let mut job = drive.job(&mut throw, tokens);
        job.layer = throw(2) as u32 * 2;
        let failures = drive.run(&job)?;
        if failures.rows != 0 {
            return Err(format!("{failures:?}"));
        }
        choices += u64::from(tokens * SMALL.choices);
        for logits in job.logits.chunks(SMALL.experts as usize) {
            let mut order: Vec<usize> = (0..logits.len()).collect();
            order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
            for expert in &order[..SMALL.choices as usize] {
                of_layer[job.layer as usize][*expert] += 1;
            }
        }
    }
    let counts = drive.cache.counts().map_err(text)?;
    if counts.hits + counts.misses != choices || counts.hits == 0 || counts.evictions == 0 {
        return Err(format!("{choices} choices: {counts:?}"));
    }
    if counts.chosen != of_layer {
        return Err(format!(
            "experts by layer: {:?}, not {of_layer:?}",
            counts.chosen
        ));
    }
    Ok(format!(
        "{} of {choices} choices were in {} slots, {} evicted",
        counts.hits,
        drive.cache.slots(),
        counts.evictions
    ))
}

/// The softmax of the logits, and the metrics of both.
fn balances(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(
        bench,
        (4096, "", limit()),
        SMALL,
        (SMALL.experts, ReplacementPolicy::Lru, &[]),
    )?;
    let mut job = drive.job(&mut dice(3), TOKENS);
    job.layer = 1;
    drive.run(&job)?;
    let (found, experts) = (numbers_of(&drive.probabilities)?, SMALL.experts as usize);
    for (found, logits) in found.chunks(experts).zip(job.logits.chunks(experts)) {
        let total: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
        for (found, logit) in found.iter().zip(logits) {
            let expected = f64::from(*logit).exp() / total;
            if (f64::from(*found) - expected).abs() > 1e-5 {
                return Err(format!("a probability is {found}, not {expected}"));
            }
        }
    }
    let counts = drive.cache.counts().map_err(text)?;
    let metrics = balance(&counts.chosen[1], &found);
    let is_possible = metrics.most_to_mean >= 1.0 && (0.0..=1.0).contains(&metrics.entropy);
    match (is_possible, metrics.loss) {
        (true, Some(loss)) if loss > 0.0 => Ok(format!("{metrics:?}")),
        _ => Err(format!("{metrics:?}")),
    }
}

fn usage(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(
        bench,
        (4096, "", limit()),
        SMALL,
        (SMALL.experts, ReplacementPolicy::Lru, &[]),
    )?;
    let options = |bytes, tokens, pinned: &[(u32, u32)]| CacheOptions {
        bytes,
        policy: ReplacementPolicy::Lru,
        pinned: pinned.to_vec(),
        tokens,
        limit: limit(),
    };
    for (what, options) in [
        ("no bytes", options(0, 1, &[])),
        ("no token", options(64 << 20, 0, &[])),
        ("a layer too many", options(64 << 20, 1, &[(3, 0)])),
        (
            "an expert too many",
            options(64 << 20, 1, &[(0, SMALL.experts)]),
        ),
        ("one pinned twice", options(64 << 20, 1, &[(0, 1), (0, 1)])),
    ] {
        match GpuExperts::new(&drive.experts, &options) {
            Err(error) if error.exit_code() == 2 => {}
            other => return Err(format!("{what}: {:?}", other.err())),
        }
    }
    let mut job = drive.job(&mut dice(1), 1);
    for (layer, tokens) in [(3, 1), (0, TOKENS + 1)] {
        (job.layer, job.tokens) = (layer, tokens);
        let refused = drive.start_on(&job, drive.stream.handle());
        if refused.map(drop).map_err(|error| error.exit_code()) != Err(2) {
            return Err(format!("layer {layer} of {tokens} tokens"));
        }
    }
    Ok("refused before anything is launched".to_owned())
}

/// A token in a graph uses the experts that its logits choose when it is launched. After the store was closed, experts
/// in the cache are still computed, and tokens that need others are NaN.
fn graph(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(
        bench,
        (4096, "", limit()),
        SMALL,
        (SMALL.experts, ReplacementPolicy::Lru, &[]),
    )?;
    let mut throw = dice(17);
    let mut job = drive.job(&mut throw, 2);
    (job.layer, job.adds) = (1, false);
    let captured = CudaGraph::capture(&drive.stream, |stream| drive.start_on(&job, stream));
    let (graph, pending) = captured.map_err(text)?;
    let launch = |stream: &Stream| -> Outcome<()> {
        let before = pending.ended();
        graph.launch(stream).map_err(text)?;
        let begin = Instant::now();
        while pending.ended() == before {
            if begin.elapsed() > limit() {
                give_up("a launch of a graph does not end");
            }
            std::thread::yield_now();
        }
        Ok(())
    };
    // Experts 0 to 4 of 9, and then one that was never read.
    for round in 0..4 {
        for (at, logit) in job.logits.iter_mut().enumerate() {
            let expert = at % SMALL.experts as usize;
            *logit = match expert < 5 {
                true => throw(100) as f32 / 50.0,
                false => -5.0,
            };
        }
        drive.upload(&job)?;
        launch(&drive.stream)?;
        if drive.check(&job)? != 0 {
            return Err(format!("launch {round}: NaN"));
        }
        check(pending.last()).map_err(text)?;
    }
    let held: BTreeSet<u64> = drive.cache.counts().map_err(text)?.chosen[1]
        .iter()
        .copied()
        .collect();
    if held.len() < 2 {
        return Err("all experts were chosen as often".to_owned());
    }
    let Drive {
        experts,
        sound,
        cache,
        stream,
        logits,
        x,
        y,
        probabilities,
    } = drive;
    // The store is closed when its last user is dropped; the memory of the cache stays.
    drop((experts, cache));
    let width = SMALL.width as usize;
    job.logits[8] = 9.0;
    logits.upload(0, &bytes_of(&job.logits)).map_err(text)?;
    launch(&stream)?;
    let found = numbers_of(&y)?;
    let is_nan = |token: usize| found[token * width..][..width].iter().all(|y| y.is_nan());
    drop((sound, x, probabilities));
    match (is_nan(0), pending.last().failures.rows) {
        (true, rows) if rows > 0 && !is_nan(1) => Ok(
            "4 launches; a token with an expert that is not there is NaN when the store is gone"
                .to_owned(),
        ),
        other => Err(format!("after the store: {other:?}, {}", is_nan(1))),
    }
}

/// Tokens whose experts' reads fail are NaN, none is wrong, and later ones are complete if the controller comes back.
fn faults(bench: &Bench, name: &str, fault: &str) -> Outcome<String> {
    let (fault, timeout) = planned(bench, fault);
    let drive = Drive::new(
        bench,
        (4096, &fault, timeout),
        SMALL,
        (SMALL.experts, ReplacementPolicy::Clock, &[]),
    )?;
    let is_harmless = matches!(name, "reordered" | "torn-cqe");
    let (mut throw, mut failed, mut whole) = (dice(5), 0, 0);
    let begin = Instant::now();
    loop {
        let job = drive.job(&mut throw, TOKENS);
        let failures = drive.run(&job)?;
        failed += failures.rows;
        whole += u32::from(failures.rows == 0);
        let is_over = name == "all-ones" && begin.elapsed() > Duration::from_secs(3);
        if is_over && failures.rows > 0 {
            return Ok(format!(
                "{failed} parts failed of a controller that is gone"
            ));
        }
        if is_harmless && failures.rows > 0 {
            return Err(format!("{failures:?}"));
        }
        let is_enough = failures.rows == 0 && whole > 3 && (failed > 0 || is_harmless);
        if is_enough && name != "all-ones" {
            return Ok(format!("{failed} parts failed, then none"));
        }
        if begin.elapsed() > limit() {
            return Err(format!(
                "{failed} parts failed after {:?}: {failures:?}",
                limit()
            ));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
