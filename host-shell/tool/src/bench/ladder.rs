//! `bench --matmul`: the ladder of products of matrices, beside the CPU and cuBLAS.

use super::plot;
use crate::common::images::CommandFiles;
use crate::common::{check_stop, number, output, progress};
use clap::Args;
use nvme_course::ladder::MatmulStep;
use nvme_course::ladder::bench::{LadderCase, LadderJob, LadderReport, MatmulMethod, measure};
use nvme_host::Result;
use nvme_host::bench::median;
use nvme_host::cuda::Gpu;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Products of matrices
#[derive(Args)]
#[command(next_help_heading = "Products of matrices")]
pub struct LadderArgs {
    /// Multiply square matrices by each step of docs/ladder.md, by the CPU and by cuBLAS where it is installed (needs
    /// --gpu; no --device); each product is checked
    #[arg(long, value_name = "SIDE", value_delimiter = ',', value_parser = number::<u32>(1..=32_768), groups = ["in_turns", "without_device"], requires = "gpu")]
    pub matmul: Vec<u32>,
}

/// Values of options that other commands share.
pub struct LadderShared<'f> {
    pub files: &'f CommandFiles,
    pub gpu: u32,
    pub runs: usize,
    pub seed: u64,
    pub json: bool,
    pub plot: Option<PathBuf>,
}

impl LadderArgs {
    pub fn run(self, rest: LadderShared<'_>) -> Result<()> {
        let gpu = Gpu::open(rest.gpu)?;
        let job = LadderJob {
            sides: self.matmul,
            runs: rest.runs,
            seed: rest.seed,
        };
        let bar = progress::spinner("bench");
        let measured = measure(&gpu, &job, &mut |case| {
            bar.set_message(case.to_owned());
            check_stop()
        })?;
        bar.finish_and_clear();
        let report = to_json(&measured, &gpu, &rest);
        if let Some(path) = &rest.plot {
            plot::draw((path, rest.files), &plot::ladder::chart(&report))?;
        }
        match rest.json {
            true => output::line(&report),
            false => output::print(&to_text(&report)),
        }
    }
}

fn to_json(report: &LadderReport, gpu: &Gpu, rest: &LadderShared<'_>) -> Value {
    let cases: Vec<Value> = report
        .cases
        .iter()
        .map(|case| of_case(case, report))
        .collect();
    let of_rung = |(rung, (registers, local_bytes)): &(MatmulStep, (u32, u32))| json!({ "way": rung.name(), "registers": registers, "local_bytes": local_bytes });
    let costs: Vec<Value> = report.costs.iter().map(of_rung).collect();
    json!({
        "gpu": gpu.describe(),
        "runs": rest.runs,
        "cpu_threads": report.threads,
        "cublas": report.cublas.as_ref().ok(),
        "why_not": report.cublas.as_ref().err(),
        "costs": costs,
        "cases": cases,
    })
}

fn of_case(case: &LadderCase, report: &LadderReport) -> Value {
    let seconds = median(&case.seconds);
    let gflops = |case: &LadderCase| case.operations() / median(&case.seconds) / 1e9;
    let alike = |other: &&LadderCase| other.side == case.side && other.element == case.element;
    let fastest = report
        .cases
        .iter()
        .filter(alike)
        .map(gflops)
        .fold(0.0, f64::max);
    let blas = report
        .cases
        .iter()
        .filter(alike)
        .find(|other| other.way == MatmulMethod::Cublas);
    json!({
        "way": case.way.name(),
        "side": case.side,
        "element": case.element.name(),
        "seconds": case.seconds,
        "gflops": gflops(case),
        "bytes": case.bytes(),
        "gb_per_s": case.bytes() / seconds / 1e9,
        "of_cublas": blas.map(|blas| gflops(case) / gflops(blas)),
        "of_fastest": gflops(case) / fastest,
        "error": case.error,
        "allowed_error": case.allowed(),
        "checked": true,
    })
}

fn to_text(report: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let percent = |value: &Value| match value.as_f64() {
        Some(share) => format!("{:.1} %", share * 100.0),
        None => "-".to_owned(),
    };
    let mut out = format!(
        "{}, medians of {} in turns, {} threads of the CPU, every product checked\n",
        text(&report["gpu"]),
        report["runs"],
        report["cpu_threads"]
    );
    if let Some(why) = report["why_not"].as_str() {
        out += &format!("cublas: not measured: {why}\n");
    }
    out += &format!(
        "{:<8}{:<9}{:<13}{:>12}{:>11}{:>10}{:>11}\n",
        "side", "element", "way", "GFLOP/s", "GB/s", "cublas", "error"
    );
    for case in report["cases"].as_array().into_iter().flatten() {
        out += &format!(
            "{:<8}{:<9}{:<13}{:>12.0}{:>11.1}{:>10}{:>11.1e}\n",
            case["side"].as_u64().unwrap_or(0),
            text(&case["element"]),
            text(&case["way"]),
            number(&case["gflops"]),
            number(&case["gb_per_s"]),
            percent(&case["of_cublas"]),
            number(&case["error"]),
        );
    }
    out
}
