//! Tests of `features`.

use super::*;
use crate::testing::{DATA, Driver, config};
use nvme_spec::admin::{self, FeatureSelect};
use nvme_spec::feature::host_memory_buffer;
use nvme_spec::{Iova, Lba, nvm};

fn get(driver: &mut Driver, fid: u8, dword: u32) -> Result<u32, Status> {
    driver.admin(
        admin::get_features(fid, FeatureSelect::Current, Nsid::NONE, dword).with_prps(DATA, 0),
    )
}

fn set(driver: &mut Driver, fid: u8, dword: u32) -> Result<u32, Status> {
    driver.admin(admin::set_features(fid, Nsid::NONE, dword).with_prps(DATA, 0))
}

#[test]
fn the_number_of_queues_is_negotiated_down_and_then_settled() {
    let mut driver = Driver::new(config());
    let fid = fid::NUMBER_OF_QUEUES;
    assert_eq!(
        set(&mut driver, fid, NumberOfQueues::request(100, 2)),
        Ok(0x0001_0003)
    );
    assert_eq!(set(&mut driver, fid, 0xFFFF), Err(Status::INVALID_FIELD));
    assert_eq!(
        set(&mut driver, fid, 0xFFFF_0000),
        Err(Status::INVALID_FIELD)
    );
    assert_eq!(get(&mut driver, fid, 0), Ok(0x0001_0003));
    let cq = admin::create_io_cq(Driver::params(3, 0x8000), None);
    assert_eq!(
        driver.admin(cq),
        Err(Status::INVALID_QID),
        "only two were granted"
    );
    driver.create_pair(1);
    assert_eq!(
        set(&mut driver, fid, 0),
        Err(Status::COMMAND_SEQUENCE_ERROR)
    );
}

#[test]
fn values_are_kept_until_a_reset_and_defaults_are_known() {
    let mut driver = Driver::new(config());
    assert_eq!(set(&mut driver, fid::ARBITRATION, 0x0102_0304), Ok(0));
    assert_eq!(set(&mut driver, fid::ERROR_RECOVERY, 55), Ok(0));
    assert_eq!(get(&mut driver, fid::ARBITRATION, 0), Ok(0x0102_0304));
    let select = |select| admin::get_features(fid::ARBITRATION, select, Nsid::NONE, 0);
    assert_eq!(driver.admin(select(FeatureSelect::Default)), Ok(7));
    assert_eq!(driver.admin(select(FeatureSelect::Saved)), Ok(7));
    assert_eq!(driver.admin(select(FeatureSelect::Capabilities)), Ok(5));
    driver
        .controller
        .write32(nvme_spec::register::offset::CC, 0);
    driver.enable();
    assert_eq!(get(&mut driver, fid::ARBITRATION, 0), Ok(7));
    assert_eq!(get(&mut driver, fid::ERROR_RECOVERY, 0), Ok(0));
}

#[test]
fn bad_settings_have_their_status() {
    let mut driver = Driver::new(config());
    assert_eq!(set(&mut driver, 0x7B, 0), Err(Status::INVALID_FIELD));
    assert_eq!(get(&mut driver, 0, 0), Err(Status::INVALID_FIELD));
    assert_eq!(
        set(&mut driver, fid::POWER_MANAGEMENT, 1),
        Err(Status::INVALID_FIELD)
    );
    assert_eq!(
        set(&mut driver, fid::ERROR_RECOVERY, 1 << 16),
        Err(Status::INVALID_FIELD)
    );
    assert_eq!(
        set(&mut driver, fid::TEMPERATURE, 9 << 16),
        Err(Status::INVALID_FIELD)
    );
    assert_eq!(
        set(&mut driver, fid::HOST_MEMORY_BUFFER, 1),
        Err(Status::INVALID_FIELD)
    );
    for id in [fid::NUMBER_OF_QUEUES, fid::TIMESTAMP, fid::HOST_BEHAVIOR] {
        let mut saved = admin::set_features(id, Nsid::NONE, 0).with_prps(DATA, 0);
        saved.cdw10 |= SAVE;
        assert_eq!(driver.admin(saved), Err(Status::FEATURE_NOT_SAVEABLE));
    }
    let specific = admin::set_features(fid::ARBITRATION, Nsid(1), 0);
    assert_eq!(
        driver.admin(specific),
        Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC)
    );
}

#[test]
fn switching_the_cache_off_flushes_it_and_makes_writes_durable() {
    let mut driver = Driver::with_queue(config());
    let write = |driver: &mut Driver| {
        assert_eq!(
            driver.io(nvm::write(Nsid(1), Lba(0), 1).with_prps(DATA, 0)),
            Ok(0)
        );
        driver.controller.unflushed_bytes()
    };
    assert_eq!(get(&mut driver, fid::VOLATILE_WRITE_CACHE, 0), Ok(1));
    assert_eq!(write(&mut driver), 512);
    assert_eq!(set(&mut driver, fid::VOLATILE_WRITE_CACHE, 0), Ok(0));
    assert_eq!(driver.controller.unflushed_bytes(), 0);
    assert_eq!(write(&mut driver), 0);
    let mut config = config();
    config.write_cache = false;
    let mut driver = Driver::new(config);
    assert_eq!(
        get(&mut driver, fid::VOLATILE_WRITE_CACHE, 0),
        Err(Status::INVALID_FIELD)
    );
}

#[test]
fn the_clock_runs_on_from_the_timestamp_that_was_set() {
    let mut driver = Driver::new(config());
    driver
        .memory
        .write(DATA, &1_000_000u64.to_le_bytes())
        .unwrap();
    assert_eq!(set(&mut driver, fid::TIMESTAMP, 0), Ok(0));
    driver.now_ns += 7_000_000;
    assert_eq!(get(&mut driver, fid::TIMESTAMP, 0), Ok(0));
    let expected = (1_000_007u64 | 1 << 49).to_le_bytes();
    assert_eq!(driver.bytes(DATA, 8), expected);
}

#[test]
fn the_power_table_travels_both_ways() {
    let mut driver = Driver::new(config());
    driver.fill(DATA, 0x5A, 256);
    assert_eq!(set(&mut driver, fid::AUTONOMOUS_POWER, 1), Ok(0));
    driver.fill(DATA, 0, 256);
    assert_eq!(get(&mut driver, fid::AUTONOMOUS_POWER, 0), Ok(1));
    assert_eq!(driver.bytes(DATA, 256), [0x5A; 256]);
}

#[test]
fn the_host_memory_buffer_is_checked_taken_and_returned() {
    let mut config = config();
    (config.hmpre, config.hmmin) = (8, 4);
    let mut driver = Driver::new(config);
    let list = DATA + 0x100;
    let entry = |at: u64, pages: u64| [at.to_le_bytes(), pages.to_le_bytes()].concat();
    let good = [entry(0x20_0000, 3), entry(0x30_0000, 1)].concat();
    driver.memory.write(list, &good).unwrap();
    let on = |pages, entries| host_memory_buffer(true, false, pages, Iova(list), entries);
    assert_eq!(
        driver.admin(on(3, 2)),
        Err(Status::INVALID_FIELD),
        "below HMMIN"
    );
    assert_eq!(
        driver.admin(on(5, 2)),
        Err(Status::INVALID_FIELD),
        "more than the list has"
    );
    assert_eq!(driver.admin(on(4, 2)), Ok(0));
    assert_eq!(driver.admin(on(4, 2)), Err(Status::COMMAND_SEQUENCE_ERROR));
    assert_eq!(get(&mut driver, fid::HOST_MEMORY_BUFFER, 0), Ok(1));
    assert_eq!(driver.bytes(DATA, 4), [4, 0, 0, 0]);
    let off = host_memory_buffer(false, false, 0, Iova(0), 0);
    assert_eq!(driver.admin(off), Ok(0));
    driver.memory.write(list, &entry(1 << 44, 4)).unwrap();
    assert_eq!(driver.admin(on(4, 1)), Err(Status::DATA_TRANSFER_ERROR));
    for (at, pages) in [(0x20_0008, 4), (0x20_0000, 0), (0x20_0000, 1 << 32)] {
        driver.memory.write(list, &entry(at, pages)).unwrap();
        let refused = driver.admin(on(4, 1));
        assert_eq!(refused, Err(Status::INVALID_FIELD), "{pages} at {at:#x}");
    }
}

#[test]
fn a_threshold_below_the_temperature_raises_the_event_that_was_asked_for() {
    let mut driver = Driver::new(config());
    driver.push(0, admin::async_event_request());
    driver.ring(0);
    driver.step();
    assert_eq!(set(&mut driver, fid::TEMPERATURE, 300), Ok(0));
    driver.step();
    assert_eq!(driver.peek(0), None, "not asked for");
    assert_eq!(set(&mut driver, fid::ASYNC_EVENT, 1 << 1), Ok(0));
    driver.step();
    assert_eq!(driver.pop(0).map(|cqe| cqe.dw0), Some(0x0002_0101));
    assert_eq!(set(&mut driver, fid::TEMPERATURE, 350), Ok(0));
    driver.controller.set_temperature(400);
    let smart = admin::get_log_page(2, Nsid::ALL, 512, 0).with_prps(DATA, 0);
    assert_eq!(driver.admin(smart), Ok(0));
    let bytes = driver.bytes(DATA, 3);
    assert_eq!(
        (bytes[0], u16::from_le_bytes([bytes[1], bytes[2]])),
        (2, 400)
    );
}

/// There is only one power state. The workload hint is stored beside it.
#[test]
fn only_the_power_state_that_there_is_can_be_entered() {
    let mut driver = Driver::new(config());
    let fid = fid::POWER_MANAGEMENT;
    assert_eq!(set(&mut driver, fid, 1), Err(Status::INVALID_FIELD));
    assert_eq!(set(&mut driver, fid, 31), Err(Status::INVALID_FIELD));
    assert_eq!(get(&mut driver, fid, 0), Ok(0));
    let mut hint = PowerManagement(0);
    hint.set_wh(2);
    assert_eq!(set(&mut driver, fid, hint.0), Ok(0));
    assert_eq!(get(&mut driver, fid, 0), Ok(hint.0));
}

#[test]
fn the_write_cache_goes_off_and_on() {
    let mut config = config();
    config.write_cache = true;
    let mut driver = Driver::new(config);
    let fid = fid::VOLATILE_WRITE_CACHE;
    for value in [1, 0, 0, 1] {
        assert_eq!(set(&mut driver, fid, value), Ok(0));
        assert_eq!(get(&mut driver, fid, 0), Ok(value));
    }
}

/// NVMe Base 2.0c, 5.27.1 and "Feature Values": a saved value survives a controller level reset and a loss of power; a
/// value that was not saved is lost.
#[test]
fn saved_values_outlive_resets_and_losses_of_power() {
    let mut driver = Driver::new(config());
    let save = |driver: &mut Driver, id: u8, dword: u32| {
        let mut sqe = admin::set_features(id, Nsid::NONE, dword).with_prps(DATA, 0);
        sqe.cdw10 |= SAVE;
        assert_eq!(driver.admin(sqe), Ok(0), "{id:#x}");
    };
    driver.fill(DATA, 0x5A, 256);
    let values = [
        (fid::ARBITRATION, 0x0102_0304),
        (fid::POWER_MANAGEMENT, 0x40),
        (fid::TEMPERATURE, 350),
        (fid::ERROR_RECOVERY, 55),
        (fid::VOLATILE_WRITE_CACHE, 0),
        (fid::INTERRUPT_COALESCING, 0x0203),
        (fid::WRITE_ATOMICITY, 1),
        (fid::ASYNC_EVENT, 0x100),
        (fid::AUTONOMOUS_POWER, 1),
    ];
    for (id, dword) in values {
        save(&mut driver, id, dword);
    }
    // Current values that are not saved go with the reset.
    assert_eq!(set(&mut driver, fid::ARBITRATION, 9), Ok(0));
    assert_eq!(set(&mut driver, fid::KEEP_ALIVE, 9), Ok(0));
    driver.fill(DATA, 0, 256);
    for power in [false, true] {
        match power {
            true => driver.controller.power_cut(),
            false => driver
                .controller
                .write32(nvme_spec::register::offset::CC, 0),
        }
        driver.enable();
        for (id, dword) in values {
            assert_eq!(get(&mut driver, id, 0), Ok(dword), "{id:#x}");
            let saved = admin::get_features(id, FeatureSelect::Saved, Nsid::NONE, 0);
            assert_eq!(driver.admin(saved.with_prps(DATA, 0)), Ok(dword), "{id:#x}");
        }
        assert_eq!(driver.bytes(DATA, 256), [0x5A; 256], "the power table");
        assert_eq!(get(&mut driver, fid::KEEP_ALIVE, 0), Ok(0));
        let default = admin::get_features(fid::ARBITRATION, FeatureSelect::Default, Nsid::NONE, 0);
        assert_eq!(driver.admin(default), Ok(7));
    }
}

/// NVMe Base 2.0c, "Host Behavior Support": 512 bytes, each known one 0 or 1; gone with a reset.
#[test]
fn the_behavior_of_the_host_is_taken_and_told() {
    let mut driver = Driver::new(config());
    let fid = fid::HOST_BEHAVIOR;
    driver.fill(DATA, 0xEE, 1024);
    assert_eq!(get(&mut driver, fid, 0), Ok(0));
    assert_eq!(driver.bytes(DATA, 512), [0; 512]);
    assert_eq!(driver.bytes(DATA + 512, 1), [0xEE], "512 bytes and no more");
    driver.memory.write(DATA, &[1, 0, 1]).unwrap();
    assert_eq!(set(&mut driver, fid, 0), Ok(0));
    driver.fill(DATA, 0, 512);
    assert_eq!(get(&mut driver, fid, 0), Ok(0));
    assert_eq!(driver.bytes(DATA, 4), [1, 0, 1, 0]);
    for bad in 0..3 {
        driver.fill(DATA, 0, 512);
        driver.fill(DATA + bad, 2, 1);
        assert_eq!(set(&mut driver, fid, 0), Err(Status::INVALID_FIELD));
    }
    let caps = admin::get_features(fid, FeatureSelect::Capabilities, Nsid::NONE, 0);
    assert_eq!(driver.admin(caps), Ok(4));
    driver
        .controller
        .write32(nvme_spec::register::offset::CC, 0);
    driver.enable();
    assert_eq!(get(&mut driver, fid, 0), Ok(0));
    assert_eq!(driver.bytes(DATA, 4), [0; 4]);
}
