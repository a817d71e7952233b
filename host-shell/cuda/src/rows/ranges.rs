//! Ranges of bytes, many in one launch: each is divided into pieces, which all warps of the launch share, so that a
//! single long range is read as fast as many short ones.
// UNSAFETY: launches a kernel over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::slot::LaunchSlot;
use super::{GpuRows, LaunchSequence, PendingRows, ReadList, ReadRange, RowRequest, RowTable};
use nvme_driver::error::Result;
use nvme_gpu_kernel::rows::{
    GatherLaunch, ListedLaunch, RANGES, RangeSplit, RangeTarget, RangesLaunch,
};

/// Bytes of a piece, unless a block is longer. Neighbouring pieces of a warp are one command, so that a short range is
/// spread over many warps and a long one is read in long commands.
const PIECE_BYTES: u32 = 4096;

impl GpuRows {
    /// True if a slot holds a piece.
    pub fn reads_ranges(&self) -> bool {
        self.fits(&self.pieces(0))
    }

    /// Returns the number of bytes of a piece at most.
    fn piece_bytes(&self) -> u32 {
        PIECE_BYTES.max(self.info.block_bytes)
    }

    fn pieces(&self, count: u64) -> RowTable {
        RowTable {
            first_byte: 0,
            rows: count,
            row_bytes: self.piece_bytes(),
        }
    }

    /// Enqueues reads of `ranges` of the namespace in `stream`, as [`gather`](Self::gather) does: one launch
    /// for [`RANGES`] of them. A row of the [`PendingRows`] is a piece; pieces are numbered through all ranges.
    ///
    /// # Safety
    /// As [`gather`](Self::gather), for the addresses in `ranges`. The ranges lie inside the namespace.
    ///
    /// # Errors
    /// The conditions are those of [`gather`](Self::gather); if too many launches are in progress, nothing is read.
    pub unsafe fn read_ranges(&self, ranges: &[ReadRange], stream: u64) -> Result<PendingRows> {
        ReadRange::judge_all(ranges, self.gpu(), stream)?;
        let some: Vec<&ReadRange> = ranges.iter().filter(|range| range.bytes > 0).collect();
        // All launch numbers are reserved, or nothing is read.
        let slots = self.state.reserve(some.len().div_ceil(RANGES))?;
        LaunchSequence::run(self.gpu(), stream, |sequence| {
            let mut before = 0;
            for (some, slot) in some.chunks(RANGES).zip(slots) {
                // SAFETY: the caller keeps the conditions under `# Safety`.
                let (part, count) = unsafe { self.read_some(some, slot, stream) }?;
                sequence.add(part, before);
                before += count;
            }
            Ok(())
        })
    }

    /// Enqueues one launch over `some` ranges in `stream`; returns the number of pieces.
    ///
    /// # Safety
    /// As [`read_ranges`](Self::read_ranges).
    unsafe fn read_some(
        &self,
        some: &[&ReadRange],
        slot: LaunchSlot,
        stream: u64,
    ) -> Result<(PendingRows, u64)> {
        let shift = self.piece_bytes().trailing_zeros();
        let (ranges, count) = parts(some, shift);
        let request = RowRequest {
            ids: 0,
            wide_ids: true,
            count,
            out: 0,
            out_stride: 0,
            status: 0,
        };
        let launch = self.launch(&self.pieces(count), &request);
        let launch = GatherLaunch {
            unit_shift: unit_shift(some, shift),
            ..launch.ok_or_else(super::closed)?
        };
        let bytes = some.iter().map(|range| range.bytes).sum();
        let slot = slot.moving(count, bytes);
        let part = self.start(launch, (slot, None), stream, |kernels, gather, blocks| {
            let ranges = RangesLaunch {
                gather,
                split: RangeSplit {
                    range_count: some.len() as u32,
                    piece_shift: shift,
                },
                ranges,
            };
            // SAFETY: the kernel takes one `RangesLaunch`; the caller vouches for the ranges' addresses, the others are
            // ours until the gate is shut for good and nothing is inside.
            unsafe { kernels.launch(stream, kernels.read_ranges, blocks, &ranges) }
        })?;
        Ok((part, count))
    }
}

impl GpuRows {
    /// Returns the number of bytes of a piece of a listed range.
    pub fn listed_piece_bytes(&self) -> u32 {
        self.piece_bytes()
    }

    /// Enqueues a launch in `stream` that reads the ranges which the list names when the launch runs. A row of the
    /// [`PendingRows`] is a piece.
    ///
    /// # Safety
    /// The conditions are those of [`gather`](Self::gather), for the list, the memory that it names and the status. The
    /// list is complete before the launch begins.
    ///
    /// # Errors
    /// As [`gather`](Self::gather).
    pub unsafe fn read_listed(&self, list: &ReadList, stream: u64) -> Result<PendingRows> {
        list.judge(self.gpu(), stream)?;
        let request = RowRequest {
            ids: 0,
            wide_ids: true,
            count: list.pieces,
            out: 0,
            out_stride: 0,
            status: list.status,
        };
        let launch = self.launch(&self.pieces(list.pieces), &request);
        let launch = GatherLaunch {
            unit_shift: 4,
            ..launch.ok_or_else(super::closed)?
        };
        let slot = (self.slot()?, None);
        self.start(launch, slot, stream, |kernels, gather, blocks| {
            let listed = ListedLaunch {
                gather,
                list: list.list,
                most_ranges: list.ranges,
                piece_shift: self.piece_bytes().trailing_zeros(),
            };
            // SAFETY: the kernel takes one `ListedLaunch`; the caller vouches for the list, the others are ours until
            // the gate is shut for good and nothing is inside.
            unsafe { kernels.launch(stream, kernels.read_listed, blocks, &listed) }
        })
    }
}

/// Returns the words of a launch over `some`, and how many pieces they have.
fn parts(some: &[&ReadRange], shift: u32) -> ([RangeTarget; RANGES], u64) {
    let mut ranges = [RangeTarget::default(); RANGES];
    let mut first = 0;
    for (range, one) in ranges.iter_mut().zip(some) {
        *range = RangeTarget {
            byte: one.offset,
            bytes: one.bytes,
            to: one.to,
            first,
        };
        first += range.pieces(shift);
    }
    (ranges, first)
}

/// Returns log2 of the common alignment in bytes of the addresses of whole pieces, 4 at most.
fn unit_shift(some: &[&ReadRange], shift: u32) -> u32 {
    // A whole piece begins at a multiple of its length in the drive's bytes.
    let begins = some.iter().map(|one| {
        let first = one.offset.next_multiple_of(1 << shift);
        one.to.wrapping_add(first - one.offset)
    });
    begins.fold(16, |all, to| all | to).trailing_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_pieces_are_copied_in_the_units_that_their_addresses_have() {
        for (offset, to, shift) in [
            (0, 0, 4),
            (0, 8, 3),
            (1, 1, 4),
            (4095, 15, 4),
            (5, 7, 1),
            (5, 8, 0),
            (8192, 1 << 40, 4),
        ] {
            let range = ReadRange {
                offset,
                bytes: 1,
                to,
            };
            assert_eq!(unit_shift(&[&range], 12), shift, "{offset} {to}");
            let aligned = ReadRange {
                offset: 0,
                bytes: 1,
                to: 0,
            };
            assert_eq!(unit_shift(&[&aligned, &range], 12), shift);
        }
    }

    #[test]
    fn pieces_are_counted_through() {
        let range = |offset, bytes| ReadRange {
            offset,
            bytes,
            to: 0,
        };
        let some = [
            range(0, 4096),
            range(4095, 2),
            range(7, 1 << 20),
            range(9, 1),
        ];
        let (ranges, count) = parts(&some.each_ref(), 12);
        let first = ranges.map(|range| range.first);
        assert_eq!(first[..4], [0, 1, 3, 260]);
        assert_eq!(count, 261);
    }
}
