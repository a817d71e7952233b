//! The rungs by CPU threads. Each step reads its bytes a second way, with other lengths or another queue, and
//! compares sums of both.

use super::digest::{UnitDigest, compared};
use super::pass::PassRange;
use super::plan::{DEPTH, ROW_BYTES, WitnessPlan};
use super::record::{TimedPass, VerifiedBytes};
use super::run::{RunContext, StepResult};
use super::watch::StepWatch;
use nvme_host::bench::SplitMix;
use nvme_host::catalog::HeaderSource;
use nvme_host::loader::{LayerLoader, LayerMemory, LoaderOptions, ModelLayers};
use nvme_host::manifest::ManifestChunk;
use nvme_host::{Controller, Error, Manifest, Result, Store};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

/// Upper bound of the time for a layer: the watch of the step may allow less.
const LAYER_LIMIT: Duration = Duration::from_secs(60);

/// Returns a pass over `bytes` bytes of the plan's range.
pub fn pass(plan: &WitnessPlan, bytes: u64, command: u64, depth: u32) -> PassRange {
    PassRange {
        nsid: plan.nsid,
        lba: plan.lba,
        block: plan.block,
        bytes,
        command,
        depth,
    }
}

/// Returns the bytes of `pass`.
pub fn bytes_of(pass: &PassRange, controller: &Controller, watch: &StepWatch) -> Result<Vec<u8>> {
    let mut data = vec![0; pass.bytes as usize];
    pass.read(controller, watch, |at, bytes| {
        data[at as usize..][..bytes.len()].copy_from_slice(bytes);
    })?;
    Ok(data)
}

/// Returns the sum of `pass`.
pub fn sum_of(
    pass: &PassRange,
    context: &RunContext,
    unit: u64,
    controller: &Controller,
    watch: &StepWatch,
) -> Result<UnitDigest> {
    let mut digest = UnitDigest::new(context.salt, unit);
    pass.read(controller, watch, |at, bytes| digest.take(at, bytes))?;
    Ok(digest)
}

/// Reads a block by a separate command, and as a part of a longer one, and compares both.
pub fn one_block(context: &mut RunContext, watch: &StepWatch) -> Result<StepResult> {
    let controller = context.start()?;
    let plan = context.plan;
    let one = pass(&plan, plan.block, plan.block, 1);
    let mut alone = Vec::new();
    let seconds = one.read(&controller, watch, |_, bytes| alone = bytes.to_vec())?;
    let longer = plan.within((8 * plan.block).min(plan.most));
    let within = bytes_of(&pass(&plan, longer, longer, 1), &controller, watch)?;
    let how = format!("a command of one block; a part of a command of {longer} bytes");
    let verified = compared(&alone, &within[..alone.len()], &how)?;
    controller.shut_down()?;
    let measured = TimedPass::new(plan.block, plan.block, (1, 1), seconds);
    Ok(StepResult::new(measured, verified))
}

/// Reads single commands of every length, up to the longest transfer, and the same bytes by
/// commands of a page.
pub fn lists(context: &mut RunContext, watch: &StepWatch) -> Result<StepResult> {
    let controller = context.start()?;
    let plan = context.plan;
    let lengths = plan.lengths();
    let most = lengths.last().copied().unwrap_or(plan.block);
    let page = 4096.max(plan.block);
    let by_pages = bytes_of(&pass(&plan, most, page.min(most), 8), &controller, watch)?;
    let (mut seconds, mut bytes) = (0.0, 0);
    let mut verified = None;
    for length in &lengths {
        let mut data = Vec::new();
        let one = pass(&plan, *length, *length, 1);
        seconds += one.read(&controller, watch, |_, bytes| data = bytes.to_vec())?;
        bytes += length;
        let how = format!(
            "single commands of {} lengths, 1 block to {most} bytes; commands of {page} bytes",
            lengths.len()
        );
        verified = Some(compared(&data, &by_pages[..data.len()], &how)?);
    }
    controller.shut_down()?;
    let verified = verified.ok_or_else(|| Error::internal("no length fits"))?;
    let mut measured = TimedPass::new(bytes, most, (1, 1), seconds);
    measured.commands = lengths.len() as u64;
    Ok(StepResult::new(measured, verified))
}

/// Performs a long read: a pass that is timed, and two whose sums are compared.
pub fn sequential(context: &mut RunContext, watch: &StepWatch, bytes: u64) -> Result<StepResult> {
    let controller = context.start()?;
    let plan = context.plan;
    let (command, other) = (plan.command(), plan.other_command());
    let bytes = plan.within(bytes);
    let seconds = pass(&plan, bytes, command, DEPTH).read(&controller, watch, |_, _| ())?;
    let one = pass(&plan, bytes, command, DEPTH);
    let one = sum_of(&one, context, other, &controller, watch)?;
    let two = pass(&plan, bytes, other, DEPTH / 2);
    let two = sum_of(&two, context, other, &controller, watch)?;
    let how = format!(
        "commands of {command} bytes at depth {DEPTH}; commands of {other} bytes at depth 16"
    );
    let verified = one.same(&two, how)?;
    controller.shut_down()?;
    let measured = TimedPass::new(bytes, command, (1, u64::from(DEPTH)), seconds);
    Ok(StepResult::new(measured, verified))
}

/// A part of a store, whose manifest is made.
pub struct LayerRange<'a> {
    pub store: &'a Store,
    pub begin: u64,
    pub bytes: u64,
}

impl HeaderSource for LayerRange<'_> {
    fn len(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        self.store.read_at(self.begin + offset, data)
    }

    fn name(&self) -> String {
        "the range".to_owned()
    }
}

/// Bytes of each layer, and the share of chunks that are all zero.
pub struct LayerShape {
    pub each: u64,
    pub zero_share: f64,
}

/// Returns layers over the plan's range, to be verified by a manifest that CPU threads made.
pub fn layers(
    plan: &WitnessPlan,
    store: &Store,
    watch: &StepWatch,
) -> Result<(ModelLayers, LayerShape)> {
    let unit = u64::from(nvme_host::manifest::CHUNK_BYTES);
    let (count, each) = plan.layers(unit);
    let begin = plan.lba * plan.block;
    let part = LayerRange {
        store,
        begin,
        bytes: count * each,
    };
    let mut at = 0;
    let mut ended = Ok(());
    let manifest = Manifest::of(&part, part.bytes, &[], &mut |done, _| {
        ended = watch.tick(done - at);
        at = done;
        match ended {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    });
    ended?;
    let one = |layer: u64| {
        let from = begin + layer * each;
        (format!("layer {layer}"), from..from + each)
    };
    let manifest = manifest?;
    let layers = ModelLayers::of_ranges((0..count).map(one))?.verified_by(&manifest, begin)?;
    let zeroes = vec![0; unit as usize];
    let is_zero = |chunk: &ManifestChunk| chunk.xxh3 == xxh3_64(&zeroes[..chunk.bytes as usize]);
    let (zero, all) = (
        manifest.chunks().filter(is_zero).count(),
        manifest.chunks().count(),
    );
    let zero_share = zero as f64 / all.max(1) as f64;
    Ok((layers, LayerShape { each, zero_share }))
}

/// Loads every layer into `memory`, each compared with the manifest: seconds, and bytes.
pub fn load(
    store: &Arc<Store>,
    layers: ModelLayers,
    memory: LayerMemory,
    watch: &StepWatch,
) -> Result<(f64, u64)> {
    let count = layers.len();
    let options = LoaderOptions {
        memory,
        ..LoaderOptions::default()
    };
    let loader = LayerLoader::new(store, layers, &options)?;
    let begin = Instant::now();
    let mut bytes = 0;
    for index in 0..count {
        let layer = loader.layer(index)?;
        layer.wait(watch.left().min(LAYER_LIMIT))?;
        let read = layer.plan().bytes();
        bytes += read;
        watch.tick(read)?;
    }
    loader.check(watch.left().min(LAYER_LIMIT))?;
    let seconds = begin.elapsed().as_secs_f64();
    loader.close(LAYER_LIMIT)?;
    Ok((seconds, bytes))
}

pub fn layer_loader(context: &mut RunContext, watch: &StepWatch) -> Result<StepResult> {
    let store = Arc::new(context.store(None)?);
    let (layers, shape) = layers(&context.plan, &store, watch)?;
    let (seconds, bytes) = load(&store, layers, LayerMemory::Host, watch)?;
    let how = "layers as they were loaded, hashed by the host; the same range read for a manifest";
    Ok(StepResult::new(
        measured_in_store(&context.plan, &store, bytes, shape.each, seconds),
        VerifiedBytes {
            how: how.to_owned(),
            bytes,
            zero_share: shape.zero_share,
            sums: None,
        },
    ))
}

/// Returns the figures of a step in which a store chose its commands: `each` is the length of one request.
pub fn measured_in_store(
    plan: &WitnessPlan,
    store: &Store,
    bytes: u64,
    each: u64,
    seconds: f64,
) -> TimedPass {
    let pairs = store
        .controllers()
        .next()
        .map_or(1, |one| one.info().queue_pairs);
    let command = each.min(plan.most);
    TimedPass::new(bytes, command, (u64::from(pairs), 64), seconds)
}

/// Returns the ids of rows, and the rows as one long read has them.
pub fn rows(context: &RunContext, store: &Store, watch: &StepWatch) -> Result<(Vec<i64>, Vec<u8>)> {
    let plan = context.plan;
    let rows = plan.table_rows();
    if rows == 0 {
        return Err(Error::usage(
            format!(
                "the range has {} bytes, less than a row of {ROW_BYTES}",
                plan.bytes
            ),
            "use a smaller --lba",
        ));
    }
    let mut random = SplitMix::new(1);
    let ids: Vec<i64> = (0..plan.sizes.rows)
        .map(|_| random.below(rows) as i64)
        .collect();
    let mut table = vec![0; (rows * ROW_BYTES) as usize];
    let mut at = plan.lba * plan.block;
    for part in table.chunks_mut(4 << 20) {
        store.read_at(at, part)?;
        at += part.len() as u64;
        watch.tick(part.len() as u64)?;
    }
    let row = ROW_BYTES as usize;
    let mut expected = Vec::with_capacity(ids.len() * row);
    for id in &ids {
        expected.extend_from_slice(&table[*id as usize * row..][..row]);
    }
    Ok((ids, expected))
}

pub fn gather(context: &mut RunContext, watch: &StepWatch) -> Result<StepResult> {
    let store = context.store(None)?;
    let (ids, expected) = rows(context, &store, watch)?;
    let plan = context.plan;
    let table = store.table(plan.lba * plan.block, plan.table_rows(), ROW_BYTES)?;
    let mut out = vec![0xA5; expected.len()];
    let begin = Instant::now();
    table.gather((&ids[..]).into(), &mut out, None)?.check()?;
    let seconds = begin.elapsed().as_secs_f64();
    watch.tick(out.len() as u64)?;
    let how = "rows by random ids; the same rows out of long reads";
    let verified = compared(&out, &expected, how)?;
    let bytes = out.len() as u64;
    let measured = measured_in_store(&plan, &store, bytes, ROW_BYTES, seconds);
    Ok(StepResult::new(measured, verified))
}

/// Writes a pattern over the range that the user named, reads it back and restores the old data.
pub fn write(context: &mut RunContext, watch: &StepWatch) -> Result<StepResult> {
    let range = context.writable()?;
    let controller = context.start()?;
    let plan = context.plan;
    let whole = PassRange {
        lba: range.lba,
        ..pass(&plan, range.blocks * plan.block, plan.command(), DEPTH)
    };
    let other = PassRange {
        command: plan.other_command(),
        ..whole
    };
    let before = bytes_of(&other, &controller, watch)?;
    let written = write_and_compare(context, &controller, (&whole, &other), watch);
    // The old data are restored whatever happened, also after Ctrl-C.
    let restored = restore(context, &controller, &whole, &before);
    let done = written?;
    restored?;
    controller.shut_down()?;
    Ok(done)
}

fn write_and_compare(
    context: &RunContext,
    controller: &Controller,
    (whole, other): (&PassRange, &PassRange),
    watch: &StepWatch,
) -> Result<StepResult> {
    let mut pattern = vec![0; whole.bytes as usize];
    SplitMix::new(context.salt).fill(&mut pattern);
    let seconds = whole.write(controller, watch, |at, room| {
        let len = room.len();
        room.copy_from_slice(&pattern[at as usize..][..len]);
    })?;
    context.namespace(controller)?.flush()?;
    let back = bytes_of(other, controller, watch)?;
    let how = "a pattern that was written; what was read back";
    let verified = compared(&back, &pattern, how)?;
    let measured = TimedPass::new(
        whole.bytes,
        whole.command,
        (1, u64::from(whole.depth)),
        seconds,
    );
    Ok(StepResult::new(measured, verified))
}

pub fn restore(
    context: &RunContext,
    controller: &Controller,
    whole: &PassRange,
    before: &[u8],
) -> Result<()> {
    use nvme_host::core::spec::Lba;
    let mut namespace = context.namespace(controller)?;
    namespace.write(Lba(whole.lba), before)?;
    namespace.flush()?;
    let mut now = vec![0; before.len()];
    namespace.read(Lba(whole.lba), &mut now)?;
    match now == before {
        true => Ok(()),
        false => Err(Error::Mismatch {
            what: "what was there before was written back, and reads otherwise".to_owned(),
        }),
    }
}
