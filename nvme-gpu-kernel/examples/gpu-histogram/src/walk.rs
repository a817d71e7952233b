//! The second kernel: each thread walks from row to row of a table, by ids that only the row before it holds.
// UNSAFETY: the kernel's argument holds addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::Walk;
use nvme_gpu_kernel::{TableRows, arch};

/// Walks `walk.steps` rows from `walk.starts` on: the first word of a row names the next row. The last row's
/// id, or the error code of a failed read minus 2^32, is stored in `walk.ends`. One walk a thread; blocks of
/// whole warps.
///
/// # Safety
/// Every address in `walk` is valid as [`Walk`] documents.
#[cfg(target_arch = "nvptx64")]
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn walk(walk: Walk) {
    // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
    unsafe { run(&walk) };
}

/// Runs one thread of the kernel `walk`; on the host, one lane of a test.
///
/// # Safety
/// Every address in `walk` is valid as [`Walk`] documents.
#[inline(always)]
pub unsafe fn run(walk: &Walk) {
    let index = arch::block() * arch::block_threads() + arch::thread();
    // SAFETY: the host vouches for the table, as `Walk::table` documents.
    let mut table = unsafe { TableRows::enter(&walk.table) };
    if index < walk.walks {
        let at = u64::from(index) * 8;
        // SAFETY: one of `walks` ids for which the host vouches.
        let mut id = unsafe { ((walk.starts + at) as usize as *const i64).read_volatile() };
        let mut step = 0;
        while step < walk.steps {
            step += 1;
            id = match table.row(id) {
                Ok(row) => {
                    // SAFETY: a row has 8 bytes at least and is aligned to 8; it stays until the next `row`
                    // call.
                    let word = unsafe { (row as usize as *const u64).read_volatile() };
                    word.checked_rem(walk.table.rows).unwrap_or(0) as i64
                }
                Err(code) => {
                    id = i64::from(code) - (1 << 32);
                    break;
                }
            };
        }
        // SAFETY: one of `walks` words for which the host vouches; only this thread writes it.
        unsafe { ((walk.ends + at) as usize as *mut i64).write(id) };
    }
    table.leave();
}
