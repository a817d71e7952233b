//! Row ids of lookup tables from the newest tokens of sequences: the parameters of two kernels.
//!
//! A hash of an n-gram is the XOR of its tokens, each multiplied by the multiplier of its place, modulo the rows of a head.
//! Sequences lie one after the other, as engines batch them, and each has a history: the tokens before its first one.
//!
//! The order of launches: `nvme_ngram_rows` for the tokens of a step; once it is known how many of them stand,
//! `nvme_ngram_commit` adds these to the histories. Both read what is in memory when they run, so that a graph with them is
//! replayed for other tokens.

#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "ngrams"))]
mod kernel;

#[cfg(all(not(target_arch = "nvptx64"), feature = "lanes"))]
pub use kernel::{nvme_ngram_commit, nvme_ngram_rows};

/// Stands for a token of an image.
pub const IMAGE: i64 = -1;
/// Row id where no row is known: for a token that the model does not have, and for words about sequences that
/// cannot be. A gather reports it as out of range.
pub const NO_ROW: i64 = -1;
/// Token of a history after a commit that cannot be: every n-gram that reaches it gets [`NO_ROW`].
pub const UNKNOWN: i64 = i64::MIN;

/// A head: a hash of n-grams of one length, and its rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct NgramHead {
    /// Number of rows, at least 1.
    pub rows: u64,
    /// Its first row in the table.
    pub first_row: u64,
    /// Tokens of its n-grams, 1 to the launch's `length`.
    pub length: u64,
}

/// Parameters of `nvme_ngram_rows` and `nvme_ngram_commit`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct NgramLaunch {
    /// Address of the tokens of all sequences, `i64` or `i32` each.
    pub tokens: u64,
    /// Address of `sequences` + 1 `i32`: the first token of each sequence, and the end of the last one. 0 for one sequence
    /// of all tokens.
    pub starts: u64,
    /// Address of `histories` times `length` - 1 `i64`, the newest token of each last; 0 for sequences that begin.
    pub histories: u64,
    /// Address of an `i64` for each sequence, the number of its history; 0 for histories in the order of the sequences.
    pub slots: u64,
    /// Of a commit: address of an `i32` for each sequence, the number of its first tokens that stand; 0 for all.
    pub accepted: u64,
    /// Of row ids: address of `heads` `i64` for each token.
    pub out: u64,
    /// Address of the [`NgramHead`]s.
    pub heads: u64,
    /// Address of `length` multipliers of 8 bytes, that of the newest token first.
    pub multipliers: u64,
    /// Address of an `u32` for each token that the model has, its class; 0 where tokens are hashed themselves.
    pub classes: u64,
    /// Number of tokens.
    pub token_count: u64,
    /// Number of tokens that the model has.
    pub known_tokens: u64,
    /// Number of histories.
    pub history_count: u64,
    /// Token that stands for what n-grams do not reach; the model has it.
    pub padding: i64,
    /// Number of sequences.
    pub sequences: u32,
    /// Number of heads.
    pub head_count: u32,
    /// Tokens of the longest n-gram, at least 1.
    pub length: u32,
    /// 1 if tokens are `i64`, 0 if they are `i32`.
    pub wide_tokens: u32,
    /// 1 if what is older than the padding token counts as padding, 0 if what an [`IMAGE`] hides does.
    pub ends_at_padding: u32,
    /// Reserved, 0.
    pub reserved: u32,
}

impl NgramLaunch {
    /// Returns the number of row ids.
    pub const fn ids(&self) -> u64 {
        self.token_count * self.head_count as u64
    }
}
