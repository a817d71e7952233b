//! Registers and doorbells.

use super::{Outcome, require};
use crate::{config, said};
use nvme_host::core::spec::register::{Cap, Cc, Csts, offset};
use nvme_host::core::spec::{Lba, Nsid, nvm};
use nvme_host::{Controller, ControllerConfig, Device};
use std::sync::Arc;

/// An arbitrary value of ASQ, whose low 12 bits are reserved.
const ADDRESS: u64 = 0x0123_4567_89AB_C000;

/// Halves and wholes agree, what is written is read back, and a disabled controller is disabled.
pub fn run(device: &Arc<dyn Device>) -> Outcome {
    let registers = device.registers();
    require(
        std::ptr::eq(registers.identity(), device.registers().identity()),
        "the identity changes",
    )?;
    let cap = registers.read64(offset::CAP);
    let halves = [0, 4].map(|at| u64::from(registers.read32(offset::CAP + at)));
    require(
        cap == halves[0] | halves[1] << 32,
        "CAP differs from its halves",
    )?;
    require(Cap(cap).mqes() > 0, "CAP.MQES is 0")?;
    let version = registers.read32(offset::VS);
    require(version >> 16 >= 1 && version != u32::MAX, "VS is none")?;
    for _ in 0..2 {
        device.disable().map_err(said)?;
        require(
            !Cc(registers.read32(offset::CC)).en(),
            "CC.EN after disable()",
        )?;
        require(
            !Csts(registers.read32(offset::CSTS)).rdy(),
            "CSTS.RDY after disable()",
        )?;
    }
    registers.write64(offset::ASQ, ADDRESS);
    let halves = [0, 4].map(|at| u64::from(registers.read32(offset::ASQ + at)));
    let whole = registers.read64(offset::ASQ);
    require(
        whole == ADDRESS && halves[0] | halves[1] << 32 == ADDRESS,
        "ASQ by 64 bits",
    )?;
    registers.write32(offset::ASQ, 0);
    registers.write32(offset::ASQ + 4, 0x77);
    require(
        registers.read64(offset::ASQ) == 0x77 << 32,
        "ASQ by 32 bits",
    )?;
    registers.write64(offset::ASQ, 0);
    Ok(())
}

/// The map stays the same, and the doorbells of the first and the last queue start commands; one that lies past the
/// map is refused.
pub fn doorbells(device: &Arc<dyn Device>) -> Outcome {
    let map = || format!("{:?}", device.doorbells());
    require(map() == map(), "the map of the doorbells changes")?;
    let config = ControllerConfig {
        queue_pairs: 64,
        ..config()
    };
    let controller = Controller::start(Arc::clone(device), &config).map_err(said)?;
    let block = controller.namespace(Nsid(1)).map_err(said)?.block_bytes() as usize;
    let mut queues = Vec::new();
    for _ in 0..controller.info().queue_pairs.min(64) {
        queues.push(controller.create_queue_pair(2).map_err(said)?);
    }
    let last = queues.len() - 1;
    for at in [0, last] {
        let queue = &mut queues[at];
        for _ in 0..3 {
            let buffer = controller.alloc(block).map_err(said)?;
            let submitted = queue.submit(nvm::read(Nsid(1), Lba(0), 1), Some(buffer));
            submitted.map_err(|rejected| rejected.error.to_string())?;
            queue.ring();
            let done = queue.wait().map_err(said)?.ok_or("a command was lost")?;
            require(done.is_success(), "a read failed")?;
        }
    }
    drop(queues);
    require(controller.resets() == 0, "the controller was reset")?;
    controller.shut_down().map_err(said)
}
