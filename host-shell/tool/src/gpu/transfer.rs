//! Parts of commands that a GPU can drive: options, and loops over chunks of a transfer. A chunk is one
//! launch or more; one with lost commands is transferred again in smaller chunks, after the host has
//! recovered the queues.

use crate::common::file::{check_output, write_whole};
use crate::common::images::CommandFiles;
use crate::common::{NamespaceArgs, check_stop, duration, number, progress, some_bytes};
use crate::gpu::reconnecting::{self, MOST_FAILURES, ReconnectingSession, SessionSource};
use clap::{Args, ValueEnum};
use indicatif::ProgressBar;
use nvme_host::bench::SplitMix;
use nvme_host::core::spec::Nsid;
use nvme_host::core::spec::nvm::opcode;
use nvme_host::cuda::bench::SubmitMode;
use nvme_host::cuda::{GpuSession, LaunchResult, LaunchWork, QueueTier, SessionSetup, TierRequest};
use nvme_host::{Device, Error, Result};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Data memory of one launch of a transfer: the unit between two checks for Ctrl-C.
pub const CHUNK: u64 = 256 << 20;

/// One Flush.
pub const FLUSH: LaunchWork = LaunchWork {
    opcode: opcode::FLUSH,
    lba: 0,
    blocks: 0,
    commands: 1,
    units: 1,
    random: false,
    seed: 0,
    linear: false,
    data_at: 0,
};

/// GPU that drives the queues, and its placement of memory
#[derive(Args)]
#[command(next_help_heading = "GPU")]
pub struct GpuArgs {
    /// Let GPU N drive the queues (0 without a number)
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "0", value_parser = number::<u32>(0..=1023))]
    pub gpu: Option<u32>,
    /// Owner of a queue: one thread, a warp, a block, or all threads together
    #[arg(long, value_enum, default_value = "warp", requires = "gpu")]
    pub mode: ModeArg,
    /// Placement of doorbells, data and rings (see docs/topology.md)
    #[arg(long, value_enum, default_value = "auto", requires = "gpu")]
    pub tier: TierArg,
    /// Have data in the controller memory buffer, where CMBSZ allows that
    #[arg(long, requires = "gpu")]
    pub data_in_cmb: bool,
    /// Threads: in all for --mode shared, 256 for each queue when missing; of a block for --mode block, 128 when
    /// missing
    #[arg(long, default_value_t = 0, hide_default_value = true, requires = "gpu", value_parser = number::<u32>(0..=0xFFFF_FFFF))]
    pub threads: u32,
    /// Write what the kernels did to FILE: a Chrome trace for ui.perfetto.dev in .json, else text
    #[arg(long, value_name = "FILE", requires = "gpu")]
    pub trace: Option<PathBuf>,
}

/// Queues of a GPU, and commands in flight.
#[derive(Args)]
#[command(next_help_heading = "GPU")]
pub struct ShapeArgs {
    /// Queue pairs
    #[arg(long, default_value_t = 4, requires = "gpu", value_parser = number::<u32>(1..=4096))]
    pub queues: u32,
    /// Commands in flight per queue
    #[arg(long, default_value_t = 8, requires = "gpu", value_parser = number::<u32>(1..=65_535))]
    pub depth: u32,
    /// Bytes per command; cut to what the controller transfers at once
    #[arg(long, default_value = "1MiB", value_parser = some_bytes, requires = "gpu")]
    pub bytes: u64,
    /// Order of the commands
    #[arg(long, value_enum, default_value = "sequential", requires = "gpu")]
    pub pattern: PatternArg,
    /// Go on after lost commands, resets, and a device that left: wait TIME (10s when missing) for it
    #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "10s", value_parser = duration, requires = "gpu")]
    pub recover: Option<Duration>,
}

/// A transfer by a GPU, instead of by the CPU.
#[derive(Args)]
pub struct TransferArgs {
    #[command(flatten)]
    pub gpu: GpuArgs,
    #[command(flatten)]
    shape: ShapeArgs,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum ModeArg {
    Owner,
    Warp,
    Block,
    Shared,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum TierArg {
    #[value(name = "0")]
    Relayed,
    #[value(name = "1")]
    Direct,
    #[value(name = "2")]
    GpuMemory,
    #[value(name = "3")]
    GpuRings,
    Auto,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum PatternArg {
    #[value(alias = "seq")]
    Sequential,
    #[value(alias = "rand")]
    Random,
}

impl ModeArg {
    fn mode(self) -> SubmitMode {
        match self {
            Self::Owner => SubmitMode::Owner,
            Self::Warp => SubmitMode::Warp,
            Self::Block => SubmitMode::Block,
            Self::Shared => SubmitMode::Shared,
        }
    }
}

impl TransferArgs {
    /// Hands queues of `opened`, which is the namespace's device, to the GPU, to write or only to read.
    pub fn open<'a>(
        &'a self,
        files: &'a CommandFiles,
        namespace: &'a NamespaceArgs,
        opened: Arc<dyn Device>,
        writes: bool,
    ) -> Result<GpuTransfer<'a>> {
        let shape = &self.shape;
        let nsid = namespace.nsid();
        // Data in host memory, unless `--tier` says otherwise.
        let setup = self.gpu.setup(shape.queues, shape.depth, nsid, false);
        let source = SessionSource {
            device: &namespace.device.device,
            config: match writes {
                true => namespace.config(),
                false => namespace.device.reading(),
            },
            setup,
            trace: self.gpu.trace.as_deref(),
            files,
            recover: shape.recover,
            bytes: shape.bytes,
            data_bytes: CHUNK,
        };
        let random = shape.pattern == PatternArg::Random;
        let wave = u64::from(shape.queues) * u64::from(shape.depth);
        Ok(GpuTransfer {
            wave: random.then_some(wave),
            ..GpuTransfer::open(source, opened)?
        })
    }
}

impl GpuArgs {
    /// Makes kernels record events, if the user asked for it. Nothing has run then that a file that cannot be made would
    /// lose.
    pub fn record(&self, files: &CommandFiles, session: &mut GpuSession) -> Result<()> {
        match &self.trace {
            Some(path) => check_output(path, files).and_then(|()| session.record()),
            None => Ok(()),
        }
    }

    /// Writes the recorded events to the file that the user named; `ended` is the result of the work itself.
    pub fn keep<T>(
        &self,
        files: &CommandFiles,
        session: &GpuSession,
        ended: Result<T>,
    ) -> Result<T> {
        if let (Some(path), Some(trace)) = (&self.trace, session.trace()) {
            // The error of the work matters more than one of its trace.
            let written = write_whole(path, trace.text_for(path).as_bytes(), files);
            return ended.and_then(|value| written.map(|()| value));
        }
        ended
    }

    /// Returns the setup for `queues` queues of `depth`; `gpu_memory` is true if `--tier auto` should place the data in
    /// GPU memory.
    pub fn setup(&self, queues: u32, depth: u32, nsid: Nsid, gpu_memory: bool) -> SessionSetup {
        SessionSetup {
            gpu: self.gpu.unwrap_or(0),
            mode: self.mode.mode(),
            tier: match self.tier {
                TierArg::Auto => TierRequest::Auto { gpu_memory },
                TierArg::Relayed => TierRequest::Exactly(QueueTier::Relayed),
                TierArg::Direct => TierRequest::Exactly(QueueTier::Direct),
                TierArg::GpuMemory => TierRequest::Exactly(QueueTier::GpuMemory),
                TierArg::GpuRings => TierRequest::Exactly(QueueTier::GpuRings),
            },
            threads: self.threads,
            data_in_cmb: self.data_in_cmb,
            queues,
            depth,
            nsid,
        }
    }
}

/// A transfer of a range of blocks, some commands at a time.
pub struct GpuTransfer<'a> {
    pub reconnecting: ReconnectingSession<'a>,
    /// Commands of one launch.
    commands: u64,
    /// Number of commands of a piece, when pieces are transferred in random order.
    wave: Option<u64>,
}

/// Returns `count` commands in pieces of `wave`, the last one shorter, in random order: first and number of
/// each.
fn shuffled(count: u64, wave: u64, seed: u64) -> Vec<(u64, u64)> {
    let pieces = (0..count).step_by(wave.max(1) as usize);
    let mut pieces: Vec<_> = pieces.map(|at| (at, wave.min(count - at))).collect();
    let mut random = SplitMix::new(seed);
    for last in (1..pieces.len()).rev() {
        pieces.swap(last, random.below(last as u64 + 1) as usize);
    }
    pieces
}

impl<'a> GpuTransfer<'a> {
    /// Hands queues of `opened`, which is the source's device, to the GPU.
    pub fn open(source: SessionSource<'a>, opened: Arc<dyn Device>) -> Result<Self> {
        let reconnecting = ReconnectingSession::open(source, opened)?;
        let session = reconnecting.session()?;
        let commands = session.data().len() as u64 / session.command_bytes();
        Ok(Self {
            reconnecting,
            commands,
            wave: None,
        })
    }

    /// Transfers `blocks` blocks from `lba` on. `before` fills data memory and `after` reads it, each with the first
    /// block and the number of bytes of its chunk. Returns the seconds of the kernels, and the counts.
    ///
    /// A chunk with lost commands is transferred again, in smaller ones.
    pub fn run(
        &mut self,
        opcode: u8,
        (lba, blocks): (u64, u64),
        bar: &ProgressBar,
        mut before: impl FnMut(&mut GpuSession, u64, u64) -> Result<()>,
        mut after: impl FnMut(&mut GpuSession, u64, u64) -> Result<()>,
    ) -> Result<TransferTotals> {
        self.check(lba, blocks)?;
        let session = self.reconnecting.session()?;
        let block = u64::from(session.info().block_bytes);
        let per_command = session.command_bytes() / block;
        let mut totals = TransferTotals::default();
        let (mut done, mut most, mut failures) = (0, self.commands, 0);
        while done < blocks {
            check_stop()?;
            let whole = ((blocks - done) / per_command).min(most);
            // A remainder shorter than a command is transferred last, as a shorter command.
            let (count, each) = match whole {
                0 => (1, blocks - done),
                whole => (whole, per_command),
            };
            let start = lba + done;
            let bytes = count * each * block;
            before(self.reconnecting.session_mut()?, start, bytes)?;
            if !self.run_chunk(opcode, start, (count, each, block), &mut totals)? {
                failures += 1;
                most = (count / 2).max(1);
                if failures == MOST_FAILURES {
                    return Err(reconnecting::too_many("the transfer"));
                }
                continue;
            }
            after(self.reconnecting.session_mut()?, start, bytes)?;
            bar.inc(bytes);
            done += count * each;
            (most, failures) = ((most * 2).min(self.commands), 0);
        }
        Ok(totals)
    }

    /// Runs the `count` commands of a chunk, each of `each` blocks of `block` bytes; returns true if all
    /// completed.
    fn run_chunk(
        &mut self,
        opcode: u8,
        start: u64,
        (count, each, block): (u64, u64, u64),
        totals: &mut TransferTotals,
    ) -> Result<bool> {
        for (first, commands) in self.pieces(count, start) {
            let work = LaunchWork {
                opcode,
                lba: start + first * each,
                blocks: each as u32,
                commands,
                units: commands,
                random: false,
                seed: 1,
                linear: true,
                data_at: first * each * block,
            };
            let (ran, all) = self.reconnecting.run("transfer", &work)?;
            if let Some(ran) = &ran {
                totals.add(ran, ran.report.completed);
            }
            if !all {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the launches of a chunk of `count` commands: first command and number of each. There is one launch for
    /// commands in order; otherwise each launch has as many commands as are in flight at a time, in an order that
    /// `seed` decides.
    fn pieces(&self, count: u64, seed: u64) -> Vec<(u64, u64)> {
        match self.wave {
            Some(wave) => shuffled(count, wave, seed),
            None => vec![(0, count)],
        }
    }

    /// Checks that the range lies inside the namespace.
    pub fn check(&self, lba: u64, blocks: u64) -> Result<()> {
        let size = self.reconnecting.session()?.info().blocks;
        if blocks == 0 || lba.checked_add(blocks).is_none_or(|end| end > size) {
            return Err(Error::usage(
                format!(
                    "the range of {blocks} blocks from LBA {lba} is empty or ends past the namespace of {size} blocks"
                ),
                format!("the last LBA is {}", size.saturating_sub(1)),
            ));
        }
        Ok(())
    }
}

/// Sums over the launches of a transfer.
#[derive(Default)]
pub struct TransferTotals {
    pub commands: u64,
    pub seconds: f64,
    sqes: u64,
    sq_doorbells: u64,
    cq_doorbells: u64,
    cq_loads: u64,
}

impl TransferTotals {
    pub fn add(&mut self, ran: &LaunchResult, commands: u64) {
        let report = &ran.report;
        self.commands += commands;
        self.seconds += ran.seconds;
        self.sqes += report.sqes;
        self.sq_doorbells += report.sq_doorbells;
        self.cq_doorbells += report.cq_doorbells;
        self.cq_loads += report.cq_loads;
    }

    /// Adds those of another part.
    pub fn merge(&mut self, other: &Self) {
        self.commands += other.commands;
        self.seconds += other.seconds;
        self.sqes += other.sqes;
        self.sq_doorbells += other.sq_doorbells;
        self.cq_doorbells += other.cq_doorbells;
        self.cq_loads += other.cq_loads;
    }

    /// Bus transactions of the kernel for each command.
    pub fn per_command(&self) -> Value {
        let per = |count: u64| count as f64 / self.commands.max(1) as f64;
        json!({
            "sqe_writes": per(self.sqes), "sq_doorbells": per(self.sq_doorbells),
            "cq_doorbells": per(self.cq_doorbells), "cq_loads": per(self.cq_loads),
        })
    }
}

/// Returns a progress bar over `blocks` blocks of the session's namespace.
pub fn bar(session: &GpuSession, blocks: u64, what: &'static str) -> ProgressBar {
    progress::bytes(blocks * u64::from(session.info().block_bytes), what)
}

#[cfg(test)]
mod tests {
    use super::shuffled;

    #[test]
    fn pieces_in_random_order_are_each_command_once() {
        for (count, wave) in [(1, 8), (64, 8), (100, 7), (3, 1)] {
            let pieces = shuffled(count, wave, 5);
            let mut sorted = pieces.clone();
            sorted.sort_unstable();
            let each = sorted.iter().flat_map(|(first, many)| *first..first + many);
            assert!(each.eq(0..count), "{count} {wave}: {pieces:?}");
        }
        let pieces = shuffled(64, 8, 5);
        assert!(pieces.windows(2).any(|two| two[0] > two[1]), "{pieces:?}");
        assert_ne!(pieces, shuffled(64, 8, 6));
    }
}
