//! Search for the nearest vectors in a graph on a drive: what a node holds, what a launch is given, and how candidates
//! are ordered. The kernel, the reference on the CPU and the stand-in of CUDA use the same words.
//!
//! A node is [`NODE_BYTES`] bytes, a row of a table, in words of 32 bits, little endian:
//!
//! | words | what |
//! | --- | --- |
//! | 0 to 63 | ids of neighbours; [`NONE`] from the degree on |
//! | 64 | its id |
//! | 65 | its degree |
//! | 66 | tag of the index |
//! | 67 | [`sum`](self::word) of all other words that are used |
//! | 96 on | the vector, `f32` |
//!
//! The rest is 0. A node that is not the one asked for is noticed by its id, its tag or its sum.

#[cfg(all(target_arch = "nvptx64", feature = "search"))]
mod arch;
#[cfg(all(target_arch = "nvptx64", feature = "search"))]
mod kernel;
#[cfg(all(target_arch = "nvptx64", feature = "search"))]
mod list;
#[cfg(not(target_arch = "nvptx64"))]
pub mod walk;

use nvme_gpu_kernel::rows::Gather;

/// Bytes of a node.
pub const NODE_BYTES: u64 = 4096;
/// Words of a node.
pub const NODE_WORDS: usize = NODE_BYTES as usize / 4;
/// Neighbours of a node at most.
pub const MOST_DEGREE: u32 = 64;
/// No neighbour.
pub const NONE: u32 = u32::MAX;
/// Nodes of an index at most: an id takes 31 bits of a [`key`].
pub const MOST_NODES: u64 = (1 << 31) - 1;
/// Elements of a vector at most.
pub const MOST_ELEMENTS: u32 = (NODE_WORDS - word::VECTOR) as u32;
/// Centroids of a subspace: a code is a byte.
pub const CENTROIDS: u32 = 256;
/// Candidates of a query at most.
pub const MOST_LIST: u32 = 256;
/// Nodes of a query that are read at a time at most.
pub const MOST_BEAM: u32 = 32;
/// Results of a query at most: a lane holds one.
pub const MOST_RESULTS: u32 = 32;

/// Places of a node's words.
pub mod word {
    /// Its id.
    pub const ID: usize = 64;
    /// How many neighbours.
    pub const DEGREE: usize = 65;
    /// The tag of its index.
    pub const TAG: usize = 66;
    /// The wrapping sum of the [terms](super::term) of the words before it and of those of the vector.
    pub const SUM: usize = 67;
    /// The first of the vector.
    pub const VECTOR: usize = 96;
}

/// What became of a query, beside the codes of [`rows`](nvme_gpu_kernel::rows::code).
pub mod code {
    /// The drive gave other bytes than the node that was asked for.
    pub const WRONG_NODE: i32 = -20;
    /// An element of the query is not finite.
    pub const BAD_QUERY: i32 = -21;
}

/// What word `index` of a node adds to its sum.
#[inline(always)]
pub fn term(index: u32, word: u32) -> u32 {
    let mixed = (word ^ index.wrapping_mul(0x9E37_79B1)).wrapping_mul(0x85EB_CA6B);
    (mixed ^ mixed >> 15).wrapping_mul(0xC2B2_AE35)
}

/// A candidate as a number: a nearer one is less, then one with a lower id. `distance` is not negative. Bit 0 says
/// whether it was expanded.
#[inline(always)]
pub fn key(distance: f32, id: u32) -> u64 {
    u64::from(distance.to_bits()) << 32 | u64::from(id << 1)
}

/// The id in a [`key`].
#[inline(always)]
pub fn id_of(key: u64) -> u32 {
    key as u32 >> 1
}

/// The distance in a [`key`].
#[inline(always)]
pub fn distance_of(key: u64) -> f32 {
    f32::from_bits((key >> 32) as u32)
}

/// The key of no candidate.
pub const NO_KEY: u64 = u64::MAX;
/// Set in the key of a candidate whose node was asked for.
pub const EXPANDED: u64 = 1;

/// Searches for the nearest vectors of queries: each warp takes one query at a time.
///
/// Addresses are those of the GPU. Every list is of `rows.count` queries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Search {
    /// The table of nodes, and how many queries (`count`).
    pub rows: Gather,
    /// `elements` `f32` each.
    pub queries: u64,
    /// For each subspace, for each of its elements, that element of all centroids: `f32`.
    pub centroids: u64,
    /// `code_bytes` bytes for each node, a byte for each subspace.
    pub codes: u64,
    /// For each warp of each station: [`CENTROIDS`] `f32` for each subspace.
    pub tables: u64,
    /// `results` `i64` each: ids, nearest first, -1 where there is none.
    pub ids: u64,
    /// As many `f32`: squared distances, infinite where there is none.
    pub distances: u64,
    /// An `i32` each: 0, or why there are no results.
    pub status: u64,
    /// A `u32` each: nodes that were asked for.
    pub reads: u64,
    /// Elements of a vector.
    pub elements: u32,
    /// Elements of a subspace.
    pub sub_elements: u32,
    /// Subspaces.
    pub subspaces: u32,
    /// From one node's codes to the next, in bytes, a multiple of 4.
    pub code_bytes: u32,
    /// Where each search begins.
    pub entry: u32,
    /// Of the index.
    pub tag: u32,
    /// Candidates kept, 1 to [`MOST_LIST`].
    pub list: u32,
    /// Nodes read at a time, 1 to [`MOST_BEAM`].
    pub beam: u32,
    /// Results, 1 to [`MOST_RESULTS`].
    pub results: u32,
    /// Zero.
    pub reserved: u32,
}
