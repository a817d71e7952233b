//! Reading completions: each member of the group reads some entries of the completion ring at once.

use super::CollectiveQueue;
use crate::error::ControllerFault;
use crate::group::{ThreadGroup, unroll};
use crate::queue_state::{SlotWord, slot_of, status_of};
use crate::spec::completion::phase_of;
use crate::spec::{Cid, Status};
use crate::sync::{Order, Scope, fence};

/// Completion queue entries in a line of memory of 128 bytes.
const LINE: u32 = 8;

/// A completed command, as seen by the member that read its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaggedCompletion {
    /// Tag that the command was submitted with.
    pub tag: u32,
    /// The command's identifier.
    pub cid: Cid,
    /// The controller's answer.
    pub status: Status,
    /// Dword 0 of the completion; 0 unless the command wants it.
    pub dw0: u32,
    /// True if the command had been reported as expired before.
    pub late: bool,
}

impl<G: ThreadGroup> CollectiveQueue<'_, G> {
    /// Takes up to `ENTRIES` completions a member, and calls `done` with each, on the member that read it.
    ///
    /// Returns the number of completions. `done` must not use the group, since members may call it in
    /// different numbers.
    ///
    /// # Errors
    /// To all members: the controller violated the protocol. The other completions that were read are
    /// accounted for; the queue takes no commands until it is recovered.
    #[inline(always)]
    pub fn reap<const ENTRIES: usize>(
        &mut self,
        mut done: impl FnMut(TaggedCompletion),
    ) -> Result<u32, ControllerFault> {
        let (state, cq, group) = (self.state, &self.memory.cq, &self.group);
        let (head, rung) = (self.head, self.rung);
        let alone = group.size() == 1;
        // A group of tiles reads whole lines of memory, from the line that holds the head.
        let skip = if group.tiles() {
            head & state.mask() & (LINE - 1)
        } else {
            0
        };
        let at = |k: usize| {
            head.wrapping_sub(skip)
                .wrapping_add(k as u32 * group.size() + group.rank())
        };
        // Acquire: pairs with the controller's write of the phase tag; dwords 0-1 and the data are visible
        // after it. An acquire load would make each further load wait, so a member with several loads uses
        // relaxed ones and one fence below.
        let order = if ENTRIES == 1 {
            Order::Acquire
        } else {
            Order::Relaxed
        };
        let mut uppers = [0; ENTRIES];
        unroll!(ENTRIES, k => { uppers[k] = cq.upper(at(k), order); });
        let mut found = 0;
        unroll!(ENTRIES, k => {
            if found == k as u32 * group.size() {
                // The phase tag alone decides whether an entry is new. An entry of the next pass cannot be
                // mistaken for one of this pass, since fewer commands than entries are in flight. Entries
                // before the head were read earlier and count as new here, so that the run of new entries has
                // no gap.
                let read = k as u32 * group.size() + group.rank() < skip;
                let new = read || phase_of(uppers[k]) == state.phase(at(k));
                found += group.vote(new).leading;
            }
        });
        if found <= skip {
            return Ok(0);
        }
        found -= skip;
        let mut fault = 0;
        let mut ends = [SlotWord::NONE; ENTRIES];
        unroll!(ENTRIES, k => {
            if at(k).wrapping_sub(head) < found {
                let word = match alone {
                    true => state.take_out_of_flight_unshared(uppers[k]),
                    false => state.take_out_of_flight(uppers[k]),
                };
                ends[k] = word;
            }
        });
        unroll!(ENTRIES, k => {
            if at(k).wrapping_sub(head) < found
                && (!state.matches(uppers[k], ends[k])
                    || !state.is_possible(uppers[k], at(k).wrapping_add(1), rung))
            {
                fault = state.classify_fault(uppers[k], ends[k]);
                ends[k] = SlotWord::NONE;
            }
        });
        // Every member has finished its loads before the leader rings the head doorbell, after
        // which the controller may overwrite the entries. Without this a slow member could read an
        // entry of the next pass.
        group.sync();
        if ENTRIES > 1 {
            // Acquire, by every member, for its own relaxed loads above: the data of its commands are visible
            // after it. Release: the loads come before the doorbell store, after which the controller may
            // overwrite the entries.
            fence(Order::AcqRel, Scope::Sys);
            // The fence also covers commands submitted before: every member's stores came before the barrier
            // above.
            self.published = self.tail;
        }
        let mut dw0s = [0; ENTRIES];
        let mut wants_dw0 = false;
        unroll!(ENTRIES, k => { wants_dw0 |= ends[k].wants_dw0(); });
        let rare = fault != 0 || wants_dw0;
        let rare = group.vote(rare).total > 0;
        if rare {
            unroll!(ENTRIES, k => {
                if ends[k].wants_dw0() {
                    dw0s[k] = cq.lower(at(k)) as u32;
                }
            });
            if fault != 0 {
                state.refuse(fault);
            }
            group.sync();
            self.refused = state.fault_code();
        }
        let next = head.wrapping_add(found);
        if state.passes_quarter(head, next) {
            self.cq_doorbells += 1;
            if group.leads() {
                if rare {
                    self.memory.cq_doorbell.ring(next & state.mask());
                } else {
                    self.memory.cq_doorbell.ring_fenced(next & state.mask());
                }
            }
        }
        let end = self.free_end();
        let mut freed = 0;
        unroll!(ENTRIES, k => {
            // Without a fault each entry read has a pending slot, and its index among them is its distance
            // from the head. A fault leaves gaps, so the members count.
            let mut index = at(k).wrapping_sub(head);
            if rare {
                let vote = self.group.vote(ends[k].pending());
                index = freed + vote.before;
                freed += vote.total;
            }
            if ends[k].pending() {
                let slot = slot_of(uppers[k]);
                let place = state.free_ring(end.wrapping_add(index));
                place.store(ends[k].free(slot), Order::Relaxed, Scope::Cta);
                done(TaggedCompletion {
                    tag: ends[k].tag(),
                    cid: ends[k].cid(slot),
                    status: status_of(uppers[k]),
                    dw0: dw0s[k],
                    late: ends[k].expired(),
                });
            }
        });
        // The barrier makes the free ring, and what `done` wrote, visible to every member before the next
        // call.
        self.group.sync();
        self.head = next;
        self.in_flight -= if rare { freed } else { found };
        self.look_ahead();
        match ControllerFault::from_code(self.refused) {
            None => Ok(found),
            Some(fault) => Err(fault),
        }
    }
}
