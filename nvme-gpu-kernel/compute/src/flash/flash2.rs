//! Attention by the tensor cores (FlashAttention-2): scores, softmax and results of 32 queries stay in the registers
//! of a warp. Scores never lie in memory, and the next tile of keys is copied while one is used, with one barrier for
//! each tile.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::arch::{exp2, maximum, mma, opaque, packed, store_pair};
use super::keys::keys_of;
use super::{FLASH2_KEYS, FLASH2_ROWS, FlashParameters, TENSOR_THREADS, VectorLayout};
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
    nvme_attention_flash2_64_bf16, 64, true;
    nvme_attention_flash2_64_f16, 64, false;
    nvme_attention_flash2_128_bf16, 128, true;
    nvme_attention_flash2_128_f16, 128, false;
}

/// Number of keys whose scores a warp computes in one pass.
const PART: u32 = 32;

/// Softmax state of a lane for its four rows: the largest score, and the sum of the lane's own exponentials.
///
/// The sum covers only the keys that this lane has seen; the four lanes of a row add their sums once, at the
/// end, instead of in every turn.
#[derive(Clone, Copy)]
struct SoftmaxRows {
    largest: [f32; 4],
    total: [f32; 4],
}

/// The queries of a block, and the keys that they attend to.
#[derive(Clone, Copy)]
struct FlashBlock {
    sequence: u32,
    head: u32,
    /// The first query.
    first: u32,
    /// Keys of the sequence.
    keys: u32,
}

/// Computes the attention of a block's queries.
///
/// # Safety
/// As the kernels.
#[inline(always)]
unsafe fn attend<const DK: usize, const BF16: bool>(job: &FlashParameters) {
    let place = place(job);
    // SAFETY: this function's caller vouches for the counts that `FlashParameters` names.
    let place = unsafe {
        FlashBlock {
            keys: keys_of(job, place.sequence),
            ..place
        }
    };
    // SAFETY: the host launched with the bytes of the queries' tile and two tiles each of keys and values.
    let shared = unsafe { BlockShared::dynamic() };
    let lane = arch::lane();
    let mine = arch::thread() / 32 * 32;
    let keys_at = shared.at(FLASH2_ROWS * DK as u32 * 2);
    let stage = FLASH2_KEYS * DK as u32 * 2;
    let values_at = keys_at.at(2 * stage);
    let kv_head = job.kv_head(place.head);
    let last = place.first + FLASH2_ROWS - 1;
    let tiles = job.limit(last, place.keys).div_ceil(FLASH2_KEYS);
    let load = |from: &VectorLayout, to: BlockShared, tile: u32| {
        // SAFETY: `load_rows` reads only keys or values below the sequence's count, for which the host
        // vouches.
        unsafe {
            let first = tile * FLASH2_KEYS;
            load_rows::<DK, { FLASH2_KEYS as usize }>(
                job,
                from,
                (place.sequence, kv_head),
                (first, place.keys),
                to,
            );
        }
    };
    // SAFETY: the host vouches for the queries.
    unsafe {
        load_rows::<DK, { FLASH2_ROWS as usize }>(
            job,
            &job.queries,
            (place.sequence, place.head),
            (place.first, job.query_tokens),
            shared,
        );
    }
    if tiles > 0 {
        load(&job.keys, keys_at, 0);
        load(&job.values, values_at, 0);
    }
    commit();
    let scale = job.scale * LOG2_E;
    let mut sums = [[[0.0f32; 4]; 16]; 2];
    let mut rows = SoftmaxRows {
        largest: [f32::NEG_INFINITY; 4],
        total: [0.0; 4],
    };
    let mut tile = 0;
    while tile < tiles {
        let at = tile % 2 * stage;
        wait_for_copies::<0>();
        arch::sync_block();
        if tile + 1 < tiles {
            let next = (tile + 1) % 2 * stage;
            load(&job.keys, keys_at.at(next), tile + 1);
            load(&job.values, values_at.at(next), tile + 1);
        }
        commit();
        let mut part = 0;
        while part < FLASH2_KEYS / PART {
            let first = tile * FLASH2_KEYS + part * PART;
            let rows_at = at + part * PART * DK as u32 * 2;
            // The condition is uniform in the warp: none of its queries attends to these keys.
            if first >= job.limit(place.first + mine + 31, place.keys) {
                break;
            }
            let mut scores = [[[0.0f32; 4]; 4]; 2];
            products::<DK, BF16>(&mut scores, shared, keys_at.at(rows_at), mine, lane);
            if first + PART > job.limit(place.first + mine, place.keys) {
                mask(job, &place, &mut scores, first, mine, lane);
            }
            soften::<DK>(&mut scores, &mut rows, &mut sums, scale);
            weigh::<DK, BF16>(&mut sums, &scores, values_at.at(rows_at), lane);
            part += 1;
        }
        tile += 1;
    }
    wait_for_copies::<0>();
    // SAFETY: the host vouches for the results.
    unsafe { store::<DK, BF16>(job, &place, &sums, &rows, mine, lane) };
}

/// Returns the block's share of the work. Blocks with many keys start first, so that the last ones to finish
/// are short.
#[inline(always)]
fn place(job: &FlashParameters) -> FlashBlock {
    let tiles = job.query_tokens.div_ceil(FLASH2_ROWS).max(1);
    let (block, heads) = (arch::block(), job.heads.max(1));
    let (tile, rest) = (block % tiles, block / tiles);
    let (head, sequence) = (rest % heads, rest / heads);
    let tile = if job.causal == 0 {
        tile
    } else {
        tiles - 1 - tile
    };
    FlashBlock {
        sequence,
        head,
        first: tile * FLASH2_ROWS,
        keys: 0,
    }
}

/// Returns the offset of 16 bytes of a row in a tile. The XOR swizzle puts the same column of eight
/// consecutive rows into different banks.
#[inline(always)]
fn chunk<const DK: usize>(row: u32, chunk: u32) -> u32 {
    row * DK as u32 * 2 + ((chunk ^ (row & 7)) * 16)
}

/// Starts to copy `ROWS` vectors from vector `first` on, zeros for those from `count` on and for elements
/// past the head's.
///
/// # Safety
/// The vectors below `count` are allocated.
#[inline(always)]
unsafe fn load_rows<const DK: usize, const ROWS: usize>(
    job: &FlashParameters,
    from: &VectorLayout,
    (sequence, head): (u32, u32),
    (first, count): (u32, u32),
    to: BlockShared,
) {
    let chunks = DK as u32 / 8;
    let thread = opaque(arch::thread());
    let (column, row) = (thread % chunks, thread / chunks);
    let step = TENSOR_THREADS / chunks;
    let begin = from.at(sequence, head, 0);
    let has_column = column * 8 < job.head_elements;
    let source = begin + u64::from(column) * 16 + u64::from(first + row) * from.token * 2;
    let advance = u64::from(step) * from.token * 2;
    let target = to.at(chunk::<DK>(row, column));
    un!(i in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15] {
        if i * (TENSOR_THREADS as usize * 8 / DK) < ROWS {
            let below = i as u32 * step;
            let is_there = has_column && first + row + below < count;
            let (address, bytes) = if is_there { (source + i as u64 * advance, 16) } else { (begin, 0) };
            // SAFETY: the target is inside the tile; the source is a vector below `count`, or zero bytes are
            // copied. Steps are multiples of 8 rows, so the swizzle is the same.
            unsafe { target.at(below * DK as u32 * 2).copy16(address, bytes) };
        }
    });
}

/// Computes the scores of the warp's 32 queries and [`PART`] keys.
#[inline(always)]
fn products<const DK: usize, const BF16: bool>(
    scores: &mut [[[f32; 4]; 4]; 2],
    queries: BlockShared,
    keys: BlockShared,
    mine: u32,
    lane: u32,
) {
    let queries = queries
        .at(chunk::<DK>(mine + (lane & 15), lane >> 4))
        .opaque();
    let keys = keys
        .at(chunk::<DK>(
            (lane & 7) + ((lane >> 4) << 3),
            (lane >> 3) & 1,
        ))
        .opaque();
    un!(k in [0, 1, 2, 3, 4, 5, 6, 7] {
        if k * 16 < DK {
            // The swizzle repeats after eight rows, so a fixed offset reaches the row 16 further on.
            let queries = queries.flip(k as u32 * 32);
            let a = [queries.matrices4(), queries.at(16 * DK as u32 * 2).matrices4()];
            let keys = keys.flip(k as u32 * 32);
            un!(j in [0, 1] {
                let b = keys.at(j as u32 * 16 * DK as u32 * 2).matrices4();
                un!(m in [0, 1] {
                    mma(&mut scores[m][2 * j], a[m], [b[0], b[1]], BF16);
                    mma(&mut scores[m][2 * j + 1], a[m], [b[2], b[3]], BF16);
                });
            });
        }
    });
}

/// Replaces scores of keys that a query does not attend to by minus infinity.
#[inline(always)]
fn mask(
    job: &FlashParameters,
    place: &FlashBlock,
    scores: &mut [[[f32; 4]; 4]; 2],
    first: u32,
    mine: u32,
    lane: u32,
) {
    let row = place.first + mine + lane / 4;
    let column = first + lane % 4 * 2;
    un!(m in [0, 1] { un!(h in [0, 1] {
        let limit = job.limit(row + m as u32 * 16 + h as u32 * 8, place.keys);
        un!(n in [0, 1, 2, 3] { un!(e in [0, 1] {
            if column + n as u32 * 8 + e as u32 >= limit {
                scores[m][n][h * 2 + e] = f32::NEG_INFINITY;
            }
        }); });
    }); });
}

/// Converts scores to exponentials relative to the largest score so far, and rescales the sums if that score
/// grew.
#[inline(always)]
fn soften<const DK: usize>(
    scores: &mut [[[f32; 4]; 4]; 2],
    rows: &mut SoftmaxRows,
    sums: &mut [[[f32; 4]; 16]; 2],
    scale: f32,
) {
    let mut largest = rows.largest;
    un!(m in [0, 1] { un!(h in [0, 1] {
        un!(n in [0, 1, 2, 3] {
            let pair = maximum(scores[m][n][h * 2], scores[m][n][h * 2 + 1]);
            largest[m * 2 + h] = maximum(largest[m * 2 + h], pair);
        });
        largest[m * 2 + h] = of_four(largest[m * 2 + h], maximum);
    }); });
    let mut grown = false;
    un!(r in [0, 1, 2, 3] { grown |= largest[r] > rows.largest[r]; });
    // The branch is uniform in the warp, as the tensor core operations after it require.
    if arch::ballot(arch::FULL, grown) != 0 {
        un!(m in [0, 1] { un!(h in [0, 1] {
            let r = m * 2 + h;
            let by = if largest[r] > rows.largest[r] { exp2((rows.largest[r] - largest[r]) * scale) } else { 1.0 };
            rows.total[r] *= by;
            un!(n in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15] {
                if n * 8 < DK {
                    sums[m][n][h * 2] *= by;
                    sums[m][n][h * 2 + 1] *= by;
                }
            });
        }); });
        rows.largest = largest;
    }
    un!(m in [0, 1] { un!(h in [0, 1] {
        let r = m * 2 + h;
        // A row without any key yet has the largest score minus infinity; its exponentials must be 0, not
        // NaN.
        let below = if largest[r] == f32::NEG_INFINITY { 0.0 } else { -largest[r] * scale };
        un!(n in [0, 1, 2, 3] { un!(e in [0, 1] {
            let share = exp2(fma(scores[m][n][h * 2 + e], scale, below));
            scores[m][n][h * 2 + e] = share;
            rows.total[r] += share;
        }); });
    }); });
}

/// Combines a value over the four lanes of a row.
#[inline(always)]
fn of_four(value: f32, join: impl Fn(f32, f32) -> f32) -> f32 {
    let other =
        |value: f32, bits| f32::from_bits(arch::butterfly(arch::FULL, value.to_bits(), bits));
    let value = join(value, other(value, 1));
    join(value, other(value, 2))
}

/// Adds the values of [`PART`] keys, weighted by their exponentials.
#[inline(always)]
fn weigh<const DK: usize, const BF16: bool>(
    sums: &mut [[[f32; 4]; 16]; 2],
    shares: &[[[f32; 4]; 4]; 2],
    values: BlockShared,
    lane: u32,
) {
    let values = values.at(chunk::<DK>(lane & 15, lane >> 4)).opaque();
    un!(k in [0, 1] {
        let mut a = [[0u32; 4]; 2];
        un!(m in [0, 1] {
            let (low, high) = (shares[m][2 * k], shares[m][2 * k + 1]);
            a[m] = [
                packed(low[0], low[1], BF16),
                packed(low[2], low[3], BF16),
                packed(high[0], high[1], BF16),
                packed(high[2], high[3], BF16),
            ];
        });
        let values = values.at(k as u32 * 16 * DK as u32 * 2);
        un!(n in [0, 1, 2, 3, 4, 5, 6, 7] {
            if n * 16 < DK {
                let b = values.flip(n as u32 * 32).matrices4_transposed();
                un!(m in [0, 1] {
                    mma(&mut sums[m][2 * n], a[m], [b[0], b[1]], BF16);
                    mma(&mut sums[m][2 * n + 1], a[m], [b[2], b[3]], BF16);
                });
            }
        });
    });
}

/// Stores the results of the warp's queries.
///
/// # Safety
/// The rows of results are allocated.
#[inline(always)]
unsafe fn store<const DK: usize, const BF16: bool>(
    job: &FlashParameters,
    place: &FlashBlock,
    sums: &[[[f32; 4]; 16]; 2],
    rows: &SoftmaxRows,
    mine: u32,
    lane: u32,
) {
    let column = lane % 4 * 2;
    un!(m in [0, 1] { un!(h in [0, 1] {
        let r = m * 2 + h;
        let total = of_four(rows.total[r], |a, b| a + b);
        let by = if total > 0.0 { 1.0 / total } else { total };
        let row = place.first + mine + m as u32 * 16 + h as u32 * 8 + lane / 4;
        if row < job.query_tokens {
            let to = job.y.at(place.sequence, place.head, row) + u64::from(column) * 2;
            un!(n in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15] {
                if n * 8 < DK && n as u32 * 8 < job.head_elements {
                    let (low, high) = (sums[m][n][h * 2] * by, sums[m][n][h * 2 + 1] * by);
                    // SAFETY: the host vouches for the row of results; its elements are a multiple of 8, so
                    // pairs stay inside.
                    unsafe { store_pair(to + n as u64 * 16, low, high, BF16) };
                }
            });
        }
    }); });
}
