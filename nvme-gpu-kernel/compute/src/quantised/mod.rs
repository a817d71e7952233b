//! Products of rows of 4-bit or 8-bit weights in GPU memory, by the tensor cores: the vector is converted to
//! [int8 limbs](crate::planes), so that weights are multiplied in their stored form.
//!
//! A block computes tiles of 16 rows, several together. Its warps divide the chunks of columns among them;
//! the chunks pass through stages of shared memory by asynchronous copies. A warp computes one chunk of all
//! tiles before the next chunk: it converts that part of the vector for itself, and waits for no other warp
//! before the end.
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

pub mod batched;
mod units;

use crate::GemvParameters;
use crate::arch::{FloatArray, of_half};
use crate::planes::{DIGITS, UnitPowers, transposed};
use crate::tile::mma::mma_bytes;
use crate::tile::{BlockShared, commit, fma, un, wait_for_copies};
use nvme_formats::{StoredFormat, UNIT};
use nvme_gpu_kernel::arch;
use nvme_gpu_kernel::rows::BLOCK_WARPS;
use units::{LaneConstants, MOST_COPIES, Mxfp4, Q4_0, Q4_1, Q8_0, UnitFormat, is_there};

/// Rows of a tile.
pub const TILE_ROWS: u32 = 16;
/// Stages that a warp's weights pass through.
const STAGES: u32 = 2;
/// Limit of the units of a chunk.
const UNITS: u32 = 16;
const UNIT_DIGITS: u32 = UNIT * DIGITS;
/// Offsets of the parts of a warp's shared memory, after its stages: digits, powers and sums of a chunk's
/// units, and the warp's partial results of each row.
const OF_DIGITS: u32 = STAGES * TILE_ROWS * Q8_0::ROW;
const OF_POWERS: u32 = OF_DIGITS + UNITS * UNIT_DIGITS;
const OF_SUMS: u32 = OF_POWERS + UNITS * 8;
const OF_RESULTS: u32 = OF_SUMS + UNITS * 4;
const MOST_ROWS: u32 = TILE_ROWS * GemvParameters::MOST_TILES;
const WARP_BYTES: u32 = OF_RESULTS + MOST_ROWS * 4;
const _: () = assert!(BLOCK_WARPS * WARP_BYTES == GemvParameters::QUANTISED_SHARED);
/// Limit of a block's shared memory on GPUs whose multiprocessors have 100 KiB.
const _: () = assert!(GemvParameters::QUANTISED_SHARED <= 99 << 10);

/// 1.5 * 2^23 as a number, and the start value of integer sums: the bits of such a sum are a float that is
/// larger by this number, so no conversion is needed.
const OF_SUM: u32 = 0x4B40_0000;
const OF_SUM_NUMBER: f32 = f32::from_bits(OF_SUM);

const fn check<U: UnitFormat>() {
    assert!(STAGES * TILE_ROWS * U::ROW <= OF_DIGITS && U::CHUNK <= UNITS);
    assert!(U::CHUNK.is_multiple_of(2) && (U::CHUNK * U::BYTES).is_multiple_of(16));
    assert!(TILE_ROWS * U::COPIES <= 32 * MOST_COPIES);
}
const _: () = (
    check::<Q8_0>(),
    check::<Q4_0>(),
    check::<Q4_1>(),
    check::<Mxfp4>(),
)
    .0;

/// Computes the products of rows of `gemv`, [`GemvParameters::block_tiles`] tiles from tile `first` on, with vector
/// `token`. Every thread of the block calls it.
///
/// # Safety
/// All memory that [`GemvParameters`] names is allocated and stays so while the kernel runs, and it [is
/// quantised](GemvParameters::is_quantised); the block has [`GemvParameters::QUANTISED_SHARED`] bytes.
#[inline(always)]
pub unsafe fn tiles(gemv: &GemvParameters, token: u64, first: u32) {
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    unsafe {
        match StoredFormat::of_number(gemv.stored) {
            Some(StoredFormat::Q8_0) => QuantisedBlock::<Q8_0>::new(gemv, token, first).run(),
            Some(StoredFormat::Q4_0) => QuantisedBlock::<Q4_0>::new(gemv, token, first).run(),
            Some(StoredFormat::Q4_1) => QuantisedBlock::<Q4_1>::new(gemv, token, first).run(),
            Some(StoredFormat::Mxfp4) => QuantisedBlock::<Mxfp4>::new(gemv, token, first).run(),
            _ => (),
        }
    }
}

/// A step of a warp: a chunk of the columns, and one of the block's tiles.
#[derive(Clone, Copy)]
struct WarpStep {
    chunk: u32,
    tile: u32,
}

struct QuantisedBlock<'g, U> {
    gemv: &'g GemvParameters,
    token: u64,
    first_row: u32,
    tiles: u32,
    units: u32,
    shared: BlockShared,
    lane: LaneConstants,
    of_format: core::marker::PhantomData<U>,
}

impl<'g, U: UnitFormat> QuantisedBlock<'g, U> {
    /// Prepares the block.
    ///
    /// # Safety
    /// As [`tiles`].
    #[inline(always)]
    unsafe fn new(gemv: &'g GemvParameters, token: u64, first: u32) -> Self {
        let left = gemv.row_tiles() - first;
        let most = gemv.block_tiles();
        Self {
            gemv,
            token,
            first_row: first * TILE_ROWS,
            tiles: if left < most { left } else { most },
            units: gemv.columns / UNIT,
            // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
            shared: unsafe { BlockShared::dynamic() },
            lane: LaneConstants::new::<U>(gemv),
            of_format: core::marker::PhantomData,
        }
    }

    /// Computes the block's products.
    ///
    /// # Safety
    /// As [`tiles`].
    #[inline(always)]
    unsafe fn run(&self) {
        let warp = arch::thread() / 32;
        let mut row = arch::lane();
        while row < MOST_ROWS {
            self.result(warp, row).store(0.0);
            row += 32;
        }
        let (mut turn, mut left) = self.turns();
        let mut ahead = turn;
        let mut stage = 0;
        while stage < STAGES {
            self.copy(ahead, stage, left > stage);
            ahead = self.after(ahead);
            stage += 1;
        }
        stage = 0;
        let mut of_chunk = u32::MAX;
        while left != 0 {
            if turn.chunk != of_chunk {
                of_chunk = turn.chunk;
                // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
                unsafe { self.fill(of_chunk) };
            }
            wait_for_copies::<{ STAGES - 1 }>();
            // A barrier: copies and digits made by other lanes are visible after it.
            arch::sync_warp(arch::FULL);
            self.keep(turn.tile, self.multiply(turn, stage));
            // A barrier: every lane has finished with the stage and the digits before the next copy
            // overwrites them.
            arch::sync_warp(arch::FULL);
            self.copy(ahead, stage, left > STAGES);
            (turn, ahead) = (self.after(turn), self.after(ahead));
            stage ^= 1;
            left -= 1;
        }
        arch::sync_block();
        self.store();
        arch::sync_block();
    }

    /// Returns the warp's first turn, and the number of its turns.
    ///
    /// Of each eight chunks a warp has one, for all tiles, so that the warps load neighbouring bytes at about
    /// the same time. The remaining chunks are divided evenly.
    #[inline(always)]
    fn turns(&self) -> (WarpStep, u32) {
        let whole = self.whole_chunks();
        let (first, end) = self.share_of_rest();
        let turn = match whole {
            0 => self.turn_of_rest(first),
            _ => WarpStep {
                chunk: arch::thread() / 32,
                tile: 0,
            },
        };
        (turn, whole / BLOCK_WARPS * self.tiles + end - first)
    }

    /// Returns the number of chunks that divide evenly among the warps.
    #[inline(always)]
    fn whole_chunks(&self) -> u32 {
        self.units / U::CHUNK / BLOCK_WARPS * BLOCK_WARPS
    }

    /// Returns the warp's share of the turns after those: the tiles of the first remaining chunk, then those
    /// of the next one, and so on.
    #[inline(always)]
    fn share_of_rest(&self) -> (u32, u32) {
        let rest = (self.units.div_ceil(U::CHUNK) - self.whole_chunks()) * self.tiles;
        let warp = arch::thread() / 32;
        (rest * warp / BLOCK_WARPS, rest * (warp + 1) / BLOCK_WARPS)
    }

    /// Returns turn `number` of those.
    #[inline(always)]
    fn turn_of_rest(&self, number: u32) -> WarpStep {
        let chunk = number.checked_div(self.tiles).unwrap_or(0);
        WarpStep {
            chunk: self.whole_chunks() + chunk,
            tile: number - chunk * self.tiles,
        }
    }

    #[inline(always)]
    fn after(&self, turn: WarpStep) -> WarpStep {
        let WarpStep { chunk, tile } = turn;
        let whole = self.whole_chunks();
        if tile + 1 < self.tiles {
            WarpStep {
                chunk,
                tile: tile + 1,
            }
        } else if chunk >= whole {
            WarpStep {
                chunk: chunk + 1,
                tile: 0,
            }
        } else if chunk + BLOCK_WARPS < whole {
            WarpStep {
                chunk: chunk + BLOCK_WARPS,
                tile: 0,
            }
        } else {
            self.turn_of_rest(self.share_of_rest().0)
        }
    }

    /// Returns the address of the chunk in the tile's first row, rounded down to a multiple of 16.
    #[inline(always)]
    fn begin(&self, turn: WarpStep) -> u64 {
        let row = self.first_row + turn.tile * TILE_ROWS;
        let unit = turn.chunk * U::CHUNK;
        (self.gemv.weights & !15)
            + u64::from(row) * self.gemv.row_bytes
            + u64::from(unit * U::BYTES)
    }

    #[inline(always)]
    fn chunk_units(&self, chunk: u32) -> u32 {
        let left = self.units - chunk * U::CHUNK;
        if left < U::CHUNK { left } else { U::CHUNK }
    }

    /// Returns the warp's shared memory from byte `at` on.
    #[inline(always)]
    fn own(&self, at: u32) -> BlockShared {
        self.shared.at(arch::thread() / 32 * WARP_BYTES + at)
    }

    #[inline(always)]
    fn stage(&self, stage: u32) -> BlockShared {
        self.own(stage * TILE_ROWS * U::ROW)
    }

    #[inline(always)]
    fn result(&self, warp: u32, row: u32) -> BlockShared {
        self.shared.at(warp * WARP_BYTES + OF_RESULTS + row * 4)
    }

    /// Starts to copy the turn's chunk of each row to `stage`, if `there` is true.
    #[inline(always)]
    fn copy(&self, turn: WarpStep, stage: u32, there: bool) {
        if there {
            let from = self.begin(turn);
            let to = self.stage(stage).at(arch::lane() * 16);
            let has = self.has(turn);
            un!(N in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] {
                if N as u32 * 32 < TILE_ROWS * U::COPIES {
                    let from = from + u64::from(self.lane.from[N]);
                    // SAFETY: the host vouches for the rows and for up to 15 bytes around them; `has`
                    // excludes copies past the chunk.
                    unsafe { to.at(N as u32 * 512).copy16_if(from, has & 1 << N != 0) };
                }
            });
        }
        commit();
    }

    /// Returns a bit for each copy that the lane makes of the turn's chunk.
    #[inline(always)]
    fn has(&self, turn: WarpStep) -> u32 {
        let units = self.chunk_units(turn.chunk);
        let rows = self.gemv.rows - (self.first_row + turn.tile * TILE_ROWS);
        if units == U::CHUNK && rows >= TILE_ROWS {
            return self.lane.has;
        }
        let (mut has, mut number) = (0, 0);
        while number < MOST_COPIES {
            if is_there::<U>(self.gemv, number, (rows, units)) {
                has |= 1 << number;
            }
            number += 1;
        }
        has
    }

    /// Converts the chunk's part of the vector to digits: four units in one step, four numbers a lane.
    ///
    /// # Safety
    /// As [`tiles`].
    #[inline(always)]
    unsafe fn fill(&self, chunk: u32) {
        let units = self.chunk_units(chunk);
        let first = self.token * u64::from(self.gemv.columns) + u64::from(chunk * U::CHUNK * UNIT);
        // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
        let numbers = unsafe { FloatArray::at(self.gemv.x) };
        let unit = |turn: usize| turn as u32 * 4 + arch::lane() / 8;
        let mut some = [[0.0; 4]; (UNITS / 4) as usize];
        // All loads are issued before the first use, so that their latencies overlap.
        un!(N in [0, 1, 2, 3] {
            if (N as u32) * 4 < U::CHUNK {
                let of = if unit(N) < units { unit(N) } else { units - 1 };
                let at = first + u64::from(of * UNIT + arch::lane() % 8 * 4);
                some[N] = [0, 1, 2, 3].map(|number| numbers.load(at + number));
            }
        });
        un!(N in [0, 1, 2, 3] {
            if (N as u32) * 4 < U::CHUNK {
                self.fill_unit(unit(N), units, some[N]);
            }
        });
    }

    /// Converts unit `unit` to digits, if it is one of `units`: each of eight lanes has four `numbers` of it.
    #[inline(always)]
    fn fill_unit(&self, unit: u32, units: u32, numbers: [f32; 4]) {
        let [digits, powers, sums] = [
            OF_DIGITS + unit * UNIT_DIGITS,
            OF_POWERS + unit * 8,
            OF_SUMS + unit * 4,
        ];
        let to = [digits, powers, sums].map(|at| self.own(at));
        store_unit::<U>(numbers, to, unit < units);
    }

    /// Returns the lane's sums of rows `lane / 4` and `lane / 4 + 8` of the turn's tile and chunk. Of four
    /// lanes, 0 and 1 have the first units of pairs, two digits each; 2 and 3 have the second units.
    #[inline(always)]
    fn multiply(&self, turn: WarpStep, stage: u32) -> [f32; 2] {
        let lane = arch::lane();
        let chunk = TileChunk::<U> {
            lane: &self.lane,
            stage: self.stage(stage),
            digits: self.own(OF_DIGITS + lane * 8),
            powers: self.own(OF_POWERS + lane % 4 * 4),
            least: self.own(OF_SUMS + lane % 4 / 2 * 4),
            of_format: core::marker::PhantomData,
        };
        let units = self.chunk_units(turn.chunk);
        let mut sums = [0.0; 2];
        if units == U::CHUNK {
            un!(N in [0, 1, 2, 3, 4, 5, 6, 7] {
                if 2 * (N as u32) < U::CHUNK {
                    sums = chunk.pair(N as u32, true, sums);
                }
            });
            return sums;
        }
        let mut pair = 0;
        while 2 * pair < units {
            sums = chunk.pair(pair, 2 * pair + lane % 4 / 2 < units, sums);
            pair += 1;
        }
        sums
    }

    /// Adds the warp's sums of a tile to its partial results.
    #[inline(always)]
    fn keep(&self, tile: u32, sums: [f32; 2]) {
        let (group, quarter) = (arch::lane() / 4, arch::lane() % 4);
        let add =
            |sum: f32, bits| sum + f32::from_bits(arch::butterfly(arch::FULL, sum.to_bits(), bits));
        let sums = sums.map(|sum| add(add(sum, 1), 2));
        if quarter == 0 {
            let first = self.result(arch::thread() / 32, tile * TILE_ROWS + group);
            first.store(first.load() + sums[0]);
            let second = first.at(32);
            second.store(second.load() + sums[1]);
        }
    }

    /// Adds the partial results of all warps and stores the sums.
    #[inline(always)]
    fn store(&self) {
        let gemv = self.gemv;
        let row = self.first_row + arch::thread();
        if arch::thread() >= self.tiles * TILE_ROWS || row >= gemv.rows {
            return;
        }
        let (mut sum, mut warp) = (0.0, 0);
        while warp < BLOCK_WARPS {
            sum += self.result(warp, arch::thread()).load();
            warp += 1;
        }
        // SAFETY: the caller of `tiles` vouched for the vector; row and token are inside it.
        let y = unsafe { FloatArray::at(gemv.y) };
        let to = self.token * u64::from(gemv.stride) + u64::from(row);
        let before = if gemv.adds == 0 { 0.0 } else { y.load(to) };
        y.store(to, before + sum);
    }
}

/// Converts a unit to digits, and stores them with their powers and their sum at `to`, if `there` is true: each of eight
/// lanes has four `numbers` of the unit. Every lane of the warp calls it.
#[inline(always)]
fn store_unit<U: UnitFormat>(
    numbers: [f32; 4],
    [to, powers_to, sum_to]: [BlockShared; 3],
    there: bool,
) {
    let part = arch::lane() % 8;
    let [a, b, c, d] = numbers.map(|number| number.to_bits() & 0x7FFF_FFFF);
    let largest = of_eight(a.max(b).max(c.max(d)), u32::max);
    let powers = UnitPowers::of(largest, U::LESS);
    let digits = transposed(numbers.map(|number| powers.digits(number)));
    let sum = if U::HAS_LEAST {
        let [a, b, c, d] = numbers;
        let add = |a: u32, b: u32| (f32::from_bits(a) + f32::from_bits(b)).to_bits();
        f32::from_bits(of_eight((a + b + (c + d)).to_bits(), add))
    } else {
        0.0
    };
    if !there {
        return;
    }
    // For each digit, lane `quarter` of four multiplies numbers 4 * quarter to 4 * quarter + 3, and the
    // four that are 16 further on; the digits are stored in that order.
    let to = to.at(part % 4 * 8 + part / 4 * 4);
    un!(N in [0, 1, 2, 3] { to.at(N as u32 * UNIT).store_word(digits[N]); });
    if part < 2 {
        // One power for the lower two digits, one for the upper two.
        let power = powers.down * if part == 0 { 1.0 } else { 65536.0 };
        powers_to.at(part * 4).store(power);
        if U::HAS_LEAST {
            sum_to.store(sum);
        }
    }
}

/// Combines a value over eight neighbouring lanes by `join`; each of them gets the result.
#[inline(always)]
fn of_eight(value: u32, join: impl Fn(u32, u32) -> u32) -> u32 {
    let mut value = value;
    un!(N in [0, 1, 2] { value = join(value, arch::butterfly(arch::FULL, value, 1 << N)); });
    value
}

/// A lane's view of a chunk of a tile.
struct TileChunk<'l, U> {
    lane: &'l LaneConstants,
    stage: BlockShared,
    digits: BlockShared,
    powers: BlockShared,
    least: BlockShared,
    of_format: core::marker::PhantomData<U>,
}

impl<U: UnitFormat> TileChunk<'_, U> {
    /// Returns the sums with those of pair `at` added; `there` tells whether the lane's unit of the pair
    /// exists.
    #[inline(always)]
    fn pair(&self, at: u32, there: bool, sums: [f32; 2]) -> [f32; 2] {
        let [low, high] = [0, 8].map(|rows| U::weights(self.lane, self.stage, rows * U::ROW, at));
        let digits = U::ordered(self.digits.at(at * 2 * UNIT_DIGITS).words2());
        // Columns with digits of the other unit are zeroed, so that they contribute nothing.
        let first = digits.map(|word| word & self.lane.of_first);
        let second = digits.map(|word| word & !self.lane.of_first);
        let products = [OF_SUM; 4];
        let products = mma_bytes(
            [low[0][0], high[0][0], low[0][1], high[0][1]],
            first,
            products,
        );
        let products = mma_bytes(
            [low[1][0], high[1][0], low[1][1], high[1][1]],
            second,
            products,
        );
        let [a, b, c, d] = products.map(|sum| f32::from_bits(sum) - OF_SUM_NUMBER);
        let scale_at = self.lane.scale + at * U::PAIR;
        let units = [0, 8].map(|rows| self.stage.at(scale_at + rows * U::ROW));
        let scale = units.map(U::scale);
        let power = self.powers.at(at * 16).load();
        let mut with = [
            fma(scale[0] * power, fma(b, 256.0, a), sums[0]),
            fma(scale[1] * power, fma(d, 256.0, c), sums[1]),
        ];
        if U::HAS_LEAST {
            // The fragments lack an offset: 8 times the scale for each weight, and the minimum. Both are
            // multiplied by the sum of the vector's part.
            let sum = self.least.at(at * 8).load();
            let sum = if arch::lane().is_multiple_of(2) {
                sum
            } else {
                0.0
            };
            let least = units.map(|unit| of_half(unit.at(2).half()));
            with[0] = fma(fma(scale[0], 8.0, least[0]), sum, with[0]);
            with[1] = fma(fma(scale[1], 8.0, least[1]), sum, with[1]);
        }
        if there { with } else { sums }
    }
}
