//! Kernels that compute with weights in the formats in which files on NVMe store them: the steps of one token
//! of a transformer.
//!
//! Here belong kernels that compute, and the same steps for the CPU. Queues, and rows that only move, are in
//! `nvme-gpu-kernel`; what launches a kernel is in the crates of `host-shell`.
//!
//! Each kernel takes one argument of this crate by value. Addresses are device addresses, matrices are stored
//! row by row, and every number other than weights is `f32`. Blocks have [`BLOCK_THREADS`] threads; any
//! number of blocks is correct. `cargo xtask ptx` compiles them for the GPU; `nvme_compute`, `nvme_models`,
//! `nvme_search` and `nvme_course` launch them, and have each for the CPU.
//!
//! A parameter named after a memory range is its device address, unless it says otherwise. The crate launches
//! nothing and allocates nothing.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_ptx, stdarch_nvptx, asm_experimental_arch)
)]
#![deny(missing_docs)]

#[cfg(all(
    target_arch = "nvptx64",
    not(feature = "ngrams"),
    any(
        not(feature = "tile"),
        feature = "steps",
        feature = "experts",
        feature = "attention",
        feature = "linear",
        feature = "gemm"
    )
))]
mod arch;
#[cfg(all(not(target_arch = "nvptx64"), feature = "lanes"))]
#[path = "lanes.rs"]
mod arch;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "steps"))]
mod attention;
pub mod choose;
#[cfg(any(
    test,
    feature = "lanes",
    all(
        target_arch = "nvptx64",
        any(
            feature = "steps",
            feature = "streamed",
            feature = "experts",
            feature = "gemm"
        )
    )
))]
mod eight;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "steps"))]
mod elements;
pub mod experts;
#[cfg(any(not(target_arch = "nvptx64"), feature = "attention"))]
pub mod flash;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "streamed"))]
mod gathered;
pub mod gemm;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "steps"))]
mod gemv;
pub mod kernel;
#[cfg(all(test, feature = "lanes"))]
mod lane_tests;
#[cfg(any(not(target_arch = "nvptx64"), feature = "linear"))]
pub mod linear;
pub mod matmul;
pub mod ngrams;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "paged"))]
mod paged;
pub mod pages;
mod parameters;
#[cfg(all(
    any(target_arch = "nvptx64", feature = "lanes"),
    any(feature = "steps", feature = "experts")
))]
mod part;
#[cfg(any(
    test,
    feature = "lanes",
    all(target_arch = "nvptx64", any(feature = "steps", feature = "experts"))
))]
mod planes;
#[cfg(all(
    any(target_arch = "nvptx64", feature = "lanes"),
    any(feature = "steps", feature = "experts")
))]
mod product;
#[cfg(all(
    any(target_arch = "nvptx64", feature = "lanes"),
    any(feature = "steps", feature = "experts")
))]
mod quantised;
#[cfg(not(target_arch = "nvptx64"))]
pub mod reference;
pub mod search;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "streamed"))]
mod streamed;
pub mod strip;
#[cfg(any(
    feature = "lanes",
    all(
        target_arch = "nvptx64",
        any(feature = "steps", feature = "streamed", feature = "experts")
    )
))]
mod sums;
#[cfg(all(
    any(target_arch = "nvptx64", feature = "lanes"),
    any(feature = "steps", feature = "experts")
))]
mod wide;

#[cfg(all(target_arch = "nvptx64", feature = "tile"))]
pub mod tile;
#[cfg(all(not(target_arch = "nvptx64"), feature = "lanes"))]
#[path = "tile/lanes.rs"]
mod tile;

use core::num::NonZeroU32;
use nvme_formats::StoredFormat;
#[cfg(not(target_arch = "nvptx64"))]
use nvme_gpu_kernel::KernelImage;
use nvme_gpu_kernel::ring::RowSplit;
use nvme_gpu_kernel::rows::GatherLaunch;

pub use parameters::{
    AddBias, ArgmaxParameters, AttentionParameters, RmsNorm, RopeParameters, SiluMul,
    UnpackParameters,
};

/// The kernels as PTX, for any GPU from sm_80 on; `cargo xtask ptx --refresh` writes it.
#[cfg(not(target_arch = "nvptx64"))]
pub const PTX: &str = include_str!("../ptx/compute.ptx");

/// `nvme_gemv_streamed` and `nvme_gemv_gathered` as PTX, as [`PTX`] is; apart, since they contain the queues'
/// code and need its registers.
#[cfg(not(target_arch = "nvptx64"))]
pub const STREAMED_PTX: &str = include_str!("../ptx/streamed.ptx");

/// The kernels of [`gemm`] as PTX, as [`PTX`] is.
#[cfg(not(target_arch = "nvptx64"))]
pub const GEMM_PTX: &str = include_str!("../ptx/gemm.ptx");

/// `nvme_attention_paged` and `nvme_attention_join` as PTX, as [`PTX`] is.
#[cfg(not(target_arch = "nvptx64"))]
pub const PAGED_PTX: &str = include_str!("../ptx/paged.ptx");
/// `nvme_page_summaries`, `nvme_score_pages` and `nvme_choose_pages` as PTX, as [`PTX`] is.
#[cfg(not(target_arch = "nvptx64"))]
pub const CHOOSE_PTX: &str = include_str!("../ptx/choose.ptx");
/// `nvme_search` as PTX, as [`PTX`] is.
#[cfg(not(target_arch = "nvptx64"))]
pub const SEARCH_PTX: &str = include_str!("../ptx/search.ptx");

/// The kernels of [`ngrams`] as PTX, as [`PTX`] is.
#[cfg(not(target_arch = "nvptx64"))]
pub const NGRAMS_PTX: &str = include_str!("../ptx/ngrams.ptx");

/// The kernels of [`NGRAMS_PTX`], with machine code.
#[cfg(not(target_arch = "nvptx64"))]
pub static NGRAMS: KernelImage = KernelImage {
    ptx: NGRAMS_PTX,
    code: include_bytes!("../ptx/ngrams.code"),
};
/// The kernel of [`SEARCH_PTX`], with machine code.
#[cfg(not(target_arch = "nvptx64"))]
pub static SEARCH: KernelImage = KernelImage {
    ptx: SEARCH_PTX,
    code: include_bytes!("../ptx/search.code"),
};

/// The kernels of [`experts`] as PTX, as [`PTX`] is.
#[cfg(not(target_arch = "nvptx64"))]
pub const EXPERTS_PTX: &str = include_str!("../ptx/experts.ptx");

/// The kernels of [`flash`] as PTX, as [`PTX`] is.
#[cfg(not(target_arch = "nvptx64"))]
pub const ATTENTION_PTX: &str = include_str!("../ptx/attention.ptx");
/// The kernels of [`linear`] as PTX, as [`PTX`] is.
#[cfg(not(target_arch = "nvptx64"))]
pub const LINEAR_PTX: &str = include_str!("../ptx/linear.ptx");

/// The kernels that run on the host, too, as each lane of a [launch](nvme_gpu_kernel::lanes::RunningLaunch) calls them.
#[cfg(all(not(target_arch = "nvptx64"), feature = "lanes"))]
pub mod entries {
    pub use crate::attention::{nvme_attention, nvme_rope};
    pub use crate::choose::{nvme_choose_pages, nvme_page_summaries, nvme_score_pages};
    pub use crate::elements::{
        nvme_add_bias, nvme_argmax, nvme_rms_norm, nvme_silu_mul, nvme_take_token,
    };
    pub use crate::experts::{
        nvme_moe_activate, nvme_moe_admit, nvme_moe_admit_published, nvme_moe_arrange,
        nvme_moe_join, nvme_moe_product, nvme_moe_product_batched, nvme_moe_product_quantised,
        nvme_moe_product_wide, nvme_moe_route, nvme_moe_settle,
    };
    pub use crate::gathered::nvme_gemv_gathered;
    pub use crate::gemm::kernel::{nvme_gemm, nvme_gemm_clear, nvme_gemm_streamed};
    pub use crate::gemv::{nvme_gemv, nvme_gemv_quantised, nvme_gemv_wide, nvme_unpack};
    pub use crate::ngrams::{nvme_ngram_commit, nvme_ngram_rows};
    pub use crate::paged::{nvme_attention_join, nvme_attention_paged};
    pub use crate::search::nvme_search;
    pub use crate::streamed::nvme_gemv_streamed;
}

/// Threads of each block.
pub const BLOCK_THREADS: u32 = 256;

/// Limit of the elements of a head, which a warp keeps in its registers.
pub const MOST_HEAD_ELEMENTS: u32 = 256;

/// Elements of a vector that a block has in shared memory in one pass.
pub const VECTOR_ELEMENTS: u32 = 4096;

/// Parameters of `y[t] = W x[t]`, or `y[t] += W x[t]`, for each of `tokens` vectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GemvParameters {
    /// Address of `rows` consecutive rows of `row_bytes` bytes; even. Up to 15 bytes on either side are
    /// loaded, too.
    pub weights: u64,
    /// Address of `tokens` vectors of `columns` elements.
    pub x: u64,
    /// Address of `tokens` vectors of `stride` elements each; the first `rows` of them are written.
    pub y: u64,
    /// Bytes of a row: [`StoredFormat::row_bytes`].
    pub row_bytes: u64,
    /// Rows of the matrix.
    pub rows: u32,
    /// Its columns, a multiple of [`UNIT`](nvme_formats::UNIT).
    pub columns: u32,
    /// Distance of the vectors of `y`, in elements.
    pub stride: u32,
    /// Number of vectors.
    pub tokens: u32,
    /// Number of the [`StoredFormat`] of the matrix.
    pub stored: u32,
    /// 1 to add to `y`, 0 to overwrite it.
    pub adds: u32,
}

impl GemvParameters {
    /// Number of rows from which on each warp computes several at once. With fewer rows that would leave
    /// multiprocessors idle.
    const MANY_ROWS: u64 = 8192;

    /// Limit of the tiles of 16 rows that a block of `nvme_gemv_quantised` computes at once.
    pub(crate) const MOST_TILES: u32 = 8;
    /// Number of its blocks that a GPU may run at the same time; with fewer tiles each block has one.
    const QUANTISED_BLOCKS: u64 = 264;
    /// Bytes of shared memory of one of its blocks.
    pub const QUANTISED_SHARED: u32 = 99_840;

    /// True if `nvme_gemv_wide` can compute it: formats that lanes load in 16 bytes, at addresses that are
    /// multiples of 16.
    pub const fn is_wide(&self) -> bool {
        matches!(
            StoredFormat::of_number(self.stored),
            Some(StoredFormat::F32 | StoredFormat::F16 | StoredFormat::Bf16)
        ) && self.weights.is_multiple_of(16)
            && self.row_bytes.is_multiple_of(16)
    }

    /// True if `nvme_gemv_quantised` can compute it: blocks of 32 elements of 4 or 8 bits, and for Q4_1 whole
    /// words.
    pub const fn is_quantised(&self) -> bool {
        // Offsets within a tile are computed in 32 bits.
        self.row_bytes < 1 << 28
            && match StoredFormat::of_number(self.stored) {
                Some(StoredFormat::Q4_0 | StoredFormat::Q8_0 | StoredFormat::Mxfp4) => true,
                Some(StoredFormat::Q4_1) => self.weights.is_multiple_of(4),
                _ => false,
            }
    }

    /// Returns the number of tiles of 16 rows.
    #[inline(always)]
    pub const fn row_tiles(&self) -> u32 {
        self.rows.div_ceil(16)
    }

    /// Returns the number of tiles that a block of `nvme_gemv_quantised` computes at once.
    #[inline(always)]
    pub const fn block_tiles(&self) -> u32 {
        let tiles = self.row_tiles() as u64 * self.tokens as u64;
        let share = tiles.div_ceil(Self::QUANTISED_BLOCKS);
        if share < Self::MOST_TILES as u64 {
            if share == 0 { 1 } else { share as u32 }
        } else {
            Self::MOST_TILES
        }
    }

    /// Returns the number of work items of `nvme_gemv_quantised`.
    #[inline(always)]
    pub const fn items(&self) -> u64 {
        self.row_tiles().div_ceil(self.block_tiles()) as u64 * self.tokens as u64
    }

    /// Returns the number of rows that a warp computes at once.
    #[inline(always)]
    pub const fn warp_rows(&self) -> u32 {
        const F32: u32 = StoredFormat::F32 as u32;
        match self.rows as u64 * self.tokens as u64 >= Self::MANY_ROWS {
            // The loads in flight for four rows would take all registers.
            true if self.stored == F32 => 2,
            true => 4,
            false => 1,
        }
    }

    /// Returns the number of rows that a block computes at once.
    #[inline(always)]
    pub const fn tile_rows(&self) -> u32 {
        self.warp_rows() * (BLOCK_THREADS / 32)
    }

    /// Returns the number of work items of `nvme_gemv_wide`.
    #[inline(always)]
    pub const fn tiles(&self) -> u64 {
        (self.rows.div_ceil(self.tile_rows()) as u64) * self.tokens as u64
    }
}

/// Parameters of `y = W x` for one vector and a matrix on a drive; each warp reads its part of the matrix
/// while it multiplies.
///
/// A row that was not read whole gives NaN, and is counted as failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GemvStreamed {
    /// Location of the rows: `count` of them from `first_byte` on, an even number, `row_bytes` bytes each;
    /// they pass through reads of `slot_bytes` bytes.
    pub rows: GatherLaunch,
    /// Address of `columns` elements.
    pub x: u64,
    /// Address of `count` elements.
    pub y: u64,
    /// Columns of the matrix, whole blocks and units, at least one.
    pub columns: u32,
    /// Number of the [`StoredFormat`] of the matrix.
    pub stored: u32,
}

/// Parameters of `y[i] = table[ids[i]] . x` for a table on a drive, whose rows each warp reads while it
/// multiplies.
///
/// An element whose row was not read whole, or whose id the table does not have, is NaN, and is counted as
/// failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GemvGathered {
    /// Ids, `count` of them at `ids`, and location of the table: `rows` rows of `row_bytes` bytes from
    /// `first_byte` on, an even number.
    pub rows: GatherLaunch,
    /// Address of `columns` elements.
    pub x: u64,
    /// Address of `count` elements.
    pub y: u64,
    /// Columns of the table, whole blocks and units, at least one.
    pub columns: u32,
    /// Number of the [`StoredFormat`] of the table.
    pub stored: u32,
    /// Bytes of a read, for the [`RowSplit`].
    pub piece_bytes: u32,
    /// Reads of a row, for the [`RowSplit`]; at least 1.
    pub of_row: u32,
    /// log2 of the bytes of a read's stage, for the [`RowSplit`].
    pub stage_shift: u32,
    /// Reserved, 0.
    pub reserved: u32,
}

impl GemvGathered {
    /// Returns the split of its rows into reads.
    pub const fn split(&self) -> Option<RowSplit> {
        let Some(of_row) = NonZeroU32::new(self.of_row) else {
            return None;
        };
        Some(RowSplit {
            row_bytes: self.rows.row_bytes,
            piece_bytes: self.piece_bytes,
            of_row,
            stage_shift: self.stage_shift,
        })
    }

    /// Returns the first byte of row `id`, if the table has it.
    #[inline(always)]
    pub const fn byte_of(&self, id: i64) -> Option<u64> {
        let row = id as u64;
        if id < 0 || row >= self.rows.rows {
            return None;
        }
        Some(self.rows.first_byte + row * self.rows.row_bytes as u64)
    }
}

/// Parameters of attention of one query a head over keys and values in pages on a drive.
///
/// A page has, for each head of keys and values, `page_tokens` keys and then as many values. Results that
/// need a page which was not read whole are NaN, and counted as failed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct PagedAttention {
    /// Location of the pages: `rows` of them from `first_byte` on, `row_bytes` bytes each; `slot_bytes` hold
    /// a head's part of a page. A head's part begins at a block of the drive. `count` is the number of
    /// [parts](Self::parts).
    pub rows: GatherLaunch,
    /// Address of `sequences` times `heads` vectors of `head_elements`.
    pub queries: u64,
    /// Address of the page table, numbers of pages as `u32`. Sequences are `sequence_stride` numbers apart,
    /// heads `head_stride`, or 0 if all heads of a sequence have the same pages.
    pub pages: u64,
    /// Address of the numbers of pages, `u32`: for each sequence, or for each head of each sequence if
    /// `head_stride` is not 0. More than `most_pages` count as `most_pages`.
    pub counts: u64,
    /// Address of one page for each sequence, consecutive in GPU memory: its tokens come after those on the
    /// drive; 0 for none.
    pub tail: u64,
    /// Address of the numbers of its tokens, a `u32` for each sequence. More than `page_tokens` count as
    /// `page_tokens`.
    pub tail_counts: u64,
    /// Address of `splits` times `head_elements` + 2 numbers for each query.
    pub partial: u64,
    /// Address of the results, in the layout of the queries.
    pub y: u64,
    /// Number of sequences.
    pub sequences: u32,
    /// Heads of queries.
    pub heads: u32,
    /// Heads of keys and values: `heads` is a multiple.
    pub kv_heads: u32,
    /// Elements of a head, a multiple of 8, at most [`pages::MOST_ELEMENTS`].
    pub head_elements: u32,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Parts of a sequence's pages that are computed separately, at most [`pages::MOST_SPLITS`].
    pub splits: u32,
    /// Distance of sequences in the page table, in numbers.
    pub sequence_stride: u32,
    /// Distance of heads in the page table, in numbers.
    pub head_stride: u32,
    /// Limit of the pages of a sequence.
    pub most_pages: u32,
    /// 1 for bf16, 0 for f16.
    pub is_bf16: u32,
    /// Factor of the products of queries and keys.
    pub scale: f32,
    /// Reserved, 0.
    pub reserved: u32,
}

/// Combines `value` and its index into a number that is larger for a larger value, and for equal values for a
/// smaller index. Never 0. NaN is below every number.
#[inline(always)]
pub fn ranked(value: f32, index: u32) -> u64 {
    let bits = value.to_bits();
    let order = match bits >> 31 {
        // Makes the bits of a float compare like the float: positive numbers get the upper bit, negative ones
        // are inverted.
        0 => bits | 1 << 31,
        _ => !bits,
    };
    let order = if value.is_nan() { 0 } else { order };
    u64::from(order) << 32 | u64::from(!index)
}

/// Returns the index in a result of [`ranked`].
#[inline(always)]
pub fn index_of(ranked: u64) -> u32 {
    !(ranked as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_the_order_of_numbers_and_then_of_places() {
        let numbers = [
            f32::NEG_INFINITY,
            -3.5,
            -0.5,
            0.0,
            1e-40,
            2.0,
            f32::INFINITY,
        ];
        for pair in numbers.windows(2) {
            assert!(ranked(pair[0], 0) < ranked(pair[1], 9), "{pair:?}");
        }
        assert!(ranked(1.0, 3) > ranked(1.0, 4));
        assert!(ranked(f32::NAN, 0) < ranked(f32::NEG_INFINITY, 9));
        assert_eq!(index_of(ranked(1.0, 77)), 77);
        assert_ne!(ranked(f32::NAN, u32::MAX - 1), 0);
    }

    #[test]
    fn the_names_are_those_of_the_ptx() {
        fn entries(ptx: &str) -> Vec<&str> {
            let entries = ptx.split(".visible .entry ").skip(1);
            entries.filter_map(|rest| rest.split('(').next()).collect()
        }
        fn same(ptx: &str, named: &[&str]) {
            let (mut found, mut named) = (entries(ptx), named.to_vec());
            found.sort_unstable();
            named.sort_unstable();
            assert_eq!(found, named);
        }
        same(PTX, &kernel::ALL);
        same(EXPERTS_PTX, &kernel::EXPERTS);
        same(ATTENTION_PTX, &flash::kernel::ALL);
        same(LINEAR_PTX, &linear::kernel::ALL);
        same(GEMM_PTX, &kernel::GEMMS);
        same(
            STREAMED_PTX,
            &[kernel::GEMV_STREAMED, kernel::GEMV_GATHERED],
        );
        let mut paged = entries(PAGED_PTX);
        paged.sort_unstable();
        assert_eq!(paged, [kernel::ATTENTION_JOIN, kernel::ATTENTION_PAGED]);
        let mut choose = entries(CHOOSE_PTX);
        choose.sort_unstable();
        let named = [
            kernel::CHOOSE_PAGES,
            kernel::PAGE_SUMMARIES,
            kernel::SCORE_PAGES,
        ];
        assert_eq!(choose, named);
        assert_eq!(entries(SEARCH_PTX), [kernel::SEARCH]);
        same(NGRAMS_PTX, &[kernel::NGRAM_ROWS, kernel::NGRAM_COMMIT]);
    }
}
