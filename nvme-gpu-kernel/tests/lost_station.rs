//! A station whose command has no end: nobody uses it, its slots or its result cells until the host gives them back,
//! which it does once the controller was reset.
// UNSAFETY: the kernels take addresses of memory that each test keeps.
#![allow(unsafe_code)]
#![cfg(feature = "lanes")]

mod memory;

use memory::{address, wide, words};
use nvme_core::ControllerIdentity;
use nvme_core::handoff::QueueWords;
use nvme_core::queue_state::{QueueState, words as state_words};
use nvme_core::spec::Qid;
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use nvme_gpu_kernel::QueueArray;
use nvme_gpu_kernel::entries::{nvme_gather, nvme_scatter};
use nvme_gpu_kernel::gate::{AdmissionGate, words as gate_words};
use nvme_gpu_kernel::lanes::{HostGrid, RunningLaunch};
use nvme_gpu_kernel::rows::{
    BLOCK_THREADS, BLOCK_WARPS, GatherLaunch, LaunchProgress, LaunchSummary, STATION_CELLS,
    ScatterLaunch, WARP_BYTES, code,
};
use std::cell::Cell;
use std::rc::Rc;

const ROW: u32 = 512;
const ENTRIES: u32 = 16;
const SLOTS: u32 = 8;
const NO_CODE: i32 = 77;
/// Value of the words of slots that no kernel has written.
const CANARY: u64 = 0xA5A5_A5A5_A5A5_A5A5;

fn values(of: &[AtomicU64]) -> Vec<u64> {
    let value = |word: &AtomicU64| word.load(Order::Relaxed, Scope::Sys);
    of.iter().map(value).collect()
}

/// One station, and one queue whose controller answers nothing.
struct World {
    gate: Vec<AtomicU32>,
    stations: Vec<AtomicU32>,
    cells: Vec<AtomicU64>,
    state: Vec<AtomicU32>,
    rings: Vec<AtomicU64>,
    doorbells: Vec<AtomicU32>,
    queue: Vec<QueueWords>,
    slots: Vec<AtomicU64>,
    rows: Vec<AtomicU64>,
    status: Vec<AtomicU32>,
    progress: Vec<AtomicU64>,
    summary: Vec<AtomicU64>,
    written: Vec<AtomicU32>,
}

/// The state that kernels leave behind.
#[derive(Debug, PartialEq, Eq)]
struct Left {
    cells: Vec<u64>,
    slots: Vec<u64>,
    /// The tail doorbell of the submission queue.
    tail: u32,
    is_free: bool,
}

impl World {
    fn new() -> Self {
        let mut world = Self {
            gate: words(gate_words(1)),
            stations: words(1),
            cells: wide(STATION_CELLS as usize, 0),
            state: words(state_words(ENTRIES)),
            rings: wide(ENTRIES as usize * (64 + 16) / 8 + 8, 0),
            doorbells: words(2),
            queue: Vec::new(),
            slots: wide((BLOCK_WARPS as u64 * WARP_BYTES / 8) as usize, CANARY),
            rows: wide(ROW as usize / 8, 3),
            status: words(1),
            progress: wide(size_of::<LaunchProgress>() / 8, 0),
            summary: wide(size_of::<LaunchSummary>() / 8, 0),
            written: words(1),
        };
        let sq = address(&world.rings).next_multiple_of(64);
        world.queue.push(QueueWords {
            sq,
            cq: sq + u64::from(ENTRIES) * 64,
            sq_doorbell: address(&world.doorbells),
            cq_doorbell: address(&world.doorbells[1..]),
            lists: sq,
            lists_iova: sq,
            state: address(&world.state),
            entries: ENTRIES,
            slots: SLOTS,
            list_words: 0,
            page_shift: 12,
            qid: 1,
            reserved: 0,
        });
        world.reset();
        world
    }

    /// Resets the controller: no command of the queue is under way any more.
    fn reset(&self) {
        let state = QueueState::new(&self.state, Qid(1), ENTRIES, SLOTS).unwrap();
        state.init(&ControllerIdentity::new(), 0);
        for word in &self.rings {
            word.store(0, Order::Relaxed, Scope::Sys);
        }
        self.doorbells[0].store(0, Order::Relaxed, Scope::Sys);
    }

    fn gate(&self) -> AdmissionGate<'_> {
        AdmissionGate::new(&self.gate).unwrap()
    }

    /// Takes the lost station back for the host.
    fn give_back(&self) {
        assert_eq!(self.gate().take_lost(), Some(0));
        for cell in &self.cells {
            cell.store(0, Order::Relaxed, Scope::Sys);
        }
        self.stations[0].store(0, Order::Relaxed, Scope::Gpu);
        self.gate().open();
    }

    fn left(&self) -> Left {
        Left {
            cells: values(&self.cells),
            slots: values(&self.slots),
            tail: self.doorbells[0].load(Order::Relaxed, Scope::Sys),
            is_free: self.stations[0].load(Order::Relaxed, Scope::Gpu) == 0,
        }
    }

    /// Launches a read or a write of one row and returns the code of the row.
    fn launch(&self, writes: bool) -> i32 {
        self.status[0].store(NO_CODE as u32, Order::Relaxed, Scope::Gpu);
        let gather = GatherLaunch {
            queues: QueueArray {
                queues: address(&self.queue),
                cells: address(&self.cells),
                queue_count: 1,
                cell_count: STATION_CELLS,
            },
            gate: address(&self.gate),
            stations: address(&self.stations),
            slots: address(&self.slots),
            slots_iova: address(&self.slots),
            out: address(&self.rows),
            out_stride: ROW.into(),
            status: address(&self.status),
            progress: address(&self.progress),
            summary: address(&self.summary),
            count: 1,
            rows: 1,
            timeout_ns: 1000,
            nsid: 1,
            row_bytes: ROW,
            slot_bytes: ROW,
            run_rows: 1,
            block_shift: ROW.trailing_zeros(),
            unit_shift: 3,
            station_count: 1,
            lanes: 32,
            ..GatherLaunch::default()
        };
        let written = address(&self.written);
        let now_ns = Cell::new(0);
        let grid = HostGrid {
            blocks: 1,
            threads: BLOCK_THREADS,
            at_once: 1,
            clock: Rc::new(move || {
                now_ns.set(now_ns.get() + 1);
                now_ns.get()
            }),
        };
        // SAFETY: the world outlives the launch, which has ended when `run` returns.
        let kernel = move || unsafe {
            match writes {
                true => nvme_scatter(ScatterLaunch { gather, written }),
                false => nvme_gather(gather),
            }
        };
        RunningLaunch::new(grid, kernel).run(|| {});
        self.status[0].load(Order::Relaxed, Scope::Gpu) as i32
    }
}

#[test]
fn a_station_whose_command_has_no_end_is_kept_with_its_cells_until_a_reset() {
    for writes in [false, true] {
        let world = World::new();
        assert_eq!(world.launch(writes), code::TIMED_OUT, "writes {writes}");
        let lost = world.left();
        assert!(!lost.is_free && lost.tail == 1, "writes {writes}");
        let used = lost.cells.iter().filter(|cell| **cell != 0).count();
        assert_eq!(used, 1, "writes {writes}: the cell of the command is taken");
        assert!(world.gate().has_trouble() && world.gate().is_idle());
        // Reads and writes find no station: they touch nothing that the command may still touch.
        assert_eq!(world.launch(false), code::NOT_RUN, "after writes {writes}");
        assert_ne!(world.launch(true), code::OK, "after writes {writes}");
        assert_eq!(world.left(), lost, "writes {writes}");
        // A reset alone frees nothing: the host frees the station once it has found it by `take_lost`.
        world.reset();
        assert_eq!(world.launch(false), code::NOT_RUN, "after writes {writes}");
        assert_eq!(values(&world.cells), lost.cells, "writes {writes}");
        world.give_back();
        assert_eq!(world.launch(false), code::TIMED_OUT, "writes {writes}");
        assert_eq!(world.left().tail, 1, "a new command was sent");
    }
}

/// Given back with a cell that is still taken, the next command of that cell would not be sent.
#[test]
fn a_cell_that_is_taken_takes_no_other_command() {
    let world = World::new();
    assert_eq!(world.launch(false), code::TIMED_OUT);
    let lost = values(&world.cells);
    world.reset();
    assert_eq!(world.gate().take_lost(), Some(0));
    world.stations[0].store(0, Order::Relaxed, Scope::Gpu);
    world.gate().open();
    assert_ne!(world.launch(false), code::OK);
    assert_eq!(values(&world.cells), lost);
    assert_eq!(world.left().tail, 0, "no command was sent");
}
