//! The CUDA driver and one GPU of it: found, checked and opened, with one clear error for each step that can fail.
//! The library is loaded at run time, so that the same program runs on machines without a GPU.
// UNSAFETY: calls into the CUDA driver library.
#![allow(unsafe_code)]

use super::batch_copy::BatchCopy;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};
use nvme_driver::error::{Error, Result};
use std::ffi::CStr;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// CUDA 12.2, whose driver is the first to know PTX 8.2: see `nvme-gpu-kernel`.
const OLDEST_DRIVER: i32 = 12_020;
/// Compute capability that the kernels are built for.
const OLDEST_GPU: (i32, i32) = (8, 0);

/// Readers of a GPU's memory that see writes of other PCIe devices in order, without a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOrder {
    /// No reader: a completion in host memory may be seen before the data in GPU memory.
    None,
    /// The GPU that owns the memory.
    Owner,
    /// Every GPU.
    All,
}

/// Properties of a GPU that the driver reports without a context on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuFacts {
    /// Number of the GPU in the driver's order.
    pub index: u32,
    /// Name of the GPU.
    pub name: String,
    /// PCI address of the GPU: 0000:01:00.0.
    pub address: String,
    /// Major and minor number of its compute capability.
    pub capability: (i32, i32),
    /// Version of CUDA that the driver supports: 12.8.
    pub cuda: String,
    /// Value of GPU_DIRECT_RDMA_WRITES_ORDERING: 0 none, 100 owner, 200 all devices.
    pub writes_ordering: i32,
    /// Value of GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: bit 0 the host, bit 1 memory operations of streams.
    pub flush_options: i32,
    /// GPU_DIRECT_RDMA_SUPPORTED: true if the API of nvidia-peermem works.
    pub rdma: bool,
    /// DMA_BUF_SUPPORTED.
    pub dma_buf: bool,
    /// INTEGRATED: the GPU has no memory but the host's.
    pub integrated: bool,
    /// PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES: the GPU reads memory of the host as the processor does.
    pub host_page_tables: bool,
}

impl GpuFacts {
    /// Asks the driver about every GPU.
    ///
    /// # Errors
    /// [`Error::Environment`] without a driver or a GPU, and with the driver's answer.
    pub fn all() -> Result<Vec<Self>> {
        let cuda = version(loaded_driver()?);
        let mut all = vec![Self::of(0, &cuda)?];
        for index in 1..device_count()? {
            all.push(Self::of(index, &cuda)?);
        }
        Ok(all)
    }

    fn of(index: u32, cuda: &str) -> Result<Self> {
        use Attribute as A;
        let device = device(index)?;
        let of = |which| attribute(device, which);
        Ok(Self {
            index,
            name: name_of(device)?,
            address: format!(
                "{:04x}:{:02x}:{:02x}.0",
                of(A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
                of(A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
                of(A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?
            ),
            capability: (
                of(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                of(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            cuda: cuda.to_owned(),
            writes_ordering: of(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)?,
            flush_options: of(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)?,
            rdma: of(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)? != 0,
            dma_buf: of(A::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)? != 0,
            integrated: of(A::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0,
            host_page_tables: of(
                A::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
            )? != 0,
        })
    }
}

/// A GPU, opened. Clones of the `Arc` share it; its context ends with the last one.
#[derive(Debug)]
pub struct Gpu {
    index: u32,
    device: sys::CUdevice,
    context: sys::CUcontext,
    name: String,
    driver: i32,
    batch_copy: Option<BatchCopy>,
    /// True once a kernel did not end: memory that it may use is never freed, because freeing would wait for the
    /// kernel.
    lost: AtomicBool,
}

// SAFETY: context handles of the CUDA driver may be used from any thread; which context is current is a
// property of the calling thread, and `enter` sets it for each call.
unsafe impl Send for Gpu {}
// SAFETY: as above; the driver locks for itself.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// Opens GPU `index`, counted from 0 as the driver does (`CUDA_VISIBLE_DEVICES` applies).
    ///
    /// # Errors
    /// [`Error::Device`] without a driver, with one older than CUDA 12.2, without a GPU of compute
    /// capability 8.0 or later, or when the GPU cannot be used now; [`Error::Usage`] for an index that
    /// does not exist.
    pub fn open(index: u32) -> Result<Arc<Self>> {
        let driver = loaded_driver()?;
        let device = device(index)?;
        let name = name_of(device)?;
        check_capability(index, &name, device)?;
        let mut context = null_mut();
        // SAFETY: the call writes one handle; released on drop.
        check("cuDevicePrimaryCtxRetain", unsafe {
            sys::cuDevicePrimaryCtxRetain(&mut context, device)
        })?;
        Ok(Arc::new(Self {
            index,
            device,
            context,
            name,
            driver,
            batch_copy: BatchCopy::find(),
            lost: AtomicBool::new(false),
        }))
    }

    /// Returns the function for many copies in one call, where the driver has it.
    pub(super) fn batch_copy(&self) -> Option<BatchCopy> {
        self.batch_copy
    }

    /// Returns its number.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Returns its name, as the driver gives it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Describes the GPU in words: name, number and driver.
    pub fn describe(&self) -> String {
        format!(
            "GPU {} ({}), driver for CUDA {}",
            self.index,
            self.name,
            version(self.driver)
        )
    }

    /// Returns the number of streaming multiprocessors.
    pub fn multiprocessors(&self) -> Result<u32> {
        let count = attribute(
            self.device,
            Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        )?;
        Ok(count.max(1) as u32)
    }

    /// Returns its compute capability.
    ///
    /// # Errors
    /// [`Error::Device`] with the driver's answer.
    pub fn capability(&self) -> Result<(i32, i32)> {
        capability(self.device)
    }

    /// Returns the readers that see other devices' writes to this GPU's memory in order.
    pub fn writes_ordering(&self) -> Result<WriteOrder> {
        let value = attribute(
            self.device,
            Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING,
        )?;
        Ok(ordering(value))
    }

    /// True if its memory can be exported as a dma-buf.
    pub fn exports_dma_bufs(&self) -> Result<bool> {
        let value = attribute(
            self.device,
            Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
        )?;
        Ok(value != 0)
    }

    /// True if the GPU's memory is the host's: it has no memory, or its memory is coherent with the processor.
    ///
    /// # Errors
    /// [`Error::Environment`] with the driver's answer.
    pub fn shares_host_memory(&self) -> Result<bool> {
        use Attribute as A;
        let is = |which| attribute(self.device, which).map(|value| value != 0);
        Ok(is(A::CU_DEVICE_ATTRIBUTE_INTEGRATED)?
            || is(A::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES)?)
    }

    /// Lets kernels of this GPU reach the memory of `other`, at its own addresses.
    ///
    /// # Errors
    /// [`Error::Environment`] if the two GPUs cannot access each other's memory.
    pub fn reach(&self, other: &Self) -> Result<()> {
        let mut can = 0;
        // SAFETY: the call writes one integer.
        check("cuDeviceCanAccessPeer", unsafe {
            sys::cuDeviceCanAccessPeer(&mut can, self.device, other.device)
        })?;
        if can == 0 {
            return Err(Error::environment(
                format!(
                    "GPU {} cannot reach the memory of GPU {}",
                    self.index, other.index
                ),
                "choose GPUs that `nvidia-smi topo -p2p rw` shows as OK",
            ));
        }
        let _guest = self.enter()?;
        // SAFETY: a context that `other` keeps; access ends with this GPU's context.
        match unsafe { sys::cuCtxEnablePeerAccess(other.context, 0) } {
            CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            answer => check("cuCtxEnablePeerAccess", answer),
        }
    }

    /// Records that a kernel did not end, so that nothing is freed from now on: it may still access any
    /// memory of this GPU, and calls that free memory would wait for it without an end.
    pub(super) fn lose(&self) {
        self.lost.store(true, Ordering::Release);
    }

    /// # Errors
    /// [`Error::Gone`] after a kernel that did not end.
    pub(super) fn check_not_lost(&self) -> Result<()> {
        if self.lost.load(Ordering::Acquire) {
            return Err(Error::Gone {
                cause: format!("a kernel on GPU {} did not end", self.index),
            });
        }
        Ok(())
    }

    /// Returns the driver's number of its context, which differs from that of a context that was destroyed before.
    ///
    /// # Errors
    /// [`Error::Environment`] with the driver's answer.
    pub(super) fn context_identifier(&self) -> Result<u64> {
        self.check_not_lost()?;
        let mut identifier = 0;
        // SAFETY: the context is retained as long as this GPU is open; the call writes one integer.
        check("cuCtxGetId", unsafe {
            sys::cuCtxGetId(self.context, &mut identifier)
        })?;
        Ok(identifier)
    }

    /// Returns its context.
    pub(super) fn context(&self) -> sys::CUcontext {
        self.context
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if *self.lost.get_mut() {
            return;
        }
        // SAFETY: the context was retained once, in `open`. Every object of the context (memory, streams, modules)
        // holds this GPU by an `Arc`, so none is left that refers to the context.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// Loads the driver's library and returns its version.
fn loaded_driver() -> Result<i32> {
    // SAFETY: this loads the library and runs its initializers, as any CUDA program does.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::environment(
            "no NVIDIA driver: libcuda.so.1 is not on this machine",
            "install one, or leave --gpu out",
        ));
    }
    let mut driver = 0;
    // SAFETY: the call writes one integer.
    check("cuDriverGetVersion", unsafe {
        sys::cuDriverGetVersion(&mut driver)
    })?;
    if driver < OLDEST_DRIVER {
        return Err(Error::environment(
            format!(
                "the NVIDIA driver is one for CUDA {}, the kernels need CUDA {}",
                version(driver),
                version(OLDEST_DRIVER)
            ),
            "install driver 535 or later, or use --cpu",
        ));
    }
    Ok(driver)
}

/// Returns the number of GPUs that the driver finds: one at least.
fn device_count() -> Result<u32> {
    // SAFETY: the call takes no pointers.
    check("cuInit", unsafe { sys::cuInit(0) })?;
    let mut count = 0;
    // SAFETY: the call writes one integer.
    check("cuDeviceGetCount", unsafe {
        sys::cuDeviceGetCount(&mut count)
    })?;
    let count = u32::try_from(count).unwrap_or(0);
    if count == 0 { Err(no_gpu()) } else { Ok(count) }
}

/// Returns the driver's handle of GPU `index`.
fn device(index: u32) -> Result<sys::CUdevice> {
    let count = device_count()?;
    let ordinal = i32::try_from(index).unwrap_or(i32::MAX);
    if index >= count {
        return Err(Error::usage(
            format!("there is no GPU {index}: this machine has {count}"),
            format!("use --gpu 0 to {}", count - 1),
        ));
    }
    let mut device = 0;
    // SAFETY: the call writes one integer.
    check("cuDeviceGet", unsafe {
        sys::cuDeviceGet(&mut device, ordinal)
    })?;
    Ok(device)
}

/// Checks that the kernels run on GPU `index`.
fn check_capability(index: u32, name: &str, device: sys::CUdevice) -> Result<()> {
    let capability = capability(device)?;
    if capability < OLDEST_GPU {
        return Err(Error::environment(
            format!(
                "GPU {index} ({name}) has compute capability {}.{}, the kernels need {}.{}",
                capability.0, capability.1, OLDEST_GPU.0, OLDEST_GPU.1
            ),
            "choose another with --gpu, or use --cpu",
        ));
    }
    Ok(())
}

fn capability(device: sys::CUdevice) -> Result<(i32, i32)> {
    Ok((
        attribute(
            device,
            Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        )?,
        attribute(
            device,
            Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )?,
    ))
}

fn name_of(device: sys::CUdevice) -> Result<String> {
    let mut name = [0; 128];
    // SAFETY: the call writes at most 128 bytes, terminated.
    check("cuDeviceGetName", unsafe {
        sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device)
    })?;
    // SAFETY: the driver wrote a terminated string, and the last byte was zero before.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    Ok(name.to_string_lossy().into_owned())
}

fn attribute(device: sys::CUdevice, which: Attribute) -> Result<i32> {
    let mut value = 0;
    // SAFETY: the call writes one integer.
    check("cuDeviceGetAttribute", unsafe {
        sys::cuDeviceGetAttribute(&mut value, which, device)
    })?;
    Ok(value)
}

fn ordering(value: i32) -> WriteOrder {
    match value {
        200.. => WriteOrder::All,
        100.. => WriteOrder::Owner,
        _ => WriteOrder::None,
    }
}

fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

fn no_gpu() -> Error {
    Error::environment(
        "the NVIDIA driver finds no GPU",
        "check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or leave --gpu out",
    )
}

/// Converts the driver's answer to `call` into a result, with a remedy for an error.
pub(super) fn check(call: &str, result: CUresult) -> Result<()> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        other => Err(failed(call, other)),
    }
}

/// Returns the error for an answer other than success.
fn failed(call: &str, result: CUresult) -> Error {
    use CUresult as R;
    let (what, remedy) = match result {
        R::CUDA_ERROR_NO_DEVICE => return no_gpu(),
        R::CUDA_ERROR_INVALID_HANDLE
        | R::CUDA_ERROR_INVALID_CONTEXT
        | R::CUDA_ERROR_CONTEXT_IS_DESTROYED => {
            return Error::usage(
                format!("{call}: the stream is not one of the GPU's primary context ({result:?})"),
                "give a stream that was made while the primary context of the store's GPU was current, as CUDA's \
                 runtime and torch make them, and that was not destroyed",
            );
        }
        R::CUDA_ERROR_OUT_OF_MEMORY => (
            "out of memory",
            "use fewer queues, a smaller depth or smaller buffers, or end other users of the GPU",
        ),
        R::CUDA_ERROR_DEVICE_UNAVAILABLE => (
            "another process uses the GPU exclusively",
            "wait, choose another with --gpu N, or leave --gpu out",
        ),
        R::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH | R::CUDA_ERROR_SYSTEM_NOT_READY => (
            "the driver library and the kernel's driver do not fit together, or are not ready",
            "reboot, or install both again",
        ),
        R::CUDA_ERROR_UNSUPPORTED_PTX_VERSION | R::CUDA_ERROR_NO_BINARY_FOR_GPU => (
            "the driver does not know this PTX",
            "install a later driver",
        ),
        R::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES => (
            "a block has more threads than there are registers for",
            "use fewer --threads with --mode block",
        ),
        R::CUDA_ERROR_LAUNCH_TIMEOUT => (
            "the system's watchdog ended the kernel",
            "use a GPU without a display, or a smaller run",
        ),
        R::CUDA_ERROR_LAUNCH_FAILED
        | R::CUDA_ERROR_ILLEGAL_ADDRESS
        | R::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | R::CUDA_ERROR_MISALIGNED_ADDRESS
        | R::CUDA_ERROR_HARDWARE_STACK_ERROR => (
            "the kernel died; nothing more can be done with this GPU in this process",
            "run it again, and report it with `compute-sanitizer`'s output if it persists",
        ),
        R::CUDA_ERROR_NOT_PERMITTED | R::CUDA_ERROR_NOT_SUPPORTED => (
            "the driver does not allow this here",
            "see docs/hardware.md for what each tier needs",
        ),
        _ => ("refused", "see `dmesg` for messages of the NVIDIA driver"),
    };
    let name = format!("{result:?}");
    let name = name.strip_prefix("CUDA_ERROR_").unwrap_or(&name);
    Error::environment(format!("{call}: {what} ({name})"), remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_the_driver_have_their_remedies() {
        use CUresult as R;
        for (result, what, remedy) in [
            (R::CUDA_ERROR_NO_DEVICE, "finds no GPU", "nvidia-smi"),
            (R::CUDA_ERROR_OUT_OF_MEMORY, "out of memory", "fewer queues"),
            (R::CUDA_ERROR_DEVICE_UNAVAILABLE, "exclusively", "--gpu N"),
            (
                R::CUDA_ERROR_SYSTEM_NOT_READY,
                "do not fit together",
                "reboot",
            ),
            (
                R::CUDA_ERROR_NO_BINARY_FOR_GPU,
                "does not know this PTX",
                "later driver",
            ),
            (
                R::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
                "registers",
                "fewer --threads",
            ),
            (
                R::CUDA_ERROR_LAUNCH_TIMEOUT,
                "watchdog",
                "without a display",
            ),
            (
                R::CUDA_ERROR_ILLEGAL_ADDRESS,
                "the kernel died",
                "compute-sanitizer",
            ),
            (
                R::CUDA_ERROR_NOT_PERMITTED,
                "does not allow",
                "docs/hardware.md",
            ),
            (R::CUDA_ERROR_UNKNOWN, "refused", "dmesg"),
            (
                R::CUDA_ERROR_INVALID_HANDLE,
                "not one of the GPU's primary context",
                "torch make them",
            ),
        ] {
            let error = check("cuTest", result).unwrap_err();
            assert!(error.to_string().contains(what), "{error}");
            assert!(error.remedy().contains(remedy), "{}", error.remedy());
        }
        assert!(check("cuTest", R::CUDA_SUCCESS).is_ok());
    }

    #[test]
    fn the_drivers_answers_become_one_line_with_a_remedy() {
        for (result, part) in [
            (CUresult::CUDA_ERROR_NO_DEVICE, "finds no GPU"),
            (CUresult::CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
            (CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, "(ILLEGAL_ADDRESS)"),
            (
                CUresult::CUDA_ERROR_INVALID_VALUE,
                "refused (INVALID_VALUE)",
            ),
        ] {
            let error = failed("cuCall", result);
            let text = error.to_string();
            assert!(text.contains(part), "{text}");
            assert!(!text.contains('\n') && !error.remedy().is_empty());
        }
        assert!(check("cuCall", CUresult::CUDA_SUCCESS).is_ok());
    }

    #[test]
    fn versions_and_orders_are_read_as_the_driver_means_them() {
        assert_eq!(version(12_020), "12.2");
        assert_eq!(version(13_000), "13.0");
        let orders = [0, 100, 200].map(ordering);
        assert_eq!(
            orders,
            [WriteOrder::None, WriteOrder::Owner, WriteOrder::All]
        );
    }

    /// Opening returns a GPU or an error with one clear line, whichever the machine has.
    #[test]
    fn opening_a_gpu_never_panics() {
        match Gpu::open(0) {
            Ok(gpu) => assert!(!gpu.name().is_empty()),
            Err(error) => assert!(!error.to_string().is_empty() && !error.remedy().is_empty()),
        }
    }
}
