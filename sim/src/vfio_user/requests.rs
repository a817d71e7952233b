//! Requests to the client: memory without a descriptor is read and written by messages.
//!
//! A thread of the controller sends a request and waits; the thread that receives messages passes
//! it the reply. The receiving thread may itself wait for the controller (to unmap memory, or to
//! stop it). A wait is therefore cut short while the receiving thread is busy: the access fails,
//! because waiting could last for ever.

use super::channel::{MessageChannel, parse_front};
use super::wire::{self, DmaAccess, MessageHeader, command};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::vec::Vec;
use zerocopy::IntoBytes;

/// Limit of the time for a client's reply.
const REQUEST_TIME: Duration = Duration::from_secs(2);
/// Time for which the receiving thread may be busy before waiting accesses fail.
const BUSY_TIME: Duration = Duration::from_millis(50);
/// Interval at which a waiting thread checks both limits.
const TICK: Duration = Duration::from_millis(10);

/// A reply once it has arrived: its data, or `None` if the request failed.
type Reply = Option<Option<Vec<u8>>>;

#[derive(Default)]
struct PendingReplies {
    replies: BTreeMap<u16, Reply>,
    next_id: u16,
}

/// Requests of one connection.
pub(crate) struct ClientRequests {
    channel: Option<Arc<MessageChannel>>,
    pending: Mutex<PendingReplies>,
    arrived: Condvar,
    /// Time at which the receiving thread became busy.
    busy_since: Mutex<Option<Instant>>,
    closed: AtomicBool,
    /// Bytes of data that the client accepts in one message.
    max_transfer: std::sync::atomic::AtomicUsize,
}

/// Returns the address of part `index` of memory that begins at `at`, in parts of `most` bytes; `None` past 2^64.
fn address_of(at: u64, index: usize, most: usize) -> Option<u64> {
    at.checked_add((index as u64).checked_mul(most as u64)?)
}

impl ClientRequests {
    /// Makes requests over `channel`. Without a channel, every request fails.
    pub fn new(channel: Option<Arc<MessageChannel>>) -> Self {
        Self {
            closed: AtomicBool::new(channel.is_none()),
            channel,
            pending: Mutex::default(),
            arrived: Condvar::new(),
            busy_since: Mutex::new(None),
            max_transfer: (wire::MAX_TRANSFER as usize).into(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, PendingReplies> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the bytes of data that the client accepts in one message.
    pub fn limit(&self, bytes: u64) {
        let bytes = bytes.clamp(1, wire::MAX_TRANSFER.into()) as usize;
        self.max_transfer.store(bytes, Ordering::Relaxed);
    }

    /// Marks the receiving thread as busy with a command, or as free.
    pub fn set_busy(&self, yes: bool) {
        let mut busy_since = self
            .busy_since
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *busy_since = yes.then(Instant::now);
    }

    /// True if waiting for a reply is useless, or has lasted too long.
    fn is_over(&self, started: Instant) -> bool {
        let busy_since = *self
            .busy_since
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.closed.load(Ordering::Relaxed)
            || started.elapsed() > REQUEST_TIME
            || busy_since.is_some_and(|since| since.elapsed() > BUSY_TIME)
    }

    /// Fails all present and later waits, because the client has left.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        self.arrived.notify_all();
    }

    /// Takes a reply. One that no thread waits for is discarded.
    pub fn reply(&self, header: &MessageHeader, body: Vec<u8>) {
        let mut pending = self.lock();
        if let Some(reply) = pending.replies.get_mut(&header.id) {
            *reply = Some((header.flags & wire::ERROR == 0).then_some(body));
            self.arrived.notify_all();
        }
    }

    /// Reads memory of any length by DMA_READ.
    pub fn read(&self, at: u64, into: &mut [u8]) -> bool {
        let most = self.max_transfer.load(Ordering::Relaxed);
        let mut parts = into.chunks_mut(most).enumerate();
        parts.all(|(index, part)| {
            let Some(address) = address_of(at, index, most) else {
                return false;
            };
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

    /// Writes memory of any length by DMA_WRITE.
    pub fn write(&self, at: u64, from: &[u8]) -> bool {
        let most = self.max_transfer.load(Ordering::Relaxed);
        let mut parts = from.chunks(most).enumerate();
        parts.all(|(index, part)| {
            let Some(address) = address_of(at, index, most) else {
                return false;
            };
            let count = part.len() as u64;
            let access = DmaAccess { address, count };
            self.request(command::DMA_WRITE, access, part).is_some()
        })
    }

    /// Sends a request and waits for its reply, which must name the same address.
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
        let header = MessageHeader {
            id,
            command: code,
            size: (size_of::<MessageHeader>() + body.len()) as u32,
            flags: wire::COMMAND,
            error: 0,
        };
        let sent = channel.send(header, &body, &[]);
        let reply = sent.ok().and_then(|()| self.wait(id));
        self.lock().replies.remove(&id);
        let reply = reply?;
        // Some clients answer a write with a shorter count field than specified: only the address
        // is compared.
        let answered: u64 = parse_front(&reply).ok()?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_at_the_end_of_the_address_space_have_addresses() {
        let last = u64::MAX - 0x1FFF;
        assert_eq!(address_of(last, 0, 0x1000), Some(last));
        assert_eq!(address_of(last, 1, 0x1000), Some(last + 0x1000));
        assert_eq!(address_of(last, 2, 0x1000), None);
        assert_eq!(address_of(1, usize::MAX, usize::MAX), None);
        let requests = ClientRequests::new(None);
        assert!(!requests.read(u64::MAX, &mut [0]));
        assert!(!requests.write(u64::MAX, &[0]));
    }
}
