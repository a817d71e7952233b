//! Any sequence of accesses to the simulator's registers, and any answers of registers to the core's
//! machines: properties stay what they are, a controller can always be reset, every machine ends.

use super::is_audited;
use crate::audit::controller_is_right;
use crate::bringup::Host;
use arbitrary::{Arbitrary, Unstructured};
use nvme_core::bringup::{self, BringupMachine, BringupStep, HostMemoryPages};
use nvme_core::mem::{CqCell, CqRing, DmaWords, DoorbellRegister, SqCell, SqRing};
use nvme_core::shutdown::{self, ShutdownKind, ShutdownMachine};
use nvme_core::spec::register::{Aqa, Cc, Csts, offset};
use nvme_core::spec::{Iova, PageSize, Qid};
use nvme_core::sync::{AtomicU32, AtomicU64};
use nvme_core::{
    BringupError, CommandSlot, ControllerIdentity, ListMemory, QueueMemory, QueuePair, Quiesced,
    RegisterAccess,
};
use nvme_sim::config::NamespaceConfig;
use nvme_sim::{Config, Controller, NullStore, VecMemory};
use std::cell::{Cell, RefCell};

const MS: u64 = 1_000_000;

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Shape {
    dstrd: u8,
    ready_ms: u8,
    shutdown_ms: u8,
    nssr: bool,
    mpsmax: u8,
}

/// Offsets of registers with an effect.
const NAMED: [u32; 10] = [
    offset::CC,
    offset::CC,
    offset::CC,
    offset::AQA,
    offset::ASQ,
    offset::ACQ,
    offset::NSSR,
    offset::INTMS,
    offset::INTMC,
    offset::CSTS,
];

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Access {
    Read(u16),
    Write(u16, u32),
    WriteWide(u16, u64),
    Named(u8, u32),
    /// CC with plausible fields.
    Configure {
        enable: bool,
        shutdown: u8,
        mps: u8,
    },
    AdminQueue,
    Doorbell {
        index: u8,
        value: u8,
    },
    ResetSubsystem,
    Step {
        ms: u8,
    },
}

/// Half of the bytes are for the simulator, half for the machines.
pub fn registers(bytes: &[u8]) {
    let (sim, core) = bytes.split_at(bytes.len() / 2);
    simulator(&mut Unstructured::new(sim), is_audited(bytes));
    machines(core);
}

fn simulator(input: &mut Unstructured<'_>, is_audited: bool) {
    let Ok(shape) = Shape::arbitrary(input) else {
        return;
    };
    let config = Config {
        namespaces: vec![NamespaceConfig::new(512, Box::new(NullStore::new(1 << 20)))],
        max_queues: 2,
        mqes: 16,
        dstrd: shape.dstrd % 4,
        ready_delay_ns: u64::from(shape.ready_ms % 8) * MS,
        shutdown_delay_ns: u64::from(shape.shutdown_ms % 8) * MS,
        nssr: shape.nssr,
        mpsmax: shape.mpsmax % 5,
        audit: is_audited,
        ..Config::empty()
    };
    let sim = Controller::new(config, VecMemory::new(64 << 10)).expect("a valid configuration");
    let fixed = |at: u32| sim.read64(at);
    let constants = [offset::CAP, offset::VS & !7].map(fixed);
    let mut now = 0;
    while !input.is_empty() {
        let Ok(access) = Access::arbitrary(input) else {
            break;
        };
        apply(&sim, access, &mut now);
        assert_eq!(fixed(offset::CAP), constants[0], "CAP changed");
        assert_eq!(sim.read32(offset::VS), constants[1] as u32, "VS changed");
        assert_eq!(sim.read32(offset::AQA) & !0x0FFF_0FFF, 0, "reserved bits");
        assert_eq!(sim.read64(offset::ASQ) & 0xFFF, 0, "reserved bits");
        let csts = Csts(sim.read32(offset::CSTS));
        assert!(csts.shst() < 3, "{csts:?}");
    }
    reset(&sim, now);
    controller_is_right(&sim.findings());
}

fn apply(sim: &Controller<VecMemory>, access: Access, now: &mut u64) {
    match access {
        Access::Read(at) => {
            let at = u32::from(at) & !7;
            let halves = u64::from(sim.read32(at)) | u64::from(sim.read32(at + 4)) << 32;
            assert_eq!(sim.read64(at), halves, "two halves at {at:#x}");
            assert_eq!(sim.read32(at | 1), 0, "an access that is not aligned");
        }
        Access::Write(at, value) => sim.write32(u32::from(at), value),
        Access::WriteWide(at, value) => sim.write64(u32::from(at), value),
        Access::Named(which, value) => {
            sim.write32(NAMED[usize::from(which) % NAMED.len()], value);
        }
        Access::Configure {
            enable,
            shutdown,
            mps,
        } => {
            let mut cc = Cc(0);
            cc.set_iosqes(6);
            cc.set_iocqes(4);
            cc.set_en(enable);
            cc.set_shn(shutdown % 3);
            cc.set_mps(mps % 6);
            sim.write32(offset::CC, cc.0);
        }
        Access::AdminQueue => admin_queue(sim),
        Access::Doorbell { index, value } => {
            sim.write32(offset::DOORBELLS + u32::from(index) * 4, u32::from(value));
        }
        Access::ResetSubsystem => sim.write32(offset::NSSR, u32::from_be_bytes(*b"NVMe")),
        Access::Step { ms } => {
            *now += u64::from(ms) * MS;
            sim.step(*now);
        }
    }
}

fn admin_queue(sim: &Controller<VecMemory>) {
    let mut aqa = Aqa(0);
    aqa.set_asqs_z(3);
    aqa.set_acqs_z(3);
    sim.write32(offset::AQA, aqa.0);
    sim.write64(offset::ASQ, 0x1000);
    sim.write64(offset::ACQ, 0x2000);
}

/// Whatever was done to the controller: disabled, it becomes not ready; set up and enabled, it becomes ready.
fn reset(sim: &Controller<VecMemory>, now: u64) {
    sim.write32(offset::CC, 0);
    sim.step(now + 100 * MS);
    let csts = Csts(sim.read32(offset::CSTS));
    assert!(!csts.rdy() && !csts.cfs(), "disabled: {csts:?}");
    admin_queue(sim);
    let mut cc = Cc(0);
    cc.set_en(true);
    sim.write32(offset::CC, cc.0);
    sim.step(now + 200 * MS);
    let csts = Csts(sim.read32(offset::CSTS));
    assert!(
        csts.rdy() && !csts.cfs() && csts.shst() == 0,
        "enabled: {csts:?}"
    );
}

/// Registers whose values come from the bytes; once they are used up, the last value is repeated.
struct Answers<'a> {
    script: RefCell<Unstructured<'a>>,
    last: Cell<u32>,
    /// CC.EN as it was last read or written.
    enabled: Cell<bool>,
    identity: ControllerIdentity,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Answer {
    Again,
    Ready(u8),
    AllOnes,
    Any(u32),
}

impl RegisterAccess for Answers<'_> {
    fn identity(&self) -> &ControllerIdentity {
        &self.identity
    }

    fn read32(&self, at: u32) -> u32 {
        let mut script = self.script.borrow_mut();
        let answer = match script.is_empty() {
            true => Answer::Again,
            false => script.arbitrary().unwrap_or(Answer::Again),
        };
        let value = match answer {
            Answer::Again => self.last.get(),
            Answer::Ready(bits) => u32::from(bits & 15),
            Answer::AllOnes => u32::MAX,
            Answer::Any(value) => value,
        };
        self.last.set(value);
        if at == offset::CC {
            self.enabled.set(Cc(value).en());
        }
        value
    }

    fn read64(&self, _at: u32) -> u64 {
        let mut script = self.script.borrow_mut();
        script.arbitrary().unwrap_or(1 << 37)
    }

    fn write32(&self, at: u32, value: u32) {
        assert!([offset::CC, offset::AQA].contains(&at), "{at:#x}");
        self.enabled.set(at == offset::CC && Cc(value).en());
    }

    fn write64(&self, at: u32, value: u64) {
        assert!([offset::ASQ, offset::ACQ].contains(&at), "{at:#x}");
        assert!(value.is_multiple_of(4096) && !self.enabled.get());
    }
}

/// Number of looks of 100 s each within which a bring-up ends. Each of its three waits (for a controller on its way up,
/// for it to be off, for it to be ready) may take the 32,768 s that CRTO can name.
const LOOKS: u32 = 1_000;
const LOOK_NS: u64 = 100_000 * MS;

/// Looks at the times that a shutdown asks for. [`LOOKS`] of 100 s each follow: its waits for the controller to
/// be ready and to be off may take the same 32,768 s each.
const PROMPT_LOOKS: u32 = 400;

/// A bring-up whose commands get no answers.
struct Unanswered<'a> {
    admin: QueuePair<'a, (), [CommandSlot<()>; 1]>,
    now: u64,
    looks: u32,
}

impl Host for Unanswered<'_> {
    fn step<'r>(
        &mut self,
        machine: &mut BringupMachine<'_>,
        registers: &'r dyn RegisterAccess,
    ) -> Result<BringupStep<'r>, BringupError> {
        self.looks += 1;
        assert!(self.looks <= LOOKS, "bring-up has no end");
        machine.step(registers, &mut self.admin, self.now)
    }

    fn wait(&mut self, until_ns: u64) {
        assert!(until_ns > self.now);
        self.now = until_ns + LOOK_NS;
    }

    fn disabled(&mut self, proof: &Quiesced<'_>) {
        self.admin.restart(proof);
    }

    fn host_memory(&mut self, _preferred: u64, _minimum: u64) -> Option<HostMemoryPages> {
        panic!("nothing has answered Identify")
    }
}

fn machines(bytes: &[u8]) {
    let answers = Answers {
        script: RefCell::new(Unstructured::new(bytes)),
        last: Cell::new(0),
        enabled: Cell::new(false),
        identity: ControllerIdentity::new(),
    };
    let (sq, cq): ([SqCell; 2], [CqCell; 2]) = Default::default();
    let bells: [AtomicU32; 2] = Default::default();
    let page: Vec<AtomicU64> = (0..512).map(|_| AtomicU64::new(0)).collect();
    let memory = QueueMemory {
        sq: SqRing::new(&sq, Iova(0x1_0000)),
        cq: CqRing::new(&cq, Iova(0x2_0000)),
        sq_doorbell: DoorbellRegister::new(&bells[0]),
        cq_doorbell: DoorbellRegister::new(&bells[1]),
        lists: ListMemory::new(DmaWords::new(&[], Iova(0)), PageSize::KIB4, 0),
    };
    let admin: QueuePair<'_, (), [CommandSlot<()>; 1]> =
        QueuePair::new(answers.identity(), Qid(0), memory, [CommandSlot::new()]);
    let words = DmaWords::new(&page, Iova(0));
    let mut host = Unanswered {
        admin,
        now: 0,
        looks: 0,
    };
    if let Ok(mut machine) = BringupMachine::new(&answers, bringup::BringupConfig::default(), words)
    {
        let error = crate::bringup::bring_up(&mut machine, &answers, &mut host);
        let error = error.expect_err("nothing has answered Identify");
        assert!(!error.to_string().is_empty());
    }
    let mut now = host.now;
    for kind in [ShutdownKind::Normal, ShutdownKind::Abrupt] {
        let mut machine = ShutdownMachine::new(kind, 3);
        let mut ended = false;
        for look in 0..PROMPT_LOOKS + LOOKS {
            match machine.step(&answers, now) {
                Ok(shutdown::ShutdownStep::Wait { until_ns }) => {
                    assert!(until_ns > now);
                    now = until_ns + if look < PROMPT_LOOKS { 0 } else { LOOK_NS };
                }
                Ok(shutdown::ShutdownStep::Done(_)) => {
                    assert!(!answers.enabled.get(), "shut down, and enabled");
                    ended = true;
                    break;
                }
                Err(error) => {
                    // A controller that could not be disabled may stay enabled, so there is no proof.
                    assert!(!error.to_string().is_empty());
                    ended = true;
                    break;
                }
            }
        }
        assert!(ended, "a shutdown has no end");
    }
}
