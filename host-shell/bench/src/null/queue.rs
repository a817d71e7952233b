//! One queue pair of a null controller: takes entries, checks them, posts completions. An entry with a wrong opcode
//! or a doorbell out of range stops the controller with a reason, which fails the run.
// UNSAFETY: rings are raw memory that a GPU writes while it is read here.
#![allow(unsafe_code)]

use super::{DriveModel, NullController};
use nvme_core::spec::nvm;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Entries taken from one queue before the next one is looked at.
const BATCH: u32 = 256;
/// Entries ahead that are asked for early.
const AHEAD: u32 = 16;

/// Violation of the protocol by the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProtocolFault {
    /// The queue, from 1.
    pub qid: u32,
    /// Description of the violation.
    pub what: String,
}

/// One queue pair of one thread. The pointers stay valid while the thread holds the pages.
pub(super) struct NullQueue {
    sq: *const AtomicU64,
    cq: *mut u64,
    tail_doorbell: *const AtomicU32,
    head_doorbell: *const AtomicU32,
    mask: u32,
    qid: u32,
    head: u32,
    tail: u32,
    /// Head of the completion queue, as last read.
    freed: u32,
    phase: bool,
    timed: Option<TimedCommands>,
    /// True if completions are posted even when the driver has freed no entries.
    heedless: bool,
}

// SAFETY: the pointers lie in pages that the thread keeps; one thread has the queue.
unsafe impl Send for NullQueue {}

/// The commands that a drive works on, in the order of their ends.
struct TimedCommands {
    model: DriveModel,
    pending: VecDeque<(u64, u64)>,
    last_ps: u64,
    data: std::ops::Range<u64>,
}

impl NullQueue {
    pub(super) fn new(
        null: &NullController,
        index: u32,
        model: Option<DriveModel>,
        heedless: bool,
    ) -> Self {
        let words = null.words(index);
        let data = null.data()..null.data() + null.shape().data_bytes as u64;
        Self {
            sq: words.sq as usize as *const AtomicU64,
            cq: words.cq as usize as *mut u64,
            tail_doorbell: null.word(words.sq_doorbell),
            head_doorbell: null.word(words.cq_doorbell),
            mask: words.entries - 1,
            qid: words.qid,
            head: 0,
            tail: 0,
            freed: 0,
            phase: true,
            timed: model.map(|model| TimedCommands {
                model,
                pending: VecDeque::with_capacity(words.entries as usize),
                last_ps: 0,
                data,
            }),
            heedless,
        }
    }

    /// True if the queue behaves like a drive with a [`DriveModel`].
    pub(super) fn is_timed(&self) -> bool {
        self.timed.is_some()
    }

    /// Returns a word of the submission ring.
    #[inline(always)]
    fn sqe_word(&self, index: u32, word: usize) -> u64 {
        // SAFETY: index <= mask and word < 8, so the access stays inside the ring; reached through atomics.
        unsafe { &*self.sq.add(index as usize * 8 + word) }.load(Ordering::Relaxed)
    }

    /// Returns the entries that wait, or a fault.
    #[inline(always)]
    fn waiting(&self) -> std::result::Result<u32, ProtocolFault> {
        // SAFETY: the pointer is a doorbell in the pages. Acquire: pairs with the driver's release store of the tail.
        // The driver wrote the entries before it rang, so they may be fetched once the new tail is seen.
        let tail = unsafe { &*self.tail_doorbell }.load(Ordering::Acquire);
        if tail > self.mask {
            return Err(self.fault(format!("a tail doorbell of {tail}")));
        }
        Ok(tail.wrapping_sub(self.head) & self.mask)
    }

    /// Completions that fit, looked up again when they are fewer than `wanted`.
    #[inline(always)]
    fn room(&mut self, wanted: u32) -> std::result::Result<u32, ProtocolFault> {
        let room = self.freed.wrapping_sub(self.tail).wrapping_sub(1) & self.mask;
        if room >= wanted || self.heedless {
            return Ok(room.max(wanted));
        }
        // SAFETY: the pointer is a doorbell in the pages. Acquire: pairs with the driver's release store of the head.
        // The driver has read the completions that it frees, so their entries may be overwritten.
        let freed = unsafe { &*self.head_doorbell }.load(Ordering::Acquire);
        let posted = self.tail.wrapping_sub(self.freed) & self.mask;
        if freed > self.mask || freed.wrapping_sub(self.freed) & self.mask > posted {
            return Err(self.fault(format!(
                "a head doorbell of {freed} after {}, with {posted} posted",
                self.freed
            )));
        }
        self.freed = freed;
        Ok(freed.wrapping_sub(self.tail).wrapping_sub(1) & self.mask)
    }

    #[inline(always)]
    fn check(&self, first: u64) -> std::result::Result<(), ProtocolFault> {
        // Flush, write, read, compare, write zeroes, dataset management.
        const KNOWN: u64 = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 5 | 1 << 8 | 1 << 9;
        let opcode = first & 0xFF;
        if opcode > 63 || KNOWN >> opcode & 1 == 0 {
            return Err(self.fault(format!(
                "opcode {opcode:#04x} at entry {}: {first:#018x}",
                self.head
            )));
        }
        Ok(())
    }

    #[inline(always)]
    fn post(&mut self, first: u64) {
        let cid = first >> 16 & 0xFFFF;
        let upper = u64::from(self.head)
            | u64::from(self.qid) << 16
            | cid << 32
            | u64::from(self.phase) << 48;
        // SAFETY: tail <= mask, so the 16 aligned bytes lie in the ring.
        unsafe { store_cqe(self.cq.add(self.tail as usize * 2), upper) };
        self.tail = (self.tail + 1) & self.mask;
        self.phase ^= self.tail == 0;
    }

    /// Takes the waiting commands and completes them at once. Returns their number.
    pub(super) fn serve(&mut self) -> std::result::Result<u32, ProtocolFault> {
        let waiting = self.waiting()?;
        if waiting == 0 {
            return Ok(0);
        }
        let count = waiting.min(self.room(waiting)?).min(BATCH);
        for index in 0..count.min(AHEAD) {
            self.ask_for(index);
        }
        for index in 0..count {
            if index + AHEAD < count {
                self.ask_for(index + AHEAD);
            }
            let first = self.sqe_word(self.head, 0);
            self.check(first)?;
            self.head = (self.head + 1) & self.mask;
            self.post(first);
        }
        Ok(count)
    }

    /// Prefetches the entry `index` ahead, and the entry of its completion, before they are needed.
    #[inline(always)]
    fn ask_for(&self, index: u32) {
        let entry = (self.head.wrapping_add(index) & self.mask) as usize;
        let place = (self.tail.wrapping_add(index) & self.mask) as usize;
        prefetch_read(self.sq.wrapping_add(entry * 8).cast());
        if place.is_multiple_of(4) {
            prefetch_write(self.cq.wrapping_add(place * 2).cast_const().cast());
        }
    }

    /// Takes the waiting commands into the drive model, and posts completions that are due at `now_ps`. Returns
    /// their number.
    pub(super) fn serve_timed(&mut self, now_ps: u64) -> std::result::Result<u32, ProtocolFault> {
        let waiting = self.waiting()?;
        let Some(mut timed) = self.timed.take() else {
            return Ok(0);
        };
        let result = self.admit(&mut timed, waiting, now_ps);
        self.timed = Some(timed);
        result
    }

    fn admit(
        &mut self,
        timed: &mut TimedCommands,
        waiting: u32,
        now_ps: u64,
    ) -> std::result::Result<u32, ProtocolFault> {
        let model = timed.model;
        let interval_ps = (1e12 / model.rate) as u64;
        let free = (self.mask as usize).saturating_sub(timed.pending.len()) as u32;
        let taken = waiting.min(free).min(BATCH);
        for _ in 0..taken {
            let first = self.sqe_word(self.head, 0);
            self.check(first)?;
            if first & 0xFF == u64::from(nvm::opcode::READ) && model.bytes > 0 {
                self.fill(timed)?;
            }
            self.head = (self.head + 1) & self.mask;
            let due = (now_ps + model.latency_ns * 1000).max(timed.last_ps + interval_ps);
            timed.last_ps = due;
            timed.pending.push_back((due, first));
        }
        let mut posted = 0;
        while let Some((due, first)) = timed.pending.front().copied() {
            if due > now_ps || self.room(1)? == 0 {
                break;
            }
            timed.pending.pop_front();
            self.post(first);
            posted += 1;
        }
        Ok(taken.max(posted))
    }

    /// Writes the data of the read at the head of the ring.
    fn fill(&self, timed: &TimedCommands) -> std::result::Result<(), ProtocolFault> {
        static MEDIUM: [u8; 4096] = [0xA5; 4096];
        let bytes = timed.model.bytes.min(MEDIUM.len());
        let prp1 = self.sqe_word(self.head, 3);
        let end = prp1.saturating_add(bytes as u64);
        if prp1 < timed.data.start || end > timed.data.end {
            return Err(self.fault(format!("PRP1 {prp1:#x} is outside the data memory")));
        }
        // SAFETY: the copy stays inside the data memory, as checked above, and the driver does not read that before the
        // completion.
        unsafe {
            std::ptr::copy_nonoverlapping(MEDIUM.as_ptr(), prp1 as usize as *mut u8, bytes);
        }
        Ok(())
    }

    fn fault(&self, what: String) -> ProtocolFault {
        ProtocolFault {
            qid: self.qid,
            what,
        }
    }
}

/// Posts a completion with zero in dwords 0 and 1 and `upper` in the rest.
///
/// # Safety
/// `cell` is aligned to 16 and valid for writes of 16 bytes.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn store_cqe(cell: *mut u64, upper: u64) {
    use std::arch::x86_64::{_mm_set_epi64x, _mm_store_si128};
    // x86 stores become visible in program order, so the driver sees the data of a read before its completion;
    // and one store writes both words, so it never sees a new phase tag with an old identifier. SAFETY: the
    // caller vouches for the cell.
    unsafe { _mm_store_si128(cell.cast(), _mm_set_epi64x(upper as i64, 0)) };
}

/// # Safety
/// As on x86-64.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
unsafe fn store_cqe(cell: *mut u64, upper: u64) {
    // SAFETY: the caller vouches for the cell, which is reached through atomics.
    let cell = unsafe { &*cell.cast::<[AtomicU64; 2]>() };
    cell[0].store(0, Ordering::Relaxed);
    // Release: pairs with the driver's acquire load of this word. Once the driver sees the phase tag it may
    // read the other word and the data that the completion announces.
    cell[1].store(upper, Ordering::Release);
}

#[inline(always)]
fn prefetch_read(at: *const i8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint that accepts any address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

#[inline(always)]
fn prefetch_write(at: *const i8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint that accepts any address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_ET0 }>(at);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
