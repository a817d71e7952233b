//! Samples of the stores that programs publish, and the rates between two of them.

use nvme_host::Error;
use nvme_host::store::{PublishedStore, StoreStats, published_stores, readable_folders};
use serde_json::{Value, json};
use std::time::Instant;

/// A look at all stores.
pub struct CounterSample {
    at: Instant,
    stores: Vec<PublishedStore>,
    /// Pages that could not be read, in words.
    unreadable: Vec<String>,
}

impl CounterSample {
    pub fn take() -> Self {
        let (stores, refused): (Vec<_>, Vec<_>) = published_stores(&readable_folders())
            .into_iter()
            .partition(Result::is_ok);
        let in_words = |error: Error| format!("{error}: {}", error.remedy());
        Self {
            at: Instant::now(),
            stores: stores.into_iter().flatten().collect(),
            unreadable: refused
                .into_iter()
                .filter_map(Result::err)
                .map(in_words)
                .collect(),
        }
    }

    pub fn stores(&self) -> &[PublishedStore] {
        &self.stores
    }
}

/// What a store did between two looks.
#[derive(Clone, Debug)]
pub struct StoreRates {
    pub program: String,
    pub now: PublishedStore,
    /// Counts between the two looks.
    pub since: StoreStats,
    seconds: f64,
}

impl StoreRates {
    pub fn new(program: String, now: PublishedStore, since: StoreStats, seconds: f64) -> Self {
        Self {
            program,
            now,
            since,
            seconds,
        }
    }

    fn rate(&self, count: u64) -> f64 {
        match self.seconds > 0.0 {
            true => count as f64 / self.seconds,
            false => 0.0,
        }
    }

    pub fn rows_per_s(&self) -> f64 {
        self.rate(self.since.rows_read.saturating_add(self.since.rows_written))
    }

    pub fn read_per_s(&self) -> f64 {
        self.rate(self.since.bytes_read)
    }

    pub fn written_per_s(&self) -> f64 {
        self.rate(self.since.bytes_written)
    }

    /// Returns the latencies that half and 99 % of the commands did not exceed, in µs: of those between the two looks.
    pub fn latencies_us(&self) -> [Option<u64>; 2] {
        [0.5, 0.99].map(|share| self.since.latency_quantile_us(share))
    }

    /// Returns the share of the rows asked of a GPU's cache that were in it: between the two looks, or since the store was
    /// opened if none was asked for then. `None` without a cache.
    pub fn hits(&self) -> Option<f64> {
        self.since
            .cache_hit_share()
            .or_else(|| self.now.stats.cache_hit_share())
    }

    fn to_json(&self) -> Value {
        let [p50_us, p99_us] = self.latencies_us();
        let mut object = json!({ "program": self.program });
        let store = serde_json::to_value(&self.now).unwrap_or_default();
        let rates = json!({
            "rows_per_s": self.rows_per_s(), "read_bytes_per_s": self.read_per_s(),
            "written_bytes_per_s": self.written_per_s(), "p50_us": p50_us, "p99_us": p99_us,
            "cache_hit_share": self.hits(),
        });
        for part in [store, rates] {
            if let (Value::Object(all), Value::Object(part)) = (&mut object, part) {
                all.extend(part);
            }
        }
        object
    }
}

/// What all stores did between two looks.
pub struct SampleInterval {
    pub stores: Vec<StoreRates>,
    pub unreadable: Vec<String>,
}

impl SampleInterval {
    /// A store that the earlier look did not see has no rates yet.
    pub fn between(earlier: &CounterSample, now: &CounterSample) -> Self {
        let seconds = now.at.duration_since(earlier.at).as_secs_f64();
        let rates = |store: &PublishedStore| {
            let key = |one: &PublishedStore| (one.pid, one.store, one.opened_ms);
            let before = earlier.stores.iter().find(|one| key(one) == key(store));
            let before = before.map_or(store.stats, |one| one.stats);
            let since = store.stats.since(&before);
            StoreRates::new(program(store.pid), store.clone(), since, seconds)
        };
        Self {
            stores: now.stores.iter().map(rates).collect(),
            unreadable: now.unreadable.clone(),
        }
    }

    pub fn to_json(&self) -> Value {
        let stores: Vec<Value> = self.stores.iter().map(StoreRates::to_json).collect();
        json!({ "stores": stores, "unreadable": self.unreadable })
    }
}

/// Returns the name of a process; its number if the process hides it.
pub fn program(pid: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
    name.map_or_else(|_| pid.to_string(), |name| name.trim_end().to_owned())
}
