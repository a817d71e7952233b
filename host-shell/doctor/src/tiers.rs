//! Which tiers a controller allows through VFIO and through the module nvme_gpu, and the reason for each that it does
//! not: for `topology`, `doctor` and `witness`.

use crate::nvidia::{self, Driver, Product, RawAddresses};
use crate::topology::{Relation, Route};
use nvme_driver::sysfs::{Census, Function, Host, Lender, Neighbour};
use serde::Serialize;
use std::cmp::Ordering;

/// Verdict on a feature: works, does not, or unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Allowed {
    /// As far as files of the system can say.
    Yes,
    /// Only a try shows it.
    Unknown,
    /// No.
    No,
}

/// Verdict with its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Answer {
    /// The verdict.
    pub allowed: Allowed,
    /// Reason and, unless the feature works, the change that would make it work.
    pub why: String,
}

impl Answer {
    fn yes(why: impl Into<String>) -> Self {
        Self::new(Allowed::Yes, why)
    }

    fn unknown(why: impl Into<String>) -> Self {
        Self::new(Allowed::Unknown, why)
    }

    fn no(why: impl Into<String>) -> Self {
        Self::new(Allowed::No, why)
    }

    fn new(allowed: Allowed, why: impl Into<String>) -> Self {
        let why = why.into();
        Self { allowed, why }
    }

    /// Returns the worse of this verdict and `more`, for a feature that needs both; if they are equally bad,
    /// with both reasons.
    fn and(self, more: Self) -> Self {
        match self.allowed.cmp(&more.allowed) {
            Ordering::Greater => self,
            Ordering::Less => more,
            Ordering::Equal if self.allowed == Allowed::Yes => self,
            Ordering::Equal => Self::new(self.allowed, format!("{}; {}", self.why, more.why)),
        }
    }
}

/// Verdicts on driving a controller at all, by each driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Ways {
    /// As `vfio:BDF`.
    pub vfio: Answer,
    /// As `kmod:BDF`.
    pub kmod: Answer,
}

/// A tier, and whether a controller and a GPU allow it by each way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tier {
    /// 0 to 3.
    pub tier: u8,
    /// As `vfio:BDF`.
    pub vfio: Answer,
    /// As `kmod:BDF`.
    pub kmod: Answer,
}

/// Position of a GPU and a controller in the topology.
#[derive(Clone, Copy, Debug)]
pub struct Between {
    /// The nearest thing above both.
    pub relation: Relation,
    /// The way of a peer's transfers.
    pub route: Route,
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
pub fn ways(host: &Host, function: &Function, census: &Census) -> Ways {
    let usage = host.usage_seen(function, census);
    if !usage.holders.is_empty() {
        let why = format!("in use: {}", usage.list());
        return Ways {
            vfio: Answer::no(why.clone()),
            kmod: Answer::no(why),
        };
    }
    Ways {
        vfio: by_vfio(host, function),
        kmod: by_module(host, function),
    }
}

/// Returns the verdict for a driver: the function is bound to it, or needs to be bound first.
fn bound(function: &Function, lender: Lender) -> Answer {
    if function.driver.as_deref() == Some(lender.name()) {
        return Answer::yes(format!("bound to {}", lender.name()));
    }
    let more = match lender {
        Lender::Vfio => "",
        Lender::Module => " --driver nvme_gpu",
    };
    Answer::yes(format!("after `nvme-gpu bind{more} {}`", function.address))
}

fn by_vfio(host: &Host, function: &Function) -> Answer {
    if function.group.is_none() {
        return Answer::no("the IOMMU is off, which VFIO needs");
    }
    if !host.exists("sys/bus/pci/drivers/vfio-pci") || !host.exists("dev/vfio/vfio") {
        return Answer::no("vfio-pci is not loaded: `modprobe vfio-pci`");
    }
    let mut others = host.neighbours(function);
    others.retain(Neighbour::is_in_the_way);
    if !others.is_empty() {
        return Answer::no(format!(
            "its group is shared with {}",
            Neighbour::list(&others)
        ));
    }
    bound(function, Lender::Vfio)
}

fn by_module(host: &Host, function: &Function) -> Answer {
    if !host.exists("sys/bus/pci/drivers/nvme_gpu") {
        return Answer::no("the module nvme_gpu is not loaded: `cargo xtask kmod install`");
    }
    let is_unsafe = host.text("sys/module/nvme_gpu/parameters/unsafe");
    if function.group.is_none() && is_unsafe.is_none_or(|text| text.trim() != "Y") {
        return Answer::no("the IOMMU is off, without which the module maps nothing");
    }
    let others = host.neighbours(function);
    if others.iter().any(Neighbour::is_in_the_way) {
        return Answer::no(format!(
            "its group is shared with {}, whose memory would be within its reach",
            Neighbour::list(&others)
        ));
    }
    bound(function, Lender::Module)
}

/// Returns the tiers of a GPU and a controller that CPU threads can drive as `base` says.
pub fn tiers(host: &Host, base: &Ways, gpu: &Function, between: Between) -> Vec<Tier> {
    let driver = Driver::loaded(host);
    (0..=3)
        .map(|tier| {
            let needs = |peer: Answer| match &driver {
                None => Answer::no("the NVIDIA driver is not loaded"),
                Some(driver) => of_driver(tier, driver).and(peer),
            };
            Tier {
                tier,
                vfio: base.vfio.clone().and(needs(match tier {
                    0 | 1 => Answer::yes(""),
                    2 => Answer::no("VFIO cannot map memory of a GPU: kmod:BDF can"),
                    _ => rings(),
                })),
                kmod: base.kmod.clone().and(needs(match tier {
                    0 | 1 => Answer::yes(""),
                    2 => exports(host, gpu, driver.as_ref()).and(arrives(between)),
                    _ => rings(),
                })),
            }
        })
        .collect()
}

/// Returns the verdict of the GPU's driver on the doorbells of a tier.
fn of_driver(tier: u8, driver: &Driver) -> Answer {
    if tier == 0 || driver.registers_bars() {
        return Answer::yes("");
    }
    Answer::unknown(format!(
        "driver {} may refuse to register a mapped BAR (open-gpu-kernel-modules, issue 732): `nvme-gpu demo -d` tries it",
        driver.version
    ))
}

fn rings() -> Answer {
    Answer::no(
        "no drive is driven by rings in GPU memory yet: they run in tests without a drive (docs/tier3.md)",
    )
}

/// Returns the verdict on exporting GPU memory to another device.
fn exports(host: &Host, gpu: &Function, driver: Option<&Driver>) -> Answer {
    let Some(driver) = driver else {
        return Answer::no("the NVIDIA driver is not loaded");
    };
    if !driver.open {
        return Answer::no(
            "the proprietary modules export no GPU memory: the open kernel modules do",
        );
    }
    let product = match Product::of(host, gpu) {
        Product::GeForce => Answer::no(
            "a GeForce: NVIDIA offers GPUDirect RDMA for Tesla and Quadro only, and CUDA's library refuses it",
        ),
        Product::Professional => Answer::yes(""),
        Product::Unnamed => Answer::unknown("the driver does not name this GPU"),
    };
    let addresses = match driver.raw_addresses() {
        RawAddresses::Reported => Answer::unknown(
            "driver 595.84 is reported to export unmapped addresses of BAR1 (open-gpu-kernel-modules, issue 1324): \
             the module maps or refuses them",
        ),
        _ => Answer::yes(""),
    };
    let room = match nvidia::is_whole(gpu) {
        Some(false) => Answer::unknown(
            "BAR1 shows a part of the GPU's memory: buffers outside of it are refused",
        ),
        _ => Answer::yes(""),
    };
    product.and(addresses).and(room)
}

/// Returns the verdict on whether the drive's transfers reach the GPU.
fn arrives(between: Between) -> Answer {
    match (between.route, between.relation) {
        (Route::Switch, _) => Answer::yes(""),
        (_, Relation::AcrossNodes) => Answer::unknown(
            "the way leads from one socket to the other: transfers between peers may be slow or lost",
        ),
        (Route::Unknown, _) => Answer::unknown("ACS of the switch is not known: run this as root"),
        (Route::RootComplex, _) => Answer::unknown(
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
            || Answer::yes("a"),
            || Answer::unknown("b"),
            || Answer::no("c"),
        );
        for (one, other, allowed, why) in [
            (yes(), Answer::yes("z"), Allowed::Yes, "a"),
            (yes(), unknown(), Allowed::Unknown, "b"),
            (unknown(), Answer::unknown("d"), Allowed::Unknown, "b; d"),
            (unknown(), no(), Allowed::No, "c"),
            (no(), unknown(), Allowed::No, "c"),
            (no(), yes(), Allowed::No, "c"),
            (no(), Answer::no("e"), Allowed::No, "c; e"),
        ] {
            let both = one.and(other);
            assert_eq!((both.allowed, both.why.as_str()), (allowed, why));
        }
    }
}
