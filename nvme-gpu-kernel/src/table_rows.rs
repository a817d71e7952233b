//! `table.row(id)`: rows that a thread of any kernel reads by ids that it has just computed.
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::groups::WholeBlock;
use crate::rows::{BLOCK_WARPS, GatherLaunch, STATION_BYTES, STATION_CELLS, code};
use crate::station::{self, LOOK_SHIFT, NO_STATION};
use nvme_core::SharedQueue;
use nvme_core::group::ThreadGroup;

/// A block of threads that reads rows of a table.
///
/// All threads of the block [enter](Self::enter), any of them [read rows](Self::row) at any time, also from
/// divergent code, and all of them [leave](Self::leave). While a thread waits for its row it drains
/// completions for others.
///
/// Each thread has one slot, so a row stays valid only until the thread's next call; a kernel that needs two
/// rows at once copies the first.
pub struct TableRows<'r> {
    rows: &'r GatherLaunch,
    queue: Option<SharedQueue<'r>>,
    here: RowsCursor,
}

/// State of a thread between two calls.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct RowsCursor {
    pub station: u32,
    /// Code of further rows, once the thread cannot continue.
    pub ends: i32,
    /// Not 0 if a read has not ended: the controller may still write to its slot.
    pub has_lost: u32,
    /// Time of the last look at the gate, in units of about a millisecond.
    pub looked: u32,
}

#[inline(always)]
fn now() -> u32 {
    (arch::now_ns() >> LOOK_SHIFT) as u32
}

impl RowsCursor {
    /// Enters. Every thread of the block calls it.
    #[inline(always)]
    pub unsafe fn enter(rows: &GatherLaunch) -> Self {
        let block = WholeBlock::here();
        // SAFETY: this function's caller vouches for the words of the gate.
        let gate = unsafe { station::gate(rows) };
        let mut station = NO_STATION;
        if block.leads()
            && let Some(gate) = &gate
        {
            station = station::claim(rows, gate);
        }
        let station = block.broadcast(station);
        let ends = match (station, &gate) {
            (NO_STATION, Some(gate)) => station::why_none(gate),
            (NO_STATION, None) => code::GONE,
            _ if arch::thread() >= rows.threads() => code::NOT_RUN,
            _ => code::OK,
        };
        Self {
            station,
            ends,
            has_lost: 0,
            looked: now(),
        }
    }

    /// Returns the thread's queue.
    ///
    /// # Safety
    /// The host vouches for the queues.
    #[inline(always)]
    pub unsafe fn queue<'r>(&self, rows: &GatherLaunch) -> Option<SharedQueue<'r>> {
        if self.station == NO_STATION {
            return None;
        }
        let warp = arch::thread() / 32 % BLOCK_WARPS;
        let number = station::queue_number(rows, self.station, warp);
        // SAFETY: this function's caller vouches for the queues.
        unsafe { rows.queues.shared(number) }
    }

    /// Looks at the gate, unless that was recently. One of the lanes that run together looks for all, since
    /// loads of one host word by all warps are serialised on the bus.
    #[inline(always)]
    fn look(&mut self, rows: &GatherLaunch) {
        let now = now();
        if now == self.looked {
            return;
        }
        self.looked = now;
        let mask = arch::active();
        let first = mask.trailing_zeros();
        let mut is_shut = false;
        if arch::lane() == first {
            // SAFETY: the host vouches for the words of the gate.
            let gate = unsafe { station::gate(rows) };
            is_shut = gate.is_none_or(|gate| gate.look().is_err());
        }
        let is_shut = arch::shuffle(mask, u32::from(is_shut), first) != 0;
        if self.ends == code::OK && is_shut {
            self.ends = code::GONE;
        }
    }

    /// Reads row `id`; returns its address, or the code of the failure.
    #[inline(always)]
    pub fn row(
        &mut self,
        rows: &GatherLaunch,
        queue: Option<&SharedQueue<'_>>,
        id: i64,
    ) -> Result<u64, i32> {
        let Some(place) = rows.place(id) else {
            return Err(code::OUT_OF_RANGE);
        };
        self.look(rows);
        let Some(queue) = queue.filter(|_| self.ends == code::OK) else {
            return Err(self.ends);
        };
        let slot = u64::from(self.station) * STATION_BYTES
            + u64::from(arch::thread()) * u64::from(rows.slot_bytes);
        let cell = self.station * STATION_CELLS + arch::thread();
        let ended = station::read_blocks(rows, queue, (place.block, place.blocks), slot, cell);
        if ended == code::TIMED_OUT || ended == code::GONE {
            self.has_lost = 1;
            self.ends = code::NOT_RUN;
        }
        match ended {
            code::OK => Ok(rows.slots + slot + (place.byte - (place.block << rows.block_shift))),
            other => Err(other),
        }
    }

    /// Leaves. Every thread of the block calls it, after its last row was used.
    #[inline(always)]
    pub fn leave(self, rows: &GatherLaunch) {
        let block = WholeBlock::here();
        // SAFETY: as in `row`.
        let gate = unsafe { station::gate(rows) };
        let Some(gate) = gate else { return };
        if self.has_lost != 0 {
            gate.report_trouble();
        }
        let keeps = block.vote(self.has_lost != 0).total > 0;
        if block.leads() {
            station::leave(rows, &gate, self.station, keeps);
        }
    }
}

impl<'r> TableRows<'r> {
    /// Enters: takes a station for the block. Waits while every station is taken. Every thread of the block
    /// calls it; the block has whole warps, and [`GatherLaunch::threads`] threads at most.
    ///
    /// # Safety
    /// `rows` is the value that `nvme_host`'s `Table::device_rows` returned; its store is open or was closed
    /// since.
    #[inline(always)]
    pub unsafe fn enter(rows: &'r GatherLaunch) -> Self {
        // SAFETY: this function's caller vouches for `rows`.
        let here = unsafe { RowsCursor::enter(rows) };
        // SAFETY: as above.
        let queue = unsafe { here.queue(rows) };
        Self { rows, queue, here }
    }

    /// Reads row `id` and returns the address of its bytes, in host memory: load each once, with volatile
    /// loads. They stay until the thread's next call. Any thread calls it.
    ///
    /// # Errors
    /// The [`code`] of the failure, or the status that the controller returned (SCT << 8 | SC).
    #[inline(always)]
    pub fn row(&mut self, id: i64) -> Result<u64, i32> {
        self.here.row(self.rows, self.queue.as_ref(), id)
    }

    /// Leaves, so that other blocks can read rows. Every thread of the block calls it.
    #[inline(always)]
    pub fn leave(self) {
        self.here.leave(self.rows);
    }
}
