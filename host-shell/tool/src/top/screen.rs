//! The live table at a terminal.

use super::sample::{CounterSample, SampleInterval, StoreRates};
use super::table::{self, HEADINGS, TEXTS, TableOrder};
use crate::common::stop_flag;
use nvme_host::{Error, Result};
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Alignment, Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Text;
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState, Wrap};
use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Longest wait for a key before the signal that ends the command is looked at.
const PAUSE: Duration = Duration::from_millis(100);
/// Lines of the texts below the table.
const PATH_LINES: u16 = 4;

/// What the screen shows.
#[derive(Default)]
struct ScreenState {
    stores: Vec<StoreRates>,
    unreadable: Vec<String>,
    order: TableOrder,
    /// Process and store that is chosen.
    chosen: Option<(u32, u64)>,
}

/// Shows the table until the user ends it.
///
/// # Errors
/// [`Error::File`] when the terminal cannot be used.
pub fn run(interval: Duration) -> Result<()> {
    let mut terminal = ratatui::try_init().map_err(of_terminal)?;
    let ended = show(&mut terminal, interval);
    let restored = ratatui::try_restore();
    ended.and(restored).map_err(of_terminal)
}

fn of_terminal(error: io::Error) -> Error {
    Error::file("use", "the terminal")(error)
}

fn show(terminal: &mut ratatui::DefaultTerminal, interval: Duration) -> io::Result<()> {
    let mut state = ScreenState::default();
    let mut before = CounterSample::take();
    state.take(SampleInterval::between(&before, &before));
    let mut next = Instant::now() + interval;
    loop {
        terminal.draw(|frame| state.draw(frame))?;
        loop {
            if stop_flag().load(Ordering::Relaxed) {
                return Ok(());
            }
            let left = next.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let now = CounterSample::take();
                state.take(SampleInterval::between(&before, &now));
                (before, next) = (now, Instant::now() + interval);
                break;
            }
            if !event::poll(left.min(PAUSE))? {
                continue;
            }
            match event::read()? {
                Event::Key(key) if key.kind != KeyEventKind::Release => {
                    if !state.press(key) {
                        return Ok(());
                    }
                    break;
                }
                Event::Resize(..) => break,
                _ => {}
            }
        }
    }
}

impl ScreenState {
    fn take(&mut self, interval: SampleInterval) {
        self.stores = interval.stores;
        self.unreadable = interval.unreadable;
        self.order.sort(&mut self.stores);
        if self.index().is_none() {
            self.choose(0);
        }
    }

    fn index(&self) -> Option<usize> {
        let chosen = self.chosen?;
        let mut stores = self.stores.iter();
        stores.position(|one| (one.now.pid, one.now.store) == chosen)
    }

    fn choose(&mut self, index: usize) {
        let last = self.stores.len().saturating_sub(1);
        let store = self.stores.get(index.min(last));
        self.chosen = store.map(|one| (one.now.pid, one.now.store));
    }

    /// Does what a key asks for; returns false if it ends the command.
    fn press(&mut self, key: KeyEvent) -> bool {
        let index = self.index().unwrap_or(0);
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
            KeyCode::Up => self.choose(index.saturating_sub(1)),
            KeyCode::Down => self.choose(index + 1),
            KeyCode::Char('s') => {
                self.order = self.order.next();
                self.order.sort(&mut self.stores);
            }
            _ => {}
        }
        true
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let [head, body, below, keys] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Min(2),
            Constraint::Length(PATH_LINES),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        let title = format!(
            "nvme-gpu top: {} stores, by {}",
            self.stores.len(),
            self.order.name()
        );
        frame.render_widget(Paragraph::new(title), head);
        let rows: Vec<_> = self.stores.iter().map(table::cells).collect();
        let widths = table::widths(&rows).map(|width| Constraint::Length(width as u16));
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let reversed = Style::new().add_modifier(Modifier::REVERSED);
        let shown = Table::new(rows.into_iter().map(row), widths)
            .header(row(HEADINGS.map(str::to_owned)).style(bold))
            .column_spacing(2)
            .row_highlight_style(reversed);
        let mut place = TableState::new().with_selected(self.index());
        frame.render_stateful_widget(shown, body, &mut place);
        let chosen = self.index().and_then(|index| self.stores.get(index));
        let mut texts: Vec<String> = chosen.map(table::path_line).into_iter().collect();
        texts.extend_from_slice(&self.unreadable);
        if texts.is_empty() {
            texts.push("no program has a store open".to_owned());
        }
        let texts = Paragraph::new(texts.join("\n")).wrap(Wrap { trim: true });
        frame.render_widget(texts, below);
        frame.render_widget(Paragraph::new("q end  up/down choose  s order"), keys);
    }
}

fn row(cells: [String; HEADINGS.len()]) -> Row<'static> {
    Row::new(cells.into_iter().enumerate().map(|(column, cell)| {
        let alignment = match TEXTS.contains(&column) {
            true => Alignment::Left,
            false => Alignment::Right,
        };
        Cell::from(Text::from(cell).alignment(alignment))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::figure;
    use nvme_host::store::{PublishedPath, PublishedStore, StoreStats};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::buffer::Buffer;

    fn store(pid: u32, rows: u64, latency_range: usize) -> StoreRates {
        let mut since = StoreStats {
            rows_read: 2 * rows,
            bytes_read: 2_000_000,
            ..StoreStats::default()
        };
        since.latency_us[latency_range] = 10;
        let stats = StoreStats {
            commands_under_way: 3,
            launches_under_way: 1,
            duplicates_saved: 7,
            unique_asked: 3,
            unique_read: 2,
            cache_asked: 100,
            cache_hits: 25,
            failed_rows: 5,
            recoveries: 6,
            ..since
        };
        let now = PublishedStore {
            pid,
            store: 0,
            opened_ms: 1,
            path: PublishedPath {
                device: format!("sim:{pid}"),
                data: "gpu".to_owned(),
                tier: Some(1),
                path: "queues".to_owned(),
                why: format!("reason of {pid}\u{1b}"),
            },
            stats,
        };
        StoreRates::new(format!("program-{pid}"), now, since, 2.0)
    }

    fn state() -> ScreenState {
        let mut state = ScreenState::default();
        state.take(SampleInterval {
            stores: vec![store(7, 100, 3), store(9, 1000, 11)],
            unreadable: vec!["a page is of version 2".to_owned()],
        });
        state
    }

    fn screen(state: &ScreenState, width: u16, height: u16) -> Buffer {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| state.draw(frame)).unwrap();
        terminal.backend().buffer().clone()
    }

    fn drawn(state: &ScreenState) -> Vec<String> {
        let buffer = screen(state, 120, 12);
        let lines = buffer.content().chunks(120);
        lines
            .map(|line| line.iter().map(|cell| cell.symbol()).collect::<String>())
            .map(|line| line.trim_end().to_owned())
            .collect()
    }

    /// Three programs as a user may see them, with the second one chosen.
    #[test]
    fn the_figure_is_what_the_screen_draws() {
        let one = |pid: u32, program: &str, path: PublishedPath, since: StoreStats| {
            let stats = StoreStats {
                recoveries: u64::from(pid == 4811),
                ..since
            };
            let now = PublishedStore {
                pid,
                store: 0,
                opened_ms: 1,
                path,
                stats,
            };
            StoreRates::new(program.to_owned(), now, since, 1.0)
        };
        let path = |device: &str, tier: Option<u32>, path: &str, why: &str| PublishedPath {
            device: device.to_owned(),
            data: if tier.is_some() { "gpu" } else { "host" }.to_owned(),
            tier,
            path: path.to_owned(),
            why: why.to_owned(),
        };
        let counts = |rows: u64, row_bytes: u64, ranges: &[(usize, u64)]| {
            let mut stats = StoreStats {
                rows_read: rows,
                bytes_read: rows * row_bytes,
                ..StoreStats::default()
            };
            for (range, count) in ranges {
                stats.latency_us[*range] = *count;
            }
            stats
        };
        let training = StoreStats {
            bytes_written: 61_000_000,
            commands_under_way: 32,
            duplicates_saved: 51_200,
            ..counts(238_000, 512, &[(7, 990), (9, 20)])
        };
        let serving = StoreStats {
            cache_asked: 1_840_000,
            cache_hits: 1_545_600,
            unique_asked: 98_304,
            unique_read: 61_440,
            launches_under_way: 2,
            ..counts(1_840_000, 256, &[])
        };
        let copying = StoreStats {
            commands_under_way: 8,
            ..counts(5_200, 131_072, &[(8, 900), (11, 100)])
        };
        let queues = "32 queues of 1023 commands, submitted by the GPU";
        let mut state = ScreenState::default();
        state.take(SampleInterval {
            stores: vec![
                one(
                    4811,
                    "train.py",
                    path(
                        "vfio:0000:41:00.0",
                        None,
                        "8 queues of this process",
                        "no GPU was asked for",
                    ),
                    training,
                ),
                one(
                    5120,
                    "serve.py",
                    path(
                        "kmod:0000:42:00.0",
                        Some(2),
                        queues,
                        "data lie in GPU memory",
                    ),
                    serving,
                ),
                one(
                    6033,
                    "nvme-gpu",
                    path(
                        "file:/data/table",
                        None,
                        "io_uring of this process",
                        "a file is read by the CPU",
                    ),
                    copying,
                ),
            ],
            unreadable: Vec::new(),
        });
        press(&mut state, KeyCode::Down);
        let title =
            "nvme-gpu top: three programs, their rates and latencies, and what moves their bytes";
        figure::check("top", title, &screen(&state, 128, 11));
    }

    fn press(state: &mut ScreenState, code: KeyCode) -> bool {
        state.press(KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn the_screen_shows_each_store_and_the_path_of_the_chosen_one() {
        let mut state = state();
        let lines = drawn(&state);
        assert_eq!(lines[0], "nvme-gpu top: 2 stores, by process");
        let words =
            |line: &str| -> Vec<String> { line.split_whitespace().map(str::to_owned).collect() };
        assert_eq!(words(&lines[1]), HEADINGS);
        assert_eq!(
            words(&lines[2]),
            [
                "7",
                "program-7",
                "sim:7",
                "1",
                "100",
                "1.00MB",
                "0B",
                "4",
                "8us",
                "8us",
                "25%",
                "8",
                "5",
                "6"
            ]
        );
        let below = lines[7..].join(" ");
        assert!(
            below.contains("sim:7: queues; reason of 7\\u{1b}"),
            "{below}"
        );
        assert!(below.contains("version 2") && below.contains("q end"));
        assert!(press(&mut state, KeyCode::Down) && press(&mut state, KeyCode::Down));
        assert!(drawn(&state)[7..].join(" ").contains("reason of 9"));
        assert!(press(&mut state, KeyCode::Up));
        assert!(drawn(&state)[7..].join(" ").contains("reason of 7"));
    }

    #[test]
    fn the_order_changes_and_the_chosen_store_stays() {
        let mut state = state();
        press(&mut state, KeyCode::Char('s'));
        let lines = drawn(&state);
        assert!(
            lines[0].ends_with("by rows/s") && lines[2].starts_with("  9"),
            "{lines:?}"
        );
        assert!(lines[7..].join(" ").contains("reason of 7"));
        // A store that is gone cannot stay chosen.
        state.take(SampleInterval {
            stores: vec![store(9, 1, 1)],
            unreadable: Vec::new(),
        });
        assert!(drawn(&state)[7..].join(" ").contains("reason of 9"));
        state.take(SampleInterval {
            stores: Vec::new(),
            unreadable: Vec::new(),
        });
        assert!(drawn(&state)[7..].join(" ").contains("no program"));
        assert!(press(&mut state, KeyCode::Down) && press(&mut state, KeyCode::Up));
    }

    #[test]
    fn keys_end_the_command() {
        let mut state = state();
        assert!(!press(&mut state, KeyCode::Char('q')) && !press(&mut state, KeyCode::Esc));
        assert!(press(&mut state, KeyCode::Char('c')));
        let stop = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert!(!state.press(stop));
    }
}
