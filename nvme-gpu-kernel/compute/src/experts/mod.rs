//! Experts of a mixture (MoE): a token's router chooses a few, and a cache in memory of the GPU holds those that were used.
//!
//! A layer's step is a chain of launches on one stream, none of which the host decides on: [`Route`] chooses experts,
//! [`Admit`] finds each in the cache or gives it a slot and lists what has to be read, `nvme_read_listed` reads that,
//! [`Settle`] marks slots whose reads failed, [`Product`] multiplies, [`Join`] adds up.

pub mod cache;
#[cfg(all(target_arch = "nvptx64", feature = "experts"))]
mod kernels;
#[cfg(not(target_arch = "nvptx64"))]
pub mod reference;

/// Matrices of an expert: gate, up and down.
pub const MATRICES: usize = 3;
/// Experts of a layer at most.
pub const MOST_EXPERTS: u32 = 4096;
/// Slots of a cache at most.
pub const MOST_SLOTS: u32 = 1 << 16;
/// The slot of a choice whose expert is not there.
pub const NO_SLOT: u32 = u32::MAX;

/// An expert that a token's router chose.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct Chosen {
    /// Which.
    pub expert: u32,
    /// Its slot, or [`NO_SLOT`].
    pub slot: u32,
    /// What its result is multiplied by.
    pub weight: f32,
    /// 0.
    pub reserved: u32,
}

/// Where the experts of a layer lie on the drive: of each matrix those of all experts one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Places {
    /// First byte of each matrix of expert 0.
    pub first: [u64; MATRICES],
    /// Bytes of each matrix of an expert.
    pub bytes: [u64; MATRICES],
}

impl Places {
    /// The first byte of a matrix on the drive.
    #[inline(always)]
    pub fn byte(&self, matrix: usize, expert: u32) -> u64 {
        self.first[matrix] + u64::from(expert) * self.bytes[matrix]
    }

    /// Where a matrix begins in its slot: equal to its byte on the drive modulo 16.
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

    /// Bytes of a slot for an expert of this layer, a multiple of 16.
    pub fn slot_bytes(&self) -> u64 {
        self.bytes.iter().map(|bytes| room(*bytes)).sum()
    }
}

/// Bytes that a matrix takes in a slot, wherever it begins modulo 16, and the loads around it.
#[inline(always)]
const fn room(bytes: u64) -> u64 {
    (bytes + 15).next_multiple_of(16)
}

/// Which slot is given to another expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Policy {
    /// The one whose last use is longest ago.
    #[default]
    Lru,
    /// The one that was used least often since its expert came; of those the one whose last use is longest ago.
    Lfu,
    /// The next one that was not used since the hand passed it.
    Clock,
}

impl Policy {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Lru, Self::Lfu, Self::Clock];

    /// The one with the number `number`.
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

/// Chooses for each of `tokens` tokens the `choices` experts with the largest logits, of equal ones the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Route {
    /// `tokens` vectors of `experts` logits.
    pub logits: u64,
    /// `choices` [`Chosen`] for each token.
    pub chosen: u64,
    /// Gets the softmax over all experts, as the logits; 0 for none.
    pub probabilities: u64,
    /// How many tokens.
    pub tokens: u32,
    /// Experts of the layer.
    pub experts: u32,
    /// How many are chosen, `experts` at most.
    pub choices: u32,
    /// 1 for weights that are the softmax over all experts, 0 for the softmax over those that are chosen.
    pub over_all: u32,
}

/// Finds each chosen expert in the cache, or gives it a slot and lists what is read into that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Admit {
    /// [`cache::words`] words, zero before the first use.
    pub words: u64,
    /// `pairs` [`Chosen`].
    pub chosen: u64,
    /// A [`ListHead`](nvme_gpu_kernel::rows::ListHead) and [`MATRICES`] ranges for each pair.
    pub list: u64,
    /// The layer's [`Places`].
    pub places: u64,
    /// The slots.
    pub data: u64,
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// Slots, [`MOST_SLOTS`] at most.
    pub slots: u32,
    /// The first of them, which keep their experts.
    pub pinned: u32,
    /// Experts of a layer.
    pub experts: u32,
    /// Layers.
    pub layers: u32,
    /// The layer.
    pub layer: u32,
    /// A [`Policy`].
    pub policy: u32,
    /// Choices of all tokens.
    pub pairs: u32,
    /// log2 of the bytes of a piece of what is read.
    pub piece_shift: u32,
}

/// Marks the slots whose reads failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Settle {
    /// What listed the reads.
    pub admit: Admit,
    /// An `i32` for each piece.
    pub status: u64,
    /// How many of them there are.
    pub most_pieces: u64,
}

/// `y[pair] = W x` with a matrix of the pair's expert; NaN where that is not there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Product {
    /// What gave the pairs their slots.
    pub admit: Admit,
    /// Vectors of `columns` elements: one for each token, or for each pair.
    pub x: u64,
    /// For each pair a vector of `rows` elements.
    pub y: u64,
    /// Rows of the matrix.
    pub rows: u32,
    /// Its columns.
    pub columns: u32,
    /// Its [`Stored`](nvme_formats::Stored).
    pub stored: u32,
    /// Which of the [`MATRICES`].
    pub matrix: u32,
    /// Pairs that share a vector `x`: the choices of a token, or 1.
    pub shared: u32,
    /// 0.
    pub reserved: u32,
}

/// `y[token] = sum of weight * x[pair]` over the pairs of a token in their order, added to what `y` holds if `adds`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Join {
    /// `choices` [`Chosen`] for each token.
    pub chosen: u64,
    /// For each of them a vector of `elements` elements.
    pub x: u64,
    /// For each token a vector.
    pub y: u64,
    /// How many tokens.
    pub tokens: u32,
    /// Of each token.
    pub choices: u32,
    /// Of a vector.
    pub elements: u32,
    /// 1 to add to `y`, 0 to write it.
    pub adds: u32,
}
