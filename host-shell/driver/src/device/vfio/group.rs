//! An IOMMU group with a private address space: the memory that the devices of the group can access.
//!
//! Invariant: an address is given to the device only while the memory behind it is kept alive here, and memory is
//! released only after the kernel has unmapped it. The kernel unmaps all other mappings when the last descriptor
//! closes, however this process ends.

use super::ioctl;
use super::iommufd::IoasHandle;
use super::options::IommuInterface;
use super::type1::Type1Group;
use crate::dma::addresses::IovaAllocator;
use crate::dma::pages::DmaPages;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::sysfs::{SysfsFunction, SysfsHost};
use nvme_core::spec::Iova;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

/// Groups that this process has open. A group can be opened only once, and its devices share it.
static OPEN: Mutex<BTreeMap<u32, Weak<VfioGroup>>> = Mutex::new(BTreeMap::new());

/// The kernel's interface to the IOMMU.
enum IommuBackend {
    Type1(Type1Group),
    Iommufd(IoasHandle),
}

/// A group and its address space.
pub struct VfioGroup {
    number: u32,
    backend: IommuBackend,
    state: Mutex<GroupState>,
}

struct GroupState {
    addresses: IovaAllocator,
    /// Mappings by their first address: the range of addresses, and the memory behind it.
    mapped: BTreeMap<u64, (Range<u64>, Arc<DmaPages>)>,
}

impl VfioGroup {
    /// Opens the device `function`, and its group by `iommu`, or shares a group that this process has open already.
    ///
    /// # Errors
    /// [`Error::Environment`], with the remedy; [`Error::Usage`] for a group that this process has open by the other
    /// interface.
    pub fn open(
        host: &SysfsHost,
        function: &SysfsFunction,
        iommu: IommuInterface,
    ) -> Result<(Arc<Self>, File)> {
        let number = function.group.unwrap_or_default();
        let mut open = lock(&OPEN);
        if let Some(group) = open.get(&number).and_then(Weak::upgrade) {
            let file = match (&group.backend, iommu) {
                (IommuBackend::Type1(type1), IommuInterface::Type1) => {
                    type1.device(&function.address.to_string())?
                }
                (IommuBackend::Iommufd(ioas), IommuInterface::Iommufd) => {
                    ioas.device(host, function)?
                }
                _ => {
                    return Err(Error::usage(
                        format!("IOMMU group {number} is open in this process with another iommu="),
                        "give all devices of the group the same iommu=",
                    ));
                }
            };
            return Ok((group, file));
        }
        let (backend, file, addresses) = match iommu {
            IommuInterface::Type1 => {
                let type1 = Type1Group::open(number)?;
                let file = type1.device(&function.address.to_string())?;
                let addresses = IovaAllocator::of_iommu(type1.ranges());
                (IommuBackend::Type1(type1), file, addresses)
            }
            IommuInterface::Iommufd => {
                let ioas = IoasHandle::open(host)?;
                // The mappable ranges are known once a device is attached.
                let file = ioas.device(host, function)?;
                let addresses = IovaAllocator::of_iommu(Some(&ioas.ranges()?));
                (IommuBackend::Iommufd(ioas), file, addresses)
            }
        };
        let group = Arc::new(Self {
            number,
            backend,
            state: Mutex::new(GroupState {
                addresses,
                mapped: BTreeMap::new(),
            }),
        });
        open.insert(number, Arc::downgrade(&group));
        Ok((group, file))
    }

    /// Returns its number, as in /dev/vfio/NUMBER.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the kernel interface by which the group was opened.
    pub fn iommu(&self) -> IommuInterface {
        match self.backend {
            IommuBackend::Type1(_) => IommuInterface::Type1,
            IommuBackend::Iommufd(_) => IommuInterface::Iommufd,
        }
    }

    /// Resets the bus (or slot) of `device` and returns true, unless the reset would reach devices of other
    /// programs.
    pub fn hot_reset(&self, device: &File) -> io::Result<bool> {
        let found = ioctl::hot_reset_info(device);
        let is_ours = found.is_ok_and(|found| found.is_of(self.number));
        if is_ours {
            let group = match &self.backend {
                IommuBackend::Type1(type1) => Some(type1.file()),
                IommuBackend::Iommufd(_) => None,
            };
            ioctl::hot_reset(device, group)?;
        }
        Ok(is_ours)
    }

    /// Reserves addresses that a device decodes itself, so that no memory is mapped there. Returns false if memory is
    /// mapped there already.
    pub fn reserve(&self, range: Range<u64>) -> bool {
        let mut state = lock(&self.state);
        let overlaps = |taken: &Range<u64>| taken.start < range.end && range.start < taken.end;
        let is_free = !state.mapped.values().any(|(taken, _)| overlaps(taken));
        if is_free {
            state.addresses.reserve(range);
        }
        is_free
    }

    /// Maps `pages` for DMA by the devices of the group.
    ///
    /// # Errors
    /// [`Error::Environment`] when the kernel may not lock the memory, has no mapping left, or cannot map
    /// such memory.
    pub fn map(&self, pages: &Arc<DmaPages>) -> Result<Iova> {
        let bytes = pages.len() as u64;
        let mut state = lock(&self.state);
        let taken = state.addresses.take(bytes).ok_or_else(|| {
            Error::environment(
                format!("the IOMMU has no {bytes} addresses left in one stretch"),
                "use fewer or smaller buffers",
            )
        })?;
        let iova = taken.start;
        let done = match &self.backend {
            IommuBackend::Type1(type1) => type1.map(pages.start().addr() as u64, iova, bytes),
            IommuBackend::Iommufd(ioas) => ioas.map(pages, iova),
        };
        if let Err(source) = done {
            state.addresses.give(taken);
            return Err(self.not_mapped(&source, pages, &state));
        }
        state.mapped.insert(iova, (taken, Arc::clone(pages)));
        Ok(Iova(iova))
    }

    fn not_mapped(&self, source: &io::Error, pages: &DmaPages, state: &GroupState) -> Error {
        let before = MappedTotal {
            bytes: state
                .mapped
                .values()
                .map(|(_, pages)| pages.len() as u64)
                .sum(),
            count: state.mapped.len(),
        };
        let bytes = pages.len() as u64;
        match &self.backend {
            IommuBackend::Type1(type1) => not_mapped(source, bytes, &before, type1.most_mappings()),
            IommuBackend::Iommufd(_) => super::iommufd::not_mapped(source, pages)
                .unwrap_or_else(|| not_mapped(source, bytes, &before, None)),
        }
    }

    /// Unmaps the memory at `iova`. Once the device is gone, the kernel may have unmapped it before, with all
    /// of the group's mappings.
    pub fn unmap(&self, iova: Iova, bytes: usize, is_gone: bool) -> Result<()> {
        let mut state = lock(&self.state);
        let wrong = |what: &str| Error::internal(format!("{bytes} bytes at {:#x}: {what}", iova.0));
        let (_, pages) = state
            .mapped
            .get(&iova.0)
            .ok_or_else(|| wrong("not mapped"))?;
        let len = pages.len() as u64;
        if len != bytes as u64 {
            return Err(wrong("mapped with another length"));
        }
        let unmapped = match &self.backend {
            IommuBackend::Type1(type1) => match type1.unmap(iova.0, len) {
                // The container has no IOMMU any more, and so no mapping.
                Err(error) if is_gone && error.raw_os_error() == Some(libc::EINVAL) => 0,
                unmapped => unmapped.map_err(Error::system("VFIO_IOMMU_UNMAP_DMA"))?,
            },
            IommuBackend::Iommufd(ioas) => ioas
                .unmap(iova.0, len)
                .map_err(Error::system("IOMMU_IOAS_UNMAP"))?,
        };
        match unmapped {
            done if done == len => {}
            0 if is_gone => {}
            done => return Err(wrong(&format!("only {done} of them were unmapped"))),
        }
        if let Some((taken, _)) = state.mapped.remove(&iova.0) {
            state.addresses.give(taken);
        }
        Ok(())
    }
}

/// Total of the existing mappings, for the error message.
struct MappedTotal {
    bytes: u64,
    count: usize,
}

/// Translates the error of mapping `bytes` bytes of memory, with the numbers.
fn not_mapped(source: &io::Error, bytes: u64, before: &MappedTotal, most: Option<u32>) -> Error {
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    match source.raw_os_error() {
        Some(libc::ENOMEM) => {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
            let limit = limit.map_or_else(|| "unlimited".to_owned(), mib);
            Error::environment(
                format!(
                    "cannot lock {} for the device: {} are locked for it already, and the limit of locked memory is {limit}",
                    mib(bytes),
                    mib(before.bytes)
                ),
                "raise the limit: `ulimit -l unlimited` as root before the start, `USER - memlock \
                 unlimited` in /etc/security/limits.d, or LimitMEMLOCK=infinity in a systemd unit",
            )
        }
        Some(libc::ENOSPC) => Error::environment(
            format!(
                "the kernel maps no more than {} stretches of memory for a device ({} are mapped)",
                most.map_or_else(|| "65,535".to_owned(), |most| most.to_string()),
                before.count
            ),
            "use fewer, larger buffers, or raise dma_entry_limit of vfio_iommu_type1",
        ),
        Some(libc::EFAULT) => Error::environment(
            format!(
                "{} of this memory cannot be pinned for a device",
                mib(bytes)
            ),
            "use ordinary memory, or a mapping whose pages the kernel can look up (a BAR by its resource file)",
        ),
        _ => Error::environment(
            format!(
                "the kernel does not map {} for the device: {source}",
                mib(bytes)
            ),
            "see the system's log",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_numbers_and_the_remedy() {
        let before = MappedTotal {
            bytes: 5 << 20,
            count: 7,
        };
        let error = |errno| {
            let source = io::Error::from_raw_os_error(errno);
            not_mapped(&source, 3 << 20, &before, Some(65_535))
        };
        let memlock = error(libc::ENOMEM);
        assert!(
            memlock.to_string().starts_with("cannot lock 3.0 MiB"),
            "{memlock}"
        );
        assert!(memlock.to_string().contains("5.0 MiB are locked"));
        assert!(memlock.remedy().contains("ulimit -l"));
        assert!(
            error(libc::ENOSPC)
                .to_string()
                .contains("65535 stretches of memory for a device (7 are")
        );
        assert!(error(libc::EFAULT).remedy().contains("resource file"));
        assert!(error(libc::EIO).to_string().contains("3.0 MiB"));
    }
}
