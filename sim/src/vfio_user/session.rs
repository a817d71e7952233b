//! The state of one client, and the effect of each of its messages.
//!
//! Nothing here touches a socket, so every message can be tested and fuzzed as bytes.

use super::channel::parse_front;
use super::dma::{DmaTable, MAX_RANGES};
use super::function::PciFunction;
use super::requests::ClientRequests;
use super::wire::{self, command, irq, region};
use crate::memory::HostMemory;
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::vec::Vec;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Limit of the writes in one REGION_WRITE_MULTI.
const MAX_WRITES: u64 = 256;

/// Number of descriptors in one message that clients are offered: QEMU rejects an answer with more.
const OFFERED_FDS: u64 = 16;

/// Payload and descriptors of the reply to a command.
#[derive(Debug, Default)]
pub(crate) struct CommandAnswer {
    pub body: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl CommandAnswer {
    fn of<T: IntoBytes + Immutable>(body: &T) -> Self {
        Self {
            body: body.as_bytes().to_vec(),
            fds: Vec::new(),
        }
    }
}

/// A client and its memory.
pub(crate) struct ClientSession<'a> {
    function: &'a mut PciFunction,
    dma: DmaTable,
    requests: Arc<ClientRequests>,
    /// Number of descriptors that the client accepts in one message.
    client_fds: usize,
    negotiated: bool,
}

impl<'a> ClientSession<'a> {
    /// Makes a session for a client whose memory is added to `memory`, and whose memory without a
    /// descriptor is reached by `requests`.
    pub fn new(
        function: &'a mut PciFunction,
        memory: HostMemory,
        requests: Arc<ClientRequests>,
    ) -> Self {
        Self {
            function,
            dma: DmaTable::new(memory, requests.clone()),
            requests,
            client_fds: wire::DEFAULT_FDS,
            negotiated: false,
        }
    }

    /// True if the client has negotiated the version.
    pub fn is_negotiated(&self) -> bool {
        self.negotiated
    }

    /// True if the client has truncated a file that it had mapped.
    pub fn has_lost_memory(&mut self) -> bool {
        self.dma.is_lost()
    }

    /// Executes command `code` with `body` and `fds`. Descriptors that are not kept are closed.
    ///
    /// # Errors
    /// The errno of the reply: EINVAL for invalid fields, EOPNOTSUPP for a command or option that
    /// is not supported.
    pub fn answer(
        &mut self,
        code: u16,
        body: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<CommandAnswer, Errno> {
        if code == command::VERSION {
            return self.version(body);
        }
        if !self.negotiated {
            return Err(Errno::INVAL);
        }
        match code {
            command::DMA_MAP => {
                self.dma.map(parse_front(body)?, fds)?;
                Ok(CommandAnswer::default())
            }
            command::DMA_UNMAP => {
                let unmap = parse_front(body)?;
                self.dma.unmap(unmap)?;
                Ok(CommandAnswer::of(&unmap))
            }
            command::DEVICE_GET_INFO => device_info(parse_front(body)?),
            command::DEVICE_GET_REGION_INFO => self.region_info(parse_front(body)?),
            command::DEVICE_GET_REGION_IO_FDS => self.region_io_fds(parse_front(body)?),
            command::DEVICE_GET_IRQ_INFO => {
                let info = self.function.irqs.info(parse_front(body)?)?;
                Ok(CommandAnswer::of(&info))
            }
            command::DEVICE_SET_IRQS => {
                let (set, data) = wire::IrqSet::read_from_prefix(body).map_err(|_| Errno::INVAL)?;
                self.function.irqs.set(set, data, fds)?;
                self.function.recheck_pin();
                Ok(CommandAnswer::default())
            }
            command::REGION_READ => self.region_read(parse_front(body)?),
            command::REGION_WRITE => self.region_write(body),
            command::REGION_WRITE_MULTI => self.region_write_multi(body),
            command::DEVICE_RESET => {
                self.function.reset();
                Ok(CommandAnswer::default())
            }
            command::DIRTY_PAGES | command::DEVICE_FEATURE => Err(Errno::OPNOTSUPP),
            _ => Err(Errno::INVAL),
        }
    }

    fn version(&mut self, body: &[u8]) -> Result<CommandAnswer, Errno> {
        let (version, data) =
            wire::VersionPayload::read_from_prefix(body).map_err(|_| Errno::INVAL)?;
        if self.negotiated || version.major != wire::MAJOR {
            return Err(Errno::INVAL);
        }
        let answer = wire::VersionPayload {
            major: wire::MAJOR,
            minor: version.minor.min(wire::MINOR),
        };
        let mut answer = CommandAnswer::of(&answer);
        // The JSON text ends with a NUL, or with the message.
        let text = data.split(|byte| *byte == 0).next().unwrap_or_default();
        if !text.is_empty() {
            let asked: wire::VersionData =
                serde_json::from_slice(text).map_err(|_| Errno::INVAL)?;
            let asked = asked.capabilities;
            let fds = asked.max_msg_fds.unwrap_or(wire::DEFAULT_FDS as u64);
            self.client_fds = fds.min(wire::MAX_FDS as u64) as usize;
            if let Some(bytes) = asked.max_data_xfer_size {
                self.requests.limit(bytes);
            }
            let ours = wire::VersionData {
                capabilities: wire::PeerCapabilities {
                    max_msg_fds: Some(OFFERED_FDS),
                    max_data_xfer_size: Some(wire::MAX_TRANSFER.into()),
                    max_dma_maps: Some(MAX_RANGES as u64),
                    pgsizes: Some(4096),
                    write_multiple: asked.write_multiple,
                },
            };
            // Serialising a structure of numbers cannot fail, but the error has a meaning all the
            // same.
            let text = serde_json::to_vec(&ours).map_err(|_| Errno::INVAL)?;
            answer.body.extend(text);
            answer.body.push(0);
        }
        self.negotiated = true;
        Ok(answer)
    }

    fn region_info(&self, asked: wire::RegionInfo) -> Result<CommandAnswer, Errno> {
        let fixed = size_of::<wire::RegionInfo>();
        if asked.index >= region::COUNT || (asked.argsz as usize) < fixed {
            return Err(Errno::INVAL);
        }
        let mut info = wire::RegionInfo {
            argsz: fixed as u32,
            flags: 0,
            index: asked.index,
            cap_offset: 0,
            size: self.function.bytes(asked.index),
            offset: 0,
        };
        if info.size != 0 {
            info.flags = wire::REGION_READABLE | wire::REGION_WRITABLE;
        }
        let Some((area, fd)) = self.function.mappable(asked.index) else {
            return Ok(CommandAnswer::of(&info));
        };
        let capability = wire::InfoCapability {
            id: wire::CAP_SPARSE_MMAP,
            version: 1,
            next: 0,
        };
        let sparse = wire::SparseMmap {
            areas: 1,
            reserved: 0,
        };
        let capabilities = [capability.as_bytes(), sparse.as_bytes(), area.as_bytes()].concat();
        info.flags |= wire::REGION_MMAP | wire::REGION_CAPS;
        info.argsz += capabilities.len() as u32;
        info.cap_offset = fixed as u32;
        let mut answer = CommandAnswer::of(&info);
        // With too little room the reply has the structure only, whose argsz is the size that the
        // whole reply takes: the client then asks again with enough room.
        if asked.argsz >= info.argsz {
            answer.body.extend(capabilities);
            answer.fds.push(fd);
        }
        Ok(answer)
    }

    /// Offers the doorbells as shadow ioeventfds: the client stores the value in the memory that
    /// comes with the reply, and signals the eventfd of the thread that serves the queue.
    fn region_io_fds(&mut self, asked: wire::RegionIoFds) -> Result<CommandAnswer, Errno> {
        let fixed = size_of::<wire::RegionIoFds>();
        if self.function.bytes(asked.index) == 0
            || asked.flags != 0
            || (asked.argsz as usize) < fixed
        {
            return Err(Errno::INVAL);
        }
        let Some((area, memory)) = self.function.mappable(asked.index) else {
            return Err(Errno::OPNOTSUPP);
        };
        let threads = self.function.runner.wake_events();
        if self.client_fds < threads.len() + 1 {
            return Err(Errno::OPNOTSUPP);
        }
        let queues = u64::from(self.function.controller.max_qid()) + 1;
        let pair = 8u64 << self.function.controller.doorbells().dstrd();
        let one = size_of::<wire::IoEventFd>();
        let mut info = wire::RegionIoFds {
            argsz: (fixed + queues as usize * one) as u32,
            flags: 0,
            index: asked.index,
            count: queues as u32,
        };
        if asked.argsz < info.argsz {
            info.count = 0;
            return Ok(CommandAnswer::of(&info));
        }
        let mut answer = CommandAnswer::of(&info);
        for qid in 0..queues {
            let sub = wire::IoEventFd {
                offset: area.offset + qid * pair,
                size: pair,
                fd_index: 1 + (qid % threads.len() as u64) as u32,
                kind: wire::IO_EVENTFD_SHADOW,
                flags: 0,
                shadow_fd_index: 0,
                shadow_offset: area.offset + qid * pair,
                datamatch: 0,
            };
            answer.body.extend_from_slice(sub.as_bytes());
        }
        answer.fds.push(memory);
        for wake_event in threads {
            let fd = wake_event.fd().try_clone_to_owned();
            answer.fds.push(fd.map_err(|_| Errno::MFILE)?);
        }
        self.function.client_signals = true;
        self.function.set_sleep();
        Ok(answer)
    }

    fn region_read(&mut self, access: wire::RegionAccess) -> Result<CommandAnswer, Errno> {
        if access.count > wire::MAX_TRANSFER {
            return Err(Errno::INVAL);
        }
        let mut answer = CommandAnswer::of(&access);
        let head = answer.body.len();
        answer.body.resize(head + access.count as usize, 0);
        let into = &mut answer.body[head..];
        self.function.read(access.region, access.offset, into)?;
        Ok(answer)
    }

    fn region_write(&mut self, body: &[u8]) -> Result<CommandAnswer, Errno> {
        let (access, data) =
            wire::RegionAccess::read_from_prefix(body).map_err(|_| Errno::INVAL)?;
        let data = data.get(..access.count as usize).ok_or(Errno::INVAL)?;
        self.function.write(access.region, access.offset, data)?;
        Ok(CommandAnswer::of(&access))
    }

    fn region_write_multi(&mut self, body: &[u8]) -> Result<CommandAnswer, Errno> {
        let (count, rest) = u64::read_from_prefix(body).map_err(|_| Errno::INVAL)?;
        if count > MAX_WRITES {
            return Err(Errno::INVAL);
        }
        let size = size_of::<wire::SmallWrite>();
        let writes = rest.get(..count as usize * size).ok_or(Errno::INVAL)?;
        for chunk in writes.chunks_exact(size) {
            let write: wire::SmallWrite = parse_front(chunk)?;
            let wire::RegionAccess {
                offset,
                region,
                count,
            } = write.access;
            let data = write.data.get(..count as usize).ok_or(Errno::INVAL)?;
            self.function.write(region, offset, data)?;
        }
        Ok(CommandAnswer::of(&count))
    }
}

impl Drop for ClientSession<'_> {
    /// Ends the session. The client's memory and descriptors are released, and the next client
    /// finds the function in the state after a reset. A controller that has left the bus is plugged
    /// in again.
    fn drop(&mut self) {
        self.requests.close();
        self.function.client_signals = false;
        self.function.irqs.disarm();
        self.function.controller.plug_in();
        self.function.reset();
        self.dma.clear();
    }
}

fn device_info(asked: wire::DeviceInfo) -> Result<CommandAnswer, Errno> {
    if (asked.argsz as usize) < size_of::<wire::DeviceInfo>() {
        return Err(Errno::INVAL);
    }
    Ok(CommandAnswer::of(&wire::DeviceInfo {
        argsz: size_of::<wire::DeviceInfo>() as u32,
        flags: wire::DEVICE_RESETS | wire::DEVICE_PCI,
        num_regions: region::COUNT,
        num_irqs: irq::COUNT,
    }))
}
