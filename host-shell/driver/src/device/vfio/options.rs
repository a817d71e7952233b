//! The text after `vfio:`: an address, and options after `?`.

use crate::error::{Error, Result};
use crate::sysfs::PciAddress;

/// The kernel's interface to the IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IommuInterface {
    /// VFIO's groups and its type 1 IOMMU.
    Type1,
    /// iommufd, with the device's own node.
    Iommufd,
}

/// Parses a controller: its address and the interface; `None` selects iommufd where it is available, else type
/// 1.
pub fn controller(text: &str) -> Result<(PciAddress, Option<IommuInterface>)> {
    let (address, option) = split(text)?;
    let iommu = match option {
        None | Some("iommu=type1") => Some(IommuInterface::Type1),
        Some("iommu=iommufd") => Some(IommuInterface::Iommufd),
        Some("iommu=auto") => None,
        Some(other) => {
            return Err(Error::usage(
                format!("'{other}' is no option of vfio:"),
                "write iommu=type1, iommu=iommufd or iommu=auto, once",
            ));
        }
    };
    Ok((address, iommu))
}

/// Parses the BAR of a peer: the function's address, and the BAR's number.
pub fn bar(text: &str) -> Result<(PciAddress, u32)> {
    let (address, option) = split(text)?;
    let number = option.and_then(|option| option.strip_prefix("bar="));
    match number.and_then(|number| number.parse().ok()) {
        Some(number @ 0..=5) => Ok((address, number)),
        _ => Err(Error::usage(
            format!("'{text}' names no BAR"),
            "write vfio:BDF?bar=N with a number from 0 to 5",
        )),
    }
}

fn split(text: &str) -> Result<(PciAddress, Option<&str>)> {
    let (address, option) = match text.split_once('?') {
        Some((address, option)) => (address, Some(option)),
        None => (text, None),
    };
    let address = address
        .parse()
        .map_err(|cause: String| Error::usage(cause, "`nvme-gpu list` shows the controllers"))?;
    Ok((address, option))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_controller_has_at_most_one_option() {
        for (text, iommu) in [
            ("0000:01:00.0", Some(IommuInterface::Type1)),
            ("01:00.0?iommu=type1", Some(IommuInterface::Type1)),
            ("0000:01:00.0?iommu=iommufd", Some(IommuInterface::Iommufd)),
            ("0000:01:00.0?iommu=auto", None),
        ] {
            let (address, found) = controller(text).unwrap();
            assert_eq!(
                (address.to_string().as_str(), found),
                ("0000:01:00.0", iommu)
            );
        }
        for option in [
            "",
            "iommu",
            "iommu=",
            "iommu=TYPE1",
            "bar=2",
            "iommu=auto&iommu=auto",
        ] {
            let error = controller(&format!("0000:01:00.0?{option}")).unwrap_err();
            assert!(matches!(error, Error::Usage { .. }), "{option}: {error}");
            assert!(error.remedy().contains("iommu=iommufd"), "{option}");
        }
        assert!(controller("x?iommu=auto").is_err());
    }

    #[test]
    fn a_bar_has_a_number() {
        let (address, number) = bar("0000:01:00.0?bar=2").unwrap();
        assert_eq!((address.to_string().as_str(), number), ("0000:01:00.0", 2));
        for text in [
            "0000:01:00.0",
            "0000:01:00.0?bar=6",
            "0000:01:00.0?bar=x",
            "?bar=1",
        ] {
            assert!(bar(text).is_err(), "{text}");
        }
    }
}
