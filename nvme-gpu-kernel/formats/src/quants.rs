//! Elements of GGUF's blocks, as ggml and its package gguf for Python decode them: rounded at the same steps.

use crate::Format;
use crate::block::BlockFormat;
use crate::wide::f32_of_f16;

/// Values of a 4-bit number of IQ4_NL and IQ4_XS, from 0 on: a byte each, the lowest first.
const IQ4: [u64; 2] = [
    u64::from_le_bytes([129, 152, 173, 191, 207, 221, 234, 246]),
    u64::from_le_bytes([1, 13, 25, 38, 53, 69, 89, 113]),
];

/// Returns the value of a number of 4 bits. By shifts: a table would lie in the memory of a GPU.
#[inline(always)]
fn iq4(number: u8) -> f32 {
    let [low, high] = IQ4;
    let eight = if number & 8 == 0 { low } else { high };
    f32::from((eight >> (8 * u32::from(number & 7))) as u8 as i8)
}

/// Returns element `index` of blocks of `format`, one of those below; NaN for others.
#[inline(always)]
pub fn value_of_block(format: Format, index: u32, at: impl Fn(u32) -> u8) -> f32 {
    let elements = format.block_elements();
    let first = index / elements * format.block_bytes();
    let (index, at) = (index % elements, |byte: u32| at(first + byte));
    let half = |byte: u32| f32_of_f16(u16::from_le_bytes([at(byte), at(byte + 1)]));
    // Byte of the 2-bit numbers of a quarter of 128 elements, and the shift of the element's.
    let of_2_bits = |numbers: u32| {
        let byte = at(numbers + index / 128 * 32 + index % 32);
        byte >> (2 * (index % 128 / 32)) & 3
    };
    match format {
        Format::Q2K => {
            let scales = at(index / 16);
            let scale = half(80) * f32::from(scales & 0xF);
            let least = half(82) * f32::from(scales >> 4);
            scale * f32::from(of_2_bits(16)) - least
        }
        Format::Q3K => {
            let (group, lane) = (index / 64, index / 16 % 4);
            let low = at(96 + group % 2 * 4 + lane) >> (4 * (group / 2)) & 0xF;
            let high = at(104 + lane) >> (2 * group) & 3;
            let scale = half(108) * f32::from(i16::from(low | high << 4) - 32);
            let upper = at(index % 32) >> (index / 32) & 1;
            let number = i16::from(of_2_bits(32)) - 4 * i16::from(1 - upper);
            scale * f32::from(number)
        }
        Format::Q4K => BlockFormat::Q4K.value(index, at),
        Format::Q5K => {
            let group = index / 32;
            let (scale, least) = scales_of_six_bits(group, &at);
            let low = at(48 + index / 64 * 32 + index % 32) >> (4 * (group % 2)) & 0xF;
            let high = at(16 + index % 32) >> group & 1;
            let scale = half(0) * f32::from(scale);
            scale * f32::from(low | high << 4) - half(2) * f32::from(least)
        }
        Format::Q6K => BlockFormat::Q6K.value(index, at),
        Format::Iq4Nl => {
            let byte = at(2 + index % 16);
            half(0) * iq4(byte >> (4 * (index / 16)) & 0xF)
        }
        Format::Iq4Xs => {
            let group = index / 32;
            let low = at(4 + group / 2) >> (4 * (group % 2)) & 0xF;
            let high = (u16::from_le_bytes([at(2), at(3)]) >> (2 * group)) as u8 & 3;
            let scale = half(0) * f32::from(i16::from(low | high << 4) - 32);
            let byte = at(8 + group * 16 + index % 16);
            scale * iq4(byte >> (4 * (index / 16 % 2)) & 0xF)
        }
        Format::Mxfp4 => BlockFormat::Mxfp4.value(index, at),
        _ => f32::NAN,
    }
}

/// Returns scale and minimum of 32 elements of a block of Q5_K, as of Q4_K.
#[inline(always)]
fn scales_of_six_bits(group: u32, at: &impl Fn(u32) -> u8) -> (u8, u8) {
    // Groups from 4 on keep their upper two bits in the bytes of the first four.
    match group {
        0..4 => (at(4 + group) & 0x3F, at(8 + group) & 0x3F),
        _ => {
            let low = at(8 + group);
            let (scale, least) = (at(group), at(4 + group));
            (low & 0xF | scale >> 2 & 0x30, low >> 4 | least >> 2 & 0x30)
        }
    }
}
