//! A controller behind the kernel's VFIO: `vfio:BDF`, by the type 1 IOMMU or, with `?iommu=iommufd`, by
//! iommufd.
//!
//! The group's address space contains the memory that the controller may access, and nothing else.
//! Completions are polled. The events "wanted back" and "fatal error" are always watched: a device that the
//! kernel wants back is returned at once, and from then on reads as all ones, like one that was unplugged.
//!
//! However the process ends, the function stops DMA: bus mastering is cleared when the device is dropped, and by
//! the kernel when it closes the descriptors of a process that died. A controller that a dead process left enabled is
//! disabled before it may start DMA again.

pub(super) mod bar0;
mod cmb;
mod export;
mod function;
pub mod gdrdrv;
mod group;
pub mod info;
mod inner;
mod ioctl;
pub mod iommufd;
mod mapping;
mod node;
mod options;
mod type1;
pub(super) mod watch;

use crate::device::Device;
use crate::device::bar::DoorbellMap;
use crate::device::peer::PeerMemory;
use crate::device::ring_memory::RingMemory;
use crate::dma::pages::DmaPages;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::pci::{self, COMMAND_MEMORY, COMMAND_NO_INTX};
use crate::sysfs::{SysfsFunction, SysfsHost};
use bar0::MappedBar;
pub use export::bar;
use group::VfioGroup;
use inner::{VfioInner, region, set_command};
use nvme_core::RegisterAccess;
use nvme_core::spec::Iova;
use nvme_core::spec::register::offset;
use options::IommuInterface;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};
use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FLAGS_RESET, VFIO_PCI_BAR0_REGION_INDEX, VFIO_PCI_CONFIG_REGION_INDEX,
    VFIO_PCI_MSIX_IRQ_INDEX,
};
use watch::DeviceWatch;

/// Opens the controller that `text` names, the text after `vfio:`: a PCI address, and an option.
///
/// `iommu=type1`, the default, uses VFIO's groups. `iommu=iommufd` uses iommufd and the device's own node, and
/// `iommu=auto` does where both can be opened, and else type 1.
///
/// # Errors
/// [`Error::Usage`] for text that is no address or option, and for a function with virtual ones; [`Error::Environment`], with the remedy, for a device that
/// is absent, is no NVMe controller, is not bound to vfio-pci or may not be opened, and for a kernel without iommufd.
pub fn open(text: &str) -> Result<Arc<dyn Device>> {
    let (address, iommu) = options::controller(text)?;
    let host = SysfsHost::here();
    let function = function::controller(&host, address)?;
    host.refuse_virtual_functions(&function)?;
    let iommu = iommu.unwrap_or_else(|| match iommufd::can_open(&host, &function) {
        true => IommuInterface::Iommufd,
        false => IommuInterface::Type1,
    });
    Ok(Arc::new(VfioDevice::open(&host, &function, iommu)?))
}

/// A controller opened through VFIO.
struct VfioDevice {
    inner: Arc<VfioInner>,
    _watch: DeviceWatch,
}

impl VfioDevice {
    fn open(host: &SysfsHost, function: &SysfsFunction, iommu: IommuInterface) -> Result<Self> {
        let address = function.address;
        let (group, file) = VfioGroup::open(host, function, iommu)?;
        let info = ioctl::device_info(&file).map_err(Error::system("VFIO_DEVICE_GET_INFO"))?;
        let config = region(&file, VFIO_PCI_CONFIG_REGION_INDEX)?;
        let mut bytes = [0; 256];
        file.read_exact_at(&mut bytes, config.offset)
            .map_err(Error::system("reading configuration space"))?;
        let space = pci::PciConfig::parse(&bytes).ok_or_else(|| Error::Gone {
            cause: format!("{address}: configuration space reads as all ones"),
        })?;
        // Registers first; DMA when the controller is known to be disabled.
        set_command(&file, config.offset, COMMAND_MEMORY | COMMAND_NO_INTX)
            .map_err(Error::system("writing the command register"))?;
        let bar = MappedBar::new(
            &file,
            region(&file, VFIO_PCI_BAR0_REGION_INDEX)?,
            space.msix,
        )?;
        let inner = Arc::new(VfioInner {
            address,
            bar,
            file: Mutex::new(Some(file)),
            config_offset: config.offset,
            can_reset: info.flags & VFIO_DEVICE_FLAGS_RESET != 0,
            group,
            cmb_control: OnceLock::new(),
            cmb: Mutex::default(),
        });
        // The thread of the watch takes the file out when an event arrives, so the file must be stored first.
        let watch = inner.with_file("watching the device", |file| {
            let inner = Arc::clone(&inner);
            DeviceWatch::start(file, move |event| inner.let_go(event)).map_err(io::Error::other)
        })?;
        let device = Self {
            inner,
            _watch: watch,
        };
        if device.disable().is_err() {
            device.inner.reset()?;
        }
        device.inner.allow_dma()?;
        Ok(device)
    }
}

impl Device for VfioDevice {
    fn name(&self) -> String {
        let option = match self.inner.group.iommu() {
            IommuInterface::Type1 => "",
            IommuInterface::Iommufd => "?iommu=iommufd",
        };
        format!("vfio:{}{option}", self.inner.address)
    }

    fn describe(&self) -> String {
        let (address, group) = (self.inner.address, self.inner.group.number());
        let way = match self.inner.group.iommu() {
            IommuInterface::Type1 => "VFIO",
            IommuInterface::Iommufd => "VFIO and iommufd",
        };
        format!("PCIe {address} through {way}, IOMMU group {group}")
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
        match self.gone() {
            Some(cause) => Err(Error::Gone { cause }),
            None => self.inner.group.map(pages),
        }
    }

    fn unmap_dma(&self, iova: Iova, bytes: usize) -> Result<()> {
        self.inner.group.unmap(iova, bytes, self.gone().is_some())
    }

    /// Maps GPU memory by gdrcopy's module, if it is loaded: only the type 1 IOMMU can map that module's mapping.
    fn map_peer(&self, memory: PeerMemory) -> Result<Iova> {
        if self.inner.group.iommu() == IommuInterface::Iommufd {
            return Err(Error::usage(
                format!(
                    "{} cannot reach GPU memory: iommufd does not map it",
                    self.name()
                ),
                "leave iommu=iommufd out, or use --tier 1 or 0",
            ));
        }
        let pages = gdrdrv::map(Path::new(gdrdrv::NODE), memory.address, memory.bytes)?;
        self.map_dma(&Arc::new(pages))
    }

    fn reaches_peers(&self) -> bool {
        self.inner.group.iommu() == IommuInterface::Type1 && Path::new(gdrdrv::NODE).exists()
    }

    fn reset(&self) -> Result<()> {
        if !self.inner.reset()? {
            self.disable()?;
        }
        if let Some(control) = self.inner.cmb_control.get() {
            self.inner.bar.write64(offset::CMBMSC, control.0);
        }
        self.inner.allow_dma()
    }

    fn controller_memory(&self) -> Result<Arc<RingMemory>> {
        let mut known = lock(&self.inner.cmb);
        if let Some(memory) = known.upgrade() {
            return Ok(memory);
        }
        let memory = Arc::new(cmb::open(&self.inner)?);
        *known = Arc::downgrade(&memory);
        Ok(memory)
    }

    fn interrupts(&self, vectors: u16) -> Result<Vec<OwnedFd>> {
        let there_are = self.inner.with_file("VFIO_DEVICE_GET_IRQ_INFO", |file| {
            ioctl::irq_count(file, VFIO_PCI_MSIX_IRQ_INDEX)
        })?;
        let count = there_are.min(u32::from(vectors));
        if count == 0 {
            return Err(Error::device(
                format!("{} has no MSI-X interrupts", self.inner.address),
                "leave --irq out",
            ));
        }
        let events: Result<Vec<OwnedFd>> = (0..count).map(|_| watch::event()).collect();
        let events = events?;
        let borrowed: Vec<_> = events.iter().map(AsFd::as_fd).collect();
        self.inner.with_file("VFIO_DEVICE_SET_IRQS", |file| {
            ioctl::set_irqs(file, VFIO_PCI_MSIX_IRQ_INDEX, &borrowed)
        })?;
        Ok(events)
    }

    fn gone(&self) -> Option<String> {
        self.inner.bar.gone()
    }

    fn guards_data(&self) -> bool {
        true
    }
}
