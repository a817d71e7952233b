//! A guest that does anything with its registers, its queues and its memory map: the controller
//! accesses only what is mapped, breaks no rule, and can always be reset.

use super::{Input, is_audited};
use crate::audit::controller_is_right;
use nvme_core::spec::register::{Aqa, Cc, Csts, offset};
use nvme_core::spec::{Cid, Nsid, Sqe, admin, nvm};
use nvme_sim::config::NamespaceConfig;
use nvme_sim::{Config, Controller, HostMemory, InterruptSink, MemoryStore};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Regions of 16 KiB: the first three touch, before the last there is a hole.
const STARTS: [u64; 4] = [0x10_0000, 0x10_4000, 0x10_8000, 0x11_0000];
const WORDS: usize = 16 << 10 >> 3;
const VECTORS: u16 = 5;

/// Checks the vectors.
struct Vectors(AtomicU64);

impl InterruptSink for Vectors {
    fn raise(&self, vector: u16, _masked: bool, _level: &dyn Fn() -> bool) {
        assert!(vector < VECTORS, "vector {vector}");
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

struct Guest {
    sim: Controller<HostMemory>,
    map: HostMemory,
    regions: [Arc<[AtomicU64]>; 4],
}

/// The bytes choose registers, rings, commands and the map; time passes between the actions.
pub fn guest_memory(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let store = MemoryStore::new(1 << 20).expect("a mebibyte");
    let map = HostMemory::new();
    let config = Config {
        namespaces: vec![NamespaceConfig::new(512, Box::new(store))],
        max_queues: 4,
        mqes: 64,
        cache_bytes: 64 << 10,
        mdts: 1 + input.byte() % 5,
        cqr: input.byte() & 1 != 0,
        vectors: VECTORS,
        audit: is_audited(bytes),
        ..Config::empty()
    };
    let vectors = Arc::new(Vectors(AtomicU64::new(0)));
    let sim = Controller::new(config, map.clone()).expect("a valid configuration");
    let guest = Guest {
        sim: sim.with_interrupts(vectors.clone()),
        map,
        regions: std::array::from_fn(|_| (0..WORDS).map(|_| AtomicU64::new(0)).collect()),
    };
    for which in 0..4 {
        guest.share(which);
    }
    guest.enable();
    let (mut now, mut tails) = (0u64, [0u32; 5]);
    while !input.is_empty() {
        guest.act(&mut input, &mut tails);
        now += u64::from(input.byte()) * 50_000;
        guest.sim.step(now);
    }
    // No memory is accessed after a reset, whatever was under way.
    guest.sim.write32(offset::CC, 0);
    let before = guest.sum();
    guest.sim.step(now + 1_000_000_000);
    assert_eq!(guest.sum(), before, "memory was written after a reset");
    let csts = Csts(guest.sim.read32(offset::CSTS));
    assert!(!csts.rdy() && !csts.cfs(), "{csts:?}");
    // Nor after it was unmapped, with the controller running.
    guest.enable();
    guest.map.unmap(0, u64::MAX);
    let before = guest.sum();
    guest.sim.write32(offset::DOORBELLS, 3);
    guest.sim.step(now + 2_000_000_000);
    assert_eq!(guest.sum(), before, "unmapped memory was written");
    assert!(
        Csts(guest.sim.read32(offset::CSTS)).cfs(),
        "no fatal status"
    );
    assert!(!guest.sim.interrupt_pin());
    controller_is_right(&guest.sim.findings());
}

impl Guest {
    fn share(&self, which: usize) {
        // Mapped already is as good.
        let _ = self.map.share(STARTS[which], self.regions[which].clone());
    }

    /// Returns a sum of all memory.
    fn sum(&self) -> u64 {
        let words = self.regions.iter().flat_map(|region| region.iter());
        words.fold(0, |sum: u64, word| {
            sum.rotate_left(1) ^ word.load(Ordering::Relaxed)
        })
    }

    /// Returns the word at an address, when it is memory.
    fn word(&self, at: u64) -> Option<&AtomicU64> {
        self.regions.iter().zip(STARTS).find_map(|(region, start)| {
            let offset = at.checked_sub(start)?;
            region.get((offset / 8) as usize)
        })
    }

    fn enable(&self) {
        let mut aqa = Aqa(0);
        aqa.set_asqs_z(15);
        aqa.set_acqs_z(15);
        self.sim.write32(offset::AQA, aqa.0);
        self.sim.write64(offset::ASQ, STARTS[0]);
        self.sim.write64(offset::ACQ, STARTS[0] + 0x1000);
        let mut cc = Cc(0);
        cc.set_iosqes(6);
        cc.set_iocqes(4);
        cc.set_en(true);
        self.sim.write32(offset::CC, cc.0);
    }

    fn act(&self, input: &mut Input<'_>, tails: &mut [u32; 5]) {
        match input.byte() % 16 {
            0 => self.sim.write32(u32::from(input.byte()) & !3, input.word()),
            1 => {
                let doorbell = u32::from(input.byte() % 10) * 4;
                let value = u32::from(input.byte() % 70);
                self.sim.write32(offset::DOORBELLS + doorbell, value);
            }
            2 => {
                self.map
                    .unmap(STARTS[usize::from(input.byte() % 4)], 16 << 10);
            }
            3 | 4 => (0..4).for_each(|which| self.share(which)),
            5 => {
                self.sim.write32(offset::CC, 0);
                *tails = [0; 5];
                self.enable();
            }
            6 => {
                // A list, or something that may be taken for one.
                let at = address(input) & !7;
                for i in 0..u64::from(input.byte() % 8) {
                    if let Some(word) = self.word(at.wrapping_add(i * 8)) {
                        word.store(address(input), Ordering::Relaxed);
                    }
                }
            }
            7 => self.sim.write32(offset::INTMS, input.word()),
            8 => self.sim.write32(offset::INTMC, input.word()),
            9..=11 => self.submit(0, admin_command(input), tails),
            _ => self.submit(usize::from(1 + input.byte() % 2), io_command(input), tails),
        }
    }

    /// Writes a command at the address of the ring of `qid` and rings the doorbell.
    fn submit(&self, qid: usize, sqe: Sqe, tails: &mut [u32; 5]) {
        let at = ring(qid) + u64::from(tails[qid] % 16) * 64;
        let words = sqe.with_cid(Cid(tails[qid] as u16)).to_words();
        for (word, at) in words.into_iter().zip((at..).step_by(8)) {
            if let Some(place) = self.word(at) {
                place.store(word, Ordering::Relaxed);
            }
        }
        tails[qid] += 1;
        let bell = offset::DOORBELLS + qid as u32 * 8;
        self.sim.write32(bell, tails[qid] % 16);
        // Completions are taken at once, mostly.
        self.sim.write32(bell + 4, tails[qid] % 16);
    }
}

/// Returns the address of the submission ring of a queue: a page each, with the admin completions
/// between them.
fn ring(qid: usize) -> u64 {
    match qid {
        0 => STARTS[0],
        _ => STARTS[0] + 0x1000 + qid as u64 * 0x1000,
    }
}

/// Returns an address in or near the memory, at a page, a word, or anywhere.
fn address(input: &mut Input<'_>) -> u64 {
    let page = STARTS[0] + u64::from(input.byte() % 24) * 0x1000;
    match input.byte() % 8 {
        0 => input.long(),
        1 => page + u64::from(input.half() & 0xFFC),
        2 => page + 0xFF8,
        _ => page,
    }
}

fn admin_command(input: &mut Input<'_>) -> Sqe {
    use admin::opcode::*;
    const OPCODES: [u8; 8] = [
        CREATE_IO_CQ,
        CREATE_IO_SQ,
        DELETE_IO_CQ,
        DELETE_IO_SQ,
        IDENTIFY,
        GET_LOG_PAGE,
        SET_FEATURES,
        ASYNC_EVENT_REQUEST,
    ];
    let opcode = OPCODES[usize::from(input.byte() % 8)];
    let mut sqe = Sqe::new(opcode, Nsid(u32::from(input.byte() % 3)));
    let qid = u32::from(1 + input.byte() % 3);
    sqe.dptr = [address(input), address(input)];
    sqe.cdw10 = 15 << 16 | qid;
    match opcode {
        CREATE_IO_CQ => sqe.cdw11 = 3 | u32::from(input.byte() % 8) << 16,
        CREATE_IO_SQ => {
            sqe.dptr[0] = ring(qid as usize);
            sqe.cdw11 = 1 | qid << 16;
        }
        IDENTIFY | GET_LOG_PAGE => sqe.cdw10 = u32::from(input.byte() % 8) | 0x3F << 16,
        SET_FEATURES => {
            sqe.cdw10 = u32::from(input.byte() % 16);
            sqe.cdw11 = input.word();
        }
        _ => {}
    }
    sqe
}

fn io_command(input: &mut Input<'_>) -> Sqe {
    use nvm::opcode::*;
    const OPCODES: [u8; 7] = [
        READ,
        WRITE,
        COMPARE,
        FLUSH,
        WRITE_ZEROES,
        DATASET_MANAGEMENT,
        VERIFY,
    ];
    let mut sqe = Sqe::new(OPCODES[usize::from(input.byte() % 7)], Nsid(1));
    sqe.dptr = [address(input), address(input)];
    sqe.cdw10 = u32::from(input.half() % 2100);
    sqe.cdw12 = u32::from(input.byte() % 72);
    if input.byte().is_multiple_of(4) {
        // The command uses an SGL: one descriptor of any kind.
        sqe.cdw0 |= 1 << 14;
        sqe.dptr[1] = u64::from(input.byte()) << 56 | u64::from(input.half());
    }
    sqe
}
