//! The differences between a GPU and the stand-in: the clock, barriers, counters, and the weakest load.
// UNSAFETY: inline PTX, and counters at raw addresses.
#![allow(unsafe_code)]

#[cfg(target_arch = "nvptx64")]
mod gpu {
    use core::arch::asm;
    use nvme_core::sync::{AtomicU32, Scope};
    use nvme_gpu_kernel::arch;

    pub use arch::{add, now_ns, sync_block};

    /// Waits for the lanes of the warp.
    #[inline(always)]
    pub fn sync_warp() {
        arch::sync_warp(arch::FULL);
    }

    /// Takes a moment.
    #[inline(always)]
    pub fn tick() {
        let now: u64;
        // SAFETY: this reads a special register; touches no memory. Not pure, so that it stays.
        unsafe { asm!("mov.u64 {}, %clock64;", out(reg64) now, options(nostack)) };
        let _ = now;
    }

    /// A fence that also orders a store before a load.
    #[inline(always)]
    pub fn fence_sc(scope: Scope) {
        match scope {
            // SAFETY: the instruction touches no memory by itself.
            Scope::Sys => unsafe { asm!("fence.sc.sys;", options(nostack)) },
            // SAFETY: as above.
            _ => unsafe { asm!("fence.sc.gpu;", options(nostack)) },
        }
    }

    /// Loads a word as ordinary code does, through the first-level cache.
    #[inline(always)]
    pub fn plain(word: &AtomicU32) -> u32 {
        let value: u32;
        let at = core::ptr::from_ref(word);
        // SAFETY: a live word of global memory.
        unsafe {
            asm!("ld.global.ca.u32 {}, [{}];", out(reg32) value, in(reg64) at, options(nostack))
        };
        value
    }

    /// Loads a word by an asynchronous copy of the 16 bytes that begin with it, past the first-level cache, to the
    /// words of thread `thread` in shared memory.
    #[inline(always)]
    pub fn copied(word: &AtomicU32, thread: u32) -> u32 {
        let value: u32;
        let at = core::ptr::from_ref(word);
        // SAFETY: the source is 16 bytes of a location, the target the thread's own words in shared memory.
        unsafe {
            asm!("cp.async.cg.shared.global [{to}], [{at}], 16; cp.async.wait_all; ld.shared.u32 {value}, [{to}];",
                to = in(reg32) place(thread), at = in(reg64) at, value = out(reg32) value, options(nostack));
        }
        value
    }

    /// Loads as [`copied`] does with 4 bytes, through the first-level cache.
    #[inline(always)]
    pub fn copied_by_cache(word: &AtomicU32, thread: u32) -> u32 {
        let value: u32;
        let at = core::ptr::from_ref(word);
        // SAFETY: the source is a location, the target the thread's own words in shared memory.
        unsafe {
            asm!("cp.async.ca.shared.global [{to}], [{at}], 4; cp.async.wait_all; ld.shared.u32 {value}, [{to}];",
                to = in(reg32) place(thread), at = in(reg64) at, value = out(reg32) value, options(nostack));
        }
        value
    }

    /// 16 bytes of shared memory of a thread. Not inlined: the array must exist once.
    #[inline(never)]
    fn place(thread: u32) -> u32 {
        let first: u32;
        // SAFETY: the instruction names a static shared array; takes its address only.
        unsafe {
            asm!("{{ .shared .align 16 .b8 litmus_places[4096]; mov.u32 {}, litmus_places; }}",
                out(reg32) first, options(nostack));
        }
        first + (thread & 255) * 16
    }
}

#[cfg(not(target_arch = "nvptx64"))]
mod host {
    use nvme_core::sync::{AtomicU32, Order, Scope};
    use std::cell::Cell;
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU64, Ordering, fence};
    use std::time::Instant;

    static START: LazyLock<Instant> = LazyLock::new(Instant::now);

    pub fn now_ns() -> u64 {
        START.elapsed().as_nanos() as u64
    }

    /// Lets another one of many threads run, now and then.
    pub fn tick() {
        thread_local!(static TURNS: Cell<u32> = const { Cell::new(0) });
        let turn = TURNS.get().wrapping_add(1);
        TURNS.set(turn);
        match turn % 512 {
            0 => std::thread::yield_now(),
            _ => std::hint::spin_loop(),
        }
    }

    /// Does nothing: the stand-in runs one thread of a block, which does the work of all.
    pub fn sync_warp() {}

    /// Does the same as [`sync_warp`].
    pub fn sync_block() {}

    pub fn fence_sc(_: Scope) {
        fence(Ordering::SeqCst);
    }

    pub fn plain(word: &AtomicU32) -> u32 {
        word.load(Order::Relaxed, Scope::Sys)
    }

    pub fn copied(word: &AtomicU32, _: u32) -> u32 {
        plain(word)
    }

    pub fn copied_by_cache(word: &AtomicU32, _: u32) -> u32 {
        plain(word)
    }

    /// # Safety
    /// `counter` is valid and aligned, and only changed by this.
    pub unsafe fn add(counter: *mut u64, value: u64) {
        // SAFETY: the caller vouches for the counter.
        unsafe { AtomicU64::from_ptr(counter) }.fetch_add(value, Ordering::Relaxed);
    }
}

#[cfg(target_arch = "nvptx64")]
pub use gpu::*;
#[cfg(not(target_arch = "nvptx64"))]
pub use host::*;
