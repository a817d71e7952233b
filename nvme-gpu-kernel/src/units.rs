//! Copies by all threads of a block: the units of several rows are dealt to the threads in turn.
// UNSAFETY: copies between addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;

/// The units of 16, 8 or 4 bytes that a thread copies. The units of all rows, in their order, are dealt to the threads
/// of the block in turn. Neighbouring threads thus store neighbouring units, which leave the GPU as whole lines.
#[derive(Clone, Copy)]
pub struct UnitSteps {
    /// Row of the next unit; `unit` is the number of that unit in the row.
    pub row: u32,
    unit: u32,
    /// Units of a row, and whole rows and units from one to the next.
    units: u32,
    rows: u32,
    rest: u32,
}

impl UnitSteps {
    /// Starts at the thread's first unit. The divisions are done here, while the reads have not begun.
    #[inline(always)]
    pub fn new(units: u32) -> Self {
        // Never by zero: a row has at least one unit.
        let split = |count: u32| {
            let rows = count.checked_div(units).unwrap_or(u32::MAX);
            (rows, count.wrapping_sub(rows.wrapping_mul(units)))
        };
        let ((row, unit), (rows, rest)) = (split(arch::thread()), split(arch::block_threads()));
        Self {
            row,
            unit,
            units,
            rows,
            rest,
        }
    }

    /// Returns row and byte of the unit of `1 << shift` bytes, and advances to the thread's next one.
    #[inline(always)]
    pub fn next(&mut self, shift: u32) -> (u32, u64) {
        let at = (self.row, u64::from(self.unit) << shift);
        let unit = self.unit + self.rest;
        let is_over = unit >= self.units;
        self.unit = unit - if is_over { self.units } else { 0 };
        self.row += self.rows + u32::from(is_over);
        at
    }

    /// Copies the units of `count` rows, of `1 << shift` bytes each: 4, 3 or 2. `place` tells of the unit at a byte of a
    /// row whether it is copied, where to, and from where. A thread has eight loads in flight, whichever rows they belong
    /// to.
    ///
    /// # Safety
    /// Both addresses of each unit that is copied are valid, and multiples of a unit.
    #[inline(always)]
    pub unsafe fn copy(self, shift: u32, count: u32, place: impl Fn(u32, u64) -> (bool, u64, u64)) {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe {
            match shift {
                4 => self.copy_of::<4>(count, place),
                3 => self.copy_of::<3>(count, place),
                _ => self.copy_of::<2>(count, place),
            }
        }
    }

    /// # Safety
    /// As [`copy`](Self::copy).
    #[inline(always)]
    unsafe fn copy_of<const SHIFT: u32>(
        mut self,
        count: u32,
        place: impl Fn(u32, u64) -> (bool, u64, u64),
    ) {
        while self.row < count {
            let mut there = 0;
            let mut next = |bit: u32| {
                let (row, byte) = self.next(SHIFT);
                let (is_copied, to, from) = place(row, byte);
                if is_copied {
                    there |= bit;
                }
                (to, from)
            };
            // One variable each: an array would be placed on a stack, these stay in registers.
            let ((t0, f0), (t1, f1)) = (next(1), next(2));
            let ((t2, f2), (t3, f3)) = (next(4), next(8));
            let ((t4, f4), (t5, f5)) = (next(16), next(32));
            let ((t6, f6), (t7, f7)) = (next(64), next(128));
            let to = [t0, t1, t2, t3, t4, t5, t6, t7];
            let from = [f0, f1, f2, f3, f4, f5, f6, f7];
            // SAFETY: the caller vouches for the units that are copied.
            unsafe { arch::copy_units::<SHIFT>(to, from, there) };
        }
    }
}
