//! What this machine can and cannot do, and what to change: the findings behind `nvme-gpu doctor`.
//!
//! Everything is read through a [`Host`], nothing is opened for use and nothing is changed; but for cuFile, whose library
//! is asked where this machine has one.

mod controller;
#[cfg(feature = "cuda")]
mod cufile;
mod finding;
mod gpu;
mod machine;
mod tier;

pub use finding::{Finding, Status};
pub use tier::Verdict;

use crate::machine::sysfs::Host;
use finding::MACHINE;
use serde::Serialize;

/// Everything that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The findings, machine first.
    pub findings: Vec<Finding>,
    /// Which tier follows, for each controller.
    pub tiers: Vec<Verdict>,
}

/// Looks at everything of this machine, and asks libcufile.
pub fn examine_here() -> Report {
    #[cfg_attr(not(feature = "cuda"), expect(unused_mut))]
    let mut report = examine(&Host::here());
    #[cfg(feature = "cuda")]
    {
        let of_machine = |finding: &Finding| finding.subject == MACHINE;
        let end = report.findings.iter().filter(|one| of_machine(one)).count();
        report
            .findings
            .insert(end, cufile::examine(crate::cuda::probe_cufile()));
    }
    report
}

/// Looks at everything that files of the system say.
pub fn examine(host: &Host) -> Report {
    let mut findings = machine::examine(host);
    let controllers = host.controllers();
    let gpus = gpu::find(host);
    if controllers.is_empty() {
        findings.push(machine::no_controller());
    }
    for function in &controllers {
        findings.extend(controller::examine(host, function));
    }
    findings.extend(gpu::examine(host, &gpus, &controllers));
    findings.sort_by_key(|finding| finding.subject != MACHINE);
    let tiers = controllers
        .iter()
        .map(|function| tier::of(host, function, &gpus, &findings))
        .collect();
    Report { findings, tiers }
}

#[cfg(test)]
impl Report {
    /// The finding of `check` about `subject`, as "status: text: remedy".
    fn find(&self, subject: &str, check: &str) -> String {
        let mut all = self.findings.iter();
        let found = all.find(|one| one.subject == subject && one.check == check);
        found.map_or_else(
            || format!("no finding {check} of {subject}"),
            |one| {
                let remedy = one.remedy.as_deref().unwrap_or("-");
                format!("{:?}: {}: {remedy}", one.status, one.text)
            },
        )
    }
}
