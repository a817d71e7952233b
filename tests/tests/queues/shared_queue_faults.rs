//! A shared queue whose controller breaks the protocol: the queue is refused, honest completions count.

use super::shared_queue::{SIZES, STARTS, command, drain_all, submit, two_in_flight};
use nvme_core::group::{LoneThread, ThreadGroup};
use nvme_core::spec::{Cid, Status};
use nvme_core::{
    AbortReason, CommandOutcome, ControllerFault, DrainResult, SubmitError, WaitError,
};
use nvme_tests::hand::{Hand, Rig};
use nvme_tests::team::{Paused, Team};

/// Returns completions that no working controller posts, each with the fault that the driver must report.
fn violations(cid: Cid) -> [(&'static str, ControllerFault); 6] {
    [
        (
            "a slot that is free",
            ControllerFault::UnknownCid(Cid(cid.0 & 0xF000 | 5)),
        ),
        (
            "a slot that does not exist",
            ControllerFault::UnknownCid(Cid(0x123)),
        ),
        (
            "a slot that does not exist, in flight modulo the entries",
            ControllerFault::UnknownCid(Cid(cid.0 | 0x100)),
        ),
        (
            "another generation",
            ControllerFault::StaleCid(Cid(cid.0 ^ 0x1000)),
        ),
        ("a head past the ring", ControllerFault::SqHead(4096)),
        ("another queue", ControllerFault::SqId(7)),
    ]
}

#[test]
fn violations_refuses_the_queue_and_the_honest_completions_with_it_count() {
    for size in SIZES {
        for case in 0..6 {
            let rig = Rig::new(8, 7, 8, 0);
            let (mut hand, tokens, [first, second]) = two_in_flight(&rig);
            let (what, fault) = violations(first.cid())[case];
            let mut cqe = hand.completion(first.cid(), Status::SUCCESS, 9);
            match fault {
                ControllerFault::UnknownCid(cid) | ControllerFault::StaleCid(cid) => {
                    cqe.cid = cid.0;
                }
                ControllerFault::SqHead(head) => cqe.sqhd = head,
                ControllerFault::SqId(qid) => cqe.sqid = qid,
            }
            hand.post(cqe);
            hand.complete(second.cid(), Status::SUCCESS, 1);
            Team::run(size, |team| {
                let queue = rig.shared();
                drain_all(&queue, team);
                assert_eq!(queue.fault(), Some(fault), "{what}, team of {size}");
                let tag = 4 + team.rank() % 4;
                let refused = submit(&queue, team, command(0, tag)).unwrap_err();
                assert_eq!(refused, SubmitError::Refused, "{what}");
            });
            let queue = rig.shared();
            let [one, two] = tokens;
            let done = Some((CommandOutcome::Completed(Status::SUCCESS), 1));
            assert_eq!(queue.poll(&two), done, "{what}, team of {size}");
            let (error, one) = queue.wait(&Paused::new(|| ()), one, 100).unwrap_err();
            assert_eq!(error, WaitError::Refused, "{what}");
            assert_eq!(queue.poll(&one), None, "{what}");
        }
    }
}

/// NVMe Base 2.0c, "SQ Head Pointer": the head is the one at the time when the completion was made, which may be before
/// another was posted.
#[test]
fn a_head_may_be_older_than_one_before() {
    for start in STARTS {
        for size in SIZES {
            let rig = Rig::new(8, 7, 8, start);
            let (mut hand, tokens, [first, second]) = two_in_flight(&rig);
            for (sqe, head) in [(second, 2), (first, 1)] {
                let mut cqe = hand.completion(sqe.cid(), Status::SUCCESS, 0);
                cqe.sqhd = head;
                hand.post(cqe);
            }
            Team::run(size, |team| drain_all(&rig.shared(), team));
            let queue = rig.shared();
            assert_eq!(queue.fault(), None);
            for token in &tokens {
                let end = queue.poll(token).expect("it has completed");
                assert_eq!(end.0, CommandOutcome::Completed(Status::SUCCESS));
            }
        }
    }
}

/// The entry of such a command is in the ring, and may still reach the controller: its buffer stays lent.
#[test]
fn a_command_that_was_not_published_does_not_end() {
    for start in STARTS {
        let rig = Rig::new(8, 7, 8, start);
        let (queue, mut hand) = (rig.shared(), Hand::new(&rig));
        let tokens = [0, 1].map(|tag| queue.place(&LoneThread, command(tag, tag)).unwrap());
        queue.ring(&LoneThread);
        let late = queue.place(&LoneThread, command(2, 2)).unwrap();
        assert_eq!(hand.serve(), 2);
        hand.complete(late.cid(), Status::SUCCESS, 2);
        while let DrainResult::Took(1..) = queue.drain(&LoneThread) {}
        assert_eq!(queue.fault(), Some(ControllerFault::UnknownCid(late.cid())));
        for (token, number) in tokens.iter().zip(0..) {
            let end = queue.poll(token);
            assert_eq!(
                end,
                Some((CommandOutcome::Completed(Status::SUCCESS), number))
            );
        }
        assert_eq!((queue.poll(&late), queue.state().in_flight()), (None, 1));
        assert_eq!(queue.recover(&rig.reset()), Some(1));
        let aborted = CommandOutcome::Aborted(AbortReason::ControllerReset);
        assert_eq!(queue.poll(&late), Some((aborted, 0)));
    }
}

#[test]
fn the_same_completion_twice_in_one_pass_ends_one_command() {
    for size in SIZES {
        let rig = Rig::new(8, 7, 8, 0);
        let (mut hand, [one, _two], [first, _]) = two_in_flight(&rig);
        hand.complete(first.cid(), Status::SUCCESS, 3);
        hand.complete(first.cid(), Status::INVALID_FIELD, 4);
        Team::run(size, |team| drain_all(&rig.shared(), team));
        let queue = rig.shared();
        // Within a pass either entry may be first: that one is delivered, and the other one is the fault.
        let end = queue.poll(&one).expect("it ended");
        let either = [
            (CommandOutcome::Completed(Status::SUCCESS), 3),
            (CommandOutcome::Completed(Status::INVALID_FIELD), 4),
        ];
        assert!(either.contains(&end), "{end:?}");
        let fault = ControllerFault::UnknownCid(first.cid());
        assert_eq!(queue.fault(), Some(fault), "team of {size}");
        assert_eq!(queue.state().in_flight(), 1);
    }
}
