//! `top`: what the stores of running programs do now, from the counters that each of them publishes.

mod metrics;
mod sample;
mod screen;
mod table;

use crate::common::{OutputForm, duration, output, stop_flag};
use clap::Args;
use nvme_host::{Error, Result};
use sample::{CounterSample, SampleInterval};
use std::io::{self, IsTerminal};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Longest pause without a look at the signal that ends the command.
const PAUSE: Duration = Duration::from_millis(20);

/// Show what the stores of running programs do: rates, latencies, recoveries, and what moves their bytes
///
/// Every open store publishes its counters unless NVME_GPU_COUNTERS is `off`. Root sees those of all users. Keys: q, the
/// arrows, and s for the order.
#[derive(Args)]
pub struct TopCommand {
    /// Print the table once, after one interval
    #[arg(long)]
    once: bool,
    /// Print all counters once for Prometheus, and no rates
    #[arg(long, conflicts_with_all = ["json", "once", "interval"])]
    metrics: bool,
    /// Time between two looks
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration)]
    interval: Duration,
    #[command(flatten)]
    form: OutputForm,
}

impl TopCommand {
    pub fn run(self) -> Result<()> {
        if self.metrics {
            return output::print(&metrics::exposition(&CounterSample::take()));
        }
        if self.interval.is_zero() {
            return Err(Error::usage("--interval is 0", "use 100ms or more"));
        }
        if self.once || self.form.json {
            let before = CounterSample::take();
            wait(self.interval)?;
            let interval = SampleInterval::between(&before, &CounterSample::take());
            return match self.form.json {
                true => output::json(&interval.to_json()),
                false => output::print(&table::text(&interval)),
            };
        }
        if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
            return Err(Error::usage(
                "the live table needs a terminal",
                "use --once, --json or --metrics",
            ));
        }
        screen::run(self.interval)
    }
}

/// # Errors
/// [`Error::Interrupted`].
fn wait(time: Duration) -> Result<()> {
    let begin = Instant::now();
    while begin.elapsed() < time {
        if stop_flag().load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        std::thread::sleep(PAUSE.min(time));
    }
    Ok(())
}
