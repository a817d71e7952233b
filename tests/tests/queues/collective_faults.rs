//! A collective queue whose controller errs, whose commands are late, and whose owner changes.

use super::collective::{FOREVER, SIZES, STARTS, check, command};
use nvme_core::group::{GroupVote, LoneThread, ThreadGroup};
use nvme_core::spec::{Cid, Iova, Sqe, Status};
use nvme_core::{CollectiveQueue, CommandData, ControllerFault, PointerError, SubmitError};
use nvme_tests::hand::{Hand, Rig};
use nvme_tests::team::Team;
use std::collections::HashSet;
use std::sync::Mutex;

/// Returns a queue with commands 1 and 2 in flight, fetched and not completed.
fn two_in_flight(rig: &Rig) -> (Hand<'_>, [Sqe; 2]) {
    let mut queue = rig.collective(LoneThread);
    for number in [1, 2] {
        queue.submit(true, |_| command(number), FOREVER).unwrap();
    }
    queue.ring();
    queue.suspend();
    let mut hand = Hand::new(rig);
    let entries = [hand.fetch().unwrap(), hand.fetch().unwrap()];
    (hand, entries)
}

#[test]
fn violations_refuses_the_queue_and_the_honest_completions_with_it_count() {
    for size in SIZES {
        for case in 0..6 {
            let rig = Rig::new(8, 7, 0, 0);
            let (mut hand, [first, second]) = two_in_flight(&rig);
            let mut cqe = hand.completion(first.cid(), Status::SUCCESS, 0);
            let fault = [
                ControllerFault::UnknownCid(Cid(5)),
                ControllerFault::UnknownCid(Cid(0x123)),
                // Modulo the entries it is in flight.
                ControllerFault::UnknownCid(Cid(first.cid().0 | 0x100)),
                ControllerFault::StaleCid(Cid(first.cid().0 ^ 0x1000)),
                ControllerFault::SqHead(4096),
                ControllerFault::SqId(7),
            ][case];
            match fault {
                ControllerFault::UnknownCid(cid) | ControllerFault::StaleCid(cid) => {
                    cqe.cid = cid.0;
                }
                ControllerFault::SqHead(head) => cqe.sqhd = head,
                ControllerFault::SqId(qid) => cqe.sqid = qid,
            }
            hand.post(cqe);
            hand.complete(second.cid(), Status::SUCCESS, 2);
            let told = Mutex::new(Vec::new());
            Team::run(size, |team| {
                let mut queue = rig.collective(team.clone());
                let reaped = queue.reap::<2>(|end| told.lock().unwrap().push(end.tag));
                assert_eq!(reaped, Err(fault), "team of {size}");
                let refused = queue.submit(true, |_| command(9), FOREVER);
                assert_eq!(refused, Err(SubmitError::Refused));
                assert_eq!(queue.in_flight(), 1);
                queue.suspend();
            });
            let told = told.into_inner().unwrap();
            assert!(told.contains(&2), "{fault:?}, team of {size}: {told:?}");
            let queue = rig.collective(LoneThread);
            let proof = rig.reset();
            let mut aborted = Vec::new();
            assert!(queue.recover(&proof, |tag| aborted.push(tag)));
            assert_eq!(aborted.len() + told.len(), 2, "{fault:?}");
            assert_eq!(rig.state().fault(), None);
            keep_serving(&rig);
        }
    }
}

/// NVMe Base 2.0c, "SQ Head Pointer": the head is the one at the time when the completion was made, which may be before
/// another was posted.
#[test]
fn a_head_may_be_older_than_one_before() {
    for size in SIZES {
        let rig = Rig::new(8, 7, 0, 0);
        let (mut hand, [first, second]) = two_in_flight(&rig);
        for (sqe, head) in [(second, 2), (first, 1)] {
            let mut cqe = hand.completion(sqe.cid(), Status::SUCCESS, 0);
            cqe.sqhd = head;
            hand.post(cqe);
        }
        Team::run(size, |team| {
            let mut queue = rig.collective(team.clone());
            let mut left = 2;
            while left > 0 {
                left -= queue.reap::<2>(|_| {}).expect("nothing is wrong");
            }
            assert_eq!(queue.in_flight(), 0);
        });
    }
}

/// The entry of such a command is in the ring, and may still reach the controller: its buffer stays lent.
#[test]
fn a_command_that_was_not_published_does_not_end() {
    let rig = Rig::new(8, 7, 0, 0);
    let (mut queue, mut hand) = (rig.collective(LoneThread), Hand::new(&rig));
    let submit = |queue: &mut CollectiveQueue<'_, LoneThread>, number| {
        let cid = queue.submit(true, |_| command(number), FOREVER).unwrap();
        cid.expect("it was wanted")
    };
    let (first, second) = (submit(&mut queue, 0), submit(&mut queue, 1));
    queue.ring();
    let late = submit(&mut queue, 2);
    assert_eq!(hand.serve(), 2);
    hand.complete(late, Status::SUCCESS, 2);
    let mut told = Vec::new();
    let reaped = queue.reap::<4>(|end| told.push(end.cid));
    assert_eq!(reaped, Err(ControllerFault::UnknownCid(late)));
    assert_eq!((told, queue.in_flight()), (vec![first, second], 1));
}

/// Checks that the queue works from its beginning.
fn keep_serving(rig: &Rig) {
    let mut queue = rig.collective(LoneThread);
    let mut hand = Hand::new(rig);
    for number in 0..30 {
        queue.submit(true, |_| command(number), FOREVER).unwrap();
        queue.ring();
        assert_eq!(hand.serve(), 1);
        let mut tags = Vec::new();
        assert_eq!(queue.reap::<4>(|end| tags.push(check(end))), Ok(1));
        assert_eq!(tags, [number]);
    }
}

#[test]
fn a_late_completion_does_not_end_the_next_command_of_its_slot() {
    let rig = Rig::new(4, 1, 0, 0);
    let (mut queue, mut hand) = (rig.collective(LoneThread), Hand::new(&rig));
    let mut cids = HashSet::new();
    for number in 0..15 {
        let cid = queue.submit(true, |_| command(number), FOREVER).unwrap();
        queue.ring();
        hand.serve();
        assert_eq!(queue.reap::<1>(|end| assert_eq!(Some(end.cid), cid)), Ok(1));
        assert!(cids.insert(cid.unwrap()), "{cid:?} again");
        if number % 4 == 3 {
            queue.suspend();
            queue = rig.collective(LoneThread);
        }
    }
    queue.submit(true, |_| command(15), FOREVER).unwrap();
    queue.ring();
    assert!(!cids.contains(&hand.fetch().unwrap().cid()));
    let late = cids.into_iter().next().unwrap();
    hand.complete(late, Status::SUCCESS, 0);
    assert_eq!(
        queue.reap::<1>(|end| panic!("{end:?}")),
        Err(ControllerFault::StaleCid(late))
    );
}

#[test]
fn doorbells_are_counted() {
    let rig = Rig::new(16, 15, 0, 0);
    let (mut queue, mut hand) = (rig.collective(LoneThread), Hand::new(&rig));
    for round in 1..=9 {
        queue.submit(true, |_| command(round), FOREVER).unwrap();
        queue.ring();
        hand.serve();
        assert_eq!(queue.reap::<2>(|_| ()), Ok(1));
        // The head's only once for each quarter of the ring.
        assert_eq!(queue.doorbells(), [round, round / 4]);
    }
}

#[test]
fn the_same_completion_twice_in_one_pass_ends_one_command() {
    for size in SIZES {
        let rig = Rig::new(8, 7, 0, 0);
        let (mut hand, [first, _]) = two_in_flight(&rig);
        hand.complete(first.cid(), Status::SUCCESS, 0);
        hand.complete(first.cid(), Status::SUCCESS, 0);
        let told = Mutex::new(Vec::new());
        Team::run(size, |team| {
            let mut queue = rig.collective(team.clone());
            let reaped = queue.reap::<2>(|end| told.lock().unwrap().push(end.tag));
            assert_eq!(reaped, Err(ControllerFault::UnknownCid(first.cid())));
            assert_eq!(queue.in_flight(), 1);
        });
        assert_eq!(told.into_inner().unwrap(), [1], "team of {size}");
    }
}

#[test]
fn a_late_command_is_reported_once_and_still_ends() {
    for size in SIZES {
        let rig = Rig::new(64, 63, 0, 0);
        let hand = Mutex::new(Hand::new(&rig));
        let late = Mutex::new(HashSet::new());
        Team::run(size, |team| {
            let mut queue = rig.collective(team.clone());
            let deadline = 1_000_000 * u64::from(1 + team.rank() % 2);
            queue
                .submit(true, |_| command(team.rank()), deadline)
                .unwrap();
            queue.ring();
            assert_eq!(queue.expire(500_000, |_| panic!("not yet")), 0);
            let early = (size as u32).div_ceil(2);
            let told = |tag| assert!(late.lock().unwrap().insert(tag));
            assert_eq!(queue.expire(1_500_000, told), early);
            assert_eq!(queue.expire(1_500_000, |_| panic!("twice")), 0);
            if team.leads() {
                hand.lock().unwrap().serve();
            }
            team.sync();
            let mut count = 0;
            while count < size as u32 {
                count += queue
                    .reap::<1>(|end| assert_eq!(end.late, end.tag % 2 == 0))
                    .unwrap();
            }
            assert_eq!(queue.expire(9_000_000, |_| panic!("it has ended")), 0);
        });
        let even = (0..size as u32).step_by(2);
        assert_eq!(late.into_inner().unwrap(), even.collect());
    }
}

/// A member who acts before the others do.
struct Fifth;

impl ThreadGroup for Fifth {
    fn size(&self) -> u32 {
        8
    }

    fn rank(&self) -> u32 {
        4
    }

    fn sync(&self) {}

    fn vote(&self, mine: bool) -> GroupVote {
        LoneThread.vote(mine)
    }

    fn broadcast(&self, value: u32) -> u32 {
        value
    }
}

#[test]
fn members_beyond_the_slots_report_nothing_late() {
    let rig = Rig::new(4, 3, 0, 0);
    let mut queue = rig.collective(LoneThread);
    for number in 0..3 {
        queue.submit(true, |_| command(number), 0).unwrap();
    }
    queue.suspend();
    // Modulo the entries it would look at the first slot.
    let late = rig.collective(Fifth).expire(FOREVER, |tag| panic!("{tag}"));
    assert_eq!(late, 0);
    let mut tags = Vec::new();
    let late = rig
        .collective(LoneThread)
        .expire(FOREVER, |tag| tags.push(tag));
    assert_eq!((late, tags), (3, vec![0, 1, 2]));
}

#[test]
fn a_bad_buffer_costs_nothing_and_the_others_go_on() {
    for size in SIZES {
        // There are as many slots as members, so that a lost slot is missed at once.
        let rig = Rig::new(64, size as u32, 0, STARTS[3]);
        let hand = Mutex::new(Hand::new(&rig));
        Team::run(size, |team| {
            let mut queue = rig.collective(team.clone());
            for round in 0..12 {
                let bad = team.rank() % 3 == round % 3;
                let mut one = command(team.rank());
                if bad {
                    let iova = Iova(0x1000);
                    one = one.with_data(CommandData::Contiguous { iova, len: 0 });
                }
                let result = queue.submit(true, |_| one, FOREVER);
                match result {
                    Ok(_) => assert!(!bad),
                    Err(error) => assert_eq!(error, SubmitError::Map(PointerError::Empty)),
                }
                let placed = team.vote(!bad).total;
                assert_eq!(queue.in_flight(), placed);
                queue.ring();
                if team.leads() {
                    assert_eq!(hand.lock().unwrap().serve(), placed);
                }
                team.sync();
                while queue.in_flight() > 0 {
                    queue.reap::<2>(|end| _ = check(end)).unwrap();
                }
            }
        });
    }
}

/// Teams of every size hand the queue to each other, with commands in flight.
#[test]
fn what_is_in_flight_survives_a_change_of_owner() {
    for start in STARTS {
        let rig = Rig::new(32, 31, 0, start);
        let hand = Mutex::new(Hand::new(&rig));
        let mut open: HashSet<u32> = HashSet::new();
        for turn in 0..24 {
            let size = SIZES[turn % 4];
            let told = Mutex::new(Vec::new());
            let placed = Team::run(size, |team| {
                let mut queue = rig.collective(team.clone());
                assert_eq!(queue.in_flight() as usize, open.len());
                let number = turn as u32 * 100 + team.rank();
                let placed = queue.submit(true, |_| command(number), FOREVER).is_ok();
                queue.ring();
                queue
                    .reap::<2>(|end| told.lock().unwrap().push(check(end)))
                    .unwrap();
                queue.suspend();
                placed.then_some(number)
            });
            open.extend(placed.into_iter().flatten());
            for tag in told.into_inner().unwrap() {
                assert!(open.remove(&tag));
            }
            hand.lock().unwrap().serve();
        }
        assert!(!open.is_empty());
        let mut queue = rig.collective(LoneThread);
        while queue.in_flight() > 0 {
            queue
                .reap::<8>(|end| assert!(open.remove(&check(end))))
                .unwrap();
        }
        assert!(open.is_empty());
    }
}
