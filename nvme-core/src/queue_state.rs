//! The state of a queue that a kernel drives, as words of memory: positions, command slots, marks.
//!
//! Invariant: a slot is free (its bit is set, or it is in the free ring) or its word says pending. The
//! same words serve a [`SharedQueue`](crate::SharedQueue) or a [`Collective`](crate::Collective); from
//! one to the other they go through [`QueueState::init`], with the queue created anew. Between kernels
//! the host can read them, recover them and give them back.

mod ended;
mod slot;

use crate::error::ControllerFault;
use crate::inflight::MAX_IN_FLIGHT;
use crate::mem::CyclicWords;
use crate::quiesced::{Binding, ClosedQueue, Identity, Quiesced};
use crate::spec::{Cid, Qid};
use crate::sync::{AtomicU32, Order, Scope};
pub(crate) use ended::{slot_of, status_of};
pub use slot::MAX_TAGS;
pub(crate) use slot::{SlotWord, slot_in};

/// Words between fields that different threads write, so that each has a memory sector of its own.
const LINE: u32 = if cfg!(loom) { 8 } else { 32 };

/// Next ring position (shared), or the position of the tail (collective).
const POSITION: u32 = 0;
const RING_LOCK: u32 = LINE;
/// Position up to which the tail doorbell was rung.
const RUNG: u32 = LINE + 1;
/// Shared: the head of the completion queue and who looks there (see `shared_queue::drain`).
const DRAIN: u32 = 2 * LINE;
/// The drain word: the head, modulo 2^28, is above this.
pub(crate) const HEAD_SHIFT: u32 = 4;
/// Position up to which completions were taken (collective); how many were, from the start (shared).
const HEAD: u32 = 2 * LINE + 1;
/// Shared: how many completions were taken of each quarter of the ring.
const TAKEN: u32 = 2 * LINE + 2;
const FAULT: u32 = 3 * LINE;
/// Position at which the queue was created.
const START: u32 = 3 * LINE + 1;
/// Which controller the queue is bound to and when it was made, as two 64-bit numbers, low half first.
const BINDING: u32 = 3 * LINE + 2;
/// Free bits (shared).
const FREE: u32 = 4 * LINE;

/// In the fault word: closed, which is no fault of the controller.
const CLOSED: u32 = u32::MAX;

/// A binding as words of the state.
fn halves(binding: Binding) -> [u32; 4] {
    let [controller, made] = binding.words();
    [
        controller as u32,
        (controller >> 32) as u32,
        made as u32,
        (made >> 32) as u32,
    ]
}

const fn free_words(entries: u32) -> u32 {
    let words = entries.div_ceil(32);
    if words > 128 { 128 } else { words }
}

/// 32-bit words of state for a queue of `entries` entries: 16 KiB at 1,024.
pub const fn words(entries: u32) -> usize {
    count(entries) as usize
}

const fn count(entries: u32) -> u32 {
    (FREE + free_words(entries).next_multiple_of(LINE) + 3 * entries).next_power_of_two()
}

/// Which lines of `words` mean what.
#[derive(Clone, Copy, Debug)]
pub struct QueueState<'a> {
    all: CyclicWords<'a>,
    qid: Qid,
    mask: u32,
    slots: u32,
}

impl<'a> QueueState<'a> {
    /// Whether there can be a queue of `entries` entries with `slots` command slots.
    pub const fn possible(entries: u32, slots: u32) -> bool {
        entries >= 2
            && entries <= 65_536
            && entries.is_power_of_two()
            && slots >= 1
            && slots < entries
            && slots <= MAX_IN_FLIGHT
    }

    /// A view over `all`, at least [`words`] words; `None` for impossible sizes.
    pub fn new(all: &'a [AtomicU32], qid: Qid, entries: u32, slots: u32) -> Option<Self> {
        if !Self::possible(entries, slots) {
            return None;
        }
        Some(Self {
            all: CyclicWords::new(all, count(entries))?,
            qid,
            mask: entries - 1,
            slots,
        })
    }

    /// The state of a queue that was just created on the controller, its rings zeroed.
    ///
    /// `start` is the first position, a multiple of twice the entries; it only matters to tests of the
    /// counters' wrap. The queue is bound to the controller that `identity` is of. Not while any kernel
    /// uses the queue.
    pub fn init(&self, identity: &Identity, start: u32) {
        self.begin(Binding::new(identity), start);
    }

    fn begin(&self, binding: Binding, start: u32) {
        for (index, word) in (0..).zip(halves(binding)) {
            self.at(BINDING + index)
                .store(word, Order::Relaxed, Scope::Sys);
        }
        let start = start & !(2 * self.mask + 1);
        for field in [self.position(), self.rung(), self.head(), self.start()] {
            field.store(start, Order::Relaxed, Scope::Sys);
        }
        self.drain()
            .store(start << HEAD_SHIFT, Order::Relaxed, Scope::Sys);
        for quarter in 0..4 {
            self.taken(quarter)
                .store(start >> 2, Order::Relaxed, Scope::Sys);
        }
        for field in [self.ring_lock(), self.fault_word()] {
            field.store(0, Order::Relaxed, Scope::Sys);
        }
        for word in 0..free_words(self.mask + 1) {
            let bits = self.slots.saturating_sub(word * 32).min(32);
            let free = ((1u64 << bits) - 1) as u32;
            self.free(word).store(free, Order::Relaxed, Scope::Sys);
        }
        for index in 0..=self.mask {
            // No position that is taken first in this entry has this mark.
            let never = start.wrapping_add(index).wrapping_sub(self.mask);
            self.mark(index).store(never, Order::Relaxed, Scope::Sys);
            // Generations go on: a completion from before does not pass for one of a new command.
            let old = self.slot(index).load(Order::Relaxed, Scope::Sys);
            let kept = SlotWord(old).unused();
            self.slot(index).store(kept.0, Order::Relaxed, Scope::Sys);
        }
    }

    #[inline(always)]
    fn at(&self, word: u32) -> &'a AtomicU32 {
        self.all.at(word)
    }

    /// The queue's identifier.
    #[inline(always)]
    pub fn qid(&self) -> Qid {
        self.qid
    }

    /// Ring entries minus one: a position's ring index is `position & mask`.
    #[inline(always)]
    pub fn mask(&self) -> u32 {
        self.mask
    }

    /// Command slots.
    #[inline(always)]
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Words of free bits.
    #[inline(always)]
    pub(crate) fn free_words(&self) -> u32 {
        self.slots.div_ceil(32)
    }

    #[inline(always)]
    pub(crate) fn position(&self) -> &'a AtomicU32 {
        self.all.named::<POSITION>()
    }

    #[inline(always)]
    pub(crate) fn ring_lock(&self) -> &'a AtomicU32 {
        self.all.named::<RING_LOCK>()
    }

    #[inline(always)]
    pub(crate) fn rung(&self) -> &'a AtomicU32 {
        self.all.named::<RUNG>()
    }

    /// The head of the completion queue, above [`HEAD_SHIFT`], and who looks there.
    #[inline(always)]
    pub(crate) fn drain(&self) -> &'a AtomicU32 {
        self.all.named::<DRAIN>()
    }

    #[inline(always)]
    pub(crate) fn head(&self) -> &'a AtomicU32 {
        self.all.named::<HEAD>()
    }

    #[inline(always)]
    fn fault_word(&self) -> &'a AtomicU32 {
        self.all.named::<FAULT>()
    }

    #[inline(always)]
    fn start(&self) -> &'a AtomicU32 {
        self.all.named::<START>()
    }

    fn binding(&self) -> Binding {
        let word = |index| u64::from(self.at(BINDING + index).load(Order::Relaxed, Scope::Sys));
        Binding::from_words([0, 2].map(|at| word(at) | word(at + 1) << 32))
    }

    /// Whether the proof ends the commands of this queue.
    pub(crate) fn is_covered(&self, proof: &Quiesced<'_>) -> bool {
        proof.covers(self.qid, self.binding())
    }

    /// Takes no more commands until the queue is recovered: the begin of its
    /// [deletion](crate::recovery::QueueDeletion). A [`Collective`](crate::Collective) sees it when it
    /// resumes.
    pub fn close(&self) -> ClosedQueue {
        self.refuse(CLOSED);
        ClosedQueue {
            qid: self.qid,
            binding: self.binding(),
        }
    }

    /// Which quarter of the ring `position` is in, counted from position 0. Entries are given back to the
    /// controller by quarters. Not each time, which would cost the bus more; the controller never waits for
    /// ever, since a ring without room holds entries that were not taken yet.
    #[inline(always)]
    pub(crate) fn quarter_of(&self, position: u32) -> u32 {
        position >> self.quarter_shift()
    }

    /// Where the `quarter`th quarter begins.
    #[inline(always)]
    pub(crate) fn quarter_start(&self, quarter: u32) -> u32 {
        quarter << self.quarter_shift()
    }

    #[inline(always)]
    fn quarter_shift(&self) -> u32 {
        self.mask.count_ones().max(2) - 2
    }

    /// How many completions were taken in the place of the `quarter`th quarter, in all laps.
    #[inline(always)]
    pub(crate) fn taken(&self, quarter: u32) -> &'a AtomicU32 {
        self.at(TAKEN + (quarter & 3))
    }

    /// What [`taken`](Self::taken) says when the last entry of the `quarter`th quarter was taken.
    #[inline(always)]
    pub(crate) fn taken_after(&self, quarter: u32) -> u32 {
        self.quarter_start((quarter >> 2).wrapping_add(1))
    }

    /// Whether taking the entries from `head` to `next` passes a quarter of the ring.
    #[inline(always)]
    pub(crate) fn gives_back(&self, head: u32, next: u32) -> bool {
        self.quarter_of(head ^ next) != 0
    }

    /// Word `index` of the free bits.
    #[inline(always)]
    pub(crate) fn free(&self, index: u32) -> &'a AtomicU32 {
        self.at(FREE + index)
    }

    #[inline(always)]
    fn array(&self, which: u32, index: u32) -> &'a AtomicU32 {
        let entries = self.mask + 1;
        let base = FREE + free_words(entries).next_multiple_of(LINE);
        self.at(base + which * entries + (index & self.mask))
    }

    /// The word of a command slot.
    #[inline(always)]
    pub(crate) fn slot(&self, slot: u32) -> &'a AtomicU32 {
        self.array(0, slot)
    }

    /// Shared: which position was last published in a ring entry, plus 1. Collective: the free ring.
    #[inline(always)]
    pub(crate) fn mark(&self, position: u32) -> &'a AtomicU32 {
        self.array(1, position)
    }

    /// Collective: a slot's deadline.
    #[inline(always)]
    pub(crate) fn deadline(&self, slot: u32) -> &'a AtomicU32 {
        self.array(2, slot)
    }

    /// The fault that ended the queue's service, if any.
    #[inline(always)]
    pub fn fault(&self) -> Option<ControllerFault> {
        ControllerFault::from_code(self.fault_code())
    }

    /// Refuses the queue from now on; the first fault stays.
    pub(crate) fn refuse(&self, code: u32) {
        self.fault_word()
            .compare_exchange(0, code, Order::Relaxed, Scope::Gpu);
    }

    /// As [`fault`](Self::fault), as its code; 0 when there is none.
    #[inline(always)]
    pub(crate) fn fault_code(&self) -> u32 {
        self.fault_word().load(Order::Relaxed, Scope::Gpu)
    }

    /// Commands that were submitted and have not ended. Exact only while nobody uses the queue.
    pub fn in_flight(&self) -> u32 {
        self.cids().count() as u32
    }

    /// The identifiers of those commands, by slot.
    pub fn cids(&self) -> impl Iterator<Item = Cid> {
        let state = *self;
        (0..self.slots).filter_map(move |slot| {
            let word = SlotWord(state.slot(slot).load(Order::Relaxed, Scope::Gpu));
            word.pending().then(|| word.cid(slot))
        })
    }

    /// Shows `end` each slot and its word; then the state is that of another queue of the same controller, at
    /// the position where this one began.
    pub(crate) fn reclaim(&self, mut end: impl FnMut(u32, SlotWord)) {
        for slot in 0..self.slots {
            let word = SlotWord(self.slot(slot).load(Order::Relaxed, Scope::Gpu));
            end(slot, word);
        }
        let start = self.start().load(Order::Relaxed, Scope::Sys);
        self.begin(self.binding().again(), start);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn zeroed(entries: u32) -> Vec<AtomicU32> {
        let word = |_| AtomicU32::new(0);
        (0..words(entries)).map(word).collect()
    }

    fn view(all: &[AtomicU32], entries: u32, slots: u32) -> QueueState<'_> {
        QueueState::new(all, Qid(1), entries, slots).expect("a possible queue")
    }

    /// Which of the words of `all` this is.
    fn index_of(all: &[AtomicU32], word: &AtomicU32) -> usize {
        all.iter()
            .position(|one| core::ptr::eq(one, word))
            .expect("a word of the state")
    }

    #[test]
    fn every_word_means_one_thing() {
        for entries in [2, 4, 32, 64, 128, 2048] {
            let all = zeroed(entries);
            let state = view(&all, entries, entries - 1);
            let mut fields = vec![
                state.position(),
                state.ring_lock(),
                state.rung(),
                state.drain(),
                state.head(),
                state.fault_word(),
                state.start(),
            ];
            fields.extend((0..4).map(|index| state.at(BINDING + index)));
            fields.extend((0..4).map(|quarter| state.taken(quarter)));
            fields.extend((0..state.free_words()).map(|word| state.free(word)));
            for index in 0..entries {
                fields.extend([state.slot(index), state.mark(index), state.deadline(index)]);
            }
            let different: HashSet<_> = fields.iter().map(|word| index_of(&all, word)).collect();
            assert_eq!(different.len(), fields.len(), "{entries} entries");
        }
    }

    /// Who polls or changes one does not take a line of memory from who changes another.
    #[test]
    fn words_of_different_threads_lie_in_lines_of_their_own() {
        let all = zeroed(64);
        let state = view(&all, 64, 63);
        let groups = [
            vec![state.position()],
            vec![state.ring_lock(), state.rung()],
            vec![state.drain(), state.head(), state.taken(0), state.taken(3)],
            vec![state.fault_word(), state.start()],
            vec![state.free(0), state.free(1)],
            vec![state.slot(0), state.slot(31)],
        ];
        let lines = groups.map(|group| {
            let lines: HashSet<_> = group
                .into_iter()
                .map(|word| index_of(&all, word) / LINE as usize)
                .collect();
            assert_eq!(lines.len(), 1);
            lines
        });
        let different: HashSet<_> = lines.iter().flatten().collect();
        assert_eq!(different.len(), lines.len());
    }

    #[test]
    fn the_slots_that_there_are_are_free() {
        for (entries, slots) in [(2, 1), (64, 31), (64, 32), (64, 33), (64, 63), (8192, 4095)] {
            let all = zeroed(entries);
            let state = view(&all, entries, slots);
            state.init(&Identity::new(), 0);
            let free = |slot: &u32| {
                let word = state.free(slot / 32).load(Order::Relaxed, Scope::Sys);
                word >> (slot % 32) & 1 == 1
            };
            let expected = |slot: &u32| *slot < slots;
            let many = free_words(entries) * 32;
            assert!((0..many).all(|slot| free(&slot) == expected(&slot)));
        }
    }

    #[test]
    fn a_tag_below_the_limit_is_kept_whole() {
        let kept = |tag| SlotWord::NONE.next(tag, true).expire().tag();
        assert_eq!(kept(MAX_TAGS - 1), MAX_TAGS - 1);
        assert_eq!(kept(MAX_TAGS), 0);
    }

    #[test]
    fn a_queue_of_1024_entries_has_16_kibibytes_of_state() {
        assert_eq!(words(1024) * 4, 16 << 10);
        assert_eq!(words(2) * 4, 1 << 10);
    }

    #[test]
    fn a_queue_begins_at_a_whole_lap() {
        let all = zeroed(64);
        let state = view(&all, 64, 63);
        for (asked, begins) in [
            (0, 0),
            (127, 0),
            (5 * 128 + 77, 5 * 128),
            (u32::MAX, 0u32.wrapping_sub(128)),
        ] {
            state.init(&Identity::new(), asked);
            for word in [state.position(), state.rung(), state.head(), state.start()] {
                assert_eq!(word.load(Order::Relaxed, Scope::Sys), begins);
            }
            let drain = state.drain().load(Order::Relaxed, Scope::Sys);
            assert_eq!(drain, begins.wrapping_mul(16));
            for quarter in 0..4 {
                let taken = state.taken(quarter).load(Order::Relaxed, Scope::Sys);
                assert_eq!(taken, begins / 4, "as many in each place of a quarter");
            }
        }
    }

    #[test]
    fn of_a_slot_only_the_generation_outlives_the_queue() {
        let all = zeroed(4);
        let state = view(&all, 4, 3);
        state.slot(1).store(u32::MAX, Order::Relaxed, Scope::Sys);
        state.init(&Identity::new(), 0);
        let kept = state.slot(1).load(Order::Relaxed, Scope::Sys);
        assert_eq!(kept, 0xF000_0000);
    }
}
