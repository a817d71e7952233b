//! The embedded kernels: the driver compiles their PTX for the GPU at hand when they are loaded. The kernel over
//! shared queues also exists with few registers, so that more of its warps fit onto the GPU.
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::driver::Gpu;
use super::module::{KernelFunction, Module};
use super::stream::Stream;
use nvme_driver::error::Result;
use nvme_driver::lock::lock;
pub use nvme_gpu_kernel::Kernel;
use nvme_gpu_kernel::work::LaunchArguments;
use std::sync::{Arc, Mutex};

/// Registers of [`Kernel::SharedNarrow`]: a quarter of the number that the compiler would choose. Four times as
/// many warps fit onto a multiprocessor; further values are spilled to local memory, which costs the bus
/// nothing.
const FEW_REGISTERS: u32 = 64;

/// The kernels, loaded for one GPU.
pub struct QueueKernels {
    module: Module,
    functions: [KernelFunction; Kernel::ALL.len()],
    /// Module and function of [`Kernel::SharedNarrow`], compiled when it is first used.
    narrow: Mutex<Option<(Arc<Module>, KernelFunction)>>,
}

impl QueueKernels {
    /// Loads the embedded PTX, all kernels at once.
    ///
    /// # Errors
    /// [`Error::Device`](nvme_driver::Error::Device) with the compiler's messages when the driver refuses the
    /// PTX.
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let module = Module::of_image(gpu, &nvme_gpu_kernel::KERNELS)?;
        let mut functions = [module.function(Kernel::Owner.name())?; Kernel::ALL.len()];
        for kernel in Kernel::ALL {
            functions[kernel as usize] = module.function(kernel.name())?;
        }
        Ok(Self {
            module,
            functions,
            narrow: Mutex::default(),
        })
    }

    /// Returns the shared kernel in few registers.
    fn narrow(&self) -> Result<(Arc<Module>, KernelFunction)> {
        let mut narrow = lock(&self.narrow);
        if let Some((module, function)) = &*narrow {
            return Ok((Arc::clone(module), *function));
        }
        let ptx = nvme_gpu_kernel::PTX.as_bytes();
        let module = Arc::new(Module::embedded_within(
            self.gpu(),
            ptx,
            Some(FEW_REGISTERS),
        )?);
        let function = module.function(Kernel::SharedNarrow.name())?;
        *narrow = Some((Arc::clone(&module), function));
        Ok((module, function))
    }

    /// Returns the GPU that they are loaded for.
    pub fn gpu(&self) -> &Arc<Gpu> {
        self.module.gpu()
    }

    /// Registers per thread and bytes of local memory per thread, as compiled for this GPU.
    pub fn cost(&self, kernel: Kernel) -> Result<(u32, u32)> {
        if kernel == Kernel::SharedNarrow {
            let (module, function) = self.narrow()?;
            return module.cost(function);
        }
        self.module.cost(self.functions[kernel as usize])
    }

    /// Enqueues `kernel` in `stream`: `grid` blocks of `block` threads. Returns before it runs.
    ///
    /// # Safety
    /// Every address in `launch` is valid on the GPU, for the accesses of the kernel, until the stream is done.
    ///
    /// # Errors
    /// [`Error::Device`](nvme_driver::Error::Device) with the driver's answer.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        kernel: Kernel,
        grid: u32,
        block: u32,
        launch: &LaunchArguments,
    ) -> Result<()> {
        if kernel == Kernel::SharedNarrow {
            let (module, function) = self.narrow()?;
            // SAFETY: as below.
            return unsafe { module.launch(stream, function, grid, block, launch) };
        }
        let function = self.functions[kernel as usize];
        // SAFETY: the kernels take one `LaunchArguments` by value, and the functions were loaded by the names of these
        // kernels. The caller vouches for the addresses in it, which the GPU uses after this returns.
        unsafe { self.module.launch(stream, function, grid, block, launch) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_numbered_as_they_are_listed() {
        for (index, kernel) in Kernel::ALL.into_iter().enumerate() {
            assert_eq!(kernel as usize, index);
        }
    }
}
