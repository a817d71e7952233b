//! Events that a queue of the driver records about itself (GPU traces, `--trace FILE`) as input.
//! The checked rules are that each command is submitted once before it ends, and ends once.
//!
//! The driver writes these lines about itself, so that rings, doorbells and memory, which only an
//! outside observer can see, are not checked.

use crate::finding::{Finding, Rule};
use alloc::collections::BTreeSet;
use alloc::vec::Vec;

/// Reads a trace line by line, in the order of time.
#[derive(Debug, Default)]
pub struct DriverJournal {
    in_flight: BTreeSet<(u16, u16)>,
    /// Commands in flight whose waiter timed out: their completions may be missing from the trace.
    expired: BTreeSet<(u16, u16)>,
    /// Commands whose submission is in the trace.
    known: BTreeSet<(u16, u16)>,
    /// The trace has lost its oldest events, so a command may end whose submission is missing.
    cut: bool,
    commands: u64,
    findings: Vec<Finding>,
}

impl DriverJournal {
    /// Takes one line. Lines that are no events are skipped.
    pub fn line(&mut self, line: &str) {
        if line.contains("older events were replaced") {
            self.cut = true;
            return;
        }
        let mut words = line
            .split_whitespace()
            .skip_while(|word| *word != "queue")
            .skip(1);
        let qid = words.next().and_then(|word| word.parse().ok());
        let named = words.next() == Some("command");
        let cid = words.next().and_then(|word| word.strip_prefix("0x"));
        let cid = cid.and_then(|word| u16::from_str_radix(word, 16).ok());
        if let (Some(qid), true, Some(cid), Some(what)) = (qid, named, cid, words.next()) {
            self.event(qid, cid, what.trim_end_matches(':'));
        }
    }

    fn event(&mut self, qid: u16, cid: u16, what: &str) {
        let key = (qid, cid);
        let rule = match what {
            "submitted" => {
                self.commands += 1;
                self.known.insert(key);
                let unwatched = self.expired.remove(&key);
                let reused = !self.in_flight.insert(key) && !unwatched;
                reused.then_some(Rule::CidReused)
            }
            "expired" => {
                self.expired.insert(key);
                None
            }
            "completed" | "reclaimed" => {
                let was = self.in_flight.remove(&key);
                self.expired.remove(&key);
                let judged = self.known.contains(&key) || !self.cut;
                (!was && judged).then_some(Rule::UnknownCommand)
            }
            _ => None,
        };
        if let Some(rule) = rule {
            self.findings.push(Finding {
                rule,
                qid,
                cid: Some(cid),
                value: u64::from(cid),
                commands: self.commands,
            });
        }
    }

    /// Returns the findings.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// Returns the number of commands submitted.
    pub fn commands(&self) -> u64 {
        self.commands
    }

    /// Returns the number of commands that have not ended.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(lines: &[&str]) -> DriverJournal {
        let mut journal = DriverJournal::default();
        lines.iter().for_each(|line| journal.line(line));
        journal
    }

    const SUBMITTED: &str = "0 ns  #0  queue 1 command 0x1002 submitted: opcode 0x02, namespace 1";
    const EXPIRED: &str = "9 ns #0 queue 1 command 0x1002 expired at 9 ns";
    const COMPLETED: &str = "9 ns  #0  queue 1 command 0x1002 completed: success, SQ head 7";

    #[test]
    fn a_command_ends_once() {
        let journal = read(&[SUBMITTED, EXPIRED, COMPLETED, SUBMITTED]);
        assert_eq!(
            (journal.findings(), journal.commands(), journal.in_flight()),
            (&[][..], 2, 1)
        );
        let rules = |lines: &[&str]| {
            read(lines)
                .findings()
                .iter()
                .map(|one| one.rule)
                .collect::<Vec<_>>()
        };
        assert_eq!(rules(&[SUBMITTED, SUBMITTED]), [Rule::CidReused]);
        assert_eq!(rules(&[SUBMITTED, EXPIRED, SUBMITTED]), []);
        assert_eq!(
            rules(&[SUBMITTED, EXPIRED, SUBMITTED, SUBMITTED]),
            [Rule::CidReused]
        );
        assert_eq!(
            rules(&[SUBMITTED, EXPIRED, COMPLETED, SUBMITTED, SUBMITTED]),
            [Rule::CidReused]
        );
        assert_eq!(
            rules(&[SUBMITTED, COMPLETED, COMPLETED]),
            [Rule::UnknownCommand]
        );
        assert_eq!(
            rules(&["3 older events were replaced", COMPLETED, "nothing"]),
            []
        );
    }
}
