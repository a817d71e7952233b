//! The kernels' source on the host, for tests: the threads of a launch are coroutines that take turns in one host
//! thread, so that a launch whose turns are drawn from a seed runs the same way again.
//!
//! [`crate::arch`] is `lanes/arch.rs` here. A lane runs until it calls an instruction that others take part in, or
//! sleeps. A collective ends when all lanes of its mask that have not exited have called it with the same mask. Lanes
//! that diverged meet again where code asks for the active ones, when no other lane of their warp can run.
//!
//! Addresses in a kernel's parameters are addresses of this process.

mod lane;
#[cfg(test)]
mod tests;
mod warp;

pub use lane::Clock;
pub(crate) use lane::{Call, Shuffle, call, here, scratch};

use crate::scratch_words::SCRATCH;
use lane::{Here, Lane, spin};
use nvme_core::sync::{AtomicU32, Order, Scope};
use std::cell::Cell;
use std::rc::Rc;
use warp::Warp;

/// What a kernel is launched with.
#[derive(Clone)]
pub struct Grid {
    /// Blocks.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Blocks that run at a time: others begin when those have ended.
    pub at_once: u32,
    /// The clock of the GPU.
    pub clock: Clock,
}

/// How far a turn of a launch came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// A warp has run.
    Ran,
    /// All lanes sleep, or wait for sleepers: time has to pass, and [`Launch::wake`] be called.
    Asleep,
    /// All blocks have ended.
    Ended,
}

struct Block {
    number: u32,
    warps: Vec<Warp>,
    _scratch: Box<[AtomicU32; SCRATCH]>,
}

/// A kernel that runs.
pub struct Launch {
    grid: Grid,
    /// As the GPU numbers grids.
    number: u64,
    kernel: Rc<dyn Fn()>,
    /// Blocks that have begun.
    begun: u32,
    blocks: Vec<Block>,
}

impl Launch {
    /// A launch of `kernel`, which each thread calls.
    pub fn new(grid: Grid, kernel: impl Fn() + 'static) -> Self {
        nvme_core::sync::on_spin(spin);
        static LAUNCHES: AtomicU32 = AtomicU32::new(0);
        Self {
            grid,
            number: LAUNCHES.fetch_add(1, Order::Relaxed, Scope::Sys).into(),
            kernel: Rc::new(kernel),
            begun: 0,
            blocks: Vec::new(),
        }
    }

    /// Runs it to its end; `wait` is called while all lanes sleep.
    pub fn run(mut self, wait: impl Fn()) {
        let mut number = 0;
        let mut next = |most: u32| {
            number += 1;
            number % most
        };
        loop {
            match self.turn(u32::MAX, &mut next) {
                Turn::Ran => {}
                Turn::Asleep => {
                    wait();
                    self.wake();
                }
                Turn::Ended => return,
            }
        }
    }

    /// Lets one warp run until its lanes have called `calls` collectives or none of them can go on. `pick` gives a number
    /// below the one it gets: which warp, and which lane is the first.
    ///
    /// # Panics
    /// When a lane does, and when lanes wait for each other for ever.
    pub fn turn(&mut self, calls: u32, pick: &mut dyn FnMut(u32) -> u32) -> Turn {
        self.begin_blocks();
        if self.blocks.is_empty() {
            return Turn::Ended;
        }
        let able = self.warps().filter(|warp| warp.is_able()).count() as u32;
        if able == 0 {
            let sleeps = self.warps().any(Warp::sleeps);
            assert!(sleeps, "lanes wait for each other: {}", self.waits());
            return Turn::Asleep;
        }
        let (at, warp) = self.able_warp(pick(able) as usize);
        let block = &mut self.blocks[at];
        block.warps[warp].run(calls, pick);
        let is_met = |warp: &Warp| warp.is_at_barrier();
        if block.warps.iter().all(is_met) {
            block.warps.iter_mut().for_each(Warp::pass_barrier);
        }
        if block.warps.iter().all(Warp::has_ended) {
            self.blocks.remove(at);
        }
        Turn::Ran
    }

    /// Lanes whose sleep is over can run.
    pub fn wake(&mut self) {
        let now_ns = (self.grid.clock)();
        let warps = self.blocks.iter_mut().flat_map(|block| &mut block.warps);
        warps.for_each(|warp| warp.wake(now_ns));
    }

    /// The block and the warp of the `number`th of the warps that can run.
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

    fn warps(&self) -> impl Iterator<Item = &Warp> {
        self.blocks.iter().flat_map(|block| &block.warps)
    }

    fn begin_blocks(&mut self) {
        while self.begun < self.grid.blocks && self.blocks.len() < self.grid.at_once as usize {
            self.blocks.push(self.block(self.begun));
            self.begun += 1;
        }
    }

    fn block(&self, number: u32) -> Block {
        let scratch = Box::new([const { AtomicU32::new(0) }; SCRATCH]);
        let here = |thread| Here {
            thread,
            block_threads: self.grid.threads,
            block: number,
            blocks: self.grid.blocks,
            grid: self.number,
            scratch: &raw const *scratch,
            clock: self.grid.clock.clone(),
            parameter: Cell::new(0),
            yielder: Cell::new(core::ptr::null()),
            exchanged: Cell::new([0; 32]),
            place: Cell::new(None),
        };
        let threads: Vec<u32> = (0..self.grid.threads).collect();
        let lane = |thread: &u32| Lane::new(here(*thread), self.kernel.clone());
        Block {
            number,
            warps: threads
                .chunks(32)
                .map(|lanes| Warp::new(lanes.iter().map(lane).collect()))
                .collect(),
            _scratch: scratch,
        }
    }

    /// What lanes wait for, for a message.
    fn waits(&self) -> String {
        let of = |block: &Block| {
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
