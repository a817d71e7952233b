//! Exact conversion of small floating-point formats to `f32`.

/// 2^112, the factor between equal exponent fields of binary16 and binary32.
const OF_F16: f32 = f32::from_bits((112 + 127) << 23);
/// 2^120, the same factor for E4M3.
const OF_E4M3: f32 = f32::from_bits((120 + 127) << 23);

/// Converts IEEE 754 binary16.
#[inline(always)]
pub fn f32_of_f16(half: u16) -> f32 {
    let sign = u32::from(half & 0x8000) << 16;
    let magnitude = u32::from(half & 0x7FFF) << 13;
    let bits = match half & 0x7C00 == 0x7C00 {
        true => magnitude | 0x7F80_0000,
        // Correct for subnormal numbers, too, since the product is normal.
        false => (f32::from_bits(magnitude) * OF_F16).to_bits(),
    };
    f32::from_bits(sign | bits)
}

/// Converts the upper half of binary32.
#[inline(always)]
pub fn f32_of_bf16(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// Converts OCP FP8 E4M3, which has no infinities.
#[inline(always)]
pub fn f32_of_f8_e4m3(byte: u8) -> f32 {
    let sign = u32::from(byte & 0x80) << 24;
    let magnitude = u32::from(byte & 0x7F);
    let bits = match magnitude {
        0x7F => 0x7FC0_0000,
        _ => (f32::from_bits(magnitude << 20) * OF_E4M3).to_bits(),
    };
    f32::from_bits(sign | bits)
}

/// Converts OCP FP8 E5M2.
#[inline(always)]
pub fn f32_of_f8_e5m2(byte: u8) -> f32 {
    f32_of_f16(u16::from(byte) << 8)
}

/// Converts OCP FP4 E2M1 in the lower 4 bits: 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign.
#[inline(always)]
pub fn f32_of_e2m1(bits: u8) -> f32 {
    let sign = u32::from(bits & 8) << 28;
    let magnitude = match bits & 7 {
        // The one subnormal number, and zero.
        0 => 0,
        1 => 126 << 23,
        normal => (u32::from(normal) + (126 << 1)) << 22,
    };
    f32::from_bits(sign | magnitude)
}
