//! The maps by which kernels copy tiles of matrices.
// UNSAFETY: a C interface of raw pointers, whose callers keep the driver's rules.
#![allow(unsafe_code, non_snake_case)]
#![allow(
    clippy::missing_safety_doc,
    reason = "the CUDA driver API documents them"
)]

use crate::{INVALID_VALUE, SUCCESS, Status};
use nvme_compute_kernel::matmul::entries::LaneTensorMap;
use std::ffi::c_uint;

/// Writes a map for the lanes, if the driver would accept its parameters.
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
    let told = LaneTensorMap {
        address,
        sizes,
        row_bytes: stride,
        boxes,
    };
    // SAFETY: a map has 16 words, at a multiple of 64.
    unsafe { map.cast::<[u64; 16]>().write(told.words()) };
    SUCCESS
}
