//! Serves one submission queue: takes its doorbells, fetches, executes, posts.
//!
//! A batch holds the queue's lock and that of its completion queue; no command takes another one
//! unless it fails or writes through the cache.

use crate::batch::Batch;
use crate::device::{Control, Device};
use crate::memory::{Dma, DmaFault};
use crate::nvm::Io;
use crate::queue::QueueStats;
use core::cmp::Reverse;
use core::sync::atomic::Ordering;
use nvme_core::spec::{Sqe, Status};

/// What serving a queue once did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Served {
    /// Commands fetched or completed.
    pub commands: u32,
    /// Completions posted to a queue with interrupts, and its vector.
    pub posted: u32,
    pub vector: u16,
}

impl Device {
    /// Whether `serve` would find something to do.
    #[inline]
    pub fn has_work(&self, qid: u16, now_ns: u64) -> bool {
        let slot = &self.slots[usize::from(qid)];
        self.doorbells.sq_tail(qid).load(Ordering::Relaxed) != slot.settled.load(Ordering::Relaxed)
            || slot.next_due_ns.load(Ordering::Relaxed) <= now_ns
            || (qid == 0 && self.attention.load(Ordering::Relaxed))
    }

    /// Serves `qid` once. The admin queue comes with the controller's state, an I/O queue without.
    pub fn serve<'g>(
        &'g self,
        qid: u16,
        dma: &Dma<'g>,
        now_ns: u64,
        control: Option<&mut Control>,
    ) -> Served {
        let slot = &self.slots[usize::from(qid)];
        let mut sq_held = slot.sq.lock();
        // Acquire: pairs with the driver's release before it rings: the entries are there.
        let tail = self.doorbells.sq_tail(qid).load(Ordering::Acquire);
        if !self.is_running() {
            return Served::default();
        }
        let Some(sq) = sq_held.as_mut() else {
            slot.settled.store(tail, Ordering::Relaxed);
            if let Some(observer) = &self.observer {
                observer.absent(qid, tail, dma);
            }
            self.bad_doorbell(qid, false);
            return Served::default();
        };
        if let Some(watch) = &sq.watch {
            watch.tail(tail, dma);
        }
        if !sq.take_tail(tail) {
            self.bad_doorbell(qid, true);
        }
        let mut cq_held = self.slots[usize::from(sq.cqid)].cq.lock();
        let Some(cq) = cq_held.as_mut() else {
            return Served::default();
        };
        // Acquire: pairs with the driver's release: it has read what it frees.
        let head = self.doorbells.cq_head(sq.cqid).load(Ordering::Acquire);
        if !cq.take_head(head) {
            self.bad_doorbell(sq.cqid, true);
        }
        cq.mend(dma);
        let first = cq.tail;
        let mut batch = Batch {
            device: self,
            qid,
            now_ns,
            sq_whole: sq.ring.whole(dma),
            cq_whole: cq.ring.whole(dma),
            staged: dma.staged_bytes().is_some(),
            io: Io {
                namespaces: &self.namespaces,
                dma,
                page: self.page(),
                max_bytes: self.max_bytes(),
                sgl: self.config.sgl,
                write_back: self.write_back.load(Ordering::Relaxed),
                bar: self.sanitize.bar(),
                erased: &self.sanitize.erased,
            },
            sq,
            cq,
            stats: QueueStats {
                batches: 1,
                ..QueueStats::default()
            },
            control,
        };
        let result = batch.run();
        let Batch { sq, cq, stats, .. } = batch;
        let waiting = sq.waiting() != 0;
        let stats = QueueStats {
            cq_full: u64::from(waiting && cq.space() == 0),
            ..stats
        };
        slot.stats.add(&stats);
        slot.settled
            .store(if waiting { u32::MAX } else { tail }, Ordering::Relaxed);
        let due = sq
            .pending
            .peek()
            .map_or(u64::MAX, |Reverse(first)| first.due_ns);
        let due = if cq.torn.is_some() { 0 } else { due };
        slot.next_due_ns.store(due, Ordering::Relaxed);
        let posted = cq.vector.map_or(0, |_| cq.ring.distance(first, cq.tail));
        let vector = cq.vector.unwrap_or(0);
        let commands = result.unwrap_or_else(|DmaFault(_)| {
            // Neither the entry nor a place to complain is within reach.
            self.fail();
            0
        });
        Served {
            commands,
            posted,
            vector,
        }
    }

    #[cold]
    pub(crate) fn refused(&self, qid: u16, sqe: &Sqe, status: Status) {
        self.logs.lock().failed(qid, sqe, status);
    }

    #[cold]
    pub(crate) fn bad_doorbell(&self, qid: u16, exists: bool) {
        self.logs.lock().bad_doorbell(qid, exists);
        self.attention.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
