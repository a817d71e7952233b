//! Measures one step of attention over pages of keys and values on a drive, beside other paths for the same pages.
//!
//! ```sh
//! cargo run --release -p nvme-models --example paged_attention -- DEVICE [SEQUENCES] [PAGES] [TOKENS] [RUNS] [STATIONS]
//! ```
//!
//! DEVICE is overwritten: a simulated drive. Each of SEQUENCES sequences has PAGES pages of TOKENS tokens, anywhere on the
//! drive, by a table in GPU memory; 64 heads of queries, 8 of keys and values, 128 elements, bf16. STATIONS (32) blocks
//! read at a time. Ways, in turns:
//!
//! - `attend`: the kernel reads the pages while it attends. One head of each run is compared with the CPU's result.
//! - `gather`: the GPU reads the pages into its memory. No attention.
//! - `by_cpu`: the table is copied to the host, 8 threads read the pages to pinned memory, and the copy engine copies
//!   them to the GPU, without attention.
//!
//! It prints one line of JSON: medians, and the outcome of each run.
// UNSAFETY: launches and copies over this program's own memory.
#![allow(unsafe_code)]

#[path = "../../compute/examples/arguments/mod.rs"]
mod arguments;

use arguments::Arguments;
use nvme_host::bench::median;
use nvme_host::cuda::{
    DeviceMemory, Gpu, RegisteredMemory, RowRequest, RowsOptions, Stream, StreamEvent,
};
use nvme_host::store::{GpuOptions, RowIds};
use nvme_host::{DmaPages, Error, Result, Store, StoreOptions};
use nvme_models::paged::{self, PagedKernels, PagedQueries};
use nvme_models::{KvShape, KvStore};
use std::sync::Arc;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);
const HEADS: u32 = 64;
const THREADS: usize = 8;
/// Bytes that a thread of the CPU reads at a time.
const CHUNK: u64 = 4 << 20;

fn main() -> std::process::ExitCode {
    arguments::end(run)
}

fn run(words: &Arguments) -> Result<()> {
    let Some(device) = words.first() else {
        return Err(Error::usage(
            "no DEVICE",
            "name a simulated drive, as sim:mem?size=4GiB",
        ));
    };
    if !device.starts_with("sim:mem") {
        return Err(Error::usage(
            format!("{device} would be overwritten"),
            "use sim:mem",
        ));
    }
    let shape = KvShape {
        kv_heads: 8,
        head_elements: 128,
        page_tokens: words.number(3, 16)?,
        is_bf16: true,
    };
    let (sequences, pages) = (words.number(1, 8)?, words.number(2, 1024)?);
    let rig = Rig::new(device, shape, (sequences, pages), words.number(5, 32)?)?;
    let runs = words.number(4, 5)?;
    let mut seconds: [Vec<f64>; 3] = Default::default();
    for run in 0..=runs {
        rig.choose(run as u64)?;
        let each = [
            rig.timed(Rig::attend)?,
            rig.timed(Rig::gather)?,
            rig.timed(Rig::by_cpu)?,
        ];
        rig.check(run)?;
        for (all, one) in seconds.iter_mut().zip(each).filter(|_| run > 0) {
            all.push(one);
        }
    }
    let bytes = rig.bytes();
    let rate = |at: usize| bytes as f64 / median(&seconds[at]) / 1e9;
    println!(
        "{{\"device\":\"{device}\",\"gpu\":\"{}\",\"sequences\":{},\"pages\":{},\"page_tokens\":{},\"page_bytes\":{},\"bytes\":{bytes},\
         \"attend_gb_per_s\":{:.2},\"gather_gb_per_s\":{:.2},\"by_cpu_gb_per_s\":{:.2},\"seconds\":{seconds:.5?},\
         \"registers\":{:?},\"checked\":true}}",
        rig.gpu.describe(),
        rig.queries.sequences,
        rig.queries.most_pages,
        shape.page_tokens,
        shape.page_bytes(),
        rate(0),
        rate(1),
        rate(2),
        rig.kernels.cost()?,
    );
    Ok(())
}

struct Rig {
    gpu: Arc<Gpu>,
    pages: KvStore,
    kernels: PagedKernels,
    stream: Stream,
    queries: PagedQueries,
    vectors: Vec<f32>,
    /// Numbers of pages as `u32` and as `i64`.
    ids: DeviceMemory,
    wide_ids: DeviceMemory,
    y: DeviceMemory,
    there: DeviceMemory,
    readers: Vec<Reader>,
    _memory: [DeviceMemory; 3],
}

/// Buffer of a thread of the CPU: two halves of pinned memory.
struct Reader {
    stream: Stream,
    copied: [StreamEvent; 2],
    _registered: RegisteredMemory,
    pages: Arc<DmaPages>,
}

impl Rig {
    fn new(
        device: &str,
        shape: KvShape,
        (sequences, most_pages): (u32, u32),
        stations: u32,
    ) -> Result<Self> {
        let options = StoreOptions {
            queues: THREADS as u32,
            gpu: Some(GpuOptions {
                index: 0,
                rows: RowsOptions {
                    queues: 32,
                    stations,
                    ..RowsOptions::default()
                },
            }),
            ..StoreOptions::default()
        };
        let store = Arc::new(Store::open(device, &options)?);
        let gpu = Arc::clone(store.gpu().ok_or_else(|| Error::internal("no GPU"))?);
        let count = store.len() / shape.page_bytes();
        let pages = KvStore::new(&store, 0, count, shape)?;
        fill(&store, shape)?;
        let vectors: Vec<f32> = (0..sequences * HEADS * shape.head_elements)
            .map(|at| noise(u64::from(at)) * 2.0)
            .collect();
        let bytes =
            |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|v| v.to_le_bytes()).collect() };
        let from = DeviceMemory::new(&gpu, vectors.len() * 4)?;
        from.upload(0, &bytes(&vectors))?;
        let counts = DeviceMemory::new(&gpu, sequences as usize * 4)?;
        counts.upload(0, &most_pages.to_le_bytes().repeat(sequences as usize))?;
        let y = DeviceMemory::new(&gpu, vectors.len() * 4)?;
        let all = (sequences * most_pages) as usize;
        let ids = DeviceMemory::new(&gpu, all * 4)?;
        let mut queries = PagedQueries {
            queries: from.address(),
            sequences,
            heads: HEADS,
            pages: ids.address(),
            counts: counts.address(),
            most_pages,
            y: y.address(),
            scale: 1.0 / (shape.head_elements as f32).sqrt(),
            ..PagedQueries::default()
        };
        let workspace = PagedKernels::workspace_bytes(&pages, &queries);
        let workspace = DeviceMemory::new(&gpu, workspace as usize)?;
        queries.workspace = workspace.address();
        let reader = |_| {
            let pages = Arc::new(DmaPages::new(2 * CHUNK as usize)?);
            Ok(Reader {
                stream: Stream::new(&gpu)?,
                copied: [StreamEvent::untimed(&gpu)?, StreamEvent::untimed(&gpu)?],
                _registered: RegisteredMemory::pages(&gpu, &pages)?,
                pages,
            })
        };
        Ok(Self {
            readers: (0..THREADS).map(reader).collect::<Result<_>>()?,
            kernels: PagedKernels::load(&gpu)?,
            stream: Stream::new(&gpu)?,
            wide_ids: DeviceMemory::new(&gpu, all * 8)?,
            there: DeviceMemory::new(&gpu, all * shape.page_bytes() as usize)?,
            gpu,
            pages,
            queries,
            vectors,
            ids,
            y,
            _memory: [from, counts, workspace],
        })
    }

    fn bytes(&self) -> u64 {
        let all = u64::from(self.queries.sequences) * u64::from(self.queries.most_pages);
        all * self.pages.shape().page_bytes()
    }

    fn chosen(&self, run: u64) -> Vec<u32> {
        let count = self.pages.table().rows();
        let all = self.queries.sequences * self.queries.most_pages;
        let one = |at: u32| (mixed(run << 32 | u64::from(at)) % count) as u32;
        (0..all).map(one).collect()
    }

    /// Chooses other pages for this run.
    fn choose(&self, run: u64) -> Result<()> {
        let ids = self.chosen(run);
        let narrow: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let wide: Vec<u8> = ids
            .iter()
            .flat_map(|id| i64::from(*id).to_le_bytes())
            .collect();
        self.ids.upload(0, &narrow)?;
        self.wide_ids.upload(0, &wide)
    }

    fn timed(&self, way: impl FnOnce(&Self) -> Result<()>) -> Result<f64> {
        let begin = Instant::now();
        way(self)?;
        self.stream.wait(LIMIT, || Ok(()))?;
        Ok(begin.elapsed().as_secs_f64())
    }

    fn attend(&self) -> Result<()> {
        let stream = self.stream.handle();
        // SAFETY: the memory belongs to this rig, which waits for the launch.
        let pending = unsafe { self.kernels.attend(&self.pages, &self.queries, stream)? };
        paged::check(&self.pages, pending.wait(LIMIT)?)
    }

    fn gather(&self) -> Result<()> {
        let bytes = self.pages.shape().page_bytes();
        let request = RowRequest {
            ids: self.wide_ids.address(),
            wide_ids: true,
            count: self.bytes() / bytes,
            out: self.there.address(),
            out_stride: bytes,
            status: 0,
        };
        let table = self.pages.table();
        // SAFETY: as above.
        let pending = unsafe { table.gather_on_gpu(&request, self.stream.handle())? };
        match pending.wait(LIMIT)?.failures.rows {
            0 => Ok(()),
            rows => Err(Error::internal(format!("{rows} pages were not read"))),
        }
    }

    fn by_cpu(&self) -> Result<()> {
        let mut bytes = vec![0; self.wide_ids.len()];
        self.wide_ids.download(0, &mut bytes)?;
        let words = bytes.as_chunks::<8>().0.iter();
        let ids: Vec<i64> = words.map(|word| i64::from_le_bytes(*word)).collect();
        std::thread::scope(|scope| {
            let share = ids.len().div_ceil(THREADS);
            let readers = self.readers.iter().zip(ids.chunks(share)).enumerate();
            let read =
                |(at, (reader, ids))| scope.spawn(move || self.read(reader, at * share, ids));
            let all: Vec<_> = readers.map(read).collect();
            all.into_iter().try_for_each(|thread| {
                let panicked = |_| Err(Error::internal("a thread of the benchmark panicked"));
                thread.join().unwrap_or_else(panicked)
            })
        })
    }

    /// Reads the pages `ids`, whose positions begin at `first`, through the two halves of a buffer in turns.
    fn read(&self, reader: &Reader, first: usize, ids: &[i64]) -> Result<()> {
        let page = self.pages.shape().page_bytes() as usize;
        let step = (CHUNK as usize / page).max(1);
        for (turn, ids) in ids.chunks(step).enumerate() {
            let half = turn % 2;
            if turn > 1 {
                reader.copied[half].wait()?;
            }
            // SAFETY: the range is a half of this thread's buffer, whose last copy has ended.
            let data = unsafe {
                let from = reader.pages.start().add(half * CHUNK as usize);
                std::slice::from_raw_parts_mut(from, ids.len() * page)
            };
            self.pages
                .table()
                .gather(RowIds::I64(ids), data, None)?
                .check()?;
            let to = self.there.address() + ((first + turn * step) * page) as u64;
            // SAFETY: the target has room for these pages; the buffer stays until the stream has ended.
            unsafe { reader.stream.copy_in(to, data.as_ptr(), data.len())? };
            reader.copied[half].record_in(&reader.stream)?;
        }
        reader.stream.wait(LIMIT, || Ok(()))
    }

    /// Compares a head of the last step with the CPU's.
    fn check(&self, run: usize) -> Result<()> {
        let shape = self.pages.shape();
        let (elements, group) = (
            shape.head_elements as usize,
            (HEADS / shape.kv_heads) as usize,
        );
        let head = run * 13 % (self.queries.sequences * shape.kv_heads) as usize;
        let (sequence, kv_head) = (
            head / shape.kv_heads as usize,
            head % shape.kv_heads as usize,
        );
        let first = head * group * elements;
        let queries: Vec<Vec<f32>> = self.vectors[first..first + group * elements]
            .chunks(elements)
            .map(<[f32]>::to_vec)
            .collect();
        let ids = self.chosen(run as u64);
        let most = self.queries.most_pages as usize;
        let ids = &ids[sequence * most..][..most];
        let none = (&[][..], 0);
        let expected =
            self.pages
                .attend(&queries, ids, kv_head as u32, none, self.queries.scale)?;
        let mut bytes = vec![0; group * elements * 4];
        self.y.download(first * 4, &mut bytes)?;
        let words = bytes.as_chunks::<4>().0.iter();
        let found = words.map(|word| f32::from_le_bytes(*word));
        for (found, expected) in found.zip(expected.into_iter().flatten()) {
            if found.is_nan() || (found - expected).abs() > 1e-4 {
                return Err(Error::internal(format!(
                    "an element is {found}, not {expected}"
                )));
            }
        }
        Ok(())
    }
}

/// Fills the store with elements between -1 and 1.
fn fill(store: &Store, shape: KvShape) -> Result<()> {
    let mut chunk = vec![0; 16 << 20];
    let mut at = 0;
    while at < store.len() {
        let count = (store.len() - at).min(chunk.len() as u64) as usize;
        for (word, two) in chunk[..count].chunks_exact_mut(2).enumerate() {
            let value = noise(at / 2 + word as u64);
            two.copy_from_slice(&shape.stored(value).to_le_bytes());
        }
        store.write_at(at, &chunk[..count])?;
        at += count as u64;
    }
    Ok(())
}

fn noise(at: u64) -> f32 {
    (mixed(at) >> 40) as f32 / (1 << 23) as f32 - 1.0
}

fn mixed(at: u64) -> u64 {
    nvme_units::SplitMix::new(at).next_word()
}
