//! Buffers with canaries, each mapped for the controller only while a command holds it.
//!
//! Every word outside the data of a command that holds the buffer is the canary: before the data, after them, and
//! everywhere while the buffer is free.

use crate::memory::{Area, Memory, PAGE};
use nvme_core::mem::DmaWords;
use nvme_core::spec::Iova;

const CANARY: u64 = 0xCAFE_F00D_DEAD_BEEF;
/// Words looked at on either side of a command's data when it ends; all are looked at in the end.
const GUARD: usize = 8;

struct Buffer<'a> {
    area: Area,
    words: DmaWords<'a>,
    pages: [Iova; 4],
    free: bool,
}

/// The buffers of a run: most of two pages, a few of four.
pub struct Pool<'a> {
    memory: &'a Memory,
    buffers: Vec<Buffer<'a>>,
    /// Free buffers by size, the last freed on top: memory is reused as soon as possible.
    small: Vec<usize>,
    big: Vec<usize>,
}

/// Buffers of two and of four pages.
const SMALL: usize = 24;
const BIG: usize = 4;

impl<'a> Pool<'a> {
    /// Takes the buffers out of `memory`.
    pub fn new(memory: &'a Memory) -> Self {
        let buffers: Vec<_> = (0..SMALL + BIG)
            .map(|index| {
                let pages = if index < SMALL { 2 } else { 4 };
                let area = memory.take(pages * PAGE, PAGE);
                memory.set_mapped(area, false);
                let words = memory.words(area);
                for at in 0..words.len() {
                    words.set(at, CANARY);
                }
                Buffer {
                    area,
                    words,
                    pages: [0, 1, 2, 3].map(|page| area.iova.offset(page * PAGE)),
                    free: true,
                }
            })
            .collect();
        Self {
            memory,
            buffers,
            small: (0..SMALL).collect(),
            big: (SMALL..SMALL + BIG).collect(),
        }
    }

    /// Returns a free buffer of at least `bytes` bytes, which the controller can reach from now on.
    pub fn take(&mut self, bytes: u64) -> Option<usize> {
        let index = if bytes <= 2 * PAGE {
            self.small.pop()
        } else {
            self.big.pop()
        }?;
        let buffer = &mut self.buffers[index];
        buffer.free = false;
        self.memory.set_mapped(buffer.area, true);
        Some(index)
    }

    /// Takes a buffer out of the controller's reach, before it is known to be free.
    pub fn unmap(&mut self, index: usize) {
        self.memory.set_mapped(self.buffers[index].area, false);
    }

    /// Gives a buffer back whose `len` words from `start` on were a command's.
    pub fn give(&mut self, index: usize, start: usize, len: usize) {
        self.unmap(index);
        let buffer = &mut self.buffers[index];
        for at in start..start + len {
            buffer.words.set(at, CANARY);
        }
        buffer.free = true;
        if index < SMALL {
            self.small.push(index);
        } else {
            self.big.push(index);
        }
    }

    /// Returns the words of a buffer.
    pub fn words(&self, index: usize) -> DmaWords<'a> {
        self.buffers[index].words
    }

    /// Returns the address of the buffer's first byte.
    pub fn iova(&self, index: usize) -> Iova {
        self.buffers[index].area.iova
    }

    /// Returns the addresses of the buffer's pages.
    pub fn pages(&self, index: usize) -> [Iova; 4] {
        self.buffers[index].pages
    }

    /// Returns whether `iova` is in buffer `index`.
    pub fn holds(&self, index: usize, iova: u64) -> bool {
        let area = self.buffers[index].area;
        (area.iova.0..area.iova.0 + area.bytes).contains(&iova)
    }

    /// Returns whether the canaries before and after `len` words from `start` on are intact.
    pub fn is_whole_beside(&self, index: usize, start: usize, len: usize) -> bool {
        let words = self.buffers[index].words;
        let before = start.saturating_sub(GUARD)..start;
        let after = start + len..(start + len + GUARD).min(words.len());
        before.chain(after).all(|at| words.get(at) == CANARY)
    }

    /// Returns a free buffer that was written to, if there is one.
    pub fn spoilt(&self) -> Option<usize> {
        self.buffers.iter().position(|buffer| {
            let whole = |at| buffer.words.get(at) == CANARY;
            buffer.free && !(0..buffer.words.len()).all(whole)
        })
    }
}
