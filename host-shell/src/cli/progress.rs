//! A progress bar on standard error, only when that is a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

/// A bar over `bytes` bytes; invisible without a terminal.
pub fn bytes(bytes: u64, what: &'static str) -> ProgressBar {
    let target = if std::io::stderr().is_terminal() {
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
