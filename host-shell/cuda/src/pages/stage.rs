//! Stores: copies of pages that nothing else writes, with their checksums, and their writes; and pages that the CPU
//! reads or writes through memory of the host.
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::memory::WordPlaces;
use super::{
    HEADER, MOST_BYTES, PageExtent, PageHold, PageMover, PagesLeft, UnderWay, pieces_of,
    staged_bytes,
};
use crate::leftovers;
use crate::pointer::MemoryUse;
use crate::rows::{LaunchSequence, PendingRows, RowRequest};
use crate::stream::StreamEvent;
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::hash::{HashChunk, HashChunks};
use nvme_gpu_kernel::pages::{CopyPages, HEADER_BYTES, PagePiece, PageStaging};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pause between two looks at an event.
const NAP: Duration = Duration::from_micros(20);
/// Warps of a block of the kernel that hashes.
const HASHED_OF_BLOCK: u64 = 8;

/// Pages in memory of the GPU that nothing else writes, with their checksums.
pub struct StagingBatch {
    hold: PageHold,
    /// Recorded behind the kernels in the caller's stream.
    staged: Option<StreamEvent>,
    /// Byte of the header in the memory of the GPU, and bytes of the payload.
    pages: Vec<(usize, u32)>,
    words: StagePlaces,
}

/// Places of the words of a write, which the host uploads in a second copy, and of the results.
#[derive(Clone, Copy)]
struct StagePlaces {
    /// Words of the copies of the headers.
    headers: usize,
    pieces: usize,
    /// Ids of the rows as which pages are written.
    ids: usize,
    end: usize,
    /// In memory of the host: headers, statuses of rows, checksums.
    blocks: usize,
    statuses: usize,
    hashes: usize,
}

/// A page to write.
#[derive(Clone, Copy, Debug)]
pub struct PageWrite<'a> {
    /// Number of the staged page.
    pub page: usize,
    /// First byte of the header on the drive, a multiple of 4,096.
    pub offset: u64,
    /// The header.
    pub header: &'a [u8; HEADER],
}

/// Pages that a GPU writes. Dropping it does not stop the operation.
#[must_use = "writes may fail"]
pub struct PendingWrites {
    work: UnderWay,
    statuses: usize,
    /// Number of the first row of each page that is written, and how many it has.
    rows: Vec<(usize, usize)>,
}

impl PageMover {
    /// Enqueues in `stream`, a `CUstream`, copies of pages to memory of the mover, and their checksums, and returns
    /// before they run: once the stream has passed them, the caller may change its pages.
    ///
    /// # Safety
    /// The pieces are valid on the GPU until the stream has passed the copies.
    ///
    /// # Errors
    /// [`Error::Usage`] for a stream that is being captured, for a page without bytes, and for memory that the GPU does
    /// not reach; [`Error::Device`] without memory for all pages.
    pub unsafe fn stage(&self, pages: &[&[PageExtent]], stream: u64) -> Result<StagingBatch> {
        leftovers::reap();
        self.check_stream(stream)?;
        self.judge(stream, pages.iter().copied().flatten(), MemoryUse::Reads)?;
        let pieces = all_pieces(pages)?;
        let mut places = WordPlaces::default();
        let count: usize = pieces.iter().map(|(_, pieces)| pieces.len()).sum();
        let at_pages = places.take(pages.len(), size_of::<PageStaging>(), 16)?;
        let at_pieces = places.take(count, size_of::<PagePiece>(), 16)?;
        let at_chunks = places.take(pages.len(), size_of::<HashChunk>(), 16)?;
        let uploaded = places.len();
        let headers = places.take(pages.len(), size_of::<PageStaging>(), 16)?;
        let of_headers = places.take(pages.len(), size_of::<PagePiece>(), 16)?;
        let rows = pieces
            .iter()
            .map(|(bytes, _)| staged_bytes(*bytes) / HEADER);
        let rows = rows.sum();
        let ids = places.take(rows, 8, 16)?;
        let end = places.len();
        let (mut device, mut host) = (places, places);
        let mut at_staged = Vec::with_capacity(pages.len());
        for (bytes, _) in &pieces {
            at_staged.push((device.take(1, staged_bytes(*bytes), HEADER)?, *bytes));
        }
        let words = StagePlaces {
            headers,
            pieces: of_headers,
            ids,
            end,
            blocks: host.take(pages.len(), HEADER, 16)?,
            statuses: host.take(rows, 4, 16)?,
            hashes: host.take(pages.len(), 8, 16)?,
        };
        let memory = self.pool.take(&self.gpu, device.len(), host.len())?;
        let mut staged = StagingBatch {
            hold: PageHold {
                memory: Arc::new(memory),
                kernels: Arc::clone(&self.kernels),
            },
            staged: None,
            pages: at_staged,
            words,
        };
        if pages.is_empty() {
            return Ok(staged);
        }
        let memory = &staged.hold.memory;
        let places = staged.pages.iter().map(|(at, _)| memory.device(*at));
        put_pages(&staged.hold, (at_pages, at_pieces), &pieces, places)?;
        let chunks: Vec<HashChunk> = staged
            .pages
            .iter()
            .map(|(at, bytes)| HashChunk {
                at: (*at + HEADER) as u64,
                bytes: u64::from(*bytes),
            })
            .collect();
        memory.put(at_chunks, &chunks)?;
        let count = pages.len() as u64;
        let copy = CopyPages {
            pages: memory.device(at_pages),
            count,
            stages: 1,
            ..CopyPages::default()
        };
        let hash = HashChunks {
            chunks: memory.device(at_chunks),
            base: memory.device(0),
            hashes: memory.host(words.hashes),
            count,
        };
        let event = StreamEvent::untimed(&self.gpu)?;
        let kernels = &self.kernels;
        let enqueued = LaunchSequence::run_kernels(&self.gpu, stream, |sequence| {
            sequence.kernel(|| memory.upload(stream, (at_pages, at_pages), uploaded))?;
            // SAFETY: each kernel takes what it is launched with; the caller vouches for the pieces, and the other
            // addresses are those of the memory.
            unsafe {
                sequence.kernel(|| kernels.copy_pages(stream, &copy))?;
                let function = (kernels.hash, HASHED_OF_BLOCK);
                sequence.kernel(|| kernels.launch(stream, function, count, &hash))?;
            }
            event.record_at(stream)
        });
        if let Err(error) = enqueued {
            return Err(staged.refused(error));
        }
        staged.staged = Some(event);
        Ok(staged)
    }
}

impl StagingBatch {
    /// Keeps the memory for good if a part of the work may be under way.
    fn refused(&self, error: Error) -> Error {
        if matches!(error, Error::Unfinished { .. }) {
            std::mem::forget(self.hold.clone());
        }
        error
    }

    /// Waits until the pages are staged, `limit` at most, and returns the checksum of each.
    ///
    /// # Errors
    /// [`Error::Unfinished`] past the limit; [`Error::Device`] when a kernel died.
    pub fn wait(&self, limit: Duration) -> Result<Vec<u64>> {
        if let Some(event) = &self.staged {
            await_event(event, limit)?;
        }
        let hashes = self.words.hashes;
        let pages = 0..self.pages.len();
        pages
            .map(|page| self.hold.memory.word(hashes + page * 8))
            .collect()
    }

    /// True if the caller's pages are not used any more.
    pub fn is_done(&self) -> bool {
        // A kernel that died uses nothing any more.
        let is_over = |event: &StreamEvent| event.is_done().unwrap_or(true);
        self.staged.as_ref().is_none_or(is_over)
    }

    /// Returns the bytes of the payload of a page.
    pub fn bytes(&self, page: usize) -> usize {
        self.pages.get(page).map_or(0, |(_, bytes)| *bytes as usize)
    }

    /// Writes staged pages, with their headers: `scatter` enqueues the write of rows of 4,096 bytes by ids, which count
    /// from the drive's first byte, in a stream. The pages are staged, and each is written once.
    ///
    /// # Errors
    /// Those of `scatter`, and [`Error::Device`] for a page that is not there: some pages may have been written.
    pub fn scatter(
        &self,
        mover: &PageMover,
        pages: &[PageWrite<'_>],
        mut scatter: impl FnMut(&RowRequest, u64) -> Result<PendingRows>,
    ) -> Result<PendingWrites> {
        let (memory, words) = (&self.hold.memory, self.words);
        let mut written = PendingWrites {
            work: UnderWay {
                pending: None,
                hold: self.hold.clone(),
            },
            statuses: words.statuses,
            rows: Vec::with_capacity(pages.len()),
        };
        let (mut copies, mut pieces, mut ids) = (Vec::new(), Vec::new(), Vec::new());
        // Pages whose staged bytes follow one another are rows of one scatter: page, first row, rows.
        let mut runs: Vec<(usize, usize, usize)> = Vec::new();
        for (number, page) in pages.iter().enumerate() {
            let (at, bytes) = *self
                .pages
                .get(page.page)
                .ok_or_else(|| Error::internal("a page was not staged"))?;
            let rows = staged_bytes(bytes) / HEADER;
            let first = page.offset / u64::from(HEADER_BYTES);
            copies.push(PageStaging {
                // The payload of this copy is the header.
                staged: memory.device(at) - u64::from(HEADER_BYTES),
                pieces: memory.device(words.pieces + number * size_of::<PagePiece>()),
                piece_count: 1,
                bytes: HEADER_BYTES,
                ..PageStaging::default()
            });
            pieces.push(PagePiece {
                address: memory.host(words.blocks + number * HEADER),
                first: 0,
                bytes: HEADER_BYTES,
            });
            memory.put(words.blocks + number * HEADER, &page.header[..])?;
            written.rows.push((ids.len(), rows));
            match runs.last_mut() {
                Some((_, first, count))
                    if self.follows(pages, number) && *first + *count == ids.len() =>
                {
                    *count += rows;
                }
                _ => runs.push((at, ids.len(), rows)),
            }
            ids.extend((0..rows as u64).map(|row| (first + row) as i64));
        }
        if pages.is_empty() {
            return Ok(written);
        }
        memory.put(words.headers, &copies)?;
        memory.put(words.pieces, &pieces)?;
        memory.put(words.ids, &ids)?;
        let stream = mover.stream.handle();
        let copy = CopyPages {
            pages: memory.device(words.headers),
            count: pages.len() as u64,
            stages: 1,
            ..CopyPages::default()
        };
        let enqueued = LaunchSequence::run(&mover.gpu, stream, |sequence| {
            let upload = (words.headers, words.headers);
            sequence.kernel(|| memory.upload(stream, upload, words.end - words.headers))?;
            // SAFETY: the kernel takes one `CopyPages`, whose addresses are those of the memory.
            sequence.kernel(|| unsafe { self.hold.kernels.copy_pages(stream, &copy) })?;
            for (at, first, count) in runs {
                let request = RowRequest {
                    ids: memory.device(words.ids + first * 8),
                    wide_ids: true,
                    count: count as u64,
                    out: memory.device(at),
                    out_stride: u64::from(HEADER_BYTES),
                    status: memory.host(words.statuses + first * 4),
                };
                sequence.add(scatter(&request, stream)?, first as u64);
            }
            Ok(())
        });
        match enqueued {
            Ok(pending) => written.work.pending = Some(pending),
            Err(error) => return Err(self.refused(error)),
        }
        Ok(written)
    }

    /// True if page `number` of `pages` is staged right behind the one before.
    fn follows(&self, pages: &[PageWrite<'_>], number: usize) -> bool {
        let at = |number: usize| self.pages[pages[number].page];
        number.checked_sub(1).is_some_and(|before| {
            let (from, bytes) = at(before);
            from + staged_bytes(bytes) == at(number).0
        })
    }
}

impl Drop for StagingBatch {
    fn drop(&mut self) {
        let Some(event) = self.staged.take() else {
            return;
        };
        leftovers::keep(Box::new(PagesLeft {
            pending: event,
            _hold: self.hold.clone(),
            // A kernel that died uses nothing any more.
            is_over: |event| event.is_done().unwrap_or(true),
        }));
        leftovers::reap();
    }
}

impl PendingWrites {
    /// True if it has ended.
    pub fn is_done(&self) -> bool {
        self.work.is_done()
    }

    /// Waits for the end, `limit` at most, and returns the code of each page: 0, or that of its first row that failed.
    ///
    /// # Errors
    /// As [`PendingPages::wait`](super::PendingPages::wait).
    pub fn wait(&self, limit: Duration) -> Result<Vec<i32>> {
        self.work.wait(limit)?;
        let code = |(first, count): &(usize, usize)| {
            let statuses = self
                .work
                .hold
                .memory
                .bytes(self.statuses + first * 4, count * 4)?;
            let codes = statuses.as_chunks::<4>().0.iter();
            let failed = codes
                .map(|code| i32::from_le_bytes(*code))
                .find(|code| *code != 0);
            Ok(failed.unwrap_or(0))
        };
        self.rows.iter().map(code).collect()
    }
}

/// Returns the length of each page, and its pieces.
pub(super) fn all_pieces(pages: &[&[PageExtent]]) -> Result<Vec<(u32, Vec<PagePiece>)>> {
    let one = |pieces: &&[PageExtent]| {
        let bytes = pieces
            .iter()
            .fold(0u64, |sum, piece| sum.saturating_add(piece.bytes));
        let bytes = u32::try_from(bytes)
            .ok()
            .filter(|bytes| *bytes <= MOST_BYTES);
        let bytes = bytes.ok_or_else(|| {
            Error::usage(
                "a page has more than 2^30 bytes",
                "store pages of the size that the store was made for",
            )
        })?;
        Ok((bytes, pieces_of(pieces, bytes)?))
    };
    pages.iter().map(one).collect()
}

/// Writes the words of pages and their pieces to the host's memory.
pub(super) fn put_pages(
    hold: &PageHold,
    (at_pages, mut at_pieces): (usize, usize),
    pages: &[(u32, Vec<PagePiece>)],
    staged: impl Iterator<Item = u64>,
) -> Result<()> {
    let memory = &hold.memory;
    let mut words = Vec::with_capacity(pages.len());
    for ((bytes, pieces), staged) in pages.iter().zip(staged) {
        words.push(PageStaging {
            staged,
            pieces: memory.device(at_pieces),
            piece_count: pieces.len() as u32,
            bytes: *bytes,
            ..PageStaging::default()
        });
        memory.put(at_pieces, pieces)?;
        at_pieces += size_of_val(&pieces[..]);
    }
    memory.put(at_pages, &words)
}

/// Waits for `event`, `limit` at most.
pub(super) fn await_event(event: &StreamEvent, limit: Duration) -> Result<()> {
    let begin = Instant::now();
    while !event.is_done()? {
        if begin.elapsed() > limit {
            return Err(Error::Unfinished {
                cause: format!(
                    "copies of pages have not ended within {} ms",
                    limit.as_millis()
                ),
                remedy: "wait for what the stream does before them, or longer".to_owned(),
            });
        }
        std::thread::sleep(NAP);
    }
    Ok(())
}
