//! The controller brought up by the core's own machine, with the queues of the GPU created.
// UNSAFETY: the admin queue's rings are raw memory that the controller shares.
#![allow(unsafe_code)]

use crate::limits::limit;
use nvme_core::bringup::{BringupConfig, BringupMachine, BringupStep, QueuePlan};
use nvme_core::mem::{CqRing, DmaWords, DoorbellRegister, SqRing};
use nvme_core::spec::{self, Cid, Iova, PageSize, Qid};
use nvme_core::{
    CommandData, CommandSlot, ListMemory, QueueMemory, QueuePair, Quiesced, RegisterAccess,
};
use nvme_host::DmaPages;
use std::time::{Duration, Instant};

/// The admin queue. It must not be used after its memory was freed.
pub type AdminQueue = QueuePair<'static, (), Vec<CommandSlot<()>>>;

/// Asks the controller to abort a command; returns whether the controller reports success.
pub fn abort(admin: &mut AdminQueue, qid: Qid, cid: Cid) -> Result<bool, String> {
    let deadline = Instant::now() + limit();
    let sent = admin
        .submit(
            spec::admin::abort(qid, cid),
            CommandData::None,
            (),
            u64::MAX,
        )
        .map_err(|rejected| rejected.error.to_string())?;
    admin.ring();
    while Instant::now() < deadline {
        match admin.poll().map_err(|fault| fault.to_string())? {
            // Bit 0 of dword 0 is set when the command was not aborted.
            Some(done) if done.cid == sent => return Ok(done.dw0 & 1 == 0),
            _ => std::thread::yield_now(),
        }
    }
    Err("Abort got no answer".to_owned())
}

/// Bytes of memory that it needs.
pub const BYTES: usize = 3 * 4096;

/// Location of a controller's properties and of its admin queue.
pub struct Place<'a> {
    pub registers: &'a dyn RegisterAccess,
    /// The host's addresses of the admin queue's tail and head doorbells.
    pub doorbells: [u64; 2],
    /// [`BYTES`] for the rings.
    pub pages: &'a DmaPages,
    /// Address of the memory for the controller.
    pub iova: Iova,
}

/// Brings the controller up, from whatever state; `disabled` runs while it touches no memory.
pub fn bring_up(
    place: &Place<'_>,
    plans: &[QueuePlan],
    mut disabled: impl FnMut(&Quiesced<'_>) -> Result<(), String>,
) -> Result<AdminQueue, String> {
    let at = |page: usize| place.pages.start().wrapping_add(page * 4096);
    let iova = |page: usize| place.iova.offset(page as u64 * 4096);
    let bell = |address: u64| {
        // SAFETY: the addresses are doorbells of the admin queue, which live as long as the controller.
        unsafe { DoorbellRegister::from_raw(address as usize as *mut u32) }
    };
    let memory = QueueMemory {
        // SAFETY: the rings have one page each; the pages live as long as this rig and are used through the rings
        // alone.
        sq: unsafe { SqRing::from_raw(at(0), 64, iova(0)) },
        // SAFETY: as above.
        cq: unsafe { CqRing::from_raw(at(1), 64, iova(1)) },
        sq_doorbell: bell(place.doorbells[0]),
        cq_doorbell: bell(place.doorbells[1]),
        lists: ListMemory::new(DmaWords::new(&[], Iova(0)), PageSize::KIB4, 0),
    };
    let slots: Vec<CommandSlot<()>> = (0..63).map(|_| CommandSlot::new()).collect();
    let registers = place.registers;
    let mut pair = QueuePair::new(registers.identity(), Qid::ADMIN, memory, slots);
    let config = BringupConfig {
        queue_pairs: plans.len() as u32,
        plans,
        ..BringupConfig::default()
    };
    // SAFETY: the words are one page, as above.
    let page = unsafe { DmaWords::from_raw(at(2), 512, iova(2)) };
    let mut machine = BringupMachine::new(registers, config, page).map_err(|e| e.to_string())?;
    let start = Instant::now();
    loop {
        let now_ns = start.elapsed().as_nanos() as u64;
        let step = machine.step(registers, &mut pair, now_ns);
        match step.map_err(|error| error.to_string())? {
            BringupStep::Ready => break,
            BringupStep::Wait { .. } => std::thread::sleep(Duration::from_micros(50)),
            BringupStep::Disabled(proof) => {
                pair.restart(&proof);
                disabled(&proof)?;
                machine.enable(proof);
            }
            BringupStep::HostMemory { .. } => machine.host_memory(None),
        }
    }
    match machine.info().created as usize == plans.len() {
        true => Ok(pair),
        false => Err(format!("{} queues were created", machine.info().created)),
    }
}
