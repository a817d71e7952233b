//! Launches of attention's rungs, in the order of a stream. A launch returns before it runs and can be
//! captured. `Naive` and `Tiled` need a workspace for all scores, `MultiQuery` one for its parts, the others
//! none.
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::{FlashParameters, check};
use nvme_compute::extents::{optional, product, spread};
use nvme_compute_kernel::flash::VectorLayout;
use nvme_compute_kernel::flash::{
    FLASH_ROWS, FLASH_SHARED, FLASH2_ROWS, MOST_SPLITS, TENSOR_THREADS, TILE, TILED_SHARED,
    WIDE_ROWS, decode_rows, decode_shared, flash2_shared, kernel,
};
use nvme_compute_kernel::{ATTENTION_PTX, BLOCK_THREADS};
use nvme_host::cuda::{Gpu, KernelArgument as Memory, KernelFunction, LaunchSize, Module};
use nvme_host::{Error, Result};
use std::sync::Arc;

/// Largest number of blocks of a launch whose threads take one work item after another.
const MOST_BLOCKS: u64 = 2048;
/// Smallest number of keys of a part: fewer are not worth the second kernel.
const LEAST_KEYS: u32 = 256;

/// A step of the course.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionStep {
    /// Stores scores in memory; a thread computes each number.
    Naive,
    /// Stores scores in memory; products use tiles of shared memory.
    Tiled,
    /// One kernel that stores no scores in memory.
    Flash,
    /// The kernel of `Flash` with tensor cores.
    Flash2,
    /// The kernel for few queries and many keys: heads that share keys are one product, and keys are split among
    /// blocks.
    MultiQuery,
}

impl AttentionStep {
    /// All steps, in the order of the course.
    pub const ALL: [Self; 5] = [
        Self::Naive,
        Self::Tiled,
        Self::Flash,
        Self::Flash2,
        Self::MultiQuery,
    ];

    /// Returns the fastest for this many queries and heads.
    pub fn fastest(job: &FlashParameters) -> Self {
        let group = u64::from(job.heads / job.kv_heads.max(1));
        match group * u64::from(job.query_tokens) <= u64::from(WIDE_ROWS) {
            true => Self::MultiQuery,
            false => Self::Flash2,
        }
    }
}

/// The kernels of attention, for one GPU.
///
/// The kernels stay loaded when this is dropped: a launch in progress, or a graph, may still run them.
pub struct FlashAttention {
    module: Module,
    multiprocessors: u32,
    scores: KernelFunction,
    shares: KernelFunction,
    values: KernelFunction,
    scores_tiled: KernelFunction,
    values_tiled: KernelFunction,
    flash: KernelFunction,
    /// Kernels for heads of up to 64 elements, f16 and bf16, then for larger ones.
    flash2: [KernelFunction; 4],
    decode: [KernelFunction; 4],
    join: KernelFunction,
}

impl FlashAttention {
    /// Loads the kernels.
    ///
    /// # Errors
    /// The errors of [`Module::embedded`].
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let module = Module::embedded(gpu, ATTENTION_PTX.as_bytes())?;
        let plain = |name| module.function(name);
        let shared = |name, bytes| module.function_with_shared(name, bytes);
        let (small, large) = (flash2_shared(64), flash2_shared(128));
        let (few, many) = (decode_shared(64), decode_shared(128));
        Ok(Self {
            multiprocessors: gpu.multiprocessors()?,
            scores: plain(kernel::SCORES)?,
            shares: plain(kernel::SHARES)?,
            values: plain(kernel::VALUES)?,
            scores_tiled: shared(kernel::SCORES_TILED, TILED_SHARED)?,
            values_tiled: shared(kernel::VALUES_TILED, TILED_SHARED)?,
            flash: shared(kernel::FLASH, FLASH_SHARED)?,
            flash2: [
                shared(kernel::FLASH2_64_F16, small)?,
                shared(kernel::FLASH2_64_BF16, small)?,
                shared(kernel::FLASH2_128_F16, large)?,
                shared(kernel::FLASH2_128_BF16, large)?,
            ],
            decode: [
                shared(kernel::DECODE_64_F16, few)?,
                shared(kernel::DECODE_64_BF16, few)?,
                shared(kernel::DECODE_128_F16, many)?,
                shared(kernel::DECODE_128_BF16, many)?,
            ],
            join: plain(kernel::DECODE_JOIN)?,
            module,
        })
    }

    /// Registers and bytes of local memory of a thread of the rung's kernel for this job, as compiled for this GPU.
    ///
    /// # Errors
    /// The errors of [`Module::cost`].
    pub fn cost(&self, rung: AttentionStep, job: &FlashParameters) -> Result<(u32, u32)> {
        self.module.cost(match rung {
            AttentionStep::Naive => self.scores,
            AttentionStep::Tiled => self.scores_tiled,
            AttentionStep::Flash => self.flash,
            AttentionStep::Flash2 => self.flash2[variant(job)],
            AttentionStep::MultiQuery => self.decode[variant(job)],
        })
    }

    /// Returns the number of parts into which [`AttentionStep::MultiQuery`] splits the keys: a block for
    /// each multiprocessor keeps the memory busy, and more parts cost more to join.
    fn splits(&self, job: &FlashParameters) -> u32 {
        let wanted = (u64::from(self.multiprocessors) / decode_blocks(job).max(1)).max(1);
        let most = job.key_tokens.div_ceil(LEAST_KEYS).clamp(1, MOST_SPLITS);
        wanted.min(most.into()) as u32
    }

    /// Returns the number of bytes of [`FlashParameters::workspace`], 0 if none is needed.
    pub fn workspace_bytes(&self, rung: AttentionStep, job: &FlashParameters) -> u64 {
        match rung {
            AttentionStep::Naive | AttentionStep::Tiled => {
                job.rows() * u64::from(job.key_tokens) * 4
            }
            AttentionStep::Flash | AttentionStep::Flash2 => 0,
            AttentionStep::MultiQuery => match self.splits(job) {
                1 => 0,
                splits => job.rows() * u64::from(splits) * u64::from(job.head_elements + 2) * 4,
            },
        }
    }

    /// Enqueues attention in `stream`, a `CUstream` of this GPU, and returns before it runs. The stream may be
    /// captured. The number of splits in `job` is ignored.
    ///
    /// # Safety
    /// The memory that `job` names stays valid on the GPU, and nothing else writes it, until the stream has run
    /// it, and for as long as a graph that captured it may be launched.
    ///
    /// # Errors
    /// [`Error::Usage`] for an unsupported shape, for addresses and strides that are not multiples of 16 bytes,
    /// and without a workspace where one is needed; [`Error::Device`] with the driver's answer.
    pub unsafe fn attend(
        &self,
        rung: AttentionStep,
        job: &FlashParameters,
        stream: u64,
    ) -> Result<()> {
        check(job)?;
        check_addresses(job, self.workspace_bytes(rung, job))?;
        if job.rows() == 0 {
            return Ok(());
        }
        self.judge(job, self.workspace_bytes(rung, job), stream)?;
        let splits = if rung == AttentionStep::MultiQuery {
            self.splits(job)
        } else {
            1
        };
        let job = &FlashParameters { splits, ..*job };
        let heads = u64::from(job.sequences) * u64::from(job.heads);
        let tiles = |rows: u32, each: u32| heads * u64::from(rows.div_ceil(each));
        let run = |function, blocks, threads, shared| {
            // SAFETY: the kernels take one `FlashParameters` and stay loaded; the caller vouches for the addresses.
            unsafe { self.launch(stream, function, blocks, threads, shared, job) }
        };
        let some = |function, pieces: u64| {
            let blocks = pieces.div_ceil(BLOCK_THREADS.into()).clamp(1, MOST_BLOCKS);
            run(function, blocks, BLOCK_THREADS, 0)
        };
        let pairs = job.rows() * u64::from(job.key_tokens);
        let width = variant_elements(job);
        match rung {
            AttentionStep::Naive => {
                some(self.scores, pairs)?;
                some(self.shares, job.rows() * 32)?;
                some(self.values, job.rows() * u64::from(job.head_elements))
            }
            AttentionStep::Tiled => {
                let down = tiles(job.query_tokens, TILE);
                let across = |columns: u32| down * u64::from(columns.div_ceil(TILE));
                let by_tiles = |function, columns| match across(columns) {
                    0 => Ok(()),
                    blocks => run(function, blocks, BLOCK_THREADS, TILED_SHARED),
                };
                by_tiles(self.scores_tiled, job.key_tokens)?;
                some(self.shares, job.rows() * 32)?;
                by_tiles(self.values_tiled, job.head_elements)
            }
            AttentionStep::Flash => {
                let blocks = tiles(job.query_tokens, FLASH_ROWS);
                run(self.flash, blocks, BLOCK_THREADS, FLASH_SHARED)
            }
            AttentionStep::Flash2 => {
                let blocks = tiles(job.query_tokens, FLASH2_ROWS);
                run(
                    self.flash2[variant(job)],
                    blocks,
                    TENSOR_THREADS,
                    flash2_shared(width),
                )
            }
            AttentionStep::MultiQuery => {
                let blocks = decode_blocks(job) * u64::from(splits);
                run(
                    self.decode[variant(job)],
                    blocks,
                    TENSOR_THREADS,
                    decode_shared(width),
                )?;
                match splits {
                    1 => Ok(()),
                    _ => some(self.join, job.rows() * 32),
                }
            }
        }
    }

    /// # Errors
    /// [`Error::Usage`] for memory that the GPU cannot access as the kernel does.
    fn judge(&self, job: &FlashParameters, workspace_bytes: u64, stream: u64) -> Result<()> {
        let halves = |vectors: VectorLayout, heads: u32, tokens: u32| match tokens {
            0 => 0,
            _ => {
                let of_head = spread(tokens, vectors.token, job.head_elements.into());
                let of_sequence = spread(heads, vectors.head, of_head);
                spread(job.sequences, vectors.sequence, of_sequence)
            }
        };
        let queries = halves(job.queries, job.heads, job.query_tokens);
        let keys = halves(job.keys, job.kv_heads, job.key_tokens);
        let values = halves(job.values, job.kv_heads, job.key_tokens);
        let y = halves(job.y, job.heads, job.query_tokens);
        let counts = optional(job.counts, job.sequences.into());
        let all = [
            Memory::read("queries", job.queries.address, queries, 2),
            Memory::read("keys", job.keys.address, keys, 2),
            Memory::read("values", job.values.address, values, 2),
            Memory::written("y", job.y.address, y, 2),
            Memory::read("counts", job.counts, counts, 4),
            Memory::written("workspace", job.workspace, workspace_bytes / 4, 4),
        ];
        self.module.gpu().judge_list(stream, all)?;
        let dense =
            |heads: u32, tokens: u32| product(&[job.sequences, heads, tokens, job.head_elements]);
        let (of_queries, of_keys) = (
            dense(job.heads, job.query_tokens),
            dense(job.kv_heads, job.key_tokens),
        );
        let [q, k, v, result, counted, workspace] = all;
        Memory::check_apart(&[
            q.if_dense(queries <= of_queries),
            k.if_dense(keys <= of_keys),
            v.if_dense(values <= of_keys),
            result.if_dense(y <= of_queries),
            counted,
            workspace,
        ])
    }

    /// # Safety
    /// The conditions of [`attend`](Self::attend).
    unsafe fn launch(
        &self,
        stream: u64,
        function: KernelFunction,
        blocks: u64,
        threads: u32,
        shared_bytes: u32,
        job: &FlashParameters,
    ) -> Result<()> {
        let Some(count) = u32::try_from(blocks).ok().filter(|count| *count < 1 << 31) else {
            return Err(Error::usage(
                format!("a launch of {blocks} blocks exceeds what CUDA launches at once"),
                "use fewer sequences, heads or tokens at a time: 2^31 blocks at most",
            ));
        };
        let blocks = LaunchSize {
            count,
            threads,
            shared_bytes,
        };
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.module.launch_blocks(stream, function, blocks, job) }
    }
}

/// Returns the number of blocks of [`AttentionStep::MultiQuery`] for each part of the keys.
fn decode_blocks(job: &FlashParameters) -> u64 {
    let rows = job.heads / job.kv_heads.max(1) * job.query_tokens;
    let groups = u64::from(job.sequences) * u64::from(job.kv_heads);
    groups * u64::from(rows.div_ceil(decode_rows(rows)))
}

fn variant(job: &FlashParameters) -> usize {
    2 * usize::from(job.head_elements > 64) + usize::from(job.is_bf16 != 0)
}

/// Returns the number of elements of a head for which the kernel was made.
fn variant_elements(job: &FlashParameters) -> u32 {
    if job.head_elements > 64 { 128 } else { 64 }
}

fn check_addresses(job: &FlashParameters, workspace_bytes: u64) -> Result<()> {
    for (what, vectors, is_there) in [
        ("queries", job.queries, job.rows() > 0),
        ("keys", job.keys, job.rows() > 0 && job.key_tokens > 0),
        ("values", job.values, job.rows() > 0 && job.key_tokens > 0),
        ("results", job.y, job.rows() > 0),
    ] {
        let strides = vectors.sequence | vectors.head | vectors.token;
        if !vectors.address.is_multiple_of(16) || !strides.is_multiple_of(8) {
            return Err(Error::usage(
                format!(
                    "{what} at {:#x}, whose strides are {strides:#x} together",
                    vectors.address
                ),
                "use an address that is a multiple of 16 bytes, and strides of multiples of 8 elements",
            ));
        }
        if vectors.address == 0 && is_there {
            return Err(Error::usage(
                format!("the address of the {what} is 0"),
                "name memory of the GPU",
            ));
        }
    }
    for (name, address) in [("counts", job.counts), ("workspace", job.workspace)] {
        if !address.is_multiple_of(4) {
            return Err(Error::usage(
                format!("the address {address:#x} of {name} is not a multiple of 4"),
                "use a multiple of 4",
            ));
        }
    }
    if job.workspace == 0 && workspace_bytes > 0 {
        return Err(Error::usage(
            format!(
                "this attention needs a workspace of {workspace_bytes} bytes, and its address is 0"
            ),
            "give memory of the GPU, as many bytes as workspace_bytes returns",
        ));
    }
    Ok(())
}
