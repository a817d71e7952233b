//! The suite: every row of the table in docs/benchmarks.md, one line each. The bare limits are measured first
//! and in the same run, because rates of two hosts or two days do not compare.

use super::case::SuiteCase;
use super::limits::RateLimits;
use super::rig::{CaseRun, NullBench};
use super::stream::stream;
use crate::measure::median;
use crate::null::DriveModel;
use nvme_cuda::Gpu;
use nvme_cuda::QueueKernels;
use nvme_cuda::SubmitMode;
use nvme_driver::error::{Error, Result};
use serde_json::{Value, json};
use std::sync::Arc;

/// Runs of a case, whose median counts; a single one for a quick look.
const RUNS: usize = 5;
/// Target duration of a run in seconds; a first, short run determines the number of commands.
const RUN_SECONDS: f64 = 0.06;
/// Threads of a block that are tried.
const BLOCKS: [u32; 3] = [128, 256, 384];

/// Options of the suite.
#[derive(Clone, Debug)]
pub struct SuiteOptions {
    /// The GPU.
    pub gpu: u32,
    /// Threads of the null controller; 0 is all cores but two.
    pub threads: usize,
    /// Runs only cases whose name contains this; all when empty.
    pub only: String,
    /// A small part of the work: for a look, not for figures.
    pub quick: bool,
}

/// A case, its name, and its target.
struct SuiteRow {
    name: String,
    case: SuiteCase,
    target: TargetRate,
}

/// Rate that a case should reach.
#[derive(Clone, Copy)]
enum TargetRate {
    /// Millions of commands per second.
    Rate(f64),
    /// A share of the smaller of the SQE-write limit and the controller's ceiling.
    OfLimit(f64),
    /// Target: at most this multiple of the ping-pong's time.
    OfPing(f64),
    /// A share of the drives' rate.
    OfDrives(f64),
    /// No target: the case is reported with the best of its group.
    Group,
}

/// Runs the suite; `emit` gets one object for each limit and each case.
///
/// # Errors
/// The error that keeps the suite from starting. A case that fails is a line with `error`.
pub fn run(options: &SuiteOptions, emit: &mut dyn FnMut(Value)) -> Result<()> {
    let gpu = Gpu::open(options.gpu)?;
    let kernels = Arc::new(QueueKernels::load(&gpu)?);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = match options.threads {
        0 => cores.saturating_sub(2).max(1),
        threads => threads,
    };
    let (share, runs) = if options.quick {
        (0.005, 1)
    } else {
        (1.0, RUNS)
    };
    emit(json!({
        "gpu": gpu.name(), "describe": gpu.describe(), "multiprocessors": gpu.multiprocessors()?,
        "cores": cores, "controller_threads": threads, "runs": runs, "quick": options.quick,
    }));
    let limits = RateLimits::measure(&kernels, threads, (share, runs), emit)?;
    let mut suite = KernelSuite {
        kernels,
        cores,
        threads,
        share,
        runs,
        quick: options.quick,
        limits,
        bench: None,
        emit,
    };
    let wanted = |name: &str| name.contains(options.only.as_str());
    for row in rows().iter().filter(|row| wanted(&row.name)) {
        suite.row(row);
    }
    for (lanes, word, targets) in [
        (32, "full", [10.0, 120.0, 600.0]),
        (1, "divergent", [2.0, 30.0, 150.0]),
    ] {
        for (queues, target) in [1, 16, 128].into_iter().zip(targets) {
            let name = format!("shared_{word}_q{queues}");
            if wanted(&name) {
                suite.group(&name, queues, lanes, target);
            }
        }
    }
    if wanted("stream_1mib_tier2") {
        let line = stream(&suite.kernels, &suite.limits, suite.share, runs)
            .unwrap_or_else(|error| failed("stream_1mib_tier2", &error));
        (suite.emit)(line);
    }
    Ok(())
}

fn case(mode: SubmitMode, queues: u32, depth: u32) -> SuiteCase {
    SuiteCase {
        mode,
        queues,
        threads: 0,
        lanes: 32,
        depth,
        narrow: false,
        dstrd: 4,
        model: None,
    }
}

fn rows() -> Vec<SuiteRow> {
    let row = |name: &str, case, target| SuiteRow {
        name: name.to_owned(),
        case,
        target,
    };
    let warp = case(SubmitMode::Warp, 128, 992);
    let ssd = |queues| SuiteCase {
        model: Some(DriveModel::SSD),
        ..case(SubmitMode::Warp, queues, 512)
    };
    vec![
        row(
            "owner_q1_depth1",
            case(SubmitMode::Owner, 1, 1),
            TargetRate::OfPing(1.10),
        ),
        row("warp_q128", warp, TargetRate::OfLimit(0.9)),
        row(
            "warp_q128_dstrd0",
            SuiteCase { dstrd: 0, ..warp },
            TargetRate::OfLimit(0.9),
        ),
        row(
            "warp_q16",
            case(SubmitMode::Warp, 16, 992),
            TargetRate::Group,
        ),
        row(
            "warp_q1",
            case(SubmitMode::Warp, 1, 992),
            TargetRate::Rate(16.0),
        ),
        row(
            "block_q1",
            case(SubmitMode::Block, 1, 1023),
            TargetRate::Rate(35.0),
        ),
        row(
            "block_q16",
            case(SubmitMode::Block, 16, 512),
            TargetRate::Group,
        ),
        row(
            "owner_q1",
            case(SubmitMode::Owner, 1, 64),
            TargetRate::Group,
        ),
        row(
            "owner_q128",
            case(SubmitMode::Owner, 128, 64),
            TargetRate::Group,
        ),
        row("ssd_x1", ssd(1), TargetRate::OfDrives(0.98)),
        row("ssd_x16", ssd(16), TargetRate::OfDrives(0.98)),
    ]
}

struct KernelSuite<'a> {
    kernels: Arc<QueueKernels>,
    cores: usize,
    threads: usize,
    share: f64,
    runs: usize,
    quick: bool,
    limits: RateLimits,
    bench: Option<NullBench>,
    emit: &'a mut dyn FnMut(Value),
}

impl KernelSuite<'_> {
    /// Prints one line; for a block, the line of the better number of threads.
    fn row(&mut self, row: &SuiteRow) {
        let widths: &[u32] = match row.case.mode {
            SubmitMode::Block => &BLOCKS,
            _ => &[row.case.threads],
        };
        let (mut best, mut best_rate, mut tried) = (Value::Null, -1.0, Vec::new());
        for threads in widths {
            let case = SuiteCase {
                threads: *threads,
                ..row.case
            };
            let (rate, line) = match self.measure(&case) {
                Ok(runs) => {
                    let rates: Vec<f64> = runs.iter().map(CaseRun::rate).collect();
                    let line = self.line(&row.name, &case, row.target, &runs);
                    (median(&rates), line)
                }
                Err(error) => (0.0, failed(&row.name, &error)),
            };
            tried.push(json!({ "threads": threads, "value": line["value"] }));
            if rate > best_rate {
                (best, best_rate) = (line, rate);
            }
        }
        if tried.len() > 1 {
            best["tried"] = json!(tried);
        }
        (self.emit)(best);
    }

    /// Measures a shape at several numbers of threads: one line each, and one for the best.
    fn group(&mut self, name: &str, queues: u32, lanes: u32, target: f64) {
        let counts: &[u32] = match lanes {
            32 => &[32, 256, 1024, 4096, 16_384, 65_536],
            _ => &[32, 256, 1024, 4096, 16_384],
        };
        let counts = &counts[..if self.quick { 2 } else { counts.len() }];
        let (mut best, mut best_threads, mut last) = (0.0, 0, 0.0);
        for threads in counts {
            let name = format!("{name}_t{threads}");
            // Lanes by themselves occupy a warp longer, so that more warps with fewer registers may be faster.
            let kinds: &[bool] = if lanes == 32 && queues < 128 {
                &[false]
            } else {
                &[false, true]
            };
            let mut line = Value::Null;
            last = -1.0;
            for narrow in kinds {
                let case = SuiteCase {
                    threads: *threads,
                    lanes,
                    narrow: *narrow,
                    ..case(SubmitMode::Shared, queues, 1)
                };
                let one = match self.measure(&case) {
                    Ok(runs) => self.line(&name, &case, TargetRate::Group, &runs),
                    Err(error) => failed(&name, &error),
                };
                let value = one["value"].as_f64().unwrap_or(0.0);
                if value > last {
                    (line, last) = (one, value);
                }
            }
            if last > best {
                (best, best_threads) = (last, *threads);
            }
            (self.emit)(line);
        }
        (self.emit)(json!({
            "case": name, "value": best, "unit": "M commands/s", "best_threads": best_threads,
            "target": target, "met": best >= target,
            "most_threads_value": last, "no_collapse": last * 2.0 >= best,
        }));
    }

    fn bench(&mut self, case: &SuiteCase) -> Result<&mut NullBench> {
        let fits = self.bench.as_ref().is_some_and(|bench| {
            let shape = bench.null().shape();
            (shape.queues, shape.dstrd) == (case.queues, case.dstrd)
        });
        if !fits {
            self.bench = None;
            self.bench = Some(NullBench::new(&self.kernels, case.queues, case.dstrd)?);
        }
        self.bench
            .as_mut()
            .ok_or_else(|| Error::internal("no bench"))
    }

    /// Returns the number of threads of the controller: one for each drive, where there are as many cores.
    fn threads(&self, case: &SuiteCase) -> usize {
        match case.model {
            Some(_) => self.cores.min(case.queues as usize).max(self.threads),
            None => self.threads,
        }
    }

    fn measure(&mut self, case: &SuiteCase) -> Result<Vec<CaseRun>> {
        let (threads, share, runs) = (self.threads(case), self.share, self.runs);
        let first_rounds = if self.quick { 4 } else { 20 };
        let bench = self.bench(case)?;
        let concurrent = match case.mode {
            SubmitMode::Shared => u64::from(case.threads),
            _ => u64::from(case.queues * case.depth),
        };
        // A first run to warm up and to learn the rate, a second one since the first is short.
        let mut commands = concurrent * first_rounds;
        for _ in 0..2 {
            let rate = bench.run(case, commands, threads)?.rate();
            let rounds = (rate * RUN_SECONDS * share / concurrent as f64).ceil();
            commands = concurrent * (rounds as u64).clamp(4, 1 << 24);
        }
        (0..runs)
            .map(|_| bench.run(case, commands, threads))
            .collect()
    }

    fn line(&self, name: &str, case: &SuiteCase, target: TargetRate, runs: &[CaseRun]) -> Value {
        let rates: Vec<f64> = runs.iter().map(|run| run.rate() / 1e6).collect();
        let rate = median(&rates);
        let busy = median(
            &runs
                .iter()
                .map(|run| run.account.busy())
                .collect::<Vec<_>>(),
        );
        let mut value = json!({
            "case": name, "value": rate, "unit": "M commands/s", "runs": rates,
            "mode": case.mode.name(), "queues": case.queues, "dstrd": case.dstrd,
            "commands": runs.first().map(|run| run.commands),
        });
        match case.mode {
            SubmitMode::Shared => {
                value["threads"] = json!(case.threads);
                value["lanes"] = json!(case.lanes);
                value["registers"] =
                    json!(self.kernels.cost(case.grid().kernel).ok().map(|it| it.0));
            }
            SubmitMode::Block => {
                value["threads"] = json!(case.threads);
                value["depth"] = json!(case.depth);
            }
            _ => value["depth"] = json!(case.depth),
        }
        judge(&self.limits, &mut value, case, target, rate);
        value["limiter"] = json!(limiter(&self.limits, case, rate, busy));
        value["controller_busy"] = json!(busy);
        value["controller_threads"] = json!(self.threads(case).min(case.queues as usize));
        if let Some(run) = runs.first() {
            let per = |count: u64| count as f64 / run.commands.max(1) as f64;
            let report = &run.ran.report;
            value["per_command"] = json!({
                "sqe_writes": per(report.sqes), "sq_doorbells": per(report.sq_doorbells),
                "cq_doorbells": per(report.cq_doorbells), "cq_loads": per(report.cq_loads),
                // Polls of the controller that found entries: at most one for each doorbell write.
                "sq_doorbells_seen": per(run.account.batches),
            });
        }
        if case.queues == 128 && self.limits.served > 0.0 {
            value["of_traffic_without_queues"] = json!(rate * 1e6 / self.limits.served);
        }
        if let Some(bench) = &self.bench {
            value["state_bytes_per_queue"] = json!(bench.state_bytes());
        }
        value
    }
}

/// Adds the target of the case to `value`, and whether it was met.
fn judge(limits: &RateLimits, value: &mut Value, case: &SuiteCase, target: TargetRate, rate: f64) {
    match target {
        TargetRate::Rate(least) => {
            value["target"] = json!(least);
            value["met"] = json!(rate >= least);
        }
        TargetRate::OfLimit(share) => {
            let limit = limits.sqe_writes.min(limits.controller) / 1e6;
            value["target"] = json!(limit * share);
            value["met"] = json!(rate >= limit * share);
        }
        TargetRate::OfPing(times) => {
            let ns = 1e3 / rate;
            value["value"] = json!(ns);
            value["unit"] = json!("ns");
            value["target"] = json!(limits.ping_pong_ns * times);
            value["of_ping_pong"] = json!(ns / limits.ping_pong_ns);
            value["met"] = json!(ns <= limits.ping_pong_ns * times);
        }
        TargetRate::OfDrives(share) => {
            let drives = case.model.map_or(0.0, |model| model.rate) * f64::from(case.queues) / 1e6;
            value["target"] = json!(drives * share);
            value["of_drives"] = json!(rate / drives);
            value["met"] = json!(rate >= drives * share);
        }
        TargetRate::Group => {}
    }
}

/// Returns the bottleneck of the rate, as far as the counts indicate it.
fn limiter(limits: &RateLimits, case: &SuiteCase, rate: f64, busy: f64) -> &'static str {
    let drives = case
        .model
        .map(|model| model.rate * f64::from(case.queues) / 1e6);
    if drives.is_some_and(|drives| rate >= drives * 0.98) {
        "the drives"
    } else if rate >= limits.sqe_writes / 1e6 * 0.9 {
        "PCIe: submission queue entries"
    } else if case.queues >= 128 && rate >= limits.served / 1e6 * 0.9 {
        "PCIe and the host's memory, with a controller on the other side"
    } else if busy >= 0.9 {
        "the null controller"
    } else {
        "the kernel and its round trips over PCIe"
    }
}

fn failed(name: &str, error: &Error) -> Value {
    json!({ "case": name, "error": error.to_string(), "met": false })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_a_name_of_its_own_and_fits_the_rings() {
        let rows = rows();
        let mut names: Vec<_> = rows.iter().map(|row| row.name.clone()).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), rows.len());
        for row in rows {
            assert!(row.case.depth < super::super::rig::ENTRIES, "{}", row.name);
        }
    }

    const LIMITS: RateLimits = RateLimits {
        sqe_writes: 100e6,
        served: 40e6,
        ping_pong_ns: 2000.0,
        copy_in: 5e10,
        controller: 50e6,
    };

    #[test]
    fn a_case_is_held_to_its_target() {
        let ssds = SuiteCase {
            model: Some(DriveModel::SSD),
            ..case(SubmitMode::Warp, 2, 512)
        };
        let drives = 2.0 * DriveModel::SSD.rate / 1e6;
        for (target, case, rate, met, aim) in [
            (
                TargetRate::Rate(16.0),
                case(SubmitMode::Warp, 1, 992),
                16.0,
                true,
                16.0,
            ),
            (
                TargetRate::Rate(16.0),
                case(SubmitMode::Warp, 1, 992),
                15.9,
                false,
                16.0,
            ),
            (
                TargetRate::OfLimit(0.9),
                case(SubmitMode::Warp, 128, 992),
                46.0,
                true,
                45.0,
            ),
            (
                TargetRate::OfLimit(0.9),
                case(SubmitMode::Warp, 128, 992),
                44.0,
                false,
                45.0,
            ),
            (
                TargetRate::OfPing(1.1),
                case(SubmitMode::Owner, 1, 1),
                0.5,
                true,
                2200.0,
            ),
            (
                TargetRate::OfPing(1.1),
                case(SubmitMode::Owner, 1, 1),
                0.4,
                false,
                2200.0,
            ),
            (
                TargetRate::OfDrives(0.98),
                ssds,
                drives,
                true,
                drives * 0.98,
            ),
            (
                TargetRate::OfDrives(0.98),
                ssds,
                drives / 2.0,
                false,
                drives * 0.98,
            ),
        ] {
            let mut value = json!({});
            judge(&LIMITS, &mut value, &case, target, rate);
            assert_eq!(value["met"], met, "{value}");
            let told = value["target"].as_f64().unwrap();
            assert!((told - aim).abs() < aim * 1e-9, "{told} for {aim}");
        }
        let mut value = json!({});
        judge(&LIMITS, &mut value, &ssds, TargetRate::Group, 1.0);
        assert_eq!(value, json!({}));
    }

    #[test]
    fn what_limits_a_case_is_named() {
        let ssd = SuiteCase {
            model: Some(DriveModel::SSD),
            ..case(SubmitMode::Warp, 1, 512)
        };
        let (few, many) = (
            case(SubmitMode::Warp, 16, 992),
            case(SubmitMode::Warp, 128, 992),
        );
        for (case, rate, busy, part) in [
            (ssd, DriveModel::SSD.rate / 1e6, 0.1, "the drives"),
            (few, 95.0, 0.1, "submission queue entries"),
            (many, 37.0, 0.1, "the host's memory"),
            (few, 37.0, 0.95, "the null controller"),
            (few, 37.0, 0.1, "the kernel and its round trips"),
        ] {
            let said = limiter(&LIMITS, &case, rate, busy);
            assert!(said.contains(part), "{said}");
        }
    }
}
