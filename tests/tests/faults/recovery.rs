//! Abort and queue deletion over an admin queue that the test controls: every answer, and every
//! wait to its end.

use nvme_core::recovery::{AbortAttempt, DeletionStep, QueueDeletion, RecoveryStep, ResetCause};
use nvme_core::spec::{Cid, Qid, Sqe, Status, admin};
use nvme_core::{CommandData, CommandSlot, QueuePair};
use nvme_tests::hand::{Hand, Rig};

const MS: u64 = 1_000_000;
/// An arbitrary time at which the clock stands when an attempt begins.
const START: u64 = 7_000 * MS;
/// Time limit of Abort's answer, and then of the command's completion.
const GRACE: u64 = 30 * MS;
const TARGET: (Qid, Cid) = (Qid(3), Cid(0x1234));

type Admin<'a> = QueuePair<'a, u32, Vec<CommandSlot<u32>>>;

/// Runs a test with an admin queue of four slots, its controller, and commands in flight there for
/// another caller.
fn with_admin(others: u32, test: impl FnOnce(&mut Admin<'_>, &mut Hand<'_>, Vec<Cid>)) {
    let rig = Rig::of(Qid::ADMIN, 8, 4, 0, 0);
    let slots = (0..4).map(|_| CommandSlot::new()).collect();
    let mut admin = QueuePair::new(rig.identity(), Qid::ADMIN, rig.memory(), slots);
    let mut hand = Hand::new(&rig);
    let event = admin::async_event_request();
    let cids = (0..others)
        .map(|n| {
            admin
                .submit(event, CommandData::None, 70 + n, u64::MAX)
                .unwrap()
        })
        .collect();
    admin.ring();
    while hand.fetch().is_some() {}
    test(&mut admin, &mut hand, cids);
}

/// Returns queue `qid` of the controller to which the admin queue belongs.
fn queue(qid: Qid, admin: &Hand<'_>) -> Rig {
    let rig = Rig::of(qid, 4, 3, 1, 0);
    rig.state().init(admin.rig().identity(), 0);
    rig
}

/// Returns the deletion of queue 3.
fn deletion(admin: &Hand<'_>) -> QueueDeletion {
    QueueDeletion::new(queue(TARGET.0, admin).state().close(), GRACE)
}

fn abort() -> AbortAttempt {
    AbortAttempt::new(TARGET.0, TARGET.1, GRACE)
}

/// Makes a step of an attempt; no other completion may arrive.
fn step(
    attempt: &mut AbortAttempt,
    admin: &mut Admin<'_>,
    in_flight: bool,
    now_ns: u64,
) -> RecoveryStep {
    attempt.step(admin, in_flight, now_ns, |other| panic!("{other:?}"))
}

/// True if the machine wants to look again soon, and not after `deadline_ns`.
fn is_wait(step: RecoveryStep, now_ns: u64, deadline_ns: u64) -> bool {
    let RecoveryStep::Wait { until_ns } = step else {
        return false;
    };
    until_ns > now_ns && until_ns <= deadline_ns.min(now_ns + MS)
}

/// Begins an attempt at `START`: the Abort command that the controller got.
fn begin(attempt: &mut AbortAttempt, admin: &mut Admin<'_>, hand: &mut Hand<'_>) -> Sqe {
    assert!(is_wait(
        step(attempt, admin, true, START),
        START,
        START + GRACE
    ));
    let sqe = hand.fetch().expect("it was rung");
    assert!(hand.fetch().is_none(), "one Abort");
    assert_eq!(
        sqe.with_cid(Cid(0)),
        admin::abort(TARGET.0, TARGET.1),
        "NVMe Base 2.0c, 5.1 (Abort command)"
    );
    sqe
}

#[test]
fn a_command_that_has_ended_is_not_aborted() {
    with_admin(0, |admin, hand, _| {
        let mut attempt = abort();
        assert_eq!(step(&mut attempt, admin, false, START), RecoveryStep::Ended);
        assert_eq!(hand.look(), 0);
    });
}

#[test]
fn an_abort_is_over_when_the_command_itself_has_ended() {
    // The answer of Abort: it succeeded, did nothing (dword 0 bit 0) or failed.
    for (status, dw0) in [
        (Status::SUCCESS, 0),
        (Status::SUCCESS, 1),
        (Status::ABORT_LIMIT_EXCEEDED, 0),
    ] {
        with_admin(0, |admin, hand, _| {
            let mut attempt = abort();
            let sent = begin(&mut attempt, admin, hand);
            // The command has ended; the Abort is still to be answered.
            let now = START + MS;
            let waits = step(&mut attempt, admin, false, now);
            assert!(is_wait(waits, now, START + GRACE));
            hand.complete(sent.cid(), status, dw0);
            assert_eq!(step(&mut attempt, admin, false, now), RecoveryStep::Ended);
            assert_eq!(admin.in_flight(), 0);
        });
    }
}

/// The answer frees nothing: after it the command's completion has its own time limit.
#[test]
fn after_the_answer_the_command_has_its_grace() {
    for ends in [false, true] {
        with_admin(0, |admin, hand, _| {
            let mut attempt = abort();
            let sent = begin(&mut attempt, admin, hand);
            let answered = START + GRACE - 1;
            hand.complete(sent.cid(), Status::SUCCESS, 0);
            let waits = step(&mut attempt, admin, true, answered);
            let deadline = answered + GRACE;
            assert!(is_wait(waits, answered, deadline), "{waits:?}");
            let last = step(&mut attempt, admin, true, deadline - 5);
            assert_eq!(last, RecoveryStep::Wait { until_ns: deadline });
            if ends {
                assert_eq!(
                    step(&mut attempt, admin, false, deadline),
                    RecoveryStep::Ended
                );
                return;
            }
            for now in [deadline, deadline + MS] {
                let over = step(&mut attempt, admin, true, now);
                assert_eq!(over, RecoveryStep::ResetNeeded(ResetCause::NoCompletion));
            }
        });
    }
}

#[test]
fn an_abort_that_is_refused_leads_to_a_reset() {
    with_admin(0, |admin, hand, _| {
        let mut attempt = abort();
        let sent = begin(&mut attempt, admin, hand);
        hand.complete(sent.cid(), Status::ABORT_LIMIT_EXCEEDED, 0);
        let cause = ResetCause::Refused(Status::ABORT_LIMIT_EXCEEDED);
        for in_flight in [true, false] {
            let over = step(&mut attempt, admin, in_flight, START);
            assert_eq!(over, RecoveryStep::ResetNeeded(cause));
        }
    });
}

#[test]
fn an_abort_without_an_answer_leads_to_a_reset_at_its_deadline() {
    with_admin(0, |admin, hand, _| {
        let mut attempt = abort();
        begin(&mut attempt, admin, hand);
        let deadline = START + GRACE;
        let last = step(&mut attempt, admin, true, deadline - 5);
        assert_eq!(last, RecoveryStep::Wait { until_ns: deadline });
        let over = step(&mut attempt, admin, true, deadline);
        assert_eq!(over, RecoveryStep::ResetNeeded(ResetCause::AdminDead));
    });
}

#[test]
fn a_full_admin_queue_leads_to_a_reset() {
    with_admin(4, |admin, hand, _| {
        let over = step(&mut abort(), admin, true, START);
        assert_eq!(over, RecoveryStep::ResetNeeded(ResetCause::AdminFull));
        let over = deletion(hand).step(admin, START, |_| {});
        assert!(matches!(
            over,
            DeletionStep::ResetNeeded(ResetCause::AdminFull)
        ));
        assert_eq!(hand.look(), 0);
    });
}

#[test]
fn completions_of_others_are_handed_on_and_are_no_answers() {
    with_admin(2, |admin, hand, others| {
        let mut attempt = abort();
        let sent = begin(&mut attempt, admin, hand);
        let mut seen = Vec::new();
        hand.complete(others[0], Status::INTERNAL_ERROR, 9);
        let waits = attempt.step(admin, true, START, |done| seen.push(done.buffer));
        assert!(is_wait(waits, START, START + GRACE));
        hand.complete(others[1], Status::SUCCESS, 9);
        hand.complete(sent.cid(), Status::SUCCESS, 0);
        let ended = attempt.step(admin, false, START, |done| seen.push(done.buffer));
        assert_eq!((ended, &seen[..]), (RecoveryStep::Ended, &[70, 71][..]));
    });
    with_admin(1, |admin, hand, others| {
        let mut deletion = deletion(hand);
        let mut seen = Vec::new();
        hand.complete(others[0], Status::INTERNAL_ERROR, 9);
        let waits = deletion.step(admin, START, |done| seen.push(done.buffer));
        assert!(matches!(waits, DeletionStep::Wait { .. }), "{waits:?}");
        assert_eq!(seen, [70]);
    });
}

#[test]
fn violations_in_the_admin_queue_leads_to_a_reset() {
    with_admin(0, |admin, hand, _| {
        let mut attempt = abort();
        let sent = begin(&mut attempt, admin, hand);
        let mut cqe = hand.completion(sent.cid(), Status::SUCCESS, 0);
        cqe.cid = 0x777;
        hand.post(cqe);
        let over = step(&mut attempt, admin, true, START);
        assert_eq!(over, RecoveryStep::ResetNeeded(ResetCause::AdminDead));
    });
}

/// NVMe Base 2.0c, "Queue Deletion": the submission queue first, then the completion queue.
#[test]
fn a_pair_is_deleted_submission_queue_first() {
    with_admin(0, |admin, hand, _| {
        let (io, beside) = (queue(Qid(3), hand), queue(Qid(4), hand));
        let mut deletion = QueueDeletion::new(io.state().close(), GRACE);
        let mut now = START;
        let wait = |step, now: u64| {
            let DeletionStep::Wait { until_ns } = step else {
                panic!("{step:?}")
            };
            assert!(until_ns > now && until_ns <= now + MS);
        };
        wait(deletion.step(admin, now, |_| {}), now);
        let sent = hand.fetch().unwrap();
        assert_eq!(sent.with_cid(Cid(0)), admin::delete_io_sq(Qid(3)));
        // Just in time.
        now += GRACE - 1;
        hand.complete(sent.cid(), Status::SUCCESS, 0);
        let DeletionStep::Emptied(proof) = deletion.step(admin, now, |_| {}) else {
            panic!("its commands are free")
        };
        assert_eq!(beside.shared().recover(&proof), None);
        assert_eq!(io.shared().recover(&proof), Some(0));
        assert_eq!(io.shared().recover(&proof), None, "once");
        assert!(
            hand.fetch().is_none(),
            "the caller has commands to reclaim first"
        );
        wait(deletion.step(admin, now, |_| {}), now);
        let sent = hand.fetch().unwrap();
        assert_eq!(sent.with_cid(Cid(0)), admin::delete_io_cq(Qid(3)));
        now += GRACE - 1;
        hand.complete(sent.cid(), Status::SUCCESS, 0);
        for _ in 0..2 {
            let done = deletion.step(admin, now, |_| {});
            assert!(matches!(done, DeletionStep::Done), "{done:?}");
        }
        assert_eq!(hand.look(), 0);
    });
}

#[test]
fn a_deletion_that_fails_leads_to_a_reset() {
    for second in [false, true] {
        for answers in [false, true] {
            with_admin(0, |admin, hand, _| {
                let mut deletion = deletion(hand);
                deletion.step(admin, START, |_| {});
                if second {
                    hand.serve();
                    deletion.step(admin, START, |_| {});
                    deletion.step(admin, START, |_| {});
                }
                let sent = hand.fetch().unwrap();
                let mut now = START;
                let cause = if answers {
                    hand.complete(sent.cid(), Status::INVALID_QID, 0);
                    ResetCause::Refused(Status::INVALID_QID)
                } else {
                    let last = deletion.step(admin, START + GRACE - 5, |_| {});
                    let DeletionStep::Wait { until_ns } = last else {
                        panic!("{last:?}")
                    };
                    assert_eq!(until_ns, START + GRACE);
                    now = until_ns;
                    ResetCause::AdminDead
                };
                for _ in 0..2 {
                    let over = deletion.step(admin, now, |_| {});
                    let DeletionStep::ResetNeeded(why) = over else {
                        panic!("{over:?}")
                    };
                    assert_eq!(why, cause, "second {second}");
                }
            });
        }
    }
}
