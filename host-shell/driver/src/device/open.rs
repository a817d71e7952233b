//! Opens a device by the text of `--device`: the kind before the colon selects the transport, and a name that
//! belongs to Linux or lspci is answered with the name to write instead.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::sysfs::{PciAddress, SysfsHost};
use std::sync::Arc;

/// The remedy for a name that is none.
const NAMES: &str =
    "write sim:PATH, sim:mem?size=1GiB, sim:null, vfio:BDF, kmod:BDF or vfio-user:SOCKET";

/// Opens the device that `text` names: `sim:PATH[?option=value&...]`, `sim:null`, `sim:mem`,
/// `vfio:BDF[?iommu=type1|iommufd|auto]`, `kmod:BDF`, `vfio-user:SOCKET`.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// let device = nvme_driver::open("sim:null?size=1TiB").unwrap();
/// assert_eq!(device.name(), "sim:null?size=1TiB");
/// # }
/// let error = nvme_driver::open("drive").err().unwrap();
/// assert_eq!(error.to_string(), "'drive' names no device");
/// assert!(error.remedy().contains("vfio:BDF"));
/// ```
///
/// # Errors
/// [`Error::Usage`] for text that names none, [`Error::File`] for an image or socket that cannot be
/// opened, [`Error::Device`] and [`Error::Gone`] for a device that cannot be driven.
pub fn open(text: &str) -> Result<Arc<dyn Device>> {
    if let Some(error) = meant(&SysfsHost::here(), text) {
        return Err(error);
    }
    let Some((kind, rest)) = text.split_once(':') else {
        let cause = format!("'{text}' names no device");
        return Err(match std::path::Path::new(text).is_file() {
            true => Error::usage(
                cause,
                format!("write sim:{text} to simulate a drive on this file"),
            ),
            false => Error::usage(cause, NAMES),
        });
    };
    match kind {
        #[cfg(feature = "sim")]
        "sim" => Ok(crate::device::sim::open(rest)?),
        #[cfg(not(feature = "sim"))]
        "sim" => Err(Error::usage(
            "this build has no simulator",
            "build it with the feature `sim`",
        )),
        #[cfg(feature = "vfio")]
        "vfio" => crate::device::vfio::open(rest),
        #[cfg(not(feature = "vfio"))]
        "vfio" => Err(Error::usage(
            "this build has no VFIO",
            "build it with the feature `vfio`",
        )),
        #[cfg(feature = "vfio-user")]
        "vfio-user" => crate::device::vfio_user::open(rest),
        #[cfg(not(feature = "vfio-user"))]
        "vfio-user" => Err(Error::usage(
            "this build has no vfio-user",
            "build it with the feature `vfio-user`",
        )),
        #[cfg(feature = "vfio")]
        "kmod" => crate::device::kmod::open(rest),
        #[cfg(not(feature = "vfio"))]
        "kmod" => Err(Error::usage(
            format!("'{kind}:{rest}': this build has no {kind} devices"),
            "build it with the feature `vfio`",
        )),
        _ => Err(Error::usage(
            format!("'{kind}' is an unknown kind of device"),
            NAMES,
        )),
    }
}

/// Returns the usage error for a name that Linux or lspci uses, not this program: a PCI address or a node.
pub fn meant(host: &SysfsHost, text: &str) -> Option<Error> {
    let cause = format!("'{text}' names no device");
    if let Ok(address) = text.parse::<PciAddress>() {
        let by = match host.function(address).map(|one| one.driver) {
            None => format!(
                "write vfio:{address} or kmod:{address}; `nvme-gpu list` shows what is there"
            ),
            Some(driver) => match driver.as_deref() {
                Some("nvme_gpu") => format!("write kmod:{address}"),
                Some("vfio-pci") => format!("write vfio:{address}"),
                _ => format!("`nvme-gpu bind {address}` as root, then write vfio:{address}"),
            },
        };
        return Some(Error::usage(cause, by));
    }
    let name = text.strip_prefix("/dev/").unwrap_or(text);
    let rest = name
        .strip_prefix("nvme")
        .or_else(|| name.strip_prefix("ng"))?;
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    let is_node = digits > 0 && matches!(rest[digits..].bytes().next(), None | Some(b'n'));
    if !is_node {
        return None;
    }
    let mut all = host.controllers().into_iter();
    let found = all.find(|one| {
        let is_controller = one.controller.as_deref() == Some(&format!("nvme{}", &rest[..digits]));
        let disks = host.disks(one);
        let disk = format!("nvme{rest}");
        let is_disk = disks.iter().any(|one| {
            let part = disk.strip_prefix(one.as_str());
            part.is_some_and(|part| part.is_empty() || part.starts_with('p'))
        });
        if rest.len() == digits {
            is_controller
        } else {
            is_disk
        }
    });
    let remedy = match found {
        Some(function) => {
            let address = function.address;
            format!(
                "that is the kernel's node of the controller {address}: `nvme-gpu bind {address}` as root takes it from \
                 the kernel, then write vfio:{address}"
            )
        }
        None => format!(
            "a node of the kernel's cannot be driven; `nvme-gpu list` shows the PCI addresses of controllers, then {NAMES}"
        ),
    };
    Some(Error::usage(cause, remedy))
}

/// Opens a device as [`open`] does, for reading only: an image of the simulator is shared with other readers, and is
/// not created. Other devices are opened as by [`open`].
///
/// # Errors
/// As [`open`].
pub fn open_reading(text: &str) -> Result<Arc<dyn Device>> {
    #[cfg(feature = "sim")]
    if let Some(rest) = text.strip_prefix("sim:") {
        return crate::device::sim::open_reading(rest);
    }
    open(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sysfs::testing::Tree;

    const BDF: &str = "0000:01:00.0";

    #[test]
    fn a_node_or_an_address_gets_the_name_that_was_meant() {
        let said = |tree: &Tree, text: &str| {
            meant(&tree.host(), text).map(|error| format!("{error}: {}", error.remedy()))
        };
        let tree = Tree::new();
        tree.controller(BDF, "nvme", 7);
        tree.disk(BDF, "nvme0n1", "259:0", &[]);
        for text in [
            "/dev/nvme0",
            "nvme0",
            "/dev/nvme0n1",
            "/dev/nvme0n1p2",
            "/dev/ng0n1",
        ] {
            let said = said(&tree, text).unwrap();
            assert!(
                said.contains(&format!("'{text}' names no device")),
                "{said}"
            );
            assert!(said.contains(&format!("`nvme-gpu bind {BDF}`")), "{said}");
            assert!(said.ends_with(&format!("write vfio:{BDF}")), "{said}");
        }
        assert!(
            said(&tree, "/dev/nvme3")
                .unwrap()
                .contains("`nvme-gpu list`")
        );
        assert!(
            said(&tree, "01:00.0")
                .unwrap()
                .contains(&format!("`nvme-gpu bind {BDF}`"))
        );
        assert!(
            said(&tree, "09:00.0")
                .unwrap()
                .contains("write vfio:0000:09:00.0 or kmod:")
        );
        for text in ["nvme", "sim:nvme0", "nvmefoo", "vfio:0000:01:00.0", "drive"] {
            assert_eq!(said(&tree, text), None, "{text}");
        }
        for (driver, name) in [("vfio-pci", "vfio"), ("nvme_gpu", "kmod")] {
            let tree = Tree::new();
            tree.controller(BDF, driver, 7);
            let said = said(&tree, BDF).unwrap();
            assert!(said.ends_with(&format!("write {name}:{BDF}")), "{said}");
        }
    }
}
