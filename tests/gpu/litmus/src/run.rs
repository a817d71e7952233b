//! A thread's part of a launch: its role, its instance, its clock and its counts.
// UNSAFETY: locations are raw addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::{Args, Counts, Flavour, Shape, Within, device, lanes, queues, words};
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};

/// Iterations between two looks at the clock.
const LOOKS: u32 = 64;
/// Words of the memory for traffic, minus 1.
const STRESS_MASK: u64 = 0xFFFF;

/// Which thread of the grid.
#[derive(Clone, Copy, Debug)]
pub struct Thread {
    /// Index of the block.
    pub block: u32,
    /// Index in the block.
    pub index: u32,
    /// Threads of a block.
    pub threads: u32,
}

/// A thread with a role.
pub(crate) struct Part<'a> {
    pub args: &'a Args,
    pub thread: Thread,
    pub instance: u32,
    pub counts: Counts,
    deadline_ns: u64,
    random: u64,
    looks: u32,
}

impl<'a> Part<'a> {
    #[inline(always)]
    fn at(&self, base: u64, bytes: u32) -> usize {
        (base + u64::from(self.instance) * u64::from(bytes)) as usize
    }

    /// Returns a word at `base`, of this instance.
    #[inline(always)]
    pub fn word(&self, base: u64) -> &'a AtomicU32 {
        // SAFETY: the address is one of the launch's locations; atomics alone touch it.
        unsafe { &*(self.at(base, self.args.stride) as *const AtomicU32) }
    }

    /// Returns the 64-bit word `index` of this instance's words at `base`.
    #[inline(always)]
    pub fn wide(&self, base: u64, index: u32) -> &'a AtomicU64 {
        let at = self.at(base, self.args.stride) as *const AtomicU64;
        // SAFETY: as above; a stride holds eight words.
        unsafe { &*at.add(index as usize) }
    }

    /// Returns word `index` of the log of `role`.
    #[inline(always)]
    pub fn log(&self, role: usize, index: u32) -> &'a AtomicU32 {
        let index = index as usize * self.args.instances as usize + self.instance as usize;
        // SAFETY: the log has a word for each iteration of each instance.
        unsafe { &*(self.args.logs[role] as usize as *const AtomicU32).add(index) }
    }

    /// Returns the next random number.
    #[inline(always)]
    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// Pauses for some turns. Whether the time is over.
    #[inline(always)]
    pub fn rest(&mut self) -> bool {
        let turns = (self.random() >> 32) as u32 & self.args.pause;
        for _ in 0..turns {
            device::tick();
        }
        self.over()
    }

    /// Returns whether the time is over.
    #[inline(always)]
    pub fn over(&mut self) -> bool {
        self.looks += 1;
        if !self.looks.is_multiple_of(LOOKS) || device::now_ns() < self.deadline_ns {
            return false;
        }
        self.counts.late = 1;
        true
    }

    /// Adds this thread's counts to those of the launch.
    #[inline(always)]
    fn finish(&self) {
        let counts = self.args.counts as usize as *mut Counts;
        // SAFETY: the address names the launch's counts; only additions touch them.
        unsafe {
            device::add(&raw mut (*counts).reads, self.counts.reads);
            device::add(&raw mut (*counts).fresh, self.counts.fresh);
            device::add(&raw mut (*counts).forbidden, self.counts.forbidden);
            device::add(&raw mut (*counts).late, self.counts.late);
            device::add(&raw mut (*counts).finished, 1);
        }
    }
}

/// Returns the scope of a [`Within`].
pub(crate) const fn scope(within: u32) -> Scope {
    if within == Within::Gpu as u32 {
        Scope::Gpu
    } else {
        Scope::Sys
    }
}

/// Calls a role with `part.args` as constants, so that no branch is left between two operations of a race.
macro_rules! choose {
    ($part:ident, $module:ident::$role:ident, $($flavour:ident)*) => {
        match ($part.args.flavour, $part.args.within) {
            $(
                (f, w) if f == Flavour::$flavour as u32 && w == Within::Gpu as u32 => {
                    $module::$role::<{ Flavour::$flavour as u32 }, { Within::Gpu as u32 }>($part)
                }
                (f, w) if f == Flavour::$flavour as u32 && w == Within::Sys as u32 => {
                    $module::$role::<{ Flavour::$flavour as u32 }, { Within::Sys as u32 }>($part)
                }
            )*
            _ => {}
        }
    };
}

/// Calls a role as `choose` does, for operations of the core, whose scope is fixed.
macro_rules! choose_sys {
    ($part:ident, $module:ident::$role:ident, $($flavour:ident)*) => {
        match $part.args.flavour {
            $(f if f == Flavour::$flavour as u32 => $module::$role::<{ Flavour::$flavour as u32 }>($part),)*
            _ => {}
        }
    };
}

#[inline(always)]
fn act(part: &mut Part<'_>, role: u32) {
    const MESSAGE: u32 = Shape::Message as u32;
    const BUFFERING: u32 = Shape::Buffering as u32;
    const COMPLETION: u32 = Shape::Completion as u32;
    const RING: u32 = Shape::Ring as u32;
    const DOORBELL: u32 = Shape::Doorbell as u32;
    const LANES: u32 = Shape::Lanes as u32;
    const RELAY: u32 = Shape::Relay as u32;
    const BARRIER: u32 = Shape::Barrier as u32;
    const TURNS: u32 = Shape::Turns as u32;
    match (part.args.shape, role) {
        (MESSAGE, 0) => {
            choose!(part, words::send, Fence Order Exchange Relaxed Plain Copy CopyRelaxed CopyCached)
        }
        (MESSAGE, _) => {
            choose!(part, words::receive, Fence Order Exchange Relaxed Plain Copy CopyRelaxed CopyCached)
        }
        (BUFFERING, 0) => choose!(part, words::buffer_x, Fence AcqRel Relaxed),
        (BUFFERING, _) => choose!(part, words::buffer_y, Fence AcqRel Relaxed),
        (COMPLETION | RELAY, 0) => {
            choose_sys!(part, queues::complete, Fence Order Batch Relaxed Plain)
        }
        (COMPLETION, _) => choose_sys!(part, queues::reap, Fence Order Batch Relaxed Plain),
        (RELAY, 1) => choose_sys!(part, queues::drain, Order Batch Relaxed Plain),
        (RELAY, _) => choose_sys!(part, queues::wait, Order Batch Relaxed Plain),
        (RING, 0) => choose_sys!(part, queues::post, Fence Relaxed),
        (RING, _) => choose_sys!(part, queues::take, Fence Relaxed),
        (DOORBELL, 0) => choose_sys!(part, queues::submit, Fence Relaxed),
        (LANES, 0) => choose_sys!(part, lanes::submit, Warp Block Relaxed),
        (DOORBELL | LANES, _) => choose_sys!(part, queues::fetch, Fence Warp Block Relaxed),
        (TURNS, _) => choose_sys!(part, lanes::turn, Fence Relaxed Plain),
        (BARRIER, _) => choose_sys!(part, lanes::exchange, Warp Block Relaxed),
        _ => {}
    }
}

/// Runs the part of `thread` in the launch.
///
/// # Safety
/// Every address in `args` is what [`Args`] says.
#[inline(always)]
pub unsafe fn run(args: &Args, thread: Thread) {
    let random = args.seed
        ^ ((u64::from(thread.block) << 32) + u64::from(thread.index) + 1)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut part = Part {
        args,
        thread,
        instance: 0,
        counts: Counts::default(),
        deadline_ns: device::now_ns() + args.timeout_ns,
        random: random | 1,
        looks: 0,
    };
    let Some(role) = nth(args.roles, thread.block / args.blocks.max(1)) else {
        return stress(&mut part);
    };
    let block = thread.block % args.blocks.max(1);
    let together = args.shape == Shape::Lanes as u32 && role == 0;
    part.instance = if args.shape == Shape::Turns as u32 {
        // Many blocks meet in one instance.
        block & (args.instances - 1)
    } else if together || args.shape == Shape::Barrier as u32 {
        block
    } else {
        let index = block * thread.threads + thread.index;
        if index >= args.instances {
            return part.finish();
        }
        // Who is beside this thread in one role is not beside its partner in the other.
        let turn = (args.seed as u32 | 1).wrapping_mul(2 * role + 1);
        index.wrapping_mul(turn) & (args.instances - 1)
    };
    act(&mut part, role);
    part.finish();
}

/// Returns the index of the set bit of `bits` that has `index` set bits below it.
#[inline(always)]
fn nth(bits: u32, index: u32) -> Option<u32> {
    let mut rest = bits;
    for _ in 0..index {
        rest &= rest.wrapping_sub(1);
        if rest == 0 {
            break;
        }
    }
    (rest != 0).then(|| rest.trailing_zeros())
}

/// Loads and stores without meaning, until everybody with a role has ended.
#[inline(always)]
fn stress(part: &mut Part<'_>) {
    let args = part.args;
    let roles = u64::from(args.roles.count_ones() * args.blocks) * u64::from(part.thread.threads);
    let words = args.stress as usize as *const AtomicU32;
    let finished = args.counts as usize as *const Counts;
    loop {
        let random = part.random();
        // SAFETY: the address is inside the memory for traffic, which atomics alone touch.
        let word = unsafe { &*words.add((random >> 20 & STRESS_MASK) as usize) };
        if random & 1 == 0 {
            word.store(random as u32, Order::Relaxed, Scope::Gpu);
        } else {
            word.load(Order::Relaxed, Scope::Gpu);
        }
        // SAFETY: the address names the launch's counts; an atomic, since other threads add to it.
        let finished = unsafe { &*(&raw const (*finished).finished).cast::<AtomicU64>() };
        if random >> 36 & 63 == 0 && finished.load(Order::Relaxed, Scope::Gpu) >= roles {
            return;
        }
        if part.over() {
            return;
        }
    }
}
