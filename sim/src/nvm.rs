//! The NVM command set: what each I/O command does to a namespace.
//!
//! NVM Command Set 1.0c, 3 (I/O Commands for the NVM Command Set).

use crate::data::{Data, Direction, store_status};
use crate::latency::Work;
use crate::memory::Dma;
use crate::namespace::Namespace;
use crate::queue::QueueStats;
use crate::store::Store;
use nvme_core::spec::nvm::{self, DEAC, DSM_DEALLOCATE, FUA, opcode};
use nvme_core::spec::{Nsid, PageSize, Psdt, Sqe, Status};

/// What the commands of one batch may use.
#[derive(Clone, Copy)]
pub(crate) struct Io<'a, 'g> {
    pub namespaces: &'a [Namespace],
    pub dma: &'a Dma<'g>,
    pub page: PageSize,
    /// The most bytes that one command may move.
    pub max_bytes: u64,
    pub sgl: bool,
    /// Whether writes may stay in the volatile cache.
    pub write_back: bool,
}

/// Blocks that a command names, as bytes of the store.
#[derive(Clone, Copy)]
struct Range {
    offset: u64,
    len: u64,
    shift: u32,
}

impl Range {
    fn block(&self) -> usize {
        1 << self.shift
    }
}

/// What kind of work a command is and how many bytes it moves, for the latency model.
///
/// A command that will be refused moves nothing.
pub(crate) fn work(io: &Io<'_, '_>, sqe: &Sqe) -> (Work, u64) {
    let bytes = io.range(sqe).map_or(0, |(_, range)| range.len);
    let bytes = if bytes > io.max_bytes { 0 } else { bytes };
    match sqe.opcode() {
        opcode::READ | opcode::COMPARE => (Work::Read, bytes),
        opcode::VERIFY => (Work::Read, 0),
        opcode::WRITE => (Work::Write, bytes),
        opcode::FLUSH => (Work::Flush, 0),
        _ => (Work::Write, 0),
    }
}

impl<'a, 'g> Io<'a, 'g> {
    /// Checks and executes `sqe`.
    #[inline]
    pub fn execute(
        &self,
        sqe: &Sqe,
        scratch: &mut [u8],
        stats: &mut QueueStats,
    ) -> Result<(), Status> {
        match sqe.opcode() {
            opcode::READ => {
                stats.reads += 1;
                self.read(sqe, scratch, stats)
            }
            opcode::WRITE => {
                stats.writes += 1;
                self.write(sqe, scratch, stats)
            }
            _ => self.others(sqe, scratch, stats),
        }
    }

    /// Whether [`expect`](Self::expect) is of any use.
    pub fn looks_ahead(&self) -> bool {
        let in_memory = |one: &Namespace| !one.null && one.store.span().is_some();
        self.namespaces.iter().any(in_memory)
    }

    /// Fetches the start of what a read will move while the command before it is executed. Checks
    /// nothing: that comes with the execution.
    #[inline]
    pub fn expect(&self, sqe: &Sqe) {
        let namespace = self.namespaces.get((sqe.nsid as usize).wrapping_sub(1));
        let Some(namespace) = namespace.filter(|_| sqe.opcode() == opcode::READ) else {
            return;
        };
        let start = nvm::slba(sqe).0 << namespace.shift();
        let len = u64::from(nvm::blocks(sqe)) << namespace.shift();
        let span = namespace.store.span();
        let part = span.and_then(|span| span.slice(start as usize, len as usize));
        if let Some(part) = part {
            part.prefetch();
        }
    }

    #[cold]
    fn others(&self, sqe: &Sqe, scratch: &mut [u8], stats: &mut QueueStats) -> Result<(), Status> {
        match sqe.opcode() {
            opcode::FLUSH => self.flush(sqe),
            opcode::WRITE_UNCORRECTABLE => self.write_uncorrectable(sqe),
            opcode::COMPARE => self.compare(sqe, scratch, stats),
            opcode::WRITE_ZEROES => self.write_zeroes(sqe),
            opcode::DATASET_MANAGEMENT => self.dataset_management(sqe, scratch),
            opcode::VERIFY => self.verify(sqe),
            _ => Err(Status::INVALID_OPCODE.with_dnr()),
        }
    }

    /// Checks that every command shares.
    #[inline]
    fn admit(&self, sqe: &Sqe) -> Result<(), Status> {
        // Fused operations are not supported (FUSES = 0), nor is an SGL for metadata.
        let psdt = match sqe.psdt() {
            Psdt::Prp => true,
            Psdt::SglMptrBuffer => self.sgl,
            Psdt::SglMptrSgl | Psdt::Reserved => false,
        };
        if sqe.fuse() != 0 || !psdt {
            Err(Status::INVALID_FIELD.with_dnr())
        } else {
            Ok(())
        }
    }

    #[inline]
    fn namespace(&self, sqe: &Sqe) -> Result<&'a Namespace, Status> {
        self.admit(sqe)?;
        let index = (sqe.nsid as usize).wrapping_sub(1);
        let namespace = self
            .namespaces
            .get(index)
            .ok_or(Status::INVALID_NAMESPACE.with_dnr())?;
        if namespace.is_formatting() {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        Ok(namespace)
    }

    /// The namespace and blocks of a command.
    #[inline]
    fn range(&self, sqe: &Sqe) -> Result<(&'a Namespace, Range), Status> {
        let namespace = self.namespace(sqe)?;
        let range = range(namespace, nvm::slba(sqe).0, u64::from(nvm::blocks(sqe)))?;
        Ok((namespace, range))
    }

    #[inline]
    fn data<'s>(&'s self, sqe: &'s Sqe, len: u64) -> Result<Data<'s, 'g>, Status> {
        if len > self.max_bytes {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        Ok(Data {
            dma: self.dma,
            sqe,
            page: self.page,
            len,
        })
    }

    #[inline]
    fn read(&self, sqe: &Sqe, scratch: &mut [u8], stats: &mut QueueStats) -> Result<(), Status> {
        let (namespace, range) = self.range(sqe)?;
        let data = self.data(sqe, range.len)?;
        stats.read_bytes += range.len;
        if namespace.null {
            // Nothing moves, but the data pointer is walked and checked.
            return data.walk(Direction::ToHost, |_, _| Ok(()));
        }
        if namespace.is_damaged(range.offset, range.len) {
            return Err(Status::UNRECOVERED_READ_ERROR.with_dnr());
        }
        data.read(&*namespace.store, range.offset, scratch)?;
        self.metadata(namespace, sqe, range, Direction::ToHost)
    }

    #[inline]
    fn write(&self, sqe: &Sqe, scratch: &mut [u8], stats: &mut QueueStats) -> Result<(), Status> {
        let (namespace, range) = self.range(sqe)?;
        let data = self.data(sqe, range.len)?;
        writable(namespace)?;
        stats.written_bytes += range.len;
        if namespace.null {
            return data.walk(Direction::FromHost, |_, _| Ok(()));
        }
        data.check(Direction::FromHost)?;
        self.changing(namespace, range, sqe.cdw12 & FUA != 0, || {
            data.write(&*namespace.store, range.offset, scratch)?;
            self.metadata(namespace, sqe, range, Direction::FromHost)
        })
    }

    /// Runs `change` of the blocks so that a power cut afterwards does what it should.
    fn changing(
        &self,
        namespace: &Namespace,
        range: Range,
        fua: bool,
        change: impl FnOnce() -> Result<(), Status>,
    ) -> Result<(), Status> {
        let fault = |error| store_status(error, Direction::FromHost);
        let store = &*namespace.store;
        let Range { offset, len, .. } = range;
        let cache = namespace.cache.as_ref();
        let through = fua || !self.write_back || cache.is_some_and(|cache| cache.is_too_small(len));
        if let Some(cache) = cache.filter(|_| !through) {
            cache
                .before_write(store, offset, len, range.block())
                .map_err(fault)?;
        }
        change()?;
        namespace.repair(offset, len);
        if through && let Some(cache) = cache {
            store.flush().map_err(fault)?;
            cache.commit(offset, len, range.block());
        }
        Ok(())
    }

    /// Moves the metadata of the blocks, where the format has a buffer apart for it.
    fn metadata(
        &self,
        namespace: &Namespace,
        sqe: &Sqe,
        range: Range,
        direction: Direction,
    ) -> Result<(), Status> {
        let Some(store) = &namespace.metadata else {
            return Ok(());
        };
        let each = u64::from(namespace.metadata_bytes);
        let offset = ((range.offset >> range.shift) * each) as usize;
        let len = ((range.len >> range.shift) * each) as usize;
        let stored = store.span().and_then(|span| span.slice(offset, len));
        let stored = stored.ok_or(Status::INTERNAL_ERROR)?;
        let mut done = 0;
        let moved = self.dma.pieces(sqe.mptr, len, |piece| {
            if let Some(stored) = stored.slice(done, piece.len()) {
                match direction {
                    Direction::ToHost => stored.copy_to(piece),
                    Direction::FromHost => piece.copy_to(stored),
                }
            }
            done += piece.len();
        });
        moved.map_err(|_| Status::DATA_TRANSFER_ERROR)
    }

    fn flush(&self, sqe: &Sqe) -> Result<(), Status> {
        let fault = |error| store_status(error, Direction::FromHost);
        if sqe.nsid == Nsid::ALL.0 {
            self.admit(sqe)?;
            return self
                .namespaces
                .iter()
                .try_for_each(|one| one.flush().map_err(fault));
        }
        self.namespace(sqe)?.flush().map_err(fault)
    }

    fn compare(&self, sqe: &Sqe, scratch: &mut [u8], stats: &mut QueueStats) -> Result<(), Status> {
        let (namespace, range) = self.range(sqe)?;
        let data = self.data(sqe, range.len)?;
        if namespace.is_damaged(range.offset, range.len) {
            return Err(Status::UNRECOVERED_READ_ERROR.with_dnr());
        }
        stats.read_bytes += range.len;
        if namespace.null {
            return data.walk(Direction::FromHost, |_, _| Ok(()));
        }
        data.compare(&*namespace.store, range.offset, scratch)
    }

    fn verify(&self, sqe: &Sqe) -> Result<(), Status> {
        let (namespace, range) = self.range(sqe)?;
        if namespace.is_damaged(range.offset, range.len) {
            return Err(Status::UNRECOVERED_READ_ERROR.with_dnr());
        }
        Ok(())
    }

    fn write_uncorrectable(&self, sqe: &Sqe) -> Result<(), Status> {
        let (namespace, range) = self.range(sqe)?;
        writable(namespace)?;
        if namespace.damage(range.offset, range.len) {
            Ok(())
        } else {
            Err(Status::INTERNAL_ERROR)
        }
    }

    fn write_zeroes(&self, sqe: &Sqe) -> Result<(), Status> {
        let (namespace, range) = self.range(sqe)?;
        writable(namespace)?;
        self.changing(namespace, range, sqe.cdw12 & FUA != 0, || {
            self.zero(namespace, range, sqe.cdw12 & DEAC != 0)
        })
    }

    fn zero(&self, namespace: &Namespace, range: Range, deallocate: bool) -> Result<(), Status> {
        let fault = |error| store_status(error, Direction::FromHost);
        namespace
            .store
            .zero(range.offset, range.len, deallocate)
            .map_err(fault)?;
        let each = u64::from(namespace.metadata_bytes);
        if let Some(metadata) = &namespace.metadata {
            let (first, blocks) = (range.offset >> range.shift, range.len >> range.shift);
            metadata
                .zero(first * each, blocks * each, deallocate)
                .map_err(fault)?;
        }
        Ok(())
    }

    fn dataset_management(&self, sqe: &Sqe, scratch: &mut [u8]) -> Result<(), Status> {
        let namespace = self.namespace(sqe)?;
        let bytes = ((sqe.cdw10 & 0xFF) as usize + 1) * size_of::<nvm::DsmRange>();
        let list = scratch.get_mut(..bytes).ok_or(Status::INTERNAL_ERROR)?;
        // Not limited by MDTS on purpose: 4 KiB is the least that MDTS can be.
        Data {
            dma: self.dma,
            sqe,
            page: self.page,
            len: bytes as u64,
        }
        .gather(list)?;
        if sqe.cdw11 & DSM_DEALLOCATE == 0 {
            return Ok(()); // Hints only.
        }
        writable(namespace)?;
        let ranges = |entry: &[u8]| {
            let blocks = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]);
            let mut slba = [0; 8];
            slba.copy_from_slice(&entry[8..16]);
            range(namespace, u64::from_le_bytes(slba), u64::from(blocks))
        };
        // Every range is checked before the first one is deallocated.
        for entry in list.chunks_exact(16) {
            ranges(entry)?;
        }
        for entry in list.chunks_exact(16) {
            let range = ranges(entry)?;
            if range.len != 0 {
                let deallocate = || self.zero(namespace, range, true);
                self.changing(namespace, range, false, deallocate)?;
            }
        }
        Ok(())
    }
}

/// The `blocks` blocks from `lba` on, when the namespace has them.
#[inline]
fn range(namespace: &Namespace, lba: u64, blocks: u64) -> Result<Range, Status> {
    let shift = namespace.shift();
    let total = namespace.bytes() >> shift;
    if lba >= total || blocks > total - lba {
        return Err(Status::LBA_OUT_OF_RANGE.with_dnr());
    }
    Ok(Range {
        offset: lba << shift,
        len: blocks << shift,
        shift,
    })
}

#[inline]
fn writable(namespace: &Namespace) -> Result<(), Status> {
    if namespace.read_only {
        Err(Status::WRITE_TO_READ_ONLY.with_dnr())
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{DATA, Driver, config};
    use nvme_core::spec::Lba;

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
    fn read_only_namespaces_refuse_every_change() {
        let mut config = config();
        config.namespaces[0].read_only = true;
        let mut driver = Driver::with_queue(config);
        let sqe = nvm::write(ONE, Lba(0), 1).with_prps(DATA, 0);
        assert_eq!(driver.io(sqe), Err(Status::WRITE_TO_READ_ONLY));
        assert_eq!(
            driver.io(nvm::write_zeroes(ONE, Lba(0), 1)),
            Err(Status::WRITE_TO_READ_ONLY)
        );
        assert_eq!(driver.io(nvm::flush(Nsid::ALL)), Ok(0));
    }

    #[test]
    fn an_sgl_moves_data_where_it_is_supported() {
        use nvme_core::spec::sgl::{SglDescriptor, kind};
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
        assert_eq!(
            Driver::with_queue(config).io(sqe),
            Err(Status::INVALID_FIELD)
        );
    }
}
