//! What only the GPU has: its clock, thread numbers, warp instructions, and the symbols that nothing
//! else provides. The one file of this crate with inline PTX.
// UNSAFETY: inline PTX, and `memcmp` over raw pointers.
#![allow(unsafe_code)]

use core::arch::asm;

/// All lanes of a warp.
pub const FULL: u32 = u32::MAX;

macro_rules! special {
    ($(#[$doc:meta])* $name:ident, $register:literal) => {
        $(#[$doc])*
        #[inline(always)]
        pub fn $name() -> u32 {
            let value: u32;
            // SAFETY: reads a special register that is constant for a thread; touches no memory.
            unsafe { asm!(concat!("mov.u32 {}, %", $register, ";"), out(reg32) value, options(pure, nomem, nostack)) };
            value
        }
    };
}

special!(
    /// Index of the thread in its block.
    thread, "tid.x"
);
special!(
    /// Threads of a block.
    block_threads, "ntid.x"
);
special!(
    /// Index of the block in the grid.
    block, "ctaid.x"
);
special!(
    /// Blocks of the grid.
    blocks, "nctaid.x"
);
special!(
    /// Index of the lane in its warp.
    lane, "laneid"
);
special!(
    /// The lanes below this one.
    lanes_below, "lanemask_lt"
);

/// The number of the grid: another one for each launch.
#[inline(always)]
pub fn grid() -> u64 {
    let number: u64;
    // SAFETY: reads a special register that is constant for a thread; touches no memory.
    unsafe { asm!("mov.u64 {}, %gridid;", out(reg64) number, options(pure, nomem, nostack)) };
    number
}

/// The value as one that the compiler knows nothing of: what follows from it is worked out where it is used, and takes
/// no register meanwhile.
#[cfg(any(feature = "rows", feature = "scatter"))]
#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    let same: u32;
    // SAFETY: moves a register. Not pure: it is not moved out of loops.
    unsafe { asm!("mov.b32 {}, {};", out(reg32) same, in(reg32) value, options(nostack)) };
    same
}

/// The lanes that run this instruction together.
#[inline(always)]
pub fn active() -> u32 {
    let mask: u32;
    // SAFETY: reads the warp's state; touches no memory. Not pure: it differs between calls.
    unsafe { asm!("activemask.b32 {};", out(reg32) mask, options(nostack)) };
    mask
}

/// The lanes of `mask` whose `value` is this lane's. Every lane of `mask` calls it.
#[inline(always)]
pub fn same(mask: u32, value: u64) -> u32 {
    let lanes: u32;
    // SAFETY: exchanges registers between lanes that all call it.
    unsafe {
        asm!("match.any.sync.b64 {}, {}, {};", out(reg32) lanes, in(reg64) value, in(reg32) mask, options(nostack))
    };
    lanes
}

/// The lanes that run `A` beside this one with the same `key`.
#[inline(always)]
pub fn beside<A>(key: u64) -> u32 {
    // Where `A` runs is in one place: those that run this instruction together run it.
    same(active(), key)
}

/// The lanes of `mask` that say yes. Every lane of `mask` calls it.
#[inline(always)]
pub fn ballot(mask: u32, mine: bool) -> u32 {
    let lanes: u32;
    // SAFETY: exchanges registers between lanes that all call it.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {mine}, 0; vote.sync.ballot.b32 {lanes}, p, {mask}; }}",
            lanes = out(reg32) lanes, mine = in(reg32) u32::from(mine), mask = in(reg32) mask, options(nostack));
    }
    lanes
}

/// The value of lane `from`. Every lane of `mask`, `from` too, calls it.
#[inline(always)]
pub fn shuffle(mask: u32, value: u32, from: u32) -> u32 {
    let taken: u32;
    // SAFETY: exchanges registers between lanes that all call it.
    unsafe {
        asm!("shfl.sync.idx.b32 {}, {}, {}, 31, {};",
            out(reg32) taken, in(reg32) value, in(reg32) from, in(reg32) mask, options(nostack));
    }
    taken
}

/// The value of lane `from` (0 to 7) of this lane's eight. Every lane of the warp calls it.
#[inline(always)]
pub fn shuffle_tile(value: u32, from: u32) -> u32 {
    let taken: u32;
    // SAFETY: exchanges registers between lanes that all call it. 0x181F: segments of eight lanes.
    unsafe {
        asm!("shfl.sync.idx.b32 {}, {}, {}, 0x181f, -1;",
            out(reg32) taken, in(reg32) value, in(reg32) from, options(nostack));
    }
    taken
}

/// The value of the lane whose index differs in the bits of `bits`. Every lane of `mask` calls it.
#[inline(always)]
pub fn butterfly(mask: u32, value: u32, bits: u32) -> u32 {
    let taken: u32;
    // SAFETY: exchanges registers between lanes that all call it.
    unsafe {
        asm!("shfl.sync.bfly.b32 {}, {}, {}, 31, {};",
            out(reg32) taken, in(reg32) value, in(reg32) bits, in(reg32) mask, options(nostack));
    }
    taken
}

/// Waits for the lanes of `mask`; orders memory among them.
#[inline(always)]
pub fn sync_warp(mask: u32) {
    // SAFETY: every lane of the mask calls it.
    unsafe { asm!("bar.warp.sync {};", in(reg32) mask, options(nostack)) };
}

/// Waits for the block's threads; orders memory among them.
#[inline(always)]
pub fn sync_block() {
    // SAFETY: every thread of the block calls it.
    unsafe { asm!("barrier.sync 0;", options(nostack)) };
}

/// Adds to a counter in device memory. Relaxed: read after the kernel.
///
/// # Safety
/// `counter` is valid and 8-byte aligned device memory that nothing writes but through this, or as an atomic.
#[inline(always)]
pub unsafe fn add(counter: *mut u64, value: u64) {
    // SAFETY: the caller vouches for the counter.
    unsafe {
        asm!("red.relaxed.gpu.global.add.u64 [{}], {};", in(reg64) counter, in(reg64) value, options(nostack))
    };
}

/// Adds to a counter in device memory, in order with what the thread does before and after it; what it was.
///
/// # Safety
/// As [`add`].
#[inline(always)]
pub unsafe fn add_ordered(counter: *mut u64, value: u64) -> u64 {
    let was: u64;
    // SAFETY: the caller vouches for the counter.
    unsafe {
        asm!("atom.acq_rel.gpu.global.add.u64 {}, [{}], {};",
            out(reg64) was, in(reg64) counter, in(reg64) value, options(nostack))
    };
    was
}

/// Stores to a counter in device memory, in order as [`add_ordered`]; what it was.
///
/// # Safety
/// As [`add`].
#[inline(always)]
pub unsafe fn swap(counter: *mut u64, value: u64) -> u64 {
    let was: u64;
    // SAFETY: the caller vouches for the counter.
    unsafe {
        asm!("atom.acq_rel.gpu.global.exch.b64 {}, [{}], {};",
            out(reg64) was, in(reg64) counter, in(reg64) value, options(nostack))
    };
    was
}

/// Raises a counter in device memory to `value`. Relaxed: read after the kernel.
///
/// # Safety
/// As [`add`].
#[inline(always)]
pub unsafe fn raise(counter: *mut u64, value: u64) {
    // SAFETY: the caller vouches for the counter.
    unsafe {
        asm!("red.relaxed.gpu.global.max.u64 [{}], {};", in(reg64) counter, in(reg64) value, options(nostack))
    };
}

/// Nothing: where a parameter lies is known. Lanes on the host note it.
#[cfg(feature = "rows")]
#[inline(always)]
pub fn parameter<T>(_: &T) {}

/// The `u64` at byte `at` of the parameter of `nvme_read_ranges`, straight from where parameters lie. By way of Rust the
/// whole parameter would be copied to the thread's stack first, where `at` is no constant.
///
/// # Safety
/// `at` is a multiple of 8 inside the parameter. Only what is inlined into that kernel calls it: the name is unknown
/// elsewhere, and the assembler refuses it.
#[cfg(any(feature = "rows", feature = "scatter"))]
#[inline(always)]
pub unsafe fn word_of_ranges(at: u32) -> u64 {
    let value: u64;
    // SAFETY: the caller vouches for the place; parameters never change.
    unsafe {
        asm!(
            "{{ .reg .b64 a, b; mov.b64 a, nvme_read_ranges_param_0; cvt.u64.u32 b, {at}; add.s64 a, a, b;",
            "ld.param.b64 {value}, [a]; }}",
            at = in(reg32) at, value = out(reg64) value, options(pure, nomem, nostack));
    }
    value
}

/// Copies 16 bytes.
///
/// # Safety
/// Both addresses are valid and multiples of 16.
#[cfg(any(feature = "rows", feature = "scatter"))]
#[inline(always)]
pub unsafe fn copy_16(to: u64, from: u64) {
    // SAFETY: the caller vouches for both.
    unsafe {
        asm!("{{ .reg .b64 a, b; ld.global.v2.b64 {{a, b}}, [{from}]; st.global.v2.b64 [{to}], {{a, b}}; }}",
            to = in(reg64) to, from = in(reg64) from, options(nostack));
    }
}

/// Copies 16 bytes from each address of `from` whose bit of `there` is set to that of `to`: all are loaded before the
/// first is stored.
///
/// # Safety
/// As [`copy_16`], for each whose bit is set.
#[cfg(any(feature = "rows", feature = "scatter"))]
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

/// Copies 4 bytes.
///
/// # Safety
/// Both addresses are valid and multiples of 4.
#[cfg(any(feature = "rows", feature = "scatter"))]
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
#[cfg(any(feature = "rows", feature = "scatter"))]
#[inline(always)]
pub unsafe fn copy_1(to: u64, from: u64) {
    // SAFETY: the caller vouches for both.
    unsafe {
        asm!("{{ .reg .b16 a; ld.global.b8 a, [{from}]; st.global.b8 [{to}], a; }}",
            to = in(reg64) to, from = in(reg64) from, options(nostack));
    }
}

/// Stores a byte.
///
/// # Safety
/// The address is valid.
#[cfg(any(feature = "rows", feature = "scatter"))]
#[inline(always)]
pub unsafe fn store_u8(to: u64, value: u8) {
    let value = u16::from(value);
    // SAFETY: the caller vouches for it.
    unsafe {
        asm!("st.global.b8 [{to}], {value};", to = in(reg64) to, value = in(reg16) value, options(nostack))
    };
}

/// Stores 4 bytes.
///
/// # Safety
/// The address is valid and a multiple of 4.
#[cfg(any(feature = "rows", feature = "scatter"))]
#[inline(always)]
pub unsafe fn store_u32(to: u64, value: u32) {
    // SAFETY: the caller vouches for it.
    unsafe {
        asm!("st.global.b32 [{to}], {value};", to = in(reg64) to, value = in(reg32) value, options(nostack))
    };
}

/// Stores 2 bytes.
///
/// # Safety
/// The address is valid and a multiple of 2.
#[cfg(any(feature = "rows", feature = "scatter"))]
#[inline(always)]
pub unsafe fn store_u16(to: u64, value: u16) {
    // SAFETY: the caller vouches for it.
    unsafe {
        asm!("st.global.b16 [{to}], {value};", to = in(reg64) to, value = in(reg16) value, options(nostack))
    };
}

/// Loads a byte.
///
/// # Safety
/// The address is valid.
#[cfg(any(feature = "rows", feature = "scatter", feature = "hash"))]
#[inline(always)]
pub unsafe fn load_u8(from: u64) -> u8 {
    let value: u16;
    // SAFETY: the caller vouches for it.
    unsafe {
        asm!("ld.global.u8 {value}, [{from}];", from = in(reg64) from, value = out(reg16) value, options(nostack))
    };
    value as u8
}

/// Loads 4 bytes.
///
/// # Safety
/// The address is valid and a multiple of 4; nothing writes to it meanwhile.
#[cfg(any(feature = "rows", feature = "scatter"))]
#[inline(always)]
pub unsafe fn load_u32(from: u64) -> u32 {
    let value: u32;
    // SAFETY: the caller vouches for it.
    unsafe {
        asm!("ld.global.b32 {value}, [{from}];", from = in(reg64) from, value = out(reg32) value, options(nostack))
    };
    value
}

/// Loads 8 bytes.
///
/// # Safety
/// The address is valid and a multiple of 8; nothing writes to it meanwhile.
#[cfg(any(feature = "rows", feature = "scatter"))]
#[inline(always)]
pub unsafe fn load_u64(from: u64) -> u64 {
    let value: u64;
    // SAFETY: the caller vouches for it.
    unsafe {
        asm!("ld.global.b64 {value}, [{from}];", from = in(reg64) from, value = out(reg64) value, options(nostack))
    };
    value
}

/// Loads 8 bytes, where the compiler finds it best.
///
/// # Safety
/// As [`load_u64`]; nothing writes to it while the kernel runs.
#[cfg(feature = "hash")]
#[inline(always)]
pub unsafe fn load_word(from: u64) -> u64 {
    let value: u64;
    // SAFETY: the caller vouches for it.
    unsafe {
        asm!("ld.global.b64 {value}, [{from}];", from = in(reg64) from, value = out(reg64) value,
            options(pure, readonly, nostack))
    };
    value
}

/// Stores 8 bytes.
///
/// # Safety
/// The address is valid and a multiple of 8.
#[cfg(any(feature = "hash", feature = "rows"))]
#[inline(always)]
pub unsafe fn store_u64(to: u64, value: u64) {
    // SAFETY: the caller vouches for it.
    unsafe {
        asm!("st.global.b64 [{to}], {value};", to = in(reg64) to, value = in(reg64) value, options(nostack))
    };
}

/// Nanoseconds of the GPU's global timer.
#[inline(always)]
pub fn now_ns() -> u64 {
    let now: u64;
    // SAFETY: reads a special register; touches no memory.
    unsafe { asm!("mov.u64 {}, %globaltimer;", out(reg64) now, options(nostack)) };
    now
}

/// Waits about `ns` nanoseconds without using the memory pipeline.
#[inline(always)]
pub fn sleep_ns(ns: u32) {
    // SAFETY: touches no memory.
    unsafe { asm!("nanosleep.u32 {};", in(reg32) ns, options(nostack)) };
}

/// Ends the kernel with an error that the host sees.
#[cfg(any(feature = "rows", feature = "scatter"))]
#[inline(always)]
pub fn trap() -> ! {
    // SAFETY: touches no memory.
    unsafe { core::arch::nvptx::trap() }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: ends the kernel with an error that the host sees.
    unsafe { core::arch::nvptx::trap() }
}

/// Slice comparison calls it, and no library is linked.
///
/// # Safety
/// `a` and `b` are valid for reads of `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, len: usize) -> i32 {
    for index in 0..len {
        // SAFETY: index < len, and the caller vouches for len bytes.
        let (x, y) = unsafe { (*a.add(index), *b.add(index)) };
        if x != y {
            return i32::from(x) - i32::from(y);
        }
    }
    0
}
