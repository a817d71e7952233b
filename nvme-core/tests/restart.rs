//! A submission queue after a restart, as after Create I/O Submission Queue.

use nvme_core::SubmissionQueue;
use nvme_core::mem::{DoorbellRegister, SqCell, SqRing};
use nvme_core::spec::{Iova, Nsid, Sqe};
use nvme_core::sync::{AtomicU32, Order, Scope};

/// Value of a doorbell that was not rung since.
const QUIET: u32 = 77;

/// After a restart, as many entries as before lead to the same doorbell value: the queue must ring for them although
/// the value repeats.
#[test]
fn a_restarted_queue_rings_for_as_many_as_before() {
    let cells: [SqCell; 8] = Default::default();
    let bell = AtomicU32::new(QUIET);
    let mut sq = SubmissionQueue::new(SqRing::new(&cells, Iova(0)), DoorbellRegister::new(&bell));
    for count in 1..8 {
        for _ in 0..count {
            assert!(sq.push(Sqe::new(0, Nsid(1))));
        }
        sq.ring();
        assert_eq!(bell.load(Order::Relaxed, Scope::Sys), count);
        sq.restart();
        bell.store(QUIET, Order::Relaxed, Scope::Sys);
        sq.ring();
        assert_eq!(
            bell.load(Order::Relaxed, Scope::Sys),
            QUIET,
            "nothing is new"
        );
        for _ in 0..count {
            assert!(sq.push(Sqe::new(0, Nsid(2))));
        }
        assert!(!sq.is_published(0), "not rung for since the restart");
        sq.ring();
        assert_eq!(bell.load(Order::Relaxed, Scope::Sys), count);
        sq.restart();
        bell.store(QUIET, Order::Relaxed, Scope::Sys);
    }
}
