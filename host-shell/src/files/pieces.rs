//! Where bytes of a file lie, by its extents.

use crate::error::{Error, Result};
use nvme_ext4::Extent;
use std::ops::Range;

/// Where the `bytes` bytes from byte `offset` on lie, of a file of `len` bytes at `path`: as few ranges as there are, in
/// the order of the file.
///
/// # Errors
/// [`Error::Usage`] for bytes in a hole or past the end.
pub fn of(
    extents: &[Extent],
    len: u64,
    offset: u64,
    bytes: u64,
    path: &str,
) -> Result<Vec<Range<u64>>> {
    let end = offset.checked_add(bytes);
    let end = end.filter(|end| *end <= len);
    let mut pieces = Vec::<Range<u64>>::new();
    let mut at = offset;
    // They are in the order of the file; a file has many, and a model asks for each of its tensors.
    let first = first_past(extents, offset);
    for extent in extents[first..].iter().filter(|one| one.is_written) {
        if Some(at) == end {
            break;
        }
        let last = end.map_or(at, |end| end.min(extent.logical + extent.bytes));
        if extent.logical > at || last <= at {
            continue;
        }
        let first = extent.place + (at - extent.logical);
        let next = first..first + (last - at);
        match pieces.last_mut() {
            Some(before) if before.end == next.start => before.end = next.end,
            _ => pieces.push(next),
        }
        at = last;
    }
    match Some(at) == end {
        true => Ok(pieces),
        false => Err(Error::usage(
            format!(
                "bytes {offset} to {} of {path} do not all lie on the drive",
                offset.saturating_add(bytes),
            ),
            "read the file's bytes, of which some are zeros that no block holds",
        )),
    }
}

/// Returns the place of the first extent that ends past byte `offset` of the file. They are in the order of the file.
pub fn first_past(extents: &[Extent], offset: u64) -> usize {
    extents.partition_point(|one| one.logical.saturating_add(one.bytes) <= offset)
}

/// The first byte of `pieces`, if it is one; they are those of `bytes` bytes from byte `offset` of the file at `path` on.
///
/// # Errors
/// [`Error::Usage`] for several pieces, or none.
pub fn one(pieces: &[Range<u64>], offset: u64, bytes: u64, path: &str) -> Result<u64> {
    match pieces {
        [one] => Ok(one.start),
        several => Err(Error::usage(
            format!(
                "bytes {offset} to {} of {path} lie in {} pieces on the drive",
                offset.saturating_add(bytes),
                several.len()
            ),
            "copy the file onto an empty file system; read its bytes",
        )),
    }
}

/// The name of the file at `path` without its ending.
pub fn stem(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or("");
    name.rsplit_once('.').map_or(name, |(stem, _)| stem)
}
