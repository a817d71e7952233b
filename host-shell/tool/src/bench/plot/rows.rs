//! The chart of gathers: rows a second over the size of a row.

use super::{ChartLine, LineChart};
use nvme_host::units;
use plotters::prelude::*;
use serde_json::Value;

/// Returns the chart of the cases of `bench --gather`, as they are printed.
pub fn chart(cases: &[Value]) -> LineChart {
    let line = |name: &'static str, color, rate: fn(&Value) -> &Value| {
        let point = |case: &Value| {
            let bytes = case["row_bytes"].as_f64()?;
            Some((bytes.log2(), rate(case).as_f64()? / 1e6))
        };
        let mut points: Vec<(f64, f64)> = cases.iter().filter_map(point).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        ChartLine {
            name: name.into(),
            color,
            points,
        }
    };
    let mut lines = vec![
        line("gather", BLUE, |case| &case["rows_per_s"]),
        line(
            "bound: the rows out of memory",
            BLACK,
            |case| &case["bound_rows_per_s"],
        ),
        line(
            "a CPU, and one copy",
            RED,
            |case| &case["index_and_copy_rows_per_s"],
        ),
        line(
            "gather with a cache",
            GREEN,
            |case| &case["cache"]["rows_per_s"],
        ),
    ];
    lines.retain(|line| !line.points.is_empty());
    let sizes = || {
        lines
            .iter()
            .flat_map(|line| &line.points)
            .map(|point| point.0)
    };
    let (least, most) = (
        sizes().fold(f64::MAX, f64::min),
        sizes().fold(0.0, f64::max),
    );
    LineChart {
        title: "rows by ids".to_owned(),
        x_name: "bytes of a row",
        y_name: "M rows/s",
        x: least.min(most) - 0.5..most + 0.5,
        x_label: |x| units::bytes(x.exp2().round() as u64),
        lines,
    }
}
