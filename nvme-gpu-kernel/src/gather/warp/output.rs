//! Copies of rows and pieces from the slots of a warp to the output.

use super::GatherWarp;
use crate::arch;
use crate::copy;
use crate::exchange::{exchanged64, of_lane64, shuffle64};
use crate::gather::failed::fill;
use crate::gather::map::RowMap;
use crate::gather::row::GatherRow;
use crate::rows::RangePiece;

impl<M: RowMap> GatherWarp<'_, '_, M> {
    /// Returns the sizes of a copy.
    #[inline(always)]
    pub(super) fn shape(&self) -> copy::CopyShape {
        let shape = copy::CopyShape::of(self.rows);
        match self.members {
            Some(_) => shape.opaque(),
            None => shape,
        }
    }

    /// Copies the rows of the lanes with `wants` to the output, by the whole warp.
    #[inline(always)]
    pub fn copy(&self, index: u64, row: &GatherRow<M>, wants: bool) {
        let wanted = arch::ballot(arch::FULL, wants);
        let first = index - u64::from(arch::lane());
        let rows = self.rows;
        let to = |lane| rows.out + (first + u64::from(lane)) * rows.out_stride;
        copy::rows_of_slots(self.shape(), row.from, to, wanted);
    }

    /// Copies the pieces of the lanes with `wants` to their targets, by the whole warp.
    #[inline(always)]
    pub(super) fn copy_piece(&self, piece: RangePiece, from: u64, wants: bool) {
        let RangePiece { to, bytes, .. } = piece;
        let is_whole = bytes == self.rows.row_bytes;
        let whole = arch::ballot(arch::FULL, wants && is_whole);
        let place = exchanged64(to);
        let place = |lane| of_lane64(&place, lane);
        copy::rows(self.shape(), from, place, whole);
        let part = arch::ballot(arch::FULL, wants && !is_whole);
        let bytes = u64::from(bytes);
        copy::parts(self.shape(), from, to, bytes, part, copy::unit_of);
    }

    /// Zeroes the pieces of the lanes with `wants`, by the whole warp.
    #[inline(always)]
    pub(super) fn clear_pieces(&self, piece: RangePiece, wants: bool) {
        let mut left = arch::ballot(arch::FULL, wants);
        while left != 0 {
            let lane = left.trailing_zeros();
            left &= left - 1;
            let to = shuffle64(piece.to, lane);
            let bytes = arch::shuffle(arch::FULL, piece.bytes, lane);
            fill(to, bytes, 0);
        }
    }
}
