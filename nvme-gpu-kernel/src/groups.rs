//! The groups of a GPU: lanes of a warp, a whole warp, a block. Each operation is one instruction of `arch`,
//! or a few. Votes and broadcasts order no memory: code that reads what another member wrote calls `sync` in
//! between.
// UNSAFETY: the block's scratch memory is a raw shared-memory address.
#![allow(unsafe_code)]

use crate::arch;
#[cfg(not(target_arch = "nvptx64"))]
use crate::lanes::scratch;
#[cfg(any(feature = "gathers", feature = "scatter"))]
use crate::scratch_words::GROUP_WORDS;
use crate::scratch_words::SCRATCH;
#[cfg(target_arch = "nvptx64")]
use core::arch::asm;
use nvme_core::group::{ExecContext, GroupOp, GroupVote, LoneThread, ThreadGroup};
use nvme_core::sync::{AtomicU32, Order, Scope};

#[inline(always)]
fn of_tile(value: u32, from: u32) -> u32 {
    arch::shuffle_tile(value, from)
}

#[inline(always)]
fn swap(value: u64, bits: u32) -> u64 {
    let low = arch::butterfly(arch::FULL, value as u32, bits);
    let high = arch::butterfly(arch::FULL, (value >> 32) as u32, bits);
    u64::from(high) << 32 | u64::from(low)
}

/// Some lanes of a warp that stay together.
#[derive(Clone, Copy, Debug)]
pub struct WarpLanes {
    mask: u32,
}

impl WarpLanes {
    /// Returns the lanes that run `A` together with this one and pass the same `key`.
    #[inline(always)]
    fn beside<A>(key: u64) -> Self {
        Self {
            mask: arch::beside::<A>(key),
        }
    }
}

impl ThreadGroup for WarpLanes {
    #[inline(always)]
    fn size(&self) -> u32 {
        self.mask.count_ones()
    }

    #[inline(always)]
    fn rank(&self) -> u32 {
        (self.mask & arch::lanes_below()).count_ones()
    }

    #[inline(always)]
    fn sync(&self) {
        arch::sync_warp(self.mask);
    }

    #[inline(always)]
    fn vote(&self, mine: bool) -> GroupVote {
        let yes = arch::ballot(self.mask, mine);
        let no = self.mask & !yes;
        // The lanes below the first vote of no; all lanes if there is none.
        let below = (no & no.wrapping_neg()).wrapping_sub(1);
        GroupVote {
            total: yes.count_ones(),
            before: (yes & arch::lanes_below()).count_ones(),
            leading: (self.mask & below).count_ones(),
        }
    }

    #[inline(always)]
    fn broadcast(&self, value: u32) -> u32 {
        arch::shuffle(self.mask, value, self.mask.trailing_zeros())
    }
}

/// A whole warp that stays together: its mask is a constant, which makes every collective cheaper.
#[derive(Clone, Copy, Debug)]
pub struct WholeWarp;

impl ThreadGroup for WholeWarp {
    #[inline(always)]
    fn size(&self) -> u32 {
        32
    }

    #[inline(always)]
    fn rank(&self) -> u32 {
        arch::lane()
    }

    #[inline(always)]
    fn sync(&self) {
        arch::sync_warp(arch::FULL);
    }

    #[inline(always)]
    fn vote(&self, mine: bool) -> GroupVote {
        let yes = arch::ballot(arch::FULL, mine);
        GroupVote {
            total: yes.count_ones(),
            before: (yes & arch::lanes_below()).count_ones(),
            leading: yes.trailing_ones(),
        }
    }

    #[inline(always)]
    fn broadcast(&self, value: u32) -> u32 {
        arch::shuffle(arch::FULL, value, 0)
    }

    #[inline(always)]
    fn tiles(&self) -> bool {
        true
    }

    #[inline(always)]
    fn of_tile(&self, value: u32, from: u32) -> u32 {
        of_tile(value, from)
    }

    #[inline(always)]
    fn swap(&self, value: u64, mask: u32) -> u64 {
        swap(value, mask)
    }
}

/// A [`WholeWarp`] in which only a few lanes submit at once: each writes its entry alone, which takes fewer
/// registers.
#[derive(Clone, Copy, Debug)]
pub struct ApartLanes;

impl ThreadGroup for ApartLanes {
    #[inline(always)]
    fn size(&self) -> u32 {
        WholeWarp.size()
    }

    #[inline(always)]
    fn rank(&self) -> u32 {
        WholeWarp.rank()
    }

    #[inline(always)]
    fn sync(&self) {
        WholeWarp.sync();
    }

    #[inline(always)]
    fn vote(&self, mine: bool) -> GroupVote {
        WholeWarp.vote(mine)
    }

    #[inline(always)]
    fn broadcast(&self, value: u32) -> u32 {
        WholeWarp.broadcast(value)
    }
}

/// A lone lane that keeps fewer reads in flight, and so needs fewer registers: more of them fit on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct NarrowLane;

impl ThreadGroup for NarrowLane {
    const MOST: u32 = 1;
    const READS: u32 = 6;

    #[inline(always)]
    fn size(&self) -> u32 {
        1
    }

    #[inline(always)]
    fn rank(&self) -> u32 {
        0
    }

    #[inline(always)]
    fn sync(&self) {}

    #[inline(always)]
    fn vote(&self, mine: bool) -> GroupVote {
        LoneThread.vote(mine)
    }

    #[inline(always)]
    fn broadcast(&self, value: u32) -> u32 {
        value
    }
}

/// All threads of a block; their number is a multiple of 32.
#[derive(Clone, Copy, Debug)]
pub struct WholeBlock {
    scratch: &'static [AtomicU32; SCRATCH],
}

impl WholeBlock {
    /// Returns the block of the calling thread; every thread calls it.
    #[inline(always)]
    pub fn here() -> Self {
        Self { scratch: scratch() }
    }

    /// Returns a word for each thread of a block of at most 256 threads. Their content is undefined at first.
    #[cfg(any(feature = "gathers", feature = "scatter"))]
    #[inline(always)]
    pub fn batch_words(&self) -> &'static [AtomicU32] {
        self.scratch.get(GROUP_WORDS..).unwrap_or_default()
    }

    #[inline(always)]
    fn word(&self, index: u32) -> &AtomicU32 {
        self.scratch.get(index as usize).unwrap_or(&self.scratch[0])
    }
}

#[cfg(target_arch = "nvptx64")]
const _: () = assert!(SCRATCH * 4 == 1284);

/// Returns the block's scratch words. Not inlined: the array must exist once.
#[cfg(target_arch = "nvptx64")]
#[inline(never)]
fn scratch() -> &'static [AtomicU32; SCRATCH] {
    let address: u64;
    // SAFETY: the instruction names a static shared array; takes its address only.
    unsafe {
        asm!("{{ .shared .align 4 .b8 nvme_scratch[1284]; .reg .u64 a; mov.u64 a, nvme_scratch; cvta.shared.u64 {}, a; }}",
            out(reg64) address, options(nostack));
    }
    // SAFETY: 1,284 bytes of shared memory, 4-byte aligned, that live as long as the block.
    unsafe { &*(address as usize as *const [AtomicU32; SCRATCH]) }
}

impl ThreadGroup for WholeBlock {
    #[inline(always)]
    fn size(&self) -> u32 {
        arch::block_threads()
    }

    #[inline(always)]
    fn rank(&self) -> u32 {
        arch::thread()
    }

    #[inline(always)]
    fn sync(&self) {
        arch::sync_block();
    }

    #[inline(always)]
    fn vote(&self, mine: bool) -> GroupVote {
        let yes = arch::ballot(arch::FULL, mine);
        let (warp, warps) = (arch::thread() / 32, arch::block_threads() / 32);
        if arch::lane() == 0 {
            self.word(warp).store(yes, Order::Relaxed, Scope::Cta);
        }
        arch::sync_block();
        let mut vote = GroupVote {
            total: 0,
            before: (yes & arch::lanes_below()).count_ones(),
            leading: 0,
        };
        for other in 0..warps {
            let yes = self.word(other).load(Order::Relaxed, Scope::Cta);
            if vote.leading == other * 32 {
                vote.leading += yes.trailing_ones();
            }
            vote.total += yes.count_ones();
            if other < warp {
                vote.before += yes.count_ones();
            }
        }
        // A barrier: no thread writes the next vote before all have read this one.
        arch::sync_block();
        vote
    }

    #[inline(always)]
    fn broadcast(&self, value: u32) -> u32 {
        if arch::thread() == 0 {
            self.word(64).store(value, Order::Relaxed, Scope::Cta);
        }
        arch::sync_block();
        let value = self.word(64).load(Order::Relaxed, Scope::Cta);
        arch::sync_block();
        value
    }

    #[inline(always)]
    fn tiles(&self) -> bool {
        true
    }

    #[inline(always)]
    fn of_tile(&self, value: u32, from: u32) -> u32 {
        of_tile(value, from)
    }

    #[inline(always)]
    fn swap(&self, value: u64, mask: u32) -> u64 {
        swap(value, mask)
    }
}

/// A thread of a GPU: its clock, and the lanes that are converged with it.
#[derive(Clone, Copy, Debug)]
pub struct GpuThread;

impl ExecContext for GpuThread {
    #[inline(always)]
    fn now_ns(&self) -> u64 {
        arch::now_ns()
    }

    #[inline(always)]
    fn pause(&self, turn: u32) {
        arch::sleep_ns(32 << turn.min(4));
    }

    #[inline(always)]
    fn converged<A: GroupOp>(&self, key: u64, op: A) -> A::Output {
        converged(LoneThread, key, op)
    }
}

/// Runs `op` with the lanes that are converged with this one and pass the same `key`, or as `lone`.
///
/// A whole warp and a lone lane are special cases: a mask that is a constant makes every collective much
/// cheaper, and a lone lane needs none.
#[inline(always)]
pub fn converged<L: ThreadGroup, A: GroupOp>(lone: L, key: u64, op: A) -> A::Output {
    let WarpLanes { mask } = WarpLanes::beside::<(L, A)>(key);
    if mask == arch::FULL {
        op.run(&WholeWarp)
    } else if mask.is_power_of_two() {
        op.run(&lone)
    } else {
        op.run(&WarpLanes { mask })
    }
}

/// The way in which a thread finds the threads that it acts with.
pub trait ThreadGrouping {
    /// Runs `op` with them; they pass the same `key`.
    fn act<A: GroupOp>(&self, key: u64, op: A) -> A::Output;
}

/// A thread that acts with others in the way `B`, on the clock of the GPU.
#[derive(Clone, Copy, Debug)]
pub struct GroupedThread<B>(pub B);

impl<B: ThreadGrouping> ExecContext for GroupedThread<B> {
    #[inline(always)]
    fn now_ns(&self) -> u64 {
        GpuThread.now_ns()
    }

    #[inline(always)]
    fn pause(&self, turn: u32) {
        GpuThread.pause(turn);
    }

    #[inline(always)]
    fn converged<A: GroupOp>(&self, key: u64, op: A) -> A::Output {
        self.0.act(key, op)
    }
}

impl ThreadGrouping for NarrowLane {
    #[inline(always)]
    fn act<A: GroupOp>(&self, key: u64, op: A) -> A::Output {
        converged(*self, key, op)
    }
}

/// Acts with the whole warp.
impl ThreadGrouping for ApartLanes {
    #[inline(always)]
    fn act<A: GroupOp>(&self, _key: u64, op: A) -> A::Output {
        op.run(self)
    }
}

/// Acts with any number of lanes by one copy of the code: less code and fewer registers, for callers that are
/// seldom a whole warp or alone.
#[cfg(feature = "gathers")]
#[derive(Clone, Copy, Debug)]
pub struct AnyLanes;

#[cfg(feature = "gathers")]
impl ThreadGrouping for AnyLanes {
    #[inline(always)]
    fn act<A: GroupOp>(&self, key: u64, op: A) -> A::Output {
        op.run(&WarpLanes::beside::<A>(key))
    }
}
