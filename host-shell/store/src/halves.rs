//! Gathers in halves: a first call submits the reads of rows on a GPU, a second one waits for them and copies the rows.
//! Work of the caller's that comes between the two in the order of streams has the GPU to itself.
// UNSAFETY: requests hold addresses of GPU memory, for which the caller vouches.
#![allow(unsafe_code)]

use super::table::{LaterTable, Table};
use nvme_cuda::{BegunPoint, BegunRows, GatherIds, GatherTarget, PendingRows, RowRequest};
use nvme_driver::error::{Error, Result};
use nvme_driver::widen::RowConversion;

/// A gather whose second half is still to be called. If it is dropped before that, it frees its resources, and the
/// program does not wait.
#[must_use = "the rows come with the second half"]
pub struct BegunGather {
    by: BegunBy,
}

/// Submission of the reads.
enum BegunBy {
    /// The first half has submitted the reads.
    Queues(BegunRows),
    /// The second half submits the reads, like those of any gather.
    Later {
        rows: LaterTable,
        ids: GatherIds,
        point: BegunPoint,
        is_finished: bool,
    },
}

impl Table {
    /// Begins a gather on a GPU: enqueues a launch in `stream`, a `CUstream` of the store's GPU (0 is the default one),
    /// that submits the reads of the rows and leaves the GPU. [`BegunGather::finish`] waits for them and copies the
    /// rows. In between no block of the gather is on the GPU, so that launches of the caller can use all of it while
    /// the drive works.
    ///
    /// This is for few rows of one drive (768 rows of 256 bytes, by default), in units of 4 bytes, without a cache. The
    /// second half reads all other rows, and rows that are begun when other gathers hold all queues that may be
    /// held: [`StoreStats::late_rows`](super::StoreStats::late_rows) counts the latter. A gather sees every write of the
    /// store that had returned before its first half begins on the GPU; of later writes it may see any.
    ///
    /// # Safety
    /// The ids are valid on the GPU, and unchanged, until the second half has ended, and for as long as a graph that
    /// captured the halves may be launched.
    ///
    /// # Errors
    /// As [`gather_on_gpu`](Self::gather_on_gpu).
    pub unsafe fn begin_on_gpu(&self, ids: &GatherIds, stream: u64) -> Result<BegunGather> {
        if let Some(rows) = self.owned_rows()? {
            // SAFETY: the caller keeps the conditions under `# Safety`.
            let begun =
                unsafe { rows.begin(&self.of_namespace(), self.map(), self.failed, ids, stream) }?;
            if let Some(begun) = begun {
                let by = BegunBy::Queues(begun);
                return Ok(BegunGather { by });
            }
        }
        let point = BegunPoint::new(self.space.gpu()?.gpu(), stream)?;
        point.record()?;
        Ok(BegunGather {
            by: BegunBy::Later {
                rows: LaterTable::of(self),
                ids: *ids,
                point,
                is_finished: false,
            },
        })
    }
}

impl BegunGather {
    /// Finishes the gather: enqueues in `stream`, a `CUstream` of the store's GPU, a launch that waits for the reads,
    /// copies the rows to `target` and stores their status. The launch comes after the first half, whichever stream
    /// that is in. Returns before it runs. Both halves may be captured in one graph.
    ///
    /// The deadline of a read counts from its submission. A recovery, or the end of the store, between the halves fails the
    /// rows: they are zero, with status [`RowStatus::Gone`](super::status::RowStatus::Gone).
    ///
    /// # Safety
    /// The addresses in `target` are valid on the GPU for all rows until the launch has ended, and for as long as a graph
    /// that captured it may be launched.
    ///
    /// # Errors
    /// [`Error::Usage`] for a gather that was finished before, for rows that were begun and whose target addresses are
    /// no multiples of 4, and if one half is captured in a graph and the other is not in the same capture;
    /// [`Error::Gone`] for a store that was closed, if the second half would have to submit the reads; the errors of
    /// [`gather_on_gpu`](Table::gather_on_gpu). The gather can still be finished, except for the first of these.
    pub unsafe fn finish(&mut self, target: &GatherTarget, stream: u64) -> Result<PendingRows> {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.finish_by(target, None, stream) }
    }

    /// Does the same as [`finish`](Self::finish), with converted elements, as by [`Table::gather_as_on_gpu`].
    ///
    /// # Safety
    /// As [`finish`](Self::finish), with the converted rows; scales of `widen` stay as long.
    ///
    /// # Errors
    /// As [`finish`](Self::finish) and [`Table::gather_as_on_gpu`].
    pub unsafe fn finish_as(
        &mut self,
        target: &GatherTarget,
        widen: impl Into<RowConversion>,
        stream: u64,
    ) -> Result<PendingRows> {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.finish_by(target, Some(widen.into()), stream) }
    }

    /// # Safety
    /// As [`finish_as`](Self::finish_as).
    unsafe fn finish_by(
        &mut self,
        target: &GatherTarget,
        widen: Option<RowConversion>,
        stream: u64,
    ) -> Result<PendingRows> {
        match &mut self.by {
            // SAFETY: the caller keeps the conditions under `# Safety`.
            BegunBy::Queues(begun) => unsafe { begun.finish(target, widen.as_ref(), stream) },
            BegunBy::Later { is_finished, .. } if *is_finished => Err(BegunPoint::finished_twice()),
            BegunBy::Later {
                rows,
                ids,
                point,
                is_finished,
            } => {
                let table = rows.table()?;
                point.order(stream)?;
                let request = RowRequest {
                    ids: ids.ids,
                    wide_ids: ids.wide_ids,
                    count: ids.count,
                    out: target.out,
                    out_stride: target.out_stride,
                    status: target.status,
                };
                // SAFETY: the caller keeps the conditions under `# Safety`.
                let pending = unsafe { table.gather_by(&request, widen, stream) };
                // One that could be launched in part only is no gather that can be finished again.
                *is_finished =
                    !matches!(&pending, Err(error) if !matches!(error, Error::Unfinished { .. }));
                pending
            }
        }
    }

    /// Drops the rows, as dropping the gather does. Returns the launch that frees the gather's resources; once it has
    /// ended, nothing uses the ids.
    ///
    /// # Errors
    /// [`Error::Environment`] with the driver's answer.
    pub fn cancel(self) -> Result<PendingRows> {
        match self.by {
            BegunBy::Queues(begun) => begun.cancel(),
            BegunBy::Later { .. } => Ok(PendingRows::nothing()),
        }
    }

    /// True if the first half submits the reads; otherwise the second one does.
    pub fn submits(&self) -> bool {
        matches!(self.by, BegunBy::Queues(_))
    }

    /// True if it was finished.
    pub fn is_finished(&self) -> bool {
        match &self.by {
            BegunBy::Queues(begun) => begun.is_finished(),
            BegunBy::Later { is_finished, .. } => *is_finished,
        }
    }
}
