//! Content of a witness file. Its members are a closed set: a file with others is rejected.

use serde::{Deserialize, Serialize};

/// The version of the file's form: it grows when a member is removed or changes its meaning.
pub const VERSION: u32 = 1;

/// One run of `nvme-gpu witness`.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct WitnessRecord {
    /// Version of the tool's JSON schema.
    pub schema_version: u32,
    pub witness_version: u32,
    pub ended: RunEnd,
    /// Start of the run, UTC: 2026-11-25T02:30:00Z.
    pub date: String,
    /// Name, version and commit of the tool.
    pub tool: String,
    /// The command line without paths.
    pub command: String,
    /// True if the controller is a simulated one: figures say nothing about a drive.
    pub simulator: bool,
    pub machine: RecordMachine,
    pub controller: Option<RecordController>,
    pub gpu: Option<RecordGpu>,
    pub path: Option<PathFacts>,
    pub steps: Vec<WitnessStep>,
}

/// End of a run.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RunEnd {
    /// Every step was tried.
    Complete,
    /// Ctrl-C came.
    Interrupted,
    /// The file was written between two steps, and the run did not continue.
    Unfinished,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RecordMachine {
    pub kernel: String,
    pub processor: String,
    pub cores: u64,
    pub numa_nodes: u64,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RecordController {
    /// sim, vfio, kmod or vfio-user.
    pub way: String,
    pub model: String,
    pub firmware: String,
    /// 1.4.0
    pub nvme: String,
    /// Vendor and device on PCI.
    pub pci_id: Option<String>,
    /// The longest transfer of one command; none without a limit.
    pub mdts_bytes: Option<u64>,
    pub block_bytes: u64,
    pub blocks: u64,
    pub queue_pairs: u64,
    pub iommu_group_type: Option<String>,
    pub link: Option<RecordLink>,
}

/// A PCI Express link.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RecordLink {
    pub trained: Option<RecordRate>,
    pub possible: Option<RecordRate>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RecordRate {
    pub generation: u8,
    pub lanes: u8,
    pub gb_per_s: Option<f64>,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RecordGpu {
    pub model: String,
    /// The version of the kernel modules: 580.159.04.
    pub driver: Option<String>,
    /// True if they are the open kernel modules.
    pub open_modules: Option<bool>,
    pub cuda: String,
    pub capability: String,
    /// The driver's value: 0 none, 100 owner, 200 all.
    pub writes_ordering: i64,
    pub flush_options: i64,
    pub dma_buf: bool,
    pub link: Option<RecordLink>,
}

/// Path between the GPU and the controller.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PathFacts {
    pub relation: String,
    pub route: String,
    pub slowest_gb_per_s: Option<f64>,
}

/// Processor that submitted.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SubmittingProcessor {
    Cpu,
    Gpu,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum StepEnd {
    Ok,
    Failed,
    Skipped,
}

/// One rung.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct WitnessStep {
    pub name: String,
    pub by: SubmittingProcessor,
    pub outcome: StepEnd,
    pub measured: Option<TimedPass>,
    pub verified: Option<VerifiedBytes>,
    pub tier: Option<RecordTier>,
    /// Reason why the step was skipped.
    pub why: Option<String>,
    pub error: Option<StepFailure>,
}

/// Amount and time of the one pass that is timed.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TimedPass {
    pub bytes: u64,
    pub commands: u64,
    pub command_bytes: u64,
    pub queues: u64,
    pub depth: u64,
    pub seconds: f64,
    pub gb_per_s: f64,
    /// Fraction of the trained rate of the controller's link.
    pub of_link: Option<f64>,
}

/// Method by which the bytes were verified.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct VerifiedBytes {
    /// The two methods that returned the same bytes.
    pub how: String,
    pub bytes: u64,
    /// The fraction of units of 4 KiB or a block that are all zero: comparing such bytes shows
    /// little.
    pub zero_share: f64,
    /// Sums of the bytes of both paths, salted with a number that is not stored.
    pub sums: Option<[String; 2]>,
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RecordTier {
    pub tier: u32,
    pub why: String,
}

/// Cause of a step's failure.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct StepFailure {
    /// Code of the error, as in docs/json.md.
    pub code: String,
    pub message: String,
}

impl TimedPass {
    pub fn new(bytes: u64, command_bytes: u64, (queues, depth): (u64, u64), seconds: f64) -> Self {
        Self {
            bytes,
            commands: bytes.div_ceil(command_bytes.max(1)),
            command_bytes,
            queues,
            depth,
            seconds,
            gb_per_s: bytes as f64 / seconds.max(1e-9) / 1e9,
            of_link: None,
        }
    }
}

impl From<nvme_host::topology::LinkState> for RecordLink {
    fn from(link: nvme_host::topology::LinkState) -> Self {
        let rate = |rate: nvme_host::topology::LinkRate| RecordRate {
            generation: rate.generation,
            lanes: rate.lanes,
            gb_per_s: rate.gb_per_s,
        };
        Self {
            trained: link.trained.map(rate),
            possible: link.possible.map(rate),
        }
    }
}
