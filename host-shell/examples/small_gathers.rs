//! Times captured gathers of few rows, every row compared: by queues that blocks own, and by shared ones; and in halves,
//! with a copy inside GPU memory between them that is timed alone, too.
//!
//! cargo run --release -p nvme-host --example small_gathers -- [RUNS] [DEVICE] [ROW_BYTES] [OWNED,OWNED...]
// UNSAFETY: requests hold addresses of memory that outlives the launches.
#![allow(unsafe_code)]

use nvme_host::cuda::{
    CudaGraph, DeviceMemory, GatherIds, GatherTarget, Gpu, PendingRows, RowRequest, RowsOptions,
    Stream,
};
use nvme_host::store::GpuOptions;
use nvme_host::{Result, Store, StoreOptions, Table};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Replays before the first that counts.
const WARM_UP: usize = 20;
/// Bytes that are copied inside GPU memory between halves.
const WORK_BYTES: usize = 16 << 20;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let text = |at: usize, without: &str| {
        let given = arguments.get(at);
        given.map_or_else(|| without.to_owned(), Clone::clone)
    };
    let runs: usize = text(0, "200").parse().expect("a number");
    let device = text(1, "sim:mem?size=256MiB&block=512&queues=64&threads=12");
    let row: u64 = text(2, "256").parse().expect("a number");
    let gpu = Gpu::open(0)?;
    let mut random = random();
    let mut image = Vec::new();
    println!("nothing: {}", ReplayTimes::of_nothing(&gpu, runs)?);
    for owned in text(3, "16,0,32,0,16,0").split(',') {
        let owned = owned.parse().expect("a number of queues");
        let options = StoreOptions {
            timeout: Duration::from_secs(2),
            gpu: Some(GpuOptions {
                rows: RowsOptions {
                    owned,
                    owned_bytes: u64::MAX,
                    ..RowsOptions::default()
                },
                ..GpuOptions::default()
            }),
            ..StoreOptions::default()
        };
        let store = Store::open(&device, &options)?;
        if image.is_empty() {
            image = (0..store.len() / 8)
                .flat_map(|_| random().to_le_bytes())
                .collect();
        }
        store.write_at(0, &image)?;
        let rows = store.len() / row;
        let table = store.table(0, rows, row)?;
        for count in [1, 24, 48, 96, 192, 384, 768, 1536, 6144] {
            let ids: Vec<u64> = (0..count).map(|_| random() % rows).collect();
            let before = store.stats();
            let times = ReplayTimes::of_gather(&gpu, &table, (&ids, row), &image, runs)?;
            let way = match store.stats().owned_gathers - before.owned_gathers {
                0 => "shared",
                _ => "owned",
            };
            println!(
                "{count:5} rows of {row} bytes, {owned:2} owned queues, by {way} ones: {times}"
            );
            if way == "owned" {
                let late = before.late_rows;
                let [alone, halves] =
                    ReplayTimes::of_halves(&gpu, &table, (&ids, row), &image, runs)?;
                let (over, late) = (halves.half() - alone.half(), store.stats().late_rows - late);
                println!(
                    "      in halves about a copy: {halves}; the copy alone: {alone}; over it: {over:.1} us; {late} late rows"
                );
            }
        }
    }
    Ok(())
}

/// Numbers that look random and repeat.
fn random() -> impl FnMut() -> u64 {
    let mut state = 7u64;
    move || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        state >> 20
    }
}

/// Times of replays in microseconds, sorted.
struct ReplayTimes(Vec<f64>);

impl std::fmt::Display for ReplayTimes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let at = |part: usize| self.0[(self.0.len() * part / 100).min(self.0.len() - 1)];
        let (p50, p90, p99) = (at(50), at(90), at(99));
        write!(f, "p50 {p50:.1} us, p90 {p90:.1}, p99 {p99:.1}")
    }
}

impl ReplayTimes {
    /// Replays `graph`, and calls `check` after each replay.
    fn of(
        graph: &CudaGraph,
        stream: &Stream,
        runs: usize,
        mut check: impl FnMut(usize) -> Result<()>,
    ) -> Result<Self> {
        let mut times = Vec::new();
        for run in 0..runs + WARM_UP {
            let begin = Instant::now();
            graph.launch(stream)?;
            stream.finish()?;
            let took = begin.elapsed().as_nanos() as f64 / 1000.0;
            if run >= WARM_UP {
                times.push(took);
            }
            check(run)?;
        }
        times.sort_by(f64::total_cmp);
        Ok(Self(times))
    }

    /// Replays a graph that copies 16 bytes: what a launch and its end cost by the same calls.
    fn of_nothing(gpu: &Arc<Gpu>, runs: usize) -> Result<Self> {
        let (stream, memory) = (Stream::new(gpu)?, DeviceMemory::new(gpu, 4096)?);
        let at = memory.address();
        // SAFETY: two halves of one memory, which outlives the replays.
        let copy = |_| unsafe { stream.copy_within(at, at + 2048, 16) };
        let (graph, ()) = CudaGraph::capture(&stream, copy)?;
        Self::of(&graph, &stream, runs, |_| Ok(()))
    }

    /// Replays a gather of `ids`; compares all rows now and then.
    fn of_gather(
        gpu: &Arc<Gpu>,
        table: &Table,
        (ids, row): (&[u64], u64),
        image: &[u8],
        runs: usize,
    ) -> Result<Self> {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let count = ids.len() as u64;
        let (stream, on_gpu, out) = (
            Stream::new(gpu)?,
            DeviceMemory::new(gpu, bytes.len())?,
            DeviceMemory::new(gpu, (count * row) as usize)?,
        );
        on_gpu.upload(0, &bytes)?;
        let request = RowRequest {
            ids: on_gpu.address(),
            wide_ids: true,
            count,
            out: out.address(),
            out_stride: row,
            status: 0,
        };
        // SAFETY: both memories outlive the launches, which are waited for.
        let capture = |stream| unsafe { table.gather_on_gpu(&request, stream) };
        let (graph, pending) = CudaGraph::capture(&stream, capture)?;
        Self::of(&graph, &stream, runs, |run| {
            compare(&pending, &out, ((ids, row), image), run)
        })
    }

    /// Replays a copy inside GPU memory alone, and with the halves of a gather of `ids` about it.
    fn of_halves(
        gpu: &Arc<Gpu>,
        table: &Table,
        (ids, row): (&[u64], u64),
        image: &[u8],
        runs: usize,
    ) -> Result<[Self; 2]> {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let count = ids.len() as u64;
        let (stream, on_gpu, out) = (
            Stream::new(gpu)?,
            DeviceMemory::new(gpu, bytes.len())?,
            DeviceMemory::new(gpu, (count * row) as usize)?,
        );
        let memory = DeviceMemory::new(gpu, 2 * WORK_BYTES)?;
        on_gpu.upload(0, &bytes)?;
        let (from, to) = (memory.address(), memory.address() + WORK_BYTES as u64);
        // SAFETY: two halves of one memory, which outlives the replays.
        let work = || unsafe { stream.copy_within(to, from, WORK_BYTES) };
        let (graph, ()) = CudaGraph::capture(&stream, |_| work())?;
        let alone = Self::of(&graph, &stream, runs, |_| Ok(()))?;
        let wanted = GatherIds {
            ids: on_gpu.address(),
            wide_ids: true,
            count,
        };
        let target = GatherTarget {
            out: out.address(),
            out_stride: row,
            status: 0,
        };
        let (graph, pending) = CudaGraph::capture(&stream, |stream| {
            // SAFETY: the memories outlive the launches, which are waited for.
            let mut begun = unsafe { table.begin_on_gpu(&wanted, stream) }?;
            work()?;
            // SAFETY: as above.
            unsafe { begun.finish(&target, stream) }
        })?;
        let halves = Self::of(&graph, &stream, runs, |run| {
            compare(&pending, &out, ((ids, row), image), run)
        })?;
        Ok([alone, halves])
    }

    /// Returns the median.
    fn half(&self) -> f64 {
        self.0[self.0.len() / 2]
    }
}

/// Waits for a gather of `ids` into `out`; compares all rows now and then.
fn compare(
    pending: &PendingRows,
    out: &DeviceMemory,
    ((ids, row), image): ((&[u64], u64), &[u8]),
    run: usize,
) -> Result<()> {
    let failures = pending.wait(Duration::from_secs(5))?.failures;
    assert_eq!(failures.rows, 0, "rows failed");
    if !run.is_multiple_of(16) {
        return Ok(());
    }
    let mut rows = vec![0; out.len()];
    out.download(0, &mut rows)?;
    for (got, id) in rows.chunks(row as usize).zip(ids) {
        let from = (id * row) as usize;
        assert!(
            got == &image[from..from + row as usize],
            "row {id} is wrong"
        );
    }
    out.zero()
}
