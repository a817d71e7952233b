//! The kernel that writes rows, as a host thread: block after block, row after row.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::rows::{TURN, Thread, finish, ids, out};
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_gpu_kernel::rows::{BLOCK_WARPS, SCATTER_ROWS, Scatter, code, worst};
use std::collections::HashMap;

/// All blocks of a launch of `blocks` blocks.
pub fn scatter(scatter: &Scatter, blocks: u32) {
    let rows = &scatter.gather;
    let asked: Vec<i64> = ids(rows).collect();
    assert!(rows.ids == 0 || asked.len() as u64 <= SCATTER_ROWS);
    assert_eq!(u64::from(rows.row_bytes) % (1 << rows.block_shift), 0);
    let last: HashMap<i64, usize> = asked.iter().copied().zip(0..).collect();
    let (mut failed, mut first) = (0, 0);
    for block in 0..blocks {
        let _turn = TURN.lock();
        let mut thread = Thread::enter_to_write(rows);
        let lanes = (rows.lanes * BLOCK_WARPS) as usize;
        let chunks = asked.chunks(lanes).enumerate();
        for (chunk, asked) in chunks.skip(block as usize).step_by(blocks as usize) {
            for (lane, id) in asked.iter().enumerate() {
                let index = chunk * lanes + lane;
                thread.look();
                let code = match rows.place(*id) {
                    None => code::OUT_OF_RANGE,
                    Some(_) if thread.ends != code::OK => thread.ends,
                    Some(_) if last[id] != index => code::OK,
                    Some(place) => thread.write(place, out(rows, index), lane as u32),
                };
                if rows.status != 0 {
                    // SAFETY: the host gives a word for each row.
                    unsafe { *(rows.status as usize as *mut i32).add(index) = code };
                }
                if code != code::OK {
                    failed += 1;
                    first = worst(index as u64, None, code).max(first);
                }
            }
        }
        // SAFETY: the host gives the count.
        let written = unsafe { &*(scatter.written as usize as *const AtomicU32) };
        written.fetch_add(1, Order::Release, Scope::Gpu);
        thread.leave();
    }
    finish(rows, failed, first);
}
