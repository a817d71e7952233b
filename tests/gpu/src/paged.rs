//! Attention over pages of keys and values on a drive: many shapes against sums of `f64`, pages that do not exist, and
//! the results of heads whose reads fail.
// UNSAFETY: launches take addresses of vectors and tables.
#![allow(unsafe_code)]

mod choose;

use crate::bench::Bench;
use crate::gather::{dice, few_stations, simulated, text};
use crate::limits::limit;
use crate::reading::{planned, until_whole};
use crate::report::{Outcome, Report};
use nvme_gpu_kernel::rows::code;
use nvme_host::cuda::{CudaGraph, DeviceMemory, PendingRows, RowFailures, Stream};
use nvme_host::{Store, StoreOptions};
use nvme_models::paged::{self, PagedKernels, PagedQueries};
use nvme_models::{KvShape, KvStore};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Content of results before a launch, and of the elements after them at all times.
const POISON: f32 = -77.25;
const GUARD: usize = 16;
/// Largest error of an element against the sum of `f64`. Values are up to 1.
const TOLERANCE: f32 = 2e-5;

pub fn all(report: &mut Report, bench: &Bench) {
    for (name, is_bf16) in [("f16", false), ("bf16", true)] {
        for block in [512, 4096] {
            report.test(&format!("paged/shapes/{name}/block-{block}"), |_| {
                shapes(bench, is_bf16, block)
            });
        }
    }
    report.test("paged/large", |_| large(bench));
    report.test("paged/missing-pages", |_| missing(bench));
    report.test("paged/usage", |_| usage(bench));
    report.test("paged/graph", |_| graph(bench));
    for (name, fault) in [
        ("status", "status:0x281@op=read,nth=9"),
        ("dropped", "drop@op=read,nth=9"),
        ("late", "delay:LATE@op=read,nth=9"),
        ("reordered", "reorder@op=read,every=5"),
        ("torn-cqe", "torncqe@op=read,nth=9"),
        ("wrong-cid", "wrongcid:0xfff@op=read,nth=9"),
        ("dead-cfs", "cfs@op=read,nth=9"),
        ("all-ones", "allones@op=read,nth=9"),
    ] {
        report.test(&format!("paged/fault/{name}"), |_| {
            faults(bench, name, fault)
        });
    }
    choose::all(report, bench);
}

struct Drive {
    store: Arc<Store>,
    kernels: PagedKernels,
    stream: Stream,
}

impl Drive {
    fn new(bench: &Bench, block: u32, fault: &str, timeout: Duration) -> Outcome<Self> {
        let device = simulated(32, block, fault);
        let open = || -> nvme_host::Result<Self> {
            let options = few_stations(bench, timeout);
            Ok(Self {
                store: Arc::new(Store::open(&device, &options)?),
                kernels: PagedKernels::load(&bench.gpu)?,
                stream: Stream::new(&bench.gpu)?,
            })
        };
        open().map_err(text)
    }

    fn memory<T>(&self, values: &[T], bytes: impl Fn(&T) -> Vec<u8>) -> Outcome<DeviceMemory> {
        let bytes: Vec<u8> = values.iter().flat_map(bytes).collect();
        let gpu = self.store.gpu().ok_or("a store without a GPU")?;
        let memory = DeviceMemory::new(gpu, bytes.len().max(16)).map_err(text)?;
        memory.upload(0, &bytes).map_err(text)?;
        Ok(memory)
    }

    fn words(&self, values: &[u32]) -> Outcome<DeviceMemory> {
        self.memory(values, |value| value.to_le_bytes().to_vec())
    }

    fn numbers(&self, values: &[f32]) -> Outcome<DeviceMemory> {
        self.memory(values, |value| value.to_le_bytes().to_vec())
    }
}

/// The parameters of a case.
#[derive(Clone, Copy)]
struct Case {
    shape: KvShape,
    sequences: u32,
    /// Queries of each head of keys.
    group: u32,
    per_head: bool,
    /// Pages of a sequence at most, and of the drive.
    most_pages: u32,
    pages: u32,
    has_tail: bool,
}

/// Pages on the drive, queries, tables, and the memory of the results.
struct Job {
    case: Case,
    pages: KvStore,
    /// The same pages on a drive without faults, which the CPU reads.
    oracle: KvStore,
    queries: Vec<f32>,
    ids: Vec<u32>,
    counts: Vec<u32>,
    tails: Vec<u8>,
    tail_counts: Vec<u32>,
    scale: f32,
    words: PagedQueries,
    device_ids: DeviceMemory,
    y: DeviceMemory,
    _memory: Vec<DeviceMemory>,
}

/// Halves between -1 and 1.
fn halves(shape: KvShape, bytes: u64, throw: &mut impl FnMut(u64) -> u64) -> Vec<u8> {
    let one = |_| {
        let value = throw(2001) as f32 / 1000.0 - 1.0;
        shape.stored(value).to_le_bytes()
    };
    (0..bytes / 2).flat_map(one).collect()
}

impl Job {
    fn new(drive: &Drive, case: Case, seed: u64) -> Outcome<Self> {
        let mut throw = dice(seed);
        let shape = case.shape;
        let offset = 8192;
        let pages = KvStore::new(&drive.store, offset, case.pages.into(), shape).map_err(text)?;
        let bytes = shape.page_bytes() * u64::from(case.pages);
        let image = halves(shape, bytes, &mut throw);
        let store = Store::open("sim:mem?size=32MiB&block=512", &StoreOptions::default());
        let store = Arc::new(store.map_err(text)?);
        let oracle = KvStore::new(&store, offset, case.pages.into(), shape).map_err(text)?;
        for store in [&store, &drive.store] {
            store.write_at(offset, &image).map_err(text)?;
        }
        let heads = shape.kv_heads * case.group;
        let vectors = case.sequences * heads;
        let elements = (vectors * shape.head_elements) as usize;
        let queries: Vec<f32> = (0..elements)
            .map(|_| throw(4001) as f32 / 1000.0 - 2.0)
            .collect();
        let tables = case.sequences * if case.per_head { shape.kv_heads } else { 1 };
        let ids: Vec<u32> = (0..tables * case.most_pages)
            .map(|_| throw(case.pages.into()) as u32)
            .collect();
        // Tables have no pages, all pages, or other numbers of them.
        let counts: Vec<u32> = (0..tables)
            .map(|table| match table % 4 {
                0 => case.most_pages,
                1 => 0,
                _ => throw(u64::from(case.most_pages) + 1) as u32,
            })
            .collect();
        let tails = match case.has_tail {
            true => halves(
                shape,
                shape.page_bytes() * u64::from(case.sequences),
                &mut throw,
            ),
            false => Vec::new(),
        };
        let tail_counts: Vec<u32> = (0..case.sequences)
            .map(|_| throw(u64::from(shape.page_tokens) + 1) as u32)
            .collect();
        let scale = 1.0 / (shape.head_elements as f32).sqrt();
        let mut words = PagedQueries {
            sequences: case.sequences,
            heads,
            per_head: case.per_head,
            most_pages: case.most_pages,
            scale,
            ..PagedQueries::default()
        };
        let memory = [
            drive.numbers(&queries)?,
            drive.words(&counts)?,
            drive.memory(&tails, |byte| vec![*byte])?,
            drive.words(&tail_counts)?,
            drive.memory(
                &vec![0xFFu8; PagedKernels::workspace_bytes(&pages, &words) as usize],
                |byte| vec![*byte],
            )?,
        ];
        let device_ids = drive.words(&ids)?;
        let y = drive.numbers(&vec![POISON; elements + GUARD])?;
        [
            words.queries,
            words.counts,
            words.tail,
            words.tail_counts,
            words.workspace,
        ] = memory.each_ref().map(DeviceMemory::address);
        (words.pages, words.y) = (device_ids.address(), y.address());
        if !case.has_tail {
            words.tail = 0;
        }
        Ok(Self {
            case,
            pages,
            oracle,
            queries,
            ids,
            counts,
            tails,
            tail_counts,
            scale,
            words,
            device_ids,
            y,
            _memory: memory.into(),
        })
    }

    fn start_on(&self, drive: &Drive, stream: u64) -> nvme_host::Result<PendingRows> {
        // SAFETY: the memory outlives the launch, which is waited for.
        unsafe { drive.kernels.attend(&self.pages, &self.words, stream) }
    }

    fn poison(&self) -> Outcome<()> {
        let all = vec![POISON; self.queries.len() + GUARD];
        let bytes: Vec<u8> = all.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.y.upload(0, &bytes).map_err(text)
    }

    fn run(&self, drive: &Drive) -> Outcome<RowFailures> {
        self.poison()?;
        let pending = self.start_on(drive, drive.stream.handle()).map_err(text)?;
        // Nothing else is waited for: the results are complete now.
        let ended = pending.wait(limit()).map_err(text)?;
        self.check(ended.failures)?;
        Ok(ended.failures)
    }

    /// Returns the table of a head: its pages.
    fn table(&self, sequence: u32, kv_head: u32) -> &[u32] {
        let table = match self.case.per_head {
            true => sequence * self.case.shape.kv_heads + kv_head,
            false => sequence,
        };
        let first = (table * self.case.most_pages) as usize;
        &self.ids[first..first + self.counts[table as usize] as usize]
    }

    /// Checks each head over all its pages.
    fn check(&self, failures: RowFailures) -> Outcome<()> {
        self.check_over(failures, |sequence, kv_head| {
            Ok(self.table(sequence, kv_head).to_vec())
        })
    }

    /// Checks each head over the pages that `table` gives: right, or NaN throughout. Those that are NaN are counted.
    fn check_over(
        &self,
        failures: RowFailures,
        table: impl Fn(u32, u32) -> Outcome<Vec<u32>>,
    ) -> Outcome<()> {
        let shape = self.case.shape;
        let elements = shape.head_elements as usize;
        let mut bytes = vec![0; self.y.len()];
        self.y.download(0, &mut bytes).map_err(text)?;
        let words = bytes.as_chunks::<4>().0.iter();
        let all: Vec<f32> = words.map(|word| f32::from_le_bytes(*word)).collect();
        if all[self.queries.len()..]
            .iter()
            .any(|guard| *guard != POISON)
        {
            return Err("elements behind the results were written".to_owned());
        }
        let group = (self.case.group as usize) * elements;
        let mut lost = None;
        for head in 0..self.case.sequences * shape.kv_heads {
            let (sequence, kv_head) = (head / shape.kv_heads, head % shape.kv_heads);
            let first = head as usize * group;
            let found = &all[first..first + group];
            if found.iter().all(|y| y.is_nan()) {
                lost = lost.or(Some(u64::from(head)));
                continue;
            }
            let page = shape.page_bytes() as usize;
            let (tail, tokens) = match self.case.has_tail {
                true => (
                    &self.tails[sequence as usize * page..][..page],
                    self.tail_counts[sequence as usize],
                ),
                false => (&[][..], 0),
            };
            let queries: Vec<Vec<f32>> = self.queries[first..first + group]
                .chunks(elements)
                .map(<[f32]>::to_vec)
                .collect();
            let table = table(sequence, kv_head)?;
            let expected = self
                .oracle
                .attend(&queries, &table, kv_head, (tail, tokens), self.scale)
                .map_err(text)?;
            for (at, (found, expected)) in found.iter().zip(expected.iter().flatten()).enumerate() {
                // A result that is NaN only in part is an error, too.
                if found.is_nan() || (found - expected).abs() > TOLERANCE {
                    return Err(format!(
                        "sequence {sequence}, head {kv_head}, {} pages: element {at} is {found}, not {expected}",
                        table.len()
                    ));
                }
            }
        }
        match (failures.first.map(|(row, _)| row), failures.rows > 0) {
            (first, any) if first == lost && any == lost.is_some() => Ok(()),
            _ => Err(format!(
                "the first head that is NaN is {lost:?}: {failures:?}"
            )),
        }
    }
}

const SHAPE: KvShape = KvShape {
    kv_heads: 2,
    head_elements: 64,
    page_tokens: 16,
    is_bf16: false,
};

const CASE: Case = Case {
    shape: SHAPE,
    sequences: 2,
    group: 4,
    per_head: false,
    most_pages: 40,
    pages: 100,
    has_tail: true,
};

fn shapes(bench: &Bench, is_bf16: bool, block: u32) -> Outcome<String> {
    let drive = Drive::new(bench, block, "", limit())?;
    let mut done = 0;
    for (kv_heads, head_elements, page_tokens) in [
        (1, 64, 16),
        (2, 128, 8),
        (3, 32, 32),
        (2, 96, 64),
        (8, 128, 16),
    ] {
        let shape = KvShape {
            kv_heads,
            head_elements,
            page_tokens,
            is_bf16,
        };
        if !shape.piece_bytes().is_multiple_of(block.into()) {
            continue;
        }
        for (sequences, group, per_head, most_pages, has_tail) in [
            (1, 1, false, 1, false),
            (1, 8, false, 33, true),
            (4, 3, true, 7, true),
            (5, 9, false, 20, false),
            (9, 4, true, 3, true),
        ] {
            let case = Case {
                shape,
                sequences,
                group,
                per_head,
                // Few pages, because the stand-in runs the lanes of a launch as coroutines, which take long.
                most_pages: most_pages.min((bench.commands / 100) as u32),
                pages: 50,
                has_tail,
            };
            let job = Job::new(&drive, case, u64::from(kv_heads * 100 + sequences))?;
            let failures = job.run(&drive)?;
            if failures.rows != 0 {
                return Err(format!("{shape:?}: {failures:?}"));
            }
            done += 1;
        }
    }
    // No sequence at all.
    let none = Job::new(
        &drive,
        Case {
            sequences: 0,
            ..CASE
        },
        1,
    );
    none?.run(&drive)?;
    Ok(format!("{done} shapes"))
}

/// Each warp has many pieces: its stages are reused often, and its parts follow one another.
fn large(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 4096, "", limit())?;
    let case = Case {
        sequences: 3,
        group: 2,
        most_pages: 1200,
        pages: 400,
        per_head: true,
        ..CASE
    };
    let job = Job::new(&drive, case, 5)?;
    let failures = job.run(&drive)?;
    match failures.rows {
        0 => Ok(format!("{} pages", job.counts.iter().sum::<u32>())),
        _ => Err(format!("{failures:?}")),
    }
}

/// A page that is not there makes its head NaN, and no other.
fn missing(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 4096, "", limit())?;
    let case = Case {
        sequences: 4,
        per_head: true,
        ..CASE
    };
    let mut job = Job::new(&drive, case, 6)?;
    for (head, id) in [(0, 100u32), (4, u32::MAX)] {
        let at = head * case.most_pages as usize + 39;
        job.ids[at] = id;
        job.device_ids
            .upload(at * 4, &id.to_le_bytes())
            .map_err(text)?;
    }
    let failures = job.run(&drive)?;
    match failures.first {
        Some((0, code::OUT_OF_RANGE)) if failures.rows == 2 => Ok("2 heads of 8".to_owned()),
        _ => Err(format!("{failures:?}")),
    }
}

fn usage(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 512, "", limit())?;
    let job = Job::new(&drive, CASE, 1)?;
    let long = KvShape {
        page_tokens: 256,
        ..SHAPE
    };
    let long = KvStore::new(&drive.store, 0, 4, long).map_err(text)?;
    type Refused<'p> = (&'static str, &'p KvStore, fn(&mut PagedQueries));
    let changed: [Refused<'_>; 5] = [
        ("no heads", &job.pages, |words| words.heads = 0),
        ("no multiple", &job.pages, |words| words.heads = 7),
        ("an odd address", &job.pages, |words| words.y += 2),
        ("an odd tail", &job.pages, |words| words.tail += 4),
        ("a part longer than a stage", &long, |_| ()),
    ];
    for (what, pages, change) in changed {
        let mut words = job.words;
        change(&mut words);
        // SAFETY: the call is refused and launches nothing.
        let refused = unsafe { drive.kernels.attend(pages, &words, drive.stream.handle()) };
        if refused.map(drop).map_err(|error| error.exit_code()) != Err(2) {
            return Err(format!("{what} is not refused"));
        }
    }
    job.run(&drive)?;
    Ok("5 refused".to_owned())
}

/// A graph attends to the pages that its tables name when it is launched.
fn graph(bench: &Bench) -> Outcome<String> {
    let drive = Drive::new(bench, 4096, "", limit())?;
    let mut job = Job::new(&drive, CASE, 9)?;
    let captured = CudaGraph::capture(&drive.stream, |stream| job.start_on(&drive, stream));
    let (graph, pending) = captured.map_err(text)?;
    for round in 1..=3u32 {
        for (at, id) in job.ids.iter_mut().enumerate() {
            *id = (*id + round * 7 + at as u32) % CASE.pages;
        }
        let bytes: Vec<u8> = job.ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        job.device_ids.upload(0, &bytes).map_err(text)?;
        job.poison()?;
        graph.launch(&drive.stream).map_err(text)?;
        let begin = Instant::now();
        while pending.ended() != round {
            if begin.elapsed() > limit() {
                return Err(format!("launch {round} does not end"));
            }
            std::thread::yield_now();
        }
        job.check(pending.last().failures)?;
        paged::check(&job.pages, pending.last()).map_err(text)?;
    }
    Ok("3 launches of other pages".to_owned())
}

/// Heads whose reads fail are NaN and counted, none is wrong, and later ones are complete if the controller comes back.
fn faults(bench: &Bench, name: &str, fault: &str) -> Outcome<String> {
    let (fault, timeout) = planned(bench, fault);
    let drive = Drive::new(bench, 4096, &fault, timeout)?;
    let job = Job::new(&drive, CASE, 8)?;
    until_whole(name, (1, 1), "parts", || job.run(&drive))
}
