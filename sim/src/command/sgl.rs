//! Walks the data pointer of a command whose PSDT selects an SGL.
//!
//! Segments are in the driver's memory. The number of segments and of descriptors is bounded, so
//! that empty descriptors and segments that point at each other end as an error and not in an
//! endless loop.

use crate::memory::Dma;
use nvme_spec::Status;
use nvme_spec::sgl::{DESCRIPTOR_BYTES, SglDescriptor, kind};

/// Limits of the segments and descriptors of one command.
const MAX_SEGMENTS: u32 = 256;
const MAX_DESCRIPTORS: u32 = 1 << 16;

/// Calls `each(address, bytes)` for the extents of `len` bytes of data; the address is `None` in a
/// bit bucket, which only data `to_host` may have.
///
/// NVMe Base 2.0c, 4.1.2 (Scatter Gather List).
pub(crate) fn walk(
    dma: &Dma<'_>,
    dptr: [u64; 2],
    len: u64,
    to_host: bool,
    mut each: impl FnMut(Option<u64>, usize) -> Result<(), Status>,
) -> Result<(), Status> {
    let mut state = SglProgress {
        remaining: len,
        to_host,
    };
    let first = SglDescriptor::from_words(dptr);
    if first.kind() == kind::BIT_BUCKET {
        // A bit bucket alone describes no buffer: the first descriptor is a data block or a
        // segment.
        return Err(Status::SGL_TYPE_INVALID);
    }
    let mut segment = match state.take(first, &mut each)? {
        None => return state.end(),
        Some(segment) => segment,
    };
    let mut descriptors = 0;
    for _ in 0..MAX_SEGMENTS {
        let count = segment.length / DESCRIPTOR_BYTES as u32;
        if !segment.length.is_multiple_of(DESCRIPTOR_BYTES as u32) || count == 0 {
            return Err(Status::INVALID_SGL_SEGMENT);
        }
        descriptors += count;
        if descriptors > MAX_DESCRIPTORS {
            return Err(Status::INVALID_SGL_COUNT);
        }
        let mut next = None;
        for i in 0..count {
            let at = segment
                .address
                .wrapping_add(u64::from(i) * DESCRIPTOR_BYTES as u64);
            let mut words = [0u64; 2];
            dma.read(at, zerocopy::IntoBytes::as_mut_bytes(&mut words))
                .map_err(|_| Status::DATA_TRANSFER_ERROR)?;
            if let Some(found) = state.take(SglDescriptor::from_words(words), &mut each)? {
                // A (Last) Segment descriptor may only be the last entry of a non-final segment.
                if i + 1 != count || segment.kind() == kind::LAST_SEGMENT {
                    return Err(Status::INVALID_SGL_SEGMENT);
                }
                next = Some(found);
            }
        }
        match next {
            Some(found) => segment = found,
            None if segment.kind() == kind::SEGMENT => return Err(Status::INVALID_SGL_SEGMENT),
            None => return state.end(),
        }
    }
    Err(Status::INVALID_SGL_COUNT)
}

struct SglProgress {
    remaining: u64,
    to_host: bool,
}

impl SglProgress {
    /// Uses a descriptor. Returns it if it points to a segment.
    fn take(
        &mut self,
        descriptor: SglDescriptor,
        each: &mut impl FnMut(Option<u64>, usize) -> Result<(), Status>,
    ) -> Result<Option<SglDescriptor>, Status> {
        if descriptor.sub_type() != 0 {
            return Err(Status::SGL_TYPE_INVALID);
        }
        let address = match descriptor.kind() {
            kind::SEGMENT | kind::LAST_SEGMENT => return Ok(Some(descriptor)),
            kind::DATA_BLOCK => Some(descriptor.address),
            kind::BIT_BUCKET if self.to_host => None,
            // For data from the host a bit bucket has no meaning, and the specification ignores its
            // length.
            kind::BIT_BUCKET => return Ok(None),
            _ => return Err(Status::SGL_TYPE_INVALID),
        };
        let bytes = u64::from(descriptor.length);
        self.remaining = self
            .remaining
            .checked_sub(bytes)
            .ok_or(Status::DATA_SGL_LENGTH_INVALID)?;
        if bytes != 0 {
            each(address, bytes as usize)?;
        }
        Ok(None)
    }

    fn end(&self) -> Result<(), Status> {
        if self.remaining == 0 {
            Ok(())
        } else {
            Err(Status::DATA_SGL_LENGTH_INVALID)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::DmaMemory;
    use crate::memory::VecMemory;
    use alloc::vec::Vec;

    type Pieces = Result<Vec<(Option<u64>, usize)>, Status>;
    const D: fn(u8, u64, u32) -> SglDescriptor = SglDescriptor::new;

    fn extents(list: &[SglDescriptor], first: SglDescriptor, len: u64, to_host: bool) -> Pieces {
        let memory = VecMemory::new(1 << 16);
        for (i, descriptor) in list.iter().enumerate() {
            let bytes = descriptor.to_words().map(u64::to_le_bytes).concat();
            memory.write(0x1000 + i as u64 * 16, &bytes).unwrap();
        }
        let guard = memory.guard();
        let mut out = Vec::new();
        walk(
            &Dma::new(&guard),
            first.to_words(),
            len,
            to_host,
            |at, len| {
                out.push((at, len));
                Ok(())
            },
        )?;
        Ok(out)
    }

    #[test]
    fn blocks_segments_and_buckets_cover_the_data() {
        let block = D(kind::DATA_BLOCK, 0x5001, 512);
        assert_eq!(
            extents(&[], block, 512, true),
            Ok([(Some(0x5001), 512)].into())
        );
        let list = [
            D(kind::DATA_BLOCK, 0x5000, 100),
            D(kind::LAST_SEGMENT, 0x1020, 32),
            D(kind::BIT_BUCKET, 0, 12),
            D(kind::DATA_BLOCK, 0x6000, 400),
        ];
        let first = D(kind::SEGMENT, 0x1000, 32);
        let expected = [(Some(0x5000), 100), (None, 12), (Some(0x6000), 400)];
        assert_eq!(extents(&list, first, 512, true), Ok(expected.into()));
        let expected = [(Some(0x5000), 100), (Some(0x6000), 400)];
        assert_eq!(extents(&list, first, 500, false), Ok(expected.into()));
    }

    #[test]
    fn every_kind_of_bad_list_has_its_status() {
        let block = D(kind::DATA_BLOCK, 0x5000, 512);
        let last = D(kind::LAST_SEGMENT, 0x1000, 16);
        let cases = [
            (block, block, 513, Status::DATA_SGL_LENGTH_INVALID),
            (block, block, 511, Status::DATA_SGL_LENGTH_INVALID),
            (block, D(5, 0, 512), 512, Status::SGL_TYPE_INVALID),
            (
                block,
                D(kind::BIT_BUCKET, 0, 512),
                512,
                Status::SGL_TYPE_INVALID,
            ),
            (
                block,
                D(kind::LAST_SEGMENT, 0x1000, 17),
                512,
                Status::INVALID_SGL_SEGMENT,
            ),
            (
                block,
                D(kind::LAST_SEGMENT, 0x1000, 0),
                512,
                Status::INVALID_SGL_SEGMENT,
            ),
            (
                block,
                D(kind::SEGMENT, 0x1000, 16),
                512,
                Status::INVALID_SGL_SEGMENT,
            ),
            (last, last, 512, Status::INVALID_SGL_SEGMENT),
            (
                block,
                D(kind::LAST_SEGMENT, 1 << 40, 16),
                512,
                Status::DATA_TRANSFER_ERROR,
            ),
            (
                block,
                D(kind::LAST_SEGMENT, 0x1000, !15),
                512,
                Status::INVALID_SGL_COUNT,
            ),
        ];
        for (i, (entry, first, len, status)) in cases.into_iter().enumerate() {
            assert_eq!(extents(&[entry], first, len, true), Err(status), "case {i}");
        }
        let mut typed = block;
        typed.identifier |= 1;
        assert_eq!(
            extents(&[], typed, 512, true),
            Err(Status::SGL_TYPE_INVALID)
        );
    }

    /// The limit itself is allowed: 65,536 descriptors, all of them empty except the first.
    #[test]
    fn one_descriptor_more_than_the_limit_is_too_many() {
        let memory = VecMemory::new((MAX_DESCRIPTORS as usize + 1) * DESCRIPTOR_BYTES);
        let first = D(kind::DATA_BLOCK, 0x5000, 512).to_words();
        memory
            .write(0, &first.map(u64::to_le_bytes).concat())
            .unwrap();
        let guard = memory.guard();
        let count = |descriptors: u32| {
            let bytes = descriptors * DESCRIPTOR_BYTES as u32;
            let list = D(kind::LAST_SEGMENT, 0, bytes).to_words();
            walk(&Dma::new(&guard), list, 512, true, |_, _| Ok(()))
        };
        assert_eq!(count(MAX_DESCRIPTORS), Ok(()));
        assert_eq!(count(MAX_DESCRIPTORS + 1), Err(Status::INVALID_SGL_COUNT));
    }

    #[test]
    fn a_chain_without_end_ends() {
        let own = D(kind::SEGMENT, 0x1000, 16);
        assert_eq!(
            extents(&[own], own, 512, true),
            Err(Status::INVALID_SGL_COUNT)
        );
    }
}
