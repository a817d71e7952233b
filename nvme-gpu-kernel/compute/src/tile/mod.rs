//! Instructions of tiles: shared memory of a block, asynchronous copies into it, and tensor cores.
//!
//! The one place of this crate with `.aligned` instructions: every lane of a warp (of a warpgroup for `wgmma`) has to run
//! them together, so kernels call them in code whose branches are the same for all of those. [`mma`] runs on any GPU
//! from sm_80 on, [`hopper`] on sm_90a only. `for` over arrays of registers would put them on a stack: [`un!`] unrolls.
// UNSAFETY: inline PTX, and loads and stores through addresses that the kernel vouches for.
#![allow(unsafe_code)]

pub mod hopper;
pub mod mma;

use core::arch::{asm, global_asm};

// Its length is the launch's. 1,024: tiles that are swizzled by 128 bytes begin at such addresses.
global_asm!(".extern .shared .align 1024 .b8 nvme_dynamic[];");

// Not every image uses it.
#[allow(unused_macros)]
/// Runs the block once for each number, with `$v` a constant.
macro_rules! un {
    ($v:ident in [$($n:literal),* $(,)?] $b:block) => { $( {
        #[allow(non_upper_case_globals)]
        const $v: usize = $n;
        $b
    } )* };
}
#[allow(unused_imports)]
pub(crate) use un;

/// Shared memory of the block, from one byte on.
#[derive(Clone, Copy)]
pub struct Shared(u32);

impl Shared {
    /// The memory that the launch gave the block.
    ///
    /// # Safety
    /// All that is reached through it lies inside: the launch has as many bytes as the kernel uses. Threads order their
    /// accesses by barriers.
    #[inline(always)]
    pub unsafe fn dynamic() -> Self {
        let address: u32;
        // SAFETY: takes an address only.
        unsafe {
            asm!("mov.u32 {}, nvme_dynamic;", out(reg32) address, options(pure, nomem, nostack))
        };
        Self(address)
    }

    /// `bytes` further.
    #[inline(always)]
    pub fn at(self, bytes: u32) -> Self {
        Self(self.0 + bytes)
    }

    /// The multiple of 4 at or below.
    #[inline(always)]
    pub fn floor4(self) -> Self {
        Self(self.0 & !3)
    }

    /// The place whose address differs in `bits`: of a swizzled tile, which begins at a multiple of more than `bits`.
    #[inline(always)]
    pub fn flip(self, bits: u32) -> Self {
        Self(self.0 ^ bits)
    }

    /// The same place, as one that the compiler knows nothing of: what follows from it is worked out where it is used,
    /// and takes no register meanwhile.
    #[inline(always)]
    pub fn opaque(self) -> Self {
        Self(opaque(self.0))
    }

    /// Its address in the window of shared memory.
    #[inline(always)]
    pub fn address(self) -> u32 {
        self.0
    }

    /// A number, at a multiple of 4.
    #[inline(always)]
    pub fn load(self) -> f32 {
        let value: f32;
        // SAFETY: vouched for in `dynamic`.
        unsafe {
            asm!("ld.shared.f32 {}, [{}];", out(reg32) value, in(reg32) self.0, options(readonly, nostack))
        };
        value
    }

    /// Four numbers, at a multiple of 16.
    #[inline(always)]
    pub fn load4(self) -> [f32; 4] {
        let (a, b, c, d): (f32, f32, f32, f32);
        // SAFETY: vouched for in `dynamic`.
        unsafe {
            asm!("ld.shared.v4.f32 {{{a}, {b}, {c}, {d}}}, [{at}];", at = in(reg32) self.0,
                a = out(reg32) a, b = out(reg32) b, c = out(reg32) c, d = out(reg32) d,
                options(readonly, nostack));
        }
        [a, b, c, d]
    }

    /// Stores a number, at a multiple of 4.
    #[inline(always)]
    pub fn store(self, value: f32) {
        // SAFETY: vouched for in `dynamic`.
        unsafe {
            asm!("st.shared.f32 [{}], {};", in(reg32) self.0, in(reg32) value, options(nostack))
        };
    }

    /// Stores four numbers, at a multiple of 16.
    #[inline(always)]
    pub fn store4(self, [a, b, c, d]: [f32; 4]) {
        // SAFETY: vouched for in `dynamic`.
        unsafe {
            asm!("st.shared.v4.f32 [{}], {{{}, {}, {}, {}}};", in(reg32) self.0,
                in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack));
        }
    }

    /// Four words of 32 bits, at a multiple of 16.
    #[inline(always)]
    pub fn words4(self) -> [u32; 4] {
        self.load4().map(f32::to_bits)
    }

    /// Two words of 32 bits, at a multiple of 8.
    #[inline(always)]
    pub fn words2(self) -> [u32; 2] {
        let (a, b): (u32, u32);
        // SAFETY: vouched for in `dynamic`.
        unsafe {
            asm!("ld.shared.v2.b32 {{{a}, {b}}}, [{at}];", at = in(reg32) self.0, a = out(reg32) a, b = out(reg32) b,
                options(readonly, nostack));
        }
        [a, b]
    }

    /// A half of 16 bits, at a multiple of 2.
    #[inline(always)]
    pub fn half(self) -> u16 {
        let value: u16;
        // SAFETY: vouched for in `dynamic`.
        unsafe {
            asm!("ld.shared.u16 {}, [{}];", out(reg16) value, in(reg32) self.0, options(readonly, nostack))
        };
        value
    }

    /// Stores the lowest byte of `value`.
    #[inline(always)]
    pub fn store_byte(self, value: u32) {
        // SAFETY: vouched for in `dynamic`.
        unsafe {
            asm!("st.shared.u8 [{}], {};", in(reg32) self.0, in(reg32) value, options(nostack))
        };
    }

    /// Stores a word of 32 bits, at a multiple of 4.
    #[inline(always)]
    pub fn store_word(self, value: u32) {
        self.store(f32::from_bits(value));
    }

    /// Stores a half of 16 bits, at a multiple of 2.
    #[inline(always)]
    pub fn store_half(self, value: u16) {
        // SAFETY: vouched for in `dynamic`.
        unsafe {
            asm!("st.shared.u16 [{}], {};", in(reg32) self.0, in(reg16) value, options(nostack))
        };
    }

    /// Begins a copy of `bytes` (up to 16) from global memory, past L1, and of zeros for what is left of 16. Both
    /// addresses are multiples of 16. What it brings is there after [`commit`], [`wait_for_copies`] and a barrier.
    ///
    /// # Safety
    /// `bytes` bytes at `from` may be read.
    #[inline(always)]
    pub unsafe fn copy16(self, from: u64, bytes: u32) {
        // SAFETY: vouched for in `dynamic`, and by the caller.
        unsafe {
            asm!("cp.async.cg.shared.global [{}], [{}], 16, {};",
                in(reg32) self.0, in(reg64) from, in(reg32) bytes, options(nostack));
        }
    }

    /// As [`Self::copy16`] with all 16 bytes, or nothing.
    ///
    /// # Safety
    /// As [`Self::copy16`], where they are `there`.
    #[inline(always)]
    pub unsafe fn copy16_if(self, from: u64, there: bool) {
        // SAFETY: vouched for in `dynamic`, and by the caller.
        unsafe {
            asm!(
                "{{ .reg .pred p; setp.ne.u32 p, {there}, 0; @p cp.async.cg.shared.global [{to}], [{from}], 16; }}",
                there = in(reg32) u32::from(there), to = in(reg32) self.0, from = in(reg64) from,
                options(nostack));
        }
    }

    /// As [`Self::copy16`] with 4 bytes, at multiples of 4; by way of L1.
    ///
    /// # Safety
    /// As [`Self::copy16`].
    #[inline(always)]
    pub unsafe fn copy4(self, from: u64, bytes: u32) {
        // SAFETY: as above.
        unsafe {
            asm!("cp.async.ca.shared.global [{}], [{}], 4, {};",
                in(reg32) self.0, in(reg64) from, in(reg32) bytes, options(nostack));
        }
    }
}

/// The same word, as one that the compiler knows nothing of.
#[inline(always)]
pub fn opaque(word: u32) -> u32 {
    let same: u32;
    // SAFETY: moves a register. Not pure: it is not moved out of loops.
    unsafe { asm!("mov.b32 {}, {};", out(reg32) same, in(reg32) word, options(nostack)) };
    same
}

/// Ends the calling thread's current group of copies.
#[inline(always)]
pub fn commit() {
    // SAFETY: of this thread's copies only.
    unsafe { asm!("cp.async.commit_group;", options(nostack)) };
}

/// Waits until all of the calling thread's groups of copies but the last `LEFT` are there, for this thread.
#[inline(always)]
pub fn wait_for_copies<const LEFT: u32>() {
    // SAFETY: of this thread's copies only.
    unsafe { asm!("cp.async.wait_group {};", const LEFT, options(nostack)) };
}

/// Waits for the `threads` threads, a multiple of 32, that call it with the same `barrier` (1 to 15).
#[inline(always)]
pub fn sync_some(barrier: u32, threads: u32) {
    // SAFETY: so many threads call it.
    unsafe { asm!("barrier.sync {}, {};", in(reg32) barrier, in(reg32) threads, options(nostack)) };
}

/// `a * b + c`, rounded once.
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    let sum: f32;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("fma.rn.f32 {}, {}, {}, {};", out(reg32) sum, in(reg32) a, in(reg32) b, in(reg32) c,
            options(pure, nomem, nostack));
    }
    sum
}

/// Four numbers of global memory, at a multiple of 16.
///
/// # Safety
/// They may be read, and nothing writes them meanwhile.
#[inline(always)]
pub unsafe fn load4(from: u64) -> [f32; 4] {
    let (a, b, c, d): (f32, f32, f32, f32);
    // SAFETY: the caller's.
    unsafe {
        asm!("ld.global.v4.f32 {{{a}, {b}, {c}, {d}}}, [{from}];", from = in(reg64) from,
            a = out(reg32) a, b = out(reg32) b, c = out(reg32) c, d = out(reg32) d,
            options(readonly, nostack));
    }
    [a, b, c, d]
}

/// Stores four numbers to global memory, at a multiple of 16.
///
/// # Safety
/// They may be written, and nothing else uses them meanwhile.
#[inline(always)]
pub unsafe fn store4(to: u64, [a, b, c, d]: [f32; 4]) {
    // SAFETY: the caller's.
    unsafe {
        asm!("st.global.v4.f32 [{}], {{{}, {}, {}, {}}};", in(reg64) to,
            in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack));
    }
}
