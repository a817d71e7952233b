//! A controller that ignores the head doorbell: it overwrites completions that were read and not freed.

use nvme_core::group::LoneThread;
use nvme_core::spec::{Nsid, Sqe, Status};
use nvme_core::{CommandData, CommandOutcome, DrainResult, MemberCommand, SubmitError};
use nvme_tests::hand::{Hand, Rig};

const SLOTS: u32 = 7;

/// A look takes only as many completions as the count of unfreed entries has room for, so that the count never
/// overflows, and every command has its own end.
#[test]
fn completions_past_what_was_given_back_wait_for_it() {
    for start in [0, 0u32.wrapping_sub(9)] {
        let rig = Rig::new(8, SLOTS, 64, start);
        let queue = rig.shared();
        let mut hand = Hand::new(&rig);
        let mut tokens = Vec::new();
        for turn in 0..64 {
            let sqe = Sqe::new(2, Nsid(1));
            match queue.place(
                &LoneThread,
                MemberCommand::new(sqe, CommandData::None, turn),
            ) {
                Ok(token) => tokens.push(token),
                Err(error) => assert_eq!(error, SubmitError::QueueFull),
            }
            queue.ring(&LoneThread);
            if turn % SLOTS != SLOTS - 1 {
                continue;
            }
            complete_all(&mut hand);
            // The queue is drained once, so that the number of unfreed entries grows.
            assert_ne!(queue.drain(&LoneThread), DrainResult::Busy);
        }
        complete_all(&mut hand);
        // Each look gives one quarter of the ring back.
        for _ in 0..64 {
            queue.drain(&LoneThread);
        }
        let done = Some((CommandOutcome::Completed(Status::SUCCESS), 0));
        assert!(tokens.len() > 20, "{} commands", tokens.len());
        for token in &tokens {
            assert_eq!(queue.poll(token), done, "start {start}, {token:?}");
        }
        assert_eq!(queue.fault(), None);
    }
}

fn complete_all(hand: &mut Hand<'_>) {
    while let Some(sqe) = hand.fetch() {
        let cqe = hand.completion(sqe.cid(), Status::SUCCESS, 0);
        hand.post_anyway(cqe);
    }
}
