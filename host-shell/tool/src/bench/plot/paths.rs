//! The chart of ways to memory: GB/s over the size of reads.

use super::{ChartLine, LineChart};
use nvme_host::units;
use plotters::prelude::*;
use serde_json::Value;

/// Returns the chart of the sequential reads of `bench --paths`.
pub fn chart(report: &Value) -> LineChart {
    let cases = report["cases"].as_array().map_or(&[][..], Vec::as_slice);
    let line = |way: &'static str, color| {
        let is_of_it = |case: &&Value| case["way"] == way && case["pattern"] == "sequential";
        let point = |case: &Value| {
            let bytes = case["read_bytes"].as_f64()?;
            Some((bytes.log2(), case["gb_per_s"].as_f64()?))
        };
        let points = cases.iter().filter(is_of_it).filter_map(point).collect();
        ChartLine {
            name: way.into(),
            color,
            points,
        }
    };
    let mut lines = vec![
        line("gpu-direct", BLUE),
        line("direct", BLUE),
        line("cufile", MAGENTA),
        line("cpu-memcpy", RED),
        line("cpu-pinned", GREEN),
    ];
    lines.retain(|line| !line.points.is_empty());
    let sizes: Vec<f64> = lines
        .iter()
        .flat_map(|line| &line.points)
        .map(|point| point.0)
        .collect();
    let least = sizes.iter().copied().fold(f64::MAX, f64::min);
    let most = sizes.iter().copied().fold(0.0, f64::max);
    LineChart {
        title: format!(
            "one file to {}, sequential reads",
            report["to"].as_str().unwrap_or("memory")
        ),
        x_name: "bytes of a read",
        y_name: "GB/s",
        x: least.min(most) - 0.5..most + 0.5,
        x_label: |x| units::bytes(x.exp2().round() as u64),
        lines,
    }
}
