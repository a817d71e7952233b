//! The kernels' source on the host, for tests: the threads of a launch are coroutines that take turns in one
//! host thread. If the turns are drawn from a seed, the launch runs the same way again.
//!
//! [`crate::arch`] is `lanes/arch.rs` here. A lane runs until it reaches a collective instruction, or sleeps.
//! A collective ends when all lanes of its mask that have not exited have reached it with the same mask.
//! Diverged lanes converge where the code asks for the active ones, when no other lane of their warp can run.
//!
//! Addresses in a kernel's parameters are addresses of this process.
//!
//! The order of calls: [`RunningLaunch::new`]; then [`RunningLaunch::run`], or [`RunningLaunch::turn`] until it returns
//! [`LaunchTurn::Ended`], with [`RunningLaunch::wake`] after [`LaunchTurn::Asleep`].

mod copies;
mod lane;
mod shared;
#[cfg(test)]
mod tests;
mod warp;

pub use lane::Clock;
pub(crate) use lane::{CollectiveCall, JointStep, ShuffleSource, call, here, scratch};

use crate::scratch_words::SCRATCH;
use copies::LaneCopies;
use lane::{LaneState, LaunchLane, spin};
use nvme_core::sync::{AtomicU32, Order, Scope};
use shared::{BlockArrays, BlockUnits};
use std::cell::Cell;
use std::rc::Rc;
use warp::LaneWarp;

/// The dimensions and the clock of a launch.
#[derive(Clone)]
pub struct HostGrid {
    /// Number of blocks.
    pub blocks: u32,
    /// Number of threads of a block.
    pub threads: u32,
    /// Limit of the blocks that run at once; the others start when those have ended.
    pub at_once: u32,
    /// Clock of the GPU.
    pub clock: Clock,
}

/// The result of a turn of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaunchTurn {
    /// A warp has run.
    Ran,
    /// All lanes sleep, or wait for sleeping lanes: time has to pass, and [`RunningLaunch::wake`] be called.
    Asleep,
    /// All blocks have ended.
    Ended,
}

struct RunningBlock {
    number: u32,
    warps: Vec<LaneWarp>,
    _scratch: Box<[AtomicU32; SCRATCH]>,
}

/// A running kernel.
///
/// Dropping it ends the launch: lanes that have not ended are discarded, which is sound because kernels own
/// nothing that needs a destructor.
pub struct RunningLaunch {
    grid: HostGrid,
    /// Number of the grid, as on the GPU.
    number: u64,
    kernel: Rc<dyn Fn()>,
    /// Bytes of dynamic shared memory of a block.
    shared_bytes: u32,
    /// Number of blocks that have started.
    begun: u32,
    blocks: Vec<RunningBlock>,
}

impl RunningLaunch {
    /// Makes a launch of `kernel`, which each thread calls.
    pub fn new(grid: HostGrid, kernel: impl Fn() + 'static) -> Self {
        nvme_core::sync::on_spin(spin);
        static LAUNCHES: AtomicU32 = AtomicU32::new(0);
        Self {
            grid,
            number: LAUNCHES.fetch_add(1, Order::Relaxed, Scope::Sys).into(),
            kernel: Rc::new(kernel),
            shared_bytes: 0,
            begun: 0,
            blocks: Vec::new(),
        }
    }

    /// Gives each block `bytes` bytes of dynamic shared memory.
    #[must_use]
    pub fn with_shared(mut self, bytes: u32) -> Self {
        self.shared_bytes = bytes;
        self
    }

    /// Runs the launch to its end; `wait` is called while all lanes sleep.
    pub fn run(mut self, wait: impl Fn()) {
        let mut number = 0;
        let mut next = |most: u32| {
            number += 1;
            number % most
        };
        loop {
            match self.turn(u32::MAX, &mut next) {
                LaunchTurn::Ran => {}
                LaunchTurn::Asleep => {
                    wait();
                    self.wake();
                }
                LaunchTurn::Ended => return,
            }
        }
    }

    /// Runs one warp until its lanes have reached `calls` collectives, or none of them can run. `pick`
    /// returns a number below its argument: it chooses the warp, and the first lane.
    ///
    /// # Panics
    /// When a lane panics, and when lanes wait for each other for ever.
    pub fn turn(&mut self, calls: u32, pick: &mut dyn FnMut(u32) -> u32) -> LaunchTurn {
        self.begin_blocks();
        if self.blocks.is_empty() {
            return LaunchTurn::Ended;
        }
        let able = self.warps().filter(|warp| warp.is_able()).count() as u32;
        if able == 0 {
            let sleeps = self.warps().any(LaneWarp::sleeps);
            assert!(sleeps, "lanes wait for each other: {}", self.waits());
            return LaunchTurn::Asleep;
        }
        let (at, warp) = self.able_warp(pick(able) as usize);
        let block = &mut self.blocks[at];
        block.warps[warp].run(calls, pick);
        let is_met = |warp: &LaneWarp| warp.is_at_barrier();
        if block.warps.iter().all(is_met) {
            block.warps.iter_mut().for_each(LaneWarp::pass_barrier);
        }
        if block.warps.iter().all(LaneWarp::has_ended) {
            self.blocks.remove(at);
        }
        LaunchTurn::Ran
    }

    /// Makes lanes runnable whose sleep is over.
    pub fn wake(&mut self) {
        let now_ns = (self.grid.clock)();
        let warps = self.blocks.iter_mut().flat_map(|block| &mut block.warps);
        warps.for_each(|warp| warp.wake(now_ns));
    }

    /// Returns block and warp of the `number`th of the runnable warps.
    fn able_warp(&self, mut number: usize) -> (usize, usize) {
        for (at, block) in self.blocks.iter().enumerate() {
            for (warp, of) in block.warps.iter().enumerate() {
                match number {
                    _ if !of.is_able() => {}
                    0 => return (at, warp),
                    _ => number -= 1,
                }
            }
        }
        unreachable!("a warp that can run was picked")
    }

    fn warps(&self) -> impl Iterator<Item = &LaneWarp> {
        self.blocks.iter().flat_map(|block| &block.warps)
    }

    fn begin_blocks(&mut self) {
        while self.begun < self.grid.blocks && self.blocks.len() < self.grid.at_once as usize {
            self.blocks.push(self.block(self.begun));
            self.begun += 1;
        }
    }

    fn block(&self, number: u32) -> RunningBlock {
        let scratch = Box::new([const { AtomicU32::new(0) }; SCRATCH]);
        let shared = Rc::new(BlockArrays::new(self.shared_bytes));
        let here = |thread| LaneState {
            thread,
            block_threads: self.grid.threads,
            block: number,
            blocks: self.grid.blocks,
            grid: self.number,
            scratch: &raw const *scratch,
            shared: shared.clone(),
            copies: LaneCopies::default(),
            units: BlockUnits::default(),
            clock: self.grid.clock.clone(),
            parameter: Cell::new(0),
            yielder: Cell::new(core::ptr::null()),
            exchanged: Cell::new([0; 32]),
            place: Cell::new(None),
        };
        let threads: Vec<u32> = (0..self.grid.threads).collect();
        let lane = |thread: &u32| LaunchLane::new(here(*thread), self.kernel.clone());
        RunningBlock {
            number,
            warps: threads
                .chunks(32)
                .map(|lanes| LaneWarp::new(lanes.iter().map(lane).collect()))
                .collect(),
            _scratch: scratch,
        }
    }

    /// Describes the waits of the lanes, for a message.
    fn waits(&self) -> String {
        let of = |block: &RunningBlock| {
            let warps = block.warps.iter().zip(0..);
            let texts = warps.filter_map(|(warp, number)| {
                let waits = warp.waits()?;
                Some(format!("block {} warp {number}: {waits}", block.number))
            });
            texts.collect::<Vec<String>>()
        };
        let all: Vec<String> = self.blocks.iter().flat_map(of).collect();
        all.join("; ")
    }
}
