//! Pages of a page store in memory of a GPU: read, checked and written by the GPU where it drives the queues of one
//! drive, else moved by the CPU through memory of the host.

use crate::error::ExceptionParts;
use crate::gpu_pages::GpuPages;
use crate::left::{self, BufferedTransfer};
use crate::store::Open;
use nvme_host::cuda::{
    HostCopy, HostPages, MemoryUse, PageEnd, PageExtent, PageMover, PageRead, PageWrite,
    PendingPages, StagingBatch,
};
use nvme_host::store::status;
use nvme_host::{Error, Result};
use nvme_kv::{
    ArrivedPage, KvError, LoadPlan, LoadedPage, MOST_TOGETHER, PagePlace, PayloadFacts,
    StoreOutcome,
};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The pages of an area that this process has for itself.
pub type Own = Arc<nvme_kv::PageStore<Open>>;
/// The outcome of each page: a number, or the error.
pub type Outcomes = Vec<std::result::Result<usize, ExceptionParts>>;
/// Work on a thread of the pool.
pub type PageJob = Box<dyn FnOnce() -> Outcomes + Send>;

/// Returns the number of an outcome, as Python names it.
pub fn number_of(outcome: StoreOutcome) -> usize {
    match outcome {
        StoreOutcome::Stored => 0,
        StoreOutcome::Present => 1,
        StoreOutcome::InProgress => 2,
        StoreOutcome::NoRoom => 3,
    }
}

/// Mover and counts of one page store.
#[derive(Default)]
pub struct GpuWay {
    mover: Mutex<Option<Arc<PageMover>>>,
    /// Pages that a GPU has loaded and checked, and those that it has written.
    pub loaded: AtomicU64,
    pub stored: AtomicU64,
}

impl GpuWay {
    /// Returns the mover of the store's GPU.
    ///
    /// # Errors
    /// [`Error::Usage`] for a store without one.
    fn mover(&self, store: &Open) -> Result<Arc<PageMover>> {
        let mut mover = crate::pool::lock(&self.mover);
        if let Some(found) = &*mover {
            return Ok(Arc::clone(found));
        }
        let gpu = store.gpu().ok_or_else(|| {
            Error::usage(
                "a page lies in memory of a GPU, and the store was opened without one",
                "open the store with gpu=0, or pass memory of the host",
            )
        })?;
        let made = Arc::new(PageMover::new(gpu)?);
        Ok(Arc::clone(mover.insert(made)))
    }
}

/// Returns whether the GPU itself moves pages of `store`, and why.
pub fn way_of(store: &Open) -> (bool, String) {
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

/// Views and memory of an operation whose end was not seen.
struct UnfinishedPages<T> {
    work: T,
    #[expect(dead_code, reason = "kept until the operation has ended")]
    pages: GpuPages,
    is_done: fn(&T) -> bool,
}

impl<T: Send> BufferedTransfer for UnfinishedPages<T> {
    fn is_done(&self) -> bool {
        (self.is_done)(&self.work)
    }
}

/// Keeps `work` and its pages if `error` says that it has not ended.
fn keep_unfinished<T: Send + 'static>(
    error: &Error,
    work: T,
    pages: &GpuPages,
    is_done: fn(&T) -> bool,
) {
    if matches!(error, Error::Unfinished { .. }) {
        keep(work, pages, is_done);
    }
}

fn keep<T: Send + 'static>(work: T, pages: &GpuPages, is_done: fn(&T) -> bool) {
    let pages = pages.clone();
    left::keep(UnfinishedPages {
        work,
        pages,
        is_done,
    });
}

/// Returns the store of an area, its mover, and the time limit of an operation on `pages`.
fn at_hand(
    own: &Own,
    way: &GpuWay,
    pages: &GpuPages,
) -> std::result::Result<(Open, Arc<PageMover>, Duration), ExceptionParts> {
    let store = Arc::clone(own.medium());
    let mover = way
        .mover(&store)
        .map_err(|error| ExceptionParts::of(&error))?;
    let limit = store.patience(pages.bytes());
    Ok((store, mover, limit))
}

/// Returns `error` as the outcome of each of `count` pages.
fn all_failed<T>(count: usize, error: &Error) -> Vec<std::result::Result<T, ExceptionParts>> {
    (0..count).map(|_| Err(ExceptionParts::of(error))).collect()
}

/// Puts the loads of pages into `stream`; returns the work that waits for them.
///
/// # Errors
/// As [`PageMover::load`]: nothing is read then.
pub fn load(
    (own, way): (Own, Arc<GpuWay>),
    keys: Vec<nvme_kv::PageKey>,
    pages: GpuPages,
    stream: u64,
) -> std::result::Result<PageJob, ExceptionParts> {
    let fail = |error: Error| ExceptionParts::of(&error);
    let (store, mover, limit) = at_hand(&own, &way, &pages)?;
    if !way_of(&store).0 {
        let host = mover.host_pages(&pages.extents(), MemoryUse::Writes, stream);
        let host = host.map_err(fail)?;
        let own_stream = mover.after(stream).map_err(fail)?;
        return Ok(Box::new(move || {
            load_by_cpu(&own, &keys, (pages, host), own_stream, limit)
        }));
    }
    let wanted = keys.iter().copied().zip(pages.rooms());
    let plan = LoadPlan::new(Arc::clone(&own), wanted);
    let places = plan.places();
    let missing: Vec<usize> = {
        let mut found = places.iter().map(|place| place.number).peekable();
        let is_missing = |number: &usize| found.next_if_eq(number).is_none();
        (0..keys.len()).filter(is_missing).collect()
    };
    let cleared = clear(&mover, &pages, &missing, stream).map_err(fail)?;
    let loaded = {
        let reads: Vec<PageRead<'_>> = places
            .iter()
            .map(|place| PageRead {
                offset: place.offset,
                bytes: place.length,
                checksum: place.checksum,
                header: &place.header,
                pieces: pages.extents_of(place.number),
            })
            .collect();
        pages.load(&store, &mover, &reads, stream)
    };
    let pending = match loaded {
        Ok(pending) => pending,
        Err(error) => {
            // The stream still zeroes memory of the missing pages.
            keep(cleared, &pages, HostPages::is_done);
            return Err(fail(error));
        }
    };
    Ok(Box::new(move || {
        let results = finish_load(plan, &places, (pending, &pages), limit);
        let cleared_in_time = cleared.wait(limit);
        if let Err(error) = &cleared_in_time {
            keep_unfinished(error, cleared, &pages, HostPages::is_done);
        }
        let is_right = |result: &&nvme_kv::Result<LoadedPage>| result.is_ok();
        let loaded = results.iter().filter(is_right).count();
        way.loaded.fetch_add(loaded as u64, Ordering::Relaxed);
        let wrong = wrong_of(&results);
        let zeroed = clear_and_wait(&mover, &pages, &wrong, limit);
        // The numbers are in order.
        let of_missing = |number: &usize| missing.binary_search(number).is_ok();
        let mut outcomes = Vec::with_capacity(results.len());
        for (number, result) in results.into_iter().enumerate() {
            // Memory that could not be zeroed holds any bytes, which the caller has to learn.
            let zeroing = match of_missing(&number) {
                true => cleared_in_time.as_ref().err(),
                false => zeroed.as_ref().err(),
            };
            outcomes.push(match (result, zeroing) {
                (Ok(page), _) => Ok(page.length),
                (Err(_), Some(error)) => Err(ExceptionParts::of(error)),
                (Err(error), None) => Err(error.into()),
            });
        }
        outcomes
    }))
}

/// Returns the pages whose memory has to be zeroed once more: also behind their lengths.
fn wrong_of(results: &[nvme_kv::Result<LoadedPage>]) -> Vec<usize> {
    let unfinished = |error: &KvError| {
        matches!(
            error,
            KvError::Drive {
                source: Error::Unfinished { .. },
                ..
            }
        )
    };
    let results = results.iter().enumerate();
    let wrong = results.filter(|(_, result)| match result {
        Err(KvError::Missing { .. }) | Ok(_) => false,
        Err(error) => !unfinished(error),
    });
    wrong.map(|(number, _)| number).collect()
}

/// Waits for the reads of a plan and finishes it.
fn finish_load(
    plan: LoadPlan<Own, Open>,
    places: &[PagePlace],
    (pending, pages): (PendingPages, &GpuPages),
    limit: Duration,
) -> Vec<nvme_kv::Result<LoadedPage>> {
    let arrived: Vec<ArrivedPage> = match pending.wait(limit) {
        Ok(ends) => places
            .iter()
            .zip(ends)
            .map(|(place, end)| arrived(place, end))
            .collect(),
        Err(error) => {
            let failed = places.iter().map(|_| ArrivedPage::Failed(error.again()));
            let failed = failed.collect();
            keep_unfinished(&error, pending, pages, PendingPages::is_done);
            failed
        }
    };
    plan.finish(arrived)
}

fn arrived(place: &PagePlace, end: PageEnd) -> ArrivedPage {
    match end {
        PageEnd::Right { checksum } => ArrivedPage::Compared { checksum },
        PageEnd::Wrong { header, checksum } => ArrivedPage::Read { header, checksum },
        PageEnd::Failed(code) => {
            let what = format!("the GPU's read of the page at byte {}", place.offset);
            ArrivedPage::Failed(status::error_of(code, &what))
        }
    }
}

/// Puts into `stream` what zeroes the memory of the pages with these numbers.
fn clear(mover: &PageMover, pages: &GpuPages, numbers: &[usize], stream: u64) -> Result<HostPages> {
    let some = numbers.iter().map(|number| pages.extents_of(*number));
    let some: Vec<&[PageExtent]> = some
        .filter(|pieces| pieces.iter().any(|piece| piece.bytes > 0))
        .collect();
    let mut host = mover.host_pages(&some, MemoryUse::Writes, stream)?;
    pages.copy(&mut host, HostCopy::Deliver(&[]), stream)?;
    Ok(host)
}

fn clear_and_wait(
    mover: &PageMover,
    pages: &GpuPages,
    numbers: &[usize],
    limit: Duration,
) -> Result<()> {
    if numbers.is_empty() {
        return Ok(());
    }
    let host = clear(mover, pages, numbers, mover.stream())?;
    let waited = host.wait(limit);
    if let Err(error) = &waited {
        keep_unfinished(error, host, pages, HostPages::is_done);
    }
    waited
}

fn load_by_cpu(
    own: &Own,
    keys: &[nvme_kv::PageKey],
    (pages, mut host): (GpuPages, HostPages),
    stream: u64,
    limit: Duration,
) -> Outcomes {
    let all = |error: Error| all_failed(keys.len(), &error);
    let results = match host.payloads() {
        Ok(payloads) => {
            let mut given: Vec<_> = keys.iter().copied().zip(payloads).collect();
            own.load_all(&mut given)
        }
        Err(error) => return all(error),
    };
    let length = |result: &nvme_kv::Result<usize>| result.as_ref().ok().map(|bytes| *bytes as u32);
    let lengths: Vec<Option<u32>> = results.iter().map(length).collect();
    let copied = pages
        .copy(&mut host, HostCopy::Deliver(&lengths), stream)
        .and_then(|()| host.wait(limit));
    if let Err(error) = copied {
        keep_unfinished(&error, host, &pages, HostPages::is_done);
        return all(error);
    }
    let one = |result: nvme_kv::Result<usize>| Ok(result?);
    results.into_iter().map(one).collect()
}

/// Puts the copies of pages into `stream`; returns the work that stores them.
///
/// # Errors
/// As [`PageMover::stage`]: nothing is under way then.
pub fn store(
    (own, way): (Own, Arc<GpuWay>),
    keys: Vec<nvme_kv::PageKey>,
    pages: GpuPages,
    stream: u64,
) -> std::result::Result<PageJob, ExceptionParts> {
    let fail = |error: Error| ExceptionParts::of(&error);
    let (store, mover, limit) = at_hand(&own, &way, &pages)?;
    // Pages of other lengths are refused one by one.
    let most = own.layout().page_bytes as usize;
    let rooms = pages.rooms();
    let some: Vec<usize> = (0..keys.len())
        .filter(|number| (1..=most).contains(&rooms[*number]))
        .collect();
    let extents: Vec<&[PageExtent]> = some.iter().map(|one| pages.extents_of(*one)).collect();
    if !way_of(&store).0 {
        let host = mover.host_pages(&extents, MemoryUse::Reads, stream);
        let mut host = host.map_err(fail)?;
        pages
            .copy(&mut host, HostCopy::Collect, stream)
            .map_err(fail)?;
        return Ok(Box::new(move || {
            store_by_cpu(&own, (&keys, &rooms), &some, (pages, host), limit)
        }));
    }
    let staged = pages.stage(&mover, &extents, stream).map_err(fail)?;
    Ok(Box::new(move || {
        let checksums = match staged.wait(limit) {
            Ok(checksums) => checksums,
            Err(error) => {
                keep_unfinished(&error, staged, &pages, StagingBatch::is_done);
                return all_failed(keys.len(), &error);
            }
        };
        let mut facts: Vec<PayloadFacts> = keys
            .iter()
            .zip(&rooms)
            .map(|(key, room)| PayloadFacts {
                key: *key,
                length: *room,
                checksum: 0,
            })
            .collect();
        let mut of_page = vec![None; keys.len()];
        for (staged, (number, checksum)) in some.iter().zip(checksums).enumerate() {
            facts[*number].checksum = checksum;
            of_page[*number] = Some(staged);
        }
        let outcomes = write(&own, &mover, &staged, (&facts, &of_page), limit);
        let is_stored =
            |outcome: &&std::result::Result<usize, ExceptionParts>| matches!(outcome, Ok(0));
        let stored = outcomes.iter().filter(is_stored).count();
        way.stored.fetch_add(stored as u64, Ordering::Relaxed);
        outcomes
    }))
}

/// Writes and commits staged pages, as many together as one commit takes.
fn write(
    own: &Own,
    mover: &PageMover,
    staged: &StagingBatch,
    (facts, of_page): (&[PayloadFacts], &[Option<usize>]),
    limit: Duration,
) -> Outcomes {
    let mut outcomes = Outcomes::with_capacity(facts.len());
    let mut stopped: Option<Error> = None;
    for (facts, of_page) in facts
        .chunks(MOST_TOGETHER)
        .zip(of_page.chunks(MOST_TOGETHER))
    {
        if let Some(error) = &stopped {
            // Words of the write before may be in use.
            outcomes.extend(all_failed(facts.len(), error));
            continue;
        }
        let plan = own.plan_store(facts);
        let places = plan.places();
        let ends = write_places(own, mover, staged, (&places, of_page), limit);
        if let Err(error @ Error::Unfinished { .. }) = &ends {
            stopped = Some(error.again());
        }
        let ends: Vec<Result<()>> = match ends {
            Ok(ends) => ends,
            Err(error) => places.iter().map(|_| Err(error.again())).collect(),
        };
        let stored = plan.finish(ends).into_iter();
        outcomes.extend(stored.map(|outcome| Ok(number_of(outcome?))));
    }
    outcomes
}

fn write_places(
    own: &Own,
    mover: &PageMover,
    staged: &StagingBatch,
    (places, of_page): (&[PagePlace], &[Option<usize>]),
    limit: Duration,
) -> Result<Vec<Result<()>>> {
    let writes: Option<Vec<PageWrite<'_>>> = places
        .iter()
        .map(|place| {
            Some(PageWrite {
                page: of_page[place.number]?,
                offset: place.offset,
                header: &place.header,
            })
        })
        .collect();
    let writes = writes.ok_or_else(|| Error::internal("a page was not staged"))?;
    let pending = own.medium().write_pages_on_gpu(mover, staged, &writes)?;
    let ends = places.iter().zip(pending.wait(limit)?);
    let end = |(place, code): (&PagePlace, i32)| match code {
        0 => Ok(()),
        code => {
            let what = format!("the GPU's write of the page at byte {}", place.offset);
            Err(status::error_of(code, &what))
        }
    };
    Ok(ends.map(end).collect())
}

fn store_by_cpu(
    own: &Own,
    (keys, rooms): (&[nvme_kv::PageKey], &[usize]),
    some: &[usize],
    (pages, mut host): (GpuPages, HostPages),
    limit: Duration,
) -> Outcomes {
    if let Err(error) = host.wait(limit) {
        keep_unfinished(&error, host, &pages, HostPages::is_done);
        return all_failed(keys.len(), &error);
    }
    let payloads = match host.payloads() {
        Ok(payloads) => payloads,
        Err(error) => return all_failed(keys.len(), &error),
    };
    let given = some.iter().map(|number| keys[*number]).zip(payloads);
    let given: Vec<(nvme_kv::PageKey, &[u8])> =
        given.map(|(key, payload)| (key, &*payload)).collect();
    let mut stored = some.iter().zip(own.store_all(&given)).peekable();
    let outcome = |number: usize| match stored.next_if(|(at, _)| **at == number) {
        Some((_, outcome)) => Ok(number_of(outcome?)),
        // Of another length than pages have: the store says so.
        None => {
            let facts = PayloadFacts {
                key: keys[number],
                length: rooms[number],
                checksum: 0,
            };
            let mut refused = own.plan_store(&[facts]).finish([]);
            let refused = refused.pop().unwrap_or(Ok(StoreOutcome::NoRoom));
            Ok(number_of(refused?))
        }
    };
    (0..keys.len()).map(outcome).collect()
}
