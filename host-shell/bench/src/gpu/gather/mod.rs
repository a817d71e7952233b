//! `out = table[ids]` measured: rows by ids that lie in GPU memory, beside the bare limit and rivals on the same data;
//! and the same rows written back.
//!
//! The table's words are a function of their offset, so that each gathered row is checked on the GPU.
// UNSAFETY: launches kernels over this module's own memory.
#![allow(unsafe_code)]

mod beside;
mod by_cpu;
mod gemm;
mod graphs;
mod latency;
pub(in crate::gpu) mod lay_out;
mod written;

use crate::measure::{GatherCases, IdGenerator, median};
use by_cpu::CpuQueues;
use gemm::ProductBench;
pub use gemm::ProductShape;
use lay_out::{STRIPE_BYTES, check_room, cores, fill, lay_out};
use nvme_core::spec::Nsid;
use nvme_cuda::DeviceMemory;
use nvme_cuda::Gpu;
use nvme_cuda::RegisteredMemory;
use nvme_cuda::{
    GatherOptions, GpuRows, PendingRows, RowRequest, RowTable, RowsOptions, StripedRows, TableCache,
};
use nvme_cuda::{GpuAccess, QueueTier, TierRequest};
use nvme_cuda::{KernelFunction, Module};
use nvme_cuda::{Stream, StreamEvent};
use nvme_driver::controller::Controller;
use nvme_driver::controller::config::ControllerConfig;
use nvme_driver::device::Device;
use nvme_driver::dma::DmaBuffer;
use nvme_driver::dma::pages::DmaPages;
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::ROWS;
use nvme_gpu_kernel::rows::{BLOCK_THREADS, CheckLaunch, GatherLaunch};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// The host's patience with one gather.
const PATIENCE: Duration = Duration::from_secs(60);
/// Blocks of the kernels that have no queue.
const FREE_BLOCKS: u32 = 128;

/// Workload of the measurement.
#[derive(Clone, Debug)]
pub struct GatherJob {
    /// The GPU.
    pub gpu: u32,
    /// Namespace.
    pub nsid: Nsid,
    /// The table and the cases.
    pub cases: GatherCases,
    /// Bytes of GPU memory of a cache, for a second measurement beside the one without; 0 for none.
    pub cache_bytes: u64,
    /// Gathers in graphs.
    pub graphs: GraphCases,
    /// Queues and stations.
    pub options: RowsOptions,
}

/// Gathers that are measured in captured graphs.
#[derive(Clone, Debug)]
pub struct GraphCases {
    /// Rows of each.
    pub rows: Vec<u64>,
    /// Measure each also in halves, with a copy inside GPU memory between them.
    pub halves: bool,
    /// Product of matrices that is measured beside gathers.
    pub product: Option<ProductShape>,
}

impl GatherJob {
    fn table(&self, row_bytes: u32) -> RowTable {
        RowTable {
            first_byte: 0,
            rows: self.cases.table_bytes / u64::from(row_bytes),
            row_bytes,
        }
    }

    /// Makes the cache of a case, if one is measured.
    ///
    /// # Errors
    /// The errors of [`GpuRows::cache`].
    fn cache(&self, rows: &GpuRows, row_bytes: u32) -> Result<Option<TableCache>> {
        match self.cache_bytes {
            0 => Ok(None),
            bytes => rows.cache(&self.table(row_bytes), None, bytes).map(Some),
        }
    }
}

struct GatherFixture {
    job: GatherJob,
    drives: MeasuredDrives,
    module: Module,
    copy: KernelFunction,
    check: KernelFunction,
    stream: Stream,
    /// The table once more, in memory of the host, as rivals have it.
    mirror: RegisteredMemory,
    mirror_pages: Arc<DmaPages>,
    /// Queues of the CPU's rival, for a single drive.
    cpu: Option<CpuQueues>,
    device: Option<Arc<dyn Device>>,
}

/// One drive, or several in stripes.
struct MeasuredDrives {
    striped: Option<StripedRows>,
    first: Arc<GpuRows>,
}

impl MeasuredDrives {
    fn new(rows: Vec<Arc<GpuRows>>, table_bytes: u64) -> Result<Self> {
        let none = || Error::usage("there is no drive", "name one");
        let first = Arc::clone(rows.first().ok_or_else(none)?);
        if rows.len() == 1 {
            let striped = None;
            return Ok(Self { striped, first });
        }
        let (count, most) = (rows.len(), nvme_gpu_kernel::rows::MEMBERS);
        let striped = StripedRows::new(rows, STRIPE_BYTES, table_bytes)?.ok_or_else(|| {
            Error::usage(
                format!("one launch reads at most {most} drives, {count} are given"),
                format!("use {most} at most"),
            )
        })?;
        Ok(Self {
            striped: Some(striped),
            first,
        })
    }

    /// # Safety
    /// As [`GpuRows::gather`].
    ///
    /// # Errors
    /// As [`GpuRows::gather`].
    unsafe fn gather(
        &self,
        table: &RowTable,
        request: &RowRequest,
        cache: Option<&TableCache>,
        stream: u64,
    ) -> Result<PendingRows> {
        let ways = GatherOptions {
            cache,
            ..GatherOptions::default()
        };
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe {
            match &self.striped {
                Some(rows) => rows.gather(table, request, ways, stream),
                None => self.first.gather(table, request, ways, stream),
            }
        }
    }
}

/// Runs the cases on `devices`, in stripes if there are several; `emit` is called with an object for each.
///
/// # Errors
/// The error that keeps a case from running; wrong rows.
pub fn gather(
    devices: Vec<Arc<dyn Device>>,
    config: &ControllerConfig,
    job: &GatherJob,
    emit: &mut dyn FnMut(Value),
) -> Result<()> {
    let gpu = Gpu::open(job.gpu)?;
    let queues = job.options.queues.saturating_add(job.options.owned);
    let queues = u16::try_from(queues).unwrap_or(u16::MAX);
    let config = ControllerConfig {
        queue_pairs: u32::from(queues).saturating_add(2 + cores() as u32),
        ..config.clone()
    };
    if devices.len() > 1 && job.cache_bytes > 0 {
        return Err(Error::usage(
            "a cache of rows belongs to one drive, several are given",
            "measure one drive with a cache",
        ));
    }
    let (mut controllers, mut accesses) = (Vec::new(), Vec::new());
    for device in devices {
        let exactly = TierRequest::Exactly(QueueTier::Direct);
        let access = Arc::new(GpuAccess::find(&gpu, device, queues, exactly)?);
        let controller = Controller::start(Arc::clone(access.device()), &config)?;
        let info = controller.usable_namespace(job.nsid)?;
        controllers.push((controller, info));
        accesses.push(access);
    }
    check_room(&controllers, (job.nsid, &job.cases))?;
    let mirror_pages = Arc::new(DmaPages::new(job.cases.table_bytes as usize)?);
    fill(&mirror_pages, job.cases.seed);
    let module = Module::of_image(&gpu, &ROWS)?;
    let rows = controllers.iter().zip(&accesses);
    let rows = rows.map(|((controller, info), access)| {
        let options = job.options.within(controller, 2 + cores() as u32);
        let rows = GpuRows::create(controller, access, *info, options, config.timeout);
        rows.map(Arc::new)
    });
    let drives = MeasuredDrives::new(rows.collect::<Result<_>>()?, job.cases.table_bytes)?;
    // The table is written only after this: a run that is refused, also because a cache cannot be made, has overwritten
    // nothing.
    for row_bytes in &job.cases.row_bytes {
        drop(job.cache(&drives.first, *row_bytes)?);
    }
    let product = job
        .graphs
        .product
        .map(|shape| ProductBench::new(&gpu, shape));
    let product = product.transpose()?;
    let begin = Instant::now();
    lay_out(&controllers, (job.nsid, &job.cases))?;
    let laid_out = begin.elapsed();
    let (registers, local) = match drives.striped {
        Some(_) => module.cost(module.function("nvme_gather_striped")?)?,
        None => drives.first.cost()?,
    };
    let cpu = match &controllers[..] {
        [(controller, info)] => Some(CpuQueues::new(controller, *info, cores())),
        _ => None,
    };
    let one = (controllers.first(), accesses.first());
    emit(json!({
        "gpu": gpu.describe(),
        "device": one.1.map(|access| access.device().describe()),
        "tier": one.1.map(|access| access.describe()),
        "members": controllers.len(),
        "table_bytes": job.cases.table_bytes,
        "block_bytes": one.0.map(|(_, info)| info.block_bytes), "queues": job.options.queues,
        "stations": job.options.stations, "registers": registers, "local_bytes": local,
        "cores": cores(), "cpu_queues": cpu.as_ref().map(CpuQueues::len),
        "lay_out_s": laid_out.as_secs_f64(),
    }));
    let rig = GatherFixture {
        copy: module.function("nvme_copy_rows")?,
        check: module.function("nvme_check_rows")?,
        // So that gathers beside a product wait for a few of its blocks, and not for all.
        stream: Stream::urgent(&gpu)?,
        mirror: RegisteredMemory::pages(&gpu, &mirror_pages)?,
        mirror_pages,
        cpu,
        device: one.0.map(|(controller, _)| Arc::clone(controller.device())),
        module,
        drives,
        job: job.clone(),
    };
    for row_bytes in &job.cases.row_bytes {
        emit(rig.case(*row_bytes, product.as_ref())?);
    }
    drop(rig);
    controllers
        .into_iter()
        .try_for_each(|(controller, _)| controller.shut_down())
}

/// Memory of one case.
struct GatherCase {
    table: RowTable,
    count: u64,
    ids: DeviceMemory,
    host_ids: Vec<i64>,
    asked: IdGenerator,
    out: DeviceMemory,
    wrong: DeviceMemory,
    staging: Arc<DmaPages>,
    staged: RegisteredMemory,
    /// The staging memory, if the drive reaches it, for reads by the CPU.
    mapped: Option<DmaBuffer>,
}

impl GatherFixture {
    fn gpu(&self) -> &Arc<Gpu> {
        self.drives.first.gpu()
    }

    fn case(&self, row_bytes: u32, product: Option<&ProductBench>) -> Result<Value> {
        let mut case = self.memory(row_bytes)?;
        let (mut ours, mut bound, mut indexed) = (Vec::new(), Vec::new(), Vec::new());
        let (mut cached, mut written, mut by_cpu) = (Vec::new(), Vec::new(), Vec::new());
        let cache = self.job.cache(&self.drives.first, row_bytes)?;
        self.gather(&case, None)?;
        if cache.is_some() {
            self.gather(&case, cache.as_ref())?;
        }
        for run in 0..self.job.cases.runs {
            self.ask(&mut case, run as u64 + 1)?;
            ours.push(self.gather(&case, None)?);
            written.extend(self.scatter(&case)?);
            self.verify(&case)?;
            if cache.is_some() {
                cached.push(self.gather(&case, cache.as_ref())?);
                self.verify(&case)?;
            }
            bound.push(self.bound(&case)?);
            self.verify(&case)?;
            indexed.push(self.indexed(&case)?);
            self.verify(&case)?;
            if let Some(seconds) = self.by_cpu(&case)? {
                by_cpu.push(seconds);
                self.verify(&case)?;
            }
        }
        let (hop, graphs) = (self.hop(&case)?, self.graphs(&case)?);
        let product = product.map(|product| self.beside_product(&case, product));
        let rate = |runs: &[f64]| case.count as f64 / median(runs);
        let rates = [&ours, &bound, &indexed].map(|runs| rate(runs));
        Ok(json!({
            "case": format!("gather_{row_bytes}"),
            "row_bytes": row_bytes, "rows": case.count, "distinct_rows": distinct(&case.host_ids),
            "rows_per_s": rates[0], "gb_per_s": rates[0] * f64::from(row_bytes) / 1e9,
            "bound_rows_per_s": rates[1], "of_bound": rates[0] / rates[1],
            "index_and_copy_rows_per_s": rates[2], "of_index_and_copy": rates[0] / rates[2],
            "by_cpu": (!by_cpu.is_empty()).then(|| json!({
                "rows_per_s": rate(&by_cpu), "gather_of_it": rates[0] / rate(&by_cpu), "seconds": by_cpu,
            })),
            "hop_32_rows": hop, "graphs": graphs, "product": product.transpose()?,
            "ids": case.asked.law(), "scatter": Self::written(&case, &written),
            "cache": cache.map(|cache| json!({
                "rows": cache.rows(), "of_table": f64::from(cache.rows()) / case.table.rows as f64,
                "rows_per_s": rate(&cached), "of_uncached": rate(&cached) / rates[0], "seconds": cached,
            })),
            "seconds": { "gather": ours, "bound": bound, "index_and_copy": indexed },
            "checked": true,
        }))
    }

    fn memory(&self, row_bytes: u32) -> Result<GatherCase> {
        let job = &self.job;
        let table = job.table(row_bytes);
        let rows = table.rows;
        let count = match job.cases.rows {
            0 => (2u64 << 30) / u64::from(row_bytes.max(1024)),
            rows => rows,
        };
        let gpu = self.gpu();
        let ids = DeviceMemory::new(gpu, count as usize * 8)?;
        let bytes = count as usize * row_bytes as usize;
        let reads = self.cpu.as_ref().is_some_and(|cpu| cpu.reads(row_bytes));
        let device = self.device.as_ref().filter(|_| reads);
        let staging = Arc::new(match device {
            Some(device) => device.alloc_dma(bytes)?,
            None => DmaPages::new(bytes)?,
        });
        let mapped = device.map(|device| DmaBuffer::over(device, Arc::clone(&staging)));
        let mut case = GatherCase {
            table,
            count,
            ids,
            asked: IdGenerator::new(rows, job.cases.zipf),
            host_ids: Vec::new(),
            out: DeviceMemory::new(gpu, bytes)?,
            wrong: DeviceMemory::new(gpu, 8)?,
            staged: RegisteredMemory::pages(gpu, &staging)?,
            mapped: mapped.transpose()?,
            staging,
        };
        self.ask(&mut case, 0)?;
        Ok(case)
    }

    /// Asks for other rows.
    fn ask(&self, case: &mut GatherCase, run: u64) -> Result<()> {
        case.host_ids = case.asked.draw(case.count, self.job.cases.seed ^ run << 32);
        case.ids.upload(0, case.host_ids.as_bytes())
    }

    fn request(&self, case: &GatherCase, count: u64) -> RowRequest {
        RowRequest {
            ids: case.ids.address(),
            wide_ids: true,
            count,
            out: case.out.address(),
            out_stride: u64::from(case.table.row_bytes),
            status: 0,
        }
    }

    /// Measures the seconds of one gather of all rows.
    fn gather(&self, case: &GatherCase, cache: Option<&TableCache>) -> Result<f64> {
        let request = self.request(case, case.count);
        self.timed(|stream| {
            // SAFETY: the memory is our own and outlives the launch: it is waited for.
            unsafe { self.drives.gather(&case.table, &request, cache, stream) }
        })
    }

    /// Measures the seconds of the work that `start` enqueues in the stream; a failed row is an error.
    fn timed(&self, start: impl FnOnce(u64) -> Result<PendingRows>) -> Result<f64> {
        let begin = StreamEvent::record(&self.stream)?;
        let pending = start(self.stream.handle())?;
        let end = StreamEvent::record(&self.stream)?;
        let moved = pending.wait(PATIENCE)?;
        if moved.failures.rows > 0 {
            return Err(Error::device(
                format!("rows were not moved: {:?}", moved.failures),
                "see docs/troubleshooting.md",
            ));
        }
        self.stream.wait(PATIENCE, || Ok(()))?;
        end.seconds_since(&begin)
    }

    /// Returns the launch of the kernel that only copies.
    fn copied(&self, case: &GatherCase) -> GatherLaunch {
        GatherLaunch {
            slots: self.mirror.address(),
            lanes: 32,
            unit_shift: u64::from(case.table.row_bytes).trailing_zeros().min(4),
            block_shift: 12,
            ..self.bare(case)
        }
    }

    /// Measures the seconds of the same rows out of memory of the host, by a kernel that only copies.
    fn bound(&self, case: &GatherCase) -> Result<f64> {
        let launch = self.copied(case);
        let begin = StreamEvent::record(&self.stream)?;
        // SAFETY: as in `gather`.
        unsafe {
            self.module
                .launch(&self.stream, self.copy, FREE_BLOCKS, BLOCK_THREADS, &launch)?;
        }
        let end = StreamEvent::record(&self.stream)?;
        self.stream.wait(PATIENCE, || Ok(()))?;
        end.seconds_since(&begin)
    }

    /// Measures the seconds of the same rows by the host's threads, out of the same memory into pinned memory,
    /// and one copy.
    fn indexed(&self, case: &GatherCase) -> Result<f64> {
        let begin = Instant::now();
        let threads = cores();
        let (from, to) = (
            self.mirror_pages.start().addr(),
            case.staging.start().addr(),
        );
        let row = case.table.row_bytes as usize;
        std::thread::scope(|scope| {
            for part in 0..threads {
                let range = case.host_ids.len() * part / threads
                    ..case.host_ids.len() * (part + 1) / threads;
                let ids = &case.host_ids[range.clone()];
                scope.spawn(move || {
                    for (index, id) in range.zip(ids) {
                        // SAFETY: the copy is from a row of the mirror to a row of the staging memory, and one thread
                        // writes each row.
                        unsafe {
                            std::ptr::copy_nonoverlapping(
                                std::ptr::with_exposed_provenance::<u8>(from + *id as usize * row),
                                std::ptr::with_exposed_provenance_mut::<u8>(to + index * row),
                                row,
                            );
                        }
                    }
                });
            }
        });
        let bytes = case.host_ids.len() * row;
        // SAFETY: both memories are our own and outlive the copy, which is waited for.
        unsafe {
            let from = case.staging.start();
            self.stream.copy_in(case.out.address(), from, bytes)?;
        }
        self.stream.finish()?;
        let _ = &case.staged;
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Measures the seconds of the same rows by commands of the CPU on the same drive, and one copy; `None` if the CPU
    /// has no queue, or rows are no whole blocks.
    fn by_cpu(&self, case: &GatherCase) -> Result<Option<f64>> {
        let (Some(cpu), Some(staging)) = (&self.cpu, &case.mapped) else {
            return Ok(None);
        };
        let begin = Instant::now();
        cpu.read(&case.host_ids, case.table.row_bytes, staging.iova())?;
        let bytes = case.host_ids.len() * case.table.row_bytes as usize;
        // SAFETY: both memories are our own and outlive the copy, which is waited for.
        unsafe {
            let from = case.staging.start();
            self.stream.copy_in(case.out.address(), from, bytes)?;
        }
        self.stream.finish()?;
        Ok(Some(begin.elapsed().as_secs_f64()))
    }

    fn bare(&self, case: &GatherCase) -> GatherLaunch {
        GatherLaunch {
            ids: case.ids.address(),
            wide_ids: 1,
            count: case.count,
            out: case.out.address(),
            out_stride: u64::from(case.table.row_bytes),
            rows: case.table.rows,
            row_bytes: case.table.row_bytes,
            ..GatherLaunch::default()
        }
    }

    /// Checks every word of the output, and overwrites it.
    fn verify(&self, case: &GatherCase) -> Result<()> {
        self.verify_first(case, case.count)
    }

    /// Checks every word of the first `count` rows of the output, and overwrites it.
    fn verify_first(&self, case: &GatherCase, count: u64) -> Result<()> {
        let check = CheckLaunch {
            gather: GatherLaunch {
                count,
                ..self.bare(case)
            },
            seed: self.job.cases.seed,
            wrong: case.wrong.address(),
        };
        case.wrong.zero()?;
        // SAFETY: as in `gather`.
        unsafe {
            self.module
                .launch(&self.stream, self.check, FREE_BLOCKS, BLOCK_THREADS, &check)?;
        }
        self.stream.wait(PATIENCE, || Ok(()))?;
        let mut wrong = [0; 8];
        case.wrong.download(0, &mut wrong)?;
        match u64::read_from_bytes(&wrong).unwrap_or(u64::MAX) {
            0 => case.out.zero(),
            wrong => Err(Error::Mismatch {
                what: format!("{wrong} of {count} rows are wrong"),
            }),
        }
    }
}

/// Returns how many rows the ids name: long gathers read each of them once.
fn distinct(ids: &[i64]) -> usize {
    ids.iter().collect::<HashSet<_>>().len()
}
