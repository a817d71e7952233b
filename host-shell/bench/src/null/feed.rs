//! CPU threads that drive a null controller and so measure its rate without a GPU.
//!
//! A thread that writes each entry and reads each completion is about as busy as the controller's. One
//! that lets the controller read the same entries lap after lap, and looks at the last completion of a
//! batch, feeds several controller threads: the controller is the limit then.
// UNSAFETY: rings are raw memory that the controller's threads share.
#![allow(unsafe_code)]

use super::NullController;
use nvme_driver::error::{Error, Result};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Entries written before the doorbell rings, and completions reaped before the head doorbell is written.
const BATCH: u64 = 64;
/// The same where most entries are not written and most completions not read.
const LIGHT_BATCH: u64 = 256;
/// Deadline of any progress: a controller that answers nothing for this time is stuck.
const PATIENCE: Duration = Duration::from_secs(5);

/// Load on a null controller.
#[derive(Clone, Copy, Debug)]
pub struct NullLoad {
    /// Number of threads; thread `n` has queues `n`, `n + threads`, and so on.
    pub threads: usize,
    /// Commands in flight per queue, at most one less than the ring has entries.
    pub depth: u32,
    /// Commands per queue.
    pub commands: u64,
    /// True if each entry is written and each completion read; false if only the first lap's entries and a
    /// batch's last completion.
    pub thorough: bool,
}

/// Result of a run.
#[derive(Clone, Copy, Debug)]
pub struct LoadResult {
    /// Commands answered.
    pub commands: u64,
    /// Seconds from the first to the last.
    pub seconds: f64,
}

/// Feeds `null`, whose threads run, until every queue has had its commands.
///
/// # Errors
/// [`Error::Device`] when an unexpected completion arrives, or none for 5 s.
pub fn feed(null: &NullController, how: NullLoad) -> Result<LoadResult> {
    let depth = how.depth.clamp(1, null.shape().entries - 1);
    let count = how.threads.clamp(1, null.shape().queues as usize);
    let begin = Instant::now();
    let results: Vec<Result<u64>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|index| {
                let queues: Vec<FeederQueue> = (index as u32..null.shape().queues)
                    .step_by(count)
                    .map(|queue| FeederQueue::new(null, queue, depth, how))
                    .collect();
                scope.spawn(move || drive(queues))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                let joined = thread.join();
                joined.unwrap_or_else(|_| Err(Error::internal("a feeder panicked")))
            })
            .collect()
    });
    let seconds = begin.elapsed().as_secs_f64();
    let mut commands = 0;
    for result in results {
        commands += result?;
    }
    Ok(LoadResult { commands, seconds })
}

struct FeederQueue {
    sq: *const AtomicU64,
    cq: *const AtomicU64,
    tail_doorbell: *const AtomicU32,
    head_doorbell: *const AtomicU32,
    mask: u32,
    depth: u64,
    total: u64,
    sent: u64,
    done: u64,
    thorough: bool,
    batch: u64,
    nsid_and_opcode: u64,
    data: u64,
}

// SAFETY: the pointers lie in pages that outlive the scope of the threads; one thread has the lane.
unsafe impl Send for FeederQueue {}

impl FeederQueue {
    fn new(null: &NullController, index: u32, depth: u32, how: NullLoad) -> Self {
        let words = null.words(index);
        Self {
            sq: words.sq as usize as *const AtomicU64,
            cq: words.cq as usize as *const AtomicU64,
            tail_doorbell: words.sq_doorbell as usize as *const AtomicU32,
            head_doorbell: words.cq_doorbell as usize as *const AtomicU32,
            mask: words.entries - 1,
            depth: u64::from(depth),
            total: how.commands,
            sent: 0,
            done: 0,
            thorough: how.thorough,
            batch: if how.thorough { BATCH } else { LIGHT_BATCH },
            nsid_and_opcode: 1 << 32 | 2,
            data: null.data(),
        }
    }

    /// Writes a batch of reads and rings; returns true if there was any.
    #[inline(always)]
    fn send(&mut self) -> bool {
        let room = self.depth - (self.sent - self.done);
        let count = room.min(self.total - self.sent).min(self.batch);
        // Fewer rings: wait until a good part of a batch fits.
        if count == 0 || (count < self.batch.min(self.depth) && self.sent + count < self.total) {
            return false;
        }
        for sequence in self.sent..self.sent + count {
            if !self.thorough && sequence > u64::from(self.mask) {
                break;
            }
            let index = sequence as u32 & self.mask;
            let words = [
                self.nsid_and_opcode | u64::from(index) << 16,
                0,
                0,
                self.data,
                0,
                sequence,
                0,
                0,
            ];
            for (at, word) in words.into_iter().enumerate() {
                // SAFETY: index <= mask and at < 8, so the access stays inside the ring; reached through atomics.
                unsafe { &*self.sq.add(index as usize * 8 + at) }.store(word, Ordering::Relaxed);
            }
        }
        self.sent += count;
        // SAFETY: the pointer is a doorbell in the pages. Release: pairs with the controller's acquire load of the
        // tail. The entries up to `sent` are visible before the doorbell, as a driver's write barrier would ensure on a
        // real drive.
        unsafe { &*self.tail_doorbell }.store(self.sent as u32 & self.mask, Ordering::Release);
        true
    }

    /// Reaps the completions that have arrived; true if there were any.
    #[inline(always)]
    fn take(&mut self) -> Result<bool> {
        let before = self.done;
        let batch = (self.sent - before).min(self.batch);
        if self.thorough {
            while self.done < before + batch && self.is_posted(self.done)? {
                self.done += 1;
            }
        } else if batch > 0 && self.is_posted(before + batch - 1)? {
            // Posts come in order.
            self.done += batch;
        }
        if self.done == before {
            return Ok(false);
        }
        // SAFETY: the pointer is a doorbell in the pages. Release: pairs with the controller's acquire load of the
        // head. The freed completions have been read before, so the controller may overwrite their entries.
        unsafe { &*self.head_doorbell }.store(self.done as u32 & self.mask, Ordering::Release);
        Ok(true)
    }

    /// True if completion `sequence` was posted, which is the one expected.
    #[inline(always)]
    fn is_posted(&self, sequence: u64) -> Result<bool> {
        let index = sequence as u32 & self.mask;
        let phase = (sequence / (u64::from(self.mask) + 1)).is_multiple_of(2);
        // SAFETY: index <= mask, so the entry's upper word lies in the ring. Acquire: pairs with the
        // controller's post of that word, whose phase tag says that the entry is new; nothing of it may be read
        // before.
        let upper = unsafe { &*self.cq.add(index as usize * 2 + 1) }.load(Ordering::Acquire);
        if (upper >> 48 & 1 == 1) != phase {
            return Ok(false);
        }
        if upper >> 32 & 0xFFFF != u64::from(index) || upper >> 49 != 0 {
            return Err(Error::internal(format!(
                "completion {sequence} is {upper:#018x}"
            )));
        }
        Ok(true)
    }
}

fn drive(mut lanes: Vec<FeederQueue>) -> Result<u64> {
    let mut last = Instant::now();
    let mut idle = 0u32;
    loop {
        let (mut moved, mut left) = (false, false);
        for lane in &mut lanes {
            moved |= lane.send();
            moved |= lane.take()?;
            left |= lane.done < lane.total;
        }
        if !left {
            return Ok(lanes.iter().map(|lane| lane.done).sum());
        }
        if moved {
            idle = 0;
            continue;
        }
        idle += 1;
        if idle == 1 {
            last = Instant::now();
        } else if idle.is_multiple_of(64) {
            std::thread::yield_now();
            if last.elapsed() > PATIENCE {
                return Err(Error::internal("the null controller answers nothing"));
            }
        }
        std::hint::spin_loop();
    }
}
