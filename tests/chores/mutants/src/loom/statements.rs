//! Mutants of the order of statements: each statement that stores, rings, locks or fences, left out or moved past
//! its neighbour, or out of the condition around it.
//!
//! All mutants of a file are compiled at once: `crate::sync::mutated(7)` is true if `NVME_LOOM_STATEMENT` is 7. The
//! sources are expected as rustfmt formats them.

use std::collections::{BTreeMap, BTreeSet};

/// Sources of the protocols.
pub const FILES: [&str; 11] = [
    "nvme-core/src/collective.rs",
    "nvme-core/src/collective/reap.rs",
    "nvme-core/src/command.rs",
    "nvme-core/src/cq.rs",
    "nvme-core/src/mem.rs",
    "nvme-core/src/queue_state/ended.rs",
    "nvme-core/src/shared_queue.rs",
    "nvme-core/src/shared_queue/drain.rs",
    "nvme-core/src/shared_queue/ring.rs",
    "nvme-core/src/sq.rs",
    "nvme-core/src/trace.rs",
];

/// Calls that order memory.
const FENCES: [&str; 6] = [
    "fence(",
    ".sync()",
    ".publish()",
    "doorbell.ring(",
    "self.wait_until_entry_reusable(",
    "self.count_read(",
];
/// Calls that other threads wait for or act on.
const SIGNALS: [&str; 15] = [
    "ring_fenced(",
    "store_mmio(",
    ".sequence(",
    ".free_ring(",
    "rung().store(",
    ".fetch_",
    ".swap(",
    ".compare_exchange(",
    "cells.set_if(",
    "free_if(",
    "self.free(",
    "refuse(",
    "self.published = ",
    "self.rung = ",
    "take_out_of_flight",
];
/// Calls that write the data which signals announce.
const DATA: [&str; 6] = [
    ".store(",
    "write_entries(",
    ".write(",
    ".write_word(",
    "cells.set(",
    ".return_slots(",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Data,
    Signal,
    Fence,
}

/// One mutant: its number in this run, and a key that stays the same from version to version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mutant {
    pub number: u32,
    pub key: String,
}

#[derive(Debug)]
struct Statement {
    first: usize,
    last: usize,
    text: String,
    blocks: Vec<Vec<Statement>>,
}

impl Statement {
    /// Returns what the statement does, itself or in its blocks.
    fn kind(&self) -> Option<Kind> {
        let has = |of: &[&str]| of.iter().any(|word| self.text.contains(word));
        if has(&FENCES) {
            Some(Kind::Fence)
        } else if has(&SIGNALS) {
            Some(Kind::Signal)
        } else if has(&DATA) {
            Some(Kind::Data)
        } else {
            None
        }
    }

    /// Returns whether the statement can be left out or moved.
    fn movable(&self) -> bool {
        let bound = [
            "let ", "return", "break", "continue", "const ", "use ", "//",
        ];
        self.blocks.is_empty()
            && self.text.ends_with(';')
            && !bound.iter().any(|word| self.text.starts_with(word))
    }

    fn short(&self) -> String {
        let mut text: String = self.text.chars().take(70).collect();
        if text.len() < self.text.len() {
            text += "..";
        }
        text
    }
}

/// Returns the source with all its mutants, numbered from `next` on; mutants in `without` are left out.
pub fn mutate(
    file: &str,
    source: &str,
    next: &mut u32,
    without: &BTreeSet<String>,
) -> (String, Vec<Mutant>) {
    let lines: Vec<&str> = source.lines().collect();
    let end = lines
        .iter()
        .position(|line| line.starts_with("#[cfg(all(test"));
    let mut edits = Edits {
        file: file.trim_start_matches("nvme-core/src/"),
        function: "",
        next,
        without,
        mutants: Vec::new(),
        keys: BTreeMap::new(),
        inserted: BTreeMap::new(),
        wrapped: BTreeMap::new(),
    };
    let mut at = 0;
    while at < end.unwrap_or(lines.len()) {
        let line = lines[at].trim_start();
        if let Some((_, rest)) = line.split_once("fn ").filter(|_| is_function(line)) {
            edits.function = rest.split(['(', '<']).next().unwrap_or("");
            // The line on which its body opens.
            let opens = (at..lines.len()).find(|at| lines[*at].ends_with(['{', ';', '}']));
            let opens = opens.unwrap_or(at);
            if lines[opens].ends_with('{') {
                let closes = closing(&lines, opens);
                let block = statements(&lines, opens + 1, closes);
                edits.block(&block, None);
                at = closes;
            }
        }
        at += 1;
    }
    (edits.render(&lines), edits.mutants)
}

fn is_function(line: &str) -> bool {
    [
        "fn ",
        "pub fn ",
        "pub(crate) fn ",
        "pub(super) fn ",
        "unsafe fn ",
    ]
    .iter()
    .any(|begin| line.starts_with(begin))
}

struct Edits<'a> {
    file: &'a str,
    function: &'a str,
    next: &'a mut u32,
    without: &'a BTreeSet<String>,
    mutants: Vec<Mutant>,
    /// Number of times that each key occurred: from the second time on it gets a number.
    keys: BTreeMap<String, u32>,
    /// Text before the line of this index.
    inserted: BTreeMap<usize, Vec<String>>,
    /// The last line, the text, and the mutants that remove it, by first line.
    wrapped: BTreeMap<usize, (usize, String, Vec<u32>)>,
}

impl Edits<'_> {
    /// Adds the mutants of a block's statements. `outer` has the statements around the block, and the statement whose
    /// condition has this block alone.
    fn block(&mut self, block: &[Statement], outer: Option<(&[Statement], usize)>) {
        for (at, statement) in block.iter().enumerate() {
            let conditional = statement.text.starts_with("if ") && statement.blocks.len() == 1;
            for inner in &statement.blocks {
                self.block(inner, conditional.then_some((block, at)));
            }
            let Some(kind) = statement.kind().filter(|_| statement.movable()) else {
                continue;
            };
            // Leaving out a fence is a mutant of its order, so it is not tried again here.
            if kind != Kind::Fence {
                self.add(statement, "left out".to_string(), None);
            }
            self.past(statement, kind, block, at, "");
            if let Some((around, at)) = outer {
                let condition = format!(", without `{}`", short_condition(&around[at].text));
                self.add(
                    statement,
                    format!("after its block{condition}"),
                    Some(around[at].last + 1),
                );
                self.past(statement, kind, around, at, &condition);
            }
        }
    }

    /// Moves the statement past the neighbours of `block[at]` that matter.
    fn past(
        &mut self,
        statement: &Statement,
        kind: Kind,
        block: &[Statement],
        at: usize,
        more: &str,
    ) {
        let matters = |other: &&Statement| {
            other
                .kind()
                .is_some_and(|other| other.max(kind) > Kind::Data)
        };
        if let Some(other) = block[..at].iter().rev().find(matters) {
            self.add(
                statement,
                format!("before `{}`{more}", other.short()),
                Some(other.first),
            );
        }
        if let Some(other) = block[at + 1..].iter().find(matters) {
            self.add(
                statement,
                format!("after `{}`{more}", other.short()),
                Some(other.last + 1),
            );
        }
    }

    fn add(&mut self, statement: &Statement, what: String, to: Option<usize>) {
        let mut key = format!(
            "{} {}: `{}` {what}",
            self.file,
            self.function,
            statement.short()
        );
        let count = self.keys.entry(key.clone()).or_insert(0);
        *count += 1;
        if *count > 1 {
            key += &format!(" ({count})");
        }
        if self.without.contains(&key) {
            return;
        }
        let number = *self.next;
        *self.next += 1;
        if let Some(to) = to {
            let moved = format!(
                "if crate::sync::mutated(&[{number}]) {{ {} }}",
                statement.text
            );
            self.inserted.entry(to).or_default().push(moved);
        }
        let entry = (statement.last, statement.text.clone(), Vec::new());
        let wrapped = self.wrapped.entry(statement.first).or_insert(entry);
        wrapped.2.push(number);
        self.mutants.push(Mutant { number, key });
    }

    fn render(&self, lines: &[&str]) -> String {
        let mut text = String::new();
        let mut at = 0;
        while at < lines.len() {
            for inserted in self.inserted.get(&at).into_iter().flatten() {
                text += &format!("{inserted}\n");
            }
            if let Some((last, statement, numbers)) = self.wrapped.get(&at) {
                text += &format!("if !crate::sync::mutated(&{numbers:?}) {{ {statement} }}\n");
                at = last + 1;
                continue;
            }
            text += &format!("{}\n", lines[at]);
            at += 1;
        }
        text
    }
}

fn short_condition(text: &str) -> &str {
    text.split(" {").next().unwrap_or("")
}

/// Returns the numbers of the mutants in a line that the compiler refuses.
pub fn numbers_in(line: &str) -> Vec<u32> {
    let mut found = Vec::new();
    for part in line.split("mutated(&[").skip(1) {
        let list = part.split(']').next().unwrap_or("");
        found.extend(
            list.split(',')
                .filter_map(|number| number.trim().parse::<u32>().ok()),
        );
    }
    found
}

/// Returns the statements of a block whose lines are `from..to`.
fn statements(lines: &[&str], from: usize, to: usize) -> Vec<Statement> {
    let mut found = Vec::new();
    let mut at = from;
    while at < to {
        let line = lines[at].trim();
        if line.is_empty() || line.starts_with("//") || line.starts_with("#[") {
            at += 1;
            continue;
        }
        let first = at;
        let mut depth = 0;
        loop {
            depth += depth_of(lines[at]);
            let line = code_of(lines[at]);
            let next = lines.get(at + 1).map_or("", |line| line.trim());
            let goes_on =
                next.starts_with(['.', '?', ')', '&', '|', '=', '+']) || next.starts_with("else");
            if depth <= 0 && line.ends_with([';', '}', ',']) && !goes_on || at + 1 >= to {
                break;
            }
            at += 1;
        }
        let mut blocks = Vec::new();
        let mut opens = first;
        while opens <= at {
            if !code_of(lines[opens]).ends_with('{') {
                opens += 1;
                continue;
            }
            let closes = closing(lines, opens).min(at);
            blocks.push(statements(lines, opens + 1, closes));
            opens = closes.max(opens + 1);
        }
        let text = lines[first..=at].iter().map(|line| code_of(line));
        let text: Vec<&str> = text.filter(|line| !line.is_empty()).collect();
        found.push(Statement {
            first,
            last: at,
            // The key joins the lines that rustfmt breaks, so that the statement has the same key however it is broken.
            text: text.join(" ").replace(" .", ".").replace("( ", "("),
            blocks,
        });
        at += 1;
    }
    found
}

/// Returns the line on which what `opens` ends with is closed.
fn closing(lines: &[&str], opens: usize) -> usize {
    let indent = |line: &str| line.len() - line.trim_start().len();
    let own = indent(lines[opens]);
    let closes = (opens + 1..lines.len()).find(|at| {
        let line = lines[*at];
        indent(line) <= own && line.trim_start().starts_with(['}', ')'])
    });
    closes.unwrap_or(lines.len())
}

/// Returns a line without its comment.
fn code_of(line: &str) -> &str {
    let code = match line.find("//") {
        Some(at) if !line[..at].contains('"') => &line[..at],
        _ => line,
    };
    code.trim()
}

fn depth_of(line: &str) -> i32 {
    let code = code_of(line);
    let count = |of: [char; 3]| code.matches(of).count() as i32;
    count(['(', '[', '{']) - count([')', ']', '}'])
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "\
impl Queue<'_> {
    /// Rings.
    pub fn ring(&self, group: &G) {
        let to = self.next();
        if group.leads() {
            // Before the doorbell.
            state
                .rung()
                .store(to, Order::Relaxed, Scope::Gpu);
            fence(Order::AcqRel, Scope::Sys);
            self.sq_doorbell.ring_fenced(to);
        }
        group.sync();
    }
}
";

    fn keys(without: &[&str]) -> (String, Vec<String>) {
        let without = without.iter().map(|key| key.to_string()).collect();
        let mut next = 1;
        let (text, mutants) = mutate("nvme-core/src/q.rs", SOURCE, &mut next, &without);
        assert_eq!(next as usize, mutants.len() + 1);
        (text, mutants.into_iter().map(|mutant| mutant.key).collect())
    }

    #[test]
    fn each_statement_is_left_out_and_moved_past_what_matters() {
        let (text, keys) = keys(&[]);
        let rung = "q.rs ring: `state.rung().store(to, Order::Relaxed, Scope::Gpu);`";
        let fence = "q.rs ring: `fence(Order::AcqRel, Scope::Sys);`";
        let bell = "q.rs ring: `self.sq_doorbell.ring_fenced(to);`";
        for expected in [
            format!("{rung} left out"),
            format!("{rung} after `fence(Order::AcqRel, Scope::Sys);`"),
            format!("{rung} after `group.sync();`, without `if group.leads()`"),
            format!("{fence} after `self.sq_doorbell.ring_fenced(to);`"),
            format!("{bell} before `fence(Order::AcqRel, Scope::Sys);`"),
            format!("{bell} after its block, without `if group.leads()`"),
        ] {
            assert!(keys.contains(&expected), "{expected} in {keys:#?}");
        }
        assert!(
            !keys.contains(&format!("{fence} left out")),
            "it is weakened"
        );
        let before_fence = text
            .lines()
            .position(|line| line.contains("ring_fenced") && line.starts_with("if crate"));
        let fence = text
            .lines()
            .position(|line| line.starts_with("if !crate") && line.contains("fence(Order"));
        assert!(before_fence < fence, "{text}");
        assert!(text.contains("let to = self.next();"));
    }

    #[test]
    fn what_does_not_compile_is_known_by_its_number() {
        assert_eq!(
            numbers_in("if !crate::sync::mutated(&[3, 14]) { a; }"),
            [3, 14]
        );
        assert_eq!(numbers_in("a;"), [0; 0]);
        let (text, all) = keys(&[]);
        let (less, rest) = keys(&[&all[0]]);
        assert_eq!(rest.len() + 1, all.len());
        assert_ne!(text, less);
    }
}
