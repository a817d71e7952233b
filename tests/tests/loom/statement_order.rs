//! One command handled by several threads: the thread that places does not ring, the thread that rings does not drain,
//! and a command that is submitted before a reap is published by the ring after it. These models test the order of
//! statements, not the orders of single operations alone.

use loom::thread;
use nvme_core::DrainResult;
use nvme_core::group::LoneThread;
use nvme_core::spec::Status;
use nvme_core::{CommandOutcome, MemberCommand};
use nvme_tests::hand::Rig;
use nvme_tests::model::{self, Bound, check, controller};
use std::sync::Arc;

#[test]
fn one_places_and_another_rings_and_drains() {
    check(
        "a command that another thread rang for and drained has ended for who placed it",
        Bound::Preemptions(1),
        || {
            let rig = Arc::new(Rig::new(2, 1, 1, 0));
            let device = controller(&rig, 1);
            let other = rig.clone();
            let other = thread::spawn(move || {
                let queue = other.shared();
                loop {
                    queue.ring(&LoneThread);
                    if queue.drain(&LoneThread) == DrainResult::Took(1) {
                        break;
                    }
                    assert_eq!(queue.fault(), None);
                    thread::yield_now();
                }
                assert_eq!(queue.fault(), None);
            });
            let queue = rig.shared();
            let token = queue.place(&LoneThread, model::command(0, 0)).unwrap();
            other.join().unwrap();
            let done = CommandOutcome::Completed(Status::SUCCESS);
            assert_eq!(queue.poll(&token), Some((done, 0)));
            device.join().unwrap();
        },
    );
}

#[test]
fn one_rings_and_another_drains() {
    check(
        "whoever drains a completion sees that its command was rung for",
        Bound::Preemptions(1),
        || {
            let rig = Arc::new(Rig::new(2, 1, 1, 0));
            let queue = rig.shared();
            let token = queue.place(&LoneThread, model::command(0, 0)).unwrap();
            let device = controller(&rig, 1);
            let other = rig.clone();
            let other = thread::spawn(move || {
                let queue = other.shared();
                while queue.drain(&LoneThread) != DrainResult::Took(1) {
                    thread::yield_now();
                }
                assert_eq!(queue.fault(), None, "an honest completion was refused");
            });
            queue.ring(&LoneThread);
            other.join().unwrap();
            assert!(queue.poll(&token).is_some());
            device.join().unwrap();
        },
    );
}

#[test]
fn what_is_submitted_before_a_single_reap_is_published_by_the_ring_after_it() {
    check(
        "an entry submitted between a doorbell and a reap of one is whole when its own doorbell rings",
        Bound::Preemptions(1),
        || {
            let rig = Arc::new(Rig::new(4, 3, 0, 0));
            let device = controller(&rig, 2);
            let mut queue = rig.collective(LoneThread);
            queue.submit(true, |_| plain(0), 1 << 30).unwrap();
            queue.ring();
            queue.submit(true, |_| plain(1), 1 << 30).unwrap();
            while queue.reap::<1>(|_| ()).unwrap() == 0 {
                thread::yield_now();
            }
            queue.ring();
            while queue.in_flight() > 0 {
                if queue.reap::<1>(|_| ()).unwrap() == 0 {
                    thread::yield_now();
                }
            }
            device.join().unwrap();
        },
    );
}

fn plain(number: u32) -> MemberCommand<'static> {
    model::command(number, number).wanting_dw0(false)
}
