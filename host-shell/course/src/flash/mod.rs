//! Attention over keys and values in memory (FlashAttention): kernels of a GPU, each one step further optimised
//! than the one before, and the same result by threads of the CPU. Keys and values on a drive are the subject of
//! `paged`; here everything is in memory already.

#[cfg(feature = "cuda")]
mod gpu;

#[cfg(feature = "cuda")]
pub use gpu::{AttentionStep, FlashAttention};
pub use nvme_compute_kernel::flash::{FlashParameters, VectorLayout};

use nvme_compute_kernel::flash::MOST_ELEMENTS;
use nvme_host::{Error, Result};
use rayon::prelude::*;

/// Number of queries, and of keys, in one tile of a CPU thread: a tile stays in the cache.
const QUERIES: usize = 16;
const KEYS: usize = 64;

/// Attention of vectors that lie one after another: sequence by sequence, head by head, token by token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Number of sequences.
    pub sequences: u32,
    /// Heads of queries.
    pub heads: u32,
    /// Heads of keys and values: `heads` is a multiple.
    pub kv_heads: u32,
    /// Queries of a head.
    pub query_tokens: u32,
    /// Keys of a head.
    pub key_tokens: u32,
    /// Elements of a head, a multiple of 8, at most 128.
    pub head_elements: u32,
    /// Causal mask: the last query attends to all keys, and each query before it to one key less. Without it all
    /// queries attend to all keys.
    pub causal: bool,
    /// Scale of the products of queries and keys, above 0.
    pub scale: f32,
}

impl AttentionShape {
    /// Returns the job for [`FlashAttention::attend`], with vectors of halves at these addresses.
    pub fn job(&self, is_bf16: bool, [queries, keys, values, y]: [u64; 4]) -> FlashParameters {
        let each = u64::from(self.head_elements);
        let vectors = |address, heads: u32, tokens: u32| VectorLayout {
            address,
            sequence: u64::from(heads) * u64::from(tokens) * each,
            head: u64::from(tokens) * each,
            token: each,
        };
        FlashParameters {
            queries: vectors(queries, self.heads, self.query_tokens),
            keys: vectors(keys, self.kv_heads, self.key_tokens),
            values: vectors(values, self.kv_heads, self.key_tokens),
            y: vectors(y, self.heads, self.query_tokens),
            counts: 0,
            workspace: 0,
            sequences: self.sequences,
            heads: self.heads,
            kv_heads: self.kv_heads,
            query_tokens: self.query_tokens,
            key_tokens: self.key_tokens,
            head_elements: self.head_elements,
            causal: u32::from(self.causal),
            is_bf16: u32::from(is_bf16),
            splits: 1,
            scale: self.scale,
        }
    }

    /// Returns the elements of all queries, and of all keys.
    pub fn elements(&self) -> (usize, usize) {
        let each = self.sequences as usize * self.head_elements as usize;
        let of = |heads: u32, tokens: u32| each * heads as usize * tokens as usize;
        (
            of(self.heads, self.query_tokens),
            of(self.kv_heads, self.key_tokens),
        )
    }

    /// Computes the same by threads of the CPU, over `f32`. `counts` has the number of keys of each sequence; without
    /// it all keys count.
    ///
    /// # Errors
    /// [`Error::Usage`] for an impossible shape, vectors of another length, and a count above `key_tokens`.
    pub fn attend(
        &self,
        queries: &[f32],
        keys: &[f32],
        values: &[f32],
        counts: Option<&[u32]>,
    ) -> Result<Vec<f32>> {
        let job = self.job(true, [0; 4]);
        check(&job)?;
        let (of_queries, of_keys) = self.elements();
        let lengths = [queries.len(), keys.len(), values.len()];
        let of_counts = counts.map_or(self.sequences as usize, <[u32]>::len);
        if lengths != [of_queries, of_keys, of_keys] || of_counts != self.sequences as usize {
            return Err(Error::usage(
                format!(
                    "queries, keys and values have {}, {} and {} numbers, with {of_counts} counts",
                    lengths[0], lengths[1], lengths[2]
                ),
                format!(
                    "use {of_queries}, {of_keys} and {of_keys}, and {}",
                    self.sequences
                ),
            ));
        }
        let too_large = |count: &u32| *count > self.key_tokens;
        if let Some(sequence) = counts.and_then(|counts| counts.iter().position(too_large)) {
            return Err(Error::usage(
                format!(
                    "the count of sequence {sequence} is {}, more than its {} keys",
                    counts.map_or(0, |counts| counts[sequence]),
                    self.key_tokens
                ),
                format!("use 0 to {}", self.key_tokens),
            ));
        }
        let each = self.head_elements as usize;
        let mut y = vec![0.0; of_queries];
        let of_head = (self.query_tokens as usize * each).max(1);
        y.par_chunks_mut(of_head).enumerate().for_each(|(head, y)| {
            let (sequence, head) = (head / self.heads as usize, head as u32 % self.heads);
            let there = counts.map_or(self.key_tokens, |counts| counts[sequence]);
            let kv_head = sequence * self.kv_heads as usize + job.kv_head(head) as usize;
            let first = kv_head * self.key_tokens as usize * each;
            let all = first..first + there as usize * each;
            let of_head = (sequence * self.heads as usize + head as usize) * of_head;
            let queries = &queries[of_head..of_head + y.len()];
            let blocks = y
                .par_chunks_mut(QUERIES * each)
                .zip(queries.par_chunks(QUERIES * each));
            blocks.enumerate().for_each(|(block, (y, queries))| {
                let limit = |row: usize| job.limit((block * QUERIES + row) as u32, there) as usize;
                let (keys, values) = (&keys[all.clone()], &values[all.clone()]);
                some(queries, keys, values, (each, self.scale), limit, y);
            });
        });
        Ok(y)
    }
}

/// Computes a tile of queries over all keys of their head, one tile of keys after another: the sums are
/// rescaled when a larger score appears.
fn some(
    queries: &[f32],
    keys: &[f32],
    values: &[f32],
    (each, scale): (usize, f32),
    limit: impl Fn(usize) -> usize,
    y: &mut [f32],
) {
    let rows = queries.len() / each;
    let mut softmax = vec![(f32::NEG_INFINITY, 0.0f32); rows];
    let tiles = keys.chunks(KEYS * each).zip(values.chunks(KEYS * each));
    for (tile, (keys, values)) in tiles.enumerate() {
        let rows = queries
            .chunks_exact(each)
            .zip(y.chunks_exact_mut(each))
            .zip(&mut softmax);
        for (row, ((query, y), (largest, total))) in rows.enumerate() {
            let count = limit(row)
                .saturating_sub(tile * KEYS)
                .min(keys.len() / each);
            let mut scores = [0.0f32; KEYS];
            let mut next = *largest;
            for (score, key) in scores[..count].iter_mut().zip(keys.chunks_exact(each)) {
                *score = dot(query, key) * scale;
                next = next.max(*score);
            }
            if count == 0 {
                continue;
            }
            let before = (*largest - next).exp();
            if before != 1.0 {
                y.iter_mut().for_each(|y| *y *= before);
                *total *= before;
            }
            *largest = next;
            for (score, value) in scores[..count].iter().zip(values.chunks_exact(each)) {
                let share = (score - next).exp();
                *total += share;
                for (y, value) in y.iter_mut().zip(value) {
                    *y += share * value;
                }
            }
        }
    }
    for (y, (_, total)) in y.chunks_exact_mut(each).zip(softmax) {
        if total != 0.0 {
            y.iter_mut().for_each(|y| *y /= total);
        }
    }
}

/// Computes a dot product in eight partial sums, which a CPU adds with one vector instruction. The
/// elements of a head are a multiple of 8.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    for (a, b) in a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum()
}

/// Checks the conditions that all implementations share.
fn check(job: &FlashParameters) -> Result<()> {
    if job.heads == 0 || job.kv_heads == 0 || !job.heads.is_multiple_of(job.kv_heads) {
        return Err(Error::usage(
            format!(
                "the number of query heads, {}, is not a multiple of {}, the number of key heads",
                job.heads, job.kv_heads
            ),
            "use a multiple, and one head of each at least",
        ));
    }
    let elements = job.head_elements;
    if elements == 0 || elements > MOST_ELEMENTS || !elements.is_multiple_of(8) {
        return Err(Error::usage(
            format!("{elements} is no possible number of elements of a head"),
            format!("use a multiple of 8, at most {MOST_ELEMENTS}"),
        ));
    }
    if !job.scale.is_finite() || job.scale <= 0.0 {
        return Err(Error::usage(
            format!(
                "the scale {} of the products is not a positive number",
                job.scale
            ),
            "use a positive scale: usually 1 / sqrt(elements of a head)",
        ));
    }
    let rows = u64::from(job.heads) * u64::from(job.query_tokens);
    if rows > 1 << 30 || job.key_tokens > 1 << 30 {
        return Err(Error::usage(
            format!(
                "{rows} queries of all heads or {} keys of a head are more than 2^30",
                job.key_tokens
            ),
            "use fewer tokens, sequences or heads at once",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
