//! Pages of a page store between a drive and the tensors of a cache, by kernels (docs/adr/0033).
//!
//! - [`PageMover`]: the kernels of one GPU, and memory for operations.
//! - [`PageMover::load`]: reads pages by a store's own queues, checks them, and copies those that are right to their
//!   pieces; [`PendingPages`] has the outcome.
//! - [`PageMover::stage`]: copies pages from their pieces to memory that nothing else writes, with their checksums:
//!   [`StagingBatch`], which [`StagingBatch::scatter`] writes to the drive.
//! - [`HostPages`]: pages in memory of the host, which the CPU reads and writes, and their copies.
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

mod host;
mod load;
mod memory;
mod stage;

pub use host::{HostCopy, HostPages};
pub use load::{PageEnd, PageRead, PendingPages};
pub use stage::{PageWrite, PendingWrites, StagingBatch};

use super::driver::Gpu;
use super::leftovers::{self, LaunchLeftover};
use super::module::{KernelFunction, Module};
use super::pointer::{KernelArgument, MemoryUse};
use super::rows::PendingRows;
use super::stream::{Stream, is_capturing};
use memory::{PageMemory, StagingPool};
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::pages::{CopyPages, HEADER_BYTES, PagePiece};
use std::sync::Arc;
use std::time::Duration;

/// Threads of a block.
const BLOCK_THREADS: u32 = 256;
/// Largest number of blocks of a launch: twice as many as a large GPU has multiprocessors.
const MOST_BLOCKS: u64 = 264;
/// Limit of the bytes of a page.
const MOST_BYTES: u32 = nvme_gpu_kernel::hash::MOST_CHUNK_BYTES;
/// Bytes of the pages of the first launch of an operation, at most unless it is one page. The drive works while the host
/// prepares the next launch, which has twice as many.
const FIRST_BYTES: usize = 2 << 20;
/// Bytes of the pages of a later launch, at most unless it is one page.
const MOST_CHUNK: usize = 16 << 20;
/// Launches of an operation after which they are longer, and the bytes of their pages.
const LONG_AFTER: usize = 64;
const LONG_CHUNK: usize = 128 << 20;
/// Bytes of a header.
const HEADER: usize = HEADER_BYTES as usize;

/// Bytes of a page in memory, or a part of them: the pieces of a page follow one another in its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageExtent {
    /// Address of the GPU: any.
    pub address: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// The kernels.
struct PageKernels {
    module: Module,
    check: KernelFunction,
    copy: KernelFunction,
    hash: KernelFunction,
}

impl PageKernels {
    /// Enqueues `job` for `count` pages in `stream`, `of_block` pages for each block.
    ///
    /// # Safety
    /// `function` takes one `T`, whose addresses are valid until the stream has passed it.
    unsafe fn launch<T: Copy>(
        &self,
        stream: u64,
        (function, of_block): (KernelFunction, u64),
        count: u64,
        job: &T,
    ) -> Result<()> {
        let blocks = count.div_ceil(of_block).clamp(1, MOST_BLOCKS) as u32;
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe {
            self.module
                .launch_in(stream, function, blocks, BLOCK_THREADS, job)
        }
    }

    /// Enqueues copies between staged pages and their pieces.
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    unsafe fn copy_pages(&self, stream: u64, job: &CopyPages) -> Result<()> {
        // SAFETY: the kernel takes one `CopyPages`; the caller vouches for its addresses.
        unsafe { self.launch(stream, (self.copy, 1), job.count, job) }
    }
}

/// Kernels that check and copy pages, and memory for it, of one GPU.
pub struct PageMover {
    gpu: Arc<Gpu>,
    kernels: Arc<PageKernels>,
    pool: Arc<StagingPool>,
    /// Stream of writes and of copies of the host's: work of the caller's streams does not wait for the drive.
    stream: Stream,
}

impl PageMover {
    /// # Errors
    /// As [`Module::of_image`].
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let module = Module::of_image(gpu, &nvme_gpu_kernel::HASH)?;
        let kernels = PageKernels {
            check: module.function("nvme_check_pages")?,
            copy: module.function("nvme_copy_pages")?,
            hash: module.function("nvme_hash_chunks")?,
            module,
        };
        Ok(Self {
            gpu: Arc::clone(gpu),
            kernels: Arc::new(kernels),
            pool: Arc::default(),
            stream: Stream::new(gpu)?,
        })
    }

    /// Returns the GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Checks that `stream`, a `CUstream`, is not being captured: the pages and checksums of a graph would be those of
    /// the capture.
    fn check_stream(&self, stream: u64) -> Result<()> {
        let _guest = self.gpu.enter()?;
        match is_capturing(stream)? {
            false => Ok(()),
            true => Err(Error::usage(
                "pages are moved in a stream that is being captured",
                "load and store pages outside of graphs",
            )),
        }
    }

    /// Checks the memory of the pieces of pages.
    ///
    /// # Errors
    /// As [`Gpu::judge`].
    fn judge<'a>(
        &self,
        stream: u64,
        pieces: impl Iterator<Item = &'a PageExtent>,
        usage: MemoryUse,
    ) -> Result<()> {
        let argument = |piece: &PageExtent| KernelArgument {
            name: "a page",
            address: piece.address,
            bytes: piece.bytes,
            unit: 1,
            usage,
        };
        self.gpu.judge_list(stream, pieces.map(argument))
    }
}

/// What launches use, kept until they have ended.
#[derive(Clone)]
struct PageHold {
    memory: Arc<PageMemory>,
    kernels: Arc<PageKernels>,
}

/// Memory and kernels of launches that were given up.
struct PagesLeft<P> {
    pending: P,
    _hold: PageHold,
    is_over: fn(&P) -> bool,
}

impl<P: Send> LaunchLeftover for PagesLeft<P> {
    fn is_over(&self) -> bool {
        (self.is_over)(&self.pending)
    }
}

/// An operation under way, none if there is nothing to do, with its memory and kernels. Dropping it does not stop the
/// operation, which keeps both until it has ended.
struct UnderWay {
    pending: Option<PendingRows>,
    hold: PageHold,
}

impl UnderWay {
    fn is_done(&self) -> bool {
        self.pending.as_ref().is_none_or(PendingRows::is_done)
    }

    fn wait(&self, limit: Duration) -> Result<()> {
        if let Some(pending) = &self.pending {
            pending.wait(limit)?;
        }
        Ok(())
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if let Some(pending) = self.pending.take().filter(|pending| !pending.is_done()) {
            leftovers::keep(Box::new(PagesLeft {
                pending,
                _hold: self.hold.clone(),
                is_over: PendingRows::is_done,
            }));
        }
    }
}

/// Checks that the pieces of a page have at least `bytes` bytes together, at least 1.
///
/// # Errors
/// [`Error::Usage`] for fewer, and for more than a page has.
fn check_pieces(pieces: &[PageExtent], bytes: u32) -> Result<()> {
    let sum = |sum: u64, piece: &PageExtent| sum.saturating_add(piece.bytes);
    let room = pieces.iter().fold(0, sum);
    if room > MOST_BYTES.into() {
        return Err(Error::usage(
            format!("the memory of a page has more than {MOST_BYTES} bytes"),
            "pass memory of the page's length",
        ));
    }
    if room < u64::from(bytes).max(1) {
        return Err(Error::usage(
            format!("the memory of a page has {room} bytes, and the page {bytes}"),
            "pass memory of the page's length",
        ));
    }
    Ok(())
}

/// Writes the pieces of a page, which were checked, as the kernels take them at byte `at` of the host's memory; returns
/// how many have bytes.
fn put_pieces(memory: &PageMemory, at: usize, pieces: &[PageExtent]) -> Result<u32> {
    let (mut first, mut count) = (0u64, 0);
    for piece in pieces.iter().filter(|piece| piece.bytes > 0) {
        let word = PagePiece {
            address: piece.address,
            first: first as u32,
            bytes: piece.bytes as u32,
        };
        memory.put(at + count as usize * size_of::<PagePiece>(), &[word])?;
        first += piece.bytes;
        count += 1;
    }
    Ok(count)
}

/// Returns the most bytes of the pages of launch `number` of an operation. Long operations have longer launches, too: a
/// store has a limit of them.
fn chunk_bytes(number: usize) -> usize {
    match number {
        0..LONG_AFTER => MOST_CHUNK.min(FIRST_BYTES << number.min(8)),
        _ => LONG_CHUNK,
    }
}

/// Returns the bytes that a page of `bytes` bytes has in the staging memory: whole blocks, with its header.
fn staged_bytes(bytes: u32) -> usize {
    HEADER + (bytes as usize).next_multiple_of(HEADER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_have_room_for_the_page() {
        let piece = |address, bytes| PageExtent { address, bytes };
        let pieces = [piece(1000, 100), piece(5, 0), piece(77, 3), piece(9, 1)];
        for bytes in [0, 1, 103, 104] {
            assert!(check_pieces(&pieces, bytes).is_ok());
        }
        assert!(check_pieces(&pieces, 105).is_err());
        assert!(check_pieces(&[], 0).is_err() && check_pieces(&[], 1).is_err());
        let far = [piece(0, u64::MAX), piece(0, u64::MAX)];
        assert!(check_pieces(&far, 1).is_err());
    }

    #[test]
    fn launches_begin_small() {
        let sizes = [0, 1, 2, 3, 4, 63, 64, 1000].map(|number| chunk_bytes(number) >> 20);
        assert_eq!(sizes, [2, 4, 8, 16, 16, 16, 128, 128]);
    }

    #[test]
    fn a_staged_page_has_whole_blocks() {
        assert_eq!(staged_bytes(1), 2 * HEADER);
        assert_eq!(staged_bytes(4096), 2 * HEADER);
        assert_eq!(staged_bytes(4097), 3 * HEADER);
    }
}
