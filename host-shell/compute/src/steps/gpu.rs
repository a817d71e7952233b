//! Launches of the kernels, in any stream. Each launch returns before it runs, checks its addresses and sizes first,
//! and can be captured in a graph.
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

use crate::extents::{optional, product, spread};
use nvme_compute_kernel::{
    AddBias, ArgmaxParameters, AttentionParameters, BLOCK_THREADS, GemvParameters,
    MOST_HEAD_ELEMENTS, PTX, RmsNorm, RopeParameters, SiluMul, UnpackParameters, kernel,
};
use nvme_formats::{StoredFormat, UNIT};
use nvme_host::cuda::{
    Gpu, KernelArgument as Memory, KernelFunction, LaunchSequence, LaunchSize, Module,
};
use nvme_host::{Error, Result};
use std::sync::Arc;

/// Largest number of blocks of a launch: as many as a large GPU runs at a time.
const MOST_BLOCKS: u64 = 2048;

/// The kernels of the steps of a transformer, for one GPU.
///
/// Each function enqueues a kernel in `stream`, a `CUstream` of the GPU, and returns before it runs. The stream may be
/// captured. Without anything to compute nothing is launched. The kernels stay loaded when this is dropped: a launch in
/// progress, or a graph, may still run them.
pub struct StepKernels {
    module: Module,
    gemv: KernelFunction,
    gemv_wide: KernelFunction,
    gemv_quantised: KernelFunction,
    rms_norm: KernelFunction,
    rope: KernelFunction,
    attention: KernelFunction,
    silu_mul: KernelFunction,
    add_bias: KernelFunction,
    argmax: KernelFunction,
    take_token: KernelFunction,
    unpack: KernelFunction,
}

impl StepKernels {
    /// Loads the kernels.
    ///
    /// # Errors
    /// The errors of [`Module::embedded`].
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let module = Module::embedded(gpu, PTX.as_bytes())?;
        Ok(Self {
            gemv: module.function(kernel::GEMV)?,
            gemv_wide: module.function(kernel::GEMV_WIDE)?,
            gemv_quantised: module
                .function_with_shared(kernel::GEMV_QUANTISED, GemvParameters::QUANTISED_SHARED)?,
            rms_norm: module.function(kernel::RMS_NORM)?,
            rope: module.function(kernel::ROPE)?,
            attention: module.function(kernel::ATTENTION)?,
            silu_mul: module.function(kernel::SILU_MUL)?,
            add_bias: module.function(kernel::ADD_BIAS)?,
            argmax: module.function(kernel::ARGMAX)?,
            take_token: module.function(kernel::TAKE_TOKEN)?,
            unpack: module.function(kernel::UNPACK)?,
            module,
        })
    }

    /// Products of a matrix in memory of the GPU and some vectors.
    ///
    /// # Safety
    /// The memory that `gemv` names is valid on the GPU until the stream has done it, and for as long as a graph that
    /// captured it may be launched; nothing else writes it meanwhile.
    ///
    /// # Errors
    /// [`Error::Usage`] for a format, columns or addresses that cannot be; [`Error::Device`] with the driver's answer.
    pub unsafe fn gemv(&self, gemv: &GemvParameters, stream: u64) -> Result<()> {
        let row_bytes = row_bytes(gemv.stored, gemv.columns)?;
        if gemv.row_bytes != row_bytes || gemv.stride < gemv.rows {
            return Err(Error::usage(
                format!(
                    "rows of {} bytes are not those of the format, or a stride of {} elements is shorter than the results of a token",
                    gemv.row_bytes, gemv.stride
                ),
                format!("use {row_bytes} bytes, and {} elements or more", gemv.rows),
            ));
        }
        let weights = u64::from(gemv.rows).saturating_mul(row_bytes);
        let weights = if gemv.tokens == 0 { 0 } else { weights };
        let y = spread(gemv.tokens, gemv.stride.into(), gemv.rows.into());
        self.judge(
            stream,
            [
                Memory::read("weights", gemv.weights, weights / 2, 2),
                Memory::read("x", gemv.x, product(&[gemv.tokens, gemv.columns]), 4),
                Memory::written("y", gemv.y, y, 4),
            ],
        )?;
        let (function, blocks, shared_bytes) = if gemv.is_quantised() {
            (
                self.gemv_quantised,
                gemv.items(),
                GemvParameters::QUANTISED_SHARED,
            )
        } else if gemv.is_wide() {
            (self.gemv_wide, gemv.tiles(), 0)
        } else {
            let warps = u64::from(gemv.rows) * u64::from(gemv.tokens);
            (self.gemv, warps.div_ceil(u64::from(BLOCK_THREADS) / 32), 0)
        };
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.launch_blocks(function, (blocks, shared_bytes), gemv, stream) }
    }

    /// Converts rows from their stored format.
    ///
    /// # Safety
    /// As [`gemv`](Self::gemv).
    ///
    /// # Errors
    /// As [`gemv`](Self::gemv).
    pub unsafe fn unpack(&self, unpack: &UnpackParameters, stream: u64) -> Result<()> {
        let row_bytes = row_bytes(unpack.stored, unpack.columns)?;
        if !unpack.row_stride.is_multiple_of(2) {
            return Err(Error::usage(
                format!("rows that begin {} bytes apart", unpack.row_stride),
                "use an even number: formats consist of words of 16 bits",
            ));
        }
        let rows = spread(unpack.tokens, unpack.row_stride, row_bytes);
        let y = product(&[unpack.tokens, unpack.columns]);
        self.judge(
            stream,
            [
                Memory::read("rows", unpack.rows, rows / 2, 2),
                Memory::written("y", unpack.y, y, 4),
            ],
        )?;
        let units = u64::from(unpack.columns / UNIT) * u64::from(unpack.tokens);
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.launch(self.unpack, units, unpack, stream) }
    }

    /// Norms of vectors.
    ///
    /// # Safety
    /// As [`gemv`](Self::gemv).
    ///
    /// # Errors
    /// [`Error::Usage`] for addresses between two numbers; [`Error::Device`] with the driver's answer.
    pub unsafe fn rms_norm(&self, norm: &RmsNorm, stream: u64) -> Result<()> {
        let all = product(&[norm.tokens, norm.elements]);
        let weight = if norm.tokens == 0 { 0 } else { norm.elements };
        self.judge(
            stream,
            [
                Memory::read_in_place("x", norm.x, all, 4),
                Memory::read("weight", norm.weight, weight.into(), 4),
                Memory::written("y", norm.y, all, 4),
            ],
        )?;
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.launch(self.rms_norm, u64::from(norm.tokens) * 32, norm, stream) }
    }

    /// Rotates queries and keys by their positions (RoPE).
    ///
    /// # Safety
    /// As [`gemv`](Self::gemv).
    ///
    /// # Errors
    /// As [`rms_norm`](Self::rms_norm), and [`Error::Usage`] for heads of an odd number of elements.
    pub unsafe fn rope(&self, rope: &RopeParameters, stream: u64) -> Result<()> {
        if !rope.head_elements.is_multiple_of(2) {
            return Err(Error::usage(
                format!(
                    "heads have {} elements, which is not an even number",
                    rope.head_elements
                ),
                "use an even number: two make a pair that is turned",
            ));
        }
        let queries = product(&[rope.tokens, rope.heads, rope.head_elements]);
        let keys = product(&[rope.tokens, rope.kv_heads, rope.head_elements]);
        let positions = past(rope.position, rope.tokens);
        let angles = positions.saturating_mul(rope.head_elements.into());
        let cached = positions.saturating_mul(product(&[rope.kv_heads, rope.head_elements]));
        self.judge(
            stream,
            [
                Memory::written("queries", rope.queries, queries, 4),
                Memory::read("keys", rope.keys, keys, 4),
                Memory::read("values", rope.values, keys, 4),
                Memory::read("angles", rope.angles, angles, 4),
                Memory::written("key_cache", rope.key_cache, cached, 4),
                Memory::written("value_cache", rope.value_cache, cached, 4),
            ],
        )?;
        let heads = (u64::from(rope.heads) + u64::from(rope.kv_heads)) * u64::from(rope.tokens);
        let pairs = heads * u64::from(rope.head_elements / 2);
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.launch(self.rope, pairs, rope, stream) }
    }

    /// Computes attention over the positions up to that of each query.
    ///
    /// # Safety
    /// As [`gemv`](Self::gemv).
    ///
    /// # Errors
    /// As [`rms_norm`](Self::rms_norm), and [`Error::Usage`] for heads that cannot be.
    pub unsafe fn attention(&self, attention: &AttentionParameters, stream: u64) -> Result<()> {
        let (heads, kv_heads) = (attention.heads, attention.kv_heads);
        let elements = attention.head_elements;
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) || elements > MOST_HEAD_ELEMENTS {
            return Err(Error::usage(
                format!(
                    "{heads} query heads of {elements} elements are not a multiple of {kv_heads} key heads, or have too many elements"
                ),
                format!(
                    "use a multiple of the heads of keys, and {MOST_HEAD_ELEMENTS} elements at most"
                ),
            ));
        }
        let all = product(&[attention.tokens, heads, elements]);
        let positions = past(attention.position, attention.tokens);
        let cached = positions.saturating_mul(product(&[kv_heads, elements]));
        let sinks = optional(attention.sinks, heads.into());
        self.judge(
            stream,
            [
                Memory::read("queries", attention.queries, all, 4),
                Memory::read("key_cache", attention.key_cache, cached, 4),
                Memory::read("value_cache", attention.value_cache, cached, 4),
                Memory::read("sinks", attention.sinks, sinks, 4),
                Memory::written("y", attention.y, all, 4),
            ],
        )?;
        let warps = u64::from(heads) * u64::from(attention.tokens);
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.launch(self.attention, warps * 32, attention, stream) }
    }

    /// Adds a bias to each vector.
    ///
    /// # Safety
    /// As [`gemv`](Self::gemv).
    ///
    /// # Errors
    /// As [`rms_norm`](Self::rms_norm).
    pub unsafe fn add_bias(&self, add: &AddBias, stream: u64) -> Result<()> {
        let all = product(&[add.tokens, add.elements]);
        self.judge(
            stream,
            [
                Memory::read("bias", add.bias, add.elements.into(), 4),
                Memory::written("y", add.y, all, 4),
            ],
        )?;
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.launch(self.add_bias, all, add, stream) }
    }

    /// Applies the activation, element by element.
    ///
    /// # Safety
    /// As [`gemv`](Self::gemv).
    ///
    /// # Errors
    /// As [`rms_norm`](Self::rms_norm).
    pub unsafe fn silu_mul(&self, silu: &SiluMul, stream: u64) -> Result<()> {
        self.judge(
            stream,
            [
                Memory::read_in_place("x", silu.x, silu.elements, 4),
                Memory::read("factor", silu.factor, silu.elements, 4),
                Memory::written("y", silu.y, silu.elements, 4),
            ],
        )?;
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.launch(self.silu_mul, silu.elements, silu, stream) }
    }

    /// Finds the index of the largest number, of equal ones the first.
    ///
    /// # Safety
    /// As [`gemv`](Self::gemv); the 8 bytes at `argmax.best` are 0.
    ///
    /// # Errors
    /// As [`rms_norm`](Self::rms_norm), and [`Error::Usage`] for no number, and for more than 2^32 - 1.
    pub unsafe fn argmax(&self, argmax: &ArgmaxParameters, stream: u64) -> Result<()> {
        if argmax.elements == 0 || u32::try_from(argmax.elements).is_err() {
            return Err(Error::usage(
                format!("the largest of {} numbers is not defined", argmax.elements),
                "use 1 to 4294967295",
            ));
        }
        self.judge(
            stream,
            [
                Memory::read("x", argmax.x, argmax.elements, 4),
                Memory::written("best", argmax.best, 1, 8),
                Memory::written("index", argmax.index, 1, 8),
            ],
        )?;
        LaunchSequence::run_kernels(self.module.gpu(), stream, |sequence| {
            for (function, threads) in [(self.argmax, argmax.elements), (self.take_token, 1)] {
                // SAFETY: the caller keeps the conditions under `# Safety`.
                sequence.kernel(|| unsafe { self.launch(function, threads, argmax, stream) })?;
            }
            Ok(())
        })
    }

    /// # Errors
    /// [`Error::Usage`] for memory that the GPU cannot access as the kernel does, and results in memory of other arguments.
    fn judge<const N: usize>(&self, stream: u64, all: [Memory<'_>; N]) -> Result<()> {
        self.module.gpu().judge_apart(stream, &all)
    }

    /// Launches a thread for each of `threads` pieces of work, or fewer that take several.
    ///
    /// # Safety
    /// `function` takes one `T`, and the memory that its argument names is valid.
    unsafe fn launch<T: Copy>(
        &self,
        function: KernelFunction,
        threads: u64,
        argument: &T,
        stream: u64,
    ) -> Result<()> {
        let blocks = threads.div_ceil(BLOCK_THREADS.into());
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.launch_blocks(function, (blocks, 0), argument, stream) }
    }

    /// Launches one block for each of `blocks` pieces of work, with `shared_bytes` bytes of shared memory;
    /// beyond the limit of the grid, a block takes several pieces.
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    unsafe fn launch_blocks<T: Copy>(
        &self,
        function: KernelFunction,
        (blocks, shared_bytes): (u64, u32),
        argument: &T,
        stream: u64,
    ) -> Result<()> {
        let grid = LaunchSize {
            count: blocks.min(MOST_BLOCKS) as u32,
            threads: BLOCK_THREADS,
            shared_bytes,
        };
        match grid.count {
            0 => Ok(()),
            // SAFETY: the caller keeps the conditions under `# Safety`.
            _ => unsafe { self.module.launch_blocks(stream, function, grid, argument) },
        }
    }
}

/// Returns the number of positions up to the last of `tokens` tokens from `position` on.
fn past(position: u32, tokens: u32) -> u64 {
    match tokens {
        0 => 0,
        _ => u64::from(position) + u64::from(tokens),
    }
}

/// # Errors
/// [`Error::Usage`] for an unknown format, and columns that are no whole blocks.
fn row_bytes(stored: u32, columns: u32) -> Result<u64> {
    let bytes = StoredFormat::of_number(stored).and_then(|stored| stored.row_bytes(columns));
    bytes.ok_or_else(|| {
        Error::usage(
            format!("{columns} columns are not whole blocks of format {stored} of GGUF, or that format is unknown"),
            format!("use a format of GGUF, and whole blocks of it: a multiple of {UNIT} at least"),
        )
    })
}
