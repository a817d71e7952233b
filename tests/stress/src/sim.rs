//! Rounds against the simulator's own threads.

use crate::rounds::Round;
use crate::work::{self, Port, Queue, places};
use nvme_core::bringup::{BringupConfig, BringupMachine, BringupStep, QueuePlan};
use nvme_core::queue_state::{QueueState, words};
use nvme_core::spec::{Lba, Nsid, PageSize, Qid, Status, nvm};
use nvme_core::sync::{AtomicU32, AtomicU64};
use nvme_core::{
    BringupError, CommandData, CommandOutcome, CommandSlot, ControllerIdentity, ListMemory,
    MemberCommand, QueueMemory, QueuePair, Quiesced, RegisterAccess, ResultCells,
};
use nvme_sim::{BlockStore, Controller, HostMemory, NamespaceConfig, Rule, Runner};
use nvme_tests::bringup::{Host, bring_up as bring_up_with};
use nvme_tests::memory::{doorbell, host_memory};
use nvme_tests::{Area, Bar, Memory, PAGE, Rng};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Largest number of queues of a round, and of their buffers.
const QUEUES: usize = 64;
const BUFFERS: u64 = 256;
const ADMIN_ENTRIES: u32 = 8;
const BLOCK: u64 = 512;
const BLOCKS: u64 = 1 << 10;
/// 64-bit words of list memory for each slot: no command here needs more.
const LIST_WORDS: usize = 4;

/// Memory of all rounds.
pub struct Ground {
    memory: &'static Memory,
    host: HostMemory,
    /// Rings of the admin queue, and a page for Identify.
    admin: [Area; 3],
    queues: Vec<[Area; 4]>,
}

impl Ground {
    pub fn new() -> Self {
        let each = 3 * PAGE + BUFFERS * BLOCK;
        // The memory is never freed: the controller's threads access it.
        let memory: &'static Memory =
            Box::leak(Box::new(Memory::new(4 * PAGE + QUEUES as u64 * each)));
        let page = || memory.take(PAGE, PAGE);
        let admin = [page(), page(), page()];
        let queues = (0..QUEUES)
            .map(|_| {
                let [sq, cq, lists] = [page(), page(), page()];
                [sq, cq, lists, memory.take(BUFFERS * BLOCK, PAGE)]
            })
            .collect();
        Self {
            host: host_memory(memory),
            memory,
            admin,
            queues,
        }
    }
}

/// Returns word `index` of the namespace.
fn pattern(index: u64) -> u64 {
    Rng::new(index).word()
}

/// One in this number of rounds runs under the protocol auditor, which slows it down.
const AUDITED: u64 = 8;

fn controller(host: &HostMemory, seed: u64) -> Result<Controller<HostMemory>, String> {
    let config = nvme_sim::config::parse(&format!("null?block={BLOCK}&dstrd=0&mqes=64"));
    let mut config = config.map_err(|error| error.to_string())?;
    let store = nvme_sim::MemoryStore::new(BLOCKS * BLOCK).ok_or("no memory for the namespace")?;
    let image: Vec<u8> = (0..BLOCKS * BLOCK / 8)
        .flat_map(|index| pattern(index).to_le_bytes())
        .collect();
    store
        .write_at(0, &image)
        .map_err(|error| error.to_string())?;
    config.namespaces = vec![NamespaceConfig::new(BLOCK as u32, Box::new(store))];
    config.audit = seed.is_multiple_of(AUDITED);
    Controller::new(config, host.clone()).map_err(|error| error.to_string())
}

/// Returns the rings of queue `qid` of this round.
fn memory<'a>(
    ground: &'a Ground,
    sim: &'a Controller<HostMemory>,
    qid: u16,
    entries: u32,
) -> QueueMemory<'a> {
    let at = match qid {
        0 => &ground.admin[..],
        _ => &ground.queues[usize::from(qid) - 1][..],
    };
    let lists = ground.memory.words(at[2]);
    QueueMemory {
        sq: ground.memory.sq_ring(at[0], entries),
        cq: ground.memory.cq_ring(at[1], entries),
        sq_doorbell: doorbell(sim.doorbells(), qid, false),
        cq_doorbell: doorbell(sim.doorbells(), qid, true),
        lists: ListMemory::new(lists, PageSize::KIB4, LIST_WORDS),
    }
}

/// Brings the controller up with the round's queues.
fn bring_up(ground: &Ground, bar: Bar<'_, HostMemory>, round: &Round) -> Result<(), String> {
    let sim = bar.sim;
    let slots: Vec<CommandSlot<()>> = (0..7).map(|_| CommandSlot::new()).collect();
    let admin = QueuePair::new(
        bar.identity,
        Qid::ADMIN,
        memory(ground, sim, 0, ADMIN_ENTRIES),
        slots,
    );
    let plans: Vec<QueuePlan> = (1..=round.queues as u16)
        .map(|qid| {
            let [sq, cq, ..] = ground.queues[usize::from(qid) - 1];
            QueuePlan {
                qid: Qid(qid),
                sq_entries: round.entries,
                sq_iova: sq.iova,
                cq_entries: round.entries,
                cq_iova: cq.iova,
                vector: None,
            }
        })
        .collect();
    let config = BringupConfig {
        queue_pairs: round.queues as u32,
        plans: &plans,
        ..BringupConfig::default()
    };
    let page = ground.memory.words(ground.admin[2]);
    let machine = BringupMachine::new(&bar, config, page);
    let mut machine = machine.map_err(|error| error.to_string())?;
    let mut host = Booting {
        admin,
        began: Instant::now(),
    };
    bring_up_with(&mut machine, &bar, &mut host).map_err(|error| format!("bring-up: {error}"))
}

/// The admin queue of a bring-up, whose clock is the time since its start.
struct Booting<'a> {
    admin: QueuePair<'a, (), Vec<CommandSlot<()>>>,
    began: Instant,
}

impl Host for Booting<'_> {
    fn step<'r>(
        &mut self,
        machine: &mut BringupMachine<'_>,
        registers: &'r dyn RegisterAccess,
    ) -> Result<BringupStep<'r>, BringupError> {
        let now_ns = self.began.elapsed().as_nanos() as u64;
        machine.step(registers, &mut self.admin, now_ns)
    }

    fn wait(&mut self, _until_ns: u64) {
        std::thread::yield_now();
    }

    fn disabled(&mut self, proof: &Quiesced<'_>) {
        self.admin.restart(proof);
    }
}

/// The commands of one queue: most move no data; some fail, some read a block that is compared.
struct Reads<'a> {
    ground: &'a Ground,
    data: Area,
}

enum Kind {
    Flush,
    Beyond,
    Read(u64),
}

fn kind(number: u64) -> Kind {
    let drawn = pattern(number ^ 0xC0FF_EE00_0000_0000);
    match drawn % 16 {
        0 => Kind::Beyond,
        1 | 2 => Kind::Read(drawn >> 8 & (BLOCKS - 1)),
        _ => Kind::Flush,
    }
}

impl Reads<'_> {
    fn buffer(&self, place: u32) -> Area {
        let iova = self.data.iova.offset(u64::from(place) * BLOCK);
        Area { iova, bytes: BLOCK }
    }
}

impl Port for Reads<'_> {
    fn command(&self, place: u32, number: u64) -> MemberCommand<'_> {
        let data = CommandData::Contiguous {
            iova: self.buffer(place).iova,
            len: BLOCK,
        };
        match kind(number) {
            Kind::Flush => MemberCommand::new(nvm::flush(Nsid(1)), CommandData::None, place),
            Kind::Beyond => MemberCommand::new(nvm::read(Nsid(1), Lba(BLOCKS), 1), data, place),
            Kind::Read(lba) => MemberCommand::new(nvm::read(Nsid(1), Lba(lba), 1), data, place),
        }
    }

    fn ended(&self, place: u32, number: u64, outcome: CommandOutcome) -> Result<(), String> {
        let CommandOutcome::Completed(status) = outcome else {
            return Err(format!("command {number:#x}: {outcome:?}"));
        };
        // Without More and Do Not Retry.
        let code = status.0 & 0x7FF;
        let expected = match kind(number) {
            Kind::Beyond => Status::LBA_OUT_OF_RANGE,
            _ => Status::SUCCESS,
        };
        if code != expected.0 & 0x7FF {
            return Err(format!(
                "command {number:#x}: {status} instead of {expected}"
            ));
        }
        if let Kind::Read(lba) = kind(number) {
            let mut bytes = [0; BLOCK as usize];
            self.ground.memory.read(self.buffer(place).iova, &mut bytes);
            for (index, word) in (0..).zip(bytes.chunks_exact(8)) {
                if word != pattern(lba * BLOCK / 8 + index).to_le_bytes() {
                    return Err(format!(
                        "command {number:#x}: word {index} of block {lba} is wrong"
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Returns the auditor's unexpected findings, if it watched. Reads past the end are sent on
/// purpose.
fn audited(sim: &Controller<HostMemory>) -> Result<(), String> {
    let findings = sim.findings();
    let mut unexpected = findings.iter().filter(|one| one.rule != Rule::LbaRange);
    match unexpected.next() {
        None => Ok(()),
        Some(first) => Err(format!("the auditor found: {first}")),
    }
}

/// Runs one round for `time`. How many commands ended.
pub fn run(ground: &Ground, round: &Round, time: Duration) -> Result<u64, String> {
    let round = &Round {
        queues: round.queues.min(QUEUES),
        ..*round
    };
    let sim = Arc::new(controller(&ground.host, round.seed)?);
    let runner = Runner::try_start(Arc::clone(&sim), round.controllers);
    let runner = runner.map_err(|error| format!("a thread of the controller: {error}"))?;
    for qid in 0..=round.queues as u16 {
        let entries = if qid == 0 {
            ADMIN_ENTRIES
        } else {
            round.entries
        };
        memory(ground, &sim, qid, entries).cq.zero();
    }
    let identity = ControllerIdentity::new();
    let bar = Bar {
        sim: &sim,
        identity: &identity,
    };
    bring_up(ground, bar, round)?;
    let stop = AtomicBool::new(false);
    let one = |index: usize| {
        let qid = index as u16 + 1;
        let state: Vec<AtomicU32> = (0..words(round.entries))
            .map(|_| AtomicU32::new(0))
            .collect();
        let state = QueueState::new(&state, Qid(qid), round.entries, round.slots);
        let state = state.ok_or("an impossible queue")?;
        state.init(&identity, round.start);
        let cells: Vec<AtomicU64> = (0..places(round)).map(|_| AtomicU64::new(0)).collect();
        let queue = Queue {
            memory: &|| memory(ground, &sim, qid, round.entries),
            state,
            cells: ResultCells::new(&cells),
        };
        let port = Reads {
            ground,
            data: ground.queues[index][3],
        };
        let ended = work::drive(round, index, &queue, &port, &stop)?;
        let served = sim.queue_stats(qid).commands;
        match served == ended {
            true => Ok(ended),
            false => Err(format!("{ended} commands ended, {served} were served")),
        }
    };
    let sum = std::thread::scope(|scope| {
        let queues: Vec<_> = (0..round.queues)
            .map(|index| scope.spawn(move || one(index)))
            .collect();
        std::thread::sleep(time);
        stop.store(true, Ordering::Relaxed);
        let mut sum = 0;
        for queue in queues {
            sum += queue.join().map_err(|_| "a thread panicked".to_owned())??;
        }
        Ok::<u64, String>(sum)
    });
    runner.stop();
    audited(&sim)?;
    sum
}
