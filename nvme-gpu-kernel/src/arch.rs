//! Instructions and state that only the GPU has: its clock, thread numbers, warp instructions, and the
//! symbols that no library provides. The one module of this crate with inline PTX; on the host, `lanes/arch.rs`
//! takes its place.
// UNSAFETY: inline PTX, and `memcmp` over raw pointers.
#![allow(unsafe_code)]

#[cfg(any(feature = "gathers", feature = "scatter", feature = "hash"))]
mod copies;

#[cfg(any(feature = "gathers", feature = "scatter"))]
pub use copies::copy_units;
#[cfg(feature = "gathers")]
pub use copies::load_pair;
#[cfg(any(feature = "gathers", feature = "scatter", feature = "hash"))]
pub use copies::{copy_1, copy_4, copy_16, copy_pieces};
use core::arch::asm;
#[cfg(feature = "gathers")]
use nvme_core::sync::AtomicU32;

/// Mask of all lanes of a warp.
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
    /// Returns the index of the thread in its block.
    thread, "tid.x"
);
special!(
    /// Returns the number of threads of a block.
    block_threads, "ntid.x"
);
special!(
    /// Returns the index of the block in the grid.
    block, "ctaid.x"
);
special!(
    /// Returns the number of blocks of the grid.
    blocks, "nctaid.x"
);
special!(
    /// Returns the index of the lane in its warp.
    lane, "laneid"
);
special!(
    /// Returns the mask of the lanes below this one.
    lanes_below, "lanemask_lt"
);

/// Returns the number of the grid, which differs between launches.
#[inline(always)]
pub fn grid() -> u64 {
    let number: u64;
    // SAFETY: reads a special register that is constant for a thread; touches no memory.
    unsafe { asm!("mov.u64 {}, %gridid;", out(reg64) number, options(pure, nomem, nostack)) };
    number
}

/// Optimisation barrier: returns the same value, opaque to the compiler, so that derived values are computed
/// at their use and take no register meanwhile.
#[cfg(any(feature = "gathers", feature = "scatter"))]
#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    let same: u32;
    // SAFETY: moves a register; touches no memory. Not `pure`, so that the compiler does not hoist
    // it out of loops. Hoisted, it would take a register through the whole loop, which is what the
    // barrier prevents.
    unsafe { asm!("mov.b32 {}, {};", out(reg32) same, in(reg32) value, options(nostack)) };
    same
}

/// Returns the mask of the lanes that run this instruction together.
#[inline(always)]
pub fn active() -> u32 {
    let mask: u32;
    // SAFETY: reads the warp's state; touches no memory. Not `pure`, since it differs between calls.
    unsafe { asm!("activemask.b32 {};", out(reg32) mask, options(nostack)) };
    mask
}

/// Returns the lanes of `mask` whose `value` equals this lane's. Every lane of `mask` calls it.
#[inline(always)]
pub fn same(mask: u32, value: u64) -> u32 {
    let lanes: u32;
    // SAFETY: exchanges registers between the lanes of `mask`, and each of them calls it; touches no memory.
    unsafe {
        asm!("match.any.sync.b64 {}, {}, {};", out(reg32) lanes, in(reg64) value, in(reg32) mask, options(nostack))
    };
    lanes
}

/// Returns the lanes that run `A` together with this one and pass the same `key`.
#[inline(always)]
pub fn beside<A>(key: u64) -> u32 {
    // Each `A` is compiled to one location, so lanes that run this instruction together all run `A`.
    same(active(), key)
}

/// Returns the lanes of `mask` with `mine`. Every lane of `mask` calls it.
#[inline(always)]
pub fn ballot(mask: u32, mine: bool) -> u32 {
    let lanes: u32;
    // SAFETY: exchanges registers between the lanes of `mask`, and each of them calls it; touches no memory.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {mine}, 0; vote.sync.ballot.b32 {lanes}, p, {mask}; }}",
            lanes = out(reg32) lanes, mine = in(reg32) u32::from(mine), mask = in(reg32) mask, options(nostack));
    }
    lanes
}

/// Returns the value of lane `from`. Every lane of `mask`, including `from`, calls it.
#[inline(always)]
pub fn shuffle(mask: u32, value: u32, from: u32) -> u32 {
    let taken: u32;
    // SAFETY: exchanges registers between the lanes of `mask`, and each of them calls it; touches no memory.
    unsafe {
        asm!("shfl.sync.idx.b32 {}, {}, {}, 31, {};",
            out(reg32) taken, in(reg32) value, in(reg32) from, in(reg32) mask, options(nostack));
    }
    taken
}

/// Returns the value of lane `from` (0 to 7) of this lane's tile of eight. Every lane of the warp
/// calls it. A lane that stays away makes the others wait for ever.
#[inline(always)]
pub fn shuffle_tile(value: u32, from: u32) -> u32 {
    let taken: u32;
    // SAFETY: exchanges registers between all lanes of the warp. 0x181F selects segments of eight lanes.
    unsafe {
        asm!("shfl.sync.idx.b32 {}, {}, {}, 0x181f, -1;",
            out(reg32) taken, in(reg32) value, in(reg32) from, options(nostack));
    }
    taken
}

/// Returns the value of the lane whose index differs in the bits of `bits`. Every lane of `mask`
/// calls it. A lane of the mask that stays away makes the others wait for ever.
#[inline(always)]
pub fn butterfly(mask: u32, value: u32, bits: u32) -> u32 {
    let taken: u32;
    // SAFETY: exchanges registers between the lanes of `mask`, and each of them calls it; touches no memory.
    unsafe {
        asm!("shfl.sync.bfly.b32 {}, {}, {}, 31, {};",
            out(reg32) taken, in(reg32) value, in(reg32) bits, in(reg32) mask, options(nostack));
    }
    taken
}

/// Waits for the lanes of `mask`; orders memory among them.
#[inline(always)]
pub fn sync_warp(mask: u32) {
    // SAFETY: every lane of the mask calls it; otherwise it would wait for ever.
    unsafe { asm!("bar.warp.sync {};", in(reg32) mask, options(nostack)) };
}

/// Waits for the block's threads; orders memory among them.
#[inline(always)]
pub fn sync_block() {
    // SAFETY: every thread of the block calls it; otherwise it would wait for ever.
    unsafe { asm!("barrier.sync 0;", options(nostack)) };
}

/// Adds to a counter in device memory. Relaxed, since the host reads it after the kernel.
///
/// # Safety
/// `counter` is valid and 8-byte aligned device memory that is only written through these functions, or as an
/// atomic.
#[inline(always)]
pub unsafe fn add(counter: *mut u64, value: u64) {
    // SAFETY: the caller vouches for the counter; the addition is one atomic instruction.
    unsafe {
        asm!("red.relaxed.gpu.global.add.u64 [{}], {};", in(reg64) counter, in(reg64) value, options(nostack))
    };
}

/// Adds to a counter in device memory, ordered with the thread's accesses before and after it; returns the
/// previous value.
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

/// Stores to a counter in device memory, ordered as [`add_ordered`] is; returns the previous value.
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

/// Raises a counter in device memory to `value`. Relaxed, since the host reads it after the kernel.
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

/// Does nothing: on a GPU the location of a parameter is known. Lanes on the host record it.
#[cfg(feature = "gathers")]
#[inline(always)]
pub fn parameter<T>(_: &T) {}

/// Loads the `u64` at byte `at` of the parameter of `nvme_read_ranges` from parameter memory.
///
/// Through a Rust reference the compiler would first copy the whole parameter to the thread's stack, because
/// `at` is not a constant.
///
/// # Safety
/// `at` is a multiple of 8 inside the parameter. Only code that is inlined into that kernel calls it:
/// elsewhere the name is unknown, and the assembler rejects it.
#[cfg(any(feature = "gathers", feature = "scatter"))]
#[inline(always)]
pub unsafe fn word_of_ranges(at: u32) -> u64 {
    let value: u64;
    // SAFETY: the caller vouches for the offset; parameters never change during a launch.
    unsafe {
        asm!(
            "{{ .reg .b64 a, b; mov.b64 a, nvme_read_ranges_param_0; cvt.u64.u32 b, {at}; add.s64 a, a, b;",
            "ld.param.b64 {value}, [a]; }}",
            at = in(reg32) at, value = out(reg64) value, options(pure, nomem, nostack));
    }
    value
}

/// Stores a byte.
///
/// # Safety
/// The address is valid.
#[cfg(any(feature = "gathers", feature = "scatter", feature = "hash"))]
#[inline(always)]
pub unsafe fn store_u8(to: u64, value: u8) {
    let value = u16::from(value);
    // SAFETY: the caller vouches for the address.
    unsafe {
        asm!("st.global.b8 [{to}], {value};", to = in(reg64) to, value = in(reg16) value, options(nostack))
    };
}

/// Stores 4 bytes.
///
/// # Safety
/// The address is valid and a multiple of 4.
#[cfg(any(feature = "gathers", feature = "scatter", feature = "hash"))]
#[inline(always)]
pub unsafe fn store_u32(to: u64, value: u32) {
    // SAFETY: the caller vouches for the address.
    unsafe {
        asm!("st.global.b32 [{to}], {value};", to = in(reg64) to, value = in(reg32) value, options(nostack))
    };
}

/// Stores 2 bytes.
///
/// # Safety
/// The address is valid and a multiple of 2.
#[cfg(any(feature = "gathers", feature = "scatter"))]
#[inline(always)]
pub unsafe fn store_u16(to: u64, value: u16) {
    // SAFETY: the caller vouches for the address.
    unsafe {
        asm!("st.global.b16 [{to}], {value};", to = in(reg64) to, value = in(reg16) value, options(nostack))
    };
}

/// Loads a byte.
///
/// # Safety
/// The address is valid.
#[cfg(any(feature = "gathers", feature = "scatter", feature = "hash"))]
#[inline(always)]
pub unsafe fn load_u8(from: u64) -> u8 {
    let value: u16;
    // SAFETY: the caller vouches for the address.
    unsafe {
        asm!("ld.global.u8 {value}, [{from}];", from = in(reg64) from, value = out(reg16) value, options(nostack))
    };
    value as u8
}

/// Loads 4 bytes.
///
/// # Safety
/// The address is valid and a multiple of 4; nothing writes to it meanwhile.
#[cfg(any(feature = "gathers", feature = "scatter", feature = "hash"))]
#[inline(always)]
pub unsafe fn load_u32(from: u64) -> u32 {
    let value: u32;
    // SAFETY: the caller vouches for the address.
    unsafe {
        asm!("ld.global.b32 {value}, [{from}];", from = in(reg64) from, value = out(reg32) value, options(nostack))
    };
    value
}

/// Loads 8 bytes.
///
/// # Safety
/// The address is valid and a multiple of 8; nothing writes to it meanwhile.
#[cfg(any(feature = "gathers", feature = "scatter"))]
#[inline(always)]
pub unsafe fn load_u64(from: u64) -> u64 {
    let value: u64;
    // SAFETY: the caller vouches for the address.
    unsafe {
        asm!("ld.global.b64 {value}, [{from}];", from = in(reg64) from, value = out(reg64) value, options(nostack))
    };
    value
}

/// Loads ten words of 8 bytes side by side: none of the loads waits for another.
///
/// # Safety
/// As for [`load_u64`], for all of them.
#[cfg(any(feature = "gathers", feature = "scatter"))]
#[inline(always)]
pub unsafe fn load_ten(from: u64) -> [u64; 10] {
    let (w0, w1, w2, w3, w4): (u64, u64, u64, u64, u64);
    let (w5, w6, w7, w8, w9): (u64, u64, u64, u64, u64);
    // SAFETY: the caller vouches for the addresses.
    unsafe {
        asm!(
            "ld.global.b64 {w0}, [{from}];",
            "ld.global.b64 {w1}, [{from}+8];",
            "ld.global.b64 {w2}, [{from}+16];",
            "ld.global.b64 {w3}, [{from}+24];",
            "ld.global.b64 {w4}, [{from}+32];",
            "ld.global.b64 {w5}, [{from}+40];",
            "ld.global.b64 {w6}, [{from}+48];",
            "ld.global.b64 {w7}, [{from}+56];",
            "ld.global.b64 {w8}, [{from}+64];",
            "ld.global.b64 {w9}, [{from}+72];",
            from = in(reg64) from,
            w0 = out(reg64) w0, w1 = out(reg64) w1, w2 = out(reg64) w2, w3 = out(reg64) w3,
            w4 = out(reg64) w4, w5 = out(reg64) w5, w6 = out(reg64) w6, w7 = out(reg64) w7,
            w8 = out(reg64) w8, w9 = out(reg64) w9,
            options(nostack));
    }
    [w0, w1, w2, w3, w4, w5, w6, w7, w8, w9]
}

/// Loads sixteen words of 4 bytes side by side, each as a relaxed atomic load of the GPU's scope does.
#[cfg(feature = "gathers")]
#[inline(always)]
pub fn load_sixteen(words: &[AtomicU32; 16]) -> [[u32; 4]; 4] {
    let (a0, a1, a2, a3): (u32, u32, u32, u32);
    let (b0, b1, b2, b3): (u32, u32, u32, u32);
    let (c0, c1, c2, c3): (u32, u32, u32, u32);
    let (d0, d1, d2, d3): (u32, u32, u32, u32);
    // SAFETY: the words can be read, and all accesses to them are atomic. The host aligns them to 16 bytes.
    unsafe {
        asm!(
            "ld.relaxed.gpu.global.v4.b32 {{{a0}, {a1}, {a2}, {a3}}}, [{from}];",
            "ld.relaxed.gpu.global.v4.b32 {{{b0}, {b1}, {b2}, {b3}}}, [{from}+16];",
            "ld.relaxed.gpu.global.v4.b32 {{{c0}, {c1}, {c2}, {c3}}}, [{from}+32];",
            "ld.relaxed.gpu.global.v4.b32 {{{d0}, {d1}, {d2}, {d3}}}, [{from}+48];",
            from = in(reg64) words.as_ptr() as usize as u64,
            a0 = out(reg32) a0, a1 = out(reg32) a1, a2 = out(reg32) a2, a3 = out(reg32) a3,
            b0 = out(reg32) b0, b1 = out(reg32) b1, b2 = out(reg32) b2, b3 = out(reg32) b3,
            c0 = out(reg32) c0, c1 = out(reg32) c1, c2 = out(reg32) c2, c3 = out(reg32) c3,
            d0 = out(reg32) d0, d1 = out(reg32) d1, d2 = out(reg32) d2, d3 = out(reg32) d3,
            options(nostack));
    }
    [
        [a0, a1, a2, a3],
        [b0, b1, b2, b3],
        [c0, c1, c2, c3],
        [d0, d1, d2, d3],
    ]
}

/// Loads 8 bytes; the compiler may move or merge the load.
///
/// # Safety
/// As for [`load_u64`]; nothing writes to it while the kernel runs.
#[cfg(feature = "hash")]
#[inline(always)]
pub unsafe fn load_word(from: u64) -> u64 {
    let value: u64;
    // SAFETY: the caller vouches for the address, whose content is constant, as `pure` and `readonly`
    // require.
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
#[cfg(any(feature = "hash", feature = "gathers"))]
#[inline(always)]
pub unsafe fn store_u64(to: u64, value: u64) {
    // SAFETY: the caller vouches for the address.
    unsafe {
        asm!("st.global.b64 [{to}], {value};", to = in(reg64) to, value = in(reg64) value, options(nostack))
    };
}

/// Returns the nanoseconds of the GPU's global timer.
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
    // SAFETY: pauses the thread; touches no memory.
    unsafe { asm!("nanosleep.u32 {};", in(reg32) ns, options(nostack)) };
}

/// Ends the kernel with an error that the host sees.
#[cfg(any(feature = "gathers", feature = "scatter"))]
#[inline(always)]
pub fn trap() -> ! {
    // SAFETY: ends the kernel; nothing runs after it.
    unsafe { core::arch::nvptx::trap() }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: ends the kernel with an error that the host sees; nothing runs after it.
    unsafe { core::arch::nvptx::trap() }
}

/// Compares bytes as C's `memcmp` does. Comparisons of slices call it, and no library is linked.
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
