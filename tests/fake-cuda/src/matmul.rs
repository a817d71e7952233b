//! The kernels of the ladder as a host thread, and the maps that one of them takes.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code, non_snake_case)]
#![allow(
    clippy::missing_safety_doc,
    reason = "the CUDA driver API documents them"
)]

use crate::{INVALID_VALUE, SUCCESS, Status};
use nvme_compute_kernel::matmul::{
    COARSENED, MMA, MatmulParameters, MatmulTile, NAIVE, TILED, TiledMatmul, VECTORIZED, WGMMA,
    WGMMA_DEPTH,
};
use nvme_formats::{bf16_of_f32, f16_of_f32, f32_of_bf16, f32_of_f16};
use std::ffi::{CStr, c_uint, c_void};
use std::sync::Arc;

/// The symbols.
pub const NAMES: [&CStr; 6] = [
    c"nvme_matmul_naive",
    c"nvme_matmul_tiled",
    c"nvme_matmul_vectorized",
    c"nvme_matmul_coarsened",
    c"nvme_matmul_mma",
    c"nvme_matmul_wgmma",
];
/// What a block of each computes.
const TILES: [MatmulTile; 6] = [NAIVE, TILED, VECTORIZED, COARSENED, MMA, WGMMA];

/// A launch of the kernel `name`, one of [`NAMES`].
///
/// # Safety
/// `parameters` holds the address of the kernel's argument.
pub unsafe fn launch(
    name: &CStr,
    parameters: *mut *mut c_void,
    (blocks, threads, shared): (u32, u32, u32),
) -> Arc<dyn Fn() + Send + Sync> {
    let index = NAMES.iter().position(|known| *known == name);
    let index = index.expect("one of the names");
    let tile = TILES[index];
    assert_eq!((threads, shared), (tile.threads, tile.shared_bytes));
    let has_maps = index == NAMES.len() - 1;
    // SAFETY: the caller's.
    let job = unsafe {
        match has_maps {
            true => check_maps(&**parameters.cast::<*const TiledMatmul>(), blocks),
            false => **parameters.cast::<*const MatmulParameters>(),
        }
    };
    let tiles = tile.count(job.m, job.n);
    assert!(u64::from(blocks) == tiles || has_maps && u64::from(blocks) < tiles);
    match index {
        0..4 => Arc::new(move || multiply(&job, f32_at, put_f32)),
        _ => Arc::new(move || {
            let put = if job.is_wide == 0 { put_half } else { put_f32 };
            multiply(&job, half_at, put);
        }),
    }
}

fn check_maps(tiled: &TiledMatmul, blocks: u32) -> MatmulParameters {
    let job = &tiled.job;
    let map = |address, columns: u32, rows: u32, stride: u64, (width, height): (u32, u32)| {
        [
            address,
            columns.into(),
            rows.into(),
            stride * 2,
            width.into(),
            height.into(),
            job.is_bf16.into(),
        ]
    };
    let a = map(job.a, job.k, job.m, job.a_stride, (WGMMA_DEPTH, WGMMA.rows));
    let b = map(job.b, job.n, job.k, job.b_stride, (64, WGMMA_DEPTH));
    assert_eq!((&tiled.a_map[..7], &tiled.b_map[..7]), (&a[..], &b[..]));
    assert!(u64::from(tiled.tiles) == WGMMA.count(job.m, job.n) && blocks <= tiled.tiles);
    *job
}

fn multiply(job: &MatmulParameters, at: fn(u64, u64, bool) -> f32, put: fn(u64, u64, bool, f32)) {
    let is_bf16 = job.is_bf16 != 0;
    for row in 0..u64::from(job.m) {
        for column in 0..u64::from(job.n) {
            let term = |i: u64| {
                let a = at(job.a, row * job.a_stride + i, is_bf16);
                a * at(job.b, i * job.b_stride + column, is_bf16)
            };
            let sum = (0..u64::from(job.k))
                .map(term)
                .fold(0.0, |sum, term| sum + term);
            put(job.c, row * job.c_stride + column, is_bf16, sum);
        }
    }
}

fn f32_at(address: u64, index: u64, _: bool) -> f32 {
    // SAFETY: the host vouches for the matrices.
    unsafe { *(address as usize as *const f32).add(index as usize) }
}

fn put_f32(address: u64, index: u64, _: bool, value: f32) {
    // SAFETY: as above.
    unsafe { *(address as usize as *mut f32).add(index as usize) = value };
}

fn half_at(address: u64, index: u64, is_bf16: bool) -> f32 {
    // SAFETY: as above.
    let half = unsafe { *(address as usize as *const u16).add(index as usize) };
    match is_bf16 {
        true => f32_of_bf16(half),
        false => f32_of_f16(half),
    }
}

fn put_half(address: u64, index: u64, is_bf16: bool, value: f32) {
    let half = match is_bf16 {
        true => bf16_of_f32(value),
        false => f16_of_f32(value),
    };
    // SAFETY: as above.
    unsafe { *(address as usize as *mut u16).add(index as usize) = half };
}

/// Keeps the parameters that it gets, if the driver would accept them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuTensorMapEncodeTiled(
    map: *mut u64,
    kind: c_uint,
    rank: c_uint,
    address: u64,
    sizes: *const u64,
    strides: *const u64,
    boxes: *const u32,
    steps: *const u32,
    interleave: c_uint,
    swizzle: c_uint,
    _: c_uint,
    _: c_uint,
) -> Status {
    // SAFETY: two sizes, boxes and steps, and one stride, as the rank says.
    let (sizes, stride, boxes, steps) = unsafe {
        (
            [*sizes, *sizes.add(1)],
            *strides,
            [*boxes, *boxes.add(1)],
            [*steps, *steps.add(1)],
        )
    };
    let is_aligned = (address | stride).is_multiple_of(16) && map.addr().is_multiple_of(64);
    let has_sizes = sizes.iter().all(|size| (1..=1 << 32).contains(size)) && stride < 1 << 40;
    let has_boxes = boxes.iter().all(|side| (1..=256).contains(side)) && boxes[0] * 2 <= 128;
    let is_known = rank == 2 && matches!(kind, 6 | 9) && steps == [1, 1];
    if !(is_aligned && has_sizes && has_boxes && is_known && (interleave, swizzle) == (0, 3)) {
        return INVALID_VALUE;
    }
    let told = [
        address,
        sizes[0],
        sizes[1],
        stride,
        boxes[0].into(),
        boxes[1].into(),
        (kind == 9).into(),
    ];
    for (at, word) in told.into_iter().enumerate() {
        // SAFETY: a map has 16 words.
        unsafe { *map.add(at) = word };
    }
    SUCCESS
}
