//! `doctor`: abilities of this machine, and the changes that would extend them.

use crate::common::{OutputForm, output, visible};
use clap::Args;
use nvme_host::doctor::{DoctorReport, FindingSeverity, examine_here};
use nvme_host::{Error, Result};

/// Show what this machine can and cannot do with its controllers and GPUs, and the remedy for each
///
/// Changes nothing; libcufile may write cufile.log here. Root sees more: capabilities of PCI functions, exclusive use.
#[derive(Args)]
pub struct DoctorCommand {
    #[command(flatten)]
    form: OutputForm,
}

impl DoctorCommand {
    pub fn run(self) -> Result<()> {
        let report = examine_here();
        if self.form.json {
            let value = serde_json::to_value(&report)
                .map_err(|error| Error::internal(error.to_string()))?;
            return output::json(&value);
        }
        output::print(&to_text(&report))
    }
}

fn to_text(report: &DoctorReport) -> String {
    let mut text = String::new();
    let mut subject = "";
    for finding in &report.findings {
        if finding.subject != subject {
            subject = &finding.subject;
            text.push_str(&format!("{}\n", visible::line(subject)));
        }
        let mark = match finding.status {
            FindingSeverity::Ok => "ok",
            FindingSeverity::Note => "note",
            FindingSeverity::Unknown => "?",
            FindingSeverity::Warning => "warn",
            FindingSeverity::Missing => "FAIL",
        };
        text.push_str(&format!(
            "  {mark:<4} {}: {}\n",
            finding.check,
            visible::line(&finding.text)
        ));
        if let Some(remedy) = &finding.remedy {
            text.push_str(&format!("       -> {remedy}\n"));
        }
    }
    for verdict in &report.tiers {
        text.push_str(&format!("{}: {}\n", verdict.controller, verdict.text));
    }
    text
}
