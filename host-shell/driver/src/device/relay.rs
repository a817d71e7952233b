//! Doorbells that are plain words of this process's memory, relayed to the controller by a thread.
//!
//! A writer that cannot store to the BAR (tier 0: a GPU whose driver does not map it) stores to
//! [`DoorbellRelay::words`], laid out as the BAR is from 1000h on, and the thread passes the newest value on. Several
//! rings between two passes of the thread cost one write to the controller.
//!
//! Invariant: every value stored is passed on, or replaced by a newer one of the same doorbell. The
//! thread takes a value by swapping [`NONE`] in, so a queue that is created again may ring the value
//! that its predecessor rang last. Rings of I/O queues that came before a ring of the admin queue, or
//! before a write to a register, reach the controller before it does.

use super::bar::{DoorbellMap, PAGE_WORDS};
pub use super::bar::{DoorbellPage, NONE};
use crate::device::Device;
use crate::device::peer::PeerMemory;
use crate::device::ring_memory::RingMemory;
use crate::dma::pages::DmaPages;
use crate::error::{Error, Result};
use nvme_core::mem::DoorbellRegister;
use nvme_core::spec::register::{cq_head_doorbell, offset, sq_tail_doorbell};
use nvme_core::spec::{Iova, Qid};
use nvme_core::{ControllerIdentity, RegisterAccess};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Passes without work before the thread lets others run, and before it sleeps between passes.
const SPIN_PASSES: u32 = 200;
const YIELD_PASSES: u32 = 20_000;
const NAP: Duration = Duration::from_micros(20);
/// Deadline of waiting for the relay thread: one that has not run for so long is not going to, and a shutdown
/// must not hang on it.
const SETTLE_TIME: Duration = Duration::from_secs(1);

/// A device whose doorbells are relayed. Everything else is passed to the wrapped device.
pub struct DoorbellRelay {
    shared: Arc<RelayState>,
    thread: Option<JoinHandle<()>>,
}

struct RelayState {
    device: Arc<dyn Device>,
    pages: Box<[DoorbellPage]>,
    /// The doorbells of the admin queue, tail and head, then the others: the index of each word and the register behind
    /// it.
    doorbells: Vec<(usize, DoorbellRegister<'static>)>,
    stop: AtomicBool,
    /// Passes that have ended, to wait for.
    passes: AtomicU64,
    forwarded: AtomicU64,
}

impl DoorbellRelay {
    /// Starts a thread that relays the doorbells of queues 0 to `queue_pairs` of `device`, or of the queues
    /// whose doorbells are mapped, if these are fewer.
    ///
    /// # Errors
    /// [`Error::Device`] when not even the doorbells of queue 0 are mapped, [`Error::Gone`] when the
    /// controller is gone, [`Error::System`] when no thread can be started.
    pub fn start(device: Arc<dyn Device>, queue_pairs: u16) -> Result<Arc<Self>> {
        let cap = device.registers().read64(offset::CAP);
        if cap == u64::MAX {
            return Err(Error::Gone {
                cause: format!("{}: registers read as all ones", device.name()),
            });
        }
        let dstrd = nvme_core::spec::register::Cap(cap).dstrd();
        let map = device.doorbells();
        let mut doorbells = Vec::new();
        for qid in (0..=queue_pairs).map(Qid) {
            let (tail, head) = match map.pair(qid, dstrd) {
                Ok(pair) => pair,
                Err(error) if qid == Qid::ADMIN => return Err(error),
                Err(_) => break,
            };
            let word = |register: u32| (register - offset::DOORBELLS) as usize / 4;
            doorbells.push((word(sq_tail_doorbell(qid.0, dstrd)), tail));
            doorbells.push((word(cq_head_doorbell(qid.0, dstrd)), head));
        }
        let words = doorbells.last().map_or(0, |(at, _)| at + 1);
        let pages = words.div_ceil(PAGE_WORDS);
        let shared = Arc::new(RelayState {
            device,
            pages: (0..pages).map(|_| DoorbellPage::new()).collect(),
            doorbells,
            stop: AtomicBool::new(false),
            passes: AtomicU64::new(0),
            forwarded: AtomicU64::new(0),
        });
        let thread = std::thread::Builder::new()
            .name("doorbell-relay".to_owned())
            .spawn({
                let shared = Arc::clone(&shared);
                move || shared.run()
            })
            .map_err(|source| Error::System {
                call: "starting the doorbell relay",
                source,
            })?;
        Ok(Arc::new(Self {
            shared,
            thread: Some(thread),
        }))
    }

    /// Returns the words, page aligned and laid out as the BAR is from 1000h on: the memory that is registered with a
    /// GPU.
    ///
    /// Store a doorbell's value with release order at system scope; nothing else may be stored.
    pub fn words(&self) -> &[DoorbellPage] {
        &self.shared.pages
    }

    /// Returns the number of doorbell writes to the controller so far. The difference to the number of rings is
    /// the saving by combining them.
    pub fn forwarded(&self) -> u64 {
        self.shared.forwarded.load(Ordering::Relaxed)
    }
}

impl Drop for DoorbellRelay {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A relay that panicked has nothing left to pass on.
            let _ = thread.join();
        }
    }
}

impl RelayState {
    fn run(&self) {
        let mut idle = 0;
        while !self.stop.load(Ordering::Relaxed) {
            let passed = self.pass();
            // Release: pairs with the acquire loads in `settle`. Once the count has grown by two, a whole pass has
            // begun and ended since the wait started, so every doorbell that a pass had taken before has also been
            // written.
            self.passes.fetch_add(1, Ordering::Release);
            if passed > 0 {
                self.forwarded.fetch_add(passed, Ordering::Relaxed);
                idle = 0;
                continue;
            }
            idle += 1;
            match idle {
                0..SPIN_PASSES => std::hint::spin_loop(),
                SPIN_PASSES..YIELD_PASSES => std::thread::yield_now(),
                _ => {
                    idle = YIELD_PASSES;
                    std::thread::sleep(NAP);
                }
            }
        }
        self.pass();
    }

    /// Passes on the doorbells that were stored.
    fn pass(&self) -> u64 {
        let place = |index: usize| self.word(self.doorbells[index].0);
        pass(self.doorbells.len(), place, |index, value| {
            self.doorbells[index].1.ring(value);
        })
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        &self.pages[at / PAGE_WORDS].0[at % PAGE_WORDS]
    }

    /// Waits until everything rung before this call has been passed on, a second at most. A reset must not
    /// follow earlier: a late doorbell would reach the queues that are created after it.
    fn settle(&self) {
        let start = self.passes.load(Ordering::Acquire);
        let begin = Instant::now();
        let pending = || {
            self.doorbells
                .iter()
                .any(|(at, _)| self.word(*at).load(Ordering::Relaxed) != NONE)
        };
        // A word seen empty may still be on its way: a pass that began after it was taken is over
        // once two more have ended.
        while (pending() || self.passes.load(Ordering::Acquire) < start + 2)
            && !self.stop.load(Ordering::Relaxed)
            && begin.elapsed() < SETTLE_TIME
        {
            std::thread::yield_now();
        }
    }
}

/// Passes on the doorbells in `count` words: those of I/O queues, then the two of the admin queue, which come
/// first. Returns their number.
fn pass<'a>(
    count: usize,
    word: impl Fn(usize) -> &'a AtomicU32,
    mut ring: impl FnMut(usize, u32),
) -> u64 {
    let mut sweep = |indexes: std::ops::Range<usize>| {
        let mut passed = 0;
        for index in indexes {
            let word = word(index);
            if word.load(Ordering::Relaxed) == NONE {
                continue;
            }
            // Acquire: pairs with the release store of the thread that rang. Without it the controller could
            // be notified, and fetch submission queue entries, before those entries are visible in memory.
            let value = word.swap(NONE, Ordering::Acquire);
            if value != NONE {
                ring(index, value);
                passed += 1;
            }
        }
        passed
    };
    let mut passed = sweep(2..count);
    // Acquire: pairs with the release of the store to the word; its earlier rings of I/O queues are
    // visible to the second sweep, so a queue is never deleted before its last ring arrives.
    if (0..2).any(|index| word(index).load(Ordering::Acquire) != NONE) {
        passed += sweep(2..count);
        passed += sweep(0..2);
    }
    passed
}

impl RegisterAccess for RelayState {
    fn identity(&self) -> &ControllerIdentity {
        self.device.registers().identity()
    }

    fn read32(&self, offset: u32) -> u32 {
        self.device.registers().read32(offset)
    }

    fn read64(&self, offset: u32) -> u64 {
        self.device.registers().read64(offset)
    }

    fn write32(&self, offset: u32, value: u32) {
        self.settle();
        self.device.registers().write32(offset, value);
    }

    fn write64(&self, offset: u32, value: u64) {
        self.settle();
        self.device.registers().write64(offset, value);
    }
}

impl Device for DoorbellRelay {
    fn name(&self) -> String {
        self.shared.device.name()
    }

    fn describe(&self) -> String {
        format!("{}, relayed doorbells", self.shared.device.describe())
    }

    fn registers(&self) -> &(dyn RegisterAccess + Sync) {
        &*self.shared
    }

    fn doorbells(&self) -> DoorbellMap {
        let words = self.shared.doorbells.last().map_or(0, |(at, _)| at + 1);
        DoorbellMap::of_words(self.words(), words)
    }

    fn alloc_dma(&self, bytes: usize) -> Result<DmaPages> {
        self.shared.device.alloc_dma(bytes)
    }

    fn map_dma(&self, pages: &Arc<DmaPages>) -> Result<Iova> {
        self.shared.device.map_dma(pages)
    }

    fn unmap_dma(&self, iova: Iova, bytes: usize) -> Result<()> {
        self.shared.device.unmap_dma(iova, bytes)
    }

    fn map_peer(&self, memory: PeerMemory) -> Result<Iova> {
        self.shared.device.map_peer(memory)
    }

    fn reaches_peers(&self) -> bool {
        self.shared.device.reaches_peers()
    }

    fn reset(&self) -> Result<()> {
        self.shared.settle();
        self.shared.device.reset()
    }

    fn controller_memory(&self) -> Result<Arc<RingMemory>> {
        self.shared.device.controller_memory()
    }

    fn interrupts(&self, vectors: u16) -> Result<Vec<OwnedFd>> {
        self.shared.device.interrupts(vectors)
    }

    fn gone(&self) -> Option<String> {
        self.shared.device.gone()
    }

    fn leave(&self) {
        self.shared.device.leave();
    }

    fn guards_data(&self) -> bool {
        self.shared.device.guards_data()
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests;
