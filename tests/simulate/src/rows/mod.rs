//! Gathers of rows by a GPU, beside writes and recoveries of the host, in virtual time.
//!
//! A seed draws the table, the queues, a controller with faults, and the order in which warps of launches, the writer,
//! the host's watch and the controller act: one step at a time, each in one thread. The kernels are their own source:
//! a step is a few collectives of one warp.

mod counts;
mod drive;
mod halves;
mod host;
mod launch;
mod stations;
pub mod stripes;
mod table;

use crate::account::Failure;
use crate::bus::Bells;
use crate::fault::Kind;
use crate::memory::{Area, Memory, PAGE};
use crate::run::{Arena, Parts, config, of_panic};
use crate::seed::Rng;
use crate::setup::{BLOCK_BYTES, BLOCKS, COMMAND_NS, Driver, QueueSetup, Setup, pick};
use crate::trace::{Event, Trace};
pub use counts::Counts;
use drive::Drive;
use halves::BegunGathers;
use host::{Host, Writer};
use launch::{Launch, Work};
use nvme_core::queue_state::{QueueState, words as state_words};
use nvme_core::spec::Qid;
use nvme_core::sync::{AtomicU32, AtomicU64};
use nvme_core::{CommandSlot, ControllerIdentity, QueuePair, ResultCells, SharedQueue};
use nvme_gpu_kernel::QueueArray;
use nvme_gpu_kernel::gate::{AdmissionGate, words};
use nvme_gpu_kernel::lanes::{Clock, LaunchTurn};
use nvme_gpu_kernel::row_cache::{WAYS, WRITE_WORDS, WriteCounts};
use nvme_gpu_kernel::rows::{
    CacheWords, GatherLaunch, STATION_BYTES, STATION_CELLS, code, slot_bytes,
};
use nvme_sim::Controller;
use nvme_tests::Bar;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use table::Table;

/// Distance of seeds with rows of one drive, and of seeds with rows of stripes: the lanes of their kernels take longer
/// than all else.
pub const EACH: u64 = 16;
const STATIONS: u32 = 2;
/// Launches of a seed, before the last one.
const LAUNCHES: usize = 8;
/// Number of launches under way at a time.
const AT_ONCE: usize = 2;
/// Number of turns of a schedule, and of turns in which everything must have ended after it.
const TURNS: u32 = 20_000;

/// A planted bug, which shows that the oracles find it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sabotage {
    /// No bug.
    #[default]
    None,
    /// A write makes no line stale.
    KeepsStale,
}

impl Counts {
    /// Returns the counts with their names.
    pub fn named(&self) -> [(&'static str, u64); 11] {
        [
            ("rows", self.rows),
            ("failed", self.failed),
            ("gone", self.gone),
            ("lost", self.lost),
            ("written", self.written),
            ("hits", self.hits),
            ("writes", self.writes),
            ("recoveries", self.recoveries),
            ("halves", self.halves),
            ("owned_writes", self.owned_writes),
            ("owned_stripes", self.owned_stripes),
        ]
    }

    /// Adds those of another run.
    pub fn add(&mut self, other: &Self) {
        self.rows += other.rows;
        self.failed += other.failed;
        self.gone += other.gone;
        self.lost += other.lost;
        self.written += other.written;
        self.hits += other.hits;
        self.writes += other.writes;
        self.recoveries += other.recoveries;
        self.halves += other.halves;
        self.owned_writes += other.owned_writes;
        self.owned_stripes += other.owned_stripes;
    }
}

/// The result of a seed.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// The fault that an oracle found.
    pub failure: Option<Failure>,
    /// Hash of everything that happened.
    pub hash: u64,
    /// Trace of the run, if one was asked for.
    pub lines: Vec<String>,
    /// Counts of events.
    pub counts: Counts,
}

struct World<'a> {
    drive: Drive<'a>,
    rng: Rng,
    /// Draws the launches whose output is overwritten by other actors. It does not influence the rest of the schedule.
    others: Rng,
    sabotage: Sabotage,
    trace: Trace,
    counts: Counts,
    /// The clock that kernels read.
    clock: Clock,
    clock_ns: Rc<Cell<u64>>,
    /// The table that is read, and one of whole blocks that is written.
    rows: GatherLaunch,
    whole: GatherLaunch,
    cached: CacheWords,
    /// The second queue, if the first station owns it; empty if threads share it.
    owned: QueueArray,
    /// A gather in halves by that queue.
    halves: BegunGathers,
    gate: AdmissionGate<'a>,
    /// A word for each station.
    free: &'a [AtomicU32],
    cells: &'a [AtomicU64],
    states: &'a [AtomicU32],
    /// Writes of the host that have ended.
    written: WriteCounts<'a>,
    table: Table,
    launches: Vec<Launch>,
    writer: Writer,
    host: Host,
    faults: u32,
    /// Commands that may have failed with a status that no row has reported yet.
    statuses: u64,
}

/// Runs the kernels' part of a seed: rows of one drive, or rows of [stripes]; most seeds have none.
pub fn run_of(arena: &mut Arena, seed: u64, lines: bool) -> Option<Run> {
    match seed % EACH {
        0 => Some(run(arena, seed, Sabotage::None, lines)),
        1 => Some(stripes::run(arena, seed, lines)),
        _ => None,
    }
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

/// Returns a queue that threads share.
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

/// Returns a table, of which some rows lie on several blocks.
fn draw_rows(rng: &mut Rng) -> GatherLaunch {
    let (first_byte, row_bytes) = pick(
        rng,
        &[(0, 512), (96, 200), (40, 512), (0, 1024), (8, 700), (3, 37)],
    );
    let slot = slot_bytes(first_byte, row_bytes, BLOCK_BYTES.trailing_zeros());
    GatherLaunch {
        first_byte,
        row_bytes,
        // Few, so that launches ask for the same ones.
        rows: ((u64::from(BLOCKS) * BLOCK_BYTES - first_byte) / u64::from(row_bytes)).min(40),
        slot_bytes: slot as u32,
        block_shift: BLOCK_BYTES.trailing_zeros(),
        run_rows: pick(rng, &[1, 2, 4]),
        lanes: pick(rng, &[2, 5, 32]),
        nsid: 1,
        station_count: STATIONS,
        timeout_ns: COMMAND_NS,
        ..GatherLaunch::default()
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
    let identity = ControllerIdentity::new();
    let states = setup
        .queues
        .map(|queue| atomics(state_words(queue.sq_entries)));
    // A cell for each row under way, and the writer's.
    let cells: Vec<_> = (0..STATIONS * STATION_CELLS + 1)
        .map(|_| AtomicU64::new(0))
        .collect();
    let queue_words = [0, 1].map(|index: usize| {
        let state = states[index].as_ptr().expose_provenance() as u64;
        let slots = setup.queues[index].slots;
        parts[index].words(memory, &bells, (state, slots))
    });
    let queues = [0, 1].map(|index: usize| {
        let queue = &setup.queues[index];
        let qid = Qid(index as u16 + 1);
        let state = QueueState::new(&states[index], qid, queue.sq_entries, queue.slots);
        let state = state.expect("a queue that can be");
        state.init(&identity, queue.start);
        let rings = parts[index].memory(memory, &bells);
        rings.cq.zero();
        SharedQueue::new(rings, state, ResultCells::new(&cells))
    });
    let slots = (0..8).map(|_| CommandSlot::new()).collect();
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
    let memories = Memories::take(&mut rng, memory, rows.row_bytes);
    // In some seeds; its rows are whole units of 4 bytes.
    let is_owned =
        seed.is_multiple_of(4) && (rows.first_byte | u64::from(rows.row_bytes)).is_multiple_of(4);
    let owned = QueueArray {
        queues: address(&queue_words[1..]),
        queue_count: u32::from(is_owned),
        ..QueueArray::default()
    };
    let rows = GatherLaunch {
        queues: QueueArray {
            queues: address(&queue_words),
            cells: address(&cells),
            queue_count: queue_words.len() as u32 - owned.queue_count,
            cell_count: cells.len() as u32,
        },
        gate: address(&gate),
        stations: address(&free),
        slots: memory.address(memories.slots),
        slots_iova: memories.slots.iova.0,
        ..rows
    };
    let clock_ns = Rc::new(Cell::new(setup.clock_ns));
    let of_clock = clock_ns.clone();
    let mut world = World {
        drive: Drive::new(drive, setup.clock_ns),
        sabotage,
        trace: Trace::new(lines),
        counts: Counts::default(),
        clock: Rc::new(move || of_clock.get()),
        clock_ns,
        rows,
        whole: whole_rows(&mut rng, rows),
        cached: memories.cached(memory),
        owned,
        halves: BegunGathers::new(),
        gate: AdmissionGate::new(&gate).expect("words of a gate"),
        free: &free,
        cells: &cells,
        states: &memories.states,
        written: WriteCounts::new(&memories.by_host).expect("enough words"),
        table: Table::default(),
        launches: Vec::new(),
        writer: Writer::new(memory.take(PAGE, PAGE)),
        host: Host::Watches,
        faults: 1 + rng.below(4) as u32,
        statuses: 0,
        others: Rng::new(seed ^ 0x0007_E125),
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

fn address<T>(of: &[T]) -> u64 {
    of.as_ptr().expose_provenance() as u64
}

/// Returns a table of whole blocks over those that are read.
fn whole_rows(rng: &mut Rng, rows: GatherLaunch) -> GatherLaunch {
    let row_bytes = pick(rng, &[1, 2, 3]) * BLOCK_BYTES as u32;
    let first_byte = rng.below(3) * BLOCK_BYTES;
    GatherLaunch {
        first_byte,
        row_bytes,
        rows: (30 * BLOCK_BYTES - first_byte) / u64::from(row_bytes),
        slot_bytes: row_bytes,
        ..rows
    }
}

/// Memory that kernels use, of the host and of the GPU.
struct Memories {
    slots: Area,
    lines: Area,
    line_bytes: u32,
    states: Vec<AtomicU32>,
    ids: Vec<AtomicU64>,
    epochs: Vec<AtomicU64>,
    /// Writes of the host that have ended, and of the GPU.
    by_host: Vec<AtomicU64>,
    by_gpu: Vec<AtomicU64>,
}

impl Memories {
    fn take(rng: &mut Rng, memory: &Memory, row_bytes: u32) -> Self {
        let lines = pick(rng, &[WAYS, WAYS * 2]);
        let line_bytes = row_bytes.next_multiple_of(16);
        // Each count of writes, and one word for each station behind it.
        let words = |counts: usize| {
            let all = 0..counts + STATIONS as usize;
            all.map(|_| AtomicU64::new(0)).collect()
        };
        Self {
            slots: memory.take(u64::from(STATIONS) * STATION_BYTES, PAGE),
            lines: memory.take(lines as u64 * u64::from(line_bytes), PAGE),
            line_bytes,
            states: atomics(lines),
            ids: (0..lines).map(|_| AtomicU64::new(0)).collect(),
            epochs: (0..lines).map(|_| AtomicU64::new(0)).collect(),
            by_host: words(WRITE_WORDS),
            by_gpu: words(1),
        }
    }

    fn cached(&self, memory: &Memory) -> CacheWords {
        CacheWords {
            states: address(&self.states),
            ids: address(&self.ids),
            epochs: address(&self.epochs),
            data: memory.address(self.lines),
            written_by_host: address(&self.by_host),
            written_by_gpu: address(&self.by_gpu),
            lines: self.states.len() as u32,
            line_bytes: self.line_bytes,
        }
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
        self.launch(Work::Gather, ids, 2);
        self.rest()?;
        self.check_last(code::OK, "recovery")?;
        if self.rng.below(4) == 0 {
            self.close_between_halves()?;
            self.gate.close_for_good();
            self.launch(Work::Gather, vec![0, 1, 2, 3], 1);
            self.rest()?;
            self.check_last(code::GONE, "gate")?;
        }
        Ok(())
    }

    /// Returns whether all launches were started and have ended.
    fn is_played(&self) -> bool {
        self.launches.len() >= LAUNCHES && self.under_way().is_empty()
    }

    /// Lets one of the actors take a step.
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

    /// Launches that have not ended.
    fn under_way(&self) -> Vec<usize> {
        let of = |index: &usize| self.launches[*index].is_under_way();
        (0..self.launches.len()).filter(of).collect()
    }

    fn step_one(&mut self) -> Result<(), Failure> {
        let under_way = self.under_way();
        if !under_way.is_empty() {
            let index = self.rng.below(under_way.len() as u64) as usize;
            self.step(under_way[index])?;
        }
        Ok(())
    }

    fn draw_launch(&mut self) {
        let under_way = self.under_way();
        if self.launches.len() >= LAUNCHES || under_way.len() >= AT_ONCE {
            return;
        }
        let writes = |index: &usize| self.launches[*index].work.is_write();
        let may_write = self.writer.is_idle() && !under_way.iter().any(writes);
        let work = match self.rng.below(8) {
            0..3 => Work::Cached,
            3..5 => Work::Gather,
            5 => Work::Listed,
            _ if may_write => Work::Scatter,
            _ => Work::Cached,
        };
        let rows = match work {
            Work::Scatter => self.whole.rows,
            _ => self.rows.rows,
        };
        let rng = &mut self.rng;
        let most = pick(rng, &[4, 40, 70]);
        let count = 1 + rng.below(most);
        let first = rng.below(rows);
        let mut id = |index| match rng.below(16) {
            0 => rows as i64 + rng.below(3) as i64,
            1 => -1,
            // Neighbours, and the same row once more.
            2..10 => ((first + index) % rows) as i64,
            10 => first as i64,
            _ => rng.below(rows) as i64,
        };
        let ids: Vec<_> = (0..count).map(&mut id).collect();
        let blocks = 1 + self.rng.below(3) as u32;
        let slots = self.drive.queues[1].state().slots();
        let is_owned = self.owned.queue_count == 1 && count <= u64::from(slots);
        match work {
            // Few launches may write, so that any of them does.
            _ if is_owned && may_write && self.others.below(2) == 0 => {
                self.launch(Work::BatchedScatter, ids, 1);
            }
            Work::Cached if is_owned && self.others.below(2) == 0 => {
                self.launch(Work::BatchedCached, ids, 1);
            }
            Work::Gather | Work::Cached if is_owned => self.draw_owned(ids),
            _ => self.launch(work, ids, blocks),
        }
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
        self.statuses += u64::from(kind == Kind::Status);
        match kind.armed(value) {
            Some(fault) => self.drive.sim.arm(qid, fault),
            None => self.drive.sim.fail(),
        }
        self.tell("fault", kind as u32, i32::from(qid));
    }

    /// Stops all faults from now on.
    fn make_peace(&mut self) {
        self.drive.sim.disarm();
        self.faults = 0;
    }

    /// Runs until everything has ended.
    fn rest(&mut self) -> Result<(), Failure> {
        for _ in 0..TURNS {
            self.drive.work(false);
            self.finish_begun();
            for index in self.under_way() {
                while self.step(index)? == LaunchTurn::Ran {}
            }
            self.watch()?;
            self.write();
            let is_quiet = matches!(self.host, Host::Watches) && !self.gate.has_trouble();
            if self.under_way().is_empty() && is_quiet && self.writer.is_idle() {
                return self.check_free();
            }
            self.drive.sleep(self.drive.longest_sleep_ns());
        }
        let text = "nothing goes wrong any more, and it does not come to rest";
        Err(Failure::new("recovery", text))
    }

    /// Fails unless all rows of the last launch have the code `wanted`.
    fn check_last(&self, wanted: i32, oracle: &'static str) -> Result<(), Failure> {
        let last = self.launches.last();
        let other = last.and_then(|launch| launch.codes().find(|code| *code != Some(wanted)));
        match other {
            None => Ok(()),
            Some(code) => {
                let text = format!("in the end a row has {code:?} where all should have {wanted}");
                Err(Failure::new(oracle, text))
            }
        }
    }
}
