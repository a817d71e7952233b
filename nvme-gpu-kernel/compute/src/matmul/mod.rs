//! `C = A B`, rung by rung: each kernel is the one before with one thing changed. docs/ladder.md is the course.
//!
//! All take one [`Matmul`]. The blocks of a launch are those of [`Rung::grid`], [`Rung::THREADS`] threads each.

#[cfg(all(
    target_arch = "nvptx64",
    any(feature = "matmul", feature = "matmul-sm90a")
))]
mod memory;
#[cfg(all(target_arch = "nvptx64", feature = "matmul"))]
mod mma;
#[cfg(all(target_arch = "nvptx64", feature = "matmul"))]
mod naive;

/// The kernels of any GPU as PTX, as [`PTX`](crate::PTX) is.
#[cfg(not(target_arch = "nvptx64"))]
pub const PTX: &str = include_str!("../../matmul.ptx");

/// What a block of a rung computes, and what its launch has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Rows of the result.
    pub rows: u32,
    /// Columns of it.
    pub columns: u32,
    /// Threads of the block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
}

/// Of `nvme_matmul_naive`.
pub const NAIVE: Tile = Tile {
    rows: 8,
    columns: 32,
    threads: 256,
    shared_bytes: 0,
};
/// Of `nvme_matmul_mma`.
pub const MMA: Tile = Tile {
    rows: 128,
    columns: 128,
    threads: 128,
    shared_bytes: 65_536,
};

/// A product of matrices that lie row after row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Matmul {
    /// `m` rows of `k` elements.
    pub a: u64,
    /// `k` rows of `n` elements.
    pub b: u64,
    /// `m` rows of `n` elements; nothing else of its rows is written.
    pub c: u64,
    /// From one row of `a` to the next, in elements.
    pub a_stride: u64,
    /// As above.
    pub b_stride: u64,
    /// As above.
    pub c_stride: u64,
    /// Rows of the result.
    pub m: u32,
    /// Columns of the result.
    pub n: u32,
    /// Terms of each sum; without any it is 0.
    pub k: u32,
    /// 1 where `a` and `b` are bf16, 0 where they are f16, for the kernels of tensor cores; the others multiply f32.
    pub is_bf16: u32,
    /// 1 where `c` is f32, 0 where it is rounded to what `a` and `b` are.
    pub is_wide: u32,
    /// 0.
    pub reserved: u32,
}
