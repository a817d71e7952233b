//! The collective queue under loom: how lanes learn of each other's slots and of faults. Ranks and slots are chosen so
//! that one lane is the first reader of another lane's write.

use loom::thread;
use nvme_core::group::{LoneThread, ThreadGroup};
use nvme_core::spec::{Cid, Iova, Nsid, Sqe, Status};
use nvme_core::sync::{overwriting, spin};
use nvme_core::{CollectiveQueue, CommandData, ControllerFault, MemberCommand, SubmitError};
use nvme_tests::hand::{Hand, Rig};
use nvme_tests::model::{Bound, Stage, check, controller};
use nvme_tests::team::Team;
use std::cell::Cell;
use std::sync::Arc;

const NEVER: u64 = 1 << 30;
/// Words of the state that were never written then name impossible slots, which a model notices.
const START: u32 = 8;

fn command(number: u32) -> MemberCommand<'static> {
    let mut sqe = Sqe::new(2, Nsid(1));
    (sqe.cdw10, sqe.cdw15) = (number, !number);
    MemberCommand::new(sqe, CommandData::None, number)
}

/// Returns a thread that runs `lane` as this member.
fn lane<R: 'static>(
    rig: &Arc<Rig>,
    member: Team,
    lane: impl FnOnce(&Rig, Team) -> R + 'static,
) -> thread::JoinHandle<R> {
    let rig = rig.clone();
    thread::spawn(move || lane(&rig, member))
}

/// Runs `work` as each member of a team; the leader is this thread.
fn team(size: usize, rig: &Arc<Rig>, work: fn(&Rig, Team)) {
    let mut members = Team::of(size).into_iter();
    let leader = members.next().unwrap();
    let others: Vec<_> = members.map(|member| lane(rig, member, work)).collect();
    work(rig, leader);
    others.into_iter().for_each(|lane| lane.join().unwrap());
}

/// Reaps until no command is in flight.
fn end_all<G: ThreadGroup>(queue: &mut CollectiveQueue<'_, G>) {
    while queue.in_flight() > 0 {
        let taken = queue.reap::<1>(|end| assert_eq!(end.status, Status::SUCCESS));
        if taken.unwrap() == 0 {
            spin();
        }
    }
}

#[test]
fn what_one_lane_freed_another_takes() {
    check(
        "two lanes and three slots: a lane takes the slot that the other one has freed, and nobody else's",
        Bound::Staged,
        || {
            let rig = Arc::new(Rig::new(4, 3, 0, START));
            let device = controller(&rig, 4);
            team(2, &rig, |rig, member| {
                let mut queue = rig.collective(member.clone());
                for round in 0..2 {
                    let number = 10 * round + member.rank();
                    queue.submit(true, |_| command(number), NEVER).unwrap();
                    queue.ring();
                    end_all(&mut queue);
                }
            });
            device.join().unwrap();
        },
    );
}

#[test]
fn a_slot_that_was_put_back_is_taken_by_another_lane() {
    check(
        "a lane whose buffer does not fit puts its slot back: the next lane takes that one",
        Bound::Staged,
        || {
            let rig = Arc::new(Rig::new(4, 2, 0, START));
            let device = controller(&rig, 2);
            team(2, &rig, |rig, member| {
                let mut queue = rig.collective(member.clone());
                let odd = CommandData::Contiguous {
                    iova: Iova(1),
                    len: 4096,
                };
                let first = command(member.rank());
                let first = match member.rank() {
                    0 => first.with_data(odd),
                    _ => first,
                };
                let placed = queue.submit(true, |_| first, NEVER);
                assert_eq!(matches!(placed, Err(SubmitError::Map(_))), member.leads());
                // One slot is free: the one that was put back.
                let second = queue.submit(!member.leads(), |_| command(2), NEVER);
                assert_eq!(second.unwrap().is_some(), !member.leads());
                assert_eq!(queue.in_flight(), 2);
                queue.ring();
                end_all(&mut queue);
            });
            device.join().unwrap();
        },
    );
}

#[test]
fn a_team_takes_over_from_another_with_its_leader() {
    check(
        "members who take a queue over see the commands that the others have placed, whoever did",
        Bound::Staged,
        || {
            let rig = Arc::new(Rig::new(4, 3, 0, START));
            let (first, second) = (Team::of(3), Team::of(3));
            let pairs = first
                .into_iter()
                .zip([0, 2, 1].map(|rank| second[rank].clone()));
            let mut lanes: Vec<_> = pairs
                .map(|(before, after)| {
                    lane(&rig, before, move |rig, before| {
                        let mut queue = rig.collective(before.clone());
                        let number = before.rank();
                        queue.submit(true, |_| command(number), NEVER).unwrap();
                        queue.suspend();
                        // The other two have each other's ranks now.
                        let queue = rig.collective(after);
                        assert_eq!(queue.in_flight(), 3);
                    })
                })
                .collect();
            lanes.drain(..).for_each(|lane| lane.join().unwrap());
        },
    );
}

#[test]
fn violations_that_one_lane_reads_refuses_all() {
    check(
        "the controller posts a protocol violation that one lane reads: every lane hears of it in the same reap",
        Bound::Staged,
        || {
            // The rig is never freed: its members pass from threads that end to other threads.
            let rig: &'static Rig = Box::leak(Box::new(Rig::new(4, 3, 0, START)));
            let mut queue = rig.collective(LoneThread);
            queue.submit(true, |_| command(0), NEVER).unwrap();
            queue.ring();
            queue.suspend();
            let mut hand = Hand::new(rig);
            let sqe = hand.fetch().unwrap();
            hand.complete(sqe.cid(), Status::SUCCESS, 0);
            hand.complete(Cid(0x700), Status::SUCCESS, 0);
            // A member that looked at the fault before does not look again; a thread of loom that has waited since sees
            // the new value.
            let resumed = Team::of(2)
                .into_iter()
                .map(|member| thread::spawn(move || rig.collective(member)));
            let queues: Vec<_> = resumed.collect::<Vec<_>>();
            let queues = queues.into_iter().map(|thread| thread.join().unwrap());
            let queues: Vec<_> = queues.collect();
            let lanes: Vec<_> = queues
                .into_iter()
                .map(|mut queue| thread::spawn(move || queue.reap::<1>(|_| ())))
                .collect();
            for lane in lanes {
                let found = lane.join().unwrap();
                assert_eq!(found, Err(ControllerFault::UnknownCid(Cid(0x700))));
            }
        },
    );
}

/// Two lanes reap, `ENTRIES` a lane; then the controller overwrites the entries that the head doorbell has freed.
fn reaped_and_overwritten<const ENTRIES: usize>(wants_dw0: bool) {
    let (rig, stage) = (Arc::new(Rig::new(4, 3, 0, START)), Stage::default());
    let mut queue = rig.collective(LoneThread);
    for number in [0, 1] {
        let one = command(number).wanting_dw0(wants_dw0);
        queue.submit(true, |_| one, NEVER).unwrap();
    }
    queue.ring();
    queue.suspend();
    let mut hand = Hand::new(&rig);
    hand.serve();
    let lanes = Team::of(2).into_iter().map(|member| {
        let stage = stage.clone();
        lane(&rig, member, move |rig, member| {
            let mut queue = rig.collective(member.clone());
            let dw0 = |tag| if wants_dw0 { tag } else { 0 };
            let reaped = queue.reap::<ENTRIES>(|end| assert_eq!(end.dw0, dw0(end.tag)));
            assert_eq!(reaped, Ok(2));
            if member.leads() {
                stage.reach(1);
            }
        })
    });
    let lanes: Vec<_> = lanes.collect();
    stage.wait(1);
    overwriting(|| hand.scribble());
    lanes.into_iter().for_each(|lane| lane.join().unwrap());
}

#[test]
fn both_lanes_have_read_before_the_head_doorbell() {
    check(
        "two lanes reap and read dword 0: the head doorbell comes after the reads of both",
        Bound::Staged,
        || reaped_and_overwritten::<1>(true),
    );
    check("as before, two entries a lane", Bound::Staged, || {
        reaped_and_overwritten::<2>(true)
    });
    check("as before, without dword 0", Bound::Staged, || {
        reaped_and_overwritten::<2>(false)
    });
}

#[test]
fn a_command_that_is_completed_twice() {
    check(
        "the controller completes a command twice: of two lanes that read one each, one ends it, and both hear of the other",
        Bound::Staged,
        || {
            let rig = Arc::new(Rig::new(4, 3, 0, START));
            let mut queue = rig.collective(LoneThread);
            queue.submit(true, |_| command(0), NEVER).unwrap();
            queue.ring();
            queue.suspend();
            let mut hand = Hand::new(&rig);
            let cid = hand.fetch().unwrap().cid();
            hand.complete(cid, Status::SUCCESS, 0);
            hand.complete(cid, Status::SUCCESS, 0);
            let lanes = Team::of(2).into_iter().map(|member| {
                lane(&rig, member, move |rig, member| {
                    let mut queue = rig.collective(member);
                    let mut ends = 0;
                    let reaped = queue.reap::<1>(|_| ends += 1);
                    assert_eq!(reaped, Err(ControllerFault::UnknownCid(cid)));
                    ends
                })
            });
            let lanes: Vec<_> = lanes.collect();
            let ends: u32 = lanes.into_iter().map(|lane| lane.join().unwrap()).sum();
            assert_eq!(ends, 1);
        },
    );
}

#[test]
fn a_late_command_that_another_lane_reaps() {
    check(
        "a deadline is told once, by the lane that looks at the slot, and the end as late by the one that reads it",
        Bound::Staged,
        || {
            let rig = Arc::new(Rig::new(4, 3, 0, START));
            let device = rig.clone();
            let device = thread::spawn(move || {
                let mut hand = Hand::new(&device);
                while hand.look() < 2 {
                    spin();
                }
                // The first lane looks at slot 0, and the second lane reads its end.
                let fetched = [hand.fetch().unwrap(), hand.fetch().unwrap()];
                for sqe in fetched.into_iter().rev() {
                    hand.complete(sqe.cid(), Status::SUCCESS, 0);
                }
            });
            team(2, &rig, |rig, member| {
                let mut queue = rig.collective(member.clone());
                queue.submit(true, |_| command(member.rank()), 0).unwrap();
                queue.ring();
                let told = Cell::new(0);
                let late = |tag| {
                    assert_eq!(tag, member.rank());
                    told.set(told.get() + 1);
                };
                assert_eq!(queue.expire(NEVER, late), 2);
                assert_eq!(queue.expire(NEVER, late), 0);
                assert_eq!(told.get(), 1);
                while queue.in_flight() > 0 {
                    let taken = queue.reap::<1>(|end| assert!(end.late, "{end:?}"));
                    if taken.unwrap() == 0 {
                        spin();
                    }
                }
            });
            device.join().unwrap();
        },
    );
}
