//! A pipeline of strips (K-slices of a matrix) through a few stages of memory: some groups of threads fill
//! the strips in parts, others use them.
//!
//! The order of calls. A filler: [`may_fill`](LaunchStrips::may_fill) until it returns [`StripReady::Now`]; write the
//! part; [`fill`](LaunchStrips::fill); at its end [`end_filling`](LaunchStrips::end_filling). A user:
//! [`may_use`](LaunchStrips::may_use) until `Now`; read; [`end_use`](LaunchStrips::end_use). Either side calls
//! [`give_up`](LaunchStrips::give_up) to abort.
//!
//! Strip `s` passes through stage `s` modulo the number of stages. Each strip has a count of the parts in its
//! stage, and of the uses that have ended; counts are never reset, so that no strip is taken for another one.
//! An abandoned use does not count: its stage is not filled again.
//!
//! Invariant: while a strip is used nothing writes to its stage, and a used strip was written whole. Loom
//! checks it with one group that fills and one that uses (`tests/tests/loom/strips.rs`).

use nvme_core::sync::{AtomicU32, Order, Scope};

/// The words of the strips of one launch, in GPU memory, zeroed before.
#[derive(Clone, Copy, Debug)]
pub struct LaunchStrips<'a> {
    gave_up: &'a AtomicU32,
    ended: &'a AtomicU32,
    filled: &'a [AtomicU32],
    used: &'a [AtomicU32],
    stages: u32,
}

/// The answer to a group that wants to fill or to use a strip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StripReady {
    /// The group may proceed.
    Now,
    /// The group has to ask again.
    NotYet,
    /// The producer, or a user, aborted with this code; missing strips will never be published.
    Never(u32),
}

/// Returns the number of words that [`LaunchStrips::new`] takes for `strips` strips.
pub const fn words(strips: u32) -> usize {
    2 + 2 * strips as usize
}

impl<'a> LaunchStrips<'a> {
    /// Makes a view; `None` for no stage, or if the number of words does not match `strips` strips.
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

    /// Tests if a part of `strip` may be written to its stage; the strip that used the stage before has
    /// `uses` uses.
    ///
    /// The first strips have no predecessor in their stage and may be filled at once. The caller passes the
    /// number of uses, since tiles of the last strip may be fewer than those of the others.
    #[inline(always)]
    pub fn may_fill(&self, strip: u32, uses: u32) -> StripReady {
        let Some(before) = strip.checked_sub(self.stages) else {
            return StripReady::Now;
        };
        // Acquire: pairs with the release of `end_use`; the writes come after all reads by earlier
        // users of the stage. With relaxed order a writer could overwrite a slice that is still
        // multiplied.
        self.ready(self.used.get(before as usize), uses)
    }

    /// Counts a part of `strip` as written. The threads that wrote it have met the calling one at a
    /// barrier. So this one addition publishes what all of them have written.
    #[inline(always)]
    pub fn fill(&self, strip: u32) {
        if let Some(filled) = self.filled.get(strip as usize) {
            // Release: a group that sees the count sees the part. The barrier before this call puts the
            // stores of all writing threads before it, so that one of them may count for all.
            filled.fetch_add(1, Order::Release, Scope::Gpu);
        }
    }

    /// Tests if `strip`, which has `parts` parts, may be used.
    #[inline(always)]
    pub fn may_use(&self, strip: u32, parts: u32) -> StripReady {
        // Acquire: pairs with the release of `fill`. Without it a group could read a part of the stage from
        // before it was written, although the count says that all parts are there.
        self.ready(self.filled.get(strip as usize), parts)
    }

    /// Counts a use of `strip` as ended. The threads that used it have met the calling one at a
    /// barrier. So the stage may be overwritten once all uses are counted.
    #[inline(always)]
    pub fn end_use(&self, strip: u32) {
        if let Some(used) = self.used.get(strip as usize) {
            // Release: a group that sees the count writes only after these reads. Otherwise the next slice
            // could overwrite the stage while a slow thread of this group still multiplies the old one.
            used.fetch_add(1, Order::Release, Scope::Gpu);
        }
    }

    /// Ends the filling by one of `groups` groups. After the last one missing strips are never published;
    /// users get `why`, which is not 0. The threads that filled have met the calling one at a barrier.
    #[inline(always)]
    pub fn end_filling(&self, groups: u32, why: u32) {
        // Release: the parts that this group has filled. Acquire: those of the groups that ended before; the
        // last group publishes the end for all of them, so a user that sees it sees every part that will ever
        // come.
        if self.ended.fetch_add(1, Order::AcqRel, Scope::Gpu) + 1 == groups {
            self.give_up(why);
        }
    }

    /// Aborts with the code `why`, which is not 0: nobody waits for missing strips any longer. Strips that
    /// were published can still be used; a stage with an unfinished use is not filled again.
    #[inline(always)]
    pub fn give_up(&self, why: u32) {
        // Release: a group that sees the code sees all parts filled before. It may then decide for good that
        // a missing part will not come, and no slice is lost that was complete.
        self.gave_up.store(why, Order::Release, Scope::Gpu);
    }

    #[inline(always)]
    fn ready(&self, count: Option<&AtomicU32>, whole: u32) -> StripReady {
        let Some(count) = count else {
            return StripReady::Never(u32::MAX);
        };
        // Loaded first, with acquire, which pairs with the release of `give_up`: parts filled before the
        // abort are then counted below. In the other order a strip could be complete and still be reported as
        // missing.
        let why = self.gave_up.load(Order::Acquire, Scope::Gpu);
        match count.load(Order::Acquire, Scope::Gpu) >= whole {
            true => StripReady::Now,
            false if why != 0 => StripReady::Never(why),
            false => StripReady::NotYet,
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
        let strips = LaunchStrips::new(&words, 3, 2).unwrap();
        assert_eq!(strips.may_fill(1, 0), StripReady::Now);
        assert_eq!(strips.may_use(0, 2), StripReady::NotYet);
        strips.fill(0);
        assert_eq!(strips.may_use(0, 2), StripReady::NotYet);
        strips.fill(0);
        assert_eq!(strips.may_use(0, 2), StripReady::Now);
        assert_eq!(strips.may_use(1, 2), StripReady::NotYet);
        strips.end_use(0);
        assert_eq!(strips.may_fill(2, 2), StripReady::NotYet);
        strips.end_use(0);
        assert_eq!(strips.may_fill(2, 2), StripReady::Now);
    }

    #[test]
    fn after_someone_gave_up_what_is_there_is_used_and_nothing_is_waited_for() {
        let words = memory(2);
        let strips = LaunchStrips::new(&words, 2, 1).unwrap();
        strips.fill(0);
        strips.give_up(7);
        assert_eq!(strips.may_use(0, 1), StripReady::Now);
        assert_eq!(strips.may_use(1, 1), StripReady::Never(7));
        assert_eq!(strips.may_fill(1, 1), StripReady::Never(7));
        strips.end_use(0);
        assert_eq!(strips.may_fill(1, 1), StripReady::Now);
        // Past the last strip.
        assert_eq!(strips.may_use(2, 1), StripReady::Never(u32::MAX));
        assert_eq!(strips.may_fill(3, 1), StripReady::Never(u32::MAX));
    }

    #[test]
    fn words_of_another_length_are_refused() {
        let words = memory(2);
        assert!(LaunchStrips::new(&words, 3, 1).is_none());
        assert!(LaunchStrips::new(&words, 2, 0).is_none());
        assert!(LaunchStrips::new(&words[..2], 0, 1).is_some());
    }
}
