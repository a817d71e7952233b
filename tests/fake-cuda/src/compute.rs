//! The kernels that compute as a host thread.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::ladder;
use crate::rows::LaunchShape;
use nvme_compute_kernel::{
    ArgmaxParameters, AttentionParameters, GemvParameters, RmsNorm, RopeParameters, SiluMul,
    UnpackParameters, index_of, ranked, reference,
};
use nvme_formats::StoredFormat;
use nvme_gpu_kernel::hash::{self, HashChunk, HashChunks};
use std::ffi::{CStr, c_void};
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// The symbols.
pub const NAMES: [&CStr; 62] = [
    c"nvme_gemv",
    c"nvme_gemv_wide",
    c"nvme_gemv_quantised",
    c"nvme_rms_norm",
    c"nvme_rope",
    c"nvme_attention",
    c"nvme_silu_mul",
    c"nvme_argmax",
    c"nvme_take_token",
    c"nvme_unpack",
    c"nvme_gemv_streamed",
    c"nvme_gemv_gathered",
    c"nvme_gemm_streamed",
    c"nvme_gemm",
    c"nvme_gemm_clear",
    c"nvme_attention_paged",
    c"nvme_attention_join",
    c"nvme_search",
    c"nvme_ngram_rows",
    c"nvme_ngram_commit",
    c"nvme_moe_route",
    c"nvme_moe_admit",
    c"nvme_moe_settle",
    c"nvme_moe_product",
    c"nvme_moe_product_wide",
    c"nvme_moe_product_quantised",
    c"nvme_moe_join",
    c"nvme_page_summaries",
    c"nvme_score_pages",
    c"nvme_choose_pages",
    c"nvme_attention_scores",
    c"nvme_attention_shares",
    c"nvme_attention_values",
    c"nvme_attention_scores_tiled",
    c"nvme_attention_values_tiled",
    c"nvme_attention_flash",
    c"nvme_attention_flash2_64_bf16",
    c"nvme_attention_flash2_64_f16",
    c"nvme_attention_flash2_128_bf16",
    c"nvme_attention_flash2_128_f16",
    c"nvme_multi_query_attention_64_bf16",
    c"nvme_multi_query_attention_64_f16",
    c"nvme_multi_query_attention_128_bf16",
    c"nvme_multi_query_attention_128_f16",
    c"nvme_multi_query_join",
    c"nvme_linear_forward_naive",
    c"nvme_linear_activate",
    c"nvme_linear_forward_fused",
    c"nvme_linear_forward_persistent",
    c"nvme_linear_forward_mixed_bf16",
    c"nvme_linear_forward_mixed_f16",
    c"nvme_linear_forward_few",
    c"nvme_linear_forward_few_bf16",
    c"nvme_linear_forward_few_f16",
    c"nvme_linear_backward_inputs_few",
    c"nvme_linear_backward_clear",
    c"nvme_linear_backward_naive",
    c"nvme_linear_backward_sums",
    c"nvme_linear_backward_inputs",
    c"nvme_linear_backward_weights",
    c"nvme_linear_backward_warp_reduce",
    c"nvme_hash_chunks",
];

/// What a launch of a kernel does.
pub type Run = std::sync::Arc<dyn Fn() + Send + Sync>;

/// A launch of the kernel `name`, one of [`NAMES`].
///
/// # Safety
/// `parameters` holds the address of the kernel's argument.
pub unsafe fn launch(name: &CStr, parameters: *mut *mut c_void, shape: LaunchShape) -> Run {
    /// The argument, and what runs with it.
    fn of<T: Copy + Send + Sync + 'static>(parameters: *mut *mut c_void, run: fn(&T)) -> Run {
        // SAFETY: the caller's.
        let argument = unsafe { **parameters.cast::<*const T>() };
        std::sync::Arc::new(move || run(&argument))
    }
    // SAFETY: the caller's.
    if let Some(run) = unsafe { crate::reading::launch(name, parameters, shape) } {
        return run;
    }
    match name.to_bytes() {
        b"nvme_gemv" => of(parameters, gemv),
        b"nvme_gemv_wide" => of(parameters, |wide: &GemvParameters| {
            assert!(wide.is_wide(), "{wide:x?}");
            gemv(wide);
        }),
        b"nvme_gemv_quantised" => of(parameters, |quantised: &GemvParameters| {
            assert!(quantised.is_quantised(), "{quantised:x?}");
            gemv(quantised);
        }),
        b"nvme_hash_chunks" => of(parameters, hash_chunks),
        b"nvme_attention_scores" | b"nvme_attention_scores_tiled" => of(parameters, ladder::scores),
        b"nvme_attention_shares" => of(parameters, ladder::shares),
        b"nvme_attention_values" | b"nvme_attention_values_tiled" => of(parameters, ladder::values),
        name if name.starts_with(b"nvme_attention_flash") => of(parameters, ladder::flash),
        b"nvme_multi_query_join" => of(parameters, ladder::join),
        name if name.starts_with(b"nvme_multi_query") => of(parameters, ladder::multi_query),
        b"nvme_linear_forward_naive" => of(parameters, ladder::forward_naive),
        b"nvme_linear_activate" => of(parameters, ladder::activate),
        b"nvme_linear_forward_mixed_bf16" | b"nvme_linear_forward_few_bf16" => {
            of(parameters, |job| ladder::forward_mixed(job, true))
        }
        b"nvme_linear_forward_mixed_f16" | b"nvme_linear_forward_few_f16" => {
            of(parameters, |job| ladder::forward_mixed(job, false))
        }
        name if name.starts_with(b"nvme_linear_forward") => of(parameters, ladder::forward),
        b"nvme_linear_backward_clear" => of(parameters, ladder::backward_clear),
        b"nvme_linear_backward_naive" => of(parameters, ladder::backward_naive),
        b"nvme_linear_backward_sums" => of(parameters, ladder::backward_sums),
        b"nvme_linear_backward_inputs" | b"nvme_linear_backward_inputs_few" => {
            of(parameters, |job| {
                ladder::backward(job, &ladder::left_sums(job), true, false)
            })
        }
        b"nvme_linear_backward_weights" => of(parameters, |job| {
            ladder::backward(job, &ladder::left_sums(job), false, true)
        }),
        b"nvme_linear_backward_warp_reduce" => of(parameters, |job| {
            ladder::backward(job, &ladder::left_sums(job), true, true)
        }),
        b"nvme_rms_norm" => of(parameters, rms_norm),
        b"nvme_rope" => of(parameters, rope),
        b"nvme_attention" => of(parameters, attention),
        b"nvme_silu_mul" => of(parameters, silu_mul),
        b"nvme_argmax" => of(parameters, argmax),
        b"nvme_take_token" => of(parameters, take_token),
        b"nvme_moe_route" => of(parameters, crate::experts::route),
        b"nvme_moe_admit" => of(parameters, crate::experts::admit),
        b"nvme_moe_settle" => of(parameters, crate::experts::settle),
        name if name.starts_with(b"nvme_moe_product") => of(parameters, crate::experts::product),
        b"nvme_moe_join" => of(parameters, crate::experts::join),
        b"nvme_page_summaries" => of(parameters, crate::choose::summarise),
        b"nvme_score_pages" => of(parameters, crate::choose::score),
        b"nvme_choose_pages" => of(parameters, crate::choose::choose),
        _ => of(parameters, unpack),
    }
}

/// Numbers that a launch names; the address of none may be NULL.
pub(crate) fn numbers<'a>(address: u64, count: usize) -> &'a [f32] {
    match count {
        0 => &[],
        // SAFETY: the host vouches for them.
        _ => unsafe { from_raw_parts(address as usize as *const f32, count) },
    }
}

/// The same, to be written. A kernel whose output is one of its inputs reads what it needs before it writes.
pub(crate) fn outputs<'a>(address: u64, count: usize) -> &'a mut [f32] {
    match count {
        0 => &mut [],
        // SAFETY: as above.
        _ => unsafe { from_raw_parts_mut(address as usize as *mut f32, count) },
    }
}

pub(crate) fn rows<'a>(address: u64, bytes: usize) -> &'a [u8] {
    match bytes {
        0 => &[],
        // SAFETY: as above.
        _ => unsafe { from_raw_parts(address as usize as *const u8, bytes) },
    }
}

/// Chunk after chunk, by one lane.
fn hash_chunks(job: &HashChunks) {
    for index in 0..job.count as usize {
        // SAFETY: the host gives `count` chunks, and as many places for hashes.
        unsafe {
            let chunk = *(job.chunks as usize as *const HashChunk).add(index);
            let bytes = rows(job.base + chunk.at, chunk.bytes as usize);
            let to = (job.hashes as usize as *mut u64).add(index);
            to.write(hash::of_bytes(bytes));
        }
    }
}

fn gemv(gemv: &GemvParameters) {
    let stored = StoredFormat::of_number(gemv.stored).expect("a format");
    let (rows_count, columns) = (gemv.rows as usize, gemv.columns as usize);
    assert_eq!(stored.row_bytes(gemv.columns), Some(gemv.row_bytes));
    assert!(gemv.weights.is_multiple_of(2), "rows of 16-bit words");
    let weights = rows(gemv.weights, rows_count * gemv.row_bytes as usize);
    for token in 0..gemv.tokens as usize {
        let x = numbers(gemv.x + token as u64 * u64::from(gemv.columns) * 4, columns);
        let y = gemv.y + token as u64 * u64::from(gemv.stride) * 4;
        let y = outputs(y, rows_count);
        for (y, row) in y.iter_mut().zip(weights.chunks(gemv.row_bytes as usize)) {
            let before = if gemv.adds == 0 { 0.0 } else { *y };
            *y = before + reference::dot(stored, row, x);
        }
    }
}

fn unpack(unpack: &UnpackParameters) {
    let stored = StoredFormat::of_number(unpack.stored).expect("a format");
    let row_bytes = stored.row_bytes(unpack.columns).expect("whole blocks");
    for token in 0..u64::from(unpack.tokens) {
        let row = rows(unpack.rows + token * unpack.row_stride, row_bytes as usize);
        let y = unpack.y + token * u64::from(unpack.columns) * 4;
        reference::unpack(stored, row, outputs(y, unpack.columns as usize));
    }
}

fn rms_norm(norm: &RmsNorm) {
    let elements = norm.elements as usize;
    let weight = numbers(norm.weight, elements);
    for token in 0..u64::from(norm.tokens) {
        let first = token * u64::from(norm.elements) * 4;
        let x = numbers(norm.x + first, elements).to_vec();
        reference::rms_norm(&x, weight, norm.epsilon, outputs(norm.y + first, elements));
    }
}

fn rope(rope: &RopeParameters) {
    let elements = rope.head_elements as usize;
    let cached = rope.kv_heads as usize * elements;
    for token in 0..u64::from(rope.tokens) {
        let position = token + u64::from(rope.position);
        let vector = |address: u64, index: u64, count: usize| address + index * count as u64 * 4;
        let angles = numbers(vector(rope.angles, position, elements), elements);
        let each = rope.heads as usize * elements;
        let queries = outputs(vector(rope.queries, token, each), each);
        let heads = queries.chunks_mut(elements);
        heads.for_each(|head| reference::turn(head, angles));
        let key = outputs(vector(rope.key_cache, position, cached), cached);
        key.copy_from_slice(numbers(vector(rope.keys, token, cached), cached));
        let heads = key.chunks_mut(elements);
        heads.for_each(|head| reference::turn(head, angles));
        let value = outputs(vector(rope.value_cache, position, cached), cached);
        value.copy_from_slice(numbers(vector(rope.values, token, cached), cached));
    }
}

fn attention(attention: &AttentionParameters) {
    let elements = attention.head_elements as usize;
    let stride = attention.kv_heads as usize * elements;
    for token in 0..attention.tokens {
        let seen = (attention.position + token + 1) as usize * stride;
        for head in 0..attention.heads {
            let index = u64::from(token * attention.heads + head) * elements as u64 * 4;
            let kv_head = head * attention.kv_heads / attention.heads;
            let (first, count) = (kv_head as usize * elements, seen);
            let keys = &numbers(attention.key_cache, count)[first..];
            let values = &numbers(attention.value_cache, count)[first..];
            let query = numbers(attention.queries + index, elements);
            let y = outputs(attention.y + index, elements);
            reference::attend(query, keys, values, stride, attention.scale, y);
        }
    }
}

fn silu_mul(silu: &SiluMul) {
    let count = silu.elements as usize;
    let mut x = numbers(silu.x, count).to_vec();
    reference::silu_mul(&mut x, numbers(silu.factor, count));
    outputs(silu.y, count).copy_from_slice(&x);
}

fn argmax(argmax: &ArgmaxParameters) {
    let x = numbers(argmax.x, argmax.elements as usize);
    let ranks = x
        .iter()
        .zip(0..)
        .map(|(value, index)| ranked(*value, index));
    let best = argmax.best as usize as *mut u64;
    // SAFETY: the host gives 8 bytes.
    unsafe { *best = (*best).max(ranks.max().unwrap_or(0)) };
}

fn take_token(argmax: &ArgmaxParameters) {
    let (best, index) = (
        argmax.best as usize as *mut u64,
        argmax.index as usize as *mut i64,
    );
    // SAFETY: the host gives 8 bytes each.
    unsafe {
        *index = i64::from(index_of(*best));
        *best = 0;
    }
}
