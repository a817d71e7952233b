//! Descriptors of operands of `wgmma`, for the GPU and for lanes on the host.

use super::BlockShared;

/// Returns the `wgmma` descriptor of a tile of halves in shared memory: rows of 128 bytes, swizzled by 128
/// bytes as TMA does, in groups of eight rows (1,024 bytes). `leading` and `stride` are distances in bytes:
/// - rows along `m` or `n`, 64 halves of `k` each: `stride` between groups of eight rows; `leading` is
///   unused;
/// - rows along `k`, 64 halves of `m` or `n` each (transposed): `stride` between groups of eight `k`,
///   `leading` between tiles of 64.
#[inline(always)]
pub fn describe(at: BlockShared, leading: u32, stride: u32) -> u64 {
    let encoded = |bytes: u32| u64::from((bytes & 0x3_FFFF) >> 4);
    encoded(at.address()) | encoded(leading) << 16 | encoded(stride) << 32 | 1 << 62
}
