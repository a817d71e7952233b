//! Pages that the CPU reads or writes, in memory of the host that the GPU reaches: copies between them and their pieces.
// UNSAFETY: launches a kernel over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::memory::WordPlaces;
use super::stage::{all_lengths, await_event, put_pages};
use super::{HEADER, PageExtent, PageHold, PageMover, PagesLeft, staged_bytes};
use crate::leftovers;
use crate::pointer::MemoryUse;
use crate::rows::LaunchSequence;
use crate::stream::StreamEvent;
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::pages::{CopyPages, PagePiece, PageStaging};
use std::sync::Arc;
use std::time::Duration;

/// Pages in memory of the host, each with room for all bytes of its pieces.
pub struct HostPages {
    hold: PageHold,
    /// Byte of the payload in the memory of the host, and its room.
    pages: Vec<(usize, u32)>,
    pieces: Vec<Vec<PageExtent>>,
    /// Places of the words of pages and pieces, which are those of the GPU's memory, too.
    words: (usize, usize),
    codes: usize,
    uploaded: usize,
    /// Recorded behind the last copy.
    copied: Option<StreamEvent>,
}

/// A copy of all pages.
#[derive(Clone, Copy, Debug)]
pub enum HostCopy<'a> {
    /// From their pieces to memory of the host.
    Collect,
    /// As many bytes of each to its pieces; those of a page without a length are zeroed.
    Deliver(&'a [Option<u32>]),
}

impl PageMover {
    /// Makes room in memory of the host for `pages`, whose pieces are memory of the GPU.
    ///
    /// # Errors
    /// As [`stage`](Self::stage).
    pub fn host_pages(
        &self,
        pages: &[&[PageExtent]],
        usage: MemoryUse,
        stream: u64,
    ) -> Result<HostPages> {
        leftovers::reap();
        self.check_stream(stream)?;
        self.judge(stream, pages.iter().copied().flatten(), usage)?;
        let lengths = all_lengths(pages)?;
        let count = pages.iter().map(|pieces| pieces.len()).sum();
        let mut places = WordPlaces::default();
        let at_pages = places.take(pages.len(), size_of::<PageStaging>(), 16)?;
        let at_pieces = places.take(count, size_of::<PagePiece>(), 16)?;
        let codes = places.take(pages.len(), 4, 16)?;
        let mut host = places;
        let mut at = Vec::with_capacity(pages.len());
        for bytes in &lengths {
            at.push((host.take(1, staged_bytes(*bytes), 16)? + HEADER, *bytes));
        }
        let memory = self.pool.take(&self.gpu, places.len(), host.len())?;
        Ok(HostPages {
            hold: PageHold {
                memory: Arc::new(memory),
                kernels: Arc::clone(&self.kernels),
            },
            pages: at,
            pieces: pages.iter().map(|pieces| pieces.to_vec()).collect(),
            words: (at_pages, at_pieces),
            codes,
            uploaded: places.len(),
            copied: None,
        })
    }

    /// Returns the stream of the mover's own copies and writes, a `CUstream`.
    pub fn stream(&self) -> u64 {
        self.stream.handle()
    }

    /// Returns the stream of the mover's own copies, after what is in `stream` now.
    ///
    /// # Errors
    /// [`Error::Environment`] with the driver's answer.
    pub fn after(&self, stream: u64) -> Result<u64> {
        let event = StreamEvent::untimed(&self.gpu)?;
        event.record_at(stream)?;
        event.before(self.stream.handle())?;
        Ok(self.stream.handle())
    }
}

impl HostPages {
    /// Returns the payload of each page, as long as its room.
    ///
    /// # Errors
    /// [`Error::Device`] while a copy is in progress.
    pub fn payloads(&mut self) -> Result<Vec<&mut [u8]>> {
        if let Some(event) = &self.copied
            && !event.is_done()?
        {
            return Err(Error::internal("pages are used while they are copied"));
        }
        let memory = &self.hold.memory;
        let payload = |(at, bytes): &(usize, u32)| {
            let bytes = *bytes as usize;
            let start = memory.place(*at, bytes)?;
            // SAFETY: the bytes lie in memory of this operation, apart for each page; no kernel uses them, and the
            // exclusive borrow keeps the next copy away.
            Ok(unsafe { std::slice::from_raw_parts_mut(start, bytes) })
        };
        self.pages.iter().map(payload).collect()
    }

    /// Enqueues a copy between memory of the host and the pieces in `stream`, a `CUstream`, and returns before it runs.
    ///
    /// # Safety
    /// The pieces are valid on the GPU, and nothing else uses them until the copy has ended.
    ///
    /// # Errors
    /// [`Error::Environment`] with the driver's answer.
    pub unsafe fn enqueue(&mut self, copy: HostCopy<'_>, stream: u64) -> Result<()> {
        if self.pages.is_empty() {
            return Ok(());
        }
        let memory = &self.hold.memory;
        let pages = self.pages.iter().zip(&self.pieces);
        let pages =
            pages.map(|((at, room), pieces)| (memory.host(at - HEADER), *room, &pieces[..]));
        let (codes, stages) = match copy {
            HostCopy::Collect => {
                put_pages(&self.hold, self.words, pages)?;
                (0, 1)
            }
            HostCopy::Deliver(lengths) => {
                let length = |page: usize| lengths.get(page).copied().flatten();
                let pages = pages.enumerate().map(|(page, (staged, room, pieces))| {
                    let bytes = length(page).map_or(room, |length| length.min(room));
                    (staged, bytes, pieces)
                });
                put_pages(&self.hold, self.words, pages)?;
                let codes = (0..self.pages.len()).map(|page| u32::from(length(page).is_none()));
                memory.put(self.codes, &codes.collect::<Vec<_>>())?;
                (memory.device(self.codes), 0)
            }
        };
        let copy = CopyPages {
            pages: memory.device(self.words.0),
            codes,
            count: self.pages.len() as u64,
            stages,
            reserved: 0,
        };
        let gpu = self.hold.kernels.module.gpu();
        let event = StreamEvent::untimed(gpu)?;
        let enqueued = LaunchSequence::run_kernels(gpu, stream, |sequence| {
            sequence.kernel(|| memory.upload(stream, (0, 0), self.uploaded))?;
            // SAFETY: the kernel takes one `CopyPages`; the caller vouches for the pieces, the other addresses are those
            // of the memory.
            sequence.kernel(|| unsafe { self.hold.kernels.copy_pages(stream, &copy) })?;
            event.record_at(stream)
        });
        match enqueued {
            Ok(()) => {
                self.copied = Some(event);
                Ok(())
            }
            Err(error) => {
                if matches!(error, Error::Unfinished { .. }) {
                    std::mem::forget(self.hold.clone());
                }
                Err(error)
            }
        }
    }

    /// True if no copy is in progress.
    pub fn is_done(&self) -> bool {
        // A kernel that died uses nothing any more.
        let is_over = |event: &StreamEvent| event.is_done().unwrap_or(true);
        self.copied.as_ref().is_none_or(is_over)
    }

    /// Waits for the last copy, `limit` at most.
    ///
    /// # Errors
    /// [`Error::Unfinished`] past the limit: the copy is in progress; [`Error::Device`] when a kernel died.
    pub fn wait(&self, limit: Duration) -> Result<()> {
        match &self.copied {
            Some(event) => await_event(event, limit),
            None => Ok(()),
        }
    }
}

impl Drop for HostPages {
    fn drop(&mut self) {
        if let Some(event) = self.copied.take() {
            leftovers::keep(Box::new(PagesLeft {
                pending: event,
                _hold: self.hold.clone(),
                is_over: |event| event.is_done().unwrap_or(true),
            }));
            leftovers::reap();
        }
    }
}
