//! Launches with the same words that run at the same time, as a captured graph does that was instantiated twice: each is
//! counted, and no failed row is forgotten.
// UNSAFETY: the kernel takes addresses of memory that the test keeps.
#![allow(unsafe_code)]
#![cfg(feature = "lanes")]

mod memory;

use memory::{address, wide, words};
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use nvme_gpu_kernel::entries::nvme_gather;
use nvme_gpu_kernel::gate::{AdmissionGate, words as gate_words};
use nvme_gpu_kernel::lanes::{HostGrid, LaunchTurn, RunningLaunch};
use nvme_gpu_kernel::rows::{
    BLOCK_THREADS, GatherLaunch, LaunchProgress, LaunchSummary, code, of_worst,
};
use std::rc::Rc;
use std::sync::atomic::AtomicI64;

const ROWS: usize = 3 * BLOCK_THREADS as usize;
/// Blocks of a launch.
const BLOCKS: u32 = 3;

/// Words of a launch whose rows all fail: the gate is shut for good.
struct World {
    gate: Vec<AtomicU32>,
    stations: Vec<AtomicU32>,
    ids: Vec<AtomicI64>,
    rows: Vec<AtomicU64>,
    progress: Vec<AtomicU64>,
    summary: Vec<AtomicU64>,
}

impl World {
    fn new() -> Self {
        let world = Self {
            gate: words(gate_words(2)),
            stations: words(2),
            ids: (0..ROWS).map(|_| AtomicI64::new(0)).collect(),
            rows: wide(ROWS, 0),
            progress: wide(size_of::<LaunchProgress>() / 8, 0),
            summary: wide(size_of::<LaunchSummary>() / 8, 0),
        };
        AdmissionGate::new(&world.gate).unwrap().close_for_good();
        world
    }

    fn launch(&self) -> RunningLaunch {
        let gather = GatherLaunch {
            gate: address(&self.gate),
            stations: address(&self.stations),
            ids: address(&self.ids),
            wide_ids: 1,
            out: address(&self.rows),
            out_stride: 8,
            progress: address(&self.progress),
            summary: address(&self.summary),
            count: ROWS as u64,
            rows: 1,
            timeout_ns: 1000,
            row_bytes: 8,
            slot_bytes: 512,
            run_rows: 1,
            block_shift: 9,
            unit_shift: 3,
            station_count: 2,
            lanes: 32,
            ..GatherLaunch::default()
        };
        let grid = HostGrid {
            blocks: BLOCKS,
            threads: BLOCK_THREADS,
            at_once: 2,
            clock: Rc::new(|| 0),
        };
        // SAFETY: the world outlives the launch.
        RunningLaunch::new(grid, move || unsafe { nvme_gather(gather) })
    }

    /// Returns the number of launches that have ended, and the failed rows with the first of them, as the host sees
    /// them.
    fn told(&self) -> (u32, u64, Option<(u64, i32)>) {
        let [failed, worst, ended] =
            [0, 1, 2].map(|word: usize| self.summary[word].load(Order::Relaxed, Scope::Sys));
        let first = (worst != 0).then(|| of_worst(worst));
        (
            ended as u32,
            failed,
            first.map(|(row, _, code)| (row, code)),
        )
    }

    /// Returns the number of failed rows of all launches.
    fn failed_ever(&self) -> u64 {
        self.summary[3].load(Order::Relaxed, Scope::Sys)
    }
}

fn random(seed: u64) -> impl FnMut(u32) -> u32 {
    let mut state = seed;
    move |most| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
        (state >> 33) as u32 % most
    }
}

/// Lets all of `launches` run side by side.
fn run(mut launches: Vec<RunningLaunch>, pick: &mut dyn FnMut(u32) -> u32) {
    while !launches.is_empty() {
        let at = pick(launches.len() as u32) as usize;
        match launches[at].turn(1, pick) {
            LaunchTurn::Ended => drop(launches.swap_remove(at)),
            LaunchTurn::Asleep => launches[at].wake(),
            LaunchTurn::Ran => {}
        }
    }
}

#[test]
fn launches_that_overlap_are_counted_and_the_last_end_tells_all_failures() {
    let (rows, first) = (ROWS as u64, Some((0, code::GONE)));
    for seed in 0..12 {
        let (world, mut pick) = (World::new(), random(seed));
        let together = 2 + seed as u32 % 2;
        run((0..together).map(|_| world.launch()).collect(), &mut pick);
        let (ended, failed, worst) = world.told();
        assert_eq!((ended, worst), (together, first), "seed {seed}");
        let all = u64::from(together) * rows;
        assert!(
            (rows..=all).contains(&failed),
            "seed {seed}: {failed} of {all}"
        );
        // The next launch may report these failures once more, but no others, and the launch after it reports its own
        // alone.
        run(vec![world.launch()], &mut pick);
        let (ended, failed, worst) = world.told();
        assert_eq!((ended, worst), (together + 1, first), "seed {seed}");
        assert!(
            (rows..=all + rows).contains(&failed),
            "seed {seed}: {failed}"
        );
        run(vec![world.launch()], &mut pick);
        assert_eq!(world.told(), (together + 2, rows, first), "seed {seed}");
        // Each failure is among those of all launches once.
        let ever = u64::from(together + 2) * rows;
        assert_eq!(world.failed_ever(), ever, "seed {seed}");
    }
}

/// Half of the blocks of each launch end before the other halves begin, so that no count of ended blocks belongs to one
/// launch alone.
#[test]
fn an_end_of_two_halves_forgets_nothing() {
    let rows = ROWS as u64;
    for seed in 0..8 {
        let (world, mut pick) = (World::new(), random(seed));
        let mut launches = [world.launch(), world.launch()];
        // The loop takes turns until both launches have ended: the report then covers both.
        let mut turns = 0;
        let mut has_ended = [false; 2];
        while has_ended != [true; 2] {
            turns += 1;
            let at = turns % 2;
            match launches[at].turn(1, &mut pick) {
                LaunchTurn::Ended => has_ended[at] = true,
                LaunchTurn::Asleep => launches[at].wake(),
                LaunchTurn::Ran => {}
            }
        }
        assert_eq!(
            world.told(),
            (2, 2 * rows, Some((0, code::GONE))),
            "seed {seed}"
        );
    }
}
