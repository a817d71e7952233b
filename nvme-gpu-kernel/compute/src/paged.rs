//! Attention over keys and values that lie in pages on a drive: each warp reads its pages by itself, by a table of pages
//! in GPU memory, and adds up what it has read. A second kernel joins the parts of a query.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::PagedAttention;
use crate::arch::{self as here, Numbers, Window, exp2, load_8, maximum, numbers, word};
use crate::pages::{MOST_ELEMENTS, Part, QUERIES};
use nvme_gpu_kernel::ring::Scattered;
use nvme_gpu_kernel::rows::{code, worst};
use nvme_gpu_kernel::{Stream, arch};

/// Loads of 8 bytes of each, keys and values, that a lane has under way.
const LOADS: usize = 4;
/// Elements of a token that a lane holds.
const EACH: usize = 4;
/// Below every product, and finite: what is not there is less.
const LEAST: f32 = -1e30;

/// The block for each of the numbers, a constant by the name given: arrays stay in registers.
macro_rules! unrolled {
    ($i:ident in $($number:literal)* => $body:block) => {{
        $({ const $i: usize = $number; $body })*
    }};
}

/// The same for each number below eight.
macro_rules! eight {
    ($i:ident => $body:block) => { unrolled!($i in 0 1 2 3 4 5 6 7 => $body) };
}

/// The same below four.
macro_rules! four {
    ($i:ident => $body:block) => { unrolled!($i in 0 1 2 3 => $body) };
}

/// A warp takes a part of a head's pages at a time.
///
/// # Safety
/// What [`PagedAttention`] names is there.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_attention_paged(attention: PagedAttention) {
    // SAFETY: the caller's.
    let mut stream = unsafe { Stream::enter(&attention.rows) };
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

/// One part, to its place among the partial sums. What became of it.
#[inline(always)]
fn run(attention: &PagedAttention, part: &Part, stream: &mut Stream<'_>) -> i32 {
    let window = Window::here();
    queries(attention, part, window);
    let mut sums = Sums::new();
    let ids = attention.table(part);
    // SAFETY: the host gives the counts, and a table of as many pages.
    let count = unsafe { word(attention.count_address(part)) };
    let (from, until) = attention.share(part, count);
    let id = |index: u64| {
        // SAFETY: as above.
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
        let pieces = Scattered {
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
                // The next piece takes the place of one that every lane has used.
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
    // The queries of the next part come after all lanes have used these.
    arch::sync_warp(arch::FULL);
    code
}

/// The tokens of the last page, which is in GPU memory, where the part has them.
#[inline(always)]
fn tail(attention: &PagedAttention, part: &Part) -> Option<(u64, u32)> {
    if attention.tail == 0 || part.split + 1 != attention.splits {
        return None;
    }
    // SAFETY: the host gives a count for each sequence.
    let count = unsafe { word(attention.tail_counts + u64::from(part.sequence) * 4) };
    Some((attention.tail_piece(part), count.min(attention.page_tokens)))
}

/// Puts the part's queries, times the scale, into the window: `MOST_ELEMENTS` numbers each.
#[inline(always)]
fn queries(attention: &PagedAttention, part: &Part, window: Window) {
    // SAFETY: the host gives all queries.
    let from = unsafe { Numbers::at(attention.queries) };
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

/// What a lane has added up: four elements of each query, over the tokens that are its share. Products are in units of
/// the logarithm to the base of two.
struct Sums {
    largest: [f32; QUERIES],
    total: [f32; QUERIES],
    sums: [[f32; EACH]; QUERIES],
}

impl Sums {
    #[inline(always)]
    fn new() -> Self {
        Self {
            largest: [LEAST; QUERIES],
            total: [0.0; QUERIES],
            sums: [[0.0; EACH]; QUERIES],
        }
    }

    /// Joins what the lanes have that hold the same elements of other tokens. Every lane calls it.
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

    /// To the part's place: the elements, the largest product, and the sum of the weights.
    #[inline(always)]
    fn store(&self, attention: &PagedAttention, part: &Part) {
        // SAFETY: the host gives room for each part.
        let to = unsafe { Numbers::at(attention.partial) };
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

/// Adds `count` tokens, whose keys begin at `keys` and whose values lie behind the keys of a whole page. Every lane of the
/// warp calls it.
#[inline(always)]
fn tokens(attention: &PagedAttention, window: Window, sums: &mut Sums, keys: u64, count: u32) {
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
    // All lanes go round as often.
    let mut first = 0;
    while first < count {
        let (mut key, mut value) = ([[0; 2]; LOADS], [[0; 2]; LOADS]);
        four!(I => {
            let token = base + I as u32 * step;
            let there = token < count && element < elements;
            let at = keys + u64::from(token * elements + element) * 2;
            // SAFETY: inside the piece, or not loaded.
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
                let product = sum_of(weights[Q][I], lane_shift);
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

/// The sum over the lanes that hold the elements of one token: 8, 16 or 32.
#[inline(always)]
fn sum_of(value: f32, lane_shift: u32) -> f32 {
    let mut sum = value;
    let add = |sum: f32, bits: u32| {
        sum + f32::from_bits(arch::butterfly(arch::FULL, sum.to_bits(), bits))
    };
    if lane_shift == 5 {
        sum = add(sum, 16);
    }
    if lane_shift >= 4 {
        sum = add(sum, 8);
    }
    sum = add(sum, 4);
    sum = add(sum, 2);
    add(sum, 1)
}

/// Joins the parts of each query: a warp takes a query of a head at a time. What has no token at all is zero.
///
/// # Safety
/// What [`PagedAttention`] names is there, and `nvme_attention_paged` has run.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_attention_join(attention: PagedAttention) {
    // SAFETY: the caller's.
    let (from, to) = unsafe { (Numbers::at(attention.partial), Numbers::at(attention.y)) };
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
