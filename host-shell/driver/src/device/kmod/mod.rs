//! A controller behind the kernel module nvme_gpu: `kmod:BDF`.
//!
//! The module maps memory of this process, and dma-bufs: memory of a GPU, which VFIO cannot map. It stops and resets
//! the controller before it takes a mapping back, however this process ends (kmod/README.md).

mod uapi;

use crate::device::Device;
use crate::device::bar::DoorbellMap;
use crate::device::peer::PeerMemory;
use crate::device::vfio::bar0::MappedBar;
use crate::device::vfio::info::VfioRegion;
use crate::device::vfio::watch::{self, DeviceWatch};
use crate::dma::pages::DmaPages;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::sysfs::{PciAddress, RunningProcess, SysfsFunction, SysfsHost};
use nvme_core::RegisterAccess;
use nvme_core::spec::Iova;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use uapi::{KmodMap, KmodSegment, flag, iommu};

/// The module's name as a driver.
pub const DRIVER: &str = "nvme_gpu";

/// Opens the controller at PCI address `text`, the text after `kmod:`.
///
/// # Errors
/// [`Error::Usage`] for text that is no address; [`Error::Device`], with the remedy, for a device that is absent,
/// is no NVMe controller, is not bound to the module, is in use or may not be opened.
pub fn open(text: &str) -> Result<Arc<dyn Device>> {
    let address: PciAddress = text
        .parse()
        .map_err(|cause: String| Error::usage(cause, "`nvme-gpu list` shows the controllers"))?;
    let host = SysfsHost::here();
    let function = host.nvme(address)?;
    host.refuse_virtual_functions(&function)?;
    Ok(Arc::new(KmodDevice::open(&function)?))
}

/// Access to the module, and the memory that it has mapped.
struct KmodInner {
    address: PciAddress,
    bar: MappedBar,
    /// Open node of the module; `None` once the device was returned to it.
    node: Mutex<Option<File>>,
    /// The mappings by first address.
    mapped: Mutex<BTreeMap<u64, KmodMapping>>,
    iommu: u32,
}

/// Memory that the controller reaches.
struct KmodMapping {
    handle: u32,
    bytes: usize,
    /// Memory of this process, which outlives the mapping. The module holds dma-bufs itself.
    _pages: Option<Arc<DmaPages>>,
}

/// A controller opened through the module.
struct KmodDevice {
    _watch: DeviceWatch,
    inner: Arc<KmodInner>,
}

impl KmodDevice {
    fn open(function: &SysfsFunction) -> Result<Self> {
        let address = function.address;
        if function.driver.as_deref() != Some(DRIVER) {
            let driver = function.driver.as_deref().unwrap_or("no driver");
            return Err(Error::environment(
                format!("{address} is bound to {driver}, not to the module {DRIVER}"),
                format!("run `nvme-gpu bind --driver {DRIVER} {address}` as root"),
            ));
        }
        let path = PathBuf::from(format!("/dev/nvme-gpu-{address}"));
        let node = OpenOptions::new().read(true).write(true).open(&path);
        let node = node.map_err(|source| refused(&path, address, source))?;
        let info = uapi::info(&node).map_err(|source| unknown(address, source))?;
        if info.abi != uapi::ABI {
            return Err(Error::environment(
                format!(
                    "the module {DRIVER} has version {} of its interface, and this program {}",
                    info.abi,
                    uapi::ABI
                ),
                "install module and program of one version",
            ));
        }
        let whole = 0..info.bar0_bytes;
        let region = VfioRegion {
            size: whole.end,
            mappable: vec![whole],
            msix_mappable: true,
            ..VfioRegion::default()
        };
        let bar = MappedBar::new(&node, region, function.config.msix)?;
        let wanted = watch::event()?;
        uapi::watch(&node, wanted.as_raw_fd()).map_err(Error::system("NVME_GPU_KMOD_EVENT"))?;
        let inner = Arc::new(KmodInner {
            address,
            bar,
            node: Mutex::new(Some(node)),
            mapped: Mutex::default(),
            iommu: info.iommu,
        });
        let watch = {
            let inner = Arc::clone(&inner);
            DeviceWatch::over(wanted, watch::event()?, move |_| inner.hear())?
        };
        let device = Self {
            _watch: watch,
            inner,
        };
        if device.disable().is_err() {
            device.reset()?;
        }
        Ok(device)
    }
}

/// Translates the error of opening a node (kmod/nvme_gpu_uapi.h).
fn refused(path: &Path, address: PciAddress, source: io::Error) -> Error {
    let name = path.display();
    match source.raw_os_error() {
        Some(libc::EBUSY) => Error::environment(
            format!(
                "{address} is in use: another process has {name} open{}",
                openers(address)
            ),
            "end that process first",
        ),
        Some(libc::EPERM) => Error::environment(
            format!("no permission to open {name}"),
            "run this command as root: the module asks for CAP_SYS_RAWIO",
        ),
        // The file's mode says the same.
        Some(libc::EACCES) if !rustix::process::geteuid().is_root() => Error::environment(
            format!("no permission to open {name}"),
            "run this command as root: the module asks for CAP_SYS_RAWIO",
        ),
        Some(libc::EACCES) => Error::environment(
            format!(
                "the module does not open {address}: its interrupts are not isolated from those of other devices"
            ),
            "switch interrupt remapping on in the firmware",
        ),
        Some(libc::EOPNOTSUPP) => Error::environment(
            format!("the module does not open {address}: no IOMMU keeps it to its own memory"),
            "switch the IOMMU on (`nvme-gpu doctor` says how; `dmesg` has the cause)",
        ),
        Some(libc::EXDEV) => Error::environment(
            format!(
                "the module does not open {address}: another function of its IOMMU group is in use"
            ),
            "take the drivers of the other functions of the group away (docs/kmod.md)",
        ),
        Some(libc::ETIMEDOUT) => Error::environment(
            format!("the controller {address} does not become disabled"),
            "restart the machine, or look at the kernel's log",
        ),
        Some(libc::ENODEV) => Error::Gone {
            cause: format!("{address} is being given back, or its registers cannot be reached"),
        },
        _ => Error::file("open", path)(source),
    }
}

/// Returns the programs that have the node of the function at `address` open, as the end of a sentence.
fn openers(address: PciAddress) -> String {
    let host = SysfsHost::here();
    let function = host.function(address);
    let found = function.map_or_else(Vec::new, |one| host.openers(&one));
    match found.is_empty() {
        true => String::new(),
        false => format!(": {}", RunningProcess::list(&found)),
    }
}

fn unknown(address: PciAddress, source: io::Error) -> Error {
    match source.raw_os_error() {
        Some(libc::EINVAL | libc::ENOTTY) => Error::environment(
            format!("the module of {address} has another interface than this program"),
            "install module and program of one version",
        ),
        _ => Error::system("NVME_GPU_KMOD_INFO")(source),
    }
}

const WANTED: &str = "the system wants the device back (it is being unbound or removed)";

/// Returns the reason why the module asks this process to close `node`, if it does.
fn wanted_back(node: &File) -> Option<&'static str> {
    match uapi::info(node) {
        Ok(info) if info.flags & flag::REVOKED != 0 => {
            Some("memory of a GPU that it reached was taken back")
        }
        Ok(info) if info.flags & flag::WANTED == 0 => None,
        _ => Some(WANTED),
    }
}

impl KmodInner {
    fn with_node<T>(&self, call: impl FnOnce(&File) -> Result<T>) -> Result<T> {
        match &*lock(&self.node) {
            Some(node) => call(node),
            None => Err(Error::Gone {
                cause: self
                    .bar
                    .gone()
                    .unwrap_or_else(|| format!("{} was given back", self.address)),
            }),
        }
    }

    /// Returns the device if the module asks for it; closing its node stops and resets the controller. A reset by the
    /// system does not end the session: commands that it loses run into their deadlines, and our own controller reset
    /// recovers the queues.
    fn hear(&self) -> ControlFlow<()> {
        let mut node = lock(&self.node);
        match node.as_ref().map(wanted_back) {
            None => ControlFlow::Break(()),
            Some(None) => ControlFlow::Continue(()),
            Some(Some(why)) => {
                self.close(&mut node, why);
                ControlFlow::Break(())
            }
        }
    }

    fn close(&self, node: &mut Option<File>, why: &str) {
        // The mapping of the BAR holds the node open.
        let _ = self.bar.let_go(&format!("{}: {why}", self.address));
        *node = None;
    }

    /// Returns the reason why the device is gone. It asks the module itself, since a command may fail before
    /// the thread that waits for the event has run.
    fn gone(&self) -> Option<String> {
        if let Some(why) = self.bar.gone() {
            return Some(why);
        }
        let mut node = lock(&self.node);
        // Another thread may have returned the device while this one waited for the lock.
        if let Some(open) = node.as_ref() {
            let why = wanted_back(open)?;
            self.close(&mut node, why);
        }
        self.bar.gone()
    }

    fn map(&self, ask: KmodMap, bytes: usize, pages: Option<Arc<DmaPages>>) -> Result<Iova> {
        let mut list = [KmodSegment::default(); 1];
        let made = self.with_node(|node| {
            uapi::map(node, ask, &mut list).map_err(|(source, told)| self.unmapped(source, &told))
        })?;
        let iova = match placed(&made, &list[0], bytes) {
            Some(iova) => iova,
            None => return Err(self.misplaced(&made, &list[0], bytes)),
        };
        let entry = KmodMapping {
            handle: made.handle,
            bytes,
            _pages: pages,
        };
        lock(&self.mapped).insert(iova, entry);
        Ok(Iova(iova))
    }

    /// Unmaps memory that the module mapped at another address than requested, and returns the error.
    fn misplaced(&self, made: &KmodMap, segment: &KmodSegment, bytes: usize) -> Error {
        let handle = made.handle;
        // If the unmapping fails, closing the node takes the mapping back.
        let _ = self.with_node(|node| {
            uapi::unmap(node, handle).map_err(Error::system("NVME_GPU_KMOD_UNMAP"))
        });
        Error::environment(
            format!(
                "the module mapped {} bytes at {} places for {}, not {bytes} bytes at one",
                segment.bytes, made.segments, self.address
            ),
            "use a module and a driver of the memory's exporter that agree on its size (docs/troubleshooting.md)",
        )
    }

    /// Translates the error of a mapping request.
    fn unmapped(&self, source: io::Error, told: &KmodMap) -> Error {
        match source.raw_os_error() {
            Some(libc::ENOSPC) => Error::environment(
                format!(
                    "the memory lies at {} places for {}, and a buffer needs one",
                    told.segments, self.address
                ),
                "switch the IOMMU on: it makes one place of them",
            ),
            Some(libc::ENOMEM) => Error::environment(
                format!("the system locks no more memory for {}", self.address),
                "raise the limit on locked memory (`ulimit -l`), or use less memory",
            ),
            Some(libc::EREMOTEIO) => Error::environment(
                "the GPU's driver gave addresses that the IOMMU does not know".to_owned(),
                "use another version of the GPU's driver (docs/troubleshooting.md)",
            ),
            Some(libc::EHOSTUNREACH) => Error::environment(
                format!(
                    "this kernel does not know that {} reaches the GPU's memory",
                    self.address
                ),
                "put both behind one PCIe switch, or in a machine whose host bridge the kernel lists (docs/kmod.md)",
            ),
            Some(libc::EREMOTE) => Error::environment(
                "the GPU's driver has moved the memory to the host's".to_owned(),
                "leave GPU memory free, so that it need not move",
            ),
            Some(libc::ETIMEDOUT) => Error::environment(
                "the GPU's driver has not filled the memory within 5 s".to_owned(),
                "look at the kernel's log for faults of the GPU",
            ),
            _ => Error::system("NVME_GPU_KMOD_MAP")(source),
        }
    }
}

/// Returns the first address, if the single segment has all of `bytes`: the controller would access memory
/// beyond a shorter one. A dma-buf may be longer than the part in use.
fn placed(made: &KmodMap, segment: &KmodSegment, bytes: usize) -> Option<u64> {
    let is_exact = made.kind != uapi::MAP_USER || segment.bytes == bytes as u64;
    (made.segments == 1 && segment.bytes >= bytes as u64 && is_exact).then_some(segment.iova)
}

/// Describes the mapping of a whole dma-buf.
fn of_dma_buf(fd: BorrowedFd<'_>) -> KmodMap {
    KmodMap {
        kind: uapi::MAP_DMABUF,
        fd: fd.as_raw_fd(),
        ..KmodMap::default()
    }
}

impl Device for KmodDevice {
    fn name(&self) -> String {
        format!("kmod:{}", self.inner.address)
    }

    fn describe(&self) -> String {
        let between = match self.inner.iommu {
            iommu::NONE => "without an IOMMU",
            _ => "behind the IOMMU",
        };
        format!(
            "PCIe {} through the module {DRIVER}, {between}",
            self.inner.address
        )
    }

    fn registers(&self) -> &(dyn RegisterAccess + Sync) {
        &self.inner.bar
    }

    fn doorbells(&self) -> DoorbellMap {
        self.inner.bar.doorbells()
    }

    fn alloc_dma(&self, bytes: usize) -> Result<DmaPages> {
        DmaPages::shared(bytes)
    }

    fn map_dma(&self, pages: &Arc<DmaPages>) -> Result<Iova> {
        let ask = match pages.dma_buf() {
            Some(fd) => of_dma_buf(fd),
            None => KmodMap {
                kind: uapi::MAP_USER,
                address: pages.start().expose_provenance() as u64,
                bytes: pages.len() as u64,
                ..KmodMap::default()
            },
        };
        self.inner.map(ask, pages.len(), Some(Arc::clone(pages)))
    }

    fn map_peer(&self, memory: PeerMemory) -> Result<Iova> {
        let exported = (memory.dma_buf)()?;
        let flags = match memory.in_host {
            true => 0,
            false => uapi::REQUIRE_PEER,
        };
        let ask = KmodMap {
            flags,
            ..of_dma_buf(exported.as_fd())
        };
        self.inner.map(ask, memory.bytes, None)
    }

    fn reaches_peers(&self) -> bool {
        true
    }

    fn unmap_dma(&self, iova: Iova, bytes: usize) -> Result<()> {
        let mut mapped = lock(&self.inner.mapped);
        let whole = mapped.get(&iova.0);
        let whole = whole.filter(|one| one.bytes == bytes);
        let Some(handle) = whole.map(|one| one.handle) else {
            return Err(Error::internal(
                "an address that was not mapped, or a part of a mapping",
            ));
        };
        let done = self.inner.with_node(|node| {
            uapi::unmap(node, handle).map_err(Error::system("NVME_GPU_KMOD_UNMAP"))
        });
        match done {
            // A device that is gone has nothing mapped any more.
            Ok(()) | Err(Error::Gone { .. }) => {
                mapped.remove(&iova.0);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn reset(&self) -> Result<()> {
        self.inner.with_node(|node| match uapi::reset(node) {
            // The function has no reset method: the module has disabled the controller instead.
            Err(source) if source.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
            done => done.map_err(Error::system("NVME_GPU_KMOD_RESET")),
        })
    }

    fn gone(&self) -> Option<String> {
        self.inner.gone()
    }

    fn guards_data(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;
    use std::time::Duration;

    #[test]
    fn a_mapping_that_is_not_what_was_asked_for_is_refused() {
        let segment = |bytes| KmodSegment {
            iova: 0x1000,
            bytes,
            ..KmodSegment::default()
        };
        let made = |kind, segments| KmodMap {
            kind,
            segments,
            ..KmodMap::default()
        };
        for kind in [uapi::MAP_USER, uapi::MAP_DMABUF] {
            assert_eq!(placed(&made(kind, 1), &segment(8192), 8192), Some(0x1000));
            assert_eq!(placed(&made(kind, 1), &segment(4096), 8192), None);
            assert_eq!(placed(&made(kind, 2), &segment(8192), 8192), None);
            assert_eq!(placed(&made(kind, 0), &segment(8192), 8192), None);
        }
        let longer = |kind| placed(&made(kind, 1), &segment(16384), 8192);
        assert_eq!(longer(uapi::MAP_USER), None);
        assert_eq!(longer(uapi::MAP_DMABUF), Some(0x1000));
    }

    #[test]
    fn who_waits_while_the_device_is_given_back_learns_why() {
        let file = || File::from(rustix::fs::memfd_create("bar", MemfdFlags::CLOEXEC).unwrap());
        let bar = file();
        bar.set_len(0x2000).unwrap();
        let whole = 0..0x2000;
        let region = VfioRegion {
            size: whole.end,
            mappable: vec![whole],
            ..VfioRegion::default()
        };
        let inner = KmodInner {
            address: "0000:01:00.0".parse().unwrap(),
            bar: MappedBar::new(&bar, region, None).unwrap(),
            node: Mutex::new(Some(file())),
            mapped: Mutex::default(),
            iommu: iommu::STRICT,
        };
        let mut node = lock(&inner.node);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| inner.gone());
            // The other thread has seen that the BAR is mapped, and now waits for the node.
            std::thread::sleep(Duration::from_millis(50));
            inner.close(&mut node, WANTED);
            drop(node);
            assert!(waiting.join().unwrap().unwrap().ends_with(WANTED));
        });
        assert!(inner.gone().is_some());
    }
}
