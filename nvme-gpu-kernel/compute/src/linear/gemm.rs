//! Products of matrices by the tensor cores, tiles of 128 x 128 or 32 x 64 sums a block, operands in three
//! stages of shared memory.
//!
//! `f32` operands are split into an upper and a lower TF32 part each, and the three largest products of the
//! parts are added: about 22 bits of each factor count. An infinite element makes NaN.
// UNSAFETY: copies from addresses that the kernel vouches for.
#![allow(unsafe_code)]

use super::{STAGES, cross_bytes, tile_bytes};
use crate::tile::mma::{mma_bf16, mma_f16, mma_tf32};
use crate::tile::{BlockShared, commit, un, wait_for_copies};
use nvme_gpu_kernel::arch;

/// Elements of `f32`, by three products of TF32.
pub const F32: u32 = 0;
pub const BF16: u32 = 1;
pub const F16: u32 = 2;

/// Consecutive tiles of rows before the next column of tiles: they share operands in the L2 cache.
const GROUP: u32 = 8;

/// A matrix of `rows` rows (or columns of the product) and `terms` terms.
#[derive(Clone, Copy)]
pub struct GemmOperand {
    pub address: u64,
    pub rows: u32,
    pub terms: u32,
    /// Distance in elements: of rows if terms are consecutive, of terms if rows are.
    pub stride: u32,
}

const fn element_bytes(kind: u32) -> u32 {
    if kind == F32 { 4 } else { 2 }
}

/// Returns the number of terms of a tile: 128 bytes of a row, or 32 terms if rows are consecutive.
const fn depth(kind: u32) -> u32 {
    128 / element_bytes(kind)
}

/// The shape of a product's tiles: a warp has 16 `M` rows and 8 `N` columns; a block has two warps down and
/// `ACROSS` across.
///
/// Larger tiles load each operand less often; smaller ones keep more multiprocessors busy when the result has
/// few rows. The launch chooses by the number of tokens.
pub trait TileShape {
    const M: usize;
    const N: usize;
    const ACROSS: u32;
    const ROWS: u32 = Self::M as u32 * 32;
    const COLUMNS: u32 = Self::N as u32 * 8 * Self::ACROSS;
    const THREADS: u32 = 64 * Self::ACROSS;
}

/// 128 x 128 sums of `f32` by eight warps: each has registers for partial sums of a few terms beside the
/// totals.
pub struct LargeTile;

impl TileShape for LargeTile {
    const M: usize = 4;
    const N: usize = 4;
    const ACROSS: u32 = 4;
}

/// 128 x 128 sums of halves by four warps.
pub struct MixedTile;

impl TileShape for MixedTile {
    const M: usize = 4;
    const N: usize = 8;
    const ACROSS: u32 = 2;
}

/// 32 x 64 sums by four warps, for few rows.
pub struct FewRowsTile;

impl TileShape for FewRowsTile {
    const M: usize = 1;
    const N: usize = 4;
    const ACROSS: u32 = 2;
}

/// Returns the bytes of a tile of an operand of `rows` rows.
const fn bytes(by_term: bool, rows: u32) -> u32 {
    if by_term {
        tile_bytes(rows)
    } else {
        cross_bytes(rows)
    }
}

/// Returns the bytes of a stage: a tile of each operand.
const fn stage_bytes<C: TileShape>(a_by_term: bool, b_by_term: bool) -> u32 {
    bytes(a_by_term, C::ROWS) + bytes(b_by_term, C::COLUMNS)
}

/// A tile of the product, and the position in its terms.
#[derive(Clone, Copy)]
struct TileCursor {
    tile: u32,
    row: u32,
    column: u32,
    term: u32,
}

impl TileCursor {
    /// Returns the position of tile `tile`, of `down` rows and `across` columns of tiles.
    #[inline(always)]
    fn at<C: TileShape>(tile: u32, (down, across): (u32, u32)) -> Self {
        let of_group = (GROUP * across).max(1);
        let (first, inside) = (tile / of_group * GROUP, tile % of_group);
        // `tile` may be past the end: the loader runs ahead of the last tile, and the shares must not divide
        // by zero.
        let left = down.saturating_sub(first).max(1);
        let rows = if left < GROUP { left } else { GROUP };
        Self {
            tile,
            row: (first + inside % rows) * C::ROWS,
            column: inside / rows * C::COLUMNS,
            term: 0,
        }
    }
}

/// The next copies, and their target.
///
/// It runs ahead of the multiplication by one stage less than there are, also from one tile into the next, so
/// that a block does not wait at the start of a tile.
struct TileLoader<'a> {
    operands: (&'a GemmOperand, &'a GemmOperand),
    shape: (u32, u32),
    shared: BlockShared,
    next: TileCursor,
    step: u32,
}

impl TileLoader<'_> {
    /// Starts to copy the next two tiles into a stage, if any remain. It commits a group of copies in any
    /// case, since the waits count groups.
    ///
    /// # Safety
    /// The operands are allocated.
    #[inline(always)]
    unsafe fn load<C: TileShape, const A_BY_TERM: bool, const B_BY_TERM: bool, const KIND: u32>(
        &mut self,
        stage: u32,
    ) {
        let (a, b) = self.operands;
        if self.next.tile < self.shape.0 * self.shape.1 {
            let to = self
                .shared
                .at(stage * stage_bytes::<C>(A_BY_TERM, B_BY_TERM));
            let (next, of_b) = (self.next, to.at(bytes(A_BY_TERM, C::ROWS)));
            // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
            unsafe {
                copy::<C, A_BY_TERM, KIND>(C::ROWS, a, (next.row, next.term), to);
                copy::<C, B_BY_TERM, KIND>(C::COLUMNS, b, (next.column, next.term), of_b);
            }
            self.next.term += depth(KIND);
            if self.next.term >= a.terms {
                self.next = TileCursor::at::<C>(next.tile + self.step, self.shape);
            }
        }
        commit();
    }
}

/// Computes every `step`th tile of the product of `a` and `b`, from tile `first` on. `finish` receives two
/// neighbouring sums a call, with row and column of the first, even numbers; either sum may be outside. Sums
/// of a column start at `begin`.
///
/// # Safety
/// Both operands are allocated; the launch has the shared memory of the stages.
/// Both operands are there; the launch has the shared memory of the stages.
#[inline(always)]
pub unsafe fn product<
    C: TileShape,
    const A_BY_TERM: bool,
    const B_BY_TERM: bool,
    const KIND: u32,
>(
    a: &GemmOperand,
    b: &GemmOperand,
    (first, step): (u32, u32),
    begin: impl Fn(u32) -> f32,
    finish: impl Fn(u32, u32, [f32; 2]),
) {
    let shape = (a.rows.div_ceil(C::ROWS), b.rows.div_ceil(C::COLUMNS));
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let shared = unsafe { BlockShared::dynamic() };
    let mut loader = TileLoader {
        operands: (a, b),
        shape,
        shared,
        next: TileCursor::at::<C>(first, shape),
        step,
    };
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let mut load = |stage| unsafe { loader.load::<C, A_BY_TERM, B_BY_TERM, KIND>(stage) };
    let mut ahead = 0;
    while ahead < STAGES - 1 {
        load(ahead);
        ahead += 1;
    }
    let (mut tile, mut stage) = (first, 0);
    while tile < shape.0 * shape.1 {
        let here = TileCursor::at::<C>(tile, shape);
        let (lane, warp) = (arch::lane(), arch::thread() / 32);
        let row = here.row + warp / C::ACROSS * (C::ROWS / 2) + lane / 4;
        let column = here.column + warp % C::ACROSS * (C::COLUMNS / C::ACROSS) + lane % 4 * 2;
        let mut sums = [[[0.0f32; 4]; 8]; 4];
        un!(j in [0, 1, 2, 3, 4, 5, 6, 7] {
            if j < C::N {
                let (p, q) = (begin(column + j as u32 * 8), begin(column + j as u32 * 8 + 1));
                un!(i in [0, 1, 2, 3] { sums[i][j] = [p, q, p, q]; });
            }
        });
        let mut term = 0;
        loop {
            wait_for_copies::<{ STAGES - 2 }>();
            arch::sync_block();
            load((stage + STAGES - 1) % STAGES);
            let at = shared.at(stage * stage_bytes::<C>(A_BY_TERM, B_BY_TERM));
            let of_b = at.at(bytes(A_BY_TERM, C::ROWS));
            if KIND == F32 {
                // Tensor cores truncate when they add to a large sum. Partial sums of a few terms lose less
                // than one sum of all terms.
                let mut part = [[[0.0f32; 4]; 8]; 4];
                multiply::<C, A_BY_TERM, B_BY_TERM, KIND>(&mut part, at, of_b);
                un!(i in [0, 1, 2, 3] { un!(j in [0, 1, 2, 3, 4, 5, 6, 7] { un!(e in [0, 1, 2, 3] {
                    if i < C::M && j < C::N { sums[i][j][e] += part[i][j][e]; }
                }); }); });
            } else {
                multiply::<C, A_BY_TERM, B_BY_TERM, KIND>(&mut sums, at, of_b);
            }
            stage = (stage + 1) % STAGES;
            term += depth(KIND);
            if term >= a.terms {
                break;
            }
        }
        un!(i in [0, 1, 2, 3] { un!(j in [0, 1, 2, 3, 4, 5, 6, 7] {
            if i < C::M && j < C::N {
                let [p, q, r, s] = sums[i][j];
                let (row, column) = (row + i as u32 * 16, column + j as u32 * 8);
                finish(row, column, [p, q]);
                finish(row + 8, column, [r, s]);
            }
        }); });
        tile += step;
    }
    wait_for_copies::<0>();
}

/// Returns the offset of 16 bytes of a row of 128 in a tile. The XOR swizzle puts the same column of eight
/// consecutive rows into different banks.
#[inline(always)]
fn chunk(row: u32, chunk: u32) -> u32 {
    row * 128 + ((chunk ^ (row & 7)) * 16)
}

/// Starts to copy a tile of `rows` rows from row `first` and term `term` on, zeros for everything outside.
///
/// # Safety
/// The operand is allocated.
#[inline(always)]
#[allow(
    clippy::manual_is_multiple_of,
    reason = "the committed PTX is of this form"
)]
unsafe fn copy<C: TileShape, const BY_TERM: bool, const KIND: u32>(
    rows: u32,
    from: &GemmOperand,
    (first, term): (u32, u32),
    to: BlockShared,
) {
    let each = element_bytes(KIND);
    let thread = arch::thread();
    // Chunks of 16 bytes: 8 in a line of terms, `rows` / 4 in a line of rows.
    let of_line = if BY_TERM { 8 } else { rows / 4 };
    let (line, place) = (thread / of_line, thread % of_line);
    let (begin, lines, length) = match BY_TERM {
        true => (first, from.rows, from.terms),
        false => (term, from.terms, from.rows),
    };
    let element = if BY_TERM { term } else { first } + place * (16 / each);
    let left = if element < length {
        (length - element) * each
    } else {
        0
    };
    let there = if left < 16 { left } else { 16 };
    let stride = u64::from(from.stride) * u64::from(each);
    let source = from.address + u64::from(begin + line) * stride + u64::from(element * each);
    let step = C::THREADS / of_line;
    let (target, below) = match BY_TERM {
        true => (to.at(chunk(line, place)), step * 128),
        false => (
            to.at(line * (rows + 8) * 4 + place * 16),
            step * (rows + 8) * 4,
        ),
    };
    let all = if BY_TERM { rows } else { 32 };
    let is_whole = stride % 16 == 0 && from.address % 16 == 0;
    un!(i in [0, 1, 2, 3, 4, 5, 6, 7] {
        if i as u32 * step < all {
        let bytes = if begin + line + i as u32 * step < lines { there } else { 0 };
        let address = if bytes == 0 { from.address } else { source + i as u64 * u64::from(step) * stride };
        let target = target.at(i as u32 * below);
        // SAFETY: the target is inside the tile; the source is inside the operand, or zero bytes are copied.
        unsafe {
            match is_whole || KIND != F32 {
                true => target.copy16(address, bytes),
                false => {
                    un!(e in [0, 1, 2, 3] {
                        let bytes = if bytes > e as u32 * 4 { 4 } else { 0 };
                        let address = if bytes == 0 { from.address } else { address + e as u64 * 4 };
                        target.at(e as u32 * 4).copy4(address, bytes);
                    });
                }
            }
        }
        }
    });
}

/// Adds the product of two tiles to the sums of the warp.
#[inline(always)]
fn multiply<C: TileShape, const A_BY_TERM: bool, const B_BY_TERM: bool, const KIND: u32>(
    sums: &mut [[[f32; 4]; 8]; 4],
    a: BlockShared,
    b: BlockShared,
) {
    let (lane, warp) = (arch::lane(), arch::thread() / 32);
    let (row, column) = (
        warp / C::ACROSS * (C::ROWS / 2),
        warp % C::ACROSS * (C::COLUMNS / C::ACROSS),
    );
    let a = match A_BY_TERM {
        true => a.at(chunk(row + (lane & 15), lane >> 4)),
        false => a.at(cross(C::ROWS, lane % 4, row + lane / 4)),
    };
    let b = match B_BY_TERM {
        true => b.at(chunk(
            column + (lane & 7) + ((lane >> 4) << 3),
            (lane >> 3) & 1,
        )),
        false => b.at(cross(C::COLUMNS, lane % 4, column + lane / 4)),
    };
    let (a, b) = (a.opaque(), b.opaque());
    un!(k in [0, 1, 2, 3] {
        let mut of_a = [[0u32; 4]; 4];
        un!(i in [0, 1, 2, 3] { if i < C::M {
            of_a[i] = match A_BY_TERM {
                true => a.flip(k as u32 * 32).at(i as u32 * 16 * 128).matrices4(),
                false => {
                    let at = a.at(cross(C::ROWS, k as u32 * 8, i as u32 * 16));
                    let next = at.at(cross(C::ROWS, 4, 0));
                    [at, at.at(32), next, next.at(32)].map(word)
                }
            };
        } });
        let mut low_a = [[0u32; 4]; 4];
        if KIND == F32 {
            un!(i in [0, 1, 2, 3] { un!(e in [0, 1, 2, 3] {
                (of_a[i][e], low_a[i][e]) = parts(of_a[i][e]);
            }); });
        }
        un!(j in [0, 1, 2, 3] { if j * 2 < C::N {
            let of_b = match B_BY_TERM {
                true => b.flip(k as u32 * 32).at(j as u32 * 16 * 128).matrices4(),
                false => {
                    let at = b.at(cross(C::COLUMNS, k as u32 * 8, j as u32 * 16));
                    let next = at.at(cross(C::COLUMNS, 4, 0));
                    [at, next, at.at(32), next.at(32)].map(word)
                }
            };
            un!(h in [0, 1] {
                let of_b = [of_b[h * 2], of_b[h * 2 + 1]];
                match KIND {
                    F32 => {
                        let ((p, low_p), (q, low_q)) = (parts(of_b[0]), parts(of_b[1]));
                        un!(i in [0, 1, 2, 3] { if i < C::M {
                            mma_tf32(&mut sums[i][2 * j + h], low_a[i], [p, q]);
                            mma_tf32(&mut sums[i][2 * j + h], of_a[i], [low_p, low_q]);
                            mma_tf32(&mut sums[i][2 * j + h], of_a[i], [p, q]);
                        } });
                    }
                    BF16 => {
                        un!(i in [0, 1, 2, 3] { if i < C::M { mma_bf16(&mut sums[i][2 * j + h], of_a[i], of_b); } });
                    }
                    _ => {
                        un!(i in [0, 1, 2, 3] { if i < C::M { mma_f16(&mut sums[i][2 * j + h], of_a[i], of_b); } });
                    }
                }
            });
        } });
    });
}

/// Returns the offset of a number in a tile with consecutive rows. Eight rows of four terms are in different
/// banks.
const fn cross(rows: u32, term: u32, row: u32) -> u32 {
    (term * (rows + 8) + row) * 4
}

#[inline(always)]
fn word(at: BlockShared) -> u32 {
    at.load().to_bits()
}

/// Splits a number into its upper 19 bits and the remainder.
#[inline(always)]
fn parts(bits: u32) -> (u32, u32) {
    let high = bits & 0xFFFF_E000;
    (
        high,
        (f32::from_bits(bits) - f32::from_bits(high)).to_bits(),
    )
}
