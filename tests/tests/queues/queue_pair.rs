//! A queue pair with one owner over a controller that the test controls: lists, the doorbells of a
//! batch, proofs.

use nvme_core::spec::{Iova, Lba, Nsid, Qid, Sqe, Status, nvm};
use nvme_core::{
    AbortReason, CommandData, CommandOutcome, CommandSlot, ControllerFault, QueuePair, SubmitError,
};
use nvme_tests::hand::{Hand, LIST_WORDS, QID, Rig, deleted};

const NEVER: u64 = u64::MAX;

fn pair(rig: &Rig, qid: Qid, slots: usize) -> QueuePair<'_, u32, Vec<CommandSlot<u32>>> {
    let slots = (0..slots).map(|_| CommandSlot::new()).collect();
    QueuePair::new(rig.identity(), qid, rig.memory(), slots)
}

fn read() -> Sqe {
    nvm::read(Nsid(1), Lba(0), 1)
}

/// PRP lists of commands in flight at the same time do not overlap, whichever slot is free.
#[test]
fn each_command_in_flight_has_list_memory_of_its_own() {
    let rig = Rig::new(8, 4, 0, 0);
    let (mut pair, mut hand) = (pair(&rig, QID, 4), Hand::new(&rig));
    let data = CommandData::Contiguous {
        iova: Iova(0x40_0000),
        len: 3 * 4096,
    };
    let mut lists = Vec::new();
    for round in 0..6u32 {
        let cid = pair.submit(read(), data, round, NEVER).unwrap();
        pair.ring();
        let sqe = hand.fetch().unwrap();
        let share = 0x10_0000 + u64::from(cid.0 & 0xFFF) * LIST_WORDS as u64 * 8;
        assert_eq!(sqe.dptr, [0x40_0000, share]);
        lists.push((cid, share));
        // The first two commands stay in flight; each later one ends at once.
        if round >= 2 {
            hand.complete(cid, Status::SUCCESS, 0);
            assert_eq!(pair.poll().unwrap().unwrap().cid, cid);
        }
    }
    let [a, b] = [lists[0].1, lists[1].1];
    assert!(a != b && lists[2..].iter().all(|(_, at)| *at != a && *at != b));
}

/// The head doorbell frees half a ring at once, or all entries if no more completions arrive.
#[test]
fn completions_are_given_back_in_batches_of_half_a_ring() {
    let rig = Rig::new(16, 15, 0, 0);
    let (mut pair, mut hand) = (pair(&rig, QID, 15), Hand::new(&rig));
    for n in 0..13 {
        pair.submit(read(), CommandData::None, n, NEVER).unwrap();
    }
    pair.ring();
    hand.serve();
    for polled in 1..=13 {
        pair.poll().unwrap().unwrap();
        assert_eq!(hand.look_back(), polled / 8 * 8);
    }
    assert!(pair.poll().unwrap().is_none());
    assert_eq!(hand.look_back(), 13);
}

#[test]
fn a_result_is_dword_0_of_a_success_and_the_status_of_a_failure() {
    let rig = Rig::new(4, 3, 0, 0);
    let (mut pair, mut hand) = (pair(&rig, QID, 3), Hand::new(&rig));
    for (status, buffer) in [(Status::SUCCESS, 7), (Status::INVALID_FIELD, 8)] {
        let cid = pair
            .submit(read(), CommandData::None, buffer, NEVER)
            .unwrap();
        pair.ring();
        hand.fetch().unwrap();
        hand.complete(cid, status, 0x55);
        let done = pair.poll().unwrap().unwrap();
        let expected = if status.is_success() {
            Ok((0x55, buffer))
        } else {
            Err((CommandOutcome::Completed(status), buffer))
        };
        assert_eq!(done.result(), expected);
    }
}

#[test]
fn a_completion_of_another_submission_queue_is_a_fault() {
    let rig = Rig::new(4, 3, 0, 0);
    let (mut pair, mut hand) = (pair(&rig, QID, 3), Hand::new(&rig));
    let cid = pair.submit(read(), CommandData::None, 1, NEVER).unwrap();
    pair.ring();
    hand.fetch().unwrap();
    let mut cqe = hand.completion(cid, Status::SUCCESS, 0);
    cqe.sqid = 9;
    hand.post(cqe);
    assert_eq!(pair.poll().unwrap_err(), ControllerFault::SqId(9));
    assert_eq!(pair.in_flight(), 1);
}

/// A deleted queue proves nothing about another queue's memory; a reset speaks of all.
#[test]
fn a_proof_frees_the_memory_of_its_own_queue_only() {
    let rig = Rig::new(4, 3, 0, 0);
    let mut pair = pair(&rig, QID, 3);
    assert_eq!(pair.qid(), QID);
    pair.submit(read(), CommandData::None, 5, NEVER).unwrap();
    let rig_beside = Rig::of(Qid(2), 4, 3, 0, 0);
    let slots: Vec<CommandSlot<u32>> = vec![CommandSlot::new()];
    let mut beside = QueuePair::new(rig.identity(), Qid(2), rig_beside.memory(), slots);
    beside.submit(read(), CommandData::None, 6, NEVER).unwrap();
    let own = deleted(rig.identity(), pair.close());
    let other = deleted(rig.identity(), beside.close());
    let reset = rig.reset();
    assert!(beside.reclaim(&own).is_none());
    let back = beside.reclaim(&reset).expect("a reset is of all queues");
    assert_eq!(
        (back.buffer, back.outcome),
        (6, CommandOutcome::Aborted(AbortReason::ControllerReset))
    );

    assert!(pair.reclaim(&other).is_none());
    assert!(!pair.restart(&own), "a command is in flight");
    assert!(!pair.restart(&reset), "a command is in flight");
    let back = pair.reclaim(&own).unwrap();
    assert_eq!(
        (back.buffer, back.outcome, back.late),
        (5, CommandOutcome::Aborted(AbortReason::QueueDeleted), false)
    );
    assert!(pair.reclaim(&own).is_none());
    assert!(!pair.restart(&other), "the proof is of another queue");
    assert!(pair.restart(&own));
    assert!(!pair.restart(&own), "once");
}

/// After a restart both rings begin at entry 0 with phase tag 1, as in a new queue.
#[test]
fn a_restarted_pair_works_as_a_new_one() {
    let rig = Rig::new(8, 7, 0, 0);
    let mut pair = pair(&rig, QID, 7);
    for round in 0..3 {
        // This is the controller after the reset: it begins at entry 0, too.
        let mut hand = Hand::new(&rig);
        for n in 0..11 {
            let cid = pair.submit(read(), CommandData::None, n, NEVER).unwrap();
            pair.ring();
            assert_eq!(hand.serve(), 1, "round {round}, command {n}");
            assert_eq!(pair.poll().unwrap().unwrap().cid, cid);
        }
        // Not rung, and lost with the reset.
        pair.submit(read(), CommandData::None, 99, NEVER).unwrap();
        let proof = rig.reset();
        let lost = pair.reclaim(&proof).unwrap();
        assert_eq!(lost.buffer, 99);
        assert!(pair.restart(&proof));
        pair.ring();
        assert_eq!(Hand::new(&rig).look(), 0, "nothing is rung by a restart");
    }
}

/// The smaller ring less one entry, or the slots: more than that is refused, with its buffer.
#[test]
fn a_pair_takes_as_many_commands_as_it_has_room_for() {
    for (entries, slots, depth) in [(4, 9, 3), (8, 5, 5), (2, 1, 1)] {
        let rig = Rig::new(entries, depth, 0, 0);
        let mut pair = pair(&rig, QID, slots);
        assert_eq!(pair.depth(), depth);
        for n in 0..depth {
            assert_eq!(pair.in_flight(), n);
            pair.submit(read(), CommandData::None, n, NEVER).unwrap();
        }
        let refused = pair
            .submit(read(), CommandData::None, 77, NEVER)
            .unwrap_err();
        assert_eq!(
            (refused.error, refused.buffer),
            (SubmitError::QueueFull, 77)
        );
        assert_eq!(pair.in_flight(), depth);
    }
}

/// A command is in flight from its submission to its end, past its deadline too.
#[test]
fn an_expired_command_is_in_flight_until_it_ends() {
    let rig = Rig::new(4, 3, 0, 0);
    let (mut pair, mut hand) = (pair(&rig, QID, 3), Hand::new(&rig));
    let cid = pair.submit(read(), CommandData::None, 1, 100).unwrap();
    pair.ring();
    hand.fetch().unwrap();
    assert!(pair.is_in_flight(cid));
    assert_eq!(pair.expire(99), None);
    assert_eq!(pair.expire(100), Some(cid));
    assert!(pair.is_in_flight(cid));
    hand.complete(cid, Status::SUCCESS, 3);
    let done = pair.poll().unwrap().unwrap();
    assert_eq!((done.cid, done.late, done.dw0), (cid, true, 3));
    assert!(!pair.is_in_flight(cid));
    assert_eq!(pair.expire(NEVER), None);
}
