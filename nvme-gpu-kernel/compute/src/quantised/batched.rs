//! Products of rows with several vectors at once: the weights become fragments once for all of them, and of the eight
//! columns of a multiplication two vectors have four digits each.
//!
//! A block computes eight tiles of 16 rows, one by each warp. Its warps share the digits of a chunk of all vectors. The
//! order of the sums of a product does not depend on the other vectors.
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::units::{LaneConstants, Mxfp4, Q4_0, Q4_1, Q8_0, UnitFormat, is_there, source};
use super::{OF_SUM, OF_SUM_NUMBER, STAGES, TILE_ROWS, UNIT_DIGITS, UNITS, store_unit};
use crate::GemvParameters;
use crate::arch::{FloatArray, of_half};
use crate::tile::mma::mma_bytes;
use crate::tile::{BlockShared, commit, fma, opaque, un, wait_for_copies};
use core::num::NonZeroU32;
use nvme_formats::{StoredFormat, UNIT};
use nvme_gpu_kernel::arch;
use nvme_gpu_kernel::rows::BLOCK_WARPS;

/// Vectors of a batch.
pub const VECTORS: u32 = 8;
/// Rows of a block.
pub const BLOCK_ROWS: u32 = BLOCK_WARPS * TILE_ROWS;
/// Offsets of the parts of the block's shared memory, after the stages of all warps: digits, powers and sums of the units
/// of a chunk, those of all vectors for each unit; and the numbers of the products.
const OF_DIGITS: u32 = BLOCK_WARPS * STAGES * TILE_ROWS * Q8_0::ROW;
const OF_POWERS: u32 = OF_DIGITS + UNITS * VECTORS * UNIT_DIGITS;
const OF_SUMS: u32 = OF_POWERS + UNITS * VECTORS * 8;
const OF_NUMBERS: u32 = OF_SUMS + UNITS * VECTORS * 4;
/// Offset of the shared memory that the caller has for itself, [`OWN_BYTES`] bytes.
pub const OF_OWN: u32 = OF_NUMBERS + VECTORS * 4;
/// Bytes of it.
pub const OWN_BYTES: u32 = 64;
const _: () = assert!(OF_OWN + OWN_BYTES <= GemvParameters::QUANTISED_SHARED);
/// Units that a block converts in one step, by eight lanes each.
const STEP_UNITS: u32 = BLOCK_WARPS * 4;
const _: () = assert!(UNITS * VECTORS == 4 * STEP_UNITS);

/// Products of one matrix with up to [`VECTORS`] vectors.
pub struct ProductBatch {
    /// Number of products, at least 1.
    pub count: u32,
    /// A bit for each product whose result is stored.
    pub stored: u32,
    /// Number of products that share a vector.
    pub shared: NonZeroU32,
}

impl ProductBatch {
    /// Returns where the number of product `index` stands: in `y` it is the number of its vector, in `x` that of a vector
    /// for all products that share one.
    ///
    /// # Safety
    /// As [`BlockShared::dynamic`].
    #[inline(always)]
    pub unsafe fn number_at(index: u32) -> BlockShared {
        // SAFETY: this function's caller vouches for the memory.
        unsafe { BlockShared::dynamic() }.at(OF_NUMBERS + index * 4)
    }
}

/// Computes rows from `first_row` on, [`BLOCK_ROWS`] at most, of the products of `batch`. Every thread of the block calls
/// it, behind a barrier after the numbers of the products were stored.
///
/// # Safety
/// As [`tiles`](super::tiles); `x` and `y` have the vectors of the batch.
#[inline(always)]
pub unsafe fn rows(gemv: &GemvParameters, batch: &ProductBatch, first_row: u32) {
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    unsafe {
        match StoredFormat::of_number(gemv.stored) {
            Some(StoredFormat::Q8_0) => BatchBlock::<Q8_0>::new(gemv, batch, first_row).run(),
            Some(StoredFormat::Q4_0) => BatchBlock::<Q4_0>::new(gemv, batch, first_row).run(),
            Some(StoredFormat::Q4_1) => BatchBlock::<Q4_1>::new(gemv, batch, first_row).run(),
            Some(StoredFormat::Mxfp4) => BatchBlock::<Mxfp4>::new(gemv, batch, first_row).run(),
            _ => (),
        }
    }
}

/// The sums of a lane: for each two vectors those of rows `lane / 4` and `lane / 4 + 8`. Of four lanes, 0 and 1 have two
/// digits each of the first vector, 2 and 3 those of the second one.
type LaneSums = [[f32; 2]; (VECTORS / 2) as usize];

struct BatchBlock<'g, U> {
    gemv: &'g GemvParameters,
    batch: &'g ProductBatch,
    /// First row of the warp's tile, which may be past the last one.
    row: u32,
    units: u32,
    shared: BlockShared,
    lane: LaneConstants,
    of_format: core::marker::PhantomData<U>,
}

impl<'g, U: UnitFormat> BatchBlock<'g, U> {
    /// # Safety
    /// As [`rows`].
    #[inline(always)]
    unsafe fn new(gemv: &'g GemvParameters, batch: &'g ProductBatch, first_row: u32) -> Self {
        Self {
            gemv,
            batch,
            row: first_row + arch::thread() / 32 * TILE_ROWS,
            units: gemv.columns / UNIT,
            // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
            shared: unsafe { BlockShared::dynamic() },
            lane: LaneConstants::new::<U>(gemv),
            of_format: core::marker::PhantomData,
        }
    }

    /// # Safety
    /// As [`rows`].
    #[inline(always)]
    unsafe fn run(&self) {
        let chunks = self.units.div_ceil(U::CHUNK);
        let mut stage = 0;
        while stage < STAGES {
            self.copy(stage, stage, stage < chunks);
            stage += 1;
        }
        let mut sums: LaneSums = [[0.0; 2]; (VECTORS / 2) as usize];
        let (mut chunk, mut stage) = (0, 0);
        while chunk < chunks {
            // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
            unsafe { self.fill(chunk) };
            wait_for_copies::<{ STAGES - 1 }>();
            // A barrier: copies and digits made by other threads are visible after it.
            arch::sync_block();
            sums = self.multiply(chunk, stage, sums);
            // A barrier: every thread has finished with the stages and the digits before they are overwritten.
            arch::sync_block();
            self.copy(chunk + STAGES, stage, chunk + STAGES < chunks);
            stage ^= 1;
            chunk += 1;
        }
        self.store(sums);
    }

    #[inline(always)]
    fn chunk_units(&self, chunk: u32) -> u32 {
        let left = self.units - chunk * U::CHUNK;
        if left < U::CHUNK { left } else { U::CHUNK }
    }

    /// Returns the memory of the warp's stage.
    #[inline(always)]
    fn stage(&self, stage: u32) -> BlockShared {
        let warp = arch::thread() / 32;
        self.shared
            .at((warp * STAGES + stage) * TILE_ROWS * Q8_0::ROW)
    }

    /// Starts to copy the chunk of each of the tile's rows to `stage`, if `there` is true.
    #[inline(always)]
    fn copy(&self, chunk: u32, stage: u32, there: bool) {
        if there && self.row < self.gemv.rows {
            let to = self.stage(stage).at(arch::lane() * 16);
            let has = (self.gemv.rows - self.row, self.chunk_units(chunk));
            // Computed here, once for a chunk: kept between chunks, the sources take ten registers.
            let gemv = GemvParameters {
                row_bytes: opaque(self.gemv.row_bytes as u32).into(),
                ..*self.gemv
            };
            let from = (gemv.weights & !15)
                + u64::from(self.row) * gemv.row_bytes
                + u64::from(chunk * U::CHUNK * U::BYTES);
            un!(N in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] {
                if N as u32 * 32 < TILE_ROWS * U::COPIES {
                    let from = from + u64::from(source::<U>(&gemv, N as u32));
                    let there = is_there::<U>(&gemv, N as u32, has);
                    // SAFETY: the host vouches for the rows and for up to 15 bytes around them; `there` excludes copies past
                    // the chunk.
                    unsafe { to.at(N as u32 * 512).copy16_if(from, there) };
                }
            });
        }
        commit();
    }

    /// Converts the chunk's part of all vectors to digits: four numbers a thread in one step.
    ///
    /// # Safety
    /// As [`rows`].
    #[inline(always)]
    unsafe fn fill(&self, chunk: u32) {
        let units = self.chunk_units(chunk);
        let first = chunk * U::CHUNK * UNIT + arch::lane() % 8 * 4;
        // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
        let numbers = unsafe { FloatArray::at(self.gemv.x) };
        let part = |step: usize| {
            let number = step as u32 * STEP_UNITS + arch::thread() / 8;
            (number / VECTORS, number % VECTORS)
        };
        // Two steps at a time: their loads overlap, and those of all steps would need more registers than there are.
        un!(HALF in [0, 1] {
            let mut some = [[0.0; 4]; 2];
            un!(N in [0, 1] {
                if ((HALF * 2 + N) as u32) * STEP_UNITS < U::CHUNK * VECTORS {
                    let (unit, vector) = part(HALF * 2 + N);
                    // Vectors and units that are not there are others again.
                    let unit = if unit < units { unit } else { units - 1 };
                    let vector = if vector < self.batch.count { vector } else { 0 };
                    // SAFETY: this function's caller vouches for the memory.
                    let number = unsafe { ProductBatch::number_at(vector) }.load().to_bits();
                    let of_vector = u64::from(number / self.batch.shared) * u64::from(self.gemv.columns);
                    let at = of_vector + u64::from(first + unit * UNIT);
                    some[N] = [0, 1, 2, 3].map(|number| numbers.load(at + number));
                }
            });
            un!(N in [0, 1] {
                if ((HALF * 2 + N) as u32) * STEP_UNITS < U::CHUNK * VECTORS {
                    let (unit, vector) = part(HALF * 2 + N);
                    let place = unit * VECTORS + vector;
                    let to = [
                        OF_DIGITS + place * UNIT_DIGITS,
                        OF_POWERS + place * 8,
                        OF_SUMS + place * 4,
                    ];
                    store_unit::<U>(some[N], to.map(|at| self.shared.at(at)), unit < units);
                }
            });
        });
    }

    /// Returns the sums with those of the chunk added.
    #[inline(always)]
    fn multiply(&self, chunk: u32, stage: u32, sums: LaneSums) -> LaneSums {
        let (lane, units) = (arch::lane(), self.chunk_units(chunk));
        let stage = self.stage(stage);
        let digits = self.shared.at(OF_DIGITS + lane * 8);
        let powers = self.shared.at(OF_POWERS + lane % 4 * 4);
        let least = self.shared.at(OF_SUMS + lane % 4 / 2 * 4);
        // Not of the unit of the lane's columns: all lanes multiply by the same unit.
        let scale = self.lane.scale - lane % 4 / 2 * U::BYTES;
        let pairs = self.batch.count.div_ceil(2);
        let mut sums = sums;
        let mut pair = 0;
        while 2 * pair < units {
            let [low, high] = [0, 8].map(|rows| U::weights(&self.lane, stage, rows * U::ROW, pair));
            un!(OF in [0, 1] {
                let unit = 2 * pair + OF as u32;
                if unit < units {
                    let weights = [low[OF][0], high[OF][0], low[OF][1], high[OF][1]];
                    let begin = stage.at(scale + unit * U::BYTES);
                    let begins = [0, 8].map(|rows| begin.at(rows * U::ROW));
                    let scales = begins.map(U::scale);
                    let place = unit * VECTORS;
                    un!(N in [0, 1, 2, 3] {
                        if (N as u32) < pairs {
                            let digits = digits.at(place * UNIT_DIGITS + N as u32 * 2 * UNIT_DIGITS);
                            let products = mma_bytes(weights, U::ordered(digits.words2()), [OF_SUM; 4]);
                            let [a, b, c, d] = products.map(|sum| f32::from_bits(sum) - OF_SUM_NUMBER);
                            let power = powers.at(place * 8 + N as u32 * 16).load();
                            sums[N] = [
                                fma(scales[0] * power, fma(b, 256.0, a), sums[N][0]),
                                fma(scales[1] * power, fma(d, 256.0, c), sums[N][1]),
                            ];
                            if U::HAS_LEAST {
                                // The fragments lack an offset: 8 times the scale for each weight, and the minimum. Both
                                // are multiplied by the sum of the vector's part.
                                let sum = least.at(place * 4 + N as u32 * 8).load();
                                let sum = if lane.is_multiple_of(2) { sum } else { 0.0 };
                                let offset = begins.map(|unit| of_half(unit.at(2).half()));
                                sums[N][0] = fma(fma(scales[0], 8.0, offset[0]), sum, sums[N][0]);
                                sums[N][1] = fma(fma(scales[1], 8.0, offset[1]), sum, sums[N][1]);
                            }
                        }
                    });
                }
            });
            pair += 1;
        }
        sums
    }

    /// Adds the sums of digits, and stores the products.
    #[inline(always)]
    fn store(&self, sums: LaneSums) {
        // SAFETY: the caller of `rows` vouched for the vectors; row and number are inside it.
        let y = unsafe { FloatArray::at(self.gemv.y) };
        let (group, quarter) = (arch::lane() / 4, arch::lane() % 4);
        un!(N in [0, 1, 2, 3] {
            let index = 2 * N as u32 + quarter / 2;
            let both = sums[N].map(|sum| {
                sum + f32::from_bits(arch::butterfly(arch::FULL, sum.to_bits(), 1))
            });
            if index < self.batch.count && self.batch.stored & 1 << index != 0 {
                // SAFETY: the caller of `rows` vouches for the memory.
                let number = unsafe { ProductBatch::number_at(index) }.load().to_bits();
                let of_vector = u64::from(number) * u64::from(self.gemv.rows);
                // Lane 0 of two stores the first row, lane 1 the second one.
                let (row, sum) = if quarter.is_multiple_of(2) {
                    (self.row + group, both[0])
                } else {
                    (self.row + group + 8, both[1])
                };
                if row < self.gemv.rows {
                    y.store(of_vector + u64::from(row), sum);
                }
            }
        });
    }
}
