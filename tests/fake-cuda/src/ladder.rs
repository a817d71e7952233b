//! The rungs of linear layers, as a host thread: by the references of `f64`.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::compute::{numbers, outputs};
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
