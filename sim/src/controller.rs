//! The controller's interface to its users: registers, doorbells, and `step`. The work itself is in
//! `engine` and `command`; this file only takes locks and guards in the right order around it.

use crate::bus::doorbell::Doorbells;
use crate::bus::interrupt::InterruptSink;
use crate::bus::queue::QueueStats;
use crate::command::{identify, sanitize};
use crate::config::fault::Fault;
use crate::config::settings::{Config, ConfigError};
use crate::device::ControllerState;
use crate::device::faults::FiredFault;
use crate::engine::batch::BATCH;
use crate::engine::{lifecycle, properties, serve};
use crate::memory::{Dma, DmaMemory};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::Ordering;
use nvme_auditor::Finding;
use nvme_spec::register::ALL_ONES;

/// A simulated NVMe controller that reaches the memory `M` by DMA.
///
/// Registers, doorbells and steps may be used from any threads at the same time. The controller
/// acts only in [`step`](Self::step) (or in a [`Runner`](crate::Runner), which calls it) and, for a
/// change of CC without configured delays, in the register write itself.
pub struct Controller<M> {
    memory: M,
    pub(crate) device: ControllerState,
}

/// Outcome of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepOutcome {
    /// Commands fetched or completed.
    pub commands: u32,
    /// Time at which something is due next, in the clock of `now_ns`; `None` if only the driver can
    /// cause more work. It may lie in the past while a completion queue is full.
    pub next_event_ns: Option<u64>,
}

impl<M: DmaMemory> Controller<M> {
    /// Makes a controller in the state after power on, or returns the error in its configuration.
    pub fn new(config: Config, memory: M) -> Result<Self, ConfigError> {
        config.check()?;
        let device = ControllerState::new(config)?;
        identify::describe(&device);
        Ok(Self { memory, device })
    }

    /// Sends interrupts to `sink`. Without a sink, interrupts are discarded and the driver has to
    /// poll.
    pub fn with_interrupts(mut self, sink: Arc<dyn InterruptSink>) -> Self {
        self.device.vectors.set_sink(sink);
        self
    }

    /// Moves the doorbells to a memfd.
    #[cfg(all(feature = "std", target_os = "linux"))]
    pub(crate) fn with_shared_doorbells(mut self) -> std::io::Result<Self> {
        let config = &self.device.config;
        self.device.doorbells = Doorbells::shared(config.max_queues, config.dstrd)?;
        Ok(self)
    }

    /// Returns the number of interrupt vectors.
    #[cfg(all(feature = "std", target_os = "linux"))]
    pub(crate) fn vectors(&self) -> u16 {
        self.device.config.vectors
    }

    /// Injects `what` into the next command of queue `qid`; `StuckReady` applies to the next change
    /// of CC.EN. The controller's plan must have a rule, as
    /// [`FaultPlan::on_demand`](crate::FaultPlan::on_demand) has.
    pub fn arm(&self, qid: u16, what: Fault) {
        self.device.faults.arm(qid, what);
    }

    /// Removes the armed faults that have not fired.
    pub fn disarm(&self) {
        self.device.faults.disarm();
    }

    /// Returns the armed faults that have fired since the last call, in order.
    pub fn take_fired(&self) -> Vec<FiredFault> {
        self.device.faults.take_fired()
    }

    /// Stops with CSTS.CFS, as a controller does that detects an internal error.
    pub fn fail(&self) {
        self.device.fail();
    }

    /// Removes the controller from the bus: registers read as all ones, and no command is executed.
    pub fn unplug(&self) {
        self.device.leave_bus();
    }

    /// Puts the controller back on the bus. Its registers are as they were, so the driver has to
    /// reset it.
    pub fn plug_in(&self) {
        self.device.plug_in();
    }

    /// Resets the PCI function: every queue and register. Unlike a power cut it loses no data.
    pub fn function_reset(&self) {
        lifecycle::function_reset(&self.device);
    }

    /// Returns the level of the interrupt pin. It is asserted while a completion queue with
    /// interrupts holds entries that the driver has not consumed, unless INTMS masks the queue's
    /// vector.
    pub fn interrupt_pin(&self) -> bool {
        properties::pin(&self.device)
    }

    /// Returns the memory that the controller reaches.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Reads 32 bits at byte `offset` of BAR0. Undefined offsets read as 0, a controller that has
    /// left the bus as all ones.
    pub fn read32(&self, offset: u32) -> u32 {
        properties::read32(&self.device, offset)
    }

    /// Reads 64 bits at byte `offset` of BAR0, as two 32-bit reads.
    pub fn read64(&self, offset: u32) -> u64 {
        if self.device.is_off_bus() {
            return u64::from(ALL_ONES) << 32 | u64::from(ALL_ONES);
        }
        let high = self.read32(offset.saturating_add(4));
        u64::from(high) << 32 | u64::from(self.read32(offset))
    }

    /// Writes 32 bits at byte `offset` of BAR0, doorbells included.
    pub fn write32(&self, offset: u32, value: u32) {
        properties::write32(&self.device, offset, value);
    }

    /// Writes 64 bits at byte `offset` of BAR0, as two 32-bit writes, the lower one first.
    pub fn write64(&self, offset: u32, value: u64) {
        self.write32(offset, value as u32);
        self.write32(offset.saturating_add(4), (value >> 32) as u32);
    }

    /// Returns the doorbells as memory: a driver may store there instead of calling `write32`.
    pub fn doorbells(&self) -> &Doorbells {
        &self.device.doorbells
    }

    /// Returns the highest I/O queue identifier.
    pub fn max_qid(&self) -> u16 {
        self.device.config.max_queues
    }

    /// Does everything that is due at `now_ns` (nanoseconds since any fixed start, not decreasing):
    /// fetches, executes and completes commands, and finishes resets. The same calls have the same
    /// effects, whatever the time of day.
    pub fn step(&self, now_ns: u64) -> StepOutcome {
        let mut commands = 0;
        self.tick(now_ns);
        while sanitize::advance(&self.device, now_ns) {}
        for qid in 0..=self.max_qid() {
            loop {
                let handled = self.serve(qid, now_ns);
                commands += handled;
                if handled < BATCH {
                    break;
                }
            }
        }
        StepOutcome {
            commands,
            next_event_ns: self.next_event_ns(),
        }
    }

    /// Sets the clock and completes the work that depends on time alone: resets, shutdowns,
    /// sanitize operations and coalesced interrupts.
    pub(crate) fn tick(&self, now_ns: u64) {
        self.device.clock_ns.store(now_ns, Ordering::Relaxed);
        if !self.device.is_off_bus() {
            lifecycle::advance(&self.device, now_ns);
            sanitize::advance(&self.device, now_ns);
        }
        self.raise_due(now_ns);
    }

    /// Raises the coalesced interrupts whose aggregation time is over.
    #[inline]
    pub(crate) fn raise_due(&self, now_ns: u64) {
        if self.device.vectors.next_due_ns() <= now_ns {
            self.device.vectors.expire(now_ns, &|| self.interrupt_pin());
        }
    }

    /// Returns the highest queue that exists. Doorbells above it matter only for error events.
    #[cfg(feature = "std")]
    pub(crate) fn highest_qid(&self) -> u16 {
        self.device.highest.load(Ordering::Relaxed)
    }

    /// Serves queue `qid` once and returns the number of commands fetched or completed.
    #[inline]
    pub(crate) fn serve(&self, qid: u16, now_ns: u64) -> u32 {
        if !self.has_work(qid, now_ns) || !self.device.is_running() {
            return 0;
        }
        self.serve_work(qid, now_ns, true)
    }

    /// True if queue `qid` has work. Takes no lock.
    #[inline]
    pub(crate) fn has_work(&self, qid: u16, now_ns: u64) -> bool {
        serve::has_work(&self.device, qid, now_ns)
    }

    /// Serves I/O queue `qid` once, unless another thread does so at this moment; returns as
    /// [`serve`](Self::serve).
    #[cfg(feature = "std")]
    pub(crate) fn serve_if_free(&self, qid: u16, now_ns: u64) -> u32 {
        match self.device.is_running() {
            true => self.serve_work(qid, now_ns, false),
            false => 0,
        }
    }

    fn serve_work(&self, qid: u16, now_ns: u64, waits: bool) -> u32 {
        // Lock order: the control lock before every other lock, and the guard of the DMA map after
        // it. An unmap waits for every guard; a step that held a guard while it waited here would
        // make a driver that resets the controller and unmaps memory wait for itself.
        let mut control = (qid == 0).then(|| self.device.control.lock());
        let guard = self.memory.guard();
        let dma = Dma::new(&guard);
        let control_of_admin = control.as_deref_mut();
        let served = serve::serve(&self.device, qid, &dma, now_ns, control_of_admin, waits);
        if served.posted == 0 {
            return served.commands;
        }
        // An interrupt may make the driver read its memory at once, so every access of the batch
        // comes first, also the write-back of staged pages that dropping the guard does.
        drop(guard);
        let others =
            control.map_or_else(Vec::new, |mut control| core::mem::take(&mut control.posted));
        let vectors = &self.device.vectors;
        let level = || self.interrupt_pin();
        for vector in others {
            vectors.posted(vector, 1, now_ns, &level);
        }
        match qid {
            0 => vectors.raise(0, &level),
            _ => vectors.posted(served.vector, served.posted, now_ns, &level),
        }
        served.commands
    }

    pub(crate) fn next_event_ns(&self) -> Option<u64> {
        let slots = self.device.slots.iter();
        let commands = slots
            .map(|slot| slot.next_due_ns.load(Ordering::Relaxed))
            .min();
        let transition = self.device.transition_ns.load(Ordering::Relaxed);
        let next = commands.unwrap_or(u64::MAX).min(transition);
        let next = next.min(self.device.vectors.next_due_ns());
        let next = next.min(self.device.sanitize.due_ns());
        (next != u64::MAX).then_some(next)
    }

    /// Cuts the power and restores it. Data that was written but not flushed is lost, every
    /// register is 0, and a controller that had left the bus is back. Waits for steps in progress.
    pub fn power_cut(&self) {
        lifecycle::power_cut(&self.device);
    }

    /// Returns the bytes that a power cut would revert now.
    pub fn unflushed_bytes(&self) -> u64 {
        let caches = self
            .device
            .namespaces
            .iter()
            .filter_map(|one| one.cache.as_ref());
        caches.map(|cache| cache.dirty_bytes()).sum()
    }

    /// Returns the counters of queue `qid` since the controller was made; zeroes for an unknown
    /// queue.
    pub fn queue_stats(&self, qid: u16) -> QueueStats {
        self.device
            .slots
            .get(usize::from(qid))
            .map(|slot| slot.stats.get())
            .unwrap_or_default()
    }

    /// Closes the images of a controller that is kept only because its memory may be in use, so
    /// that another controller can open them. Commands that need a closed image fail. The runner
    /// must be stopped first.
    pub fn close_images(&self) {
        let namespaces = self.device.namespaces.iter();
        namespaces.for_each(|namespace| namespace.store.close());
    }

    /// Returns the protocol auditor's findings, at most 256 of each side; none without
    /// [`Config::audit`].
    pub fn findings(&self) -> Vec<Finding> {
        let observer = self.device.observer.as_ref();
        observer.map_or_else(Vec::new, |observer| observer.findings())
    }

    /// Returns the numbers of commands and completions that the auditor has checked.
    pub fn audited(&self) -> (u64, u64) {
        let observer = self.device.observer.as_ref();
        observer.map_or((0, 0), |observer| observer.seen())
    }

    /// Sets the temperature that the controller reports, in kelvins. Crossing a threshold raises an
    /// asynchronous event, if the driver has enabled it.
    pub fn set_temperature(&self, kelvins: u16) {
        let control = self.device.control.lock();
        let mut logs = self.device.logs.lock();
        logs.set_temperature(kelvins, &control.features);
        self.device.attention.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{DATA, Driver, ENTRIES, config, cq_at, sq_at};
    use nvme_spec::register::offset;
    use nvme_units::SplitMix;

    /// A driver that writes anything anywhere. It passes when nothing panics, no store is exceeded
    /// and the controller can be enabled again afterwards.
    fn hostile(seed: u64, rounds: u32) {
        let mut state = seed;
        let mut next = move || {
            state = SplitMix::new(state).next_word();
            state
        };
        let mut config = config();
        config.cqr = !seed.is_multiple_of(3);
        config.write_cache = seed.is_multiple_of(2);
        if seed.is_multiple_of(5) {
            config.profile = crate::LatencyProfile::OPTANE;
        }
        config.sanitize_ns = seed % 4 * 50_000;
        let mut driver = Driver::new(config);
        driver.breaks_anything();
        driver.create_pair(1);
        let bell = |driver: &Driver, value: u64| {
            let doorbells = driver.controller.doorbells();
            let qid = (value >> 8) as u16 % 5;
            let word = if value & 1 == 0 {
                doorbells.sq_tail(qid)
            } else {
                doorbells.cq_head(qid)
            };
            let limit = if value & 6 == 0 {
                u64::from(u32::MAX)
            } else {
                u64::from(ENTRIES) + 1
            };
            word.store(((value >> 16) % limit) as u32, Ordering::Release);
        };
        for _ in 0..rounds {
            // An entry of plausible opcode with wild fields, in a ring of any queue.
            let qid = next() as u16 % 3;
            let at = sq_at(qid) + next() % u64::from(ENTRIES) * 64;
            let mut words: [u64; 8] = core::array::from_fn(|_| match next() % 4 {
                0 => 0,
                1 => next() % 16,
                2 => DATA + next() % 0x10_0000,
                _ => next(),
            });
            let opcodes = [
                0,
                1,
                2,
                4,
                5,
                6,
                8,
                9,
                0xA,
                0xC,
                0x18,
                0x80,
                0x84,
                next() as u8,
            ];
            let flags = if next().is_multiple_of(4) {
                next() & 0xFF00
            } else {
                0
            };
            let opcode = opcodes[next() as usize % opcodes.len()];
            words[0] = u64::from(opcode) | flags | (next() & 0xFFFF) << 16 | (next() % 3) << 32;
            if next().is_multiple_of(2) {
                words[3] = DATA + (next() % 64) * 4;
                words[4] = DATA + (next() % 512) * 8 * (next() % 512);
                words[5] = next() % 2100;
                words[6] &= 0xFFFF_FFFF_0000_00FF;
            }
            driver
                .memory
                .write(at, &words.map(u64::to_le_bytes).concat())
                .expect("mapped");
            if next().is_multiple_of(3) {
                // Something that may be taken for a list.
                let list = DATA + next() % 512 * 8;
                driver
                    .memory
                    .write(list, &(DATA + next() % 512 * 4096).to_le_bytes())
                    .unwrap();
            }
            let value = next();
            bell(&driver, value);
            match next() % 64 {
                0 => driver
                    .controller
                    .write32(next() as u32 % 0x80, next() as u32),
                1 => driver
                    .controller
                    .write32(0x1000 + next() as u32 % 0x100, next() as u32),
                2 => driver.controller.power_cut(),
                _ => {}
            }
            driver.now_ns += next() % 20_000;
            driver.step();
            if !next().is_multiple_of(4) {
                for qid in 0..=2 {
                    let slot = &driver.controller.device.slots[usize::from(qid)];
                    let tail = slot.cq.lock().as_ref().map_or(0, |cq| cq.tail);
                    driver
                        .controller
                        .doorbells()
                        .cq_head(qid)
                        .store(tail, Ordering::Release);
                }
            }
            if !driver.csts().rdy() || driver.csts().cfs() || driver.csts().shst() != 0 {
                driver.controller.write32(offset::CC, 0);
                driver.memory.write(cq_at(1), &[0; 256]).unwrap();
                driver.enable();
                driver.create_pair(1);
            }
        }
        let stats = driver.controller.queue_stats(1);
        assert!(
            stats.commands > stats.errors && stats.errors > 0,
            "{stats:?}"
        );
        driver.controller.write32(offset::CC, 0);
        driver.enable();
    }

    #[test]
    fn a_hostile_driver_causes_no_panic() {
        let seeds = std::env::var("NVME_SIM_SEEDS")
            .ok()
            .and_then(|seeds| seeds.parse().ok());
        for seed in 0..seeds.unwrap_or(40) {
            // The harness shows this when the test fails: the seed repeats the run.
            std::println!("seed {seed}");
            hostile(seed, 1500);
        }
    }
}
