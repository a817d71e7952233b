//! Products of halves in memory of a GPU and a matrix on a drive, which the blocks of one launch read and multiply
//! with. A row that was not read is NaN in its stage, so that its column of the result is NaN by arithmetic, and is
//! counted once.
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

use crate::StoredMatrix;
use crate::extents::{optional, product as extent};
use crate::gathered::split;
use nvme_compute_kernel::gemm::{
    DEPTH, GemmParameters, GemmStreamed, SHARED_BYTES, STAGES, STRIP_ROWS, TILE_TOKENS,
};
use nvme_compute_kernel::{BLOCK_THREADS, GEMM_PTX, kernel};
use nvme_formats::StoredFormat;
use nvme_gpu_kernel::rows::GatherLaunch;
use nvme_host::cuda::{
    Gpu, KernelArgument as Memory, KernelFunction, LaunchSequence, LaunchSize, Module, PendingRows,
};
use nvme_host::{Error, Result};
use std::sync::Arc;

use crate::matrix::HalfFormat;

/// Returns the number of blocks that read, unless a product says otherwise: blocks for Q8_0 widen twice the bytes of
/// those for Q4_0.
pub const fn read_blocks(stored: StoredFormat) -> u32 {
    match stored {
        StoredFormat::Q8_0 => 6,
        _ => 4,
    }
}
/// Bytes of a part that a warp reads by one command, if rows are shorter.
const PART_BYTES: u64 = 28 << 10;
/// Blocks that zero the words of a launch.
const CLEARING: u32 = 32;

/// The kernels of such products, for one GPU.
///
/// The kernels stay loaded when this is dropped: a launch in progress, or a graph, may still run them.
pub struct StreamedGemm {
    module: Module,
    streamed: KernelFunction,
    resident: KernelFunction,
    clear: KernelFunction,
    /// Number of blocks of each kernel that the GPU holds at a time.
    blocks: (u32, u32),
}

/// Operands of a product, by addresses of the GPU.
#[derive(Clone, Copy, Debug)]
pub struct GemmOperands {
    /// `tokens` rows of as many halves as the matrix has columns, at a multiple of 16.
    pub x: u64,
    /// Address of `tokens` rows, each with an `f32` for each row of the matrix.
    pub y: u64,
    /// [`StreamedGemm::workspace_bytes`] bytes at a multiple of 16, which this product has to itself.
    pub workspace: u64,
    /// Number of tokens.
    pub tokens: u32,
    /// Format of the halves.
    pub half: HalfFormat,
    /// Number of blocks that read; 0 for the number of [`read_blocks`].
    pub readers: u32,
}

impl StreamedGemm {
    /// Loads the kernels.
    ///
    /// # Errors
    /// The errors of [`Module::embedded`], and a GPU whose blocks have less than 130 KiB of shared memory.
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let module = Module::embedded(gpu, GEMM_PTX.as_bytes())?;
        let streamed = module.function_with_shared(kernel::GEMM_STREAMED, SHARED_BYTES)?;
        let resident = module.function_with_shared(kernel::GEMM, SHARED_BYTES)?;
        let at_a_time = |function| module.blocks_at_a_time(function, BLOCK_THREADS, SHARED_BYTES);
        let blocks = (at_a_time(streamed)?, at_a_time(resident)?);
        // One block that reads, and one that multiplies.
        if blocks.0 < 2 || blocks.1 == 0 {
            return Err(Error::environment(
                "a GPU that holds one block of the product at most",
                "use a GPU of compute capability 8.0 or more",
            ));
        }
        let clear = module.function(kernel::GEMM_CLEAR)?;
        Ok(Self {
            module,
            streamed,
            resident,
            clear,
            blocks,
        })
    }

    /// Registers and bytes of local memory of a thread, as compiled for this GPU.
    ///
    /// # Errors
    /// The errors of [`Module::cost`].
    pub fn cost(&self) -> Result<(u32, u32)> {
        self.module.cost(self.streamed)
    }

    /// Returns the number of blocks of a launch, those that read included.
    pub fn blocks(&self) -> u32 {
        self.blocks.0
    }

    /// Returns the number of bytes of [`GemmOperands::workspace`]: the stages of the matrix's strips, and the words
    /// of a launch.
    pub fn workspace_bytes(matrix: &StoredMatrix) -> u64 {
        let gemm = GemmParameters {
            rows: matrix.rows,
            columns: matrix.columns,
            ..GemmParameters::default()
        };
        u64::from(STAGES) * GemmStreamed::stage_bytes(matrix.columns) + gemm.work_words() * 4
    }

    /// Enqueues `Y = X W^T` in `stream`, a `CUstream` of the store's GPU, and returns before it runs. The stream may be
    /// captured. `W` is read while it is multiplied; each part of it lies in a stage of the workspace until it was
    /// used.
    ///
    /// Rows of the [`PendingRows`] are rows of `W`, columns of `Y`. A row that was not read completely is NaN for some
    /// tokens or all: [`check`](crate::streamed::check) makes an error of it. Weights are rounded to halves; sums are
    /// `f32`.
    ///
    /// # Safety
    /// The addresses are valid on the GPU until the product has ended, and for as long as a graph that captured it may be
    /// launched; nothing else writes there meanwhile, nor reads the workspace.
    ///
    /// # Errors
    /// [`Error::Usage`] for a store whose reads the GPU does not submit itself, for a matrix of `f32`, or of halves of the
    /// other kind, for addresses that are not aligned, and for sizes beyond 2^31; [`Error::Environment`] with the
    /// driver's answer.
    pub unsafe fn gemm(
        &self,
        matrix: &StoredMatrix,
        product: &GemmOperands,
        stream: u64,
    ) -> Result<PendingRows> {
        check_product(matrix, product)?;
        let stages = u64::from(STAGES) * GemmStreamed::stage_bytes(matrix.columns);
        let gemm = GemmParameters {
            words: product.workspace + stages,
            ..words(matrix, product)
        };
        if gemm.tokens == 0 || gemm.rows == 0 {
            return Ok(PendingRows::nothing());
        }
        self.judge(matrix, product, (0, stages), stream)?;
        let table = matrix
            .store
            .table(matrix.offset, matrix.rows.into(), matrix.row_bytes)?;
        let most = self.blocks.0 - 1;
        let argument = |rows: GatherLaunch| {
            let part_rows = part_rows(&rows);
            let split = split(&GatherLaunch {
                row_bytes: rows.row_bytes * part_rows,
                ..rows
            })?;
            let pieces = u64::from(split.of_row.get() * STRIP_ROWS);
            Ok(GemmStreamed {
                rows,
                gemm,
                stages: product.workspace,
                // All pieces of a strip may be read by one warp, each within its own deadline, so the
                // multiplying blocks wait for their sum.
                patience_ns: rows.timeout_ns.saturating_mul(pieces + 64),
                stored: matrix.stored as u32,
                readers: readers(matrix.stored, product, most.min(rows.station_count)),
                part_rows,
                piece_bytes: split.piece_bytes,
                of_part: split.of_row.get(),
                stage_shift: split.stage_shift,
            })
        };
        let launch = (u64::from(matrix.rows), blocks(self.blocks.0));
        let kernel = (&self.module, self.streamed);
        LaunchSequence::run(self.module.gpu(), stream, |sequence| {
            // SAFETY: the kernel takes a `GemmParameters` and stays loaded; the caller vouches for the addresses.
            sequence.kernel(|| unsafe { self.clear(&gemm, stream) })?;
            // SAFETY: the kernel takes a `GemmStreamed` and stays loaded; the caller vouches for the addresses.
            let reads = unsafe { table.stream_in_blocks(kernel, launch, argument, stream) }?;
            sequence.add(reads, 0);
            Ok(())
        })
    }

    /// Launches the same product of a matrix whose rows lie at `w` in GPU memory as halves, at a
    /// multiple of 16; `matrix` has the shape. It uses the part of the workspace after the stages.
    ///
    /// # Safety
    /// As [`gemm`](Self::gemm).
    ///
    /// # Errors
    /// As [`gemm`](Self::gemm).
    pub unsafe fn resident(
        &self,
        matrix: &StoredMatrix,
        w: u64,
        product: &GemmOperands,
        stream: u64,
    ) -> Result<()> {
        check_product(matrix, product)?;
        let stages = u64::from(STAGES) * GemmStreamed::stage_bytes(matrix.columns);
        let gemm = GemmParameters {
            w,
            words: product.workspace + stages,
            ..words(matrix, product)
        };
        if gemm.tokens == 0 || gemm.rows == 0 {
            return Ok(());
        }
        self.judge(matrix, product, (w, 0), stream)?;
        let grid = blocks(self.blocks.1);
        LaunchSequence::run_kernels(self.module.gpu(), stream, |sequence| {
            // SAFETY: the kernels take one `GemmParameters`; the caller vouches for the addresses.
            sequence.kernel(|| unsafe { self.clear(&gemm, stream) })?;
            // SAFETY: as above.
            sequence.kernel(|| unsafe {
                let resident = self.resident;
                self.module.launch_blocks(stream, resident, grid, &gemm)
            })
        })
    }

    /// Judges the vectors, a matrix at `w` if that is not 0, and of the workspace `stages` bytes and the words behind them.
    ///
    /// # Errors
    /// [`Error::Usage`] for memory that the GPU cannot access as the kernel does.
    fn judge(
        &self,
        matrix: &StoredMatrix,
        product: &GemmOperands,
        (w, stages): (u64, u64),
        stream: u64,
    ) -> Result<()> {
        let of_matrix = GemmStreamed::stage_bytes(matrix.columns) * u64::from(STAGES);
        let words = Self::workspace_bytes(matrix) - of_matrix;
        let (workspace, bytes) = match stages {
            0 => (product.workspace + of_matrix, words),
            stages => (product.workspace, stages + words),
        };
        let weights = optional(w, extent(&[matrix.rows, matrix.columns]));
        self.module.gpu().judge_apart(
            stream,
            &[
                Memory::read("x", product.x, extent(&[product.tokens, matrix.columns]), 2)
                    .aligned_to(16),
                Memory::read("w", w, weights, 2).aligned_to(16),
                Memory::written("y", product.y, extent(&[product.tokens, matrix.rows]), 4),
                Memory::written("workspace", workspace, bytes / 4, 4).aligned_to(16),
            ],
        )
    }

    /// # Safety
    /// As [`gemm`](Self::gemm).
    unsafe fn clear(&self, gemm: &GemmParameters, stream: u64) -> Result<()> {
        // SAFETY: the kernel takes one `GemmParameters`; the caller vouches for the addresses.
        unsafe {
            self.module
                .launch_in(stream, self.clear, CLEARING, BLOCK_THREADS, gemm)
        }
    }
}

fn blocks(count: u32) -> LaunchSize {
    LaunchSize {
        count,
        threads: BLOCK_THREADS,
        shared_bytes: SHARED_BYTES,
    }
}

/// Returns the product, but for the addresses of its words and of `W`.
fn words(matrix: &StoredMatrix, product: &GemmOperands) -> GemmParameters {
    GemmParameters {
        x: product.x,
        y: product.y,
        tokens: product.tokens,
        rows: matrix.rows,
        columns: matrix.columns,
        is_f16: u32::from(product.half == HalfFormat::F16),
        ..GemmParameters::default()
    }
}

/// Returns the number of rows of one part: those of a K-slice stage, or as many as a long command reads.
fn part_rows(rows: &GatherLaunch) -> u32 {
    let most = PART_BYTES.min(u64::from(rows.slot_bytes));
    let fit = (most / u64::from(rows.row_bytes).max(1)).clamp(1, u64::from(STRIP_ROWS)) as u32;
    1 << fit.ilog2()
}

fn readers(stored: StoredFormat, product: &GemmOperands, most: u32) -> u32 {
    let wanted = match product.readers {
        0 => read_blocks(stored),
        readers => readers,
    };
    wanted.clamp(1, most.max(1))
}

pub(crate) fn check_product(matrix: &StoredMatrix, product: &GemmOperands) -> Result<()> {
    product.half.check(matrix.stored)?;
    let most = 1 << 31;
    let tiles = u64::from(matrix.rows).div_ceil(u64::from(DEPTH))
        * u64::from(product.tokens).div_ceil(u64::from(TILE_TOKENS));
    if tiles >= most || u64::from(matrix.rows) >= most || u64::from(product.tokens) >= most {
        return Err(Error::usage(
            format!(
                "a product of {} tokens and {} rows has 2^31 tiles or more",
                product.tokens, matrix.rows
            ),
            "split the product: fewer than 2^31 of each, and of tiles",
        ));
    }
    Ok(())
}
