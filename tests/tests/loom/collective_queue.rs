//! The collective queue under loom: lanes that act in step, and a controller.

use loom::thread;
use nvme_core::group::{LoneThread, ThreadGroup};
use nvme_core::spec::{Nsid, Sqe, Status};
use nvme_core::sync::spin;
use nvme_core::{CollectiveQueue, CommandData, MemberCommand};
use nvme_tests::hand::{Hand, Rig};
use nvme_tests::model::{Bound, check, controller};
use nvme_tests::team::Team;
use std::sync::Arc;

const NEVER: u64 = 1 << 30;

fn command(number: u32, wants_dw0: bool) -> MemberCommand<'static> {
    let mut sqe = Sqe::new(2, Nsid(1));
    (sqe.cdw10, sqe.cdw15) = (number, !number);
    MemberCommand::new(sqe, CommandData::None, number).wanting_dw0(wants_dw0)
}

/// Runs `lane` as each member of a team; the first is this thread.
fn team(size: usize, rig: &Arc<Rig>, lane: fn(&Rig, Team)) {
    let mut members = Team::of(size).into_iter();
    let leader = members.next().unwrap();
    let others: Vec<_> = members
        .map(|member| {
            let rig = rig.clone();
            thread::spawn(move || lane(&rig, member))
        })
        .collect();
    lane(rig, leader);
    for other in others {
        other.join().unwrap();
    }
}

/// Submits command `number` if this member `wants` to.
fn submit<G: ThreadGroup>(
    queue: &mut CollectiveQueue<'_, G>,
    wants: bool,
    number: u32,
    wants_dw0: bool,
) {
    queue
        .submit(wants, |_| command(number, wants_dw0), NEVER)
        .unwrap();
}

/// Each member submits a command with its rank as number, the leader rings.
fn submit_and_leave<const DW0: bool>(rig: &Rig, member: Team) {
    let mut queue = rig.collective(member.clone());
    submit(&mut queue, true, member.rank(), DW0);
    queue.ring();
    queue.suspend();
}

/// Reaps until no command is in flight, and checks dword 0.
fn end_all<const READS: usize, G: ThreadGroup>(queue: &mut CollectiveQueue<'_, G>) {
    while queue.in_flight() > 0 {
        let taken = queue
            .reap::<READS>(|end| assert_eq!(end.dw0, end.tag))
            .unwrap();
        if taken == 0 {
            spin();
        }
    }
}

/// Every lane submits, the leader rings, and all lanes reap until every command has ended; this happens twice.
fn rounds<const ROUNDS: u32, const DW0: bool>(rig: &Rig, member: Team) {
    let mut queue = rig.collective(member.clone());
    for round in 0..ROUNDS {
        let number = round * 10 + member.rank();
        submit(&mut queue, true, number, DW0);
        queue.ring();
        let mut left = member.size();
        while left > 0 {
            let taken = queue
                .reap::<1>(|end| {
                    assert_eq!(end.status, Status::SUCCESS);
                    assert_eq!(end.tag / 10, round);
                    assert_eq!(end.dw0, if DW0 { end.tag } else { 0 });
                })
                .unwrap();
            left -= taken;
            if taken == 0 {
                spin();
            }
        }
    }
    assert_eq!(queue.in_flight(), 0);
}

#[test]
fn one_thread_and_the_controller() {
    check(
        "one owner through a ring of two: whole entries, whole completions",
        Bound::Exhaustive,
        || {
            let rig = Arc::new(Rig::new(2, 1, 0, 0));
            let device = controller(&rig, 2);
            rounds::<2, true>(&rig, Team::of(1).remove(0));
            device.join().unwrap();
        },
    );
}

#[test]
fn two_lanes_submit() {
    check(
        "two lanes write entries, the leader rings: no entry is fetched before it is complete",
        Bound::Preemptions(2),
        || {
            let rig = Arc::new(Rig::new(4, 3, 0, 0));
            let device = controller(&rig, 2);
            team(2, &rig, |rig, member| {
                let mut queue = rig.collective(member.clone());
                // The lanes submit in turn: the second lane takes the slot that the first one put into the free ring.
                for turn in [1, 0] {
                    let wants = member.rank() == turn;
                    submit(&mut queue, wants, member.rank(), false);
                }
                queue.ring();
                queue.suspend();
            });
            device.join().unwrap();
        },
    );
}

#[test]
fn three_lanes_submit() {
    check(
        "three lanes write entries, the leader rings: no entry is fetched before it is complete",
        Bound::Preemptions(1),
        || {
            let rig = Arc::new(Rig::new(4, 3, 0, 0));
            let device = controller(&rig, 3);
            team(3, &rig, submit_and_leave::<false>);
            device.join().unwrap();
        },
    );
}

#[test]
fn two_lanes_reap() {
    check(
        "two lanes read completions: whole, each by one lane, and given back only when both have read",
        Bound::Preemptions(2),
        || {
            let rig = Arc::new(Rig::new(4, 3, 0, 0));
            let mut queue = rig.collective(LoneThread);
            for number in [0, 1] {
                submit(&mut queue, true, number, true);
            }
            queue.ring();
            queue.suspend();
            let device = rig.clone();
            let device = thread::spawn(move || {
                let mut hand = Hand::new(&device);
                let fetched = [hand.fetch().unwrap(), hand.fetch().unwrap()];
                for sqe in fetched {
                    hand.complete(sqe.cid(), Status::SUCCESS, sqe.cdw10);
                }
                spin();
                hand.scribble();
            });
            team(2, &rig, |rig, member| {
                let mut queue = rig.collective(member);
                for _ in 0..2 {
                    queue.reap::<1>(|end| assert_eq!(end.dw0, end.tag)).unwrap();
                }
                queue.suspend();
            });
            device.join().unwrap();
            let mut queue = rig.collective(LoneThread);
            end_all::<1, _>(&mut queue);
        },
    );
}

#[test]
fn two_lanes_submit_and_reap_before_they_ring() {
    check(
        "what was submitted before a reap that found something is published by it: no entry is fetched before it is complete",
        Bound::Preemptions(0),
        || {
            let rig = Arc::new(Rig::new(4, 3, 0, 0));
            let device = controller(&rig, 2);
            team(2, &rig, |rig, member| {
                let mut queue = rig.collective(member.clone());
                for turn in [0, 1] {
                    let wants = member.rank() == turn;
                    submit(&mut queue, wants, member.rank(), false);
                    match turn {
                        0 => queue.ring(),
                        _ => {
                            while queue.reap::<2>(|_| ()).unwrap() == 0 {
                                spin();
                            }
                            queue.ring_within(3);
                        }
                    }
                }
                while queue.in_flight() > 0 {
                    if queue.reap::<2>(|_| ()).unwrap() == 0 {
                        spin();
                    }
                }
            });
            device.join().unwrap();
        },
    );
}

#[test]
fn two_lanes_round_the_ring() {
    check(
        "two lanes, three times round a ring of two entries' worth: slots and entries are handed on in order",
        Bound::Preemptions(0),
        || {
            let rig = Arc::new(Rig::new(4, 2, 0, 0u32.wrapping_sub(8)));
            let device = controller(&rig, 6);
            team(2, &rig, rounds::<3, false>);
            device.join().unwrap();
        },
    );
}

#[test]
fn the_host_takes_over_from_a_kernel() {
    check(
        "what a team left in flight ends on the host, through the words that it left",
        Bound::Preemptions(2),
        || {
            let rig = Arc::new(Rig::new(4, 3, 0, 0));
            let device = controller(&rig, 2);
            team(2, &rig, submit_and_leave::<true>);
            let mut queue = rig.collective(LoneThread);
            assert_eq!(queue.in_flight(), 2);
            end_all::<2, _>(&mut queue);
            device.join().unwrap();
        },
    );
}
