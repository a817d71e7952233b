//! The pipelines, and their results. A batch whose read failed is an error with the drive's status, and none of its
//! products is ever returned as a correct one.

use super::batches::{self, BatchCallbacks, PipelineBatch};
use super::by_cpu::{CpuEngine, MatrixReads};
use super::data::MatrixData;
use super::engine::{MatrixSource, PipelineEngine};
use super::trace::{PipelineTrace, WorkOverlap};
use super::{PipelineJob, PipelineName};
use hdrhistogram::Histogram;
use nvme_host::{Error, Result, Store};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tolerance of an element of vectors of mean square 1 after iterations.
const ITERATED: f64 = 2e-3;
/// Latencies above this are counted as this value.
const MOST_NS: u64 = 3_600_000_000_000;
/// Pause before a batch is tried again, so that a device that has just left is not polled in a busy loop.
const AGAIN: Duration = Duration::from_millis(20);

/// The runs of one source.
#[derive(Clone, Debug)]
pub struct SourceRuns {
    /// Source of the matrices.
    pub source: MatrixSource,
    /// Seconds of each run.
    pub seconds: Vec<f64>,
    /// Batches of a run.
    pub batches: u64,
    /// Bytes of matrices of a run.
    pub bytes: u64,
    /// Operations of a run.
    pub operations: f64,
    /// Overlap of reads and products in the last run.
    pub overlap: WorkOverlap,
}

/// Latencies and failures of a continuous pipeline.
#[derive(Clone, Debug)]
pub struct ContinuousRun {
    /// Nanoseconds of each batch from the start of its read to the end of its product.
    pub latencies_ns: Histogram<u64>,
    /// Number of batches that failed first and succeeded after a retry.
    pub failed: u64,
    /// Number of retries.
    pub retries: u64,
    /// The longest time from a failure to the product.
    pub longest_outage: Duration,
    /// Error of the last batch that failed.
    pub last_failure: Option<String>,
    /// True if the user ended the run before its time.
    pub is_interrupted: bool,
}

/// Results of a pipeline. Every product was compared with the CPU's.
#[derive(Clone, Debug)]
pub struct PipelineReport {
    /// One for each source.
    pub ways: Vec<SourceRuns>,
    /// Latencies and failures, for a continuous pipeline.
    pub continuous: Option<ContinuousRun>,
    /// Spans of the last run, of the first source.
    pub trace: PipelineTrace,
}

/// Progress callback: number of finished batches, number of all batches, and seconds of the run. Its errors end the
/// pipeline, except [`Error::Interrupted`] in a continuous one, which ends at once and reports.
pub type Progress<'p> = dyn FnMut(u64, u64, f64) -> Result<()> + 'p;

/// Runs `job` over `store`, whose beginning is overwritten unless its data are kept.
///
/// # Errors
/// [`Error::Usage`] for impossible sizes; reads that failed; [`Error::Mismatch`] for a wrong product.
pub fn run(
    store: &Arc<Store>,
    job: &PipelineJob,
    progress: &mut Progress<'_>,
) -> Result<PipelineReport> {
    job.shape.check()?;
    let rig = PipelineFixture {
        data: Arc::new(MatrixData::new(store, job)?),
        job,
    };
    match job.name {
        PipelineName::DirectNvmeToMatMul => rig.direct(progress),
        PipelineName::StreamedBatchProcessing => rig.sources(&[rig.best()], progress),
        PipelineName::IterativeComputation => rig.iterative(progress),
        PipelineName::DataSourceComparison => rig.sources(&rig.all(), progress),
        PipelineName::ContinuousProcessing => rig.continuous(progress),
    }
}

struct PipelineFixture<'j> {
    data: Arc<MatrixData>,
    job: &'j PipelineJob,
}

impl PipelineFixture<'_> {
    fn has_gpu(&self) -> bool {
        #[cfg(feature = "cuda")]
        return self.data.store.gpu().is_some();
        #[cfg(not(feature = "cuda"))]
        false
    }

    /// Returns the source that this library is made for.
    fn best(&self) -> MatrixSource {
        match self.has_gpu() {
            true => MatrixSource::Gpu,
            false => MatrixSource::Threads,
        }
    }

    fn all(&self) -> Vec<MatrixSource> {
        let mut all = vec![MatrixSource::Threads];
        if self.has_gpu() {
            all = vec![
                MatrixSource::Gpu,
                MatrixSource::Threads,
                MatrixSource::Pinned,
            ];
        }
        if self.job.file.is_some() {
            all.push(MatrixSource::File);
        }
        all.push(MatrixSource::Resident);
        all
    }

    fn engine(&self, source: MatrixSource) -> Result<Box<dyn PipelineEngine>> {
        let file = match (&self.job.file, source) {
            (Some(path), MatrixSource::File) => Some(self.data.file(path)?),
            _ => None,
        };
        let reads = MatrixReads {
            data: Arc::clone(&self.data),
            source,
            file,
            readers: self.job.readers,
        };
        #[cfg(feature = "cuda")]
        if self.has_gpu() {
            return Ok(Box::new(super::by_gpu::GpuEngine::new(
                reads,
                self.job.limit,
            )?));
        }
        Ok(Box::new(CpuEngine::new(reads, self.job.limit)?))
    }

    /// Computes the products of all matrices with the vectors.
    fn expected(&self) -> Vec<Vec<f64>> {
        let x = self.data.vectors();
        let parts = 0..self.job.shape.parts;
        parts.map(|part| self.data.products(part, &x)).collect()
    }

    fn way(&self, source: MatrixSource, batches: u64) -> SourceRuns {
        let bytes = match source {
            MatrixSource::Resident => 0,
            _ => self.job.shape.part_bytes() * batches,
        };
        SourceRuns {
            source,
            seconds: Vec::new(),
            batches,
            bytes,
            operations: self.job.shape.operations() * batches as f64,
            overlap: WorkOverlap::default(),
        }
    }

    /// Runs the direct pipeline: reads the vectors and a matrix from the drive, computes one product, and
    /// repeats.
    fn direct(&self, progress: &mut Progress<'_>) -> Result<PipelineReport> {
        let source = self.best();
        let (mut engine, expected) = (self.engine(source)?, self.expected());
        let mut way = self.way(source, 1);
        let mut trace = PipelineTrace::default();
        let parts = u64::from(self.job.shape.parts);
        for run in 0..=self.job.runs as u64 {
            progress(run, self.job.runs as u64 + 1, 0.0)?;
            engine.set_vectors(&vec![f32::NAN; self.data.x.len()])?;
            let part = (run % parts) as u32;
            let begin = Instant::now();
            engine.read_vectors()?;
            engine.read(run, 0, part)?;
            engine.multiply(0)?;
            let product = engine.take(0)?;
            let took = begin.elapsed().as_secs_f64();
            self.check(part, &product, &expected)?;
            trace = engine.trace();
            // The first run uses memory that was never touched, so that it is not counted.
            if run > 0 {
                way.seconds.push(took);
            }
        }
        way.overlap = trace.overlap();
        Ok(PipelineReport {
            ways: vec![way],
            continuous: None,
            trace,
        })
    }

    fn check(&self, part: u32, product: &[f32], expected: &[Vec<f64>]) -> Result<()> {
        let what = format!("the product of matrix {part}");
        let wanted = &expected[part as usize];
        self.data
            .check(&what, product, wanted, self.data.tolerance())
    }

    /// Runs the same batches from each of `sources`, in turns.
    fn sources(
        &self,
        sources: &[MatrixSource],
        progress: &mut Progress<'_>,
    ) -> Result<PipelineReport> {
        let (expected, batches) = (self.expected(), self.job.batches);
        let mut ways: Vec<(SourceRuns, Box<dyn PipelineEngine>)> = Vec::new();
        for source in sources {
            ways.push((self.way(*source, batches), self.engine(*source)?));
        }
        let total = batches * (self.job.runs as u64 + 1) * ways.len() as u64;
        let (mut done, mut first) = (0, PipelineTrace::default());
        for run in 0..=self.job.runs {
            for (index, (way, engine)) in ways.iter_mut().enumerate() {
                let begin = Instant::now();
                let mut more = |number: u64| {
                    progress(done + number, total, begin.elapsed().as_secs_f64())?;
                    Ok(number < batches)
                };
                let mut products = Vec::new();
                let mut ended = |_: &mut dyn PipelineEngine,
                                 batch: PipelineBatch,
                                 product: Result<Vec<f32>>| {
                    products.push((batch.part, product?));
                    Ok(())
                };
                let shape = (self.job.shape.buffers, self.job.shape.parts);
                let steps = BatchCallbacks {
                    more: &mut more,
                    before: &mut |_, _| Ok(()),
                    ended: &mut ended,
                };
                batches::run(&mut **engine, shape, steps)?;
                let took = begin.elapsed().as_secs_f64();
                done += batches;
                for (part, product) in &products {
                    self.check(*part, product, &expected)?;
                }
                let trace = engine.trace();
                way.overlap = trace.overlap();
                if index == 0 {
                    first = trace;
                }
                if run > 0 {
                    way.seconds.push(took);
                }
            }
        }
        Ok(PipelineReport {
            ways: ways.into_iter().map(|(way, _)| way).collect(),
            continuous: None,
            trace: first,
        })
    }

    /// Returns the product of all matrices, fed back.
    fn iterative(&self, progress: &mut Progress<'_>) -> Result<PipelineReport> {
        let (source, shape) = (self.best(), self.job.shape);
        let mut engine = self.engine(source)?;
        let expected = self.data.iterated(self.job.batches);
        let parts = u64::from(shape.parts);
        let mut way = self.way(source, self.job.batches * parts);
        let mut trace = PipelineTrace::default();
        for run in 0..=self.job.runs {
            engine.set_vectors(&self.data.x)?;
            let begin = Instant::now();
            let all = self.job.batches * parts;
            let mut more = |number: u64| {
                progress(number, all, begin.elapsed().as_secs_f64())?;
                Ok(number < all)
            };
            // Reads run ahead: a batch may be read before the vectors are known with which it will be multiplied.
            let mut before =
                |engine: &mut dyn PipelineEngine, batch: PipelineBatch| match batch.part {
                    0 if batch.number > 0 => engine.feed_back(),
                    _ => Ok(()),
                };
            let steps = BatchCallbacks {
                more: &mut more,
                before: &mut before,
                ended: &mut |_, _, product| product.map(drop),
            };
            batches::run(&mut *engine, (shape.buffers, shape.parts), steps)?;
            engine.feed_back()?;
            let x = engine.vectors()?;
            let took = begin.elapsed().as_secs_f64();
            self.data
                .check("the vectors at the end", &x, &expected, ITERATED)?;
            trace = engine.trace();
            if run > 0 {
                way.seconds.push(took);
            }
        }
        way.overlap = trace.overlap();
        Ok(PipelineReport {
            ways: vec![way],
            continuous: None,
            trace,
        })
    }

    /// Runs batches for a given time. A batch that fails is tried again until the patience ends.
    fn continuous(&self, progress: &mut Progress<'_>) -> Result<PipelineReport> {
        let source = self.best();
        let (mut engine, expected) = (self.engine(source)?, self.expected());
        let latencies = Histogram::new_with_bounds(1, MOST_NS, 3);
        let mut met = ContinuousRun {
            latencies_ns: latencies
                .map_err(|error| Error::internal(format!("a histogram: {error}")))?,
            failed: 0,
            retries: 0,
            longest_outage: Duration::ZERO,
            last_failure: None,
            is_interrupted: false,
        };
        let runtime = self.job.runtime;
        let begin = Instant::now();
        let mut is_interrupted = false;
        let mut more = |number: u64| {
            let seconds = begin.elapsed().as_secs_f64();
            match progress(number, 0, seconds) {
                Err(Error::Interrupted) => is_interrupted = true,
                other => other?,
            }
            Ok(!is_interrupted && begin.elapsed() < runtime)
        };
        let mut trace = PipelineTrace::default();
        let mut ended =
            |engine: &mut dyn PipelineEngine, batch: PipelineBatch, product: Result<Vec<f32>>| {
                let product = match product {
                    Err(error) if is_of_the_device(&error) => {
                        self.again(engine, batch, error, &mut met)?
                    }
                    other => other?,
                };
                self.check(batch.part, &product, &expected)?;
                let spans = engine.trace();
                let began = spans
                    .spans
                    .iter()
                    .map(|span| span.begin_us)
                    .fold(f64::MAX, f64::min);
                let over = spans
                    .spans
                    .iter()
                    .map(|span| span.end_us)
                    .fold(0.0, f64::max);
                met.latencies_ns
                    .saturating_record(((over - began).max(0.0) * 1e3) as u64);
                spans.spans.into_iter().for_each(|span| trace.note(span));
                Ok(())
            };
        let shape = (self.job.shape.buffers, self.job.shape.parts);
        let steps = BatchCallbacks {
            more: &mut more,
            before: &mut |_, _| Ok(()),
            ended: &mut ended,
        };
        let batches = batches::run(&mut *engine, shape, steps)?;
        let took = begin.elapsed().as_secs_f64();
        met.is_interrupted = is_interrupted;
        let mut way = self.way(source, batches);
        way.seconds.push(took);
        way.overlap = trace.overlap();
        Ok(PipelineReport {
            ways: vec![way],
            continuous: Some(met),
            trace,
        })
    }

    /// Returns the product of a batch that failed with `error`, or the last failure when patience is over.
    fn again(
        &self,
        engine: &mut dyn PipelineEngine,
        batch: PipelineBatch,
        error: Error,
        met: &mut ContinuousRun,
    ) -> Result<Vec<f32>> {
        let begin = Instant::now();
        let mut last = error;
        met.failed += 1;
        while begin.elapsed() < self.job.patience {
            met.last_failure = Some(last.to_string());
            std::thread::sleep(AGAIN);
            met.retries += 1;
            engine.read(batch.number, batch.slot, batch.part)?;
            engine.multiply(batch.slot)?;
            match engine.take(batch.slot) {
                Ok(product) => {
                    met.longest_outage = met.longest_outage.max(begin.elapsed());
                    return Ok(product);
                }
                Err(again) if is_of_the_device(&again) => last = again,
                Err(other) => return Err(other),
            }
        }
        Err(last)
    }
}

/// True if a retry may succeed: the error is the device's.
fn is_of_the_device(error: &Error) -> bool {
    matches!(
        error,
        Error::Device { .. } | Error::Command { .. } | Error::Timeout { .. } | Error::Gone { .. }
    )
}
