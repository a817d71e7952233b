//! Scatter gather lists: from segments of memory to the descriptor of a command.
//!
//! NVMe Base 2.0c, 4.1.2 (Scatter Gather List).

use crate::error::PointerError;
use crate::mem::DmaWords;
use crate::spec::Iova;
use crate::spec::sgl::{SglDescriptor, kind};

/// True if every data block begins at a dword and is whole dwords, which controllers may require.
///
/// NVMe Base 2.0c, Identify Controller, "SGL Support (SGLS)".
pub fn is_in_dwords(segments: &[SglSegment]) -> bool {
    segments.iter().all(|segment| match segment {
        SglSegment::Data { iova, len } => iova.0.is_multiple_of(4) && len.is_multiple_of(4),
        SglSegment::Discard { .. } => true,
    })
}

/// Descriptors of a segment: one 4 KiB page of them.
const SEGMENT_DESCRIPTORS: usize = 256;

/// A part of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SglSegment {
    /// `len` bytes of memory at `iova`.
    Data {
        /// I/O address of the bytes.
        iova: Iova,
        /// Number of bytes, not 0.
        len: u32,
    },
    /// `len` bytes of a read that the controller discards (bit bucket).
    Discard {
        /// Number of bytes, not 0.
        len: u32,
    },
}

impl SglSegment {
    fn descriptor(self) -> SglDescriptor {
        match self {
            Self::Data { iova, len } => SglDescriptor::new(kind::DATA_BLOCK, iova.0, len),
            Self::Discard { len } => SglDescriptor::new(kind::BIT_BUCKET, 0, len),
        }
    }

    fn len(self) -> u32 {
        match self {
            Self::Data { len, .. } | Self::Discard { len } => len,
        }
    }
}

/// Maps `segments` in order and returns the descriptor for the command.
///
/// One segment of data needs no list. Several are written to `list`, 256 descriptors a segment; the last
/// descriptor of a segment that is not the final one points to the next segment. A single discarded range
/// needs a list, too, since a command's own descriptor must be a data block or a segment pointer (NVMe Base
/// 2.0c, Common Command Format, "SGL Entry 1").
///
/// # Errors
/// [`PointerError::Empty`] for no segments or one of no bytes, [`PointerError::ListTooSmall`].
pub fn map(segments: &[SglSegment], list: DmaWords<'_>) -> Result<[u64; 2], PointerError> {
    if segments.is_empty() || segments.iter().any(|segment| segment.len() == 0) {
        return Err(PointerError::Empty);
    }
    if let [only @ SglSegment::Data { .. }] = segments {
        return Ok(only.descriptor().to_words());
    }
    let first = link(segments.len(), list.iova());
    let mut word = 0;
    let mut rest = segments;
    while !rest.is_empty() {
        let here = data_in_segment(rest.len());
        for segment in &rest[..here] {
            put(list, &mut word, segment.descriptor())?;
        }
        rest = &rest[here..];
        if !rest.is_empty() {
            // The next segment begins right after this descriptor, which has two words; the list is
            // contiguous for the controller. A wrong address here would make the controller read
            // other memory as descriptors.
            let next = list.iova().offset((word as u64 + 2) * 8);
            put(list, &mut word, link(rest.len(), next))?;
        }
    }
    Ok(first.to_words())
}

/// Returns the number of data descriptors, out of `left`, that one segment holds.
fn data_in_segment(left: usize) -> usize {
    if left <= SEGMENT_DESCRIPTORS {
        left
    } else {
        SEGMENT_DESCRIPTORS - 1
    }
}

/// Returns the pointer to a segment at `at`, when `left` data descriptors remain.
fn link(left: usize, at: Iova) -> SglDescriptor {
    if left <= SEGMENT_DESCRIPTORS {
        SglDescriptor::new(kind::LAST_SEGMENT, at.0, (left * 16) as u32)
    } else {
        SglDescriptor::new(kind::SEGMENT, at.0, (SEGMENT_DESCRIPTORS * 16) as u32)
    }
}

fn put(
    list: DmaWords<'_>,
    word: &mut usize,
    descriptor: SglDescriptor,
) -> Result<(), PointerError> {
    if *word + 2 > list.len() {
        return Err(PointerError::ListTooSmall);
    }
    let words = descriptor.to_words();
    list.set(*word, words[0]);
    list.set(*word + 1, words[1]);
    *word += 2;
    Ok(())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::AtomicU64;

    fn read(view: DmaWords<'_>, descriptor: usize) -> SglDescriptor {
        SglDescriptor::from_words([view.get(descriptor * 2), view.get(descriptor * 2 + 1)])
    }

    fn data(index: u64) -> SglSegment {
        SglSegment::Data {
            iova: Iova(0x1000 * (index + 1)),
            len: 512,
        }
    }

    #[test]
    fn one_segment_of_data_is_the_command_descriptor() {
        let got = map(&[data(0)], DmaWords::new(&[], Iova(0))).unwrap();
        assert_eq!(got, [0x1000, 512]);
        let skip = [SglSegment::Discard { len: 4096 }];
        let none = DmaWords::new(&[], Iova(0));
        assert_eq!(map(&skip, none), Err(PointerError::ListTooSmall));
        let words: [AtomicU64; 2] = Default::default();
        let list = DmaWords::new(&words, Iova(0x8000));
        let got = map(&skip, list).unwrap();
        assert_eq!(got, [0x8000, 0x3000_0000_0000_0010]);
        assert_eq!(list.get(1), 0x1000_0000_0000_1000);
    }

    #[test]
    fn a_few_lie_in_the_last_segment() {
        let words: [AtomicU64; 4] = Default::default();
        let list = DmaWords::new(&words, Iova(0x8000));
        let got = map(&[data(0), SglSegment::Discard { len: 8 }], list).unwrap();
        assert_eq!(got, [0x8000, 0x3000_0000_0000_0020]);
        assert_eq!(read(list, 0), SglDescriptor::new(0, 0x1000, 512));
        assert_eq!(read(list, 1), SglDescriptor::new(1, 0, 8));
        let three = map(&[data(0), data(1), data(2)], list);
        assert_eq!(three, Err(PointerError::ListTooSmall));
        for words in [&words[..0], &words[..1]] {
            let none = map(&[data(0), data(1)], DmaWords::new(words, Iova(0x8000)));
            assert_eq!(none, Err(PointerError::ListTooSmall));
        }
        let exact: [AtomicU64; 6] = Default::default();
        let three = map(&[data(0), data(1), data(2)], DmaWords::new(&exact, Iova(0)));
        assert_eq!(three, Ok([0, 0x3000_0000_0000_0030]));
    }

    #[test]
    fn more_than_a_segment_chains() {
        let words: Vec<AtomicU64> = (0..1200).map(|_| AtomicU64::new(0)).collect();
        let list = DmaWords::new(&words, Iova(0x8000));
        let exact: Vec<_> = (0..256).map(data).collect();
        assert_eq!(map(&exact, list).unwrap(), [0x8000, 0x3000_0000_0000_1000]);

        let more: Vec<_> = (0..257).map(data).collect();
        assert_eq!(map(&more, list).unwrap(), [0x8000, 0x2000_0000_0000_1000]);
        assert_eq!(read(list, 254), SglDescriptor::new(0, 0x1000 * 255, 512));
        assert_eq!(read(list, 255), SglDescriptor::new(3, 0x9000, 32));
        assert_eq!(read(list, 256), SglDescriptor::new(0, 0x1000 * 256, 512));
        assert_eq!(read(list, 257), SglDescriptor::new(0, 0x1000 * 257, 512));
    }

    #[test]
    fn nothing_to_move_is_an_error() {
        let none = DmaWords::new(&[], Iova(0));
        assert_eq!(map(&[], none), Err(PointerError::Empty));
        assert_eq!(
            map(&[SglSegment::Discard { len: 0 }], none),
            Err(PointerError::Empty)
        );
    }
}
