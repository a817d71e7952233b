//! `bench --crossover`: reads that the GPU submits against reads by the CPU, over latencies, hits and sizes.

use super::plot;
use crate::common::images::CommandFiles;
use crate::common::{
    NamespaceArgs, WriteArgs, check_stop, number, output, progress, some_bytes, visible,
};
use clap::Args;
use nvme_host::bench::crossings;
use nvme_host::cuda::RowsOptions;
use nvme_host::cuda::bench::{CrossoverJob, crossover};
use nvme_host::{Error, Result, units};
use serde_json::{Map, Value, json};
use std::path::PathBuf;

/// Reads by the GPU against reads by the CPU
#[derive(Args)]
#[command(next_help_heading = "Reads by the GPU against reads by the CPU")]
pub struct CrossoverArgs {
    /// Measure batches of rows that the GPU reads itself against the same rows brought by threads of the CPU, with and
    /// without a cache in GPU memory, and the hit rates at which both are equally fast. The table overwrites the
    /// namespace from its start on (needs --gpu; docs/crossover.md)
    #[arg(long, groups = ["in_turns", "by_stations", "by_rows", "by_crossover"], requires = "gpu")]
    pub crossover: bool,
    /// Latencies of a simulated drive, unless --device says one
    #[arg(long, value_name = "TIME", value_delimiter = ',', default_value = "0ns,20us,70us", value_parser = units::parse_nanoseconds, requires = "by_crossover")]
    latencies: Vec<u64>,
    /// Bytes of a row: whole blocks, at most what one command reads
    #[arg(long, value_name = "BYTES", value_delimiter = ',', default_value = "512,4KiB,16KiB,128KiB", value_parser = some_bytes, requires = "by_crossover")]
    row_sizes: Vec<u64>,
    /// Rows of a batch, cut to --most-bytes and half of the table
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "32,1024,32768", value_parser = number::<u64>(1..=1 << 24), requires = "by_crossover")]
    batches: Vec<u64>,
    /// Bytes of a batch at most
    #[arg(long, value_name = "BYTES", default_value = "128MiB", value_parser = some_bytes, requires = "by_crossover")]
    most_bytes: u64,
    /// Percent of a batch's rows that are in the cache
    #[arg(long, value_name = "PERCENT", value_delimiter = ',', default_value = "0,25,50,75,90,95", value_parser = number::<u32>(0..=100), requires = "by_crossover")]
    hits: Vec<u32>,
    /// Pointer chases at a time over rows of 4 KiB at most, where each row names the next
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,32,1024", value_parser = number::<u32>(1..=65_536), requires = "by_crossover")]
    walks: Vec<u32>,
    /// Rows of a chase, or fewer where all are more than --most-bytes
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = number::<u32>(1..=65_536), requires = "by_crossover")]
    hops: u32,
}

/// Values of options that other commands share.
pub struct CrossoverShared<'f> {
    pub files: &'f CommandFiles,
    pub gpu: u32,
    pub namespace: NamespaceArgs,
    pub write: WriteArgs,
    pub queues: u32,
    pub stations: u32,
    pub table: u64,
    pub runs: usize,
    pub seed: u64,
    pub plot: Option<PathBuf>,
}

/// A device to be measured: its name, its latency in nanoseconds if that is known, and sizes of rows.
type Opened = (String, Option<u64>, Vec<u32>);

/// Keys by which a case is matched between a line of the report and the chart.
const KEYS: [&str; 3] = ["row_bytes", "batch", "latency_ns"];

impl CrossoverArgs {
    pub fn run(&self, rest: &CrossoverShared<'_>) -> Result<()> {
        let device = &rest.namespace.device;
        let bar = progress::spinner("bench");
        let (mut machines, mut cases, mut chains) = (Vec::new(), Vec::new(), Vec::new());
        for (name, latency, rows) in self.devices(&device.device)? {
            let job = self.job(rest, rows)?;
            let opened = device.open_to_write_as(&name, &rest.write, "the table of --crossover")?;
            crossover(opened, &rest.namespace.config(), &job, &mut |mut line| {
                check_stop()?;
                if let Some(object) = line.as_object_mut() {
                    object.insert("latency_ns".to_owned(), json!(latency));
                }
                bar.set_message(in_words(&line));
                match (line["hit_percent"].is_null(), line["walks"].is_null()) {
                    (false, _) => cases.push(line),
                    (_, false) => chains.push(line),
                    _ => machines.push(line),
                }
                Ok(())
            })?;
        }
        bar.finish_and_clear();
        let report = report(&machines, cases, &chains);
        if let Some(path) = &rest.plot {
            plot::draw_all((path, rest.files), &plot::crossover::charts(&report))?;
        }
        match device.form.json {
            true => output::line(&report),
            false => output::print(&to_text(&report)),
        }
    }

    /// Returns the devices that are measured.
    fn devices(&self, name: &str) -> Result<Vec<Opened>> {
        let rows = |is_small: bool| {
            let sizes = self
                .row_sizes
                .iter()
                .filter(|bytes| (**bytes < 4096) == is_small);
            sizes
                .map(|bytes| row_bytes(*bytes))
                .collect::<Result<Vec<_>>>()
        };
        let parts = [("512", rows(true)?), ("4096", rows(false)?)];
        let latencies: Vec<Option<u64>> = match is_open(name, "latency") && is_open(name, "profile")
        {
            true => self.latencies.iter().copied().map(Some).collect(),
            false => vec![None],
        };
        let mut devices = Vec::new();
        for latency in latencies {
            let with_latency = match latency {
                Some(ns) => with_option(name, &format!("latency={ns}ns")),
                None => name.to_owned(),
            };
            if !is_open(name, "block") {
                devices.push((
                    with_latency,
                    latency,
                    [&parts[0].1[..], &parts[1].1].concat(),
                ));
                continue;
            }
            for (block, rows) in parts.iter().filter(|(_, rows)| !rows.is_empty()) {
                let with_block = with_option(&with_latency, &format!("block={block}"));
                devices.push((with_block, latency, rows.clone()));
            }
        }
        Ok(devices)
    }

    fn job(&self, rest: &CrossoverShared<'_>, row_bytes: Vec<u32>) -> Result<CrossoverJob> {
        let defaults = RowsOptions::default();
        Ok(CrossoverJob {
            gpu: rest.gpu,
            nsid: rest.namespace.nsid(),
            table_bytes: rest.table,
            row_bytes,
            batches: self.batches.clone(),
            most_bytes: self.most_bytes,
            hits: self.hits.clone(),
            walks: self.walks.clone(),
            hops: self.hops,
            runs: rest.runs,
            seed: rest.seed,
            threads: 0,
            options: RowsOptions {
                queues: match rest.queues {
                    1 => defaults.queues,
                    queues => queues,
                },
                stations: rest.stations,
                ..defaults
            },
        })
    }
}

fn row_bytes(bytes: u64) -> Result<u32> {
    let small = u32::try_from(bytes).ok();
    small
        .filter(|bytes| bytes.is_multiple_of(512))
        .ok_or_else(|| {
            Error::usage(
                format!("rows of {bytes} bytes are not multiples of 512 below 4 GiB"),
                "use a multiple of 512 below 4 GiB",
            )
        })
}

/// True if `device` is a simulated one whose name does not set option `option`.
fn is_open(device: &str, option: &str) -> bool {
    let Some(text) = device.strip_prefix("sim:") else {
        return false;
    };
    let options = text.split_once('?').map_or("", |(_, options)| options);
    let name = |part: &str| part.split_once('=').map(|(name, _)| name.to_owned());
    !options
        .split('&')
        .any(|part| name(part).as_deref() == Some(option))
}

fn with_option(device: &str, option: &str) -> String {
    let sign = if device.contains('?') { '&' } else { '?' };
    format!("{device}{sign}{option}")
}

/// Returns the cases of each size of rows, batch and latency, and where their ratio passes 1.
fn report(machines: &[Value], cases: Vec<Value>, chains: &[Value]) -> Value {
    let mut crossovers: Vec<Value> = Vec::new();
    for case in &cases {
        let is_of = |other: &Value| KEYS.iter().all(|key| other[key] == case[key]);
        if crossovers.iter().any(is_of) {
            continue;
        }
        let line = |times: &str| {
            let point = |case: &Value| Some((case["hit_percent"].as_f64()?, case[times].as_f64()?));
            let mut points: Vec<(f64, f64)> = cases
                .iter()
                .filter(|case| is_of(case) && case["cached"] == true)
                .filter_map(point)
                .collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            points
        };
        let (times, with_ids) = (line("times"), line("times_with_ids"));
        let mut object = Map::new();
        for key in KEYS {
            object.insert(key.to_owned(), case[key].clone());
        }
        for (name, points) in [("times", times), ("times_with_ids", with_ids)] {
            let by_hits: Vec<Value> = points
                .iter()
                .map(|(hits, times)| json!([hits, times]))
                .collect();
            object.insert(name.to_owned(), json!(by_hits));
            object.insert(
                format!("{name}_equal_at_percent"),
                json!(crossings(&points, 1.0)),
            );
        }
        crossovers.push(Value::Object(object));
    }
    json!({ "machines": machines, "cases": cases, "crossovers": crossovers, "chains": chains })
}

fn in_words(case: &Value) -> String {
    let latency = case["latency_ns"].as_u64();
    let latency = latency.map_or_else(String::new, |ns| format!("{} us, ", ns / 1000));
    let row = units::bytes(case["row_bytes"].as_u64().unwrap_or(0));
    match case["walks"].as_u64() {
        Some(walks) => format!("{latency}{walks} walks over rows of {row}"),
        None => format!(
            "{latency}{} rows of {row}, {} % hits",
            case["batch"], case["hit_percent"]
        ),
    }
}

fn to_text(report: &Value) -> String {
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let mut out = String::new();
    if let Some(machine) = report["machines"].get(0) {
        let text = |key: &str| visible::line(machine[key].as_str().unwrap_or("-"));
        out += &format!(
            "{}; {}; {} cores\n",
            text("gpu"),
            text("device"),
            machine["cores"]
        );
    }
    out += &format!(
        "{:>9}{:>9}{:>11}{:>8}{:>13}{:>13}{:>13}{:>8}{:>8}\n",
        "row", "batch", "latency us", "hits %", "GPU us", "CPU us", "CPU, ids us", "times", "ids"
    );
    for case in report["cases"].as_array().into_iter().flatten() {
        let latency = case["latency_ns"].as_u64();
        out += &format!(
            "{:>9}{:>9}{:>11}{:>8}{:>13.1}{:>13.1}{:>13.1}{:>8.2}{:>8.2}\n",
            units::bytes(case["row_bytes"].as_u64().unwrap_or(0)),
            case["batch"].to_string(),
            latency.map_or_else(|| "-".to_owned(), |ns| (ns / 1000).to_string()),
            match case["cached"] == true {
                true => case["hit_percent"].to_string(),
                false => "none".to_owned(),
            },
            number(&case["gpu"]["us"]),
            number(&case["cpu"]["us"]),
            number(&case["cpu_with_ids"]["us"]),
            number(&case["times"]),
            number(&case["times_with_ids"]),
        );
    }
    out += &format!(
        "{:>9}{:>9}{:>11}{:>8}{:>13}{:>13}{:>13}{:>8}{:>8}\n",
        "row",
        "walks",
        "latency us",
        "hops",
        "GPU us/hop",
        "CPU us/hop",
        "for the GPU",
        "times",
        "for it"
    );
    for case in report["chains"].as_array().into_iter().flatten() {
        let latency = case["latency_ns"].as_u64();
        out += &format!(
            "{:>9}{:>9}{:>11}{:>8}{:>13.1}{:>13.1}{:>13.1}{:>8.2}{:>8.2}\n",
            units::bytes(case["row_bytes"].as_u64().unwrap_or(0)),
            case["walks"].to_string(),
            latency.map_or_else(|| "-".to_owned(), |ns| (ns / 1000).to_string()),
            case["hops"].to_string(),
            number(&case["gpu"]["us_per_hop"]),
            number(&case["cpu"]["us_per_hop"]),
            number(&case["cpu_for_gpu"]["us_per_hop"]),
            number(&case["times"]),
            number(&case["times_for_gpu"]),
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(latencies: &[u64]) -> CrossoverArgs {
        CrossoverArgs {
            crossover: true,
            latencies: latencies.iter().map(|us| us * 1000).collect(),
            row_sizes: vec![512, 4096, 16384],
            batches: vec![32],
            most_bytes: 1 << 20,
            hits: vec![0, 50],
            walks: vec![1],
            hops: 4,
        }
    }

    #[test]
    fn a_simulated_drive_is_opened_with_each_latency_and_the_blocks_of_the_rows() {
        let devices = args(&[0, 20]).devices("sim:mem?size=1GiB").unwrap();
        let names: Vec<&str> = devices.iter().map(|device| &device.0[..]).collect();
        assert_eq!(
            names,
            [
                "sim:mem?size=1GiB&latency=0ns&block=512",
                "sim:mem?size=1GiB&latency=0ns&block=4096",
                "sim:mem?size=1GiB&latency=20000ns&block=512",
                "sim:mem?size=1GiB&latency=20000ns&block=4096",
            ]
        );
        assert_eq!((devices[0].1, &devices[0].2[..]), (Some(0), &[512][..]));
        assert_eq!(devices[3].2, [4096, 16384]);
        let one = args(&[0]).devices("sim:mem").unwrap();
        assert_eq!(one[0].0, "sim:mem?latency=0ns&block=512");
    }

    #[test]
    fn what_a_device_says_stays() {
        for name in ["sim:mem?profile=optane&block=512", "vfio:0000:01:00.0"] {
            let devices = args(&[0, 20]).devices(name).unwrap();
            assert_eq!(devices, [(name.to_owned(), None, vec![512, 4096, 16384])]);
        }
        let mut odd = args(&[0]);
        odd.row_sizes = vec![1000];
        assert!(odd.devices("sim:mem").is_err());
    }

    #[test]
    fn a_report_says_where_both_are_equally_fast() {
        let case = |hits: u32, times: f64| {
            json!({ "row_bytes": 4096, "batch": 32, "latency_ns": 0, "hit_percent": hits, "cached": true,
                "times": times, "times_with_ids": 0.5 })
        };
        let report = report(&[], vec![case(50, 2.0), case(0, 0.5), case(95, 3.0)], &[]);
        let crossovers = report["crossovers"].as_array().unwrap();
        assert_eq!(crossovers.len(), 1);
        let at = crossovers[0]["times_equal_at_percent"].as_array().unwrap();
        assert_eq!(at.len(), 1);
        assert!((at[0].as_f64().unwrap() - 16.67).abs() < 0.01);
        assert_eq!(crossovers[0]["times_with_ids_equal_at_percent"], json!([]));
        assert_eq!(crossovers[0]["times"][0], json!([0.0, 0.5]));
    }
}
