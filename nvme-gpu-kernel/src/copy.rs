//! Copies of rows by a warp, all lanes together. The unit of a copy is the largest that divides both
//! addresses and the length, up to 16 bytes a lane.
// UNSAFETY: copies between addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::exchange::{OfLanes64, exchanged64, of_lane64};
use crate::rows::GatherLaunch;

/// The sizes of a copy: the bytes of a row and the unit of copying; with the lane's number, which may be
/// opaque to the compiler.
///
/// Larger units take fewer instructions; the host computes the largest unit that divides every address and
/// length of the launch once, so that no lane has to look.
#[derive(Clone, Copy)]
pub struct CopyShape {
    pub row_bytes: u32,
    pub unit_shift: u32,
    pub lane: u32,
}

impl CopyShape {
    #[inline(always)]
    pub fn of(rows: &GatherLaunch) -> Self {
        Self {
            row_bytes: rows.row_bytes,
            unit_shift: rows.unit_shift,
            lane: arch::lane(),
        }
    }

    /// Makes the values opaque to the compiler, for kernels that are short of registers.
    #[cfg(feature = "gathers")]
    #[inline(always)]
    pub fn opaque(self) -> Self {
        Self {
            row_bytes: arch::opaque(self.row_bytes),
            unit_shift: self.unit_shift,
            lane: arch::opaque(self.lane),
        }
    }
}

/// Copies a row from `from` of each lane whose bit is set in `wanted` to `to` of that lane. Every lane calls
/// it, and all lanes call `to` with the same lane.
#[inline(always)]
pub fn rows(shape: CopyShape, from: u64, to: impl Fn(u32) -> u64, wanted: u32) {
    match shape.unit_shift {
        4 if shape.row_bytes.is_multiple_of(512) => {
            copy_pieces(shape, exchanged64(from), to, wanted)
        }
        4 => copy_units::<4>(shape, exchanged64(from), to, wanted),
        2 | 3 => copy_units::<2>(shape, exchanged64(from), to, wanted),
        _ => copy_units::<0>(shape, exchanged64(from), to, wanted),
    }
    // A barrier: the rows are read before the next commands that write into the same slots are published.
    arch::sync_warp(arch::FULL);
}

/// Length from which on rows at odd addresses are copied by [`copy_lines`].
#[cfg(feature = "gathers")]
const LONG: u32 = 64;

/// Copies as [`rows`] does, from memory in which whole lines of 16 bytes may be loaded, even if a row begins
/// or ends inside a line: slots, and lines of a cache.
#[cfg(feature = "gathers")]
#[inline(always)]
pub fn rows_of_slots(shape: CopyShape, from: u64, to: impl Fn(u32) -> u64, wanted: u32) {
    if shape.unit_shift < 2 && shape.row_bytes >= LONG {
        copy_lines(shape, from, to, wanted);
        arch::sync_warp(arch::FULL);
    } else {
        rows(shape, from, to, wanted);
    }
}

/// Copies rows at any address, each by all lanes: loads of 16 bytes a lane, stores of one byte. The loads
/// cross the bus, and the next ones are in flight while these are stored.
#[cfg(feature = "gathers")]
#[inline(always)]
fn copy_lines(shape: CopyShape, from: u64, to: impl Fn(u32) -> u64, wanted: u32) {
    let mut left = wanted;
    let from_all = exchanged64(from);
    while left != 0 {
        let row = left.trailing_zeros();
        left &= left - 1;
        let (from, to) = (of_lane64(&from_all, row), to(row));
        let end = from + u64::from(shape.row_bytes);
        let mut at = (from & !15) + u64::from(shape.lane) * 16;
        let mut next = line(at, end);
        while at < end {
            let (low, high) = next;
            next = line(at + 512, end);
            store_half(to.wrapping_sub(from), low, at, (from, end));
            store_half(to.wrapping_sub(from), high, at + 8, (from, end));
            at += 512;
        }
    }
}

/// Loads the 16 bytes at `at`, unless they begin past `end`.
#[cfg(feature = "gathers")]
#[inline(always)]
fn line(at: u64, end: u64) -> (u64, u64) {
    match at < end {
        // SAFETY: an aligned line of the slots or of the cache that contains a byte of the row.
        true => unsafe { (arch::load_u64(at), arch::load_u64(at + 8)) },
        false => (0, 0),
    }
}

/// Stores those of the 8 bytes from `at` on that are between `from` and `end`, `far` bytes further on.
#[cfg(feature = "gathers")]
#[inline(always)]
fn store_half(far: u64, half: u64, at: u64, (from, end): (u64, u64)) {
    let mut byte = 0;
    while byte < 8 {
        let here = at + byte;
        if here >= from && here < end {
            // SAFETY: a byte of the row, so `far` further on it is inside the output.
            unsafe { arch::store_u8(far.wrapping_add(here), (half >> (byte * 8)) as u8) };
        }
        byte += 1;
    }
}

/// Returns log2 of the largest unit (16, 8, 4, 2 or 1 bytes) that divides `word`, the OR of both
/// addresses and the length. The widest unit makes the fewest transactions on the bus.
#[cfg(feature = "gathers")]
#[inline(always)]
pub fn unit_of(word: u64) -> u32 {
    (word | 16).trailing_zeros()
}

/// Copies `bytes` bytes from `from` to `to` of each lane whose bit is set in `wanted`, lane by lane. Every
/// lane calls it. `unit` returns log2 of the bytes that divide addresses and length.
#[cfg(feature = "gathers")]
#[inline(always)]
pub fn parts(
    shape: CopyShape,
    from: u64,
    to: u64,
    bytes: u64,
    wanted: u32,
    unit: impl Fn(u64) -> u32,
) {
    let mut left = wanted;
    let (from_all, all_to) = (exchanged64(from), exchanged64(to));
    let all_bytes = exchanged64(bytes);
    while left != 0 {
        let lane = left.trailing_zeros();
        left &= left - 1;
        let (from, to) = (of_lane64(&from_all, lane), of_lane64(&all_to, lane));
        let bytes = of_lane64(&all_bytes, lane);
        match unit(from | to | bytes) {
            4 => copy_part::<4>(shape, from, to, bytes),
            2 | 3 => copy_part::<2>(shape, from, to, bytes),
            _ => copy_part::<0>(shape, from, to, bytes),
        }
    }
    // A barrier, as in `rows`.
    arch::sync_warp(arch::FULL);
}

#[cfg(feature = "gathers")]
#[inline(always)]
fn copy_part<const SHIFT: u32>(shape: CopyShape, from: u64, to: u64, bytes: u64) {
    let mut at = u64::from(shape.lane) << SHIFT;
    while at < bytes {
        // SAFETY: `at` is below the part's length, in the slots and in the output.
        unsafe {
            match SHIFT {
                4 => arch::copy_16(to + at, from + at),
                2 => arch::copy_4(to + at, from + at),
                _ => arch::copy_1(to + at, from + at),
            }
        }
        at += 32 << SHIFT;
    }
}

/// Copies rows of a multiple of 512 bytes, in parts of 512: a warp loads eight parts before it stores the
/// first, whichever rows they belong to.
#[inline(always)]
fn copy_pieces(shape: CopyShape, from: OfLanes64, to: impl Fn(u32) -> u64, wanted: u32) {
    let lane = u64::from(shape.lane) * 16;
    let bytes = u64::from(shape.row_bytes);
    let (mut left, mut at) = (wanted, 0);
    while left != 0 {
        let mut there = 0;
        let mut next = |bit: u32| {
            let row = left.trailing_zeros() & 31;
            let to = to(row) + at + lane;
            let from = of_lane64(&from, row) + at + lane;
            if left != 0 {
                there |= bit;
            }
            at += 512;
            if at >= bytes {
                at = 0;
                left &= left.wrapping_sub(1);
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
        // SAFETY: each part whose bit is set is inside its row, in the slots and in the output.
        unsafe { arch::copy_pieces(to, from, there) };
    }
}

/// Copies rows in units of 16, 4 or 1 bytes, all rows together: the lanes take consecutive units.
#[inline(always)]
fn copy_units<const SHIFT: u32>(
    shape: CopyShape,
    from: OfLanes64,
    to: impl Fn(u32) -> u64,
    wanted: u32,
) {
    let units = shape.row_bytes >> SHIFT;
    let mut at = shape.lane;
    // Every lane runs the same number of turns, since the lanes exchange addresses.
    let mut left = units;
    while left != 0 {
        left -= 1;
        // The divisor is not zero, since a row has at least one unit.
        let lane = at.checked_div(units).unwrap_or(0);
        let offset = u64::from(at - lane * units) << SHIFT;
        let from = of_lane64(&from, lane) + offset;
        let to = to(lane) + offset;
        if wanted >> lane & 1 == 1 {
            // SAFETY: the offset is below the row's length, in the slots and in the output.
            unsafe {
                match SHIFT {
                    4 => arch::copy_16(to, from),
                    2 => arch::copy_4(to, from),
                    _ => arch::copy_1(to, from),
                }
            }
        }
        at += 32;
    }
}
