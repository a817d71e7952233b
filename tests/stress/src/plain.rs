//! Rounds against a controller of this program, with data that are not atomic, which ThreadSanitizer checks.
// UNSAFETY: buffers are plain memory, handed from thread to thread by the queue alone.
#![allow(unsafe_code)]

use crate::rounds::Round;
use crate::work::{Port, Queue, drive, places};
use nvme_core::spec::{Iova, Nsid, Sqe, Status};
use nvme_core::{CommandData, CommandOutcome, MemberCommand};
use nvme_tests::Rng;
use nvme_tests::hand::{Hand, Rig};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A command's buffer: the command's data, then the answer.
#[derive(Default)]
struct Buffer(UnsafeCell<[u64; 8]>);

// SAFETY: a buffer belongs to its command, and passes with it from thread to thread.
unsafe impl Sync for Buffer {}

impl Buffer {
    fn write(&self, value: u64) {
        // SAFETY: the queue has given the buffer to this thread.
        unsafe { self.0.get().write([value; 8]) };
    }

    fn holds(&self, value: u64) -> bool {
        // SAFETY: the queue has given the buffer to this thread.
        unsafe { self.0.get().read() == [value; 8] }
    }
}

/// Buffers of one queue.
struct Buffers {
    given: Vec<Buffer>,
    answers: Vec<Buffer>,
}

impl Port for Buffers {
    fn command(&self, place: u32, number: u64) -> MemberCommand<'_> {
        self.given[place as usize].write(number);
        let mut sqe = Sqe::new(2, Nsid(1));
        (sqe.cdw10, sqe.cdw11) = (number as u32, (number >> 32) as u32);
        sqe.cdw12 = place;
        // Three pages: the slot's list memory is written.
        let data = CommandData::Contiguous {
            iova: Iova(u64::from(place) << 16),
            len: 3 * 4096,
        };
        MemberCommand::new(sqe, data, place).wanting_dw0(number.is_multiple_of(3))
    }

    fn ended(&self, place: u32, number: u64, outcome: CommandOutcome) -> Result<(), String> {
        if outcome != CommandOutcome::Completed(Status::SUCCESS) {
            return Err(format!("command {number:#x}: {outcome:?}"));
        }
        match self.answers[place as usize].holds(!number) {
            true => Ok(()),
            false => Err(format!("command {number:#x}: another one's answer")),
        }
    }
}

/// The controller of one queue.
struct Served<'a> {
    hand: Hand<'a>,
    held: Vec<Sqe>,
}

impl Served<'_> {
    /// Fetches the new commands and completes some of them in any order. Returns whether there were any.
    fn step(&mut self, buffers: &Buffers, rng: &mut Rng) -> Result<bool, String> {
        let before = self.held.len();
        self.held.extend(std::iter::from_fn(|| self.hand.fetch()));
        for sqe in &self.held[before..] {
            let number = u64::from(sqe.cdw11) << 32 | u64::from(sqe.cdw10);
            if !buffers.given[sqe.cdw12 as usize].holds(number) {
                return Err(format!("command {number:#x} without its data"));
            }
        }
        let mut moved = self.held.len() > before;
        while !self.held.is_empty() && rng.below(4) > 0 && self.hand.has_room() {
            let sqe = self
                .held
                .swap_remove(rng.below(self.held.len() as u64) as usize);
            let number = u64::from(sqe.cdw11) << 32 | u64::from(sqe.cdw10);
            buffers.answers[sqe.cdw12 as usize].write(!number);
            self.hand.complete(sqe.cid(), Status::SUCCESS, sqe.cdw10);
            moved = true;
        }
        Ok(moved)
    }
}

/// Runs one round for `time`. How many commands ended.
pub fn run(round: &Round, time: Duration) -> Result<u64, String> {
    #[cfg(tsan)]
    {
        use nvme_core::sync::{Order, at_site};
        // The environment is read now, before there are threads: the sanitizer does not see how the standard library
        // orders that.
        at_site(Order::Acquire);
    }
    let count = places(round) as usize;
    let rigs: Vec<Rig> = (0..round.queues)
        .map(|_| Rig::new(round.entries, round.slots, count, round.start))
        .collect();
    let buffers: Vec<Buffers> = (0..round.queues)
        .map(|_| Buffers {
            given: (0..count).map(|_| Buffer::default()).collect(),
            answers: (0..count).map(|_| Buffer::default()).collect(),
        })
        .collect();
    let (stop, over) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let controller = scope.spawn(|| {
            let mut rng = Rng::new(round.seed);
            let mut queues: Vec<_> = rigs
                .iter()
                .map(|rig| Served {
                    hand: Hand::new(rig),
                    held: Vec::new(),
                })
                .collect();
            while !over.load(Ordering::Relaxed) {
                let mut moved = false;
                for (queue, buffers) in queues.iter_mut().zip(&buffers) {
                    moved |= queue.step(buffers, &mut rng)?;
                }
                if !moved {
                    std::thread::yield_now();
                }
            }
            Ok::<(), String>(())
        });
        let (stop, rigs, buffers) = (&stop, &rigs, &buffers);
        let drivers: Vec<_> = (0..round.queues)
            .map(|index| {
                scope.spawn(move || {
                    let rig = &rigs[index];
                    let queue = Queue {
                        memory: &|| rig.memory(),
                        state: rig.state(),
                        cells: rig.cells(),
                    };
                    drive(round, index, &queue, &buffers[index], stop)
                })
            })
            .collect();
        let began = Instant::now();
        while began.elapsed() < time && !controller.is_finished() {
            std::thread::sleep(Duration::from_millis(5));
        }
        stop.store(true, Ordering::Relaxed);
        if controller.is_finished() {
            // An early end means that the controller found a fault: no thread would get an answer any more.
            over.store(true, Ordering::Relaxed);
            let found = controller.join().map_err(|_| "the controller panicked")?;
            eprintln!("error: {round}: {found:?}");
            std::process::exit(1);
        }
        let mut sum = Ok(0);
        for driver in drivers {
            let part = driver.join().map_err(|_| "a thread panicked".to_owned());
            sum = sum.and_then(|sum| Ok(sum + part??));
        }
        over.store(true, Ordering::Relaxed);
        controller.join().map_err(|_| "the controller panicked")??;
        sum
    })
}
