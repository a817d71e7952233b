//! The launches around a gather of distinct rows, with the test in place of the gather: what they list and copy, and
//! runs that overlap in one memory, whose rows fail and are never wrong.
// UNSAFETY: the kernels take addresses of memory that each test keeps.
#![allow(unsafe_code)]
#![cfg(feature = "lanes")]

mod memory;

use memory::{address, wide, words};
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use nvme_gpu_kernel::distinct::{DistinctLaunch, WORDS, span_shift};
use nvme_gpu_kernel::entries::{nvme_claim_rows, nvme_list_rows, nvme_repeat_rows};
use nvme_gpu_kernel::lanes::{HostGrid, LaunchTurn, RunningLaunch};
use nvme_gpu_kernel::rows::{BLOCK_THREADS, GatherLaunch, LaunchProgress, LaunchSummary, code};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicI64, Ordering};

const ROWS: usize = 600;
const SLOT_SHIFT: u32 = 11;
/// Rows of the table.
const TABLE: u64 = 10_000;

/// Memory of runs, and their ids and output: row k holds the number of its id.
struct World {
    words: Vec<AtomicU32>,
    slots: Vec<AtomicU32>,
    list: Vec<AtomicU32>,
    firsts: Vec<AtomicU32>,
    status: Vec<AtomicU32>,
    counts: Vec<AtomicU64>,
    shown: Vec<AtomicU64>,
    ids: Vec<AtomicI64>,
    out: Vec<AtomicU64>,
    progress: Vec<AtomicU64>,
    summary: Vec<AtomicU64>,
}

type Entry = unsafe fn(DistinctLaunch);

fn value(word: &AtomicU32) -> u32 {
    word.load(Order::Relaxed, Scope::Gpu)
}

impl World {
    fn new(ids: &[i64]) -> Self {
        Self {
            words: words(WORDS),
            slots: words(1 << SLOT_SHIFT),
            list: words(ROWS),
            firsts: words(ROWS),
            status: words(ROWS),
            counts: wide(2, 0),
            shown: wide(2, 0),
            ids: ids.iter().map(|id| AtomicI64::new(*id)).collect(),
            out: wide(ROWS, u64::MAX),
            progress: wide(size_of::<LaunchProgress>() / 8, 0),
            summary: wide(size_of::<LaunchSummary>() / 8, 0),
        }
    }

    fn launch(&self, entry: Entry) -> RunningLaunch {
        let distinct = DistinctLaunch {
            gather: GatherLaunch {
                ids: address(&self.ids),
                wide_ids: 1,
                out: address(&self.out),
                out_stride: 8,
                status: address(&self.status),
                progress: address(&self.progress),
                summary: address(&self.summary),
                count: ROWS as u64,
                rows: TABLE,
                row_bytes: 8,
                block_shift: 9,
                unit_shift: 3,
                ..GatherLaunch::default()
            },
            words: address(&self.words),
            slots: address(&self.slots),
            list: address(&self.list),
            firsts: address(&self.firsts),
            counts: address(&self.counts),
            shown: address(&self.shown),
            slot_shift: SLOT_SHIFT,
            span_shift: span_shift(8, 9),
        };
        let grid = HostGrid {
            blocks: 3,
            threads: BLOCK_THREADS,
            at_once: 2,
            clock: Rc::new(|| 0),
        };
        // SAFETY: the world outlives the launch.
        RunningLaunch::new(grid, move || unsafe { entry(distinct) })
    }

    /// Returns the listed positions, as the gather would read them.
    fn listed(&self) -> Vec<u32> {
        let is_contended = value(&self.words[2]) != 0;
        let count = if is_contended {
            0
        } else {
            value(&self.words[3])
        };
        self.list.iter().take(count as usize).map(value).collect()
    }

    /// Gathers the listed rows; those of id `fails` fail.
    fn gather(&self, fails: i64) {
        for position in self.listed() {
            let at = position as usize;
            let id = self.ids[at].load(Ordering::Relaxed);
            let (row, code) = match id == fails {
                true => (0, 0x281),
                false => (id as u64, code::OK),
            };
            self.out[at].store(row, Order::Relaxed, Scope::Gpu);
            self.status[at].store(code as u32, Order::Relaxed, Scope::Gpu);
        }
    }

    /// Returns the number of failed rows of all launches.
    fn failed_ever(&self) -> u64 {
        self.summary[3].load(Order::Relaxed, Scope::Sys)
    }

    fn failed(&self) -> u64 {
        self.summary[0].load(Order::Relaxed, Scope::Sys)
    }

    /// Checks that each row has its id's bytes if its status says so, and zeros otherwise; returns the codes.
    fn check(&self) -> Vec<i32> {
        let codes = self.status.iter().map(|code| value(code) as i32);
        let codes: Vec<_> = codes.collect();
        for (at, code) in codes.iter().enumerate() {
            let id = self.ids[at].load(Ordering::Relaxed);
            let row = self.out[at].load(Order::Relaxed, Scope::Gpu);
            let wanted = if *code == code::OK { id as u64 } else { 0 };
            // Of two runs that overlap one may clear a row that the other one has copied, and tells that it failed.
            let is_cleared = row == 0 && self.failed_ever() != 0;
            assert!(
                row == wanted || is_cleared,
                "position {at}, id {id}, code {code}: {row}"
            );
        }
        codes
    }
}

fn random(seed: u64) -> impl FnMut(u32) -> u32 {
    let mut state = seed;
    move |most| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
        (state >> 33) as u32 % most
    }
}

fn run(mut launch: RunningLaunch, pick: &mut dyn FnMut(u32) -> u32) {
    loop {
        match launch.turn(1, pick) {
            LaunchTurn::Ended => return,
            LaunchTurn::Asleep => launch.wake(),
            LaunchTurn::Ran => {}
        }
    }
}

fn ids(seed: u64) -> Vec<i64> {
    let mut pick = random(seed);
    let mut ids: Vec<_> = (0..ROWS).map(|_| i64::from(pick(200)) * 3).collect();
    (ids[5], ids[17], ids[300]) = (-1, TABLE as i64, i64::MIN);
    ids
}

#[test]
fn the_lowest_position_of_each_id_is_listed_and_the_others_get_its_row() {
    for seed in 0..6 {
        let (ids, mut pick) = (ids(seed), random(seed));
        let world = World::new(&ids);
        // The second run finds the memory as the first one found it.
        for round in 1..=2u64 {
            run(world.launch(nvme_claim_rows), &mut pick);
            run(world.launch(nvme_list_rows), &mut pick);
            let mut firsts = BTreeMap::new();
            for (at, id) in ids.iter().enumerate() {
                if (0..TABLE as i64).contains(id) {
                    firsts.entry(*id).or_insert(at as u32);
                }
            }
            let mut listed = world.listed();
            // Rows of one block are side by side.
            let blocks: Vec<_> = listed.iter().map(|at| ids[*at as usize] / 64).collect();
            let runs = 1 + blocks.windows(2).filter(|pair| pair[0] != pair[1]).count();
            assert!(runs < 40, "seed {seed}: {runs} runs of 10 blocks");
            listed.sort_unstable();
            let mut wanted: Vec<_> = firsts.values().copied().collect();
            wanted.sort_unstable();
            assert_eq!(listed, wanted, "seed {seed}");
            world.gather(33);
            run(world.launch(nvme_repeat_rows), &mut pick);
            let codes = world.check();
            let code_of = |id: &i64| match id {
                33 => 0x281,
                id if (0..TABLE as i64).contains(id) => code::OK,
                _ => code::OUT_OF_RANGE,
            };
            assert_eq!(codes, ids.iter().map(code_of).collect::<Vec<_>>());
            // The gather counts the first position of the row that failed.
            let failed = codes.iter().filter(|code| **code != code::OK).count();
            let by_gather = usize::from(ids.contains(&33));
            assert_eq!(world.failed(), (failed - by_gather) as u64);
            let shown = |at: usize| world.shown[at].load(Order::Relaxed, Scope::Sys);
            let counts = (ROWS as u64 * round, wanted.len() as u64 * round);
            assert_eq!((shown(0), shown(1)), counts);
            assert!(world.slots.iter().all(|slot| value(slot) == 0));
        }
    }
}

/// Two runs, as a graph that was instantiated twice may have: their launches are in any order, and side by side.
#[test]
fn runs_that_overlap_fail_their_rows_and_the_next_run_is_well() {
    let entries: [Option<Entry>; 4] = [
        Some(nvme_claim_rows),
        Some(nvme_list_rows),
        None,
        Some(nvme_repeat_rows),
    ];
    let mut contended = 0;
    for seed in 0..40 {
        let (ids, mut pick) = (ids(seed), random(seed));
        let world = World::new(&ids);
        let mut steps = [0, 0];
        let mut running: [Option<RunningLaunch>; 2] = [None, None];
        while steps != [4, 4] {
            let of = pick(2) as usize;
            if steps[of] == 4 {
                continue;
            }
            let Some(launch) = &mut running[of] else {
                match entries[steps[of]] {
                    Some(entry) => running[of] = Some(world.launch(entry)),
                    None => {
                        world.gather(-5);
                        steps[of] += 1;
                    }
                }
                continue;
            };
            // Some launches run far before the other run goes on.
            let mut left = 1 + pick(4000);
            while left != 0 {
                left -= 1;
                match launch.turn(1, &mut pick) {
                    LaunchTurn::Ended => {
                        running[of] = None;
                        steps[of] += 1;
                        break;
                    }
                    LaunchTurn::Asleep => launch.wake(),
                    LaunchTurn::Ran => {}
                }
            }
        }
        let codes = world.check();
        contended += usize::from(codes.contains(&code::NOT_RUN));
        for entry in entries {
            match entry {
                Some(entry) => run(world.launch(entry), &mut pick),
                None => world.gather(-5),
            }
        }
        let codes = world.check();
        assert!(!codes.contains(&code::NOT_RUN), "seed {seed}");
    }
    assert!(contended > 20, "{contended} of 40 pairs overlapped");
}
