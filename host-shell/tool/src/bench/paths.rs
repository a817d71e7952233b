//! `bench --paths`: one file to memory by our driver, cuFile, and `pread` with a copy.

use super::{NO_DEVICE, plot};
use crate::common::images::CommandFiles;
use crate::common::{
    NamespaceArgs, WriteArgs, check_stop, images, number, output, progress, some_bytes, visible,
};
use clap::Args;
use nvme_host::bench::{PathsJob, SplitMix, paths};
use nvme_host::{Error, Result, Store, StoreOptions, units};
use serde_json::Value;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Bytes of a file that is made.
const MADE: u64 = 256 << 20;
/// Bytes that it is written in.
const CHUNK: usize = 4 << 20;

/// Ways to memory
#[derive(Args)]
#[command(next_help_heading = "Ways to memory")]
pub struct PathsArgs {
    /// Read FILE into memory, of the GPU with --gpu, by each way in turns: our driver (over -d, or the simulator over
    /// FILE), cuFile, pread and a copy, pread into pinned memory and an asynchronous copy. A missing FILE is made, and
    /// removed at the end. Every byte is compared. FILE is read from the page cache where it is there
    #[arg(long, value_name = "FILE", groups = ["in_turns", "by_paths"])]
    pub paths: Option<PathBuf>,
    /// Bytes of the sequential reads, multiples of 4096
    #[arg(
        long,
        value_name = "BYTES",
        value_delimiter = ',',
        default_value = "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB",
        value_parser = some_bytes,
        requires = "by_paths"
    )]
    sizes: Vec<u64>,
    /// Reads of 4 KiB in a batch
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = number::<usize>(1..=4096), requires = "by_paths")]
    batch: usize,
    /// Threads of the CPU's ways and of cuFile; one a processor, 16 at most, when missing
    #[arg(long, value_name = "N", value_parser = number::<usize>(1..=256), requires = "by_paths")]
    cpu_threads: Option<usize>,
}

/// Values of options that other commands share.
pub struct PathsShared<'f> {
    pub files: &'f CommandFiles,
    pub gpu: Option<u32>,
    pub namespace: NamespaceArgs,
    pub write: WriteArgs,
    pub queues: u32,
    pub size: Option<u64>,
    pub io_size: Option<u64>,
    pub runs: usize,
    pub seed: u64,
    pub plot: Option<PathBuf>,
}

/// A file that is removed at the end.
struct RemovedFile(PathBuf);

impl Drop for RemovedFile {
    fn drop(&mut self) {
        // The file is of no use to anything else; if it cannot be removed, the user can see it.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl PathsArgs {
    pub fn run(self, file: PathBuf, rest: PathsShared<'_>) -> Result<()> {
        let made = match file.exists() {
            true => None,
            false => Some(make(&file, rest.size.unwrap_or(MADE), rest.seed)?),
        };
        let device = &rest.namespace.device;
        let is_given = device.device != NO_DEVICE;
        let mut job = PathsJob::new(file);
        job.bytes = rest.size.unwrap_or(job.bytes);
        job.gpu = rest.gpu;
        job.sizes = self.sizes;
        job.run_bytes = rest.io_size.unwrap_or(job.run_bytes);
        job.batch = self.batch;
        job.threads = self.cpu_threads.unwrap_or(job.threads);
        (job.runs, job.seed, job.lay_out) = (rest.runs, rest.seed, is_given);
        let options = StoreOptions {
            allow_write: is_given,
            read_only: !is_given,
            nsid: rest.namespace.nsid().0,
            queues: rest.queues.max(8),
            timeout: device.timeout.limit(),
            #[cfg(feature = "cuda")]
            gpu: rest.gpu.map(|index| nvme_host::store::GpuOptions {
                index,
                ..Default::default()
            }),
            ..StoreOptions::default()
        };
        let store = match is_given {
            true => {
                let opened = device.open_to_write(&rest.write, "the content of the file")?;
                Store::over(opened, &options)
            }
            false => Store::open(&simulator(&job.file)?, &options),
        };
        let bar = progress::spinner("bench");
        let report = paths(store, &job, &mut |case| {
            bar.set_message(case.to_owned());
            check_stop()
        })?;
        bar.finish_and_clear();
        drop(made);
        if let Some(path) = rest.plot {
            plot::draw((&path, rest.files), &plot::paths::chart(&report))?;
        }
        match device.form.json {
            true => output::line(&report),
            false => output::print(&to_text(&report)),
        }
    }
}

/// Returns the name of an embedded simulator over the file, which is not changed.
fn simulator(file: &Path) -> Result<String> {
    let Some(path) = file.to_str() else {
        return Err(Error::usage(
            format!("'{}' is no text", file.display()),
            "rename the file, or name a device with -d",
        ));
    };
    let length = std::fs::metadata(file)
        .map_err(Error::file("open", file))?
        .len();
    let block = if length.is_multiple_of(4096) {
        4096
    } else {
        512
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = cores.saturating_sub(2).clamp(1, 12);
    Ok(format!(
        "sim:{}?block={block}&queues=32&threads={threads}",
        images::escaped(path)
    ))
}

/// Makes a file of `bytes` bytes that no pattern repeats.
fn make(path: &Path, bytes: u64, seed: u64) -> Result<RemovedFile> {
    let failed = Error::file("create", path);
    let mut file = File::create_new(path).map_err(failed)?;
    let made = RemovedFile(path.to_owned());
    let mut random = SplitMix::new(seed);
    let mut chunk = vec![0; CHUNK];
    let mut left = bytes;
    while left > 0 {
        check_stop()?;
        let part = &mut chunk[..left.min(CHUNK as u64) as usize];
        random.fill(part);
        file.write_all(part).map_err(Error::file("write", path))?;
        left -= part.len() as u64;
    }
    Ok(made)
}

fn to_text(report: &Value) -> String {
    let text = |value: &Value| visible::line(value.as_str().unwrap_or("-"));
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let percent = |value: &Value| match value.as_f64() {
        Some(share) => format!("{:.0} %", share * 100.0),
        None => "-".to_owned(),
    };
    let mut out = format!(
        "{}: {} to {}, {} threads, medians of {} in turns, every byte compared\n",
        text(&report["file"]),
        units::bytes(report["bytes"].as_u64().unwrap_or(0)),
        text(&report["to"]),
        report["threads"],
        report["runs"],
    );
    if let Some(link) = report["link_gb_per_s"].as_f64() {
        out += &format!("link: {link:.1} GB/s, copies out of pinned memory\n");
    }
    let memory = number(&report["memory_gb_per_s"]);
    out += &format!("memory: {memory:.1} GB/s, read and written by copies inside of it\n");
    for way in report["ways"].as_array().into_iter().flatten() {
        let name = text(&way["way"]);
        out += &match way["why_not"].as_str() {
            None => format!("{name}: {}\n", text(&way["how"])),
            Some(why) => format!(
                "{name}: not measured: {}\n  -> {}\n",
                visible::line(why),
                text(&way["remedy"])
            ),
        };
    }
    out += &format!(
        "{:<12}{:<11}{:<12}{:>9}{:>11}{:>8}{:>8}{:>9}{:>12}\n",
        "pattern", "bytes", "way", "GB/s", "reads/s", "link", "memory", "overlap", "us/batch"
    );
    for case in report["cases"].as_array().into_iter().flatten() {
        let batch = case["us_per_batch"].as_f64();
        out += &format!(
            "{:<12}{:<11}{:<12}{:>9.2}{:>11}{:>8}{:>8}{:>9}{:>12}\n",
            text(&case["pattern"]),
            units::bytes(case["read_bytes"].as_u64().unwrap_or(0)),
            text(&case["way"]),
            number(&case["gb_per_s"]),
            units::count(number(&case["iops"])),
            percent(&case["of_link"]),
            percent(&case["of_memory"]),
            percent(&case["overlap"]),
            batch.map_or_else(|| "-".to_owned(), |us| format!("{us:.1}")),
        );
    }
    out
}
