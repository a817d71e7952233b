//! `witness`: runs every step that a machine supports, from Identify to transfers by a GPU, and writes one file
//! that records what ran and what it measured. The file has no names, serial numbers or paths, so that it can be
//! published.

mod by_cpu;
#[cfg(feature = "cuda")]
mod by_gpu;
mod check;
mod digest;
mod facts;
mod file;
mod pass;
mod plan;
mod record;
mod redact;
mod run;
mod steps;
mod text;
mod watch;

use crate::common::images::CommandFiles;
use crate::common::{NamespaceId, VERSION, WriteArgs, check_stop, duration, number, output, say};
use clap::Args;
use file::OutFile;
use nvme_host::sysfs::{LendingDriver, SysfsHost};
use nvme_host::topology::MachineTopology;
use nvme_host::words::listed;
use nvme_host::{Controller, Error, Result};
use plan::{RunLengths, WitnessPlan};
use record::{RunEnd, StepEnd, SubmittingProcessor, WitnessRecord};
use redact::RedactedWords;
use run::{OpenedDevice, RunContext, WritableBlocks};
use std::path::PathBuf;
use std::time::Duration;
use steps::{IDENTIFY, StepWorkload};

/// Run every step that this machine allows, read-only, and write one file that says what ran
///
/// Reads blocks, PRP lists up to MDTS, 669 MB and 8.6 GB at depth 32, a loader of layers and rows by ids, by the CPU
/// and by a GPU where there is one, and compares the bytes with those of another way (docs/witness.md). Nothing is
/// written to the drive without --write-range. The file has no serial numbers, names of hosts or users, and no paths.
#[derive(Args)]
pub struct WitnessCommand {
    /// Device; without it the one controller that is bound to vfio-pci or nvme_gpu
    #[arg(long, short = 'd')]
    device: Option<String>,
    #[command(flatten)]
    namespace: NamespaceId,
    /// First block that is read
    #[arg(long, short = 's', default_value_t = 0, value_parser = number::<u64>(0..=u64::MAX))]
    lba: u64,
    /// Time limit of a command, after which it is aborted
    #[arg(long, short = 't', visible_alias = "timeout", value_name = "MS", default_value_t = 5000, value_parser = number::<u64>(1..=2_100_000))]
    timeout_ms: u64,
    /// Time limit of one step
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = duration)]
    step_limit: Duration,
    /// Use GPU N; without this, GPU 0 where there is one
    #[arg(long, value_name = "N", value_parser = number::<u32>(0..=1023))]
    gpu: Option<u32>,
    /// Use CPU threads alone, whatever GPU there is
    #[arg(long, conflicts_with = "gpu")]
    cpu: bool,
    /// Read a tenth of the first length, and less of the others: for a look
    #[arg(long)]
    quick: bool,
    /// Overwrite these blocks, read them back, and put back what was there: LBA:BLOCKS, 256 MiB at most
    #[arg(long, value_name = "LBA:BLOCKS")]
    write_range: Option<WritableBlocks>,
    #[command(flatten)]
    write: WriteArgs,
    /// The file that is written; witness-DATE.json in this folder when missing
    #[arg(long, short = 'o', value_name = "FILE")]
    out: Option<PathBuf>,
    /// Check a witness file instead, and print its row for docs/hardware.md
    #[arg(long, value_name = "FILE", conflicts_with_all = ["device", "out", "write_range", "quick", "gpu", "cpu"])]
    check: Option<PathBuf>,
    /// Print one JSON object, which is what the file holds
    #[arg(long)]
    json: bool,
}

/// Returns the one controller that is bound to a lender.
fn bound(host: &SysfsHost) -> Result<String> {
    let mut found = Vec::new();
    for one in host.controllers() {
        match one.driver.as_deref().and_then(LendingDriver::of) {
            Some(LendingDriver::Vfio) => found.push(format!("vfio:{}", one.address)),
            Some(LendingDriver::Module) => found.push(format!("kmod:{}", one.address)),
            None => {}
        }
    }
    match &found[..] {
        [one] => Ok(one.clone()),
        [] => Err(Error::usage(
            "no NVMe controller is bound to vfio-pci or nvme_gpu",
            "`nvme-gpu list` shows them, `nvme-gpu bind BDF` as root gives one; or try `-d sim:mem?size=1GiB`",
        )),
        all => Err(Error::usage(
            format!("{} controllers are bound: {}", all.len(), listed(all)),
            "name one with --device",
        )),
    }
}

impl WitnessCommand {
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        if let Some(path) = &self.check {
            return check::run(path, files, self.json);
        }
        let host = SysfsHost::here();
        let device = match &self.device {
            Some(device) => device.clone(),
            None => bound(&host)?,
        };
        let date = text::date(std::time::SystemTime::now());
        let mut out = OutFile::create(self.out.as_deref(), &date, files)?;
        let mut secrets = RedactedWords::of_machine(&host, |name| std::env::var(name).ok());
        secrets.add(
            device
                .split_once(':')
                .map(|(_, rest)| rest)
                .filter(|_| facts::address_of(&device).is_none() && !device.starts_with("sim:")),
        );
        let mut record = WitnessRecord {
            schema_version: output::SCHEMA_VERSION,
            witness_version: record::VERSION,
            ended: RunEnd::Unfinished,
            date,
            tool: format!("nvme-gpu {}", VERSION),
            command: self.command(&device),
            simulator: device.starts_with("sim:"),
            machine: facts::machine(&host),
            controller: None,
            gpu: None,
            path: None,
            steps: Vec::new(),
        };
        let failed = self.climb(&device, &host, &mut record, &mut secrets, &mut out);
        record.ended = match &failed {
            Some(Error::Interrupted) => RunEnd::Interrupted,
            _ => RunEnd::Complete,
        };
        let value = out.write(&record, &secrets)?;
        if self.json {
            return failed.map_or_else(|| output::json(&value), Err);
        }
        output::print(&format!("{}written: {}", text::table(&record), out.name()))?;
        failed.map_or(Ok(()), Err)
    }

    /// Reconstructs the command line from the parsed options, without paths.
    fn command(&self, device: &str) -> String {
        let mut words = vec!["nvme-gpu witness -d".to_owned(), text::device(device)];
        let mut add = |is_on: bool, word: String| words.extend(is_on.then_some(word));
        add(
            self.namespace.namespace_id != 1,
            format!("-n {}", self.namespace.namespace_id),
        );
        add(self.lba != 0, format!("-s {}", self.lba));
        add(self.timeout_ms != 5000, format!("-t {}", self.timeout_ms));
        let gpu = self.gpu.unwrap_or_default();
        add(self.gpu.is_some(), format!("--gpu {gpu}"));
        add(self.cpu, "--cpu".to_owned());
        add(self.quick, "--quick".to_owned());
        add(self.write.allow_write, "--allow-write".to_owned());
        let range = self
            .write_range
            .map(|one| format!("{}:{}", one.lba, one.blocks));
        add(
            range.is_some(),
            format!("--write-range {}", range.unwrap_or_default()),
        );
        words.join(" ")
    }

    /// Runs every rung and notes each: the first error, if there was one.
    fn climb(
        &self,
        device: &str,
        host: &SysfsHost,
        record: &mut WitnessRecord,
        secrets: &mut RedactedWords,
        out: &mut OutFile<'_>,
    ) -> Option<Error> {
        let topology = MachineTopology::of(host);
        let identified = self.identify(device, &topology, record, secrets);
        let mut step = steps::empty(IDENTIFY, SubmittingProcessor::Cpu, StepEnd::Ok);
        let mut context = match identified {
            Ok(context) => context,
            Err(error) => {
                step.outcome = StepEnd::Failed;
                step.error = Some(steps::failure(&error));
                record.steps.push(step);
                return Some(error);
            }
        };
        record.steps.push(step);
        let gpu = self.find_gpu(device, &topology, host, record);
        // The link of a controller that is a program carries nothing.
        let link = record.controller.as_ref().filter(|_| !record.simulator);
        let link = link.and_then(|one| one.link.as_ref()?.trained?.gb_per_s);
        let mut first = None;
        for rung in StepWorkload::ALL {
            for by in [SubmittingProcessor::Cpu, SubmittingProcessor::Gpu] {
                let why = match (rung, by, &gpu) {
                    (StepWorkload::WriteReadCompare, ..) if self.write_range.is_none() => {
                        Some("no --write-range")
                    }
                    (_, SubmittingProcessor::Gpu, Err(why)) => Some(why.as_str()),
                    _ => None,
                };
                if let Some(why) = why {
                    record.steps.push(steps::skipped(rung, by, why));
                    continue;
                }
                let gpu = gpu
                    .as_ref()
                    .ok()
                    .copied()
                    .filter(|_| by == SubmittingProcessor::Gpu);
                say::step(|| format!("{} by {by:?}", rung.name()));
                let (step, error) = steps::step(&mut context, rung, gpu, self.step_limit, link);
                record.steps.push(step);
                if let Some(Error::Interrupted) = error {
                    return error;
                }
                if let Some(error) = error {
                    first.get_or_insert(error);
                }
                // The next rung may crash the machine, so the record so far is written as a complete file
                // first.
                if let Err(error) = out.write(record, secrets).and_then(|_| check_stop()) {
                    return Some(error);
                }
            }
        }
        first
    }

    /// Brings the controller up, and plans the ranges that are read.
    fn identify(
        &self,
        device: &str,
        topology: &MachineTopology,
        record: &mut WitnessRecord,
        secrets: &mut RedactedWords,
    ) -> Result<RunContext> {
        let is_memory = device.starts_with("sim:mem");
        let writes = self.write_range.is_some() || is_memory;
        let opened = run::open(device, writes)?;
        if self.write_range.is_some() {
            self.write.check(&*opened, "witness --write-range")?;
        }
        let timeout = Duration::from_millis(self.timeout_ms);
        let nsid = self.namespace.nsid();
        let changes = self.write_range.map(|_| nsid);
        let config = run::config(timeout, self.json, changes);
        let controller = Controller::start(opened.clone(), &config)?;
        let (found, is_program) = facts::controller(&controller, nsid, device, topology, secrets)?;
        record.simulator |= is_program;
        let sizes = match self.quick {
            true => RunLengths::QUICK,
            false => RunLengths::WHOLE,
        };
        let shape = (found.block_bytes, found.blocks);
        record.controller = Some(found);
        let plan = WitnessPlan::new(nsid, shape, self.lba, controller.max_transfer(), sizes)?;
        if let Some(range) = self.write_range {
            let namespace = controller.namespace(nsid)?;
            namespace.check(nvme_host::core::spec::Lba(range.lba), range.blocks)?;
        }
        if is_memory {
            lay_out(&controller, &plan)?;
        }
        controller.shut_down()?;
        Ok(RunContext {
            opened: OpenedDevice::new(device, writes, opened),
            timeout,
            plan,
            salt: text::salt(),
            writable: self.write_range,
            as_json: self.json,
        })
    }

    /// Returns the GPU that is used, or why none is.
    fn find_gpu(
        &self,
        device: &str,
        topology: &MachineTopology,
        host: &SysfsHost,
        record: &mut WitnessRecord,
    ) -> std::result::Result<u32, String> {
        if self.cpu {
            return Err("--cpu".to_owned());
        }
        #[cfg(feature = "cuda")]
        {
            let index = self.gpu.unwrap_or(0);
            match facts::gpu(index, device, topology, host) {
                Ok((gpu, path)) => {
                    (record.gpu, record.path) = (Some(gpu), path);
                    Ok(index)
                }
                Err(error) => Err(error.to_string()),
            }
        }
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (device, topology, host, record);
            Err("this build has no GPUs".to_owned())
        }
    }
}

/// Fills the ranges that are read of a simulated drive in memory, which begins as zeroes.
fn lay_out(controller: &Controller, plan: &WitnessPlan) -> Result<()> {
    let most = plan.sizes.sequential.into_iter().max().unwrap_or(0);
    let whole = by_cpu::pass(plan, plan.within(most), plan.command(), plan::DEPTH);
    let watch = watch::StepWatch::new(Duration::from_secs(600), "filling", whole.bytes);
    let mut random = nvme_host::bench::SplitMix::new(1);
    whole.write(controller, &watch, |_, room| random.fill(room))?;
    Ok(())
}
