//! State of each unit of a verified run.

use std::sync::atomic::{AtomicU8, Ordering};

/// A write of the unit is under way, or its end is not known.
const BUSY: u8 = 1 << 7;

/// Content of each unit: unknown, or the data of its last write in this run.
///
/// Only one write of a unit is in flight at a time, so that its content is known when it ends. Each write has a
/// generation, 1 to 127 and then 1 again: a drive that returns older data returns another generation.
pub(crate) struct UnitStates(Vec<AtomicU8>);

/// Expected content of a read: the content of a unit that no write has touched since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnitContent(u8);

impl UnitContent {
    pub fn generation(self) -> u8 {
        self.0
    }
}

impl UnitStates {
    pub fn new(units: u64) -> Self {
        Self((0..units).map(|_| AtomicU8::new(0)).collect())
    }

    /// Returns the generation of a write that may begin now; none while another one is under way.
    pub fn begin_write(&self, unit: u64) -> Option<u8> {
        let state = self.0.get(unit as usize)?;
        let next = |state: u8| match state {
            state if state & BUSY != 0 => None,
            state if state == BUSY - 1 => Some(1 | BUSY),
            state => Some((state + 1) | BUSY),
        };
        // Acquire: pairs with the release in `end_write` of the write before, possibly on another thread. Its
        // command has completed then, so the two writes of the unit can never be in flight together and end in
        // either order.
        let before = state.fetch_update(Ordering::Acquire, Ordering::Relaxed, next);
        next(before.ok()?).map(|state| state & !BUSY)
    }

    /// Notes that the write that began has ended well.
    pub fn end_write(&self, unit: u64) {
        if let Some(state) = self.0.get(unit as usize) {
            // Release: pairs with the acquire loads of `content` and `begin_write`. A thread that sees the unit
            // no longer busy may rely on the completion of this write, and may compare what it reads with its
            // data.
            state.fetch_and(!BUSY, Ordering::Release);
        }
    }

    /// Returns the content of the unit; none before its first write, and while one is under way.
    // Acquire: pairs with the release in `end_write`. A read that is submitted after this load finds at least
    // the data of that generation, because the write had completed before the flag was cleared.
    pub fn content(&self, unit: u64) -> Option<UnitContent> {
        let state = self.0.get(unit as usize)?.load(Ordering::Acquire);
        (state != 0 && state & BUSY == 0).then_some(UnitContent(state))
    }

    /// Forgets the content of the unit, after it was compared.
    pub fn forget(&self, unit: u64) {
        if let Some(state) = self.0.get(unit as usize) {
            state.store(0, Ordering::Relaxed);
        }
    }

    /// Returns every unit of known content, ascending.
    pub fn known(&self) -> impl Iterator<Item = u64> {
        (0..self.0.len() as u64).filter(|unit| self.content(*unit).is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_has_one_write_at_a_time_and_each_its_generation() {
        let states = UnitStates::new(3);
        assert_eq!(states.content(1), None);
        assert_eq!(states.begin_write(1), Some(1));
        assert_eq!((states.begin_write(1), states.content(1)), (None, None));
        states.end_write(1);
        let first = states.content(1).unwrap();
        for generation in 2..=127 {
            assert_eq!(states.begin_write(1), Some(generation));
            states.end_write(1);
            assert_ne!(states.content(1), Some(first));
        }
        assert_eq!(states.begin_write(1), Some(1));
        states.end_write(1);
        assert_eq!(states.known().collect::<Vec<_>>(), [1]);
        states.forget(1);
        assert_eq!(states.known().count(), 0);
        assert_eq!((states.begin_write(3), states.content(3)), (None, None));
    }
}
