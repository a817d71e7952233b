//! Streams and events of CUDA: work in order, its duration, and waits with a deadline of the host. The driver's own
//! waits have no deadline, so everything here polls; past the deadline the kernel may still run, and the memory
//! that it uses must stay valid.
// UNSAFETY: calls into the CUDA driver library with handles.
#![allow(unsafe_code)]

use super::driver::{Gpu, check};
use cudarc::driver::sys::{self, CUresult};
use nvme_driver::error::{Error, Result};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Deadline of copies, fills and other work that always ends. It is long, because the stream may have to wait
/// for other programs on the same GPU; it exists so that a broken GPU ends in an error and not in a hang.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);
/// Looks at a running kernel without a pause, then with one.
const SPIN_LOOKS: u32 = 200;
const NAP: Duration = Duration::from_micros(50);

/// A non-blocking stream (CU_STREAM_NON_BLOCKING): it and the default stream do not wait for each other.
pub struct Stream {
    gpu: Arc<Gpu>,
    raw: sys::CUstream,
}

// SAFETY: stream handles may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver locks for itself.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates an empty stream.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let _guest = gpu.enter()?;
        let mut raw = null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the call writes one handle.
        check("cuStreamCreate", unsafe {
            sys::cuStreamCreate(&mut raw, flags)
        })?;
        Ok(Self {
            gpu: Arc::clone(gpu),
            raw,
        })
    }

    /// Makes a stream as [`new`](Self::new) does, whose work the GPU begins before the work of other streams when it
    /// has room for only one.
    pub fn urgent(gpu: &Arc<Gpu>) -> Result<Self> {
        let _guest = gpu.enter()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the call writes two numbers.
        check("cuCtxGetStreamPriorityRange", unsafe {
            sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest)
        })?;
        let mut raw = null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the call writes one handle.
        check("cuStreamCreateWithPriority", unsafe {
            sys::cuStreamCreateWithPriority(&mut raw, flags, greatest)
        })?;
        Ok(Self {
            gpu: Arc::clone(gpu),
            raw,
        })
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Returns the driver's handle, as a number.
    pub fn handle(&self) -> u64 {
        self.raw.expose_provenance() as u64
    }

    pub(super) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Waits for everything in the stream: copies and fills, which end by themselves.
    ///
    /// # Errors
    /// As [`wait`](Self::wait), past two minutes.
    pub fn finish(&self) -> Result<()> {
        self.wait(PATIENCE, || Ok(()))
    }

    /// True if all work of the stream has ended.
    ///
    /// # Errors
    /// [`Error::Device`] when a kernel died.
    pub fn is_done(&self) -> Result<bool> {
        let _guest = self.gpu.enter()?;
        // SAFETY: the stream is our own. A query is used rather than a wait of the driver, because that one has no
        // deadline and would hang with a kernel that never ends.
        match unsafe { sys::cuStreamQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => check("kernel", other).map(|()| true),
        }
    }

    /// Waits until the stream is done, `limit` at most; `watch` runs between polls and may end the wait with an
    /// error.
    ///
    /// # Errors
    /// [`Error::Gone`] past the limit: the kernel still runs, and memory that it uses must stay valid.
    pub fn wait(&self, limit: Duration, mut watch: impl FnMut() -> Result<()>) -> Result<()> {
        let is_over = until(limit, || {
            let is_done = self.is_done()?;
            if !is_done {
                watch()?;
            }
            Ok(is_done)
        })?;
        match is_over {
            true => Ok(()),
            false => {
                self.gpu.lose();
                Err(late(limit))
            }
        }
    }

    /// Does the same as [`wait`](Self::wait), `grace` at most from when `stop` is set on.
    ///
    /// # Errors
    /// [`Error::Interrupted`] past the grace time: the kernel still runs, and memory that it uses must stay valid.
    pub(super) fn wait_unless(
        &self,
        limit: Duration,
        (stop, grace): (&AtomicBool, Duration),
    ) -> Result<()> {
        let mut stopped: Option<Instant> = None;
        let watch = || {
            if stop.load(Ordering::Relaxed) {
                let since = *stopped.get_or_insert_with(Instant::now);
                if since.elapsed() > grace {
                    self.gpu.lose();
                    return Err(Error::Interrupted);
                }
            }
            Ok(())
        };
        self.wait(limit, watch)
    }

    /// Copies `bytes` bytes from host address `from` to GPU address `to`, in order, without waiting.
    ///
    /// # Safety
    /// Both ranges are valid until the copy has ended. It overlaps with other work only if the host memory is
    /// registered.
    pub unsafe fn copy_in(&self, to: u64, from: *const u8, bytes: usize) -> Result<()> {
        let _guest = self.gpu.enter()?;
        // SAFETY: the caller vouches for both.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.raw)
        })
    }

    /// Copies `bytes` bytes inside the GPU's memory, in order, without waiting.
    ///
    /// # Safety
    /// As [`copy_in`](Self::copy_in).
    pub unsafe fn copy_within(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        let _guest = self.gpu.enter()?;
        // SAFETY: the caller vouches for both.
        check("cuMemcpyAsync", unsafe {
            sys::cuMemcpyAsync(to, from, bytes, self.raw)
        })
    }

    /// Copies from host to GPU memory, without waiting and in any order among each other: (GPU address, host address,
    /// bytes) each. Makes one call of the driver, if the driver has one for many copies.
    ///
    /// # Safety
    /// As [`copy_in`](Self::copy_in), for each.
    pub unsafe fn copy_all_in(
        &self,
        copies: impl ExactSizeIterator<Item = (u64, *const u8, usize)>,
    ) -> Result<()> {
        let Some(call) = self.gpu.batch_copy().filter(|_| copies.len() > 1) else {
            for (to, from, bytes) in copies {
                // SAFETY: the caller keeps the conditions under `# Safety`.
                unsafe { self.copy_in(to, from, bytes)? };
            }
            return Ok(());
        };
        let _guest = self.gpu.enter()?;
        let (mut to, mut from, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
        for copy in copies {
            to.push(copy.0);
            from.push(copy.1.addr() as u64);
            bytes.push(copy.2);
        }
        // SAFETY: the three lists have the same number of entries; the caller vouches for the ranges in them.
        check("cuMemcpyBatchAsync", unsafe {
            call.copy(&mut to, &mut from, &mut bytes, self.raw)
        })
    }

    /// Copies `bytes` bytes from GPU address `from` to host address `to`, in order, without waiting.
    ///
    /// # Safety
    /// As [`copy_in`](Self::copy_in).
    pub unsafe fn copy_out(&self, to: *mut u8, from: u64, bytes: usize) -> Result<()> {
        let _guest = self.gpu.enter()?;
        // SAFETY: the caller vouches for both.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.raw)
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_guest) = self.gpu.enter() {
            // SAFETY: it was created in `new`, and destroyed once. The driver lets work in the stream end before it
            // frees its resources, so destroying it early loses nothing.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// Polls until `is_done` returns true, `limit` at most; returns whether it did.
pub(super) fn until(limit: Duration, mut is_done: impl FnMut() -> Result<bool>) -> Result<bool> {
    let begin = Instant::now();
    let mut looks = 0u32;
    while !is_done()? {
        if begin.elapsed() > limit {
            return Ok(false);
        }
        looks = looks.saturating_add(1);
        match looks {
            0..SPIN_LOOKS => std::hint::spin_loop(),
            _ => std::thread::sleep(NAP),
        }
    }
    Ok(true)
}

fn late(limit: Duration) -> Error {
    Error::Gone {
        cause: format!(
            "a kernel did not end within {:.1} s, although it bounds its own time",
            limit.as_secs_f64()
        ),
    }
}

/// True if `stream`, a `CUstream` of the calling thread's context, is being captured.
pub(super) fn is_capturing(stream: u64) -> Result<bool> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the call writes one value; the driver checks the handle.
    check("cuStreamIsCapturing", unsafe {
        sys::cuStreamIsCapturing(handle(stream), &mut status)
    })?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Returns the driver's handle of a stream that the caller passed as a number.
pub(super) fn handle(stream: u64) -> sys::CUstream {
    std::ptr::with_exposed_provenance_mut(stream as usize)
}

impl Gpu {
    /// True if `stream`, a `CUstream` of this GPU (0 is the default one), is being captured.
    ///
    /// # Errors
    /// [`Error::Environment`] with the driver's answer.
    pub fn is_captured(&self, stream: u64) -> Result<bool> {
        let _guest = self.enter()?;
        is_capturing(stream)
    }

    /// Waits for everything in `stream`, a `CUstream` of this GPU (0 is the default one), `limit` at most.
    ///
    /// # Errors
    /// [`Error::Unfinished`] past the limit; [`Error::Environment`] with the driver's answer.
    pub fn finish(&self, stream: u64, limit: Duration) -> Result<()> {
        let _guest = self.enter()?;
        let is_over = until(limit, || {
            // SAFETY: the driver checks the handle.
            match unsafe { sys::cuStreamQuery(handle(stream)) } {
                CUresult::CUDA_ERROR_NOT_READY => Ok(false),
                other => check("cuStreamQuery", other).map(|()| true),
            }
        })?;
        match is_over {
            true => Ok(()),
            false => Err(Error::Unfinished {
                cause: format!(
                    "the stream has not ended what it does within {:.1} s",
                    limit.as_secs_f64()
                ),
                remedy: "wait for what the stream does before, and try again".to_owned(),
            }),
        }
    }

    /// Orders all later work of stream `then` after all present work of stream `first`. Both are `CUstream`s of
    /// this GPU; 0 is the default one. Returns at once; the caller's context and capture mode are preserved.
    ///
    /// # Errors
    /// [`Error::Environment`] with the driver's answer.
    pub fn order(self: &Arc<Self>, first: u64, then: u64) -> Result<()> {
        let _guest = self.enter()?;
        let event = StreamEvent::untimed(self)?;
        event.record_at(first)?;
        event.before(then)
    }
}

/// A moment in a stream, on the GPU's clock.
pub struct StreamEvent {
    gpu: Arc<Gpu>,
    raw: sys::CUevent,
}

// SAFETY: event handles may be used from any thread.
unsafe impl Send for StreamEvent {}
// SAFETY: as above; the driver locks for itself.
unsafe impl Sync for StreamEvent {}

impl StreamEvent {
    /// Records the moment when everything now in `stream` has ended.
    pub fn record(stream: &Stream) -> Result<Self> {
        let event = Self::new(stream.gpu(), sys::CUevent_flags::CU_EVENT_DEFAULT)?;
        event.record_in(stream)?;
        Ok(event)
    }

    /// Creates an event without a time stamp, which is cheaper for the GPU.
    pub fn untimed(gpu: &Arc<Gpu>) -> Result<Self> {
        Self::new(gpu, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    fn new(gpu: &Arc<Gpu>, flags: sys::CUevent_flags) -> Result<Self> {
        let _guest = gpu.enter()?;
        let mut raw = null_mut();
        // SAFETY: the call writes one handle.
        check("cuEventCreate", unsafe {
            sys::cuEventCreate(&mut raw, flags as u32)
        })?;
        Ok(Self {
            gpu: Arc::clone(gpu),
            raw,
        })
    }

    /// Makes the event stand for the end of everything that is now in `stream`.
    pub fn record_in(&self, stream: &Stream) -> Result<()> {
        let _guest = self.gpu.enter()?;
        // SAFETY: both handles belong to this process and are alive.
        check("cuEventRecord", unsafe {
            sys::cuEventRecord(self.raw, stream.raw())
        })
    }

    /// Means from now on the end of everything now in `stream`, a `CUstream` of the GPU; 0 is the default one.
    ///
    /// # Errors
    /// [`Error::Environment`] with the driver's answer.
    pub fn record_at(&self, stream: u64) -> Result<()> {
        let _guest = self.gpu.enter()?;
        // SAFETY: the event is our own; the driver checks the handle of the stream.
        check("cuEventRecord", unsafe {
            sys::cuEventRecord(self.raw, handle(stream))
        })
    }

    /// Orders all later work of `stream`, a `CUstream` of the GPU, after the event. Returns at once.
    ///
    /// # Errors
    /// [`Error::Environment`] with the driver's answer.
    pub fn before(&self, stream: u64) -> Result<()> {
        let _guest = self.gpu.enter()?;
        // SAFETY: the event is our own, which the driver keeps until it has occurred, even if it is destroyed before;
        // the driver checks the handle of the stream and refuses one of another context.
        check("cuStreamWaitEvent", unsafe {
            sys::cuStreamWaitEvent(handle(stream), self.raw, 0)
        })
    }

    /// True if the event has occurred.
    ///
    /// # Errors
    /// [`Error::Device`] when a kernel died.
    pub fn is_done(&self) -> Result<bool> {
        let _guest = self.gpu.enter()?;
        // SAFETY: the event is our own.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => check("kernel", other).map(|()| true),
        }
    }

    /// Waits for the event: the end of copies and fills, which end by themselves.
    ///
    /// # Errors
    /// As [`Stream::finish`].
    pub fn wait(&self) -> Result<()> {
        match until(PATIENCE, || self.is_done())? {
            true => Ok(()),
            false => {
                self.gpu.lose();
                Err(late(PATIENCE))
            }
        }
    }

    /// Measures the seconds from `earlier` to this, once the stream is done.
    pub fn seconds_since(&self, earlier: &StreamEvent) -> Result<f64> {
        let _guest = self.gpu.enter()?;
        let mut milliseconds = 0.0f32;
        // SAFETY: both handles belong to this process and are alive; the call writes one number.
        check("cuEventElapsedTime", unsafe {
            sys::cuEventElapsedTime(&mut milliseconds, earlier.raw, self.raw)
        })?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for StreamEvent {
    fn drop(&mut self) {
        if let Ok(_guest) = self.gpu.enter() {
            // SAFETY: it was created in `new`.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}
