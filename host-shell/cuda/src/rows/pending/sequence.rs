//! Several launches as one operation: either all of them are in the stream, or none is in progress any more.
// UNSAFETY: asks the driver about a stream of the caller's.
#![allow(unsafe_code)]

use super::{PendingExecutor, PendingRows};
use crate::driver::{Gpu, check};
use crate::stream::{handle, is_capturing};
use cudarc::driver::sys::{self, CUresult};
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::rows::GatherLaunch;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Deadline of waiting for the launches of an operation that could not be completed: longer than reads that
/// time out, plus the time of work that the stream does before them.
const LIMIT: Duration = Duration::from_secs(60);
/// Pause between two polls of the stream.
const NAP: Duration = Duration::from_micros(100);

/// The launches of one operation. Every operation of more than one launch uses it.
///
/// If a launch is refused, the launches before it are in the stream already, and use the caller's memory. They are
/// waited for before the error is returned, so that the caller may use the memory again. In a stream that is being
/// captured nothing runs yet: there the capture is made invalid, so that no graph has a part of an operation.
///
/// A kernel that reads nothing from a drive reports no end to the host. If such a kernel comes last, another launch
/// behind it reports the end, so that the [`PendingRows`] is done only when no launch of the operation uses the
/// caller's memory any more.
pub struct LaunchSequence<'g> {
    gpu: &'g Arc<Gpu>,
    stream: u64,
    /// Other streams with launches of the operation, for which `stream` waits.
    others: Vec<u64>,
    pending: PendingRows,
    /// True if there are kernels that report no end: to wait for them, the stream has to be queried.
    has_kernels: bool,
    /// True if such a kernel comes after all launches that `pending` contains.
    is_silent: bool,
    is_settled: bool,
}

impl<'g> LaunchSequence<'g> {
    /// Calls `work`, which launches in `stream`, a `CUstream` of `gpu`, and joins its launches into
    /// one operation, which has ended when all of them have.
    ///
    /// # Errors
    /// The errors of `work`, when none of its launches is in progress any more; [`Error::Unfinished`] if that could not
    /// be found out within a minute: then the memory has to stay valid until the stream has ended.
    /// [`Error::Environment`] if no launch number is free to report the end of a last kernel.
    pub fn run(
        gpu: &'g Arc<Gpu>,
        stream: u64,
        work: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<PendingRows> {
        Self::run_to(gpu, stream, |sequence| {
            work(sequence)?;
            sequence.tell_end()
        })
    }

    /// Does the same as [`run`](Self::run), for kernels and copies alone, whose end the program learns from the stream.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_kernels(
        gpu: &'g Arc<Gpu>,
        stream: u64,
        work: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        Self::run_to(gpu, stream, work).map(drop)
    }

    fn run_to(
        gpu: &'g Arc<Gpu>,
        stream: u64,
        work: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<PendingRows> {
        let mut sequence = Self {
            gpu,
            stream,
            others: Vec::new(),
            pending: PendingRows::nothing(),
            has_kernels: false,
            is_silent: false,
            is_settled: false,
        };
        let worked = work(&mut sequence);
        sequence.is_settled = true;
        match worked {
            Ok(()) => Ok(std::mem::replace(
                &mut sequence.pending,
                PendingRows::nothing(),
            )),
            Err(error) => Err(sequence.settle(LIMIT).err().unwrap_or(error)),
        }
    }

    /// Launches from now on in `stream`, too, a `CUstream` that is not being captured. The last launch of the operation
    /// waits for those there.
    pub fn uses(&mut self, stream: u64) {
        self.others.push(stream);
    }

    /// Adds `next`, which was launched in a stream of the operation: its row 0 is row `first_row` of the operation.
    pub fn add(&mut self, next: PendingRows, first_row: u64) {
        // Work that was enqueued later ends later, so the last launch decides.
        self.is_silent &= next.parts.is_empty();
        self.pending.append(next, first_row);
    }

    /// Puts a kernel into the stream by `launch` that reads nothing from a drive.
    ///
    /// # Errors
    /// The errors of `launch`.
    pub fn kernel(&mut self, launch: impl FnOnce() -> Result<()>) -> Result<()> {
        launch()?;
        (self.has_kernels, self.is_silent) = (true, true);
        Ok(())
    }

    /// Enqueues a launch behind a last kernel that reports nothing, so that the host learns of its end.
    fn tell_end(&mut self) -> Result<()> {
        if !self.is_silent {
            return Ok(());
        }
        let mut slots = self.pending.parts.iter().filter_map(|part| match &part.by {
            PendingExecutor::Kernel { slot, .. } => {
                slot.kernels().map(|kernels| (slot, Arc::clone(kernels)))
            }
            PendingExecutor::Host { .. } => None,
        });
        let (before, kernels) = slots.next().ok_or_else(|| {
            Error::internal("an operation of kernels alone was to be waited for without its stream")
        })?;
        let slot = before.state().reserve(1)?.pop();
        let slot = slot.ok_or_else(|| Error::internal("no launch was reserved"))?;
        let end = slot.put(
            GatherLaunch::default(),
            (&kernels, None),
            self.stream,
            |launch| {
                // SAFETY: the kernel takes one `GatherLaunch`, and uses only the words of its number.
                unsafe { kernels.launch(self.stream, kernels.end_launch, 1, &launch) }
            },
        )?;
        self.add(PendingRows::of_kernel(end), 0);
        Ok(())
    }

    /// Makes the wait query the stream, too, from now on: some of the work that `work` enqueues may be in it, also when
    /// it fails.
    pub fn asks_stream(&mut self) {
        self.has_kernels = true;
    }

    /// Waits until none of the launches is in progress, `limit` at most.
    fn settle(&self, limit: Duration) -> Result<()> {
        if self.pending.parts.is_empty() && !self.has_kernels {
            return Ok(());
        }
        let begin = Instant::now();
        while !self.is_over()? {
            if begin.elapsed() > limit {
                return Err(Error::Unfinished {
                    cause: format!(
                        "an operation on GPU {} could be launched only in part, and that part has not ended within \
                         {} s",
                        self.gpu.index(),
                        limit.as_secs()
                    ),
                    remedy: "keep its memory until the stream has ended".to_owned(),
                });
            }
            std::thread::sleep(NAP);
        }
        Ok(())
    }

    /// True if no launch of the operation is in progress.
    fn is_over(&self) -> Result<bool> {
        if !self.has_kernels && !self.pending.is_captured() && self.pending.is_done() {
            return Ok(true);
        }
        let lost = |_| Error::Unfinished {
            cause: format!(
                "an operation on GPU {} could be launched only in part, and a kernel there does not end",
                self.gpu.index()
            ),
            remedy: "keep its memory until the process ends".to_owned(),
        };
        let _guest = self.gpu.enter().map_err(lost)?;
        let is_captured = self.pending.is_captured() || is_capturing(self.stream).unwrap_or(false);
        let is_done = |stream: u64| {
            // SAFETY: the driver checks the handle.
            is_end(unsafe { sys::cuStreamQuery(handle(stream)) })
        };
        // A stream that is being captured must not be queried, because that would end the capture and lose the caller's
        // whole graph.
        Ok(
            (is_captured || is_done(self.stream))
                && self.others.iter().all(|other| is_done(*other)),
        )
    }
}

impl Drop for LaunchSequence<'_> {
    /// Waits for the launches after a panic in `work`.
    fn drop(&mut self) {
        if !self.is_settled {
            let _ = self.settle(LIMIT);
        }
    }
}

/// True if this answer means that no work of a stream is in progress: the stream is done, or its context is dead and
/// runs nothing.
fn is_end(answer: CUresult) -> bool {
    use CUresult as R;
    let is_dead = matches!(
        answer,
        R::CUDA_ERROR_ILLEGAL_ADDRESS
            | R::CUDA_ERROR_LAUNCH_FAILED
            | R::CUDA_ERROR_LAUNCH_TIMEOUT
            | R::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | R::CUDA_ERROR_MISALIGNED_ADDRESS
            | R::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | R::CUDA_ERROR_INVALID_PC
            | R::CUDA_ERROR_HARDWARE_STACK_ERROR
            | R::CUDA_ERROR_ASSERT
            | R::CUDA_ERROR_ECC_UNCORRECTABLE
            | R::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | R::CUDA_ERROR_DEINITIALIZED
    );
    is_dead || check("cuStreamQuery", answer).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_stream_that_is_done_or_dead_is_over() {
        assert!(is_end(CUresult::CUDA_SUCCESS) && is_end(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
        for goes_on in [
            CUresult::CUDA_ERROR_NOT_READY,
            CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            CUresult::CUDA_ERROR_INVALID_HANDLE,
        ] {
            assert!(!is_end(goes_on), "{goes_on:?}");
        }
    }
}
