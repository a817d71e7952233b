//! Tests of `serve`: every fault of a command, and late events.

use super::*;
use crate::config::fault::{Fault, FaultCondition, FaultRule};
use crate::medium::latency::LatencyProfile;
use crate::testing::{DATA, Driver, ENTRIES, config, sq_at};
use alloc::vec::Vec;
use nvme_auditor::Rule;
use nvme_spec::register::{ALL_ONES, offset};
use nvme_spec::{Lba, Nsid, Qid, Sqe, Status, admin};

/// Completions as (CID, status code).
type Done = Vec<(u16, u16)>;

fn read() -> Sqe {
    nvme_spec::nvm::read(Nsid(1), Lba(0), 1).with_prps(DATA, 0)
}

fn with(what: Fault, nth: u64) -> Driver {
    let mut config = config();
    let when = FaultCondition {
        nth: Some(nth),
        ..FaultCondition::default()
    };
    config.faults.rules.push(FaultRule { when, what });
    Driver::with_queue(config)
}

/// Submits three reads in one batch; returns the completions of a first and a second step.
fn three(driver: &mut Driver) -> (Done, Done) {
    let read = |page: u64| read().with_prps(DATA + page * 4096, 0);
    let first = driver.push(1, read(0));
    driver.push(1, read(1));
    driver.push(1, read(2));
    driver.ring(1);
    driver.step();
    let relative = |done: Vec<(u16, u16)>| {
        done.into_iter()
            .map(|(cid, code)| (cid.wrapping_sub(first), code))
            .collect::<Vec<_>>()
    };
    let before = relative(driver.drain(1));
    driver.now_ns += 10_000;
    driver.step();
    (before, relative(driver.drain(1)))
}

#[test]
fn each_fault_does_what_its_name_says() {
    let error = Status::UNRECOVERED_READ_ERROR;
    let run = |what| three(&mut with(what, 2));
    assert_eq!(run(Fault::Drop), ([(0, 0), (2, 0)].into(), [].into()));
    assert_eq!(
        run(Fault::Delay(10_000)),
        ([(0, 0), (2, 0)].into(), [(1, 0)].into())
    );
    assert_eq!(
        run(Fault::Reorder),
        ([(0, 0), (2, 0), (1, 0)].into(), [].into())
    );
    assert_eq!(run(Fault::Duplicate).0, [(0, 0), (1, 0), (1, 0), (2, 0)]);
    assert_eq!(
        run(Fault::Status(error)).0,
        [(0, 0), (1, error.code()), (2, 0)]
    );
    assert_eq!(
        run(Fault::WrongPhase).0,
        [(0, 0)],
        "the driver stops at the stale phase"
    );
    let mut driver = with(Fault::WrongCid(0xABCD), 2);
    let cids: Vec<_> = three(&mut driver).0;
    assert_eq!(cids.len(), 3);
    assert_ne!(cids[1].0, 1);
}

#[test]
fn an_echo_comes_later_and_so_do_late_data() {
    let mut driver = with(Fault::Echo(10_000), 2);
    let (now, later) = three(&mut driver);
    assert_eq!(now, [(0, 0), (1, 0), (2, 0)]);
    assert_eq!(later, [(1, 0)]);

    let mut driver = with(Fault::LateData(10_000), 2);
    driver.fill(DATA, 0x77, 512);
    driver.push(1, nvme_spec::nvm::flush(Nsid(1)));
    driver.push(1, read());
    driver.ring(1);
    driver.step();
    assert_eq!(driver.drain(1).len(), 2);
    assert_eq!(driver.bytes(DATA, 512), [0x77; 512]);
    driver.now_ns += 10_000;
    driver.step();
    assert_eq!(driver.bytes(DATA, 512), [0; 512]);
    assert_eq!(driver.drain(1), [], "it has completed before");
}

/// A pending echo takes no room from commands: one after the other completes in the smallest queue.
#[test]
fn echoes_to_come_hold_nothing_up() {
    let mut config = config();
    config.faults.rules.push(FaultRule {
        when: FaultCondition::default(),
        what: Fault::Echo(1 << 40),
    });
    let mut driver = Driver::with_queue(config);
    for _ in 0..3 * ENTRIES {
        let cid = driver.push(1, read());
        driver.ring(1);
        driver.step();
        assert_eq!(driver.drain(1), [(cid, 0)]);
    }
}

#[test]
fn flipped_bits_make_a_stale_identifier() {
    let mut driver = with(Fault::FlippedCid(0x1000), 2);
    let cids: Vec<_> = three(&mut driver).0.iter().map(|done| done.0).collect();
    assert_eq!(cids, [0, 0x1001, 2]);
}

/// The Abort reports success, but the command completes nevertheless.
#[test]
fn a_stubborn_command_survives_its_abort() {
    let mut driver = with(Fault::Stubborn(10_000), 1);
    let cid = driver.push(1, read());
    driver.ring(1);
    driver.step();
    let abort = admin::abort(nvme_spec::Qid(1), nvme_spec::Cid(cid));
    assert_eq!(driver.admin(abort), Ok(0));
    assert_eq!(driver.drain(1), []);
    driver.now_ns += 10_000;
    driver.step();
    assert_eq!(driver.drain(1), [(cid, 0)]);
}

#[test]
fn what_comes_afterwards_is_nothing_that_an_abort_or_a_deletion_ends() {
    let qid = nvme_spec::Qid(1);
    let mut driver = with(Fault::Echo(10_000), 1);
    let cid = driver.push(1, read());
    driver.ring(1);
    driver.step();
    assert_eq!(driver.drain(1), [(cid, 0)]);
    let abort = admin::abort(qid, nvme_spec::Cid(cid));
    assert_eq!(driver.admin(abort), Ok(1));
    assert_eq!(driver.admin(admin::delete_io_sq(qid)), Ok(0));
    driver.now_ns += 10_000;
    driver.step();
    assert_eq!(driver.drain(1), []);
}

#[test]
fn a_bad_queue_head_is_reported_and_a_torn_entry_is_mended_later() {
    let mut driver = with(Fault::BadSqhd(0xFFF0), 1);
    driver.push(1, read());
    driver.ring(1);
    driver.step();
    assert_eq!(driver.pop(1).map(|cqe| cqe.sqhd), Some(0xFFF0));

    let mut driver = with(Fault::TornCqe, 1);
    driver.fill(crate::testing::cq_at(1), 0xA0, 8);
    driver.push(1, read());
    driver.ring(1);
    driver.step();
    assert_eq!(driver.peek(1).map(|cqe| cqe.dw0), Some(0xA0A0_A0A0));
    driver.step();
    assert_eq!(driver.peek(1).map(|cqe| cqe.dw0), Some(0));
}

#[test]
fn fatal_faults_stop_everything() {
    let mut driver = with(Fault::Cfs, 1);
    assert_eq!(three(&mut driver), ([].into(), [].into()));
    assert!(driver.csts().cfs());
    let mut driver = with(Fault::AllOnes, 1);
    assert_eq!(three(&mut driver), ([].into(), [].into()));
    assert_eq!(driver.controller.read32(offset::CSTS), ALL_ONES);
    assert_eq!(driver.controller.read64(offset::CAP), u64::MAX);
    driver.controller.write32(offset::CC, 0);
    driver.controller.power_cut();
    driver.enable();
}

#[test]
fn a_full_completion_queue_stops_fetching_until_its_head_moves() {
    let mut driver = Driver::with_queue(config());
    driver.breaks(&[Rule::BufferShared]);
    // Two submission queues on one completion queue have more commands than it has entries.
    let sq = admin::create_io_sq(Driver::params(2, sq_at(2)), nvme_spec::Qid(1));
    assert_eq!(driver.admin(sq), Ok(0));
    for qid in [1, 2] {
        for _ in 0..ENTRIES - 1 {
            driver.push(qid, read());
        }
        driver.ring(qid);
    }
    assert_eq!(driver.step(), ENTRIES - 1);
    assert_eq!(driver.step(), 0);
    assert!(driver.controller.queue_stats(2).cq_full > 0);
    let last = driver.drain(1).len();
    assert_eq!(last as u32, ENTRIES - 1);
    assert_eq!(
        driver.step(),
        ENTRIES - 1,
        "the second queue goes on without a new doorbell"
    );
    assert_eq!(driver.drain(1).len() as u32, ENTRIES - 1);
}

#[test]
fn sqhd_follows_every_wrap() {
    let mut driver = Driver::with_queue(config());
    for i in 0..100u32 {
        driver.push(1, read());
        driver.ring(1);
        driver.step();
        let cqe = driver.pop(1).unwrap();
        assert_eq!(u32::from(cqe.sqhd), (i + 1) % ENTRIES);
    }
}

#[test]
fn impossible_doorbells_are_events_and_change_nothing() {
    let mut driver = Driver::with_queue(config());
    driver.breaks(&[Rule::DoorbellRange, Rule::DoorbellAbsent]);
    driver.push(0, admin::async_event_request());
    driver.ring(0);
    driver.step();
    for value in [ENTRIES, u32::MAX] {
        driver
            .controller
            .doorbells()
            .sq_tail(1)
            .store(value, Ordering::Release);
        assert_eq!(driver.step(), 0);
    }
    driver.step();
    let event = driver.pop(0).expect("an event");
    assert_eq!(
        event.dw0, 0x0001_0100,
        "error event: invalid doorbell value, log page 1"
    );
    driver.ring(1);
    assert_eq!(driver.io(read()), Ok(0));
    driver
        .controller
        .doorbells()
        .cq_head(1)
        .store(9999, Ordering::Release);
    assert_eq!(driver.io(read()), Ok(0));
    // A queue that does not exist.
    driver
        .controller
        .doorbells()
        .sq_tail(3)
        .store(1, Ordering::Release);
    driver.controller.write32(offset::DOORBELLS + 0x800, 1);
    driver.step();
    assert!(driver.csts().rdy() && !driver.csts().cfs());
}

/// A thread saw work in a queue that was deleted before it took the lock: its doorbell was not written since.
#[test]
fn a_queue_that_was_deleted_meanwhile_is_no_event() {
    let mut driver = Driver::with_queue(config());
    driver.push(0, admin::async_event_request());
    driver.ring(0);
    driver.step();
    driver.push(1, read());
    driver.ring(1);
    driver.step();
    driver.drain(1);
    assert_eq!(driver.admin(admin::delete_io_sq(Qid(1))), Ok(0));
    assert_eq!(driver.controller.serve(1, driver.now_ns), 0);
    driver.step();
    assert_eq!(driver.pop(0), None, "an event of a doorbell");
}

#[test]
fn rings_outside_the_map_are_fatal_and_nothing_worse() {
    let mut driver = Driver::with_queue(config());
    let far = admin::QueueParams {
        iova: nvme_spec::Iova(1 << 50),
        ..Driver::params(2, 0)
    };
    assert_eq!(
        driver.admin(admin::create_io_sq(far, nvme_spec::Qid(1))),
        Ok(0)
    );
    driver
        .controller
        .doorbells()
        .sq_tail(2)
        .store(1, Ordering::Release);
    driver.step();
    assert!(driver.csts().cfs());
    driver.controller.write32(offset::CC, 0);
    driver.enable();
}

#[test]
fn completions_come_when_the_profile_says() {
    let mut config = config();
    config.profile = LatencyProfile {
        read_ns: 1000,
        parallelism: 2,
        ..LatencyProfile::NONE
    };
    let mut driver = Driver::with_queue(config);
    driver.breaks(&[Rule::BufferShared]);
    for _ in 0..4 {
        driver.push(1, read());
    }
    driver.ring(1);
    assert_eq!(driver.controller.step(0).next_event_ns, Some(1000));
    let mut done = Vec::new();
    for now_ns in [999, 1000, 1499, 1500, 2000, 2500] {
        driver.now_ns = now_ns;
        driver.step();
        done.push(driver.drain(1).len());
    }
    assert_eq!(done, [0, 1, 0, 1, 1, 1]);
    assert_eq!(driver.controller.step(3000).next_event_ns, None);
}

#[test]
fn refused_commands_take_no_bandwidth_and_a_reset_ends_the_backlog() {
    let mut config = config();
    config.profile = LatencyProfile {
        bytes_per_us: 1,
        ..LatencyProfile::NONE
    };
    let mut driver = Driver::with_queue(config);
    driver.breaks(&[Rule::TooLong]);
    let refused = nvme_spec::nvm::read(Nsid(1), Lba(0), 2048).with_prps(DATA, 0);
    assert_eq!(driver.io(refused), Err(Status::INVALID_FIELD));
    driver.push(1, read());
    driver.ring(1);
    assert_eq!(driver.controller.step(0).next_event_ns, Some(512_000));
    driver.controller.write32(offset::CC, 0);
    driver.enable();
    driver.create_pair(1);
    driver.push(1, read());
    driver.ring(1);
    assert_eq!(driver.controller.step(0).next_event_ns, Some(512_000));
}

#[test]
fn the_same_plan_gives_the_same_run() {
    let run = || {
        let mut config = config();
        config.profile = LatencyProfile::NVME_GEN5;
        config.faults.seed = 42;
        for what in [Fault::Drop, Fault::Reorder, Fault::Delay(77_000)] {
            let when = FaultCondition {
                per_million: Some(100_000),
                ..FaultCondition::default()
            };
            config.faults.rules.push(FaultRule { when, what });
        }
        let mut driver = Driver::with_queue(config);
        driver.breaks(&[Rule::BufferShared]);
        let mut log = Vec::new();
        for _ in 0..60 {
            driver.push(1, read());
            driver.ring(1);
            driver.now_ns += 9_000;
            driver.step();
            log.push((driver.now_ns, driver.drain(1)));
        }
        log
    };
    assert_eq!(run(), run());
}
