//! Memory of a GPU for pages, what moves them, and who keeps what has not ended.
// UNSAFETY: the GPU uses memory of the caller by address, which the caller keeps until it has ended.
#![allow(unsafe_code)]

use crate::error::{KvError, Result};
use crate::store::PageStore;
use nvme_cuda::{HostCopy, HostPages, PageExtent, PageMover, PageRead, PendingPages, StagingBatch};
use nvme_driver::error::{Error, Result as DriveResult};
use nvme_driver::lock::lock;
use nvme_store::Store;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The pages of an area that this process has for itself.
pub type OwnPages = Arc<PageStore<Arc<Store>>>;
/// An area and its way to memory of a GPU.
pub type OwnWay = (OwnPages, Arc<GpuWay>);
/// Waits for what was put into a stream, and returns the outcome of each page: a length of a load, a
/// [`StoreOutcome`](crate::StoreOutcome) of a store.
pub type PageJob<T> = Box<dyn FnOnce() -> Vec<Result<T>> + Send>;
/// Work whose end was not seen in time, with the memory that it uses: true once it has ended. Dropped earlier, the memory
/// could go to somebody else while a GPU still writes it.
pub type UnfinishedWork = Box<dyn Fn() -> bool + Send>;

/// Pieces of memory of pages, in one list: a vector for each page would cost more than the rest of a page.
#[derive(Clone, Debug, Default)]
pub struct PagePieces {
    extents: Vec<PageExtent>,
    /// Number of the extent behind the last one of each page.
    ends: Vec<usize>,
}

impl PagePieces {
    /// Appends a page that consists of `pieces`.
    pub fn push(&mut self, pieces: impl IntoIterator<Item = PageExtent>) {
        self.extents.extend(pieces);
        self.ends.push(self.extents.len());
    }

    /// Returns the number of pages.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// True without pages.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the pieces of all pages, one after the other.
    pub fn extents(&self) -> &[PageExtent] {
        &self.extents
    }

    /// Returns the pieces of page `page`.
    pub fn of_page(&self, page: usize) -> &[PageExtent] {
        let first = page.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.extents[first..self.ends[page]]
    }
}

/// Memory of a GPU for pages; `K` keeps it.
#[derive(Clone)]
pub struct GpuPages<K> {
    pieces: Arc<PagePieces>,
    #[expect(dead_code, reason = "kept until the operation has ended")]
    keeper: K,
}

impl<K: Clone> GpuPages<K> {
    /// Returns the pages that consist of these pieces of memory.
    ///
    /// # Safety
    /// The pieces are valid memory of the GPU of the pages' store for as long as a clone of `keeper` lives, and no other
    /// work uses them in a way that conflicts.
    pub unsafe fn new(pieces: PagePieces, keeper: K) -> Self {
        let pieces = Arc::new(pieces);
        Self { pieces, keeper }
    }

    /// Returns the pieces.
    pub fn pieces(&self) -> &PagePieces {
        &self.pieces
    }

    pub(super) fn extents_of(&self, page: usize) -> &[PageExtent] {
        self.pieces.of_page(page)
    }

    /// Returns the bytes that each page has room for.
    pub(super) fn rooms(&self) -> Vec<usize> {
        let pages = 0..self.pieces.len();
        pages
            .map(|page| bytes_of(self.extents_of(page)) as usize)
            .collect()
    }

    pub(super) fn bytes(&self) -> u64 {
        bytes_of(self.pieces.extents())
    }

    pub(super) fn load(
        &self,
        store: &Store,
        mover: &PageMover,
        (reads, header_of): (&[PageRead<'_>], impl FnMut(usize) -> u64),
        stream: u64,
    ) -> DriveResult<PendingPages> {
        // SAFETY: the keeper keeps the memory, which the reads name alone, until the operation has ended.
        unsafe { store.load_pages_on_gpu(mover, reads, header_of, stream) }
    }

    pub(super) fn stage(
        &self,
        mover: &PageMover,
        extents: &[&[PageExtent]],
        stream: u64,
    ) -> DriveResult<StagingBatch> {
        // SAFETY: as for `load`.
        unsafe { mover.stage(extents, stream) }
    }

    pub(super) fn copy(
        &self,
        host: &mut HostPages,
        copy: HostCopy<'_>,
        stream: u64,
    ) -> DriveResult<()> {
        // SAFETY: as for `load`.
        unsafe { host.enqueue(copy, stream) }
    }
}

fn bytes_of(pieces: &[PageExtent]) -> u64 {
    let bytes = pieces.iter().map(|piece| piece.bytes);
    bytes.fold(0, u64::saturating_add)
}

/// Mover and counts of one page store, and who keeps what has not ended in time.
pub struct GpuWay {
    mover: Mutex<Option<Arc<PageMover>>>,
    pub(super) loaded: AtomicU64,
    pub(super) stored: AtomicU64,
    keep: fn(UnfinishedWork),
}

impl GpuWay {
    /// Returns a way without a mover. `keep` keeps work until it has ended.
    pub fn new(keep: fn(UnfinishedWork)) -> Self {
        Self {
            mover: Mutex::new(None),
            loaded: AtomicU64::new(0),
            stored: AtomicU64::new(0),
            keep,
        }
    }

    /// Returns the pages that a GPU has loaded and checked, and those that it has written.
    pub fn moved(&self) -> (u64, u64) {
        (
            self.loaded.load(Ordering::Relaxed),
            self.stored.load(Ordering::Relaxed),
        )
    }

    fn mover(&self, store: &Store) -> DriveResult<Arc<PageMover>> {
        let mut mover = lock(&self.mover);
        if let Some(found) = &*mover {
            return Ok(Arc::clone(found));
        }
        let gpu = store.gpu().ok_or_else(|| {
            Error::usage(
                "a page lies in memory of a GPU, and the store was opened without one",
                "open the store with a GPU, or pass memory of the host",
            )
        })?;
        let made = Arc::new(PageMover::new(gpu)?);
        Ok(Arc::clone(mover.insert(made)))
    }

    /// Keeps `work` and its pages if `error` says that it has not ended.
    pub(super) fn keep_unfinished<T: Send + 'static, K: Clone + Send + 'static>(
        &self,
        error: &Error,
        work: T,
        pages: &GpuPages<K>,
        is_done: fn(&T) -> bool,
    ) {
        if matches!(error, Error::Unfinished { .. }) {
            self.keep(work, pages, is_done);
        }
    }

    pub(super) fn keep<T: Send + 'static, K: Clone + Send + 'static>(
        &self,
        work: T,
        pages: &GpuPages<K>,
        is_done: fn(&T) -> bool,
    ) {
        let kept = Unfinished {
            work,
            pages: pages.clone(),
            is_done,
        };
        (self.keep)(Box::new(move || kept.is_done()));
    }
}

struct Unfinished<T, K> {
    work: T,
    #[expect(dead_code, reason = "kept until the operation has ended")]
    pages: GpuPages<K>,
    is_done: fn(&T) -> bool,
}

impl<T, K> Unfinished<T, K> {
    fn is_done(&self) -> bool {
        (self.is_done)(&self.work)
    }
}

/// Returns whether the GPU itself moves pages of `store`, and why.
pub fn way_of(store: &Store) -> (bool, String) {
    if store.gpu().is_none() {
        return (false, "the store was opened without a GPU".to_owned());
    }
    match store.check_pages_on_gpu() {
        Ok(()) => {
            let why =
                "the GPU reads pages of the drive, checks them where they arrive, and writes them";
            (true, why.to_owned())
        }
        Err(error) => {
            let why = format!("the CPU moves pages through memory of the host: {error}");
            (false, why)
        }
    }
}

/// Returns the store of an area, its mover, and the time limit of an operation on `pages`.
pub(super) fn at_hand<K: Clone>(
    own: &OwnPages,
    way: &GpuWay,
    pages: &GpuPages<K>,
) -> DriveResult<(Arc<Store>, Arc<PageMover>, Duration)> {
    let store = Arc::clone(own.medium());
    let mover = way.mover(&store)?;
    let limit = store.patience(pages.bytes());
    Ok((store, mover, limit))
}

/// Returns `error` as the outcome of each of `count` pages.
pub(super) fn all_failed<T>(count: usize, error: &Error) -> Vec<Result<T>> {
    let failed = |_| {
        Err(KvError::drive("the transfer of pages by the GPU")(
            error.again(),
        ))
    };
    (0..count).map(failed).collect()
}
