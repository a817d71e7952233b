//! Interrupts: vectors, masks and coalescing. An [`InterruptSink`] sink delivers them to the driver.
//!
//! A completion queue with interrupts reports its vector once per batch; a queue without interrupts
//! costs nothing. Coalescing delays a vector until enough completions have been posted or their
//! aggregation time is over.

use crate::memory::SpinLock;
use alloc::boxed::Box;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Unit of the aggregation time (feature 08h): 100 microseconds.
const TIME_NS: u64 = 100_000;

/// Delivers interrupts to the driver.
pub trait InterruptSink: Send + Sync {
    /// Signals vector `vector`: completions were posted for it, and every write of them is
    /// complete. `masked` is its bit of INTMS, which counts for MSI alone. `level` returns the
    /// level of the interrupt pin at that moment.
    ///
    /// A driver that is awake may have consumed the completions before this call, and a pin that
    /// is asserted for nothing is never served. An implementation with a pin asks for `level`
    /// under the lock under which it unmasks the pin.
    ///
    /// Called from the threads that step the controller. An implementation must not block, and
    /// calls nothing of the controller but `level`.
    fn raise(&self, vector: u16, masked: bool, level: &dyn Fn() -> bool);
}

/// Completions that a vector has not signalled yet.
#[derive(Default)]
struct CoalescedCompletions {
    count: u32,
    /// Latest time to raise it; meaningful while `count` is not 0.
    due_ns: u64,
}

#[derive(Default)]
struct VectorState {
    /// Feature 09h (Coalescing Disable): coalescing does not apply.
    uncoalesced: AtomicBool,
    coalesced: SpinLock<CoalescedCompletions>,
}

/// State of all interrupt vectors.
pub(crate) struct InterruptVectors {
    sink: Option<Arc<dyn InterruptSink>>,
    vectors: Box<[VectorState]>,
    /// Feature 08h.
    coalescing: AtomicU32,
    /// INTMS.
    mask: AtomicU32,
    next_due_ns: AtomicU64,
}

impl InterruptVectors {
    pub fn new(count: u16) -> Self {
        Self {
            sink: None,
            vectors: (0..count).map(|_| VectorState::default()).collect(),
            coalescing: AtomicU32::new(0),
            mask: AtomicU32::new(0),
            next_due_ns: AtomicU64::new(u64::MAX),
        }
    }

    pub fn set_sink(&mut self, sink: Arc<dyn InterruptSink>) {
        self.sink = Some(sink);
    }

    /// Restores the defaults, as a controller reset does. The mask is a register and is cleared
    /// with those.
    pub fn reset(&self) {
        self.coalescing.store(0, Ordering::Relaxed);
        self.next_due_ns.store(u64::MAX, Ordering::Relaxed);
        for vector in &self.vectors {
            vector.uncoalesced.store(false, Ordering::Relaxed);
            vector.coalesced.lock().count = 0;
        }
    }

    /// Returns feature 08h: threshold (0's based) and time.
    pub fn coalescing(&self) -> u32 {
        self.coalescing.load(Ordering::Relaxed)
    }

    pub fn set_coalescing(&self, dword: u32) {
        self.coalescing.store(dword & 0xFFFF, Ordering::Relaxed);
    }

    /// Returns feature 09h of `vector`, or `None` for an unknown vector.
    pub fn is_uncoalesced(&self, vector: u16) -> Option<bool> {
        let vector = self.vectors.get(usize::from(vector))?;
        Some(vector.uncoalesced.load(Ordering::Relaxed))
    }

    pub fn set_uncoalesced(&self, vector: u16, disabled: bool) {
        if let Some(vector) = self.vectors.get(usize::from(vector)) {
            vector.uncoalesced.store(disabled, Ordering::Relaxed);
        }
    }

    /// Returns the value of INTMS.
    pub fn mask(&self) -> u32 {
        self.mask.load(Ordering::Relaxed)
    }

    pub fn set_mask(&self, mask: u32) {
        self.mask.store(mask, Ordering::Relaxed);
    }

    /// True if INTMS masks `vector`.
    pub fn is_masked(&self, vector: u16) -> bool {
        vector < 32 && self.mask() >> vector & 1 != 0
    }

    /// Counts `count` completions of an I/O queue for `vector`, and raises it unless coalescing
    /// delays it.
    pub fn posted(&self, vector: u16, count: u32, now_ns: u64, level: &dyn Fn() -> bool) {
        let coalescing = self.coalescing();
        let (threshold, time) = (coalescing & 0xFF, u64::from(coalescing >> 8));
        let Some(state) = self.vectors.get(usize::from(vector)) else {
            return;
        };
        // An aggregation time of 0 allows no delay, and a threshold of one entry asks for none.
        if threshold != 0 && time != 0 && !state.uncoalesced.load(Ordering::Relaxed) {
            let mut coalesced = state.coalesced.lock();
            if coalesced.count == 0 {
                coalesced.due_ns = now_ns.saturating_add(time * TIME_NS);
            }
            coalesced.count = coalesced.count.saturating_add(count);
            if coalesced.count <= threshold {
                self.next_due_ns
                    .fetch_min(coalesced.due_ns, Ordering::Relaxed);
                return;
            }
            coalesced.count = 0;
        }
        self.raise(vector, level);
    }

    /// Raises `vector` now. No lock of a completion queue may be held, since `level` takes them.
    pub fn raise(&self, vector: u16, level: &dyn Fn() -> bool) {
        if let Some(sink) = &self.sink {
            sink.raise(vector, self.is_masked(vector), level);
        }
    }

    /// Returns the time at which [`expire`](Self::expire) has work; `u64::MAX` for never.
    #[inline]
    pub fn next_due_ns(&self) -> u64 {
        self.next_due_ns.load(Ordering::Relaxed)
    }

    /// Raises the vectors whose aggregation time is over.
    #[cold]
    pub fn expire(&self, now_ns: u64, level: &dyn Fn() -> bool) {
        self.next_due_ns.store(u64::MAX, Ordering::Relaxed);
        for (number, vector) in self.vectors.iter().enumerate() {
            let mut coalesced = vector.coalesced.lock();
            if coalesced.count == 0 {
                continue;
            }
            if coalesced.due_ns <= now_ns {
                coalesced.count = 0;
                drop(coalesced);
                self.raise(number as u16, level);
            } else {
                self.next_due_ns
                    .fetch_min(coalesced.due_ns, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::{DATA, Driver, Raised, config, cq_at};
    use alloc::sync::Arc;
    use nvme_auditor::Rule;
    use nvme_spec::feature::fid;
    use nvme_spec::register::offset;
    use nvme_spec::{Lba, Nsid, Qid, Sqe, Status, admin, nvm};

    /// Returns a controller with queue 1 on vector 3.
    fn driver() -> (Driver, Arc<Raised>) {
        let (mut driver, raised) = Driver::with_interrupts(config());
        driver.create_pair_on(1, Some(3));
        raised.take();
        (driver, raised)
    }

    fn read() -> Sqe {
        nvm::read(Nsid(1), Lba(0), 1).with_prps(DATA, 0)
    }

    fn set(driver: &mut Driver, fid: u8, dword: u32) -> Result<u32, Status> {
        driver.admin(admin::set_features(fid, Nsid::NONE, dword))
    }

    fn reads(driver: &mut Driver, count: usize) {
        for _ in 0..count {
            driver.push(1, read());
        }
        driver.ring(1);
        driver.step();
        driver.drain(1);
    }

    #[test]
    fn a_batch_raises_its_vector_once_and_a_polled_queue_none() {
        let (mut driver, raised) = driver();
        driver.breaks(&[Rule::BufferShared]);
        reads(&mut driver, 5);
        assert_eq!(raised.take(), [(3, false)]);
        driver.create_pair(2);
        raised.take();
        driver.push(2, read());
        driver.ring(2);
        driver.step();
        assert_eq!(driver.drain(2).len(), 1);
        assert_eq!(raised.take(), []);
    }

    #[test]
    fn the_admin_queue_and_its_events_use_vector_0() {
        let (mut driver, raised) = driver();
        driver.push(0, admin::async_event_request());
        driver.ring(0);
        driver.step();
        assert_eq!(raised.take(), [], "a request that waits is no completion");
        assert_eq!(set(&mut driver, fid::ASYNC_EVENT, 2), Ok(0));
        raised.take();
        driver.controller.set_temperature(400);
        driver.step();
        assert_eq!(driver.drain(0).len(), 1);
        assert_eq!(raised.take(), [(0, false)]);
    }

    #[test]
    fn coalescing_waits_for_the_threshold_or_the_time() {
        let (mut driver, raised) = driver();
        driver.breaks(&[Rule::BufferShared]);
        // Four entries or 2 x 100 us.
        assert_eq!(set(&mut driver, fid::INTERRUPT_COALESCING, 0x0203), Ok(0));
        assert_eq!(raised.take(), [(0, false)], "admin completions never wait");
        reads(&mut driver, 3);
        assert_eq!(raised.take(), []);
        reads(&mut driver, 1);
        assert_eq!(raised.take(), [(3, false)]);
        reads(&mut driver, 1);
        let due = driver.now_ns + 200_000;
        assert_eq!(
            driver.controller.step(driver.now_ns).next_event_ns,
            Some(due)
        );
        driver.now_ns = due - 1;
        driver.step();
        assert_eq!(raised.take(), []);
        driver.now_ns = due;
        driver.step();
        assert_eq!(raised.take(), [(3, false)]);
        assert_eq!(driver.controller.step(due).next_event_ns, None);
        // Not for this vector.
        assert_eq!(set(&mut driver, fid::INTERRUPT_VECTOR, 1 << 16 | 3), Ok(0));
        raised.take();
        reads(&mut driver, 1);
        assert_eq!(raised.take(), [(3, false)]);
        let get = admin::get_features(
            fid::INTERRUPT_VECTOR,
            admin::FeatureSelect::Current,
            Nsid::NONE,
            3,
        );
        assert_eq!(driver.admin(get), Ok(1 << 16 | 3));
    }

    #[test]
    fn a_reset_forgets_coalescing_and_what_it_held_back() {
        let (mut driver, raised) = driver();
        assert_eq!(set(&mut driver, fid::INTERRUPT_COALESCING, 0xFFFF), Ok(0));
        reads(&mut driver, 1);
        driver.controller.write32(offset::CC, 0);
        driver.enable();
        driver.create_pair_on(1, Some(3));
        raised.take();
        driver.now_ns += 1 << 40;
        driver.step();
        assert_eq!(raised.take(), []);
        reads(&mut driver, 1);
        assert_eq!(raised.take(), [(3, false)]);
    }

    #[test]
    fn the_pin_follows_the_queue_and_the_mask() {
        let (mut driver, raised) = driver();
        assert!(!driver.controller.interrupt_pin());
        driver.push(1, read());
        driver.ring(1);
        driver.step();
        assert!(driver.controller.interrupt_pin());
        driver.controller.write32(offset::INTMS, 1 << 3);
        assert!(!driver.controller.interrupt_pin());
        driver.push(1, read());
        driver.ring(1);
        driver.step();
        assert_eq!(raised.take(), [(3, false), (3, true)]);
        driver.controller.write32(offset::INTMC, 1 << 2);
        assert_eq!(raised.take(), [], "another vector");
        driver.controller.write32(offset::INTMC, 1 << 3);
        assert_eq!(raised.take(), [(3, false)], "what waited is told again");
        assert!(driver.controller.interrupt_pin());
        driver.pop(1);
        assert!(driver.controller.interrupt_pin());
        driver.pop(1);
        assert!(!driver.controller.interrupt_pin());
    }

    #[test]
    fn commands_that_a_deletion_ends_raise_their_vector() {
        let mut config = config();
        config.profile = crate::LatencyProfile {
            read_ns: 1_000_000,
            ..crate::LatencyProfile::NONE
        };
        let (mut driver, raised) = Driver::with_interrupts(config);
        driver.create_pair_on(1, Some(3));
        driver.push(1, read());
        driver.ring(1);
        driver.step();
        raised.take();
        assert_eq!(driver.admin(admin::delete_io_sq(Qid(1))), Ok(0));
        assert_eq!(raised.take(), [(3, false), (0, false)]);
        assert!(cq_at(1) != 0 && driver.drain(1).len() == 1);
    }
}
