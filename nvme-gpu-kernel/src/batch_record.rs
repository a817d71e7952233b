//! Words by which a launch hands a batch in flight to a later launch: its station, whose queue and slots no other group
//! uses meanwhile.
//!
//! The order of calls. The first launch calls [`BatchRecord::open`], submits by a
//! [`BatchQueue`](nvme_core::BatchQueue), leaves the gate and calls [`publish`](BatchRecord::publish), or
//! [`close`](BatchRecord::close) if it has no station. The second launch calls [`take`](BatchRecord::take); with a
//! batch it passes the gate at the station again and compares the [`GateEpoch`], before it touches the queue. The
//! station then belongs to the second launch, which frees it in any case.
//!
//! Invariant: a station that a record names is taken, and exactly one group gets it from the record. A graph may be
//! launched again before the batch was taken, and two graphs may run at once; then [`open`](BatchRecord::open) returns
//! false, and the batch is out of date: whoever takes it ends its commands and reads the rows again.

use crate::gate::GateEpoch;
use nvme_core::sync::{AtomicU32, Order, Scope};

/// Bit of the state: a first launch has opened the record, and its batch was not taken.
const OPENED: u32 = 1;
/// Bit of the state: the station is in the record.
const HELD: u32 = 2;
/// Bit of the state: the ids may have changed since the commands were submitted.
const OUTDATED: u32 = 4;
/// Shift of the station in the state: whoever changes the state from it owns the station.
const STATION_SHIFT: u32 = 8;

const STATE: usize = 0;
const EPOCH: usize = 1;
/// Low half of the deadline; the high half follows.
const DEADLINE: usize = 2;

/// A batch that was taken from a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BegunBatch {
    /// Station with the queue and the slots of its commands.
    pub station: u32,
    /// Epoch of the gate when they were submitted.
    pub epoch: GateEpoch,
    /// True if the ids may have changed: the commands are ended, and the rows are read again.
    pub is_outdated: bool,
}

/// Number of the words of a record.
const WORDS: usize = 4;

/// A record over its words, which are zero before the first use.
#[derive(Clone, Copy, Debug)]
pub struct BatchRecord<'a> {
    words: &'a [AtomicU32; WORDS],
}

impl<'a> BatchRecord<'a> {
    /// Makes a record over its words.
    #[inline(always)]
    pub fn new(words: &'a [AtomicU32; WORDS]) -> Self {
        Self { words }
    }

    /// Opens the record for a batch. Returns false if the batch before it was not taken: that batch is out of date now,
    /// and this group submits nothing.
    #[inline(always)]
    pub fn open(&self) -> bool {
        // Acquire: pairs with the release of `take`, after which nobody reads the words of the batch before.
        let was = self.words[STATE].fetch_or(OPENED, Order::Acquire, Scope::Gpu);
        if was & OPENED != 0 {
            self.words[STATE].fetch_or(OUTDATED, Order::Release, Scope::Gpu);
        }
        was & OPENED == 0
    }

    /// Publishes the batch at `station`, which this group has submitted by the queue there. The
    /// group has left the gate. So a recovery waits for no one between the two launches.
    #[inline(always)]
    pub fn publish(&self, batch: BegunBatch, deadline_ns: u64) {
        // Stored one by one: an array would be placed on a stack in the kernel.
        let put = |word: usize, value| self.words[word].store(value, Order::Relaxed, Scope::Gpu);
        put(EPOCH, batch.epoch.0);
        put(DEADLINE, deadline_ns as u32);
        put(DEADLINE + 1, (deadline_ns >> 32) as u32);
        let outdated = if batch.is_outdated { OUTDATED } else { 0 };
        let state = HELD | outdated | batch.station << STATION_SHIFT;
        // Release: the queue's state and the slots pass to the group that takes the batch.
        self.words[STATE].fetch_or(state, Order::Release, Scope::Gpu);
    }

    /// Closes a record that got no batch.
    #[inline(always)]
    pub fn close(&self) {
        self.words[STATE].fetch_and(!(OPENED | OUTDATED), Order::Release, Scope::Gpu);
    }

    /// Returns the time by which the batch's commands have to end. Meaningless without a batch.
    #[inline(always)]
    pub fn deadline_ns(&self) -> u64 {
        let half = |index: usize| u64::from(self.words[index].load(Order::Relaxed, Scope::Gpu));
        half(DEADLINE) | half(DEADLINE + 1) << 32
    }

    /// Takes the batch, if there is one: the station is this group's from now on.
    #[inline(always)]
    pub fn take(&self) -> Option<BegunBatch> {
        // Acquire: pairs with `publish`.
        let mut state = self.words[STATE].load(Order::Acquire, Scope::Gpu);
        while state & HELD != 0 {
            let epoch = GateEpoch(self.words[EPOCH].load(Order::Relaxed, Scope::Gpu));
            // Release: the words were read before another batch may overwrite them.
            let found = self.words[STATE].compare_exchange(state, 0, Order::AcqRel, Scope::Gpu);
            if found == state {
                return Some(BegunBatch {
                    station: state >> STATION_SHIFT,
                    epoch,
                    is_outdated: state & OUTDATED != 0,
                });
            }
            state = found;
        }
        None
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn batch(station: u32, is_outdated: bool) -> BegunBatch {
        BegunBatch {
            station,
            epoch: GateEpoch(7),
            is_outdated,
        }
    }

    #[test]
    fn a_batch_is_taken_once() {
        let words = Default::default();
        let record = BatchRecord::new(&words);
        assert_eq!(record.take(), None);
        assert!(record.open());
        assert_eq!(record.take(), None, "nothing was submitted yet");
        record.publish(batch(3, false), 5 << 40 | 6);
        assert_eq!(record.deadline_ns(), 5 << 40 | 6);
        assert_eq!(record.take(), Some(batch(3, false)));
        assert_eq!(record.take(), None);
        assert!(record.open());
    }

    #[test]
    fn a_batch_that_was_not_taken_is_out_of_date_when_the_next_one_begins() {
        let words = Default::default();
        let record = BatchRecord::new(&words);
        assert!(record.open());
        assert!(!record.open(), "while it is submitted");
        record.publish(batch(0, false), 0);
        assert!(!record.open());
        assert_eq!(record.take(), Some(batch(0, true)));
        assert!(record.open());
        record.publish(batch(9, true), 0);
        assert_eq!(record.take(), Some(batch(9, true)));
    }

    #[test]
    fn a_record_without_a_station_can_be_opened_again() {
        let words = Default::default();
        let record = BatchRecord::new(&words);
        assert!(record.open());
        record.close();
        assert_eq!(record.take(), None);
        assert!(record.open());
    }
}
