//! A second kernel: each thread walks from row to row of a table, by ids that only the row before it holds.
// UNSAFETY: the kernel's argument holds addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::Walk;
use nvme_gpu_kernel::{TableRows, arch};

/// Walks `walk.steps` rows from `walk.starts` on: the first word of a row names the next one. The last one's id goes
/// to `walk.ends`, or the code of why a row was not read, less 2^32. One walk a thread; blocks of whole warps.
///
/// # Safety
/// Every address in `walk` is what [`Walk`] says.
#[cfg(target_arch = "nvptx64")]
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn walk(walk: Walk) {
    // SAFETY: the caller's.
    unsafe { run(&walk) };
}

/// What each thread of the kernel `walk` does; on the host, what each lane of a test does.
///
/// # Safety
/// Every address in `walk` is what [`Walk`] says.
#[inline(always)]
pub unsafe fn run(walk: &Walk) {
    let index = arch::block() * arch::block_threads() + arch::thread();
    // SAFETY: the host gave it for this table.
    let mut table = unsafe { TableRows::enter(&walk.table) };
    if index < walk.walks {
        let at = u64::from(index) * 8;
        // SAFETY: one of `walks` ids.
        let mut id = unsafe { ((walk.starts + at) as usize as *const i64).read_volatile() };
        let mut step = 0;
        while step < walk.steps {
            step += 1;
            id = match table.row(id) {
                Ok(row) => {
                    // SAFETY: the row has 8 bytes at least, aligned to 8.
                    let word = unsafe { (row as usize as *const u64).read_volatile() };
                    word.checked_rem(walk.table.rows).unwrap_or(0) as i64
                }
                Err(code) => {
                    id = i64::from(code) - (1 << 32);
                    break;
                }
            };
        }
        // SAFETY: one of `walks` places.
        unsafe { ((walk.ends + at) as usize as *mut i64).write(id) };
    }
    table.leave();
}
