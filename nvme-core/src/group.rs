//! Threads that act together on a queue: one thread, the lanes of a warp, a thread block, or host threads.
//!
//! Invariant: every member calls the same operations in the same order. Only [`ThreadGroup::sync`] orders memory;
//! votes, broadcasts and swaps exchange values and order nothing.
//!
//! [`ExecContext`] is the other half: the clock and the pauses of the place that the code runs in.

use crate::trace::TraceEvent;

/// The result of a vote.
///
/// From one vote a member learns how many members take part and its own place among them, which is enough to
/// distribute slots, tickets and ring entries without further exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupVote {
    /// Members that voted yes.
    pub total: u32,
    /// Number of the voting members with a lower rank than this member.
    pub before: u32,
    /// Length of the run of yes votes that begins at rank 0.
    pub leading: u32,
}

/// Threads that act together. The member of rank 0 is the leader.
pub trait ThreadGroup {
    /// Limit of the members of a group of this type.
    const MOST: u32 = u32::MAX;

    /// Completions that a member reads at once: 1, or an even number from 4 to 16 if [`MOST`](Self::MOST) is
    /// 1. A lone member keeps several reads in flight; of several members each reads one.
    ///
    /// ```compile_fail,E0080
    /// # use nvme_core::{SharedQueue, group::{ThreadGroup, GroupVote}};
    /// struct Wide;
    /// impl ThreadGroup for Wide {
    ///     const READS: u32 = 4;
    ///     fn size(&self) -> u32 { 2 }
    /// #   fn rank(&self) -> u32 { 0 }
    /// #   fn sync(&self) {}
    /// #   fn vote(&self, _: bool) -> GroupVote { GroupVote { total: 0, before: 0, leading: 0 } }
    /// #   fn broadcast(&self, value: u32) -> u32 { value }
    /// }
    /// fn main() {
    ///     let drain: fn(&SharedQueue<'_>, &Wide) -> _ = |queue, wide| queue.drain(wide);
    /// }
    /// ```
    const READS: u32 = 1;

    /// Returns the number of members, at least 1 and at most [`MOST`](Self::MOST).
    fn size(&self) -> u32;

    /// Returns this member's rank, below [`size`](Self::size).
    fn rank(&self) -> u32;

    /// Waits for every member; what each did to memory before happens before what each does after.
    fn sync(&self);

    /// Counts the members whose `mine` is true.
    fn vote(&self, mine: bool) -> GroupVote;

    /// Returns the leader's value to every member.
    fn broadcast(&self, value: u32) -> u32;

    /// True if the members form whole tiles of eight ranks, so that eight can write one entry together.
    #[inline(always)]
    fn tiles(&self) -> bool {
        false
    }

    /// Returns the value of member `from` (0 to 7) of this member's tile. Only if [`tiles`](Self::tiles) is
    /// true.
    #[inline(always)]
    fn of_tile(&self, value: u32, _from: u32) -> u32 {
        value
    }

    /// Returns the value of the member whose rank differs in the bits of `mask` (1 to 7). Only if
    /// [`tiles`](Self::tiles) is true. The tile's lanes call it together, as with every exchange
    /// between lanes.
    #[inline(always)]
    fn swap(&self, value: u64, _mask: u32) -> u64 {
        value
    }

    /// True if this member leads.
    #[inline(always)]
    fn leads(&self) -> bool {
        self.rank() == 0
    }
}

/// Tests whether [`ThreadGroup::READS`] follows its rule: 1, or for groups of one member an even number from 4 to 16.
pub(crate) const fn reads_are_possible<G: ThreadGroup>() -> bool {
    G::READS == 1 || G::MOST == 1 && G::READS.is_multiple_of(2) && G::READS >= 4 && G::READS <= 16
}

/// A group of one.
///
/// All exchanges are trivial, and it reads several completions at once, since a lone thread would otherwise
/// wait a full round trip of the bus for each of them.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoneThread;

impl ThreadGroup for LoneThread {
    const MOST: u32 = 1;
    const READS: u32 = if cfg!(loom) { 4 } else { 16 };

    #[inline(always)]
    fn size(&self) -> u32 {
        1
    }

    #[inline(always)]
    fn rank(&self) -> u32 {
        0
    }

    #[inline(always)]
    fn sync(&self) {}

    #[inline(always)]
    fn vote(&self, mine: bool) -> GroupVote {
        let total = u32::from(mine);
        GroupVote {
            total,
            before: 0,
            leading: total,
        }
    }

    #[inline(always)]
    fn broadcast(&self, value: u32) -> u32 {
        value
    }
}

/// An operation that a group does together, generic over the group's type.
///
/// It is a trait rather than a closure, because the operation is compiled once for each type of group, and
/// closures cannot be generic.
pub trait GroupOp {
    /// Result of each member.
    type Output;

    /// Does this member's share.
    fn run<G: ThreadGroup>(self, group: &G) -> Self::Output;
}

/// An access of a shared queue to the bus, other than writing entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BusTraffic {
    /// Rang the submission queue's doorbell.
    SqDoorbell,
    /// Rang the completion queue's doorbell.
    CqDoorbell,
    /// Loaded from the completion ring this number of times; a group that reads together counts once.
    CqLoads(u32),
}

/// The place that code runs in: its clock, its pauses, and the threads that run converged with it.
///
/// The core never reads a clock itself: code that waits is given one of these.
pub trait ExecContext {
    /// Returns nanoseconds since any fixed start, not decreasing.
    fn now_ns(&self) -> u64;

    /// Lets other threads run; longer when `turn`, the number of pauses so far in one wait, grows.
    fn pause(&self, turn: u32);

    /// Counts an access to the bus; one thread of a group calls it.
    #[inline(always)]
    fn on_bus_access(&self, _traffic: BusTraffic) {}

    /// Records an event of the calling thread's own command at the moment the thread sees it: its submission
    /// and its end; for traces. Threads that wait together may see an end much later than it happened.
    #[inline(always)]
    fn record(&self, _event: impl FnOnce() -> TraceEvent) {}

    /// Runs `op` with the threads that are converged with this one now and pass the same `key`. The number of
    /// such threads does not matter to the result, only to the speed.
    fn converged<A: GroupOp>(&self, key: u64, op: A) -> A::Output;
}

/// `unroll!(N, k => body)`: the body for each `k` below `N`, at most 16, unrolled whatever its size. An
/// array that is indexed by `k` stays in registers on a GPU; a closure would put it in memory.
macro_rules! unroll {
    ($count:expr, $k:ident => $body:block) => {
        const { assert!($count <= 16) };
        $crate::group::unroll!(@step $count, $k, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
    };
    (@step $count:expr, $k:ident, $body:block, $($index:literal)*) => {
        $(if $count > $index {
            let $k: usize = $index;
            $body
        })*
    };
}
pub(crate) use unroll;

/// Transposes eight entries, one a member, into eight words of one index each: afterwards member `r` of a
/// tile holds word `r` of the entry of each member, in the members' order.
#[inline(always)]
pub(crate) fn transpose<G: ThreadGroup>(group: &G, words: &mut [u64; 8]) {
    stage::<G, 4>(group, words);
    stage::<G, 2>(group, words);
    stage::<G, 1>(group, words);
}

#[inline(always)]
fn stage<G: ThreadGroup, const MASK: usize>(group: &G, words: &mut [u64; 8]) {
    let high = group.rank() as usize & MASK != 0;
    unroll!(8, low => {
        if low & MASK == 0 {
            let given = if high { words[low] } else { words[low | MASK] };
            let taken = group.swap(given, MASK as u32);
            if high {
                words[low] = taken;
            } else {
                words[low | MASK] = taken;
            }
        }
    });
}
