//! `stream`: long sequential reads into memory, as a layer loader does.

use crate::common::images::CommandFiles;
use crate::common::{NamespaceArgs, check_stop, number, output, progress, some_bytes};
#[cfg(feature = "cuda")]
use crate::gpu::transfer::{self, GpuArgs, PatternArg, TransferTotals};
use clap::Args;
use nvme_host::bench::{self, AccessPattern, BenchJob, RunLimit};
#[cfg(feature = "cuda")]
use nvme_host::core::spec::nvm;
#[cfg(feature = "cuda")]
use nvme_host::cuda::LaunchWork;
use nvme_host::units;
use nvme_host::{ControllerConfig, Error, Result};
use serde_json::{Value, json};

/// Read a range at full speed, with long commands, into host or GPU memory
#[derive(Args)]
pub struct StreamCommand {
    #[command(flatten)]
    namespace: NamespaceArgs,
    /// First block
    #[arg(long, short = 's', default_value_t = 0, value_parser = number::<u64>(0..=u64::MAX))]
    lba: u64,
    /// Bytes to read, wrapping at the end; all when missing
    #[arg(long, value_parser = some_bytes)]
    size: Option<u64>,
    /// Queue pairs
    #[arg(long, default_value_t = 4, value_parser = number::<u32>(1..=4096))]
    queues: u32,
    /// Commands in flight per queue
    #[arg(long, default_value_t = 8, value_parser = number::<u32>(1..=1024))]
    depth: u32,
    /// Bytes per command; cut to what the controller transfers at once
    #[arg(long, default_value = "1MiB", value_parser = some_bytes)]
    bytes: u64,
    /// Read the same blocks again with the CPU and compare every byte
    #[cfg(feature = "cuda")]
    #[arg(long, requires = "gpu")]
    verify: bool,
    /// Order of the commands
    #[cfg(feature = "cuda")]
    #[arg(
        long,
        value_enum,
        default_value = "sequential",
        conflicts_with = "verify",
        requires = "gpu"
    )]
    pattern: PatternArg,
    #[cfg(feature = "cuda")]
    #[command(flatten)]
    gpu: GpuArgs,
}

impl StreamCommand {
    #[cfg_attr(
        not(feature = "cuda"),
        expect(unused_variables, reason = "a GPU's run names them")
    )]
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        #[cfg(feature = "cuda")]
        if self.gpu.gpu.is_some() {
            return self.run_on_gpu(files);
        }
        self.run_on_cpu()
    }

    /// Reads with a CPU thread for each queue, into host memory.
    fn run_on_cpu(self) -> Result<()> {
        let device = &self.namespace.device;
        let config = ControllerConfig {
            queue_pairs: self.queues,
            ..device.config()
        };
        let controller = device.start_with(&config)?;
        let nsid = self.namespace.nsid();
        let info = controller.usable_namespace(nsid)?;
        let (block, blocks) = (u64::from(info.block_bytes), info.blocks);
        if self.lba != 0 {
            return Err(Error::usage(
                format!(
                    "--lba {} needs --gpu: without it `stream` starts at block 0",
                    self.lba
                ),
                "start at 0, or use `nvme-gpu read`",
            ));
        }
        if self.bytes < block {
            return Err(Error::usage(
                format!(
                    "--bytes {} is less than a block of the namespace, {block} bytes",
                    self.bytes
                ),
                format!("use --bytes {block} or more"),
            ));
        }
        check_stop()?;
        let bytes = self
            .bytes
            .min(controller.max_transfer())
            .min(blocks * block)
            / block
            * block;
        let size = self.size.unwrap_or(blocks * block);
        let job = BenchJob {
            nsid,
            pattern: AccessPattern::Sequential,
            read_percent: 100,
            bytes: u32::try_from(bytes).unwrap_or(u32::MAX),
            queues: self.queues,
            depth: self.depth,
            limit: RunLimit::Bytes(size),
            ramp: None,
            span_blocks: 0,
            seed: 1,
            verify: false,
        };
        let bar = progress::bytes(size, "reading");
        let (controller, report) =
            bench::run(controller, &job, None, |now| bar.set_position(now.bytes))?;
        if report.interrupted {
            return Err(Error::Interrupted);
        }
        bar.finish_and_clear();
        controller.shut_down()?;
        let (read, _) = report.total();
        self.report(&StreamOutcome {
            bytes: read.bytes,
            seconds: read.seconds,
            commands: read.commands,
            by: format!("{} CPU threads", self.queues),
            tier: None,
            verified: None,
            per_command: Value::Null,
        })
    }

    /// Returns the number of bytes from `--lba` to the end of the namespace: at least one command.
    #[cfg(feature = "cuda")]
    fn bytes_left(
        &self,
        info: &nvme_host::core::bringup::NamespaceInfo,
        command: u64,
    ) -> Result<u64> {
        let left = info.blocks.saturating_sub(self.lba) * u64::from(info.block_bytes);
        if left < command {
            return Err(Error::usage(
                format!(
                    "the namespace has less than one command of {command} bytes from LBA {}",
                    self.lba
                ),
                "use a smaller --lba or --bytes",
            ));
        }
        Ok(left)
    }

    /// Returns the launch of `commands` reads of `blocks` blocks among `units` positions, the first of them position
    /// `first`.
    #[cfg(feature = "cuda")]
    fn launch(&self, first: u64, blocks: u32, commands: u64, units: u64, seed: u64) -> LaunchWork {
        LaunchWork {
            opcode: nvm::opcode::READ,
            lba: self.lba + first * u64::from(blocks),
            blocks,
            commands,
            units,
            random: self.pattern == PatternArg::Random,
            seed,
            linear: self.verify,
            data_at: 0,
        }
    }

    #[cfg(feature = "cuda")]
    fn run_on_gpu(self, files: &CommandFiles) -> Result<()> {
        let device = &self.namespace.device;
        let nsid = self.namespace.nsid();
        let setup = self.gpu.setup(self.queues, self.depth, nsid, true);
        let opened = device.open()?;
        let config = device.reading();
        let chunk = if self.verify { 256 << 20 } else { 0 };
        let mut session =
            nvme_host::cuda::GpuSession::open(setup, opened, &config, self.bytes, chunk)?;
        let (block, command) = (
            u64::from(session.info().block_bytes),
            session.command_bytes(),
        );
        let left = self.bytes_left(session.info(), command)?;
        let size = self.size.unwrap_or(left);
        let (span, commands) = (left / command, size.div_ceil(command).max(1));
        // With a check, a launch reads as much as fits into the data memory. Without one, buffers are
        // overwritten, and a launch is long enough that its start and end do not distort the rate.
        let per_launch = match self.verify {
            true => session.data().len() as u64 / command,
            false => ((4u64 << 30) / command).max(1),
        };
        let random = self.pattern == PatternArg::Random;
        let bar = transfer::bar(&session, commands * command / block, "reading");
        let mut compare = self
            .verify
            .then(|| session.controller().namespace(nsid))
            .transpose()?;
        self.gpu.record(files, &mut session)?;
        let mut totals = TransferTotals::default();
        let (mut done, mut unit) = (0, 0);
        while done < commands {
            check_stop()?;
            let most = per_launch.min(commands - done);
            let blocks = (command / block) as u32;
            let (work, count) = match random {
                true => (self.launch(0, blocks, most, span, done + 1), most),
                false => {
                    let count = most.min(span - unit);
                    (self.launch(unit, blocks, count, count, done + 1), count)
                }
            };
            let ran = session.run("Read", &work);
            let ran = self.gpu.keep(files, &session, ran)?;
            totals.add(&ran, count);
            if let Some(namespace) = &mut compare {
                check(&session, namespace, work.lba, count * command)?;
            }
            bar.inc(count * command);
            done += count;
            unit = (unit + count) % span;
        }
        bar.finish_and_clear();
        drop(compare);
        let outcome = StreamOutcome {
            bytes: commands * command,
            seconds: totals.seconds,
            commands,
            by: session.gpu().describe(),
            tier: Some(session.tier()),
            verified: self.verify.then_some(true),
            per_command: totals.per_command(),
        };
        session.close()?;
        self.report(&outcome)
    }

    fn report(&self, outcome: &StreamOutcome) -> Result<()> {
        let StreamOutcome {
            bytes,
            seconds,
            commands,
            by,
            tier,
            verified,
            per_command,
        } = outcome;
        let gbps = *bytes as f64 / seconds.max(1e-9) / 1e9;
        if self.namespace.device.form.json {
            return output::json(&json!({
                "bytes": bytes, "seconds": seconds, "gb_per_s": gbps, "commands": commands,
                "bytes_per_command": bytes / commands.max(&1), "driver": by, "tier": tier,
                "verified": verified, "per_command": per_command,
            }));
        }
        let mut text = format!(
            "{} in {seconds:.3} s: {gbps:.2} GB/s, {commands} commands\ndriven by {by}\n",
            units::bytes(*bytes)
        );
        if let Some(tier) = tier {
            text.push_str(&format!("{tier}\n"));
        }
        if verified.is_some() {
            text.push_str("verified: every byte is what the CPU reads\n");
        }
        output::print(&text)
    }
}

/// Results of a stream.
struct StreamOutcome {
    bytes: u64,
    seconds: f64,
    commands: u64,
    by: String,
    tier: Option<String>,
    verified: Option<bool>,
    per_command: Value,
}

/// Reads the same bytes with the CPU's own queue and compares.
#[cfg(feature = "cuda")]
fn check(
    session: &nvme_host::cuda::GpuSession,
    namespace: &mut nvme_host::Namespace,
    lba: u64,
    bytes: u64,
) -> Result<()> {
    use nvme_host::core::spec::Lba;
    const STEP: u64 = 4 << 20;
    let block = u64::from(namespace.block_bytes());
    let (mut here, mut there) = (Vec::new(), Vec::new());
    let mut at = 0;
    while at < bytes {
        let len = STEP.min(bytes - at) as usize;
        here.resize(len, 0);
        there.resize(len, 0);
        session.data().read(at as usize, &mut there)?;
        namespace.read(Lba(lba + at / block), &mut here)?;
        if here != there {
            let wrong = here.iter().zip(&there).position(|(a, b)| a != b);
            let wrong = at + wrong.unwrap_or(0) as u64;
            return Err(Error::Mismatch {
                what: format!(
                    "byte {} of LBA {} is not what the CPU reads",
                    wrong % block,
                    lba + wrong / block
                ),
            });
        }
        at += len as u64;
    }
    Ok(())
}
