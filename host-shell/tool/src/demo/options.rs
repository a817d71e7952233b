//! Options of `demo`: the image, its size, queues, and whether the GPU or the CPU drives them.

use crate::common::{
    AccessArgs, OutputForm, WriteArgs, duration, number, output, some_bytes, stop_flag,
};
use clap::Args;
use nvme_host::ControllerConfig;
use std::path::PathBuf;
use std::time::Duration;

/// Make a disk image, read it back through the driver from several threads and verify every byte
#[derive(Args)]
pub struct DemoCommand {
    /// Use the first blocks of this device instead of an image: what is there is lost
    #[arg(long, short = 'd', conflicts_with_all = ["image", "keep", "block", "sim_threads"])]
    pub(super) device: Option<String>,
    #[command(flatten)]
    pub(super) write: WriteArgs,
    #[command(flatten)]
    pub(super) access: AccessArgs,
    /// Size of the image
    #[arg(long, default_value = "256MiB", value_parser = some_bytes)]
    pub(super) size: u64,
    /// Bytes per read; cut to what the controller transfers at once
    #[arg(long, default_value = "128KiB", value_parser = some_bytes)]
    pub(super) bs: u64,
    /// Queue pairs, one thread each
    #[arg(long, default_value_t = 4, value_parser = number::<u32>(1..=64))]
    pub(super) queues: u32,
    /// Reads in flight per queue
    #[arg(long, default_value_t = 8, value_parser = number::<u32>(1..=1024))]
    pub(super) depth: u32,
    /// Block size of the namespace
    #[arg(long, default_value_t = 4096, value_parser = number::<u32>(512..=4096))]
    pub(super) block: u32,
    /// Threads of the simulated controller
    #[arg(long, default_value_t = 1, value_parser = number::<u32>(1..=64))]
    pub(super) sim_threads: u32,
    /// Seed of the image's data
    #[arg(long, default_value_t = 1, value_parser = number::<u64>(0..=u64::MAX))]
    pub(super) seed: u64,
    /// Path of the image, instead of one in the folder for temporary files
    #[arg(long, value_name = "PATH")]
    pub(super) image: Option<PathBuf>,
    /// Have a protocol auditor watch the simulated controller; findings go to standard error
    #[arg(long, conflicts_with = "device")]
    pub(super) audit: bool,
    /// Keep the image afterwards
    #[arg(long)]
    pub(super) keep: bool,
    /// Time limit of a command, after which it is aborted
    #[arg(long, default_value = "5s", value_parser = duration)]
    pub(super) timeout: Duration,
    #[command(flatten)]
    pub(super) form: OutputForm,
    /// Use GPU N; without this, GPU 0 where there is one
    #[cfg(feature = "cuda")]
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "0", conflicts_with = "cpu", value_parser = number::<u32>(0..=1023))]
    pub(super) gpu: Option<u32>,
    /// Use CPU threads, whatever GPU there is
    #[cfg(feature = "cuda")]
    #[arg(long)]
    pub(super) cpu: bool,
}

impl DemoCommand {
    pub(super) fn config(&self) -> ControllerConfig {
        ControllerConfig {
            timeout: self.timeout,
            stop: Some(stop_flag()),
            notify: output::warnings(self.form.json),
            queue_pairs: self.queues,
            ..ControllerConfig::default()
        }
    }
}
