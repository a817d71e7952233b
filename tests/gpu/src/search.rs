//! Searches of a graph on a drive, against the same searches by the CPU, bit by bit, and what becomes of queries whose
//! reads fail.
// UNSAFETY: searches take addresses of queries and results.
#![allow(unsafe_code)]

mod exact;

use crate::bench::Bench;
use crate::gather::{few_stations, simulated, text};
use crate::limits::limit;
use crate::reading::{planned, until_whole, wait_for};
use crate::report::{Outcome, Report};
use nvme_gpu_kernel::rows::code as row;
use nvme_host::Store;
use nvme_host::cuda::{CudaGraph, DeviceMemory, PendingRows, RowFailures, Stream};
use nvme_search::{
    BuildOptions, CpuOptions, GpuSearch, SearchAnswers, SearchParameters, SearchRequest,
    VectorDistribution, VectorIndex, VectorMetric, VectorSet, VectorSource, build, code,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

const POISON: u8 = 0xA5;
/// Bytes of the guard behind each output.
const GUARD: usize = 64;

pub fn all(report: &mut Report, bench: &Bench) {
    for block in [512, 4096] {
        report.test(&format!("search/shapes/block-{block}"), |_| {
            shapes(bench, block)
        });
    }
    report.test("search/several-blocks", |_| {
        exact::all(bench, VectorMetric::Euclidean, &[(929, 2), (2100, 3)])
    });
    report.test("search/inner-product", |_| {
        exact::all(bench, VectorMetric::InnerProduct, &[(48, 1), (928, 2)])
    });
    report.test("search/large", |_| large(bench));
    report.test("search/usage", |_| usage(bench));
    report.test("search/damage", |_| damage(bench));
    report.test("search/streams", |_| streams(bench));
    report.test("search/graph", |_| graph(bench));
    for (name, fault) in [
        ("status", "status:0x281@op=read,nth=300"),
        ("dropped", "drop@op=read,nth=300"),
        ("late", "delay:LATE@op=read,nth=300"),
        ("reordered", "reorder@op=read,every=5"),
        ("duplicate", "duplicate@op=read,nth=300"),
        ("torn-cqe", "torncqe@op=read,nth=300"),
        ("wrong-cid", "wrongcid:0xfff@op=read,nth=300"),
        ("wrong-phase", "wrongphase@op=read,nth=300"),
        ("dead-cfs", "cfs@op=read,nth=300"),
        ("all-ones", "allones@op=read,nth=300"),
    ] {
        report.test(&format!("search/fault/{name}"), |_| {
            faults(bench, name, fault)
        });
    }
    report.test("search/fault/over-and-over", |_| outages(bench));
}

/// An index on a drive, and the kernel.
struct Drive {
    store: Arc<Store>,
    index: VectorIndex,
    search: GpuSearch,
    source: VectorSource,
    stream: Stream,
}

fn source(kind: VectorDistribution, count: u32, elements: u32) -> VectorSource {
    VectorSource {
        kind,
        seed: 11,
        count,
        elements,
    }
}

impl Drive {
    fn new(
        bench: &Bench,
        (block, fault): (u32, &str),
        timeout: Duration,
        source: VectorSource,
        sub_elements: u32,
    ) -> Outcome<Self> {
        let name = simulated(32, block, fault);
        Self::on(bench, &name, timeout, source, sub_elements)
    }

    fn on(
        bench: &Bench,
        device: &str,
        timeout: Duration,
        source: VectorSource,
        sub_elements: u32,
    ) -> Outcome<Self> {
        let how = BuildOptions {
            degree: 24,
            list: 40,
            sub_elements,
            ..BuildOptions::default()
        };
        let vectors = source.vectors().map_err(text)?;
        Self::of(bench, device, timeout, (source, &vectors), how)
    }

    fn of(
        bench: &Bench,
        device: &str,
        timeout: Duration,
        (source, vectors): (VectorSource, &VectorSet),
        how: BuildOptions,
    ) -> Outcome<Self> {
        let options = few_stations(bench, timeout);
        let open = || -> nvme_host::Result<Self> {
            let store = Arc::new(Store::open(device, &options)?);
            build(&store, 8192, (source, vectors), how, &mut |_| Ok(()))?;
            let index = VectorIndex::open(&store, 8192)?;
            Ok(Self {
                search: GpuSearch::new(&index)?,
                store,
                index,
                source,
                stream: Stream::new(&bench.gpu)?,
            })
        };
        open().map_err(text)
    }
}

/// Queries, their memory, and the CPU's results.
struct Job {
    parameters: SearchParameters,
    count: usize,
    expected: SearchAnswers,
    queries: DeviceMemory,
    /// Ids, distances, codes and reads.
    out: [DeviceMemory; 4],
}

impl Job {
    fn new(
        drive: &Drive,
        bench: &Bench,
        queries: &[f32],
        parameters: SearchParameters,
    ) -> Outcome<Self> {
        let cpu = CpuOptions {
            threads: 2,
            together: 8,
        };
        let expected = drive.index.search(queries, parameters, cpu).map_err(text)?;
        Self::expecting(bench, queries, parameters, expected)
    }

    fn expecting(
        bench: &Bench,
        queries: &[f32],
        parameters: SearchParameters,
        expected: SearchAnswers,
    ) -> Outcome<Self> {
        let count = expected.codes.len();
        let memory = |bytes: usize| DeviceMemory::new(&bench.gpu, bytes).map_err(text);
        let results = count * parameters.results as usize;
        let job = Self {
            parameters,
            count,
            expected,
            queries: memory(queries.len().max(1) * 4)?,
            out: [
                memory(results * 8 + GUARD)?,
                memory(results * 4 + GUARD)?,
                memory(count * 4 + GUARD)?,
                memory(count * 4 + GUARD)?,
            ],
        };
        let bytes: Vec<u8> = queries.iter().flat_map(|x| x.to_le_bytes()).collect();
        job.queries.upload(0, &bytes).map_err(text)?;
        Ok(job)
    }

    /// Makes a job of generated queries, with the CPU's answers to all of them.
    fn whole(
        drive: &Drive,
        bench: &Bench,
        count: usize,
        parameters: SearchParameters,
    ) -> Outcome<Self> {
        let queries = drive.source.queries(count).map_err(text)?;
        let job = Self::new(drive, bench, &queries, parameters)?;
        job.expected.check().map_err(text)?;
        Ok(job)
    }

    fn start_on(&self, drive: &Drive, stream: u64) -> nvme_host::Result<PendingRows> {
        let [ids, distances, codes, reads] = self.out.each_ref().map(DeviceMemory::address);
        let request = SearchRequest {
            queries: self.queries.address(),
            count: self.count as u64,
            ids,
            distances,
            codes,
            reads,
        };
        // SAFETY: the memory outlives the searches, which are waited for.
        unsafe { drive.search.search(&request, self.parameters, stream) }
    }

    fn poison(&self) -> Outcome<()> {
        let fill = |memory: &DeviceMemory| memory.fill(POISON).map_err(text);
        self.out.iter().try_for_each(fill)
    }

    /// Runs the job once and checks every result; returns the failures of queries and the codes.
    fn run(&self, drive: &Drive) -> Outcome<(RowFailures, Vec<i32>)> {
        self.poison()?;
        let pending = self.start_on(drive, drive.stream.handle()).map_err(text)?;
        let ended = pending.wait(limit()).map_err(text)?;
        Ok((ended.failures, self.check(ended.failures)?))
    }

    /// Checks each query: the CPU's answer, or none and counted as failed. Their codes.
    fn check(&self, failures: RowFailures) -> Outcome<Vec<i32>> {
        let results = self.parameters.results as usize;
        let lengths = [
            self.count * results * 8,
            self.count * results * 4,
            self.count * 4,
            self.count * 4,
        ];
        let mut all = Vec::new();
        for (memory, length) in self.out.iter().zip(lengths) {
            let mut bytes = vec![0; memory.len()];
            memory.download(0, &mut bytes).map_err(text)?;
            if bytes[length..].iter().any(|byte| *byte != POISON) {
                return Err("bytes behind the results were written".to_owned());
            }
            bytes.truncate(length);
            all.push(bytes);
        }
        let words = |bytes: &[u8]| -> Vec<u32> {
            let words = bytes.as_chunks::<4>().0.iter();
            words.map(|word| u32::from_le_bytes(*word)).collect()
        };
        let ids = all[0].as_chunks::<8>().0.iter();
        let ids: Vec<i64> = ids.map(|id| i64::from_le_bytes(*id)).collect();
        let (distances, reads) = (words(&all[1]), words(&all[3]));
        let codes: Vec<i32> = words(&all[2]).iter().map(|word| *word as i32).collect();
        for (query, code) in codes.iter().enumerate() {
            let at = query * results..(query + 1) * results;
            let (ids, far) = (&ids[at.clone()], &distances[at.clone()]);
            let is_right = match code {
                0 => {
                    let expected = self.expected.distances[at.clone()].iter();
                    ids == &self.expected.ids[at.clone()]
                        && far
                            .iter()
                            .eq(expected.map(|far| far.to_bits()).collect::<Vec<_>>().iter())
                        && reads[query] == self.expected.reads[query]
                }
                _ => {
                    let none = f32::INFINITY.to_bits();
                    ids.iter().all(|id| *id == -1) && far.iter().all(|far| *far == none)
                }
            };
            if !is_right {
                return Err(format!(
                    "query {query}, code {code}: {ids:?}, {far:x?}, {} reads; the CPU: {:?}, {} reads",
                    reads[query],
                    &self.expected.ids[at.clone()],
                    self.expected.reads[query]
                ));
            }
        }
        let failed = codes.iter().filter(|code| **code != 0).count() as u64;
        let first = codes.iter().position(|code| *code != 0);
        let first = first.map(|query| (query as u64, codes[query]));
        match (failures.rows, failures.first) == (failed, first) {
            true => Ok(codes),
            false => Err(format!("{failed} failed, first {first:?}: {failures:?}")),
        }
    }
}

/// No query, one, many; vectors of one element and of 928; one vector; every list, beam and number of results.
fn shapes(bench: &Bench, block: u32) -> Outcome<String> {
    let (mut searches, mut queries_done) = (0, 0);
    for (kind, count, elements, sub_elements) in [
        (VectorDistribution::Uniform, 1, 1, 1),
        (VectorDistribution::Uniform, 5, 33, 4),
        (VectorDistribution::Clustered, 400, 100, 7),
        (VectorDistribution::Uniform, 300, 928, 16),
        (VectorDistribution::Clustered, 2000, 128, 4),
    ] {
        let source = source(kind, count, elements);
        let drive = Drive::new(bench, (block, ""), limit(), source, sub_elements)?;
        for (queries, list, beam, results) in [
            (0, 64, 4, 10),
            (1, 1, 1, 1),
            (7, 20, 1, 10),
            (65, 64, 4, 10),
            (33, 31, 32, 31),
            (40, 256, 8, 32),
            (9, 33, 3, 7),
        ] {
            let parameters = SearchParameters {
                list,
                beam,
                results,
            };
            // Few queries, because the stand-in runs the lanes of a launch as coroutines, which take long.
            let queries = queries.min(bench.commands as usize / 60);
            let job = Job::whole(&drive, bench, queries, parameters)?;
            let (failures, _) = job.run(&drive)?;
            if failures.rows != 0 {
                return Err(format!(
                    "{count} x {elements}, {parameters:?}: {failures:?}"
                ));
            }
            searches += 1;
            queries_done += queries;
        }
    }
    Ok(format!(
        "{searches} searches, {queries_done} queries as the CPU's"
    ))
}

/// Each warp has many queries.
fn large(bench: &Bench) -> Outcome<String> {
    let source = source(VectorDistribution::Clustered, 5000, 64);
    let drive = Drive::new(bench, (4096, ""), limit(), source, 4)?;
    let queries = (bench.commands as usize / 4).min(1200);
    let job = Job::whole(&drive, bench, queries, SearchParameters::default())?;
    for _ in 0..2 {
        let (failures, _) = job.run(&drive)?;
        if failures.rows != 0 {
            return Err(format!("{failures:?}"));
        }
    }
    let reads = job.expected.reads_per_query();
    Ok(format!("2 x {queries} queries, {reads:.1} reads each"))
}

fn usage(bench: &Bench) -> Outcome<String> {
    let few = source(VectorDistribution::Uniform, 9, 8);
    let drive = Drive::new(bench, (4096, ""), limit(), few, 4)?;
    let job = Job::whole(&drive, bench, 2, SearchParameters::default())?;
    let code =
        |ended: nvme_host::Result<PendingRows>| ended.map(drop).map_err(|error| error.exit_code());
    let request = SearchRequest {
        queries: job.queries.address(),
        count: 2,
        ids: job.out[0].address() + 4,
        distances: job.out[1].address(),
        codes: job.out[2].address(),
        reads: job.out[3].address(),
    };
    let odd = SearchRequest {
        ids: job.out[0].address(),
        codes: job.out[2].address() + 2,
        ..request
    };
    let many = SearchRequest {
        ids: job.out[0].address(),
        count: 1 << 32,
        ..request
    };
    for (what, request) in [("ids", request), ("codes", odd), ("queries", many)] {
        // SAFETY: the call is refused.
        let refused = unsafe {
            let stream = drive.stream.handle();
            drive.search.search(&request, job.parameters, stream)
        };
        if code(refused) != Err(2) {
            return Err(format!("{what} were taken"));
        }
    }
    let wrong = Job {
        parameters: SearchParameters {
            beam: 33,
            ..job.parameters
        },
        ..job
    };
    if code(wrong.start_on(&drive, drive.stream.handle())) != Err(2) {
        return Err("a beam of 33 was taken".to_owned());
    }
    let file = crate::by_host::Scratch::new()?;
    let of_file = Drive::on(bench, &file.device(), limit(), few, 4)?;
    let job = Job::whole(&of_file, bench, 2, SearchParameters::default())?;
    match code(job.start_on(&of_file, of_file.stream.handle())) {
        Err(2) => Ok("refused before anything is launched".to_owned()),
        other => Err(format!("an index in a file: {other:?}")),
    }
}

/// Damaged nodes and queries that are no numbers fail the queries that meet them, alike on GPU and CPU.
fn damage(bench: &Bench) -> Outcome<String> {
    let source = source(VectorDistribution::Clustered, 600, 40);
    let drive = Drive::new(bench, (4096, ""), limit(), source, 4)?;
    let mut queries = source.queries(60).map_err(text)?;
    queries[13 * 40 + 39] = f32::NAN;
    queries[29 * 40] = f32::INFINITY;
    let parameters = SearchParameters::default();
    let nodes = 8192 + drive.index.header().nodes_at();
    let whole = Job::new(&drive, bench, &queries, parameters)?;
    let first = whole.expected.ids[0] as u64;
    let mut seen = Vec::new();
    // The first and the last word of all that counts, an id, and another node in its place.
    for at in [
        0,
        4 * 64,
        4 * 65,
        4 * 66,
        4 * 67,
        4 * 96,
        4 * 135 + 3,
        4095,
        5000,
    ] {
        let place = nodes + first * 4096;
        let mut node = vec![0; 4096];
        drive.store.read_at(place, &mut node).map_err(text)?;
        let mut other = node.clone();
        match at {
            5000 => {
                let next = nodes + (first + 1) % 600 * 4096;
                drive.store.read_at(next, &mut other).map_err(text)?;
            }
            at => other[at] ^= 0x10,
        }
        drive.store.write_at(place, &other).map_err(text)?;
        let job = Job::new(&drive, bench, &queries, parameters)?;
        let (_, codes) = job.run(&drive)?;
        if codes != job.expected.codes {
            return Err(format!(
                "byte {at}: {codes:?}, the CPU: {:?}",
                job.expected.codes
            ));
        }
        // What fills a node up is not looked at.
        let due = if at == 4095 { 0 } else { code::WRONG_NODE };
        if (codes[0], codes[13], codes[29]) != (due, code::BAD_QUERY, code::BAD_QUERY) {
            return Err(format!("byte {at}: {codes:?}"));
        }
        seen.push(codes.iter().filter(|one| **one == code::WRONG_NODE).count());
        drive.store.write_at(place, &node).map_err(text)?;
    }
    Ok(format!("queries that met a damaged node: {seen:?} of 60"))
}

/// Searches of several streams share the stations.
fn streams(bench: &Bench) -> Outcome<String> {
    let source = source(VectorDistribution::Clustered, 1000, 32);
    let drive = Drive::new(bench, (4096, ""), limit(), source, 4)?;
    let streams = crate::gather::several_streams(bench, 4)?;
    let jobs = (1..9).map(|number| {
        let parameters = SearchParameters {
            list: 20 * number,
            beam: number,
            results: 3 + number,
        };
        let queries = (bench.commands as usize / 90).min(50);
        Job::whole(&drive, bench, queries + number as usize, parameters)
    });
    let jobs: Vec<Job> = jobs.collect::<Outcome<_>>()?;
    let rounds = (bench.commands as usize / 450).clamp(1, 5);
    for _ in 0..rounds {
        for (job, pending) in start(&drive, &jobs, &streams)? {
            let failures = pending.wait(limit()).map_err(text)?.failures;
            job.check(failures)?;
            if failures.rows != 0 {
                return Err(format!("{failures:?}"));
            }
        }
    }
    Ok(format!("{} launches over 4 streams", rounds * jobs.len()))
}

/// Starts all jobs, on the streams in turn.
fn start<'j>(
    drive: &Drive,
    jobs: &'j [Job],
    streams: &[Stream],
) -> Outcome<Vec<(&'j Job, PendingRows)>> {
    let started = jobs.iter().zip(streams.iter().cycle());
    started
        .map(|(job, stream)| {
            job.poison()?;
            let pending = job.start_on(drive, stream.handle()).map_err(text)?;
            Ok((job, pending))
        })
        .collect()
}

/// A search of a graph can be launched again, and has no results when the store is gone.
fn graph(bench: &Bench) -> Outcome<String> {
    let source = source(VectorDistribution::Clustered, 500, 24);
    let drive = Drive::new(bench, (4096, ""), limit(), source, 4)?;
    let job = Job::whole(&drive, bench, 70, SearchParameters::default())?;
    let captured = CudaGraph::capture(&drive.stream, |stream| job.start_on(&drive, stream));
    let (graph, pending) = captured.map_err(text)?;
    let wait_for = |rounds| wait_for(rounds, || pending.ended());
    for round in 1..=3 {
        job.poison()?;
        graph.launch(&drive.stream).map_err(text)?;
        wait_for(round)?;
        let failures = pending.last().failures;
        job.check(failures)?;
        if failures.rows != 0 {
            return Err(format!("{failures:?}"));
        }
    }
    let Drive {
        store,
        index,
        search,
        stream,
        ..
    } = drive;
    drop((store, index, search));
    job.poison()?;
    graph.launch(&stream).map_err(text)?;
    wait_for(4)?;
    let failures = pending.last().failures;
    let codes = job.check(failures)?;
    match codes.iter().all(|code| *code == row::GONE) {
        true => Ok("3 launches, no results when the store is gone".to_owned()),
        false => Err(format!("after the store: {codes:?}")),
    }
}

/// Queries whose reads fail have no results and report it, none has wrong ones, and later searches are complete if the
/// controller comes back.
fn faults(bench: &Bench, name: &str, fault: &str) -> Outcome<String> {
    let (fault, timeout) = planned(bench, fault);
    let source = source(VectorDistribution::Clustered, 500, 32);
    // The CPU's answers come from a drive without faults.
    let well = Drive::new(bench, (4096, ""), limit(), source, 4)?;
    let expected = Job::whole(&well, bench, 60, SearchParameters::default())?.expected;
    let drive = Drive::new(bench, (4096, &fault), timeout, source, 4)?;
    let queries = source.queries(60).map_err(text)?;
    let job = Job::expecting(bench, &queries, SearchParameters::default(), expected)?;
    until_whole(name, (1, 60), "queries", || Ok(job.run(&drive)?.0))
}

/// Reads are lost repeatedly under searches on several streams: none is wrong, and no I/O context is lost.
fn outages(bench: &Bench) -> Outcome<String> {
    let timeout = Duration::from_millis(60) * bench.patience as u32;
    let source = source(VectorDistribution::Clustered, 500, 32);
    let well = Drive::new(bench, (4096, ""), limit(), source, 4)?;
    let expected = Job::whole(&well, bench, 60, SearchParameters::default())?.expected;
    let drive = Drive::new(
        bench,
        (4096, "drop@op=read,every=12000"),
        timeout,
        source,
        4,
    )?;
    let streams = crate::gather::several_streams(bench, 4)?;
    let queries = source.queries(60).map_err(text)?;
    let parameters = SearchParameters::default();
    let jobs = (0..4).map(|_| Job::expecting(bench, &queries, parameters, expected.clone()));
    let jobs: Vec<Job> = jobs.collect::<Outcome<_>>()?;
    let (mut failed, mut whole, mut rounds) = (0, 0, 0);
    let least = (bench.commands / 180).min(15);
    let begin = Instant::now();
    while rounds < least || failed == 0 || whole == 0 {
        rounds += 1;
        let before = failed;
        for (job, pending) in start(&drive, &jobs, &streams)? {
            let failures = pending.wait(limit()).map_err(text)?.failures;
            job.check(failures)?;
            failed += failures.rows;
            whole += u32::from(failures.rows == 0);
        }
        if begin.elapsed() > limit() {
            return Err(format!(
                "{rounds} rounds: {failed} queries failed, {whole} launches were whole"
            ));
        }
        if failed > before {
            // The controller is being reset.
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    Ok(format!(
        "{failed} queries failed, {whole} of {} launches were whole, none is wrong",
        rounds * 4
    ))
}
