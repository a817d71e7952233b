//! The ladder, measured: every rung, the CPU and cuBLAS in turns in one run, each product checked.
// UNSAFETY: launches over this module's own memory.
#![allow(unsafe_code)]

use super::cpu::{MatmulShape, matmul_cpu, matmul_cpu_blocked};
use super::{MatmulLadder, MatmulOperands, MatmulStep, MatrixElement, MatrixOperand};
use nvme_host::cuda::{
    BlasElement, BlasProduct, CublasHandle, DeviceMemory, Gpu, Stream, StreamEvent,
};
use nvme_host::{Error, Result};
use nvme_units::SplitMix;
use rayon::prelude::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Deadline of a product.
const LIMIT: Duration = Duration::from_secs(60);
/// Rough number of operations of a run: a product that has fewer is repeated.
const OPERATIONS: f64 = 2e12;
/// Largest number of products of a run.
const MOST_REPEATS: u32 = 64;
/// Elements of each product that are compared with sums of f64.
const SAMPLES: usize = 256;
/// Largest sides of matrices that the CPU multiplies: by one thread, and by blocks.
const MOST_ON_CPU: [u32; 2] = [512, 4096];

/// Workload of the measurement: square matrices.
#[derive(Clone, Debug)]
pub struct LadderJob {
    /// Their sides.
    pub sides: Vec<u32>,
    /// Number of runs of each implementation, after one that is not counted.
    pub runs: usize,
    /// Seed of the matrices.
    pub seed: u64,
}

/// Implementation that multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatmulMethod {
    /// [`matmul_cpu`].
    Cpu,
    /// [`matmul_cpu_blocked`].
    CpuBlocked,
    /// A kernel of the ladder.
    Rung(MatmulStep),
    /// cuBLAS.
    Cublas,
}

impl MatmulMethod {
    /// Returns the name as people write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::CpuBlocked => "cpu_blocked",
            Self::Rung(rung) => rung.name(),
            Self::Cublas => "cublas",
        }
    }
}

/// Measurements of one implementation with matrices of one size.
#[derive(Clone, Debug)]
pub struct LadderCase {
    /// Implementation that multiplied.
    pub way: MatmulMethod,
    /// Sides of the matrices.
    pub side: u32,
    /// Element type of all three matrices.
    pub element: MatrixElement,
    /// Seconds of each run.
    pub seconds: Vec<f64>,
    /// The largest relative error of a sampled element over all runs: its error divided by the sum of the absolute
    /// values of the products that it adds.
    pub error: f64,
}

impl LadderCase {
    /// Returns the number of floating-point operations.
    pub fn operations(&self) -> f64 {
        2.0 * f64::from(self.side).powi(3)
    }

    /// Returns the number of bytes of the three matrices.
    pub fn bytes(&self) -> f64 {
        3.0 * f64::from(self.side).powi(2) * self.element.bytes() as f64
    }

    /// Returns the error that its element may have.
    pub fn allowed(&self) -> f64 {
        allowed(self.element)
    }
}

/// Results of the measurement.
#[derive(Clone, Debug)]
pub struct LadderReport {
    /// Cases in the order of the sizes; for each size f32 first, and the kernels from the simplest to the
    /// fastest.
    pub cases: Vec<LadderCase>,
    /// cuBLAS's version, or the reason why it was not measured.
    pub cublas: std::result::Result<i32, String>,
    /// Threads of the CPU.
    pub threads: usize,
    /// Registers and bytes of local memory of each rung of this GPU.
    pub costs: Vec<(MatmulStep, (u32, u32))>,
}

/// Measures the ladder on `gpu`; `watch` is called before each size and element type, and may end the run.
///
/// # Errors
/// The error that keeps a product from running; a product with a wrong result; the errors of `watch`.
pub fn measure(
    gpu: &Arc<Gpu>,
    job: &LadderJob,
    watch: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<LadderReport> {
    let rig = LadderFixture {
        ladder: MatmulLadder::load(gpu)?,
        blas: CublasHandle::load(gpu),
        stream: Stream::new(gpu)?,
        gpu: Arc::clone(gpu),
        runs: job.runs,
    };
    let rungs = || {
        MatmulStep::ALL
            .into_iter()
            .filter(|rung| rig.ladder.has(*rung))
    };
    let mut cases = Vec::new();
    for side in &job.sides {
        for element in [MatrixElement::F32, MatrixElement::Bf16] {
            watch(&format!("{side} {}", element.name()))?;
            cases.extend(rig.cases(*side, element, job.seed)?);
        }
    }
    let cost = |rung| Ok((rung, rig.ladder.cost(rung)?));
    Ok(LadderReport {
        cases,
        cublas: match &rig.blas {
            Ok(blas) => Ok(blas.version()),
            Err(error) => Err(error.to_string()),
        },
        threads: rayon::current_num_threads(),
        costs: rungs().map(cost).collect::<Result<_>>()?,
    })
}

struct LadderFixture {
    ladder: MatmulLadder,
    blas: Result<CublasHandle>,
    stream: Stream,
    gpu: Arc<Gpu>,
    runs: usize,
}

/// Two factors; on the CPU they have the values that the elements hold.
struct MatrixFactors {
    a: Vec<f32>,
    b: Vec<f32>,
    side: usize,
    element: MatrixElement,
}

/// A sampled element of the product: its index, its sum, and the sum of its products' absolute values.
type Sample = (usize, f64, f64);

impl MatrixFactors {
    fn new(side: u32, element: MatrixElement, seed: u64) -> Self {
        let side = side as usize;
        let matrix = |seed: u64| {
            let mut numbers = vec![0.0; side * side];
            let rows = numbers.par_chunks_mut(side.max(1)).enumerate();
            rows.for_each(|(row, numbers)| {
                let mut random = SplitMix::new(seed ^ (row as u64) << 20);
                let mut held = Vec::with_capacity(4);
                for number in numbers {
                    held.clear();
                    let unit = (random.next_word() >> 40) as f32 / (1 << 23) as f32;
                    element.write(unit - 1.0, &mut held);
                    *number = element.read(&held);
                }
            });
            numbers
        };
        Self {
            a: matrix(seed),
            b: matrix(!seed),
            side,
            element,
        }
    }

    fn samples(&self, seed: u64) -> Vec<Sample> {
        let mut random = SplitMix::new(seed);
        let elements = (self.side * self.side) as u64;
        let places = (0..SAMPLES).map(|_| random.below(elements) as usize);
        let places: Vec<usize> = places.collect();
        let sample = |at: usize| {
            let (row, column) = (at / self.side, at % self.side);
            let of_a = self.a[row * self.side..][..self.side].iter();
            let of_b = self.b[column..].iter().step_by(self.side);
            let terms = of_a.zip(of_b).map(|(a, b)| f64::from(*a) * f64::from(*b));
            let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term| {
                (sum + term, size + term.abs())
            });
            (at, sum, size)
        };
        places.into_par_iter().map(sample).collect()
    }

    fn bytes(&self, numbers: &[f32]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(numbers.len() * self.element.bytes() as usize);
        for number in numbers {
            self.element.write(*number, &mut bytes);
        }
        bytes
    }
}

/// Returns the largest error of the samples.
///
/// # Errors
/// [`Error::Internal`] for an element that was not written, or is too far from its sum.
fn check(
    way: MatmulMethod,
    element: MatrixElement,
    bytes: &[u8],
    samples: &[Sample],
) -> Result<f64> {
    let size = element.bytes() as usize;
    // Poison is NaN in each kind of element.
    let unwritten = bytes
        .par_chunks_exact(size)
        .position_first(|bytes| element.read(bytes).is_nan());
    if let Some(at) = unwritten {
        let what = format!("element {at} of the product by {} is no number", way.name());
        return Err(Error::internal(what));
    }
    let mut worst = 0.0f64;
    for (at, sum, sizes) in samples {
        let found = f64::from(element.read(&bytes[at * size..]));
        let error = (found - sum).abs() / sizes.max(f64::MIN_POSITIVE);
        if error > allowed(element) {
            return Err(Error::internal(format!(
                "element {at} of the product by {} is {found}, not {sum}",
                way.name()
            )));
        }
        worst = worst.max(error);
    }
    Ok(worst)
}

fn allowed(element: MatrixElement) -> f64 {
    match element {
        MatrixElement::F32 => 1e-5,
        MatrixElement::F16 | MatrixElement::Bf16 => 1e-2,
    }
}

impl LadderFixture {
    /// Returns all implementations with matrices of one size and element type.
    fn cases(&self, side: u32, element: MatrixElement, seed: u64) -> Result<Vec<LadderCase>> {
        let mut cases = match element {
            MatrixElement::F32 => self.on_cpu(side, seed)?,
            _ => Vec::new(),
        };
        let factors = MatrixFactors::new(side, element, seed);
        let samples = factors.samples(seed);
        let upload = |numbers: &[f32]| -> Result<DeviceMemory> {
            let bytes = factors.bytes(numbers);
            let memory = DeviceMemory::new(&self.gpu, bytes.len())?;
            memory.upload(0, &bytes)?;
            Ok(memory)
        };
        let (a, b) = (upload(&factors.a)?, upload(&factors.b)?);
        let c = DeviceMemory::new(&self.gpu, a.len())?;
        let product = product(side, element, [&a, &b, &c]);
        let is_half = element != MatrixElement::F32;
        let rungs = MatmulStep::ALL
            .into_iter()
            .filter(|rung| rung.has_tensor_cores() == is_half && self.ladder.has(*rung));
        let mut ways: Vec<MatmulMethod> = rungs.map(MatmulMethod::Rung).collect();
        ways.extend(self.blas.is_ok().then_some(MatmulMethod::Cublas));
        let first = cases.len();
        cases.extend(ways.iter().map(|way| LadderCase {
            way: *way,
            side,
            element,
            seconds: Vec::new(),
            error: 0.0,
        }));
        let mut bytes = vec![0; c.len()];
        for run in 0..=self.runs {
            for case in &mut cases[first..] {
                c.fill(0xFF)?;
                let seconds = self.timed(case.way, &product)?;
                c.download(0, &mut bytes)?;
                let error = check(case.way, element, &bytes, &samples)?;
                case.error = case.error.max(error);
                if run > 0 {
                    case.seconds.push(seconds);
                }
            }
        }
        Ok(cases)
    }

    /// Measures the seconds of one of several products that follow each other. One product runs before them and is not
    /// counted: meanwhile the host enqueues the others.
    fn timed(&self, way: MatmulMethod, product: &MatmulOperands) -> Result<f64> {
        let operations = 2.0 * f64::from(product.m) * f64::from(product.n) * f64::from(product.k);
        let repeats = ((OPERATIONS / operations) as u32).clamp(1, MOST_REPEATS);
        self.start(way, product)?;
        let begin = StreamEvent::record(&self.stream)?;
        for _ in 0..repeats {
            self.start(way, product)?;
        }
        let end = StreamEvent::record(&self.stream)?;
        self.stream.wait(LIMIT, || Ok(()))?;
        Ok(end.seconds_since(&begin)? / f64::from(repeats))
    }

    fn start(&self, way: MatmulMethod, product: &MatmulOperands) -> Result<()> {
        let MatmulMethod::Rung(rung) = way else {
            return self.by_cublas(product);
        };
        // SAFETY: the memory belongs to the caller of `timed`, which waits for the products.
        unsafe {
            let ladder = &self.ladder;
            ladder.matmul(rung, product, self.stream.handle())
        }
    }

    fn by_cublas(&self, product: &MatmulOperands) -> Result<()> {
        let element = |element| match element {
            MatrixElement::F32 => BlasElement::F32,
            MatrixElement::F16 => BlasElement::F16,
            MatrixElement::Bf16 => BlasElement::Bf16,
        };
        let Ok(blas) = &self.blas else {
            return Err(Error::internal("a product by cuBLAS without cuBLAS"));
        };
        let of_blas = BlasProduct {
            addresses: [product.a.address, product.b.address, product.c.address],
            shape: [product.m, product.n, product.k],
            factors: element(product.factors),
            result: element(product.result),
        };
        // SAFETY: as in `start`.
        unsafe { blas.multiply(&of_blas, &self.stream) }
    }

    /// Returns the CPU's implementations, with matrices that are not too large for it.
    fn on_cpu(&self, side: u32, seed: u64) -> Result<Vec<LadderCase>> {
        type Multiply = fn(&[f32], &[f32], &mut [f32], MatmulShape);
        let ways: [(MatmulMethod, Multiply); 2] = [
            (MatmulMethod::Cpu, matmul_cpu),
            (MatmulMethod::CpuBlocked, matmul_cpu_blocked),
        ];
        let mut cases = Vec::new();
        for ((way, multiply), most) in ways.into_iter().zip(MOST_ON_CPU) {
            let side = side.min(most);
            let factors = MatrixFactors::new(side, MatrixElement::F32, seed);
            let samples = factors.samples(seed);
            let (m, n, k) = (factors.side, factors.side, factors.side);
            let mut c = vec![0.0; m * n];
            let mut case = LadderCase {
                way,
                side,
                element: MatrixElement::F32,
                seconds: Vec::new(),
                error: 0.0,
            };
            for run in 0..=self.runs {
                c.fill(f32::NAN);
                let begin = Instant::now();
                multiply(&factors.a, &factors.b, &mut c, MatmulShape { m, n, k });
                let seconds = begin.elapsed().as_secs_f64();
                let error = check(way, MatrixElement::F32, &factors.bytes(&c), &samples)?;
                case.error = case.error.max(error);
                if run > 0 {
                    case.seconds.push(seconds);
                }
            }
            cases.push(case);
        }
        Ok(cases)
    }
}

/// Returns the parameters of a product of square matrices without gaps.
fn product(side: u32, element: MatrixElement, memory: [&DeviceMemory; 3]) -> MatmulOperands {
    let [a, b, c] = memory.map(|memory| MatrixOperand {
        address: memory.address(),
        stride: side.into(),
    });
    MatmulOperands {
        a,
        b,
        c,
        m: side,
        n: side,
        k: side,
        factors: element,
        result: element,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_or_missing_element_ends_the_run() {
        let factors = MatrixFactors::new(33, MatrixElement::Bf16, 5);
        let samples = factors.samples(5);
        let mut c = vec![0.0; 33 * 33];
        let shape = MatmulShape {
            m: 33,
            n: 33,
            k: 33,
        };
        matmul_cpu_blocked(&factors.a, &factors.b, &mut c, shape);
        let checked = |c: &[f32]| {
            check(
                MatmulMethod::Cublas,
                MatrixElement::Bf16,
                &factors.bytes(c),
                &samples,
            )
        };
        assert!(checked(&c).unwrap() > 0.0);
        let (at, sum, size) = samples[0];
        let with = |value: f64| {
            let mut wrong = c.clone();
            wrong[at] = value as f32;
            checked(&wrong).unwrap_err().to_string()
        };
        assert!(with(sum + 0.02 * size).contains(&format!("element {at} ")));
        assert!(with(f64::NAN).contains("no number"));
    }
}
