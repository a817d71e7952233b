//! Asynchronous reads of a warp, one a lane: the lane submits the read into its slot, or into the warp's
//! ring, and waits for it; all lanes use the bytes in the slot.
//!
//! The order of calls: [`WarpReads::enter`]; [`WarpReads::ask`] for rows, then [`WarpReads::see`] for each of them;
//! [`WarpReads::leave`].
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::groups::{ApartLanes, GroupedThread, WholeBlock};
use crate::launch_end;
use crate::rows::{BLOCK_WARPS, GatherLaunch, RowBlocks, STATION_CELLS, WARP_BYTES, code};
use crate::station::{self, LOOK_SHIFT, NO_STATION};
use nvme_core::group::ThreadGroup;
use nvme_core::spec::{Iova, Lba, Nsid, nvm};
use nvme_core::{CommandData, CommandToken, MemberCommand, SharedQueue, WaitNeed};

/// A warp submits and waits together, so that it reads 32 completions at once.
const TOGETHER: GroupedThread<ApartLanes> = GroupedThread(ApartLanes);

/// The reads of a warp of a block of [`BLOCK_THREADS`](crate::rows::BLOCK_THREADS) threads, one a lane.
///
/// All threads of the block [enter](Self::enter) and [leave](Self::leave). In between all lanes of a warp
/// [ask](Self::ask) for rows together, and [see](Self::see) their ends one by one.
pub struct WarpReads<'r> {
    pub(crate) rows: &'r GatherLaunch,
    queue: Option<SharedQueue<'r>>,
    station: u32,
    /// Offset of the warp's slots in the slot memory.
    pub(crate) slots: u64,
    /// Code of the remaining rows, once the warp cannot continue.
    pub(crate) ends: i32,
    /// True if a read has not ended: the controller may still write to its slot.
    has_lost: bool,
    /// Time of the last look at the gate, in units of about a millisecond.
    looked: u32,
    /// Token of the lane's read in flight.
    token: [u32; 3],
    is_under_way: bool,
    /// Code of the lane's last read.
    code: i32,
}

impl<'r> WarpReads<'r> {
    /// Enters. Every thread of the block calls it. Waits while every station is taken.
    ///
    /// # Safety
    /// `rows` is the value that `nvme_host`'s `Table` returned for this launch.
    #[inline(always)]
    pub unsafe fn enter(rows: &'r GatherLaunch) -> Self {
        let block = WholeBlock::here();
        // SAFETY: this function's caller vouches for the words of the gate.
        let gate = unsafe { station::gate(rows) };
        let (mut station, mut ends) = (NO_STATION, code::OK);
        if block.leads() {
            ends = code::GONE;
            if let Some(gate) = &gate {
                station = station::claim(rows, gate);
                ends = match station {
                    NO_STATION => station::why_none(gate),
                    _ => code::OK,
                };
            }
        }
        let station = block.broadcast(station);
        // The same value for all threads, since warps branch on it together.
        let ends = block.broadcast(ends as u32) as i32;
        let warp = arch::thread() / 32;
        let queue = match station {
            NO_STATION => None,
            // SAFETY: the host vouches for the queues.
            _ => unsafe {
                rows.queues
                    .shared(station::queue_number(rows, station, warp))
            },
        };
        // Words of impossible sizes give no queue; the host writes none.
        let ends = match (&queue, ends) {
            (None, code::OK) => code::GONE,
            _ => ends,
        };
        Self {
            rows,
            queue,
            station,
            slots: (u64::from(station) * u64::from(BLOCK_WARPS) + u64::from(warp)) * WARP_BYTES,
            ends,
            has_lost: false,
            looked: now(),
            token: [0; 3],
            is_under_way: false,
            code: code::OK,
        }
    }

    /// Returns the reason why the warp reads nothing more, or [`code::OK`].
    #[inline(always)]
    pub fn rest(&self) -> i32 {
        self.ends
    }

    /// Returns the number of the warp among those of all stations, which no other warp has until the block
    /// leaves. Meaningless unless the warp reads.
    ///
    /// Kernels use it to find a table or buffer in memory that was allocated for each warp of each station.
    #[inline(always)]
    pub fn place(&self) -> u32 {
        let first = self.station.wrapping_mul(BLOCK_WARPS);
        first.wrapping_add(arch::thread() / 32)
    }

    /// Submits the read of row `id`, a valid row of the table, for each lane with `wants`. Rows fit into slots. Every
    /// lane of the warp calls it, and has seen the ends of all earlier reads.
    #[inline(always)]
    pub fn ask(&mut self, id: u32, wants: bool) {
        self.look();
        let mut place = None;
        if wants && self.ends == code::OK {
            place = self.rows.place(i64::from(id));
            self.code = code::OUT_OF_RANGE;
        }
        self.submit(place, self.slot(arch::lane()));
    }

    /// Returns the address of row `id`, which lane `of` has read.
    #[inline(always)]
    pub fn address(&self, of: u32, id: u32) -> u64 {
        let byte = self.rows.first_byte + u64::from(id) * u64::from(self.rows.row_bytes);
        let in_block = byte & ((1 << self.rows.block_shift) - 1);
        self.rows.slots + self.slot(of) + in_block
    }

    #[inline(always)]
    fn slot(&self, lane: u32) -> u64 {
        self.slots + u64::from(lane) * u64::from(self.rows.slot_bytes)
    }

    /// Waits for the read of lane `of` and returns its code.
    ///
    /// After 0 the bytes are visible to all lanes until that lane's next read. After a negative code the warp
    /// reads nothing more, and its station is kept if a read has not ended. Every lane of the warp calls it.
    #[inline(always)]
    pub fn see(&mut self, of: u32) -> i32 {
        let needs = arch::lane() == of || self.ends != code::OK;
        if arch::ballot(arch::FULL, self.is_under_way && needs) != 0 {
            self.wait(needs);
        }
        // The lane has seen the end of its read with acquire order; the barrier makes the controller's writes
        // visible to the other lanes.
        arch::sync_warp(arch::FULL);
        if self.ends != code::OK {
            self.has_lost |= arch::ballot(arch::FULL, self.code < 0) != 0;
            return self.ends;
        }
        let ended = arch::shuffle(arch::FULL, self.code as u32, of) as i32;
        if ended < 0 {
            self.has_lost = true;
            self.ends = code::NOT_RUN;
        }
        ended
    }

    /// Submits the reads of the lanes with a location, into `slot` of the slot memory. Every lane of the warp
    /// calls it.
    #[inline(always)]
    pub(crate) fn submit(&mut self, place: Option<RowBlocks>, slot: u64) {
        let wants = place.is_some() && self.ends == code::OK;
        let Some(queue) = self.queue.as_ref() else {
            return;
        };
        if arch::ballot(arch::FULL, wants) == 0 {
            return;
        }
        let (block, blocks) = place.map_or((0, 1), |place| (place.block, place.blocks));
        let rows = self.rows;
        let data = CommandData::Contiguous {
            iova: Iova(rows.slots_iova + slot),
            len: u64::from(blocks) << rows.block_shift,
        };
        let read = nvm::read(Nsid(rows.nsid), Lba(block), blocks);
        let command = MemberCommand::new(read, data, self.cell());
        let deadline_ns = arch::now_ns().saturating_add(rows.timeout_ns);
        let (token, why) = queue.submit_if(&TOGETHER, wants, command, deadline_ns);
        if wants {
            self.token = token.words();
            self.is_under_way = why.is_none();
            self.code = why.map_or(code::OK, station::code_of_refusal);
        }
    }

    /// Waits until the lanes with `needs` have the ends of their reads; the others take theirs if they are
    /// known. Every lane of the warp calls it.
    #[inline(always)]
    fn wait(&mut self, needs: bool) {
        let need = match (self.is_under_way, needs) {
            (false, _) => WaitNeed::Help,
            (true, false) => WaitNeed::Look,
            (true, true) => WaitNeed::End,
        };
        let deadline_ns = arch::now_ns().saturating_add(self.rows.timeout_ns);
        let Some(queue) = &self.queue else { return };
        let token = CommandToken::from_words(self.token);
        if let Some(ended) = queue.wait_together(&TOGETHER, &token, need, deadline_ns) {
            self.is_under_way = false;
            self.code = station::code_of_end(ended);
        }
    }

    /// Returns the result cell of the lane.
    #[inline(always)]
    fn cell(&self) -> u32 {
        self.station * STATION_CELLS + arch::thread()
    }

    /// Looks at the gate, unless that was recently. One lane looks for all, since loads of one host word by
    /// all warps are serialised on the bus.
    #[inline(always)]
    pub(crate) fn look(&mut self) {
        let now = now();
        if now == self.looked || self.ends != code::OK {
            return;
        }
        self.looked = now;
        let mut is_shut = false;
        if arch::lane() == 0 {
            // SAFETY: the host vouches for the words of the gate.
            let gate = unsafe { station::gate(self.rows) };
            is_shut = gate.is_none_or(|gate| gate.look().is_err());
        }
        arch::sync_warp(arch::FULL);
        if arch::shuffle(arch::FULL, u32::from(is_shut), 0) != 0 {
            self.ends = code::GONE;
        }
    }

    /// Leaves, when the warp's share of the launch is done: `failed` items of it failed, `worst` is the
    /// [word](crate::rows::worst) of the first of them, or 0. The last block reports to the host. Every
    /// thread of the block calls it.
    #[inline(always)]
    pub fn leave(self, failed: u64, worst: u64) {
        let (rows, block) = (self.rows, WholeBlock::here());
        // SAFETY: as in `look`.
        let gate = unsafe { station::gate(rows) };
        let reports = arch::lane() == 0 && launch_end::report(rows, failed, worst);
        let reports = block.vote(reports).total;
        if arch::lane() == 0
            && let Some(gate) = gate.as_ref().filter(|_| self.has_lost)
        {
            gate.report_trouble();
        }
        // Every warp has left its slots, and the barrier orders its writes before the leader's next steps.
        let keeps = block.vote(self.has_lost).total > 0;
        if block.leads() {
            if let Some(gate) = &gate {
                station::leave(rows, gate, self.station, keeps);
            }
            launch_end::end_block(rows, reports);
        }
    }
}

/// Returns the time of lane 0 in units of about a millisecond. Every lane of the warp calls it.
#[inline(always)]
fn now() -> u32 {
    arch::shuffle(arch::FULL, (arch::now_ns() >> LOOK_SHIFT) as u32, 0)
}
