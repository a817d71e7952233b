//! The ranges in which bytes of a file lie, by its extents.

use nvme_driver::error::{Error, Result};
use nvme_ext4::FileExtent;
use std::ops::Range;

/// Returns the location of the `bytes` bytes from byte `offset` on, of a file of `len` bytes at `path`: as few
/// ranges as possible, in the order of the file.
///
/// # Errors
/// [`Error::Usage`] for bytes in a hole or past the end.
pub fn of(
    extents: &[FileExtent],
    len: u64,
    offset: u64,
    bytes: u64,
    path: &str,
) -> Result<Vec<Range<u64>>> {
    let end = offset.checked_add(bytes);
    let end = end.filter(|end| *end <= len);
    let mut pieces = Vec::<Range<u64>>::new();
    let mut at = offset;
    // Extents are in the order of the file. A search finds the first one, because a file has many, and a model asks for
    // each of its tensors.
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
pub fn first_past(extents: &[FileExtent], offset: u64) -> usize {
    extents.partition_point(|one| one.logical.saturating_add(one.bytes) <= offset)
}

/// Returns the first byte of `pieces`, if there is exactly one piece. `pieces` are the ranges of `bytes` bytes from
/// byte `offset` of the file at `path` on.
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

/// Returns the name of the file at `path` without its ending.
pub fn stem(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or("");
    name.rsplit_once('.').map_or(name, |(stem, _)| stem)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(logical: u64, place: u64, bytes: u64, is_written: bool) -> FileExtent {
        FileExtent {
            logical,
            place,
            bytes,
            is_written,
        }
    }

    /// Returns extents with a hole from 8,192 to 12,288, an extent that was never written from 16,384 on, and a last
    /// one of whole blocks.
    fn file() -> [FileExtent; 5] {
        [
            extent(0, 40_960, 4096, true),
            extent(4096, 45_056, 4096, true),
            extent(12_288, 81_920, 4096, true),
            extent(16_384, 86_016, 4096, false),
            extent(20_480, 4096, 4096, true),
        ]
    }

    const LEN: u64 = 24_000;

    fn one(piece: Range<u64>) -> Option<Vec<Range<u64>>> {
        Some(std::iter::once(piece).collect())
    }

    fn found(offset: u64, bytes: u64) -> Option<Vec<Range<u64>>> {
        match of(&file(), LEN, offset, bytes, "/a") {
            Ok(pieces) => Some(pieces),
            Err(error) => {
                assert!(error.to_string().contains("do not all lie"), "{error}");
                None
            }
        }
    }

    #[test]
    fn neighbours_on_the_drive_are_one_piece() {
        assert_eq!(found(0, 8192), one(40_960..49_152));
        assert_eq!(found(4000, 200), one(44_960..45_160));
        assert_eq!(found(12_288, 4096), one(81_920..86_016));
        let apart = [extent(0, 8192, 4096, true), extent(4096, 0, 4096, true)];
        let pieces = of(&apart, 8192, 4095, 2, "/a").unwrap();
        assert_eq!(pieces, [12_287..12_288, 0..1]);
    }

    /// Bytes that no block holds are zeros, whatever lies at a computed offset.
    #[test]
    fn bytes_in_a_hole_or_never_written_have_no_place() {
        for (offset, bytes) in [(8192, 1), (8191, 2), (4096, 8193), (12_287, 2)] {
            assert_eq!(found(offset, bytes), None, "a hole: {offset} {bytes}");
        }
        for (offset, bytes) in [(16_384, 1), (16_383, 2), (20_479, 2), (12_288, 12_288)] {
            assert_eq!(found(offset, bytes), None, "unwritten: {offset} {bytes}");
        }
    }

    #[test]
    fn the_file_ends_before_its_last_block() {
        let last = LEN - 20_480;
        assert_eq!(found(20_480, last), one(4096..4096 + last));
        assert_eq!(found(20_480, last + 1), None);
        assert_eq!(found(LEN, 0), Some(Vec::new()));
        assert_eq!(found(u64::MAX, 2), None);
    }
}
