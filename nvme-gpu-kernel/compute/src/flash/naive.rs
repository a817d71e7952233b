//! Attention by three kernels with all scores in memory between them: a thread, or a warp, computes one
//! number a turn.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::FlashParameters;
use super::arch::{exp2, half, maximum, store_half};
use super::keys::keys_of;
use crate::arch::{FloatArray, sum_of_warp, thread, warp};
use core::f32::consts::LOG2_E;
use nvme_gpu_kernel::{arch, entry};

/// Returns sequence, head and token of query `row`.
#[inline(always)]
pub fn query(job: &FlashParameters, row: u64) -> (u32, u32, u32) {
    let tokens = u64::from(job.query_tokens.max(1));
    let heads = u64::from(job.heads.max(1));
    let (rest, token) = (row / tokens, row % tokens);
    ((rest / heads) as u32, (rest % heads) as u32, token as u32)
}

entry! {
    /// Computes scores. A thread takes one score a turn.
    ///
    /// # Safety
    /// All memory that [`FlashParameters`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_attention_scores(job: FlashParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let scores = unsafe { FloatArray::at(job.workspace) };
        let keys = u64::from(job.key_tokens.max(1));
        let is_bf16 = job.is_bf16 != 0;
        let (mut at, threads) = thread();
        while at < job.rows() * u64::from(job.key_tokens) {
            let (row, key) = (at / keys, (at % keys) as u32);
            let (sequence, head, token) = query(&job, row);
            // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
            let there = unsafe { keys_of(&job, sequence) };
            if key < job.limit(token, there) {
                let q = job.queries.at(sequence, head, token);
                let k = job.keys.at(sequence, job.kv_head(head), key);
                let (mut sum, mut element) = (0.0, 0);
                while element < u64::from(job.head_elements) {
                    // SAFETY: the host vouches for the queries and for keys below the sequence's count; `limit`
                    // keeps the key below it.
                    sum += unsafe { half(q + element * 2, is_bf16) * half(k + element * 2, is_bf16) };
                    element += 1;
                }
                scores.store(at, sum * job.scale);
            }
            at += threads;
        }
    }
}

entry! {
    /// Converts a row of scores to softmax weights, zeros for keys that the query does not attend to. A warp
    /// takes one row a turn.
    ///
    /// # Safety
    /// All memory that [`FlashParameters`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_attention_shares(job: FlashParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let scores = unsafe { FloatArray::at(job.workspace) };
        let lane = arch::lane();
        let (mut row, warps) = warp();
        while row < job.rows() {
            let (sequence, _, token) = query(&job, row);
            // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
            let limit = job.limit(token, unsafe { keys_of(&job, sequence) });
            let first = row * u64::from(job.key_tokens);
            let (mut largest, mut key) = (f32::NEG_INFINITY, lane);
            while key < limit {
                largest = maximum(largest, scores.load(first + u64::from(key)));
                key += 32;
            }
            let mut bits = 16;
            while bits != 0 {
                let other = f32::from_bits(arch::butterfly(arch::FULL, largest.to_bits(), bits));
                largest = maximum(largest, other);
                bits /= 2;
            }
            let share = |key: u32| exp2((scores.load(first + u64::from(key)) - largest) * LOG2_E);
            let mut total = 0.0;
            key = lane;
            while key < limit {
                total += share(key);
                key += 32;
            }
            let total = sum_of_warp(total);
            key = lane;
            while key < job.key_tokens {
                let share = if key < limit { share(key) / total } else { 0.0 };
                scores.store(first + u64::from(key), share);
                key += 32;
            }
            row += warps;
        }
    }
}

entry! {
    /// Multiplies weights with values. A thread takes one element of a result a turn.
    ///
    /// # Safety
    /// All memory that [`FlashParameters`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_attention_values(job: FlashParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let shares = unsafe { FloatArray::at(job.workspace) };
        let elements = u64::from(job.head_elements.max(1));
        let is_bf16 = job.is_bf16 != 0;
        let (mut at, threads) = thread();
        while at < job.rows() * u64::from(job.head_elements) {
            let (row, element) = (at / elements, at % elements);
            let (sequence, head, token) = query(&job, row);
            // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
            let limit = job.limit(token, unsafe { keys_of(&job, sequence) });
            let (mut sum, mut key) = (0.0, 0);
            while key < limit {
                let v = job.values.at(sequence, job.kv_head(head), key) + element * 2;
                let share = shares.load(row * u64::from(job.key_tokens) + u64::from(key));
                // SAFETY: the host vouches for values below the sequence's count; `limit` keeps the key below it.
                sum += share * unsafe { half(v, is_bf16) };
                key += 1;
            }
            let to = job.y.at(sequence, head, token) + element * 2;
            // SAFETY: the host vouches for the results; `at` is below their number.
            unsafe { store_half(to, sum, is_bf16) };
            at += threads;
        }
    }
}
