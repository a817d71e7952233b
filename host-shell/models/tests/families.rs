//! Small random models of each family, with the tokens that transformers chooses (`families.py`).

use nvme_host::{Catalog, Store, StoreOptions};
use nvme_models::llama::{Llama, ModelFamily, ModelOptions};
use nvme_models::synthetic::SyntheticModel;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Largest difference of a number from transformers', relative to the distance of the largest and the smallest.
const TOLERANCE: f64 = 1e-4;

fn recorded() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/families/tokens.json")
}

/// The models by the names of their files: one of each family, and Qwen3 with scaled angles.
fn models() -> Vec<(String, SyntheticModel)> {
    let plain = ModelFamily::ALL.map(|family| {
        let model = SyntheticModel::of_family(family);
        (family.name().to_owned(), model)
    });
    let scaled = SyntheticModel::with_yarn(ModelFamily::Qwen3);
    let scaled = std::iter::once(("qwen3-yarn".to_owned(), scaled));
    plain.into_iter().chain(scaled).collect()
}

fn file(model: &SyntheticModel) -> Vec<u8> {
    let mut bytes = Vec::new();
    model.write(&mut bytes, &mut |_| ()).unwrap();
    bytes
}

fn whole(offset: u64, bytes: u64) -> nvme_host::Result<Vec<std::ops::Range<u64>>> {
    Ok(std::iter::once(offset..offset + bytes).collect())
}

fn numbers(value: &Value) -> Vec<f64> {
    let values = value.as_array().unwrap().iter();
    values.map(|value| value.as_f64().unwrap()).collect()
}

/// With the variable NVME_WRITE_FAMILIES the files are written into that folder, for `families.py`.
#[test]
fn models_of_each_family_go_on_as_in_transformers() {
    if let Some(folder) = std::env::var_os("NVME_WRITE_FAMILIES") {
        for (name, model) in models() {
            let name = format!("{name}.gguf");
            std::fs::write(Path::new(&folder).join(name), file(&model)).unwrap();
        }
    }
    let json: Value = serde_json::from_str(&std::fs::read_to_string(recorded()).unwrap()).unwrap();
    for (name, model) in models() {
        let bytes = file(&model);
        let store = Store::open("sim:mem?size=16MiB", &StoreOptions::default()).unwrap();
        store.write_at(4096, &bytes).unwrap();
        let store = Arc::new(store);
        let catalog = Catalog::of_store(&store, 4096).unwrap();
        let runs = json[&name].as_array().unwrap();
        assert_eq!(runs.len(), 3, "{name}");
        // Half of the weights, or all, stay in memory.
        for budget in [bytes.len() as u64 * 3 / 4, 1 << 30] {
            for run in runs {
                let options = ModelOptions {
                    budget,
                    positions: 200,
                    manifest: None,
                };
                let mut model = Llama::open(&store, &catalog, &whole, options).unwrap();
                let mut next: Vec<u32> = numbers(&run["prompt"])
                    .iter()
                    .map(|id| *id as u32)
                    .collect();
                let expected: Vec<u32> = numbers(&run["tokens"])
                    .iter()
                    .map(|id| *id as u32)
                    .collect();
                let mut tokens = Vec::new();
                while tokens.len() < expected.len() {
                    let token = model.feed(&next).unwrap();
                    tokens.push(token);
                    next = vec![token];
                }
                assert_eq!(tokens, expected, "{name}");
                let (found, theirs) = (model.logits().unwrap(), numbers(&run["logits"]));
                let most = theirs.iter().copied().fold(f64::MIN, f64::max);
                let distance = most - theirs.iter().copied().fold(f64::MAX, f64::min);
                let apart = found.iter().zip(&theirs);
                let apart = apart.map(|(a, b)| (f64::from(*a) - b).abs() / distance);
                let apart = apart.fold(0.0, f64::max);
                assert!(apart < TOLERANCE, "{name}: {apart:e}");
            }
        }
    }
}
