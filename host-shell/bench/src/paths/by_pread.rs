//! The file by `pread` into memory of threads, and copies from there: the path of programs without a driver of
//! their own.

use super::plan::ReadPlan;
use crate::measure::side_by_side;
use nvme_driver::error::{Error, Result};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes that a thread reads before it copies them.
pub(super) const STAGE: usize = 1 << 20;

/// Memory that a thread reads into, and the way from there to the destination.
pub(super) trait CopySink: Send {
    /// Returns memory of [`STAGE`] bytes that no copy uses.
    fn stage(&mut self) -> Result<&mut [u8]>;

    /// Copies the first `bytes` bytes of the buffer to byte `to` of the destination, now or later.
    fn send(&mut self, bytes: usize, to: usize) -> Result<()>;

    /// Waits until everything has arrived.
    fn finish(&mut self) -> Result<()>;
}

/// Steps that a pass performs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PassSteps {
    Whole,
    ReadAlone,
    CopyAlone,
}

/// Measures the seconds of `plan`, a thread for each of `sinks` that has a share.
pub(super) fn run<S: CopySink>(
    plan: &ReadPlan,
    (file, path): (&File, &Path),
    sinks: impl IntoIterator<Item = (Range<usize>, S)>,
    pass: PassSteps,
) -> Result<f64> {
    let job = |(share, mut sink): (Range<usize>, S)| {
        move || {
            for part in plan.parts(share.clone()) {
                one_part(plan, part, (file, path), &mut sink, pass)?;
            }
            Ok(())
        }
    };
    side_by_side(sinks.into_iter().map(job).collect())
}

/// Reads that are asked for together; they have arrived when this returns.
fn one_part(
    plan: &ReadPlan,
    part: Range<usize>,
    (file, path): (&File, &Path),
    sink: &mut impl CopySink,
    pass: PassSteps,
) -> Result<()> {
    let mut at = part.start;
    while at < part.end {
        let stage = sink.stage()?;
        let len = stage.len().min(part.end - at);
        let mut filled = 0;
        while pass != PassSteps::CopyAlone && filled < len {
            let (offset, together) = plan.source(at + filled);
            let bytes = together.min(len - filled);
            let into = &mut stage[filled..filled + bytes];
            let read = file.read_exact_at(into, offset);
            read.map_err(Error::file("read", path))?;
            filled += bytes;
        }
        if pass != PassSteps::ReadAlone {
            sink.send(len, at)?;
        }
        at += len;
    }
    sink.finish()
}
