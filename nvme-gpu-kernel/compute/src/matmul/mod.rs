//! `C = A B` step by step: each kernel is the one before with one thing changed. docs/ladder.md explains each
//! step.
//!
//! All take one [`MatmulParameters`], the last one a [`TiledMatmul`]. A block computes one [`MatmulTile`] of the
//! result; of the last kernel any number of blocks is correct.

#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "matmul"))]
mod coarsened;
#[cfg(all(
    any(target_arch = "nvptx64", feature = "lanes"),
    any(feature = "matmul", feature = "matmul-sm90a")
))]
mod memory;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "matmul"))]
mod mma;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "matmul"))]
mod naive;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "matmul"))]
mod tiled;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "matmul"))]
mod vectorized;
#[cfg(all(
    any(target_arch = "nvptx64", feature = "lanes"),
    feature = "matmul-sm90a"
))]
mod wgmma;

/// The kernels, as each lane of a launch on the host calls them.
#[cfg(all(not(target_arch = "nvptx64"), feature = "lanes"))]
pub mod entries {
    pub use super::coarsened::nvme_matmul_coarsened;
    pub use super::mma::nvme_matmul_mma;
    pub use super::naive::nvme_matmul_naive;
    pub use super::tiled::nvme_matmul_tiled;
    pub use super::vectorized::nvme_matmul_vectorized;
    pub use super::wgmma::nvme_matmul_wgmma;
    pub use crate::tile::hopper::LaneTensorMap;
}

/// The kernels of any GPU as PTX, as [`PTX`](crate::PTX) is.
#[cfg(not(target_arch = "nvptx64"))]
pub const PTX: &str = include_str!("../../ptx/matmul.ptx");

/// `nvme_matmul_wgmma` for GPUs of compute capability 9.0.
#[cfg(not(target_arch = "nvptx64"))]
pub const SM90A_PTX: &str = include_str!("../../ptx/matmul_sm90a.ptx");

/// The tile of a kernel, and the parameters of its launch.
///
/// The host launches [`count`](Self::count) blocks of this shape; a launch with other threads or less shared
/// memory is an error that the kernels do not detect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatmulTile {
    /// Rows of the result.
    pub rows: u32,
    /// Columns of the result.
    pub columns: u32,
    /// Threads of the block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
}

impl MatmulTile {
    /// Returns the number of tiles of a result of `m` rows and `n` columns.
    pub fn count(&self, m: u32, n: u32) -> u64 {
        u64::from(m.div_ceil(self.rows)) * u64::from(n.div_ceil(self.columns))
    }
}

/// Tile of `nvme_matmul_naive`.
pub const NAIVE: MatmulTile = MatmulTile {
    rows: 8,
    columns: 32,
    threads: 256,
    shared_bytes: 0,
};
/// Tile of `nvme_matmul_tiled`.
pub const TILED: MatmulTile = MatmulTile {
    rows: 32,
    columns: 32,
    threads: 1024,
    shared_bytes: 8_192,
};
/// Tile of `nvme_matmul_vectorized`.
pub const VECTORIZED: MatmulTile = MatmulTile {
    rows: 16,
    columns: 64,
    threads: 256,
    shared_bytes: 10_240,
};
/// Tile of `nvme_matmul_coarsened`.
pub const COARSENED: MatmulTile = MatmulTile {
    rows: 128,
    columns: 128,
    threads: 256,
    shared_bytes: 55_296,
};
/// Tile of `nvme_matmul_wgmma`.
pub const WGMMA: MatmulTile = MatmulTile {
    rows: 128,
    columns: 256,
    threads: 384,
    shared_bytes: 197_696,
};
/// Terms of a stage of `nvme_matmul_wgmma`. One TMA copy has 64 halves of each of [`WGMMA`]'s rows of `a`, or
/// of this number of rows of `b`.
pub const WGMMA_DEPTH: u32 = 64;
/// Tile of `nvme_matmul_mma`.
pub const MMA: MatmulTile = MatmulTile {
    rows: 128,
    columns: 128,
    threads: 128,
    shared_bytes: 65_536,
};

/// Parameters of a product of matrices that are stored row by row.
///
/// Strides may be larger than the rows. If all rows begin at multiples of 16 bytes the kernels copy 16 bytes
/// at once; otherwise they are correct, but slower.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct MatmulParameters {
    /// Address of `m` rows of `k` elements.
    pub a: u64,
    /// Address of `k` rows of `n` elements.
    pub b: u64,
    /// Address of `m` rows of `n` elements; nothing else of its rows is written.
    pub c: u64,
    /// Distance of the rows of `a`, in elements.
    pub a_stride: u64,
    /// Distance of the rows of `b`, in elements.
    pub b_stride: u64,
    /// Distance of the rows of `c`, in elements.
    pub c_stride: u64,
    /// Rows of the result.
    pub m: u32,
    /// Columns of the result.
    pub n: u32,
    /// Terms of each sum; without terms the sums are 0.
    pub k: u32,
    /// 1 if `a` and `b` are bf16, 0 if they are f16, for the tensor core kernels; the others multiply `f32`.
    pub is_bf16: u32,
    /// 1 if `c` is `f32`, 0 if it is rounded to the format of `a` and `b`.
    pub is_wide: u32,
    /// Reserved, 0.
    pub reserved: u32,
}

/// Parameters of `nvme_matmul_wgmma`: a [`MatmulParameters`], and the tensor maps by which TMA reads its factors.
///
/// The kernel needs the parameter at a multiple of 64. rustc has no way to say so; `cargo xtask ptx` writes
/// it into the PTX.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
pub struct TiledMatmul {
    /// `CUtensorMap` of `a`.
    pub a_map: [u64; 16],
    /// `CUtensorMap` of `b`.
    pub b_map: [u64; 16],
    /// Product to compute.
    pub job: MatmulParameters,
    /// Number of tiles of the result.
    pub tiles: u32,
    /// Reserved, 0.
    pub reserved: u32,
}
