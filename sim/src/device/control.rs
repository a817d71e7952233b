//! State that admin commands and register writes share, behind one lock: features, Asynchronous
//! Event Requests, and the change of CSTS in progress.

use crate::config::settings::Config;
use crate::device::features::FeatureValues;
use alloc::vec::Vec;

/// A change of CSTS in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StateTransition {
    Enable,
    Disable,
    Shutdown,
}

/// State that admin commands and register writes share; its lock admits one of them at a time.
pub(crate) struct AdminState {
    pub features: FeatureValues,
    /// Values that the features return to after a reset.
    pub saved: FeatureValues,
    /// Command identifiers of the outstanding Asynchronous Event Requests.
    pub event_requests: Vec<u16>,
    /// Identifiers of aborted requests whose completions have not been posted yet.
    pub aborted_events: Vec<u16>,
    /// Number of Abort commands fetched in the current batch.
    pub aborts: u16,
    /// Interrupt vectors of other queues that the current batch has posted to.
    pub posted: Vec<u16>,
    /// Time at which the transition in progress ends, and the transition.
    pub transition: Option<(u64, StateTransition)>,
}

impl AdminState {
    pub fn new(config: &Config) -> Self {
        let features = FeatureValues::new(config);
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
