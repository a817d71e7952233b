//! One doorbell publishes a batch: whatever tail the controller sees, all entries before it are complete.

use loom::sync::Arc;
use loom::thread;
use nvme_core::SubmissionQueue;
use nvme_core::mem::{DoorbellRegister, SqCell, SqRing};
use nvme_core::spec::{Iova, Nsid, Sqe};
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_tests::model::{Bound, check};

fn command(n: u32) -> Sqe {
    let mut sqe = Sqe::new(n as u8, Nsid(n));
    (sqe.cdw3, sqe.mptr, sqe.cdw15) = (n, u64::from(n), n);
    sqe
}

#[test]
fn a_tail_never_runs_ahead_of_its_entries() {
    check(
        "whatever tail the controller sees, the entries before it are complete",
        Bound::Exhaustive,
        || {
            let shared: Arc<([SqCell; 3], AtomicU32)> = Arc::new(Default::default());
            let device = Arc::clone(&shared);
            let device = thread::spawn(move || {
                let (cells, bell) = &*device;
                // A controller may look at any time, so every tail that it sees has to be right. Two looks are tried.
                for _ in 0..2 {
                    // Acquire: pairs with the release fence of the driver's doorbell.
                    let tail = bell.load(Order::Acquire, Scope::Sys);
                    for index in 0..tail {
                        assert_eq!(cells[index as usize].load(), command(index + 1));
                    }
                }
            });
            let (cells, bell) = &*shared;
            let mut sq =
                SubmissionQueue::new(SqRing::new(cells, Iova(0)), DoorbellRegister::new(bell));
            assert!(sq.push(command(1)));
            sq.ring();
            assert!(sq.push(command(2)));
            sq.ring();
            device.join().unwrap();
        },
    );
}
