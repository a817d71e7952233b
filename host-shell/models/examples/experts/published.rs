//! Experts of gpt-oss as published: one file of safetensors at the beginning of the drive.

use super::CHUNK;
use nvme_compute::random_weights::{self, StoredFormat};
use nvme_host::{Result, Store};
use nvme_models::experts::{ExpertLayers, ExpertShape, ExpertUse};
use nvme_models::layout::ExpertFiles;
use std::sync::Arc;

/// Scales of blocks: 2^-10 to 2^-7.
const SCALES: std::ops::Range<u8> = 117..121;

/// Writes the file, and returns its experts.
pub fn write(store: &Arc<Store>, shape: ExpertShape, layers: u32) -> Result<ExpertLayers> {
    let [width, hidden, experts] = [shape.width, shape.hidden, shape.experts].map(u64::from);
    let mut described = Vec::new();
    let mut kinds = Vec::new();
    let mut at = 0;
    let mut add = |name: String, dtype: &str, shape: &[u64], kind: TensorKind| {
        let bytes = shape.iter().product::<u64>() * if dtype == "BF16" { 2 } else { 1 };
        described.push(format!(
            "{name:?}:{{\"dtype\":{dtype:?},\"shape\":{shape:?},\"data_offsets\":[{at},{}]}}",
            at + bytes
        ));
        kinds.push((at, bytes, kind));
        at += bytes;
    };
    for layer in 0..layers {
        for (matrix, rows, columns) in [
            ("gate_up_proj", 2 * hidden, width),
            ("down_proj", width, hidden),
        ] {
            let name = |end: &str| format!("model.layers.{layer}.mlp.experts.{matrix}_{end}");
            let blocks = [experts, rows, columns / 32, 16];
            add(name("blocks"), "U8", &blocks, TensorKind::Elements);
            add(name("scales"), "U8", &blocks[..3], TensorKind::Scales);
            add(name("bias"), "BF16", &blocks[..2], TensorKind::Biases);
        }
    }
    let mut header = format!("{{{}}}", described.join(","));
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let data = 8 + header.len() as u64;
    let mut head = (header.len() as u64).to_le_bytes().to_vec();
    head.extend(header.as_bytes());
    store.write_at(0, &head)?;
    for (first, bytes, kind) in kinds {
        fill(store, data + first, bytes, kind)?;
    }
    let files = ExpertFiles::in_store(store, 0, Some(data + at))?;
    let layouts = (0..layers).map(|layer| files.layer(layer));
    ExpertLayers::of_layouts(
        layouts.collect::<Result<_>>()?,
        ExpertUse {
            choices: shape.choices,
            over_all: shape.over_all,
            activation: shape.activation,
        },
    )
}

/// Content of a tensor.
#[derive(Clone, Copy, PartialEq)]
enum TensorKind {
    Elements,
    Scales,
    Biases,
}

fn fill(store: &Store, first: u64, bytes: u64, kind: TensorKind) -> Result<()> {
    let mut chunk = vec![0; CHUNK];
    let mut at = 0;
    while at < bytes {
        let count = (bytes - at).min(chunk.len() as u64) as usize;
        let some = &mut chunk[..count];
        let stored = match kind {
            TensorKind::Biases => StoredFormat::Bf16,
            _ => StoredFormat::Mxfp4,
        };
        random_weights::fill(stored, first + at + 1, some);
        if kind == TensorKind::Scales {
            let span = SCALES.end - SCALES.start;
            some.iter_mut()
                .for_each(|byte| *byte = SCALES.start + *byte % span);
        }
        store.write_at(first + at, some)?;
        at += count as u64;
    }
    Ok(())
}
