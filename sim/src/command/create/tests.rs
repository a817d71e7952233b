//! Tests of `create`.

use super::*;
use crate::testing::{DATA, Driver, config, cq_at, sq_at};
use nvme_auditor::Rule;
use nvme_spec::admin::{self, QueueParams};
use nvme_spec::register::offset;
use nvme_spec::{Cid, Iova, Lba, Nsid, Qid, nvm};

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
        (sq(sized(2, 16), 0), Status::INVALID_QID),
        (sq(sized(2, 16), 2), Status::INVALID_CQ),
        (sq(sized(2, 16), 5), Status::INVALID_QID),
        (sq(sized(2, 16), 99), Status::INVALID_QID),
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
    config.profile = crate::LatencyProfile {
        read_ns: 1_000_000,
        ..crate::LatencyProfile::NONE
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

/// The highest identifier that was granted, rings of two entries, and a vector that was not requested.
#[test]
fn queues_at_the_limits_are_created() {
    let mut driver = Driver::with_queue(config());
    driver.breaks(&[Rule::BufferShared]);
    driver.create_pair(4);
    let cq = admin::create_io_cq(sized(2, 2), None);
    assert_eq!(driver.admin(cq), Ok(0));
    let sq = admin::create_io_sq(sized(2, 2), Qid(2));
    assert_eq!(driver.admin(sq), Ok(0));
    // With IEN = 0 the vector is ignored.
    let mut polled = admin::create_io_cq(sized(3, 16), None);
    polled.cdw11 |= 999 << 16;
    assert_eq!(driver.admin(polled), Ok(0));
}

/// The list of a ring of four pages: the list's offset in its page decides which entry is a chain pointer.
///
/// NVMe Base 2.0c, 4.1.1: the last entry of a list page leads on only when more entries follow than
/// one.
#[test]
fn the_list_of_a_scattered_ring_chains_as_any_list() {
    let pages = [DATA + 0x6000, DATA + 0x3000, DATA + 0x5000, DATA + 0x4000];
    let next = DATA + 0x1_0000;
    let end = DATA + 0x1000;
    for fit in 1..=5usize {
        let mut config = config();
        (config.cqr, config.mqes) = (false, 256);
        let mut driver = Driver::with_queue(config);
        let put = |at: u64, entries: &[u64]| {
            let bytes: Vec<u8> = entries.iter().flat_map(|one| one.to_le_bytes()).collect();
            driver.memory.write(at, &bytes).unwrap();
        };
        // `fit` entries lie before the end of the page.
        let list = end - fit as u64 * 8;
        put(end, &[0x123; 4]);
        if fit < 4 {
            put(list, &pages[..fit - 1]);
            put(end - 8, &[next]);
            put(next, &pages[fit - 1..]);
            put(next + 8 * (5 - fit as u64), &[0x123]);
        } else {
            put(list, &pages);
            if fit > 4 {
                // What follows the last page that is needed is not even looked at.
                put(list + 4 * 8, &[0x123]);
            }
        }
        let params = QueueParams {
            qid: Qid(2),
            entries: 256,
            iova: Iova(list),
        };
        let mut sqe = admin::create_io_sq(params, Qid(1));
        sqe.cdw11 &= !QUEUE_CONTIGUOUS;
        assert_eq!(driver.admin(sqe), Ok(0), "{fit} entries in the first page");
        for i in 0..255u64 {
            let words = nvm::flush(Nsid(1)).with_cid(Cid(i as u16)).to_words();
            let at = pages[(i / 64) as usize] + i % 64 * 64;
            let bytes = words.map(u64::to_le_bytes).concat();
            driver.memory.write(at, &bytes).unwrap();
            let tail = driver.controller.doorbells().sq_tail(2);
            tail.store(i as u32 + 1, Ordering::Release);
            driver.step();
            let cqe = driver.pop(1).unwrap();
            assert_eq!((cqe.cid, cqe.sqhd), (i as u16, i as u16 + 1), "{fit}");
            assert!(cqe.status().is_success());
        }
    }
}

#[test]
fn a_bad_entry_in_the_list_of_a_ring_is_refused() {
    let mut config = config();
    (config.cqr, config.mqes) = (false, 256);
    let mut driver = Driver::with_queue(config);
    let list = [DATA + 0x3000, DATA + 0x4008]
        .map(u64::to_le_bytes)
        .concat();
    driver.memory.write(DATA, &list).unwrap();
    for (iova, status) in [
        (DATA, Status::INVALID_PRP_OFFSET),
        (DATA + 4, Status::INVALID_PRP_OFFSET),
        (1 << 40, Status::DATA_TRANSFER_ERROR),
    ] {
        let params = QueueParams {
            qid: Qid(2),
            entries: 128,
            iova: Iova(iova),
        };
        let mut sqe = admin::create_io_sq(params, Qid(1));
        sqe.cdw11 &= !QUEUE_CONTIGUOUS;
        assert_eq!(driver.admin(sqe), Err(status));
    }
}

/// Abort and Delete are in one batch: the command ends once, with the status of whichever comes first.
#[test]
fn a_command_that_was_aborted_stays_so_when_its_queue_goes() {
    let mut config = config();
    config.profile = crate::LatencyProfile {
        read_ns: 1_000_000,
        ..crate::LatencyProfile::NONE
    };
    let mut driver = Driver::with_queue(config);
    driver.breaks(&[Rule::BufferShared]);
    let read = nvm::read(Nsid(1), Lba(0), 1).with_prps(DATA, 0);
    let (aborted, waiting) = (driver.push(1, read), driver.push(1, read));
    driver.ring(1);
    driver.step();
    driver.push(0, admin::abort(Qid(1), Cid(aborted)));
    driver.push(0, admin::delete_io_sq(Qid(1)));
    driver.ring(0);
    driver.step();
    assert!(driver.drain(0).iter().all(|(_, status)| *status == 0));
    let mut ended = driver.drain(1);
    ended.sort_unstable();
    let expected = [
        (aborted, Status::ABORT_REQUESTED.code()),
        (waiting, Status::ABORTED_SQ_DELETION.code()),
    ];
    assert_eq!(ended, expected);
}

/// CC.IOSQES and CC.IOCQES may be 0 until I/O queues are created.
#[test]
fn entries_without_a_size_make_no_queue() {
    let mut driver = Driver::with_queue(config());
    let mut cc = Driver::cc();
    cc.set_iosqes(0);
    cc.set_iocqes(0);
    driver.controller.write32(offset::CC, cc.0);
    let cq = admin::create_io_cq(Driver::params(2, cq_at(2)), None);
    let sq = admin::create_io_sq(Driver::params(2, sq_at(2)), Qid(1));
    assert_eq!(driver.admin(cq), Err(Status::INVALID_QUEUE_SIZE));
    assert_eq!(driver.admin(sq), Err(Status::INVALID_QUEUE_SIZE));
    driver.controller.write32(offset::CC, Driver::cc().0);
    driver.create_pair(2);
}
