//! Storing pages: a slot for each, the data, a flush, and only then the records that commit them. After a power cut a
//! page without its record is a miss, and its slot is free; there is no state in between.

use crate::error::{KvError, Result};
use crate::format::{PageHeader, PageRecord, StructureBlock, UNIT, payload_checksum};
use crate::key::PageKey;
use crate::medium::BlockMedium;
use crate::shared_index::CountedIndex;
use crate::stats::KvStats;
use crate::store::{JournalState, PageStore};
use nvme_store::StoreTransfer;
use std::sync::MutexGuard;

/// The most pages that are committed together: their records fit into the smallest log.
const MOST_TOGETHER: usize = 1024;
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
        let mut results: Vec<_> = pages.iter().map(|_| Ok(StoreOutcome::NoRoom)).collect();
        // Before the lock is taken: it takes 0.2 ms for a megabyte, and other calls wait for the lock.
        let checksums: Vec<_> = pages
            .iter()
            .map(|(_, page)| payload_checksum(page))
            .collect();
        let mut claim = self.claim(pages, &checksums, &mut results);
        let failed_flushes = self.failed_flushes();
        self.write(pages, &mut claim, &mut results);
        if claim.pages.is_empty() {
            return results;
        }
        let flushed = self.flush(failed_flushes);
        let committed = flushed.and_then(|()| self.commit(&mut claim));
        match committed {
            Ok(committed) => committed
                .into_iter()
                .for_each(|number| results[number] = Ok(StoreOutcome::Stored)),
            Err(error) => {
                self.index().counts.failed += claim.pages.len() as u64;
                for page in &claim.pages {
                    results[page.number] = Err(error.again());
                }
            }
        }
        results
    }

    /// Takes a slot for each page that is not there.
    fn claim(
        &self,
        pages: &[(PageKey, &[u8])],
        checksums: &[u64],
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
            for (number, (key, payload)) in pages.iter().enumerate() {
                if !(1..=most).contains(&payload.len()) {
                    results[number] = Err(KvError::usage(
                        format!(
                            "a page of {} bytes is not between 1 and {most} bytes long",
                            payload.len()
                        ),
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
            let (key, payload) = pages[number];
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
                    checksum: checksums[number],
                    slot,
                    length: payload.len() as u32,
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

    /// Writes header and payload of the claimed pages; those that fail are taken out of the claim.
    fn write(
        &self,
        pages: &[(PageKey, &[u8])],
        claim: &mut SlotClaim<'_, M>,
        results: &mut [Result<StoreOutcome>],
    ) {
        let blocks = claim.pages.iter();
        let blocks: Vec<_> = blocks
            .map(|page| self.blocks_of(&page.record, pages[page.number].1))
            .collect();
        let mut transfers = Vec::with_capacity(3 * blocks.len());
        let mut of_page = Vec::with_capacity(3 * blocks.len());
        for (at, (page, (header, tail))) in claim.pages.iter().zip(&blocks).enumerate() {
            let payload = pages[page.number].1;
            let whole = payload.len() - payload.len() % UNIT as usize;
            let mut place = self.area.offset + self.area.layout.slot_at(page.record.slot);
            for part in [&header[..], &payload[..whole], &tail[..]] {
                if !part.is_empty() {
                    transfers.push(StoreTransfer::Write(place, part));
                    of_page.push(at);
                }
                place += part.len() as u64;
            }
        }
        let mut errors: Vec<Option<KvError>> = blocks.iter().map(|_| None).collect();
        for (at, written) in of_page
            .into_iter()
            .zip(self.area.medium.transfer_all(&mut transfers))
        {
            if let (Err(source), None) = (written, &errors[at]) {
                let record = &claim.pages[at].record;
                let place = self.area.offset + self.area.layout.slot_at(record.slot);
                let action = format!("writing page {} at byte {place}", record.slot);
                errors[at] = Some(KvError::drive(action)(source));
            }
        }
        let mut errors = errors.into_iter();
        let mut index = self.index();
        claim.pages.retain(|page| match errors.next().flatten() {
            None => true,
            Some(error) => {
                results[page.number] = Err(error);
                index.index.release(page.record.slot);
                index.counts.failed += 1;
                false
            }
        });
    }

    /// Returns the header of a page, and the last block of its payload if that is not a whole one.
    fn blocks_of(&self, record: &PageRecord, payload: &[u8]) -> (StructureBlock, Vec<u8>) {
        let header = PageHeader {
            instance: self.area.instance,
            record: *record,
        };
        let mut tail = payload[payload.len() - payload.len() % UNIT as usize..].to_vec();
        tail.resize(tail.len().next_multiple_of(UNIT as usize), 0);
        (header.to_block(), tail)
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
