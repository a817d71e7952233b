//! Events that stay masked because the log page that clears them could not be read: the page is asked for again.
//!
//! A controller reports no further event of a type until the log page of the last one was read. Without another attempt
//! after a reading that failed, a host would never hear again that a namespace was formatted.
//!
//! NVMe Base 2.0c, 5.2 (Asynchronous Event Request command).

use nvme_core::spec::Cid;
use nvme_core::spec::log_page::AsyncEvent;

/// Pause before each attempt.
const PAUSE_NS: u64 = 500_000_000;
/// Limit of the readings without an answer: each keeps a slot of the admin queue until a reset.
const MOST_LOST: usize = 4;

/// The masked events of a controller, one for each log page, and the readings that got no answer in time.
#[derive(Default)]
pub(super) struct MaskedEvents {
    /// The masked events, each with the time of the next attempt, once that is known.
    masked: Vec<(AsyncEvent, Option<u64>)>,
    lost: Vec<(Cid, AsyncEvent)>,
}

impl MaskedEvents {
    /// Adds an event whose log page was not read.
    pub fn add(&mut self, event: AsyncEvent) {
        self.remove(event);
        self.masked.push((event, None));
    }

    /// Removes the event of the same log page: the page was read.
    pub fn remove(&mut self, event: AsyncEvent) {
        self.masked
            .retain(|(one, _)| one.log_page() != event.log_page());
    }

    /// Adds an event whose log page did not come in time. Command `cid` may still read it.
    pub fn lose(&mut self, cid: Cid, event: AsyncEvent) {
        self.lost.push((cid, event));
        self.add(event);
    }

    /// Takes the event whose log page command `cid` has read after its time.
    pub fn take_lost(&mut self, cid: Cid) -> Option<AsyncEvent> {
        let at = self.lost.iter().position(|(one, _)| *one == cid)?;
        Some(self.lost.swap_remove(at).1)
    }

    /// Returns an event whose log page is to be asked for again now.
    pub fn due(&mut self, now_ns: u64) -> Option<AsyncEvent> {
        if self.lost.len() >= MOST_LOST {
            return None;
        }
        let mut due = None;
        for (event, at_ns) in &mut self.masked {
            let at_ns = at_ns.get_or_insert(now_ns.saturating_add(PAUSE_NS));
            if *at_ns <= now_ns {
                due = Some(*event);
            }
        }
        due
    }
}
