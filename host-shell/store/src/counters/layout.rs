//! The words of a page of counters, and the names that every interface gives them.
//!
//! A page is 4096 bytes: words of 64 bits in the byte order of the machine, then texts. A reader of another version
//! refuses the page, so that a word never changes its meaning.

use nvme_driver::error::{Error, Result};

/// Bytes of a page.
pub(super) const PAGE_BYTES: usize = 4096;
/// Words of a page.
pub(super) const WORDS: usize = PAGE_BYTES / 8;
/// "NVGPUCTR", the first word.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"NVGPUCTR");
/// Version of the layout, the second word.
pub(super) const VERSION: u64 = 1;

/// Word of the magic number, written last.
pub(super) const AT_MAGIC: usize = 0;
/// Word of the version.
pub(super) const AT_VERSION: usize = 1;
/// Word of the time at which the store was opened, in milliseconds since 1970.
pub(super) const AT_OPENED: usize = 2;
/// Word that is odd while the texts change, and grows with each change.
pub(super) const AT_CHANGES: usize = 3;
/// Word of the tier plus 1; 0 without a GPU.
pub(super) const AT_TIER: usize = 4;
/// First word of the counters.
pub(super) const AT_COUNTERS: usize = 8;
/// First word of the histogram of latencies.
pub(super) const AT_LATENCIES: usize = 64;
/// Each text: the word of its length in bytes, which its bytes follow, and the room for them in words.
pub(super) const TEXTS: [(usize, usize); 4] = [(96, 31), (128, 7), (136, 119), (256, 255)];

/// Number of ranges of the histogram of latencies.
pub const LATENCY_RANGES: usize = 32;

/// Kind of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterKind {
    /// The value only grows.
    Total,
    /// The value is that of the moment.
    Gauge,
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $field:ident, $variant:ident, $kind:ident;)+) => {
        /// Counts since a store was opened.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
        pub struct StoreStats {
            $($(#[doc = $doc])+ pub $field: u64,)+
            /// Number of commands of the CPU by their latency: element 0 counts those below 1 µs, element n those from
            /// 2^(n-1) to 2^n µs, the last one all that took longer, too.
            pub latency_us: [u64; LATENCY_RANGES],
        }

        /// A counter of a page; its number is its place among the words of the counters.
        #[derive(Clone, Copy, Debug)]
        pub(crate) enum StoreCounter {
            $($variant,)+
        }

        impl StoreStats {
            /// Name, kind and meaning of each counter, in the order of the fields. The names are those of all interfaces.
            pub const COUNTERS: &'static [(&'static str, CounterKind, &'static str)] = &[
                $((stringify!($field), CounterKind::$kind, concat!($($doc),+)),)+
            ];

            /// Returns the values in the order of [`COUNTERS`](Self::COUNTERS).
            pub fn values(&self) -> [u64; Self::COUNTERS.len()] {
                [$(self.$field,)+]
            }

            /// Makes the counts from the words of a page.
            pub(super) fn of_words(words: &[u64; WORDS]) -> Self {
                let mut latency_us = [0; LATENCY_RANGES];
                latency_us.copy_from_slice(&words[AT_LATENCIES..][..LATENCY_RANGES]);
                Self {
                    $($field: words[AT_COUNTERS + StoreCounter::$variant as usize],)+
                    latency_us,
                }
            }
        }
    };
}

counters! {
    /// Commands sent by the CPU, or system calls to a file.
    commands, Commands, Total;
    /// Bytes that they moved.
    bytes, Bytes, Total;
    /// Commands that were sent again.
    retries, Retries, Total;
    /// Gathers of a drive's rows or of stripes, launched on a GPU or captured in a graph, whose blocks own their queues.
    owned_gathers, OwnedGathers, Total;
    /// Gathers of a drive's rows or of stripes, launched or captured, whose blocks share their queues.
    shared_gathers, SharedGathers, Total;
    /// Gathers of one drive's rows, launched or captured, whose reads a first half submits.
    begun_gathers, BegunGathers, Total;
    /// Rows of gathers in halves that the second half read, because other gathers held the queues when the gather was
    /// begun.
    late_rows, LateRows, Total;
    /// Rows that gathers left without data and scatters did not write, by the CPU and by a GPU, each run of a graph
    /// included. When a GPU moves bytes, each part of 64 KiB counts as a row.
    failed_rows, FailedRows, Total;
    /// Rows of gathers that have ended, failed ones and each run of a graph included. When a GPU reads bytes, each part
    /// that it reads counts as a row.
    rows_read, RowsRead, Total;
    /// Rows of scatters that have ended, failed ones and each run of a graph included.
    rows_written, RowsWritten, Total;
    /// Bytes that commands of the CPU read, and bytes of the rows that a GPU read.
    bytes_read, BytesRead, Total;
    /// Bytes that commands of the CPU wrote, and bytes of the rows that a GPU wrote.
    bytes_written, BytesWritten, Total;
    /// Rows of gathers of the CPU that were copies of another row of the same gather, and were read once.
    duplicates_saved, DuplicatesSaved, Total;
    /// Rows of gathers on a GPU that read each distinct row once: those of 4,096 rows and more of a drive or of
    /// stripes, without a cache, each run of a graph included.
    unique_asked, UniqueAsked, Total;
    /// Number of these rows that were read.
    unique_read, UniqueRead, Total;
    /// Recoveries of the store's controllers: commands that were aborted, and controller resets.
    recoveries, Recoveries, Total;
    /// Time that threads spent in reads and writes of the CPU and in waits for a GPU's rows, in nanoseconds, of all
    /// threads together.
    waited_ns, WaitedNs, Total;
    /// Sum of the latencies of commands of the CPU, in nanoseconds.
    latency_ns, LatencyNs, Total;
    /// Commands of the CPU that are under way.
    commands_under_way, CommandsUnderWay, Gauge;
    /// Launches on a GPU that have not ended, without those of graphs.
    launches_under_way, LaunchesUnderWay, Gauge;
    /// Blocks of the last launch on a GPU.
    launch_blocks, LaunchBlocks, Gauge;
    /// Registers that these blocks hold on the GPU together.
    launch_registers, LaunchRegisters, Gauge;
    /// Rows of gathers on a GPU through a cache of rows that have ended, each run of a graph included.
    cache_asked, CacheAsked, Total;
    /// Number of these rows that were in the cache, and not read from the drive.
    cache_hits, CacheHits, Total;
    /// Launches that write one drive's rows, by a GPU or captured in a graph, whose blocks own their queues.
    owned_scatters, OwnedScatters, Total;
    /// Launches that write one drive's rows, by a GPU or captured in a graph, whose blocks share their queues.
    shared_scatters, SharedScatters, Total;
}

const _: () = assert!(AT_COUNTERS + StoreStats::COUNTERS.len() <= AT_LATENCIES);
const _: () = assert!(AT_LATENCIES + LATENCY_RANGES <= TEXTS[0].0);

/// Returns the range of the histogram for a latency.
pub(super) fn latency_range(ns: u64) -> usize {
    let us = ns / 1000;
    let range = u64::BITS - us.leading_zeros();
    (range as usize).min(LATENCY_RANGES - 1)
}

impl StoreStats {
    /// Returns a number of microseconds that the latency of `share` (0 to 1) of the commands does not exceed, rounded up
    /// to a power of two; `None` before the first command. In the last range it is only the lower bound of the latency.
    ///
    /// ```
    /// let mut stats = nvme_store::StoreStats::default();
    /// assert_eq!(stats.latency_quantile_us(0.5), None);
    /// stats.latency_us[4] = 99;
    /// stats.latency_us[10] = 1;
    /// assert_eq!(stats.latency_quantile_us(0.5), Some(16));
    /// assert_eq!(stats.latency_quantile_us(1.0), Some(1024));
    /// ```
    pub fn latency_quantile_us(&self, share: f64) -> Option<u64> {
        // The words may come from another process: a sum that overflows is no error of ours.
        let total = self
            .latency_us
            .iter()
            .fold(0u64, |a, b| a.saturating_add(*b));
        let rank = (total as f64 * share.clamp(0.0, 1.0)).ceil().max(1.0) as u64;
        let mut seen = 0u64;
        let range = self.latency_us.iter().position(|count| {
            seen = seen.saturating_add(*count);
            seen >= rank
        });
        range.filter(|_| total > 0).map(|range| 1 << range)
    }

    /// Returns the share of the rows asked of a GPU's cache that were in it; `None` if no row was asked of one.
    ///
    /// ```
    /// let mut stats = nvme_store::StoreStats::default();
    /// assert_eq!(stats.cache_hit_share(), None);
    /// (stats.cache_asked, stats.cache_hits) = (8, 6);
    /// assert_eq!(stats.cache_hit_share(), Some(0.75));
    /// ```
    pub fn cache_hit_share(&self) -> Option<f64> {
        // Hits are counted while a gather runs, and the rows at its end.
        (self.cache_asked > 0).then(|| (self.cache_hits as f64 / self.cache_asked as f64).min(1.0))
    }

    /// Returns the number of rows that were copies of another row of the same gather, and not read again: those of the
    /// CPU and those of a GPU.
    pub fn rows_saved(&self) -> u64 {
        let of_gpu = self.unique_asked.saturating_sub(self.unique_read);
        self.duplicates_saved.saturating_add(of_gpu)
    }

    /// Returns the counts since `earlier`; gauges keep their value.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut words = [0; WORDS];
        for (index, (_, kind, _)) in Self::COUNTERS.iter().enumerate() {
            let (now, then) = (self.values()[index], earlier.values()[index]);
            words[AT_COUNTERS + index] = match kind {
                CounterKind::Total => now.saturating_sub(then),
                CounterKind::Gauge => now,
            };
        }
        for (index, count) in self.latency_us.iter().enumerate() {
            words[AT_LATENCIES + index] = count.saturating_sub(earlier.latency_us[index]);
        }
        Self::of_words(&words)
    }
}

/// A page as another process published it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct PublishedStore {
    /// The process.
    pub pid: u32,
    /// Number of the store in its process, from 0 on.
    pub store: u64,
    /// Time at which the store was opened, in milliseconds since 1970.
    pub opened_ms: u64,
    /// The path of the data, with the reason for it.
    #[serde(flatten)]
    pub path: PublishedPath,
    /// The counts.
    #[serde(flatten)]
    pub stats: StoreStats,
}

/// A [`DataPath`](crate::DataPath) as a page has it: texts that are too long are cut.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct PublishedPath {
    /// As [`DataPath::device`](crate::DataPath::device).
    pub device: String,
    /// As [`DataPath::data`](crate::DataPath::data).
    pub data: String,
    /// As [`DataPath::tier`](crate::DataPath::tier).
    pub tier: Option<u32>,
    /// As [`DataPath::path`](crate::DataPath::path).
    pub path: String,
    /// As [`DataPath::why`](crate::DataPath::why).
    pub why: String,
}

/// Reads the words of a page, which nothing is trusted of: its version, path, counts and time of opening.
///
/// # Errors
/// [`Error::Device`] for a page of another version, or whose texts do not fit.
pub(super) fn parse(words: &[u64; WORDS]) -> Result<(u64, PublishedPath, StoreStats)> {
    let refuse =
        |cause: String| Error::device(cause, "use the nvme-gpu of the same version as the program");
    if words[AT_MAGIC] != MAGIC {
        return Err(refuse("the file is no page of counters".to_owned()));
    }
    if words[AT_VERSION] != VERSION {
        return Err(refuse(format!(
            "the page of counters has version {}, and this program reads version {VERSION}",
            words[AT_VERSION]
        )));
    }
    let mut texts = [const { String::new() }; TEXTS.len()];
    for (text, (at, room)) in texts.iter_mut().zip(TEXTS) {
        let bytes = words[at];
        if bytes > room as u64 * 8 {
            return Err(refuse(format!(
                "a text of {bytes} bytes does not fit its place"
            )));
        }
        let all: Vec<u8> = words[at + 1..][..room]
            .iter()
            .flat_map(|word| word.to_ne_bytes())
            .take(bytes as usize)
            .collect();
        *text = String::from_utf8_lossy(&all).into_owned();
    }
    let [device, data, path, why] = texts;
    let tier = u32::try_from(words[AT_TIER]).ok();
    let shown = PublishedPath {
        device,
        data,
        tier: tier.and_then(|tier| tier.checked_sub(1)),
        path,
        why,
    };
    Ok((words[AT_OPENED], shown, StoreStats::of_words(words)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_latency_falls_into_the_range_that_the_documents_name() {
        for (ns, range) in [
            (0, 0),
            (999, 0),
            (1000, 1),
            (1999, 1),
            (2000, 2),
            (4_000_000, 12),
            (u64::MAX, LATENCY_RANGES - 1),
        ] {
            assert_eq!(latency_range(ns), range, "{ns} ns");
        }
    }

    #[test]
    fn counts_since_an_earlier_look_are_differences_and_gauges_are_not() {
        let earlier = StoreStats {
            commands: 10,
            commands_under_way: 7,
            ..StoreStats::default()
        };
        let mut now = StoreStats {
            commands: 15,
            commands_under_way: 3,
            ..StoreStats::default()
        };
        now.latency_us[3] = 2;
        let since = now.since(&earlier);
        assert_eq!((since.commands, since.commands_under_way), (5, 3));
        assert_eq!(since.latency_us[3], 2);
        // A process with the same number that began anew.
        assert_eq!(earlier.since(&now).commands, 0);
    }

    #[test]
    fn pages_that_no_store_wrote_are_refused_or_read_without_a_panic() {
        let mut words = [0u64; WORDS];
        assert!(parse(&words).is_err());
        words[AT_MAGIC] = MAGIC;
        let error = parse(&words).unwrap_err().to_string();
        assert!(error.contains("version 0"), "{error}");
        words[AT_VERSION] = VERSION;
        assert!(parse(&words).is_ok());
        words[TEXTS[3].0] = u64::MAX;
        assert!(parse(&words).is_err());
        words.fill(u64::MAX);
        (words[AT_MAGIC], words[AT_VERSION]) = (MAGIC, VERSION);
        for (at, room) in TEXTS {
            words[at] = room as u64 * 8;
        }
        let (_, path, stats) = parse(&words).unwrap();
        assert_eq!(path.tier, None);
        assert!(path.why.contains(char::REPLACEMENT_CHARACTER));
        assert_eq!(stats.latency_quantile_us(0.5), Some(1));
        assert_eq!(stats.commands, u64::MAX);
    }
}
