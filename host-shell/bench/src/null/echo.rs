//! The other end of a ping-pong: a thread that answers a flag with sixteen bytes.
// UNSAFETY: the words are raw memory that a GPU shares.
#![allow(unsafe_code)]

use super::NullController;
use super::serve::IDLE_SPINS;
use nvme_core::handoff::QueueWords;
use nvme_driver::error::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;

/// Answers on queue 0 of a null controller whose own threads do not run: the tail doorbell is the flag,
/// the first submission entry the payload, the first completion entry the answer. Stops on drop.
///
/// The answer to flag `n` is 0 in the lower word and `n` in the upper one.
pub struct DoorbellEcho {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<u64>>,
}

impl DoorbellEcho {
    /// Starts the thread, on zeroed memory.
    ///
    /// # Errors
    /// [`Error::System`] when there is no thread to be had.
    pub fn start(null: &NullController) -> Result<Self> {
        null.clear();
        let stop = Arc::new(AtomicBool::new(false));
        let (words, pages) = (null.words(0), Arc::clone(null.pages()));
        let flag = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("null-echo".to_owned())
            .spawn(move || {
                let wrong = answer(&words, &flag);
                drop(pages);
                wrong
            })
            .map_err(|source| Error::System {
                call: "starting the echo thread",
                source,
            })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }

    /// Stops the thread, and returns the number of payloads that differed from the flag they came
    /// with.
    pub fn stop(mut self) -> u64 {
        self.halt()
    }

    fn halt(&mut self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        // A thread that panicked has printed why.
        self.thread
            .take()
            .and_then(|thread| thread.join().ok())
            .unwrap_or(0)
    }
}

impl Drop for DoorbellEcho {
    fn drop(&mut self) {
        self.halt();
    }
}

fn answer(words: &QueueWords, stop: &AtomicBool) -> u64 {
    // SAFETY: the pointer is a doorbell in the pages that the thread keeps.
    let flag = unsafe { &*(words.sq_doorbell as usize as *const AtomicU32) };
    // SAFETY: the pointer is the first entry of the submission ring.
    let payload = unsafe { &*(words.sq as usize as *const [AtomicU64; 8]) };
    // SAFETY: the pointer is the first entry of the completion ring.
    let cell = unsafe { &*(words.cq as usize as *const [AtomicU64; 2]) };
    let (mut seen, mut wrong, mut idle) = (0, 0, 0u32);
    while !stop.load(Ordering::Relaxed) {
        // Acquire: pairs with the release store of the flag by the other end, which stored the payload before
        // it. A payload that differs from the flag is counted as a violation of exactly this order.
        let now = flag.load(Ordering::Acquire);
        if now == seen {
            idle = idle.saturating_add(1);
            match idle {
                0..IDLE_SPINS => std::hint::spin_loop(),
                _ => std::thread::yield_now(),
            }
            continue;
        }
        idle = 0;
        seen = now;
        let whole = payload
            .iter()
            .all(|word| word.load(Ordering::Relaxed) as u32 == now);
        wrong += u64::from(!whole);
        cell[0].store(0, Ordering::Relaxed);
        // Release: pairs with the acquire load of the other end: the first word of the cell is visible before
        // the second, which announces the round.
        cell[1].store(u64::from(now), Ordering::Release);
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::super::NullShape;
    use super::*;

    #[test]
    fn every_flag_is_answered_and_torn_payloads_are_counted() {
        let null = NullController::new(NullShape {
            queues: 1,
            entries: 2,
            dstrd: 0,
            data_bytes: 0,
        })
        .unwrap();
        let echo = DoorbellEcho::start(&null).unwrap();
        let words = null.words(0);
        // SAFETY: the entries and the doorbell of the null controller, which outlives the loop.
        let (payload, cell, flag) = unsafe {
            (
                &*(words.sq as usize as *const [AtomicU64; 8]),
                &*(words.cq as usize as *const [AtomicU64; 2]),
                &*(words.sq_doorbell as usize as *const AtomicU32),
            )
        };
        for round in 1..=100u32 {
            for word in &payload[..if round == 50 { 7 } else { 8 }] {
                word.store(u64::from(round), Ordering::Relaxed);
            }
            flag.store(round, Ordering::Release);
            let begin = std::time::Instant::now();
            while cell[1].load(Ordering::Acquire) != u64::from(round) {
                assert!(begin.elapsed().as_secs() < 20, "no answer");
                std::thread::yield_now();
            }
        }
        assert_eq!(echo.stop(), 1);
    }
}
