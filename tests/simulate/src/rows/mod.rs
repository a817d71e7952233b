//! Gathers of rows by a GPU, beside writes and recoveries of the host, in virtual time.
//!
//! A seed draws the table, the queues, a controller with faults, and the order in which blocks of launches, the writer,
//! the host's watch and the controller act: one step at a time, each in one thread. Blocks call the core's gate, queues
//! and cache of rows as the kernels do; what kernels do between those calls is written here once more
//! (`block`), since their own source needs a warp.

mod block;
mod drive;
mod host;
mod table;

use crate::account::Failure;
use crate::bus::Bells;
use crate::fault::Kind;
use crate::memory::{Area, Memory, PAGE};
use crate::run::{Arena, Parts, config, of_panic};
use crate::seed::Rng;
use crate::setup::{BLOCK_BYTES, BLOCKS, COMMAND_NS, Driver, QueueSetup, Setup, pick};
use crate::trace::{Event, Trace};
use block::{Block, Step};
use drive::Drive;
use host::{Host, Writer};
use nvme_core::gate::{Gate, words};
use nvme_core::queue_state::{QueueState, words as state_words};
use nvme_core::row_cache::{RowCache, WAYS};
use nvme_core::spec::Qid;
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use nvme_core::{Cells, Identity, QueuePair, SharedQueue, Slot};
use nvme_gpu_kernel::rows::{Gather, code, slot_bytes};
use nvme_sim::Controller;
use nvme_tests::Bar;
use std::panic::{AssertUnwindSafe, catch_unwind};
use table::Table;

/// Rows that a block reads at a time.
const LANES: usize = 4;
const STATIONS: u32 = 3;
/// Launches of a seed, before the last one.
const LAUNCHES: usize = 14;
/// Launches under way at a time.
const AT_ONCE: usize = 3;
/// Turns of a schedule, and those in which everything must have come to rest afterwards.
const TURNS: u32 = 30_000;
/// What the output holds before a gather.
const CANARY: u8 = 0xA5;

/// A bug that is planted, so that the oracles show that they find it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sabotage {
    /// None.
    #[default]
    None,
    /// A station with a read that has no end is given back at once.
    FreesLost,
    /// A lost read is not reported.
    TellsNobody,
    /// A block goes on that found the gate shut.
    PassesAnyway,
    /// A read that failed for several rows is not done again for each.
    RepeatsNothing,
    /// A row is looked for in its own slot, also where another lane has read it.
    OwnSlot,
    /// Rows that failed keep what the output held.
    LeavesBytes,
    /// A write makes no line stale.
    KeepsStale,
    /// A recovery makes no line stale.
    ForgetsLostWrites,
    /// Lines stay pinned.
    KeepsPins,
}

/// How often what happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Rows that were asked for.
    pub rows: u64,
    /// Commands that read several rows.
    pub joined: u64,
    /// Rows that were read once more by themselves.
    pub repeated: u64,
    /// Rows that came from the cache.
    pub hits: u64,
    /// Rows that failed since the gate was shut, or a command was aborted.
    pub gone: u64,
    /// Stations that were left with a read that has no end.
    pub lost: u64,
    /// Writes of the host that ended.
    pub writes: u64,
    /// Recoveries.
    pub recoveries: u64,
}

impl Counts {
    /// With their names.
    pub fn named(&self) -> [(&'static str, u64); 8] {
        [
            ("rows", self.rows),
            ("joined", self.joined),
            ("repeated", self.repeated),
            ("hits", self.hits),
            ("gone", self.gone),
            ("lost", self.lost),
            ("writes", self.writes),
            ("recoveries", self.recoveries),
        ]
    }

    /// Adds those of another run.
    pub fn add(&mut self, other: &Self) {
        self.rows += other.rows;
        self.joined += other.joined;
        self.repeated += other.repeated;
        self.hits += other.hits;
        self.gone += other.gone;
        self.lost += other.lost;
        self.writes += other.writes;
        self.recoveries += other.recoveries;
    }
}

/// What came of a seed.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// What an oracle found.
    pub failure: Option<Failure>,
    /// One number for everything that happened.
    pub hash: u64,
    /// What happened, when it was to be told.
    pub lines: Vec<String>,
    /// How often what happened.
    pub counts: Counts,
}

/// A gather under way.
struct Launch {
    ids: Vec<i64>,
    out: Vec<u8>,
    codes: Vec<Option<i32>>,
    /// The versions of blocks that it has to see at least.
    floor: Vec<u32>,
    blocks: usize,
}

struct World<'a> {
    drive: Drive<'a>,
    rng: Rng,
    sabotage: Sabotage,
    trace: Trace,
    counts: Counts,
    rows: Gather,
    slots: Area,
    gate: Gate<'a>,
    /// A word for each station.
    free: &'a [AtomicU32],
    /// The block that has it.
    owners: Vec<Option<u32>>,
    /// Whether a read into its slots has no end.
    lost: Vec<bool>,
    cells: &'a [AtomicU64],
    cache: Option<RowCache<'a>>,
    states: &'a [AtomicU32],
    lines: Vec<Vec<u8>>,
    /// Writes of the host that have ended.
    written: u32,
    table: Table,
    launches: Vec<Launch>,
    blocks: Vec<Option<Block>>,
    writer: Writer,
    host: Host,
    faults: u32,
}

/// Runs a seed. With `lines` the trace comes as text, too.
pub fn run(arena: &mut Arena, seed: u64, sabotage: Sabotage, lines: bool) -> Run {
    arena.0.reset();
    let memory = &arena.0;
    let run = catch_unwind(AssertUnwindSafe(|| run_on(memory, seed, sabotage, lines)));
    run.unwrap_or_else(|panic| Run {
        failure: Some(of_panic(&*panic)),
        ..Run::default()
    })
}

fn atomics(count: usize) -> Vec<AtomicU32> {
    (0..count).map(|_| AtomicU32::new(0)).collect()
}

/// A queue that threads share.
fn draw_queue(rng: &mut Rng) -> QueueSetup {
    let entries = pick(rng, &[4, 8, 16, 32]);
    QueueSetup {
        driver: Driver::Shared,
        sq_entries: entries,
        cq_entries: entries,
        slots: pick(rng, &[entries - 1, entries / 2]),
        start: pick(
            rng,
            &[0, 0x1_0000 - 128, 0x1000_0000 - 128, 0u32.wrapping_sub(128)],
        ),
    }
}

/// A table, of which some rows lie on several blocks.
fn draw_rows(rng: &mut Rng) -> Gather {
    let (first_byte, row_bytes) = pick(
        rng,
        &[(0, 512), (96, 200), (40, 512), (0, 1024), (8, 700), (3, 37)],
    );
    let slot = slot_bytes(first_byte, row_bytes, BLOCK_BYTES.trailing_zeros());
    Gather {
        first_byte,
        row_bytes,
        // Few, so that launches ask for the same ones.
        rows: ((u64::from(BLOCKS) * BLOCK_BYTES - first_byte) / u64::from(row_bytes)).min(40),
        slot_bytes: slot as u32,
        block_shift: BLOCK_BYTES.trailing_zeros(),
        run_rows: pick(rng, &[1, 2, 4]),
        ..Gather::default()
    }
}

fn run_on(memory: &Memory, seed: u64, sabotage: Sabotage, lines: bool) -> Run {
    let mut rng = Rng::new(seed ^ 0x0060_A7E2);
    let mut setup = Setup::draw(&mut rng).with_clock(seed);
    setup.queues = [(); 2].map(|()| draw_queue(&mut rng));
    setup.cache_bytes = 0;
    let rows = draw_rows(&mut rng);
    let sim = Controller::new(config(&setup, seed), memory).expect("a valid configuration");
    let (sq, cq) = setup.admin;
    let admin = Parts::take(memory, 0, sq, cq, 8);
    let parts = [0, 1].map(|index: usize| {
        let queue = &setup.queues[index];
        let entries = queue.sq_entries;
        Parts::take(memory, index as u16 + 1, entries, entries, queue.slots)
    });
    let bells = Bells::new([sq, setup.queues[0].sq_entries, setup.queues[1].sq_entries]);
    let page = memory.words(memory.take(PAGE, PAGE));
    let plans = [parts[0].plan(), parts[1].plan()];
    let identity = Identity::new();
    let states = setup
        .queues
        .map(|queue| atomics(state_words(queue.sq_entries)));
    // A cell for each row under way, and the writer's.
    let cells: Vec<_> = (0..STATIONS as usize * LANES + 1)
        .map(|_| AtomicU64::new(0))
        .collect();
    let queues = [0, 1].map(|index: usize| {
        let queue = &setup.queues[index];
        let qid = Qid(index as u16 + 1);
        let state = QueueState::new(&states[index], qid, queue.sq_entries, queue.slots);
        let state = state.expect("a queue that can be");
        state.init(&identity, queue.start);
        let rings = parts[index].memory(memory, &bells);
        rings.cq.zero();
        SharedQueue::new(rings, state, Cells::new(&cells))
    });
    let slots = (0..8).map(|_| Slot::new()).collect();
    let admin = QueuePair::new(&identity, Qid(0), admin.memory(memory, &bells), slots);
    let bar = Bar {
        sim: &sim,
        identity: &identity,
    };
    let drive = drive::Parts {
        memory,
        bar,
        bells: &bells,
        plans: &plans,
        page,
        admin,
        queues,
    };
    let (gate, free) = (atomics(words(STATIONS)), atomics(STATIONS as usize));
    let lines_of_cache = pick(&mut rng, &[0, WAYS, WAYS * 2]);
    let cache_states = atomics(lines_of_cache);
    let ids: Vec<_> = (0..lines_of_cache).map(|_| AtomicU64::new(0)).collect();
    let epochs = atomics(lines_of_cache);
    let slot_memory = u64::from(STATIONS) * LANES as u64 * u64::from(rows.slot_bytes);
    let mut world = World {
        drive: Drive::new(drive, setup.clock_ns),
        sabotage,
        trace: Trace::new(lines),
        counts: Counts::default(),
        rows,
        slots: memory.take(slot_memory, PAGE),
        gate: Gate::new(&gate).expect("words of a gate"),
        free: &free,
        owners: vec![None; STATIONS as usize],
        lost: vec![false; STATIONS as usize],
        cells: &cells,
        cache: RowCache::new(&cache_states, &ids, &epochs),
        states: &cache_states,
        lines: vec![vec![0; rows.row_bytes as usize]; lines_of_cache],
        written: 0,
        table: Table::default(),
        launches: Vec::new(),
        blocks: Vec::new(),
        writer: Writer::new(memory.take(PAGE, PAGE)),
        host: Host::Watches,
        faults: 1 + rng.below(4) as u32,
        rng,
    };
    let failure = world.play().err();
    Run {
        failure,
        hash: world.trace.hash(),
        lines: world.trace.lines().to_vec(),
        counts: world.counts,
    }
}

impl World<'_> {
    fn tell(&mut self, what: &'static str, number: u32, code: i32) {
        let event = Event::Rows { what, number, code };
        self.trace.add(self.drive.now_ns, event, || "");
    }

    fn play(&mut self) -> Result<(), Failure> {
        self.drive.reset()?;
        let mut turn = 0;
        while turn < TURNS && !self.is_played() {
            self.turn()?;
            turn += 1;
        }
        self.make_peace();
        self.rest()?;
        // Faults that no step has come upon yet.
        self.writer.ask_for_reset();
        self.rest()?;
        // Everything is free again, and all rows can be read.
        let ids: Vec<i64> = (0..self.rows.rows as i64).collect();
        self.launch(ids);
        self.rest()?;
        self.check_last(code::OK, "recovery")?;
        if self.rng.below(4) == 0 {
            self.gate.close_for_good();
            self.launch(vec![0, 1, 2, 3]);
            self.rest()?;
            self.check_last(code::GONE, "gate")?;
        }
        Ok(())
    }

    /// All launches were put and have ended.
    fn is_played(&self) -> bool {
        self.launches.len() >= LAUNCHES && self.blocks.is_empty()
    }

    /// One of those who act does something.
    fn turn(&mut self) -> Result<(), Failure> {
        match self.rng.below(64) {
            0..34 => self.step_one()?,
            34..44 => self.drive.work(false),
            44..47 => self.drive.work(true),
            47..52 => self.watch()?,
            52..56 => self.write(),
            56..58 => self.draw_launch(),
            58 => self.draw_fault(),
            59..63 => self.drive.sleep(self.rng.below(30_000)),
            _ => {
                let most = pick(&mut self.rng, &[200_000, 1_000_000, COMMAND_NS / 8]);
                self.drive.sleep(most);
            }
        }
        Ok(())
    }

    fn step_one(&mut self) -> Result<(), Failure> {
        if self.blocks.is_empty() {
            return Ok(());
        }
        let index = self.rng.below(self.blocks.len() as u64) as usize;
        self.step_block(index)
    }

    fn step_block(&mut self, index: usize) -> Result<(), Failure> {
        let Some(mut block) = self.blocks[index].take() else {
            return Ok(());
        };
        self.step(&mut block)?;
        if block.step == Step::Done {
            self.blocks.remove(index);
            return self.end_block(block.launch);
        }
        self.blocks[index] = Some(block);
        Ok(())
    }

    fn end_block(&mut self, launch: usize) -> Result<(), Failure> {
        let of = &mut self.launches[launch];
        of.blocks -= 1;
        if of.blocks == 0 && of.codes.iter().any(Option::is_none) {
            let text = format!("launch {launch} has ended, and a row has no code");
            return Err(Failure::new("rows", text));
        }
        self.tell("end", launch as u32, 0);
        Ok(())
    }

    fn draw_launch(&mut self) {
        let under_way = self.launches.iter().filter(|launch| launch.blocks > 0);
        if self.launches.len() >= LAUNCHES || under_way.count() >= AT_ONCE {
            return;
        }
        let (rng, rows) = (&mut self.rng, self.rows.rows);
        let count = 1 + rng.below(4 * LANES as u64);
        let first = rng.below(rows);
        let mut id = |index| match rng.below(16) {
            0 => rows as i64 + rng.below(3) as i64,
            1 => -1,
            // Neighbours, and the same row once more.
            2..10 => ((first + index) % rows) as i64,
            10 => first as i64,
            _ => rng.below(rows) as i64,
        };
        let ids = (0..count).map(&mut id).collect();
        self.launch(ids);
    }

    fn launch(&mut self, ids: Vec<i64>) {
        let blocks = ids
            .len()
            .div_ceil(LANES)
            .min(1 + self.rng.below(3) as usize);
        let number = self.launches.len();
        for block in 0..blocks {
            let name = (number * 4 + block) as u32;
            let block = Block::new(name, number, (block, blocks), self.drive.now_ns);
            self.blocks.push(Some(block));
        }
        self.launches.push(Launch {
            out: vec![CANARY; ids.len() * self.rows.row_bytes as usize],
            codes: vec![None; ids.len()],
            floor: self.table.floor(),
            ids,
            blocks,
        });
        self.tell("launch", number as u32, blocks as i32);
    }

    fn draw_fault(&mut self) {
        if self.faults == 0 || self.rng.below(4) > 0 {
            return;
        }
        self.faults -= 1;
        let kinds = [
            Kind::Drop,
            Kind::Drop,
            Kind::Late,
            Kind::Late,
            Kind::Status,
            Kind::Status,
            Kind::Status,
            Kind::Delay,
            Kind::Reorder,
            Kind::Duplicate,
            Kind::WrongCid,
            Kind::StaleCid,
            Kind::WrongPhase,
            Kind::BadSqhd,
            Kind::Cfs,
        ];
        let kind = pick(&mut self.rng, &kinds);
        let (qid, value) = (1 + self.rng.below(2) as u16, self.rng.word());
        match kind.armed(value) {
            Some(fault) => self.drive.sim.arm(qid, fault),
            None => self.drive.sim.fail(),
        }
        self.tell("fault", kind as u32, i32::from(qid));
    }

    /// From now on nothing goes wrong any more.
    fn make_peace(&mut self) {
        self.drive.sim.disarm();
        self.faults = 0;
    }

    /// Lets everything come to an end.
    fn rest(&mut self) -> Result<(), Failure> {
        for _ in 0..TURNS {
            self.drive.work(false);
            for index in (0..self.blocks.len()).rev() {
                self.step_block(index)?;
            }
            self.watch()?;
            self.write();
            let is_quiet = matches!(self.host, Host::Watches) && !self.gate.has_trouble();
            if self.blocks.is_empty() && is_quiet && self.writer.is_idle() {
                return self.check_free();
            }
            self.drive.sleep(COMMAND_NS / 16);
        }
        let text = "nothing goes wrong any more, and it does not come to rest";
        Err(Failure::new("recovery", text))
    }

    /// Nothing belongs to a block any more.
    fn check_free(&self) -> Result<(), Failure> {
        let load = |word: &AtomicU32| word.load(Order::Relaxed, Scope::Gpu);
        if let Some(station) = self.free.iter().position(|word| load(word) != 0) {
            let text = format!("station {station} belongs to nobody, and is not free");
            return Err(Failure::new("station", text));
        }
        // Busy, or with readers: the lowest 14 bits but for the mark of recent use.
        let is_used = |word: &&AtomicU32| load(word) & 0x3FFD != 0;
        match self.states.iter().find(is_used) {
            Some(_) => Err(Failure::new("cache", "a line is in use by nobody")),
            None => Ok(()),
        }
    }

    /// All rows of the last launch ended so.
    fn check_last(&self, wanted: i32, oracle: &'static str) -> Result<(), Failure> {
        let codes = self.launches.last().map(|launch| &launch.codes);
        let other = codes.and_then(|codes| codes.iter().find(|code| **code != Some(wanted)));
        match other {
            None => Ok(()),
            Some(code) => {
                let text = format!("in the end a row has {code:?} where all should have {wanted}");
                Err(Failure::new(oracle, text))
            }
        }
    }
}
