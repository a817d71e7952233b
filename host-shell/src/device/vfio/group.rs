//! An IOMMU group in a container of its own: what the devices of the group may reach.
//!
//! Invariant: an address is given to the device only while the memory behind it is held here, and
//! memory is let go only after the kernel has unmapped it. The kernel unmaps the rest when the last
//! descriptor closes, whatever way this process ends.

use super::info::IommuInfo;
use super::ioctl;
use crate::dma::addresses::Allocator;
use crate::dma::pages::Pages;
use crate::error::{Error, Result};
use crate::lock::lock;
use nvme_core::spec::Iova;
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};
use vfio_bindings::bindings::vfio::{
    VFIO_API_VERSION, VFIO_GROUP_FLAGS_VIABLE, VFIO_TYPE1v2_IOMMU,
};

/// Groups that this process has open. A group can be opened only once, and its devices share it.
static OPEN: Mutex<BTreeMap<u32, Weak<Group>>> = Mutex::new(BTreeMap::new());

/// A group with its container.
pub struct Group {
    number: u32,
    container: File,
    file: File,
    state: Mutex<State>,
    limits: IommuInfo,
}

struct State {
    addresses: Allocator,
    /// By first address: the stretch that was taken, and the memory behind it.
    mapped: BTreeMap<u64, (Range<u64>, Arc<Pages>)>,
}

impl Group {
    /// Opens group `number`, or joins those of this process who have it open.
    ///
    /// # Errors
    /// [`Error::Device`], with what to do about it.
    pub fn open(number: u32) -> Result<Arc<Self>> {
        let mut open = lock(&OPEN);
        if let Some(group) = open.get(&number).and_then(Weak::upgrade) {
            return Ok(group);
        }
        let group = Arc::new(Self::new(number)?);
        open.insert(number, Arc::downgrade(&group));
        Ok(group)
    }

    fn new(number: u32) -> Result<Self> {
        let container = open_node(Path::new("/dev/vfio/vfio"), number)?;
        let version = ioctl::api_version(&container).map_err(system("VFIO_GET_API_VERSION"))?;
        if version != VFIO_API_VERSION as i32 {
            return Err(Error::environment(
                format!("this kernel speaks version {version} of VFIO, not {VFIO_API_VERSION}"),
                "use another kernel",
            ));
        }
        let type1 = ioctl::has_extension(&container, VFIO_TYPE1v2_IOMMU);
        if !type1.map_err(system("VFIO_CHECK_EXTENSION"))? {
            return Err(Error::environment(
                "VFIO has no type 1 IOMMU here",
                "load the module vfio_iommu_type1 and switch the IOMMU on (`nvme-gpu doctor`)",
            ));
        }
        let file = open_node(Path::new(&format!("/dev/vfio/{number}")), number)?;
        let flags = ioctl::group_status(&file).map_err(system("VFIO_GROUP_GET_STATUS"))?;
        if flags & VFIO_GROUP_FLAGS_VIABLE == 0 {
            return Err(Error::environment(
                format!("IOMMU group {number} is not viable: another of its devices has a driver"),
                "bind every device of the group to vfio-pci (`nvme-gpu doctor` lists them)",
            ));
        }
        ioctl::set_container(&file, &container).map_err(system("VFIO_GROUP_SET_CONTAINER"))?;
        ioctl::set_iommu(&container, VFIO_TYPE1v2_IOMMU).map_err(no_iommu)?;
        let answer = ioctl::iommu_info(&container).map_err(system("VFIO_IOMMU_GET_INFO"))?;
        let limits = IommuInfo::parse(&answer).unwrap_or_default();
        let state = State {
            addresses: Allocator::of_iommu(limits.ranges.as_deref()),
            mapped: BTreeMap::new(),
        };
        Ok(Self {
            number,
            container,
            file,
            state: Mutex::new(state),
            limits,
        })
    }

    /// Its number, as in /dev/vfio/NUMBER.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The group's own file, for a hot reset.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Opens the device at PCI address `name`.
    pub fn device(&self, name: &str) -> Result<File> {
        ioctl::device(&self.file, name).map_err(|source| match source.raw_os_error() {
            Some(libc::ENODEV) => Error::environment(
                format!("{name} is not bound to vfio-pci"),
                format!("run `nvme-gpu bind {name}`"),
            ),
            Some(libc::EBUSY) => in_use(self.number),
            _ => system("VFIO_GROUP_GET_DEVICE_FD")(source),
        })
    }

    /// Keeps addresses from being given to memory, because a device decodes them itself. False when
    /// memory is mapped there already.
    pub fn reserve(&self, range: Range<u64>) -> bool {
        let mut state = lock(&self.state);
        let overlaps = |taken: &Range<u64>| taken.start < range.end && range.start < taken.end;
        let is_free = !state.mapped.values().any(|(taken, _)| overlaps(taken));
        if is_free {
            state.addresses.reserve(range);
        }
        is_free
    }

    /// Lets the devices of the group reach `pages`.
    ///
    /// # Errors
    /// [`Error::Device`] when the kernel may not lock the memory, or has no more mappings.
    pub fn map(&self, pages: &Arc<Pages>) -> Result<Iova> {
        let bytes = pages.len() as u64;
        let mut state = lock(&self.state);
        let taken = state.addresses.take(bytes).ok_or_else(|| {
            Error::environment(
                format!("the IOMMU has no {bytes} addresses left in one stretch"),
                "use fewer or smaller buffers",
            )
        })?;
        let address = pages.start().addr() as u64;
        if let Err(source) = ioctl::map_dma(&self.container, address, taken.start, bytes) {
            state.addresses.give(taken);
            let mapped: u64 = state
                .mapped
                .values()
                .map(|(_, pages)| pages.len() as u64)
                .sum();
            let count = state.mapped.len();
            return Err(not_mapped(
                &source,
                bytes,
                mapped,
                count,
                self.limits.mappings_left,
            ));
        }
        let iova = taken.start;
        state.mapped.insert(iova, (taken, Arc::clone(pages)));
        Ok(Iova(iova))
    }

    /// Ends the devices' access to what was mapped at `iova`. Once the device is gone, the kernel may have ended it
    /// before, with all of the group's mappings.
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
        let unmapped = match ioctl::unmap_dma(&self.container, iova.0, len) {
            // The container has no IOMMU any more, and so no mapping.
            Err(error) if is_gone && error.raw_os_error() == Some(libc::EINVAL) => 0,
            unmapped => unmapped.map_err(system("VFIO_IOMMU_UNMAP_DMA"))?,
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

fn system(call: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::System { call, source }
}

fn in_use(number: u32) -> Error {
    Error::environment(
        format!("IOMMU group {number} is in use by another process"),
        format!("end that process first (`fuser -v /dev/vfio/{number}` names it)"),
    )
}

/// Opens /dev/vfio/vfio or the node of a group; says which rights are missing.
fn open_node(path: &Path, number: u32) -> Result<File> {
    let opened = OpenOptions::new().read(true).write(true).open(path);
    opened.map_err(|source| match source.kind() {
        io::ErrorKind::NotFound if path.ends_with("vfio") => Error::environment(
            "there is no /dev/vfio/vfio",
            "load the module: `modprobe vfio-pci` (`nvme-gpu doctor` shows what else is missing)",
        ),
        io::ErrorKind::NotFound => Error::environment(
            format!("there is no {}", path.display()),
            format!("no device of IOMMU group {number} is bound to vfio-pci: `nvme-gpu bind BDF`"),
        ),
        io::ErrorKind::PermissionDenied => Error::environment(
            format!("no permission to open {}{}", path.display(), owner(path)),
            format!(
                "as root: `chown NAME /dev/vfio/{number}` with the name of the user, or `nvme-gpu bind BDF --user NAME`"
            ),
        ),
        io::ErrorKind::ResourceBusy => in_use(number),
        _ => Error::file("open", path)(source),
    })
}

/// Whom a node belongs to, for a message.
fn owner(path: &Path) -> String {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).map_or_else(
        |_| String::new(),
        |data| {
            let (uid, gid, mode) = (data.uid(), data.gid(), data.mode() & 0o777);
            format!(", which belongs to user {uid}, group {gid}, mode {mode:o}")
        },
    )
}

fn no_iommu(source: io::Error) -> Error {
    match source.raw_os_error() {
        Some(libc::EPERM) => Error::environment(
            "the IOMMU cannot isolate this group: no interrupt remapping",
            "switch it on in the firmware; only on a machine where you trust the device: load \
             vfio_iommu_type1 with allow_unsafe_interrupts=1",
        ),
        _ => system("VFIO_SET_IOMMU")(source),
    }
}

/// Why memory could not be mapped, with the numbers.
fn not_mapped(
    source: &io::Error,
    bytes: u64,
    mapped: u64,
    count: usize,
    left: Option<u32>,
) -> Error {
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    match source.raw_os_error() {
        Some(libc::ENOMEM) => {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
            let limit = limit.map_or_else(|| "unlimited".to_owned(), mib);
            Error::environment(
                format!(
                    "cannot lock {} for the device: {} are locked for it already, and the limit of locked memory is {limit}",
                    mib(bytes),
                    mib(mapped)
                ),
                "raise the limit: `ulimit -l unlimited` as root before the start, `USER - memlock \
                 unlimited` in /etc/security/limits.d, or LimitMEMLOCK=infinity in a systemd unit",
            )
        }
        Some(libc::ENOSPC) => Error::environment(
            format!(
                "the kernel maps no more than {} stretches of memory for a device ({count} are mapped)",
                left.map_or_else(|| "65,535".to_owned(), |left| left.to_string())
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
        let error = |errno| {
            let source = io::Error::from_raw_os_error(errno);
            not_mapped(&source, 3 << 20, 5 << 20, 7, Some(65_535))
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

    #[test]
    fn a_node_that_is_missing_or_closed_says_what_to_do() {
        let missing = open_node(Path::new("/nonexistent/12"), 12).unwrap_err();
        assert!(missing.remedy().contains("nvme-gpu bind"), "{missing}");
        let missing = open_node(Path::new("/nonexistent/vfio"), 12).unwrap_err();
        assert!(missing.remedy().contains("modprobe"), "{missing}");
        let text = owner(Path::new("/dev/null"));
        assert_eq!(text, ", which belongs to user 0, group 0, mode 666");
    }
}
