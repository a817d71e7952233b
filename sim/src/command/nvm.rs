//! The NVM command set: the checks and the effects of each I/O command on a namespace.
//!
//! NVM Command Set 1.0c, 3 (I/O Commands for the NVM Command Set).

use crate::bus::queue::QueueStats;
use crate::command::data::{DataDirection, DataPointer, store_status};
use crate::medium::latency::WorkKind;
use crate::medium::namespace::NamespaceImage;
use crate::medium::store::BlockStore;
use crate::memory::Dma;
use core::sync::atomic::{AtomicBool, Ordering};
use nvme_spec::nvm::{self, DEAC, DSM_DEALLOCATE, FUA, opcode};
use nvme_spec::{Nsid, PageSize, Psdt, Sqe, Status};

/// State of the controller that the commands of one batch work on, read once at the batch's start.
#[derive(Clone, Copy)]
pub(crate) struct IoContext<'a, 'g> {
    pub namespaces: &'g [NamespaceImage],
    pub dma: &'a Dma<'g>,
    pub page: PageSize,
    /// Limit of the bytes that one command moves.
    pub max_bytes: u64,
    pub sgl: bool,
    /// True if writes may stay in the volatile cache.
    pub write_back: bool,
    /// Status of every command but Flush while a sanitize operation is in progress or has failed.
    pub restriction: Option<Status>,
    /// True if no user data was written since the last sanitize operation.
    pub erased: &'g AtomicBool,
}

/// Blocks of a command, as bytes of the store.
#[derive(Clone, Copy)]
struct BlockRange {
    offset: u64,
    len: u64,
    shift: u32,
}

impl BlockRange {
    fn block(&self) -> usize {
        1 << self.shift
    }
}

/// Returns the kind of work of a command and the bytes that it moves, for the latency model. A
/// command that will be rejected moves nothing.
pub(crate) fn work(io: &IoContext<'_, '_>, sqe: &Sqe) -> (WorkKind, u64) {
    let bytes = io.range(sqe).map_or(0, |(_, range)| range.len);
    let bytes = if bytes > io.max_bytes { 0 } else { bytes };
    match sqe.opcode() {
        opcode::READ | opcode::COMPARE => (WorkKind::Read, bytes),
        opcode::VERIFY => (WorkKind::Read, 0),
        opcode::WRITE => (WorkKind::Write, bytes),
        opcode::FLUSH => (WorkKind::Flush, 0),
        _ => (WorkKind::Write, 0),
    }
}

/// True if the data pointer has no list. Data that moves late would need its list a second time,
/// when the driver may have reused the list's memory, so such faults are limited to commands
/// without one.
pub(crate) fn needs_no_list(io: &IoContext<'_, '_>, sqe: &Sqe) -> bool {
    let page = io.page.bytes();
    sqe.psdt() == Psdt::Prp && sqe.dptr[0] % page + work(io, sqe).1 <= 2 * page
}

impl<'a, 'g> IoContext<'a, 'g> {
    /// Checks and executes `sqe`.
    #[inline]
    pub fn execute(
        &self,
        sqe: &Sqe,
        scratch: &mut [u8],
        stats: &mut QueueStats,
    ) -> Result<(), Status> {
        if let Some(status) = self.restriction
            && sqe.opcode() != opcode::FLUSH
        {
            return Err(status);
        }
        match sqe.opcode() {
            opcode::READ => {
                stats.reads += 1;
                self.read(sqe, scratch, stats)
            }
            opcode::WRITE => {
                stats.writes += 1;
                self.write(sqe, scratch, stats)
            }
            _ => self.execute_other(sqe, scratch, stats),
        }
    }

    /// True if [`prefetch`](Self::prefetch) is of use: some namespace lies in memory.
    pub fn can_prefetch(&self) -> bool {
        let in_memory = |one: &NamespaceImage| !one.null && one.store.span().is_some();
        self.namespaces.iter().any(in_memory)
    }

    /// Prefetches the first blocks of a read while an earlier command executes. It checks nothing
    /// beyond its own safety, since the execution checks the command.
    #[inline]
    pub fn prefetch(&self, sqe: &Sqe) {
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
    fn execute_other(
        &self,
        sqe: &Sqe,
        scratch: &mut [u8],
        stats: &mut QueueStats,
    ) -> Result<(), Status> {
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

    /// Makes the checks that all commands share.
    #[inline]
    fn admit(&self, sqe: &Sqe) -> Result<(), Status> {
        // Fused operations are not supported (FUSES = 0), and neither is an SGL for metadata.
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
    fn namespace(&self, sqe: &Sqe) -> Result<&'g NamespaceImage, Status> {
        self.admit(sqe)?;
        let index = (sqe.nsid as usize).wrapping_sub(1);
        let namespace = self
            .namespaces
            .get(index)
            .filter(|one| one.bytes() != 0)
            .ok_or(Status::INVALID_NAMESPACE.with_dnr())?;
        if namespace.is_formatting() {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        Ok(namespace)
    }

    /// Returns the namespace and the blocks of a command.
    #[inline]
    fn range(&self, sqe: &Sqe) -> Result<(&'g NamespaceImage, BlockRange), Status> {
        let namespace = self.namespace(sqe)?;
        let range = range(namespace, nvm::slba(sqe).0, u64::from(nvm::blocks(sqe)))?;
        Ok((namespace, range))
    }

    #[inline]
    fn data<'s>(&'s self, sqe: &'s Sqe, len: u64) -> Result<DataPointer<'s, 'g>, Status> {
        if len > self.max_bytes {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        Ok(DataPointer {
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
            // A null namespace moves no data, so a benchmark measures the driver alone. The data
            // pointer is still walked, so that a bad one fails here as on any other namespace.
            return data.walk(DataDirection::ToHost, |_, _| Ok(()));
        }
        if namespace.is_damaged(range.offset, range.len) {
            return Err(Status::UNRECOVERED_READ_ERROR.with_dnr());
        }
        data.read(&*namespace.store, range.offset, scratch)?;
        self.metadata(namespace, sqe, range, DataDirection::ToHost)
    }

    #[inline]
    fn write(&self, sqe: &Sqe, scratch: &mut [u8], stats: &mut QueueStats) -> Result<(), Status> {
        let (namespace, range) = self.range(sqe)?;
        let data = self.data(sqe, range.len)?;
        writable(namespace)?;
        stats.written_bytes += range.len;
        if namespace.null {
            return data.walk(DataDirection::FromHost, |_, _| Ok(()));
        }
        data.check(DataDirection::FromHost)?;
        self.check_metadata(namespace, sqe, range)?;
        self.change_blocks(namespace, range, sqe.cdw12 & FUA != 0, || {
            data.write(&*namespace.store, range.offset, scratch)?;
            self.metadata(namespace, sqe, range, DataDirection::FromHost)
        })
    }

    /// Carries out `change` of the blocks. Before it, the write cache keeps their old content for a
    /// power cut; after a write through the cache, they are made durable.
    fn change_blocks(
        &self,
        namespace: &NamespaceImage,
        range: BlockRange,
        fua: bool,
        change: impl FnOnce() -> Result<(), Status>,
    ) -> Result<(), Status> {
        let fault = |error| store_status(error, DataDirection::FromHost);
        let store = &*namespace.store;
        let BlockRange { offset, len, .. } = range;
        if self.erased.load(Ordering::Relaxed) {
            self.erased.store(false, Ordering::Relaxed);
        }
        let cache = namespace.cache.as_ref();
        let through = fua || !self.write_back;
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

    /// Checks that the buffer of the metadata is mapped, if the format has one: a write that fails changes no block.
    fn check_metadata(
        &self,
        namespace: &NamespaceImage,
        sqe: &Sqe,
        range: BlockRange,
    ) -> Result<(), Status> {
        if namespace.metadata.is_none() {
            return Ok(());
        }
        let bytes = (range.len >> range.shift) as usize * usize::from(namespace.metadata_bytes);
        let checked = self.dma.check(sqe.mptr, bytes);
        checked.map_err(|_| Status::DATA_TRANSFER_ERROR)
    }

    /// Moves the metadata of the blocks, if the format has a separate buffer for it.
    fn metadata(
        &self,
        namespace: &NamespaceImage,
        sqe: &Sqe,
        range: BlockRange,
        direction: DataDirection,
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
        let moved = self.dma.extents(sqe.mptr, len, |piece| {
            if let Some(stored) = stored.slice(done, piece.len()) {
                match direction {
                    DataDirection::ToHost => stored.copy_to(piece),
                    DataDirection::FromHost => piece.copy_to(stored),
                }
            }
            done += piece.len();
        });
        moved.map_err(|_| Status::DATA_TRANSFER_ERROR)
    }

    fn flush(&self, sqe: &Sqe) -> Result<(), Status> {
        let fault = |error| store_status(error, DataDirection::FromHost);
        if sqe.nsid == Nsid::ALL.0 {
            self.admit(sqe)?;
            // The cache is empty during a sanitize operation, and no block may be read or written:
            // Flush succeeds without effect. The sanitize operation itself leaves nothing that a
            // flush could save.
            if self.restriction.is_some() {
                return Ok(());
            }
            return self
                .namespaces
                .iter()
                .try_for_each(|one| one.flush().map_err(fault));
        }
        let namespace = self.namespace(sqe)?;
        if self.restriction.is_some() {
            return Ok(());
        }
        namespace.flush().map_err(fault)
    }

    fn compare(&self, sqe: &Sqe, scratch: &mut [u8], stats: &mut QueueStats) -> Result<(), Status> {
        let (namespace, range) = self.range(sqe)?;
        let data = self.data(sqe, range.len)?;
        if namespace.is_damaged(range.offset, range.len) {
            return Err(Status::UNRECOVERED_READ_ERROR.with_dnr());
        }
        stats.read_bytes += range.len;
        if namespace.null {
            return data.walk(DataDirection::FromHost, |_, _| Ok(()));
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
        self.change_blocks(namespace, range, sqe.cdw12 & FUA != 0, || {
            self.zero(namespace, range, sqe.cdw12 & DEAC != 0)
        })
    }

    fn zero(
        &self,
        namespace: &NamespaceImage,
        range: BlockRange,
        deallocate: bool,
    ) -> Result<(), Status> {
        let fault = |error| store_status(error, DataDirection::FromHost);
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
        // MDTS does not limit this list: it has at most 4 KiB, which every controller must accept.
        DataPointer {
            dma: self.dma,
            sqe,
            page: self.page,
            len: bytes as u64,
        }
        .gather(list)?;
        if sqe.cdw11 & DSM_DEALLOCATE == 0 {
            return Ok(()); // The other attributes are hints.
        }
        writable(namespace)?;
        let ranges = |entry: &[u8]| {
            let blocks = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]);
            let mut slba = [0; 8];
            slba.copy_from_slice(&entry[8..16]);
            range(namespace, u64::from_le_bytes(slba), u64::from(blocks))
        };
        // All ranges are checked before the first one is deallocated: the command either has its
        // whole effect or, with an invalid range, leaves every block as it was.
        for entry in list.chunks_exact(16) {
            ranges(entry)?;
        }
        for entry in list.chunks_exact(16) {
            let range = ranges(entry)?;
            if range.len != 0 {
                let deallocate = || self.zero(namespace, range, true);
                self.change_blocks(namespace, range, false, deallocate)?;
            }
        }
        Ok(())
    }
}

/// Returns the `blocks` blocks from `lba` on as a range of bytes, if the namespace has them.
#[inline]
fn range(namespace: &NamespaceImage, lba: u64, blocks: u64) -> Result<BlockRange, Status> {
    let shift = namespace.shift();
    let total = namespace.bytes() >> shift;
    if lba >= total || blocks > total - lba {
        return Err(Status::LBA_OUT_OF_RANGE.with_dnr());
    }
    Ok(BlockRange {
        offset: lba << shift,
        len: blocks << shift,
        shift,
    })
}

#[inline]
fn writable(namespace: &NamespaceImage) -> Result<(), Status> {
    if namespace.is_read_only() {
        // Not Attempted Write to Read Only Range, which is for blocks that are read-only for another reason.
        Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr())
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
