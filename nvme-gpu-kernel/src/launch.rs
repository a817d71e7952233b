//! What launches over rows of one drive share, whether they read or write: a block's way in and out, ids, reads or
//! writes that become one command, and counts of rows that failed.
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::exchange::shuffle64;
use crate::groups::{Block, Gpu};
use crate::launch_end;
use crate::rows::{BLOCK_WARPS, Gather, STATION_CELLS, WARP_BYTES, code, worst};
use crate::station::{self, LOOK_NS, NO_STATION};
use nvme_core::SharedQueue;
use nvme_core::gate::Gate;
use nvme_core::group::{ExecContext, Group};

/// What a warp of a block has of the block's station.
pub struct Inside<'r> {
    pub gate: Gate<'r>,
    pub station: u32,
    pub queue: Option<SharedQueue<'r>>,
    /// Its first result cell.
    pub cell: u32,
    /// Where its slots begin in the slot memory.
    pub slots: u64,
    /// What its rows get that are left: `OK` for a warp that has a station.
    pub ends: i32,
}

impl<'r> Inside<'r> {
    /// Takes a station for the block. Every thread of it calls this.
    ///
    /// # Safety
    /// Every address in `rows` is what [`Gather`] says; the queues exist on the controller and are shared.
    #[inline(always)]
    pub unsafe fn enter(rows: &'r Gather, block: &Block) -> Option<Self> {
        // SAFETY: the caller's.
        let gate = (unsafe { station::gate(rows) })?;
        let mut station = NO_STATION;
        if block.leads() {
            station = station::claim(rows, &gate);
        }
        let station = block.broadcast(station);
        let warp = arch::thread() / 32;
        let number = station::queue_number(rows, station, warp);
        Some(Self {
            gate,
            station,
            queue: match station {
                NO_STATION => None,
                // SAFETY: the host vouches for the queues.
                _ => unsafe { rows.queues.shared(number) },
            },
            // Without a station it means nothing.
            cell: station.wrapping_mul(STATION_CELLS).wrapping_add(warp * 32),
            slots: (u64::from(station) * u64::from(BLOCK_WARPS) + u64::from(warp)) * WARP_BYTES,
            // A warp without a station writes codes alone.
            ends: match station {
                NO_STATION => station::why_none(&gate),
                _ => code::OK,
            },
        })
    }
}

/// The block has ended: counts what `failed` of each warp, and gives the station back, unless a warp `has_lost` a command.
/// Every thread calls it; one of them does `last` before, when all warps have ended.
#[inline(always)]
pub fn leave(
    rows: &Gather,
    (gate, station): (&Gate<'_>, u32),
    block: &Block,
    (failed, has_lost): (&Failed, bool),
    last: impl FnOnce(),
) {
    let reports = report(rows, block, (failed.rows, failed.worst));
    if arch::lane() == 0 && has_lost {
        gate.report_trouble();
    }
    // Every warp has left its slots, and its writes are ordered before what the leader does.
    let keeps = block.vote(has_lost).total > 0;
    if block.leads() {
        last();
        station::leave(rows, gate, station, keeps);
        launch_end::end_block(rows, reports);
    }
}

/// Adds the counts of the block's warps to the launch's: how many of them had any. Every thread of the block calls it.
#[inline(always)]
pub fn report(rows: &Gather, block: &Block, (failed, worst): (u64, u64)) -> u32 {
    let reports = arch::lane() == 0 && launch_end::report(rows, failed, worst);
    block.vote(reports).total
}

/// Looks at the gate, if that was long ago: what the rows get that are left. One lane looks for all, and not for each
/// chunk: reads of one word of the host by all warps follow one another. Only lane 0 knows the answer.
#[inline(always)]
pub fn look(gate: Option<Gate<'_>>, looked_ns: &mut u64, ends: i32) -> i32 {
    let now_ns = Gpu.now_ns();
    if now_ns.wrapping_sub(*looked_ns) > LOOK_NS && ends == code::OK {
        *looked_ns = now_ns;
        let looks = arch::lane() == 0;
        if looks && gate.is_none_or(|gate| gate.look().is_err()) {
            return code::GONE;
        }
    }
    ends
}

/// The id of row `index` of the launch.
///
/// # Safety
/// There are more ids.
#[inline(always)]
pub unsafe fn id(rows: &Gather, index: u64) -> i64 {
    // SAFETY: the caller's.
    unsafe {
        match rows.wide_ids {
            _ if rows.ids == 0 => index as i64,
            0 => i64::from(arch::load_u32(rows.ids + index * 4) as i32),
            _ => arch::load_u64(rows.ids + index * 8) as i64,
        }
    }
}

/// The lanes at which the run of this lane's command begins and ends: commands for blocks that follow on each other, by
/// leading lanes that follow on each other, `most` of them. Means nothing for lanes that do not lead.
#[inline(always)]
pub fn run_of(
    most: u32,
    (block, blocks): (u64, u32),
    stripe: Option<(u64, bool)>,
    leads: bool,
    together: bool,
) -> (u32, u32) {
    let lane = arch::lane();
    let leaders = arch::ballot(arch::FULL, leads);
    if !together {
        return (lane, lane);
    }
    let below = leaders & arch::lanes_below();
    let before = 31 - (below | 1).leading_zeros();
    let from = shuffle64(block, before);
    let to = shuffle64(block + u64::from(blocks), before);
    let mut follows = leads && below != 0 && block >= from && block <= to;
    if let Some((stripe, is_cut)) = stripe {
        // A command stays in one stripe; a part of a row is a read of its own.
        let stripe_before = shuffle64(stripe, before);
        let cut = arch::ballot(arch::FULL, is_cut);
        follows &= stripe == stripe_before && (cut >> lane | cut >> before) & 1 == 0;
    }
    let heads = arch::ballot(arch::FULL, leads && !follows);
    let up_to_me = arch::lanes_below() | 1 << lane;
    let head = 31 - (heads & up_to_me | 1).leading_zeros();
    let number = (below >> head).count_ones();
    let cuts = leads && number.checked_rem(most).unwrap_or(0) == 0;
    let heads = heads | arch::ballot(arch::FULL, cuts);
    let head = 31 - (heads & up_to_me | 1).leading_zeros();
    let next = heads & !up_to_me;
    let mine = leaders & (next & next.wrapping_neg()).wrapping_sub(1);
    (head, 31 - (mine | 1).leading_zeros())
}

/// Rows of a warp that failed. All lanes have the same words.
#[derive(Default)]
pub struct Failed {
    pub rows: u64,
    /// [`worst`] of the first of them.
    pub worst: u64,
}

impl Failed {
    /// Notes what became of the lane's row. Every lane of the warp calls it.
    #[inline(always)]
    pub fn note(
        &mut self,
        rows: &Gather,
        index: u64,
        is_live: bool,
        (member, code): (Option<u32>, i32),
    ) {
        if is_live && rows.status != 0 {
            // SAFETY: the host gives an `i32` for each row.
            unsafe { arch::store_u32(rows.status + index * 4, code as u32) };
        }
        let failed = arch::ballot(arch::FULL, is_live && code != code::OK);
        if failed == 0 {
            return;
        }
        self.rows += u64::from(failed.count_ones());
        let lane = failed.trailing_zeros();
        let word = shuffle64(worst(index, member, code), lane);
        if word > self.worst {
            self.worst = word;
        }
    }
}
