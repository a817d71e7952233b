//! Media that fail, media that keep nothing, and more damage than the controller can record.

use crate::config::settings::NamespaceConfig;
use crate::medium::store::{BlockStore, MemoryStore, NullStore, StoreError};
use crate::testing::{DATA, Driver, config};
use alloc::boxed::Box;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, Ordering};
use nvme_spec::admin::FeatureSelect;
use nvme_spec::feature::fid;
use nvme_spec::register::offset;
use nvme_spec::{Lba, Nsid, Sqe, Status, admin, nvm};

const ONE: Nsid = Nsid(1);

/// A store whose disk fails while `bad` is true.
struct Failing {
    image: MemoryStore,
    bad: Arc<AtomicBool>,
}

impl Failing {
    fn works(&self) -> Result<&MemoryStore, StoreError> {
        match self.bad.load(Ordering::Relaxed) {
            true => Err(StoreError::Io(5)),
            false => Ok(&self.image),
        }
    }
}

impl BlockStore for Failing {
    fn bytes(&self) -> u64 {
        self.image.bytes()
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.works()?.read_at(offset, into)
    }

    fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), StoreError> {
        self.works()?.write_at(offset, from)
    }

    fn zero(&self, offset: u64, len: u64, deallocate: bool) -> Result<(), StoreError> {
        self.works()?.zero(offset, len, deallocate)
    }

    fn flush(&self) -> Result<(), StoreError> {
        self.works()?.flush()
    }
}

/// Returns a driver over such a store, and the flag that makes it fail.
fn failing() -> (Driver, Arc<AtomicBool>) {
    let bad = Arc::new(AtomicBool::new(false));
    let store = Failing {
        image: MemoryStore::new(1 << 20).expect("1 MiB"),
        bad: bad.clone(),
    };
    let mut config = config();
    config.namespaces[0] = NamespaceConfig::new(512, Box::new(store));
    config.write_cache = true;
    (Driver::with_queue(config), bad)
}

fn with_data(sqe: Sqe) -> Sqe {
    sqe.with_prps(DATA, 0)
}

fn fua(mut sqe: Sqe) -> Sqe {
    sqe.cdw12 |= nvm::FUA;
    sqe
}

#[test]
fn a_store_that_fails_is_a_media_error() {
    let (mut driver, bad) = failing();
    driver.fill(DATA, 0x5A, 512);
    assert_eq!(driver.io(with_data(nvm::write(ONE, Lba(9), 1))), Ok(0));
    bad.store(true, Ordering::Relaxed);
    let read = with_data(nvm::read(ONE, Lba(9), 1));
    let compare = with_data(nvm::compare(ONE, Lba(9), 1));
    let cases = [
        (read, Status::UNRECOVERED_READ_ERROR),
        (compare, Status::UNRECOVERED_READ_ERROR),
        (with_data(nvm::write(ONE, Lba(9), 1)), Status::WRITE_FAULT),
        (
            fua(with_data(nvm::write(ONE, Lba(9), 1))),
            Status::WRITE_FAULT,
        ),
        (nvm::write_zeroes(ONE, Lba(9), 1), Status::WRITE_FAULT),
        (nvm::flush(ONE), Status::WRITE_FAULT),
        (nvm::flush(Nsid::ALL), Status::WRITE_FAULT),
    ];
    for (sqe, status) in cases {
        assert_eq!(driver.io(sqe), Err(status), "opcode {:#x}", sqe.opcode());
    }
    // Nothing else has suffered.
    bad.store(false, Ordering::Relaxed);
    driver.fill(DATA, 0, 512);
    assert_eq!(driver.io(read), Ok(0));
    assert_eq!(driver.bytes(DATA, 512), [0x5A; 512]);
    assert_eq!(driver.io(compare), Ok(0));
}

#[test]
fn a_cache_that_cannot_be_written_back_is_told() {
    let (mut driver, bad) = failing();
    bad.store(true, Ordering::Relaxed);
    let off = admin::set_features(fid::VOLATILE_WRITE_CACHE, Nsid::NONE, 0);
    assert_eq!(driver.admin(off), Err(Status::WRITE_FAULT));
    let get = admin::get_features(
        fid::VOLATILE_WRITE_CACHE,
        FeatureSelect::Current,
        Nsid::NONE,
        0,
    );
    assert_eq!(driver.admin(get), Ok(1), "it is still on");
    // A shutdown cannot fail; a controller that lost data reports it in CSTS.CFS.
    assert!(!driver.csts().cfs());
    let mut cc = Driver::cc();
    cc.set_shn(1);
    driver.controller.write32(offset::CC, cc.0);
    driver.step();
    assert!(driver.csts().cfs());
    assert_eq!(driver.csts().shst(), 2, "it ends all the same");
}

/// A null device takes every command, and touches no buffer.
#[test]
fn a_store_that_keeps_nothing_serves_every_command() {
    let mut config = config();
    config.namespaces[0] = NamespaceConfig::new(512, Box::new(NullStore::new(1 << 40)));
    let mut driver = Driver::with_queue(config);
    driver.fill(DATA, 0xA5, 1024);
    let last = Lba((1 << 40) / 512 - 2);
    for sqe in [
        nvm::write(ONE, last, 2),
        nvm::compare(ONE, last, 2),
        nvm::read(ONE, last, 2),
        fua(nvm::write(ONE, last, 2)),
    ] {
        assert_eq!(driver.io(with_data(sqe)), Ok(0), "{:#x}", sqe.opcode());
        assert_eq!(driver.bytes(DATA, 1024), [0xA5; 1024]);
    }
    assert_eq!(driver.io(nvm::write_zeroes(ONE, last, 2)), Ok(0));
    assert_eq!(driver.io(nvm::flush(ONE)), Ok(0));
}

/// The record of damaged ranges is limited: beyond that the command fails with an error.
#[test]
fn more_damage_than_is_remembered_is_refused() {
    let mut driver = Driver::with_queue(config());
    let damage = |lba| {
        let mut sqe = Sqe::new(nvm::opcode::WRITE_UNCORRECTABLE, ONE);
        sqe.cdw10 = lba;
        sqe
    };
    for lba in 0..1024 {
        assert_eq!(driver.io(damage(lba)), Ok(0), "block {lba}");
    }
    assert_eq!(driver.io(damage(1024)), Err(Status::INTERNAL_ERROR));
    let read = |lba| with_data(nvm::read(ONE, Lba(lba), 1));
    assert_eq!(driver.io(read(1024)), Ok(0), "it is whole");
    assert_eq!(driver.io(read(1023)), Err(Status::UNRECOVERED_READ_ERROR));
    // A block that is written is whole again, and there is room for another.
    assert_eq!(driver.io(with_data(nvm::write(ONE, Lba(7), 1))), Ok(0));
    assert_eq!(driver.io(damage(1024)), Ok(0));
    assert_eq!(driver.io(read(1024)), Err(Status::UNRECOVERED_READ_ERROR));
}

/// Zeroed blocks lose their metadata, too, and no other blocks do.
#[test]
fn zeroes_and_formats_reach_the_metadata_of_their_blocks() {
    const META: u64 = DATA + 0x4000;
    let mut config = config();
    config.namespaces[0].metadata_bytes = 8;
    let mut driver = Driver::with_queue(config);
    let with_metadata = |sqe: Sqe| {
        let mut sqe = with_data(sqe);
        sqe.mptr = META;
        sqe
    };
    driver.fill(DATA, 0x11, 4 * 512);
    driver.fill(META, 0x22, 4 * 8);
    let write = with_metadata(nvm::write(ONE, Lba(4), 4));
    assert_eq!(driver.io(write), Ok(0));
    assert_eq!(driver.io(nvm::write_zeroes(ONE, Lba(5), 2)), Ok(0));
    driver.fill(DATA, 0xEE, 4 * 512);
    driver.fill(META, 0xEE, 4 * 8);
    let read = with_metadata(nvm::read(ONE, Lba(4), 4));
    assert_eq!(driver.io(read), Ok(0));
    let check = |driver: &Driver, zeroed: [bool; 4]| {
        for (block, zero) in (0..).zip(zeroed) {
            let (data, metadata) = if zero { (0, 0) } else { (0x11, 0x22) };
            let found = driver.bytes(DATA + block * 512, 512);
            assert_eq!(found, [data; 512], "block {block}");
            let found = driver.bytes(META + block * 8, 8);
            assert_eq!(found, [metadata; 8], "metadata of block {block}");
        }
    };
    check(&driver, [false, true, true, false]);
    // A format erases everything; the block size belongs to the format with metadata, and stays.
    let format = |index| admin::format_nvm(ONE, index, 0);
    assert_eq!(driver.admin(format(1)), Err(Status::INVALID_FORMAT));
    assert_eq!(driver.admin(format(0)), Ok(0));
    assert_eq!(driver.io(read), Ok(0));
    check(&driver, [true; 4]);
}

#[test]
fn a_format_that_may_not_or_cannot_be_done_is_refused() {
    let mut config = config();
    config.namespaces[0].read_only = true;
    let mut driver = Driver::new(config);
    let format = admin::format_nvm(ONE, 0, 0);
    assert_eq!(driver.admin(format), Err(Status::NAMESPACE_WRITE_PROTECTED));
    let (mut driver, bad) = failing();
    bad.store(true, Ordering::Relaxed);
    assert_eq!(driver.admin(format), Err(Status::WRITE_FAULT));
    bad.store(false, Ordering::Relaxed);
    // The namespace is not left half formatted.
    assert_eq!(driver.io(with_data(nvm::read(ONE, Lba(0), 1))), Ok(0));
    assert_eq!(driver.admin(format), Ok(0));
}
