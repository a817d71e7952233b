//! What streams capture, and what a capture forbids meanwhile. Answers are those of CUDA 13 on an H100.

use crate::graphs::Graph;
use crate::{
    CAPTURE_INVALIDATED, CAPTURE_ISOLATION, CAPTURE_MERGE, CAPTURE_UNJOINED, CAPTURE_UNMATCHED,
    CAPTURE_UNSUPPORTED, CAPTURE_WRONG_THREAD, CAPTURED_EVENT, SUCCESS, Status, capture_mode, lock,
};
use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

/// CU_STREAM_CAPTURE_MODE_GLOBAL.
const GLOBAL: c_uint = 0;
/// CU_STREAM_CAPTURE_MODE_RELAXED.
pub(crate) const RELAXED: c_uint = 2;

/// Those that have not ended.
static CAPTURES: Mutex<Vec<Arc<Mutex<Capture>>>> = Mutex::new(Vec::new());

/// Number of the next one.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// How much of the work of each stream of a capture comes before a moment, by the stream's handle.
type Moment = BTreeMap<usize, u32>;

/// One capture: of the stream in which it began, and of those that joined it by events.
pub(crate) struct Capture {
    mode: c_uint,
    /// Who began it, and in which stream.
    thread: ThreadId,
    origin: usize,
    pub graph: Box<Graph>,
    /// Its number among all captures, as the driver gives it.
    pub number: u64,
    /// A call that may not come meanwhile came.
    pub is_invalid: bool,
    has_ended: bool,
    /// All work so far.
    all: Moment,
}

/// A stream's part in a capture.
#[derive(Clone)]
pub(crate) struct Part {
    pub capture: Arc<Mutex<Capture>>,
    /// What comes before the stream's next work.
    before: Moment,
    stream: usize,
}

impl Part {
    /// Begins a capture in `stream`.
    pub fn begin(stream: usize, mode: c_uint) -> Self {
        let capture = Arc::new(Mutex::new(Capture {
            mode,
            thread: std::thread::current().id(),
            origin: stream,
            graph: Box::default(),
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            is_invalid: false,
            has_ended: false,
            all: Moment::new(),
        }));
        lock(&CAPTURES).push(Arc::clone(&capture));
        Self {
            capture,
            before: Moment::new(),
            stream,
        }
    }

    /// The part of `stream`, which waits for `event`.
    pub fn join(stream: usize, event: &Self) -> Self {
        Self {
            stream,
            ..event.clone()
        }
    }

    pub fn has_ended(&self) -> bool {
        lock(&self.capture).has_ended
    }

    pub fn invalidate(&self) {
        lock(&self.capture).is_invalid = true;
    }

    /// Captures `work`.
    pub fn add(&mut self, work: crate::streams::Work) -> Status {
        let mut capture = lock(&self.capture);
        if capture.is_invalid {
            return CAPTURE_INVALIDATED;
        }
        capture.graph.work.push(work);
        let count = capture.all.entry(self.stream).or_default();
        *count += 1;
        self.before.insert(self.stream, *count);
        SUCCESS
    }

    /// The stream's next work comes after `event`, which a stream of the same capture has recorded.
    pub fn wait(&mut self, event: &Self) -> Status {
        if !Arc::ptr_eq(&self.capture, &event.capture) {
            self.invalidate();
            event.invalidate();
            return CAPTURE_MERGE;
        }
        for (stream, count) in &event.before {
            let mine = self.before.entry(*stream).or_default();
            *mine = (*mine).max(*count);
        }
        SUCCESS
    }

    /// The stream waits for an event that is not of the capture.
    pub fn refuse_event(&self) -> Status {
        self.invalidate();
        CAPTURE_ISOLATION
    }

    /// Ends the capture: its graph.
    pub fn end(&self) -> Result<Box<Graph>, Status> {
        let mut capture = lock(&self.capture);
        if capture.origin != self.stream {
            capture.is_invalid = true;
            return Err(CAPTURE_UNMATCHED);
        }
        if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
            return Err(CAPTURE_WRONG_THREAD);
        }
        capture.has_ended = true;
        let (is_invalid, is_joined) = (capture.is_invalid, capture.all == self.before);
        let graph = std::mem::take(&mut capture.graph);
        drop(capture);
        self.forget();
        match (is_invalid, is_joined) {
            (true, _) => Err(CAPTURE_INVALIDATED),
            (false, false) => Err(CAPTURE_UNJOINED),
            (false, true) => Ok(graph),
        }
    }

    /// The stream is destroyed.
    pub fn abandon(&self) {
        let mut capture = lock(&self.capture);
        match capture.origin == self.stream {
            true => capture.has_ended = true,
            false => capture.is_invalid = true,
        }
        let has_ended = capture.has_ended;
        drop(capture);
        if has_ended {
            self.forget();
        }
    }

    fn forget(&self) {
        lock(&CAPTURES).retain(|one| !Arc::ptr_eq(one, &self.capture));
    }
}

/// A call whose answer would depend on what is captured, or that may wait for it: of a stream or an event that takes part.
pub(crate) fn of_captured(part: &Part, status: Status) -> Status {
    part.invalidate();
    status
}

/// The answer to questions about an event that a capture has recorded.
pub(crate) fn of_event(part: &Part) -> Status {
    of_captured(part, CAPTURED_EVENT)
}

/// The answer to questions about a stream that is being captured.
pub(crate) fn of_stream(part: &Part) -> Status {
    of_captured(part, CAPTURE_UNSUPPORTED)
}

/// Ends the captures that `forbids` as invalid ones: the answer to the call, if there is one.
fn end_all(forbids: impl Fn(&Capture) -> bool) -> Option<Status> {
    let mut refused = None;
    for capture in &*lock(&CAPTURES) {
        let mut capture = lock(capture);
        if forbids(&capture) {
            capture.is_invalid = true;
            refused = Some(CAPTURE_UNSUPPORTED);
        }
    }
    refused
}

/// The answer to a call that the driver calls potentially unsafe, where a capture forbids it to this thread: one that
/// the thread itself has begun, or one in global mode of any thread. A thread in relaxed mode may make them all.
pub(crate) fn refused() -> Option<Status> {
    let (mode, thread) = (capture_mode(), std::thread::current().id());
    if mode == RELAXED {
        return None;
    }
    end_all(|capture| {
        let is_own = capture.thread == thread && capture.mode != RELAXED;
        is_own || mode == GLOBAL && capture.mode == GLOBAL
    })
}

/// The answer to a wait for all streams, where one of them is being captured: in any mode.
pub(crate) fn refused_to_all() -> Option<Status> {
    end_all(|_| true)
}
