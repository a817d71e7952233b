//! Division of a text into words; pairs are never merged across their borders.

use super::refused;
use fancy_regex::Regex;
use nvme_host::{Error, Result};

/// Words, numbers, signs and spaces of GPT-2.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// One digit at a time.
const DIGITS: &str = r"\p{N}";
/// Splits of Llama 3: numbers of three digits at most, and line feeds separately.
const LLAMA3: &str = concat!(
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Splits of Qwen2 and Qwen3: as Llama 3, but one digit at a time.
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// Splits of tiktoken's o200k, which gpt-oss uses: words change where small letters end.
const O200K: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Splits of llama.cpp for a file that names none: signs, then GPT-2's words, then numbers of three digits.
const DEFAULT: [&str; 4] = [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"];

/// Rules of splitting a text into words, by the name that a GGUF file gives.
#[derive(Default)]
pub struct WordSplits {
    splits: Vec<Regex>,
    /// True if a word that is a token is taken whole.
    pub takes_words: bool,
    /// True if texts begin with a token, unless the file says otherwise.
    pub begins: bool,
    /// True if the characters of a text are composed first (NFC).
    pub composes: bool,
}

impl WordSplits {
    pub fn named(name: Option<&str>) -> Result<Self> {
        let plain = Self::default();
        let (patterns, rules): (&[&str], Self) = match name {
            None | Some("default") => (&DEFAULT, plain),
            Some("gpt-2") => (&[GPT2], plain),
            Some("smollm") => (&[DIGITS, GPT2], plain),
            Some("llama-bpe" | "llama3" | "llama-v3") => {
                let rules = Self {
                    takes_words: true,
                    begins: true,
                    ..plain
                };
                (&[LLAMA3], rules)
            }
            Some("qwen2") => {
                let rules = Self {
                    composes: true,
                    ..plain
                };
                (&[QWEN2], rules)
            }
            Some("gpt-4o") => {
                let rules = Self {
                    takes_words: true,
                    ..plain
                };
                (&[O200K], rules)
            }
            Some(name) => {
                return Err(refused(format!("tokenizer.ggml.pre is {name}")));
            }
        };
        let splits = patterns.iter().map(|pattern| Regex::new(pattern));
        let splits = splits.collect::<std::result::Result<_, _>>();
        Ok(Self {
            splits: splits.map_err(|error| Error::internal(error.to_string()))?,
            ..rules
        })
    }

    /// Calls `word` with each word of `text`, which together are the text.
    pub fn each<'t>(
        &self,
        text: &'t str,
        mut word: impl FnMut(&'t str) -> Result<()>,
    ) -> Result<()> {
        let mut parts = vec![text];
        for split in &self.splits {
            let mut next = Vec::new();
            for part in parts {
                words(split, part, &mut next)?;
            }
            parts = next;
        }
        parts.into_iter().try_for_each(&mut word)
    }
}

/// Splits `text` into the matches of `split` and the texts between them.
fn words<'t>(split: &Regex, text: &'t str, words: &mut Vec<&'t str>) -> Result<()> {
    let mut end = 0;
    for found in split.find_iter(text) {
        let found = found.map_err(|error| {
            let cause = format!("the words at byte {end} of the text cannot be split: {error}");
            Error::usage(
                cause,
                "use a shorter text, or one with fewer spaces in a row",
            )
        })?;
        if found.start() > end {
            words.push(&text[end..found.start()]);
        }
        words.push(found.as_str());
        end = found.end();
    }
    if end < text.len() {
        words.push(&text[end..]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use tokenizers::{NormalizedString, Normalizer};

    #[test]
    fn the_remedy_names_the_words_that_are_known() {
        let error = WordSplits::named(Some("other")).err().unwrap();
        for name in ["gpt-2", "smollm", "llama-bpe", "qwen2", "gpt-4o", "default"] {
            assert!(WordSplits::named(Some(name)).is_ok());
            assert!(error.remedy().contains(name), "{name}");
        }
    }

    /// The words in words.json are those of Hugging Face's Qwen2 tokenizer and of tiktoken's o200k
    /// (tests/words_oracle.py).
    #[test]
    fn words_are_those_of_the_models_own_tokenizers() {
        let texts: Vec<String> =
            serde_json::from_str(include_str!("../../tests/tokenizer/texts.json")).unwrap();
        let words: BTreeMap<String, Vec<Vec<usize>>> =
            serde_json::from_str(include_str!("../../tests/tokenizer/words.json")).unwrap();
        assert_eq!(words.len(), 2);
        for (name, words) in words {
            let splits = WordSplits::named(Some(&name)).unwrap();
            assert_eq!(words.len(), texts.len());
            for (text, expected) in texts.iter().zip(words) {
                let mut text = NormalizedString::from(text.as_str());
                if splits.composes {
                    tokenizers::normalizers::NFC.normalize(&mut text).unwrap();
                }
                let mut found = Vec::new();
                let mut word = |word: &str| {
                    found.push(word.len());
                    Ok(())
                };
                splits.each(text.get(), &mut word).unwrap();
                assert_eq!(found, expected, "{name}: {:?}", text.get());
            }
        }
    }
}
