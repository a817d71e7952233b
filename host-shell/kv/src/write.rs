//! Storing pages: a slot for each, the data, a flush, and only then the records that commit them. After a power cut a
//! page without its record is a miss, and its slot is free; there is no state in between.

use crate::error::{KvError, Result};
use crate::format::{PageRecord, UNIT, payload_checksum};
use crate::key::PageKey;
use crate::load::PagePlace;
use crate::medium::BlockMedium;
use crate::shared_index::CountedIndex;
use crate::stats::KvStats;
use crate::store::{JournalState, PageStore};
use nvme_store::StoreTransfer;
use std::sync::MutexGuard;

/// The most pages that are committed together: their records fit into the smallest log.
pub const MOST_TOGETHER: usize = 1024;
/// A store evicts ahead of need up to this share of its slots, so that their records need no separate write.
const SLOTS_OF_ONE_AHEAD: usize = 64;

/// The outcome of storing a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreOutcome {
    /// It is found from now on, also after a power cut.
    Stored,
    /// A page of this key was there; it is now the one that was used last.
    Present,
    /// Another call, or an earlier page of this one, is storing this key.
    InProgress,
    /// Every slot holds a page that is pinned, or one that is being stored.
    NoRoom,
}

/// What a page is stored with, for a caller that writes the payload itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PayloadFacts {
    /// Key of the page.
    pub key: PageKey,
    /// Bytes of the payload.
    pub length: usize,
    /// [`payload_checksum`] of the payload.
    pub checksum: u64,
}

/// Pages that a caller writes by itself, as a GPU does: [`PageStore::plan_store`] makes it.
///
/// The caller writes header and payload of each of [`places`](Self::places), in any order, and calls
/// [`finish`](Self::finish) when the writes have ended. A plan that is dropped before has stored nothing.
pub struct StorePlan<'a, M: BlockMedium> {
    claim: SlotClaim<'a, M>,
    results: Vec<Result<StoreOutcome>>,
    /// Flushes that had failed before the first write.
    failed_flushes: u64,
}

/// Slots of one call. Dropped, as by a panic, it gives those back whose pages were not committed.
struct SlotClaim<'a, M: BlockMedium> {
    store: &'a PageStore<M>,
    pages: Vec<ClaimedPage>,
}

struct ClaimedPage {
    /// Number of the page in the call.
    number: usize,
    record: PageRecord,
}

impl<M: BlockMedium> Drop for SlotClaim<'_, M> {
    fn drop(&mut self) {
        if !self.pages.is_empty() {
            let mut index = self.store.index();
            for page in &self.pages {
                index.index.release(page.record.slot);
            }
        }
    }
}

impl<M: BlockMedium> PageStore<M> {
    /// Stores one page: [`store_all`](Self::store_all) of it.
    ///
    /// # Errors
    /// As [`store_all`](Self::store_all).
    pub fn store(&self, key: PageKey, payload: &[u8]) -> Result<StoreOutcome> {
        let mut results = self.store_all(&[(key, payload)]);
        results.pop().unwrap_or(Ok(StoreOutcome::NoRoom))
    }

    /// Stores pages, and returns the outcome of each. Pages that were not used for longest make room.
    ///
    /// The data of all are written together, then one flush makes them durable, then one write commits them. A page
    /// whose outcome is an error is not found; its slot is used again, as the last of those that are free.
    ///
    /// # Errors
    /// [`KvError::Usage`] for a page that is empty or longer than the store's; [`KvError::Drive`];
    /// [`KvError::Superseded`].
    pub fn store_all(&self, pages: &[(PageKey, &[u8])]) -> Vec<Result<StoreOutcome>> {
        let mut results = Vec::with_capacity(pages.len());
        for pages in pages.chunks(MOST_TOGETHER) {
            results.extend(self.store_together(pages));
        }
        results
    }

    fn store_together(&self, pages: &[(PageKey, &[u8])]) -> Vec<Result<StoreOutcome>> {
        // Before the lock is taken: it takes 0.2 ms for a megabyte, and other calls wait for the lock.
        let facts = pages.iter().map(|(key, page)| PayloadFacts {
            key: *key,
            length: page.len(),
            checksum: payload_checksum(page),
        });
        let plan = self.plan_store(&facts.collect::<Vec<_>>());
        let written = self.write(pages, &plan.places());
        plan.finish(written)
    }

    /// Takes slots for pages that the caller writes by itself, [`MOST_TOGETHER`] at most.
    ///
    /// The pages of the plan are being stored until it is finished or dropped: another call for such a key ends with
    /// [`StoreOutcome::InProgress`].
    pub fn plan_store(&self, pages: &[PayloadFacts]) -> StorePlan<'_, M> {
        let mut results: Vec<_> = pages.iter().map(|_| Ok(StoreOutcome::NoRoom)).collect();
        let some = &pages[..pages.len().min(MOST_TOGETHER)];
        for result in &mut results[some.len()..] {
            *result = Err(KvError::usage(
                format!(
                    "{} pages are planned together, and {MOST_TOGETHER} may be",
                    pages.len()
                ),
                "plan them one part after the other",
            ));
        }
        let claim = self.claim(some, &mut results);
        StorePlan {
            claim,
            results,
            failed_flushes: self.failed_flushes(),
        }
    }

    /// Takes a slot for each page that is not there.
    fn claim(
        &self,
        pages: &[PayloadFacts],
        results: &mut [Result<StoreOutcome>],
    ) -> SlotClaim<'_, M> {
        let mut claim = SlotClaim {
            store: self,
            pages: Vec::new(),
        };
        let most = self.area.layout.page_bytes as usize;
        let mut wanted = Vec::new();
        {
            let mut index = self.index();
            for (number, PayloadFacts { key, length, .. }) in pages.iter().enumerate() {
                if !(1..=most).contains(length) {
                    results[number] = Err(KvError::usage(
                        format!("a page of {length} bytes is not between 1 and {most} bytes long"),
                        "store pages of the size that the store was made for",
                    ));
                } else if index.index.contains(key) {
                    index.index.touch(key);
                    results[number] = Ok(StoreOutcome::Present);
                } else {
                    wanted.push(number);
                }
            }
        }
        if wanted.is_empty() {
            return claim;
        }
        // A thread that takes slots holds this lock: those that were made free are there for the pages of this call.
        let mut journal = self.journal();
        let mut index = match self.make_room(&mut journal, wanted.len()) {
            Ok(index) => index,
            Err(error) => {
                wanted
                    .iter()
                    .for_each(|number| results[*number] = Err(error.again()));
                return claim;
            }
        };
        for number in wanted {
            let PayloadFacts {
                key,
                length,
                checksum,
            } = pages[number];
            if index.index.contains(&key) {
                // Another call has stored it since.
                index.index.touch(&key);
                results[number] = Ok(StoreOutcome::Present);
            } else if index.index.is_saving(&key) {
                results[number] = Ok(StoreOutcome::InProgress);
            } else if let Some(slot) = index.index.reserve(key) {
                let record = PageRecord {
                    key,
                    generation: journal.generation(),
                    checksum,
                    slot,
                    length: length as u32,
                };
                claim.pages.push(ClaimedPage { number, record });
            }
        }
        claim
    }

    /// Frees slots until `wanted` are free or all others are in use, and locks the index. That they are free is durable
    /// before they are written.
    fn make_room(
        &self,
        journal: &mut JournalState,
        wanted: usize,
    ) -> Result<MutexGuard<'_, CountedIndex<KvStats>>> {
        let mut index = match journal.journal.is_broken {
            // A record that committed the last page of a free slot may be on the drive.
            true => self.write_checkpoint(journal)?,
            false => self.index(),
        };
        if index.index.free() >= wanted {
            return Ok(index);
        }
        evict_until(&mut index, wanted);
        drop(index);
        self.append(journal, &[])
    }

    /// Writes header and payload of pages; returns the end of each.
    fn write(
        &self,
        pages: &[(PageKey, &[u8])],
        places: &[PagePlace],
    ) -> Vec<nvme_driver::Result<()>> {
        let tails: Vec<_> = places
            .iter()
            .map(|place| tail_of(pages[place.number].1))
            .collect();
        let headers: Vec<_> = places.iter().map(|place| place.header.to_block()).collect();
        let mut transfers = Vec::with_capacity(3 * places.len());
        let mut of_page = Vec::with_capacity(3 * places.len());
        for (at, (place, tail)) in places.iter().zip(&tails).enumerate() {
            let payload = pages[place.number].1;
            let whole = payload.len() - payload.len() % UNIT as usize;
            let mut to = place.offset;
            for part in [&headers[at][..], &payload[..whole], &tail[..]] {
                if !part.is_empty() {
                    transfers.push(StoreTransfer::Write(to, part));
                    of_page.push(at);
                }
                to += part.len() as u64;
            }
        }
        let mut ends: Vec<_> = places.iter().map(|_| Ok(())).collect();
        let written = self.area.medium.transfer_all(&mut transfers);
        for (at, written) in of_page.into_iter().zip(written) {
            if ends[at].is_ok() {
                ends[at] = written;
            }
        }
        ends
    }

    /// Commits pages whose data are durable; returns their numbers.
    fn commit(&self, claim: &mut SlotClaim<'_, M>) -> Result<Vec<usize>> {
        let mut journal = self.journal();
        let count = claim.pages.len();
        // Their records go with those of this commit.
        let ahead = self.area.layout.slots as usize / SLOTS_OF_ONE_AHEAD;
        evict_until(&mut self.index(), count.min(ahead));
        let records: Vec<PageRecord> = claim.pages.iter().map(|page| page.record).collect();
        let mut index = self.append(&mut journal, &records)?;
        records.iter().for_each(|record| index.index.commit(record));
        index.counts.stored += count as u64;
        Ok(claim.pages.drain(..).map(|page| page.number).collect())
    }
}

impl<M: BlockMedium> StorePlan<'_, M> {
    /// Returns the pages to write, in the order of the call: those that are not there and have a slot. Bytes between a
    /// payload and the end of its block are written as zeros.
    pub fn places(&self) -> Vec<PagePlace> {
        let pages = self.claim.pages.iter();
        let place = |page: &ClaimedPage| self.claim.store.place_of(page.number, &page.record);
        pages.map(place).collect()
    }

    /// Makes what was written durable and commits it; returns the outcome of each page of the call. `written` has the
    /// end of the writes of each of [`places`](Self::places); a page without one counts as not written.
    ///
    /// # Errors
    /// As [`PageStore::store_all`].
    pub fn finish(
        self,
        written: impl IntoIterator<Item = nvme_driver::Result<()>>,
    ) -> Vec<Result<StoreOutcome>> {
        let Self {
            mut claim,
            mut results,
            failed_flushes,
        } = self;
        drop_unwritten(&mut claim, written, &mut results);
        if claim.pages.is_empty() {
            return results;
        }
        let store = claim.store;
        let flushed = store.flush(failed_flushes);
        let committed = flushed.and_then(|()| store.commit(&mut claim));
        match committed {
            Ok(committed) => committed
                .into_iter()
                .for_each(|number| results[number] = Ok(StoreOutcome::Stored)),
            Err(error) => {
                store.index().counts.failed += claim.pages.len() as u64;
                for page in &claim.pages {
                    results[page.number] = Err(error.again());
                }
            }
        }
        results
    }
}

/// Takes the pages out of the claim whose writes failed.
fn drop_unwritten<M: BlockMedium>(
    claim: &mut SlotClaim<'_, M>,
    written: impl IntoIterator<Item = nvme_driver::Result<()>>,
    results: &mut [Result<StoreOutcome>],
) {
    let mut written = written.into_iter();
    let area = &claim.store.area;
    let mut index = claim.store.index();
    claim.pages.retain(|page| {
        let ended = written.next().unwrap_or_else(|| {
            Err(nvme_driver::Error::internal(
                "the writes of a plan have fewer ends than pages",
            ))
        });
        let Err(source) = ended else { return true };
        let slot = page.record.slot;
        let place = area.offset + area.layout.slot_at(slot);
        let action = format!("writing page {slot} at byte {place}");
        results[page.number] = Err(KvError::drive(action)(source));
        index.index.release(slot);
        index.counts.failed += 1;
        false
    });
}

/// Returns the last block of a payload, filled with zeros, if that is not a whole one.
fn tail_of(payload: &[u8]) -> Vec<u8> {
    let mut tail = payload[payload.len() - payload.len() % UNIT as usize..].to_vec();
    tail.resize(tail.len().next_multiple_of(UNIT as usize), 0);
    tail
}

/// Evicts pages until, once that is logged, `wanted` slots are free.
fn evict_until(index: &mut CountedIndex<KvStats>, wanted: usize) {
    let missing = wanted.saturating_sub(index.index.free() + index.index.dead());
    for _ in 0..missing {
        if !index.index.evict() {
            return;
        }
        index.counts.evicted += 1;
    }
}
