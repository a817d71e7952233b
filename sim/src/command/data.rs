//! Moves data between the driver's memory and a store, along the data pointer of a command. A
//! write checks the whole data pointer before it changes a block, so that a bad pointer has no effect.

use crate::command::{prp, sgl};
use crate::medium::store::{BlockStore, StoreError};
use crate::memory::{Dma, MemorySpan};
use nvme_spec::{PageSize, Psdt, Sqe, Status};

/// Direction of the data of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DataDirection {
    ToHost,
    FromHost,
}

/// The data pointer of one command, with the memory and the page size that it refers to.
pub(crate) struct DataPointer<'a, 'g> {
    pub dma: &'a Dma<'g>,
    pub sqe: &'a Sqe,
    pub page: PageSize,
    pub len: u64,
}

/// Returns the status for an error of a store.
pub(crate) fn store_status(error: StoreError, direction: DataDirection) -> Status {
    match (error, direction) {
        (StoreError::OutOfBounds, _) => Status::LBA_OUT_OF_RANGE,
        (StoreError::Io(_), DataDirection::FromHost) => Status::WRITE_FAULT,
        (StoreError::Io(_), DataDirection::ToHost) => Status::UNRECOVERED_READ_ERROR,
    }
}

impl<'g> DataPointer<'_, 'g> {
    /// Calls `each(address, bytes)` for the extents in order; the address is `None` in a bit
    /// bucket.
    #[inline]
    pub fn walk(
        &self,
        direction: DataDirection,
        mut each: impl FnMut(Option<u64>, usize) -> Result<(), Status>,
    ) -> Result<(), Status> {
        match self.sqe.psdt() {
            Psdt::Prp => prp::walk(self.dma, self.sqe.dptr, self.len, self.page, |at, len| {
                each(Some(at), len)
            }),
            Psdt::SglMptrBuffer | Psdt::SglMptrSgl => {
                let to_host = direction == DataDirection::ToHost;
                sgl::walk(self.dma, self.sqe.dptr, self.len, to_host, each)
            }
            Psdt::Reserved => Err(Status::INVALID_FIELD),
        }
    }

    /// Checks that every extent is mapped, and moves nothing.
    pub fn check(&self, direction: DataDirection) -> Result<(), Status> {
        self.walk(direction, |at, len| match at {
            Some(at) => self
                .dma
                .check(at, len)
                .map_err(|_| Status::DATA_TRANSFER_ERROR),
            None => Ok(()),
        })
    }

    /// Calls `each` with every mapped range and its position in the data.
    #[inline]
    fn for_each_range(
        &self,
        direction: DataDirection,
        mut each: impl FnMut(u64, MemorySpan<'g>) -> Result<(), Status>,
    ) -> Result<(), Status> {
        let mut done = 0;
        // Pages at consecutive addresses are joined and moved as one, because a peer's memory costs
        // one call of its copy engine for each range.
        let mut joined: Option<(u64, usize)> = None;
        self.walk(direction, |at, len| {
            if let (Some(at), Some((start, so_far))) = (at, &mut joined)
                && start.wrapping_add(*so_far as u64) == at
            {
                *so_far += len;
                return Ok(());
            }
            if let Some((start, so_far)) = joined.take() {
                self.mapped_range(start, so_far, &mut done, &mut each)?;
            }
            match at {
                Some(at) => joined = Some((at, len)),
                None => done += len as u64,
            }
            Ok(())
        })?;
        match joined {
            Some((start, len)) => self.mapped_range(start, len, &mut done, &mut each),
            None => Ok(()),
        }
    }

    #[inline]
    fn mapped_range(
        &self,
        at: u64,
        len: usize,
        done: &mut u64,
        each: &mut impl FnMut(u64, MemorySpan<'g>) -> Result<(), Status>,
    ) -> Result<(), Status> {
        let mut result = Ok(());
        self.dma
            .extents(at, len, |extent| {
                if result.is_ok() {
                    result = each(*done, extent);
                }
                if extent.is_lost() {
                    result = Err(Status::DATA_TRANSFER_ERROR);
                }
                *done += extent.len() as u64;
            })
            .map_err(|_| Status::DATA_TRANSFER_ERROR)?;
        result
    }

    /// Copies bytes to the data pointer.
    pub fn scatter(&self, from: &[u8]) -> Result<(), Status> {
        self.for_each_range(DataDirection::ToHost, |at, extent| {
            extent.write(from.get(at as usize..).unwrap_or(&[]));
            Ok(())
        })
    }

    /// Copies the data into bytes.
    pub fn gather(&self, into: &mut [u8]) -> Result<(), Status> {
        self.for_each_range(DataDirection::FromHost, |at, extent| {
            extent.read(into.get_mut(at as usize..).unwrap_or(&mut []));
            Ok(())
        })
    }

    /// Reads the data from `offset` of `store` on into the driver's memory.
    #[inline]
    pub fn read(
        &self,
        store: &'g dyn BlockStore,
        offset: u64,
        scratch: &mut [u8],
    ) -> Result<(), Status> {
        let direction = DataDirection::ToHost;
        if let Some(image) = store.span() {
            let from = image.slice(offset as usize, self.len as usize);
            let from = from.ok_or(Status::LBA_OUT_OF_RANGE)?;
            return self.for_each_range(direction, |at, extent| {
                let from = from
                    .slice(at as usize, extent.len())
                    .ok_or(Status::INTERNAL_ERROR)?;
                self.dma.copy(from, extent);
                Ok(())
            });
        }
        let (mut start, mut filled) = (0, 0);
        self.for_each_range(direction, |at, extent| {
            let mut done = 0;
            while done < extent.len() {
                let at = at + done as u64;
                if at < start || at >= start + filled as u64 {
                    filled = (self.len - at).min(scratch.len() as u64) as usize;
                    start = at;
                    store
                        .read_at(offset + at, &mut scratch[..filled])
                        .map_err(|error| store_status(error, direction))?;
                }
                let staged = &scratch[(at - start) as usize..filled];
                let take = staged.len().min(extent.len() - done);
                extent
                    .slice(done, take)
                    .ok_or(Status::INTERNAL_ERROR)?
                    .write(staged);
                done += take;
            }
            Ok(())
        })
    }

    /// Writes the data to `offset` of `store` on. The caller has checked the whole data pointer, so
    /// that a bad one changes no block.
    pub fn write(
        &self,
        store: &dyn BlockStore,
        offset: u64,
        scratch: &mut [u8],
    ) -> Result<(), Status> {
        let direction = DataDirection::FromHost;
        if let Some(image) = store.span() {
            let to = image.slice(offset as usize, self.len as usize);
            let to = to.ok_or(Status::LBA_OUT_OF_RANGE)?;
            return self.for_each_range(direction, |at, extent| {
                extent.copy_to(
                    to.slice(at as usize, extent.len())
                        .ok_or(Status::INTERNAL_ERROR)?,
                );
                Ok(())
            });
        }
        self.for_each_fill(scratch, |at, bytes| {
            store
                .write_at(offset + at, bytes)
                .map_err(|error| store_status(error, direction))
        })
    }

    /// Compares the data with the blocks at `offset` of `store`.
    pub fn compare(
        &self,
        store: &dyn BlockStore,
        offset: u64,
        scratch: &mut [u8],
    ) -> Result<(), Status> {
        let half = scratch.len() / 2;
        let (staging, other) = scratch.split_at_mut(half);
        self.check(DataDirection::FromHost)?;
        self.for_each_fill(staging, |at, bytes| {
            let stored = &mut other[..bytes.len()];
            store
                .read_at(offset + at, stored)
                .map_err(|error| store_status(error, DataDirection::ToHost))?;
            if stored == bytes {
                Ok(())
            } else {
                Err(Status::COMPARE_FAILURE)
            }
        })
    }

    /// Gathers the data into `scratch` and calls `each` with every fill and its position in the
    /// data.
    fn for_each_fill(
        &self,
        scratch: &mut [u8],
        mut each: impl FnMut(u64, &[u8]) -> Result<(), Status>,
    ) -> Result<(), Status> {
        let (mut start, mut filled) = (0, 0);
        self.for_each_range(DataDirection::FromHost, |_, extent| {
            let mut done = 0;
            while done < extent.len() {
                let take = (scratch.len() - filled).min(extent.len() - done);
                let part = extent.slice(done, take).ok_or(Status::INTERNAL_ERROR)?;
                part.read(&mut scratch[filled..]);
                done += take;
                filled += take;
                if filled == scratch.len() {
                    each(start, scratch)?;
                    start += filled as u64;
                    filled = 0;
                }
            }
            Ok(())
        })?;
        each(start, &scratch[..filled])
    }
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use crate::config::settings::NamespaceConfig;
    use crate::medium::file::FileStore;
    use crate::testing::{DATA, Driver, config};
    use alloc::boxed::Box;
    use nvme_spec::{Lba, Nsid, Status, nvm};
    use std::vec::Vec;

    /// More blocks than the scratch buffer holds, so that it is filled several times.
    const BLOCKS: u32 = 1000;
    const BYTES: usize = BLOCKS as usize * 512;

    #[test]
    fn a_file_is_read_written_and_compared_through_the_scratch_buffer() {
        let path = std::env::temp_dir().join(format!("nvme-sim-data-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let store = FileStore::create(&path, 1 << 20).unwrap();
        let mut config = config();
        config.mdts = 8;
        config.namespaces[0] = NamespaceConfig::new(512, Box::new(store));
        let mut driver = Driver::with_queue(config);
        // An odd start inside the first page, then pages at descending addresses: no two are
        // adjacent.
        let first = DATA + 0x204;
        let pages: Vec<u64> = (1..=BYTES as u64 / 4096 + 1)
            .map(|i| DATA + 0x20_0000 - i * 4096)
            .collect();
        let list: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
        let at = DATA + 0x30_0000;
        driver.memory.write(at, &list).unwrap();
        let pattern: Vec<u8> = (0..BYTES as u32).map(|i| (i * 31 / 7) as u8).collect();
        let head = 4096 - 0x204;
        driver.memory.write(first, &pattern[..head]).unwrap();
        for (page, part) in pages.iter().zip(pattern[head..].chunks(4096)) {
            driver.memory.write(*page, part).unwrap();
        }
        let write = nvm::write(Nsid(1), Lba(7), BLOCKS).with_prps(first, at);
        assert_eq!(driver.io(write), Ok(0));
        let image = std::fs::read(&path).unwrap();
        assert!(
            image[7 * 512..][..BYTES] == pattern,
            "the image holds the data"
        );
        assert!(image[..7 * 512].iter().all(|byte| *byte == 0));
        let compare = nvm::compare(Nsid(1), Lba(7), BLOCKS).with_prps(first, at);
        assert_eq!(driver.io(compare), Ok(0));

        for page in &pages {
            driver.fill(*page, 0, 4096);
        }
        assert_eq!(driver.io(compare), Err(Status::COMPARE_FAILURE));
        let read = nvm::read(Nsid(1), Lba(7), BLOCKS).with_prps(first, at);
        assert_eq!(driver.io(read), Ok(0));
        let mut back = driver.bytes(first, head);
        for (page, part) in pages.iter().zip(pattern[head..].chunks(4096)) {
            back.extend(driver.bytes(*page, part.len()));
        }
        assert!(back == pattern, "what was written reads back");
        std::fs::remove_file(&path).unwrap();
    }
}

/// Sends `bytes` to the memory of the command's PRPs.
pub(crate) fn send(page: PageSize, dma: &Dma<'_>, sqe: &Sqe, bytes: &[u8]) -> Result<(), Status> {
    let len = bytes.len() as u64;
    let data = DataPointer {
        dma,
        sqe,
        page,
        len,
    };
    data.check(DataDirection::ToHost)?;
    data.scatter(bytes)
}

/// Fills `bytes` from the memory of the command's PRPs.
pub(crate) fn receive(
    page: PageSize,
    dma: &Dma<'_>,
    sqe: &Sqe,
    bytes: &mut [u8],
) -> Result<(), Status> {
    let len = bytes.len() as u64;
    DataPointer {
        dma,
        sqe,
        page,
        len,
    }
    .gather(bytes)
}
