//! Warps that read a range of bytes by themselves, in pieces, while they use those that have come.
//!
//! The slots of a warp have stages ([`Pieces`]); each is the business of one lane, which submits the stage's read and
//! waits for it. The bytes are used where they have landed, in memory of the host: they cross the GPU's link once.
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::groups::Block;
use crate::ring::{Pieces, Ring};
use crate::rows::{BLOCK_WARPS, Gather, STATION_CELLS, WARP_BYTES, code};
use crate::station::{self, LOOK_SHIFT, NO_STATION, Scattered};
use nvme_core::group::Group;
use nvme_core::spec::{Iova, Lba, Nsid, nvm};
use nvme_core::{Command, Data, SharedQueue, Token};

/// A warp of a block of [`BLOCK_THREADS`](crate::rows::BLOCK_THREADS) threads that reads a range in pieces.
///
/// All threads of the block [enter](Self::enter) and [leave](Self::leave). Between the two a warp asks for the
/// [pieces](Self::piece) of one range, by all of its lanes together.
pub struct Stream<'r> {
    rows: &'r Gather,
    queue: Option<SharedQueue<'r>>,
    station: u32,
    /// Where the warp's slots begin in the slot memory.
    slots: u64,
    /// What is left gets, once the warp cannot go on.
    ends: i32,
    /// A read has no end: the controller may still write to its slot.
    has_lost: bool,
    /// When the gate was looked at last, in units of about a millisecond.
    looked: u32,
    /// Pieces below this one were submitted, or never will be.
    fetched: u64,
    /// The read of the lane's stage that is under way.
    token: [u32; 3],
    is_under_way: bool,
    /// How the last read of the lane's stage ended.
    code: i32,
}

impl<'r> Stream<'r> {
    /// Every thread of the block calls it. Waits while as many blocks as there are stations are inside.
    ///
    /// # Safety
    /// `rows` is what `nvme_host`'s `Table::stream_on_gpu` gave for this launch.
    #[inline(always)]
    pub unsafe fn enter(rows: &'r Gather) -> Self {
        let block = Block::here();
        // SAFETY: the caller's.
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
        // The same for all: warps act on it together.
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
        // Words that are impossible are no queue; the host gives none such.
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
            fetched: 0,
            token: [0; 3],
            is_under_way: false,
            code: code::OK,
        }
    }

    /// The pieces that are asked for from now on are others, numbered anew. All of those before were asked for.
    #[inline(always)]
    pub fn begin(&mut self) {
        self.fetched = 0;
    }

    /// Reads on, and waits for piece `number`: the warp asks for all of `pieces` one by one, and has used those
    /// before. How the read of the piece ended: its bytes lie at their [addresses](Self::address) after 0, until the next
    /// call. After less than 0 there are no more pieces. Every lane of the warp calls it.
    #[inline(always)]
    pub fn piece(&mut self, pieces: &impl Pieces, number: u64) -> i32 {
        self.look();
        let (lane, stages) = (arch::lane(), pieces.stages());
        let next = pieces.next_at(lane, number);
        let is_new = lane < stages && next >= self.fetched && next <= pieces.last();
        if is_new && self.ends == code::OK {
            self.submit(pieces, next);
        }
        self.fetched = number + u64::from(stages);
        arch::sync_warp(arch::FULL);
        // A warp that the host wants to leave waits for all that is under way.
        let waits = lane == pieces.stage(number) || self.ends != code::OK;
        if self.is_under_way && waits {
            self.wait();
        }
        // The lane has seen its read's end: what the controller wrote is there for all.
        arch::sync_warp(arch::FULL);
        if self.ends != code::OK {
            self.has_lost |= arch::ballot(arch::FULL, self.code < 0) != 0;
            return self.ends;
        }
        let ended = arch::shuffle(arch::FULL, self.code as u32, pieces.stage(number)) as i32;
        if ended < 0 {
            self.has_lost = true;
            self.ends = code::NOT_RUN;
        }
        ended
    }

    /// What the rest of the range gets after a piece that ended below 0.
    #[inline(always)]
    pub fn rest(&self) -> i32 {
        self.ends
    }

    /// Where a byte of a [`Ring`] lies that has landed.
    #[inline(always)]
    pub fn address(&self, byte: u64) -> u64 {
        self.rows.slots + self.slots + Ring::place(byte)
    }

    /// Where piece `number` lies, which has landed and begins with a block.
    #[inline(always)]
    pub fn address_of(&self, pieces: &impl Pieces, number: u64) -> u64 {
        self.rows.slots + self.slots + pieces.slot(number, pieces.piece(number).0)
    }

    /// The read of piece `number` into the stage of this lane, whose bytes the warp has used.
    #[inline(always)]
    fn submit(&mut self, pieces: &impl Pieces, number: u64) {
        let rows = self.rows;
        let (begin, end) = pieces.piece(number);
        let place = rows.blocks_of(begin, (end - begin) as u32);
        let slot = self.slots + pieces.slot(number, place.block << rows.block_shift);
        let data = Data::Contiguous {
            iova: Iova(rows.slots_iova + slot),
            len: u64::from(place.blocks) << rows.block_shift,
        };
        let read = nvm::read(Nsid(rows.nsid), Lba(place.block), place.blocks);
        let command = Command::new(read, data, self.cell());
        let deadline_ns = arch::now_ns().saturating_add(rows.timeout_ns);
        let Some(queue) = &self.queue else { return };
        match queue.submit(&Scattered, command, deadline_ns) {
            Ok(token) => {
                self.token = token.words();
                self.is_under_way = true;
            }
            Err(error) => self.code = station::code_of_refusal(error),
        }
    }

    #[inline(always)]
    fn wait(&mut self) {
        self.is_under_way = false;
        let deadline_ns = arch::now_ns().saturating_add(self.rows.timeout_ns);
        let Some(queue) = &self.queue else { return };
        let ended = queue.wait(&Scattered, Token::from_words(self.token), deadline_ns);
        self.code = station::code_of_end(ended.map_err(|(why, _)| why));
    }

    /// The cell of the lane's stage.
    #[inline(always)]
    fn cell(&self) -> u32 {
        self.station * STATION_CELLS + arch::thread()
    }

    /// Looks at the gate, if that was long ago. One lane looks for all: reads of one word of the host by all warps
    /// follow one another.
    #[inline(always)]
    fn look(&mut self) {
        let now = now();
        if now == self.looked || self.ends != code::OK {
            return;
        }
        self.looked = now;
        let mut is_shut = false;
        if arch::lane() == 0 {
            // SAFETY: the host gives the words of a gate.
            let gate = unsafe { station::gate(self.rows) };
            is_shut = gate.is_none_or(|gate| gate.look().is_err());
        }
        arch::sync_warp(arch::FULL);
        if arch::shuffle(arch::FULL, u32::from(is_shut), 0) != 0 {
            self.ends = code::GONE;
        }
    }

    /// The warp's share of the launch is done: `failed` rows were not computed, `worst` is the
    /// [word](crate::rows::worst) of the first of them, or 0. The last block tells the host. Every thread of the block
    /// calls it.
    #[inline(always)]
    pub fn leave(self, failed: u64, worst: u64) {
        let (rows, block) = (self.rows, Block::here());
        // SAFETY: as in `look`.
        let gate = unsafe { station::gate(rows) };
        if arch::lane() == 0 {
            station::report(rows, failed, worst);
            if let Some(gate) = gate.as_ref().filter(|_| self.has_lost) {
                gate.report_trouble();
            }
        }
        // Every warp has left its slots, and its writes are ordered before what the leader does.
        let keeps = block.vote(self.has_lost).total > 0;
        if block.leads() {
            if let Some(gate) = &gate {
                station::leave(rows, gate, self.station, keeps);
            }
            station::end_block(rows);
        }
    }
}

/// The time of lane 0 in units of about a millisecond. Every lane of the warp calls it.
#[inline(always)]
fn now() -> u32 {
    arch::shuffle(arch::FULL, (arch::now_ns() >> LOOK_SHIFT) as u32, 0)
}
