//! Loads: the GPU reads pages into its own memory, compares them with what was committed, and copies those that are
//! right to their pieces.
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::memory::WordPlaces;
use super::{HEADER, PageExtent, PageHold, PageMover, UnderWay, pieces_of, staged_bytes};
use crate::leftovers;
use crate::pointer::MemoryUse;
use crate::rows::{GpuRows, LaunchSequence, PendingRows, ReadList};
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::pages::{
    CheckPages, CopyPages, HEADER_BYTES, PageArrival, PagePiece, PageStaging, page_code,
};
use nvme_gpu_kernel::rows::{ListHead, RangeTarget};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Bytes that are staged at a time: more pages follow in the same stream, in the same memory.
const MOST_STAGED: usize = 32 << 20;
/// Warps of a block of the kernel that checks.
const CHECKED_OF_BLOCK: u64 = 8;

/// A page to read.
#[derive(Clone, Copy, Debug)]
pub struct PageRead<'a> {
    /// First byte of the header on the drive, a multiple of 4,096.
    pub offset: u64,
    /// Bytes of the payload, which follows the header.
    pub bytes: u32,
    /// XXH3 of the payload that was committed.
    pub checksum: u64,
    /// XXH3 of the header that was committed.
    pub header_checksum: u64,
    /// Memory of the GPU with room for the payload at least.
    pub pieces: &'a [PageExtent],
}

/// The end of a page that was read.
#[derive(Debug, PartialEq, Eq)]
pub enum PageEnd {
    /// It has the header and the checksum that were committed, and lies in its pieces.
    Right {
        /// XXH3 of the payload.
        checksum: u64,
    },
    /// It is another page than was committed; its pieces are zero.
    Wrong {
        /// The header that was read.
        header: Box<[u8; HEADER]>,
        /// XXH3 of the payload that was read; 0 if the header is the wrong part.
        checksum: u64,
    },
    /// A read failed with this code of a row; its pieces are zero.
    Failed(i32),
}

/// Pages that a GPU loads. Dropping it does not stop the operation.
#[must_use = "pages may be lost"]
pub struct PendingPages {
    work: UnderWay,
    count: usize,
    arrivals: usize,
    headers: usize,
}

/// Places of a load's words: first those that the host uploads, in the GPU's memory where they are in the host's.
struct LoadPlaces {
    /// A list of reads for each chunk, and the range of its pages.
    lists: Vec<(usize, Range<usize>)>,
    pages: usize,
    pieces: usize,
    uploaded: usize,
    reads: usize,
    codes: usize,
    staged: usize,
    device: usize,
    arrivals: usize,
    headers: usize,
    host: usize,
}

impl LoadPlaces {
    fn of(pages: &[PageRead<'_>], pieces: usize, piece_bytes: u64) -> Result<Self> {
        let mut places = WordPlaces::default();
        let (mut lists, mut most_staged, mut most_reads) = (Vec::new(), 0, 0);
        let mut first = 0;
        while first < pages.len() {
            let (mut past, mut staged, mut reads) = (first, 0, 0);
            while let Some(page) = pages.get(past) {
                let more = staged_bytes(page.bytes);
                if past > first && staged + more > MOST_STAGED {
                    break;
                }
                staged += more;
                reads += range_of(page, 0, 0).pieces(piece_bytes.trailing_zeros()) as usize;
                past += 1;
            }
            let head = places.take(1, size_of::<ListHead>(), 16)?;
            places.take(past - first, size_of::<RangeTarget>(), 1)?;
            lists.push((head, first..past));
            most_staged = most_staged.max(staged);
            most_reads = most_reads.max(reads);
            first = past;
        }
        let at_pages = places.take(pages.len(), size_of::<PageStaging>(), 16)?;
        let at_pieces = places.take(pieces, size_of::<PagePiece>(), 16)?;
        let uploaded = places.len();
        let mut device = places;
        let mut host = places;
        Ok(Self {
            lists,
            pages: at_pages,
            pieces: at_pieces,
            uploaded,
            reads: device.take(most_reads, 4, 16)?,
            codes: device.take(pages.len(), 4, 16)?,
            staged: device.take(most_staged, 1, HEADER)?,
            device: device.len(),
            arrivals: host.take(pages.len(), size_of::<PageArrival>(), 16)?,
            headers: host.take(pages.len(), HEADER, 16)?,
            host: host.len(),
        })
    }
}

/// Returns the read of a page to address `to`; `first` is the number of pieces of the reads before.
fn range_of(page: &PageRead<'_>, to: u64, first: u64) -> RangeTarget {
    RangeTarget {
        byte: page.offset,
        bytes: u64::from(HEADER_BYTES) + u64::from(page.bytes),
        to,
        first,
    }
}

impl PageMover {
    /// Enqueues loads of `pages` in `stream`, a `CUstream`, and returns before they run: `rows` reads each page into
    /// memory of the mover; a kernel compares it with what was committed, and copies it to its pieces, or zeroes them. So
    /// no byte of a page that is not right is ever seen there by later work of the stream.
    ///
    /// # Safety
    /// The pieces are valid on the GPU until the operation has ended, and nothing else uses them meanwhile. The pages lie
    /// inside the namespace.
    ///
    /// # Errors
    /// [`Error::Usage`] for a stream that is being captured, for memory that the GPU does not reach, and for too
    /// little of it; those of [`GpuRows::gather`].
    pub unsafe fn load(
        &self,
        rows: &GpuRows,
        pages: &[PageRead<'_>],
        stream: u64,
    ) -> Result<PendingPages> {
        leftovers::reap();
        self.check_stream(stream)?;
        let extents = pages.iter().flat_map(|page| page.pieces);
        self.judge(stream, extents, MemoryUse::Writes)?;
        let piece_bytes = u64::from(rows.listed_piece_bytes());
        let pieces = pages
            .iter()
            .map(|page| pieces_of(page.pieces, page.bytes))
            .collect::<Result<Vec<_>>>()?;
        let count = pieces.iter().map(Vec::len).sum();
        let places = LoadPlaces::of(pages, count, piece_bytes)?;
        let memory = self.pool.take(&self.gpu, places.device, places.host)?;
        let hold = PageHold {
            memory: Arc::new(memory),
            kernels: Arc::clone(&self.kernels),
        };
        let lists = put_words(&hold, &places, pages, &pieces, piece_bytes)?;
        let mut loaded = PendingPages {
            work: UnderWay {
                pending: None,
                hold,
            },
            count: pages.len(),
            arrivals: places.arrivals,
            headers: places.headers,
        };
        if pages.is_empty() {
            return Ok(loaded);
        }
        // SAFETY: the caller keeps the conditions under `# Safety`; all other addresses are those of the memory.
        let enqueued = unsafe { self.enqueue(rows, &loaded.work.hold, (&places, &lists), stream) };
        match enqueued {
            Ok(pending) => loaded.work.pending = Some(pending),
            Err(error) => {
                if matches!(error, Error::Unfinished { .. }) {
                    // A part of it is under way, and its end cannot be asked for.
                    std::mem::forget(loaded.work.hold.clone());
                }
                return Err(error);
            }
        }
        Ok(loaded)
    }

    /// # Safety
    /// As [`load`](Self::load); the words of `hold` are those of the pages.
    unsafe fn enqueue(
        &self,
        rows: &GpuRows,
        hold: &PageHold,
        (places, lists): (&LoadPlaces, &[ReadList]),
        stream: u64,
    ) -> Result<PendingRows> {
        let (memory, kernels) = (&hold.memory, &hold.kernels);
        LaunchSequence::run(&self.gpu, stream, |sequence| {
            sequence.kernel(|| memory.upload(stream, (0, 0), places.uploaded))?;
            let mut before = 0;
            for ((_, chunk), list) in places.lists.iter().zip(lists) {
                // SAFETY: the list and the memory that it names belong to the operation.
                let reads = unsafe { rows.read_listed(list, stream) }?;
                sequence.add(reads, before);
                before += list.pieces;
                let (first, count) = (chunk.start, chunk.len() as u64);
                let pages = memory.device(places.pages + first * size_of::<PageStaging>());
                let check = CheckPages {
                    pages,
                    reads: list.status,
                    codes: memory.device(places.codes + first * 4),
                    arrivals: memory.host(places.arrivals + first * size_of::<PageArrival>()),
                    headers: memory.host(places.headers + first * HEADER),
                    count,
                };
                let copy = CopyPages {
                    pages,
                    codes: check.codes,
                    count,
                    stages: 0,
                    reserved: 0,
                };
                // SAFETY: each kernel takes what it is launched with; the caller vouches for the pieces, and the other
                // addresses are those of the memory.
                unsafe {
                    let function = (kernels.check, CHECKED_OF_BLOCK);
                    sequence.kernel(|| kernels.launch(stream, function, count, &check))?;
                    sequence.kernel(|| kernels.copy_pages(stream, &copy))?;
                }
            }
            Ok(())
        })
    }
}

/// Writes the words of a load to the host's memory; returns the list of each chunk.
fn put_words(
    hold: &PageHold,
    places: &LoadPlaces,
    pages: &[PageRead<'_>],
    pieces: &[Vec<PagePiece>],
    piece_bytes: u64,
) -> Result<Vec<ReadList>> {
    let memory = &hold.memory;
    let shift = piece_bytes.trailing_zeros();
    let (mut lists, mut at_pieces) = (Vec::new(), places.pieces);
    for (head, chunk) in &places.lists {
        let (mut staged, mut reads) = (places.staged, 0);
        let mut ranges = Vec::with_capacity(chunk.len());
        let mut words = Vec::with_capacity(chunk.len());
        for (page, pieces) in pages[chunk.clone()].iter().zip(&pieces[chunk.clone()]) {
            let range = range_of(page, memory.device(staged), reads);
            words.push(PageStaging {
                staged: range.to,
                pieces: memory.device(at_pieces),
                checksum: page.checksum,
                header_checksum: page.header_checksum,
                piece_count: pieces.len() as u32,
                bytes: page.bytes,
                first_read: reads as u32,
                reads: range.pieces(shift) as u32,
            });
            memory.put(at_pieces, pieces)?;
            at_pieces += size_of_val(&pieces[..]);
            staged += staged_bytes(page.bytes);
            reads += range.pieces(shift);
            ranges.push(range);
        }
        let list = ListHead {
            range_count: ranges.len() as u64,
            pieces: reads,
        };
        memory.put(*head, &[list])?;
        memory.put(*head + size_of::<ListHead>(), &ranges)?;
        memory.put(
            places.pages + chunk.start * size_of::<PageStaging>(),
            &words,
        )?;
        lists.push(ReadList {
            list: memory.device(*head),
            ranges: ranges.len() as u32,
            pieces: reads,
            status: memory.device(places.reads),
        });
    }
    Ok(lists)
}

impl PendingPages {
    /// True if it has ended: it does not use the pieces any more.
    pub fn is_done(&self) -> bool {
        self.work.is_done()
    }

    /// Waits for the end, `limit` at most, and returns the end of each page.
    ///
    /// # Errors
    /// [`Error::Unfinished`] past the limit: the operation continues. Every other error means that it has ended, and
    /// that its pages are not to be trusted, as [`Error::Changed`].
    pub fn wait(&self, limit: Duration) -> Result<Vec<PageEnd>> {
        self.work.wait(limit)?;
        (0..self.count).map(|page| self.end(page)).collect()
    }

    fn end(&self, page: usize) -> Result<PageEnd> {
        let memory = &self.work.hold.memory;
        let at = self.arrivals + page * size_of::<PageArrival>();
        let (checksum, code) = (memory.word(at)?, memory.word(at + 8)? as u32 as i32);
        Ok(match code {
            0 => PageEnd::Right { checksum },
            page_code::HEADER | page_code::PAYLOAD => {
                let read = memory.bytes(self.headers + page * HEADER, HEADER)?;
                let mut header = Box::new([0; HEADER]);
                header.copy_from_slice(&read);
                PageEnd::Wrong { header, checksum }
            }
            code => PageEnd::Failed(code),
        })
    }
}
