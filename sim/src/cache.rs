//! The volatile write cache: what a power cut takes back.
//!
//! Blocks go to the store at once, and the first write of a block since the last flush keeps what
//! was there before in one of a fixed number of lines. Flush forgets the lines; a power cut puts
//! them back. A set without a free line forgets its oldest one: that block was written out early,
//! which every cache may do. So reads cost nothing, no write allocates, and an image of any size
//! works; and a simulator that is killed loses nothing, since that is no power cut.

use crate::memory::Lock;
use crate::store::{Store, StoreError};
use alloc::boxed::Box;
use alloc::vec;
use zerocopy::FromZeros;

/// Lines of one set.
const WAYS: usize = 8;

#[derive(Clone, Copy, Debug, Default)]
struct Line {
    /// Byte offset of the block; valid while `epoch` is the cache's.
    offset: u64,
    /// 0 is never current.
    epoch: u64,
    /// When the line was filled: the smallest of a set is forgotten first.
    filled: u64,
    /// Which line of `data` holds it is its own index.
    bytes: u64,
}

struct Lines {
    epoch: u64,
    clock: u64,
    table: Box<[Line]>,
    data: Box<[u8]>,
}

/// The cache of one namespace.
pub(crate) struct Cache {
    lines: Lock<Lines>,
    line_bytes: usize,
}

impl Cache {
    /// A cache of at least `bytes` bytes in lines of `line_bytes` (the largest block size).
    pub fn new(bytes: usize, line_bytes: usize) -> Self {
        let lines = (bytes / line_bytes).div_ceil(WAYS).max(1) * WAYS;
        let lines = Lines {
            epoch: 1,
            clock: 0,
            table: vec![Line::default(); lines].into_boxed_slice(),
            data: <[u8]>::new_box_zeroed_with_elems(lines * line_bytes).expect("out of memory"),
        };
        Self {
            lines: Lock::new(lines),
            line_bytes,
        }
    }

    /// Whether `len` bytes are more than the cache holds: such a change is written through.
    pub fn is_too_small(&self, len: u64) -> bool {
        len > self.lines.lock().data.len() as u64
    }

    /// Remembers the blocks of `len` bytes from `offset` on, before they are overwritten.
    pub fn before_write(
        &self,
        store: &dyn Store,
        offset: u64,
        len: u64,
        block: usize,
    ) -> Result<(), StoreError> {
        let mut lines = self.lines.lock();
        let lines = &mut *lines;
        let sets = lines.table.len() / WAYS;
        for at in (offset..offset + len).step_by(block) {
            let first = (at / block as u64 % sets as u64) as usize * WAYS;
            let set = &lines.table[first..first + WAYS];
            if set
                .iter()
                .any(|line| line.epoch == lines.epoch && line.offset == at)
            {
                continue;
            }
            let age = |line: &Line| {
                if line.epoch == lines.epoch {
                    line.filled
                } else {
                    0
                }
            };
            let way = (0..WAYS).min_by_key(|way| age(&set[*way])).unwrap_or(0);
            let data = &mut lines.data[(first + way) * self.line_bytes..][..block];
            store.read_at(at, data)?;
            lines.clock += 1;
            lines.table[first + way] = Line {
                offset: at,
                epoch: lines.epoch,
                filled: lines.clock,
                bytes: block as u64,
            };
        }
        Ok(())
    }

    /// Forgets what was there before in `len` bytes from `offset` on: they are durable now (FUA).
    pub fn commit(&self, offset: u64, len: u64, block: usize) {
        let mut lines = self.lines.lock();
        let sets = lines.table.len() / WAYS;
        if len / block as u64 > sets as u64 {
            let inside = |line: &&mut Line| (offset..offset + len).contains(&line.offset);
            lines
                .table
                .iter_mut()
                .filter(inside)
                .for_each(|line| line.epoch = 0);
            return;
        }
        for at in (offset..offset + len).step_by(block) {
            let first = (at / block as u64 % sets as u64) as usize * WAYS;
            for line in &mut lines.table[first..first + WAYS] {
                if line.offset == at {
                    line.epoch = 0;
                }
            }
        }
    }

    /// Forgets everything: all blocks are durable now.
    pub fn flush(&self) {
        self.lines.lock().epoch += 1;
    }

    /// Bytes that a power cut would take back.
    pub fn dirty_bytes(&self) -> u64 {
        let lines = self.lines.lock();
        lines
            .table
            .iter()
            .filter(|line| line.epoch == lines.epoch)
            .map(|line| line.bytes)
            .sum()
    }

    /// Puts everything back that was not flushed.
    pub fn power_cut(&self, store: &dyn Store) -> Result<(), StoreError> {
        let mut lines = self.lines.lock();
        for (i, line) in lines.table.iter().enumerate() {
            if line.epoch == lines.epoch {
                let data = &lines.data[i * self.line_bytes..][..line.bytes as usize];
                store.write_at(line.offset, data)?;
            }
        }
        lines.epoch += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Memory;

    fn byte(store: &Memory, offset: u64) -> u8 {
        let mut byte = [0];
        store.read_at(offset, &mut byte).unwrap();
        byte[0]
    }

    fn write(cache: &Cache, store: &Memory, block: u64, value: u8) {
        cache.before_write(store, block * 512, 512, 512).unwrap();
        store.write_at(block * 512, &[value; 512]).unwrap();
    }

    #[test]
    fn a_power_cut_takes_back_what_was_not_flushed() {
        let store = Memory::new(1 << 20).unwrap();
        let cache = Cache::new(1 << 16, 4096);
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
        let store = Memory::new(1 << 20).unwrap();
        let cache = Cache::new(1 << 16, 4096);
        write(&cache, &store, 0, 1);
        write(&cache, &store, 1, 1);
        cache.commit(0, 512, 512);
        cache.power_cut(&store).unwrap();
        assert_eq!((byte(&store, 0), byte(&store, 512)), (1, 0));
    }

    #[test]
    fn a_long_range_is_committed_as_a_whole() {
        let store = Memory::new(1 << 20).unwrap();
        let cache = Cache::new(0, 512);
        for block in [0, 7, 100] {
            write(&cache, &store, block, 1);
        }
        cache.commit(0, 50 * 512, 512);
        cache.power_cut(&store).unwrap();
        let kept: alloc::vec::Vec<_> = [0, 7, 100].map(|block| byte(&store, block * 512)).into();
        assert_eq!(kept, [1, 1, 0]);
        assert!(cache.is_too_small(9 * 512) && !cache.is_too_small(8 * 512));
    }

    #[test]
    fn a_full_cache_writes_out_early_instead_of_growing() {
        let store = Memory::new(1 << 20).unwrap();
        let cache = Cache::new(0, 512); // one set of eight lines
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
}
