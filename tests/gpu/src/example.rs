//! Kernels of users that link the core: the histogram in Rust, and in CUDA C++ if it was built.
// UNSAFETY: launches kernels over raw addresses.
#![allow(unsafe_code)]

use crate::bench::{Bench, Tier};
use crate::gather::Drive;
use crate::limits::{finish, limit};
use crate::report::{End, Report};
use crate::rig::{Rig, Shape};
use crate::sim::{BLOCK, IMAGE_SEED, Model};
use gpu_histogram::{Args, Walk};
use nvme_gpu_kernel::rows::code;
use nvme_gpu_kernel::work::data_word;
use nvme_host::cuda::{DeviceMemory, Module};

const IMAGE: u64 = 8 << 20;
/// Blocks of a unit, and threads.
const BLOCKS: u32 = 8;
const GRID: u32 = 8;
const THREADS: u32 = 128;

/// The example in CUDA C++ for each architecture; empty where this program was built without nvcc.
const CUDA: [&[u8]; 3] = [
    include_bytes!(concat!(env!("OUT_DIR"), "/histogram.sm_80.cubin")),
    include_bytes!(concat!(env!("OUT_DIR"), "/histogram.sm_90.cubin")),
    include_bytes!(concat!(env!("OUT_DIR"), "/histogram.sm_100.cubin")),
];

/// The embedded kernels, or instead of the one in CUDA C++ that of `--image`.
pub fn all(report: &mut Report, bench: &Bench) {
    report.test("example/rust-histogram", |_| {
        run(bench, gpu_histogram::PTX.as_bytes())
    });
    report.case("example/cuda-histogram", |options| {
        let result = match &options.image {
            Some(file) => std::fs::read(file)
                .map_err(|error| format!("{file}: {error}"))
                .and_then(|image| run(bench, &image)),
            None => match for_this_gpu(bench) {
                Ok(image) => run(bench, image),
                Err(why) => return End::Skipped(why.to_owned()),
            },
        };
        match result {
            Ok(seen) => End::Passed(seen),
            Err(why) => End::Failed(why),
        }
    });
    report.test("example/rust-walk", |_| {
        walk(bench, gpu_histogram::PTX.as_bytes())
    });
    report.case("example/cuda-walk", |_| match for_this_gpu(bench) {
        Ok(image) => walk(bench, image).into(),
        Err(why) => End::Skipped(why.to_owned()),
    });
}

/// Walks from row to row by ids that the rows hold; then a walk with ids out of range, and one over a closed store.
fn walk(bench: &Bench, image: &[u8]) -> Result<String, String> {
    const WALKS: u32 = 500;
    const STEPS: u32 = 40;
    let text = |error: nvme_host::Error| error.to_string();
    let module = Module::load(&bench.gpu, image).map_err(text)?;
    let function = module.function("walk").map_err(text)?;
    let drive = Drive::new(bench, 512, "", limit())?;
    let table = drive.table(8, 1544);
    let rows = drive.rows(&table)?;
    let starts: Vec<i64> = (0..i64::from(WALKS))
        .map(|walk| if walk == 7 { -1 } else { walk })
        .collect();
    let make = || -> nvme_host::Result<_> {
        let memory = DeviceMemory::new(&bench.gpu, WALKS as usize * 16)?;
        let ids: Vec<u8> = starts.iter().flat_map(|id| id.to_le_bytes()).collect();
        memory.upload(0, &ids)?;
        Ok((memory, rows.device_rows()?))
    };
    let (memory, words) = make().map_err(text)?;
    let args = Walk {
        table: words,
        starts: memory.address(),
        ends: memory.address() + u64::from(WALKS) * 8,
        walks: WALKS,
        steps: STEPS,
    };
    let run = || -> Result<Vec<i64>, String> {
        // SAFETY: the kernel takes one `Walk`, whose memory outlives it: it is waited for.
        let launched = unsafe { module.launch(&drive.stream, function, 8, 64, &args) };
        launched.map_err(text)?;
        finish(&drive.stream);
        let mut ends = vec![0; WALKS as usize * 8];
        memory.download(ends.len(), &mut ends).map_err(text)?;
        let ends = ends.as_chunks::<8>().0;
        Ok(ends.iter().map(|end| i64::from_le_bytes(*end)).collect())
    };
    let begin = std::time::Instant::now();
    let ends = run()?;
    let took = begin.elapsed();
    let image = drive.read_all()?;
    for (start, end) in starts.iter().zip(&ends) {
        let mut id = *start;
        for _ in 0..STEPS {
            if id < 0 {
                id = i64::from(code::OUT_OF_RANGE) - (1 << 32);
                break;
            }
            let at = 8 + id as usize * 1544;
            let word = image[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
            id = (word % table.rows) as i64;
        }
        if id != *end {
            return Err(format!("the walk from {start} ends at {end}, not {id}"));
        }
    }
    drop(rows);
    let stream = drive.leave_stream();
    // SAFETY: as above; the store is closed, so the kernel touches nothing of it.
    let launched = unsafe { module.launch(&stream, function, 8, 64, &args) };
    launched.map_err(text)?;
    finish(&stream);
    let mut last = [0; 8];
    memory
        .download(WALKS as usize * 16 - 8, &mut last)
        .map_err(text)?;
    match i64::from_le_bytes(last) + (1 << 32) == i64::from(code::GONE) {
        true => Ok(format!(
            "{WALKS} walks of {STEPS} rows, {:.1} us a row of each",
            took.as_secs_f64() * 1e6 / f64::from(STEPS)
        )),
        false => Err(format!("over a closed store: {last:?}")),
    }
}

/// Returns the embedded image that this GPU takes.
fn for_this_gpu(bench: &Bench) -> Result<&'static [u8], &'static str> {
    let mut built = CUDA
        .into_iter()
        .filter(|image| !image.is_empty())
        .peekable();
    if built.peek().is_none() {
        return Err("built without nvcc: use cargo xtask gpu-test --bundle, or --image FILE");
    }
    built
        .find(|image| Module::load(&bench.gpu, image).is_ok())
        .ok_or("the image inside is for sm_80, sm_90 and sm_100: give --image FILE for this GPU")
}

fn run(bench: &Bench, image: &[u8]) -> Result<String, String> {
    let text = |error: nvme_host::Error| error.to_string();
    let module = Module::load(&bench.gpu, image).map_err(text)?;
    let function = module.function("histogram").map_err(text)?;
    let unit_bytes = BLOCKS * BLOCK;
    let threads = u64::from(GRID * THREADS);
    let shape = Shape {
        tier: Tier::Pinned,
        queues: 4,
        entries: 128,
        slots: 127,
        start: 0,
        data: (2 * threads * u64::from(unit_bytes)) as usize,
    };
    let model = Model {
        image: IMAGE,
        dstrd: 0,
        faults: &[],
        threads: 4,
    };
    let rig = Rig::new(bench, shape, &model)?;
    let launch = rig.launch()?;
    let counts = DeviceMemory::new(&bench.gpu, 257 * 8).map_err(text)?;
    let args = Args {
        queues: rig.queues(),
        lba: 0,
        units: IMAGE / u64::from(unit_bytes),
        buffers: launch.data,
        buffers_iova: launch.data_iova,
        bins: counts.address(),
        failed: counts.address() + 256 * 8,
        timeout_ns: 2_000_000_000 * bench.patience,
        nsid: 1,
        blocks: BLOCKS,
        unit_bytes,
        reserved: 0,
    };
    // SAFETY: the kernel takes one `Args`; its addresses are memory that lives to the end of this
    // function, and when the kernel does not end in time, the program does.
    unsafe { module.launch(&bench.stream, function, GRID, THREADS, &args) }.map_err(text)?;
    bench.wait();
    let mut bytes = vec![0; counts.len()];
    counts.download(0, &mut bytes).map_err(text)?;
    let word = |b: &[u8]| {
        b.iter()
            .rev()
            .fold(0, |sum, &byte| sum << 8 | u64::from(byte))
    };
    let counted: Vec<u64> = bytes.chunks_exact(8).map(word).collect();
    if counted[256] != 0 {
        return Err(format!("{} units could not be read", counted[256]));
    }
    let (registers, stack) = module.cost(function).map_err(text)?;
    let expected = expected();
    match (0..256).find(|&byte| counted[byte] != expected[byte]) {
        None => Ok(format!(
            "{} MiB counted, {registers} registers, {stack} bytes of stack",
            IMAGE >> 20
        )),
        Some(byte) => Err(format!("{} bytes of value {byte:#x}", counted[byte])),
    }
}

/// Returns the histogram of the image.
fn expected() -> [u64; 256] {
    let mut bins = [0; 256];
    for byte in (0..IMAGE / 8).flat_map(|index| data_word(IMAGE_SEED, index).to_le_bytes()) {
        bins[usize::from(byte)] += 1;
    }
    bins
}
