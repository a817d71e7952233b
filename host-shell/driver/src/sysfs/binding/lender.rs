//! Drivers of the kernel that lend controllers to programs.

use crate::sysfs::PciAddress;

/// A driver of the kernel that lends a controller to a program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LendingDriver {
    /// vfio-pci, for `vfio:BDF`.
    #[default]
    Vfio,
    /// This project's module nvme_gpu, for `kmod:BDF`.
    Module,
}

impl LendingDriver {
    const ALL: [Self; 2] = [Self::Vfio, Self::Module];

    /// Returns its name as a driver.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vfio => "vfio-pci",
            Self::Module => "nvme_gpu",
        }
    }

    /// Returns the node by which a program opens the controller at `address`.
    pub fn node(self, address: PciAddress, group: Option<u32>) -> String {
        match (self, group) {
            (Self::Vfio, Some(group)) => format!("/dev/vfio/{group}"),
            (Self::Vfio, None) => "/dev/vfio".to_owned(),
            (Self::Module, _) => format!("/dev/nvme-gpu-{address}"),
        }
    }

    /// Returns the entry for the driver called `name`.
    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.name() == name)
    }
}
