//! Products of rows of 4 or 8 bits in memory of the GPU, by the tensor cores: the vector becomes
//! [digits of 8 bits](crate::planes), so that weights are multiplied as they are stored.
//!
//! A block takes tiles of 16 rows, several at a time. Its warps take turns at their chunks of columns, which pass through
//! stages of shared memory by asynchronous copies.
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch::{Numbers, funnel, largest_of_warp, of_half, sum_of_warp};
use crate::planes::{DIGITS, Powers};
use crate::tile::mma::mma_bytes;
use crate::tile::{Shared, commit, fma, opaque, un, wait_for_copies};
use crate::{Gemv, VECTOR_ELEMENTS};
use nvme_formats::{Stored, UNIT};
use nvme_gpu_kernel::arch;
use nvme_gpu_kernel::rows::BLOCK_WARPS;

/// Rows of a tile.
pub const TILE_ROWS: u32 = 16;
/// Stages that a warp's weights pass through in turns.
const STAGES: u32 = 2;
/// Bytes of a warp's stages.
const WARP_BYTES: u32 = STAGES * TILE_ROWS * Q8_0::ROW;
/// Where the parts of a block's shared memory begin behind those: digits, powers and sums of units, sums of warps.
const OF_DIGITS: u32 = BLOCK_WARPS * WARP_BYTES;
const UNITS: u32 = VECTOR_ELEMENTS / UNIT;
const UNIT_DIGITS: u32 = UNIT * DIGITS;
const OF_POWERS: u32 = OF_DIGITS + UNITS * UNIT_DIGITS;
const OF_SUMS: u32 = OF_POWERS + UNITS * 8;
const OF_RESULTS: u32 = OF_SUMS + UNITS * 4;
const MOST_ROWS: u32 = TILE_ROWS * Gemv::MOST_TILES;
const _: () = assert!(OF_RESULTS + BLOCK_WARPS * MOST_ROWS * 4 == Gemv::QUANTISED_SHARED);

/// 1.5 * 2^23 as a number, and as what sums of integers begin with: their bits are numbers that are larger by it.
const OF_SUM: u32 = 0x4B40_0000;
const OF_SUM_NUMBER: f32 = f32::from_bits(OF_SUM);
/// The upper halves of bytes.
const UPPER: u32 = 0xF0F0_F0F0;

/// How a format's units of 32 weights are stored and multiplied.
trait Units {
    /// Bytes of a unit: two of them are a multiple of 4.
    const BYTES: u32;
    /// Units of a chunk.
    const CHUNK: u32 = 8;
    /// Where the numbers of a unit begin.
    const BEGIN: u32;
    /// Powers of two by which the weights of a fragment are larger than those that are meant.
    const LESS: u32;
    /// Whether a unit has a least weight beside its scale.
    const HAS_LEAST: bool;
    /// Copies of 16 bytes of a row's part of a chunk at any even place.
    const COPIES: u32 = (14 + Self::CHUNK * Self::BYTES).div_ceil(16);
    /// Bytes of a row's part of a stage: an odd multiple of 16, so that rows begin in different banks.
    const ROW: u32 = (Self::COPIES | 1) * 16;

    /// What a lane has of a unit's weights, four bytes of each half; its words begin at `words`, `bits` before its bytes.
    fn weights(words: Shared, bits: u32, upper: u32) -> [u32; 2];
}

/// Four bytes, `bits` behind the begin of a word.
#[inline(always)]
fn bytes(word: Shared, bits: u32) -> u32 {
    funnel(word.load().to_bits(), word.at(4).load().to_bits(), bits)
}

struct Q8_0;

impl Units for Q8_0 {
    const BYTES: u32 = 34;
    const BEGIN: u32 = 2;
    const LESS: u32 = 0;
    const HAS_LEAST: bool = false;

    #[inline(always)]
    fn weights(words: Shared, bits: u32, _: u32) -> [u32; 2] {
        [bytes(words, bits), bytes(words.at(16), bits)]
    }
}

/// Weights of 4 bits, the lower and the upper ones of four bytes, less 8, in the upper bits of each byte.
#[inline(always)]
fn nibbles(words: Shared, bits: u32, upper: u32) -> [u32; 2] {
    let both = bytes(words, bits);
    [both << 4, both].map(|both| both & upper ^ 0x8080_8080)
}

struct Q4_0;

impl Units for Q4_0 {
    const BYTES: u32 = 18;
    const BEGIN: u32 = 2;
    const LESS: u32 = 4;
    const HAS_LEAST: bool = false;

    #[inline(always)]
    fn weights(words: Shared, bits: u32, upper: u32) -> [u32; 2] {
        nibbles(words, bits, upper)
    }
}

struct Q4_1;

impl Units for Q4_1 {
    const BYTES: u32 = 20;
    const BEGIN: u32 = 4;
    const LESS: u32 = 4;
    const HAS_LEAST: bool = true;

    #[inline(always)]
    fn weights(words: Shared, bits: u32, upper: u32) -> [u32; 2] {
        nibbles(words, bits, upper)
    }
}

const fn check<U: Units>() {
    assert!(STAGES * TILE_ROWS * U::ROW <= WARP_BYTES && UNITS.is_multiple_of(U::CHUNK));
    assert!((2 * U::BYTES).is_multiple_of(4) && U::COPIES <= 20);
}
const _: () = (check::<Q8_0>(), check::<Q4_0>(), check::<Q4_1>()).0;

/// The products of rows of `gemv` from tile `first` on and vector `token`: [`Gemv::block_tiles`] tiles. Every thread of the
/// block calls it.
///
/// # Safety
/// What [`Gemv`] names is there, and it [is quantised](Gemv::is_quantised); the block has [`Gemv::QUANTISED_SHARED`] bytes.
#[inline(always)]
pub unsafe fn tiles(gemv: &Gemv, token: u64, first: u32) {
    // SAFETY: the caller's.
    unsafe {
        match Stored::of_number(gemv.stored) {
            Some(Stored::Q8_0) => Block::<Q8_0>::new(gemv, token, first).run(),
            Some(Stored::Q4_0) => Block::<Q4_0>::new(gemv, token, first).run(),
            Some(Stored::Q4_1) => Block::<Q4_1>::new(gemv, token, first).run(),
            _ => (),
        }
    }
}

/// Where a warp is among the chunks of a pass, which is as many columns as there are digits of at a time: tile after tile,
/// the warps take turns.
#[derive(Clone, Copy)]
struct Turn {
    /// The first unit of the pass, or past the last one.
    unit: u32,
    /// Chunks of a row in the pass.
    chunks: u32,
    tile: u32,
    chunk: u32,
}

struct Block<'g, U> {
    gemv: &'g Gemv,
    token: u64,
    first_row: u32,
    tiles: u32,
    units: u32,
    shared: Shared,
    /// [`UPPER`], in a register.
    upper: u32,
    of_format: core::marker::PhantomData<U>,
}

impl<'g, U: Units> Block<'g, U> {
    /// # Safety
    /// As [`tiles`].
    #[inline(always)]
    unsafe fn new(gemv: &'g Gemv, token: u64, first: u32) -> Self {
        let left = gemv.row_tiles() - first;
        let most = gemv.block_tiles();
        Self {
            gemv,
            token,
            first_row: first * TILE_ROWS,
            tiles: if left < most { left } else { most },
            units: gemv.columns / UNIT,
            // SAFETY: the caller's.
            shared: unsafe { Shared::dynamic() },
            upper: opaque(UPPER),
            of_format: core::marker::PhantomData,
        }
    }

    /// # Safety
    /// As [`tiles`].
    #[inline(always)]
    unsafe fn run(&self) {
        let warp = arch::thread() / 32;
        let mut result = warp * MOST_ROWS + arch::lane();
        while result < (warp + 1) * MOST_ROWS {
            self.result(result).store(0.0);
            result += 32;
        }
        let mut turn = self.turn(0);
        self.copy(turn, 0);
        let mut next = self.next(turn);
        self.copy(next, 1);
        let (mut stage, mut unit) = (0, 0);
        while unit < self.units {
            arch::sync_block();
            // SAFETY: the caller's.
            unsafe { self.fill(unit) };
            arch::sync_block();
            let mut sums = [0.0; 2];
            while turn.unit == unit {
                wait_for_copies::<{ STAGES - 1 }>();
                // What all lanes have copied is there.
                arch::sync_warp(arch::FULL);
                sums = self.multiply(turn, stage, sums);
                if next.tile != turn.tile || next.unit != unit {
                    self.keep(turn.tile, sums);
                    sums = [0.0; 2];
                }
                // All lanes have used the stage.
                arch::sync_warp(arch::FULL);
                turn = next;
                next = self.next(next);
                self.copy(next, stage);
                stage ^= 1;
            }
            unit += UNITS;
        }
        arch::sync_block();
        self.store();
        arch::sync_block();
    }

    /// The first turn of the warp in the pass that begins with unit `unit`, or in a later one.
    #[inline(always)]
    fn turn(&self, unit: u32) -> Turn {
        let mut turn = Turn {
            unit,
            chunks: 0,
            tile: 0,
            chunk: 0,
        };
        while turn.unit < self.units {
            let left = self.units - turn.unit;
            turn.chunks = (if left < UNITS { left } else { UNITS }).div_ceil(U::CHUNK);
            (turn.tile, turn.chunk) = (0, arch::thread() / 32);
            if self.settle(&mut turn) {
                break;
            }
            turn.unit += UNITS;
        }
        turn
    }

    /// The turn after `turn`.
    #[inline(always)]
    fn next(&self, mut turn: Turn) -> Turn {
        turn.chunk += BLOCK_WARPS;
        if turn.unit >= self.units || self.settle(&mut turn) {
            return turn;
        }
        self.turn(turn.unit + UNITS)
    }

    /// Goes to the tile in which the chunk is; whether there is one.
    #[inline(always)]
    fn settle(&self, turn: &mut Turn) -> bool {
        while turn.chunk >= turn.chunks {
            turn.chunk -= turn.chunks;
            turn.tile += 1;
        }
        turn.tile < self.tiles
    }

    /// The address of row `row` of the tile, or of the last row, from the turn's chunk on.
    #[inline(always)]
    fn byte(&self, turn: Turn, row: u32) -> u64 {
        let (row, last) = (
            self.first_row + turn.tile * TILE_ROWS + row,
            self.gemv.rows - 1,
        );
        let row = if row < last { row } else { last };
        let unit = turn.unit + turn.chunk * U::CHUNK;
        self.gemv.weights + u64::from(row) * self.gemv.row_bytes + u64::from(unit * U::BYTES)
    }

    /// Units of the turn's chunk.
    #[inline(always)]
    fn chunk_units(&self, turn: Turn) -> u32 {
        let left = self.units - (turn.unit + turn.chunk * U::CHUNK);
        if left < U::CHUNK { left } else { U::CHUNK }
    }

    #[inline(always)]
    fn stage(&self, stage: u32) -> Shared {
        let warp = arch::thread() / 32;
        self.shared
            .at(warp * WARP_BYTES + stage * TILE_ROWS * U::ROW)
    }

    #[inline(always)]
    fn result(&self, index: u32) -> Shared {
        self.shared.at(OF_RESULTS + index * 4)
    }

    /// Begins to copy the turn's chunk of each row to `stage`, if there is one: lanes side by side have bytes side by side.
    #[inline(always)]
    fn copy(&self, turn: Turn, stage: u32) {
        if turn.unit < self.units {
            let bytes = self.chunk_units(turn) * U::BYTES;
            un!(N in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] {
                const FIRST: u32 = N as u32 * 32;
                if FIRST < TILE_ROWS * U::COPIES {
                    let number = FIRST + arch::lane();
                    let (row, at) = (number / U::COPIES, number % U::COPIES * 16);
                    let begin = self.byte(turn, row);
                    let is_there = row < TILE_ROWS && at < begin as u32 % 16 + bytes;
                    let to = self.stage(stage).at(row * U::ROW + at);
                    // SAFETY: of the row, and up to 15 bytes around it.
                    unsafe { to.copy16_if((begin & !15) + u64::from(at), is_there) };
                }
            });
        }
        commit();
    }

    /// Makes digits of the pass's part of the vector: a warp takes a unit at a time.
    ///
    /// # Safety
    /// As [`tiles`].
    #[inline(always)]
    unsafe fn fill(&self, first: u32) {
        let left = self.units - first;
        let units = if left < UNITS { left } else { UNITS };
        let x = self.token * u64::from(self.gemv.columns) + u64::from(first * UNIT + arch::lane());
        // SAFETY: the caller's.
        let numbers = unsafe { Numbers::at(self.gemv.x) };
        let unit = |number: usize| number as u32 * BLOCK_WARPS + arch::thread() / 32;
        let mut some = [0.0; (UNITS / BLOCK_WARPS) as usize];
        // All loads are under way together.
        un!(N in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15] {
            let of = if unit(N) < units { unit(N) } else { units - 1 };
            some[N] = numbers.load(x + u64::from(of * UNIT));
        });
        un!(N in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15] {
            if unit(N) < units {
                self.fill_unit(unit(N), some[N]);
            }
        });
    }

    /// Makes digits of a unit, of which the lane has `number`.
    #[inline(always)]
    fn fill_unit(&self, unit: u32, number: f32) {
        let lane = arch::lane();
        let largest = largest_of_warp(number.to_bits() & 0x7FFF_FFFF);
        let powers = Powers::of(largest, U::LESS);
        let digits = powers.digits(number);
        // Of a digit, lane `quarter` of four multiplies numbers 4 * quarter to 4 * quarter + 3, and those 16 further.
        let place = lane % 16 / 4 * 8 + lane / 16 * 4 + lane % 4;
        let to = self.shared.at(OF_DIGITS + unit * UNIT_DIGITS + place);
        to.store_byte(digits);
        to.at(32).store_byte(digits >> 8);
        to.at(64).store_byte(digits >> 16);
        to.at(96).store_byte(digits >> 24);
        let sum = if U::HAS_LEAST {
            sum_of_warp(number)
        } else {
            0.0
        };
        if lane < 2 {
            // For the lower two digits, and for the upper ones.
            let power = powers.down * if lane == 0 { 1.0 } else { 65536.0 };
            self.shared.at(OF_POWERS + unit * 8 + lane * 4).store(power);
            if U::HAS_LEAST {
                self.shared.at(OF_SUMS + unit * 4).store(sum);
            }
        }
    }

    /// Adds to the lane's sums of rows `lane / 4` and `lane / 4 + 8` of the tile what the turn's chunk gives: of the first
    /// two digits lane 0 of four, of the others lane 1.
    #[inline(always)]
    fn multiply(&self, turn: Turn, stage: u32, sums: [f32; 2]) -> [f32; 2] {
        let (group, quarter) = (arch::lane() / 4, arch::lane() % 4);
        let unit = turn.chunk * U::CHUNK;
        let digit = group % DIGITS * 32 + quarter * 8;
        let chunk = Chunk::<U> {
            rows: [group, group + 8].map(|row| {
                let shift = self.byte(turn, row) as u32 % 16;
                Row::new::<U>(self.stage(stage).at(row * U::ROW + shift))
            }),
            digits: self.shared.at(OF_DIGITS + unit * UNIT_DIGITS + digit),
            powers: self.shared.at(OF_POWERS + unit * 8 + quarter % 2 * 4),
            least: self.shared.at(OF_SUMS + unit * 4),
            upper: self.upper,
            of_format: core::marker::PhantomData,
        };
        let units = self.chunk_units(turn);
        let mut sums = sums;
        if units == U::CHUNK {
            un!(N in [0, 1, 2, 3, 4, 5, 6, 7] {
                sums = chunk.unit(N as u32, sums);
            });
            return sums;
        }
        let mut at = 0;
        while at + 2 <= units {
            sums = chunk.unit(at, sums);
            sums = chunk.unit(at + 1, sums);
            at += 2;
        }
        if at < units {
            sums = chunk.unit(at, sums);
        }
        sums
    }

    /// Adds the warp's sums of a tile to what it has of that.
    #[inline(always)]
    fn keep(&self, tile: u32, sums: [f32; 2]) {
        let (group, quarter) = (arch::lane() / 4, arch::lane() % 4);
        // Lanes 2 and 3 of four have what 0 and 1 have.
        let sums =
            sums.map(|sum| sum + f32::from_bits(arch::butterfly(arch::FULL, sum.to_bits(), 1)));
        if quarter == 0 {
            let warp = arch::thread() / 32;
            let first = self.result(warp * MOST_ROWS + tile * TILE_ROWS + group);
            first.store(first.load() + sums[0]);
            let second = first.at(32);
            second.store(second.load() + sums[1]);
        }
    }

    /// Adds the sums of all warps and stores them.
    #[inline(always)]
    fn store(&self) {
        let gemv = self.gemv;
        let row = self.first_row + arch::thread();
        if arch::thread() >= self.tiles * TILE_ROWS || row >= gemv.rows {
            return;
        }
        let (mut sum, mut warp) = (0.0, 0);
        while warp < BLOCK_WARPS {
            sum += self.result(warp * MOST_ROWS + arch::thread()).load();
            warp += 1;
        }
        // SAFETY: vouched for in `tiles`.
        let y = unsafe { Numbers::at(gemv.y) };
        let to = self.token * u64::from(gemv.stride) + u64::from(row);
        let before = if gemv.adds == 0 { 0.0 } else { y.load(to) };
        y.store(to, before + sum);
    }
}

/// Where the lane's bytes of a row's units are: two units are whole words, so that one begins in its word where the one
/// before the last does.
#[derive(Clone, Copy)]
struct Row {
    begin: Shared,
    words: [Shared; 2],
    bits: [u32; 2],
}

impl Row {
    #[inline(always)]
    fn new<U: Units>(begin: Shared) -> Self {
        let place = begin.at(U::BEGIN + arch::lane() % 4 * 4);
        let places = [place, place.at(U::BYTES)];
        Self {
            begin,
            words: places.map(Shared::floor4),
            bits: places.map(|place| place.address() % 4 * 8),
        }
    }
}

/// A chunk of a tile as the lane has it.
struct Chunk<U> {
    rows: [Row; 2],
    digits: Shared,
    powers: Shared,
    least: Shared,
    upper: u32,
    of_format: core::marker::PhantomData<U>,
}

impl<U: Units> Chunk<U> {
    /// The sums with what unit `at` gives.
    #[inline(always)]
    fn unit(&self, at: u32, sums: [f32; 2]) -> [f32; 2] {
        let odd = (at % 2) as usize;
        let pair = (at - at % 2) * U::BYTES;
        let [low, high] = self
            .rows
            .map(|row| U::weights(row.words[odd].at(pair), row.bits[odd], self.upper));
        let digits = self.digits.at(at * UNIT_DIGITS).words2();
        let products = mma_bytes([low[0], high[0], low[1], high[1]], digits, [OF_SUM; 4]);
        let [a, b, c, d] = products.map(|sum| f32::from_bits(sum) - OF_SUM_NUMBER);
        let units = self.rows.map(|row| row.begin.at(at * U::BYTES));
        let scale = units.map(|unit| of_half(unit.half()));
        let power = self.powers.at(at * 8).load();
        let mut sums = [
            fma(scale[0] * power, fma(b, 256.0, a), sums[0]),
            fma(scale[1] * power, fma(d, 256.0, c), sums[1]),
        ];
        if U::HAS_LEAST {
            // What the fragments lack: 8 of each weight, and the least.
            let sum = self.least.at(at * 4).load();
            let sum = if arch::lane() % 4 == 0 { sum } else { 0.0 };
            let least = units.map(|unit| of_half(unit.at(2).half()));
            sums[0] = fma(fma(scale[0], 8.0, least[0]), sum, sums[0]);
            sums[1] = fma(fma(scale[1], 8.0, least[1]), sum, sums[1]);
        }
        sums
    }
}
