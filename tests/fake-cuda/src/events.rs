//! Events: moments in streams, and waits for them.
// UNSAFETY: a C interface of raw pointers, whose callers keep the driver's rules.
#![allow(unsafe_code, non_snake_case)]
#![allow(
    clippy::missing_safety_doc,
    reason = "the CUDA driver API documents them"
)]

use crate::captures::{self, Part};
use crate::streams::{End, stream};
use crate::{NOT_READY, SUCCESS, Status, lock};
use std::ffi::{c_uint, c_void};
use std::time::{Duration, Instant};

/// A moment in a stream: now, or when the kernel in it ends.
struct Event {
    recorded: Instant,
    after: Option<End>,
    /// The capture that recorded it last, and what of it comes before.
    captured: Option<Part>,
    /// Waits for an event that was never recorded are over, also in a capture.
    is_recorded: bool,
}

impl Event {
    fn moment(&self) -> Instant {
        let end = self.after.as_ref().and_then(|end| end.get().copied());
        end.map_or(self.recorded, |end| end.max(self.recorded))
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut *mut c_void, _: c_uint) -> Status {
    let new = Box::new(Event {
        recorded: Instant::now(),
        after: None,
        captured: None,
        is_recorded: false,
    });
    // SAFETY: the caller gives a place for one handle.
    unsafe { *event = Box::into_raw(new).cast() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecord(event: *mut c_void, handle: *mut c_void) -> Status {
    // SAFETY: the caller's handle.
    let mut stream = lock(unsafe { stream(handle) });
    let new = Event {
        recorded: Instant::now(),
        after: stream.end(),
        captured: stream.part().cloned(),
        is_recorded: true,
    };
    // SAFETY: the caller's handle; one thread records it.
    unsafe { *event.cast::<Event>() = new };
    SUCCESS
}

/// Work that is put into the stream from now on begins after the event: this waits for it, or captures the order. A
/// stream that is not captured becomes a part of the capture whose event it waits for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWaitEvent(
    handle: *mut c_void,
    event: *mut c_void,
    _: c_uint,
) -> Status {
    // SAFETY: the caller's handle.
    let event = unsafe { &*event.cast::<Event>() };
    {
        // SAFETY: the caller's handle.
        let mut stream = lock(unsafe { stream(handle) });
        match (stream.part(), &event.captured) {
            (None, None) => {}
            (Some(_), None) if !event.is_recorded => return SUCCESS,
            (Some(part), None) => return part.refuse_event(),
            (_, Some(of)) if of.has_ended() => return captures::of_event(of),
            (Some(part), Some(of)) => return part.wait(of),
            (None, Some(of)) => {
                stream.captured = Some(Part::join(handle.addr(), of));
                return SUCCESS;
            }
        }
    }
    while event.after.as_ref().is_some_and(|end| end.get().is_none()) {
        std::thread::sleep(Duration::from_micros(50));
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventQuery(event: *mut c_void) -> Status {
    // SAFETY: the caller's handle.
    let event = unsafe { &*event.cast::<Event>() };
    if let Some(part) = &event.captured {
        return captures::of_event(part);
    }
    if let Some(refused) = captures::refused() {
        return refused;
    }
    match event.after.as_ref().is_some_and(|end| end.get().is_none()) {
        true => NOT_READY,
        false => SUCCESS,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventSynchronize(event: *mut c_void) -> Status {
    // SAFETY: the caller's handle.
    let event = unsafe { &*event.cast::<Event>() };
    if let Some(part) = &event.captured {
        return captures::of_event(part);
    }
    if let Some(refused) = captures::refused() {
        return refused;
    }
    while event.after.as_ref().is_some_and(|end| end.get().is_none()) {
        std::thread::sleep(Duration::from_micros(50));
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(
    ms: *mut f32,
    start: *mut c_void,
    end: *mut c_void,
) -> Status {
    // SAFETY: the caller's handles.
    let (start, end) = unsafe { (&*start.cast::<Event>(), &*end.cast::<Event>()) };
    let elapsed = end.moment().saturating_duration_since(start.moment());
    // SAFETY: the caller gives a place for one number.
    unsafe { *ms = (elapsed.as_secs_f32() * 1e3).max(1e-3) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventDestroy_v2(event: *mut c_void) -> Status {
    // SAFETY: the caller destroys a handle once.
    drop(unsafe { Box::from_raw(event.cast::<Event>()) });
    SUCCESS
}
