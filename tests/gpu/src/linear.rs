//! Linear layers and their gradients, every rung against sums of `f64`: shapes with edges, bits, streams, graphs, and
//! what is refused.
// UNSAFETY: launches take addresses of vectors.
#![allow(unsafe_code)]

use crate::bench::Bench;
use crate::gather::{dice, text};
use crate::limits::finish;
use crate::report::{Outcome, Report};
use nvme_compute_kernel::linear::reference::Layer;
use nvme_course::linear::{
    Activation, Backward, BackwardRung, Forward, ForwardRung, LinearKernels,
};
use nvme_formats::{bf16_of_f32, f16_of_f32, f32_of_bf16, f32_of_f16};
use nvme_host::cuda::{CudaGraph, DeviceMemory};

/// Bytes before and after each matrix that no kernel may write.
const GUARD: usize = 256;
/// What matrices and guards hold before: not a number.
const POISON: u8 = 0xFF;
/// How far a number may lie from the sum of `f64`, in parts of the sum of the sizes of its terms.
const TOLERANCE: f64 = 1e-5;

/// Tokens, inputs, outputs. Those of mixed layers are multiples of 8 inputs.
const SHAPES: [[u32; 3]; 12] = [
    [0, 8, 5],
    [3, 0, 5],
    [1, 1, 1],
    [3, 5, 7],
    [17, 33, 65],
    [16, 40, 1],
    [128, 64, 128],
    [129, 132, 130],
    [130, 200, 257],
    [64, 1000, 36],
    [257, 8, 300],
    [1, 4096, 50],
];

pub fn all(report: &mut Report, bench: &Bench) {
    let linear = LinearKernels::load(&bench.gpu).map_err(text);
    for rung in ForwardRung::ALL {
        let name = format!("{rung:?}").to_lowercase();
        report.test(&format!("linear/forward/{name}/shapes"), |_| {
            forward_shapes(bench, linear.as_ref()?, rung)
        });
    }
    for rung in BackwardRung::ALL {
        let name = format!("{rung:?}").to_lowercase();
        report.test(&format!("linear/backward/{name}/shapes"), |_| {
            backward_shapes(bench, linear.as_ref()?, rung)
        });
    }
    for rung in [BackwardRung::AtomicFree, BackwardRung::WarpReduce] {
        let name = format!("{rung:?}").to_lowercase();
        report.test(&format!("linear/backward/{name}/same-bits"), |_| {
            same_bits(bench, linear.as_ref()?, rung)
        });
    }
    report.test("linear/streams", |_| streams(bench, linear.as_ref()?));
    report.test("linear/graph", |_| graph(bench, linear.as_ref()?));
    report.test("linear/usage", |_| usage(bench, linear.as_ref()?));
}

/// How numbers are stored.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    F32,
    Bf16,
    F16,
}

impl Kind {
    fn of(rung: ForwardRung) -> Self {
        match rung {
            ForwardRung::MixedBf16 => Self::Bf16,
            ForwardRung::MixedF16 => Self::F16,
            _ => Self::F32,
        }
    }

    fn bytes(self, value: f32) -> Vec<u8> {
        match self {
            Self::F32 => value.to_le_bytes().to_vec(),
            Self::Bf16 => bf16_of_f32(value).to_le_bytes().to_vec(),
            Self::F16 => f16_of_f32(value).to_le_bytes().to_vec(),
        }
    }

    fn numbers(self, bytes: &[u8]) -> Vec<f64> {
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
struct Matrix {
    memory: DeviceMemory,
    kind: Kind,
    count: usize,
    numbers: Vec<f64>,
}

impl Matrix {
    fn empty(bench: &Bench, count: usize, kind: Kind) -> Outcome<Self> {
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

    fn random(bench: &Bench, count: usize, kind: Kind, seed: u64) -> Outcome<Self> {
        let mut all = Self::empty(bench, count, kind)?;
        all.fill(seed)?;
        Ok(all)
    }

    fn fill(&mut self, seed: u64) -> Outcome<()> {
        let mut throw = dice(seed);
        let bytes: Vec<u8> = (0..self.count)
            .flat_map(|_| self.kind.bytes(throw(200_001) as f32 / 100_000.0 - 1.0))
            .collect();
        self.numbers = self.kind.numbers(&bytes);
        self.memory.upload(GUARD, &bytes).map_err(text)
    }

    fn address(&self) -> u64 {
        self.memory.address() + GUARD as u64
    }

    fn poison(&self) -> Outcome<()> {
        self.memory.fill(POISON).map_err(text)
    }

    fn bytes(&self) -> Outcome<Vec<u8>> {
        let mut bytes = vec![0; self.memory.len()];
        self.memory.download(0, &mut bytes).map_err(text)?;
        Ok(bytes)
    }

    /// Compares what a kernel has left with `wanted`; `sizes` are what errors are relative to.
    fn check(&self, what: &str, wanted: &[f64], sizes: &[f64]) -> Outcome<f64> {
        let bytes = self.bytes()?;
        let end = bytes.len() - GUARD;
        let guards = bytes[..GUARD].iter().chain(&bytes[end..]);
        if guards.into_iter().any(|byte| *byte != POISON) {
            return Err(format!("{what}: something beside it was written"));
        }
        // A half has an error of its own.
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

/// A layer over matrices of its own.
struct Case {
    shape: [u32; 3],
    activation: Activation,
    x: Matrix,
    weights: Matrix,
    bias: Matrix,
    dy: Matrix,
    y: Matrix,
    sums: Matrix,
    dsums: Matrix,
    dx: Matrix,
    dweights: Matrix,
    dbias: Matrix,
    has_bias: bool,
}

impl Case {
    fn new(
        bench: &Bench,
        shape: [u32; 3],
        activation: Activation,
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

    fn layer(&self) -> Layer {
        Layer {
            inputs: self.shape[1] as usize,
            outputs: self.shape[2] as usize,
            activation: self.activation,
        }
    }

    fn forward(&self) -> Forward {
        let [tokens, inputs, outputs] = self.shape;
        Forward {
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

    fn backward(&self) -> Backward {
        let [tokens, inputs, outputs] = self.shape;
        Backward {
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

    /// Sums by `f64`, and the sums of the sizes of their terms.
    fn exact_sums(&self) -> (Vec<f64>, Vec<f64>) {
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

    fn check_forward(&self, what: &str) -> Outcome<f64> {
        let (sums, sizes) = self.exact_sums();
        let what = |part: &str| format!("{what}, {:?}, {:?}, {part}", self.shape, self.activation);
        let of_sums = self.sums.check(&what("sums"), &sums, &sizes)?;
        let y = self
            .y
            .check(&what("results"), &self.layer().results(&sums), &sizes)?;
        Ok(of_sums.max(y))
    }

    /// Puts exact sums where gradients take them from.
    fn upload_sums(&self) -> Outcome<()> {
        let bytes: Vec<u8> = self
            .exact_sums()
            .0
            .iter()
            .flat_map(|sum| (*sum as f32).to_le_bytes())
            .collect();
        self.sums.memory.upload(GUARD, &bytes).map_err(text)
    }

    fn poison_gradients(&self) -> Outcome<()> {
        for matrix in [&self.dsums, &self.dx, &self.dweights, &self.dbias] {
            matrix.poison()?;
        }
        Ok(())
    }

    fn check_backward(&self, what: &str) -> Outcome<f64> {
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

    fn start_forward(
        &self,
        linear: &LinearKernels,
        rung: ForwardRung,
        stream: u64,
    ) -> nvme_host::Result<()> {
        // SAFETY: the matrices outlive the launch, which is waited for.
        unsafe { linear.forward(rung, &self.forward(), stream) }
    }

    fn start_backward(
        &self,
        linear: &LinearKernels,
        rung: BackwardRung,
        stream: u64,
    ) -> nvme_host::Result<()> {
        // SAFETY: as above.
        unsafe { linear.backward(rung, &self.backward(), stream) }
    }
}

fn forward_shapes(bench: &Bench, linear: &LinearKernels, rung: ForwardRung) -> Outcome<String> {
    let (mut done, mut worst) = (0, 0.0f64);
    for (index, shape) in SHAPES.into_iter().enumerate() {
        if rung.is_mixed() && !shape[1].is_multiple_of(8) {
            continue;
        }
        for activation in Activation::ALL {
            let case = Case::new(
                bench,
                shape,
                activation,
                Kind::of(rung),
                (index + done) as u64 + 1,
            )?;
            case.start_forward(linear, rung, bench.stream.handle())
                .map_err(text)?;
            bench.wait();
            worst = worst.max(case.check_forward(&format!("{rung:?}"))?);
            done += 1;
        }
    }
    Ok(format!(
        "{done} layers, at most {worst:.1e} of the terms off"
    ))
}

fn backward_shapes(bench: &Bench, linear: &LinearKernels, rung: BackwardRung) -> Outcome<String> {
    let (mut done, mut worst) = (0, 0.0f64);
    for (index, shape) in SHAPES.into_iter().enumerate() {
        for activation in Activation::ALL {
            let case = Case::new(
                bench,
                shape,
                activation,
                Kind::F32,
                (index + done) as u64 + 1,
            )?;
            case.upload_sums()?;
            case.start_backward(linear, rung, bench.stream.handle())
                .map_err(text)?;
            bench.wait();
            worst = worst.max(case.check_backward(&format!("{rung:?}"))?);
            done += 1;
        }
    }
    Ok(format!(
        "{done} layers, at most {worst:.1e} of the terms off"
    ))
}

fn same_bits(bench: &Bench, linear: &LinearKernels, rung: BackwardRung) -> Outcome<String> {
    let case = Case::new(bench, [300, 136, 260], Activation::Gelu, Kind::F32, 2)?;
    case.upload_sums()?;
    let mut first: Option<Vec<Vec<u8>>> = None;
    for run in 0..100 {
        case.poison_gradients()?;
        case.start_backward(linear, rung, bench.stream.handle())
            .map_err(text)?;
        bench.wait();
        let all = [&case.dx, &case.dweights, &case.dbias].map(Matrix::bytes);
        let all = all.into_iter().collect::<Outcome<Vec<_>>>()?;
        match &first {
            Some(first) if *first != all => return Err(format!("run {run} has other bits")),
            Some(_) => {}
            None => {
                case.check_backward("the first run")?;
                first = Some(all);
            }
        }
    }
    Ok("100 runs have the same bits".to_owned())
}

fn streams(bench: &Bench, linear: &LinearKernels) -> Outcome<String> {
    let streams = crate::gather::several_streams(bench, 4)?;
    let cases = (0..8u32).map(|at| {
        let shape = [at * 31 + 1, at * 24 + 8, at * 50 + 3];
        Case::new(
            bench,
            shape,
            Activation::ALL[at as usize % 4],
            Kind::F32,
            u64::from(at) + 1,
        )
    });
    let cases: Vec<Case> = cases.collect::<Outcome<_>>()?;
    let (forward, backward) = (ForwardRung::ALL, BackwardRung::ALL);
    for round in 0..5 {
        for (at, (case, stream)) in cases.iter().zip(streams.iter().cycle()).enumerate() {
            let stream = stream.handle();
            case.poison_gradients()?;
            case.y.poison()?;
            case.sums.poison()?;
            // The gradients follow in the order of the stream: they use the sums.
            case.start_forward(linear, forward[(at + round) % 3], stream)
                .map_err(text)?;
            case.start_backward(linear, backward[(at + round) % 3], stream)
                .map_err(text)?;
        }
        for stream in &streams {
            finish(stream);
        }
        for case in &cases {
            case.check_forward("streams")?;
            case.check_backward("streams")?;
        }
    }
    Ok("40 layers and their gradients over 4 streams".to_owned())
}

fn graph(bench: &Bench, linear: &LinearKernels) -> Outcome<String> {
    let mut done = 0;
    for rung in BackwardRung::ALL {
        let mut case = Case::new(bench, [70, 40, 90], Activation::Silu, Kind::F32, 4)?;
        let captured = CudaGraph::capture(&bench.stream, |stream| {
            case.start_forward(linear, ForwardRung::Persistent, stream)?;
            case.start_backward(linear, rung, stream)
        });
        let (graph, ()) = captured.map_err(text)?;
        for round in 0..3 {
            case.x.fill(round + 100)?;
            case.weights.fill(round + 200)?;
            case.poison_gradients()?;
            graph.launch(&bench.stream).map_err(text)?;
            bench.wait();
            case.check_forward("a graph")?;
            case.check_backward("a graph")?;
            done += 1;
        }
    }
    Ok(format!("{done} launches, other matrices each"))
}

fn usage(bench: &Bench, linear: &LinearKernels) -> Outcome<String> {
    let case = Case::new(bench, [4, 12, 8], Activation::Gelu, Kind::F32, 1)?;
    let (stream, good, of_good) = (bench.stream.handle(), case.forward(), case.backward());
    let mut refused = 0;
    let mut is_refused = |what: &str, result: nvme_host::Result<()>| {
        refused += 1;
        match result.map_err(|error| error.exit_code()) {
            Err(2) => Ok(()),
            other => Err(format!("{what}: {other:?}")),
        }
    };
    for rung in ForwardRung::ALL {
        for (what, job) in [
            ("no inputs", Forward { x: 0, ..good }),
            ("no weights", Forward { weights: 0, ..good }),
            ("no results", Forward { y: 0, ..good }),
            (
                "inputs between two numbers",
                Forward {
                    x: good.x + 1,
                    ..good
                },
            ),
            (
                "results between two numbers",
                Forward {
                    y: good.y + 1,
                    ..good
                },
            ),
            ("biases between two numbers", Forward { bias: 1, ..good }),
            (
                "an activation that there is not",
                Forward {
                    activation: 4,
                    ..good
                },
            ),
            (
                "too many tiles",
                Forward {
                    tokens: u32::MAX,
                    outputs: u32::MAX,
                    ..good
                },
            ),
        ] {
            // SAFETY: the call is refused.
            is_refused(what, unsafe { linear.forward(rung, &job, stream) })?;
        }
        if rung.is_mixed() {
            let (odd, shifted) = (
                Forward { inputs: 12, ..good },
                Forward {
                    x: good.x + 2,
                    inputs: 8,
                    ..good
                },
            );
            // SAFETY: as above.
            is_refused("12 halves a row", unsafe {
                linear.forward(rung, &odd, stream)
            })?;
            // SAFETY: as above.
            is_refused("rows between 16 bytes", unsafe {
                linear.forward(rung, &shifted, stream)
            })?;
        }
    }
    for rung in BackwardRung::ALL {
        for (what, job) in [
            ("no gradient of the results", Backward { dy: 0, ..of_good }),
            ("no sums", Backward { sums: 0, ..of_good }),
            (
                "no room",
                Backward {
                    dsums: 0,
                    ..of_good
                },
            ),
            (
                "no weights",
                Backward {
                    weights: 0,
                    ..of_good
                },
            ),
            ("no inputs", Backward { x: 0, ..of_good }),
            (
                "a gradient between two numbers",
                Backward {
                    dx: of_good.dx + 2,
                    ..of_good
                },
            ),
            (
                "an activation that there is not",
                Backward {
                    activation: 9,
                    ..of_good
                },
            ),
        ] {
            // SAFETY: the call is refused.
            is_refused(what, unsafe { linear.backward(rung, &job, stream) })?;
        }
    }
    // Gradients that are not wanted are left out.
    case.upload_sums()?;
    for rung in BackwardRung::ALL {
        case.poison_gradients()?;
        let job = Backward {
            dx: 0,
            dbias: 0,
            weights: 0,
            ..of_good
        };
        // SAFETY: the matrices are there; it is waited for.
        unsafe { linear.backward(rung, &job, stream) }.map_err(text)?;
        bench.wait();
        if case.dx.bytes()?.iter().any(|byte| *byte != POISON) {
            return Err(format!(
                "{rung:?}: a gradient that was not wanted was written"
            ));
        }
        let numbers =
            Kind::F32.numbers(&case.dweights.bytes()?[GUARD..][..case.dweights.count * 4]);
        if numbers.iter().any(|number| number.is_nan()) {
            return Err(format!(
                "{rung:?}: the gradient of the weights alone was not made"
            ));
        }
    }
    Ok(format!(
        "{refused} jobs refused; gradients that are not wanted are left out"
    ))
}
