//! The table: on the drives, and once more in memory of the host.
// UNSAFETY: threads write parts of one mapping.
#![allow(unsafe_code)]

use crate::measure::GatherCases;
use nvme_core::bringup::NamespaceInfo;
use nvme_core::spec::{Lba, Nsid};
use nvme_core::stripes::StripeLayout;
use nvme_driver::controller::Controller;
use nvme_driver::dma::pages::DmaPages;
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::work::data_word;
use zerocopy::IntoBytes;

/// Bytes of a stripe, where the table lies on several drives.
pub(super) const STRIPE_BYTES: u64 = 128 << 10;
/// Bytes written at a time.
const CHUNK: usize = 4 << 20;

/// Returns the number of threads that the machine runs at a time.
pub(in crate::gpu) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Checks that the drives have room for the whole table, before any of it is written.
///
/// # Errors
/// [`Error::Usage`] if they have not, and for rows that are longer than the table.
pub(in crate::gpu) fn check_room(
    controllers: &[(Controller, NamespaceInfo)],
    (nsid, cases): (Nsid, &GatherCases),
) -> Result<()> {
    cases.check_rows()?;
    let mut room = u64::MAX;
    for (controller, _) in controllers {
        let namespace = controller.namespace(nsid)?;
        room = room.min(namespace.blocks() * u64::from(namespace.block_bytes()));
    }
    let drives = controllers.len() as u64;
    if drives > 1 {
        // Stripes lie on each drive, as many whole ones as the smallest has.
        room = room / STRIPE_BYTES * STRIPE_BYTES * drives;
    }
    match room < cases.table_bytes {
        false => Ok(()),
        true => Err(Error::usage(
            format!(
                "the table needs {} bytes, and the device has {room}",
                cases.table_bytes
            ),
            "use a larger device, or a smaller --table",
        )),
    }
}

/// Writes the table to the drives.
pub(in crate::gpu) fn lay_out(
    controllers: &[(Controller, NamespaceInfo)],
    (nsid, cases): (Nsid, &GatherCases),
) -> Result<()> {
    let mut namespaces = controllers
        .iter()
        .map(|(controller, _)| controller.namespace(nsid))
        .collect::<Result<Vec<_>>>()?;
    let stripe_bytes = match controllers.len() {
        1 => u64::MAX,
        _ => STRIPE_BYTES,
    };
    let none = || Error::usage("there is no drive", "name one");
    let stripes = StripeLayout::new(stripe_bytes, controllers.len() as u32).ok_or_else(none)?;
    let mut chunk = vec![0u64; CHUNK / 8];
    let mut at = 0;
    while at < cases.table_bytes {
        let spot = stripes.spot(at);
        let bytes = (cases.table_bytes - at).min(CHUNK as u64).min(spot.room) as usize;
        for (index, word) in chunk[..bytes / 8].iter_mut().enumerate() {
            *word = data_word(cases.seed, at / 8 + index as u64);
        }
        let namespace = &mut namespaces[spot.member as usize];
        let lba = Lba(spot.offset / u64::from(namespace.block_bytes()));
        namespace.write(lba, chunk[..bytes / 8].as_bytes())?;
        at += bytes as u64;
    }
    Ok(())
}

/// Fills memory with the same rows.
pub(super) fn fill(pages: &DmaPages, seed: u64) {
    let words = pages.len() / 8;
    let threads = cores();
    let start = pages.start().cast::<u64>().expose_provenance();
    std::thread::scope(|scope| {
        for part in 0..threads {
            let range = words * part / threads..words * (part + 1) / threads;
            scope.spawn(move || {
                let start = std::ptr::with_exposed_provenance_mut::<u64>(start);
                for index in range {
                    // SAFETY: the access stays inside the pages; each word is written by one thread, which ends before
                    // the pages are used.
                    unsafe { start.add(index).write(data_word(seed, index as u64)) };
                }
            });
        }
    });
}
