//! Tables in several ranges of a store: tensors of several files, and files of several extents.

use super::space::{StoreSpace, common};
use nvme_driver::error::{Error, Result};
use std::ops::Range;
use std::sync::{Arc, Weak};

/// A range of a table's bytes that are contiguous in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoreExtent {
    /// First byte of the range, counted from the first byte of row 0, without the bytes between the ranges.
    pub first: u64,
    /// First byte of the extent in the store.
    pub byte: u64,
    pub bytes: u64,
}

impl StoreExtent {
    /// A whole store, whose bytes are those of the table.
    pub const STORE: Self = Self {
        first: 0,
        byte: 0,
        bytes: u64::MAX,
    };

    /// Returns the range of the extent's bytes in the store.
    pub fn range(&self) -> Range<u64> {
        self.byte..self.byte + self.bytes
    }

    /// Returns the part of `range`, bytes of the table, that lies in this extent, as a range of the store.
    pub fn in_store(&self, range: &Range<u64>) -> Range<u64> {
        let part = common(range, &(self.first..self.first + self.bytes));
        part.start - self.first + self.byte..part.end - self.first + self.byte
    }

    /// Returns the part of `range`, bytes of the store, that lies in this extent, as a range of the table.
    pub fn in_table(&self, range: &Range<u64>) -> Range<u64> {
        let part = common(range, &self.range());
        match part.is_empty() {
            true => 0..0,
            false => part.start - self.byte + self.first..part.end - self.byte + self.first,
        }
    }
}

/// Rows of one size that lie in several ranges of a store, one range after the other. A row may begin in one range and end
/// in a later one. Made by [`Store::ranges`](super::Store::ranges); it does not keep the store open.
#[derive(Clone)]
pub struct TableRanges {
    of: Weak<StoreSpace>,
    extents: Arc<[StoreExtent]>,
    row_bytes: u64,
    /// The same for the kernels of the store's GPU.
    #[cfg(feature = "cuda")]
    pub(super) map: Option<Arc<nvme_cuda::TableMap>>,
}

impl std::fmt::Debug for TableRanges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TableRanges")
            .field("rows", &self.rows())
            .field("row_bytes", &self.row_bytes)
            .field("extents", &self.extents.len())
            .finish()
    }
}

impl TableRanges {
    /// # Errors
    /// As [`Store::ranges`](super::Store::ranges).
    pub(super) fn new(
        space: &Arc<StoreSpace>,
        ranges: &[Range<u64>],
        row_bytes: u64,
    ) -> Result<Self> {
        let extents = extents_of(space, ranges)?;
        let bytes = extents.last().map_or(0, |last| last.first + last.bytes);
        if row_bytes == 0 {
            return Err(Error::usage("the rows have no bytes", "use 1 or more"));
        }
        if !bytes.is_multiple_of(row_bytes) {
            return Err(Error::usage(
                format!("ranges of {bytes} bytes in all are not whole rows of {row_bytes} bytes"),
                "check the ranges and the size of a row",
            ));
        }
        Ok(Self {
            #[cfg(feature = "cuda")]
            map: map_of(space, &extents, row_bytes)?,
            of: Arc::downgrade(space),
            extents: extents.into(),
            row_bytes,
        })
    }

    /// Returns the first byte of row 0 in the store; 0 without rows.
    pub(super) fn offset(&self) -> u64 {
        self.extents.first().map_or(0, |first| first.byte)
    }

    /// Returns the same without memory of a GPU, for threads that call no driver.
    #[cfg(feature = "cuda")]
    pub(super) fn of_host(&self) -> Self {
        Self {
            map: None,
            ..self.clone()
        }
    }

    /// # Errors
    /// [`Error::Usage`] for ranges of another store than that of `space`.
    pub(super) fn check(&self, space: &Arc<StoreSpace>) -> Result<()> {
        match self.of.as_ptr() == Arc::as_ptr(space) {
            true => Ok(()),
            false => Err(Error::usage(
                "the ranges are those of another store",
                "use them with the store that made them",
            )),
        }
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> u64 {
        let bytes = self
            .extents
            .last()
            .map_or(0, |last| last.first + last.bytes);
        bytes / self.row_bytes
    }

    /// Returns the number of bytes of a row.
    pub fn row_bytes(&self) -> u64 {
        self.row_bytes
    }

    /// Returns the number of ranges; neighbours in the store count as one.
    pub fn count(&self) -> usize {
        self.extents.len()
    }

    /// Returns the extents that hold `range`, bytes of the table.
    pub(super) fn of(&self, range: Range<u64>) -> impl Iterator<Item = &StoreExtent> {
        let first = self
            .extents
            .partition_point(|one| one.first + one.bytes <= range.start);
        let those = self.extents[first..].iter();
        those.take_while(move |one| one.first < range.end)
    }
}

/// Checks the ranges, and joins those that are neighbours.
fn extents_of(space: &StoreSpace, ranges: &[Range<u64>]) -> Result<Vec<StoreExtent>> {
    let mut extents: Vec<StoreExtent> = Vec::new();
    let mut first = 0u64;
    for range in ranges {
        let bytes = range.end.checked_sub(range.start).ok_or_else(|| {
            Error::usage(
                format!(
                    "a range begins at byte {} and ends at {}",
                    range.start, range.end
                ),
                "give the first byte, and the first one after the range",
            )
        })?;
        space.check(range.start, bytes)?;
        let begin = first;
        // The sum of ranges that do not overlap is at most the store's length, so an overflow means an overlap.
        first = first.checked_add(bytes).ok_or_else(overlap)?;
        if bytes == 0 {
            continue;
        }
        match extents.last_mut() {
            Some(last) if last.byte + last.bytes == range.start => last.bytes += bytes,
            _ => extents.push(StoreExtent {
                first: begin,
                byte: range.start,
                bytes,
            }),
        }
    }
    let mut sorted: Vec<Range<u64>> = extents.iter().map(StoreExtent::range).collect();
    sorted.sort_unstable_by_key(|range| range.start);
    match sorted.windows(2).all(|pair| pair[0].end <= pair[1].start) {
        true => Ok(extents),
        false => Err(overlap()),
    }
}

fn overlap() -> Error {
    Error::usage("two ranges of a table overlap", "name each range once")
}

/// Returns the map for kernels, where the GPU submits reads.
#[cfg(feature = "cuda")]
fn map_of(
    space: &StoreSpace,
    extents: &[StoreExtent],
    row_bytes: u64,
) -> Result<Option<Arc<nvme_cuda::TableMap>>> {
    use nvme_gpu_kernel::extents::TableExtent as KernelExtent;
    let Some(rows) = space.members.first().and_then(|one| one.rows.as_ref()) else {
        return Ok(None);
    };
    let of_kernel = |one: &StoreExtent| KernelExtent {
        first: one.first,
        byte: one.byte,
    };
    let words: Vec<KernelExtent> = extents.iter().map(of_kernel).collect();
    if words.is_empty() {
        return Ok(None);
    }
    let bytes = extents.last().map_or(0, |last| last.first + last.bytes);
    let map = nvme_cuda::TableMap::new(rows.gpu(), &words, (bytes, row_bytes))?;
    Ok(Some(Arc::new(map)))
}

#[cfg(all(test, feature = "sim"))]
mod tests;
