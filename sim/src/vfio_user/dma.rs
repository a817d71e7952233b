//! The client's memory: which ranges the controller may reach, and how.

use super::wire::{self, DmaMap, DmaUnmap};
use crate::memory::{GuestMemory, HostMemory, MAX_MAPPINGS, MapError};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::vec::Vec;

/// Ranges of one client at the same time at most.
pub(crate) const MAX_RANGES: usize = MAX_MAPPINGS;

struct Range {
    size: u64,
    /// Mapped here; otherwise reached by messages or not at all.
    guest: Option<Arc<GuestMemory>>,
}

/// The ranges of one client. Dropping it takes all of them away.
pub(crate) struct DmaTable {
    memory: HostMemory,
    ranges: BTreeMap<u64, Range>,
}

impl DmaTable {
    pub fn new(memory: HostMemory) -> Self {
        Self {
            memory,
            ranges: BTreeMap::new(),
        }
    }

    /// DMA_MAP. The descriptor is not kept.
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
            None => None,
        };
        let size = map.size;
        self.ranges.insert(map.address, Range { size, guest });
        Ok(())
    }

    fn map_file(&self, map: DmaMap, fd: &OwnedFd) -> Result<Arc<GuestMemory>, Errno> {
        let writable = map.flags & wire::DMA_WRITABLE != 0;
        let guest = GuestMemory::map(fd.as_fd(), map.offset, map.size, writable)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        let guest = Arc::new(guest);
        if writable {
            self.memory
                .map_guest(map.address, map.size, guest.clone())
                .map_err(|error| match error {
                    MapError::Overlap => Errno::EXIST,
                    MapError::BadRange | MapError::Misaligned => Errno::INVAL,
                })?;
        }
        Ok(guest)
    }

    /// DMA_UNMAP: every range inside the one that is named; when it returns, no access is in
    /// progress.
    ///
    /// # Errors
    /// EINVAL when a range is only partly inside, ENOENT when there is none, EOPNOTSUPP for dirty
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

    /// Takes everything away.
    pub fn clear(&mut self) {
        self.memory.unmap(0, u64::MAX);
        self.ranges.clear();
    }

    /// Whether the client has taken a file away under its mapping.
    pub fn is_lost(&self) -> bool {
        let mut guests = self
            .ranges
            .values()
            .filter_map(|range| range.guest.as_ref());
        guests.any(|guest| guest.is_lost())
    }
}

impl Drop for DmaTable {
    fn drop(&mut self) {
        self.clear();
    }
}
