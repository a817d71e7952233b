//! The GPU's exponential, atomic additions, and stores of pairs.
// UNSAFETY: inline PTX, and loads and stores through addresses that the kernel vouches for.
#![allow(unsafe_code)]

use super::LogisticFunction;
use core::arch::asm;

/// The logistic function by the GPU's approximate instructions, with an error of a few units in the last
/// place.
pub struct ApproximateLogistic;

impl LogisticFunction for ApproximateLogistic {
    #[inline(always)]
    fn of(x: f32) -> f32 {
        let share: f32;
        // SAFETY: arithmetic on registers.
        unsafe {
            asm!("rcp.approx.f32 {}, {};", out(reg32) share, in(reg32) 1.0 + crate::arch::exp(-x),
                options(pure, nomem, nostack))
        };
        share
    }
}

/// Adds to a number in memory by an atomic operation. The order of several additions is not fixed, so neither
/// are the last bits of the sum.
///
/// # Safety
/// The number is allocated, and only such additions access it meanwhile.
#[inline(always)]
pub unsafe fn add(to: u64, value: f32) {
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    unsafe {
        asm!("red.relaxed.gpu.global.add.f32 [{}], {};", in(reg64) to, in(reg32) value, options(nostack))
    };
}

/// Stores two neighbouring numbers, or the first alone, or none: `both` is their count. As one store if
/// `is_even`: the first is then at a multiple of 8.
///
/// # Safety
/// The counted numbers are allocated, and nothing else accesses them meanwhile.
/// They are there, and nothing else uses them meanwhile.
#[inline(always)]
pub unsafe fn store_two(to: u64, [low, high]: [f32; 2], both: u32, is_even: bool) {
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    unsafe {
        asm!("{{ .reg .pred p, q, r; setp.eq.u32 p, {kind}, 6; setp.eq.u32 q, {kind}, 2; setp.ge.u32 r, {kind}, 1;",
            "@p st.global.v2.f32 [{to}], {{{low}, {high}}}; @q st.global.f32 [{to}+4], {high};",
            "setp.ne.and.u32 r, {kind}, 6, r; @r st.global.f32 [{to}], {low}; }}",
            kind = in(reg32) if both == 2 && is_even { 6 } else { both }, to = in(reg64) to,
            low = in(reg32) low, high = in(reg32) high, options(nostack))
    };
}

/// Does the same for two halves in one word; `is_even` if the first is at a multiple of 4.
///
/// # Safety
/// As [`store_two`].
#[inline(always)]
pub unsafe fn store_halves(to: u64, word: u32, both: u32, is_even: bool) {
    let (low, high) = (word as u16, (word >> 16) as u16);
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    unsafe {
        asm!("{{ .reg .pred p, q, r; setp.eq.u32 p, {kind}, 6; setp.eq.u32 q, {kind}, 2; setp.ge.u32 r, {kind}, 1;",
            "@p st.global.b32 [{to}], {word}; @q st.global.b16 [{to}+2], {high};",
            "setp.ne.and.u32 r, {kind}, 6, r; @r st.global.b16 [{to}], {low}; }}",
            kind = in(reg32) if both == 2 && is_even { 6 } else { both }, to = in(reg64) to,
            word = in(reg32) word, low = in(reg16) low, high = in(reg16) high, options(nostack))
    };
}

/// Loads a 16-bit number.
///
/// # Safety
/// It is allocated, and nothing writes it meanwhile.
#[inline(always)]
pub unsafe fn half(from: *const u16, is_bf16: bool) -> f32 {
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let bits = unsafe { *from };
    if is_bf16 {
        return f32::from_bits(u32::from(bits) << 16);
    }
    let wide: f32;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("cvt.f32.f16 {}, {};", out(reg32) wide, in(reg16) bits, options(pure, nomem, nostack))
    };
    wide
}
