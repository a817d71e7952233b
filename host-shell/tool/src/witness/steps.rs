//! The rungs, in their order, and how each is run and recorded.

use super::by_cpu;
#[cfg(feature = "cuda")]
use super::by_gpu;
use super::plan::RunLengths;
use super::record::{StepEnd, StepFailure, SubmittingProcessor, WitnessStep};
use super::run::{RunContext, StepResult};
use super::watch::StepWatch;
use nvme_host::{Error, Result};
use std::time::Duration;

/// Workload of a rung, besides Identify.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepWorkload {
    OneBlock,
    PrpLists,
    /// The first or the second length.
    Sequential(usize),
    LayerLoader,
    Gather,
    WriteReadCompare,
}

/// The name of the rung on which the controller is brought up.
pub const IDENTIFY: &str = "identify";

impl StepWorkload {
    pub const ALL: [Self; 7] = [
        Self::OneBlock,
        Self::PrpLists,
        Self::Sequential(0),
        Self::Sequential(1),
        Self::LayerLoader,
        Self::Gather,
        Self::WriteReadCompare,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::OneBlock => "one-block",
            Self::PrpLists => "prp-lists",
            Self::Sequential(0) => "sequential-669mb",
            Self::Sequential(_) => "sequential-8600mb",
            Self::LayerLoader => "layer-loader",
            Self::Gather => "gather",
            Self::WriteReadCompare => "write-read-compare",
        }
    }

    /// Returns the number of bytes that it moves, about, for its bar.
    fn bytes(self, context: &RunContext) -> u64 {
        let plan = &context.plan;
        let RunLengths {
            table_bytes, rows, ..
        } = plan.sizes;
        match self {
            Self::OneBlock => 2 * plan.block,
            Self::PrpLists => 4 * plan.most,
            Self::Sequential(which) => 3 * plan.within(plan.sizes.sequential[which]),
            Self::LayerLoader => 2 * plan.sizes.layers * plan.sizes.layer_bytes,
            Self::Gather => table_bytes + rows * super::plan::ROW_BYTES,
            Self::WriteReadCompare => 4 * context.writable.map_or(0, |one| one.blocks * plan.block),
        }
    }
}

/// Runs a rung by the CPU, or by GPU `gpu`.
fn climb(
    context: &mut RunContext,
    rung: StepWorkload,
    gpu: Option<u32>,
    watch: &StepWatch,
) -> Result<StepResult> {
    let sequential = context.plan.sizes.sequential;
    match (rung, gpu) {
        (StepWorkload::OneBlock, None) => by_cpu::one_block(context, watch),
        (StepWorkload::PrpLists, None) => by_cpu::lists(context, watch),
        (StepWorkload::Sequential(which), None) => {
            by_cpu::sequential(context, watch, sequential[which])
        }
        (StepWorkload::LayerLoader, None) => by_cpu::layer_loader(context, watch),
        (StepWorkload::Gather, None) => by_cpu::gather(context, watch),
        (StepWorkload::WriteReadCompare, None) => by_cpu::write(context, watch),
        #[cfg(feature = "cuda")]
        (StepWorkload::OneBlock, Some(gpu)) => by_gpu::one_block(context, watch, gpu),
        #[cfg(feature = "cuda")]
        (StepWorkload::PrpLists, Some(gpu)) => by_gpu::lists(context, watch, gpu),
        #[cfg(feature = "cuda")]
        (StepWorkload::Sequential(which), Some(gpu)) => {
            by_gpu::sequential(context, watch, sequential[which], gpu)
        }
        #[cfg(feature = "cuda")]
        (StepWorkload::LayerLoader, Some(gpu)) => by_gpu::layer_loader(context, watch, gpu),
        #[cfg(feature = "cuda")]
        (StepWorkload::Gather, Some(gpu)) => by_gpu::gather(context, watch, gpu),
        #[cfg(feature = "cuda")]
        (StepWorkload::WriteReadCompare, Some(gpu)) => by_gpu::write(context, watch, gpu),
        #[cfg(not(feature = "cuda"))]
        (_, Some(_)) => Err(Error::usage("this build has no GPUs", "use --cpu")),
    }
}

/// Runs a rung and records its result, or the cause of its failure. The error is returned, too.
pub fn step(
    context: &mut RunContext,
    rung: StepWorkload,
    gpu: Option<u32>,
    limit: Duration,
    link: Option<f64>,
) -> (WitnessStep, Option<Error>) {
    let watch = StepWatch::new(limit, rung.name(), rung.bytes(context));
    let ended = climb(context, rung, gpu, &watch);
    drop(watch);
    let by = if gpu.is_some() {
        SubmittingProcessor::Gpu
    } else {
        SubmittingProcessor::Cpu
    };
    let mut step = empty(rung.name(), by, StepEnd::Ok);
    match ended {
        Ok(StepResult {
            mut measured,
            verified,
            tier,
        }) => {
            measured.of_link = link.map(|link| measured.gb_per_s / link);
            (step.measured, step.verified, step.tier) = (Some(measured), Some(verified), tier);
            (step, None)
        }
        Err(error) => {
            // Closed, so that the next rung opens the device again and does not inherit the failure. After a
            // mere error status the device is still usable.
            if matches!(error, Error::Gone { .. } | Error::Timeout { .. }) {
                context.opened.close();
            }
            step.outcome = StepEnd::Failed;
            step.error = Some(failure(&error));
            (step, Some(error))
        }
    }
}

/// Returns a step without anything that was measured.
pub fn empty(name: &str, by: SubmittingProcessor, outcome: StepEnd) -> WitnessStep {
    WitnessStep {
        name: name.to_owned(),
        by,
        outcome,
        measured: None,
        verified: None,
        tier: None,
        why: None,
        error: None,
    }
}

pub fn skipped(rung: StepWorkload, by: SubmittingProcessor, why: &str) -> WitnessStep {
    WitnessStep {
        why: Some(why.to_owned()),
        ..empty(rung.name(), by, StepEnd::Skipped)
    }
}

/// Returns an error without the name of a file, which may have blanks.
pub fn failure(error: &Error) -> StepFailure {
    let message = match error {
        Error::File { action, source, .. } => format!("cannot {action} a file: {source}"),
        error => error.to_string(),
    };
    StepFailure {
        code: error.code().to_owned(),
        message,
    }
}
