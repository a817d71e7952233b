//! PCIe links: their trained and possible rates.

use nvme_driver::pci::PcieLink;
use nvme_driver::sysfs::SysfsFunction;
use serde::Serialize;

/// A speed and a width.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LinkRate {
    /// PCIe generation.
    pub generation: u8,
    /// Lanes.
    pub lanes: u8,
    /// 10^9 bytes a second in each direction, before the headers of packets; `None` for an unknown generation.
    pub gb_per_s: Option<f64>,
}

/// The link above a device.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LinkState {
    /// Rate that the link was trained to.
    pub trained: Option<LinkRate>,
    /// Rate that both ends support, as far as each reports it.
    pub possible: Option<LinkRate>,
}

impl From<PcieLink> for LinkRate {
    fn from(link: PcieLink) -> Self {
        let rate = link.bytes_per_second();
        Self {
            generation: link.generation,
            lanes: link.lanes,
            gb_per_s: rate.map(|rate| (rate / 1e6).round() / 1e3),
        }
    }
}

impl LinkState {
    /// Returns the link above `function`, whose other end is `port`; `None` if neither reports a rate.
    pub fn above(function: &SysfsFunction, port: Option<&SysfsFunction>) -> Option<Self> {
        let possible = match (function.capable, port.and_then(|port| port.capable)) {
            (Some(one), Some(other)) => Some(PcieLink {
                generation: one.generation.min(other.generation),
                lanes: one.lanes.min(other.lanes),
            }),
            (one, other) => one.or(other),
        };
        let trained = function.trained;
        (trained.is_some() || possible.is_some()).then_some(Self {
            trained: trained.map(LinkRate::from),
            possible: possible.map(LinkRate::from),
        })
    }

    /// True if the link was trained to less than both ends support.
    pub fn is_downtrained(&self) -> bool {
        self.trained
            .zip(self.possible)
            .is_some_and(|(now, most)| now.generation < most.generation || now.lanes < most.lanes)
    }
}

impl std::fmt::Display for LinkRate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "gen{} x{}", self.generation, self.lanes)?;
        match self.gb_per_s {
            Some(rate) => write!(f, " {rate:.1} GB/s"),
            None => Ok(()),
        }
    }
}

impl std::fmt::Display for LinkState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.trained, self.possible) {
            (Some(now), Some(most)) if self.is_downtrained() => {
                write!(f, "{now}, downtrained: both ends can do {most}")
            }
            (Some(now), _) => write!(f, "{now}"),
            (None, Some(most)) => write!(f, "not trained, can do {most}"),
            (None, None) => Ok(()),
        }
    }
}
