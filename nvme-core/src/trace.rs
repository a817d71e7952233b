//! Trace of a queue's events as typed binary records, in a ring that the caller provides; only the host makes
//! text of them.
//!
//! Invariant: one writer. A reader sees whole events: it checks the count before and after. Without the
//! `trace` feature [`EventTracer`] is empty and recording compiles to nothing.

use crate::spec::{Cid, Qid, Status};
use crate::sync::AtomicU64;
#[cfg(feature = "trace")]
use crate::sync::{Order, Scope, fence};
use core::fmt;

/// One event: two words. Kind 63:56, queue 47:32, CID 31:16, small argument 15:0; then an argument.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TraceEvent([u64; 2]);

const SUBMITTED: u8 = 1;
const COMPLETED: u8 = 2;
const EXPIRED: u8 = 3;
const RECLAIMED: u8 = 4;
const FAULT: u8 = 5;

impl TraceEvent {
    #[inline]
    const fn new(kind: u8, qid: Qid, cid: Cid, small: u16, argument: u64) -> Self {
        let head = (kind as u64) << 56 | (qid.0 as u64) << 32 | (cid.0 as u64) << 16 | small as u64;
        Self([head, argument])
    }

    /// Makes the event that a command was placed in the submission queue.
    #[inline]
    pub const fn submitted(qid: Qid, cid: Cid, opcode: u8, nsid: u32) -> Self {
        Self::new(SUBMITTED, qid, cid, opcode as u16, nsid as u64)
    }

    /// Makes the event that a completion was taken.
    #[inline]
    pub const fn completed(qid: Qid, cid: Cid, status: Status, sqhd: u16) -> Self {
        Self::new(COMPLETED, qid, cid, status.0, sqhd as u64)
    }

    /// Makes the event that a deadline passed.
    #[inline]
    pub const fn expired(qid: Qid, cid: Cid, now_ns: u64) -> Self {
        Self::new(EXPIRED, qid, cid, 0, now_ns)
    }

    /// Makes the event that a command was ended without its completion.
    #[inline]
    pub const fn reclaimed(qid: Qid, cid: Cid) -> Self {
        Self::new(RECLAIMED, qid, cid, 0, 0)
    }

    /// Makes the event that a completion was rejected; `upper` is its upper word.
    #[inline]
    pub const fn fault(qid: Qid, cid: Cid, upper: u64) -> Self {
        Self::new(FAULT, qid, cid, 0, upper)
    }

    /// Returns the queue of the event.
    pub const fn qid(self) -> Qid {
        Qid((self.0[0] >> 32) as u16)
    }

    /// Returns the command of the event.
    pub const fn cid(self) -> Cid {
        Cid((self.0[0] >> 16) as u16)
    }

    /// Decodes an event from its two words; any words are an event.
    pub const fn from_words(words: [u64; 2]) -> Self {
        Self(words)
    }

    /// Encodes the event as two words.
    pub const fn to_words(self) -> [u64; 2] {
        self.0
    }
}

impl fmt::Debug for TraceEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for TraceEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [head, argument] = self.0;
        let small = head as u16;
        write!(f, "queue {} command {} ", self.qid().0, self.cid())?;
        match (head >> 56) as u8 {
            SUBMITTED => write!(f, "submitted: opcode {small:#04x}, namespace {argument}"),
            COMPLETED => write!(f, "completed: {}, SQ head {argument}", Status(small)),
            EXPIRED => write!(f, "expired at {argument} ns"),
            RECLAIMED => f.write_str("reclaimed"),
            FAULT => write!(f, "fault: completion {argument:#018x}"),
            other => write!(f, "unknown event {other}: {small:#06x} {argument:#018x}"),
        }
    }
}

/// Events in memory: word 0 counts all events ever recorded, the others hold the newest.
///
/// The writer and its readers may be on different processors, for example a kernel and the host; the memory
/// has to be reachable by both.
#[derive(Clone, Copy, Debug)]
pub struct TraceRing<'a> {
    words: &'a [AtomicU64],
}

impl<'a> TraceRing<'a> {
    /// Makes a ring in `words`, zeroed by the caller: one word, then two per event.
    pub fn new(words: &'a [AtomicU64]) -> Self {
        Self { words }
    }

    /// Returns the number of events that the ring keeps.
    pub fn capacity(&self) -> u64 {
        self.words.len().saturating_sub(1) as u64 / 2
    }
}

#[cfg(feature = "trace")]
impl TraceRing<'_> {
    fn at(&self, number: u64) -> Option<&[AtomicU64]> {
        let index = 1 + 2 * number.checked_rem(self.capacity())? as usize;
        self.words.get(index..index + 2)
    }

    /// Adds an event, over the oldest one when the ring is full. One writer at a time.
    pub fn record(&self, event: TraceEvent) {
        let Some(count) = self.words.first() else {
            return;
        };
        let number = count.load(Order::Relaxed, Scope::Sys);
        let Some(cell) = self.at(number) else { return };
        // Release: pairs with the acquire of the count in `read`, so that the events before this one are
        // whole. The fence pairs with the one in `read`: a reader that sees any word of the new event also
        // sees a count that tells it that the old event is gone. Without the fence it could return half of
        // each.
        count.store(number + 1, Order::Release, Scope::Sys);
        fence(Order::Release, Scope::Sys);
        cell[0].store(event.0[0], Order::Relaxed, Scope::Sys);
        cell[1].store(event.0[1], Order::Relaxed, Scope::Sys);
    }

    /// Returns the number of events recorded since the ring was zeroed, overwritten ones included. The newest
    /// may still be incomplete while the writer runs.
    pub fn recorded(&self) -> u64 {
        self.words
            .first()
            .map_or(0, |count| count.load(Order::Acquire, Scope::Sys))
    }

    /// Reads event `number` (from 0); `None` when it was overwritten or never written. Exact once the writer
    /// has stopped; while it runs, the newest event may be incomplete.
    pub fn read(&self, number: u64) -> Option<TraceEvent> {
        let recorded = self.recorded();
        if number >= recorded || recorded - number > self.capacity() {
            return None;
        }
        let cell = self.at(number)?;
        let words = [
            cell[0].load(Order::Relaxed, Scope::Sys),
            cell[1].load(Order::Relaxed, Scope::Sys),
        ];
        // Acquire: pairs with the release fence in `record`. The count is read again after the words: if the
        // writer came round meanwhile, the event may be half old and half new, and is not returned.
        fence(Order::Acquire, Scope::Sys);
        (self.recorded() - number <= self.capacity()).then_some(TraceEvent(words))
    }
}

/// The destination of a queue's events: none by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct EventTracer<'a> {
    #[cfg(feature = "trace")]
    ring: Option<TraceRing<'a>>,
    #[cfg(not(feature = "trace"))]
    _none: core::marker::PhantomData<&'a ()>,
}

impl<'a> EventTracer<'a> {
    /// Makes a tracer that records into `ring`. Without the `trace` feature it still records nothing.
    pub fn into_ring(ring: TraceRing<'a>) -> Self {
        #[cfg(not(feature = "trace"))]
        let _ = ring;
        Self {
            #[cfg(feature = "trace")]
            ring: Some(ring),
            #[cfg(not(feature = "trace"))]
            _none: core::marker::PhantomData,
        }
    }

    /// Records `event`.
    #[inline]
    pub fn record(&self, event: TraceEvent) {
        #[cfg(feature = "trace")]
        if let Some(ring) = self.ring {
            ring.record(event);
        }
        #[cfg(not(feature = "trace"))]
        let _ = event;
    }
}

#[cfg(all(test, not(loom), feature = "trace"))]
mod tests {
    use super::*;

    #[test]
    fn the_newest_events_survive() {
        let words: [AtomicU64; 7] = Default::default();
        let ring = TraceRing::new(&words);
        assert_eq!((ring.capacity(), ring.read(0)), (3, None));
        for n in 0..5 {
            ring.record(TraceEvent::submitted(Qid(1), Cid(n), 2, 1));
        }
        assert_eq!(ring.recorded(), 5);
        assert_eq!(ring.read(1), None);
        for n in 2..5 {
            assert_eq!(
                ring.read(n),
                Some(TraceEvent::submitted(Qid(1), Cid(n as u16), 2, 1))
            );
        }
        assert_eq!(ring.read(5), None);
    }

    #[test]
    fn no_memory_records_nothing() {
        let ring = TraceRing::new(&[]);
        ring.record(TraceEvent::reclaimed(Qid(0), Cid(0)));
        assert_eq!((ring.recorded(), ring.read(0)), (0, None));
    }

    #[test]
    fn every_event_prints() {
        let texts = [
            TraceEvent::submitted(Qid(3), Cid(0x1002), 2, 1),
            TraceEvent::completed(Qid(3), Cid(0x1002), Status(0x80), 7),
            TraceEvent::expired(Qid(3), Cid(1), 99),
            TraceEvent::reclaimed(Qid(3), Cid(1)),
            TraceEvent::fault(Qid(3), Cid(1), 5),
            TraceEvent::from_words([u64::MAX, 0]),
        ]
        .map(|event| event.to_string());
        assert_eq!(
            texts[0],
            "queue 3 command 0x1002 submitted: opcode 0x02, namespace 1"
        );
        assert_eq!(texts[2], "queue 3 command 0x0001 expired at 99 ns");
        assert!(texts[5].contains("unknown event 255"));
    }
}
