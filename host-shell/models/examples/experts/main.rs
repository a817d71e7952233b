//! Tokens through layers of experts whose weights lie on a drive, as one graph each: the GPU chooses, reads and computes.
//!
//! ```sh
//! cargo run --release -p nvme-models --example experts -- DEVICE [LAYERS] [EXPERTS] [CHOICES] [WIDTH] [HIDDEN] [TOKENS] [QUEUES] [FORMAT] [PROMPT]
//! ```
//!
//! DEVICE is overwritten: a simulated drive. Without numbers the layers have 128 experts of 2,880 x 2,880, of which a
//! token uses 4 (the geometry of gpt-oss-120b, which has 36 layers). FORMAT: `q4_0`; `mxfp4` with the activation of
//! gpt-oss, in GGUF's blocks; or `gpt-oss`, the same as published in safetensors, with scales apart, rows of gate and up in
//! turns, and biases. Weights are random; logits come from a generator that prefers some experts. Caches hold 1, 1/2, 1/4,
//! 1/8 and 1/16 of all experts, as far as a token fits. The last token of each is compared with the CPU's result.
//!
//! One line of JSON for each cache: tokens a second, bytes a token, and the number of choices that were in the cache. With
//! PROMPT one line instead: so many tokens pass through whole layers, of which the next is read while one is computed.
//! `of_link` is the time of the reads alone in parts of the time of both.
// UNSAFETY: launches over this program's own memory.
#![allow(unsafe_code)]

#[path = "../../../compute/examples/arguments/mod.rs"]
mod arguments;
mod prompt;
mod published;

use arguments::Arguments;
use nvme_compute::random_weights::{self, StoredFormat};
use nvme_host::bench::median;
use nvme_host::cuda::{CudaGraph, DeviceMemory, PendingRows, RowsOptions, Stream};
use nvme_host::store::GpuOptions;
use nvme_host::{Error, Result, Store, StoreOptions};
use nvme_models::experts::{
    CacheOptions, ExpertActivation, ExpertCounts, ExpertLayers, ExpertMatrices, ExpertShape,
    ExpertStep, GpuExperts, Layer, ReplacementPolicy, check,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);
/// Bytes of random weights that are written at a time.
const CHUNK: usize = 16 << 20;

fn main() -> std::process::ExitCode {
    arguments::end(run)
}

fn run(words: &Arguments) -> Result<()> {
    let Some(device) = words.first().filter(|device| device.starts_with("sim:mem")) else {
        return Err(Error::usage(
            "no DEVICE, or one that would be overwritten",
            "name a simulated drive, as sim:mem?size=8GiB",
        ));
    };
    let layers = words.number(1, 4)?;
    let format = words.word(8).unwrap_or("q4_0");
    let stored = match format {
        "q4_0" => StoredFormat::Q4_0,
        "mxfp4" | "gpt-oss" => StoredFormat::Mxfp4,
        other => {
            let cause = format!("FORMAT is '{other}'");
            return Err(Error::usage(cause, "use q4_0, mxfp4 or gpt-oss"));
        }
    };
    let shape = ExpertShape {
        width: words.number(4, 2880)?,
        hidden: words.number(5, 2880)?,
        experts: words.number(2, 128)?,
        choices: words.number(3, 4)?,
        over_all: false,
        activation: match stored {
            StoredFormat::Mxfp4 => ExpertActivation::GptOss {
                limit: 7.0,
                alpha: 1.702,
            },
            _ => ExpertActivation::SwiGlu,
        },
    };
    let tokens = words.number(6, 32)?;
    let queues = words.number(7, 32)?;
    let options = StoreOptions {
        gpu: Some(GpuOptions {
            index: 0,
            rows: RowsOptions {
                queues,
                stations: queues,
                ..RowsOptions::default()
            },
        }),
        ..StoreOptions::default()
    };
    let store = Arc::new(Store::open(device, &options)?);
    let experts = match format {
        "gpt-oss" => published::write(&store, shape, layers)?,
        _ => {
            let experts = ExpertLayers::new(&store, shape, placed(shape, stored, layers)?)?;
            let bytes = experts.bytes(0) * u64::from(layers * shape.experts);
            fill(&store, stored, bytes)?;
            experts
        }
    };
    if words.word(9).is_some() {
        return prompt::run(&experts, (device, format), words.number(9, 2048)?);
    }
    for part in [1, 2, 4, 8, 16] {
        // Room around the matrices of each expert.
        let all = u64::from(layers * shape.experts) * (experts.bytes(0) + 96);
        let options = CacheOptions {
            bytes: all / part,
            policy: ReplacementPolicy::Lru,
            pinned: Vec::new(),
            tokens: 1,
            limit: LIMIT,
        };
        if options.bytes / (experts.bytes(0) + 96) < u64::from(shape.choices) {
            break;
        }
        let rig = Rig::new(&experts, &options)?;
        let ran = rig.run(tokens)?;
        println!(
            "{{\"device\":\"{device}\",\"format\":\"{}\",\"gpu\":\"{}\",\"layers\":{layers},\"experts\":{},\"choices\":{},\"expert_bytes\":{},\
             \"slots\":{},\"cache_part\":{:.4},\"tokens\":{tokens},\"tokens_per_s\":{:.2},\"token_ms\":{:.3},\
             \"bytes_per_token\":{},\"hits\":{:.4},\"read_gb_per_s\":{:.2},\"checked\":true}}",
            format,
            store.gpu().map_or_else(String::new, |gpu| gpu.describe()),
            shape.experts,
            shape.choices,
            experts.bytes(0),
            rig.cache.slots(),
            1.0 / part as f64,
            1.0 / ran.seconds,
            ran.seconds * 1e3,
            ran.bytes,
            ran.hits,
            ran.bytes as f64 / ran.seconds / 1e9,
        );
    }
    Ok(())
}

/// Layers one after the other: gates, ups and downs of all experts of each.
fn placed(shape: ExpertShape, stored: StoredFormat, layers: u32) -> Result<Vec<Layer>> {
    let bytes = |rows: u32, columns: u32| {
        let row = stored.row_bytes(columns);
        let row = row
            .ok_or_else(|| Error::usage("a row that ends inside a block", "use multiples of 64"));
        Ok::<u64, Error>(row? * u64::from(rows) * u64::from(shape.experts))
    };
    let each = [
        bytes(shape.hidden, shape.width)?,
        bytes(shape.hidden, shape.width)?,
        bytes(shape.width, shape.hidden)?,
    ];
    let mut offset = 0;
    let mut next = |bytes: u64| {
        let placed = ExpertMatrices { offset, stored };
        offset += bytes;
        placed
    };
    Ok((0..layers).map(|_| each.map(&mut next)).collect())
}

fn fill(store: &Store, stored: StoredFormat, bytes: u64) -> Result<()> {
    let (_, block) = stored.block();
    let mut chunk = vec![0; CHUNK / block as usize * block as usize];
    let mut at = 0;
    while at < bytes {
        let count = (bytes - at).min(chunk.len() as u64) as usize;
        random_weights::fill(stored, at + 1, &mut chunk[..count]);
        store.write_at(at, &chunk[..count])?;
        at += count as u64;
    }
    Ok(())
}

/// Measurements of a cache's tokens: medians.
struct Ran {
    seconds: f64,
    bytes: u64,
    hits: f64,
}

struct Rig<'e> {
    experts: &'e ExpertLayers,
    cache: GpuExperts,
    stream: Stream,
    graph: CudaGraph,
    pending: Vec<PendingRows>,
    logits: DeviceMemory,
    _x: DeviceMemory,
    y: DeviceMemory,
    vector: Vec<f32>,
}

impl<'e> Rig<'e> {
    fn new(experts: &'e ExpertLayers, options: &CacheOptions) -> Result<Self> {
        let cache = GpuExperts::new(experts, options)?;
        let (shape, gpu) = (experts.shape(), cache.gpu());
        let floats = |count: u32| DeviceMemory::new(gpu, count as usize * 4);
        let stream = Stream::new(gpu)?;
        let (logits, x, y) = (
            floats(shape.experts * experts.layers())?,
            floats(shape.width)?,
            floats(shape.width)?,
        );
        let vector: Vec<f32> = (0..shape.width)
            .map(|at| noise(at.into()) * 2.0 - 1.0)
            .collect();
        x.upload(0, &bytes_of(&vector))?;
        let layer = |layer: u32, stream| {
            let step = ExpertStep {
                layer,
                tokens: 1,
                logits: logits.address() + u64::from(layer * shape.experts) * 4,
                given: None,
                x: x.address(),
                y: y.address(),
                adds: layer > 0,
                biases: [0; 3],
                probabilities: 0,
            };
            // SAFETY: the memory belongs to this rig, which waits for each launch.
            unsafe { cache.step(&step, stream) }
        };
        let capture = |stream| {
            (0..experts.layers())
                .map(|one| layer(one, stream))
                .collect()
        };
        let (graph, pending) = CudaGraph::capture(&stream, capture)?;
        Ok(Self {
            experts,
            cache,
            stream,
            graph,
            pending,
            logits,
            _x: x,
            y,
            vector,
        })
    }

    /// Returns logits with which some experts are chosen more often; each token's differ a little.
    fn logits(&self, token: u64) -> Vec<f32> {
        let of = |layer: u32, expert: u32| {
            let number = u64::from(layer * self.experts.shape().experts + expert);
            4.0 * noise(number << 20) + 4.0 * noise((token + 1) << 40 | number)
        };
        let experts = 0..self.experts.shape().experts;
        let layers = 0..self.experts.layers();
        layers
            .flat_map(|layer| experts.clone().map(move |expert| of(layer, expert)))
            .collect()
    }

    fn token(&self, token: u64) -> Result<f64> {
        self.logits.upload(0, &bytes_of(&self.logits(token)))?;
        let begin = Instant::now();
        self.graph.launch(&self.stream)?;
        self.stream.wait(LIMIT, || Ok(()))?;
        let took = begin.elapsed().as_secs_f64();
        self.pending.iter().try_for_each(|one| check(one.last()))?;
        Ok(took)
    }

    /// Runs `tokens` tokens. As many are run before and not measured, so that the cache is full.
    fn run(&self, tokens: u64) -> Result<Ran> {
        for token in 0..tokens {
            self.token(token)?;
        }
        let before = self.cache.counts()?;
        let seconds = (tokens..2 * tokens).map(|token| self.token(token));
        let seconds: Vec<f64> = seconds.collect::<Result<_>>()?;
        let after = self.cache.counts()?;
        self.check(2 * tokens - 1)?;
        let of = |count: fn(&ExpertCounts) -> u64| count(&after) - count(&before);
        let (hits, misses) = (of(|counts| counts.hits), of(|counts| counts.misses));
        Ok(Ran {
            seconds: median(&seconds),
            bytes: misses * self.experts.bytes(0) / tokens,
            hits: hits as f64 / (hits + misses) as f64,
        })
    }

    /// Compares the last token with the CPU's.
    fn check(&self, token: u64) -> Result<()> {
        let logits = self.logits(token);
        let experts = self.experts.shape().experts as usize;
        let mut expected = vec![0.0; self.vector.len()];
        for (layer, logits) in (0..).zip(logits.chunks(experts)) {
            let y = self.experts.compute(layer, logits, &self.vector, None)?;
            expected.iter_mut().zip(y).for_each(|(sum, y)| *sum += y);
        }
        let mut bytes = vec![0; self.y.len()];
        self.y.download(0, &mut bytes)?;
        let words = bytes.as_chunks::<4>().0.iter();
        let size = expected.iter().fold(0.0f32, |size, y| size.max(y.abs()));
        for (word, expected) in words.zip(&expected) {
            let found = f32::from_le_bytes(*word);
            if found.is_nan() || (found - expected).abs() > 1e-3 * size {
                return Err(Error::internal(format!(
                    "an element is {found}, not {expected}"
                )));
            }
        }
        Ok(())
    }
}

fn bytes_of(numbers: &[f32]) -> Vec<u8> {
    numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect()
}

/// Returns a number from 0 to 1.
fn noise(at: u64) -> f32 {
    (nvme_units::SplitMix::new(at).next_word() >> 40) as f32 / (1 << 24) as f32
}
