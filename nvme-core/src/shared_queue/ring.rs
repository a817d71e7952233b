//! The tail doorbell of a shared queue: the holder of the lock rings for all threads.

use super::SharedQueue;
use crate::group::{Group, Traffic, unroll};
use crate::sync::{Order, Scope, fence};

/// Times the ring lock's holder looks again for those who came meanwhile; later ones ring by themselves.
const RING_ROUNDS: u32 = 16;
/// The most sequence numbers that a member reads at once: several loads are under way.
const SEQUENCES: usize = if cfg!(loom) { 1 } else { 8 };

/// How many sequence numbers a member of `G` reads at once.
const fn at_once<G: Group>() -> u32 {
    if G::READS == 1 && SEQUENCES > 2 {
        2
    } else {
        SEQUENCES as u32
    }
}

impl SharedQueue<'_> {
    /// Rings for all commands published so far, unless another group is doing that; then that group looks again. A
    /// command that it still misses is rung for by the thread that waits for it.
    #[inline(always)]
    pub fn ring<G: Group>(&self, group: &G) {
        self.ring_observed(group, &|_| {});
    }

    /// As [`ring`](Self::ring); the leader calls `on_bus` for each doorbell.
    #[inline(always)]
    pub(super) fn ring_observed<G: Group>(&self, group: &G, on_bus: &impl Fn(Traffic)) {
        let lock = self.state.ring_lock();
        let mut asked = 0;
        if group.leads() {
            // Acquire: pairs with the release of the last holder, for what was rung.
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
                // Release: after the doorbell store, so that holders ring in order.
                was = lock.compare_exchange(seen, 0, Order::Release, Scope::Gpu);
            }
            let was = group.broadcast(was);
            if was == seen {
                return;
            }
            seen = was;
        }
        if group.leads() {
            // Release, as above. Those who asked since then ring when they wait.
            lock.swap(0, Order::Release, Scope::Gpu);
        }
    }

    /// One doorbell over every entry published without a gap since `from`: up to where. Under the ring
    /// lock.
    #[inline(always)]
    fn ring_once<G: Group>(&self, group: &G, from: u32, on_bus: &impl Fn(Traffic)) -> u32 {
        let state = &self.state;
        let mut to = from;
        // A pass holds fewer entries than the ring has: the scan ends.
        while to.wrapping_sub(from) <= state.mask() {
            let at = |k: usize| to.wrapping_add(k as u32 * group.size() + group.rank());
            let mut read = [0; SEQUENCES];
            // Acquire: pairs with the release fence before the sequence number. The fence of the doorbell is not
            // enough when another member rings; one member alone has that fence.
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
                        // All together: a GPU's compiler would wait for one before it reads the next.
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
                // Before the doorbell: who sees a completion sees that it was rung for.
                state.rung().store(to, Order::Relaxed, Scope::Gpu);
                // Release: pairs with the controller's fetch. Acquire: of the sequence numbers, where one member alone
                // has read them.
                fence(Order::AcqRel, Scope::Sys);
                self.memory.sq_doorbell.ring_fenced(to & state.mask());
                on_bus(Traffic::SqDoorbell);
            }
        }
        to
    }
}
