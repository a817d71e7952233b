//! Striped drives: the member that holds a row's blocks, and the queues and slots of all members for a block
//! of threads.
//!
//! A block has one station, and with it slots and a place at the gate of every member; a block that owns its queue uses
//! one member alone. A warp that cannot continue with a member leaves it, and continues with the others; its rows of
//! that member get the reason. A block leaves a member's gate when its last warp leaves the member, so that a recovery
//! of one drive does not wait for rows of the others.
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::gate::{AdmissionGate, GateReference, words};
use crate::groups::{AnyLanes, GroupedThread};
use crate::rows::{BLOCK_WARPS, GatherLaunch, MEMBERS, StripedGather, StripedMember, code};
use crate::station::{self, NO_STATION};
use nvme_core::SharedQueue;
use nvme_core::spec::{Iova, Lba, Nsid, nvm};
use nvme_core::stripes::{StripeLayout, StripeLocation};
use nvme_core::sync::AtomicU32;
use nvme_core::{CommandData, MemberCommand};

/// A warp's view of the members. All lanes hold the same values.
pub struct StripeMembers<'r> {
    rows: &'r StripedGather,
    stripes: StripeLayout,
    station: u32,
    /// A bit for each member that the warp has not left.
    inside: u32,
    /// A bit for each member with a read that has not ended: the controller may still write to its
    /// slots. Its station is not free until that member's controller was reset.
    lost: u32,
}

/// The access of a lane to the blocks of its row: member, queue and location.
pub struct BlockAccess<'r> {
    of: &'r StripedMember,
    queue: SharedQueue<'r>,
    spot: StripeLocation,
}

impl<'r> StripeMembers<'r> {
    /// Makes the view from the results of [`enter`].
    #[inline(always)]
    pub fn new(rows: &'r StripedGather, stripes: StripeLayout, station: u32, inside: u32) -> Self {
        Self {
            rows,
            stripes,
            station,
            inside: if station == NO_STATION { 0 } else { inside },
            lost: 0,
        }
    }

    /// Returns the location of the first byte of `block`.
    #[inline(always)]
    pub fn spot(&self, block: u64) -> StripeLocation {
        let shift = self.rows.gather.block_shift;
        self.stripes.spot(block << shift)
    }

    /// Returns the address of the slot memory of a member.
    #[inline(always)]
    pub fn slots(&self, index: u32) -> u64 {
        member(self.rows, index).map_or(0, |member| member.slots)
    }

    /// True if the warp has left all members: their memory may be gone.
    #[inline(always)]
    pub fn is_alone(&self) -> bool {
        self.inside == 0
    }

    /// Returns the code of rows of a member that the warp has left.
    #[inline(always)]
    pub fn refusal(&self, member: u32) -> i32 {
        match self.lost >> member & 1 {
            0 => code::GONE,
            _ => code::NOT_RUN,
        }
    }

    /// Returns the access to the blocks at `spot`; not once the warp [is alone](Self::is_alone). Computed by
    /// every lane: code that runs for some lanes only takes twice the registers.
    #[inline(always)]
    pub fn way(&self, spot: StripeLocation) -> BlockAccess<'r> {
        let warp = arch::thread() / 32;
        // Nothing of a member that was left is touched; another one takes its place, and the result
        // is not used. Every lane needs a valid index here, since all lanes go through the same
        // code.
        let index = match self.inside >> spot.member & 1 {
            0 => self.inside.trailing_zeros(),
            _ => spot.member,
        };
        // SAFETY: the member of a location and a set bit of `inside` are both below the number of members, for which
        // the host vouches.
        let of = unsafe { &*members(self.rows).add(index as usize) };
        let number = station::number(&of.queues, self.station, warp);
        // SAFETY: the host vouches for the queues, which any threads may use.
        let Some(queue) = (unsafe { of.queues.shared(number) }) else {
            // The host writes no words of impossible sizes.
            arch::trap()
        };
        BlockAccess { of, queue, spot }
    }

    /// Reads `blocks` blocks of one stripe into `slot`, an offset in the slot memory, and waits for the end.
    #[inline(always)]
    pub fn read_blocks(&self, way: &BlockAccess<'r>, blocks: u32, slot: u64, cell: u32) -> i32 {
        let BlockAccess { of, queue, spot } = way;
        if self.inside >> spot.member & 1 == 0 {
            return self.refusal(spot.member);
        }
        let rows = &self.rows.gather;
        let bytes = u64::from(blocks) << rows.block_shift;
        let read = || {
            let first = Lba(spot.offset >> of.block_shift);
            let count = (bytes >> of.block_shift) as u32;
            let data = CommandData::Contiguous {
                iova: Iova(of.slots_iova + slot),
                len: bytes,
            };
            MemberCommand::new(nvm::read(Nsid(of.nsid), first, count), data, cell)
        };
        station::run(&GroupedThread(AnyLanes), queue, read, rows.timeout_ns)
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

    /// Leaves the members of lanes with a read that `is_lost`. Every lane of the warp calls it.
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

    /// Leaves all remaining members. Every lane of the warp calls it.
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
        // A barrier: all lanes have loaded what they need from the slots.
        arch::sync_warp(arch::FULL);
        if from >> arch::lane() & 1 == 1
            && let Some(of) = member(self.rows, arch::lane())
            && let Some(party) = party_at(self.rows, of, self.station)
        {
            if lost {
                party.gate.report_trouble();
            }
            party.leave(1, lost);
        }
        arch::sync_warp(arch::FULL);
    }
}

/// Takes a station for the block and passes the gates of the members with it; returns the station, and the
/// members whose gate admitted it. Without a station it returns the members whose gate is open. Every lane of
/// one warp of the block calls it.
#[inline(always)]
pub fn enter(rows: &StripedGather) -> (u32, u32) {
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
        station = station::claim_by((&rows.gather, rows.gather.station_count), |_| true, is_shut);
    }
    arch::sync_warp(arch::FULL);
    let station = arch::shuffle(arch::FULL, station, 0);
    let passed = match (station, of) {
        (NO_STATION, _) => is_open(rows, lane),
        (_, None) => false,
        (_, Some(of)) => party_at(rows, of, station).is_some_and(|party| party.enter(BLOCK_WARPS)),
    };
    arch::sync_warp(arch::FULL);
    (station, arch::ballot(arch::FULL, passed))
}

/// Takes one of the first `count` stations for a block that uses member `of` alone, and passes its gate.
#[inline(always)]
pub fn claim(
    rows: &StripedGather,
    (of, count): (&StripedMember, u32),
    gate: &AdmissionGate<'_>,
) -> u32 {
    let enter = |station| party(of, *gate, station).enter(1);
    station::claim_by((&rows.gather, count), enter, || gate.look().is_err())
}

/// Leaves the gate of member `of` and frees the station; `lost` says that a command has not ended. The station stays taken
/// on this member alone then.
#[inline(always)]
pub fn leave(
    (rows, of): (&GatherLaunch, &StripedMember),
    gate: AdmissionGate<'_>,
    station: u32,
    lost: bool,
) {
    if station != NO_STATION {
        party(of, gate, station).leave(1, lost);
        station::give_back(rows, station);
    }
}

/// Returns member `index`, if there is one.
#[inline(always)]
pub fn member(rows: &StripedGather, index: u32) -> Option<&StripedMember> {
    if index >= rows.member_count || index >= MEMBERS {
        return None;
    }
    // SAFETY: the host vouches for `member_count` members, which nothing changes during the launch.
    Some(unsafe { &*members(rows).add(index as usize) })
}

#[inline(always)]
fn members(rows: &StripedGather) -> *const StripedMember {
    rows.members as usize as *const StripedMember
}

#[inline(always)]
fn gate<'r>(rows: &StripedGather, of: &StripedMember) -> Option<AdmissionGate<'r>> {
    let stations = rows.gather.station_count;
    let gate = of.gate as usize as *const AtomicU32;
    // SAFETY: the host vouches for the words of a gate for `station_count` stations, used through atomics
    // alone.
    AdmissionGate::new(unsafe { core::slice::from_raw_parts(gate, words(stations)) })
}

#[inline(always)]
fn is_open(rows: &StripedGather, index: u32) -> bool {
    let gate = member(rows, index).and_then(|of| gate(rows, of));
    gate.is_some_and(|gate| gate.look().is_ok())
}

#[inline(always)]
fn party_at<'r>(
    rows: &StripedGather,
    of: &'r StripedMember,
    station: u32,
) -> Option<GateReference<'r>> {
    let words = of.stations as usize as *const AtomicU32;
    Some(GateReference {
        // SAFETY: the host vouches for a word for each station, used through atomics alone.
        word: unsafe { &*words.add(station as usize) },
        gate: gate(rows, of)?,
        station,
    })
}

#[inline(always)]
fn party<'r>(of: &'r StripedMember, gate: AdmissionGate<'r>, station: u32) -> GateReference<'r> {
    let words = of.stations as usize as *const AtomicU32;
    GateReference {
        // SAFETY: the host vouches for a word for each station, used through atomics alone.
        word: unsafe { &*words.add(station as usize) },
        gate,
        station,
    }
}
