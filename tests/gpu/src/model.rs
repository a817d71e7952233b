//! A model whose weights stream to the GPU, beside the same model on the CPU.

use crate::bench::Bench;
use crate::by_host::Scratch;
use crate::gather::text;
use crate::limits::limit;
use crate::report::{Outcome, Report};
use nvme_host::cuda::RowsOptions;
use nvme_host::store::GpuOptions;
use nvme_host::{Catalog, Store, StoreOptions};
use nvme_models::llama::{ExpertMixture, Llama, ModelConfig, ModelFamily, ModelOptions};
use nvme_models::synthetic::{StoredFormat, SyntheticModel};
use std::sync::Arc;

const PLACE: u64 = 4096 * 3;
const DRIVE: &str = "sim:mem?size=16MiB&block=4096&queues=8&threads=2";
/// Largest difference of the GPU's numbers from the CPU's, relative to the distance of largest and smallest: sums have
/// other orders, and an exponential differs by two units of the last place.
const TOLERANCE: f32 = 1e-4;
const TOKENS: usize = 6;
/// A mixture with more experts than the budget has room for.
const MIXTURE: Option<ExpertMixture> = Some(ExpertMixture {
    count: 9,
    choices: 2,
});

pub fn all(report: &mut Report, bench: &Bench) {
    for stored in StoredFormat::ALL {
        let name = format!("{stored:?}").to_lowercase();
        report.test(&format!("model/{name}"), |_| {
            compare(bench, DRIVE, (stored, None), 5)
        });
    }
    report.test("model/file", |_| {
        let file = Scratch::new()?;
        // The prompt has more tokens than pass through the layers together.
        compare(bench, &file.device(), (StoredFormat::Q4_1, None), 70)
    });
    report.test("model/mixture", |_| {
        compare(bench, DRIVE, (StoredFormat::Q4_0, MIXTURE), 70)
    });
    for family in ModelFamily::ALL {
        report.test(&format!("model/{}", family.name()), |_| {
            let bytes = written(&SyntheticModel::of_family(family))?;
            // More positions than a window has.
            compare_files(bench, DRIVE, &bytes, 70)
        });
    }
    report.test("model/errors", |_| errors(bench, None));
    report.test("model/mixture-errors", |_| errors(bench, MIXTURE));
}

fn bytes_of(stored: StoredFormat, experts: Option<ExpertMixture>) -> Outcome<Vec<u8>> {
    let model = SyntheticModel {
        config: ModelConfig {
            layers: 3,
            width: 256,
            hidden: 512,
            heads: 8,
            kv_heads: 2,
            head_elements: 32,
            vocabulary: 1000,
            context: 128,
            epsilon: 1e-5,
            rope_base: 10_000.0,
            experts,
            ..ModelConfig::default()
        },
        stored,
        stored_head: StoredFormat::Q8_0,
        seed: 9,
    };
    written(&model)
}

fn written(model: &SyntheticModel) -> Outcome<Vec<u8>> {
    let mut bytes = Vec::new();
    let written = model.write(&mut bytes, &mut |_| ());
    written.map_err(|error| error.to_string())?;
    Ok(bytes)
}

/// Returns the model in memory of the store's GPU, or of the host without one: less than all of its layers at a time.
fn open(device: &str, gpu: Option<u32>, bytes: &[u8]) -> nvme_host::Result<Llama> {
    let options = StoreOptions {
        queues: 2,
        timeout: limit(),
        gpu: gpu.map(|index| GpuOptions {
            index,
            rows: RowsOptions {
                queues: 4,
                entries: 128,
                stations: 4,
                ..RowsOptions::default()
            },
        }),
        ..StoreOptions::default()
    };
    let store = Arc::new(Store::open(device, &options)?);
    store.write_at(PLACE, bytes)?;
    let catalog = Catalog::of_range(&store, PLACE, bytes.len() as u64)?;
    let layer: u64 = catalog
        .entries()
        .iter()
        .filter(|entry| entry.name.starts_with("blk.0."))
        .map(|entry| entry.bytes.next_multiple_of(64))
        .sum();
    // The experts of two tokens of nine or so, beside the layers.
    let experts = catalog.entries().iter();
    let experts = experts.filter(|entry| entry.name.ends_with("_exps.weight"));
    let experts: u64 = experts.map(|entry| entry.bytes).sum::<u64>() / 6;
    let options = ModelOptions {
        budget: match experts {
            0 => 5 * layer / 2,
            experts => layer / 2 + experts,
        },
        positions: 100,
        manifest: None,
    };
    let places = |offset: u64, bytes: u64| {
        let all = offset..offset + bytes;
        Ok(vec![all])
    };
    Llama::open(&store, &catalog, &places, options)
}

fn prompt(length: u32) -> Vec<u32> {
    // Every vocabulary here has 400 tokens at least.
    (0..length).map(|at| at * 37 % 400).collect()
}

/// Tokens that follow a prompt, and the numbers of the last.
fn follow(model: &mut Llama, prompt: &[u32]) -> nvme_host::Result<(Vec<u32>, Vec<f32>)> {
    let mut tokens = vec![model.feed(prompt)?];
    while tokens.len() < TOKENS {
        tokens.push(model.feed(&tokens[tokens.len() - 1..])?);
    }
    Ok((tokens, model.logits()?))
}

fn compare(
    bench: &Bench,
    device: &str,
    (stored, experts): (StoredFormat, Option<ExpertMixture>),
    length: u32,
) -> Outcome<String> {
    compare_files(bench, device, &bytes_of(stored, experts)?, length)
}

/// Compares the tokens of the CPU and of the GPU for a file.
fn compare_files(bench: &Bench, device: &str, bytes: &[u8], length: u32) -> Outcome<String> {
    let mut of_cpu = open("sim:mem?size=16MiB", None, bytes).map_err(text)?;
    let (expected, cpu) = follow(&mut of_cpu, &prompt(length)).map_err(text)?;
    let mut of_gpu = open(device, Some(bench.gpu.index()), bytes).map_err(text)?;
    let (tokens, gpu) = follow(&mut of_gpu, &prompt(length)).map_err(text)?;
    if tokens != expected {
        return Err(format!("{tokens:?}, of the CPU {expected:?}"));
    }
    let largest = cpu.iter().copied().fold(f32::MIN, f32::max);
    let distance = largest - cpu.iter().copied().fold(f32::MAX, f32::min);
    let apart = cpu.iter().zip(&gpu).map(|(cpu, gpu)| (cpu - gpu).abs());
    let most = apart.fold(0.0, f32::max) / distance;
    if most.is_nan() || most > TOLERANCE {
        return Err(format!("numbers {most:e} apart"));
    }
    Ok(format!("{TOKENS} tokens, numbers {most:.1e} apart"))
}

/// Reads that fail end a step, which is repeated.
fn errors(bench: &Bench, experts: Option<ExpertMixture>) -> Outcome<String> {
    let bytes = bytes_of(StoredFormat::Q6K, experts)?;
    let mut of_cpu = open("sim:mem?size=16MiB", None, &bytes).map_err(text)?;
    let (expected, _) = follow(&mut of_cpu, &prompt(5)).map_err(text)?;
    // The faults hit reads after the opening, and enough of them that repeated parts of a command fail, too.
    let device = format!("{DRIVE}&fault=status:0x281@op=read,nth=60-1000");
    let mut model = open(&device, Some(bench.gpu.index()), &bytes).map_err(text)?;
    let (mut tokens, mut failed) = (Vec::new(), 0);
    let mut next = prompt(5);
    while tokens.len() < expected.len() {
        let before = model.position();
        match model.feed(&next) {
            Ok(token) => {
                tokens.push(token);
                next = vec![token];
            }
            Err(error) if failed == 20 => return Err(text(error)),
            Err(error) => {
                failed += 1;
                if model.position() != before {
                    return Err("a failed step moved the text".to_owned());
                }
                let said = text(error);
                if !said.contains("Unrecovered Read Error") {
                    return Err(said);
                }
            }
        }
    }
    match (tokens == expected, failed) {
        (true, 1..) => Ok(format!("{failed} steps failed and were repeated")),
        (true, _) => Err("no step failed".to_owned()),
        (false, _) => Err(format!("{tokens:?}, not {expected:?}")),
    }
}
