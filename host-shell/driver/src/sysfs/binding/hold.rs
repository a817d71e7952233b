//! A function between the judgement that it is free and the moment when its driver loses it.

use crate::error::{Error, Result};
use crate::sysfs::usage::UsageCensus;
use crate::sysfs::{DeviceHolder, DeviceUsage, LendingDriver, SysfsFunction, SysfsHost, UnseenUse};
use std::fs::{File, OpenOptions};
use std::io;
use std::thread;
use std::time::{Duration, Instant};

/// Time that a program such as udev may have a node open before it counts as a user: udev opens a disk for a
/// moment after every change, and would otherwise make each binding fail at random.
const PATIENCE: Duration = Duration::from_secs(2);
/// Last clause of a refusal.
const OR_FORCE: &str = "; or add --force, which breaks that use";
/// Interval of looking again at a node that a program has open.
const STEP: Duration = Duration::from_millis(50);

/// Disks and the node of VFIO's group, opened exclusively: the kernel refuses other users until they are
/// closed.
pub struct DiskHold {
    _disks: Vec<File>,
    group: Option<File>,
}

impl DiskHold {
    /// Finds the uses of `function`; if there are none, holds it.
    ///
    /// # Errors
    /// As [`DeviceUsage::refuse`], unless `force` is set.
    pub fn of(host: &SysfsHost, function: &SysfsFunction, force: bool) -> Result<Self> {
        Self::within(host, function, force, PATIENCE)
    }

    /// Does the same as [`of`](Self::of), with `patience` for programs that have a node open for a moment.
    pub fn within(
        host: &SysfsHost,
        function: &SysfsFunction,
        force: bool,
        patience: Duration,
    ) -> Result<Self> {
        if force {
            return Ok(Self {
                _disks: Vec::new(),
                group: None,
            });
        }
        let subject = function.address.to_string();
        let start = Instant::now();
        loop {
            let usage = judge(host, function, true);
            if usage.holders.is_empty() {
                usage.refuse(&subject, OR_FORCE)?;
                break;
            }
            if start.elapsed() >= patience || !usage.holders.iter().all(DeviceHolder::is_program) {
                usage.refuse(&subject, OR_FORCE)?;
            }
            thread::sleep(STEP);
        }
        let disks = host.claim(function).ok_or_else(|| {
            Error::usage(
                format!("{subject} is in use: a disk of it was opened exclusively just now"),
                format!("end what has it open{OR_FORCE}"),
            )
        })?;
        let group = claim_group(host, function)?;
        Ok(Self {
            _disks: disks,
            group,
        })
    }

    /// Judges the uses again, right before the driver loses the function, and returns the uses that `force`
    /// breaks, in clauses. The disks stay claimed.
    ///
    /// # Errors
    /// As [`DeviceUsage::refuse`], unless `force` is set.
    pub fn judge_again(
        &mut self,
        host: &SysfsHost,
        function: &SysfsFunction,
        force: bool,
    ) -> Result<Vec<String>> {
        let usage = judge(host, function, force);
        if !force {
            usage.refuse(&function.address.to_string(), OR_FORCE)?;
        }
        // The kernel would wait for the node to be closed.
        self.group = None;
        Ok(usage.damages())
    }
}

/// Opens the node of VFIO's group, which has one opener at a time. A device that is open without its group has none.
fn claim_group(host: &SysfsHost, function: &SysfsFunction) -> Result<Option<File>> {
    let is_lent = function.driver.as_deref() == Some(LendingDriver::Vfio.name());
    let Some(group) = function.group.filter(|_| is_lent) else {
        return Ok(None);
    };
    let node = host.path(format!("dev/vfio/{group}"));
    match OpenOptions::new().read(true).write(true).open(node) {
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Err(Error::usage(
            format!(
                "{} is in use: a program that is not seen has IOMMU group {group} open",
                function.address
            ),
            format!("end that program{OR_FORCE}"),
        )),
        opened => Ok(opened.ok()),
    }
}

/// Returns the use of a function, including the uses that only its driver knows.
fn judge(host: &SysfsHost, function: &SysfsFunction, tries_claims: bool) -> DeviceUsage {
    let mut usage = host.judge(function, &UsageCensus::take(host), tries_claims);
    let driver = function.driver.as_deref();
    if let Some(name) = driver.filter(|name| *name != "nvme" && LendingDriver::of(name).is_none()) {
        let name = name.to_owned();
        usage.unseen.push(UnseenUse::Driver { name });
    }
    usage
}
