//! BAR0 of the controller: registers and doorbells, until the device is gone. After that every register reads as
//! ones, which the driver above takes for an unplugged controller, and writes have no effect.
// UNSAFETY: the mapping is accessed as registers, and doorbells in it are shared with queues.
#![allow(unsafe_code)]

use super::info::VfioRegion;
use super::mapping::UncachedMapping;
use crate::device::bar::DoorbellMap;
use crate::dma::pages::host_page;
use crate::error::{Error, Result};
use crate::pci::MsixTable;
use nvme_core::spec::register::offset;
use nvme_core::{ControllerIdentity, RegisterAccess, RegisterBlock};
use std::fs::File;
use std::sync::OnceLock;

/// The mapped BAR. Reads as all ones once the device is gone.
pub struct MappedBar {
    // Refers to the mapping, which stays where it is as long as this struct lives.
    block: RegisterBlock<'static>,
    mapping: UncachedMapping,
    doorbell_bytes: usize,
    gone: OnceLock<String>,
}

impl MappedBar {
    /// Maps BAR0 of `device`, without the MSI-X table if the kernel does not allow its mapping.
    pub fn new(device: &File, mut region: VfioRegion, msix: Option<MsixTable>) -> Result<Self> {
        let table = msix
            .filter(|msix| msix.bar == 0)
            .map(|msix| u64::from(msix.offset)..u64::from(msix.offset) + msix.bytes());
        if let Some(table) = table.clone().filter(|_| !region.msix_mappable) {
            region.punch(table, host_page() as u64);
        }
        let doorbells = u64::from(offset::DOORBELLS);
        let area = region
            .mappable_from(0)
            .filter(|area| area.end > doorbells)
            .ok_or_else(|| {
                Error::environment(
                    "registers and doorbells of the controller cannot be mapped",
                    "its BAR0 shares pages with the MSI-X table; use another kernel or controller",
                )
            })?;
        let len = usize::try_from(area.end)
            .map_err(|_| Error::internal("BAR0 is larger than the address space"))?;
        let mapping = UncachedMapping::new(device, region.offset, len)?;
        // Doorbells end where the table of interrupts begins.
        let end = table
            .map(|table| table.start)
            .filter(|start| *start > doorbells)
            .map_or(area.end, |start| start.min(area.end));
        // SAFETY: the mapping is page aligned, has `len` bytes and stays mapped while this struct lives: after the
        // device is gone, pages of ones lie at the same address. A device has one of these structs.
        let block = unsafe { RegisterBlock::from_raw(mapping.start(), len) };
        Ok(Self {
            block,
            mapping,
            doorbell_bytes: (end - doorbells) as usize,
            gone: OnceLock::new(),
        })
    }

    /// Returns the doorbells, valid while this struct lives.
    pub fn doorbells(&self) -> DoorbellMap {
        let start = self
            .mapping
            .start()
            .wrapping_add(offset::DOORBELLS as usize)
            .cast();
        // SAFETY: the mapping holds that many bytes from there on, and stays as `new` says.
        unsafe { DoorbellMap::new(start, self.doorbell_bytes) }
    }

    /// Returns the reason why the device is gone, once it is.
    pub fn gone(&self) -> Option<String> {
        if self.gone.get().is_none() && self.mapping.is_lost() {
            let _ = self.gone.set(
                "the mapping of its BAR was taken away: it was reset or removed from outside"
                    .to_owned(),
            );
        }
        self.gone.get().cloned()
    }

    /// Marks the device as gone for the reason `why`, unless it was gone before, and unmaps the BAR.
    pub fn let_go(&self, why: &str) -> Result<()> {
        let _ = self.gone.set(why.to_owned());
        self.mapping.detach()
    }

    fn is_gone(&self) -> bool {
        self.gone.get().is_some() || self.mapping.is_lost()
    }
}

impl RegisterAccess for MappedBar {
    fn identity(&self) -> &ControllerIdentity {
        self.block.identity()
    }

    fn read32(&self, offset: u32) -> u32 {
        let value = self.block.read32(offset);
        if self.is_gone() { u32::MAX } else { value }
    }

    fn read64(&self, offset: u32) -> u64 {
        let value = self.block.read64(offset);
        if self.is_gone() { u64::MAX } else { value }
    }

    fn write32(&self, offset: u32, value: u32) {
        self.block.write32(offset, value);
    }

    fn write64(&self, offset: u32, value: u64) {
        self.block.write64(offset, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;

    fn region(pages: u64) -> (File, VfioRegion) {
        let file = File::from(rustix::fs::memfd_create("bar", MemfdFlags::CLOEXEC).unwrap());
        let whole = 0..pages * host_page() as u64;
        file.set_len(whole.end).unwrap();
        let info = VfioRegion {
            size: whole.end,
            mappable: vec![whole],
            ..VfioRegion::default()
        };
        (file, info)
    }

    fn table(offset: u32) -> Option<MsixTable> {
        Some(MsixTable {
            vectors: 65,
            bar: 0,
            offset,
        })
    }

    #[test]
    fn doorbells_end_before_the_interrupt_table() {
        let (file, info) = region(4);
        let page = host_page();
        let second = 2 * page as u32;
        let bar = MappedBar::new(&file, info.clone(), table(second)).unwrap();
        assert_eq!(bar.doorbell_bytes, 2 * page - 0x1000);
        let mappable = VfioRegion {
            msix_mappable: true,
            ..info.clone()
        };
        let bar = MappedBar::new(&file, mappable, table(second + 0x100)).unwrap();
        assert_eq!(bar.doorbell_bytes, 2 * page - 0xF00);
        let bar = MappedBar::new(&file, info.clone(), None).unwrap();
        assert_eq!(bar.doorbell_bytes, 4 * page - 0x1000);
        assert!(MappedBar::new(&file, info, table(0x1800)).is_err());
    }

    #[test]
    fn a_bar_that_is_taken_away_is_a_device_that_is_gone() {
        let (file, info) = region(4);
        let bar = MappedBar::new(&file, info, None).unwrap();
        bar.write32(0x14, 0x0046_0001);
        assert_eq!(bar.read32(0x14), 0x0046_0001);
        bar.write64(0x28, 0x1234_5678_9ABC_D000);
        assert_eq!(bar.read64(0x28), 0x1234_5678_9ABC_D000);
        assert!(std::ptr::eq(bar.identity(), bar.identity()));
        let pair = |qid| bar.doorbells().pair(nvme_core::spec::Qid(qid), 0);
        assert!(pair(1).is_ok() && pair(u16::MAX).is_err());
        assert_eq!(bar.gone(), None);
        file.set_len(0).unwrap();
        assert_eq!(bar.read64(0), u64::MAX);
        bar.write32(0x14, 0);
        assert_eq!(bar.read32(0x14), u32::MAX, "what is gone takes no value");
        assert!(bar.gone().unwrap().contains("taken away"));
    }

    #[test]
    fn a_device_that_is_let_go_says_why() {
        let (file, info) = region(2);
        let bar = MappedBar::new(&file, info, None).unwrap();
        bar.let_go("it is wanted back").unwrap();
        assert_eq!(bar.read32(0x1C), u32::MAX);
        assert_eq!(bar.gone().unwrap(), "it is wanted back");
    }
}
