//! Which expert lies in which slot, and which one goes when another comes.
//!
//! One group decides at a time: launches of one stream. It reads and writes the words by relaxed atomics, and every
//! member sees what the leader stored before the group's last sync.

use super::{Chosen, MATRICES, NO_SLOT, Places, Policy};
use nvme_core::group::Group;
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_gpu_kernel::rows::Range;

/// Words before those of the slots.
const HEAD: usize = 8;
/// How many steps there were: the stamp of the current one.
const NOW: usize = 0;
/// The slot at which the clock's hand stands.
const HAND: usize = 1;
/// Words of a slot.
const SLOT: usize = 4;
/// The expert in a slot, plus one; 0 for none.
const HOLDS: usize = 0;
/// The step of its last use.
const STAMP: usize = 1;
/// How often it was used, [`MOST_USES`] at most; of the clock 1 or 0.
const USES: usize = 2;
/// Not 0 where its last read failed.
const BAD: usize = 3;
/// Words of an expert: its slot plus one, 0 for none; how often it was chosen.
const EXPERT: usize = 2;
const MOST_USES: u32 = 0x7FFF;

/// What is counted: the words from [`Count::first`] on, 64 bits each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Choices whose expert was there.
    Hits,
    /// Those whose expert had to be read.
    Misses,
    /// Experts that made room for another.
    Evictions,
}

impl Count {
    /// The word with its lower half.
    pub const fn first(self) -> usize {
        2 + 2 * self as usize
    }
}

/// Words of a cache of `slots` slots for `experts` experts of all layers.
pub const fn words(slots: u32, experts: u32) -> usize {
    HEAD + SLOT * slots as usize + EXPERT * experts as usize
}

/// A cache, as a launch has it.
#[derive(Clone, Copy, Debug)]
pub struct Cache<'w> {
    words: &'w [AtomicU32],
    slots: u32,
    pinned: u32,
    policy: Policy,
}

/// What a launch asks for.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'p> {
    /// Where the layer's experts lie.
    pub places: &'p Places,
    /// The number of the layer's first expert among those of all layers.
    pub first: u32,
    /// Experts of the layer.
    pub experts: u32,
    /// Choices.
    pub pairs: u32,
    /// Address of the slots.
    pub data: u64,
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// log2 of the bytes of a piece.
    pub piece_shift: u32,
}

impl<'w> Cache<'w> {
    /// The cache of `words`, if there are enough for `slots` slots.
    #[inline(always)]
    pub fn new(words: &'w [AtomicU32], slots: u32, pinned: u32, policy: Policy) -> Option<Self> {
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

    #[inline(always)]
    fn count(&self, what: Count) {
        let low = self.get(what.first()).wrapping_add(1);
        self.set(what.first(), low);
        if low == 0 {
            self.set(what.first() + 1, self.get(what.first() + 1).wrapping_add(1));
        }
    }

    /// Whether the last read into `slot` failed.
    #[inline(always)]
    pub fn is_bad(&self, slot: u32) -> bool {
        slot >= self.slots || self.get(Self::of_slot(slot, BAD)) != 0
    }

    /// A read into `slot` failed.
    #[inline(always)]
    pub fn mark_bad(&self, slot: u32) {
        if slot < self.slots {
            self.set(Self::of_slot(slot, BAD), 1);
        }
    }

    /// What is counted.
    pub fn counted(&self, what: Count) -> u64 {
        u64::from(self.get(what.first())) | u64::from(self.get(what.first() + 1)) << 32
    }

    /// How often expert `expert` of all was chosen.
    pub fn chosen(&self, expert: u32) -> u32 {
        self.get(self.of_expert(expert) + 1)
    }

    /// The expert of all that lies in `slot` and may be used.
    pub fn holds(&self, slot: u32) -> Option<u32> {
        let held = self.get(Self::of_slot(slot, HOLDS)).checked_sub(1);
        held.filter(|_| !self.is_bad(slot))
    }

    /// Puts expert `expert` of all into a pinned slot: before the first launch.
    pub fn pin(&self, slot: u32, expert: u32) {
        self.set(Self::of_slot(slot, HOLDS), expert + 1);
        self.set(self.of_expert(expert), slot + 1);
    }

    /// Gives each choice a slot. `pair` reads a choice's expert, `put` sets its slot, `list` takes the ranges that have to
    /// be read, one after the other; `least` is the least of the members' numbers. Every member calls it; the leader alone
    /// puts and lists. The numbers of ranges and of their pieces.
    ///
    /// A choice keeps [`NO_SLOT`] where no slot is free of experts of the same step, or the layer has no such expert.
    #[inline(always)]
    pub fn admit(
        &self,
        group: &impl Group,
        asked: &Asked<'_>,
        pair: impl Fn(u32) -> Chosen,
        put: impl Fn(u32, u32),
        list: impl Fn(u32, Range),
        least: impl Fn(u64) -> u64,
    ) -> (u32, u64) {
        let now = self.get(NOW).wrapping_add(1);
        group.sync();
        if group.leads() {
            self.set(NOW, now);
        }
        // Those that are there first: none of them goes for another.
        let mut at = 0;
        while at < asked.pairs {
            let expert = pair(at).expert;
            if group.leads() {
                put(at, NO_SLOT);
                if expert < asked.experts {
                    self.take(asked.first + expert, now, |slot| put(at, slot));
                }
            }
            at += 1;
        }
        group.sync();
        let (mut ranges, mut pieces) = (0, 0);
        let mut at = 0;
        while at < asked.pairs {
            let Chosen { expert, slot, .. } = pair(at);
            if expert < asked.experts && slot == NO_SLOT {
                let number = asked.first + expert;
                let slot = self.get(self.of_expert(number)).wrapping_sub(1);
                // Its last read failed: it keeps its slot.
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
                            // An earlier choice of this step has listed it.
                            true => self.count(Count::Hits),
                            false => self.give(slot, number, now),
                        }
                    }
                    let mut matrix = 0;
                    while matrix < MATRICES && !is_whole {
                        let range = Range {
                            byte: asked.places.byte(matrix, expert),
                            bytes: asked.places.bytes[matrix],
                            to: asked.data
                                + u64::from(slot) * asked.slot_bytes
                                + asked.places.at(matrix, expert),
                            first: pieces,
                        };
                        if group.leads() {
                            list(ranges, range);
                        }
                        ranges += 1;
                        pieces += range.pieces(asked.piece_shift);
                        matrix += 1;
                    }
                    group.sync();
                }
            }
            at += 1;
        }
        (ranges, pieces)
    }

    /// Uses expert `number` if it is there. The leader's.
    #[inline(always)]
    fn take(&self, number: u32, now: u32, put: impl Fn(u32)) {
        let of = self.of_expert(number);
        self.set(of + 1, self.get(of + 1).wrapping_add(1));
        let slot = self.get(of).wrapping_sub(1);
        if slot >= self.slots || self.is_bad(slot) {
            return;
        }
        let uses = self.get(Self::of_slot(slot, USES));
        let more = match self.policy {
            Policy::Clock => 1,
            _ if uses < MOST_USES => uses + 1,
            _ => uses,
        };
        self.set(Self::of_slot(slot, USES), more);
        self.set(Self::of_slot(slot, STAMP), now);
        self.count(Count::Hits);
        put(slot);
    }

    /// Gives `slot` to expert `number`. The leader's.
    #[inline(always)]
    fn give(&self, slot: u32, number: u32, now: u32) {
        let before = self.get(Self::of_slot(slot, HOLDS));
        if before != 0 && before != number + 1 {
            self.set(self.of_expert(before - 1), 0);
            self.count(Count::Evictions);
        }
        self.set(Self::of_slot(slot, HOLDS), number + 1);
        self.set(Self::of_slot(slot, STAMP), now);
        self.set(Self::of_slot(slot, USES), 1);
        self.set(Self::of_slot(slot, BAD), 0);
        self.set(self.of_expert(number), slot + 1);
        self.count(Count::Misses);
    }

    /// The slot whose expert goes, unless all are of this step. Every member calls it.
    #[inline(always)]
    fn victim(&self, group: &impl Group, now: u32, least: &impl Fn(u64) -> u64) -> Option<u32> {
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
        if matches!(self.policy, Policy::Clock) && best >> 16 != 0 {
            self.turn(group, slot - self.pinned, hand);
        }
        Some(slot)
    }

    /// How soon the expert in `slot` goes: 48 bits, 0 for an empty slot, all set for one that stays.
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
        // Steps since, so that a count of steps that has begun anew does no harm.
        let age = u64::from(u32::MAX - now.wrapping_sub(stamp));
        1 + match self.policy {
            Policy::Lru => age,
            Policy::Lfu => u64::from(uses) << 32 | age,
            Policy::Clock => u64::from(uses) << 32 | u64::from(far),
        }
    }

    /// The hand goes on to behind `to`, and what it passes may go next time. Every member calls it.
    #[inline(always)]
    fn turn(&self, group: &impl Group, to: u32, hand: u32) {
        let movable = self.slots - self.pinned;
        let chosen = Self::of_slot(self.pinned + to, USES);
        // Where all were used, it has passed all of them.
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

/// How far the hand is from slot `at`.
#[inline(always)]
fn distance(at: u32, hand: u32, movable: u32) -> u32 {
    match at >= hand {
        true => at - hand,
        false => at + movable - hand,
    }
}

#[cfg(all(test, not(target_arch = "nvptx64")))]
mod tests;
