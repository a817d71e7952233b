//! Strips of something long that pass through a few stages of memory: some groups of threads fill them in parts, others
//! use them.
//!
//! Strip `s` passes through stage `s` modulo the number of stages. Each strip has a count of the parts that are in its
//! stage, and of the uses that have ended; counts are never taken back, so that no strip is taken for another one. A use
//! that is given up does not count: its stage is not filled again.
//!
//! Invariant: while a strip is used nothing writes to its stage, and what is used was written whole. Loom checks it
//! with one group that fills and one that uses (`tests/tests/loom/strips.rs`).

use crate::sync::{AtomicU32, Order, Scope};

/// The words of the strips of one launch, in memory of the GPU, zeroed before.
#[derive(Clone, Copy, Debug)]
pub struct Strips<'a> {
    gave_up: &'a AtomicU32,
    ended: &'a AtomicU32,
    filled: &'a [AtomicU32],
    used: &'a [AtomicU32],
    stages: u32,
}

/// Whether to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// Yes.
    Now,
    /// Look again.
    NotYet,
    /// Someone gave up, and said why: what is not there will not come.
    Never(u32),
}

/// How many words [`Strips::new`] takes for `strips` strips.
pub const fn words(strips: u32) -> usize {
    2 + 2 * strips as usize
}

impl<'a> Strips<'a> {
    /// None for no stage, and where the words are not those of `strips` strips.
    #[inline(always)]
    pub fn new(all: &'a [AtomicU32], strips: u32, stages: u32) -> Option<Self> {
        if all.len() != words(strips) || stages == 0 {
            return None;
        }
        let (gave_up, rest) = all.split_first()?;
        let (ended, rest) = rest.split_first()?;
        let (filled, used) = rest.split_at_checked(strips as usize)?;
        Some(Self {
            gave_up,
            ended,
            filled,
            used,
            stages,
        })
    }

    /// Whether a part of `strip` may be written to its stage, of whose last strip there are `uses` uses.
    #[inline(always)]
    pub fn may_fill(&self, strip: u32, uses: u32) -> Ready {
        let Some(before) = strip.checked_sub(self.stages) else {
            return Ready::Now;
        };
        // Acquire: pairs with the release of `end_use`; writes come after all reads of those who used the stage.
        self.ready(self.used.get(before as usize), uses)
    }

    /// A part of `strip` is in its stage. Threads that wrote it met the calling one.
    #[inline(always)]
    pub fn fill(&self, strip: u32) {
        if let Some(filled) = self.filled.get(strip as usize) {
            // Release: who sees the count sees the part.
            filled.fetch_add(1, Order::Release, Scope::Gpu);
        }
    }

    /// Whether `strip`, of so many parts, may be used.
    #[inline(always)]
    pub fn may_use(&self, strip: u32, parts: u32) -> Ready {
        // Acquire: pairs with the release of `fill`.
        self.ready(self.filled.get(strip as usize), parts)
    }

    /// A use of `strip` has ended. Threads that used it met the calling one.
    #[inline(always)]
    pub fn end_use(&self, strip: u32) {
        if let Some(used) = self.used.get(strip as usize) {
            // Release: who sees the count writes after what was read before.
            used.fetch_add(1, Order::Release, Scope::Gpu);
        }
    }

    /// One of `groups` groups fills no more; after the last one, what is not there will not come, because of `why`, which
    /// is not 0. Threads that filled met the calling one.
    #[inline(always)]
    pub fn end_filling(&self, groups: u32, why: u32) {
        // Release: what this group has filled; acquire: what those before it have.
        if self.ended.fetch_add(1, Order::AcqRel, Scope::Gpu) + 1 == groups {
            self.give_up(why);
        }
    }

    /// What is not there is waited for no more, because of `why`, which is not 0. Strips that are there are used; no stage
    /// is filled again whose use did not end.
    #[inline(always)]
    pub fn give_up(&self, why: u32) {
        // Release: who sees it sees all that was filled before.
        self.gave_up.store(why, Order::Release, Scope::Gpu);
    }

    #[inline(always)]
    fn ready(&self, count: Option<&AtomicU32>, whole: u32) -> Ready {
        let Some(count) = count else {
            return Ready::Never(u32::MAX);
        };
        // First, and acquire, which pairs with `give_up`: what was filled before is counted below.
        let why = self.gave_up.load(Order::Acquire, Scope::Gpu);
        match count.load(Order::Acquire, Scope::Gpu) >= whole {
            true => Ready::Now,
            false if why != 0 => Ready::Never(why),
            false => Ready::NotYet,
        }
    }
}

#[cfg(all(test, not(any(loom, tsan))))]
mod tests {
    use super::*;

    fn memory(strips: u32) -> Vec<AtomicU32> {
        (0..words(strips)).map(|_| AtomicU32::new(0)).collect()
    }

    #[test]
    fn a_stage_is_filled_again_after_all_uses() {
        let words = memory(3);
        let strips = Strips::new(&words, 3, 2).unwrap();
        assert_eq!(strips.may_fill(1, 0), Ready::Now);
        assert_eq!(strips.may_use(0, 2), Ready::NotYet);
        strips.fill(0);
        assert_eq!(strips.may_use(0, 2), Ready::NotYet);
        strips.fill(0);
        assert_eq!(strips.may_use(0, 2), Ready::Now);
        assert_eq!(strips.may_use(1, 2), Ready::NotYet);
        strips.end_use(0);
        assert_eq!(strips.may_fill(2, 2), Ready::NotYet);
        strips.end_use(0);
        assert_eq!(strips.may_fill(2, 2), Ready::Now);
    }

    #[test]
    fn after_someone_gave_up_what_is_there_is_used_and_nothing_is_waited_for() {
        let words = memory(2);
        let strips = Strips::new(&words, 2, 1).unwrap();
        strips.fill(0);
        strips.give_up(7);
        assert_eq!(strips.may_use(0, 1), Ready::Now);
        assert_eq!(strips.may_use(1, 1), Ready::Never(7));
        assert_eq!(strips.may_fill(1, 1), Ready::Never(7));
        strips.end_use(0);
        assert_eq!(strips.may_fill(1, 1), Ready::Now);
        // Past the last strip.
        assert_eq!(strips.may_use(2, 1), Ready::Never(u32::MAX));
        assert_eq!(strips.may_fill(3, 1), Ready::Never(u32::MAX));
    }

    #[test]
    fn words_of_another_length_are_refused() {
        let words = memory(2);
        assert!(Strips::new(&words, 3, 1).is_none());
        assert!(Strips::new(&words, 2, 0).is_none());
        assert!(Strips::new(&words[..2], 0, 1).is_some());
    }
}
