//! Workloads against a namespace: their options, their execution and their reports.
//!
//! Here belongs all that measures a controller, a store or a GPU; nothing that is measured depends on it. Models and
//! their kernels are measured in `nvme-compute`.
//!
//! One thread drives each queue and keeps it full. Latency runs from the moment a command was due (or
//! submitted, without a rate) to the moment its completion was seen.
#![deny(missing_docs)]

mod gather;
#[cfg(feature = "cuda")]
pub mod gpu;
mod job;
mod measure;
#[cfg(feature = "cuda")]
pub mod null;
mod paths;
mod pattern;
mod read_back;
mod report;
#[cfg(feature = "cuda")]
mod rows_on_gpu;
mod shared;
mod unit_states;
mod worker;

pub use crate::measure::{GatherCases, crossings, median};
pub use gather::{CpuGather, gather_by_cpu};
pub use job::{BenchJob, RateRamp, RunLimit};
pub use paths::{PathsJob, paths};
pub use pattern::{AccessPattern, PlannedAccess, SplitMix};
pub use report::{DirectionReport, RampStep, RunReport, queues_json};
#[cfg(feature = "cuda")]
pub use rows_on_gpu::rows_on_gpu;
pub use shared::RunProgress;

use nvme_core::bringup::NamespaceInfo;
use nvme_driver::controller::Controller;
use nvme_driver::controller::outage::{self, OutageCounts};
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use shared::RunState;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use worker::{BenchWorker, PendingAccess, StepTally};

/// Limit of the tries to read back the same unit, with outages in between: a unit whose read itself makes the
/// device fail would otherwise be tried forever.
const MOST_TRIES: u32 = 8;

/// Options of continuing a run after the device left.
pub struct GoOn<'a> {
    /// Time to wait until the device comes back.
    pub patience: Duration,
    /// Opens the device and brings its controller up again.
    pub open: &'a dyn Fn() -> Result<Controller>,
}

/// Runs `job` and returns the controller with the report. `progress` is called from this thread fifty times
/// a second.
///
/// Once the stop flag of the controller's [`ControllerConfig`](nvme_driver::ControllerConfig) is set, nothing more is
/// sent, commands in flight are waited for a little, and the report is marked as interrupted.
///
/// With `go_on`, commands that got no answer, or that a reset aborted, are sent again, and a device that left is opened
/// again, replacing `controller`; the losses are in the report. Without it, each is an error.
///
/// # Errors
/// [`Error::Usage`] before anything is sent; otherwise the first error of any queue that `go_on` does not
/// put right.
pub fn run(
    controller: Controller,
    job: &BenchJob,
    go_on: Option<&GoOn<'_>>,
    mut progress: impl FnMut(&RunProgress),
) -> Result<(Controller, RunReport)> {
    let info = check(&controller, job)?;
    let shared = RunState {
        serial: controller.info().serial,
        ..RunState::new(job, info, go_on.is_some())?
    };
    let mut report = RunReport::new(&controller, job);
    let mut on = RunningBench::start(controller, &shared)?;
    let mut outages = OutageCounts::default();
    let run_start = Instant::now();
    let steps = job.ramp.map_or(1, |ramp| ramp.steps.max(1));
    for step in 0..steps {
        let rate = job.ramp.map(|ramp| ramp.rate(step));
        let begin = Instant::now();
        let deadline = match job.limit {
            RunLimit::Time(time) => Some(begin + time / steps),
            RunLimit::Bytes(_) => None,
        };
        let mut tallies = Vec::new();
        loop {
            let count = one_step(&mut on.workers, rate, deadline, || {
                progress(&shared.progress(run_start))
            })?;
            tallies.extend(count);
            let Some(error) = lock(&shared.failure).take() else {
                break;
            };
            on = on.after(error, go_on, &mut report, &mut outages)?;
        }
        report.add_step(rate, tallies, begin.elapsed());
        report.interrupted = shared.interrupted.load(Ordering::Relaxed);
        if report.interrupted {
            break;
        }
    }
    // Their queue pairs are needed again.
    on.let_workers_go(&mut report, &mut outages);
    if !report.interrupted {
        on = on.read_back(go_on, &mut report, &mut outages)?;
    }
    outages.resets += u64::from(on.controller.resets());
    report.outages = go_on.map(|_| outages);
    Ok((on.controller, report))
}

/// A controller and the workers that use it.
struct RunningBench<'a> {
    controller: Controller,
    workers: Vec<BenchWorker<'a>>,
    shared: &'a RunState<'a>,
}

impl<'a> RunningBench<'a> {
    fn start(controller: Controller, shared: &'a RunState<'a>) -> Result<Self> {
        let mut workers = Vec::new();
        for index in 0..shared.job.queues {
            workers.push(BenchWorker::new(&controller, shared, index)?);
        }
        shared.opened.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            controller,
            workers,
            shared,
        })
    }

    /// Takes the workers' counts and queue pairs; returns the commands that each worker had under way.
    fn let_workers_go(
        &mut self,
        report: &mut RunReport,
        outages: &mut OutageCounts,
    ) -> Vec<Vec<PendingAccess>> {
        let leave = |worker: BenchWorker<'_>| {
            report.add_queue(worker.qid(), &worker.statistics());
            let (again, lost) = worker.leave();
            outages.add(lost);
            again
        };
        self.workers.drain(..).map(leave).collect()
    }

    /// Reads back the written units and checks them, if the job asks for that.
    fn read_back(
        mut self,
        go_on: Option<&GoOn<'_>>,
        report: &mut RunReport,
        outages: &mut OutageCounts,
    ) -> Result<Self> {
        let shared = self.shared;
        let Some(states) = &shared.states else {
            return Ok(self);
        };
        let mut tries = 0;
        loop {
            let before = report.verified_bytes;
            let checked = &mut report.verified_bytes;
            let result = read_back::read_back(&self.controller, shared, states, checked);
            let Err(error) = result else {
                return Ok(self);
            };
            let came_on = report.verified_bytes > before;
            tries = if came_on { 0 } else { tries + 1 };
            if !shared.goes_on || tries == MOST_TRIES {
                return Err(error);
            }
            match error {
                Error::Timeout { .. } => {
                    outages.lost += 1;
                    outages.retried += 1;
                    outages.note(error.to_string());
                }
                Error::Gone { .. } => {
                    self = self.after(error, go_on, report, outages)?;
                    self.let_workers_go(report, outages);
                }
                error => return Err(error),
            }
        }
    }

    /// Continues with the device opened again, when `error` means that it left and `go_on` allows that.
    fn after(
        mut self,
        error: Error,
        go_on: Option<&GoOn<'_>>,
        report: &mut RunReport,
        outages: &mut OutageCounts,
    ) -> Result<Self> {
        let (Error::Gone { cause }, Some(go_on)) = (&error, go_on) else {
            return Err(error);
        };
        outages.note(cause);
        let again = self.let_workers_go(report, outages);
        outages.resets += u64::from(self.controller.resets());
        let stop = self.controller.session().config.stop.clone();
        let shared = self.shared;
        // The device may be in use until the old controller is dropped, and a server serves one at a time.
        self.controller.device().leave();
        drop(self);
        shared.stop.store(false, Ordering::Relaxed);
        let open = || {
            let controller = (go_on.open)()?;
            let device = Arc::clone(controller.device());
            let start = || {
                let info = check(&controller, shared.job)?;
                let now = (info, controller.info().serial);
                if let Some(error) = outage::came_back_as((shared.info, shared.serial), now) {
                    return Err(error);
                }
                Self::start(controller, shared)
            };
            // If the device leaves again meanwhile, its connection is closed, and the next attempt opens it
            // once more.
            start().inspect_err(|_| device.leave())
        };
        let is_stopped = || {
            stop.as_ref()
                .is_some_and(|stop| stop.load(Ordering::Relaxed))
        };
        let mut on = outage::reopen(go_on.patience, &error, is_stopped, open)?;
        outages.reopened += 1;
        for (worker, again) in on.workers.iter_mut().zip(again) {
            worker.take_over(again);
        }
        Ok(on)
    }
}

/// Runs all workers until `deadline`, until the work is done, or until one fails.
fn one_step(
    workers: &mut [BenchWorker<'_>],
    rate: Option<u64>,
    deadline: Option<Instant>,
    mut progress: impl FnMut(),
) -> Result<Vec<StepTally>> {
    let count = workers.len() as u64;
    let start = Instant::now();
    let tallies = std::thread::scope(|scope| {
        let handles: Vec<_> = workers
            .iter_mut()
            .map(|worker| {
                // Nanoseconds between commands of one queue; the first is due at once.
                let interval_ns = rate.map(|rate| count * 1_000_000_000 / rate.max(1));
                scope.spawn(move || worker.run(start, deadline, interval_ns))
            })
            .collect();
        while !handles.iter().all(|handle| handle.is_finished()) {
            // Short at first: a run of a few bytes is not to wait for this thread.
            let short = start.elapsed().as_millis() < 200;
            std::thread::sleep(Duration::from_millis(if short { 5 } else { 20 }));
            progress();
        }
        handles
            .into_iter()
            .map(|handle| handle.join())
            .collect::<Vec<_>>()
    });
    let tallies: std::result::Result<Vec<StepTally>, _> = tallies.into_iter().collect();
    tallies.map_err(|_| Error::internal("a bench thread panicked"))
}

fn check(controller: &Controller, job: &BenchJob) -> Result<NamespaceInfo> {
    let info = controller.usable_namespace(job.nsid)?;
    if job.bytes == 0 || !job.bytes.is_multiple_of(info.block_bytes) {
        return Err(Error::usage(
            format!(
                "--bs {} is not a multiple of the namespace's {}-byte blocks",
                job.bytes, info.block_bytes
            ),
            format!("use a multiple of {}", info.block_bytes),
        ));
    }
    let most = controller
        .max_transfer()
        .min(u64::from(nvme_core::spec::nvm::MAX_BLOCKS) * u64::from(info.block_bytes));
    if u64::from(job.bytes) > most {
        return Err(Error::usage(
            format!(
                "--bs {} is above {most}, {}",
                job.bytes,
                controller.whose_limit(most)
            ),
            format!("use at most {most}"),
        ));
    }
    let granted = controller.info().queue_pairs;
    if job.queues == 0 || job.queues > granted {
        return Err(Error::usage(
            format!(
                "{} queues were asked for, the controller grants {granted}",
                job.queues
            ),
            format!("use --queues 1 to {granted}"),
        ));
    }
    let most_depth = controller.info().capabilities.max_entries.min(4096) - 1;
    if job.depth == 0 || job.depth > most_depth {
        return Err(Error::usage(
            format!(
                "a depth of {} does not fit the controller's queues",
                job.depth
            ),
            format!("use --depth 1 to {most_depth}"),
        ));
    }
    if job.read_percent > 100 {
        return Err(Error::usage(
            format!("a share of {} % reads is above 100 %", job.read_percent),
            "use 0 to 100",
        ));
    }
    if job.verify && job.read_percent == 100 {
        return Err(Error::usage(
            "there is nothing to verify without writes",
            "use --rw write, randwrite, rw or randrw",
        ));
    }
    Ok(info)
}
