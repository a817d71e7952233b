//! Attention over keys and values in pages on a drive: each warp reads its pages by a page table in GPU
//! memory and adds up the parts it has read. A second kernel joins the partial results of a query.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::PagedAttention;
use crate::arch::{
    self as here, FloatArray, Window, exp2, load_8, maximum, of_half, sum_of_lanes, word,
};
use crate::pages::{MOST_ELEMENTS, PagePart, QUERIES};
use nvme_gpu_kernel::ring::ScatteredPieces;
use nvme_gpu_kernel::rows::{code, worst};
use nvme_gpu_kernel::{RangeStream, arch, entry};

/// Loads of 8 bytes that a lane has in flight, of keys and of values each.
const LOADS: usize = 4;
/// Elements of a token that a lane holds.
const EACH: usize = 4;
/// Start value of the largest score: below every product, and finite. The score of a missing key is minus
/// infinity; its exponential relative to this number is 0, relative to minus infinity it would be NaN.
const LEAST: f32 = f32::MIN;

/// Expands the block for each of the numbers, as a constant of the given name, so that arrays stay in
/// registers.
macro_rules! unrolled {
    ($i:ident in $($number:literal)* => $body:block) => {{
        $({ const $i: usize = $number; $body })*
    }};
}

/// Expands the block for each number below eight.
macro_rules! eight {
    ($i:ident => $body:block) => { unrolled!($i in 0 1 2 3 4 5 6 7 => $body) };
}

/// Expands the block for each number below four.
macro_rules! four {
    ($i:ident => $body:block) => { unrolled!($i in 0 1 2 3 => $body) };
}

entry! {
    /// Computes partial attention. A warp takes one part of a head's pages a turn.
    ///
    /// # Safety
    /// All memory that [`PagedAttention`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_attention_paged(attention: PagedAttention) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let mut stream = unsafe { RangeStream::enter(&attention.rows) };
        let (warp, warps) = here::warp();
        let (mut failed, mut first) = (0, 0);
        let mut item = warp;
        while item < attention.parts() {
            let part = attention.part(item);
            let code = run(&attention, &part, &mut stream);
            if code != code::OK {
                failed += 1;
                let this = worst(part.row(&attention), None, code);
                first = if this > first { this } else { first };
            }
            item += warps;
        }
        stream.leave(failed, first);
    }
}

/// Computes one part and stores its partial sums; returns the code of its end.
#[inline(always)]
fn run(attention: &PagedAttention, part: &PagePart, stream: &mut RangeStream<'_>) -> i32 {
    let window = Window::here();
    queries(attention, part, window);
    let mut sums = PagedSums::new();
    let ids = attention.table(part);
    // SAFETY: the host vouches for the counts, and for a table with as many pages.
    let count = unsafe { word(attention.count_address(part)) };
    let (from, until) = attention.share(part, count);
    let id = |index: u64| {
        // SAFETY: as above; `index` is below the count.
        let id = unsafe { word(ids + index * 4) };
        u64::from(id)
    };
    let mut code = code::OK;
    let mut at = from + u64::from(arch::lane());
    while arch::ballot(arch::FULL, at < until) != 0 {
        let is_bad = at < until && id(at) >= attention.rows.rows;
        if arch::ballot(arch::FULL, is_bad) != 0 {
            code = code::OUT_OF_RANGE;
        }
        at += 32;
    }
    if from < until && code == code::OK {
        let pieces = ScatteredPieces {
            byte_of: |number: u64| attention.byte(part, id(from + number)),
            bytes: attention.piece_bytes(),
            count: until - from,
            stage_shift: attention.rows.slot_bytes.trailing_zeros(),
        };
        stream.begin();
        let mut number = 0;
        while number < pieces.count {
            let ended = stream.piece(&pieces, number);
            if ended == code::OK {
                let keys = stream.address_of(&pieces, number);
                tokens(attention, window, &mut sums, keys, attention.page_tokens);
                // A barrier: the next read may land in the slot that other lanes are still using.
                arch::sync_warp(arch::FULL);
            } else {
                code = ended;
            }
            number += 1;
        }
    } else if from < until && stream.rest() != code::OK {
        code = stream.rest();
    }
    if let Some((keys, count)) = tail(attention, part) {
        tokens(attention, window, &mut sums, keys, count);
    }
    if code != code::OK {
        sums.total = [f32::NAN; QUERIES];
    }
    sums.join(attention.lane_shift());
    sums.store(attention, part);
    // A barrier: the queries of the next part overwrite those that other lanes may still be using.
    arch::sync_warp(arch::FULL);
    code
}

/// Returns address and number of the tokens of the last page, which is in GPU memory, if this part includes
/// it.
#[inline(always)]
fn tail(attention: &PagedAttention, part: &PagePart) -> Option<(u64, u32)> {
    if attention.tail == 0 || part.split + 1 != attention.splits {
        return None;
    }
    // SAFETY: the host vouches for a count for each sequence.
    let count = unsafe { word(attention.tail_counts + u64::from(part.sequence) * 4) };
    Some((attention.tail_piece(part), count.min(attention.page_tokens)))
}

/// Stores the part's queries, multiplied by the scale, in the window: `MOST_ELEMENTS` numbers each.
#[inline(always)]
fn queries(attention: &PagedAttention, part: &PagePart, window: Window) {
    // SAFETY: the host vouches for all queries.
    let from = unsafe { FloatArray::at(attention.queries) };
    let (elements, count) = (attention.head_elements, part.queries(attention));
    let scale = attention.scale * core::f32::consts::LOG2_E;
    let mut at = arch::lane();
    while at < QUERIES as u32 * MOST_ELEMENTS {
        let (query, element) = (at / MOST_ELEMENTS, at % MOST_ELEMENTS);
        let value = match query < count && element < elements {
            true => {
                let vector = attention.vector(part, query);
                from.load(vector * u64::from(elements) + u64::from(element)) * scale
            }
            false => 0.0,
        };
        window.put(at, value);
        at += 32;
    }
    arch::sync_warp(arch::FULL);
}

/// Partial sums of a lane: four elements of each query, over the lane's share of the tokens. Scores are
/// logarithms to base two.
///
/// Each lane starts with the score `LEAST`, below every real one, so that joining with a lane that had no
/// token changes nothing.
struct PagedSums {
    largest: [f32; QUERIES],
    total: [f32; QUERIES],
    sums: [[f32; EACH]; QUERIES],
}

impl PagedSums {
    #[inline(always)]
    fn new() -> Self {
        Self {
            largest: [LEAST; QUERIES],
            total: [0.0; QUERIES],
            sums: [[0.0; EACH]; QUERIES],
        }
    }

    /// Joins the partial sums of the lanes that hold the same elements of different tokens. Every lane calls
    /// it.
    #[inline(always)]
    fn join(&mut self, lane_shift: u32) {
        let mut bits = 1 << lane_shift;
        while bits < 32 {
            let other =
                |value: f32| f32::from_bits(arch::butterfly(arch::FULL, value.to_bits(), bits));
            eight!(Q => {
                let theirs = other(self.largest[Q]);
                let next = maximum(self.largest[Q], theirs);
                let (mine, theirs) = (exp2(self.largest[Q] - next), exp2(theirs - next));
                self.largest[Q] = next;
                self.total[Q] = self.total[Q] * mine + other(self.total[Q]) * theirs;
                four!(E => {
                    self.sums[Q][E] = self.sums[Q][E] * mine + other(self.sums[Q][E]) * theirs;
                });
            });
            bits *= 2;
        }
    }

    /// Stores the part's elements, its largest score, and the sum of its weights.
    #[inline(always)]
    fn store(&self, attention: &PagedAttention, part: &PagePart) {
        // SAFETY: the host vouches for space for every part.
        let to = unsafe { FloatArray::at(attention.partial) };
        let elements = u64::from(attention.head_elements);
        let first = u64::from(arch::lane()) * EACH as u64;
        let count = part.queries(attention);
        eight!(Q => {
            if (Q as u32) < count {
                let at = attention.partial_index(part, Q as u32) * (elements + 2);
                if first < elements {
                    four!(E => { to.store(at + first + E as u64, self.sums[Q][E]); });
                }
                if first == 0 {
                    to.store(at + elements, self.largest[Q]);
                    to.store(at + elements + 1, self.total[Q]);
                }
            }
        });
    }
}

/// Converts 8 bytes to four numbers, from bf16 or f16.
#[inline(always)]
fn numbers([low, high]: [u32; 2], is_bf16: bool) -> [f32; 4] {
    let pair = |word: u32| match is_bf16 {
        true => (
            f32::from_bits(word << 16),
            f32::from_bits(word & 0xFFFF_0000),
        ),
        false => (of_half(word as u16), of_half((word >> 16) as u16)),
    };
    let ((a, b), (c, d)) = (pair(low), pair(high));
    [a, b, c, d]
}

/// Adds `count` tokens. Their keys begin at `keys`, and their values after the keys of a whole page. Every
/// lane of the warp calls it.
#[inline(always)]
fn tokens(attention: &PagedAttention, window: Window, sums: &mut PagedSums, keys: u64, count: u32) {
    let (elements, lane_shift) = (attention.head_elements, attention.lane_shift());
    let lane = arch::lane();
    let (mine, element) = (
        lane >> lane_shift,
        (lane & ((1 << lane_shift) - 1)) * EACH as u32,
    );
    let step = 32 >> lane_shift;
    let values = u64::from(attention.page_tokens * elements) * 2;
    let is_bf16 = attention.is_bf16 != 0;
    let mut base = mine;
    // Every lane runs the same number of turns, since the sums below are exchanged between lanes.
    let mut first = 0;
    while first < count {
        let (mut key, mut value) = ([[0; 2]; LOADS], [[0; 2]; LOADS]);
        four!(I => {
            let token = base + I as u32 * step;
            let there = token < count && element < elements;
            let at = keys + u64::from(token * elements + element) * 2;
            // SAFETY: the token is inside the landed read, or the predicate skips the load.
            unsafe {
                key[I] = load_8(at, there);
                value[I] = load_8(at + values, there);
            }
        });
        let mut weights = [[0.0; LOADS]; QUERIES];
        four!(I => {
            let key = numbers(key[I], is_bf16);
            eight!(Q => {
                let query = window.four_of(Q as u32 * MOST_ELEMENTS + element);
                let mut product = 0.0;
                four!(E => { product += query[E] * key[E]; });
                weights[Q][I] = product;
            });
        });
        eight!(Q => {
            let mut next = sums.largest[Q];
            four!(I => {
                let product = sum_of_lanes(weights[Q][I], lane_shift);
                let there = base + (I as u32) * step < count;
                weights[Q][I] = if there { product } else { f32::NEG_INFINITY };
                next = maximum(next, weights[Q][I]);
            });
            let before = exp2(sums.largest[Q] - next);
            sums.largest[Q] = next;
            let mut total = sums.total[Q] * before;
            four!(I => {
                weights[Q][I] = exp2(weights[Q][I] - next);
                total += weights[Q][I];
            });
            sums.total[Q] = total;
            four!(E => { sums.sums[Q][E] *= before; });
        });
        four!(I => {
            let value = numbers(value[I], is_bf16);
            eight!(Q => { four!(E => { sums.sums[Q][E] += weights[Q][I] * value[E]; }); });
        });
        base += LOADS as u32 * step;
        first += LOADS as u32 * step;
    }
}

entry! {
    /// Joins the partial results of each query. A warp takes one query of a head a turn. A query without any
    /// token gets zeros.
    ///
    /// # Safety
    /// All memory that [`PagedAttention`] names is allocated and stays so while the kernel runs, and
    /// `nvme_attention_paged` has run.
    pub unsafe fn nvme_attention_join(attention: PagedAttention) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let (from, to) = unsafe {
            (
                FloatArray::at(attention.partial),
                FloatArray::at(attention.y),
            )
        };
        let elements = u64::from(attention.head_elements);
        let splits = u64::from(attention.splits);
        let vectors = u64::from(attention.sequences) * u64::from(attention.heads);
        let (mut vector, warps) = here::warp();
        while vector < vectors {
            let at = |split: u64| (vector * splits + split) * (elements + 2);
            let mut largest = LEAST;
            for split in 0..splits {
                largest = maximum(largest, from.load(at(split) + elements));
            }
            let mut total = 0.0;
            for split in 0..splits {
                let weight = exp2(from.load(at(split) + elements) - largest);
                total += from.load(at(split) + elements + 1) * weight;
            }
            let mut element = u64::from(arch::lane());
            while element < elements {
                let mut sum = 0.0;
                for split in 0..splits {
                    let weight = exp2(from.load(at(split) + elements) - largest);
                    sum += from.load(at(split) + element) * weight;
                }
                to.store(
                    vector * elements + element,
                    if total == 0.0 { 0.0 } else { sum / total },
                );
                element += 32;
            }
            vector += warps;
        }
    }
}
