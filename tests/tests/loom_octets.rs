//! Eight lanes write an entry together, under loom: four in each of two threads.
#![cfg(loom)]

use loom::thread;
use nvme_core::group::{Alone, Group};
use nvme_core::spec::{Nsid, Sqe};
use nvme_core::{Command, Data};
use nvme_tests::hand::{Hand, Rig};
use nvme_tests::model::{Bound, Stage, check, command};
use nvme_tests::team::{Team, in_turns};
use std::sync::Arc;

/// Starts a team of eight, in two threads.
fn octet(
    rig: &Arc<Rig>,
    stage: &Stage,
    lane: fn(&Rig, &Team, &Stage),
) -> [thread::JoinHandle<()>; 2] {
    let mut low = Team::of(8);
    let high = low.split_off(4);
    [low, high].map(|half| {
        let (rig, stage) = (rig.clone(), stage.clone());
        thread::spawn(move || {
            let lanes = half.into_iter().map(|member| {
                let (rig, stage) = (rig.clone(), stage.clone());
                Box::new(move || lane(&rig, &member, &stage)) as Box<dyn FnOnce()>
            });
            in_turns(lanes);
        })
    })
}

/// Fetches what the doorbell shows, whole.
fn fetch_all(hand: &mut Hand<'_>) -> u32 {
    let waiting = hand.look();
    for _ in 0..waiting {
        let sqe = hand.fetch().unwrap();
        assert_eq!(sqe.cdw15, !sqe.cdw10, "half of an entry was fetched");
    }
    waiting
}

#[test]
fn eight_lanes_publish_for_one_who_rings() {
    check(
        "eight lanes write eight entries, another thread rings: no entry is fetched before all its words are there",
        Bound::Staged,
        || {
            let (rig, stage) = (Arc::new(Rig::new(16, 8, 8, 0)), Stage::default());
            let lanes = octet(&rig, &stage, |rig, member, stage| {
                let rank = member.rank();
                let _token = rig.shared().place(member, command(rank, rank)).unwrap();
                if member.leads() {
                    stage.reach(1);
                }
            });
            let (device, ready) = (rig.clone(), stage.clone());
            // Not this thread, which has seen the marks when it made them: it would wait until it sees more.
            let device = thread::spawn(move || {
                ready.wait(1);
                device.shared().ring(&Alone);
                fetch_all(&mut Hand::new(&device))
            });
            lanes.into_iter().for_each(|lane| lane.join().unwrap());
            let early = device.join().unwrap();
            rig.shared().ring(&Alone);
            let mut hand = Hand::resumed(&rig, early, 0);
            assert_eq!(early + fetch_all(&mut hand), 8);
        },
    );
}

#[test]
fn eight_lanes_publish_and_ring() {
    check(
        "eight lanes write five entries, their leader rings: no entry is fetched before all its words are there",
        Bound::Staged,
        || {
            let (rig, stage) = (Arc::new(Rig::new(16, 8, 0, 0)), Stage::default());
            let lanes = octet(&rig, &stage, |rig, member, stage| {
                let mut queue = rig.collective(member.clone());
                let rank = member.rank();
                let mut sqe = Sqe::new(2, Nsid(1));
                (sqe.cdw10, sqe.cdw15) = (rank, !rank);
                let command = Command::new(sqe, Data::None, rank);
                queue.submit(rank < 5, |_| command, 1 << 30).unwrap();
                queue.ring();
                if member.leads() {
                    stage.reach(1);
                }
            });
            stage.wait(1);
            let mut hand = Hand::new(&rig);
            let early = fetch_all(&mut hand);
            lanes.into_iter().for_each(|lane| lane.join().unwrap());
            assert_eq!(early + fetch_all(&mut hand), 5);
        },
    );
}
