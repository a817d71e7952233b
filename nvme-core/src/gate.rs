//! A gate between kernels that use queues and the host that takes the queues away from them.
//!
//! A launch that returns at once leaves the host without a lock on what its kernel uses. Each group of threads
//! passes the gate before it touches a queue or a buffer that the controller writes, and says when it has left.
//! To reset the controller, the host closes the gate, sees that all have left, does what it has to, and opens the
//! gate again. No step of that calls the GPU's driver, which might itself wait for the kernel.
//!
//! Invariant: a group that has passed and not left is seen by [`is_idle`](Gate::is_idle), or it has seen the gate
//! closed. Each side stores its own word and then loads the other's, with a fence between them that is in one
//! order with the other side's: at least one of the two loads finds the other's store. Loom checks it
//! (`tests/tests/loom/gate.rs`).
//!
//! The words lie in memory that the host and the GPU reach, and that stays for as long as a launch may name them.

use crate::sync::{AtomicU32, Order, Scope, fence_seq_cst};

/// The gate lets groups pass.
const OPEN: u32 = 0;
/// The host has the queues for a while.
const CLOSED: u32 = 1;
/// The host has them for good.
const GONE: u32 = 2;

const STATE: usize = 0;
const TROUBLE: usize = 16;
/// The first station's word, one line of 64 bytes further on.
const STATIONS: usize = 32;

/// What a station's group does.
const AWAY: u32 = 0;
const INSIDE: u32 = 1;
/// It has left, and a command that it sent has no end: its buffer is not free.
const LOST: u32 = 2;

/// Words of a gate for `stations` groups at a time.
pub const fn words(stations: u32) -> usize {
    STATIONS + stations as usize
}

/// Why a group may not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shut {
    /// The controller is being recovered; later launches may pass again.
    ForNow,
    /// The queues are gone.
    ForGood,
}

/// A gate over its words, zeroed before their first use: open, and nothing inside.
#[derive(Clone, Copy, Debug)]
pub struct Gate<'a> {
    words: &'a [AtomicU32],
}

impl<'a> Gate<'a> {
    /// A gate over `words`, of which there are [`words`] of its stations; `None` for too few.
    #[inline(always)]
    pub fn new(words: &'a [AtomicU32]) -> Option<Self> {
        (words.len() >= STATIONS).then_some(Self { words })
    }

    /// Groups that can be inside at a time.
    pub fn stations(&self) -> u32 {
        (self.words.len() - STATIONS) as u32
    }

    #[inline(always)]
    fn store(&self, word: usize, value: u32, order: Order) {
        if let Some(to) = self.words.get(word) {
            to.store(value, order, Scope::Sys);
        }
    }

    #[inline(always)]
    fn load(&self, word: usize) -> u32 {
        // Acquire: pairs with the release of who stored; for the state that is who recovered the queues, for a
        // station the group that used them.
        self.words
            .get(word)
            .map_or(GONE, |word| word.load(Order::Acquire, Scope::Sys))
    }

    /// Passes the gate as the only group at `station`.
    ///
    /// # Errors
    /// Why it may not: it touches nothing then, and has left.
    #[inline(always)]
    pub fn enter(&self, station: u32) -> Result<(), Shut> {
        let word = STATIONS + station as usize;
        self.store(word, INSIDE, Order::Relaxed);
        fence_seq_cst(Scope::Sys);
        let passed = self.look();
        if passed.is_err() {
            self.store(word, AWAY, Order::Release);
        }
        passed
    }

    /// The group at `station`, which has passed, touches nothing any more.
    #[inline(always)]
    pub fn leave(&self, station: u32) {
        self.store(STATIONS + station as usize, AWAY, Order::Release);
    }

    /// As [`leave`](Self::leave), with a command under way that was given up: the station is not used again until the
    /// host has [found](Self::take_lost) it.
    #[inline(always)]
    pub fn leave_lost(&self, station: u32) {
        self.store(STATIONS + station as usize, LOST, Order::Release);
    }

    /// Whether a group that is inside may go on; one that need not leaves soon.
    ///
    /// # Errors
    /// Why it should leave.
    #[inline(always)]
    pub fn look(&self) -> Result<(), Shut> {
        match self.load(STATE) {
            OPEN => Ok(()),
            CLOSED => Err(Shut::ForNow),
            _ => Err(Shut::ForGood),
        }
    }

    /// Tells the host that a command got no end: it should recover the controller.
    #[inline(always)]
    pub fn report_trouble(&self) {
        self.store(TROUBLE, 1, Order::Release);
    }

    /// Whether a group reported trouble since the gate was last opened: the host recovers the controller then, and new
    /// groups write nothing until it has.
    #[inline(always)]
    pub fn has_trouble(&self) -> bool {
        self.load(TROUBLE) != 0
    }

    /// The host: lets no group pass from now on. Those inside leave when they see it, or when their commands end.
    pub fn close(&self) {
        self.turn(OPEN, CLOSED, Order::Relaxed);
        fence_seq_cst(Scope::Sys);
    }

    /// Changes the state where it is `from`. Several threads of the host turn it: a plain store could undo
    /// [`close_for_good`](Self::close_for_good).
    fn turn(&self, from: u32, to: u32, order: Order) -> bool {
        let state = self.words.get(STATE);
        state.is_some_and(|state| state.compare_exchange(from, to, order, Scope::Sys) == from)
    }

    /// The host, after [`close`](Self::close): whether all groups have left. Once they have, none passes until the
    /// gate is opened.
    pub fn is_idle(&self) -> bool {
        self.words[STATIONS..]
            .iter()
            .all(|station| station.load(Order::Acquire, Scope::Sys) != INSIDE)
    }

    /// The host, once no command is under way any more: a station that was lost, which it gives back.
    pub fn take_lost(&self) -> Option<u32> {
        let stations = self.words[STATIONS..].iter();
        let lost = stations
            .zip(0..)
            .find(|(word, _)| word.load(Order::Acquire, Scope::Sys) == LOST);
        lost.map(|(word, station)| {
            word.store(AWAY, Order::Relaxed, Scope::Sys);
            station
        })
    }

    /// The host, after [`close`](Self::close): lets groups pass again, which see all that it did meanwhile. Whether it
    /// does: not a gate that was shut for good, also meanwhile.
    pub fn open(&self) -> bool {
        self.store(TROUBLE, 0, Order::Relaxed);
        self.turn(CLOSED, OPEN, Order::Release)
    }

    /// The host: lets no group pass ever again, whatever other threads of the host do.
    pub fn close_for_good(&self) {
        self.store(STATE, GONE, Order::Relaxed);
        fence_seq_cst(Scope::Sys);
    }
}

/// Unless 0: so many groups have not left, and above this bit, as many left with a command that has no end.
const GROUPS: u32 = 0xFF;

/// One station of a gate for several groups at once, which leave it one by one: the last of them leaves the gate.
///
/// Its word is 0 while it is free. The groups of one party come one party after the other: what gives them the
/// station orders that.
#[derive(Clone, Copy, Debug)]
pub struct Party<'a> {
    /// Zeroed before its first use, and by the host when it takes the station as [lost](Gate::take_lost).
    pub word: &'a AtomicU32,
    /// The gate.
    pub gate: Gate<'a>,
    /// The station, which belongs to the word.
    pub station: u32,
}

impl Party<'_> {
    /// One for all: passes the gate for `groups` groups, at most 255. Whether they have passed; they have left
    /// otherwise.
    #[inline(always)]
    pub fn enter(&self, groups: u32) -> bool {
        // Acquire: pairs with the host, or with the last group of the party before.
        let was = self
            .word
            .compare_exchange(0, groups, Order::Acquire, Scope::Gpu);
        if was != 0 {
            return false;
        }
        let passed = self.gate.enter(self.station).is_ok();
        if !passed {
            self.word.store(0, Order::Release, Scope::Gpu);
        }
        passed
    }

    /// `groups` groups, which have passed, touch nothing any more; `lost` when a command that they sent was given up.
    #[inline(always)]
    pub fn leave(&self, groups: u32, lost: bool) {
        let lost = if lost { GROUPS + 1 } else { 0 };
        let change = lost.wrapping_sub(groups);
        // Release and acquire: what all groups did comes before the last one leaves the gate.
        let was = self.word.fetch_add(change, Order::AcqRel, Scope::Gpu);
        let now = was.wrapping_add(change);
        if now & GROUPS != 0 {
            return;
        }
        match now {
            0 => self.gate.leave(self.station),
            _ => self.gate.leave_lost(self.station),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::vec::Vec;

    fn words_of(stations: u32) -> Vec<AtomicU32> {
        (0..words(stations)).map(|_| AtomicU32::new(0)).collect()
    }

    #[test]
    fn who_is_inside_is_seen_until_it_leaves() {
        let words = words_of(3);
        let gate = Gate::new(&words).unwrap();
        assert_eq!(gate.stations(), 3);
        assert!(gate.is_idle());
        assert_eq!(gate.enter(2), Ok(()));
        gate.close();
        assert!(!gate.is_idle());
        assert_eq!(gate.look(), Err(Shut::ForNow));
        gate.leave(2);
        assert!(gate.is_idle());
    }

    #[test]
    fn a_closed_gate_lets_none_pass_until_it_is_opened() {
        let words = words_of(1);
        let gate = Gate::new(&words).unwrap();
        gate.close();
        assert_eq!(gate.enter(0), Err(Shut::ForNow));
        assert!(gate.is_idle());
        gate.report_trouble();
        assert!(gate.has_trouble());
        assert!(gate.open());
        assert!(!gate.has_trouble());
        assert_eq!(gate.enter(0), Ok(()));
        gate.leave(0);
        gate.close_for_good();
        assert_eq!(gate.enter(0), Err(Shut::ForGood));
    }

    #[test]
    fn a_gate_that_was_shut_for_good_stays_so() {
        let words = words_of(1);
        let gate = Gate::new(&words).unwrap();
        gate.close();
        gate.close_for_good();
        assert!(!gate.open());
        assert_eq!(gate.enter(0), Err(Shut::ForGood));
        gate.close();
        assert!(!gate.open());
        assert_eq!(gate.look(), Err(Shut::ForGood));
    }

    #[test]
    fn a_lost_station_is_empty_and_found_once() {
        let words = words_of(3);
        let gate = Gate::new(&words).unwrap();
        assert_eq!((gate.enter(1), gate.enter(2)), (Ok(()), Ok(())));
        gate.leave_lost(2);
        assert!(!gate.is_idle());
        gate.leave(1);
        assert!(gate.is_idle());
        assert_eq!((gate.take_lost(), gate.take_lost()), (Some(2), None));
    }

    #[test]
    fn words_that_are_too_few_are_no_gate_and_a_station_that_is_not_there_is_harmless() {
        let words = words_of(1);
        assert!(Gate::new(&words[..STATIONS - 1]).is_none());
        let gate = Gate::new(&words).unwrap();
        assert_eq!(gate.enter(7), Ok(()));
        gate.leave(7);
        assert!(gate.is_idle());
    }

    #[test]
    fn a_party_leaves_with_the_last_of_its_groups() {
        let (words, word) = (words_of(2), AtomicU32::new(0));
        let gate = Gate::new(&words).unwrap();
        let party = Party {
            word: &word,
            gate,
            station: 1,
        };
        assert!(party.enter(8));
        assert!(!party.enter(8), "one party at a time");
        gate.close();
        party.leave(1, false);
        party.leave(6, false);
        assert!(!gate.is_idle());
        party.leave(1, false);
        assert!(gate.is_idle());
        assert_eq!(gate.take_lost(), None);
        assert!(!party.enter(2), "the gate is closed");
        assert!(gate.open());
        assert!(party.enter(2));
        party.leave(1, true);
        assert!(!gate.is_idle());
        party.leave(1, false);
        assert!(gate.is_idle());
        assert!(!party.enter(2), "lost");
        assert_eq!(gate.take_lost(), Some(1));
        word.store(0, Order::Relaxed, Scope::Gpu);
        assert!(party.enter(2));
    }
}
