//! Fences and scopes of each kernel: `nvme-gpu-kernel/ptx/fences.txt`, read off the control flow of the PTX.
//!
//! Two rules hold whatever the table says. On every path to a store to a tail doorbell a `fence.acq_rel.sys` follows
//! the last store to the submission ring or a list. On every path to a store to a head doorbell a `fence.acq_rel.sys`
//! follows the last relaxed load of a completion's phase tag, or an `ld.acquire.sys`.
//!
//! A group publishes its entries with one fence if there are new ones. The first rule takes the branch of that test for
//! the fence if its other side leads to the fence alone.

use super::flow::Flow;
use super::text::{Function, functions, opcode};
use std::collections::{BTreeMap, BTreeSet};

const FENCE: &str = "fence.acq_rel.sys";
const ACQUIRE: &str = "ld.acquire.sys";
const DOORBELL: &str = "st.mmio";
const STORE: &str = "st.relaxed.sys";
const LOAD: &str = "ld.relaxed.sys";

/// Offsets of the doorbells' addresses in `QueueWords` (nvme-core/src/handoff.rs), as PTX writes them.
const TAIL_AT: &str = "+16]";
const HEAD_AT: &str = "+24]";

const HEAD: &str = "\
# Fences and scopes of each kernel and device function, as `cargo xtask ptx` reads them off the PTX.
#
# doorbell lines: what comes before the store to the doorbell on every path, and after the last store to the ring
# (tail) or before which no completion is read without order (head).
#   own fence       a fence.acq_rel.sys in the same block, for this doorbell
#   fence           a fence.acq_rel.sys earlier, shared with others
#   fence if new    the branch that jumps over the fence when nothing was submitted since the last one
#   acquire         the completion itself was read by ld.acquire.sys
# shared: fences that are no doorbell's own; with fewer of them the check fails.
# In brackets: at how many places. A line but that of own fences fails the check when it is new or has more places.
# ordered: every instruction that orders memory, with its scope. A line that is new or lost fails the check.
#
# A refresh that fails the check writes nothing. `cargo xtask ptx --refresh --accept-fences` writes it.
";

/// Lines of each function, by its name: what kind of fence was found, and in how many places.
#[derive(Default, Debug, PartialEq, Eq)]
pub struct Fences(BTreeMap<String, Lines>);

type Lines = BTreeMap<String, u32>;

/// Kind of a doorbell whose own fence is found, so that the rest of the path is not searched.
const OWN: &str = "own fence";
/// The line of the fences that are no doorbell's own.
const SHARED: &str = "shared: fence.acq_rel.sys";

impl Fences {
    /// Adds the functions of `ptx` that ring a doorbell or order memory; the faults that no table excuses.
    pub fn add(&mut self, ptx: &str) -> Vec<String> {
        let mut faults = Vec::new();
        for function in functions(ptx) {
            match self.add_function(&function) {
                Ok(found) => faults.extend(found),
                Err(fault) => faults.push(fault),
            }
        }
        faults
    }

    fn add_function(&mut self, function: &Function<'_>) -> Result<Vec<String>, String> {
        let flow = Flow::of(function)?;
        let mut lines = Lines::new();
        let mut faults = Vec::new();
        let own: Vec<(usize, usize)> = flow
            .all(FENCE)
            .filter_map(|at| Some((at, own_doorbell(&flow, at)?)))
            .collect();
        let guards = guards(&flow, &own);
        for doorbell in flow.all(DOORBELL) {
            let tail = is_tail(&flow, doorbell).ok_or_else(|| {
                format!(
                    "{}: a doorbell whose address is not a queue's",
                    function.name
                )
            })?;
            let stops = |at: usize| {
                flow.is(at, FENCE) || !tail && flow.is(at, ACQUIRE) || tail && guards[at]
            };
            let mut before = BTreeSet::new();
            for at in flow.back(doorbell, stops) {
                let what = if own.contains(&(at, doorbell)) {
                    OWN
                } else if own.iter().any(|(fence, _)| *fence == at) {
                    "fence of another doorbell"
                } else if flow.is(at, FENCE) {
                    "fence"
                } else if stops(at) && !tail {
                    "acquire"
                } else if stops(at) {
                    "fence if new"
                } else if tail && flow.is(at, STORE) {
                    faults.push(format!(
                        "{}: tail doorbell: a path from {} to the doorbell has no {FENCE}",
                        function.name, flow.code[at]
                    ));
                    continue;
                } else if at == 0 && !tail {
                    faults.push(format!(
                        "{}: head doorbell: a path to the doorbell has neither {FENCE} nor {ACQUIRE}",
                        function.name
                    ));
                    continue;
                } else if !tail && flow.is(at, LOAD) && is_upper(&flow, at) {
                    faults.push(format!(
                        "{}: head doorbell: a path from {} to the doorbell has no {FENCE}",
                        function.name, flow.code[at]
                    ));
                    continue;
                } else if !tail && flow.is(at, LOAD) {
                    "reads of dwords 0-1 by a group in which some want them"
                } else {
                    continue;
                };
                before.insert(what);
            }
            let name = if tail { "tail" } else { "head" };
            let before: Vec<&str> = before.into_iter().collect();
            let line = format!("{name} doorbell: {}", before.join(", "));
            *lines.entry(line).or_default() += 1;
        }
        let ordered = |at: &usize| {
            let opcode = opcode(flow.code[*at]);
            let orders = ["acquire", "release", "acq_rel", "sc"];
            opcode.split('.').any(|part| orders.contains(&part))
        };
        let ordered = (0..flow.code.len()).filter(ordered);
        lines.extend(ordered.map(|at| (format!("ordered: {}", opcode(flow.code[at])), 0)));
        let shared = flow.all(FENCE).count() - own.len();
        if shared != 0 {
            lines.insert(SHARED.to_string(), shared as u32);
        }
        if !lines.is_empty() {
            self.0.insert(function.name.to_string(), lines);
        }
        faults.dedup();
        Ok(faults)
    }

    /// Returns the text of the table as it is committed.
    pub fn text(&self) -> String {
        let mut text = HEAD.to_string();
        for (name, lines) in &self.0 {
            text += &format!("\n{name}\n");
            for (line, count) in lines {
                let places = if *count == 0 {
                    String::new()
                } else {
                    format!(" [{count}]")
                };
                text += &format!("    {line}{places}\n");
            }
        }
        text
    }

    /// Reads the table in `committed`.
    pub fn read(committed: &str) -> Self {
        let mut table = Self::default();
        let mut name = String::new();
        for line in committed.lines().filter(|line| !line.starts_with('#')) {
            match line.strip_prefix("    ") {
                Some(line) => {
                    let (line, count) = line.split_once(" [").unwrap_or((line, "0]"));
                    let count = count.trim_end_matches(']').parse().unwrap_or(0);
                    let lines = table.0.entry(name.clone()).or_default();
                    lines.insert(line.to_string(), count);
                }
                None if line.is_empty() => {}
                None => name = line.to_string(),
            }
        }
        table
    }

    /// Returns, by function and line, what is weaker than in `committed`, or may be. Fewer places are no difference as
    /// long as a doorbell of each kind remains; more places with their own fence are none either.
    pub fn differences(&self, committed: &Self) -> Vec<String> {
        let names: BTreeSet<&String> = self.0.keys().chain(committed.0.keys()).collect();
        let none = Lines::new();
        let mut found = Vec::new();
        for name in names {
            let now = self.0.get(name).unwrap_or(&none);
            let then = committed.0.get(name).unwrap_or(&none);
            let kind = |line: &str| line.split(':').next().unwrap_or("").to_string();
            for line in then.keys().filter(|line| !now.contains_key(*line)) {
                let doorbell = line.contains("doorbell");
                if !(doorbell && now.keys().any(|other| kind(other) == kind(line))) {
                    found.push(format!("{name}: lost: {line}"));
                }
            }
            for (line, count) in now {
                match then.get(line) {
                    None => found.push(format!("{name}: new: {line}")),
                    Some(was) if line == SHARED && count < was => {
                        found.push(format!(
                            "{name}: lost: {line}: {count} places, there were {was}"
                        ));
                    }
                    Some(was) if was < count && line != SHARED && !line.ends_with(OWN) => {
                        found.push(format!("{name}: {line}: {count} places, there were {was}"));
                    }
                    Some(_) => {}
                }
            }
        }
        found
    }
}

/// Returns whether the doorbell is a submission queue's; `None` if its address has an unknown origin.
fn is_tail(flow: &Flow<'_>, doorbell: usize) -> Option<bool> {
    let mut registers = vec![flow.code[doorbell].split(['[', ']']).nth(1)?];
    let mut sites = BTreeSet::new();
    let mut next = 0;
    // The address may have been moved from register to register since it was loaded.
    while let Some(register) = registers.get(next).copied() {
        next += 1;
        for line in &flow.code {
            let mut words = line.split([' ', '\t', ',']).filter(|word| !word.is_empty());
            let kind = words.next().unwrap_or("");
            if words.next() != Some(register) {
                continue;
            }
            if kind.starts_with("ld.") {
                sites.insert(match line {
                    line if line.ends_with(TAIL_AT) => Some(true),
                    line if line.ends_with(HEAD_AT) => Some(false),
                    _ => None,
                });
            } else if kind == "mov.b64" {
                match words.next().filter(|from| from.starts_with('%')) {
                    Some(from) if !registers.contains(&from) => registers.push(from),
                    Some(_) => {}
                    None => {
                        sites.insert(None);
                    }
                }
            }
        }
    }
    match sites.into_iter().collect::<Vec<_>>()[..] {
        [site] => site,
        _ => None,
    }
}

/// Returns whether the load reads dwords 2-3 of a completion, 8 bytes into its entry.
fn is_upper(flow: &Flow<'_>, load: usize) -> bool {
    let address = flow.code[load].split(['[', ']']).nth(1).unwrap_or("");
    let adds = |line: &&str| {
        let mut words = line.split([' ', '\t', ',']).filter(|word| !word.is_empty());
        opcode(line).starts_with("add.")
            && words.nth(1) == Some(address)
            && words.nth(1) == Some("8")
    };
    address.ends_with("+8") || flow.code.iter().any(adds)
}

/// Returns the doorbell that follows the fence in its own block.
fn own_doorbell(flow: &Flow<'_>, fence: usize) -> Option<usize> {
    let mut at = fence;
    while let [next] = flow.after[at][..] {
        if flow.before[next].len() != 1 {
            return None;
        }
        at = next;
        if flow.is(at, DOORBELL) {
            return Some(at);
        }
    }
    None
}

/// Returns, for each branch, whether a shared fence follows before any access that the bus or another function sees.
fn guards(flow: &Flow<'_>, own: &[(usize, usize)]) -> Vec<bool> {
    let mut leads = vec![false; flow.code.len()];
    let mut work: Vec<usize> = flow
        .all(FENCE)
        .filter(|at| !own.iter().any(|(fence, _)| fence == at))
        .collect();
    while let Some(at) = work.pop() {
        for before in &flow.before[at] {
            let kind = opcode(flow.code[*before]);
            let seen = kind.split('.').any(|part| part == "sys") || kind.starts_with("call");
            if !seen && !std::mem::replace(&mut leads[*before], true) {
                work.push(*before);
            }
        }
    }
    let branches = flow.after.iter().map(|after| after.len() > 1);
    leads
        .iter()
        .zip(branches)
        .map(|(leads, branches)| *leads && branches)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::Image;
    use crate::{fenced, read};
    use chores::process::root;

    /// Returns the committed PTX of every image whose fences are listed.
    fn committed_files() -> Vec<String> {
        let path = |image: &Image| root().join(image.committed.expect("a committed file"));
        fenced().map(|image| read(&path(image)).unwrap()).collect()
    }

    const COMMITTED: &str = include_str!("../../../../nvme-gpu-kernel/ptx/fences.txt");

    fn table(ptx: &[&str]) -> (Fences, Vec<String>) {
        let mut table = Fences::default();
        let faults = ptx.iter().flat_map(|ptx| table.add(ptx)).collect();
        (table, faults)
    }

    #[test]
    fn the_committed_table_is_that_of_the_committed_ptx() {
        let files = committed_files();
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        let (table, faults) = table(&files);
        assert!(faults.is_empty(), "{faults:#?}");
        let differences = table.differences(&Fences::read(COMMITTED));
        assert!(differences.is_empty(), "{differences:#?}");
        assert_eq!(table.text(), COMMITTED, "written by hand");
    }

    /// The test weakens or removes every fence of every kernel; the check must name the kernel.
    #[test]
    fn each_fence_that_is_lost_is_named() {
        let committed = Fences::read(COMMITTED);
        let mut tried = 0;
        for ptx in committed_files() {
            for (at, line) in ptx.match_indices("fence.acq_rel.sys;") {
                // Scopes are weakened and fences removed in turns: both for each fence would take twice as long.
                let weaker = ["fence.acq_rel.gpu;", ""][tried % 2];
                let weak = [&ptx[..at], weaker, &ptx[at + line.len()..]].concat();
                let name = name_at(&weak, at);
                let mut now = Fences::default();
                let mut faults = now.add(function_at(&weak, at));
                let then = Fences([(name.clone(), committed.0[&name].clone())].into());
                faults.extend(now.differences(&then));
                assert!(
                    faults.iter().any(|fault| fault.starts_with(&name)),
                    "{name}: a fence became {weaker:?} and nothing was said"
                );
                tried += 1;
            }
        }
        assert!(tried > 80, "only {tried} weakenings");
    }

    /// Returns the name of the function that byte `at` is in.
    fn name_at(ptx: &str, at: usize) -> String {
        functions(function_at(ptx, at))[0].name.to_string()
    }

    fn function_at(ptx: &str, at: usize) -> &str {
        let start = ptx[..at].rfind("\n.visible").expect("in a function") + 1;
        let end = ptx[at..].find("\n}\n").expect("it ends") + at + 3;
        &ptx[start..end]
    }

    const SHORT: &str = "\
.visible .entry f(.param .b64 p)
{
\tld.b64 \t%rd1, [%rd2+16];
\tld.b64 \t%rd3, [%rd2+24];
\tst.relaxed.sys.u64 [%rd4], %rd5;
\t@%p1 bra \t$L_2;
\tfence.acq_rel.sys;
$L_2:
\t@%p2 bra \t$L_3;
\tst.mmio.relaxed.sys.global.u32 [%rd1], %r1;
$L_3:
\tld.acquire.sys.u64 %rd6, [%rd7];
\tst.mmio.relaxed.sys.global.u32 [%rd3], %r1;
\tret;
}
";

    #[test]
    fn a_fence_behind_a_test_is_told_from_none() {
        let (found, faults) = table(&[SHORT]);
        assert!(faults.is_empty(), "{faults:?}");
        let text = found.text();
        assert!(text.contains("    head doorbell: acquire [1]\n"), "{text}");
        assert!(
            text.contains("    tail doorbell: fence, fence if new [1]\n"),
            "{text}"
        );
        assert_eq!(Fences::read(&text), found);
        for (from, to, says) in [
            ("\tfence.acq_rel.sys;\n", "", "f: tail doorbell"),
            ("fence.acq_rel.sys", "fence.acq_rel.gpu", "f: tail doorbell"),
            ("ld.acquire.sys", "ld.relaxed.gpu", "f: head doorbell"),
            ("+16]", "+17]", "f: a doorbell whose address"),
        ] {
            let (_, faults) = table(&[&SHORT.replacen(from, to, 1)]);
            assert!(
                faults.iter().any(|fault| fault.starts_with(says)),
                "{to}: {faults:?}"
            );
        }
    }

    #[test]
    fn a_scope_of_a_lock_that_changes_is_named() {
        let lock = SHORT.replace("ld.acquire.sys", "ld.acquire.gpu");
        let (then, _) = table(&[SHORT]);
        let (now, _) = table(&[&lock]);
        let found = now.differences(&then);
        assert!(
            found.contains(&"f: lost: ordered: ld.acquire.sys.u64".to_string()),
            "{found:?}"
        );
        assert!(
            found.contains(&"f: new: ordered: ld.acquire.gpu.u64".to_string()),
            "{found:?}"
        );
    }
}
