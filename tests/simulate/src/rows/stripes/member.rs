//! A drive of a striped table: its controller and queues, its gate, and the host's watch over both.

use super::super::drive::{self, Drive};
use super::super::host::{Host, PATIENCE_NS};
use super::super::{STATIONS, address, atomics, draw_queue};
use crate::account::Failure;
use crate::bus::Bells;
use crate::memory::{Area, Memory, PAGE};
use crate::run::{Parts, config};
use crate::seed::Rng;
use crate::setup::{BLOCK_BYTES, BLOCKS, QueueSetup, Setup};
use nvme_core::bringup::QueuePlan;
use nvme_core::handoff::QueueWords;
use nvme_core::queue_state::{QueueState, words as state_words};
use nvme_core::spec::Qid;
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use nvme_core::{CommandSlot, ControllerIdentity, QueuePair, ResultCells, SharedQueue};
use nvme_gpu_kernel::QueueArray;
use nvme_gpu_kernel::gate::{AdmissionGate, words};
use nvme_gpu_kernel::rows::{STATION_BYTES, STATION_CELLS, StripedMember};
use nvme_gpu_kernel::work::data_word;
use nvme_sim::config::NamespaceConfig;
use nvme_sim::{BlockStore, Config, Controller, MemoryStore};
use nvme_tests::Bar;

/// Memory and controller of a drive, which its [`DriveMember`] refers to.
pub(super) struct DriveGround<'m> {
    memory: &'m Memory,
    sim: Controller<&'m Memory>,
    queues: [QueueSetup; 2],
    bells: Bells,
    admin: Parts,
    parts: [Parts; 2],
    plans: [QueuePlan; 2],
    identity: ControllerIdentity,
    states: [Vec<AtomicU32>; 2],
    queue_words: Vec<QueueWords>,
    cells: Vec<AtomicU64>,
    gate: Vec<AtomicU32>,
    parties: Vec<AtomicU32>,
    page: Area,
    slots: Area,
}

impl<'m> DriveGround<'m> {
    /// Makes drive `number`, whose blocks hold their [`content`].
    pub fn new(memory: &'m Memory, rng: &mut Rng, (number, seed): (u32, u64)) -> Self {
        let mut setup = Setup::draw(rng).with_clock(seed);
        setup.queues = [(); 2].map(|()| draw_queue(rng));
        setup.cache_bytes = 0;
        let store = MemoryStore::new(u64::from(BLOCKS) * BLOCK_BYTES).expect("a little memory");
        let all: Vec<u8> = (0..BLOCKS).flat_map(|lba| content(number, lba)).collect();
        store.write_at(0, &all).expect("inside the store");
        let config = Config {
            namespaces: vec![NamespaceConfig::new(BLOCK_BYTES as u32, Box::new(store))],
            ..config(&setup, seed ^ u64::from(number))
        };
        let sim = Controller::new(config, memory).expect("a valid configuration");
        let (sq, cq) = setup.admin;
        let admin = Parts::take(memory, 0, sq, cq, 8);
        let parts = [0, 1].map(|index: usize| {
            let QueueSetup {
                sq_entries, slots, ..
            } = setup.queues[index];
            Parts::take(memory, index as u16 + 1, sq_entries, sq_entries, slots)
        });
        let states = setup
            .queues
            .map(|queue| atomics(state_words(queue.sq_entries)));
        let plans = [parts[0].plan(), parts[1].plan()];
        Self {
            memory,
            sim,
            queues: setup.queues,
            bells: Bells::new([sq, setup.queues[0].sq_entries, setup.queues[1].sq_entries]),
            admin,
            parts,
            plans,
            identity: ControllerIdentity::new(),
            states,
            queue_words: Vec::new(),
            cells: (0..STATIONS * STATION_CELLS)
                .map(|_| AtomicU64::new(0))
                .collect(),
            gate: atomics(words(STATIONS)),
            parties: atomics(STATIONS as usize),
            page: memory.take(PAGE, PAGE),
            slots: memory.take(u64::from(STATIONS) * STATION_BYTES, PAGE),
        }
    }

    /// Describes the queues for kernels. The drive must not move afterwards.
    pub fn describe(&mut self) {
        let of = |index: usize| {
            let state = self.states[index].as_ptr().expose_provenance() as u64;
            let slots = self.queues[index].slots;
            self.parts[index].words(self.memory, &self.bells, (state, slots))
        };
        self.queue_words = vec![of(0), of(1)];
    }

    /// Returns the drive with its last `owned` queues for blocks, and the others shared.
    pub fn member(&'m self, owned: u32, now_ns: u64) -> DriveMember<'m> {
        let (memory, bells) = (self.memory, &self.bells);
        let queues = [0, 1].map(|index: usize| {
            let (states, queue) = (&self.states[index], &self.queues[index]);
            let qid = Qid(index as u16 + 1);
            let state = QueueState::new(states, qid, queue.sq_entries, queue.slots);
            let state = state.expect("a queue that can be");
            state.init(&self.identity, queue.start);
            let rings = self.parts[index].memory(memory, bells);
            rings.cq.zero();
            SharedQueue::new(rings, state, ResultCells::new(&self.cells))
        });
        let slots = (0..8).map(|_| CommandSlot::new()).collect();
        let rings = self.admin.memory(memory, bells);
        let drive = drive::Parts {
            memory,
            bar: Bar {
                sim: &self.sim,
                identity: &self.identity,
            },
            bells,
            plans: &self.plans,
            page: memory.words(self.page),
            admin: QueuePair::new(&self.identity, Qid(0), rings, slots),
            queues,
        };
        DriveMember {
            drive: Drive::new(drive, now_ns),
            gate: AdmissionGate::new(&self.gate).expect("words of a gate"),
            parties: &self.parties,
            cells: &self.cells,
            words: StripedMember {
                queues: QueueArray {
                    queues: address(&self.queue_words),
                    cells: address(&self.cells),
                    queue_count: self.queue_words.len() as u32 - owned,
                    cell_count: self.cells.len() as u32,
                },
                gate: address(&self.gate),
                stations: address(&self.parties),
                slots: memory.address(self.slots),
                slots_iova: self.slots.iova.0,
                nsid: 1,
                block_shift: BLOCK_BYTES.trailing_zeros(),
            },
            host: Host::Watches,
            statuses: Vec::new(),
            is_faulty: false,
        }
    }
}

/// Returns the bytes of block `lba` of drive `number`.
pub(super) fn content(number: u32, lba: u32) -> impl Iterator<Item = u8> {
    let seed = u64::from(number + 1) << 32 | u64::from(lba);
    (0..BLOCK_BYTES / 8).flat_map(move |index| data_word(seed, index).to_le_bytes())
}

/// A drive as the host and the kernels use it.
pub(super) struct DriveMember<'a> {
    pub drive: Drive<'a>,
    pub gate: AdmissionGate<'a>,
    /// The word of each block's party.
    parties: &'a [AtomicU32],
    cells: &'a [AtomicU64],
    /// As kernels are given it.
    pub words: StripedMember,
    pub host: Host,
    /// Statuses with which a command may have failed, and which no row has shown yet.
    pub statuses: Vec<u16>,
    /// A fault was drawn, so rows may fail.
    pub is_faulty: bool,
}

impl DriveMember<'_> {
    /// Returns the limit of the commands in the last queue.
    pub fn slots(&self) -> u32 {
        self.drive.queues[1].state().slots()
    }

    /// Looks for trouble, or takes the next step of a recovery; returns true when the recovery is
    /// over.
    pub fn watch(&mut self) -> Result<bool, Failure> {
        match self.host {
            Host::Watches if self.gate.has_trouble() => {
                self.gate.close();
                let since_ns = self.drive.now_ns;
                self.host = Host::Waits { since_ns };
            }
            Host::Watches => {}
            Host::Waits { .. } if self.gate.is_idle() => {
                self.recover()?;
                return Ok(true);
            }
            Host::Waits { since_ns } if self.drive.now_ns - since_ns > PATIENCE_NS => {
                return Err(Failure::new("recovery", "blocks do not leave the gate"));
            }
            Host::Waits { .. } => {}
        }
        Ok(false)
    }

    /// Resets the controller, gives lost stations back and opens the gate.
    fn recover(&mut self) -> Result<(), Failure> {
        let lost: Vec<u32> = std::iter::from_fn(|| self.gate.take_lost()).collect();
        let queue = &self.drive.queues[0];
        for station in (0..STATIONS).filter(|station| !lost.contains(station)) {
            let mut cells = station * STATION_CELLS..(station + 1) * STATION_CELLS;
            if let Some(cell) = cells.find(|cell| queue.is_under_way(*cell)) {
                let text = format!("the gate is idle, and cell {cell} is under way");
                return Err(Failure::new("gate", text));
            }
        }
        self.drive.reset()?;
        for station in lost {
            let cells = (station * STATION_CELLS) as usize;
            for cell in &self.cells[cells..cells + STATION_CELLS as usize] {
                cell.store(0, Order::Relaxed, Scope::Gpu);
            }
            self.parties[station as usize].store(0, Order::Release, Scope::Gpu);
        }
        self.gate.open();
        self.host = Host::Watches;
        Ok(())
    }

    /// Returns true if the host is not recovering the drive and no block is inside its gate.
    pub fn is_quiet(&self) -> bool {
        let is_away = |word: &AtomicU32| word.load(Order::Relaxed, Scope::Gpu) == 0;
        matches!(self.host, Host::Watches)
            && !self.gate.has_trouble()
            && self.parties.iter().all(is_away)
    }
}
