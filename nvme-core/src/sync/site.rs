//! Mutation tests of memory orders: an operation is weakened at one location of the code, and the checks must
//! fail.
//!
//! A location is a file and a line. `NVME_LOOM_WEAKEN=shared_queue.rs:12=Relaxed` runs the checks with that
//! operation weakened; `NVME_LOOM_SITES=FILE` collects the locations that were executed. `cargo xtask loom
//! --mutants` does both.

use super::Order;
use std::collections::BTreeSet;
use std::env;
use std::fmt::Write as _;
use std::panic::Location;
use std::string::String;
use std::sync::{LazyLock, Mutex, PoisonError};

/// File name and line of the operation to weaken, and the order that it keeps.
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

/// Returns the order for the caller's operation: `order`, unless that location is weakened.
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

/// True if one of these mutants, which leave out or move the caller's statement, is the one that runs. Only
/// `cargo xtask loom --mutants` writes calls of it, into a copy of the sources.
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

/// Appends a line to the list unless it is there already.
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
