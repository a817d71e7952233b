//! Shapes of a queue, with the core's own operations in their ordered form.
// UNSAFETY: rings and doorbells at raw addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::run::Part;
use crate::{Flavour, Shape, device};
use nvme_core::mem::{CqCell, CqRing, DoorbellRegister, SqCell, SqRing};
use nvme_core::spec::{Cqe, Iova, Sqe};
use nvme_core::sync::{AtomicU64, Order, Scope, fence};

const FENCE: u32 = Flavour::Fence as u32;
const ORDER: u32 = Flavour::Order as u32;
const BATCH: u32 = Flavour::Batch as u32;
const RELAXED: u32 = Flavour::Relaxed as u32;
const PLAIN: u32 = Flavour::Plain as u32;
/// The phase tag in the upper word of a completion.
const PHASE: u64 = 1 << 48;
/// Entries of the ring of [`Shape::Ring`](crate::Shape::Ring).
const ENTRIES: u32 = 4;

/// Returns entry `index` of the completion entries at y.
#[inline(always)]
fn cell<'a>(part: &Part<'a>, index: u32) -> &'a CqCell {
    let cells = part.args.y as usize as *const CqCell;
    // SAFETY: the index names one of the launch's entries; atomics alone touch it.
    unsafe { &*cells.add(index as usize) }
}

/// Posts an entry that contains `number`, with the phase tag `phase`.
#[inline(always)]
fn posted<const FLAVOUR: u32>(cell: &CqCell, number: u32, phase: bool) {
    let lower = u64::from(number);
    let upper = if phase { lower | PHASE } else { lower };
    if FLAVOUR == RELAXED || FLAVOUR == PLAIN {
        let words = core::ptr::from_ref(cell).cast::<AtomicU64>();
        // SAFETY: an entry is two atomic words.
        let (low, high) = unsafe { (&*words, &*words.add(1)) };
        low.store(lower, Order::Relaxed, Scope::Sys);
        high.store(upper, Order::Relaxed, Scope::Sys);
    } else {
        cell.post(Cqe::from_words(lower, upper));
    }
}

/// Returns the number in a word of an entry.
#[inline(always)]
fn number(word: u64) -> u32 {
    word as u32
}

/// Acts as the controller of [`Shape::Completion`](crate::Shape::Completion) and [`Shape::Relay`](crate::Shape::Relay).
#[inline(always)]
pub fn complete<const FLAVOUR: u32>(part: &mut Part<'_>) {
    let data = part.word(part.args.x);
    for number in 1..=part.args.iterations {
        data.store(number, Order::Relaxed, Scope::Sys);
        posted::<FLAVOUR>(cell(part, part.instance), number, true);
        if part.rest() {
            return;
        }
    }
}

#[inline(always)]
fn completions<'a>(part: &Part<'a>, count: u32) -> CqRing<'a> {
    // SAFETY: the launch's entries, which atomics alone touch.
    unsafe { CqRing::from_raw(part.args.y as usize as *mut u8, count, Iova(0)) }
}

/// Reads an entry, then the data.
#[inline(always)]
pub fn reap<const FLAVOUR: u32>(part: &mut Part<'_>) {
    let data = part.word(part.args.x);
    let ring = completions(part, part.args.instances);
    let index = part.instance;
    let mut last = 0;
    while last < part.args.iterations {
        let (lower, upper) = match FLAVOUR {
            FENCE => match ring.read(index, true) {
                Some(cqe) => {
                    let [lower, upper] = cqe.to_words();
                    (lower, upper)
                }
                None => (0, 0),
            },
            BATCH => {
                // The read is like that of the core's lone lane: several entries, one fence. The other entries belong
                // to other threads.
                let upper = ring.upper(index, Order::Relaxed);
                for beside in 1..ENTRIES {
                    ring.upper(index ^ beside & (part.args.instances - 1), Order::Relaxed);
                }
                // Acquire: pairs with the store of the upper word in `posted`.
                fence(Order::AcqRel, Scope::Sys);
                (ring.lower(index), upper)
            }
            _ => {
                // Acquire: pairs with the store of the upper word in `posted`.
                let order = match FLAVOUR {
                    ORDER => Order::Acquire,
                    _ => Order::Relaxed,
                };
                let upper = ring.upper(index, order);
                (ring.lower(index), upper)
            }
        };
        let beyond = match FLAVOUR {
            PLAIN => device::plain(data),
            _ => data.load(Order::Relaxed, Scope::Sys),
        };
        let seen = number(upper);
        part.counts.judge(last, seen, number(lower).min(beyond));
        last = seen;
        if part.rest() {
            return;
        }
    }
}

/// Drains for another thread: copies from an entry to that thread's cell.
#[inline(always)]
pub fn drain<const FLAVOUR: u32>(part: &mut Part<'_>) {
    let ring = completions(part, part.args.instances);
    let to = part.wide(part.args.z, 0);
    let mut seen = 0;
    while seen < part.args.iterations {
        // Acquire: pairs with the store of the upper word in `posted`.
        let order = match FLAVOUR {
            ORDER => Order::Acquire,
            _ => Order::Relaxed,
        };
        let upper = ring.upper(part.instance, order);
        match FLAVOUR {
            // As a group that reads one entry a member. Release: pairs with the load in `wait`.
            ORDER => fence(Order::AcqRel, Scope::Gpu),
            // As a group that reads several.
            BATCH => fence(Order::AcqRel, Scope::Sys),
            _ => {}
        }
        seen = number(upper);
        to.store(u64::from(seen), Order::Relaxed, Scope::Gpu);
        if part.rest() {
            return;
        }
    }
}

/// Waits at a cell for the value that another thread drained, then reads the data.
#[inline(always)]
pub fn wait<const FLAVOUR: u32>(part: &mut Part<'_>) {
    let (from, data) = (part.wide(part.args.z, 0), part.word(part.args.x));
    let mut last = 0;
    while last < part.args.iterations {
        // Acquire: pairs with the fence in `drain`.
        let order = match FLAVOUR {
            RELAXED | PLAIN => Order::Relaxed,
            _ => Order::Acquire,
        };
        let seen = number(from.load(order, Scope::Gpu));
        let beyond = match FLAVOUR {
            PLAIN => device::plain(data),
            _ => data.load(Order::Relaxed, Scope::Sys),
        };
        part.counts.judge(last, seen, beyond);
        last = seen;
        if part.rest() {
            return;
        }
    }
}

/// Returns the phase tag of the entry at `position`.
#[inline(always)]
fn phase(position: u32) -> bool {
    position & ENTRIES == 0
}

/// Acts as the controller of a ring: posts while there is room.
#[inline(always)]
pub fn post<const FLAVOUR: u32>(part: &mut Part<'_>) {
    let head = part.word(part.args.x);
    let first = part.instance * ENTRIES;
    let mut position = 0;
    while position < part.args.iterations {
        // Acquire: pairs with the doorbell of `take`.
        let order = match FLAVOUR {
            FENCE => Order::Acquire,
            _ => Order::Relaxed,
        };
        if position.wrapping_sub(head.load(order, Scope::Sys)) < ENTRIES {
            let index = position % ENTRIES;
            let data = part.wide(part.args.z, index);
            data.store(u64::from(position), Order::Relaxed, Scope::Sys);
            posted::<FLAVOUR>(cell(part, first + index), position, phase(position));
            position += 1;
        }
        if part.rest() {
            return;
        }
    }
}

/// Takes entries out of a ring, by phase tag, and releases them.
#[inline(always)]
pub fn take<const FLAVOUR: u32>(part: &mut Part<'_>) {
    let ring = completions(part, part.args.instances * ENTRIES);
    // SAFETY: the launch's location x; an atomic word.
    let head = unsafe {
        DoorbellRegister::from_raw(core::ptr::from_ref(part.word(part.args.x)) as *mut u32)
    };
    let first = part.instance * ENTRIES;
    let mut position = 0;
    while position < part.args.iterations {
        let index = position % ENTRIES;
        let entry = match FLAVOUR {
            FENCE => ring.read(first + index, phase(position)).map(|cqe| {
                let [lower, upper] = cqe.to_words();
                (lower, upper)
            }),
            _ => {
                let upper = ring.upper(first + index, Order::Relaxed);
                let lower = ring.lower(first + index);
                (upper & PHASE != 0 && phase(position) || upper & PHASE == 0 && !phase(position))
                    .then_some((lower, upper))
            }
        };
        let data = part
            .wide(part.args.z, index)
            .load(Order::Relaxed, Scope::Sys);
        if let Some((lower, upper)) = entry {
            let right = [lower, data, upper & !PHASE] == [u64::from(position); 3];
            // Position 0 is no number to miss: count from 1.
            let least = if right { position + 1 } else { 0 };
            part.counts.judge(position, position + 1, least);
            position += 1;
            match FLAVOUR {
                FENCE => head.ring(position),
                _ => head.ring_fenced(position),
            }
        } else {
            part.counts.reads += 1;
        }
        if part.rest() {
            return;
        }
    }
}

/// Submits: writes a buffer, an entry, a doorbell.
#[inline(always)]
pub fn submit<const FLAVOUR: u32>(part: &mut Part<'_>) {
    // SAFETY: the address names the launch's entries; atomics alone touch them.
    let ring = unsafe {
        SqRing::from_raw(
            part.args.y as usize as *mut u8,
            part.args.instances,
            Iova(0),
        )
    };
    // SAFETY: the launch's location x; an atomic word.
    let bell = unsafe {
        DoorbellRegister::from_raw(core::ptr::from_ref(part.word(part.args.x)) as *mut u32)
    };
    let buffer = part.wide(part.args.z, 0);
    for number in 1..=part.args.iterations {
        buffer.store(u64::from(number), Order::Relaxed, Scope::Sys);
        ring.write(part.instance, Sqe::from_words([u64::from(number); 8]));
        match FLAVOUR {
            FENCE => bell.ring(number),
            _ => bell.ring_fenced(number),
        }
        if part.rest() {
            return;
        }
    }
}

/// Acts as a controller on the GPU: reads the doorbell, the entry and the buffer.
#[inline(always)]
pub fn fetch<const FLAVOUR: u32>(part: &mut Part<'_>) {
    let cells = part.args.y as usize as *const SqCell;
    // SAFETY: the index names one of the launch's entries; atomics alone touch it.
    let entry = unsafe { &*cells.add(part.instance as usize) };
    let bell = part.word(part.args.x);
    // Without lanes, the buffer is one word.
    let words = if part.args.shape == Shape::Lanes as u32 {
        8
    } else {
        1
    };
    let mut last = 0;
    while last < part.args.iterations {
        // Acquire: pairs with the fence before the doorbell in `submit`.
        let order = match FLAVOUR {
            RELAXED => Order::Relaxed,
            _ => Order::Acquire,
        };
        let seen = bell.load(order, Scope::Sys);
        let mut least = u32::MAX;
        for word in 0..words {
            let buffer = part.wide(part.args.z, word);
            least = least.min(number(buffer.load(Order::Relaxed, Scope::Sys)));
        }
        // Each word has a name: an array in a loop would be placed on a stack.
        let [a, b, c, d, e, f, g, h] = entry.load().to_words().map(number);
        least = least
            .min(a)
            .min(b)
            .min(c)
            .min(d)
            .min(e)
            .min(f)
            .min(g)
            .min(h);
        part.counts.judge(last, seen, least);
        last = seen;
        if part.rest() {
            return;
        }
    }
}
