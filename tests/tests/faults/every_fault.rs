//! Checks how the driver handles every kind of fault: a typed error in time, and each command ended once.

use nvme_core::recovery::{AbortAttempt, RecoveryStep, ResetCause};
use nvme_core::spec::{Cid, Lba, Nsid, Qid, Status, nvm};
use nvme_core::{AbortReason, BringupError, CommandData, CommandOutcome, ControllerFault};
use nvme_sim::config::NamespaceConfig;
use nvme_sim::{Config, Fault, FaultCondition, FaultRule, MemoryStore};
use nvme_tests::{End, Pair, Setup, with_pair};

const NS: Nsid = Nsid(1);
const SECOND: u64 = 1_000_000_000;

/// Returns a controller on which the n-th I/O command meets `what`.
fn faulty(what: Fault, nth: u64) -> Config {
    let store = Box::new(MemoryStore::new(1 << 20).unwrap());
    let mut config = Config {
        namespaces: vec![NamespaceConfig::new(512, store)],
        ..Config::empty()
    };
    config.faults.rules.push(FaultRule {
        when: FaultCondition {
            nth: Some(nth),
            ..FaultCondition::default()
        },
        what,
    });
    config
}

fn read(pair: &mut Pair<'_>, lba: u64) -> u64 {
    let area = pair.buffer(512);
    let data = CommandData::Contiguous {
        iova: area.iova,
        len: 512,
    };
    pair.submit(0, nvm::read(NS, Lba(lba), 1), data).unwrap()
}

/// Submits four reads, the second of which meets the fault, and polls until no more completions arrive.
fn four_reads(pair: &mut Pair<'_>) -> Result<(), ControllerFault> {
    pair.bring_up().unwrap();
    for lba in 0..4 {
        read(pair, lba);
    }
    pair.io[0].ring();
    for _ in 0..50 {
        pair.sim.step(pair.now_ns);
        pair.poll(0)?;
        let later = pair.now_ns + 10_000_000;
        pair.sleep_until(later);
    }
    Ok(())
}

/// Recovers after a fault: a reset ends every command that has not ended, and the controller works again.
fn recovers(pair: &mut Pair<'_>) {
    pair.bring_up().unwrap();
    assert_eq!(pair.outstanding(), 0, "a reset leaves nothing in flight");
    assert!(
        pair.ended
            .iter()
            .all(|end| pair.ended.iter().filter(|one| one.id == end.id).count() == 1)
    );
    let id = read(pair, 9);
    let end = pair.wait(0, id).unwrap().unwrap();
    assert_eq!(end.outcome, CommandOutcome::Completed(Status::SUCCESS));
}

fn outcomes(pair: &Pair<'_>) -> Vec<CommandOutcome> {
    let mut ends: Vec<End> = pair.ended.clone();
    ends.sort_by_key(|end| end.id);
    ends.iter().map(|end| end.outcome).collect()
}

const OK: CommandOutcome = CommandOutcome::Completed(Status::SUCCESS);
const RESET: CommandOutcome = CommandOutcome::Aborted(AbortReason::ControllerReset);

#[test]
fn a_dropped_command_expires_and_a_reset_gives_its_buffer_back() {
    with_pair(faulty(Fault::Drop, 2), Setup::default(), |pair| {
        four_reads(pair).unwrap();
        assert_eq!((pair.ended.len(), pair.outstanding()), (3, 1));
        assert_eq!(
            pair.io[0].expire(pair.now_ns),
            None,
            "its deadline is not over"
        );
        pair.now_ns += SECOND;
        let expired = pair.io[0]
            .expire(pair.now_ns)
            .expect("its deadline is over");
        assert_eq!(
            pair.io[0].expire(pair.now_ns),
            None,
            "an expired command is named once"
        );
        assert!(
            pair.io[0].is_in_flight(expired),
            "but it stays in flight: its buffer is not free"
        );
        assert_eq!(pair.outstanding(), 1);
        recovers(pair);
        assert_eq!(outcomes(pair)[..4], [OK, RESET, OK, OK]);
        let end = pair.ended.iter().find(|end| end.cid == expired).unwrap();
        assert!(end.late);
    });
}

#[test]
fn a_late_completion_ends_an_expired_command_as_late() {
    with_pair(
        faulty(Fault::Delay(3 * SECOND), 2),
        Setup::default(),
        |pair| {
            four_reads(pair).unwrap();
            pair.now_ns += SECOND;
            let expired = pair.io[0].expire(pair.now_ns).unwrap();
            let depth = pair.io[0].depth();
            // Its slot is quarantined: the queue takes one command less, and no other command gets its identifier.
            for _ in 1..depth {
                let id = read(pair, 0);
                assert!(
                    pair.wait(0, id)
                        .unwrap()
                        .is_some_and(|end| end.cid != expired)
                );
            }
            pair.now_ns += 3 * SECOND;
            pair.sim.step(pair.now_ns);
            assert_eq!(pair.poll(0), Ok(1));
            let end = *pair.ended.last().unwrap();
            assert_eq!((end.cid, end.outcome, end.late), (expired, OK, true));
            assert_eq!(pair.outstanding(), 0);
        },
    );
}

/// A buffer is the controller's until the command's end, timeout or not; after it, never again.
#[test]
fn the_controller_is_done_with_a_buffer_when_the_driver_gets_it_back() {
    for reset in [false, true] {
        with_pair(
            faulty(Fault::Delay(3 * SECOND), 1),
            Setup::default(),
            |pair| {
                pair.bring_up().unwrap();
                let area = pair.buffer(4096);
                let data = CommandData::Contiguous {
                    iova: area.iova,
                    len: 4096,
                };
                let id = pair.submit(0, nvm::read(NS, Lba(0), 8), data).unwrap();
                assert_eq!(
                    pair.wait(0, id).unwrap(),
                    None,
                    "it is delayed past its deadline"
                );
                assert!(pair.io[0].expire(pair.now_ns).is_some());
                assert!(pair.ended.is_empty(), "the buffer was given back too early");
                if reset {
                    pair.bring_up().unwrap();
                } else {
                    pair.now_ns += 3 * SECOND;
                    pair.sim.step(pair.now_ns);
                    pair.poll(0).unwrap();
                }
                assert_eq!(pair.ended.len(), 1);
                // The driver may unmap the buffer now: the controller does not access it any more.
                pair.memory.set_mapped(area, false);
                for _ in 0..20 {
                    pair.now_ns += SECOND;
                    pair.sim.step(pair.now_ns);
                    pair.poll(0).unwrap();
                }
                assert_eq!(pair.memory.refused(), [0; 0]);
                recovers(pair);
            },
        );
    }
}

#[test]
fn reordered_completions_are_matched_by_their_identifier() {
    with_pair(faulty(Fault::Reorder, 2), Setup::default(), |pair| {
        four_reads(pair).unwrap();
        let order: Vec<u64> = pair.ended.iter().map(|end| end.id).collect();
        assert_eq!(order.len(), 4);
        assert_eq!(
            *order.last().unwrap(),
            2,
            "the fault did not reorder: {order:?}"
        );
        assert_eq!(outcomes(pair), [OK; 4]);
    });
}

#[test]
fn a_duplicate_completion_is_a_fault_and_ends_nothing_twice() {
    with_pair(faulty(Fault::Duplicate, 2), Setup::default(), |pair| {
        let fault = four_reads(pair).unwrap_err();
        assert!(
            matches!(
                fault,
                ControllerFault::UnknownCid(_) | ControllerFault::StaleCid(_)
            ),
            "{fault:?}"
        );
        recovers(pair);
    });
}

#[test]
fn an_unknown_identifier_is_a_fault() {
    with_pair(
        faulty(Fault::WrongCid(0x7777), 2),
        Setup::default(),
        |pair| {
            assert_eq!(
                four_reads(pair),
                Err(ControllerFault::UnknownCid(Cid(0x7777)))
            );
            assert_eq!(pair.ended.len(), 1);
            recovers(pair);
            assert_eq!(outcomes(pair)[..4], [OK, RESET, RESET, RESET]);
        },
    );
}

#[test]
fn an_impossible_queue_head_is_a_fault() {
    for head in [5, 15, 16, 0xFFFF] {
        with_pair(faulty(Fault::BadSqhd(head), 2), Setup::default(), |pair| {
            assert_eq!(four_reads(pair), Err(ControllerFault::SqHead(head)));
            recovers(pair);
        });
    }
}

/// The entry is not seen, so its command expires; the entries behind it wait for the reset, too.
#[test]
fn a_completion_with_the_old_phase_is_not_seen() {
    with_pair(faulty(Fault::WrongPhase, 2), Setup::default(), |pair| {
        four_reads(pair).unwrap();
        assert_eq!(pair.ended.len(), 1);
        pair.now_ns += SECOND;
        assert!(pair.io[0].expire(pair.now_ns).is_some());
        recovers(pair);
        assert_eq!(outcomes(pair)[..4], [OK, RESET, RESET, RESET]);
    });
}

#[test]
fn a_status_comes_back_with_the_buffer() {
    let status = Status::UNRECOVERED_READ_ERROR;
    with_pair(faulty(Fault::Status(status), 2), Setup::default(), |pair| {
        four_reads(pair).unwrap();
        assert_eq!(pair.outstanding(), 0);
        let CommandOutcome::Completed(got) = outcomes(pair)[1] else {
            panic!("no status")
        };
        assert!(got.is(status), "{got}");
        recovers(pair);
    });
}

#[test]
fn a_fatal_status_is_found_and_a_reset_clears_it() {
    with_pair(faulty(Fault::Cfs, 2), Setup::default(), |pair| {
        four_reads(pair).unwrap();
        assert!(pair.outstanding() > 0);
        recovers(pair);
        assert_eq!(pair.ended.len(), 5);
    });
}

#[test]
fn a_device_that_leaves_the_bus_is_told_apart_from_a_slow_one() {
    with_pair(faulty(Fault::AllOnes, 2), Setup::default(), |pair| {
        four_reads(pair).unwrap();
        let left = pair.outstanding();
        assert!(left > 0);
        assert_eq!(pair.bring_up(), Err(BringupError::DeviceGone));
        assert_eq!(
            pair.outstanding(),
            left,
            "no proof that memory is free, so no buffer comes back"
        );
        pair.sim.power_cut();
        recovers(pair);
    });
}

/// The phase tag arrives before the rest of the entry: dwords 0-1 may be old, the identifier is not.
#[test]
fn a_torn_entry_still_ends_the_right_command() {
    with_pair(faulty(Fault::TornCqe, 2), Setup::default(), |pair| {
        four_reads(pair).unwrap();
        assert_eq!(outcomes(pair), [OK; 4]);
    });
}

#[test]
fn an_abort_ends_a_slow_command_by_its_own_completion() {
    with_pair(
        faulty(Fault::Delay(600 * SECOND), 1),
        Setup::default(),
        |pair| {
            pair.bring_up().unwrap();
            let id = read(pair, 0);
            assert_eq!(pair.wait(0, id).unwrap(), None);
            let cid = pair.io[0].expire(pair.now_ns).unwrap();
            assert_eq!(attempt(pair, cid), RecoveryStep::Ended);
            let end = *pair.ended.last().unwrap();
            assert!(
                matches!(end.outcome, CommandOutcome::Completed(status) if status.is(Status::ABORT_REQUESTED)),
                "{end:?}"
            );
            assert!(end.late && end.id == id);
        },
    );
}

#[test]
fn an_abort_that_does_not_find_its_command_leads_to_a_reset() {
    with_pair(faulty(Fault::Drop, 1), Setup::default(), |pair| {
        pair.bring_up().unwrap();
        let id = read(pair, 0);
        assert_eq!(pair.wait(0, id).unwrap(), None);
        let cid = pair.io[0].expire(pair.now_ns).unwrap();
        let before = pair.now_ns;
        assert_eq!(
            attempt(pair, cid),
            RecoveryStep::ResetNeeded(ResetCause::NoCompletion)
        );
        assert!(
            pair.now_ns - before <= 3 * SECOND,
            "each wait has its grace of one second"
        );
        assert_eq!(pair.outstanding(), 1, "an answered Abort frees nothing");
        recovers(pair);
        assert_eq!(outcomes(pair)[0], RESET);
    });
}

#[test]
fn an_abort_that_is_not_answered_leads_to_a_reset() {
    let mut config = faulty(Fault::Drop, 1);
    let when = FaultCondition {
        qid: Some(0),
        opcode: Some(8),
        ..FaultCondition::default()
    };
    config.faults.rules.push(FaultRule {
        when,
        what: Fault::Drop,
    });
    with_pair(config, Setup::default(), |pair| {
        pair.bring_up().unwrap();
        let id = read(pair, 0);
        assert_eq!(pair.wait(0, id).unwrap(), None);
        let cid = pair.io[0].expire(pair.now_ns).unwrap();
        assert_eq!(
            attempt(pair, cid),
            RecoveryStep::ResetNeeded(ResetCause::AdminDead)
        );
        recovers(pair);
    });
}

/// Runs an abort attempt on the first I/O queue to its end.
fn attempt(pair: &mut Pair<'_>, cid: Cid) -> RecoveryStep {
    let mut attempt = AbortAttempt::new(Qid(1), cid, SECOND);
    loop {
        pair.poll(0).unwrap();
        let in_flight = pair.io[0].is_in_flight(cid);
        match attempt.step(&mut pair.admin, in_flight, pair.now_ns, |_| {}) {
            RecoveryStep::Wait { until_ns } => {
                assert!(until_ns > pair.now_ns);
                pair.sleep_until(until_ns);
            }
            end => return end,
        }
    }
}

/// A random schedule under random faults: whatever happens, each command ends exactly once, and
/// every buffer that came back is the driver's own.
#[test]
fn every_command_ends_once_under_any_faults() {
    for seed in 0..60 {
        let kinds = [
            Fault::Drop,
            Fault::Delay(5_000_000),
            Fault::Reorder,
            Fault::Duplicate,
            Fault::WrongCid(3),
            Fault::BadSqhd(11),
            Fault::WrongPhase,
            Fault::Status(Status::WRITE_FAULT),
            Fault::TornCqe,
        ];
        let mut config = faulty(kinds[seed as usize % kinds.len()], 0);
        config.faults.rules[0].when = FaultCondition {
            per_million: Some(30_000),
            ..FaultCondition::default()
        };
        config.faults.seed = seed;
        let queues = vec![(2 + (seed as u32 * 7) % 30, 2 + (seed as u32 * 5) % 30); 2];
        with_pair(
            config,
            Setup {
                queues,
                seed,
                ..Setup::default()
            },
            |pair| {
                pair.bring_up().unwrap();
                // A buffer for each command: one that is in flight is the device's to write.
                let areas: Vec<_> = (0..600).map(|_| pair.buffer(4096)).collect();
                let mut submitted = 0;
                for area in areas {
                    let queue = pair.rng.below(2) as usize;
                    let mut broken = false;
                    match pair.rng.below(6) {
                        0..=2 => {
                            let lba = Lba(pair.rng.below(2000));
                            let data = CommandData::Contiguous {
                                iova: area.iova,
                                len: 512,
                            };
                            submitted +=
                                u64::from(pair.submit(queue, nvm::read(NS, lba, 1), data).is_ok());
                        }
                        3 => pair.io[queue].ring(),
                        4 => drop(pair.sim.step(pair.now_ns)),
                        _ => broken = pair.poll(queue).is_err(),
                    }
                    pair.now_ns += pair.rng.below(3_000_000);
                    broken |= pair.io[queue].expire(pair.now_ns).is_some();
                    if broken {
                        pair.bring_up().unwrap();
                        assert_eq!(pair.outstanding(), 0);
                    }
                }
                pair.bring_up().unwrap();
                assert_eq!(pair.ended.len() as u64, submitted);
                assert_eq!(pair.memory.refused(), [0; 0]);
            },
        );
    }
}
