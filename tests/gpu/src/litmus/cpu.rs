//! The CPU's roles: one thread plays many instances in turn, so that each is played at many different times.
// UNSAFETY: the locations are raw memory that the GPU shares.
#![allow(unsafe_code)]

use super::cases::{Case, Players};
use gpu_litmus::{Args, Counts, Flavour, Shape};
use nvme_core::mem::{CqCell, SqCell};
use nvme_core::spec::Cqe;
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// The bit of the phase tag in the upper word of a completion, and the entries of a ring, with the kernel's values.
const PHASE: u64 = 1 << 48;
const ENTRIES: u32 = 4;

/// A role of the CPU over host addresses.
pub struct Role<'a> {
    pub case: &'a Case,
    pub args: &'a Args,
    pub x: usize,
    pub y: usize,
    pub z: usize,
    /// The kernel has ended.
    pub over: &'a AtomicBool,
}

impl Role<'_> {
    fn word(&self, base: usize, instance: u32) -> &AtomicU32 {
        let at = base + instance as usize * self.args.stride as usize;
        // SAFETY: the address is a location of the launch, inside pages that live to its end; atomics alone touch it.
        unsafe { &*(at as *const AtomicU32) }
    }

    fn wide(&self, instance: u32, index: u32) -> &AtomicU64 {
        let at = self.z + instance as usize * self.args.stride as usize + index as usize * 8;
        // SAFETY: as above; a stride holds eight words.
        unsafe { &*(at as *const AtomicU64) }
    }

    fn completion(&self, index: u32) -> &CqCell {
        // SAFETY: as above; entries follow each other from y on.
        unsafe { &*(self.y as *const CqCell).add(index as usize) }
    }

    fn submission(&self, index: u32) -> &SqCell {
        // SAFETY: as above.
        unsafe { &*(self.y as *const SqCell).add(index as usize) }
    }

    /// Returns the order of loads and stores: relaxed in cases without order.
    fn order(&self, order: Order) -> Order {
        if self.case.weak() {
            Order::Relaxed
        } else {
            order
        }
    }

    /// Plays `instances`. What store buffering read, by iteration and then by instance.
    pub fn play(&self, instances: Range<u32>) -> (Counts, Vec<u32>) {
        let mut counts = Counts::default();
        let mut log = Vec::new();
        match (self.case.shape, self.case.players) {
            (Shape::Message, Players::CpuFirst) => self.send(instances),
            (Shape::Message, _) => self.watch(instances, &mut counts, |k| {
                // Acquire: pairs with the GPU's release.
                let seen = self
                    .word(self.y, k)
                    .load(self.order(Order::Acquire), Scope::Sys);
                let data = self.word(self.x, k).load(Order::Relaxed, Scope::Sys);
                (seen, data)
            }),
            (Shape::Buffering, _) => log = self.buffer(instances),
            (Shape::Completion | Shape::Relay, _) => self.complete(instances),
            (Shape::Ring, _) => self.post(instances),
            (Shape::Doorbell | Shape::Lanes, _) => {
                self.watch(instances, &mut counts, |k| self.fetch(k));
            }
            (Shape::Turns, _) => {
                let mut highest = vec![0; instances.len()];
                let first = instances.start;
                self.watch(instances, &mut counts, |k| {
                    // Acquire: pairs with the fence before the doorbell.
                    let seen = self.word(self.x, k).load(Order::Acquire, Scope::Sys);
                    let highest = &mut highest[(k - first) as usize];
                    let back = seen < *highest;
                    *highest = seen.max(*highest);
                    (seen, if back { 0 } else { seen })
                });
            }
            (Shape::Barrier, _) => {}
        }
        (counts, log)
    }

    fn send(&self, instances: Range<u32>) {
        for number in 1..=self.args.iterations {
            for k in instances.clone() {
                self.word(self.x, k)
                    .store(number, Order::Relaxed, Scope::Sys);
                // Release: pairs with the GPU's acquire.
                let order = self.order(Order::Release);
                self.word(self.y, k).store(number, order, Scope::Sys);
            }
        }
    }

    /// Looks at every instance in turn until the kernel has ended, and once more.
    fn watch(
        &self,
        instances: Range<u32>,
        counts: &mut Counts,
        mut look: impl FnMut(u32) -> (u32, u32),
    ) {
        let mut last = vec![0; instances.len()];
        loop {
            // Acquire: what the kernel did is over when this says so.
            let over = self.over.load(Ordering::Acquire);
            for (k, last) in instances.clone().zip(&mut last) {
                let (seen, least) = look(k);
                counts.judge(*last, seen, least);
                *last = seen;
            }
            if over {
                return;
            }
        }
    }

    fn buffer(&self, instances: Range<u32>) -> Vec<u32> {
        let mut log = Vec::with_capacity(instances.len() * self.args.iterations as usize);
        for number in 1..=self.args.iterations {
            for k in instances.clone() {
                self.word(self.y, k)
                    .store(number, Order::Relaxed, Scope::Sys);
                if self.case.flavour == Flavour::Fence {
                    // The store before this fence comes before the load after it.
                    fence(Ordering::SeqCst);
                }
                log.push(self.word(self.x, k).load(Order::Relaxed, Scope::Sys) + 1);
            }
        }
        log
    }

    /// Posts an entry as the simulated controller does.
    fn posted(&self, index: u32, number: u32, phase: bool) {
        let lower = u64::from(number);
        let upper = if phase { lower | PHASE } else { lower };
        self.completion(index).post(Cqe::from_words(lower, upper));
    }

    fn complete(&self, instances: Range<u32>) {
        for number in 1..=self.args.iterations {
            for k in instances.clone() {
                self.word(self.x, k)
                    .store(number, Order::Relaxed, Scope::Sys);
                self.posted(k, number, true);
            }
        }
    }

    fn post(&self, instances: Range<u32>) {
        let mut positions = vec![0u32; instances.len()];
        let mut left = instances.len();
        while left > 0 && !self.over.load(Ordering::Relaxed) {
            for (k, position) in instances.clone().zip(&mut positions) {
                // Acquire: pairs with the doorbell that gave an entry back.
                let head = self
                    .word(self.x, k)
                    .load(self.order(Order::Acquire), Scope::Sys);
                if *position == self.args.iterations || position.wrapping_sub(head) >= ENTRIES {
                    continue;
                }
                let index = *position % ENTRIES;
                self.wide(k, index)
                    .store(u64::from(*position), Order::Relaxed, Scope::Sys);
                let phase = *position & ENTRIES == 0;
                self.posted(k * ENTRIES + index, *position, phase);
                *position += 1;
                left -= usize::from(*position == self.args.iterations);
            }
        }
    }

    fn fetch(&self, k: u32) -> (u32, u32) {
        // Acquire: pairs with the fence before the doorbell.
        let seen = self
            .word(self.x, k)
            .load(self.order(Order::Acquire), Scope::Sys);
        let words = if self.case.shape == Shape::Lanes {
            8
        } else {
            1
        };
        let buffer = (0..words).map(|index| self.wide(k, index).load(Order::Relaxed, Scope::Sys));
        let buffer = buffer.min().unwrap_or(0);
        let entry = self.submission(k).load().to_words();
        let least = entry.into_iter().min().unwrap_or(0).min(buffer);
        (seen, least as u32)
    }
}
