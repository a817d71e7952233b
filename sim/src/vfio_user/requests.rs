//! Requests to the client: memory that came without a descriptor is read and written by messages.
//!
//! A thread of the controller sends and waits; the thread that receives hands it the reply. Since that
//! thread may itself be waiting for the controller (to unmap memory, to stop it), a wait is cut short
//! while it is busy: the access fails instead of waiting for ever.

use super::channel::{Channel, front};
use super::wire::{self, DmaAccess, Header, command};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::vec::Vec;
use zerocopy::IntoBytes;

/// How long a client may take over a request.
const REQUEST_TIME: Duration = Duration::from_secs(2);
/// How long the thread that receives may be busy before accesses fail for it.
const HURRIED_TIME: Duration = Duration::from_millis(50);
/// How often a waiter looks whether it is hurried.
const TICK: Duration = Duration::from_millis(10);

/// A reply, once it is there: its data, or that it failed.
type Reply = Option<Option<Vec<u8>>>;

#[derive(Default)]
struct Pending {
    replies: BTreeMap<u16, Reply>,
    next_id: u16,
}

/// The requests of one connection.
pub(crate) struct Requests {
    channel: Option<Arc<Channel>>,
    pending: Mutex<Pending>,
    arrived: Condvar,
    /// When the receiving thread became busy.
    hurried: Mutex<Option<Instant>>,
    closed: AtomicBool,
    /// Bytes of data that the client takes in one message.
    max_transfer: std::sync::atomic::AtomicUsize,
}

impl Requests {
    /// Requests over `channel`; without one, every request fails.
    pub fn new(channel: Option<Arc<Channel>>) -> Self {
        Self {
            closed: AtomicBool::new(channel.is_none()),
            channel,
            pending: Mutex::default(),
            arrived: Condvar::new(),
            hurried: Mutex::new(None),
            max_transfer: (wire::MAX_TRANSFER as usize).into(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the client has said to take.
    pub fn limit(&self, bytes: u64) {
        let bytes = bytes.clamp(1, wire::MAX_TRANSFER.into()) as usize;
        self.max_transfer.store(bytes, Ordering::Relaxed);
    }

    /// The receiving thread is busy with a command, or no longer.
    pub fn hurry(&self, yes: bool) {
        let mut hurried = self.hurried.lock().unwrap_or_else(PoisonError::into_inner);
        *hurried = yes.then(Instant::now);
    }

    /// Whether it is no use to wait, or to wait longer.
    fn is_over(&self, started: Instant) -> bool {
        let hurried = *self.hurried.lock().unwrap_or_else(PoisonError::into_inner);
        self.closed.load(Ordering::Relaxed)
            || started.elapsed() > REQUEST_TIME
            || hurried.is_some_and(|since| since.elapsed() > HURRIED_TIME)
    }

    /// The client is gone: every wait for it has failed.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        self.arrived.notify_all();
    }

    /// Takes a reply. One that is not waited for is dropped.
    pub fn reply(&self, header: &Header, body: Vec<u8>) {
        let mut pending = self.lock();
        if let Some(reply) = pending.replies.get_mut(&header.id) {
            *reply = Some((header.flags & wire::ERROR == 0).then_some(body));
            self.arrived.notify_all();
        }
    }

    /// DMA_READ of any length.
    pub fn read(&self, at: u64, into: &mut [u8]) -> bool {
        let most = self.max_transfer.load(Ordering::Relaxed);
        let mut parts = (at..).step_by(most).zip(into.chunks_mut(most));
        parts.all(|(address, part)| {
            let count = part.len() as u64;
            let access = DmaAccess { address, count };
            let body = self.request(command::DMA_READ, access, &[]);
            let data = body
                .as_deref()
                .and_then(|body| body.get(size_of::<DmaAccess>()..));
            let Some(data) = data.filter(|data| data.len() == part.len()) else {
                return false;
            };
            part.copy_from_slice(data);
            true
        })
    }

    /// DMA_WRITE of any length.
    pub fn write(&self, at: u64, from: &[u8]) -> bool {
        let most = self.max_transfer.load(Ordering::Relaxed);
        let mut parts = (at..).step_by(most).zip(from.chunks(most));
        parts.all(|(address, part)| {
            let count = part.len() as u64;
            let access = DmaAccess { address, count };
            self.request(command::DMA_WRITE, access, part).is_some()
        })
    }

    /// Sends a request and waits for its reply, which must be about the same bytes.
    fn request(&self, code: u16, access: DmaAccess, data: &[u8]) -> Option<Vec<u8>> {
        let channel = self.channel.as_ref()?;
        if self.is_over(Instant::now()) {
            return None;
        }
        let id = {
            let mut pending = self.lock();
            while pending.replies.contains_key(&pending.next_id) {
                pending.next_id = pending.next_id.wrapping_add(1);
            }
            let id = pending.next_id;
            pending.next_id = id.wrapping_add(1);
            pending.replies.insert(id, None);
            id
        };
        let body = [access.as_bytes(), data].concat();
        let header = Header {
            id,
            command: code,
            size: (size_of::<Header>() + body.len()) as u32,
            flags: wire::COMMAND,
            error: 0,
        };
        let sent = channel.send(header, &body, &[]);
        let reply = sent.ok().and_then(|()| self.wait(id));
        self.lock().replies.remove(&id);
        let reply = reply?;
        // Of a reply to a write, the count may be shorter than specified.
        let answered: u64 = front(&reply).ok()?;
        (answered == access.address).then_some(reply)
    }

    fn wait(&self, id: u16) -> Option<Vec<u8>> {
        let started = Instant::now();
        let mut pending = self.lock();
        loop {
            if let Some(reply) = pending.replies.get_mut(&id).and_then(Option::take) {
                return reply;
            }
            if self.is_over(started) {
                return None;
            }
            pending = self
                .arrived
                .wait_timeout(pending, TICK)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}
