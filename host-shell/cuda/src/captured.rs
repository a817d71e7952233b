//! The objects that a captured operation needs, kept for as long as a graph may run it.
//!
//! A graph retains a user object of the driver, and so does everything that is made from the graph; the last of them
//! releases it when no run is in progress any more. Before that a captured launch may run at any time, also after the
//! store was closed that it was made for (docs/adr/0008).
// UNSAFETY: hands an owner to the driver as a raw pointer.
#![allow(unsafe_code)]

use super::driver::check;
use super::leftovers::{self, LaunchLeftover};
use super::stream::{handle, is_capturing};
use cudarc::driver::sys;
use nvme_driver::error::{Error, Result};
use std::ffi::c_void;
use std::ptr::null_mut;

/// Makes the graph into which `stream` of the calling thread's context is captured keep `needed`
/// alive. Call it before the launch that needs it: after an error nothing is kept, and nothing may
/// be launched.
///
/// # Errors
/// [`Error::Environment`] with the driver's answer; `needed` is dropped then.
pub(super) fn keep_with_graph(stream: u64, needed: Box<dyn LaunchLeftover>) -> Result<()> {
    let graph = graph_of(stream)?;
    let data = Box::into_raw(Box::new(needed));
    let mut object = null_mut();
    let flags = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
    // SAFETY: the call writes one handle; `release` frees the box behind `data`, once.
    let made = check("cuUserObjectCreate", unsafe {
        sys::cuUserObjectCreate(&mut object, data.cast(), Some(release), 1, flags)
    });
    if let Err(error) = made {
        // SAFETY: it was made above; the driver has not taken it.
        drop(unsafe { Box::from_raw(data) });
        return Err(error);
    }
    let flags = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as u32;
    // SAFETY: the graph is being captured into, so the driver keeps it alive during this call. The object has
    // one reference, which the flag MOVE passes to the graph; it must not be released here after success.
    let retained = check("cuGraphRetainUserObject", unsafe {
        sys::cuGraphRetainUserObject(graph, object, 1, flags)
    });
    if retained.is_err() {
        // SAFETY: the reference is still ours, because retaining failed. Releasing the last one
        // makes the driver call `release`, which frees `data` exactly once. Without it the data
        // would be leaked.
        let _ = unsafe { sys::cuUserObjectRelease(object, 1) };
    }
    retained
}

/// Returns the number of the capture that `stream`, of the calling thread's context, is in; `None` outside of captures.
///
/// # Errors
/// [`Error::Usage`] for a capture that has failed, [`Error::Environment`] with the driver's answer.
pub(super) fn capture_of(stream: u64) -> Result<Option<u64>> {
    if !is_capturing(stream)? {
        return Ok(None);
    }
    capture_info(stream).map(|(number, _)| Some(number))
}

/// Returns the graph that `stream` is captured in.
fn graph_of(stream: u64) -> Result<sys::CUgraph> {
    capture_info(stream).map(|(_, graph)| graph)
}

/// Returns number and graph of the capture of `stream`.
fn capture_info(stream: u64) -> Result<(u64, sys::CUgraph)> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut id, mut graph) = (0, null_mut());
    // SAFETY: the call writes three values; the driver checks the handle, and the other places may be null.
    check("cuStreamGetCaptureInfo", unsafe {
        sys::cuStreamGetCaptureInfo_v2(
            handle(stream),
            &mut status,
            &mut id,
            &mut graph,
            null_mut(),
            null_mut(),
        )
    })?;
    match status {
        sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE if !graph.is_null() => {
            Ok((id, graph))
        }
        _ => Err(Error::usage(
            "the capture of the stream has failed or was ended meanwhile",
            "end the capture, look at its error, and capture again",
        )),
    }
}

/// Called when the last graph with the user object has been destroyed. It runs on a thread of the driver, which
/// may not call the driver, so it only queues the object for a later thread.
///
/// # Safety
/// `data` is the pointer that [`keep_with_graph`] passed, and is passed once.
unsafe extern "C" fn release(data: *mut c_void) {
    // SAFETY: the caller keeps the conditions under `# Safety`.
    let needed = unsafe { Box::from_raw(data.cast::<Box<dyn LaunchLeftover>>()) };
    leftovers::keep(*needed);
}
