//! What the protocol auditor may find in a test.

use crate::Memory;
use nvme_sim::{Controller, Fault, FaultPlan, Finding, Rule};

/// The rules that a controller with these faults breaks as a wire can show it.
pub fn explained(faults: &FaultPlan) -> Vec<Rule> {
    let rules = faults.rules.iter();
    rules.filter_map(|rule| breaks(rule.what)).collect()
}

/// The rule that a fault breaks, if a wire can show it.
pub fn breaks(fault: Fault) -> Option<Rule> {
    match fault {
        Fault::Duplicate | Fault::Echo(_) | Fault::WrongCid(_) | Fault::FlippedCid(_) => {
            Some(Rule::UnknownCommand)
        }
        Fault::LateData(_) => Some(Rule::DataLate),
        Fault::WrongPhase => Some(Rule::PhaseTag),
        Fault::BadSqhd(_) => Some(Rule::SqHead),
        Fault::TornCqe => Some(Rule::TornEntry),
        // Silence, time, order and status are a controller's own affair.
        Fault::Drop
        | Fault::Delay(_)
        | Fault::Stubborn(_)
        | Fault::Reorder
        | Fault::Status(_)
        | Fault::Cfs
        | Fault::AllOnes
        | Fault::StuckReady => None,
    }
}

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
