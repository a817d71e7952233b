//! Shapes of many threads: blocks that act together, and a lock.
// UNSAFETY: rings and doorbells at raw addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::run::Part;
use crate::{Flavour, device};
use core::ops::Range;
use nvme_core::mem::{DoorbellRegister, SqRing};
use nvme_core::spec::Iova;
use nvme_core::sync::{AtomicU32, Order, Scope, fence};

const WARP: u32 = Flavour::Warp as u32;
const BLOCK: u32 = Flavour::Block as u32;
const FENCE: u32 = Flavour::Fence as u32;
const PLAIN: u32 = Flavour::Plain as u32;

/// Returns the lanes whose work this thread does: its own lane, or all lanes on the stand-in.
#[inline(always)]
fn mine(part: &Part<'_>) -> Range<u32> {
    if cfg!(target_arch = "nvptx64") {
        part.thread.index..part.thread.index + 1
    } else {
        0..part.thread.threads
    }
}

#[inline(always)]
fn sync<const FLAVOUR: u32>() {
    match FLAVOUR {
        WARP => device::sync_warp(),
        BLOCK => device::sync_block(),
        _ => {}
    }
}

/// Lanes write one word each: 0 to 7 of the entry, 8 to 15 of the buffer. The leader rings.
///
/// Ends after its iterations: no block here waits for another.
#[inline(always)]
pub fn submit<const FLAVOUR: u32>(part: &mut Part<'_>) {
    let args = part.args;
    // SAFETY: the address names the launch's entries; atomics alone touch them.
    let ring = unsafe { SqRing::from_raw(args.y as usize as *mut u8, args.instances, Iova(0)) };
    // SAFETY: the launch's location x; an atomic word.
    let bell =
        unsafe { DoorbellRegister::from_raw(core::ptr::from_ref(part.word(args.x)) as *mut u32) };
    for number in 1..=args.iterations {
        for lane in mine(part) {
            // The lanes that write are spread over the block.
            let word = lane / (part.thread.threads / 16);
            if lane % (part.thread.threads / 16) != 0 {
                continue;
            }
            if word < 8 {
                ring.write_word(part.instance, word, u64::from(number));
            } else {
                let buffer = part.wide(args.z, word - 8);
                buffer.store(u64::from(number), Order::Relaxed, Scope::Sys);
            }
        }
        sync::<FLAVOUR>();
        if part.thread.index == 0 {
            match FLAVOUR {
                WARP | BLOCK => bell.ring(number),
                _ => bell.ring_fenced(number),
            }
        }
        // The next words are not written before the doorbell, so that the words read are at least as new as it.
        part.rest();
    }
}

/// Threads write a word each and read each other's after a barrier. Ends after its iterations.
#[inline(always)]
pub fn exchange<const FLAVOUR: u32>(part: &mut Part<'_>) {
    let args = part.args;
    let threads = part.thread.threads;
    let base = args.x + u64::from(part.instance) * u64::from(threads) * 4;
    let at = |lane: u32| {
        let words = base as usize as *const AtomicU32;
        // SAFETY: the address names the block's words; atomics alone touch them.
        unsafe { &*words.add(lane as usize) }
    };
    let me = part.thread.index;
    let partner = if cfg!(target_arch = "nvptx64") {
        threads - 1 - me
    } else {
        me
    };
    for number in 1..=args.iterations {
        at(me).store(number, Order::Relaxed, Scope::Cta);
        sync::<FLAVOUR>();
        let seen = at(partner).load(Order::Relaxed, Scope::Cta);
        part.counts.judge(number - 1, number, seen);
        part.rest();
        // The next word is written when everybody has read this one.
        sync::<FLAVOUR>();
    }
}

/// Tries the lock and rings, as `SharedQueue::ring` does. Ends after its tries.
#[inline(always)]
pub fn turn<const FLAVOUR: u32>(part: &mut Part<'_>) {
    let args = part.args;
    let (lock, number) = (part.word(args.y), part.word(args.z));
    // SAFETY: the launch's location x; an atomic word.
    let bell =
        unsafe { DoorbellRegister::from_raw(core::ptr::from_ref(part.word(args.x)) as *mut u32) };
    // Acquire: pairs with the release of the last holder.
    let (acquire, release) = match FLAVOUR {
        FENCE => (Order::Acquire, Order::Release),
        _ => (Order::Relaxed, Order::Relaxed),
    };
    for _ in 0..args.iterations {
        if FLAVOUR == PLAIN {
            let next = number.fetch_add(1, Order::Relaxed, Scope::Gpu) + 1;
            bell.ring_fenced(next);
            part.counts.reads += 1;
        } else if lock.fetch_add(1, acquire, Scope::Gpu) == 0 {
            let next = number.load(Order::Relaxed, Scope::Gpu) + 1;
            number.store(next, Order::Relaxed, Scope::Gpu);
            if FLAVOUR == FENCE {
                // Release: pairs with whoever reads the doorbell.
                fence(Order::AcqRel, Scope::Sys);
            }
            bell.ring_fenced(next);
            // Release: after the doorbell, so that holders ring in order.
            lock.swap(0, release, Scope::Gpu);
            part.counts.reads += 1;
        }
        part.rest();
    }
}
