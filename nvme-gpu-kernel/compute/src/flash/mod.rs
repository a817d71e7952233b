//! Attention over keys and values in GPU memory, one implementation a file, from one thread a score to the
//! tensor cores.
//!
//! Each computes `softmax(scale q k^T) v` for each head, over halves (bf16 or f16) with any strides; sums are
//! `f32`. Heads of queries may share heads of keys and values (GQA, MQA). Beside the files of the steps,
//! `reference` has the result that all are compared with. `docs/ladder-attention.md` explains each step.

#[cfg(target_arch = "nvptx64")]
mod arch;
#[cfg(all(not(target_arch = "nvptx64"), feature = "lanes"))]
#[path = "lanes.rs"]
mod arch;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
mod decode;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
#[allow(clippy::module_inception, reason = "the step of this name")]
mod flash;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
mod flash2;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
mod keys;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
mod naive;
#[cfg(not(target_arch = "nvptx64"))]
pub mod reference;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
mod tiled;

/// The kernels, as each lane of a launch on the host calls them.
#[cfg(all(not(target_arch = "nvptx64"), feature = "lanes"))]
pub mod entries {
    pub use super::decode::*;
    pub use super::flash::*;
    pub use super::flash2::*;
    pub use super::naive::*;
    pub use super::tiled::*;
}

/// The names of the kernels. Each takes a [`FlashParameters`].
pub mod kernel {
    /// Writes the scores of all queries and keys into the workspace. A thread takes one score a turn.
    pub const SCORES: &str = "nvme_attention_scores";
    /// Converts rows of scores to softmax weights. A warp takes one row a turn.
    pub const SHARES: &str = "nvme_attention_shares";
    /// Multiplies weights with values. A thread takes one element a turn.
    pub const VALUES: &str = "nvme_attention_values";
    /// Does the work of [`SCORES`]; a block takes a [`TILE`](super::TILE) of scores.
    pub const SCORES_TILED: &str = "nvme_attention_scores_tiled";
    /// Does the work of [`VALUES`]; a block takes a [`TILE`](super::TILE) of elements.
    pub const VALUES_TILED: &str = "nvme_attention_values_tiled";
    /// Does all steps in one kernel, without scores in memory. A block takes
    /// [`FLASH_ROWS`](super::FLASH_ROWS) queries.
    pub const FLASH: &str = "nvme_attention_flash";
    /// Does the same by the tensor cores: heads of up to 64 elements in bf16. A block takes
    /// [`FLASH2_ROWS`](super::FLASH2_ROWS) queries.
    pub const FLASH2_64_BF16: &str = "nvme_attention_flash2_64_bf16";
    /// Variant for up to 64 elements in f16.
    pub const FLASH2_64_F16: &str = "nvme_attention_flash2_64_f16";
    /// Variant for up to 128 elements in bf16.
    pub const FLASH2_128_BF16: &str = "nvme_attention_flash2_128_bf16";
    /// Variant for up to 128 elements in f16.
    pub const FLASH2_128_F16: &str = "nvme_attention_flash2_128_f16";
    /// Attention of few queries over many keys, which are split among blocks: heads of up to 64 elements in
    /// bf16.
    pub const DECODE_64_BF16: &str = "nvme_multi_query_attention_64_bf16";
    /// Variant for up to 64 elements in f16.
    pub const DECODE_64_F16: &str = "nvme_multi_query_attention_64_f16";
    /// Variant for up to 128 elements in bf16.
    pub const DECODE_128_BF16: &str = "nvme_multi_query_attention_128_bf16";
    /// Variant for up to 128 elements in f16.
    pub const DECODE_128_F16: &str = "nvme_multi_query_attention_128_f16";
    /// Joins the partial results of the split keys. A warp takes one query a turn.
    pub const DECODE_JOIN: &str = "nvme_multi_query_join";

    /// All kernels of [`ATTENTION_PTX`](crate::ATTENTION_PTX).
    pub const ALL: [&str; 15] = [
        SCORES,
        SHARES,
        VALUES,
        SCORES_TILED,
        VALUES_TILED,
        FLASH,
        FLASH2_64_BF16,
        FLASH2_64_F16,
        FLASH2_128_BF16,
        FLASH2_128_F16,
        DECODE_64_BF16,
        DECODE_64_F16,
        DECODE_128_BF16,
        DECODE_128_F16,
        DECODE_JOIN,
    ];
}

/// Limit of the elements of a head.
pub const MOST_ELEMENTS: u32 = 128;
/// Rows and columns of a tile of the tiled kernels, whose blocks have [`BLOCK_THREADS`](crate::BLOCK_THREADS) threads.
pub const TILE: u32 = 64;
/// Queries of a block of [`kernel::FLASH`], which has [`BLOCK_THREADS`](crate::BLOCK_THREADS) threads.
pub const FLASH_ROWS: u32 = 64;
/// Keys of a tile of [`kernel::FLASH`].
pub const FLASH_KEYS: u32 = 32;
/// Queries of a block of the `FLASH2` kernels.
pub const FLASH2_ROWS: u32 = 128;
/// Keys of a tile of the `FLASH2` kernels.
pub const FLASH2_KEYS: u32 = 64;
/// Threads of a block of the `FLASH2` and `DECODE` kernels.
pub const TENSOR_THREADS: u32 = 128;
/// Queries of a block of the `DECODE` kernels: those of the heads that share keys, token by token.
pub const DECODE_ROWS: u32 = 16;
/// Queries of a block of the `DECODE` kernels if there are more: 16 for each warp.
pub const WIDE_ROWS: u32 = DECODE_ROWS * TENSOR_THREADS / 32;
/// Keys of a tile of a warp of the `DECODE` kernels.
pub const DECODE_KEYS: u32 = 16;
/// Tiles of a warp that are being copied or in use.
pub const DECODE_STAGES: u32 = 3;
/// Limit of the parts into which the keys of a sequence are split.
pub const MOST_SPLITS: u32 = 64;

/// Bytes of shared memory of a block of the tiled kernels: two tiles of 16 terms.
pub const TILED_SHARED: u32 = 2 * 16 * (TILE + 4) * 4;
/// Bytes of shared memory of a block of [`kernel::FLASH`]: a tile of keys and one of values, as `f32`.
pub const FLASH_SHARED: u32 = 2 * FLASH_KEYS * MOST_ELEMENTS * 4;

/// Returns the bytes of shared memory of a block of the `FLASH2` kernels for heads of up to `elements`:
/// queries, two tiles of keys and two of values.
pub const fn flash2_shared(elements: u32) -> u32 {
    (FLASH2_ROWS + 4 * FLASH2_KEYS) * elements * 2
}

/// Returns the bytes of shared memory of a block of the `DECODE` kernels for heads of up to `elements`:
/// queries, and the stages of keys and values of each warp.
pub const fn decode_shared(elements: u32) -> u32 {
    (WIDE_ROWS + TENSOR_THREADS / 32 * DECODE_STAGES * 2 * DECODE_KEYS) * elements * 2
}

/// Returns the rows of a block of the `DECODE` kernels for a group of `rows` rows: heads that share keys,
/// times queries.
#[inline(always)]
pub const fn decode_rows(rows: u32) -> u32 {
    if rows > DECODE_ROWS {
        WIDE_ROWS
    } else {
        DECODE_ROWS
    }
}

/// The layout of the vectors of a head's elements, by sequence, head and token.
///
/// Strides instead of sizes let a launch read keys and values from the cache, from a page or from a tensor of
/// the caller without a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct VectorLayout {
    /// Address of the first element, a multiple of 16.
    pub address: u64,
    /// Distance of sequences in elements; like the other distances a multiple of 8.
    pub sequence: u64,
    /// Distance of heads in elements.
    pub head: u64,
    /// Distance of tokens in elements.
    pub token: u64,
}

impl VectorLayout {
    /// Returns the address of a vector.
    #[inline(always)]
    pub fn at(&self, sequence: u32, head: u32, token: u32) -> u64 {
        let elements = u64::from(sequence) * self.sequence
            + u64::from(head) * self.head
            + u64::from(token) * self.token;
        self.address + elements * 2
    }
}

/// Parameters of attention: `query_tokens` queries a head over `key_tokens` keys. Queries without a key get
/// zeros.
///
/// Argument of every kernel of this module. The three kernels of the first step run in order on one stream
/// and share the workspace; the others need a workspace only if the keys are split.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct FlashParameters {
    /// `heads` heads of `query_tokens` tokens.
    pub queries: VectorLayout,
    /// `kv_heads` heads of `key_tokens` tokens.
    pub keys: VectorLayout,
    /// As the keys.
    pub values: VectorLayout,
    /// Layout of the results, with the sizes of the queries; overlaps none of the others.
    pub y: VectorLayout,
    /// Address of the number of valid keys, a `u32` for each sequence, where more than `key_tokens` count as
    /// `key_tokens`; 0 if all are valid.
    pub counts: u64,
    /// Address of `f32` numbers: scores of each query (the first steps), or `splits` times `head_elements` +
    /// 2 numbers for each query (`DECODE`).
    pub workspace: u64,
    /// Number of sequences.
    pub sequences: u32,
    /// Heads of queries.
    pub heads: u32,
    /// Heads of keys and values: `heads` is a multiple.
    pub kv_heads: u32,
    /// Queries of a head.
    pub query_tokens: u32,
    /// Keys of a head.
    pub key_tokens: u32,
    /// Elements of a head, a multiple of 8, at most [`MOST_ELEMENTS`].
    pub head_elements: u32,
    /// 1 if the last query attends to all keys and each query before it to one key less; 0 if all attend to
    /// all.
    pub causal: u32,
    /// 1 for bf16, 0 for f16.
    pub is_bf16: u32,
    /// Number of parts of the keys, for `DECODE`.
    pub splits: u32,
    /// Factor of the products of queries and keys, above 0.
    pub scale: f32,
}

impl FlashParameters {
    /// Returns the head of keys of a head of queries.
    #[inline(always)]
    pub fn kv_head(&self, head: u32) -> u32 {
        head / (self.heads / self.kv_heads.max(1)).max(1)
    }

    /// Returns the number of the first `keys` keys that query `token` attends to.
    #[inline(always)]
    pub fn limit(&self, token: u32, keys: u32) -> u32 {
        if self.causal == 0 {
            return keys;
        }
        let seen = i64::from(token) + 1 + i64::from(keys) - i64::from(self.query_tokens);
        seen.clamp(0, i64::from(keys)) as u32
    }

    /// Returns the number of queries of all heads and sequences.
    #[inline(always)]
    pub fn rows(&self) -> u64 {
        u64::from(self.sequences) * u64::from(self.heads) * u64::from(self.query_tokens)
    }
}
