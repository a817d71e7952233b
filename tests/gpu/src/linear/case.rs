//! A linear layer over matrices in GPU memory, between guards, and what its results have to be.
// UNSAFETY: launches take addresses of vectors.
#![allow(unsafe_code)]

use super::{GUARD, POISON, TOLERANCE};
use crate::bench::Bench;
use crate::gather::{dice, text};
use crate::report::Outcome;
use nvme_compute_kernel::linear::reference::ReferenceLayer;
use nvme_course::linear::{
    ActivationKind, BackwardParameters, BackwardRung, ForwardParameters, ForwardRung, LinearKernels,
};
use nvme_formats::{bf16_of_f32, f16_of_f32, f32_of_bf16, f32_of_f16};
use nvme_host::cuda::DeviceMemory;

/// The format of numbers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    F32,
    Bf16,
    F16,
}

impl Kind {
    pub(super) fn of(rung: ForwardRung) -> Self {
        match rung {
            ForwardRung::MixedBf16 => Self::Bf16,
            ForwardRung::MixedF16 => Self::F16,
            _ => Self::F32,
        }
    }

    pub(super) fn bytes(self, value: f32) -> Vec<u8> {
        match self {
            Self::F32 => value.to_le_bytes().to_vec(),
            Self::Bf16 => bf16_of_f32(value).to_le_bytes().to_vec(),
            Self::F16 => f16_of_f32(value).to_le_bytes().to_vec(),
        }
    }

    pub(super) fn numbers(self, bytes: &[u8]) -> Vec<f64> {
        let halves = |widen: fn(u16) -> f32| -> Vec<f64> {
            let halves = bytes.as_chunks::<2>().0.iter();
            halves
                .map(|half| widen(u16::from_le_bytes(*half)).into())
                .collect()
        };
        match self {
            Self::F32 => {
                let words = bytes.as_chunks::<4>().0.iter();
                words.map(|word| f32::from_le_bytes(*word).into()).collect()
            }
            Self::Bf16 => halves(f32_of_bf16),
            Self::F16 => halves(f32_of_f16),
        }
    }
}

/// A matrix of random numbers, or of none so far, between guards.
pub(super) struct Matrix {
    pub(super) memory: DeviceMemory,
    pub(super) kind: Kind,
    pub(super) count: usize,
    pub(super) numbers: Vec<f64>,
}

impl Matrix {
    pub(super) fn empty(bench: &Bench, count: usize, kind: Kind) -> Outcome<Self> {
        let each = if kind == Kind::F32 { 4 } else { 2 };
        let memory = DeviceMemory::new(&bench.gpu, count * each + 2 * GUARD).map_err(text)?;
        memory.fill(POISON).map_err(text)?;
        Ok(Self {
            memory,
            kind,
            count,
            numbers: Vec::new(),
        })
    }

    pub(super) fn random(bench: &Bench, count: usize, kind: Kind, seed: u64) -> Outcome<Self> {
        let mut all = Self::empty(bench, count, kind)?;
        all.fill(seed)?;
        Ok(all)
    }

    pub(super) fn fill(&mut self, seed: u64) -> Outcome<()> {
        let mut throw = dice(seed);
        let bytes: Vec<u8> = (0..self.count)
            .flat_map(|_| self.kind.bytes(throw(200_001) as f32 / 100_000.0 - 1.0))
            .collect();
        self.numbers = self.kind.numbers(&bytes);
        self.memory.upload(GUARD, &bytes).map_err(text)
    }

    pub(super) fn address(&self) -> u64 {
        self.memory.address() + GUARD as u64
    }

    pub(super) fn poison(&self) -> Outcome<()> {
        self.memory.fill(POISON).map_err(text)
    }

    pub(super) fn bytes(&self) -> Outcome<Vec<u8>> {
        let mut bytes = vec![0; self.memory.len()];
        self.memory.download(0, &mut bytes).map_err(text)?;
        Ok(bytes)
    }

    /// Compares a kernel's result with `wanted`; errors are relative to `sizes`.
    pub(super) fn check(&self, what: &str, wanted: &[f64], sizes: &[f64]) -> Outcome<f64> {
        let bytes = self.bytes()?;
        let end = bytes.len() - GUARD;
        let guards = bytes[..GUARD].iter().chain(&bytes[end..]);
        if guards.into_iter().any(|byte| *byte != POISON) {
            return Err(format!("{what}: something beside it was written"));
        }
        // A half adds its rounding error.
        let rounding = match self.kind {
            Kind::F32 => 0.0,
            Kind::Bf16 => 1.0 / 256.0,
            Kind::F16 => 1.0 / 2048.0,
        };
        let mut worst = 0.0f64;
        let found = self.kind.numbers(&bytes[GUARD..end]);
        for (at, ((found, wanted), size)) in found.iter().zip(wanted).zip(sizes).enumerate() {
            let apart = (found - wanted).abs();
            let allowed = TOLERANCE * size + rounding * wanted.abs() + 1e-6;
            if apart > allowed || found.is_nan() {
                return Err(format!("{what}: element {at} is {found}, not {wanted}"));
            }
            worst = worst.max(apart / (size + 1e-30));
        }
        Ok(worst)
    }
}

/// A layer with its matrices.
pub(super) struct Case {
    pub(super) shape: [u32; 3],
    pub(super) activation: ActivationKind,
    pub(super) x: Matrix,
    pub(super) weights: Matrix,
    pub(super) bias: Matrix,
    pub(super) dy: Matrix,
    pub(super) y: Matrix,
    pub(super) sums: Matrix,
    pub(super) dsums: Matrix,
    pub(super) dx: Matrix,
    pub(super) dweights: Matrix,
    pub(super) dbias: Matrix,
    pub(super) has_bias: bool,
}

impl Case {
    pub(super) fn new(
        bench: &Bench,
        shape: [u32; 3],
        activation: ActivationKind,
        kind: Kind,
        seed: u64,
    ) -> Outcome<Self> {
        let [tokens, inputs, outputs] = shape.map(|count| count as usize);
        let random = |count, more| Matrix::random(bench, count, kind, seed * 8 + more);
        let empty = |count| Matrix::empty(bench, count, Kind::F32);
        Ok(Self {
            shape,
            activation,
            x: random(tokens * inputs, 1)?,
            weights: random(outputs * inputs, 2)?,
            bias: random(outputs, 3)?,
            dy: random(tokens * outputs, 4)?,
            y: Matrix::empty(bench, tokens * outputs, kind)?,
            sums: empty(tokens * outputs)?,
            dsums: empty(tokens * outputs)?,
            dx: empty(tokens * inputs)?,
            dweights: empty(outputs * inputs)?,
            dbias: empty(outputs)?,
            has_bias: !seed.is_multiple_of(3),
        })
    }

    pub(super) fn layer(&self) -> ReferenceLayer {
        ReferenceLayer {
            inputs: self.shape[1] as usize,
            outputs: self.shape[2] as usize,
            activation: self.activation,
        }
    }

    pub(super) fn forward(&self) -> ForwardParameters {
        let [tokens, inputs, outputs] = self.shape;
        ForwardParameters {
            x: self.x.address(),
            weights: self.weights.address(),
            bias: if self.has_bias {
                self.bias.address()
            } else {
                0
            },
            y: self.y.address(),
            sums: self.sums.address(),
            tokens,
            inputs,
            outputs,
            activation: self.activation as u32,
        }
    }

    pub(super) fn backward(&self) -> BackwardParameters {
        let [tokens, inputs, outputs] = self.shape;
        BackwardParameters {
            x: self.x.address(),
            weights: self.weights.address(),
            sums: self.sums.address(),
            dy: self.dy.address(),
            dsums: self.dsums.address(),
            dx: self.dx.address(),
            dweights: self.dweights.address(),
            dbias: self.dbias.address(),
            tokens,
            inputs,
            outputs,
            activation: self.activation as u32,
        }
    }

    /// Returns the sums by `f64`, and the sums of the absolute values of their terms.
    pub(super) fn exact_sums(&self) -> (Vec<f64>, Vec<f64>) {
        let [tokens, inputs, outputs] = self.shape.map(|count| count as usize);
        let bias = self.has_bias.then_some(&self.bias.numbers[..]);
        if inputs == 0 {
            let row = bias.map_or_else(|| vec![0.0; outputs], <[f64]>::to_vec);
            return (row.repeat(tokens), vec![1.0; tokens * outputs]);
        }
        let sizes =
            |numbers: &[f64]| -> Vec<f64> { numbers.iter().map(|number| number.abs()).collect() };
        let (x, weights) = (&self.x.numbers, &self.weights.numbers);
        let of_bias = sizes(&self.bias.numbers);
        let layer = self.layer();
        (
            layer.sums(x, weights, bias),
            layer.sums(&sizes(x), &sizes(weights), Some(&of_bias)),
        )
    }

    pub(super) fn check_forward(&self, what: &str) -> Outcome<f64> {
        let (sums, sizes) = self.exact_sums();
        let what = |part: &str| format!("{what}, {:?}, {:?}, {part}", self.shape, self.activation);
        let of_sums = self.sums.check(&what("sums"), &sums, &sizes)?;
        let y = self
            .y
            .check(&what("results"), &self.layer().results(&sums), &sizes)?;
        Ok(of_sums.max(y))
    }

    /// Stores exact sums in the memory from which gradients read them.
    pub(super) fn upload_sums(&self) -> Outcome<()> {
        let bytes: Vec<u8> = self
            .exact_sums()
            .0
            .iter()
            .flat_map(|sum| (*sum as f32).to_le_bytes())
            .collect();
        self.sums.memory.upload(GUARD, &bytes).map_err(text)
    }

    pub(super) fn poison_gradients(&self) -> Outcome<()> {
        for matrix in [&self.dsums, &self.dx, &self.dweights, &self.dbias] {
            matrix.poison()?;
        }
        Ok(())
    }

    pub(super) fn check_backward(&self, what: &str) -> Outcome<f64> {
        let layer = self.layer();
        let sizes =
            |numbers: &[f64]| -> Vec<f64> { numbers.iter().map(|number| number.abs()).collect() };
        let dsums = layer.of_sums(&self.exact_sums().0, &self.dy.numbers);
        let (x, weights) = (&self.x.numbers, &self.weights.numbers);
        let wanted = layer.gradients(x, weights, &dsums);
        let of_sizes = layer.gradients(&sizes(x), &sizes(weights), &sizes(&self.dy.numbers));
        let what = |part: &str| {
            format!(
                "{what}, {:?}, {:?}, the gradient of {part}",
                self.shape, self.activation
            )
        };
        let dx = self
            .dx
            .check(&what("inputs"), &wanted.inputs, &of_sizes.inputs)?;
        let dweights = self
            .dweights
            .check(&what("weights"), &wanted.weights, &of_sizes.weights)?;
        let dbias = self
            .dbias
            .check(&what("biases"), &wanted.bias, &of_sizes.bias)?;
        Ok(dx.max(dweights).max(dbias))
    }

    pub(super) fn start_forward(
        &self,
        linear: &LinearKernels,
        rung: ForwardRung,
        stream: u64,
    ) -> nvme_host::Result<()> {
        // SAFETY: the matrices outlive the launch, which is waited for.
        unsafe { linear.forward(rung, &self.forward(), stream) }
    }

    pub(super) fn start_backward(
        &self,
        linear: &LinearKernels,
        rung: BackwardRung,
        stream: u64,
    ) -> nvme_host::Result<()> {
        // SAFETY: as above.
        unsafe { linear.backward(rung, &self.backward(), stream) }
    }
}
