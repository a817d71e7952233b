//! The point in a stream at which a first launch ends. A second launch comes after it, in the same stream or in another
//! one, in the same graph or in none.

use super::super::captured::capture_of;
use super::super::driver::Gpu;
use super::super::stream::StreamEvent;
use nvme_driver::error::{Error, Result};
use std::sync::Arc;

/// A moment in a stream of the caller's, and the capture that it belongs to.
pub struct BegunPoint {
    gpu: Arc<Gpu>,
    stream: u64,
    /// Number of the capture; `None` for work that runs at once.
    capture: Option<u64>,
    event: StreamEvent,
}

impl BegunPoint {
    /// Prepares for a launch in `stream`, a `CUstream` of `gpu`.
    ///
    /// # Errors
    /// [`Error::Usage`] for a capture that has failed, [`Error::Environment`] with the driver's answer.
    pub fn new(gpu: &Arc<Gpu>, stream: u64) -> Result<Self> {
        let _guest = gpu.enter()?;
        Ok(Self {
            gpu: Arc::clone(gpu),
            stream,
            capture: capture_of(stream)?,
            event: StreamEvent::untimed(gpu)?,
        })
    }

    /// Records all work that is now in the stream as the point.
    ///
    /// # Errors
    /// [`Error::Environment`] with the driver's answer.
    pub fn record(&self) -> Result<()> {
        self.event.record_at(self.stream)
    }

    /// True if it is in a graph.
    pub fn is_captured(&self) -> bool {
        self.capture.is_some()
    }

    /// Orders all later work of stream `then` after it. A stream that is not captured joins the capture.
    ///
    /// # Errors
    /// [`Error::Usage`] if one of the two launches is in a graph and the other is not in the same capture: such a graph
    /// could be launched more often than the other launch. A capture of the caller's stays valid.
    pub fn order(&self, then: u64) -> Result<()> {
        let _guest = self.gpu.enter()?;
        let capture = capture_of(then)?;
        if capture.is_some() && capture != self.capture {
            return Err(apart(match self.capture {
                None => {
                    "the rows were begun outside of the graph that their second half is captured in"
                }
                Some(_) => "the rows were begun in another capture than that of their second half",
            }));
        }
        let outside = "the rows were begun in a graph, and their second half is not captured in it";
        match self.event.before(then) {
            Err(_) if self.is_captured() => return Err(apart(outside)),
            ordered => ordered?,
        }
        match capture_of(then)? == self.capture {
            true => Ok(()),
            false => Err(apart(outside)),
        }
    }

    /// Returns the error of a second half that comes again.
    pub fn finished_twice() -> Error {
        Error::usage(
            "the rows were finished before",
            "begin again for each finish",
        )
    }

    /// Orders all later work of stream `then`, which is not captured, after the point. The work of a graph that was
    /// destroyed has ended.
    ///
    /// # Errors
    /// [`Error::Environment`] with the driver's answer.
    pub(super) fn before(&self, then: u64) -> Result<()> {
        match self.is_captured() {
            true => Ok(()),
            false => self.event.before(then),
        }
    }
}

fn apart(cause: &str) -> Error {
    Error::usage(
        cause,
        "begin and finish in one capture, or both outside of captures",
    )
}
