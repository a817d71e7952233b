//! The launches of a step.
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::{GpuExperts, SETTLING};
use crate::experts::{biases_twice, shape_of};
use nvme_compute::extents::{optional, product};
use nvme_compute_kernel::experts::{
    ActivateParameters, AdmitParameters, JoinParameters, MATRICES, ProductParameters,
    RouteParameters, SettleParameters,
};
use nvme_compute_kernel::{BLOCK_THREADS, EXPERTS_PTX, GemvParameters, kernel};
use nvme_host::cuda::{
    DeviceMemory, Gpu, KernelArgument, KernelFunction, LaunchSequence, LaunchSize, Module,
    PendingRows, ReadList,
};
use nvme_host::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Blocks of a launch at most.
const MOST_BLOCKS: u64 = 2048;

/// Arguments of a step: addresses of the store's GPU, multiples of 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertStep {
    /// Number of the layer.
    pub layer: u32,
    /// Number of tokens.
    pub tokens: u32,
    /// Router output: for each token a logit for each expert. Not used if `given` names the choices.
    pub logits: u64,
    /// The choices of a router of the program; `None` for those of the logits.
    pub given: Option<GivenChoices>,
    /// Address of a vector for each token.
    pub x: u64,
    /// Address of a vector for each token, which receives the result.
    pub y: u64,
    /// True if the result is added to the contents of `y`.
    pub adds: bool,
    /// Addresses of the biases of gate, up and down: a vector for each expert of the layer, or 0 for none.
    pub biases: [u64; MATRICES],
    /// Address that receives for each token the softmax over all experts, for [`balance`](crate::experts::balance); 0 if it is
    /// not wanted.
    pub probabilities: u64,
}

/// Experts that a router of the program has chosen: addresses of a number for each choice of each token, multiples of 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GivenChoices {
    /// Number of the expert, `i32`. The result of a token with a number that is no expert is NaN.
    pub experts: u64,
    /// Its weight, `f32`.
    pub weights: u64,
}

/// The kernels by name.
pub(super) struct ExpertKernels {
    module: Module,
    route: KernelFunction,
    admit: KernelFunction,
    admit_published: KernelFunction,
    pub(super) arrange: KernelFunction,
    settle: KernelFunction,
    product: KernelFunction,
    product_wide: KernelFunction,
    product_quantised: KernelFunction,
    product_batched: KernelFunction,
    activate: KernelFunction,
    join: KernelFunction,
}

impl GpuExperts {
    /// Enqueues a layer's step in `stream`, a `CUstream` of the store's GPU, and returns before it runs: the router's
    /// choice, reads of experts that are not in the cache, and their products. The stream may be captured, and the
    /// graph launched again with other logits and vectors.
    ///
    /// The [`PendingRows`] ends when the results are stored: the step does not use the memory of `step` then. Its rows
    /// are pieces that were read. A token with an expert whose read failed has NaN as result: [`check`](super::check) makes an error
    /// of it, and the next step that chooses the expert reads it again.
    ///
    /// # Safety
    /// The addresses are valid on the GPU until the stream has done it, and for as long as a graph that captured it may be
    /// launched; nothing else writes them meanwhile. Steps of this cache do not run at the same time.
    ///
    /// # Errors
    /// [`Error::Usage`] for a layer that is not there, too many tokens, and addresses that are no multiple of 4;
    /// [`Error::Environment`] with the driver's answer. When a part of a step was enqueued, later steps are refused.
    pub unsafe fn step(&self, step: &ExpertStep, stream: u64) -> Result<PendingRows> {
        self.check_step(step)?;
        if step.tokens == 0 {
            return Ok(PendingRows::nothing());
        }
        let shape = self.experts.shape;
        let logits = match step.given {
            None => product(&[step.tokens, shape.experts]),
            Some(_) => 0,
        };
        let vectors = product(&[step.tokens, shape.width]);
        let probabilities = optional(step.probabilities, logits);
        let bias = |name, matrix: usize, rows| {
            let address = step.biases[matrix];
            let numbers = optional(address, product(&[shape.experts, rows]));
            KernelArgument::read(name, address, numbers, 4)
        };
        let choices = match step.given {
            Some(_) => product(&[step.tokens, shape.choices]),
            None => 0,
        };
        let given = step
            .given
            .map_or((0, 0), |given| (given.experts, given.weights));
        self.gpu.judge_apart(
            stream,
            &[
                KernelArgument::read("experts", given.0, choices, 4),
                KernelArgument::read("weights", given.1, choices, 4),
                KernelArgument::read("logits", step.logits, logits, 4),
                KernelArgument::read("x", step.x, vectors, 4),
                KernelArgument::written("y", step.y, vectors, 4),
                KernelArgument::written("probabilities", step.probabilities, probabilities, 4),
                bias("the bias of gate", 0, shape.hidden),
                bias("the bias of up", 1, shape.hidden),
                bias("the bias of down", 2, shape.width),
            ],
        )?;
        let pairs = step.tokens * shape.choices;
        let (kernels, memory) = (&*self.kernels, &*self.memory);
        let admit = self.admit(step.layer, pairs);
        let route = RouteParameters {
            logits: step.logits,
            chosen: admit.chosen,
            probabilities: step.probabilities,
            tokens: step.tokens,
            experts: shape.experts,
            choices: shape.choices,
            over_all: shape.over_all.into(),
        };
        let staged = memory.staged.as_ref();
        let [gate, up, down] = memory.vectors.each_ref().map(DeviceMemory::address);
        let (activation, limit, alpha) = shape.activation.numbers();
        let [gate_bias, up_bias, bias] = match staged.and_then(|staged| staged.biases(step.layer)) {
            Some(of_files) => of_files,
            None => step.biases,
        };
        let activate = ActivateParameters {
            chosen: admit.chosen,
            gate,
            up,
            gate_bias,
            up_bias,
            elements: shape.hidden,
            pairs,
            activation,
            limit,
            alpha,
            reserved: 0,
        };
        let join = JoinParameters {
            chosen: admit.chosen,
            x: down,
            y: step.y,
            bias,
            tokens: step.tokens,
            choices: shape.choices,
            elements: shape.width,
            adds: step.adds.into(),
        };
        let routing = u64::from(step.tokens) * 32;
        let activated = u64::from(pairs) * u64::from(shape.hidden);
        let elements = u64::from(step.tokens) * u64::from(shape.width);
        self.run(stream, |sequence| {
            // SAFETY: each kernel takes the argument that it is launched with; the memory belongs to the cache,
            // or the caller vouches for it.
            unsafe {
                if step.given.is_none() {
                    sequence.kernel(|| self.launch(kernels.route, routing, &route, stream))?;
                }
                self.fetch(sequence, &admit, given, stream)?;
                sequence.kernel(|| self.product(&admit, step, (0, step.x, gate), stream))?;
                sequence.kernel(|| self.product(&admit, step, (1, step.x, up), stream))?;
                sequence.kernel(|| self.launch(kernels.activate, activated, &activate, stream))?;
                sequence.kernel(|| self.product(&admit, step, (2, gate, down), stream))?;
                sequence.kernel(|| self.launch(kernels.join, elements, &join, stream))
            }
        })
    }

    /// Enqueues the read of all experts of a layer into the cache in `stream`, without products: for long prompts, whose
    /// tokens choose all of them. A later step of the layer finds them there. It may be captured.
    ///
    /// A long prompt takes two caches: one is loaded in another stream, while a step uses the other one. That stream
    /// should be [urgent](nvme_host::cuda::Stream::urgent): products fill the GPU, and reads would wait for their blocks.
    ///
    /// # Safety
    /// Steps and loads of this cache do not run at the same time.
    ///
    /// # Errors
    /// [`Error::Usage`] for a layer that is not there, and a cache whose steps need fewer experts than a layer has;
    /// [`Error::Environment`] with the driver's answer.
    pub unsafe fn load_layer(&self, layer: u32, stream: u64) -> Result<PendingRows> {
        let experts = self.experts.shape.experts;
        let Some(whole) = self
            .memory
            .whole
            .as_ref()
            .filter(|_| layer < self.words.layers)
        else {
            return Err(Error::usage(
                format!("layer {layer} cannot be loaded as a whole"),
                format!(
                    "use a layer below {}, and a cache for steps of so many tokens that they may choose all of {experts} experts",
                    self.words.layers
                ),
            ));
        };
        let admit = AdmitParameters {
            chosen: whole.address(),
            ..self.admit(layer, experts)
        };
        self.run(stream, |sequence| {
            // SAFETY: the choices name each expert once, and the memory belongs to the cache.
            unsafe { self.fetch(sequence, &admit, (0, 0), stream) }
        })
    }

    /// Enqueues the lookup of the choices in the cache, and the reads of those that are not there.
    ///
    /// # Safety
    /// As [`step`](Self::step).
    unsafe fn fetch(
        &self,
        sequence: &mut LaunchSequence<'_>,
        admit: &AdmitParameters,
        given: (u64, u64),
        stream: u64,
    ) -> Result<()> {
        let (kernels, memory) = (&*self.kernels, &*self.memory);
        let list = ReadList {
            list: admit.list,
            ranges: self.most_ranges,
            pieces: self.most_pieces,
            status: memory.status.address(),
        };
        let staged = memory.staged.as_ref();
        let settle = SettleParameters {
            admit: staged.map_or(*admit, |staged| staged.settled(admit)),
            status: list.status,
            most_pieces: self.most_pieces,
        };
        let settling = u64::from(SETTLING * BLOCK_THREADS);
        // SAFETY: each kernel takes the argument that it is launched with; the memory belongs to the cache, or the caller
        // vouches for it.
        unsafe {
            match staged {
                Some(staged) => {
                    let admit = staged.admission(admit, given);
                    let function = kernels.admit_published;
                    sequence.kernel(|| self.launch(function, 32, &admit, stream))?;
                }
                None => sequence.kernel(|| self.launch(kernels.admit, 32, admit, stream))?,
            }
            let reads = self.experts.store.read_listed_on_gpu(&list, stream)?;
            sequence.add(reads, 0);
            sequence.kernel(|| self.launch(kernels.settle, settling, &settle, stream))?;
            if let Some(staged) = staged {
                let arrange = staged.arrangement(&self.experts, admit);
                let threads = staged.threads(&self.experts);
                sequence.kernel(|| self.launch(kernels.arrange, threads, &arrange, stream))?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// As [`step`](Self::step).
    unsafe fn product(
        &self,
        admit: &AdmitParameters,
        step: &ExpertStep,
        (matrix, x, y): (usize, u64, u64),
        stream: u64,
    ) -> Result<()> {
        let shape = self.experts.shape;
        let (rows, columns) = shape_of(shape, matrix);
        let product = ProductParameters {
            admit: *admit,
            x,
            y,
            rows,
            columns,
            stored: self.experts.layers[step.layer as usize][matrix].stored as u32,
            matrix: matrix as u32,
            shared: if matrix == 2 { 1 } else { shape.choices },
            reserved: 0,
        };
        let like = self.like(step.layer, matrix, admit.pairs);
        let kernels = &self.kernels;
        let (function, count, shared_bytes) = if like.is_quantised() && product.is_batched() {
            let count = product.batched_blocks();
            (
                kernels.product_batched,
                count,
                GemvParameters::QUANTISED_SHARED,
            )
        } else if like.is_quantised() {
            let function = kernels.product_quantised;
            (function, like.items(), GemvParameters::QUANTISED_SHARED)
        } else if like.is_wide() {
            (kernels.product_wide, like.tiles(), 0)
        } else {
            let threads = u64::from(admit.pairs) * u64::from(rows) * 32;
            // SAFETY: the caller keeps the conditions under `# Safety`.
            return unsafe { self.launch(kernels.product, threads, &product, stream) };
        };
        let blocks = LaunchSize {
            // No memory could hold the results of 2^32 blocks, so the conversion cannot fail.
            count: u32::try_from(count).map_err(|_| Error::internal("2^32 blocks"))?,
            threads: BLOCK_THREADS,
            shared_bytes,
        };
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe {
            kernels
                .module
                .launch_blocks(stream, function, blocks, &product)
        }
    }

    /// Returns the parameters of the products of a matrix with `pairs` vectors: addresses modulo 16 are the same for
    /// all experts.
    fn like(&self, layer: u32, matrix: usize, pairs: u32) -> GemvParameters {
        let shape = self.experts.shape;
        let placed = self.experts.layers[layer as usize][matrix];
        let (rows, columns) = shape_of(shape, matrix);
        let row_bytes = placed.stored.row_bytes(columns).unwrap_or(1);
        GemvParameters {
            weights: placed.offset | (row_bytes * u64::from(rows)),
            row_bytes,
            rows,
            columns,
            tokens: pairs,
            stored: placed.stored as u32,
            ..GemvParameters::default()
        }
    }

    /// # Safety
    /// `function` takes one `T`, and the memory that its argument names is valid.
    pub(super) unsafe fn launch<T: Copy>(
        &self,
        function: KernelFunction,
        threads: u64,
        argument: &T,
        stream: u64,
    ) -> Result<()> {
        let blocks = threads.div_ceil(BLOCK_THREADS.into()).clamp(1, MOST_BLOCKS);
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe {
            self.kernels
                .module
                .launch_in(stream, function, blocks as u32, BLOCK_THREADS, argument)
        }
    }

    /// Enqueues `work`, which looks experts up and reads them.
    ///
    /// # Errors
    /// Those of `work`: later steps are refused then, because the lookup may run without the reads.
    fn run(
        &self,
        stream: u64,
        work: impl FnOnce(&mut LaunchSequence<'_>) -> Result<()>,
    ) -> Result<PendingRows> {
        if self.is_broken.load(Ordering::Relaxed) {
            return Err(Error::usage(
                "an earlier step of this cache of experts was enqueued in part",
                "make the cache again: experts that it seems to hold may not have been read",
            ));
        }
        let enqueued = LaunchSequence::run(&self.gpu, stream, work);
        if enqueued.is_err() {
            self.is_broken.store(true, Ordering::Relaxed);
        }
        enqueued
    }

    fn check_step(&self, step: &ExpertStep) -> Result<()> {
        let is_there = step.layer < self.words.layers && step.tokens <= self.tokens;
        if !is_there {
            return Err(Error::usage(
                format!(
                    "the step of layer {} with {} tokens names a layer or tokens that the cache was not made for",
                    step.layer, step.tokens
                ),
                format!(
                    "use a layer below {}, and {} tokens at most",
                    self.words.layers, self.tokens
                ),
            ));
        }
        let staged = self.memory.staged.as_ref();
        let has_biases = staged.is_some_and(|staged| staged.biases(step.layer).is_some());
        if has_biases && step.biases != [0; MATRICES] {
            return Err(biases_twice());
        }
        if step.given.is_some() && (staged.is_none() || step.probabilities != 0) {
            return Err(Error::usage(
                "choices are given for experts that lie merged in the store, or with probabilities of the logits",
                "open the experts as published files, or give logits",
            ));
        }
        Ok(())
    }
}

impl ExpertKernels {
    pub(super) fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let module = Module::embedded(gpu, EXPERTS_PTX.as_bytes())?;
        Ok(Self {
            route: module.function(kernel::MOE_ROUTE)?,
            admit: module.function(kernel::MOE_ADMIT)?,
            admit_published: module.function(kernel::MOE_ADMIT_PUBLISHED)?,
            arrange: module.function(kernel::MOE_ARRANGE)?,
            settle: module.function(kernel::MOE_SETTLE)?,
            product: module.function(kernel::MOE_PRODUCT)?,
            product_wide: module.function(kernel::MOE_PRODUCT_WIDE)?,
            product_quantised: module.function_with_shared(
                kernel::MOE_PRODUCT_QUANTISED,
                GemvParameters::QUANTISED_SHARED,
            )?,
            product_batched: module.function_with_shared(
                kernel::MOE_PRODUCT_BATCHED,
                GemvParameters::QUANTISED_SHARED,
            )?,
            activate: module.function(kernel::MOE_ACTIVATE)?,
            join: module.function(kernel::MOE_JOIN)?,
            module,
        })
    }
}
