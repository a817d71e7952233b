//! Loading pages: what arrived is compared with what was committed before anyone sees it.

use crate::error::{KvError, PageFault, Result};
use crate::format::{PageHeader, PageRecord, StructureBlock, UNIT, payload_checksum};
use crate::key::PageKey;
use crate::medium::BlockMedium;
use crate::store::PageStore;
use nvme_store::StoreTransfer;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::{Arc, Weak};

/// A page that was loaded and verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadedPage {
    /// Bytes of the page.
    pub length: usize,
    /// Its checksum, [`payload_checksum`], with which the page was committed.
    pub checksum: u64,
}

/// A page that is to be read or written by the caller of a plan: its place on the medium, and what belongs there.
#[derive(Clone, Debug)]
pub struct PagePlace {
    /// Number of the page in the call.
    pub number: usize,
    /// Key of the page.
    pub key: PageKey,
    /// First byte of the header on the medium. The payload follows the header.
    pub offset: u64,
    /// Bytes of the payload.
    pub length: u32,
    /// [`payload_checksum`] of the payload.
    pub checksum: u64,
    /// The header, whose block is [`PageHeader::to_block`].
    pub header: PageHeader,
}

/// The end of a read that a [`LoadPlan`] asked for.
#[derive(Debug)]
pub enum ArrivedPage {
    /// The reader has compared the header with that of the [`PagePlace`]: they are the same.
    Compared {
        /// [`payload_checksum`] of the payload that was read.
        checksum: u64,
    },
    /// The header that was read, which the plan compares.
    Read {
        /// The header.
        header: Box<StructureBlock>,
        /// [`payload_checksum`] of the payload that was read.
        checksum: u64,
    },
    /// The read failed.
    Failed(nvme_driver::Error),
}

/// Pages that a caller reads by itself, as a GPU does, and that stay in their slots meanwhile.
///
/// The caller reads each of [`places`](Self::places) and calls [`finish`](Self::finish). A plan that is dropped
/// before was no load: nothing is counted as loaded or lost.
pub struct LoadPlan<S: Deref<Target = PageStore<M>>, M: BlockMedium> {
    pins: PinnedPages<S, M>,
    wanted: Vec<(usize, PageRecord)>,
    results: Vec<Result<LoadedPage>>,
}

/// Pages that stay in their slots until this is dropped. Each is pinned once for each time that it was found. `S` is
/// how the store is held: `&PageStore<M>`, or `Arc<PageStore<M>>`, which keeps it open; [`WeakPins`] do not.
pub struct PinnedPages<S: Deref<Target = PageStore<M>>, M: BlockMedium> {
    store: S,
    records: Vec<PageRecord>,
}

impl<S: Deref<Target = PageStore<M>>, M: BlockMedium> PinnedPages<S, M> {
    /// Pins the pages of the first keys, up to the first key without a page.
    pub fn of_prefix(store: S, keys: &[PageKey]) -> Self {
        let records = store.pin(keys);
        Self { store, records }
    }

    /// Returns the number of pages.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// True if no page was found.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Returns the keys, in the order in which they were asked for.
    pub fn keys(&self) -> impl Iterator<Item = PageKey> {
        self.records.iter().map(|record| record.key)
    }
}

impl<S: Deref<Target = PageStore<M>>, M: BlockMedium> Drop for PinnedPages<S, M> {
    fn drop(&mut self) {
        if !self.records.is_empty() {
            self.store.unpin(&self.records);
        }
    }
}

/// Pages that stay in their slots until this is dropped, or their store is closed, which this does not keep open.
pub struct WeakPins<T: AsRef<PageStore<M>>, M: BlockMedium> {
    store: Weak<T>,
    records: Vec<PageRecord>,
    medium: PhantomData<fn() -> M>,
}

impl<T: AsRef<PageStore<M>>, M: BlockMedium> WeakPins<T, M> {
    /// Pins the pages of the first keys, up to the first key without a page.
    pub fn of_prefix(store: &Arc<T>, keys: &[PageKey]) -> Self {
        Self {
            records: (**store).as_ref().pin(keys),
            store: Arc::downgrade(store),
            medium: PhantomData,
        }
    }

    /// Returns the number of pages.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// True if no page was found.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }
}

impl<T: AsRef<PageStore<M>>, M: BlockMedium> Drop for WeakPins<T, M> {
    fn drop(&mut self) {
        if !self.records.is_empty()
            && let Some(store) = self.store.upgrade()
        {
            (*store).as_ref().unpin(&self.records);
        }
    }
}

impl<M> AsRef<Self> for PageStore<M> {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl<S: Deref<Target = PageStore<M>>, M: BlockMedium> LoadPlan<S, M> {
    /// Plans to load the page of each key into as many bytes as stand beside it.
    pub fn new(store: S, pages: impl Iterator<Item = (PageKey, usize)>) -> Self {
        let (mut records, mut wanted, mut results) = (Vec::new(), Vec::new(), Vec::new());
        {
            let mut index = store.index();
            for (number, (key, room)) in pages.enumerate() {
                let Some(record) = index.index.pin(&key) else {
                    index.counts.missed += 1;
                    results.push(Err(KvError::Missing { key }));
                    continue;
                };
                records.push(record);
                results.push(check_length(&record, room));
                if results[number].is_ok() {
                    wanted.push((number, record));
                }
            }
        }
        Self {
            pins: PinnedPages { store, records },
            wanted,
            results,
        }
    }

    /// Returns the pages to read, in the order of the call: those that were found and fit.
    pub fn places(&self) -> Vec<PagePlace> {
        let store = &self.pins.store;
        let place = |(number, record): &(usize, PageRecord)| store.place_of(*number, record);
        self.wanted.iter().map(place).collect()
    }

    /// Compares what arrived with what was committed, and returns the outcome of each page of the call. `arrived` has
    /// an entry for each of [`places`](Self::places); a page without one counts as not read.
    ///
    /// A page that differs is dropped and counted, and so is one that the drive cannot read. The caller has to zero what
    /// it read of a page whose outcome is an error.
    ///
    /// # Errors
    /// As [`PageStore::load_all`].
    pub fn finish(self, arrived: impl IntoIterator<Item = ArrivedPage>) -> Vec<Result<LoadedPage>> {
        let Self {
            pins,
            wanted,
            mut results,
        } = self;
        let store = &pins.store;
        let mut arrived = arrived.into_iter();
        for (number, record) in &wanted {
            let checked = match arrived.next() {
                Some(arrived) => store.verify(record, arrived),
                None => Err(ReadFault::Drive(nvme_driver::Error::internal(
                    "the reads of a plan have fewer ends than pages",
                ))),
            };
            if let Err(fault) = checked {
                results[*number] = Err(store.failed(record, fault));
            }
        }
        let loaded = results.iter().filter(|result| result.is_ok()).count();
        store.index().counts.loaded += loaded as u64;
        results
    }
}

impl<M: BlockMedium> PageStore<M> {
    /// Pins the pages of the first keys, up to the first key without a page: [`PinnedPages::of_prefix`] of this store.
    pub fn pin_prefix(&self, keys: &[PageKey]) -> PinnedPages<&Self, M> {
        PinnedPages::of_prefix(self, keys)
    }

    fn pin(&self, keys: &[PageKey]) -> Vec<PageRecord> {
        let mut index = self.index();
        keys.iter().map_while(|key| index.index.pin(key)).collect()
    }

    fn unpin(&self, records: &[PageRecord]) {
        let mut index = self.index();
        // The first page of a prompt is in more prompts than the last one: it is the last to make room. Pages are
        // unpinned from the last to the first, so that the first counts as used most recently.
        let records = records.iter().rev();
        records.for_each(|record| index.index.unpin(record.slot));
    }

    /// Loads one page: [`load_all`](Self::load_all) of it.
    ///
    /// # Errors
    /// As [`load_all`](Self::load_all).
    pub fn load(&self, key: PageKey, page: &mut [u8]) -> Result<usize> {
        let mut results = self.load_all(&mut [(key, page)]);
        results.pop().unwrap_or(Err(KvError::Missing { key }))
    }

    /// Loads pages with all reads in flight together, and returns the length of each.
    ///
    /// Header and payload are compared with the record that committed the page. A page that differs is dropped and
    /// counted, and so is one that the drive cannot read; it is not found again. The buffer of a page that was not
    /// loaded is zero.
    ///
    /// # Errors
    /// [`KvError::Missing`], [`KvError::Lost`], [`KvError::Usage`] for a buffer that is shorter than the page, and
    /// [`KvError::Drive`] if the drive answers nothing at all.
    pub fn load_all(&self, pages: &mut [(PageKey, &mut [u8])]) -> Vec<Result<usize>> {
        let loaded = self.load_with_checksums(pages).into_iter();
        loaded.map(|page| Ok(page?.length)).collect()
    }

    /// Loads pages as [`load_all`](Self::load_all), and returns their checksums too, for a caller that passes them on.
    ///
    /// # Errors
    /// As [`load_all`](Self::load_all).
    pub fn load_with_checksums(
        &self,
        pages: &mut [(PageKey, &mut [u8])],
    ) -> Vec<Result<LoadedPage>> {
        let rooms = pages.iter().map(|(key, page)| (*key, page.len()));
        let plan = LoadPlan::new(self, rooms);
        let arrived = self.read(pages, &plan.wanted);
        let results = plan.finish(arrived);
        for (result, (_, page)) in results.iter().zip(pages.iter_mut()) {
            if result.is_err() {
                page.fill(0);
            }
        }
        results
    }

    /// Returns the place of a page, and what belongs there.
    pub(crate) fn place_of(&self, number: usize, record: &PageRecord) -> PagePlace {
        let header = PageHeader {
            instance: self.area.instance,
            record: *record,
        };
        PagePlace {
            number,
            key: record.key,
            offset: self.area.offset + self.area.layout.slot_at(record.slot),
            length: record.length,
            checksum: record.checksum,
            header,
        }
    }

    /// Reads pages into their buffers.
    fn read(
        &self,
        pages: &mut [(PageKey, &mut [u8])],
        wanted: &[(usize, PageRecord)],
    ) -> Vec<ArrivedPage> {
        let mut headers: Vec<Box<StructureBlock>> = wanted
            .iter()
            .map(|_| Box::new([0; UNIT as usize]))
            .collect();
        let mut transfers = Vec::with_capacity(2 * wanted.len());
        let mut buffers = pages.iter_mut().enumerate();
        for ((number, record), header) in wanted.iter().zip(&mut headers) {
            let place = self.area.offset + self.area.layout.slot_at(record.slot);
            transfers.push(StoreTransfer::Read(place, &mut header[..]));
            // `wanted` is in the order of the pages.
            if let Some((_, (_, page))) = buffers.find(|(at, _)| at == number) {
                let payload = &mut page[..record.length as usize];
                transfers.push(StoreTransfer::Read(place + UNIT, payload));
            }
        }
        let mut read = self.area.medium.transfer_all(&mut transfers).into_iter();
        let ends = wanted.iter().zip(headers);
        let arrived = ends.map(|((number, record), header)| {
            let both = read.by_ref().take(2).collect::<nvme_driver::Result<()>>();
            let payload = &pages[*number].1[..record.length as usize];
            match both {
                Ok(()) => ArrivedPage::Read {
                    header,
                    checksum: payload_checksum(payload),
                },
                Err(error) => ArrivedPage::Failed(error),
            }
        });
        arrived.collect()
    }

    /// Compares a page with the record that committed it.
    fn verify(
        &self,
        record: &PageRecord,
        arrived: ArrivedPage,
    ) -> std::result::Result<(), ReadFault> {
        let (header, checksum) = match arrived {
            ArrivedPage::Compared { checksum } => (None, checksum),
            ArrivedPage::Read { header, checksum } => (Some(header), checksum),
            ArrivedPage::Failed(error) => return Err(ReadFault::Drive(error)),
        };
        if let Some(header) = header {
            self.verify_header(record, &header)
                .map_err(ReadFault::Page)?;
        }
        match checksum == record.checksum {
            true => Ok(()),
            false => Err(ReadFault::Page(PageFault::Payload)),
        }
    }

    fn verify_header(
        &self,
        record: &PageRecord,
        header: &StructureBlock,
    ) -> std::result::Result<(), PageFault> {
        let header = PageHeader::parse(header).ok_or(PageFault::Header)?;
        let found = header.record;
        if header.instance != self.area.instance || found.key != record.key {
            return Err(PageFault::OtherPage);
        }
        if found.generation != record.generation {
            return Err(PageFault::Generation);
        }
        // The record and not the header says which bytes were committed.
        match found == *record {
            true => Ok(()),
            false => Err(PageFault::Payload),
        }
    }

    /// Drops a page that is not what was stored, and returns the error of loading it.
    fn failed(&self, record: &PageRecord, fault: ReadFault) -> KvError {
        let at = self.area.offset + self.area.layout.slot_at(record.slot);
        let fault = match fault {
            ReadFault::Page(fault) => fault,
            ReadFault::Drive(error) if crate::area::is_of_place(&error) => PageFault::Unreadable,
            // The page may be right: a later read will show it.
            ReadFault::Drive(error) => {
                let action = format!("reading page {} at byte {at}", record.slot);
                return KvError::drive(action)(error);
            }
        };
        let mut index = self.index();
        if index.index.forget(&record.key, record.generation) {
            index.counts.lost += 1;
        }
        KvError::Lost {
            key: record.key,
            slot: record.slot,
            offset: at,
            fault,
        }
    }
}

/// Reason why a page was not loaded.
enum ReadFault {
    Page(PageFault),
    Drive(nvme_driver::Error),
}

fn loaded_of(record: &PageRecord) -> LoadedPage {
    LoadedPage {
        length: record.length as usize,
        checksum: record.checksum,
    }
}

fn check_length(record: &PageRecord, room: usize) -> Result<LoadedPage> {
    let length = record.length as usize;
    if room >= length {
        return Ok(loaded_of(record));
    }
    Err(KvError::usage(
        format!(
            "the page of key {} has {length} bytes, and its buffer {room}",
            record.key
        ),
        "pass a buffer of the store's page size",
    ))
}
