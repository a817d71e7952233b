//! Runs a loom model, prints its property and its bound, and counts the executions. It also has code that the models of
//! the shared queue share.

use crate::hand::{Hand, Rig};
use loom::thread;
use nvme_core::group::LoneThread;
use nvme_core::spec::{Iova, Nsid, Sqe, Status};
use nvme_core::sync::spin;
use nvme_core::{
    CommandData, CommandOutcome, CommandToken, DrainResult, MemberCommand, SharedQueue,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// The part of a model's executions that is explored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Every execution.
    Exhaustive,
    /// Every execution in which threads are preempted at most this many times, plus `NVME_LOOM_DEEPER` (default 0).
    /// Waiting is no preemption.
    Preemptions(usize),
    /// No preemptions: [`Stage`]s of the model, or lanes in step, give the order of events.
    Staged,
}

/// Explores `model`, which fails by panicking when `property` does not hold.
///
/// # Panics
/// If an execution of the model fails: with the model's message after the property.
pub fn check(property: &str, bound: Bound, model: impl Fn() + Send + Sync + 'static) {
    let deeper = std::env::var("NVME_LOOM_DEEPER").ok();
    let deeper: usize = deeper.map_or(0, |text| {
        text.parse().expect("NVME_LOOM_DEEPER is a number")
    });
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 50_000;
    builder.preemption_bound = match bound {
        Bound::Exhaustive => None,
        Bound::Preemptions(most) => Some(most + deeper),
        Bound::Staged => Some(0),
    };
    let said = match builder.preemption_bound {
        None => "exhaustive".to_string(),
        _ if bound == Bound::Staged => "in given stages, no preemptions".to_string(),
        Some(most) => format!("up to {most} preemptions"),
    };
    let started = Instant::now();
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("model").to_string();
    let failing = Failing(format!("{name}: violated: {property}"));
    let count = Arc::new(AtomicU64::new(0));
    let counted = count.clone();
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        nvme_core::sync::begin_execution();
        model();
    });
    drop(failing);
    println!(
        "{name}: {property}: {said}, {} executions, {:.1} s",
        count.load(Ordering::Relaxed),
        started.elapsed().as_secs_f64()
    );
}

/// Says which property failed when the model panics.
struct Failing(String);

impl Drop for Failing {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0);
        }
    }
}

/// Returns a command that carries `number` in several words; dword 0 of its completion must be `number`.
pub fn command(number: u32, cell: u32) -> MemberCommand<'static> {
    let mut sqe = Sqe::new(2, Nsid(1));
    (sqe.cdw10, sqe.cdw15) = (number, !number);
    // The data span three pages, two of them in the slot's list.
    let (iova, len) = (Iova(0x1000 * u64::from(number + 1)), 3 * 4096);
    MemberCommand::new(sqe, CommandData::Contiguous { iova, len }, cell).wanting_dw0(true)
}

/// The controller: fetches and completes `count` commands, one after the other, each entry whole.
///
/// # Panics
/// When half of an entry was fetched.
pub fn serve(hand: &mut Hand<'_>, count: u32) {
    for _ in 0..count {
        let sqe = loop {
            match hand.fetch() {
                Some(sqe) => break sqe,
                None => spin(),
            }
        };
        assert_eq!(sqe.cdw15, !sqe.cdw10, "half of an entry was fetched");
        while !hand.has_room() {
            spin();
        }
        hand.complete(sqe.cid(), Status::SUCCESS, sqe.cdw10);
    }
}

/// Starts a thread that is the controller for `count` commands.
pub fn controller(rig: &Arc<Rig>, count: u32) -> thread::JoinHandle<()> {
    let rig = rig.clone();
    thread::spawn(move || serve(&mut Hand::new(&rig), count))
}

/// Places a command and rings the doorbell.
///
/// # Panics
/// When the queue is full.
pub fn place(queue: &SharedQueue<'_>, number: u32, cell: u32) -> CommandToken {
    let token = queue.place(&LoneThread, command(number, cell)).unwrap();
    queue.ring(&LoneThread);
    token
}

/// Places a command as [`place`] does, without asking for dword 0: [`finish`] finds 0.
pub fn place_plain(queue: &SharedQueue<'_>, number: u32, cell: u32) -> CommandToken {
    let command = command(number, cell).wanting_dw0(false);
    let token = queue.place(&LoneThread, command).unwrap();
    queue.ring(&LoneThread);
    token
}

/// Drains until the command has ended, and checks that the end is its own.
///
/// # Panics
/// When it is not.
pub fn finish(queue: &SharedQueue<'_>, token: &CommandToken, number: u32) {
    loop {
        if let Some(end) = queue.poll(token) {
            assert_eq!(end, (CommandOutcome::Completed(Status::SUCCESS), number));
            return;
        }
        assert_eq!(queue.fault(), None);
        if queue.drain(&LoneThread) != DrainResult::Took(1) {
            spin();
        }
    }
}

/// Counts the stages that a model has reached. Loom does not see the counter, so the counter orders nothing in the
/// model.
#[derive(Clone, Default)]
pub struct Stage(Arc<AtomicU64>);

impl Stage {
    /// Waits until `stage` was reached.
    pub fn wait(&self, stage: u64) {
        while self.0.load(Ordering::Relaxed) < stage {
            spin();
        }
    }

    /// Reaches `stage`.
    pub fn reach(&self, stage: u64) {
        self.0.fetch_max(stage, Ordering::Relaxed);
    }
}
