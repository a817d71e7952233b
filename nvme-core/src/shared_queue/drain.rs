//! The completion ring of a shared queue: whoever holds the lock takes completions for everyone.
//!
//! What is usual is done without a branch, so that a GPU has every entry of a pass under way at once;
//! what is rare is done one by one afterwards.

use super::{DONE, Drained, SharedQueue};
use crate::group::{Group, Traffic, unroll};
use crate::queue_state::{QueueState, SlotWord, slot_of, status_of};
use crate::sync::{Order, Scope, anew, fence};

/// Passes over the completion queue under one hold of the drain lock.
const DRAIN_ROUNDS: u32 = 4;
/// The largest [`Group::READS`].
const ENTRIES: usize = if cfg!(loom) { 2 } else { 16 };

/// What one member read in a pass: upper words, and the words of the slots that they name.
struct Read {
    uppers: [u64; ENTRIES],
    ends: [SlotWord; ENTRIES],
}

impl SharedQueue<'_> {
    /// Takes the completions that are there, for everyone, unless another group is doing that.
    #[inline(always)]
    pub fn drain<G: Group>(&self, group: &G) -> Drained {
        self.drain_seen(group, &|_| {})
    }

    /// As [`drain`](Self::drain); the leader tells `saw` what was done on the bus.
    #[inline(always)]
    pub(super) fn drain_seen<G: Group>(&self, group: &G, saw: &impl Fn(Traffic)) -> Drained {
        let lock = self.state.drain();
        let mut was = 1;
        if group.leads() {
            was = lock.load(Order::Relaxed, Scope::Gpu);
            if was & 1 == 0 {
                // Relaxed: the head is in the word itself, and the rest is ordered by completions.
                was = lock.fetch_or(1, Order::Relaxed, Scope::Gpu);
            }
        }
        let was = group.broadcast(was);
        if was & 1 != 0 {
            return Drained::Busy;
        }
        let start = was >> 1;
        let (mut head, mut rang, mut late, mut loads) = (start, false, false, 0);
        for _ in 0..DRAIN_ROUNDS {
            let (found, read_late) = self.drain_once(group, head, saw);
            // One load of each member, or of two halves the second when the first found something.
            let half = G::READS.div_ceil(2);
            loads += if found == 0 { half } else { G::READS };
            // What was read late in a pass before this one is fenced by this one, if it took anything.
            late = read_late || late && found == 0;
            let next = head.wrapping_add(found);
            rang |= self.state.gives_back(head, next);
            head = next;
            if found < G::READS * group.size() {
                break;
            }
        }
        let late = group.vote(late).total > 0;
        if late {
            group.sync();
        }
        if group.leads() {
            // Release: the next holder rings the head doorbell after this one did, and after every member
            // has read what that doorbell may give back.
            let order = if rang || late {
                Order::Release
            } else {
                Order::Relaxed
            };
            if head == start {
                // Hands on what the last holder released: a read-modify-write does, a store would not.
                lock.fetch_and(!1, Order::Relaxed, Scope::Gpu);
            } else {
                lock.store(head << 1, order, Scope::Gpu);
            }
            saw(Traffic::CqLoads(loads));
        }
        Drained::Took(head.wrapping_sub(start))
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
        // Acquire: pairs with the controller's write of the phase tag; dwords 0-1 and the data are
        // visible after it. Several reads in flight at once are fenced together instead.
        let order = if G::READS == 1 {
            Order::Acquire
        } else {
            Order::Relaxed
        };
        unroll!(ENTRIES, k => {
            if (k as u32) < G::READS && k & 1 == 0 {
                uppers[k] = cq.upper(at(k), order);
            }
        });
        // No entry a whole lap ahead passes for new: there are fewer commands than entries.
        let mut new = 0u32;
        unroll!(ENTRIES, k => {
            if (k as u32) < G::READS && k & 1 == 0 {
                new |= state.is_new(uppers[k], at(k)) << k;
            }
        });
        if G::READS == 1 {
            return group.vote(new != 0).leading;
        }
        if new & 1 == 0 {
            return 0;
        }
        unroll!(ENTRIES, k => {
            if (k as u32) < G::READS && k & 1 == 1 {
                uppers[k] = cq.upper(at(k), order);
            }
        });
        unroll!(ENTRIES, k => {
            if (k as u32) < G::READS && k & 1 == 1 {
                new |= state.is_new(uppers[k], at(k)) << k;
            }
        });
        new.trailing_ones()
    }

    /// One wide read of the completion ring. Under the drain lock.
    #[inline(always)]
    fn drain_once<G: Group>(&self, group: &G, head: u32, saw: &impl Fn(Traffic)) -> (u32, bool) {
        let state = &self.state;
        let at = |k: usize| head.wrapping_add(k as u32 * group.size() + group.rank());
        let mut read = Read {
            uppers: [0; ENTRIES],
            ends: [SlotWord::NONE; ENTRIES],
        };
        let found = self.look(group, head, &mut read.uppers);
        if found == 0 {
            return (0, false);
        }
        let taken = |k: usize| at(k).wrapping_sub(head) < found;
        unroll!(ENTRIES, k => {
            if (k as u32) < G::READS {
                read.ends[k] = state.strike_if(taken(k), read.uppers[k]);
            }
        });
        group.sync();
        // By every member. Release: pairs with the acquire of a cell, and of a slot; and the reads of the
        // entries are over before the head doorbell gives them back. Acquire: for reads without it.
        let scope = if G::READS == 1 {
            Scope::Gpu
        } else {
            Scope::Sys
        };
        fence(Order::AcqRel, scope);
        let head = anew(head);
        let next = head.wrapping_add(found);
        let rung = state.rung().load(Order::Relaxed, Scope::Gpu);
        if group.leads() {
            // Before any slot is free: see `fetched`.
            state.head().store(next, Order::Relaxed, Scope::Gpu);
        }
        group.sync();
        let at = |k: usize| head.wrapping_add(k as u32 * group.size() + group.rank());
        let taken = |k: usize| at(k).wrapping_sub(head) < found;
        let mut rare = 0u32;
        unroll!(ENTRIES, k => {
            if (k as u32) < G::READS {
                let (upper, end) = (read.uppers[k], read.ends[k]);
                let usual = state.fits(upper, end)
                    & state.head_fits(upper, at(k).wrapping_add(1), rung)
                    & !end.wants_dw0();
                rare |= u32::from(taken(k) & !usual) << k;
                let ends = taken(k) & usual;
                self.cells.set_if(ends, end.tag(), DONE | u64::from(status_of(upper).0) << 32);
                // Relaxed: the fence above released what was done with the slot.
                state.free_if(ends, slot_of(upper));
            }
        });
        if rare != 0 {
            self.take_rare(&read, rare, at, rung);
        }
        if state.gives_back(head, next) {
            let late_reads = group.vote(rare != 0).total > 0;
            group.sync();
            if group.leads() {
                saw(Traffic::CqDoorbell);
                if late_reads || G::READS == 1 {
                    self.memory.cq_doorbell.ring(next & state.mask());
                } else {
                    self.memory.cq_doorbell.ring_fenced(next & state.mask());
                }
            }
        }
        (found, rare != 0)
    }

    /// Takes those of the entries in `rare` that want dword 0 or are not what a controller may post.
    #[inline(always)]
    fn take_rare(&self, read: &Read, rare: u32, at: impl Fn(usize) -> u32, rung: u32) {
        let state = &self.state;
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
            if !state.fits(upper, end) {
                state.refuse(state.judge(upper, end));
                continue;
            }
            if !state.head_fits(upper, at(index).wrapping_add(1), rung) {
                state.refuse(QueueState::bad_head(upper));
            }
            let mut result = DONE | u64::from(status_of(upper).0) << 32;
            if end.wants_dw0() {
                result |= self.memory.cq.lower(at(index)) & u64::from(u32::MAX);
            }
            self.cells.set_if(true, end.tag(), result);
            state.free_if(true, slot_of(upper));
        }
    }
}
