//! Sorts the findings of the protocol auditor in a test.

use crate::Memory;
use nvme_sim::{Controller, Finding, ProtocolSide, Rule};

/// Prints the auditor's findings if a test fails for another reason.
pub struct Shown<'a>(pub &'a Controller<&'a Memory>);

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for finding in self.0.findings() {
                eprintln!("the auditor found: {finding}");
            }
        }
    }
}

/// Fails unless every rule of `breaks` was found broken and every finding is of `breaks` or `explained`.
///
/// # Panics
/// With the findings, one a line.
pub fn check(findings: &[Finding], breaks: &[Rule], explained: &[Rule]) {
    let known = |rule: &Rule| breaks.contains(rule) || explained.contains(rule);
    let unexpected: Vec<String> = findings
        .iter()
        .filter(|finding| !known(&finding.rule))
        .map(ToString::to_string)
        .collect();
    assert!(
        unexpected.is_empty(),
        "the auditor found:\n{}",
        unexpected.join("\n")
    );
    for rule in breaks {
        assert!(
            findings.iter().any(|finding| finding.rule == *rule),
            "the auditor should have found {rule:?}"
        );
    }
}

/// Fails when the controller broke a rule, whatever its driver did.
///
/// # Panics
/// As [`check`].
pub fn controller_is_right(findings: &[Finding]) {
    let mut theirs = findings.to_vec();
    theirs.retain(|finding| finding.rule.side() == ProtocolSide::Controller);
    check(&theirs, &[], &[]);
}

/// Fails when the driver of a controller that lies broke a rule first.
///
/// Once the controller has ended a command that was not in flight, later findings may be its fault, because the driver
/// had to believe it.
///
/// # Panics
/// With the first such finding.
pub fn driver_is_right(findings: &[Finding]) {
    for finding in findings {
        match finding.rule {
            Rule::CqOverrun | Rule::SqHead => {}
            rule if rule.side() == ProtocolSide::Controller => return,
            _ => panic!("the auditor found: {finding}"),
        }
    }
}
