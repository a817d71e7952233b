//! Larger quantisation blocks, which only the CPU decodes; the kernels of this project do not support them as
//! tensors to convert.

use crate::wide::f32_of_f16;

/// The format of stored blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockFormat {
    /// GGUF Q4_K: 256 elements in 144 bytes: binary16 scale and scale of minima, 8 times 6 bits of both, 4
    /// bits for each element.
    Q4K,
    /// GGUF Q6_K: 256 elements in 210 bytes: 6 bits for each element, 16 scales of 8 bits, a binary16 scale.
    Q6K,
    /// OCP MXFP4: 32 elements in 17 bytes: an E8M0 scale, and E2M1 elements.
    Mxfp4,
}

/// Magnitudes of E2M1 from 0 on, doubled so that they are integers: a byte each, the lowest first.
const E2M1: u64 = u64::from_le_bytes([0, 1, 2, 3, 4, 6, 8, 12]);

impl BlockFormat {
    /// All blocks.
    pub const ALL: [Self; 3] = [Self::Q4K, Self::Q6K, Self::Mxfp4];

    /// Returns the number of elements of a block.
    pub const fn block_elements(self) -> u32 {
        match self {
            Self::Q4K | Self::Q6K => 256,
            Self::Mxfp4 => 32,
        }
    }

    /// Returns the bytes of a block.
    pub const fn block_bytes(self) -> u32 {
        match self {
            Self::Q4K => 144,
            Self::Q6K => 210,
            Self::Mxfp4 => 17,
        }
    }

    /// Returns element `index` of a block whose byte number `k` is `at(k)`; rounded at the same steps as in
    /// ggml.
    #[inline(always)]
    pub fn value(self, index: u32, at: impl Fn(u32) -> u8) -> f32 {
        let half = |byte: u32| f32_of_f16(u16::from_le_bytes([at(byte), at(byte + 1)]));
        match self {
            Self::Q4K => {
                let group = index / 32;
                let byte = at(16 + index / 64 * 32 + index % 32);
                let number = byte >> (4 * (group % 2)) & 0xF;
                // Groups from 4 on keep their upper two bits in the bytes of the first four.
                let (scale, least) = match group {
                    0..4 => (at(4 + group) & 0x3F, at(8 + group) & 0x3F),
                    _ => {
                        let low = at(8 + group);
                        let (scale, least) = (at(group), at(4 + group));
                        (low & 0xF | scale >> 2 & 0x30, low >> 4 | least >> 2 & 0x30)
                    }
                };
                let scale = half(0) * f32::from(scale);
                scale * f32::from(number) - half(2) * f32::from(least)
            }
            Self::Q6K => {
                let (part, place) = (index / 128, index % 128);
                let low = at(part * 64 + place % 64) >> (4 * (place / 64)) & 0xF;
                let high = at(128 + part * 32 + place % 32) >> (2 * (place / 32)) & 3;
                let number = i16::from(low | high << 4) - 32;
                let scale = half(208) * f32::from(at(192 + index / 16) as i8);
                scale * f32::from(number)
            }
            Self::Mxfp4 => {
                // Half of 2^(e - 127), since the values are doubled.
                let scale = match u32::from(at(0)) {
                    low @ 0..2 => 0x0020_0000 << low,
                    e => (e - 1) << 23,
                };
                let number = at(1 + index % 16) >> (4 * (index / 16)) & 0xF;
                // A shift replaces a table, which a GPU would have to load from memory.
                let size = (E2M1 >> (8 * u32::from(number & 7))) as u8 as i8;
                let number = if number & 8 == 0 { size } else { -size };
                f32::from_bits(scale) * f32::from(number)
            }
        }
    }

    /// Decodes `from`, which is whole blocks, into `out`, which has exactly as many elements; returns false,
    /// and does nothing, for other lengths.
    pub fn unpack(self, from: &[u8], out: &mut [f32]) -> bool {
        let (bytes, elements) = (self.block_bytes() as usize, self.block_elements() as usize);
        if !from.len().is_multiple_of(bytes) || from.len() / bytes * elements != out.len() {
            return false;
        }
        for (block, out) in from.chunks_exact(bytes).zip(out.chunks_exact_mut(elements)) {
            let at = |byte: u32| block.get(byte as usize).copied().unwrap_or(0);
            for (index, out) in out.iter_mut().enumerate() {
                *out = self.value(index as u32, at);
            }
        }
        true
    }
}
