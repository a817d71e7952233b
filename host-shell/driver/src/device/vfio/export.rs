//! BARs of other functions, as VFIO exports them: dma-bufs that iommufd and the module nvme_gpu map (Linux 6.19).

use super::function::{lent, present};
use super::inner::{region, set_command};
use super::{ioctl, iommufd, options};
use crate::dma::pages::DmaPages;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::pci::{COMMAND_MEMORY, COMMAND_NO_INTX};
use crate::sysfs::{PciAddress, SysfsHost};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, Weak};
use vfio_bindings::bindings::vfio::VFIO_PCI_CONFIG_REGION_INDEX;

/// Functions that this process has open for their BARs. A function can be opened only once.
static OPEN: Mutex<BTreeMap<PciAddress, Weak<File>>> = Mutex::new(BTreeMap::new());

/// Maps `bytes` bytes of a BAR from `offset` on into this process, and exports them as a dma-buf for
/// controllers. `text` is `BDF?bar=N`: a function of any kind that is bound to vfio-pci.
///
/// The function stays open until all memory mapped from it is dropped; no other program can open it before.
/// Its bus mastering stays off meanwhile.
///
/// # Errors
/// [`Error::Usage`] for text that names no BAR, and for bytes outside of it; [`Error::Environment`], with the
/// remedy, for a function that VFIO does not have, and for a kernel that exports no BARs.
pub fn bar(text: &str, offset: u64, bytes: usize) -> Result<DmaPages> {
    let (address, number) = options::bar(text)?;
    let device = open(address)?;
    let info = region(&device, number)?;
    let end = offset.saturating_add(bytes as u64);
    if info.mappable_from(offset).is_none_or(|area| end > area.end) {
        return Err(Error::usage(
            format!(
                "BAR {number} of {address} has no {bytes} bytes from {offset} on that can be mapped"
            ),
            format!("it has {} bytes; use fewer, or another BAR", info.size),
        ));
    }
    let dma_buf = ioctl::dma_buf(&device, number, offset..end).map_err(not_exported)?;
    DmaPages::of_bar(device, info.offset + offset, bytes, dma_buf)
}

/// Opens the function at `address`, or shares the descriptor that this process already has.
fn open(address: PciAddress) -> Result<Arc<File>> {
    let mut open = lock(&OPEN);
    if let Some(device) = open.get(&address).and_then(Weak::upgrade) {
        return Ok(device);
    }
    let host = SysfsHost::here();
    let function = present(&host, address)?;
    let remedy = format!("bind it to vfio-pci: `driverctl set-override {address} vfio-pci`");
    lent(&function, remedy)?;
    let device = Arc::new(iommufd::open_apart(&host, &function)?);
    let config = region(&device, VFIO_PCI_CONFIG_REGION_INDEX)?;
    // A region that is exported while memory is disabled is revoked at once.
    set_command(&device, config.offset, COMMAND_MEMORY | COMMAND_NO_INTX)
        .map_err(Error::system("writing the command register"))?;
    open.insert(address, Arc::downgrade(&device));
    Ok(device)
}

fn not_exported(source: io::Error) -> Error {
    match source.raw_os_error() {
        Some(libc::ENOTTY | libc::EOPNOTSUPP) => Error::environment(
            "this kernel's VFIO exports no BARs as dma-bufs",
            "use Linux 6.19 or newer with CONFIG_PCI_P2PDMA; or name the BAR by its file in sysfs, and leave \
             iommu=iommufd out",
        ),
        _ => Error::system("VFIO_DEVICE_FEATURE_DMA_BUF")(source),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_exports_nothing_is_told_from_one_that_refuses() {
        let error = |errno| not_exported(io::Error::from_raw_os_error(errno));
        assert!(error(libc::ENOTTY).remedy().contains("6.19"));
        assert!(error(libc::ENODEV).to_string().contains("FEATURE_DMA_BUF"));
    }

    #[test]
    fn what_is_not_there_is_refused() {
        for text in ["0000:01:00.0", "ffff:ff:1f.7?bar=2"] {
            assert!(bar(text, 0, 4096).is_err(), "{text}");
        }
    }
}
