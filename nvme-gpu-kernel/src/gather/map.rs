//! The location of a table's rows, a type parameter of gathers: in one range, which costs nothing, or in several.
// UNSAFETY: reads extents at an address that the host vouches for.
#![allow(unsafe_code)]

use crate::extents::{ExtentMap, RowSpan};
use crate::rows::{GatherLaunch, StripedMember};

/// Location of a table. Each kernel is compiled for both implementations.
pub trait RowMap: Copy {
    /// A part of a row as a lane keeps it: the number of bytes before it and in it. Empty if the table is in one range.
    type Part: Copy;
    /// True for a table in several ranges.
    const IS_MAP: bool;

    /// Returns the bytes of row `id` from its byte `done` on that are contiguous.
    ///
    /// # Safety
    /// The extents are valid as [`ExtentMap`] documents.
    unsafe fn span(&self, rows: &GatherLaunch, at: (i64, u32)) -> Option<RowSpan>;

    /// Returns the part of `bytes` bytes behind the first `done` bytes of a row.
    fn part(done: u32, bytes: u32) -> Self::Part;

    /// Returns both numbers of a part; `None` if the table is in one range, which keeps none.
    fn numbers(part: Self::Part) -> Option<(u32, u32)>;

    /// Returns the drive whose rows alone the block gathers, with its number; `None` if it gathers all rows.
    #[inline(always)]
    fn member(&self) -> Option<(u32, &StripedMember)> {
        None
    }

    /// Returns true if the block gathers row `id`, or reports that the table has no such row; and the first part of the
    /// row, as [`span`](Self::span) does.
    ///
    /// # Safety
    /// As [`span`](Self::span).
    #[inline(always)]
    unsafe fn row_of_block(&self, rows: &GatherLaunch, id: i64) -> (bool, Option<RowSpan>) {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        (true, unsafe { self.span(rows, (id, 0)) })
    }
}

/// A table in one range, which begins at the first byte of the launch.
#[derive(Clone, Copy)]
pub struct OneRange;

impl RowMap for OneRange {
    type Part = ();
    const IS_MAP: bool = false;

    #[inline(always)]
    unsafe fn span(&self, rows: &GatherLaunch, (id, _): (i64, u32)) -> Option<RowSpan> {
        let place = rows.place(id)?;
        let bytes = rows.row_bytes;
        Some(RowSpan { place, bytes })
    }

    #[inline(always)]
    fn part(_: u32, _: u32) {}

    #[inline(always)]
    fn numbers((): ()) -> Option<(u32, u32)> {
        None
    }
}

impl RowMap for ExtentMap {
    type Part = (u32, u32);
    const IS_MAP: bool = true;

    #[inline(always)]
    unsafe fn span(&self, rows: &GatherLaunch, at: (i64, u32)) -> Option<RowSpan> {
        // SAFETY: a word of one of the extents, for which the caller vouches.
        self.part(rows, at, |byte| unsafe {
            *((self.extents + byte) as usize as *const u64)
        })
    }

    #[inline(always)]
    fn part(done: u32, bytes: u32) -> (u32, u32) {
        (done, bytes)
    }

    #[inline(always)]
    fn numbers(part: (u32, u32)) -> Option<(u32, u32)> {
        Some(part)
    }
}
