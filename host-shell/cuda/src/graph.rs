//! Work of a stream captured as a CUDA graph, which can be launched any number of times. Memory that the captured
//! work uses has to outlive the graph: see `captured`.
// UNSAFETY: calls into the CUDA driver library with handles.
#![allow(unsafe_code)]

use super::driver::{Gpu, check};
use super::stream::Stream;
use cudarc::driver::sys;
use nvme_driver::error::Result;
use std::ptr::null_mut;
use std::sync::Arc;

/// A graph that is ready to be launched.
pub struct CudaGraph {
    gpu: Arc<Gpu>,
    raw: sys::CUgraphExec,
}

// SAFETY: graph handles may be used from any thread, but by one thread at a time. The type is Send and not
// Sync, so two threads never launch or destroy the same handle together.
unsafe impl Send for CudaGraph {}

impl CudaGraph {
    /// Captures the work that `work` enqueues in the stream, whose handle it receives, without running it.
    ///
    /// # Errors
    /// The errors of `work`, and [`Error::Environment`](nvme_driver::Error::Environment) with the driver's answer.
    pub fn capture<T>(stream: &Stream, work: impl FnOnce(u64) -> Result<T>) -> Result<(Self, T)> {
        let gpu = Arc::clone(stream.gpu());
        let _guest = gpu.enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is our own.
        check("cuStreamBeginCapture", unsafe {
            sys::cuStreamBeginCapture_v2(stream.raw(), mode)
        })?;
        let put = work(stream.handle());
        let mut graph = null_mut();
        // SAFETY: the capture that began above; the call writes one handle.
        let ended = check("cuStreamEndCapture", unsafe {
            sys::cuStreamEndCapture(stream.raw(), &mut graph)
        });
        // Destroying the graph releases the objects that it keeps, unless an executable was made from it.
        let captured = CapturedGraph(graph);
        let put = put?;
        ended?;
        let mut raw = null_mut();
        // SAFETY: the graph above; the call writes one handle.
        check("cuGraphInstantiate", unsafe {
            sys::cuGraphInstantiateWithFlags(&mut raw, captured.0, 0)
        })?;
        drop(captured);
        drop(_guest);
        Ok((Self { gpu, raw }, put))
    }

    /// Launches the graph in `stream`. Returns before it runs.
    ///
    /// # Errors
    /// [`Error::Environment`](nvme_driver::Error::Environment) with the driver's answer.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        let _guest = self.gpu.enter()?;
        // SAFETY: both handles belong to this process and are alive.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(self.raw, stream.raw())
        })
    }
}

/// A captured graph; null after a capture that failed. It is dropped in the context in which it was made.
struct CapturedGraph(sys::CUgraph);

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the capture of this graph has ended in `capture`, and the graph is destroyed once.
            let _ = unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        if let Ok(_guest) = self.gpu.enter() {
            // SAFETY: it was made in `capture`. The driver keeps the resources of a launch that still runs.
            let _ = unsafe { sys::cuGraphExecDestroy(self.raw) };
        }
    }
}
