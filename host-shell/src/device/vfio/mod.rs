//! A controller behind the kernel's VFIO: `vfio:BDF`.
//!
//! The group's IOMMU domain holds what the controller may reach, and nothing else. Completions are
//! polled; the events "wanted back" and "fatal error" are always watched: a device that is wanted back
//! is let go at once, and from then on reads as all ones, as one that was pulled out does.
//!
//! Quiet at the end, whatever end it is: bus mastering is cleared when the device is dropped, and by
//! the kernel when it closes the descriptors of a process that died. A controller that a dead process
//! left enabled is disabled before it may start DMA again.

mod bar0;
mod cmb;
mod group;
pub mod info;
mod ioctl;
mod mapping;
mod watch;

use crate::device::Device;
use crate::device::bar::DoorbellMap;
use crate::device::cmb::ControllerMemory;
use crate::dma::pages::Pages;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::machine::pci::{self, COMMAND_MASTER, COMMAND_MEMORY, COMMAND_NO_INTX};
use crate::machine::sysfs::{Address, Function, Host};
use bar0::Bar0;
use group::Group;
use info::RegionInfo;
use nvme_core::Registers;
use nvme_core::spec::Iova;
use nvme_core::spec::register::{Cmbmsc, offset};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FLAGS_RESET, VFIO_PCI_BAR0_REGION_INDEX, VFIO_PCI_CONFIG_REGION_INDEX,
    VFIO_PCI_MSIX_IRQ_INDEX,
};
use watch::{Event, Watch};

/// Opens the controller at PCI address `text`, the text after `vfio:`.
///
/// # Errors
/// [`Error::Usage`] for text that is no address; [`Error::Device`], with the remedy, for a device that
/// is absent, is no NVMe controller, is not bound to vfio-pci or may not be opened.
pub fn open(text: &str) -> Result<Arc<dyn Device>> {
    let address: Address = text
        .parse()
        .map_err(|cause: String| Error::usage(cause, "`nvme-gpu list` shows the controllers"))?;
    let function = find(&Host::here(), address)?;
    Ok(Arc::new(Vfio::open(&function)?))
}

/// The function at `address`, if VFIO can have it.
fn find(host: &Host, address: Address) -> Result<Function> {
    let function = host.function(address).ok_or_else(|| {
        Error::environment(
            format!("there is no PCI function {address}"),
            "`nvme-gpu list` shows the controllers",
        )
    })?;
    if !function.is_nvme() {
        return Err(Error::usage(
            format!(
                "{address} is no NVMe controller: its class is {:06x}, not {:06x}",
                function.config.class,
                pci::CLASS_NVME
            ),
            "`nvme-gpu list` shows the controllers",
        ));
    }
    if function.group.is_none() {
        return Err(Error::environment(
            format!("{address} is in no IOMMU group: the IOMMU is off"),
            "switch it on (`nvme-gpu doctor` says how)",
        ));
    }
    match function.driver.as_deref() {
        Some("vfio-pci") => Ok(function),
        Some(other) => Err(Error::environment(
            format!("{address} is bound to the driver {other}"),
            format!("run `nvme-gpu bind {address}` as root"),
        )),
        None => Err(Error::environment(
            format!("{address} is bound to no driver"),
            format!("run `nvme-gpu bind {address}` as root"),
        )),
    }
}

/// A controller opened through VFIO.
struct Vfio {
    inner: Arc<Inner>,
    _watch: Watch,
}

struct Inner {
    address: Address,
    bar: Bar0,
    /// None once the device was given back.
    file: Mutex<Option<File>>,
    config_offset: u64,
    can_reset: bool,
    group: Arc<Group>,
    /// What CMBMSC holds once the controller memory buffer is in use: a reset of the function clears it.
    cmb_control: OnceLock<Cmbmsc>,
    cmb: Mutex<Weak<ControllerMemory>>,
}

fn system(call: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::System { call, source }
}

fn region(file: &File, index: u32) -> Result<RegionInfo> {
    let answer = ioctl::region_info(file, index).map_err(system("VFIO_DEVICE_GET_REGION_INFO"))?;
    RegionInfo::parse(&answer)
        .ok_or_else(|| Error::environment("VFIO describes no such region", "use another kernel"))
}

impl Vfio {
    fn open(function: &Function) -> Result<Self> {
        let address = function.address;
        let number = function.group.unwrap_or_default();
        let group = Group::open(number)?;
        let file = group.device(&address.to_string())?;
        let info = ioctl::device_info(&file).map_err(system("VFIO_DEVICE_GET_INFO"))?;
        let config = region(&file, VFIO_PCI_CONFIG_REGION_INDEX)?;
        let mut bytes = [0; 256];
        file.read_exact_at(&mut bytes, config.offset)
            .map_err(system("reading configuration space"))?;
        let space = pci::Config::parse(&bytes).ok_or_else(|| Error::Gone {
            cause: format!("{address}: configuration space reads as all ones"),
        })?;
        // Registers first; DMA when the controller is known to be disabled.
        set_command(&file, config.offset, COMMAND_MEMORY | COMMAND_NO_INTX)
            .map_err(system("writing the command register"))?;
        let bar = Bar0::new(
            &file,
            region(&file, VFIO_PCI_BAR0_REGION_INDEX)?,
            space.msix,
        )?;
        let inner = Arc::new(Inner {
            address,
            bar,
            file: Mutex::new(Some(file)),
            config_offset: config.offset,
            can_reset: info.flags & VFIO_DEVICE_FLAGS_RESET != 0,
            group,
            cmb_control: OnceLock::new(),
            cmb: Mutex::default(),
        });
        // An event finds the file in its place, and takes it from there.
        let watch = inner.with_file("watching the device", |file| {
            let inner = Arc::clone(&inner);
            Watch::start(file, move |event| inner.let_go(event)).map_err(io::Error::other)
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

fn set_command(file: &File, config_offset: u64, value: u16) -> io::Result<()> {
    file.write_all_at(&value.to_le_bytes(), config_offset + pci::offset::COMMAND)
}

impl Inner {
    /// Runs `call` on the device, unless it was given back.
    fn with_file<T>(
        &self,
        name: &'static str,
        call: impl FnOnce(&File) -> io::Result<T>,
    ) -> Result<T> {
        match &*lock(&self.file) {
            Some(file) => call(file).map_err(system(name)),
            None => Err(Error::Gone {
                cause: self
                    .bar
                    .gone()
                    .unwrap_or_else(|| format!("{} was given back", self.address)),
            }),
        }
    }

    fn allow_dma(&self) -> Result<()> {
        let command = COMMAND_MEMORY | COMMAND_MASTER | COMMAND_NO_INTX;
        self.with_file("writing the command register", |file| {
            set_command(file, self.config_offset, command)
        })
    }

    /// Resets the function alone or with its bus; false when neither can be done.
    fn reset(&self) -> Result<bool> {
        if self.can_reset {
            self.with_file("VFIO_DEVICE_RESET", ioctl::reset)?;
            return Ok(true);
        }
        let mine = self.group.number();
        let alone = self.with_file("VFIO_DEVICE_GET_PCI_HOT_RESET_INFO", |file| {
            let groups = ioctl::hot_reset_groups(file);
            Ok(groups.is_ok_and(|all| all.iter().all(|group| *group == mine)))
        })?;
        if alone {
            let group = self.group.file();
            self.with_file("VFIO_DEVICE_PCI_HOT_RESET", |file| {
                ioctl::hot_reset(file, group)
            })?;
        }
        Ok(alone)
    }

    /// Gives the device back: no more accesses, no DMA, no descriptor that the kernel waits for.
    fn let_go(&self, event: Event) {
        let why = match event {
            Event::Wanted => "the system wants the device back (it is being unbound or removed)",
            Event::Failed => "the device reported an uncorrectable PCIe error",
        };
        let mut file = lock(&self.file);
        if let Some(file) = &*file {
            // The kernel clears it too, when the last descriptor closes.
            let _ = set_command(file, self.config_offset, COMMAND_MEMORY | COMMAND_NO_INTX);
        }
        // Should the BAR not come off, the kernel goes on waiting; it reads as ones all the same.
        let _ = self.bar.let_go(&format!("{}: {why}", self.address));
        *file = None;
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(file) = &*lock(&self.file) {
            // The kernel does the same when it closes the descriptor.
            let _ = set_command(file, self.config_offset, COMMAND_MEMORY | COMMAND_NO_INTX);
        }
    }
}

impl Device for Vfio {
    fn name(&self) -> String {
        format!("vfio:{}", self.inner.address)
    }

    fn describe(&self) -> String {
        let (address, group) = (self.inner.address, self.inner.group.number());
        format!("PCIe {address} through VFIO, IOMMU group {group}")
    }

    fn registers(&self) -> &(dyn Registers + Sync) {
        &self.inner.bar
    }

    fn doorbells(&self) -> DoorbellMap {
        self.inner.bar.doorbells()
    }

    fn alloc_dma(&self, bytes: usize) -> Result<Pages> {
        Pages::shared(bytes)
    }

    fn map_dma(&self, pages: &Arc<Pages>) -> Result<Iova> {
        self.inner.group.map(pages)
    }

    fn unmap_dma(&self, iova: Iova, bytes: usize) -> Result<()> {
        self.inner.group.unmap(iova, bytes)
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

    fn controller_memory(&self) -> Result<Arc<ControllerMemory>> {
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
