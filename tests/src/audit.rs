//! What the protocol auditor may find in a test.

use crate::Memory;
use nvme_sim::{Controller, Finding, Rule};

/// Shows what the auditor found when a test fails for another reason.
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
