//! Interface for kernels in CUDA C++: queues that they submit to, rows that they read, and the version of the
//! device library that they link.
// UNSAFETY: functions of the C interface.
#![allow(unsafe_code)]

#[cfg(feature = "cuda")]
use crate::border::give;
use crate::border::{Answer, Sized0, call, null, put, take, value};
use crate::opened::{DEVICES, DeviceHandle, StoreHandle, TABLES, TableHandle, opened};
#[cfg(feature = "cuda")]
use crate::opened::{OpenDevice, open_in};
use crate::status::{CallFailure, NVME_GPU_ERROR_VERSION, nvme_gpu_status};
use std::ffi::c_void;

/// `struct nvme_gpu_queues` of nvme_gpu_device.cuh, which a kernel takes by value.
pub struct QueuesByValue {
    _opaque: [u8; 0],
}

/// `struct nvme_gpu_rows` of nvme_gpu_device.cuh, which a kernel takes by value.
pub struct RowWords {
    _opaque: [u8; 0],
}

/// Parameters of nvme_gpu_device_queues(), and its results that the kernels need. Set `size` to
/// sizeof(nvme_gpu_device_setup); 0 selects the default of a field.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct DeviceSetup {
    pub size: usize,
    /// NVME_GPU_DEVICE_LAYOUT of the nvme_gpu_device.cuh that the program is compiled with.
    pub layout: u32,
    /// Queue pairs. Default nvme_gpu_options.gpu_kernel_queues, which is also the most.
    pub queues: u32,
    /// Entries of each, rounded up to a power of two. Default 256.
    pub entries: u32,
    /// Result cells: one for each command that may be in flight or not waited for yet. Default 65536.
    pub cells: u32,
    /// Bytes of a buffer that the controller and the kernels reach, in host memory. Default none.
    pub buffer_bytes: u64,
    /// Written: the address of the buffer for kernels.
    pub buffer: u64,
    /// Written: the address of the buffer for nvme_gpu_command.data.
    pub buffer_iova: u64,
    /// Written: blocks of the namespace.
    pub blocks: u64,
    /// Written: for nvme_gpu_command.nsid.
    pub nsid: u32,
    /// Written: bytes of a block.
    pub block_bytes: u32,
    /// Written: the most bytes of one command.
    pub most_bytes: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: integers, the size first.
unsafe impl Sized0 for DeviceSetup {
    const NAME: &'static str = "nvme_gpu_device_setup";
}

#[cfg(feature = "cuda")]
const LAYOUT: u32 = nvme_host::cuda::DEVICE_LAYOUT;
#[cfg(not(feature = "cuda"))]
const LAYOUT: u32 = 0;

/// # Errors
/// [`NVME_GPU_ERROR_VERSION`].
fn check_layout(whose: &str, layout: u32) -> Answer<()> {
    match layout == LAYOUT {
        true => Ok(()),
        false => Err(CallFailure::new(
            NVME_GPU_ERROR_VERSION,
            format!("{whose} is of layout {layout}, the library is of layout {LAYOUT}"),
            "compile and link the kernel with nvme_gpu_device.cuh and nvme_gpu_device.ptx of the library that is loaded",
        )),
    }
}

#[cfg(not(feature = "cuda"))]
fn without_cuda<T>() -> Answer<T> {
    Err(CallFailure::new(
        crate::status::NVME_GPU_ERROR_UNSUPPORTED,
        "this library was built without CUDA",
        "build it with the feature cuda",
    ))
}

/// Lends queue pairs of a drive to kernels of your own: nvme_gpu_submit() and the other functions of
/// nvme_gpu_device.cuh. The store was opened with a GPU and with nvme_gpu_options.gpu_kernel_queues. Writes `*queues`,
/// which a kernel takes by value, the fields of `*setup` that say so, and on success a handle for
/// nvme_gpu_device_close() to `*device`, else NULL.
///
/// Kernels use the queues between nvme_gpu_device_begin() and nvme_gpu_device_end(). They may send any command: what
/// they write is not ordered with calls of the store.
///
/// Errors: NVME_GPU_ERROR_VERSION for another layout; NVME_GPU_ERROR_USAGE for a file, a stripe, a store for reading
/// only or without a GPU, and for more queue pairs than are left; NVME_GPU_ERROR_ENVIRONMENT without memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_device_queues(
    store: *mut StoreHandle,
    setup: *mut DeviceSetup,
    queues: *mut QueuesByValue,
    device: *mut *mut DeviceHandle,
) -> nvme_gpu_status {
    call(|| {
        // SAFETY: as the header says.
        unsafe { put(device, std::ptr::null_mut(), "device") }?;
        // SAFETY: as the header says.
        let asked = unsafe { take(setup) }?;
        if queues.is_null() {
            return Err(null("queues"));
        }
        let opened = opened(store)?;
        check_layout("the nvme_gpu_device.cuh of the program", asked.layout)?;
        if asked.reserved != 0 {
            return Err(CallFailure::usage(
                format!("reserved of nvme_gpu_device_setup is {}", asked.reserved),
                "set it to 0, as structures of zeroes have it",
            ));
        }
        #[cfg(feature = "cuda")]
        // SAFETY: as the header says.
        return unsafe { lend(&opened, store, &asked, setup, queues, device) };
        #[cfg(not(feature = "cuda"))]
        {
            let _ = opened;
            without_cuda()
        }
    })
}

/// # Safety
/// The caller fulfils the contract in the header for the pointers.
#[cfg(feature = "cuda")]
unsafe fn lend(
    opened: &crate::opened::OpenedStore,
    store: *mut StoreHandle,
    asked: &DeviceSetup,
    setup: *mut DeviceSetup,
    words: *mut QueuesByValue,
    device: *mut *mut DeviceHandle,
) -> Answer<()> {
    let or = |value: u32, default: u32| if value == 0 { default } else { value };
    let options = nvme_host::cuda::KernelQueuesOptions {
        queues: or(asked.queues, opened.kernel_queues),
        entries: or(asked.entries, 256),
        cells: or(asked.cells, 65536),
        buffer_bytes: usize::try_from(asked.buffer_bytes).unwrap_or(usize::MAX),
    };
    if options.buffer_bytes > MOST_BUFFER_BYTES || options.cells > MOST_CELLS {
        return Err(CallFailure::usage(
            format!(
                "a buffer of {} bytes with {} result cells is larger than kernels can address",
                asked.buffer_bytes, options.cells
            ),
            format!("use {MOST_BUFFER_BYTES} bytes and {MOST_CELLS} cells at most"),
        ));
    }
    let queues = opened.store.kernel_queues(options)?;
    let (buffer, buffer_iova, buffer_bytes) = queues.buffer();
    let info = queues.namespace();
    let known = DeviceSetup {
        queues: options.queues,
        entries: options.entries.max(2).next_power_of_two(),
        cells: options.cells,
        buffer_bytes,
        buffer,
        buffer_iova,
        blocks: info.blocks,
        nsid: info.nsid.0,
        block_bytes: info.block_bytes,
        most_bytes: u32::try_from(queues.max_transfer()).unwrap_or(u32::MAX),
        ..*asked
    };
    let by_value = queues.queues();
    // SAFETY: the caller's.
    unsafe { give(setup, &known) }?;
    // SAFETY: the caller's: the structure of this layout.
    unsafe { put(words.cast(), by_value, "queues") }?;
    let open = std::sync::Arc::new(OpenDevice {
        store: store.addr(),
        queues,
    });
    let handle = open_in(&DEVICES, store, open)?;
    // SAFETY: written once already.
    unsafe { put(device, handle, "device") }
}

/// The most that can be asked for.
#[cfg(feature = "cuda")]
const MOST_BUFFER_BYTES: usize = 1 << 36;
#[cfg(feature = "cuda")]
const MOST_CELLS: u32 = 1 << 28;

/// Begins the use of the queues by kernels; call it before their launch. Until
/// nvme_gpu_device_end() the library leaves the queues alone. Result cells are zeroed. May be
/// called several times, also by several threads; each call needs its own end. Waits while the
/// controller is being reset. Errors: NVME_GPU_ERROR_GONE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_device_begin(device: *mut DeviceHandle) -> nvme_gpu_status {
    call(|| {
        let open = DEVICES.get(device, "device")?;
        #[cfg(feature = "cuda")]
        return Ok(open.queues.begin()?);
        #[cfg(not(feature = "cuda"))]
        {
            let _ = open;
            without_cuda()
        }
    })
}

/// Ends a nvme_gpu_device_begin(), after those kernels have ended: synchronise their streams
/// before. The last end ends commands that kernels gave up: it reaps late completions, aborts, and
/// resets the controller when that does not help. `*ended` receives their number, unless `ended` is
/// NULL.
///
/// A reset that the controller needs for another reason waits for the end, 3 time-outs and 2 s; then the queues are of
/// no use any more. Errors: NVME_GPU_ERROR_USAGE without a begin; NVME_GPU_ERROR_GONE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_device_end(
    device: *mut DeviceHandle,
    ended: *mut u32,
) -> nvme_gpu_status {
    call(|| {
        let open = DEVICES.get(device, "device")?;
        #[cfg(feature = "cuda")]
        {
            let recovered = open.queues.end()?;
            if !ended.is_null() {
                let count = recovered.late + recovered.aborted + recovered.reset;
                // SAFETY: as the header says.
                unsafe { put(ended, count, "ended") }?;
            }
            Ok(())
        }
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (open, ended);
            without_cuda()
        }
    })
}

/// Deletes the queues, and frees cells and buffer. NULL and a closed handle are ignored. Between a begin and its end
/// all of it stays for ever, as kernels may use it, and the device with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_device_close(device: *mut DeviceHandle) {
    value((), || {
        drop(DEVICES.close(device));
        Ok(())
    });
}

/// Writes `*rows`, by which kernels of your own read rows of a table: nvme_gpu_rows_enter(), nvme_gpu_row() and
/// nvme_gpu_rows_leave() of nvme_gpu_device.cuh. `layout` is NVME_GPU_DEVICE_LAYOUT. No begin is needed; kernels that
/// run after the store was closed get NVME_GPU_ROW_GONE.
///
/// Errors: NVME_GPU_ERROR_VERSION for another layout; NVME_GPU_ERROR_USAGE for a file, a stripe, rows above 124 KiB,
/// and a store without a GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_device_rows(
    table: *mut TableHandle,
    layout: u32,
    rows: *mut RowWords,
) -> nvme_gpu_status {
    call(|| {
        let open = TABLES.get(table, "table")?;
        if rows.is_null() {
            return Err(null("rows"));
        }
        check_layout("the nvme_gpu_device.cuh of the program", layout)?;
        #[cfg(feature = "cuda")]
        {
            let words = open.table.device_rows()?;
            // SAFETY: as the header says: the structure of this layout.
            unsafe { put(rows.cast(), words, "rows") }
        }
        #[cfg(not(feature = "cuda"))]
        {
            let _ = open;
            without_cuda()
        }
    })
}

/// Compares what a kernel was linked with: the layout that its nvme_gpu_device.ptx carries. `kernel` is a CUfunction,
/// from cuModuleGetFunction() or cudaGetFuncBySymbol(), loaded on the GPU of the store.
///
/// Errors: NVME_GPU_ERROR_VERSION for another layout and for a kernel without the device library;
/// NVME_GPU_ERROR_USAGE for NULL and for a store without a GPU; NVME_GPU_ERROR_ENVIRONMENT with the driver's answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_device_check(
    store: *mut StoreHandle,
    kernel: *mut c_void,
) -> nvme_gpu_status {
    call(|| {
        let opened = opened(store)?;
        #[cfg(feature = "cuda")]
        {
            let Some(gpu) = &opened.gpu else {
                return Err(CallFailure::usage(
                    "the store was opened without a GPU",
                    "open it with the GPU that the kernel is loaded on",
                ));
            };
            // SAFETY: as the header says.
            let layout = unsafe { gpu.device_layout(kernel.expose_provenance() as u64) }?;
            let layout = layout.ok_or_else(|| {
                CallFailure::new(
                    NVME_GPU_ERROR_VERSION,
                    "the kernel is not linked with the device library, or with one without a layout number",
                    "link it with nvme_gpu_device.ptx of the library that is loaded",
                )
            })?;
            check_layout("the nvme_gpu_device.ptx of the kernel", layout)
        }
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (opened, kernel);
            without_cuda()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_for_kernels_has_the_layout_of_the_library() {
        let header = include_str!("../../../../nvme-gpu-kernel/include/nvme_gpu_device.cuh");
        let line = format!("#define NVME_GPU_DEVICE_LAYOUT {LAYOUT}\n");
        assert!(header.contains(&line), "{line}");
        let ptx = include_str!("../../../../nvme-gpu-kernel/ptx/nvme_gpu_device.ptx");
        let carried = format!("nvme_gpu_device_layout[4] = {{{LAYOUT}}};");
        assert!(ptx.contains(&carried), "{carried}");
        let failure = check_layout("it", LAYOUT + 1).unwrap_err();
        assert_eq!(failure.status, NVME_GPU_ERROR_VERSION);
    }
}
