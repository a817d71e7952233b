//! Asynchronous Event Requests of a session: keeps one at the controller, and reports the events that complete
//! them.
//!
//! A request has no deadline: it ends with an event, with a reset or with the shutdown, and it never causes a
//! time-out, an Abort or a reset. An event's log page is read once, which re-arms events of its type. That read
//! has a deadline, but no call waits for it: an event whose page does not arrive is reported without it, and its page
//! is asked for again, since events of its type stay masked until then.
//!
//! NVMe Base 2.0c, 5.2 (Asynchronous Event Request command), 5.27.1.8 (Asynchronous Event Configuration).

use crate::controller::facts::FactsAlarm;
use crate::controller::masked_events::MaskedEvents;
use crate::controller::notice::{ControllerNotice, DeviceEvent, NoticeListener, PageError};
use crate::device::Device;
use crate::dma::{DmaBuffer, HostPair, Lease};
use nvme_core::bringup::ControllerInfo;
use nvme_core::spec::admin;
use nvme_core::spec::feature::fid;
use nvme_core::spec::identify::oaes;
use nvme_core::spec::log_page::{AsyncEvent, event_type, lid};
use nvme_core::spec::{Cid, Nsid};
use nvme_core::{CommandCompletion, CommandData, CommandOutcome};
use std::collections::VecDeque;
use std::sync::Arc;

/// Limit of the Asynchronous Event Requests at the controller (its own limit is AERL). With several, events of
/// different types can be reported without waiting for the host to send the next request.
const MOST_REQUESTS: u32 = 4;
/// Limit of the events that wait for their log page, or for [`Controller::events`](crate::Controller::events):
/// a program that never asks for them must not fill its memory.
const MOST_EVENTS: usize = 64;
/// Events of SMART / health status: every critical warning of NVMe 1.0 and later.
const HEALTH: u32 = 0x1F;
/// Notices that are enabled if the controller has them.
const NOTICES: u32 = oaes::NAMESPACE_ATTRIBUTE | oaes::FIRMWARE_ACTIVATION | oaes::ANA_CHANGE;
/// Deadline of a request that never expires: an event may never occur.
const NO_DEADLINE: u64 = u64::MAX;
/// A log page that is being read.
struct LogReading {
    cid: Cid,
    event: AsyncEvent,
    deadline_ns: u64,
    /// The event was reported without its page.
    is_repeated: bool,
}

/// The requests of a session and their events.
#[derive(Default)]
pub(crate) struct EventRequests {
    /// Raised by events that report a possible change of facts.
    alarm: Arc<FactsAlarm>,
    most: usize,
    requests: Vec<Cid>,
    /// The command that chooses the events, until it has ended.
    configuration: Option<Cid>,
    reading: Option<LogReading>,
    /// Log pages to be read.
    unread: VecDeque<AsyncEvent>,
    masked: MaskedEvents,
    /// Events that are complete and not yet passed to the user.
    complete: VecDeque<DeviceEvent>,
    /// Events for [`Controller::events`](crate::Controller::events), the latest ones.
    pub kept: VecDeque<DeviceEvent>,
}

impl EventRequests {
    pub fn new(alarm: &Arc<FactsAlarm>) -> Self {
        Self {
            alarm: Arc::clone(alarm),
            ..Self::default()
        }
    }

    /// Requests events from a controller that has just come up. Waits for nothing: a controller that rejects
    /// the configuration reports the events that it chooses, which is logged.
    pub fn begin(&mut self, queue: &mut HostPair, info: &ControllerInfo) {
        self.most = info.event_limit.min(MOST_REQUESTS) as usize;
        self.requests.clear();
        // A reset ends the masks, and all commands.
        self.masked = MaskedEvents::default();
        let wanted = HEALTH | info.oaes & NOTICES;
        let configure = admin::set_features(fid::ASYNC_EVENT, Nsid::NONE, wanted);
        let sent = queue.submit(configure, CommandData::None, None, NO_DEADLINE);
        self.configuration = sent.ok();
        self.post(queue);
        queue.ring();
    }

    /// Posts requests up to the limit; returns true if there were any to post.
    fn post(&mut self, queue: &mut HostPair) -> bool {
        let before = self.requests.len();
        while self.requests.len() < self.most {
            let request = admin::async_event_request();
            match queue.submit(request, CommandData::None, None, NO_DEADLINE) {
                Ok(cid) => self.requests.push(cid),
                // The admin queue is full now: later.
                Err(_) => break,
            }
        }
        self.requests.len() > before
    }

    /// Takes the end of an admin command that no call waits for.
    pub fn take(&mut self, done: CommandCompletion<Lease>) {
        if self.configuration.take_if(|cid| *cid == done.cid).is_some() {
            if let CommandOutcome::Completed(status) = done.outcome
                && !status.is_success()
            {
                tracing::warn!(
                    target: "nvme_gpu",
                    "the controller refuses the configuration of its events ({status}): changes may be noticed late"
                );
            }
            return;
        }
        if let Some(at) = self.requests.iter().position(|cid| *cid == done.cid) {
            self.requests.swap_remove(at);
            match done.outcome {
                CommandOutcome::Completed(status) if status.is_success() => {
                    self.note(AsyncEvent(done.dw0));
                }
                // The controller takes fewer requests than it reported: a refused one is not posted again.
                CommandOutcome::Completed(_) => self.most = self.most.saturating_sub(1),
                CommandOutcome::Aborted(_) => {}
            }
            return;
        }
        let is_read = done.outcome.is_success();
        let Some(reading) = self.reading.take_if(|reading| reading.cid == done.cid) else {
            if let Some(event) = self.masked.take_lost(done.cid) {
                self.look_again(event, is_read);
            }
            return;
        };
        self.look_again(reading.event, is_read);
        if reading.is_repeated {
            return;
        }
        let page = match (done.outcome, done.buffer) {
            (outcome, Some(buffer)) if outcome.is_success() => Ok(buffer.as_slice().to_vec()),
            (CommandOutcome::Completed(status), _) if !status.is_success() => {
                Err(PageError::Failed(status))
            }
            _ => Err(PageError::NotRead),
        };
        self.end(reading.event, page);
    }

    /// Has the facts read again after an attempt to read the log page of `event`. Reading the page re-arms the event. A
    /// change between the last reading of the facts and the reading of the page is announced by nothing else, and no
    /// event arrives while the page cannot be read.
    fn look_again(&mut self, event: AsyncEvent, is_read: bool) {
        match is_read {
            true => self.masked.remove(event),
            false => self.masked.add(event),
        }
        if event.event_type() == event_type::NOTICE {
            self.alarm.raise();
        }
    }

    fn note(&mut self, event: AsyncEvent) {
        self.alarm.hear(event);
        if self.unread.contains(&event) {
            return;
        }
        match self.unread.len() < MOST_EVENTS {
            true => self.unread.push_back(event),
            false => self.masked.add(event),
        }
    }

    fn end(&mut self, event: AsyncEvent, page: std::result::Result<Vec<u8>, PageError>) {
        self.complete.push_back(DeviceEvent { event, page });
    }

    /// Posts requests again, reads log pages and passes on the events that are complete. Waits for nothing.
    pub fn work(
        &mut self,
        queue: &mut HostPair,
        device: &Arc<dyn Device>,
        (now_ns, timeout_ns): (u64, u64),
        notify: &NoticeListener,
    ) {
        let mut is_new = self.post(queue);
        if let Some(late) = self.reading.take_if(|one| now_ns >= one.deadline_ns) {
            // The command keeps its buffer until it ends.
            self.masked.lose(late.cid, late.event);
            if !late.is_repeated {
                self.end(late.event, Err(PageError::NotRead));
            }
        }
        let deadline_ns = now_ns.saturating_add(timeout_ns);
        while self.reading.is_none()
            && let Some((event, is_repeated)) = self.next_page(now_ns)
        {
            if event.log_page() == 0 {
                self.end(event, Err(PageError::None));
                continue;
            }
            if let Some(cid) = read_page(queue, device, event.log_page()) {
                self.reading = Some(LogReading {
                    cid,
                    event,
                    deadline_ns,
                    is_repeated,
                });
                is_new = true;
                continue;
            }
            self.masked.add(event);
            if !is_repeated {
                self.end(event, Err(PageError::NotRead));
            }
        }
        if is_new {
            queue.ring();
        }
        while let Some(event) = self.complete.pop_front() {
            let notice = ControllerNotice::Event(event);
            notify.tell(&notice);
            if let ControllerNotice::Event(event) = notice {
                if self.kept.len() == MOST_EVENTS {
                    self.kept.pop_front();
                }
                self.kept.push_back(event);
            }
        }
    }

    /// Returns the event whose log page is read next, and true if it was reported already.
    fn next_page(&mut self, now_ns: u64) -> Option<(AsyncEvent, bool)> {
        let unread = self.unread.pop_front().map(|event| (event, false));
        unread.or_else(|| Some((self.masked.due(now_ns)?, true)))
    }

    /// True if no event is on its way from the controller to the user.
    pub fn is_quiet(&self) -> bool {
        let is_reading = self.reading.as_ref().is_some_and(|one| !one.is_repeated);
        !is_reading && self.unread.is_empty() && self.complete.is_empty()
    }
}

/// Sends Get Log Page for the start of `page`, which clears the event.
fn read_page(queue: &mut HostPair, device: &Arc<dyn Device>, page: u8) -> Option<Cid> {
    let bytes = match page {
        lid::ERROR => 64,
        lid::CHANGED_NAMESPACES => 4096,
        _ => 512,
    };
    let buffer = DmaBuffer::new(device, bytes).ok()?;
    let sqe = admin::get_log_page(page, Nsid::ALL, bytes as u32, 0);
    let data = CommandData::Contiguous {
        iova: buffer.iova(),
        len: bytes as u64,
    };
    queue.submit(sqe, data, Some(buffer), NO_DEADLINE).ok()
}
