//! PCI functions that VFIO can open: their checks before any descriptor is opened, so that a user learns what to
//! bind or to switch on rather than that an ioctl failed.

use crate::error::{Error, Result};
use crate::pci;
use crate::sysfs::{PciAddress, SysfsFunction, SysfsHost};

/// Returns the controller at `address`, if VFIO can have it.
pub fn controller(host: &SysfsHost, address: PciAddress) -> Result<SysfsFunction> {
    let function = present(host, address)?;
    if !function.is_nvme() {
        return Err(Error::usage(
            format!(
                "{address} is no NVMe controller: its class is {:06x}, not {:06x}",
                function.config.class,
                pci::CLASS_NVME
            ),
            "`nvme-gpu list` shows the controllers",
        ));
    }
    lent(&function, format!("run `nvme-gpu bind {address}` as root"))?;
    Ok(function)
}

/// Returns the function at `address`.
pub fn present(host: &SysfsHost, address: PciAddress) -> Result<SysfsFunction> {
    host.function(address).ok_or_else(|| {
        Error::environment(
            format!("there is no PCI function {address}"),
            "`nvme-gpu list` shows the controllers",
        )
    })
}

/// # Errors
/// [`Error::Environment`] for a function that VFIO cannot have; `remedy` is for one with another driver.
pub fn lent(function: &SysfsFunction, remedy: String) -> Result<()> {
    let address = function.address;
    if function.group.is_none() {
        return Err(Error::environment(
            format!("{address} is in no IOMMU group: the IOMMU is off"),
            "switch it on (`nvme-gpu doctor` says how)",
        ));
    }
    match function.driver.as_deref() {
        Some("vfio-pci") => Ok(()),
        Some(other) => Err(Error::environment(
            format!("{address} is bound to the driver {other}"),
            remedy,
        )),
        None => Err(Error::environment(
            format!("{address} is bound to no driver"),
            remedy,
        )),
    }
}
