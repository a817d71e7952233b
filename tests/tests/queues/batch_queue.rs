//! A queue that a group owns for one batch of commands at a time: completions in any order, late ones, wrong ones.

use super::collective::{FOREVER, SIZES, STARTS, command};
use nvme_core::group::{ExecContext, GroupOp, LoneThread, ThreadGroup};
use nvme_core::spec::{Cid, Status};
use nvme_core::sync::AtomicU32;
use nvme_core::{BatchEnds, BatchQueue, ControllerFault, SubmitError};
use nvme_tests::Rng;
use nvme_tests::hand::{Hand, Rig};
use nvme_tests::team::{Paused, Team};
use std::cell::Cell;
use std::sync::Mutex;

/// The status No Such Namespace, with Do Not Retry.
const REFUSED: Status = Status(0x400B);

fn words(size: usize) -> Vec<AtomicU32> {
    (0..size).map(|_| AtomicU32::new(0)).collect()
}

fn status_of(number: u32) -> Status {
    match number % 5 {
        0 => REFUSED,
        _ => Status::SUCCESS,
    }
}

/// Fetches new commands and completes some of them, in any order, but no command whose number is `dropped`.
struct Controller<'r> {
    hand: Hand<'r>,
    held: Vec<(u32, Cid)>,
    rng: Rng,
    dropped: Option<u32>,
    fetched: u32,
}

impl<'r> Controller<'r> {
    fn new(rig: &'r Rig, seed: u64) -> Mutex<Self> {
        Mutex::new(Self {
            hand: Hand::new(rig),
            held: Vec::new(),
            rng: Rng::new(seed + 1),
            dropped: None,
            fetched: 0,
        })
    }

    fn serve(&mut self) {
        while let Some(sqe) = self.hand.fetch() {
            let number = sqe.cdw10;
            self.fetched += 1;
            assert_eq!((sqe.cdw15, sqe.mptr), (!number, u64::from(number) << 32));
            if self.dropped != Some(number) {
                self.held.push((number, sqe.cid()));
            }
        }
        let mut left = self.rng.below(self.held.len() as u64 + 1);
        while left > 0 && !self.held.is_empty() && self.hand.has_room() {
            let at = self.rng.below(self.held.len() as u64) as usize;
            let (number, cid) = self.held.swap_remove(at);
            self.hand.complete(cid, status_of(number), 0);
            left -= 1;
        }
    }
}

/// A member's clock: its deadline has passed once `fetched` commands were fetched and all that have an end completed.
struct UntilDone<'c, 'r> {
    controller: &'c Mutex<Controller<'r>>,
    fetched: u32,
    /// The member has looked at its entry since then.
    has_looked: Cell<bool>,
}

impl ExecContext for UntilDone<'_, '_> {
    fn now_ns(&self) -> u64 {
        let controller = self.controller.lock().unwrap();
        let is_done = controller.fetched == self.fetched && controller.held.is_empty();
        match is_done && self.has_looked.replace(is_done) {
            true => FOREVER,
            false => 0,
        }
    }

    fn pause(&self, _turn: u32) {
        self.controller.lock().unwrap().serve();
    }

    fn converged<A: GroupOp>(&self, _key: u64, op: A) -> A::Output {
        op.run(&LoneThread)
    }
}

#[test]
fn every_member_gets_the_end_of_its_own_command() {
    for size in SIZES {
        for start in STARTS {
            let rig = Rig::new(64, 63, 0, start);
            let controller = Controller::new(&rig, start.into());
            let all = words(size);
            Team::run(size, |team| {
                let here = Paused::new(|| controller.lock().unwrap().serve());
                let ends = BatchEnds(&all);
                for round in 0..30 {
                    // Another owner each time.
                    team.sync();
                    let mut queue = BatchQueue::take(team.clone(), rig.memory(), rig.state());
                    let number = round * 100 + team.rank();
                    let wants = !(team.rank() + round).is_multiple_of(3);
                    let submitted = queue.submit(ends, wants, || command(number));
                    assert_eq!(submitted, Ok(()));
                    assert_eq!(queue.finish(ends, &here, FOREVER), Ok(0));
                    let end = wants.then(|| status_of(number));
                    assert_eq!(ends.status(team.rank()), end, "team of {size}");
                }
            });
        }
    }
}

/// One group submits a batch and leaves; the next one waits for it, and submits again.
#[test]
fn a_batch_is_finished_by_another_group() {
    for size in SIZES {
        for start in STARTS {
            let rig = Rig::new(64, 63, 0, start);
            let controller = Controller::new(&rig, start.into());
            let all = words(size);
            Team::run(size, |team| {
                let here = Paused::new(|| controller.lock().unwrap().serve());
                let (ends, rank) = (BatchEnds(&all), team.rank());
                let submit = |round: u32| {
                    let wants = !(rank + round).is_multiple_of(3);
                    let number = round * 100 + rank;
                    let mut queue = BatchQueue::take(team.clone(), rig.memory(), rig.state());
                    let submitted = queue.submit(ends, wants, || command(number));
                    assert_eq!(submitted, Ok(()));
                    wants.then(|| status_of(number))
                };
                for round in 0..20 {
                    let end = submit(round);
                    team.sync();
                    // Words of the first group are gone.
                    let mut queue = BatchQueue::take(team.clone(), rig.memory(), rig.state());
                    assert_eq!(queue.resume(ends).is_some(), end.is_some());
                    assert_eq!(queue.finish(ends, &here, FOREVER), Ok(0));
                    assert_eq!(ends.status(rank), end, "team of {size}");
                    let submitted = queue.submit(ends, true, || command(rank));
                    assert_eq!(submitted, Ok(()));
                    assert_eq!(queue.finish(ends, &here, FOREVER), Ok(0));
                    assert_eq!(ends.status(rank), Some(status_of(rank)));
                    team.sync();
                }
            });
        }
    }
}

#[test]
fn a_queue_whose_command_has_no_end_is_refused_until_it_was_recovered() {
    for size in SIZES {
        let rig = Rig::new(64, 63, 0, 0);
        let lost = size as u32 / 2;
        let controller = Controller::new(&rig, 7);
        controller.lock().unwrap().dropped = Some(lost);
        let all = words(size);
        Team::run(size, |team| {
            let here = UntilDone {
                controller: &controller,
                fetched: size as u32,
                has_looked: Cell::new(false),
            };
            let (ends, rank) = (BatchEnds(&all), team.rank());
            let mut queue = BatchQueue::take(team.clone(), rig.memory(), rig.state());
            queue.submit(ends, true, || command(rank)).unwrap();
            assert_eq!(queue.finish(ends, &here, FOREVER), Ok(1), "team of {size}");
            let end = (rank != lost).then(|| status_of(rank));
            assert_eq!(ends.status(rank), end, "team of {size}");
            team.sync();
            let mut queue = BatchQueue::take(team.clone(), rig.memory(), rig.state());
            let refused = queue.submit(ends, true, || command(rank));
            assert_eq!(refused, Err(SubmitError::Refused));
        });
        assert_eq!(rig.state().in_flight(), 1);
        let proof = rig.reset();
        assert!(rig.shared().recover(&proof).is_some());
        let controller = Controller::new(&rig, 8);
        Team::run(size, |team| {
            let here = Paused::new(|| controller.lock().unwrap().serve());
            let (ends, rank) = (BatchEnds(&all), team.rank());
            let mut queue = BatchQueue::take(team.clone(), rig.memory(), rig.state());
            queue.submit(ends, true, || command(rank)).unwrap();
            assert_eq!(queue.finish(ends, &here, FOREVER), Ok(0));
            assert_eq!(ends.status(rank), Some(status_of(rank)));
        });
    }
}

#[test]
fn a_completion_of_no_command_refuses_the_queue_and_the_others_count() {
    let rig = Rig::new(8, 7, 0, 0);
    let all = words(2);
    let hand = Mutex::new(None);
    Team::run(2, |team| {
        let (ends, rank) = (BatchEnds(&all), team.rank());
        let mut queue = BatchQueue::take(team.clone(), rig.memory(), rig.state());
        queue.submit(ends, true, || command(rank + 1)).unwrap();
        if team.leads() {
            let mut controller = Hand::new(&rig);
            let [first, second] = [0, 1].map(|_| controller.fetch().unwrap());
            controller.complete(second.cid(), Status::SUCCESS, 0);
            let mut cqe = controller.completion(first.cid(), Status::SUCCESS, 0);
            cqe.cid ^= 0x1000;
            controller.post(cqe);
            *hand.lock().unwrap() = Some(first.cid().0 ^ 0x1000);
        }
        team.sync();
        let stale = Cid(hand.lock().unwrap().unwrap());
        let here = Paused::new(|| {});
        let fault = Err(ControllerFault::StaleCid(stale));
        assert_eq!(queue.finish(ends, &here, FOREVER), fault);
        let end = (rank == 1).then_some(Status::SUCCESS);
        assert_eq!(ends.status(rank), end);
        let refused = queue.submit(ends, true, || command(9));
        assert_eq!(refused, Err(SubmitError::Refused));
    });
    assert_eq!(rig.state().in_flight(), 1);
}

#[test]
fn members_without_a_slot_are_told() {
    let rig = Rig::new(4, 3, 0, 0);
    let controller = Controller::new(&rig, 1);
    let all = words(8);
    Team::run(8, |team| {
        let here = Paused::new(|| controller.lock().unwrap().serve());
        let (ends, rank) = (BatchEnds(&all), team.rank());
        let mut queue = BatchQueue::take(team.clone(), rig.memory(), rig.state());
        let submitted = queue.submit(ends, true, || command(rank));
        let fits = rank < 3;
        let full = Err(SubmitError::QueueFull);
        assert_eq!(submitted, if fits { Ok(()) } else { full });
        assert_eq!(queue.finish(ends, &here, FOREVER), Ok(0));
        assert_eq!(ends.status(rank), fits.then(|| status_of(rank)));
    });
}
