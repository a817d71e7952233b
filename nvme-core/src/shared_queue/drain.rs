//! The completion ring of a shared queue: the holder of the drain lock reads completions for all threads. The
//! lock is held only while they are read; results are delivered to their cells afterwards, while the next
//! group may read.
//!
//! The usual case runs without a branch, so that a GPU has every load of a pass in flight at once; rare cases
//! (dword 0, faults) are handled one by one afterwards.

use super::{DONE, DrainResult, SharedQueue};
use crate::group::{BusTraffic, ThreadGroup, reads_are_possible, unroll};
use crate::queue_state::{DrainWord, SlotWord, slot_of};
use crate::sync::{Order, Scope, fence, opaque};

/// Limit of consecutive passes over the completion ring.
const DRAIN_ROUNDS: u32 = 4;
/// Largest [`ThreadGroup::READS`].
const ENTRIES: usize = if cfg!(loom) { 4 } else { 16 };

/// Value that [`SharedQueue::drain_once`] returns while another group holds the lock.
const BUSY: u32 = u32::MAX;

/// The loads of one member in a pass: upper words of entries, and the words of the slots that they
/// name. Both have a fixed length, so that a kernel keeps them in registers.
struct DrainReads {
    uppers: [u64; ENTRIES],
    ends: [SlotWord; ENTRIES],
}

impl SharedQueue<'_> {
    /// Reads the posted completions for all threads, unless another group is reading them.
    ///
    /// The result is zero only if there are none: of several, a lone member may leave one or two for the next
    /// call. Completions that another group has read may not be delivered yet.
    #[inline(always)]
    pub fn drain<G: ThreadGroup>(&self, group: &G) -> DrainResult {
        self.drain_observed(group, &|_| {})
    }

    /// Drains as [`drain`](Self::drain) does; the leader calls `on_bus` with the accesses to the bus.
    #[inline(always)]
    pub(super) fn drain_observed<G: ThreadGroup>(
        &self,
        group: &G,
        on_bus: &impl Fn(BusTraffic),
    ) -> DrainResult {
        const {
            assert!(
                reads_are_possible::<G>(),
                "READS is 1, or the group is one member"
            )
        };
        // Number of entries that a pass takes when enough are posted. A lone member that reads several takes
        // two fewer than it reads: see `look`.
        let all = if G::READS == 1 { 1 } else { G::READS - 2 };
        let mut took = 0;
        for round in 0..DRAIN_ROUNDS {
            let found = self.drain_once(group, on_bus);
            if found == BUSY {
                if round == 0 {
                    return DrainResult::Busy;
                }
                break;
            }
            took += found;
            if found < all * group.size() {
                break;
            }
        }
        DrainResult::Took(took)
    }

    /// Reads completions under the lock, and delivers them after it, while the next group may read.
    #[inline(always)]
    fn drain_once<G: ThreadGroup>(&self, group: &G, on_bus: &impl Fn(BusTraffic)) -> u32 {
        let lock = self.state.drain_word();
        let mut was = DrainWord::LOCKED.bits();
        if group.leads() {
            was = lock.load(Order::Relaxed, Scope::Gpu);
            if !DrainWord::of_bits(was).is_locked() {
                // Relaxed: the head is in the word itself, and everything else is ordered by the completions
                // and by the counts of those that were read.
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
            // Loaded early and first used after `look`, which hides its latency.
            read = self.state.read_of(oldest).load(Order::Relaxed, Scope::Gpu);
        }
        // Limit of the entries that the controller may have posted, whatever it did: the ring is never owed
        // more. A faulty controller therefore cannot make the head overtake entries that were not released.
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
            // Always a read-modify-write: it continues the release sequence of earlier holders, which a plain
            // store would break. Release if this holder rang: the next group that rings the head doorbell
            // must do so after this one.
            let order = if releases {
                Order::Release
            } else {
                Order::Relaxed
            };
            lock.fetch_add(change, order, Scope::Gpu);
            if releases {
                on_bus(BusTraffic::CqDoorbell);
            }
            // Each member makes one load; a lone member makes its loads in two halves, the second
            // only if the first found an entry. An empty queue costs a lone member one round of
            // loads that way, not two.
            let half = G::READS.div_ceil(2);
            on_bus(BusTraffic::CqLoads(if found == 0 {
                half
            } else {
                G::READS
            }));
        }
        if found != 0 {
            self.deliver(group, head, found, uppers);
        }
        found
    }

    /// Releases the `oldest` quarter of the ring to the controller if all its entries were read; `read` is
    /// the count of those that were. The leader calls it, under the lock.
    #[inline(always)]
    fn release_quarter(&self, oldest: u32, read: u32) -> bool {
        let state = &self.state;
        // Entries of the next pass over the ring are not read before these are released, so the count cannot
        // run ahead. The difference is taken modulo 2^26, a quarter of 2^28.
        let more = read.wrapping_sub(state.read_after(oldest)) << (DrainWord::DROPPED_BITS + 2);
        let releases = more as i32 >= 0;
        if releases {
            // Acquire: pairs with the release of all groups that counted there, and of the last group that
            // rang. Release: their loads of the entries come before the doorbell store, after which the
            // controller may overwrite them.
            fence(Order::AcqRel, Scope::Sys);
            let end = state.quarter_start(oldest.wrapping_add(1));
            self.memory.cq_doorbell.ring_fenced(end & state.mask());
        }
        releases
    }

    /// Counts the entries from `head` on as read. The leader calls it.
    #[inline(always)]
    fn count_read(&self, head: u32, found: u32, order: Order) {
        let state = &self.state;
        // Counted before a slot is freed: a thread that claims the slot relies on the count, see
        // `wait_until_entry_reusable`.
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

    /// Loads the entries from `head` on, up to `G::READS` a member, and returns the number of new ones.
    ///
    /// A GPU serves only one system-wide load at a time of two neighbouring entries (a sector of 32 bytes),
    /// so every second entry is loaded first, and then the entries between them.
    #[inline(always)]
    fn look<G: ThreadGroup>(&self, group: &G, head: u32, uppers: &mut [u64; ENTRIES]) -> u32 {
        let state = &self.state;
        let cq = &self.memory.cq;
        let at = |k: usize| head.wrapping_add(k as u32 * group.size() + group.rank());
        if G::READS == 1 {
            // Acquire: pairs with the controller's write of the phase tag; dwords 0-1 and the data
            // are visible after it. With a relaxed load a thread could read data that have not
            // arrived.
            uppers[0] = cq.upper(at(0), Order::Acquire);
            return group.vote(state.is_new(uppers[0], at(0)) != 0).leading;
        }
        unroll!(ENTRIES, k => {
            if (k as u32) < G::READS && k & 1 == 0 {
                uppers[k] = cq.upper(at(k), Order::Relaxed);
            }
        });
        // The phase tag alone decides: an entry of the next pass cannot be mistaken for a new one, since
        // fewer commands than entries are in flight.
        let mut new = 0u32;
        unroll!(ENTRIES, k => {
            if (k as u32) < G::READS && k & 1 == 0 {
                new |= state.is_new(uppers[k], at(k)) << k;
            }
        });
        if new & 1 == 0 {
            return 0;
        }
        // Index of the last new entry among the even ones; entries after it stay for the next pass.
        let last = opaque((new | 0xAAAA_AAAA).trailing_ones() - 2);
        unroll!(ENTRIES, k => {
            if (k as u32) < G::READS - 2 && k & 1 == 1 {
                uppers[k] = cq.upper(at(k), Order::Relaxed);
            }
        });
        // Acquire: pairs as above, for this entry and all before it, which were posted earlier. It is issued
        // together with the loads above, so it costs no extra round trip.
        cq.upper(at(last as usize), Order::Acquire);
        unroll!(ENTRIES, k => {
            if (k as u32) < G::READS - 2 && k & 1 == 1 {
                new |= state.is_new(uppers[k], at(k)) << k;
            }
        });
        new.trailing_ones().min(last + 1)
    }

    /// Stores the results of the completions into their cells, and frees the slots.
    #[inline(always)]
    fn deliver<G: ThreadGroup>(&self, group: &G, head: u32, found: u32, uppers: [u64; ENTRIES]) {
        let state = &self.state;
        let at = |k: usize| head.wrapping_add(k as u32 * group.size() + group.rank());
        let is_found = |k: usize| at(k).wrapping_sub(head) < found;
        let mut read = DrainReads {
            uppers,
            ends: [SlotWord::NONE; ENTRIES],
        };
        unroll!(ENTRIES, k => {
            if (k as u32) < G::READS {
                read.ends[k] = state.take_out_of_flight_if(is_found(k), read.uppers[k]);
            }
        });
        group.sync();
        // Executed by every member. Release: pairs with the acquire of a cell, of a slot, and of the counts.
        // One fence serves all three stores of each lane, which keep relaxed order after it and cost one
        // instruction each.
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
            // Release: dword 0 of a rare entry was loaded after the fence above, so the count needs an order
            // of this kind to keep that load before the release of the entry.
            let order = if late { Order::Release } else { Order::Relaxed };
            self.count_read(head, found, order);
        }
        group.sync();
        unroll!(ENTRIES, k => {
            if (k as u32) < G::READS {
                let (upper, end) = (read.uppers[k], read.ends[k]);
                let ends = is_found(k) & (rare >> k & 1 == 0);
                self.cells.set_if(ends, end.tag(), cell_value(upper));
                // Relaxed: the fence above already released all accesses to the slot.
                state.free_if(ends, slot_of(upper));
            }
        });
        if rare_ends != 0 {
            unroll!(ENTRIES, k => {
                state.free_if(rare_ends >> k & 1 != 0, slot_of(read.uppers[k]));
            });
        }
    }

    /// Handles the entries in `rare`, which want dword 0 or are not possible, and returns those whose
    /// commands have ended.
    ///
    /// Their slots are freed by the caller, after they were counted: a thread that claims a slot waits for
    /// the count (see [`wait_until_entry_reusable`](Self::wait_until_entry_reusable)).
    #[inline(always)]
    fn take_rare(&self, read: &DrainReads, rare: u32, at: impl Fn(usize) -> u32, rung: u32) -> u32 {
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

/// Returns the value of the cell of a command whose completion has this upper word: status and CID keep their
/// bits.
#[inline(always)]
fn cell_value(upper: u64) -> u64 {
    upper & u64::from(u32::MAX) << 32 | DONE
}
