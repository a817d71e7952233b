//! Gathers of the rows of a list: of some positions of the output, in any order.
// UNSAFETY: reads a list at an address that the host vouches for.
#![allow(unsafe_code)]

use super::GatherWarp;
use crate::arch;
use crate::copy;
use crate::exchange::{exchanged64, of_lane64, shuffle64};
use crate::gather::failed::fill;
use crate::gather::map::RowMap;
use crate::gather::row::GatherRow;
use crate::groups::GpuThread;
use crate::rows::{code, worst};
use nvme_core::group::ExecContext;

impl<M: RowMap> GatherWarp<'_, '_, M> {
    /// Gathers the rows whose positions lie at `list`, as `gather_all` does. Only without a cache.
    #[inline(always)]
    pub fn gather_listed(&mut self, list: u64, first: u32, step: u32) {
        let lanes = u64::from(self.rows.lanes.clamp(1, 32));
        let chunks = self.count.div_ceil(lanes);
        let mut chunk = u64::from(first);
        // The block has passed the gate just now, which counts as a look.
        let mut looked_ns = GpuThread.now_ns();
        while chunk < chunks {
            self.look(&mut looked_ns);
            let at = chunk * lanes + u64::from(arch::lane());
            let is_live = at < self.count && arch::lane() < self.rows.lanes;
            let mut position = 0;
            if is_live {
                // SAFETY: the host vouches for the list, whose first `count` words an earlier launch has stored.
                position = u64::from(unsafe { arch::load_u32(list + at * 4) });
            }
            let is_live = is_live && position < self.rows.count;
            self.gather_positions(position, is_live);
            chunk += u64::from(step);
        }
    }

    /// Gathers the row of each lane's position.
    #[inline(always)]
    fn gather_positions(&mut self, position: u64, is_live: bool) {
        let mut row = self.row(position, is_live);
        let (mut wants, mut together) = (row.code == code::OK, true);
        if self.ends == code::OK {
            let is_cut = wants && self.cut(&mut row);
            loop {
                if self.is_alone() {
                    self.refuse(&mut row, wants);
                    break;
                }
                let is_shared = self.read(&mut row, None, wants, is_cut, together);
                let is_read = wants && row.code == code::OK;
                self.copy_to(position, &row, is_read && !is_cut);
                let goes_on = self.next_part(position, &mut row, is_read && is_cut);
                // A read that failed for several rows is repeated for each of them, as in `gather_chunk`.
                wants &= is_shared && row.code > 0;
                if wants && self.ends != code::OK {
                    row.code = self.ends;
                }
                wants |= goes_on;
                if self.ends != code::OK || arch::ballot(arch::FULL, wants) == 0 {
                    break;
                }
                together = false;
            }
        } else if wants {
            row.code = self.ends;
        }
        self.end_positions(position, is_live, (row.member, row.code));
    }

    /// Copies the rows of the lanes with `wants` to their positions, by the whole warp.
    #[inline(always)]
    fn copy_to(&self, position: u64, row: &GatherRow<M>, wants: bool) {
        let wanted = arch::ballot(arch::FULL, wants);
        let to = exchanged64(self.rows.out + position * self.rows.out_stride);
        let to = |lane| of_lane64(&to, lane);
        copy::rows_of_slots(self.shape(), row.from, to, wanted);
    }

    /// Stores the codes of the lanes' rows and the content of failed ones, which it counts.
    #[inline(always)]
    fn end_positions(&mut self, position: u64, is_live: bool, (member, code): (Option<u32>, i32)) {
        let rows = self.rows;
        if is_live {
            // SAFETY: the host vouches for an `i32` for each row.
            unsafe { arch::store_u32(rows.status + position * 4, code as u32) };
        }
        let mut left = arch::ballot(arch::FULL, is_live && code != code::OK);
        self.failed.rows += u64::from(left.count_ones());
        while left != 0 {
            let lane = left.trailing_zeros();
            left &= left - 1;
            let at = shuffle64(position, lane);
            let word = shuffle64(worst(position, member, code), lane);
            if word > self.failed.worst {
                self.failed.worst = word;
            }
            fill(
                rows.out + at * rows.out_stride,
                rows.row_bytes,
                rows.failed_as,
            );
        }
    }
}
