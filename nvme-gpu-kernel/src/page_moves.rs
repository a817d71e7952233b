//! `nvme_check_pages` and `nvme_copy_pages`: see [`pages`](crate::pages).
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::chunks::OnWarp;
use crate::hash::{self, SHORT};
use crate::pages::{
    CheckPages, CopyPages, HEADER_BYTES, PageArrival, PagePiece, PageStaging, page_code,
};
use crate::rows::code;
use core::mem::offset_of;

entry! {
    /// Checks pages that were read. Blocks of whole warps; any number of blocks.
    ///
    /// # Safety
    /// Every address in `job` is valid as [`CheckPages`] documents; nothing else writes there meanwhile.
    pub unsafe fn nvme_check_pages(job: CheckPages) {
        let of_block = arch::block_threads() / 32;
        let mut index = u64::from(arch::block() * of_block + arch::thread() / 32);
        let warps = u64::from(arch::blocks() * of_block);
        while index < job.count {
            // SAFETY: the host vouches for `count` pages.
            unsafe { check_page(&job, index) };
            index += warps;
        }
    }
}

entry! {
    /// Copies pages between the staging memory and their pieces. Blocks of whole warps; any number of blocks.
    ///
    /// # Safety
    /// Every address in `job` is valid as [`CopyPages`] documents; nothing else writes there meanwhile.
    pub unsafe fn nvme_copy_pages(job: CopyPages) {
        let warps = arch::block_threads() / 32;
        let mut index = u64::from(arch::block());
        while index < job.count {
            let page = job.pages + index * size_of::<PageStaging>() as u64;
            let mut from = arch::thread() / 32 * HEADER_BYTES;
            // SAFETY: the host vouches for `count` pages and codes.
            unsafe {
                let bytes = half_of(page, offset_of!(PageStaging, bytes));
                let is_bad = job.codes != 0 && arch::load_u32(job.codes + index * 4) != 0;
                while from < bytes {
                    copy_part(page, (from, bytes), job.stages != 0, is_bad);
                    from += warps * HEADER_BYTES;
                }
            }
            index += u64::from(arch::blocks());
        }
    }
}

/// Loads 8 bytes of a structure at `at`.
///
/// # Safety
/// The address is valid, and a multiple of 8.
#[inline(always)]
unsafe fn word_of(at: u64, field: usize) -> u64 {
    // SAFETY: this function's caller vouches for the structure, which does not change while the kernel runs.
    unsafe { arch::load_word(at + field as u64) }
}

/// Loads 4 bytes of a structure at `at`.
///
/// # Safety
/// The address is valid, and a multiple of 4.
#[inline(always)]
unsafe fn half_of(at: u64, field: usize) -> u32 {
    // SAFETY: this function's caller vouches for the structure, which does not change while the kernel runs.
    unsafe { arch::load_u32(at + field as u64) }
}

/// Checks page `index`. Every lane of the warp calls it.
///
/// # Safety
/// The launch has more than `index` pages; its addresses are valid.
#[inline(always)]
unsafe fn check_page(job: &CheckPages, index: u64) {
    let page = job.pages + index * size_of::<PageStaging>() as u64;
    let lane = arch::lane();
    // SAFETY: this function's caller vouches for the page and for what it names.
    unsafe {
        let mut became = first_failure(job, page);
        let staged = word_of(page, offset_of!(PageStaging, staged));
        let bytes = half_of(page, offset_of!(PageStaging, bytes));
        let mut found = 0;
        // The header first, then the payload, by one copy of the hash: two would take twice the instructions.
        let mut part = 0;
        while part < 2 && became == code::OK {
            let (from, bytes, field, differs) = match part {
                0 => (
                    staged,
                    HEADER_BYTES,
                    offset_of!(PageStaging, header_checksum),
                    page_code::HEADER,
                ),
                _ => (
                    staged + u64::from(HEADER_BYTES),
                    bytes,
                    offset_of!(PageStaging, checksum),
                    page_code::PAYLOAD,
                ),
            };
            let lanes = OnWarp::<true> { from, lane };
            found = match bytes <= SHORT {
                true => hash::of_short(&OnWarp::<false> { from, lane }, bytes),
                false => hash::of_long(&lanes, bytes),
            };
            if found != word_of(page, field) {
                became = differs;
            }
            part += 1;
        }
        if became == page_code::HEADER {
            // Not of the payload.
            found = 0;
        }
        if became == page_code::HEADER || became == page_code::PAYLOAD {
            let to = job.headers + index * u64::from(HEADER_BYTES);
            let mut at = u64::from(lane) * 8;
            while at < u64::from(HEADER_BYTES) {
                arch::store_u64(to + at, arch::load_word(staged + at));
                at += 32 * 8;
            }
        }
        if lane == 0 {
            let arrival = job.arrivals + index * size_of::<PageArrival>() as u64;
            arch::store_u64(arrival, found);
            let code = arrival + offset_of!(PageArrival, code) as u64;
            arch::store_u64(code, u64::from(became as u32));
            arch::store_u32(job.codes + index * 4, became as u32);
        }
    }
}

/// Returns the code of the page's first read that failed, or 0. Every lane of the warp calls it.
///
/// # Safety
/// As [`check_page`].
#[inline(always)]
unsafe fn first_failure(job: &CheckPages, page: u64) -> i32 {
    // SAFETY: this function's caller vouches for the page and the statuses of its reads.
    let (first, reads) = unsafe {
        (
            half_of(page, offset_of!(PageStaging, first_read)),
            half_of(page, offset_of!(PageStaging, reads)),
        )
    };
    let mut before = 0;
    while before < reads {
        let number = before + arch::lane();
        let mut ended = 0;
        if number < reads {
            // SAFETY: as above.
            ended = unsafe { arch::load_u32(job.reads + u64::from(first + number) * 4) };
        }
        let failed = arch::ballot(arch::FULL, ended != 0);
        if failed != 0 {
            return arch::shuffle(arch::FULL, ended, failed.trailing_zeros()) as i32;
        }
        before += 32;
    }
    code::OK
}

/// Copies the bytes of the payload from `from` on, [`HEADER_BYTES`] of them or those up to its end. Every lane of the
/// warp calls it.
///
/// # Safety
/// The page is valid as [`PageStaging`] documents, and `from` is below the bytes of its payload.
#[inline(always)]
unsafe fn copy_part(page: u64, (from, bytes): (u32, u32), stages: bool, is_bad: bool) {
    // SAFETY: this function's caller vouches for the page, its pieces, and the memory that they name.
    unsafe {
        let staged = word_of(page, offset_of!(PageStaging, staged)) + u64::from(HEADER_BYTES);
        let pieces = word_of(page, offset_of!(PageStaging, pieces));
        let count = half_of(page, offset_of!(PageStaging, piece_count));
        let end = bytes.min(from + HEADER_BYTES);
        let mut number = piece_at(pieces, count, from);
        let mut at = from;
        while at < end && number < count {
            let piece = pieces + u64::from(number) * size_of::<PagePiece>() as u64;
            let first = half_of(piece, offset_of!(PagePiece, first));
            let past = first + half_of(piece, offset_of!(PagePiece, bytes));
            let length = end.min(past) - at;
            let place = word_of(piece, 0) + u64::from(at - first);
            let other = staged + u64::from(at);
            match (stages, is_bad) {
                (true, _) => copy_bytes(other, place, length),
                (false, false) => copy_bytes(place, other, length),
                (false, true) => clear_bytes(place, length),
            }
            at += length;
            number += 1;
        }
        if stages {
            // A block is written as a whole: its end would be bytes of another page.
            clear_bytes(staged + u64::from(end), from + HEADER_BYTES - end);
        }
    }
}

/// Returns the number of the piece that has byte `at` of the payload.
///
/// # Safety
/// `count` pieces at `pieces` are valid.
#[inline(always)]
unsafe fn piece_at(pieces: u64, count: u32, at: u32) -> u32 {
    // A binary search for the last piece that begins at the byte or before it. The first one begins at 0.
    let mut found = 0;
    let mut step = count.next_power_of_two() / 2;
    while step != 0 {
        let next = found + step;
        if next < count {
            let piece = pieces + u64::from(next) * size_of::<PagePiece>() as u64;
            // SAFETY: this function's caller vouches for the pieces.
            if unsafe { half_of(piece, offset_of!(PagePiece, first)) } <= at {
                found = next;
            }
        }
        step /= 2;
    }
    found
}

/// Copies `bytes` bytes, by the whole warp.
///
/// # Safety
/// Both ranges are valid.
#[inline(always)]
unsafe fn copy_bytes(to: u64, from: u64, bytes: u32) {
    let lane = u64::from(arch::lane());
    let unit = (to | from | u64::from(bytes) | 16).trailing_zeros();
    // SAFETY: this function's caller vouches for both ranges; every offset is below `bytes`.
    unsafe {
        if unit == 4 && bytes == HEADER_BYTES {
            let (to, from) = (to + lane * 16, from + lane * 16);
            arch::copy_pieces(apart(to), apart(from), 0xFF);
            return;
        }
        match unit {
            4 => copy_units::<4>(to, from, bytes),
            2 | 3 => copy_units::<2>(to, from, bytes),
            _ => copy_units::<0>(to, from, bytes),
        }
    }
}

/// Copies `bytes` bytes in units of 16, 4 or 1 bytes, by the whole warp.
///
/// # Safety
/// Both ranges are valid, and multiples of a unit.
#[inline(always)]
unsafe fn copy_units<const SHIFT: u32>(to: u64, from: u64, bytes: u32) {
    let mut at = u64::from(arch::lane()) << SHIFT;
    while at < u64::from(bytes) {
        // SAFETY: this function's caller vouches for both ranges; the offset is below `bytes`.
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

/// Returns eight addresses from `at` on, as far apart as a warp copies with 16 bytes a lane.
#[inline(always)]
fn apart(at: u64) -> [u64; 8] {
    [
        at,
        at + 512,
        at + 1024,
        at + 1536,
        at + 2048,
        at + 2560,
        at + 3072,
        at + 3584,
    ]
}

/// Zeroes `bytes` bytes, by the whole warp.
///
/// # Safety
/// The range is valid.
#[inline(always)]
unsafe fn clear_bytes(to: u64, bytes: u32) {
    let mut at = arch::lane();
    while at < bytes {
        // SAFETY: this function's caller vouches for the range.
        unsafe { arch::store_u8(to + u64::from(at), 0) };
        at += 32;
    }
}

#[cfg(all(test, feature = "lanes"))]
mod tests;
