//! The completion ring of a shared queue: whoever holds the lock takes completions for everyone.

use super::{DONE, Drained, SharedQueue};
use crate::group::{Group, unroll};
use crate::queue_state::{QueueState, SlotWord, slot_of, status_of};
use crate::spec::completion::phase_of;
use crate::sync::{Order, Scope, fence};

/// Passes over the completion queue under one hold of the drain lock.
const DRAIN_ROUNDS: u32 = 4;
/// The largest [`Group::READS`].
const ENTRIES: usize = if cfg!(loom) { 2 } else { 4 };

impl SharedQueue<'_> {
    /// Takes the completions that are there, for everyone, unless another group is doing that.
    #[inline(always)]
    pub fn drain<G: Group>(&self, group: &G) -> Drained {
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
        let (mut head, mut rang) = (start, false);
        for _ in 0..DRAIN_ROUNDS {
            let found = self.drain_once(group, head);
            let next = head.wrapping_add(found);
            rang |= self.state.gives_back(head, next);
            head = next;
            if found < G::READS * group.size() {
                break;
            }
        }
        if group.leads() {
            // Release: the next holder rings the head doorbell after this one did.
            let order = if rang { Order::Release } else { Order::Relaxed };
            lock.store(head << 1, order, Scope::Gpu);
        }
        Drained::Took(head.wrapping_sub(start))
    }

    /// One wide read of the completion ring. Under the drain lock.
    #[inline(always)]
    fn drain_once<G: Group>(&self, group: &G, head: u32) -> u32 {
        let state = &self.state;
        let cq = &self.memory.cq;
        let at = |k: usize| head.wrapping_add(k as u32 * group.size() + group.rank());
        let mut uppers = [0; ENTRIES];
        // Acquire: pairs with the controller's write of the phase tag; dwords 0-1 and the data are
        // visible after it. Several reads in flight at once are fenced together instead.
        let order = if G::READS == 1 {
            Order::Acquire
        } else {
            Order::Relaxed
        };
        unroll!(ENTRIES, k => {
            // The phase of what is not read is the wrong one.
            uppers[k] = u64::from(!state.phase(at(k))) << 48;
            if (k as u32) < G::READS {
                uppers[k] = cq.upper(at(k) & state.mask(), order);
            }
        });
        let mut found = 0;
        unroll!(ENTRIES, k => {
            if found == k as u32 * group.size() {
                // No entry a whole lap ahead passes for new: there are fewer commands than entries.
                let new = phase_of(uppers[k]) == state.phase(at(k));
                found += group.vote(new).leading;
            }
        });
        if found == 0 {
            return 0;
        }
        let mut ends = [SlotWord::NONE; ENTRIES];
        let (mut wants_dw0, mut fault) = (false, 0);
        unroll!(ENTRIES, k => {
            if at(k).wrapping_sub(head) < found {
                ends[k] = state.strike(uppers[k]);
            }
        });
        unroll!(ENTRIES, k => {
            if at(k).wrapping_sub(head) < found {
                if state.fits(uppers[k], ends[k]) {
                    wants_dw0 |= ends[k].wants_dw0();
                } else {
                    fault = state.judge(uppers[k], ends[k]);
                    ends[k] = SlotWord::NONE;
                }
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
        let next = head.wrapping_add(found);
        let rung = state.rung().load(Order::Relaxed, Scope::Gpu);
        if group.leads() {
            // Before any slot is free: see `fetched`.
            state.head().store(next, Order::Relaxed, Scope::Gpu);
        }
        group.sync();
        unroll!(ENTRIES, k => {
            if ends[k].pending() {
                if !state.head_fits(uppers[k], at(k).wrapping_add(1), rung) {
                    fault = QueueState::bad_head(uppers[k]);
                }
                let mut result = DONE | u64::from(status_of(uppers[k]).0) << 32;
                if ends[k].wants_dw0() {
                    result |= cq.lower(at(k) & state.mask()) & u64::from(u32::MAX);
                }
                self.cells.set(ends[k].tag(), result);
                // Relaxed: the fence above released what was done with the slot.
                let slot = slot_of(uppers[k]);
                state
                    .free(slot / 32)
                    .fetch_or(1 << (slot % 32), Order::Relaxed, Scope::Gpu);
            }
        });
        if fault != 0 {
            state.refuse(fault);
        }
        if state.gives_back(head, next) {
            let late_reads = group.vote(wants_dw0).total > 0;
            group.sync();
            if group.leads() {
                if late_reads || G::READS == 1 {
                    self.memory.cq_doorbell.ring(next & state.mask());
                } else {
                    self.memory.cq_doorbell.ring_fenced(next & state.mask());
                }
            }
        }
        found
    }
}
