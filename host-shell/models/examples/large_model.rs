//! Measures tokens per second of a model that is larger than the memory for its weights, for each path by which layers
//! can be read.
//!
//! ```sh
//! cargo run --release -p nvme-models --example large_model -- /dev/shm/model.gguf [BUDGET] [LAYERS] [TOKENS]
//! ```
//!
//! A missing FILE is written first: random weights of the sizes of Llama 2 70B in Q6_K (56 GB with 80 layers), whose
//! text means nothing. Each path gets the same prompt; tokens and the logits behind the last one have to be equal. It
//! prints a line of JSON for each path. The file stays.

#[path = "../../compute/examples/arguments/mod.rs"]
mod arguments;

use arguments::Arguments;
use nvme_host::store::GpuOptions;
use nvme_host::{Catalog, Error, Result, Store, StoreOptions};
use nvme_models::llama::{Llama, ModelConfig, ModelOptions};
use nvme_models::synthetic::{StoredFormat, SyntheticModel};
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

const PROMPT: [u32; 4] = [1, 1000, 2000, 3000];

fn main() -> std::process::ExitCode {
    arguments::end(run)
}

fn run(words: &Arguments) -> Result<()> {
    let Some(path) = words.first() else {
        return Err(Error::usage("no FILE", "name the file of the model"));
    };
    let (budget, layers, tokens) = (
        words.number(1, 24 << 30)?,
        words.number(2, 80)?,
        words.number(3, 8)?,
    );
    write(Path::new(path), layers)?;
    let mut first: Option<(Vec<u32>, Vec<f32>)> = None;
    for device in [
        format!("sim:{path}?block=4096&queues=32&threads=12"),
        format!("file:{path}"),
    ] {
        let found = measure(&device, budget, tokens)?;
        if first.as_ref().is_some_and(|first| *first != found) {
            return Err(Error::internal("the ways do not agree"));
        }
        first = Some(found);
    }
    Ok(())
}

/// Writes the model unless it is there.
fn write(path: &Path, layers: u32) -> Result<()> {
    if path.exists() {
        return Ok(());
    }
    let model = SyntheticModel {
        config: ModelConfig {
            layers,
            width: 8192,
            hidden: 28_672,
            heads: 64,
            kv_heads: 8,
            head_elements: 128,
            vocabulary: 32_000,
            context: 4096,
            epsilon: 1e-5,
            rope_base: 10_000.0,
            ..ModelConfig::default()
        },
        stored: StoredFormat::Q6K,
        stored_head: StoredFormat::Q6K,
        seed: 70,
    };
    let system = |source| Error::System {
        call: "writing the model",
        source,
    };
    let begin = Instant::now();
    let mut out = BufWriter::with_capacity(8 << 20, File::create(path).map_err(system)?);
    let mut written = 0u64;
    let mut progress = |bytes: u64| {
        if (written + bytes) >> 32 != written >> 32 {
            eprintln!("{:.1} GB written", (written + bytes) as f64 / 1e9);
        }
        written += bytes;
    };
    model.write(&mut out, &mut progress).map_err(system)?;
    // Whole blocks, for the simulator.
    let file = out.into_inner().map_err(|error| system(error.into()))?;
    let bytes = file.metadata().map_err(system)?.len();
    let whole = bytes.next_multiple_of(4096);
    file.set_len(whole).map_err(system)?;
    eprintln!("{written} bytes in {:.1} s", begin.elapsed().as_secs_f64());
    Ok(())
}

/// Runs the model from `device`; its tokens, and the numbers behind the last one.
fn measure(device: &str, budget: u64, tokens: usize) -> Result<(Vec<u32>, Vec<f32>)> {
    let options = StoreOptions {
        read_only: true,
        gpu: Some(GpuOptions::default()),
        ..StoreOptions::default()
    };
    let store = Arc::new(Store::open(device, &options)?);
    let catalog = Catalog::of_store(&store, 0)?;
    let at_once = |offset: u64, bytes: u64| {
        let all = offset..offset + bytes;
        Ok(vec![all])
    };
    let positions = (PROMPT.len() + tokens) as u32;
    let begin = Instant::now();
    let mut model = Llama::open(
        &store,
        &catalog,
        &at_once,
        ModelOptions {
            budget,
            positions,
            manifest: None,
        },
    )?;
    let mut made = vec![model.feed(&PROMPT)?];
    let first_s = begin.elapsed().as_secs_f64();
    let before = model.stats().bytes;
    let mut seconds = Vec::new();
    while made.len() <= tokens {
        let begin = Instant::now();
        made.push(model.feed(&made[made.len() - 1..])?);
        seconds.push(begin.elapsed().as_secs_f64());
    }
    let read = (model.stats().bytes - before) as f64 / tokens as f64;
    seconds.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    println!(
        "{{\"device\":\"{device}\",\"mover\":\"{}\",\"machine\":\"{}\",\"weights_in_memory\":{},\"first_token_s\":{first_s:.3},\
         \"tokens_per_s\":{:.3},\"bytes_read_per_token\":{read:.0},\"gb_per_s\":{:.2},\"seconds\":{seconds:.3?},\
         \"tokens\":{made:?}}}",
        model.path().mover,
        model.machine(),
        model.path().memory_bytes(),
        1.0 / median,
        read / median / 1e9,
    );
    Ok((made, model.logits()?))
}
