//! Stores: copies of pages that nothing else writes, with their checksums, and their writes; and pages that the CPU
//! reads or writes through memory of the host.
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::memory::WordPlaces;
use super::{
    HEADER, MOST_BYTES, PageExtent, PageHold, PageMover, PagesLeft, UnderWay, check_pieces,
    chunk_bytes, put_pieces, staged_bytes,
};
use crate::leftovers;
use crate::pointer::MemoryUse;
use crate::rows::{LaunchSequence, PendingRows, RowRequest};
use crate::stream::{StreamEvent, until};
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::hash::{HashChunk, HashChunks};
use nvme_gpu_kernel::pages::{CopyPages, HEADER_BYTES, PagePiece, PageStaging};
use std::sync::Arc;
use std::time::Duration;

/// Bytes of the words of a page of a write beside its ids.
const WRITE_WORDS: usize = size_of::<PageStaging>() + size_of::<PagePiece>();
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

/// Places of the words of a write, and of the results.
#[derive(Clone, Copy)]
struct StagePlaces {
    /// Words of the launches, which the host uploads chunk by chunk: of the copies of headers, and ids of the rows as
    /// which pages are written.
    writes: usize,
    /// In memory of the host: headers, statuses of rows, checksums.
    blocks: usize,
    statuses: usize,
    hashes: usize,
}

/// A page to write.
#[derive(Clone, Copy, Debug)]
pub struct PageWrite {
    /// Number of the staged page.
    pub page: usize,
    /// First byte of the header on the drive, a multiple of 4,096.
    pub offset: u64,
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
        let lengths = all_lengths(pages)?;
        let mut places = WordPlaces::default();
        let count = pages.iter().map(|pieces| pieces.len()).sum();
        let at_pages = places.take(pages.len(), size_of::<PageStaging>(), 16)?;
        let at_pieces = places.take(count, size_of::<PagePiece>(), 16)?;
        let at_chunks = places.take(pages.len(), size_of::<HashChunk>(), 16)?;
        let uploaded = places.len();
        let rows = lengths.iter().map(|bytes| staged_bytes(*bytes) / HEADER);
        let rows = rows.sum();
        // The ids of a chunk end anywhere, and a chunk has a page at least.
        let writes = places.take(pages.len(), WRITE_WORDS + 16, 16)?;
        places.take(rows, 8, 16)?;
        let (mut device, mut host) = (places, places);
        let mut at_staged = Vec::with_capacity(pages.len());
        for bytes in &lengths {
            at_staged.push((device.take(1, staged_bytes(*bytes), HEADER)?, *bytes));
        }
        let words = StagePlaces {
            writes,
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
        let places = staged.pages.iter().zip(pages);
        let places = places.map(|((at, bytes), pieces)| (memory.device(*at), *bytes, *pieces));
        put_pages(&staged.hold, (at_pages, at_pieces), places)?;
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
        self.hold.memory.words(self.words.hashes, self.pages.len())
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
    /// from the drive's first byte, in a stream. The pages are staged, and each is written once. `header_of` returns the
    /// header of a page of `pages`; it is asked for one after the other, while the drive writes those before.
    ///
    /// # Errors
    /// Those of `scatter`, and [`Error::Device`] for a page that is not there: some pages may have been written.
    pub fn scatter(
        &self,
        mover: &PageMover,
        pages: &[PageWrite],
        mut header_of: impl FnMut(usize) -> [u8; HEADER],
        mut scatter: impl FnMut(&RowRequest, u64) -> Result<PendingRows>,
    ) -> Result<PendingWrites> {
        let mut written = PendingWrites {
            work: UnderWay {
                pending: None,
                hold: self.hold.clone(),
            },
            statuses: self.words.statuses,
            rows: Vec::with_capacity(pages.len()),
        };
        if pages.is_empty() {
            return Ok(written);
        }
        let memory = &self.hold.memory;
        let (stream, [copies, _]) = (mover.stream.handle(), memory.streams()?);
        let enqueued = LaunchSequence::run(&mover.gpu, stream, |sequence| {
            sequence.uses(copies);
            let (mut first, mut at) = (0, self.words.writes);
            let (mut rows, mut number) = (0, 0);
            while first < pages.len() {
                let chunk = self.chunk(&pages[first..], chunk_bytes(number))?;
                let some = &pages[first..first + chunk];
                let launch = self.put_writes((some, first), &mut header_of, (at, rows))?;
                let words = launch.end - at;
                sequence.kernel(|| memory.upload(copies, (at, at), words))?;
                let kernels = &self.hold.kernels;
                // SAFETY: the kernel takes one `CopyPages`, whose addresses are those of the memory.
                let copy = || unsafe { kernels.copy_pages(copies, &launch.copy) };
                sequence.kernel(copy)?;
                let copied = StreamEvent::untimed(&mover.gpu)?;
                copied.record_at(copies)?;
                copied.before(stream)?;
                for run in &launch.runs {
                    sequence.add(scatter(&run.request, stream)?, run.first_row as u64);
                }
                written.rows.extend(launch.rows);
                rows += launch.row_count;
                at = launch.end.next_multiple_of(16);
                (first, number) = (first + chunk, number + 1);
            }
            Ok(())
        });
        match enqueued {
            Ok(pending) => written.work.pending = Some(pending),
            Err(error) => return Err(self.refused(error)),
        }
        Ok(written)
    }

    fn place_of(&self, page: &PageWrite) -> Result<(usize, u32)> {
        let place = self.pages.get(page.page);
        place
            .copied()
            .ok_or_else(|| Error::internal("a page was not staged"))
    }

    /// Returns how many of the first of `pages` have `most` bytes at most, or 1.
    fn chunk(&self, pages: &[PageWrite], most: usize) -> Result<usize> {
        let mut staged = 0;
        for (number, page) in pages.iter().enumerate() {
            staged += staged_bytes(self.place_of(page)?.1);
            if staged > most {
                return Ok(number.max(1));
            }
        }
        Ok(pages.len())
    }

    /// Writes the words of the launches that write `pages`, whose first one has number `first`, to byte `at` of the
    /// host's memory, and their headers. The rows of the pages before are `before`.
    fn put_writes(
        &self,
        (pages, first): (&[PageWrite], usize),
        header_of: &mut impl FnMut(usize) -> [u8; HEADER],
        (at, before): (usize, usize),
    ) -> Result<WriteLaunches> {
        let (memory, words) = (&self.hold.memory, self.words);
        let at_pieces = at + pages.len() * size_of::<PageStaging>();
        let at_ids = at_pieces + pages.len() * size_of::<PagePiece>();
        let (mut copies, mut pieces, mut ids) = (Vec::new(), Vec::new(), Vec::new());
        let mut rows = Vec::with_capacity(pages.len());
        // Pages whose staged bytes follow one another are rows of one scatter.
        let mut runs: Vec<WriteRun> = Vec::new();
        let mut past = None;
        for (number, page) in pages.iter().enumerate() {
            let (staged, bytes) = self.place_of(page)?;
            let row_count = staged_bytes(bytes) / HEADER;
            let block = words.blocks + (first + number) * HEADER;
            copies.push(PageStaging {
                // The payload of this copy is the header.
                staged: memory.device(staged) - u64::from(HEADER_BYTES),
                pieces: memory.device(at_pieces + number * size_of::<PagePiece>()),
                piece_count: 1,
                bytes: HEADER_BYTES,
                ..PageStaging::default()
            });
            pieces.push(PagePiece {
                address: memory.host(block),
                first: 0,
                bytes: HEADER_BYTES,
            });
            memory.put(block, &header_of(first + number))?;
            let first_row = before + ids.len();
            rows.push((first_row, row_count));
            match runs.last_mut() {
                Some(run) if past == Some(staged) => run.request.count += row_count as u64,
                _ => runs.push(WriteRun {
                    first_row,
                    request: RowRequest {
                        ids: memory.device(at_ids + ids.len() * 8),
                        wide_ids: true,
                        count: row_count as u64,
                        out: memory.device(staged),
                        out_stride: u64::from(HEADER_BYTES),
                        status: memory.host(words.statuses + first_row * 4),
                    },
                }),
            }
            past = Some(staged + staged_bytes(bytes));
            let first_block = page.offset / u64::from(HEADER_BYTES);
            ids.extend((0..row_count as u64).map(|row| (first_block + row) as i64));
        }
        memory.put(at, &copies)?;
        memory.put(at_pieces, &pieces)?;
        memory.put(at_ids, &ids)?;
        Ok(WriteLaunches {
            copy: CopyPages {
                pages: memory.device(at),
                count: pages.len() as u64,
                stages: 1,
                ..CopyPages::default()
            },
            runs,
            rows,
            row_count: ids.len(),
            end: at_ids + ids.len() * 8,
        })
    }
}

/// The launches that write a chunk of pages.
struct WriteLaunches {
    /// Copies headers before the pages.
    copy: CopyPages,
    runs: Vec<WriteRun>,
    /// Number of the first row of each page, and how many it has.
    rows: Vec<(usize, usize)>,
    row_count: usize,
    /// End of their words.
    end: usize,
}

/// A scatter of rows.
struct WriteRun {
    first_row: usize,
    request: RowRequest,
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
        let count = self.rows.last().map_or(0, |(first, count)| first + count);
        let statuses = self.work.hold.memory.bytes(self.statuses, count * 4)?;
        let codes = statuses.as_chunks::<4>().0;
        let code = |(first, count): &(usize, usize)| {
            let codes = codes[*first..first + count].iter();
            let mut failed = codes.map(|code| i32::from_le_bytes(*code));
            failed.find(|code| *code != 0).unwrap_or(0)
        };
        Ok(self.rows.iter().map(code).collect())
    }
}

/// Returns the length of each page.
pub(super) fn all_lengths(pages: &[&[PageExtent]]) -> Result<Vec<u32>> {
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
        check_pieces(pieces, bytes).map(|()| bytes)
    };
    pages.iter().map(one).collect()
}

/// Writes the words of pages to the host's memory, each at an address in the staging memory with a length, and its
/// pieces.
pub(super) fn put_pages<'a>(
    hold: &PageHold,
    (at_pages, mut at_pieces): (usize, usize),
    pages: impl Iterator<Item = (u64, u32, &'a [PageExtent])>,
) -> Result<()> {
    let memory = &hold.memory;
    let mut words = Vec::new();
    for (staged, bytes, pieces) in pages {
        let piece_count = put_pieces(memory, at_pieces, pieces)?;
        words.push(PageStaging {
            staged,
            pieces: memory.device(at_pieces),
            piece_count,
            bytes,
            ..PageStaging::default()
        });
        at_pieces += piece_count as usize * size_of::<PagePiece>();
    }
    memory.put(at_pages, &words)
}

/// Waits for `event`, `limit` at most.
pub(super) fn await_event(event: &StreamEvent, limit: Duration) -> Result<()> {
    match until(limit, || event.is_done())? {
        true => Ok(()),
        false => Err(Error::Unfinished {
            cause: format!(
                "copies of pages have not ended within {} ms",
                limit.as_millis()
            ),
            remedy: "wait for what the stream does before them, or longer".to_owned(),
        }),
    }
}
