//! Gathers through a cache of rows by queues that blocks own, beside a controller that the test plays: what a failed
//! read leaves in the cache, and which rows are read at all.
// UNSAFETY: the kernels take addresses of memory that each test keeps.
#![allow(unsafe_code)]
#![cfg(feature = "lanes")]

mod memory;
#[path = "memory/served_queue.rs"]
mod served_queue;

use memory::{address, wide, words};
use nvme_core::handoff::QueueWords;
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use nvme_gpu_kernel::QueueArray;
use nvme_gpu_kernel::entries::nvme_gather_batched_cached;
use nvme_gpu_kernel::gate::{AdmissionGate, words as gate_words};
use nvme_gpu_kernel::lanes::{HostGrid, RunningLaunch};
use nvme_gpu_kernel::row_cache::{WAYS, WRITE_WORDS};
use nvme_gpu_kernel::rows::{
    Batched, CacheWords, CachedBatched, GatherLaunch, LaunchProgress, LaunchSummary, STATION_BYTES,
    code,
};
use served_queue::{BLOCK, ServedQueue};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

const ROW: u64 = 512;
const ROWS: u64 = 100;
/// Rows of a gather.
const COUNT: usize = 5;
const TIMEOUT_NS: u64 = 100_000;
const CANARY: u64 = 0xA5A5_A5A5_A5A5_A5A5;
/// Unrecovered Read Error: status code type 2h, status code 81h.
const READ_ERROR: u64 = 0x281;
const SOME: [i64; COUNT] = [3, 99, 17, 3, 40];

/// One station with a queue, and a cache of one set.
struct World {
    gate: Vec<AtomicU32>,
    stations: Vec<AtomicU32>,
    ring: ServedQueue,
    queues: Vec<QueueWords>,
    slots: Vec<AtomicU64>,
    states: Vec<AtomicU32>,
    line_ids: Vec<AtomicU64>,
    epochs: Vec<AtomicU64>,
    lines: Vec<AtomicU64>,
    by_host: Vec<AtomicU64>,
    by_gpu: Vec<AtomicU64>,
    ids: Vec<AtomicU64>,
    out: Vec<AtomicU64>,
    status: Vec<AtomicU32>,
    progress: Vec<AtomicU64>,
    summary: Vec<AtomicU64>,
    now_ns: Rc<Cell<u64>>,
    /// Blocks that cannot be read.
    bad: RefCell<BTreeSet<u64>>,
    /// Blocks that were asked for.
    asked: RefCell<Vec<u64>>,
    answers: Cell<bool>,
}

impl World {
    fn new() -> Self {
        let ring = ServedQueue::new(0);
        Self {
            gate: words(gate_words(1)),
            stations: words(1),
            queues: vec![ring.described()],
            ring,
            slots: wide(STATION_BYTES as usize / 8 + 512, CANARY),
            // States are looked at by sixteen bytes.
            states: words(WAYS + 3),
            line_ids: wide(WAYS, 0),
            epochs: wide(WAYS, 0),
            lines: wide(WAYS * ROW as usize / 8 + 1, CANARY),
            by_host: wide(WRITE_WORDS + 1, 0),
            by_gpu: wide(2, 0),
            ids: wide(COUNT, 0),
            out: wide(COUNT * ROW as usize / 8, CANARY),
            status: words(COUNT),
            progress: wide(size_of::<LaunchProgress>() / 8, 0),
            summary: wide(size_of::<LaunchSummary>() / 8, 0),
            now_ns: Rc::default(),
            bad: RefCell::default(),
            asked: RefCell::default(),
            answers: Cell::new(true),
        }
    }

    fn states(&self) -> &[AtomicU32] {
        let first = (address(&self.states).next_multiple_of(16) - address(&self.states)) / 4;
        &self.states[first as usize..][..WAYS]
    }

    fn serve(&self) {
        if self.answers.get() {
            self.ring.serve(&self.slots, |lba| {
                self.asked.borrow_mut().push(lba);
                match self.bad.borrow().contains(&lba) {
                    true => READ_ERROR,
                    false => 0,
                }
            });
        }
    }

    /// Returns the codes of the rows, and how many rows the drive was asked for. Each row is that of `ids`, or zero.
    fn gather(&self, ids: [i64; COUNT]) -> ([i32; COUNT], usize) {
        for (word, id) in self.ids.iter().zip(ids) {
            word.store(id as u64, Order::Relaxed, Scope::Sys);
        }
        for word in &self.out {
            word.store(CANARY, Order::Relaxed, Scope::Gpu);
        }
        self.asked.borrow_mut().clear();
        self.launch();
        let codes: [i32; COUNT] =
            std::array::from_fn(|at| self.status[at].load(Order::Relaxed, Scope::Gpu) as i32);
        for (row, (id, code)) in ids.iter().zip(codes).enumerate() {
            for at in 0..ROW / 8 {
                let word = &self.out[row * ROW as usize / 8 + at as usize];
                let want = match code {
                    code::OK => *id as u64 * ROW + at * 8,
                    _ => 0,
                };
                let have = word.load(Order::Relaxed, Scope::Gpu);
                assert_eq!(have, want, "row {row}, id {id}, code {code}");
            }
        }
        (codes, self.asked.borrow().len())
    }

    fn launch(&self) {
        let gather = GatherLaunch {
            gate: address(&self.gate),
            stations: address(&self.stations),
            slots: address(&self.slots).next_multiple_of(4096),
            slots_iova: address(&self.slots).next_multiple_of(4096),
            ids: address(&self.ids),
            wide_ids: 1,
            out: address(&self.out),
            out_stride: ROW,
            status: address(&self.status),
            progress: address(&self.progress),
            summary: address(&self.summary),
            count: COUNT as u64,
            rows: ROWS,
            timeout_ns: TIMEOUT_NS,
            nsid: 1,
            row_bytes: ROW as u32,
            slot_bytes: BLOCK as u32,
            run_rows: 1,
            block_shift: BLOCK.trailing_zeros(),
            unit_shift: 3,
            station_count: 1,
            lanes: 32,
            ..GatherLaunch::default()
        };
        let cached = CachedBatched {
            batched: Batched {
                gather,
                owned: QueueArray {
                    queues: address(&self.queues),
                    queue_count: 1,
                    ..QueueArray::default()
                },
                rows_of_block: COUNT as u32,
                reserved: 0,
            },
            cache: CacheWords {
                states: address(self.states()),
                ids: address(&self.line_ids),
                epochs: address(&self.epochs),
                data: address(&self.lines),
                written_by_host: address(&self.by_host),
                written_by_gpu: address(&self.by_gpu),
                lines: WAYS as u32,
                line_bytes: ROW as u32,
            },
        };
        let now_ns = Rc::clone(&self.now_ns);
        let grid = HostGrid {
            blocks: 1,
            threads: 64,
            at_once: 1,
            clock: Rc::new(move || {
                now_ns.set(now_ns.get() + 1);
                now_ns.get()
            }),
        };
        // SAFETY: the world outlives the launch, which has ended when `run` returns.
        let kernel = move || unsafe { nvme_gather_batched_cached(cached) };
        RunningLaunch::new(grid, kernel).run(|| self.serve());
    }

    /// Returns the number of rows that were found in the cache so far, as the host reads it.
    fn hits(&self) -> u64 {
        self.by_host[WRITE_WORDS].load(Order::Relaxed, Scope::Sys)
    }

    /// Returns the number of lines that are being filled or read.
    fn lines_in_use(&self) -> usize {
        let in_use = |word: &&AtomicU32| word.load(Order::Relaxed, Scope::Gpu) & 0x3FFD != 0;
        self.states().iter().filter(in_use).count()
    }
}

const ALL_OK: [i32; COUNT] = [code::OK; COUNT];

#[test]
fn rows_are_read_once_and_then_come_from_the_cache() {
    let world = World::new();
    assert_eq!(world.gather(SOME), (ALL_OK, 4), "row 3 is there twice");
    assert_eq!(world.hits(), 0);
    for run in 1..=3 {
        assert_eq!(world.gather(SOME), (ALL_OK, 0));
        assert_eq!(world.hits(), run * COUNT as u64, "each row of a gather");
    }
    assert_eq!((world.lines_in_use(), world.ring.in_flight()), (0, 0));
}

#[test]
fn a_row_that_could_not_be_read_is_not_in_the_cache() {
    let world = World::new();
    world.bad.borrow_mut().extend([3, 40]);
    let error = READ_ERROR as i32;
    let codes = [error, code::OK, code::OK, error, error];
    assert_eq!(world.gather(SOME), (codes, 4));
    // The rows that were read are in the cache. The others are asked for again, and fail again.
    assert_eq!(world.gather(SOME), (codes, 2));
    assert_eq!((world.lines_in_use(), world.hits()), (0, 2));
    world.bad.borrow_mut().clear();
    assert_eq!(world.gather(SOME), (ALL_OK, 2));
    assert_eq!(world.gather(SOME), (ALL_OK, 0));
}

#[test]
fn a_row_without_an_answer_is_not_in_the_cache() {
    let world = World::new();
    world.answers.set(false);
    assert_eq!(world.gather(SOME), ([code::TIMED_OUT; COUNT], 0));
    assert_eq!(world.lines_in_use(), 0);
    let gate = AdmissionGate::new(&world.gate).unwrap();
    gate.close();
    world.ring.reset();
    assert_eq!(gate.take_lost(), Some(0));
    world.stations[0].store(0, Order::Relaxed, Scope::Gpu);
    assert!(gate.open());
    world.answers.set(true);
    assert_eq!(world.gather(SOME), (ALL_OK, 4));
    assert_eq!(world.gather(SOME), (ALL_OK, 0));
}

#[test]
fn a_row_from_before_a_write_is_read_again() {
    let world = World::new();
    assert_eq!(world.gather(SOME), (ALL_OK, 4));
    world.by_gpu[0].store(1, Order::Release, Scope::Gpu);
    assert_eq!(world.gather(SOME), (ALL_OK, 4));
    assert_eq!(world.gather(SOME), (ALL_OK, 0));
}
