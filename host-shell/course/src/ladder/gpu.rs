//! Launches of the rungs.
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::{MatmulOperands, MatmulStep, MatrixElement, MatrixOperand};
use nvme_compute::extents::spread;
use nvme_compute_kernel::matmul::{PTX, SM90A_PTX, TiledMatmul, WGMMA, WGMMA_DEPTH};
use nvme_host::cuda::{
    Gpu, HalfMatrix, KernelArgument as Memory, KernelFunction, LaunchSize, Module,
};
use nvme_host::{Error, Result};
use std::sync::Arc;

/// The GPU that `wgmma` is for.
const HOPPER: (i32, i32) = (9, 0);
/// The rungs of [`PTX`].
const PLAIN: [MatmulStep; 5] = [
    MatmulStep::Naive,
    MatmulStep::Tiled,
    MatmulStep::Vectorized,
    MatmulStep::Coarsened,
    MatmulStep::Mma,
];

/// The rungs, loaded for one GPU.
///
/// The kernels stay loaded when this is dropped: a launch in progress, or a graph, may still run them.
pub struct MatmulLadder {
    gpu: Arc<Gpu>,
    module: Module,
    functions: [KernelFunction; PLAIN.len()],
    /// The kernels with wgmma, on GPUs that have it.
    wgmma: Option<(Module, KernelFunction)>,
    multiprocessors: u32,
}

impl MatmulLadder {
    /// Loads the kernels.
    ///
    /// # Errors
    /// The errors of [`Module::embedded`].
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let module = Module::embedded(gpu, PTX.as_bytes())?;
        let function =
            |rung: MatmulStep| module.function_with_shared(rung.symbol(), rung.tile().shared_bytes);
        let functions = [
            function(PLAIN[0])?,
            function(PLAIN[1])?,
            function(PLAIN[2])?,
            function(PLAIN[3])?,
            function(PLAIN[4])?,
        ];
        let wgmma = match gpu.capability()? == HOPPER {
            true => {
                let module = Module::embedded(gpu, SM90A_PTX.as_bytes())?;
                let symbol = MatmulStep::Wgmma.symbol();
                let function = module.function_with_shared(symbol, WGMMA.shared_bytes)?;
                Some((module, function))
            }
            false => None,
        };
        Ok(Self {
            multiprocessors: gpu.multiprocessors()?,
            gpu: Arc::clone(gpu),
            functions,
            module,
            wgmma,
        })
    }

    /// Returns the GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// True if this GPU supports `rung`: [`MatmulStep::Wgmma`] needs compute capability 9.0.
    pub fn has(&self, rung: MatmulStep) -> bool {
        rung != MatmulStep::Wgmma || self.wgmma.is_some()
    }

    /// Registers and bytes of local memory of a thread, as compiled for this GPU.
    ///
    /// # Errors
    /// The errors of [`Module::cost`], and [`Error::Environment`] for a rung that this GPU does not support.
    pub fn cost(&self, rung: MatmulStep) -> Result<(u32, u32)> {
        let (module, function) = self.function(rung)?;
        module.cost(function)
    }

    /// Returns the rung whose kernel computes `product` when `rung` is asked for: [`MatmulStep::Mma`] in place of
    /// [`MatmulStep::Wgmma`] where TMA cannot address the factors, because an address or a row is no multiple of 16
    /// bytes, or there are no terms.
    pub fn kernel(&self, rung: MatmulStep, product: &MatmulOperands) -> MatmulStep {
        let (a, b) = factors(product);
        match rung {
            MatmulStep::Wgmma if !(a.fits() && b.fits()) => MatmulStep::Mma,
            rung => rung,
        }
    }

    /// Enqueues `product` in `stream`, a `CUstream` of this GPU or 0, and returns before it runs. The stream may be
    /// captured.
    ///
    /// Any `m`, `n` and `k`, any stride and any address of whole elements are valid; the product is fast if rows begin
    /// at multiples of 16 bytes. The bits of the result are the same each time.
    ///
    /// # Safety
    /// The three matrices are valid on the GPU until the product has ended, and for as long as a graph that captured it may
    /// be launched; `c` overlaps neither factor, and nothing else writes them meanwhile.
    ///
    /// # Errors
    /// The errors of [`MatmulOperands::check`]; [`Error::Environment`] for a rung that this GPU does not support;
    /// [`Error::Device`] with the driver's answer.
    pub unsafe fn matmul(
        &self,
        rung: MatmulStep,
        product: &MatmulOperands,
        stream: u64,
    ) -> Result<()> {
        product.check(rung)?;
        self.function(rung)?;
        let rung = self.kernel(rung, product);
        let tile = rung.tile();
        let tiles = tile.count(product.m, product.n) as u32;
        if tiles == 0 {
            return Ok(());
        }
        self.judge(product, stream)?;
        let (module, function) = self.function(rung)?;
        let blocks = LaunchSize {
            count: match rung {
                MatmulStep::Wgmma => tiles.min(self.multiprocessors),
                _ => tiles,
            },
            threads: tile.threads,
            shared_bytes: tile.shared_bytes,
        };
        if rung != MatmulStep::Wgmma {
            // SAFETY: the kernel takes one `MatmulOperands` and stays loaded; the caller vouches for the matrices.
            return unsafe { module.launch_blocks(stream, function, blocks, &product.argument()) };
        }
        let (a, b) = factors(product);
        let tiled = TiledMatmul {
            a_map: a.map(&self.gpu, tile.rows, WGMMA_DEPTH)?,
            b_map: b.map(&self.gpu, WGMMA_DEPTH, 64)?,
            job: product.argument(),
            tiles,
            reserved: 0,
        };
        // SAFETY: as above, with one `TiledMatmul`.
        unsafe { module.launch_blocks(stream, function, blocks, &tiled) }
    }

    /// # Errors
    /// [`Error::Usage`] for memory that the GPU cannot access as the kernel does.
    fn judge(&self, product: &MatmulOperands, stream: u64) -> Result<()> {
        let MatmulOperands { m, n, k, .. } = *product;
        let elements = |operand: &MatrixOperand, rows: u32, columns: u32| match columns {
            0 => 0,
            _ => spread(rows, operand.stride, columns.into()),
        };
        let (a, b, c) = (&product.a, &product.b, &product.c);
        let (factor, result) = (product.factors.bytes(), product.result.bytes());
        let all = [
            Memory::read("a", a.address, elements(a, m, k), factor),
            Memory::read("b", b.address, elements(b, k, n), factor),
            Memory::written("c", c.address, elements(c, m, n), result),
        ];
        self.gpu.judge_list(stream, all)?;
        let is_dense = |operand: &MatrixOperand, rows: u32, columns: u32| {
            rows < 2 || operand.stride <= columns.into()
        };
        let [of_a, of_b, of_c] = all;
        Memory::check_apart(&[
            of_a.if_dense(is_dense(a, m, k)),
            of_b.if_dense(is_dense(b, k, n)),
            of_c.if_dense(is_dense(c, m, n)),
        ])
    }

    fn function(&self, rung: MatmulStep) -> Result<(&Module, KernelFunction)> {
        if let Some(index) = PLAIN.iter().position(|plain| *plain == rung) {
            return Ok((&self.module, self.functions[index]));
        }
        let Some((module, function)) = &self.wgmma else {
            return Err(Error::environment(
                format!("{} has no wgmma", self.gpu.describe()),
                "use the rung mma, or a GPU of compute capability 9.0",
            ));
        };
        Ok((module, *function))
    }
}

/// Returns the factors, as TMA would read them.
fn factors(product: &MatmulOperands) -> (HalfMatrix, HalfMatrix) {
    let of = |operand: &super::MatrixOperand, rows, columns| HalfMatrix {
        address: operand.address,
        rows,
        columns,
        row_bytes: operand.stride.saturating_mul(2),
        is_bf16: product.factors == MatrixElement::Bf16,
    };
    (
        of(&product.a, product.m, product.k),
        of(&product.b, product.k, product.n),
    )
}
