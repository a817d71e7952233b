//! Code shared by launches that read or write rows of one drive: entry and exit of a block, ids, the merging
//! of neighbouring rows into one command, and counts of failed rows.
//!
//! The order of calls in a block: [`WarpContext::enter`]; chunks of rows, with [`look`] before each; [`leave`].
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::exchange::shuffle64;
use crate::gate::AdmissionGate;
use crate::groups::{GpuThread, WholeBlock};
use crate::launch_end;
use crate::rows::{BLOCK_WARPS, Batched, GatherLaunch, STATION_CELLS, WARP_BYTES, code, worst};
use crate::station::{self, LOOK_NS, NO_STATION};
use nvme_core::SharedQueue;
use nvme_core::group::{ExecContext, ThreadGroup};

/// A warp's share of its block's I/O context (station).
pub struct WarpContext<'r> {
    pub gate: AdmissionGate<'r>,
    pub station: u32,
    pub queue: Option<SharedQueue<'r>>,
    /// First result cell of the warp.
    pub cell: u32,
    /// Offset of the warp's slots in the slot memory.
    pub slots: u64,
    /// Code of the rows that the warp does not process: `OK` for a warp whose block has a station.
    pub ends: i32,
}

impl<'r> WarpContext<'r> {
    /// Takes a station for the block. Every thread of the block calls it.
    ///
    /// # Safety
    /// Every address in `rows` is valid as [`GatherLaunch`] documents; the queues exist on the controller and are
    /// shared.
    #[inline(always)]
    pub unsafe fn enter(rows: &'r GatherLaunch, block: &WholeBlock) -> Option<Self> {
        // SAFETY: this function's caller vouches for the words of the gate.
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
            // Without a station the cell is not used.
            cell: station.wrapping_mul(STATION_CELLS).wrapping_add(warp * 32),
            slots: (u64::from(station) * u64::from(BLOCK_WARPS) + u64::from(warp)) * WARP_BYTES,
            // A warp without a station only writes codes.
            ends: match station {
                NO_STATION => station::why_none(&gate),
                _ => code::OK,
            },
        })
    }
}

/// Ends the block: counts the failures of each warp, and frees the station, unless a warp `has_lost` a
/// command.
///
/// Every thread calls it; the leader calls `last` before that, when all warps have ended.
///
/// A station with a lost command stays taken until the host has recovered the controller, because the
/// controller may still write to the station's slots.
#[inline(always)]
pub fn leave(
    rows: &GatherLaunch,
    (gate, station): (&AdmissionGate<'_>, u32),
    block: &WholeBlock,
    (failed, has_lost): (&WarpFailures, bool),
    last: impl FnOnce(),
) {
    let reports = report(rows, block, (failed.rows, failed.worst));
    if arch::lane() == 0 && has_lost {
        gate.report_trouble();
    }
    // Every warp has left its slots, and the barrier orders its writes before the leader's next steps.
    let keeps = block.vote(has_lost).total > 0;
    if block.leads() {
        last();
        station::leave(rows, gate, station, keeps);
        launch_end::end_block(rows, reports);
    }
}

/// Adds the counts of the block's warps to the launch's; returns the number of warps that had failures. Every
/// thread of the block calls it.
#[inline(always)]
pub fn report(rows: &GatherLaunch, block: &WholeBlock, (failed, worst): (u64, u64)) -> u32 {
    let reports = arch::lane() == 0 && launch_end::report(rows, failed, worst);
    block.vote(reports).total
}

/// Looks at the gate, unless the last look was recent; returns the code of the remaining rows.
///
/// One lane looks for all, and not for each chunk, since loads of one host word by all warps are serialised
/// on the bus. Only lane 0 knows the result.
#[inline(always)]
pub fn look(gate: Option<AdmissionGate<'_>>, looked_ns: &mut u64, ends: i32) -> i32 {
    let now_ns = GpuThread.now_ns();
    if now_ns.wrapping_sub(*looked_ns) > LOOK_NS && ends == code::OK {
        *looked_ns = now_ns;
        let looks = arch::lane() == 0;
        if looks && gate.is_none_or(|gate| gate.look().is_err()) {
            return code::GONE;
        }
    }
    ends
}

/// Loads the id of row `index` of the launch.
///
/// # Safety
/// The launch has more than `index` ids.
#[inline(always)]
pub unsafe fn id(rows: &GatherLaunch, index: u64) -> i64 {
    // SAFETY: this function's caller vouches for the id.
    unsafe {
        match rows.wide_ids {
            _ if rows.ids == 0 => index as i64,
            0 => i64::from(arch::load_u32(rows.ids + index * 4) as i32),
            _ => arch::load_u64(rows.ids + index * 8) as i64,
        }
    }
}

/// Returns the first and the last lane of the command that includes this lane's row.
///
/// Neighbouring leading lanes with consecutive blocks share a command, at most `most` of them. The result is
/// meaningless for lanes that do not lead.
///
/// Merging saves commands and doorbells: a drive serves one read of several blocks faster than as many reads
/// of one block.
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
        // A command stays in one stripe, and a part of a row is always a separate read.
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

/// Failed rows of a warp. All lanes hold the same values.
#[derive(Default)]
pub struct WarpFailures {
    pub rows: u64,
    /// The failed row with the lowest number, with its member and code, as [`worst`] encodes them; 0 if no row failed.
    pub worst: u64,
}

impl WarpFailures {
    /// Records the end of the lane's row. Every lane of the warp calls it.
    #[inline(always)]
    pub fn note(
        &mut self,
        rows: &GatherLaunch,
        index: u64,
        is_live: bool,
        (member, code): (Option<u32>, i32),
    ) {
        if is_live && rows.status != 0 {
            // SAFETY: the host vouches for an `i32` for each row.
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

/// Loads the id of this thread's row of a block whose rows begin at row `first`; returns -1 if it has none.
#[inline(always)]
pub fn id_of_thread(batched: &Batched, first: u64) -> i64 {
    match row_of_thread(batched, first) {
        // SAFETY: the host gives `count` ids.
        (index, true) => unsafe { id(&batched.gather, index) },
        (_, false) => -1,
    }
}

/// Returns the number of this thread's row of a block whose rows begin at row `first`, and whether there is one.
#[inline(always)]
pub fn row_of_thread(batched: &Batched, first: u64) -> (u64, bool) {
    let index = first + u64::from(arch::thread());
    let is_live = arch::thread() < batched.rows_of_block && index < batched.gather.count;
    (index, is_live)
}
