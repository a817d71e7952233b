//! The chart of a bench run: latency over percentiles, or over the rate.

use super::{ChartLine, LineChart};
use nvme_host::bench::RunReport;
use nvme_host::units;
use plotters::prelude::*;

/// Returns the chart of `report`.
pub fn chart(report: &RunReport) -> LineChart {
    let is_ramp = report.steps.len() > 1;
    let lines = match is_ramp {
        true => over_rate(report),
        false => percentiles(report),
    };
    let fastest = lines.iter().flat_map(|line| &line.points);
    let fastest = fastest.map(|point| point.0).fold(1.0, f64::max);
    LineChart {
        title: title(report),
        x_name: if is_ramp { "commands/s" } else { "percentile" },
        y_name: "latency, us",
        // Five nines.
        x: 0.0..if is_ramp { fastest * 1.02 } else { 5.0 },
        x_label: match is_ramp {
            true => |x| units::count(x),
            false => |x| format!("{}", 100.0 - 100.0 / 10f64.powf(x)),
        },
        lines,
    }
}

fn title(report: &RunReport) -> String {
    let (read, write) = report.total();
    format!(
        "{} {} x{} depth {}: {} IOPS",
        report.rw(),
        units::bytes(u64::from(report.job.bytes)),
        report.job.queues,
        report.job.depth,
        units::count(read.iops() + write.iops())
    )
}

/// Returns the latency over percentile, the x axis counting nines: 90 % at 1, 99.99 % at 4.
fn percentiles(report: &RunReport) -> Vec<ChartLine> {
    let (read, write) = report.total();
    let one = |direction: &nvme_host::bench::DirectionReport| {
        let at = |step: u32| {
            let nines = f64::from(step) / 20.0;
            (
                nines,
                direction.percentile(100.0 - 100.0 / 10f64.powf(nines)) as f64 / 1e3,
            )
        };
        (0..=100).map(at).collect()
    };
    let all = [("read", BLUE, &read), ("write", RED, &write)];
    let used = all
        .into_iter()
        .filter(|(_, _, direction)| direction.commands > 0);
    used.map(|(name, color, direction)| ChartLine {
        name: name.into(),
        color,
        points: one(direction),
    })
    .collect()
}

fn over_rate(report: &RunReport) -> Vec<ChartLine> {
    let one = |name: &'static str, color, percent| {
        let point = |step: &nvme_host::bench::RampStep| {
            (
                step.iops(),
                step.latency().value_at_percentile(percent) as f64 / 1e3,
            )
        };
        ChartLine {
            name: name.into(),
            color,
            points: report.steps.iter().map(point).collect(),
        }
    };
    vec![
        one("p50", BLUE, 50.0),
        one("p99", GREEN, 99.0),
        one("p99.9", RED, 99.9),
    ]
}
