//! Kernels without a driver queue: the check of data that was read, and the raw limits of the bus.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::assignment::queue_words;
use crate::work::{LaunchArguments, LaunchReport, data_word};
use nvme_core::spec::Sqe;
use nvme_core::sync::{AtomicU64, Order, Scope, fence};

/// Number of entries and completions between two doorbells of a queue that is only fed.
const FED: u32 = 256;
/// Number of polls of the answer between two reads of the clock.
const LOOKS: u32 = 256;

entry! {
    /// Checks that the data memory holds the words of [`data_word`] for `commands` times `blocks` blocks from
    /// `lba` on. Any grid; different words are counted.
    ///
    /// # Safety
    /// `data`, `data_bytes` and `report` are valid as [`LaunchArguments`] documents; nothing writes the data
    /// meanwhile.
    pub unsafe fn nvme_verify(launch: LaunchArguments) {
        let report = launch.report as usize as *mut LaunchReport;
        let bytes = (launch.commands * u64::from(launch.blocks)) << launch.block_shift;
        let words = bytes.min(launch.data_bytes) / 8;
        let first = (launch.lba << launch.block_shift) / 8;
        let data = launch.data as usize as *const AtomicU64;
        let stride = u64::from(arch::blocks()) * u64::from(arch::block_threads());
        let mut index =
            u64::from(arch::block()) * u64::from(arch::block_threads()) + u64::from(arch::thread());
        let (mut wrong, mut wrong_at) = (0, 0);
        while index < words {
            // SAFETY: `index < words`, so the word is inside the data; an atomic load, since the
            // controller wrote it. A plain load could be merged with one from before the
            // completion.
            let have = unsafe { &*data.add(index as usize) }.load(Order::Relaxed, Scope::Sys);
            if have != data_word(launch.seed, first + index) {
                wrong += 1;
                wrong_at = index + 1;
            }
            index += stride;
        }
        if wrong != 0 {
            // SAFETY: the host vouches for the report, which is only accessed by these atomic instructions.
            unsafe {
                arch::add(&raw mut (*report).wrong, wrong);
                arch::raise(&raw mut (*report).wrong_at, wrong_at);
            }
        }
    }
}

entry! {
    /// Measures the bare limit of a command at depth 1: an entry of 64 bytes, a release fence and a doorbell
    /// out, an upper word back, `commands` times. One thread. Round n has n in every word.
    ///
    /// # Safety
    /// The first queue of the launch is memory through which a host thread answers; nothing else uses it.
    pub unsafe fn nvme_pingpong(launch: LaunchArguments) {
        let report = launch.report as usize as *mut LaunchReport;
        let Some(words) = queue_words(&launch, 0) else {
            return;
        };
        // SAFETY: the caller vouches for the words.
        let Some((memory, _)) = (unsafe { words.attach() }) else {
            return;
        };
        let mut round = 0;
        'rounds: while round < launch.commands {
            round += 1;
            memory.sq.write(0, Sqe::from_words([round; 8]));
            memory.sq_doorbell.ring(round as u32);
            let mut looks = 0;
            let mut deadline_ns = 0;
            while memory.cq.upper(0, Order::Acquire) != round {
                looks += 1;
                if looks % LOOKS != 0 {
                    continue;
                }
                let now_ns = arch::now_ns();
                if deadline_ns == 0 {
                    deadline_ns = now_ns + launch.timeout_ns;
                } else if now_ns >= deadline_ns {
                    // SAFETY: the host vouches for the report.
                    unsafe { arch::add(&raw mut (*report).timed_out, 1) };
                    round -= 1;
                    break 'rounds;
                }
            }
        }
        // SAFETY: as above.
        unsafe { arch::add(&raw mut (*report).completed, round) };
    }
}

entry! {
    /// Measures the bare limit of submission: `commands` entries into the rings of all queues, eight lanes an
    /// entry and a warp's four entries side by side, with one fence at the end. A warp stays on one queue, as
    /// one that owns a queue does. Any grid of blocks of a multiple of 32 threads, a multiple of
    /// `queue_count` warps in all.
    ///
    /// If `depth` is not 0 there is a controller, and each warp has a queue to itself: after each `FED`
    /// entries it reads as many completions, fences and rings, and ignores the content of the completions.
    /// That is the traffic of a full queue without the queue's logic.
    ///
    /// # Safety
    /// The rings are memory whose entries no code relies on; nothing else writes them.
    pub unsafe fn nvme_sqe_writes(launch: LaunchArguments) {
        let warp = (arch::block() * arch::block_threads() + arch::thread()) / 32;
        let warps = arch::blocks() * arch::block_threads() / 32;
        let (tile, word) = (arch::lane() / 8, arch::lane() & 7);
        let queues = launch.queue_count.max(1);
        let Some(words) = queue_words(&launch, warp % queues) else {
            return;
        };
        // SAFETY: the caller vouches for the words.
        let Some((memory, state)) = (unsafe { words.attach() }) else {
            return;
        };
        let beside = warps.div_ceil(queues) * 4;
        let mut index = warp / queues * 4 + tile;
        let mut written = 0u64;
        let (mut unrung, mut read) = (0, 0u64);
        let mut number = u64::from(warp * 4 + tile);
        while number < launch.commands {
            // The opcode makes it a read of one block, for a controller that executes the entries.
            let value = if word == 0 {
                u64::from(launch.opcode)
            } else {
                number
            };
            memory.sq.write_word(index & state.mask(), word, value);
            index += beside;
            written += u64::from(word == 0);
            number += u64::from(warps * 4);
            unrung += 4;
            if unrung == FED && launch.depth != 0 {
                unrung = 0;
                let at = |k: usize| index.wrapping_add(k as u32 * 32 + arch::lane());
                let uppers: [u64; FED as usize / 32] =
                    core::array::from_fn(|k| memory.cq.upper(at(k), Order::Relaxed));
                read += uppers.iter().fold(0, |sum, upper| sum | upper) & 1 << 48;
                arch::sync_warp(arch::FULL);
                fence(Order::AcqRel, Scope::Sys);
                if arch::lane() == 0 {
                    memory.sq_doorbell.ring_fenced(index & state.mask());
                }
            }
        }
        fence(Order::Release, Scope::Sys);
        // Keeps the loads alive (black box).
        if written != 0 || read == u64::MAX {
            let report = launch.report as usize as *mut LaunchReport;
            // SAFETY: the host vouches for the report, which is only accessed by these atomic instructions.
            unsafe { arch::add(&raw mut (*report).sqes, written) };
        }
    }
}
