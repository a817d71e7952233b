//! The two products of attention by tiles in shared memory: each number is loaded once for 64 sums. The
//! scores are in memory.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::arch::{half, store_half};
use super::keys::keys_of;
use super::{FlashParameters, TILE};
use crate::arch::FloatArray;
use crate::tile::{BlockShared, fma, un};
use nvme_gpu_kernel::{arch, entry};

/// Number of terms of the sums in shared memory at once.
const DEPTH: u32 = 16;
/// Distance of terms in shared memory, in numbers: four more than a tile has, so that terms start in
/// different banks.
const STRIDE: u32 = TILE + 4;

/// The tile of a block: rows are queries of a head, columns are keys or elements.
#[derive(Clone, Copy)]
struct TiledBlock {
    sequence: u32,
    head: u32,
    row: u32,
    column: u32,
    keys: u32,
}

/// Returns the block's tile.
///
/// # Safety
/// The counts that [`FlashParameters::counts`] names are allocated.
#[inline(always)]
unsafe fn place(job: &FlashParameters, columns: u32) -> TiledBlock {
    let across = columns.div_ceil(TILE).max(1);
    let down = job.query_tokens.div_ceil(TILE).max(1);
    let (column, rest) = (arch::block() % across, arch::block() / across);
    let (row, rest) = (rest % down, rest / down);
    let heads = job.heads.max(1);
    TiledBlock {
        sequence: rest / heads,
        head: rest % heads,
        row: row * TILE,
        column: column * TILE,
        // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
        keys: unsafe { keys_of(job, rest / heads) },
    }
}

/// Computes the sums of a tile, 4 by 4 for each thread: `a(row, term)` times `b(term, column)` of `terms`
/// terms. `a` is loaded row by row, `b` column by column if `BY_COLUMN` is true.
#[inline(always)]
fn products<const BY_COLUMN: bool>(
    terms: u32,
    a: impl Fn(u32, u32) -> f32,
    b: impl Fn(u32, u32) -> f32,
) -> [[f32; 4]; 4] {
    // SAFETY: the host launched with the bytes of two tiles.
    let of_a = unsafe { BlockShared::dynamic() };
    let of_b = of_a.at(DEPTH * STRIDE * 4);
    let thread = arch::thread();
    let (x, y) = (thread % 16 * 4, thread / 16 * 4);
    let mut sums = [[0.0f32; 4]; 4];
    let mut first = 0;
    while first < terms {
        let mut at = thread;
        while at < DEPTH * TILE {
            let (row, term) = (at / DEPTH, at % DEPTH);
            of_a.at((term * STRIDE + row) * 4)
                .store(a(row, first + term));
            let (column, term) = match BY_COLUMN {
                true => (at / DEPTH, at % DEPTH),
                false => (at % TILE, at / TILE),
            };
            of_b.at((term * STRIDE + column) * 4)
                .store(b(first + term, column));
            at += arch::block_threads();
        }
        arch::sync_block();
        let mut term = 0;
        while term < DEPTH {
            let (left, right) = (
                of_a.at((term * STRIDE + y) * 4).load4(),
                of_b.at((term * STRIDE + x) * 4).load4(),
            );
            un!(i in [0, 1, 2, 3] { un!(j in [0, 1, 2, 3] {
                sums[i][j] = fma(left[i], right[j], sums[i][j]);
            }); });
            term += 1;
        }
        arch::sync_block();
        first += DEPTH;
    }
    sums
}

entry! {
    /// Computes a tile of scores for each block.
    ///
    /// # Safety
    /// All memory that [`FlashParameters`] names is allocated and stays so while the kernel runs; the launch has the
    /// shared memory of two tiles.
    pub unsafe fn nvme_attention_scores_tiled(job: FlashParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let (place, scores) = unsafe { (place(&job, job.key_tokens), FloatArray::at(job.workspace)) };
        let last = job.limit(place.row + TILE - 1, place.keys);
        if place.column >= last {
            return;
        }
        let is_bf16 = job.is_bf16 != 0;
        let kv_head = job.kv_head(place.head);
        let sums = products::<true>(
            job.head_elements,
            |row, term| {
                let is_there = place.row + row < job.query_tokens && term < job.head_elements;
                let at = || job.queries.at(place.sequence, place.head, place.row + row);
                if is_there {
                    // SAFETY: the host vouches for the queries; `is_there` limits row and term to them.
                    unsafe { half(at() + u64::from(term) * 2, is_bf16) }
                } else {
                    0.0
                }
            },
            |term, column| {
                let is_there = place.column + column < place.keys && term < job.head_elements;
                let at = || job.keys.at(place.sequence, kv_head, place.column + column);
                if is_there {
                    // SAFETY: the host vouches for keys below the sequence's count; `is_there` limits the column to
                    // them.
                    unsafe { half(at() + u64::from(term) * 2, is_bf16) }
                } else {
                    0.0
                }
            },
        );
        let (x, y) = (arch::thread() % 16 * 4, arch::thread() / 16 * 4);
        let first = (place.sequence * job.heads + place.head) as u64 * u64::from(job.query_tokens);
        un!(i in [0, 1, 2, 3] { un!(j in [0, 1, 2, 3] {
            let (token, key) = (place.row + y + i as u32, place.column + x + j as u32);
            if token < job.query_tokens && key < job.limit(token, place.keys) {
                let row = first + u64::from(token);
                scores.store(row * u64::from(job.key_tokens) + u64::from(key), sums[i][j] * job.scale);
            }
        }); });
    }
}

entry! {
    /// Computes a tile of results for each block.
    ///
    /// # Safety
    /// As [`nvme_attention_scores_tiled`].
    pub unsafe fn nvme_attention_values_tiled(job: FlashParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let (place, shares) = unsafe {
            (
                place(&job, job.head_elements),
                FloatArray::at(job.workspace),
            )
        };
        let is_bf16 = job.is_bf16 != 0;
        let kv_head = job.kv_head(place.head);
        let first = (place.sequence * job.heads + place.head) as u64 * u64::from(job.query_tokens);
        let terms = job.limit(place.row + TILE - 1, place.keys);
        let sums = products::<false>(
            terms,
            |row, term| {
                let token = place.row + row;
                let is_there = token < job.query_tokens && term < job.key_tokens;
                let row = (first + u64::from(token)) * u64::from(job.key_tokens);
                if is_there {
                    shares.load(row + u64::from(term))
                } else {
                    0.0
                }
            },
            |term, column| {
                let is_there = place.column + column < job.head_elements && term < place.keys;
                let at = || job.values.at(place.sequence, kv_head, term);
                let element = u64::from(place.column + column);
                if is_there {
                    // SAFETY: the host vouches for values below the sequence's count; `is_there` limits the term to
                    // them.
                    unsafe { half(at() + element * 2, is_bf16) }
                } else {
                    0.0
                }
            },
        );
        let (x, y) = (arch::thread() % 16 * 4, arch::thread() / 16 * 4);
        un!(i in [0, 1, 2, 3] { un!(j in [0, 1, 2, 3] {
            let (token, element) = (place.row + y + i as u32, place.column + x + j as u32);
            if token < job.query_tokens && element < job.head_elements {
                let to = job.y.at(place.sequence, place.head, token) + u64::from(element) * 2;
                // SAFETY: the host vouches for the results; token and element are checked above.
                unsafe { store_half(to, sums[i][j], is_bf16) };
            }
        }); });
    }
}
