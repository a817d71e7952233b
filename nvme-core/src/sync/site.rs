//! The places of operations that order, to take their order away one at a time.
//!
//! An operation that orders is known by its place in the code. `NVME_LOOM_WEAKEN=shared_queue.rs:12=Relaxed`
//! runs what checks the order with that place weakened, to see that it fails; `NVME_LOOM_SITES=FILE`
//! collects the places that were met. `cargo xtask loom --mutants` does both.

use super::Order;
use std::collections::BTreeSet;
use std::env;
use std::fmt::Write as _;
use std::panic::Location;
use std::string::String;
use std::sync::{LazyLock, Mutex, PoisonError};

/// File name and line of the place to weaken, and the order that remains there.
static WEAKENED: LazyLock<Option<(String, u32, Order)>> = LazyLock::new(|| {
    let given = env::var("NVME_LOOM_WEAKEN").ok()?;
    let (file, rest) = given.split_once(':')?;
    let (line, order) = rest.split_once('=')?;
    let order = match order {
        "Acquire" => Order::Acquire,
        "Release" => Order::Release,
        _ => Order::Relaxed,
    };
    Some((file.into(), line.parse().ok()?, order))
});

static SITES: LazyLock<Option<String>> = LazyLock::new(|| env::var("NVME_LOOM_SITES").ok());

/// The order to use at the caller's place: `order`, unless that place is weakened.
#[track_caller]
pub fn at_site(order: Order) -> Order {
    if order == Order::Relaxed {
        return order;
    }
    let place = Location::caller();
    let file = place.file().rsplit('/').next().unwrap_or_default();
    if let Some(path) = &*SITES {
        note(path, file, place.line(), order);
    }
    match &*WEAKENED {
        Some((name, line, weak)) if *line == place.line() && name == file => *weak,
        _ => order,
    }
}

static STATEMENT: LazyLock<Option<u32>> =
    LazyLock::new(|| env::var("NVME_LOOM_STATEMENT").ok()?.parse().ok());

/// Whether the statement at the caller's place is left out or moved in one of these mutants, and that one runs.
/// Only `cargo xtask loom --mutants` writes calls of it, into a copy of the sources.
pub fn mutated(numbers: &[u32]) -> bool {
    if let Some(path) = &*SITES {
        for number in numbers {
            append(path, format!("statement {number}\n"));
        }
    }
    STATEMENT.is_some_and(|number| numbers.contains(&number))
}

fn note(path: &str, file: &str, line: u32, order: Order) {
    let mut text = String::new();
    let _ = writeln!(text, "{file}:{line}={order:?}");
    append(path, text);
}

/// Appends a line to the list, once.
fn append(path: &str, text: String) {
    static SEEN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    if seen.insert(text.clone()) {
        let file = std::fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(path);
        let written =
            file.and_then(|mut file| std::io::Write::write_all(&mut file, text.as_bytes()));
        assert!(written.is_ok(), "cannot write to {path}");
    }
}
