//! An open device of VFIO: its descriptor and its registers, shared by the handle and by the thread that returns
//! the device to the kernel when the system wants it back.

use super::bar0::MappedBar;
use super::group::VfioGroup;
use super::info::VfioRegion;
use super::ioctl;
use super::watch::ReturnEvent;
use crate::device::ring_memory::RingMemory;
use crate::dma::pages::host_page;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::pci::{self, COMMAND_MASTER, COMMAND_MEMORY, COMMAND_NO_INTX};
use crate::sysfs::PciAddress;
use nvme_core::spec::register::Cmbmsc;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, OnceLock, Weak};

/// The device and its group, as the handle, the watch and the controller memory use them.
pub(super) struct VfioInner {
    pub(super) address: PciAddress,
    pub(super) bar: MappedBar,
    /// Descriptor of the device; `None` once the device was returned to the kernel.
    pub(super) file: Mutex<Option<File>>,
    pub(super) config_offset: u64,
    pub(super) can_reset: bool,
    pub(super) group: Arc<VfioGroup>,
    /// Value of CMBMSC once the controller memory buffer is in use; kept because a reset of the function
    /// clears the register.
    pub(super) cmb_control: OnceLock<Cmbmsc>,
    pub(super) cmb: Mutex<Weak<RingMemory>>,
}

pub(super) fn region(file: &File, index: u32) -> Result<VfioRegion> {
    let answer =
        ioctl::region_info(file, index).map_err(Error::system("VFIO_DEVICE_GET_REGION_INFO"))?;
    VfioRegion::parse(&answer, host_page() as u64)
        .ok_or_else(|| Error::environment("VFIO describes no such region", "use another kernel"))
}

pub(super) fn set_command(file: &File, config_offset: u64, value: u16) -> io::Result<()> {
    file.write_all_at(&value.to_le_bytes(), config_offset + pci::offset::COMMAND)
}

impl VfioInner {
    /// Runs `call` on the device's descriptor, or returns an error once the device was returned to the
    /// kernel.
    pub(super) fn with_file<T>(
        &self,
        name: &'static str,
        call: impl FnOnce(&File) -> io::Result<T>,
    ) -> Result<T> {
        match &*lock(&self.file) {
            Some(file) => call(file).map_err(Error::system(name)),
            None => Err(Error::Gone {
                cause: self
                    .bar
                    .gone()
                    .unwrap_or_else(|| format!("{} was given back", self.address)),
            }),
        }
    }

    pub(super) fn allow_dma(&self) -> Result<()> {
        let command = COMMAND_MEMORY | COMMAND_MASTER | COMMAND_NO_INTX;
        self.with_file("writing the command register", |file| {
            set_command(file, self.config_offset, command)
        })
    }

    /// Resets the function alone or with its bus; false when neither can be done.
    pub(super) fn reset(&self) -> Result<bool> {
        if self.can_reset {
            self.with_file("VFIO_DEVICE_RESET", ioctl::reset)?;
            return Ok(true);
        }
        self.with_file("VFIO_DEVICE_PCI_HOT_RESET", |file| {
            self.group.hot_reset(file)
        })
    }

    /// Returns the device to the kernel: stops accesses and DMA, and closes the descriptor that the kernel
    /// waits for.
    pub(super) fn let_go(&self, event: ReturnEvent) {
        let why = match event {
            ReturnEvent::Wanted => {
                "the system wants the device back (it is being unbound or removed)"
            }
            ReturnEvent::Failed => "the device reported an uncorrectable PCIe error",
        };
        let mut file = lock(&self.file);
        if let Some(file) = &*file {
            // The kernel clears it too, when the last descriptor closes.
            let _ = set_command(file, self.config_offset, COMMAND_MEMORY | COMMAND_NO_INTX);
        }
        // If the BAR cannot be unmapped, the kernel keeps waiting for this process, but the mapping reads as ones. No
        // store through it can reach the device any more.
        let _ = self.bar.let_go(&format!("{}: {why}", self.address));
        *file = None;
    }
}

impl Drop for VfioInner {
    fn drop(&mut self) {
        if let Some(file) = &*lock(&self.file) {
            // The kernel does the same when it closes the descriptor.
            let _ = set_command(file, self.config_offset, COMMAND_MEMORY | COMMAND_NO_INTX);
        }
    }
}
