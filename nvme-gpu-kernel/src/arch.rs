//! What only the GPU has: its clock, and the symbols that nothing else provides.
// UNSAFETY: inline PTX, and `memcmp` over raw pointers.
#![allow(unsafe_code)]

use core::arch::asm;

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
