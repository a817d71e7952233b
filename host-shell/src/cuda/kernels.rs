//! The embedded kernels: compiled by the driver for the GPU at hand, and launched.
// UNSAFETY: calls into the CUDA driver library with handles and launch parameters.
#![allow(unsafe_code)]

use super::driver::{Gpu, check};
use super::stream::Stream;
use crate::error::{Error, Result};
use cudarc::driver::sys::{self, CUfunction_attribute as Attribute, CUresult};
use nvme_gpu_kernel::work::Launch;
use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

/// Bytes of the compiler's messages that are kept.
const LOG_BYTES: usize = 8192;

/// An entry point of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// One thread per queue: one thread in each block.
    Owner,
    /// One warp per queue.
    Warp,
    /// One block of 128 threads per queue.
    Block,
    /// Any thread on any queue.
    Shared,
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
    pub const ALL: [Self; 8] = [
        Self::Owner,
        Self::Warp,
        Self::Block,
        Self::Shared,
        Self::Tokens,
        Self::Verify,
        Self::PingPong,
        Self::SqeWrites,
    ];

    /// The symbol.
    pub fn name(self) -> &'static str {
        match self {
            Self::Owner => "nvme_owner",
            Self::Warp => "nvme_warp",
            Self::Block => "nvme_block",
            Self::Shared => "nvme_shared",
            Self::Tokens => "nvme_tokens",
            Self::Verify => "nvme_verify",
            Self::PingPong => "nvme_pingpong",
            Self::SqeWrites => "nvme_sqe_writes",
        }
    }
}

/// The kernels, loaded for one GPU.
pub struct Kernels {
    gpu: Arc<Gpu>,
    module: sys::CUmodule,
    functions: [sys::CUfunction; Kernel::ALL.len()],
}

// SAFETY: module and function handles may be used from any thread.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Loads the embedded PTX: all kernels at once, since one that is loaded when it is first
    /// launched can wait forever behind one that runs.
    ///
    /// # Errors
    /// [`Error::Device`] with the compiler's messages when the driver refuses the PTX.
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        Self::load_ptx(gpu, nvme_gpu_kernel::PTX)
    }

    /// Loads `ptx`, which has all of [`Kernel::ALL`].
    pub fn load_ptx(gpu: &Arc<Gpu>, ptx: &str) -> Result<Self> {
        let module = compile(gpu, ptx)?;
        let mut kernels = Self {
            gpu: Arc::clone(gpu),
            module,
            functions: [null_mut(); Kernel::ALL.len()],
        };
        for kernel in Kernel::ALL {
            kernels.functions[kernel as usize] = kernels.function(kernel.name())?;
        }
        Ok(kernels)
    }

    /// The GPU that they are loaded for.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    fn function(&self, name: &str) -> Result<sys::CUfunction> {
        let symbol = text(name)?;
        let mut function = null_mut();
        // SAFETY: our own module; the symbol is terminated; writes one handle.
        check(name, unsafe {
            sys::cuModuleGetFunction(&mut function, self.module, symbol.as_ptr())
        })?;
        // Asking for an attribute loads the kernel, whatever CUDA_MODULE_LOADING says.
        attribute(function, Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?;
        Ok(function)
    }

    /// Registers per thread and bytes of local memory per thread, as compiled for this GPU.
    pub fn cost(&self, kernel: Kernel) -> Result<(u32, u32)> {
        self.gpu.bind()?;
        let function = self.functions[kernel as usize];
        let registers = attribute(function, Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?;
        let local = attribute(function, Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?;
        Ok((registers as u32, local as u32))
    }

    /// Puts `kernel` into `stream`: `grid` blocks of `block` threads. Returns before it runs.
    ///
    /// # Safety
    /// Every address in `launch` is valid on the GPU, for what the kernel does with it, until the
    /// stream is done.
    ///
    /// # Errors
    /// [`Error::Device`] with the driver's answer.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        kernel: Kernel,
        grid: u32,
        block: u32,
        launch: &Launch,
    ) -> Result<()> {
        self.gpu.bind()?;
        let mut parameters = [std::ptr::from_ref(launch).cast_mut().cast::<c_void>()];
        // SAFETY: the kernels take one `Launch` by value, which the driver copies before it returns;
        // the caller vouches for the addresses in it.
        check(kernel.name(), unsafe {
            sys::cuLaunchKernel(
                self.functions[kernel as usize],
                grid,
                1,
                1,
                block,
                1,
                1,
                0,
                stream.raw(),
                parameters.as_mut_ptr(),
                null_mut(),
            )
        })
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: loaded in `compile`, unloaded once.
            let _ = unsafe { sys::cuModuleUnload(self.module) };
        }
    }
}

fn attribute(function: sys::CUfunction, which: Attribute) -> Result<i32> {
    let mut value = 0;
    // SAFETY: a function of a loaded module; writes one integer.
    check("cuFuncGetAttribute", unsafe {
        sys::cuFuncGetAttribute(&mut value, which, function)
    })?;
    Ok(value)
}

fn text(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::device("the PTX has a zero byte", "build it again"))
}

fn compile(gpu: &Gpu, ptx: &str) -> Result<sys::CUmodule> {
    gpu.bind()?;
    let text = text(ptx)?;
    let mut log = vec![0u8; LOG_BYTES];
    let mut options = [
        sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
        sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
    ];
    let mut values = [
        log.as_mut_ptr().cast::<c_void>(),
        std::ptr::without_provenance_mut(log.len()),
    ];
    let mut module = null_mut();
    // SAFETY: both arrays have the two entries named, and the log outlives the call.
    let result = unsafe {
        sys::cuModuleLoadDataEx(
            &mut module,
            text.as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    if result == CUresult::CUDA_SUCCESS {
        return Ok(module);
    }
    check("cuModuleLoadDataEx", result).map_err(|error| {
        let messages = one_line(&String::from_utf8_lossy(&log));
        match messages.is_empty() {
            true => error,
            false => Error::device(
                format!("the driver refuses the kernels: {error}: {messages}"),
                error.remedy(),
            ),
        }
    })?;
    Ok(module)
}

/// The messages up to the first zero byte, on one line.
fn one_line(log: &str) -> String {
    let end = log.find('\0').unwrap_or(log.len());
    let lines = log[..end].lines().map(str::trim);
    lines
        .filter(|line| !line.is_empty())
        .collect::<Vec<_>>()
        .join("; ")
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

    #[test]
    fn the_compilers_log_becomes_one_line() {
        let log = "ptxas a, line 3; error : no\n\n  ptxas fatal : aborted\n\0\0garbage";
        assert_eq!(
            one_line(log),
            "ptxas a, line 3; error : no; ptxas fatal : aborted"
        );
    }
}
