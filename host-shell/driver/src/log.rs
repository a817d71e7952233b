//! Events of the libraries for programs in other languages. Rust programs install a subscriber of `tracing`.
//!
//! The libraries report bring-ups, resets, aborted and slow commands with the target `nvme_gpu`; nothing is reported for
//! each command.

use crate::error::{Error, Result};
use std::fmt::{self, Write};
use std::sync::{PoisonError, RwLock};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};

/// Target of all events.
const TARGET: &str = "nvme_gpu";

/// Severity of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// Something does not work any more.
    Error,
    /// Something needed a recovery, or took long.
    Warning,
    /// Something began or ended as it should.
    Info,
}

impl LogLevel {
    fn filter(self) -> LevelFilter {
        match self {
            Self::Error => LevelFilter::ERROR,
            Self::Warning => LevelFilter::WARN,
            Self::Info => LevelFilter::INFO,
        }
    }

    fn of(level: Level) -> Self {
        match level {
            Level::ERROR => Self::Error,
            Level::WARN => Self::Warning,
            _ => Self::Info,
        }
    }
}

/// Function that receives the events: the severity, and a line of text.
pub type LogSink = Box<dyn Fn(LogLevel, &str) + Send + Sync>;

/// The function of the process, and the least severe events that it receives.
static SINK: RwLock<Option<(LogLevel, LogSink)>> = RwLock::new(None);

/// Passes the events of all threads to `sink`, from `level` on; `None` passes none. Replaces the earlier function, which
/// does not run any more when this returns.
///
/// The function is called with locks held: it must not use this library.
///
/// # Errors
/// [`Error::Usage`] if the program has a subscriber of `tracing`, which receives the events.
pub fn set_log(sink: Option<(LogLevel, LogSink)>) -> Result<()> {
    static IS_INSTALLED: RwLock<bool> = RwLock::new(false);
    let mut is_installed = IS_INSTALLED.write().unwrap_or_else(PoisonError::into_inner);
    if !*is_installed {
        if sink.is_none() {
            return Ok(());
        }
        tracing::subscriber::set_global_default(LogSubscriber).map_err(|_| {
            Error::usage(
                "the program has a subscriber of `tracing` already",
                "read the events with the target nvme_gpu there",
            )
        })?;
        *is_installed = true;
    }
    *SINK.write().unwrap_or_else(PoisonError::into_inner) = sink;
    tracing::callsite::rebuild_interest_cache();
    Ok(())
}

fn level() -> LevelFilter {
    let sink = SINK.read().unwrap_or_else(PoisonError::into_inner);
    sink.as_ref()
        .map_or(LevelFilter::OFF, |(level, _)| level.filter())
}

/// Passes events, and no spans, to [`SINK`].
struct LogSubscriber;

impl Subscriber for LogSubscriber {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        match self.enabled(metadata) {
            true => Interest::always(),
            false => Interest::never(),
        }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && metadata.target() == TARGET && *metadata.level() <= level()
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(level())
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = EventLine::default();
        event.record(&mut line);
        let text = match line.fields.is_empty() {
            true => line.message,
            false => format!("{} ({})", line.message, line.fields),
        };
        let sink = SINK.read().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, sink)) = &*sink {
            sink(LogLevel::of(*event.metadata().level()), &text);
        }
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The text of an event: its message, and its fields as `name=value`.
#[derive(Default)]
struct EventLine {
    message: String,
    fields: String,
}

impl EventLine {
    fn add(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => self.message.write_fmt(value),
            name => {
                let comma = if self.fields.is_empty() { "" } else { ", " };
                write!(self.fields, "{comma}{name}={value}")
            }
        };
    }
}

impl Visit for EventLine {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, format_args!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, format_args!("{value}"));
    }
}
