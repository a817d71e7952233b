//! A mixture of experts that was trained (`train_mixture.py`), from its checkpoint, with the tokens of transformers.

use nvme_host::{Catalog, Store, StoreOptions};
use nvme_models::llama::{Llama, ModelOptions};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mixture")
}

fn whole(offset: u64, bytes: u64) -> nvme_host::Result<Vec<std::ops::Range<u64>>> {
    Ok(std::iter::once(offset..offset + bytes).collect())
}

/// `tokens.json` has what MixtralForCausalLM of transformers chose, in float32, with the same weights.
#[test]
fn a_trained_mixture_goes_on_as_transformers_does() {
    let mut file = Vec::new();
    nvme_models::checkpoint::mixtral(&folder(), &mut file).unwrap();
    let store = Store::open("sim:mem?size=16MiB", &StoreOptions::default()).unwrap();
    store.write_at(4096, &file).unwrap();
    let (store, text) = (
        Arc::new(store),
        std::fs::read_to_string(folder().join("tokens.json")).unwrap(),
    );
    let catalog = Catalog::of_store(&store, 4096).unwrap();
    let json: Value = serde_json::from_str(&text).unwrap();
    let runs = json["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 4);
    // Half of what is not experts stays in memory.
    for budget in [256 << 10, 1 << 30] {
        for run in runs {
            let prompt = run["prompt"].as_str().unwrap();
            let expected = run["tokens"].as_array().unwrap().iter();
            let expected: Vec<u64> = expected.filter_map(Value::as_u64).collect();
            let options = ModelOptions {
                budget,
                positions: 200,
                manifest: None,
            };
            let mut model = Llama::open(&store, &catalog, &whole, options).unwrap();
            let mut next: Vec<u32> = prompt.bytes().map(u32::from).collect();
            let mut tokens = Vec::new();
            while tokens.len() < expected.len() {
                let token = model.feed(&next).unwrap();
                tokens.push(u64::from(token));
                next = vec![token];
            }
            assert_eq!(tokens, expected, "{prompt}");
        }
    }
}

/// A tensor that is not there, or has another size, is named.
#[test]
fn a_checkpoint_with_other_tensors_is_refused() {
    let place = std::env::temp_dir().join(format!("nvme-mixture-{}", std::process::id()));
    std::fs::create_dir_all(&place).unwrap();
    let config = std::fs::read_to_string(folder().join("config.json")).unwrap();
    let weights = std::fs::read(folder().join("model.safetensors")).unwrap();
    let begin = 8 + u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    for (from, to, cause) in [
        (
            "experts.3.w1.weight",
            "experts.3.w7.weight",
            "layers.0.block_sparse_moe.experts.3.w1",
        ),
        ("self_attn.k_proj", "self_attn.q_prok", "self_attn.k_proj"),
    ] {
        let mut bytes = weights.clone();
        for at in 0..begin - from.len() {
            if bytes[at..].starts_with(from.as_bytes()) {
                bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
            }
        }
        std::fs::write(place.join("config.json"), &config).unwrap();
        std::fs::write(place.join("model.safetensors"), bytes).unwrap();
        let error = nvme_models::checkpoint::mixtral(&place, &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains(cause), "{error}");
    }
    std::fs::write(
        place.join("config.json"),
        config.replace("\"head_dim\": 16", "\"head_dim\": 32"),
    )
    .unwrap();
    std::fs::write(place.join("model.safetensors"), &weights).unwrap();
    let error = nvme_models::checkpoint::mixtral(&place, &mut Vec::new()).unwrap_err();
    assert!(error.to_string().contains("bytes of"), "{error}");
    // The tensors are looked up before they are listed: that many entries took all memory, and their sizes overflowed.
    for (from, to, cause) in [
        (
            "_layers\": 3",
            "_layers\": 4294967295",
            "layers.3.input_layernorm",
        ),
        ("_experts\": 8", "_experts\": 4294967295", "experts.8.w2"),
        ("_heads\": 6", "_heads\": 4294967294", "self_attn.q_proj"),
        (
            "diate_size\": 128",
            "diate_size\": 4294967295",
            "experts.0.w2",
        ),
        (
            "hidden_size\": 96",
            "hidden_size\": 4294967295",
            "input_layernorm",
        ),
    ] {
        std::fs::write(place.join("config.json"), config.replace(from, to)).unwrap();
        let mut file = Vec::new();
        let error = nvme_models::checkpoint::mixtral(&place, &mut file).unwrap_err();
        assert!(error.to_string().contains(cause), "{error}");
        assert!(file.is_empty());
    }
    std::fs::remove_dir_all(&place).unwrap();
}
