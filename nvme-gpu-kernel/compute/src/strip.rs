//! The assignment of a product's rows to warps: a warp has consecutive rows, and consumes their bytes in the
//! order in which they arrive.
//!
//! A row consists of groups of bytes, each with whole units of elements. A group is computed once its last
//! byte has arrived; its first byte may have arrived with an earlier read.

use nvme_formats::{StoredFormat, UNIT};
use nvme_gpu_kernel::rows::code;

/// Bytes that a warp copies to shared memory in one step, at addresses on the drive that are multiples of it.
pub const TILE_BYTES: u64 = 2048;
/// Bytes of shared memory of a warp: a group that begins in one tile and ends in the next uses both halves.
pub const WINDOW_BYTES: u64 = 2 * TILE_BYTES;

/// The division of a row into groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupShape {
    /// Bytes of a group.
    pub group_bytes: u32,
    /// Units of a group.
    pub group_units: u32,
    /// Groups of a row.
    pub groups: u32,
}

impl GroupShape {
    /// Returns the division of rows of `columns` elements.
    #[inline(always)]
    pub fn of(stored: StoredFormat, columns: u32) -> Self {
        let (elements, bytes) = stored.block();
        let group = if elements < UNIT { UNIT } else { elements };
        Self {
            group_bytes: bytes * (group / elements),
            group_units: group / UNIT,
            groups: columns / group,
        }
    }
}

/// Returns the first row of warp `warp` of `warps`; the first row of the next warp is its end. `rows` is
/// below 2^32.
///
/// Each warp gets a share of the rows that differs from the others' by at most one row, with a multiplication
/// and a division in 64 bits, which cannot overflow for this range.
#[inline(always)]
pub fn first_row(rows: u64, warp: u32, warps: u32) -> u64 {
    let share = rows * u64::from(warp);
    share.checked_div(u64::from(warps)).unwrap_or(0)
}

/// The position of a warp in its rows. All lanes hold the same state, except for their own partial sums.
#[derive(Clone, Copy, Debug)]
pub struct RowCursor {
    /// The first byte of the next group.
    byte: u64,
    row: u64,
    /// The next group of the row.
    group: u32,
    /// Lane's partial sum of the row.
    sum: f32,
    /// Reason why the row is not computed, or [`code::OK`].
    code: i32,
}

impl RowCursor {
    /// Makes a position at the start of row `row`, whose first byte is `byte`.
    #[inline(always)]
    pub fn new(row: u64, byte: u64) -> Self {
        Self {
            byte,
            row,
            group: 0,
            sum: 0.0,
            code: code::OK,
        }
    }

    /// Returns the current row.
    #[inline(always)]
    pub fn row(&self) -> u64 {
        self.row
    }

    /// Consumes the groups that end before byte `until`; they are valid if `code` is [`code::OK`].
    ///
    /// `dot` returns the lane's sum over a number of groups from a byte on; its last argument is the number
    /// of the first group in the row. `done` receives each row that ends here: its number, its sum, and the
    /// reason why it is not computed. `until` is less than 4 GiB further on.
    #[inline(always)]
    pub fn advance(
        &mut self,
        shape: GroupShape,
        until: u64,
        code: i32,
        mut dot: impl FnMut(u64, u32, u32) -> f32,
        mut done: impl FnMut(u64, f32, i32),
    ) {
        loop {
            // Whole groups only: a group whose last byte has not arrived is computed in the next call, from
            // both halves of the window.
            let there = (until - self.byte) as u32;
            let there = there.checked_div(shape.group_bytes).unwrap_or(0);
            let left = shape.groups - self.group;
            let ready = if there < left { there } else { left };
            if self.code == code::OK {
                self.code = code;
            }
            if self.code == code::OK && ready != 0 {
                self.sum += dot(self.byte, ready, self.group);
            }
            self.byte += u64::from(ready * shape.group_bytes);
            self.group += ready;
            if self.group < shape.groups {
                break;
            }
            done(self.row, self.sum, self.code);
            self.next_row();
        }
        // The group at the end of a read begins in it, so its row lacks that part and keeps the error. A row
        // that begins with the next read does not.
        if self.byte == until && self.group == 0 {
            self.code = code::OK;
        }
    }

    /// Reports the rows from here up to `end` as not computed, because of `code`.
    ///
    /// A row that failed before keeps its first reason, which is the cause; the rows after it get the reason
    /// why the warp stopped.
    #[inline(always)]
    pub fn give_up(&mut self, end: u64, code: i32, mut done: impl FnMut(u64, f32, i32)) {
        while self.row < end {
            let why = if self.code == code::OK {
                code
            } else {
                self.code
            };
            done(self.row, self.sum, why);
            self.next_row();
        }
    }

    #[inline(always)]
    fn next_row(&mut self) {
        self.row += 1;
        self.group = 0;
        self.sum = 0.0;
        self.code = code::OK;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_gpu_kernel::ring::{RangePieces, RangeRing};

    const PIECE_SHIFT: u32 = 12;

    /// The rows of a strip as a warp takes them, where piece `number` ends with `code(number)`: of each its number, the
    /// groups that were multiplied, and its code. A code below 0 ends the warp.
    fn rows_of(
        shape: GroupShape,
        rows: core::ops::Range<u64>,
        first_byte: u64,
        code_of: impl Fn(u64) -> i32,
    ) -> Vec<(u64, u32, i32)> {
        let row_bytes = u64::from(shape.group_bytes * shape.groups);
        let byte = |row: u64| first_byte + row * row_bytes;
        let ring = RangeRing {
            begin: byte(rows.start),
            end: byte(rows.end),
            piece_shift: PIECE_SHIFT,
        };
        let mut cursor = RowCursor::new(rows.start, ring.begin);
        let mut found = Vec::new();
        let mut done = |row, sum: f32, code| found.push((row, sum as u32, code));
        let mut next = ring.begin;
        let mut rest = code::OK;
        for number in ring.first()..=ring.last() {
            let code = code_of(number);
            let (begin, until) = ring.piece(number);
            let mut tile = begin & !(TILE_BYTES - 1);
            while tile < until {
                let end = if code == code::OK {
                    until.min(tile + TILE_BYTES)
                } else {
                    until
                };
                let dot = |byte: u64, groups: u32, group: u32| {
                    // In their order, in this tile and the one before, and at their place in the row.
                    assert!(byte >= next && byte + WINDOW_BYTES > end);
                    next = byte + u64::from(groups * shape.group_bytes);
                    assert!(next <= end);
                    let at = (byte - first_byte) % row_bytes;
                    assert_eq!(at, u64::from(group * shape.group_bytes));
                    groups as f32
                };
                cursor.advance(shape, end, code, dot, &mut done);
                tile = end.next_multiple_of(TILE_BYTES).max(tile + TILE_BYTES);
            }
            if code < 0 {
                rest = code::NOT_RUN;
                break;
            }
        }
        cursor.give_up(rows.end, rest, &mut done);
        found
    }

    /// The first code of the pieces that have bytes of a row.
    fn expected(bytes: (u64, u64), code_of: impl Fn(u64) -> i32) -> i32 {
        let mut codes = (bytes.0 >> PIECE_SHIFT..=(bytes.1 - 1) >> PIECE_SHIFT).map(code_of);
        codes.find(|code| *code != code::OK).unwrap_or(code::OK)
    }

    #[test]
    fn every_row_is_whole_or_fails_for_the_pieces_that_have_bytes_of_it() {
        for stored in StoredFormat::ALL {
            let group = stored.block().0.max(UNIT);
            for (groups, first_byte) in [(1, 0), (3, 4094), (29, 18), (64, 0), (211, 2)] {
                let shape = GroupShape::of(stored, groups * group);
                assert_eq!(shape.groups, groups);
                let row_bytes = stored.row_bytes(groups * group).unwrap();
                assert_eq!(row_bytes, u64::from(shape.group_bytes * shape.groups));
                for (every, status) in [(u64::MAX, 0), (3, 0x281), (1, 0x281), (5, code::TIMED_OUT)]
                {
                    let code_of = |number: u64| match number % every == every - 1 {
                        true => status,
                        false => code::OK,
                    };
                    let rows = 5..70;
                    let found = rows_of(shape, rows.clone(), first_byte, code_of);
                    assert_eq!(found.len(), 65);
                    let mut has_ended = false;
                    for ((row, had, code), at) in found.into_iter().zip(rows) {
                        assert_eq!(row, at);
                        let begin = first_byte + row * row_bytes;
                        let mut due = expected((begin, begin + row_bytes), code_of);
                        // After a piece without an end nothing more is read.
                        due = if has_ended && (due >= 0 || code == code::NOT_RUN) {
                            code::NOT_RUN
                        } else {
                            due
                        };
                        has_ended |= due < 0;
                        assert_eq!(code, due, "{stored:?} {groups} {every} row {row}");
                        if code == code::OK {
                            assert_eq!(had, groups, "{stored:?} row {row}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn warps_share_all_rows_evenly() {
        for (rows, warps) in [
            (0, 8),
            (1, 8),
            (7, 8),
            (8, 8),
            (1001, 256),
            (u64::from(u32::MAX), 1056),
        ] {
            let shares = (0..warps).map(|warp| {
                let first = first_row(rows, warp, warps);
                first_row(rows, warp + 1, warps) - first
            });
            let shares: Vec<u64> = shares.collect();
            assert_eq!(first_row(rows, 0, warps), 0);
            assert_eq!(shares.iter().sum::<u64>(), rows);
            let most = shares.iter().max().unwrap();
            assert!(most - shares.iter().min().unwrap() <= 1);
        }
    }
}
