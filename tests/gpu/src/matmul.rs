//! Products of matrices by the ladder: every rung with many shapes against sums of `f64`, bytes around the result,
//! streams, a graph, and refusals.
// UNSAFETY: products take addresses of matrices.
#![allow(unsafe_code)]

use crate::bench::Bench;
use crate::gather::{dice, text};
use crate::limits::finish;
use crate::report::{Outcome, Report};
use nvme_course::ladder::{MatmulLadder, MatmulOperands, MatmulStep, MatrixElement, MatrixOperand};
use nvme_host::cuda::{CudaGraph, DeviceMemory, Stream};

const ABSENT: &str = "this GPU has no such rung";

/// Bytes of the poison: NaN in each kind of element.
const POISON: u8 = 0xFF;
/// Elements before and after each matrix.
const GUARD: usize = 64;
/// Rows, columns and terms.
const SHAPES: [[u32; 3]; 14] = [
    [0, 5, 7],
    [5, 0, 7],
    [3, 5, 0],
    [1, 1, 1],
    [1, 1, 1000],
    [7, 1, 33],
    [1, 300, 17],
    [33, 65, 31],
    [128, 256, 64],
    [129, 257, 63],
    [255, 511, 127],
    [300, 300, 16],
    [64, 1000, 520],
    [515, 130, 260],
];

pub fn all(report: &mut Report, bench: &Bench) {
    for rung in MatmulStep::ALL {
        let name = |what: &str| format!("matmul/{}/{what}", rung.name());
        for (what, layout) in [
            (
                "packed",
                Layout {
                    pads: [0; 3],
                    offsets: [0; 3],
                    rounds: false,
                },
            ),
            (
                "aligned-rows",
                Layout {
                    pads: [8, 16, 8],
                    offsets: [8, 16, 8],
                    rounds: true,
                },
            ),
            (
                "unaligned",
                Layout {
                    pads: [3, 1, 5],
                    offsets: [1, 3, 2],
                    rounds: false,
                },
            ),
            (
                "unaligned-result",
                Layout {
                    pads: [0, 0, 5],
                    offsets: [0, 8, 1],
                    rounds: true,
                },
            ),
        ] {
            report.test(&name(what), |_| shapes(bench, rung, layout));
        }
        report.test(&name("large"), |_| large(bench, rung));
        report.test(&name("streams"), |_| streams(bench, rung));
        report.test(&name("graph"), |_| graph(bench, rung));
    }
    report.test("matmul/usage", |_| usage(bench));
}

/// Layout of the matrices `a`, `b` and `c`: elements behind each row and before the first one.
#[derive(Clone, Copy)]
struct Layout {
    pads: [u64; 3],
    offsets: [usize; 3],
    /// Rows begin at multiples of 8 elements.
    rounds: bool,
}

/// A matrix on the CPU, with the numbers that its elements hold, and on the GPU.
struct Held {
    numbers: Vec<f32>,
    memory: DeviceMemory,
    operand: MatrixOperand,
    offset: usize,
    element: MatrixElement,
}

impl Held {
    /// `which` is 0 to 2 for `a`, `b` and `c`; `c` is poisoned.
    fn new(
        bench: &Bench,
        (rows, columns): (u32, u32),
        element: MatrixElement,
        layout: Layout,
        which: usize,
        seed: u64,
    ) -> Outcome<Self> {
        let mut stride = u64::from(columns) + layout.pads[which];
        if layout.rounds && which < 2 {
            stride = stride.next_multiple_of(8);
        }
        let offset = GUARD + layout.offsets[which];
        let count = offset + rows as usize * stride as usize + GUARD;
        let mut throw = dice(seed);
        let mut bytes = Vec::new();
        for _ in 0..count {
            element.write(throw(2001) as f32 / 1000.0 - 1.0, &mut bytes);
        }
        if which == 2 {
            bytes.fill(POISON);
        }
        let size = element.bytes() as usize;
        let memory = DeviceMemory::new(&bench.gpu, bytes.len()).map_err(text)?;
        memory.upload(0, &bytes).map_err(text)?;
        Ok(Self {
            numbers: bytes
                .chunks(size)
                .map(|bytes| element.read(bytes))
                .collect(),
            operand: MatrixOperand {
                address: memory.address() + (offset * size) as u64,
                stride,
            },
            memory,
            offset,
            element,
        })
    }

    fn at(&self, row: usize, column: usize) -> f32 {
        self.numbers[self.offset + row * self.operand.stride as usize + column]
    }
}

/// A product and its matrices.
struct Work {
    a: Held,
    b: Held,
    c: Held,
    product: MatmulOperands,
}

impl Work {
    fn new(
        bench: &Bench,
        [m, n, k]: [u32; 3],
        (factors, result): (MatrixElement, MatrixElement),
        layout: Layout,
        seed: u64,
    ) -> Outcome<Self> {
        let a = Held::new(bench, (m, k), factors, layout, 0, seed)?;
        let b = Held::new(bench, (k, n), factors, layout, 1, seed ^ 0x5555)?;
        let c = Held::new(bench, (m, n), result, layout, 2, 0)?;
        let product = MatmulOperands {
            a: a.operand,
            b: b.operand,
            c: c.operand,
            m,
            n,
            k,
            factors,
            result,
        };
        Ok(Self { a, b, c, product })
    }

    fn start(&self, ladder: &MatmulLadder, rung: MatmulStep, stream: u64) -> Outcome<()> {
        // SAFETY: the matrices outlive the product, which is waited for.
        unsafe { ladder.matmul(rung, &self.product, stream) }.map_err(text)
    }

    /// Checks every element against its sum, or each of some columns, and that everything around the result is still
    /// poison.
    fn check(&self, step: usize) -> Outcome<()> {
        let element = self.c.element;
        let size = element.bytes() as usize;
        let mut bytes = vec![0; self.c.memory.len()];
        self.c.memory.download(0, &mut bytes).map_err(text)?;
        let (m, n, k) = (
            self.product.m as usize,
            self.product.n as usize,
            self.product.k as usize,
        );
        let allowed = match element {
            MatrixElement::F32 => 1e-5,
            _ => 1e-2,
        };
        let stride = self.c.operand.stride as usize;
        let mut outside = bytes.clone();
        for row in 0..m {
            let begin = (self.c.offset + row * stride) * size;
            outside[begin..begin + n * size].fill(POISON);
            for column in (0..n).step_by(step) {
                let term =
                    |i: usize| f64::from(self.a.at(row, i)) * f64::from(self.b.at(i, column));
                let sum: f64 = (0..k).map(term).sum();
                let sizes: f64 = (0..k).map(|i| term(i).abs()).sum();
                let found = element.read(&bytes[begin + column * size..]);
                let error = (f64::from(found) - sum).abs();
                if found.is_nan() || error > allowed * sizes {
                    return Err(format!(
                        "{:?}: {row}, {column} is {found}, not {sum}",
                        self.product
                    ));
                }
            }
        }
        match outside.iter().position(|byte| *byte != POISON) {
            Some(at) => Err(format!(
                "{:?}: byte {at} beside the result was written",
                self.product
            )),
            None => Ok(()),
        }
    }
}

/// Returns the element types that a rung multiplies, with those of its results.
fn elements(rung: MatmulStep) -> Vec<(MatrixElement, MatrixElement)> {
    match rung.has_tensor_cores() {
        false => vec![(MatrixElement::F32, MatrixElement::F32)],
        true => vec![
            (MatrixElement::Bf16, MatrixElement::Bf16),
            (MatrixElement::Bf16, MatrixElement::F32),
            (MatrixElement::F16, MatrixElement::F16),
            (MatrixElement::F16, MatrixElement::F32),
        ],
    }
}

/// Returns the ladder; `None` if the GPU does not support the rung: `usage` tests the refusal.
fn ladder(bench: &Bench, rung: MatmulStep) -> Outcome<Option<MatmulLadder>> {
    let ladder = MatmulLadder::load(&bench.gpu).map_err(text)?;
    Ok(ladder.has(rung).then_some(ladder))
}

fn shapes(bench: &Bench, rung: MatmulStep, layout: Layout) -> Outcome<String> {
    let Some(ladder) = ladder(bench, rung)? else {
        return Ok(ABSENT.to_owned());
    };
    for elements in elements(rung) {
        for (seed, shape) in SHAPES.into_iter().enumerate() {
            let work = Work::new(bench, shape, elements, layout, seed as u64)?;
            work.start(&ladder, rung, bench.stream.handle())?;
            bench.wait();
            work.check(1)?;
        }
    }
    Ok(format!("{} products", elements(rung).len() * SHAPES.len()))
}

/// There are more tiles than the GPU runs at a time, and sums of many terms.
fn large(bench: &Bench, rung: MatmulStep) -> Outcome<String> {
    let Some(ladder) = ladder(bench, rung)? else {
        return Ok(ABSENT.to_owned());
    };
    let layout = Layout {
        pads: [0; 3],
        offsets: [0; 3],
        rounds: true,
    };
    for elements in elements(rung) {
        for shape in [[4100, 2060, 136], [200, 264, 8200]] {
            let work = Work::new(bench, shape, elements, layout, 9)?;
            work.start(&ladder, rung, bench.stream.handle())?;
            bench.wait();
            work.check(61)?;
        }
    }
    Ok(format!("{} products", elements(rung).len() * 2))
}

/// Four streams at once.
fn streams(bench: &Bench, rung: MatmulStep) -> Outcome<String> {
    let Some(ladder) = ladder(bench, rung)? else {
        return Ok(ABSENT.to_owned());
    };
    let layout = Layout {
        pads: [8; 3],
        offsets: [0; 3],
        rounds: true,
    };
    let elements = elements(rung)[0];
    let works = (0..4).map(|seed| {
        let work = Work::new(
            bench,
            [300 + seed * 7, 520, 264],
            elements,
            layout,
            seed.into(),
        )?;
        let stream = Stream::new(&bench.gpu).map_err(text)?;
        Ok((work, stream))
    });
    let works: Vec<(Work, Stream)> = works.collect::<Outcome<_>>()?;
    for _ in 0..8 {
        for (work, stream) in &works {
            work.start(&ladder, rung, stream.handle())?;
        }
    }
    for (work, stream) in &works {
        finish(stream);
        work.check(7)?;
    }
    Ok("32 products".to_owned())
}

/// A product that was captured, launched after the ladder was dropped, with other factors.
fn graph(bench: &Bench, rung: MatmulStep) -> Outcome<String> {
    let Some(ladder) = ladder(bench, rung)? else {
        return Ok(ABSENT.to_owned());
    };
    let layout = Layout {
        pads: [0; 3],
        offsets: [0; 3],
        rounds: true,
    };
    let elements = elements(rung)[0];
    let mut work = Work::new(bench, [260, 512, 136], elements, layout, 3)?;
    let capture = |stream: u64| {
        // SAFETY: the matrices outlive the graph.
        unsafe { ladder.matmul(rung, &work.product, stream) }
    };
    let (graph, ()) = CudaGraph::capture(&bench.stream, capture).map_err(text)?;
    drop(ladder);
    for seed in [3, 4] {
        let fresh = Held::new(bench, (260, 136), elements.0, layout, 0, seed)?;
        let mut bytes = Vec::new();
        fresh
            .numbers
            .iter()
            .for_each(|number| elements.0.write(*number, &mut bytes));
        work.a.memory.upload(0, &bytes).map_err(text)?;
        work.a.numbers = fresh.numbers;
        work.c.memory.fill(POISON).map_err(text)?;
        graph.launch(&bench.stream).map_err(text)?;
        bench.wait();
        work.check(1)?;
    }
    Ok("2 launches".to_owned())
}

/// Nothing is launched for refused arguments.
fn usage(bench: &Bench) -> Outcome<String> {
    let ladder = MatmulLadder::load(&bench.gpu).map_err(text)?;
    let layout = Layout {
        pads: [0; 3],
        offsets: [0; 3],
        rounds: false,
    };
    let halves = (MatrixElement::Bf16, MatrixElement::Bf16);
    let floats = (MatrixElement::F32, MatrixElement::F32);
    for rung in MatmulStep::ALL {
        let (right, wrong) = match rung.has_tensor_cores() {
            true => (halves, floats),
            false => (floats, halves),
        };
        let refused = |elements, change: fn(&mut MatmulOperands), why: &str| {
            let mut work = Work::new(bench, [16, 16, 16], elements, layout, 1)?;
            change(&mut work.product);
            match work.start(&ladder, rung, bench.stream.handle()) {
                Err(said) if said.contains(why) => {}
                other => return Err(format!("{}: {other:?}, not {why}", rung.name())),
            }
            bench.wait();
            let mut bytes = vec![0; work.c.memory.len()];
            work.c.memory.download(0, &mut bytes).map_err(text)?;
            match bytes.iter().all(|byte| *byte == POISON) {
                true => Ok(()),
                false => Err(format!(
                    "{}: a product that was refused was begun",
                    rung.name()
                )),
            }
        };
        refused(wrong, |_| {}, "does not multiply")?;
        refused(right, |p| p.a.stride = 15, "matrix a")?;
        refused(right, |p| p.b.address += 1, "matrix b")?;
        refused(right, |p| p.c.stride = u64::MAX / 2, "matrix c")?;
        if !ladder.has(rung) {
            refused(right, |_| {}, "has no wgmma")?;
        }
    }
    Ok("nothing was launched".to_owned())
}
