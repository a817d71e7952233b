//! A queue that belongs to a station under loom: owners that follow one another, and members that read each other's
//! completions and data.

use loom::thread;
use nvme_core::group::{LoneThread, ThreadGroup};
use nvme_core::spec::Status;
use nvme_core::sync::{AtomicU32, Order, Scope, overwriting, spin};
use nvme_core::{BatchEnds, BatchQueue};
use nvme_gpu_kernel::gate::{AdmissionGate, words};
use nvme_gpu_kernel::{BatchRecord, BegunBatch};
use nvme_tests::hand::{Hand, Rig};
use nvme_tests::model::{Bound, check, command, controller};
use nvme_tests::team::{Looks, Team};
use std::sync::Arc;

/// A queue, and the word of the station that it belongs to.
struct Station {
    rig: Arc<Rig>,
    owner: AtomicU32,
}

/// Takes the station as a block does, carries out one command, and gives the station back.
fn own(of: &Station, number: u32) {
    while of.owner.compare_exchange(0, 1, Order::Acquire, Scope::Gpu) != 0 {
        spin();
    }
    let mut queue = BatchQueue::take(LoneThread, of.rig.memory(), of.rig.state());
    let word = [AtomicU32::new(0)];
    let ends = BatchEnds(&word);
    let command = || command(number, 0).wanting_dw0(false);
    queue.submit(ends, true, command).unwrap();
    assert_eq!(queue.finish(ends, &Looks::default(), u64::MAX), Ok(0));
    assert_eq!(ends.status(0), Some(Status::SUCCESS));
    of.owner.store(0, Order::Release, Scope::Gpu);
}

#[test]
fn two_owners_of_one_queue() {
    check(
        "an owner finds the queue as the one before it left it, and its own completion",
        Bound::Preemptions(0),
        || {
            let station = Arc::new(Station {
                rig: Arc::new(Rig::new(2, 1, 0, 0)),
                owner: AtomicU32::new(0),
            });
            let device = controller(&station.rig, 2);
            let other = station.clone();
            let second = thread::spawn(move || own(&other, 1));
            own(&station, 0);
            second.join().unwrap();
            device.join().unwrap();
        },
    );
}

/// A station whose batch goes from one launch to another by a record.
struct Handover {
    rig: Rig,
    record: [AtomicU32; 4],
    gate: Vec<AtomicU32>,
}

impl Handover {
    fn gate(&self) -> AdmissionGate<'_> {
        AdmissionGate::new(&self.gate).unwrap()
    }
}

/// Submits one command at station 0, which belongs to this group, and hands it over.
fn begin(of: &Handover) {
    let record = BatchRecord::new(&of.record);
    assert!(record.open());
    let Ok(epoch) = of.gate().pass(0) else {
        return record.close();
    };
    let mut queue = BatchQueue::take(LoneThread, of.rig.memory(), of.rig.state());
    let word = [AtomicU32::new(0)];
    let command = || command(0, 7).wanting_dw0(false);
    queue.submit(BatchEnds(&word), true, command).unwrap();
    of.gate().leave(0);
    let batch = BegunBatch {
        station: 0,
        epoch,
        is_outdated: false,
    };
    record.publish(batch, 1);
}

#[test]
fn a_batch_passes_from_one_launch_to_another() {
    check(
        "a group that takes a batch finds the command of the group that submitted it, and its end",
        Bound::Preemptions(0),
        || {
            let of = Arc::new(Handover {
                rig: Rig::new(2, 1, 0, 0),
                record: [0; 4].map(AtomicU32::new),
                gate: (0..words(1)).map(|_| AtomicU32::new(0)).collect(),
            });
            let controlled = of.clone();
            let device = thread::spawn(move || {
                let mut hand = Hand::new(&controlled.rig);
                loop {
                    if let Some(sqe) = hand.fetch() {
                        hand.complete(sqe.cid(), Status::SUCCESS, 0);
                        return;
                    }
                    spin();
                }
            });
            let other = of.clone();
            let first = thread::spawn(move || begin(&other));
            let record = BatchRecord::new(&of.record);
            let batch = loop {
                match record.take() {
                    Some(batch) => break batch,
                    None => spin(),
                }
            };
            assert_eq!(of.gate().pass(batch.station), Ok(batch.epoch));
            let mut queue = BatchQueue::take(LoneThread, of.rig.memory(), of.rig.state());
            let word = [AtomicU32::new(0)];
            assert_eq!(queue.resume(BatchEnds(&word)), Some(7));
            assert_eq!(
                queue.finish(BatchEnds(&word), &Looks::default(), u64::MAX),
                Ok(0)
            );
            assert_eq!(BatchEnds(&word).status(0), Some(Status::SUCCESS));
            of.gate().leave(0);
            first.join().unwrap();
            device.join().unwrap();
        },
    );
}

/// A queue, the words of a group of two, and the word that each command moves.
struct Batch {
    rig: Rig,
    words: [AtomicU32; 2],
    moved: [AtomicU32; 2],
}

/// Returns the status of command `number`; every command has a different one.
fn status_of(number: u32) -> Status {
    Status(number as u16 * 2)
}

/// Fetches two commands, moves their words, and ends the second one first. Overwrites both completions once they were
/// freed.
fn end_in_reverse(batch: &Batch) {
    let mut hand = Hand::new(&batch.rig);
    let mut fetch = || loop {
        match hand.fetch() {
            Some(sqe) => break sqe,
            None => spin(),
        }
    };
    let sqes = [fetch(), fetch()];
    for sqe in sqes.into_iter().rev() {
        assert_eq!(sqe.cdw15, !sqe.cdw10, "half of an entry was fetched");
        batch.moved[sqe.cdw10 as usize].store(1, Order::Relaxed, Scope::Sys);
        hand.complete(sqe.cid(), status_of(sqe.cdw10), 0);
    }
    while hand.look_back() < 2 {
        spin();
    }
    overwriting(|| hand.scribble());
}

/// Submits a command as one of two members; the member finds its own status, and the bytes that both commands moved.
fn take_part(batch: &Batch, member: Team) {
    let (rank, ends) = (member.rank(), BatchEnds(&batch.words));
    let mut queue = BatchQueue::take(member, batch.rig.memory(), batch.rig.state());
    let command = || command(rank, 0).wanting_dw0(false);
    queue.submit(ends, true, command).unwrap();
    assert_eq!(queue.finish(ends, &Looks::default(), u64::MAX), Ok(0));
    assert_eq!(ends.status(rank), Some(status_of(rank)));
    for moved in &batch.moved {
        assert_eq!(moved.load(Order::Relaxed, Scope::Sys), 1);
    }
}

#[test]
fn members_read_ends_and_data_of_each_other() {
    check(
        "a member finds its status, which the other one read, and what both commands moved; both have read by then",
        Bound::Preemptions(0),
        || {
            let batch = Arc::new(Batch {
                rig: Rig::new(4, 3, 0, 0),
                words: [0, 0].map(AtomicU32::new),
                moved: [0, 0].map(AtomicU32::new),
            });
            let device = batch.clone();
            let device = thread::spawn(move || end_in_reverse(&device));
            let mut members = Team::of(2).into_iter();
            let (first, second) = (members.next().unwrap(), members.next().unwrap());
            let other = batch.clone();
            let other = thread::spawn(move || take_part(&other, second));
            take_part(&batch, first);
            other.join().unwrap();
            device.join().unwrap();
        },
    );
}

/// Stages the data of the other member's command, then submits its own command.
fn stage_and_submit(batch: &Batch, member: Team) {
    let (rank, ends) = (member.rank(), BatchEnds(&batch.words));
    batch.moved[1 - rank as usize].store(1, Order::Relaxed, Scope::Sys);
    let mut queue = BatchQueue::take(member, batch.rig.memory(), batch.rig.state());
    let command = || command(rank, 0).wanting_dw0(false);
    queue.submit(ends, true, command).unwrap();
    assert_eq!(queue.finish(ends, &Looks::default(), u64::MAX), Ok(0));
    assert_eq!(ends.status(rank), Some(Status::SUCCESS));
}

#[test]
fn the_controller_finds_data_that_any_member_staged() {
    check(
        "a controller that fetches a command finds its data, which another member of the group has staged",
        Bound::Preemptions(0),
        || {
            let batch = Arc::new(Batch {
                rig: Rig::new(4, 3, 0, 0),
                words: [0, 0].map(AtomicU32::new),
                moved: [0, 0].map(AtomicU32::new),
            });
            let controlled = batch.clone();
            let device = thread::spawn(move || {
                let mut hand = Hand::new(&controlled.rig);
                for _ in 0..2 {
                    let sqe = loop {
                        match hand.fetch() {
                            Some(sqe) => break sqe,
                            None => spin(),
                        }
                    };
                    let staged = &controlled.moved[sqe.cdw10 as usize];
                    assert_eq!(staged.load(Order::Relaxed, Scope::Sys), 1);
                    hand.complete(sqe.cid(), Status::SUCCESS, 0);
                }
            });
            let mut members = Team::of(2).into_iter();
            let (first, second) = (members.next().unwrap(), members.next().unwrap());
            let other = batch.clone();
            let other = thread::spawn(move || stage_and_submit(&other, second));
            stage_and_submit(&batch, first);
            other.join().unwrap();
            device.join().unwrap();
        },
    );
}
