//! Copies between addresses of global memory: of 16, 8 and 4 bytes, eight at a time or one, and of a byte.
// UNSAFETY: inline PTX.
#![allow(unsafe_code)]

use core::arch::asm;

/// Copies 16 bytes.
///
/// # Safety
/// Both addresses are valid and multiples of 16.
#[inline(always)]
pub unsafe fn copy_16(to: u64, from: u64) {
    // SAFETY: the caller vouches for both.
    unsafe {
        asm!("{{ .reg .b64 a, b; ld.global.v2.b64 {{a, b}}, [{from}]; st.global.v2.b64 [{to}], {{a, b}}; }}",
            to = in(reg64) to, from = in(reg64) from, options(nostack));
    }
}

/// Copies 16 bytes from each address of `from` whose bit of `there` is set to that of `to`. All loads come
/// before the first store, so that their latencies overlap.
///
/// # Safety
/// As for [`copy_16`], for each pair of addresses whose bit is set.
#[inline(always)]
pub unsafe fn copy_pieces(to: [u64; 8], from: [u64; 8], there: u32) {
    // SAFETY: the caller vouches for all.
    unsafe {
        asm!(
            "{{ .reg .b64 a<8>, b<8>; .reg .pred p<8>; .reg .b32 m;",
            "and.b32 m, {there}, 1; setp.ne.u32 p0, m, 0;",
            "and.b32 m, {there}, 2; setp.ne.u32 p1, m, 0;",
            "and.b32 m, {there}, 4; setp.ne.u32 p2, m, 0;",
            "and.b32 m, {there}, 8; setp.ne.u32 p3, m, 0;",
            "and.b32 m, {there}, 16; setp.ne.u32 p4, m, 0;",
            "and.b32 m, {there}, 32; setp.ne.u32 p5, m, 0;",
            "and.b32 m, {there}, 64; setp.ne.u32 p6, m, 0;",
            "and.b32 m, {there}, 128; setp.ne.u32 p7, m, 0;",
            "@p0 ld.global.v2.b64 {{a0, b0}}, [{f0}];",
            "@p1 ld.global.v2.b64 {{a1, b1}}, [{f1}];",
            "@p2 ld.global.v2.b64 {{a2, b2}}, [{f2}];",
            "@p3 ld.global.v2.b64 {{a3, b3}}, [{f3}];",
            "@p4 ld.global.v2.b64 {{a4, b4}}, [{f4}];",
            "@p5 ld.global.v2.b64 {{a5, b5}}, [{f5}];",
            "@p6 ld.global.v2.b64 {{a6, b6}}, [{f6}];",
            "@p7 ld.global.v2.b64 {{a7, b7}}, [{f7}];",
            "@p0 st.global.v2.b64 [{t0}], {{a0, b0}};",
            "@p1 st.global.v2.b64 [{t1}], {{a1, b1}};",
            "@p2 st.global.v2.b64 [{t2}], {{a2, b2}};",
            "@p3 st.global.v2.b64 [{t3}], {{a3, b3}};",
            "@p4 st.global.v2.b64 [{t4}], {{a4, b4}};",
            "@p5 st.global.v2.b64 [{t5}], {{a5, b5}};",
            "@p6 st.global.v2.b64 [{t6}], {{a6, b6}};",
            "@p7 st.global.v2.b64 [{t7}], {{a7, b7}};",
            "}}",
            there = in(reg32) there,
            t0 = in(reg64) to[0], f0 = in(reg64) from[0],
            t1 = in(reg64) to[1], f1 = in(reg64) from[1],
            t2 = in(reg64) to[2], f2 = in(reg64) from[2],
            t3 = in(reg64) to[3], f3 = in(reg64) from[3],
            t4 = in(reg64) to[4], f4 = in(reg64) from[4],
            t5 = in(reg64) to[5], f5 = in(reg64) from[5],
            t6 = in(reg64) to[6], f6 = in(reg64) from[6],
            t7 = in(reg64) to[7], f7 = in(reg64) from[7],
            options(nostack));
    }
}

/// Copies units of 16, 8 or 4 bytes as [`copy_pieces`] does; `SHIFT` is log2 of their bytes.
///
/// # Safety
/// Both addresses of each pair whose bit is set are valid and multiples of a unit.
#[cfg(any(feature = "gathers", feature = "scatter"))]
#[inline(always)]
pub unsafe fn copy_units<const SHIFT: u32>(to: [u64; 8], from: [u64; 8], there: u32) {
    // SAFETY: the caller vouches for all.
    unsafe {
        match SHIFT {
            4 => copy_pieces(to, from, there),
            3 => copy_eights(to, from, there),
            _ => copy_fours(to, from, there),
        }
    }
}

/// As [`copy_pieces`], of 8 bytes each.
///
/// # Safety
/// As [`copy_units`].
#[cfg(any(feature = "gathers", feature = "scatter"))]
#[inline(always)]
unsafe fn copy_eights(to: [u64; 8], from: [u64; 8], there: u32) {
    // SAFETY: the caller vouches for all.
    unsafe {
        asm!(
            "{{ .reg .b64 a<8>; .reg .pred p<8>; .reg .b32 m;",
            "and.b32 m, {there}, 1; setp.ne.u32 p0, m, 0;",
            "and.b32 m, {there}, 2; setp.ne.u32 p1, m, 0;",
            "and.b32 m, {there}, 4; setp.ne.u32 p2, m, 0;",
            "and.b32 m, {there}, 8; setp.ne.u32 p3, m, 0;",
            "and.b32 m, {there}, 16; setp.ne.u32 p4, m, 0;",
            "and.b32 m, {there}, 32; setp.ne.u32 p5, m, 0;",
            "and.b32 m, {there}, 64; setp.ne.u32 p6, m, 0;",
            "and.b32 m, {there}, 128; setp.ne.u32 p7, m, 0;",
            "@p0 ld.global.b64 a0, [{f0}];",
            "@p1 ld.global.b64 a1, [{f1}];",
            "@p2 ld.global.b64 a2, [{f2}];",
            "@p3 ld.global.b64 a3, [{f3}];",
            "@p4 ld.global.b64 a4, [{f4}];",
            "@p5 ld.global.b64 a5, [{f5}];",
            "@p6 ld.global.b64 a6, [{f6}];",
            "@p7 ld.global.b64 a7, [{f7}];",
            "@p0 st.global.b64 [{t0}], a0;",
            "@p1 st.global.b64 [{t1}], a1;",
            "@p2 st.global.b64 [{t2}], a2;",
            "@p3 st.global.b64 [{t3}], a3;",
            "@p4 st.global.b64 [{t4}], a4;",
            "@p5 st.global.b64 [{t5}], a5;",
            "@p6 st.global.b64 [{t6}], a6;",
            "@p7 st.global.b64 [{t7}], a7;",
            "}}",
            there = in(reg32) there,
            t0 = in(reg64) to[0], f0 = in(reg64) from[0],
            t1 = in(reg64) to[1], f1 = in(reg64) from[1],
            t2 = in(reg64) to[2], f2 = in(reg64) from[2],
            t3 = in(reg64) to[3], f3 = in(reg64) from[3],
            t4 = in(reg64) to[4], f4 = in(reg64) from[4],
            t5 = in(reg64) to[5], f5 = in(reg64) from[5],
            t6 = in(reg64) to[6], f6 = in(reg64) from[6],
            t7 = in(reg64) to[7], f7 = in(reg64) from[7],
            options(nostack));
    }
}

/// As [`copy_pieces`], of 4 bytes each.
///
/// # Safety
/// As [`copy_units`].
#[cfg(any(feature = "gathers", feature = "scatter"))]
#[inline(always)]
unsafe fn copy_fours(to: [u64; 8], from: [u64; 8], there: u32) {
    // SAFETY: the caller vouches for all.
    unsafe {
        asm!(
            "{{ .reg .b32 a<8>; .reg .pred p<8>; .reg .b32 m;",
            "and.b32 m, {there}, 1; setp.ne.u32 p0, m, 0;",
            "and.b32 m, {there}, 2; setp.ne.u32 p1, m, 0;",
            "and.b32 m, {there}, 4; setp.ne.u32 p2, m, 0;",
            "and.b32 m, {there}, 8; setp.ne.u32 p3, m, 0;",
            "and.b32 m, {there}, 16; setp.ne.u32 p4, m, 0;",
            "and.b32 m, {there}, 32; setp.ne.u32 p5, m, 0;",
            "and.b32 m, {there}, 64; setp.ne.u32 p6, m, 0;",
            "and.b32 m, {there}, 128; setp.ne.u32 p7, m, 0;",
            "@p0 ld.global.b32 a0, [{f0}];",
            "@p1 ld.global.b32 a1, [{f1}];",
            "@p2 ld.global.b32 a2, [{f2}];",
            "@p3 ld.global.b32 a3, [{f3}];",
            "@p4 ld.global.b32 a4, [{f4}];",
            "@p5 ld.global.b32 a5, [{f5}];",
            "@p6 ld.global.b32 a6, [{f6}];",
            "@p7 ld.global.b32 a7, [{f7}];",
            "@p0 st.global.b32 [{t0}], a0;",
            "@p1 st.global.b32 [{t1}], a1;",
            "@p2 st.global.b32 [{t2}], a2;",
            "@p3 st.global.b32 [{t3}], a3;",
            "@p4 st.global.b32 [{t4}], a4;",
            "@p5 st.global.b32 [{t5}], a5;",
            "@p6 st.global.b32 [{t6}], a6;",
            "@p7 st.global.b32 [{t7}], a7;",
            "}}",
            there = in(reg32) there,
            t0 = in(reg64) to[0], f0 = in(reg64) from[0],
            t1 = in(reg64) to[1], f1 = in(reg64) from[1],
            t2 = in(reg64) to[2], f2 = in(reg64) from[2],
            t3 = in(reg64) to[3], f3 = in(reg64) from[3],
            t4 = in(reg64) to[4], f4 = in(reg64) from[4],
            t5 = in(reg64) to[5], f5 = in(reg64) from[5],
            t6 = in(reg64) to[6], f6 = in(reg64) from[6],
            t7 = in(reg64) to[7], f7 = in(reg64) from[7],
            options(nostack));
    }
}

/// Loads 16 bytes.
///
/// # Safety
/// The address is valid and a multiple of 16.
#[cfg(feature = "gathers")]
#[inline(always)]
pub unsafe fn load_pair(from: u64) -> (u64, u64) {
    let (low, high): (u64, u64);
    // SAFETY: the caller vouches for the address.
    unsafe {
        asm!("ld.global.v2.b64 {{{low}, {high}}}, [{from}];",
            from = in(reg64) from, low = out(reg64) low, high = out(reg64) high, options(nostack));
    }
    (low, high)
}

/// Copies 4 bytes.
///
/// # Safety
/// Both addresses are valid and multiples of 4.
#[inline(always)]
pub unsafe fn copy_4(to: u64, from: u64) {
    // SAFETY: the caller vouches for both.
    unsafe {
        asm!("{{ .reg .b32 a; ld.global.b32 a, [{from}]; st.global.b32 [{to}], a; }}",
            to = in(reg64) to, from = in(reg64) from, options(nostack));
    }
}

/// Copies a byte.
///
/// # Safety
/// Both addresses are valid.
#[inline(always)]
pub unsafe fn copy_1(to: u64, from: u64) {
    // SAFETY: the caller vouches for both.
    unsafe {
        asm!("{{ .reg .b16 a; ld.global.b8 a, [{from}]; st.global.b8 [{to}], a; }}",
            to = in(reg64) to, from = in(reg64) from, options(nostack));
    }
}
