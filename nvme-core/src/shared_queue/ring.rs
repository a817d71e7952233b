//! The tail doorbell of a shared queue: whoever holds the lock rings for everyone.

use super::SharedQueue;
use crate::group::{Group, Traffic, unroll};
use crate::sync::{Order, Scope, fence};

/// Times the ring lock's holder looks again for those who came meanwhile; later ones ring by themselves.
const RING_ROUNDS: u32 = 16;
/// The most marks that a member looks at together: several loads are under way at once.
const MARKS: usize = if cfg!(loom) { 1 } else { 8 };

/// How many marks a member of `G` looks at together.
const fn marks<G: Group>() -> u32 {
    if G::READS == 1 && MARKS > 2 {
        2
    } else {
        MARKS as u32
    }
}

impl SharedQueue<'_> {
    /// Rings for everyone published so far, unless another group is doing that; then it looks again. A
    /// mark that it still misses is rung by the one who waits for it.
    #[inline(always)]
    pub fn ring<G: Group>(&self, group: &G) {
        self.ring_seen(group, &|_| {});
    }

    /// As [`ring`](Self::ring); the leader tells `saw` of each doorbell.
    #[inline(always)]
    pub(super) fn ring_seen<G: Group>(&self, group: &G, saw: &impl Fn(Traffic)) {
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
            rung = self.ring_once(group, rung, saw);
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
    fn ring_once<G: Group>(&self, group: &G, from: u32, saw: &impl Fn(Traffic)) -> u32 {
        let state = &self.state;
        let mut to = from;
        // A lap holds fewer entries than the ring has: the scan ends.
        while to.wrapping_sub(from) <= state.mask() {
            let at = |k: usize| to.wrapping_add(k as u32 * group.size() + group.rank());
            let mut read = [0; MARKS];
            // Acquire: pairs with the release fence before the mark. The fence of the doorbell is not
            // enough when another member rings; one member alone has that fence.
            let order = if group.size() == 1 {
                Order::Relaxed
            } else {
                Order::Acquire
            };
            unroll!(MARKS, k => {
                if (k as u32) < marks::<G>() {
                    read[k] = state.mark(at(k)).load(order, Scope::Gpu);
                }
            });
            let (mut found, mut published) = (0, 0u32);
            unroll!(MARKS, k => {
                if (k as u32) < marks::<G>() {
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
            if found < marks::<G>() * group.size() {
                break;
            }
        }
        if to != from {
            group.sync();
            if group.leads() {
                // Before the doorbell: whoever sees a completion sees that it was rung.
                state.rung().store(to, Order::Relaxed, Scope::Gpu);
                // Release: pairs with the controller's fetch. Acquire: of the marks, where one member alone
                // has read them.
                fence(Order::AcqRel, Scope::Sys);
                self.memory.sq_doorbell.ring_fenced(to & state.mask());
                saw(Traffic::SqDoorbell);
            }
        }
        to
    }
}
