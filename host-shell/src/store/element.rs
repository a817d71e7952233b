//! Elements of rows that can be added: sums in 32 bits, rounded once at the end.

/// The type of the elements of a row, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Element {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16. Summed as `F32`, then rounded to the nearest, ties to even.
    F16,
    /// The upper half of binary32. Summed as `F32`, then rounded to the nearest, ties to even.
    Bf16,
    /// 32 bits with a sign; sums wrap.
    I32,
}

impl Element {
    /// Bytes of one.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Adds each of `rows` to `sum`, all of the same length, in order.
    pub(crate) fn add(self, sum: &mut [u8], rows: &[&[u8]]) {
        let size = self.bytes();
        for (index, to) in sum.chunks_exact_mut(size).enumerate() {
            let terms = rows.iter().map(|row| &row[index * size..][..size]);
            match self {
                Self::I32 => {
                    let add =
                        |sum: i32, term: &[u8]| sum.wrapping_add(i32::from_le_bytes(four(term)));
                    let total = terms.fold(i32::from_le_bytes(four(to)), add);
                    to.copy_from_slice(&total.to_le_bytes());
                }
                _ => {
                    let total = terms.fold(self.widen(to), |sum, term| sum + self.widen(term));
                    self.narrow(total, to);
                }
            }
        }
    }

    fn widen(self, bytes: &[u8]) -> f32 {
        match self {
            Self::F16 => f32_of_f16(two(bytes)),
            Self::Bf16 => f32::from_bits(u32::from(two(bytes)) << 16),
            Self::F32 | Self::I32 => f32::from_le_bytes(four(bytes)),
        }
    }

    fn narrow(self, value: f32, to: &mut [u8]) {
        match self {
            Self::F16 => to.copy_from_slice(&f16_of_f32(value).to_le_bytes()),
            Self::Bf16 => to.copy_from_slice(&bf16_of_f32(value).to_le_bytes()),
            Self::F32 | Self::I32 => to.copy_from_slice(&value.to_le_bytes()),
        }
    }
}

fn four(bytes: &[u8]) -> [u8; 4] {
    [bytes[0], bytes[1], bytes[2], bytes[3]]
}

fn two(bytes: &[u8]) -> u16 {
    u16::from_le_bytes([bytes[0], bytes[1]])
}

/// Widens; exact.
fn f32_of_f16(half: u16) -> f32 {
    let sign = u32::from(half & 0x8000) << 16;
    let (exponent, fraction) = (u32::from(half >> 10 & 0x1F), u32::from(half & 0x3FF));
    let magnitude = match exponent {
        // A subnormal number: a multiple of 2^-24.
        0 => (fraction as f32 / 16_777_216.0).to_bits(),
        0x1F => 0x7F80_0000 | fraction << 13,
        _ => (exponent + 112) << 23 | fraction << 13,
    };
    f32::from_bits(sign | magnitude)
}

/// Rounds to the nearest, ties to even.
fn f16_of_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let magnitude = bits & 0x7FFF_FFFF;
    if magnitude > 0x7F80_0000 {
        return sign | 0x7E00;
    }
    // 65,520 and above round to infinity.
    if magnitude >= 0x477F_F000 {
        return sign | 0x7C00;
    }
    if magnitude < 0x3880_0000 {
        // Below 2^-14: in units of 2^-24. Adding 2^-1 rounds at that place.
        let shifted = f32::from_bits(magnitude) + 0.5;
        return sign | (shifted.to_bits() - 0.5f32.to_bits()) as u16;
    }
    let rounded = magnitude + 0xFFF + (magnitude >> 13 & 1);
    sign | ((rounded >> 13) - (112 << 10)) as u16
}

/// Rounds to the nearest, ties to even.
fn bf16_of_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_survives_the_way_there_and_back() {
        for half in 0..=u16::MAX {
            let wide = f32_of_f16(half);
            if wide.is_nan() {
                assert_eq!(f16_of_f32(wide) & 0x7E00, 0x7E00);
            } else {
                assert_eq!(f16_of_f32(wide), half, "{half:#06x}");
            }
        }
    }

    #[test]
    fn halves_are_rounded_to_the_nearest_and_ties_to_even() {
        for (value, half) in [
            (1.0, 0x3C00),
            (-2.0, 0xC000),
            (65504.0, 0x7BFF),
            (65519.9, 0x7BFF),
            (65520.0, 0x7C00),
            (f32::INFINITY, 0x7C00),
            (f32::NEG_INFINITY, 0xFC00),
            (1.0 + 1.0 / 2048.0, 0x3C00),
            (1.0 + 3.0 / 2048.0, 0x3C02),
            (5.960_464_5e-8, 0x0001),
            (2.980_232_2e-8, 0x0000),
            (2.980_232_6e-8, 0x0001),
            (6.103_515_6e-5, 0x0400),
            (6.100_5e-5, 0x03FF),
            (-0.0, 0x8000),
        ] {
            assert_eq!(f16_of_f32(value), half, "{value}");
        }
        assert_eq!(f32_of_f16(0x0001), 5.960_464_5e-8);
        assert_eq!(f32_of_f16(0x7C00), f32::INFINITY);
    }

    #[test]
    fn bf16_is_rounded_to_the_nearest_and_ties_to_even() {
        for (bits, expected) in [
            (0x3F80_0000, 0x3F80),
            (0x3F80_8000, 0x3F80),
            (0x3F81_8000, 0x3F82),
            (0x3F80_8001, 0x3F81),
            (0x7F7F_FFFF, 0x7F80),
            (0x7F80_0001, 0x7FC0),
            (0xFF80_0000, 0xFF80),
        ] {
            assert_eq!(bf16_of_f32(f32::from_bits(bits)), expected, "{bits:#x}");
        }
    }

    #[test]
    fn rows_are_summed_in_order() {
        let mut sum = [1i32, i32::MAX].map(i32::to_le_bytes).concat();
        let term = [2i32, 1].map(i32::to_le_bytes).concat();
        Element::I32.add(&mut sum, &[&term, &term]);
        assert_eq!(sum, [5i32, i32::MIN + 1].map(i32::to_le_bytes).concat());
        let mut sum = 1f32.to_le_bytes().to_vec();
        Element::F32.add(&mut sum, &[&0.5f32.to_le_bytes(), &0.25f32.to_le_bytes()]);
        assert_eq!(sum, 1.75f32.to_le_bytes());
        // 2048 + 1 + 1 is 2050: rounded once, not after each term.
        let mut sum = 0x6800u16.to_le_bytes().to_vec();
        let one = 0x3C00u16.to_le_bytes();
        Element::F16.add(&mut sum, &[&one, &one]);
        assert_eq!(sum, 0x6801u16.to_le_bytes());
        let mut sum = 0x4380u16.to_le_bytes().to_vec();
        let one = 0x3F80u16.to_le_bytes();
        Element::Bf16.add(&mut sum, &[&one, &one]);
        assert_eq!(sum, 0x4381u16.to_le_bytes());
    }
}
