//! The kernels that compute: the lanes of a launch run the kernels' own source in the host thread of the stream. Those of
//! the ladder are a host thread of their own (`ladder.rs`).
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::ladder;
use crate::rows::{LaunchShape, run};
use nvme_compute_kernel::{entries, kernel};
use nvme_gpu_kernel::entries::nvme_hash_chunks;
use std::ffi::{CStr, c_void};
use std::slice::{from_raw_parts, from_raw_parts_mut};
use std::sync::Arc;

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
pub type Run = Arc<dyn Fn() + Send + Sync>;

/// Returns the argument of a launch of `entry`.
///
/// # Safety
/// `parameters` holds its address.
unsafe fn argument_of<T: Copy>(_entry: unsafe fn(T), parameters: *mut *mut c_void) -> T {
    // SAFETY: this function's caller vouches for the argument.
    unsafe { **parameters.cast::<*const T>() }
}

/// Blocks of a launch of a kernel whose warps or threads take one piece of work after another. More would compute the
/// same with a lane for each piece, and lanes cost more than pieces.
const FEW_BLOCKS: u32 = 3;

/// Returns from the function with a launch of this kernel, if it is the one of the name.
macro_rules! return_launch {
    ($shape:ident, $kernel:ident $entry:ident, $name:ident, $parameters:ident) => {
        if $name.to_bytes() == kernel::$kernel.as_bytes() {
            // SAFETY: the caller of the function vouches for the argument.
            let argument = unsafe { argument_of(entries::$entry, $parameters) };
            return Some(Arc::new(move || {
                // SAFETY: the host vouches for the addresses in the argument.
                run($shape, move || unsafe { entries::$entry(argument) });
            }));
        }
    };
}

/// Defines a function that returns a launch of the kernel with this name, if it is one of those listed: first those that
/// run with any number of blocks.
macro_rules! launches {
    (few: { $($few:ident $few_entry:ident;)+ } launched: { $($name:ident $entry:ident;)+ }) => {
        /// Returns a launch of the kernel `name` by its own source.
        ///
        /// # Safety
        /// `parameters` holds the address of the kernel's argument.
        unsafe fn by_lanes(
            name: &CStr,
            parameters: *mut *mut c_void,
            (blocks, threads, shared_bytes): LaunchShape,
        ) -> Option<Run> {
            let few = (blocks.min(FEW_BLOCKS), threads, shared_bytes);
            $(return_launch!(few, $few $few_entry, name, parameters);)+
            let shape = (blocks, threads, shared_bytes);
            $(return_launch!(shape, $name $entry, name, parameters);)+
            None
        }
    };
}

launches! {
    few: {
        GEMV nvme_gemv;
        GEMV_WIDE nvme_gemv_wide;
        GEMV_QUANTISED nvme_gemv_quantised;
        RMS_NORM nvme_rms_norm;
        ROPE nvme_rope;
        ATTENTION nvme_attention;
        SILU_MUL nvme_silu_mul;
        ARGMAX nvme_argmax;
        TAKE_TOKEN nvme_take_token;
        UNPACK nvme_unpack;
        MOE_ROUTE nvme_moe_route;
        MOE_SETTLE nvme_moe_settle;
        MOE_PRODUCT nvme_moe_product;
        MOE_JOIN nvme_moe_join;
        PAGE_SUMMARIES nvme_page_summaries;
        SCORE_PAGES nvme_score_pages;
        CHOOSE_PAGES nvme_choose_pages;
    }
    launched: {
        MOE_ADMIT nvme_moe_admit;
        MOE_PRODUCT_WIDE nvme_moe_product_wide;
        MOE_PRODUCT_QUANTISED nvme_moe_product_quantised;
        GEMV_STREAMED nvme_gemv_streamed;
        GEMV_GATHERED nvme_gemv_gathered;
        GEMM nvme_gemm;
        GEMM_CLEAR nvme_gemm_clear;
        GEMM_STREAMED nvme_gemm_streamed;
        ATTENTION_PAGED nvme_attention_paged;
        ATTENTION_JOIN nvme_attention_join;
        SEARCH nvme_search;
        NGRAM_ROWS nvme_ngram_rows;
        NGRAM_COMMIT nvme_ngram_commit;
    }
}

/// A launch of the kernel `name`, one of [`NAMES`].
///
/// # Safety
/// `parameters` holds the address of the kernel's argument.
pub unsafe fn launch(name: &CStr, parameters: *mut *mut c_void, shape: LaunchShape) -> Run {
    /// The argument, and what runs with it.
    fn of<T: Copy + Send + Sync + 'static>(parameters: *mut *mut c_void, run: fn(&T)) -> Run {
        // SAFETY: the caller's.
        let argument = unsafe { **parameters.cast::<*const T>() };
        Arc::new(move || run(&argument))
    }
    // SAFETY: the caller's.
    if let Some(run) = unsafe { by_lanes(name, parameters, shape) } {
        return run;
    }
    match name.to_bytes() {
        b"nvme_hash_chunks" => {
            // SAFETY: the caller's.
            let job = unsafe { argument_of(nvme_hash_chunks, parameters) };
            let (blocks, threads, shared_bytes) = shape;
            let few = (blocks.min(FEW_BLOCKS), threads, shared_bytes);
            // SAFETY: the host vouches for the addresses in the argument.
            Arc::new(move || run(few, move || unsafe { nvme_hash_chunks(job) }))
        }
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
        _ => unreachable!("{name:?} is not one of the names"),
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
