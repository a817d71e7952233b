//! The counterpart of `tile` on the host, for lanes: shared memory of a block, asynchronous copies into it, and tensor
//! cores, by the PTX manual.
// UNSAFETY: loads and stores at addresses that the kernel vouches for.
#![allow(unsafe_code)]

mod descriptor;
#[path = "lanes_hopper.rs"]
pub mod hopper;

use nvme_gpu_kernel::arch;

/// Runs the block once for each number, with `$v` a constant.
macro_rules! un {
    ($v:ident in [$($n:literal),* $(,)?] $b:block) => { $( {
        #[allow(non_upper_case_globals)]
        const $v: usize = $n;
        $b
    } )* };
}
pub(crate) use un;

/// Adds the products of four `$a` with both halves of `$b` to columns `2 * $j` and `2 * $j + 1` of `$sums`: f16 where
/// `$is_f16`, else bf16. Every lane of the warp calls it.
macro_rules! products {
    ($is_f16:ident, $sums:ident, $j:ident, $a:ident, $b:ident) => {
        $crate::tile::mma::products::<$is_f16>(&mut $sums, $j, $a, $b)
    };
}
pub(crate) use products;

/// Returns the address of the parameter `$parameter` of the kernel `$kernel`.
macro_rules! parameter_address {
    ($kernel:literal, $parameter:ident) => {
        (&raw const $parameter).expose_provenance() as u64
    };
}
pub(crate) use parameter_address;

/// Address of the dynamic part in the window of shared memory: on Hopper the first 1,024 bytes are the system's.
const DYNAMIC: u32 = 1024;

/// The dynamic shared memory of the block, from one byte on.
#[derive(Clone, Copy)]
pub struct DynamicShared {
    base: u64,
    at: u32,
    bytes: u32,
}

/// As kernels name it.
pub type BlockShared = DynamicShared;

impl DynamicShared {
    /// Returns the memory that the launch gave the block.
    ///
    /// # Safety
    /// Threads order their accesses by barriers.
    pub unsafe fn dynamic() -> Self {
        let (base, bytes) = arch::dynamic_shared();
        Self { base, at: 0, bytes }
    }

    /// Returns the location `bytes` further on.
    pub fn at(self, bytes: u32) -> Self {
        Self {
            at: self.at + bytes,
            ..self
        }
    }

    /// Returns the address in the window of shared memory.
    pub fn address(self) -> u32 {
        DYNAMIC + self.at
    }

    /// Returns the location at an address in the window of shared memory.
    fn at_address(self, address: u32) -> Self {
        assert!(
            address >= DYNAMIC,
            "an access at {address:#x}, before the dynamic shared memory"
        );
        Self {
            at: address - DYNAMIC,
            ..self
        }
    }

    /// Returns the host's address of `bytes` bytes at a multiple of their number.
    fn place(self, bytes: u32) -> u64 {
        let is_inside = self.at + bytes <= self.bytes;
        assert!(
            is_inside && self.at.is_multiple_of(bytes),
            "{bytes} bytes at byte {} of {} bytes of shared memory",
            self.at,
            self.bytes
        );
        self.base + u64::from(self.at)
    }

    /// Starts a copy of `bytes` (up to 16) from global memory, and fills up to 16 with zeros. Both addresses are
    /// multiples of 16.
    ///
    /// # Safety
    /// `bytes` bytes at `from` may be read.
    pub unsafe fn copy16(self, from: u64, bytes: u32) {
        assert!(
            from.is_multiple_of(16) && bytes <= 16,
            "a copy from {from:#x}"
        );
        // SAFETY: the target is inside; this function's caller vouches for the source, and barriers order both.
        unsafe { arch::start_copy(self.place(16), from, (bytes, 16 - bytes)) };
    }

    /// Starts a copy as [`Self::copy16`] does, of 4 bytes at multiples of 4.
    ///
    /// # Safety
    /// As [`Self::copy16`].
    pub unsafe fn copy4(self, from: u64, bytes: u32) {
        assert!(
            from.is_multiple_of(4) && bytes <= 4,
            "a copy of 4 bytes from {from:#x}"
        );
        // SAFETY: the target is inside; this function's caller vouches for the source, and barriers order both.
        unsafe { arch::start_copy(self.place(4), from, (bytes, 4 - bytes)) };
    }

    /// Starts a copy as [`Self::copy16`] does, of all 16 bytes or of nothing.
    ///
    /// # Safety
    /// As [`Self::copy16`], if `there` is true.
    pub unsafe fn copy16_if(self, from: u64, there: bool) {
        if there {
            // SAFETY: this function's caller vouches for the source.
            unsafe { self.copy16(from, 16) };
        }
    }

    /// Loads a number, at a multiple of 4.
    pub fn load(self) -> f32 {
        // SAFETY: `place` found it inside.
        f32::from_bits(unsafe { arch::load_u32(self.place(4)) })
    }

    /// Stores a number, at a multiple of 4.
    pub fn store(self, value: f32) {
        self.store_word(value.to_bits());
    }

    /// Stores a word of 32 bits, at a multiple of 4.
    pub fn store_word(self, value: u32) {
        // SAFETY: as above.
        unsafe { arch::store_u32(self.place(4), value) };
    }

    /// Returns the location whose address differs in `bits`, in a swizzled tile, which begins at a multiple of more than
    /// `bits`.
    pub fn flip(self, bits: u32) -> Self {
        Self {
            at: self.at ^ bits,
            ..self
        }
    }

    /// Returns the same location: an optimisation barrier on a GPU.
    pub fn opaque(self) -> Self {
        self
    }

    /// Stores four numbers, at a multiple of 16.
    pub fn store4(self, numbers: [f32; 4]) {
        let to = self.place(16);
        for (at, number) in (0..).zip(numbers) {
            // SAFETY: as above.
            unsafe { arch::store_u32(to + at * 4, number.to_bits()) };
        }
    }

    /// Loads four numbers, at a multiple of 16.
    pub fn load4(self) -> [f32; 4] {
        let from = self.place(16);
        // SAFETY: as above.
        [0, 4, 8, 12].map(|at| f32::from_bits(unsafe { arch::load_u32(from + at) }))
    }

    /// Loads two 32-bit words, at a multiple of 8.
    pub fn words2(self) -> [u32; 2] {
        // SAFETY: as above.
        let both = unsafe { arch::load_u64(self.place(8)) };
        [both as u32, (both >> 32) as u32]
    }

    /// Loads a 16-bit half, at a multiple of 2.
    pub fn half(self) -> u16 {
        // SAFETY: as above.
        unsafe { arch::load_u16(self.place(2)) }
    }

    /// Loads a byte.
    pub fn byte(self) -> u32 {
        // SAFETY: as above.
        u32::from(unsafe { arch::load_u8(self.place(1)) })
    }

    /// Stores a half, at a multiple of 2.
    pub fn store_half(self, value: u16) {
        // SAFETY: as above.
        unsafe { arch::store_u16(self.place(2), value) };
    }

    /// Loads four matrices of 8 x 8 halves: lane `i` passes the address of row `i % 8` of matrix `i / 8`, which is a
    /// multiple of 16. Of each a lane gets two halves of row `lane / 4`. Every lane of the warp calls it.
    #[track_caller]
    pub fn matrices4(self) -> [u32; 4] {
        self.load_matrices(|all| {
            deal(all, |row, column| (row, column));
        })
    }

    /// Loads as [`Self::matrices4`] does, each matrix transposed.
    #[track_caller]
    pub fn matrices4_transposed(self) -> [u32; 4] {
        self.load_matrices(|all| {
            deal(all, |row, column| (column, row));
        })
    }

    #[track_caller]
    fn load_matrices(self, step: fn(&[u64; 32])) -> [u32; 4] {
        let mut mine = LaneMatrices {
            row: self.place(16),
            halves: [0; 4],
        };
        arch::joint((&raw mut mine).expose_provenance() as u64, step);
        mine.halves
    }
}

/// Gives the lanes, whose [`LaneMatrices`] are at the addresses `all`, two halves each of four matrices: those that are at
/// `place` of row and column in the row that a lane passed.
fn deal(all: &[u64; 32], place: impl Fn(usize, usize) -> (usize, usize)) {
    // SAFETY: each lane waits with its own on its stack, which nothing else accesses meanwhile.
    let lane = |at: usize| unsafe { &mut *(all[at] as usize as *mut LaneMatrices) };
    for at in 0..all.len() {
        let halves = [0, 8, 16, 24].map(|first| {
            let half = |column: usize| {
                let (row, column) = place(at / 4, column);
                let from = lane(first + row).row + column as u64 * 2;
                // SAFETY: the lane's `place` found the row inside.
                u32::from(unsafe { arch::load_u16(from) })
            };
            half(at % 4 * 2) | half(at % 4 * 2 + 1) << 16
        });
        lane(at).halves = halves;
    }
}

/// The address that a lane passes to `ldmatrix`, and the registers that it gets.
struct LaneMatrices {
    row: u64,
    halves: [u32; 4],
}

/// Returns the same word: an optimisation barrier on a GPU.
pub fn opaque(word: u32) -> u32 {
    word
}

/// Commits the calling thread's current group of copies.
pub fn commit() {
    arch::commit_copies();
}

/// Waits until all of the calling thread's groups of copies but the last `LEFT` have completed, for this thread.
pub fn wait_for_copies<const LEFT: u32>() {
    arch::wait_for_copies(LEFT);
}

/// Returns `a * b + c`, rounded once.
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    a.mul_add(b, c)
}

/// Loads four numbers of global memory, at a multiple of 16.
///
/// # Safety
/// They are allocated, and nothing writes them meanwhile.
pub unsafe fn load4(from: u64) -> [f32; 4] {
    assert!(from.is_multiple_of(16), "four numbers at {from:#x}");
    // SAFETY: this function's caller vouches for the addresses.
    [0, 4, 8, 12].map(|at| f32::from_bits(unsafe { arch::load_u32(from + at) }))
}

/// Stores four numbers to global memory, at a multiple of 16.
///
/// # Safety
/// They are allocated, and nothing else accesses them meanwhile.
pub unsafe fn store4(to: u64, numbers: [f32; 4]) {
    assert!(to.is_multiple_of(16), "four numbers at {to:#x}");
    for (at, number) in (0..).zip(numbers) {
        // SAFETY: this function's caller vouches for the addresses.
        unsafe { arch::store_u32(to + at * 4, number.to_bits()) };
    }
}

/// Products of small matrices by the tensor cores.
pub mod mma {
    use nvme_formats::{bf16_of_f32, f16_of_f32, f32_of_bf16, f32_of_f16};
    use nvme_gpu_kernel::arch;

    /// The sums of a lane: its four numbers of each product of 16 x 8.
    type LaneSums = [[[f32; 4]; 8]; 4];

    /// The parts that a lane has of four matrices of 16 x 16 halves and of two of 16 x 8, in PTX's layout.
    struct LaneFragments<'s> {
        sums: &'s mut LaneSums,
        column: usize,
        a: [[u32; 4]; 4],
        b: [u32; 4],
    }

    /// Adds the products of each of `a` with the two of `b` to the sums of columns `2 * j` and `2 * j + 1`, as eight
    /// `mma.m16n8k16` do. Every lane of the warp calls it.
    #[track_caller]
    pub fn products<const IS_F16: bool>(
        sums: &mut LaneSums,
        j: usize,
        a: [[u32; 4]; 4],
        b: [u32; 4],
    ) {
        let column = 2 * j;
        let mut mine = LaneFragments { sums, column, a, b };
        arch::joint((&raw mut mine).expose_provenance() as u64, |all| {
            match IS_F16 {
                true => multiply(all, f32_of_f16),
                false => multiply(all, f32_of_bf16),
            };
        });
    }

    /// Computes the products of a warp, whose lanes have their fragments at the addresses `all`.
    fn multiply(all: &[u64; 32], wide: impl Fn(u16) -> f32) {
        // SAFETY: each lane waits with its fragments on its stack, which nothing else accesses meanwhile.
        let lane = |at: usize| unsafe { &mut *(all[at] as usize as *mut LaneFragments<'_>) };
        let halves = |word: u32| [word as u16, (word >> 16) as u16].map(&wide);
        let place = |lane: usize| (lane / 4, lane % 4 * 2);
        // Columns of both matrices `b` side by side.
        let mut b = [[0.0; 16]; 16];
        for at in 0..all.len() {
            let (group, pair) = place(at);
            for (word, index) in lane(at).b.into_iter().zip(0..) {
                let (row, column) = (pair + index % 2 * 8, group + index / 2 * 8);
                let [first, second] = halves(word);
                (b[row][column], b[row + 1][column]) = (first, second);
            }
        }
        for i in 0..4 {
            let (mut a, mut sums) = ([[0.0; 16]; 16], [[0.0; 16]; 16]);
            for at in 0..all.len() {
                let (group, pair) = place(at);
                for (word, index) in lane(at).a[i].into_iter().zip(0..) {
                    let (row, column) = (group + index % 2 * 8, pair + index / 2 * 8);
                    a[row][column..column + 2].copy_from_slice(&halves(word));
                }
            }
            for (a, sums) in a.iter().zip(&mut sums) {
                for (a, b) in a.iter().zip(&b) {
                    for (sum, b) in sums.iter_mut().zip(b) {
                        *sum += a * b;
                    }
                }
            }
            for at in 0..all.len() {
                let (group, pair) = place(at);
                let LaneFragments {
                    sums: to, column, ..
                } = lane(at);
                for (half, to) in to[i][*column..*column + 2].iter_mut().enumerate() {
                    for (index, to) in to.iter_mut().enumerate() {
                        *to += sums[group + index / 2 * 8][half * 8 + pair + index % 2];
                    }
                }
            }
        }
    }

    /// The parts that a lane has of a matrix of 16 x 16 halves, one of 16 x 8 and sums of 16 x 8, in PTX's layout.
    struct LaneHalves<'s> {
        sums: &'s mut [f32; 4],
        a: [u32; 4],
        b: [u32; 2],
    }

    /// Adds the product of 16 x 16 and 16 x 8 bf16 to 16 x 8 sums. Every lane of the warp calls it.
    #[track_caller]
    pub fn mma_bf16(sums: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        let mut mine = LaneHalves { sums, a, b };
        arch::joint((&raw mut mine).expose_provenance() as u64, |all| {
            add_product(all, f32_of_bf16);
        });
    }

    /// Adds the product as [`mma_bf16`] does, for f16.
    #[track_caller]
    pub fn mma_f16(sums: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        let mut mine = LaneHalves { sums, a, b };
        arch::joint((&raw mut mine).expose_provenance() as u64, |all| {
            add_product(all, f32_of_f16);
        });
    }

    /// Computes the product of a warp, whose lanes have their [`LaneHalves`] at the addresses `all`.
    fn add_product(all: &[u64; 32], wide: impl Fn(u16) -> f32) {
        // SAFETY: each lane waits with its fragments on its stack, which nothing else accesses meanwhile.
        let lane = |at: usize| unsafe { &mut *(all[at] as usize as *mut LaneHalves<'_>) };
        let halves = |word: u32| [word as u16, (word >> 16) as u16].map(&wide);
        let (mut a, mut b, mut sums) = ([[0.0; 16]; 16], [[0.0; 8]; 16], [[0.0; 8]; 16]);
        for at in 0..all.len() {
            let (group, pair) = (at / 4, at % 4 * 2);
            for (index, word) in lane(at).a.into_iter().enumerate() {
                let (row, column) = (group + index % 2 * 8, pair + index / 2 * 8);
                a[row][column..column + 2].copy_from_slice(&halves(word));
            }
            for (index, word) in lane(at).b.into_iter().enumerate() {
                let row = pair + index * 8;
                [b[row][group], b[row + 1][group]] = halves(word);
            }
        }
        for (a, sums) in a.iter().zip(&mut sums) {
            for (a, b) in a.iter().zip(&b) {
                for (sum, b) in sums.iter_mut().zip(b) {
                    *sum += a * b;
                }
            }
        }
        for at in 0..all.len() {
            let (group, pair) = (at / 4, at % 4 * 2);
            for (index, sum) in lane(at).sums.iter_mut().enumerate() {
                *sum += sums[group + index / 2 * 8][pair + index % 2];
            }
        }
    }

    /// The parts that a lane has of a matrix of 16 x 8 numbers, one of 8 x 8 and sums of 16 x 8, in PTX's layout.
    struct LaneNumbers<'s> {
        sums: &'s mut [f32; 4],
        a: [u32; 4],
        b: [u32; 2],
    }

    /// Adds the product of 16 x 8 and 8 x 8 numbers, whose upper 19 bits the tensor cores use, to 16 x 8 sums.
    /// Every lane of the warp calls it.
    #[track_caller]
    pub fn mma_tf32(sums: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
        let mut mine = LaneNumbers { sums, a, b };
        arch::joint((&raw mut mine).expose_provenance() as u64, |all| {
            // SAFETY: each lane waits with its fragments on its stack, which nothing else accesses meanwhile.
            let lane = |at: usize| unsafe { &mut *(all[at] as usize as *mut LaneNumbers<'_>) };
            // Kernels pass remainders of f32 without a conversion, so the lowest 13 bits are cut off here, too.
            let number = |word: u32| f32::from_bits(word & 0xFFFF_E000);
            let (mut a, mut b, mut sums) = ([[0.0; 8]; 16], [[0.0; 8]; 8], [[0.0; 8]; 16]);
            for at in 0..all.len() {
                let (group, column) = (at / 4, at % 4);
                for (index, word) in lane(at).a.into_iter().enumerate() {
                    a[group + index % 2 * 8][column + index / 2 * 4] = number(word);
                }
                for (index, word) in lane(at).b.into_iter().enumerate() {
                    b[column + index * 4][group] = number(word);
                }
            }
            for (a, sums) in a.iter().zip(&mut sums) {
                for (a, b) in a.iter().zip(&b) {
                    for (sum, b) in sums.iter_mut().zip(b) {
                        *sum += a * b;
                    }
                }
            }
            for at in 0..all.len() {
                let (group, pair) = (at / 4, at % 4 * 2);
                for (index, sum) in lane(at).sums.iter_mut().enumerate() {
                    *sum += sums[group + index / 2 * 8][pair + index % 2];
                }
            }
        });
    }

    /// The part that a lane has of three matrices of numbers of 8 bits, in PTX's layout.
    struct LaneBytes {
        a: [u32; 4],
        b: [u32; 2],
        sums: [u32; 4],
    }

    /// Returns `sums` plus the product of 16 x 32 and 32 x 8 signed bytes. Every lane of the warp calls it.
    #[track_caller]
    pub fn mma_bytes(a: [u32; 4], b: [u32; 2], sums: [u32; 4]) -> [u32; 4] {
        let mut mine = LaneBytes { a, b, sums };
        arch::joint((&raw mut mine).expose_provenance() as u64, |all| {
            // SAFETY: each lane waits with its fragments on its stack, which nothing else accesses meanwhile.
            let lane = |at: usize| unsafe { &mut *(all[at] as usize as *mut LaneBytes) };
            let bytes = |word: u32| word.to_le_bytes().map(|byte| i32::from(byte as i8));
            let (mut a, mut b) = ([[0; 32]; 16], [[0; 32]; 8]);
            for at in 0..all.len() {
                let (group, column) = (at / 4, at % 4 * 4);
                for (index, word) in lane(at).a.into_iter().enumerate() {
                    let (row, first) = (group + index % 2 * 8, column + index / 2 * 16);
                    a[row][first..first + 4].copy_from_slice(&bytes(word));
                }
                for (index, word) in lane(at).b.into_iter().enumerate() {
                    let first = column + index * 16;
                    b[group][first..first + 4].copy_from_slice(&bytes(word));
                }
            }
            for at in 0..all.len() {
                let (group, pair) = (at / 4, at % 4 * 2);
                for (index, sum) in lane(at).sums.iter_mut().enumerate() {
                    let (a, b) = (&a[group + index / 2 * 8], &b[pair + index % 2]);
                    let product: i32 = a.iter().zip(b).map(|(a, b)| a * b).sum();
                    *sum = sum.wrapping_add(product as u32);
                }
            }
        });
        mine.sums
    }

    /// Rounds two numbers to bf16 and packs them, the first in the lower half.
    pub fn pack_bf16(low: f32, high: f32) -> u32 {
        u32::from(bf16_of_f32(high)) << 16 | u32::from(bf16_of_f32(low))
    }

    /// Rounds two numbers to f16 and packs them, the first in the lower half.
    pub fn pack_f16(low: f32, high: f32) -> u32 {
        u32::from(f16_of_f32(high)) << 16 | u32::from(f16_of_f32(low))
    }
}
