//! Creates and deletes I/O queues, with every check that the specification gives a status for. The
//! entries of a new queue are not accessed here: the first fetch or completion is the first access.

use crate::bus::queue::{CompletionQueue, PublishFaults, QueueSlot, SubmissionQueue};
use crate::bus::ring::{QueueRing, RingBase};
use crate::command::reply::CommandError;
use crate::config::fault::Fault;
use crate::device::ControllerState;
use crate::device::control::AdminState;
use crate::memory::Dma;
use alloc::vec::Vec;
use core::cmp::Reverse;
use core::sync::atomic::Ordering;
use nvme_spec::admin::{CQ_INTERRUPTS, QUEUE_CONTIGUOUS};
use nvme_spec::{CQE_BYTES, Cqe, SQE_BYTES, Sqe, Status};

/// Returns the slot of an I/O queue identifier from 1 to `granted`.
fn slot(device: &ControllerState, qid: u16, granted: u32) -> Result<&QueueSlot, CommandError> {
    if qid == 0 || u32::from(qid) > granted {
        return Err(Status::INVALID_QID.into());
    }
    device
        .slots
        .get(usize::from(qid))
        .ok_or(Status::INVALID_QID.into())
}

/// Reads the ring that a Create command describes.
fn ring(
    device: &ControllerState,
    dma: &Dma<'_>,
    sqe: &Sqe,
    entry_bytes: usize,
) -> Result<QueueRing, CommandError> {
    let entries = (sqe.cdw10 >> 16) + 1;
    if entries < 2 || entries > device.registers.cap.mqes() {
        return Err(Status::INVALID_QUEUE_SIZE.into());
    }
    let page = device.page();
    let prp1 = sqe.dptr[0];
    if sqe.cdw11 & QUEUE_CONTIGUOUS != 0 {
        if !prp1.is_multiple_of(page.bytes()) {
            return Err(Status::INVALID_PRP_OFFSET.into());
        }
        return Ok(QueueRing {
            base: RingBase::Contiguous(prp1),
            entries,
            entry_bytes,
        });
    }
    if device.config.cqr {
        return Err(Status::INVALID_FIELD.into());
    }
    // Without PC, PRP1 points at a list of the ring's pages, which may chain like any PRP list. It
    // is read once here, so that a driver that changes it later does not move the ring.
    if !prp1.is_multiple_of(8) {
        return Err(Status::INVALID_PRP_OFFSET.into());
    }
    let count = (u64::from(entries) * entry_bytes as u64).div_ceil(page.bytes());
    let mut pages = Vec::new();
    let mut at = prp1;
    while (pages.len() as u64) < count {
        let [entry] = dma.words(at).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
        if !entry.is_multiple_of(page.bytes()) {
            return Err(Status::INVALID_PRP_OFFSET.into());
        }
        let last = (at + 8).is_multiple_of(page.bytes());
        if last && count - pages.len() as u64 > 1 {
            at = entry;
            continue;
        }
        pages.push(entry);
        at += 8;
    }
    let base = RingBase::Pages {
        shift: page.shift(),
        pages,
    };
    Ok(QueueRing {
        base,
        entries,
        entry_bytes,
    })
}

/// Creates a completion queue. NVMe Base 2.0c, 5.4 (Create I/O Completion Queue command).
pub(crate) fn create_cq(
    device: &ControllerState,
    control: &mut AdminState,
    dma: &Dma<'_>,
    sqe: &Sqe,
) -> Result<(), CommandError> {
    let (granted_sqs, granted) = control.features.granted();
    let qid = sqe.cdw10 as u16;
    let slot = slot(device, qid, granted)?;
    if slot.cq.lock().is_some() {
        return Err(Status::INVALID_QID.into());
    }
    if device.registers.cc().iocqes() != 4 {
        return Err(Status::INVALID_QUEUE_SIZE.into());
    }
    let ring = ring(device, dma, sqe, CQE_BYTES)?;
    let vector = sqe.cdw11 >> 16;
    if sqe.cdw11 & CQ_INTERRUPTS != 0 && vector >= u32::from(device.config.vectors) {
        return Err(Status::INVALID_INTERRUPT_VECTOR.into());
    }
    device.doorbells.cq_head(qid).store(0, Ordering::Relaxed);
    let mut cq = CompletionQueue::new(ring);
    cq.vector = (sqe.cdw11 & CQ_INTERRUPTS != 0).then_some(vector as u16);
    cq.watch = device.observer.as_ref().map(|one| one.watch(qid));
    *slot.cq.lock() = Some(cq);
    control.features.freeze_queues(granted_sqs, granted);
    Ok(())
}

/// Creates a submission queue. NVMe Base 2.0c, 5.5 (Create I/O Submission Queue command).
pub(crate) fn create_sq(
    device: &ControllerState,
    control: &mut AdminState,
    dma: &Dma<'_>,
    sqe: &Sqe,
) -> Result<(), CommandError> {
    let (granted, granted_cqs) = control.features.granted();
    let qid = sqe.cdw10 as u16;
    let own = slot(device, qid, granted)?;
    if own.sq.lock().is_some() {
        return Err(Status::INVALID_QID.into());
    }
    let cqid = (sqe.cdw11 >> 16) as u16;
    // Two different statuses: 0 and an identifier above the granted number are invalid queue
    // identifiers, while a valid identifier whose completion queue does not exist is an invalid
    // completion queue.
    let target = slot(device, cqid, granted_cqs)?;
    if device.registers.cc().iosqes() != 6 {
        return Err(Status::INVALID_QUEUE_SIZE.into());
    }
    let ring = ring(device, dma, sqe, SQE_BYTES)?;
    // Locks are taken in the order submission queue, then completion queue, as everywhere; the
    // other order could deadlock with a thread that serves the queue.
    let mut sq = own.sq.lock();
    let mut cq = target.cq.lock();
    let Some(cq) = cq.as_mut() else {
        return Err(Status::INVALID_CQ.into());
    };
    device.doorbells.sq_tail(qid).store(0, Ordering::Relaxed);
    own.served_tail.store(0, Ordering::Relaxed);
    device.highest.fetch_max(qid, Ordering::Relaxed);
    cq.users += 1;
    let mut queue = SubmissionQueue::new(ring, cqid, device.scratch_bytes(), device.delays());
    queue.watch = device.observer.as_ref().map(|one| one.watch(qid));
    *sq = Some(queue);
    control.features.freeze_queues(granted, granted_cqs);
    Ok(())
}

/// Deletes a completion queue. NVMe Base 2.0c, 5.6 (Delete I/O Completion Queue command).
pub(crate) fn delete_cq(device: &ControllerState, sqe: &Sqe) -> Result<(), CommandError> {
    let qid = sqe.cdw10 as u16;
    let slot = slot(device, qid, u32::MAX)?;
    let mut cq = slot.cq.lock();
    match cq.as_ref() {
        None => Err(Status::INVALID_QID.into()),
        Some(cq) if cq.users != 0 => Err(Status::INVALID_QUEUE_DELETION.into()),
        Some(_) => {
            *cq = None;
            device.doorbells.cq_head(qid).store(0, Ordering::Relaxed);
            Ok(())
        }
    }
}

/// Deletes a submission queue. Its delayed commands complete as aborted, as far as the completion
/// queue has room for them.
///
/// NVMe Base 2.0c, 5.7 (Delete I/O Submission Queue command).
pub(crate) fn delete_sq(
    device: &ControllerState,
    control: &mut AdminState,
    dma: &Dma<'_>,
    sqe: &Sqe,
) -> Result<(), CommandError> {
    let qid = sqe.cdw10 as u16;
    let slot = slot(device, qid, u32::MAX)?;
    let mut slot_sq = slot.sq.lock();
    let Some(mut sq) = slot_sq.take() else {
        return Err(Status::INVALID_QID.into());
    };
    if let Some(target) = device.slots.get(usize::from(sq.cqid))
        && let Some(cq) = target.cq.lock().as_mut()
    {
        cq.take_head(device.doorbells.cq_head(sq.cqid).load(Ordering::Acquire));
        while let Some(Reverse(pending)) = sq.pending.pop() {
            if pending.fault.is_some_and(Fault::is_late_part) {
                continue;
            }
            let aborted = Cqe {
                dw0: 0,
                dw1: 0,
                sqhd: sq.head as u16,
                sqid: qid,
                cid: pending.sqe.cid().0,
                phase_status: status_of(pending.fault).0 << 1,
            };
            if cq.space() == 0
                || cq
                    .post(None, dma, aborted, PublishFaults::default())
                    .is_err()
            {
                break;
            }
            control.posted.extend(cq.vector);
        }
        cq.users = cq.users.saturating_sub(1);
    }
    device.doorbells.sq_tail(qid).store(0, Ordering::Relaxed);
    slot.served_tail.store(0, Ordering::Relaxed);
    slot.next_due_ns.store(u64::MAX, Ordering::Relaxed);
    Ok(())
}

/// Returns the status of a command whose queue is deleted; one that an Abort has ended before keeps
/// that status.
fn status_of(fault: Option<Fault>) -> Status {
    match fault {
        Some(Fault::Status(status)) if !status.is_success() => status,
        _ => Status::ABORTED_SQ_DELETION,
    }
}

#[cfg(test)]
mod tests;
