//! The shared queue under loom: submitters, drainers and a controller, each property in its own model.

use loom::thread;
use nvme_core::group::LoneThread;
use nvme_core::spec::Status;
use nvme_core::sync::{AtomicU64, Order, Scope, spin};
use nvme_core::{CommandOutcome, CommandToken, SharedQueue, SubmitError, WaitError};
use nvme_tests::hand::{Hand, Rig};
use nvme_tests::model::{Bound, check, command, controller, finish, place, place_plain, serve};
use nvme_tests::team::Looks;
use std::sync::Arc;

const NEVER: u64 = u64::MAX;

/// The last position before the wrap of 32 bits at which a queue of 2 or 4 entries can begin.
const BEFORE_WRAP: u32 = 0u32.wrapping_sub(8);

/// Drains, then tries to place a command; does this twice.
fn place_soon(queue: &SharedQueue<'_>, number: u32, cell: u32) -> Option<CommandToken> {
    for _ in 0..2 {
        queue.drain(&LoneThread);
        match queue.place(&LoneThread, command(number, cell)) {
            Ok(token) => {
                queue.ring(&LoneThread);
                return Some(token);
            }
            Err(error) => assert_eq!(error, SubmitError::QueueFull),
        }
    }
    None
}

#[test]
fn one_thread_and_the_controller() {
    check(
        "a command is fetched whole, and its own result comes back",
        Bound::Exhaustive,
        || {
            let rig = Arc::new(Rig::new(2, 1, 1, 0));
            let device = controller(&rig, 1);
            let queue = rig.shared();
            let token = place(&queue, 7, 0);
            finish(&queue, &token, 7);
            device.join().unwrap();
        },
    );
}

#[test]
fn submit_and_submit() {
    check(
        "two submitters: whole entries, the tail never goes back, nobody who waits is left unrung",
        Bound::Preemptions(2),
        || {
            let rig = Arc::new(Rig::new(4, 3, 2, 0));
            let device = controller(&rig, 2);
            let other = rig.clone();
            let other = thread::spawn(move || {
                let queue = other.shared();
                place(&queue, 1, 1).words()
            });
            let queue = rig.shared();
            let mine = place(&queue, 0, 0);
            let others = CommandToken::from_words(other.join().unwrap());
            for (token, number) in [(mine, 0), (others, 1)] {
                let end = queue.wait(&Looks::default(), token, NEVER).unwrap();
                assert_eq!(end, (CommandOutcome::Completed(Status::SUCCESS), number));
            }
            device.join().unwrap();
            assert_eq!(queue.state().in_flight(), 0);
        },
    );
}

#[test]
fn submit_and_drain() {
    check(
        "one submits while another drains what was there: each command ends once, in its own cell",
        Bound::Preemptions(2),
        || {
            let rig = Arc::new(Rig::new(4, 3, 2, 0));
            let mine = place(&rig.shared(), 0, 0);
            let device = controller(&rig, 2);
            let other = rig.clone();
            let other = thread::spawn(move || {
                let queue = other.shared();
                finish(&queue, &mine, 0);
            });
            let queue = rig.shared();
            let token = place(&queue, 1, 1);
            other.join().unwrap();
            finish(&queue, &token, 1);
            device.join().unwrap();
        },
    );
}

#[test]
fn drain_and_drain() {
    two_drain(
        "two drain at the same time and read dword 0: no completion is lost or taken twice, the head goes forward",
        place,
        |number| number,
    );
}

#[test]
fn drain_and_drain_as_usual() {
    two_drain(
        "two drain at the same time: no completion is lost or taken twice, the head goes forward",
        place_plain,
        |_| 0,
    );
}

fn two_drain(
    property: &'static str,
    place: fn(&SharedQueue<'_>, u32, u32) -> CommandToken,
    dw0: fn(u32) -> u32,
) {
    check(property, Bound::Preemptions(2), move || {
        let rig = Arc::new(Rig::new(4, 3, 2, 0));
        let [mine, others] = [0, 1].map(|cell| place(&rig.shared(), cell, cell));
        let device = rig.clone();
        let device = thread::spawn(move || {
            let mut hand = Hand::new(&device);
            serve(&mut hand, 2);
            hand.scribble();
        });
        let other = rig.clone();
        let other = thread::spawn(move || {
            other.shared().drain(&LoneThread);
            other.shared().drain(&LoneThread);
        });
        let queue = rig.shared();
        queue.drain(&LoneThread);
        queue.drain(&LoneThread);
        other.join().unwrap();
        device.join().unwrap();
        finish(&queue, &mine, dw0(0));
        finish(&queue, &others, dw0(1));
        assert_eq!(rig.state().in_flight(), 0);
    });
}

#[test]
fn a_late_read_and_the_next_holder() {
    check(
        "one drains and reads dword 0 late, the next one gives the entry back: it is not overwritten before it is read",
        Bound::Preemptions(1),
        || {
            // Given back by quarters: two entries.
            let rig = Arc::new(Rig::new(8, 7, 2, 0));
            let tokens = [0, 1].map(|cell| place(&rig.shared(), cell, cell));
            let mut hand = Hand::new(&rig);
            let [first, second] = [hand.fetch().unwrap(), hand.fetch().unwrap()];
            hand.complete(first.cid(), Status::SUCCESS, first.cdw10);
            drop(hand);
            let other = rig.clone();
            let other = thread::spawn(move || _ = other.shared().drain(&LoneThread));
            let device = rig.clone();
            let device = thread::spawn(move || {
                let mut hand = Hand::resumed(&device, 2, 1);
                hand.complete(second.cid(), Status::SUCCESS, second.cdw10);
                spin();
                hand.scribble();
            });
            rig.shared().drain(&LoneThread);
            rig.shared().drain(&LoneThread);
            other.join().unwrap();
            device.join().unwrap();
            for (token, number) in tokens.into_iter().zip(0..) {
                finish(&rig.shared(), &token, number);
            }
        },
    );
}

#[test]
fn run_and_run() {
    check(
        "two threads submit and wait in one loop: each command ends once, with its own result",
        Bound::Preemptions(0),
        || {
            let rig = Arc::new(Rig::new(4, 3, 2, 0));
            let device = controller(&rig, 2);
            let other = rig.clone();
            let run = |rig: &Rig, number| {
                let end = rig
                    .shared()
                    .run(&Looks::default(), || command(number, number), NEVER);
                let end = end.map_err(|(error, _)| error).unwrap().unwrap();
                assert_eq!(end, (CommandOutcome::Completed(Status::SUCCESS), number));
            };
            let other = thread::spawn(move || run(&other, 1));
            run(&rig, 0);
            other.join().unwrap();
            device.join().unwrap();
            assert_eq!(rig.state().in_flight(), 0);
        },
    );
}

#[test]
fn the_position_of_a_slot_holder_is_free() {
    check(
        "design 6.3: an entry is written only after the controller has fetched its last user, round a ring of two",
        Bound::Preemptions(1),
        || {
            let rig = Arc::new(Rig::new(2, 1, 3, 0));
            let first = place(&rig.shared(), 0, 0);
            let device = controller(&rig, 3);
            let other = rig.clone();
            // The thread that is first takes the free entry; the other one takes the first command's.
            let other = thread::spawn(move || {
                let queue = other.shared();
                let token = place_soon(&queue, 1, 1);
                token.map(CommandToken::words)
            });
            let queue = rig.shared();
            let mine = place_soon(&queue, 2, 2);
            let others = other.join().unwrap().map(CommandToken::from_words);
            finish(&queue, &first, 0);
            // Threads that found no slot get one now: all have three.
            for (token, number) in [(others, 1), (mine, 2)] {
                let token = match token {
                    Some(token) => token,
                    None => {
                        while queue.state().in_flight() > 0 {
                            queue.drain(&LoneThread);
                            spin();
                        }
                        place(&queue, number, number)
                    }
                };
                finish(&queue, &token, number);
            }
            device.join().unwrap();
            assert_eq!(queue.fault(), None);
        },
    );
}

#[test]
fn counters_wrap() {
    check(
        "positions pass 2^32 and generations move on: every command still ends once",
        Bound::Preemptions(1),
        || {
            let rig = Arc::new(Rig::new(2, 1, 1, BEFORE_WRAP));
            let device = controller(&rig, 10);
            let queue = rig.shared();
            let mut last = None;
            for number in 0..10 {
                let token = place(&queue, number, 0);
                assert_ne!(last, Some(token.cid()));
                last = Some(token.cid());
                finish(&queue, &token, number);
            }
            device.join().unwrap();
        },
    );
}

#[test]
fn a_full_queue_refuses_and_recovers() {
    check(
        "a claim succeeds at once or is QueueFull; a slot is handed on only when its command has ended",
        Bound::Preemptions(2),
        || {
            let rig = Arc::new(Rig::new(2, 1, 2, 0));
            let first = place(&rig.shared(), 0, 0);
            let device = controller(&rig, 2);
            let other = rig.clone();
            let other = thread::spawn(move || finish(&other.shared(), &first, 0));
            let queue = rig.shared();
            let token = match queue.place(&LoneThread, command(1, 1)) {
                Ok(token) => token,
                Err(error) => {
                    assert_eq!(error, SubmitError::QueueFull);
                    other.join().unwrap();
                    // The command has ended, so the claim succeeds.
                    let token = queue.place(&LoneThread, command(1, 1)).unwrap();
                    queue.ring(&LoneThread);
                    finish(&queue, &token, 1);
                    device.join().unwrap();
                    return;
                }
            };
            queue.ring(&LoneThread);
            finish(&queue, &token, 1);
            other.join().unwrap();
            device.join().unwrap();
        },
    );
}

#[test]
fn a_timeout_while_the_completion_is_drained() {
    check(
        "a wait that gives up while another drains: the command ends once, with its own result",
        Bound::Preemptions(2),
        || {
            let rig = Arc::new(Rig::new(2, 1, 1, 0));
            let token = place(&rig.shared(), 5, 0);
            let device = controller(&rig, 1);
            let other = rig.clone();
            let other = thread::spawn(move || {
                let _ = other.shared().drain(&LoneThread);
            });
            let queue = rig.shared();
            match queue.wait(&Looks::default(), token, 0) {
                Ok(end) => assert_eq!(end, (CommandOutcome::Completed(Status::SUCCESS), 5)),
                Err((error, token)) => {
                    assert_eq!(error, WaitError::TimedOut);
                    // The command keeps its slot or its cell after the timeout, unless it has ended meanwhile.
                    let ended = queue.poll(&token).is_some();
                    assert!(ended || queue.state().in_flight() <= 1);
                    finish(&queue, &token, 5);
                }
            }
            other.join().unwrap();
            device.join().unwrap();
        },
    );
}

#[test]
fn what_a_command_moved_is_there_when_its_end_is() {
    check(
        "one drains and another polls: with the end comes what the controller wrote before it",
        Bound::Exhaustive,
        || {
            let rig = Arc::new(Rig::new(2, 1, 1, 0));
            let token = place(&rig.shared(), 3, 0);
            let data = Arc::new(AtomicU64::new(0));
            let (device, buffer) = (rig.clone(), data.clone());
            let device = thread::spawn(move || {
                buffer.store(99, Order::Relaxed, Scope::Sys);
                serve(&mut Hand::new(&device), 1);
            });
            let other = rig.clone();
            let other = thread::spawn(move || _ = other.shared().drain(&LoneThread));
            let queue = rig.shared();
            if queue.poll(&token).is_some() {
                assert_eq!(data.load_settled(Scope::Sys), 99);
            }
            device.join().unwrap();
            other.join().unwrap();
        },
    );
}

#[test]
fn a_slot_that_was_never_used_meets_an_entry_that_was() {
    check(
        "design 6.3: the entry is free even for a holder who has learned nothing from its own slot",
        Bound::Preemptions(3),
        || {
            let rig = Arc::new(Rig::new(4, 2, 2, 0));
            let other = rig.clone();
            let other = thread::spawn(move || {
                // The slot is in the other word: cell 1 asks for slot 1.
                let token = other.shared().place(&LoneThread, command(9, 1));
                token.map(CommandToken::words).ok()
            });
            let queue = rig.shared();
            let mut hand = Hand::new(&rig);
            for number in 0..4 {
                if let Ok(token) = queue.place(&LoneThread, command(number, 0)) {
                    queue.ring(&LoneThread);
                    if hand.serve() > 0 {
                        queue.drain(&LoneThread);
                    }
                    let _ = token;
                }
            }
            other.join().unwrap();
            assert_eq!(queue.fault(), None);
        },
    );
}

#[test]
fn two_who_ring_in_a_row() {
    check(
        "two hold the ring lock one after the other: the tail never goes back",
        Bound::Preemptions(3),
        || {
            let rig = Arc::new(Rig::new(4, 3, 2, 0));
            let other = rig.clone();
            let other = thread::spawn(move || {
                let _token = place(&other.shared(), 1, 1);
            });
            let watcher = rig.clone();
            let watcher = thread::spawn(move || {
                let mut hand = Hand::new(&watcher);
                // Looks that go back panic.
                hand.look();
                hand.look();
                hand.look();
            });
            let _token = place(&rig.shared(), 0, 0);
            other.join().unwrap();
            watcher.join().unwrap();
        },
    );
}

#[test]
fn the_host_takes_over_from_a_kernel() {
    check(
        "what two kernel threads left in flight ends on the host, and the queue goes on",
        Bound::Preemptions(1),
        || {
            let rig = Arc::new(Rig::new(4, 3, 2, 0));
            let device = controller(&rig, 3);
            let kernel = [0, 1].map(|cell| {
                let rig = rig.clone();
                thread::spawn(move || {
                    let token = rig
                        .shared()
                        .place(&LoneThread, command(cell, cell))
                        .unwrap();
                    rig.shared().ring(&LoneThread);
                    token.words()
                })
            });
            let tokens = kernel.map(|thread| CommandToken::from_words(thread.join().unwrap()));
            // The host makes its own queue over the same words.
            let queue = rig.shared();
            for (token, number) in tokens.into_iter().zip(0..) {
                let end = queue.wait(&Looks::default(), token, NEVER).unwrap();
                assert_eq!(end, (CommandOutcome::Completed(Status::SUCCESS), number));
            }
            let token = place(&queue, 2, 0);
            finish(&queue, &token, 2);
            device.join().unwrap();
        },
    );
}
