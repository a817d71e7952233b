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
mod tests {
    use super::*;
    use nvme_core::group::Alone;
    use std::cell::{Cell, RefCell};
    use std::collections::HashMap;

    const EXPERTS: u32 = 12;
    const LAYERS: u32 = 2;
    const PIECE: u32 = 12;

    struct Bench {
        words: Vec<AtomicU32>,
        slots: u32,
        pinned: u32,
        policy: Policy,
        places: Places,
    }

    /// What a step did: the slot of each choice, and the ranges that it listed.
    struct Step {
        slots: Vec<u32>,
        ranges: Vec<Range>,
        pieces: u64,
    }

    impl Bench {
        fn new(slots: u32, pinned: u32, policy: Policy) -> Self {
            let count = words(slots, EXPERTS * LAYERS);
            Self {
                words: (0..count).map(|_| AtomicU32::new(0)).collect(),
                slots,
                pinned,
                policy,
                places: Places {
                    first: [4096, 100_002, 500_004],
                    bytes: [5000, 5000, 9001],
                },
            }
        }

        fn cache(&self) -> Cache<'_> {
            Cache::new(&self.words, self.slots, self.pinned, self.policy).unwrap()
        }

        fn step(&self, layer: u32, experts: &[u32]) -> Step {
            let slots: Vec<Cell<u32>> = experts.iter().map(|_| Cell::new(77)).collect();
            let ranges = RefCell::new(Vec::new());
            let asked = Asked {
                places: &self.places,
                first: layer * EXPERTS,
                experts: EXPERTS,
                pairs: experts.len() as u32,
                data: 1 << 40,
                slot_bytes: self.places.slot_bytes(),
                piece_shift: PIECE,
            };
            let pair = |at: u32| Chosen {
                expert: experts[at as usize],
                slot: slots[at as usize].get(),
                ..Chosen::default()
            };
            let put = |at: u32, slot| slots[at as usize].set(slot);
            let list = |at: u32, range| {
                assert_eq!(at as usize, ranges.borrow().len());
                ranges.borrow_mut().push(range);
            };
            let (count, pieces) = self
                .cache()
                .admit(&Alone, &asked, pair, put, list, |value| value);
            assert_eq!(count as usize, ranges.borrow().len());
            Step {
                slots: slots.iter().map(Cell::get).collect(),
                ranges: ranges.into_inner(),
                pieces,
            }
        }

        /// Which experts of all lie in a slot.
        fn held(&self) -> Vec<u32> {
            let cache = self.cache();
            let mut held: Vec<u32> = (0..self.slots)
                .filter_map(|slot| cache.holds(slot))
                .collect();
            held.sort_unstable();
            held
        }
    }

    #[test]
    fn the_one_used_longest_ago_goes() {
        let bench = Bench::new(3, 0, Policy::Lru);
        for expert in [0, 1, 2, 0, 3] {
            bench.step(0, &[expert]);
        }
        assert_eq!(bench.held(), [0, 2, 3]);
        bench.step(0, &[1]);
        assert_eq!(bench.held(), [0, 1, 3]);
        assert_eq!(bench.cache().counted(Count::Hits), 1);
        assert_eq!(bench.cache().counted(Count::Misses), 5);
        assert_eq!(bench.cache().counted(Count::Evictions), 2);
        assert_eq!(bench.cache().chosen(0), 2);
    }

    #[test]
    fn the_one_used_least_often_goes() {
        let bench = Bench::new(3, 0, Policy::Lfu);
        for expert in [0, 0, 0, 1, 2, 2, 3] {
            bench.step(0, &[expert]);
        }
        assert_eq!(bench.held(), [0, 2, 3]);
    }

    #[test]
    fn the_hand_spares_what_was_used_since_it_passed() {
        let bench = Bench::new(3, 0, Policy::Clock);
        for expert in [0, 1, 2, 3] {
            bench.step(0, &[expert]);
        }
        // All were used: the hand went round once and took the first.
        assert_eq!(bench.held(), [1, 2, 3]);
        bench.step(0, &[1]);
        bench.step(0, &[4]);
        assert_eq!(bench.held(), [1, 3, 4]);
    }

    #[test]
    fn ranges_name_the_bytes_of_the_expert_and_its_slot() {
        let bench = Bench::new(4, 0, Policy::Lru);
        let step = bench.step(1, &[5, 5, 2]);
        assert_eq!(step.slots[0], step.slots[1]);
        assert_ne!(step.slots[0], step.slots[2]);
        assert_eq!(step.ranges.len(), 2 * MATRICES);
        let (places, mut first) = (bench.places, 0);
        for (at, range) in step.ranges.iter().enumerate() {
            let (expert, matrix) = ([5, 2][at / MATRICES], at % MATRICES);
            assert_eq!(range.byte, places.byte(matrix, expert));
            assert_eq!(range.bytes, places.bytes[matrix]);
            assert_eq!(range.byte % 16, range.to % 16);
            assert_eq!(range.first, first);
            first += range.pieces(PIECE);
            let slot = (1 << 40) + u64::from(step.slots[at / MATRICES * 2]) * places.slot_bytes();
            assert!(range.to >= slot && range.to + range.bytes <= slot + places.slot_bytes());
        }
        assert_eq!(step.pieces, first);
        // Matrices of a slot do not touch.
        for pair in step.ranges[..MATRICES].windows(2) {
            assert!(pair[0].to + pair[0].bytes <= pair[1].to);
        }
    }

    #[test]
    fn a_slot_whose_read_failed_is_read_again() {
        let bench = Bench::new(4, 0, Policy::Lru);
        let slot = bench.step(0, &[7]).slots[0];
        bench.cache().mark_bad(slot);
        assert!(bench.held().is_empty());
        let step = bench.step(0, &[7, 7]);
        assert_eq!(step.slots, [slot, slot]);
        assert_eq!(step.ranges.len(), MATRICES);
        assert_eq!(bench.cache().counted(Count::Evictions), 0);
        assert!(bench.step(0, &[7]).ranges.is_empty());
        bench.cache().mark_bad(u32::MAX);
        assert!(bench.cache().is_bad(u32::MAX));
    }

    #[test]
    fn experts_that_are_not_there_and_those_without_room_get_no_slot() {
        let bench = Bench::new(2, 0, Policy::Clock);
        let step = bench.step(0, &[0, EXPERTS, 1, 2]);
        assert_eq!(step.slots[1], NO_SLOT);
        assert_eq!(step.slots[3], NO_SLOT);
        assert_eq!(step.ranges.len(), 2 * MATRICES);
        assert!(Cache::new(&[], 1, 0, Policy::Lru).is_none());
    }

    /// Against a model that keeps lists.
    #[test]
    fn steps_without_end_keep_what_the_model_keeps() {
        for (policy, seed) in Policy::ALL.into_iter().zip(1u64..) {
            let bench = Bench::new(7, 2, policy);
            bench.cache().pin(0, 3);
            bench.cache().pin(1, EXPERTS + 4);
            let mut model = Model::new(policy);
            let mut state = seed;
            let mut throw = |below: u64| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                (state >> 33) % below
            };
            for round in 0..3000 {
                let layer = throw(u64::from(LAYERS)) as u32;
                let chosen: Vec<u32> = (0..1 + throw(3))
                    .map(|_| (throw(u64::from(EXPERTS)) * throw(u64::from(EXPERTS)) / 12) as u32)
                    .collect();
                let numbers: Vec<u32> = chosen.iter().map(|one| layer * EXPERTS + one).collect();
                let step = bench.step(layer, &chosen);
                let missed = model.step(&numbers);
                assert_eq!(
                    step.ranges.len(),
                    missed * MATRICES,
                    "{policy:?} round {round}"
                );
                for (slot, number) in step.slots.iter().zip(&numbers) {
                    assert_eq!(bench.cache().holds(*slot), Some(*number));
                }
                let mut held: Vec<u32> = model.slots.iter().flatten().copied().collect();
                held.extend([3, EXPERTS + 4]);
                held.sort_unstable();
                assert_eq!(bench.held(), held, "{policy:?} round {round}");
            }
        }
    }

    /// The policies by the book, over the five slots that move.
    struct Model {
        policy: Policy,
        slots: Vec<Option<u32>>,
        last: HashMap<u32, u32>,
        uses: HashMap<u32, u32>,
        recent: Vec<bool>,
        hand: usize,
        now: u32,
    }

    impl Model {
        fn new(policy: Policy) -> Self {
            Self {
                policy,
                slots: vec![None; 5],
                last: HashMap::new(),
                uses: HashMap::new(),
                recent: vec![false; 5],
                hand: 0,
                now: 0,
            }
        }

        fn step(&mut self, numbers: &[u32]) -> usize {
            self.now += 1;
            let pinned = |number: &u32| [3, EXPERTS + 4].contains(number);
            let mut missed = Vec::new();
            for number in numbers.iter().filter(|number| !pinned(number)) {
                match self.slots.iter().position(|held| *held == Some(*number)) {
                    Some(slot) => self.used(slot, *number),
                    None => missed.push(*number),
                }
            }
            let mut count = 0;
            for number in missed {
                if self.slots.contains(&Some(number)) {
                    continue;
                }
                count += 1;
                let slot = self.victim();
                self.slots[slot] = Some(number);
                self.uses.insert(number, 0);
                self.used(slot, number);
            }
            count
        }

        fn used(&mut self, slot: usize, number: u32) {
            self.last.insert(number, self.now);
            *self.uses.entry(number).or_default() += 1;
            self.recent[slot] = true;
        }

        fn victim(&mut self) -> usize {
            if let Some(empty) = self.slots.iter().position(Option::is_none) {
                return empty;
            }
            let may_go = |slot: &usize| {
                self.slots[*slot].is_some_and(|number| self.last[&number] != self.now)
            };
            let free: Vec<usize> = (0..5).filter(may_go).collect();
            let by = |slot: &usize| {
                let number = self.slots[*slot].unwrap();
                (self.uses[&number], self.last[&number], *slot)
            };
            match self.policy {
                Policy::Lru => *free.iter().min_by_key(|slot| (by(slot).1, **slot)).unwrap(),
                Policy::Lfu => *free.iter().min_by_key(|slot| by(slot)).unwrap(),
                Policy::Clock => {
                    let order = (0..5).map(|far| (self.hand + far) % 5);
                    let order: Vec<usize> = order.filter(|slot| free.contains(slot)).collect();
                    let unused = order.iter().find(|slot| !self.recent[**slot]);
                    let slot = *unused.unwrap_or(&order[0]);
                    let passed = match unused {
                        Some(_) => (slot + 5 - self.hand) % 5,
                        None => 5,
                    };
                    for far in 0..passed {
                        self.recent[(self.hand + far) % 5] = false;
                    }
                    self.hand = (slot + 1) % 5;
                    slot
                }
            }
        }
    }
}
