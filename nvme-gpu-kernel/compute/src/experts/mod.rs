//! Mixture of experts (MoE): a token's router selects a few experts, and a cache in GPU memory holds recently
//! used ones.
//!
//! A layer's step is a chain of launches on one stream, and the host decides nothing in between. In this
//! order: [`RouteParameters`] selects experts; [`AdmitParameters`] finds each in the cache or assigns a slot and lists
//! the reads; `nvme_read_listed` (of `nvme-gpu-kernel`) reads them from the drive; [`SettleParameters`] marks slots
//! whose reads failed; [`ProductParameters`] multiplies, once for each matrix; [`ActivateParameters`] joins gate and up;
//! [`JoinParameters`] adds up the weighted results.

mod activation;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "experts"))]
mod arrange;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "experts"))]
mod batched;
pub mod cache;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "experts"))]
mod kernels;
pub mod published;
#[cfg(not(target_arch = "nvptx64"))]
pub mod reference;

pub use activation::ExpertActivation;
#[cfg(all(not(target_arch = "nvptx64"), feature = "lanes"))]
pub use arrange::{nvme_moe_admit_published, nvme_moe_arrange};
#[cfg(all(not(target_arch = "nvptx64"), feature = "lanes"))]
pub use batched::nvme_moe_product_batched;
#[cfg(all(not(target_arch = "nvptx64"), feature = "lanes"))]
pub use kernels::{
    nvme_moe_activate, nvme_moe_admit, nvme_moe_join, nvme_moe_product, nvme_moe_product_quantised,
    nvme_moe_product_wide, nvme_moe_route, nvme_moe_settle,
};

/// Matrices of an expert: gate, up and down.
pub const MATRICES: usize = 3;
/// Limit of the experts of a layer.
pub const MOST_EXPERTS: u32 = 4096;
/// Limit of the slots of a cache.
pub const MOST_SLOTS: u32 = 1 << 16;
/// Slot of a choice whose expert is not loaded.
pub const NO_SLOT: u32 = u32::MAX;

/// An expert selected by a token's router.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct ChosenExpert {
    /// Number of the expert in its layer.
    pub expert: u32,
    /// Its slot, or [`NO_SLOT`].
    pub slot: u32,
    /// Weight of its result.
    pub weight: f32,
    /// Reserved, 0.
    pub reserved: u32,
}

/// The location of a layer's experts on the drive: for each matrix, those of all experts consecutively.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ExpertLocations {
    /// First byte of each matrix of expert 0.
    pub first: [u64; MATRICES],
    /// Bytes of each matrix of an expert.
    pub bytes: [u64; MATRICES],
}

impl ExpertLocations {
    /// Returns the first byte of a matrix on the drive.
    #[inline(always)]
    pub fn byte(&self, matrix: usize, expert: u32) -> u64 {
        self.first[matrix] + u64::from(expert) * self.bytes[matrix]
    }

    /// Returns the offset of a matrix in its slot. It is equal to the matrix's byte on the drive modulo 16,
    /// so that copies and loads of 16 bytes keep their alignment.
    #[inline(always)]
    pub fn at(&self, matrix: usize, expert: u32) -> u64 {
        let mut at = 0;
        let mut before = 0;
        while before < matrix {
            at += room(self.bytes[before]);
            before += 1;
        }
        at + self.byte(matrix, expert) % 16
    }

    /// Returns the bytes of a slot for an expert of this layer, a multiple of 16.
    pub fn slot_bytes(&self) -> u64 {
        self.bytes.iter().map(|bytes| room(*bytes)).sum()
    }
}

/// Returns the bytes that a matrix takes in a slot, at any start modulo 16, with the bytes that aligned loads
/// read around it.
#[inline(always)]
const fn room(bytes: u64) -> u64 {
    (bytes + 15).next_multiple_of(16)
}

/// The replacement policy: the choice of the slot for a new expert.
///
/// The policy decides only about the speed: with any of them a step gets every expert that fits, and pinned
/// slots are never replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum ReplacementPolicy {
    /// Least recently used.
    #[default]
    Lru,
    /// Least frequently used since its expert was loaded; of equal ones the least recently used.
    Lfu,
    /// Clock: the next slot that was not used since the hand passed it.
    Clock,
}

impl ReplacementPolicy {
    /// All policies.
    pub const ALL: [Self; 3] = [Self::Lru, Self::Lfu, Self::Clock];

    /// Returns the policy with the number `number`.
    #[inline(always)]
    pub const fn of_number(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::Lru),
            1 => Some(Self::Lfu),
            2 => Some(Self::Clock),
            _ => None,
        }
    }
}

/// Parameters of the router: selects for each of `tokens` tokens the `choices` experts with the largest
/// logits, of equal ones the first.
///
/// Argument of `nvme_moe_route`. Every choice starts with the slot [`NO_SLOT`]; the lookup that comes next
/// replaces it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RouteParameters {
    /// Address of `tokens` vectors of `experts` logits.
    pub logits: u64,
    /// Address of the result: `choices` [`ChosenExpert`] for each token.
    pub chosen: u64,
    /// Address for the softmax over all experts, in the layout of the logits; 0 for none.
    pub probabilities: u64,
    /// Number of tokens.
    pub tokens: u32,
    /// Experts of the layer.
    pub experts: u32,
    /// Number of selected experts, at most `experts`.
    pub choices: u32,
    /// 1 for weights that are the softmax over all experts, 0 for the softmax over the selected ones.
    pub over_all: u32,
}

/// Parameters of the cache lookup: finds each selected expert in the cache, or assigns a slot and lists the
/// reads into it.
///
/// Argument of `nvme_moe_admit`, in which a single warp works; the kernels after it in the step get the same
/// words again, inside their own arguments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct AdmitParameters {
    /// Address of [`cache::words`] words, zero before the first use.
    pub words: u64,
    /// Address of `pairs` [`ChosenExpert`].
    pub chosen: u64,
    /// Address of a [`ListHead`](nvme_gpu_kernel::rows::ListHead), followed by [`MATRICES`] ranges for each
    /// pair.
    pub list: u64,
    /// Address of the layer's [`ExpertLocations`].
    pub places: u64,
    /// Address of the slots.
    pub data: u64,
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// Number of slots, at most [`MOST_SLOTS`].
    pub slots: u32,
    /// Number of pinned slots, the first ones, which keep their experts.
    pub pinned: u32,
    /// Experts of a layer.
    pub experts: u32,
    /// Number of layers.
    pub layers: u32,
    /// Number of the current layer.
    pub layer: u32,
    /// Number of a [`ReplacementPolicy`].
    pub policy: u32,
    /// Number of choices of all tokens.
    pub pairs: u32,
    /// log2 of the bytes of one read.
    pub piece_shift: u32,
}

/// Parameters of the kernel that marks the slots whose reads failed.
///
/// It runs after the reads and before the products, on the same stream, so that no product uses a slot whose
/// read failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct SettleParameters {
    /// The lookup that listed the reads.
    pub admit: AdmitParameters,
    /// Address of an `i32` status for each read.
    pub status: u64,
    /// Number of the status words.
    pub most_pieces: u64,
}

/// Parameters of `y[pair] = W x` with a matrix of the pair's expert; the result is NaN if the expert is not
/// loaded.
///
/// Argument of the `nvme_moe_product` kernels, which differ in the formats that they multiply and in the
/// order of their loads, not in the result's meaning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ProductParameters {
    /// The lookup that assigned the slots.
    pub admit: AdmitParameters,
    /// Address of vectors of `columns` elements: one for each token, or for each pair.
    pub x: u64,
    /// Address of a vector of `rows` elements for each pair.
    pub y: u64,
    /// Rows of the matrix.
    pub rows: u32,
    /// Its columns.
    pub columns: u32,
    /// Number of its [`StoredFormat`](nvme_formats::StoredFormat).
    pub stored: u32,
    /// Index of the matrix, below [`MATRICES`].
    pub matrix: u32,
    /// Number of pairs that share a vector `x`: the choices of a token, or 1.
    pub shared: u32,
    /// Reserved, 0.
    pub reserved: u32,
}

impl ProductParameters {
    /// Rows that a block of `nvme_moe_product_batched` computes.
    pub const BATCHED_ROWS: u32 = 128;

    /// Returns the blocks of a launch of `nvme_moe_product_batched`.
    pub fn batched_blocks(&self) -> u64 {
        let parts = self.rows.div_ceil(Self::BATCHED_ROWS);
        u64::from(self.admit.experts) * u64::from(parts)
    }

    /// True if `nvme_moe_product_batched` computes it faster than `nvme_moe_product_quantised`, where both can: each expert
    /// has several pairs.
    pub fn is_batched(&self) -> bool {
        const PAIRS_OF_EXPERT: u32 = 4;
        self.admit.pairs / PAIRS_OF_EXPERT >= self.admit.experts
    }
}

/// Parameters of the [`ExpertActivation`] of each pair's gate and up, into gate.
///
/// Argument of `nvme_moe_activate`. A gate that is NaN, because its expert is not loaded, stays NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct ActivateParameters {
    /// Address of `pairs` [`ChosenExpert`].
    pub chosen: u64,
    /// Address of a vector of `elements` elements for each pair, which is overwritten.
    pub gate: u64,
    /// Address of as many vectors.
    pub up: u64,
    /// Address of a vector of `elements` elements for each expert of the layer, which is added to gate; 0 for none.
    pub gate_bias: u64,
    /// Address of as many vectors, which are added to up; 0 for none.
    pub up_bias: u64,
    /// Number of elements of a vector.
    pub elements: u32,
    /// Number of choices of all tokens.
    pub pairs: u32,
    /// Number of the [`ExpertActivation`].
    pub activation: u32,
    /// Its limit, or 0.
    pub limit: f32,
    /// Its factor, or 0.
    pub alpha: f32,
    /// Reserved, 0.
    pub reserved: u32,
}

/// Parameters of `y[token] = sum of weight * (x[pair] + bias)` over the pairs of a token in their order, added to `y`
/// if `adds` is 1.
///
/// Argument of `nvme_moe_join`. The order of the additions is fixed, so the same inputs give the same bits in
/// every run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct JoinParameters {
    /// Address of `choices` [`ChosenExpert`] for each token.
    pub chosen: u64,
    /// Address of a vector of `elements` elements for each of them.
    pub x: u64,
    /// Address of the result, a vector for each token.
    pub y: u64,
    /// Address of a vector of `elements` elements for each expert of the layer; 0 for none.
    pub bias: u64,
    /// Number of tokens.
    pub tokens: u32,
    /// Number of choices of a token.
    pub choices: u32,
    /// Number of elements of a vector.
    pub elements: u32,
    /// 1 to add to `y`, 0 to write it.
    pub adds: u32,
}
