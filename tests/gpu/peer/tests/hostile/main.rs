//! The controller as host threads, against a driver that does what none may do.

mod driver;

use driver::{Peer, enabled, fill, params, until, word32, word64};
use gpu_peer::{MAX_ENTRIES, Plan};
use nvme_spec::admin::{self, cns};
use nvme_spec::nvm::{self, opcode};
use nvme_spec::register::{Cap, offset};
use nvme_spec::{Cid, Lba, Nsid, Qid, Sqe, Status};
use std::sync::atomic::Ordering;
use std::time::Duration;

const PAGE: usize = 4096;
/// Number of pages of the driver's memory: admin rings, I/O rings, then data.
const PAGES: usize = 600;
const BLOCKS: u64 = 4096;
const NSID: Nsid = Nsid(1);

#[test]
fn what_a_driver_may_not_ask_for_is_refused() {
    let mut peer = Peer::start(1, 1, Plan::default());
    let mut ring = peer.create(1, 8, 8);
    let page = |index| peer.page(index);
    let read = |blocks| nvm::read(NSID, Lba(0), blocks);
    let list = page(0);
    // A list whose last entry of a page names the list again: a circle.
    let circle = page(1);
    fill(circle, PAGE, 0);
    word64(circle + PAGE as u64 - 8).store(circle + PAGE as u64 - 8, Ordering::Relaxed);
    word64(list).store(page(3), Ordering::Relaxed);
    word64(list + 8).store(page(4) + 512, Ordering::Relaxed);
    let with = |mut sqe: Sqe, bits: u32| {
        sqe.cdw0 |= bits;
        sqe
    };
    let end = peer.memory + (PAGES * PAGE) as u64;
    let cases = [
        ("opcode", Sqe::new(0x55, NSID), Status::INVALID_OPCODE),
        (
            "fused",
            with(read(1).with_prps(page(2), 0), 1 << 8),
            Status::INVALID_FIELD,
        ),
        (
            "an SGL",
            read(1).with_sgl([page(2), 512]),
            Status::INVALID_FIELD,
        ),
        (
            "no namespace",
            nvm::read(Nsid(0), Lba(0), 1).with_prps(page(2), 0),
            Status::INVALID_NAMESPACE,
        ),
        (
            "all namespaces",
            nvm::read(Nsid::ALL, Lba(0), 1).with_prps(page(2), 0),
            Status::INVALID_NAMESPACE,
        ),
        (
            "past the end",
            nvm::read(NSID, Lba(BLOCKS), 1).with_prps(page(2), 0),
            Status::LBA_OUT_OF_RANGE,
        ),
        (
            "over the end",
            nvm::read(NSID, Lba(BLOCKS - 1), 2).with_prps(page(2), 0),
            Status::LBA_OUT_OF_RANGE,
        ),
        (
            "an LBA that wraps",
            nvm::read(NSID, Lba(u64::MAX), 2).with_prps(page(2), 0),
            Status::LBA_OUT_OF_RANGE,
        ),
        (
            "more than MDTS",
            read(2049).with_prps(page(2), page(0)),
            Status::INVALID_FIELD,
        ),
        (
            "PRP1 no dword",
            read(1).with_prps(page(2) + 2, 0),
            Status::INVALID_PRP_OFFSET,
        ),
        (
            "PRP2 in a page",
            read(16).with_prps(page(2), page(3) + 8),
            Status::INVALID_PRP_OFFSET,
        ),
        (
            "a list no qword",
            read(24).with_prps(page(2), list + 4),
            Status::INVALID_PRP_OFFSET,
        ),
        (
            "an entry in a page",
            read(24).with_prps(page(2), list),
            Status::INVALID_PRP_OFFSET,
        ),
        (
            "a list that is a circle",
            read(24).with_prps(page(2), circle + PAGE as u64 - 8),
            Status::INVALID_PRP_OFFSET,
        ),
        (
            "memory of others",
            read(1).with_prps(0x1000, 0),
            Status::DATA_TRANSFER_ERROR,
        ),
        (
            "memory past the end",
            read(1).with_prps(end, 0),
            Status::DATA_TRANSFER_ERROR,
        ),
        (
            "a page at the very end",
            read(1).with_prps(u64::MAX - 511, 0),
            Status::DATA_TRANSFER_ERROR,
        ),
        (
            "PRP2 of others",
            read(16).with_prps(page(2), 0),
            Status::DATA_TRANSFER_ERROR,
        ),
        (
            "a list of others",
            read(24).with_prps(page(2), end),
            Status::DATA_TRANSFER_ERROR,
        ),
    ];
    for (name, sqe, status) in cases {
        let (answer, _) = ring.ask(sqe);
        assert!(answer.is(status), "{name}: {answer}");
    }
    // It works all the same.
    fill(peer.args.medium, 512, 7);
    assert_eq!(ring.ask(read(1).with_prps(page(5), 0)).0, Status::SUCCESS);
    assert_eq!(word64(page(5) + 8).load(Ordering::Relaxed), 8);
    assert_eq!(peer.shared().bad_doorbells, 0);
}

#[test]
fn data_moves_to_and_from_every_kind_of_list() {
    let mut peer = Peer::start(1, 1, Plan::default());
    let mut ring = peer.create(1, 8, 8);
    fill(peer.args.medium, 512 * 2048, 1000);
    // Lists that begin near the end of a page and continue in another.
    for (pages, at) in [
        (1, 0),
        (2, 0),
        (3, 0),
        (3, 4080),
        (256, 2048),
        (256, 4088),
        (200, 3800),
    ] {
        for first in [0, 512, 3584] {
            let blocks = (pages * 8).min(2048 - first / 512);
            let (data, list) = (peer.page(100), peer.page(0) + at);
            fill(data, 257 * PAGE, 0);
            let prp = |index: u64| data + index * PAGE as u64;
            let mut entry = list;
            let needed = u64::div_ceil(first + blocks * 512, PAGE as u64);
            for index in 1..needed {
                let is_last = entry % PAGE as u64 == PAGE as u64 - 8;
                if is_last && index + 1 < needed {
                    word64(entry).store(peer.page(2), Ordering::Relaxed);
                    entry = peer.page(2);
                }
                word64(entry).store(prp(index), Ordering::Relaxed);
                entry += 8;
            }
            let prp2 = if needed > 2 { list } else { prp(1) };
            let range = |op: fn(Nsid, Lba, u32) -> Sqe| {
                op(NSID, Lba(0), blocks as u32).with_prps(data + first, prp2)
            };
            assert_eq!(
                ring.ask(range(nvm::read)).0,
                Status::SUCCESS,
                "{pages} {at} {first}"
            );
            for index in 0..blocks * 64 {
                let word = word64(data + first + index * 8).load(Ordering::Relaxed);
                assert_eq!(
                    word,
                    1000 + index,
                    "{pages} pages, list at {at}, from {first}"
                );
            }
            assert_eq!(ring.ask(range(nvm::compare)).0, Status::SUCCESS);
            let last = data + first + blocks * 512 - 4;
            word32(last).fetch_xor(1, Ordering::Relaxed);
            assert!(ring.ask(range(nvm::compare)).0.is(Status::COMPARE_FAILURE));
            assert_eq!(ring.ask(range(nvm::write)).0, Status::SUCCESS);
            let end = peer.args.medium + blocks * 512 - 4;
            word32(last).fetch_xor(1, Ordering::Relaxed);
            let (there, here) = (word32(end), word32(last));
            let differ = there.load(Ordering::Relaxed) ^ here.load(Ordering::Relaxed);
            assert_eq!(differ, 1);
            assert_eq!(ring.ask(range(nvm::write)).0, Status::SUCCESS);
        }
    }
    assert_eq!(
        ring.ask(nvm::write_zeroes(NSID, Lba(1), 65)).0,
        Status::SUCCESS
    );
    let medium = |block: u64| word64(peer.args.medium + block * 512).load(Ordering::Relaxed);
    assert_eq!([0, 1, 65, 66].map(medium), [1000, 0, 0, 1000 + 66 * 64]);
    for nsid in [NSID, Nsid::ALL] {
        assert_eq!(ring.ask(Sqe::new(opcode::FLUSH, nsid)).0, Status::SUCCESS);
    }
}

#[test]
fn a_completion_queue_is_never_overrun() {
    let mut peer = Peer::start(1, 1, Plan::default());
    let mut ring = peer.create(1, 64, 4);
    for number in 0..50 {
        ring.push(Sqe::new(opcode::FLUSH, NSID).with_cid(Cid(number)));
    }
    ring.ring();
    // Three of four entries; the fourth is not written until an entry is freed.
    until(|| (peer.shared().full > 100).then_some(()));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(peer.shared().posted, 3);
    assert_eq!(word64(ring.cq + 3 * 16 + 8).load(Ordering::Relaxed), 0);
    for number in 0..50 {
        let cqe = until(|| ring.poll());
        assert_eq!((cqe.cid(), cqe.status()), (Cid(number), Status::SUCCESS));
        if number % 3 == 2 || number > 45 {
            ring.give_back();
        }
    }
    assert_eq!(peer.shared().posted, 50);
}

#[test]
fn doorbells_that_no_queue_can_have_are_ignored() {
    let mut peer = Peer::start(2, 1, Plan::default());
    let (mut one, mut two) = (peer.create(1, 3, 3), peer.create(2, 1024, 1024));
    word32(one.doorbells[0]).store(3, Ordering::Release);
    until(|| (peer.shared().bad_doorbells > 0).then_some(()));
    word32(one.doorbells[0]).store(0, Ordering::Release);
    // A head doorbell past the posted entries frees nothing.
    word32(one.doorbells[1]).store(2, Ordering::Release);
    for number in 0..2 {
        one.push(Sqe::new(opcode::FLUSH, NSID).with_cid(Cid(number)));
    }
    one.ring();
    for number in 0..2 {
        assert_eq!(until(|| one.poll()).cid(), Cid(number));
    }
    one.give_back();
    // Rings that are no power of two, and large ones, many times around.
    for number in 0..2500 {
        for ring in [&mut one, &mut two] {
            let sqe = Sqe::new(opcode::FLUSH, NSID).with_cid(Cid(number));
            ring.push(sqe);
            ring.ring();
            let cqe = ring.wait();
            assert_eq!((cqe.cid(), u32::from(cqe.sqhd)), (Cid(number), ring.tail));
        }
    }
}

#[test]
fn queues_are_created_and_deleted_as_the_specification_says() {
    let mut peer = Peer::start(2, 2, Plan::default());
    let cap = Cap(word64(peer.args.bar).load(Ordering::Relaxed));
    assert_eq!(
        (cap.mqes(), cap.dstrd(), cap.css() & 1),
        (MAX_ENTRIES, 0, 1)
    );
    let at = peer.page(0);
    let cq = |qid, entries, at| admin::create_io_cq(params(qid, entries, at), None);
    let sq = |qid, entries, at, cqid| admin::create_io_sq(params(qid, entries, at), Qid(cqid));
    let refusals = [
        (cq(0, 8, at), Status::INVALID_QID),
        (cq(3, 8, at), Status::INVALID_QID),
        (cq(1, 1, at), Status::INVALID_QUEUE_SIZE),
        (cq(1, 1025, at), Status::INVALID_QUEUE_SIZE),
        (cq(1, 8, at + 64), Status::INVALID_PRP_OFFSET),
        (cq(1, 8, 0x1000), Status::INVALID_FIELD),
        (sq(1, 8, at, 1), Status::INVALID_CQ),
        (admin::delete_io_sq(Qid(1)), Status::INVALID_QID),
        (admin::delete_io_cq(Qid(1)), Status::INVALID_QID),
        (
            admin::identify(cns::NAMESPACE, Nsid(2)).with_prps(at, 0),
            Status::INVALID_NAMESPACE,
        ),
        (
            admin::identify(0x77, Nsid(0)).with_prps(at, 0),
            Status::INVALID_FIELD,
        ),
        (
            admin::identify(cns::CONTROLLER, Nsid(0)).with_prps(at + 4, 0),
            Status::INVALID_PRP_OFFSET,
        ),
        (
            admin::identify(cns::CONTROLLER, Nsid(0)).with_prps(0x2000, 0),
            Status::DATA_TRANSFER_ERROR,
        ),
        (admin::async_event_request(), Status::INVALID_OPCODE),
    ];
    for (sqe, status) in refusals {
        let (answer, _) = peer.admin.ask(sqe);
        assert!(answer.is(status), "{answer} for {sqe:?}");
    }
    for _ in 0..3 {
        let mut ring = peer.create(1, 8, 16);
        assert!(peer.admin.ask(cq(1, 8, at)).0.is(Status::INVALID_QID));
        assert!(peer.admin.ask(sq(1, 8, at, 1)).0.is(Status::INVALID_QID));
        assert!(peer.admin.ask(sq(2, 8, at, 1)).0.is(Status::INVALID_CQ));
        assert!(
            peer.admin
                .ask(admin::delete_io_cq(Qid(1)))
                .0
                .is(Status::INVALID_QUEUE_DELETION)
        );
        assert_eq!(ring.ask(Sqe::new(opcode::FLUSH, NSID)).0, Status::SUCCESS);
        assert_eq!(
            peer.admin.ask(admin::abort(Qid(1), Cid(3))),
            (Status::SUCCESS, 1)
        );
        assert_eq!(
            peer.admin.ask(admin::delete_io_sq(Qid(1))).0,
            Status::SUCCESS
        );
        // A queue that was deleted is not served.
        ring.push(Sqe::new(opcode::FLUSH, NSID));
        ring.ring();
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(ring.poll(), None);
        assert_eq!(
            peer.admin.ask(admin::delete_io_cq(Qid(1))).0,
            Status::SUCCESS
        );
    }
}

#[test]
fn a_reset_lets_go_of_everything() {
    let mut peer = Peer::start(2, 1, Plan::default());
    for _ in 0..4 {
        let mut rings = [peer.create(1, 8, 8), peer.create(2, 8, 8)];
        for ring in &mut rings {
            for _ in 0..20 {
                assert_eq!(ring.ask(Sqe::new(opcode::FLUSH, NSID)).0, Status::SUCCESS);
            }
        }
        peer.disable();
        // Nothing is fetched or posted any more.
        let [one, _] = &mut rings;
        one.push(Sqe::new(opcode::FLUSH, NSID));
        one.ring();
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(one.poll(), None);
        peer.enable();
    }
    let mut cc = enabled();
    cc.set_shn(1);
    peer.write(offset::CC, cc.0);
    until(|| (peer.csts().shst() == 2).then_some(()));
}

#[test]
fn an_admin_queue_that_cannot_be_is_a_fatal_status() {
    let peer = Peer::start(1, 1, Plan::default());
    peer.disable();
    for asq in [0x1000, peer.memory + 64, u64::MAX - 4095] {
        word64(peer.args.bar + u64::from(offset::ASQ)).store(asq, Ordering::Relaxed);
        peer.write(offset::CC, enabled().0);
        until(|| peer.csts().cfs().then_some(()));
        assert!(!peer.csts().rdy());
        peer.disable();
    }
}
