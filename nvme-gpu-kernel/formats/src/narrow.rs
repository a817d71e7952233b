//! Conversion of `f32` to 16-bit formats, rounded to the nearest, ties to even.

/// Converts to IEEE 754 binary16.
///
/// Values too large become infinities, values too small become subnormal numbers or zeros of the same sign,
/// and every NaN becomes a quiet NaN.
#[inline(always)]
pub fn f16_of_f32(value: f32) -> u16 {
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
        // Below 2^-14 the result is a multiple of 2^-24. Adding 2^-1 makes the addition itself round at that
        // bit.
        let shifted = f32::from_bits(magnitude) + 0.5;
        return sign | (shifted.to_bits() - 0.5f32.to_bits()) as u16;
    }
    let rounded = magnitude + 0xFFF + (magnitude >> 13 & 1);
    sign | ((rounded >> 13) - (112 << 10)) as u16
}

/// Converts to the upper half of binary32.
#[inline(always)]
pub fn bf16_of_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16
}
