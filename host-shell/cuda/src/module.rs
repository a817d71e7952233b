//! Code for the GPU: PTX or a cubin, loaded by the driver, and launches of the kernels in it. Kernels are loaded
//! eagerly, because one that is loaded at its first launch waits for kernels that are running, possibly forever.
//!
//! An image that is part of the program is loaded once for a context and is never unloaded: unloading waits for the
//! whole GPU, and of the memory that loading a kernel takes (about 1 MiB) the driver gives only a part back.
// UNSAFETY: calls into the CUDA driver library with handles and launch parameters.
#![allow(unsafe_code)]

use super::driver::{Gpu, check};
use super::stream::{Stream, handle};
use cudarc::driver::sys::{self, CUfunction_attribute as Attribute, CUresult};
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use nvme_gpu_kernel::{CodeEntry, KernelImage};
use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex};

/// Bytes of the compiler's messages that are kept.
const LOG_BYTES: usize = 8192;

/// An image, loaded for one GPU.
pub struct Module {
    gpu: Arc<Gpu>,
    raw: sys::CUmodule,
    /// True if dropping this unloads the module: an image of the program stays loaded for as long as the GPU's context
    /// lives.
    unloads: bool,
}

/// Names an image that was compiled: the GPU's number, the image's address and length, and the limit of registers.
type ImageKey = (u32, usize, usize, Option<u32>);

/// A module's handle, and the identifier of the context that it was loaded in: when a context is destroyed, so are its
/// modules.
struct LoadedImage {
    context: u64,
    module: usize,
}

/// The images of the program that are loaded. The lock is not held while the driver compiles.
static LOADED: Mutex<BTreeMap<ImageKey, LoadedImage>> = Mutex::new(BTreeMap::new());

/// Held while a kernel's limit of shared memory is read and raised.
static SHARED_LIMIT: Mutex<()> = Mutex::new(());

/// Size of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchSize {
    /// Number of blocks.
    pub count: u32,
    /// Threads of each.
    pub threads: u32,
    /// Bytes of dynamic shared memory of each block, besides the kernel's static shared memory: see
    /// [`Module::function_with_shared`].
    pub shared_bytes: u32,
}

/// A kernel of a [`Module`].
#[derive(Clone, Copy, Debug)]
pub struct KernelFunction(sys::CUfunction, u32);

impl KernelFunction {
    /// Returns the number of registers of a thread, as compiled for this GPU.
    pub fn registers(self) -> u32 {
        self.1
    }
}

// SAFETY: module handles may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}
// SAFETY: as above, for function handles.
unsafe impl Send for KernelFunction {}
// SAFETY: as above.
unsafe impl Sync for KernelFunction {}

impl Module {
    /// Loads PTX, which the driver compiles for this GPU, or a cubin for it. Unloaded on drop, which waits until no
    /// kernel runs on the GPU.
    ///
    /// # Errors
    /// [`Error::Device`] with the compiler's messages when the driver refuses the image.
    pub fn load(gpu: &Arc<Gpu>, image: &[u8]) -> Result<Self> {
        Ok(Self {
            gpu: Arc::clone(gpu),
            raw: load_image(gpu, image, None)?,
            unloads: true,
        })
    }

    /// Returns an image of the program, loaded by [`load`](Self::load) unless this context has it already. It stays
    /// loaded when this is dropped: launches in progress, and graphs, may still run its kernels.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn embedded(gpu: &Arc<Gpu>, image: &'static [u8]) -> Result<Self> {
        Self::embedded_within(gpu, image, None)
    }

    /// Loads an image as [`embedded`](Self::embedded) does: its machine code, if `image` has some that this GPU's
    /// driver takes, else its PTX, which takes seconds.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn of_image(gpu: &Arc<Gpu>, image: &'static KernelImage) -> Result<Self> {
        let (major, minor) = gpu.capability()?;
        match image.code_for((10 * major + minor) as u32) {
            Some(entry) => Self::of_code(gpu, &entry)
                // A driver that is older than the assembler refuses its format.
                .or_else(|_| Self::embedded(gpu, image.ptx.as_bytes())),
            None => Self::embedded(gpu, image.ptx.as_bytes()),
        }
    }

    fn of_code(gpu: &Arc<Gpu>, entry: &CodeEntry) -> Result<Self> {
        Self::once(gpu, entry.compressed, None, || {
            load_image(gpu, &inflated(entry)?, None)
        })
    }

    /// Loads with at most `registers` registers per thread; further values are spilled to memory.
    pub(super) fn embedded_within(
        gpu: &Arc<Gpu>,
        image: &'static [u8],
        registers: Option<u32>,
    ) -> Result<Self> {
        Self::once(gpu, image, registers, || load_image(gpu, image, registers))
    }

    /// Returns the module that `load` makes of `image`, or made before in this context.
    fn once(
        gpu: &Arc<Gpu>,
        image: &'static [u8],
        registers: Option<u32>,
        load: impl FnOnce() -> Result<sys::CUmodule>,
    ) -> Result<Self> {
        let context = gpu.context_identifier()?;
        let key = (gpu.index(), image.as_ptr().addr(), image.len(), registers);
        let found = |loaded: &BTreeMap<ImageKey, LoadedImage>| {
            let image = loaded.get(&key).filter(|image| image.context == context)?;
            Some(std::ptr::with_exposed_provenance_mut(image.module))
        };
        let known = found(&lock(&LOADED));
        let raw = match known {
            Some(raw) => raw,
            None => {
                let compiled = load()?;
                let mut loaded = lock(&LOADED);
                // If another thread was faster, its module is used, and this one stays loaded beside it.
                found(&loaded).unwrap_or_else(|| {
                    let module = compiled.expose_provenance();
                    loaded.insert(key, LoadedImage { context, module });
                    compiled
                })
            }
        };
        Ok(Self {
            gpu: Arc::clone(gpu),
            raw,
            unloads: false,
        })
    }

    /// Returns the GPU that it is loaded for.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Returns the kernel `name`, and loads it now: a kernel that is loaded at its first launch can wait forever behind
    /// one that runs.
    ///
    /// # Errors
    /// [`Error::Device`] when the image has no such kernel.
    pub fn function(&self, name: &str) -> Result<KernelFunction> {
        let _guest = self.gpu.enter()?;
        let symbol = CString::new(name)
            .map_err(|_| Error::usage("the kernel's name has a zero byte", "name it otherwise"))?;
        let mut function = null_mut();
        // SAFETY: the module is our own; the symbol is terminated; the call writes one handle.
        check(name, unsafe {
            sys::cuModuleGetFunction(&mut function, self.raw, symbol.as_ptr())
        })?;
        // Asking for an attribute loads the kernel, whatever CUDA_MODULE_LOADING says.
        let registers = attribute(function, Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?;
        Ok(KernelFunction(function, registers as u32))
    }

    /// Returns the kernel for launches whose blocks have up to `bytes` bytes of dynamic shared
    /// memory, besides the kernel's own.
    ///
    /// # Errors
    /// As [`function`](Self::function), and [`Error::Device`] for more than a multiprocessor of this GPU has.
    pub fn function_with_shared(&self, name: &str, bytes: u32) -> Result<KernelFunction> {
        let function = self.function(name)?;
        let _guest = self.gpu.enter()?;
        let limit = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = bytes.try_into().unwrap_or(i32::MAX);
        let _turn = lock(&SHARED_LIMIT);
        // The kernel is shared by all users of the module, so that its limit is only ever raised.
        if attribute(function.0, limit)? < bytes {
            // SAFETY: the function belongs to a loaded module.
            check(name, unsafe {
                sys::cuFuncSetAttribute(function.0, limit, bytes)
            })?;
        }
        Ok(function)
    }

    /// Registers per thread and bytes of local memory per thread, as compiled for this GPU.
    pub fn cost(&self, function: KernelFunction) -> Result<(u32, u32)> {
        let _guest = self.gpu.enter()?;
        let registers = attribute(function.0, Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?;
        let local = attribute(function.0, Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?;
        Ok((registers as u32, local as u32))
    }

    /// Returns the number of blocks of `threads` threads and `shared_bytes` bytes of dynamic shared memory that
    /// are resident on the GPU together.
    ///
    /// # Errors
    /// [`Error::Device`] with the driver's answer.
    pub fn blocks_at_a_time(
        &self,
        function: KernelFunction,
        threads: u32,
        shared_bytes: u32,
    ) -> Result<u32> {
        let _guest = self.gpu.enter()?;
        let mut blocks = 0;
        // SAFETY: a function of our own module; the call writes one integer.
        check("cuOccupancyMaxActiveBlocksPerMultiprocessor", unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                function.0,
                threads as i32,
                shared_bytes as usize,
            )
        })?;
        Ok(blocks as u32 * self.gpu.multiprocessors()?)
    }

    /// Enqueues `function` in `stream`: `grid` blocks of `block` threads. Returns before it runs.
    ///
    /// # Safety
    /// `function` belongs to `module` and takes one `T` by value; the kernel's accesses by the addresses in `argument`
    /// are valid on the GPU until the stream is done.
    ///
    /// # Errors
    /// [`Error::Device`] with the driver's answer.
    pub unsafe fn launch<T: Copy>(
        &self,
        stream: &Stream,
        function: KernelFunction,
        grid: u32,
        block: u32,
        argument: &T,
    ) -> Result<()> {
        let _guest = self.gpu.enter()?;
        let grid = LaunchSize::plain(grid, block);
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { launch(stream.raw(), function, grid, argument) }
    }

    /// Launches as [`launch`](Self::launch) does, in any stream `stream`, a `CUstream` of this
    /// module's GPU.
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub unsafe fn launch_in<T: Copy>(
        &self,
        stream: u64,
        function: KernelFunction,
        grid: u32,
        block: u32,
        argument: &T,
    ) -> Result<()> {
        let _guest = self.gpu.enter()?;
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.launch_on(stream, function, LaunchSize::plain(grid, block), argument) }
    }

    /// Launches with dynamic shared memory: `function` was returned by
    /// [`function_with_shared`](Self::function_with_shared).
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub unsafe fn launch_blocks<T: Copy>(
        &self,
        stream: u64,
        function: KernelFunction,
        grid: LaunchSize,
        argument: &T,
    ) -> Result<()> {
        let _guest = self.gpu.enter()?;
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { launch(handle(stream), function, grid, argument) }
    }

    /// Launches as [`launch`](Self::launch) does, in the stream `stream` of the calling thread's
    /// context, a `CUstream`.
    ///
    /// # Safety
    /// As [`launch`](Self::launch); the context is the one that this module is loaded for.
    pub(super) unsafe fn launch_on<T: Copy>(
        &self,
        stream: u64,
        function: KernelFunction,
        grid: LaunchSize,
        argument: &T,
    ) -> Result<()> {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { launch(handle(stream), function, grid, argument) }
    }
}

impl LaunchSize {
    pub(super) fn plain(blocks: u32, threads: u32) -> Self {
        Self {
            count: blocks,
            threads,
            shared_bytes: 0,
        }
    }
}

/// # Safety
/// As [`Module::launch`].
unsafe fn launch<T: Copy>(
    stream: sys::CUstream,
    function: KernelFunction,
    grid: LaunchSize,
    argument: &T,
) -> Result<()> {
    let mut parameters = [std::ptr::from_ref(argument).cast_mut().cast::<c_void>()];
    // SAFETY: the caller vouches for kernel and argument: the kernel takes one value of this type. The driver
    // copies the argument before it returns, so the reference need not outlive the call.
    check("cuLaunchKernel", unsafe {
        sys::cuLaunchKernel(
            function.0,
            grid.count,
            1,
            1,
            grid.threads,
            1,
            1,
            grid.shared_bytes,
            stream,
            parameters.as_mut_ptr(),
            null_mut(),
        )
    })
}

impl Drop for Module {
    fn drop(&mut self) {
        if !self.unloads {
            return;
        }
        if let Ok(_guest) = self.gpu.enter() {
            // SAFETY: it was loaded in `compile`, unloaded once.
            let _ = unsafe { sys::cuModuleUnload(self.raw) };
        }
    }
}

fn attribute(function: sys::CUfunction, which: Attribute) -> Result<i32> {
    let mut value = 0;
    // SAFETY: a function of a loaded module; the call writes one integer.
    check("cuFuncGetAttribute", unsafe {
        sys::cuFuncGetAttribute(&mut value, which, function)
    })?;
    Ok(value)
}

fn load_image(gpu: &Gpu, image: &[u8], registers: Option<u32>) -> Result<sys::CUmodule> {
    let _guest = gpu.enter()?;
    // PTX has to end in a zero byte; a cubin contains its length.
    let mut text = image.to_vec();
    text.push(0);
    let mut log = vec![0u8; LOG_BYTES];
    let mut options = vec![
        sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
        sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
    ];
    let mut values = vec![
        log.as_mut_ptr().cast::<c_void>(),
        std::ptr::without_provenance_mut(log.len()),
    ];
    if let Some(registers) = registers {
        options.push(sys::CUjit_option::CU_JIT_MAX_REGISTERS);
        values.push(std::ptr::without_provenance_mut(registers as usize));
    }
    let mut module = null_mut();
    // SAFETY: both lists have the same number of entries, and the log outlives the call.
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
            false => Error::environment(
                format!("the driver refuses the kernels: {error}: {messages}"),
                error.remedy(),
            ),
        }
    })?;
    Ok(module)
}

/// Returns the machine code of `entry`.
fn inflated(entry: &CodeEntry) -> Result<Vec<u8>> {
    let code =
        miniz_oxide::inflate::decompress_to_vec_zlib_with_limit(entry.compressed, entry.bytes);
    let code = code.ok().filter(|code| code.len() == entry.bytes);
    code.ok_or_else(|| {
        let what = format!("the machine code for sm_{} is damaged", entry.capability);
        Error::environment(what, "install the program again")
    })
}

/// Returns the messages up to the first zero byte, on one line.
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
    fn machine_code_is_for_the_gpu_that_its_entry_names() {
        use nvme_gpu_kernel::{HASH, KERNELS, MAPPED, ROWS, SCATTER};
        for image in [&KERNELS, &ROWS, &MAPPED, &SCATTER, &HASH] {
            for entry in image.entries() {
                let code = inflated(&entry).unwrap();
                assert_eq!((&code[..4], code[18]), (&b"\x7fELF"[..], 190));
                // `e_flags` of version 8 of the format.
                assert_eq!(u32::from(code[49]), entry.capability);
            }
        }
    }

    #[test]
    fn damaged_machine_code_is_an_error() {
        let entry = nvme_gpu_kernel::HASH.code_for(90).unwrap();
        let cut = CodeEntry {
            compressed: &entry.compressed[..entry.compressed.len() / 2],
            ..entry
        };
        let longer = CodeEntry {
            bytes: entry.bytes + 1,
            ..entry
        };
        for damaged in [cut, longer] {
            let error = inflated(&damaged).unwrap_err().to_string();
            assert_eq!(error, "the machine code for sm_90 is damaged");
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
