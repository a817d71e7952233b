//! The chart of the ladder: GFLOP/s over the side of the matrices.

use super::{ChartLine, LineChart};
use plotters::prelude::*;
use serde_json::Value;

/// Ways, elements and colours, from the bottom up.
const LINES: [(&str, &str, &str, RGBColor); 10] = [
    ("cpu", "f32", "CPU", RGBColor(150, 150, 150)),
    ("cpu_blocked", "f32", "CPU, blocked", RGBColor(80, 80, 80)),
    ("naive", "f32", "naive", RGBColor(220, 170, 60)),
    ("tiled", "f32", "tiled", RGBColor(230, 120, 40)),
    ("vectorized", "f32", "vectorized", RED),
    ("coarsened", "f32", "coarsened", RGBColor(160, 40, 120)),
    ("cublas", "f32", "cuBLAS f32", BLACK),
    ("mma", "bf16", "mma bf16", RGBColor(40, 120, 200)),
    ("wgmma", "bf16", "wgmma bf16", BLUE),
    ("cublas", "bf16", "cuBLAS bf16", RGBColor(0, 110, 60)),
];

/// Returns the chart of `bench --matmul`.
pub fn chart(report: &Value) -> LineChart {
    let cases = report["cases"].as_array().map_or(&[][..], Vec::as_slice);
    let line = |(way, element, name, color): (&str, &str, &'static str, RGBColor)| {
        let is_of_it = |case: &&Value| case["way"] == way && case["element"] == element;
        let point = |case: &Value| Some((case["side"].as_f64()?.log2(), case["gflops"].as_f64()?));
        let mut points: Vec<_> = cases.iter().filter(is_of_it).filter_map(point).collect();
        // The CPU's sides are cut: several cases may have the same.
        points.dedup_by(|one, other| one.0 == other.0);
        ChartLine {
            name: name.into(),
            color,
            points,
        }
    };
    let mut lines: Vec<ChartLine> = LINES.into_iter().map(line).collect();
    lines.retain(|line| !line.points.is_empty());
    let sides = || {
        lines
            .iter()
            .flat_map(|line| &line.points)
            .map(|point| point.0)
    };
    let (least, most) = (
        sides().fold(f64::MAX, f64::min),
        sides().fold(0.0, f64::max),
    );
    LineChart {
        title: format!(
            "products of square matrices, {}",
            report["gpu"].as_str().unwrap_or("a GPU")
        ),
        x_name: "side",
        y_name: "GFLOP/s",
        x: least.min(most) - 0.5..most + 0.5,
        x_label: |x| format!("{:.0}", x.exp2()),
        lines,
    }
}
