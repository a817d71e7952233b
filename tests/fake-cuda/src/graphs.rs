//! Graphs: what streams capture, what is made of it, and the objects of users that it keeps.
// UNSAFETY: a C interface of raw pointers, whose callers keep the driver's rules.
#![allow(unsafe_code, non_snake_case)]
#![allow(
    clippy::missing_safety_doc,
    reason = "the CUDA driver API documents them"
)]

use crate::captures::{self, Part};
use crate::streams::{Work, stream};
use crate::threads;
use crate::{CAPTURE_UNSUPPORTED, ILLEGAL_STATE, INVALID_VALUE, SUCCESS, Status, lock};
use std::ffi::{c_uint, c_ulonglong, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// What was captured, or a graph that is ready to be launched. Copies keep the same objects.
#[derive(Clone, Default)]
pub(crate) struct Graph {
    pub work: Vec<Work>,
    objects: Vec<Arc<Retained>>,
}

/// An object of a user: destroyed with the last reference, by a thread of its own.
struct UserObject {
    data: usize,
    destroy: unsafe extern "C" fn(*mut c_void),
    references: AtomicI64,
}

/// References of a graph, and of all that is made from it, to an object.
struct Retained {
    object: usize,
    count: i64,
}

impl Drop for Retained {
    fn drop(&mut self) {
        let object = std::ptr::with_exposed_provenance_mut(self.object);
        // SAFETY: the object lives until its last reference goes.
        unsafe { release(object, self.count) };
    }
}

/// # Safety
/// There are as many references, which are not used any more.
unsafe fn release(object: *mut UserObject, count: i64) {
    // SAFETY: the caller's.
    let references = unsafe { &(*object).references };
    if references.fetch_sub(count, Ordering::AcqRel) != count {
        return;
    }
    // SAFETY: made by `cuUserObjectCreate`; nobody has it any more.
    let object = unsafe { Box::from_raw(object) };
    let (destroy, data) = (object.destroy, object.data);
    // SAFETY: what the user gave for this, called once.
    threads::leave(std::thread::spawn(move || unsafe {
        destroy(std::ptr::with_exposed_provenance_mut(data));
    }));
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuUserObjectCreate(
    object: *mut *mut c_void,
    data: *mut c_void,
    destroy: Option<unsafe extern "C" fn(*mut c_void)>,
    count: c_uint,
    flags: c_uint,
) -> Status {
    const NO_DESTRUCTOR_SYNC: c_uint = 1;
    let Some(destroy) = destroy.filter(|_| count > 0 && flags == NO_DESTRUCTOR_SYNC) else {
        return INVALID_VALUE;
    };
    let new = Box::new(UserObject {
        data: data.expose_provenance(),
        destroy,
        references: AtomicI64::new(count.into()),
    });
    // SAFETY: the caller gives a place for one handle.
    unsafe { *object = Box::into_raw(new).cast() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuUserObjectRelease(object: *mut c_void, count: c_uint) -> Status {
    // SAFETY: the caller has as many references.
    unsafe { release(object.cast(), count.into()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphRetainUserObject(
    graph: *mut c_void,
    object: *mut c_void,
    count: c_uint,
    flags: c_uint,
) -> Status {
    const MOVE: c_uint = 1;
    if graph.is_null() || count == 0 || flags > MOVE {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's graph and object.
    let (graph, of) = unsafe { (&mut *graph.cast::<Graph>(), &*object.cast::<UserObject>()) };
    let count = i64::from(count);
    if flags != MOVE {
        of.references.fetch_add(count, Ordering::AcqRel);
    }
    let object = object.expose_provenance();
    graph.objects.push(Arc::new(Retained { object, count }));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetCaptureInfo_v2(
    handle: *mut c_void,
    status: *mut c_uint,
    id: *mut c_ulonglong,
    graph: *mut *mut c_void,
    nodes: *mut *const c_void,
    count: *mut usize,
) -> Status {
    // SAFETY: the caller's handle.
    let mut stream = lock(unsafe { stream(handle) });
    let (state, number, captured) = match stream.part() {
        None => (0, 0, std::ptr::null_mut()),
        Some(part) => {
            let mut capture = lock(&part.capture);
            match capture.is_invalid {
                true => (2, 0, std::ptr::null_mut()),
                false => (1, capture.number, std::ptr::from_mut(&mut *capture.graph)),
            }
        }
    };
    // SAFETY: the caller gives a place for the status, and for what else it wants to know.
    unsafe {
        *status = state;
        if !id.is_null() {
            *id = number;
        }
        if !graph.is_null() {
            *graph = captured.cast();
        }
        if !nodes.is_null() {
            *nodes = std::ptr::null();
        }
        if !count.is_null() {
            *count = 0;
        }
    }
    SUCCESS
}

/// The default stream of all threads is never captured.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamBeginCapture_v2(handle: *mut c_void, mode: c_uint) -> Status {
    const LEGACY: usize = 1;
    if handle.addr() <= LEGACY {
        return CAPTURE_UNSUPPORTED;
    }
    if mode > captures::RELAXED {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's handle.
    let mut stream = lock(unsafe { stream(handle) });
    if stream.part().is_some() {
        return ILLEGAL_STATE;
    }
    stream.captured = Some(Part::begin(handle.addr(), mode));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(
    handle: *mut c_void,
    graph: *mut *mut c_void,
) -> Status {
    // SAFETY: the caller's handle.
    let mut stream = lock(unsafe { stream(handle) });
    let Some(part) = stream.part() else {
        return ILLEGAL_STATE;
    };
    let (made, answer) = match part.end() {
        Ok(captured) => (Box::into_raw(captured).cast(), SUCCESS),
        Err(status) => (std::ptr::null_mut(), status),
    };
    // SAFETY: the caller gives a place for one handle.
    unsafe { *graph = made };
    answer
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphInstantiateWithFlags(
    exec: *mut *mut c_void,
    graph: *mut c_void,
    _flags: u64,
) -> Status {
    if let Some(refused) = captures::refused() {
        return refused;
    }
    // SAFETY: the caller's graph, and a place for one handle.
    unsafe {
        let all = (*graph.cast::<Graph>()).clone();
        *exec = Box::into_raw(Box::new(all)).cast();
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphLaunch(exec: *mut c_void, handle: *mut c_void) -> Status {
    // SAFETY: the caller's handles.
    let (all, stream) = unsafe { (&*exec.cast::<Graph>(), stream(handle)) };
    let all = all.clone();
    lock(stream).put(Arc::new(move || all.work.iter().for_each(|work| work())))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphDestroy(graph: *mut c_void) -> Status {
    // SAFETY: the caller destroys a handle once.
    drop(unsafe { Box::from_raw(graph.cast::<Graph>()) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphExecDestroy(exec: *mut c_void) -> Status {
    // SAFETY: the caller destroys a handle once.
    drop(unsafe { Box::from_raw(exec.cast::<Graph>()) });
    SUCCESS
}
