//! The controller as its users see it: registers, doorbells, and `step`.

use crate::config::{Config, ConfigError};
use crate::device::Device;
use crate::doorbell::Doorbells;
use crate::memory::{Dma, DmaMemory};
use crate::queue::QueueStats;
use crate::serve::BATCH;
use core::sync::atomic::Ordering;
use nvme_core::spec::register::ALL_ONES;

/// A simulated NVMe controller that reaches the memory `M` by DMA.
///
/// Registers, doorbells and steps may be used from any threads at the same time. Nothing happens
/// but in [`step`](Self::step) (or a [`Runner`](crate::Runner), which calls it) and, for a change
/// of CC without configured delays, in the register write itself.
pub struct Controller<M> {
    memory: M,
    device: Device,
}

/// What a step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stepped {
    /// Commands fetched or completed.
    pub commands: u32,
    /// When something is due next, in the clock of `now_ns`; `None` when only the driver can cause
    /// more. It may be in the past when a completion queue is full.
    pub next_event_ns: Option<u64>,
}

impl<M: DmaMemory> Controller<M> {
    /// A controller as after power on, or what is wrong with its configuration.
    pub fn new(config: Config, memory: M) -> Result<Self, ConfigError> {
        config.check()?;
        Ok(Self {
            memory,
            device: Device::new(config),
        })
    }

    /// The memory that the controller reaches.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Reads 32 bits at byte `offset` of BAR0. Undefined offsets read as 0, a controller that has
    /// left the bus as all ones.
    pub fn read32(&self, offset: u32) -> u32 {
        self.device.read32(offset)
    }

    /// Reads 64 bits at byte `offset` of BAR0, as two 32-bit reads.
    pub fn read64(&self, offset: u32) -> u64 {
        if self.device.is_gone() {
            return u64::from(ALL_ONES) << 32 | u64::from(ALL_ONES);
        }
        let high = self.read32(offset.saturating_add(4));
        u64::from(high) << 32 | u64::from(self.read32(offset))
    }

    /// Writes 32 bits at byte `offset` of BAR0, doorbells included.
    pub fn write32(&self, offset: u32, value: u32) {
        self.device.write32(offset, value);
    }

    /// Writes 64 bits at byte `offset` of BAR0, as two 32-bit writes, the lower one first.
    pub fn write64(&self, offset: u32, value: u64) {
        self.write32(offset, value as u32);
        self.write32(offset.saturating_add(4), (value >> 32) as u32);
    }

    /// The doorbells as memory: a driver may store there instead of calling `write32`.
    pub fn doorbells(&self) -> &Doorbells {
        &self.device.doorbells
    }

    /// The highest I/O queue identifier.
    pub fn max_qid(&self) -> u16 {
        self.device.config.max_queues
    }

    /// Does everything that is due at `now_ns` (nanoseconds since any fixed start, not decreasing):
    /// fetches, executes and completes commands, and finishes resets. The same calls have the same
    /// effects, whatever the time of day.
    pub fn step(&self, now_ns: u64) -> Stepped {
        let mut commands = 0;
        self.tick(now_ns);
        for qid in 0..=self.max_qid() {
            loop {
                let handled = self.serve(qid, now_ns);
                commands += handled;
                if handled < BATCH {
                    break;
                }
            }
        }
        Stepped {
            commands,
            next_event_ns: self.next_event_ns(),
        }
    }

    /// Sets the clock and finishes what only time finishes.
    pub(crate) fn tick(&self, now_ns: u64) {
        self.device.clock_ns.store(now_ns, Ordering::Relaxed);
        if !self.device.is_gone() {
            self.device.advance(now_ns);
        }
    }

    /// The highest queue that exists; doorbells above it are looked at for complaints alone.
    pub(crate) fn highest_qid(&self) -> u16 {
        self.device.highest.load(Ordering::Relaxed)
    }

    /// Serves one queue once.
    #[inline]
    pub(crate) fn serve(&self, qid: u16, now_ns: u64) -> u32 {
        if !self.device.has_work(qid, now_ns) || !self.device.is_running() {
            return 0;
        }
        // The control lock comes before every other one, and the guard after it: a driver that
        // resets the controller while it unmaps memory must not wait for itself.
        let mut control = (qid == 0).then(|| self.device.control.lock());
        let guard = self.memory.guard();
        self.device
            .serve(qid, &Dma::new(&guard), now_ns, control.as_deref_mut())
    }

    pub(crate) fn next_event_ns(&self) -> Option<u64> {
        let slots = self.device.slots.iter();
        let commands = slots
            .map(|slot| slot.next_due_ns.load(Ordering::Relaxed))
            .min();
        let transition = self.device.transition_ns.load(Ordering::Relaxed);
        let next = commands.unwrap_or(u64::MAX).min(transition);
        (next != u64::MAX).then_some(next)
    }

    /// Cuts the power and gives it back: data that was written but not flushed is lost, every
    /// register is 0, and a controller that had left the bus is there again. Waits for steps in
    /// progress.
    pub fn power_cut(&self) {
        self.device.power_cut();
    }

    /// Bytes that a power cut would take back now.
    pub fn unflushed_bytes(&self) -> u64 {
        let caches = self
            .device
            .namespaces
            .iter()
            .filter_map(|one| one.cache.as_ref());
        caches.map(|cache| cache.dirty_bytes()).sum()
    }

    /// What queue `qid` has done since the controller was made; zeroes for an unknown one.
    pub fn queue_stats(&self, qid: u16) -> QueueStats {
        self.device
            .slots
            .get(usize::from(qid))
            .map(|slot| slot.stats.get())
            .unwrap_or_default()
    }

    /// Sets the temperature that the controller reports, in kelvins. Crossing a threshold raises an
    /// asynchronous event where the driver has asked for it.
    pub fn set_temperature(&self, kelvins: u16) {
        let control = self.device.control.lock();
        let mut logs = self.device.logs.lock();
        logs.set_temperature(kelvins, &control.features);
        self.device.attention.store(true, Ordering::Relaxed);
    }
}
