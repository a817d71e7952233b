//! Enable, reset, shutdown and loss of power.
//!
//! Drivers rely on one invariant: once CSTS.RDY reads 0 after CC.EN was cleared, no access to the
//! driver's memory is in progress, and none will start. Every access happens under a queue's lock,
//! and `quiesce` takes each of these locks and removes the queue before RDY changes.

use crate::bus::queue::{CompletionQueue, SubmissionQueue};
use crate::bus::ring::{QueueRing, RingBase};
use crate::device::ControllerState;
use crate::device::control::{AdminState, StateTransition};
use core::sync::atomic::{AtomicU64, Ordering};
use nvme_spec::register::Cc;
use nvme_spec::{CQE_BYTES, PageSize, SQE_BYTES};

pub(crate) fn write_cc(device: &ControllerState, control: &mut AdminState, mut cc: Cc) {
    let old = device.registers.cc();
    if old.en() && cc.en() {
        // The specification leaves these changes undefined while CC.EN is 1; here they have no
        // effect.
        cc.set_mps(old.mps());
        cc.set_css(old.css());
        cc.set_ams(old.ams());
    }
    device.registers.set_cc(cc);
    match (old.en(), cc.en()) {
        (false, true) => enable(device, control, cc),
        (true, false) => {
            disable(device, control);
            if !device.faults.ready_is_stuck() {
                start(
                    device,
                    control,
                    StateTransition::Disable,
                    device.config.ready_delay_ns,
                );
            }
        }
        _ => {}
    }
    // A reset in progress continues: when it ends, it clears SHST and so ends the shutdown as well.
    let resets = matches!(control.transition, Some((_, StateTransition::Disable)));
    if cc.shn() != 0 && old.shn() == 0 && !resets {
        quiesce(device);
        device.registers.change_csts(|csts| csts.set_shst(1));
        start(
            device,
            control,
            StateTransition::Shutdown,
            device.config.shutdown_delay_ns,
        );
    }
}

fn enable(device: &ControllerState, control: &mut AdminState, cc: Cc) {
    let cap = device.registers.cap;
    let page = PageSize::from_mps(cc.mps())
        .unwrap_or(PageSize::KIB4)
        .bytes();
    let aqa = device.registers.aqa();
    let aligned = |word: &AtomicU64| word.load(Ordering::Relaxed).is_multiple_of(page);
    let valid = (cap.mpsmin()..=cap.mpsmax()).contains(&cc.mps())
        && cc.css() == 0
        && cc.ams() == 0
        && matches!(cc.iosqes(), 0 | 6)
        && matches!(cc.iocqes(), 0 | 4)
        && aqa.asqs_z() != 0
        && aqa.acqs_z() != 0
        && aligned(&device.registers.asq)
        && aligned(&device.registers.acq);
    device.registers.change_csts(|csts| csts.set_shst(0));
    if !valid {
        return device.fail();
    }
    if !device.faults.ready_is_stuck() {
        start(
            device,
            control,
            StateTransition::Enable,
            device.config.ready_delay_ns,
        );
    }
}

/// Stops all queues and clears the state that a controller reset clears. CSTS.RDY changes later.
pub(crate) fn disable(device: &ControllerState, control: &mut AdminState) {
    quiesce(device);
    device.pacing.reset();
    device.vectors.reset();
    control.transition = None;
    control.event_requests.clear();
    control.aborted_events.clear();
    control.features = control.saved.clone();
    device.vectors.set_coalescing(control.features.coalescing());
    device
        .write_back
        .store(control.features.write_cache(), Ordering::Relaxed);
    device.logs.lock().reset();
}

/// Removes every queue. When it returns, no access to the driver's memory is in progress.
fn quiesce(device: &ControllerState) {
    device.set_running(false);
    for slot in &device.slots {
        let mut sq = slot.sq.lock();
        *sq = None;
        *slot.cq.lock() = None;
        slot.served_tail.store(0, Ordering::Relaxed);
        slot.next_due_ns.store(u64::MAX, Ordering::Relaxed);
    }
    device.highest.store(0, Ordering::Relaxed);
    device.doorbells.clear();
    if let Some(observer) = &device.observer {
        observer.reset();
    }
}

fn start(
    device: &ControllerState,
    control: &mut AdminState,
    transition: StateTransition,
    delay_ns: u64,
) {
    if delay_ns == 0 {
        return finish(device, control, transition);
    }
    let at = device
        .clock_ns
        .load(Ordering::Relaxed)
        .saturating_add(delay_ns);
    control.transition = Some((at, transition));
    device.transition_ns.store(at, Ordering::Relaxed);
}

/// Ends the transition in progress, if it is due.
pub(crate) fn advance(device: &ControllerState, now_ns: u64) {
    if device.transition_ns.load(Ordering::Relaxed) > now_ns {
        return;
    }
    let mut control = device.control.lock();
    device.transition_ns.store(u64::MAX, Ordering::Relaxed);
    if let Some((at, transition)) = control.transition.take() {
        if at <= now_ns {
            finish(device, &mut control, transition);
        } else {
            control.transition = Some((at, transition));
            device.transition_ns.store(at, Ordering::Relaxed);
        }
    }
}

pub(crate) fn finish(
    device: &ControllerState,
    control: &mut AdminState,
    transition: StateTransition,
) {
    control.transition = None;
    device.transition_ns.store(u64::MAX, Ordering::Relaxed);
    match transition {
        StateTransition::Enable => {
            create_admin_queue(device);
            device.set_running(true);
            device.registers.change_csts(|csts| csts.set_rdy(true));
        }
        StateTransition::Disable => device.registers.change_csts(|csts| {
            csts.set_rdy(false);
            csts.set_cfs(false);
            csts.set_shst(0);
        }),
        StateTransition::Shutdown => {
            // An abrupt shutdown (10b) does not flush the cache, so a later power cut may still
            // revert writes.
            if device.registers.cc().shn() == 1 {
                for namespace in &device.namespaces {
                    if namespace.flush().is_err() {
                        device.fail();
                    }
                }
            }
            device.registers.change_csts(|csts| csts.set_shst(2));
        }
    }
}

fn create_admin_queue(device: &ControllerState) {
    let aqa = device.registers.aqa();
    let ring = |base: &AtomicU64, entries_z: u16, entry_bytes| QueueRing {
        base: RingBase::Contiguous(base.load(Ordering::Relaxed)),
        entries: u32::from(entries_z) + 1,
        entry_bytes,
    };
    device.doorbells.clear();
    let slot = &device.slots[0];
    let sq = ring(&device.registers.asq, aqa.asqs_z(), SQE_BYTES);
    let mut cq = CompletionQueue::new(ring(&device.registers.acq, aqa.acqs_z(), CQE_BYTES));
    cq.users = 1;
    cq.vector = Some(0);
    let mut sq = SubmissionQueue::new(sq, 0, 0, device.delays());
    if let Some(observer) = &device.observer {
        observer.enable(device.page(), &sq.ring, &cq.ring);
        cq.watch = Some(observer.watch(0));
        sq.watch = Some(observer.watch(0));
    }
    *slot.sq.lock() = Some(sq);
    *slot.cq.lock() = Some(cq);
}

/// Cuts the power and restores it: data that was not flushed is lost, and so is every register
/// value.
pub(crate) fn power_cut(device: &ControllerState) {
    let mut control = device.control.lock();
    let clean = device.registers.csts().shst() == 2;
    disable(device, &mut control);
    for namespace in &device.namespaces {
        if let Some(cache) = &namespace.cache {
            // A store that fails here has failed before, and with the power off there is no command
            // to report to.
            let _ = cache.power_cut(&*namespace.store);
        }
    }
    device.transition_ns.store(u64::MAX, Ordering::Relaxed);
    device.registers.clear();
    device.vectors.set_mask(0);
    device.plug_in();
    device.logs.lock().power_cycle(clean);
}

/// Resets the PCI function: queues and registers, but no data.
pub(crate) fn function_reset(device: &ControllerState) {
    if device.is_off_bus() {
        return; // It does not reach the function.
    }
    let mut control = device.control.lock();
    disable(device, &mut control);
    device.transition_ns.store(u64::MAX, Ordering::Relaxed);
    device.registers.clear();
    device.vectors.set_mask(0);
}

#[cfg(test)]
mod tests;
