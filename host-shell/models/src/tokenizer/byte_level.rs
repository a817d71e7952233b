//! Byte-pair encoding over bytes, as GPT-2 has it.

use super::refused;
use super::vocabulary::TokenVocabulary;
use super::words::WordSplits;
use crate::metadata::MetadataKeys;
use nvme_host::{Error, Result};
use std::collections::{HashMap, HashSet};
use tokenizers::models::bpe::BPE;
use tokenizers::{Model, NormalizedString, Normalizer};

/// Writes texts as tokens.
pub struct ByteEncoder {
    splits: WordSplits,
    merges: BPE,
    /// Bytes without a token: a text with one of them cannot be encoded.
    missing: Vec<u8>,
}

impl ByteEncoder {
    pub fn of(keys: &MetadataKeys<'_>, vocabulary: &TokenVocabulary) -> Result<Self> {
        let splits = WordSplits::named(keys.text("tokenizer.ggml.pre")?)?;
        if keys.flag("tokenizer.ggml.add_space_prefix")? == Some(true) {
            return Err(refused(
                "tokenizer.ggml.add_space_prefix is true".to_owned(),
            ));
        }
        // Older converters wrote scores for every kind of vocabulary; this one uses the merges alone.
        let _ = keys.get("tokenizer.ggml.scores");
        let name = "tokenizer.ggml.merges";
        let pairs = keys.array(name, "an array of pairs of texts", |value| {
            let pair = value.as_text()?;
            // A first text may begin with a space.
            let (begin, _) = pair.char_indices().nth(1)?;
            let at = begin + pair[begin..].find(' ')?;
            Some((pair[..at].to_owned(), pair[at + 1..].to_owned()))
        })?;
        let mut pairs = pairs.ok_or_else(|| refused(format!("there is no key {name}")))?;
        // Of two equal pairs the first counts.
        let mut seen = HashSet::new();
        pairs.retain(|pair| seen.insert(pair.clone()));
        let pairs = reachable(pairs);
        let mut texts = pairs.iter().flat_map(|(first, second)| {
            let joined = format!("{first}{second}");
            [first.clone(), second.clone(), joined]
        });
        if let Some(text) = texts.find(|text| vocabulary.token(text).is_none()) {
            return Err(refused(format!(
                "{name} makes the text '{text}', for which there is no token"
            )));
        }
        let is_missing = |byte: &u8| vocabulary.token(&sign(*byte).to_string()).is_none();
        Ok(Self {
            missing: (0..=u8::MAX).filter(is_missing).collect(),
            merges: built(
                BPE::builder()
                    .vocab_and_merges(vocabulary.numbers().collect::<Numbers>(), pairs)
                    .ignore_merges(splits.takes_words),
            )?,
            splits,
        })
    }

    /// True if texts begin with a BOS token when the file has no key that decides it.
    pub fn begins_by_default(&self) -> bool {
        self.splits.begins
    }

    pub fn encode(
        &self,
        text: &str,
        tokens: &mut Vec<u32>,
        check: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let mut text = NormalizedString::from(text);
        if self.splits.composes {
            tokenizers::normalizers::NFC
                .normalize(&mut text)
                .map_err(internal)?;
        }
        let text = text.get();
        if let Some(byte) = text.bytes().find(|byte| self.missing.contains(byte)) {
            return Err(refused(format!("it has no token for the byte {byte:#04x}")));
        }
        self.splits.each(text, |word| {
            check()?;
            let word: String = word.bytes().map(sign).collect();
            let found = self.merges.tokenize(&word).map_err(internal)?;
            tokens.extend(found.into_iter().map(|token| token.id));
            Ok(())
        })
    }
}

/// Returns the pairs that can be merged: each of their texts is a character, or the result of another such
/// pair. Other pairs are harmless in a file, since they never apply.
fn reachable(pairs: Vec<(String, String)>) -> Vec<(String, String)> {
    let is_character = |text: &str| text.chars().nth(1).is_none();
    // Pairs by the text that they wait for.
    let mut waiting: HashMap<&str, Vec<usize>> = HashMap::new();
    let mut missing = vec![0; pairs.len()];
    for (at, (first, second)) in pairs.iter().enumerate() {
        for text in [first, second]
            .into_iter()
            .filter(|text| !is_character(text))
        {
            waiting.entry(text).or_default().push(at);
            missing[at] += 1;
        }
    }
    let mut found: Vec<usize> = (0..pairs.len()).filter(|at| missing[*at] == 0).collect();
    let mut next = 0;
    while let Some((first, second)) = found.get(next).map(|at| &pairs[*at]) {
        next += 1;
        let joined = format!("{first}{second}");
        for at in waiting.remove(joined.as_str()).unwrap_or_default() {
            missing[at] -= 1;
            if missing[at] == 0 {
                found.push(at);
            }
        }
    }
    let mut at = 0..;
    let mut pairs = pairs;
    pairs.retain(|_| at.next().is_some_and(|at| missing[at] == 0));
    pairs
}

/// The map of the crate `tokenizers`.
type Numbers = tokenizers::models::bpe::Vocab;

/// Builds the crate's model from lists that were checked before.
fn built(builder: tokenizers::models::bpe::BpeBuilder) -> Result<BPE> {
    // The cache of words grows with a text, and finds little in a text that is encoded once.
    builder.cache_capacity(0).build().map_err(internal)
}

fn internal(error: tokenizers::Error) -> Error {
    Error::internal(error.to_string())
}

/// Returns the bytes that GPT-2 writes as themselves.
fn is_itself(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// Returns the character with which GPT-2 writes a byte: itself, or one of those from U+0100 on, in the order
/// of the bytes.
pub(crate) fn sign(byte: u8) -> char {
    match is_itself(byte) {
        true => char::from(byte),
        false => {
            let before = (0..byte).filter(|byte| !is_itself(*byte)).count();
            char::from_u32(0x100 + before as u32).unwrap_or(char::REPLACEMENT_CHARACTER)
        }
    }
}

/// Returns the bytes that are written as `text`; for a character that stands for no byte, its UTF-8.
pub(super) fn bytes_of(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for character in text.chars() {
        match (0..=u8::MAX).find(|byte| sign(*byte) == character) {
            Some(byte) => bytes.push(byte),
            None => bytes.extend(character.to_string().as_bytes()),
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::reachable;

    #[test]
    fn a_pair_counts_when_its_texts_can_be_made() {
        let pairs = |texts: &[&str]| -> Vec<(String, String)> {
            let pairs = texts.iter().filter_map(|text| text.split_once(' '));
            pairs
                .map(|(first, second)| (first.to_owned(), second.to_owned()))
                .collect()
        };
        let all = pairs(&["ab ab", "a b", "<2 56>", "abab c", "x y", "yx y", "x yx"]);
        let some = pairs(&["ab ab", "a b", "abab c", "x y"]);
        assert_eq!(reachable(all), some);
    }
}
