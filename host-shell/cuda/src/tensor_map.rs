//! Tensor maps: descriptions of matrices for the Tensor Memory Accelerator (TMA), the unit of the GPU that copies
//! tiles.
// UNSAFETY: calls into the CUDA driver library with pointers to this module's own values.
#![allow(unsafe_code)]

use super::driver::{Gpu, check};
use cudarc::driver::sys;
use nvme_driver::error::Result;
use std::sync::Arc;

/// A row-major matrix of 16-bit numbers.
#[derive(Clone, Copy, Debug)]
pub struct HalfMatrix {
    /// Address of the first byte on the GPU, a multiple of 16.
    pub address: u64,
    /// Number of rows, at least one.
    pub rows: u32,
    /// Number of columns, at least one.
    pub columns: u32,
    /// Distance of two rows in bytes, a multiple of 16.
    pub row_bytes: u64,
    /// bf16, else f16.
    pub is_bf16: bool,
}

impl HalfMatrix {
    /// True if copies of tiles can address the matrix.
    pub fn fits(&self) -> bool {
        let is_aligned = (self.address | self.row_bytes).is_multiple_of(16);
        is_aligned && self.rows > 0 && self.columns > 0 && self.row_bytes < 1 << 40
    }

    /// Returns the `CUtensorMap` of copies of `box_rows` rows of `box_columns` (64) columns into shared memory,
    /// swizzled by 128 bytes; elements outside of the matrix are read as zeros.
    ///
    /// # Errors
    /// [`Error::Device`](nvme_driver::Error::Device) with the driver's answer, as for a matrix that does not [fit](Self::fits).
    pub fn map(&self, gpu: &Arc<Gpu>, box_rows: u32, box_columns: u32) -> Result<[u64; 16]> {
        let _guest = gpu.enter()?;
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let kind = match self.is_bf16 {
            true => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            false => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        };
        let (sizes, strides) = (
            [u64::from(self.columns), u64::from(self.rows)],
            [self.row_bytes],
        );
        let (boxes, steps) = ([box_columns, box_rows], [1, 1]);
        // SAFETY: the call writes one map; it has two dimensions, and each list has an entry for each.
        check("cuTensorMapEncodeTiled", unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                kind,
                2,
                std::ptr::with_exposed_provenance_mut(self.address as usize),
                sizes.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        })?;
        Ok(map.opaque)
    }
}
