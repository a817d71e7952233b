//! From the text of `--device` to a device.

use crate::device::Device;
use crate::error::{Error, Result};
use std::sync::Arc;

/// The remedy for a name that is none.
const NAMES: &str =
    "write sim:PATH, sim:mem?size=1GiB, sim:null, vfio:BDF, kmod:BDF or vfio-user:SOCKET";

/// Opens the device that `text` names: `sim:PATH[?option=value&...]`, `sim:null`, `sim:mem`,
/// `vfio:BDF[?iommu=type1|iommufd|auto]`, `kmod:BDF`, `vfio-user:SOCKET`.
///
/// ```
/// # #[cfg(feature = "sim")] {
/// let device = nvme_host::open("sim:null?size=1TiB").unwrap();
/// assert_eq!(device.name(), "sim:null?size=1TiB");
/// # }
/// let error = nvme_host::open("nvme0").err().unwrap();
/// assert_eq!(error.to_string(), "'nvme0' names no device");
/// assert!(error.remedy().contains("vfio:BDF"));
/// ```
///
/// # Errors
/// [`Error::Usage`] for text that names none, [`Error::File`] for an image or socket that cannot be
/// opened, [`Error::Device`] and [`Error::Gone`] for a device that cannot be driven.
pub fn open(text: &str) -> Result<Arc<dyn Device>> {
    let Some((kind, rest)) = text.split_once(':') else {
        return Err(Error::usage(format!("'{text}' names no device"), NAMES));
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
            format!("unknown kind of device '{kind}'"),
            NAMES,
        )),
    }
}

/// As [`open`], for reading only: an image of the simulator is shared with other readers, and is not
/// created. Other devices are opened as they are by [`open`].
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
