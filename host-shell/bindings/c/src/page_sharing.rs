//! An area of pages that processes share.
// UNSAFETY: a function of the C interface.
#![allow(unsafe_code)]

use crate::border::{call, put, take, text};
use crate::pages::{
    NVME_GPU_PAGES_ALWAYS, NVME_GPU_PAGES_AUTO, NVME_GPU_PAGES_NEVER, OpenedPages, PAGES,
    PagesHandle, PagesOptions, field, fingerprint, unknown_create,
};
use crate::status::{CallFailure, nvme_gpu_status};
use crate::store::{self, OpenOptions};
use nvme_host::Store;
use nvme_kv_server::{OpenedArea, SharedPageStore, SharedRequest};
use std::ffi::c_char;
use std::sync::Arc;
use std::time::Duration;

/// Time for an owner's answer beyond the drive's: a request may wait for those of other processes.
const OWNER_TIME: Duration = Duration::from_secs(10);

/// Opens the pages of an area of `device` that processes share, as ranks of an inference server do. The first process owns
/// the area: it opens the device with `open`, as nvme_gpu_open() does (NULL for defaults; no GPU), and serves the others
/// over a socket in `directory` (NULL: a folder of the user). When it ends, the process that calls next replaces it, and
/// nothing that was committed is lost. Pages lie in host memory. `options` as for nvme_gpu_pages_open(), without
/// NVME_GPU_PAGES_ALWAYS. Errors: those of nvme_gpu_pages_open(); NVME_GPU_ERROR_TIMEOUT if no owner answers;
/// NVME_GPU_ERROR_MISMATCH for an owner with pages of another model or size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_pages_share(
    device: *const c_char,
    open: *const OpenOptions,
    options: *const PagesOptions,
    directory: *const c_char,
    pages: *mut *mut PagesHandle,
) -> nvme_gpu_status {
    call(|| {
        // SAFETY: as the header says.
        unsafe { put(pages, std::ptr::null_mut(), "pages") }?;
        // SAFETY: as the header says.
        let device = unsafe { text(device, "device") }?.to_owned();
        // SAFETY: as the header says.
        let store = store::checked_options(&unsafe { store::given(open) }?, -1)?;
        // SAFETY: as the header says.
        let options = unsafe { take(options) }?;
        // SAFETY: as the header says.
        let directory = unsafe { field(directory, "directory") }?;
        let request = SharedRequest {
            device: device.clone(),
            offset: options.offset,
            bytes: (options.bytes > 0).then_some(options.bytes),
            page_bytes: options.page_bytes,
            // SAFETY: as the header says.
            fingerprint: unsafe { fingerprint(&options) }?,
            may_format: match options.create {
                NVME_GPU_PAGES_AUTO => true,
                NVME_GPU_PAGES_NEVER => false,
                NVME_GPU_PAGES_ALWAYS => {
                    return Err(CallFailure::usage(
                        "nvme_gpu_pages_options.create formats an area that other processes may use",
                        "use NVME_GPU_PAGES_AUTO or NVME_GPU_PAGES_NEVER",
                    ));
                }
                other => return Err(unknown_create(other)),
            },
            directory: (!directory.is_empty()).then(|| directory.into()),
            timeout: store.timeout.saturating_add(OWNER_TIME),
        };
        let opening = move || Ok(Arc::new(Store::open(&device, &store)?));
        let area = SharedPageStore::open(request, opening)?;
        let open = OpenedPages::new(None, None, OpenedArea::Shared(Arc::new(area)));
        // SAFETY: written once already.
        unsafe { put(pages, PAGES.open(Arc::new(open)), "pages") }
    })
}
