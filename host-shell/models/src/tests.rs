//! A small model of random weights through every kind of store, and files that are no model.

use crate::Tokenizer;
use crate::llama::{ExpertMixture, Llama, ModelConfig, ModelFamily, ModelOptions};
use crate::synthetic::SyntheticModel;
use nvme_formats::StoredFormat;
use nvme_host::{Catalog, Error, Manifest, Store, StoreOptions};
use std::ops::ControlFlow;
use std::sync::Arc;

const PLACE: u64 = 12_288;

fn small() -> SyntheticModel {
    SyntheticModel {
        config: ModelConfig {
            layers: 3,
            width: 256,
            hidden: 512,
            heads: 8,
            kv_heads: 2,
            head_elements: 32,
            vocabulary: 300,
            context: 128,
            epsilon: 1e-5,
            rope_base: 10_000.0,
            ..ModelConfig::default()
        },
        stored: StoredFormat::Q4_1,
        stored_head: StoredFormat::Q8_0,
        seed: 1,
    }
}

/// Returns the same model with experts instead of each feed-forward part.
fn mixture() -> SyntheticModel {
    let dense = small();
    SyntheticModel {
        config: ModelConfig {
            experts: Some(ExpertMixture {
                count: 6,
                choices: 2,
            }),
            ..dense.config
        },
        stored: StoredFormat::Q8_0,
        ..dense
    }
}

/// Returns the file of a model.
fn file(model: &SyntheticModel) -> Vec<u8> {
    let mut bytes = Vec::new();
    model.write(&mut bytes, &mut |_| ()).unwrap();
    bytes
}

/// Returns a store that holds `bytes` at [`PLACE`].
fn store(bytes: &[u8], more: &str) -> Arc<Store> {
    let device = format!("sim:mem?size=16MiB{more}");
    let store = Store::open(&device, &StoreOptions::default()).unwrap();
    store.write_at(PLACE, bytes).unwrap();
    Arc::new(store)
}

fn open(store: &Arc<Store>, budget: u64) -> nvme_host::Result<Llama> {
    let catalog = Catalog::of_store(store, PLACE)?;
    let options = ModelOptions {
        budget,
        positions: 100,
        manifest: None,
    };
    Llama::open(store, &catalog, &places, options)
}

/// Bytes of the file in three parts each, as on a file system that is full.
fn places(offset: u64, bytes: u64) -> nvme_host::Result<Vec<std::ops::Range<u64>>> {
    let (end, third) = (offset + bytes, (bytes / 3).next_multiple_of(2));
    Ok(vec![
        offset..offset + third,
        offset + third..end - third,
        end - third..end,
    ])
}

/// Tokens that follow, and the numbers of the last.
fn follow(model: &mut Llama, prompt: &[u32], count: usize) -> (Vec<u32>, Vec<f32>) {
    let mut tokens = vec![model.feed(prompt).unwrap()];
    while tokens.len() < count {
        tokens.push(model.feed(&tokens[tokens.len() - 1..]).unwrap());
    }
    (tokens, model.logits().unwrap())
}

#[test]
fn text_is_the_same_whatever_streams_and_however_it_is_fed() {
    for stored in StoredFormat::ALL {
        let model = SyntheticModel { stored, ..small() };
        let store = store(&file(&model), "");
        // One format has more tokens than pass through the layers together.
        let length = if stored == StoredFormat::Q4_1 { 70 } else { 6 };
        let prompt: Vec<u32> = (0..length).map(|at| at * 37 % 300).collect();
        let mut whole = open(&store, 1 << 30).unwrap();
        assert_eq!(whole.path().slots, 0);
        let (tokens, logits) = follow(&mut whole, &prompt, 5);
        let spread = |logits: &[f32]| {
            let most = logits.iter().copied().fold(f32::MIN, f32::max);
            most - logits.iter().copied().fold(f32::MAX, f32::min)
        };
        assert!(spread(&logits) > 0.01, "{stored:?}: {}", spread(&logits));
        let budget = whole.path().resident_bytes / 4 * 3;
        let mut streamed = open(&store, budget).unwrap();
        assert!(streamed.path().memory_bytes() <= budget);
        // Tokens are fed one by one: each position sees the same tokens as before.
        let (last, others) = prompt.split_last().unwrap();
        for token in others {
            streamed.feed(&[*token]).unwrap();
        }
        let (found, found_logits) = follow(&mut streamed, &[*last], 5);
        assert_eq!(found, tokens, "{stored:?}");
        assert_eq!(found_logits, logits, "{stored:?}");
        assert_eq!(streamed.position(), length + 4);
        streamed.clear();
        assert_eq!(follow(&mut streamed, &prompt, 1).0[0], tokens[0]);
    }
}

/// Maps a range to itself, as one extent: the experts of a layer are no parts of a loader.
fn whole(offset: u64, bytes: u64) -> nvme_host::Result<Vec<std::ops::Range<u64>>> {
    Ok(std::iter::once(offset..offset + bytes).collect())
}

#[test]
fn a_mixture_of_experts_has_its_text() {
    let store = store(&file(&mixture()), "");
    let catalog = Catalog::of_store(&store, PLACE).unwrap();
    let open = |budget| {
        let positions = 100;
        Llama::open(
            &store,
            &catalog,
            &whole,
            ModelOptions {
                budget,
                positions,
                manifest: None,
            },
        )
    };
    let mut model = open(1 << 30).unwrap();
    assert_eq!(model.config().experts, mixture().config.experts);
    let prompt: Vec<u32> = (0..70).map(|at| at * 37 % 300).collect();
    let (tokens, logits) = follow(&mut model, &prompt, 5);
    // Layers without their experts: less than half of the file.
    assert!(model.path().resident_bytes < file(&mixture()).len() as u64 / 2);
    let budget = model.path().resident_bytes / 4 * 3;
    let mut streamed = open(budget).unwrap();
    let (last, others) = prompt.split_last().unwrap();
    for token in others {
        streamed.feed(&[*token]).unwrap();
    }
    assert_eq!(follow(&mut streamed, &[*last], 5), (tokens, logits));
    let refused = Llama::open(
        &store,
        &catalog,
        &places,
        ModelOptions {
            budget,
            positions: 100,
            manifest: None,
        },
    );
    let refused = refused.err().map(|error| error.to_string());
    assert!(refused.is_some_and(|why| why.contains("in 3 places of the drive")));
}

/// Chunks begin with each tensor: layers that experts cut into runs are whole chunks.
#[test]
fn a_mixture_is_verified_but_for_its_experts() {
    let bytes = file(&mixture());
    let catalog = Catalog::of_store(&store(&bytes, ""), PLACE).unwrap();
    let at = |name: &str| (catalog.get(name).unwrap().offset - PLACE) as usize;
    let folder = std::env::temp_dir().join(format!("nvme-mixture-{}", std::process::id()));
    std::fs::write(&folder, &bytes).unwrap();
    let manifest = Manifest::of_file(&folder, &mut |_, _| ControlFlow::Continue(())).unwrap();
    std::fs::remove_file(&folder).unwrap();
    let feed = |place: Option<usize>| {
        let mut bytes = bytes.clone();
        if let Some(place) = place {
            bytes[place] ^= 4;
        }
        let store = store(&bytes, "");
        let options = ModelOptions {
            budget: 1 << 30,
            positions: 100,
            manifest: Some(&manifest),
        };
        Llama::open(&store, &catalog, &whole, options)?.feed(&[1, 2, 3])
    };
    let token = feed(None).unwrap();
    for name in ["blk.1.attn_q.weight", "blk.2.ffn_gate_inp.weight"] {
        let error = feed(Some(at(name) + 70)).unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{name}: {error}");
    }
    // The last bit but one of an exponent is another weight, and no error.
    assert!(feed(Some(at("blk.1.ffn_up_exps.weight") + 70)).is_ok());
    assert_eq!(feed(None).unwrap(), token);
}

/// The expected tokens and logits are those of MixtralForCausalLM of transformers 5.23 with the same weights
/// (`tests/beside_transformers.py`, by hand): 64 tokens, greedy choice, logits within 1e-6.
#[test]
fn a_mixture_of_experts_has_the_tokens_of_transformers() {
    let model = SyntheticModel::small(Some(ExpertMixture {
        count: 8,
        choices: 2,
    }));
    let store = store(&file(&model), "");
    let catalog = Catalog::of_store(&store, PLACE).unwrap();
    let options = ModelOptions {
        budget: 4 << 20,
        positions: 100,
        manifest: None,
    };
    let mut model = Llama::open(&store, &catalog, &whole, options).unwrap();
    let prompt: Vec<u32> = "The drive reads".bytes().map(u32::from).collect();
    let (tokens, _) = follow(&mut model, &prompt, 64);
    let expected = [
        165, 169, 94, 94, 94, 94, 94, 52, 52, 52, 363, 363, 363, 363, 363, 363, 52, 17, 15, 452,
        212, 48, 16, 324, 145, 94, 301, 452, 452, 121, 452, 452, 127, 212, 158, 452, 452, 452, 452,
        452, 452, 452, 452, 452, 452, 452, 452, 452, 452, 452, 164, 179, 452, 164, 363, 158, 158,
        158, 158, 158, 158, 158, 158, 158,
    ];
    assert_eq!(tokens, expected);
}

#[test]
fn a_mixture_that_cannot_be_is_refused() {
    for (mixture_of, cause) in [
        ((6, 7), "6 experts, and a token 7 of them"),
        ((5000, 2), "5000 experts"),
        ((6, 0), "expert_used_count"),
    ] {
        let mut model = mixture();
        let (count, choices) = mixture_of;
        // Only the keys change: tensors of so many layers would make the file large.
        let mut bytes = file(&model);
        model.config.experts = Some(ExpertMixture { count, choices });
        for (key, from, to) in [
            ("llama.expert_count", 6u32, count),
            ("llama.expert_used_count", 2, choices),
        ] {
            let at = bytes
                .windows(key.len())
                .position(|window| window == key.as_bytes())
                .unwrap();
            let value = &mut bytes[at + key.len() + 4..][..4];
            assert_eq!(value, from.to_le_bytes());
            value.copy_from_slice(&to.to_le_bytes());
        }
        let store = store(&bytes, "");
        let error = open(&store, 1 << 30).err().unwrap().to_string();
        assert!(error.contains(cause), "{cause}: {error}");
    }
}

#[test]
fn a_step_that_fails_can_be_repeated() {
    let bytes = file(&small());
    let good = store(&bytes, "");
    let mut model = open(&good, 1 << 30).unwrap();
    let (expected, _) = follow(&mut model, &[5, 6, 7], 6);
    // Reads end with an error now and then.
    let store = store(&bytes, "&fault=status:0x281@op=read,every=40");
    let mut model = (0..10)
        .find_map(|_| open(&store, 800 << 10).ok())
        .expect("reads succeed mostly");
    let (mut tokens, mut failed) = (Vec::new(), 0);
    let mut next = vec![5, 6, 7];
    while tokens.len() < expected.len() {
        let before = model.position();
        match model.feed(&next) {
            Ok(token) => {
                tokens.push(token);
                next = vec![token];
            }
            Err(error) => {
                failed += 1;
                assert!(failed < 100, "{error}");
                assert_eq!(model.position(), before);
                assert!(
                    matches!(error, Error::Command { .. } | Error::Device { .. }),
                    "{error}"
                );
            }
        }
    }
    assert_eq!(tokens, expected);
    assert!(failed > 0);
}

#[test]
fn a_read_that_fails_is_named() {
    let bytes = file(&small());
    let names = [
        "layer ",
        "what lies at byte",
        "token_embd.weight: ",
        "output_norm.weight: ",
    ];
    let mut seen = [false; 4];
    for nth in 1..100 {
        let store = store(&bytes, &format!("&fault=status:0x281@op=read,nth={nth}"));
        let fed = open(&store, 800 << 10).and_then(|mut model| model.feed(&[1, 2, 3]));
        let Err(error) = fed else {
            assert_eq!(seen, [true; 4]);
            return;
        };
        let text = error.to_string();
        let name = names.iter().position(|name| text.contains(name));
        seen[name.unwrap_or_else(|| panic!("{nth}: {text}"))] = true;
    }
    panic!("reads failed to the last");
}

/// Each layer of a prompt can be a read from the drive.
#[test]
fn a_prompt_is_interrupted_before_any_layer() {
    let store = store(&file(&small()), "");
    let mut model = open(&store, 800 << 10).unwrap();
    let prompt: Vec<u32> = (0..70).map(|at| at * 37 % 300).collect();
    let mut looks = 0;
    let mut count = || {
        looks += 1;
        Ok(())
    };
    let expected = model.feed_until(&prompt, &mut count).unwrap();
    // Two steps of 64 and 6 tokens, each of three layers and the last matrix.
    assert!(looks >= 2 * (3 + 1), "{looks}");
    for stop in 0..looks {
        model.clear();
        let mut left = stop;
        let ended = model.feed_until(&prompt, &mut || match left {
            0 => Err(Error::Interrupted),
            _ => {
                left -= 1;
                Ok(())
            }
        });
        assert!(matches!(ended, Err(Error::Interrupted)), "{stop}");
        assert_eq!(model.position(), 0);
    }
    assert_eq!(model.feed(&prompt).unwrap(), expected);
}

#[test]
fn what_is_no_model_or_does_not_fit_is_refused() {
    let good = small();
    let small_store = store(&file(&good), "");
    let error = |result: nvme_host::Result<Llama>| match result {
        Ok(_) => panic!("it was opened"),
        Err(error) => {
            assert!(matches!(error, Error::Usage { .. }), "{error}");
            error.to_string()
        }
    };
    assert!(error(open(&small_store, 1000)).contains("a budget of 1000 bytes"));
    let catalog = Catalog::of_store(&small_store, PLACE).unwrap();
    let options = ModelOptions {
        budget: 1 << 30,
        positions: 129,
        manifest: None,
    };
    let long = error(Llama::open(&small_store, &catalog, &places, options));
    assert!(long.contains("129 positions do not fit the model, which has 128"));
    let mut model = open(&small_store, 1 << 30).unwrap();
    for (tokens, cause) in [
        (vec![], "the list of tokens is empty"),
        (
            vec![1, 300],
            "token 300 is not in the vocabulary, which has 300",
        ),
        (
            vec![1; 101],
            "101 tokens after position 0 do not fit into 100",
        ),
    ] {
        let error = model.feed(&tokens).unwrap_err();
        assert!(error.to_string().contains(cause), "{error}");
        assert_eq!(error.code(), "usage");
    }
    let config = |change: fn(&mut ModelConfig)| {
        let mut model = small();
        change(&mut model.config);
        model
    };
    for (model, cause) in [
        (
            config(|config| config.kv_heads = 3),
            "the number of heads, 8, is not a multiple of the number of heads of keys, 3",
        ),
        (config(|config| config.layers = 0), "block_count"),
        (
            config(|config| config.head_elements = 512),
            "a head has 512 elements",
        ),
        (config(|config| config.epsilon = 0.0), "epsilon"),
        (
            config(|config| config.epsilon = 2e-42),
            "e-42, no normal number of 32 bits",
        ),
    ] {
        let store = store(&file(&model), "");
        assert!(error(open(&store, 1 << 30)).contains(cause), "{cause}");
    }
    // Names that are cut: the tensors of the second layer, the norms, the architecture.
    for (from, to, cause) in [
        ("blk.1.", "blq.1.", "there is no blk.1."),
        ("output_norm.weight", "output_norm.weighs", "no output_norm"),
        (
            "blk.2.attn_k.weight",
            "blk.2.attn_j.weight",
            "no blk.2.attn_k",
        ),
        (
            "token_embd.weight",
            "token_embd.weighs",
            "no tensor token_embd",
        ),
        (
            "general.architecture",
            "general.architectura",
            "architecture is missing",
        ),
    ] {
        let mut bytes = file(&good);
        let places: Vec<usize> = (0..bytes.len().min(20_000) - from.len())
            .filter(|at| bytes[*at..].starts_with(from.as_bytes()))
            .collect();
        for at in places {
            bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        }
        let store = store(&bytes, "");
        let found = error(open(&store, 1 << 30));
        assert!(found.contains(cause), "{cause}: {found}");
    }
    let odd = SyntheticModel {
        stored: StoredFormat::Q6K,
        config: ModelConfig {
            hidden: 288,
            ..good.config.clone()
        },
        ..good
    };
    assert!(odd.write(&mut Vec::new(), &mut |_| ()).is_err());
}

/// The largest of numbers that are none would be a token like any other.
#[test]
fn weights_that_are_not_finite_lead_to_an_error_and_to_no_token() {
    let good = file(&small());
    let catalog = Catalog::of_store(&store(&good, ""), PLACE).unwrap();
    for (name, value) in [
        ("output_norm.weight", f32::NAN),
        ("blk.1.attn_norm.weight", f32::NAN),
        ("blk.2.ffn_norm.weight", f32::INFINITY),
    ] {
        let mut bytes = good.clone();
        let at = (catalog.get(name).unwrap().offset - PLACE) as usize;
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let mut model = open(&store(&bytes, ""), 1 << 30).unwrap();
        let error = model.feed(&[1, 2, 3]).unwrap_err();
        assert_eq!(error.code(), "usage", "{name}: {error}");
        assert!(error.to_string().contains("finite"), "{name}: {error}");
        assert_eq!(model.position(), 0);
    }
}

/// Models of a family without a tensor or key that it needs, and with one that it does not know.
#[test]
fn families_refuse_what_they_would_not_compute() {
    let refused = |bytes: &[u8], cause: &str| {
        let error = open(&store(bytes, ""), 1 << 30).err();
        let error = error.unwrap_or_else(|| panic!("opened: {cause}"));
        assert!(matches!(error, Error::Usage { .. }), "{error}");
        assert!(error.to_string().contains(cause), "{cause}: {error}");
    };
    let of = |family| file(&SyntheticModel::of_family(family));
    for (family, from, to, cause) in [
        (
            ModelFamily::GptOss,
            "blk.1.attn_sinks",
            "blk.1.attn_sinkz",
            "no blk.1.attn_sinks",
        ),
        (
            ModelFamily::GptOss,
            "blk.0.attn_output.bias",
            "blk.0.attn_output.bial",
            "no blk.0.attn_output.bias",
        ),
        (
            ModelFamily::GptOss,
            "blk.2.ffn_up_exps.bias",
            "blk.2.ffn_up_exps.bial",
            "no blk.2.ffn_up_exps.bias",
        ),
        (
            ModelFamily::GptOss,
            "gpt-oss.attention.sliding_window",
            "gpt-oss.attention.sliding_windoh",
            "gpt-oss.attention.sliding_window",
        ),
        (
            ModelFamily::Qwen3,
            "blk.1.attn_k_norm",
            "blk.1.attn_k_nork",
            "no blk.1.attn_k_norm",
        ),
        (
            ModelFamily::Qwen3Moe,
            "qwen3moe.expert_count",
            "qwen3moe.expert_counz",
            "no key qwen3moe.expert_count",
        ),
    ] {
        let mut bytes = of(family);
        let at = bytes
            .windows(from.len())
            .position(|some| some == from.as_bytes());
        bytes[at.unwrap()..][..to.len()].copy_from_slice(to.as_bytes());
        refused(&bytes, cause);
    }
    let text = |text: &str| {
        [
            &8u32.to_le_bytes()[..],
            &(text.len() as u64).to_le_bytes(),
            text.as_bytes(),
        ]
        .concat()
    };
    for (family, key, value, cause) in [
        (
            ModelFamily::Qwen3,
            "qwen3.rope.scaling.type",
            text("linear"),
            "type is linear",
        ),
        (
            ModelFamily::GptOss,
            "gpt-oss.attention.scale",
            float(0.5),
            "attention.scale is 0.5",
        ),
        (
            ModelFamily::GptOss,
            "gpt-oss.rope.scaling.yarn_log_multiplier",
            float(0.1),
            "yarn_log_multiplier",
        ),
        (
            ModelFamily::GptOss,
            "gpt-oss.rope.scaling.yarn_beta_fast",
            float(0.5),
            "yarn_beta_fast, 0.5, is not above yarn_beta_slow, 1",
        ),
        (
            ModelFamily::Qwen3Moe,
            "qwen3moe.expert_gating_func",
            integer(2),
            "not a softmax",
        ),
        (
            ModelFamily::Qwen3Moe,
            "qwen3moe.expert_weights_scale",
            float(2.5),
            "is 2.5, not 1",
        ),
        (
            ModelFamily::Qwen3Moe,
            "qwen3moe.expert_shared_count",
            integer(1),
            "1 shared experts",
        ),
    ] {
        refused(&with_keys(&of(family), &[(key, value)]), cause);
    }
}

/// Returns the file with additional keys, each a name and the bytes that GGUF writes behind it.
fn with_keys(bytes: &[u8], keys: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let mut more: Vec<u8> = keys
        .iter()
        .flat_map(|(name, value)| [text(name), value.clone()].concat())
        .collect();
    // The tensors after the header keep their alignment.
    let name = text("general.description");
    let rest = more.len() + name.len() + 4 + 8;
    let padding = text(&" ".repeat(rest.next_multiple_of(32) - rest));
    more.extend([&name[..], &8u32.to_le_bytes(), &padding].concat());
    let count = u64::from_le_bytes(bytes[16..24].try_into().unwrap()) + keys.len() as u64 + 1;
    [&bytes[..16], &count.to_le_bytes(), &more, &bytes[24..]].concat()
}

fn float(value: f32) -> Vec<u8> {
    [6u32.to_le_bytes(), value.to_le_bytes()].concat()
}

fn integer(value: u32) -> Vec<u8> {
    [4u32.to_le_bytes(), value.to_le_bytes()].concat()
}

fn flag(value: bool) -> Vec<u8> {
    [&7u32.to_le_bytes()[..], &[value.into()]].concat()
}

fn word(value: &str) -> Vec<u8> {
    let length = (value.len() as u64).to_le_bytes();
    [&8u32.to_le_bytes()[..], &length, value.as_bytes()].concat()
}

/// A key that is left out and a tensor that is left out give other tokens than the model has, without a word.
#[test]
fn a_key_or_a_tensor_that_would_change_the_result_is_refused_by_name() {
    let good = file(&small());
    let cause = |bytes: &[u8]| {
        let store = store(bytes, "");
        let catalog = Catalog::of_store(&store, PLACE).unwrap();
        let tokenizer = Tokenizer::of(&catalog).map(|_| ());
        let opened = open(&store, 1 << 30).map(|_| ());
        let error = tokenizer.and(opened).err()?;
        assert_eq!(error.code(), "usage", "{error}");
        Some(error.to_string())
    };
    for (name, value) in [
        ("llama.rope.scaling.factor", float(1.0)),
        ("llama.rope.scaling.type", word("none")),
        ("llama.attention.scale", float(1.0 / 32f32.sqrt())),
        ("llama.attention.causal", flag(true)),
        ("llama.attention.sliding_window", integer(128)),
        ("llama.vocab_size", integer(300)),
        ("llama.expert_count", integer(0)),
        ("general.name", word("a name")),
        ("tokenizer.chat_template", word("{{ messages }}")),
        ("tokenizer.chat_template.tool_use", word("{{ tools }}")),
        ("tokenizer.ggml.add_bos_token", flag(false)),
        ("tokenizer.ggml.padding_token_id", integer(2)),
    ] {
        assert_eq!(cause(&with_keys(&good, &[(name, value)])), None, "{name}");
    }
    for (name, value) in [
        ("llama.rope.scaling.factor", float(4.0)),
        ("llama.rope.scale_linear", float(0.5)),
        ("llama.rope.scaling.type", word("yarn")),
        ("llama.rope.scaling.attn_factor", float(2.0)),
        ("llama.attention.scale", float(0.25)),
        ("llama.attention.causal", flag(false)),
        ("llama.attention.sliding_window", integer(64)),
        ("llama.attention.group_norm_groups", integer(2)),
        ("llama.vocab_size", integer(301)),
        ("llama.expert_used_count", integer(2)),
        ("llama.logit_scale", float(0.5)),
        ("adapter.type", word("lora")),
        ("tokenizer.ggml.add_bos_token", flag(true)),
        ("tokenizer.ggml.add_sep_token", flag(true)),
        ("tokenizer.ggml.bos_token_id", integer(300)),
        ("tokenizer.ggml.escape_whitespaces", flag(true)),
    ] {
        let key = name.trim_start_matches("tokenizer.ggml.");
        let key = key.trim_end_matches(".type");
        let found = cause(&with_keys(&good, &[(name, value)])).expect(name);
        let bos = "key tokenizer.ggml.bos_token_id";
        assert!(
            found.contains(key) || found.contains(bos),
            "{name}: {found}"
        );
    }
    // A layer more than the keys say.
    let count = b"llama.block_count";
    let at = good.windows(count.len()).position(|bytes| bytes == count);
    let at = at.unwrap() + count.len() + 4;
    let mut bytes = good;
    bytes[at..at + 4].copy_from_slice(&2u32.to_le_bytes());
    let found = cause(&bytes).unwrap();
    assert!(found.contains("the tensor blk.2."), "{found}");
}

#[test]
fn a_tokenizer_writes_every_byte() {
    let store = store(&file(&small()), "");
    let tokenizer = Tokenizer::of(&Catalog::of_store(&store, PLACE).unwrap()).unwrap();
    assert_eq!(tokenizer.len(), 300);
    assert!(!(0..300).any(|token| tokenizer.is_end(token)));
    let text = "Grüße, 123 \u{1F600}\n\t 'll  end";
    let tokens = tokenizer.encode(text).unwrap();
    assert_eq!(tokens.len(), text.len());
    assert_eq!(tokenizer.decode(&tokens), text.as_bytes());
    assert!(tokenizer.encode("").unwrap().is_empty());
}
