//! Instructions for tiles: shared memory of a block, asynchronous copies into it, and tensor cores.
//!
//! Only these modules of the crate have `.aligned` instructions. Every lane of a warp (of a warpgroup for
//! `wgmma`) has to run them together, so kernels call them only where every branch is uniform for those
//! lanes. [`mma`] runs on any GPU from sm_80 on, [`hopper`] on sm_90a only.
//!
//! A `for` loop over an array of registers would put the array on a stack: [`un!`] unrolls instead.
//!
//! The order of a copy: `copy16` and its variants, [`commit`], [`wait_for_copies`], a barrier, then loads.
// UNSAFETY: inline PTX, and loads and stores through addresses that the kernel vouches for.
#![allow(unsafe_code)]

mod descriptor;
pub mod hopper;
pub mod mma;

use core::arch::{asm, global_asm};

// The array's length is the launch's. It is aligned to 1,024, since tiles with a swizzle of 128 bytes begin
// at such addresses.
global_asm!(".extern .shared .align 1024 .b8 nvme_dynamic[];");

// Not every image uses the macro.
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

// Not every image uses the macro.
#[allow(unused_macros)]
/// Returns the address of the parameter `$parameter` of the kernel `$kernel`. A macro, since inline PTX takes it by name.
macro_rules! parameter_address {
    ($kernel:literal, $parameter:ident) => {{
        let address: u64;
        core::arch::asm!(concat!("{{ .reg .b64 a; mov.b64 a, ", $kernel, "_param_0; cvta.param.u64 {}, a; }}"),
            out(reg64) address, options(pure, nomem, nostack));
        address
    }};
}
#[allow(unused_imports)]
pub(crate) use parameter_address;

// Not every image uses the macro.
#[allow(unused_macros)]
/// Adds the products of four `$a` with both halves of `$b` to columns `2 * $j` and `2 * $j + 1` of `$sums`: f16 where
/// `$is_f16`, else bf16. A macro, so that lanes on the host can do all of them at once.
macro_rules! products {
    ($is_f16:ident, $sums:ident, $j:ident, $a:ident, $b:ident) => {
        $crate::tile::un!(i in [0, 1, 2, 3] {
            if $is_f16 {
                $crate::tile::mma::mma_f16(&mut $sums[i][2 * $j], $a[i], [$b[0], $b[1]]);
                $crate::tile::mma::mma_f16(&mut $sums[i][2 * $j + 1], $a[i], [$b[2], $b[3]]);
            } else {
                $crate::tile::mma::mma_bf16(&mut $sums[i][2 * $j], $a[i], [$b[0], $b[1]]);
                $crate::tile::mma::mma_bf16(&mut $sums[i][2 * $j + 1], $a[i], [$b[2], $b[3]]);
            }
        })
    };
}
#[allow(unused_imports)]
pub(crate) use products;

/// The shared memory of the block, from one byte on.
///
/// It is a byte address without a length: `dynamic` is unsafe, and its caller promises that everything
/// reached from it is inside the launch's memory, so the accessors need no check.
#[derive(Clone, Copy)]
pub struct BlockShared(u32);

impl BlockShared {
    /// Returns the memory that the launch gave the block.
    ///
    /// # Safety
    /// All that is reached through it lies inside: the launch has as many bytes as the kernel uses. Threads
    /// order their accesses by barriers.
    #[inline(always)]
    pub unsafe fn dynamic() -> Self {
        let address: u32;
        // SAFETY: takes an address only.
        unsafe {
            asm!("mov.u32 {}, nvme_dynamic;", out(reg32) address, options(pure, nomem, nostack))
        };
        Self(address)
    }

    /// Returns the location `bytes` further on.
    #[inline(always)]
    pub fn at(self, bytes: u32) -> Self {
        Self(self.0 + bytes)
    }

    /// Rounds down to a multiple of 4.
    #[inline(always)]
    pub fn floor4(self) -> Self {
        Self(self.0 & !3)
    }

    /// Returns the location whose address differs in `bits`, in a swizzled tile, which begins at a multiple
    /// of more than `bits`.
    #[inline(always)]
    pub fn flip(self, bits: u32) -> Self {
        Self(self.0 ^ bits)
    }

    /// Optimisation barrier: returns the same location; derived addresses are computed at their use instead
    /// of early, and take no register meanwhile.
    #[inline(always)]
    pub fn opaque(self) -> Self {
        Self(opaque(self.0))
    }

    /// Returns the address in the window of shared memory.
    #[inline(always)]
    pub fn address(self) -> u32 {
        self.0
    }

    /// Loads a number, at a multiple of 4.
    #[inline(always)]
    pub fn load(self) -> f32 {
        let value: f32;
        // SAFETY: the caller of `dynamic` vouched for every location of the block's memory and for the
        // barriers around accesses.
        unsafe {
            asm!("ld.shared.f32 {}, [{}];", out(reg32) value, in(reg32) self.0, options(readonly, nostack))
        };
        value
    }

    /// Loads four numbers, at a multiple of 16.
    #[inline(always)]
    pub fn load4(self) -> [f32; 4] {
        let (a, b, c, d): (f32, f32, f32, f32);
        // SAFETY: vouched for by the caller of `dynamic`.
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
        // SAFETY: vouched for by the caller of `dynamic`.
        unsafe {
            asm!("st.shared.f32 [{}], {};", in(reg32) self.0, in(reg32) value, options(nostack))
        };
    }

    /// Stores four numbers, at a multiple of 16.
    #[inline(always)]
    pub fn store4(self, [a, b, c, d]: [f32; 4]) {
        // SAFETY: vouched for by the caller of `dynamic`.
        unsafe {
            asm!("st.shared.v4.f32 [{}], {{{}, {}, {}, {}}};", in(reg32) self.0,
                in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack));
        }
    }

    /// Loads four 32-bit words, at a multiple of 16.
    #[inline(always)]
    pub fn words4(self) -> [u32; 4] {
        self.load4().map(f32::to_bits)
    }

    /// Loads two 32-bit words, at a multiple of 8.
    #[inline(always)]
    pub fn words2(self) -> [u32; 2] {
        let (a, b): (u32, u32);
        // SAFETY: vouched for by the caller of `dynamic`.
        unsafe {
            asm!("ld.shared.v2.b32 {{{a}, {b}}}, [{at}];", at = in(reg32) self.0, a = out(reg32) a, b = out(reg32) b,
                options(readonly, nostack));
        }
        [a, b]
    }

    /// Loads a 16-bit half, at a multiple of 2.
    #[inline(always)]
    pub fn half(self) -> u16 {
        let value: u16;
        // SAFETY: vouched for by the caller of `dynamic`.
        unsafe {
            asm!("ld.shared.u16 {}, [{}];", out(reg16) value, in(reg32) self.0, options(readonly, nostack))
        };
        value
    }

    /// Loads a byte.
    #[inline(always)]
    pub fn byte(self) -> u32 {
        let value: u32;
        // SAFETY: vouched for by the caller of `dynamic`.
        unsafe {
            asm!("ld.shared.u8 {}, [{}];", out(reg32) value, in(reg32) self.0, options(readonly, nostack))
        };
        value
    }

    /// Stores the lowest byte of `value`.
    #[inline(always)]
    pub fn store_byte(self, value: u32) {
        // SAFETY: vouched for by the caller of `dynamic`.
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
        // SAFETY: vouched for by the caller of `dynamic`.
        unsafe {
            asm!("st.shared.u16 [{}], {};", in(reg32) self.0, in(reg16) value, options(nostack))
        };
    }

    /// Starts a copy of `bytes` (up to 16) from global memory, past L1, and fills up to 16 with zeros. Both
    /// addresses are multiples of 16.
    ///
    /// The bytes are visible after [`commit`], [`wait_for_copies`] and a barrier.
    ///
    /// # Safety
    /// `bytes` bytes at `from` may be read.
    #[inline(always)]
    pub unsafe fn copy16(self, from: u64, bytes: u32) {
        // SAFETY: the caller of `dynamic` vouched for the target, this function's caller for the source.
        unsafe {
            asm!("cp.async.cg.shared.global [{}], [{}], 16, {};",
                in(reg32) self.0, in(reg64) from, in(reg32) bytes, options(nostack));
        }
    }

    /// Starts a copy as [`Self::copy16`] does, of all 16 bytes or of nothing.
    ///
    /// # Safety
    /// As [`Self::copy16`], if `there` is true.
    #[inline(always)]
    pub unsafe fn copy16_if(self, from: u64, there: bool) {
        // SAFETY: the caller of `dynamic` vouched for the target, this function's caller for the source.
        unsafe {
            asm!(
                "{{ .reg .pred p; setp.ne.u32 p, {there}, 0; @p cp.async.cg.shared.global [{to}], [{from}], 16; }}",
                there = in(reg32) u32::from(there), to = in(reg32) self.0, from = in(reg64) from,
                options(nostack));
        }
    }

    /// Starts a copy as [`Self::copy16`] does, of 4 bytes at multiples of 4, through L1.
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

/// Optimisation barrier: returns the same word, opaque to the compiler.
#[inline(always)]
pub fn opaque(word: u32) -> u32 {
    let same: u32;
    // SAFETY: moves a register; touches no memory. Not `pure`, so that the compiler does not hoist it out of
    // loops.
    unsafe { asm!("mov.b32 {}, {};", out(reg32) same, in(reg32) word, options(nostack)) };
    same
}

/// Commits the calling thread's current group of copies.
#[inline(always)]
pub fn commit() {
    // SAFETY: concerns this thread's copies only.
    unsafe { asm!("cp.async.commit_group;", options(nostack)) };
}

/// Waits until all of the calling thread's groups of copies but the last `LEFT` have completed, for this
/// thread.
#[inline(always)]
pub fn wait_for_copies<const LEFT: u32>() {
    // SAFETY: concerns this thread's copies only.
    unsafe { asm!("cp.async.wait_group {};", const LEFT, options(nostack)) };
}

/// Waits for the `threads` threads, a multiple of 32, that call it with the same `barrier` (1 to 15).
#[inline(always)]
pub fn sync_some(barrier: u32, threads: u32) {
    // SAFETY: the callers are whole warps, and `threads` of them reach the same barrier; otherwise it would
    // wait for ever.
    unsafe { asm!("barrier.sync {}, {};", in(reg32) barrier, in(reg32) threads, options(nostack)) };
}

/// Returns `a * b + c`, rounded once.
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

/// Loads four numbers of global memory, at a multiple of 16.
///
/// # Safety
/// They are allocated, and nothing writes them meanwhile.
#[inline(always)]
pub unsafe fn load4(from: u64) -> [f32; 4] {
    let (a, b, c, d): (f32, f32, f32, f32);
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
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
/// They are allocated, and nothing else accesses them meanwhile.
#[inline(always)]
pub unsafe fn store4(to: u64, [a, b, c, d]: [f32; 4]) {
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    unsafe {
        asm!("st.global.v4.f32 [{}], {{{}, {}, {}, {}}};", in(reg64) to,
            in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack));
    }
}
