//! The table of the commands in flight on a [`QueuePair`](crate::QueuePair): CID, deadline and buffer of
//! each.
//!
//! Invariant: a slot is free, pending or expired. An expired slot keeps its CID, its list pages and its
//! buffer until the command's own completion arrives or a [`Quiesced`](crate::Quiesced) proves that the
//! controller can no longer touch them. A CID is 12 bits of slot and 4 bits of generation; slots are reused
//! oldest first, so that a stale CID repeats as late as possible.

use crate::error::ControllerFault;
use crate::spec::Cid;
use core::marker::PhantomData;

/// Limit of the commands in flight on one queue. Slot 4095 is never used, so CID FFFFh, which the
/// specification reserves, never occurs. A host or kernel that takes FFFFh for "none" therefore
/// never meets a command.
pub const MAX_IN_FLIGHT: u32 = 4095;

const SLOT_BITS: u32 = 12;
const GENERATION_MASK: u16 = 0xF;
const NONE: u16 = u16::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InflightState {
    Free,
    Pending,
    Expired,
}

/// One command slot. `B` is the buffer that a command holds while the controller may touch it.
///
/// Callers provide an array of slots, whose length limits the commands in flight; the queue pair initialises
/// it and never moves it.
#[derive(Debug)]
pub struct CommandSlot<B> {
    deadline_ns: u64,
    /// Number of the command's submission queue entry.
    entry: u64,
    lease: Option<B>,
    next_free: u16,
    generation: u16,
    state: InflightState,
}

impl<B> CommandSlot<B> {
    /// Makes a slot that holds nothing.
    pub const fn new() -> Self {
        Self {
            deadline_ns: 0,
            entry: 0,
            lease: None,
            next_free: NONE,
            generation: 0,
            state: InflightState::Free,
        }
    }
}

impl<B> Default for CommandSlot<B> {
    fn default() -> Self {
        Self::new()
    }
}

/// The contents of a slot at the end of its command.
#[derive(Debug)]
pub(crate) struct ReleasedSlot<B> {
    pub cid: Cid,
    pub lease: B,
    pub deadline_ns: u64,
    pub expired: bool,
}

/// The table of slots.
#[derive(Debug)]
pub(crate) struct InflightTable<B, S> {
    slots: S,
    _lease: PhantomData<fn(B) -> B>,
    first_free: u16,
    last_free: u16,
    in_flight: u32,
    /// Lower bound of the deadlines of all pending slots.
    earliest_ns: u64,
}

fn slot_of(cid: Cid) -> usize {
    usize::from(cid.0) & ((1 << SLOT_BITS) - 1)
}

fn cid_of(slot: u16, generation: u16) -> Cid {
    Cid(slot | generation << SLOT_BITS)
}

impl<B, S: AsMut<[CommandSlot<B>]> + AsRef<[CommandSlot<B>]>> InflightTable<B, S> {
    /// Makes a table of at most the first 4,095 slots.
    pub fn new(mut slots: S) -> Self {
        let usable = slots.as_mut().len().min(MAX_IN_FLIGHT as usize) as u16;
        for (index, slot) in slots.as_mut().iter_mut().enumerate() {
            let next = index + 1;
            *slot = CommandSlot {
                next_free: if next < usize::from(usable) {
                    next as u16
                } else {
                    NONE
                },
                ..CommandSlot::new()
            };
        }
        Self {
            slots,
            _lease: PhantomData,
            first_free: if usable == 0 { NONE } else { 0 },
            last_free: usable.wrapping_sub(1),
            in_flight: 0,
            earliest_ns: u64::MAX,
        }
    }

    #[inline]
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Returns the slot that [`reserve`](Self::reserve) will take.
    #[inline]
    pub fn next(&self) -> Option<u16> {
        (self.first_free != NONE).then_some(self.first_free)
    }

    /// Takes the slot that `next` returned, for the command in submission queue entry `entry`.
    #[inline]
    pub fn reserve(&mut self, lease: B, deadline_ns: u64, entry: u64) -> Result<Cid, B> {
        let index = self.first_free;
        let slot = self.slots.as_mut().get_mut(usize::from(index));
        let Some(slot) = slot.filter(|_| index != NONE) else {
            return Err(lease);
        };
        self.first_free = slot.next_free;
        if self.first_free == NONE {
            self.last_free = NONE;
        }
        slot.lease = Some(lease);
        slot.deadline_ns = deadline_ns;
        slot.entry = entry;
        slot.state = InflightState::Pending;
        self.in_flight += 1;
        self.earliest_ns = self.earliest_ns.min(deadline_ns);
        Ok(cid_of(index, slot.generation))
    }

    /// Returns the slot of `cid` if it is in flight, expired or not.
    ///
    /// A free slot and a slot with another generation are faults of the controller: it completed a command
    /// twice, or one that was never submitted. Neither may end a command, since the command's buffer would be
    /// returned while the controller still uses it.
    #[inline]
    pub fn find(&self, cid: Cid) -> Result<u16, ControllerFault> {
        match self.slots.as_ref().get(slot_of(cid)) {
            Some(slot) if slot.state == InflightState::Free => {
                Err(ControllerFault::UnknownCid(cid))
            }
            Some(slot) if slot.generation != cid.0 >> SLOT_BITS => {
                Err(ControllerFault::StaleCid(cid))
            }
            Some(_) => Ok(slot_of(cid) as u16),
            None => Err(ControllerFault::UnknownCid(cid)),
        }
    }

    /// Returns the number of the submission queue entry of the command in slot `index`.
    #[inline]
    pub fn entry(&self, index: u16) -> u64 {
        let slot = self.slots.as_ref().get(usize::from(index));
        slot.map_or(0, |slot| slot.entry)
    }

    /// Returns a lower bound of the deadlines of all commands that are not expired.
    #[inline]
    pub fn earliest_ns(&self) -> u64 {
        self.earliest_ns
    }

    /// Marks the next command past its deadline as expired and returns its CID; each command is returned
    /// once.
    ///
    /// Calls before the earliest deadline cost one comparison. A later call scans the table, and only a scan
    /// that finds nothing raises the bound; a bound that is too low costs one more scan, one that is too high
    /// would miss a deadline.
    pub fn expire(&mut self, now_ns: u64) -> Option<Cid> {
        if now_ns < self.earliest_ns {
            return None;
        }
        let mut earliest = u64::MAX;
        for (index, slot) in self.slots.as_mut().iter_mut().enumerate() {
            if slot.state != InflightState::Pending {
                continue;
            }
            if slot.deadline_ns <= now_ns {
                slot.state = InflightState::Expired;
                return Some(cid_of(index as u16, slot.generation));
            }
            earliest = earliest.min(slot.deadline_ns);
        }
        self.earliest_ns = earliest;
        None
    }

    /// Takes any command out of flight. The caller has proof that its memory is free.
    pub fn reclaim(&mut self) -> Option<ReleasedSlot<B>> {
        let index = self
            .slots
            .as_ref()
            .iter()
            .position(|slot| slot.state != InflightState::Free)? as u16;
        self.release(index)
    }

    /// Ends the command in slot `index` and returns its contents; `None` when there is none.
    ///
    /// The slot goes to the end of the free list, and its generation is incremented. So its next CID differs,
    /// and 16 reuses of this one slot pass before the CID repeats.
    #[inline]
    pub fn release(&mut self, index: u16) -> Option<ReleasedSlot<B>> {
        let slots = self.slots.as_mut();
        let slot = slots.get_mut(usize::from(index))?;
        let lease = slot.lease.take()?;
        let released = ReleasedSlot {
            cid: cid_of(index, slot.generation),
            lease,
            deadline_ns: slot.deadline_ns,
            expired: slot.state == InflightState::Expired,
        };
        slot.state = InflightState::Free;
        slot.generation = (slot.generation + 1) & GENERATION_MASK;
        slot.next_free = NONE;
        match slots.get_mut(usize::from(self.last_free)) {
            Some(last) if self.last_free != NONE => last.next_free = index,
            _ => self.first_free = index,
        }
        self.last_free = index;
        self.in_flight -= 1;
        Some(released)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn table(slots: usize) -> InflightTable<u32, Vec<CommandSlot<u32>>> {
        InflightTable::new((0..slots).map(|_| CommandSlot::new()).collect())
    }

    fn end(table: &mut InflightTable<u32, Vec<CommandSlot<u32>>>, cid: Cid) -> ReleasedSlot<u32> {
        let slot = table.find(cid).unwrap();
        table.release(slot).unwrap()
    }

    #[test]
    fn slots_are_reused_oldest_first_with_a_new_generation() {
        let mut table = table(2);
        let a = table.reserve(10, 0, 0).unwrap();
        let b = table.reserve(11, 0, 0).unwrap();
        assert_eq!((a, b), (Cid(0), Cid(1)));
        assert_eq!(table.reserve(12, 0, 0), Err(12));
        assert_eq!(end(&mut table, b).lease, 11);
        assert_eq!(end(&mut table, a).lease, 10);
        assert_eq!(table.reserve(13, 0, 0), Ok(Cid(0x1001)));
        assert_eq!(table.reserve(14, 0, 0), Ok(Cid(0x1000)));
    }

    #[test]
    fn rejects_stale_duplicate_and_unknown_cids() {
        let mut table = table(3);
        let a = table.reserve(1, 0, 0).unwrap();
        end(&mut table, a);
        assert_eq!(table.find(a).unwrap_err(), ControllerFault::UnknownCid(a));
        for n in 0..3 {
            table.reserve(n, 0, 0).unwrap();
        }
        assert_eq!(table.find(a).unwrap_err(), ControllerFault::StaleCid(a));
        assert_eq!(
            table.find(Cid(3)).unwrap_err(),
            ControllerFault::UnknownCid(Cid(3))
        );
        assert_eq!(
            table.find(Cid(0xFFFF)).unwrap_err(),
            ControllerFault::UnknownCid(Cid(0xFFFF))
        );
        assert_eq!(table.in_flight(), 3);
    }

    #[test]
    fn a_cid_repeats_after_sixteen_passes() {
        let mut table = table(3);
        let first = table.reserve(0, 0, 0).unwrap();
        end(&mut table, first);
        let mut passes = 0;
        loop {
            let cid = table.reserve(0, 0, 0).unwrap();
            end(&mut table, cid);
            passes += 1;
            if cid == first {
                break;
            }
        }
        assert_eq!(passes, 16 * 3);
    }

    #[test]
    fn an_expired_command_keeps_its_buffer_until_it_completes() {
        let mut table = table(2);
        let slow = table.reserve(5, 100, 0).unwrap();
        let fast = table.reserve(6, 50, 0).unwrap();
        assert_eq!(table.expire(49), None);
        assert_eq!(table.expire(70), Some(fast));
        assert_eq!(table.expire(70), None, "named once");
        assert_eq!(table.in_flight(), 2);
        assert_eq!(table.reserve(7, 0, 0), Err(7), "its slot is quarantined");
        let late = end(&mut table, fast);
        assert!(late.expired && late.lease == 6);
        assert!(!end(&mut table, slow).expired);
    }

    #[test]
    fn reclaim_returns_every_buffer_once() {
        let mut table = table(3);
        table.reserve(1, 10, 0).unwrap();
        table.reserve(2, 99, 0).unwrap();
        table.expire(10).unwrap();
        let mut back: Vec<u32> = Vec::new();
        while let Some(released) = table.reclaim() {
            back.push(released.lease);
        }
        assert_eq!(back, [1, 2]);
        assert_eq!(table.in_flight(), 0);
        for n in 0..3 {
            table.reserve(n, 0, 0).unwrap();
        }
    }

    #[test]
    fn never_more_than_4095_slots() {
        // More slots than 16 bits can number, too.
        let mut table = table(65_537);
        for n in 0..4095 {
            assert_ne!(table.reserve(n, 0, 0).unwrap(), Cid(0xFFFF));
        }
        assert_eq!(table.reserve(0, 0, 0), Err(0));
        assert!(!table.reclaim().unwrap().expired);
        assert!(table.reserve(0, 0, 0).is_ok());
        let mut none: InflightTable<u32, Vec<CommandSlot<u32>>> = InflightTable::new(Vec::new());
        assert_eq!(none.reserve(1, 0, 0), Err(1));
    }
}
