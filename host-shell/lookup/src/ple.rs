//! The lookup tables of Qwen3.8-Flash-Next (`qwen4_exp`), its "per-layer embedding": n-grams of 2 and 3 tokens, which do
//! not reach across the end of a text.
//!
//! Source: `Qwen4ExpTextNGramEmbedding` of transformers 5.24.0. Compared with its rows: `tests/ple.rs`.

use crate::settings::{ModelSettings, bad, parsed};
use crate::{LookupError, NgramBoundary, NgramHash, NgramTables, primes};
use serde_json::Value;

/// The seed of a table's multipliers is the configuration's seed plus the table's number times this.
const SEED_STEP: u64 = 10_007;
/// Step of the generator SplitMix64.
const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;
/// Limits of a configuration, many times the published values, so that a wrong one ends at once.
const MOST: u64 = 1 << 40;
const MOST_HEADS: u64 = 256;
const LONGEST: u64 = 16;
/// Largest number of hashes of all layers together.
const MOST_HASHES: u64 = 4096;
const MOST_LAYERS: u64 = 1 << 16;

/// Makes the hashes of a model from the text of its config.json.
///
/// # Errors
/// [`LookupError`], with the key, for a configuration that lacks a key or has an impossible value.
pub fn tables(config: &str) -> Result<NgramTables, LookupError> {
    let value = parsed(config)?;
    let settings = ModelSettings::of(&value, "text_config")?;
    // Counted from 1 in the configuration, from 0 in names of tensors.
    let mut layers = settings.numbers("ple_layer_ids", 1, MOST_LAYERS)?;
    layers.sort_unstable();
    layers.dedup();
    layers.iter_mut().for_each(|layer| *layer -= 1);
    let longest = settings.number_or("ngram_size", 3, 2, LONGEST)?;
    let of_length = settings.number_or("heads_per_ngram", 8, 1, MOST_HEADS)?;
    let base = settings.number_or("ngram_vocab_size_base", 20_000_000, 2, MOST)?;
    let divisor = settings.number_or("make_ngram_vocab_size_divisible_by", 128, 1, MOST)?;
    let seed = settings.number_or("seed", 1234, 0, u64::MAX)?;
    let tokens = settings.number("vocab_size", 1, 1 << 30)?;
    let end = settings.numbers("eos_token_id", 0, tokens - 1)?[0];
    let heads = (longest - 1) * of_length;
    let width = match settings.number("ple_embed_dim", 1, MOST) {
        Err(LookupError::MissingKey(_)) => settings.number("hidden_size", 1, MOST)?,
        found => found?,
    };
    if layers.len() as u64 * heads > MOST_HASHES {
        let rule = format!("so few that there are at most {MOST_HASHES} hashes");
        return Err(bad("heads_per_ngram", &Value::from(of_length), &rule));
    }
    if !width.is_multiple_of(heads) {
        let rule = format!("a multiple of the {heads} heads");
        return Err(bad("ple_embed_dim", &Value::from(width), &rule));
    }
    let mut hashes = Vec::new();
    let mut prime = base - 1;
    for number in 0..layers.len() as u64 {
        let mut rows = Vec::new();
        for head in 0..heads {
            prime = primes::next_above(prime).ok_or_else(|| {
                bad(
                    "ngram_vocab_size_base",
                    &Value::from(base),
                    "below the largest primes of 63 bits",
                )
            })?;
            rows.push((2 + (head / of_length) as usize, prime));
        }
        let edge = (end as i64, NgramBoundary::Padding);
        let multipliers = multipliers(seed, number, longest, tokens);
        hashes.push(NgramHash::new(tokens, multipliers, rows, edge));
    }
    Ok(NgramTables::new(layers, hashes, width / heads, divisor))
}

/// Returns the name of the tensor of shard `shard` of the table of `layer` in published files.
pub fn tensor_name(layer: u64, shard: u64) -> String {
    format!(
        "model.language_model.layers.{layer}.ple.ple_embedding.ngram_embedding.shard_{shard}.weight"
    )
}

fn multipliers(seed: u64, number: u64, longest: u64, tokens: u64) -> Vec<u64> {
    let half = (i64::MAX as u64 / tokens / 2).max(1);
    let base = seed.wrapping_add(SEED_STEP.wrapping_mul(number));
    let of = |place: u64| {
        let mixed = split_mix(base.wrapping_add(GAMMA.wrapping_mul(place + 1)));
        2 * (mixed % half) + 1
    };
    (0..longest).map(of).collect()
}

/// Returns SplitMix64 of `value` (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
fn split_mix(value: u64) -> u64 {
    let value = value.wrapping_add(GAMMA);
    let value = (value ^ value >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ value >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ value >> 31
}
