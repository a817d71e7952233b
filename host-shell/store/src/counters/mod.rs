//! The counters of a store, in a page of memory that other processes of the user can read: `nvme-gpu top` shows a
//! program that runs already, without a call of it.
//!
//! Counting is a store to memory, never a system call. Without a page that others can read, because it is switched off
//! or the system refuses it, a store counts in private memory.
//!
//! - `layout`: the words of a page; [`StoreStats`] is their meaning.
//! - `folder`: the files, their names, and the removal of those that ended processes left.
//! - `mapping`: the memory.

mod folder;
mod layout;
mod mapping;

pub use folder::readable_folders;
pub(crate) use layout::StoreCounter;
pub use layout::{CounterKind, LATENCY_RANGES, PublishedPath, PublishedStore, StoreStats};

use crate::options::DataPath;
use folder::PageOwner;
use layout::{
    AT_CHANGES, AT_COUNTERS, AT_LATENCIES, AT_MAGIC, AT_OPENED, AT_TIER, AT_VERSION, MAGIC, TEXTS,
    VERSION, WORDS,
};
use mapping::{FileWords, PageWords};
use nvme_driver::ProcessMark;
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The environment variable that keeps the counters of a process from others: `off`.
const SWITCH: &str = "NVME_GPU_COUNTERS";
/// Number of times that a page is read while its texts change.
const TRIES: u32 = 100;

/// The counters of a store.
pub(crate) struct StoreCounters {
    words: PageWords,
    /// The file, and the process that removes it.
    file: Option<(PathBuf, ProcessMark)>,
    /// Held while the texts change.
    texts: Mutex<()>,
}

impl StoreCounters {
    /// Makes the counters of a new store, for others to read unless the user forbids it or the system does not allow it.
    pub fn publish() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let published = match std::env::var_os(SWITCH) {
            Some(value) if value == "off" => None,
            _ => {
                let store = NEXT.fetch_add(1, Ordering::Relaxed);
                Self::publish_in(&folder::own_folder(), store).ok()
            }
        };
        published.unwrap_or_else(|| Self {
            words: PageWords::own(),
            file: None,
            texts: Mutex::default(),
        })
    }

    fn publish_in(folder: &Path, store: u64) -> io::Result<Self> {
        folder::prepare(folder)?;
        if store == 0 {
            folder::pages(folder);
        }
        let (file, path) = folder::create(folder, &PageOwner::here(store)?)?;
        let words = FileWords::map(&file).inspect_err(|_| {
            let _ = std::fs::remove_file(&path);
        })?;
        Ok(Self {
            words: PageWords::Shared(words),
            file: Some((path, ProcessMark::here())),
            texts: Mutex::default(),
        })
    }

    /// Shows the page to readers; the data of the store take `path`.
    pub fn begin(&self, path: &DataPath) {
        let words = self.words.get();
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |now| now.as_millis() as u64);
        words[AT_OPENED].store(now, Ordering::Relaxed);
        words[AT_VERSION].store(VERSION, Ordering::Relaxed);
        self.set_path(path);
        // Release: a reader that sees the magic number sees the rest.
        words[AT_MAGIC].store(MAGIC, Ordering::Release);
    }

    /// Replaces the texts.
    pub fn set_path(&self, path: &DataPath) {
        let _changing = lock(&self.texts);
        let words = self.words.get();
        words[AT_CHANGES].fetch_add(1, Ordering::Relaxed);
        // Release: a reader that sees a word of the new texts sees the odd count, too.
        fence(Ordering::Release);
        let tier = path.tier.map_or(0, |tier| u64::from(tier) + 1);
        words[AT_TIER].store(tier, Ordering::Relaxed);
        let texts = [&path.device, path.data, &path.path, &path.why];
        for (text, (at, room)) in texts.into_iter().zip(TEXTS) {
            let text = &text[..text.floor_char_boundary(room * 8)];
            words[at].store(text.len() as u64, Ordering::Relaxed);
            for (word, bytes) in words[at + 1..].iter().zip(text.as_bytes().chunks(8)) {
                let mut whole = [0; 8];
                whole[..bytes.len()].copy_from_slice(bytes);
                word.store(u64::from_ne_bytes(whole), Ordering::Relaxed);
            }
        }
        words[AT_CHANGES].fetch_add(1, Ordering::Release);
    }

    #[inline]
    fn word(&self, counter: StoreCounter) -> &AtomicU64 {
        &self.words.get()[AT_COUNTERS + counter as usize]
    }

    /// Adds `more` to a counter.
    #[inline]
    pub fn add(&self, counter: StoreCounter, more: u64) {
        if more != 0 {
            self.word(counter).fetch_add(more, Ordering::Relaxed);
        }
    }

    /// Subtracts `less` from a gauge.
    #[inline]
    pub fn subtract(&self, counter: StoreCounter, less: u64) {
        self.word(counter).fetch_sub(less, Ordering::Relaxed);
    }

    /// Raises a count that is kept elsewhere to `value`, unless it is higher already.
    #[inline]
    pub fn raise(&self, counter: StoreCounter, value: u64) {
        let word = self.word(counter);
        if word.load(Ordering::Relaxed) < value {
            word.fetch_max(value, Ordering::Relaxed);
        }
    }

    /// Sets a gauge.
    #[cfg(feature = "cuda")]
    #[inline]
    pub fn set(&self, counter: StoreCounter, value: u64) {
        self.word(counter).store(value, Ordering::Relaxed);
    }

    /// Counts a command of the CPU that took `ns` nanoseconds, for which [`StoreCounter::LatencyNs`] is to be raised, too.
    #[inline]
    pub fn ended_after(&self, ns: u64) {
        let range = layout::latency_range(ns);
        self.words.get()[AT_LATENCIES + range].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the counts.
    pub fn stats(&self) -> StoreStats {
        let words = self.words.get();
        let copy: [u64; WORDS] = std::array::from_fn(|at| words[at].load(Ordering::Relaxed));
        StoreStats::of_words(&copy)
    }
}

impl Drop for StoreCounters {
    fn drop(&mut self) {
        // A child of a fork has the object, too, but the file is its parent's.
        if let Some((path, process)) = &self.file
            && *process == ProcessMark::here()
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Returns the stores that processes publish in `folders`, by process and store, and removes the pages of processes that
/// have ended. Pages that cannot be read, and those of another version, come as errors.
///
/// ```
/// # fn main() -> nvme_driver::Result<()> {
/// # #[cfg(feature = "sim")] {
/// use nvme_store::{Store, StoreOptions, published_stores, readable_folders};
///
/// let store = Store::open("sim:mem?size=1MiB", &StoreOptions::default())?;
/// store.write_at(0, &[1; 512])?;
/// let all = published_stores(&readable_folders());
/// let own = all.iter().flatten().find(|one| one.pid == std::process::id());
/// assert!(own.expect("it is published").stats.bytes_written >= 512);
/// # }
/// # Ok(())
/// # }
/// ```
pub fn published_stores(folders: &[PathBuf]) -> Vec<Result<PublishedStore>> {
    let pages = folders.iter().flat_map(|folder| folder::pages(folder));
    let mut pages: Vec<(PageOwner, PathBuf)> = pages.collect();
    pages.sort();
    let read = |(owner, path): &(PageOwner, PathBuf)| match read(owner, path) {
        // The store was closed meanwhile.
        Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => None,
        read => Some(read),
    };
    pages.iter().filter_map(read).collect()
}

fn read(owner: &PageOwner, path: &Path) -> Result<PublishedStore> {
    for _ in 0..TRIES {
        let words = folder::read(path)?;
        let is_whole = words[AT_MAGIC] != 0 && words[AT_CHANGES].is_multiple_of(2);
        if !is_whole || folder::read(path)?[AT_CHANGES] != words[AT_CHANGES] {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        let (opened_ms, shown, stats) = layout::parse(&words)?;
        return Ok(PublishedStore {
            pid: owner.pid,
            store: owner.store,
            opened_ms,
            path: shown,
            stats,
        });
    }
    Err(Error::device(
        format!("the texts of {} do not come to rest", path.display()),
        "remove the file if its process does not run",
    ))
}

#[cfg(all(test, feature = "sim"))]
mod tests;
