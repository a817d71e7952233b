//! A tensor of a file, and the result of a format's reader.

use super::dtype::Dtype;
use super::value::MetadataValue;
use nvme_driver::error::{Error, Result};
use nvme_store::{Store, Table};
use serde::Serialize;

/// A tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorEntry {
    /// Name of the tensor in the file.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Lengths, the slowest first; none for a single number.
    pub shape: Vec<u64>,
    /// First byte in the file, or in the store.
    pub offset: u64,
    /// Bytes of the value, in the order of C.
    pub bytes: u64,
}

impl TensorEntry {
    pub(super) fn new(
        name: String,
        dtype: Dtype,
        shape: Vec<u64>,
        offset: u64,
        bytes: u64,
    ) -> std::result::Result<Self, String> {
        let elements = shape
            .iter()
            .try_fold(1u64, |all, one| all.checked_mul(*one));
        let needed = elements.and_then(|elements| dtype.bytes(elements));
        if needed != Some(bytes) || offset.checked_add(bytes).is_none() {
            let lengths: Vec<String> = shape.iter().map(u64::to_string).collect();
            let needs = needed.map_or_else(
                || "are no whole number of bytes below 2^64".to_owned(),
                |bytes| format!("take {bytes}"),
            );
            return Err(format!(
                "{name:?} has {bytes} bytes at byte {offset}, and its {} of the shape ({}) {needs}",
                dtype.name(),
                lengths.join(", ")
            ));
        }
        Ok(Self {
            name,
            dtype,
            shape,
            offset,
            bytes,
        })
    }

    /// Returns its rows in `store`, each all lengths but the first.
    ///
    /// # Errors
    /// [`Error::Usage`] for a single number, for rows that are empty or end inside a byte, and for what does not lie
    /// in the store.
    pub fn table(&self, store: &Store) -> Result<Table> {
        let rows = self.shape.first().copied().unwrap_or(0);
        let row_bytes = match rows {
            0 => None,
            rows => self.bytes.is_multiple_of(rows).then(|| self.bytes / rows),
        };
        let Some(row_bytes) = row_bytes else {
            let cause = format!("'{}' of the shape {:?} has no rows", self.name, self.shape);
            return Err(Error::usage(cause, "read its bytes"));
        };
        store.table(self.offset, rows, row_bytes)
    }
}

/// A file of a catalog.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CatalogFile {
    /// Name of the file, without its folder.
    pub name: String,
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// Result of a format's reader.
pub(super) struct ParsedHeader {
    pub entries: Vec<TensorEntry>,
    pub metadata: Vec<(String, MetadataValue)>,
    /// Header and data.
    pub bytes: u64,
    /// Length including the padding after the last tensor.
    pub padded: u64,
}

/// Sorts tensors by their data, which must not overlap, and returns the end of the last data, if there are
/// tensors.
pub(super) fn in_order(entries: &mut [TensorEntry]) -> std::result::Result<Option<u64>, String> {
    entries.sort_by(|a, b| (a.offset, a.bytes, &a.name).cmp(&(b.offset, b.bytes, &b.name)));
    let mut last: Option<&TensorEntry> = None;
    for entry in &*entries {
        if let Some(last) = last
            && entry.offset < last.offset + last.bytes
        {
            return Err(format!(
                "{:?} begins at byte {} of the file, inside of {:?}, which ends at {}",
                entry.name,
                entry.offset,
                last.name,
                last.offset + last.bytes
            ));
        }
        last = Some(entry);
    }
    Ok(last.map(|last| last.offset + last.bytes))
}
