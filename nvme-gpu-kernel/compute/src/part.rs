//! What a lane has of 256 columns of a row: 8 elements, for each format by other bytes.
// UNSAFETY: rows are addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch::{load_128, of_half};
use crate::eight::sum;

/// How a format's row is read by the lanes of a warp, 256 columns at a time.
pub trait Part {
    /// Bit by which the fours of every second eight of the vector change places in shared memory, so that lanes that read
    /// together use different banks.
    const FLIP: u32;
    /// What a lane loads.
    type Raw: Copy;

    /// The lane's part of the columns from `column`, a multiple of 256, on.
    ///
    /// # Safety
    /// They are there: 256 of them.
    unsafe fn load(row: u64, column: u32, lane: u32) -> Self::Raw;

    /// The same where only `left` columns are there, a multiple of 32: zeros beyond.
    ///
    /// # Safety
    /// They are there.
    unsafe fn load_until(row: u64, column: u32, lane: u32, left: u32) -> Self::Raw;

    /// Which fours of the vector's elements belong to the lane's elements.
    fn fours(lane: u32) -> [u32; 2];

    /// The sum of the products.
    fn dot(raw: Self::Raw, x: [[f32; 4]; 2]) -> f32;
}

/// A lane has four elements, and four that lie 128 columns further on.
pub struct F32;

impl Part for F32 {
    const FLIP: u32 = 0;
    type Raw = [[u32; 4]; 2];

    #[inline(always)]
    unsafe fn load(row: u64, column: u32, lane: u32) -> Self::Raw {
        let at = row + u64::from(column * 4 + lane * 16);
        // SAFETY: the caller's.
        unsafe { [load_128(at, true), load_128(at + 512, true)] }
    }

    #[inline(always)]
    unsafe fn load_until(row: u64, column: u32, lane: u32, left: u32) -> Self::Raw {
        let at = row + u64::from(column * 4 + lane * 16);
        // SAFETY: the caller's.
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

/// Eight elements of 16 bits, which `wide` widens two at a time.
#[inline(always)]
fn dot_of_16(raw: [u32; 4], x: [[f32; 4]; 2], wide: impl Fn(u32) -> [f32; 2]) -> f32 {
    let [a, b, c, d] = raw.map(wide);
    sum([a[0], a[1], b[0], b[1]], x[0]) + sum([c[0], c[1], d[0], d[1]], x[1])
}

macro_rules! sixteen {
    ($name:ident, $wide:expr) => {
        #[doc = "A lane has eight elements side by side."]
        pub struct $name;

        impl Part for $name {
            const FLIP: u32 = 1;
            type Raw = [u32; 4];

            #[inline(always)]
            unsafe fn load(row: u64, column: u32, lane: u32) -> Self::Raw {
                // SAFETY: the caller's.
                unsafe { load_128(row + u64::from(column * 2 + lane * 16), true) }
            }

            #[inline(always)]
            unsafe fn load_until(row: u64, column: u32, lane: u32, left: u32) -> Self::Raw {
                // SAFETY: the caller's.
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
