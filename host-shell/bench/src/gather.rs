//! Rows by ids without a GPU: a store's gather beside the same rows out of memory.

use crate::measure::{GatherCases, IdGenerator, median, side_by_side};
use hdrhistogram::Histogram;
use nvme_driver::error::{Error, Result};
use nvme_store::{Store, Table};
use nvme_units::SplitMix;
use serde_json::{Value, json};
use std::time::Instant;

/// Bytes written at a time when the table is laid out.
const CHUNK: usize = 4 << 20;
/// Bytes of the rows of a gather, unless the job says how many rows.
const GATHERED: u64 = 256 << 20;
/// Rows of a hop, and hops measured in each run.
const HOP_ROWS: u64 = 32;
const HOPS: u64 = 400;
/// Hops that take longer are counted with this value.
const MOST_NS: u64 = 60_000_000_000;

/// Workload of the measurement.
#[derive(Clone, Debug)]
pub struct CpuGather {
    /// The table and the cases.
    pub cases: GatherCases,
    /// Threads that gather, each a share of the rows.
    pub threads: usize,
}

/// Runs the cases on `store`; `emit` gets one object each.
///
/// # Errors
/// The error that keeps a case from running; wrong rows.
pub fn gather_by_cpu(store: &Store, job: &CpuGather, emit: &mut dyn FnMut(Value)) -> Result<()> {
    store.check_room("the table", 0, job.cases.table_bytes)?;
    job.cases.check_rows()?;
    let begin = Instant::now();
    let mut mirror = vec![0; job.cases.table_bytes as usize];
    SplitMix::new(job.cases.seed).fill(&mut mirror);
    for (index, chunk) in mirror.chunks(CHUNK).enumerate() {
        store.write_at((index * CHUNK) as u64, chunk)?;
    }
    let path = store.path();
    emit(json!({
        "device": path.device, "path": path.path, "why": path.why,
        "table_bytes": job.cases.table_bytes, "threads": job.threads,
        "cores": std::thread::available_parallelism().map_or(1, usize::from),
        "lay_out_s": begin.elapsed().as_secs_f64(),
    }));
    for row_bytes in &job.cases.row_bytes {
        emit(case(store, job, &mirror, *row_bytes)?);
    }
    Ok(())
}

fn case(store: &Store, job: &CpuGather, mirror: &[u8], row_bytes: u32) -> Result<Value> {
    let row = row_bytes as usize;
    let rows = job.cases.table_bytes / u64::from(row_bytes);
    let table = store.table(0, rows, u64::from(row_bytes))?;
    let count = match job.cases.rows {
        0 => GATHERED / u64::from(row_bytes.max(1024)),
        rows => rows,
    };
    let ids = IdGenerator::new(rows, job.cases.zipf);
    let mut out = vec![0; count as usize * row];
    let share = (count as usize).div_ceil(job.threads.max(1)).max(1);
    let (mut ours, mut bound) = (Vec::new(), Vec::new());
    let mut hops = Histogram::<u64>::new_with_bounds(1, MOST_NS, 3)
        .map_err(|error| Error::internal(format!("a histogram: {error}")))?;
    for run in 0..=job.cases.runs as u64 {
        let asked = ids.draw(count, job.cases.seed ^ (run + 1) << 32);
        let gather = |ids: &[i64], out: &mut [u8]| {
            let report = table.gather(ids.into(), out, None)?;
            report.check()
        };
        let copy = |ids: &[i64], out: &mut [u8]| {
            for (id, to) in ids.iter().zip(out.chunks_exact_mut(row)) {
                to.copy_from_slice(&mirror[*id as usize * row..][..row]);
            }
            Ok(())
        };
        let took = in_shares(&asked, &mut out, share, row, &gather)?;
        check(&asked, &out, mirror, row)?;
        out.fill(0);
        let alone = in_shares(&asked, &mut out, share, row, &copy)?;
        // The first run finds memory that was never touched.
        if run > 0 {
            ours.push(took);
            bound.push(alone);
            hop(&table, &asked, row, &mut hops)?;
        }
    }
    let rate = |runs: &[f64]| count as f64 / median(runs);
    let (gathered, copied) = (rate(&ours), rate(&bound));
    Ok(json!({
        "case": format!("gather_{row_bytes}"),
        "row_bytes": row_bytes, "rows": count,
        "rows_per_s": gathered, "gb_per_s": gathered * f64::from(row_bytes) / 1e9,
        "bound_rows_per_s": copied, "of_bound": gathered / copied,
        "hop_32_rows": {
            "us_p50": hops.value_at_quantile(0.5) as f64 / 1e3,
            "us_p99": hops.value_at_quantile(0.99) as f64 / 1e3,
        },
        "ids": ids.law(),
        "seconds": { "gather": ours, "bound": bound },
        "checked": true,
    }))
}

/// Measures the seconds of `work` over all ids, a thread for each share.
fn in_shares(
    ids: &[i64],
    out: &mut [u8],
    share: usize,
    row: usize,
    work: &(impl Fn(&[i64], &mut [u8]) -> Result<()> + Sync),
) -> Result<f64> {
    let job = |(ids, out)| move || work(ids, out);
    let shares = ids.chunks(share).zip(out.chunks_mut(share * row));
    side_by_side(shares.map(job).collect())
}

fn check(ids: &[i64], out: &[u8], mirror: &[u8], row: usize) -> Result<()> {
    let rows = ids.iter().zip(out.chunks_exact(row));
    let wrong = rows.filter(|(id, have)| **have != mirror[**id as usize * row..][..row]);
    match wrong.count() {
        0 => Ok(()),
        wrong => Err(Error::Mismatch {
            what: format!("{wrong} of {} rows are wrong", ids.len()),
        }),
    }
}

/// Records the latencies of gathers of a few rows, in sequence.
fn hop(table: &Table, ids: &[i64], row: usize, hops: &mut Histogram<u64>) -> Result<()> {
    let few = ids.len().min(HOP_ROWS as usize);
    let mut out = vec![0; few * row];
    for ids in ids.chunks_exact(few.max(1)).cycle().take(HOPS as usize) {
        let begin = Instant::now();
        table.gather(ids.into(), &mut out, None)?.check()?;
        hops.saturating_record(begin.elapsed().as_nanos() as u64);
    }
    Ok(())
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use nvme_store::StoreOptions;

    #[test]
    fn each_size_of_rows_is_gathered_and_checked() {
        let store = Store::open("sim:mem?size=4MiB", &StoreOptions::default()).unwrap();
        let cases = GatherCases {
            table_bytes: 1 << 20,
            row_bytes: vec![512, 24, 4096],
            rows: 50,
            runs: 2,
            seed: 1,
            zipf: true,
        };
        let job = CpuGather { cases, threads: 3 };
        let mut lines = Vec::new();
        gather_by_cpu(&store, &job, &mut |line| lines.push(line)).unwrap();
        assert_eq!(lines.len(), 4);
        assert_eq!(lines[2]["row_bytes"], 24);
        assert_eq!(lines[1]["seconds"]["gather"].as_array().unwrap().len(), 2);
        // A hop takes longer than the clock's step, and one of a hundred takes longest.
        let us = |name: &str| lines[1]["hop_32_rows"][name].as_f64().unwrap();
        assert!(
            us("us_p50") > 0.1 && us("us_p50") <= us("us_p99"),
            "{}",
            lines[1]
        );
    }

    #[test]
    fn wrong_rows_are_found() {
        let mirror: Vec<u8> = (0..64).collect();
        assert!(
            check(
                &[1, 0],
                &[8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7],
                &mirror,
                8
            )
            .is_ok()
        );
        let error = check(&[1], &[8, 9, 10, 11, 12, 13, 14, 0], &mirror, 8).unwrap_err();
        assert!(error.to_string().contains("1 of 1 rows"), "{error}");
    }
}
