//! The shared queue under loom, in partly fixed schedules: what each `sync` of a group is needed for, and the ring
//! lock's last round. Stages order no memory; only the queue's operations do.

use loom::thread;
use nvme_core::group::{LoneThread, ThreadGroup};
use nvme_core::spec::Status;
use nvme_core::sync::{AtomicU64, Order, Scope, overwriting, spin};
use nvme_core::{
    CommandData, CommandOutcome, CommandToken, DrainResult, SharedQueue, SubmitError, WaitNeed,
};
use nvme_tests::hand::{Hand, Rig};
use nvme_tests::model::{Bound, Stage, check, command, controller, finish, place, place_plain};
use nvme_tests::team::{InStep, Looks, Team};
use nvme_tests::told::{Telling, Told};
use std::cell::Cell;
use std::sync::Arc;

const NEVER: u64 = u64::MAX;

/// Runs `lane` as the members of a team, each in its own thread.
fn lanes<const SIZE: usize>(
    rig: &Arc<Rig>,
    stage: &Stage,
    lane: fn(&Rig, &Team, &Stage),
) -> [thread::JoinHandle<()>; SIZE] {
    let members: [Team; SIZE] = Team::of(SIZE).try_into().ok().expect("as many");
    members.map(|member| {
        let (rig, stage) = (rig.clone(), stage.clone());
        thread::spawn(move || lane(&rig, &member, &stage))
    })
}

/// Drains until `count` completions were taken.
fn drain(rig: &Rig, group: &impl ThreadGroup, count: u32) {
    let mut left = count;
    while left > 0 {
        match rig.shared().drain(group) {
            DrainResult::Took(taken @ 1..) => left -= taken,
            _ => spin(),
        }
    }
}

/// Completes the fetched commands with the status that `cdw10` gives.
fn complete(hand: &mut Hand<'_>) {
    let sqe = hand.fetch().expect("a command");
    hand.complete(sqe.cid(), Status::SUCCESS, sqe.cdw10);
}

#[test]
fn lanes_hear_of_their_slots_from_the_leader() {
    check(
        "two lanes claim slots that others used: no list is written before the controller has read the last one",
        Bound::Staged,
        || {
            let (rig, stage) = (Arc::new(Rig::new(4, 2, 4, 0)), Stage::default());
            let tokens = [0, 1].map(|cell| place(&rig.shared(), cell, cell));
            let lanes: [_; 2] = lanes(&rig, &stage, |rig, member, stage| {
                stage.wait(1);
                let number = 2 + member.rank();
                match rig.shared().place(member, command(number, number)) {
                    Ok(_) | Err(SubmitError::QueueFull) => {}
                    Err(error) => panic!("{error}"),
                }
            });
            Hand::new(&rig).serve();
            drain(&rig, &LoneThread, 2);
            stage.reach(1);
            lanes.into_iter().for_each(|lane| lane.join().unwrap());
            for (token, number) in tokens.into_iter().zip(0..) {
                finish(&rig.shared(), &token, number);
            }
        },
    );
}

#[test]
fn what_one_lane_of_a_wait_has_seen_is_there_for_the_other_after_a_sync() {
    check(
        "another thread drains the end that one of two lanes needs, and the other looks in vain: data is there for it",
        Bound::Staged,
        || {
            let (rig, stage) = (Arc::new(Rig::new(4, 3, 2, 0)), Stage::default());
            let data = Arc::new(AtomicU64::new(0));
            let members: [Team; 2] = Team::of(2).try_into().ok().expect("as many");
            let lanes = members.map(|team| {
                let (rig, data, stage) = (rig.clone(), data.clone(), stage.clone());
                thread::spawn(move || {
                    let (rank, queue) = (team.rank(), rig.shared());
                    let here = InStep(&team, Looks::default());
                    let (token, why) = queue.submit_if(&here, true, command(rank, rank), NEVER);
                    assert_eq!(why, None);
                    stage.reach(1);
                    stage.wait(2);
                    let need = [WaitNeed::Look, WaitNeed::End][rank as usize];
                    let end = queue.wait_together(&here, &token, need, NEVER);
                    team.sync();
                    if rank == 0 {
                        assert_eq!(end, None);
                        assert_eq!(data.load_settled(Scope::Sys), 99);
                    } else {
                        let done = (CommandOutcome::Completed(Status::SUCCESS), 1);
                        assert_eq!(end, Some(Ok(done)));
                    }
                })
            });
            stage.wait(1);
            let mut hand = Hand::new(&rig);
            hand.fetch().expect("a command that does not end");
            data.store(99, Order::Relaxed, Scope::Sys);
            complete(&mut hand);
            drain(&rig, &LoneThread, 1);
            stage.reach(2);
            lanes.into_iter().for_each(|lane| lane.join().unwrap());
        },
    );
}

#[test]
fn lanes_hear_of_free_entries_from_the_leader() {
    check(
        "two lanes with slots that nobody used meet an entry that was: the leader's look at the head is for both",
        Bound::Staged,
        || {
            let (rig, stage) = (Arc::new(Rig::new(4, 3, 3, 0)), Stage::default());
            let lanes: [_; 2] = lanes(&rig, &stage, |rig, member, stage| {
                // Slots 0 and 1; the third one makes three rounds before they get their positions, 3 and 4.
                let votes = Cell::new(0);
                let member = Told::new(member.clone(), |what| {
                    votes.set(votes.get() + u32::from(what == Telling::Vote));
                    if votes.get() == 2 {
                        stage.reach(1);
                        stage.wait(2);
                    }
                });
                let cell = member.rank();
                let _token = rig.shared().place(&member, command(cell, cell)).unwrap();
            });
            stage.wait(1);
            let mut hand = Hand::new(&rig);
            for number in 0..3 {
                let token = place(&rig.shared(), number, 2);
                complete(&mut hand);
                finish(&rig.shared(), &token, number);
            }
            stage.reach(2);
            lanes.into_iter().for_each(|lane| lane.join().unwrap());
        },
    );
}

#[test]
fn the_head_tells_what_every_lane_has_seen() {
    check(
        "two lanes drain, another one takes a position by the head that they left: its entry was fetched",
        Bound::Staged,
        || {
            let (rig, stage) = (Arc::new(Rig::new(4, 3, 3, 0)), Stage::default());
            let (others, told) = (rig.clone(), stage.clone());
            let other = thread::spawn(move || {
                // Slot 2, claimed before anything has ended; position 5, for which a head of 2 is enough.
                let votes = Cell::new(0);
                let group = Told::new(LoneThread, |what| {
                    votes.set(votes.get() + u32::from(what == Telling::Vote));
                    if votes.get() == 2 {
                        told.reach(1);
                        told.wait(3);
                    }
                });
                let _token = others.shared().place(&group, command(9, 2)).unwrap();
            });
            let lanes: [_; 2] = lanes(&rig, &stage, |rig, member, stage| {
                stage.wait(2);
                drain(rig, member, 2);
            });
            stage.wait(1);
            let queue = rig.shared();
            let tokens = [0, 1].map(|cell| place(&queue, cell, cell));
            let mut hand = Hand::new(&rig);
            // The second entry is fetched after the first completion, whose SQHD does not cover it.
            complete(&mut hand);
            complete(&mut hand);
            stage.reach(2);
            lanes.into_iter().for_each(|lane| lane.join().unwrap());
            for (token, number) in tokens.into_iter().zip(0..) {
                finish(&queue, &token, number);
            }
            let tokens = [0, 1].map(|cell| place(&queue, cell, cell));
            hand.serve();
            for (token, number) in tokens.into_iter().zip(0..) {
                finish(&queue, &token, number);
            }
            let _token = place(&queue, 0, 0);
            stage.reach(3);
            other.join().unwrap();
        },
    );
}

#[test]
fn both_lanes_have_read_before_the_head_doorbell() {
    check(
        "two lanes drain and read dword 0 late: the doorbell comes after the reads of both",
        Bound::Staged,
        || {
            let (rig, stage) = (Arc::new(Rig::new(4, 3, 2, 0)), Stage::default());
            let tokens = [0, 1].map(|cell| place(&rig.shared(), cell, cell));
            let mut hand = Hand::new(&rig);
            hand.serve();
            let lanes: [_; 2] = lanes(&rig, &stage, |rig, member, stage| {
                rig.shared().drain(member);
                if member.leads() {
                    stage.reach(1);
                }
            });
            stage.wait(1);
            give_back(&rig, &mut hand, 2);
            overwriting(|| hand.scribble());
            lanes.into_iter().for_each(|lane| lane.join().unwrap());
            for (token, number) in tokens.into_iter().zip(0..) {
                finish(&rig.shared(), &token, number);
            }
        },
    );
}

#[test]
fn every_lane_has_read_before_the_next_holder() {
    before_the_next_holder(
        "three lanes drain and read dword 0 late, another thread gives back: the doorbell comes after the reads of all",
        place,
        |number| number,
    );
}

#[test]
fn every_lane_has_read_before_another_gives_back() {
    before_the_next_holder(
        "three lanes drain, another thread gives back: the doorbell comes after the reads of all",
        place_plain,
        |_| 0,
    );
}

/// Drains the empty queue until the head doorbell is `head`.
fn give_back(rig: &Rig, hand: &mut Hand<'_>, head: u32) {
    while hand.look_back() != head {
        rig.shared().drain(&LoneThread);
        spin();
    }
}

/// Three lanes take all but one entry of a quarter, and another thread takes that one, in one pass; a fifth one frees
/// the quarter. After a second pass loom would let the thread that frees acquire what the other thread has met in the
/// first.
fn before_the_next_holder(
    property: &'static str,
    place: fn(&SharedQueue<'_>, u32, u32) -> CommandToken,
    dw0: fn(u32) -> u32,
) {
    check(property, Bound::Staged, move || {
        // Given back by quarters: four entries.
        let (rig, stage) = (Arc::new(Rig::new(16, 15, 4, 0)), Stage::default());
        let tokens = [0, 1, 2, 3].map(|cell| place(&rig.shared(), cell, cell));
        let mut hand = Hand::new(&rig);
        (0..3).for_each(|_| complete(&mut hand));
        let lanes: [_; 3] = lanes(&rig, &stage, |rig, member, stage| {
            drain(rig, member, 3);
            if member.leads() {
                stage.reach(1);
            }
        });
        let (others, told) = (rig.clone(), stage.clone());
        let giver = thread::spawn(move || {
            told.wait(2);
            let mut hand = Hand::resumed(&others, 4, 4);
            give_back(&others, &mut hand, 4);
            // The lanes took these entries; the entries after them were empty (docs/memory-model.md).
            overwriting(|| hand.scribble_before(3));
        });
        stage.wait(1);
        complete(&mut hand);
        drop(hand);
        drain(&rig, &LoneThread, 1);
        stage.reach(2);
        lanes.into_iter().for_each(|lane| lane.join().unwrap());
        giver.join().unwrap();
        for (token, number) in tokens.into_iter().zip(0..) {
            finish(&rig.shared(), &token, dw0(number));
        }
    });
}

#[test]
fn a_slot_that_was_refused_is_handed_on() {
    check(
        "a command whose buffer does not fit gives its slot back: the next one's list comes after what was written of the last",
        Bound::Staged,
        || {
            let (rig, stage) = (Arc::new(Rig::new(2, 1, 1, 0)), Stage::default());
            let (others, told) = (rig.clone(), stage.clone());
            let other = thread::spawn(move || {
                // The pages fill the words of the list, and one more page follows.
                let pages = [0x1000, 0x2000, 0x3000, 0x4001].map(nvme_core::spec::Iova);
                let data = CommandData::Pages {
                    pages: &pages,
                    offset: 0,
                    len: 4 * 4096,
                };
                let refused = others
                    .shared()
                    .place(&LoneThread, command(1, 0).with_data(data));
                assert!(matches!(refused, Err(SubmitError::Map(_))));
                told.reach(1);
            });
            stage.wait(1);
            let mut hand = Hand::new(&rig);
            let token = place(&rig.shared(), 0, 0);
            complete(&mut hand);
            finish(&rig.shared(), &token, 0);
            other.join().unwrap();
        },
    );
}

/// Asks the ring lock's holder to look again, as a thread that has placed a command does.
fn keep_asking(rig: &Rig, at_last: impl Fn()) -> impl Fn(Telling) {
    let calls = Cell::new(0);
    move |what| {
        // The lock's answer, the last doorbell, then in each round the lock's answer.
        calls.set(calls.get() + u32::from(what == Telling::Broadcast));
        if calls.get() > 1 {
            rig.shared().ring(&LoneThread);
        }
        if calls.get() == 2 + 16 {
            at_last();
        }
    }
}

#[test]
fn the_lock_of_one_who_was_asked_too_often() {
    check(
        "a holder of the ring lock gives it up though it was asked again: the next doorbell comes after its own",
        Bound::Staged,
        || {
            let (rig, stage) = (Arc::new(Rig::new(4, 3, 2, 0)), Stage::default());
            let (others, told) = (rig.clone(), stage.clone());
            let other = thread::spawn(move || {
                told.wait(1);
                let _token = place(&others.shared(), 1, 1);
            });
            let queue = rig.shared();
            let _token = queue.place(&LoneThread, command(0, 0)).unwrap();
            queue.ring(&Told::new(LoneThread, keep_asking(&rig, || ())));
            stage.reach(1);
            other.join().unwrap();
            assert_eq!(Hand::new(&rig).look(), 2, "both doorbells were rung");
        },
    );
}

#[test]
fn who_asks_in_the_last_round_rings_when_it_waits() {
    check(
        "a holder of the ring lock overlooks who came in its last round: that one rings when it waits",
        Bound::Preemptions(2),
        || {
            let rig = Arc::new(Rig::new(4, 3, 2, 0));
            let queue = rig.shared();
            let mine = queue.place(&LoneThread, command(0, 0)).unwrap();
            let last = Cell::new(None);
            let place_last = || last.set(Some(place(&queue, 1, 1)));
            queue.ring(&Told::new(LoneThread, keep_asking(&rig, place_last)));
            let last = last.take().expect("sixteen rounds");
            let mut hand = Hand::new(&rig);
            assert_eq!(hand.look(), 1, "the last one was overlooked");
            let device = controller(&rig, 2);
            for (token, number) in [(last, 1), (mine, 0)] {
                let end = queue.wait(&Looks::default(), token, u64::MAX).unwrap();
                assert_eq!(end, (CommandOutcome::Completed(Status::SUCCESS), number));
            }
            device.join().unwrap();
        },
    );
}
