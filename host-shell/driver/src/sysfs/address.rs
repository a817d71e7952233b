//! The address of a function on PCI.

use std::fmt;
use std::str::FromStr;

/// Domain, bus, device and function, written `0000:01:00.0`. The domain may be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            domain,
            bus,
            device,
            function,
        } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

impl FromStr for PciAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse(text).ok_or_else(|| {
            format!("'{text}' is not a PCI address: write it as 0000:01:00.0 or 01:00.0")
        })
    }
}

fn parse(text: &str) -> Option<PciAddress> {
    let (front, function) = text.split_once('.')?;
    let (front, device) = front.rsplit_once(':')?;
    let (domain, bus) = front.rsplit_once(':').unwrap_or(("0000", front));
    let hex = |text: &str, digits: usize, most: u32| {
        let fits =
            (1..=digits).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
        let value = u32::from_str_radix(text, 16).ok()?;
        (fits && value <= most).then_some(value)
    };
    Some(PciAddress {
        domain: hex(domain, 8, u32::MAX)?,
        bus: hex(bus, 2, 0xFF)? as u8,
        device: hex(device, 2, 0x1F)? as u8,
        function: hex(function, 1, 7)? as u8,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written_as_linux_does() {
        for (text, written) in [
            ("0000:01:00.0", "0000:01:00.0"),
            ("1:1f.7", "0000:01:1f.7"),
            ("10000:E1:00.0", "10000:e1:00.0"),
        ] {
            assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), written);
        }
        for text in [
            "",
            "01:00",
            "01:20.0",
            "01:00.8",
            "+1:00.0",
            "a:b:c:d.0",
            "../x:0.0",
            "nvme0",
        ] {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
    }
}
