//! The candidates of a warp's query in shared memory, sorted by distance.

use super::arch::{WarpShared, shuffle64};
use super::{EXPANDED, MOST_BEAM, MOST_LIST, NO_KEY, id_of};
use crate::arch::butterfly64;
use nvme_gpu_kernel::arch;

const COPY_BYTES: u32 = MOST_LIST * 8;
/// Offset of new candidates, after both copies.
const FRESH: u32 = 2 * COPY_BYTES;
/// Offset of the ids that were selected.
const CHOSEN: u32 = FRESH + 32 * 8;
/// Bytes of shared memory of a warp.
pub const LIST_BYTES: u32 = CHOSEN + MOST_BEAM * 4;

/// The candidate list of a warp. All lanes hold the same state, and call every function together.
///
/// There are two copies, and one is in use: an insertion merges old and new candidates into the other
/// copy, since a merge in place would overwrite entries that other lanes have not moved yet.
pub struct CandidateList {
    memory: WarpShared,
    /// Offset of the copy in use.
    at: u32,
    len: u32,
}

impl CandidateList {
    /// Makes a list with `len` entries, the first of them used.
    #[inline(always)]
    pub fn new(memory: WarpShared, len: u32, first: u64) -> Self {
        let mut at = arch::lane();
        arch::sync_warp(arch::FULL);
        while at < len {
            memory.store64(at * 8, if at == 0 { first } else { NO_KEY });
            at += 32;
        }
        arch::sync_warp(arch::FULL);
        Self { memory, at: 0, len }
    }

    #[inline(always)]
    fn get(&self, index: u32) -> u64 {
        self.memory.load64(self.at + index * 8)
    }

    /// Marks the nearest candidates that were not expanded, at most `beam`; returns their number, and to lane
    /// `i` the id of candidate `i`.
    #[inline(always)]
    pub fn choose(&mut self, beam: u32) -> (u32, u32) {
        let (mut taken, mut base) = (0, 0);
        while base < self.len && taken < beam {
            let index = base + arch::lane();
            let key = if index < self.len {
                self.get(index)
            } else {
                NO_KEY
            };
            let is_open = key & EXPANDED == 0;
            let open = arch::ballot(arch::FULL, is_open);
            let rank = taken + (open & arch::lanes_below()).count_ones();
            if is_open && rank < beam {
                self.memory.store64(self.at + index * 8, key | EXPANDED);
                self.memory.store32(CHOSEN + rank * 4, id_of(key));
            }
            taken += open.count_ones();
            base += 32;
        }
        arch::sync_warp(arch::FULL);
        let taken = if taken < beam { taken } else { beam };
        let mut id = 0;
        if arch::lane() < taken {
            id = self.memory.load32(CHOSEN + arch::lane() * 4);
        }
        (taken, id)
    }

    /// Inserts each lane's candidate, unless it is in the list already, or farther than every entry of a full
    /// list. [`NO_KEY`] inserts nothing.
    #[inline(always)]
    pub fn insert(&mut self, key: u64) {
        let is_near = key < self.get(self.len - 1);
        if arch::ballot(arch::FULL, is_near) == 0 {
            return;
        }
        let key = sort(if is_near { key } else { NO_KEY });
        let lane = arch::lane();
        let before = shuffle64(key, lane.wrapping_sub(1) & 31);
        // Every lane finds its key's place by a binary search of its own; new keys are then shifted by the
        // number of new keys before them.
        let place = self.below(self.at, self.len, key);
        let is_there = place < self.len && self.get(place) >> 1 == key >> 1;
        let keeps = key != NO_KEY && !is_there && (lane == 0 || before != key);
        let kept = arch::ballot(arch::FULL, keeps);
        let fresh = kept.count_ones();
        if fresh == 0 {
            return;
        }
        let rank = (kept & arch::lanes_below()).count_ones();
        let other = COPY_BYTES - self.at;
        if keeps {
            self.memory.store64(FRESH + rank * 8, key);
            if place + rank < self.len {
                self.memory.store64(other + (place + rank) * 8, key);
            }
        }
        arch::sync_warp(arch::FULL);
        let mut index = lane;
        while index < self.len {
            let old = self.get(index);
            // An old entry moves up by the number of new keys that are nearer. Old and new keys differ, so no
            // two of them get the same place.
            let to = index + self.below(FRESH, fresh, old);
            if to < self.len {
                self.memory.store64(other + to * 8, old);
            }
            index += 32;
        }
        self.at = other;
        arch::sync_warp(arch::FULL);
    }

    /// Returns the number of the `len` keys from byte `from` on that are below `key`.
    #[inline(always)]
    fn below(&self, from: u32, len: u32, key: u64) -> u32 {
        let (mut count, mut step) = (0, MOST_LIST);
        while step != 0 {
            let next = count + step;
            if next <= len && self.memory.load64(from + next * 8 - 8) < key {
                count = next;
            }
            step /= 2;
        }
        count
    }
}

/// Sorts the keys of the lanes in the order of the lanes (a bitonic sort).
#[inline(always)]
fn sort(key: u64) -> u64 {
    let (lane, mut key, mut size) = (arch::lane(), key, 2);
    while size <= 32 {
        let mut bits = size / 2;
        while bits != 0 {
            let other = butterfly64(key, bits);
            let wants_less = (lane & bits == 0) == (lane & size == 0);
            key = if (other < key) == wants_less {
                other
            } else {
                key
            };
            bits /= 2;
        }
        size *= 2;
    }
    key
}
