//! The controller's state and its life: enable, reset, shutdown, power cut.
//!
//! Invariant that drivers rely on: once CSTS.RDY reads 0 after CC.EN was cleared, no access to the
//! driver's memory is in progress and none will start. Every access happens under a queue's lock,
//! and `quiesce` takes each of them and removes the queue before RDY changes.

use crate::config::Config;
use crate::doorbell::Doorbells;
use crate::fault::Faults;
use crate::features::Features;
use crate::interrupt::Vectors;
use crate::latency::Pacing;
use crate::logs::Logs;
use crate::memory::{Held, Lock};
use crate::namespace::Namespace;
use crate::observe::Observer;
use crate::queue::{Base, CompletionQueue, Ring, SCRATCH_BYTES, Slot, SubmissionQueue};
use crate::registers::{NSSR_RESET, Registers};
use crate::sanitize::Sanitize;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use nvme_core::spec::register::{ALL_ONES, Cap, Cc, offset};
use nvme_core::spec::{CQE_BYTES, PageSize, SQE_BYTES};

/// A change of CSTS that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transition {
    Enable,
    Disable,
    Shutdown,
}

/// What admin commands and register writes work on, one at a time.
pub(crate) struct Control {
    pub features: Features,
    /// The values that features have after a reset.
    pub saved: Features,
    /// Command identifiers of the asynchronous event requests that wait.
    pub event_requests: Vec<u16>,
    /// Requests among them that were aborted and still have to be completed.
    pub aborted_events: Vec<u16>,
    /// Aborts fetched in the current batch.
    pub aborts: u16,
    /// Vectors of other queues that the current batch has posted to.
    pub posted: Vec<u16>,
    transition: Option<(u64, Transition)>,
}

/// The controller without the memory that it reaches.
pub(crate) struct Device {
    /// As given, less the namespaces.
    pub config: Config,
    pub registers: Registers,
    pub doorbells: Doorbells,
    pub slots: Box<[Slot]>,
    pub namespaces: Box<[Namespace]>,
    pub control: Lock<Control>,
    pub logs: Lock<Logs>,
    pub sanitize: Sanitize,
    pub faults: Faults,
    pub pacing: Pacing,
    pub vectors: Vectors,
    pub observer: Option<Observer>,
    /// Whether the volatile cache may hold writes (feature 06h).
    pub write_back: AtomicBool,
    /// An event or a request for one is new.
    pub attention: AtomicBool,
    /// Virtual time of the last step.
    pub clock_ns: AtomicU64,
    /// When the transition under way is over; `u64::MAX` for none.
    pub transition_ns: AtomicU64,
    /// The highest queue identifier that was created since the last reset.
    pub highest: AtomicU16,
    running: AtomicBool,
    gone: AtomicBool,
}

impl Device {
    /// A controller as after power on. The configuration has been checked.
    pub fn new(mut config: Config) -> Self {
        let mut cap = Cap(0);
        cap.set_mqes(config.mqes);
        cap.set_cqr(config.cqr);
        // Rounded up, and doubled for drivers whose clock is not ours.
        let units = (config.ready_delay_ns / 500_000_000 * 2 + 2).min(255);
        cap.set_to(units as u8);
        cap.set_dstrd(config.dstrd);
        cap.set_nssrs(config.nssr);
        cap.set_css(1);
        cap.set_mpsmin(config.mpsmin);
        cap.set_mpsmax(config.mpsmax);
        cap.set_crms(1);
        let cache = config.write_cache.then_some(config.cache_bytes);
        let namespaces = core::mem::take(&mut config.namespaces)
            .into_iter()
            .map(|one| {
                let mut namespace =
                    Namespace::new(one.store, one.block_bytes, one.metadata_bytes, cache);
                namespace.read_only = one.read_only;
                namespace.noiob = one.noiob;
                namespace
            })
            .collect();
        let features = Features::new(&config);
        let device = Self {
            registers: Registers::new(cap, units as u16),
            doorbells: Doorbells::new(config.max_queues, config.dstrd),
            slots: (0..=config.max_queues).map(|_| Slot::new()).collect(),
            namespaces,
            control: Lock::new(Control {
                saved: features.clone(),
                features,
                event_requests: Vec::new(),
                aborted_events: Vec::new(),
                aborts: 0,
                posted: Vec::new(),
                transition: None,
            }),
            logs: Lock::new(Logs::new()),
            sanitize: Sanitize::new(),
            faults: Faults::new(&config.faults),
            pacing: Pacing::new(config.profile, config.faults.seed),
            vectors: Vectors::new(config.vectors),
            observer: config.audit.then(Observer::default),
            write_back: AtomicBool::new(config.write_cache),
            attention: AtomicBool::new(false),
            clock_ns: AtomicU64::new(0),
            transition_ns: AtomicU64::new(u64::MAX),
            highest: AtomicU16::new(0),
            running: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            config,
        };
        device.describe();
        device
    }

    /// Tells the auditor what the controller is.
    pub fn describe(&self) {
        if let Some(observer) = &self.observer {
            observer.describe(self);
        }
    }

    /// Whether commands are processed.
    #[inline]
    pub fn is_running(&self) -> bool {
        self.running.load(Ordering::Acquire) // Acquire: pairs with the end of enable.
    }

    /// Whether the controller has left the bus.
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Leaves the bus.
    pub fn go(&self) {
        self.gone.store(true, Ordering::Relaxed);
        self.running.store(false, Ordering::Release); // Release: pairs with is_running.
    }

    /// Stops with CSTS.CFS.
    #[cold]
    pub fn fail(&self) {
        self.running.store(false, Ordering::Release); // Release: pairs with is_running.
        self.registers.change_csts(|csts| csts.set_cfs(true));
    }

    /// CC.MPS, which was checked when the controller was enabled.
    pub fn page(&self) -> PageSize {
        PageSize::from_mps(self.registers.cc().mps()).unwrap_or(PageSize::KIB4)
    }

    /// The most bytes that a command may move.
    pub fn max_bytes(&self) -> u64 {
        match self.config.mdts {
            0 => u64::MAX,
            mdts => 4096u64 << self.config.mpsmin << mdts,
        }
    }

    /// Reads 32 bits of BAR0.
    pub fn read32(&self, at: u32) -> u32 {
        if self.is_gone() {
            return ALL_ONES;
        }
        if at >= offset::DOORBELLS {
            let word = self.doorbells.word((at - offset::DOORBELLS) as usize);
            return word.map_or(0, |word| word.load(Ordering::Relaxed));
        }
        match at {
            offset::INTMS | offset::INTMC => self.vectors.mask(),
            _ if at.is_multiple_of(4) => self.registers.read(at),
            _ => 0,
        }
    }

    /// Writes 32 bits of BAR0.
    pub fn write32(&self, at: u32, value: u32) {
        if self.is_gone() {
            return;
        }
        if at >= offset::DOORBELLS {
            return self.ring((at - offset::DOORBELLS) as usize, value);
        }
        if !at.is_multiple_of(4) {
            return;
        }
        let mut control = self.control.lock();
        if self.registers.write(at, value) {
            return;
        }
        match at {
            offset::INTMS => self.vectors.set_mask(self.vectors.mask() | value),
            offset::INTMC => {
                self.vectors.set_mask(self.vectors.mask() & !value);
                self.unmasked(value);
            }
            offset::CC => self.write_cc(&mut control, Cc(value)),
            offset::NSSR if self.config.nssr && value == NSSR_RESET => {
                self.disable(&mut control);
                self.finish(&mut control, Transition::Disable);
                self.registers.set_cc(Cc(0));
                self.vectors.set_mask(0);
                self.registers.change_csts(|csts| {
                    csts.0 = 0;
                    csts.set_nssro(true);
                });
            }
            _ => {}
        }
    }

    /// A doorbell write that was trapped.
    fn ring(&self, at: usize, value: u32) {
        match self.doorbells.decode(at) {
            Some((qid, is_head)) => {
                let doorbells = &self.doorbells;
                let word = if is_head {
                    doorbells.cq_head(qid)
                } else {
                    doorbells.sq_tail(qid)
                };
                word.store(value, Ordering::Release); // Release: pairs with the load in `serve`.
            }
            None if self.is_running() => {
                if let Some(observer) = &self.observer {
                    observer.stray(at);
                }
                self.bad_doorbell(u16::MAX, false);
            }
            None => {}
        }
    }

    fn write_cc(&self, control: &mut Control, mut cc: Cc) {
        let old = self.registers.cc();
        if old.en() && cc.en() {
            // Undefined while enabled; here without effect.
            cc.set_mps(old.mps());
            cc.set_css(old.css());
            cc.set_ams(old.ams());
        }
        self.registers.set_cc(cc);
        match (old.en(), cc.en()) {
            (false, true) => self.enable(control, cc),
            (true, false) => {
                self.disable(control);
                if !self.faults.ready_is_stuck() {
                    self.start(control, Transition::Disable, self.config.ready_delay_ns);
                }
            }
            _ => {}
        }
        // A reset under way goes on: it ends the shutdown, too.
        let resets = matches!(control.transition, Some((_, Transition::Disable)));
        if cc.shn() != 0 && old.shn() == 0 && !resets {
            self.quiesce();
            self.registers.change_csts(|csts| csts.set_shst(1));
            self.start(control, Transition::Shutdown, self.config.shutdown_delay_ns);
        }
    }

    fn enable(&self, control: &mut Control, cc: Cc) {
        let cap = self.registers.cap;
        let page = PageSize::from_mps(cc.mps())
            .unwrap_or(PageSize::KIB4)
            .bytes();
        let aqa = self.registers.aqa();
        let aligned = |word: &AtomicU64| word.load(Ordering::Relaxed).is_multiple_of(page);
        let valid = (cap.mpsmin()..=cap.mpsmax()).contains(&cc.mps())
            && cc.css() == 0
            && cc.ams() == 0
            && matches!(cc.iosqes(), 0 | 6)
            && matches!(cc.iocqes(), 0 | 4)
            && aqa.asqs_z() != 0
            && aqa.acqs_z() != 0
            && aligned(&self.registers.asq)
            && aligned(&self.registers.acq);
        self.registers.change_csts(|csts| csts.set_shst(0));
        if !valid {
            return self.fail();
        }
        if !self.faults.ready_is_stuck() {
            self.start(control, Transition::Enable, self.config.ready_delay_ns);
        }
    }

    /// Stops everything and forgets what a controller reset forgets. RDY changes later.
    fn disable(&self, control: &mut Control) {
        self.quiesce();
        self.pacing.reset();
        self.vectors.reset();
        control.transition = None;
        control.event_requests.clear();
        control.aborted_events.clear();
        control.features = control.saved.clone();
        self.vectors.set_coalescing(control.features.coalescing());
        self.write_back
            .store(control.features.write_cache(), Ordering::Relaxed);
        self.logs.lock().reset();
    }

    /// Removes every queue. When it returns, no access to the driver's memory is in progress.
    fn quiesce(&self) {
        self.running.store(false, Ordering::Release); // Release: pairs with is_running.
        for slot in &self.slots {
            let mut sq = slot.sq.lock();
            *sq = None;
            *slot.cq.lock() = None;
            slot.settled.store(0, Ordering::Relaxed);
            slot.next_due_ns.store(u64::MAX, Ordering::Relaxed);
        }
        self.highest.store(0, Ordering::Relaxed);
        self.doorbells.clear();
        if let Some(observer) = &self.observer {
            observer.reset();
        }
    }

    fn start(&self, control: &mut Control, transition: Transition, delay_ns: u64) {
        if delay_ns == 0 {
            return self.finish(control, transition);
        }
        let at = self
            .clock_ns
            .load(Ordering::Relaxed)
            .saturating_add(delay_ns);
        control.transition = Some((at, transition));
        self.transition_ns.store(at, Ordering::Relaxed);
    }

    /// Finishes the transition under way when its time has come.
    pub fn advance(&self, now_ns: u64) {
        if self.transition_ns.load(Ordering::Relaxed) > now_ns {
            return;
        }
        let mut control = self.control.lock();
        self.transition_ns.store(u64::MAX, Ordering::Relaxed);
        if let Some((at, transition)) = control.transition.take() {
            if at <= now_ns {
                self.finish(&mut control, transition);
            } else {
                control.transition = Some((at, transition));
                self.transition_ns.store(at, Ordering::Relaxed);
            }
        }
    }

    fn finish(&self, control: &mut Control, transition: Transition) {
        control.transition = None;
        self.transition_ns.store(u64::MAX, Ordering::Relaxed);
        match transition {
            Transition::Enable => {
                self.create_admin_queue();
                self.running.store(true, Ordering::Release); // Release: pairs with is_running.
                self.registers.change_csts(|csts| csts.set_rdy(true));
            }
            Transition::Disable => self.registers.change_csts(|csts| {
                csts.set_rdy(false);
                csts.set_cfs(false);
                csts.set_shst(0);
            }),
            Transition::Shutdown => {
                // Abrupt (10b) does not wait for the cache: a power cut may still take it.
                if self.registers.cc().shn() == 1 {
                    for namespace in &self.namespaces {
                        if namespace.flush().is_err() {
                            self.fail();
                        }
                    }
                }
                self.registers.change_csts(|csts| csts.set_shst(2));
            }
        }
    }

    fn create_admin_queue(&self) {
        let aqa = self.registers.aqa();
        let ring = |base: &AtomicU64, entries_z: u16, entry_bytes| Ring {
            base: Base::Contiguous(base.load(Ordering::Relaxed)),
            entries: u32::from(entries_z) + 1,
            entry_bytes,
        };
        self.doorbells.clear();
        let slot = &self.slots[0];
        let sq = ring(&self.registers.asq, aqa.asqs_z(), SQE_BYTES);
        let mut cq = CompletionQueue::new(ring(&self.registers.acq, aqa.acqs_z(), CQE_BYTES));
        cq.users = 1;
        cq.vector = Some(0);
        let mut sq = SubmissionQueue::new(sq, 0, 0, self.delays());
        if let Some(observer) = &self.observer {
            observer.enable(self.page(), &sq.ring, &cq.ring);
            cq.watch = Some(observer.watch(0));
            sq.watch = Some(observer.watch(0));
        }
        *slot.sq.lock() = Some(sq);
        *slot.cq.lock() = Some(cq);
    }

    /// Whether commands can be held back, so that queues need room for them.
    pub fn delays(&self) -> bool {
        !self.pacing.is_none() || !self.faults.is_empty()
    }

    /// Bytes that an I/O queue stages at once: fewer where every store is memory, which stages little.
    pub fn scratch_bytes(&self) -> usize {
        let in_memory = |one: &Namespace| one.store.span().is_some();
        match self.namespaces.iter().all(in_memory) {
            true => SCRATCH_BYTES / 16,
            false => SCRATCH_BYTES,
        }
    }

    /// Cuts the power and switches it on again: whatever was not flushed is gone, and so is every
    /// register value.
    pub fn power_cut(&self) {
        let mut control = self.control.lock();
        let clean = self.registers.csts().shst() == 2;
        self.disable(&mut control);
        for namespace in &self.namespaces {
            if let Some(cache) = &namespace.cache {
                // A store that fails here has failed before; nothing is left to tell it to.
                let _ = cache.power_cut(&*namespace.store);
            }
        }
        self.transition_ns.store(u64::MAX, Ordering::Relaxed);
        self.registers.clear();
        self.vectors.set_mask(0);
        self.gone.store(false, Ordering::Relaxed);
        self.logs.lock().power_cycle(clean);
    }

    /// Resets the PCI function: queues and registers, but no data.
    pub fn function_reset(&self) {
        if self.is_gone() {
            return; // Nobody hears it.
        }
        let mut control = self.control.lock();
        self.disable(&mut control);
        self.transition_ns.store(u64::MAX, Ordering::Relaxed);
        self.registers.clear();
        self.vectors.set_mask(0);
    }

    /// Brings back a controller that had left the bus; it is to be reset.
    pub fn plug_in(&self) {
        self.gone.store(false, Ordering::Relaxed);
    }

    /// Waits until no command of an I/O queue is executing. Commands that start afterwards see what
    /// the caller has changed before.
    pub fn barrier(&self) {
        for slot in self.slots.iter().skip(1) {
            drop::<Held<'_, _>>(slot.sq.lock());
        }
    }
}

#[cfg(test)]
mod tests;
