//! Attention over memory of the GPU, every rung against sums of `f64`: shapes with edges, halves of both kinds,
//! streams, graphs, and refusals.
// UNSAFETY: launches take addresses of vectors.
#![allow(unsafe_code)]

mod case;

use self::case::Case;
use crate::bench::Bench;
use crate::gather::text;
use crate::limits::finish;
use crate::report::{Outcome, Report};
use nvme_course::flash::{
    AttentionShape, AttentionStep, FlashAttention, FlashParameters, VectorLayout,
};
use nvme_formats::f32_of_bf16;
use nvme_host::cuda::CudaGraph;

/// Bytes before and after results that no kernel may write.
const GUARD: usize = 256;
/// Content of results, workspaces and guards before a run: NaN, as a half and as a number.
const POISON: u8 = 0xFF;

/// Sequences, heads, heads of keys; queries, keys, elements.
const SHAPES: [([u32; 3], [u32; 3]); 20] = [
    ([1, 1, 1], [1, 1, 8]),
    ([1, 1, 1], [1, 1, 128]),
    ([1, 2, 1], [3, 0, 64]),
    ([2, 4, 2], [5, 5, 8]),
    ([1, 2, 2], [31, 33, 16]),
    ([1, 2, 1], [64, 64, 64]),
    ([1, 4, 4], [65, 65, 72]),
    ([1, 2, 1], [127, 127, 80]),
    ([1, 2, 2], [128, 128, 128]),
    ([1, 3, 1], [129, 129, 120]),
    ([1, 1, 1], [130, 515, 96]),
    ([1, 2, 1], [200, 77, 128]),
    ([3, 2, 2], [257, 300, 40]),
    ([1, 1, 1], [7, 2049, 128]),
    ([3, 16, 2], [1, 1000, 128]),
    ([2, 32, 1], [1, 257, 64]),
    ([1, 24, 8], [2, 63, 128]),
    ([2, 8, 8], [1, 1029, 112]),
    ([1, 17, 1], [3, 700, 24]),
    ([0, 2, 1], [4, 4, 64]),
];

pub fn all(report: &mut Report, bench: &Bench) {
    let attention = FlashAttention::load(&bench.gpu).map_err(text);
    for rung in AttentionStep::ALL {
        let name = format!("{rung:?}").to_lowercase();
        for (half, is_bf16) in [("bf16", true), ("f16", false)] {
            report.test(&format!("attention/{name}/shapes/{half}"), |_| {
                shapes(bench, attention.as_ref()?, rung, is_bf16)
            });
        }
        report.test(&format!("attention/{name}/same-bits"), |_| {
            same_bits(bench, attention.as_ref()?, rung)
        });
        report.test(&format!("attention/{name}/streams"), |_| {
            streams(bench, attention.as_ref()?, rung)
        });
        report.test(&format!("attention/{name}/graph"), |_| {
            graph(bench, attention.as_ref()?, rung)
        });
    }
    report.test("attention/large", |_| large(bench, attention.as_ref()?));
    report.test("attention/usage", |_| usage(bench, attention.as_ref()?));
}

fn heads([sequences, heads, kv_heads]: [u32; 3], sizes: [u32; 3], causal: bool) -> AttentionShape {
    let [query_tokens, key_tokens, head_elements] = sizes;
    AttentionShape {
        sequences,
        heads,
        kv_heads,
        query_tokens,
        key_tokens,
        head_elements,
        causal,
        scale: 2.0 / (head_elements as f32).sqrt(),
    }
}

fn shapes(
    bench: &Bench,
    attention: &FlashAttention,
    rung: AttentionStep,
    is_bf16: bool,
) -> Outcome<String> {
    let (mut done, mut worst) = (0, 0.0f64);
    for (index, (groups, sizes)) in SHAPES.into_iter().enumerate() {
        for causal in [false, true] {
            // Cases alternate between other strides, and counts.
            let by_token = (index + usize::from(causal)) % 2 == 1;
            let counts = by_token.then(|| {
                (0..groups[0])
                    .map(|at| sizes[1] * (at + 1) / (groups[0] + 1))
                    .collect()
            });
            let shape = (heads(groups, sizes, causal), is_bf16, by_token);
            let case = Case::new(bench, attention, rung, shape, counts, index as u64 + 1)?;
            worst = worst.max(case.run(bench, attention, rung)?);
            done += 1;
        }
    }
    Ok(format!("{done} shapes, at most {worst:.1e} off"))
}

/// Against the threads of the CPU, with many tiles.
fn large(bench: &Bench, attention: &FlashAttention) -> Outcome<String> {
    let shape = heads([2, 8, 2], [1100, 1500, 128], true);
    let mut worst = 0.0f32;
    for rung in AttentionStep::ALL {
        let case = Case::new(bench, attention, rung, (shape, true, false), None, 77)?;
        case.poison()?;
        case.start(attention, rung, bench.stream.handle())
            .map_err(text)?;
        bench.wait();
        let wanted = shape.attend(
            &case.queries.numbers,
            &case.keys.numbers,
            &case.values.numbers,
            None,
        );
        let bytes = case.bytes()?;
        let y = bytes[GUARD..].as_chunks::<2>().0;
        for (at, (found, wanted)) in y.iter().zip(wanted.map_err(text)?).enumerate() {
            let found = f32_of_bf16(u16::from_le_bytes(*found));
            let apart = (found - wanted).abs();
            if apart > 1.0 / 128.0 || found.is_nan() {
                return Err(format!("{rung:?}: element {at} is {found}, not {wanted}"));
            }
            worst = worst.max(apart);
        }
    }
    Ok(format!(
        "5 rungs of 16 heads of 1,100 x 1,500, at most {worst:.1e} off"
    ))
}

/// Every rung adds in a fixed order, so that its bits are the same each time.
fn same_bits(bench: &Bench, attention: &FlashAttention, rung: AttentionStep) -> Outcome<String> {
    let shape = heads([1, 4, 2], [3, 600, 64], true);
    let case = Case::new(bench, attention, rung, (shape, true, false), None, 5)?;
    case.run(bench, attention, rung)?;
    let first = case.bytes()?;
    for run in 0..20 {
        case.run(bench, attention, rung)?;
        if case.bytes()? != first {
            return Err(format!("run {run} has other bits"));
        }
    }
    Ok("20 runs".to_owned())
}

fn streams(bench: &Bench, attention: &FlashAttention, rung: AttentionStep) -> Outcome<String> {
    let streams = crate::gather::several_streams(bench, 4)?;
    let cases = (0..8u32).map(|at| {
        let shape = heads(
            [1, 4, 2],
            [at * 9 + 1, at * 40 + 3, 8 + 8 * at],
            at % 2 == 1,
        );
        Case::new(
            bench,
            attention,
            rung,
            (shape, at % 4 < 2, false),
            None,
            u64::from(at) + 9,
        )
    });
    let cases: Vec<Case> = cases.collect::<Outcome<_>>()?;
    for _ in 0..5 {
        for (case, stream) in cases.iter().zip(streams.iter().cycle()) {
            case.poison()?;
            case.start(attention, rung, stream.handle()).map_err(text)?;
        }
        for stream in &streams {
            finish(stream);
        }
        for case in &cases {
            case.check(rung)?;
        }
    }
    Ok("40 launches over 4 streams".to_owned())
}

/// A launch of a graph sees the vectors and counts that are in memory then.
fn graph(bench: &Bench, attention: &FlashAttention, rung: AttentionStep) -> Outcome<String> {
    let shape = heads([2, 4, 1], [2, 300, 64], true);
    let counts = Some(vec![300, 300]);
    let mut case = Case::new(bench, attention, rung, (shape, true, false), counts, 3)?;
    let captured = CudaGraph::capture(&bench.stream, |stream| case.start(attention, rung, stream));
    let (graph, ()) = captured.map_err(text)?;
    for round in 1..=3u32 {
        let (of_queries, of_keys) = shape.elements();
        case.queries.fill(of_queries, true, u64::from(round) + 50)?;
        case.keys.fill(of_keys, true, u64::from(round) + 60)?;
        let counts = vec![round * 70, 300 - round];
        let bytes: Vec<u8> = counts
            .iter()
            .flat_map(|count| count.to_le_bytes())
            .collect();
        case.of_counts.upload(0, &bytes).map_err(text)?;
        case.counts = Some(counts);
        case.spoil()?;
        case.workspace.fill(POISON).map_err(text)?;
        case.poison()?;
        graph.launch(&bench.stream).map_err(text)?;
        bench.wait();
        case.check(rung)?;
    }
    Ok("3 launches, other vectors and counts each".to_owned())
}

fn usage(bench: &Bench, attention: &FlashAttention) -> Outcome<String> {
    let shape = heads([1, 4, 2], [4, 600, 64], false);
    let case = Case::new(
        bench,
        attention,
        AttentionStep::Naive,
        (shape, true, false),
        None,
        1,
    )?;
    case.poison()?;
    let good = case.job;
    let moved = |by: u64, vectors: VectorLayout| VectorLayout {
        address: vectors.address + by,
        ..vectors
    };
    let bad = [
        ("no head", FlashParameters { heads: 0, ..good }),
        (
            "no head of keys",
            FlashParameters {
                kv_heads: 0,
                ..good
            },
        ),
        (
            "heads that are no multiple",
            FlashParameters {
                kv_heads: 3,
                ..good
            },
        ),
        (
            "no elements",
            FlashParameters {
                head_elements: 0,
                ..good
            },
        ),
        (
            "12 elements",
            FlashParameters {
                head_elements: 12,
                ..good
            },
        ),
        (
            "136 elements",
            FlashParameters {
                head_elements: 136,
                ..good
            },
        ),
        ("a scale of 0", FlashParameters { scale: 0.0, ..good }),
        (
            "a scale that is no number",
            FlashParameters {
                scale: f32::NAN,
                ..good
            },
        ),
        (
            "too many keys",
            FlashParameters {
                key_tokens: u32::MAX,
                ..good
            },
        ),
        (
            "queries between 16 bytes",
            FlashParameters {
                queries: moved(2, good.queries),
                ..good
            },
        ),
        (
            "keys at 0",
            FlashParameters {
                keys: VectorLayout {
                    address: 0,
                    ..good.keys
                },
                ..good
            },
        ),
        (
            "strides of 4",
            FlashParameters {
                values: VectorLayout {
                    token: 4,
                    ..good.values
                },
                ..good
            },
        ),
        (
            "counts between two words",
            FlashParameters { counts: 2, ..good },
        ),
    ];
    for rung in AttentionStep::ALL {
        for (what, job) in &bad {
            // SAFETY: the call is refused.
            let refused = unsafe { attention.attend(rung, job, bench.stream.handle()) };
            if refused.map_err(|error| error.exit_code()) != Err(2) {
                return Err(format!("{rung:?}: {what} is not refused"));
            }
        }
        let job = FlashParameters {
            workspace: 0,
            ..good
        };
        // SAFETY: as above, if a workspace is needed; else the vectors are valid until the wait below.
        let without = unsafe { attention.attend(rung, &job, bench.stream.handle()) };
        bench.wait();
        let needed = attention.workspace_bytes(rung, &job) > 0;
        if without.map_err(|error| error.exit_code()) != if needed { Err(2) } else { Ok(()) } {
            return Err(format!("{rung:?} without a workspace"));
        }
    }
    Ok(format!("{} jobs refused by each rung", bad.len()))
}
