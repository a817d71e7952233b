//! `C = A B`, rung by rung: each kernel is the one before with one thing changed. docs/ladder.md is the course.
//!
//! All take one [`Matmul`], the last one a [`TiledMatmul`]. A block computes one [`Tile`] of the result; of the last one
//! there may be any number of blocks.

#[cfg(all(target_arch = "nvptx64", feature = "matmul"))]
mod coarsened;
#[cfg(all(
    target_arch = "nvptx64",
    any(feature = "matmul", feature = "matmul-sm90a")
))]
mod memory;
#[cfg(all(target_arch = "nvptx64", feature = "matmul"))]
mod mma;
#[cfg(all(target_arch = "nvptx64", feature = "matmul"))]
mod naive;
#[cfg(all(target_arch = "nvptx64", feature = "matmul"))]
mod tiled;
#[cfg(all(target_arch = "nvptx64", feature = "matmul"))]
mod vectorized;
#[cfg(all(target_arch = "nvptx64", feature = "matmul-sm90a"))]
mod wgmma;

/// The kernels of any GPU as PTX, as [`PTX`](crate::PTX) is.
#[cfg(not(target_arch = "nvptx64"))]
pub const PTX: &str = include_str!("../../matmul.ptx");

/// `nvme_matmul_wgmma` for GPUs of compute capability 9.0.
#[cfg(not(target_arch = "nvptx64"))]
pub const SM90A_PTX: &str = include_str!("../../matmul_sm90a.ptx");

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

impl Tile {
    /// How many of them a result of `m` rows and `n` columns has.
    pub fn count(&self, m: u32, n: u32) -> u64 {
        u64::from(m.div_ceil(self.rows)) * u64::from(n.div_ceil(self.columns))
    }
}

/// Of `nvme_matmul_naive`.
pub const NAIVE: Tile = Tile {
    rows: 8,
    columns: 32,
    threads: 256,
    shared_bytes: 0,
};
/// Of `nvme_matmul_tiled`.
pub const TILED: Tile = Tile {
    rows: 32,
    columns: 32,
    threads: 1024,
    shared_bytes: 8_192,
};
/// Of `nvme_matmul_vectorized`.
pub const VECTORIZED: Tile = Tile {
    rows: 16,
    columns: 64,
    threads: 256,
    shared_bytes: 10_240,
};
/// Of `nvme_matmul_coarsened`.
pub const COARSENED: Tile = Tile {
    rows: 128,
    columns: 128,
    threads: 256,
    shared_bytes: 55_296,
};
/// Of `nvme_matmul_wgmma`.
pub const WGMMA: Tile = Tile {
    rows: 128,
    columns: 256,
    threads: 384,
    shared_bytes: 197_696,
};
/// Terms of a stage of `nvme_matmul_wgmma`: what TMA copies at a time are boxes of 64 halves of [`WGMMA`]'s rows of `a`,
/// and of so many rows of `b`.
pub const WGMMA_DEPTH: u32 = 64;
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

/// What `nvme_matmul_wgmma` takes: a [`Matmul`], and how TMA reads its factors. As a parameter it lies at a multiple of
/// 64, which rustc cannot say: `cargo xtask ptx` does.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
pub struct TiledMatmul {
    /// The `CUtensorMap` of `a`.
    pub a_map: [u64; 16],
    /// That of `b`.
    pub b_map: [u64; 16],
    /// The product.
    pub job: Matmul,
    /// Tiles of the result.
    pub tiles: u32,
    /// 0.
    pub reserved: u32,
}
