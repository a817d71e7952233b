//! Tests of `lifecycle`: enable, reset, shutdown, power.

use super::*;
use crate::config::fault::{Fault, FaultCondition, FaultRule};
use crate::testing::{DATA, Driver, ENTRIES, config, cq_at, sq_at};
use nvme_auditor::Rule;
use nvme_spec::log_page::{SmartData, lid};
use nvme_spec::register::{ALL_ONES, SUBSYSTEM_RESET, offset};
use nvme_spec::{Lba, Nsid, admin, nvm};
use zerocopy::FromBytes;

/// Returns a controller that takes 1000 ns to become ready, and to become disabled; CC.EN was set at 0.
fn enabled_with_a_delay_of_1000() -> Driver {
    let mut config = config();
    config.ready_delay_ns = 1000;
    let mut driver = Driver::cold(config);
    driver.breaks(&[Rule::BufferShared]);
    driver.controller.write32(offset::AQA, 15 << 16 | 15);
    driver.controller.write32(offset::CC, Driver::cc().0);
    driver
}

#[test]
fn a_reset_keeps_the_admin_queue_registers_and_drops_the_queues() {
    let mut driver = Driver::with_queue(config());
    driver.controller.write32(offset::CC, 0);
    assert!(!driver.csts().rdy());
    assert_eq!(driver.controller.read64(offset::ASQ), sq_at(0));
    assert_eq!(driver.controller.read64(offset::ACQ), cq_at(0));
    assert_eq!(driver.controller.read32(offset::AQA) & 0xFFF, ENTRIES - 1);
    driver.enable();
    assert_eq!(
        driver.admin(admin::delete_io_sq(nvme_spec::Qid(1))),
        Err(nvme_spec::Status::INVALID_QID)
    );
}

#[test]
fn impossible_configurations_are_fatal_until_reset() {
    let bad = |change: fn(&mut Cc)| {
        let mut cc = Driver::cc();
        change(&mut cc);
        cc
    };
    let cases = [
        bad(|cc| cc.set_mps(5)),
        bad(|cc| cc.set_css(6)),
        bad(|cc| cc.set_ams(1)),
        bad(|cc| cc.set_iosqes(5)),
    ];
    for cc in cases {
        let mut driver = Driver::new(config());
        driver.controller.write32(offset::CC, 0);
        driver.controller.write32(offset::CC, cc.0);
        assert!(driver.csts().cfs() && !driver.csts().rdy(), "{cc:?}");
        driver.controller.write32(offset::CC, 0);
        assert!(!driver.csts().cfs());
        driver.enable();
    }
    let driver = Driver::cold(config());
    driver.controller.write32(offset::CC, Driver::cc().0);
    assert!(driver.csts().cfs(), "an admin queue of one entry");
}

/// Found by fuzzing: the shutdown replaced the reset, and RDY stayed 1 for ever.
#[test]
fn a_shutdown_request_does_not_stop_a_reset() {
    let driver = enabled_with_a_delay_of_1000();
    driver.controller.step(1000);
    assert!(driver.csts().rdy());
    let mut cc = Cc(0);
    cc.set_shn(1);
    driver.controller.write32(offset::CC, cc.0);
    driver.controller.step(2000);
    assert!(!driver.csts().rdy() && driver.csts().shst() == 0);
}

#[test]
fn ready_follows_after_its_delay() {
    let driver = enabled_with_a_delay_of_1000();
    assert_eq!(driver.controller.step(999).next_event_ns, Some(1000));
    assert!(!driver.csts().rdy());
    driver.controller.step(1000);
    assert!(driver.csts().rdy());
    driver.controller.write32(offset::CC, 0);
    assert!(driver.csts().rdy());
    assert_eq!(driver.controller.step(2000).next_event_ns, None);
    assert!(!driver.csts().rdy());
}

#[test]
fn nothing_moves_once_the_controller_is_disabled() {
    let mut config = config();
    config.profile = crate::LatencyProfile {
        read_ns: 1000,
        ..crate::LatencyProfile::NONE
    };
    let mut driver = Driver::with_queue(config);
    driver.push(1, nvm::read(Nsid(1), Lba(0), 1).with_prps(DATA, 0));
    driver.ring(1);
    driver.step();
    driver.controller.write32(offset::CC, 0);
    assert!(!driver.csts().rdy());
    driver.fill(DATA, 0x55, 512);
    driver.now_ns = 1_000_000;
    driver.ring(1);
    assert_eq!(driver.step(), 0);
    assert_eq!(driver.bytes(DATA, 512), [0x55; 512]);
    assert_eq!(driver.peek(1), None);
}

#[test]
fn a_normal_shutdown_flushes_and_an_abrupt_one_does_not() {
    for (shn, kept) in [(1, 9), (2, 0)] {
        let mut driver = Driver::with_queue(config());
        driver.fill(DATA, 9, 512);
        let write = nvm::write(Nsid(1), Lba(0), 1).with_prps(DATA, 0);
        assert_eq!(driver.io(write), Ok(0));
        let mut cc = Driver::cc();
        cc.set_shn(shn);
        driver.controller.write32(offset::CC, cc.0);
        assert_eq!(driver.csts().shst(), 2);
        driver.push(1, write);
        driver.ring(1);
        assert_eq!(driver.step(), 0, "no command is processed after a shutdown");
        driver.controller.power_cut();
        driver.enable();
        assert_eq!(driver.csts().shst(), 0);
        driver.create_pair(1);
        assert_eq!(
            driver.io(nvm::read(Nsid(1), Lba(0), 1).with_prps(DATA, 0)),
            Ok(0)
        );
        assert_eq!(driver.bytes(DATA, 1), [kept]);
    }
}

#[test]
fn a_subsystem_reset_is_told_by_nssro() {
    let driver = Driver::with_queue(config());
    driver.controller.write32(offset::NSSR, 1);
    assert!(driver.csts().rdy());
    driver.controller.write32(offset::NSSR, SUBSYSTEM_RESET);
    assert!(driver.csts().nssro() && !driver.csts().rdy());
    assert!(!Cc(driver.controller.read32(offset::CC)).en());
    driver.controller.write32(offset::CSTS, 1 << 4);
    assert!(!driver.csts().nssro());
}

#[test]
fn a_stuck_ready_bit_stays_as_it_is() {
    let mut config = config();
    let when = FaultCondition {
        nth: Some(2),
        ..FaultCondition::default()
    };
    config.faults.rules.push(FaultRule {
        when,
        what: Fault::StuckReady,
    });
    let driver = Driver::with_queue(config);
    driver.controller.write32(offset::CC, 0);
    driver.controller.step(u64::MAX - 1);
    assert!(driver.csts().rdy());
    driver.controller.write32(offset::CC, Driver::cc().0);
    driver.controller.write32(offset::CC, 0);
    assert!(
        !driver.csts().rdy(),
        "the rule was for the first change of all: {:?}",
        driver.csts()
    );
}

#[test]
fn registers_survive_any_access() {
    let driver = Driver::with_queue(config());
    for at in (0..0x2000).chain([u32::MAX, u32::MAX - 3, 0x8000_0000]) {
        driver.controller.read32(at);
        driver.controller.read64(at);
        if !(offset::CC..offset::CC + 4).contains(&at) && at != offset::NSSR {
            driver.controller.write32(at, 0xFFFF_FFFF);
            driver.controller.write64(at, u64::MAX);
        }
    }
    driver.controller.step(0);
    assert_eq!(driver.controller.read32(offset::VS), 0x0002_0000);
}

/// A late step executes every transition that was due before it.
#[test]
fn a_transition_is_over_at_the_next_step_however_late() {
    let driver = enabled_with_a_delay_of_1000();
    driver.controller.step(1_000_000);
    assert!(driver.csts().rdy());
}

/// NVMe Base 2.0c, "SMART / Health Information": Unsafe Shutdowns.
#[test]
fn a_power_cut_without_a_shutdown_is_counted() {
    let mut driver = Driver::with_queue(config());
    let mut unsafe_shutdowns = |shn| {
        let mut cc = Driver::cc();
        cc.set_shn(shn);
        driver.controller.write32(offset::CC, cc.0);
        driver.controller.power_cut();
        driver.enable();
        let page = admin::get_log_page(lid::SMART, Nsid::ALL, 512, 0);
        assert_eq!(driver.admin(page.with_prps(DATA, 0)), Ok(0));
        let smart = SmartData::read_from_bytes(&driver.bytes(DATA, 512)).unwrap();
        let number = |bytes| u128::from_le_bytes(bytes);
        (number(smart.power_cycles), number(smart.unsafe_shutdowns))
    };
    let first = unsafe_shutdowns(0);
    assert_eq!(first.1, 1);
    assert_eq!(unsafe_shutdowns(1), (first.0 + 1, 1));
    assert_eq!(unsafe_shutdowns(0), (first.0 + 2, 2));
}

/// A queue holds at most as many delayed commands as it has entries, whatever delays them.
#[test]
fn commands_that_wait_are_bounded_by_their_queue() {
    const MS: u64 = 1_000_000;
    let slow = crate::LatencyProfile {
        read_ns: MS,
        ..crate::LatencyProfile::NONE
    };
    let delay = FaultRule {
        when: FaultCondition::default(),
        what: Fault::Delay(MS),
    };
    for by_fault in [false, true] {
        let mut config = config();
        match by_fault {
            true => config.faults.rules.push(delay),
            false => config.profile = slow,
        }
        let mut driver = Driver::with_queue(config);
        driver.breaks(&[Rule::BufferShared, Rule::TailDoorbell]);
        for _ in 0..2 {
            for _ in 1..ENTRIES {
                driver.push(1, nvm::read(Nsid(1), Lba(0), 1).with_prps(DATA, 0));
            }
            driver.ring(1);
            driver.step();
        }
        assert_eq!(driver.peek(1), None);
        // All commands that were fetched first end at once; only now are the others fetched, and begin.
        let mut done_by = |now| {
            driver.now_ns = now;
            let mut count = 0;
            for _ in 0..4 {
                driver.step();
                count += driver.drain(1).len();
            }
            count
        };
        assert_eq!(done_by(MS), ENTRIES as usize, "by fault {by_fault}");
        assert_eq!(done_by(2 * MS), ENTRIES as usize - 2);
    }
}

/// Format changes a namespace only once no command executes: it waits for the queue's lock.
#[cfg(feature = "std")]
#[test]
fn a_barrier_waits_for_the_command_that_executes() {
    use std::sync::atomic::AtomicBool;
    let device = ControllerState::new(config()).unwrap();
    let (waits, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let executing = device.slots[2].sq.lock();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            waits.store(true, Ordering::SeqCst);
            device.barrier();
            assert!(over.load(Ordering::SeqCst), "the command still executes");
        });
        while !waits.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        // Time for a barrier that does not wait to be noticed; a true one cannot fail here.
        for _ in 0..100 {
            std::thread::yield_now();
        }
        over.store(true, Ordering::SeqCst);
        drop(executing);
    });
}

/// NVMe Base 2.0c, "Maximum Data Transfer Size": 2^MDTS pages of CAP.MPSMIN.
#[test]
fn the_largest_transfer_counts_in_the_smallest_pages() {
    for (mpsmin, mdts, bytes) in [
        (0, 1, 8192),
        (1, 1, 16384),
        (4, 5, 2 << 20),
        (4, 0, u64::MAX),
    ] {
        let mut config = config();
        (config.mpsmin, config.mpsmax, config.mdts) = (mpsmin, 4, mdts);
        assert_eq!(ControllerState::new(config).unwrap().max_bytes(), bytes);
    }
}

/// NVMe over PCIe 1.0c, "Function Level Reset": as after power on, but nothing that was written is lost.
#[test]
fn a_function_reset_forgets_the_registers_and_keeps_the_data() {
    let mut driver = Driver::with_queue(config());
    driver.fill(DATA, 9, 512);
    let write = nvm::write(Nsid(1), Lba(0), 1).with_prps(DATA, 0);
    assert_eq!(driver.io(write), Ok(0));
    driver.controller.write32(offset::INTMS, 1);
    driver.controller.function_reset();
    assert_eq!(driver.csts().0, 0);
    for at in [offset::CC, offset::AQA, offset::INTMS] {
        assert_eq!(driver.controller.read32(at), 0, "{at:#x}");
    }
    assert_eq!(driver.controller.read64(offset::ASQ), 0);
    driver.enable();
    driver.create_pair(1);
    driver.fill(DATA, 0, 512);
    let read = nvm::read(Nsid(1), Lba(0), 1).with_prps(DATA, 0);
    assert_eq!(driver.io(read), Ok(0));
    assert_eq!(driver.bytes(DATA, 512), [9; 512]);
}

/// A controller that left the bus does not see a reset; after it was plugged in again it can be reset and used.
#[test]
fn a_controller_that_is_plugged_in_again_works_after_a_reset() {
    let mut driver = Driver::with_queue(config());
    driver.controller.unplug();
    driver.controller.function_reset();
    assert_eq!(driver.controller.read32(offset::VS), ALL_ONES);
    driver.controller.plug_in();
    assert_eq!(driver.controller.read32(offset::VS), 0x0002_0000);
    assert!(
        driver.csts().rdy(),
        "what it was told while it was away it has not heard"
    );
    driver.controller.function_reset();
    assert!(!driver.csts().rdy());
    driver.enable();
    assert_eq!(driver.admin(admin::keep_alive()), Ok(0));
}
