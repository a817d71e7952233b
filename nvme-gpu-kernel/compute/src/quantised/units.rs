//! The stored form of units of weights, and the location of a lane's part of them.

use super::TILE_ROWS;
use crate::GemvParameters;
use crate::arch::{chosen_bytes, funnel_to, of_half};
use crate::eight::half_power;
use crate::planes::DIGITS;
use crate::tile::{BlockShared, un};
use nvme_gpu_kernel::arch;

/// The upper halves of bytes.
const UPPER: u32 = 0xF0F0_F0F0;
/// Limit of the copies of a chunk that a lane makes.
pub const MOST_COPIES: u32 = 10;

/// A lane's weights of a pair of units of a row: eight bytes of each unit.
pub type Weights = [[u32; 2]; 2];

/// A format's units of 32 weights: their stored form and their multiplication. Two units are a pair, and a chunk is
/// whole pairs.
///
/// Implementations differ in how a lane finds its weights in the bytes of a stage; the loop over chunks,
/// tiles and pairs in the parent module is the same for all formats.
pub trait UnitFormat {
    /// Bytes of a unit.
    const BYTES: u32;
    /// Units of a chunk: a multiple of 16 bytes.
    const CHUNK: u32;
    /// Distance of the additional words that a lane needs if units begin in the middle of a word.
    const FURTHER: u32;
    /// Powers of two by which the weights of a fragment are larger than the real ones.
    const LESS: u32;
    /// True if a unit has a minimum beside its scale.
    const HAS_LEAST: bool;
    /// Copies of 16 bytes that cover a row's part of a chunk at any even address. An odd number, so that rows
    /// begin in different banks.
    const COPIES: u32 = (14 + Self::CHUNK * Self::BYTES).div_ceil(16) | 1;
    /// Bytes of a row's part of a stage.
    const ROW: u32 = Self::COPIES * 16;
    /// Bytes of a pair.
    const PAIR: u32 = 2 * Self::BYTES;

    /// Loads the lane's weights of pair `pair` of the row `row` bytes after the lane's first one.
    fn weights(lane: &LaneConstants, stage: BlockShared, row: u32, pair: u32) -> Weights;

    /// Puts the lane's digits of a unit, those of four numbers and of the four that are 16 further on, into the order of
    /// its weights.
    #[inline(always)]
    fn ordered(digits: [u32; 2]) -> [u32; 2] {
        digits
    }

    /// Loads the scale of the unit that begins at `unit`.
    #[inline(always)]
    fn scale(unit: BlockShared) -> f32 {
        of_half(unit.half())
    }
}

pub struct Q8_0;

impl UnitFormat for Q8_0 {
    const BYTES: u32 = 34;
    const CHUNK: u32 = 8;
    const FURTHER: u32 = 40;
    const LESS: u32 = 0;
    const HAS_LEAST: bool = false;

    #[inline(always)]
    fn weights(lane: &LaneConstants, stage: BlockShared, row: u32, pair: u32) -> Weights {
        let pair = row + pair * Self::PAIR;
        let half = |half: u32| {
            let words = stage.at(lane.words + pair + half);
            let beside = stage.at(lane.beside + pair + half).load().to_bits();
            [
                funnel_to(beside, words.at(4).load().to_bits(), lane.bits),
                funnel_to(words.at(36).load().to_bits(), beside, lane.bits - 16),
            ]
        };
        let (first, second) = (half(0), half(16));
        [[first[0], second[0]], [first[1], second[1]]]
    }
}

/// Returns 4-bit weights, the lower and the upper ones of four bytes, minus 8, in the upper bits of each
/// byte.
#[inline(always)]
fn nibbles(both: u32, upper: u32) -> [u32; 2] {
    [both << 4, both].map(|both| both & upper ^ 0x8080_8080)
}

pub struct Q4_0;

impl UnitFormat for Q4_0 {
    const BYTES: u32 = 18;
    const CHUNK: u32 = 16;
    const FURTHER: u32 = 24;
    const LESS: u32 = 4;
    const HAS_LEAST: bool = false;

    #[inline(always)]
    fn weights(lane: &LaneConstants, stage: BlockShared, row: u32, pair: u32) -> Weights {
        let pair = row + pair * Self::PAIR;
        let words = stage.at(lane.words + pair);
        let beside = stage.at(lane.beside + pair).load().to_bits();
        [
            funnel_to(beside, words.at(4).load().to_bits(), lane.bits),
            funnel_to(words.at(20).load().to_bits(), beside, lane.bits - 16),
        ]
        .map(|both| nibbles(both, lane.upper))
    }
}

/// Q4_1, whose units are whole words.
pub struct Q4_1;

impl UnitFormat for Q4_1 {
    const BYTES: u32 = 20;
    const CHUNK: u32 = 8;
    const FURTHER: u32 = 0;
    const LESS: u32 = 4;
    const HAS_LEAST: bool = true;

    #[inline(always)]
    fn weights(lane: &LaneConstants, stage: BlockShared, row: u32, pair: u32) -> Weights {
        let words = stage.at(lane.words + row + pair * Self::PAIR);
        [4, 4 + Self::BYTES].map(|at| nibbles(words.at(at).load().to_bits(), lane.upper))
    }
}

/// Returns eight numbers of E2M1, of the halves of four bytes, as twice their values: a byte each, the lower half of a
/// byte before its upper half.
#[inline(always)]
fn doubled(word: u32) -> [u32; 2] {
    // The bytes' upper bits are the signs of their upper halves, and of the lower halves a shift further up.
    let lower = word << 4;
    let four = |sizes: u32, negative: u32| {
        let above = chosen_bytes(0x0302_0100, 0x0C08_0604, sizes);
        let below = chosen_bytes(0xFDFE_FF00, 0xF4F8_FAFC, sizes);
        above & !negative | below & negative
    };
    let sizes = word & 0x7777_7777;
    [
        four(sizes, chosen_bytes(lower, word, 0xD9C8)),
        four(sizes >> 16, chosen_bytes(lower, word, 0xFBEA)),
    ]
}

/// MXFP4: a power of two in a byte, and 32 numbers of E2M1.
pub struct Mxfp4;

impl UnitFormat for Mxfp4 {
    const BYTES: u32 = 17;
    const CHUNK: u32 = 16;
    const FURTHER: u32 = 4;
    const LESS: u32 = 0;
    const HAS_LEAST: bool = false;

    #[inline(always)]
    fn weights(lane: &LaneConstants, stage: BlockShared, row: u32, pair: u32) -> Weights {
        // A pair has 34 bytes: every other one begins in the middle of a word if the first does not.
        let of_two = row + pair / 2 * (2 * Self::PAIR);
        let four = |begin: u32, at: u32, bits: u32| {
            let words = stage.at(begin + of_two + at);
            let (low, high) = (words.load().to_bits(), words.at(4).load().to_bits());
            doubled(funnel_to(low, high, bits))
        };
        let LaneConstants {
            words,
            beside,
            bits,
            ..
        } = *lane;
        if pair.is_multiple_of(2) {
            [four(words, 0, bits - 8), four(beside, 16, 32 - bits)]
        } else {
            [four(beside, 32, 40 - bits), four(words, 52, bits - 16)]
        }
    }

    #[inline(always)]
    fn ordered([near, far]: [u32; 2]) -> [u32; 2] {
        [0x5140, 0x7362].map(|order| chosen_bytes(near, far, order))
    }

    /// Half of the scale, because weights are doubled.
    #[inline(always)]
    fn scale(unit: BlockShared) -> f32 {
        half_power(unit.byte())
    }
}

/// The values of a lane that are the same for every tile and chunk of its warp, because 16 rows and a chunk
/// are multiples of 16 bytes.
pub struct LaneConstants {
    /// Source of each of the lane's copies, relative to the first row's start; both are multiples of 16.
    pub from: [u32; MOST_COPIES as usize],
    /// A bit for each copy that a full chunk of a full tile has.
    pub has: u32,
    /// Offset in a stage of the lane's first word of row `lane / 4`.
    pub words: u32,
    /// The same, [`UnitFormat::FURTHER`] bytes later where the row begins in the middle of a word.
    pub beside: u32,
    /// Shift in bits between those words and the units: 16, or 32 if rows begin in the middle of a word.
    pub bits: u32,
    /// Offset in a stage of the scale of the unit that the lane adds up.
    pub scale: u32,
    /// The value [`UPPER`], kept in a register.
    pub upper: u32,
    /// All bits set in the lanes that have digits of the first unit of a pair.
    pub of_first: u32,
}

impl LaneConstants {
    #[inline(always)]
    pub fn new<U: UnitFormat>(gemv: &GemvParameters) -> Self {
        let lane = arch::lane();
        let (group, quarter) = (lane / 4, lane % 4);
        let (mut from, mut has) = ([0; MOST_COPIES as usize], 0);
        un!(N in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] {
            from[N] = source::<U>(gemv, N as u32);
            if is_there::<U>(gemv, N as u32, (TILE_ROWS, U::CHUNK)) {
                has |= 1 << N;
            }
        });
        // Row `group` + 8 has the same remainder modulo 16.
        let unit = group * U::ROW + begin(gemv, group) % 16;
        let is_between = unit / 2 % 2;
        let words = (unit & !3) + quarter * 4;
        Self {
            from,
            has,
            words,
            beside: words + is_between * U::FURTHER,
            bits: 16 + is_between * 16,
            scale: unit + quarter / 2 * U::BYTES,
            // Rows have an even number of bytes, so the added bit is always 0. The assembler does not know
            // that and keeps the word in a register; a constant it would load again for each use.
            upper: UPPER | gemv.row_bytes as u32 & 1,
            of_first: if group < DIGITS { u32::MAX } else { 0 },
        }
    }
}

/// Returns row and offset of copy `number` of the lane: neighbouring lanes copy neighbouring bytes.
#[inline(always)]
fn piece<U: UnitFormat>(number: u32) -> (u32, u32) {
    let number = number * 32 + arch::lane();
    (number / U::COPIES, number % U::COPIES * 16)
}

/// Returns the source of copy `number` of the lane, relative to the first row's start.
#[inline(always)]
pub fn source<U: UnitFormat>(gemv: &GemvParameters, number: u32) -> u32 {
    let (row, at) = piece::<U>(number);
    (begin(gemv, row) & !15) + at
}

/// Returns the start of row `row` of a tile, relative to the first row's start rounded down to a multiple of
/// 16.
#[inline(always)]
fn begin(gemv: &GemvParameters, row: u32) -> u32 {
    let first = gemv.weights as u32 % 16;
    first.wrapping_add(row.wrapping_mul(gemv.row_bytes as u32))
}

/// True if a tile of `rows` rows has copy `number` in a chunk of `units` units; without a branch.
#[inline(always)]
pub fn is_there<U: UnitFormat>(
    gemv: &GemvParameters,
    number: u32,
    (rows, units): (u32, u32),
) -> bool {
    let (row, at) = piece::<U>(number);
    (row < TILE_ROWS) & (row < rows) & (at < begin(gemv, row) % 16 + units * U::BYTES)
}
