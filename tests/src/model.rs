//! How a loom model is run: with its property and its bound said, and the executions counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// How much of a model is explored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Every execution.
    Exhaustive,
    /// Every execution in which threads are preempted at most so often, `NVME_LOOM_DEEPER` (default 0)
    /// times more where that is set. Waiting is no preemption.
    Preemptions(usize),
}

/// Explores `model`, which fails by panicking when `property` does not hold.
///
/// # Panics
/// With what the model says, after the property.
pub fn check(property: &str, bound: Bound, model: impl Fn() + Send + Sync + 'static) {
    let deeper = std::env::var("NVME_LOOM_DEEPER").ok();
    let deeper: usize = deeper.map_or(0, |text| {
        text.parse().expect("NVME_LOOM_DEEPER is a number")
    });
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 50_000;
    builder.preemption_bound = match bound {
        Bound::Exhaustive => None,
        Bound::Preemptions(most) => Some(most + deeper),
    };
    let said = match builder.preemption_bound {
        None => "exhaustive".to_string(),
        Some(most) => format!("up to {most} preemptions"),
    };
    let started = Instant::now();
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("model").to_string();
    let failing = Failing(format!("{name}: violated: {property}"));
    let count = Arc::new(AtomicU64::new(0));
    let counted = count.clone();
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    drop(failing);
    println!(
        "{name}: {property}: {said}, {} executions, {:.1} s",
        count.load(Ordering::Relaxed),
        started.elapsed().as_secs_f64()
    );
}

/// Says which property failed when the model panics.
struct Failing(String);

impl Drop for Failing {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0);
        }
    }
}
