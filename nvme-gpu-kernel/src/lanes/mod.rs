//! The kernels' source on the host, for tests: the threads of a launch are coroutines that take turns in one host
//! thread, so that a launch whose turns are drawn from a seed runs the same way again.
//!
//! [`crate::arch`] is `lanes/arch.rs` here. A lane runs until it calls an instruction that others take part in, or
//! sleeps. A collective ends when all lanes of its mask that have not exited have called it with the same mask. Lanes
//! that diverged meet again where code asks for the active ones, when no other lane of their warp can run.
//!
//! Addresses in a kernel's parameters are addresses of this process.
// UNSAFETY: lanes find their yielder and their block's scratch words by pointers that their launch keeps.
#![allow(unsafe_code)]

#[cfg(test)]
mod tests;
mod warp;

use crate::scratch_words::SCRATCH;
use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use nvme_core::sync::AtomicU32;
use std::cell::{Cell, RefCell};
use std::panic::Location;
use std::rc::Rc;
use warp::Warp;

/// Bytes of a lane's stack: what is inlined in a kernel has a place of its own in an unoptimised build.
const STACK_BYTES: usize = 512 << 10;
/// Stacks that are kept for the next launch of the thread.
const KEPT_STACKS: usize = 1024;

std::thread_local! {
    static STACKS: RefCell<Vec<DefaultStack>> = const { RefCell::new(Vec::new()) };
    /// The lane that runs now.
    static HERE: Cell<*const Here> = const { Cell::new(core::ptr::null()) };
}

/// What a lane asks of those that it runs with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Shuffle { mask: u32, value: u32, from: u32 },
    Butterfly { mask: u32, value: u32, from: u32 },
    Ballot { mask: u32, mine: bool },
    Same { mask: u32, value: u64 },
    SyncWarp { mask: u32 },
    SyncBlock,
    Beside { site: (&'static str, u32), key: u64 },
    Sleep { ns: u32 },
}

/// What a lane knows of itself.
pub(crate) struct Here {
    pub thread: u32,
    pub block_threads: u32,
    pub block: u32,
    pub blocks: u32,
    scratch: *const [AtomicU32; SCRATCH],
    clock: Clock,
    pub parameter: Cell<usize>,
    yielder: Cell<*const Yielder<u64, Call>>,
    /// Where it called last, for messages.
    place: Cell<Option<&'static Location<'static>>>,
}

impl Here {
    pub fn now_ns(&self) -> u64 {
        (self.clock)()
    }
}

pub(crate) fn here<'a>() -> &'a Here {
    let here = HERE.get();
    assert!(!here.is_null(), "code of a kernel runs in a launch alone");
    // SAFETY: set while the lane runs, whose block keeps what it points to.
    unsafe { &*here }
}

/// Lets others run until there is an answer.
#[track_caller]
pub(crate) fn call(call: Call) -> u64 {
    let here = here();
    here.place.set(Some(Location::caller()));
    let yielder = here.yielder.get();
    // SAFETY: the lane's own, which lives as long as its coroutine runs.
    unsafe { &*yielder }.suspend(call)
}

/// The scratch words of the block.
pub(crate) fn scratch() -> &'static [AtomicU32; SCRATCH] {
    // SAFETY: its block keeps them while lanes of it run; groups do not outlive the kernel.
    unsafe { &*here().scratch }
}

/// Lets other lanes run where one waits for another one's store; for threads that run no lane nothing.
fn spin() {
    if !HERE.get().is_null() {
        call(Call::Sleep { ns: 0 });
    }
}

/// The time, in nanoseconds.
pub type Clock = Rc<dyn Fn() -> u64>;

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
    kernel: Rc<dyn Fn()>,
    /// Blocks that have begun.
    begun: u32,
    blocks: Vec<Block>,
}

impl Launch {
    /// A launch of `kernel`, which each thread calls.
    pub fn new(grid: Grid, kernel: impl Fn() + 'static) -> Self {
        nvme_core::sync::on_spin(spin);
        Self {
            grid,
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
        let mut able = Vec::new();
        for (at, block) in self.blocks.iter().enumerate() {
            let warps = (0..block.warps.len()).filter(|warp| block.warps[*warp].is_able());
            able.extend(warps.map(|warp| (at, warp)));
        }
        if able.is_empty() {
            let sleeps = self.warps().any(Warp::sleeps);
            assert!(sleeps, "lanes wait for each other: {}", self.waits());
            return Turn::Asleep;
        }
        let (at, warp) = able[pick(able.len() as u32) as usize];
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
            scratch: &raw const *scratch,
            clock: self.grid.clock.clone(),
            parameter: Cell::new(0),
            yielder: Cell::new(core::ptr::null()),
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

/// A thread of a launch.
struct Lane {
    here: Box<Here>,
    coroutine: Option<Coroutine<u64, Call, (), DefaultStack>>,
}

impl Lane {
    fn new(here: Here, kernel: Rc<dyn Fn()>) -> Self {
        let stack = STACKS
            .with_borrow_mut(Vec::pop)
            .unwrap_or_else(|| DefaultStack::new(STACK_BYTES).expect("memory for a lane's stack"));
        let coroutine = Coroutine::with_stack(stack, move |yielder, _| {
            self::here().yielder.set(core::ptr::from_ref(yielder));
            kernel();
        });
        Self {
            here: Box::new(here),
            coroutine: Some(coroutine),
        }
    }

    /// Runs until the lane calls something; none when it has ended.
    fn resume(&mut self, answer: u64) -> Option<Call> {
        /// What ran before runs again, also after a panic.
        struct Before(*const Here);
        impl Drop for Before {
            fn drop(&mut self) {
                HERE.set(self.0);
            }
        }
        let before = Before(HERE.replace(&raw const *self.here));
        let coroutine = self.coroutine.as_mut()?;
        let result = coroutine.resume(answer);
        drop(before);
        match result {
            CoroutineResult::Yield(call) => Some(call),
            CoroutineResult::Return(()) => {
                let stack = self.coroutine.take()?.into_stack();
                STACKS.with_borrow_mut(|stacks| {
                    if stacks.len() < KEPT_STACKS {
                        stacks.push(stack);
                    }
                });
                None
            }
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if let Some(coroutine) = &mut self.coroutine {
            // SAFETY: kernels own nothing: words of others, and values in registers.
            unsafe { coroutine.force_reset() };
        }
    }
}
