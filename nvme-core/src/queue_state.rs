//! The state of a queue that a kernel drives, as words of memory that outlive the kernel.
//!
//! Invariant: a slot is free (its bit is set, or it is in the free ring) or its word has the pending bit. The
//! same words serve a [`SharedQueue`](crate::SharedQueue) or a [`CollectiveQueue`](crate::CollectiveQueue); a change
//! from one to the other goes through [`QueueState::init`], with the queue created again. Between kernels the
//! host can read the words, recover the queue and launch again.

mod drain_word;
mod ended;
mod owned;
mod shared;
mod slot;

use crate::error::ControllerFault;
use crate::inflight::MAX_IN_FLIGHT;
use crate::mem::CyclicWords;
use crate::quiesced::{ClosedQueue, ControllerIdentity, QueueBinding, Quiesced};
use crate::spec::{Cid, Qid};
use crate::sync::{AtomicU32, Order, Scope};
pub(crate) use drain_word::DrainWord;
pub(crate) use ended::{slot_of, status_of};
pub(crate) use owned::OwnedState;
pub(crate) use shared::SharedState;
pub use slot::MAX_TAGS;
pub(crate) use slot::{PENDING, SlotWord, slot_in};

/// Distance between fields that different threads write, in words, so that each has its own memory sector.
const LINE: u32 = if cfg!(loom) { 8 } else { 32 };

/// Shared: the next ticket. Owned: the tail.
const TAIL: u32 = 0;
const RING_LOCK: u32 = LINE;
/// Position up to which the tail doorbell was rung.
const RUNG: u32 = LINE + 1;
/// Shared: the drain word.
const DRAIN: u32 = 2 * LINE;
/// Shared: completions read since the start. Owned: the head.
const HEAD: u32 = 2 * LINE + 1;
/// Shared: four counts of completions read, one for each quarter of the ring, since the start.
const QUARTERS: u32 = 2 * LINE + 2;
const FAULT: u32 = 3 * LINE;
/// Position at which the queue was created.
const START: u32 = 3 * LINE + 1;
/// Binding to a controller and time of creation, as two 64-bit numbers, low half first.
const BINDING: u32 = 3 * LINE + 2;
/// Shared: one bit for each free slot.
const FREE: u32 = 4 * LINE;
/// Arrays with a word for each entry, after the free bits.
const SLOTS: u32 = 0;
/// Shared: sequence numbers. Owned: the free ring.
const SEQUENCES: u32 = 1;
/// Owned: deadlines.
const DEADLINES: u32 = 2;

/// Value of the fault word of a closed queue, which is no fault of the controller.
const CLOSED: u32 = u32::MAX;

/// Splits a binding into words of the state.
fn halves(binding: QueueBinding) -> [u32; 4] {
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

/// Returns the 32-bit words of state for a queue of `entries` entries: 16 KiB at 1,024.
pub const fn words(entries: u32) -> usize {
    word_count(entries) as usize
}

/// Returns the number of words. Rounded up to a power of two, so that kernels can index by a mask instead of
/// a check that would cost a branch for each access.
const fn word_count(entries: u32) -> u32 {
    (FREE + free_words(entries).next_multiple_of(LINE) + 3 * entries).next_power_of_two()
}

/// The state of a queue of either kind. Words whose meaning differs between the two kinds are read through
/// the views `SharedState` and `OwnedState`.
#[derive(Clone, Copy, Debug)]
pub struct QueueState<'a> {
    all: CyclicWords<'a>,
    qid: Qid,
    mask: u32,
    slots: u32,
}

impl<'a> QueueState<'a> {
    /// True if there can be a queue of `entries` entries with `slots` command slots.
    pub const fn possible(entries: u32, slots: u32) -> bool {
        entries >= 2
            && entries <= 65_536
            && entries.is_power_of_two()
            && slots >= 1
            && slots < entries
            && slots <= MAX_IN_FLIGHT
    }

    /// Makes a view over `all`, at least [`words`] words; `None` for impossible sizes.
    pub fn new(all: &'a [AtomicU32], qid: Qid, entries: u32, slots: u32) -> Option<Self> {
        if !Self::possible(entries, slots) {
            return None;
        }
        Some(Self {
            all: CyclicWords::new(all, word_count(entries))?,
            qid,
            mask: entries - 1,
            slots,
        })
    }

    /// Initialises the state of a queue that was just created on the controller, its rings zeroed.
    ///
    /// `start` is the first position, rounded down to a multiple of twice the entries; a value other than 0
    /// only serves tests of the counters' wrap. The queue is bound to the controller that `identity` names.
    /// No kernel may use the queue meanwhile.
    pub fn init(&self, identity: &ControllerIdentity, start: u32) {
        self.begin(QueueBinding::new(identity), start);
    }

    fn begin(&self, binding: QueueBinding, start: u32) {
        for (index, word) in (0..).zip(halves(binding)) {
            self.at(BINDING + index)
                .store(word, Order::Relaxed, Scope::Sys);
        }
        let start = start & !(2 * self.mask + 1);
        for field in [TAIL, RUNG, HEAD, START] {
            self.at(field).store(start, Order::Relaxed, Scope::Sys);
        }
        let drain = DrainWord::at(start);
        self.at(DRAIN)
            .store(drain.bits(), Order::Relaxed, Scope::Sys);
        for quarter in 0..4 {
            let read = self.at(QUARTERS + quarter);
            read.store(start >> 2, Order::Relaxed, Scope::Sys);
        }
        for field in [RING_LOCK, FAULT] {
            self.at(field).store(0, Order::Relaxed, Scope::Sys);
        }
        for word in 0..free_words(self.mask + 1) {
            let bits = self.slots.saturating_sub(word * 32).min(32);
            let free = ((1u64 << bits) - 1) as u32;
            self.at(FREE + word).store(free, Order::Relaxed, Scope::Sys);
        }
        // Sequence numbers are set so that no entry looks published, and slots are freed but keep
        // their generation: see the two notes below. A sequence number of an earlier use could ring
        // for an entry that nobody wrote.
        for index in 0..=self.mask {
            // No first ticket of this entry expects this sequence number.
            let never = start.wrapping_add(index).wrapping_sub(self.mask);
            self.array(SEQUENCES, index)
                .store(never, Order::Relaxed, Scope::Sys);
            // The generations continue: a late completion of an earlier command would otherwise
            // carry the CID of a new one. The new command would then end with the old one's status.
            let old = self.slot(index).load(Order::Relaxed, Scope::Sys);
            let kept = SlotWord(old).unused();
            self.slot(index).store(kept.0, Order::Relaxed, Scope::Sys);
        }
    }

    #[inline(always)]
    fn at(&self, word: u32) -> &'a AtomicU32 {
        self.all.at(word)
    }

    /// Returns the queue's identifier.
    #[inline(always)]
    pub fn qid(&self) -> Qid {
        self.qid
    }

    /// Returns the ring entries minus one: a position's ring index is `position & mask`.
    #[inline(always)]
    pub fn mask(&self) -> u32 {
        self.mask
    }

    /// Returns the number of command slots.
    #[inline(always)]
    pub fn slots(&self) -> u32 {
        self.slots
    }

    #[inline(always)]
    fn fault_word(&self) -> &'a AtomicU32 {
        self.all.named::<FAULT>()
    }

    #[inline(always)]
    fn start(&self) -> &'a AtomicU32 {
        self.all.named::<START>()
    }

    fn binding(&self) -> QueueBinding {
        let word = |index| u64::from(self.at(BINDING + index).load(Order::Relaxed, Scope::Sys));
        QueueBinding::from_words([0, 2].map(|at| word(at) | word(at + 1) << 32))
    }

    /// True if the proof ends the commands of this queue.
    pub(crate) fn is_covered(&self, proof: &Quiesced<'_>) -> bool {
        proof.covers(self.qid, self.binding())
    }

    /// Closes the queue, the first step of its [deletion](crate::recovery::QueueDeletion): it takes no
    /// commands until it is recovered. A [`CollectiveQueue`](crate::CollectiveQueue) sees it when it resumes.
    ///
    /// Closing uses the fault word, because every thread that submits to a shared queue loads that word
    /// anyway; a further word would cost one more load for each command.
    pub fn close(&self) -> ClosedQueue {
        self.refuse(CLOSED);
        ClosedQueue {
            qid: self.qid,
            binding: self.binding(),
        }
    }

    /// Returns the quarter of the ring that holds `position`, counted from position 0.
    ///
    /// Entries are released to the controller by quarters, so that doorbells are few. The controller cannot
    /// wait for ever: if it finds no room, the ring holds entries that were not read yet, and reading them
    /// completes a quarter.
    #[inline(always)]
    pub(crate) fn quarter_of(&self, position: u32) -> u32 {
        position >> self.quarter_shift()
    }

    #[inline(always)]
    fn quarter_shift(&self) -> u32 {
        self.mask.count_ones().max(2) - 2
    }

    #[inline(always)]
    fn array(&self, which: u32, index: u32) -> &'a AtomicU32 {
        let entries = self.mask + 1;
        let base = FREE + free_words(entries).next_multiple_of(LINE);
        self.at(base + which * entries + (index & self.mask))
    }

    /// Returns the word of a command slot.
    #[inline(always)]
    pub(crate) fn slot(&self, slot: u32) -> &'a AtomicU32 {
        self.array(SLOTS, slot)
    }

    /// Returns the fault that ended the queue's service, if any.
    #[inline(always)]
    pub fn fault(&self) -> Option<ControllerFault> {
        ControllerFault::from_code(self.fault_code())
    }

    /// Makes the queue refuse commands from now on; the first fault stays.
    ///
    /// Later faults are often consequences of the first one, so only the first is kept for the report; a
    /// compare-exchange decides between threads that find faults at the same time.
    pub(crate) fn refuse(&self, code: u32) {
        self.fault_word()
            .compare_exchange(0, code, Order::Relaxed, Scope::Gpu);
    }

    /// Returns the code of [`fault`](Self::fault); 0 when there is none.
    #[inline(always)]
    pub(crate) fn fault_code(&self) -> u32 {
        self.fault_word().load(Order::Relaxed, Scope::Gpu)
    }

    /// Returns the number of commands that were submitted and have not ended. Exact only while no
    /// thread uses the queue. Otherwise a command may be counted that ends meanwhile, or missed
    /// while it begins.
    pub fn in_flight(&self) -> u32 {
        self.cids().count() as u32
    }

    /// Returns the identifiers of those commands, by slot.
    pub fn cids(&self) -> impl Iterator<Item = Cid> {
        let state = *self;
        (0..self.slots).filter_map(move |slot| {
            let word = SlotWord(state.slot(slot).load(Order::Relaxed, Scope::Gpu));
            word.pending().then(|| word.cid(slot))
        })
    }

    /// Calls `end` with each slot and its word, then initialises the state for the queue's next creation on
    /// the same controller, at the position where this one began.
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
            let (shared, owned) = (SharedState::of(state), OwnedState::of(state));
            let mut fields = vec![
                shared.next_ticket(),
                shared.ring_lock(),
                shared.rung(),
                shared.drain_word(),
                shared.read(),
                state.fault_word(),
                state.start(),
            ];
            fields.extend((0..4).map(|index| state.at(BINDING + index)));
            fields.extend((0..4).map(|quarter| shared.read_of(quarter)));
            fields.extend((0..shared.free_words()).map(|word| shared.free_bits(word)));
            for index in 0..entries {
                let sequence = shared.sequence(index);
                fields.extend([state.slot(index), sequence, owned.deadline(index)]);
            }
            let different: HashSet<_> = fields.iter().map(|word| index_of(&all, word)).collect();
            assert_eq!(different.len(), fields.len(), "{entries} entries");
        }
    }

    /// Fields that different threads poll or change are in different lines of memory, so that they
    /// do not take the line from each other. A poll of one thread would slow every submission of
    /// the others.
    #[test]
    fn words_of_different_threads_lie_in_lines_of_their_own() {
        let all = zeroed(64);
        let state = view(&all, 64, 63);
        let shared = SharedState::of(state);
        let groups = [
            vec![shared.next_ticket()],
            vec![shared.ring_lock(), shared.rung()],
            vec![
                shared.drain_word(),
                shared.read(),
                shared.read_of(0),
                shared.read_of(3),
            ],
            vec![state.fault_word(), state.start()],
            vec![shared.free_bits(0), shared.free_bits(1)],
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
            state.init(&ControllerIdentity::new(), 0);
            let free = |slot: &u32| {
                let bits = SharedState::of(state).free_bits(slot / 32);
                let word = bits.load(Order::Relaxed, Scope::Sys);
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
    fn a_queue_begins_at_a_whole_pass() {
        let all = zeroed(64);
        let state = view(&all, 64, 63);
        for (asked, begins) in [
            (0, 0),
            (127, 0),
            (5 * 128 + 77, 5 * 128),
            (u32::MAX, 0u32.wrapping_sub(128)),
        ] {
            state.init(&ControllerIdentity::new(), asked);
            let shared = SharedState::of(state);
            for word in [
                shared.next_ticket(),
                shared.rung(),
                shared.read(),
                state.start(),
            ] {
                assert_eq!(word.load(Order::Relaxed, Scope::Sys), begins);
            }
            let drain = shared.drain_word().load(Order::Relaxed, Scope::Sys);
            assert_eq!(drain, begins.wrapping_mul(16));
            for quarter in 0..4 {
                let taken = shared.read_of(quarter).load(Order::Relaxed, Scope::Sys);
                assert_eq!(taken, begins / 4, "as many in each place of a quarter");
            }
        }
    }

    #[test]
    fn of_a_slot_only_the_generation_outlives_the_queue() {
        let all = zeroed(4);
        let state = view(&all, 4, 3);
        state.slot(1).store(u32::MAX, Order::Relaxed, Scope::Sys);
        state.init(&ControllerIdentity::new(), 0);
        let kept = state.slot(1).load(Order::Relaxed, Scope::Sys);
        assert_eq!(kept, 0xF000_0000);
    }
}
