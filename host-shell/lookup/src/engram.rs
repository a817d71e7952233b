//! "Engram": the lookup tables of DeepSeek-V4.1. Tokens whose texts differ only in accents, case or kind of white space
//! have one class; each layer with a table hashes the classes of 2, 3 and 4 tokens by several heads, with multipliers
//! and own primes.
//!
//! Source: the published reference (`inference/engram.py` of deepseek-ai/DeepSeek-V4.1-Flash), as restated by engines
//! that agree on it. Compared with the rows of FreeToken 0.2.1's `EngramHash`: `tests/engram.rs`.

use crate::numpy::NumpyRandom;
use crate::settings::{ModelSettings, bad, parsed};
use crate::{LookupError, NgramBoundary, NgramHash, NgramTables, primes};
use serde_json::Value;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use tokenizers::normalizers::{
    Lowercase, NFD, NFKC, Replace, Sequence, Strip, StripAccents, replace::ReplacePattern,
};
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper, Tokenizer};

/// Stands for a text that is one space while spaces at the ends are removed: a character that no text has.
const LONE_SPACE: &str = "\u{e000}";
/// Character that a decoder writes instead of bytes that are not valid UTF-8.
const NO_TEXT: char = '\u{fffd}';
/// The seed of a layer's multipliers is the layer's number times this.
const SEED: u64 = 10_007;
/// Limits of a configuration, many times the published values, so that a wrong one ends at once.
const MOST_LAYERS: u64 = 1 << 16;
const MOST_HEADS: u64 = 256;
const LONGEST: u64 = 16;
const MOST_ROWS: u64 = 1 << 40;
/// Largest number of hashes of all layers together.
const MOST_HASHES: u64 = 4096;
/// Above this number of classes numpy would draw multipliers of 32 bits.
const MOST_CLASSES: u64 = (1 << 30) - 1;

/// Makes the hashes of a model from the text of its config.json and the class of each token: see [`classes_of`].
///
/// # Errors
/// [`LookupError`], with the key, for a configuration that lacks a key or has an impossible value, and if the number of
/// classes or rows differs from the configuration.
pub fn tables(config: &str, classes: Vec<u32>) -> Result<NgramTables, LookupError> {
    let value = parsed(config)?;
    let settings = ModelSettings::of(&value, "text_config")?;
    let layers = settings.numbers("engram_layer_ids", 0, MOST_LAYERS)?;
    let stated = settings.numbers("engram_num_embeddings", 1, MOST_ROWS)?;
    let longest = settings.number("engram_max_ngram_size", 2, LONGEST)?;
    let vocabulary = settings.number("engram_vocab_size", 2, MOST_ROWS)?;
    let heads = settings.number("engram_n_heads", 1, MOST_HEADS)?;
    let columns = settings.number("engram_head_dim", 1, MOST_ROWS)?;
    let padding = settings.number("engram_pad_token_id", 0, u32::MAX.into())?;
    let class_count = settings.number("engram_compressed_vocab_size", 1, MOST_CLASSES)?;
    let unique: BTreeSet<&u64> = layers.iter().collect();
    if unique.len() != layers.len() || stated.len() != layers.len() {
        let rule = "layers that differ, with as many numbers in engram_num_embeddings";
        return Err(bad("engram_layer_ids", &Value::from(layers), rule));
    }
    let computed = classes.iter().max().map_or(0, |most| u64::from(*most) + 1);
    if computed != class_count {
        return Err(LookupError::OtherClasses {
            tokens: classes.len(),
            computed: computed as usize,
            stated: class_count,
        });
    }
    if layers.len() as u64 * (longest - 1) * heads > MOST_HASHES {
        let rule = format!("so few that there are at most {MOST_HASHES} hashes");
        return Err(bad("engram_n_heads", &Value::from(heads), &rule));
    }
    if padding >= classes.len() as u64 {
        let rule = format!("one of the tokenizer's {} tokens", classes.len());
        return Err(bad("engram_pad_token_id", &Value::from(padding), &rule));
    }
    let classes: Arc<[u32]> = classes.into();
    let mut used = BTreeSet::new();
    let mut hashes = Vec::new();
    for (layer, stated) in layers.iter().zip(stated) {
        let mut rows = Vec::new();
        for length in 2..=longest as usize {
            let primes = unused_primes(vocabulary, heads, &mut used)?;
            rows.extend(primes.into_iter().map(|prime| (length, prime)));
        }
        let edge = (padding as i64, NgramBoundary::Image);
        let hash = NgramHash::new(
            class_count,
            multipliers(*layer, longest, class_count),
            rows,
            edge,
        )
        .with_classes(Arc::clone(&classes));
        if hash.rows() != stated {
            return Err(LookupError::OtherRows {
                layer: *layer,
                stated,
                computed: hash.rows(),
            });
        }
        hashes.push(hash);
    }
    Ok(NgramTables::new(layers, hashes, columns, 1))
}

/// Returns the name of the tensor of the rows of `layer` in published files.
pub fn tensor_name(layer: u64) -> String {
    format!("layers.{layer}.engram.embed.weight")
}

/// Returns `count` primes, ascending from `vocabulary` on, that are not in `used`, and adds them to `used`.
fn unused_primes(
    vocabulary: u64,
    count: u64,
    used: &mut BTreeSet<u64>,
) -> Result<Vec<u64>, LookupError> {
    let mut prime = vocabulary - 1;
    let mut found = Vec::new();
    while (found.len() as u64) < count {
        prime = primes::next_above(prime).ok_or_else(|| {
            bad(
                "engram_vocab_size",
                &Value::from(vocabulary),
                "below the largest primes of 63 bits",
            )
        })?;
        if used.insert(prime) {
            found.push(prime);
        }
    }
    Ok(found)
}

/// Returns the odd multipliers of a layer, below 2^63 divided by the number of classes.
fn multipliers(layer: u64, longest: u64, classes: u64) -> Vec<u64> {
    let bound = (i64::MAX as u64 / classes / 2).max(1);
    let mut random = NumpyRandom::new(SEED * layer);
    (0..longest).map(|_| random.below(bound) * 2 + 1).collect()
}

/// Returns the class of each token of the tokenizer in `json`, the text of a tokenizer.json: tokens whose texts are equal
/// without accents, case and kind of white space have one class, and classes are numbered as they appear.
///
/// # Errors
/// [`LookupError::Tokenizer`] for a text that is no tokenizer.
pub fn classes_of(json: &[u8]) -> Result<Vec<u32>, LookupError> {
    let failed = |error: tokenizers::Error| LookupError::Tokenizer(error.to_string());
    let tokenizer = Tokenizer::from_bytes(json).map_err(failed)?;
    let same = same_reading().map_err(failed)?;
    let count = tokenizer.get_vocab_size(true) as u32;
    let mut known: HashMap<String, u32> = HashMap::new();
    let mut classes = Vec::with_capacity(count as usize);
    for token in 0..count {
        let text = tokenizer.decode(&[token], false).map_err(failed)?;
        let key = if text.contains(NO_TEXT) {
            let name = tokenizer.id_to_token(token);
            name.ok_or_else(|| LookupError::Tokenizer(format!("it has no token {token}")))?
        } else {
            let mut normalized = NormalizedString::from(text.as_str());
            same.normalize(&mut normalized).map_err(failed)?;
            match normalized.get() {
                "" => text,
                normalized => normalized.to_owned(),
            }
        };
        let next = known.len() as u32;
        classes.push(*known.entry(key).or_insert(next));
    }
    Ok(classes)
}

/// Returns the steps that remove accents, case and kind of white space from a token's text.
fn same_reading() -> tokenizers::Result<Sequence> {
    let regex = |pattern: &str, by: &str| {
        let pattern = ReplacePattern::Regex(pattern.to_owned());
        Replace::new(pattern, by).map(NormalizerWrapper::Replace)
    };
    Ok(Sequence::new(vec![
        NormalizerWrapper::NFKC(NFKC),
        NormalizerWrapper::NFD(NFD),
        NormalizerWrapper::StripAccents(StripAccents),
        NormalizerWrapper::Lowercase(Lowercase),
        regex(r"[ \t\r\n]+", " ")?,
        regex("^ $", LONE_SPACE)?,
        NormalizerWrapper::StripNormalizer(Strip::new(true, true)),
        NormalizerWrapper::Replace(Replace::new(LONE_SPACE, " ")?),
    ]))
}
