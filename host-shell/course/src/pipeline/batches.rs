//! Batch after batch through the buffers of an engine.

use super::engine::PipelineEngine;
use nvme_host::Result;

/// Callback that receives a product, or the error that prevented it.
type Ended<'s> =
    dyn FnMut(&mut dyn PipelineEngine, PipelineBatch, Result<Vec<f32>>) -> Result<()> + 's;

/// Callbacks of a run.
pub(super) struct BatchCallbacks<'s> {
    /// Returns true if the batch with that number shall begin. Not called again after the first false.
    pub more: &'s mut dyn FnMut(u64) -> Result<bool>,
    /// Called before the product of a batch; earlier batches have been multiplied by then, unless the engine
    /// runs ahead.
    pub before: &'s mut dyn FnMut(&mut dyn PipelineEngine, PipelineBatch) -> Result<()>,
    /// Receives each product, or the error that prevented it, in order.
    pub ended: &'s mut Ended<'s>,
}

/// Runs batches of `parts` matrices, in turn through `buffers` buffers, and returns their number.
///
/// # Errors
/// The errors of the steps, and of an engine that cannot continue.
pub(super) fn run(
    engine: &mut dyn PipelineEngine,
    (buffers, parts): (u32, u32),
    steps: BatchCallbacks<'_>,
) -> Result<u64> {
    let (mut read, mut multiplied, mut taken) = (0, 0, 0);
    let of = |number: u64| PipelineBatch {
        number,
        slot: (number % u64::from(buffers)) as u32,
        part: (number % u64::from(parts)) as u32,
    };
    let mut is_open = true;
    while is_open || taken < read {
        while is_open && read - taken < u64::from(buffers) {
            is_open = (steps.more)(read)?;
            if is_open {
                let batch = of(read);
                engine.read(batch.number, batch.slot, batch.part)?;
                read += 1;
            }
        }
        // If a product runs on this thread, only one is computed at a time, so that buffers are filled meanwhile.
        let until = match engine.is_ahead() {
            true => read,
            false => read.min(multiplied + 1),
        };
        while multiplied < until {
            let batch = of(multiplied);
            (steps.before)(engine, batch)?;
            engine.multiply(batch.slot)?;
            multiplied += 1;
        }
        if taken < multiplied {
            let batch = of(taken);
            let product = engine.take(batch.slot);
            (steps.ended)(engine, batch, product)?;
            taken += 1;
        }
    }
    Ok(taken)
}

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PipelineBatch {
    pub number: u64,
    pub slot: u32,
    pub part: u32,
}
