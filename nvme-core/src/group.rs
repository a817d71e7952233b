//! Threads that act together on a queue: one thread, the lanes of a warp, a thread block, or host threads.
//!
//! Invariant: every member calls the same operations in the same order. Only [`Group::sync`] orders
//! memory; votes, broadcasts and swaps exchange values and order nothing.

use crate::trace::Event;

/// What a vote found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vote {
    /// Members that voted yes.
    pub total: u32,
    /// Of them, those of lower rank than this one.
    pub before: u32,
    /// Members from rank 0 on that voted yes without a gap.
    pub leading: u32,
}

/// Members that act together. The member of rank 0 leads.
pub trait Group {
    /// The most members that a group of this type has.
    const MOST: u32 = u32::MAX;

    /// Completions that a member reads at once: 1, or where [`MOST`](Self::MOST) is 1 an even number from 4 to
    /// 16. A lone member keeps several reads under way; of several members each reads one.
    ///
    /// ```compile_fail,E0080
    /// # use nvme_core::{SharedQueue, group::{Group, Vote}};
    /// struct Wide;
    /// impl Group for Wide {
    ///     const READS: u32 = 4;
    ///     fn size(&self) -> u32 { 2 }
    /// #   fn rank(&self) -> u32 { 0 }
    /// #   fn sync(&self) {}
    /// #   fn vote(&self, _: bool) -> Vote { Vote { total: 0, before: 0, leading: 0 } }
    /// #   fn broadcast(&self, value: u32) -> u32 { value }
    /// }
    /// fn main() {
    ///     let drain: fn(&SharedQueue<'_>, &Wide) -> _ = |queue, wide| queue.drain(wide);
    /// }
    /// ```
    const READS: u32 = 1;

    /// Number of members, at least 1 and at most [`MOST`](Self::MOST).
    fn size(&self) -> u32;

    /// This member's rank, below [`size`](Self::size).
    fn rank(&self) -> u32;

    /// Waits for every member; what each did to memory before happens before what each does after.
    fn sync(&self);

    /// Counts the members that say yes.
    fn vote(&self, mine: bool) -> Vote;

    /// The leader's value.
    fn broadcast(&self, value: u32) -> u32;

    /// Whether the members form whole tiles of ranks, so that eight can write one entry together.
    #[inline(always)]
    fn tiles(&self) -> bool {
        false
    }

    /// The value of member `from` (0 to 7) of this member's tile. Only when [`tiles`](Self::tiles).
    #[inline(always)]
    fn of_tile(&self, value: u32, _from: u32) -> u32 {
        value
    }

    /// The value of the member whose rank differs in the bits of `mask` (1 to 7). Only when
    /// [`tiles`](Self::tiles).
    #[inline(always)]
    fn swap(&self, value: u64, _mask: u32) -> u64 {
        value
    }

    /// Whether this member leads.
    #[inline(always)]
    fn leads(&self) -> bool {
        self.rank() == 0
    }
}

/// Whether [`Group::READS`] is what it may be.
pub(crate) const fn reads_are_possible<G: Group>() -> bool {
    G::READS == 1 || G::MOST == 1 && G::READS.is_multiple_of(2) && G::READS >= 4 && G::READS <= 16
}

/// A group of one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Alone;

impl Group for Alone {
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
    fn vote(&self, mine: bool) -> Vote {
        let total = u32::from(mine);
        Vote {
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

/// Something that a group does together, whichever group it turns out to be.
pub trait GroupOp {
    /// What each member gets.
    type Output;

    /// The member's part.
    fn run<G: Group>(self, group: &G) -> Self::Output;
}

/// What a shared queue did on the bus, besides writing entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// Rang the submission queue's doorbell.
    SqDoorbell,
    /// Rang the completion queue's doorbell.
    CqDoorbell,
    /// Loaded from the completion ring so many times; a group that reads together counts once.
    CqLoads(u32),
}

/// Where code runs: its clock, its pauses, and the threads that run converged with it.
///
/// The core never reads a clock by itself: code that waits is given one of these.
pub trait ExecContext {
    /// Nanoseconds since any fixed start, not decreasing.
    fn now_ns(&self) -> u64;

    /// Lets other threads run; longer when `turn`, the number of pauses so far in one wait, grows.
    fn pause(&self, turn: u32);

    /// Called with what was done on the bus, by one thread of a group; for counters.
    #[inline(always)]
    fn on_bus_access(&self, _traffic: Traffic) {}

    /// Called with what happens to the calling thread's own command, when the thread sees it: that it was
    /// placed, and its end; for traces. Threads that wait together may go on much later.
    #[inline(always)]
    fn record(&self, _event: impl FnOnce() -> Event) {}

    /// Runs `op` with the threads that run in step with this one now and name the same `key`. Which
    /// they are does not matter to the result, only to the speed.
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

/// Turns eight entries, one a member, into eight words, one of each entry: afterwards member `r` of an
/// tile holds word `r` of the entry of each member, in the members' order.
#[inline(always)]
pub(crate) fn transpose<G: Group>(group: &G, words: &mut [u64; 8]) {
    stage::<G, 4>(group, words);
    stage::<G, 2>(group, words);
    stage::<G, 1>(group, words);
}

#[inline(always)]
fn stage<G: Group, const MASK: usize>(group: &G, words: &mut [u64; 8]) {
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
