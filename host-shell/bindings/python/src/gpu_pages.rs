//! Pages in memory of a GPU, with the views that keep it.
// UNSAFETY: the GPU uses memory of views by address; the views are kept until it has ended, or the process has.
#![allow(unsafe_code)]

use crate::view::PyView;
use nvme_host::cuda::{
    HostCopy, HostPages, PageExtent, PageMover, PageRead, PendingPages, StagingBatch,
};
use nvme_host::{Result, Store};
use pyo3::prelude::*;
use std::sync::Arc;

/// Memory of a GPU for pages, which is kept for as long as this lives.
#[derive(Clone)]
pub struct GpuPages {
    pieces: Arc<Vec<Vec<PageExtent>>>,
    #[expect(dead_code, reason = "kept until the operation has ended")]
    views: Arc<Vec<Py<PyView>>>,
}

impl GpuPages {
    /// Returns the pages that consist of `pieces` of memory, all of which `views` keep.
    pub fn new(pieces: Vec<Vec<PageExtent>>, views: Vec<Py<PyView>>) -> Self {
        Self {
            pieces: Arc::new(pieces),
            views: Arc::new(views),
        }
    }

    /// Returns the pieces of a page.
    pub fn extents_of(&self, page: usize) -> &[PageExtent] {
        &self.pieces[page]
    }

    /// Returns the pieces of all pages.
    pub fn extents(&self) -> Vec<&[PageExtent]> {
        self.pieces.iter().map(Vec::as_slice).collect()
    }

    /// Returns the bytes that each page has room for.
    pub fn rooms(&self) -> Vec<usize> {
        let sum = |sum: u64, piece: &PageExtent| sum.saturating_add(piece.bytes);
        let pages = self.pieces.iter();
        pages
            .map(|pieces| pieces.iter().fold(0, sum) as usize)
            .collect()
    }

    /// Returns the bytes of all pages.
    pub fn bytes(&self) -> u64 {
        let rooms = self.rooms().into_iter();
        rooms.fold(0, |sum, room| sum.saturating_add(room as u64))
    }

    /// Loads pages into this memory: the [`PageRead`]s name no other.
    pub fn load(
        &self,
        store: &Store,
        mover: &PageMover,
        reads: &[PageRead<'_>],
        stream: u64,
    ) -> Result<PendingPages> {
        // SAFETY: the views keep the memory until the operation has ended, or the process has.
        unsafe { store.load_pages_on_gpu(mover, reads, stream) }
    }

    /// Copies some of the pages, which are `extents`, to memory of the mover.
    pub fn stage(
        &self,
        mover: &PageMover,
        extents: &[&[PageExtent]],
        stream: u64,
    ) -> Result<StagingBatch> {
        // SAFETY: as for `load`.
        unsafe { mover.stage(extents, stream) }
    }

    /// Copies between some of the pages, for which `host` was made, and memory of the host.
    pub fn copy(&self, host: &mut HostPages, copy: HostCopy<'_>, stream: u64) -> Result<()> {
        // SAFETY: as for `load`.
        unsafe { host.enqueue(copy, stream) }
    }
}
