use super::way::{GpuPages, GpuWay, OwnPages, OwnWay, PageJob, all_failed, at_hand, way_of};
use crate::error::Result;
use crate::key::PageKey;
use crate::load::PagePlace;
use crate::write::{MOST_TOGETHER, PayloadFacts, StoreOutcome};
use nvme_cuda::{HostCopy, HostPages, MemoryUse, PageExtent, PageMover, PageWrite, StagingBatch};
use nvme_driver::error::{Error, Result as DriveResult};
use nvme_store::status;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Pages of a call, and those of them that were staged, by number.
type Staged<'a> = (&'a [PayloadFacts], &'a [Option<usize>]);

/// Puts the copies of pages into `stream`; returns the work that stores them.
///
/// # Errors
/// As [`PageMover::stage`]: nothing is under way then.
pub fn store<K: Clone + Send + 'static>(
    (own, way): OwnWay,
    keys: Vec<PageKey>,
    pages: GpuPages<K>,
    stream: u64,
) -> DriveResult<PageJob<StoreOutcome>> {
    let (store, mover, limit) = at_hand(&own, &way, &pages)?;
    // Pages of other lengths are refused one by one.
    let most = own.layout().page_bytes as usize;
    let rooms = pages.rooms();
    let some: Vec<usize> = (0..keys.len())
        .filter(|number| (1..=most).contains(&rooms[*number]))
        .collect();
    let extents: Vec<&[PageExtent]> = some.iter().map(|one| pages.extents_of(*one)).collect();
    if !way_of(&store).0 {
        let mut host = mover.host_pages(&extents, MemoryUse::Reads, stream)?;
        pages.copy(&mut host, HostCopy::Collect, stream)?;
        return Ok(Box::new(move || {
            store_by_cpu((&own, &way), (&keys, &rooms), &some, (pages, host), limit)
        }));
    }
    let staged = pages.stage(&mover, &extents, stream)?;
    Ok(Box::new(move || {
        let checksums = match staged.wait(limit) {
            Ok(checksums) => checksums,
            Err(error) => {
                way.keep_unfinished(&error, staged, &pages, StagingBatch::is_done);
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
            |outcome: &&Result<StoreOutcome>| matches!(outcome, Ok(StoreOutcome::Stored));
        let stored = outcomes.iter().filter(is_stored).count();
        way.stored.fetch_add(stored as u64, Ordering::Relaxed);
        outcomes
    }))
}

/// Writes and commits staged pages, as many together as one commit takes.
fn write(
    own: &OwnPages,
    mover: &PageMover,
    staged: &StagingBatch,
    (facts, of_page): Staged<'_>,
    limit: Duration,
) -> Vec<Result<StoreOutcome>> {
    let mut outcomes = Vec::with_capacity(facts.len());
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
        let ends: Vec<DriveResult<()>> = match ends {
            Ok(ends) => ends,
            Err(error) => places.iter().map(|_| Err(error.again())).collect(),
        };
        outcomes.extend(plan.finish(ends));
    }
    outcomes
}

fn write_places(
    own: &OwnPages,
    mover: &PageMover,
    staged: &StagingBatch,
    (places, of_page): (&[PagePlace], &[Option<usize>]),
    limit: Duration,
) -> DriveResult<Vec<DriveResult<()>>> {
    let write = |place: &PagePlace| {
        Some(PageWrite {
            page: of_page[place.number]?,
            offset: place.offset,
        })
    };
    let writes: Option<Vec<PageWrite>> = places.iter().map(write).collect();
    let writes = writes.ok_or_else(|| Error::internal("a page was not staged"))?;
    let header_of = |page: usize| places[page].header.to_block();
    let medium = own.medium();
    let pending = medium.write_pages_on_gpu(mover, staged, &writes, header_of)?;
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

fn store_by_cpu<K: Clone + Send + 'static>(
    (own, way): (&OwnPages, &GpuWay),
    (keys, rooms): (&[PageKey], &[usize]),
    some: &[usize],
    (pages, mut host): (GpuPages<K>, HostPages),
    limit: Duration,
) -> Vec<Result<StoreOutcome>> {
    if let Err(error) = host.wait(limit) {
        way.keep_unfinished(&error, host, &pages, HostPages::is_done);
        return all_failed(keys.len(), &error);
    }
    let payloads = match host.payloads() {
        Ok(payloads) => payloads,
        Err(error) => return all_failed(keys.len(), &error),
    };
    let given = some.iter().map(|number| keys[*number]).zip(payloads);
    let given: Vec<(PageKey, &[u8])> = given.map(|(key, payload)| (key, &*payload)).collect();
    let mut stored = some.iter().zip(own.store_all(&given)).peekable();
    let outcome = |number: usize| match stored.next_if(|(at, _)| **at == number) {
        Some((_, outcome)) => outcome,
        // Of another length than pages have: the store says so.
        None => {
            let facts = PayloadFacts {
                key: keys[number],
                length: rooms[number],
                checksum: 0,
            };
            let mut refused = own.plan_store(&[facts]).finish([]);
            refused.pop().unwrap_or(Ok(StoreOutcome::NoRoom))
        }
    };
    (0..keys.len()).map(outcome).collect()
}
