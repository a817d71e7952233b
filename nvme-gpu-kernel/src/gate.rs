//! An admission gate between kernels that use queues and the host, which takes the queues away to reset the
//! controller.
//!
//! A launch that returns at once leaves the host without a lock on the queues and buffers that its kernel
//! uses. So each group of threads passes the gate before it touches a queue, or a buffer that the controller
//! writes, and leaves it afterwards. No call below calls the GPU's driver, which might itself wait for the
//! kernel.
//!
//! The order of calls. A group: [`enter`](AdmissionGate::enter); then work, with a [`look`](AdmissionGate::look) in
//! each long loop; then [`leave`](AdmissionGate::leave), or [`leave_lost`](AdmissionGate::leave_lost) when a command of
//! it has no end. A group that meets a command without an end calls [`report_trouble`](AdmissionGate::report_trouble).
//! The host: [`close`](AdmissionGate::close); poll [`is_idle`](AdmissionGate::is_idle) up to a deadline; reset the
//! controller and recover the queues; [`take_lost`](AdmissionGate::take_lost) until it returns `None`;
//! [`open`](AdmissionGate::open), or [`close_for_good`](AdmissionGate::close_for_good). [`GateReference`] does the
//! group's half once for several groups that share a station.
//!
//! Invariant: a group that has passed and not left is seen by [`is_idle`](AdmissionGate::is_idle), or it has seen the
//! gate closed. Each side stores its own word and then loads the other's, with a sequentially consistent
//! fence between. The two fences have one order, so at least one of the two loads finds the other's store.
//! With weaker fences both could miss, and the host would reset the controller under a group that still
//! submits. Loom checks it (`tests/tests/loom/gate.rs`).
//!
//! Each station has its own copy of the state, since loads of one word of host memory by several blocks wait for each
//! other. States only grow, and a copy is only ever raised, so that host threads may raise copies in any order.
//!
//! The words are in memory that the host and the GPU reach, and that stays mapped for as long as a launch may
//! name them.

use nvme_core::sync::{AtomicU32, Order, Scope, fence_seq_cst};

/// State word: groups may pass.
const OPEN: u32 = 0;
/// State word: the host recovers the queues; groups may pass later.
const CLOSED: u32 = 1;
/// State word: the queues are gone, and no group passes again; the largest of all.
const GONE: u32 = u32::MAX - 1;
/// Bits of the state word that hold one of these; those above count recoveries, as [`GateEpoch`].
const STATES: u32 = 3;
const ONE_EPOCH: u32 = STATES + 1;

const STATE: usize = 0;
const TROUBLE: usize = 16;
/// The first station's word, 64 bytes after the trouble word, so that the host's stores and the
/// groups' do not share a line. A shared line would go back and forth over the bus with each look.
const STATIONS: usize = 32;
/// Words from a station's word to its copy of the state: blocks that access one line of host memory wait for each
/// other, and the host stores to one and the group to the other. Models have no cache lines and keep the words side by
/// side.
const COPY: usize = if cfg!(loom) { 1 } else { 32 };
/// Words from one station to the next.
const STRIDE: usize = 2 * COPY;

/// Station word: no group is inside.
const AWAY: u32 = 0;
const INSIDE: u32 = 1;
/// Station word: the group has left, but a command that it sent has not ended, so its buffer is not
/// free. The host takes it back once the controller was reset (`take_lost`).
const LOST: u32 = 2;

#[inline(always)]
const fn word_of(station: u32) -> usize {
    STATIONS + station as usize * STRIDE
}

/// Returns the number of words of a gate with `stations` stations, one for each group inside at once.
pub const fn words(stations: u32) -> usize {
    STATIONS + stations as usize * STRIDE
}

/// The reason why a group may not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateRefusal {
    /// The controller is being recovered; later launches may pass again.
    ForNow,
    /// The queues are gone.
    ForGood,
}

/// Number of recoveries after which a gate was opened again, which an open gate shows to each group that passes.
///
/// A group that left with commands in flight compares it when it comes back: another number means that the controller was
/// reset meanwhile, so that the commands have ended without their data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateEpoch(pub u32);

#[inline(always)]
fn epoch_of(state: u32) -> Result<GateEpoch, GateRefusal> {
    match state & STATES {
        OPEN => Ok(GateEpoch(state / ONE_EPOCH)),
        CLOSED => Err(GateRefusal::ForNow),
        _ => Err(GateRefusal::ForGood),
    }
}

/// An admission gate over its words. Words of zero are a gate that is open, with nobody inside.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionGate<'a> {
    words: &'a [AtomicU32],
}

impl<'a> AdmissionGate<'a> {
    /// Makes a gate over `words`, whose number is [`words`] of its stations; `None` for too few.
    #[inline(always)]
    pub fn new(words: &'a [AtomicU32]) -> Option<Self> {
        (words.len() >= STATIONS).then_some(Self { words })
    }

    /// Returns the number of stations: groups that can be inside at once.
    pub fn stations(&self) -> u32 {
        ((self.words.len() - STATIONS) / STRIDE) as u32
    }

    fn station_words(&self) -> impl Iterator<Item = &'a AtomicU32> {
        self.words[STATIONS..].iter().step_by(STRIDE)
    }

    #[inline(always)]
    fn store(&self, word: usize, value: u32, order: Order) {
        if let Some(to) = self.words.get(word) {
            to.store(value, order, Scope::Sys);
        }
    }

    #[inline(always)]
    fn load(&self, word: usize) -> u32 {
        // Acquire: pairs with the release of the last writer. For the state that is the host that recovered
        // the queues, for a station the group that used them; a group that passes, or a host that finds the
        // gate idle, then sees all that the other side did.
        self.words
            .get(word)
            .map_or(GONE, |word| word.load(Order::Acquire, Scope::Sys))
    }

    /// Passes the gate as the only group at `station`.
    ///
    /// # Errors
    /// The reason why it may not pass. The station is free again then, and the group must touch nothing.
    #[inline(always)]
    pub fn enter(&self, station: u32) -> Result<(), GateRefusal> {
        self.pass(station).map(|_| ())
    }

    /// Passes the gate as [`enter`](Self::enter) does; returns the epoch, which stays until the group has left.
    ///
    /// # Errors
    /// As [`enter`](Self::enter).
    #[inline(always)]
    pub fn pass(&self, station: u32) -> Result<GateEpoch, GateRefusal> {
        let word = word_of(station);
        self.store(word, INSIDE, Order::Relaxed);
        fence_seq_cst(Scope::Sys);
        let passed = epoch_of(self.load(word + COPY));
        if passed.is_err() {
            self.store(word, AWAY, Order::Release);
        }
        passed
    }

    /// Leaves the gate: the group at `station`, which has passed, touches nothing after this call. The store
    /// is a release, so that a host that sees the word also sees the group's last accesses, and may reset or
    /// free.
    #[inline(always)]
    pub fn leave(&self, station: u32) {
        self.store(word_of(station), AWAY, Order::Release);
    }

    /// Leaves the gate as [`leave`](Self::leave) does, with an abandoned command still in flight: the station
    /// is not used again until the host has [taken](Self::take_lost) it.
    #[inline(always)]
    pub fn leave_lost(&self, station: u32) {
        self.store(word_of(station), LOST, Order::Release);
    }

    /// Tells a group that is inside whether the gate is still open; the group leaves soon otherwise.
    ///
    /// # Errors
    /// The reason why it should leave.
    #[inline(always)]
    pub fn look(&self) -> Result<(), GateRefusal> {
        epoch_of(self.load(STATE)).map(|_| ())
    }

    /// Reports to the host that a command has not ended by its deadline and that the controller needs
    /// recovery. A release: the host that sees the flag also sees the group's counts and codes from before.
    #[inline(always)]
    pub fn report_trouble(&self) {
        self.store(TROUBLE, 1, Order::Release);
    }

    /// True if a group reported trouble since the gate was last opened. The host recovers the controller
    /// then; groups that write to drives check this first and send nothing until the recovery is over.
    #[inline(always)]
    pub fn has_trouble(&self) -> bool {
        self.load(TROUBLE) != 0
    }

    /// Closes the gate, on the host. Groups inside leave when they see it, or when their commands end.
    pub fn close(&self) {
        self.turn((OPEN, CLOSED), 0, Order::Relaxed);
        // Also if another thread has closed the gate: it may not have raised the copies yet.
        self.raise_copies(Order::Relaxed);
        fence_seq_cst(Scope::Sys);
    }

    /// Raises each station's copy to the state.
    fn raise_copies(&self, order: Order) {
        let Some(state) = self.words.get(STATE) else {
            return;
        };
        // A read-modify-write finds the newest value; a load may find an older one.
        let now = state.fetch_or(0, Order::Relaxed, Scope::Sys);
        for copy in self.words[STATIONS..].iter().skip(COPY).step_by(STRIDE) {
            let mut was = copy.load(Order::Relaxed, Scope::Sys);
            while was < now {
                let found = copy.compare_exchange(was, now, order, Scope::Sys);
                if found == was {
                    break;
                }
                was = found;
            }
        }
    }

    /// Changes the state if it is `from`, and adds `epochs` to its count. Several threads of the host change it: a plain
    /// store could undo a concurrent [`close_for_good`](Self::close_for_good) and let groups use queues whose memory is
    /// about to be freed.
    fn turn(&self, (from, to): (u32, u32), epochs: u32, order: Order) -> bool {
        let Some(state) = self.words.get(STATE) else {
            return false;
        };
        // A read-modify-write finds the newest value; a load may find an older one.
        let mut was = state.fetch_or(0, Order::Relaxed, Scope::Sys);
        while was & STATES == from {
            // Past the last epoch the gate stays as it is.
            let Some(next) = (was & !STATES | to).checked_add(epochs * ONE_EPOCH) else {
                return false;
            };
            let found = state.compare_exchange(was, next, order, Scope::Sys);
            if found == was {
                return true;
            }
            was = found;
        }
        false
    }

    /// True if all groups have left; called on the host after [`close`](Self::close). Once they have, none
    /// passes until the gate is opened. Each load is an acquire, so that the reset comes after the last
    /// access of every group.
    pub fn is_idle(&self) -> bool {
        self.station_words()
            .all(|station| station.load(Order::Acquire, Scope::Sys) != INSIDE)
    }

    /// Frees a lost station and returns it; called on the host, once no command is in flight any longer: the
    /// abandoned command could write to the station's slots while its next owner uses them.
    pub fn take_lost(&self) -> Option<u32> {
        let lost = self
            .station_words()
            .zip(0..)
            .find(|(word, _)| word.load(Order::Acquire, Scope::Sys) == LOST);
        lost.map(|(word, station)| {
            word.store(AWAY, Order::Relaxed, Scope::Sys);
            station
        })
    }

    /// Opens the gate for the next epoch, on the host after [`close`](Self::close); groups that pass see all that the host
    /// did meanwhile. Returns false for a gate that was closed for good, also by another thread at this moment.
    pub fn open(&self) -> bool {
        self.store(TROUBLE, 0, Order::Relaxed);
        let is_open = self.turn((CLOSED, OPEN), 1, Order::Release);
        if is_open {
            // Release: pairs with the acquire of a group that passes.
            self.raise_copies(Order::Release);
        }
        is_open
    }

    /// Closes the gate for good, on the host: no group passes again, whatever other host threads do.
    pub fn close_for_good(&self) {
        self.store(STATE, GONE, Order::Relaxed);
        self.raise_copies(Order::Relaxed);
        fence_seq_cst(Scope::Sys);
    }
}

/// Mask of a party's word: the low bits count the groups that have not left, the bits above count those that
/// left with a command that has not ended.
const GROUPS: u32 = 0xFF;

/// One station of a gate for several groups that enter together and leave one by one; the last one leaves the
/// gate.
///
/// Its word is 0 while it is free. Parties at one station follow each other; the code that assigns the
/// station orders them.
#[derive(Clone, Copy, Debug)]
pub struct GateReference<'a> {
    /// Word of the station, zeroed before its first use, and by the host when it takes the station
    /// as [lost](AdmissionGate::take_lost). A word that is not zero before its first use would look
    /// like a group inside.
    pub word: &'a AtomicU32,
    /// Gate to pass.
    pub gate: AdmissionGate<'a>,
    /// Station that the word belongs to.
    pub station: u32,
}

impl GateReference<'_> {
    /// Passes the gate for `groups` groups, at most 255; one of them calls it for all. Returns false when
    /// they may not pass; the station is free then.
    #[inline(always)]
    pub fn enter(&self, groups: u32) -> bool {
        // Acquire: pairs with the release of the host, or of the last group of the party before. Its last
        // accesses to the slots of this station come before those of the new groups.
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

    /// Leaves for `groups` groups, which have passed and touch nothing after this call; `lost` says
    /// that a command of theirs has not ended. A recovery then waits with their buffers until the
    /// controller was reset.
    #[inline(always)]
    pub fn leave(&self, groups: u32, lost: bool) {
        let lost = if lost { GROUPS + 1 } else { 0 };
        let change = lost.wrapping_sub(groups);
        // Release and acquire: the accesses of all groups come before the last one leaves the gate, so the
        // host that finds the gate idle cannot overlap with any of them.
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
        let gate = AdmissionGate::new(&words).unwrap();
        assert_eq!(gate.stations(), 3);
        assert!(gate.is_idle());
        assert_eq!(gate.enter(2), Ok(()));
        gate.close();
        assert!(!gate.is_idle());
        assert_eq!(gate.look(), Err(GateRefusal::ForNow));
        gate.leave(2);
        assert!(gate.is_idle());
    }

    #[test]
    fn a_closed_gate_lets_none_pass_until_it_is_opened() {
        let words = words_of(1);
        let gate = AdmissionGate::new(&words).unwrap();
        gate.close();
        assert_eq!(gate.enter(0), Err(GateRefusal::ForNow));
        assert!(gate.is_idle());
        gate.report_trouble();
        assert!(gate.has_trouble());
        assert!(gate.open());
        assert!(!gate.has_trouble());
        assert_eq!(gate.enter(0), Ok(()));
        gate.leave(0);
        gate.close_for_good();
        assert_eq!(gate.enter(0), Err(GateRefusal::ForGood));
    }

    #[test]
    fn each_recovery_begins_an_epoch() {
        let words = words_of(1);
        let gate = AdmissionGate::new(&words).unwrap();
        for epoch in 0..3 {
            assert_eq!(gate.pass(0), Ok(GateEpoch(epoch)));
            gate.leave(0);
            assert!(!gate.open(), "it is not closed");
            gate.close();
            gate.close();
            assert_eq!(gate.pass(0), Err(GateRefusal::ForNow));
            assert!(gate.open());
        }
    }

    #[test]
    fn each_station_sees_each_state() {
        let words = words_of(3);
        let gate = AdmissionGate::new(&words).unwrap();
        let pass = || [0, 1, 2].map(|station| gate.pass(station));
        assert_eq!(pass(), [Ok(GateEpoch(0)); 3]);
        gate.close();
        assert_eq!(pass(), [Err(GateRefusal::ForNow); 3]);
        gate.open();
        assert_eq!(pass(), [Ok(GateEpoch(1)); 3]);
        gate.close_for_good();
        assert_eq!(pass(), [Err(GateRefusal::ForGood); 3]);
    }

    #[test]
    fn a_gate_that_was_shut_for_good_stays_so() {
        let words = words_of(1);
        let gate = AdmissionGate::new(&words).unwrap();
        gate.close();
        gate.close_for_good();
        assert!(!gate.open());
        assert_eq!(gate.enter(0), Err(GateRefusal::ForGood));
        gate.close();
        assert!(!gate.open());
        assert_eq!(gate.look(), Err(GateRefusal::ForGood));
    }

    #[test]
    fn a_lost_station_is_empty_and_found_once() {
        let words = words_of(3);
        let gate = AdmissionGate::new(&words).unwrap();
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
        assert!(AdmissionGate::new(&words[..STATIONS - 1]).is_none());
        let gate = AdmissionGate::new(&words).unwrap();
        assert_eq!(gate.enter(7), Err(GateRefusal::ForGood));
        gate.leave(7);
        assert!(gate.is_idle());
    }

    #[test]
    fn a_party_leaves_with_the_last_of_its_groups() {
        let (words, word) = (words_of(2), AtomicU32::new(0));
        let gate = AdmissionGate::new(&words).unwrap();
        let party = GateReference {
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
