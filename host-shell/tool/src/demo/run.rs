//! `demo`: real data through the whole driver, from a GPU if there is one, else from CPU threads. Every byte is
//! compared with the data of the seed, on the GPU and again on the CPU, before the result is printed.

#[cfg(feature = "cuda")]
use super::gpu;
use super::image::DemoImage;
use super::options::DemoCommand;
use crate::common::images::CommandFiles;
use crate::common::{output, progress};
use hdrhistogram::Histogram;
use indicatif::ProgressBar;
use nvme_host::bench::queues_json;
use nvme_host::core::SubmitError;
use nvme_host::core::spec::{Lba, Nsid, Qid, nvm};
use nvme_host::units;
use nvme_host::{Controller, DmaBuffer, DriverQueue, Error, QueueStatistics, Result};
use serde_json::json;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

/// Measurements of one thread.
struct ThreadResult {
    qid: Qid,
    statistics: QueueStatistics,
    latency: Histogram<u64>,
}

/// State that all threads share.
struct DemoWork<'a> {
    next: AtomicUsize,
    stop: AtomicBool,
    sums: &'a [u64],
    /// Checksums of the units that were read, by position.
    read: &'a [std::sync::atomic::AtomicU64],
    blocks_per_unit: u64,
    blocks: u64,
    block_bytes: usize,
    bar: &'a ProgressBar,
}

impl DemoCommand {
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        #[cfg(feature = "cuda")]
        let no_gpu = match self.find_gpu()? {
            Ok(gpu) => return gpu::run(&self, files, gpu),
            Err(reason) => reason,
        };
        #[cfg(not(feature = "cuda"))]
        let _ = files;
        #[cfg(not(feature = "cuda"))]
        let no_gpu = "no GPU support in this build".to_owned();
        let image = DemoImage::create(&self)?;
        let (block, unit) = (image.block, image.unit);
        let begin = Instant::now();
        let opened = nvme_host::open(&image.device)?;
        let controller = self.access.start(opened, &self.config())?;
        let bring_up = begin.elapsed();
        let read: Vec<_> = image
            .sums
            .iter()
            .map(|_| std::sync::atomic::AtomicU64::new(0))
            .collect();
        let bar = progress::bytes(self.size, "reading");
        let work = DemoWork {
            next: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            sums: &image.sums,
            read: &read,
            blocks_per_unit: unit / block,
            blocks: self.size / block,
            block_bytes: block as usize,
            bar: &bar,
        };
        let (parts, elapsed) = self.read_all(&controller, &work)?;
        bar.finish_and_clear();
        controller.shut_down()?;
        let digest = |sums: &mut dyn Iterator<Item = u64>| {
            xxh3_64(&sums.flat_map(u64::to_le_bytes).collect::<Vec<u8>>())
        };
        let of_image = digest(&mut image.sums.iter().copied());
        let of_read = digest(&mut read.iter().map(|sum| sum.load(Ordering::Relaxed)));
        if of_image != of_read {
            return Err(Error::Mismatch {
                what: "the checksum of what was read is not the image's".to_owned(),
            });
        }
        self.report(&image, &parts, [elapsed, bring_up], of_read, &no_gpu)
    }

    /// Returns the GPU to use, or why there is none. One that was asked for must be there.
    #[cfg(feature = "cuda")]
    fn find_gpu(&self) -> Result<std::result::Result<u32, String>> {
        if self.cpu {
            return Ok(Err("no GPU used, as asked".to_owned()));
        }
        let index = self.gpu.unwrap_or(0);
        use nvme_host::cuda::{Gpu, HostPinning};
        match Gpu::open(index) {
            // A GPU that the user named is tried, and its error explains itself.
            Ok(_) if self.gpu.is_some() => Ok(Ok(index)),
            Ok(gpu) => Ok(match gpu.pinning()? {
                HostPinning::Registers => Ok(index),
                HostPinning::Allocates(why) | HostPinning::Refuses(why) => Err(format!(
                    "no GPU used: the driver registers no memory of the host ({why})"
                )),
            }),
            Err(error) if self.gpu.is_some() => Err(error),
            Err(error) => Ok(Err(error.to_string())),
        }
    }

    fn read_all(
        &self,
        controller: &Controller,
        work: &DemoWork<'_>,
    ) -> Result<(Vec<ThreadResult>, Duration)> {
        let unit = work.blocks_per_unit as usize * work.block_bytes;
        let mut readers = Vec::new();
        for _ in 0..self.queues {
            let queue = controller.create_queue_pair(self.depth + 1)?;
            let depth = self.depth.min(queue.depth());
            let buffers: Result<Vec<DmaBuffer>> =
                (0..depth).map(|_| controller.alloc(unit)).collect();
            readers.push((queue, buffers?));
        }
        let begin = Instant::now();
        let parts: Vec<Result<ThreadResult>> = std::thread::scope(|scope| {
            let threads: Vec<_> = readers
                .into_iter()
                .map(|(queue, buffers)| scope.spawn(move || read_queue(queue, buffers, work)))
                .collect();
            let joined = threads.into_iter().map(|thread| thread.join());
            joined
                .map(|part| part.unwrap_or_else(|_| Err(Error::internal("a thread panicked"))))
                .collect()
        });
        let elapsed = begin.elapsed();
        Ok((parts.into_iter().collect::<Result<_>>()?, elapsed))
    }

    fn report(
        &self,
        image: &DemoImage,
        parts: &[ThreadResult],
        [elapsed, bring_up]: [Duration; 2],
        digest: u64,
        no_gpu: &str,
    ) -> Result<()> {
        let latency = merged(parts)?;
        let commands = image.sums.len() as u64;
        let seconds = elapsed.as_secs_f64();
        let [p50, p99] = [50.0, 99.0].map(|p| latency.value_at_percentile(p));
        let max = latency.max();
        let gbps = self.size as f64 / seconds / 1e9;
        let rate = commands as f64 / seconds;
        let path = image.path.as_ref().filter(|_| self.keep);
        let kept = path.map(|path| path.display().to_string());
        let threads = format!("{} CPU threads", self.queues);
        let engine = format!("{threads}; {}; {no_gpu}", image.controller);
        if self.form.json {
            let queues: Vec<_> = parts
                .iter()
                .map(|part| (part.qid, part.statistics))
                .collect();
            return output::json(&json!({
                "verified": true,
                "bytes": self.size,
                "seconds": seconds,
                "gb_per_s": gbps,
                "commands": commands,
                "commands_per_s": rate,
                "latency_ns": { "p50": p50, "p99": p99, "max": max, "min": latency.min(), "mean": latency.mean() },
                "checksum_xxh3": format!("{digest:016x}"),
                "controller": image.controller,
                "driver": threads,
                "gpu": false,
                "why": no_gpu,
                "bring_up_ms": bring_up.as_secs_f64() * 1e3,
                "image": kept,
                "queues": queues_json(&queues),
            }));
        }
        let statistics: String = parts.iter().map(statistics_line).collect();
        let mut text = format!(
            "verified {} ({} bytes): every byte read is the image's (xxh3 {digest:016x})\n\
             {gbps:.2} GB/s, {} commands/s, {commands} commands in {seconds:.3} s, bring-up {:.1} ms\n\
             latency p50 {}, p99 {}, max {}\n{statistics}driven by {engine}\n",
            units::bytes(self.size),
            self.size,
            units::count(rate),
            bring_up.as_secs_f64() * 1e3,
            units::nanoseconds(p50),
            units::nanoseconds(p99),
            units::nanoseconds(max)
        );
        if let Some(path) = kept {
            text.push_str(&format!("image kept: {path}\n"));
        }
        output::print(&text)
    }
}

fn statistics_line(part: &ThreadResult) -> String {
    let statistics = &part.statistics;
    format!(
        "queue {}: {} commands, {} doorbell rings, at most {} in flight, {} errors, {} expired\n",
        part.qid,
        statistics.submitted,
        statistics.rings,
        statistics.peak,
        statistics.errors,
        statistics.expired
    )
}

/// Returns the latencies of all queues.
fn merged(parts: &[ThreadResult]) -> Result<Histogram<u64>> {
    let mut latency = new_histogram();
    for part in parts {
        latency
            .add(&part.latency)
            .map_err(|_| Error::internal("histograms differ"))?;
    }
    Ok(latency)
}

fn new_histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("1 ns to 60 s with 3 digits is valid")
}

/// Runs the thread of one queue: keeps the queue full and checks every unit once it was read.
fn read_queue(
    mut queue: DriverQueue,
    mut free: Vec<DmaBuffer>,
    work: &DemoWork<'_>,
) -> Result<ThreadResult> {
    let result = read_units(&mut queue, &mut free, work);
    if result.is_err() {
        work.stop.store(true, Ordering::Relaxed);
    }
    let latency = result?;
    Ok(ThreadResult {
        qid: queue.qid(),
        statistics: queue.statistics(),
        latency,
    })
}

/// A command in flight: its identifier, the unit that it reads, and the time of its submission.
type InFlight = (u16, usize, Instant);

/// Submits a read for each free buffer while there are units left, and rings.
fn submit_units(
    queue: &mut DriverQueue,
    free: &mut Vec<DmaBuffer>,
    work: &DemoWork<'_>,
    pending: &mut Vec<InFlight>,
) -> Result<()> {
    let before = pending.len();
    while !work.stop.load(Ordering::Relaxed) && !free.is_empty() {
        let index = work.next.fetch_add(1, Ordering::Relaxed);
        if index >= work.sums.len() {
            break;
        }
        let Some(mut buffer) = free.pop() else { break };
        let lba = index as u64 * work.blocks_per_unit;
        let blocks = work.blocks_per_unit.min(work.blocks - lba);
        buffer.resize(blocks as usize * work.block_bytes);
        let now = Instant::now();
        match queue.submit(nvm::read(Nsid(1), Lba(lba), blocks as u32), Some(buffer)) {
            Ok(cid) => pending.push((cid.0, index, now)),
            Err(refused) if refused.error == SubmitError::QueueFull => {
                return Err(Error::device(
                    "the queue is smaller than its depth",
                    "use a smaller --depth",
                ));
            }
            Err(refused) => {
                return Err(refused
                    .error
                    .into_error(|error| Error::device(error.to_string(), "use a smaller --bs")));
            }
        }
    }
    if pending.len() > before {
        queue.ring();
    }
    Ok(())
}

fn read_units(
    queue: &mut DriverQueue,
    free: &mut Vec<DmaBuffer>,
    work: &DemoWork<'_>,
) -> Result<Histogram<u64>> {
    let mut latency = new_histogram();
    let mut pending = Vec::with_capacity(free.len());
    loop {
        submit_units(queue, free, work, &mut pending)?;
        if pending.is_empty() {
            return Ok(latency);
        }
        let Some(done) = queue.wait()? else {
            return Err(Error::internal("a command was lost"));
        };
        let now = Instant::now();
        let Some(at) = pending.iter().position(|(cid, ..)| *cid == done.cid.0) else {
            continue;
        };
        let (_, index, since) = pending.swap_remove(at);
        if !done.is_success() {
            return Err(queue.error_of(&done, "Read"));
        }
        latency.saturating_record((now - since).as_nanos() as u64);
        let Some(buffer) = done.buffer else { continue };
        let sum = xxh3_64(buffer.as_slice());
        work.read[index].store(sum, Ordering::Relaxed);
        if sum != work.sums[index] {
            let lba = index as u64 * work.blocks_per_unit;
            return Err(Error::Mismatch {
                what: format!("the blocks from LBA {lba} on are not the image's"),
            });
        }
        work.bar.inc(buffer.len() as u64);
        // Its full length again, for the next unit.
        free.push(buffer);
    }
}
