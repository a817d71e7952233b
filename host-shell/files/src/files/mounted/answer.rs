//! The kernel's answer to FIEMAP: checked, and refused if the blocks do not hold the file's bytes unchanged.

use super::ioctl::RawExtent;
use nvme_driver::error::{Error, Result};
use nvme_ext4::FileExtent;

/// Limit of the extents of a file that are examined: a more fragmented file is refused rather than read in tiny
/// commands.
const MOST_EXTENTS: usize = 1 << 22;
/// Offsets of extents are multiples of this number of bytes.
const SECTOR: u64 = 512;

mod flag {
    pub const LAST: u32 = 0x1;
    /// Several blocks of a file system without extents.
    pub const MERGED: u32 = 0x1000;
}

/// Flags of extents whose blocks do not hold the file's bytes unchanged, with the remedies.
const REFUSED: [(u32, &str, &str); 9] = [
    (0x800, "is not written", WRITE),
    (0x4, "is in memory alone", SYNC),
    (0x2, "has no place yet", SYNC),
    (0x80, "is encrypted", "copy the file where it is unlocked"),
    (0x8, "is encoded", "copy the file without compression"),
    (0x200, "lies in the inode", READ),
    (0x400, "shares a block with another file", READ),
    (0x100, "does not begin with a block", READ),
    (
        0x2000,
        "is shared with another file",
        "copy the file without sharing its blocks",
    ),
];
const WRITE: &str = "copy the file: a copy has no blocks that were not written";
const SYNC: &str = "run sync, and try again";
const READ: &str = "read the file by its path";

/// Extents of a file, an answer after the other.
#[derive(Default)]
pub struct FileExtents {
    found: Vec<FileExtent>,
    is_complete: bool,
}

impl FileExtents {
    /// Returns the byte of the file from which the next query begins; none once the last extent was returned.
    pub fn start(&self) -> Option<u64> {
        let end = self
            .found
            .last()
            .map_or(0, |last| last.logical + last.bytes);
        (!self.is_complete).then_some(end)
    }

    /// Adds an answer to the query for the extents from [`start`](Self::start) on.
    ///
    /// # Errors
    /// [`Error::Usage`] for extents that do not hold the file's bytes unchanged, or for too many; [`Error::Device`] for
    /// an impossible answer.
    pub fn add(&mut self, answer: &[RawExtent]) -> Result<()> {
        // An empty answer means that only a hole follows.
        self.is_complete |= answer.is_empty();
        for (index, raw) in answer.iter().enumerate() {
            if let Some((_, what, remedy)) = REFUSED.iter().find(|one| raw.flags & one.0 != 0) {
                let cause = format!("the extent at byte {} of the file {what}", raw.logical);
                return Err(Error::usage(cause, *remedy));
            }
            let next = self.start().unwrap_or(0);
            let is_last = raw.flags & flag::LAST != 0;
            let ends = [raw.logical, raw.physical].map(|begin| begin.checked_add(raw.length));
            let words = [raw.logical, raw.physical, raw.length];
            let is_sound = raw.flags & !(flag::LAST | flag::MERGED) == 0
                && raw.length > 0
                && raw.physical > 0
                && raw.logical >= next
                && ends.iter().all(Option::is_some)
                && words.iter().all(|word| word.is_multiple_of(SECTOR))
                && (!is_last || index + 1 == answer.len());
            if !is_sound {
                return Err(Error::device(
                    format!(
                        "the kernel answered FIEMAP with {raw:?} after byte {next} of the file"
                    ),
                    "read the file by its path, and report it",
                ));
            }
            self.push(raw)?;
            self.is_complete = is_last;
        }
        Ok(())
    }

    fn push(&mut self, raw: &RawExtent) -> Result<()> {
        if let Some(last) = self.found.last_mut()
            && last.logical + last.bytes == raw.logical
            && last.place + last.bytes == raw.physical
        {
            last.bytes += raw.length;
            return Ok(());
        }
        if self.found.len() == MOST_EXTENTS {
            let cause = format!("the file lies in more than {MOST_EXTENTS} pieces");
            return Err(Error::usage(
                cause,
                "copy the file, so that its blocks lie together",
            ));
        }
        self.found.push(FileExtent {
            logical: raw.logical,
            place: raw.physical,
            bytes: raw.length,
            is_written: true,
        });
        Ok(())
    }

    /// Returns all of them.
    pub fn into_inner(self) -> Vec<FileExtent> {
        self.found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(logical: u64, physical: u64, length: u64, flags: u32) -> RawExtent {
        RawExtent {
            logical,
            physical,
            length,
            flags,
            ..RawExtent::default()
        }
    }

    #[test]
    fn answers_are_joined_up_to_the_last_extent() {
        let mut extents = FileExtents::default();
        assert_eq!(extents.start(), Some(0));
        let first = [raw(0, 8192, 4096, 0), raw(4096, 12_288, 4096, flag::MERGED)];
        extents.add(&first).unwrap();
        assert_eq!(extents.start(), Some(8192));
        extents.add(&[raw(16_384, 4096, 512, flag::LAST)]).unwrap();
        assert_eq!(extents.start(), None);
        let found: Vec<_> = extents
            .into_inner()
            .iter()
            .map(|one| (one.logical, one.place, one.bytes, one.is_written))
            .collect();
        assert_eq!(found, [(0, 8192, 8192, true), (16_384, 4096, 512, true)]);
    }

    #[test]
    fn an_empty_answer_ends_a_file() {
        let mut extents = FileExtents::default();
        extents.add(&[]).unwrap();
        assert_eq!((extents.start(), extents.into_inner().len()), (None, 0));
    }

    #[test]
    fn extents_whose_bytes_are_not_those_of_the_file_are_refused() {
        for (flag, what, _) in REFUSED {
            for flags in [flag, flag | flag::LAST] {
                match FileExtents::default().add(&[raw(0, 4096, 4096, flags)]) {
                    Err(Error::Usage { cause, remedy }) => {
                        assert!(cause.contains(what) && !remedy.is_empty(), "{cause}");
                    }
                    other => panic!("{flags:#x}: {other:?}"),
                }
            }
        }
    }

    #[test]
    fn what_cannot_be_is_an_error_of_the_kernel() {
        let long = u64::MAX - 511;
        for answer in [
            &[raw(0, 4096, 0, 0)][..],
            &[raw(0, 0, 4096, 0)],
            &[raw(0, 4096, 100, 0)],
            &[raw(1, 4096, 4096, 0)],
            &[raw(0, 4095, 4096, 0)],
            &[raw(512, 4096, long, 0)],
            &[raw(0, long, 512, 0)],
            &[raw(0, 4096, 4096, 0x10)],
            &[raw(0, 4096, 4096, 0x8000_0000)],
            &[
                raw(0, 4096, 4096, flag::LAST),
                raw(4096, 16_384, 4096, flag::LAST),
            ],
            // One that was there already, and one inside of another.
            &[raw(0, 4096, 4096, 0), raw(0, 4096, 4096, 0)],
            &[raw(0, 4096, 8192, 0), raw(4096, 65_536, 512, 0)],
        ] {
            let refused = FileExtents::default().add(answer);
            assert!(matches!(refused, Err(Error::Device { .. })), "{answer:?}");
        }
    }
}
