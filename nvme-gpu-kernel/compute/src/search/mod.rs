//! Search for the nearest vectors in a graph on a drive: the layout of a node, the parameters of a launch,
//! and the order of candidates. The kernel, the reference on the CPU and the stand-in of CUDA use the same
//! words.
//!
//! A node is a row of a table, as many blocks of [`NODE_BLOCK`] bytes as its vector needs ([`node_bytes`]), in words of 32
//! bits, little endian:
//!
//! | words | content |
//! | --- | --- |
//! | 0 to 63 | ids of neighbours; [`NONE`] from the degree on |
//! | 64 | its id |
//! | 65 | its degree |
//! | 66 | tag of the index |
//! | 67 | [`sum`](self::word), a checksum of all other words that are used |
//! | 96 on | the vector, `f32` |
//!
//! The rest is 0. A wrong or damaged node is detected by its id, its tag or its checksum.

#[cfg(all(target_arch = "nvptx64", feature = "search"))]
mod arch;
#[cfg(all(not(target_arch = "nvptx64"), feature = "lanes"))]
#[path = "lanes.rs"]
mod arch;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "search"))]
mod kernel;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "search"))]
mod list;
#[cfg(not(target_arch = "nvptx64"))]
pub mod walk;

#[cfg(all(not(target_arch = "nvptx64"), feature = "lanes"))]
pub use kernel::nvme_search;

use nvme_gpu_kernel::rows::GatherLaunch;

/// Bytes of a block of a node.
pub const NODE_BLOCK: u64 = 4096;
/// Blocks of a node at most.
pub const MOST_NODE_BLOCKS: u64 = 16;
/// Limit of the neighbours of a node.
pub const MOST_DEGREE: u32 = 64;
/// Id of an unused neighbour.
pub const NONE: u32 = u32::MAX;
/// Limit of the nodes of an index: an id takes 31 bits of a [`key`].
pub const MOST_NODES: u64 = (1 << 31) - 1;
/// Limit of the elements of a vector.
pub const MOST_ELEMENTS: u32 = (MOST_NODE_BLOCKS * NODE_BLOCK / 4) as u32 - word::VECTOR as u32;
/// Centroids of a subspace: a code is a byte.
pub const CENTROIDS: u32 = 256;
/// Limit of the candidates of a query.
pub const MOST_LIST: u32 = 256;
/// Limit of the nodes of a query that are read at once.
pub const MOST_BEAM: u32 = 32;
/// Limit of the results of a query: each lane holds one.
pub const MOST_RESULTS: u32 = 32;

/// Positions of a node's words.
pub mod word {
    /// Id of the node.
    pub const ID: usize = 64;
    /// Number of neighbours.
    pub const DEGREE: usize = 65;
    /// Tag of the index.
    pub const TAG: usize = 66;
    /// Checksum: the wrapping sum of the [terms](super::term) of the words before it and of those of the
    /// vector.
    pub const SUM: usize = 67;
    /// First word of the vector.
    pub const VECTOR: usize = 96;
}

/// Codes of a query's end, beside those of [`rows`](nvme_gpu_kernel::rows::code).
pub mod code {
    /// The drive returned other bytes than the requested node.
    pub const WRONG_NODE: i32 = -20;
    /// An element of the query is not finite.
    pub const BAD_QUERY: i32 = -21;
}

/// Returns the bytes of a node whose vector has `elements` elements: whole blocks.
pub const fn node_bytes(elements: u32) -> u64 {
    ((word::VECTOR as u64 + elements as u64) * 4).next_multiple_of(NODE_BLOCK)
}

/// Returns the term that word `index` of a node adds to its checksum.
///
/// The index is mixed in, so that words in the wrong order change the sum; the multiplications spread each
/// bit over the word, so that two errors seldom cancel.
#[inline(always)]
pub fn term(index: u32, word: u32) -> u32 {
    let mixed = (word ^ index.wrapping_mul(0x9E37_79B1)).wrapping_mul(0x85EB_CA6B);
    (mixed ^ mixed >> 15).wrapping_mul(0xC2B2_AE35)
}

/// Encodes a candidate as a number: a nearer one is less, and of equal distances the one with the lower id.
/// `distance` is not negative. Bit 0 is set once it was expanded.
///
/// The bits of non-negative floats compare like the floats, so one 64-bit comparison orders candidates by
/// distance and then by id, and no two nodes have equal keys.
#[inline(always)]
pub fn key(distance: f32, id: u32) -> u64 {
    u64::from(distance.to_bits()) << 32 | u64::from(id << 1)
}

/// Returns the id in a [`key`].
#[inline(always)]
pub fn id_of(key: u64) -> u32 {
    key as u32 >> 1
}

/// Returns the distance in a [`key`].
#[inline(always)]
pub fn distance_of(key: u64) -> f32 {
    f32::from_bits((key >> 32) as u32)
}

/// Key of no candidate.
pub const NO_KEY: u64 = u64::MAX;
/// Bit of a key whose node was requested.
pub const EXPANDED: u64 = 1;

/// Parameters of a search for the nearest vectors of queries.
///
/// Addresses are those of the GPU. Every array has an entry for each of `rows.count` queries unless it says
/// otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct SearchLaunch {
    /// Table of nodes, and the number of queries (`count`).
    pub rows: GatherLaunch,
    /// Address of `elements` `f32` for each query.
    pub queries: u64,
    /// Address of the centroids: for each subspace, for each of its elements, that element of all centroids
    /// as `f32`.
    pub centroids: u64,
    /// Address of the codes: `code_bytes` bytes for each node, a byte for each subspace.
    pub codes: u64,
    /// Address of the distance tables: for each warp of each station, [`CENTROIDS`] `f32` for each subspace.
    pub tables: u64,
    /// Address of `results` ids for each query, `i64`, nearest first, -1 for none.
    pub ids: u64,
    /// Address of as many squared distances, `f32`, infinite for none.
    pub distances: u64,
    /// Address of an `i32` status for each query: 0, or the reason why there are no results.
    pub status: u64,
    /// Address of a `u32` for each query: the number of requested nodes.
    pub reads: u64,
    /// Elements of a vector.
    pub elements: u32,
    /// Elements of a subspace.
    pub sub_elements: u32,
    /// Subspaces.
    pub subspaces: u32,
    /// Distance of the codes of neighbouring nodes in bytes, a multiple of 4.
    pub code_bytes: u32,
    /// Id of the node at which each search starts.
    pub entry: u32,
    /// Tag of the index.
    pub tag: u32,
    /// Candidates kept, 1 to [`MOST_LIST`].
    pub list: u32,
    /// Nodes read at once, 1 to [`MOST_BEAM`].
    pub beam: u32,
    /// Results, 1 to [`MOST_RESULTS`].
    pub results: u32,
    /// Zero.
    pub reserved: u32,
}
