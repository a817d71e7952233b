//! The tiers that a controller allows through VFIO and through the module nvme_gpu, and the reason for each that it
//! does not allow: for `topology`, `doctor` and `witness`.

use crate::nvidia::{self, GpuProduct, NvidiaDriver, RawAddresses};
use crate::sharing::MemorySharing;
use crate::topology::{PathRelation, TurningPoint};
use nvme_driver::sysfs::{GroupNeighbour, LendingDriver, SysfsFunction, SysfsHost, UsageCensus};
use serde::Serialize;
use std::cmp::Ordering;

/// Verdict on a feature: works, does not, or unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FeatureVerdict {
    /// The feature works, as far as files of the system show.
    Yes,
    /// Only a try shows whether it works.
    Unknown,
    /// The feature does not work.
    No,
}

/// Verdict with its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReasonedVerdict {
    /// The verdict.
    pub allowed: FeatureVerdict,
    /// Reason and, unless the feature works, the change that would make it work.
    pub why: String,
}

impl ReasonedVerdict {
    fn yes(why: impl Into<String>) -> Self {
        Self::new(FeatureVerdict::Yes, why)
    }

    fn unknown(why: impl Into<String>) -> Self {
        Self::new(FeatureVerdict::Unknown, why)
    }

    fn no(why: impl Into<String>) -> Self {
        Self::new(FeatureVerdict::No, why)
    }

    fn new(allowed: FeatureVerdict, why: impl Into<String>) -> Self {
        let why = why.into();
        Self { allowed, why }
    }

    /// Returns the worse of this verdict and `more`, for a feature that needs both; if they are equally bad, with both
    /// reasons.
    fn and(self, more: Self) -> Self {
        match self.allowed.cmp(&more.allowed) {
            Ordering::Greater => self,
            Ordering::Less => more,
            Ordering::Equal if self.allowed == FeatureVerdict::Yes => self,
            Ordering::Equal => Self::new(self.allowed, format!("{}; {}", self.why, more.why)),
        }
    }
}

/// Verdicts on driving a controller at all, by each driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DriverVerdicts {
    /// Verdict for `vfio:BDF`.
    pub vfio: ReasonedVerdict,
    /// Verdict for `kmod:BDF`.
    pub kmod: ReasonedVerdict,
}

/// A tier, and the verdict of each driver on whether a controller and a GPU allow it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TierVerdicts {
    /// 0 to 3.
    pub tier: u8,
    /// Verdict for `vfio:BDF`.
    pub vfio: ReasonedVerdict,
    /// Verdict for `kmod:BDF`.
    pub kmod: ReasonedVerdict,
}

/// Position of a GPU and a controller in the topology.
#[derive(Clone, Copy, Debug)]
pub struct PairPosition {
    /// The nearest thing above both.
    pub relation: PathRelation,
    /// The turning point of transfers between the two.
    pub route: TurningPoint,
    /// Memory that the GPU shares with the processor.
    pub sharing: Option<MemorySharing>,
}

/// Describes a tier in words.
pub fn meaning(tier: u8) -> &'static str {
    match tier {
        0 => "a host thread passes doorbells on, data in host memory",
        1 => "the GPU rings doorbells, data in host memory",
        2 => "the GPU rings doorbells, data in GPU memory",
        _ => "the GPU rings doorbells, rings and data in GPU memory",
    }
}

/// Returns the verdicts on driving the controller by CPU threads, through each driver.
pub fn ways(host: &SysfsHost, function: &SysfsFunction, census: &UsageCensus) -> DriverVerdicts {
    let usage = host.usage_seen(function, census);
    if !usage.holders.is_empty() {
        let why = format!("in use: {}", usage.list());
        return DriverVerdicts {
            vfio: ReasonedVerdict::no(why.clone()),
            kmod: ReasonedVerdict::no(why),
        };
    }
    DriverVerdicts {
        vfio: by_vfio(host, function),
        kmod: by_module(host, function),
    }
}

/// Returns the verdict for a driver: the function is bound to it, or needs to be bound first.
fn bound(function: &SysfsFunction, lender: LendingDriver) -> ReasonedVerdict {
    if function.driver.as_deref() == Some(lender.name()) {
        return ReasonedVerdict::yes(format!("bound to {}", lender.name()));
    }
    let more = match lender {
        LendingDriver::Vfio => "",
        LendingDriver::Module => " --driver nvme_gpu",
    };
    ReasonedVerdict::yes(format!("after `nvme-gpu bind{more} {}`", function.address))
}

fn by_vfio(host: &SysfsHost, function: &SysfsFunction) -> ReasonedVerdict {
    if function.group.is_none() {
        return ReasonedVerdict::no("the IOMMU is off, which VFIO needs");
    }
    if !host.exists("sys/bus/pci/drivers/vfio-pci") || !host.exists("dev/vfio/vfio") {
        return ReasonedVerdict::no("vfio-pci is not loaded: `modprobe vfio-pci`");
    }
    let mut others = host.neighbours(function);
    others.retain(GroupNeighbour::is_in_the_way);
    if !others.is_empty() {
        return ReasonedVerdict::no(format!(
            "its group is shared with {}",
            GroupNeighbour::list(&others)
        ));
    }
    bound(function, LendingDriver::Vfio)
}

fn by_module(host: &SysfsHost, function: &SysfsFunction) -> ReasonedVerdict {
    if !host.exists("sys/bus/pci/drivers/nvme_gpu") {
        return ReasonedVerdict::no(
            "the module nvme_gpu is not loaded: `cargo xtask kmod install`",
        );
    }
    let is_unsafe = host.text("sys/module/nvme_gpu/parameters/unsafe");
    if function.group.is_none() && is_unsafe.is_none_or(|text| text.trim() != "Y") {
        return ReasonedVerdict::no("the IOMMU is off, without which the module maps nothing");
    }
    let others = host.neighbours(function);
    if others.iter().any(GroupNeighbour::is_in_the_way) {
        return ReasonedVerdict::no(format!(
            "its group is shared with {}, whose memory would be within its reach",
            GroupNeighbour::list(&others)
        ));
    }
    bound(function, LendingDriver::Module)
}

/// Returns the tiers of a GPU and a controller; `base` has the verdicts on driving the controller by CPU threads.
pub fn tiers(
    host: &SysfsHost,
    base: &DriverVerdicts,
    gpu: &SysfsFunction,
    between: PairPosition,
) -> Vec<TierVerdicts> {
    let driver = NvidiaDriver::loaded(host);
    (0..=3)
        .map(|tier| {
            let needs = |peer: ReasonedVerdict| match &driver {
                None => ReasonedVerdict::no("the NVIDIA driver is not loaded"),
                Some(driver) => of_driver(tier, driver)
                    .and(of_sharing(tier, between.sharing))
                    .and(peer),
            };
            TierVerdicts {
                tier,
                vfio: base.vfio.clone().and(needs(match tier {
                    0 | 1 => ReasonedVerdict::yes(""),
                    2 => ReasonedVerdict::no("VFIO cannot map memory of a GPU: kmod:BDF can"),
                    _ => rings(),
                })),
                kmod: base.kmod.clone().and(needs(match tier {
                    0 | 1 => ReasonedVerdict::yes(""),
                    2 => exports(host, gpu, driver.as_ref()).and(arrives(between)),
                    _ => rings(),
                })),
            }
        })
        .collect()
}

/// Returns the verdict of the GPU's driver on the doorbells of a tier.
fn of_driver(tier: u8, driver: &NvidiaDriver) -> ReasonedVerdict {
    if tier == 0 || driver.registers_bars() {
        return ReasonedVerdict::yes("");
    }
    ReasonedVerdict::unknown(format!(
        "driver {} may refuse to register a mapped BAR (open-gpu-kernel-modules, issue 732): `nvme-gpu demo -d` tries it",
        driver.version
    ))
}

/// Returns the verdict on a tier of a GPU that shares memory with the processor.
fn of_sharing(tier: u8, sharing: Option<MemorySharing>) -> ReasonedVerdict {
    match (tier, sharing) {
        (0 | 1, _) | (_, None) => ReasonedVerdict::yes(""),
        (_, Some(MemorySharing::Integrated)) => ReasonedVerdict::no(
            "the GPU is integrated: its memory is the host's, where tier 1 has the data already, so tier 1 is the way",
        ),
        (_, Some(MemorySharing::HostPageTables)) => ReasonedVerdict::unknown(
            "the GPU reads memory of the host coherently, by the processor's page tables: tier 1 is the way, and \
             nothing shows yet that tier 2 is faster",
        ),
    }
}

fn rings() -> ReasonedVerdict {
    ReasonedVerdict::no(
        "no drive is driven by rings in GPU memory yet: they run in tests without a drive (docs/tier3.md)",
    )
}

/// Returns the verdict on exporting GPU memory to another device.
fn exports(
    host: &SysfsHost,
    gpu: &SysfsFunction,
    driver: Option<&NvidiaDriver>,
) -> ReasonedVerdict {
    let Some(driver) = driver else {
        return ReasonedVerdict::no("the NVIDIA driver is not loaded");
    };
    if !driver.open {
        return ReasonedVerdict::no(
            "the proprietary modules export no GPU memory: the open kernel modules do",
        );
    }
    let product = match GpuProduct::of(host, gpu) {
        GpuProduct::GeForce => ReasonedVerdict::no(
            "a GeForce: NVIDIA offers GPUDirect RDMA for Tesla and Quadro only, and CUDA's library refuses it",
        ),
        GpuProduct::Professional => ReasonedVerdict::yes(""),
        GpuProduct::Unnamed => ReasonedVerdict::unknown("the driver does not name this GPU"),
    };
    let addresses = match driver.raw_addresses() {
        RawAddresses::Reported => ReasonedVerdict::unknown(
            "driver 595.84 is reported to export unmapped addresses of BAR1 (open-gpu-kernel-modules, issue 1324): \
             the module maps or refuses them",
        ),
        _ => ReasonedVerdict::yes(""),
    };
    let room = match nvidia::is_whole(gpu) {
        Some(false) => ReasonedVerdict::unknown(
            "BAR1 shows a part of the GPU's memory: buffers outside of it are refused",
        ),
        _ => ReasonedVerdict::yes(""),
    };
    product.and(addresses).and(room)
}

/// Returns the verdict on whether the drive's transfers reach the GPU.
fn arrives(between: PairPosition) -> ReasonedVerdict {
    match (between.route, between.relation) {
        (TurningPoint::Switch, _) => ReasonedVerdict::yes(""),
        (_, PathRelation::AcrossNodes) => ReasonedVerdict::unknown(
            "the way leads from one socket to the other: transfers between peers may be slow or lost",
        ),
        (TurningPoint::Unknown, _) => {
            ReasonedVerdict::unknown("ACS of the switch is not known: run this as root")
        }
        (TurningPoint::RootComplex, _) => ReasonedVerdict::unknown(
            "transfers between peers pass the root complex, which not every processor forwards: `nvme-gpu p2p` shows it",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_needs_two_things_is_as_good_as_the_worse_one() {
        let (yes, unknown, no) = (
            || ReasonedVerdict::yes("a"),
            || ReasonedVerdict::unknown("b"),
            || ReasonedVerdict::no("c"),
        );
        for (one, other, allowed, why) in [
            (yes(), ReasonedVerdict::yes("z"), FeatureVerdict::Yes, "a"),
            (yes(), unknown(), FeatureVerdict::Unknown, "b"),
            (
                unknown(),
                ReasonedVerdict::unknown("d"),
                FeatureVerdict::Unknown,
                "b; d",
            ),
            (unknown(), no(), FeatureVerdict::No, "c"),
            (no(), unknown(), FeatureVerdict::No, "c"),
            (no(), yes(), FeatureVerdict::No, "c"),
            (no(), ReasonedVerdict::no("e"), FeatureVerdict::No, "c; e"),
        ] {
            let both = one.and(other);
            assert_eq!((both.allowed, both.why.as_str()), (allowed, why));
        }
    }
}
