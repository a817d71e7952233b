//! What this machine can and cannot do, and what to change: the findings behind `nvme-gpu doctor`.
//!
//! Everything is read through a [`Host`], nothing is opened for use and nothing is changed.

mod controller;
mod gpu;
mod machine;
mod tier;

use crate::machine::sysfs::Host;
use serde::Serialize;
pub use tier::Verdict;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As it should be.
    Ok,
    /// Works, and could be better.
    Note,
    /// Cannot be told, for example without root.
    Unknown,
    /// Something works only in part, or is at risk.
    Warning,
    /// Something does not work.
    Missing,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What it is about: "machine", or the PCI address of a controller or GPU.
    pub subject: String,
    /// What was looked at, in one or two words.
    pub check: &'static str,
    /// How bad it is.
    pub status: Status,
    /// What was found.
    pub text: String,
    /// What to do about it; none when nothing is to be done.
    pub remedy: Option<String>,
}

/// Everything that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The findings, machine first.
    pub findings: Vec<Finding>,
    /// Which tier follows, for each controller.
    pub tiers: Vec<Verdict>,
}

/// Looks at everything.
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

/// The subject of what is not about one device.
const MACHINE: &str = "machine";

/// Notes findings about one subject.
struct Notes {
    subject: String,
    all: Vec<Finding>,
}

impl Notes {
    fn about(subject: impl ToString) -> Self {
        Self {
            subject: subject.to_string(),
            all: Vec::new(),
        }
    }

    fn ok(&mut self, check: &'static str, text: impl Into<String>) {
        self.push(check, Status::Ok, text, None);
    }

    fn add(
        &mut self,
        check: &'static str,
        status: Status,
        text: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        self.push(check, status, text, Some(remedy.into()));
    }

    fn push(
        &mut self,
        check: &'static str,
        status: Status,
        text: impl Into<String>,
        remedy: Option<String>,
    ) {
        self.all.push(Finding {
            subject: self.subject.clone(),
            check,
            status,
            text: text.into(),
            remedy,
        });
    }
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
