//! Events of the library for the module `logging`. Threads that never attach to Python report them, so that they wait in
//! a queue for a thread of Python.

use crate::error::OrRaise;
use nvme_host::lock::lock;
use nvme_host::log::{LogLevel, set_log};
use pyo3::prelude::*;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Events that wait at most; later ones are lost.
const MOST_EVENTS: usize = 1024;

static EVENTS: Mutex<VecDeque<(u32, String)>> = Mutex::new(VecDeque::new());
static ADDED: Condvar = Condvar::new();

/// Queues the events of the library from `level` on, a level of `logging`; None queues none.
#[pyfunction]
pub fn queue_events(py: Python<'_>, level: Option<u32>) -> PyResult<()> {
    let level = level.map(|level| match level {
        0..=20 => LogLevel::Info,
        21..=30 => LogLevel::Warning,
        _ => LogLevel::Error,
    });
    py.detach(|| set_log(level.map(|level| (level, Box::new(add) as _))))
        .or_raise()
}

fn add(level: LogLevel, text: &str) {
    let level = match level {
        LogLevel::Info => 20,
        LogLevel::Warning => 30,
        LogLevel::Error => 40,
    };
    let mut events = lock(&EVENTS);
    if events.len() < MOST_EVENTS {
        events.push_back((level, text.to_owned()));
        ADDED.notify_one();
    }
}

/// Returns the next event, with its level of `logging`, or None if there is none for `timeout` seconds.
#[pyfunction]
pub fn next_event(py: Python<'_>, timeout: f64) -> Option<(u32, String)> {
    let timeout = Duration::try_from_secs_f64(timeout).unwrap_or_default();
    py.detach(|| {
        let events = lock(&EVENTS);
        let waited = ADDED.wait_timeout_while(events, timeout, |events| events.is_empty());
        let (mut events, _) = waited.unwrap_or_else(PoisonError::into_inner);
        events.pop_front()
    })
}
