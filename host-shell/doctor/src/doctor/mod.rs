//! The abilities of this machine, and the changes that improve them: the findings behind `nvme-gpu doctor`.
//!
//! Everything is read through a [`SysfsHost`], nothing is opened for use and nothing is changed. The exceptions are
//! CUDA and cuFile, whose libraries are called if this machine has them.

mod controller;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod cufile;
mod finding;
mod gpu;
mod machine;
mod software;
mod tier;

pub use finding::{DoctorFinding, FindingSeverity};
pub use tier::ControllerVerdict;
pub(crate) use tier::judge;

use crate::nvidia;
use crate::topology::{MachineTopology, SharedMemoryGpus};
use finding::MACHINE;
use nvme_driver::sysfs::{SysfsHost, UsageCensus};
use serde::Serialize;

/// All findings, and the tiers of controllers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DoctorReport {
    /// The findings, machine first.
    pub findings: Vec<DoctorFinding>,
    /// Possible tier of each controller.
    pub tiers: Vec<ControllerVerdict>,
}

/// Returns the version of the NVIDIA driver that is loaded, and whether it is the open kernel modules.
pub fn nvidia_driver(host: &SysfsHost) -> Option<(String, bool)> {
    let driver = nvidia::NvidiaDriver::loaded(host)?;
    Some((driver.version, driver.open))
}

/// Examines this machine, and calls libcuda and libcufile.
pub fn examine_here() -> DoctorReport {
    #[cfg(not(feature = "cuda"))]
    return examine(&SysfsHost::here());
    #[cfg(feature = "cuda")]
    {
        let gpus = nvme_cuda::GpuFacts::all();
        let shared = gpus.as_deref().map(SharedMemoryGpus::of);
        let mut report = examine_with(&SysfsHost::here(), &shared.unwrap_or_default());
        let of_machine = |finding: &DoctorFinding| finding.subject == MACHINE;
        let end = report.findings.iter().filter(|one| of_machine(one)).count();
        report
            .findings
            .insert(end, cufile::examine(nvme_cuda::probe_cufile()));
        let gpus = cuda::examine(gpus, |index| nvme_cuda::Gpu::open(index)?.pinning());
        report.findings.extend(gpus);
        in_order(&mut report.findings);
        report
    }
}

/// Examines everything that files of the system show.
pub fn examine(host: &SysfsHost) -> DoctorReport {
    examine_with(host, &SharedMemoryGpus::default())
}

fn examine_with(host: &SysfsHost, shared: &SharedMemoryGpus) -> DoctorReport {
    let mut findings = machine::examine(host);
    findings.extend(software::examine(host));
    let controllers = host.controllers();
    let gpus = nvidia::find(host);
    let topology = MachineTopology::with(host, shared);
    if controllers.is_empty() {
        findings.push(machine::no_controller());
    }
    let census = UsageCensus::take(host);
    for function in &controllers {
        findings.extend(controller::examine(host, function, &census));
    }
    findings.extend(gpu::examine(host, &gpus, &topology));
    in_order(&mut findings);
    let tiers = controllers
        .iter()
        .map(|function| tier::of(host, function, &topology))
        .collect();
    DoctorReport { findings, tiers }
}

/// Sorts findings: the machine's first, then those of each device together, in the order of the devices.
fn in_order(findings: &mut [DoctorFinding]) {
    let mut subjects: Vec<String> = vec![MACHINE.to_owned()];
    for finding in findings.iter() {
        if !subjects.contains(&finding.subject) {
            subjects.push(finding.subject.clone());
        }
    }
    findings.sort_by_key(|finding| subjects.iter().position(|one| *one == finding.subject));
}

#[cfg(test)]
impl DoctorReport {
    /// Returns the finding of `check` about `subject`, as "status: text: remedy".
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
