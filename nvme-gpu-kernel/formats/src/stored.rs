//! Rows of matrices in their stored formats, decoded 32 elements at once, for products with a vector.
//! Roundings are those of ggml, so that an implementation with the same weights chooses the same tokens.

use crate::BlockFormat;
use crate::wide::{f32_of_bf16, f32_of_f16};

/// Elements of a unit: each row is whole units.
pub const UNIT: u32 = 32;

/// The stored format of a row's elements. The numbers are GGUF's; kernels receive them.
///
/// Rows of these formats can be multiplied as they are stored; [`Format`](crate::Format) is the separate list
/// of formats that a gather converts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum StoredFormat {
    /// IEEE 754 binary32.
    F32 = 0,
    /// IEEE 754 binary16.
    F16 = 1,
    /// As [`Format::Q4_0`](crate::Format::Q4_0).
    Q4_0 = 2,
    /// As [`Format::Q4_1`](crate::Format::Q4_1).
    Q4_1 = 3,
    /// As [`Format::Q8_0`](crate::Format::Q8_0).
    Q8_0 = 8,
    /// As [`BlockFormat::Q4K`](crate::BlockFormat::Q4K).
    Q4K = 12,
    /// As [`BlockFormat::Q6K`](crate::BlockFormat::Q6K).
    Q6K = 14,
    /// The upper half of binary32.
    Bf16 = 30,
    /// As [`BlockFormat::Mxfp4`](crate::BlockFormat::Mxfp4), in pairs of blocks: 17 bytes are not whole 16-bit words.
    Mxfp4 = 39,
}

impl StoredFormat {
    /// All formats.
    pub const ALL: [Self; 9] = [
        Self::F32,
        Self::F16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q8_0,
        Self::Q4K,
        Self::Q6K,
        Self::Bf16,
        Self::Mxfp4,
    ];

    /// Returns the format with this number.
    #[inline(always)]
    pub const fn of_number(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            8 => Self::Q8_0,
            12 => Self::Q4K,
            14 => Self::Q6K,
            30 => Self::Bf16,
            39 => Self::Mxfp4,
            _ => return None,
        })
    }

    /// Returns the name that the tool and its messages use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Q8_0 => "q8_0",
            Self::Q4K => "q4k",
            Self::Q6K => "q6k",
            Self::Bf16 => "bf16",
            Self::Mxfp4 => "mxfp4",
        }
    }

    /// Returns the elements of a block and their bytes, an even number.
    #[inline(always)]
    pub const fn block(self) -> (u32, u32) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q8_0 => (32, 34),
            Self::Q4K => (256, 144),
            Self::Q6K => (256, 210),
            Self::Mxfp4 => (64, 34),
        }
    }

    /// Returns the bytes of a row of `columns` elements; `None` unless those are whole blocks and units.
    pub const fn row_bytes(self, columns: u32) -> Option<u64> {
        let (elements, bytes) = self.block();
        match columns.is_multiple_of(elements) && columns.is_multiple_of(UNIT) {
            true => Some((columns / elements) as u64 * bytes as u64),
            false => None,
        }
    }

    /// Passes the 32 elements of unit `unit` of a row to `take`, in order, with their numbers in the unit.
    /// The row's 16-bit word number `k` is `half(k)`.
    #[inline(always)]
    pub fn each(self, unit: u32, half: impl Fn(u32) -> u16, mut take: impl FnMut(u32, f32)) {
        let first = unit * UNIT;
        match self {
            Self::F32 => {
                for i in 0..UNIT {
                    let at = (first + i) * 2;
                    let bits = u32::from(half(at)) | u32::from(half(at + 1)) << 16;
                    take(i, f32::from_bits(bits));
                }
            }
            Self::F16 => {
                for i in 0..UNIT {
                    take(i, f32_of_f16(half(first + i)));
                }
            }
            Self::Bf16 => {
                for i in 0..UNIT {
                    take(i, f32_of_bf16(half(first + i)));
                }
            }
            Self::Q4_0 => {
                let block = unit * 9;
                let scale = f32_of_f16(half(block));
                let value = |number: f32| scale * (number - 8.0);
                numbers_of_4_bits(|pair| half(block + 1 + pair), value, take);
            }
            Self::Q4_1 => {
                let block = unit * 10;
                let (scale, least) = (f32_of_f16(half(block)), f32_of_f16(half(block + 1)));
                // Two roundings, as in ggml: a fused multiply-add would give other bits.
                let value = |number: f32| scale * number + least;
                numbers_of_4_bits(|pair| half(block + 2 + pair), value, take);
            }
            Self::Q8_0 => {
                let block = unit * 17;
                let scale = f32_of_f16(half(block));
                for pair in 0..16 {
                    let [low, high] = half(block + 1 + pair).to_le_bytes();
                    take(2 * pair, scale * f32::from(low as i8));
                    take(2 * pair + 1, scale * f32::from(high as i8));
                }
            }
            Self::Q4K => {
                let (block, group) = (unit / 8 * 72, unit % 8);
                let (scale, least) = scales_of_q4k(&half, block, group);
                let shift = 4 * (group % 2);
                let numbers = block + 8 + group / 2 * 16;
                for pair in 0..16 {
                    let both = half(numbers + pair) >> shift;
                    take(2 * pair, scale * f32::from(both & 0xF) - least);
                    take(2 * pair + 1, scale * f32::from(both >> 8 & 0xF) - least);
                }
            }
            Self::Q6K => {
                let (block, part, quarter) = (unit / 8 * 105, unit / 4 % 2, unit % 4);
                let all = f32_of_f16(half(block + 104));
                let [first, second] = half(block + 96 + unit % 8).to_le_bytes();
                let (low_shift, high_shift) = (4 * (quarter / 2), 2 * quarter);
                let lows = block + part * 32 + quarter % 2 * 16;
                let highs = block + 64 + part * 16;
                for pair in 0..16 {
                    let low = half(lows + pair) >> low_shift;
                    let high = half(highs + pair) >> high_shift;
                    let scale = all * f32::from(if pair < 8 { first } else { second } as i8);
                    let number = |low: u16, high: u16| (low & 0xF | (high & 3) << 4) as i16 - 32;
                    take(2 * pair, scale * f32::from(number(low, high)));
                    take(2 * pair + 1, scale * f32::from(number(low >> 8, high >> 8)));
                }
            }
            Self::Mxfp4 => {
                for i in 0..UNIT {
                    take(i, mxfp4(&half, unit, i));
                }
            }
        }
    }

    /// Returns element `i` of unit `unit` of a row, with the same bits as [`each`](Self::each): for 32 lanes
    /// with one element each.
    #[inline(always)]
    pub fn element(self, unit: u32, i: u32, half: impl Fn(u32) -> u16) -> f32 {
        let at = unit * UNIT + i;
        let of_4_bits = |first: u32| {
            let both = half(first + i % 16 / 2);
            f32::from(both >> (i % 2 * 8 + i / 16 * 4) & 0xF)
        };
        match self {
            Self::F32 => {
                let bits = u32::from(half(2 * at)) | u32::from(half(2 * at + 1)) << 16;
                f32::from_bits(bits)
            }
            Self::F16 => f32_of_f16(half(at)),
            Self::Bf16 => f32_of_bf16(half(at)),
            Self::Q4_0 => f32_of_f16(half(unit * 9)) * (of_4_bits(unit * 9 + 1) - 8.0),
            Self::Q4_1 => {
                let product = f32_of_f16(half(unit * 10)) * of_4_bits(unit * 10 + 2);
                product + f32_of_f16(half(unit * 10 + 1))
            }
            Self::Q8_0 => {
                let byte = byte_of(&half, unit * 17 + 1, i);
                f32_of_f16(half(unit * 17)) * f32::from(byte as i8)
            }
            Self::Q4K => {
                let (block, group) = (unit / 8 * 72, unit % 8);
                let (scale, least) = scales_of_q4k(&half, block, group);
                let both = half(block + 8 + group / 2 * 16 + i / 2);
                let number = both >> (4 * (group % 2) + 8 * (i % 2)) & 0xF;
                scale * f32::from(number) - least
            }
            Self::Q6K => {
                let (block, part, quarter) = (unit / 8 * 105, unit / 4 % 2, unit % 4);
                let low = byte_of(&half, block + part * 32 + quarter % 2 * 16, i);
                let high = byte_of(&half, block + 64 + part * 16, i);
                let number = low >> (quarter / 2 * 4) & 0xF | (high >> (quarter * 2) & 3) << 4;
                let scale = byte_of(&half, block + 96, unit % 8 * 2 + i / 16) as i8;
                let scale = f32_of_f16(half(block + 104)) * f32::from(scale);
                scale * f32::from(i16::from(number) - 32)
            }
            Self::Mxfp4 => mxfp4(&half, unit, i),
        }
    }

    /// True if each unit has a separate scale.
    #[inline(always)]
    pub const fn has_unit_scales(self) -> bool {
        matches!(self, Self::Q4_0 | Self::Q4_1 | Self::Q8_0)
    }

    /// Returns the sum of the products of the 32 elements of unit `unit` of a row with those of a vector, in
    /// order: the vector's element `i` of the unit is `x(i)`.
    #[inline(always)]
    pub fn dot(self, unit: u32, half: impl Fn(u32) -> u16, x: impl Fn(u32) -> f32) -> f32 {
        let mut sum = 0.0;
        self.each(unit, half, |i, value| sum += value * x(i));
        sum
    }
}

/// Decodes 32 numbers of 4 bits: the lower halves of 16 bytes, then the upper ones.
#[inline(always)]
fn numbers_of_4_bits(
    pairs: impl Fn(u32) -> u16,
    value: impl Fn(f32) -> f32,
    mut take: impl FnMut(u32, f32),
) {
    for upper in 0..2 {
        for pair in 0..8 {
            let both = pairs(pair) >> (4 * upper);
            let at = upper * 16 + 2 * pair;
            take(at, value(f32::from(both & 0xF)));
            take(at + 1, value(f32::from(both >> 8 & 0xF)));
        }
    }
}

/// Returns scale and minimum of 32 elements of a block of Q4_K.
#[inline(always)]
fn scales_of_q4k(half: &impl Fn(u32) -> u16, block: u32, group: u32) -> (f32, f32) {
    let byte = |at: u32| byte_of(half, block, at);
    // Groups from 4 on keep their upper two bits in the bytes of the first four.
    let (scale, least) = match group {
        0..4 => (byte(4 + group) & 0x3F, byte(8 + group) & 0x3F),
        _ => {
            let low = byte(8 + group);
            let (scale, least) = (byte(group), byte(4 + group));
            (low & 0xF | scale >> 2 & 0x30, low >> 4 | least >> 2 & 0x30)
        }
    };
    let of = |word: u32, number: u8| f32_of_f16(half(block + word)) * f32::from(number);
    (of(0, scale), of(1, least))
}

/// Returns element `i` of unit `unit` of a row of MXFP4.
#[inline(always)]
fn mxfp4(half: &impl Fn(u32) -> u16, unit: u32, i: u32) -> f32 {
    let (pair, first) = (unit / 2 * 17, unit % 2 * 17);
    BlockFormat::Mxfp4.value(i, |at| byte_of(half, pair, first + at))
}

/// Returns byte `at` of the block whose first word is `block`.
#[inline(always)]
fn byte_of(half: &impl Fn(u32) -> u16, block: u32, at: u32) -> u8 {
    (half(block + at / 2) >> (8 * (at % 2))) as u8
}

#[cfg(test)]
mod tests {
    use super::{StoredFormat, UNIT};
    use crate::{BlockFormat, Format, value};

    /// Bytes whose scales are finite.
    fn blocks(stored: StoredFormat, blocks: usize) -> Vec<u8> {
        let (_, bytes) = stored.block();
        let mut state = 7u32;
        let mut row: Vec<u8> = (0..blocks * bytes as usize)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            })
            .collect();
        let scales: &[usize] = match stored {
            StoredFormat::Q4_0 | StoredFormat::Q8_0 => &[0],
            StoredFormat::Q4_1 | StoredFormat::Q4K => &[0, 2],
            StoredFormat::Q6K => &[208],
            StoredFormat::F32 => &[2],
            StoredFormat::F16 | StoredFormat::Bf16 => &[0],
            StoredFormat::Mxfp4 => &[],
        };
        for block in row.chunks_exact_mut(bytes as usize) {
            for at in scales {
                block[at + 1] &= 0xBF;
            }
            if stored == StoredFormat::Mxfp4 {
                // From 2^-127, a subnormal number, up.
                (block[0], block[17]) = (block[0] % 130, block[17] % 130);
            }
        }
        row
    }

    /// Returns the element as the other functions of this crate decode it.
    fn expected(stored: StoredFormat, row: &[u8], index: u32) -> f32 {
        let at = |byte: u32| row[byte as usize];
        let of = |format| value(format, index, at);
        let of_block = |block: BlockFormat| {
            let (elements, bytes) = (block.block_elements(), block.block_bytes());
            block.value(index % elements, |byte| at(index / elements * bytes + byte))
        };
        match stored {
            StoredFormat::F32 => f32::from_le_bytes([0, 1, 2, 3].map(|byte| at(index * 4 + byte))),
            StoredFormat::F16 => of(Format::F16),
            StoredFormat::Bf16 => of(Format::Bf16),
            StoredFormat::Q4_0 => of(Format::Q4_0),
            StoredFormat::Q4_1 => of(Format::Q4_1),
            StoredFormat::Q8_0 => of(Format::Q8_0),
            StoredFormat::Q4K => of_block(BlockFormat::Q4K),
            StoredFormat::Q6K => of_block(BlockFormat::Q6K),
            StoredFormat::Mxfp4 => of_block(BlockFormat::Mxfp4),
        }
    }

    #[test]
    fn each_element_has_the_value_of_its_format() {
        for stored in StoredFormat::ALL {
            let columns = 512;
            let (elements, _) = stored.block();
            let row = blocks(stored, (columns / elements) as usize);
            assert_eq!(stored.row_bytes(columns), Some(row.len() as u64));
            let half = |k: u32| u16::from_le_bytes([row[2 * k as usize], row[2 * k as usize + 1]]);
            for index in 0..columns {
                let mut found = f32::NAN;
                stored.each(index / UNIT, half, |i, value| {
                    found = if i == index % UNIT { value } else { found };
                });
                let expected = expected(stored, &row, index);
                assert!(expected.is_finite(), "{stored:?}");
                assert_eq!(found, expected, "{stored:?} {index}");
                let alone = stored.element(index / UNIT, index % UNIT, half);
                assert_eq!(alone, expected, "{stored:?} {index}");
            }
        }
    }

    #[test]
    fn rows_end_with_blocks_and_units() {
        assert_eq!(StoredFormat::Q6K.row_bytes(256), Some(210));
        assert_eq!(StoredFormat::Q6K.row_bytes(288), None);
        assert_eq!(StoredFormat::F16.row_bytes(16), None);
        assert_eq!(StoredFormat::Mxfp4.row_bytes(2880), Some(1530));
        assert_eq!(StoredFormat::Mxfp4.row_bytes(96), None);
        for stored in StoredFormat::ALL {
            assert_eq!(StoredFormat::of_number(stored as u32), Some(stored));
        }
        assert_eq!(StoredFormat::of_number(4), None);
    }
}
