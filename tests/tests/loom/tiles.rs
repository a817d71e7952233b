//! Eight lanes write an entry together, under loom: four in each of two threads.

use loom::thread;
use nvme_core::group::{LoneThread, ThreadGroup};
use nvme_core::spec::{Nsid, Sqe};
use nvme_core::sync::spin;
use nvme_core::{CollectiveQueue, CommandData, DrainResult, MemberCommand};
use nvme_tests::hand::{Hand, Rig};
use nvme_tests::model::{Bound, Stage, check, command, controller, finish, serve};
use nvme_tests::team::{Team, in_turns};
use std::sync::Arc;

const NEVER: u64 = 1 << 30;

/// Starts a team of eight, in two threads.
fn tile(
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

/// Reaps until nothing is in flight, one or two entries a lane at a time.
fn end_all<G: ThreadGroup>(queue: &mut CollectiveQueue<'_, G>) {
    while queue.in_flight() > 0 {
        let one = queue.reap::<1>(|end| assert_eq!(end.dw0, end.tag)).unwrap();
        let two = queue.reap::<2>(|end| assert_eq!(end.dw0, end.tag)).unwrap();
        if one + two == 0 {
            spin();
        }
    }
}

fn numbered(number: u32) -> MemberCommand<'static> {
    let mut sqe = Sqe::new(2, Nsid(1));
    (sqe.cdw10, sqe.cdw15) = (number, !number);
    MemberCommand::new(sqe, CommandData::None, number).wanting_dw0(true)
}

/// Fetches every entry that the doorbell shows, and checks that it is complete.
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
            let lanes = tile(&rig, &stage, |rig, member, stage| {
                let rank = member.rank();
                let _token = rig.shared().place(member, command(rank, rank)).unwrap();
                if member.leads() {
                    stage.reach(1);
                }
            });
            let (device, ready) = (rig.clone(), stage.clone());
            // This thread does not ring, because it has seen the marks when it made them: it would wait until it sees
            // more.
            let device = thread::spawn(move || {
                ready.wait(1);
                device.shared().ring(&LoneThread);
                fetch_all(&mut Hand::new(&device))
            });
            lanes.into_iter().for_each(|lane| lane.join().unwrap());
            let early = device.join().unwrap();
            rig.shared().ring(&LoneThread);
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
            let lanes = tile(&rig, &stage, |rig, member, stage| {
                let mut queue = rig.collective(member.clone());
                let rank = member.rank();
                queue.submit(rank < 5, |_| numbered(rank), NEVER).unwrap();
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

#[test]
fn eight_lanes_reap_round_the_ring() {
    check(
        "eight lanes reap from the middle of a line on, twice round the ring: each completion is told once, with its own dword 0",
        Bound::Staged,
        || {
            let (rig, stage) = (Arc::new(Rig::new(16, 8, 0, 32)), Stage::default());
            let mut queue = rig.collective(LoneThread);
            for number in 0..3 {
                queue.submit(true, |_| numbered(number), NEVER).unwrap();
            }
            queue.ring();
            Hand::new(&rig).serve();
            end_all(&mut queue);
            queue.suspend();
            let device = rig.clone();
            let device = thread::spawn(move || serve(&mut Hand::resumed(&device, 3, 3), 32));
            let lanes = tile(&rig, &stage, |rig, member, _| {
                let mut queue = rig.collective(member.clone());
                for round in 1..5 {
                    let number = 8 * round + member.rank();
                    queue.submit(true, |_| numbered(number), NEVER).unwrap();
                    queue.ring();
                    end_all(&mut queue);
                }
            });
            lanes.into_iter().for_each(|lane| lane.join().unwrap());
            device.join().unwrap();
        },
    );
}

#[test]
fn eight_lanes_submit_and_drain() {
    check(
        "eight lanes of a shared queue submit, ring and drain together: each command ends once, in its own cell",
        Bound::Staged,
        || {
            let (rig, stage) = (Arc::new(Rig::new(16, 8, 8, 0)), Stage::default());
            let device = controller(&rig, 8);
            let lanes = tile(&rig, &stage, |rig, member, _| {
                let queue = rig.shared();
                let rank = member.rank();
                let token = queue.place(member, command(rank, rank)).unwrap();
                queue.ring(member);
                let mut left = 8;
                while left > 0 {
                    match queue.drain(member) {
                        DrainResult::Took(taken @ 1..) => left -= taken,
                        _ => spin(),
                    }
                }
                finish(&queue, &token, rank);
            });
            lanes.into_iter().for_each(|lane| lane.join().unwrap());
            device.join().unwrap();
        },
    );
}
