//! A job of attention over GPU memory, between guards, and what its results have to be.
// UNSAFETY: launches take addresses of vectors.
#![allow(unsafe_code)]

use super::{GUARD, POISON};
use crate::bench::Bench;
use crate::gather::{dice, text};
use crate::report::Outcome;
use nvme_compute_kernel::flash::reference::PartialResult;
use nvme_course::flash::{
    AttentionShape, AttentionStep, FlashAttention, FlashParameters, VectorLayout,
};
use nvme_formats::{bf16_of_f32, f16_of_f32, f32_of_bf16, f32_of_f16};
use nvme_host::cuda::DeviceMemory;

/// Vectors of random halves, and their values as numbers.
pub(super) struct Halves {
    pub(super) memory: DeviceMemory,
    pub(super) numbers: Vec<f32>,
}

impl Halves {
    pub(super) fn new(bench: &Bench, count: usize, is_bf16: bool, seed: u64) -> Outcome<Self> {
        let memory = DeviceMemory::new(&bench.gpu, count.max(8) * 2).map_err(text)?;
        let mut all = Self {
            memory,
            numbers: Vec::new(),
        };
        all.fill(count, is_bf16, seed)?;
        Ok(all)
    }

    pub(super) fn fill(&mut self, count: usize, is_bf16: bool, seed: u64) -> Outcome<()> {
        let mut throw = dice(seed);
        let halves: Vec<u16> = (0..count)
            .map(|_| narrow(throw(2001) as f32 / 1000.0 - 1.0, is_bf16))
            .collect();
        self.numbers = halves.iter().map(|half| widen(*half, is_bf16)).collect();
        self.put(&halves)
    }

    pub(super) fn put(&self, halves: &[u16]) -> Outcome<()> {
        let bytes: Vec<u8> = halves.iter().flat_map(|half| half.to_le_bytes()).collect();
        self.memory.upload(0, &bytes).map_err(text)
    }
}

fn narrow(value: f32, is_bf16: bool) -> u16 {
    match is_bf16 {
        true => bf16_of_f32(value),
        false => f16_of_f32(value),
    }
}

fn widen(half: u16, is_bf16: bool) -> f32 {
    match is_bf16 {
        true => f32_of_bf16(half),
        false => f32_of_f16(half),
    }
}

/// A job with its memory.
pub(super) struct Case {
    pub(super) shape: AttentionShape,
    pub(super) is_bf16: bool,
    /// Heads of a token follow on each other, rather than tokens of a head.
    pub(super) by_token: bool,
    pub(super) counts: Option<Vec<u32>>,
    pub(super) queries: Halves,
    pub(super) keys: Halves,
    pub(super) values: Halves,
    pub(super) y: DeviceMemory,
    pub(super) of_counts: DeviceMemory,
    pub(super) workspace: DeviceMemory,
    pub(super) job: FlashParameters,
}

impl Case {
    pub(super) fn new(
        bench: &Bench,
        attention: &FlashAttention,
        rung: AttentionStep,
        (shape, is_bf16, by_token): (AttentionShape, bool, bool),
        counts: Option<Vec<u32>>,
        seed: u64,
    ) -> Outcome<Self> {
        let (of_queries, of_keys) = shape.elements();
        let halves = |count, kind| Halves::new(bench, count, is_bf16, seed * 4 + kind);
        let memory = |bytes: usize| DeviceMemory::new(&bench.gpu, bytes.max(16)).map_err(text);
        let (queries, keys, values) = (
            halves(of_queries, 1)?,
            halves(of_keys, 2)?,
            halves(of_keys, 3)?,
        );
        let y = memory(of_queries * 2 + 2 * GUARD)?;
        let of_counts = memory(shape.sequences as usize * 4)?;
        let addresses = [&queries.memory, &keys.memory, &values.memory].map(DeviceMemory::address);
        let [q, k, v] = addresses;
        let mut job = shape.job(is_bf16, [q, k, v, y.address() + GUARD as u64]);
        if by_token {
            let each = u64::from(shape.head_elements);
            let strides = |vectors: &mut VectorLayout, heads: u32, tokens: u32| {
                vectors.head = each;
                vectors.token = each * u64::from(heads);
                vectors.sequence = each * u64::from(heads) * u64::from(tokens);
            };
            strides(&mut job.queries, shape.heads, shape.query_tokens);
            strides(&mut job.y, shape.heads, shape.query_tokens);
            strides(&mut job.keys, shape.kv_heads, shape.key_tokens);
            strides(&mut job.values, shape.kv_heads, shape.key_tokens);
        }
        if let Some(counts) = &counts {
            let bytes: Vec<u8> = counts
                .iter()
                .flat_map(|count| count.to_le_bytes())
                .collect();
            of_counts.upload(0, &bytes).map_err(text)?;
            job.counts = of_counts.address();
        }
        let workspace = memory(attention.workspace_bytes(rung, &job) as usize)?;
        workspace.fill(POISON).map_err(text)?;
        job.workspace = workspace.address();
        let case = Self {
            shape,
            is_bf16,
            by_token,
            counts,
            queries,
            keys,
            values,
            y,
            of_counts,
            workspace,
            job,
        };
        case.spoil()?;
        Ok(case)
    }

    /// Sets keys and values that do not count to NaN, so that a kernel that uses one is found.
    pub(super) fn spoil(&self) -> Outcome<()> {
        for halves in [&self.keys, &self.values] {
            let mut all: Vec<u16> = halves
                .numbers
                .iter()
                .map(|number| narrow(*number, self.is_bf16))
                .collect();
            for sequence in 0..self.shape.sequences {
                for head in 0..self.shape.kv_heads {
                    for token in self.there(sequence)..self.shape.key_tokens {
                        let first = self.key_at(sequence, head, token);
                        all[first..first + self.shape.head_elements as usize].fill(0x7FFF);
                    }
                }
            }
            halves.put(&all)?;
        }
        Ok(())
    }

    pub(super) fn there(&self, sequence: u32) -> u32 {
        let all = self.shape.key_tokens;
        self.counts
            .as_ref()
            .map_or(all, |counts| counts[sequence as usize].min(all))
    }

    /// Returns the first element of a key.
    pub(super) fn key_at(&self, sequence: u32, head: u32, token: u32) -> usize {
        (self.job.keys.at(sequence, head, token) - self.job.keys.address) as usize / 2
    }

    pub(super) fn start(
        &self,
        attention: &FlashAttention,
        rung: AttentionStep,
        stream: u64,
    ) -> nvme_host::Result<()> {
        // SAFETY: the vectors outlive the launch, which is waited for.
        unsafe { attention.attend(rung, &self.job, stream) }
    }

    pub(super) fn poison(&self) -> Outcome<()> {
        self.y.fill(POISON).map_err(text)
    }

    pub(super) fn bytes(&self) -> Outcome<Vec<u8>> {
        let mut bytes = vec![0; self.y.len()];
        self.y.download(0, &mut bytes).map_err(text)?;
        Ok(bytes)
    }

    /// Runs the rung once and checks every element and guard; returns the largest error.
    pub(super) fn run(
        &self,
        bench: &Bench,
        attention: &FlashAttention,
        rung: AttentionStep,
    ) -> Outcome<f64> {
        self.poison()?;
        self.start(attention, rung, bench.stream.handle())
            .map_err(text)?;
        bench.wait();
        self.check(rung)
    }

    pub(super) fn check(&self, rung: AttentionStep) -> Outcome<f64> {
        let bytes = self.bytes()?;
        let results = self.shape.elements().0 * 2;
        let (before, rest) = bytes.split_at(GUARD);
        let (y, after) = rest.split_at(results);
        if before
            .iter()
            .chain(&after[..GUARD])
            .any(|byte| *byte != POISON)
        {
            return Err(format!(
                "{rung:?}, {:?}: something beside the results was written",
                self.shape
            ));
        }
        let y = y.as_chunks::<2>().0;
        // Values are at most 1, shares are rounded to halves, and so is the result.
        let tolerance = if self.is_bf16 {
            1.0 / 128.0
        } else {
            1.0 / 1024.0
        };
        let mut worst = 0.0f64;
        for sequence in 0..self.shape.sequences {
            for head in 0..self.shape.heads {
                for token in 0..self.shape.query_tokens {
                    let wanted = self.wanted(sequence, head, token);
                    let at =
                        (self.job.y.at(sequence, head, token) - self.job.y.address) as usize / 2;
                    for (element, wanted) in wanted.iter().enumerate() {
                        let half = u16::from_le_bytes(y[at + element]);
                        let found = widen(half, self.is_bf16);
                        let apart = (f64::from(found) - wanted).abs();
                        if apart > tolerance || found.is_nan() {
                            return Err(format!(
                                "{rung:?}, {:?}, by token {}, counts {:?}: sequence {sequence}, head {head}, query \
                                 {token}, element {element} is {found}, not {wanted}",
                                self.shape, self.by_token, self.counts
                            ));
                        }
                        worst = worst.max(apart);
                    }
                }
            }
        }
        Ok(worst)
    }

    pub(super) fn wanted(&self, sequence: u32, head: u32, token: u32) -> Vec<f64> {
        let shape = &self.shape;
        let each = shape.head_elements as usize;
        let at =
            (self.job.queries.at(sequence, head, token) - self.job.queries.address) as usize / 2;
        let query = &self.queries.numbers[at..at + each];
        let seen = match shape.causal {
            true => {
                i64::from(self.there(sequence)) - i64::from(shape.query_tokens)
                    + i64::from(token)
                    + 1
            }
            false => self.there(sequence).into(),
        };
        let of_head = head / (shape.heads / shape.kv_heads);
        let gathered = |halves: &Halves| -> Vec<f32> {
            let tokens = (0..seen.max(0) as u32).map(|token| self.key_at(sequence, of_head, token));
            tokens
                .flat_map(|first| halves.numbers[first..first + each].to_vec())
                .collect()
        };
        PartialResult::of(
            query,
            &gathered(&self.keys),
            &gathered(&self.values),
            shape.scale,
        )
        .result()
    }
}
