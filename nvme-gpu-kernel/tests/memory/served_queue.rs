//! Queues whose controller is the test.

use super::memory::{address, wide, words};
use nvme_core::ControllerIdentity;
use nvme_core::handoff::QueueWords;
use nvme_core::queue_state::{QueueState, words as state_words};
use nvme_core::spec::Qid;
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use std::cell::Cell;

/// Entries of each ring.
pub const ENTRIES: u32 = 16;
/// Bytes of a logical block.
pub const BLOCK: u64 = 512;

/// The rings of a queue, and how far the controller has come.
pub struct ServedQueue {
    qid: Qid,
    state: Vec<AtomicU32>,
    /// Submission entries of eight words, then completion entries of two.
    words: Vec<AtomicU64>,
    doorbells: Vec<AtomicU32>,
    served: Cell<u32>,
}

impl ServedQueue {
    /// Returns queue `index`, as it is after a reset of its controller.
    pub fn new(index: usize) -> Self {
        let queue = Self {
            qid: Qid(index as u16 + 1),
            state: words(state_words(ENTRIES)),
            words: wide(ENTRIES as usize * 10 + 8, 0),
            doorbells: words(2),
            served: Cell::new(0),
        };
        queue.reset();
        queue
    }

    /// Returns the first submission entry: entries lie at multiples of their size.
    fn first(&self) -> usize {
        (address(&self.words).next_multiple_of(64) - address(&self.words)) as usize / 8
    }

    /// Returns what kernels are told of the queue.
    pub fn described(&self) -> QueueWords {
        let sq = address(&self.words[self.first()..]);
        QueueWords {
            sq,
            cq: sq + u64::from(ENTRIES) * 64,
            sq_doorbell: address(&self.doorbells),
            cq_doorbell: address(&self.doorbells[1..]),
            lists: sq,
            lists_iova: sq,
            state: address(&self.state),
            entries: ENTRIES,
            slots: ENTRIES - 1,
            list_words: 0,
            page_shift: 12,
            qid: u32::from(self.qid.0),
            reserved: 0,
        }
    }

    fn state(&self) -> QueueState<'_> {
        QueueState::new(&self.state, self.qid, ENTRIES, ENTRIES - 1).unwrap()
    }

    /// Returns the queue to its state after a reset of the controller.
    pub fn reset(&self) {
        self.state().init(&ControllerIdentity::new(), 0);
        for word in &self.words {
            word.store(0, Order::Relaxed, Scope::Sys);
        }
        self.doorbells[0].store(0, Order::Relaxed, Scope::Sys);
        self.served.set(0);
    }

    /// Returns the number of commands that have not ended.
    pub fn in_flight(&self) -> u32 {
        self.state().in_flight()
    }

    /// Returns the tail that the doorbell was last rung with.
    pub fn tail(&self) -> u32 {
        self.doorbells[0].load(Order::Acquire, Scope::Sys)
    }

    /// Answers each command that was rung for with the status that `status_of` returns for its first block. If that is
    /// 0, each word of its blocks in `memory` gets its byte offset in the namespace as content.
    pub fn serve(&self, memory: &[AtomicU64], status_of: impl Fn(u64) -> u64) {
        while self.served.get() % ENTRIES != self.tail() {
            let position = self.served.get();
            let entry = self.first() + (position % ENTRIES) as usize * 8;
            let word = |at: usize| self.words[entry + at].load(Order::Relaxed, Scope::Sys);
            let (cid, data, lba) = (word(0) >> 16 & 0xFFFF, word(3), word(5));
            let blocks = (word(6) & 0xFFFF) + 1;
            let to = (data - address(memory)) as usize / 8;
            let status = status_of(lba);
            let arrives = if status == 0 { blocks * BLOCK / 8 } else { 0 };
            for at in 0..arrives as usize {
                let value = lba * BLOCK + at as u64 * 8;
                memory[to + at].store(value, Order::Relaxed, Scope::Sys);
            }
            let phase = u64::from((position / ENTRIES).is_multiple_of(2));
            let head = u64::from((position + 1) % ENTRIES);
            let upper = head | u64::from(self.qid.0) << 16 | cid << 32 | phase << 48 | status << 49;
            let completion = self.first() + ENTRIES as usize * 8;
            let completion = completion + (position % ENTRIES) as usize * 2 + 1;
            self.words[completion].store(upper, Order::Release, Scope::Sys);
            self.served.set(position + 1);
        }
    }
}
