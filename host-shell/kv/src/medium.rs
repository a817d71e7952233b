//! The blocks that a page store lies on.

use nvme_driver::error::Result;
use nvme_store::{RangeClaim, Store, StoreTransfer};
use std::sync::Arc;

/// A range of bytes that is read, written and made durable. [`Store`] is one: a drive, a file, or a stripe of them.
///
/// A write that has returned may be lost by a power cut, in whole or by blocks, until a later [`flush`](Self::flush)
/// has returned. One that ended with an error may have changed any of its bytes, and may still do so later: the page
/// store expects that of commands whose time ran out.
pub trait BlockMedium: Send + Sync {
    /// Returns the size in bytes.
    fn bytes(&self) -> u64;

    /// Returns the unit of writes in bytes; 1 for a file.
    fn block_bytes(&self) -> u32;

    /// Reads `data.len()` bytes from byte `offset` on.
    ///
    /// # Errors
    /// Those of the medium; `data` may have changed in part then.
    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<()>;

    /// Executes reads and writes that do not overlap, in any order, and returns the outcome of each.
    fn transfer_all(&self, transfers: &mut [StoreTransfer<'_>]) -> Vec<Result<()>>;

    /// Writes `data` from byte `offset` on; it is durable when this returns.
    ///
    /// # Errors
    /// Those of the medium; any part of `data` may have been written then.
    fn write_durable(&self, offset: u64, data: &[u8]) -> Result<()>;

    /// Makes durable what was written before.
    ///
    /// # Errors
    /// Those of the medium; nothing is known of earlier writes then.
    fn flush(&self) -> Result<()>;

    /// Claims the bytes of an area for as long as it is open, as [`Store::claim`]. None for a medium that cannot tell
    /// whether another area overlaps.
    ///
    /// # Errors
    /// [`Error::Usage`](nvme_driver::Error::Usage) for a range that overlaps a claimed one in part.
    fn claim(&self, offset: u64, bytes: u64) -> Result<Option<RangeClaim>> {
        let _ = (offset, bytes);
        Ok(None)
    }
}

impl BlockMedium for Store {
    fn bytes(&self) -> u64 {
        self.len()
    }

    fn block_bytes(&self) -> u32 {
        Self::block_bytes(self)
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        Self::read_at(self, offset, data)
    }

    fn transfer_all(&self, transfers: &mut [StoreTransfer<'_>]) -> Vec<Result<()>> {
        Self::transfer_all(self, transfers)
    }

    fn write_durable(&self, offset: u64, data: &[u8]) -> Result<()> {
        Self::write_at_fua(self, offset, data)
    }

    fn flush(&self) -> Result<()> {
        Self::flush(self)
    }

    fn claim(&self, offset: u64, bytes: u64) -> Result<Option<RangeClaim>> {
        Self::claim(self, offset, bytes).map(Some)
    }
}

impl<M: BlockMedium + ?Sized> BlockMedium for Arc<M> {
    fn bytes(&self) -> u64 {
        (**self).bytes()
    }

    fn block_bytes(&self) -> u32 {
        (**self).block_bytes()
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        (**self).read_at(offset, data)
    }

    fn transfer_all(&self, transfers: &mut [StoreTransfer<'_>]) -> Vec<Result<()>> {
        (**self).transfer_all(transfers)
    }

    fn write_durable(&self, offset: u64, data: &[u8]) -> Result<()> {
        (**self).write_durable(offset, data)
    }

    fn flush(&self) -> Result<()> {
        (**self).flush()
    }

    fn claim(&self, offset: u64, bytes: u64) -> Result<Option<RangeClaim>> {
        (**self).claim(offset, bytes)
    }
}
