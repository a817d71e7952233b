//! Loads: the GPU reads pages into its own memory, compares them with what was committed, and copies those that are
//! right to their pieces.
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::memory::{OWN_STREAMS, PageMemory, WordPlaces};
use super::{
    HEADER, PageExtent, PageHold, PageMover, UnderWay, chunk_bytes, put_pieces, staged_bytes,
};
use crate::leftovers;
use crate::pointer::MemoryUse;
use crate::rows::{GpuRows, LaunchSequence, PendingRows, ReadList};
use crate::stream::StreamEvent;
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::pages::{
    CheckPages, CopyPages, HEADER_BYTES, PageArrival, PagePiece, PageStaging, page_code,
};
use nvme_gpu_kernel::rows::{ListHead, RangeTarget};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Parts of the staging memory: one is read into while the pages of the other one are copied. Each has a stream, so that
/// the drive has reads of the next launch while the last ones of a launch end.
const PARTS: usize = OWN_STREAMS;
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
    chunks: Vec<LoadChunk>,
    reads: [usize; PARTS],
    codes: usize,
    staged: [usize; PARTS],
    device: usize,
    arrivals: usize,
    headers: usize,
    host: usize,
}

/// Pages that one launch reads, and the places of their words, which are uploaded together.
struct LoadChunk {
    pages: Range<usize>,
    /// Of the list of reads.
    head: usize,
    staging: usize,
    pieces: usize,
    words: Range<usize>,
}

impl LoadPlaces {
    fn of(pages: &[PageRead<'_>], piece_bytes: u64) -> Result<Self> {
        let mut places = WordPlaces::default();
        let (mut chunks, mut most_staged, mut most_reads) = (Vec::new(), 0, 0);
        let mut first = 0;
        while first < pages.len() {
            let most = chunk_bytes(chunks.len());
            let (mut past, mut staged, mut reads, mut pieces) = (first, 0, 0, 0);
            while let Some(page) = pages.get(past) {
                let more = staged_bytes(page.bytes);
                if past > first && staged + more > most {
                    break;
                }
                staged += more;
                reads += range_of(page, 0, 0).pieces(piece_bytes.trailing_zeros()) as usize;
                pieces += page.pieces.len();
                past += 1;
            }
            let count = past - first;
            let head = places.take(1, size_of::<ListHead>(), 16)?;
            places.take(count, size_of::<RangeTarget>(), 1)?;
            let staging = places.take(count, size_of::<PageStaging>(), 16)?;
            let pieces = places.take(pieces, size_of::<PagePiece>(), 16)?;
            chunks.push(LoadChunk {
                pages: first..past,
                head,
                staging,
                pieces,
                words: head..places.len(),
            });
            most_staged = most_staged.max(staged);
            most_reads = most_reads.max(reads);
            first = past;
        }
        let (mut device, mut host) = (places, places);
        let (mut reads, mut staged) = ([0; PARTS], [0; PARTS]);
        for (reads, staged) in reads.iter_mut().zip(&mut staged).take(chunks.len()) {
            *reads = device.take(most_reads, 4, 16)?;
            *staged = device.take(most_staged, 1, HEADER)?;
        }
        Ok(Self {
            chunks,
            reads,
            codes: device.take(pages.len(), 4, 16)?,
            staged,
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
    /// Enqueues loads of `pages`, and returns before they run: `rows` reads each page into memory of the mover; kernels in
    /// `stream`, a `CUstream`, compare it with what was committed, and copy it to its pieces, or zero them. So no byte of a
    /// page that is not right is ever seen there by later work of the stream. The reads do not wait for what the stream
    /// does before. `header_of` returns the XXH3 of the header with which a page was committed; it is asked for one page
    /// after the other, while the drive reads those before.
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
        header_of: impl FnMut(usize) -> u64,
        stream: u64,
    ) -> Result<PendingPages> {
        leftovers::reap();
        self.check_stream(stream)?;
        let extents = pages.iter().flat_map(|page| page.pieces);
        self.judge(stream, extents, MemoryUse::Writes)?;
        for page in pages {
            super::check_pieces(page.pieces, page.bytes)?;
        }
        let places = LoadPlaces::of(pages, u64::from(rows.listed_piece_bytes()))?;
        let memory = self.pool.take(&self.gpu, places.device, places.host)?;
        let hold = PageHold {
            memory: Arc::new(memory),
            kernels: Arc::clone(&self.kernels),
        };
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
        let enqueued = unsafe {
            let given = (pages, header_of);
            self.enqueue(rows, &loaded.work.hold, &places, given, stream)
        };
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
    /// As [`load`](Self::load); the places are those of the pages in the memory of `hold`.
    unsafe fn enqueue(
        &self,
        rows: &GpuRows,
        hold: &PageHold,
        places: &LoadPlaces,
        (pages, mut header_of): (&[PageRead<'_>], impl FnMut(usize) -> u64),
        stream: u64,
    ) -> Result<PendingRows> {
        let (memory, kernels) = (&hold.memory, &hold.kernels);
        let readers = memory.streams()?;
        let shift = rows.listed_piece_bytes().trailing_zeros();
        let mut free: [Option<StreamEvent>; PARTS] = [const { None }; PARTS];
        LaunchSequence::run(&self.gpu, stream, |sequence| {
            for reader in readers {
                sequence.uses(reader);
            }
            let mut before = 0;
            for (number, chunk) in places.chunks.iter().enumerate() {
                let part = number % PARTS;
                let reader = readers[part];
                let list = put_words(
                    memory,
                    (places, chunk, part),
                    (&pages[chunk.pages.clone()], &mut header_of),
                    shift,
                )?;
                let words = chunk.words.start;
                sequence.kernel(|| memory.upload(reader, (words, words), chunk.words.len()))?;
                if let Some(free) = &free[part] {
                    free.before(reader)?;
                }
                // SAFETY: the list and the memory that it names belong to the operation.
                let reads = unsafe { rows.read_listed(&list, reader) }?;
                sequence.add(reads, before);
                before += list.pieces;
                let arrived = StreamEvent::untimed(&self.gpu)?;
                arrived.record_at(reader)?;
                arrived.before(stream)?;
                let (first, count) = (chunk.pages.start, chunk.pages.len() as u64);
                let check = CheckPages {
                    pages: memory.device(chunk.staging),
                    reads: list.status,
                    codes: memory.device(places.codes + first * 4),
                    arrivals: memory.host(places.arrivals + first * size_of::<PageArrival>()),
                    headers: memory.host(places.headers + first * HEADER),
                    count,
                };
                let copy = CopyPages {
                    pages: check.pages,
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
                if number + PARTS < places.chunks.len() {
                    let copied = StreamEvent::untimed(&self.gpu)?;
                    copied.record_at(stream)?;
                    free[part] = Some(copied);
                }
            }
            Ok(())
        })
    }
}

/// Writes the words of a chunk to the host's memory; returns the list of its reads. The pages are those of the chunk.
fn put_words(
    memory: &PageMemory,
    (places, chunk, part): (&LoadPlaces, &LoadChunk, usize),
    (pages, header_of): (&[PageRead<'_>], &mut impl FnMut(usize) -> u64),
    shift: u32,
) -> Result<ReadList> {
    let (mut staged, mut reads, mut at_pieces) = (places.staged[part], 0, chunk.pieces);
    let mut ranges = Vec::with_capacity(pages.len());
    let mut words = Vec::with_capacity(pages.len());
    for (number, page) in chunk.pages.clone().zip(pages) {
        let range = range_of(page, memory.device(staged), reads);
        let piece_count = put_pieces(memory, at_pieces, page.pieces)?;
        words.push(PageStaging {
            staged: range.to,
            pieces: memory.device(at_pieces),
            checksum: page.checksum,
            header_checksum: header_of(number),
            piece_count,
            bytes: page.bytes,
            first_read: reads as u32,
            reads: range.pieces(shift) as u32,
        });
        at_pieces += piece_count as usize * size_of::<PagePiece>();
        staged += staged_bytes(page.bytes);
        reads += range.pieces(shift);
        ranges.push(range);
    }
    let list = ListHead {
        range_count: ranges.len() as u64,
        pieces: reads,
    };
    memory.put(chunk.head, &[list])?;
    memory.put(chunk.head + size_of::<ListHead>(), &ranges)?;
    memory.put(chunk.staging, &words)?;
    Ok(ReadList {
        list: memory.device(chunk.head),
        ranges: ranges.len() as u32,
        pieces: reads,
        status: memory.device(places.reads[part]),
    })
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
        let memory = &self.work.hold.memory;
        let arrivals = memory.words(self.arrivals, 2 * self.count)?;
        let arrivals = arrivals.as_chunks::<2>().0.iter().enumerate();
        let end = |(page, [checksum, code]): (usize, &[u64; 2])| {
            self.end(page, *checksum, *code as u32 as i32)
        };
        arrivals.map(end).collect()
    }

    fn end(&self, page: usize, checksum: u64, code: i32) -> Result<PageEnd> {
        let memory = &self.work.hold.memory;
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
