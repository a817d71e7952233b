//! Gives a controller to vfio-pci or to the module nvme_gpu, and back.
//!
//! Invariant: without force a controller in use keeps its driver, and one that the new driver does not take gets its
//! driver back.

mod hold;
mod lender;
mod neighbours;
mod record;
#[cfg(test)]
mod tests;

pub use lender::LendingDriver;
pub use neighbours::GroupNeighbour;

use super::{PciAddress, SysfsFunction, SysfsHost};
use crate::error::{Error, Result};
use hold::DiskHold;
use record::{BindingRecord, refused};
use std::fs;
use std::io;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};

/// Result of [`SysfsHost::bind`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindResult {
    /// The driver before.
    pub before: Option<String>,
    /// The IOMMU group, as in /dev/vfio/GROUP; none without an IOMMU.
    pub group: Option<u32>,
    /// Other functions of the group that keep VFIO from using it, with their drivers.
    pub in_the_way: Vec<(PciAddress, String)>,
    /// Uses that `--force` broke, in clauses.
    pub broken: Vec<String>,
}

/// Result of [`SysfsHost::unbind`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnbindResult {
    /// The driver now.
    pub driver: Option<String>,
    /// Uses that `--force` broke, in clauses.
    pub broken: Vec<String>,
}

impl SysfsHost {
    /// Binds the controller at `address` to `lender`. Needs root.
    ///
    /// For the module, the group of the controller is set to strict translation, if it has no other type already
    /// that the module accepts.
    ///
    /// # Errors
    /// [`Error::Usage`] when something uses it, which is named with its remedy, unless `force` is set;
    /// [`Error::Environment`] when it cannot be bound, and where it cannot be seen whether something uses it;
    /// [`Error::File`] without the rights.
    pub fn bind(
        &self,
        address: PciAddress,
        lender: LendingDriver,
        force: bool,
    ) -> Result<BindResult> {
        let function = self.nvme(address)?;
        if function.group.is_none() && lender == LendingDriver::Vfio {
            return Err(Error::environment(
                format!("{address} is in no IOMMU group: the IOMMU is off"),
                "switch it on (`nvme-gpu doctor` says how)",
            ));
        }
        let mut bound = BindResult {
            before: function.driver.clone(),
            group: function.group,
            in_the_way: match lender {
                LendingDriver::Vfio => self.in_the_way(&function),
                LendingDriver::Module => Vec::new(),
            },
            broken: Vec::new(),
        };
        let name = lender.name();
        if function.driver.as_deref() == Some(name) {
            return Ok(bound);
        }
        let lent_by = function.driver.as_deref().and_then(LendingDriver::of);
        if let Some(other) = lent_by.filter(|_| !force) {
            self.is_ours(&function, other)?;
        }
        let mut hold = DiskHold::of(self, &function, force)?;
        if !self.exists(format!("sys/bus/pci/drivers/{name}")) {
            let module = name.replace('-', "_");
            return Err(Error::environment(
                format!("the driver {name} is not loaded"),
                format!("load it: `modprobe {module}`"),
            ));
        }
        let mut record = self.record_before(&function);
        self.remember(address, &record)?;
        let judged = hold.judge_again(self, &function, force);
        bound.broken = judged.inspect_err(|_| {
            if lent_by.is_none() {
                self.forget(address);
            }
        })?;
        let result = self
            .move_to(&function, lender)
            .and_then(|()| match self.driver(address) {
                Some(driver) if driver == name => Ok(()),
                _ => Err(Error::environment(
                    format!("{address} was not taken by {name}"),
                    "see the system's log (`dmesg | tail`)",
                )),
            });
        if result.is_err() {
            // The driver is restored as far as possible: the first error is the one to report.
            let _ = self.give_back(address);
            return result.map(|()| bound);
        }
        record.binding = self.binding(address);
        self.remember(address, &record)?;
        Ok(bound)
    }

    /// Gives the controller at `address` back to the driver that it had before [`bind`](Self::bind), or
    /// to the one that the kernel chooses.
    ///
    /// # Errors
    /// Undoes [`bind`](Self::bind), also when the function is bound to none of the [lenders](LendingDriver), and when
    /// another program bound it to vfio-pci: libvirt, driverctl, a program for a virtual machine.
    pub fn unbind(&self, address: PciAddress, force: bool) -> Result<UnbindResult> {
        let function = self.nvme(address)?;
        let Some(lender) = function.driver.as_deref().and_then(LendingDriver::of) else {
            let driver = function.driver.as_deref().unwrap_or("no driver");
            return Err(Error::usage(
                format!("{address} is bound to {driver}, not to vfio-pci or nvme_gpu"),
                "nothing is to be done",
            ));
        };
        if !force {
            self.is_ours(&function, lender)?;
        }
        let mut hold = DiskHold::of(self, &function, force)?;
        let broken = hold.judge_again(self, &function, force)?;
        let driver = self.give_back(address)?;
        Ok(UnbindResult { driver, broken })
    }

    /// # Errors
    /// [`Error::Usage`] for a function that vfio-pci has by something else than [`bind`](Self::bind). Nobody but this
    /// project gives functions to nvme_gpu.
    fn is_ours(&self, function: &SysfsFunction, lender: LendingDriver) -> Result<()> {
        let address = function.address;
        let record = self.recorded(address);
        let is_same = |record: BindingRecord| {
            record.binding.is_some() && record.binding == self.binding(address)
        };
        if lender == LendingDriver::Module || record.is_some_and(is_same) {
            return Ok(());
        }
        Err(Error::usage(
            format!(
                "{address} was given to {} by something else than `nvme-gpu bind`",
                lender.name()
            ),
            "give it back by what took it (libvirt, driverctl, a program for virtual machines), or add --force if \
             nothing needs it there",
        ))
    }

    /// Returns the number of the user called `name`, or that number itself.
    ///
    /// # Errors
    /// [`Error::Usage`] when no driver has that name.
    pub fn user_id(&self, name: &str) -> Result<u32> {
        let table = self.text("etc/passwd").unwrap_or_default();
        let id = |line: &str| {
            let mut fields = line.split(':');
            let found = fields.next()? == name;
            found.then(|| fields.nth(1)?.parse().ok()).flatten()
        };
        let known = table.lines().find_map(id).or_else(|| name.parse().ok());
        known.ok_or_else(|| {
            Error::usage(
                format!("there is no user '{name}'"),
                "name one of /etc/passwd, or a number",
            )
        })
    }

    /// Makes user `id` the owner of the nodes that VFIO has for the function at `address`: the node of IOMMU group
    /// `group`, and the function's own node for iommufd, if there is one.
    pub fn give_nodes(&self, address: PciAddress, group: u32, id: u32) -> Result<()> {
        let group = self.path(format!("dev/vfio/{group}"));
        let own = self.vfio_node(address).filter(|path| path.exists());
        for path in [Some(group), own].into_iter().flatten() {
            chown(&path, Some(id), None).map_err(Error::file("give away", &path))?;
        }
        Ok(())
    }

    /// Returns the path of VFIO's device node for the function at `address`, if the kernel names
    /// one; the node need not exist.
    pub(crate) fn vfio_node(&self, address: PciAddress) -> Option<PathBuf> {
        let folder = format!("sys/bus/pci/devices/{address}/vfio-dev");
        let name = self.names(folder).into_iter().next()?;
        Some(self.path(format!("dev/vfio/devices/{name}")))
    }

    /// Returns the NVMe controller at `address`.
    ///
    /// # Errors
    /// [`Error::Environment`] when there is no function at the address, [`Error::Usage`] when it is no NVMe controller.
    pub(crate) fn nvme(&self, address: PciAddress) -> Result<SysfsFunction> {
        let list = "`nvme-gpu list` shows the controllers";
        let function = self.function(address).ok_or_else(|| {
            Error::environment(format!("there is no PCI function {address}"), list)
        })?;
        if function.is_nvme() {
            Ok(function)
        } else {
            let class = function.config.class;
            Err(Error::usage(
                format!("{address} is no NVMe controller: its class is {class:06x}"),
                list,
            ))
        }
    }

    fn driver(&self, address: PciAddress) -> Option<String> {
        self.link_name(format!("sys/bus/pci/devices/{address}/driver"))
    }

    /// Binds a function to the driver of its record again and restores its driver_override.
    fn give_back(&self, address: PciAddress) -> Result<Option<String>> {
        let function = self.nvme(address)?;
        let record = self.recorded(address).unwrap_or_default();
        self.wish(address, &record.wish)?;
        self.release(&function)?;
        match record.before.as_deref() {
            // It had no driver before.
            Some("") => {}
            before => self.offer(address, before.unwrap_or_default())?,
        }
        self.forget(address);
        Ok(self.driver(address))
    }

    /// Takes the function from its driver and offers it to `lender`.
    fn move_to(&self, function: &SysfsFunction, lender: LendingDriver) -> Result<()> {
        self.wish(function.address, lender.name())?;
        self.release(function)?;
        self.offer(function.address, lender.name())
    }

    /// Offers a function without a driver to the one that its wish or its identity names, then to `driver` by name if
    /// no other has taken it.
    fn offer(&self, address: PciAddress, driver: &str) -> Result<()> {
        let line = format!("{address}\n");
        self.write("sys/bus/pci/drivers_probe", &line)?;
        match self.driver(address).is_none() && !driver.is_empty() {
            true => self.write(format!("sys/bus/pci/drivers/{driver}/bind"), &line),
            false => Ok(()),
        }
    }

    /// Says which driver alone may take the function; a line feed takes the wish back.
    fn wish(&self, address: PciAddress, driver: &str) -> Result<()> {
        let path = format!("sys/bus/pci/devices/{address}/driver_override");
        self.write(path, &format!("{driver}\n"))
    }

    fn release(&self, function: &SysfsFunction) -> Result<()> {
        let address = function.address;
        match self.driver(address) {
            Some(driver) => self.write(
                format!("sys/bus/pci/drivers/{driver}/unbind"),
                &format!("{address}\n"),
            ),
            None => Ok(()),
        }
    }

    fn write(&self, path: impl AsRef<Path>, text: &str) -> Result<()> {
        let path = self.path(path);
        let opened = fs::OpenOptions::new()
            .write(true)
            .truncate(true)
            .open(&path);
        opened
            .and_then(|mut file| io::Write::write_all(&mut file, text.as_bytes()))
            .map_err(|source| refused(&path, source))
    }
}
