//! The table: a row for each store, for the screen and for print.

use super::sample::{SampleInterval, StoreRates};
use crate::common::visible;
use nvme_host::units;
use std::cmp::Ordering;

/// Names of the columns.
pub const HEADINGS: [&str; 14] = [
    "PID",
    "PROGRAM",
    "DEVICE",
    "TIER",
    "ROWS/S",
    "READ/S",
    "WRITE/S",
    "DEPTH",
    "P50",
    "P99",
    "HITS",
    "SAVED",
    "FAILED",
    "RECOVERED",
];
/// The columns with texts, which are aligned to the left.
pub const TEXTS: [usize; 3] = [1, 2, 3];

/// Order of the rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TableOrder {
    #[default]
    Process,
    Rows,
    Bytes,
    Latency,
}

impl TableOrder {
    pub fn next(self) -> Self {
        match self {
            Self::Process => Self::Rows,
            Self::Rows => Self::Bytes,
            Self::Bytes => Self::Latency,
            Self::Latency => Self::Process,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Rows => "rows/s",
            Self::Bytes => "bytes/s",
            Self::Latency => "p99",
        }
    }

    /// Sorts stores, the busiest first.
    pub fn sort(self, stores: &mut [StoreRates]) {
        let bytes = |one: &StoreRates| one.read_per_s() + one.written_per_s();
        let compare = |a: &StoreRates, b: &StoreRates| match self {
            Self::Process => Ordering::Equal,
            Self::Rows => b.rows_per_s().total_cmp(&a.rows_per_s()),
            Self::Bytes => bytes(b).total_cmp(&bytes(a)),
            Self::Latency => b.latencies_us()[1].cmp(&a.latencies_us()[1]),
        };
        let process = |one: &StoreRates| (one.now.pid, one.now.store);
        stores.sort_by(|a, b| compare(a, b).then_with(|| process(a).cmp(&process(b))));
    }
}

/// Returns the cells of a store, in the order of [`HEADINGS`].
pub fn cells(store: &StoreRates) -> [String; HEADINGS.len()] {
    let (stats, path) = (&store.now.stats, &store.now.path);
    let [p50, p99] = store.latencies_us().map(latency);
    [
        store.now.pid.to_string(),
        visible::line(&store.program),
        visible::line(&path.device),
        path.tier.map_or("cpu".to_owned(), |tier| format!("{tier}")),
        short(store.rows_per_s()),
        rate(store.read_per_s()),
        rate(store.written_per_s()),
        stats
            .commands_under_way
            .saturating_add(stats.launches_under_way)
            .to_string(),
        p50,
        p99,
        share(store.hits()),
        stats.rows_saved().to_string(),
        stats.failed_rows.to_string(),
        stats.recoveries.to_string(),
    ]
}

/// Returns a share of 1 in percent.
fn share(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:.0}%", 100.0 * share))
}

fn rate(bytes_per_s: f64) -> String {
    format!("{}B", short(bytes_per_s))
}

/// Returns a number with its unit behind it, as one word.
fn short(number: f64) -> String {
    units::count(number).replace(' ', "")
}

fn latency(us: Option<u64>) -> String {
    match us {
        None => "-".to_owned(),
        Some(us @ ..=9_999) => format!("{us}us"),
        Some(us @ ..=9_999_999) => format!("{}ms", us / 1000),
        Some(us) => format!("{}s", us / 1_000_000),
    }
}

/// Returns the width of each column.
pub fn widths(rows: &[[String; HEADINGS.len()]]) -> [usize; HEADINGS.len()] {
    std::array::from_fn(|column| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.max().unwrap_or(0).max(HEADINGS[column].len())
    })
}

/// Returns what moves the bytes of a store, in a line.
pub fn path_line(store: &StoreRates) -> String {
    let path = &store.now.path;
    visible::line(&format!("{}: {}; {}", path.device, path.path, path.why))
}

/// Returns the table as text, each store followed by its path.
pub fn text(interval: &SampleInterval) -> String {
    let rows: Vec<_> = interval.stores.iter().map(cells).collect();
    let widths = widths(&rows);
    let line = |cells: &[String; HEADINGS.len()]| {
        let cells = cells.iter().enumerate().map(|(column, cell)| {
            let width = widths[column];
            match TEXTS.contains(&column) {
                true => format!("{cell:<width$}"),
                false => format!("{cell:>width$}"),
            }
        });
        let line = cells.collect::<Vec<String>>().join("  ");
        line.trim_end().to_owned()
    };
    let mut lines = vec![line(&HEADINGS.map(str::to_owned))];
    for (store, row) in interval.stores.iter().zip(&rows) {
        lines.push(line(row));
        lines.push(format!("  {}", path_line(store)));
    }
    if interval.stores.is_empty() {
        lines = vec!["no program has a store open".to_owned()];
    }
    lines.extend(interval.unreadable.iter().map(|one| visible::line(one)));
    lines.join("\n")
}
