//! An Abort that races the completion of its command, under loom.

use loom::thread;
use nvme_core::recovery::{AbortAttempt, RecoveryStep};
use nvme_core::spec::{Nsid, Sqe, Status};
use nvme_core::sync::spin;
use nvme_core::{CommandData, CommandOutcome, CommandSlot, QueuePair};
use nvme_tests::hand::{Hand, QID, Rig};
use nvme_tests::model::{Bound, check};
use std::sync::Arc;

fn answer(rig: &Arc<Rig>, status: Status) -> thread::JoinHandle<()> {
    let rig = rig.clone();
    thread::spawn(move || {
        let mut hand = Hand::new(&rig);
        let sqe = loop {
            match hand.fetch() {
                Some(sqe) => break sqe,
                None => spin(),
            }
        };
        hand.complete(sqe.cid(), status, 0);
    })
}

/// A thread serves each queue, so the two answers arrive in any order.
#[test]
fn an_answer_to_abort_frees_nothing() {
    check(
        "an aborted command gives its buffer back once, with its own completion, whichever answer comes first",
        Bound::Preemptions(1),
        || {
            let (io_rig, admin_rig) = (
                Arc::new(Rig::new(2, 1, 0, 0)),
                Arc::new(Rig::new(2, 1, 0, 0)),
            );
            let slots = || -> Vec<CommandSlot<u64>> { vec![CommandSlot::new()] };
            let mut io = QueuePair::new(io_rig.identity(), QID, io_rig.memory(), slots());
            let mut admin = QueuePair::new(io_rig.identity(), QID, admin_rig.memory(), slots());
            let devices = [
                answer(&io_rig, Status::ABORT_REQUESTED),
                answer(&admin_rig, Status::SUCCESS),
            ];
            let sqe = Sqe::new(2, Nsid(1));
            let cid = io.submit(sqe, CommandData::None, 77, 0).unwrap();
            io.ring();
            let mut attempt = AbortAttempt::new(QID, cid, 1_000_000);
            let mut ended = None;
            for now_ns in 0.. {
                if let Some(done) = io.poll().unwrap() {
                    assert_eq!((done.cid, done.buffer), (cid, 77));
                    assert_eq!(ended.replace(done.outcome), None, "it ended twice");
                }
                match attempt.step(&mut admin, io.is_in_flight(cid), now_ns, |_| ()) {
                    RecoveryStep::Ended => break,
                    RecoveryStep::Wait { .. } => spin(),
                    RecoveryStep::ResetNeeded(cause) => panic!("{cause:?}"),
                }
            }
            assert_eq!(
                ended,
                Some(CommandOutcome::Completed(Status::ABORT_REQUESTED))
            );
            assert_eq!(io.in_flight(), 0);
            // An Abort that was never sent, because the command had ended, is not answered.
            if admin.in_flight() == 0 {
                let sqe = Sqe::new(8, Nsid(0));
                let _ = admin.submit(sqe, CommandData::None, 0, 0);
                admin.ring();
            }
            for device in devices {
                device.join().unwrap();
            }
        },
    );
}
