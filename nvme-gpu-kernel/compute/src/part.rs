//! What a lane has of 256 columns of a row: 8 elements, for each format by other bytes.
// UNSAFETY: rows are addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch::{funnel, load_32, load_128, of_half};
use crate::eight::{Eight, OF_Q4_0, OF_Q4_1, of_4_bits, of_8_bits, sum};

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

    /// The sum of the products. `row` is where the row begins.
    fn dot(raw: Self::Raw, row: u64, lane: u32, x: [[f32; 4]; 2]) -> f32;
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
    fn dot(raw: Self::Raw, _: u64, _: u32, x: [[f32; 4]; 2]) -> f32 {
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
            fn dot(raw: Self::Raw, _: u64, _: u32, x: [[f32; 4]; 2]) -> f32 {
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

/// The words around what a lane has of its block of 32 elements: blocks begin at even addresses, words are loaded at
/// multiples of 4. 256 columns are a multiple of 4 bytes, so that what is to be shifted is the same for all of them.
#[derive(Clone, Copy)]
struct Place {
    block: u64,
    numbers: u64,
}

impl Place {
    /// Blocks have `block_bytes` bytes, of which numbers begin at `begin`; each of the four lanes of a block has `bytes` of
    /// them.
    #[inline(always)]
    fn of(row: u64, column: u32, lane: u32, (block_bytes, begin, bytes): (u32, u32, u32)) -> Self {
        let block = row + u64::from((column / 32 + lane / 4) * block_bytes);
        Self {
            block,
            numbers: block + u64::from(begin + lane % 4 * bytes),
        }
    }

    /// The word with the half word at the block's begin and that around the numbers' begin, and the `N` - 1 words behind.
    ///
    /// # Safety
    /// Where they are `there`, so are the words: up to 2 bytes before and behind the row.
    #[inline(always)]
    unsafe fn load<const N: usize>(self, there: bool) -> (u32, [u32; N]) {
        let mut at = self.numbers & !3;
        // SAFETY: the caller's.
        unsafe {
            let first = load_32(self.block & !3, there);
            let words = [(); N].map(|()| {
                at += 4;
                load_32(at - 4, there)
            });
            (first, words)
        }
    }

    /// The half word at the block's begin.
    #[inline(always)]
    fn half(self, around: u32) -> f32 {
        of_half((around >> (self.block as u32 % 4 * 8)) as u16)
    }

    /// The word of numbers that begins in `low` and ends in `high`.
    #[inline(always)]
    fn word(self, low: u32, high: u32) -> u32 {
        funnel(low, high, self.numbers as u32 % 4 * 8)
    }
}

/// Four lanes have a block: each 8 of its numbers of 8 bits.
pub struct Q8_0;

const OF_Q8_0: (u32, u32, u32) = (34, 2, 8);

impl Part for Q8_0 {
    const FLIP: u32 = 1;
    type Raw = (u32, [u32; 3]);

    #[inline(always)]
    unsafe fn load(row: u64, column: u32, lane: u32) -> Self::Raw {
        // SAFETY: the caller's.
        unsafe { Place::of(row, column, lane, OF_Q8_0).load(true) }
    }

    #[inline(always)]
    unsafe fn load_until(row: u64, column: u32, lane: u32, left: u32) -> Self::Raw {
        // SAFETY: the caller's.
        unsafe { Place::of(row, column, lane, OF_Q8_0).load(lane / 4 * 32 < left) }
    }

    #[inline(always)]
    fn fours(lane: u32) -> [u32; 2] {
        [2 * lane, 2 * lane + 1]
    }

    #[inline(always)]
    fn dot((around, [a, b, c]): Self::Raw, row: u64, lane: u32, x: [[f32; 4]; 2]) -> f32 {
        let place = Place::of(row, 0, lane, OF_Q8_0);
        let eight = Eight {
            scale: place.half(around),
            least: None,
            numbers: [place.word(a, b), place.word(b, c)].map(of_8_bits),
        };
        eight.dot(x)
    }
}

#[inline(always)]
fn nibbles(word: u32, less: f32) -> [[f32; 4]; 2] {
    [of_4_bits(word, less), of_4_bits(word >> 4, less)]
}

#[inline(always)]
fn fours_of_nibbles(lane: u32) -> [u32; 2] {
    let first = lane / 4 * 8 + lane % 4;
    [first, first + 4]
}

/// Four lanes have a block: each 4 bytes, whose lower and upper halves are elements 16 apart.
pub struct Q4_0;

const OF_BLOCK_Q4_0: (u32, u32, u32) = (18, 2, 4);

impl Part for Q4_0 {
    const FLIP: u32 = 4;
    type Raw = (u32, [u32; 2]);

    #[inline(always)]
    unsafe fn load(row: u64, column: u32, lane: u32) -> Self::Raw {
        // SAFETY: the caller's.
        unsafe { Place::of(row, column, lane, OF_BLOCK_Q4_0).load(true) }
    }

    #[inline(always)]
    unsafe fn load_until(row: u64, column: u32, lane: u32, left: u32) -> Self::Raw {
        // SAFETY: the caller's.
        unsafe { Place::of(row, column, lane, OF_BLOCK_Q4_0).load(lane / 4 * 32 < left) }
    }

    #[inline(always)]
    fn fours(lane: u32) -> [u32; 2] {
        fours_of_nibbles(lane)
    }

    #[inline(always)]
    fn dot((around, [a, b]): Self::Raw, row: u64, lane: u32, x: [[f32; 4]; 2]) -> f32 {
        let place = Place::of(row, 0, lane, OF_BLOCK_Q4_0);
        let eight = Eight {
            scale: place.half(around),
            least: None,
            numbers: nibbles(place.word(a, b), OF_Q4_0),
        };
        eight.dot(x)
    }
}

/// As [`Q4_0`], with a least value, which has the word behind that of the scale, or the same.
pub struct Q4_1;

const OF_BLOCK_Q4_1: (u32, u32, u32) = (20, 4, 4);

impl Q4_1 {
    /// Where the block's least value is.
    #[inline(always)]
    fn least(place: Place) -> Place {
        Place {
            block: place.block + 2,
            ..place
        }
    }

    /// # Safety
    /// As [`Place::load`].
    #[inline(always)]
    unsafe fn words(row: u64, column: u32, lane: u32, there: bool) -> <Self as Part>::Raw {
        let place = Place::of(row, column, lane, OF_BLOCK_Q4_1);
        // SAFETY: the caller's.
        unsafe {
            (
                load_32(Self::least(place).block & !3, there),
                place.load(there),
            )
        }
    }
}

impl Part for Q4_1 {
    const FLIP: u32 = 4;
    type Raw = (u32, (u32, [u32; 2]));

    #[inline(always)]
    unsafe fn load(row: u64, column: u32, lane: u32) -> Self::Raw {
        // SAFETY: the caller's.
        unsafe { Self::words(row, column, lane, true) }
    }

    #[inline(always)]
    unsafe fn load_until(row: u64, column: u32, lane: u32, left: u32) -> Self::Raw {
        // SAFETY: the caller's.
        unsafe { Self::words(row, column, lane, lane / 4 * 32 < left) }
    }

    #[inline(always)]
    fn fours(lane: u32) -> [u32; 2] {
        fours_of_nibbles(lane)
    }

    #[inline(always)]
    fn dot((least, (around, [a, b])): Self::Raw, row: u64, lane: u32, x: [[f32; 4]; 2]) -> f32 {
        let place = Place::of(row, 0, lane, OF_BLOCK_Q4_1);
        let eight = Eight {
            scale: place.half(around),
            least: Some(Self::least(place).half(least)),
            numbers: nibbles(place.word(a, b), OF_Q4_1),
        };
        eight.dot(x)
    }
}
