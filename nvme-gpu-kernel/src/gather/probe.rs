//! Kernels of the benchmark: the bare copy that a gather is compared with, and the check of gathered rows.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::warp::GatherWarp;
use crate::arch;
use crate::rows::{BLOCK_WARPS, CheckLaunch, GatherLaunch, code};
use crate::work::data_word;

entry! {
    /// Copies rows of a table in memory at `rows.slots`: the upper bound of a gather, without a drive.
    ///
    /// # Safety
    /// The same as for the kernel `nvme_gather`, for ids, output and the table.
    pub unsafe fn nvme_copy_rows(rows: GatherLaunch) {
        let lanes = u64::from(rows.lanes.clamp(1, 32));
        let work = GatherWarp::without_queue(&rows);
        let mut chunk = u64::from(arch::block() * BLOCK_WARPS + arch::thread() / 32);
        while chunk < rows.count.div_ceil(lanes) {
            let index = chunk * lanes + u64::from(arch::lane());
            let is_live = index < rows.count && arch::lane() < rows.lanes;
            let mut row = work.row(index, is_live);
            row.from = rows.slots + row.place.byte;
            work.copy(index, &row, row.code == code::OK);
            chunk += u64::from(arch::blocks() * BLOCK_WARPS);
        }
    }
}

entry! {
    /// Counts the gathered rows that have a word other than that of their id.
    ///
    /// # Safety
    /// The addresses in `check` are valid as [`CheckLaunch`] documents.
    pub unsafe fn nvme_check_rows(check: CheckLaunch) {
        let rows = &check.gather;
        let work = GatherWarp::without_queue(rows);
        let warps = u64::from(arch::blocks() * BLOCK_WARPS);
        let mut index = u64::from(arch::block() * BLOCK_WARPS + arch::thread() / 32);
        while index < rows.count {
            // Every lane loads the same id, so the branches below are uniform.
            let row = work.row(index, true);
            let mut is_wrong = row.code != code::OK;
            let mut at = u64::from(arch::lane()) * 8;
            while at < u64::from(rows.row_bytes) {
                // SAFETY: `at` is below the row's length, so the word is inside the output's row.
                let have = unsafe { arch::load_u64(rows.out + index * rows.out_stride + at) };
                is_wrong |= have != data_word(check.seed, (row.place.byte + at) / 8);
                at += 256;
            }
            if arch::ballot(arch::FULL, is_wrong) != 0 && arch::lane() == 0 {
                // SAFETY: the host vouches for the count; the addition is atomic.
                unsafe { arch::add(check.wrong as usize as *mut u64, 1) };
            }
            index += warps;
        }
    }
}
