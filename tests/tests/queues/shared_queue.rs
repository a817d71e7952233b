//! The shared queue on host threads: one thread, and teams that act in step as warps do.

use nvme_core::group::{LoneThread, ThreadGroup};
use nvme_core::queue_state::{MAX_TAGS, QueueState};
use nvme_core::spec::{Cid, Iova, Nsid, Qid, Sqe, Status};
use nvme_core::sync;
use nvme_core::{
    AbortReason, CommandData, CommandOutcome, CommandToken, DrainResult, MemberCommand,
    PointerError, SharedQueue, SubmitError, WaitError,
};
use nvme_tests::Rng;
use nvme_tests::hand::{Hand, Rig};
use nvme_tests::team::{Clock, Paused, Team};
use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Longer than any of these tests takes, unless the controller has failed: then the deadline ends the test.
pub const FOREVER: u64 = 120_000_000_000;

/// Sizes of teams: one thread, a pair, a tile, a warp.
pub const SIZES: [usize; 4] = [1, 2, 8, 32];

/// First positions: the beginning, and a little before the wrap of 16 and of 32 bits.
pub const STARTS: [u32; 3] = [0, 0x1_0000 - 256, 0u32.wrapping_sub(256)];

/// Returns a command that carries `number`, which cell `tag` gets at its end.
pub fn command(number: u32, tag: u32) -> MemberCommand<'static> {
    let mut sqe = Sqe::new(2, Nsid(1));
    (sqe.cdw10, sqe.cdw15, sqe.mptr) = (number, !number, u64::from(number) << 32);
    MemberCommand::new(sqe, CommandData::None, tag).wanting_dw0(true)
}

/// Places a command for each member, and rings the doorbell.
pub fn submit<G: ThreadGroup>(
    queue: &SharedQueue<'_>,
    group: &G,
    command: MemberCommand<'_>,
) -> Result<CommandToken, SubmitError> {
    let placed = queue.place(group, command);
    queue.ring(group);
    placed
}

/// Fetches complete entries and completes them as `order` sorts them.
pub fn serve(hand: &mut Hand<'_>, order: impl Fn(&mut Vec<Sqe>)) {
    let mut fetched = Vec::new();
    while let Some(sqe) = hand.fetch() {
        let number = sqe.cdw10;
        assert_eq!((sqe.cdw15, sqe.mptr), (!number, u64::from(number) << 32));
        fetched.push(sqe);
    }
    order(&mut fetched);
    for sqe in fetched {
        hand.complete(sqe.cid(), Status::SUCCESS, sqe.cdw10);
    }
}

pub fn drain_all(queue: &SharedQueue<'_>, team: &Team) {
    while queue.drain(team) != DrainResult::Took(0) {}
}

/// Returns a queue with two commands in flight, fetched and not completed.
pub fn two_in_flight(rig: &Rig) -> (Hand<'_>, [CommandToken; 2], [Sqe; 2]) {
    let alone = &LoneThread;
    let tokens = [0, 1].map(|tag| submit(&rig.shared(), alone, command(tag, tag)).unwrap());
    let mut hand = Hand::new(rig);
    let entries = [hand.fetch().unwrap(), hand.fetch().unwrap()];
    (hand, tokens, entries)
}

#[test]
fn each_command_ends_once_in_its_own_cell() {
    for start in STARTS {
        for size in SIZES {
            let rig = Rig::new(64, 63, 64, start);
            let hand = Mutex::new(Hand::new(&rig));
            Team::run(size, |team| {
                let queue = rig.shared();
                let mine = team.rank();
                let rounds = if size < 32 { 400 / size as u32 } else { 24 };
                for round in 0..rounds {
                    let number = round * 100 + mine;
                    let token = submit(&queue, team, command(number, mine)).unwrap();
                    assert_eq!(queue.poll(&token), None);
                    if mine == 0 {
                        // Every other round in reverse.
                        serve(&mut hand.lock().unwrap(), |all| {
                            if round % 2 == 1 {
                                all.reverse();
                            }
                        });
                    }
                    team.sync();
                    drain_all(&queue, team);
                    let end = queue.poll(&token);
                    assert_eq!(
                        end,
                        Some((CommandOutcome::Completed(Status::SUCCESS), number))
                    );
                }
                assert_eq!(queue.fault(), None);
                assert_eq!(queue.state().in_flight(), 0);
            });
        }
    }
}

#[test]
fn a_full_queue_serves_the_lower_ranks() {
    for size in [2, 8, 32] {
        let rig = Rig::new(4, 3, 32, 0);
        let results = Team::run(size, |team| {
            let mine = team.rank();
            submit(&rig.shared(), team, command(mine, mine)).err()
        });
        let placed = size.min(3);
        assert!(results[..placed].iter().all(Option::is_none));
        let full = |error| error == &Some(SubmitError::QueueFull);
        assert!(results[placed..].iter().all(full), "{results:?}");
        let mut hand = Hand::new(&rig);
        assert_eq!(hand.look(), placed as u32);
        // Out of order, so that the free slots are not the first ones.
        serve(&mut hand, |all| all.reverse());
        drain_all(&rig.shared(), &Team::of(1)[0]);
        let again = Team::run(size, |team| {
            let mine = team.rank();
            submit(&rig.shared(), team, command(mine, mine)).is_ok()
        });
        assert_eq!(again.iter().filter(|ok| **ok).count(), placed);
    }
}

#[test]
fn a_timeout_ends_the_wait_and_not_the_command() {
    let rig = Rig::new(4, 3, 4, 0);
    let (mut hand, [one, two], [first, second]) = two_in_flight(&rig);
    let queue = rig.shared();
    let here = Paused::new(|| ());
    let (error, one) = queue.wait(&here, one, 50).unwrap_err();
    assert_eq!(error, WaitError::TimedOut);
    // The command keeps its cell and its slot.
    let alone = &LoneThread;
    let busy = submit(&queue, alone, command(0, 0)).unwrap_err();
    assert_eq!(busy, SubmitError::CellBusy);
    assert_eq!(queue.state().in_flight(), 2);
    // The other command continues; the late completion is delivered completely when it arrives.
    hand.complete(second.cid(), Status::SUCCESS, 1);
    assert_eq!(queue.wait(&here, two, FOREVER).unwrap().1, 1);
    hand.complete(first.cid(), Status::LBA_OUT_OF_RANGE, 0);
    let (outcome, _) = queue.wait(&here, one, FOREVER).unwrap();
    assert_eq!(outcome, CommandOutcome::Completed(Status::LBA_OUT_OF_RANGE));
    assert_eq!(queue.fault(), None);
    let _token = submit(&queue, alone, command(0, 0)).unwrap();
}

/// The completion was there before the deadline, behind more completions than one drain takes.
#[test]
fn a_wait_does_not_time_out_on_a_completion_that_is_there() {
    let rig = Rig::new(256, 255, 255, 0);
    let queue = rig.shared();
    let alone = &LoneThread;
    let mut tokens: Vec<_> = (0..255)
        .map(|tag| submit(&queue, alone, command(tag, tag)).unwrap())
        .collect();
    assert_eq!(Hand::new(&rig).serve(), 255);
    let last = tokens.pop().unwrap();
    let end = queue.wait(&Paused::new(|| ()), last, 0);
    assert_eq!(
        end.unwrap(),
        (CommandOutcome::Completed(Status::SUCCESS), 254)
    );
}

#[test]
fn a_deadline_in_the_past_still_looks_once() {
    let rig = Rig::new(4, 3, 4, 0);
    let (mut hand, [one, two], [first, _]) = two_in_flight(&rig);
    hand.complete(first.cid(), Status::SUCCESS, 0);
    let queue = rig.shared();
    let here = Paused::new(|| ());
    assert!(queue.wait(&here, one, 0).is_ok());
    assert_eq!(
        queue.wait(&here, two, 0).unwrap_err().0,
        WaitError::TimedOut
    );
}

#[test]
fn cells_that_are_not_there_are_busy() {
    let rig = Rig::new(4, 3, 2, 0);
    let queue = rig.shared();
    for tag in [2, 3, u32::MAX, 1 << 26] {
        let error = submit(&queue, &LoneThread, command(0, tag));
        assert_eq!(error.unwrap_err(), SubmitError::CellBusy);
    }
    assert_eq!(queue.state().in_flight(), 0);
}

/// A slot's word names a cell in 25 bits: a cell past that would pass for another one.
#[test]
fn cells_that_no_slot_can_name_are_busy() {
    let rig = Rig::new(4, 3, MAX_TAGS as usize + 2, 0);
    let queue = rig.shared();
    for tag in [MAX_TAGS, MAX_TAGS + 1] {
        let error = submit(&queue, &LoneThread, command(0, tag));
        assert_eq!(error.unwrap_err(), SubmitError::CellBusy);
    }
    let last = submit(&queue, &LoneThread, command(7, MAX_TAGS - 1)).unwrap();
    assert_eq!(Hand::new(&rig).serve(), 1);
    assert_eq!(queue.drain(&LoneThread), DrainResult::Took(1));
    let done = (CommandOutcome::Completed(Status::SUCCESS), 7);
    assert_eq!(queue.poll(&last), Some(done));
}

#[test]
fn a_bad_buffer_costs_nothing_and_the_others_go_on() {
    for size in SIZES {
        // There are as many slots as members, so that a lost slot is missed at once.
        let rig = Rig::new(64, size as u32, 32, 0);
        let hand = Mutex::new(Hand::new(&rig));
        Team::run(size, |team| {
            let queue = rig.shared();
            let mine = team.rank();
            for round in 0..4 {
                let bad = mine % 3 == round % 3;
                let mut one = command(mine, mine);
                if bad {
                    let iova = Iova(0x1000);
                    one = one.with_data(CommandData::Contiguous { iova, len: 0 });
                }
                let result = submit(&queue, team, one);
                match &result {
                    Ok(_) => assert!(!bad),
                    Err(error) => assert_eq!(*error, SubmitError::Map(PointerError::Empty)),
                }
                if mine == 0 {
                    serve(&mut hand.lock().unwrap(), |_| ());
                }
                team.sync();
                drain_all(&queue, team);
                if let Ok(token) = result {
                    assert!(queue.poll(&token).is_some());
                }
            }
        });
        assert_eq!(rig.shared().state().in_flight(), 0);
    }
}

#[test]
fn lists_are_written_to_the_slots_own_memory() {
    let rig = Rig::new(8, 7, 8, 0);
    let queue = rig.shared();
    let alone = &LoneThread;
    let mut addresses = Vec::new();
    for tag in 0..7 {
        let iova = Iova(0x10_0000 * u64::from(tag + 1));
        let mut one = command(tag, tag);
        one = one.with_data(CommandData::Contiguous {
            iova,
            len: 3 * 4096,
        });
        let _token = submit(&queue, alone, one).unwrap();
    }
    let mut hand = Hand::new(&rig);
    while let Some(sqe) = hand.fetch() {
        addresses.push(sqe.dptr[1]);
    }
    addresses.sort_unstable();
    addresses.dedup();
    assert_eq!(addresses.len(), 7);
}

#[test]
fn a_reset_ends_what_was_in_flight_and_the_queue_goes_on() {
    for start in STARTS {
        let rig = Rig::new(8, 7, 8, start);
        let (_, [one, two], [first, _]) = two_in_flight(&rig);
        let queue = rig.shared();
        let proof = rig.reset();
        assert_eq!(queue.recover(&proof), Some(2));
        let aborted = CommandOutcome::Aborted(AbortReason::ControllerReset);
        for token in [one, two] {
            assert_eq!(queue.poll(&token), Some((aborted, 0)));
        }
        let mut hand = Hand::new(&rig);
        let alone = &LoneThread;
        for number in 0..40 {
            let token = submit(&queue, alone, command(number, 0)).unwrap();
            assert_eq!(hand.serve(), 1);
            drain_all(&queue, &Team::of(1)[0]);
            let done = Some((CommandOutcome::Completed(Status::SUCCESS), number));
            assert_eq!(queue.poll(&token), done);
        }
        // A completion from before the reset is not taken for one of now.
        let _token = submit(&queue, alone, command(0, 0)).unwrap();
        let now = hand.fetch().unwrap();
        assert_ne!(now.cid(), first.cid());
        hand.complete(first.cid(), Status::SUCCESS, 0);
        queue.drain(alone);
        assert!(queue.fault().is_some());
        assert_eq!(
            queue.recover(&proof),
            None,
            "a proof from before it was sent"
        );
        assert_eq!(queue.recover(&rig.reset()), Some(1));
        assert_eq!(queue.fault(), None);
    }
}

#[test]
fn submit_drains_while_the_queue_is_full() {
    let rig = Rig::new(2, 1, 3, 0);
    let queue = rig.shared();
    let hand = RefCell::new(Hand::new(&rig));
    let here = Paused::new(|| {
        hand.borrow_mut().serve();
    });
    let tokens = [0, 1, 2].map(|tag| queue.submit(&here, command(tag, tag), FOREVER).unwrap());
    // The order is reversed: tokens that were not waited for occupy no slot.
    for (token, number) in tokens.into_iter().zip([0, 1, 2]).rev() {
        let end = queue.wait(&here, token, FOREVER).unwrap();
        assert_eq!(end, (CommandOutcome::Completed(Status::SUCCESS), number));
    }
    let stuck = Paused::new(|| ());
    let _token = queue.submit(&stuck, command(0, 0), FOREVER).unwrap();
    let full = queue.submit(&stuck, command(1, 1), 100).unwrap_err();
    assert_eq!(full, SubmitError::QueueFull);
}

#[test]
fn run_is_submit_and_wait() {
    let rig = Rig::new(4, 2, 4, 0);
    let queue = rig.shared();
    let hand = RefCell::new(Hand::new(&rig));
    let here = Paused::new(|| {
        hand.borrow_mut().serve();
    });
    for number in 0..20 {
        let end = queue.run(&here, || command(number, 0), FOREVER).unwrap();
        assert_eq!(
            end,
            Ok((CommandOutcome::Completed(Status::SUCCESS), number))
        );
    }
    // No answer arrives: the command stays in flight and its token is returned.
    let stuck = Paused::new(|| ());
    let (error, late) = queue.run(&stuck, || command(20, 0), 100).unwrap_err();
    assert_eq!(error, WaitError::TimedOut);
    let busy = queue.run(&stuck, || command(21, 0), 100).unwrap();
    assert_eq!(busy, Err(SubmitError::CellBusy));
    let _one = queue.submit(&stuck, command(22, 1), FOREVER).unwrap();
    let full = queue.run(&stuck, || command(23, 2), 100).unwrap();
    assert_eq!(full, Err(SubmitError::QueueFull));
    let end = queue.wait(&here, late, FOREVER).unwrap();
    assert_eq!(end, (CommandOutcome::Completed(Status::SUCCESS), 20));
    // Nonsense ends it at once.
    let wrong = Paused::new(|| hand.borrow_mut().complete(Cid(0xFFF), Status::SUCCESS, 0));
    let (error, token) = queue.run(&wrong, || command(24, 0), FOREVER).unwrap_err();
    assert_eq!(error, WaitError::Refused);
    assert_eq!(queue.poll(&token), None);
    let refused = queue.run(&here, || command(25, 3), FOREVER).unwrap();
    assert_eq!(refused, Err(SubmitError::Refused));
}

/// The same as for a wait: the completion is behind more completions than one drain takes, and the deadline has passed.
#[test]
fn run_does_not_time_out_on_a_completion_that_is_there() {
    let rig = Rig::new(256, 255, 255, 0);
    let queue = rig.shared();
    for tag in 0..254 {
        let _token = submit(&queue, &LoneThread, command(tag, tag)).unwrap();
    }
    let hand = RefCell::new(Hand::new(&rig));
    assert_eq!(hand.borrow_mut().serve(), 254);
    let here = Paused::new(|| {
        hand.borrow_mut().serve();
    });
    let end = queue.run(&here, || command(254, 254), 0).unwrap();
    assert_eq!(end, Ok((CommandOutcome::Completed(Status::SUCCESS), 254)));
}

/// A command that was never placed is not waited for, whatever its cell is used for.
#[test]
fn run_returns_at_once_when_its_command_is_refused() {
    let rig = Rig::new(4, 3, 4, 0);
    let queue = rig.shared();
    let here = Paused::new(|| panic!("a pause"));
    let (iova, len) = (Iova(0x1000), 0);
    let bad = || command(0, 0).with_data(CommandData::Contiguous { iova, len });
    let end = queue.run(&here, bad, FOREVER).unwrap();
    assert_eq!(end, Err(SubmitError::Map(PointerError::Empty)));
    let _token = submit(&queue, &LoneThread, command(0, 0)).unwrap();
    let end = queue.run(&here, || command(1, 0), FOREVER).unwrap();
    assert_eq!(end, Err(SubmitError::CellBusy));
}

/// Threads with different queues are no group; all views of one queue have the same key.
#[test]
fn each_queue_has_a_key_of_its_own() {
    let rigs = [(); 3].map(|()| Rig::new(4, 3, 0, 0));
    let keys: HashSet<_> = rigs.iter().map(|rig| rig.shared().key()).collect();
    assert_eq!(keys.len(), rigs.len());
    assert!(rigs.iter().all(|rig| keys.contains(&rig.shared().key())));
}

/// Queues of several controllers may have one identifier, and identifiers and addresses the same bits.
#[test]
fn a_queues_key_is_not_mixed_with_its_identifier() {
    const BYTES: usize = 1024;
    let rig = Rig::new(4, 3, 0, 0);
    let memory: Vec<_> = (0..3 * BYTES / 4)
        .map(|_| sync::AtomicU32::new(0))
        .collect();
    let keys = memory.chunks(BYTES / 4).map(|words| {
        let state = QueueState::new(words, Qid(BYTES as u16), 4, 3).unwrap();
        SharedQueue::new(rig.memory(), state, rig.cells()).key()
    });
    assert_eq!(keys.collect::<HashSet<_>>().len(), 3);
}

/// A thread that waits for a slot rings for commands that others only placed: otherwise both would wait for ever.
#[test]
fn run_rings_for_what_fills_the_queue() {
    let rig = Rig::new(2, 1, 2, 0);
    let queue = rig.shared();
    let hand = RefCell::new(Hand::new(&rig));
    let here = Paused::new(|| {
        hand.borrow_mut().serve();
    });
    let placed = submit(&queue, &LoneThread, command(0, 0)).unwrap();
    let end = queue.run(&here, || command(1, 1), FOREVER).unwrap();
    assert_eq!(end, Ok((CommandOutcome::Completed(Status::SUCCESS), 1)));
    assert_eq!(
        queue.poll(&placed),
        Some((CommandOutcome::Completed(Status::SUCCESS), 0))
    );
}

/// Four slots, many more threads; each submits three commands and waits for them in reverse.
#[test]
fn tokens_held_by_many_threads_do_not_deadlock() {
    const THREADS: u32 = 24;
    const ROUNDS: u32 = 20;
    let rig = Rig::new(8, 4, THREADS as usize * 3, 0);
    let stop = AtomicBool::new(false);
    let left = AtomicU32::new(THREADS);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut hand = Hand::new(&rig);
            let mut rng = Rng::new(7);
            let mut held: Vec<Sqe> = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                held.extend(std::iter::from_fn(|| hand.fetch()));
                // Completions are in any order, sometimes with pauses. A thread that is suspended before it has read
                // the entries that it took keeps them from the controller.
                if !held.is_empty() && rng.below(3) > 0 && hand.has_room() {
                    let sqe = held.swap_remove(rng.below(held.len() as u64) as usize);
                    hand.complete(sqe.cid(), Status::SUCCESS, sqe.cdw10);
                } else {
                    std::thread::yield_now();
                }
            }
        });
        for thread in 0..THREADS {
            let (rig, left, stop) = (&rig, &left, &stop);
            scope.spawn(move || {
                let queue = rig.shared();
                let here = Clock::default();
                for round in 0..ROUNDS {
                    let tokens = [0, 1, 2].map(|n| {
                        let number = thread << 16 | round << 2 | n;
                        let one = command(number, thread * 3 + n);
                        (number, queue.submit(&here, one, FOREVER).unwrap())
                    });
                    for (number, token) in tokens.into_iter().rev() {
                        let end = queue.wait(&here, token, FOREVER).unwrap();
                        assert_eq!(end, (CommandOutcome::Completed(Status::SUCCESS), number));
                    }
                    let number = thread << 16 | round << 2 | 3;
                    let end = queue.run(&here, || command(number, thread * 3), FOREVER);
                    assert_eq!(
                        end.unwrap(),
                        Ok((CommandOutcome::Completed(Status::SUCCESS), number))
                    );
                }
                if left.fetch_sub(1, Ordering::Relaxed) == 1 {
                    stop.store(true, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(rig.shared().state().in_flight(), 0);
    assert_eq!(rig.shared().fault(), None);
}
