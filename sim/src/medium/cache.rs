//! The volatile write cache: it makes a power cut revert the writes that were not flushed.
//!
//! Blocks are written to the store at once. The first write of a block since the last flush keeps
//! the block's old content in one of a fixed number of lines. Flush discards the lines; a power cut
//! writes them back. A set without a free line discards its oldest one: that block counts as
//! written out early, which every cache may do. So reads cost nothing, no write allocates, and an
//! image of any size works. A simulator that is killed loses nothing, since that is no power cut.
//!
//! To keep the old content costs as many copied bytes as the write itself. Long writes pay that
//! only for the first [`LONG_BYTES_KEPT`] bytes after a flush; later ones count as written out
//! early at once, as in a cache that bypasses itself for long streams.

use crate::medium::store::{BlockStore, StoreError};
use crate::memory::SpinLock;
use alloc::boxed::Box;
use alloc::vec;
use core::sync::atomic::{AtomicU64, Ordering};
use zerocopy::FromZeros;

/// Number of lines of one set.
const WAYS: usize = 8;
/// Length in bytes above which a change is long.
const LONG: u64 = 32 << 10;
/// Limit of the bytes of long changes whose old content is kept between two flushes.
const LONG_BYTES_KEPT: u64 = 1 << 20;
/// Bytes of the image that share a mark, and the number of marks. A range whose mark is of an older
/// epoch has no current line, so long writes need not search the sets for it.
const REGION_SHIFT: u32 = 17;
const REGIONS: usize = 4096;

#[derive(Clone, Copy, Debug, Default)]
struct CacheLine {
    /// Byte offset of the block; valid while `epoch` is the cache's.
    offset: u64,
    /// Epoch in which the line was filled; 0 is never the current one.
    epoch: u64,
    /// Value of the shard's clock when the line was filled: the smallest of a set is discarded
    /// first.
    filled: u64,
    /// Bytes kept in the line's data, which has the line's own index.
    bytes: u64,
}

/// Sets behind one lock, so that writes to the sets of other shards proceed in parallel.
struct CacheShard {
    clock: u64,
    table: Box<[CacheLine]>,
    data: Box<[u8]>,
}

/// Number of shards of a cache that has as many sets. Commands are executed by tens of threads at
/// most.
const PARTS: usize = 64;

/// Write cache of one namespace.
pub(crate) struct WriteCache {
    /// Shards: set `n` of the cache is set `n / parts` of shard `n % parts`.
    parts: Box<[SpinLock<CacheShard>]>,
    sets: usize,
    line_bytes: usize,
    /// Bytes that all lines hold together.
    bytes: u64,
    /// Current epoch. Lines of another epoch are empty: a flush empties all of them by one
    /// addition.
    epoch: AtomicU64,
    /// Bytes of long changes that were kept since the last flush.
    long_bytes: AtomicU64,
    /// Epoch of each region in which one of its lines was filled last.
    regions: Box<[AtomicU64]>,
}

impl CacheShard {
    /// Keeps the content of the block at `at` in one of the lines from `first` on.
    fn keep(
        &mut self,
        store: &dyn BlockStore,
        (at, block): (u64, usize),
        (first, epoch): (usize, u64),
        line_bytes: usize,
    ) -> Result<(), StoreError> {
        let set = &self.table[first..first + WAYS];
        let current = |line: &CacheLine| line.epoch == epoch;
        if set.iter().any(|line| current(line) && line.offset == at) {
            return Ok(());
        }
        let age = |line: &CacheLine| if current(line) { line.filled } else { 0 };
        let way = (0..WAYS).min_by_key(|way| age(&set[*way])).unwrap_or(0);
        let data = &mut self.data[(first + way) * line_bytes..][..block];
        store.read_at(at, data)?;
        self.clock += 1;
        self.table[first + way] = CacheLine {
            offset: at,
            epoch,
            filled: self.clock,
            bytes: block as u64,
        };
        Ok(())
    }
}

impl WriteCache {
    /// Makes a cache of at least `bytes` bytes in lines of `line_bytes` (the largest block size).
    pub fn new(bytes: usize, line_bytes: usize) -> Self {
        let sets = (bytes / line_bytes).div_ceil(WAYS).max(1);
        let parts = sets.min(PARTS);
        let part = |number: usize| {
            let lines = (sets - number).div_ceil(parts) * WAYS;
            SpinLock::new(CacheShard {
                clock: 0,
                table: vec![CacheLine::default(); lines].into_boxed_slice(),
                data: <[u8]>::new_box_zeroed_with_elems(lines * line_bytes).expect("out of memory"),
            })
        };
        Self {
            parts: (0..parts).map(part).collect(),
            sets,
            line_bytes,
            bytes: (sets * WAYS * line_bytes) as u64,
            epoch: AtomicU64::new(1),
            long_bytes: AtomicU64::new(0),
            regions: (0..REGIONS).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Returns the shard of the block at `at`, and the first of the block's lines there.
    fn place(&self, at: u64, block: usize) -> (&SpinLock<CacheShard>, usize) {
        let set = (at / block as u64 % self.sets as u64) as usize;
        let parts = self.parts.len();
        (&self.parts[set % parts], set / parts * WAYS)
    }

    fn region(&self, at: u64) -> &AtomicU64 {
        &self.regions[(at >> REGION_SHIFT) as usize % REGIONS]
    }

    fn epoch(&self) -> u64 {
        // Acquire: pairs with the release in `next_epoch`. A thread that sees the new epoch also
        // sees the flushed blocks in the store; it must not keep content from before the flush as
        // old.
        self.epoch.load(Ordering::Acquire)
    }

    fn next_epoch(&self) {
        // Release: pairs with the acquire in `epoch`. A writer that sees the new epoch sees the flushed
        // blocks, and does not keep content from before the flush as the old one of a block.
        self.epoch.fetch_add(1, Ordering::Release);
        self.long_bytes.store(0, Ordering::Relaxed);
    }

    /// Prepares the overwriting of `len` bytes from `offset` on: keeps the content of the blocks
    /// or, if the change is to be written out at once, discards what was kept of them.
    pub fn before_write(
        &self,
        store: &dyn BlockStore,
        offset: u64,
        len: u64,
        block: usize,
    ) -> Result<(), StoreError> {
        if len > LONG {
            let room = |kept: u64| Some(kept + len).filter(|sum| *sum <= LONG_BYTES_KEPT);
            let order = Ordering::Relaxed;
            let keeps =
                len <= self.bytes && self.long_bytes.fetch_update(order, order, room).is_ok();
            if !keeps {
                self.forget(offset, len, block);
                return Ok(());
            }
        }
        let epoch = self.epoch();
        for at in (offset..offset + len).step_by(block) {
            let (part, first) = self.place(at, block);
            let mut part = part.lock();
            part.keep(store, (at, block), (first, epoch), self.line_bytes)?;
            // The maximum and not a store: a flush may have begun a later epoch since this thread
            // read its own. An older epoch would hide the lines of the later one from a power cut.
            self.region(at).fetch_max(epoch, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Discards the lines of `len` bytes from `offset` on.
    fn forget(&self, offset: u64, len: u64, block: usize) {
        let end = offset + len;
        let mut from = offset;
        while from < end {
            let to = end.min(((from >> REGION_SHIFT) + 1) << REGION_SHIFT);
            // No mark of this epoch can be missing: writes whose lines are discarded here have
            // ended before, in the order of their commands.
            if self.region(from).load(Ordering::Relaxed) == self.epoch() {
                self.forget_blocks(from, to - from, block);
            }
            from = to;
        }
    }

    fn forget_blocks(&self, offset: u64, len: u64, block: usize) {
        let range = offset..offset + len;
        if len / block as u64 > self.sets as u64 {
            for part in &self.parts {
                let mut part = part.lock();
                let lines = part.table.iter_mut();
                lines
                    .filter(|line| range.contains(&line.offset))
                    .for_each(|line| line.epoch = 0);
            }
            return;
        }
        for at in range.step_by(block) {
            let (part, first) = self.place(at, block);
            for line in &mut part.lock().table[first..first + WAYS] {
                if line.offset == at {
                    line.epoch = 0;
                }
            }
        }
    }

    /// Discards the old content of `len` bytes from `offset` on, since these blocks are durable now
    /// (FUA).
    pub fn commit(&self, offset: u64, len: u64, block: usize) {
        self.forget(offset, len, block);
    }

    /// Discards all old content, since all blocks are durable now.
    pub fn flush(&self) {
        self.next_epoch();
    }

    /// Returns the bytes that a power cut would revert.
    pub fn dirty_bytes(&self) -> u64 {
        let epoch = self.epoch();
        let of = |part: &SpinLock<CacheShard>| -> u64 {
            let part = part.lock();
            let lines = part.table.iter().filter(|line| line.epoch == epoch);
            lines.map(|line| line.bytes).sum()
        };
        self.parts.iter().map(of).sum()
    }

    /// Writes back all old content, which reverts every write since the last flush.
    pub fn power_cut(&self, store: &dyn BlockStore) -> Result<(), StoreError> {
        let epoch = self.epoch();
        for part in &self.parts {
            let part = part.lock();
            for (i, line) in part.table.iter().enumerate() {
                if line.epoch == epoch {
                    let data = &part.data[i * self.line_bytes..][..line.bytes as usize];
                    store.write_at(line.offset, data)?;
                }
            }
        }
        self.next_epoch();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::medium::store::MemoryStore;

    fn byte(store: &MemoryStore, offset: u64) -> u8 {
        let mut byte = [0];
        store.read_at(offset, &mut byte).unwrap();
        byte[0]
    }

    fn write(cache: &WriteCache, store: &MemoryStore, block: u64, value: u8) {
        cache.before_write(store, block * 512, 512, 512).unwrap();
        store.write_at(block * 512, &[value; 512]).unwrap();
    }

    #[test]
    fn a_power_cut_takes_back_what_was_not_flushed() {
        let store = MemoryStore::new(1 << 20).unwrap();
        let cache = WriteCache::new(1 << 16, 4096);
        write(&cache, &store, 3, 1);
        cache.flush();
        write(&cache, &store, 3, 2);
        write(&cache, &store, 3, 3);
        write(&cache, &store, 4, 9);
        assert_eq!(cache.dirty_bytes(), 1024);
        cache.power_cut(&store).unwrap();
        assert_eq!((byte(&store, 3 * 512), byte(&store, 4 * 512)), (1, 0));
        assert_eq!(cache.dirty_bytes(), 0);
    }

    #[test]
    fn a_committed_block_survives_and_its_neighbour_does_not() {
        let store = MemoryStore::new(1 << 20).unwrap();
        let cache = WriteCache::new(1 << 16, 4096);
        write(&cache, &store, 0, 1);
        write(&cache, &store, 1, 1);
        cache.commit(0, 512, 512);
        cache.power_cut(&store).unwrap();
        assert_eq!((byte(&store, 0), byte(&store, 512)), (1, 0));
    }

    #[test]
    fn a_long_range_is_committed_as_a_whole() {
        let store = MemoryStore::new(1 << 20).unwrap();
        let cache = WriteCache::new(0, 512);
        for block in [0, 7, 100] {
            write(&cache, &store, block, 1);
        }
        cache.commit(0, 50 * 512, 512);
        cache.power_cut(&store).unwrap();
        let kept: alloc::vec::Vec<_> = [0, 7, 100].map(|block| byte(&store, block * 512)).into();
        assert_eq!(kept, [1, 1, 0]);
    }

    #[test]
    fn a_full_cache_writes_out_early_instead_of_growing() {
        let store = MemoryStore::new(1 << 20).unwrap();
        let cache = WriteCache::new(0, 512); // one set of eight lines
        for block in 0..20 {
            write(&cache, &store, block, 1);
        }
        assert_eq!(cache.dirty_bytes(), 8 * 512);
        cache.power_cut(&store).unwrap();
        let lost: alloc::vec::Vec<_> = (0..20)
            .filter(|block| byte(&store, block * 512) == 0)
            .collect();
        assert_eq!(lost, (12..20).collect::<alloc::vec::Vec<_>>());
    }

    /// Writes `len` bytes of `value`, as a command does.
    fn long(cache: &WriteCache, store: &MemoryStore, offset: u64, len: usize, value: u8) {
        let change = cache.before_write(store, offset, len as u64, 512);
        change.expect("readable");
        let data = vec![value; len];
        store.write_at(offset, &data).expect("inside the store");
    }

    /// Long writes are lost like others, up to a limit; a stream beyond it is written out as it comes.
    #[test]
    fn long_writes_are_lost_until_they_are_a_stream() {
        const STEP: usize = 128 << 10;
        let store = MemoryStore::new(16 << 20).unwrap();
        let cache = WriteCache::new(16 << 20, 4096);
        for turn in 0..2 {
            let value = turn + 1;
            for at in (0..16 << 20).step_by(STEP) {
                long(&cache, &store, at, STEP, value);
            }
            assert_eq!(cache.dirty_bytes(), LONG_BYTES_KEPT);
            cache.power_cut(&store).unwrap();
            let kept = |at: u64| byte(&store, at) == value;
            assert!(!kept(0) && !kept(LONG_BYTES_KEPT - 1), "lost as before");
            assert!(kept(LONG_BYTES_KEPT) && kept((16 << 20) - 1), "written out");
        }
        // After a flush the old content of the next LONG_BYTES_KEPT bytes is kept again.
        cache.flush();
        long(&cache, &store, 8 << 20, STEP, 9);
        cache.power_cut(&store).unwrap();
        assert_ne!(byte(&store, 8 << 20), 9);
    }

    /// A power cut does not restore the content before an earlier write of blocks that a long write made durable.
    #[test]
    fn a_long_write_that_is_written_out_takes_earlier_writes_with_it() {
        const STEP: usize = 128 << 10;
        let store = MemoryStore::new(16 << 20).unwrap();
        let cache = WriteCache::new(16 << 20, 4096);
        for at in (0..LONG_BYTES_KEPT).step_by(STEP) {
            long(&cache, &store, at, STEP, 1);
        }
        let late = 4 << 20;
        write(&cache, &store, late / 512 + 3, 1);
        long(&cache, &store, late, STEP, 2);
        // Over the edge of a region, and what was kept of a long write.
        long(&cache, &store, STEP as u64 - 512, STEP, 3);
        cache.power_cut(&store).unwrap();
        assert_eq!(byte(&store, late + 3 * 512), 2);
        let seen = [
            STEP as u64 - 1024,
            STEP as u64 - 512,
            2 * STEP as u64 - 1024,
            2 * STEP as u64 - 512,
        ];
        assert_eq!(seen.map(|at| byte(&store, at)), [0, 3, 3, 0]);
    }

    /// Bytes that are read from the store are bytes that a write costs besides its own.
    #[test]
    fn a_stream_of_long_writes_reads_nothing() {
        use core::sync::atomic::{AtomicU64, Ordering};
        struct Counting(MemoryStore, AtomicU64);
        impl BlockStore for Counting {
            fn bytes(&self) -> u64 {
                self.0.bytes()
            }
            fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
                self.1.fetch_add(into.len() as u64, Ordering::Relaxed);
                self.0.read_at(offset, into)
            }
            fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), StoreError> {
                self.0.write_at(offset, from)
            }
            fn zero(&self, offset: u64, len: u64, deallocate: bool) -> Result<(), StoreError> {
                self.0.zero(offset, len, deallocate)
            }
            fn flush(&self) -> Result<(), StoreError> {
                Ok(())
            }
        }
        let store = Counting(MemoryStore::new(64 << 20).unwrap(), AtomicU64::new(0));
        let cache = WriteCache::new(16 << 20, 4096);
        for at in (0..64u64 << 20).step_by(128 << 10) {
            cache.before_write(&store, at, 128 << 10, 4096).unwrap();
        }
        assert_eq!(store.1.load(Ordering::Relaxed), LONG_BYTES_KEPT);
    }
}
