//! The cache of a mixture's experts in GPU memory: the map from experts to slots, and the replacement policy.
//!
//! The order of calls: [`pin`](ExpertCache::pin) for pinned slots, before the first launch; then, for each step,
//! [`admit`](ExpertCache::admit), the reads that it lists, and [`mark_bad`](ExpertCache::mark_bad) for slots whose
//! reads failed. Only after these may a kernel use a slot, and only if [`holds`](ExpertCache::holds) names its expert.
//!
//! One group decides at any time: launches of one stream. It reads and writes the words by relaxed atomics,
//! and every member sees what the leader stored before the group's last sync.

use super::{ChosenExpert, NO_SLOT, ReplacementPolicy};
use nvme_core::group::ThreadGroup;
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_gpu_kernel::rows::RangeTarget;

/// Number of words before those of the slots.
const HEAD: usize = 8;
/// Word with the number of steps so far: the stamp of the current one.
const NOW: usize = 0;
/// Word with the slot that the clock's hand points at.
const HAND: usize = 1;
/// Words of a slot.
const SLOT: usize = 4;
/// Word of a slot: its expert plus one; 0 for none.
const HOLDS: usize = 0;
/// Word of a slot: the step of its last use.
const STAMP: usize = 1;
/// Word of a slot: number of uses, at most [`MOST_USES`]; for the clock policy 1 or 0.
const USES: usize = 2;
/// Word of a slot: not 0 if its last read failed.
const BAD: usize = 3;
/// Words of an expert: its slot plus one, 0 for none; the number of times it was chosen.
const EXPERT: usize = 2;
const MOST_USES: u32 = 0x7FFF;

/// A counter of the cache, of 64 bits: the two words from [`CacheCounter::first`] on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheCounter {
    /// Choices whose expert was cached.
    Hits,
    /// Choices whose expert had to be read.
    Misses,
    /// Experts that were replaced by another.
    Evictions,
}

impl CacheCounter {
    /// Returns the word with the counter's lower half.
    pub const fn first(self) -> usize {
        2 + 2 * self as usize
    }
}

/// Returns the words of a cache of `slots` slots for `experts` experts of all layers.
pub const fn words(slots: u32, experts: u32) -> usize {
    HEAD + SLOT * slots as usize + EXPERT * experts as usize
}

/// A view of a cache for one launch.
///
/// The words are kept in GPU memory between launches, since the host does not take part in a step; they are
/// zero before the first launch, which is an empty cache.
#[derive(Clone, Copy, Debug)]
pub struct ExpertCache<'w> {
    words: &'w [AtomicU32],
    slots: u32,
    pinned: u32,
    policy: ReplacementPolicy,
}

/// The choices of a launch.
#[derive(Clone, Copy, Debug)]
pub struct CacheRequest {
    /// Number of the layer's first expert among the experts of all layers.
    pub first: u32,
    /// Experts of the layer.
    pub experts: u32,
    /// Choices.
    pub pairs: u32,
}

/// The ranges that a launch lists for the reads.
#[derive(Clone, Copy, Debug, Default)]
pub struct RangeList {
    /// Number of ranges.
    pub ranges: u32,
    /// Number of reads of all of them.
    pub pieces: u64,
}

impl RangeList {
    /// Appends the `bytes` bytes from `byte` of the drive on, which are read to address `to` in parts of
    /// `1 << piece_shift` bytes. Returns the number of the entry, and the entry.
    #[inline(always)]
    pub fn add(
        &mut self,
        (byte, bytes, to): (u64, u64, u64),
        piece_shift: u32,
    ) -> (u32, RangeTarget) {
        let range = RangeTarget {
            byte,
            bytes,
            to,
            first: self.pieces,
        };
        let number = self.ranges;
        self.ranges += 1;
        self.pieces += range.pieces(piece_shift);
        (number, range)
    }
}

impl<'w> ExpertCache<'w> {
    /// Makes a view over `words`, if there are enough for `slots` slots.
    #[inline(always)]
    pub fn new(
        words: &'w [AtomicU32],
        slots: u32,
        pinned: u32,
        policy: ReplacementPolicy,
    ) -> Option<Self> {
        let cache = Self {
            words,
            slots,
            pinned,
            policy,
        };
        (words.len() >= HEAD + SLOT * slots as usize).then_some(cache)
    }

    #[inline(always)]
    fn get(&self, word: usize) -> u32 {
        match self.words.get(word) {
            Some(word) => word.load(Order::Relaxed, Scope::Gpu),
            None => 0,
        }
    }

    #[inline(always)]
    fn set(&self, word: usize, value: u32) {
        if let Some(word) = self.words.get(word) {
            word.store(value, Order::Relaxed, Scope::Gpu);
        }
    }

    #[inline(always)]
    fn of_slot(slot: u32, word: usize) -> usize {
        HEAD + SLOT * slot as usize + word
    }

    #[inline(always)]
    fn of_expert(&self, expert: u32) -> usize {
        HEAD + SLOT * self.slots as usize + EXPERT * expert as usize
    }

    /// Adds `some` to a word, as other members may at the same time; returns its value before.
    #[inline(always)]
    fn add(&self, word: usize, some: u32) -> u32 {
        match self.words.get(word) {
            Some(word) => word.fetch_add(some, Order::Relaxed, Scope::Gpu),
            None => 0,
        }
    }

    #[inline(always)]
    fn count(&self, what: CacheCounter, some: u32) {
        let before = self.add(what.first(), some);
        if before.wrapping_add(some) < before {
            self.add(what.first() + 1, 1);
        }
    }

    /// Records that a read into `slot` begins.
    #[inline(always)]
    pub fn clear_bad(&self, slot: u32) {
        if slot < self.slots {
            self.set(Self::of_slot(slot, BAD), 0);
        }
    }

    /// True if the last read into `slot` failed.
    ///
    /// Such a slot keeps its expert, so that the next step reads it again into the same place, and no kernel
    /// multiplies with bytes of unknown content.
    #[inline(always)]
    pub fn is_bad(&self, slot: u32) -> bool {
        slot >= self.slots || self.get(Self::of_slot(slot, BAD)) != 0
    }

    /// Records that a read into `slot` failed. Its expert counts as not loaded until a later read succeeds.
    ///
    /// Several threads may mark the same slot, all with the same value, so a relaxed store is enough.
    #[inline(always)]
    pub fn mark_bad(&self, slot: u32) {
        if slot < self.slots {
            self.set(Self::of_slot(slot, BAD), 1);
        }
    }

    /// Returns a counter.
    pub fn counted(&self, what: CacheCounter) -> u64 {
        u64::from(self.get(what.first())) | u64::from(self.get(what.first() + 1)) << 32
    }

    /// Returns the number of times that an expert was chosen; `expert` counts over all layers.
    pub fn chosen(&self, expert: u32) -> u32 {
        self.get(self.of_expert(expert) + 1)
    }

    /// Returns the expert held by `slot`, counted over all layers, if it is loaded and valid.
    pub fn holds(&self, slot: u32) -> Option<u32> {
        let held = self.get(Self::of_slot(slot, HOLDS)).checked_sub(1);
        held.filter(|_| !self.is_bad(slot))
    }

    /// Places an expert, counted over all layers, into a pinned slot. Only before the first launch.
    pub fn pin(&self, slot: u32, expert: u32) {
        self.set(Self::of_slot(slot, HOLDS), expert + 1);
        self.set(self.of_expert(expert), slot + 1);
    }

    /// Assigns a slot to each choice.
    ///
    /// `pair` returns a choice, `put` sets its slot, `read` is called with the expert and the slot of each expert that
    /// has to be read; `least` returns the minimum over the members' numbers. Every member calls `admit`, and each of them
    /// calls `read`; one calls `put` for a choice.
    ///
    /// A choice keeps [`NO_SLOT`] if every slot holds an expert of the same step, or if the layer has no such
    /// expert.
    #[inline(always)]
    pub fn admit(
        &self,
        group: &impl ThreadGroup,
        asked: &CacheRequest,
        pair: impl Fn(u32) -> ChosenExpert,
        put: impl Fn(u32, u32),
        mut read: impl FnMut(u32, u32),
        least: impl Fn(u64) -> u64,
    ) {
        let now = self.get(NOW).wrapping_add(1);
        group.sync();
        if group.leads() {
            self.set(NOW, now);
        }
        // Cached experts first: marked with the current step, none of them can be replaced by a miss of the
        // same step.
        // Each member looks up some of them: one after the other, those of a prompt would take longer than its products.
        let (mut at, mut hits) = (group.rank(), 0);
        while at < asked.pairs {
            let expert = pair(at).expert;
            put(at, NO_SLOT);
            if expert < asked.experts
                && let Some(slot) = self.take(asked.first + expert, now)
            {
                put(at, slot);
                hits += 1;
            }
            at += group.size();
        }
        self.count(CacheCounter::Hits, hits);
        group.sync();
        let mut from = 0;
        while from < asked.pairs {
            let mine = from + group.rank();
            let mut missing = u64::MAX;
            if mine < asked.pairs {
                let ChosenExpert { expert, slot, .. } = pair(mine);
                if expert < asked.experts && slot == NO_SLOT {
                    missing = mine.into();
                }
            }
            let first = least(missing);
            if first == u64::MAX {
                from += group.size();
                continue;
            }
            let at = first as u32;
            from = at + 1;
            let expert = pair(at).expert;
            let number = asked.first + expert;
            let slot = self.get(self.of_expert(number)).wrapping_sub(1);
            // An expert whose last read failed keeps its slot and is read into it again.
            let is_here = slot < self.slots;
            let is_whole = is_here && !self.is_bad(slot);
            let slot = match is_here {
                true => Some(slot),
                false => self.victim(group, now, &least),
            };
            if let Some(slot) = slot {
                group.sync();
                if group.leads() {
                    put(at, slot);
                    match is_whole {
                        // An earlier choice of this step reads it already.
                        true => self.count(CacheCounter::Hits, 1),
                        false => self.give(slot, number, now),
                    }
                }
                if !is_whole {
                    read(expert, slot);
                }
                group.sync();
            }
        }
    }

    /// Uses expert `number`, and returns its slot if it is cached. Several members may call it for one expert.
    #[inline(always)]
    fn take(&self, number: u32, now: u32) -> Option<u32> {
        let of = self.of_expert(number);
        self.add(of + 1, 1);
        let slot = self.get(of).wrapping_sub(1);
        if slot >= self.slots || self.is_bad(slot) {
            return None;
        }
        let uses = Self::of_slot(slot, USES);
        // Whoever adds to the largest number takes it back, the last one as well.
        match self.policy {
            ReplacementPolicy::Clock => self.set(uses, 1),
            _ if self.add(uses, 1) >= MOST_USES => self.set(uses, MOST_USES),
            _ => {}
        }
        self.set(Self::of_slot(slot, STAMP), now);
        Some(slot)
    }

    /// Assigns `slot` to expert `number`. The leader calls it.
    #[inline(always)]
    fn give(&self, slot: u32, number: u32, now: u32) {
        let before = self.get(Self::of_slot(slot, HOLDS));
        if before != 0 && before != number + 1 {
            self.set(self.of_expert(before - 1), 0);
            self.count(CacheCounter::Evictions, 1);
        }
        self.set(Self::of_slot(slot, HOLDS), number + 1);
        self.set(Self::of_slot(slot, STAMP), now);
        self.set(Self::of_slot(slot, USES), 1);
        self.set(Self::of_slot(slot, BAD), 0);
        self.set(self.of_expert(number), slot + 1);
        self.count(CacheCounter::Misses, 1);
    }

    /// Returns the slot whose expert is replaced, or `None` if all are in use by this step. Every member
    /// calls it.
    #[inline(always)]
    fn victim(
        &self,
        group: &impl ThreadGroup,
        now: u32,
        least: &impl Fn(u64) -> u64,
    ) -> Option<u32> {
        let movable = self.slots - self.pinned;
        let hand = self.get(HAND);
        let mut mine = u64::MAX;
        let mut at = group.rank();
        while at < movable {
            let slot = self.pinned + at;
            let key = self.rank_of(slot, now, distance(at, hand, movable)) << 16 | u64::from(slot);
            mine = if key < mine { key } else { mine };
            at += group.size();
        }
        let best = least(mine);
        if best == u64::MAX || best >> 16 == u64::MAX >> 16 {
            return None;
        }
        let slot = best as u32 & 0xFFFF;
        if matches!(self.policy, ReplacementPolicy::Clock) && best >> 16 != 0 {
            self.turn(group, slot - self.pinned, hand);
        }
        Some(slot)
    }

    /// Returns the replacement rank of the expert in `slot`, 48 bits; the lowest is replaced first: 0 for an
    /// empty slot, all bits set for one in use by this step.
    #[inline(always)]
    fn rank_of(&self, slot: u32, now: u32, far: u32) -> u64 {
        let word = |word| self.get(Self::of_slot(slot, word));
        let (holds, stamp, uses) = (word(HOLDS), word(STAMP), word(USES));
        if holds == 0 {
            return 0;
        }
        if stamp == now {
            return u64::MAX >> 16;
        }
        // Steps since its last use, as a difference, so that the counter of steps may wrap.
        let age = u64::from(u32::MAX - now.wrapping_sub(stamp));
        1 + match self.policy {
            ReplacementPolicy::Lru => age,
            ReplacementPolicy::Lfu => u64::from(uses) << 32 | age,
            ReplacementPolicy::Clock => u64::from(uses) << 32 | u64::from(far),
        }
    }

    /// Moves the clock's hand to the slot after `to`, and clears the marks that it passes. Every member calls
    /// it.
    #[inline(always)]
    fn turn(&self, group: &impl ThreadGroup, to: u32, hand: u32) {
        let movable = self.slots - self.pinned;
        let chosen = Self::of_slot(self.pinned + to, USES);
        // If every slot was marked, the hand has passed all of them.
        let until = match self.get(chosen) {
            0 => distance(to, hand, movable),
            _ => movable,
        };
        group.sync();
        let mut at = group.rank();
        while at < movable {
            if distance(at, hand, movable) < until {
                self.set(Self::of_slot(self.pinned + at, USES), 0);
            }
            at += group.size();
        }
        if group.leads() {
            self.set(HAND, if to + 1 < movable { to + 1 } else { 0 });
        }
    }
}

/// Returns the distance from the hand to slot `at`.
#[inline(always)]
fn distance(at: u32, hand: u32, movable: u32) -> u32 {
    match at >= hand {
        true => at - hand,
        false => at + movable - hand,
    }
}

#[cfg(all(test, not(target_arch = "nvptx64")))]
mod tests;
