//! Attention over keys and values in memory of the GPU: a rung a file, from sums of one thread to tensor cores.
//!
//! `softmax(scale q k^T) v` for each head, over halves (bf16 or f16) that lie anywhere by strides; sums are `f32`. Heads
//! of queries share heads of keys and values (GQA, MQA). `docs/ladder-attention.md` is the course.

#[cfg(target_arch = "nvptx64")]
mod arch;
#[cfg(target_arch = "nvptx64")]
mod decode;
#[cfg(target_arch = "nvptx64")]
mod flash;
#[cfg(target_arch = "nvptx64")]
mod flash2;
#[cfg(target_arch = "nvptx64")]
mod naive;
#[cfg(not(target_arch = "nvptx64"))]
pub mod reference;
#[cfg(target_arch = "nvptx64")]
mod tiled;

/// The names of the kernels. Each takes a [`Flash`].
pub mod kernel {
    /// Scores of all queries and keys into the workspace. A thread has one at a time.
    pub const SCORES: &str = "nvme_attention_scores";
    /// Rows of scores to shares of values. A warp has a row at a time.
    pub const SHARES: &str = "nvme_attention_shares";
    /// Shares times values. A thread has an element at a time.
    pub const VALUES: &str = "nvme_attention_values";
    /// As [`SCORES`], a block a [`TILE`](super::TILE) of them.
    pub const SCORES_TILED: &str = "nvme_attention_scores_tiled";
    /// As [`VALUES`], a block a [`TILE`](super::TILE) of elements.
    pub const VALUES_TILED: &str = "nvme_attention_values_tiled";
    /// All of it at once, without scores in memory. A block has [`FLASH_ROWS`](super::FLASH_ROWS) queries.
    pub const FLASH: &str = "nvme_attention_flash";
    /// The same by tensor cores: heads of up to 64 elements in bf16. A block has [`FLASH2_ROWS`](super::FLASH2_ROWS)
    /// queries.
    pub const FLASH2_64_BF16: &str = "nvme_attention_flash2_64_bf16";
    /// Up to 64 elements in f16.
    pub const FLASH2_64_F16: &str = "nvme_attention_flash2_64_f16";
    /// Up to 128 elements in bf16.
    pub const FLASH2_128_BF16: &str = "nvme_attention_flash2_128_bf16";
    /// Up to 128 elements in f16.
    pub const FLASH2_128_F16: &str = "nvme_attention_flash2_128_f16";
    /// Few queries of many keys, which are split among blocks: heads of up to 64 elements in bf16.
    pub const DECODE_64_BF16: &str = "nvme_multi_query_attention_64_bf16";
    /// Up to 64 elements in f16.
    pub const DECODE_64_F16: &str = "nvme_multi_query_attention_64_f16";
    /// Up to 128 elements in bf16.
    pub const DECODE_128_BF16: &str = "nvme_multi_query_attention_128_bf16";
    /// Up to 128 elements in f16.
    pub const DECODE_128_F16: &str = "nvme_multi_query_attention_128_f16";
    /// Joins the parts of the split keys. A warp has a query at a time.
    pub const DECODE_JOIN: &str = "nvme_multi_query_join";

    /// All of [`ATTENTION_PTX`](crate::ATTENTION_PTX).
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

/// Elements of a head at most.
pub const MOST_ELEMENTS: u32 = 128;
/// Rows and columns of a tile of the tiled kernels, whose blocks have [`BLOCK_THREADS`](crate::BLOCK_THREADS) threads.
pub const TILE: u32 = 64;
/// Queries of a block of [`kernel::FLASH`], which has [`BLOCK_THREADS`](crate::BLOCK_THREADS) threads.
pub const FLASH_ROWS: u32 = 64;
/// Keys of a tile of [`kernel::FLASH`].
pub const FLASH_KEYS: u32 = 32;
/// Queries of a block of the `FLASH2` kernels.
pub const FLASH2_ROWS: u32 = 128;
/// Keys of a tile of theirs.
pub const FLASH2_KEYS: u32 = 64;
/// Threads of a block of the `FLASH2` and `DECODE` kernels.
pub const TENSOR_THREADS: u32 = 128;
/// Queries of a block of the `DECODE` kernels: of the heads that share keys, token after token.
pub const DECODE_ROWS: u32 = 16;
/// The same where there are more of them: 16 for each warp.
pub const WIDE_ROWS: u32 = DECODE_ROWS * TENSOR_THREADS / 32;
/// Keys of a tile of a warp of theirs.
pub const DECODE_KEYS: u32 = 16;
/// Tiles of a warp that are under way or in use.
pub const DECODE_STAGES: u32 = 3;
/// Parts into which the keys of a sequence are split at most.
pub const MOST_SPLITS: u32 = 64;

/// Bytes of shared memory of a block of the tiled kernels: two tiles of 16 terms.
pub const TILED_SHARED: u32 = 2 * 16 * (TILE + 4) * 4;
/// Bytes of shared memory of a block of [`kernel::FLASH`]: a tile of keys and one of values, as `f32`.
pub const FLASH_SHARED: u32 = 2 * FLASH_KEYS * MOST_ELEMENTS * 4;

/// Bytes of shared memory of a block of the `FLASH2` kernels for heads of up to `elements`: queries, two tiles of keys
/// and two of values.
pub const fn flash2_shared(elements: u32) -> u32 {
    (FLASH2_ROWS + 4 * FLASH2_KEYS) * elements * 2
}

/// Bytes of shared memory of a block of the `DECODE` kernels for heads of up to `elements`: queries, and the stages of
/// keys and values of each warp.
pub const fn decode_shared(elements: u32) -> u32 {
    (WIDE_ROWS + TENSOR_THREADS / 32 * DECODE_STAGES * 2 * DECODE_KEYS) * elements * 2
}

/// Rows of a block of the `DECODE` kernels, where a group has `rows`: heads that share keys, times queries.
#[inline(always)]
pub const fn decode_rows(rows: u32) -> u32 {
    if rows > DECODE_ROWS {
        WIDE_ROWS
    } else {
        DECODE_ROWS
    }
}

/// Vectors of a head's elements, by sequence, head and token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Vectors {
    /// The first element, a multiple of 16.
    pub address: u64,
    /// From one sequence to the next, in elements, as the others a multiple of 8.
    pub sequence: u64,
    /// From one head to the next.
    pub head: u64,
    /// From one token to the next.
    pub token: u64,
}

impl Vectors {
    /// Where a vector begins.
    #[inline(always)]
    pub fn at(&self, sequence: u32, head: u32, token: u32) -> u64 {
        let elements = u64::from(sequence) * self.sequence
            + u64::from(head) * self.head
            + u64::from(token) * self.token;
        self.address + elements * 2
    }
}

/// Attention of `query_tokens` queries a head over `key_tokens` keys. Queries without a key get zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct Flash {
    /// `heads` heads of `query_tokens` tokens.
    pub queries: Vectors,
    /// `kv_heads` heads of `key_tokens` tokens.
    pub keys: Vectors,
    /// As the keys.
    pub values: Vectors,
    /// As the queries; overlaps none of the others.
    pub y: Vectors,
    /// How many keys count, a `u32` for each sequence; 0: all.
    pub counts: u64,
    /// `f32`: scores of each query (the first rungs), or `splits` times `head_elements` + 2 numbers for each (`DECODE`).
    pub workspace: u64,
    /// How many sequences.
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
    /// 1 where the last query attends to all keys, each before it to one less; 0 where all attend to all.
    pub causal: u32,
    /// 1 for bf16, 0 for f16.
    pub is_bf16: u32,
    /// Parts of the keys, for `DECODE`.
    pub splits: u32,
    /// By what products of queries and keys are multiplied, above 0.
    pub scale: f32,
}

impl Flash {
    /// The head of keys of a head of queries.
    #[inline(always)]
    pub fn kv_head(&self, head: u32) -> u32 {
        head / (self.heads / self.kv_heads.max(1)).max(1)
    }

    /// How many of `keys` keys query `token` attends to.
    #[inline(always)]
    pub fn limit(&self, token: u32, keys: u32) -> u32 {
        if self.causal == 0 {
            return keys;
        }
        let seen = i64::from(token) + 1 + i64::from(keys) - i64::from(self.query_tokens);
        seen.clamp(0, i64::from(keys)) as u32
    }

    /// Queries of all heads and sequences.
    #[inline(always)]
    pub fn rows(&self) -> u64 {
        u64::from(self.sequences) * u64::from(self.heads) * u64::from(self.query_tokens)
    }
}
