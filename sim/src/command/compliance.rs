//! The requirements that SPDK's `nvme_compliance` suite places on a controller, tested here with
//! our own code: one test for each of its 18, so that a change which would fail there fails here.

use crate::testing::{DATA, Driver, ENTRIES, config, cq_at, sq_at};
use alloc::vec::Vec;
use nvme_auditor::Rule;
use nvme_spec::admin::{self, FeatureSelect, QUEUE_CONTIGUOUS, QueueParams, cns};
use nvme_spec::feature::{NumberOfQueues, fid};
use nvme_spec::identify::{IdentifyController, oacs};
use nvme_spec::log_page::lid;
use nvme_spec::{Iova, Lba, Nsid, Qid, Sqe, Status, nvm};
use zerocopy::FromBytes;

fn params(qid: u16, entries: u32) -> QueueParams {
    QueueParams {
        qid: Qid(qid),
        entries,
        iova: Iova(DATA + 0x10_0000),
    }
}

fn discontiguous(mut sqe: Sqe) -> Sqe {
    sqe.cdw11 &= !QUEUE_CONTIGUOUS;
    sqe
}

fn get(id: u8) -> Sqe {
    admin::get_features(id, FeatureSelect::Current, Nsid::NONE, 0).with_prps(DATA, 0)
}

#[test]
fn identify_with_less_room_than_it_takes_fails() {
    let mut driver = Driver::new(config());
    driver.breaks(&[Rule::PrpEntry]);
    let identify = admin::identify(cns::CONTROLLER, Nsid::NONE);
    assert_eq!(driver.admin(identify.with_prps(DATA, 0)), Ok(0));
    // The last KiB of a page, without a second PRP entry.
    let short = driver.admin(identify.with_prps(DATA + 3072, 0));
    assert_eq!(
        short,
        Err(Status::DATA_TRANSFER_ERROR),
        "though address 0 is mapped"
    );
}

#[test]
fn both_parts_of_a_fused_admin_command_fail() {
    let mut driver = Driver::new(config());
    driver.breaks_anything();
    let identify = admin::identify(cns::CONTROLLER, Nsid::NONE).with_prps(DATA, 0);
    for part in [1, 2] {
        let mut sqe = identify;
        sqe.cdw0 |= part << 8;
        driver.push(0, sqe);
    }
    driver.ring(0);
    driver.step();
    let codes: Vec<u16> = driver.drain(0).into_iter().map(|(_, code)| code).collect();
    assert_eq!(codes, [Status::INVALID_FIELD.code(); 2]);
}

#[test]
fn namespaces_that_are_not_there_are_told_from_those_that_are() {
    let mut driver = Driver::new(config());
    driver.breaks_anything();
    let of = |nsid| admin::identify(cns::NAMESPACE, Nsid(nsid)).with_prps(DATA, 0);
    let identify = admin::identify(cns::CONTROLLER, Nsid::NONE).with_prps(DATA, 0);
    assert_eq!(driver.admin(identify), Ok(0));
    let c = IdentifyController::read_from_bytes(&driver.bytes(DATA, 4096)).expect("4096 bytes");
    assert_eq!(c.oacs & oacs::NS_MANAGEMENT, 0);
    assert_eq!(driver.admin(of(0)), Err(Status::INVALID_NAMESPACE));
    assert_eq!(driver.admin(of(u32::MAX)), Err(Status::INVALID_NAMESPACE));
    assert_eq!(driver.admin(of(1)), Ok(0));
}

#[test]
fn mandatory_and_optional_features_are_there() {
    let mut driver = Driver::new(config());
    for id in [
        fid::ARBITRATION,
        fid::POWER_MANAGEMENT,
        fid::TEMPERATURE,
        fid::ERROR_RECOVERY,
        fid::NUMBER_OF_QUEUES,
        fid::INTERRUPT_COALESCING,
        fid::INTERRUPT_VECTOR,
        fid::WRITE_ATOMICITY,
        fid::ASYNC_EVENT,
        fid::KEEP_ALIVE,
        fid::HOST_BEHAVIOR,
    ] {
        assert!(driver.admin(get(id)).is_ok(), "feature {id:#x}");
    }
}

#[test]
fn the_number_of_queues_has_its_bounds_and_its_time() {
    let mut driver = Driver::new(config());
    let set = |value| admin::set_features(fid::NUMBER_OF_QUEUES, Nsid::NONE, value);
    assert_eq!(driver.admin(set(u32::MAX)), Err(Status::INVALID_FIELD));
    driver.create_pair(1);
    let late = driver.admin(set(0x0080_0080));
    assert_eq!(late, Err(Status::COMMAND_SEQUENCE_ERROR));
}

#[test]
fn mandatory_log_pages_are_there_and_have_an_end() {
    let mut driver = Driver::new(config());
    // The suite sends these commands without a namespace.
    let log =
        |lid, bytes, offset| admin::get_log_page(lid, Nsid::NONE, bytes, offset).with_prps(DATA, 0);
    assert_eq!(driver.admin(log(lid::ERROR, 64, 0)), Ok(0));
    assert_eq!(driver.admin(log(lid::SMART, 512, 0)), Ok(0));
    assert_eq!(driver.admin(log(lid::FIRMWARE, 512, 0)), Ok(0));
    let past = driver.admin(log(lid::FIRMWARE, 512, 516));
    assert_eq!(past, Err(Status::INVALID_FIELD));
    assert_eq!(driver.admin(log(lid::FIRMWARE, 512, 4)), Ok(0));
}

/// A controller that is not one of NVMe over Fabrics does not know the commands of Fabrics.
#[test]
fn a_command_of_fabrics_is_an_invalid_opcode() {
    let mut driver = Driver::new(config());
    driver.breaks_anything();
    let mut property_get = Sqe::new(0x7F, Nsid(4)); // Fabrics commands have their type in the NSID field.
    assert_eq!(driver.admin(property_get), Err(Status::INVALID_OPCODE));
    property_get.cdw0 |= 1 << 14; // Fabrics commands have SGLs.
    assert_eq!(driver.admin(property_get), Err(Status::INVALID_OPCODE));
}

#[test]
fn queues_are_deleted_once_in_order_and_not_the_admin_queue() {
    let mut driver = Driver::with_queue(config());
    let (sq, cq) = (
        |q| admin::delete_io_sq(Qid(q)),
        |q| admin::delete_io_cq(Qid(q)),
    );
    assert_eq!(driver.admin(sq(0)), Err(Status::INVALID_QID));
    assert_eq!(driver.admin(cq(0)), Err(Status::INVALID_QID));
    let read = nvm::read(Nsid(1), Lba(0), 1).with_prps(DATA, 0);
    assert_eq!(driver.io(read), Ok(0));
    assert_eq!(driver.admin(cq(1)), Err(Status::INVALID_QUEUE_DELETION));
    assert_eq!(driver.admin(sq(1)), Ok(0));
    assert_eq!(driver.admin(sq(1)), Err(Status::INVALID_QID));
    assert_eq!(driver.admin(cq(1)), Ok(0));
}

#[test]
fn a_completion_queue_has_a_vector_that_exists_and_lies_in_one_piece() {
    let mut config = config();
    config.cqr = true;
    let mut driver = Driver::new(config);
    let cq = |vector| admin::create_io_cq(params(1, 64), Some(vector));
    let refused = driver.admin(cq(2048));
    assert_eq!(refused, Err(Status::INVALID_INTERRUPT_VECTOR));
    let refused = driver.admin(discontiguous(cq(1)));
    assert_eq!(refused, Err(Status::INVALID_FIELD));
    assert_eq!(driver.admin(cq(1)), Ok(0));
    assert_eq!(driver.admin(admin::delete_io_cq(Qid(1))), Ok(0));
}

#[test]
fn a_submission_queue_has_a_size_and_a_completion_queue_that_can_be() {
    let mut driver = Driver::with_queue(config());
    let granted = driver
        .admin(get(fid::NUMBER_OF_QUEUES))
        .expect("the number");
    let (_, cqs) = NumberOfQueues::granted(granted);
    assert_eq!(driver.admin(admin::delete_io_sq(Qid(1))), Ok(0));
    let sq = |entries, cqid| admin::create_io_sq(params(1, entries), Qid(cqid));
    for (sqe, status) in [
        (sq(1, 1), Status::INVALID_QUEUE_SIZE),
        (sq(65, 1), Status::INVALID_QUEUE_SIZE),
        (sq(64, 0), Status::INVALID_QID),
        (sq(64, cqs as u16 + 1), Status::INVALID_QID),
        (discontiguous(sq(64, 1)), Status::INVALID_FIELD),
        // A valid identifier without a completion queue.
        (sq(64, 2), Status::INVALID_CQ),
    ] {
        assert_eq!(driver.admin(sqe), Err(status), "{:#x}", sqe.cdw11);
    }
    assert_eq!(driver.admin(sq(64, 1)), Ok(0));
}

#[test]
fn as_many_queue_pairs_as_were_granted_and_no_more() {
    let mut config = config();
    config.max_queues = 3;
    let mut driver = Driver::new(config);
    let granted = driver
        .admin(get(fid::NUMBER_OF_QUEUES))
        .expect("the number");
    assert_eq!(NumberOfQueues::granted(granted), (3, 3));
    (1..=3).for_each(|qid| driver.create_pair(qid));
    let cq = admin::create_io_cq(params(4, 2), None);
    assert_eq!(driver.admin(cq), Err(Status::INVALID_QID));
}

#[test]
fn four_submission_queues_on_two_completion_queues() {
    let mut driver = Driver::new(config());
    let set = NumberOfQueues::request(4, 2);
    let set = admin::set_features(fid::NUMBER_OF_QUEUES, Nsid::NONE, set);
    assert_eq!(driver.admin(set), Ok(0x0001_0003));
    for qid in [1, 2] {
        let cq = admin::create_io_cq(Driver::params(qid, cq_at(qid)), Some(qid));
        assert_eq!(driver.admin(cq), Ok(0));
    }
    for (qid, cqid) in [(1, 2), (2, 2), (3, 2), (4, 1)] {
        let at = QueueParams {
            qid: Qid(qid),
            entries: ENTRIES,
            iova: Iova(sq_at(qid)),
        };
        assert_eq!(driver.admin(admin::create_io_sq(at, Qid(cqid))), Ok(0));
    }
    let (sq, cq) = (
        |q| admin::delete_io_sq(Qid(q)),
        |q| admin::delete_io_cq(Qid(q)),
    );
    for sqe in [sq(1), sq(2)] {
        assert_eq!(driver.admin(sqe), Ok(0));
    }
    assert_eq!(driver.admin(cq(2)), Err(Status::INVALID_QUEUE_DELETION));
    for sqe in [sq(3), sq(4), cq(2), cq(1)] {
        assert_eq!(driver.admin(sqe), Ok(0));
    }
}
