//! Reads and writes of BAR0: properties, doorbells that are trapped, interrupt masks.
//!
//! Register writes take the control lock, as admin commands do, so the two never act on the
//! controller at the same time; a doorbell write takes no lock.
//!
//! NVMe Base 2.0c, 3.1.3 (Controller Properties).

use crate::device::ControllerState;
use crate::device::control::StateTransition;
use crate::engine::lifecycle;
use core::sync::atomic::Ordering;
use nvme_spec::register::{ALL_ONES, Cc, SUBSYSTEM_RESET, offset};

/// Reads 32 bits of BAR0.
pub(crate) fn read32(device: &ControllerState, at: u32) -> u32 {
    if device.is_off_bus() {
        return ALL_ONES;
    }
    if at >= offset::DOORBELLS {
        let word = device.doorbells.word((at - offset::DOORBELLS) as usize);
        return word.map_or(0, |word| word.load(Ordering::Relaxed));
    }
    match at {
        offset::INTMS | offset::INTMC => device.vectors.mask(),
        _ if at.is_multiple_of(4) => device.registers.read(at),
        _ => 0,
    }
}

/// Writes 32 bits of BAR0.
pub(crate) fn write32(device: &ControllerState, at: u32, value: u32) {
    if device.is_off_bus() {
        return;
    }
    if at >= offset::DOORBELLS {
        return ring(device, (at - offset::DOORBELLS) as usize, value);
    }
    if !at.is_multiple_of(4) {
        return;
    }
    let mut control = device.control.lock();
    if device.registers.write(at, value) {
        return;
    }
    match at {
        offset::INTMS => device.vectors.set_mask(device.vectors.mask() | value),
        offset::INTMC => {
            device.vectors.set_mask(device.vectors.mask() & !value);
            unmasked(device, value);
        }
        offset::CC => lifecycle::write_cc(device, &mut control, Cc(value)),
        offset::NSSR if device.config.nssr && value == SUBSYSTEM_RESET => {
            lifecycle::disable(device, &mut control);
            lifecycle::finish(device, &mut control, StateTransition::Disable);
            device.registers.set_cc(Cc(0));
            device.vectors.set_mask(0);
            device.registers.change_csts(|csts| {
                csts.0 = 0;
                csts.set_nssro(true);
            });
        }
        _ => {}
    }
}

/// Carries out a doorbell write that was trapped.
fn ring(device: &ControllerState, at: usize, value: u32) {
    match device.doorbells.decode(at) {
        Some((qid, is_head)) => {
            let doorbells = &device.doorbells;
            let word = if is_head {
                doorbells.cq_head(qid)
            } else {
                doorbells.sq_tail(qid)
            };
            word.store(value, Ordering::Release); // Release: pairs with the load in `serve`.
        }
        None if device.is_running() => {
            if let Some(observer) = &device.observer {
                observer.stray(at);
            }
            device.bad_doorbell(false);
        }
        None => {}
    }
}

/// Returns the vectors whose completion queues hold entries that the driver has not consumed.
fn waiting_vectors(device: &ControllerState) -> impl Iterator<Item = u16> {
    let slots = device.slots.iter().enumerate();
    slots.filter_map(|(qid, slot)| {
        let cq = slot.cq.lock();
        let cq = cq.as_ref()?;
        let head = device.doorbells.cq_head(qid as u16).load(Ordering::Relaxed);
        cq.vector.filter(|_| cq.tail != head)
    })
}

/// Returns the level of the interrupt pin: asserted while a queue with interrupts holds entries and
/// INTMS does not mask its vector.
pub(crate) fn pin(device: &ControllerState) -> bool {
    device.is_running() && waiting_vectors(device).any(|vector| !device.vectors.is_masked(vector))
}

/// Raises the vectors of `mask` again whose queues hold entries, because they were just unmasked
/// and the driver may wait for them.
pub(crate) fn unmasked(device: &ControllerState, mask: u32) {
    for vector in waiting_vectors(device) {
        if vector < 32 && mask >> vector & 1 != 0 {
            device.vectors.raise(vector, &|| pin(device));
        }
    }
}
