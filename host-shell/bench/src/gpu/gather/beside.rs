//! A product of matrices alone, and while rows are gathered in another stream: what gathers take from a model.
// UNSAFETY: launches kernels over the fixture's own memory.
#![allow(unsafe_code)]

use super::graphs::late;
use super::{GatherCase, GatherFixture, PATIENCE};
use crate::measure::median;
use nvme_compute_kernel::matmul::{MMA, MatmulParameters, PTX};
use nvme_cuda::{DeviceMemory, Gpu, KernelFunction, LaunchSize, Module, Stream, StreamEvent};
use nvme_driver::error::{Error, Result};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time that the products of a measurement take together, about.
const MEASURED: Duration = Duration::from_millis(300);
/// Most products of a measurement.
const MOST: u64 = 10_000;
/// Time from one lookup to the next.
const LOOKUP_EVERY: Duration = Duration::from_micros(200);
/// Most elements of a matrix.
const MOST_ELEMENTS: u64 = 1 << 31;

/// Sizes of a product: `m` rows and `n` columns of sums with `k` terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductShape {
    /// Rows of the result.
    pub m: u32,
    /// Columns of the result.
    pub n: u32,
    /// Terms of each sum.
    pub k: u32,
}

/// A product of bf16 matrices in GPU memory, by tensor cores.
pub(super) struct ProductBench {
    shape: ProductShape,
    module: Module,
    function: KernelFunction,
    stream: Stream,
    /// The two factors and the result.
    memory: [DeviceMemory; 3],
}

impl ProductBench {
    pub(super) fn new(gpu: &Arc<Gpu>, shape: ProductShape) -> Result<Self> {
        let ProductShape { m, n, k } = shape;
        let bytes = |rows: u32, columns: u32| {
            let elements = u64::from(rows) * u64::from(columns);
            match elements {
                1..=MOST_ELEMENTS => Ok(elements as usize * 2),
                _ => Err(Error::usage(
                    format!("a matrix of {rows} x {columns} elements is not multiplied here"),
                    "use sizes of 1 and more, and at most 2^31 elements in a matrix",
                )),
            }
        };
        let memory = [bytes(m, k)?, bytes(k, n)?, bytes(m, n)?];
        let module = Module::embedded(gpu, PTX.as_bytes())?;
        let bench = Self {
            shape,
            function: module.function_with_shared("nvme_matmul_mma", MMA.shared_bytes)?,
            module,
            stream: Stream::new(gpu)?,
            memory: [
                DeviceMemory::new(gpu, memory[0])?,
                DeviceMemory::new(gpu, memory[1])?,
                DeviceMemory::new(gpu, memory[2])?,
            ],
        };
        // Zeros would take less power than a model's numbers, and let the GPU run faster.
        bench.memory[0].fill(0x3F)?;
        bench.memory[1].fill(0x3E)?;
        Ok(bench)
    }

    fn launch(&self) -> Result<()> {
        let ProductShape { m, n, k } = self.shape;
        let [a, b, c] = self.memory.each_ref().map(DeviceMemory::address);
        let product = MatmulParameters {
            a,
            b,
            c,
            a_stride: k.into(),
            b_stride: n.into(),
            c_stride: n.into(),
            m,
            n,
            k,
            is_bf16: 1,
            is_wide: 0,
            reserved: 0,
        };
        let blocks = LaunchSize {
            count: u32::try_from(MMA.count(m, n)).unwrap_or(u32::MAX),
            threads: MMA.threads,
            shared_bytes: MMA.shared_bytes,
        };
        // SAFETY: the kernel takes these parameters; the memory is our own and outlives the launch: it is waited for.
        unsafe {
            let stream = self.stream.handle();
            self.module
                .launch_blocks(stream, self.function, blocks, &product)
        }
    }

    /// Measures the milliseconds of one of `count` products. `beside` is called until they have ended.
    fn measure(&self, count: u64, mut beside: impl FnMut() -> Result<()>) -> Result<f64> {
        let begin = StreamEvent::record(&self.stream)?;
        for _ in 0..count {
            self.launch()?;
        }
        let end = StreamEvent::record(&self.stream)?;
        let mut result = Ok(());
        let began = Instant::now();
        while result.is_ok() && !self.stream.is_done()? && began.elapsed() < PATIENCE {
            result = beside();
        }
        self.stream.wait(PATIENCE, || Ok(()))?;
        result?;
        Ok(end.seconds_since(&begin)? * 1e3 / count as f64)
    }
}

impl GatherFixture {
    /// Measures products alone, beside gathers of all rows one after the other, and beside a gather of the first number
    /// of rows of `--graph-rows` in a graph every 200 us.
    pub(super) fn beside_product(
        &self,
        case: &GatherCase,
        product: &ProductBench,
    ) -> Result<Value> {
        let one = product.measure(1, || Ok(()))?;
        let count = (MEASURED.as_secs_f64() * 1e3 / one.max(1e-3)) as u64;
        let count = count.clamp(1, MOST);
        let rows = self
            .job
            .graphs
            .rows
            .first()
            .copied()
            .unwrap_or(1)
            .min(case.count);
        let (graph, pending) = self.whole(case, rows)?;
        let (mut alone, mut long, mut few) = (Vec::new(), Vec::new(), Vec::new());
        let (mut gathered, mut seconds, mut lookups) = (0, 0.0, Vec::new());
        for _ in 0..self.job.cases.runs {
            alone.push(product.measure(count, || Ok(()))?);
            let began = Instant::now();
            long.push(product.measure(count, || {
                self.gather(case, None)?;
                gathered += case.count;
                Ok(())
            })?);
            seconds += began.elapsed().as_secs_f64();
            self.verify(case)?;
            few.push(product.measure(count, || {
                let began = Instant::now();
                lookups.push(self.replay(&graph, Some(&pending))?);
                while began.elapsed() < LOOKUP_EVERY {
                    std::hint::spin_loop();
                }
                Ok(())
            })?);
        }
        self.replay(&graph, Some(&pending))?;
        self.verify_first(case, rows)?;
        let ProductShape { m, n, k } = product.shape;
        let ms = median(&alone);
        Ok(json!({
            "m": m, "n": n, "k": k, "ms": ms,
            "of_it_beside_gathers": median(&long) / ms, "rows_per_s": gathered as f64 / seconds,
            "of_it_beside_lookups": median(&few) / ms,
            "lookup_rows": rows, "lookups": lookups.len(),
            "lookup_us_p50": median(&lookups), "lookup_us_p99": late(&lookups),
        }))
    }
}
