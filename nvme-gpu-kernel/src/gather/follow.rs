//! Pointer chases through a table: walks from row to row, by ids that the rows hold.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::copy;
use crate::launch::{self, WarpFailures};
use crate::reads::WarpReads;
use crate::rows::{BLOCK_WARPS, FollowLaunch, code};

entry! {
    /// Walks. Blocks of [`BLOCK_THREADS`](crate::rows::BLOCK_THREADS) threads; any number of blocks. Each
    /// lane has one walk; the lanes of a warp read at the same time, and copy their rows together.
    ///
    /// # Safety
    /// Every address in `follow` is valid as [`FollowLaunch`] documents; the queues exist on the controller and are
    /// shared.
    pub unsafe fn nvme_follow_rows(follow: FollowLaunch) {
        let rows = &follow.gather;
        // SAFETY: the host vouches for every address in the launch, as under `# Safety`.
        let mut reads = unsafe { WarpReads::enter(rows) };
        let mut failed = WarpFailures::default();
        let (lane, lanes) = (arch::lane(), rows.lanes.clamp(1, 32));
        let mut chunk = u64::from(arch::block() * BLOCK_WARPS + arch::thread() / 32);
        while chunk < rows.count.div_ceil(u64::from(lanes)) {
            let walk = chunk * u64::from(lanes) + u64::from(lane);
            let is_live = walk < rows.count && lane < lanes;
            let (mut id, mut became) = (-1, reads.rest());
            if is_live {
                // SAFETY: the host vouches for `count` ids, and `walk` is below it.
                id = unsafe { launch::id(rows, walk) };
            }
            let mut hop = 0;
            while hop < follow.hops {
                if became == code::OK && rows.place(id).is_none() {
                    became = code::OUT_OF_RANGE;
                }
                let wants = is_live && became == code::OK;
                let wanted = arch::ballot(arch::FULL, wants);
                if wanted == 0 {
                    break;
                }
                reads.ask(id as u32, wants);
                let mut left = wanted;
                while left != 0 {
                    let of = left.trailing_zeros();
                    left &= left - 1;
                    let ended = reads.see(of);
                    if of == lane {
                        became = ended;
                    }
                }
                let is_there = wants && became == code::OK;
                let from = reads.address(lane, id as u32);
                let mut word = 0;
                if is_there {
                    // SAFETY: the row is in the lane's slot, and its read has ended, so nothing writes to it.
                    word = unsafe { arch::load_u64(from) };
                }
                let first = chunk * u64::from(lanes);
                let to = |lane: u32| {
                    let walk = first + u64::from(lane);
                    rows.out + (walk * u64::from(follow.hops) + u64::from(hop)) * rows.out_stride
                };
                let copied = arch::ballot(arch::FULL, is_there);
                copy::rows(copy::CopyShape::of(rows), from, to, copied);
                if is_there {
                    id = word.checked_rem(rows.rows).unwrap_or(0) as i64;
                }
                hop += 1;
            }
            if is_live {
                // SAFETY: the host vouches for a word for each walk; only this lane writes it.
                unsafe { arch::store_u64(follow.ends + walk * 8, id as u64) };
            }
            failed.note(rows, walk, is_live, (None, became));
            chunk += u64::from(arch::blocks() * BLOCK_WARPS);
        }
        reads.leave(failed.rows, failed.worst);
    }
}
