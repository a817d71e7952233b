//! Layers that are read ahead in a stream of the loader's while the caller's stream uses those before them.
// UNSAFETY: copies take addresses of layers and of the output.
#![allow(unsafe_code)]

mod manifest;

use crate::bench::Bench;
use crate::by_host::{DRIVE, STRIPE, Scratch};
use crate::gather::{BYTES, CANARY, text};
use crate::limits::limit;
use crate::report::{Outcome, Report};
use nvme_gpu_kernel::work::data_word;
use nvme_host::catalog::{Dtype, TensorEntry};
use nvme_host::cuda::{DeviceMemory, Gpu, RowsOptions, Stream};
use nvme_host::loader::{LayerLoader, LoaderOptions, ModelLayers, ResidentLayers};
use nvme_host::store::GpuOptions;
use nvme_host::{Store, StoreOptions};
use std::sync::Arc;
use std::time::{Duration, Instant};

const SEED: u64 = 0x1A7E;
const LAYERS: u64 = 7;
/// Bytes from one layer to the next; they are a little shorter and begin at an odd byte.
const STEP: u64 = 1 << 20;
const LAYER: u64 = STEP - 1001;

/// A store with layers, a loader, and a stream that uses them.
struct Model {
    image: Vec<u8>,
    store: Arc<Store>,
    loader: LayerLoader,
    stream: Stream,
    out: DeviceMemory,
    /// Memory that is copied to and fro to keep the stream busy.
    ballast: DeviceMemory,
}

/// Returns layer `layer` as a tensor of the file that the store is.
fn tensor(layer: u64) -> TensorEntry {
    TensorEntry {
        name: format!("layer {layer}"),
        dtype: Dtype::U8,
        shape: vec![LAYER],
        offset: layer * STEP + 13,
        bytes: LAYER,
    }
}

impl Model {
    fn new(gpu: &Arc<Gpu>, device: &str, options: &LoaderOptions) -> Outcome<Self> {
        Self::with(gpu, device, options, |layers, _| Ok(layers))
    }

    /// Makes a model; `change` replaces its layers, and receives the store's bytes.
    fn with(
        gpu: &Arc<Gpu>,
        device: &str,
        options: &LoaderOptions,
        change: impl FnOnce(ModelLayers, &[u8]) -> nvme_host::Result<ModelLayers>,
    ) -> Outcome<Self> {
        // A command that is lost is waited for so long; no other one may end by the clock.
        let timeout = match device.contains("fault=drop") {
            true => Duration::from_secs(1),
            false => limit(),
        };
        let make = move || -> nvme_host::Result<Self> {
            let of_store = StoreOptions {
                queues: 2,
                timeout,
                gpu: Some(GpuOptions {
                    index: gpu.index(),
                    rows: RowsOptions {
                        queues: 4,
                        entries: 128,
                        stations: 4,
                        ..RowsOptions::default()
                    },
                }),
                ..StoreOptions::default()
            };
            let store = Arc::new(Store::open(device, &of_store)?);
            let words = (0..BYTES / 8).map(|index| data_word(SEED, index));
            let image: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
            store.write_at(0, &image)?;
            let ranges = (0..LAYERS).map(|layer| {
                let begin = layer * STEP + 13;
                (format!("layer {layer}"), begin..begin + LAYER)
            });
            let layers = change(ModelLayers::of_ranges(ranges)?, &image)?;
            Ok(Self {
                image,
                loader: LayerLoader::new(&store, layers, options)?,
                store,
                stream: Stream::new(gpu)?,
                out: DeviceMemory::new(gpu, (LAYERS * LAYER) as usize)?,
                ballast: DeviceMemory::new(gpu, 16 << 20)?,
            })
        };
        make().map_err(text)
    }

    /// Enqueues a pass over all layers in the stream: each is copied out after `busy` copies of 8 MiB.
    fn pass(&self, busy: u32) -> nvme_host::Result<()> {
        let half = self.ballast.len() / 2;
        for index in 0..LAYERS as usize {
            let layer = self.loader.layer_for(index, self.stream.handle())?;
            let (begin, to) = (self.ballast.address(), self.out.address());
            // SAFETY: the first copy stays inside `ballast`, whose halves do not overlap. The second one writes the
            // layer's own part of `out`.
            unsafe {
                for _ in 0..busy {
                    self.stream.copy_within(begin + half as u64, begin, half)?;
                }
                let place = to + index as u64 * LAYER;
                self.stream
                    .copy_within(place, layer.address(), LAYER as usize)?;
            }
        }
        Ok(())
    }

    /// Checks that the copied layer has the store's original bytes.
    fn check_layer(&self, index: u64) -> Outcome<()> {
        let mut have = vec![0; LAYER as usize];
        let place = (index * LAYER) as usize;
        self.out.download(place, &mut have).map_err(text)?;
        let begin = (index * STEP + 13) as usize;
        match have == self.image[begin..begin + have.len()] {
            true => Ok(()),
            false => Err(format!("layer {index} is wrong")),
        }
    }

    /// Checks that the bytes copied by the pass are the store's.
    fn check(&self) -> Outcome<()> {
        self.stream.finish().map_err(text)?;
        let mut have = vec![0; self.out.len()];
        self.out.download(0, &mut have).map_err(text)?;
        self.out.fill(CANARY).map_err(text)?;
        for (layer, have) in have.chunks_exact(LAYER as usize).enumerate() {
            let begin = layer * STEP as usize + 13;
            let want = &self.image[begin..begin + LAYER as usize];
            if have != want {
                let at = have.iter().zip(want).position(|(a, b)| a != b);
                let at = at.unwrap_or_default();
                return Err(format!("layer {layer} is wrong from byte {at} on"));
            }
        }
        Ok(())
    }
}

pub fn all(report: &mut Report, bench: &Bench) {
    for (name, device) in [("drive", DRIVE), ("stripe", STRIPE)] {
        report.test(&format!("layers/passes/{name}"), |_| passes(bench, device));
    }
    report.test("layers/passes/file", |_| {
        let file = Scratch::new()?;
        passes(bench, &file.device())
    });
    report.test("layers/errors", |_| errors(bench));
    report.test("layers/lost", |_| lost(bench));
    report.test("layers/closed", |_| closed(bench));
    manifest::all(report, bench);
}

/// Passes by few slots and many, with some layers that stay, and a stream that is slower than the drive or faster.
fn passes(bench: &Bench, device: &str) -> Outcome<String> {
    let (mut checked, mut ahead) = (0, 0);
    for (slots, resident, busy) in [
        (1, 0, 4),
        (2, 0, 16),
        (2, 2 * STEP, 0),
        (4, 0, 4),
        (9, 0, 1),
    ] {
        let options = LoaderOptions {
            slots,
            resident: ResidentLayers::Bytes(resident),
            ..LoaderOptions::default()
        };
        let model = Model::new(&bench.gpu, device, &options)?;
        for _ in 0..3 {
            model.pass(busy).map_err(text)?;
            ahead += u32::from(!model.stream.is_done().map_err(text)?);
            model.loader.check(limit()).map_err(text)?;
            model.check()?;
            checked += LAYERS;
        }
        let stats = model.loader.stats();
        // With one slot nothing is read ahead; otherwise all layers but the first are.
        let ready = if slots == 1 { 0 } else { stats.asked - 1 };
        if stats.ready != ready {
            return Err(format!("{slots} slots: {stats:?}"));
        }
    }
    Ok(format!(
        "{checked} layers; the host was ahead of the stream after {ahead} of 15 passes"
    ))
}

/// Runs passes until `errors` of them have failed and the last one is right; returns the errors.
fn until_right(model: &Model, errors: usize) -> Outcome<Vec<String>> {
    let begin = Instant::now();
    let mut seen = Vec::new();
    while begin.elapsed() < limit() {
        let passed = model.pass(1).and_then(|()| model.loader.check(limit()));
        match passed {
            Ok(()) => {
                model.check()?;
                if seen.len() >= errors {
                    return Ok(seen);
                }
            }
            Err(error) => {
                if !error.to_string().contains("layer ") {
                    return Err(format!("no layer is named: {error}"));
                }
                seen.push(error.code().to_owned());
            }
        }
    }
    Err(format!("no pass was right again after {seen:?}"))
}

/// Reads that the drive refuses are errors of their layers; a pass without an error has the right bytes.
fn errors(bench: &Bench) -> Outcome<String> {
    let faults: String = (60..90)
        .map(|nth| format!("&fault=status:0x281@op=read,nth={nth}"))
        .collect();
    let model = Model::new(
        &bench.gpu,
        &format!("{DRIVE}{faults}"),
        &LoaderOptions::default(),
    )?;
    let seen = until_right(&model, 1)?;
    match seen.iter().all(|code| code == "command") {
        true => Ok(format!("{} errors, then right", seen.len())),
        false => Err(format!("{seen:?}")),
    }
}

/// A command without an end: its layer fails, those meanwhile too, and the controller is reset. Several times: some of
/// those meanwhile have failed when their start returns.
fn lost(bench: &Bench) -> Outcome<String> {
    let mut all = 0;
    for _ in 0..3 {
        let device = format!("{DRIVE}&fault=drop@op=read,nth=50");
        let model = Model::new(&bench.gpu, &device, &LoaderOptions::default())?;
        let seen = until_right(&model, 1)?;
        if !seen.iter().all(|code| code == "device" || code == "gone") {
            return Err(format!("{seen:?}"));
        }
        all += seen.len();
    }
    Ok(format!("{all} errors, then right"))
}

/// A layer that was given out stays when its loader and its store are closed.
fn closed(bench: &Bench) -> Outcome<String> {
    let model = Model::new(&bench.gpu, DRIVE, &LoaderOptions::default())?;
    let close = || -> nvme_host::Result<bool> {
        let layer = model.loader.layer_for(3, model.stream.handle())?;
        model.loader.close(limit())?;
        layer.wait(limit())?;
        let to = model.out.address() + 3 * LAYER;
        // SAFETY: the copy is from the layer to its part of the output.
        unsafe {
            model
                .stream
                .copy_within(to, layer.address(), LAYER as usize)?
        };
        Ok(model.loader.layer(0).is_err())
    };
    if !close().map_err(text)? {
        return Err("a closed loader gave a layer".to_owned());
    }
    model.stream.finish().map_err(text)?;
    let mut have = vec![0; LAYER as usize];
    model
        .out
        .download(3 * LAYER as usize, &mut have)
        .map_err(text)?;
    let begin = 3 * STEP as usize + 13;
    match have == model.image[begin..begin + have.len()] {
        true => Ok("the layer is whole".to_owned()),
        false => Err("the layer is wrong".to_owned()),
    }
}
