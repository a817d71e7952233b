//! A thread of a simulated launch: a coroutine with its thread numbers and its answers.
// UNSAFETY: the state of a running lane is reached through a pointer in a thread-local variable.
#![allow(unsafe_code)]

use super::copies::LaneCopies;
use super::shared::{BlockArrays, BlockUnits};
use crate::scratch_words::SCRATCH;
use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use nvme_core::sync::AtomicU32;
use std::cell::Cell;
use std::panic::Location;
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes of a lane's stack: in an unoptimised build every function inlined into a kernel takes stack space.
const STACK_BYTES: usize = 512 << 10;
/// Number of stacks that are kept for the next launch, of any thread.
const KEPT_STACKS: usize = 2048;

/// Stacks that no lane uses, kept for reuse: mapping a stack and its first pages takes much longer than most lanes run.
static STACKS: Mutex<Vec<DefaultStack>> = Mutex::new(Vec::new());

fn stacks() -> MutexGuard<'static, Vec<DefaultStack>> {
    STACKS.lock().unwrap_or_else(PoisonError::into_inner)
}

std::thread_local! {
    /// State of the lane that runs now.
    static HERE: Cell<*const LaneState> = const { Cell::new(core::ptr::null()) };
}

/// The way in which a shuffle names the source lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShuffleSource {
    Index,
    /// Two instructions on a GPU, one for each half of the value.
    Index64,
    Butterfly,
}

/// A collective instruction that a lane has reached, with its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CollectiveCall {
    Shuffle {
        how: ShuffleSource,
        mask: u32,
        value: u64,
        from: u32,
    },
    /// Every lane gets the values of all lanes.
    Exchange {
        value: u64,
    },
    Ballot {
        mask: u32,
        mine: bool,
    },
    Same {
        mask: u32,
        value: u64,
    },
    SyncWarp {
        mask: u32,
    },
    SyncBlock,
    Beside {
        site: (&'static str, u32),
        key: u64,
    },
    Sleep {
        ns: u32,
    },
    /// The step is run once for the warp, with the values of all lanes.
    Joint {
        value: u64,
        step: JointStep,
    },
}

/// A function of the values of all lanes of a warp.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JointStep(pub fn(&[u64; 32]));

impl PartialEq for JointStep {
    fn eq(&self, other: &Self) -> bool {
        core::ptr::fn_addr_eq(self.0, other.0)
    }
}

impl Eq for JointStep {}

/// The state of a lane that its code can reach.
pub(crate) struct LaneState {
    pub thread: u32,
    pub block_threads: u32,
    pub block: u32,
    pub blocks: u32,
    pub grid: u64,
    pub scratch: *const [AtomicU32; SCRATCH],
    pub shared: Rc<BlockArrays>,
    pub copies: LaneCopies,
    /// Units that act for the lane.
    pub units: BlockUnits,
    pub clock: Clock,
    pub parameter: Cell<usize>,
    pub yielder: Cell<*const Yielder<u64, CollectiveCall>>,
    /// Values that the lanes of the warp exchanged last.
    pub exchanged: Cell<[u64; 32]>,
    /// Location of its last call, for messages.
    pub place: Cell<Option<&'static Location<'static>>>,
}

impl LaneState {
    pub fn now_ns(&self) -> u64 {
        (self.clock)()
    }
}

#[inline]
pub(crate) fn here<'a>() -> &'a LaneState {
    let here = HERE.get();
    assert!(!here.is_null(), "code of a kernel runs in a launch alone");
    // SAFETY: `resume` sets the pointer while the lane runs, and the lane's box outlives the run.
    unsafe { &*here }
}

/// Suspends the lane until its collective has an answer.
#[track_caller]
pub(crate) fn call(call: CollectiveCall) -> u64 {
    let here = here();
    here.place.set(Some(Location::caller()));
    let yielder = here.yielder.get();
    // SAFETY: the lane's own yielder, which lives as long as its coroutine runs.
    unsafe { &*yielder }.suspend(call)
}

/// Returns the scratch words of the block.
pub(crate) fn scratch() -> &'static [AtomicU32; SCRATCH] {
    // SAFETY: the block keeps the words while lanes of it run; groups do not outlive the kernel.
    unsafe { &*here().scratch }
}

/// Lets other lanes run while one waits for another lane's store. Does nothing on threads without a lane.
pub(super) fn spin() {
    if !HERE.get().is_null() {
        call(CollectiveCall::Sleep { ns: 0 });
    }
}

/// A clock, in nanoseconds.
pub type Clock = Rc<dyn Fn() -> u64>;

/// A thread of a launch.
///
/// It runs on its own stack from its first turn on. Stacks are reused, since a test launches many thousands of threads:
/// those that call no collective all run on one.
pub(super) struct LaunchLane {
    pub here: Box<LaneState>,
    /// Until the first turn.
    kernel: Option<Rc<dyn Fn()>>,
    coroutine: Option<Coroutine<u64, CollectiveCall, (), DefaultStack>>,
}

impl LaunchLane {
    pub fn new(here: LaneState, kernel: Rc<dyn Fn()>) -> Self {
        Self {
            here: Box::new(here),
            kernel: Some(kernel),
            coroutine: None,
        }
    }

    fn begin(kernel: Rc<dyn Fn()>) -> Coroutine<u64, CollectiveCall, (), DefaultStack> {
        let stack = stacks().pop();
        let stack = stack
            .unwrap_or_else(|| DefaultStack::new(STACK_BYTES).expect("memory for a lane's stack"));
        Coroutine::with_stack(stack, move |yielder, _| {
            self::here().yielder.set(core::ptr::from_ref(yielder));
            kernel();
        })
    }

    /// Runs the lane until its next call; returns `None` when it has ended.
    pub fn resume(&mut self, answer: u64) -> Option<CollectiveCall> {
        /// Restores the lane that ran before, also after a panic.
        struct Before(*const LaneState);
        impl Drop for Before {
            fn drop(&mut self) {
                HERE.set(self.0);
            }
        }
        let before = Before(HERE.replace(&raw const *self.here));
        if let Some(kernel) = self.kernel.take() {
            self.coroutine = Some(Self::begin(kernel));
        }
        let coroutine = self.coroutine.as_mut()?;
        let result = coroutine.resume(answer);
        drop(before);
        match result {
            CoroutineResult::Yield(call) => Some(call),
            CoroutineResult::Return(()) => {
                let stack = self.coroutine.take()?.into_stack();
                let mut stacks = stacks();
                if stacks.len() < KEPT_STACKS {
                    stacks.push(stack);
                }
                None
            }
        }
    }
}

impl Drop for LaunchLane {
    fn drop(&mut self) {
        if let Some(coroutine) = &mut self.coroutine {
            // SAFETY: kernels own nothing that needs a destructor: only borrowed words, and values in
            // registers.
            unsafe { coroutine.force_reset() };
        }
    }
}
