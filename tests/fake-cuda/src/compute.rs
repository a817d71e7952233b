//! The kernels that compute: the lanes of a launch run the kernels' own source in the host thread of the stream.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::rows::{LaunchShape, run};
use nvme_compute_kernel::flash::{entries as flash, kernel as rungs};
use nvme_compute_kernel::linear::{entries as linear, kernel as layers};
use nvme_compute_kernel::matmul::entries as products;
use nvme_compute_kernel::{entries, kernel};
use nvme_gpu_kernel::entries::{nvme_check_pages, nvme_copy_pages, nvme_hash_chunks};
use std::ffi::{CStr, c_void};
use std::sync::Arc;

/// The symbols.
pub const NAMES: [&CStr; 75] = [
    c"nvme_gemv",
    c"nvme_gemv_wide",
    c"nvme_gemv_quantised",
    c"nvme_rms_norm",
    c"nvme_rope",
    c"nvme_attention",
    c"nvme_silu_mul",
    c"nvme_add_bias",
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
    c"nvme_moe_admit_published",
    c"nvme_moe_arrange",
    c"nvme_moe_settle",
    c"nvme_moe_product",
    c"nvme_moe_product_wide",
    c"nvme_moe_product_quantised",
    c"nvme_moe_product_batched",
    c"nvme_moe_activate",
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
    c"nvme_matmul_naive",
    c"nvme_matmul_tiled",
    c"nvme_matmul_vectorized",
    c"nvme_matmul_coarsened",
    c"nvme_matmul_mma",
    c"nvme_matmul_wgmma",
    c"nvme_hash_chunks",
    c"nvme_check_pages",
    c"nvme_copy_pages",
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
    ($shape:ident, $of:expr, $entry:path, $name:ident, $parameters:ident) => {
        if $name.to_bytes() == $of.as_bytes() {
            // SAFETY: the caller of the function vouches for the argument.
            let argument = unsafe { argument_of($entry, $parameters) };
            return Some(Arc::new(move || {
                // SAFETY: the host vouches for the addresses in the argument.
                run($shape, move || unsafe { $entry(argument) });
            }));
        }
    };
}

/// Defines a function that returns a launch of the kernel with this name, if it is one of those listed: first those that
/// run with any number of blocks.
macro_rules! launches {
    (few: { $($few:expr => $few_entry:path;)+ } launched: { $($name:expr => $entry:path;)+ }) => {
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
            $(return_launch!(few, $few, $few_entry, name, parameters);)+
            let shape = (blocks, threads, shared_bytes);
            $(return_launch!(shape, $name, $entry, name, parameters);)+
            None
        }
    };
}

launches! {
    few: {
        kernel::GEMV => entries::nvme_gemv;
        kernel::GEMV_WIDE => entries::nvme_gemv_wide;
        kernel::GEMV_QUANTISED => entries::nvme_gemv_quantised;
        kernel::RMS_NORM => entries::nvme_rms_norm;
        kernel::ROPE => entries::nvme_rope;
        kernel::ATTENTION => entries::nvme_attention;
        kernel::SILU_MUL => entries::nvme_silu_mul;
        kernel::ADD_BIAS => entries::nvme_add_bias;
        kernel::ARGMAX => entries::nvme_argmax;
        kernel::TAKE_TOKEN => entries::nvme_take_token;
        kernel::UNPACK => entries::nvme_unpack;
        kernel::MOE_ROUTE => entries::nvme_moe_route;
        kernel::MOE_ARRANGE => entries::nvme_moe_arrange;
        kernel::MOE_SETTLE => entries::nvme_moe_settle;
        kernel::MOE_PRODUCT => entries::nvme_moe_product;
        kernel::MOE_ACTIVATE => entries::nvme_moe_activate;
        kernel::MOE_JOIN => entries::nvme_moe_join;
        kernel::PAGE_SUMMARIES => entries::nvme_page_summaries;
        kernel::SCORE_PAGES => entries::nvme_score_pages;
        kernel::CHOOSE_PAGES => entries::nvme_choose_pages;
        rungs::SCORES => flash::nvme_attention_scores;
        rungs::SHARES => flash::nvme_attention_shares;
        rungs::VALUES => flash::nvme_attention_values;
        rungs::DECODE_JOIN => flash::nvme_multi_query_join;
        "nvme_hash_chunks" => nvme_hash_chunks;
        "nvme_check_pages" => nvme_check_pages;
        "nvme_copy_pages" => nvme_copy_pages;
        "nvme_matmul_wgmma" => products::nvme_matmul_wgmma;
        layers::FORWARD_NAIVE => linear::nvme_linear_forward_naive;
        layers::ACTIVATE => linear::nvme_linear_activate;
        layers::FORWARD_PERSISTENT => linear::nvme_linear_forward_persistent;
        layers::FORWARD_MIXED_BF16 => linear::nvme_linear_forward_mixed_bf16;
        layers::FORWARD_MIXED_F16 => linear::nvme_linear_forward_mixed_f16;
        layers::FORWARD_FEW => linear::nvme_linear_forward_few;
        layers::FORWARD_FEW_BF16 => linear::nvme_linear_forward_few_bf16;
        layers::FORWARD_FEW_F16 => linear::nvme_linear_forward_few_f16;
        layers::BACKWARD_CLEAR => linear::nvme_linear_backward_clear;
        layers::BACKWARD_NAIVE => linear::nvme_linear_backward_naive;
        layers::BACKWARD_INPUTS => linear::nvme_linear_backward_inputs;
        layers::BACKWARD_INPUTS_FEW => linear::nvme_linear_backward_inputs_few;
        layers::BACKWARD_WEIGHTS => linear::nvme_linear_backward_weights;
        layers::BACKWARD_WARP => linear::nvme_linear_backward_warp_reduce;
    }
    launched: {
        kernel::MOE_ADMIT => entries::nvme_moe_admit;
        kernel::MOE_ADMIT_PUBLISHED => entries::nvme_moe_admit_published;
        kernel::MOE_PRODUCT_WIDE => entries::nvme_moe_product_wide;
        kernel::MOE_PRODUCT_QUANTISED => entries::nvme_moe_product_quantised;
        kernel::MOE_PRODUCT_BATCHED => entries::nvme_moe_product_batched;
        kernel::GEMV_STREAMED => entries::nvme_gemv_streamed;
        kernel::GEMV_GATHERED => entries::nvme_gemv_gathered;
        kernel::GEMM => entries::nvme_gemm;
        kernel::GEMM_CLEAR => entries::nvme_gemm_clear;
        kernel::GEMM_STREAMED => entries::nvme_gemm_streamed;
        kernel::ATTENTION_PAGED => entries::nvme_attention_paged;
        kernel::ATTENTION_JOIN => entries::nvme_attention_join;
        kernel::SEARCH => entries::nvme_search;
        kernel::NGRAM_ROWS => entries::nvme_ngram_rows;
        kernel::NGRAM_COMMIT => entries::nvme_ngram_commit;
        rungs::SCORES_TILED => flash::nvme_attention_scores_tiled;
        rungs::VALUES_TILED => flash::nvme_attention_values_tiled;
        rungs::FLASH => flash::nvme_attention_flash;
        rungs::FLASH2_64_BF16 => flash::nvme_attention_flash2_64_bf16;
        rungs::DECODE_64_BF16 => flash::nvme_multi_query_attention_64_bf16;
        rungs::FLASH2_64_F16 => flash::nvme_attention_flash2_64_f16;
        rungs::DECODE_64_F16 => flash::nvme_multi_query_attention_64_f16;
        rungs::FLASH2_128_BF16 => flash::nvme_attention_flash2_128_bf16;
        rungs::DECODE_128_BF16 => flash::nvme_multi_query_attention_128_bf16;
        rungs::FLASH2_128_F16 => flash::nvme_attention_flash2_128_f16;
        rungs::DECODE_128_F16 => flash::nvme_multi_query_attention_128_f16;
        "nvme_matmul_naive" => products::nvme_matmul_naive;
        "nvme_matmul_tiled" => products::nvme_matmul_tiled;
        "nvme_matmul_vectorized" => products::nvme_matmul_vectorized;
        "nvme_matmul_coarsened" => products::nvme_matmul_coarsened;
        "nvme_matmul_mma" => products::nvme_matmul_mma;
        layers::FORWARD_FUSED => linear::nvme_linear_forward_fused;
        layers::BACKWARD_SUMS => linear::nvme_linear_backward_sums;
    }
}

/// A launch of the kernel `name`, one of [`NAMES`].
///
/// # Safety
/// `parameters` holds the address of the kernel's argument.
pub unsafe fn launch(name: &CStr, parameters: *mut *mut c_void, shape: LaunchShape) -> Run {
    // SAFETY: this function's caller vouches for the argument.
    let run = unsafe { by_lanes(name, parameters, shape) };
    run.unwrap_or_else(|| unreachable!("{name:?} is not one of the names"))
}
