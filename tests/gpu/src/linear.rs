//! Linear layers and their gradients, every rung against sums of `f64`: shapes with edges, bits, streams, graphs, and
//! what is refused.
// UNSAFETY: launches take addresses of vectors.
#![allow(unsafe_code)]

mod case;

use self::case::{Case, Kind, Matrix};
use crate::bench::Bench;
use crate::gather::text;
use crate::limits::finish;
use crate::report::{Outcome, Report};
use nvme_course::linear::{
    ActivationKind, BackwardParameters, BackwardRung, ForwardParameters, ForwardRung, LinearKernels,
};
use nvme_host::cuda::CudaGraph;

/// Bytes before and after each matrix that no kernel may write.
const GUARD: usize = 256;
/// Content of matrices and guards before a run: NaN.
const POISON: u8 = 0xFF;
/// Largest error of a number against the sum of `f64`, relative to the sum of the absolute values of its terms.
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

/// Returns the activations of shape number `index`: of a large one a single activation, because the stand-in runs the
/// lanes of a launch as coroutines, which take long.
fn activations(index: usize, [tokens, _, outputs]: [u32; 3]) -> Vec<ActivationKind> {
    match tokens * outputs <= 1200 {
        true => ActivationKind::ALL.to_vec(),
        false => vec![ActivationKind::ALL[index % 4]],
    }
}

fn forward_shapes(bench: &Bench, linear: &LinearKernels, rung: ForwardRung) -> Outcome<String> {
    let (mut done, mut worst) = (0, 0.0f64);
    for (index, shape) in SHAPES.into_iter().enumerate() {
        if rung.is_mixed() && !shape[1].is_multiple_of(8) {
            continue;
        }
        for activation in activations(index, shape) {
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
        for activation in activations(index, shape) {
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
    let case = Case::new(bench, [300, 136, 260], ActivationKind::Gelu, Kind::F32, 2)?;
    case.upload_sums()?;
    let mut first: Option<Vec<Vec<u8>>> = None;
    for run in 0..10 {
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
    Ok("10 runs have the same bits".to_owned())
}

fn streams(bench: &Bench, linear: &LinearKernels) -> Outcome<String> {
    let streams = crate::gather::several_streams(bench, 4)?;
    let cases = (0..8u32).map(|at| {
        let shape = [at * 31 + 1, at * 24 + 8, at * 50 + 3];
        Case::new(
            bench,
            shape,
            ActivationKind::ALL[at as usize % 4],
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
        let mut case = Case::new(bench, [70, 40, 90], ActivationKind::Silu, Kind::F32, 4)?;
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
    let case = Case::new(bench, [4, 12, 8], ActivationKind::Gelu, Kind::F32, 1)?;
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
            ("no inputs", ForwardParameters { x: 0, ..good }),
            ("no weights", ForwardParameters { weights: 0, ..good }),
            ("no results", ForwardParameters { y: 0, ..good }),
            (
                "inputs between two numbers",
                ForwardParameters {
                    x: good.x + 1,
                    ..good
                },
            ),
            (
                "results between two numbers",
                ForwardParameters {
                    y: good.y + 1,
                    ..good
                },
            ),
            (
                "biases between two numbers",
                ForwardParameters { bias: 1, ..good },
            ),
            (
                "an activation that there is not",
                ForwardParameters {
                    activation: 4,
                    ..good
                },
            ),
            (
                "too many tiles",
                ForwardParameters {
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
                ForwardParameters { inputs: 12, ..good },
                ForwardParameters {
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
            (
                "no gradient of the results",
                BackwardParameters { dy: 0, ..of_good },
            ),
            ("no sums", BackwardParameters { sums: 0, ..of_good }),
            (
                "no room",
                BackwardParameters {
                    dsums: 0,
                    ..of_good
                },
            ),
            (
                "no weights",
                BackwardParameters {
                    weights: 0,
                    ..of_good
                },
            ),
            ("no inputs", BackwardParameters { x: 0, ..of_good }),
            (
                "a gradient between two numbers",
                BackwardParameters {
                    dx: of_good.dx + 2,
                    ..of_good
                },
            ),
            (
                "an activation that there is not",
                BackwardParameters {
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
        let job = BackwardParameters {
            dx: 0,
            dbias: 0,
            weights: 0,
            ..of_good
        };
        // SAFETY: the matrices are valid until the wait below.
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
