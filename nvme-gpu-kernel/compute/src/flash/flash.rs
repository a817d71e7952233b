//! Attention in one kernel without scores in memory (FlashAttention): keys pass once, and the sums are
//! rescaled when a larger score appears.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::arch::{exp2, half, maximum, store_half};
use super::keys::keys_of;
use super::{FLASH_KEYS, FLASH_ROWS, FlashParameters, MOST_ELEMENTS};
use crate::tile::{BlockShared, fma, un};
use core::f32::consts::LOG2_E;
use nvme_gpu_kernel::{arch, entry};

/// Elements of a query in each thread: four threads share one query, in groups of four elements that are 16
/// apart.
const EACH: usize = 32;

entry! {
    /// Computes attention.
    ///
    /// # Safety
    /// All memory that [`FlashParameters`] names is allocated and stays so while the kernel runs; the launch has the
    /// shared memory of a tile of keys and one of values.
    pub unsafe fn nvme_attention_flash(job: FlashParameters) {
        let is_bf16 = job.is_bf16 != 0;
        let tiles = job.query_tokens.div_ceil(FLASH_ROWS).max(1);
        let (block, heads) = (arch::block(), job.heads.max(1));
        let (head, sequence) = (block / tiles % heads, block / tiles / heads);
        let first = block % tiles * FLASH_ROWS;
        let (row, quarter) = (arch::thread() / 4, arch::thread() % 4);
        let token = first + row;
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let keys = unsafe { keys_of(&job, sequence) };
        let has_query = token < job.query_tokens;
        let limit = if has_query { job.limit(token, keys) } else { 0 };
        let kv_head = job.kv_head(head);
        // SAFETY: the host launched with the bytes of both tiles.
        let keys_at = unsafe { BlockShared::dynamic() };
        let values_at = keys_at.at(FLASH_KEYS * MOST_ELEMENTS * 4);
        let (mut query, mut sums) = ([0.0f32; EACH], [0.0f32; EACH]);
        let from = job
            .queries
            .at(sequence, head, if has_query { token } else { 0 });
        un!(i in [0, 1, 2, 3, 4, 5, 6, 7] { un!(e in [0, 1, 2, 3] {
            let element = quarter * 4 + i as u32 * 16 + e as u32;
            if has_query && element < job.head_elements {
                // SAFETY: the host vouches for the queries, and `element` is below `head_elements`.
                query[i * 4 + e] = unsafe { half(from + u64::from(element) * 2, is_bf16) } * job.scale * LOG2_E;
            }
        }); });
        let (mut largest, mut total) = (f32::NEG_INFINITY, 0.0f32);
        let all = job.limit(first + FLASH_ROWS - 1, keys);
        let mut begin = 0;
        while begin < all {
            arch::sync_block();
            let mut at = arch::thread();
            while at < FLASH_KEYS * MOST_ELEMENTS {
                let (key, element) = (at / MOST_ELEMENTS, at % MOST_ELEMENTS);
                let is_there = begin + key < keys && element < job.head_elements;
                let load = |from: u64| match is_there {
                    // SAFETY: `is_there` limits the key to those below the sequence's count, for which the host
                    // vouches.
                    true => unsafe { half(from + u64::from(element) * 2, is_bf16) },
                    false => 0.0,
                };
                keys_at
                    .at(at * 4)
                    .store(load(job.keys.at(sequence, kv_head, begin + key)));
                values_at
                    .at(at * 4)
                    .store(load(job.values.at(sequence, kv_head, begin + key)));
                at += arch::block_threads();
            }
            arch::sync_block();
            let mut key = 0;
            while key < FLASH_KEYS {
                let at = (key * MOST_ELEMENTS + quarter * 4) * 4;
                let mut score = 0.0;
                un!(i in [0, 1, 2, 3, 4, 5, 6, 7] {
                    let four = keys_at.at(at + i as u32 * 64).load4();
                    un!(e in [0, 1, 2, 3] { score = fma(query[i * 4 + e], four[e], score); });
                });
                score += of_lane(score, 1);
                score += of_lane(score, 2);
                if begin + key < limit {
                    let next = maximum(largest, score);
                    let (before, share) = (exp2(largest - next), exp2(score - next));
                    largest = next;
                    total = total * before + share;
                    un!(i in [0, 1, 2, 3, 4, 5, 6, 7] {
                        let four = values_at.at(at + i as u32 * 64).load4();
                        un!(e in [0, 1, 2, 3] {
                            sums[i * 4 + e] = fma(share, four[e], sums[i * 4 + e] * before);
                        });
                    });
                }
                key += 1;
            }
            begin += FLASH_KEYS;
        }
        if !has_query {
            return;
        }
        let by = if total > 0.0 { 1.0 / total } else { total };
        let to = job.y.at(sequence, head, token);
        un!(i in [0, 1, 2, 3, 4, 5, 6, 7] { un!(e in [0, 1, 2, 3] {
            let element = quarter * 4 + i as u32 * 16 + e as u32;
            if element < job.head_elements {
                // SAFETY: the host vouches for the results, and `element` is below `head_elements`.
                unsafe { store_half(to + u64::from(element) * 2, sums[i * 4 + e] * by, is_bf16) };
            }
        }); });
    }
}

#[inline(always)]
fn of_lane(value: f32, bits: u32) -> f32 {
    f32::from_bits(arch::butterfly(arch::FULL, value.to_bits(), bits))
}
