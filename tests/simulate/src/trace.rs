//! The events of a run: always as a hash, and as lines on request.

use std::fmt;
use std::hash::{Hash, Hasher};

/// Something that happened.
#[derive(Clone, Copy, Debug, Hash)]
pub enum Event {
    /// A command was placed.
    Placed {
        queue: usize,
        id: u32,
        cid: u16,
        lba: u32,
    },
    /// A queue took no command: it is `full`, or it refuses commands.
    NotPlaced { queue: usize, full: bool },
    /// The controller worked on this many commands.
    Worked { commands: u32 },
    /// A fault fired in a state.
    Fired { kind: u8, state: u8 },
    /// A command ended with this status, or `FFFFh` if it was aborted.
    Ended { id: u32, status: u16 },
    /// A queue was posted nonsense.
    Nonsense { queue: usize },
    /// A command's deadline has passed.
    Expired { id: u32 },
    /// The host does something else now.
    Mode { name: &'static str },
    /// A read found this version.
    Found { lba: u32, version: u32 },
    /// An event of a gather: what happened, the number of the gather, and details.
    Rows {
        what: &'static str,
        number: u32,
        code: i32,
    },
}

/// The trace of a run.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    hash: Mix,
    lines: Option<Vec<String>>,
}

impl Trace {
    /// Returns an empty trace, with lines or without.
    pub fn new(lines: bool) -> Self {
        Self {
            hash: Mix::default(),
            lines: lines.then(Vec::new),
        }
    }

    /// Adds an event; `more` adds details for a reader.
    pub fn add<D: fmt::Display>(&mut self, now_ns: u64, event: Event, more: impl FnOnce() -> D) {
        now_ns.hash(&mut self.hash);
        event.hash(&mut self.hash);
        if let Some(lines) = &mut self.lines {
            let time = format!("{}.{:06} ms", now_ns / 1_000_000, now_ns % 1_000_000);
            lines.push(
                format!("{time:>16}  {event:?} {}", more())
                    .trim_end()
                    .to_owned(),
            );
        }
    }

    /// Returns a hash of everything that happened.
    pub fn hash(&self) -> u64 {
        self.hash.finish()
    }

    /// Returns the lines, when they were wanted.
    pub fn lines(&self) -> &[String] {
        self.lines.as_deref().unwrap_or_default()
    }
}

/// Multiply and rotate: fast, and the same on every machine.
#[derive(Clone, Debug, Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes
            .iter()
            .for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(23) ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    fn write_u16(&mut self, value: u16) {
        self.write_u64(u64::from(value));
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(u64::from(value));
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }

    fn write_isize(&mut self, value: isize) {
        self.write_u64(value as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_tells_order_and_time_apart() {
        let run = |events: &[(u64, u32)]| {
            let mut trace = Trace::new(true);
            for (now, id) in events {
                trace.add(*now, Event::Expired { id: *id }, || "");
            }
            (trace.hash(), trace.lines().len())
        };
        assert_eq!(run(&[(1, 2), (3, 4)]), run(&[(1, 2), (3, 4)]));
        assert_ne!(run(&[(1, 2), (3, 4)]), run(&[(1, 4), (3, 2)]));
        assert_ne!(run(&[(1, 2)]), run(&[(2, 2)]));
        assert_eq!(run(&[(1, 2)]).1, 1);
    }
}
