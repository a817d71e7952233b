//! Scales that lie apart from the elements that they multiply: one for a table, or one for each group of columns of a row.

use crate::wide::{f32_of_bf16, f32_of_f8_e4m3};

/// The format of a stored scale. The numbers are those that kernels receive; 0 stands for no stored scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ScaleFormat {
    /// IEEE 754 binary32.
    F32 = 1,
    /// The upper half of binary32.
    Bf16 = 2,
    /// OCP E8M0: a power of two, 2^(byte - 127); 255 is NaN.
    E8M0 = 3,
    /// OCP FP8 E4M3, as in NVFP4.
    E4M3 = 4,
}

impl ScaleFormat {
    /// All formats.
    pub const ALL: [Self; 4] = [Self::F32, Self::Bf16, Self::E8M0, Self::E4M3];

    /// Returns the format with this number.
    #[inline(always)]
    pub const fn of_number(number: u32) -> Option<Self> {
        Some(match number {
            1 => Self::F32,
            2 => Self::Bf16,
            3 => Self::E8M0,
            4 => Self::E4M3,
            _ => return None,
        })
    }

    /// Returns the bytes of a scale.
    #[inline(always)]
    pub const fn bytes(self) -> u32 {
        // Four digits, not a table: a kernel would load that from memory.
        0x1124 >> (4 * (self as u32 - 1)) & 0xF
    }

    /// Returns the scale whose byte number `k` is `at(k)`.
    #[inline(always)]
    pub fn value(self, at: impl Fn(u32) -> u8) -> f32 {
        match self {
            Self::F32 => f32::from_bits(u32::from_le_bytes([at(0), at(1), at(2), at(3)])),
            Self::Bf16 => f32_of_bf16(u16::from_le_bytes([at(0), at(1)])),
            Self::E8M0 => f32_of_e8m0(at(0)),
            Self::E4M3 => f32_of_f8_e4m3(at(0)),
        }
    }
}

/// Converts OCP E8M0, which has powers of two and NaN only.
#[inline(always)]
pub fn f32_of_e8m0(byte: u8) -> f32 {
    f32::from_bits(match byte {
        // 2^-127 is a subnormal number of binary32.
        0 => 0x0040_0000,
        255 => 0x7FC0_0000,
        _ => u32::from(byte) << 23,
    })
}

/// Scales of the rows of a table: element `c` of a row is multiplied by scale `c >> shift` of the row, which itself is
/// multiplied by `factor`, or divided by it. Each step is rounded to `f32` once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ScaleLayout {
    /// Number of a [`ScaleFormat`]; 0 for rows without stored scales, whose elements are multiplied by the factor alone.
    pub format: u32,
    /// log2 of the elements that share a stored scale.
    pub shift: u32,
    /// Bits of the factor of all scales; 0 for elements that nothing multiplies.
    pub factor: u32,
    /// 1 if scales are divided by the factor.
    pub divides: u32,
}

impl ScaleLayout {
    /// Returns true if elements are multiplied by anything.
    #[inline(always)]
    pub const fn scales(&self) -> bool {
        self.factor != 0
    }

    /// Returns the bytes of the stored scales of a row of `elements` elements.
    #[inline(always)]
    pub const fn row_bytes(&self, elements: u32) -> u32 {
        match ScaleFormat::of_number(self.format) {
            Some(format) => elements.div_ceil(1 << self.shift) * format.bytes(),
            None => 0,
        }
    }

    /// Returns what element `index` of a row is multiplied by; byte number `k` of the row's scales is `at(k)`.
    #[inline(always)]
    pub fn value(&self, index: u32, at: impl Fn(u32) -> u8) -> f32 {
        let stored = match ScaleFormat::of_number(self.format) {
            Some(format) => {
                let first = (index >> self.shift) * format.bytes();
                format.value(|byte| at(first + byte))
            }
            None => 1.0,
        };
        let factor = f32::from_bits(self.factor);
        match self.divides {
            0 => stored * factor,
            _ => stored / factor,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_of_one_byte_are_powers_of_two_and_nan() {
        for byte in 0..255u8 {
            let wanted = 2f64.powi(i32::from(byte) - 127);
            assert_eq!(f64::from(f32_of_e8m0(byte)), wanted, "{byte}");
        }
        assert!(f32_of_e8m0(255).is_nan());
    }

    #[test]
    fn each_group_of_columns_has_its_scale() {
        let bytes = [127, 128, 126, 255];
        let layout = ScaleLayout {
            format: ScaleFormat::E8M0 as u32,
            shift: 5,
            factor: 1f32.to_bits(),
            divides: 0,
        };
        assert_eq!(layout.row_bytes(128), 4);
        assert_eq!(layout.row_bytes(97), 4);
        let of = |index| layout.value(index, |byte| bytes[byte as usize]);
        assert_eq!([of(0), of(31), of(32), of(95)], [1.0, 1.0, 2.0, 0.5]);
        assert!(of(96).is_nan());
    }

    #[test]
    fn a_factor_multiplies_or_divides_the_stored_scale() {
        let layout = |format, factor: f32, divides| ScaleLayout {
            format,
            shift: 4,
            factor: factor.to_bits(),
            divides,
        };
        let three = 3f32.to_le_bytes();
        let of = |layout: ScaleLayout| layout.value(17, |byte| three[byte as usize % 4]);
        assert_eq!(of(layout(1, 0.1, 0)), 3.0 * 0.1);
        assert_eq!(of(layout(1, 0.1, 1)), 3.0 / 0.1);
        assert_eq!(of(layout(0, 0.1, 0)), 0.1);
        assert!(!ScaleLayout::default().scales());
    }
}
