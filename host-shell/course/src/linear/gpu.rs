//! Launches of the rungs of linear layers, in the order of a stream. A launch returns before it runs and can be
//! captured; arguments that a kernel cannot compute are refused before anything is launched.
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::{ActivationKind, BackwardParameters, ForwardParameters};
use nvme_compute::extents::{optional, product};
use nvme_compute_kernel::linear::{
    FEW_COLUMNS, FEW_ROWS, FEW_THREADS, STAGES, SUMS_COLUMNS, TENSOR_THREADS, TILE, WARP_COLUMNS,
    WARP_ROWS, cross_bytes, kernel, tile_bytes,
};
use nvme_compute_kernel::{BLOCK_THREADS, LINEAR_PTX};
use nvme_host::cuda::{
    Gpu, KernelArgument as Memory, KernelFunction, LaunchSequence, LaunchSize, Module,
};
use nvme_host::{Error, Result};
use std::sync::Arc;

/// Largest number of blocks of a launch whose threads take one work item after another.
const MOST_BLOCKS: u64 = 2048;
/// Number of blocks of the mixed kernels, and of the kernels for few tokens, that a multiprocessor runs at a time; it
/// runs one of any other kernel.
const MIXED_BLOCKS: u32 = 2;
/// Bytes of shared memory of a product with two, one or no operand that is contiguous along the summed
/// dimension; then of the first two by smaller tiles.
const FORWARD_SHARED: u32 = STAGES * 2 * tile_bytes(TILE);
const INPUTS_SHARED: u32 = STAGES * (tile_bytes(TILE) + cross_bytes(TILE));
const WEIGHTS_SHARED: u32 = STAGES * 2 * cross_bytes(TILE);
const FORWARD_FEW_SHARED: u32 = STAGES * (tile_bytes(FEW_ROWS) + tile_bytes(FEW_COLUMNS));
const INPUTS_FEW_SHARED: u32 = STAGES * (tile_bytes(FEW_ROWS) + cross_bytes(FEW_COLUMNS));

/// A step of the course for results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForwardRung {
    /// A thread for each element, the activation by a second kernel.
    Naive,
    /// One kernel that uses tensor cores, over `f32`; with smaller tiles if large ones would leave multiprocessors
    /// idle.
    Fused,
    /// The kernel of `Fused`, with as many blocks as the GPU runs at a time.
    Persistent,
    /// The kernel of `Persistent` over bf16.
    MixedBf16,
    /// The kernel of `Persistent` over f16.
    MixedF16,
}

impl ForwardRung {
    /// All steps, in the order of the course.
    pub const ALL: [Self; 5] = [
        Self::Naive,
        Self::Fused,
        Self::Persistent,
        Self::MixedBf16,
        Self::MixedF16,
    ];

    /// True if inputs and weights are halves.
    pub fn is_mixed(self) -> bool {
        matches!(self, Self::MixedBf16 | Self::MixedF16)
    }
}

/// A step of the course for gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackwardRung {
    /// Gradients of weights and biases by atomic additions: the bits differ from run to run.
    Naive,
    /// Tensor cores without atomic additions: always the same bits.
    AtomicFree,
    /// Sums over the lanes of a warp, for few tokens: always the same bits.
    WarpReduce,
}

impl BackwardRung {
    /// All steps, in the order of the course.
    pub const ALL: [Self; 3] = [Self::Naive, Self::AtomicFree, Self::WarpReduce];
}

/// The kernels of linear layers, for one GPU.
///
/// The kernels stay loaded when this is dropped: a launch in progress, or a graph, may still run them.
pub struct LinearKernels {
    module: Module,
    multiprocessors: u32,
    naive: KernelFunction,
    activate: KernelFunction,
    fused: KernelFunction,
    persistent: KernelFunction,
    mixed_bf16: KernelFunction,
    mixed_f16: KernelFunction,
    /// Kernels with smaller tiles: `f32`, bf16, f16.
    few: [KernelFunction; 3],
    clear: KernelFunction,
    backward_naive: KernelFunction,
    backward_sums: KernelFunction,
    backward_inputs: KernelFunction,
    backward_inputs_few: KernelFunction,
    backward_weights: KernelFunction,
    backward_warp: KernelFunction,
}

impl LinearKernels {
    /// Loads the kernels.
    ///
    /// # Errors
    /// The errors of [`Module::embedded`].
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let module = Module::embedded(gpu, LINEAR_PTX.as_bytes())?;
        let plain = |name| module.function(name);
        let shared = |name, bytes| module.function_with_shared(name, bytes);
        Ok(Self {
            multiprocessors: gpu.multiprocessors()?,
            naive: plain(kernel::FORWARD_NAIVE)?,
            activate: plain(kernel::ACTIVATE)?,
            fused: shared(kernel::FORWARD_FUSED, FORWARD_SHARED)?,
            persistent: shared(kernel::FORWARD_PERSISTENT, FORWARD_SHARED)?,
            mixed_bf16: shared(kernel::FORWARD_MIXED_BF16, FORWARD_SHARED)?,
            mixed_f16: shared(kernel::FORWARD_MIXED_F16, FORWARD_SHARED)?,
            few: [
                shared(kernel::FORWARD_FEW, FORWARD_FEW_SHARED)?,
                shared(kernel::FORWARD_FEW_BF16, FORWARD_FEW_SHARED)?,
                shared(kernel::FORWARD_FEW_F16, FORWARD_FEW_SHARED)?,
            ],
            clear: plain(kernel::BACKWARD_CLEAR)?,
            backward_naive: plain(kernel::BACKWARD_NAIVE)?,
            backward_sums: plain(kernel::BACKWARD_SUMS)?,
            backward_inputs: shared(kernel::BACKWARD_INPUTS, INPUTS_SHARED)?,
            backward_inputs_few: shared(kernel::BACKWARD_INPUTS_FEW, INPUTS_FEW_SHARED)?,
            backward_weights: shared(kernel::BACKWARD_WEIGHTS, WEIGHTS_SHARED)?,
            backward_warp: plain(kernel::BACKWARD_WARP)?,
            module,
        })
    }

    /// Registers and bytes of local memory of a thread of the rung's kernel, as compiled for this GPU.
    ///
    /// # Errors
    /// The errors of [`Module::cost`].
    pub fn cost(&self, rung: ForwardRung) -> Result<(u32, u32)> {
        self.module.cost(match rung {
            ForwardRung::Naive => self.naive,
            ForwardRung::Fused => self.fused,
            ForwardRung::Persistent => self.persistent,
            ForwardRung::MixedBf16 => self.mixed_bf16,
            ForwardRung::MixedF16 => self.mixed_f16,
        })
    }

    /// Enqueues a layer in `stream`, a `CUstream` of this GPU, and returns before it runs. The stream may be captured.
    ///
    /// # Safety
    /// The memory that `job` names is valid on the GPU, and nothing else writes it, until the stream has done it, and
    /// for as long as a graph that captured it may be launched.
    ///
    /// # Errors
    /// [`Error::Usage`] for addresses between two numbers or 0, an activation that there is not, and mixed layers whose
    /// rows are not whole 16 bytes; [`Error::Device`] with the driver's answer.
    pub unsafe fn forward(
        &self,
        rung: ForwardRung,
        job: &ForwardParameters,
        stream: u64,
    ) -> Result<()> {
        check_forward(rung, job)?;
        self.judge_forward(rung, job, stream)?;
        let elements = u64::from(job.tokens) * u64::from(job.outputs);
        let tiles = tiles(job.tokens, job.outputs)?;
        if elements == 0 {
            return Ok(());
        }
        let few = match rung {
            // SAFETY: the caller keeps the conditions under `# Safety`.
            ForwardRung::Naive => return unsafe { self.forward_naive(job, stream) },
            ForwardRung::Fused => self.few[0],
            ForwardRung::MixedBf16 => self.few[1],
            ForwardRung::MixedF16 => self.few[2],
            ForwardRung::Persistent => self.persistent,
        };
        let by_small = rung != ForwardRung::Persistent && self.are_few(tiles);
        let (function, blocks) = match rung {
            _ if by_small => {
                let tiles = few_tiles(job.tokens, job.outputs);
                (few, self.mixed(tiles, FORWARD_FEW_SHARED))
            }
            ForwardRung::Fused => (self.fused, tensor(tiles, FORWARD_SHARED)),
            ForwardRung::MixedBf16 => (self.mixed_bf16, self.mixed(tiles, FORWARD_SHARED)),
            ForwardRung::MixedF16 => (self.mixed_f16, self.mixed(tiles, FORWARD_SHARED)),
            _ => (self.persistent, self.persistent(tiles, FORWARD_SHARED)),
        };
        // SAFETY: the kernels take one `ForwardParameters` and stay loaded; the caller vouches for the addresses.
        unsafe { self.launch(stream, function, blocks, job) }
    }

    /// # Errors
    /// [`Error::Usage`] for memory that the GPU cannot access as the kernel does.
    fn judge_forward(&self, rung: ForwardRung, job: &ForwardParameters, stream: u64) -> Result<()> {
        let each = if rung.is_mixed() { 2 } else { 4 };
        let results = product(&[job.tokens, job.outputs]);
        if results == 0 {
            return Ok(());
        }
        let bias = optional(job.bias, job.outputs.into());
        self.module.gpu().judge_apart(
            stream,
            &[
                Memory::read("x", job.x, product(&[job.tokens, job.inputs]), each),
                Memory::read(
                    "weights",
                    job.weights,
                    product(&[job.outputs, job.inputs]),
                    each,
                ),
                Memory::read("bias", job.bias, bias, each),
                Memory::written("y", job.y, results, each),
                Memory::written("sums", job.sums, optional(job.sums, results), 4),
            ],
        )
    }

    /// # Errors
    /// [`Error::Usage`] for memory that the GPU cannot access as the kernel does.
    fn judge_backward(&self, job: &BackwardParameters, stream: u64) -> Result<()> {
        let results = product(&[job.tokens, job.outputs]);
        let inputs = product(&[job.tokens, job.inputs]);
        let weights = product(&[job.outputs, job.inputs]);
        let soft = match job.activation == ActivationKind::None as u32 {
            true => 0,
            false => results,
        };
        let (of_inputs, of_weights) = (
            optional(job.dx, if results == 0 { 0 } else { weights }),
            optional(job.dweights, if results == 0 { 0 } else { inputs }),
        );
        self.module.gpu().judge_apart(
            stream,
            &[
                Memory::read("x", job.x, of_weights, 4),
                Memory::read("weights", job.weights, of_inputs, 4),
                Memory::read("sums", job.sums, soft, 4),
                Memory::read("dy", job.dy, results, 4),
                Memory::written("dsums", job.dsums, soft, 4),
                Memory::written("dx", job.dx, optional(job.dx, inputs), 4),
                Memory::written("dweights", job.dweights, optional(job.dweights, weights), 4),
                Memory::written(
                    "dbias",
                    job.dbias,
                    optional(job.dbias, job.outputs.into()),
                    4,
                ),
            ],
        )
    }

    /// # Safety
    /// The conditions of [`forward`](Self::forward).
    unsafe fn forward_naive(&self, job: &ForwardParameters, stream: u64) -> Result<()> {
        let blocks = plain(u64::from(job.tokens) * u64::from(job.outputs));
        let is_whole = job.activation == ActivationKind::None as u32 && job.sums == 0;
        let kernels = [(self.naive, blocks), (self.activate, blocks)];
        let kernels = &kernels[..if is_whole { 1 } else { 2 }];
        // SAFETY: as in `forward`.
        unsafe { self.launch_all(stream, kernels, job) }
    }

    /// Enqueues the gradients of a layer in `stream`, as [`forward`](Self::forward) does. Gradients whose address is 0
    /// are left out.
    ///
    /// # Safety
    /// As [`forward`](Self::forward).
    ///
    /// # Errors
    /// [`Error::Usage`] for addresses between two numbers or 0, an activation that there is not, or one without sums and
    /// room for their gradient; [`Error::Device`] with the driver's answer.
    pub unsafe fn backward(
        &self,
        rung: BackwardRung,
        job: &BackwardParameters,
        stream: u64,
    ) -> Result<()> {
        check_backward(job)?;
        self.judge_backward(job, stream)?;
        let of_inputs = tiles(job.tokens, job.inputs)?;
        let of_weights = tiles(job.outputs, job.inputs)?;
        let job = &match job.activation == ActivationKind::None as u32 {
            true => BackwardParameters {
                dsums: job.dy,
                ..*job
            },
            false => *job,
        };
        let weights = u64::from(job.outputs) * u64::from(job.inputs);
        let inputs = u64::from(job.tokens) * u64::from(job.inputs);
        let sums = LaunchSize {
            count: job.outputs.div_ceil(SUMS_COLUMNS),
            threads: BLOCK_THREADS,
            shared_bytes: BLOCK_THREADS * 4,
        };
        let kernels = match rung {
            BackwardRung::Naive => {
                let all = plain(weights.max(inputs).max(job.outputs.into()));
                vec![(self.clear, all), (self.backward_naive, all)]
            }
            BackwardRung::WarpReduce => {
                let rows = job.tokens.max(job.outputs).div_ceil(WARP_ROWS);
                let warps = u64::from(rows) * u64::from(job.inputs.div_ceil(WARP_COLUMNS));
                vec![
                    (self.backward_sums, sums),
                    (self.backward_warp, plain(warps * 32)),
                ]
            }
            BackwardRung::AtomicFree => {
                let mut kernels = vec![(self.backward_sums, sums)];
                if job.dx != 0 {
                    kernels.push(self.of_inputs(of_inputs, job));
                }
                if job.dweights != 0 {
                    let blocks = self.persistent(of_weights, WEIGHTS_SHARED);
                    kernels.push((self.backward_weights, blocks));
                }
                kernels
            }
        };
        // SAFETY: the kernels take one `BackwardParameters` and stay loaded; the caller vouches for the addresses.
        unsafe { self.launch_all(stream, &kernels, job) }
    }

    /// Returns the kernel for gradients of inputs, with tiles that keep the multiprocessors busy.
    fn of_inputs(&self, tiles: u32, job: &BackwardParameters) -> (KernelFunction, LaunchSize) {
        match self.are_few(tiles) {
            false => (self.backward_inputs, self.persistent(tiles, INPUTS_SHARED)),
            true => {
                let tiles = few_tiles(job.tokens, job.inputs);
                (
                    self.backward_inputs_few,
                    self.mixed(tiles, INPUTS_FEW_SHARED),
                )
            }
        }
    }

    /// Launches `kernels` in order.
    ///
    /// # Safety
    /// As [`Module::launch`], for each.
    unsafe fn launch_all<T: Copy>(
        &self,
        stream: u64,
        kernels: &[(KernelFunction, LaunchSize)],
        job: &T,
    ) -> Result<()> {
        LaunchSequence::run_kernels(self.module.gpu(), stream, |sequence| {
            for (function, blocks) in kernels {
                // SAFETY: the caller keeps the conditions under `# Safety`.
                sequence.kernel(|| unsafe { self.launch(stream, *function, *blocks, job) })?;
            }
            Ok(())
        })
    }

    /// True if `tiles` large tiles leave more than half of the multiprocessors idle.
    fn are_few(&self, tiles: u32) -> bool {
        tiles <= self.multiprocessors / 2
    }

    /// Returns a grid of `tiles` blocks, or of as many as the GPU runs at a time.
    fn persistent(&self, tiles: u32, shared_bytes: u32) -> LaunchSize {
        tensor(tiles.min(self.multiprocessors), shared_bytes)
    }

    /// Returns the same grid for the kernels with fewer threads.
    fn mixed(&self, tiles: u32, shared_bytes: u32) -> LaunchSize {
        LaunchSize {
            count: tiles.min(self.multiprocessors * MIXED_BLOCKS),
            threads: FEW_THREADS,
            shared_bytes,
        }
    }

    /// # Safety
    /// As [`Module::launch`].
    unsafe fn launch<T: Copy>(
        &self,
        stream: u64,
        function: KernelFunction,
        blocks: LaunchSize,
        job: &T,
    ) -> Result<()> {
        if blocks.count == 0 {
            return Ok(());
        }
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.module.launch_blocks(stream, function, blocks, job) }
    }
}

/// Returns a grid with one thread for each of `pieces` work items, or with fewer threads that take several.
fn plain(pieces: u64) -> LaunchSize {
    LaunchSize {
        count: pieces.div_ceil(BLOCK_THREADS.into()).min(MOST_BLOCKS) as u32,
        threads: BLOCK_THREADS,
        shared_bytes: 0,
    }
}

fn tensor(count: u32, shared_bytes: u32) -> LaunchSize {
    LaunchSize {
        count,
        threads: TENSOR_THREADS,
        shared_bytes,
    }
}

/// Returns the number of tiles of a product of this shape.
fn tiles(rows: u32, columns: u32) -> Result<u32> {
    let count = u64::from(rows.div_ceil(TILE)) * u64::from(columns.div_ceil(TILE));
    u32::try_from(count)
        .ok()
        .filter(|count| *count < 1 << 30)
        .ok_or_else(|| {
            Error::usage(
                format!(
                    "a product of {rows} x {columns} elements has more tiles than a launch takes"
                ),
                "use 2^30 tiles of 128 x 128 at most",
            )
        })
}

/// Returns the number of smaller tiles of a product that has few large ones.
fn few_tiles(rows: u32, columns: u32) -> u32 {
    rows.div_ceil(FEW_ROWS) * columns.div_ceil(FEW_COLUMNS)
}

/// Checks an address: not null if it is `needed`, and a multiple of `each`.
fn check_address(what: &str, address: u64, each: u64, needed: bool) -> Result<()> {
    if address == 0 && needed {
        return Err(Error::usage(
            format!("the memory of {what} is NULL"),
            "name memory of the GPU",
        ));
    }
    match address.is_multiple_of(each) {
        true => Ok(()),
        false => Err(Error::usage(
            format!("the memory of {what} at {address:#x} does not begin at a multiple of {each}"),
            "use memory as an allocator gives it, and whole elements from there",
        )),
    }
}

fn check_activation(number: u32) -> Result<ActivationKind> {
    let activation = ActivationKind::of_number(number);
    match activation as u32 == number {
        true => Ok(activation),
        false => Err(Error::usage(
            format!("the activation {number} is unknown"),
            "use 0 for none, 1 for ReLU, 2 for SiLU, 3 for GELU",
        )),
    }
}

fn check_forward(rung: ForwardRung, job: &ForwardParameters) -> Result<()> {
    check_activation(job.activation)?;
    let has_y = job.tokens > 0 && job.outputs > 0;
    let has_terms = has_y && job.inputs > 0;
    let (each, row) = if rung.is_mixed() { (2, 16) } else { (4, 4) };
    check_address("x", job.x, row, has_terms)?;
    check_address("weights", job.weights, row, has_terms)?;
    check_address("bias", job.bias, each, false)?;
    check_address("y", job.y, each, has_y)?;
    check_address("sums", job.sums, 4, false)?;
    if rung.is_mixed() && !job.inputs.is_multiple_of(8) {
        return Err(Error::usage(
            format!(
                "rows of {} 16-bit elements are not multiples of 16 bytes",
                job.inputs
            ),
            "use a multiple of 8 inputs",
        ));
    }
    Ok(())
}

fn check_backward(job: &BackwardParameters) -> Result<()> {
    let activation = check_activation(job.activation)?;
    let has_sums = job.tokens > 0 && job.outputs > 0;
    let is_soft = has_sums && activation != ActivationKind::None;
    let wants_weights = job.dweights != 0 && has_sums && job.inputs > 0;
    check_address("x", job.x, 4, wants_weights)?;
    check_address(
        "weights",
        job.weights,
        4,
        job.dx != 0 && has_sums && job.inputs > 0,
    )?;
    check_address("sums", job.sums, 4, is_soft)?;
    check_address("dy", job.dy, 4, has_sums)?;
    check_address("dsums", job.dsums, 4, is_soft)?;
    check_address("dx", job.dx, 4, false)?;
    check_address("dweights", job.dweights, 4, false)?;
    check_address("dbias", job.dbias, 4, false)
}
