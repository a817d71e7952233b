//! A controller, queues that the GPU drives, and data memory: everything that a command of the CLI needs, opened,
//! used and closed in one place. Stores use the parts directly.

use super::data::GpuData;
use super::driver::Gpu;
use super::kernels::{Kernel, QueueKernels};
use super::mode::SubmitMode;
use super::queue_pairs::{GpuQueuePairs, RecoveryCounts};
use super::queues::{LaunchGrid, LaunchResult};
use super::tier::{GpuAccess, TierRequest};
use super::trace::{LaunchTrace, RecordedEvents};
use nvme_core::ControllerFault;
use nvme_core::bringup::NamespaceInfo;
use nvme_core::spec::{Nsid, Status, nvm};
use nvme_driver::controller::Controller;
use nvme_driver::controller::config::ControllerConfig;
use nvme_driver::controller::outage::OutageCounts;
use nvme_driver::controller::session::UserFacts;
use nvme_driver::device::Device;
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::work::{LaunchArguments, pattern};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Limit of the deadline of a command: a `CollectiveQueue` keeps deadlines in units of 2^10 ns as 32 bits, and would
/// take one more than 36 minutes ahead for a past one.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(35 * 60);

/// Threads of [`SubmitMode::Shared`] for each queue, by default.
const THREADS_PER_QUEUE: u32 = 256;
/// Time that the host waits for a launch, beyond ten times the deadline of a command: every command inside has
/// ended by then, with an error if need be, so a kernel that still runs does not end.
const PATIENCE: Duration = Duration::from_secs(10);
/// Warps of the shared kernel that a multiprocessor holds, at some 250 registers a thread: with more,
/// the kernel of few registers is used.
const RESIDENT_WARPS: u32 = 8;
/// Queues from which on that kernel is the faster one.
const MANY_QUEUES: u32 = 64;
/// Time that each command of a launch adds to the host's deadline for the launch: even a slow drive that executes one
/// command after another needs no longer for each.
const SLOWEST: Duration = Duration::from_millis(10);

/// Options of driving a controller by a GPU.
#[derive(Clone, Copy, Debug)]
pub struct SessionSetup {
    /// The GPU.
    pub gpu: u32,
    /// Threads that submit to a queue.
    pub mode: SubmitMode,
    /// Placement of doorbells and data.
    pub tier: TierRequest,
    /// Threads in all, in [`SubmitMode::Shared`], where 0 is 256 for each queue; threads of each block, up to
    /// 1,024, in [`SubmitMode::Block`], where 0 is 128.
    pub threads: u32,
    /// Data is in controller memory, whatever the tier says.
    pub data_in_cmb: bool,
    /// Queue pairs.
    pub queues: u32,
    /// Commands in flight per queue.
    pub depth: u32,
    /// Namespace.
    pub nsid: Nsid,
}

/// Commands of one launch.
#[derive(Clone, Copy, Debug)]
pub struct LaunchWork {
    /// NVM command set opcode.
    pub opcode: u8,
    /// First block of the span.
    pub lba: u64,
    /// Blocks of each command.
    pub blocks: u32,
    /// Commands.
    pub commands: u64,
    /// Command-sized units in the span; more commands than that begin again at its start.
    pub units: u64,
    /// Uniform over the span instead of ascending.
    pub random: bool,
    /// Seed of the order.
    pub seed: u64,
    /// Command i's data lies at i times its length; else buffers are used again.
    pub linear: bool,
    /// Offset in the data memory, in bytes, at which the launch's data begin.
    pub data_at: u64,
}

/// Commands that a launch lost, and the recovery that followed.
#[derive(Clone, Debug)]
pub struct LostCommands {
    /// Commands that did not complete.
    pub commands: u64,
    /// Counts of the recovery.
    pub recovered: RecoveryCounts,
    /// Description of the loss and of the recovery.
    pub cause: String,
}

impl LostCommands {
    /// Adds this to the outages of a run in which as many commands are sent again.
    pub fn note(self, outages: &mut OutageCounts) {
        outages.lost += self.commands;
        outages.retried += self.commands;
        outages.aborted += u64::from(self.recovered.aborted + self.recovered.late);
        outages.resets += u64::from(self.recovered.cause.is_some());
        outages.note(self.cause);
    }
}

/// A controller that a GPU drives.
pub struct GpuSession {
    pairs: GpuQueuePairs,
    data: Arc<GpuData>,
    access: Arc<GpuAccess>,
    info: NamespaceInfo,
    setup: SessionSetup,
    command_bytes: u64,
    timeout: Duration,
    trace: Option<LaunchTrace>,
    /// Warps of the shared kernel that the GPU holds at a time.
    resident: u32,
    footing: UserFacts,
    controller: Controller,
}

fn warps(grid: LaunchGrid) -> u32 {
    grid.blocks.saturating_mul(grid.threads / 32)
}

impl GpuSession {
    /// Opens the GPU, starts the controller behind `device` and lends queues to the GPU. A command moves
    /// `command_bytes`, limited to what the controller transfers at once. Data memory is at least `data_bytes` (a whole
    /// number of commands), and enough for a command in each slot.
    ///
    /// # Errors
    /// The errors of [`Gpu::open`], [`GpuAccess::find`], [`Controller::start`] and [`GpuQueuePairs::create`].
    pub fn open(
        setup: SessionSetup,
        device: Arc<dyn Device>,
        config: &ControllerConfig,
        command_bytes: u64,
        data_bytes: u64,
    ) -> Result<Self> {
        if setup.mode == SubmitMode::Block && setup.threads > 1024 {
            return Err(Error::usage(
                format!(
                    "a block of {} threads is more than CUDA launches",
                    setup.threads
                ),
                "use --threads 1024 or less",
            ));
        }
        if config.timeout > LONGEST_TIMEOUT {
            return Err(Error::usage(
                format!(
                    "a time-out of {} s does not fit the clock of a kernel",
                    config.timeout.as_secs()
                ),
                format!(
                    "use {} s (--timeout-ms {}) or less: a kernel keeps deadlines in 32 bits",
                    LONGEST_TIMEOUT.as_secs(),
                    LONGEST_TIMEOUT.as_millis()
                ),
            ));
        }
        let gpu = Gpu::open(setup.gpu)?;
        let kernels = Arc::new(QueueKernels::load(&gpu)?);
        let queues = u16::try_from(setup.queues)
            .ok()
            .filter(|queues| *queues > 0)
            .ok_or_else(|| {
                Error::usage(
                    format!(
                        "--queues {} is not a possible number of queues",
                        setup.queues
                    ),
                    "use 1 to 65535",
                )
            })?;
        let access = Arc::new(GpuAccess::find(&gpu, device, queues, setup.tier)?);
        let config = ControllerConfig {
            // One more queue pair than the GPU's, for the CPU, if the controller has it.
            queue_pairs: setup.queues.saturating_add(1),
            ..config.clone()
        };
        let controller = Controller::start(Arc::clone(access.device()), &config)?;
        let info = controller.usable_namespace(setup.nsid)?;
        let block = u64::from(info.block_bytes);
        let most = controller
            .max_transfer()
            .min(u64::from(nvm::MAX_BLOCKS) * block);
        let command_bytes = command_bytes.min(most) / block * block;
        if command_bytes == 0 {
            return Err(Error::usage(
                format!("a command of fewer bytes than a block of {block} bytes cannot be sent"),
                format!("use a multiple of {block}"),
            ));
        }
        let entries = setup.depth.saturating_add(1);
        let pairs = GpuQueuePairs::create(&kernels, &controller, &access, setup.queues, entries)?;
        let slots = u64::from(setup.queues) * u64::from(entries.next_power_of_two());
        let holders = slots.max(u64::from(setup.threads()));
        // Controller memory is small, so that only as much is taken as the commands need.
        let wanted = if setup.data_in_cmb { 0 } else { data_bytes };
        let bytes = wanted
            .max(holders * command_bytes)
            .next_multiple_of(command_bytes);
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let data = Arc::new(match setup.data_in_cmb {
            true => access.data_in_controller(bytes)?,
            false => access.data(bytes)?,
        });
        Ok(Self {
            pairs,
            data,
            access,
            info,
            setup,
            command_bytes,
            timeout: config.timeout,
            trace: None,
            resident: gpu.multiprocessors()? * RESIDENT_WARPS,
            footing: UserFacts::new(controller.session(), info),
            controller,
        })
    }

    /// Returns the deadline of a launch of few commands.
    fn patience(&self) -> Duration {
        self.timeout.saturating_mul(10).saturating_add(PATIENCE)
    }

    /// Has launches end early once `stop` is set: a launch then continues for at most the deadline of a command
    /// (10 s at most) plus one second. Commands end by then; a kernel that has not ended is abandoned, with the
    /// GPU.
    pub fn end_early(&mut self, stop: Arc<AtomicBool>) {
        let grace = self.timeout.min(Duration::from_secs(10)) + Duration::from_secs(1);
        self.pairs.end_early(stop, grace);
    }

    /// Returns the GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        self.access.gpu()
    }

    /// Describes the tier and the reason for it.
    pub fn tier(&self) -> String {
        self.access.describe()
    }

    /// Returns the access to the doorbells and the data.
    pub fn access(&self) -> &GpuAccess {
        &self.access
    }

    /// Returns the number of bytes that one command moves.
    pub fn command_bytes(&self) -> u64 {
        self.command_bytes
    }

    /// Makes kernels record their events from now on.
    ///
    /// # Errors
    /// As [`LaunchTrace::new`].
    pub fn record(&mut self) -> Result<()> {
        self.trace = Some(LaunchTrace::new(self.gpu())?);
        Ok(())
    }

    /// Takes the events recorded so far, for the trace of a later session.
    pub fn take_recorded(&mut self) -> RecordedEvents {
        let trace = self.trace.as_mut();
        trace.map_or_else(RecordedEvents::default, |trace| {
            std::mem::take(trace.recorded())
        })
    }

    /// Adds the events of an earlier session, if kernels record.
    pub fn go_on_from(&mut self, earlier: RecordedEvents) {
        if let Some(trace) = &mut self.trace {
            trace.recorded().go_on_from(earlier);
        }
    }

    /// Returns the recorded events.
    pub fn trace(&self) -> Option<&LaunchTrace> {
        self.trace.as_ref()
    }

    /// Returns the namespace.
    pub fn info(&self) -> &NamespaceInfo {
        &self.info
    }

    /// Returns the controller, for admin commands and for queues of the CPU beside the GPU's.
    pub fn controller(&self) -> &Controller {
        &self.controller
    }

    /// Returns the data memory.
    pub fn data(&self) -> &GpuData {
        &self.data
    }

    /// Returns the data memory, to be filled. No command is in flight between two launches.
    ///
    /// # Errors
    /// [`Error::Device`] when a failed launch still uses it.
    pub fn data_mut(&mut self) -> Result<&mut GpuData> {
        Arc::get_mut(&mut self.data)
            .ok_or_else(|| Error::internal("the data memory still belongs to commands"))
    }

    fn grid(&self) -> LaunchGrid {
        let setup = &self.setup;
        let grid = setup.mode.grid(setup.queues, setup.threads(), 32);
        let kernel = match (grid.kernel, &self.trace) {
            (Kernel::Owner, Some(_)) => Kernel::OwnerTraced,
            (Kernel::Warp, Some(_)) => Kernel::WarpTraced,
            (Kernel::Block, Some(_)) => Kernel::BlockTraced,
            (Kernel::Shared, Some(_)) => Kernel::SharedTraced,
            (Kernel::Shared, None)
                if setup.queues >= MANY_QUEUES && warps(grid) > self.resident =>
            {
                Kernel::SharedNarrow
            }
            (kernel, _) => kernel,
        };
        LaunchGrid { kernel, ..grid }
    }

    fn launch(&self, work: &LaunchWork) -> LaunchArguments {
        LaunchArguments {
            commands: work.commands,
            lba: work.lba,
            units: work.units.max(1),
            seed: work.seed,
            timeout_ns: u64::try_from(self.timeout.as_nanos()).unwrap_or(u64::MAX),
            nsid: self.info.nsid.0,
            opcode: u32::from(work.opcode),
            blocks: work.blocks,
            block_shift: self.info.block_bytes.trailing_zeros(),
            depth: self.setup.depth,
            pattern: match work.random {
                true => pattern::RANDOM,
                false => pattern::SEQUENTIAL,
            },
            lanes: 32,
            linear: u32::from(work.linear),
            data: work.data_at,
            ..LaunchArguments::default()
        }
    }

    /// Runs `work` to its end; every command succeeded when this returns. `what` is the command in words.
    ///
    /// # Errors
    /// As [`attempt`](Self::attempt), and [`Error::Gone`] when a command got no answer or the controller
    /// broke the protocol: the session can be used again then.
    pub fn run(&mut self, what: &str, work: &LaunchWork) -> Result<LaunchResult> {
        match self.attempt(what, work)? {
            (ran, None) => Ok(ran),
            (_, Some(lost)) => Err(Error::Gone { cause: lost.cause }),
        }
    }

    /// Runs `work`. When commands got no answer or the controller broke the protocol, the kernel has returned and the
    /// controller was recovered; a description of that is returned with the counts. Nothing is in flight then and the
    /// session can be used again. `what` is the command in words.
    ///
    /// # Errors
    /// [`Error::Command`] with a status when a command failed; [`Error::Gone`] when the controller does not
    /// come back.
    pub fn attempt(
        &mut self,
        what: &str,
        work: &LaunchWork,
    ) -> Result<(LaunchResult, Option<LostCommands>)> {
        let slowest = SLOWEST * work.commands.min(1 << 20) as u32;
        let limit = self.patience().saturating_add(slowest);
        self.footing.check(work.opcode)?;
        let launch = self.launch(work);
        let launch = match &self.trace {
            Some(trace) => trace.attach(launch),
            None => launch,
        };
        let ran = self
            .pairs
            .run(self.grid(), launch, &self.data, false, limit)?;
        let report = &ran.report;
        if report.status != 0 {
            self.footing.saw(Status(report.status as u16));
        }
        // Results from the time of a change of the namespace may be wrong, and an error may have
        // the change as its cause. So the change is reported in place of either.
        self.footing.check(work.opcode)?;
        if let Some(trace) = &mut self.trace {
            trace.take(report.traced);
        }
        if report.completed == work.commands {
            return Ok((ran, None));
        }
        if report.timed_out == 0 && report.fault == 0 {
            return Err(match (report.failed, report.refused) {
                // A kernel that never ran counts nothing.
                (0, 0) => Error::environment(
                    format!(
                        "the kernel did {} of {} commands",
                        report.completed, work.commands
                    ),
                    "run `nvidia-smi`, and report this",
                ),
                (0, _) => Error::usage(
                    format!("{} commands were refused by full queues", report.refused),
                    "use fewer --threads or a smaller --bytes",
                ),
                _ => Error::Command {
                    what: format!("{what} ({} of {} commands)", report.failed, work.commands),
                    status: Status(report.status as u16),
                },
            });
        }
        if let Some(trace) = &mut self.trace {
            trace.reclaim(&self.pairs.in_flight()?);
        }
        let recovered = self.pairs.recover()?;
        let cause = match ControllerFault::from_code(report.fault as u32) {
            Some(fault) => format!("{what}: {fault}"),
            None => format!(
                "{what}: {} of {} commands got no answer within {} ms",
                report.timed_out,
                work.commands,
                self.timeout.as_millis()
            ),
        };
        let cause = format!("{cause} ({})", in_words(&recovered));
        let lost = LostCommands {
            commands: work.commands - report.completed,
            recovered,
            cause,
        };
        Ok((ran, Some(lost)))
    }

    /// Checks on the GPU that the first `bytes` bytes of the data memory are those that
    /// [`data_word`](nvme_gpu_kernel::work::data_word) gives for the blocks from `lba` on: the number of
    /// words that are not.
    pub fn verify(&mut self, lba: u64, bytes: u64, seed: u64) -> Result<u64> {
        let launch = LaunchArguments {
            lba,
            seed,
            block_shift: self.info.block_bytes.trailing_zeros(),
            blocks: 1,
            commands: bytes / u64::from(self.info.block_bytes),
            ..LaunchArguments::default()
        };
        let grid = LaunchGrid {
            kernel: Kernel::Verify,
            blocks: self.gpu().multiprocessors()? * 4,
            threads: 256,
        };
        let ran = self
            .pairs
            .run(grid, launch, &self.data, false, self.patience())?;
        Ok(ran.report.wrong)
    }

    /// Shuts the controller down and returns the result.
    pub fn close(self) -> Result<()> {
        drop(self.pairs);
        drop(self.data);
        self.controller.shut_down()
    }
}

impl SessionSetup {
    fn threads(&self) -> u32 {
        match (self.mode, self.threads) {
            (SubmitMode::Shared, 0) => self.queues.saturating_mul(THREADS_PER_QUEUE),
            (SubmitMode::Shared | SubmitMode::Block, threads) => threads,
            _ => 0,
        }
    }
}

fn in_words(recovered: &RecoveryCounts) -> String {
    let RecoveryCounts {
        late,
        aborted,
        reset,
        cause,
    } = recovered;
    match cause {
        None => format!("{late} came late, {aborted} were aborted"),
        Some(cause) => format!(
            "{late} came late, {aborted} were aborted, {reset} ended with a controller reset: {cause}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recovery_is_told_in_one_line() {
        let recovered = RecoveryCounts {
            late: 1,
            aborted: 2,
            reset: 3,
            cause: Some("because".to_owned()),
        };
        let text = in_words(&recovered);
        assert!(
            text.contains("3 ended with a controller reset: because"),
            "{text}"
        );
        assert!(!in_words(&RecoveryCounts::default()).contains("reset"));
    }
}
