//! Taking completions, as many members at once as there are.

use super::Collective;
use crate::error::ControllerFault;
use crate::group::{Group, unroll};
use crate::queue_state::{SlotWord, slot_of, status_of};
use crate::spec::completion::phase_of;
use crate::spec::{Cid, Status};
use crate::sync::{Order, Scope, fence};

/// Completion queue entries in a line of memory of 128 bytes.
const LINE: u32 = 8;

/// A command that the controller completed, as the member that read its completion sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaggedCompletion {
    /// What the command carried.
    pub tag: u32,
    /// The command's identifier.
    pub cid: Cid,
    /// The controller's answer.
    pub status: Status,
    /// Dword 0 of the completion; 0 unless the command asked for it.
    pub dw0: u32,
    /// It had been reported as expired before.
    pub late: bool,
}

impl<G: Group> Collective<'_, G> {
    /// Takes up to `ENTRIES` completions a member, and calls `done` with each, on the member that read it.
    ///
    /// Returns how many there were. `done` must not use the group.
    ///
    /// # Errors
    /// To all members: the controller broke the protocol. What else was read is accounted; the queue
    /// takes no more commands until it is recovered.
    #[inline(always)]
    pub fn reap<const ENTRIES: usize>(
        &mut self,
        mut done: impl FnMut(TaggedCompletion),
    ) -> Result<u32, ControllerFault> {
        let (state, cq, group) = (self.state, &self.memory.cq, &self.group);
        let (head, rung) = (self.head, self.rung);
        let alone = group.size() == 1;
        // Tiles read whole lines of memory, from the one that the head is in.
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
        // after it. Several reads in flight at once are fenced together instead.
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
                // No entry a whole pass ahead passes for new: there are fewer commands than entries.
                // Those before the head were read; the controller may have posted there again.
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
        // Every member's reads are over before the leader rings the head doorbell.
        group.sync();
        if ENTRIES > 1 {
            // Acquire, by every member, for its own reads. Release: the reads come before the doorbell.
            fence(Order::AcqRel, Scope::Sys);
            // What was submitted before is visible too: every member had met in `sync`.
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
            // Without a fault every entry has a slot, and its index among them is known.
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
        // The free ring and what `done` wrote are for every member.
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
