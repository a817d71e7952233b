//! Blocks that multiply: 128 tokens x 256 rows in one tile by the tensor cores, a part of 64 x 64 for each
//! warp. Halves of `X` and `W` are copied to shared memory asynchronously, past L1.
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::{DEPTH, GemmParameters, GemmTile, STEPS, TILE_ROWS, TILE_TOKENS};
use crate::tile::{BlockShared, commit, products, un, wait_for_copies};
use nvme_gpu_kernel::arch;

const X_BYTES: u32 = TILE_TOKENS * DEPTH * 2;
const STEP_BYTES: u32 = X_BYTES + TILE_ROWS * DEPTH * 2;
const _: () = assert!(STEPS * STEP_BYTES == super::SHARED_BYTES && STEPS == 4);

/// Returns the offset of 8 halves of a row of 32. The swizzle spreads the loads of eight lanes over all
/// banks.
#[inline(always)]
fn place(row: u32, eight: u32) -> u32 {
    row * 64 + ((eight ^ (row >> 1 & 3)) * 16)
}

/// The copies of a thread in each step: 8 halves of rows that are 64 apart, two of `X` and four of `W`.
struct GemmCopies {
    x: [u64; 2],
    w: [u64; 4],
    to: u32,
}

impl GemmCopies {
    /// Prepares the copies. `w` is the address of the tile's first row, and `rows` the number of rows from
    /// there to the end.
    #[inline(always)]
    fn new(gemm: &GemmParameters, tile: GemmTile, (w, rows): (u64, u32)) -> Self {
        let (row, eight) = (arch::thread() / 4, arch::thread() % 4);
        let row_bytes = u64::from(gemm.columns) * 2;
        // Rows past the end are replaced by the last row, so that every address is valid; their results are
        // not stored.
        let at = |base: u64, row: u32, last: u32| {
            let row = if row < last { row } else { last };
            base + u64::from(row) * row_bytes + u64::from(eight) * 16
        };
        let x = |i: u32| at(gemm.x, tile.token + row + 64 * i, gemm.tokens - 1);
        let w = |i: u32| at(w, row + 64 * i, rows - 1);
        Self {
            x: [x(0), x(1)],
            w: [w(0), w(1), w(2), w(3)],
            to: place(row, eight),
        }
    }

    #[inline(always)]
    fn begin(&self, shared: BlockShared, step: u32) {
        let to = shared.at(step % STEPS * STEP_BYTES + self.to);
        let by = u64::from(step * DEPTH) * 2;
        // SAFETY: `new` clamped every row to the matrix, for which the host vouches; the target is inside the
        // step's buffer.
        unsafe {
            un!(i in [0, 1] {
                to.at(64 * 64 * i as u32).copy16(self.x[i] + by, 16);
            });
            un!(i in [0, 1, 2, 3] {
                to.at(X_BYTES + 64 * 64 * i as u32).copy16(self.w[i] + by, 16);
            });
        }
    }
}

/// Computes `tile`, whose rows of `W` begin at `w`, and stores it. Every thread of the block calls it; when
/// it returns, all threads have finished with `W`.
///
/// # Safety
/// All memory that [`GemmParameters`] names is allocated and stays so while the kernel runs, and the launch has
/// [`SHARED_BYTES`](super::SHARED_BYTES) bytes of shared memory.
#[inline(always)]
pub unsafe fn multiply<const IS_F16: bool>(
    gemm: &GemmParameters,
    tile: GemmTile,
    (w, rows): (u64, u32),
) {
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let shared = unsafe { BlockShared::dynamic() };
    let copies = GemmCopies::new(gemm, tile, (w, rows));
    let steps = gemm.columns / DEPTH;
    un!(step in [0, 1, 2] {
        if (step as u32) < steps {
            copies.begin(shared, step as u32);
        }
        commit();
    });
    let (warp, lane) = (arch::thread() / 32, arch::lane());
    let (token, row) = (warp / 4 * 64, warp % 4 * 64);
    let mut sums = [[[0f32; 4]; 8]; 4];
    let mut step = 0;
    while step < steps {
        wait_for_copies::<2>();
        arch::sync_block();
        let next = step + STEPS - 1;
        if next < steps {
            copies.begin(shared, next);
        }
        commit();
        let of_x = shared.at(step % STEPS * STEP_BYTES);
        let of_w = of_x.at(X_BYTES);
        un!(half in [0, 1] {
            let eight = half as u32 * 2;
            let mut a = [[0u32; 4]; 4];
            un!(i in [0, 1, 2, 3] {
                let at = token + i as u32 * 16 + (lane & 15);
                a[i] = of_x.at(place(at, eight + (lane >> 4))).matrices4();
            });
            un!(j in [0, 1, 2, 3] {
                let at = row + j as u32 * 16 + (lane & 7) + ((lane >> 4) << 3);
                let b = of_w.at(place(at, eight + (lane >> 3 & 1))).matrices4();
                products!(IS_F16, sums, j, a, b);
            });
        });
        step += 1;
    }
    wait_for_copies::<0>();
    // A barrier: the copies for the next tile overwrite the buffers that other threads may still be reading.
    arch::sync_block();
    let (first_token, first_row) = (tile.token + token + lane / 4, tile.row + row + lane % 4 * 2);
    un!(i in [0, 1, 2, 3] {
        un!(j in [0, 1, 2, 3, 4, 5, 6, 7] {
            let (token, row) = (first_token + i as u32 * 16, first_row + j as u32 * 8);
            // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
            unsafe {
                store(gemm, token, row, sums[i][j][0], sums[i][j][1]);
                store(gemm, token + 8, row, sums[i][j][2], sums[i][j][3]);
            }
        });
    });
}

/// Stores elements `row`, which is even, and `row` + 1 of a token, as far as they are inside.
///
/// # Safety
/// All memory that [`GemmParameters`] names is allocated and stays so while the kernel runs.
#[allow(
    clippy::manual_is_multiple_of,
    reason = "the committed PTX is of this form"
)]
#[inline(always)]
pub unsafe fn store(gemm: &GemmParameters, token: u32, row: u32, left: f32, right: f32) {
    #[repr(C, align(8))]
    struct Pair([f32; 2]);
    if token >= gemm.tokens || row >= gemm.rows {
        return;
    }
    let at = gemm.y + (u64::from(token) * u64::from(gemm.rows) + u64::from(row)) * 4;
    // SAFETY: token and row are checked against the result; both are stored as one only at a multiple of 8.
    unsafe {
        if at % 8 == 0 && row + 1 < gemm.rows {
            *(at as usize as *mut Pair) = Pair([left, right]);
            return;
        }
        *(at as usize as *mut f32) = left;
        if row + 1 < gemm.rows {
            *((at + 4) as usize as *mut f32) = right;
        }
    }
}
