//! Attention of few queries over many keys: keys and values are read once for all heads that share them,
//! split among many blocks.
//!
//! The queries of the heads of a group are the rows of one product of the tensor cores. Each warp copies and
//! uses its own tiles of keys without waiting for the other warps; the warps' partial results are joined in
//! shared memory, the blocks' by a second kernel. If a group has more than 16 rows, each warp of a block
//! computes 16 of them, from tiles that all warps have copied.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::arch::{exp2, maximum, mma, opaque, packed, store_half, store_pair};
use super::keys::keys_of;
use super::{
    DECODE_KEYS, DECODE_ROWS, DECODE_STAGES, FlashParameters, TENSOR_THREADS, VectorLayout,
    WIDE_ROWS, decode_rows as block_rows,
};
use crate::arch::{FloatArray, sum_of_warp, warp};
use crate::tile::{BlockShared, commit, fma, un, wait_for_copies};
use core::f32::consts::LOG2_E;
use nvme_gpu_kernel::{arch, entry};

macro_rules! kernels {
    ($($name:ident, $elements:literal, $is_bf16:literal;)*) => { $( entry! {
        /// Computes attention by the tensor cores.
        ///
        /// # Safety
        /// All memory that [`FlashParameters`] names is allocated and stays so while the kernel runs; the block has
        /// [`TENSOR_THREADS`] threads and the shared memory of its tiles.
        pub unsafe fn $name(job: FlashParameters) {
            // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
            unsafe { attend::<$elements, $is_bf16>(&job) }
        }
    } )* };
}

kernels! {
    nvme_multi_query_attention_64_bf16, 64, true;
    nvme_multi_query_attention_64_f16, 64, false;
    nvme_multi_query_attention_128_bf16, 128, true;
    nvme_multi_query_attention_128_f16, 128, false;
}

const WARPS: u32 = TENSOR_THREADS / 32;
/// Returns the distance of two rows in shared memory, in bytes: a multiple of 16 but not of 128, so that rows
/// start in different banks.
const fn row_bytes(elements: usize) -> u32 {
    elements as u32 * 4 + 16
}

/// The queries and keys of a block.
#[derive(Clone, Copy)]
struct DecodeBlock {
    sequence: u32,
    kv_head: u32,
    /// First row of the group: heads of a token are consecutive rows.
    first: u32,
    split: u32,
    /// Keys of the sequence.
    keys: u32,
}

/// The partial results of a lane, for the rows `lane / 4` and `lane / 4 + 8`.
///
/// Partial results over different keys can be joined in any order: each is rescaled to the larger of the two
/// largest scores, and the sums are added.
struct DecodeSums {
    values: [[f32; 4]; 16],
    largest: [f32; 2],
    total: [f32; 2],
}

/// Returns the number of query heads that share keys.
#[inline(always)]
fn group(job: &FlashParameters) -> u32 {
    (job.heads / job.kv_heads.max(1)).max(1)
}

/// Returns head and token of a row of the group.
#[inline(always)]
fn of_row(job: &FlashParameters, place: &DecodeBlock, row: u32) -> (u32, u32) {
    let group = group(job);
    (place.kv_head * group + row % group, row / group)
}

/// Computes the block's share of attention.
///
/// # Safety
/// As the kernels.
#[inline(always)]
unsafe fn attend<const DK: usize, const BF16: bool>(job: &FlashParameters) {
    let place = place(job);
    // SAFETY: this function's caller vouches for the counts that `FlashParameters` names.
    let place = unsafe {
        DecodeBlock {
            keys: keys_of(job, place.sequence),
            ..place
        }
    };
    let rows = group(job) * job.query_tokens;
    let of_block = block_rows(rows);
    let last = least(place.first + of_block, rows) - 1;
    // The tiles of this split: those that the last row needs, in equal parts.
    let all = job
        .limit(of_row(job, &place, last).1, place.keys)
        .div_ceil(DECODE_KEYS);
    let each = all.div_ceil(job.splits.max(1));
    let begin = place.split * each;
    let end = least(begin + each, all);
    // SAFETY: the host launched with the bytes of a tile of queries and the stages of each warp.
    let shared = unsafe { BlockShared::dynamic() };
    let (lane, warp) = (arch::lane(), arch::thread() / 32);
    let tile = DECODE_KEYS * DK as u32 * 2;
    let stages = shared.at(WIDE_ROWS * DK as u32 * 2);
    let stage =
        |warp: u32, step: u32| stages.at((warp * DECODE_STAGES + step % DECODE_STAGES) * 2 * tile);
    let load = |step: u32| {
        let at = begin + step * WARPS + warp;
        if at < end {
            let to = stage(warp, step);
            // SAFETY: `load_tile` reads only keys and values below the sequence's count, for which the host
            // vouches.
            unsafe {
                load_tile::<DK>(job, &job.keys, &place, at, to);
                load_tile::<DK>(job, &job.values, &place, at, to.at(tile));
            }
        }
        commit();
    };
    // SAFETY: the host vouches for the queries.
    unsafe { load_queries::<DK>(job, &place, rows, shared) };
    load(0);
    load(1);
    let mut sums = DecodeSums {
        values: [[0.0; 4]; 16],
        largest: [f32::NEG_INFINITY; 2],
        total: [0.0; 2],
    };
    wait_for_copies::<1>();
    arch::sync_block();
    // With many rows each warp computes some of them from the tiles of all warps; with few, each warp
    // computes all rows from its own tiles.
    let is_wide = of_block > DECODE_ROWS;
    let mine = if is_wide { warp * DECODE_ROWS } else { 0 };
    let (from, to) = if is_wide {
        (0, WARPS)
    } else {
        (warp, warp + 1)
    };
    let queries = fragments::<DK>(shared.at(mine * DK as u32 * 2), lane);
    let mut step = 0;
    while begin + step * WARPS + from < end {
        wait_for_copies::<1>();
        match is_wide {
            true => arch::sync_block(),
            false => arch::sync_warp(arch::FULL),
        }
        load(step + 2);
        let mut of = from;
        while of < to && begin + step * WARPS + of < end {
            let at = stage(of, step);
            let first = (begin + step * WARPS + of) * DECODE_KEYS;
            let scores = products::<DK, BF16>(&queries, at, lane);
            let scores = masked(job, &place, scores, (place.first + mine, first), lane);
            add::<DK, BF16>(&mut sums, scores, at.at(tile), job.scale * LOG2_E, lane);
            of += 1;
        }
        step += 1;
    }
    wait_for_copies::<0>();
    // SAFETY: the host vouches for the results, and for the workspace if the keys are split.
    unsafe { join_warps::<DK, BF16>(job, &place, &sums, rows, shared) };
}

#[inline(always)]
fn least(a: u32, b: u32) -> u32 {
    if a < b { a } else { b }
}

#[inline(always)]
fn place(job: &FlashParameters) -> DecodeBlock {
    let rows = group(job) * job.query_tokens;
    let tiles = rows.div_ceil(block_rows(rows)).max(1);
    let (splits, kv_heads) = (job.splits.max(1), job.kv_heads.max(1));
    let block = arch::block();
    let (tile, rest) = (block % tiles, block / tiles);
    let (kv_head, rest) = (rest % kv_heads, rest / kv_heads);
    DecodeBlock {
        sequence: rest / splits,
        kv_head,
        first: tile * block_rows(rows),
        split: rest % splits,
        keys: 0,
    }
}

/// Returns the offset of 16 bytes of a row in a tile. The XOR swizzle puts the same column of eight
/// consecutive rows into different banks.
#[inline(always)]
fn chunk<const DK: usize>(row: u32, chunk: u32) -> u32 {
    row * DK as u32 * 2 + ((chunk ^ (row & 7)) * 16)
}

/// Starts to copy a warp's tile of keys or values, zeros for keys past the end.
///
/// # Safety
/// The vectors below the sequence's count are allocated.
#[inline(always)]
unsafe fn load_tile<const DK: usize>(
    job: &FlashParameters,
    from: &VectorLayout,
    place: &DecodeBlock,
    tile: u32,
    to: BlockShared,
) {
    let chunks = DK as u32 / 8;
    let lane = opaque(arch::lane());
    let (column, row) = (lane % chunks, lane / chunks);
    let rows = 32 / chunks;
    let begin = from.at(place.sequence, place.kv_head, 0);
    let has_column = column * 8 < job.head_elements;
    let first = tile * DECODE_KEYS + row;
    let source = begin + u64::from(column) * 16 + u64::from(first) * from.token * 2;
    un!(i in [0, 1, 2, 3, 4, 5, 6, 7] {
        if i * 256 / DK < DECODE_KEYS as usize {
            let below = i as u32 * rows;
            let is_there = has_column && first + below < place.keys;
            let further = u64::from(below) * from.token * 2;
            let (address, bytes) = if is_there { (source + further, 16) } else { (begin, 0) };
            // SAFETY: the target is inside the tile; the source is a vector below the count, or zero bytes
            // are copied.
            unsafe { to.at(chunk::<DK>(row + below, column)).copy16(address, bytes) };
        }
    });
}

/// Starts to copy the block's queries, zeros for rows past the end.
///
/// # Safety
/// The queries are allocated.
#[inline(always)]
unsafe fn load_queries<const DK: usize>(
    job: &FlashParameters,
    place: &DecodeBlock,
    rows: u32,
    to: BlockShared,
) {
    let chunks = DK as u32 / 8;
    let mut at = arch::thread();
    while at < block_rows(rows) * chunks {
        let (column, row) = (at % chunks, at / chunks);
        let is_there = place.first + row < rows && column * 8 < job.head_elements;
        let (head, token) = if is_there {
            of_row(job, place, place.first + row)
        } else {
            (0, 0)
        };
        let from = job.queries.at(place.sequence, head, token) + u64::from(column) * 16;
        let (from, bytes) = if is_there {
            (from, 16)
        } else {
            (job.queries.address, 0)
        };
        // SAFETY: the target is inside the tile; the source is a query, or zero bytes are copied.
        unsafe { to.at(chunk::<DK>(row, column)).copy16(from, bytes) };
        at += TENSOR_THREADS;
    }
}

/// Loads the queries as operand fragments of the tensor cores.
#[inline(always)]
fn fragments<const DK: usize>(queries: BlockShared, lane: u32) -> [[u32; 4]; 8] {
    let mut all = [[0; 4]; 8];
    let at = queries.at(chunk::<DK>(lane & 15, lane >> 4));
    un!(k in [0, 1, 2, 3, 4, 5, 6, 7] {
        if k * 16 < DK {
            all[k] = at.flip(k as u32 * 32).matrices4();
        }
    });
    all
}

/// Computes the scores of 16 rows and 16 keys.
#[inline(always)]
fn products<const DK: usize, const BF16: bool>(
    queries: &[[u32; 4]; 8],
    keys: BlockShared,
    lane: u32,
) -> [[f32; 4]; 2] {
    // Two sums of each score, so that consecutive tensor core operations do not wait for each other.
    let mut scores = [[[0.0; 4]; 2]; 2];
    let keys = keys.at(chunk::<DK>(
        (lane & 7) + ((lane >> 4) << 3),
        (lane >> 3) & 1,
    ));
    un!(k in [0, 1, 2, 3, 4, 5, 6, 7] {
        if k * 16 < DK {
            let b = keys.flip(k as u32 * 32).matrices4();
            mma(&mut scores[k % 2][0], queries[k], [b[0], b[1]], BF16);
            mma(&mut scores[k % 2][1], queries[k], [b[2], b[3]], BF16);
        }
    });
    let mut sum = [[0.0; 4]; 2];
    un!(n in [0, 1] { un!(e in [0, 1, 2, 3] { sum[n][e] = scores[0][n][e] + scores[1][n][e]; }); });
    sum
}

/// Replaces scores of keys that a row does not attend to by minus infinity.
#[inline(always)]
fn masked(
    job: &FlashParameters,
    place: &DecodeBlock,
    scores: [[f32; 4]; 2],
    (first_row, first): (u32, u32),
    lane: u32,
) -> [[f32; 4]; 2] {
    let mut scores = scores;
    let column = first + lane % 4 * 2;
    un!(h in [0, 1] {
        let row = first_row + lane / 4 + h as u32 * 8;
        let limit = job.limit(of_row(job, place, row).1, place.keys);
        un!(n in [0, 1] { un!(e in [0, 1] {
            if column + n as u32 * 8 + e as u32 >= limit {
                scores[n][h * 2 + e] = f32::NEG_INFINITY;
            }
        }); });
    });
    scores
}

/// Adds the values of 16 keys to the sums, and rescales them for a new largest score.
#[inline(always)]
fn add<const DK: usize, const BF16: bool>(
    sums: &mut DecodeSums,
    scores: [[f32; 4]; 2],
    values: BlockShared,
    scale: f32,
    lane: u32,
) {
    let mut shares = scores;
    un!(h in [0, 1] {
        let of_keys = maximum(
            maximum(scores[0][h * 2], scores[0][h * 2 + 1]),
            maximum(scores[1][h * 2], scores[1][h * 2 + 1]),
        );
        let largest = maximum(sums.largest[h], of_four(of_keys, maximum));
        let by = if largest > sums.largest[h] { exp2((sums.largest[h] - largest) * scale) } else { 1.0 };
        let below = if largest == f32::NEG_INFINITY { 0.0 } else { -largest * scale };
        sums.largest[h] = largest;
        sums.total[h] *= by;
        un!(n in [0, 1] { un!(e in [0, 1] {
            let share = exp2(fma(scores[n][h * 2 + e], scale, below));
            shares[n][h * 2 + e] = share;
            sums.total[h] += share;
        }); });
        un!(n in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15] {
            if n * 8 < DK {
                sums.values[n][h * 2] *= by;
                sums.values[n][h * 2 + 1] *= by;
            }
        });
    });
    let a = [
        packed(shares[0][0], shares[0][1], BF16),
        packed(shares[0][2], shares[0][3], BF16),
        packed(shares[1][0], shares[1][1], BF16),
        packed(shares[1][2], shares[1][3], BF16),
    ];
    let values = values.at(chunk::<DK>(lane & 15, lane >> 4));
    un!(n in [0, 1, 2, 3, 4, 5, 6, 7] {
        if n * 16 < DK {
            let b = values.flip(n as u32 * 32).matrices4_transposed();
            mma(&mut sums.values[2 * n], a, [b[0], b[1]], BF16);
            mma(&mut sums.values[2 * n + 1], a, [b[2], b[3]], BF16);
        }
    });
}

/// Combines a value over the four lanes of a row.
#[inline(always)]
fn of_four(value: f32, join: impl Fn(f32, f32) -> f32) -> f32 {
    let other =
        |value: f32, bits| f32::from_bits(arch::butterfly(arch::FULL, value.to_bits(), bits));
    let value = join(value, other(value, 1));
    join(value, other(value, 2))
}

/// Stores the sums of all warps in shared memory, then joins them: each thread some elements of a row.
///
/// # Safety
/// Results, or the workspace, are allocated.
#[inline(always)]
unsafe fn join_warps<const DK: usize, const BF16: bool>(
    job: &FlashParameters,
    place: &DecodeBlock,
    sums: &DecodeSums,
    rows: u32,
    shared: BlockShared,
) {
    arch::sync_block();
    let (lane, of_block) = (arch::lane(), arch::thread() / 32);
    let bytes = row_bytes(DK);
    let of_warp = shared.at(of_block * DECODE_ROWS * bytes);
    un!(h in [0, 1] {
        let row = of_warp.at((lane / 4 + h as u32 * 8) * bytes);
        un!(n in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15] {
            if n * 8 < DK {
                let at = row.at((n as u32 * 8 + lane % 4 * 2) * 4);
                at.store(sums.values[n][h * 2]);
                at.at(4).store(sums.values[n][h * 2 + 1]);
            }
        });
        let total = of_four(sums.total[h], |a, b| a + b);
        if lane % 4 == 0 {
            row.at(DK as u32 * 4).store(sums.largest[h]);
            row.at(DK as u32 * 4 + 4).store(total);
        }
    });
    arch::sync_block();
    let scale = job.scale * LOG2_E;
    let is_wide = block_rows(rows) > DECODE_ROWS;
    let mut at = arch::thread();
    while at < block_rows(rows) * DK as u32 / 2 {
        let (row, element) = (at / (DK as u32 / 2), at % (DK as u32 / 2) * 2);
        let of_warp = |warp: u32| shared.at((warp * DECODE_ROWS + row % DECODE_ROWS) * bytes);
        let first = row / DECODE_ROWS;
        let warps = if is_wide { first..first + 1 } else { 0..WARPS };
        let (mut largest, mut warp) = (f32::NEG_INFINITY, warps.start);
        while warp < warps.end {
            largest = maximum(largest, of_warp(warp).at(DK as u32 * 4).load());
            warp += 1;
        }
        let (mut total, mut low, mut high) = (0.0, 0.0, 0.0);
        warp = warps.start;
        while warp < warps.end {
            let from = of_warp(warp);
            let of_part = from.at(DK as u32 * 4).load();
            let by = match of_part == f32::NEG_INFINITY {
                true => 0.0,
                false => exp2((of_part - largest) * scale),
            };
            total += by * from.at(DK as u32 * 4 + 4).load();
            low += by * from.at(element * 4).load();
            high += by * from.at(element * 4 + 4).load();
            warp += 1;
        }
        if place.first + row < rows && element < job.head_elements {
            let part = [low, high, largest, total];
            // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
            unsafe { put::<BF16>(job, place, place.first + row, element, part) };
        }
        at += TENSOR_THREADS;
    }
}

/// Stores two elements of a row: as the result, or in the workspace for the second kernel.
///
/// # Safety
/// Results, or the workspace, are allocated.
#[inline(always)]
unsafe fn put<const BF16: bool>(
    job: &FlashParameters,
    place: &DecodeBlock,
    row: u32,
    element: u32,
    [low, high, largest, total]: [f32; 4],
) {
    let (head, token) = of_row(job, place, row);
    if job.splits <= 1 {
        let by = if total > 0.0 { 1.0 / total } else { total };
        let to = job.y.at(place.sequence, head, token) + u64::from(element) * 2;
        // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
        unsafe { store_pair(to, low * by, high * by, BF16) };
        return;
    }
    let query = (place.sequence * job.heads + head) * job.query_tokens + token;
    let part = u64::from(query) * u64::from(job.splits) + u64::from(place.split);
    let first = part * u64::from(job.head_elements + 2);
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let parts = unsafe { FloatArray::at(job.workspace) };
    parts.store(first + u64::from(element), low);
    parts.store(first + u64::from(element) + 1, high);
    if element == 0 {
        parts.store(first + u64::from(job.head_elements), largest);
        parts.store(first + u64::from(job.head_elements) + 1, total);
    }
}

entry! {
    /// Joins the partial results of the splits. A warp takes one query a turn.
    ///
    /// # Safety
    /// All memory that [`FlashParameters`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_multi_query_join(job: FlashParameters) {
        let (mut query, warps) = warp();
        let lane = arch::lane();
        let scale = job.scale * LOG2_E;
        let elements = u64::from(job.head_elements);
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let parts = unsafe { FloatArray::at(job.workspace) };
        while query < job.rows() {
            let first = query * u64::from(job.splits) * (elements + 2);
            let at = |split: u32| first + u64::from(split) * (elements + 2);
            let mut largest = f32::NEG_INFINITY;
            let mut split = lane;
            while split < job.splits {
                largest = maximum(largest, parts.load(at(split) + elements));
                split += 32;
            }
            let largest = of_warp(largest);
            let by = |split: u32| match parts.load(at(split) + elements) {
                f32::NEG_INFINITY => 0.0,
                part => exp2((part - largest) * scale),
            };
            let mut total = 0.0;
            split = lane;
            while split < job.splits {
                total += by(split) * parts.load(at(split) + elements + 1);
                split += 32;
            }
            let total = sum_of_warp(total);
            let to = {
                let tokens = u64::from(job.query_tokens.max(1));
                let (rest, token) = (query / tokens, query % tokens);
                let heads = u64::from(job.heads.max(1));
                job.y
                    .at((rest / heads) as u32, (rest % heads) as u32, token as u32)
            };
            let mut element = u64::from(lane);
            while element < elements {
                let mut sum = 0.0;
                split = 0;
                while split < job.splits {
                    sum += by(split) * parts.load(at(split) + element);
                    split += 1;
                }
                let result = if total > 0.0 { sum / total } else { total };
                // SAFETY: the host vouches for the results; `element` is below `head_elements`.
                unsafe { store_half(to + element * 2, result, job.is_bf16 != 0) };
                element += 32;
            }
            query += warps;
        }
    }
}

/// Returns the largest of the warp's values.
#[inline(always)]
fn of_warp(value: f32) -> f32 {
    let (mut largest, mut bits) = (value, 16);
    while bits != 0 {
        let other = f32::from_bits(arch::butterfly(arch::FULL, largest.to_bits(), bits));
        largest = maximum(largest, other);
        bits /= 2;
    }
    largest
}
