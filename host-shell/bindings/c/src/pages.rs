//! Pages of keys and values of language models: stored by key, and checked when they are loaded.
// UNSAFETY: functions of the C interface, over memory that C vouches for.
#![allow(unsafe_code)]

use crate::border::{Answer, Sized0, call, give, null, put, take, text, value};
use crate::handles::OpenHandles;
use crate::memory::{CallLocation, CallMemory, place};
use crate::opened::{OpenedStore, StoreHandle, open_in, opened};
use crate::status::{
    CallFailure, NVME_GPU_ERROR_CHANGED, NVME_GPU_ERROR_INTERNAL, NVME_GPU_ERROR_MISMATCH,
    NVME_GPU_ERROR_PAGE_IN_PROGRESS, NVME_GPU_ERROR_PAGE_LOST, NVME_GPU_ERROR_PAGE_MISSING,
    NVME_GPU_ERROR_PAGE_NO_ROOM, NVME_GPU_ERROR_USAGE, NVME_GPU_OK, NVME_GPU_ROW_NOT_RUN,
    nvme_gpu_status,
};
use nvme_host::Store;
use nvme_kv::{AreaRequest, KvError, ModelFingerprint, PageKey, PageStore, StoreOutcome};
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
    /// The address of the store's handle.
    pub store: usize,
    opened: Arc<OpenedStore>,
    pages: PageStore<Arc<Store>>,
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

/// One page of a call.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct PageEntry {
    /// Key by nvme_gpu_pages_key().
    pub key: [u8; NVME_GPU_PAGE_KEY_BYTES],
    /// Host memory of the page.
    pub data: *mut c_void,
    /// Bytes of the page, or of the room for it.
    pub bytes: usize,
    /// Written by nvme_gpu_pages_get(): bytes of the page that was loaded.
    pub length: usize,
    /// Written at the end: NVME_GPU_OK, NVME_GPU_ERROR_PAGE_MISSING and so on, or why it failed.
    pub status: nvme_gpu_status,
    /// 0.
    pub reserved: u32,
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
}

// SAFETY: `#[repr(C)]`, begins with a `usize`, and consists of integers.
unsafe impl Sized0 for PagesStatistics {
    const NAME: &'static str = "nvme_gpu_pages_statistics";
}

impl From<KvError> for CallFailure {
    fn from(error: KvError) -> Self {
        let (cause, remedy) = (error.to_string(), error.remedy());
        let status = match error {
            KvError::Missing { .. } => NVME_GPU_ERROR_PAGE_MISSING,
            KvError::Lost { .. } => NVME_GPU_ERROR_PAGE_LOST,
            KvError::Usage { .. } => NVME_GPU_ERROR_USAGE,
            KvError::Superseded { .. } => NVME_GPU_ERROR_CHANGED,
            // What was opened is not what was asked for.
            KvError::Blank { .. }
            | KvError::Foreign { .. }
            | KvError::Version { .. }
            | KvError::Damaged { .. }
            | KvError::OtherModel { .. }
            | KvError::OtherSize { .. } => NVME_GPU_ERROR_MISMATCH,
            KvError::Drive { source, .. } => Self::from(source).status,
            KvError::Owner { .. } => NVME_GPU_ERROR_INTERNAL,
        };
        Self::new(status, cause, remedy)
    }
}

/// # Safety
/// `from` is NULL or ends with a 0.
unsafe fn field(from: *const c_char, what: &str) -> Answer<String> {
    if from.is_null() {
        return Ok(String::new());
    }
    // SAFETY: the caller's.
    unsafe { text(from, what) }.map(str::to_owned)
}

/// # Safety
/// As the header says of its texts.
unsafe fn request(options: &PagesOptions, store: &Store) -> Answer<AreaRequest> {
    let PagesOptions { offset, bytes, .. } = *options;
    let whole = store.len().saturating_sub(offset);
    // SAFETY: the caller's.
    let fingerprint = unsafe {
        ModelFingerprint {
            model: text(options.model, "model")?.to_owned(),
            revision: field(options.revision, "revision")?,
            dtype: field(options.dtype, "dtype")?,
            layout: field(options.layout, "layout")?,
            block_tokens: options.block_tokens,
            parallel_rank: field(options.parallel_rank, "parallel_rank")?,
            group: options.group,
            hash_algorithm: field(options.hash_algorithm, "hash_algorithm")?,
            seed: field(options.seed, "seed")?,
        }
    };
    Ok(AreaRequest {
        offset,
        bytes: if bytes == 0 { whole } else { bytes },
        page_bytes: options.page_bytes,
        fingerprint,
    })
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
        let request = unsafe { request(&options, &opened.store) }?;
        let medium = Arc::clone(&opened.store);
        let found = match options.create {
            NVME_GPU_PAGES_AUTO => PageStore::open_or_format(medium, &request)?.0,
            NVME_GPU_PAGES_NEVER => PageStore::open(medium, &request)?,
            NVME_GPU_PAGES_ALWAYS => PageStore::format(medium, &request)?,
            other => {
                let cause = format!("nvme_gpu_pages_options.create is {other}");
                let remedy =
                    "use NVME_GPU_PAGES_AUTO, NVME_GPU_PAGES_NEVER or NVME_GPU_PAGES_ALWAYS";
                return Err(CallFailure::usage(cause, remedy));
            }
        };
        let open = Arc::new(OpenedPages {
            store: store.addr(),
            opened,
            pages: found,
        });
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
        let made = *open.pages.key(hash, part).as_bytes();
        // SAFETY: as the header says.
        unsafe { put(key.cast::<[u8; NVME_GPU_PAGE_KEY_BYTES]>(), made, "key") }
    })
}

/// Entries of a call, checked: none was carried out when one is refused.
struct PageCall {
    entries: *mut PageEntry,
    keys: Vec<PageKey>,
    data: Vec<CallMemory>,
}

impl PageCall {
    /// # Safety
    /// The caller fulfils the contract in the header for `entries`.
    unsafe fn take(open: &OpenedPages, entries: *mut PageEntry, count: usize) -> Answer<Self> {
        if entries.is_null() && count > 0 {
            return Err(null("entries"));
        }
        // SAFETY: the caller's.
        unsafe { CallMemory::elements(entries, count as u64, size_of::<PageEntry>(), "entries") }?;
        let (mut keys, mut data) = (Vec::new(), Vec::new());
        for index in 0..count {
            let named = |failure: CallFailure| failure.of_entry(index);
            // SAFETY: below `count`. Programs may pack their structures.
            let entry = unsafe { entries.add(index).read_unaligned() };
            // SAFETY: the caller's.
            let page =
                unsafe { CallMemory::new(entry.data, entry.bytes, "data") }.map_err(named)?;
            let is_gpu = entry.bytes > 0
                && place(&open.opened, &page, "data").map_err(named)? == CallLocation::Gpu;
            if is_gpu {
                return Err(named(CallFailure::usage(
                    "data lies in GPU memory",
                    "use host memory, or PageStore of Python for tensors of a GPU",
                )));
            }
            keys.push(PageKey::of_bytes(entry.key));
            data.push(page);
        }
        let call = Self {
            entries,
            keys,
            data,
        };
        for index in 0..count {
            call.set(index, NVME_GPU_ROW_NOT_RUN, 0);
        }
        Ok(call)
    }

    /// Refuses pages that would be loaded over each other.
    fn check_apart(&self) -> Answer<()> {
        let ranges = self.data.iter();
        let ranges = ranges.map(|page| (page.address(), page.length() as u64));
        let mut ranges: Vec<(u64, u64)> = ranges.filter(|(_, bytes)| *bytes > 0).collect();
        ranges.sort_unstable();
        match ranges.windows(2).find(|two| two[0].0 + two[0].1 > two[1].0) {
            None => Ok(()),
            Some(two) => Err(CallFailure::usage(
                format!("two pages share memory at address {:#x}", two[1].0),
                "give each page memory of its own",
            )),
        }
    }

    fn set(&self, index: usize, status: nvme_gpu_status, length: usize) {
        // SAFETY: an entry of the call, which lends it until the end.
        unsafe {
            let entry = self.entries.add(index);
            (&raw mut (*entry).status).write_unaligned(status);
            (&raw mut (*entry).length).write_unaligned(length);
        }
    }

    /// Writes each outcome to its entry, and returns the first failure.
    fn finish<T>(
        &self,
        outcomes: impl IntoIterator<Item = Result<T, KvError>>,
        length: impl Fn(T) -> Answer<usize>,
    ) -> Answer<()> {
        let mut first = Ok(());
        for (index, outcome) in outcomes.into_iter().enumerate() {
            match outcome.map_err(CallFailure::from).and_then(&length) {
                Ok(length) => self.set(index, NVME_GPU_OK, length),
                Err(failure) => {
                    self.set(index, failure.status, 0);
                    first = first.and(Err(failure.of_entry(index)));
                }
            }
        }
        first
    }
}

/// Stores `count` pages. A page whose status is NVME_GPU_OK is found from now on, also after a power cut; one of the same
/// key that was there stays. Each entry gets its status; returns that of the first one that failed, the others were carried
/// out all the same. Errors of an entry: NVME_GPU_ERROR_PAGE_IN_PROGRESS, NVME_GPU_ERROR_PAGE_NO_ROOM, those of the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_pages_put(
    pages: *mut PagesHandle,
    entries: *mut PageEntry,
    count: usize,
) -> nvme_gpu_status {
    call(|| {
        let open = PAGES.get(pages, "pages")?;
        // SAFETY: as the header says.
        let all = unsafe { PageCall::take(&open, entries, count) }?;
        // SAFETY: nothing writes the pages meanwhile, as the header says.
        let payloads = all.data.iter().map(|page| unsafe { page.bytes() });
        let given: Vec<(PageKey, &[u8])> = all.keys.iter().copied().zip(payloads).collect();
        all.finish(open.pages.store_all(&given), |outcome| match outcome {
            StoreOutcome::Stored | StoreOutcome::Present => Ok(0),
            StoreOutcome::InProgress => Err(CallFailure::new(
                NVME_GPU_ERROR_PAGE_IN_PROGRESS,
                "another call is storing this page",
                "wait for it",
            )),
            StoreOutcome::NoRoom => Err(CallFailure::new(
                NVME_GPU_ERROR_PAGE_NO_ROOM,
                "every page of the area is in use",
                "store it later, or use a larger area",
            )),
        })
    })
}

/// Loads `count` pages. `length` of each entry is the bytes of its page, which is what was stored; memory of an entry
/// that failed has no page. Each entry gets its status, as in nvme_gpu_pages_put(). Errors of an entry:
/// NVME_GPU_ERROR_PAGE_MISSING and NVME_GPU_ERROR_PAGE_LOST, where the page should be computed; NVME_GPU_ERROR_USAGE for too
/// little room; those of the device. Memory of two entries may not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_pages_get(
    pages: *mut PagesHandle,
    entries: *mut PageEntry,
    count: usize,
) -> nvme_gpu_status {
    call(|| {
        let open = PAGES.get(pages, "pages")?;
        // SAFETY: as the header says.
        let all = unsafe { PageCall::take(&open, entries, count) }?;
        all.check_apart()?;
        // SAFETY: nothing else uses the room meanwhile, as the header says, and no two overlap.
        let rooms = all.data.iter().map(|page| unsafe { page.bytes_mut() });
        let mut given: Vec<(PageKey, &mut [u8])> = all.keys.iter().copied().zip(rooms).collect();
        all.finish(open.pages.load_all(&mut given), Ok)
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
        let lengths = open.pages.lengths(&keys);
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
        open.pages.remove(&keys)?;
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
        let stats = PAGES.get(pages, "pages")?.pages.stats();
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
        };
        // SAFETY: as the header says.
        unsafe { give(statistics, &found) }
    })
}
