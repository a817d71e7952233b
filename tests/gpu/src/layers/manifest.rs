//! Layers that are verified by a manifest in the memory into which they were loaded, and the kernel that hashes them.
// UNSAFETY: launches take addresses of memory that the test has.
#![allow(unsafe_code)]

use super::{LAYER, LAYERS, Model, Outcome, SEED, STEP};
use crate::bench::Bench;
use crate::by_host::{DRIVE, STRIPE, Scratch};
use crate::gather::{dice, text};
use crate::limits::{finish, limit};
use crate::report::Report;
use nvme_gpu_kernel::work::data_word;
use nvme_host::cuda::{ChunkHasher, DeviceMemory, HashedChunk, HostWords, Stream, StreamEvent};
use nvme_host::loader::{LoaderOptions, ModelLayers};
use nvme_host::{Error, Manifest};
use std::ops::ControlFlow;
use std::time::Instant;
use xxhash_rust::xxh3::xxh3_64;

/// Memory that is hashed to measure the kernel: this many times 4 KiB for each command of a test.
const RATE_BYTES: u64 = 4096;

pub fn all(report: &mut Report, bench: &Bench) {
    report.test("layers/manifest/hashes", |_| hashes(bench));
    for (name, device) in [("drive", DRIVE), ("stripe", STRIPE)] {
        report.test(&format!("layers/manifest/passes/{name}"), |_| {
            passes(bench, device)
        });
    }
    report.test("layers/manifest/passes/file", |_| {
        let file = Scratch::new()?;
        passes(bench, &file.device())
    });
    report.test("layers/manifest/damage", |_| damage(bench));
    report.test("layers/manifest/errors", |_| errors(bench));
    report.test("layers/manifest/refused", |_| refused(bench));
    report.test("layers/manifest/rate", |_| rate(bench));
}

/// Memory with words of the seed, and the hasher.
struct Hashing {
    data: Vec<u8>,
    memory: DeviceMemory,
    hasher: ChunkHasher,
    stream: Stream,
}

impl Hashing {
    fn new(bench: &Bench, bytes: u64) -> Outcome<Self> {
        let words = (0..bytes / 8).map(|index| data_word(SEED, index));
        let data: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        let make = || -> nvme_host::Result<Self> {
            let memory = DeviceMemory::new(&bench.gpu, data.len())?;
            memory.upload(0, &data)?;
            Ok(Self {
                memory,
                hasher: ChunkHasher::load(&bench.gpu)?,
                stream: Stream::new(&bench.gpu)?,
                data,
            })
        };
        make().map_err(text)
    }

    /// Returns the kernel's hashes of chunks, counted from byte `base` on, and the seconds that they took.
    fn run(&self, bench: &Bench, base: u64, chunks: &[HashedChunk]) -> Outcome<(Vec<u64>, f64)> {
        let run = || -> nvme_host::Result<(Vec<u64>, f64)> {
            let words = chunks.iter().flat_map(|one| [one.at, one.bytes]);
            let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
            let table = DeviceMemory::new(&bench.gpu, bytes.len())?;
            table.upload(0, &bytes)?;
            let found = HostWords::new(&bench.gpu, chunks.len())?;
            let begin = StreamEvent::record(&self.stream)?;
            // SAFETY: the chunks lie in the memory, and each has a word for its hash; all of it stays until the stream
            // is done.
            unsafe {
                self.hasher.launch(
                    self.stream.handle(),
                    (table.address(), chunks.len() as u64),
                    self.memory.address() + base,
                    found.address(0),
                )?;
            }
            let end = StreamEvent::record(&self.stream)?;
            finish(&self.stream);
            let hashes = (0..chunks.len()).map(|index| found.get(index)).collect();
            Ok((hashes, end.seconds_since(&begin)?))
        };
        run().map_err(text)
    }
}

/// Each length up to 5,000 bytes, and long ones, from any byte of memory on, have the hash of the reference.
fn hashes(bench: &Bench) -> Outcome<String> {
    const BYTES: u64 = 8 << 20;
    let hashing = Hashing::new(bench, BYTES)?;
    let mut throw = dice(7);
    let long = [
        65_535,
        65_536,
        65_537,
        131_073,
        1 << 20,
        (1 << 20) + 777,
        3 << 20,
    ];
    let lengths: Vec<u64> = (0..=5000).chain(long).collect();
    let mut checked = 0;
    for base in [0, 8, 13, 4096 + 1] {
        let chunks: Vec<HashedChunk> = lengths
            .iter()
            .map(|bytes| HashedChunk {
                at: throw(BYTES - 8192 - bytes),
                bytes: *bytes,
            })
            // At multiples of 8, as tensors lie, too.
            .flat_map(|one| {
                [
                    one,
                    HashedChunk {
                        at: one.at / 8 * 8,
                        ..one
                    },
                ]
            })
            .collect();
        let (found, _) = hashing.run(bench, base, &chunks)?;
        for (chunk, found) in chunks.iter().zip(found) {
            let begin = (base + chunk.at) as usize;
            let expected = xxh3_64(&hashing.data[begin..begin + chunk.bytes as usize]);
            if found != expected {
                return Err(format!(
                    "{} bytes from byte {begin} on: {found:016x}, not {expected:016x}",
                    chunk.bytes
                ));
            }
            checked += 1;
        }
    }
    let (registers, local) = hashing.hasher.cost().map_err(text)?;
    Ok(format!(
        "{checked} chunks; {registers} registers, {local} bytes of local memory"
    ))
}

/// Returns the layers of a model with their manifest.
fn verified(layers: ModelLayers, image: &[u8]) -> nvme_host::Result<ModelLayers> {
    layers.verified_by(&manifest(image)?, 0)
}

fn manifest(image: &[u8]) -> nvme_host::Result<Manifest> {
    let parts: Vec<_> = (0..LAYERS).map(super::tensor).collect();
    let mut go_on = |_, _| ControlFlow::Continue(());
    Manifest::of(&image, image.len() as u64, &parts, &mut go_on)
}

/// A loader returns layers that match their manifest, in each pass, and verifies each read.
fn passes(bench: &Bench, device: &str) -> Outcome<String> {
    let mut verified_bytes = 0;
    for (slots, busy) in [(1, 4), (2, 16), (3, 0)] {
        let options = LoaderOptions {
            slots,
            ..LoaderOptions::default()
        };
        let model = Model::with(&bench.gpu, device, &options, verified)?;
        if model.loader.path().verified_by != Some("gpu") {
            return Err(format!("{:?}", model.loader.path()));
        }
        for _ in 0..3 {
            model.pass(busy).map_err(text)?;
            model.loader.check(limit()).map_err(text)?;
            model.check()?;
        }
        let stats = model.loader.stats();
        if stats.verified != stats.bytes || stats.bytes < 3 * LAYERS * LAYER - 2 * LAYER {
            return Err(format!("{stats:?}"));
        }
        verified_bytes += stats.verified;
    }
    Ok(format!("{verified_bytes} bytes verified"))
}

/// One bit of the drive is flipped: that layer is an error which names the place, every time, and the others are right.
/// With the bit restored all are right.
fn damage(bench: &Bench) -> Outcome<String> {
    const BAD: u64 = 4;
    let model = Model::with(&bench.gpu, DRIVE, &LoaderOptions::default(), verified)?;
    let mut seen = 0;
    for at in [0, 65_535, 65_536, 700_001, LAYER - 1] {
        let byte = BAD * STEP + 13 + at;
        let flip = || -> nvme_host::Result<()> {
            let mut one = [0];
            model.store.read_at(byte, &mut one)?;
            model.store.write_at(byte, &[one[0] ^ 0x40])
        };
        flip().map_err(text)?;
        let chunk = BAD * STEP + 13 + at / 65_536 * 65_536;
        for _ in 0..3 {
            seen += look_at_all(&model, Some((BAD, chunk)))?;
        }
        flip().map_err(text)?;
        // A layer that was read ahead before may still be the wrong one.
        let _ = one_layer(&model, BAD);
        look_at_all(&model, None)?;
    }
    Ok(format!("{seen} errors of 15 passes, the others right"))
}

/// Copies a layer out once it was loaded.
fn one_layer(model: &Model, index: u64) -> nvme_host::Result<()> {
    let layer = model
        .loader
        .layer_for(index as usize, model.stream.handle())?;
    layer.wait(limit())?;
    let to = model.out.address() + index * LAYER;
    // SAFETY: the copy is from the layer to its part of the output.
    unsafe {
        model
            .stream
            .copy_within(to, layer.address(), LAYER as usize)
    }
}

/// Asks for each layer: all are right but the layer `bad`, whose error names the chunk that begins at a byte of the
/// file. Returns the number of errors.
fn look_at_all(model: &Model, bad: Option<(u64, u64)>) -> Outcome<u32> {
    let mut errors = 0;
    for index in 0..LAYERS {
        match (one_layer(model, index), bad) {
            (Ok(()), Some((wrong, _))) if wrong == index => {
                return Err(format!("layer {index} is wrong, and was given out"));
            }
            (Ok(()), _) => {
                model.stream.finish().map_err(text)?;
                model.check_layer(index)?;
            }
            (Err(Error::Mismatch { what }), Some((wrong, chunk))) if wrong == index => {
                let place = format!("layer {wrong} (layer {wrong}): ");
                let bytes = format!(" bytes from byte {chunk} of the file on have the XXH3 ");
                if !what.starts_with(&place) || !what.contains(&bytes) {
                    return Err(what);
                }
                errors += 1;
            }
            (Err(error), _) => return Err(format!("layer {index}: {error}")),
        }
    }
    Ok(errors)
}

/// Reads that the drive refuses are its errors, not mismatches; a pass without an error has the right bytes.
fn errors(bench: &Bench) -> Outcome<String> {
    let faults: String = (60..90)
        .map(|nth| format!("&fault=status:0x281@op=read,nth={nth}"))
        .collect();
    let device = format!("{DRIVE}{faults}");
    let model = Model::with(&bench.gpu, &device, &LoaderOptions::default(), verified)?;
    let seen = super::until_right(&model, 1)?;
    match seen.iter().all(|code| code == "command") {
        true => Ok(format!("{} errors, then right", seen.len())),
        false => Err(format!("{seen:?}")),
    }
}

/// A manifest with other lengths is refused before anything is read.
fn refused(bench: &Bench) -> Outcome<String> {
    let cut = |layers: ModelLayers, image: &[u8]| {
        let short = &image[..image.len() - (STEP as usize) * 2];
        let parts: Vec<_> = (0..LAYERS - 3).map(super::tensor).collect();
        let mut go_on = |_, _| ControlFlow::Continue(());
        let manifest = Manifest::of(&short, short.len() as u64, &parts, &mut go_on)?;
        layers.verified_by(&manifest, 0)
    };
    let shifted = |layers: ModelLayers, image: &[u8]| layers.verified_by(&manifest(image)?, 1);
    let options = LoaderOptions::default();
    let mut said = Vec::new();
    for made in [
        Model::with(&bench.gpu, DRIVE, &options, cut),
        Model::with(&bench.gpu, DRIVE, &options, shifted),
    ] {
        match made {
            Err(said_so) if said_so.contains("layer layer ") => said.push(said_so),
            Err(other) => return Err(other),
            Ok(_) => return Err("a manifest of another file was taken".to_owned()),
        }
    }
    Ok(said.join("; "))
}

/// Measures the bytes that the kernel hashes in a second, and passes over layers with and without a manifest.
fn rate(bench: &Bench) -> Outcome<String> {
    let bytes = (bench.commands * RATE_BYTES).clamp(4 << 20, 1 << 30) / 65_536 * 65_536;
    let hashing = Hashing::new(bench, bytes)?;
    let of = |base: u64| -> Outcome<f64> {
        let chunks = (0..bytes / 65_536 - 1).map(|index| HashedChunk {
            at: index * 65_536,
            bytes: 65_536,
        });
        let chunks: Vec<HashedChunk> = chunks.collect();
        let mut best = f64::MAX;
        for _ in 0..5 {
            let (found, seconds) = hashing.run(bench, base, &chunks)?;
            best = best.min(seconds);
            let first = base as usize..base as usize + 65_536;
            if found[0] != xxh3_64(&hashing.data[first]) {
                return Err("a wrong hash".to_owned());
            }
        }
        Ok(chunks.len() as f64 * 65_536.0 / best / 1e9)
    };
    let (aligned, unaligned) = (of(0)?, of(3)?);
    let mut passes = [0.0; 2];
    for turn in 0..6 {
        let is_verified = turn % 2 == 1;
        let model = Model::with(
            &bench.gpu,
            DRIVE,
            &LoaderOptions::default(),
            |layers, image| match is_verified {
                true => verified(layers, image),
                false => Ok(layers),
            },
        )?;
        let begin = Instant::now();
        for _ in 0..4 {
            model.pass(0).map_err(text)?;
        }
        model.loader.check(limit()).map_err(text)?;
        model.stream.finish().map_err(text)?;
        let read = model.loader.stats().bytes as f64;
        passes[usize::from(is_verified)] += read / begin.elapsed().as_secs_f64() / 3e9;
    }
    Ok(format!(
        "{aligned:.1} GB/s of chunks at multiples of 8, {unaligned:.1} of others; layers {:.2} GB/s without a manifest, \
         {:.2} with one",
        passes[0], passes[1]
    ))
}
