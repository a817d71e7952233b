//! Vector search in a graph: each warp takes one query a turn, and reads the nodes that it expands. A query
//! whose read failed, or brought another node than it asked for, has no results and a code; the other queries
//! are whole.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::arch::{WarpShared, WordArray, shuffle64, total_of_warp};
use super::list::{CandidateList, LIST_BYTES};
use super::{
    CENTROIDS, MOST_DEGREE, NO_KEY, SearchLaunch, code, distance_of, id_of, key, term, word,
};
use crate::arch::{self as here, FloatArray, sum_of_warp};
use nvme_gpu_kernel::rows::{code as row, worst};
use nvme_gpu_kernel::{WarpReads, arch, entry};

entry! {
    /// Searches.
    ///
    /// # Safety
    /// All memory that [`SearchLaunch`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_search(search: SearchLaunch) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let reads = unsafe { WarpReads::enter(&search.rows) };
        // SAFETY: the host vouches for a table for each warp of each station. A warp without a station does not
        // use its table.
        let mut warp = unsafe {
            let table = search.tables + u64::from(reads.place()) * table_bytes(&search);
            SearchWarp {
                search: &search,
                reads,
                query: FloatArray::at(search.queries),
                centroids: FloatArray::at(search.centroids),
                codes: WordArray::at(search.codes),
                table: FloatArray::at(table),
                best: NO_KEY,
                asked: 0,
            }
        };
        let (mut number, warps) = here::warp();
        let (mut failed, mut first) = (0, 0);
        while number < search.rows.count {
            // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
            warp.query =
                unsafe { FloatArray::at(search.queries + number * u64::from(search.elements) * 4) };
            (warp.best, warp.asked) = (NO_KEY, 0);
            let ended = warp.search();
            // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
            unsafe { warp.write(number, ended) };
            if ended != row::OK {
                failed += 1;
                let this = worst(number, None, ended);
                first = if this > first { this } else { first };
            }
            number += warps;
        }
        warp.reads.leave(failed, first);
    }
}

#[inline(always)]
fn table_bytes(search: &SearchLaunch) -> u64 {
    u64::from(search.code_bytes * CENTROIDS) * 4
}

struct SearchWarp<'s> {
    search: &'s SearchLaunch,
    reads: WarpReads<'s>,
    query: FloatArray,
    centroids: FloatArray,
    codes: WordArray,
    table: FloatArray,
    /// Result held by the lane; the results of the lanes 0, 1, ... are in order.
    best: u64,
    asked: u32,
}

impl SearchWarp<'_> {
    /// Searches, and returns the code of its end.
    #[inline(always)]
    fn search(&mut self) -> i32 {
        let search = self.search;
        if self.reads.rest() != row::OK {
            return self.reads.rest();
        }
        if !self.is_finite() {
            return code::BAD_QUERY;
        }
        self.fill_table();
        let (entry, _) = self.scores(search.entry, search.entry);
        let memory = WarpShared::of_warp(LIST_BYTES);
        let mut list = CandidateList::new(memory, search.list, key(entry, search.entry));
        let mut ended = row::OK;
        while ended == row::OK {
            let (taken, mine) = list.choose(search.beam);
            if taken == 0 {
                break;
            }
            self.asked += taken;
            self.reads.ask(mine, arch::lane() < taken);
            let mut of = 0;
            while of < taken {
                let code = self.reads.see(of);
                if ended == row::OK {
                    ended = code;
                }
                if ended == row::OK {
                    ended = self.expand(of, arch::shuffle(arch::FULL, mine, of), &mut list);
                }
                if code < 0 {
                    break;
                }
                of += 1;
            }
        }
        ended
    }

    #[inline(always)]
    fn is_finite(&self) -> bool {
        let (mut at, mut is_bad) = (arch::lane(), false);
        while at < self.search.elements {
            is_bad |= !self.query.load(u64::from(at)).is_finite();
            at += 32;
        }
        arch::ballot(arch::FULL, is_bad) == 0
    }

    /// Computes the distances of all centroids from the query. Padding codes add nothing.
    #[inline(always)]
    fn fill_table(&self) {
        let search = self.search;
        let (mut subspace, mut first) = (0, 0);
        while subspace < search.code_bytes {
            let left = search.elements.saturating_sub(first);
            let elements = if left < search.sub_elements {
                left
            } else {
                search.sub_elements
            };
            let mut centroid = arch::lane();
            while centroid < CENTROIDS {
                let (mut a, mut b, mut c, mut d) = (0.0, 0.0, 0.0, 0.0);
                let mut element = first;
                while element < first + elements {
                    let x = self.query.load(u64::from(element));
                    let at = u64::from(element * CENTROIDS + centroid);
                    let far = |lanes: u64| x - self.centroids.load(at + lanes);
                    let (p, q, r, s) = (far(0), far(32), far(64), far(96));
                    a += p * p;
                    b += q * q;
                    c += r * r;
                    d += s * s;
                    element += 1;
                }
                let at = u64::from(subspace * CENTROIDS + centroid);
                self.table.store(at, a);
                self.table.store(at + 32, b);
                self.table.store(at + 64, c);
                self.table.store(at + 96, d);
                centroid += 128;
            }
            first += elements;
            subspace += 1;
        }
        arch::sync_warp(arch::FULL);
    }

    /// Returns approximate distances of two nodes for each lane.
    #[inline(always)]
    fn scores(&self, a: u32, b: u32) -> (f32, f32) {
        let words = u64::from(self.search.code_bytes / 4);
        let (first_a, first_b) = (u64::from(a) * words, u64::from(b) * words);
        let (mut sum_a, mut sum_b) = (0.0, 0.0);
        let (mut at, mut table) = (0, 0);
        while at < words {
            let (a, b) = (self.codes.load(first_a + at), self.codes.load(first_b + at));
            let mut shift = 0;
            while shift < 32 {
                sum_a += self.table.load(table + u64::from(a >> shift & 0xFF));
                sum_b += self.table.load(table + u64::from(b >> shift & 0xFF));
                table += u64::from(CENTROIDS);
                shift += 8;
            }
            at += 1;
        }
        (sum_a, sum_b)
    }

    /// Processes node `id`, which lane `of` has read: computes its exact distance, and inserts its neighbours
    /// as candidates.
    #[inline(always)]
    fn expand(&mut self, of: u32, id: u32, list: &mut CandidateList) -> i32 {
        let search = self.search;
        // SAFETY: a slot of the warp, whose read has ended, so nothing writes to it.
        let node = unsafe { WordArray::at(self.reads.address(of, id)) };
        let lane = arch::lane();
        let at = u64::from(lane);
        let (a, b, head) = (node.load(at), node.load(at + 32), node.load(at + 64));
        let mut sum = term(lane, a).wrapping_add(term(lane + 32, b));
        if lane + 64 < word::SUM as u32 {
            sum = sum.wrapping_add(term(lane + 64, head));
        }
        let (far, of_vector) = self.distance(node);
        let sum = total_of_warp(sum.wrapping_add(of_vector));
        let said = |word: usize| arch::shuffle(arch::FULL, head, word as u32 - 64);
        let degree = said(word::DEGREE);
        let (has_a, has_b) = (lane < degree, lane + 32 < degree);
        let nodes = search.rows.rows as u32;
        let is_no_node = has_a && a >= nodes || has_b && b >= nodes;
        let is_wrong = said(word::ID) != id
            || said(word::TAG) != search.tag
            || said(word::SUM) != sum
            || degree > MOST_DEGREE
            || arch::ballot(arch::FULL, is_no_node) != 0;
        if is_wrong {
            return code::WRONG_NODE;
        }
        self.keep(key(sum_of_warp(far), id));
        let (near_a, near_b) = (if has_a { a } else { 0 }, if has_b { b } else { 0 });
        let (far_a, far_b) = self.scores(near_a, near_b);
        list.insert(if has_a { key(far_a, a) } else { NO_KEY });
        list.insert(if has_b { key(far_b, b) } else { NO_KEY });
        row::OK
    }

    /// Returns the lane's share of the squared distance of a node's vector, and of its checksum.
    #[inline(always)]
    fn distance(&self, node: WordArray) -> (f32, u32) {
        let elements = self.search.elements;
        let (mut far, mut sum, mut at) = (0.0, 0u32, arch::lane());
        let place = |at: u32| word::VECTOR as u32 + at;
        // Four loads a step, so that their latencies overlap.
        while at + 96 < elements {
            let load = |lanes: u32| {
                let at = u64::from(at + lanes);
                (node.load(word::VECTOR as u64 + at), self.query.load(at))
            };
            let (a, b, c, d) = (load(0), load(32), load(64), load(96));
            let mut add = |(word, x): (u32, f32), lanes: u32| {
                let apart = f32::from_bits(word) - x;
                far += apart * apart;
                sum = sum.wrapping_add(term(place(at + lanes), word));
            };
            add(a, 0);
            add(b, 32);
            add(c, 64);
            add(d, 96);
            at += 128;
        }
        while at < elements {
            let word = node.load(u64::from(place(at)));
            let apart = f32::from_bits(word) - self.query.load(u64::from(at));
            far += apart * apart;
            sum = sum.wrapping_add(term(place(at), word));
            at += 32;
        }
        (far, sum)
    }

    /// Inserts a result into the sorted results of the lanes.
    #[inline(always)]
    fn keep(&mut self, new: u64) {
        let before = shuffle64(self.best, arch::lane().wrapping_sub(1) & 31);
        let moves = arch::lane() > 0 && before > new;
        if self.best > new {
            self.best = if moves { before } else { new };
        }
    }

    /// Stores results and status of query `number`.
    ///
    /// # Safety
    /// All memory that [`SearchLaunch`] names is allocated and stays so while the kernel runs.
    #[inline(always)]
    unsafe fn write(&self, number: u64, ended: i32) {
        let search = self.search;
        let lane = arch::lane();
        // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
        let (ids, distances, status, reads) = unsafe {
            (
                WordArray::at(search.ids),
                FloatArray::at(search.distances),
                WordArray::at(search.status),
                WordArray::at(search.reads),
            )
        };
        if lane < search.results {
            let at = number * u64::from(search.results) + u64::from(lane);
            let is_there = ended == row::OK && self.best != NO_KEY;
            let id = if is_there { id_of(self.best) } else { u32::MAX };
            ids.store(2 * at, id);
            ids.store(2 * at + 1, if is_there { 0 } else { u32::MAX });
            let far = if is_there {
                distance_of(self.best)
            } else {
                f32::INFINITY
            };
            distances.store(at, far);
        }
        if lane == 0 {
            status.store(number, ended as u32);
            reads.store(number, self.asked);
        }
    }
}
