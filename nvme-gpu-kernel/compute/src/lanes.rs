//! The counterpart of `arch.rs` on the host, for lanes: each function implements its instruction by the PTX
//! manual.
// UNSAFETY: loads and stores at addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::VECTOR_ELEMENTS;
use crate::strip::WINDOW_BYTES;
pub use nvme_formats::f32_of_f16 as of_half;
use nvme_gpu_kernel::arch;
use nvme_gpu_kernel::rows::{BLOCK_WARPS, GatherLaunch};

/// Returns 2 to the power of `x`.
pub fn exp2(x: f32) -> f32 {
    x.exp2()
}

/// Returns e to the power of `x`.
pub fn exp(x: f32) -> f32 {
    exp2(x * core::f32::consts::LOG2_E)
}

/// Returns the square root, correctly rounded.
pub fn sqrt(x: f32) -> f32 {
    x.sqrt()
}

/// Returns the larger number; the other one if one is NaN.
pub fn maximum(a: f32, b: f32) -> f32 {
    a.max(b)
}

/// Loads a word of memory.
///
/// # Safety
/// The word is allocated, at a multiple of 4, and nothing writes it meanwhile.
pub unsafe fn word(address: u64) -> u32 {
    // SAFETY: this function's caller vouches for the address.
    unsafe { arch::load_u32(address) }
}

/// Loads id `index` of a launch.
///
/// # Safety
/// The launch has more than `index` ids, and nothing writes them meanwhile.
pub unsafe fn id(rows: &GatherLaunch, index: u64) -> i64 {
    // SAFETY: this function's caller vouches for the id.
    unsafe {
        match rows.wide_ids {
            0 => i64::from(arch::load_u32(rows.ids + index * 4) as i32),
            _ => arch::load_u64(rows.ids + index * 8) as i64,
        }
    }
}

/// Loads 8 bytes of memory; returns zeros unless `there` is true.
///
/// # Safety
/// If `there` is true, the 8 bytes are allocated and nothing writes them meanwhile; the address is a multiple
/// of 8.
pub unsafe fn load_8(from: u64, there: bool) -> [u32; 2] {
    if !there {
        return [0; 2];
    }
    // SAFETY: this function's caller vouches for the 8 bytes.
    let both = unsafe { arch::load_u64(from) };
    [both as u32, (both >> 32) as u32]
}

/// Loads 16 bytes of memory; returns zeros unless `there` is true.
///
/// # Safety
/// If `there` is true, the 16 bytes are allocated and nothing writes them meanwhile; the address is a multiple
/// of 16.
pub unsafe fn load_128(from: u64, there: bool) -> [u32; 4] {
    if !there {
        return [0; 4];
    }
    assert!(from.is_multiple_of(16), "16 bytes at {from:#x}");
    // SAFETY: this function's caller vouches for the 16 bytes.
    [0, 4, 8, 12].map(|at| unsafe { arch::load_u32(from + at) })
}

pub use crate::eight::host::chosen_bytes;

/// Returns 32 bits of the 64-bit value `high:low`, from bit `shift` on; for a `shift` of 32 or more, all of
/// `high`.
pub fn funnel_to(low: u32, high: u32, shift: u32) -> u32 {
    ((u64::from(high) << 32 | u64::from(low)) >> shift.min(32)) as u32
}

/// An array of `f32` in GPU memory.
#[derive(Clone, Copy)]
pub struct LaneFloats(u64);

/// As kernels name it.
pub type FloatArray = LaneFloats;

impl LaneFloats {
    /// Makes the array that begins at `address`.
    ///
    /// # Safety
    /// Every index that is loaded or stored through it is inside memory that the kernel may use in that way.
    pub unsafe fn at(address: u64) -> Self {
        Self(address)
    }

    /// Loads number `index`.
    pub fn load(self, index: u64) -> f32 {
        // SAFETY: the caller of `at` vouched for every index that is used.
        f32::from_bits(unsafe { arch::load_u32(self.0 + index * 4) })
    }

    /// Loads numbers `index`, a multiple of 4, to `index` + 3.
    pub fn four(self, index: u64) -> [f32; 4] {
        [0, 1, 2, 3].map(|i| self.load(index + i))
    }

    /// Stores number `index`.
    pub fn store(self, index: u64, value: f32) {
        // SAFETY: the caller of `at` vouched for every index that is used.
        unsafe { arch::store_u32(self.0 + index * 4, value.to_bits()) };
    }
}

/// Returns the sum of `value` over the lanes of the warp. Every lane calls it.
#[track_caller]
pub fn sum_of_warp(value: f32) -> f32 {
    sum_of_lanes(value, 5)
}

/// Returns the sum over the lane's group of 8, 16 or 32 lanes, which is `1 << lane_shift`. Every lane calls it.
#[track_caller]
pub fn sum_of_lanes(value: f32, lane_shift: u32) -> f32 {
    let all = arch::exchange(value.to_bits().into());
    let lanes = 1 << lane_shift;
    let first = arch::lane() as usize & !(lanes - 1);
    let mut sums = [0.0; 32];
    for (sum, bits) in sums.iter_mut().zip(&all[first..first + lanes]) {
        *sum = f32::from_bits(*bits as u32);
    }
    // The order in which the butterflies of a GPU add: halves, then quarters, and so on.
    let mut count = lanes / 2;
    while count != 0 {
        (0..count).for_each(|lane| sums[lane] += sums[lane + count]);
        count /= 2;
    }
    sums[0]
}

/// Returns the number of this warp among those of the launch, and the number of warps.
pub fn warp() -> (u64, u64) {
    let of_block = arch::block_threads() / 32;
    let mine = arch::block() * of_block + arch::thread() / 32;
    (u64::from(mine), u64::from(arch::blocks() * of_block))
}

/// Returns the number of this thread among those of the launch, and the number of threads.
pub fn thread() -> (u64, u64) {
    let of_block = u64::from(arch::block_threads());
    let mine = u64::from(arch::block()) * of_block + u64::from(arch::thread());
    (mine, u64::from(arch::blocks()) * of_block)
}

/// Returns the 64-bit value of the lane whose index differs in the bits of `bits`. Every lane calls it.
#[track_caller]
pub fn butterfly64(value: u64, bits: u32) -> u64 {
    arch::shuffle64(value, arch::lane() ^ bits)
}

/// The staging window of a warp in shared memory, for bytes of a drive or of memory: byte `b` is at `b`
/// modulo the window's length.
#[derive(Clone, Copy)]
pub struct LaneWindow(u64);

/// As kernels name it.
pub type Window = LaneWindow;

impl LaneWindow {
    /// Returns the window of the calling warp.
    pub fn here() -> Self {
        let bytes = WINDOW_BYTES as u32;
        let windows = arch::shared("nvme_windows", BLOCK_WARPS * bytes);
        Self(windows + u64::from(arch::thread() / 32 % BLOCK_WARPS * bytes))
    }

    fn at(self, byte: u32) -> u64 {
        self.0 + (u64::from(byte) & (WINDOW_BYTES - 1))
    }

    /// Loads the 16-bit word at byte `byte`, an even number.
    pub fn half(self, byte: u32) -> u16 {
        // SAFETY: `at` masks the address to the window.
        unsafe { arch::load_u16(self.at(byte)) }
    }

    /// Loads the 32-bit word at byte `byte`, a multiple of 4.
    pub fn word(self, byte: u32) -> u32 {
        // SAFETY: as above.
        unsafe { arch::load_u32(self.at(byte)) }
    }

    /// Stores number `index` of a window that holds numbers instead of bytes.
    pub fn put(self, index: u32, value: f32) {
        // SAFETY: as above.
        unsafe { arch::store_u32(self.at(index * 4), value.to_bits()) };
    }

    /// Loads numbers `index`, a multiple of 4, to `index` + 3 of such a window.
    pub fn four_of(self, index: u32) -> [f32; 4] {
        [0, 1, 2, 3].map(|i| f32::from_bits(self.word((index + i) * 4)))
    }

    /// Copies a tile of bytes from address `from` into the window, as far as the bytes are in `begin..end`, in
    /// units of 16 bytes. Byte `tile` is the first.
    ///
    /// Every lane calls it, after all lanes have used the tile before.
    #[track_caller]
    pub fn take(self, tile: u64, from: u64, (begin, end): (u64, u64)) {
        arch::sync_warp(arch::FULL);
        let first = u64::from(arch::lane()) * 16;
        for at in [0, 512, 1024, 1536].map(|part| first + part) {
            if tile + at + 16 > begin && tile + at < end {
                // SAFETY: 16 bytes of the window; of memory, requested bytes and the rest of their group of 16,
                // which are allocated with them.
                unsafe { arch::copy_16(self.at((tile + at) as u32), from + at) };
            }
        }
        arch::sync_warp(arch::FULL);
    }
}

/// The part of a vector that a block keeps in shared memory, four elements at a time, in the order of the kernels.
///
/// Every thread of the block fills it between two barriers.
#[derive(Clone, Copy)]
pub struct LaneVector(u64);

/// As kernels name it.
pub type SharedVector = LaneVector;

impl LaneVector {
    /// Returns the vector of the calling block.
    pub fn of_block() -> Self {
        Self(arch::shared("nvme_vector", VECTOR_ELEMENTS * 4))
    }

    fn at(self, four: u32, flip: u32) -> u64 {
        let four = four ^ ((four >> 3 & 1) * flip);
        self.0 + u64::from((four * 16) & (VECTOR_ELEMENTS * 4 - 1))
    }

    /// Copies the first `len` elements, a multiple of 4, from address `from`, and fills up with zeros to a multiple of
    /// 256.
    ///
    /// Every thread of the block calls it, between two barriers.
    ///
    /// # Safety
    /// `len` elements are allocated at `from`.
    pub unsafe fn fill(self, from: u64, len: u32, flip: u32) {
        // SAFETY: this function's caller vouches for `len` elements.
        let numbers = unsafe { LaneFloats::at(from) };
        let end = len.next_multiple_of(256).min(VECTOR_ELEMENTS);
        let mut four = arch::thread();
        while four * 4 < end {
            let values = match four * 4 < len {
                true => numbers.four(u64::from(four) * 4),
                false => [0.0; 4],
            };
            // SAFETY: `at` keeps the four inside the array.
            let to = unsafe { LaneFloats::at(self.at(four, flip)) };
            (0..)
                .zip(values)
                .for_each(|(at, value)| to.store(at, value));
            four += arch::block_threads();
        }
    }

    /// Loads four elements.
    pub fn four(self, four: u32, flip: u32) -> [f32; 4] {
        // SAFETY: as above.
        unsafe { LaneFloats::at(self.at(four, flip)) }.four(0)
    }
}

/// Copies `bytes` bytes of memory by the lanes of a warp. Every lane calls it.
///
/// # Safety
/// Both ranges are allocated, and nothing else writes them meanwhile. Both addresses and the length are
/// multiples of 16.
pub unsafe fn copy_16(to: u64, from: u64, bytes: u32) {
    let mut at = arch::lane() * 16;
    while at < bytes {
        // SAFETY: this function's caller vouches for both ranges.
        unsafe { arch::copy_16(to + u64::from(at), from + u64::from(at)) };
        at += 512;
    }
}
