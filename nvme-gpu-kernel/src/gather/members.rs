//! Drives in stripes: which of them a row lies on, and how a block of threads holds queues and slots of all of them.
//!
//! A block has one station, whose slots and place at the gate each member has besides. A warp that cannot go on with a
//! member leaves it, and goes on with the others: its rows of that member say why. A block leaves a member's gate with
//! the last of its warps that does, so that a recovery waits for no rows of others.
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::groups::{Acting, Few};
use crate::rows::{BLOCK_WARPS, MEMBERS, Member, Striped, code};
use crate::station::{self, NO_STATION};
use nvme_core::SharedQueue;
use nvme_core::gate::{Gate, Party, words};
use nvme_core::spec::{Iova, Lba, Nsid, nvm};
use nvme_core::stripes::{Spot, Stripes};
use nvme_core::sync::AtomicU32;
use nvme_core::{Command, Data};

/// The members as a warp has them. All lanes have the same words.
pub struct Members<'r> {
    rows: &'r Striped,
    stripes: Stripes,
    station: u32,
    /// A bit for each that the warp has not left.
    inside: u32,
    /// A bit for each of which a read has no end: the controller may still write to its slots.
    lost: u32,
}

/// The way of a lane to the blocks of its row.
pub struct Way<'r> {
    of: &'r Member,
    queue: SharedQueue<'r>,
    spot: Spot,
}

impl<'r> Members<'r> {
    /// What [`enter`] gave.
    #[inline(always)]
    pub fn new(rows: &'r Striped, stripes: Stripes, station: u32, inside: u32) -> Self {
        Self {
            rows,
            stripes,
            station,
            inside: if station == NO_STATION { 0 } else { inside },
            lost: 0,
        }
    }

    /// Where the first byte of `block` lies.
    #[inline(always)]
    pub fn spot(&self, block: u64) -> Spot {
        let shift = self.rows.gather.block_shift;
        self.stripes.spot(block << shift)
    }

    /// The slot memory of `member`.
    #[inline(always)]
    pub fn slots(&self, index: u32) -> u64 {
        member(self.rows, index).map_or(0, |member| member.slots)
    }

    /// Whether the warp has left all members: their memory may be gone.
    #[inline(always)]
    pub fn is_alone(&self) -> bool {
        self.inside == 0
    }

    /// Why rows of a member are not read that the warp has left.
    #[inline(always)]
    pub fn refusal(&self, member: u32) -> i32 {
        match self.lost >> member & 1 {
            0 => code::GONE,
            _ => code::NOT_RUN,
        }
    }

    /// The way to the blocks at `spot`; not once the warp [is alone](Self::is_alone). For every lane alike: what is
    /// worked out for some of them only takes twice the registers.
    #[inline(always)]
    pub fn way(&self, spot: Spot) -> Way<'r> {
        let warp = arch::thread() / 32;
        // Of a member that was left nothing is touched.
        let index = match self.inside >> spot.member & 1 {
            0 => self.inside.trailing_zeros(),
            _ => spot.member,
        };
        // SAFETY: a spot is of a member, and so is a bit.
        let of = unsafe { &*members(self.rows).add(index as usize) };
        let number = station::number(&of.queues, self.station, warp);
        // SAFETY: the host vouches for the queues, which are shared.
        let Some(queue) = (unsafe { of.queues.shared(number) }) else {
            // The host gives no words that are impossible.
            arch::trap()
        };
        Way { of, queue, spot }
    }

    /// Reads `blocks` blocks that lie in one stripe to `slot`, counted in bytes of the slot memory, and waits for that.
    #[inline(always)]
    pub fn read_blocks(&self, way: &Way<'r>, blocks: u32, slot: u64, cell: u32) -> i32 {
        let Way { of, queue, spot } = way;
        if self.inside >> spot.member & 1 == 0 {
            return self.refusal(spot.member);
        }
        let rows = &self.rows.gather;
        let bytes = u64::from(blocks) << rows.block_shift;
        let read = || {
            let first = Lba(spot.offset >> of.block_shift);
            let count = (bytes >> of.block_shift) as u32;
            let data = Data::Contiguous {
                iova: Iova(of.slots_iova + slot),
                len: bytes,
            };
            Command::new(nvm::read(Nsid(of.nsid), first, count), data, cell)
        };
        station::run(&Acting(Few), queue, read, rows.timeout_ns)
    }

    /// Leaves the members that the host recovers, or has closed. Every lane of the warp calls it.
    #[inline(always)]
    pub fn look(&mut self) {
        let mine = self.inside >> arch::lane() & 1 == 1;
        let is_shut = mine
            && member(self.rows, arch::lane())
                .and_then(|of| gate(self.rows, of))
                .is_none_or(|gate| gate.look().is_err());
        let shut = arch::ballot(arch::FULL, is_shut);
        self.part(shut, false);
    }

    /// Leaves the members `member` of the lanes of which a read `is_lost`. Every lane of the warp calls it.
    #[inline(always)]
    pub fn lose(&mut self, is_lost: bool, member: u32) {
        let mut left = arch::ballot(arch::FULL, is_lost);
        let mut lost = 0;
        while left != 0 {
            let lane = left.trailing_zeros();
            left &= left - 1;
            lost |= 1 << (arch::shuffle(arch::FULL, member, lane) & 31);
        }
        let lost = lost & self.inside;
        self.lost |= lost;
        self.part(lost, true);
    }

    /// Leaves all that are left. Every lane of the warp calls it.
    #[inline(always)]
    pub fn leave(&mut self) {
        self.part(self.inside, false);
    }

    #[inline(always)]
    fn part(&mut self, from: u32, lost: bool) {
        if from == 0 {
            return;
        }
        self.inside &= !from;
        // All lanes have read what they need of the slots.
        arch::sync_warp(arch::FULL);
        if from >> arch::lane() & 1 == 1
            && let Some(of) = member(self.rows, arch::lane())
            && let Some(party) = party(self.rows, of, self.station)
        {
            if lost {
                party.gate.report_trouble();
            }
            party.leave(1, lost);
        }
        arch::sync_warp(arch::FULL);
    }
}

/// Takes a station for the block and passes the gates of the members with it: the station, and the members whose gate
/// let it pass. Without a station: those whose gate is open. Every lane of one warp of the block calls it.
#[inline(always)]
pub fn enter(rows: &Striped) -> (u32, u32) {
    let lane = arch::lane();
    let of = member(rows, lane);
    let mut station = NO_STATION;
    if lane == 0 {
        let is_shut = || {
            let mut index = 0;
            while index < rows.member_count {
                if is_open(rows, index) {
                    return false;
                }
                index += 1;
            }
            true
        };
        station = station::claim_by(&rows.gather, |_| true, is_shut);
    }
    arch::sync_warp(arch::FULL);
    let station = arch::shuffle(arch::FULL, station, 0);
    let passed = match (station, of) {
        (NO_STATION, _) => is_open(rows, lane),
        (_, None) => false,
        (_, Some(of)) => party(rows, of, station).is_some_and(|party| party.enter(BLOCK_WARPS)),
    };
    arch::sync_warp(arch::FULL);
    (station, arch::ballot(arch::FULL, passed))
}

/// The member of lane or number `index`.
#[inline(always)]
fn member(rows: &Striped, index: u32) -> Option<&Member> {
    if index >= rows.member_count || index >= MEMBERS {
        return None;
    }
    // SAFETY: the host gives as many, which nothing changes.
    Some(unsafe { &*members(rows).add(index as usize) })
}

#[inline(always)]
fn members(rows: &Striped) -> *const Member {
    rows.members as usize as *const Member
}

#[inline(always)]
fn gate<'r>(rows: &Striped, of: &Member) -> Option<Gate<'r>> {
    let stations = rows.gather.station_count;
    let gate = of.gate as usize as *const AtomicU32;
    // SAFETY: the host gives the words of a gate for as many stations; they are atomics.
    Gate::new(unsafe { core::slice::from_raw_parts(gate, words(stations)) })
}

#[inline(always)]
fn is_open(rows: &Striped, index: u32) -> bool {
    let gate = member(rows, index).and_then(|of| gate(rows, of));
    gate.is_some_and(|gate| gate.look().is_ok())
}

#[inline(always)]
fn party<'r>(rows: &Striped, of: &'r Member, station: u32) -> Option<Party<'r>> {
    let words = of.stations as usize as *const AtomicU32;
    Some(Party {
        // SAFETY: the host gives a word for each station.
        word: unsafe { &*words.add(station as usize) },
        gate: gate(rows, of)?,
        station,
    })
}
