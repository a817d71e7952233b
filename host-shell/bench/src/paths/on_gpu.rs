//! The paths into GPU memory. They alternate in one process over the same file, and every byte of each is compared at
//! the end.
// UNSAFETY: our driver, cuFile and copies are given addresses of GPU memory; threads fill pinned memory by address.
#![allow(unsafe_code)]

use super::by_pread::{self, CopySink, PassSteps, STAGE};
use super::job::PathsJob;
use super::place::{self, BytePath, PathDestination};
use super::plan::ReadPlan;
use crate::gpu::copy_rates;
use crate::measure::side_by_side;
use nvme_cuda::{
    DeviceMemory, GdsFile, GdsIo, Gpu, PendingRows, ReadRange, RegisteredMemory, RowRequest,
    Stream, StreamEvent,
};
use nvme_driver::dma::DmaPages;
use nvme_driver::error::{Error, Result};
use nvme_store::Store;
use std::collections::VecDeque;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// The largest reads that are rows of one gather. Larger ones are ranges.
const ROW: usize = 64 << 10;
/// The host's patience with an operation.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) struct GpuDestination<'a> {
    file: (&'a File, &'a Path),
    store: Option<&'a Store>,
    /// The file, opened by cuFile, or the reason why cuFile does not take it.
    gds: std::result::Result<GdsFile, Option<Error>>,
    threads: usize,
    gpu: Arc<Gpu>,
    stream: Stream,
    pageable: Vec<GpuCopies>,
    pinned: Vec<GpuCopies>,
    ids: DeviceMemory,
    out: Arc<DeviceMemory>,
}

/// Memory that a thread reads into.
struct StagingBuffer {
    pages: Arc<DmaPages>,
    /// The registration of a pinned buffer, and the end of the copy that uses it.
    sent: Option<(RegisteredMemory, StreamEvent)>,
    is_sent: bool,
}

/// Buffers of a thread, which are copied to GPU memory at `out`.
struct GpuCopies {
    stream: Stream,
    out: u64,
    stages: Vec<StagingBuffer>,
    next: usize,
}

impl GpuCopies {
    /// Allocates one pageable buffer, or two pinned ones.
    fn new(gpu: &Arc<Gpu>, out: u64, is_pinned: bool) -> Result<Self> {
        let stage = |_| {
            let pages = Arc::new(DmaPages::new(STAGE)?);
            let sent = match is_pinned {
                true => Some((
                    RegisteredMemory::pages(gpu, &pages)?,
                    StreamEvent::untimed(gpu)?,
                )),
                false => None,
            };
            let is_sent = false;
            Ok(StagingBuffer {
                pages,
                sent,
                is_sent,
            })
        };
        let count = if is_pinned { 2 } else { 1 };
        Ok(Self {
            stream: Stream::new(gpu)?,
            out,
            stages: (0..count).map(stage).collect::<Result<_>>()?,
            next: 0,
        })
    }
}

impl CopySink for &mut GpuCopies {
    fn stage(&mut self) -> Result<&mut [u8]> {
        let stage = &mut self.stages[self.next];
        if let Some((_, sent)) = stage.sent.as_ref().filter(|_| stage.is_sent) {
            sent.wait()?;
        }
        stage.is_sent = false;
        // SAFETY: the pages are zeroed memory of this buffer alone, and no copy uses them: the copy of a pinned buffer
        // has ended, and the driver is done with a pageable one when it returns.
        Ok(unsafe { std::slice::from_raw_parts_mut(stage.pages.start(), STAGE) })
    }

    fn send(&mut self, bytes: usize, to: usize) -> Result<()> {
        let next = (self.next + 1) % self.stages.len();
        let stage = &mut self.stages[std::mem::replace(&mut self.next, next)];
        // SAFETY: `to` and `bytes` are of a plan, for whose length there is room at `out`; the stage lives until
        // `finish` or the next `stage` has waited for the copy.
        unsafe {
            self.stream
                .copy_in(self.out + to as u64, stage.pages.start(), bytes)?;
        }
        if let Some((_, sent)) = &stage.sent {
            sent.record_in(&self.stream)?;
            stage.is_sent = true;
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        self.stream.finish()
    }
}

impl Drop for GpuCopies {
    fn drop(&mut self) {
        // A pass that failed may have left a copy in progress; if this wait fails, the context was destroyed.
        let _ = self.stream.finish();
    }
}

impl<'a> GpuDestination<'a> {
    /// Allocates room for `longest` bytes on GPU `index`.
    pub fn new(
        index: u32,
        store: Option<&'a Store>,
        file: (&'a File, &'a Path),
        job: &PathsJob,
        longest: usize,
    ) -> Result<Self> {
        let gpu = Gpu::open(index)?;
        let out = Arc::new(DeviceMemory::new(&gpu, longest)?);
        let threads = 0..job.threads.max(1);
        let copied = |is_pinned| {
            let one = |_| GpuCopies::new(&gpu, out.address(), is_pinned);
            threads.clone().map(one).collect::<Result<Vec<_>>>()
        };
        Ok(Self {
            file,
            store,
            gds: GdsFile::open(&gpu, file.1, false).map_err(Some),
            threads: job.threads,
            stream: Stream::new(&gpu)?,
            ids: DeviceMemory::new(&gpu, longest / ROW.min(4096) * 8)?,
            pageable: copied(false)?,
            pinned: copied(true)?,
            out,
            gpu,
        })
    }

    fn by_pread(&mut self, way: BytePath, plan: &ReadPlan, pass: PassSteps) -> Result<f64> {
        let sinks = match way {
            BytePath::Pinned => &mut self.pinned,
            _ => &mut self.pageable,
        };
        let shares = plan.shares(self.threads).into_iter();
        by_pread::run(plan, self.file, shares.zip(sinks), pass)
    }

    /// Gathers of rows by ids that lie in GPU memory; larger reads as ranges.
    fn direct(&self, store: &Store, plan: &ReadPlan) -> Result<f64> {
        let rows = store.len() / plan.bytes as u64;
        let table = store.table(0, rows, plan.bytes as u64)?;
        let (stream, out) = (self.stream.handle(), self.out.address());
        let mut under_way = VecDeque::new();
        let begin = Instant::now();
        for group in plan.groups() {
            if plan.bytes <= ROW {
                let request = RowRequest {
                    ids: self.ids.address() + group.start as u64 * 8,
                    wide_ids: true,
                    count: group.len() as u64,
                    out: out + (group.start * plan.bytes) as u64,
                    out_stride: plan.bytes as u64,
                    status: 0,
                };
                // SAFETY: ids and rows are those of the plan, for which there is room; our own memory outlives the
                // gather, which is waited for.
                under_way.push_back(unsafe { table.gather_on_gpu(&request, stream)? });
            } else {
                let range = |index: usize| ReadRange {
                    offset: plan.offsets[index],
                    bytes: plan.bytes as u64,
                    to: out + (index * plan.bytes) as u64,
                };
                let ranges: Vec<ReadRange> = group.map(range).collect();
                // SAFETY: as above.
                under_way.push_back(unsafe { store.read_ranges_on_gpu(&ranges, stream)? });
            }
            while !under_way.is_empty() {
                wait(&mut under_way)?;
            }
        }
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Reads by `cuFileRead` from threads, and batches by its batch calls.
    fn by_cufile(&self, file: &GdsFile, plan: &ReadPlan) -> Result<f64> {
        let (out, bytes) = (self.out.address(), plan.bytes);
        if plan.is_in_batches() {
            let begin = Instant::now();
            for group in plan.groups() {
                let io = |index| GdsIo {
                    is_write: false,
                    offset: plan.offsets[index],
                    address: out + (index * bytes) as u64,
                    bytes,
                };
                let ios: Vec<GdsIo> = group.map(io).collect();
                // SAFETY: as in `direct`.
                let ended = unsafe { file.batch(&ios) };
                if let Err(Error::Unfinished { .. }) = ended {
                    // The memory is leaked, because reads into it may still be in progress.
                    std::mem::forget(Arc::clone(&self.out));
                }
                ended?.into_iter().collect::<Result<()>>()?;
            }
            return Ok(begin.elapsed().as_secs_f64());
        }
        let share = plan.offsets.len().div_ceil(self.threads.max(1)).max(1);
        let job = |(part, offsets): (usize, &'_ [u64])| {
            let first = part * share;
            let offsets = offsets.to_vec();
            move || {
                for (index, offset) in offsets.into_iter().enumerate() {
                    let to = out + ((first + index) * bytes) as u64;
                    // SAFETY: as in `direct`.
                    unsafe { file.read(offset, bytes as u64, to)? };
                }
                Ok(())
            }
        };
        let shares = plan.offsets.chunks(share).enumerate();
        side_by_side(shares.map(job).collect())
    }
}

/// Waits for the first one.
fn wait(under_way: &mut VecDeque<PendingRows>) -> Result<()> {
    let Some(first) = under_way.pop_front() else {
        return Ok(());
    };
    let failures = first.wait(PATIENCE)?.failures;
    match failures.rows {
        0 => Ok(()),
        _ => Err(Error::device(
            format!("reads failed: {failures:?}"),
            "see docs/troubleshooting.md",
        )),
    }
}

impl PathDestination for GpuDestination<'_> {
    fn ways(&mut self) -> Vec<(BytePath, &'static str, Result<String>)> {
        let text = |text: String| Ok(text);
        let cufile = match &mut self.gds {
            Ok(file) => text(format!("cuFileRead by threads ({})", file.way().name())),
            Err(refusal) => Err(refusal
                .take()
                .unwrap_or_else(|| Error::internal("asked twice"))),
        };
        let direct = self.store.map(|store| match store.path().tier {
            Some(tier) => format!("kernels submit the reads (tier {tier})"),
            None => "a host thread submits the reads, in the order of the stream".to_owned(),
        });
        vec![
            (
                BytePath::Direct,
                "gpu-direct",
                Ok(direct.unwrap_or_default()),
            ),
            (BytePath::CuFile, "cufile", cufile),
            (
                BytePath::Pageable,
                "cpu-memcpy",
                text("pread into pageable memory, then a copy to the GPU".to_owned()),
            ),
            (
                BytePath::Pinned,
                "cpu-pinned",
                text("pread into one of two pinned buffers, while the other is copied".to_owned()),
            ),
        ]
    }

    fn prepare(&mut self, plan: &ReadPlan) -> Result<()> {
        if plan.bytes > ROW {
            return Ok(());
        }
        let id = |offset: &u64| offset / plan.bytes as u64;
        let ids: Vec<u64> = plan.offsets.iter().map(id).collect();
        self.ids.upload(0, ids.as_bytes())
    }

    fn run(&mut self, way: BytePath, plan: &ReadPlan) -> Result<f64> {
        match (way, self.store, &self.gds) {
            (BytePath::Direct, Some(store), _) => self.direct(store, plan),
            (BytePath::CuFile, _, Ok(file)) => self.by_cufile(file, plan),
            _ => self.by_pread(way, plan, PassSteps::Whole),
        }
    }

    fn steps(&mut self, way: BytePath, plan: &ReadPlan) -> Result<Option<(f64, f64)>> {
        if !matches!(way, BytePath::Pageable | BytePath::Pinned) {
            return Ok(None);
        }
        let read = self.by_pread(way, plan, PassSteps::ReadAlone)?;
        Ok(Some((
            read,
            self.by_pread(way, plan, PassSteps::CopyAlone)?,
        )))
    }

    fn take(&mut self, into: &mut [u8]) -> Result<()> {
        self.out.download(0, into)
    }

    fn spoil(&mut self) -> Result<()> {
        self.out.fill(place::SPOILT)
    }

    fn limits(&mut self, runs: usize) -> Result<(Option<f64>, f64)> {
        let (link, memory) = copy_rates(&self.gpu, runs)?;
        Ok((Some(link), memory))
    }
}
