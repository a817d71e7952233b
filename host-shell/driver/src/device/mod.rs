//! The trait that a transport implements (registers, doorbells, DMA memory), and the transports: the embedded
//! simulator, vfio-user, VFIO and the kernel module nvme_gpu.
//!
//! A transport only makes the controller accessible; it sends no command and knows no queue. `open` makes one from
//! the text of `--device`; `relay` wraps any of them so that doorbells are ordinary memory words.

pub(crate) mod bar;
pub(crate) mod interrupt;
#[cfg(feature = "vfio")]
pub mod kmod;
pub mod open;
pub mod peer;
pub mod relay;
pub mod ring_memory;
#[cfg(feature = "sim")]
pub mod sim;
#[cfg(feature = "vfio")]
pub mod vfio;
#[cfg(feature = "vfio-user")]
pub mod vfio_user;

use crate::device::bar::DoorbellMap;
use crate::device::peer::PeerMemory;
use crate::device::ring_memory::RingMemory;
use crate::dma::pages::DmaPages;
use crate::error::{Error, Result};
use nvme_core::RegisterAccess;
use nvme_core::spec::Iova;
use nvme_core::spec::register::{ALL_ONES, Cap, Cc, Csts, offset};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A controller that can be reached. Object-safe: everything above works on `Arc<dyn Device>`.
///
/// A device that is gone stays gone: registers read as all ones, writes are lost, and
/// [`gone`](Self::gone) says why. Open it again to find out whether it came back.
pub trait Device: Send + Sync {
    /// Returns the name that the user gave, for messages.
    fn name(&self) -> String;

    /// Describes the implementation that executes commands: "embedded simulator, 1 thread", "PCIe
    /// 0000:01:00.0".
    fn describe(&self) -> String;

    /// Returns the controller's properties. Not on the I/O path.
    fn registers(&self) -> &(dyn RegisterAccess + Sync);

    /// Returns the mapped doorbells, valid as long as this device.
    fn doorbells(&self) -> DoorbellMap;

    /// Allocates page-aligned memory fit for DMA. The default is anonymous memory.
    fn alloc_dma(&self, bytes: usize) -> Result<DmaPages> {
        DmaPages::new(bytes)
    }

    /// Maps `pages` for DMA by the controller; they come from [`alloc_dma`](Self::alloc_dma). Returns the I/O
    /// virtual address, which may differ from their address.
    ///
    /// The device keeps its share of `pages` until [`unmap_dma`](Self::unmap_dma).
    fn map_dma(&self, pages: &Arc<DmaPages>) -> Result<Iova>;

    /// Ends the controller's access to the mapping of `bytes` bytes at `iova`; waits for accesses in progress.
    ///
    /// # Errors
    /// An error for bytes that are no mapping, or only a part of one; nothing is unmapped then.
    fn unmap_dma(&self, iova: Iova, bytes: usize) -> Result<()>;

    /// Lets the controller move data into and out of `memory` of a GPU; returns the address that it
    /// Lets the controller move data into and out of `memory` of a GPU; returns the address that it uses.
    /// [`unmap_dma`](Self::unmap_dma) ends that. The default returns an error.
    ///
    /// # Errors
    /// [`Error::Usage`] if the transport cannot reach such memory.
    fn map_peer(&self, memory: PeerMemory) -> Result<Iova> {
        let _ = memory;
        Err(Error::usage(
            format!("{} cannot reach GPU memory", self.name()),
            "use --tier 1 or 0",
        ))
    }

    /// True if the controller accesses memory of [`map_peer`](Self::map_peer) by DMA. A simulated one needs a
    /// thread of this process that calls the GPU's driver, which waits where kernels wait for the controller.
    fn reaches_peers(&self) -> bool {
        false
    }

    /// Resets the function, by default with [`disable`](Self::disable). Every queue, the admin queue
    /// too, is gone afterwards.
    fn reset(&self) -> Result<()> {
        self.disable()
    }

    /// Clears CC.EN and waits until the controller is disabled, as long as CAP.TO allows.
    fn disable(&self) -> Result<()> {
        let registers = self.registers();
        let gone = |what: &str| Error::Gone {
            cause: self
                .gone()
                .unwrap_or_else(|| format!("{} {what}", self.name())),
        };
        let units = Cap(registers.read64(offset::CAP)).to();
        let limit = Duration::from_millis(500) * u32::from(units).max(2);
        registers.write32(offset::CC, Cc(0).0);
        let start = Instant::now();
        loop {
            match registers.read32(offset::CSTS) {
                ALL_ONES => return Err(gone("reads as all ones")),
                csts if !Csts(csts).rdy() => return Ok(()),
                _ if start.elapsed() > limit => return Err(gone("does not become disabled")),
                _ => std::thread::yield_now(),
            }
        }
    }

    /// Enables the controller memory buffer, maps it and returns it: memory inside the controller for queues.
    ///
    /// # Errors
    /// [`Error::Device`] when the controller has none, or this transport cannot map it.
    fn controller_memory(&self) -> Result<Arc<RingMemory>> {
        Err(Error::usage(
            format!(
                "{}: controller memory cannot be mapped through this transport",
                self.name()
            ),
            "use --rings host",
        ))
    }

    /// Arms at most `vectors` interrupt vectors, from 0 on: an event descriptor for each that there is.
    ///
    /// # Errors
    /// [`Error::Device`] when the device has no interrupts, or this transport does not pass them on.
    fn interrupts(&self, vectors: u16) -> Result<Vec<OwnedFd>> {
        let _ = vectors;
        Err(Error::usage(
            format!(
                "{}: there are no interrupts through this transport",
                self.name()
            ),
            "leave --irq out",
        ))
    }

    /// Returns the reason why the device has stopped answering, once it has. The default never knows one.
    ///
    /// From then on no new memory is mapped, and memory that [`unmap_dma`](Self::unmap_dma) unmaps is out of
    /// its reach for good, whatever commands were still in flight.
    fn gone(&self) -> Option<String> {
        None
    }

    /// Closes the connection to a device that is no longer usable, although its memory may still be in use:
    /// afterwards the device is [`gone`](Self::gone). The default has no connection.
    fn leave(&self) {}

    /// True if a disk in use may be behind it: commands that change data then need `--allow-write`.
    fn guards_data(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_core::ControllerIdentity;

    /// A controller whose status register says one thing.
    struct Stuck {
        csts: u32,
        identity: ControllerIdentity,
    }

    impl Stuck {
        fn at(csts: u32) -> Self {
            Self {
                csts,
                identity: ControllerIdentity::new(),
            }
        }
    }

    impl RegisterAccess for Stuck {
        fn identity(&self) -> &ControllerIdentity {
            &self.identity
        }

        fn read32(&self, _: u32) -> u32 {
            self.csts
        }

        fn read64(&self, _: u32) -> u64 {
            0
        }

        fn write32(&self, _: u32, _: u32) {}

        fn write64(&self, _: u32, _: u64) {}
    }

    impl Device for Stuck {
        fn name(&self) -> String {
            "stuck".to_owned()
        }

        fn describe(&self) -> String {
            self.name()
        }

        fn registers(&self) -> &(dyn RegisterAccess + Sync) {
            self
        }

        fn doorbells(&self) -> DoorbellMap {
            DoorbellMap::of_words(&[], 0)
        }

        fn map_dma(&self, pages: &Arc<DmaPages>) -> Result<Iova> {
            Ok(Iova(pages.len() as u64))
        }

        fn unmap_dma(&self, _: Iova, _: usize) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_controller_is_disabled_or_the_reason_is_told() {
        let ready = 1;
        assert!(Stuck::at(0).reset().is_ok());
        for (csts, part) in [
            (ALL_ONES, "reads as all ones"),
            (ready, "does not become disabled"),
        ] {
            let error = Stuck::at(csts).reset().unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_transport_that_offers_nothing_more_says_so() {
        let device = Stuck::at(0);
        assert!(device.alloc_dma(4096).unwrap().len() >= 4096);
        let memory = PeerMemory {
            address: 0x1000,
            bytes: 4096,
            in_host: false,
            dma_buf: Box::new(|| Err(Error::internal("a dma-buf for this device"))),
            #[cfg(feature = "sim")]
            copier: Box::new(|_, _| Err(Error::internal("a copier for this device"))),
        };
        let refused = [
            (device.controller_memory().map(drop), "controller memory"),
            (device.interrupts(1).map(drop), "no interrupts"),
            (device.map_peer(memory).map(drop), "cannot reach GPU memory"),
        ];
        for (result, part) in refused {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        device.leave();
        assert!(device.gone().is_none() && !device.guards_data() && !device.reaches_peers());
    }
}
