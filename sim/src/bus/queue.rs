//! Submission and completion queues with the controller's positions in them, and their counters.
//!
//! Every index is checked against the queue's size before it is used, because the doorbells that
//! carry them are memory that a hostile driver writes at any time.

use crate::bus::ring::QueueRing;
use crate::config::fault::Fault;
use crate::memory::{Dma, DmaFault, MemorySpan, SpinLock};
use crate::observer::QueueWatch;
use alloc::boxed::Box;
use alloc::collections::BinaryHeap;
use core::cmp::Reverse;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use nvme_spec::{CQE_BYTES, Cqe, SQE_BYTES, Sqe};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, transmute};

/// A command that completes later, because of the latency profile or an injected fault.
#[derive(Clone, Debug)]
pub(crate) struct DelayedCommand {
    pub due_ns: u64,
    /// Order of fetching. It breaks ties between equal times, so that steps are deterministic.
    pub order: u64,
    pub sqe: Sqe,
    pub fault: Option<Fault>,
}

impl PartialEq for DelayedCommand {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for DelayedCommand {}

impl PartialOrd for DelayedCommand {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for DelayedCommand {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        (self.due_ns, self.order).cmp(&(other.due_ns, other.order))
    }
}

/// Bytes staged between memory and a store that cannot be copied to directly.
pub(crate) const SCRATCH_BYTES: usize = 128 << 10;

/// Limit of the delayed commands of one queue; the controller fetches no further ones until some
/// complete.
pub(crate) const MAX_PENDING: usize = 4096;

/// A submission queue.
pub(crate) struct SubmissionQueue {
    pub ring: QueueRing,
    pub cqid: u16,
    /// Index of the next entry to fetch.
    pub head: u32,
    /// Last valid value of the tail doorbell.
    pub tail: u32,
    /// Last invalid value of the tail doorbell, so that it is reported once and not in every step.
    pub bad_tail: Option<u32>,
    pub pending: BinaryHeap<Reverse<DelayedCommand>>,
    pub fetched: u64,
    /// Number of entries of `pending` whose command has completed already (a repeated completion or
    /// late data): they do not count against the limit.
    pub late_part: usize,
    pub scratch: Box<[u8]>,
    pub watch: Option<QueueWatch>,
}

impl SubmissionQueue {
    pub fn new(ring: QueueRing, cqid: u16, scratch_bytes: usize, delayed: bool) -> Self {
        let pending = if delayed {
            (ring.entries as usize).min(MAX_PENDING)
        } else {
            0
        };
        Self {
            ring,
            cqid,
            head: 0,
            tail: 0,
            bad_tail: None,
            pending: BinaryHeap::with_capacity(pending),
            fetched: 0,
            late_part: 0,
            scratch: alloc::vec![0; scratch_bytes].into_boxed_slice(),
            watch: None,
        }
    }

    /// Returns the number of entries that wait to be fetched.
    #[inline]
    pub fn waiting(&self) -> u32 {
        self.ring.distance(self.head, self.tail)
    }

    /// Takes a tail doorbell value. False for a value outside the ring that was not reported
    /// before.
    #[inline]
    pub fn take_tail(&mut self, value: u32) -> bool {
        if value < self.ring.entries {
            self.tail = value;
            self.bad_tail = None;
            return true;
        }
        self.bad_tail.replace(value) == Some(value)
    }

    /// Fetches the entry at the head. The caller has checked that one waits.
    #[inline]
    pub fn fetch(&mut self, whole: Option<MemorySpan<'_>>, dma: &Dma<'_>) -> Result<Sqe, DmaFault> {
        let words = match whole {
            Some(span) => span.words::<8>(self.head as usize * SQE_BYTES),
            None => None,
        };
        let words = match words {
            Some(words) => words,
            None => dma.words::<8>(self.ring.run(self.head, 1).0)?,
        };
        let sqe = Sqe::from_words(words);
        if let Some(watch) = &self.watch {
            watch.fetched(self.head, &sqe, dma);
        }
        self.head = self.ring.next(self.head);
        Ok(sqe)
    }
}

/// A completion queue.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    pub ring: QueueRing,
    /// Index of the next entry to write.
    pub tail: u32,
    /// Last valid value of the head doorbell: entries before it are free.
    pub head: u32,
    pub bad_head: Option<u32>,
    /// Phase tag of the current pass: 1 in the first.
    pub phase: bool,
    /// Number of submission queues that complete here.
    pub users: u32,
    /// The interrupt vector, unless the driver polls.
    pub vector: Option<u16>,
    /// Address and value of a torn entry's lower word that is not written yet.
    pub torn: Option<(u64, u64)>,
    pub watch: Option<QueueWatch>,
}

/// Faults in the publication of one entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PublishFaults {
    pub wrong_phase: bool,
    pub torn: bool,
}

impl CompletionQueue {
    pub fn new(ring: QueueRing) -> Self {
        Self {
            ring,
            tail: 0,
            head: 0,
            bad_head: None,
            phase: true,
            users: 0,
            vector: None,
            torn: None,
            watch: None,
        }
    }

    /// Returns the number of entries that can be posted now.
    #[inline]
    pub fn space(&self) -> u32 {
        self.ring.entries - 1 - self.ring.distance(self.head, self.tail)
    }

    /// Takes a head doorbell value. False for a new value outside the ring, or one that frees
    /// entries which were never posted.
    #[inline]
    pub fn take_head(&mut self, value: u32) -> bool {
        if let Some(watch) = &self.watch {
            watch.head(value);
        }
        if value < self.ring.entries
            && self.ring.distance(self.head, value) <= self.ring.distance(self.head, self.tail)
        {
            self.head = value;
            self.bad_head = None;
            return true;
        }
        self.bad_head.replace(value) == Some(value)
    }

    /// Posts an entry and fills in its phase tag. The caller has checked that there is space.
    #[inline]
    pub fn post(
        &mut self,
        whole: Option<MemorySpan<'_>>,
        dma: &Dma<'_>,
        mut cqe: Cqe,
        publish: PublishFaults,
    ) -> Result<(), DmaFault> {
        cqe.phase_status = cqe.phase_status & !1 | u16::from(self.phase != publish.wrong_phase);
        if let Some(watch) = &self.watch {
            watch.posted(self.tail, &cqe, !publish.torn, dma);
        }
        let [lower, upper] = cqe.to_words();
        let offset = self.tail as usize * CQE_BYTES;
        let words = whole.and_then(|span| Some((span.word(offset)?, span.word(offset + 8)?)));
        let (low, high) = match words {
            Some(words) => words,
            None => {
                let iova = self.ring.run(self.tail, 1).0;
                (dma.word(iova)?, dma.word(iova.wrapping_add(8))?)
            }
        };
        if publish.torn {
            self.torn = Some((self.ring.run(self.tail, 1).0, lower));
        } else {
            low.store(lower, Ordering::Relaxed);
        }
        // Release: pairs with the acquire fence that a driver issues after it has seen the phase
        // tag. Dwords 0 and 1 and the data of the command must be visible before the tag; with a
        // relaxed store the driver could accept the completion and read the buffer's old bytes.
        high.store(upper, Ordering::Release);
        self.tail = self.ring.next(self.tail);
        self.phase ^= self.tail == 0;
        Ok(())
    }

    /// Writes the lower word of a torn entry.
    pub fn complete_torn(&mut self, dma: &Dma<'_>) {
        if let Some((iova, lower)) = self.torn.take()
            && let Ok(word) = dma.word(iova)
        {
            word.store(lower, Ordering::Release); // Release: as the phase tag of an untorn entry.
        }
    }
}

/// Counters of one queue identifier since power on. Deleting the queue keeps them.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct QueueStats {
    /// Commands completed, with any status.
    pub commands: u64,
    /// Reads among the commands.
    pub reads: u64,
    /// Writes among the commands.
    pub writes: u64,
    /// Bytes read from the store by Read and Compare.
    pub read_bytes: u64,
    /// Bytes written by Write.
    pub written_bytes: u64,
    /// Commands that ended with an error.
    pub errors: u64,
    /// Batches: doorbell values that were taken.
    pub batches: u64,
    /// Number of batches that ended with a full completion queue while commands waited.
    pub cq_full: u64,
}

/// [`QueueStats`] as atomics: the holder of the queue's lock adds, and any thread reads.
#[derive(Debug, Default)]
pub(crate) struct SharedStats([AtomicU64; 8]);

impl SharedStats {
    pub fn add(&self, batch: &QueueStats) {
        let all: [u64; 8] = transmute!(*batch);
        for (sum, add) in self.0.iter().zip(all) {
            if add != 0 {
                // The queue's lock is held, so no other thread writes: a load and a store are
                // enough, and cheaper than a read-modify-write of each counter.
                sum.store(
                    sum.load(Ordering::Relaxed).wrapping_add(add),
                    Ordering::Relaxed,
                );
            }
        }
    }

    pub fn get(&self) -> QueueStats {
        let all: [u64; 8] = core::array::from_fn(|i| self.0[i].load(Ordering::Relaxed));
        transmute!(all)
    }
}

/// The queues of one queue identifier, with their counters. Locks are taken in the order submission
/// queue, then completion queue; the other order could deadlock with a thread that serves the
/// queue.
#[repr(align(128))]
pub(crate) struct QueueSlot {
    pub sq: SpinLock<Option<SubmissionQueue>>,
    pub cq: SpinLock<Option<CompletionQueue>>,
    /// Tail doorbell value up to which everything is done. A poll compares it with the doorbell and
    /// takes no lock, so an idle queue costs its thread one load of each word.
    pub served_tail: AtomicU32,
    /// Time at which the earliest delayed command is due; `u64::MAX` for none.
    pub next_due_ns: AtomicU64,
    pub stats: SharedStats,
}

impl QueueSlot {
    pub fn new() -> Self {
        Self {
            sq: SpinLock::new(None),
            cq: SpinLock::new(None),
            served_tail: AtomicU32::new(0),
            next_due_ns: AtomicU64::new(u64::MAX),
            stats: SharedStats::default(),
        }
    }
}

#[cfg(test)]
mod tests;
