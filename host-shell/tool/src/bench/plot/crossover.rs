//! The charts of reads by the GPU against reads by the CPU: the ratio over hits, a line for each latency.

use super::{ChartLine, LineChart};
use nvme_host::units;
use plotters::prelude::*;
use serde_json::Value;

const COLORS: [RGBColor; 4] = [BLUE, GREEN, RED, MAGENTA];

/// Returns a chart for each size of rows and batch of the report of `bench --crossover`.
pub fn charts(report: &Value) -> Vec<LineChart> {
    let all = report["crossovers"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    let mut shapes: Vec<(u64, u64)> = Vec::new();
    let shape = |one: &Value| Some((one["row_bytes"].as_u64()?, one["batch"].as_u64()?));
    for one in all.iter().filter_map(shape) {
        if !shapes.contains(&one) {
            shapes.push(one);
        }
    }
    shapes.sort_unstable();
    let chart = |of: (u64, u64)| {
        let of_it = all.iter().filter(|one| shape(one) == Some(of));
        let colors = COLORS.into_iter().cycle();
        let mut lines: Vec<ChartLine> = of_it
            .zip(colors)
            .map(|(one, color)| line(one, color))
            .collect();
        lines.push(ChartLine {
            name: "equally fast".into(),
            color: BLACK,
            points: vec![(0.0, 1.0), (100.0, 1.0)],
        });
        LineChart {
            title: format!("{} rows of {}", of.1, units::bytes(of.0)),
            x_name: "hits, percent",
            y_name: "times as fast as the CPU",
            x: 0.0..100.0,
            x_label: |x| format!("{x:.0}"),
            lines,
        }
    };
    shapes.into_iter().map(chart).collect()
}

fn line(one: &Value, color: RGBColor) -> ChartLine {
    let point = |point: &Value| Some((point[0].as_f64()?, point[1].as_f64()?));
    let points = one["times"].as_array().into_iter().flatten();
    ChartLine {
        name: match one["latency_ns"].as_u64() {
            Some(ns) => format!("latency {} us", ns / 1000).into(),
            None => "the drive".into(),
        },
        color,
        points: points.filter_map(point).collect(),
    }
}
