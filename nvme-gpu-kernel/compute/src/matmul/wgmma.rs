//! The tensor cores of Hopper by `wgmma`: one thread makes TMA fill four stages of shared memory, and two
//! warpgroups multiply from them, 64 x 256 elements of the result each. Blocks are persistent: each computes
//! several tiles in turn.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::memory::{ProductResult, tile_at};
use super::{TiledMatmul, WGMMA, WGMMA_DEPTH};
use crate::tile::hopper::{
    SharedBarrier, TensorMap, describe, fence_barriers, fewer_registers, more_registers,
    wgmma_bf16, wgmma_commit, wgmma_f16, wgmma_fence, wgmma_wait,
};
use crate::tile::{BlockShared, parameter_address, un};
use nvme_gpu_kernel::{arch, entry};

const ROWS: u32 = WGMMA.rows;
const COLUMNS: u32 = WGMMA.columns;
const DEPTH: u32 = WGMMA_DEPTH;
const STAGES: u32 = 4;
/// 64 halves of a row.
const ROW_BYTES: u32 = 128;
const A_BYTES: u32 = ROWS * ROW_BYTES;
/// `b` is copied as boxes of 64 columns, `DEPTH` rows each.
const BOX_BYTES: u32 = DEPTH * ROW_BYTES;
const BOXES: u32 = COLUMNS / 64;
const STAGE_BYTES: u32 = A_BYTES + BOXES * BOX_BYTES;
/// Bytes of eight rows, the period of the swizzle.
const EIGHT_ROWS: u32 = 8 * ROW_BYTES;
/// Number of warps that release a stage.
const CONSUMERS: u32 = 8;
const _: () = assert!(STAGES * (STAGE_BYTES + 16) + 1024 == WGMMA.shared_bytes);

/// The stages, with two barriers for each: one for the bytes that TMA has written, one for the warps that
/// have used them.
///
/// The producer fills stage `turn` modulo their number and waits before that for the warps that used the
/// stage one round earlier; the consumers wait for its bytes and arrive when they have multiplied them.
#[derive(Clone, Copy)]
struct StageRing(BlockShared);

impl StageRing {
    /// Makes the ring.
    ///
    /// # Safety
    /// The launch has [`WGMMA`]'s bytes.
    #[inline(always)]
    unsafe fn new() -> Self {
        // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
        let shared = unsafe { BlockShared::dynamic() };
        Self(shared.at(shared.address().wrapping_neg() % 1024))
    }

    #[inline(always)]
    fn stage(self, turn: u32) -> BlockShared {
        self.0.at(turn % STAGES * STAGE_BYTES)
    }

    #[inline(always)]
    fn full(self, turn: u32) -> SharedBarrier {
        SharedBarrier::at(self.0.at(STAGES * STAGE_BYTES + turn % STAGES * 16))
    }

    #[inline(always)]
    fn empty(self, turn: u32) -> SharedBarrier {
        SharedBarrier::at(self.0.at(STAGES * STAGE_BYTES + turn % STAGES * 16 + 8))
    }
}

entry! {
    /// Multiplies.
    ///
    /// # Safety
    /// All memory that [`TiledMatmul`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_matmul_wgmma(tiled: TiledMatmul) {
        // SAFETY: takes the address of the kernel's parameter; the host launched with WGMMA's bytes.
        let (parameter, ring) = unsafe {
            (parameter_address!("nvme_matmul_wgmma", tiled), StageRing::new())
        };
        let thread = arch::thread();
        if thread == 0 {
            un!(stage in [0, 1, 2, 3] {
                ring.full(stage as u32).init(1);
                ring.empty(stage as u32).init(CONSUMERS);
            });
            fence_barriers();
        }
        arch::sync_block();
        let job = &tiled.job;
        if thread < 128 {
            fewer_registers::<40>();
            if thread == 0 {
                // SAFETY: both tensor maps are at the start of the parameter, which outlives the kernel.
                let maps = unsafe { (TensorMap::at(parameter), TensorMap::at(parameter + 128)) };
                produce(&tiled, maps, ring);
            }
            return;
        }
        more_registers::<232>();
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        unsafe {
            match job.is_bf16 {
                0 => consume::<false>(&tiled, ring),
                _ => consume::<true>(&tiled, ring),
            }
        }
    }
}

/// Makes TMA fill the stages, tile by tile. One thread of the block calls it.
#[inline(always)]
fn produce(tiled: &TiledMatmul, (a, b): (TensorMap, TensorMap), ring: StageRing) {
    a.prefetch();
    b.prefetch();
    let depth = tiled.job.k.div_ceil(DEPTH);
    let (mut turn, mut tile) = (0, arch::block());
    while tile < tiled.tiles {
        let (row, column) = tile_at(&tiled.job, tile, ROWS, COLUMNS);
        let mut step = 0;
        while step < depth {
            ring.empty(turn).wait((turn / STAGES % 2) ^ 1);
            let (full, stage) = (ring.full(turn), ring.stage(turn));
            full.arrive_and_expect(STAGE_BYTES);
            a.load(stage, step * DEPTH, row, full);
            un!(i in [0, 1, 2, 3] {
                let to = stage.at(A_BYTES + i as u32 * BOX_BYTES);
                b.load(to, column + i as u32 * 64, step * DEPTH, full);
            });
            turn += 1;
            step += 1;
        }
        tile += arch::blocks();
    }
}

/// Multiplies the tiles in the stages, and stores the results.
///
/// # Safety
/// All memory that the job names is allocated and stays so while the kernel runs.
#[inline(always)]
unsafe fn consume<const IS_BF16: bool>(tiled: &TiledMatmul, ring: StageRing) {
    let job = &tiled.job;
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let c = unsafe { ProductResult::<IS_BF16>::at(job) };
    let thread = arch::thread() - 128;
    let (group, warp, lane) = (thread / 128, thread / 32 % 4, thread % 32);
    let depth = job.k.div_ceil(DEPTH);
    let (mut turn, mut tile) = (0, arch::block());
    while tile < tiled.tiles {
        let mut sums = [[0f32; 4]; 32];
        let mut step = 0;
        while step < depth {
            ring.full(turn).wait(turn / STAGES % 2);
            let stage = ring.stage(turn);
            let a = describe(stage.at(group * 64 * ROW_BYTES), 16, EIGHT_ROWS);
            let b = describe(stage.at(A_BYTES), BOX_BYTES, EIGHT_ROWS);
            wgmma_fence();
            un!(part in [0, 1, 2, 3] {
                // 16 terms: 32 bytes of the rows of `a`, 16 rows of `b`.
                let (a, b) = (a + part as u64 * 2, b + part as u64 * 128);
                if IS_BF16 {
                    wgmma_bf16::<1>(&mut sums, a, b);
                } else {
                    wgmma_f16::<1>(&mut sums, a, b);
                }
            });
            wgmma_commit();
            wgmma_wait::<1>();
            if step != 0 && lane == 0 {
                ring.empty(turn - 1).arrive();
            }
            turn += 1;
            step += 1;
        }
        wgmma_wait::<0>();
        if depth != 0 && lane == 0 {
            ring.empty(turn - 1).arrive();
        }
        let (first_row, first_column) = tile_at(job, tile, ROWS, COLUMNS);
        let row = first_row + group * 64 + warp * 16 + lane / 4;
        c.store_sixteen_rows(row, first_column + lane % 4 * 2, &sums);
        tile += arch::blocks();
    }
}
