//! What a capture forbids, and what it takes: each rule as it was seen on a GPU.
// UNSAFETY: calls of the driver's C interface, as a program makes them.
#![allow(unsafe_code, non_snake_case)]
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "tables of calls: one reason for all of a table is given"
)]

use nvme_fake_cuda as _;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, PoisonError};

type Status = c_int;

unsafe extern "C" {
    fn cuCtxSetCurrent(context: *mut c_void) -> Status;
    fn cuCtxSynchronize() -> Status;
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) -> Status;
    fn cuStreamCreate(stream: *mut *mut c_void, flags: c_uint) -> Status;
    fn cuStreamDestroy_v2(stream: *mut c_void) -> Status;
    fn cuStreamQuery(stream: *mut c_void) -> Status;
    fn cuStreamSynchronize(stream: *mut c_void) -> Status;
    fn cuStreamIsCapturing(stream: *mut c_void, status: *mut c_uint) -> Status;
    fn cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, flags: c_uint) -> Status;
    fn cuStreamBeginCapture_v2(stream: *mut c_void, mode: c_uint) -> Status;
    fn cuStreamEndCapture(stream: *mut c_void, graph: *mut *mut c_void) -> Status;
    fn cuEventCreate(event: *mut *mut c_void, flags: c_uint) -> Status;
    fn cuEventDestroy_v2(event: *mut c_void) -> Status;
    fn cuEventRecord(event: *mut c_void, stream: *mut c_void) -> Status;
    fn cuEventQuery(event: *mut c_void) -> Status;
    fn cuEventSynchronize(event: *mut c_void) -> Status;
    fn cuMemAlloc_v2(to: *mut u64, bytes: usize) -> Status;
    fn cuMemAllocManaged(to: *mut u64, bytes: usize, flags: c_uint) -> Status;
    fn cuMemFree_v2(at: u64) -> Status;
    fn cuMemHostAlloc(to: *mut u64, bytes: usize, flags: c_uint) -> Status;
    fn cuMemFreeHost(at: u64) -> Status;
    fn cuMemHostRegister_v2(at: u64, bytes: usize, flags: c_uint) -> Status;
    fn cuMemHostUnregister(at: u64) -> Status;
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const u8, bytes: usize, of: *mut c_void) -> Status;
    fn cuMemcpyDtoHAsync_v2(to: *mut u8, from: u64, bytes: usize, of: *mut c_void) -> Status;
    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: *mut c_void) -> Status;
    fn cuMemsetD8Async(to: u64, value: u8, bytes: usize, stream: *mut c_void) -> Status;
    fn cuPointerGetAttribute(to: *mut c_void, which: c_uint, at: u64) -> Status;
    fn cuModuleLoadData(module: *mut *mut c_void, image: *const c_void) -> Status;
    fn cuGraphInstantiateWithFlags(exec: *mut *mut c_void, of: *mut c_void, flags: u64) -> Status;
    fn cuGraphLaunch(exec: *mut c_void, stream: *mut c_void) -> Status;
    fn cuGraphExecDestroy(exec: *mut c_void) -> Status;
    fn cuGraphDestroy(graph: *mut c_void) -> Status;
}

const GLOBAL: c_uint = 0;
const THREAD_LOCAL: c_uint = 1;
const RELAXED: c_uint = 2;

const UNSUPPORTED: Status = 900;
const INVALIDATED: Status = 901;
const UNMATCHED: Status = 903;
const UNJOINED: Status = 904;
const ISOLATION: Status = 905;
const CAPTURED_EVENT: Status = 907;
const WRONG_THREAD: Status = 908;
const ILLEGAL_STATE: Status = 401;

/// A capture in global mode is one for all threads: the tests take turns.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the primary context's handle.
    unsafe { cuCtxSetCurrent(std::ptr::without_provenance_mut(8)) };
    turn
}

/// Handles and memory, as addresses: threads share them.
#[derive(Clone, Copy)]
struct Place {
    /// The stream that is captured, and another one.
    captured: usize,
    other: usize,
    /// Recorded in the other stream before the capture.
    event: usize,
    device: u64,
    pinned: u64,
    /// Memory of the host, of which the first page is registered.
    host: u64,
    graph: usize,
}

fn pointer(of: usize) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(of)
}

fn well(status: Status) {
    assert_eq!(status, 0);
}

fn new_stream() -> usize {
    let mut stream = null_mut();
    // SAFETY: writes one handle.
    well(unsafe { cuStreamCreate(&mut stream, 1) });
    stream.expose_provenance()
}

fn new_event() -> usize {
    let mut event = null_mut();
    // SAFETY: writes one handle.
    well(unsafe { cuEventCreate(&mut event, 0) });
    event.expose_provenance()
}

impl Place {
    fn new() -> Self {
        let (captured, other, event) = (new_stream(), new_stream(), new_event());
        let layout = std::alloc::Layout::from_size_align(8192, 4096).unwrap();
        let (mut device, mut pinned, mut graph) = (0, 0, null_mut());
        // SAFETY: places for handles; two pages that stay.
        let host = unsafe {
            let host = std::alloc::alloc(layout).expose_provenance() as u64;
            well(cuEventRecord(pointer(event), pointer(other)));
            well(cuMemAlloc_v2(&mut device, 4096));
            well(cuMemHostAlloc(&mut pinned, 4096, 0));
            well(cuMemHostRegister_v2(host, 4096, 0));
            well(cuStreamBeginCapture_v2(pointer(captured), RELAXED));
            well(cuStreamEndCapture(pointer(captured), &mut graph));
            host
        };
        Self {
            captured,
            other,
            event,
            device,
            pinned,
            host,
            graph: graph.expose_provenance(),
        }
    }

    fn begin(&self, mode: c_uint) {
        // SAFETY: the place's own.
        well(unsafe { cuStreamBeginCapture_v2(pointer(self.captured), mode) });
    }

    /// Ends the capture: the answer, and the graph.
    fn end(&self) -> (Status, usize) {
        let mut graph = null_mut();
        // SAFETY: the place's own; writes one handle.
        let status = unsafe { cuStreamEndCapture(pointer(self.captured), &mut graph) };
        assert_eq!(graph.is_null(), status != 0, "a graph with {status}");
        (status, graph.expose_provenance())
    }

    /// Fills the memory of the GPU in `stream`.
    fn fill(&self, value: u8, stream: usize) -> Status {
        // SAFETY: the place's own.
        unsafe { cuMemsetD8Async(self.device, value, 4096, pointer(stream)) }
    }

    /// The first byte of the memory of the GPU.
    fn byte(&self) -> u8 {
        let mut byte = 0;
        // SAFETY: the place's own, and a place for one byte.
        well(unsafe { cuMemcpyDtoHAsync_v2(&mut byte, self.device, 1, pointer(self.other)) });
        byte
    }
}

fn set_mode(mut mode: c_uint) {
    // SAFETY: exchanges one value.
    well(unsafe { cuThreadExchangeStreamCaptureMode(&mut mode) });
}

type Call = fn(&Place) -> Status;

/// Calls that a capture forbids, of things that do not take part in it.
const FORBIDDEN: [(&str, Call); 12] = [
    // SAFETY, of all: the place's own handles and memory, and places for what is written.
    ("cuStreamQuery", |of| unsafe {
        cuStreamQuery(pointer(of.other))
    }),
    ("cuStreamSynchronize", |of| unsafe {
        cuStreamSynchronize(pointer(of.other))
    }),
    ("cuEventQuery", |of| unsafe {
        cuEventQuery(pointer(of.event))
    }),
    ("cuEventSynchronize", |of| unsafe {
        cuEventSynchronize(pointer(of.event))
    }),
    ("cuMemAlloc", |_| unsafe { cuMemAlloc_v2(&mut 0, 4096) }),
    ("cuMemAllocManaged", |_| unsafe {
        cuMemAllocManaged(&mut 0, 4096, 1)
    }),
    ("cuMemFree", |of| unsafe { cuMemFree_v2(of.device) }),
    ("cuMemHostAlloc", |_| unsafe {
        cuMemHostAlloc(&mut 0, 4096, 0)
    }),
    ("cuMemFreeHost", |of| unsafe { cuMemFreeHost(of.pinned) }),
    ("cuMemHostRegister", |of| unsafe {
        cuMemHostRegister_v2(of.host + 4096, 4096, 0)
    }),
    ("cuMemHostUnregister", |of| unsafe {
        cuMemHostUnregister(of.host)
    }),
    ("cuGraphInstantiate", |of| unsafe {
        cuGraphInstantiateWithFlags(&mut null_mut(), pointer(of.graph), 0)
    }),
];

/// Makes `call` in a thread of the mode `mode` while a capture in mode `of` is under way; the answers to the call and to
/// the end of the capture.
fn during(call: Call, of: c_uint, is_own: bool, mode: c_uint) -> (Status, Status) {
    let place = Place::new();
    place.begin(of);
    let ask = move || {
        // SAFETY: the primary context's handle.
        unsafe { cuCtxSetCurrent(std::ptr::without_provenance_mut(8)) };
        set_mode(mode);
        let answer = call(&place);
        set_mode(GLOBAL);
        answer
    };
    let answer = match is_own {
        true => ask(),
        false => std::thread::spawn(ask).join().unwrap(),
    };
    (answer, place.end().0)
}

#[test]
fn potentially_unsafe_calls_end_the_captures_that_forbid_them() {
    let _turn = turn();
    for (name, call) in FORBIDDEN {
        for (of, is_own, mode, is_refused) in [
            (GLOBAL, true, GLOBAL, true),
            (GLOBAL, false, GLOBAL, true),
            (GLOBAL, true, THREAD_LOCAL, true),
            (GLOBAL, false, THREAD_LOCAL, false),
            (GLOBAL, true, RELAXED, false),
            (GLOBAL, false, RELAXED, false),
            (THREAD_LOCAL, true, GLOBAL, true),
            (THREAD_LOCAL, false, GLOBAL, false),
            (THREAD_LOCAL, true, RELAXED, false),
            (RELAXED, true, GLOBAL, false),
            (RELAXED, false, GLOBAL, false),
        ] {
            let expected = match is_refused {
                true => (UNSUPPORTED, INVALIDATED),
                false => (0, 0),
            };
            let answers = during(call, of, is_own, mode);
            assert_eq!(answers, expected, "{name}: {of}, own {is_own}, {mode}");
        }
    }
}

/// Calls that a capture allows to every thread.
const ALLOWED: [(&str, Call); 9] = [
    // SAFETY, of all: as above.
    ("cuMemsetD8Async", |of| of.fill(7, of.other)),
    ("cuMemcpyAsync", |of| unsafe {
        cuMemcpyAsync(of.device, of.device + 8, 8, pointer(of.other))
    }),
    ("cuMemcpyHtoDAsync", |of| unsafe {
        cuMemcpyHtoDAsync_v2(of.device, [1u8; 8].as_ptr(), 8, pointer(of.other))
    }),
    ("cuEventRecord", |of| unsafe {
        cuEventRecord(pointer(of.event), pointer(of.other))
    }),
    ("cuStreamWaitEvent", |of| unsafe {
        cuStreamWaitEvent(pointer(of.other), pointer(of.event), 0)
    }),
    ("streams come and go", |_| unsafe {
        cuStreamDestroy_v2(pointer(new_stream()))
    }),
    ("events come and go", |_| unsafe {
        cuEventDestroy_v2(pointer(new_event()))
    }),
    ("cuModuleLoadData", |_| unsafe {
        let image = c".version 7.0\n.target sm_80\n";
        cuModuleLoadData(&mut null_mut(), image.as_ptr().cast())
    }),
    ("cuPointerGetAttribute", |of| unsafe {
        let mut kind = 0u32;
        cuPointerGetAttribute((&raw mut kind).cast(), 2, of.device)
    }),
];

#[test]
fn other_calls_leave_a_capture_alone() {
    let _turn = turn();
    for (name, call) in ALLOWED {
        for is_own in [true, false] {
            let answers = during(call, GLOBAL, is_own, GLOBAL);
            assert_eq!(answers, (0, 0), "{name}, own {is_own}");
        }
    }
}

#[test]
fn nobody_may_wait_for_a_stream_that_is_captured() {
    let _turn = turn();
    let calls: [(&str, Call); 3] = [
        // SAFETY: as above.
        ("cuStreamQuery", |of| unsafe {
            cuStreamQuery(pointer(of.captured))
        }),
        ("cuStreamSynchronize", |of| unsafe {
            cuStreamSynchronize(pointer(of.captured))
        }),
        ("cuCtxSynchronize", |_| unsafe { cuCtxSynchronize() }),
    ];
    for (name, call) in calls {
        for (of, is_own, mode) in [
            (GLOBAL, true, RELAXED),
            (THREAD_LOCAL, false, RELAXED),
            (RELAXED, true, RELAXED),
            (RELAXED, false, GLOBAL),
        ] {
            let answers = during(call, of, is_own, mode);
            let expected = (UNSUPPORTED, INVALIDATED);
            assert_eq!(answers, expected, "{name}: {of}, own {is_own}, {mode}");
        }
    }
    // SAFETY: no arguments.
    well(unsafe { cuCtxSynchronize() });
}

#[test]
fn a_captured_stream_waits_for_events_of_its_capture_alone() {
    let _turn = turn();
    let place = Place::new();
    place.begin(GLOBAL);
    // SAFETY: the place's own.
    let status = unsafe { cuStreamWaitEvent(pointer(place.captured), pointer(place.event), 0) };
    assert_eq!((status, place.end().0), (ISOLATION, INVALIDATED));
    // An event that was never recorded is nothing to wait for.
    let event = new_event();
    place.begin(GLOBAL);
    // SAFETY: as above.
    well(unsafe { cuStreamWaitEvent(pointer(place.captured), pointer(event), 0) });
    assert_eq!(place.end().0, 0);
}

#[test]
fn events_of_a_capture_have_no_moment() {
    let _turn = turn();
    let calls: [Call; 2] = [
        // SAFETY: as above.
        |of| unsafe { cuEventQuery(pointer(of.event)) },
        |of| unsafe { cuEventSynchronize(pointer(of.event)) },
    ];
    for call in calls {
        for mode in [GLOBAL, RELAXED] {
            let place = Place::new();
            place.begin(RELAXED);
            set_mode(mode);
            // SAFETY: the place's own.
            well(unsafe { cuEventRecord(pointer(place.event), pointer(place.captured)) });
            let answer = call(&place);
            set_mode(GLOBAL);
            assert_eq!((answer, place.end().0), (CAPTURED_EVENT, INVALIDATED));
            // SAFETY: as above.
            well(unsafe { cuEventRecord(pointer(place.event), pointer(place.other)) });
            assert_eq!(call(&place), 0, "recorded outside of a capture again");
        }
    }
}

/// Orders `later` after what `earlier` has so far.
fn order(earlier: usize, later: usize) {
    let event = new_event();
    // SAFETY: handles of the test.
    unsafe {
        well(cuEventRecord(pointer(event), pointer(earlier)));
        well(cuStreamWaitEvent(pointer(later), pointer(event), 0));
    }
}

#[test]
fn a_fork_is_part_of_the_graph_and_has_to_be_joined() {
    let _turn = turn();
    let place = Place::new();
    well(place.fill(1, place.other));
    place.begin(GLOBAL);
    order(place.captured, place.other);
    well(place.fill(2, place.other));
    order(place.other, place.captured);
    let (status, graph) = place.end();
    well(status);
    assert_eq!(place.byte(), 1, "a captured fill ran");
    let mut exec = null_mut();
    // SAFETY: the graph above, and streams of the place.
    unsafe {
        well(cuGraphInstantiateWithFlags(&mut exec, pointer(graph), 0));
        well(cuGraphLaunch(exec, pointer(place.captured)));
        well(cuStreamSynchronize(pointer(place.captured)));
        well(cuGraphExecDestroy(exec));
        well(cuGraphDestroy(pointer(graph)));
    }
    assert_eq!(place.byte(), 2);
    // Not joined, and joined before its last work.
    for joins in [false, true] {
        place.begin(GLOBAL);
        order(place.captured, place.other);
        well(place.fill(3, place.other));
        if joins {
            order(place.other, place.captured);
            well(place.fill(4, place.other));
        }
        assert_eq!(place.end().0, UNJOINED, "joins {joins}");
        // The other stream is free again.
        well(place.fill(5, place.other));
        assert_eq!(place.byte(), 5);
    }
    // A fork without work of its own has nothing to join.
    place.begin(GLOBAL);
    order(place.captured, place.other);
    assert_eq!(place.end().0, 0);
}

#[test]
fn captures_begin_and_end_once_and_where_they_may() {
    let _turn = turn();
    let place = Place::new();
    let mut graph = null_mut();
    for legacy in [0, 1] {
        // SAFETY: a handle of the default stream.
        let status = unsafe { cuStreamBeginCapture_v2(pointer(legacy), RELAXED) };
        assert_eq!(status, UNSUPPORTED);
    }
    assert_eq!(place.end().0, ILLEGAL_STATE);
    place.begin(GLOBAL);
    // SAFETY: the place's own.
    let again = unsafe { cuStreamBeginCapture_v2(pointer(place.captured), GLOBAL) };
    assert_eq!((again, place.end().0), (ILLEGAL_STATE, 0));
    // In the stream that began it, and by its thread.
    place.begin(GLOBAL);
    order(place.captured, place.other);
    // SAFETY: as above.
    let other = unsafe { cuStreamEndCapture(pointer(place.other), &mut graph) };
    assert_eq!((other, place.end().0), (UNMATCHED, INVALIDATED));
    for (mode, status) in [(GLOBAL, WRONG_THREAD), (RELAXED, 0)] {
        place.begin(mode);
        let ended = std::thread::spawn(move || place.end().0).join().unwrap();
        assert_eq!(ended, status);
        if ended != 0 {
            well(place.end().0);
        }
    }
}

#[test]
fn a_capture_that_was_ended_takes_no_work() {
    let _turn = turn();
    let place = Place::new();
    place.begin(GLOBAL);
    well(place.fill(1, place.captured));
    let state = || {
        let mut state = 9;
        // SAFETY: the place's own, and a place for one value.
        well(unsafe { cuStreamIsCapturing(pointer(place.captured), &mut state) });
        state
    };
    assert_eq!(state(), 1);
    // SAFETY: as above.
    let refused = unsafe { cuStreamQuery(pointer(place.captured)) };
    assert_eq!((refused, state()), (UNSUPPORTED, 2));
    assert_eq!(place.fill(2, place.captured), INVALIDATED);
    assert_eq!((place.end().0, state()), (INVALIDATED, 0));
    well(place.fill(3, place.captured));
    assert_eq!(place.byte(), 3);
}
