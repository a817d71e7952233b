//! The embedded kernels: compiled by the driver for the GPU at hand, and launched.
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::driver::Gpu;
use super::module::{Function, Module};
use super::stream::Stream;
use crate::error::Result;
use crate::lock::lock;
use nvme_gpu_kernel::work::Launch;
use std::sync::{Arc, Mutex};

/// Registers of [`Kernel::SharedNarrow`]: a quarter of what the compiler takes when it is free to. Four
/// times as many warps fit; what does not is kept in local memory, which costs the bus nothing.
const FEW_REGISTERS: u32 = 64;

/// An entry point of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// One thread per queue: one thread in each block.
    Owner,
    /// One warp per queue.
    Warp,
    /// One block of 128 threads per queue.
    Block,
    /// As [`Owner`](Self::Owner), recording what it does.
    OwnerTraced,
    /// As [`Warp`](Self::Warp), recording what it does.
    WarpTraced,
    /// As [`Block`](Self::Block), recording what it does.
    BlockTraced,
    /// As [`Shared`](Self::Shared), recording what it does.
    SharedTraced,
    /// Any thread on any queue.
    Shared,
    /// The same with shorter passes, compiled for no more than 64 registers per thread: more warps at a
    /// time, each slower.
    SharedNarrow,
    /// Any thread on any queue, several commands each, waited for in reverse.
    Tokens,
    /// Checks data that was read.
    Verify,
    /// Bare limit: 64 bytes, a fence, a flag, an answer of 16 bytes.
    PingPong,
    /// Bare limit: submission queue entries as fast as the link takes them.
    SqeWrites,
}

impl Kernel {
    /// Every one.
    pub const ALL: [Self; 13] = [
        Self::Owner,
        Self::Warp,
        Self::Block,
        Self::OwnerTraced,
        Self::WarpTraced,
        Self::BlockTraced,
        Self::SharedTraced,
        Self::Shared,
        Self::SharedNarrow,
        Self::Tokens,
        Self::Verify,
        Self::PingPong,
        Self::SqeWrites,
    ];

    /// Whether its queues are shared by all threads: results go to cells.
    pub fn shares(self) -> bool {
        matches!(
            self,
            Self::Shared | Self::SharedNarrow | Self::SharedTraced | Self::Tokens
        )
    }

    /// The symbol.
    pub fn name(self) -> &'static str {
        match self {
            Self::Owner => "nvme_owner",
            Self::Warp => "nvme_warp",
            Self::Block => "nvme_block",
            Self::OwnerTraced => "nvme_owner_traced",
            Self::WarpTraced => "nvme_warp_traced",
            Self::BlockTraced => "nvme_block_traced",
            Self::SharedTraced => "nvme_shared_traced",
            Self::Shared => "nvme_shared",
            Self::SharedNarrow => "nvme_shared_narrow",
            Self::Tokens => "nvme_tokens",
            Self::Verify => "nvme_verify",
            Self::PingPong => "nvme_pingpong",
            Self::SqeWrites => "nvme_sqe_writes",
        }
    }
}

/// The kernels, loaded for one GPU.
pub struct Kernels {
    module: Module,
    functions: [Function; Kernel::ALL.len()],
    /// For [`Kernel::SharedNarrow`], compiled when it is first asked for.
    narrow: Mutex<Option<(Arc<Module>, Function)>>,
}

impl Kernels {
    /// Loads the embedded PTX, all kernels at once.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) with the compiler's messages when the driver refuses the
    /// PTX.
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        Self::load_ptx(gpu, nvme_gpu_kernel::PTX)
    }

    /// Loads `ptx`, which has all of [`Kernel::ALL`].
    pub fn load_ptx(gpu: &Arc<Gpu>, ptx: &str) -> Result<Self> {
        let module = Module::load(gpu, ptx.as_bytes())?;
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

    /// The shared kernel in few registers.
    fn narrow(&self) -> Result<(Arc<Module>, Function)> {
        let mut narrow = lock(&self.narrow);
        if let Some((module, function)) = &*narrow {
            return Ok((Arc::clone(module), *function));
        }
        let ptx = nvme_gpu_kernel::PTX.as_bytes();
        let module = Arc::new(Module::load_within(self.gpu(), ptx, Some(FEW_REGISTERS))?);
        let function = module.function(Kernel::SharedNarrow.name())?;
        *narrow = Some((Arc::clone(&module), function));
        Ok((module, function))
    }

    /// The GPU that they are loaded for.
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

    /// Puts `kernel` into `stream`: `grid` blocks of `block` threads. Returns before it runs.
    ///
    /// # Safety
    /// Every address in `launch` is valid on the GPU, for what the kernel does with it, until the
    /// stream is done.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) with the driver's answer.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        kernel: Kernel,
        grid: u32,
        block: u32,
        launch: &Launch,
    ) -> Result<()> {
        if kernel == Kernel::SharedNarrow {
            let (module, function) = self.narrow()?;
            // SAFETY: as below.
            return unsafe { module.launch(stream, function, grid, block, launch) };
        }
        let function = self.functions[kernel as usize];
        // SAFETY: the kernels take one `Launch` by value; the caller vouches for the addresses in it.
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
