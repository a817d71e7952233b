//! The two launches of a gather in halves, beside a controller that the test plays: what happens between the launches
//! decides what the second one does.
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
use nvme_gpu_kernel::entries::{nvme_begin_batched, nvme_finish_batched};
use nvme_gpu_kernel::gate::{AdmissionGate, words as gate_words};
use nvme_gpu_kernel::lanes::{HostGrid, RunningLaunch};
use nvme_gpu_kernel::rows::{
    Batched, GatherLaunch, HalvedGather, LaunchProgress, LaunchSummary, RECORD_BYTES,
    STATION_BYTES, code,
};
use served_queue::{BLOCK, ServedQueue};
use std::cell::Cell;
use std::rc::Rc;

const ROW: u64 = 32;
const ROWS: u64 = 100;
const QUEUES: usize = 2;
/// Rows of a gather.
const COUNT: usize = 5;
const TIMEOUT_NS: u64 = 1000;
const CANARY: u64 = 0xA5A5_A5A5_A5A5_A5A5;
const NO_CODE: i32 = 77;

fn load(word: &AtomicU64) -> u64 {
    word.load(Order::Relaxed, Scope::Sys)
}

/// Two stations with a queue each, of which gathers in halves may hold one.
struct World {
    gate: Vec<AtomicU32>,
    stations: Vec<AtomicU32>,
    rings: Vec<ServedQueue>,
    queues: Vec<QueueWords>,
    slots: Vec<AtomicU64>,
    records: Vec<AtomicU64>,
    late_rows: Vec<AtomicU32>,
    ids: Vec<AtomicU64>,
    out: Vec<AtomicU64>,
    status: Vec<AtomicU32>,
    progress: Vec<AtomicU64>,
    summary: Vec<AtomicU64>,
    now_ns: Rc<Cell<u64>>,
    /// The controller answers.
    answers: Cell<bool>,
}

impl World {
    fn new() -> Self {
        let rings: Vec<ServedQueue> = (0..QUEUES).map(ServedQueue::new).collect();
        Self {
            gate: words(gate_words(QUEUES as u32)),
            stations: words(QUEUES),
            queues: rings.iter().map(ServedQueue::described).collect(),
            rings,
            slots: wide(QUEUES * STATION_BYTES as usize / 8 + 512, CANARY),
            records: wide(RECORD_BYTES as usize / 8 + COUNT, 0),
            late_rows: words(QUEUES),
            ids: wide(COUNT, 0),
            out: wide(COUNT * ROW as usize / 8, CANARY),
            status: words(COUNT),
            progress: wide(size_of::<LaunchProgress>() / 8, 0),
            summary: wide(size_of::<LaunchSummary>() / 8, 0),
            now_ns: Rc::default(),
            answers: Cell::new(true),
        }
    }

    fn gate(&self) -> AdmissionGate<'_> {
        AdmissionGate::new(&self.gate).unwrap()
    }

    /// Resets the controller: its queues are as new.
    fn reset(&self) {
        self.rings.iter().for_each(ServedQueue::reset);
    }

    fn recover(&self) {
        self.gate().close();
        assert!(self.gate().is_idle(), "no block is on the GPU");
        self.reset();
        assert_eq!(self.gate().take_lost(), None);
        assert!(self.gate().open());
    }

    fn in_flight(&self) -> u32 {
        self.rings.iter().map(ServedQueue::in_flight).sum()
    }

    /// Answers each command that was rung for. Each word of its blocks gets its byte offset in the namespace as
    /// content.
    fn serve(&self) {
        if self.answers.get() {
            self.rings
                .iter()
                .for_each(|ring| ring.serve(&self.slots, |_| 0));
        }
    }

    fn launch(&self, is_finish: bool, is_dropped: u32) {
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
            unit_shift: 4,
            station_count: QUEUES as u32,
            lanes: 32,
            ..GatherLaunch::default()
        };
        let halved = HalvedGather {
            batched: Batched {
                gather,
                owned: QueueArray {
                    queues: address(&self.queues),
                    queue_count: QUEUES as u32,
                    ..QueueArray::default()
                },
                rows_of_block: COUNT as u32,
                reserved: 0,
            },
            records: address(&self.records),
            kept_ids: address(&self.records) + RECORD_BYTES,
            late_rows: address(&self.late_rows),
            held_stations: 1,
            is_dropped,
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
        let kernel = move || unsafe {
            match is_finish {
                true => nvme_finish_batched(halved),
                false => nvme_begin_batched(halved),
            }
        };
        RunningLaunch::new(grid, kernel).run(|| self.serve());
    }

    fn begin(&self, ids: [i64; COUNT]) {
        for (word, id) in self.ids.iter().zip(ids) {
            word.store(id as u64, Order::Relaxed, Scope::Sys);
        }
        self.launch(false, 0);
        // The ids are the caller's again.
        for word in &self.ids {
            word.store(CANARY, Order::Relaxed, Scope::Sys);
        }
    }

    /// Returns the codes of the rows; each row is that of `ids`, or zero.
    fn finish(&self, ids: [i64; COUNT]) -> [i32; COUNT] {
        for word in &self.status {
            word.store(NO_CODE as u32, Order::Relaxed, Scope::Gpu);
        }
        for word in &self.out {
            word.store(CANARY, Order::Relaxed, Scope::Gpu);
        }
        self.launch(true, 0);
        let codes: [i32; COUNT] =
            std::array::from_fn(|at| self.status[at].load(Order::Relaxed, Scope::Gpu) as i32);
        for (row, (id, code)) in ids.iter().zip(codes).enumerate() {
            for at in 0..ROW / 8 {
                let have = load(&self.out[row * ROW as usize / 8 + at as usize]);
                let want = match code {
                    code::OK => *id as u64 * ROW + at * 8,
                    _ => 0,
                };
                assert_eq!(have, want, "row {row}, id {id}, code {code}");
            }
        }
        codes
    }

    fn is_free(&self) -> [bool; QUEUES] {
        std::array::from_fn(|at| self.stations[at].load(Order::Relaxed, Scope::Gpu) == 0)
    }

    fn late_rows(&self) -> u32 {
        let counts = self.late_rows.iter();
        counts
            .map(|count| count.load(Order::Relaxed, Scope::Sys))
            .sum()
    }

    fn sent(&self) -> u32 {
        self.rings.iter().map(ServedQueue::tail).sum()
    }
}

const SOME: [i64; COUNT] = [3, 99, 17, 3, 40];
const OTHERS: [i64; COUNT] = [8, 1, 98, 15, 16];
const ALL_OK: [i32; COUNT] = [code::OK; COUNT];

#[test]
fn the_second_half_copies_what_the_first_one_asked_for() {
    let world = World::new();
    for (round, ids) in [SOME, OTHERS, SOME, OTHERS, SOME].into_iter().enumerate() {
        world.begin(ids);
        assert_eq!(world.is_free(), [false, true], "the station is held");
        assert!(world.gate().is_idle(), "a recovery need not wait for it");
        if round % 2 == 0 {
            world.serve();
        }
        assert_eq!(world.finish(ids), ALL_OK);
        assert_eq!((world.is_free(), world.late_rows()), ([true; 2], 0));
    }
}

#[test]
fn ids_without_a_row_are_told() {
    let world = World::new();
    let ids = [3, -1, 100, i64::MAX, 99];
    world.begin(ids);
    let codes = world.finish(ids);
    assert_eq!(
        codes,
        [
            code::OK,
            code::OUT_OF_RANGE,
            code::OUT_OF_RANGE,
            code::OUT_OF_RANGE,
            code::OK
        ]
    );
    assert_eq!((world.is_free(), world.in_flight()), ([true; 2], 0));
}

#[test]
fn after_a_recovery_between_the_halves_the_rows_are_gone() {
    for is_served in [false, true] {
        let world = World::new();
        world.begin(SOME);
        if is_served {
            world.serve();
        }
        world.recover();
        assert_eq!(world.finish(SOME), [code::GONE; COUNT]);
        assert_eq!((world.is_free(), world.sent()), ([true; 2], 0));
        world.begin(OTHERS);
        assert_eq!(world.finish(OTHERS), ALL_OK);
    }
}

#[test]
fn while_the_gate_is_shut_the_rows_are_gone_and_the_queue_is_left_alone() {
    let world = World::new();
    world.begin(SOME);
    world.gate().close();
    assert_eq!(world.finish(SOME), [code::GONE; COUNT]);
    assert_eq!(
        (world.is_free(), world.in_flight()),
        ([true; 2], COUNT as u32)
    );
    world.reset();
    assert!(world.gate().open());
    world.begin(SOME);
    world.gate().close_for_good();
    assert_eq!(world.finish(SOME), [code::GONE; COUNT]);
}

#[test]
fn rows_that_were_begun_twice_are_those_of_the_second_ids() {
    for is_served in [false, true] {
        let world = World::new();
        world.begin(SOME);
        if is_served {
            world.serve();
        }
        world.begin(OTHERS);
        assert_eq!(world.sent(), COUNT as u32, "the second one submits nothing");
        assert_eq!(world.finish(OTHERS), ALL_OK);
        assert_eq!((world.is_free(), world.in_flight()), ([true; 2], 0));
    }
}

#[test]
fn rows_that_find_no_queue_are_read_by_the_second_half() {
    let world = World::new();
    world.stations[0].store(1, Order::Relaxed, Scope::Gpu);
    world.begin(SOME);
    assert_eq!((world.is_free(), world.sent()), ([false, true], 0));
    assert_eq!(world.finish(SOME), ALL_OK);
    assert_eq!(
        (world.is_free(), world.late_rows()),
        ([false, true], COUNT as u32)
    );
    // This launch has no first half, so that no ids are passed: it uses the ids that are still in the record.
    assert_eq!(world.finish(SOME), ALL_OK);
}

#[test]
fn a_gather_that_is_given_up_frees_its_station_and_stores_nothing() {
    let world = World::new();
    for _ in 0..3 {
        world.begin(SOME);
        world.launch(true, 1);
        assert_eq!((world.is_free(), world.in_flight()), ([true; 2], 0));
        world.launch(true, 1);
    }
    assert!(world.out.iter().all(|word| load(word) == CANARY));
    assert_eq!(load(&world.summary[2]) as u32, 6, "each tells its end");
}

#[test]
fn reads_without_an_end_keep_the_station_until_the_recovery() {
    let world = World::new();
    world.answers.set(false);
    world.begin(SOME);
    let begun_ns = world.now_ns.get();
    assert_eq!(world.finish(SOME), [code::TIMED_OUT; COUNT]);
    assert!(world.now_ns.get() >= begun_ns + TIMEOUT_NS / 2);
    assert!(world.gate().has_trouble() && world.gate().is_idle());
    assert_eq!(
        (world.is_free(), world.in_flight()),
        ([false, true], COUNT as u32)
    );
    world.gate().close();
    world.reset();
    assert_eq!(world.gate().take_lost(), Some(0));
}

/// The deadline counts from the first half: once it has passed, the second half waits for nothing.
#[test]
fn the_deadline_counts_from_the_first_half() {
    let world = World::new();
    world.answers.set(false);
    world.begin(SOME);
    world.now_ns.set(world.now_ns.get() + 2 * TIMEOUT_NS);
    let before_ns = world.now_ns.get();
    assert_eq!(world.finish(SOME), [code::TIMED_OUT; COUNT]);
    assert!(world.now_ns.get() < before_ns + TIMEOUT_NS);
    // Commands that ended in time count, even if the second half looks at them after the deadline.
    let world = World::new();
    world.begin(SOME);
    world.serve();
    world.now_ns.set(world.now_ns.get() + 2 * TIMEOUT_NS);
    assert_eq!(world.finish(SOME), ALL_OK);
}
