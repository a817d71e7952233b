//! The rungs by a GPU, each beside a CPU's reads of the same bytes. A GPU that cannot be used is the reason why its
//! steps are skipped; the steps of the CPU run all the same.

use super::by_cpu;
use super::digest::{UnitDigest, compared};
use super::pass::PassRange;
use super::plan::{DEPTH, ROW_BYTES, WitnessPlan};
use super::record::{RecordTier, TimedPass, VerifiedBytes};
use super::run::{RunContext, StepResult};
use super::watch::StepWatch;
use nvme_host::bench::{SplitMix, rows_on_gpu};
use nvme_host::core::spec::nvm::opcode;
use nvme_host::cuda::bench::SubmitMode;
use nvme_host::cuda::{GpuSession, LaunchWork, SessionSetup, TierRequest};
use nvme_host::loader::LayerMemory;
use nvme_host::{Result, Store};
use std::sync::Arc;

/// Bytes of a launch that is timed, and of one whose data are kept.
const TIMED: u64 = 1 << 30;
const KEPT: u64 = 64 << 20;

/// Opens a session with one queue of `depth` that GPU `gpu` drives, for commands of `command`
/// bytes, and room for `kept` bytes.
fn session(
    context: &mut RunContext,
    gpu: u32,
    (command, depth): (u64, u32),
    kept: u64,
) -> Result<GpuSession> {
    let setup = SessionSetup {
        gpu,
        mode: SubmitMode::Warp,
        tier: TierRequest::Auto { gpu_memory: true },
        threads: 0,
        data_in_cmb: false,
        queues: 1,
        depth,
        nsid: context.plan.nsid,
    };
    let device = context.opened.get()?;
    GpuSession::open(setup, device, &context.config(), command, kept)
}

fn tier_of(session: &GpuSession) -> RecordTier {
    RecordTier {
        tier: session.access().tier().number(),
        why: session.tier(),
    }
}

/// Returns the launch of `commands` commands of `bytes` bytes each from byte `at` of `pass` on,
/// each into its own part of the data memory.
fn work(
    pass: &PassRange,
    opcode: u8,
    at: u64,
    bytes: u64,
    commands: u64,
    linear: bool,
) -> LaunchWork {
    LaunchWork {
        opcode,
        lba: pass.lba + at / pass.block,
        blocks: (bytes / pass.block) as u32,
        commands,
        units: commands,
        random: false,
        seed: 1,
        linear,
        data_at: 0,
    }
}

/// Runs the commands of `pass`, `most` bytes a launch, and one shorter command at the end; returns the seconds
/// of kernels. `each` is called after each launch, with the position and the length of its bytes.
fn run(
    session: &mut GpuSession,
    (pass, opcode): (&PassRange, u8),
    (most, linear): (u64, bool),
    watch: &StepWatch,
    mut before: impl FnMut(&mut GpuSession, u64, u64) -> Result<()>,
    mut after: impl FnMut(&mut GpuSession, u64, u64) -> Result<()>,
) -> Result<f64> {
    let (mut at, mut seconds) = (0, 0.0);
    while at < pass.bytes {
        let whole = (pass.bytes - at).min(most.max(pass.command)) / pass.command;
        let (commands, each) = match whole {
            0 => (1, pass.bytes - at),
            whole => (whole, pass.command),
        };
        let bytes = commands * each;
        before(session, at, bytes)?;
        let work = work(pass, opcode, at, each, commands, linear);
        seconds += session
            .run(
                if opcode == opcode::READ {
                    "Read"
                } else {
                    "Write"
                },
                &work,
            )?
            .seconds;
        after(session, at, bytes)?;
        watch.tick(bytes)?;
        at += bytes;
    }
    Ok(seconds)
}

/// Reads `pass` by the GPU and gives every byte to `look`: seconds of kernels.
fn read(
    session: &mut GpuSession,
    pass: &PassRange,
    watch: &StepWatch,
    mut look: impl FnMut(u64, &[u8]),
) -> Result<f64> {
    let most = session.data().len() as u64 / pass.command * pass.command;
    let mut data = Vec::new();
    run(
        session,
        (pass, opcode::READ),
        (most, true),
        watch,
        |_, _, _| Ok(()),
        |session, at, bytes| {
            data.resize(bytes as usize, 0);
            session.data().read(0, &mut data)?;
            look(at, &data);
            Ok(())
        },
    )
}

pub fn one_block(context: &mut RunContext, watch: &StepWatch, gpu: u32) -> Result<StepResult> {
    let plan = context.plan;
    let mut session = session(context, gpu, (plan.block, 1), 0)?;
    let one = by_cpu::pass(&plan, plan.block, plan.block, 1);
    let mut alone = Vec::new();
    let seconds = read(&mut session, &one, watch, |_, bytes| alone = bytes.to_vec())?;
    let by_cpu = by_cpu::bytes_of(&one, session.controller(), watch)?;
    let verified = compared(&alone, &by_cpu, "a command of the GPU's; one of the CPU's")?;
    let done = StepResult {
        measured: TimedPass::new(plan.block, plan.block, (1, 1), seconds),
        verified,
        tier: Some(tier_of(&session)),
    };
    session.close()?;
    Ok(done)
}

pub fn lists(context: &mut RunContext, watch: &StepWatch, gpu: u32) -> Result<StepResult> {
    let plan = context.plan;
    let lengths = plan.lengths();
    let most = lengths.last().copied().unwrap_or(plan.block);
    let mut session = session(context, gpu, (most, 1), most)?;
    let page = 4096.max(plan.block).min(most);
    let by_pages = by_cpu::pass(&plan, most, page, 8);
    let by_pages = by_cpu::bytes_of(&by_pages, session.controller(), watch)?;
    let (mut seconds, mut bytes, mut all) = (0.0, 0, Vec::new());
    for length in &lengths {
        let one = by_cpu::pass(&plan, *length, *length, 1);
        seconds += read(&mut session, &one, watch, |_, bytes| all = bytes.to_vec())?;
        compared(
            &all,
            &by_pages[..all.len()],
            &format!("a command of {length} bytes"),
        )?;
        bytes += length;
    }
    let how = format!(
        "single commands of the GPU's of {} lengths, 1 block to {most} bytes; the CPU's of {page} bytes",
        lengths.len()
    );
    let mut measured = TimedPass::new(bytes, most, (1, 1), seconds);
    measured.commands = lengths.len() as u64;
    let done = StepResult {
        measured,
        verified: compared(&all, &by_pages, &how)?,
        tier: Some(tier_of(&session)),
    };
    session.close()?;
    Ok(done)
}

pub fn sequential(
    context: &mut RunContext,
    watch: &StepWatch,
    bytes: u64,
    gpu: u32,
) -> Result<StepResult> {
    let plan = context.plan;
    let (command, other) = (plan.command(), plan.other_command());
    let bytes = plan.within(bytes);
    let mut session = session(context, gpu, (command, DEPTH), KEPT.min(bytes))?;
    let whole = by_cpu::pass(&plan, bytes, command, DEPTH);
    let nothing = |_: &mut GpuSession, _, _| Ok(());
    let timed = (&whole, opcode::READ);
    let seconds = run(&mut session, timed, (TIMED, false), watch, nothing, nothing)?;
    let mut one = UnitDigest::new(context.salt, other);
    read(&mut session, &whole, watch, |at, data| one.take(at, data))?;
    let two = by_cpu::pass(&plan, bytes, other, DEPTH / 2);
    let two = by_cpu::sum_of(&two, context, other, session.controller(), watch)?;
    let how = format!(
        "the GPU's commands of {command} bytes at depth {DEPTH}; the CPU's of {other} bytes at depth 16"
    );
    let done = StepResult {
        measured: TimedPass::new(bytes, command, (1, u64::from(DEPTH)), seconds),
        verified: one.same(&two, how)?,
        tier: Some(tier_of(&session)),
    };
    session.close()?;
    Ok(done)
}

fn tier_of_store(store: &Store) -> Option<RecordTier> {
    let path = store.path();
    path.tier.map(|tier| RecordTier {
        tier,
        why: path.why,
    })
}

pub fn layer_loader(context: &mut RunContext, watch: &StepWatch, gpu: u32) -> Result<StepResult> {
    let store = Arc::new(context.store(Some(gpu))?);
    let (layers, shape) = by_cpu::layers(&context.plan, &store, watch)?;
    let (seconds, bytes) = by_cpu::load(&store, layers, LayerMemory::Gpu, watch)?;
    let how =
        "layers in GPU memory, hashed by the GPU; the same range read by the CPU for a manifest";
    Ok(StepResult {
        measured: by_cpu::measured_in_store(&context.plan, &store, bytes, shape.each, seconds),
        verified: VerifiedBytes {
            how: how.to_owned(),
            bytes,
            zero_share: shape.zero_share,
            sums: None,
        },
        tier: tier_of_store(&store),
    })
}

pub fn gather(context: &mut RunContext, watch: &StepWatch, gpu: u32) -> Result<StepResult> {
    let store = context.store(Some(gpu))?;
    let (ids, expected) = by_cpu::rows(context, &store, watch)?;
    let plan = context.plan;
    let table = store.table(plan.lba * plan.block, plan.table_rows(), ROW_BYTES)?;
    let mut out = vec![0; expected.len()];
    let seconds = rows_on_gpu(&store, &table, &ids, &mut out, watch.left())?;
    let how = "rows by random ids in GPU memory; the same rows out of the CPU's long reads";
    let bytes = out.len() as u64;
    Ok(StepResult {
        verified: compared(&out, &expected, how)?,
        measured: by_cpu::measured_in_store(&plan, &store, bytes, ROW_BYTES, seconds),
        tier: tier_of_store(&store),
    })
}

/// Writes as the CPU's step does: the GPU writes, the CPU reads back and restores the old data.
pub fn write(context: &mut RunContext, watch: &StepWatch, gpu: u32) -> Result<StepResult> {
    let range = context.writable()?;
    let plan: WitnessPlan = context.plan;
    let mut session = session(context, gpu, (plan.command(), DEPTH), KEPT)?;
    let whole = PassRange {
        lba: range.lba,
        ..by_cpu::pass(&plan, range.blocks * plan.block, plan.command(), DEPTH)
    };
    let other = PassRange {
        command: plan.other_command(),
        ..whole
    };
    let before = by_cpu::bytes_of(&other, session.controller(), watch)?;
    let mut pattern = vec![0; whole.bytes as usize];
    SplitMix::new(!context.salt).fill(&mut pattern);
    let most = session.data().len() as u64 / whole.command * whole.command;
    let fill = |session: &mut GpuSession, at: u64, bytes: u64| {
        let part = &pattern[at as usize..][..bytes as usize];
        session.data_mut()?.write(0, part)
    };
    let job = (&whole, opcode::WRITE);
    let nothing = |_: &mut GpuSession, _, _| Ok(());
    let written = run(&mut session, job, (most, true), watch, fill, nothing);
    let back = written.and_then(|seconds| {
        context.namespace(session.controller())?.flush()?;
        let back = by_cpu::bytes_of(&other, session.controller(), watch)?;
        Ok((seconds, back))
    });
    let restored = by_cpu::restore(context, session.controller(), &whole, &before);
    let (seconds, back) = back?;
    restored?;
    let how = "a pattern that the GPU wrote; what the CPU read back";
    let done = StepResult {
        verified: compared(&back, &pattern, how)?,
        measured: TimedPass::new(whole.bytes, whole.command, (1, u64::from(DEPTH)), seconds),
        tier: Some(tier_of(&session)),
    };
    session.close()?;
    Ok(done)
}
