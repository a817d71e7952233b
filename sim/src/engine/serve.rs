//! Serves one submission queue: reads its doorbells, fetches, executes, and posts completions.
//!
//! A batch holds the lock of the queue and that of its completion queue. No command takes a further
//! lock, unless it fails (the error log) or writes through the cache, so queues do not wait for
//! each other.

use crate::bus::queue::{CompletionQueue, QueueStats, SubmissionQueue};
use crate::command::nvm::IoContext;
use crate::device::ControllerState;
use crate::device::control::AdminState;
use crate::engine::batch::CommandBatch;
use crate::memory::{Dma, DmaFault};
use core::cmp::Reverse;
use core::sync::atomic::Ordering;

/// Outcome of serving a queue once.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ServeOutcome {
    /// Commands fetched or completed.
    pub commands: u32,
    /// Number of completions posted to a queue with interrupts, and its vector.
    pub posted: u32,
    pub vector: u16,
}

/// True if [`serve`] would find work. Takes no lock, so that idle queues cost two loads.
#[inline]
pub(crate) fn has_work(device: &ControllerState, qid: u16, now_ns: u64) -> bool {
    let slot = &device.slots[usize::from(qid)];
    device.doorbells.sq_tail(qid).load(Ordering::Relaxed)
        != slot.served_tail.load(Ordering::Relaxed)
        || slot.next_due_ns.load(Ordering::Relaxed) <= now_ns
        || (qid == 0 && device.attention.load(Ordering::Relaxed))
}

/// Serves `qid` once. `control` is the controller's state for the admin queue, and `None` for an
/// I/O queue. Unless `waits`, a queue that another thread serves is left to it.
pub(crate) fn serve<'g>(
    device: &'g ControllerState,
    qid: u16,
    dma: &Dma<'g>,
    now_ns: u64,
    control: Option<&mut AdminState>,
    waits: bool,
) -> ServeOutcome {
    let slot = &device.slots[usize::from(qid)];
    let held = match waits {
        true => Some(slot.sq.lock()),
        false => slot.sq.try_lock(),
    };
    let Some(mut sq_held) = held else {
        return ServeOutcome::default();
    };
    // Acquire: pairs with the driver's release when it rings. The entries up to this tail are
    // complete in memory; a relaxed load could let the fetch below read an entry from before it was
    // written.
    let tail = device.doorbells.sq_tail(qid).load(Ordering::Acquire);
    if !device.is_running() {
        return ServeOutcome::default();
    }
    let Some(sq) = sq_held.as_mut() else {
        absent(device, qid, tail, dma);
        return ServeOutcome::default();
    };
    if let Some(watch) = &sq.watch {
        watch.tail(tail, dma);
    }
    if !sq.take_tail(tail) {
        device.bad_doorbell(true);
    }
    let mut cq_held = device.slots[usize::from(sq.cqid)].cq.lock();
    let Some(cq) = cq_held.as_mut() else {
        return ServeOutcome::default();
    };
    // Acquire: pairs with the driver's release when it frees entries. The driver has read them
    // before; a relaxed load could let a new completion overwrite one that it still reads.
    let head = device.doorbells.cq_head(sq.cqid).load(Ordering::Acquire);
    if !cq.take_head(head) {
        device.bad_doorbell(true);
    }
    cq.complete_torn(dma);
    let first = cq.tail;
    let mut batch = CommandBatch {
        device,
        qid,
        now_ns,
        sq_whole: sq.ring.whole(dma),
        cq_whole: cq.ring.whole(dma),
        staged: dma.staged_bytes().is_some(),
        io: io(device, dma),
        sq,
        cq,
        stats: QueueStats {
            batches: 1,
            ..QueueStats::default()
        },
        control,
    };
    let result = batch.run();
    let CommandBatch { sq, cq, stats, .. } = batch;
    let waiting = sq.waiting() != 0;
    slot.stats.add(&QueueStats {
        cq_full: u64::from(waiting && cq.space() == 0),
        ..stats
    });
    let served_tail = if waiting { u32::MAX } else { tail };
    slot.served_tail.store(served_tail, Ordering::Relaxed);
    slot.next_due_ns.store(next_due(sq, cq), Ordering::Relaxed);
    let posted = cq.vector.map_or(0, |_| cq.ring.distance(first, cq.tail));
    let vector = cq.vector.unwrap_or(0);
    let commands = result.unwrap_or_else(|DmaFault(_)| {
        // The ring itself is unreachable, so neither an entry nor an error completion can be
        // transferred.
        device.fail();
        0
    });
    ServeOutcome {
        commands,
        posted,
        vector,
    }
}

/// Collects the state of the controller that the commands of one batch work on.
fn io<'a, 'g>(device: &'g ControllerState, dma: &'a Dma<'g>) -> IoContext<'a, 'g> {
    IoContext {
        namespaces: &device.namespaces,
        dma,
        page: device.page(),
        max_bytes: device.max_bytes(),
        sgl: device.config.sgl,
        write_back: device.write_back.load(Ordering::Relaxed),
        restriction: device.sanitize.restriction(),
        erased: &device.sanitize.erased,
    }
}

/// Handles a doorbell of a queue that was deleted since this thread saw work in it.
fn absent(device: &ControllerState, qid: u16, tail: u32, dma: &Dma<'_>) {
    let served_tail = &device.slots[usize::from(qid)].served_tail;
    if tail == served_tail.load(Ordering::Relaxed) {
        return;
    }
    served_tail.store(tail, Ordering::Relaxed);
    if let Some(observer) = &device.observer {
        observer.absent(qid, tail, dma);
    }
    device.bad_doorbell(false);
}

/// Returns the time at which the queue has work that no doorbell announces.
fn next_due(sq: &SubmissionQueue, cq: &CompletionQueue) -> u64 {
    if cq.torn.is_some() {
        return 0;
    }
    let first = sq.pending.peek();
    first.map_or(u64::MAX, |Reverse(first)| first.due_ns)
}

#[cfg(test)]
mod tests;
