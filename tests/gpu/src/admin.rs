//! The controller brought up by the core's own machine, with the queues of the GPU created.
// UNSAFETY: the admin queue's rings are raw memory that the controller shares.
#![allow(unsafe_code)]

use crate::sim::Sim;
use nvme_core::bringup::{Bringup, Config, QueuePlan, Step};
use nvme_core::handoff::QueueWords;
use nvme_core::mem::{CqRing, DmaWords, Doorbell, SqRing};
use nvme_core::spec::{self, Cid, Iova, PageSize, Qid, register};
use nvme_core::{Data, ListMemory, QueueMemory, QueuePair, Quiesced, Slot};
use nvme_host::{Device, Pages};
use std::time::{Duration, Instant};

/// The admin queue. It must not be used after the memory that it was made over is gone.
pub type AdminQueue = QueuePair<'static, (), Vec<Slot<()>>>;

/// Asks the controller to abort a command; whether it says that it did.
pub fn abort(admin: &mut AdminQueue, qid: Qid, cid: Cid) -> Result<bool, String> {
    let deadline = Instant::now() + Duration::from_secs(5);
    let sent = admin
        .submit(spec::admin::abort(qid, cid), Data::None, (), u64::MAX)
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

/// Brings the controller up, from whatever state; `disabled` runs while it touches no memory. `pages` has
/// [`BYTES`], which the controller reaches at their own address.
pub fn bring_up(
    sim: &Sim,
    pages: &Pages,
    queues: &[QueueWords],
    mut disabled: impl FnMut(&Quiesced<'_>) -> Result<(), String>,
) -> Result<AdminQueue, String> {
    let at = |page: usize| pages.start().wrapping_add(page * 4096);
    let iova = |start: *mut u8| Iova(start.addr() as u64);
    let bell = |register: u32| {
        // SAFETY: doorbells of the admin queue, which live as long as the controller.
        unsafe { Doorbell::from_raw(sim.doorbell(register) as usize as *mut u32) }
    };
    let dstrd = sim.dstrd();
    let memory = QueueMemory {
        // SAFETY: one page each, that live as long as this rig and are used through the rings alone.
        sq: unsafe { SqRing::from_raw(at(0), 64, iova(at(0))) },
        // SAFETY: as above.
        cq: unsafe { CqRing::from_raw(at(1), 64, iova(at(1))) },
        sq_doorbell: bell(register::sq_tail_doorbell(0, dstrd)),
        cq_doorbell: bell(register::cq_head_doorbell(0, dstrd)),
        lists: ListMemory::new(DmaWords::new(&[], Iova(0)), PageSize::KIB4, 0),
    };
    let slots: Vec<Slot<()>> = (0..63).map(|_| Slot::new()).collect();
    let mut pair = QueuePair::new(sim.registers().identity(), Qid::ADMIN, memory, slots);
    let plan = |words: &QueueWords| QueuePlan {
        qid: Qid(words.qid as u16),
        sq_entries: words.entries,
        sq_iova: Iova(words.sq),
        cq_entries: words.entries,
        cq_iova: Iova(words.cq),
        vector: None,
    };
    let plans: Vec<QueuePlan> = queues.iter().map(plan).collect();
    let config = Config {
        queue_pairs: queues.len() as u32,
        plans: &plans,
        ..Config::default()
    };
    // SAFETY: one page, as above.
    let page = unsafe { DmaWords::from_raw(at(2), 512, iova(at(2))) };
    let registers = sim.registers();
    let mut machine = Bringup::new(registers, config, page).map_err(|e| e.to_string())?;
    let start = Instant::now();
    loop {
        let now_ns = start.elapsed().as_nanos() as u64;
        let step = machine.step(registers, &mut pair, now_ns);
        match step.map_err(|error| error.to_string())? {
            Step::Ready => break,
            Step::Wait { .. } => std::thread::sleep(Duration::from_micros(50)),
            Step::Disabled(proof) => {
                pair.restart(&proof);
                disabled(&proof)?;
                machine.enable(proof);
            }
            Step::HostMemory { .. } => machine.host_memory(None),
        }
    }
    match machine.info().created as usize == queues.len() {
        true => Ok(pair),
        false => Err(format!("{} queues were created", machine.info().created)),
    }
}
