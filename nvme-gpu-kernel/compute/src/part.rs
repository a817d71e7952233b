//! Per-lane fragment of 256 columns of a row: 8 elements, whose bytes depend on the format.
// UNSAFETY: rows are addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch::{load_128, of_half};
use crate::eight::sum;

/// The way in which the lanes of a warp load a format's row, 256 columns in one step.
///
/// Each format has its own fragment, so that every lane loads 16 bytes and the lanes of a warp together load
/// consecutive bytes, whatever the size of an element.
pub trait RowFragment {
    /// Address bit by which the fours of every second eight of the vector are swapped in shared memory, so
    /// that the lanes of one load use different banks.
    const FLIP: u32;
    /// Loaded bytes of a lane.
    type Raw: Copy;

    /// Loads the lane's fragment of the 256 columns from `column`, a multiple of 256, on.
    ///
    /// # Safety
    /// All 256 columns are allocated.
    unsafe fn load(row: u64, column: u32, lane: u32) -> Self::Raw;

    /// Loads the fragment if only `left` columns remain, a multiple of 32: zeros for the others.
    ///
    /// # Safety
    /// The remaining columns are allocated.
    unsafe fn load_until(row: u64, column: u32, lane: u32, left: u32) -> Self::Raw;

    /// Returns the two groups of four vector elements that belong to the lane's elements.
    fn fours(lane: u32) -> [u32; 2];

    /// Returns the sum of the products.
    fn dot(raw: Self::Raw, x: [[f32; 4]; 2]) -> f32;
}

/// `f32`: a lane has four elements, and the four that are 128 columns further on.
pub struct FloatFragment;

impl RowFragment for FloatFragment {
    const FLIP: u32 = 0;
    type Raw = [[u32; 4]; 2];

    #[inline(always)]
    unsafe fn load(row: u64, column: u32, lane: u32) -> Self::Raw {
        let at = row + u64::from(column * 4 + lane * 16);
        // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
        unsafe { [load_128(at, true), load_128(at + 512, true)] }
    }

    #[inline(always)]
    unsafe fn load_until(row: u64, column: u32, lane: u32, left: u32) -> Self::Raw {
        let at = row + u64::from(column * 4 + lane * 16);
        // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
        unsafe {
            [
                load_128(at, lane * 4 < left),
                load_128(at + 512, lane * 4 + 128 < left),
            ]
        }
    }

    #[inline(always)]
    fn fours(lane: u32) -> [u32; 2] {
        [lane, lane + 32]
    }

    #[inline(always)]
    fn dot(raw: Self::Raw, x: [[f32; 4]; 2]) -> f32 {
        sum(raw[0].map(f32::from_bits), x[0]) + sum(raw[1].map(f32::from_bits), x[1])
    }
}

/// Multiplies eight 16-bit elements; `wide` converts two of them.
#[inline(always)]
fn dot_of_16(raw: [u32; 4], x: [[f32; 4]; 2], wide: impl Fn(u32) -> [f32; 2]) -> f32 {
    let [a, b, c, d] = raw.map(wide);
    sum([a[0], a[1], b[0], b[1]], x[0]) + sum([c[0], c[1], d[0], d[1]], x[1])
}

macro_rules! sixteen {
    ($name:ident, $wide:expr) => {
        #[doc = "A lane has eight elements side by side."]
        pub struct $name;

        impl RowFragment for $name {
            const FLIP: u32 = 1;
            type Raw = [u32; 4];

            #[inline(always)]
            unsafe fn load(row: u64, column: u32, lane: u32) -> Self::Raw {
                // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
                unsafe { load_128(row + u64::from(column * 2 + lane * 16), true) }
            }

            #[inline(always)]
            unsafe fn load_until(row: u64, column: u32, lane: u32, left: u32) -> Self::Raw {
                // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
                unsafe { load_128(row + u64::from(column * 2 + lane * 16), lane * 8 < left) }
            }

            #[inline(always)]
            fn fours(lane: u32) -> [u32; 2] {
                [2 * lane, 2 * lane + 1]
            }

            #[inline(always)]
            fn dot(raw: Self::Raw, x: [[f32; 4]; 2]) -> f32 {
                dot_of_16(raw, x, $wide)
            }
        }
    };
}

sixteen!(Bf16, |pair| [
    f32::from_bits(pair << 16),
    f32::from_bits(pair & 0xFFFF_0000)
]);
sixteen!(F16, |pair| [
    of_half(pair as u16),
    of_half((pair >> 16) as u16)
]);
