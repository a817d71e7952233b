//! Experts as published files store them: an expert is a list of ranges, its scales lie apart from its elements, and rows
//! of gate and up may take turns. They are read into a staging area, and arranged into the slot of the cache as rows that
//! the products multiply.

use super::{AdmitParameters, MATRICES};
use nvme_formats::{Format, ScaleFormat, f32_of_e2m1, f32_of_f8_e4m3, f32_of_f16, value};

/// Limit of the ranges of an expert.
pub const MOST_RANGES: u32 = 64;

/// A part of an expert on the drive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StagedRange {
    /// First byte on the drive.
    pub byte: u64,
    /// Number of bytes; 0 for an entry that is not used.
    pub bytes: u64,
    /// First byte in the staging area of the expert.
    pub at: u64,
}

/// The location of an expert's elements and scales in its staging area.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct StagedParts {
    /// First byte of the elements of the matrix in which gate, up and down are stored.
    pub weights: [u64; MATRICES],
    /// First byte of its scales.
    pub scales: [u64; MATRICES],
    /// Scale of the whole matrix, 1 for none: a single number, which stays in memory.
    pub factors: [f32; MATRICES],
    /// Reserved, 0.
    pub reserved: u32,
}

/// An expert that the current step reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StagedExpert {
    /// Number of the expert in its layer.
    pub expert: u32,
    /// Its slot of the cache.
    pub slot: u32,
}

/// The stored form of elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum ElementDecoder {
    /// Numbers of four bytes.
    #[default]
    Words = 0,
    /// Blocks of a [`Format`], one after another.
    Blocks = 1,
    /// GGUF's NVFP4.
    Nvfp4Blocks = 2,
    /// E4M3 in blocks of rows and columns, each with a scale.
    Fp8 = 3,
    /// E2M1 in groups of a row, each with a scale; the first of two elements in the lower half of a byte.
    E2M1 = 4,
    /// Numbers of 4 bits from -8 on in groups of a row, each with a scale, in the same order.
    Int4 = 5,
}

impl ElementDecoder {
    #[inline(always)]
    const fn of_number(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::Words,
            1 => Self::Blocks,
            2 => Self::Nvfp4Blocks,
            3 => Self::Fp8,
            4 => Self::E2M1,
            5 => Self::Int4,
            _ => return None,
        })
    }
}

/// Number of a scale of binary16, beside those of [`ScaleFormat`].
pub const SCALE_F16: u32 = 5;

/// The way of a matrix from the staging area into its slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum SlotArrangement {
    /// Rows are copied as they are.
    #[default]
    Rows = 0,
    /// Rows of MXFP4 get their scales into the blocks, and halves of bytes the order of GGUF.
    Mxfp4 = 1,
    /// Elements become numbers of binary32.
    Numbers = 2,
}

/// The stored form of a matrix of published experts, the same for all of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct PublishedForm {
    /// Number of the [`ElementDecoder`].
    pub decoder: u32,
    /// Number of the [`Format`] of blocks.
    pub format: u32,
    /// Number of the [`ScaleFormat`], or [`SCALE_F16`]; 0 without scales.
    pub scale: u32,
    /// 1 if scales are divided by the factor of the matrix.
    pub divides: u32,
    /// Rows that share a scale.
    pub block_rows: u32,
    /// Columns that share a scale.
    pub block_columns: u32,
    /// Rows of the stored matrix.
    pub rows: u32,
    /// Its columns.
    pub columns: u32,
    /// First row that belongs to this matrix: gate and up may be stored as one.
    pub first_row: u32,
    /// Distance of its rows.
    pub row_step: u32,
    /// 1 if rows of the file are columns of the matrix.
    pub is_transposed: u32,
    /// Number of the [`SlotArrangement`].
    pub arrangement: u32,
    /// Number of the [`StoredFormat`](nvme_formats::StoredFormat) in the slot.
    pub stored: u32,
    /// Bytes of a row in the slot; 0 for a row that it cannot hold.
    pub row_bytes: u32,
}

impl PublishedForm {
    /// Returns the element at a row and column of the stored matrix, rounded where the format's own program rounds it.
    /// `weight` and `scale` return a byte of the elements and of the scales; `factor` is the scale of the whole matrix.
    #[inline(always)]
    pub fn value(
        &self,
        (row, column): (u64, u64),
        factor: f32,
        weight: impl Fn(u64) -> u8,
        scale: impl Fn(u64) -> u8,
    ) -> f32 {
        let index = match self.is_transposed {
            0 => row * u64::from(self.columns) + column,
            _ => column * u64::from(self.rows) + row,
        };
        let of_factor = |number: f32| match self.divides {
            0 => number * factor,
            _ => number / factor,
        };
        let scale_at = |at: u64| match ScaleFormat::of_number(self.scale) {
            Some(format) => {
                let first = at * u64::from(format.bytes());
                format.value(|k| scale(first + u64::from(k)))
            }
            None if self.scale == SCALE_F16 => {
                f32_of_f16(u16::from_le_bytes([scale(at * 2), scale(at * 2 + 1)]))
            }
            None => 1.0,
        };
        let nibble = |index: u64| weight(index / 2) >> (index % 2 * 4) & 0xF;
        let group = index.checked_div(self.block_columns.into());
        match ElementDecoder::of_number(self.decoder) {
            Some(ElementDecoder::Words) => {
                let at = index * 4;
                f32::from_bits(u32::from_le_bytes([
                    weight(at),
                    weight(at + 1),
                    weight(at + 2),
                    weight(at + 3),
                ]))
            }
            Some(ElementDecoder::Blocks) => {
                let Some(format) = Format::of_number(self.format) else {
                    return f32::NAN;
                };
                // Indices in the block, which have 32 bits where those in the matrix may not.
                let block = u64::from(format.block_elements());
                let first = index / block * u64::from(format.block_bytes());
                value(format, (index % block) as u32, |k| {
                    weight(first + u64::from(k))
                })
            }
            Some(ElementDecoder::Nvfp4Blocks) => {
                let (first, place) = (index / 64 * 36, index % 64);
                let (group, place) = (place / 16, place % 16);
                let byte = weight(first + 4 + group * 8 + place % 8);
                let scale = f32_of_ue4m3(weight(first + group));
                // ggml's numbers are integers, which have no negative zero.
                let number = match byte >> (place / 8 * 4) & 0xF {
                    8 => 0.0,
                    code => f32_of_e2m1(code),
                };
                of_factor(number * scale)
            }
            Some(ElementDecoder::Fp8) => {
                let (Some(of_rows), Some(of_columns)) = (
                    row.checked_div(self.block_rows.into()),
                    column.checked_div(self.block_columns.into()),
                ) else {
                    return f32::NAN;
                };
                let of_row = u64::from(self.columns.div_ceil(self.block_columns));
                f32_of_f8_e4m3(weight(index)) * scale_at(of_rows * of_row + of_columns)
            }
            Some(ElementDecoder::E2M1) => {
                let Some(group) = group else { return f32::NAN };
                f32_of_e2m1(nibble(index)) * of_factor(scale_at(group))
            }
            Some(ElementDecoder::Int4) => {
                let Some(group) = group else { return f32::NAN };
                (f32::from(nibble(index)) - 8.0) * scale_at(group)
            }
            None => f32::NAN,
        }
    }

    /// Returns byte `at` of a row of MXFP4 as GGUF has it, by the bytes of elements and of scales of the row.
    #[inline(always)]
    pub fn mxfp4_byte(at: u32, weight: impl Fn(u32) -> u8, scale: impl Fn(u32) -> u8) -> u8 {
        let (block, place) = (at / 17, at % 17);
        let Some(place) = place.checked_sub(1) else {
            return scale(block);
        };
        // Elements `place` and `place` + 16 of the block, which the file has in bytes of two neighbours.
        let first = weight(block * 16 + place / 2) >> (place % 2 * 4) & 0xF;
        let second = weight(block * 16 + 8 + place / 2) >> (place % 2 * 4) & 0xF;
        first | second << 4
    }
}

/// Converts the scale of GGUF's NVFP4: E4M3 without a sign, as ggml reads it: the code of NaN is 0, and the sign is left out.
#[inline(always)]
fn f32_of_ue4m3(byte: u8) -> f32 {
    match byte {
        0x7F => 0.0,
        0xFF => 480.0,
        _ => f32_of_f8_e4m3(byte & 0x7F),
    }
}

/// Parameters of the cache lookup for published experts: as [`AdmitParameters`], with the ranges of each expert read into
/// a staging area.
///
/// Argument of `nvme_moe_admit_published`, in which a single warp works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct AdmitPublished {
    /// The cache. Its list has room for `most_ranges` ranges of each expert that a step may read.
    pub admit: AdmitParameters,
    /// Address of `most_ranges` [`StagedRange`] for each expert of the layer.
    pub ranges: u64,
    /// The staging area.
    pub staging: StagingArea,
    /// Address of the `i32` number of each choice's expert, which replaces the choices; 0 for none.
    pub given: u64,
    /// Address of the `f32` weight of each choice, if their numbers are given.
    pub weights: u64,
    /// Ranges of an expert.
    pub most_ranges: u32,
    /// Reserved, 0.
    pub reserved: u32,
}

/// Memory into which published experts are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StagingArea {
    /// Address of the areas.
    pub data: u64,
    /// Bytes of an area.
    pub bytes: u64,
    /// Address of the words of a [cache](super::cache::words) of `areas` slots without experts, which tells whose reads
    /// failed.
    pub words: u64,
    /// Address of two `u32`, the number of experts that the step reads and 0, followed by a [`StagedExpert`] for each.
    pub staged: u64,
    /// Number of areas.
    pub areas: u32,
    /// Reserved, 0.
    pub reserved: u32,
}

impl StagingArea {
    /// Returns the parameters with which `nvme_moe_settle` marks the areas whose reads failed.
    pub const fn settled(&self, admit: &AdmitParameters) -> AdmitParameters {
        AdmitParameters {
            words: self.words,
            data: self.data,
            slot_bytes: self.bytes,
            slots: self.areas,
            pinned: 0,
            experts: 0,
            layers: 0,
            ..*admit
        }
    }
}

/// Parameters of the kernel that arranges the experts that a step has read in their slots.
///
/// Argument of `nvme_moe_arrange`, between the reads and the products. An expert whose reads failed, or with a scale that
/// its slot cannot hold, marks its slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ArrangeParameters {
    /// The cache.
    pub admit: AdmitParameters,
    /// The staging area.
    pub staging: StagingArea,
    /// Address of a [`StagedParts`] for each expert of the layer.
    pub parts: u64,
    /// Rows and columns of each matrix.
    pub shapes: [[u32; 2]; MATRICES],
    /// Stored form of each matrix.
    pub sources: [PublishedForm; MATRICES],
}
