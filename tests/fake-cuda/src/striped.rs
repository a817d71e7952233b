//! The kernel that gathers rows of drives in stripes, as a host thread: block after block, row after row.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::rows::{TURN, clear, finish, ids, out, owner, queue, run_command};
use nvme_core::gate::{Gate, Party, words};
use nvme_core::spec::{Iova, Lba, Nsid, nvm};
use nvme_core::stripes::Stripes;
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_core::{Command, Data};
use nvme_gpu_kernel::rows::{
    BLOCK_WARPS, Gather, Member, STATION_BYTES, STATION_CELLS, Striped, code, worst,
};

/// All blocks of a launch of `blocks` blocks.
pub fn gather(striped: &Striped, blocks: u32) {
    let rows = &striped.gather;
    let asked: Vec<i64> = ids(rows).collect();
    let (mut failed, mut first) = (0, 0);
    for block in 0..blocks {
        let _turn = TURN.lock();
        let mut here = Block::enter(striped);
        let lanes = (rows.lanes * BLOCK_WARPS) as usize;
        let chunks = asked.chunks(lanes).enumerate();
        for (chunk, asked) in chunks.skip(block as usize).step_by(blocks as usize) {
            for (lane, id) in asked.iter().enumerate() {
                let index = chunk * lanes + lane;
                let (member, code) = here.row(index, *id, lane as u32);
                if rows.status != 0 {
                    // SAFETY: the host gives a word for each row.
                    unsafe { *(rows.status as usize as *mut i32).add(index) = code };
                }
                if code != code::OK {
                    clear(rows, index);
                    failed += 1;
                    first = worst(index as u64, member, code).max(first);
                }
            }
        }
        here.leave();
    }
    finish(rows, failed, first);
}

/// A member as a block has it.
struct Its<'r> {
    member: &'r Member,
    party: Party<'r>,
    is_inside: bool,
    has_lost: bool,
}

struct Block<'r> {
    rows: &'r Gather,
    stripes: Stripes,
    station: Option<u32>,
    members: Vec<Its<'r>>,
}

impl<'r> Block<'r> {
    fn enter(striped: &'r Striped) -> Self {
        let rows = &striped.gather;
        let free = |station: &u32| {
            let owner = owner(rows, *station);
            owner.compare_exchange(0, 1, Order::Acquire, Scope::Gpu) == 0
        };
        let station = (0..rows.station_count).find(free);
        let its = |index: u32| {
            // SAFETY: the host gives as many members, and the words of each.
            let (member, gate, word) = unsafe {
                let member = &*(striped.members as usize as *const Member).add(index as usize);
                let gate = member.gate as usize as *const AtomicU32;
                let gate = std::slice::from_raw_parts(gate, words(rows.station_count));
                let word = member.stations as usize as *const AtomicU32;
                (member, gate, &*word.add(station.unwrap_or(0) as usize))
            };
            let party = Party {
                word,
                gate: Gate::new(gate).expect("words of a gate"),
                station: station.unwrap_or(0),
            };
            Its {
                member,
                is_inside: station.is_some() && party.enter(1),
                party,
                has_lost: false,
            }
        };
        Self {
            rows,
            stripes: Stripes::shifted(striped.stripe_shift, striped.member_count).expect("stripes"),
            station,
            members: (0..striped.member_count).map(its).collect(),
        }
    }

    /// Reads one row part by part: the member that failed it, and its code.
    fn row(&mut self, index: usize, id: i64, lane: u32) -> (Option<u32>, i32) {
        for its in self.members.iter_mut().filter(|its| its.is_inside) {
            if its.party.gate.look().is_err() {
                its.party.leave(1, false);
                its.is_inside = false;
            }
        }
        let rows = self.rows;
        let Some(place) = rows.place(id) else {
            return (None, code::OUT_OF_RANGE);
        };
        let end = place.byte + u64::from(rows.row_bytes);
        let end_block = place.block + u64::from(place.blocks);
        let (mut byte, mut block) = (place.byte, place.block);
        while byte < end {
            let spot = self.stripes.spot(block << rows.block_shift);
            let until = end_block.min(block + (spot.room >> rows.block_shift));
            let its = &mut self.members[spot.member as usize];
            let ended = match (self.station, its.is_inside, its.has_lost) {
                (None, ..) => code::NOT_RUN,
                (_, false, true) => code::NOT_RUN,
                (_, false, false) => code::GONE,
                (Some(station), true, _) => {
                    let bytes = (until - block) << rows.block_shift;
                    let slot = slot(rows, station, lane);
                    let ended = read(rows, its, (spot.offset, bytes), slot, station, lane);
                    if ended == code::TIMED_OUT || ended == code::GONE {
                        its.has_lost = true;
                        its.is_inside = false;
                        its.party.gate.report_trouble();
                        its.party.leave(1, true);
                    }
                    ended
                }
            };
            if ended != code::OK {
                return (Some(spot.member), ended);
            }
            let until_byte = end.min(until << rows.block_shift);
            let slot = slot(rows, self.station.unwrap_or(0), lane);
            let from = its.member.slots + slot + (byte - (block << rows.block_shift));
            // SAFETY: the part's bytes in the slot, and its place in the output.
            unsafe {
                let to = out(rows, index).add((byte - place.byte) as usize);
                (from as usize as *const u8).copy_to(to, (until_byte - byte) as usize);
            }
            (block, byte) = (until, until_byte);
        }
        (None, code::OK)
    }

    fn leave(self) {
        for its in self.members.iter().filter(|its| its.is_inside) {
            its.party.leave(1, false);
        }
        if let Some(station) = self.station {
            owner(self.rows, station).store(0, Order::Release, Scope::Gpu);
        }
    }
}

fn slot(rows: &Gather, station: u32, lane: u32) -> u64 {
    u64::from(station) * STATION_BYTES + u64::from(lane) * u64::from(rows.slot_bytes)
}

fn read(
    rows: &Gather,
    its: &Its<'_>,
    (offset, bytes): (u64, u64),
    slot: u64,
    station: u32,
    lane: u32,
) -> i32 {
    let of = its.member;
    let data = Data::Contiguous {
        iova: Iova(of.slots_iova + slot),
        len: bytes,
    };
    let first = Lba(offset >> of.block_shift);
    let sqe = nvm::read(Nsid(of.nsid), first, (bytes >> of.block_shift) as u32);
    let command = || Command::new(sqe, data, station * STATION_CELLS + lane);
    run_command(&queue(&of.queues, station), command, rows.timeout_ns)
}
