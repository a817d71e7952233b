use super::super::{ExpertLocations, MATRICES};
use super::*;
use nvme_core::group::LoneThread;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;

const EXPERTS: u32 = 12;
const LAYERS: u32 = 2;
const PIECE: u32 = 12;

struct Bench {
    words: Vec<AtomicU32>,
    slots: u32,
    pinned: u32,
    policy: ReplacementPolicy,
    places: ExpertLocations,
}

/// What a step did: the slot of each choice, and the ranges that it listed.
struct Step {
    slots: Vec<u32>,
    ranges: Vec<RangeTarget>,
    pieces: u64,
}

impl Bench {
    fn new(slots: u32, pinned: u32, policy: ReplacementPolicy) -> Self {
        let count = words(slots, EXPERTS * LAYERS);
        Self {
            words: (0..count).map(|_| AtomicU32::new(0)).collect(),
            slots,
            pinned,
            policy,
            places: ExpertLocations {
                first: [4096, 100_002, 500_004],
                bytes: [5000, 5000, 9001],
            },
        }
    }

    fn cache(&self) -> ExpertCache<'_> {
        ExpertCache::new(&self.words, self.slots, self.pinned, self.policy).unwrap()
    }

    fn step(&self, layer: u32, experts: &[u32]) -> Step {
        let slots: Vec<Cell<u32>> = experts.iter().map(|_| Cell::new(77)).collect();
        let ranges = RefCell::new(Vec::new());
        let asked = CacheRequest {
            first: layer * EXPERTS,
            experts: EXPERTS,
            pairs: experts.len() as u32,
        };
        let pair = |at: u32| ChosenExpert {
            expert: experts[at as usize],
            slot: slots[at as usize].get(),
            ..ChosenExpert::default()
        };
        let put = |at: u32, slot| slots[at as usize].set(slot);
        let mut list = RangeList::default();
        let read = |expert, slot: u32| {
            let to = (1 << 40) + u64::from(slot) * self.places.slot_bytes();
            for matrix in 0..MATRICES {
                let byte = self.places.byte(matrix, expert);
                let to = to + self.places.at(matrix, expert);
                let (at, range) = list.add((byte, self.places.bytes[matrix], to), PIECE);
                assert_eq!(at as usize, ranges.borrow().len());
                ranges.borrow_mut().push(range);
            }
        };
        self.cache()
            .admit(&LoneThread, &asked, pair, put, read, |value| value);
        assert_eq!(list.ranges as usize, ranges.borrow().len());
        let pieces = list.pieces;
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
    let bench = Bench::new(3, 0, ReplacementPolicy::Lru);
    for expert in [0, 1, 2, 0, 3] {
        bench.step(0, &[expert]);
    }
    assert_eq!(bench.held(), [0, 2, 3]);
    bench.step(0, &[1]);
    assert_eq!(bench.held(), [0, 1, 3]);
    assert_eq!(bench.cache().counted(CacheCounter::Hits), 1);
    assert_eq!(bench.cache().counted(CacheCounter::Misses), 5);
    assert_eq!(bench.cache().counted(CacheCounter::Evictions), 2);
    assert_eq!(bench.cache().chosen(0), 2);
}

#[test]
fn the_one_used_least_often_goes() {
    let bench = Bench::new(3, 0, ReplacementPolicy::Lfu);
    for expert in [0, 0, 0, 1, 2, 2, 3] {
        bench.step(0, &[expert]);
    }
    assert_eq!(bench.held(), [0, 2, 3]);
}

#[test]
fn the_hand_spares_what_was_used_since_it_passed() {
    let bench = Bench::new(3, 0, ReplacementPolicy::Clock);
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
    let bench = Bench::new(4, 0, ReplacementPolicy::Lru);
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
    let bench = Bench::new(4, 0, ReplacementPolicy::Lru);
    let slot = bench.step(0, &[7]).slots[0];
    bench.cache().mark_bad(slot);
    assert!(bench.held().is_empty());
    let step = bench.step(0, &[7, 7]);
    assert_eq!(step.slots, [slot, slot]);
    assert_eq!(step.ranges.len(), MATRICES);
    assert_eq!(bench.cache().counted(CacheCounter::Evictions), 0);
    assert!(bench.step(0, &[7]).ranges.is_empty());
    bench.cache().mark_bad(u32::MAX);
    assert!(bench.cache().is_bad(u32::MAX));
}

#[test]
fn experts_that_are_not_there_and_those_without_room_get_no_slot() {
    let bench = Bench::new(2, 0, ReplacementPolicy::Clock);
    let step = bench.step(0, &[0, EXPERTS, 1, 2]);
    assert_eq!(step.slots[1], NO_SLOT);
    assert_eq!(step.slots[3], NO_SLOT);
    assert_eq!(step.ranges.len(), 2 * MATRICES);
    assert!(ExpertCache::new(&[], 1, 0, ReplacementPolicy::Lru).is_none());
}

/// Compares the cache with a model that keeps lists.
#[test]
fn steps_without_end_keep_what_the_model_keeps() {
    for (policy, seed) in ReplacementPolicy::ALL.into_iter().zip(1u64..) {
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
    policy: ReplacementPolicy,
    slots: Vec<Option<u32>>,
    last: HashMap<u32, u32>,
    uses: HashMap<u32, u32>,
    recent: Vec<bool>,
    hand: usize,
    now: u32,
}

impl Model {
    fn new(policy: ReplacementPolicy) -> Self {
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
        let may_go =
            |slot: &usize| self.slots[*slot].is_some_and(|number| self.last[&number] != self.now);
        let free: Vec<usize> = (0..5).filter(may_go).collect();
        let by = |slot: &usize| {
            let number = self.slots[*slot].unwrap();
            (self.uses[&number], self.last[&number], *slot)
        };
        match self.policy {
            ReplacementPolicy::Lru => *free.iter().min_by_key(|slot| (by(slot).1, **slot)).unwrap(),
            ReplacementPolicy::Lfu => *free.iter().min_by_key(|slot| by(slot)).unwrap(),
            ReplacementPolicy::Clock => {
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
