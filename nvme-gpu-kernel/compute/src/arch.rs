//! PTX instructions for arithmetic, and memory by address. Only this file, `tile` and the other `arch` files
//! of this crate hold inline PTX; everything else is safe Rust over them.
// UNSAFETY: inline PTX, and loads and stores through addresses that the host vouches for.
#![allow(unsafe_code)]

#[cfg(any(
    feature = "steps",
    feature = "streamed",
    feature = "paged",
    feature = "experts",
    feature = "gemm"
))]
use crate::strip::WINDOW_BYTES;
#[cfg(not(feature = "search"))]
use core::arch::asm;
use nvme_gpu_kernel::arch;

/// Returns 2 to the power of `x`, with an error of at most 2 units in the last place.
#[cfg(any(
    feature = "steps",
    feature = "paged",
    feature = "experts",
    feature = "linear"
))]
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    let y: f32;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("ex2.approx.f32 {}, {};", out(reg32) y, in(reg32) x, options(pure, nomem, nostack))
    };
    y
}

/// Loads 16 bytes that are used only once, past the L1 cache; returns zeros unless `there` is true.
///
/// # Safety
/// If `there` is true, the 16 bytes are allocated and nothing writes them meanwhile; the address is a
/// multiple of 16.
#[cfg(any(feature = "steps", feature = "experts"))]
#[inline(always)]
pub unsafe fn load_128(from: u64, there: bool) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: the caller vouches for the 16 bytes; the predicate skips the load if `there` is false.
    unsafe {
        asm!(
            "{{ .reg .pred p; setp.ne.u32 p, {there}, 0;",
            "mov.b32 {a}, 0; mov.b32 {b}, 0; mov.b32 {c}, 0; mov.b32 {d}, 0;",
            "@p ld.global.L1::no_allocate.v4.b32 {{{a}, {b}, {c}, {d}}}, [{from}]; }}",
            there = in(reg32) u32::from(there), from = in(reg64) from,
            a = out(reg32) a, b = out(reg32) b, c = out(reg32) c, d = out(reg32) d,
            options(pure, readonly, nostack));
    }
    [a, b, c, d]
}

/// Returns 32 bits of the 64-bit value `high:low`, from bit `shift` on; `shift` is below 32.
#[cfg(any(
    feature = "steps",
    feature = "streamed",
    feature = "experts",
    feature = "gemm"
))]
#[inline(always)]
pub fn funnel(low: u32, high: u32, shift: u32) -> u32 {
    let word: u32;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("shf.r.wrap.b32 {}, {}, {}, {};", out(reg32) word, in(reg32) low, in(reg32) high, in(reg32) shift,
            options(pure, nomem, nostack))
    };
    word
}

/// Returns 32 bits of the 64-bit value `high:low`, from bit `shift` on; for a `shift` of 32 or more, all of
/// `high`.
#[cfg(any(feature = "steps", feature = "experts"))]
#[inline(always)]
pub fn funnel_to(low: u32, high: u32, shift: u32) -> u32 {
    let word: u32;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("shf.r.clamp.b32 {}, {}, {}, {};", out(reg32) word, in(reg32) low, in(reg32) high, in(reg32) shift,
            options(pure, nomem, nostack))
    };
    word
}

/// Returns 2^23 plus one byte of `word`: the byte becomes the low bits of that float's mantissa. `SELECT` is
/// 0x7540 plus the byte's number, a selector of `prmt`.
#[cfg(any(
    feature = "steps",
    feature = "streamed",
    feature = "experts",
    feature = "gemm"
))]
#[inline(always)]
pub fn byte_number<const SELECT: u32>(word: u32) -> f32 {
    let number: f32;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("prmt.b32 {}, {}, 0x4B000000, {};", out(reg32) number, in(reg32) word, const SELECT,
            options(pure, nomem, nostack))
    };
    number
}

/// Returns four of the eight bytes of `high` and `low`: each 4 bits of `selector` are a byte's number, plus 8 for eight
/// copies of its sign.
#[cfg(any(feature = "steps", feature = "streamed", feature = "experts"))]
#[inline(always)]
pub fn chosen_bytes(low: u32, high: u32, selector: u32) -> u32 {
    let bytes: u32;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("prmt.b32 {}, {}, {}, {};", out(reg32) bytes, in(reg32) low, in(reg32) high, in(reg32) selector,
            options(pure, nomem, nostack))
    };
    bytes
}

/// Converts IEEE 754 binary16 to `f32`.
#[cfg(not(any(feature = "search", feature = "linear")))]
#[inline(always)]
pub fn of_half(bits: u16) -> f32 {
    let wide: f32;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("cvt.f32.f16 {}, {};", out(reg32) wide, in(reg16) bits, options(pure, nomem, nostack))
    };
    wide
}

/// The part of a vector that a block keeps in shared memory, four elements at a time.
///
/// In every second group of eight elements the two fours are swapped by one address bit (`flip`), so that the
/// lanes of a warp load from different banks.
///
/// Every thread of the block fills it between two barriers; afterwards each warp multiplies its rows with it
/// without loading the vector from memory again.
#[cfg(any(feature = "steps", feature = "experts"))]
#[derive(Clone, Copy)]
pub struct SharedVector(u32);

#[cfg(any(feature = "steps", feature = "experts"))]
impl SharedVector {
    /// Returns the vector of the calling block.
    #[inline(always)]
    pub fn of_block() -> Self {
        Self(vector())
    }

    #[inline(always)]
    fn at(self, four: u32, flip: u32) -> u32 {
        let four = four ^ (four >> 3 & 1) * flip;
        self.0 + (four * 16 & (crate::VECTOR_ELEMENTS * 4 - 1))
    }

    /// Copies the first `len` elements, a multiple of 4, from address `from`, and fills up with zeros to a
    /// multiple of 256.
    ///
    /// Every thread of the block calls it, between two barriers.
    ///
    /// # Safety
    /// `len` elements are allocated at `from`.
    #[inline(always)]
    pub unsafe fn fill(self, from: u64, len: u32, flip: u32) {
        // SAFETY: the caller vouches for `len` elements at `from`, and no index below reaches further.
        let numbers = unsafe { FloatArray::at(from) };
        let most = crate::VECTOR_ELEMENTS;
        let end = if len < most { (len + 255) & !255 } else { most };
        let mut four = arch::thread();
        while four * 4 < end {
            let [a, b, c, d] = match four * 4 < len {
                true => numbers.four(u64::from(four) * 4),
                false => [0.0; 4],
            };
            let at = self.at(four, flip);
            // SAFETY: `at` masks the index to the array of VECTOR_ELEMENTS elements.
            unsafe {
                asm!("st.shared.v4.f32 [{}], {{{}, {}, {}, {}}};",
                    in(reg32) at, in(reg32) a, in(reg32) b, in(reg32) c, in(reg32) d, options(nostack));
            }
            four += arch::block_threads();
        }
    }

    /// Loads four elements.
    #[inline(always)]
    pub fn four(self, four: u32, flip: u32) -> [f32; 4] {
        let at = self.at(four, flip);
        let (a, b, c, d): (f32, f32, f32, f32);
        // SAFETY: `at` masks the index to the array of VECTOR_ELEMENTS elements.
        unsafe {
            asm!("ld.shared.v4.f32 {{{a}, {b}, {c}, {d}}}, [{at}];", at = in(reg32) at,
                a = out(reg32) a, b = out(reg32) b, c = out(reg32) c, d = out(reg32) d,
                options(readonly, nostack));
        }
        [a, b, c, d]
    }
}

/// Returns the address of the block's vector in shared memory. Not inlined: each inlined copy would define
/// another array.
#[cfg(any(feature = "steps", feature = "experts"))]
#[inline(never)]
fn vector() -> u32 {
    const _: () = assert!(crate::VECTOR_ELEMENTS == 4096);
    let address: u32;
    // SAFETY: names a static shared array; takes its address only.
    unsafe {
        asm!("{{ .shared .align 16 .b8 nvme_vector[16384]; mov.u32 {}, nvme_vector; }}",
            out(reg32) address, options(nostack));
    }
    address
}

/// Returns the larger number; the other one if one is NaN.
#[cfg(feature = "paged")]
#[inline(always)]
pub fn maximum(a: f32, b: f32) -> f32 {
    let larger: f32;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("max.f32 {}, {}, {};", out(reg32) larger, in(reg32) a, in(reg32) b, options(pure, nomem, nostack))
    };
    larger
}

/// Loads a word of memory.
///
/// # Safety
/// The word is allocated, at a multiple of 4, and nothing writes it meanwhile.
#[cfg(feature = "paged")]
#[inline(always)]
pub unsafe fn word(address: u64) -> u32 {
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    unsafe { *(address as usize as *const u32) }
}

/// Loads id `index` of a launch.
///
/// # Safety
/// The launch has more than `index` ids, and nothing writes them meanwhile.
#[cfg(feature = "streamed")]
#[inline(always)]
pub unsafe fn id(rows: &nvme_gpu_kernel::rows::GatherLaunch, index: u64) -> i64 {
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    unsafe {
        match rows.wide_ids {
            0 => i64::from(*(rows.ids as usize as *const i32).add(index as usize)),
            _ => *(rows.ids as usize as *const i64).add(index as usize),
        }
    }
}

/// Loads 8 bytes of memory; returns zeros unless `there` is true.
///
/// # Safety
/// If `there` is true, the 8 bytes are allocated and nothing writes them meanwhile; the address is a multiple
/// of 8.
#[cfg(feature = "paged")]
#[inline(always)]
pub unsafe fn load_8(from: u64, there: bool) -> [u32; 2] {
    let (a, b): (u32, u32);
    // SAFETY: the caller vouches for the 8 bytes; the predicate skips the load if `there` is false.
    unsafe {
        asm!(
            "{{ .reg .pred p; setp.ne.u32 p, {there}, 0; mov.b32 {a}, 0; mov.b32 {b}, 0;",
            "@p ld.global.v2.b32 {{{a}, {b}}}, [{from}]; }}",
            there = in(reg32) u32::from(there), from = in(reg64) from,
            a = out(reg32) a, b = out(reg32) b, options(nostack));
    }
    [a, b]
}

/// Returns e to the power of `x`.
#[cfg(any(feature = "steps", feature = "experts", feature = "linear"))]
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    exp2(x * core::f32::consts::LOG2_E)
}

/// Returns the square root, correctly rounded.
#[cfg(feature = "steps")]
#[inline(always)]
pub fn sqrt(x: f32) -> f32 {
    let y: f32;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("sqrt.rn.f32 {}, {};", out(reg32) y, in(reg32) x, options(pure, nomem, nostack))
    };
    y
}

/// An array of `f32` in GPU memory.
#[cfg(not(any(feature = "choose", feature = "gemm")))]
#[derive(Clone, Copy)]
pub struct FloatArray(*mut f32);

#[cfg(not(any(feature = "choose", feature = "gemm")))]
impl FloatArray {
    /// Makes the array that begins at `address`.
    ///
    /// # Safety
    /// Every index that is loaded or stored through it is inside memory that the kernel may use in that way.
    #[inline(always)]
    pub unsafe fn at(address: u64) -> Self {
        Self(address as usize as *mut f32)
    }

    /// Loads number `index`.
    #[inline(always)]
    pub fn load(self, index: u64) -> f32 {
        // SAFETY: the caller of `at` vouched for every index that is used.
        unsafe { *self.0.add(index as usize) }
    }

    /// Loads numbers `index`, a multiple of 4, to `index` + 3.
    #[cfg(any(
        feature = "steps",
        feature = "streamed",
        feature = "experts",
        feature = "linear"
    ))]
    #[inline(always)]
    pub fn four(self, index: u64) -> [f32; 4] {
        if (self.0 as usize).is_multiple_of(16) {
            let (a, b, c, d): (f32, f32, f32, f32);
            // Inline PTX, because the compiler merges branches that load the same numbers in plain Rust, and
            // then loads each number alone.
            // SAFETY: the caller of `at` vouched for the four numbers; the address is a multiple of 16 here.
            unsafe {
                asm!("ld.global.v4.f32 {{{a}, {b}, {c}, {d}}}, [{from}];", from = in(reg64) self.0.add(index as usize),
                    a = out(reg32) a, b = out(reg32) b, c = out(reg32) c, d = out(reg32) d,
                    options(pure, readonly, nostack));
            }
            return [a, b, c, d];
        }
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| self.load(index + i));
        [a, b, c, d]
    }

    /// Stores number `index`.
    #[inline(always)]
    pub fn store(self, index: u64, value: f32) {
        // SAFETY: the caller of `at` vouched for every index that is used.
        unsafe { *self.0.add(index as usize) = value };
    }
}

/// Returns the sum of `value` over the lanes of the warp. Every lane calls it.
#[cfg(not(any(feature = "choose", feature = "gemm")))]
#[inline(always)]
pub fn sum_of_warp(value: f32) -> f32 {
    let mut sum = value;
    let mut bits = 16;
    while bits != 0 {
        sum += f32::from_bits(arch::butterfly(arch::FULL, sum.to_bits(), bits));
        bits /= 2;
    }
    sum
}

/// Returns the sum over the lane's group of 8, 16 or 32 lanes, which is `1 << lane_shift`. Every lane calls it.
#[cfg(feature = "paged")]
#[inline(always)]
pub fn sum_of_lanes(value: f32, lane_shift: u32) -> f32 {
    let mut sum = value;
    let add = |sum: f32, bits: u32| {
        sum + f32::from_bits(arch::butterfly(arch::FULL, sum.to_bits(), bits))
    };
    if lane_shift == 5 {
        sum = add(sum, 16);
    }
    if lane_shift >= 4 {
        sum = add(sum, 8);
    }
    sum = add(sum, 4);
    sum = add(sum, 2);
    add(sum, 1)
}

/// Returns the number of this warp among those of the launch, and the number of warps.
#[cfg(not(feature = "gemm"))]
#[inline(always)]
pub fn warp() -> (u64, u64) {
    let of_block = arch::block_threads() / 32;
    let mine = arch::block() * of_block + arch::thread() / 32;
    (u64::from(mine), u64::from(arch::blocks() * of_block))
}

/// Returns the number of this thread among those of the launch, and the number of threads.
#[cfg(any(
    feature = "steps",
    feature = "experts",
    feature = "choose",
    feature = "attention",
    feature = "linear"
))]
#[inline(always)]
pub fn thread() -> (u64, u64) {
    let of_block = arch::block_threads();
    let mine = u64::from(arch::block()) * u64::from(of_block) + u64::from(arch::thread());
    (mine, u64::from(arch::blocks()) * u64::from(of_block))
}

/// The staging window of a warp in shared memory, for bytes of a drive or of memory: byte `b` is at `b`
/// modulo the window's length.
#[derive(Clone, Copy)]
#[cfg(any(
    feature = "steps",
    feature = "streamed",
    feature = "paged",
    feature = "experts",
    feature = "gemm"
))]
pub struct Window(u32);

#[cfg(any(
    feature = "steps",
    feature = "streamed",
    feature = "paged",
    feature = "experts",
    feature = "gemm"
))]
impl Window {
    /// Returns the window of the calling warp.
    #[inline(always)]
    pub fn here() -> Self {
        let warp = arch::thread() / 32 % nvme_gpu_kernel::rows::BLOCK_WARPS;
        Self(windows() + warp * WINDOW_BYTES as u32)
    }

    /// Loads the 16-bit word at byte `byte`, an even number.
    #[cfg(not(feature = "paged"))]
    #[inline(always)]
    pub fn half(self, byte: u32) -> u16 {
        let at = self.0 + (byte & (WINDOW_BYTES as u32 - 1));
        let value: u16;
        // SAFETY: the mask keeps the address inside the window; it is even because `byte` is.
        unsafe {
            asm!("ld.shared.u16 {}, [{}];", out(reg16) value, in(reg32) at, options(pure, readonly, nostack))
        };
        value
    }

    /// Loads the 32-bit word at byte `byte`, a multiple of 4.
    #[cfg(not(feature = "paged"))]
    #[inline(always)]
    pub fn word(self, byte: u32) -> u32 {
        let at = self.0 + (byte & (WINDOW_BYTES as u32 - 1));
        let value: u32;
        // SAFETY: the mask keeps the address inside the window; it is a multiple of 4 because `byte` is.
        unsafe {
            asm!("ld.shared.u32 {}, [{}];", out(reg32) value, in(reg32) at, options(pure, readonly, nostack))
        };
        value
    }

    /// Stores number `index` of a window that holds numbers instead of bytes.
    #[cfg(feature = "paged")]
    #[inline(always)]
    pub fn put(self, index: u32, value: f32) {
        let at = self.0 + (index * 4 & (WINDOW_BYTES as u32 - 1));
        // SAFETY: the mask keeps the address inside the window.
        unsafe { asm!("st.shared.f32 [{}], {};", in(reg32) at, in(reg32) value, options(nostack)) };
    }

    /// Loads numbers `index`, a multiple of 4, to `index` + 3 of such a window.
    #[cfg(feature = "paged")]
    #[inline(always)]
    pub fn four_of(self, index: u32) -> [f32; 4] {
        let at = self.0 + (index * 4 & (WINDOW_BYTES as u32 - 1));
        let (a, b, c, d): (f32, f32, f32, f32);
        // SAFETY: the mask keeps the address inside the window, and a group of four does not cross its end.
        unsafe {
            asm!(
                "ld.shared.v4.f32 {{{a}, {b}, {c}, {d}}}, [{at}];",
                at = in(reg32) at,
                a = out(reg32) a, b = out(reg32) b, c = out(reg32) c, d = out(reg32) d,
                options(readonly, nostack));
        }
        [a, b, c, d]
    }

    /// Copies a tile of bytes from address `from` into the window, as far as the bytes are in `begin..end`.
    /// Byte `tile` is the first.
    ///
    /// All loads are issued before the first store, so that their latencies overlap. Every lane calls it,
    /// after all lanes have used the tile before.
    #[cfg(not(feature = "paged"))]
    #[inline(always)]
    pub fn take(self, tile: u64, from: u64, (begin, end): (u64, u64)) {
        arch::sync_warp(arch::FULL);
        self.fill(tile, from, (begin, end));
        arch::sync_warp(arch::FULL);
    }

    #[cfg(not(feature = "paged"))]
    #[inline(always)]
    fn fill(self, tile: u64, from: u64, (begin, end): (u64, u64)) {
        let lane = u64::from(arch::lane()) * 16;
        let to = self.0 + (tile as u32 & (WINDOW_BYTES as u32 - 1)) + lane as u32;
        let mut there = 0u32;
        let mut part = 0;
        while part < 4 {
            let at = tile + lane + part * 512;
            there |= u32::from(at + 16 > begin && at < end) << part;
            part += 1;
        }
        // SAFETY: 2,048 bytes of the window; of memory, the requested bytes and the rest of their 16-byte
        // groups, which are allocated with them.
        unsafe {
            asm!(
                "{{ .reg .b64 a<4>, b<4>; .reg .pred p<4>; .reg .b32 m;",
                "and.b32 m, {there}, 1; setp.ne.u32 p0, m, 0;",
                "and.b32 m, {there}, 2; setp.ne.u32 p1, m, 0;",
                "and.b32 m, {there}, 4; setp.ne.u32 p2, m, 0;",
                "and.b32 m, {there}, 8; setp.ne.u32 p3, m, 0;",
                "@p0 ld.global.v2.b64 {{a0, b0}}, [{from}];",
                "@p1 ld.global.v2.b64 {{a1, b1}}, [{from}+512];",
                "@p2 ld.global.v2.b64 {{a2, b2}}, [{from}+1024];",
                "@p3 ld.global.v2.b64 {{a3, b3}}, [{from}+1536];",
                "@p0 st.shared.v2.b64 [{to}], {{a0, b0}};",
                "@p1 st.shared.v2.b64 [{to}+512], {{a1, b1}};",
                "@p2 st.shared.v2.b64 [{to}+1024], {{a2, b2}};",
                "@p3 st.shared.v2.b64 [{to}+1536], {{a3, b3}};",
                "}}",
                there = in(reg32) there, from = in(reg64) from + lane, to = in(reg32) to,
                options(nostack));
        }
    }
}

/// Copies `bytes` bytes of memory by the lanes of a warp, with eight loads of each lane in flight. Every lane
/// calls it.
///
/// # Safety
/// Both ranges are allocated, and nothing else writes them meanwhile. Both addresses and the length are
/// multiples of 16.
#[cfg(feature = "gemm")]
#[inline(always)]
pub unsafe fn copy_16(to: u64, from: u64, bytes: u32) {
    let mut at = arch::lane() * 16;
    while at < bytes {
        let there = (bytes - at).div_ceil(512);
        // SAFETY: the caller vouches for both ranges; part `i` of a lane is `i` * 512 bytes further, and its
        // predicate skips parts past the end.
        unsafe {
            asm!(
                "{{ .reg .b64 a<8>, b<8>; .reg .pred p<8>;",
                "setp.gt.u32 p1, {there}, 1; setp.gt.u32 p2, {there}, 2; setp.gt.u32 p3, {there}, 3;",
                "setp.gt.u32 p4, {there}, 4; setp.gt.u32 p5, {there}, 5; setp.gt.u32 p6, {there}, 6;",
                "setp.gt.u32 p7, {there}, 7;",
                "ld.global.v2.b64 {{a0, b0}}, [{from}];",
                "@p1 ld.global.v2.b64 {{a1, b1}}, [{from}+512];",
                "@p2 ld.global.v2.b64 {{a2, b2}}, [{from}+1024];",
                "@p3 ld.global.v2.b64 {{a3, b3}}, [{from}+1536];",
                "@p4 ld.global.v2.b64 {{a4, b4}}, [{from}+2048];",
                "@p5 ld.global.v2.b64 {{a5, b5}}, [{from}+2560];",
                "@p6 ld.global.v2.b64 {{a6, b6}}, [{from}+3072];",
                "@p7 ld.global.v2.b64 {{a7, b7}}, [{from}+3584];",
                "st.global.v2.b64 [{to}], {{a0, b0}};",
                "@p1 st.global.v2.b64 [{to}+512], {{a1, b1}};",
                "@p2 st.global.v2.b64 [{to}+1024], {{a2, b2}};",
                "@p3 st.global.v2.b64 [{to}+1536], {{a3, b3}};",
                "@p4 st.global.v2.b64 [{to}+2048], {{a4, b4}};",
                "@p5 st.global.v2.b64 [{to}+2560], {{a5, b5}};",
                "@p6 st.global.v2.b64 [{to}+3072], {{a6, b6}};",
                "@p7 st.global.v2.b64 [{to}+3584], {{a7, b7}};",
                "}}",
                there = in(reg32) there, from = in(reg64) from + u64::from(at), to = in(reg64) to + u64::from(at),
                options(nostack));
        }
        at += 4096;
    }
}

/// Returns the address of the windows of a block's warps. Not inlined: each inlined copy would define another
/// array.
#[cfg(any(
    feature = "steps",
    feature = "streamed",
    feature = "paged",
    feature = "experts",
    feature = "gemm"
))]
#[inline(never)]
fn windows() -> u32 {
    const _: () = assert!(nvme_gpu_kernel::rows::BLOCK_WARPS as u64 * WINDOW_BYTES == 32_768);
    let address: u32;
    // SAFETY: names a static shared array; takes its address only.
    unsafe {
        asm!("{{ .shared .align 16 .b8 nvme_windows[32768]; mov.u32 {}, nvme_windows; }}",
            out(reg32) address, options(nostack));
    }
    address
}

/// Returns the value of the lane whose index differs in the bits of `bits`. Every lane calls it.
#[cfg(any(feature = "search", feature = "experts"))]
#[inline(always)]
pub fn butterfly64(value: u64, bits: u32) -> u64 {
    let half = |value: u64| u64::from(arch::butterfly(arch::FULL, value as u32, bits));
    half(value >> 32) << 32 | half(value)
}
