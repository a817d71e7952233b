//! A progress bar on standard error, only when that is a terminal.

use crate::common::say;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Returns a bar over `bytes` bytes; invisible without a terminal.
pub fn bytes(bytes: u64, what: &'static str) -> ProgressBar {
    let template = "{msg:8} [{bar:40}] {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    styled(bytes, what, template)
}

/// Returns a bar over `milliseconds`; invisible without a terminal.
pub fn time(milliseconds: u64, what: &'static str) -> ProgressBar {
    styled(milliseconds, what, "{msg:12} [{bar:40}] {elapsed}")
}

/// Returns a bar over the 65,536 parts that a controller's progress is counted in.
pub fn percent(what: &'static str) -> ProgressBar {
    styled(65_536, what, "{msg:8} [{bar:40}] {percent} % {elapsed}")
}

/// Returns a bar over `count` pieces of work.
pub fn items(count: u64, what: &'static str) -> ProgressBar {
    let template = "{msg:8} [{bar:40}] {pos}/{len} {per_sec} {eta}";
    styled(count, what, template)
}

/// Returns the elapsed time, for a command that prints nothing until its end.
pub fn spinner(what: &'static str) -> ProgressBar {
    let bar = styled(0, what, "{spinner} {msg} {elapsed}");
    bar.enable_steady_tick(std::time::Duration::from_millis(100));
    bar
}

/// Returns a bar whose template is set before it is drawn for the first time.
fn styled(length: u64, what: &'static str, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template);
    let bar = ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::hidden());
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_message(what);
    if say::shows_progress() {
        bar.set_draw_target(ProgressDrawTarget::stderr());
    }
    bar
}
