//! The reference model: which contents each block may have, now and after a loss of power.
//!
//! A version is a command's number, 0 is zeroes. A block has a set of versions that a read may find
//! (`now`) and one of those that may be there after a power cut (`kept`). Both are single as long as
//! nothing is in doubt: an aborted write is in doubt, and a cached one until it was flushed. Commands
//! take their blocks for themselves first, so that overlap, which NVMe leaves undefined, is no doubt.

use crate::setup::{BLOCK_BYTES, BLOCKS};
use nvme_core::mem::DmaWords;

/// Words of a block.
pub const BLOCK_WORDS: usize = BLOCK_BYTES as usize / 8;

#[derive(Clone, Debug, Default)]
struct Block {
    now: Vec<u32>,
    kept: Vec<u32>,
    /// Time of the last change, which flushes compare.
    changed: u64,
    writer: bool,
    readers: u32,
}

fn put(versions: &mut Vec<u32>, version: u32) {
    if !versions.contains(&version) {
        versions.push(version);
    }
}

fn set(versions: &mut Vec<u32>, version: u32) {
    versions.clear();
    versions.push(version);
}

/// Effect of a write, as far as its end tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The write was executed; `durable` if it bypassed the write cache.
    Done {
        /// True if no power cut can undo it.
        durable: bool,
    },
    /// Executed or not.
    Unknown,
}

/// The model of the namespace.
#[derive(Clone, Debug)]
pub struct Model {
    blocks: Vec<Block>,
    clock: u64,
    cached: bool,
}

impl Model {
    /// Returns a model in which all blocks are zero. With `cached`, writes may stay in a volatile cache.
    pub fn new(cached: bool) -> Self {
        let zero = Block {
            now: vec![0],
            kept: vec![0],
            ..Block::default()
        };
        Self {
            blocks: vec![zero; BLOCKS as usize],
            clock: 1,
            cached,
        }
    }

    fn range(&mut self, lba: u32, blocks: u32) -> &mut [Block] {
        &mut self.blocks[lba as usize..(lba + blocks) as usize]
    }

    /// Reserves `blocks` free blocks near `lba` for a command; returns the first of them.
    pub fn lock(&mut self, lba: u32, blocks: u32, writes: bool) -> Option<u32> {
        let last = BLOCKS - blocks;
        for turn in 0..6 {
            let at = (lba + turn * 19) % (last + 1);
            let free = |block: &Block| !block.writer && (!writes || block.readers == 0);
            if self.range(at, blocks).iter().all(free) {
                for block in self.range(at, blocks) {
                    block.writer = writes;
                    block.readers += u32::from(!writes);
                }
                return Some(at);
            }
        }
        None
    }

    /// Gives them back.
    pub fn unlock(&mut self, lba: u32, blocks: u32, writes: bool) {
        for block in self.range(lba, blocks) {
            if writes {
                block.writer = false;
            } else {
                block.readers -= 1;
            }
        }
    }

    /// Returns the only version that the block can have, if there is only one.
    pub fn certain(&self, lba: u32) -> Option<u32> {
        match self.blocks[lba as usize].now[..] {
            [version] => Some(version),
            _ => None,
        }
    }

    /// Notes that a write of `version` has ended.
    pub fn wrote(&mut self, lba: u32, blocks: u32, version: u32, effect: Effect) {
        self.clock += 1;
        let (clock, cached) = (self.clock, self.cached);
        for block in self.range(lba, blocks) {
            block.changed = clock;
            match effect {
                Effect::Done { durable } => {
                    set(&mut block.now, version);
                    if durable || !cached {
                        set(&mut block.kept, version);
                    } else {
                        put(&mut block.kept, version);
                    }
                }
                Effect::Unknown => {
                    put(&mut block.now, version);
                    put(&mut block.kept, version);
                }
            }
        }
    }

    /// Returns a stamp for a flush that is submitted now.
    pub fn stamp(&self) -> u64 {
        self.clock
    }

    /// Notes that a flush that was submitted at `stamp` has succeeded: every write that had ended by then is durable.
    pub fn flushed(&mut self, stamp: u64) {
        for block in &mut self.blocks {
            if block.changed <= stamp && !block.writer {
                block.kept.clone_from(&block.now);
            }
        }
    }

    /// Notes that a shutdown was completed: every write that has ended is durable.
    pub fn saved(&mut self) {
        self.flushed(u64::MAX);
    }

    /// Notes that power was lost and is back.
    pub fn power_cut(&mut self) {
        self.clock += 1;
        for block in &mut self.blocks {
            block.now.clone_from(&block.kept);
        }
    }

    /// Notes that a read found `version` in `lba`: from now on the block can hold no other. Returns `false` if it could
    /// not hold `version`.
    pub fn found(&mut self, lba: u32, version: u32) -> bool {
        let block = &mut self.blocks[lba as usize];
        let possible = block.now.contains(&version);
        if possible && block.now.len() > 1 {
            set(&mut block.now, version);
        }
        possible
    }

    /// Returns the versions that may be in `lba`, for messages.
    pub fn possible(&self, lba: u32) -> &[u32] {
        &self.blocks[lba as usize].now
    }
}

fn word(version: u32, lba: u32, index: usize) -> u64 {
    if version == 0 {
        return 0;
    }
    let first = u64::from(version) << 32 | 0x8000_0000 | u64::from(lba);
    first.wrapping_add((index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

/// Writes the contents of `version` of block `lba`.
pub fn fill(words: DmaWords<'_>, version: u32, lba: u32) {
    for index in 0..BLOCK_WORDS {
        words.set(index, word(version, lba, index));
    }
}

/// Returns the version of block `lba` that these words are, if they are one.
pub fn version_of(words: DmaWords<'_>, lba: u32) -> Option<u32> {
    let first = words.get(0);
    let version = (first >> 32) as u32;
    let whole = (0..BLOCK_WORDS).all(|index| words.get(index) == word(version, lba, index));
    whole.then_some(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CACHED: Effect = Effect::Done { durable: false };

    #[test]
    fn a_power_cut_may_take_what_was_not_flushed_and_nothing_else() {
        let mut model = Model::new(true);
        model.wrote(0, 2, 1, CACHED);
        model.flushed(model.stamp());
        model.wrote(1, 1, 2, CACHED);
        model.wrote(2, 1, 3, Effect::Done { durable: true });
        assert_eq!(model.possible(1), [2]);
        model.power_cut();
        let after = [0, 1, 2, 3].map(|lba| model.possible(lba).to_vec());
        assert_eq!(after, [vec![1], vec![1, 2], vec![3], vec![0]]);
        assert!(!model.found(0, 0) && model.found(1, 2) && !model.found(1, 1));
    }

    #[test]
    fn a_flush_says_nothing_of_what_ended_after_it_was_submitted() {
        let mut model = Model::new(true);
        let stamp = model.stamp();
        model.wrote(0, 1, 1, CACHED);
        model.flushed(stamp);
        model.power_cut();
        assert_eq!(model.possible(0), [0, 1]);
    }

    #[test]
    fn a_write_in_doubt_is_one_of_two_and_without_a_cache_nothing_is_lost() {
        let mut model = Model::new(false);
        model.wrote(0, 1, 1, CACHED);
        model.wrote(1, 1, 2, Effect::Unknown);
        model.power_cut();
        assert_eq!((model.certain(0), model.certain(1)), (Some(1), None));
        assert!(model.found(1, 0) && model.certain(1) == Some(0));
    }

    #[test]
    fn blocks_are_taken_by_one_writer_or_many_readers() {
        let mut model = Model::new(false);
        assert_eq!(model.lock(4, 2, false), Some(4));
        assert_eq!(model.lock(5, 2, false), Some(5));
        let at = model.lock(5, 1, true);
        assert!(at.is_some_and(|at| at != 5));
        model.unlock(4, 2, false);
        model.unlock(5, 2, false);
        assert_eq!(model.lock(5, 1, true), Some(5));
        assert_ne!(model.lock(5, 1, false), Some(5));
    }
}
