//! A warp that gathers rows, 32 ids in one chunk.
//!
//! Each lane finds its row's blocks. Lanes with the same first block share one read, and reads of
//! neighbouring blocks by neighbouring lanes become one command, into the adjacent slots of those lanes. When
//! the reads have ended, the warp copies the rows from the slots to the output. A read that failed for
//! several rows is repeated for each of them, so that a row fails only for its own blocks. A row that crosses from one
//! stripe of several drives to the next, or from one range of its table to the next, is read alone, part by part.
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::failed::clear;
use super::map::{OneRange, RowMap};
use super::members::{BlockAccess, StripeMembers};
use super::row::{GatherRow, RangeSource};
use crate::arch;
use crate::copy;
use crate::exchange::{exchanged64, of_lane64, shuffle64};
use crate::gate::AdmissionGate;
use crate::groups::GpuThread;
use crate::launch::{self, WarpFailures};
use crate::row_cache::{PinnedLine, RowCache};
use crate::rows::{
    CacheWords, GatherLaunch, RANGES, RangePiece, RangeSplit, RangesLaunch, RowBlocks, code,
};
use crate::station::{self, LOOK_NS};
use core::mem::offset_of;
use nvme_core::SharedQueue;
use nvme_core::group::ExecContext;

/// The cache of a launch's rows.
pub struct CacheOf<'r> {
    pub cache: RowCache<'r>,
    /// Epoch at the start of the launch: lines from before the last write are stale.
    pub epoch: u64,
    pub data: u64,
    pub line_bytes: u32,
    /// Words of the launch.
    pub words: CacheWords,
    /// Number of rows that the warp found, the same in each lane.
    pub hits: u32,
}

impl CacheOf<'_> {
    #[inline(always)]
    fn at(&self, line: PinnedLine) -> u64 {
        self.data + u64::from(line.index()) * u64::from(self.line_bytes)
    }
}

/// A warp of a gather.
pub struct GatherWarp<'r, 'q, M: RowMap> {
    pub rows: &'r GatherLaunch,
    pub gate: Option<AdmissionGate<'r>>,
    pub queue: Option<SharedQueue<'q>>,
    pub cache: Option<CacheOf<'r>>,
    /// Ranges instead of a table: the rows are their pieces.
    pub ranges: Option<(RangeSplit, RangeSource)>,
    /// The place of the table.
    pub map: M,
    /// Number of requested rows.
    pub count: u64,
    /// Members of a striped launch, which replace gate and queue.
    pub members: Option<StripeMembers<'r>>,
    /// First result cell of the warp.
    pub cell: u32,
    /// Offset of the warp's slots in the slot memory.
    pub slots: u64,
    /// Code of the remaining rows, once the warp cannot continue.
    pub ends: i32,
    /// True if a read has not ended: the controller may still write to its slots.
    pub has_lost: bool,
    pub failed: WarpFailures,
}

impl<'r> GatherWarp<'r, '_, OneRange> {
    /// Makes a warp that only copies rows.
    #[inline(always)]
    pub fn without_queue(rows: &'r GatherLaunch) -> Self {
        Self {
            rows,
            gate: None,
            queue: None,
            cache: None,
            ranges: None,
            map: OneRange,
            count: rows.count,
            members: None,
            cell: 0,
            slots: 0,
            ends: code::OK,
            has_lost: false,
            failed: WarpFailures::default(),
        }
    }
}

impl<'r, M: RowMap> GatherWarp<'r, '_, M> {
    /// Gathers all chunks of the warp, each as many rows as the warp has slots. The chunks are interleaved
    /// between warps.
    #[inline(always)]
    pub fn gather_all(&mut self, first: u32, step: u32) {
        let lanes = u64::from(self.rows.lanes.clamp(1, 32));
        let chunks = self.count.div_ceil(lanes);
        let mut chunk = u64::from(first);
        // The block has passed the gate just now, which counts as a look.
        let mut looked_ns = GpuThread.now_ns();
        while chunk < chunks {
            let index = chunk * lanes + u64::from(arch::lane());
            self.look(&mut looked_ns);
            self.gather_chunk(index);
            chunk += u64::from(step);
        }
    }

    /// Looks at the gates when it is time, and leaves those that are shut; `looked_ns` is the time of the last look. Every
    /// lane calls it.
    #[inline(always)]
    fn look(&mut self, looked_ns: &mut u64) {
        if let Some(members) = &mut self.members {
            // Like `launch::look`, once for all members.
            let now_ns = GpuThread.now_ns();
            // Lane 0 decides for all, since lanes may have read the clock at different moments
            // and must look together. Lanes that decided differently would meet at different
            // barriers.
            if shuffle64(now_ns.wrapping_sub(*looked_ns), 0) > LOOK_NS {
                *looked_ns = now_ns;
                members.look();
            }
        } else {
            self.ends = launch::look(self.gate, looked_ns, self.ends);
        }
        self.ends = arch::shuffle(arch::FULL, self.ends as u32, 0) as i32;
    }

    #[inline(always)]
    fn gather_chunk(&mut self, index: u64) {
        let is_live = index < self.count && arch::lane() < self.rows.lanes;
        let (piece, mut row) = match self.ranges {
            Some(ranges) => {
                let (piece, row) = self.piece(ranges, index, is_live);
                (Some(piece), row)
            }
            None => (None, self.row(index, is_live)),
        };
        let (mut wants, mut together) = (row.code == code::OK, true);
        if self.ends == code::OK {
            let (hit, is_hit) = self.find(&mut row, wants);
            wants &= !is_hit;
            let is_cut = wants && self.cut(&mut row);
            loop {
                if self.is_alone() {
                    self.refuse(&mut row, wants);
                    break;
                }
                let is_shared = self.read(&mut row, piece, wants, is_cut, together);
                let is_read = wants && row.code == code::OK;
                // A part is not a row of the cache.
                let filled = self.fill(&mut row, is_read && !is_cut);
                let copies = wants && !is_cut || together && is_hit;
                let copies = copies && row.code == code::OK;
                match piece {
                    Some(piece) => self.copy_piece(piece, row.from, copies),
                    None => self.copy(index, &row, copies),
                }
                self.publish(&row, filled);
                let is_part = wants && is_cut && row.code == code::OK;
                let goes_on = self.next_part(index, &mut row, is_part);
                // A read that failed for several rows is repeated for each of them, now that the
                // other rows are copied. Only rows that need the failed block then fail, and the
                // others keep their bytes.
                wants &= is_shared && row.code > 0;
                if wants && self.ends != code::OK {
                    // The rows for which it failed are no longer determined.
                    row.code = self.ends;
                }
                wants |= goes_on;
                if self.ends != code::OK || arch::ballot(arch::FULL, wants) == 0 {
                    break;
                }
                together = false;
            }
            self.release(hit);
        } else if wants {
            row.code = self.ends;
        }
        let is_bad = is_live && row.code != code::OK;
        match piece {
            Some(piece) => self.clear_pieces(piece, is_bad),
            None => clear(self.rows, index, is_bad),
        }
        let became = (row.member, row.code);
        self.failed.note(self.rows, index, is_live, became);
    }

    /// Tests if a line of the cache holds the lane's row, which then comes from there. Of the lanes with the
    /// same row one gets the line, pinned.
    #[inline(always)]
    fn find(&mut self, row: &mut GatherRow<M>, wants: bool) -> (Option<PinnedLine>, bool) {
        let Some(of) = &mut self.cache else {
            return (None, false);
        };
        let leader = leader_of(row.id, wants);
        let line = match wants && leader == arch::lane() {
            true => of.cache.find(row.id, of.epoch),
            false => None,
        };
        let at = shuffle64(line.map_or(0, |line| of.at(line)), leader);
        let is_hit = wants && at != 0;
        if is_hit {
            row.from = at;
        }
        of.hits += arch::ballot(arch::FULL, is_hit).count_ones();
        (line, is_hit)
    }

    /// Copies rows that were `read` from the slots to lines of the cache, of lanes with the same row once, and
    /// returns the lane's line, claimed. The output then comes from the line.
    ///
    /// The line must not be filled from the output: that is the caller's memory, which another launch may
    /// write meanwhile, and a later gather would return its bytes for this row. Since the output comes from
    /// the line, the slots, which may be in host memory, are read once.
    #[inline(always)]
    fn fill(&self, row: &mut GatherRow<M>, read: bool) -> Option<PinnedLine> {
        let of = self.cache.as_ref()?;
        let leads = leader_of(row.id, read) == arch::lane();
        let claimed = match read && leads {
            true => of.cache.claim(row.id, of.epoch, arch::now_ns() as u32 >> 5),
            false => None,
        };
        let wanted = arch::ballot(arch::FULL, claimed.is_some());
        if wanted == 0 {
            return None;
        }
        let line = claimed.map_or(0, |line| of.at(line));
        let lines = exchanged64(line);
        let to = |lane| of_lane64(&lines, lane);
        copy::rows_of_slots(self.shape(), row.from, to, wanted);
        if claimed.is_some() {
            row.from = line;
        }
        claimed
    }

    /// Makes the lane's line a hit for its row, once nothing of this warp reads it any more.
    #[inline(always)]
    fn publish(&self, row: &GatherRow<M>, filled: Option<PinnedLine>) {
        if let (Some(of), Some(line)) = (&self.cache, filled) {
            of.cache.publish(line, row.id, of.epoch);
        }
    }

    /// Unpins the line that a row came from.
    #[inline(always)]
    fn release(&self, hit: Option<PinnedLine>) {
        if let (Some(of), Some(line)) = (&self.cache, hit) {
            of.cache.release(line);
        }
    }

    /// Returns the row that this lane gathers.
    #[inline(always)]
    pub fn row(&self, index: u64, is_live: bool) -> GatherRow<M> {
        let rows = self.rows;
        let mut id = -1;
        if is_live {
            // SAFETY: the host vouches for `count` ids, and a live lane's index is below it.
            id = unsafe { launch::id(rows, index) };
        }
        let nowhere = RowBlocks {
            byte: 0,
            block: 0,
            blocks: 0,
        };
        // SAFETY: the host vouches for the extents.
        let span = unsafe { self.map.span(rows, (id, 0)) };
        GatherRow {
            id: id as u64,
            part: M::part(0, span.map_or(rows.row_bytes, |span| span.bytes)),
            place: span.map_or(nowhere, |span| span.place),
            from: 0,
            code: match span {
                Some(_) => code::OK,
                None => code::OUT_OF_RANGE,
            },
            member: None,
        }
    }

    /// Returns the piece of a range that this lane reads, and its location.
    #[inline(always)]
    fn piece(
        &self,
        (split, source): (RangeSplit, RangeSource),
        index: u64,
        is_live: bool,
    ) -> (RangePiece, GatherRow<M>) {
        let index_of_all = index.min(self.count - 1);
        // Computed by every lane: lanes past the end get the last piece.
        let piece = match source {
            RangeSource::Parameter => split.piece(index_of_all, RANGES as u32, |at| {
                // SAFETY: only `nvme_read_ranges` passes this source, and the offset is inside its parameter.
                unsafe { arch::word_of_ranges(offset_of!(RangesLaunch, ranges) as u32 + at) }
            }),
            RangeSource::Memory(ranges) => split.piece(index_of_all, split.range_count, |at| {
                // SAFETY: a word of one of the ranges, for which the host vouches.
                unsafe { *((ranges + u64::from(at)) as usize as *const u64) }
            }),
        };
        let row = GatherRow {
            id: index,
            part: M::part(0, piece.bytes),
            place: self.rows.blocks_of(piece.byte, piece.bytes),
            from: 0,
            code: match is_live && piece.bytes != 0 {
                true => code::OK,
                false => code::OUT_OF_RANGE,
            },
            member: None,
        };
        (piece, row)
    }

    /// Reads the rows of the lanes with `wants` into the slots, and sets the address of their bytes or the
    /// code of the failure; returns true if the row shares its read with another row. A row that `is_cut` is
    /// read alone.
    #[inline(always)]
    fn read(
        &mut self,
        row: &mut GatherRow<M>,
        piece: Option<RangePiece>,
        wants: bool,
        is_cut: bool,
        together: bool,
    ) -> bool {
        let lane = arch::lane();
        // Among lanes with the same first block the lowest reads for all, one more block if a row of theirs
        // ends there. Pieces of ranges share no block.
        let is_alike = together && !is_cut && piece.is_none();
        let shares = wants && is_alike;
        let key = match shares {
            true => row.place.block,
            false => 1 << 63 | u64::from(lane),
        };
        let peers = arch::same(arch::FULL, key);
        let least = self.least_blocks();
        let longer = arch::ballot(arch::FULL, wants && row.place.blocks > least);
        let blocks = match is_alike {
            true => least + u32::from(longer & peers != 0),
            false => row.place.blocks,
        };
        let leader = peers.trailing_zeros();
        let leads = wants && leader == lane;
        let spot = self.members.as_ref().map(|of| of.spot(row.place.block));
        // Ranges may overlap, so a command reads pieces of one range only.
        let stripe = match piece {
            Some(piece) => Some((u64::from(piece.range), false)),
            None if M::IS_MAP && spot.is_none() => Some((0, is_cut)),
            None => spot.map(|spot| (spot.stripe, is_cut)),
        };
        let most = self.rows.run_rows;
        let (head, last) = launch::run_of(most, (row.place.block, blocks), stripe, leads, together);
        let first_block = shuffle64(row.place.block, head);
        let end = shuffle64(row.place.block + u64::from(blocks), last);
        let way = self
            .members
            .as_ref()
            .zip(spot)
            .map(|(of, spot)| of.way(spot));
        let mut ended = code::OK;
        if leads && head == lane {
            let blocks = (end - row.place.block) as u32;
            ended = self.read_blocks(way, row.place.block, blocks);
        }
        arch::sync_warp(arch::FULL);
        // The leader passes the location of its command to the lanes that it reads for.
        let head = arch::shuffle(arch::FULL, head, leader);
        let first_block_of_run = shuffle64(first_block, leader);
        let result = arch::shuffle(arch::FULL, ended as u32, head) as i32;
        let alone = arch::shuffle(arch::FULL, u32::from(last == lane), head) == 1
            && peers.is_power_of_two();
        let member = spot.map(|spot| spot.member);
        if wants {
            row.code = result;
            row.member = member;
            let at = row
                .place
                .byte
                .wrapping_sub(first_block_of_run << self.rows.block_shift);
            row.from = self.slots_of(member) + self.slot(head) + at;
        }
        self.note_lost(wants, result, member);
        wants && !alone
    }

    /// Records a command that has not ended, which keeps its slots: the warp uses none of its slots from now
    /// on; for striped members, none of that member's.
    #[inline(always)]
    fn note_lost(&mut self, wants: bool, result: i32, member: Option<u32>) {
        let is_lost = result == code::TIMED_OUT || result == code::GONE;
        if let (Some(members), Some(member)) = (&mut self.members, member) {
            members.lose(wants && is_lost, member);
        } else if arch::ballot(arch::FULL, is_lost) != 0 {
            self.has_lost = true;
            self.ends = code::NOT_RUN;
        }
    }

    /// True if no striped member is left.
    #[inline(always)]
    fn is_alone(&self) -> bool {
        self.members.as_ref().is_some_and(StripeMembers::is_alone)
    }

    /// Fails a row for a member that the warp has left.
    #[inline(always)]
    fn refuse(&self, row: &mut GatherRow<M>, wants: bool) {
        if let Some(members) = self.members.as_ref().filter(|_| wants) {
            let member = members.spot(row.place.block).member;
            row.code = members.refusal(member);
            row.member = Some(member);
        }
    }

    /// Returns the address of the slot memory that a row of `member` passes through.
    #[inline(always)]
    fn slots_of(&self, member: Option<u32>) -> u64 {
        match (&self.members, member) {
            (Some(members), Some(member)) => members.slots(member),
            _ => self.rows.slots,
        }
    }

    /// Cuts a row, or the rest of one, to its part in the first stripe; returns true for a row that is read in parts.
    #[inline(always)]
    fn cut(&self, row: &mut GatherRow<M>) -> bool {
        let part = M::numbers(row.part);
        let is_part = part.is_some_and(|(_, bytes)| bytes != self.rows.row_bytes);
        let Some(members) = &self.members else {
            return is_part;
        };
        let (shift, place) = (self.rows.block_shift, &mut row.place);
        let room = members.spot(place.block).room >> shift;
        let is_longer = room < u64::from(place.blocks);
        if is_longer {
            place.blocks = room as u32;
            if let Some((done, _)) = part {
                let end_byte = place.block.wrapping_add(room) << shift;
                row.part = M::part(done, end_byte.wrapping_sub(place.byte) as u32);
            }
        }
        is_longer || is_part
    }

    /// Copies the parts that were read of rows over two stripes, and continues with their second parts;
    /// returns true if the lane has one.
    #[inline(always)]
    fn next_part(&self, index: u64, row: &mut GatherRow<M>, is_there: bool) -> bool {
        let wanted = arch::ballot(arch::FULL, is_there);
        if self.members.is_none() && !M::IS_MAP || wanted == 0 {
            return false;
        }
        if let Some(part) = M::numbers(row.part) {
            return self.next_span(index, (row, part), (is_there, wanted));
        }
        let (rows, shift) = (self.rows, self.rows.block_shift);
        // Every lane runs this code, since the lanes exchange addresses. Lanes without a row use their own
        // location, which no other lane asks for.
        let whole = rows.place(row.id as i64).unwrap_or(row.place);
        let border = row.place.block + u64::from(row.place.blocks);
        let end_byte = whole.byte + u64::from(rows.row_bytes);
        let until = end_byte.min(border << shift);
        let to = rows.out + index * rows.out_stride + row.place.byte.wrapping_sub(whole.byte);
        let bytes = until.wrapping_sub(row.place.byte);
        let unit = |_| rows.unit_shift;
        copy::parts(self.shape(), row.from, to, bytes, wanted, unit);
        let left = (whole.block + u64::from(whole.blocks)).wrapping_sub(border);
        // Other lanes may read their row again, alone.
        if is_there {
            row.place = RowBlocks {
                byte: until,
                block: border,
                blocks: left as u32,
            };
        }
        is_there && left != 0
    }

    /// The same for rows of a table in several ranges, of which the lanes of `wanted` have read the parts.
    #[inline(always)]
    fn next_span(
        &self,
        index: u64,
        (row, (done, bytes)): (&mut GatherRow<M>, (u32, u32)),
        (is_there, wanted): (bool, u32),
    ) -> bool {
        let rows = self.rows;
        // Every lane runs this code, since the lanes exchange addresses.
        let to = rows.out + index * rows.out_stride + u64::from(done);
        let unit = |_| rows.unit_shift;
        copy::parts(self.shape(), row.from, to, bytes.into(), wanted, unit);
        let done = done + bytes;
        if !is_there || done >= rows.row_bytes {
            return false;
        }
        // SAFETY: the host vouches for the extents. Other lanes may read their row again, alone.
        if let Some(span) = unsafe { self.map.span(rows, (row.id as i64, done)) } {
            (row.part, row.place) = (M::part(done, span.bytes), span.place);
            self.cut(row);
        }
        true
    }

    /// Returns the number of blocks of a row that begins at a block.
    #[inline(always)]
    fn least_blocks(&self) -> u32 {
        ((self.rows.row_bytes - 1) >> self.rows.block_shift) + 1
    }

    /// Returns the offset of the slot of `lane` in the slot memory.
    #[inline(always)]
    fn slot(&self, lane: u32) -> u64 {
        self.slots + u64::from(lane) * u64::from(self.rows.slot_bytes)
    }

    /// Reads `blocks` blocks from `block` on into the slots from this lane's on, and waits for the end.
    #[inline(always)]
    fn read_blocks(&self, way: Option<BlockAccess<'r>>, block: u64, blocks: u32) -> i32 {
        let (slot, cell) = (self.slot(arch::lane()), self.cell + arch::lane());
        if let (Some(members), Some(way)) = (&self.members, &way) {
            return members.read_blocks(way, blocks, slot, cell);
        }
        let Some(queue) = &self.queue else {
            return code::GONE;
        };
        station::read_blocks(self.rows, queue, (block, blocks), slot, cell)
    }
}

/// Returns the lowest of the lanes that want the same row. Every lane of the warp calls it.
#[inline(always)]
pub(super) fn leader_of(id: u64, wants: bool) -> u32 {
    let key = match wants {
        true => id,
        false => 1 << 63 | u64::from(arch::lane()),
    };
    arch::same(arch::FULL, key).trailing_zeros()
}

// Behind the functions above: the compiler inlines in the order of declarations, and the PTX follows it.
mod listed;
mod output;
