use super::way::{GpuPages, GpuWay, OwnPages, OwnWay, PageJob, all_failed, at_hand, way_of};
use crate::error::{KvError, Result};
use crate::format::payload_checksum;
use crate::key::PageKey;
use crate::load::{ArrivedPage, LoadPlan, LoadedPage, PagePlace};
use nvme_cuda::{
    HostCopy, HostPages, MemoryUse, PageEnd, PageExtent, PageMover, PageRead, PendingPages,
};
use nvme_driver::error::{Error, Result as DriveResult};
use nvme_store::{Store, status};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Puts the loads of pages into `stream`; returns the work that waits for them. Memory of a page that failed is zeros.
///
/// # Errors
/// As [`Store::load_pages_on_gpu`]: nothing is read then.
pub fn load<K: Clone + Send + 'static>(
    (own, way): OwnWay,
    keys: Vec<PageKey>,
    pages: GpuPages<K>,
    stream: u64,
) -> DriveResult<PageJob<usize>> {
    let (store, mover, limit) = at_hand(&own, &way, &pages)?;
    if !way_of(&store).0 {
        // Memory of no bytes is refused page by page.
        let rooms = pages.rooms();
        let some: Vec<usize> = (0..keys.len())
            .filter(|number| rooms[*number] > 0)
            .collect();
        let extents: Vec<&[PageExtent]> = some.iter().map(|one| pages.extents_of(*one)).collect();
        let host = mover.host_pages(&extents, MemoryUse::Writes, stream)?;
        let own_stream = mover.after(stream)?;
        return Ok(Box::new(move || {
            load_by_cpu(
                (&own, &way),
                (&keys, &some),
                (pages, host),
                own_stream,
                limit,
            )
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
    let cleared = clear(&mover, &pages, &missing, stream)?;
    let loaded = {
        let reads: Vec<PageRead<'_>> = places
            .iter()
            .map(|place| PageRead {
                offset: place.offset,
                bytes: place.length,
                checksum: place.checksum,
                pieces: pages.extents_of(place.number),
            })
            .collect();
        let header_of = |page: usize| payload_checksum(&places[page].header.to_block());
        pages.load(&store, &mover, (&reads, header_of), stream)
    };
    let pending = match loaded {
        Ok(pending) => pending,
        Err(error) => {
            // The stream still zeroes memory of the missing pages, which the caller may free after any other error.
            return match finish_clear(cleared, (&way, &pages), limit) {
                Err(unfinished @ Error::Unfinished { .. }) => Err(unfinished),
                _ => Err(error),
            };
        }
    };
    Ok(Box::new(move || {
        let results = finish_load(plan, &places, (pending, &pages, &way), limit);
        let cleared_in_time = finish_clear(cleared, (&way, &pages), limit);
        let is_right = |result: &&Result<LoadedPage>| result.is_ok();
        let loaded = results.iter().filter(is_right).count();
        way.loaded.fetch_add(loaded as u64, Ordering::Relaxed);
        let wrong = wrong_of(&results);
        let zeroed = clear_and_wait((&mover, &way), &pages, &wrong, limit);
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
                (Err(_), Some(error)) => Err(unzeroed(error)),
                (Err(error), None) => Err(error),
            });
        }
        outcomes
    }))
}

/// Returns the pages whose memory has to be zeroed once more: also behind their lengths.
fn wrong_of(results: &[Result<LoadedPage>]) -> Vec<usize> {
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
fn finish_load<K: Clone + Send + 'static>(
    plan: LoadPlan<OwnPages, Arc<Store>>,
    places: &[PagePlace],
    (pending, pages, way): (PendingPages, &GpuPages<K>, &GpuWay),
    limit: Duration,
) -> Vec<Result<LoadedPage>> {
    let arrived: Vec<ArrivedPage> = match pending.wait(limit) {
        Ok(ends) => places
            .iter()
            .zip(ends)
            .map(|(place, end)| arrived(place, end))
            .collect(),
        Err(error) => {
            let failed = places.iter().map(|_| ArrivedPage::Failed(error.again()));
            let failed = failed.collect();
            way.keep_unfinished(&error, pending, pages, PendingPages::is_done);
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

/// Puts into `stream` what zeroes the memory of the pages with these numbers: nothing without pages.
fn clear<K: Clone>(
    mover: &PageMover,
    pages: &GpuPages<K>,
    numbers: &[usize],
    stream: u64,
) -> DriveResult<Option<HostPages>> {
    let some = numbers.iter().map(|number| pages.extents_of(*number));
    let some: Vec<&[PageExtent]> = some
        .filter(|pieces| pieces.iter().any(|piece| piece.bytes > 0))
        .collect();
    if some.is_empty() {
        return Ok(None);
    }
    let mut host = mover.host_pages(&some, MemoryUse::Writes, stream)?;
    pages.copy(&mut host, HostCopy::Deliver(&[]), stream)?;
    Ok(Some(host))
}

/// Waits until the memory of pages is zero.
fn finish_clear<K: Clone + Send + 'static>(
    cleared: Option<HostPages>,
    (way, pages): (&GpuWay, &GpuPages<K>),
    limit: Duration,
) -> DriveResult<()> {
    let Some(cleared) = cleared else {
        return Ok(());
    };
    let waited = cleared.wait(limit);
    if let Err(error) = &waited {
        way.keep_unfinished(error, cleared, pages, HostPages::is_done);
    }
    waited
}

fn clear_and_wait<K: Clone + Send + 'static>(
    (mover, way): (&PageMover, &GpuWay),
    pages: &GpuPages<K>,
    numbers: &[usize],
    limit: Duration,
) -> DriveResult<()> {
    let cleared = clear(mover, pages, numbers, mover.stream())?;
    finish_clear(cleared, (way, pages), limit)
}

fn load_by_cpu<K: Clone + Send + 'static>(
    (own, way): (&OwnPages, &GpuWay),
    (keys, some): (&[PageKey], &[usize]),
    (pages, mut host): (GpuPages<K>, HostPages),
    stream: u64,
    limit: Duration,
) -> Vec<Result<usize>> {
    let all = |error: Error| all_failed(keys.len(), &error);
    let results = match host.payloads() {
        Ok(payloads) => {
            let mut given: Vec<(PageKey, &mut [u8])> = keys
                .iter()
                .map(|key| (*key, <&mut [u8]>::default()))
                .collect();
            for (number, payload) in some.iter().zip(payloads) {
                given[*number].1 = payload;
            }
            own.load_all(&mut given)
        }
        Err(error) => return all(error),
    };
    let length = |result: &Result<usize>| result.as_ref().ok().map(|bytes| *bytes as u32);
    let lengths: Vec<Option<u32>> = some.iter().map(|one| length(&results[*one])).collect();
    let copied = pages
        .copy(&mut host, HostCopy::Deliver(&lengths), stream)
        .and_then(|()| host.wait(limit));
    if let Err(error) = copied {
        way.keep_unfinished(&error, host, &pages, HostPages::is_done);
        return all(error);
    }
    results
}

/// The error of a page whose memory may hold any bytes.
fn unzeroed(error: &Error) -> KvError {
    KvError::drive("zeroing the memory of a page")(error.again())
}
