//! Linear layers by lanes, every kernel over shapes with edges, against sums of `f64`.

use super::{address, address_mut, launch_of, numbers};
use crate::BLOCK_THREADS;
use crate::linear::reference::{ReferenceGradients, ReferenceLayer};
use crate::linear::{
    ActivationKind, BackwardParameters, FEW_COLUMNS, FEW_ROWS, FEW_THREADS, ForwardParameters,
    STAGES, SUMS_COLUMNS, TENSOR_THREADS, TILE, cross_bytes, entries, tile_bytes,
};
use nvme_formats::{bf16_of_f32, f16_of_f32, f32_of_bf16, f32_of_f16};

/// Tokens, inputs and outputs; `f32` kernels also take odd numbers of inputs.
const SHAPES: [[u32; 3]; 3] = [[3, 8, 5], [33, 72, 65], [130, 136, 129]];
const ODD: [u32; 3] = [35, 67, 41];

fn wide(numbers: &[f32]) -> Vec<f64> {
    numbers.iter().map(|number| f64::from(*number)).collect()
}

/// Asserts that each number is as close to its sum as the size of the sum's terms allows, plus `rounding` of itself.
#[track_caller]
fn close(what: &str, found: &[f32], expected: &[f64], sizes: &[f64], rounding: f64) {
    assert_eq!(found.len(), expected.len());
    for (at, ((found, expected), size)) in found.iter().zip(expected).zip(sizes).enumerate() {
        let apart = (f64::from(*found) - expected).abs();
        let allowed = 1e-5 * size + rounding * expected.abs() + 1e-6;
        assert!(apart <= allowed, "{what}, {at}: {found}, not {expected}");
    }
}

/// A layer with random numbers, rounded as a format of halves holds them.
struct RandomLayer {
    layer: ReferenceLayer,
    x: Vec<f32>,
    weights: Vec<f32>,
    bias: Vec<f32>,
}

impl RandomLayer {
    fn new([tokens, inputs, outputs]: [u32; 3], activation: ActivationKind) -> Self {
        let count = |a, b| (a * b) as usize;
        let layer = ReferenceLayer {
            inputs: inputs as usize,
            outputs: outputs as usize,
            activation,
        };
        Self {
            layer,
            x: numbers(count(tokens, inputs), 1),
            weights: numbers(count(outputs, inputs), 2),
            bias: numbers(count(outputs, 1), 3),
        }
    }

    fn round(&mut self, round: impl Fn(f32) -> f32) {
        for numbers in [&mut self.x, &mut self.weights, &mut self.bias] {
            numbers
                .iter_mut()
                .for_each(|number| *number = round(*number));
        }
    }

    fn sums(&self) -> Vec<f64> {
        let bias = wide(&self.bias);
        self.layer
            .sums(&wide(&self.x), &wide(&self.weights), Some(&bias))
    }

    fn sizes(&self) -> Vec<f64> {
        let sizes = |numbers: &[f32]| -> Vec<f64> {
            let sizes = numbers.iter().map(|number| f64::from(number.abs()));
            sizes.collect()
        };
        let bias = sizes(&self.bias);
        self.layer
            .sums(&sizes(&self.x), &sizes(&self.weights), Some(&bias))
    }

    fn job([tokens, inputs, outputs]: [u32; 3], activation: ActivationKind) -> ForwardParameters {
        ForwardParameters {
            tokens,
            inputs,
            outputs,
            activation: activation as u32,
            ..ForwardParameters::default()
        }
    }

    #[track_caller]
    fn check(&self, what: &str, sums: &[f32], y: &[f32], rounding: f64) {
        let (expected, sizes) = (self.sums(), self.sizes());
        close(what, sums, &expected, &sizes, 0.0);
        close(what, y, &self.layer.results(&expected), &sizes, rounding);
    }
}

fn tiles([tokens, _, outputs]: [u32; 3]) -> u32 {
    tokens.div_ceil(TILE) * outputs.div_ceil(TILE)
}

type Narrow = fn(f32) -> u16;
type Widen = fn(u16) -> f32;
type Forward = unsafe fn(ForwardParameters);
type Backward = unsafe fn(BackwardParameters);

const FORWARD_SHARED: u32 = STAGES * 2 * tile_bytes(TILE);
const FEW_SHARED: u32 = STAGES * (tile_bytes(FEW_ROWS) + tile_bytes(FEW_COLUMNS));

/// Each shape by one block for each tile, or by fewer, which take several.
#[test]
fn layers_of_numbers_are_sums_and_activations() {
    for (shape, activation) in SHAPES
        .into_iter()
        .chain([ODD])
        .zip(ActivationKind::ALL.into_iter().cycle())
    {
        let case = RandomLayer::new(shape, activation);
        let kernels: [(Forward, u32, u32, u32); 4] = [
            (entries::nvme_linear_forward_naive, 2, BLOCK_THREADS, 0),
            (
                entries::nvme_linear_forward_fused,
                tiles(shape),
                TENSOR_THREADS,
                FORWARD_SHARED,
            ),
            (
                entries::nvme_linear_forward_persistent,
                2,
                TENSOR_THREADS,
                FORWARD_SHARED,
            ),
            (entries::nvme_linear_forward_few, 3, FEW_THREADS, FEW_SHARED),
        ];
        for (at, (kernel, blocks, threads, shared)) in kernels.into_iter().enumerate() {
            let count = (shape[0] * shape[2]) as usize;
            let (mut y, mut sums) = (vec![f32::NAN; count], vec![f32::NAN; count]);
            let job = ForwardParameters {
                x: address(&case.x),
                weights: address(&case.weights),
                bias: address(&case.bias),
                y: address_mut(&mut y),
                sums: address_mut(&mut sums),
                ..RandomLayer::job(shape, activation)
            };
            launch_of((blocks, threads, shared), kernel, job);
            if at == 0 {
                launch_of((2, threads, 0), entries::nvme_linear_activate, job);
            }
            case.check(&format!("kernel {at} of {shape:?}"), &sums, &y, 0.0);
        }
    }
}

#[test]
fn layers_of_halves_are_sums_and_activations() {
    for (shape, activation) in SHAPES.into_iter().zip(ActivationKind::ALL) {
        for is_bf16 in [true, false] {
            let (narrow, widen): (Narrow, Widen) = match is_bf16 {
                true => (bf16_of_f32, f32_of_bf16),
                false => (f16_of_f32, f32_of_f16),
            };
            let rounding = if is_bf16 { 1.0 / 256.0 } else { 1.0 / 2048.0 };
            let mut case = RandomLayer::new(shape, activation);
            case.round(|number| widen(narrow(number)));
            let halves = |numbers: &[f32]| -> Vec<u16> {
                // Rows begin at multiples of 16 bytes.
                let mut all = vec![0u16; numbers.len() + 8];
                let skip = all.as_ptr().align_offset(16);
                for (to, number) in all[skip..].iter_mut().zip(numbers) {
                    *to = narrow(*number);
                }
                all
            };
            let (x, weights, bias) = (halves(&case.x), halves(&case.weights), halves(&case.bias));
            let aligned = |all: &[u16]| address(&all[all.as_ptr().align_offset(16)..]);
            let kernels: [(Forward, u32, u32); 2] = match is_bf16 {
                true => [
                    (entries::nvme_linear_forward_mixed_bf16, 2, FORWARD_SHARED),
                    (entries::nvme_linear_forward_few_bf16, 3, FEW_SHARED),
                ],
                false => [
                    (entries::nvme_linear_forward_mixed_f16, 2, FORWARD_SHARED),
                    (entries::nvme_linear_forward_few_f16, 3, FEW_SHARED),
                ],
            };
            for (at, (kernel, blocks, shared)) in kernels.into_iter().enumerate() {
                let count = (shape[0] * shape[2]) as usize;
                let (mut y, mut sums) = (vec![0u16; count], vec![f32::NAN; count]);
                let job = ForwardParameters {
                    x: aligned(&x),
                    weights: aligned(&weights),
                    bias: aligned(&bias),
                    y: address_mut(&mut y),
                    sums: address_mut(&mut sums),
                    ..RandomLayer::job(shape, activation)
                };
                launch_of((blocks, FEW_THREADS, shared), kernel, job);
                let y: Vec<f32> = y.into_iter().map(widen).collect();
                case.check(&format!("kernel {at} of {shape:?}"), &sums, &y, rounding);
            }
        }
    }
}

#[test]
fn gradients_of_layers_are_those_of_the_reference() {
    let inputs_shared = STAGES * (tile_bytes(TILE) + cross_bytes(TILE));
    let few_shared = STAGES * (tile_bytes(FEW_ROWS) + cross_bytes(FEW_COLUMNS));
    let weights_shared = STAGES * 2 * cross_bytes(TILE);
    for (shape, activation) in SHAPES
        .into_iter()
        .chain([ODD])
        .zip(ActivationKind::ALL.into_iter().rev().cycle())
    {
        let case = RandomLayer::new(shape, activation);
        let [tokens, inputs, outputs] = shape;
        let (sums, dy) = (case.sums(), numbers((tokens * outputs) as usize, 4));
        let of_sums = case.layer.of_sums(&sums, &wide(&dy));
        let sizes = |all: &[f64]| -> Vec<f64> { all.iter().map(|one| one.abs()).collect() };
        let (x, weights) = (wide(&case.x), wide(&case.weights));
        let expected = case.layer.gradients(&x, &weights, &of_sums);
        let of_sizes = case
            .layer
            .gradients(&sizes(&x), &sizes(&weights), &sizes(&of_sums));
        let sums: Vec<f32> = sums.into_iter().map(|sum| sum as f32).collect();
        let blocks = outputs.div_ceil(SUMS_COLUMNS);
        let of_sums: (Backward, u32, u32, u32) = (
            entries::nvme_linear_backward_sums,
            blocks,
            BLOCK_THREADS,
            BLOCK_THREADS * 4,
        );
        let of_weights: (Backward, u32, u32, u32) = (
            entries::nvme_linear_backward_weights,
            2,
            TENSOR_THREADS,
            weights_shared,
        );
        let steps: [Vec<(Backward, u32, u32, u32)>; 4] = [
            vec![
                (entries::nvme_linear_backward_clear, 2, BLOCK_THREADS, 0),
                (entries::nvme_linear_backward_naive, 2, BLOCK_THREADS, 0),
            ],
            vec![
                of_sums,
                (
                    entries::nvme_linear_backward_inputs,
                    2,
                    TENSOR_THREADS,
                    inputs_shared,
                ),
                of_weights,
            ],
            vec![
                of_sums,
                (
                    entries::nvme_linear_backward_inputs_few,
                    3,
                    FEW_THREADS,
                    few_shared,
                ),
                of_weights,
            ],
            vec![
                of_sums,
                (
                    entries::nvme_linear_backward_warp_reduce,
                    2,
                    BLOCK_THREADS,
                    0,
                ),
            ],
        ];
        for (at, kernels) in steps.into_iter().enumerate() {
            let empty = |a, b| vec![f32::NAN; (a * b) as usize];
            let (mut dsums, mut dx) = (empty(tokens, outputs), empty(tokens, inputs));
            let (mut dweights, mut dbias) = (empty(outputs, inputs), empty(outputs, 1));
            let job = BackwardParameters {
                x: address(&case.x),
                weights: address(&case.weights),
                sums: address(&sums),
                dy: address(&dy),
                dsums: match activation {
                    ActivationKind::None => address(&dy),
                    _ => address_mut(&mut dsums),
                },
                dx: address_mut(&mut dx),
                dweights: address_mut(&mut dweights),
                dbias: address_mut(&mut dbias),
                tokens,
                inputs,
                outputs,
                activation: activation as u32,
            };
            for (kernel, blocks, threads, shared) in kernels {
                launch_of((blocks, threads, shared), kernel, job);
            }
            let found = [&dx, &dweights, &dbias];
            let all =
                |of: &ReferenceGradients| [of.inputs.clone(), of.weights.clone(), of.bias.clone()];
            for (part, ((found, expected), sizes)) in found
                .into_iter()
                .zip(all(&expected))
                .zip(all(&of_sizes))
                .enumerate()
            {
                let what = format!("gradient {part} by way {at} of {shape:?}");
                close(&what, found, &expected, &sizes, 0.0);
            }
        }
    }
}
