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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::figure;
    use indicatif::TermLike;
    use ratatui::buffer::Buffer;
    use std::io;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    /// A terminal of one line that keeps what was drawn last.
    #[derive(Clone, Debug, Default)]
    struct OneLine(Arc<Mutex<String>>);

    impl TermLike for OneLine {
        fn width(&self) -> u16 {
            80
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(text)
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            self.0.lock().unwrap().push_str(text);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            self.0.lock().unwrap().clear();
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_figure_is_what_a_bar_draws() {
        let terminal = OneLine::default();
        let bar = time(30_000, "measuring").with_elapsed(Duration::from_millis(12_100));
        bar.set_draw_target(ProgressDrawTarget::term_like(Box::new(terminal.clone())));
        bar.set_position(12_100);
        bar.force_draw();
        let line = terminal.0.lock().unwrap().trim_end().to_owned();
        assert!(line.ends_with("] 12s"), "{line}");
        let shown = Buffer::with_lines([
            "$ nvme-gpu bench --device sim:null --runtime 30s".to_owned(),
            line,
        ]);
        figure::check("progress", "The progress bar of nvme-gpu bench", &shown);
        bar.abandon();
    }
}
