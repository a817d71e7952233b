//! Pages of keys and values of language models: stored by key, and checked when they are loaded.
// UNSAFETY: functions of the C interface, over memory that C vouches for.
#![allow(unsafe_code)]

use crate::border::{Answer, Sized0, call, give, put, take, text, value};
use crate::handles::OpenHandles;
use crate::memory::CallMemory;
use crate::opened::{OpenedStore, StoreHandle, open_in, opened};
use crate::status::{CallFailure, nvme_gpu_status, status_of};
use nvme_host::Store;
use nvme_kv::{AreaRequest, KvError, ModelFingerprint, PageKey, PageStore};
use nvme_kv_server::OpenedArea;
use std::ffi::{c_char, c_void};
use std::sync::Arc;

/// Bytes of a key.
pub const NVME_GPU_PAGE_KEY_BYTES: usize = 16;
/// nvme_gpu_pages_options.create: an area that is blank, damaged or of another model is formatted.
pub const NVME_GPU_PAGES_AUTO: u32 = 0;
/// nvme_gpu_pages_options.create: such an area is an error.
pub const NVME_GPU_PAGES_NEVER: u32 = 1;
/// nvme_gpu_pages_options.create: the area is formatted, and its pages are gone.
pub const NVME_GPU_PAGES_ALWAYS: u32 = 2;

/// Pages in an area of a store. Opaque; closed with its store.
pub struct PagesHandle {
    _opaque: [u8; 0],
}

/// Object of a handle of pages.
pub struct OpenedPages {
    /// The address of the store's handle; none for a shared area.
    pub store: Option<usize>,
    /// The store; none for a shared area, whose device only its owner opens.
    pub opened: Option<Arc<OpenedStore>>,
    pub area: OpenedArea<Arc<Store>>,
    #[cfg(feature = "cuda")]
    pub way: Arc<nvme_kv::on_gpu::GpuWay>,
}

impl OpenedPages {
    pub fn new(
        store: Option<usize>,
        opened: Option<Arc<OpenedStore>>,
        area: OpenedArea<Arc<Store>>,
    ) -> Self {
        Self {
            store,
            opened,
            area,
            #[cfg(feature = "cuda")]
            way: Arc::new(nvme_kv::on_gpu::GpuWay::new(crate::kept::keep)),
        }
    }

    /// Returns the pages that a GPU has loaded, and those that it has stored.
    fn moved_by_gpu(&self) -> (u64, u64) {
        #[cfg(feature = "cuda")]
        return self.way.moved();
        #[cfg(not(feature = "cuda"))]
        (0, 0)
    }
}

pub static PAGES: OpenHandles<Arc<OpenedPages>> = OpenHandles::new();

/// The place of pages, and what they depend on beside their keys: pages of other values are never found. A text that is NULL
/// is empty; none has more than 255 bytes.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct PagesOptions {
    /// sizeof(nvme_gpu_pages_options).
    pub size: usize,
    /// First byte of the area in the store, a multiple of 4,096.
    pub offset: u64,
    /// Bytes of the area; 0 for all up to the end of the store.
    pub bytes: u64,
    /// Limit of the bytes of a page.
    pub page_bytes: u32,
    /// NVME_GPU_PAGES_AUTO, NVME_GPU_PAGES_NEVER or NVME_GPU_PAGES_ALWAYS.
    pub create: u32,
    /// Tokens of a page.
    pub block_tokens: u32,
    /// Number of the cache group of a hybrid model.
    pub group: u32,
    /// Name of the model; not NULL.
    pub model: *const c_char,
    /// Revision of its weights.
    pub revision: *const c_char,
    /// Element type, as "bfloat16".
    pub dtype: *const c_char,
    /// Order of a page's dimensions, and version of the program that has it.
    pub layout: *const c_char,
    /// Ranks and sizes of the parallelism, as "tp 0 of 8".
    pub parallel_rank: *const c_char,
    /// Algorithm of the caller's hashes.
    pub hash_algorithm: *const c_char,
    /// Root of the caller's hashes.
    pub seed: *const c_char,
}

// SAFETY: `#[repr(C)]`, begins with a `usize`, and consists of integers and addresses, which may be NULL.
unsafe impl Sized0 for PagesOptions {
    const NAME: &'static str = "nvme_gpu_pages_options";
}

/// Counts since pages were opened.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct PagesStatistics {
    /// sizeof(nvme_gpu_pages_statistics).
    pub size: usize,
    /// Pages that are found.
    pub pages: u64,
    /// Pages that fit.
    pub slots: u64,
    /// Pages that were loaded and checked.
    pub loaded: u64,
    /// Loads of keys without a page.
    pub missed: u64,
    /// Pages that were stored durably.
    pub stored: u64,
    /// Pages that made room for others.
    pub evicted: u64,
    /// Pages that were dropped because what was read is not what was stored.
    pub lost: u64,
    /// Pages that were not stored because the drive failed.
    pub failed: u64,
    /// Pages that the GPU has read and checked itself; the CPU moves those of files and stripes.
    pub loaded_by_gpu: u64,
    /// Pages that the GPU has written itself.
    pub stored_by_gpu: u64,
}

// SAFETY: `#[repr(C)]`, begins with a `usize`, and consists of integers.
unsafe impl Sized0 for PagesStatistics {
    const NAME: &'static str = "nvme_gpu_pages_statistics";
}

impl From<KvError> for CallFailure {
    fn from(error: KvError) -> Self {
        let (cause, remedy) = (error.to_string(), error.remedy());
        let status = match error {
            // The controller's status, where there is one.
            KvError::Drive { source, .. } => Self::from(source).status,
            error => status_of(error.code()),
        };
        Self::new(status, cause, remedy)
    }
}

/// # Safety
/// `from` is NULL or ends with a 0.
pub unsafe fn field(from: *const c_char, what: &str) -> Answer<String> {
    if from.is_null() {
        return Ok(String::new());
    }
    // SAFETY: the caller's.
    unsafe { text(from, what) }.map(str::to_owned)
}

/// # Safety
/// As the header says of its texts.
pub unsafe fn fingerprint(options: &PagesOptions) -> Answer<ModelFingerprint> {
    // SAFETY: the caller's.
    unsafe {
        Ok(ModelFingerprint {
            model: text(options.model, "model")?.to_owned(),
            revision: field(options.revision, "revision")?,
            dtype: field(options.dtype, "dtype")?,
            layout: field(options.layout, "layout")?,
            block_tokens: options.block_tokens,
            parallel_rank: field(options.parallel_rank, "parallel_rank")?,
            group: options.group,
            hash_algorithm: field(options.hash_algorithm, "hash_algorithm")?,
            seed: field(options.seed, "seed")?,
        })
    }
}

pub fn unknown_create(create: u32) -> CallFailure {
    CallFailure::usage(
        format!("nvme_gpu_pages_options.create is {create}"),
        "use NVME_GPU_PAGES_AUTO, NVME_GPU_PAGES_NEVER or NVME_GPU_PAGES_ALWAYS",
    )
}

/// Opens the pages of an area of a store, which this process alone may have open. On success `*pages` is a handle for
/// nvme_gpu_pages_close(), else NULL. Errors: NVME_GPU_ERROR_USAGE; NVME_GPU_ERROR_MISMATCH for an area of other pages that
/// `create` keeps; those of the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_pages_open(
    store: *mut StoreHandle,
    options: *const PagesOptions,
    pages: *mut *mut PagesHandle,
) -> nvme_gpu_status {
    call(|| {
        // SAFETY: as the header says.
        unsafe { put(pages, std::ptr::null_mut(), "pages") }?;
        let opened = self::opened(store)?;
        // SAFETY: as the header says.
        let options = unsafe { take(options) }?;
        // SAFETY: as the header says.
        let fingerprint = unsafe { fingerprint(&options) }?;
        let whole = opened.store.len().saturating_sub(options.offset);
        let request = AreaRequest {
            offset: options.offset,
            bytes: if options.bytes == 0 {
                whole
            } else {
                options.bytes
            },
            page_bytes: options.page_bytes,
            fingerprint,
        };
        let medium = Arc::clone(&opened.store);
        let found = match options.create {
            NVME_GPU_PAGES_AUTO => PageStore::open_or_format(medium, &request)?.0,
            NVME_GPU_PAGES_NEVER => PageStore::open(medium, &request)?,
            NVME_GPU_PAGES_ALWAYS => PageStore::format(medium, &request)?,
            other => return Err(unknown_create(other)),
        };
        let area = OpenedArea::Own(Arc::new(found));
        let open = Arc::new(OpenedPages::new(Some(store.addr()), Some(opened), area));
        let handle = open_in(&PAGES, store, open)?;
        // SAFETY: written once already.
        unsafe { put(pages, handle, "pages") }
    })
}

/// Closes pages; calls under way continue. NULL and a closed handle are ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_pages_close(pages: *mut PagesHandle) {
    value((), || {
        drop(PAGES.close(pages));
        Ok(())
    });
}

/// Makes the key of part `part` of the block that the caller knows by the `bytes` bytes at `hash`. It names the options
/// with which the pages were opened, too. `key` has NVME_GPU_PAGE_KEY_BYTES bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_pages_key(
    pages: *const PagesHandle,
    hash: *const c_void,
    bytes: usize,
    part: u32,
    key: *mut u8,
) -> nvme_gpu_status {
    call(|| {
        let open = PAGES.get(pages, "pages")?;
        // SAFETY: as the header says; nothing writes the hash meanwhile.
        let hash = unsafe { CallMemory::new(hash, bytes, "hash")?.bytes() };
        let made = *open.area.key(hash, part).as_bytes();
        // SAFETY: as the header says.
        unsafe { put(key.cast::<[u8; NVME_GPU_PAGE_KEY_BYTES]>(), made, "key") }
    })
}

/// # Safety
/// `keys` has `count` times NVME_GPU_PAGE_KEY_BYTES bytes.
unsafe fn keys_of(keys: *const u8, count: usize) -> Answer<Vec<PageKey>> {
    // SAFETY: the caller's.
    let memory =
        unsafe { CallMemory::elements(keys, count as u64, NVME_GPU_PAGE_KEY_BYTES, "keys") }?;
    // SAFETY: the caller's; nothing writes them meanwhile.
    let bytes = unsafe { memory.bytes() };
    let keys = bytes.as_chunks::<NVME_GPU_PAGE_KEY_BYTES>().0.iter();
    Ok(keys.map(|key| PageKey::of_bytes(*key)).collect())
}

/// Writes to `*found` how many of `count` keys, from the first one on, have a page without a gap. A page may make room for
/// another one before it is loaded. `keys` has NVME_GPU_PAGE_KEY_BYTES bytes for each.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_pages_find(
    pages: *const PagesHandle,
    keys: *const u8,
    count: usize,
    found: *mut usize,
) -> nvme_gpu_status {
    call(|| {
        let open = PAGES.get(pages, "pages")?;
        // SAFETY: as the header says.
        let keys = unsafe { keys_of(keys, count) }?;
        let lengths = open.area.lengths(&keys);
        let there = lengths.iter().take_while(|length| length.is_some());
        // SAFETY: as the header says.
        unsafe { put(found, there.count(), "found") }
    })
}

/// Removes the pages of `count` keys, as nvme_gpu_pages_find() takes them; keys without a page are skipped. They are not
/// found again, also after a power cut.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_pages_remove(
    pages: *mut PagesHandle,
    keys: *const u8,
    count: usize,
) -> nvme_gpu_status {
    call(|| {
        let open = PAGES.get(pages, "pages")?;
        // SAFETY: as the header says.
        let keys = unsafe { keys_of(keys, count) }?;
        open.area.remove(&keys)?;
        Ok(())
    })
}

/// Writes the counts to `statistics`, whose size the caller sets.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_pages_stats(
    pages: *const PagesHandle,
    statistics: *mut PagesStatistics,
) -> nvme_gpu_status {
    call(|| {
        let open = PAGES.get(pages, "pages")?;
        let stats = open.area.stats()?;
        let (loaded_by_gpu, stored_by_gpu) = open.moved_by_gpu();
        let found = PagesStatistics {
            size: size_of::<PagesStatistics>(),
            pages: stats.pages,
            slots: stats.slots,
            loaded: stats.loaded,
            missed: stats.missed,
            stored: stats.stored,
            evicted: stats.evicted,
            lost: stats.lost,
            failed: stats.failed,
            loaded_by_gpu,
            stored_by_gpu,
        };
        // SAFETY: as the header says.
        unsafe { give(statistics, &found) }
    })
}
