//! Calls that store and load pages of keys and values.
// UNSAFETY: functions of the C interface, over memory that C vouches for.
#![allow(unsafe_code)]

use crate::border::{Answer, call, null};
use crate::memory::{CallLocation, CallMemory, place};
use crate::pages::{NVME_GPU_PAGE_KEY_BYTES, OpenedPages, PAGES, PagesHandle};
use crate::status::{
    CallFailure, NVME_GPU_ERROR_PAGE_IN_PROGRESS, NVME_GPU_ERROR_PAGE_NO_ROOM,
    NVME_GPU_ERROR_UNFINISHED, NVME_GPU_OK, NVME_GPU_ROW_NOT_RUN, nvme_gpu_status,
};
use crate::transfer::nvme_gpu_stream;
use nvme_kv::{KvError, PageKey, StoreOutcome};
use std::ffi::c_void;
#[cfg(feature = "cuda")]
use {
    crate::pending::check_not_captured,
    nvme_host::cuda::PageExtent,
    nvme_kv::on_gpu::{self, GpuPages, OwnWay, PageJob, PagePieces},
    nvme_kv_server::OpenedArea,
    std::sync::Arc,
};

/// Moves the pages of a call on the GPU: by [`on_gpu::store`] or [`on_gpu::load`].
#[cfg(feature = "cuda")]
type GpuCall<T> = fn(OwnWay, Vec<PageKey>, GpuPages<()>, u64) -> nvme_host::Result<PageJob<T>>;

/// One page of a call.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct PageEntry {
    /// Key by nvme_gpu_pages_key().
    pub key: [u8; NVME_GPU_PAGE_KEY_BYTES],
    /// Memory of the page, of the host or of the GPU that the store was opened with.
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

/// Returns where a page lies. Only the owner of a shared area opens its device, without a GPU.
fn location(open: &OpenedPages, page: &CallMemory) -> Answer<CallLocation> {
    match &open.opened {
        Some(opened) => place(opened, page, "data"),
        None => Ok(CallLocation::Host),
    }
}

/// Entries of a call, checked: none was carried out when one is refused.
struct PageCall {
    entries: *mut PageEntry,
    keys: Vec<PageKey>,
    data: Vec<CallMemory>,
    is_gpu: bool,
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
        let (mut keys, mut data, mut places) = (Vec::new(), Vec::new(), Vec::new());
        for index in 0..count {
            let named = |failure: CallFailure| failure.of_entry(index);
            // SAFETY: below `count`. Programs may pack their structures.
            let entry = unsafe { entries.add(index).read_unaligned() };
            if entry.reserved != 0 {
                let cause = format!("reserved of nvme_gpu_page is {}", entry.reserved);
                let remedy = "set it to 0, as structures of zeroes have it";
                return Err(named(CallFailure::usage(cause, remedy)));
            }
            // SAFETY: the caller's.
            let page =
                unsafe { CallMemory::new(entry.data, entry.bytes, "data") }.map_err(named)?;
            if entry.bytes > 0 {
                places.push((index, location(open, &page).map_err(named)?));
            }
            keys.push(PageKey::of_bytes(entry.key));
            data.push(page);
        }
        let is_gpu = places
            .first()
            .is_some_and(|(_, place)| *place == CallLocation::Gpu);
        let mixed = |(_, place): &&(usize, CallLocation)| (*place == CallLocation::Gpu) != is_gpu;
        if let Some((index, _)) = places.iter().find(mixed) {
            let cause = "data lies in memory of the host and of a GPU";
            let remedy = "make one call for each";
            return Err(CallFailure::usage(cause, remedy).of_entry(*index));
        }
        let call = Self {
            entries,
            keys,
            data,
            is_gpu,
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

    /// Checks the stream, and lets `way` move the pages of this call on the GPU.
    ///
    /// # Safety
    /// The caller fulfils the contract in the header for the memory of the entries.
    #[cfg(feature = "cuda")]
    unsafe fn on_gpu<T>(
        &self,
        open: &OpenedPages,
        stream: nvme_gpu_stream,
        way: GpuCall<T>,
    ) -> Answer<Vec<nvme_kv::Result<T>>> {
        let (OpenedArea::Own(own), Some(opened)) = (&open.area, &open.opened) else {
            // `location` says so of each page.
            return Err(
                nvme_host::Error::internal("a page of a shared area in memory of a GPU").into(),
            );
        };
        check_not_captured(opened, stream)?;
        let mut pieces = PagePieces::default();
        for page in &self.data {
            pieces.push([PageExtent {
                address: page.address(),
                bytes: page.length() as u64,
            }]);
        }
        // SAFETY: the caller's.
        let pages = unsafe { GpuPages::new(pieces, ()) };
        let own = (Arc::clone(own), Arc::clone(&open.way));
        Ok(way(own, self.keys.clone(), pages, stream.addr() as u64)?())
    }

    fn set(&self, index: usize, status: nvme_gpu_status, length: usize) {
        // SAFETY: an entry of the call, which lends it until the end.
        unsafe {
            let entry = self.entries.add(index);
            (&raw mut (*entry).status).write_unaligned(status);
            (&raw mut (*entry).length).write_unaligned(length);
        }
    }

    /// Writes each outcome to its entry, and returns the first failure, or one that says that memory is still in use.
    fn finish<T>(
        &self,
        outcomes: impl IntoIterator<Item = Result<T, KvError>>,
        length: impl Fn(T) -> Answer<usize>,
    ) -> Answer<()> {
        let mut first: Answer<()> = Ok(());
        for (index, outcome) in outcomes.into_iter().enumerate() {
            match outcome.map_err(CallFailure::from).and_then(&length) {
                Ok(length) => self.set(index, NVME_GPU_OK, length),
                Err(failure) => {
                    self.set(index, failure.status, 0);
                    let is_in_use = |status| status == NVME_GPU_ERROR_UNFINISHED;
                    let known = first.as_ref().err().map(|known| known.status);
                    if known.is_none_or(|known| is_in_use(failure.status) && !is_in_use(known)) {
                        first = Err(failure.of_entry(index));
                    }
                }
            }
        }
        first
    }
}

/// Stores `count` pages. A page whose status is NVME_GPU_OK is found from now on, also after a power cut; one of the same
/// key that was there stays. Each entry gets its status; returns that of the first one that failed, the others were carried
/// out all the same. Pages of one call lie in host memory, or all in memory of the GPU that the store was opened with: they
/// are taken when the work before them in `stream` has ended, and this call waits. NVME_GPU_ERROR_UNFINISHED: it has not
/// ended in time, and its memory must stay valid. `stream` is NULL for the default stream, and unused for host memory.
/// Errors of an entry: NVME_GPU_ERROR_PAGE_IN_PROGRESS, NVME_GPU_ERROR_PAGE_NO_ROOM, those of the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_pages_put(
    pages: *mut PagesHandle,
    entries: *mut PageEntry,
    count: usize,
    stream: nvme_gpu_stream,
) -> nvme_gpu_status {
    call(|| {
        #[cfg(feature = "cuda")]
        crate::kept::reap();
        let open = PAGES.get(pages, "pages")?;
        // SAFETY: as the header says.
        let all = unsafe { PageCall::take(&open, entries, count) }?;
        let _ = stream;
        let outcomes = match all.is_gpu {
            // SAFETY: as the header says.
            #[cfg(feature = "cuda")]
            true => unsafe { all.on_gpu(&open, stream, on_gpu::store) }?,
            _ => {
                // SAFETY: nothing writes the pages meanwhile, as the header says.
                let payloads = all.data.iter().map(|page| unsafe { page.bytes() });
                let given: Vec<_> = all.keys.iter().copied().zip(payloads).collect();
                open.area.store_all(&given)
            }
        };
        all.finish(outcomes, |outcome| match outcome {
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
/// little room; those of the device. Memory of two entries may not overlap. Memory of a GPU and `stream` as for
/// nvme_gpu_pages_put(): pages are read and checked on the GPU, and memory of an entry that failed is zeros.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvme_gpu_pages_get(
    pages: *mut PagesHandle,
    entries: *mut PageEntry,
    count: usize,
    stream: nvme_gpu_stream,
) -> nvme_gpu_status {
    call(|| {
        #[cfg(feature = "cuda")]
        crate::kept::reap();
        let open = PAGES.get(pages, "pages")?;
        // SAFETY: as the header says.
        let all = unsafe { PageCall::take(&open, entries, count) }?;
        all.check_apart()?;
        let _ = stream;
        let outcomes = match all.is_gpu {
            // SAFETY: as the header says.
            #[cfg(feature = "cuda")]
            true => unsafe { all.on_gpu(&open, stream, on_gpu::load) }?,
            _ => {
                // SAFETY: nothing else uses the room meanwhile, as the header says, and no two overlap.
                let rooms = all.data.iter().map(|page| unsafe { page.bytes_mut() });
                let mut given: Vec<_> = all.keys.iter().copied().zip(rooms).collect();
                open.area.load_all(&mut given)
            }
        };
        all.finish(outcomes, Ok)
    })
}
