//! Tests of `nvm`.

mod media;

use super::*;
use crate::testing::{DATA, Driver, config};
use nvme_auditor::Rule;
use nvme_spec::Lba;

const ONE: Nsid = Nsid(1);

fn write(driver: &mut Driver, lba: u64, blocks: u32, value: u8, flags: u32) {
    driver.fill(DATA, value, 4096);
    let mut sqe = nvm::write(ONE, Lba(lba), blocks).with_prps(DATA, 0);
    sqe.cdw12 |= flags;
    assert_eq!(driver.io(sqe), Ok(0));
}

fn read(driver: &mut Driver, lba: u64) -> u8 {
    let at = DATA + 0x8000;
    driver.fill(at, 0xEE, 512);
    assert_eq!(
        driver.io(nvm::read(ONE, Lba(lba), 1).with_prps(at, 0)),
        Ok(0)
    );
    let bytes = driver.bytes(at, 512);
    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    bytes[0]
}

#[test]
fn written_blocks_read_back_through_lists() {
    let mut driver = Driver::with_queue(config());
    let pattern: alloc::vec::Vec<u8> = (0..32768u32).map(|i| ((i * 7) >> 3) as u8).collect();
    driver.memory.write(DATA + 0x40, &pattern).unwrap();
    let list = DATA + 0x2_0010;
    for page in 1..9 {
        let entry = (DATA + page * 4096).to_le_bytes();
        driver.memory.write(list + (page - 1) * 8, &entry).unwrap();
    }
    let sqe = nvm::write(ONE, Lba(100), 64).with_prps(DATA + 0x40, list);
    assert_eq!(driver.io(sqe), Ok(0));
    driver.fill(DATA, 0, 40960);
    let sqe = nvm::read(ONE, Lba(100), 64).with_prps(DATA + 0x40, list);
    assert_eq!(driver.io(sqe), Ok(0));
    assert_eq!(driver.bytes(DATA + 0x40, 32768), pattern);
    assert_eq!(
        driver.bytes(DATA, 0x40),
        [0; 0x40],
        "nothing before the buffer is touched"
    );
}

#[test]
fn every_refusal_has_its_status() {
    let mut driver = Driver::with_queue(config());
    driver.breaks(&[
        Rule::OpcodeUnsupported,
        Rule::SglDescriptor,
        Rule::NamespaceAbsent,
        Rule::LbaRange,
        Rule::TooLong,
        Rule::PrpEntry,
    ]);
    let fused = |mut sqe: Sqe| {
        sqe.cdw0 |= 1 << 8;
        sqe
    };
    let psdt = |mut sqe: Sqe, psdt: u32| {
        sqe.cdw0 |= psdt << 14;
        sqe
    };
    let good = nvm::read(ONE, Lba(0), 1).with_prps(DATA, 0);
    let cases = [
        (Sqe::new(0x7F, ONE), Status::INVALID_OPCODE),
        (fused(good), Status::INVALID_FIELD),
        (psdt(good, 2), Status::INVALID_FIELD),
        (psdt(good, 3), Status::INVALID_FIELD),
        (nvm::read(Nsid(0), Lba(0), 1), Status::INVALID_NAMESPACE),
        (nvm::read(Nsid(2), Lba(0), 1), Status::INVALID_NAMESPACE),
        (nvm::read(Nsid::ALL, Lba(0), 1), Status::INVALID_NAMESPACE),
        (nvm::read(ONE, Lba(2048), 1), Status::LBA_OUT_OF_RANGE),
        (nvm::read(ONE, Lba(2047), 2), Status::LBA_OUT_OF_RANGE),
        (nvm::read(ONE, Lba(u64::MAX), 1), Status::LBA_OUT_OF_RANGE),
        (
            nvm::read(ONE, Lba(0), 257).with_prps(DATA, DATA),
            Status::INVALID_FIELD,
        ),
        (good.with_prps(DATA + 2, 0), Status::INVALID_PRP_OFFSET),
        (good.with_prps(1 << 40, 0), Status::DATA_TRANSFER_ERROR),
        (
            nvm::write(ONE, Lba(0), 1).with_prps(!3, 0),
            Status::DATA_TRANSFER_ERROR,
        ),
        (
            nvm::deallocate(ONE, 1).with_prps(1 << 40, 0),
            Status::DATA_TRANSFER_ERROR,
        ),
    ];
    for (i, (sqe, status)) in cases.into_iter().enumerate() {
        assert_eq!(driver.io(sqe), Err(status), "case {i}");
    }
    assert_eq!(driver.io(good), Ok(0));
    assert_eq!(driver.controller.queue_stats(1).errors, 15);
}

#[test]
fn a_write_with_a_bad_second_page_changes_nothing() {
    let mut driver = Driver::with_queue(config());
    write(&mut driver, 0, 8, 1, 0);
    driver.fill(DATA, 9, 4096);
    let sqe = nvm::write(ONE, Lba(0), 16).with_prps(DATA, 1 << 40);
    assert_eq!(driver.io(sqe), Err(Status::DATA_TRANSFER_ERROR));
    assert_eq!(read(&mut driver, 0), 1);
}

#[test]
fn a_power_cut_loses_what_neither_flush_nor_fua_made_durable() {
    let mut driver = Driver::with_queue(config());
    write(&mut driver, 1, 1, 1, 0);
    assert_eq!(driver.io(nvm::flush(ONE)), Ok(0));
    write(&mut driver, 1, 1, 2, 0);
    write(&mut driver, 2, 1, 3, FUA);
    write(&mut driver, 3, 1, 4, 0);
    assert_eq!(driver.controller.unflushed_bytes(), 1024);
    assert_eq!((read(&mut driver, 1), read(&mut driver, 3)), (2, 4));
    driver.controller.power_cut();
    assert!(!driver.csts().rdy());
    driver.enable();
    driver.create_pair(1);
    let after: alloc::vec::Vec<_> = (1..4).map(|lba| read(&mut driver, lba)).collect();
    assert_eq!(after, [1, 3, 0]);
}

#[test]
fn without_a_cache_every_write_is_durable() {
    let mut config = config();
    config.write_cache = false;
    let mut driver = Driver::with_queue(config);
    write(&mut driver, 1, 1, 7, 0);
    driver.controller.power_cut();
    driver.enable();
    driver.create_pair(1);
    assert_eq!(read(&mut driver, 1), 7);
}

#[test]
fn zeroes_and_deallocation_read_as_zero_and_spare_their_neighbours() {
    let mut driver = Driver::with_queue(config());
    write(&mut driver, 0, 8, 5, 0);
    let mut zeroes = nvm::write_zeroes(ONE, Lba(1), 2);
    zeroes.cdw12 |= DEAC;
    assert_eq!(driver.io(zeroes), Ok(0));
    let range = |slba: u64, blocks: u32| {
        let mut bytes = [0u8; 16];
        bytes[4..8].copy_from_slice(&blocks.to_le_bytes());
        bytes[8..].copy_from_slice(&slba.to_le_bytes());
        bytes
    };
    driver
        .memory
        .write(DATA, &[range(4, 1), range(6, 1)].concat())
        .unwrap();
    assert_eq!(driver.io(nvm::deallocate(ONE, 2).with_prps(DATA, 0)), Ok(0));
    let blocks: alloc::vec::Vec<_> = (0..8).map(|lba| read(&mut driver, lba)).collect();
    assert_eq!(blocks, [5, 0, 0, 5, 0, 5, 0, 5]);
    driver
        .memory
        .write(DATA, &[range(0, 1), range(2047, 2)].concat())
        .unwrap();
    let sqe = nvm::deallocate(ONE, 2).with_prps(DATA, 0);
    assert_eq!(driver.io(sqe), Err(Status::LBA_OUT_OF_RANGE));
    assert_eq!(
        read(&mut driver, 0),
        5,
        "no range is deallocated when one is bad"
    );
}

#[test]
fn compare_finds_the_first_difference() {
    let mut driver = Driver::with_queue(config());
    write(&mut driver, 0, 8, 5, 0);
    let sqe = nvm::compare(ONE, Lba(0), 8).with_prps(DATA, 0);
    assert_eq!(driver.io(sqe), Ok(0));
    driver.memory.write(DATA + 4095, &[6]).unwrap();
    assert_eq!(driver.io(sqe), Err(Status::COMPARE_FAILURE));
}

#[test]
fn uncorrectable_blocks_fail_until_they_are_written() {
    let mut driver = Driver::with_queue(config());
    driver.breaks(&[Rule::LbaRange]);
    let mut bad = nvm::verify(ONE, Lba(4), 2);
    bad.cdw0 = u32::from(opcode::WRITE_UNCORRECTABLE);
    assert_eq!(driver.io(bad), Ok(0));
    let read4 = nvm::read(ONE, Lba(3), 2).with_prps(DATA, 0);
    assert_eq!(driver.io(read4), Err(Status::UNRECOVERED_READ_ERROR));
    assert_eq!(
        driver.io(nvm::verify(ONE, Lba(5), 1)),
        Err(Status::UNRECOVERED_READ_ERROR)
    );
    write(&mut driver, 4, 2, 1, 0);
    assert_eq!(driver.io(read4), Ok(0));
    assert_eq!(
        driver.io(nvm::verify(ONE, Lba(0), 65536)),
        Err(Status::LBA_OUT_OF_RANGE)
    );
}

#[test]
fn metadata_travels_in_its_own_buffer() {
    let mut config = config();
    config.namespaces[0].metadata_bytes = 8;
    let mut driver = Driver::with_queue(config);
    driver
        .memory
        .write(DATA + 0x4000, &[1, 2, 3, 4, 5, 6, 7, 8, 9])
        .unwrap();
    let mut sqe = nvm::write(ONE, Lba(3), 1).with_prps(DATA, 0);
    sqe.mptr = DATA + 0x4000;
    assert_eq!(driver.io(sqe), Ok(0));
    let mut sqe = nvm::read(ONE, Lba(2), 2).with_prps(DATA, 0);
    sqe.mptr = DATA + 0x5000;
    assert_eq!(driver.io(sqe), Ok(0));
    let expected = [0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0];
    assert_eq!(driver.bytes(DATA + 0x5000, 17), expected);
}

#[test]
fn a_write_without_a_buffer_for_its_metadata_changes_nothing() {
    let mut config = config();
    config.namespaces[0].metadata_bytes = 8;
    let mut driver = Driver::with_queue(config);
    driver.breaks_anything();
    driver.fill(DATA, 0x11, 512);
    for mptr in [1 << 40, u64::MAX - 3] {
        let mut sqe = nvm::write(ONE, Lba(3), 1).with_prps(DATA, 0);
        sqe.mptr = mptr;
        assert_eq!(driver.io(sqe), Err(Status::DATA_TRANSFER_ERROR));
    }
    let mut sqe = nvm::read(ONE, Lba(3), 1).with_prps(DATA, 0);
    sqe.mptr = DATA + 0x5000;
    assert_eq!(driver.io(sqe), Ok(0));
    assert_eq!(driver.bytes(DATA, 512), [0; 512]);
}

#[test]
fn read_only_namespaces_refuse_every_change() {
    let mut config = config();
    config.namespaces[0].read_only = true;
    let mut driver = Driver::with_queue(config);
    let sqe = nvm::write(ONE, Lba(0), 1).with_prps(DATA, 0);
    assert_eq!(driver.io(sqe), Err(Status::NAMESPACE_WRITE_PROTECTED));
    assert_eq!(
        driver.io(nvm::write_zeroes(ONE, Lba(0), 1)),
        Err(Status::NAMESPACE_WRITE_PROTECTED)
    );
    assert_eq!(driver.io(nvm::flush(Nsid::ALL)), Ok(0));
}

#[test]
fn an_sgl_moves_data_where_it_is_supported() {
    use nvme_spec::sgl::{SglDescriptor, kind};
    let block = SglDescriptor::new(kind::DATA_BLOCK, DATA + 1, 512).to_words();
    let sqe = nvm::read(ONE, Lba(0), 1).with_sgl(block);
    let mut driver = Driver::with_queue(config());
    write(&mut driver, 0, 1, 8, 0);
    driver.fill(DATA, 0, 1024);
    assert_eq!(driver.io(sqe), Ok(0));
    let bytes = driver.bytes(DATA, 514);
    assert_eq!((bytes[0], bytes[1], bytes[512], bytes[513]), (0, 8, 8, 0));
    let mut config = config();
    config.sgl = false;
    let mut driver = Driver::with_queue(config);
    driver.breaks(&[Rule::SglDescriptor]);
    assert_eq!(driver.io(sqe), Err(Status::INVALID_FIELD));
}
