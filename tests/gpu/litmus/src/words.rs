//! Litmus shapes of two words of memory: who writes, who reads, and with which orders.

use crate::Flavour;
use crate::device;
use crate::run::{Part, scope};
use nvme_core::sync::{Order, fence};

const FENCE: u32 = Flavour::Fence as u32;
const ORDER: u32 = Flavour::Order as u32;
const EXCHANGE: u32 = Flavour::Exchange as u32;
const ACQ_REL: u32 = Flavour::AcqRel as u32;
const PLAIN: u32 = Flavour::Plain as u32;
const COPY: u32 = Flavour::Copy as u32;
const COPY_RELAXED: u32 = Flavour::CopyRelaxed as u32;
const COPY_CACHED: u32 = Flavour::CopyCached as u32;

/// Writes x, then y.
#[inline(always)]
pub fn send<const FLAVOUR: u32, const WITHIN: u32>(part: &mut Part<'_>) {
    let (x, y, within) = (
        part.word(part.args.x),
        part.word(part.args.y),
        scope(WITHIN),
    );
    for number in 1..=part.args.iterations {
        x.store(number, Order::Relaxed, within);
        match FLAVOUR {
            FENCE => {
                // Release: pairs with the fence in `receive`.
                fence(Order::Release, within);
                y.store(number, Order::Relaxed, within);
            }
            // Release: pairs with the load in `receive`.
            ORDER | COPY => y.store(number, Order::Release, within),
            EXCHANGE => {
                // Release: pairs with the addition in `receive`.
                y.swap(number, Order::Release, within);
            }
            _ => y.store(number, Order::Relaxed, within),
        }
        if part.rest() {
            return;
        }
    }
}

/// Reads y, then x.
#[inline(always)]
pub fn receive<const FLAVOUR: u32, const WITHIN: u32>(part: &mut Part<'_>) {
    let (x, y, within) = (
        part.word(part.args.x),
        part.word(part.args.y),
        scope(WITHIN),
    );
    let mut last = 0;
    while last < part.args.iterations {
        let seen = match FLAVOUR {
            // Acquire: pairs with the store in `send`.
            ORDER | COPY => y.load(Order::Acquire, within),
            // Acquire: pairs with the exchange in `send`.
            EXCHANGE => y.fetch_add(0, Order::Acquire, within),
            _ => y.load(Order::Relaxed, within),
        };
        if FLAVOUR == FENCE {
            // Acquire: pairs with the fence in `send`.
            fence(Order::Acquire, within);
        }
        let data = match FLAVOUR {
            PLAIN => device::plain(x),
            COPY | COPY_RELAXED => device::copied(x, part.thread.index),
            COPY_CACHED => device::copied_by_cache(x, part.thread.index),
            _ => x.load(Order::Relaxed, within),
        };
        part.counts.judge(last, seen, data);
        last = seen;
        if part.rest() {
            return;
        }
    }
}

/// Writes x and reads y.
#[inline(always)]
pub fn buffer_x<const FLAVOUR: u32, const WITHIN: u32>(part: &mut Part<'_>) {
    buffer::<0, FLAVOUR, WITHIN>(part);
}

/// Writes y and reads x.
#[inline(always)]
pub fn buffer_y<const FLAVOUR: u32, const WITHIN: u32>(part: &mut Part<'_>) {
    buffer::<1, FLAVOUR, WITHIN>(part);
}

#[inline(always)]
fn buffer<const ROLE: usize, const FLAVOUR: u32, const WITHIN: u32>(part: &mut Part<'_>) {
    let (x, y, within) = (
        part.word(part.args.x),
        part.word(part.args.y),
        scope(WITHIN),
    );
    let (mine, other) = if ROLE == 0 { (x, y) } else { (y, x) };
    let mut last = 0;
    for number in 1..=part.args.iterations {
        mine.store(number, Order::Relaxed, within);
        match FLAVOUR {
            FENCE => device::fence_sc(within),
            // This orders everything except a store before a load: weaker than the shape needs.
            ACQ_REL => fence(Order::AcqRel, within),
            _ => {}
        }
        let seen = other.load(Order::Relaxed, within);
        part.log(ROLE, number - 1)
            .store(seen + 1, Order::Relaxed, within);
        // Forbidden outcomes are found in the logs, by the host.
        part.counts.judge(last, seen, seen);
        last = seen;
        if part.rest() {
            return;
        }
    }
}
