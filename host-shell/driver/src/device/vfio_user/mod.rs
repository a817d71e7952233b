//! A controller in another process, reached by vfio-user: registers are messages on a socket, doorbells
//! and DMA memory are shared.
//!
//! The server is not trusted: every reply is checked, every wait has a deadline, and a server that leaves or breaks the
//! protocol leaves a device whose registers read as all ones. It can still shrink the file in which its doorbells lie:
//! ringing one then ends this process with SIGBUS.
//!
//! "vfio-user Protocol Specification", version 0.9.2.

mod connection;
mod link;
mod region;
#[cfg(test)]
mod tests;

use crate::device::Device;
use crate::device::bar::{DoorbellMap, MappedFile};
use crate::dma::pages::{DmaPages, GRANULE, host_page};
use crate::dma::pool::PagePool;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::pci;
use connection::ServerConnection;
use link::{LinkFailure, ServerLink, in_words};
use nvme_core::spec::Iova;
use nvme_core::spec::register::{ALL_ONES, offset};
use nvme_core::{ControllerIdentity, RegisterAccess};
use nvme_vfio_user::{
    DEFAULT_DMA_MAPS, DEVICE_PCI, DEVICE_RESETS, DMA_READABLE, DMA_WRITABLE, DeviceInfo, DmaMap,
    DmaUnmap, PeerCapabilities, SIMULATOR, command, region as regions,
};
use region::ServerRegion;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use zerocopy::IntoBytes;

/// Deadline of an answer. A reset or an unmapping waits for commands in progress, which a simulated drive may
/// take seconds to end; a server that takes longer is treated as gone, so that no call hangs.
const PATIENCE: Duration = Duration::from_secs(5);
/// Class code of an NVM Express controller, in the byte order of offset 8h of the configuration space.
const NVM_EXPRESS: [u8; 3] = [0x02, 0x08, 0x01];
/// Areas of a file are multiples of this, the smallest page of any machine.
const LEAST_PAGE: u64 = 4096;
/// Ranges of memory that libvfio-user takes. It names no `max_dma_maps` when the version is negotiated.
const USUAL_MAPS: usize = 64;
/// PCI command register: Memory Space Enable and Bus Master Enable, with Interrupt Disable. Completions are
/// polled for: a controller that may assert INTx has an interrupt to deliver that is never set up, and
/// SPDK's target fails then (CSTS.CFS on the first completion).
///
/// PCI Local Bus Specification 3.0, "Device Control".
const PCI_ENABLE: u16 = pci::COMMAND_MEMORY | pci::COMMAND_MASTER | pci::COMMAND_NO_INTX;

/// A controller behind a vfio-user socket.
pub struct VfioUser {
    bar: MessageBar,
    area: MappedFile,
    /// Offset of the doorbells in BAR0's file.
    doorbells: usize,
    resets: bool,
    max_maps: usize,
    pool: PagePool,
    /// True if the server is not the simulator of this project: a disk may be behind it.
    foreign: bool,
    /// The mappings by first address.
    mapped: Mutex<BTreeMap<u64, ServerMapping>>,
    path: String,
}

/// A range of memory that the server has mapped, and the parts of it that are in use, by first address.
struct ServerMapping {
    whole: Arc<DmaPages>,
    parts: BTreeMap<u64, Arc<DmaPages>>,
}

/// BAR0, by messages.
struct MessageBar(ServerLink, ControllerIdentity);

/// Connects to the socket at `path`, checks that an NVMe controller is behind it and enables its DMA.
///
/// # Errors
/// [`Error::File`] when no server listens there, [`Error::Device`] when it is no NVMe controller that can
/// be driven, [`Error::Gone`] when the server does not answer or breaks the protocol.
pub fn open(path: &str) -> Result<Arc<dyn Device>> {
    if path.is_empty() {
        return Err(Error::usage(
            "vfio-user: names no socket",
            "write vfio-user:SOCKET, the path that the server listens at",
        ));
    }
    let connection = ServerConnection::open(Path::new(path), PATIENCE)
        .map_err(Error::file("connect to", path))?;
    Ok(Arc::new(VfioUser::start(path, connection)?))
}

impl VfioUser {
    fn start(path: &str, connection: ServerConnection) -> Result<Self> {
        let link = ServerLink::new(format!("vfio-user:{path}"), connection);
        let max_maps = check_limits(&link, &link.negotiate()?)?;
        let info = link.device_info()?;
        let foreign = check_function(&link, &info)? != SIMULATOR;
        let (region, file) = link.region(regions::BAR0)?;
        let (area, doorbells) = map_doorbells(&link, &region, file)?;
        let device = Self {
            bar: MessageBar(link, ControllerIdentity::new()),
            area,
            doorbells,
            resets: info.flags & DEVICE_RESETS != 0,
            max_maps,
            foreign,
            pool: PagePool::new(max_maps.min(USUAL_MAPS)),
            mapped: Mutex::default(),
            path: path.to_owned(),
        };
        device.enable()?;
        Ok(device)
    }

    fn link(&self) -> &ServerLink {
        &self.bar.0
    }

    /// Gives the server the file of `whole` to map.
    fn tell_of(&self, whole: &DmaPages, mapped: &BTreeMap<u64, ServerMapping>) -> Result<()> {
        let mib = |bytes: usize| bytes >> 20;
        let in_use = || mib(mapped.values().map(|of| of.whole.len()).sum());
        let count = mapped.len();
        let remedy = "use fewer or smaller queues, a smaller depth or a smaller --bs";
        if count >= self.max_maps {
            return Err(Error::device(
                format!(
                    "{}: the server takes {count} ranges of memory (max_dma_maps), and all are in use, with {} MiB",
                    self.name(),
                    in_use()
                ),
                remedy,
            ));
        }
        let map = DmaMap {
            argsz: size_of::<DmaMap>() as u32,
            flags: DMA_READABLE | DMA_WRITABLE,
            offset: 0,
            address: whole.start().addr() as u64,
            size: whole.len() as u64,
        };
        let told = self
            .link()
            .tell(command::DMA_MAP, map.as_bytes(), whole.file());
        told.map_err(|failed| match failed {
            LinkFailure::Refused(errno) => Error::device(
                format!(
                    "{}: the server refused {} MiB of memory beside {count} ranges with {} MiB: {} (a server may \
                     have a limit that it does not name: libvfio-user takes {USUAL_MAPS} ranges)",
                    self.name(),
                    mib(whole.len()),
                    in_use(),
                    in_words(errno)
                ),
                remedy,
            ),
            failed => self.link().error("memory for DMA", failed),
        })
    }

    /// Lets the function use memory.
    fn enable(&self) -> Result<()> {
        self.link()
            .write(
                regions::CONFIG,
                pci::offset::COMMAND,
                &PCI_ENABLE.to_le_bytes(),
            )
            .map_err(|failed| self.link().error("to enable the function", failed))
    }
}

/// Checks that the server's limits suffice, and returns the number of DMA ranges that it accepts.
fn check_limits(link: &ServerLink, limits: &PeerCapabilities) -> Result<usize> {
    let too_few = |what: String| {
        Error::device(
            format!("{}: the server takes {what}", link.name()),
            "use a server without that limit",
        )
    };
    if limits.max_msg_fds == Some(0) {
        return Err(too_few("no descriptors, so no memory".to_owned()));
    }
    if limits.max_data_xfer_size.is_some_and(|bytes| bytes < 4) {
        return Err(too_few("less than a register in a message".to_owned()));
    }
    let smallest = limits.pgsizes.map_or(0, u64::trailing_zeros);
    if smallest > GRANULE.trailing_zeros() {
        return Err(too_few(format!(
            "memory in pages of 2^{smallest} bytes only"
        )));
    }
    let maps = limits.max_dma_maps.unwrap_or(DEFAULT_DMA_MAPS.into());
    Ok(usize::try_from(maps).unwrap_or(usize::MAX))
}

/// Checks that the function is an NVMe controller, and returns its vendor and device.
fn check_function(link: &ServerLink, info: &DeviceInfo) -> Result<[u16; 2]> {
    let none = |what: String| {
        Error::device(
            format!("{}: {what}", link.name()),
            "name the socket of an NVMe controller",
        )
    };
    if info.flags & DEVICE_PCI == 0 || info.num_regions <= regions::CONFIG {
        return Err(none("the device is no PCI function".to_owned()));
    }
    let class: [u8; 4] = link
        .read(regions::CONFIG, 8)
        .map_err(|failed| link.error("a read of the class code", failed))?;
    if class[1..] != NVM_EXPRESS {
        let [_, interface, sub, base] = class;
        return Err(none(format!(
            "the device is no NVMe controller, its class is {base:02x}{sub:02x}{interface:02x}"
        )));
    }
    let [v0, v1, d0, d1]: [u8; 4] = link
        .read(regions::CONFIG, 0)
        .map_err(|failed| link.error("a read of vendor and device", failed))?;
    Ok([[v0, v1], [d0, d1]].map(u16::from_le_bytes))
}

/// Maps the area of BAR0 that contains the doorbells, and returns their offset in it.
fn map_doorbells(
    link: &ServerLink,
    region: &ServerRegion,
    file: Option<OwnedFd>,
) -> Result<(MappedFile, usize)> {
    let unfit = |what: String| {
        Error::device(
            format!("{}: {what}", link.name()),
            "use a server that shares the doorbells (BAR0 from 1000h on) as memory",
        )
    };
    let first = u64::from(offset::DOORBELLS);
    let area = region
        .areas
        .iter()
        .find(|(start, size)| *start <= first && first + 8 <= start + size);
    let Some((start, size)) = area.copied() else {
        let size = region.size;
        return Err(unfit(format!(
            "none of the {size:#x} bytes of BAR0 that can be mapped is a doorbell"
        )));
    };
    let file = file.ok_or_else(|| unfit("BAR0 came without a descriptor".to_owned()))?;
    let at = region.file_offset.saturating_add(start);
    if !at.is_multiple_of(LEAST_PAGE) {
        return Err(unfit(format!("the doorbells lie at {at:#x} of their file")));
    }
    if !holds(file.as_fd(), at.saturating_add(size)) {
        return Err(unfit(
            "the doorbells lie past the end of their file".to_owned(),
        ));
    }
    let (mapped, lead) = map_area(file.as_fd(), at, size, host_page())
        .map_err(Error::system("mapping the doorbells"))?;
    Ok((mapped, lead + (first - start) as usize))
}

/// Maps `size` bytes of `file` at `at` on a machine with pages of `page` bytes. Returns their offset in the mapping, which
/// begins with a page: doorbells at 1000h of their file share a page of 16 or 64 KiB with what lies before them.
fn map_area(
    file: BorrowedFd<'_>,
    at: u64,
    size: u64,
    page: usize,
) -> std::io::Result<(MappedFile, usize)> {
    let lead = (at % page as u64) as usize;
    let bytes = usize::try_from(size).unwrap_or(usize::MAX);
    let mapped = MappedFile::new(file, at - lead as u64, bytes.saturating_add(lead))?;
    Ok((mapped, lead))
}

/// True if `file` has bytes up to `end`. Only a regular file has a length; a device knows its own.
fn holds(file: BorrowedFd<'_>, end: u64) -> bool {
    use rustix::fs::FileType;
    rustix::fs::fstat(file).is_ok_and(|stat| {
        FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile
            || u64::try_from(stat.st_size).is_ok_and(|len| end <= len)
    })
}

impl RegisterAccess for MessageBar {
    fn identity(&self) -> &ControllerIdentity {
        &self.1
    }

    fn read32(&self, offset: u32) -> u32 {
        match self.0.read(regions::BAR0, offset.into()) {
            Ok(bytes) => u32::from_le_bytes(bytes),
            Err(failed) => {
                self.refused(offset, "a read", failed);
                ALL_ONES
            }
        }
    }

    fn read64(&self, offset: u32) -> u64 {
        let low = self.read32(offset);
        u64::from(low) | u64::from(self.read32(offset + 4)) << 32
    }

    fn write32(&self, offset: u32, value: u32) {
        let written = self
            .0
            .write(regions::BAR0, offset.into(), &value.to_le_bytes());
        if let Err(failed) = written {
            self.refused(offset, "a write", failed);
        }
    }

    fn write64(&self, offset: u32, value: u64) {
        self.write32(offset, value as u32);
        self.write32(offset + 4, (value >> 32) as u32);
    }
}

impl MessageBar {
    /// Ends the connection when a server refuses a register that is not optional: it cannot be
    /// driven.
    fn refused(&self, register: u32, what: &str, failed: LinkFailure) {
        let optional = matches!(register, offset::INTMS | offset::INTMC | offset::NSSR)
            || register >= offset::CMBLOC;
        if let (LinkFailure::Refused(errno), false) = (failed, optional) {
            self.0.break_off(format!(
                "the server refused {what} of register {register:#x}: {}",
                in_words(errno)
            ));
        }
    }
}

impl Device for VfioUser {
    fn name(&self) -> String {
        self.link().name().to_owned()
    }

    fn describe(&self) -> String {
        format!("vfio-user controller behind {}", self.path)
    }

    fn guards_data(&self) -> bool {
        self.foreign
    }

    fn registers(&self) -> &(dyn RegisterAccess + Sync) {
        &self.bar
    }

    fn doorbells(&self) -> DoorbellMap {
        self.area.doorbells(self.doorbells)
    }

    fn alloc_dma(&self, bytes: usize) -> Result<DmaPages> {
        self.pool.take(bytes)
    }

    /// Announces the whole chunk that contains `pages` to the server, once.
    fn map_dma(&self, pages: &Arc<DmaPages>) -> Result<Iova> {
        // The address in this process is unique as long as the pages are mapped here.
        let address = |pages: &DmaPages| pages.start().addr() as u64;
        let whole = pages.whole();
        let mut mapped = lock(&self.mapped);
        if let Some(cause) = self.gone() {
            return Err(Error::Gone { cause });
        }
        if !mapped.contains_key(&address(whole)) {
            self.tell_of(whole, &mapped)?;
            let new = ServerMapping {
                whole: Arc::clone(whole),
                parts: BTreeMap::new(),
            };
            mapped.insert(address(whole), new);
        }
        if let Some(of) = mapped.get_mut(&address(whole)) {
            of.parts.insert(address(pages), Arc::clone(pages));
        }
        Ok(Iova(address(pages)))
    }

    fn unmap_dma(&self, iova: Iova, bytes: usize) -> Result<()> {
        let unknown = || {
            Error::device(
                format!(
                    "{}: {bytes} bytes at {:#x} are not mapped",
                    self.name(),
                    iova.0
                ),
                "report this",
            )
        };
        let mut mapped = lock(&self.mapped);
        let (&address, of) = mapped
            .range_mut(..=iova.0)
            .next_back()
            .ok_or_else(unknown)?;
        let part = of.parts.get(&iova.0).filter(|part| part.len() == bytes);
        part.ok_or_else(unknown)?;
        if of.parts.len() > 1 {
            of.parts.remove(&iova.0);
            return Ok(());
        }
        let unmap = DmaUnmap {
            argsz: size_of::<DmaUnmap>() as u32,
            flags: 0,
            address,
            size: of.whole.len() as u64,
        };
        match self.link().tell(command::DMA_UNMAP, unmap.as_bytes(), None) {
            // A server that is gone or unreachable has its own mapping of the file: bytes that it writes there
            // are no longer seen once ours is unmapped, and no part of the file is mapped again.
            Ok(()) | Err(LinkFailure::Gone) => {
                mapped.remove(&address);
                Ok(())
            }
            Err(failed) => Err(self.link().error("to give up memory", failed)),
        }
    }

    fn reset(&self) -> Result<()> {
        if !self.resets {
            return self.disable();
        }
        self.link()
            .tell(command::DEVICE_RESET, &[], None)
            .map_err(|failed| self.link().error("a reset", failed))?;
        // The reset has cleared the settings that `open` made.
        self.enable()
    }

    fn gone(&self) -> Option<String> {
        self.link().gone()
    }

    fn leave(&self) {
        self.link().break_off("this process left the server");
    }
}
