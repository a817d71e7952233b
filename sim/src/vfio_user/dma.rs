//! The client's memory: the ranges that the controller may reach, and the access to each of them:
//! mapped here, copied from a read-only mapping, or by messages.

use super::requests::ClientRequests;
use super::wire::{self, DmaMap, DmaUnmap};
use crate::memory::{GuestMemory, HostMemory, MAX_MAPPINGS, MapError, RemoteMemory};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::vec::Vec;

/// Limit of the ranges of one client at the same time.
pub(crate) const MAX_RANGES: usize = MAX_MAPPINGS;

struct ClientRange {
    size: u64,
    /// The mapping in this process, if there is one; otherwise the range is reached by messages.
    guest: Option<Arc<GuestMemory>>,
}

/// The ranges of one client. Dropping the table unmaps all of them.
pub(crate) struct DmaTable {
    memory: HostMemory,
    requests: Arc<ClientRequests>,
    ranges: BTreeMap<u64, ClientRange>,
    /// Number of lost mappings of the process that were checked so far.
    losses: usize,
}

impl DmaTable {
    /// Makes an empty table. Memory without a descriptor is reached by `requests`.
    pub fn new(memory: HostMemory, requests: Arc<ClientRequests>) -> Self {
        Self {
            memory,
            requests,
            ranges: BTreeMap::new(),
            losses: GuestMemory::losses(),
        }
    }

    /// Handles DMA_MAP. The descriptor is not kept.
    pub fn map(&mut self, map: DmaMap, fds: Vec<OwnedFd>) -> Result<(), Errno> {
        let known = wire::DMA_READABLE | wire::DMA_WRITABLE;
        let end = map.address.checked_add(map.size).ok_or(Errno::INVAL)?;
        if map.flags & !known != 0 || map.size == 0 || fds.len() > 1 {
            return Err(Errno::INVAL);
        }
        let before = self.ranges.range(..end).next_back();
        if before.is_some_and(|(start, range)| start + range.size > map.address) {
            return Err(Errno::EXIST);
        }
        if self.ranges.len() >= MAX_RANGES {
            return Err(Errno::NOSPC);
        }
        let guest = match fds.first() {
            Some(fd) => Some(self.map_file(map, fd)?),
            None => {
                let remote = MessageMemory {
                    requests: self.requests.clone(),
                    flags: map.flags,
                };
                self.enter(|memory| memory.map_remote(map.address, map.size, Arc::new(remote)))?;
                None
            }
        };
        let size = map.size;
        self.ranges.insert(map.address, ClientRange { size, guest });
        Ok(())
    }

    fn map_file(&self, map: DmaMap, fd: &OwnedFd) -> Result<Arc<GuestMemory>, Errno> {
        let writable = map.flags & wire::DMA_WRITABLE != 0;
        let guest = GuestMemory::map(fd.as_fd(), map.offset, map.size, writable)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        let guest = Arc::new(guest);
        self.enter(|memory| match writable {
            true => memory.map_guest(map.address, map.size, guest.clone()),
            false => {
                let copied = ReadOnlyMemory {
                    start: map.address,
                    guest: guest.clone(),
                };
                memory.map_remote(map.address, map.size, Arc::new(copied))
            }
        })?;
        Ok(guest)
    }

    fn enter(&self, map: impl FnOnce(&HostMemory) -> Result<(), MapError>) -> Result<(), Errno> {
        map(&self.memory).map_err(|error| match error {
            MapError::Overlap => Errno::EXIST,
            MapError::BadRange | MapError::Misaligned => Errno::INVAL,
        })
    }

    /// Handles DMA_UNMAP: unmaps every range inside the given one. When it returns, no access is in
    /// progress.
    ///
    /// # Errors
    /// EINVAL for a range that is only partly inside, ENOENT if there is none, EOPNOTSUPP for dirty
    /// pages.
    pub fn unmap(&mut self, unmap: DmaUnmap) -> Result<(), Errno> {
        match unmap.flags {
            0 => {}
            wire::UNMAP_ALL if unmap.address == 0 && unmap.size == 0 => {
                self.clear();
                return Ok(());
            }
            wire::UNMAP_DIRTY_BITMAP => return Err(Errno::OPNOTSUPP),
            _ => return Err(Errno::INVAL),
        }
        let last = unmap.size.checked_sub(1).ok_or(Errno::INVAL)?;
        let last = unmap.address.checked_add(last).ok_or(Errno::INVAL)?;
        let before = self.ranges.range(..unmap.address).next_back();
        if before.is_some_and(|(start, range)| start + range.size > unmap.address) {
            return Err(Errno::INVAL);
        }
        let inside = self.ranges.range(unmap.address..=last);
        let (mut starts, mut end) = (Vec::new(), 0);
        for (start, range) in inside {
            starts.push(*start);
            end = start + (range.size - 1);
        }
        if starts.is_empty() {
            return Err(Errno::NOENT);
        }
        if end > last {
            return Err(Errno::INVAL);
        }
        self.memory.unmap(unmap.address, unmap.size);
        for start in starts {
            self.ranges.remove(&start);
        }
        Ok(())
    }

    /// Unmaps everything.
    pub fn clear(&mut self) {
        self.memory.unmap(0, u64::MAX);
        self.ranges.clear();
    }

    /// True if the client has truncated a file under its mapping since the last call.
    pub fn is_lost(&mut self) -> bool {
        let losses = GuestMemory::losses();
        if core::mem::replace(&mut self.losses, losses) == losses {
            return false;
        }
        let mut guests = self
            .ranges
            .values()
            .filter_map(|range| range.guest.as_ref());
        guests.any(|guest| guest.is_lost())
    }
}

/// Memory that the client allows the device to read only: writes of the controller are discarded.
struct ReadOnlyMemory {
    start: u64,
    guest: Arc<GuestMemory>,
}

impl RemoteMemory for ReadOnlyMemory {
    fn read(&self, at: u64, into: &mut [u8]) -> bool {
        let span = self.guest.span();
        let from = usize::try_from(at.wrapping_sub(self.start)).ok();
        let from = from.and_then(|offset| span.slice(offset, into.len()));
        from.map(|from| from.read(into)).is_some()
    }

    fn write(&self, _at: u64, _from: &[u8]) -> bool {
        false
    }
}

/// Memory without a descriptor, reached by messages.
struct MessageMemory {
    requests: Arc<ClientRequests>,
    flags: u32,
}

impl RemoteMemory for MessageMemory {
    fn read(&self, at: u64, into: &mut [u8]) -> bool {
        if self.flags & wire::DMA_READABLE != 0 {
            return self.requests.read(at, into);
        }
        // The client does not allow reads, so the contents are unknown: zeroes stand in for them.
        // Writes are sent, and only the words that the controller changes are written back.
        into.fill(0);
        self.flags & wire::DMA_WRITABLE != 0
    }

    fn write(&self, at: u64, from: &[u8]) -> bool {
        self.flags & wire::DMA_WRITABLE != 0 && self.requests.write(at, from)
    }
}

impl Drop for DmaTable {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_ranges_is_limited() {
        let mut table = DmaTable::new(HostMemory::new(), Arc::new(ClientRequests::new(None)));
        for i in 0..MAX_RANGES as u64 {
            let guest = None;
            table
                .ranges
                .insert(i * 4096, ClientRange { size: 4096, guest });
        }
        let map = DmaMap {
            argsz: 32,
            flags: 0,
            offset: 0,
            address: 1 << 40,
            size: 4096,
        };
        assert_eq!(table.map(map, Vec::new()), Err(Errno::NOSPC));
        table.clear();
        assert_eq!(table.map(map, Vec::new()), Ok(()));
    }
}
