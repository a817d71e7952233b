//! A long prompt through whole layers: two caches of a layer each, one of which is read while the other is used.
// UNSAFETY: launches over this program's own memory.
#![allow(unsafe_code)]

use super::{LIMIT, bytes_of, noise};
use nvme_host::bench::median;
use nvme_host::cuda::{DeviceMemory, PendingRows, Stream};
use nvme_host::{Error, Result};
use nvme_models::experts::{
    CacheOptions, ExpertLayers, ExpertStep, GpuExperts, ReplacementPolicy, check,
};
use std::time::Instant;

/// Times that a prompt is measured.
const ROUNDS: usize = 5;

/// Prints the line of a prompt of `tokens` tokens.
pub fn run(experts: &ExpertLayers, (device, format): (&str, &str), tokens: u32) -> Result<()> {
    if experts.layers() < 4 {
        return Err(Error::usage(
            "two caches hold the experts of less than four layers from one round to the next",
            "use four layers or more",
        ));
    }
    let rig = PromptRig::new(experts, tokens)?;
    let rounds = |computes| -> Result<f64> {
        // One round more, which is not measured.
        let seconds = (0..=ROUNDS).map(|_| rig.round(computes));
        let seconds: Vec<f64> = seconds.collect::<Result<_>>()?;
        Ok(median(&seconds[1..]))
    };
    let (reads, both) = (rounds(false)?, rounds(true)?);
    rig.check()?;
    let shape = experts.shape();
    let bytes: u64 = (0..experts.layers())
        .map(|layer| experts.bytes(layer) * u64::from(shape.experts))
        .sum();
    println!(
        "{{\"device\":\"{device}\",\"format\":\"{format}\",\"gpu\":\"{}\",\"layers\":{},\"experts\":{},\"choices\":{},\
         \"expert_bytes\":{},\"prompt\":{tokens},\"seconds\":{both:.4},\"tokens_per_s\":{:.1},\"bytes\":{bytes},\
         \"read_seconds\":{reads:.4},\"read_gb_per_s\":{:.2},\"of_link\":{:.4},\"checked\":true}}",
        rig.caches[0].gpu().describe(),
        experts.layers(),
        shape.experts,
        shape.choices,
        experts.bytes(0),
        f64::from(tokens) / both,
        bytes as f64 / reads / 1e9,
        reads / both,
    );
    Ok(())
}

struct PromptRig<'e> {
    experts: &'e ExpertLayers,
    caches: [GpuExperts; 2],
    loads: Stream,
    steps: Stream,
    tokens: u32,
    logits: DeviceMemory,
    x: DeviceMemory,
    y: DeviceMemory,
    vectors: Vec<f32>,
    of_logits: Vec<f32>,
}

impl<'e> PromptRig<'e> {
    fn new(experts: &'e ExpertLayers, tokens: u32) -> Result<Self> {
        let shape = experts.shape();
        let options = CacheOptions {
            bytes: experts.slot_bytes() * u64::from(shape.experts),
            policy: ReplacementPolicy::Lru,
            pinned: Vec::new(),
            tokens,
            limit: LIMIT,
        };
        let caches = [
            GpuExperts::new(experts, &options)?,
            GpuExperts::new(experts, &options)?,
        ];
        let gpu = caches[0].gpu();
        let numbers = |count: u64, scale: f32, seed: u64| -> Vec<f32> {
            (0..count)
                .map(|at| (noise(seed << 48 | at) - 0.5) * scale)
                .collect()
        };
        let of_tokens = |each: u32| u64::from(tokens) * u64::from(each);
        let vectors = numbers(of_tokens(shape.width), 2.0, 1);
        let of_logits = numbers(of_tokens(shape.experts), 8.0, 2);
        let floats = |count: usize| DeviceMemory::new(gpu, count * 4);
        let (logits, x) = (floats(of_logits.len())?, floats(vectors.len())?);
        logits.upload(0, &bytes_of(&of_logits))?;
        x.upload(0, &bytes_of(&vectors))?;
        Ok(Self {
            experts,
            // The products fill the GPU: reads would begin only when the blocks of a product have begun.
            loads: Stream::urgent(gpu)?,
            steps: Stream::new(gpu)?,
            tokens,
            logits,
            x,
            y: floats(vectors.len())?,
            caches,
            vectors,
            of_logits,
        })
    }

    /// Reads all layers, and computes each if `computes` is set. Returns the seconds.
    fn round(&self, computes: bool) -> Result<f64> {
        let (loads, steps) = (self.loads.handle(), self.steps.handle());
        let gpu = self.caches[0].gpu();
        let begin = Instant::now();
        let mut pending = Vec::<PendingRows>::new();
        for layer in 0..self.experts.layers() {
            let cache = &self.caches[layer as usize % 2];
            // SAFETY: the load comes after the step that used the cache, two layers before.
            pending.push(unsafe { cache.load_layer(layer, loads)? });
            if !computes {
                continue;
            }
            gpu.order(loads, steps)?;
            let step = ExpertStep {
                layer,
                tokens: self.tokens,
                logits: self.logits.address(),
                given: None,
                x: self.x.address(),
                y: self.y.address(),
                adds: layer > 0,
                biases: [0; 3],
                probabilities: 0,
            };
            // The next load is of the other cache, whose step is the one before this.
            gpu.order(steps, loads)?;
            // SAFETY: the memory belongs to this rig, which waits for each round.
            pending.push(unsafe { cache.step(&step, steps)? });
        }
        for one in pending {
            check(one.wait(LIMIT)?)?;
        }
        self.steps.wait(LIMIT, || Ok(()))?;
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Compares the last token with the CPU's, and counts tokens without a number.
    fn check(&self) -> Result<()> {
        let shape = self.experts.shape();
        let (width, count) = (shape.width as usize, shape.experts as usize);
        let mut bytes = vec![0; self.y.len()];
        self.y.download(0, &mut bytes)?;
        let words = bytes.as_chunks::<4>().0.iter();
        let found: Vec<f32> = words.map(|word| f32::from_le_bytes(*word)).collect();
        let x = &self.vectors[self.vectors.len() - width..];
        let logits = &self.of_logits[self.of_logits.len() - count..];
        let mut expected = vec![0.0; width];
        for layer in 0..self.experts.layers() {
            let y = self.experts.compute(layer, logits, x, None)?;
            expected.iter_mut().zip(y).for_each(|(sum, y)| *sum += y);
        }
        let size = expected.iter().fold(0.0f32, |size, y| size.max(y.abs()));
        let last = &found[found.len() - width..];
        let is_near = |(found, expected): (&f32, &f32)| (found - expected).abs() <= 1e-3 * size;
        match found.iter().any(|y| y.is_nan()) || !last.iter().zip(&expected).all(is_near) {
            true => Err(Error::internal("the results are not those of the CPU")),
            false => Ok(()),
        }
    }
}
