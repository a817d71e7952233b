//! The store: formatting and opening, pages by key, and their lifetime. A page is found only once its record is
//! durable, and a page whose checksum differs is a miss and never wrong bytes.

use crate::area::{AreaRequest, StoreArea, check_request, check_same, claim, read_superblock};
use crate::error::{KvError, Result};
use crate::fingerprint::FingerprintDigest;
use crate::format::{InstanceId, PageRecord, SuperBlock};
use crate::index::PageIndex;
use crate::journal::PageJournal;
use crate::key::PageKey;
use crate::layout::AreaLayout;
use crate::medium::BlockMedium;
use crate::recovery::{RecoveryReport, recover};
use crate::shared_index::{CountedIndex, SharedIndex};
use crate::stats::KvStats;
use nvme_driver::lock::lock;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

/// Pages of keys and values in an area of a drive, for any number of threads of one process.
///
/// Call [`open_or_format`](Self::open_or_format), then [`key`](Self::key) for each block of tokens, then
/// [`pin_prefix`](Self::pin_prefix) and [`load_all`](Self::load_all) for what is there and
/// [`store_all`](Self::store_all) for what is not.
///
/// A page is found once `store_all` has returned [`Stored`](crate::StoreOutcome::Stored) for it, also after a power
/// cut, until it makes room for others. A load returns the bytes that were stored, or an error; the buffer is zero
/// then. One process owns an area: opening it again takes it from the owner before, whose next change ends with
/// [`KvError::Superseded`].
///
/// ```
/// use nvme_kv::{AreaRequest, ModelFingerprint, PageStore, StoreOutcome};
/// use nvme_store::{Store, StoreOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let drive = Store::open("sim:mem?size=16MiB", &StoreOptions::default())?;
/// let request = AreaRequest {
///     offset: 0,
///     bytes: drive.len(),
///     page_bytes: 64 << 10,
///     fingerprint: ModelFingerprint {
///         model: "llama-3-8b".into(),
///         dtype: "bf16".into(),
///         block_tokens: 16,
///         ..ModelFingerprint::default()
///     },
/// };
/// let (pages, formatted) = PageStore::open_or_format(drive, &request)?;
/// assert!(formatted.is_some());
/// let key = pages.key(b"the hash of a block of tokens", 0);
/// assert_eq!(pages.store(key, &[7; 64 << 10])?, StoreOutcome::Stored);
/// let mut page = vec![0; 64 << 10];
/// assert_eq!(pages.load(key, &mut page)?, page.len());
/// assert!(page.iter().all(|byte| *byte == 7));
/// # Ok(())
/// # }
/// ```
pub struct PageStore<M> {
    pub(crate) area: StoreArea<M>,
    index: SharedIndex<KvStats>,
    /// Locked before the index, and while the journal is written.
    journal: Mutex<JournalState>,
    recovery: RecoveryReport,
    /// Number of this opening.
    epoch: u32,
    /// Flushes that failed: the drive may have lost data of every call that wrote before.
    failed_flushes: AtomicU64,
}

/// What changes with each write of the journal.
pub(crate) struct JournalState {
    pub journal: PageJournal,
    /// Generations of this opening that were given away.
    generations: u64,
}

/// Bits of a generation below those of the opening.
const GENERATION_BITS: u32 = 40;

impl JournalState {
    /// Returns a generation that no page of this store has had: the opening's number is in it, so that one given
    /// away before a crash does not come again.
    pub fn generation(&mut self) -> u64 {
        self.generations += 1;
        (u64::from(self.journal.epoch) << GENERATION_BITS) | self.generations
    }
}

impl<M: BlockMedium> PageStore<M> {
    /// Makes an empty store; what the area held is lost.
    ///
    /// # Errors
    /// [`KvError::Usage`] for an area that cannot be; [`KvError::Drive`].
    pub fn format(medium: M, request: &AreaRequest) -> Result<Self> {
        check_request(&medium, request)?;
        let layout = AreaLayout::fit(request.bytes, request.page_bytes)?;
        let encoded = request.fingerprint.encode()?;
        let superblock = SuperBlock {
            instance: new_instance(),
            layout,
            fingerprint: request.fingerprint.clone(),
        };
        let area = StoreArea {
            _claim: claim(&medium, request)?,
            medium,
            offset: request.offset,
            layout,
            instance: superblock.instance,
            digest: FingerprintDigest::of(&encoded),
        };
        // One of the two is whole at every moment: a power cut leaves the store that was here before, an unfinished
        // one, or the new one, and never a superblock whose journal is another store's.
        area.write_superblocks(&superblock.to_block(&encoded, false))?;
        let mut index = PageIndex::new(layout.slots, 0);
        index.restored();
        let mut journal = PageJournal::fresh();
        journal.write_checkpoint(&area, &index.snapshot())?;
        area.write_superblocks(&superblock.to_block(&encoded, true))?;
        Ok(Self::of(area, index, journal, RecoveryReport::default()))
    }

    /// Opens the store of an area, and takes it from an owner before.
    ///
    /// # Errors
    /// [`KvError::Blank`], [`KvError::Foreign`], [`KvError::Version`] and [`KvError::Damaged`] for what is there;
    /// [`KvError::OtherModel`] and [`KvError::OtherSize`] for a store of another model or size;
    /// [`KvError::Usage`]; [`KvError::Drive`].
    pub fn open(medium: M, request: &AreaRequest) -> Result<Self> {
        Self::try_open(medium, request).map_err(|(error, _)| error)
    }

    /// Opens the store of an area. Makes an empty one where the area is blank, or holds a store of another model,
    /// other sizes, or one that is damaged; returns the reason then.
    ///
    /// # Errors
    /// As [`open`](Self::open) for what is no store of this version, and for what the drive cannot read, which are left
    /// as they are.
    pub fn open_or_format(medium: M, request: &AreaRequest) -> Result<(Self, Option<KvError>)> {
        match Self::try_open(medium, request) {
            Ok(store) => Ok((store, None)),
            Err((error, medium)) => match error {
                KvError::Blank { .. }
                | KvError::OtherModel { .. }
                | KvError::OtherSize { .. }
                | KvError::Damaged { .. } => Ok((Self::format(medium, request)?, Some(error))),
                _ => Err(error),
            },
        }
    }

    fn try_open(medium: M, request: &AreaRequest) -> std::result::Result<Self, (KvError, M)> {
        let found = check_request(&medium, request)
            .and_then(|()| request.fingerprint.encode())
            .and_then(|encoded| Ok((encoded, read_superblock(&medium, request)?)))
            .and_then(|found| check_same(&found.1.0, request).map(|()| found))
            .and_then(|found| Ok((found, claim(&medium, request)?)));
        let ((encoded, (superblock, mended)), claim) = match found {
            Ok(found) => found,
            Err(error) => return Err((error, medium)),
        };
        let area = StoreArea {
            _claim: claim,
            medium,
            offset: request.offset,
            layout: superblock.layout,
            instance: superblock.instance,
            digest: FingerprintDigest::of(&encoded),
        };
        let recovered = recover(&area).and_then(|(index, mut journal, report)| {
            if let Some(at) = mended {
                let block = superblock.to_block(&encoded, true);
                area.write_durable(at, &block, "the superblock")?;
            }
            journal.open(&area, &index)?;
            Ok((index, journal, report))
        });
        match recovered {
            Ok((index, journal, report)) => Ok(Self::of(area, index, journal, report)),
            Err(error) => Err((error, area.medium)),
        }
    }

    fn of(
        area: StoreArea<M>,
        index: PageIndex,
        journal: PageJournal,
        recovery: RecoveryReport,
    ) -> Self {
        Self {
            area,
            index: SharedIndex::new(index),
            recovery,
            epoch: journal.epoch,
            journal: Mutex::new(JournalState {
                journal,
                generations: 0,
            }),
            failed_flushes: AtomicU64::new(0),
        }
    }

    /// Returns the number of flushes that have failed.
    pub(crate) fn failed_flushes(&self) -> u64 {
        self.failed_flushes.load(Ordering::SeqCst)
    }

    /// Makes durable what was written since `failed_flushes` was read as `before`.
    ///
    /// # Errors
    /// [`KvError::Drive`], also if a flush of another call has failed since: systems report an error of the medium
    /// to one caller, whose data were not the only ones.
    pub(crate) fn flush(&self, before: u64) -> Result<()> {
        if let Err(error) = self.area.flush() {
            self.failed_flushes.fetch_add(1, Ordering::SeqCst);
            return Err(error);
        }
        if self.failed_flushes() == before {
            return Ok(());
        }
        let cause = "a flush of another call failed while the pages were written";
        let source = nvme_driver::Error::device(cause, "store the pages again");
        Err(KvError::drive("flushing the drive")(source))
    }

    /// Locks the index, for a time without any wait.
    pub(crate) fn index(&self) -> MutexGuard<'_, CountedIndex<KvStats>> {
        self.index.lock()
    }

    /// Locks the journal, perhaps for a time in which the drive is written.
    pub(crate) fn journal(&self) -> MutexGuard<'_, JournalState> {
        lock(&self.journal)
    }

    /// Appends what was freed, and `commits`, to the log, and locks the index: the slots are free.
    ///
    /// # Errors
    /// [`KvError::Superseded`], [`KvError::Drive`]: nothing counts as logged.
    pub(crate) fn append(
        &self,
        journal: &mut JournalState,
        commits: &[PageRecord],
    ) -> Result<MutexGuard<'_, CountedIndex<KvStats>>> {
        let mut freed = self.index().index.begin_logging();
        if !journal
            .journal
            .has_room(&self.area, freed.len() + commits.len())
        {
            // A checkpoint without the pages that were freed says that they were.
            drop(self.write_checkpoint(journal)?);
            freed.clear();
        }
        journal.journal.append(&self.area, &freed, commits)?;
        let mut index = self.index();
        index.index.end_logging();
        Ok(index)
    }

    /// Writes a checkpoint, and locks the index: the slots of pages that are not in it are free.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    pub(crate) fn write_checkpoint(
        &self,
        journal: &mut JournalState,
    ) -> Result<MutexGuard<'_, CountedIndex<KvStats>>> {
        let records = {
            let mut index = self.index();
            index.index.begin_logging();
            index.index.snapshot()
        };
        journal.journal.write_checkpoint(&self.area, &records)?;
        let mut index = self.index();
        index.index.end_logging();
        index.counts.checkpoints += 1;
        Ok(index)
    }

    /// Returns the medium.
    pub fn medium(&self) -> &M {
        &self.area.medium
    }

    /// Returns the sizes of the area.
    pub fn layout(&self) -> AreaLayout {
        self.area.layout
    }

    /// Returns the number of this opening: each opening of an area has a greater one than those before.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Returns what opening found; zeros for a store that was formatted.
    pub fn recovery(&self) -> RecoveryReport {
        self.recovery
    }

    /// Returns the key of part `part`, as a layer, of the block that the caller knows by `block_hash`. The
    /// fingerprint is in it.
    pub fn key(&self, block_hash: &[u8], part: u32) -> PageKey {
        self.area.digest.key(block_hash, part)
    }

    /// True if the page is found. Loading it may still show that it is lost.
    pub fn contains(&self, key: &PageKey) -> bool {
        self.index().index.contains(key)
    }

    /// Returns the length of the page in bytes; `None` if it is not found.
    pub fn length(&self, key: &PageKey) -> Option<u32> {
        self.index().index.length(key)
    }

    /// Returns the length of the page of each key, as [`length`](Self::length), of one moment.
    pub fn lengths(&self, keys: &[PageKey]) -> Vec<Option<u32>> {
        let index = self.index();
        keys.iter().map(|key| index.index.length(key)).collect()
    }

    /// Counts the pages that are found as used: the last of `keys` makes room first.
    pub fn touch(&self, keys: &[PageKey]) {
        let mut index = self.index();
        for key in keys.iter().rev() {
            index.index.touch(key);
        }
    }

    /// Returns the counts.
    pub fn stats(&self) -> KvStats {
        let index = self.index();
        KvStats {
            pages: index.index.pages() as u64,
            slots: self.area.layout.slots.into(),
            ..index.counts
        }
    }

    /// Removes pages, durably. Those that are being loaded are loaded to their end. Returns the number of pages that
    /// were there.
    ///
    /// # Errors
    /// [`KvError::Superseded`], [`KvError::Drive`]: the pages are not found by this process, but may be after a crash.
    pub fn remove(&self, keys: &[PageKey]) -> Result<usize> {
        let remove = |index: &mut PageIndex| keys.iter().filter(|key| index.remove(key)).count();
        let removed = remove(&mut self.index().index);
        self.append(&mut self.journal(), &[]).map(|_| removed)
    }

    /// Removes all pages, durably.
    ///
    /// # Errors
    /// As [`remove`](Self::remove).
    pub fn clear(&self) -> Result<()> {
        self.index().index.clear();
        self.append(&mut self.journal(), &[]).map(drop)
    }

    /// Writes a checkpoint: the next opening has no log to read, and knows the order of use. The store does this
    /// itself when the log is full; before the end of a process it is useful and not necessary.
    ///
    /// # Errors
    /// [`KvError::Superseded`], [`KvError::Drive`].
    pub fn checkpoint(&self) -> Result<()> {
        self.write_checkpoint(&mut self.journal()).map(drop)
    }
}

/// Returns a name that no other store has: random numbers of the operating system.
fn new_instance() -> InstanceId {
    let mut instance = [0; 16];
    for half in instance.as_chunks_mut::<8>().0 {
        *half = RandomState::new().hash_one(0u64).to_le_bytes();
    }
    instance
}
