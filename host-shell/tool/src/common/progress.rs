//! A progress bar on standard error, only when that is a terminal.

use crate::common::say;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar over `bytes` bytes; invisible without a terminal.
pub fn bytes(bytes: u64, what: &'static str) -> ProgressBar {
    let target = if say::shows_progress() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let bar = ProgressBar::with_draw_target(Some(bytes), target);
    let style = ProgressStyle::with_template(
        "{msg:8} [{bar:40}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
    );
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_message(what);
    bar
}

/// Makes `bar` count milliseconds instead of bytes.
pub fn as_time(bar: &ProgressBar) {
    let style = ProgressStyle::with_template("{msg:12} [{bar:40}] {elapsed}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
}

/// A bar over the 65,536 parts that a controller's progress is counted in.
pub fn percent(what: &'static str) -> ProgressBar {
    let bar = bytes(65_536, what);
    let style = ProgressStyle::with_template("{msg:8} [{bar:40}] {percent} % {elapsed}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// A bar over `count` pieces of work.
pub fn items(count: u64, what: &'static str) -> ProgressBar {
    let bar = bytes(count, what);
    let style = ProgressStyle::with_template("{msg:8} [{bar:40}] {pos}/{len} {per_sec} {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// The time that has passed, for a command that says nothing until its end.
pub fn spinner(what: &'static str) -> ProgressBar {
    let bar = bytes(0, what);
    let style = ProgressStyle::with_template("{spinner} {msg} {elapsed}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
    bar.enable_steady_tick(std::time::Duration::from_millis(100));
    bar
}
