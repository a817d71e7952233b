//! Tests of `sanitize`.

use super::*;
use crate::config::fault::{Fault, FaultCondition, FaultPlan, FaultRule};
use crate::config::settings::{Config, NamespaceConfig};
use crate::medium::store::MemoryStore;
use crate::testing::{DATA, Driver, config};
use alloc::boxed::Box;
use nvme_spec::admin::{self, SanitizeFields as Fields};
use nvme_spec::identify::{IdentifyController, fna, oacs, sanicap};
use nvme_spec::register::offset;
use nvme_spec::{Lba, Nsid, Qid, nvm};
use zerocopy::FromBytes;

const SECOND: u64 = 1_000_000_000;

fn timed(seconds: u64) -> Config {
    let mut config = config();
    config.sanitize_ns = seconds * SECOND;
    config
}

fn start(action: SanitizeAction) -> Sqe {
    admin::sanitize(Fields::new(action))
}

fn status(driver: &mut Driver) -> SanitizeStatus {
    let log = admin::get_log_page(lid::SANITIZE, Nsid::ALL, 512, 0).with_prps(DATA, 0);
    assert_eq!(driver.admin(log), Ok(0));
    SanitizeStatus::read_from_bytes(&driver.bytes(DATA, 512)).expect("512 bytes")
}

fn write(driver: &mut Driver, lba: u64, value: u8) {
    driver.fill(DATA, value, 512);
    let sqe = nvm::write(Nsid(1), Lba(lba), 1).with_prps(DATA, 0);
    assert_eq!(driver.io(sqe), Ok(0));
}

fn read(driver: &mut Driver, lba: u64) -> Result<Vec<u8>, Status> {
    driver.fill(DATA, 0xEE, 512);
    driver.io(nvm::read(Nsid(1), Lba(lba), 1).with_prps(DATA, 0))?;
    Ok(driver.bytes(DATA, 512))
}

#[test]
fn identify_says_what_can_be_done() {
    let mut driver = Driver::new(config());
    let identify = admin::identify(admin::cns::CONTROLLER, Nsid::NONE).with_prps(DATA, 0);
    assert_eq!(driver.admin(identify), Ok(0));
    let c = IdentifyController::read_from_bytes(&driver.bytes(DATA, 4096)).expect("4096 bytes");
    assert_ne!(c.oacs & oacs::FORMAT, 0);
    assert_eq!(c.fna, fna::CRYPTO_ERASE);
    let actions = sanicap::CRYPTO_ERASE | sanicap::BLOCK_ERASE | sanicap::OVERWRITE;
    assert_eq!(c.sanicap & 7, actions);
    // Media is not modified further, and No-Deallocate After Sanitize is honoured.
    assert_eq!(c.sanicap & sanicap::MODIFIES_MEDIA, sanicap::NOT_MODIFIED);
    assert_eq!(c.sanicap & sanicap::NO_DEALLOCATE_INHIBITED, 0);
}

#[test]
fn every_action_erases_every_namespace() {
    for action in [
        SanitizeAction::BlockErase,
        SanitizeAction::CryptoErase,
        SanitizeAction::Overwrite,
    ] {
        let mut config = config();
        let second = MemoryStore::new(1 << 20).expect("1 MiB");
        config
            .namespaces
            .push(NamespaceConfig::new(4096, Box::new(second)));
        let mut driver = Driver::with_queue(config);
        write(&mut driver, 2047, 7);
        driver.fill(DATA, 7, 4096);
        let other = nvm::write(Nsid(2), Lba(255), 1).with_prps(DATA, 0);
        assert_eq!(driver.io(other), Ok(0));
        assert_eq!(status(&mut driver).sstat, 0, "never sanitized");
        assert_eq!(driver.admin(start(action)), Ok(0));
        driver.step();
        let page = status(&mut driver);
        assert_eq!(page.state(), sanitize_state::SUCCESS, "{action:?}");
        assert_eq!(
            (page.sprog, page.scdw10),
            (
                0xFFFF,
                action as u32 | (u32::from(action == SanitizeAction::Overwrite) << 4)
            )
        );
        assert!(page.is_global_data_erased());
        assert_eq!(read(&mut driver, 2047), Ok([0; 512].into()));
        let other = nvm::read(Nsid(2), Lba(255), 1).with_prps(DATA, 0);
        assert_eq!(driver.io(other), Ok(0));
        assert_eq!(driver.bytes(DATA, 4096), [0; 4096]);
        assert_eq!(driver.controller.unflushed_bytes(), 0);
        write(&mut driver, 0, 1);
        assert!(!status(&mut driver).is_global_data_erased());
        // Data that was in the cache before is not restored by the loss of power.
        driver.controller.power_cut();
        driver.enable();
        driver.create_pair(1);
        assert_eq!(read(&mut driver, 2047), Ok([0; 512].into()));
    }
}

#[test]
fn an_overwrite_leaves_its_pattern_where_nothing_is_deallocated() {
    // With inversion between the passes, the last pass leaves the pattern that was given.
    for (passes, invert) in [(1, false), (1, true), (2, true), (3, true), (16, false)] {
        let mut driver = Driver::with_queue(config());
        let sqe = admin::sanitize(Fields {
            passes,
            invert,
            no_deallocate: true,
            pattern: 0x0403_0201,
            ..Fields::new(SanitizeAction::Overwrite)
        });
        assert_eq!(driver.admin(sqe), Ok(0));
        driver.step();
        let page = status(&mut driver);
        assert_eq!(page.state(), sanitize_state::SUCCESS);
        assert_eq!(page.passes(), u16::from(passes), "passes that are complete");
        for lba in [0, 1000, 2047] {
            let bytes = read(&mut driver, lba).expect("readable");
            assert_eq!(bytes, [1, 2, 3, 4].repeat(128), "{passes} {invert}");
        }
    }
    // Half way through the second of two inverted passes, blocks of both patterns are read.
    let mut driver = Driver::new(timed(10));
    let two = Fields {
        passes: 2,
        invert: true,
        pattern: u32::MAX,
        ..Fields::new(SanitizeAction::Overwrite)
    };
    assert_eq!(driver.admin(admin::sanitize(two)), Ok(0));
    driver.now_ns += 15 * SECOND;
    driver.step();
    assert_eq!(status(&mut driver).passes(), 1);
    let store = &driver.controller.device.namespaces[0].store;
    let mut bytes = [7; 2];
    store.read_at(0, &mut bytes[..1]).expect("a byte");
    store
        .read_at((1 << 20) - 1, &mut bytes[1..])
        .expect("a byte");
    assert_eq!(bytes, [0xFF, 0]);
}

#[test]
fn commands_are_answered_as_the_specification_says_while_it_runs() {
    let mut driver = Driver::with_queue(timed(8));
    write(&mut driver, 5, 1);
    // An error with an address, which the log must not tell meanwhile.
    driver.breaks(&[nvme_auditor::Rule::LbaRange]);
    let past = nvm::read(Nsid(1), Lba(9999), 1).with_prps(DATA, 0);
    assert_eq!(driver.io(past), Err(Status::LBA_OUT_OF_RANGE));
    assert_eq!(driver.admin(start(SanitizeAction::BlockErase)), Ok(0));
    driver.now_ns += 2 * SECOND;
    driver.step();
    let page = status(&mut driver);
    assert_eq!(page.state(), sanitize_state::IN_PROGRESS);
    assert_eq!(page.sprog, 0x4000, "a quarter");
    assert_eq!((page.eto, page.etbe, page.etce), (128, 8, 8));
    assert_eq!([page.etond, page.etbend, page.etcend], [u32::MAX; 3]);

    let busy = Err(Status::SANITIZE_IN_PROGRESS);
    let one = Nsid(1);
    let io = [
        nvm::read(one, Lba(5), 1),
        nvm::write(one, Lba(5), 1),
        nvm::compare(one, Lba(5), 1),
        nvm::verify(one, Lba(5), 1),
        nvm::write_zeroes(one, Lba(5), 1),
        nvm::deallocate(one, 1),
        Sqe::new(nvm::opcode::WRITE_UNCORRECTABLE, one),
    ];
    for sqe in io {
        assert_eq!(
            driver.io(sqe.with_prps(DATA, 0)),
            busy,
            "{:#x}",
            sqe.opcode()
        );
    }
    assert_eq!(driver.io(nvm::flush(one)), Ok(0));
    assert_eq!(driver.io(nvm::flush(Nsid::ALL)), Ok(0));

    let log = |lid| admin::get_log_page(lid, Nsid::ALL, 512, 0).with_prps(DATA, 0);
    let allowed = [
        admin::identify(admin::cns::CONTROLLER, Nsid::NONE).with_prps(DATA, 0),
        admin::get_features(7, admin::FeatureSelect::Current, Nsid::NONE, 0),
        admin::set_features(1, Nsid::NONE, 7),
        admin::keep_alive(),
        admin::create_io_cq(Driver::params(2, crate::testing::cq_at(2)), None),
        admin::delete_io_cq(Qid(2)),
        log(lid::SMART),
        log(lid::CHANGED_NAMESPACES),
        log(lid::ERROR),
    ];
    for sqe in allowed {
        assert_eq!(
            driver.admin(sqe),
            Ok(driver_dw0(&sqe)),
            "{:#x}",
            sqe.opcode()
        );
    }
    let entries = driver.bytes(DATA, 512);
    let last = entries
        .chunks(64)
        .find(|entry| entry[28 - 4] == 1)
        .expect("an entry");
    assert_eq!(last[16..24], [0; 8], "no address of user data is told");
    let refused = [
        admin::format_nvm(one, 0, 0),
        log(lid::FIRMWARE),
        log(lid::COMMANDS_SUPPORTED),
        start(SanitizeAction::CryptoErase),
        start(SanitizeAction::ExitFailureMode),
    ];
    for sqe in refused {
        let cid = driver.push(0, sqe);
        driver.ring(0);
        driver.step();
        let cqe = driver.pop(0).expect("a completion");
        assert_eq!(cqe.cid, cid);
        assert!(
            cqe.status().is(Status::SANITIZE_IN_PROGRESS),
            "{:#x}",
            sqe.opcode()
        );
        assert!(!cqe.status().dnr(), "it succeeds later");
    }

    driver.now_ns += 6 * SECOND;
    driver.step();
    assert_eq!(status(&mut driver).state(), sanitize_state::SUCCESS);
    assert_eq!(read(&mut driver, 5), Ok([0; 512].into()));
    assert_eq!(driver.admin(admin::format_nvm(one, 0, 0)), Ok(0));
}

/// Returns dword 0 of those commands above that succeed.
fn driver_dw0(sqe: &Sqe) -> u32 {
    match sqe.opcode() {
        opcode::GET_FEATURES => 0x0003_0003,
        _ => 0,
    }
}

#[test]
fn it_goes_on_through_resets_and_losses_of_power() {
    let mut driver = Driver::with_queue(timed(10));
    write(&mut driver, 2047, 7);
    assert_eq!(driver.admin(start(SanitizeAction::BlockErase)), Ok(0));
    for turn in 1..=3u64 {
        driver.now_ns += 2 * SECOND;
        driver.step();
        match turn {
            1 => driver.controller.write32(offset::CC, 0),
            2 => driver.controller.function_reset(),
            _ => driver.controller.power_cut(),
        }
        // A controller that is not enabled continues its sanitize, too.
        driver.now_ns += SECOND / 2;
        driver.step();
        driver.enable();
        driver.create_pair(1);
        let page = status(&mut driver);
        assert_eq!(page.state(), sanitize_state::IN_PROGRESS, "{turn}");
        let expected = (turn * 5 * 0x1_0000 / 20) as u16;
        assert!(
            page.sprog.abs_diff(expected) < 0x100,
            "{turn}: {:#x}",
            page.sprog
        );
        assert_eq!(read(&mut driver, 2047), Err(Status::SANITIZE_IN_PROGRESS));
    }
    // The end of the operation is an event for the controller in its state at that time.
    let request = driver.push(0, admin::async_event_request());
    driver.ring(0);
    driver.step();
    assert_eq!(driver.peek(0), None);
    let next = driver.controller.step(driver.now_ns).next_event_ns;
    assert!(
        next.is_some_and(|at| at > driver.now_ns),
        "it waits for the clock"
    );
    driver.now_ns += 3 * SECOND;
    driver.step();
    let event = driver.pop(0).expect("an event");
    assert_eq!((event.cid, event.dw0), (request, 0x0081_0106));
    assert_eq!(status(&mut driver).state(), sanitize_state::SUCCESS);
    assert_eq!(read(&mut driver, 2047), Ok([0; 512].into()));
}

/// Returns a plan in which operation number `nth` fails.
fn failing(nth: u64) -> Config {
    let mut config = timed(4);
    let when = FaultCondition {
        nth: Some(nth),
        ..FaultCondition::default()
    };
    config.faults = FaultPlan {
        rules: [FaultRule {
            when,
            what: Fault::SanitizeFails,
        }]
        .into(),
        seed: 0,
    };
    config
}

fn fail(driver: &mut Driver, unrestricted: bool) {
    let sqe = admin::sanitize(Fields {
        unrestricted,
        ..Fields::new(SanitizeAction::BlockErase)
    });
    assert_eq!(driver.admin(sqe), Ok(0));
    driver.now_ns += 4 * SECOND;
    driver.step();
    let page = status(driver);
    assert_eq!(page.state(), sanitize_state::FAILED);
    assert_eq!(page.sprog, SanitizeStatus::IDLE);
    assert!(!page.is_global_data_erased());
    assert_eq!(read(driver, 0), Err(Status::SANITIZE_FAILED));
    assert_eq!(driver.io(nvm::flush(Nsid(1))), Ok(0));
    let format = admin::format_nvm(Nsid(1), 0, 0);
    assert_eq!(driver.admin(format), Err(Status::SANITIZE_FAILED));
}

#[test]
fn an_unrestricted_failure_is_left_by_exit_failure_mode() {
    let mut driver = Driver::with_queue(failing(1));
    write(&mut driver, 2047, 7);
    let request = driver.push(0, admin::async_event_request());
    driver.ring(0);
    driver.step();
    let sqe = admin::sanitize(Fields {
        unrestricted: true,
        ..Fields::new(SanitizeAction::BlockErase)
    });
    assert_eq!(driver.admin(sqe), Ok(0));
    driver.now_ns += 4 * SECOND;
    driver.step();
    let event = driver.pop(0).expect("an event: it is over");
    assert_eq!((event.cid, event.dw0), (request, 0x0081_0106));
    assert_eq!(read(&mut driver, 0), Err(Status::SANITIZE_FAILED));
    // A reset does not end the failure.
    driver.controller.write32(offset::CC, 0);
    driver.enable();
    driver.create_pair(1);
    assert_eq!(read(&mut driver, 0), Err(Status::SANITIZE_FAILED));
    assert_eq!(driver.admin(start(SanitizeAction::ExitFailureMode)), Ok(0));
    assert_eq!(
        status(&mut driver).state(),
        sanitize_state::FAILED,
        "as it was"
    );
    assert_eq!(read(&mut driver, 2047), Ok([7; 512].into()), "not reached");
    assert_eq!(read(&mut driver, 0), Ok([0; 512].into()));
    assert_eq!(driver.admin(admin::format_nvm(Nsid(1), 0, 0)), Ok(0));
}

#[test]
fn a_restricted_failure_is_left_by_a_restricted_success_alone() {
    let mut driver = Driver::with_queue(failing(1));
    fail(&mut driver, false);
    let failed = Err(Status::SANITIZE_FAILED);
    assert_eq!(driver.admin(start(SanitizeAction::ExitFailureMode)), failed);
    let unrestricted = admin::sanitize(Fields {
        unrestricted: true,
        ..Fields::new(SanitizeAction::BlockErase)
    });
    assert_eq!(driver.admin(unrestricted), failed);
    assert_eq!(driver.admin(start(SanitizeAction::CryptoErase)), Ok(0));
    driver.now_ns += 4 * SECOND;
    driver.step();
    assert_eq!(status(&mut driver).state(), sanitize_state::SUCCESS);
    assert_eq!(read(&mut driver, 0), Ok([0; 512].into()));
    // Without a failure, leaving the failure mode changes nothing.
    assert_eq!(driver.admin(start(SanitizeAction::ExitFailureMode)), Ok(0));
    assert_eq!(status(&mut driver).state(), sanitize_state::SUCCESS);
}

#[test]
fn what_cannot_be_started_is_refused_and_changes_nothing() {
    let mut config = config();
    let mut driver = Driver::with_queue(crate::testing::config());
    write(&mut driver, 3, 7);
    for reserved in [0, 5, 6, 7] {
        let mut sqe = start(SanitizeAction::BlockErase);
        sqe.cdw10 = reserved;
        assert_eq!(driver.admin(sqe), Err(Status::INVALID_FIELD), "{reserved}");
    }
    assert_eq!(read(&mut driver, 3), Ok([7; 512].into()));
    assert_eq!(status(&mut driver).state(), sanitize_state::NEVER);
    config.namespaces[0].read_only = true;
    let mut driver = Driver::with_queue(config);
    assert_eq!(
        driver.admin(start(SanitizeAction::BlockErase)),
        Err(Status::NAMESPACE_WRITE_PROTECTED)
    );
    assert!(read(&mut driver, 3).is_ok());
}

/// Commands that wait for their latency when the operation starts are completed or aborted.
#[test]
fn commands_under_way_are_completed_or_aborted_and_none_is_lost() {
    let mut config = timed(1);
    config.profile.read_ns = 1_000_000;
    let mut driver = Driver::with_queue(config);
    let cids: Vec<u16> = (0..8)
        .map(|lba| {
            driver.push(
                1,
                nvm::read(Nsid(1), Lba(lba), 1).with_prps(DATA + lba * 4096, 0),
            )
        })
        .collect();
    driver.ring(1);
    driver.step();
    assert_eq!(driver.admin(start(SanitizeAction::Overwrite)), Ok(0));
    driver.now_ns += 2_000_000;
    driver.step();
    let code = Status::SANITIZE_IN_PROGRESS.code();
    let expected: Vec<_> = cids.into_iter().map(|cid| (cid, code)).collect();
    assert_eq!(driver.drain(1), expected);
}

/// The driver of a store larger than one turn is served between the turns.
#[test]
fn a_large_store_is_erased_in_turns() {
    let store = MemoryStore::new(3 * TURN_BYTES + 512).expect("12 MiB");
    let mut config = config();
    config.namespaces = [NamespaceConfig::new(512, Box::new(store))].into();
    let mut driver = Driver::new(config);
    assert_eq!(driver.admin(start(SanitizeAction::BlockErase)), Ok(0));
    let device = &driver.controller.device;
    let turns = (0..10).filter(|_| advance(device, 1)).count();
    assert_eq!(turns, 3, "and a fourth one ends it");
    assert_eq!(device.sanitize.due_ns(), u64::MAX);
    assert_eq!(status(&mut driver).state(), sanitize_state::SUCCESS);
}
