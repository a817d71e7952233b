//! The completion ring of a shared queue: the holder of the lock reads completions for all threads. The lock
//! is held while they are read; results are delivered to their cells after it, while the next group may read.
//!
//! What is usual is done without a branch, so that a GPU has every entry of a pass under way at once;
//! what is rare is done one by one afterwards.

use super::{DONE, Drained, SharedQueue};
use crate::group::{Group, Traffic, reads_are_possible, unroll};
use crate::queue_state::{DrainWord, SlotWord, slot_of};
use crate::sync::{Order, Scope, fence, opaque};

/// Passes over the completion queue in a row.
const DRAIN_ROUNDS: u32 = 4;
/// The largest [`Group::READS`].
const ENTRIES: usize = if cfg!(loom) { 4 } else { 16 };

/// What [`SharedQueue::drain_once`] returns while another group holds the lock.
const BUSY: u32 = u32::MAX;

/// What one member read in a pass: upper words, and the words of the slots that they name.
struct Read {
    uppers: [u64; ENTRIES],
    ends: [SlotWord; ENTRIES],
}

impl SharedQueue<'_> {
    /// Reads the completions that are there, for all threads, unless another group is reading them. Zero only
    /// when there are none: a lone member leaves one or two of several to the next look. What another group
    /// has read before may not be delivered yet.
    #[inline(always)]
    pub fn drain<G: Group>(&self, group: &G) -> Drained {
        self.drain_observed(group, &|_| {})
    }

    /// As [`drain`](Self::drain); the leader calls `on_bus` with what was done on the bus.
    #[inline(always)]
    pub(super) fn drain_observed<G: Group>(&self, group: &G, on_bus: &impl Fn(Traffic)) -> Drained {
        const {
            assert!(
                reads_are_possible::<G>(),
                "READS is 1, or the group is one member"
            )
        };
        // As many as are taken when there are enough.
        let all = if G::READS == 1 { 1 } else { G::READS - 2 };
        let mut took = 0;
        for round in 0..DRAIN_ROUNDS {
            let found = self.drain_once(group, on_bus);
            if found == BUSY {
                if round == 0 {
                    return Drained::Busy;
                }
                break;
            }
            took += found;
            if found < all * group.size() {
                break;
            }
        }
        Drained::Took(took)
    }

    /// Reads completions under the lock, and delivers them after it, while the next group may read.
    #[inline(always)]
    fn drain_once<G: Group>(&self, group: &G, on_bus: &impl Fn(Traffic)) -> u32 {
        let lock = self.state.drain_word();
        let mut was = DrainWord::LOCKED.bits();
        if group.leads() {
            was = lock.load(Order::Relaxed, Scope::Gpu);
            if !DrainWord::of_bits(was).is_locked() {
                // Relaxed: the head is in the word itself, and the rest is ordered by completions and by the
                // counts of those that were read.
                was = lock.fetch_or(DrainWord::LOCKED.bits(), Order::Relaxed, Scope::Gpu);
            }
        }
        let was = DrainWord::of_bits(group.broadcast(was));
        if was.is_locked() {
            return BUSY;
        }
        let (head, owed) = (was.head(), was.owed());
        let quarter = self.state.quarter_of(head);
        let oldest = quarter.wrapping_sub(owed);
        let mut read = 0;
        if owed != 0 && group.leads() {
            // Not used before `look`: its latency is hidden there.
            read = self.state.read_of(oldest).load(Order::Relaxed, Scope::Gpu);
        }
        // What the controller could post to, whatever it did: no more than the ring is ever owed.
        let end = self
            .state
            .quarter_start(oldest)
            .wrapping_add(self.state.mask() + 1);
        let mut uppers = [0; ENTRIES];
        let found = self
            .look(group, head, &mut uppers)
            .min(end.wrapping_sub(head));
        if group.leads() {
            let releases = owed != 0 && self.release_quarter(oldest, read);
            let next = head.wrapping_add(found);
            let passed = self.state.quarter_of(next).wrapping_sub(quarter);
            let change = DrainWord::unlocking(found, passed, releases);
            // A read-modify-write in any case: it hands on what others released, which a store would not.
            // Release: the next one who rings the head doorbell does so after this one did.
            let order = if releases {
                Order::Release
            } else {
                Order::Relaxed
            };
            lock.fetch_add(change, order, Scope::Gpu);
            if releases {
                on_bus(Traffic::CqDoorbell);
            }
            // One load of each member, or of two halves the second when the first found something.
            let half = G::READS.div_ceil(2);
            on_bus(Traffic::CqLoads(if found == 0 { half } else { G::READS }));
        }
        if found != 0 {
            self.deliver(group, head, found, uppers);
        }
        found
    }

    /// Releases the `oldest` quarter of the ring that is owed to the controller, if all its entries were
    /// read; `read` of them were. By the leader, under the lock.
    #[inline(always)]
    fn release_quarter(&self, oldest: u32, read: u32) -> bool {
        let state = &self.state;
        // Entries of the next pass over the ring are not read before these are released. Modulo 2^26, a
        // quarter of 2^28.
        let more = read.wrapping_sub(state.read_after(oldest)) << (DrainWord::DROPPED_BITS + 2);
        let releases = more as i32 >= 0;
        if releases {
            // Acquire: pairs with the release of all who counted there, and of the last one who rang.
            // Release: what they read was read before the controller sees the doorbell.
            fence(Order::AcqRel, Scope::Sys);
            let end = state.quarter_start(oldest.wrapping_add(1));
            self.memory.cq_doorbell.ring_fenced(end & state.mask());
        }
        releases
    }

    /// Counts the entries from `head` on as read. By the leader.
    #[inline(always)]
    fn count_read(&self, head: u32, found: u32, order: Order) {
        let state = &self.state;
        // Before a slot is free: see `wait_until_entry_reusable`.
        state.read().fetch_add(found, order, Scope::Gpu);
        let (mut at, mut left) = (head, found);
        while left != 0 {
            let quarter = state.quarter_of(at);
            let here = left.min(
                state
                    .quarter_start(quarter.wrapping_add(1))
                    .wrapping_sub(at),
            );
            state.read_of(quarter).fetch_add(here, order, Scope::Gpu);
            at = at.wrapping_add(here);
            left -= here;
        }
    }

    /// Reads the entries from `head` on, up to `G::READS` a member; how many of them are new.
    ///
    /// A GPU serves one system-wide read at a time of two neighbours (a sector of 32 bytes), so every
    /// second entry is read first, then those between them.
    #[inline(always)]
    fn look<G: Group>(&self, group: &G, head: u32, uppers: &mut [u64; ENTRIES]) -> u32 {
        let state = &self.state;
        let cq = &self.memory.cq;
        let at = |k: usize| head.wrapping_add(k as u32 * group.size() + group.rank());
        if G::READS == 1 {
            // Acquire: pairs with the controller's write of the phase tag; dwords 0-1 and the data are
            // visible after it.
            uppers[0] = cq.upper(at(0), Order::Acquire);
            return group.vote(state.is_new(uppers[0], at(0)) != 0).leading;
        }
        unroll!(ENTRIES, k => {
            if (k as u32) < G::READS && k & 1 == 0 {
                uppers[k] = cq.upper(at(k), Order::Relaxed);
            }
        });
        // No entry a whole pass ahead passes for new: there are fewer commands than entries.
        let mut new = 0u32;
        unroll!(ENTRIES, k => {
            if (k as u32) < G::READS && k & 1 == 0 {
                new |= state.is_new(uppers[k], at(k)) << k;
            }
        });
        if new & 1 == 0 {
            return 0;
        }
        // The last of the even ones; what comes after it is left.
        let last = opaque((new | 0xAAAA_AAAA).trailing_ones() - 2);
        unroll!(ENTRIES, k => {
            if (k as u32) < G::READS - 2 && k & 1 == 1 {
                uppers[k] = cq.upper(at(k), Order::Relaxed);
            }
        });
        // Acquire: as above, for it and for all before it, which were posted before. Issued with the
        // reads above, so it costs no trip of its own.
        cq.upper(at(last as usize), Order::Acquire);
        unroll!(ENTRIES, k => {
            if (k as u32) < G::READS - 2 && k & 1 == 1 {
                new |= state.is_new(uppers[k], at(k)) << k;
            }
        });
        new.trailing_ones().min(last + 1)
    }

    /// Stores the results of the completions found into their cells, and frees the slots.
    #[inline(always)]
    fn deliver<G: Group>(&self, group: &G, head: u32, found: u32, uppers: [u64; ENTRIES]) {
        let state = &self.state;
        let at = |k: usize| head.wrapping_add(k as u32 * group.size() + group.rank());
        let is_found = |k: usize| at(k).wrapping_sub(head) < found;
        let mut read = Read {
            uppers,
            ends: [SlotWord::NONE; ENTRIES],
        };
        unroll!(ENTRIES, k => {
            if (k as u32) < G::READS {
                read.ends[k] = state.take_out_of_flight_if(is_found(k), read.uppers[k]);
            }
        });
        group.sync();
        // By every member. Release: pairs with the acquire of a cell, of a slot, and of the counts.
        fence(Order::Release, Scope::Gpu);
        let head = opaque(head);
        let at = |k: usize| head.wrapping_add(k as u32 * group.size() + group.rank());
        let is_found = |k: usize| at(k).wrapping_sub(head) < found;
        let rung = state.rung().load(Order::Relaxed, Scope::Gpu);
        let mut rare = 0u32;
        unroll!(ENTRIES, k => {
            if (k as u32) < G::READS {
                let (upper, end) = (read.uppers[k], read.ends[k]);
                let usual = state.matches(upper, end)
                    & state.is_possible(upper, at(k).wrapping_add(1), rung)
                    & !end.wants_dw0();
                rare |= u32::from(is_found(k) & !usual) << k;
            }
        });
        let mut rare_ends = 0;
        if rare != 0 {
            rare_ends = self.take_rare(&read, rare, at, rung);
        }
        let late = group.vote(rare != 0).total > 0;
        if late {
            group.sync();
        }
        if group.leads() {
            // Release: dwords 0 were read after the fence.
            let order = if late { Order::Release } else { Order::Relaxed };
            self.count_read(head, found, order);
        }
        group.sync();
        unroll!(ENTRIES, k => {
            if (k as u32) < G::READS {
                let (upper, end) = (read.uppers[k], read.ends[k]);
                let ends = is_found(k) & (rare >> k & 1 == 0);
                self.cells.set_if(ends, end.tag(), cell_value(upper));
                // Relaxed: the fence above released what was done with the slot.
                state.free_if(ends, slot_of(upper));
            }
        });
        if rare_ends != 0 {
            unroll!(ENTRIES, k => {
                state.free_if(rare_ends >> k & 1 != 0, slot_of(read.uppers[k]));
            });
        }
    }

    /// Takes those of the entries in `rare` that want dword 0 or are not what a controller may post; those
    /// whose commands have ended. Their slots are free only once they were counted: a thread that claims one waits for
    /// the count (see [`wait_until_entry_reusable`](Self::wait_until_entry_reusable)).
    #[inline(always)]
    fn take_rare(&self, read: &Read, rare: u32, at: impl Fn(usize) -> u32, rung: u32) -> u32 {
        let state = &self.state;
        let mut ends = rare;
        let mut rest = rare;
        while rest != 0 {
            let index = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            let (mut upper, mut end) = (0, SlotWord::NONE);
            unroll!(ENTRIES, k => {
                if k == index {
                    (upper, end) = (read.uppers[k], read.ends[k]);
                }
            });
            if !state.matches(upper, end)
                || !state.is_possible(upper, at(index).wrapping_add(1), rung)
            {
                state.refuse(state.classify_fault(upper, end));
                ends &= !(1 << index);
                continue;
            }
            let mut result = cell_value(upper);
            if end.wants_dw0() {
                result |= self.memory.cq.lower(at(index)) & u64::from(u32::MAX);
            }
            self.cells.set_if(true, end.tag(), result);
        }
        ends
    }
}

/// The value of the cell of a command whose completion has this upper word: status and CID stay where they are.
#[inline(always)]
fn cell_value(upper: u64) -> u64 {
    upper & u64::from(u32::MAX) << 32 | DONE
}
