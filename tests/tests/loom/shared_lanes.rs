//! The shared queue under loom, used by two lanes that act in step.

use loom::thread;
use nvme_core::group::{LoneThread, ThreadGroup};
use nvme_core::sync::spin;
use nvme_tests::hand::{Hand, Rig};
use nvme_tests::model::{Bound, check, command, finish, place, serve};
use nvme_tests::team::Team;
use std::sync::Arc;

/// Waits for a tail doorbell, then fetches all entries up to it and checks that each is complete.
fn glance(rig: &Rig) {
    let mut hand = Hand::new(rig);
    while hand.look() == 0 {
        spin();
    }
    for _ in 0..hand.look() {
        let sqe = hand.fetch().unwrap();
        assert_eq!(sqe.cdw15, !sqe.cdw10, "half of an entry was fetched");
    }
}

/// Runs `lane` as each of two members; the first is this thread. What each returned.
fn two_lanes<R: 'static>(rig: &Arc<Rig>, lane: fn(&Rig, &Team) -> R) -> [R; 2] {
    let mut members = Team::of(2);
    let (other, others) = (members.remove(1), rig.clone());
    let other = thread::spawn(move || lane(&others, &other));
    let mine = lane(rig, &members[0]);
    [mine, other.join().unwrap()]
}

#[test]
fn two_lanes_submit() {
    check(
        "two lanes share a claim, a position and a doorbell: no entry is fetched before it is complete",
        Bound::Preemptions(2),
        || {
            let rig = Arc::new(Rig::new(4, 3, 2, 0));
            let device = rig.clone();
            let device = thread::spawn(move || glance(&device));
            let cids = two_lanes(&rig, |rig, member| {
                let queue = rig.shared();
                let token = queue.place(member, command(member.rank(), member.rank()));
                queue.ring(member);
                token.unwrap().cid()
            });
            device.join().unwrap();
            assert_ne!(cids[0], cids[1]);
        },
    );
}

#[test]
fn two_lanes_ring_for_another() {
    check(
        "two lanes ring for what another thread placed: no entry is fetched before it is complete",
        Bound::Preemptions(0),
        || {
            let rig = Arc::new(Rig::new(4, 3, 2, 0));
            let device = rig.clone();
            let device = thread::spawn(move || glance(&device));
            let other = rig.clone();
            let other = thread::spawn(move || {
                // Each lane finds one of these two commands.
                for cell in [0, 1] {
                    let _token = other
                        .shared()
                        .place(&LoneThread, command(cell, cell))
                        .unwrap();
                }
            });
            two_lanes(&rig, |rig, member| rig.shared().ring(member));
            other.join().unwrap();
            // Whatever was published after the lanes looked.
            rig.shared().ring(&LoneThread);
            device.join().unwrap();
        },
    );
}

#[test]
fn two_lanes_drain() {
    check(
        "two lanes drain together: results are whole, and entries are given back when both have read",
        Bound::Preemptions(2),
        || {
            let rig = Arc::new(Rig::new(4, 3, 2, 0));
            let tokens = [0, 1].map(|cell| place(&rig.shared(), cell, cell));
            let device = rig.clone();
            let device = thread::spawn(move || {
                let mut hand = Hand::new(&device);
                serve(&mut hand, 2);
                spin();
                hand.scribble();
            });
            two_lanes(&rig, |rig, member| {
                rig.shared().drain(member);
                rig.shared().drain(member);
            });
            device.join().unwrap();
            for (token, number) in tokens.into_iter().zip(0..) {
                finish(&rig.shared(), &token, number);
            }
        },
    );
}
