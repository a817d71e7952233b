//! Ids that come again later in a launch: the last one wins (docs/adr/0014).
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::exchange::{exchanged32, of_lane32};
use crate::launch;
use crate::rows::GatherLaunch;

/// Number that stands for no row of the table.
const NO_ROW: u32 = u32::MAX;

/// True if no later row of the launch is the lane's row: that of `id`, at `first + lane`. Every lane calls it.
///
/// The comparison with all later ids costs a number of loads that grows with the square of the launch, so the host
/// limits the rows of a launch with ids; without it two warps could write one row in any order.
#[inline(always)]
pub fn is_last(rows: &GatherLaunch, (first, id): (u64, i64)) -> bool {
    // Without ids no two rows are the same.
    if rows.ids == 0 {
        return true;
    }
    let row = of_table(rows, id);
    let mut at = first;
    // Among the first 32 rows, those of higher lanes are later.
    let mut least = arch::lane() + 1;
    let mut next = row_or_none(rows, at);
    // A row that the table does not have needs no comparison.
    let mut comes_again = row == NO_ROW;
    while at < rows.count && arch::ballot(arch::FULL, !comes_again) != 0 {
        at += 32;
        // The next ids are in flight while these are compared.
        let these = exchanged32(next);
        next = row_or_none(rows, at);
        let mut lane = 0;
        while lane < 32 {
            let other = of_lane32(&these, lane);
            comes_again |= other == row && lane >= least;
            lane += 1;
        }
        least = 0;
    }
    !comes_again
}

/// Returns the table's row at `at + lane` of the launch.
#[inline(always)]
fn row_or_none(rows: &GatherLaunch, at: u64) -> u32 {
    let index = at + u64::from(arch::lane());
    if index >= rows.count {
        return NO_ROW;
    }
    // SAFETY: the host vouches for `count` ids.
    of_table(rows, unsafe { launch::id(rows, index) })
}

/// Returns the number of the row with this id, in 32 bits: the host allows no larger tables.
#[inline(always)]
fn of_table(rows: &GatherLaunch, id: i64) -> u32 {
    match (id as u64) < rows.rows {
        true => id as u32,
        false => NO_ROW,
    }
}
