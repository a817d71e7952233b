//! A driver that does anything at all: the controller never panics, never reaches outside its map and breaks
//! no rule itself.

use super::Input;
use crate::audit::controller_is_right;
use nvme_core::spec::register::{Aqa, Cc, offset};
use nvme_core::spec::{Cid, Nsid, Sqe, admin};
use nvme_sim::config::NamespaceConfig;
use nvme_sim::{Config, Controller, MemoryStore, VecMemory};

/// Address and size of the controller's memory.
const BASE: u64 = 0x10_0000;
const BYTES: u64 = 64 << 10;
/// Admin rings of 16 entries on the first two pages.
const ASQ: u64 = BASE;
const ACQ: u64 = BASE + 4096;

/// The bytes choose registers, doorbells, memory and commands; time passes between the actions.
pub fn hostile_driver(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let store = MemoryStore::new(1 << 20).expect("a mebibyte");
    let mut config = Config {
        namespaces: vec![NamespaceConfig::new(512, Box::new(store))],
        max_queues: 4,
        mqes: 64,
        cache_bytes: 64 << 10,
        audit: true,
        ..Config::empty()
    };
    config.dstrd = input.byte() % 3;
    config.mdts = input.byte() % 6;
    config.cqr = input.byte() & 1 != 0;
    // At once, or over several turns of the loop below.
    config.sanitize_ns = u64::from(config.mdts) * 3_000_000;
    let dstrd = config.dstrd;
    let memory = VecMemory::at(BASE, BYTES as usize);
    let sim = Controller::new(config, memory).expect("a valid configuration");
    if input.byte() & 1 == 0 {
        enable(&sim);
    }
    let (mut now, mut tail) = (0u64, 0u32);
    while !input.is_empty() {
        match input.byte() % 8 {
            0 => sim.write32(u32::from(input.half()), input.word()),
            1 => drop(sim.read64(u32::from(input.half()))),
            2 => {
                let register = [
                    offset::CC,
                    offset::AQA,
                    offset::NSSR,
                    offset::CMBMSC,
                    offset::INTMS,
                ];
                sim.write32(
                    register[usize::from(input.byte()) % register.len()],
                    input.word(),
                );
            }
            3 => {
                let doorbell = u32::from(input.byte() % 12) * (4 << dstrd);
                sim.write32(offset::DOORBELLS + doorbell, u32::from(input.byte()));
            }
            4 => {
                let at = BASE + u64::from(input.half());
                let len = usize::from(input.byte());
                let _ = sim
                    .memory()
                    .write(at.min(BASE + BYTES - 256), input.take(len));
            }
            5 => enable(&sim),
            _ => {
                let sqe = command(&mut input, tail as u16);
                let slot = ASQ + u64::from(tail % 16) * 64;
                for (word, at) in sqe.to_words().iter().zip((slot..).step_by(8)) {
                    sim.memory()
                        .write(at, &word.to_le_bytes())
                        .expect("inside the memory");
                }
                tail = (tail + 1) % 16;
                sim.write32(offset::DOORBELLS, tail);
            }
        }
        now += u64::from(input.byte()) * 100_000;
        sim.step(now);
    }
    sim.power_cut();
    assert_eq!(
        sim.read32(offset::CC),
        0,
        "a power cut resets the registers"
    );
    assert_eq!(sim.unflushed_bytes(), 0, "and loses what was not flushed");
    controller_is_right(&sim.findings());
}

fn enable(sim: &Controller<VecMemory>) {
    let mut aqa = Aqa(0);
    aqa.set_asqs_z(15);
    aqa.set_acqs_z(15);
    sim.write32(offset::AQA, aqa.0);
    sim.write64(offset::ASQ, ASQ);
    sim.write64(offset::ACQ, ACQ);
    let mut cc = Cc(0);
    cc.set_iosqes(6);
    cc.set_iocqes(4);
    cc.set_en(true);
    sim.write32(offset::CC, cc.0);
}

/// Returns a command that is mostly plausible, so that it passes the first check; every field may be nonsense.
fn command(input: &mut Input<'_>, cid: u16) -> Sqe {
    const OPCODES: [u8; 14] = [
        admin::opcode::CREATE_IO_CQ,
        admin::opcode::CREATE_IO_SQ,
        admin::opcode::DELETE_IO_CQ,
        admin::opcode::DELETE_IO_SQ,
        admin::opcode::IDENTIFY,
        admin::opcode::GET_LOG_PAGE,
        admin::opcode::SET_FEATURES,
        admin::opcode::GET_FEATURES,
        admin::opcode::ABORT,
        admin::opcode::ASYNC_EVENT_REQUEST,
        admin::opcode::FORMAT_NVM,
        admin::opcode::KEEP_ALIVE,
        admin::opcode::SANITIZE,
        0xFF,
    ];
    let opcode = OPCODES[usize::from(input.byte()) % OPCODES.len()];
    let mut sqe = Sqe::new(opcode, Nsid(u32::from(input.byte() % 4)));
    sqe.dptr = [
        BASE + u64::from(input.half()),
        BASE + u64::from(input.half() & 0xF000),
    ];
    sqe.cdw10 = u32::from(input.byte() % 5) | u32::from(input.half()) << 16;
    sqe.cdw11 = u32::from(input.byte() % 8) | u32::from(input.byte() % 5) << 16;
    match input.byte() % 16 {
        0 => sqe.cdw0 |= u32::from(input.half()),
        1 => sqe.dptr = [input.long(), input.long()],
        2 => (sqe.cdw10, sqe.cdw11) = (input.word(), input.word()),
        3 => (sqe.cdw12, sqe.cdw13) = (input.word(), input.word()),
        4 => sqe.nsid = input.word(),
        _ => {}
    }
    sqe.with_cid(Cid(cid))
}
