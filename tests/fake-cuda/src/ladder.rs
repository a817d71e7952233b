//! The rungs of attention and of linear layers, as a host thread: by the references of `f64`.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::compute::{numbers, outputs};
use nvme_compute_kernel::flash::reference::PartialResult;
use nvme_compute_kernel::flash::{FlashParameters, VectorLayout};
use nvme_compute_kernel::linear::reference::{ReferenceLayer, exact, exact_slope};
use nvme_compute_kernel::linear::{ActivationKind, BackwardParameters, ForwardParameters};
use nvme_formats::{bf16_of_f32, f16_of_f32, f32_of_bf16, f32_of_f16};
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// Halves that a launch names, as numbers.
fn halves(address: u64, count: usize, is_bf16: bool) -> Vec<f32> {
    assert!(address.is_multiple_of(2), "halves at {address:#x}");
    if count == 0 {
        return Vec::new();
    }
    // SAFETY: the host vouches for them.
    let all = unsafe { from_raw_parts(address as usize as *const u16, count) };
    let wide = |half: &u16| match is_bf16 {
        true => f32_of_bf16(*half),
        false => f32_of_f16(*half),
    };
    all.iter().map(wide).collect()
}

fn store_halves(address: u64, values: &[f64], is_bf16: bool) {
    // SAFETY: the host vouches for them.
    let all = unsafe { from_raw_parts_mut(address as usize as *mut u16, values.len()) };
    for (half, value) in all.iter_mut().zip(values) {
        *half = match is_bf16 {
            true => bf16_of_f32(*value as f32),
            false => f16_of_f32(*value as f32),
        };
    }
}

/// A query of a job: its place, and how many keys it attends to.
#[derive(Clone, Copy)]
struct Query {
    row: usize,
    sequence: u32,
    head: u32,
    token: u32,
    limit: u32,
}

fn queries(job: &FlashParameters) -> impl Iterator<Item = Query> {
    let (tokens, heads) = (u64::from(job.query_tokens), u64::from(job.heads));
    (0..job.rows()).map(move |row| {
        let (rest, token) = (row / tokens, (row % tokens) as u32);
        let (sequence, head) = ((rest / heads) as u32, (rest % heads) as u32);
        let there = match job.counts {
            0 => job.key_tokens,
            counts => {
                // SAFETY: the host gives a count for each sequence.
                let count = unsafe { *((counts + u64::from(sequence) * 4) as usize as *const u32) };
                count.min(job.key_tokens)
            }
        };
        Query {
            row: row as usize,
            sequence,
            head,
            token,
            limit: job.limit(token, there),
        }
    })
}

/// The vectors of tokens `tokens` of the head of keys of a query, one after another.
fn vectors(
    job: &FlashParameters,
    from: &VectorLayout,
    query: Query,
    tokens: std::ops::Range<u32>,
) -> Vec<f32> {
    let each = job.head_elements as usize;
    let head = job.kv_head(query.head);
    let at = |token| halves(from.at(query.sequence, head, token), each, job.is_bf16 != 0);
    tokens.flat_map(at).collect()
}

fn of_query(job: &FlashParameters, query: Query) -> Vec<f32> {
    let at = job.queries.at(query.sequence, query.head, query.token);
    halves(at, job.head_elements as usize, job.is_bf16 != 0)
}

fn part(job: &FlashParameters, query: Query, tokens: std::ops::Range<u32>) -> PartialResult {
    let keys = vectors(job, &job.keys, query, tokens.clone());
    let values = vectors(job, &job.values, query, tokens);
    PartialResult::of(&of_query(job, query), &keys, &values, job.scale)
}

fn finish(job: &FlashParameters, query: Query, y: &[f64]) {
    let at = job.y.at(query.sequence, query.head, query.token);
    store_halves(at, y, job.is_bf16 != 0);
}

/// A row of the scores of the first rungs.
fn scores_of<'a>(job: &FlashParameters, query: Query) -> &'a mut [f32] {
    let count = job.key_tokens as usize;
    outputs(job.workspace + (query.row * count * 4) as u64, count)
}

/// As `nvme_attention_scores`, and `nvme_attention_scores_tiled`.
pub fn scores(job: &FlashParameters) {
    for query in queries(job).filter(|query| query.limit > 0) {
        let keys = vectors(job, &job.keys, query, 0..query.limit);
        let (of_query, scores) = (of_query(job, query), scores_of(job, query));
        for (score, key) in scores.iter_mut().zip(keys.chunks(of_query.len())) {
            let sum: f64 = of_query
                .iter()
                .zip(key)
                .map(|(a, b)| f64::from(*a) * f64::from(*b))
                .sum();
            *score = (sum * f64::from(job.scale)) as f32;
        }
    }
}

/// As `nvme_attention_shares`.
pub fn shares(job: &FlashParameters) {
    for query in queries(job) {
        let (there, beyond) = scores_of(job, query).split_at_mut(query.limit as usize);
        let largest = there.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        there
            .iter_mut()
            .for_each(|score| *score = (*score - largest).exp());
        let total: f32 = there.iter().sum();
        there.iter_mut().for_each(|share| *share /= total);
        beyond.fill(0.0);
    }
}

/// As `nvme_attention_values`, and `nvme_attention_values_tiled`.
pub fn values(job: &FlashParameters) {
    for query in queries(job) {
        let values = vectors(job, &job.values, query, 0..query.limit);
        let mut y = vec![0.0; job.head_elements as usize];
        for (share, value) in scores_of(job, query).iter().zip(values.chunks(y.len())) {
            for (y, value) in y.iter_mut().zip(value) {
                *y += f64::from(*share) * f64::from(*value);
            }
        }
        finish(job, query, &y);
    }
}

/// As the kernels that have no scores in memory.
pub fn flash(job: &FlashParameters) {
    for query in queries(job) {
        finish(job, query, &part(job, query, 0..query.limit).result());
    }
}

/// As `nvme_multi_query_attention`: results, or the parts that are joined.
pub fn multi_query(job: &FlashParameters) {
    if job.splits == 1 {
        return flash(job);
    }
    for query in queries(job) {
        let each = query.limit.div_ceil(job.splits);
        for split in 0..job.splits {
            let bound = |split: u32| (split * each).min(query.limit);
            let part = part(job, query, bound(split)..bound(split + 1));
            let into = part_of(job, query, split);
            let (sums, of_part) = into.split_at_mut(job.head_elements as usize);
            for (to, sum) in sums.iter_mut().zip(&part.sums) {
                *to = *sum as f32;
            }
            of_part.copy_from_slice(&[part.largest as f32, part.total as f32]);
        }
    }
}

fn part_of<'a>(job: &FlashParameters, query: Query, split: u32) -> &'a mut [f32] {
    let count = job.head_elements as usize + 2;
    let index = query.row * job.splits as usize + split as usize;
    outputs(job.workspace + (index * count * 4) as u64, count)
}

/// As `nvme_multi_query_join`.
pub fn join(job: &FlashParameters) {
    for query in queries(job) {
        let elements = job.head_elements as usize;
        let parts = || (0..job.splits).map(|split| &*part_of(job, query, split));
        let largest = parts()
            .map(|part| part[elements])
            .fold(f32::NEG_INFINITY, f32::max);
        let mut joined = PartialResult {
            sums: vec![0.0; elements],
            largest: largest.into(),
            total: 0.0,
        };
        for part in parts().filter(|part| part[elements] > f32::NEG_INFINITY) {
            let by = (f64::from(job.scale) * f64::from(part[elements] - largest)).exp();
            joined.total += by * f64::from(part[elements + 1]);
            for (sum, of_part) in joined.sums.iter_mut().zip(part) {
                *sum += by * f64::from(*of_part);
            }
        }
        finish(job, query, &joined.result());
    }
}

fn wide(numbers: &[f32]) -> Vec<f64> {
    numbers.iter().map(|number| f64::from(*number)).collect()
}

/// Numbers that a launch names, `None` at address 0.
fn named(address: u64, count: usize) -> Option<Vec<f64>> {
    (address != 0).then(|| wide(numbers(address, count)))
}

fn put(address: u64, values: &[f64]) {
    if address != 0 {
        for (to, value) in outputs(address, values.len()).iter_mut().zip(values) {
            *to = *value as f32;
        }
    }
}

fn layer(inputs: u32, outputs: u32, activation: u32) -> ReferenceLayer {
    ReferenceLayer {
        inputs: inputs as usize,
        outputs: outputs as usize,
        activation: ActivationKind::of_number(activation),
    }
}

/// Sums of a layer of `f32`, or of halves.
fn sums(job: &ForwardParameters, is_bf16: Option<bool>) -> Vec<f64> {
    let (tokens, inputs, outputs) = (
        job.tokens as usize,
        job.inputs as usize,
        job.outputs as usize,
    );
    let read = |address: u64, count: usize| match is_bf16 {
        None => named(address, count).unwrap_or_default(),
        Some(is_bf16) => wide(&halves(address, count, is_bf16)),
    };
    let bias = (job.bias != 0).then(|| read(job.bias, outputs));
    if inputs == 0 {
        let row = bias.unwrap_or_else(|| vec![0.0; outputs]);
        return row.repeat(tokens);
    }
    let (x, weights) = (
        read(job.x, tokens * inputs),
        read(job.weights, outputs * inputs),
    );
    layer(job.inputs, job.outputs, 0).sums(&x, &weights, bias.as_deref())
}

/// As `nvme_linear_forward_naive`.
pub fn forward_naive(job: &ForwardParameters) {
    put(job.y, &sums(job, None));
}

/// As `nvme_linear_activate`.
pub fn activate(job: &ForwardParameters) {
    let count = job.tokens as usize * job.outputs as usize;
    let sums = wide(numbers(job.y, count));
    finish_forward(job, &sums, None);
}

/// As the other rungs over `f32`.
pub fn forward(job: &ForwardParameters) {
    finish_forward(job, &sums(job, None), None);
}

/// As the mixed rungs.
pub fn forward_mixed(job: &ForwardParameters, is_bf16: bool) {
    finish_forward(job, &sums(job, Some(is_bf16)), Some(is_bf16));
}

fn finish_forward(job: &ForwardParameters, sums: &[f64], is_bf16: Option<bool>) {
    let activation = ActivationKind::of_number(job.activation);
    let y: Vec<f64> = sums.iter().map(|sum| exact(activation, *sum)).collect();
    put(job.sums, sums);
    match is_bf16 {
        None => put(job.y, &y),
        Some(is_bf16) => store_halves(job.y, &y, is_bf16),
    }
}

/// As `nvme_linear_backward_clear`.
pub fn backward_clear(job: &BackwardParameters) {
    put(
        job.dweights,
        &vec![0.0; job.outputs as usize * job.inputs as usize],
    );
    put(job.dbias, &vec![0.0; job.outputs as usize]);
}

fn gradient_of_sums(job: &BackwardParameters) -> Vec<f64> {
    let count = job.tokens as usize * job.outputs as usize;
    let dy = wide(numbers(job.dy, count));
    match ActivationKind::of_number(job.activation) {
        ActivationKind::None => dy,
        activation => {
            let pairs = numbers(job.sums, count).iter().zip(dy);
            pairs
                .map(|(sum, dy)| dy * exact_slope(activation, (*sum).into()))
                .collect()
        }
    }
}

/// As `nvme_linear_backward_sums`.
pub fn backward_sums(job: &BackwardParameters) {
    let dsums = gradient_of_sums(job);
    let mut bias = vec![0.0; job.outputs as usize];
    for row in dsums.chunks(bias.len().max(1)) {
        bias.iter_mut()
            .zip(row)
            .for_each(|(sum, dsum)| *sum += dsum);
    }
    if job.activation != 0 {
        put(job.dsums, &dsums);
    }
    put(job.dbias, &bias);
}

/// As `nvme_linear_backward_naive`, which does all, and as those that begin with the gradient of the sums: of inputs, of
/// weights, or both.
pub fn backward(job: &BackwardParameters, dsums: &[f64], of_inputs: bool, of_weights: bool) {
    let (tokens, inputs, outputs) = (
        job.tokens as usize,
        job.inputs as usize,
        job.outputs as usize,
    );
    let x = match of_weights && job.dweights != 0 {
        true => wide(numbers(job.x, tokens * inputs)),
        false => vec![0.0; tokens * inputs],
    };
    let weights = match of_inputs && job.dx != 0 {
        true => wide(numbers(job.weights, outputs * inputs)),
        false => vec![0.0; outputs * inputs],
    };
    let found = layer(job.inputs, job.outputs, job.activation).gradients(&x, &weights, dsums);
    if of_inputs {
        put(job.dx, &found.inputs);
    }
    if of_weights {
        put(job.dweights, &found.weights);
    }
}

/// All of it, from the gradient of the results.
pub fn backward_naive(job: &BackwardParameters) {
    let dsums = gradient_of_sums(job);
    backward(job, &dsums, true, true);
    let mut bias = vec![0.0; job.outputs as usize];
    for row in dsums.chunks(bias.len().max(1)) {
        bias.iter_mut()
            .zip(row)
            .for_each(|(sum, dsum)| *sum += dsum);
    }
    put(job.dbias, &bias);
}

/// What `nvme_linear_backward_sums` left.
pub fn left_sums(job: &BackwardParameters) -> Vec<f64> {
    wide(numbers(
        job.dsums,
        job.tokens as usize * job.outputs as usize,
    ))
}
