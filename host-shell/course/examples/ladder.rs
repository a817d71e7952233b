//! The rungs of attention and of linear layers, measured on a GPU in turns.
//!
//! ```sh
//! cargo run --release -p nvme-course --example ladder -- attention [SEQUENCES HEADS KV_HEADS QUERIES KEYS ELEMENTS CAUSAL]
//! cargo run --release -p nvme-course --example ladder -- linear [TOKENS INPUTS OUTPUTS]
//! ```
//!
//! Without numbers: 4 sequences of 16 heads over 16, 4,096 queries and keys of 128 elements, CAUSAL 1, bf16; a layer of
//! 4,096 x 4,096 x 4,096 with GELU and its gradients. Numbers are random; results of each rung are compared with those
//! of the first one. Rungs whose scores would take more than 8 GiB are left out.
//!
//! It prints one JSON object: for each rung the median of 5 runs, in seconds, operations a second, and bytes a second
//! if operands and results are moved once; beside it the rate of a copy within the GPU's memory, in bytes read and
//! written.
// UNSAFETY: launches over this program's own memory.
#![allow(unsafe_code)]

#[path = "../../compute/examples/arguments/mod.rs"]
mod arguments;

use arguments::Arguments;
use nvme_course::flash::{AttentionShape, AttentionStep, FlashAttention, FlashParameters};
use nvme_course::linear::{
    ActivationKind, BackwardParameters, BackwardRung, ForwardParameters, ForwardRung, LinearKernels,
};
use nvme_host::bench::median;
use nvme_host::cuda::{DeviceMemory, Gpu, Stream, StreamEvent};
use nvme_host::{Error, Result};
use std::sync::Arc;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
const RUNS: usize = 5;
/// Bytes of scores at most.
const MOST_SCORES: u64 = 8 << 30;
/// Bytes that are copied for the rate of memory.
const COPIED: usize = 1 << 30;

fn main() -> std::process::ExitCode {
    arguments::end(run)
}

fn run(words: &Arguments) -> Result<()> {
    let ground = Ground::new()?;
    let copy = ground.copy_rate()?;
    let (what, lines) = match words.first() {
        Some("attention") => {
            let shape = AttentionShape {
                sequences: words.number(1, 4)?,
                heads: words.number(2, 16)?,
                kv_heads: words.number(3, 16)?,
                query_tokens: words.number(4, 4096)?,
                key_tokens: words.number(5, 4096)?,
                head_elements: words.number(6, 128)?,
                causal: words.number(7, 1)? != 0,
                scale: 1.0 / (words.number(6, 128)? as f32).sqrt(),
            };
            (format!("{shape:?}"), attention(&ground, shape)?)
        }
        Some("linear") => {
            let shape = [
                words.number(1, 4096)?,
                words.number(2, 4096)?,
                words.number(3, 4096)?,
            ];
            (format!("{shape:?}"), linear(&ground, shape)?)
        }
        _ => {
            return Err(Error::usage(
                "neither attention nor linear",
                "name one of them, and its sizes",
            ));
        }
    };
    println!(
        "{{\"gpu\":\"{}\",\"shape\":\"{what}\",\"copy_bytes_per_second\":{copy:.4e},\"rungs\":[{}]}}",
        ground.gpu.describe(),
        lines.join(",")
    );
    Ok(())
}

struct Ground {
    gpu: Arc<Gpu>,
    stream: Stream,
}

/// A measured rung: its name, and one run of it.
struct Work<'a> {
    name: String,
    run: Box<dyn Fn() -> Result<()> + 'a>,
    seconds: Vec<f64>,
}

impl Ground {
    fn new() -> Result<Self> {
        let gpu = Gpu::open(0)?;
        Ok(Self {
            stream: Stream::new(&gpu)?,
            gpu,
        })
    }

    fn empty(&self, bytes: u64) -> Result<DeviceMemory> {
        DeviceMemory::new(&self.gpu, bytes.max(16) as usize)
    }

    /// Returns random numbers between -`size` and `size`, as the upper half of an `f32` or whole.
    fn random(&self, count: u64, seed: u64, size: f32, is_half: bool) -> Result<DeviceMemory> {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut bytes = Vec::with_capacity(count as usize * 4);
        for _ in 0..count {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let value = ((state >> 40) as f32 / (1u32 << 23) as f32 - 1.0) * size;
            let word = value.to_le_bytes();
            bytes.extend_from_slice(if is_half { &word[2..] } else { &word });
        }
        let memory = self.empty(bytes.len() as u64)?;
        memory.upload(0, &bytes)?;
        Ok(memory)
    }

    /// Seconds of one run.
    fn timed(&self, run: &dyn Fn() -> Result<()>) -> Result<f64> {
        let begin = StreamEvent::record(&self.stream)?;
        run()?;
        let end = StreamEvent::record(&self.stream)?;
        self.stream.wait(LIMIT, || Ok(()))?;
        end.seconds_since(&begin)
    }

    /// Medians of runs in turns, after one of each that does not count. Short ones are repeated within a run.
    fn medians(&self, works: &mut [Work<'_>]) -> Result<()> {
        let mut repeats = Vec::new();
        for work in works.iter() {
            self.timed(&work.run)?;
            let seconds = self.timed(&work.run)?;
            repeats.push(((0.005 / seconds.max(1e-7)) as usize).clamp(1, 100));
        }
        for _ in 0..RUNS {
            for (work, repeats) in works.iter_mut().zip(&repeats) {
                let run = || (0..*repeats).try_for_each(|_| (work.run)());
                let seconds = self.timed(&run)?;
                work.seconds.push(seconds / *repeats as f64);
            }
        }
        Ok(())
    }

    fn copy_rate(&self) -> Result<f64> {
        let (from, to) = (self.empty(COPIED as u64)?, self.empty(COPIED as u64)?);
        from.zero()?;
        let copy = || {
            // SAFETY: source and destination have that many bytes and outlive the copy, which is waited for.
            unsafe {
                self.stream
                    .copy_within(to.address(), from.address(), COPIED)
            }
        };
        let mut works = [Work {
            name: String::new(),
            run: Box::new(copy),
            seconds: Vec::new(),
        }];
        self.medians(&mut works)?;
        Ok(2.0 * COPIED as f64 / median(&works[0].seconds))
    }
}

/// Formats the line of a rung from the operations and bytes of one run.
fn line(work: &Work<'_>, operations: f64, bytes: f64) -> String {
    let seconds = median(&work.seconds);
    format!(
        "{{\"rung\":\"{}\",\"seconds\":{seconds:.4e},\"operations_per_second\":{:.4e},\"bytes_per_second\":{:.4e}}}",
        work.name,
        operations / seconds,
        bytes / seconds
    )
}

/// Returns every `step`th number of `memory`.
fn sampled(memory: &DeviceMemory, is_half: bool) -> Result<Vec<f32>> {
    let mut bytes = vec![0; memory.len()];
    memory.download(0, &mut bytes)?;
    Ok(match is_half {
        true => {
            let halves = bytes.as_chunks::<2>().0.iter().step_by(97);
            halves
                .map(|half| f32::from_le_bytes([0, 0, half[0], half[1]]))
                .collect()
        }
        false => {
            let words = bytes.as_chunks::<4>().0.iter().step_by(97);
            words.map(|word| f32::from_le_bytes(*word)).collect()
        }
    })
}

/// Checks that two rungs have about the same results.
fn compare(
    name: &str,
    first: &mut Option<Vec<f32>>,
    found: Vec<f32>,
    tolerance: f32,
) -> Result<()> {
    let Some(first) = first else {
        *first = Some(found);
        return Ok(());
    };
    let differ = |(a, b): &(&f32, &f32)| (**a - **b).abs() > tolerance || a.is_nan() != b.is_nan();
    match first.iter().zip(&found).find(differ) {
        None => Ok(()),
        Some((wanted, found)) => Err(Error::internal(format!("{name}: {found}, not {wanted}"))),
    }
}

fn attention(ground: &Ground, shape: AttentionShape) -> Result<Vec<String>> {
    let attention = FlashAttention::load(&ground.gpu)?;
    let (of_queries, of_keys) = shape.elements();
    let random = |count, seed| ground.random(count, seed, 1.0, true);
    let (queries, keys) = (random(of_queries as u64, 1)?, random(of_keys as u64, 2)?);
    let (values, y) = (
        random(of_keys as u64, 3)?,
        ground.empty(of_queries as u64 * 2)?,
    );
    let job = shape.job(
        true,
        [&queries, &keys, &values, &y].map(DeviceMemory::address),
    );
    let needed = |rung| attention.workspace_bytes(rung, &job);
    let rungs: Vec<AttentionStep> = AttentionStep::ALL
        .into_iter()
        .filter(|rung| needed(*rung) <= MOST_SCORES)
        .collect();
    let most = rungs.iter().map(|rung| needed(*rung)).max().unwrap_or(0);
    let workspace = ground.empty(most)?;
    let job = FlashParameters {
        workspace: workspace.address(),
        ..job
    };
    let mut first = None;
    let mut works = Vec::new();
    for rung in rungs {
        let attend = |rung| {
            // SAFETY: the vectors outlive the launch, which is waited for.
            unsafe { attention.attend(rung, &job, ground.stream.handle()) }
        };
        y.fill(0xFF)?;
        attend(rung)?;
        ground.stream.wait(LIMIT, || Ok(()))?;
        compare(
            &format!("{rung:?}"),
            &mut first,
            sampled(&y, true)?,
            1.0 / 64.0,
        )?;
        works.push(Work {
            name: format!("{rung:?}"),
            run: Box::new(move || attend(rung)),
            seconds: Vec::new(),
        });
    }
    ground.medians(&mut works)?;
    let seen: f64 = (0..shape.query_tokens)
        .map(|token| f64::from(job.limit(token, shape.key_tokens)))
        .sum();
    let heads = f64::from(shape.sequences) * f64::from(shape.heads);
    let operations = 4.0 * heads * seen * f64::from(shape.head_elements);
    let bytes = 4.0 * (of_queries + of_keys) as f64;
    Ok(works
        .iter()
        .map(|work| line(work, operations, bytes))
        .collect())
}

fn linear(ground: &Ground, [tokens, inputs, outputs]: [u32; 3]) -> Result<Vec<String>> {
    let linear = LinearKernels::load(&ground.gpu)?;
    let count = |rows: u32, columns: u32| u64::from(rows) * u64::from(columns);
    let (of_x, of_weights, of_y) = (
        count(tokens, inputs),
        count(outputs, inputs),
        count(tokens, outputs),
    );
    let size = 1.0 / (inputs.max(1) as f32).sqrt();
    let random = |count, seed, size, is_half| ground.random(count, seed, size, is_half);
    let (x, weights) = (
        random(of_x, 1, 1.0, false)?,
        random(of_weights, 2, size, false)?,
    );
    let (half_x, half_weights) = (
        random(of_x, 1, 1.0, true)?,
        random(of_weights, 2, size, true)?,
    );
    let (bias, half_bias) = (
        random(outputs.into(), 3, 1.0, false)?,
        random(outputs.into(), 3, 1.0, true)?,
    );
    let dy = random(of_y, 4, 1.0, false)?;
    let room = |count: u64| ground.empty(count * 4);
    let (y, sums, dsums) = (room(of_y)?, room(of_y)?, room(of_y)?);
    let (dx, dweights, dbias) = (room(of_x)?, room(of_weights)?, room(outputs.into())?);
    let activation = ActivationKind::Gelu as u32;
    let forward = |rung: ForwardRung, sums: u64| {
        let of = |whole: &DeviceMemory, half: &DeviceMemory| match rung.is_mixed() {
            true => half.address(),
            false => whole.address(),
        };
        let (x, weights, bias) = (
            of(&x, &half_x),
            of(&weights, &half_weights),
            of(&bias, &half_bias),
        );
        let y = y.address();
        let job = ForwardParameters {
            x,
            weights,
            bias,
            y,
            sums,
            tokens,
            inputs,
            outputs,
            activation,
        };
        // SAFETY: the matrices outlive the launch, which is waited for.
        unsafe { linear.forward(rung, &job, ground.stream.handle()) }
    };
    let backward = |rung| {
        let job = BackwardParameters {
            x: x.address(),
            weights: weights.address(),
            sums: sums.address(),
            dy: dy.address(),
            dsums: dsums.address(),
            dx: dx.address(),
            dweights: dweights.address(),
            dbias: dbias.address(),
            tokens,
            inputs,
            outputs,
            activation,
        };
        // SAFETY: as above.
        unsafe { linear.backward(rung, &job, ground.stream.handle()) }
    };
    forward(ForwardRung::Fused, sums.address())?;
    let (mut works, mut first) = (Vec::new(), None);
    for rung in ForwardRung::ALL
        .into_iter()
        .filter(|rung| *rung != ForwardRung::MixedF16)
    {
        y.fill(0xFF)?;
        forward(rung, 0)?;
        ground.stream.wait(LIMIT, || Ok(()))?;
        if !rung.is_mixed() {
            compare(&format!("{rung:?}"), &mut first, sampled(&y, false)?, 1e-4)?;
        }
        works.push(Work {
            name: format!("{rung:?}"),
            run: Box::new(move || forward(rung, 0)),
            seconds: Vec::new(),
        });
    }
    let forwards = works.len();
    first = None;
    for rung in BackwardRung::ALL {
        dweights.fill(0xFF)?;
        backward(rung)?;
        ground.stream.wait(LIMIT, || Ok(()))?;
        let tolerance = 1e-5 * tokens as f32;
        compare(
            &format!("{rung:?}"),
            &mut first,
            sampled(&dweights, false)?,
            tolerance,
        )?;
        works.push(Work {
            name: format!("Backward{rung:?}"),
            run: Box::new(move || backward(rung)),
            seconds: Vec::new(),
        });
    }
    ground.medians(&mut works)?;
    let operations = 2.0 * of_x as f64 * f64::from(outputs);
    let bytes = 4.0 * (of_x + of_weights + of_y) as f64;
    let lines = works
        .iter()
        .enumerate()
        .map(|(at, work)| match at < forwards {
            true => line(
                work,
                operations,
                if work.name.starts_with("Mixed") {
                    bytes / 2.0
                } else {
                    bytes
                },
            ),
            false => line(work, 2.0 * operations, 2.0 * bytes),
        });
    Ok(lines.collect())
}
