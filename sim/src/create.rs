//! Creates and deletes I/O queues, with every check that the specification gives a status for.

use crate::admin::Refusal;
use crate::device::{Control, Device};
use crate::fault::Fault;
use crate::memory::Dma;
use crate::queue::{Base, CompletionQueue, Publish, Ring, Slot, SubmissionQueue};
use alloc::vec::Vec;
use core::cmp::Reverse;
use core::sync::atomic::Ordering;
use nvme_core::spec::admin::{CQ_INTERRUPTS, QUEUE_CONTIGUOUS};
use nvme_core::spec::{CQE_BYTES, Cqe, SQE_BYTES, Sqe, Status};

/// The slot of an I/O queue identifier up to `granted`.
fn slot(device: &Device, qid: u16, granted: u32) -> Result<&Slot, Refusal> {
    if qid == 0 || u32::from(qid) > granted {
        return Err(Status::INVALID_QID.into());
    }
    device
        .slots
        .get(usize::from(qid))
        .ok_or(Status::INVALID_QID.into())
}

/// The ring that a Create command describes.
fn ring(device: &Device, dma: &Dma<'_>, sqe: &Sqe, entry_bytes: usize) -> Result<Ring, Refusal> {
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
        return Ok(Ring {
            base: Base::Contiguous(prp1),
            entries,
            entry_bytes,
        });
    }
    if device.config.cqr {
        return Err(Status::INVALID_FIELD.into());
    }
    // PRP1 points at a list of the ring's pages.
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
    let base = Base::Pages {
        shift: page.shift(),
        pages,
    };
    Ok(Ring {
        base,
        entries,
        entry_bytes,
    })
}

/// NVMe Base 2.0c, 5.4 (Create I/O Completion Queue command).
pub(crate) fn create_cq(
    device: &Device,
    control: &mut Control,
    dma: &Dma<'_>,
    sqe: &Sqe,
) -> Result<(), Refusal> {
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

/// NVMe Base 2.0c, 5.5 (Create I/O Submission Queue command).
pub(crate) fn create_sq(
    device: &Device,
    control: &mut Control,
    dma: &Dma<'_>,
    sqe: &Sqe,
) -> Result<(), Refusal> {
    let (granted, granted_cqs) = control.features.granted();
    let qid = sqe.cdw10 as u16;
    let own = slot(device, qid, granted)?;
    if own.sq.lock().is_some() {
        return Err(Status::INVALID_QID.into());
    }
    let cqid = (sqe.cdw11 >> 16) as u16;
    let target = slot(device, cqid, granted_cqs).map_err(|_| Status::INVALID_CQ)?;
    if device.registers.cc().iosqes() != 6 {
        return Err(Status::INVALID_QUEUE_SIZE.into());
    }
    let ring = ring(device, dma, sqe, SQE_BYTES)?;
    // Locks are taken submission queue first, here as everywhere.
    let mut sq = own.sq.lock();
    let mut cq = target.cq.lock();
    let Some(cq) = cq.as_mut() else {
        return Err(Status::INVALID_CQ.into());
    };
    device.doorbells.sq_tail(qid).store(0, Ordering::Relaxed);
    own.settled.store(0, Ordering::Relaxed);
    device.highest.fetch_max(qid, Ordering::Relaxed);
    cq.users += 1;
    let mut queue = SubmissionQueue::new(ring, cqid, device.delays());
    queue.watch = device.observer.as_ref().map(|one| one.watch(qid));
    *sq = Some(queue);
    control.features.freeze_queues(granted, granted_cqs);
    Ok(())
}

/// NVMe Base 2.0c, 5.6 (Delete I/O Completion Queue command).
pub(crate) fn delete_cq(device: &Device, sqe: &Sqe) -> Result<(), Refusal> {
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

/// Commands that were fetched and wait for their time are completed as aborted, as far as the
/// completion queue has room.
///
/// NVMe Base 2.0c, 5.7 (Delete I/O Submission Queue command).
pub(crate) fn delete_sq(
    device: &Device,
    control: &mut Control,
    dma: &Dma<'_>,
    sqe: &Sqe,
) -> Result<(), Refusal> {
    let qid = sqe.cdw10 as u16;
    let slot = slot(device, qid, u32::MAX)?;
    let mut held = slot.sq.lock();
    let Some(mut sq) = held.take() else {
        return Err(Status::INVALID_QID.into());
    };
    if let Some(target) = device.slots.get(usize::from(sq.cqid))
        && let Some(cq) = target.cq.lock().as_mut()
    {
        cq.take_head(device.doorbells.cq_head(sq.cqid).load(Ordering::Acquire));
        while let Some(Reverse(pending)) = sq.pending.pop() {
            if pending.fault.is_some_and(Fault::is_afterwards) {
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
            if cq.space() == 0 || cq.post(None, dma, aborted, Publish::default()).is_err() {
                break;
            }
            control.posted.extend(cq.vector);
        }
        cq.users = cq.users.saturating_sub(1);
    }
    device.doorbells.sq_tail(qid).store(0, Ordering::Relaxed);
    slot.settled.store(0, Ordering::Relaxed);
    slot.next_due_ns.store(u64::MAX, Ordering::Relaxed);
    Ok(())
}

/// An aborted command keeps the status that it was aborted with.
fn status_of(fault: Option<Fault>) -> Status {
    match fault {
        Some(Fault::Status(status)) => status,
        _ => Status::ABORTED_SQ_DELETION,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{DATA, Driver, config, cq_at, sq_at};
    use nvme_core::spec::admin::{self, QueueParams};
    use nvme_core::spec::{Iova, Lba, Nsid, Qid, nvm};

    fn sized(qid: u16, entries: u32) -> QueueParams {
        QueueParams {
            qid: Qid(qid),
            entries,
            iova: Iova(cq_at(4)),
        }
    }

    #[test]
    fn every_bad_queue_has_its_status() {
        let mut driver = Driver::with_queue(config());
        let discontiguous = |mut sqe: Sqe| {
            sqe.cdw11 &= !QUEUE_CONTIGUOUS;
            sqe
        };
        let cq = |params| admin::create_io_cq(params, None);
        let sq = |params, cqid| admin::create_io_sq(params, Qid(cqid));
        let odd = QueueParams {
            iova: Iova(cq_at(4) + 512),
            ..sized(2, 16)
        };
        let cases = [
            (cq(sized(0, 16)), Status::INVALID_QID),
            (cq(sized(5, 16)), Status::INVALID_QID),
            (cq(sized(0xFFFF, 16)), Status::INVALID_QID),
            (cq(sized(1, 16)), Status::INVALID_QID),
            (cq(sized(2, 1)), Status::INVALID_QUEUE_SIZE),
            (cq(sized(2, 65)), Status::INVALID_QUEUE_SIZE),
            (cq(sized(2, 65_536)), Status::INVALID_QUEUE_SIZE),
            (cq(odd), Status::INVALID_PRP_OFFSET),
            (discontiguous(cq(sized(2, 16))), Status::INVALID_FIELD),
            (
                admin::create_io_cq(sized(2, 16), Some(65)),
                Status::INVALID_INTERRUPT_VECTOR,
            ),
            (sq(sized(1, 16), 1), Status::INVALID_QID),
            (sq(sized(2, 16), 0), Status::INVALID_CQ),
            (sq(sized(2, 16), 2), Status::INVALID_CQ),
            (sq(sized(2, 16), 99), Status::INVALID_CQ),
            (sq(sized(2, 1), 1), Status::INVALID_QUEUE_SIZE),
            (sq(odd, 1), Status::INVALID_PRP_OFFSET),
            (admin::delete_io_cq(Qid(0)), Status::INVALID_QID),
            (admin::delete_io_cq(Qid(2)), Status::INVALID_QID),
            (admin::delete_io_cq(Qid(1)), Status::INVALID_QUEUE_DELETION),
            (admin::delete_io_sq(Qid(0)), Status::INVALID_QID),
            (admin::delete_io_sq(Qid(2)), Status::INVALID_QID),
            (admin::delete_io_sq(Qid(999)), Status::INVALID_QID),
        ];
        for (i, (sqe, status)) in cases.into_iter().enumerate() {
            assert_eq!(driver.admin(sqe), Err(status), "case {i}");
        }
        assert_eq!(
            driver.admin(admin::create_io_cq(sized(2, 64), Some(64))),
            Ok(0)
        );
    }

    #[test]
    fn queues_are_deleted_in_order_and_created_again() {
        let mut driver = Driver::with_queue(config());
        let read = nvm::read(Nsid(1), Lba(0), 1).with_prps(DATA, 0);
        assert_eq!(driver.io(read), Ok(0));
        assert_eq!(driver.admin(admin::delete_io_sq(Qid(1))), Ok(0));
        assert_eq!(driver.admin(admin::delete_io_cq(Qid(1))), Ok(0));
        driver.create_pair(1);
        assert_eq!(driver.io(read), Ok(0));
        assert_eq!(
            driver.controller.queue_stats(1).reads,
            2,
            "counts outlive the queue"
        );
    }

    #[test]
    fn several_submission_queues_share_a_completion_queue() {
        let mut driver = Driver::with_queue(config());
        let sq = admin::create_io_sq(Driver::params(2, sq_at(2)), Qid(1));
        assert_eq!(driver.admin(sq), Ok(0));
        let read = nvm::read(Nsid(1), Lba(0), 1).with_prps(DATA, 0);
        let (one, two) = (driver.push(1, read), driver.push(2, read));
        driver.ring(1);
        driver.ring(2);
        driver.step();
        let done: Vec<_> = core::iter::from_fn(|| driver.pop(1))
            .map(|c| (c.sqid, c.cid))
            .collect();
        assert_eq!(done, [(1, one), (2, two)]);
    }

    #[test]
    fn a_ring_in_scattered_pages_works_where_it_is_allowed() {
        let mut config = config();
        (config.cqr, config.mqes) = (false, 256);
        let mut driver = Driver::with_queue(config);
        // 128 entries of 64 bytes in two pages, the second one below the first.
        let (list, pages) = (DATA, [DATA + 0x5000, DATA + 0x2000]);
        driver
            .memory
            .write(list, &pages.map(u64::to_le_bytes).concat())
            .unwrap();
        let params = QueueParams {
            qid: Qid(2),
            entries: 128,
            iova: Iova(list),
        };
        let mut sqe = admin::create_io_sq(params, Qid(1));
        sqe.cdw11 &= !QUEUE_CONTIGUOUS;
        assert_eq!(driver.admin(sqe), Ok(0));
        for i in 0..70u64 {
            let page = pages[(i / 64) as usize];
            let words = nvm::flush(Nsid(1))
                .to_words()
                .map(u64::to_le_bytes)
                .concat();
            driver.memory.write(page + i % 64 * 64, &words).unwrap();
            driver
                .controller
                .doorbells()
                .sq_tail(2)
                .store(i as u32 + 1, Ordering::Release);
            driver.step();
            let cqe = driver.pop(1).unwrap();
            assert_eq!(
                (cqe.sqid, cqe.sqhd, cqe.status().code()),
                (2, i as u16 + 1, 0)
            );
        }
    }

    #[test]
    fn deleting_a_queue_ends_the_commands_that_wait_in_it() {
        let mut config = config();
        config.profile = crate::Profile {
            read_ns: 1_000_000,
            ..crate::Profile::NONE
        };
        let mut driver = Driver::with_queue(config);
        let cid = driver.push(1, nvm::read(Nsid(1), Lba(0), 1).with_prps(DATA, 0));
        driver.ring(1);
        driver.step();
        assert_eq!(driver.peek(1), None);
        driver.fill(DATA, 0x77, 512);
        assert_eq!(driver.admin(admin::delete_io_sq(Qid(1))), Ok(0));
        assert_eq!(driver.drain(1), [(cid, Status::ABORTED_SQ_DELETION.code())]);
        driver.now_ns = 2_000_000;
        driver.step();
        assert_eq!(
            driver.bytes(DATA, 512),
            [0x77; 512],
            "no DMA after the deletion"
        );
    }
}
