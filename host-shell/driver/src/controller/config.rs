//! Options of bring-up and use of a controller.

use super::notice::NoticeListener;
use crate::device::ring_memory::RingMemory;
#[cfg(doc)]
use crate::error::Error;
use crate::sysfs::CommandScope;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Location of the rings of I/O queues.
#[derive(Clone, Debug, Default)]
pub enum RingLocation {
    /// The rings lie in memory of this process.
    #[default]
    Host,
    /// The rings lie in the controller memory buffer, as far as the controller accepts them there.
    Controller,
    /// The rings lie in memory of another device that the controller can access:
    /// [`DmaBuffer::into_rings`](crate::DmaBuffer::into_rings).
    Peer(Arc<RingMemory>),
}

/// Options of bring-up and use of a controller.
#[derive(Clone, Debug)]
pub struct ControllerConfig {
    /// I/O queue pairs to ask for; the controller may grant fewer.
    pub queue_pairs: u32,
    /// Deadline of a command; after it the command is aborted.
    pub timeout: Duration,
    /// Upper bound of one command's transfer in bytes, whatever MDTS allows.
    pub max_transfer: u64,
    /// Largest number of bytes lent as a host memory buffer; 0 lends none.
    pub max_host_memory: u64,
    /// Location of the rings of I/O queues.
    pub rings: RingLocation,
    /// True if waiting threads sleep until an interrupt, instead of polling.
    pub interrupts: bool,
    /// Data that this session may change, and that must therefore not be in use through another controller of
    /// the subsystem; `None` for a session that only reads.
    pub changes: Option<CommandScope>,
    /// Stop flag: once set, waiting calls return [`Error::Interrupted`].
    pub stop: Option<Arc<AtomicBool>>,
    /// Called with events of the controller, and with waits that are long.
    pub notify: NoticeListener,
}

impl Default for ControllerConfig {
    /// Returns the defaults: 16 queue pairs, 5 s per command, transfers up to 1 MiB, host memory up
    /// to 64 MiB, anything may be changed.
    fn default() -> Self {
        Self {
            queue_pairs: 16,
            timeout: Duration::from_secs(5),
            max_transfer: 1 << 20,
            max_host_memory: 64 << 20,
            rings: RingLocation::Host,
            interrupts: false,
            changes: Some(CommandScope::Subsystem),
            stop: None,
            notify: NoticeListener::default(),
        }
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::controller::Controller;
    use crate::dma::DmaBuffer;
    use nvme_core::spec::{Lba, Nsid, nvm};

    #[test]
    fn rings_lie_in_a_buffer_of_the_callers_while_there_is_room() {
        let device = crate::open("sim:mem?size=1MiB").unwrap();
        let buffer = DmaBuffer::new(&device, 8192).unwrap();
        let config = ControllerConfig {
            rings: RingLocation::Peer(Arc::new(buffer.into_rings().unwrap())),
            ..ControllerConfig::default()
        };
        let controller = Controller::start(Arc::clone(&device), &config).unwrap();
        let mut queue = controller.create_queue_pair(4).unwrap();
        let full = controller.create_queue_pair(4).err().unwrap().to_string();
        assert!(full.contains("memory for rings"), "{full}");
        // Both rings wrap.
        for _ in 0..9 {
            let buffer = controller.alloc(512).unwrap();
            queue
                .submit(nvm::read(Nsid(1), Lba(0), 1), Some(buffer))
                .unwrap();
            queue.ring();
            assert!(queue.wait().unwrap().unwrap().is_success());
        }
        drop(queue);
        controller.create_queue_pair(4).unwrap();
        controller.shut_down().unwrap();
    }

    #[test]
    fn less_than_a_page_is_no_place_for_rings() {
        let device = crate::open("sim:mem?size=1MiB").unwrap();
        for bytes in [1, 4095] {
            let buffer = DmaBuffer::new(&device, bytes).unwrap();
            assert!(buffer.into_rings().is_err(), "{bytes} bytes");
        }
        let mut several = DmaBuffer::several(&device, 6144, 2).unwrap();
        let second = several.pop().unwrap();
        assert!(second.into_rings().is_err(), "not at a page");
    }
}
