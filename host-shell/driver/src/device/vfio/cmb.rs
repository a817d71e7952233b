//! The controller memory buffer of a controller behind VFIO: finds its place in a BAR, enables it and maps it, so
//! that rings or data can lie inside the controller.
// UNSAFETY: the mapped BAR is handed on as controller memory.
#![allow(unsafe_code)]

use super::inner::{VfioInner, region};
use super::mapping::UncachedMapping;
use crate::device::ring_memory::RingMemory;
use crate::dma::pages::host_page;
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::sysfs::SysfsHost;
use nvme_core::RegisterAccess;
use nvme_core::spec::register::{Cap, Cmbloc, Cmbmsc, Cmbsz, offset};
use std::ptr::NonNull;

/// CMBSTS: the controller base address is invalid.
const CBAI: u32 = 1;

fn none(why: &str) -> Error {
    Error::device(
        format!("no queues in controller memory: {why}"),
        "use --rings host",
    )
}

/// Finds the controller memory buffer and maps it. The controller addresses it by its bus address: without CMBMSC it
/// has no other address, and with CMBMSC the driver writes this one there. No memory is mapped at that address from
/// then on.
///
/// NVMe Base 2.0c, 3.1.3.11 (CMBLOC), 3.1.3.12 (CMBSZ), 3.1.3.16 (CMBMSC).
pub fn open(inner: &VfioInner) -> Result<RingMemory> {
    let registers = &inner.bar;
    let has_control = Cap(registers.read64(offset::CAP)).cmbs();
    let mut control = Cmbmsc(0);
    if has_control {
        control.set_cre(true);
        registers.write64(offset::CMBMSC, control.0);
    }
    let size = Cmbsz(registers.read32(offset::CMBSZ));
    let place = Cmbloc(registers.read32(offset::CMBLOC));
    let Some(unit) = size.unit().filter(|_| size.sz() > 0) else {
        return Err(none("the controller has no controller memory buffer"));
    };
    if !size.sqs() && !size.cqs() {
        return Err(none("its controller memory buffer takes no queues"));
    }
    let start = u64::from(place.ofst()) * unit;
    let (mapping, bytes) = map(inner, place.bir(), start, size.bytes())?;
    let resource = SysfsHost::here()
        .function(inner.address)
        .and_then(|function| function.resource(place.bir()))
        .ok_or_else(|| none("sysfs does not tell the address of its BAR"))?;
    let address = resource.start + start;
    if !inner.group.reserve(address..address.saturating_add(bytes)) {
        return Err(none("memory is mapped at its bus address"));
    }
    if has_control {
        control.set_cba(address >> 12);
        control.set_cmse(true);
        registers.write64(offset::CMBMSC, control.0);
        if registers.read32(offset::CMBSTS) & CBAI != 0 {
            return Err(none("the controller refuses the address that it was given"));
        }
        let _ = inner.cmb_control.set(control);
    }
    let at = NonNull::new(mapping.start()).ok_or_else(|| none("it is mapped nowhere"))?;
    // SAFETY: the mapping is whole pages of that many bytes and lives in the box; this driver alone has
    // the device, and takes the buffer once.
    Ok(unsafe { RingMemory::new(at, bytes, address, size, Box::new(mapping)) })
}

/// Maps the part of the buffer that can be mapped, from its start on.
fn map(inner: &VfioInner, bar: u8, start: u64, bytes: u64) -> Result<(UncachedMapping, u64)> {
    if !matches!(bar, 0 | 2..=5) {
        return Err(none("CMBLOC names a BAR that there is not"));
    }
    let file = lock(&inner.file);
    let Some(file) = &*file else {
        return Err(Error::Gone {
            cause: inner.bar.gone().unwrap_or_default(),
        });
    };
    let info = region(file, u32::from(bar))?;
    let end = start.saturating_add(bytes);
    let area = info
        .mappable_from(start)
        .ok_or_else(|| none("its BAR cannot be mapped there"))?;
    let page = host_page() as u64;
    let bytes = (area.end.min(end) - start) / page * page;
    let len = usize::try_from(bytes).map_err(|_| none("it is larger than the address space"))?;
    if len == 0 {
        return Err(none("it is smaller than a page"));
    }
    Ok((UncachedMapping::new(file, info.offset + start, len)?, bytes))
}
