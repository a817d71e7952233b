//! A group that calls a test between the steps of one member, so that the test can let other members act there.

use nvme_core::group::{GroupVote, ThreadGroup};

/// A group that calls `told` before each vote and broadcast of this member.
pub struct Told<G, F> {
    group: G,
    told: F,
}

/// The next action of a [`Told`] group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Telling {
    /// [`ThreadGroup::vote`].
    Vote,
    /// [`ThreadGroup::broadcast`].
    Broadcast,
}

impl<G: ThreadGroup, F: Fn(Telling)> Told<G, F> {
    /// Makes a group for the same member of the same group.
    pub fn new(group: G, told: F) -> Self {
        Self { group, told }
    }
}

impl<G: ThreadGroup, F: Fn(Telling)> ThreadGroup for Told<G, F> {
    const MOST: u32 = G::MOST;
    const READS: u32 = G::READS;

    fn size(&self) -> u32 {
        self.group.size()
    }

    fn rank(&self) -> u32 {
        self.group.rank()
    }

    #[track_caller]
    fn sync(&self) {
        self.group.sync();
    }

    fn vote(&self, mine: bool) -> GroupVote {
        (self.told)(Telling::Vote);
        self.group.vote(mine)
    }

    fn broadcast(&self, value: u32) -> u32 {
        (self.told)(Telling::Broadcast);
        self.group.broadcast(value)
    }
}
