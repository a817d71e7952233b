//! A finding, and lists of findings about one subject.

use serde::Serialize;

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FindingSeverity {
    /// The subject is as it should be.
    Ok,
    /// The subject works, but could work better.
    Note,
    /// The property cannot be determined, for example without root.
    Unknown,
    /// The subject works only in part, or is at risk.
    Warning,
    /// Something does not work.
    Missing,
}

/// One examined property of a subject.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DoctorFinding {
    /// Subject of the finding: "machine", or the PCI address of a controller or GPU.
    pub subject: String,
    /// Property that was examined, in one or two words.
    pub check: &'static str,
    /// Severity.
    pub status: FindingSeverity,
    /// Result, in words.
    pub text: String,
    /// Action to take; none when nothing needs to be done.
    pub remedy: Option<String>,
}

/// Subject of findings that are not about one device.
pub(super) const MACHINE: &str = "machine";

/// Records findings about one subject.
pub(super) struct SubjectFindings {
    subject: String,
    pub(super) all: Vec<DoctorFinding>,
}

impl SubjectFindings {
    pub(super) fn about(subject: impl ToString) -> Self {
        Self {
            subject: subject.to_string(),
            all: Vec::new(),
        }
    }

    pub(super) fn ok(&mut self, check: &'static str, text: impl Into<String>) {
        self.push(check, FindingSeverity::Ok, text, None);
    }

    pub(super) fn add(
        &mut self,
        check: &'static str,
        status: FindingSeverity,
        text: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        self.push(check, status, text, Some(remedy.into()));
    }

    pub(super) fn push(
        &mut self,
        check: &'static str,
        status: FindingSeverity,
        text: impl Into<String>,
        remedy: Option<String>,
    ) {
        self.all.push(DoctorFinding {
            subject: self.subject.clone(),
            check,
            status,
            text: text.into(),
            remedy,
        });
    }
}
