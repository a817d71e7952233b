//! The tail doorbell of a shared queue: the holder of the ring lock rings for all threads.

use super::SharedQueue;
use crate::group::{BusTraffic, ThreadGroup, unroll};
use crate::sync::{Order, Scope, fence};

/// Limit of the holder's repeated looks for commands published meanwhile; later ones are rung for
/// by their own threads. Without a limit a busy queue would keep one thread ringing for all others.
const RING_ROUNDS: u32 = 16;
/// Limit of the sequence numbers that a member loads at once, so that several loads overlap.
const SEQUENCES: usize = if cfg!(loom) { 1 } else { 8 };

/// Returns the number of sequence numbers that a member of `G` loads at once.
const fn at_once<G: ThreadGroup>() -> u32 {
    if G::READS == 1 && SEQUENCES > 2 {
        2
    } else {
        SEQUENCES as u32
    }
}

impl SharedQueue<'_> {
    /// Rings for all commands published so far, unless another group is doing so; then that group looks again
    /// before it unlocks. A command that it still misses is rung for by the thread that waits for it.
    #[inline(always)]
    pub fn ring<G: ThreadGroup>(&self, group: &G) {
        self.ring_observed(group, &|_| {});
    }

    /// Rings as [`ring`](Self::ring) does; the leader calls `on_bus` for each doorbell.
    #[inline(always)]
    pub(super) fn ring_observed<G: ThreadGroup>(&self, group: &G, on_bus: &impl Fn(BusTraffic)) {
        let lock = self.state.ring_lock();
        let mut asked = 0;
        if group.leads() {
            // Acquire: pairs with the release of the last holder, so that its `rung` is visible. With an
            // older value this holder could ring a tail that was rung before, which is a doorbell that moves
            // backwards.
            asked = lock.fetch_add(1, Order::Acquire, Scope::Gpu);
        }
        if group.broadcast(asked) != 0 {
            return;
        }
        let mut rung = 0;
        if group.leads() {
            rung = self.state.rung().load(Order::Relaxed, Scope::Gpu);
        }
        let mut rung = group.broadcast(rung);
        let mut seen = 1;
        for _ in 0..RING_ROUNDS {
            rung = self.ring_once(group, rung, on_bus);
            let mut was = 0;
            if group.leads() {
                // Release: comes after the doorbell store, so that the doorbell values of successive holders
                // arrive in order. A tail that moved backwards would be an invalid doorbell write to the
                // controller.
                was = lock.compare_exchange(seen, 0, Order::Release, Scope::Gpu);
            }
            let was = group.broadcast(was);
            if was == seen {
                return;
            }
            seen = was;
        }
        if group.leads() {
            // Release, as above. Threads that asked since then ring while they wait, so that one thread does
            // not ring for others for ever while its own command is ready.
            lock.swap(0, Order::Release, Scope::Gpu);
        }
    }

    /// Rings once for all entries published without a gap since `from`, and returns the position
    /// after them. The caller holds the ring lock. A gap is an entry that its thread has not
    /// written yet: ringing past it would publish garbage.
    #[inline(always)]
    fn ring_once<G: ThreadGroup>(&self, group: &G, from: u32, on_bus: &impl Fn(BusTraffic)) -> u32 {
        let state = &self.state;
        let mut to = from;
        // A pass holds fewer entries than the ring has, so the scan ends.
        while to.wrapping_sub(from) <= state.mask() {
            let at = |k: usize| to.wrapping_add(k as u32 * group.size() + group.rank());
            let mut read = [0; SEQUENCES];
            // Acquire: pairs with the release fence before the sequence number. The doorbell's own fence is
            // not enough when another member rings; a lone member has that fence itself.
            let order = if group.size() == 1 {
                Order::Relaxed
            } else {
                Order::Acquire
            };
            unroll!(SEQUENCES, k => {
                if (k as u32) < at_once::<G>() {
                    read[k] = state.sequence(at(k)).load(order, Scope::Gpu);
                }
            });
            let (mut found, mut published) = (0, 0u32);
            unroll!(SEQUENCES, k => {
                if (k as u32) < at_once::<G>() {
                    let ours = read[k] == at(k).wrapping_add(1);
                    if group.size() == 1 {
                        // Combined afterwards: a GPU's compiler would otherwise wait for one load before it
                        // issues the next.
                        published |= u32::from(ours) << k;
                    } else if found == k as u32 * group.size() {
                        found += group.vote(ours).leading;
                    }
                }
            });
            if group.size() == 1 {
                found = published.trailing_ones();
            }
            to = to.wrapping_add(found);
            if found < at_once::<G>() * group.size() {
                break;
            }
        }
        if to != from {
            group.sync();
            if group.leads() {
                // Stored before the doorbell: a thread that sees a completion also sees that its entry was
                // rung for.
                state.rung().store(to, Order::Relaxed, Scope::Gpu);
                // Release: pairs with the controller's fetch. Acquire: for the sequence numbers,
                // which a lone member loaded with relaxed order. One fence serves both, since a
                // fence at system scope is the dearest instruction here.
                fence(Order::AcqRel, Scope::Sys);
                self.memory.sq_doorbell.ring_fenced(to & state.mask());
                on_bus(BusTraffic::SqDoorbell);
            }
        }
        to
    }
}
