//! Number formats of tensors: the meaning of an element's bytes, on the GPU and on the CPU.
//!
//! Every function is plain integer and `f32` arithmetic, so that both sides get the same bits. Bytes are
//! little-endian. The crate depends on nothing and reads no files: names of formats in files belong to the
//! readers of those files.
//!
//! ```
//! use nvme_formats::{Format, WideFormat, value};
//!
//! // Two bytes of scale (0.5), then 32 signed bytes.
//! let mut block = vec![0x00, 0x38];
//! block.extend((0..32).map(|number| number as u8));
//! let at = |byte: u32| block[byte as usize];
//! assert_eq!(value(Format::Q8_0, 6, at), 3.0);
//! assert_eq!(Format::Q8_0.elements(68), Some(64));
//! assert_eq!(WideFormat::F16.bits_of(3.0), 0x4200);
//! ```
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod block;
mod narrow;
mod quants;
mod scales;
mod stored;
mod wide;

pub use block::BlockFormat;
pub use narrow::{bf16_of_f32, f16_of_f32};
use quants::value_of_block;
pub use scales::{ScaleFormat, ScaleLayout, f32_of_e8m0};
pub use stored::{StoredFormat, UNIT};
pub use wide::{f32_of_bf16, f32_of_e2m1, f32_of_f8_e4m3, f32_of_f8_e5m2, f32_of_f16};

/// The format of stored elements. The numbers are those that kernels receive.
///
/// A format is a layout of blocks: the smallest number of elements that can be decoded alone, with the scale
/// that they share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Format {
    /// IEEE 754 binary16.
    F16 = 1,
    /// The upper half of binary32.
    Bf16 = 2,
    /// OCP FP8 E4M3: no infinities, NaN is all ones (torch's `float8_e4m3fn`).
    F8E4M3 = 3,
    /// OCP FP8 E5M2: the upper half of binary16.
    F8E5M2 = 4,
    /// GGUF: 32 elements in 34 bytes, a binary16 scale and 32 signed bytes.
    Q8_0 = 5,
    /// GGUF: 32 elements in 18 bytes, a binary16 scale and 32 numbers of 4 bits with a bias of 8.
    Q4_0 = 6,
    /// GGUF: 32 elements in 20 bytes, a binary16 scale and minimum, and 32 numbers of 4 bits.
    Q4_1 = 7,
    /// GGUF: 256 elements in 84 bytes.
    Q2K = 8,
    /// GGUF: 256 elements in 110 bytes.
    Q3K = 9,
    /// As [`BlockFormat::Q4K`].
    Q4K = 10,
    /// GGUF: 256 elements in 176 bytes.
    Q5K = 11,
    /// As [`BlockFormat::Q6K`].
    Q6K = 12,
    /// GGUF: 32 elements in 18 bytes, a binary16 scale and numbers of 4 bits in a table of 16 values.
    Iq4Nl = 13,
    /// GGUF: 256 elements in 136 bytes, with the table of IQ4_NL.
    Iq4Xs = 14,
    /// As [`BlockFormat::Mxfp4`].
    Mxfp4 = 15,
    /// OCP FP4 E2M1: 2 elements in a byte, the first one in its lower half (torch's `float4_e2m1fn_x2`).
    F4E2M1 = 16,
    /// 256 elements in 264 bytes: 256 of E4M3, then 8 E8M0 scales of 32 elements each, as in rows of ds4.
    F8Scaled = 17,
}

impl Format {
    /// All formats.
    pub const ALL: [Self; 17] = [
        Self::F16,
        Self::Bf16,
        Self::F8E4M3,
        Self::F8E5M2,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Iq4Nl,
        Self::Iq4Xs,
        Self::Mxfp4,
        Self::F4E2M1,
        Self::F8Scaled,
    ];

    /// Returns the format with this number.
    #[inline(always)]
    pub const fn of_number(number: u32) -> Option<Self> {
        Some(match number {
            1 => Self::F16,
            2 => Self::Bf16,
            3 => Self::F8E4M3,
            4 => Self::F8E5M2,
            5 => Self::Q8_0,
            6 => Self::Q4_0,
            7 => Self::Q4_1,
            8 => Self::Q2K,
            9 => Self::Q3K,
            10 => Self::Q4K,
            11 => Self::Q5K,
            12 => Self::Q6K,
            13 => Self::Iq4Nl,
            14 => Self::Iq4Xs,
            15 => Self::Mxfp4,
            16 => Self::F4E2M1,
            17 => Self::F8Scaled,
            _ => return None,
        })
    }

    /// Returns the number of elements of a block.
    #[inline(always)]
    pub const fn block_elements(self) -> u32 {
        match self {
            Self::F16 | Self::Bf16 | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::F4E2M1 => 2,
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 | Self::Iq4Nl | Self::Mxfp4 => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K | Self::Iq4Xs => 256,
            Self::F8Scaled => 256,
        }
    }

    /// Returns the bytes of a block.
    #[inline(always)]
    pub const fn block_bytes(self) -> u32 {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F8E4M3 | Self::F8E5M2 | Self::F4E2M1 => 1,
            Self::F8Scaled => 264,
            Self::Q8_0 => 34,
            Self::Q4_0 | Self::Iq4Nl => 18,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
            Self::Iq4Xs => 136,
            Self::Mxfp4 => 17,
            Self::Q4_1 => 20,
        }
    }

    /// Returns the number of elements in `bytes` bytes; `None` unless those are whole blocks.
    pub const fn elements(self, bytes: u64) -> Option<u64> {
        let block = self.block_bytes() as u64;
        match bytes % block {
            0 => Some(bytes / block * self.block_elements() as u64),
            _ => None,
        }
    }

    /// Returns byte `at` of stored elements that all decode to +0.0. For Q4_0, Q6_K and IQ4_NL zero bytes would decode to
    /// -0.0.
    #[inline(always)]
    pub const fn zero_byte(self, at: u32) -> u8 {
        match self {
            Self::Q4_0 | Self::Iq4Nl if at % self.block_bytes() >= 2 => 0x88,
            // Numbers of 32, less 32.
            Self::Q6K if matches!(at % self.block_bytes(), 128..192) => 0xAA,
            _ => 0,
        }
    }
}

/// The format of converted (upcast) elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum WideFormat {
    /// IEEE 754 binary16: rounded to the nearest, ties to even.
    F16 = 1,
    /// IEEE 754 binary32: exact.
    F32 = 2,
    /// The upper half of binary32: rounded to the nearest, ties to even.
    Bf16 = 3,
}

impl WideFormat {
    /// Returns the format with this number.
    #[inline(always)]
    pub const fn of_number(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::F16),
            2 => Some(Self::F32),
            3 => Some(Self::Bf16),
            _ => None,
        }
    }

    /// Returns the bytes of an element.
    #[inline(always)]
    pub const fn bytes(self) -> u32 {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// Returns the bits of `value`, in the lower half for 16 bits. Every NaN gets the same bits, since
    /// processors differ in the sign and payload of a NaN that they compute.
    #[inline(always)]
    pub fn bits_of(self, value: f32) -> u32 {
        match self {
            Self::F16 if value.is_nan() => 0x7E00,
            Self::F32 if value.is_nan() => 0x7FC0_0000,
            Self::Bf16 if value.is_nan() => 0x7FC0,
            Self::F16 => u32::from(f16_of_f32(value)),
            Self::F32 => value.to_bits(),
            Self::Bf16 => u32::from(bf16_of_f32(value)),
        }
    }
}

/// Returns element `index` of elements whose byte number `k` is `at(k)`.
#[inline(always)]
pub fn value(format: Format, index: u32, at: impl Fn(u32) -> u8) -> f32 {
    let half = |byte: u32| u16::from_le_bytes([at(byte), at(byte + 1)]);
    let (block, place) = (index / 32, index % 32);
    let four_bits = |first: u32| {
        let byte = at(first + place % 16);
        u32::from(if place < 16 { byte & 0xF } else { byte >> 4 }) as f32
    };
    match format {
        Format::F16 => f32_of_f16(half(index * 2)),
        Format::Bf16 => f32_of_bf16(half(index * 2)),
        Format::F8E4M3 => f32_of_f8_e4m3(at(index)),
        Format::F8E5M2 => f32_of_f8_e5m2(at(index)),
        Format::Q8_0 => {
            let first = block * 34;
            f32_of_f16(half(first)) * f32::from(at(first + 2 + place) as i8)
        }
        Format::Q4_0 => {
            let first = block * 18;
            f32_of_f16(half(first)) * (four_bits(first + 2) - 8.0)
        }
        Format::Q4_1 => {
            let first = block * 20;
            // Two roundings, as in ggml: a fused multiply-add would give other bits.
            let product = f32_of_f16(half(first)) * four_bits(first + 4);
            product + f32_of_f16(half(first + 2))
        }
        Format::Q2K => value_of_block(Format::Q2K, index, at),
        Format::Q3K => value_of_block(Format::Q3K, index, at),
        Format::Q4K => value_of_block(Format::Q4K, index, at),
        Format::Q5K => value_of_block(Format::Q5K, index, at),
        Format::Q6K => value_of_block(Format::Q6K, index, at),
        Format::Iq4Nl => value_of_block(Format::Iq4Nl, index, at),
        Format::Iq4Xs => value_of_block(Format::Iq4Xs, index, at),
        Format::Mxfp4 => value_of_block(Format::Mxfp4, index, at),
        Format::F4E2M1 => f32_of_e2m1(at(index / 2) >> (index % 2 * 4) & 0xF),
        Format::F8Scaled => {
            let first = index / 256 * 264;
            let scale = f32_of_e8m0(at(first + 256 + index % 256 / 32));
            f32_of_f8_e4m3(at(first + index % 256)) * scale
        }
    }
}

/// Converts the elements of `from`, which are whole blocks, into `out`, which has exactly the room for them;
/// returns false, and does nothing, for other lengths.
///
/// The GPU's conversion after a gather uses the same functions for each element, so host and GPU agree bit
/// for bit.
pub fn widen(format: Format, wide: WideFormat, from: &[u8], out: &mut [u8]) -> bool {
    widen_scaled(format, wide, from, (ScaleLayout::default(), &[]), out)
}

/// Converts as [`widen`] does and multiplies each element by its scale, which `layout` finds in `bytes`, the stored
/// scales of the row; returns false for a wrong length of `bytes`, too.
pub fn widen_scaled(
    format: Format,
    wide: WideFormat,
    from: &[u8],
    (layout, bytes): (ScaleLayout, &[u8]),
    out: &mut [u8],
) -> bool {
    let size = wide.bytes() as usize;
    let Some(elements) = format.elements(from.len() as u64) else {
        return false;
    };
    if elements * size as u64 != out.len() as u64
        || u64::from(layout.row_bytes(elements as u32)) != bytes.len() as u64
    {
        return false;
    }
    let of = |bytes: &[u8], byte: u32| bytes.get(byte as usize).copied().unwrap_or(0);
    for (index, to) in (0..).zip(out.chunks_exact_mut(size)) {
        let mut element = value(format, index, |byte| of(from, byte));
        if layout.scales() {
            element *= layout.value(index, |byte| of(bytes, byte));
        }
        if let Some(bits) = wide.bits_of(element).to_le_bytes().get(..size) {
            to.copy_from_slice(bits);
        }
    }
    true
}

#[cfg(test)]
mod tests;
