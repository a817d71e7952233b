//! What admin commands and register writes work on.

use crate::config::settings::Config;
use crate::device::features::Features;
use alloc::vec::Vec;

/// A change of CSTS that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transition {
    Enable,
    Disable,
    Shutdown,
}

/// What admin commands and register writes work on, one at a time.
pub(crate) struct Control {
    pub features: Features,
    /// The values that features have after a reset.
    pub saved: Features,
    /// Command identifiers of the asynchronous event requests that wait.
    pub event_requests: Vec<u16>,
    /// Requests among them that were aborted and still have to be completed.
    pub aborted_events: Vec<u16>,
    /// Aborts fetched in the current batch.
    pub aborts: u16,
    /// Vectors of other queues that the current batch has posted to.
    pub posted: Vec<u16>,
    pub transition: Option<(u64, Transition)>,
}

impl Control {
    pub fn new(config: &Config) -> Self {
        let features = Features::new(config);
        Self {
            saved: features.clone(),
            features,
            event_requests: Vec::new(),
            aborted_events: Vec::new(),
            aborts: 0,
            posted: Vec::new(),
            transition: None,
        }
    }
}
